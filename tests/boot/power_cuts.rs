//! Power cuts at any write. QEMU records what a machine writes to its state disk. Then the machine boots with what the disk may
//! hold if the power had failed at one of these writes: what was flushed is there, and each later write is there, torn or lost.
//! Each such boot goes on, waits for a key, or starts over, by itself.
//!
//! `make test-powercut` tries many instants, and `make boot` a few, others at each run. A failure prints the number from which all
//! instants and losses were chosen (FIRSTLIGHT_SEED). The recorded writes differ a little from run to run.

use super::faults::{PATIENCE, small};
use base::crypto::{Dek, KEY_LEN, Secret};
use base::master_secret::MasterSecret;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use machine::case;
use machine::flow::{self, RECOVERY, Setting};
use machine::initramfs::{self, Overlay};
use machine::vm::Vm;
use machine::write_log::{self, WriteLog};
use machine::{Context, Failure, Result};
use std::path::PathBuf;
use support::random::Random;

/// How many instants `make boot` tries in each of the four tests.
const SAMPLE: usize = 3;

/// A machine that is off, its recorded writes, and what its disk and TPM held before and after them.
struct Recorded {
    setting: Setting,
    log: WriteLog,
    before: PathBuf,
    tpm: PathBuf,
}

impl Recorded {
    /// Records the writes while `run` uses the machine.
    fn of<T>(
        mut setting: Setting,
        run: impl FnOnce(&mut Setting) -> Result<T>,
    ) -> Result<(Recorded, T)> {
        let [before, log, tpm] =
            ["before.disk", "writes.log", "tpm-after"].map(|name| setting.path(name));
        write_log::copy(&setting.machine.disk("state"), &before)?;
        setting.machine.write_log = Some(("state", log.clone()));
        let given = run(&mut setting)?;
        setting.machine.write_log = None;
        write_log::copy(&setting.machine.tpm_state(), &tpm)?;
        let log = WriteLog::read(&log)?;
        let recorded = Recorded {
            setting,
            log,
            before,
            tpm,
        };
        Ok((recorded, given))
    }

    /// Boots after a cut at each of some instants, and has `judge` look at what the machine does. Its second argument is the
    /// number of writes before the cut.
    fn try_cuts(
        &mut self,
        name: &str,
        judge: impl Fn(&Setting, Vm, usize) -> Result<String>,
    ) -> Result<()> {
        let (seed, cuts) = write_log::chosen(name, SAMPLE);
        let mut random = Random::new(seed);
        for (tried, part) in (1..).zip(order(cuts)) {
            // one in each part of the run
            let start = |part: usize| self.log.len() * part / cuts;
            let cut = start(part) + random.below(start(part + 1) - start(part) + 1);
            let disk = self.setting.machine.disk("state");
            write_log::copy(&self.before, &disk)?;
            let lost = self.log.cut(&disk, cut, &mut random)?;
            write_log::copy(&self.tpm, &self.setting.machine.tpm_state())?;
            let at = format!(
                "{name}: {tried} of {cuts}: the power failed after {cut} of {} writes, {lost} of them lost or torn (FIRSTLIGHT_SEED={seed})",
                self.log.len()
            );
            let vm = self.setting.machine.boot()?;
            let said = judge(&self.setting, vm, cut).context(&at)?;
            println!("{at}: {said}");
        }
        println!("{name}: all of {cuts} survived");
        Ok(())
    }
}

#[test]
#[ignore = "boots a machine: make boot"]
fn a_machine_comes_back_from_a_power_cut_at_any_write_until_it_is_a_member() -> Result<()> {
    let setting = small("power-new")?;
    let (mut recorded, (committed, written)) = Recorded::of(setting, |setting| {
        let log = setting.path("writes.log");
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for(" ready:", PATIENCE)?;
        setting.init(&vm)?;
        vm.console.wait_for(" committed:", PATIENCE)?;
        let committed = write_log::len(&log)?;
        vm.console.wait_for(" complete:", PATIENCE)?;
        vm.command(
            "echo written before the reboot >/run/state/proof && sync",
            PATIENCE,
        )?;
        let written = write_log::len(&log)?;
        vm.shut_down(PATIENCE)?;
        Ok((committed, written))
    })?;
    recorded.try_cuts("init", |setting, mut vm, cut| {
        let found = vm.console.wait_for(" disk: ", PATIENCE)?;
        let is_member = found.text.contains("of a cluster's node");
        if cut >= committed && !is_member {
            return Err(Failure(format!(
                "it was a member, and says {:?}",
                found.text
            )));
        }
        if is_member {
            setting.recover(&vm)?;
        }
        vm.console.wait_for(" mounted:", PATIENCE)?;
        let end = vm
            .console
            .wait_until("the end of run's start", PATIENCE, |line| {
                line.contains(" ready:") || line.contains(" reset:")
            })?;
        if cut >= written {
            has_proof(&mut vm)?;
        }
        Ok(format!("{}; then {}", found.text, end.text))
    })
}

