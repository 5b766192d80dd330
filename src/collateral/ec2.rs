//! Asks EC2 about machines of Amazon Web Services: which account owns an instance, and in which zone it is.
//!
//! ```text
//! instance ─► known ───────────────────────────► returned at once: an instance never changes its account or its zone
//!          ─► EC2 refused it just now ─────────► the same refusal
//!          ─► EC2 is asked about it already ───► wait for the result, until the deadline
//!          ─► EC2 is away or wants a pause ────► wait until its end, or fail at once if the deadline is before
//!          ─► nobody could ask it just now ────► fail at once: no credentials, or no permission
//!          ─► ask, in a thread of its own: a caller waits no longer than until its deadline, and the answer counts for the next one
//! ```
//!
//! These answers are kept only in memory: whoever can write to a store must not decide which account owns a machine.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use base::backoff::Backoff;
use base::machines::Cloud;
use base::sync::{lock, wait_timeout};
use cloud_api::aws::SignedClient;
use cloud_api::aws::credentials::{self, Variables};
use hardware::{Cause, Unavailable};
use verifier::instance::CloudInstance;

use crate::describe::describe;

/// Maximum number of instances in memory: more than a cluster has nodes. A further one replaces one that EC2 does not know; if
/// there is none, the one that was unused for the longest time.
const MAX_INSTANCES: usize = 16_384;
/// Maximum number of requests at once, and thus of threads.
const MAX_AT_ONCE: usize = 8;
/// Maximum number of callers that wait for EC2; a further one fails at once. Each is a thread of a service.
const MAX_WAITING: usize = 256;
/// Pause after EC2 did not know an instance, or said that it does not run: EC2 may learn of a new instance within seconds
/// ("Eventual consistency in the Amazon EC2 API").
const REFUSED_PAUSE: Duration = Duration::from_secs(10);
/// Pause after this program lacked credentials or a permission. When an operator changes a role's policy, the change takes effect
/// within seconds.
const CALLER_PAUSE: Duration = Duration::from_secs(10);
/// The first and the longest pause after EC2 did not answer, or had too many requests. EC2 allows a caller some more requests each
/// second ("Request throttling for the Amazon EC2 API"), so a minute is enough.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The addresses of EC2, and the credentials of the requests.
#[derive(Clone)]
pub struct Ec2Caller {
    /// The addresses of the services, as `--metadata` has them: `[URL][,ec2=URL]`.
    pub place: Option<String>,
    /// The environment variables for the credentials, the region and the addresses.
    pub variables: Variables,
}

impl Ec2Caller {
    /// Takes the addresses from the argument of `--metadata`, if this cloud is AWS.
    pub fn take_place(&mut self, cloud: &str, place: Option<&str>) {
        if cloud.eq_ignore_ascii_case(Cloud::Aws.name()) {
            self.place = place.map(str::to_owned);
        }
    }
}

impl Default for Ec2Caller {
    /// The usual addresses, and the environment of this program.
    fn default() -> Ec2Caller {
        Ec2Caller {
            place: None,
            variables: credentials::environment,
        }
    }
}

/// EC2's answers, and the client.
pub struct Ec2 {
    /// The error names the address or the variable that is wrong. A caller gets it only when a request would be sent.
    client: Result<SignedClient, Unavailable>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    slots: HashMap<String, Slot>,
    pause: Option<Pause>,
    backoff: Backoff,
    running: usize,
    waiting: usize,
    uses: u64,
}

/// Why no request is sent for now.
#[derive(Clone)]
struct Pause {
    until: Instant,
    why: Unavailable,
}

#[derive(Default)]
struct Slot {
    known: Option<Arc<CloudInstance>>,
    /// Until when no request for this instance is sent, and why EC2 refused it.
    refusal: Option<(Instant, Unavailable)>,
    is_running: bool,
    last_use: u64,
}

