//! The image that `make mkosi` builds: its machine becomes a node and comes back by rejoin, with the registers that `firstlight
//! measure` computed from only the image; no user gets a shell; a changed byte, several images and a full disk are named.

use super::DISK;
use machine::flow::{self, INIT, PATIENCE, Setting};
use machine::vm::{self, CARD, Firmware, Machine, Source, Vm};
use machine::{Context, Failure, Result, root, script};
use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::boot_image::run;

/// The EFI system partition of the image, as mtools names it: after the partition table.
const ESP_OFFSET: &str = "@@1M";
const DEFAULT: &str = "EFI/BOOT/BOOTX64.EFI";
/// Text that a person at the console could type, and the answer that only a shell would give.
const TYPED: &str = "echo shell-$((6*7))";
const ANSWER: &str = "shell-42";
/// Limits of the root file system and of the kernel image, in MB.
const ROOT_LIMIT: u64 = 455;
const UKI_LIMIT: u64 = 42;

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_machine_with_the_image_of_mkosi_becomes_a_node_and_comes_back_by_rejoin() -> Result<()> {
    let mut setting = setting("mkosi", &image()?, DISK)?;
    let mut vm = flow::new_machine(&mut setting)?;
    // the node quotes its registers, and the status compares each with the policy
    setting.accept(&flow::attestation_key(&vm)?)?;
    println!("{}", setting.status_of_fresh(&vm, INIT)?);
    ["", "root", "", TYPED]
        .iter()
        .try_for_each(|line| vm.type_line(line))?;
    println!("{}", setting.init(&vm)?);
    vm.console.wait_for(" complete:", PATIENCE)?;
    vm.press_power_button()?;
    vm.wait_off(PATIENCE)?;
    nobody_logs_in(&vm)?;
    drop(vm);

    setting.start_services()?;
    let mut vm = setting.machine.boot()?;
    let steps = [
        " ticket:",
        " measured:",
        " mounted:",
        " ready: a member",
        " member:",
    ];
    for step in steps {
        said(&mut vm, step)?;
    }
    // its PCR 15 is the cluster's
    println!("{}", setting.status_of_member(&vm, INIT)?);
    vm.press_power_button()?;
    vm.wait_off(PATIENCE)?;
    nobody_logs_in(&vm)?;
    drop(vm);

    // without its services, and with a network card that comes late
    setting.stop_services();
    setting.machine.unplugged = vec![CARD.to_owned()];
    let mut vm = setting.machine.boot()?;
    said(&mut vm, "network: this machine has no network card")?;
    vm.plug(CARD)?;
    said(&mut vm, " network: 10.42.0.15")?;
    said(&mut vm, "join service 10.42.0.1:30090: ")?;
    println!("{}", setting.recover(&vm)?);
    for step in [" key-slot:", " measured:", " mounted:", " ready: a member"] {
        said(&mut vm, step)?;
    }
    nobody_logs_in(&vm)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn the_image_of_mkosi_names_what_a_new_machine_lacks() -> Result<()> {
    let mut setting = setting("mkosi-new", &image()?, DISK)?;
    setting.machine.tpm = false;
    let mut vm = setting.machine.boot()?;
    said(&mut vm, "error: this machine has no TPM")?;
    said(&mut vm, "it restarts in 10 s")?;
    // QEMU ends when the machine restarts
    vm.wait_off(PATIENCE)?;
    nobody_logs_in(&vm)?;
    setting.machine.tpm = true;

    setting.machine.unplugged = vec!["state".to_owned()];
    let mut vm = setting.machine.boot()?;
    said(&mut vm, "waiting: for a disk with serial number \"state\"")?;
    vm.plug("state")?;
    for step in [" formatted:", " mounted:", " ready:"] {
        said(&mut vm, step)?;
    }
    nobody_logs_in(&vm)
}

/// The release permits no login: see [`nobody_logs_in`].
#[test]
#[ignore = "boots a machine: make test-images"]
fn the_debug_image_gives_a_root_shell_on_the_console() -> Result<()> {
    let mut setting = setting("mkosi-debug", &image_of("debug")?, DISK)?;
    let mut vm = flow::new_machine(&mut setting)?;
    // what is typed before the shell is ready may be lost
    let typed = format!("{TYPED} of user $(id -u)");
    let answer = (0..10).find_map(|_| {
        vm.type_line(&typed).ok()?;
        let answer = format!("{ANSWER} of user 0");
        vm.console.wait_for(&answer, Duration::from_secs(30)).ok()
    });
    match answer {
        Some(line) => println!("  {}", line.text),
        None => return Err(Failure("no shell answers".to_owned())),
    }
    Ok(())
}

/// A byte of each of the blocks with the first inodes, of which some are read. With a change in the first block, whose checksum udev
/// verifies, the file system would not be found at all.
#[test]
#[ignore = "boots a machine: make test-images"]
fn no_system_starts_from_a_root_partition_with_a_changed_byte() -> Result<()> {
    let image = image()?;
    let mut setting = setting("mkosi-tampered", &image, DISK)?;
    let copy = copy_of(&image, setting.machine.folder());
    let root = root_partition(&copy)?;
    for block in 1..64 {
        change_byte(&copy, root + block * 4096 + 16)?;
    }
    setting.machine.source = Source::Disk(copy);
    let mut vm = setting.machine.boot()?;
    for named in ["is corrupted", "dm-verity device corrupted"] {
        said(&mut vm, named)?;
    }
    vm.wait_off(PATIENCE)?;
    nobody_logs_in(&vm)?;
    let lines = vm.console.lines();
    if lines.iter().any(|it| it.text.contains("firstlight[run]")) {
        Err(Failure("the system started".to_owned()))
    } else {
        Ok(())
    }
}

#[test]
#[ignore = "needs the image of make mkosi: make test-images"]
fn measure_names_several_images_and_one_that_a_full_partition_cut_off() -> Result<()> {
    let image = image()?;
    let folder = tempfile::tempdir().context("make a folder")?;
    let copy = copy_of(&image, folder.path());
    let alone = policy(&copy)?;
    let uki = image.with_extension("efi");

    // the same image in a second file has the same registers
    let esp = format!("{}{ESP_OFFSET}", copy.display());
    let mtool = |name: &str| {
        let mut command = Command::new(name);
        command.env("MTOOLS_SKIP_CHECK", "1").args(["-i", &esp]);
        command
    };
    run(mtool("mdel").arg("::EFI/Linux/SPARE1"));
    run(mtool("mcopy").arg(&uki).arg("::EFI/Linux/a.efi"));
    let both = policy(&copy)?;
    let json: serde_json::Value = serde_json::from_str(&both).context("read a policy")?;
    let alone: serde_json::Value = serde_json::from_str(&alone).context("read a policy")?;
    assert_eq!(json["name"], "image.raw, a.efi", "{both}");
    assert_eq!(json["measurements"], alone["measurements"], "{both}");
    assert!(json["images"].is_null(), "{both}");
    // the partition gets too full for a third
    let bytes = std::fs::read(&uki).context("read the UKI")?;
    let filler = folder.path().join("filler");
    let free = (256usize - 88) << 20;
    let room = free.checked_sub(bytes.len() * 5 / 2);
    let room = room.ok_or_else(|| Failure("the UKI is too large for this test".to_owned()))?;
    std::fs::write(&filler, vec![0; room]).context("write a file")?;
    run(mtool("mcopy").arg(&filler).arg("::filler"));
    let third = mtool("mcopy").arg(&uki).arg("::EFI/Linux/b.efi").output();
    let third = third.context("run mcopy")?;
    if third.status.success() {
        return Err(Failure("the partition should be full".to_owned()));
    }
    same(&policy(&copy)?, &both)?;

    // the part of a file that other programs leave if there is no space for the copy
    let half = folder.path().join("half.efi");
    std::fs::write(&half, &bytes[..bytes.len() / 2]).context("write half an image")?;
    run(mtool("mcopy").arg("-o").arg(&half).arg("::EFI/Linux/a.efi"));
    refused(&copy, "EFI/Linux/a.efi: section ")?;
    run(mtool("mdel").arg(format!("::{DEFAULT}")));
    refused(&copy, &format!("there is no {DEFAULT}; name the image"))
}

#[test]
#[ignore = "needs the image of make mkosi: make test-images"]
fn the_bill_of_materials_of_the_image_is_complete() -> Result<()> {
    let image = image()?;
    let read = |path: &Path| -> Result<serde_json::Value> {
        let bytes = std::fs::read(path).context("read a file beside the image")?;
        serde_json::from_slice(&bytes).context("read a file beside the image")
    };
    let bill = read(&image.with_extension("cdx.json"))?;
    let components = bill["components"].as_array().unwrap();
    let has_hash = |component: &serde_json::Value| {
        let hash = component["hashes"][0]["content"].as_str();
        hash.is_some_and(|hash| hash.len() == 64)
    };
    let named = |name: &str| components.iter().find(|it| it["name"] == name);
    for file in ["firstlight.manifest", "initrd.manifest"] {
        let manifest = read(&image.with_file_name(file))?;
        let packages = manifest["packages"].as_array().unwrap();
        assert!(packages.len() > 50, "{file}: {}", packages.len());
        for package in packages {
            let of_package = |it: &&serde_json::Value| {
                let properties = it["properties"].as_array();
                it["name"] == package["name"]
                    && it["version"] == package["version"]
                    && properties.is_some_and(|all| all.iter().any(|one| one["value"] == file))
            };
            let component = components.iter().find(of_package);
            assert!(component.is_some_and(has_hash), "{file}: {package}");
        }
    }
    for program in ["unlock", "bootstrapper"] {
        let component = named(program).unwrap_or_else(|| panic!("no {program}"));
        assert!(has_hash(component), "{component}");
        let linked = component["components"].as_array().unwrap();
        for library in ["ring", "musl"] {
            assert!(linked.iter().any(|it| it["name"] == library), "{library}");
        }
    }
    let others = ["kubeadm", "kubelet", "kubectl", "containerd"].map(named);
    assert!(others.iter().all(|it| it.is_some_and(has_hash)));
    let hash = run(Command::new("sha256sum").arg(&image));
    assert_eq!(
        bill["metadata"]["component"]["hashes"][0]["content"],
        hash[..64]
    );
    Ok(())
}

#[test]
#[ignore = "needs the image of make mkosi: make test-images"]
fn the_image_is_not_larger_than_promised() -> Result<()> {
    let image = image()?;
    for (file, limit) in [
        ("update/root.img", ROOT_LIMIT),
        ("firstlight.efi", UKI_LIMIT),
    ] {
        let size = std::fs::metadata(image.with_file_name(file)).context("read a size")?;
        let size = size.len() / 1_000_000;
        println!("  {file}: {size} MB, at most {limit}");
        assert!(size <= limit, "{file}: {size} MB, at most {limit}");
    }
    Ok(())
}

#[test]
#[ignore = "builds an image: make test-images"]
fn an_image_with_another_package_than_the_list_has_is_refused() -> Result<()> {
    let image = image()?;
    // the one that is refused is deleted
    let folder = tempfile::tempdir_in(image.parent().unwrap()).context("make a folder")?;
    let copy = folder.path().join("firstlight.raw");
    let bill = copy.with_extension("cdx.json");
    std::fs::hard_link(&image, &copy).context("link the image")?;
    std::fs::copy(image.with_extension("cdx.json"), &bill).context("copy the bill of materials")?;
    // without it the image would be built again
    std::fs::copy(
        image.with_file_name("version"),
        folder.path().join("version"),
    )
    .context("copy the version")?;
    let packages = root().join("tools/image-packages.py");
    let list = run(Command::new(packages).arg(&bill));
    assert!(list.lines().count() > 100, "{list}");
    let build = |list: &str| {
        let lock = folder.path().join("packages.sha256");
        std::fs::write(&lock, list).unwrap();
        let mut build = Command::new(root().join("tools/mkosi.sh"));
        build.env("LOCK", lock).env("OUT", folder.path());
        build.output().unwrap()
    };
    assert!(build(&list).status.success());
    assert!(copy.exists());
    let line = list.lines().find(|line| line.contains("  systemd_"));
    let other = list.replace(&line.unwrap()[..64], &"0".repeat(64));
    let refused = build(&other);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && !copy.exists(), "{why}");
    let zeros = format!(", expected {}", "0".repeat(64));
    let named = |line: &str| line.starts_with("systemd_") && line.ends_with(&zeros);
    assert!(why.lines().any(named), "{why}");
    Ok(())
}

