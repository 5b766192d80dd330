//! Disks that are not ours, machines without a TPM, and peers that send nonsense.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use disk::luks::{self, DiskState, Header, Probe};

use crate::cut_off;
use crate::program::Program;
use crate::setting::{INIT_SECRET, MASTER_KEY, Setting, wait_for_port};

/// Checks that the disk is refused with these words, and that no byte of it changes.
fn expect_refused(setting: &Setting, disk: &Path, words: &[&str]) {
    let before = fs::read(disk).unwrap();
    let mut node = Program::start(&mut setting.unlock(disk));
    assert_eq!(node.exit().code(), Some(1), "{}", node.output());
    let error = node.expect("error:");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
    assert!(fs::read(disk).unwrap() == before, "the disk was written to");
}

#[test]
fn a_disk_with_a_file_system_is_refused() {
    let setting = Setting::new();
    let disk = setting.blank_disk();
    let made = Command::new("/sbin/mke2fs")
        .args(["-q", "-t", "ext4"])
        .arg(&disk)
        .status()
        .unwrap();
    assert!(made.success());
    expect_refused(&setting, &disk, &["ext4", "Nothing was written"]);
}

#[test]
fn a_disk_of_unknown_bytes_is_refused() {
    let setting = Setting::new();
    let disk = setting.file("disk", vec![0x5a; 64 << 20]);
    expect_refused(
        &setting,
        &disk,
        &["data of an unknown kind", "Nothing was written"],
    );
}

#[test]
fn an_initialized_disk_whose_headers_are_both_damaged_is_refused() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    for offset in [5000, 16384 + 5000] {
        file.write_all_at(b"damage", offset).unwrap();
    }
    expect_refused(&setting, &disk, &["checksum"]);
}

#[test]
fn one_damaged_header_copy_keeps_nobody_from_the_disk() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    file.write_all_at(b"damage", 5000).unwrap();
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect("state disk");
    wait_for_port(setting.node(9999));
}

#[test]
fn a_luks_disk_of_somebody_else_is_refused() {
    let setting = Setting::new();
    let disk = setting.blank_disk();
    let key = setting.file("key", [1; 32]);
    let format = [
        "luksFormat",
        "-q",
        "--type",
        "luks2",
        "--pbkdf",
        "pbkdf2",
        "--pbkdf-force-iterations",
        "1000",
    ];
    let made = Command::new("/sbin/cryptsetup")
        .args(format)
        .arg(&disk)
        .arg(&key)
        .status()
        .unwrap();
    assert!(made.success());
    expect_refused(&setting, &disk, &["is not that of a state disk"]);
}

#[test]
fn a_disk_whose_format_the_old_system_left_cut_off_is_started_over() {
    let setting = Setting::new();
    let disk = setting.file("disk", cut_off::disk());
    let old = header(&disk).uuid();
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.expect(
        "a format by Constellation was interrupted, and no data was written since: formatting it",
    );
    // the disk is a file here, so the run ends where it would be mapped
    node.exit();
    assert_eq!(header(&disk).state(), DiskState::Uninitialized);
    assert_ne!(header(&disk).uuid(), old);
}

/// The change of a disk during a run.
type Change<'a> = &'a dyn Fn(&Path);

#[test]
fn a_disk_without_mark_on_which_somebody_may_have_written_is_refused_with_the_command_that_starts_over()
 {
    let setting = Setting::new();
    let labelled = |disk: &Path| {
        let status = Command::new("/sbin/cryptsetup")
            .args(["config", "--label", "mine"])
            .arg(disk)
            .status()
            .unwrap();
        assert!(status.success());
    };
    let written = |offset: u64| {
        move |disk: &Path| {
            fs::File::options()
                .write(true)
                .open(disk)
                .unwrap()
                .write_all_at(b"x", offset)
                .unwrap()
        }
    };
    let cases: [(Change, &str); 3] = [
        (
            &written(cut_off::SUPERBLOCK as u64 + 4096 + 100),
            "journal was written to",
        ),
        (
            &written((64 << 20) - 1),
            "the end of the disk was written to",
        ),
        (&labelled, "differs from that of a new state disk"),
    ];
    for (change, why) in cases {
        let disk = setting.file("disk", cut_off::disk());
        change(&disk);
        expect_refused(
            &setting,
            &disk,
            &[
                "without the token",
                why,
                "it may hold data",
                "cryptsetup token import --token-id 0",
            ],
        );
    }

    // the command in the error text works
    let disk = setting.path("disk");
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.exit();
    let error = node.expect("error:");
    let command = &error[error.find("echo '").unwrap()..];
    let done = Command::new("sh")
        .env("PATH", "/sbin:/usr/sbin:/bin:/usr/bin")
        .args(["-c", command])
        .status()
        .unwrap();
    assert!(done.success(), "{command}");
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect("never part of a cluster: formatting it");
}

fn header(disk: &Path) -> Header {
    match luks::probe(&mut fs::File::open(disk).unwrap()).unwrap() {
        Probe::Luks(header) => header,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_machine_without_a_tpm_says_so() {
    if ["/dev/tpmrm0", "/dev/tpm0"]
        .iter()
        .any(|device| Path::new(device).exists())
    {
        println!("not run: this machine has a TPM; tests/boot has a machine without");
        return;
    }
    let setting = Setting::new();
    let disk = setting.blank_disk();
    let mut command = Command::new(support::program::built("unlock"));
    command
        .args(["--csp", "qemu", "--variant", "qemu-vtpm", "--disk"])
        .arg(&disk);
    let mut node = Program::start(&mut command);
    assert_eq!(node.exit().code(), Some(1));
    let error = node.expect("error:");
    assert!(
        error.contains("/dev/tpmrm0") && error.contains("/dev/tpm0"),
        "{error}"
    );
}

#[test]
fn a_tpm_that_does_not_answer_is_named() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut command = setting.bootstrapper(&disk);
    // the last value of an option counts
    command.args(["--tpm", "swtpm:host=127.0.0.1,port=1"]);
    let mut node = Program::start(&mut command);
    assert_eq!(node.exit().code(), Some(1));
    assert!(node.expect("error:").contains("port=1"));
}

/// Sends bytes that are not TLS, opens connections that send nothing, and stops one in the middle of a handshake.
fn bother(address: SocketAddr) -> Vec<TcpStream> {
    let starts: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0xff; 4096],
        b"",
        &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00],
    ];
    starts
        .iter()
        .cycle()
        .take(20)
        .map(|bytes| {
            let mut socket = TcpStream::connect(address).unwrap();
            // the server may have closed the connection already
            let _ = socket.write_all(bytes);
            socket
        })
        .collect()
}

#[test]
fn garbage_and_half_open_connections_on_the_recovery_port_keep_no_operator_away() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let node = Program::start(&mut setting.unlock(&disk));
    wait_for_port(setting.node(9999));
    let _held = bother(setting.node(9999));
    let mut recover = Program::start(&mut setting.recover(MASTER_KEY));
    assert!(recover.exit().success(), "{}", recover.output());
    node.expect("key-slot:");
}

#[test]
fn garbage_and_half_open_connections_on_the_init_port_keep_no_operator_away() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper(&disk));
    wait_for_port(setting.node(9000));
    let _held = bother(setting.node(9000));
    let mut operator = crate::init::init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    node.expect("complete:");
}

#[test]
fn garbage_and_half_open_connections_on_the_services_keep_no_node_away() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let _held = (
        bother(keys),
        bother(SocketAddr::new(setting.host(3), 30090)),
    );
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect("key-slot:");
}
