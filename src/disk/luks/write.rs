//! What changes the disk: format, commit, reset, repair. Each is a sequence of durable steps.
//!
//! Every write is followed by a sync before the next step, so that a power loss leaves: all earlier steps done, any
//! part of the current one (in whole 512-byte sectors), nothing of a later one. What [`probe`] then says:
//!
//! | power loss while writing | primary | secondary | keyslot area | probe |
//! |---|---|---|---|---|
//! | **format of a blank disk**: the marker | zeros | zeros | zeros | `Blank` or `Unfinished` |
//! | ... the keyslot area | zeros | zeros | torn | `Unfinished` |
//! | ... the primary | torn | zeros | new | `Unfinished`, or uninitialised |
//! | ... the secondary | new | torn | new | uninitialised |
//! | ... the cleared marker | new | new | new | uninitialised |
//! | **format of an uninitialised disk**: the area | old | old | torn | uninitialised |
//! | ... the primary | torn | old | new | uninitialised (old) |
//! | ... the secondary | new | torn | new | uninitialised (new) |
//! | **commit**: the new area | old | old | old whole, new torn | uninitialised, old passphrase |
//! | ... the primary | torn | old | both whole | uninitialised, old passphrase |
//! | ... the secondary | new | torn | both whole | **initialised, new passphrase** |
//! | ... zeros over the old area | new | new | old torn, new whole | initialised, new passphrase |
//! | **reset**: the primary | torn | old | untouched | initialised |
//! | ... the secondary | new | torn | untouched | uninitialised |
//!
//! If only one copy was whole and current to begin with, the other one is written first, so that there is always one.
//! An area that a keyslot of an initialised disk uses is only ever written when neither copy refers to it any more.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use super::cluster_token::{self, ClusterToken};
use super::header::{self, Binary, Copy, HDR_SIZE, Header};
use super::json;
use super::metadata::{self, Integrity, State};
use super::probe::{Probe, probe};
use super::{DATA_OFFSET, Device, Error, VOLUME_KEY_LEN, io_error, keyslot, read_at, write_at};
use base::crypto::{self, Secret};

/// The least size in bytes of a device that is formatted: the header area, and a MiB for integrity tags and data.
pub const MIN_DEVICE_SIZE: u64 = DATA_OFFSET + (1 << 20);

/// Where a disk that we format has its first keyslot area.
pub(super) const FIRST_AREA: u64 = 2 * HDR_SIZE;
/// Size of that area in bytes: 96 × 4000, rounded up to 4096.
const AREA_SIZE: u64 =
    ((VOLUME_KEY_LEN * metadata::STRIPES) as u64).next_multiple_of(json::AREA_ALIGN);
/// The sector that says that a format is under way: the first of the last 4096 bytes of the header area, which no
/// keyslot area reaches, since 32 of them end before.
pub(super) const MARKER_OFFSET: u64 = DATA_OFFSET - 4096;
/// One sector, so that it is there in full or not at all.
pub(super) const MARKER: [u8; 512] = marker();
/// What a format of a blank disk writes: both headers and the first keyslot area, and the marker.
pub(super) const UNFINISHED_AREAS: [Range<u64>; 2] = [
    0..FIRST_AREA + AREA_SIZE,
    MARKER_OFFSET..MARKER_OFFSET + MARKER.len() as u64,
];
/// dm-integrity's superblock at the start of the data segment, in bytes; zeros there make the kernel initialise it.
const INTEGRITY_SUPERBLOCK_LEN: usize = 4096;
/// How much is wiped at once.
const WIPE_CHUNK: usize = 64 << 10;

const fn marker() -> [u8; 512] {
    let text =
        b"Firstlight: a LUKS2 format of this blank disk is under way or was cut short. Nothing of value is here.\n";
    let mut sector = [0; 512];
    let mut i = 0;
    while i < text.len() {
        sector[i] = text[i];
        i += 1;
    }
    sector
}

