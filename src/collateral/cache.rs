//! The cache: at most one fetch of an item runs, all callers share its result, and a valid item is returned at once.
//!
//! ```text
//! get ─► valid ──────────────────────────────► returned at once; renewed in the background after a day
//!    ─► absent or ended, and the caller does not wait ─► an error; obtained in the background
//!                       ─► somebody fetches it ─► wait for the result
//!                       ─► it failed just now ─► the same failure
//!                       ─► it is of a chip, and too many wait for chips ─► an error
//!                       ─► fetch it: store, then server, again after the pauses that the server demands
//! ```

use base::sync::{lock, wait_timeout};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use hardware::{Cause, Unavailable};

use crate::https::{FetchFailure, retried};
use crate::item::{Item, ItemContent, chip_of};
use crate::store::Store;

/// Maximum number of items in memory. A further item replaces another one.
const MAX_ITEMS: usize = 4096;
/// Maximum number of callers that wait for servers; a further one fails at once. Each is a thread of a service.
const MAX_WAITING: usize = 256;
/// Maximum number of callers that wait for certificates of chips. Strangers can name any chips, and must not occupy all threads of a service.
const MAX_WAITING_FOR_CHIPS: usize = 16;
/// Age in seconds after which an item that can change is fetched again.
const RENEWED_AFTER: u64 = 86_400;
/// Time limit of a fetch in the background.
const RENEWAL: Duration = Duration::from_secs(60);
/// Pause after a server did not know an item: the server learns of a new chip within days, not seconds.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(300);
/// Pause after an unusable answer.
const BAD_PAUSE: Duration = Duration::from_secs(60);
/// The shortest pause after a failure, so that all callers that waited for the fetch get its error.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);

/// Why a caller does not wait for the certificate of a chip.
const TOO_MANY: &str = "too many validations already wait for certificates of chips or authorities: try again in a second";

/// Gets an item from its server, in the form in which the store keeps it.
pub trait Origin: Send + Sync {
    /// Sends the requests that the item needs.
    fn fetch(&self, item: &Item, deadline: Instant) -> Result<Vec<u8>, FetchFailure>;
}

/// A cache. The threads of validations call it.
pub struct Cache {
    origin: Box<dyn Origin>,
    store: Box<dyn Store>,
    /// Returns the time in seconds since 1970.
    clock: fn() -> u64,
    state: Mutex<State>,
    changed: Condvar,
    /// Counts what happened since the start.
    pub counts: Counts,
}

/// The counters.
#[derive(Default)]
pub struct Counts {
    /// Items that were valid in memory.
    pub hits: AtomicU64,
    /// Items that came from the store.
    pub loaded: AtomicU64,
    /// Items that came from a server.
    pub fetched: AtomicU64,
    /// Fetches that failed.
    pub failed: AtomicU64,
}

/// Whether and how long a caller waits for an item.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Until the deadline.
    Full,
    /// Until the deadline, but not if the last fetch failed: then the next fetch runs in the background, and the caller goes on
    /// without the item.
    UntilFirstFailure,
    /// Not at all: an item that is not in memory is fetched in the background, for a later caller.
    None,
}

#[derive(Default)]
struct State {
    slots: HashMap<String, Slot>,
    uses: u64,
    waiting: usize,
    /// How many callers wait for certificates of chips.
    waiting_for_chips: usize,
}

#[derive(Default)]
struct Slot {
    entry: Option<Arc<CachedItem>>,
    /// The last fetch failed: why, and until when no other starts.
    failure: Option<(Unavailable, Instant)>,
    is_running: bool,
    last_use: u64,
}

/// A valid item.
#[derive(Debug)]
pub struct CachedItem {
    /// The content.
    pub content: ItemContent,
    /// The last second of its validity since 1970.
    until: u64,
    /// When its server sent it, in seconds since 1970.
    fetched: u64,
    is_renewed: bool,
    /// Whether it is in the store.
    is_kept: AtomicBool,
}

impl CachedItem {
    fn is_valid(&self, now: u64) -> bool {
        now <= self.until
    }

    fn is_due(&self, now: u64) -> bool {
        self.is_renewed && now >= self.fetched.saturating_add(RENEWED_AFTER)
    }
}

impl Slot {
    /// Returns the error of the last fetch, if its pause is not over.
    fn pause(&self) -> Option<&Unavailable> {
        let failure = self.failure.as_ref();
        failure
            .filter(|(_, until)| *until > Instant::now())
            .map(|(why, _)| why)
    }
}

impl Cache {
    /// Makes an empty cache.
    pub fn new(origin: Box<dyn Origin>, store: Box<dyn Store>, clock: fn() -> u64) -> Cache {
        Cache {
            origin,
            store,
            clock,
            state: Mutex::default(),
            changed: Condvar::new(),
            counts: Counts::default(),
        }
    }

