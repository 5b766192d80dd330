//! Cuts the power at every instant of every operation that changes a LUKS2 header: what does the next boot find?
//!
//! The disk records writes and syncs. A cut leaves all writes before the last completed sync, and of those after it any
//! part in whole 512-byte sectors, in any order: of few sectors every subset, of many a choice of prefixes, suffixes,
//! single ones, all but one, and random subsets.

use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};

use base::crypto::Secret;
use disk::device_mapper::may_hold_data;
use disk::luks::{
    self, ClusterToken, DATA_OFFSET, Device, DiskState, Error, Header, Integrity, Probe,
};

use support::cut_off;
use support::random::Random;

const SECTOR: usize = 512;
const DISK_SIZE: usize = 18 << 20;
const PRIMARY: usize = 0;
const SECONDARY: usize = 16 << 10;
const COPY_LEN: usize = 16 << 10;

/// A disk that remembers what was written to it between syncs.
struct Disk {
    image: Cursor<Vec<u8>>,
    /// The sectors written, in order, in groups between syncs.
    epochs: Vec<Vec<(usize, [u8; SECTOR])>>,
    /// A disk that claims to have synced and has not.
    ignores_sync: bool,
}

impl Disk {
    fn of(image: &[u8]) -> Self {
        Disk {
            image: Cursor::new(image.to_vec()),
            epochs: vec![vec![]],
            ignores_sync: false,
        }
    }
}

impl Read for Disk {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.image.read(buf)
    }
}

impl Seek for Disk {
    fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
        self.image.seek(pos)
    }
}

impl Write for Disk {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let at = self.image.position() as usize;
        assert!(
            at.is_multiple_of(SECTOR) && buf.len().is_multiple_of(SECTOR),
            "a write of parts of sectors"
        );
        assert!(at + buf.len() <= DISK_SIZE, "a write over the end");
        let sectors = buf
            .chunks(SECTOR)
            .enumerate()
            .map(|(n, data)| (at / SECTOR + n, data.try_into().unwrap()));
        self.epochs.last_mut().unwrap().extend(sectors);
        self.image.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Device for Disk {
    fn sync(&mut self) -> io::Result<()> {
        if !self.ignores_sync {
            self.epochs.push(vec![]);
        }
        Ok(())
    }
}

/// What a boot finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Blank,
    Unfinished,
    /// Ours; which of the two keys of the test open it.
    Ours {
        state: DiskState,
        old: bool,
        new: bool,
    },
    Other,
}

const UNINITIALISED_OLD: Found = Found::Ours {
    state: DiskState::Uninitialized,
    old: true,
    new: false,
};
const INITIALISED_NEW: Found = Found::Ours {
    state: DiskState::Initialized,
    old: false,
    new: true,
};
const INITIALISED_OLD: Found = Found::Ours {
    state: DiskState::Initialized,
    old: true,
    new: false,
};
const UNINITIALISED_NEW: Found = Found::Ours {
    state: DiskState::Uninitialized,
    old: false,
    new: true,
};
const UNINITIALISED_CLOSED: Found = Found::Ours {
    state: DiskState::Uninitialized,
    old: false,
    new: false,
};

fn volume_key() -> Secret {
    Secret::new((0..96).collect())
}

fn old_key() -> Secret {
    Secret::new(b"the old passphrase".to_vec())
}

fn new_key() -> Secret {
    Secret::new(b"the new passphrase".to_vec())
}

fn cluster() -> ClusterToken {
    ClusterToken::new(
        "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c11",
        &Secret::new(vec![1; 32]),
        [2; 32],
    )
}

fn boot(image: &[u8]) -> Found {
    let mut dev = Cursor::new(image);
    let header = match luks::probe(&mut dev).unwrap() {
        Probe::Blank => return Found::Blank,
        Probe::Unfinished => return Found::Unfinished,
        Probe::Unknown(_) => return Found::Other,
        Probe::Luks(header) => header,
    };
    if header.check_ours(Integrity::Required).is_err() {
        return Found::Other;
    }
    let mut opens = |key: Secret| match header.unlock(&mut dev, &key) {
        Ok(volume_key) => volume_key == self::volume_key(),
        Err(Error::WrongPassphrase { keyslots: 1 }) => false,
        Err(e) => panic!("{e}"),
    };
    // the disk says of which cluster it is as soon as it is of one
    assert!(header.state() != DiskState::Initialized || header.cluster_token().unwrap().is_some());
    Found::Ours {
        state: header.state(),
        old: opens(old_key()),
        new: opens(new_key()),
    }
}

