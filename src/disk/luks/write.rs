//! The operations that change the disk: format, commit, reset, repair. Each is a sequence of
//! durable steps.
//!
//! Every write is followed by a sync before the next step. After a power failure all earlier steps
//! are complete, any part of the current step is written (in whole 512-byte sectors), and no later
//! step has begun. [`probe`] then returns:
//!
//! | power fails while writing | primary | secondary | keyslot area | probe |
//! |---|---|---|---|---|
//! | **format of a blank disk**: the marker | zeros | zeros | zeros | `Blank` or `Unfinished` |
//! | ... the keyslot area | zeros | zeros | torn | `Unfinished` |
//! | ... the primary | torn | zeros | new | `Unfinished`, or uninitialized |
//! | ... the secondary | new | torn | new | uninitialized |
//! | ... the cleared marker | new | new | new | uninitialized |
//! | **format of an uninitialized disk**: the area | old | old | torn | uninitialized |
//! | ... the primary | torn | old | new | uninitialized (old) |
//! | ... the secondary | new | torn | new | uninitialized (new) |
//! | **commit**: the new area | old | old | old whole, new torn | uninitialized, old passphrase |
//! | ... the primary | torn | old | both whole | uninitialized, old passphrase |
//! | ... the secondary | new | torn | both whole | **initialized, new passphrase** |
//! | ... zeros over the old area | new | new | old torn, new whole | initialized, new passphrase |
//! | **reset**: the primary | torn | old | untouched | initialized |
//! | ... the secondary | new | torn | untouched | uninitialized |
//!
//! If only one copy is valid and current at the start, the other copy is written first, so that
//! there is always a valid copy. A keyslot area of an initialized disk is written only when neither
//! copy refers to it any more.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use serde_json::{Map, Value};

use super::cluster_token::{self, ClusterToken};
use super::device::{Device, read_at, write_at};
use super::error::{Error, io_error};
use super::header::{self, Binary, Copy, Header};
use super::layout::{
    AREA_SIZE, DATA_OFFSET, FIRST_AREA, HDR_SIZE, MARKER, MARKER_OFFSET, MIN_DEVICE_SIZE,
    VOLUME_KEY_LEN,
};
use super::metadata::{self, DiskState, Integrity};
use super::peers::PEERS_TYPE;
use super::probe::{Probe, probe};
use super::{json, keyslot, token};
use base::crypto::{self, Secret};

/// Length in bytes of the dm-integrity superblock at the start of the data segment. The kernel
/// initializes it if it is all zeros.
const INTEGRITY_SUPERBLOCK_LEN: usize = 4096;
/// Bytes that are wiped at once.
const WIPE_CHUNK: usize = 64 << 10;

/// Formats a state disk: a new UUID, `volume_key` (96 bytes) in keyslot 0 under `passphrase`, and
/// the token with `false`. Durable on return. The rest of the header area contains zeros
/// afterwards, so no earlier key remains on the disk. The dm-integrity superblock contains zeros
/// too, and the kernel initializes it.
///
/// Overwrites only a blank disk, a disk whose format was interrupted (by us: [`Probe::Unfinished`];
/// by Constellation: [`Header::is_keyless`]), and an uninitialized state disk. To format an
/// initialized disk, call [`Header::mark_for_reset`] first. Every other disk is refused with
/// [`Error::WouldOverwrite`]. Other errors: [`Error::Refused`], [`Error::Io`].
pub fn format(
    dev: &mut impl Device,
    volume_key: &Secret,
    passphrase: &Secret,
) -> Result<Header, Error> {
    if volume_key.len() != VOLUME_KEY_LEN {
        return Err(Error::Refused(format!(
            "the volume key has {} bytes, expected {VOLUME_KEY_LEN}",
            volume_key.len()
        )));
    }
    let size = dev
        .seek(SeekFrom::End(0))
        .map_err(io_error("read the size of the disk"))?;
    if size < MIN_DEVICE_SIZE {
        return Err(Error::Refused(format!(
            "the device has {size} bytes, a state disk needs at least {MIN_DEVICE_SIZE}"
        )));
    }
    let old = overwritable(dev)?;

    let kdf = metadata::our_kdf(crypto::random());
    let area = keyslot::seal(&kdf, volume_key, passphrase)?;
    let salt = crypto::random();
    let digest = keyslot::digest_of(volume_key, &salt, metadata::OUR_DIGEST_ITERATIONS);
    let mut header = Header {
        binary: Binary {
            hdr_size: HDR_SIZE,
            seqid: old.as_ref().map_or(0, |old| old.binary.seqid),
            label: [0; 48],
            uuid: [0; 40],
            subsystem: [0; 48],
        },
        metadata: metadata::new(
            metadata::keyslot(VOLUME_KEY_LEN, FIRST_AREA, &kdf),
            &salt,
            &digest,
        ),
        // the valid copy of an old header is written last
        good: old.as_ref().map_or([false; 2], |old| old.good),
        failed: false,
    };
    let uuid = header::random_uuid();
    header.binary.uuid[..uuid.len()].copy_from_slice(uuid.as_bytes());

    write_durably(dev, MARKER_OFFSET, &MARKER, "write the format marker")?;
    if old.is_some() {
        wipe(dev, FIRST_AREA + AREA_SIZE..MARKER_OFFSET)?;
    }
    write_at(dev, DATA_OFFSET, &[0; INTEGRITY_SUPERBLOCK_LEN])
        .map_err(io_error("clear the integrity superblock"))?;
    write_durably(dev, FIRST_AREA, &area, "write the keyslot area")?;
    let metadata = header.metadata.clone();
    header.store(dev, metadata)?;
    write_durably(
        dev,
        MARKER_OFFSET,
        &[0; MARKER.len()],
        "clear the format marker",
    )?;
    Ok(header)
}

