//! A folder in which the commands of a page run.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};

use serde_json::{Value, json};
use support::ROOT;
use support::boot_image::{disk, kernel, run, systemd_boot, uki};
use support::foreign::fetched;
use support::program::built;
use tempfile::TempDir;

use super::page::Page;

/// The kernel command line of mkosi/mkosi.conf, as far as `firstlight measure` needs it for a policy. The kernel prints its log.
const COMMAND_LINE: &[u8] = b"console=ttyS0 panic=10 efi=noruntime SYSTEMD_FORCE_MEASURE=1 \
    systemd.setenv=SYSTEMD_FORCE_MEASURE=1 systemd.import_credentials=no systemd.gpt_auto=no nohibernate";
/// The page's `init` runs with a short limit, because there is no machine. It must get as far as the endpoint.
const FIRSTLIGHT: &str = "#!/bin/bash\n\
    [ \"$1\" = init ] || exec REAL \"$@\"\n\
    REAL \"$@\" --timeout 5s > init.txt 2>&1 && exit 1\n\
    exit 0\n";

pub struct Work(TempDir);

impl Work {
    /// Makes what the page's reader has after the build: the image, the command, the folder `clouds`; and what the tests cannot
    /// download: charts and a list of components.
    pub fn new() -> Work {
        let work = Work(tempfile::tempdir().unwrap());
        let linux = fs::read(kernel()).unwrap();
        let sections: [(&str, &[u8]); 4] = [
            (".osrel", b"ID=debian\n"),
            (".cmdline", COMMAND_LINE),
            (".initrd", b"an initrd"),
            (".linux", &linux),
        ];
        let stub = systemd_boot("trixie").join("linuxx64.efi.stub");
        let image = [("EFI/BOOT/BOOTX64.EFI", &uki(&stub, &sections)[..])];
        disk(&work.path("firstlight.raw"), 64, 32, &image);
        for folder in ["docs/clouds", "docs/addons"] {
            run(Command::new("cp")
                .args(["-r", &format!("{ROOT}/{folder}")])
                .arg(work.folder()));
        }
        let program = FIRSTLIGHT.replace("REAL", built("firstlight").to_str().unwrap());
        work.program("firstlight", &program);
        work.write_charts();
        let component = |name: &str| {
            json!({
                "url": format!("https://dl.k8s.io/v1.35.4/bin/linux/amd64/{name}"),
                "hash": format!("sha256:{}", "a5".repeat(32)),
                "install_path": format!("/run/state/bin/{name}"),
            })
        };
        let components = json!(["kubelet", "kubeadm", "kubectl"].map(component));
        fs::write(work.path("components.json"), components.to_string()).unwrap();
        work
    }

    fn write_charts(&self) {
        let helm = fetched("helm.sh");
        symlink(&helm, self.path("helm")).unwrap();
        let controller = module("k8s.io/cloud-provider-aws@v1.34.4");
        for chart in [
            fetched("cilium-chart.sh"),
            controller.join("charts/aws-cloud-controller-manager"),
        ] {
            run(Command::new(&helm)
                .args(["package", "--destination"])
                .args([self.folder(), &chart]));
        }
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Makes a script that the page's commands find.
    pub fn program(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Lets a command run in this folder, with its programs and those in `programs`.
    pub fn environment(&self, programs: &Path, command: &mut Command) {
        let folder = self.folder().display();
        let path = format!("{folder}:{}:/usr/sbin:/usr/bin:/bin", programs.display());
        command
            .current_dir(self.folder())
            .env("HOME", self.folder())
            .env("PATH", path);
    }

    /// Starts the commands of a page, after those in `before`. `command` is bash, or a program that runs it.
    pub fn start(
        &self,
        page: &str,
        before: &str,
        programs: &Path,
        mut command: Command,
    ) -> Run<'_> {
        fs::write(self.path("page.sh"), Page::read(page).script(before)).unwrap();
        let log = fs::File::create(self.path("log.txt")).unwrap();
        self.environment(programs, &mut command);
        // the third descriptor is the pipe to this test; errors go into the log
        let mut process = command
            .args(["-c", "exec 3>&2 2>&1; . ./page.sh"])
            .stdin(Stdio::piped())
            .stdout(log)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Run {
            work: self,
            input: process.stdin.take().unwrap(),
            marks: BufReader::new(process.stderr.take().unwrap()),
            process,
        }
    }

    /// Checks that the page's `init` accepted all of its files and options, and went to an endpoint that begins so and does not exist.
    pub fn check_init(&self, endpoint: &str) {
        let said = self.read("init.txt");
        assert!(said.contains(&format!("waiting for {endpoint}")), "{said}");
        assert!(said.contains("cannot resolve"), "{said}");
    }
}

/// Returns the folder of a Go module, whose content Go verifies.
fn module(name: &str) -> PathBuf {
    let said = run(Command::new("go").args(["mod", "download", "-json", name]));
    let found: Value = serde_json::from_str(&said).unwrap();
    found["Dir"].as_str().unwrap().into()
}

/// The page's commands, which run.
pub struct Run<'a> {
    work: &'a Work,
    process: Child,
    input: ChildStdin,
    marks: BufReader<ChildStderr>,
}

impl Run<'_> {
    /// Returns when the commands have come to the section that deletes everything.
    pub fn until_tear_down(&mut self) {
        let mut line = String::new();
        self.marks.read_line(&mut line).unwrap();
        assert!(line.contains(super::page::TEAR_DOWN), "{}", self.log());
    }

    /// Lets the commands continue, and returns when all have ended without an error.
    pub fn end(&mut self) {
        self.input.write_all(b"\n").unwrap();
        assert!(self.process.wait().unwrap().success(), "{}", self.log());
    }

    /// Returns the end of what the commands printed.
    pub fn log(&self) -> String {
        let text = self.work.read("log.txt");
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
