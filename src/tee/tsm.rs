//! Evidence from the kernel of a confidential machine: configfs-tsm (Linux 6.7,
//! Documentation/ABI/testing/configfs-tsm-report).
//!
//! A folder is a request. The kernel accepts the content of `inblob` when the file is closed, and
//! does not report an error at that moment. So `generation` counts the writes that the kernel
//! accepted, and the caller compares the bytes in the evidence with its own.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

use crate::{Error, hex};

/// The folder of requests.
pub const REPORTS: &str = "/sys/kernel/config/tsm/report";
/// Both providers take exactly as many bytes.
pub const REPORT_DATA_LEN: usize = 64;
/// Number of attempts while the kernel is busy, or another program changes the request.
const ATTEMPTS: u32 = 5;
/// The pause after the first attempt; each further one is twice as long. Together they take less
/// than a second.
const PAUSE: Duration = Duration::from_millis(50);

/// Returns whether this machine's kernel makes such evidence.
pub fn exists() -> bool {
    Path::new(REPORTS).is_dir()
}

/// Requests evidence over these bytes from the kernel. `provider` is the expected one: `tdx_guest`
/// or `sev_guest`; `privilege_level` is the VMPL of SEV-SNP. Returns the signed evidence, a report
/// of SEV-SNP or a quote of TDX, and additional data from the host: the certificate table of
/// SEV-SNP; empty if there is none.
pub fn report(
    provider: &str,
    report_data: &[u8; REPORT_DATA_LEN],
    privilege_level: Option<u8>,
) -> Result<(Vec<u8>, Vec<u8>), Error> {
    request(&Kernel, provider, report_data, privilege_level)
}

/// The operations on the kernel's folder. The tests use a folder of their own: only a kernel on the
/// hardware makes evidence.
trait Folder {
    fn make(&self, folder: &Path) -> io::Result<()>;
    fn read(&self, file: &Path) -> io::Result<Vec<u8>>;
    /// Writes in one piece, and closes the file.
    fn write(&self, file: &Path, bytes: &[u8]) -> io::Result<()>;
    fn remove(&self, folder: &Path) -> io::Result<()>;
}

struct Kernel;

impl Folder for Kernel {
    fn make(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir(folder)
    }

    fn read(&self, file: &Path) -> io::Result<Vec<u8>> {
        fs::read(file)
    }

    fn write(&self, file: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).open(file)?;
        io::Write::write_all(&mut file, bytes)
    }

    fn remove(&self, folder: &Path) -> io::Result<()> {
        fs::remove_dir(folder)
    }
}

/// Like [`report`], with the folder of requests.
fn request(
    folder: &dyn Folder,
    provider: &str,
    report_data: &[u8; REPORT_DATA_LEN],
    privilege_level: Option<u8>,
) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let mut last = String::new();
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            thread::sleep(PAUSE * (1 << (attempt - 1)));
        }
        let report = Request::new(folder)
            .and_then(|request| request.run(provider, report_data, privilege_level));
        match report {
            Ok(report) => return Ok(report),
            Err(Error::Busy(why)) => last = why,
            Err(lasting) => return Err(lasting),
        }
    }
    let text = format!("{last}, also in the last of {ATTEMPTS} attempts");
    Err(Error::Busy(text))
}

/// A folder that the kernel fills, removed on drop.
struct Request<'a> {
    folder: &'a dyn Folder,
    path: PathBuf,
}

