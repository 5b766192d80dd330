//! One replica works: it holds a Lease. No clocks of two machines are compared: a replica takes the
//! Lease over if it has seen no change of it for the Lease's duration, by its own clock. The holder stops
//! before that, counted from the moment at which it began its last renewal.
//!
//! ```text
//! holder:  renews the Lease ── after `hold` without a renewal: stops its work
//! others:  see the renewal ─────── after `duration` without another one: one of them takes the Lease
//! ```

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, LEASES, Object};
use kubernetes::objects::Lease;

/// The name of the Lease.
pub use kubernetes::services::WATCH as NAME;

/// The times of an election.
#[derive(Debug, Clone, Copy)]
pub struct ElectionTimes {
    /// How often the Lease is renewed, or looked at.
    pub renew: Duration,
    /// How long a renewal lets the holder work. Longer than `renew`.
    pub hold: Duration,
    /// How long the others wait for a renewal. Longer than `hold` by the time that a write may take.
    pub duration: Duration,
}

impl Default for ElectionTimes {
    fn default() -> ElectionTimes {
        ElectionTimes {
            renew: Duration::from_secs(5),
            hold: Duration::from_secs(20),
            duration: Duration::from_secs(30),
        }
    }
}

/// The part of the Lease that matters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Turn {
    holder: String,
    renewed: String,
    acquired: String,
    transitions: i64,
}

impl Turn {
    /// Reads the object. A field that is missing is empty.
    pub fn read(lease: Lease) -> Turn {
        Turn {
            holder: lease.spec.holder_identity,
            renewed: lease.spec.renew_time,
            acquired: lease.spec.acquire_time,
            transitions: lease.spec.lease_transitions,
        }
    }

    /// Returns the fields of the object.
    fn patch(&self, duration: Duration) -> Value {
        let time = |text: &str| match text {
            "" => Value::Null,
            text => text.into(),
        };
        json!({"spec": {
            "holderIdentity": self.holder, "leaseDurationSeconds": duration.as_secs().max(1),
            "acquireTime": time(&self.acquired), "renewTime": time(&self.renewed),
            "leaseTransitions": self.transitions,
        }})
    }
}

/// The view of one replica.
pub struct Election {
    identity: String,
    times: ElectionTimes,
    /// The Lease as it was seen last, and since when it has been so.
    seen: Option<(Turn, Instant)>,
    /// Until when this replica may work.
    until: Option<Instant>,
    /// Whether this replica takes no part any more.
    has_left: bool,
}

impl Election {
    /// Begins without a leader that is known.
    pub fn new(identity: String, times: ElectionTimes) -> Election {
        Election {
            identity,
            times,
            seen: None,
            until: None,
            has_left: false,
        }
    }

    /// Returns until when this replica may work; `None` if it may not.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Returns the Lease that this replica writes now; `None` if another one leads.
    fn decide(&mut self, found: &Turn, now: Instant, clock: SystemTime) -> Option<Turn> {
        if self.seen.as_ref().is_none_or(|(seen, _)| seen != found) {
            self.seen = Some((found.clone(), now));
        }
        let is_own = found.holder == self.identity;
        let since = self.seen.as_ref().map_or(now, |(_, since)| *since);
        let is_free = found.holder.is_empty() || now.duration_since(since) >= self.times.duration;
        if !is_own && !is_free {
            self.until = None;
            return None;
        }
        let renewed = time::micros(clock);
        Some(Turn {
            holder: self.identity.clone(),
            acquired: if is_own {
                found.acquired.clone()
            } else {
                renewed.clone()
            },
            transitions: found.transitions + i64::from(!is_own),
            renewed,
        })
    }

    /// Notes a Lease that this replica wrote by a request that began at `began`.
    fn wrote(&mut self, lease: Turn, began: Instant) {
        self.seen = Some((lease, began));
        self.until = Some(began + self.times.hold);
    }

