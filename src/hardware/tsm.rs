//! Evidence from the kernel of a confidential machine: configfs-tsm (Linux 6.7, Documentation/ABI/testing/configfs-tsm-report).
//!
//! A folder is a request. What is written to `inblob` counts when the file is closed, and an error at that moment is lost; so
//! `generation` counts the writes that the kernel accepted, and the caller compares the bytes in the evidence with its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The folder of requests.
pub const REPORTS: &str = "/sys/kernel/config/tsm/report";
/// Both providers take exactly as many bytes.
pub const REPORT_DATA_LEN: usize = 64;
/// Number of attempts while the kernel is busy, or another program changes the request.
const ATTEMPTS: u32 = 5;

/// What the kernel returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The signed evidence: a report of SEV-SNP, or a quote of TDX.
    pub evidence: Vec<u8>,
    /// What the host gave beside it: the certificate table of SEV-SNP; empty if there is none.
    pub auxiliary: Vec<u8>,
}

/// Returns whether this machine's kernel makes such evidence.
pub fn exists() -> bool {
    Path::new(REPORTS).is_dir()
}

/// Requests evidence over these bytes from the kernel. `provider` is the expected one: `tdx_guest` or `sev_guest`; `privilege_level` is
/// the VMPL of SEV-SNP.
pub fn report(
    provider: &str,
    report_data: &[u8; REPORT_DATA_LEN],
    privilege_level: Option<u8>,
) -> Result<Report, String> {
    request(Path::new(REPORTS), provider, report_data, privilege_level)
}

/// As [`report`], with the folder of requests.
fn request(
    reports: &Path,
    provider: &str,
    report_data: &[u8; REPORT_DATA_LEN],
    privilege_level: Option<u8>,
) -> Result<Report, String> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("firstlight-{}-{number}", std::process::id());
        let request = Request::new(reports.join(name))?;
        match request.run(provider, report_data, privilege_level) {
            Ok(report) => return Ok(report),
            Err(Failed::Passing(why)) => last = why,
            Err(Failed::Lasting(why)) => return Err(why),
        }
    }
    Err(format!("{last}, also after {ATTEMPTS} attempts"))
}

/// Why a request failed.
enum Failed {
    /// Another attempt may succeed.
    Passing(String),
    Lasting(String),
}

/// A folder that the kernel fills, removed on drop.
struct Request(PathBuf);

impl Request {
    fn new(folder: PathBuf) -> Result<Request, String> {
        fs::create_dir(&folder).map_err(|error| {
            format!("cannot request evidence of the kernel in {}: {error}; a confidential machine with Linux 6.7 or newer has this folder, and configfs is mounted", folder.display())
        })?;
        Ok(Request(folder))
    }

    fn run(
        &self,
        provider: &str,
        report_data: &[u8],
        privilege_level: Option<u8>,
    ) -> Result<Report, Failed> {
        let found = self.read("provider")?;
        let found = String::from_utf8_lossy(&found);
        if found.trim() != provider {
            return Err(Failed::Lasting(format!(
                "this machine has the provider {:?} of evidence, expected {provider:?}",
                found.trim()
            )));
        }
        let start = self.generation()?;
        let mut writes = 1;
        if let Some(level) = privilege_level {
            self.write("privlevel", level.to_string().as_bytes())?;
            writes += 1;
        }
        self.write("inblob", report_data)?;
        let evidence = self.read("outblob")?;
        // a provider may have no such file
        let auxiliary = self.read("auxblob").unwrap_or_default();
        match self.generation()? == start + writes {
            true => Ok(Report {
                evidence,
                auxiliary,
            }),
            false => Err(Failed::Passing(
                "the kernel's request of evidence changed meanwhile".into(),
            )),
        }
    }

    fn generation(&self) -> Result<u64, Failed> {
        let text = self.read("generation")?;
        let number = String::from_utf8_lossy(&text).trim().parse();
        number.map_err(|_| {
            Failed::Lasting("the kernel's generation of evidence is not a number".into())
        })
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Failed> {
        fs::read(self.0.join(name)).map_err(|error| self.failed(name, &error))
    }

    /// Writes in one piece, and closes the file.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Failed> {
        let mut file = fs::OpenOptions::new().write(true).open(self.0.join(name));
        let written = file
            .as_mut()
            .map_err(|error| io::Error::from(error.kind()))
            .and_then(|file| io::Write::write_all(file, bytes));
        written.map_err(|error| self.failed(name, &error))
    }

    fn failed(&self, name: &str, error: &io::Error) -> Failed {
        let text = format!(
            "evidence of the kernel: {}: {error}",
            self.0.join(name).display()
        );
        match error.kind() {
            io::ErrorKind::ResourceBusy | io::ErrorKind::Interrupted => Failed::Passing(text),
            _ => Failed::Lasting(text),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // an error leaves an empty request until the next boot
        let _ = fs::remove_dir(&self.0);
    }
}
