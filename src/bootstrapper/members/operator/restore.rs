//! Restores etcd with a snapshot that the caller sends.
//!
//! ```text
//!  who, choices ─► snapshot, signature ─► plan ─► question ─► agreed ─► restoration, on a thread of its own ─► done
//! ```
//!
//! The restoration does not depend on the connection. If it breaks, the same call goes on.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use kubernetes::etcd_signature;
use proto::operator::{RestoreEtcdRequest, RestoreEtcdResponse};
use rpc::grpc::{Call, Code, Receiver, Sender, Status};

use super::OperatorService;
use super::callers::Right;
use crate::members::restore::{self, RestoreCall};
use crate::steps::job::Job;

/// Below the mount point of the state disk: what a caller has sent, while the call runs.
const FOLDER: &str = "firstlight/restore-upload";
/// Maximum bytes of a snapshot: etcd's own limit of its database, 8 GiB, and the hash.
const MAX: u64 = (8 << 30) + (1 << 20);
/// How often the caller gets new lines of the restoration.
const TICK: Duration = Duration::from_millis(200);

/// What the thread of the restoration tells the caller.
enum Said {
    Text(String),
    Question(String, mpsc::Sender<bool>),
}

impl OperatorService {
    pub(super) fn restore_etcd(
        &self,
        call: &Call,
        requests: &mut Receiver<RestoreEtcdRequest>,
        sender: &mut Sender<RestoreEtcdResponse>,
    ) -> Result<(), Status> {
        let missing = || Status::new(Code::InvalidArgument, "the call ends too early");
        let first = requests.next().ok_or_else(missing)??;
        let caller = self
            .callers
            .of_call(call, first.caller.as_ref(), Right::Change)?;
        self.check_name(&first.node)?;
        let what = match (first.dry_run, first.undo) {
            (true, _) => "plan of restore-etcd",
            (_, true) => "restore-etcd --undo",
            _ => "restore-etcd",
        };
        let Ok(_alone) = self.restoring.try_lock() else {
            let text = "another call restores etcd of this node just now";
            return Err(Status::new(Code::Aborted, text));
        };
        self.record.add(call, &caller, what)?;
        let upload = Upload::new(self.machine.root.join(FOLDER))?;
        if !first.undo {
            upload.receive(requests)?;
        }
        let asked = RestoreCall {
            root: &self.machine.root,
            snapshot: &upload.snapshot(),
            is_dry_run: first.dry_run,
            is_undo: first.undo,
            unsigned: &first.unsigned,
        };
        self.restore(&asked, requests, sender)
    }

    fn restore(
        &self,
        asked: &RestoreCall<'_>,
        requests: &mut Receiver<RestoreEtcdRequest>,
        sender: &mut Sender<RestoreEtcdResponse>,
    ) -> Result<(), Status> {
        let job = Job::<()>::new(self.machine.timeline);
        job.begin();
        let (told, said) = mpsc::channel();
        let asking = told.clone();
        let tell = move |text: &str| drop(told.send(Said::Text(text.to_owned())));
        let ask = move |question: &str| {
            let (answer, answered) = mpsc::channel();
            let question = Said::Question(question.to_owned(), answer);
            let is_agreed = asking.send(question).is_ok() && answered.recv() == Ok(true);
            is_agreed
                .then_some(())
                .ok_or("the caller did not agree to the plan".into())
        };
        let stop = &self.machine.stop;
        let result = thread::scope(|scope| {
            let job = &job;
            let working = scope.spawn(move || restore::by_call(asked, stop, job, &tell, &ask));
            let mut seen = 0;
            // a caller who is gone gets nothing, and has agreed to nothing
            let mut say = |text: String, question| {
                drop(sender.send(&RestoreEtcdResponse { text, question }));
            };
            loop {
                let next = said.recv_timeout(TICK);
                let (events, _) = job.watch(seen, Duration::ZERO);
                seen += events.len();
                for event in events {
                    let line = if event.line.is_empty() {
                        event.phase
                    } else {
                        &event.line
                    };
                    say(line.to_owned(), false);
                }
                match next {
                    Ok(Said::Text(text)) => say(text, false),
                    Ok(Said::Question(text, answer)) => {
                        say(text, true);
                        let agreed = matches!(requests.next(), Some(Ok(it)) if it.agreed);
                        // a restoration that has ended takes no answer
                        let _ = answer.send(agreed);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break working.join(),
                }
            }
        });
        match result {
            Ok(done) => {
                done.map_err(|error| Status::new(Code::FailedPrecondition, error.to_string()))
            }
            Err(_) => Err(Status::new(
                Code::Internal,
                "a thread of the node panicked: its log says where",
            )),
        }
    }
}

/// The files of a caller. They are deleted at the end of the call.
struct Upload(PathBuf);

impl Upload {
    fn new(folder: PathBuf) -> Result<Upload, Status> {
        // what a killed program has left
        let _ = fs::remove_dir_all(&folder);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(|error| failed(&folder, &error))?;
        Ok(Upload(folder))
    }

    fn snapshot(&self) -> PathBuf {
        self.0.join("snapshot.db")
    }

    fn receive(&self, requests: &mut Receiver<RestoreEtcdRequest>) -> Result<(), Status> {
        let path = self.snapshot();
        let failed = |error: io::Error| failed(&path, &error);
        let mut file = create(&path).map_err(failed)?;
        let mut size = 0;
        for request in requests {
            let request = request?;
            size += request.snapshot.len() as u64;
            if size > MAX {
                let text = format!("the snapshot is larger than {} GiB", MAX >> 30);
                return Err(Status::new(Code::OutOfRange, text));
            }
            file.write_all(&request.snapshot).map_err(failed)?;
            if !request.signature.is_empty() {
                let mut signature = create(&etcd_signature::file_of(&path)).map_err(failed)?;
                signature.write_all(&request.signature).map_err(failed)?;
            }
            if request.uploaded {
                return Ok(());
            }
        }
        Err(Status::new(
            Code::InvalidArgument,
            "the snapshot ends too early",
        ))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn create(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn failed(path: &std::path::Path, error: &io::Error) -> Status {
    Status::new(
        Code::Internal,
        format!("cannot write {}: {error}", path.display()),
    )
}
