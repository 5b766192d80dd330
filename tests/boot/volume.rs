//! A machine without Kubernetes: its volume opens at the next boot by attestation, with systemd's own program for crypttab, and a copy
//! of it does not open in another machine.

use std::fs;
use std::process::Command;
use std::time::Duration;

use machine::case;
use machine::flow::FRESH_NODE;
use machine::initramfs::{self, Overlay};
use machine::vm::Machine;
use machine::{Context, Failure, Result, dist, free_port};
use support::program::Program;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(300);
/// The port of a key broker, as machines ask it.
const BROKER: u16 = 30090;

/// A key broker on the host.
struct Broker {
    folder: TempDir,
    _services: [Program; 2],
    port: u16,
    id: String,
}

impl Broker {
    fn start() -> Result<Broker> {
        let folder = TempDir::new().context("make a folder")?;
        let write = |name: &str, content: &[u8]| {
            fs::write(folder.path().join(name), content).context("write a file of the broker")
        };
        fs::create_dir(folder.path().join("disks")).context("make a folder")?;
        for (number, name) in ["mastersecret", "salt", "secret", "measurementSalt"]
            .into_iter()
            .enumerate()
        {
            write(name, &[number as u8; 32])?;
        }
        write("attestationConfig", FRESH_NODE.as_bytes())?;
        let files = ["--master-secret=mastersecret", "--salt=salt"];
        let mut print = Command::new(dist("key-service")?);
        print.args(files).args(["--print-cluster-id", "--config=."]);
        let output = print.current_dir(folder.path()).output();
        let output = output.context("run key-service")?;
        let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();

        let (keys_at, port) = (free_port()?, free_port()?);
        let mut keys = Command::new(dist("key-service")?);
        keys.args(files)
            .args(["--clients=secret", "--clients-secret=secret"])
            .arg(format!("--listen=127.0.0.1:{keys_at}"));
        let keys = Program::start(keys.current_dir(folder.path()));
        keys.expect("serving data keys");
        let mut join = Command::new(dist("join-service")?);
        join.arg(format!("--key-service=127.0.0.1:{keys_at}"))
            .args(["--key-service-auth=secret", "--key-service-secret=secret"])
            .args(["--config=.", "--records=disks", "--require=strong"])
            .arg("--enroll-until=9000-01-01")
            .arg(format!("--listen=127.0.0.1:{port}"));
        let join = Program::start(join.current_dir(folder.path()));
        join.expect("serving join requests");
        Ok(Broker {
            folder,
            _services: [keys, join],
            port,
            id,
        })
    }
}

/// Returns a machine whose initramfs runs the case.
fn machine(name: &str, broker: &Broker, is_clone: bool) -> Result<Machine> {
    let mut machine = Machine::new(name)?;
    machine.memory = 1024;
    machine.host_ports.insert(BROKER, broker.port);
    let mut overlay = Overlay::default();
    case::add_script(&mut overlay, "volume.sh")?;
    for program in [
        "cryptsetup",
        "blkid",
        "systemd-cryptsetup",
        "systemd-socket-activate",
    ] {
        overlay.host_program(program)?;
    }
    overlay.file("/etc/broker", 0o644, broker.id.as_bytes());
    if is_clone {
        overlay.file("/etc/clone", 0o644, "");
    }
    initramfs::build(&machine.initramfs(), &["firstlight-volume"], &overlay)?;
    Ok(machine)
}

#[test]
#[ignore = "boots a machine: make boot"]
fn a_volume_opens_by_attestation_at_the_next_boot_and_a_copy_of_it_does_not() -> Result<()> {
    let broker = Broker::start()?;
    let mut one = machine("volume", &broker, false)?;
    one.add_disk("data", 64 * MIB)?;
    boot(&mut one)?;
    let records = fs::read_dir(broker.folder.path().join("disks")).context("list the records")?;
    // the record and the lock
    if records.count() != 2 {
        return Err(Failure("expected one record".into()));
    }
    let mut clone = machine("volume-clone", &broker, true)?;
    clone.add_copy_of_disk("data", &one.disk("data"))?;
    boot(&mut clone)?;
    // at its end this boot destroys the header
    boot(&mut one)
}

fn boot(machine: &mut Machine) -> Result<()> {
    let mut vm = machine.boot()?;
    super::passed(case::judge(&mut vm, LIMIT)?)?;
    vm.wait_off(LIMIT).map(drop)
}
