//! Power cuts during an update, a trial and its end. QEMU records what the machine, its firmware and systemd-boot write to the disk.
//! After a cut at any of these writes each image that systemd-boot finds is complete, and the next update can be written. At some of
//! these instants the machine boots.

use super::mkosi::{image_of_version, said};
use super::update::{FIRST, GOOD, NEXT, Node, off};
use bootstrapper::members::update::{self, ImageDisk, ImageVersion, Offer, Words};
use image::slots::Slots;
use machine::flow::PATIENCE;
use machine::write_log::{self, WriteLog};
use machine::{Context, Failure, Result};
use ssh::key::PublicKey;
use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;
use support::boot_image::run;
use support::random::Random;

/// How many instants `make test-images` tries, and at how many of all it boots the machine.
const SAMPLE: usize = 30;
const BOOTS: usize = 6;
/// Bytes that are compared at once.
const PART: usize = 1 << 20;

/// What a version consists of, as the maker of the image has it.
struct Parts {
    /// Where the partitions are.
    partitions: Vec<Range<u64>>,
    /// Kernel images of the first version and of the update.
    first: Vec<u8>,
    update: Vec<u8>,
    /// Files with root file system and hashes of the update.
    slot: [PathBuf; 2],
}

#[test]
#[ignore = "boots a machine: make test-images, make test-powercut"]
fn a_node_comes_back_from_a_power_cut_at_any_write_of_an_update() -> Result<()> {
    let mut node = Node::new("update-power", &[GOOD])?;
    off(node.member()?)?;
    node.setting.start_services()?;
    let [before, log] = ["before.raw", "writes.log"].map(|name| node.setting.path(name));
    write_log::copy(&node.disk, &before)?;
    let (written, kept) = record(&mut node, &log)?;
    try_cuts(&mut node, [&before, &log], [written, kept], BOOTS)
}

/// The update of the test before, by this machine's kernel in place of a node's: QEMU's storage daemon shows the disk as a file.
#[test]
#[ignore = "needs the image of make mkosi, and root: make test-images, make test-powercut"]
fn an_update_by_this_kernel_survives_a_power_cut_at_any_write() -> Result<()> {
    let mut node = Node::new("update-power-host", &[GOOD])?;
    let [before, log] = ["before.raw", "writes.log"].map(|name| node.setting.path(name));
    write_log::copy(&node.disk, &before)?;
    let release = node.release(&GOOD)?;
    let disk = RecordedDisk::new(&node.disk, &log)?;
    let parts = Parts::of(&node, &before)?;
    let part = |index: usize| disk.part(&parts.partitions[index]);
    let place = ImageDisk {
        running: Words {
            version: ImageVersion::parse(FIRST).unwrap(),
            root: "UUID=of-the-running-version".to_owned(),
        },
        disk: before.clone(),
        esp: (part(0)?, 0),
        root: part(3)?,
        hashes: part(4)?,
    };
    update_here(&place, &node.setting.path("maker.pub"), &release)?;
    let written = write_log::len(&log)?;
    let mut esp = File::options().read(true).write(true).open(&place.esp.0);
    let esp = esp.as_mut().unwrap();
    let kept = Slots::read(esp, 0).and_then(|mut slots| slots.bless(esp, GOOD.version));
    kept.context("keep the update")?;
    let kept = write_log::len(&log)?;
    drop(disk);
    try_cuts(&mut node, [&before, &log], [written, kept], 0)
}

/// Looks at the disk after power cuts at several instants. A disk after a cut is the disk `before` with the first writes of `log`; the two
/// numbers say after how many writes the update is written, and the version kept. Boots the machine after some of the cuts.
fn try_cuts(
    node: &mut Node,
    [before, log]: [&Path; 2],
    [written, kept]: [usize; 2],
    boots: usize,
) -> Result<()> {
    let log = WriteLog::read(log)?;
    let parts = Parts::of(node, before)?;
    parts.are_the_only_ones_written(&log)?;

    let (seed, cuts) = write_log::chosen("update", SAMPLE);
    let mut random = Random::new(seed);
    let instants = instants(&log, &parts.partitions[0], cuts, &mut random);
    for (tried, cut) in (1..).zip(instants) {
        write_log::copy(before, &node.disk)?;
        let lost = log.cut(&node.disk, cut, &mut random)?;
        let at = format!(
            "{tried} of {cuts}: the power failed after {cut} of {} writes, {lost} of them lost or torn (FIRSTLIGHT_SEED={seed})",
            log.len()
        );
        let found = parts.complete(node).context(&at)?;
        let has = |name: &str| found.iter().any(|it| it.contains(name));
        let update = format!("firstlight_{}", GOOD.version);
        let is_lost =
            cut >= written && !has(&update) || cut >= kept && !has(&format!("{update}.efi"));
        if is_lost || !has(FIRST) {
            return Err(Failure(format!("{at}: it has only {found:?}")));
        }
        let mut said = found.join(" ");
        let mut running = FIRST;
        if tried * boots / cuts > (tried - 1) * boots / cuts {
            let mut vm = node.setting.machine.boot()?;
            let line = vm.console.wait_for(" member:", PATIENCE).context(&at)?;
            said = format!("{said}; {}", line.text);
            off(vm)?;
        }
        if node.images().contains(&format!("{update}.efi")) {
            running = GOOD.version;
        }
        parts.accept_another(node, running).context(&at)?;
        println!("{at}: {said}");
    }
    Ok(())
}

