//! Machines whose cloud keeps the attestation key at a persistent handle of the TPM, and whose
//! instance info stays the same until they reboot.

use base::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::hcl::KEY;
use crate::vtpm::VariantData;
use crate::{IssueError, Oid};
use tpm::{KeySource, Tpm};

/// Pause before the program asks for missing parts again.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// The source of the instance info of a variant.
pub trait Source: Send + Sync {
    /// The instance info.
    type Info: Clone + Serialize + Send;
    /// The OID of the variant.
    const OID: Oid;
    /// Returns the instance info, and whether it is complete. If it is not, the caller asks again
    /// later.
    fn info(&self, location: &tpm::Location) -> Result<(Self::Info, bool), IssueError>;
    /// Adds the parts that change while the machine runs.
    fn add_present(&self, _info: &mut Self::Info) {}
}

/// A machine that caches its instance info. Callers wait only for the first one. Missing parts are
/// requested again in the background, because each proof, also one for a stranger, uses this code.
pub struct Prepared<S: Source>(Arc<Shared<S>>);

struct Shared<S: Source> {
    source: S,
    /// This lock is never held during a request to the source.
    known: Mutex<Option<Known<S::Info>>>,
    /// This lock is held during a request to the source. It contains the last failure: callers that
    /// waited meanwhile get the same error.
    asking: Mutex<Option<(Instant, IssueError)>>,
}

struct Known<T> {
    info: T,
    /// When the program asks again, if the instance info is not complete.
    ask_again: Option<Instant>,
}

impl<S: Source + 'static> Prepared<S> {
    /// Makes a machine with this source.
    pub fn new(source: S) -> Prepared<S> {
        Prepared(Arc::new(Shared {
            source,
            known: Mutex::default(),
            asking: Mutex::default(),
        }))
    }

    /// If it is time, asks for missing parts in the background, without waiting.
    fn renew(&self, location: &tpm::Location) {
        if !self.0.is_due() {
            return;
        }
        let (shared, location) = (self.0.clone(), location.clone());
        let work = move || shared.ask_again(&location);
        let thread = thread::Builder::new().name("instance-info".into());
        if let Err(error) = thread.spawn(work) {
            log::warn!("cannot start the thread that fetches certificates: {error}");
        }
    }
}