impl Ec2 {
    /// Makes the client. Sends no request.
    pub fn new(caller: &Ec2Caller) -> Arc<Ec2> {
        let client = SignedClient::of_caller(caller.place.as_deref(), caller.variables);
        Arc::new(Ec2 {
            client: client.map_err(|error| Cause::Setting.because(error.to_string())),
            state: Mutex::new(State {
                slots: HashMap::new(),
                pause: None,
                backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
                running: 0,
                waiting: 0,
                uses: 0,
            }),
            changed: Condvar::new(),
        })
    }

    /// Returns EC2's description of a running instance.
    pub fn instance(
        self: &Arc<Self>,
        id: &str,
        deadline: Instant,
    ) -> Result<Arc<CloudInstance>, Unavailable> {
        let mut state = self.state();
        loop {
            let now = Instant::now();
            // only instances about which a request runs get a new entry
            let mut is_asked = false;
            if state.slots.contains_key(id) {
                let slot = state.slot(id);
                if let Some(known) = &slot.known {
                    return Ok(known.clone());
                }
                if let Some((_, why)) = slot.refusal.as_ref().filter(|(until, _)| *until > now) {
                    return Err(why.clone());
                }
                is_asked = slot.is_running;
            }
            let pause = state.pause.clone().filter(|pause| pause.until > now);
            let until = match &pause {
                Some(pause) if !pause.why.may_pass() || pause.until >= deadline => {
                    let seconds = (pause.until - now).as_secs() + 1;
                    let why = pause.why.clone();
                    return Err(why.and(format!("; asking EC2 again in {seconds} s")));
                }
                Some(pause) => pause.until,
                None => deadline,
            };
            if !is_asked && pause.is_none() && state.running < MAX_AT_ONCE {
                self.ask(&mut state, id)?;
            }
            let left = until.saturating_duration_since(now);
            if left.is_zero() {
                let why = format!("EC2 has not yet answered who owns the instance {id}");
                return Err(Cause::Pending.because(why));
            }
            if state.waiting >= MAX_WAITING {
                let waiting = state.waiting;
                let why = format!("{waiting} validations already wait for EC2");
                return Err(Cause::Limited.because(why));
            }
            state.waiting += 1;
            state = wait_timeout(&self.changed, state, left);
            state.waiting -= 1;
        }
    }

    /// Starts the thread that asks about an instance.
    fn ask(self: &Arc<Self>, state: &mut State, id: &str) -> Result<(), Unavailable> {
        let (ec2, own) = (self.clone(), id.to_owned());
        let work = move || {
            // a panic must not leave the instance marked as running for ever
            let _running = Running {
                ec2: &ec2,
                id: &own,
            };
            let asked = ec2.request(&own);
            let failed = ec2.state().take(&own, asked);
            if let Some(why) = failed {
                log::warn!("cannot ask EC2 about the instance {own}: {why}");
            }
        };
        let spawned = thread::Builder::new().name("ec2".into()).spawn(work);
        spawned.map_err(|error| {
            let why = format!("cannot start a thread that asks EC2: {error}");
            Cause::Limited.because(why)
        })?;
        state.slot(id).is_running = true;
        state.running += 1;
        Ok(())
    }

