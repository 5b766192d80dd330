//! Inputs that a host can give a machine in addition to its disks: variables of the firmware, strings in the firmware's tables,
//! files of QEMU's fw_cfg, further devices. The attacks of `make test-host` use these inputs.

use super::vm::Machine;
use super::{Context, Failure, Result, script};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::path::Path;
use std::process::Command;

/// The project that defines a variable of the firmware.
#[derive(Clone, Copy)]
pub enum Vendor {
    /// The UEFI specification.
    Uefi,
    /// systemd, for its system.
    Systemd,
    /// systemd, for boot loaders.
    Loader,
    /// The boot loader shim.
    Shim,
}

impl Vendor {
    const fn guid(self) -> &'static str {
        match self {
            Vendor::Uefi => "8be4df61-93ca-11d2-aa0d-00e098032b8c",
            Vendor::Systemd => "8cf2644b-4b0b-428f-9387-6d876050dc67",
            Vendor::Loader => "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f",
            Vendor::Shim => "605dab50-e046-4300-abb6-3dd810dd8b23",
        }
    }
}

/// A variable of the firmware that outlives a restart, and that firmware and system can read.
pub struct Variable {
    /// The project that defines it.
    pub vendor: Vendor,
    /// Its name.
    pub name: &'static str,
    /// Its content.
    pub content: Vec<u8>,
}

/// Non-volatile, readable before and after the firmware has handed over.
const ATTRIBUTES: u32 = 7;

/// Returns a text as the firmware stores it: UTF-16 with a zero at its end.
pub fn utf16(text: &str) -> Vec<u8> {
    let words = text.encode_utf16().chain([0]);
    words.flat_map(u16::to_le_bytes).collect()
}

/// Returns the content of a variable `Boot####` or `Driver####`: the program `path` of any disk, with the text `options` for it
/// (UEFI 2.10, section 3.1.3).
pub fn load_option(path: &str, options: &str) -> Vec<u8> {
    let path = utf16(path);
    // a media device path of the subtype file path, and the end of the path
    let length = (path.len() + 4) as u16;
    let node = [&[4, 4][..], &length.to_le_bytes(), &path].concat();
    let device_path = [&node[..], &[0x7f, 0xff, 4, 0]].concat();
    let active = 1u32.to_le_bytes();
    let length = (device_path.len() as u16).to_le_bytes();
    let options = match options {
        "" => Vec::new(),
        text => utf16(text),
    };
    [&active[..], &length, &utf16("host"), &device_path, &options].concat()
}

impl Machine {
    /// Writes variables into the file of the firmware's variables, as the owner of that file can while the machine is off.
    pub fn set_variables(&mut self, variables: &[Variable]) -> Result<()> {
        let list = variables.iter().map(|variable| {
            let digits = variable.content.iter().map(|byte| format!("{byte:02x}"));
            serde_json::json!({
                "name": variable.name, "guid": variable.vendor.guid(), "attr": ATTRIBUTES,
                "data": digits.collect::<String>(),
            })
        });
        let list = serde_json::json!({"version": 2, "variables": list.collect::<Vec<_>>()});
        let file = self.folder().join("variables.json");
        std::fs::write(&file, list.to_string()).context("write the list of variables")?;
        let python = script("tools/python.sh", &[])?;
        let written = Command::new(Path::new(&python).with_file_name("virt-fw-vars"))
            .args(["--loglevel", "ERROR", "--inplace"])
            .arg(self.variables()?)
            .arg("--set-json")
            .arg(file)
            .output()
            .context("run virt-fw-vars")?;
        if written.status.success() {
            Ok(())
        } else {
            Err(Failure(format!(
                "virt-fw-vars ended with {}: {}",
                written.status,
                String::from_utf8_lossy(&written.stderr)
            )))
        }
    }

    /// Adds a string to the firmware's table of the vendor's strings (SMBIOS, type 11).
    pub fn add_smbios_string(&mut self, text: &str) -> Result<()> {
        let path = self.new_file(text.as_bytes())?;
        self.extra
            .extend(["-smbios".to_owned(), format!("type=11,path={path}")]);
        Ok(())
    }

    /// Gives systemd a credential by such a string.
    pub fn add_credential(&mut self, name: &str, content: &str) -> Result<()> {
        let content = STANDARD.encode(content);
        self.add_smbios_string(&format!("io.systemd.credential.binary:{name}={content}"))
    }

    /// Gives systemd a credential by QEMU's fw_cfg.
    pub fn add_fw_cfg_credential(&mut self, name: &str, content: &str) -> Result<()> {
        let path = self.new_file(content.as_bytes())?;
        let argument = format!("name=opt/io.systemd.credentials/{name},file={path}");
        self.extra.extend(["-fw_cfg".to_owned(), argument]);
        Ok(())
    }

    /// Adds a device, after the arguments that QEMU needs for it.
    pub fn add_device(&mut self, arguments: &[&str]) {
        self.extra.extend(arguments.iter().map(|&it| it.to_owned()));
    }

    /// Writes a file beside the machine's disks and returns its path.
    fn new_file(&mut self, content: &[u8]) -> Result<String> {
        let path = self.folder().join(format!("given-{}", self.extra.len()));
        std::fs::write(&path, content).context("write a file")?;
        Ok(path.display().to_string())
    }
}