/// The header on an image, and a recording disk of that image.
fn opened(image: &[u8]) -> (Disk, Header) {
    let mut disk = Disk::of(image);
    match luks::probe(&mut disk).unwrap() {
        Probe::Luks(header) => (disk, header),
        other => panic!("{other:?}"),
    }
}

/// Runs `visit` on the image after each cut of the recorded writes; gives back all that was found.
fn cut_everywhere(before: &[u8], disk: &Disk, mut visit: impl FnMut(&[u8], Found)) -> Vec<Found> {
    let mut seen = Vec::new();
    let mut random = Random::new(0x5eed);
    let mut image = before.to_vec();
    for epoch in &disk.epochs {
        // a sector that is overwritten with what it holds cannot be torn
        let changed: Vec<_> = epoch
            .iter()
            .filter(|(number, data)| sector(&mut image, *number) != data)
            .collect();
        for kept in subsets(changed.len(), &mut random) {
            let undo: Vec<(usize, Vec<u8>)> = kept
                .iter()
                .map(|n| (changed[*n].0, sector(&mut image, changed[*n].0).to_vec()))
                .collect();
            for n in &kept {
                sector(&mut image, changed[*n].0).copy_from_slice(&changed[*n].1);
            }
            let found = boot(&image);
            if !seen.contains(&found) {
                seen.push(found);
            }
            visit(&image, found);
            for (number, data) in undo.iter().rev() {
                sector(&mut image, *number).copy_from_slice(data);
            }
        }
        for (number, data) in epoch {
            sector(&mut image, *number).copy_from_slice(data);
        }
    }
    assert!(
        disk.ignores_sync || disk.epochs.last().unwrap().is_empty(),
        "the last write was not made durable"
    );
    assert_eq!(image, *disk.image.get_ref());
    seen
}

fn sector(image: &mut [u8], number: usize) -> &mut [u8] {
    &mut image[number * SECTOR..][..SECTOR]
}

/// Which of `count` sectors reached the disk, for each cut: all there are of few sectors, a choice of many.
fn subsets(count: usize, random: &mut Random) -> Vec<Vec<usize>> {
    if count <= 7 {
        return (0..1 << count)
            .map(|bits| (0..count).filter(|n| bits >> n & 1 == 1).collect())
            .collect();
    }
    let mut subsets = vec![vec![], (0..count).collect()];
    for n in (0..count).step_by((count / 10).max(1)) {
        subsets.push((0..n).collect());
        subsets.push((n..count).collect());
        subsets.push(vec![n]);
        subsets.push((0..count).filter(|other| *other != n).collect());
    }
    for _ in 0..10 {
        subsets.push(
            (0..count)
                .filter(|_| random.next().is_multiple_of(2))
                .collect(),
        );
    }
    subsets
}

/// An image with an uninitialised disk that opens with the old key.
fn formatted() -> Vec<u8> {
    let mut disk = Disk::of(&vec![0; DISK_SIZE]);
    luks::format(&mut disk, &volume_key(), &old_key()).unwrap();
    disk.image.into_inner()
}

/// An image with an initialised disk that opens with the new key.
fn committed() -> Vec<u8> {
    let (mut disk, mut header) = opened(&formatted());
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    disk.image.into_inner()
}

/// Exactly these were found, and the last of them is what an uncut run leaves.
fn assert_found(seen: &[Found], expected: &[Found], disk: &Disk) {
    assert!(
        seen.iter().all(|found| expected.contains(found)),
        "found {seen:?}, expected {expected:?}"
    );
    assert!(
        expected.iter().all(|found| seen.contains(found)),
        "found only {seen:?}, expected {expected:?}"
    );
    assert_eq!(boot(disk.image.get_ref()), *expected.last().unwrap());
}

#[test]
fn a_format_of_a_blank_disk_cut_anywhere_can_be_started_over() {
    let blank = vec![0; DISK_SIZE];
    let mut disk = Disk::of(&blank);
    luks::format(&mut disk, &volume_key(), &old_key()).unwrap();
    let mut visited = 0;
    let seen = cut_everywhere(&blank, &disk, |image, _| {
        visited += 1;
        let mut again = Disk::of(image);
        luks::format(&mut again, &volume_key(), &old_key()).unwrap();
        assert_eq!(boot(again.image.get_ref()), UNINITIALISED_OLD);
    });
    assert_found(
        &seen,
        &[Found::Unfinished, Found::Blank, UNINITIALISED_OLD],
        &disk,
    );
    assert!(visited > 50, "only {visited} cuts");
    assert_eq!(
        disk.image.get_ref()[DATA_OFFSET as usize - 4096..],
        vec![0; DISK_SIZE - DATA_OFFSET as usize + 4096]
    );
}