/// Records the update and its trial. Returns after how many writes the update is written, and after how many it is kept.
fn record(node: &mut Node, log: &Path) -> Result<(usize, usize)> {
    node.setting.machine.write_log = Some(("image", log.to_owned()));
    let mut vm = node.setting.machine.boot()?;
    said(&mut vm, " member:")?;
    let release = node.release(&GOOD)?;
    println!("{}", node.send(&vm, &release)?);
    let written = write_log::len(log)?;
    off(vm)?;
    let mut vm = node.setting.machine.boot()?;
    said(&mut vm, " trial: version 0.4.0 is kept")?;
    let kept = write_log::len(log)?;
    off(vm)?;
    node.setting.machine.write_log = None;
    Ok((written, kept))
}

/// Returns the instants: half of them anywhere, half of them beside a write of a few sectors to the EFI system partition, since most
/// writes are large ones of a root file system.
fn instants(log: &WriteLog, esp: &Range<u64>, cuts: usize, random: &mut Random) -> Vec<usize> {
    let is_small =
        |it: &Range<u64>| esp.contains(&it.start) && it.end - it.start <= 8 * write_log::SECTOR;
    let small: Vec<usize> = (1..)
        .zip(log.ranges())
        .filter(|(_, range)| is_small(range))
        .map(|(after, _)| after)
        .collect();
    let mut instants: Vec<usize> = (0..cuts)
        .map(|number| match number % 2 {
            0 => random.below(log.len() + 1),
            _ => small[random.below(small.len())],
        })
        .collect();
    instants.sort();
    instants
}

impl Parts {
    fn of(node: &Node, disk: &Path) -> Result<Parts> {
        let table = run(Command::new("/sbin/sfdisk").arg("--json").arg(disk));
        let table: serde_json::Value =
            serde_json::from_str(&table).context("read the partition table")?;
        let partitions = table["partitiontable"]["partitions"].as_array();
        let range = |it: &serde_json::Value| {
            let [start, size] = ["start", "size"].map(|name| it[name].as_u64().unwrap_or_default());
            start * 512..(start + size) * 512
        };
        let release = image_of_version(NEXT)?.with_file_name("update");
        let folder = node.setting.machine.folder();
        let read = |path: PathBuf| fs::read(path).context("read a kernel image");
        Ok(Parts {
            partitions: partitions.into_iter().flatten().map(range).collect(),
            first: read(folder.join("first.efi"))?,
            update: read(GOOD.uki(folder)?)?,
            slot: ["root.img", "hashes.img"].map(|name| release.join(name)),
        })
    }

    /// Neither the partition table nor the slot that runs is written.
    fn are_the_only_ones_written(&self, log: &WriteLog) -> Result<()> {
        let [esp, _, _, root, hashes] = &self.partitions[..] else {
            return Err(Failure("expected five partitions".to_owned()));
        };
        let is_within = |it: &Range<u64>, part: &Range<u64>| {
            it.is_empty() || part.start <= it.start && it.end <= part.end
        };
        let mut ranges = log.ranges();
        match ranges.find(|it| {
            ![esp, root, hashes]
                .into_iter()
                .any(|part| is_within(it, part))
        }) {
            None => Ok(()),
            Some(range) => Err(Failure(format!("bytes {range:?} of the disk were written"))),
        }
    }

