//! When more callers ask than the service can serve at once: some wait in a queue, and each of the others
//! is told when its turn comes, by the rate at which tickets were issued. A caller that is told too early
//! proves its machine again for nothing, which costs this service as much as a ticket.
//!
//! ```text
//!   connection ─► handshake ─► call ─► a slot is free ─► Slot ─► the time of its ticket goes into the rate
//!       │                                ├─ none: it waits in the queue for one, first come, first served
//!       │                                └─ the queue is full: its turn is one ticket's time after that of the last such caller
//!       └─ too many connections: its turn is one ticket's time after the last turn of all
//! ```
//!
//! The queue is for a burst, and for callers that come somewhat before their turn: to wait costs less than
//! to come again.
//!
//! The connections that are closed before their handshake have a queue of their own behind that of
//! the callers who have proven themselves. So no number of such connections delays a proven caller.

use std::sync::Mutex;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use base::sync::lock;

/// Maximum number of tickets that are issued at once.
const SLOTS: usize = 64;
/// Maximum number of callers that wait for a slot.
const QUEUE: usize = 64;
/// Maximum number of calls that are here at once. The server's own limit of calls is higher, so that
/// this one refuses.
pub const CALLERS: usize = SLOTS + QUEUE;
/// The longest time that a caller waits for a slot: several times as long as the tickets of all slots take.
const MAX_WAIT: Duration = Duration::from_secs(3);
/// The time of a ticket at first, while all slots are taken: with a service, an API server and etcd on
/// two cores (docs/benchmarks.md, "The storm").
const FIRST_GUESS: Duration = Duration::from_millis(6);
/// The part that the latest ticket has in the mean time of a ticket.
const WEIGHT: f64 = 0.05;
/// A caller is told at least and at most this time. With the maximum, a caller comes again although
/// it will be refused: it may find another service sooner.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(120);
/// The same for a connection that is closed before its handshake, while a slot is free and no proven
/// caller was refused for [`CALM`]: the connections may be those of an attacker. A node waits this long
/// without being told, too.
const LONGEST_CALM: Duration = Duration::from_secs(30);
const CALM: Duration = Duration::from_secs(10);
/// The part of a ticket's time between two turns: nodes come somewhat later than they are told, and
/// a slot that is free at a turn is lost.
const SPACING: f64 = 0.85;

/// The callers of one method.
#[derive(Default)]
pub struct AdmissionQueue(Mutex<State>);

#[derive(Default)]
struct State {
    /// The number of slots that are not free.
    taken: usize,
    /// The callers that wait for a slot, in their order, each with a number of its own. A caller that is
    /// no longer here has a slot.
    queue: Vec<(u64, Thread)>,
    last_number: u64,
    /// The mean time between the ends of two tickets while at least half of the slots are taken.
    mean: Option<f64>,
    last_end: Option<Instant>,
    /// When the last caller was refused, and its turn.
    refused: Option<(Instant, Instant)>,
    /// The turn of the last connection that was closed before its handshake.
    turned_away: Option<Instant>,
}

impl AdmissionQueue {
    /// Takes a slot, and waits for one if the queue is not full. Errors with the time after which the
    /// caller should ask again.
    pub fn enter(&self) -> Result<QueueSlot<'_>, Duration> {
        self.enter_within(MAX_WAIT)
    }

    fn enter_within(&self, time: Duration) -> Result<QueueSlot<'_>, Duration> {
        let end = Instant::now() + time;
        let mut state = lock(&self.0);
        if state.taken < SLOTS {
            state.taken += 1;
            return Ok(QueueSlot::of(self));
        }
        if state.queue.len() == QUEUE {
            return Err(state.refuse(Instant::now()));
        }
        state.last_number += 1;
        let number = state.last_number;
        state.queue.push((number, thread::current()));
        loop {
            drop(state);
            thread::park_timeout(end.saturating_duration_since(Instant::now()));
            state = lock(&self.0);
            let Some(at) = state.queue.iter().position(|(other, _)| *other == number) else {
                return Ok(QueueSlot::of(self));
            };
            let now = Instant::now();
            if end <= now {
                state.queue.remove(at);
                return Err(state.refuse(now));
            }
        }
    }

    /// Returns the time after which the peer of a connection should come again that is closed before
    /// its handshake.
    pub fn turn_away(&self, now: Instant) -> Duration {
        let mut state = lock(&self.0);
        let is_calm = |(at, _)| now.saturating_duration_since(at) > CALM;
        let has_slot = state.taken < SLOTS;
        let longest = if has_slot && state.refused.is_none_or(is_calm) {
            LONGEST_CALM
        } else {
            LONGEST
        };
        let last = state.turned_away.max(state.refused.map(|(_, turn)| turn));
        let turn = state.turn_after(last, now, longest);
        state.turned_away = Some(turn);
        turn - now
    }

    /// Gives a slot to the first caller in the queue, or frees it. `is_ticket`: whether it ends with a
    /// ticket.
    fn leave(&self, is_ticket: bool, now: Instant) {
        let mut state = lock(&self.0);
        if is_ticket {
            state.count(now);
        }
        if state.queue.is_empty() {
            state.taken -= 1
        } else {
            state.queue.remove(0).1.unpark()
        }
    }
}