#[test]
fn a_format_that_is_cut_twice_can_be_started_over() {
    let blank = vec![0; DISK_SIZE];
    let mut disk = Disk::of(&blank);
    luks::format(&mut disk, &volume_key(), &old_key()).unwrap();
    let mut states = Vec::new();
    let mut visited = 0;
    cut_everywhere(&blank, &disk, |image, _| {
        visited += 1;
        if visited % 9 == 0 {
            states.push(image.to_vec());
        }
    });
    for state in states {
        let mut again = Disk::of(&state);
        luks::format(&mut again, &volume_key(), &new_key()).unwrap();
        let seen = cut_everywhere(&state, &again, |_, _| {});
        assert!(!seen.contains(&Found::Other), "{seen:?}");
        assert_eq!(boot(again.image.get_ref()), UNINITIALISED_NEW);
    }
}

#[test]
fn a_format_of_an_uninitialised_disk_cut_anywhere_leaves_an_uninitialised_disk() {
    for damage in [None, Some(PRIMARY), Some(SECONDARY)] {
        let mut before = formatted();
        if let Some(at) = damage {
            before[at..at + COPY_LEN].fill(0x5a);
        }
        let mut disk = Disk::of(&before);
        luks::format(&mut disk, &volume_key(), &new_key()).unwrap();
        let seen = cut_everywhere(&before, &disk, |_, _| {});
        assert_found(
            &seen,
            &[UNINITIALISED_OLD, UNINITIALISED_CLOSED, UNINITIALISED_NEW],
            &disk,
        );
    }
}

#[test]
fn a_commit_cut_anywhere_leaves_the_old_key_uninitialised_or_the_new_key_initialised() {
    let before = formatted();
    let (mut disk, mut header) = opened(&before);
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    let seen = cut_everywhere(&before, &disk, |_, _| {});
    assert_found(&seen, &[UNINITIALISED_OLD, INITIALISED_NEW], &disk);
    let area = 32 << 10..(32 << 10) + 385_024;
    assert!(
        disk.image.get_ref()[area].iter().all(|b| *b == 0),
        "the old passphrase's area is still there"
    );
    assert!(header.copies_agree() && header.initialized());
}

#[test]
fn a_commit_over_a_damaged_copy_cut_anywhere_never_loses_the_whole_one() {
    for damaged in [PRIMARY, SECONDARY] {
        let mut before = formatted();
        before[damaged + 5000] ^= 1;
        let (mut disk, mut header) = opened(&before);
        assert!(!header.copies_agree());
        header
            .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
            .unwrap();
        let seen = cut_everywhere(&before, &disk, |_, _| {});
        assert_found(&seen, &[UNINITIALISED_OLD, INITIALISED_NEW], &disk);
    }
}

#[test]
fn a_commit_after_a_cut_commit_goes_through_from_every_cut() {
    let before = formatted();
    let (mut disk, mut header) = opened(&before);
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    let mut visited = 0;
    let mut states = Vec::new();
    cut_everywhere(&before, &disk, |image, found| {
        visited += 1;
        if visited % 11 == 0 {
            states.push((image.to_vec(), found));
        }
    });
    for (state, found) in states {
        // the other way round for a disk that was already committed: it must go on opening
        let key = if found == INITIALISED_NEW {
            old_key()
        } else {
            new_key()
        };
        let end = if found == INITIALISED_NEW {
            INITIALISED_OLD
        } else {
            INITIALISED_NEW
        };
        let (mut again, mut header) = opened(&state);
        header
            .replace_passphrase_and_mark(&mut again, &volume_key(), &key, &cluster())
            .unwrap();
        let seen = cut_everywhere(&state, &again, |_, _| {});
        assert!(
            seen.iter().all(|now| *now == found || *now == end),
            "{seen:?}"
        );
        assert_eq!(boot(again.image.get_ref()), end);
    }
}

#[test]
fn a_reset_cut_anywhere_leaves_a_disk_that_opens_or_is_uninitialised() {
    let before = committed();
    let (mut disk, mut header) = opened(&before);
    header.mark_for_reset(&mut disk).unwrap();
    let seen = cut_everywhere(&before, &disk, |_, _| {});
    assert_found(&seen, &[INITIALISED_NEW, UNINITIALISED_NEW], &disk);
}