/// The release of the image, built if need be.
pub fn image() -> Result<PathBuf> {
    image_of("release")
}

/// The release of another version of the image.
pub fn image_of_version(version: &str) -> Result<PathBuf> {
    if version == env!("CARGO_PKG_VERSION") {
        return image();
    }
    let mut build = Command::new(root().join("tools/mkosi.sh"));
    build.env("VERSION", version);
    build.env(
        "OUT",
        root().join(format!("target/mkosi/release-{version}")),
    );
    Ok(PathBuf::from(run(build.arg("release")).trim()))
}

fn image_of(profile: &str) -> Result<PathBuf> {
    script("tools/mkosi.sh", &[Path::new(profile)]).map(PathBuf::from)
}

/// A machine with a blank state disk that boots `image`, and the policy that `firstlight measure` computes from it.
pub fn setting(name: &str, image: &Path, disk: u64) -> Result<Setting> {
    let mut machine = Machine::new(name)?;
    machine.firmware = Firmware::Uefi;
    machine.memory = 1024;
    machine.source = Source::Disk(image.to_owned());
    Setting::around(machine, disk, &policy(image)?)
}

fn policy(image: &Path) -> Result<String> {
    let options = ["--secure-boot", "off", "--units", "all"].map(OsStr::new);
    vm::measured(&[&[image.as_os_str()], &options[..]].concat())
}