    /// Returns the names of the images that systemd-boot finds; an error if one of them is not complete.
    fn complete(&self, node: &Node) -> Result<Vec<String>> {
        let folder = node.setting.path("found");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).context("make a folder")?;
        run(node
            .mtool("mcopy")
            .args(["-n", "::EFI/Linux/*.efi"])
            .arg(&folder));
        let mut names = vec![];
        for entry in fs::read_dir(&folder).context("read a folder")? {
            let path = entry.context("read a folder")?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let bytes = fs::read(&path).context("read a kernel image")?;
            let is_first = name.contains(FIRST) && bytes == self.first;
            let is_update = name.contains(GOOD.version) && bytes == self.update;
            let is_complete = is_first || is_update && self.has_slot(&node.disk)?;
            if !is_complete {
                return Err(Failure(format!("{name} is not complete")));
            }
            names.push(name.into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// The next update has its place, in whichever state the power cut has left the names.
    fn accept_another(&self, node: &Node, running: &str) -> Result<()> {
        let disk = File::options().read(true).write(true).open(&node.disk);
        let mut disk = disk.context("open the disk")?;
        let start = self.partitions[0].start;
        let mut slots = Slots::read(&mut disk, start).context("read the images")?;
        slots
            .keep_only(&mut disk, running)
            .and_then(|()| slots.add(&mut disk, "0.9.0", running, &[1; 4096], 3))
            .context("write another update")?;
        let names = node.images();
        let is_kept = |name: &String| name.contains(running);
        if names.iter().any(|it| it == "firstlight_0.9.0+3.efi") && names.iter().any(is_kept) {
            Ok(())
        } else {
            Err(Failure(format!("after another update there are {names:?}")))
        }
    }

    /// Returns whether the second slot has the root file system and the hashes of the update.
    fn has_slot(&self, disk: &Path) -> Result<bool> {
        let mut is_equal = true;
        for (file, partition) in self.slot.iter().zip(&self.partitions[3..]) {
            let open = |path: &Path| File::open(path).context("open a slot");
            let (mut file, mut disk) = (open(file)?, open(disk)?);
            disk.seek(SeekFrom::Start(partition.start))
                .context("read a slot")?;
            let (mut part, mut found) = (vec![0; PART], vec![0; PART]);
            loop {
                let len = file.read(&mut part).context("read a slot")?;
                if len == 0 {
                    break;
                }
                disk.read_exact(&mut found[..len]).context("read a slot")?;
                is_equal &= part[..len] == found[..len];
            }
        }
        Ok(is_equal)
    }
}

/// A disk whose writes are recorded, as block devices of this machine.
struct RecordedDisk {
    daemon: Child,
    file: PathBuf,
    devices: RefCell<Vec<PathBuf>>,
}

impl RecordedDisk {
    fn new(disk: &Path, log: &Path) -> Result<RecordedDisk> {
        let file = disk.with_extension("fuse");
        File::create(&file).context("make a mount point")?;
        File::create(log).context("make the log of writes")?;
        let node = format!(
            "driver=blklogwrites,node-name=disk,file.driver=file,file.filename={},log.driver=file,log.filename={},log-super-update-interval=1",
            disk.display(),
            log.display()
        );
        let export = format!(
            "type=fuse,id=disk,node-name=disk,mountpoint={},writable=on",
            file.display()
        );
        let mut daemon = Command::new("qemu-storage-daemon");
        daemon.args(["--blockdev", &node, "--export", &export]);
        let daemon = daemon.spawn().context("start qemu-storage-daemon")?;
        for _ in 0..100 {
            if fs::metadata(&file).is_ok_and(|it| it.len() > 0) {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(RecordedDisk {
            daemon,
            file,
            devices: RefCell::default(),
        })
    }

    /// Returns the device of a partition.
    fn part(&self, range: &Range<u64>) -> Result<PathBuf> {
        let size = (range.end - range.start).to_string();
        let device = run(Command::new("/sbin/losetup")
            .args(["--find", "--show", "--offset", &range.start.to_string()])
            .args(["--sizelimit", &size])
            .arg(&self.file));
        let device = PathBuf::from(device.trim());
        self.devices.borrow_mut().push(device.clone());
        Ok(device)
    }
}

impl Drop for RecordedDisk {
    fn drop(&mut self) {
        for device in self.devices.take() {
            run(Command::new("/sbin/losetup").arg("--detach").arg(device));
        }
        let _ = Command::new("kill")
            .arg(self.daemon.id().to_string())
            .status();
        let _ = self.daemon.wait();
    }
}

/// Writes the release in this folder as a node does.
fn update_here(place: &ImageDisk, key: &Path, release: &Path) -> Result<()> {
    let read = |name: &str| fs::read(release.join(name)).context("read a release");
    let key = fs::read_to_string(key).context("read a key")?;
    let key = PublicKey::from_line(&key).context("read a key")?;
    let open = |name: &str| File::open(release.join(name)).context("open a release");
    let mut content = open("firstlight.efi")?
        .chain(open("root.img")?)
        .chain(open("hashes.img")?);
    let signature = read("release.json.sig")?;
    let signature = String::from_utf8_lossy(&signature);
    let offer = Offer {
        list: &read("release.json")?,
        signature: &signature,
        content: &mut content,
        policy: None,
    };
    let say = &mut |text: &str| println!("{text}");
    update::run(place, &[key], offer, say)
        .map(drop)
        .context("update")
}