#[test]
fn a_token_of_a_cluster_that_is_added_is_there_or_not_wherever_it_is_cut() {
    let (mut disk, mut header) = opened(&committed());
    let other = ClusterToken::new(
        "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c11",
        &Secret::new(vec![3; 32]),
        [4; 32],
    );
    header.add_cluster_token(&mut disk, &other).unwrap();
    let before = disk.image.into_inner();
    let (mut disk, mut header) = opened(&before);
    header.add_cluster_token(&mut disk, &cluster()).unwrap();
    let mut tokens = Vec::new();
    let seen = cut_everywhere(&before, &disk, |image, _| {
        let token = opened(image).1.cluster_token().unwrap();
        if !tokens.contains(&token) {
            tokens.push(token);
        }
    });
    assert_eq!(seen, [INITIALISED_NEW]);
    assert_eq!(tokens, [Some(other), Some(cluster())]);
}

#[test]
fn a_repair_cut_anywhere_leaves_the_disk_as_it_was() {
    for damaged in [PRIMARY, SECONDARY] {
        let mut before = committed();
        before[damaged..damaged + COPY_LEN].fill(0);
        let (mut disk, mut header) = opened(&before);
        header.repair(&mut disk).unwrap();
        let seen = cut_everywhere(&before, &disk, |_, _| {});
        assert_eq!(seen, [INITIALISED_NEW]);
        assert!(opened(disk.image.get_ref()).1.copies_agree());
    }
}

#[test]
fn the_mark_of_a_cut_off_format_cut_anywhere_leaves_a_disk_that_the_next_boot_formats() {
    const UNMARKED: Found = Found::Ours {
        state: DiskState::Unmarked,
        old: false,
        new: false,
    };
    let before = cut_off::disk();
    let (mut disk, mut header) = opened(&before);
    assert!(header.is_unmarked_format());
    header.mark_for_reset(&mut disk).unwrap();
    let seen = cut_everywhere(&before, &disk, |image, found| {
        let data = may_hold_data(&mut Cursor::new(image), DATA_OFFSET).unwrap();
        assert!(found != UNMARKED || data.is_none() && opened(image).1.is_unmarked_format());
    });
    assert_found(&seen, &[UNMARKED, UNINITIALISED_CLOSED], &disk);
    let mut again = Disk::of(disk.image.get_ref());
    luks::format(&mut again, &volume_key(), &new_key()).unwrap();
    assert_eq!(boot(again.image.get_ref()), UNINITIALISED_NEW);
    // without the mark it is not ours to format
    let error = luks::format(&mut Disk::of(&before), &volume_key(), &new_key()).unwrap_err();
    assert!(matches!(error, Error::WouldOverwrite(_)), "{error}");
}

#[test]
fn a_disk_that_ignores_syncs_is_caught_by_this_test() {
    // proves that the syncs are there for a reason, and that these tests would see it if one were missing
    let before = formatted();
    let (mut disk, mut header) = opened(&before);
    disk.ignores_sync = true;
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    let seen = cut_everywhere(&before, &disk, |_, _| {});
    assert!(
        seen.iter()
            .any(|found| ![UNINITIALISED_OLD, INITIALISED_NEW].contains(found)),
        "{seen:?}"
    );
}

/// A disk that fails at the `n`th write.
struct Failing {
    disk: Disk,
    writes_left: usize,
}

impl Read for Failing {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.disk.read(buf)
    }
}

impl Seek for Failing {
    fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
        self.disk.seek(pos)
    }
}

impl Write for Failing {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.writes_left = self
            .writes_left
            .checked_sub(1)
            .ok_or(io::Error::other("medium error"))?;
        self.disk.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Device for Failing {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.sync()
    }
}

#[test]
fn a_commit_whose_write_fails_can_only_go_on_after_another_probe() {
    // area, primary, secondary; the wipe's writes come after
    for (writes_left, after) in [
        (0, UNINITIALISED_OLD),
        (1, UNINITIALISED_OLD),
        (2, INITIALISED_NEW),
    ] {
        let (disk, mut header) = opened(&formatted());
        let mut dev = Failing { disk, writes_left };
        let error = header
            .replace_passphrase_and_mark(&mut dev, &volume_key(), &new_key(), &cluster())
            .unwrap_err();
        assert!(error.to_string().contains("medium error"), "{error}");
        assert_eq!(boot(dev.disk.image.get_ref()), after);
        dev.writes_left = usize::MAX;
        let retried =
            header.replace_passphrase_and_mark(&mut dev, &volume_key(), &new_key(), &cluster());
        match writes_left {
            0 => retried.unwrap(),
            _ => assert!(matches!(retried, Err(Error::ProbeAgain)), "{retried:?}"),
        }
        let (mut disk, mut header) = opened(dev.disk.image.get_ref());
        header
            .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
            .unwrap();
        assert_eq!(boot(disk.image.get_ref()), INITIALISED_NEW);
    }
}