/// `firstlight measure` writes no policy, and gives the reason.
fn refused(image: &Path, why: &str) -> Result<()> {
    match policy(image) {
        Err(Failure(said)) if said.contains(why) => {
            println!("  {}", said.trim());
            Ok(())
        }
        Err(Failure(said)) => Err(Failure(format!("{why:?} should be the reason: {said}"))),
        Ok(_) => Err(Failure(format!("there is a policy in spite of {why:?}"))),
    }
}

fn same(policy: &str, expected: &str) -> Result<()> {
    if policy == expected {
        Ok(())
    } else {
        Err(Failure(format!("expected {expected}, got {policy}")))
    }
}

fn copy_of(image: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join("image.raw");
    run(Command::new("cp")
        .arg("--sparse=always")
        .args([image, &copy]));
    copy
}

/// Where the root partition begins, in bytes.
fn root_partition(image: &Path) -> Result<u64> {
    let table = run(Command::new("/sbin/sfdisk").arg("--json").arg(image));
    let table: serde_json::Value =
        serde_json::from_str(&table).context("read the partition table")?;
    let table = &table["partitiontable"];
    let sector = table["sectorsize"].as_u64().unwrap_or(512);
    let start = table["partitions"][1]["start"].as_u64();
    start
        .map(|start| start * sector)
        .ok_or_else(|| Failure("the image has no second partition".to_owned()))
}

fn change_byte(disk: &Path, at: u64) -> Result<()> {
    let disk = std::fs::File::options().read(true).write(true).open(disk);
    let disk = disk.context("open the disk image")?;
    let mut byte = [0];
    disk.read_exact_at(&mut byte, at)
        .and_then(|()| disk.write_all_at(&[!byte[0]], at))
        .context("change a byte")
}

/// Waits for a text on the console.
pub fn said(vm: &mut Vm, text: &str) -> Result<()> {
    let line = vm.console.wait_for(text, PATIENCE)?;
    println!("  {}", line.text);
    Ok(())
}

/// No line of the console offers a login or answers what was typed.
fn nobody_logs_in(vm: &Vm) -> Result<()> {
    let lines = vm.console.lines();
    let line = lines.iter().find(|line| {
        ["login:", ANSWER, "sulogin", "root@"]
            .iter()
            .any(|word| line.text.contains(word))
    });
    match line {
        None => Ok(()),
        Some(line) => Err(Failure(format!("somebody may log in: {}", line.text))),
    }
}
