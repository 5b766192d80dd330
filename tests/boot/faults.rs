//! Faults between power-on and membership: a power cut, a signal, a disk that Constellation left, a wrong command line
//! or initramfs. After each fault the next boot mounts the disk, waits for a key, or
//! refuses with a reason.

use super::{MIB, passed};
use machine::case::Case;
use machine::flow::{self, Setting};
use machine::vm::{Firmware, Vm};
use machine::{Context, Failure, Result, dist};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

const DISK: u64 = 64 * MIB;
pub const PATIENCE: Duration = Duration::from_secs(180);
/// SeaBIOS measures neither kernel nor initramfs, so the policy requires only a fresh node.
const FRESH_NODE: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;
/// Number of power cuts in each of the two tests, each in another part of the run.
const CUTS: u32 = 4;

#[test]
#[ignore = "boots a machine: make boot"]
fn an_interrupted_unlock_and_the_old_systems_keyless_header_end_mounted() -> Result<()> {
    let case = Case {
        script: "unlock.sh",
        programs: &["unlock", "bootstrapper"],
        host_programs: &["cryptsetup"],
        files: vec![(
            "/usr/bin/dm_guest".to_owned(),
            machine::example("dm_guest")?,
        )],
        disks: &[("state", DISK)],
        limit: Duration::from_secs(400),
        ..Case::default()
    };
    passed(case.run()?)
}

#[test]
#[ignore = "boots a machine: make boot"]
fn a_power_cut_during_the_first_boot_is_followed_by_a_first_boot() -> Result<()> {
    let mut setting = small("cut-format")?;
    let mut vm = setting.machine.boot()?;
    let disk = vm.console.wait_for(" disk: ", PATIENCE)?;
    let span = vm.console.wait_for(" mounted:", PATIENCE)?.at - disk.at;
    vm.cut_power();
    for part in 0..CUTS {
        blank(&setting)?;
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for(" disk: ", PATIENCE)?;
        let instant = instant(part, span);
        sleep(instant);
        vm.cut_power();

        let mut vm = setting.machine.boot()?;
        let found = vm.console.wait_for(" disk: ", PATIENCE)?;
        vm.console
            .wait_for(" mounted:", PATIENCE)
            .context(&format!("mount after a cut at {instant:?}"))?;
        println!(
            "cut {:4} ms after the look at the disk: {}",
            instant.as_millis(),
            found.text
        );
    }
    Ok(())
}

#[test]
#[ignore = "boots a machine: make boot"]
fn a_power_cut_during_init_is_followed_by_a_first_boot_or_by_one_that_a_key_opens() -> Result<()> {
    let mut setting = small("cut-init")?;
    // from the quote for the operator's connection to the operator's answer
    let span = Duration::from_millis(800);
    for part in 0..CUTS {
        blank(&setting)?;
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for(" ready:", PATIENCE)?;
        setting.accept(&flow::attestation_key(&vm)?)?;
        let mut operator = start_init(&setting, &vm)?;
        vm.console.wait_for(" quote:", PATIENCE)?;
        let instant = instant(part, span);
        sleep(instant);
        let said = vm.console.lines();
        vm.cut_power();
        let _ = operator.kill();
        operator.wait().context("wait for firstlight init")?;

        let mut vm = setting.machine.boot()?;
        let found = vm.console.wait_for(" disk: ", PATIENCE)?;
        let initialized = found.text.contains("of a cluster's node");
        if said.iter().any(|line| line.text.contains(" committed:")) && !initialized {
            return Err(Failure(format!(
                "committed, but after a cut at {instant:?} it said {:?}",
                found.text
            )));
        }
        if initialized {
            setting.recover(&vm)?;
        }
        vm.console
            .wait_for(" mounted:", PATIENCE)
            .context(&format!("mount after a cut at {instant:?}"))?;
        let end = vm
            .console
            .wait_until("the end of run's start", PATIENCE, |line| {
                line.contains(" ready:") || line.contains(" reset:")
            })?;
        println!(
            "cut {:4} ms after the quote: {}; then {}",
            instant.as_millis(),
            found.text,
            end.text
        );
    }
    Ok(())
}