/// Returns the header that a format may overwrite, if there is one; an error if the disk must not
/// be overwritten.
fn overwritable(dev: &mut (impl Read + Seek)) -> Result<Option<Header>, Error> {
    let refuse = |what: String| Err(Error::WouldOverwrite(what));
    match probe(dev)? {
        Probe::Blank | Probe::Unfinished => Ok(None),
        Probe::Unknown(what) => refuse(what),
        Probe::Luks(header) if header.is_keyless() => Ok(Some(header)),
        Probe::Luks(header) => match (header.check_ours(Integrity::Optional), header.state()) {
            (Err(why), _) => refuse(format!("something else ({why})")),
            (Ok(()), DiskState::Initialized) => refuse("an initialized state disk".into()),
            (Ok(()), DiskState::Unmarked) => {
                refuse("a LUKS2 disk without the token of a state disk".into())
            }
            (Ok(()), DiskState::Uninitialized) => Ok(Some(header)),
        },
    }
}

impl Header {
    /// Commits the disk with one write of the metadata: keyslot 0 holds `volume_key` under the
    /// passphrase `new`, the disk is marked as initialized, and the cluster token is added. Durable
    /// on return; other keyslots and tokens are preserved.
    ///
    /// The new key material is written to a free area, and the old area is wiped last. If only the
    /// wipe fails, the disk is committed, and the failure is logged. Errors:
    /// [`Error::Refused`], [`Error::NotOurs`], [`Error::NoRoom`], [`Error::ProbeAgain`],
    /// [`Error::Io`].
    pub fn replace_passphrase_and_mark(
        &mut self,
        dev: &mut impl Device,
        volume_key: &Secret,
        new: &Secret,
        cluster: &ClusterToken,
    ) -> Result<(), Error> {
        let now = self.checked(Integrity::Optional)?;
        if volume_key.len() != now.key_size || !keyslot::matches(&now.digest, volume_key) {
            let why = "the volume key does not match this LUKS2 header";
            return Err(Error::Refused(why.into()));
        }
        let offset = now
            .free_area(now.key_size)
            .ok_or(Error::NoRoom("another keyslot area"))?;
        let kdf = metadata::our_kdf(crypto::random());
        let mut metadata = self.metadata.clone();
        metadata::set_keyslot(
            &mut metadata,
            metadata::keyslot(now.key_size, offset, &kdf),
            now.digest_id,
        );
        metadata::set_token(&mut metadata, true);
        cluster_token::set(&mut metadata, cluster)?;
        let area = keyslot::seal(&kdf, volume_key, new)?;

        self.repair(dev)?;
        write_durably(dev, offset, &area, "write the new keyslot area")?;
        self.store(dev, metadata)?;
        if let Some((old, size)) = now.keyslot_area()
            && let Err(e) = wipe(dev, old..old + size)
        {
            log::warn!("cannot wipe the keyslot area of the earlier passphrase: {e}");
        }
        Ok(())
    }

    /// Adds the cluster token to a disk that has none, with one write of the metadata. Durable on
    /// return.
    ///
    /// Errors: [`Error::NotOurs`], [`Error::NoRoom`], [`Error::ProbeAgain`], [`Error::Io`].
    pub fn add_cluster_token(
        &mut self,
        dev: &mut impl Device,
        token: &ClusterToken,
    ) -> Result<(), Error> {
        self.edit(dev, |metadata| cluster_token::set(metadata, token))
    }

