//! Tests initramfs/close-host, which hides the host's inputs from systemd. The script runs in mounts of its own, with the shells of
//! dracut's and of initramfs-tools' initrds. `make test-host` boots it.

use std::path::Path;
use std::process::{Command, Output};

use support::ROOT;

/// Runs close-host with copies in the place of the kernel's files, and then `look`. `before` changes the copies first.
fn run(shell: &str, command_line: &str, before: &str, look: &str) -> Output {
    let script = format!(
        "set -e
         mount -t tmpfs tmpfs /sys; mkdir -p /sys/firmware/efi/efivars
         echo host >/sys/firmware/efi/efivars/SystemdOptions-8cf2644b-4b0b-428f-9387-6d876050dc67
         mount -t tmpfs tmpfs /run
         printf '%s\\n' '{command_line}' >/run/cmdline; mount --bind /run/cmdline /proc/cmdline
         for setting in sysrq=438 panic_on_oops=0 panic=0; do
           file=${{setting%=*}}; echo ${{setting#*=}} >/run/$file
           [ ! -e {KERNEL}/$file ] || mount --bind /run/$file {KERNEL}/$file
         done
         {before}
         {shell} {}
         {look}",
        Path::new(ROOT).join("initramfs/close-host").display()
    );
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "--pid", "--fork"]);
    command.args(["--mount-proc", "sh", "-c", &script]);
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8(all).unwrap()
}

/// Not every kernel has each file of this folder.
const KERNEL: &str = "/proc/sys/kernel";
const SHELLS: [&str; 3] = ["dash", "bash", "busybox sh"];

#[test]
fn systemd_gets_no_variables_and_no_credentials_of_the_host() {
    let line = r"console=ttyS0 rd.auto=1 a\nb noresume";
    for shell in SHELLS {
        let look = format!(
            "cat /proc/cmdline
             for setting in sysrq=0 panic_on_oops=1 panic=10; do cat {KERNEL}/${{setting%=*}} || echo ${{setting#*=}}; done
             ls -A /sys/firmware/efi/efivars /run"
        );
        let output = run(shell, line, "", &look);
        let text = text(&output);
        assert!(output.status.success(), "{shell}: {text}");
        // an option that the kernel command line already has is not added, and its value there takes effect
        let expected = format!(
            "systemd.import_credentials=no systemd.gpt_auto=no systemd.ssh_auto=no systemd.getty_auto=no rd.nonvmf=1 cloud-init=disabled {line}\n0\n1\n10\n"
        );
        assert!(text.starts_with(&expected), "{shell}: {text}");
        assert!(!text.contains("SystemdOptions"), "{shell}: {text}");
        assert!(!text.contains("firstlight-closed"), "{shell}: {text}");
    }
}

#[test]
fn nothing_that_is_closed_can_be_written() {
    for file in ["/proc/cmdline", "/sys/firmware/efi/efivars/x"] {
        let output = run("dash", "quiet", "", &format!("echo x >{file}"));
        assert!(text(&output).contains("Read-only"), "{}", text(&output));
    }
}

#[test]
fn the_command_line_can_keep_the_variables() {
    let look = "ls /sys/firmware/efi/efivars";
    let output = run("dash", "quiet efi=runtime", "", look);
    assert!(
        text(&output).contains("SystemdOptions"),
        "{}",
        text(&output)
    );
}

#[test]
fn the_time_until_a_restart_stays_as_the_command_line_sets_it() {
    let before = format!("[ ! -e {KERNEL}/panic ] || echo -1 >/run/panic");
    let look = format!("cat {KERNEL}/panic || echo -1");
    let output = run("busybox sh", "quiet panic=-1", &before, &look);
    assert_eq!(text(&output), "-1\n");
}

#[test]
fn what_stays_open_is_an_error() {
    for shell in SHELLS {
        let output = run(shell, "quiet", "mount -o remount,ro /run", "echo closed");
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{shell}: {text}");
        assert!(
            text.contains("firstlight: mounting /run/firstlight-closed failed"),
            "{shell}: {text}"
        );
    }
}
