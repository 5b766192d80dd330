//! Device files of an emulated TPM, `tpm0` and `tpmrm0`, for programs that can use only device files. The files are terminals,
//! because these need neither a driver nor permissions. `tpmrm0` refuses commands that the TPM does not list, as the kernel's
//! resource manager does.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::NitroTpm;

pub struct Devices {
    folder: tempfile::TempDir,
    process: Child,
}

impl Devices {
    pub fn of(nitro: &NitroTpm) -> Devices {
        let folder = tempfile::tempdir().unwrap();
        let script = Path::new(support::ROOT).join("tests/cloud_vtpm/nitro_tpm/device.py");
        let mut command = Command::new("python3");
        command.arg(script);
        for (name, port) in [("tpm0", nitro.port), ("tpmrm0", nitro.manager)] {
            command.arg(folder.path().join(name)).arg(port.to_string());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("python3 is installed");
        let mut line = String::new();
        let output = process.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Devices { folder, process }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