#[test]
#[ignore = "boots a machine: make boot"]
fn a_member_comes_back_from_a_power_cut_at_any_write() -> Result<()> {
    let mut setting = small("power-member")?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    let (mut recorded, later) = Recorded::of(setting, |setting| {
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for(" network: ", PATIENCE)?;
        setting.recover(&vm)?;
        vm.console.wait_for(" ready:", PATIENCE)?;
        let command = "for i in 1 2 3; do echo later >/run/state/later$i && sync; done";
        vm.command(command, PATIENCE)?;
        let later = write_log::len(&setting.path("writes.log"))?;
        vm.shut_down(PATIENCE)?;
        Ok(later)
    })?;
    recorded.try_cuts("member", |setting, mut vm, cut| {
        vm.console.wait_for(" network: ", PATIENCE)?;
        setting.recover(&vm)?;
        vm.console.wait_for(" mounted:", PATIENCE)?;
        let ready = vm.console.wait_for(" ready: a member", PATIENCE)?;
        has_proof(&mut vm)?;
        if cut >= later && vm.command("cat /run/state/later3", PATIENCE)? != "later" {
            return Err(Failure("a file that was synced is lost".to_owned()));
        }
        has_no_errors(&mut vm)?;
        Ok(ready.text)
    })
}

/// The set-up of a node was interrupted: its next boot marks the disk for reset, and the boot after that formats it. A power cut
/// at any write of both boots does not end this: the disk is opened and marked, or formatted.
#[test]
#[ignore = "boots a machine: make boot"]
fn a_node_with_an_unfinished_set_up_starts_over_also_after_a_power_cut_at_any_write() -> Result<()>
{
    let mut setting = small("power-reset")?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.command("rm /run/state/firstlight/complete", PATIENCE)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    let (mut recorded, marked) = Recorded::of(setting, |setting| {
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for("of a cluster's node", PATIENCE)?;
        setting.recover(&vm)?;
        for step in [" mounted:", "set-up was interrupted", " reset:"] {
            vm.console.wait_for(step, PATIENCE)?;
        }
        let marked = write_log::len(&setting.path("writes.log"))?;
        // run the command again to get its exit code; a marked disk stays marked
        let again = vm.command("bootstrapper; echo exit code $?", PATIENCE)?;
        if !again.ends_with("exit code 3") {
            return Err(Failure(format!(
                "bootstrapper should end with 3 for a reset: {again}"
            )));
        }
        vm.shut_down(PATIENCE)?;
        drop(vm);

        let mut vm = setting.machine.boot()?;
        for step in [
            "never part of a cluster: formatting it",
            " mounted:",
            " ready: waiting for the operator's init",
        ] {
            vm.console.wait_for(step, PATIENCE)?;
        }
        vm.shut_down(PATIENCE)?;
        Ok(marked)
    })?;
    recorded.try_cuts("reset", |setting, mut vm, cut| {
        let found = vm.console.wait_for(" disk: ", PATIENCE)?;
        let is_member = found.text.contains("of a cluster's node");
        if cut >= marked && is_member {
            return Err(Failure(format!(
                "the disk was marked for reset, and the next boot says {:?}",
                found.text
            )));
        }
        let end = if is_member {
            setting.recover(&vm)?;
            " reset:"
        } else {
            " ready: waiting for the operator's init"
        };
        vm.console.wait_for(" mounted:", PATIENCE)?;
        let end = vm.console.wait_for(end, PATIENCE)?;
        has_no_errors(&mut vm)?;
        Ok(format!("{}; then {}", found.text, end.text))
    })
}

