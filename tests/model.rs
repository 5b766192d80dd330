//! The race for the node under the interleavings of its threads (loom): InitServer and JoinClient start together, one wins,
//! the other is stopped and joined, whatever the timing of requests, tickets, a TPM that fails, and a stop of the node.
//!
//! The modules are the program's own, compiled with loom's locks. The code around them imitates InitServer and JoinClient. Time
//! does not pass: a pause ends by a stop or, if the model says so, at once. A thread that no other thread wakes is a deadlock for
//! loom, and so a failure.

use std::num::NonZero;
use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use loom::thread;
use plain::crypto;

// The included modules use these names; only the thread-free parts are those of the crate `base`.
extern crate base as plain;
extern crate self as attest;
extern crate self as base;
extern crate self as tpm;

/// The `base::sync` of the included modules.
mod sync {
    use std::time::Duration;

    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    pub use std::sync::Arc;

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    pub fn wait_timeout<'a, T>(
        changed: &Condvar,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> MutexGuard<'a, T> {
        changed.wait_timeout(guard, time).unwrap().0
    }
}

/// The crate `tpm` of the included modules: a TPM that counts its calls, and may fail during one.
mod fake_tpm {
    use std::fmt;
    // it is only used under the lock, so loom does not have to model it
    use std::sync::{Arc, Mutex};

    #[derive(Clone)]
    pub struct Location {
        pub extended: Arc<Mutex<Vec<Vec<u8>>>>,
        pub fails: bool,
    }

    #[derive(Debug)]
    pub struct Error;

    impl fmt::Display for Error {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the TPM failed")
        }
    }
}

pub use fake_tpm::{Error, Location};

/// Measures into that TPM. systemd's log has nothing about PCR 15.
mod measured {
    use super::{Error, Location};

    pub fn mark(location: &Location, id: &[u8]) -> Result<(), Error> {
        location.extended.lock().unwrap().push(id.to_vec());
        if location.fails { Err(Error) } else { Ok(()) }
    }

    pub fn foreign_writer(_: &Location) -> Option<String> {
        None
    }
}

pub use measured::{foreign_writer, mark};

#[allow(dead_code)]
#[path = "../src/bootstrapper/lock/node_lock.rs"]
mod node_lock;
#[allow(dead_code)] // the model uses fewer functions than the node
#[path = "../src/bootstrapper/lock/race.rs"]
mod race;
#[allow(dead_code, unused_imports)]
#[path = "../src/base/stop.rs"]
mod stop;

use node_lock::{Locking, NodeLock};
use race::{Entrant, Race};
use stop::Stop;
use sync::{Arc, Mutex};

/// Clusters; each ID is this byte repeated.
const OPERATORS: u8 = 1;
const ANOTHERS: u8 = 2;
const JOINED: u8 = 3;
/// Longer than every wait of the model.
const LONG: Duration = Duration::from_secs(1_000_000);

/// How an entrant's attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It took the lock and set the node up.
    Won,
    /// Another entrant has the lock.
    Lost,
    /// The TPM failed.
    Broken,
    /// It was stopped before it reached the lock.
    Stopped,
}

fn take(entrant: &Entrant, cluster: u8) -> End {
    let end = match entrant.lock([cluster; crypto::CLUSTER_ID_LEN]) {
        Some(Locking::Taken) => End::Won,
        Some(Locking::Already(_)) => End::Lost,
        Some(Locking::Failed(_)) => End::Broken,
        None => End::Stopped,
    };
    if end == End::Won {
        assert!(entrant.has_won());
    }
    end
}

/// The events around the race.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    /// The clusters of the requests to the InitServer, each on its own thread.
    requests: &'static [u8],
    /// The try at which the JoinClient gets a ticket; 0 for never.
    ticket_at: usize,
    /// Number of join services that it asks at once.
    services: usize,
    tpm_fails: bool,
    /// Whether the node is stopped, at any time.
    is_stopped: bool,
}

/// Runs the InitServer: its handlers take the lock; it waits until one of them has won or it is stopped, and joins them.
fn init_server(entrant: Entrant, requests: &'static [u8]) -> Vec<End> {
    let entrant = Arc::new(entrant);
    let handlers: Vec<_> = requests
        .iter()
        .map(|cluster| {
            let entrant = entrant.clone();
            thread::spawn(move || {
                let end = take(&entrant, *cluster);
                if matches!(end, End::Won | End::Broken) {
                    // the set-up is over: the server's own wait ends
                    entrant.stop().stop();
                }
                end
            })
        })
        .collect();
    entrant.stop().wait(LONG);
    handlers
        .into_iter()
        .map(|handler| handler.join().unwrap())
        .collect()
}