    /// Returns an item.
    pub fn get(
        self: &Arc<Self>,
        item: &Item,
        patience: Patience,
        deadline: Instant,
    ) -> Result<Arc<CachedItem>, Unavailable> {
        let name = item.name();
        let mut state = self.state();
        loop {
            let now = (self.clock)();
            let slot = state.slot(&name);
            if let Some(entry) = slot.entry.clone().filter(|entry| entry.is_valid(now)) {
                count(&self.counts.hits);
                if entry.is_due(now) && !slot.is_running && slot.pause().is_none() {
                    slot.is_running = true;
                    drop(state);
                    self.in_background(item, name, true);
                }
                return Ok(entry);
            }
            if let Some(why) = slot.pause() {
                return Err(why.clone());
            }
            if patience == Patience::UntilFirstFailure
                && let Some((why, _)) = slot.failure.clone()
            {
                if !slot.is_running {
                    slot.is_running = true;
                    drop(state);
                    self.in_background(item, name, true);
                }
                return Err(why);
            }
            if patience == Patience::None {
                if !slot.is_running {
                    slot.is_running = true;
                    drop(state);
                    self.in_background(item, name, false);
                }
                let why = format!("{item} is not in the cache: it is being fetched");
                return Err(Cause::Pending.because(why));
            }
            let is_running = std::mem::replace(&mut slot.is_running, true);
            let left = deadline.saturating_duration_since(Instant::now());
            if is_running && left.is_zero() {
                let why = format!("{item} is still being fetched");
                return Err(Cause::Pending.because(why));
            }
            if state.waiting >= MAX_WAITING {
                state.slot(&name).is_running = is_running;
                let waiting = state.waiting;
                let why = format!("{item}: {waiting} validations already wait for servers");
                return Err(Cause::Limited.because(why));
            }
            let chips = usize::from(is_running && item.is_named_by_strangers());
            if chips > 0 && state.waiting_for_chips >= MAX_WAITING_FOR_CHIPS {
                return Err(Cause::Limited.because(format!("{item}: {TOO_MANY}")));
            }
            state.waiting += 1;
            if is_running {
                state.waiting_for_chips += chips;
                state = wait_timeout(&self.changed, state, left);
                state.waiting_for_chips -= chips;
            } else {
                drop(state);
                self.run(item, &name, false, deadline);
                state = self.state();
            }
            state.waiting -= 1;
        }
    }

    /// Returns an item that is valid in memory, and renews it in the background if it is due. Fetches nothing else, and keeps no
    /// entry for an unknown name: strangers can invent names.
    pub fn at_hand(self: &Arc<Self>, item: &Item) -> Option<Arc<CachedItem>> {
        let (name, now) = (item.name(), (self.clock)());
        let state = self.state();
        let entry = state.slots.get(&name)?.entry.as_ref();
        let is_valid = entry.is_some_and(|entry| entry.is_valid(now));
        drop(state);
        is_valid
            .then(|| self.get(item, Patience::None, Instant::now()).ok())
            .flatten()
    }

    /// Writes an item that is in memory to the store, if it is not there yet.
    pub fn keep(&self, item: &Item) {
        let state = self.state();
        let entry = state.slots.get(&item.name());
        let entry = entry.and_then(|slot| slot.entry.clone());
        drop(state);
        if let Some(entry) = entry
            && let ItemContent::Der(der) = &entry.content
            && !entry.is_kept.swap(true, Ordering::Relaxed)
        {
            self.store.save(item, der);
        }
    }

    /// Returns the age in seconds of the oldest valid item that can change; `None` without one.
    pub fn oldest(&self) -> Option<u64> {
        let now = (self.clock)();
        let state = self.state();
        let entries = state.slots.values().filter_map(|slot| slot.entry.as_ref());
        let valid = entries.filter(|entry| entry.is_renewed && entry.is_valid(now));
        valid.map(|entry| now.saturating_sub(entry.fetched)).max()
    }

    /// Obtains an item in the background. The caller has marked the item as running.
    fn in_background(self: &Arc<Self>, item: &Item, name: String, is_renewal: bool) {
        let (cache, item) = (self.clone(), item.clone());
        let running = name.clone();
        let work = move || cache.run(&item, &name, is_renewal, Instant::now() + RENEWAL);
        if let Err(error) = thread::Builder::new().name("collateral".into()).spawn(work) {
            log::warn!("cannot start the thread that fetches collateral: {error}");
            self.state().slot(&running).is_running = false;
        }
    }

    /// Obtains an item, and keeps the result in memory.
    fn run(&self, item: &Item, name: &str, is_renewal: bool, deadline: Instant) {
        // a panic must not leave the item as running for ever
        let _running = Running { cache: self, name };
        let obtained = self.obtain(item, is_renewal, deadline);
        let mut state = self.state();
        let slot = state.slot(name);
        match obtained {
            Ok(entry) => (slot.entry, slot.failure) = (Some(Arc::new(entry)), None),
            Err(failure) => {
                let now = Instant::now();
                let until = match &failure {
                    FetchFailure::Final(error) if error.cause == Cause::Unknown => {
                        now + UNKNOWN_PAUSE
                    }
                    FetchFailure::Final(_) => now + BAD_PAUSE,
                    FetchFailure::Later(_, until) | FetchFailure::Full(_, until) => {
                        (*until).max(now + SHORTEST_PAUSE)
                    }
                };
                let why = failure.error().clone();
                slot.failure = Some((why.about(format!("{item} is not available")), until));
            }
        }
        state.shrink();
    }