impl Request<'_> {
    /// Makes a folder. Its name is random: a killed process leaves its own, and another container
    /// has the same process IDs.
    fn new(folder: &dyn Folder) -> Result<Request<'_>, Error> {
        let mut name = [0; 8];
        let random = SystemRandom::new().fill(&mut name);
        random.map_err(|_| Error::Unavailable("the kernel has no random numbers".into()))?;
        let path = Path::new(REPORTS).join(format!("firstlight-{}", hex(&name)));
        match folder.make(&path) {
            Ok(()) => Ok(Request { folder, path }),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Error::Busy(format!(
                "another request for evidence uses the folder {}",
                path.display()
            ))),
            Err(error) if is_passing(&error) => Err(Error::Busy(format!(
                "the kernel accepts no request for evidence now: {}: {error}",
                path.display()
            ))),
            Err(error) => Err(Error::Unavailable(format!(
                "cannot request evidence from the kernel in {}: {error}; this needs a confidential machine, Linux 6.7 or newer, and a \
                 mounted configfs",
                path.display()
            ))),
        }
    }

    fn run(
        &self,
        provider: &str,
        report_data: &[u8],
        privilege_level: Option<u8>,
    ) -> Result<(Vec<u8>, Vec<u8>), Error> {
        let found = self.read("provider")?;
        let found = String::from_utf8_lossy(&found);
        if found.trim() != provider {
            return Err(Error::Unavailable(format!(
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
        let auxiliary = self.auxiliary()?;
        let now = self.generation()?;
        if now < start + writes {
            return Err(Error::Unavailable(format!(
                "the kernel did not accept the request for evidence: {} of {writes} writes had an effect",
                now.saturating_sub(start)
            )));
        }
        if now > start + writes {
            return Err(Error::Busy(
                "another program changed the request for evidence meanwhile".into(),
            ));
        }
        if evidence.is_empty() {
            return Err(Error::Malformed("the kernel returned no evidence".into()));
        }
        Ok((evidence, auxiliary))
    }

    /// Returns the additional data from the host. A provider without such data, such as TDX, has no
    /// such file.
    fn auxiliary(&self) -> Result<Vec<u8>, Error> {
        match self.folder.read(&self.path.join("auxblob")) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(vec![]),
            Err(error) => Err(self.failed("auxblob", &error)),
            Ok(bytes) => Ok(bytes),
        }
    }

    fn generation(&self) -> Result<u64, Error> {
        let text = self.read("generation")?;
        let number = String::from_utf8_lossy(&text).trim().parse();
        number.map_err(|_| {
            Error::Malformed("the kernel's generation of evidence is not a number".into())
        })
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let bytes = self.folder.read(&self.path.join(name));
        bytes.map_err(|error| self.failed(name, &error))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let written = self.folder.write(&self.path.join(name), bytes);
        written.map_err(|error| self.failed(name, &error))
    }

    fn failed(&self, name: &str, error: &io::Error) -> Error {
        let file = self.path.join(name);
        let text = format!(
            "cannot get evidence from the kernel: {}: {error}",
            file.display()
        );
        match name {
            _ if is_passing(error) => Error::Busy(text),
            "outblob" => Error::Unavailable(format!(
                "{text}; the host's service that signs evidence does not answer, or the kernel refuses the request"
            )),
            _ => Error::Unavailable(text),
        }
    }
}

/// Returns whether another attempt may succeed: the kernel is busy with another request, or the
/// request was written while it was read.
fn is_passing(error: &io::Error) -> bool {
    use ErrorKind::*;
    matches!(error.kind(), ResourceBusy | WouldBlock | Interrupted)
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        // an error leaves an empty request until the next boot
        let _ = self.folder.remove(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::*;

    const EBUSY: i32 = 16;
    const EWOULDBLOCK: i32 = 11;
    const EIO: i32 = 5;

    /// A folder that behaves like the kernel's (drivers/virt/coco/guest/report.c): each write
    /// counts, and the evidence covers the last `inblob`. It replaces the kernel, because no test
    /// machine has one that makes evidence.
    #[derive(Default)]
    struct Simulated {
        requests: RefCell<BTreeMap<PathBuf, State>>,
        /// Counts the calls, and makes the listed ones fail: operation, the first call to fail,
        /// error.
        faults: RefCell<Vec<(&'static str, u32, i32)>>,
        /// How many times another program writes, too, before `outblob` is read.
        intruders: RefCell<u32>,
        /// Whether the writes of `inblob` are lost when the file is closed.
        is_lossy: bool,
        provider: &'static str,
        made: RefCell<Vec<PathBuf>>,
    }

    #[derive(Default)]
    struct State {
        generation: u64,
        privilege_level: String,
        report_data: Vec<u8>,
    }

    impl Simulated {
        fn new(provider: &'static str) -> Simulated {
            Simulated {
                provider,
                ..Simulated::default()
            }
        }

        /// Fails the first `times` calls of an operation with an error of the kernel.
        fn failing(mut self, operation: &'static str, times: u32, error: i32) -> Simulated {
            self.faults.get_mut().push((operation, times, error));
            self
        }

        fn fault(&self, operation: &str) -> io::Result<()> {
            let mut faults = self.faults.borrow_mut();
            match faults.iter_mut().find(|it| it.0 == operation && it.1 > 0) {
                Some((_, left, error)) => {
                    *left -= 1;
                    Err(io::Error::from_raw_os_error(*error))
                }
                None => Ok(()),
            }
        }

        fn run(&self) -> Result<(Vec<u8>, Vec<u8>), Error> {
            let report = request(self, "sev_guest", &[7; 64], Some(2));
            assert!(self.requests.borrow().is_empty(), "a folder is left");
            report
        }
    }

    fn parts(file: &Path) -> (&Path, &str) {
        let name = file.file_name().unwrap().to_str().unwrap();
        (file.parent().unwrap(), name)
    }

    impl Folder for Simulated {
        fn make(&self, folder: &Path) -> io::Result<()> {
            self.made.borrow_mut().push(folder.into());
            self.fault("mkdir")?;
            let mut requests = self.requests.borrow_mut();
            requests.insert(folder.into(), State::default());
            Ok(())
        }

        fn read(&self, file: &Path) -> io::Result<Vec<u8>> {
            let (folder, name) = parts(file);
            self.fault(name)?;
            let mut requests = self.requests.borrow_mut();
            let state = requests.get_mut(folder).unwrap();
            let mut intruders = self.intruders.borrow_mut();
            if name == "outblob" && *intruders > 0 {
                *intruders -= 1;
                state.generation += 1;
                state.report_data = vec![9; 64];
            }
            match name {
                "provider" => Ok(format!("{}\n", self.provider).into()),
                "generation" => Ok(format!("{}\n", state.generation).into()),
                "outblob" => Ok([state.privilege_level.as_bytes(), &state.report_data].concat()),
                "auxblob" if self.provider == "sev_guest" => Ok(b"table".into()),
                _ => Err(ErrorKind::NotFound.into()),
            }
        }

        fn write(&self, file: &Path, bytes: &[u8]) -> io::Result<()> {
            let (folder, name) = parts(file);
            self.fault(name)?;
            let mut requests = self.requests.borrow_mut();
            let state = requests.get_mut(folder).unwrap();
            match name {
                "inblob" if self.is_lossy => return Ok(()),
                "inblob" => state.report_data = bytes.into(),
                _ => state.privilege_level = String::from_utf8(bytes.into()).unwrap(),
            }
            state.generation += 1;
            Ok(())
        }

        fn remove(&self, folder: &Path) -> io::Result<()> {
            self.requests.borrow_mut().remove(folder);
            Ok(())
        }
    }

    #[test]
    fn a_report_is_over_the_bytes_and_leaves_no_folder() {
        let folder = Simulated::new("sev_guest");
        let (report, table) = folder.run().unwrap();
        assert_eq!(report, [&b"2"[..], &[7; 64]].concat());
        assert_eq!(table, b"table");
        let tdx = Simulated::new("tdx_guest");
        let (quote, nothing) = request(&tdx, "tdx_guest", &[7; 64], None).unwrap();
        assert_eq!((quote.len(), nothing.len()), (64, 0));
    }

    #[test]
    fn what_passes_is_tried_again_with_another_folder() {
        let exists = 17;
        for (operation, error) in [
            ("mkdir", exists),
            ("mkdir", EBUSY),
            ("inblob", EBUSY),
            ("privlevel", EBUSY),
            ("outblob", EBUSY),
            ("outblob", EWOULDBLOCK),
            ("auxblob", EBUSY),
            ("generation", 4),
        ] {
            let folder = Simulated::new("sev_guest").failing(operation, 2, error);
            assert_eq!(folder.run().unwrap().0.len(), 65, "{operation}");
            let mut made = folder.made.take();
            made.sort();
            made.dedup();
            assert_eq!(made.len(), 3, "{operation}: {made:?}");
        }
        let folder = Simulated::new("sev_guest");
        folder.intruders.replace(2);
        assert_eq!(folder.run().unwrap().0[1..], [7; 64]);
    }

    #[test]
    fn attempts_end() {
        let folder = Simulated::new("sev_guest").failing("outblob", 9, EBUSY);
        let error = folder.run().unwrap_err();
        let busy = |why: &str| why.contains("outblob: ") && why.ends_with("the last of 5 attempts");
        assert!(matches!(&error, Error::Busy(why) if busy(why)), "{error}");
        assert_eq!(folder.made.take().len(), 5);
        let folder = Simulated::new("sev_guest");
        folder.intruders.replace(99);
        let error = folder.run().unwrap_err();
        let busy = |why: &str| why.contains("another program changed the request");
        assert!(matches!(&error, Error::Busy(why) if busy(why)), "{error}");
    }

    #[test]
    fn what_lasts_is_told_at_once() {
        for (operation, error, why) in [
            ("mkdir", 2, "a confidential machine, Linux 6.7 or newer"),
            (
                "outblob",
                EIO,
                "the host's service that signs evidence does not answer",
            ),
            (
                "outblob",
                110,
                "the host's service that signs evidence does not answer",
            ),
            ("auxblob", EIO, "auxblob: "),
            ("inblob", 22, "inblob: "),
        ] {
            let folder = Simulated::new("sev_guest").failing(operation, 1, error);
            let error = folder.run().unwrap_err();
            assert!(
                matches!(&error, Error::Unavailable(text) if text.contains(why)),
                "{error}"
            );
            assert_eq!(folder.made.take().len(), 1);
        }
        let error = Simulated::new("tdx_guest").run().unwrap_err();
        assert!(
            error
                .to_string()
                .contains(r#"provider "tdx_guest" of evidence, expected "sev_guest""#),
            "{error}"
        );
        let lossy = Simulated {
            is_lossy: true,
            ..Simulated::new("sev_guest")
        };
        let error = lossy.run().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("did not accept the request for evidence: 1 of 2 writes had an effect"),
            "{error}"
        );
    }
}