    /// Renews the Lease, takes it, or looks at it. After an error this replica works on only until its
    /// last renewal ends.
    pub fn step(&mut self, client: &Client) -> Result<(), client::Error> {
        if self.has_left {
            return Ok(());
        }
        let (lease, whole) = client.find_whole(&object())?.unzip();
        let began = Instant::now();
        let lease = lease.map(Turn::read).unwrap_or_default();
        let Some(own) = self.decide(&lease, began, SystemTime::now()) else {
            return Ok(());
        };
        match client.write(&object(), whole, own.patch(self.times.duration)) {
            Ok(_) => self.wrote(own, began),
            // another replica was faster: the next step sees it
            Err(error) if error.is_conflict() || error.is_already_exists() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Leaves the election, and gives the Lease back, so that another replica need not wait.
    pub fn release(&mut self, client: &Client) {
        self.has_left = true;
        if self.until.take().is_none() {
            return;
        }
        let released = client.modify_as(&object(), |lease, _| {
            let lease = Turn::read(lease);
            let is_own = lease.holder == self.identity;
            let free = Turn {
                holder: String::new(),
                ..lease
            };
            is_own.then(|| free.patch(self.times.duration))
        });
        if let Err(error) = released {
            log::debug!("cannot release the Lease {NAME}: {error}");
        }
    }
}

fn object() -> Object {
    LEASES.in_namespace(NAMESPACE).named(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(holder: &str, renewed: &str) -> Turn {
        Turn {
            holder: holder.into(),
            renewed: renewed.into(),
            acquired: "a".into(),
            transitions: 3,
        }
    }

    fn election() -> Election {
        Election::new("own".into(), ElectionTimes::default())
    }

    #[test]
    fn a_lease_comes_back_as_it_was_written() {
        let lease = lease("own", "b");
        let fields = lease.patch(SECOND * 30);
        assert_eq!(fields["spec"]["leaseDurationSeconds"], 30);
        assert_eq!(Turn::read(serde_json::from_value(fields).unwrap()), lease);
        let empty = Turn::default();
        assert_eq!(empty.patch(SECOND)["spec"]["renewTime"], Value::Null);
        assert_eq!(Turn::read(Lease::default()), empty);
    }

    #[test]
    fn a_free_lease_is_taken_and_an_own_one_renewed() {
        let (mut election, now) = (election(), Instant::now());
        let clock = SystemTime::UNIX_EPOCH;
        let taken = election.decide(&lease("", "x"), now, clock).unwrap();
        assert_eq!((&*taken.holder, taken.transitions), ("own", 4));
        assert_eq!(taken.acquired, "1970-01-01T00:00:00.000000Z");
        election.wrote(taken.clone(), now);
        assert_eq!(election.until(), Some(now + 20 * SECOND));
        let later = election.decide(&taken, now + 5 * SECOND, clock + 5 * SECOND);
        let later = later.unwrap();
        assert_eq!((&later.acquired, later.transitions), (&taken.acquired, 4));
        assert_ne!(later.renewed, taken.renewed);
    }

    #[test]
    fn a_lease_is_taken_over_when_it_was_not_renewed_for_its_duration_by_the_own_clock() {
        let (mut election, now) = (election(), Instant::now());
        // the clock of the holder has no meaning
        for clock in [SystemTime::UNIX_EPOCH, SystemTime::now()] {
            election.seen = None;
            let mut decide = |seconds: u32, renewed: &str| {
                let found = lease("other", renewed);
                let decided = election.decide(&found, now + seconds * SECOND, clock);
                decided.is_some()
            };
            assert!(!decide(0, "1970-01-01T00:00:01.000000Z"));
            assert!(!decide(29, "1970-01-01T00:00:01.000000Z"));
            // it was renewed meanwhile
            assert!(!decide(31, "1970-01-01T00:00:02.000000Z"));
            assert!(!decide(60, "1970-01-01T00:00:02.000000Z"));
            assert!(decide(61, "1970-01-01T00:00:02.000000Z"));
        }
    }

    #[test]
    fn a_replica_stops_before_another_one_may_take_over() {
        let (mut election, now) = (election(), Instant::now());
        election.wrote(lease("own", "x"), now);
        // no renewal succeeds: others see the Lease at `now` at the earliest
        let until = election.until().unwrap();
        assert!(until + super::super::TIMEOUT < now + ElectionTimes::default().duration);
        // another replica has it
        assert_eq!(
            election.decide(&lease("other", "y"), now, SystemTime::now()),
            None
        );
        assert_eq!(election.until(), None);
    }
}