    fn request(&self, id: &str) -> Result<CloudInstance, Unavailable> {
        let described = describe(self.client.as_ref().map_err(Clone::clone)?, id)?;
        match described.state.as_str() {
            "pending" | "running" => Ok(CloudInstance {
                id: Some(id.into()),
                account: Some(described.account),
                zone: Some(described.zone),
                image: Some(described.image),
                ..CloudInstance::default()
            }),
            other => {
                let why = format!("EC2 says that the instance {id} is {other}, expected running");
                Err(Cause::Mismatch.because(why))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// Returns the entry of an instance, and marks it as the one that was used last.
    fn slot(&mut self, id: &str) -> &mut Slot {
        self.uses += 1;
        let slot = self.slots.entry(id.to_owned()).or_default();
        slot.last_use = self.uses;
        slot
    }

    /// Keeps the result of a request. If a pause begins, returns the reason.
    fn take(&mut self, id: &str, asked: Result<CloudInstance, Unavailable>) -> Option<Unavailable> {
        let now = Instant::now();
        // requests that already ran when the pause began neither end it nor make it longer
        let is_paused = self.pause.as_ref().is_some_and(|pause| pause.until > now);
        let failed = match asked {
            Ok(instance) => {
                let slot = self.slot(id);
                (slot.known, slot.refusal) = (Some(Arc::new(instance)), None);
                None
            }
            Err(why) if why.may_pass() || why.cause == Cause::Setting => Some(why),
            // the reason is this instance
            Err(why) => {
                self.slot(id).refusal = Some((now + REFUSED_PAUSE, why));
                None
            }
        };
        self.shrink();
        match failed {
            _ if is_paused => None,
            None => {
                self.pause = None;
                self.backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
                None
            }
            Some(why) => {
                let pause = if why.may_pass() {
                    self.backoff.pause()
                } else {
                    CALLER_PAUSE
                };
                self.pause = Some(Pause {
                    until: now + pause,
                    why: (why.clone()).about(format!("cannot ask EC2 about the instance {id}")),
                });
                Some(why)
            }
        }
    }

    /// Removes entries beyond [`MAX_INSTANCES`].
    fn shrink(&mut self) {
        while self.slots.len() > MAX_INSTANCES {
            let idle = self.slots.iter().filter(|(_, slot)| !slot.is_running);
            let first = idle.min_by_key(|(_, slot)| (slot.known.is_some(), slot.last_use));
            let Some(id) = first.map(|(id, _)| id.clone()) else {
                return;
            };
            self.slots.remove(&id);
        }
    }
}

/// When dropped, marks an instance as not running and wakes the callers that wait for it.
struct Running<'a> {
    ec2: &'a Ec2,
    id: &'a str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.ec2.state();
        state.running -= 1;
        if let Some(slot) = state.slots.get_mut(self.id) {
            slot.is_running = false;
        }
        drop(state);
        self.ec2.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nobody() -> Arc<Ec2> {
        let place = Some("http://127.0.0.1:1".to_owned());
        let variables: Variables = |_| None;
        Ec2::new(&Ec2Caller { place, variables })
    }

    #[test]
    fn instances_beyond_the_limit_go_and_those_that_ec2_refused_go_first() {
        let ec2 = nobody();
        let mut state = ec2.state();
        let refusal = || Err(Cause::Unknown.because("unknown"));
        for number in 0..MAX_INSTANCES - 1 {
            state.take(&format!("i-{number}"), Ok(CloudInstance::default()));
        }
        state.take("refused", refusal());
        state.take("new", Ok(CloudInstance::default()));
        assert_eq!(state.slots.len(), MAX_INSTANCES);
        assert!(!state.slots.contains_key("refused") && state.slots.contains_key("i-0"));
        // refused instances never replace known ones, so nobody can empty the memory with invented IDs
        for number in 0..100 {
            state.take(&format!("r-{number}"), refusal());
        }
        assert!(state.slots.contains_key("i-0"));
        state.slot("i-0");
        state.take("newer", Ok(CloudInstance::default()));
        assert!(state.slots.contains_key("i-0") && !state.slots.contains_key("i-1"));
        assert_eq!(state.slots.len(), MAX_INSTANCES);
    }

    #[test]
    fn what_ran_when_a_pause_began_neither_ends_it_nor_makes_it_longer() {
        let ec2 = nobody();
        let mut state = ec2.state();
        let away = || Err(Cause::Busy.because("throttled"));
        let until = |state: &State| state.pause.as_ref().map(|pause| pause.until);
        assert_eq!(state.take("i-1", away()), away().err());
        let first = until(&state).unwrap();
        assert!(first <= Instant::now() + FIRST_PAUSE);
        for asked in [away(), Ok(CloudInstance::default()), away()] {
            assert_eq!(state.take("i-2", asked), None);
            assert_eq!(until(&state), Some(first));
        }
        // the next failure doubles the pause; an answer resets it
        let end = |state: &mut State| state.pause.as_mut().unwrap().until = Instant::now();
        end(&mut state);
        state.take("i-1", away());
        assert!(until(&state).unwrap() >= Instant::now() + FIRST_PAUSE / 2);
        end(&mut state);
        state.take("i-1", Ok(CloudInstance::default()));
        assert_eq!(until(&state), None);
    }
}
