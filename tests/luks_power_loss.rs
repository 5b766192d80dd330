//! Simulates a power failure at each moment of each operation that changes a LUKS2 header, and checks what the next boot finds.
//!
//! The disk records writes and syncs. After a power failure, all writes before the last completed sync are on the disk, and any set
//! of the 512-byte sectors that were written since. If there are few such sectors, the tests try all subsets. Otherwise they try
//! prefixes, suffixes, single sectors, all sectors except one, and random subsets.

use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};

use base::crypto::Secret;
use bootstrapper::state::peers_token;
use disk::device_mapper::may_hold_data;
use disk::luks::{
    self, ClusterToken, DATA_OFFSET, Device, DiskState, Error, Header, Integrity, Peers, Probe,
};

use support::cut_off;
use support::random::Random;

const SECTOR: usize = 512;
const DISK_SIZE: usize = 18 << 20;
const PRIMARY: usize = 0;
const SECONDARY: usize = 16 << 10;
const COPY_LEN: usize = 16 << 10;

/// A disk that records the writes between syncs.
struct Disk {
    image: Cursor<Vec<u8>>,
    /// The written sectors in order, in one group for each sync.
    epochs: Vec<Vec<(usize, [u8; SECTOR])>>,
    /// Whether the disk reports a sync that it does not do.
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
        assert!(
            at + buf.len() <= DISK_SIZE,
            "a write beyond the end of the disk"
        );
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

/// The result of a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Blank,
    Unfinished,
    /// A state disk, and which of the two keys of the test open it.
    Ours {
        state: DiskState,
        old: bool,
        new: bool,
    },
    Other,
}

const UNINITIALIZED_OLD: Found = Found::Ours {
    state: DiskState::Uninitialized,
    old: true,
    new: false,
};
const INITIALIZED_NEW: Found = Found::Ours {
    state: DiskState::Initialized,
    old: false,
    new: true,
};
const INITIALIZED_OLD: Found = Found::Ours {
    state: DiskState::Initialized,
    old: true,
    new: false,
};
const UNINITIALIZED_NEW: Found = Found::Ours {
    state: DiskState::Uninitialized,
    old: false,
    new: true,
};
const UNINITIALIZED_CLOSED: Found = Found::Ours {
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
    // a disk that belongs to a cluster has the token of the cluster
    assert!(header.state() != DiskState::Initialized || header.cluster_token().unwrap().is_some());
    Found::Ours {
        state: header.state(),
        old: opens(old_key()),
        new: opens(new_key()),
    }
}

/// Returns the header on an image, and a recording disk of that image.
fn opened(image: &[u8]) -> (Disk, Header) {
    let mut disk = Disk::of(image);
    match luks::probe(&mut disk).unwrap() {
        Probe::Luks(header) => (disk, header),
        other => panic!("{other:?}"),
    }
}

/// Calls `visit` with the image after each power failure in the recorded writes. Returns all results.
fn cut_everywhere(before: &[u8], disk: &Disk, mut visit: impl FnMut(&[u8], Found)) -> Vec<Found> {
    let mut seen = Vec::new();
    let mut random = Random::new(0x5eed);
    let mut image = before.to_vec();
    for epoch in &disk.epochs {
        // a sector that is overwritten with the same bytes cannot be torn
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

/// Returns, for each power failure, which of `count` sectors reached the disk: all subsets of few sectors, a selection of many.
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

/// Returns an image with an uninitialized disk that opens with the old key.
fn formatted() -> Vec<u8> {
    let mut disk = Disk::of(&vec![0; DISK_SIZE]);
    luks::format(&mut disk, &volume_key(), &old_key()).unwrap();
    disk.image.into_inner()
}

/// Returns an image with an initialized disk that opens with the new key.
fn committed() -> Vec<u8> {
    let (mut disk, mut header) = opened(&formatted());
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    disk.image.into_inner()
}

/// Checks that exactly these results were found, and that the last of them is the result of an operation without a power failure.
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
fn an_interrupted_format_of_a_blank_disk_can_be_repeated() {
    let blank = vec![0; DISK_SIZE];
    let mut disk = Disk::of(&blank);
    luks::format(&mut disk, &volume_key(), &old_key()).unwrap();
    let mut visited = 0;
    let seen = cut_everywhere(&blank, &disk, |image, _| {
        visited += 1;
        let mut again = Disk::of(image);
        luks::format(&mut again, &volume_key(), &old_key()).unwrap();
        assert_eq!(boot(again.image.get_ref()), UNINITIALIZED_OLD);
    });
    assert_found(
        &seen,
        &[Found::Unfinished, Found::Blank, UNINITIALIZED_OLD],
        &disk,
    );
    assert!(visited > 50, "only {visited} cuts");
    assert_eq!(
        disk.image.get_ref()[DATA_OFFSET as usize - 4096..],
        vec![0; DISK_SIZE - DATA_OFFSET as usize + 4096]
    );
}

#[test]
fn a_format_that_is_interrupted_twice_can_be_repeated() {
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
        assert_eq!(boot(again.image.get_ref()), UNINITIALIZED_NEW);
    }
}

#[test]
fn an_interrupted_format_of_an_uninitialized_disk_leaves_an_uninitialized_disk() {
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
            &[UNINITIALIZED_OLD, UNINITIALIZED_CLOSED, UNINITIALIZED_NEW],
            &disk,
        );
    }
}