    /// Writes the token of the type [`PEERS_TYPE`] with these fields, with one write of the metadata.
    /// Durable on return.
    ///
    /// Errors: [`Error::NotOurs`], [`Error::NoRoom`], [`Error::ProbeAgain`], [`Error::Io`].
    pub fn set_peers_token(
        &mut self,
        dev: &mut impl Device,
        mut fields: Map<String, Value>,
    ) -> Result<(), Error> {
        fields.insert("type".into(), PEERS_TYPE.into());
        fields.insert("keyslots".into(), Value::Array(vec![]));
        // token 1 is the cluster's
        self.edit(dev, |metadata| token::set(metadata, 2, fields.into()))
    }

    /// Marks the disk as uninitialized and removes the cluster token, so that the next boot formats
    /// it. Durable on return.
    ///
    /// Errors: [`Error::NotOurs`], [`Error::NoRoom`], [`Error::ProbeAgain`], [`Error::Io`].
    pub fn mark_for_reset(&mut self, dev: &mut impl Device) -> Result<(), Error> {
        self.edit(dev, |metadata| {
            metadata::set_token(metadata, false);
            token::remove(metadata, cluster_token::TYPE);
            Ok(())
        })
    }

    fn edit(
        &mut self,
        dev: &mut impl Device,
        change: impl FnOnce(&mut Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.checked(Integrity::Optional)?;
        let mut metadata = self.metadata.clone();
        change(&mut metadata)?;
        self.store(dev, metadata)
    }

    /// Rewrites a copy on disk that is damaged or older than this header. Does nothing if both
    /// copies are valid and current.
    ///
    /// Each boot calls this: an outdated copy must not become the only valid copy.
    pub fn repair(&mut self, dev: &mut impl Device) -> Result<(), Error> {
        for copy in [Copy::Primary, Copy::Secondary] {
            if !self.good[copy as usize] {
                log::info!("rewriting the {} LUKS2 header", copy.name());
                let text = json::to_text(&self.metadata);
                self.write_copy(dev, copy, &self.binary.clone(), &text)?;
            }
        }
        Ok(())
    }

    /// Writes `metadata` to both copies with the next sequence id. A copy that is not current is
    /// written first.
    pub(super) fn store(&mut self, dev: &mut impl Device, metadata: Value) -> Result<(), Error> {
        let text = json::to_text(&metadata);
        let mut binary = self.binary.clone();
        binary.seqid = binary
            .seqid
            .checked_add(1)
            .ok_or(Error::NoRoom("another sequence id"))?;
        let order = match self.good {
            [true, false] => [Copy::Secondary, Copy::Primary],
            _ => [Copy::Primary, Copy::Secondary],
        };
        for copy in order {
            self.write_copy(dev, copy, &binary, &text)?;
        }
        (self.binary, self.metadata) = (binary, metadata);
        Ok(())
    }

    fn write_copy(
        &mut self,
        dev: &mut impl Device,
        copy: Copy,
        binary: &Binary,
        json: &str,
    ) -> Result<(), Error> {
        if self.failed {
            return Err(Error::ProbeAgain);
        }
        let bytes = binary
            .encode(copy, json)
            .ok_or(Error::NoRoom("its metadata"))?;
        let at = match copy {
            Copy::Primary => 0,
            Copy::Secondary => binary.hdr_size,
        };
        // until the write is known to be durable, the state of the disk is unknown
        self.failed = true;
        write_durably(dev, at, &bytes, "write the LUKS2 header")?;
        self.failed = false;
        self.good[copy as usize] = true;
        Ok(())
    }
}

fn write_durably(
    dev: &mut impl Device,
    offset: u64,
    bytes: &[u8],
    doing: &'static str,
) -> Result<(), Error> {
    write_at(dev, offset, bytes)
        .and_then(|()| dev.sync())
        .map_err(io_error(doing))
}

/// Durably overwrites all bytes in `range` with zeros, and skips blocks that are already zeros.
fn wipe(dev: &mut impl Device, range: Range<u64>) -> Result<(), Error> {
    let zeros = vec![0; WIPE_CHUNK];
    let mut buf = vec![0; WIPE_CHUNK];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(WIPE_CHUNK as u64) as usize;
        read_at(dev, at, &mut buf[..len]).map_err(io_error("read the area to be wiped"))?;
        if buf[..len] != zeros[..len] {
            write_at(dev, at, &zeros[..len]).map_err(io_error("wipe old key material"))?;
        }
        at += len as u64;
    }
    dev.sync().map_err(io_error("wipe old key material"))
}