    fn obtain(
        &self,
        item: &Item,
        is_renewal: bool,
        deadline: Instant,
    ) -> Result<CachedItem, FetchFailure> {
        let now = (self.clock)();
        if let Some(kept) = self.load(item, now)
            && !(is_renewal && kept.is_due(now))
        {
            count(&self.counts.loaded);
            return Ok(kept);
        }
        let place = item.is_named_by_strangers().then(|| self.wait_for_chip());
        let place = place.transpose();
        let fetched =
            place.and_then(|_place| retried(deadline, || self.origin.fetch(item, deadline)));
        let fetched = fetched.and_then(|bytes| {
            let entry = self.entry(item, &bytes, now)?;
            if item.is_kept_at_once() {
                self.store.save(item, &bytes);
                entry.is_kept.store(true, Ordering::Relaxed);
            }
            Ok(entry)
        });
        match &fetched {
            Ok(_) => count(&self.counts.fetched),
            Err(failure) => {
                count(&self.counts.failed);
                log::warn!("{item} is not available: {}", failure.error());
            }
        }
        fetched
    }

    /// Takes one of the slots for callers that wait for certificates of chips. A certificate that is in the store needs no slot.
    fn wait_for_chip(&self) -> Result<WaitingForChip<'_>, FetchFailure> {
        let mut state = self.state();
        if state.waiting_for_chips >= MAX_WAITING_FOR_CHIPS {
            let error = Cause::Limited.because(TOO_MANY);
            return Err(FetchFailure::Full(error, Instant::now()));
        }
        state.waiting_for_chips += 1;
        Ok(WaitingForChip(self))
    }

    /// Returns the store's content, if it is the requested item.
    fn load(&self, item: &Item, now: u64) -> Option<CachedItem> {
        let stored = self.store.load(item)?;
        // a time in the future was written when the clock was wrong
        let fetched = stored.fetched.min(now);
        let entry = self.entry(item, &stored.bytes, fetched);
        match entry {
            Ok(entry) => {
                entry.is_kept.store(true, Ordering::Relaxed);
                Some(entry)
            }
            Err(why) => {
                log::warn!("the stored {item} is not usable: {why}");
                None
            }
        }
    }

    fn entry(&self, item: &Item, bytes: &[u8], fetched: u64) -> Result<CachedItem, Unavailable> {
        let (content, until) = item.read(bytes)?;
        let is_renewed = item.is_renewed();
        let entry = CachedItem {
            content,
            until,
            fetched,
            is_renewed,
            is_kept: AtomicBool::new(false),
        };
        if entry.is_valid((self.clock)()) {
            Ok(entry)
        } else {
            let end = std::time::UNIX_EPOCH + Duration::from_secs(until);
            let end = format!("it expired at {}", base::time::seconds(end));
            Err(Cause::Expired.because(end))
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// Returns the entry of an item, and marks it as the one that was used last.
    fn slot(&mut self, name: &str) -> &mut Slot {
        self.uses += 1;
        let slot = self.slots.entry(name.to_owned()).or_default();
        slot.last_use = self.uses;
        slot
    }

    /// Removes entries beyond [`MAX_ITEMS`]: first items that strangers can name. Of these, first those without a certificate or
    /// with one that is not verified yet; then those that were unused for the longest time.
    fn shrink(&mut self) {
        while self.slots.len() > MAX_ITEMS {
            let idle = self.slots.iter().filter(|(_, slot)| !slot.is_running);
            let first = idle.min_by_key(|(name, slot)| {
                let is_shared = chip_of(name).is_none();
                let entry = slot.entry.as_ref();
                let is_kept = entry.is_some_and(|entry| entry.is_kept.load(Ordering::Relaxed));
                (is_shared, is_kept, slot.last_use)
            });
            let Some(name) = first.map(|(name, _)| name.clone()) else {
                return;
            };
            self.slots.remove(&name);
        }
    }
}

/// One of the slots for callers that wait for certificates of chips, until it is dropped.
struct WaitingForChip<'a>(&'a Cache);

impl Drop for WaitingForChip<'_> {
    fn drop(&mut self) {
        self.0.state().waiting_for_chips -= 1;
    }
}

/// When dropped, marks an item as not running and wakes the callers that wait for it.
struct Running<'a> {
    cache: &'a Cache,
    name: &'a str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.cache.state().slots.get_mut(self.name) {
            slot.is_running = false;
        }
        self.cache.changed.notify_all();
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_take_the_places_of_chips_only() {
        let mut state = State::default();
        let chip = |number: usize| format!("vcek-milan-{number:0128x}-0.0.0.0.0.der");
        state.slot("vcek-milan.crl");
        for number in 0..MAX_ITEMS + 10 {
            state.slot(&chip(number));
        }
        state.shrink();
        assert_eq!(state.slots.len(), MAX_ITEMS);
        assert!(state.slots.contains_key("vcek-milan.crl"));
        assert!(!state.slots.contains_key(&chip(10)));
        assert!(state.slots.contains_key(&chip(11)));
    }
}
