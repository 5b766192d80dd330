//! Power cuts at any write. QEMU records what a machine writes to its state disk. Then the machine boots with what the disk may
//! hold if the power had failed at one of these writes: what was flushed is there, and each later write is there, torn or lost.
//! Each such boot goes on, waits for a key, or starts over, by itself.
//!
//! `make test-powercut` tries many instants, and `make boot` a few, others at each run. A failure prints the number from which all
//! instants and losses were chosen (FIRSTLIGHT_SEED). The recorded writes differ a little from run to run.

use super::faults::{PATIENCE, small};
use machine::flow::{self, Setting};
use machine::vm::Vm;
use machine::write_log::{self, WriteLog};
use machine::{Context, Failure, Result};
use std::env;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use support::random::Random;

/// How many instants `make boot` tries in each of the two tests.
const SAMPLE: usize = 4;

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
        setting.machine.write_log = Some(log.clone());
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
        let number = |name: &str| env::var(name).ok().and_then(|text| text.parse().ok());
        let seed = number("FIRSTLIGHT_SEED")
            .unwrap_or_else(|| RandomState::new().hash_one(name) % 1_000_000);
        let cuts = number("FIRSTLIGHT_POWER_CUTS").map_or(SAMPLE, |cuts| cuts as usize);
        let mut random = Random::new(seed);
        for tried in 1..=cuts {
            // one in each part of the run
            let part = |part: usize| self.log.len() * part / cuts;
            let cut = part(tried - 1) + random.below(part(tried) - part(tried - 1) + 1);
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
        let errors = "dmesg | grep -E 'AEAD ERROR|EXT4-fs error|I/O error' || true";
        match vm.command(errors, PATIENCE)?.as_str() {
            "" => Ok(ready.text),
            errors => Err(Failure(errors.to_owned())),
        }
    })
}

/// Checks the file that was written, and synced, before the log or at its end.
fn has_proof(vm: &mut Vm) -> Result<()> {
    match vm.command("cat /run/state/proof", PATIENCE)?.as_str() {
        "written before the reboot" => Ok(()),
        other => Err(Failure(format!("the file says {other:?}"))),
    }
}