impl State {
    /// Counts the time since the last ticket into the mean.
    fn count(&mut self, now: Instant) {
        let last_end = self.last_end.replace(now);
        // the times between two tickets say nothing while nobody waits
        if self.taken > SLOTS / 2
            && let Some(last_end) = last_end
        {
            let took = now.saturating_duration_since(last_end).as_secs_f64();
            let mean = self.mean.unwrap_or(FIRST_GUESS.as_secs_f64());
            self.mean = Some(mean + WEIGHT * (took.min(1.0) - mean));
        }
    }

    /// Returns the time after which a proven caller should come again.
    fn refuse(&mut self, now: Instant) -> Duration {
        let turn = self.turn_after(self.refused.map(|(_, turn)| turn), now, LONGEST);
        self.refused = Some((now, turn));
        turn - now
    }

    fn turn_after(&self, last: Option<Instant>, now: Instant, longest: Duration) -> Instant {
        let ticket = self.mean.map_or(FIRST_GUESS, Duration::from_secs_f64);
        let turn = last.map_or(now, |last| last + ticket.mul_f64(SPACING));
        turn.clamp(now + SHORTEST, now + longest)
    }
}

/// A slot, until this is dropped.
pub struct QueueSlot<'a> {
    queue: &'a AdmissionQueue,
    is_ticket: bool,
}

