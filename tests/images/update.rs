//! The image of mkosi updates itself: the node writes another version to its other slot and keeps it, or goes back to the old version by
//! itself.
//!
//! QEMU ends where a machine restarts, so each boot of these tests is a switching on.

use super::DISK;
use super::mkosi::{image_of_version, said};
use super::words::with_words;
use machine::flow::{self, INIT, PATIENCE, Setting};
use machine::vm::{self, Firmware, Machine, Source, Vm};
use machine::{Context, Failure, Result, dist};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::boot_image::run;

pub(super) const FIRST: &str = "0.1.0";
/// The version whose root file system all updates have.
pub(super) const NEXT: &str = "0.2.0";

/// A member that runs the first version, and the maker of further ones.
pub(super) struct Node {
    pub(super) setting: Setting,
    pub(super) disk: PathBuf,
}

/// What the kernel command line of an update has in addition.
pub(super) struct Update {
    pub(super) version: &'static str,
    words: &'static str,
}

/// The kernel finds no program for the initrd.
const PANICS: Update = Update {
    version: "0.2.0",
    words: "rdinit=/nothing init=/nothing",
};
const NEVER_HEALTHY: Update = Update {
    version: "0.3.0",
    words: "firstlight.trial-healthy=86400 firstlight.trial-limit=20",
};
pub(super) const GOOD: Update = Update {
    version: "0.4.0",
    words: "firstlight.trial-healthy=10 firstlight.trial-limit=600",
};
/// The policy does not have it.
const UNKNOWN: Update = Update {
    version: "0.5.0",
    words: "",
};

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_node_refuses_bad_updates_keeps_a_good_one_and_comes_back_from_one_that_panics() -> Result<()> {
    let mut node = Node::new("update", &[PANICS, GOOD])?;
    let mut vm = node.member()?;
    node.update_is_refused(&vm, &UNKNOWN, "PCR 4: expected ")?;
    let damaged = node.release(&PANICS)?;
    let root = damaged.join("root.img");
    let mut bytes = fs::read(&root).context("read a root file system")?;
    bytes[4096] ^= 1;
    fs::write(&root, bytes).context("damage a root file system")?;
    let why = node.send(&vm, &damaged).err().map(|error| error.0);
    has(
        why.as_deref().unwrap_or_default(),
        "root was damaged on the way",
    )?;
    node.has_images(&["firstlight_0.1.0.efi"])?;

    let bad = node.release(&PANICS)?;
    println!("{}", node.send(&vm, &bad)?);
    node.has_images(&["firstlight_0.1.0.efi", "firstlight_0.2.0+3.efi"])?;
    off(vm)?;
    node.setting.start_services()?;
    for left in ["+2-1", "+1-2", "+0-3"] {
        let mut vm = node.setting.machine.boot()?;
        vm.wait_off(PATIENCE)?;
        let name = format!("firstlight_0.2.0{left}.efi");
        node.has_images(&["firstlight_0.1.0.efi", &name])?;
        println!("  panicked, now {name}");
    }
    vm = node.setting.machine.boot()?;
    said(&mut vm, " ready: a member")?;
    said(&mut vm, " member:")?;

    let good = node.release(&GOOD)?;
    println!("{}", node.send(&vm, &good)?);
    node.has_images(&["firstlight_0.1.0.efi", "firstlight_0.4.0+3.efi"])?;
    off(vm)?;
    let mut vm = node.setting.machine.boot()?;
    for step in [
        " ticket:",
        " trial: version 0.4.0 must be healthy",
        " member:",
        " trial: version 0.4.0 is kept",
    ] {
        said(&mut vm, step)?;
    }
    println!("{}", node.setting.status_of_member(&vm, INIT)?);
    node.has_images(&["firstlight_0.1.0.efi", "firstlight_0.4.0.efi"])?;
    // back to an older version only by a host, and only if the policy still has it
    node.update_is_refused(&vm, &PANICS, "is not newer than the running version 0.4.0")
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_version_that_is_never_healthy_restarts_its_machine_and_the_old_one_comes_back() -> Result<()> {
    let mut node = Node::new("update-unhealthy", &[NEVER_HEALTHY])?;
    let vm = node.member()?;
    let bad = node.release(&NEVER_HEALTHY)?;
    println!("{}", node.send(&vm, &bad)?);
    off(vm)?;
    // the other test has all tries
    run(node.mtool("mren").args([
        "::EFI/Linux/firstlight_0.3.0+3.efi",
        "firstlight_0.3.0+1.efi",
    ]));
    node.setting.start_services()?;
    let mut vm = node.setting.machine.boot()?;
    said(&mut vm, " trial: version 0.3.0 must be healthy")?;
    said(&mut vm, " trial: not healthy in time: the machine restarts")?;
    vm.wait_off(PATIENCE)?;
    node.has_images(&["firstlight_0.1.0.efi", "firstlight_0.3.0+0-1.efi"])?;
    let mut vm = node.setting.machine.boot()?;
    said(&mut vm, " ready: a member")
}

impl Node {
    /// Makes the disk of the first version, whose image has the maker's key, and a policy with it and these updates.
    pub(super) fn new(name: &str, updates: &[Update]) -> Result<Node> {
        let mut machine = Machine::new(name)?;
        machine.firmware = Firmware::Uefi;
        machine.memory = 1024;
        let folder = machine.folder().to_owned();
        run(Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(folder.join("maker")));
        let first = image_of_version(FIRST)?;
        let disk = folder.join("image.raw");
        run(Command::new("cp")
            .arg("--sparse=always")
            .args([&first, &disk]));
        let words = accepts_updates(&folder)?;
        let uki = folder.join("first.efi");
        with_words(&first.with_extension("efi"), &uki, FIRST, FIRST, &words)?;
        run(mtool(&disk, "mcopy")
            .arg("-o")
            .arg(&uki)
            .arg(format!("::EFI/Linux/firstlight_{FIRST}.efi")));
        machine.source = Source::OwnDisk(disk.clone());

        // the policy of each image, on a copy of this disk
        let copy = folder.join("copy.raw");
        let mut policy = measured(&disk, &[])?;
        for update in updates {
            run(Command::new("cp")
                .arg("--sparse=always")
                .args([&disk, &copy]));
            let uki = update.uki(&folder)?;
            run(mtool(&copy, "mdel").arg("::EFI/Linux/SPARE1"));
            let path = format!("EFI/Linux/{}.efi", update.version);
            run(mtool(&copy, "mcopy").arg(&uki).arg(format!("::{path}")));
            let before = folder.join("before.json");
            fs::write(&before, &policy).context("write a policy")?;
            let before = before.as_os_str();
            let more = [
                OsStr::new("--uki"),
                path.as_ref(),
                OsStr::new("--add-to"),
                before,
                OsStr::new("--name"),
                update.version.as_ref(),
            ];
            policy = measured(&copy, &more)?;
        }
        let _ = fs::remove_file(copy);
        let setting = Setting::around(machine, DISK, &policy)?;
        Ok(Node { setting, disk })
    }

    /// Boots the fresh machine, and makes it a member.
    pub(super) fn member(&mut self) -> Result<Vm> {
        let mut vm = flow::new_machine(&mut self.setting)?;
        println!("{}", self.setting.init(&vm)?);
        said(&mut vm, " member:")?;
        Ok(vm)
    }

    /// Makes and signs the release of an update.
    pub(super) fn release(&self, update: &Update) -> Result<PathBuf> {
        let folder = self.setting.machine.folder();
        let release = folder.join("release");
        let _ = fs::remove_dir_all(&release);
        let made = image_of_version(NEXT)?;
        run(Command::new("cp")
            .args(["-r", "--sparse=always"])
            .arg(made.with_file_name("update"))
            .arg(&release));
        let uki = update.uki(folder)?;
        fs::copy(&uki, release.join("firstlight.efi")).context("copy a kernel image")?;
        let list = release.join("release.json");
        let text = fs::read_to_string(&list).context("read a list")?;
        let mut json: serde_json::Value = serde_json::from_str(&text).context("read a list")?;
        let digest = run(Command::new("sha256sum").arg(&uki));
        let size = fs::metadata(&uki).context("read a size")?.len();
        json["version"] = update.version.into();
        json["image"] = serde_json::json!({"size": size, "sha256": digest[..64]});
        fs::write(&list, json.to_string()).context("write a list")?;
        run(Command::new("ssh-keygen")
            .args(["-q", "-Y", "sign", "-n", "firstlight-update", "-f"])
            .arg(folder.join("maker"))
            .arg(&list));
        Ok(release)
    }

    /// `firstlight node update`: returns what it says.
    pub(super) fn send(&self, vm: &Vm, release: &Path) -> Result<String> {
        let port = vm.ports.get(&INIT).copied().unwrap_or_default();
        let output = Command::new(dist("firstlight")?)
            .current_dir(self.setting.machine.folder())
            .args(["node", "update", &format!("=127.0.0.1:{port}")])
            .args(["--policy", "policy.json", "--timeout", "90s", "--release"])
            .arg(release)
            .stdin(Stdio::null())
            .output()
            .context("run firstlight")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let text = text(&output.stderr) + &text(&output.stdout);
        if output.status.success() {
            Ok(text)
        } else {
            Err(Failure(text))
        }
    }

    fn update_is_refused(&self, vm: &Vm, update: &Update, why: &str) -> Result<()> {
        let release = self.release(update)?;
        let before = self.images();
        match self.send(vm, &release) {
            Err(Failure(text)) => {
                println!("  {}", text.trim());
                has(&text, why)?;
            }
            Ok(_) => return Err(Failure(format!("{} should be refused", update.version))),
        }
        if before == self.images() {
            Ok(())
        } else {
            Err(Failure(format!("{} changed the disk", update.version)))
        }
    }

    pub(super) fn mtool(&self, name: &str) -> Command {
        mtool(&self.disk, name)
    }

    /// Returns the names of the images that systemd-boot finds.
    pub(super) fn images(&self) -> Vec<String> {
        let listed = run(self.mtool("mdir").args(["-b", "::EFI/Linux"]));
        let paths = listed.lines().filter(|line| line.ends_with(".efi"));
        let mut names: Vec<String> = paths
            .map(|path| path.rsplit('/').next().unwrap_or_default().to_owned())
            .collect();
        names.sort();
        names
    }

    fn has_images(&self, expected: &[&str]) -> Result<()> {
        let names = self.images();
        if names == expected {
            Ok(())
        } else {
            Err(Failure(format!("expected {expected:?}, got {names:?}")))
        }
    }
}

impl Update {
    /// Makes the kernel image, which also accepts updates.
    pub(super) fn uki(&self, folder: &Path) -> Result<PathBuf> {
        let made = image_of_version(NEXT)?.with_extension("efi");
        let uki = folder.join(format!("{}.efi", self.version));
        // objcopy writes the time into the file, which is measured
        if uki.exists() {
            return Ok(uki);
        }
        let words = format!("{} {}", accepts_updates(folder)?, self.words);
        with_words(&made, &uki, NEXT, self.version, &words)?;
        Ok(uki)
    }
}

/// Returns the setting with the maker's key.
fn accepts_updates(folder: &Path) -> Result<String> {
    let key = fs::read_to_string(folder.join("maker.pub")).context("read a key")?;
    let key = key.split(' ').nth(1).unwrap_or_default();
    Ok(format!("firstlight.update-key={key}"))
}

fn mtool(disk: &Path, name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("MTOOLS_SKIP_CHECK", "1");
    command.arg("-i").arg(format!("{}@@1M", disk.display()));
    command
}

fn measured(disk: &Path, more: &[&OsStr]) -> Result<String> {
    let options = ["--secure-boot", "off", "--units", "all"].map(OsStr::new);
    vm::measured(&[&[disk.as_os_str()], &options[..], more].concat())
}

pub(super) fn off(mut vm: Vm) -> Result<()> {
    vm.press_power_button()?;
    vm.wait_off(PATIENCE).map(drop)
}

fn has(text: &str, wanted: &str) -> Result<()> {
    if text.contains(wanted) {
        Ok(())
    } else {
        Err(Failure(format!("{wanted:?} should be in {text:?}")))
    }
}
