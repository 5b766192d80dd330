//! A device or a peer that never answers: the last line on the console names it.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use crate::program::Program;
use crate::setting::Setting;

/// A TPM that accepts connections and never answers: no program reads the received bytes. swtpm has the port for commands, and the
/// next one for control.
struct SilentTpm([TcpListener; 2]);

impl SilentTpm {
    fn start() -> SilentTpm {
        let bind = |port| TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port)));
        loop {
            let commands = bind(0).unwrap();
            let next = commands.local_addr().unwrap().port().checked_add(1);
            if let Some(Ok(control)) = next.map(bind) {
                return SilentTpm([commands, control]);
            }
        }
    }

    fn location(&self) -> String {
        let port = self.0[0].local_addr().unwrap().port();
        format!("swtpm:host=127.0.0.1,port={port}")
    }
}

/// Starts the program, and waits until its last event says that it waits for `what`.
fn expect_last_event(command: &mut Command, what: &str) {
    let node = Program::start(command);
    node.expect(&format!(" waiting: for {what}, "));
    let output = node.output();
    let last = output.lines().rfind(|line| line.starts_with("firstlight["));
    assert!(last.unwrap().contains(what), "{output}");
}

#[test]
fn unlock_names_a_tpm_that_does_not_give_its_key() {
    let (setting, tpm) = (Setting::new(), SilentTpm::start());
    let disk = setting.initialized_disk();
    let location = tpm.location();
    expect_last_event(
        setting.unlock(&disk).args(["--tpm", &location]),
        &format!("the TPM at {location} to give its attestation key"),
    );
}

#[test]
fn bootstrapper_names_a_tpm_that_does_not_give_pcr_15() {
    let (setting, tpm) = (Setting::new(), SilentTpm::start());
    let disk = setting.new_disk();
    let location = tpm.location();
    expect_last_event(
        setting.bootstrapper(&disk).args(["--tpm", &location]),
        &format!("the TPM at {location} to read PCR 15"),
    );
}

#[test]
fn unlock_names_a_disk_that_cannot_be_read() {
    let setting = Setting::new();
    // opening a pipe blocks until a program opens it to write
    let disk = setting.path("disk");
    assert!(
        Command::new("mkfifo")
            .arg(&disk)
            .status()
            .unwrap()
            .success()
    );
    expect_last_event(
        &mut setting.unlock(&disk),
        &format!("the disk {} to be read", disk.display()),
    );
}

#[test]
fn bootstrapper_names_a_metadata_service_that_does_not_answer() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let silent = TcpListener::bind(SocketAddr::new(setting.host(4), 8080)).unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let node = Program::start(setting.bootstrapper(&disk).args(["--metadata", &url]));
    node.expect(" waiting: for the metadata service to give the init secret's hash, ");
    node.expect(" waiting: for a cluster: load balancer: asked, no answer yet");
}

#[test]
fn the_first_machine_says_once_that_it_knows_no_other_control_plane() {
    const ALONE: &str = "waiting: for a cluster: metadata: no other control plane is known";
    let setting = Setting::new();
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper(&disk));
    // repeated on purpose with all that the node waits for; before that it lists at least twice
    node.expect(" waiting: for a ticket or the operator's init, ");
    let output = node.output();
    let (before, _) = output
        .split_once(" waiting: for a ticket or the operator's init, ")
        .unwrap();
    assert_eq!(before.matches(ALONE).count(), 1, "{output}");
}

#[test]
fn unlock_names_a_join_service_that_does_not_answer() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let address = SocketAddr::new(setting.host(3), proto::join::NODE_PORT);
    let _silent = TcpListener::bind(address).unwrap();
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect(&format!(
        " waiting:   join service {address}: asked, no answer yet"
    ));
}