/// Makes a state disk: a new UUID, `volume_key` (96 bytes) in keyslot 0 under `passphrase`, the token saying "not
/// initialised". Durable on return. The rest of the header area is zeros afterwards: no key of the disk's former life
/// stays behind. So is the place of dm-integrity's superblock, for the kernel to initialise.
///
/// Of what [`probe`] may find, this overwrites a blank disk, one whose format was cut short (by us:
/// [`Probe::Unfinished`]; by Constellation: [`Header::is_keyless`]), and our own uninitialised one; to start over on an
/// initialised disk, [`Header::mark_for_reset`] first. Anything else is left alone: [`Error::WouldOverwrite`]. Other
/// errors: [`Error::TooSmall`], [`Error::KeyLength`], [`Error::Io`].
pub fn format(
    dev: &mut impl Device,
    volume_key: &Secret,
    passphrase: &Secret,
) -> Result<Header, Error> {
    if volume_key.len() != VOLUME_KEY_LEN {
        return Err(Error::KeyLength {
            what: "volume key",
            got: volume_key.len(),
            expected: "96",
        });
    }
    let size = dev
        .seek(SeekFrom::End(0))
        .map_err(io_error("find the size of the disk"))?;
    if size < MIN_DEVICE_SIZE {
        return Err(Error::TooSmall { size });
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
        // of an old header, the copy that is whole is written last
        good: old.as_ref().map_or([false; 2], |old| old.good),
        failed: false,
        device_size: size,
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

/// The header that a format may overwrite, if there is one; an error if there is anything that it must not overwrite.
fn overwritable(dev: &mut (impl Read + Seek)) -> Result<Option<Header>, Error> {
    let refuse = |what: String| Err(Error::WouldOverwrite(what));
    match probe(dev)? {
        Probe::Blank | Probe::Unfinished => Ok(None),
        Probe::Unknown(what) => refuse(what),
        Probe::Luks(header) if header.is_keyless() => Ok(Some(header)),
        Probe::Luks(header) => match (header.check_ours(Integrity::Optional), header.state()) {
            (Err(why), _) => refuse(format!("something else ({why})")),
            (Ok(()), State::Initialised) => refuse("an initialised state disk".into()),
            (Ok(()), State::Unmarked) => {
                refuse("a LUKS2 disk without the token of a state disk".into())
            }
            (Ok(()), State::Uninitialised) => Ok(Some(header)),
        },
    }
}

impl Header {
    /// The commit: puts `volume_key` under the passphrase `new` into keyslot 0, marks the disk as initialised, and says of
    /// which cluster it is, all at once, in one write of the metadata. Durable on return; other keyslots and tokens stay.
    ///
    /// The new key material goes to an area that no keyslot uses; the old area is wiped last. If only that fails, the
    /// disk is committed all the same: it is logged, and no error.
    /// Errors: [`Error::WrongVolumeKey`], [`Error::NotOurs`], [`Error::NoRoom`], [`Error::ProbeAgain`], [`Error::Io`].
    pub fn replace_passphrase_and_mark(
        &mut self,
        dev: &mut impl Device,
        volume_key: &Secret,
        new: &Secret,
        cluster: &ClusterToken,
    ) -> Result<(), Error> {
        let now = self.checked(Integrity::Optional)?;
        if volume_key.len() != now.key_size || !keyslot::matches(&now.digest, volume_key) {
            return Err(Error::WrongVolumeKey);
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
            log::warn!(
                "the former passphrase's keyslot area is out of use, but still on the disk: {e}"
            );
        }
        Ok(())
    }

    /// Marks the disk as not initialised: the next boot formats it. Durable on return.
    ///
    /// Errors: [`Error::NotOurs`], [`Error::NoRoom`], [`Error::ProbeAgain`], [`Error::Io`].
    pub fn mark_for_reset(&mut self, dev: &mut impl Device) -> Result<(), Error> {
        self.checked(Integrity::Optional)?;
        let mut metadata = self.metadata.clone();
        metadata::set_token(&mut metadata, false);
        self.store(dev, metadata)
    }

    /// Rewrites a copy on disk that is damaged or older than this header; does nothing if both are whole and current.
    ///
    /// Worth a call at each boot: an older copy says what the disk was before, and must not be all that is left.
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

    /// Writes `metadata` to both copies under the next sequence id, a copy that is not good first.
    pub(super) fn store(
        &mut self,
        dev: &mut impl Device,
        metadata: serde_json::Value,
    ) -> Result<(), Error> {
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
        // until the write is known to be whole and durable, nobody knows which header counts
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

/// Overwrites with zeros, durably, what is not zero in `range`.
fn wipe(dev: &mut impl Device, range: Range<u64>) -> Result<(), Error> {
    let zeros = vec![0; WIPE_CHUNK];
    let mut buf = vec![0; WIPE_CHUNK];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(WIPE_CHUNK as u64) as usize;
        read_at(dev, at, &mut buf[..len]).map_err(io_error("read what is to be wiped"))?;
        if buf[..len] != zeros[..len] {
            write_at(dev, at, &zeros[..len]).map_err(io_error("wipe former key material"))?;
        }
        at += len as u64;
    }
    dev.sync().map_err(io_error("wipe former key material"))
}
