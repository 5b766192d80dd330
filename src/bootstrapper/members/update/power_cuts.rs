//! Power cuts at any write of an update, over both slots. The disk keeps what was synced, and any sectors of what was written since.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use support::boot_image::run;
use support::random::Random;

use super::tests::Setting;
use super::*;

const SECTOR: usize = 512;
/// How many states are looked at after each write.
const STATES: usize = 12;

enum Step {
    Write {
        file: PathBuf,
        at: u64,
        bytes: Vec<u8>,
    },
    Sync(PathBuf),
}

/// A partition that keeps what is done with it.
struct Recorder {
    file: File,
    path: PathBuf,
    steps: Rc<RefCell<Vec<Step>>>,
}

impl Read for Recorder {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer)
    }
}

impl Seek for Recorder {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Write for Recorder {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let at = self.file.stream_position()?;
        let len = self.file.write(buffer)?;
        self.steps.borrow_mut().push(Step::Write {
            file: self.path.clone(),
            at,
            bytes: buffer[..len].to_vec(),
        });
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Writable for Recorder {
    fn sync(&mut self) -> io::Result<()> {
        let step = Step::Sync(self.path.clone());
        self.steps.borrow_mut().push(step);
        Ok(())
    }
}

/// The sectors that were written since the last sync of their file, in their order.
#[derive(Default)]
struct Unsynced(Vec<(PathBuf, u64, Vec<u8>)>);

impl Unsynced {
    fn do_step(&mut self, step: &Step) {
        match step {
            Step::Write { file, at, bytes } => {
                let sectors = (*at..).step_by(SECTOR).zip(bytes.chunks(SECTOR));
                self.0
                    .extend(sectors.map(|(at, sector)| (file.clone(), at, sector.to_vec())));
            }
            Step::Sync(file) => {
                let (synced, rest) = self.0.drain(..).partition(|it| it.0 == *file);
                self.0 = rest;
                replace(synced);
            }
        }
    }

    /// Returns a part of the sectors.
    fn some(&self, random: &mut Random) -> Vec<(PathBuf, u64, Vec<u8>)> {
        let lost = random.below(4);
        let all = self.0.iter();
        all.filter(|_| random.below(3) >= lost).cloned().collect()
    }
}

/// Writes sectors, and returns those that were there before in the order that brings them back.
fn replace(sectors: Vec<(PathBuf, u64, Vec<u8>)>) -> Vec<(PathBuf, u64, Vec<u8>)> {
    let mut before = vec![];
    for (path, at, bytes) in sectors {
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut old = vec![0; bytes.len()];
        file.read_exact_at(&mut old, at).unwrap();
        file.write_all_at(&bytes, at).unwrap();
        before.push((path, at, old));
    }
    before.reverse();
    before
}

/// What a version boots: its kernel image, and the slot that this finds.
struct Version {
    uki: Vec<u8>,
    /// Root file system and hashes; the slot of the running version is never written.
    slot: Option<[Vec<u8>; 2]>,
}

/// Returns the names of the images that boot. Each must be complete.
fn bootable(setting: &Setting, versions: &BTreeMap<&str, Version>) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let esp = format!("{}@@1M", setting.place.disk.display());
    run(Command::new("mcopy")
        .args(["-n", "-i", &esp, "::EFI/Linux/*.efi"])
        .arg(folder.path()));
    let entries = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> = entries
        .map(|it| it.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in &names {
        let version = name.trim_start_matches("firstlight_");
        let version = version.trim_end_matches(".efi").split('+').next().unwrap();
        let expected = &versions[version];
        let uki = fs::read(folder.path().join(name)).unwrap();
        assert!(uki == expected.uki, "{name} is not complete");
        if let Some(parts) = &expected.slot {
            let paths = [&setting.place.root, &setting.place.hashes];
            for (part, path) in parts.iter().zip(paths) {
                let is_whole = fs::read(path).unwrap().starts_with(part);
                assert!(is_whole, "{} is not that of {name}", path.display());
            }
        }
    }
    names
}

#[test]
fn after_a_power_cut_at_any_write_each_version_that_boots_is_complete_and_the_update_goes_on() {
    let mut setting = Setting::new();
    let slot = |setting: &Setting| Some([setting.root.clone(), setting.hashes.clone()]);
    let version = |uki: &[u8], slot| Version {
        uki: uki.to_vec(),
        slot,
    };
    // another version is in the slot that is written
    let other = setting.release("0.2.0");
    let slot_of_other = slot(&setting);
    setting.run(&other, None).unwrap();
    setting.root.reverse();
    setting.hashes = vec![0x66; 30_000];
    let made = setting.release("0.3.0");
    let versions = BTreeMap::from([
        ("0.1.0", version(&setting.running, None)),
        ("0.2.0", version(&other.uki, slot_of_other)),
        ("0.3.0", version(&made.uki, slot(&setting))),
    ]);

    let before = setting.disks();
    let steps = Rc::new(RefCell::new(vec![]));
    let open = |path: &Path| {
        Ok(Recorder {
            file: place::open(path)?,
            path: path.to_owned(),
            steps: steps.clone(),
        })
    };
    let place = &setting.place;
    let content = &mut &made.content[..];
    let offer = made.offer(content, None);
    run_on(&open, place, &setting.keys, offer, &mut |_| {}).unwrap();
    let mut esp = open(&place.esp.0).unwrap();
    let mut slots = Slots::read(&mut esp, place.esp.1).unwrap();
    slots.bless(&mut esp, "0.3.0").unwrap();
    setting.restore(&before);

    let mut random = Random::new(7);
    let mut unsynced = Unsynced::default();
    let mut seen = BTreeMap::new();
    for step in steps.borrow().iter() {
        unsynced.do_step(step);
        for _ in 0..STATES {
            let undo = replace(unsynced.some(&mut random));
            let names = bootable(&setting, &versions);
            assert_eq!(names[0], "firstlight_0.1.0.efi", "{names:?}");
            *seen.entry(names).or_insert(0) += 1;
            replace(undo);
        }
        let before = setting.disks();
        replace(unsynced.some(&mut random));
        if !bootable(&setting, &versions).contains(&"firstlight_0.3.0.efi".to_owned()) {
            setting.run(&made, None).unwrap();
            let names = bootable(&setting, &versions);
            assert_eq!(names, ["firstlight_0.1.0.efi", "firstlight_0.3.0+3.efi"]);
        }
        setting.restore(&before);
    }
    println!("{seen:?}");
    let both = |other: &str| vec!["firstlight_0.1.0.efi".to_owned(), other.to_owned()];
    let expected = [
        vec!["firstlight_0.1.0.efi".to_owned()],
        both("firstlight_0.2.0+3.efi"),
        both("firstlight_0.3.0+3.efi"),
        both("firstlight_0.3.0.efi"),
    ];
    let seen: Vec<_> = seen.into_keys().collect();
    assert_eq!(seen, expected);
}