impl<S: Source> Shared<S> {
    fn known(&self) -> MutexGuard<'_, Option<Known<S::Info>>> {
        lock(&self.known)
    }

    /// Requests the first instance info, or waits for the caller that already does.
    fn ask_first(&self, location: &tpm::Location) -> Result<(), IssueError> {
        let arrived = Instant::now();
        let mut failure = lock(&self.asking);
        if self.known().is_some() {
            return Ok(());
        }
        if let Some((_, error)) = failure.as_ref().filter(|(at, _)| *at >= arrived) {
            return Err(error.clone());
        }
        match self.source.info(location) {
            Ok((info, is_complete)) => {
                self.keep(info, is_complete);
                Ok(())
            }
            Err(error) => {
                *failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Returns whether something is missing and it is time to ask again. If so, starts the next
    /// pause.
    fn is_due(&self) -> bool {
        let (mut known, now) = (self.known(), Instant::now());
        let ask_again = known.as_mut().and_then(|known| known.ask_again.as_mut());
        match ask_again {
            Some(at) if *at <= now => {
                *at = now + ASK_AGAIN;
                true
            }
            _ => false,
        }
    }

    /// Asks again, unless another thread already does. A cached value is replaced only by a more
    /// complete one.
    fn ask_again(&self, location: &tpm::Location) {
        let _asking = match self.asking.try_lock() {
            Ok(asking) => asking,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        match self.source.info(location) {
            // an answer with fewer certificates is shorter
            Ok((info, is_complete)) if is_complete || self.len() <= len(&info) => {
                self.keep(info, is_complete);
            }
            Ok(_) => {}
            Err(error) => log::warn!("cannot fetch certificates for evidence: {error}"),
        }
    }

    fn keep(&self, info: S::Info, is_complete: bool) {
        let ask_again = (!is_complete).then(|| Instant::now() + ASK_AGAIN);
        *self.known() = Some(Known { info, ask_again });
    }

    /// Returns the length of the cached value.
    fn len(&self) -> usize {
        self.known().as_ref().map_or(0, |known| len(&known.info))
    }

    /// Returns the cached value with the parts that change while the machine runs.
    fn present(&self) -> Result<Option<Vec<u8>>, IssueError> {
        let info = self.known().as_ref().map(|known| known.info.clone());
        let Some(mut info) = info else {
            return Ok(None);
        };
        self.source.add_present(&mut info);
        Ok(Some(serde_json::to_vec(&info)?))
    }
}

/// Returns the length that an instance info has in a document.
fn len(info: &impl Serialize) -> usize {
    serde_json::to_vec(info).map_or(0, |text| text.len())
}

impl<S: Source + 'static> VariantData for Prepared<S> {
    fn oid(&self) -> Oid {
        S::OID
    }

    fn key_source(&self) -> KeySource {
        KEY
    }

    fn prepare(&self, location: &tpm::Location) -> Result<(), IssueError> {
        if self.0.known().is_none() {
            return self.0.ask_first(location);
        }
        self.renew(location);
        Ok(())
    }

    fn instance_info(&self, _: &mut Tpm, _: &[u8; 32]) -> Result<Option<Vec<u8>>, IssueError> {
        self.0.present()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    type Answer = Result<(String, bool), IssueError>;

    /// Answers when the test permits it.
    struct Slow {
        answers: Mutex<Receiver<Answer>>,
        asked: Arc<AtomicUsize>,
    }

    impl Source for Slow {
        type Info = String;
        const OID: Oid = &[];

        fn info(&self, _location: &tpm::Location) -> Answer {
            self.asked.fetch_add(1, Ordering::SeqCst);
            self.answers.lock().unwrap().recv().unwrap()
        }
    }

    struct Host {
        machine: Prepared<Slow>,
        answer: Sender<Answer>,
        asked: Arc<AtomicUsize>,
        location: tpm::Location,
    }

    impl Host {
        fn new() -> Host {
            let (answer, answers) = channel();
            let asked = Arc::new(AtomicUsize::new(0));
            let source = Slow {
                answers: Mutex::new(answers),
                asked: asked.clone(),
            };
            Host {
                machine: Prepared::new(source),
                answer,
                asked,
                location: "device:/dev/null".parse().unwrap(),
            }
        }

        fn prepare(&self) -> Result<(), IssueError> {
            self.machine.prepare(&self.location)
        }

        fn present(&self) -> String {
            let text = self.machine.0.present().unwrap().unwrap();
            serde_json::from_slice(&text).unwrap()
        }

        /// Sets the time of the next request to now.
        fn make_due(&self) {
            let mut known = self.machine.0.known();
            let ask_again = &mut known.as_mut().unwrap().ask_again;
            *ask_again = ask_again.map(|_| Instant::now());
        }

        fn asked(&self) -> usize {
            self.asked.load(Ordering::SeqCst)
        }

        /// Waits until a condition holds; the time limit is for a machine under load.
        fn wait_until(&self, is_so: impl Fn(&Host) -> bool) {
            let limit = Instant::now() + Duration::from_secs(60);
            while !is_so(self) {
                assert!(Instant::now() < limit);
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn no_proof_waits_for_what_is_missing_and_a_failure_takes_nothing_away() {
        let host = Host::new();
        host.answer.send(Ok(("half".into(), false))).unwrap();
        host.prepare().unwrap();
        for answer in [
            Err(IssueError::new("nobody answers")),
            Ok(("-".into(), false)),
        ] {
            let before = host.asked();
            host.make_due();
            // the source is asked once, and does not answer yet
            host.prepare().unwrap();
            host.wait_until(|host| host.asked() > before);
            for _ in 0..10 {
                host.prepare().unwrap();
                assert_eq!(host.present(), "half");
            }
            host.answer.send(answer).unwrap();
            host.wait_until(|host| host.machine.0.asking.try_lock().is_ok());
            assert_eq!(host.present(), "half");
            assert_eq!(host.asked(), before + 1);
        }
        host.answer.send(Ok(("whole".into(), true))).unwrap();
        host.make_due();
        host.prepare().unwrap();
        host.wait_until(|host| host.present() == "whole");
        host.make_due();
        host.prepare().unwrap();
        assert_eq!(host.asked(), 4);
    }

    #[test]
    fn those_who_wait_for_the_first_answer_share_it() {
        let host = Host::new();
        let failed = || Err(IssueError::new("nobody answers"));
        let prepared: Vec<_> = thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| host.prepare())).collect();
            host.wait_until(|host| host.asked() > 0);
            thread::sleep(Duration::from_millis(200));
            // a later caller sends a new request
            for _ in 0..8 {
                host.answer.send(failed()).unwrap();
            }
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(prepared.iter().all(Result::is_err));
        assert!(host.asked() < 8, "{}", host.asked());
    }
}