/// Runs the JoinClient: one thread for each service asks until there is a ticket or all are stopped; the first ticket counts.
fn join_client(entrant: &Entrant, ticket_at: usize, services: usize) -> End {
    let (over, has_ticket) = (Stop::new(), Arc::new(Mutex::new(false)));
    let on_stop = over.clone();
    let _stopped = entrant.stop().on_stop(move || on_stop.stop());
    let threads: Vec<_> = (1..services)
        .map(|_| {
            let (over, has_ticket) = (over.clone(), has_ticket.clone());
            thread::spawn(move || ask(ticket_at, &over, &has_ticket))
        })
        .collect();
    ask(ticket_at, &over, &has_ticket);
    for thread in threads {
        thread.join().unwrap();
    }
    let has_ticket = *has_ticket.lock().unwrap();
    if has_ticket {
        take(entrant, JOINED)
    } else {
        End::Stopped
    }
}

fn ask(ticket_at: usize, over: &Stop, has_ticket: &Mutex<bool>) {
    for attempt in 1..=ticket_at {
        if over.is_stopped() {
            return;
        }
        if attempt == ticket_at {
            let mut has_ticket = has_ticket.lock().unwrap();
            if !*has_ticket && !over.is_stopped() {
                *has_ticket = true;
                drop(has_ticket);
                over.stop();
            }
            return;
        }
    }
    // no service gives a ticket: it waits for the next try, again and again
    over.wait(LONG);
}

fn run(scenario: Scenario) {
    let tpm = Location {
        extended: Arc::default(),
        fails: scenario.tpm_fails,
    };
    let race = Race::new(NodeLock::new(tpm.clone()));
    let joining = thread::spawn({
        let entrant = race.enter();
        move || join_client(&entrant, scenario.ticket_at, scenario.services)
    });
    let stopping = scenario.is_stopped.then(|| {
        let race = race.clone();
        let extended = tpm.extended.clone();
        thread::spawn(move || {
            race.stop();
            let count = extended.lock().unwrap().len();
            move || count
        })
    });
    let mut ends = init_server(race.enter(), scenario.requests);
    // the winner or the stop has stopped it, so it can be joined
    let joined = joining.join().unwrap();
    ends.push(joined);

    let extended = tpm.extended.lock().unwrap().clone();
    let count = |end| ends.iter().filter(|it| **it == end).count();
    assert!(
        extended.len() <= 1,
        "PCR 15 is extended once at most: {scenario:?} {ends:?}"
    );
    if scenario.tpm_fails {
        assert_eq!(
            (count(End::Won), count(End::Lost)),
            (0, 0),
            "{scenario:?} {ends:?}"
        )
    } else {
        assert_eq!(
            (count(End::Won), count(End::Broken)),
            (extended.len(), 0),
            "{scenario:?} {ends:?}"
        )
    }
    if !scenario.is_stopped {
        assert_eq!(
            extended.len(),
            1,
            "somebody came to the lock: {scenario:?} {ends:?}"
        );
    }
    if let Some(stopping) = stopping {
        let at_stop = stopping.join().unwrap()();
        assert_eq!(
            at_stop,
            extended.len(),
            "nobody takes the lock after the stop: {scenario:?} {ends:?}"
        );
    }
    // a later entrant is refused
    let late = race.enter();
    assert!(late.stop().is_stopped());
    assert_ne!(take(&late, OPERATORS), End::Won);
}

fn main() {
    // each scenario takes one processor
    let scenarios = StdMutex::new(scenarios().into_iter());
    let threads = available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = scenarios.lock().unwrap().next();
                    let Some(scenario) = next else { return };
                    explore(scenario);
                }
            });
        }
    });
}

fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    // requests of no operator, of one, of two; a ticket at once, after a pause, never
    for requests in [&[][..], &[OPERATORS], &[OPERATORS, ANOTHERS]] {
        for ticket_at in [0, 1, 2] {
            for (tpm_fails, is_stopped) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                // without one of them the race would never end, as on a fresh node that gets neither an init nor a ticket
                if requests.is_empty() && ticket_at == 0 && !is_stopped {
                    continue;
                }
                all.push(Scenario {
                    requests,
                    ticket_at,
                    services: 1,
                    tpm_fails,
                    is_stopped,
                });
            }
        }
    }
    // two join services have a ticket, each at any time; loom runs five threads at most
    for (requests, is_stopped) in [(&[][..], false), (&[OPERATORS], false), (&[], true)] {
        for tpm_fails in [false, true] {
            all.push(Scenario {
                requests,
                ticket_at: 1,
                services: 2,
                tpm_fails,
                is_stopped,
            });
        }
    }
    all
}

fn explore(scenario: Scenario) {
    let (started, runs) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let mut model = loom::model::Builder::new();
    model.max_branches = 100_000;
    // with three threads all interleavings, up to six thousand; with more threads there are millions: those with two preemptions,
    // where nearly all defects of this kind show themselves (Musuvathi, Qadeer: Iterative Context Bounding, PLDI 2007)
    let threads =
        1 + scenario.services + scenario.requests.len() + usize::from(scenario.is_stopped);
    model.preemption_bound = (threads > 3).then_some(2);
    let counted = runs.clone();
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        run(scenario);
    });
    println!(
        "{:>8} interleavings in {:.1?}: {scenario:?}",
        runs.load(Ordering::Relaxed),
        started.elapsed()
    );
}
