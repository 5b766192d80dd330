//! The LUKS2 header of a state disk: whether it is ours, its geometry, opening it, marking it. Metadata and binary fields are
//! arbitrary. The checksums are made right, so that the fuzzer reaches the rules after their check; or wrong, or right in only one
//! copy.
//!
//! Input: a byte of modes, a number of changes to the binary header (offset u16 < 512, value), the JSON.
#![no_main]

use std::io::{self, Read, Seek, SeekFrom, Write};

use base::crypto::Secret;
use bootstrapper::state::peers_token;
use disk::luks::{self, Device, DiskState, Error, Header, Integrity, Peers, Probe};
use libfuzzer_sys::fuzz_target;
use ring::digest::{SHA256, digest};
use serde_json::Value;

/// Header and keyslot area; the rest of the device is zeros.
const HEAD: usize = 448 << 10;
const SIZE: u64 = 32 << 20;
const COPY: usize = 16 << 10;
const CHECKSUM: usize = 448;
/// The most argon2id (passes × KiB) and iterations of PBKDF2 with which a run stays quick.
const MAX_WORK: u64 = 1024;
const MAX_ITERATIONS: u64 = 4096;

struct Disk {
    head: Vec<u8>,
    at: u64,
}

impl Read for Disk {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = buf.len().min(SIZE.saturating_sub(self.at) as usize);
        let buf = &mut buf[..len];
        buf.fill(0);
        if let Some(there) = self.head.get(self.at as usize..) {
            let both = len.min(there.len());
            buf[..both].copy_from_slice(&there[..both]);
        }
        self.at += len as u64;
        Ok(len)
    }
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let at = self.at as usize;
        let room = self
            .head
            .get_mut(at..at + bytes.len())
            .ok_or(io::ErrorKind::WriteZero)?;
        room.copy_from_slice(bytes);
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Disk {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.at = match to {
            SeekFrom::Start(at) => at,
            SeekFrom::End(back) => SIZE
                .checked_add_signed(back)
                .ok_or(io::ErrorKind::InvalidInput)?,
            SeekFrom::Current(by) => self
                .at
                .checked_add_signed(by)
                .ok_or(io::ErrorKind::InvalidInput)?,
        };
        Ok(self.at)
    }
}

impl Device for Disk {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|input: &[u8]| {
    let [mode, changes, rest @ ..] = input else {
        return;
    };
    let Some((changes, json)) = rest.split_at_checked(3 * usize::from(changes % 16)) else {
        return;
    };
    let mut disk = Disk {
        head: vec![0; HEAD],
        at: 0,
    };
    // which copies exist, which have a right checksum, and whether only the secondary is changed
    for (number, magic) in [b"LUKS\xba\xbe", b"SKUL\xba\xbe"].into_iter().enumerate() {
        if mode >> number & 1 == 0 {
            let right_sum = mode >> (number + 2) & 1 == 0;
            let changes = if mode & 0x10 != 0 && number == 0 {
                &[][..]
            } else {
                changes
            };
            let copy = &mut disk.head[number * COPY..(number + 1) * COPY];
            write_copy(
                copy,
                magic,
                (number * COPY) as u64,
                changes,
                json,
                right_sum,
            );
        }
    }
    let mut header = match luks::probe(&mut disk).expect("memory does not fail") {
        Probe::Luks(header) => header,
        Probe::Unknown(why) => return assert!(why.len() < 4096),
        Probe::Blank | Probe::Unfinished => return,
    };
    let _ = (
        header.uuid(),
        header.state(),
        header.is_keyless(),
        format!("{header:?}"),
    );
    if let Err(error) = header.check_ours(Integrity::Required) {
        assert!(matches!(error, Error::NotOurs(_)));
    }
    let ours = header.check_ours(Integrity::Optional).is_ok();
    assert_eq!(header.geometry().is_ok(), ours);
    // only if two bits are set: this is a hundred times slower than the rest
    if ours && mode & 0xc0 == 0xc0 && is_cheap(header.metadata()) {
        // the area contains only zeros and so no key
        let error = header
            .unlock(&mut disk, &Secret::new(b"passphrase".to_vec()))
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(error, Error::WrongPassphrase { .. } | Error::Io { .. }),
            "{error}"
        );
    }
    if header.repair(&mut disk).is_ok() {
        let again = probe_luks(&mut disk);
        assert!(again.copies_agree() && again.metadata() == header.metadata());
    }
    let known = header.peers();
    if let Ok(Some(peers)) = &known {
        assert!(peers.control_planes.len() <= 32);
    }
    let peers = Peers {
        load_balancer: Some("cluster.example".into()),
        control_planes: vec![[10, 0, 0, 1].into()],
    };
    if let Ok(has_changed) = peers_token::set(&mut header, &mut disk, &peers) {
        assert_eq!(has_changed, known != Ok(Some(peers.clone())));
        let again = probe_luks(&mut disk);
        assert_eq!(again.peers(), Ok(Some(peers)));
    }
    if header.mark_for_reset(&mut disk).is_ok() {
        let again = probe_luks(&mut disk);
        assert!(again.copies_agree() && again.metadata() == header.metadata());
        assert_eq!(again.state(), DiskState::Uninitialized);
    }
});

fn probe_luks(disk: &mut Disk) -> Header {
    match luks::probe(disk) {
        Ok(Probe::Luks(header)) => header,
        other => panic!("a header was written, and found is {other:?}"),
    }
}

fn write_copy(
    copy: &mut [u8],
    magic: &[u8],
    at: u64,
    changes: &[u8],
    json: &[u8],
    right_sum: bool,
) {
    let mut put =
        |offset: usize, bytes: &[u8]| copy[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, magic);
    put(6, &2u16.to_be_bytes());
    put(8, &(COPY as u64).to_be_bytes());
    put(16, &3u64.to_be_bytes());
    put(72, b"sha256");
    put(168, b"8a2a7c9e-93e9-4b1c-8f06-5d0f4f3a1c11");
    put(256, &at.to_be_bytes());
    put(4096, &json[..json.len().min(COPY - 4096)]);
    for change in changes.chunks_exact(3) {
        put(
            usize::from(u16::from_le_bytes([change[0], change[1]]) % 512),
            &change[2..],
        );
    }
    if right_sum {
        copy[CHECKSUM..CHECKSUM + 64].fill(0);
        let sum = digest(&SHA256, copy);
        copy[CHECKSUM..CHECKSUM + 32].copy_from_slice(sum.as_ref());
    }
}

fn is_cheap(metadata: &Value) -> bool {
    let members = |name: &str| {
        metadata[name]
            .as_object()
            .into_iter()
            .flat_map(|section| section.values())
    };
    let number = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
    let work = members("keyslots")
        .map(|slot| number(&slot["kdf"]["time"]).saturating_mul(number(&slot["kdf"]["memory"])))
        .fold(0, u64::saturating_add);
    work <= MAX_WORK
        && members("digests").all(|digest| number(&digest["iterations"]) <= MAX_ITERATIONS)
}