impl<'a> QueueSlot<'a> {
    fn of(queue: &'a AdmissionQueue) -> QueueSlot<'a> {
        QueueSlot {
            queue,
            is_ticket: false,
        }
    }

    /// Lets the time of this slot's ticket go into the rate. A refusal takes no time and says nothing of it.
    pub fn ticket_issued(&mut self) {
        self.is_ticket = true;
    }
}

impl Drop for QueueSlot<'_> {
    fn drop(&mut self) {
        self.queue.leave(self.is_ticket, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::mem::forget;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Fills all slots, and lets tickets end one after the other, each taking this time.
    fn busy(ticket: Duration, tickets: usize) -> (AdmissionQueue, Instant) {
        let queue = full();
        let mut now = Instant::now();
        for _ in 0..tickets {
            now += ticket;
            queue.leave(true, now);
            forget(queue.enter());
        }
        (queue, now)
    }

    /// All slots are taken.
    fn full() -> AdmissionQueue {
        let queue = AdmissionQueue::default();
        (0..SLOTS).for_each(|_| forget(queue.enter()));
        queue
    }

    fn refuse(queue: &AdmissionQueue, now: Instant) -> Duration {
        lock(&queue.0).refuse(now)
    }

    #[test]
    fn as_many_as_there_are_slots_enter_and_a_slot_is_free_again_after_its_ticket() {
        let queue = AdmissionQueue::default();
        let slots: Vec<_> = (0..SLOTS).map(|_| queue.enter()).collect();
        assert!(slots.iter().all(Result::is_ok));
        let none = Duration::ZERO;
        assert_eq!(queue.enter_within(none).err(), Some(SHORTEST));
        drop(slots);
        assert!(queue.enter_within(none).is_ok());
        assert_eq!(lock(&queue.0).taken, 0);
    }

    #[test]
    fn a_slot_passes_to_the_first_caller_in_the_queue_before_one_that_comes_later() {
        let queue = full();
        let long = Duration::from_secs(20);
        thread::scope(|scope| {
            let (entered, entries) = mpsc::channel();
            let arrive = |number: usize| {
                let (queue, entered) = (&queue, entered.clone());
                scope.spawn(move || {
                    forget(queue.enter_within(long));
                    entered.send(number).unwrap();
                });
                while lock(&queue.0).last_number < number as u64 {
                    thread::yield_now();
                }
            };
            (1..=QUEUE).for_each(arrive);
            assert!(queue.enter_within(long).is_err());
            // a wake-up that has no reason changes nothing
            lock(&queue.0).queue[0].1.unpark();
            for number in 1..=QUEUE {
                queue.leave(true, Instant::now());
                // one that comes in this moment waits behind all others
                arrive(QUEUE + number);
                assert_eq!(entries.recv(), Ok(number));
                let state = lock(&queue.0);
                assert_eq!((state.taken, state.queue.len()), (SLOTS, QUEUE));
            }
            for number in 1..=QUEUE {
                queue.leave(true, Instant::now());
                assert_eq!(entries.recv(), Ok(QUEUE + number));
            }
            assert_eq!(lock(&queue.0).taken, SLOTS);
            queue.leave(true, Instant::now());
            assert_eq!(lock(&queue.0).taken, SLOTS - 1);
        });
    }

    #[test]
    fn a_caller_that_waits_in_vain_is_told_its_turn_and_leaves_the_queue() {
        let queue = full();
        let told = queue.enter_within(Duration::from_millis(10)).err();
        assert_eq!(told, Some(SHORTEST));
        let state = lock(&queue.0);
        assert_eq!((state.taken, state.queue.len()), (SLOTS, 0));
    }

    #[test]
    fn only_tickets_count_for_the_rate() {
        let (queue, _) = busy(Duration::from_millis(50), 500);
        let mean = || lock(&queue.0).mean;
        let before = mean();
        drop(QueueSlot::of(&queue));
        assert_eq!(mean(), before);
        let mut slot = QueueSlot::of(&queue);
        slot.ticket_issued();
        drop(slot);
        assert_ne!(mean(), before);
    }

    #[test]
    fn the_refused_get_turns_one_after_the_other_at_the_rate_of_the_tickets() {
        for ticket in [Duration::from_millis(4), Duration::from_millis(50)] {
            let (queue, now) = busy(ticket, 500);
            let told: Vec<Duration> = (0..1000).map(|_| refuse(&queue, now)).collect();
            assert_eq!(told[0], SHORTEST);
            let spacing = ticket.mul_f64(SPACING);
            let wanted = SHORTEST + 999 * spacing;
            let range = wanted.mul_f64(0.99)..wanted.mul_f64(1.01);
            assert!(range.contains(&told[999]), "{:?} of {wanted:?}", told[999]);
            // half of them later, the queue is half as long
            let later = now + SHORTEST + 500 * spacing;
            let last = refuse(&queue, later);
            let wanted = 500 * spacing;
            let range = wanted.mul_f64(0.95).max(SHORTEST)..=wanted.mul_f64(1.05).max(SHORTEST);
            assert!(range.contains(&last), "{last:?} of {wanted:?}");
        }
    }

    #[test]
    fn connections_without_a_handshake_come_after_the_proven_callers_and_do_not_delay_them() {
        let ticket = Duration::from_millis(50);
        let (queue, now) = busy(ticket, 500);
        (0..100).for_each(|_| _ = refuse(&queue, now));
        let told: Vec<Duration> = (0..100).map(|_| queue.turn_away(now)).collect();
        assert!(told.is_sorted() && told[0] > SHORTEST + 99 * ticket.mul_f64(0.8));
        (0..100_000).for_each(|_| _ = queue.turn_away(now));
        assert_eq!(queue.turn_away(now), LONGEST);
        let proven = refuse(&queue, now);
        assert!(proven < told[1], "{proven:?}");
    }

    #[test]
    fn many_connections_make_nobody_wait_for_long_while_a_slot_is_free() {
        let (queue, now) = (AdmissionQueue::default(), Instant::now());
        (0..100_000).for_each(|_| _ = queue.turn_away(now));
        assert_eq!(queue.turn_away(now), LONGEST_CALM);
        // all slots are taken, by callers that have proven themselves
        (0..SLOTS).for_each(|_| forget(queue.enter()));
        (0..100_000).for_each(|_| _ = queue.turn_away(now));
        assert_eq!(queue.turn_away(now), LONGEST);
        assert_eq!(refuse(&queue, now), SHORTEST);
        queue.leave(true, now);
        assert_eq!(queue.turn_away(now), LONGEST);
        let later = now + 2 * CALM;
        assert_eq!(queue.turn_away(later), LONGEST_CALM);
    }

    #[test]
    fn nobody_is_told_to_wait_for_ever_and_a_quiet_time_does_not_slow_the_rate() {
        let (queue, now) = busy(Duration::from_secs(3), 500);
        let told: Vec<Duration> = (0..1000).map(|_| refuse(&queue, now)).collect();
        assert_eq!(told[999], LONGEST);
        let (queue, mut now) = busy(Duration::from_millis(4), 500);
        (0..SLOTS).for_each(|_| queue.leave(true, now));
        for _ in 0..100 {
            now += Duration::from_secs(5);
            forget(queue.enter());
            queue.leave(true, now);
        }
        let mean = lock(&queue.0).mean.unwrap();
        assert!(mean < 0.005, "{mean}");
    }
}