#[test]
fn an_interrupted_commit_leaves_the_old_key_uninitialized_or_the_new_key_initialized() {
    let before = formatted();
    let (mut disk, mut header) = opened(&before);
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    let seen = cut_everywhere(&before, &disk, |_, _| {});
    assert_found(&seen, &[UNINITIALIZED_OLD, INITIALIZED_NEW], &disk);
    let area = 32 << 10..(32 << 10) + 385_024;
    assert!(
        disk.image.get_ref()[area].iter().all(|b| *b == 0),
        "the old passphrase's area is still there"
    );
    assert!(header.copies_agree() && header.state() == DiskState::Initialized);
}

#[test]
fn an_interrupted_commit_over_a_damaged_copy_never_loses_the_valid_copy() {
    for damaged in [PRIMARY, SECONDARY] {
        let mut before = formatted();
        before[damaged + 5000] ^= 1;
        let (mut disk, mut header) = opened(&before);
        assert!(!header.copies_agree());
        header
            .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
            .unwrap();
        let seen = cut_everywhere(&before, &disk, |_, _| {});
        assert_found(&seen, &[UNINITIALIZED_OLD, INITIALIZED_NEW], &disk);
    }
}

#[test]
fn a_commit_succeeds_after_every_interrupted_commit() {
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
        // a disk that was already committed must still open after it
        let key = if found == INITIALIZED_NEW {
            old_key()
        } else {
            new_key()
        };
        let end = if found == INITIALIZED_NEW {
            INITIALIZED_OLD
        } else {
            INITIALIZED_NEW
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
fn an_interrupted_reset_leaves_a_disk_that_opens_or_is_uninitialized() {
    let before = committed();
    let (mut disk, mut header) = opened(&before);
    header.mark_for_reset(&mut disk).unwrap();
    let seen = cut_everywhere(&before, &disk, |_, _| {});
    assert_found(&seen, &[INITIALIZED_NEW, UNINITIALIZED_NEW], &disk);
}

#[test]
fn an_interrupted_write_of_a_cluster_token_leaves_the_token_or_none() {
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
    assert_eq!(seen, [INITIALIZED_NEW]);
    assert_eq!(tokens, [Some(other), Some(cluster())]);
}

#[test]
fn an_interrupted_write_of_the_peers_leaves_the_old_ones_or_the_new_ones() {
    let peers = |last| Peers {
        load_balancer: Some("cluster.example".into()),
        control_planes: vec![[10, 0, 0, last].into()],
    };
    let (mut disk, mut header) = opened(&committed());
    assert!(peers_token::set(&mut header, &mut disk, &peers(1)).unwrap());
    let before = disk.image.into_inner();
    let (mut disk, mut header) = opened(&before);
    assert!(peers_token::set(&mut header, &mut disk, &peers(2)).unwrap());
    let mut found = Vec::new();
    let seen = cut_everywhere(&before, &disk, |image, _| {
        let header = opened(image).1;
        assert_eq!(header.cluster_token().unwrap(), Some(cluster()));
        let peers = header.peers().unwrap();
        if !found.contains(&peers) {
            found.push(peers);
        }
    });
    assert_eq!(seen, [INITIALIZED_NEW]);
    assert_eq!(found, [Some(peers(1)), Some(peers(2))]);
    // the same peers are not written again
    let (mut disk, mut header) = opened(&disk.image.into_inner());
    assert!(!peers_token::set(&mut header, &mut disk, &peers(2)).unwrap());
    assert!(disk.epochs.concat().is_empty());
}

#[test]
fn an_interrupted_repair_leaves_the_disk_as_it_was() {
    for damaged in [PRIMARY, SECONDARY] {
        let mut before = committed();
        before[damaged..damaged + COPY_LEN].fill(0);
        let (mut disk, mut header) = opened(&before);
        header.repair(&mut disk).unwrap();
        let seen = cut_everywhere(&before, &disk, |_, _| {});
        assert_eq!(seen, [INITIALIZED_NEW]);
        assert!(opened(disk.image.get_ref()).1.copies_agree());
    }
}

#[test]
fn an_interrupted_mark_of_an_interrupted_format_leaves_a_disk_that_the_next_boot_formats() {
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
    assert_found(&seen, &[UNMARKED, UNINITIALIZED_CLOSED], &disk);
    let mut again = Disk::of(disk.image.get_ref());
    luks::format(&mut again, &volume_key(), &new_key()).unwrap();
    assert_eq!(boot(again.image.get_ref()), UNINITIALIZED_NEW);
    // without the mark, the disk must not be formatted
    let error = luks::format(&mut Disk::of(&before), &volume_key(), &new_key()).unwrap_err();
    assert!(matches!(error, Error::WouldOverwrite(_)), "{error}");
}

#[test]
fn a_disk_that_ignores_syncs_is_found() {
    // the other tests would fail if a sync were missing
    let before = formatted();
    let (mut disk, mut header) = opened(&before);
    disk.ignores_sync = true;
    header
        .replace_passphrase_and_mark(&mut disk, &volume_key(), &new_key(), &cluster())
        .unwrap();
    let seen = cut_everywhere(&before, &disk, |_, _| {});
    assert!(
        seen.iter()
            .any(|found| ![UNINITIALIZED_OLD, INITIALIZED_NEW].contains(found)),
        "{seen:?}"
    );
}

/// A disk that fails at the n-th write.
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
fn after_a_failed_write_a_commit_needs_another_probe() {
    // keyslot area, primary, secondary; the writes of the wipe follow
    for (writes_left, after) in [
        (0, UNINITIALIZED_OLD),
        (1, UNINITIALIZED_OLD),
        (2, INITIALIZED_NEW),
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
        assert_eq!(boot(disk.image.get_ref()), INITIALIZED_NEW);
    }
}
