//! docs/clouds/libvirt.md: the real libvirt starts a machine of the page, without KVM.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::work::Work;

/// Starts the machine, and writes its description as libvirt has it.
const VIRT_INSTALL: &str = "#!/bin/bash\n\
    /usr/bin/virt-install \"$@\" && virsh dumpxml \"$2\" > \"page-$2.xml\"\n";

/// Emulated firmware and kernel take half a minute on an idle machine.
const PATIENCE: Duration = Duration::from_secs(900);

#[test]
#[ignore = "needs libvirt, HAProxy and Helm: make cloud-pages"]
fn the_page_of_libvirt_starts_a_machine_with_a_tpm() {
    let work = Work::new();
    fs::create_dir(work.path("run")).unwrap();
    work.program("virt-install", VIRT_INSTALL);
    // libvirt's daemon for one user: it needs no rights, and changes nothing of the system. It is not root's, so the test is another
    // user here. All processes end with the test
    let mut user = Command::new("unshare");
    user.args(["--user", "--map-user=1000", "--map-group=1000"])
        .args(["--pid", "--fork", "--kill-child", "--mount-proc", "bash"])
        .env("XDG_RUNTIME_DIR", work.path("run"));
    // the block with the addresses of the real host is not run
    let before = "export LIBVIRT_DEFAULT_URI=qemu:///session; NETWORK=user VIRT=qemu MEMORY=1024";
    let mut run = work.start("libvirt", before, Path::new("/none"), user);
    run.until_tear_down();

    let start = Instant::now();
    // the kernel's line about the tables of the firmware names the log of what it measured into the TPM
    while !work.read("control-plane-0.log").contains("TPMEventLog=") {
        let console = work.read("control-plane-0.log");
        assert!(start.elapsed() < PATIENCE, "{}\n{console}", run.log());
        sleep(Duration::from_secs(1));
    }
    let network = work.read("network.xml");
    let reserved = "<host mac='52:54:00:77:00:21' name='worker-1' ip='10.77.0.21'/>";
    assert!(network.contains(reserved), "{network}");
    run.end();
    super::infra::libvirt::check(&work);
}