/// A disk that cryptsetup made with the parameters of Constellation, and that a node takes over: the next boot opens it. The
/// operator needs `--migrate` until the header names the cluster.
#[test]
#[ignore = "boots a machine: make boot"]
fn a_disk_of_constellation_is_taken_over_also_after_a_power_cut_at_any_write() -> Result<()> {
    let mut setting = small("power-migration")?;
    let (mut vm, _) = flow::first_boot(&mut setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    make_disk_of_constellation(&mut setting)?;

    let (mut recorded, (migrated, later)) = Recorded::of(setting, |setting| {
        let log = setting.path("writes.log");
        let mut vm = setting.machine.boot()?;
        vm.console.wait_for(" network: ", PATIENCE)?;
        recover_while_migrating(setting, &vm)?;
        vm.console.wait_for(" migrated:", PATIENCE)?;
        let migrated = write_log::len(&log)?;
        vm.console.wait_for(" ready: a member", PATIENCE)?;
        vm.command("echo later >/run/state/later && sync", PATIENCE)?;
        let later = write_log::len(&log)?;
        vm.shut_down(PATIENCE)?;
        Ok((migrated, later))
    })?;
    recorded.try_cuts("migration", |setting, mut vm, cut| {
        vm.console.wait_for(" network: ", PATIENCE)?;
        if cut >= migrated {
            setting.recover(&vm)?;
        } else {
            recover_while_migrating(setting, &vm)?;
        }
        vm.console.wait_for(" mounted:", PATIENCE)?;
        let ready = vm.console.wait_for(" ready: a member", PATIENCE)?;
        if vm.command("cat /run/state/file", PATIENCE)? != "of Constellation" {
            return Err(Failure("a file of Constellation is lost".to_owned()));
        }
        if cut >= later && vm.command("cat /run/state/later", PATIENCE)? != "later" {
            return Err(Failure("a file that was synced is lost".to_owned()));
        }
        has_no_errors(&mut vm)?;
        Ok(ready.text)
    })
}

/// Replaces the disk of a member with one that cryptsetup formats in a machine, as Constellation would have made it for the same
/// cluster.
fn make_disk_of_constellation(setting: &mut Setting) -> Result<()> {
    const UUID: &str = "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c11";
    const SCRIPT: &str = "constellation.sh";
    let text = |file: &str, field: &str| -> Result<String> {
        let content = std::fs::read(setting.path(file)).context("read a file of the operator")?;
        let content: serde_json::Value =
            serde_json::from_slice(&content).context("read a file of the operator")?;
        Ok(content[field].as_str().unwrap_or_default().to_owned())
    };
    let secret = |field| {
        let bytes = STANDARD.decode(text(flow::MASTER_SECRET, field)?);
        bytes.map(Secret::new).context("read the master secret")
    };
    let kms =
        MasterSecret::new(secret("key")?, secret("salt")?).context("use the master secret")?;
    let passphrase = kms
        .dek(&Dek::disk(UUID), KEY_LEN)
        .context("derive the disk's key")?;
    let mut overlay = Overlay::default();
    case::add_script(&mut overlay, SCRIPT)?;
    overlay
        .host_program("cryptsetup")?
        .file("/etc/passphrase", 0o600, passphrase.expose())
        .file("/etc/uuid", 0o600, UUID)
        .file(
            "/etc/salt",
            0o600,
            text("firstlight-state.json", "measurementSalt")?,
        );
    let usual = setting.path("usual.cpio");
    write_log::copy(&setting.machine.initramfs(), &usual)?;
    initramfs::append(&setting.machine.initramfs(), &overlay)?;
    case::judge(&mut setting.machine.boot()?, PATIENCE)?;
    write_log::copy(&usual, &setting.machine.initramfs())
}

/// `firstlight recover --migrate`.
fn recover_while_migrating(setting: &Setting, vm: &Vm) -> Result<()> {
    let output = setting.operator(vm, "recover", RECOVERY, &["--migrate"])?;
    if output.status.success() {
        Ok(())
    } else {
        Err(Failure(format!(
            "firstlight recover --migrate ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )))
    }
}

/// Checks that the kernel has reported no error of the disk.
fn has_no_errors(vm: &mut Vm) -> Result<()> {
    let errors = "dmesg | grep -E 'AEAD ERROR|EXT4-fs error|I/O error' || true";
    match vm.command(errors, PATIENCE)?.as_str() {
        "" => Ok(()),
        errors => Err(Failure(errors.to_owned())),
    }
}

/// Returns 0..`number` in an order that jumps, so that tests that are ended early have seen all of the run.
fn order(number: usize) -> impl Iterator<Item = usize> {
    // multiples of the golden ratio spread evenly, wherever the sequence ends
    let mut parts: Vec<usize> = (0..number).collect();
    parts.sort_by_key(|part| (*part as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    parts.into_iter()
}

#[test]
fn each_part_of_the_run_is_tried_once() {
    let parts: Vec<usize> = order(100).collect();
    let first = &parts[..10];
    for tens in 0..5 {
        assert!(first.iter().any(|part| part / 20 == tens), "{first:?}");
    }
    let mut sorted = parts.clone();
    sorted.sort();
    assert_eq!(sorted, (0..100).collect::<Vec<_>>());
}

/// Checks the file that was written, and synced, before the log or at its end.
fn has_proof(vm: &mut Vm) -> Result<()> {
    match vm.command("cat /run/state/proof", PATIENCE)?.as_str() {
        "written before the reboot" => Ok(()),
        other => Err(Failure(format!("the file says {other:?}"))),
    }
}