/// A fresh machine with another command line, then a member with another initramfs: both change PCR 9. Neither the
/// operator nor the join service gives it a key, and both name the register that differs; the machine itself only learns that
/// it was refused. With its original files it opens its disk again.
#[test]
#[ignore = "boots a machine: make boot"]
fn a_machine_that_boots_something_else_gets_no_key_and_only_those_who_refuse_it_see_why()
-> Result<()> {
    let mut setting = Setting::new("something-else", DISK)?;
    let honest = register_9(&setting.machine.policy()?)?;

    let usual = setting.machine.command_line.clone();
    setting.machine.command_line.push_str(" something=else");
    let why = difference(&setting, &honest)?;
    let mut vm = setting.machine.boot()?;
    vm.console.wait_for(" ready:", PATIENCE)?;
    refused(
        "firstlight init",
        &setting.operator(&vm, "init", flow::INIT, &["--init-secret", "init-secret"])?,
        &why,
    )?;
    hears_no_more(&vm, &honest)?;
    vm.cut_power();

    setting.machine.command_line = usual;
    let (mut vm, cluster) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);

    let initramfs = fs::read(setting.machine.initramfs()).context("read the initramfs")?;
    alter(&setting)?;
    let why = difference(&setting, &honest)?;
    setting.start_services()?;
    let mut vm = setting.machine.boot()?;
    vm.console.wait_for("of a cluster's node", PATIENCE)?;
    refused(
        "firstlight recover",
        &setting.operator(&vm, "recover", flow::RECOVERY, &[])?,
        &why,
    )?;
    let heard = vm
        .console
        .wait_for("join service 10.42.0.1:30090: ", PATIENCE)?;
    if !heard.text.contains("refused") {
        return Err(Failure(format!(
            "the node should hear that it is refused: {}",
            heard.text
        )));
    }
    says("join-service", &setting.services_said(), &why)?;
    hears_no_more(&vm, &honest)?;
    let opened = |text: &str| text.contains(" mounted:") || text.contains(" key-slot:");
    if vm.console.lines().iter().any(|line| opened(&line.text)) {
        return Err(Failure("the disk of an altered machine opened".to_owned()));
    }
    println!("{why}\nthe node heard: {}", heard.text);
    vm.cut_power();

    fs::write(setting.machine.initramfs(), initramfs).context("restore the initramfs")?;
    flow::member_again(setting.machine.boot()?, " ticket:", &cluster).map(drop)
}

/// Checks the refusal of the changed machine, whose register 9 should be `honest`.
fn difference(setting: &Setting, honest: &str) -> Result<String> {
    Ok(format!(
        "PCR 9: expected {honest}, got {}",
        register_9(&setting.machine.policy()?)?
    )
    .to_ascii_lowercase())
}

fn refused(command: &str, output: &Output, why: &str) -> Result<()> {
    let text = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(3) => says(command, &text, why),
        _ => Err(Failure(format!(
            "{command} should end with 3: {}: {text}",
            output.status
        ))),
    }
}

/// Checks that the refusal names this register and no other.
fn says(who: &str, said: &str, why: &str) -> Result<()> {
    if said.to_ascii_lowercase().contains(why) && !said.contains("PCR 4") {
        Ok(())
    } else {
        Err(Failure(format!(
            "{who} should say {why:?}, and nothing of PCR 4: {said}"
        )))
    }
}

fn hears_no_more(vm: &Vm, honest: &str) -> Result<()> {
    let lines = vm.console.lines();
    match lines
        .iter()
        .find(|line| line.text.contains("PCR 9") || line.text.to_ascii_lowercase().contains(honest))
    {
        None => Ok(()),
        Some(line) => Err(Failure(format!(
            "the node should hear that it is refused and no more: {}",
            line.text
        ))),
    }
}

/// The demo's machine with a small disk and the fast firmware.
pub fn small(name: &str) -> Result<Setting> {
    let mut setting = Setting::new(name, DISK)?;
    setting.machine.firmware = Firmware::Bios;
    fs::write(setting.path("policy.json"), FRESH_NODE).context("write the policy")?;
    Ok(setting)
}

/// Makes the disk blank, and removes the operator's files except the master secret.
fn blank(setting: &Setting) -> Result<()> {
    let _ = fs::remove_file(setting.path("firstlight-state.json"));
    let disk = File::options()
        .write(true)
        .open(setting.machine.disk("state"))
        .context("open the disk")?;
    disk.set_len(0)
        .and_then(|()| disk.set_len(DISK))
        .context("blank the disk")
}

/// Returns a random instant in one of the parts of `span`.
fn instant(part: u32, span: Duration) -> Duration {
    let random = RandomState::new().hash_one(part) % 1000;
    (span * part + span * u32::try_from(random).unwrap_or(0) / 1000) / CUTS
}

/// `firstlight init`, which runs at the same time as the test.
fn start_init(setting: &Setting, vm: &Vm) -> Result<Child> {
    let port = vm
        .ports
        .get(&9000)
        .ok_or_else(|| Failure("port 9000 is not forwarded".to_owned()))?;
    Command::new(dist("firstlight")?)
        .current_dir(setting.machine.folder())
        .args([
            "init",
            "--endpoint",
            &format!("127.0.0.1:{port}"),
            "--policy",
            "policy.json",
        ])
        .args(["--init-secret", "init-secret", "--require=any"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("run firstlight init")
}

fn register_9(policy: &str) -> Result<String> {
    let policy: serde_json::Value = serde_json::from_str(policy).context("read a policy")?;
    let value = policy["measurements"]["9"]["expected"]
        .as_str()
        .map(str::to_owned);
    value.ok_or_else(|| Failure("a policy without register 9".to_owned()))
}

/// Changes a letter of a comment in the initramfs. Its size, which is measured with the kernel into PCR 4, does not change.
fn alter(setting: &Setting) -> Result<()> {
    let path = setting.machine.initramfs();
    let mut bytes = fs::read(&path).context("read the initramfs")?;
    let comment = b"# The first program of the small initramfs";
    let at = bytes
        .windows(comment.len())
        .position(|window| window == comment);
    let at = at.ok_or_else(|| Failure("the comment is not in the initramfs".to_owned()))?;
    bytes[at + 2] = b't';
    fs::write(&path, bytes).context("alter the initramfs")
}
