//! When more callers ask than the service can serve at once: each of the others is told when its turn
//! comes, by the rate at which tickets were issued. A caller that is told too early proves its machine
//! again for nothing, which costs this service as much as a ticket.
//!
//! ```text
//!   connection ─► handshake ─► call ─► a place is free ─► Admitted ─► its time goes into the rate
//!       │                                └─ none: its turn is one ticket's time after that of the last such caller
//!       └─ too many connections: its turn is one ticket's time after the last turn of all
//! ```
//!
//! The connections that are closed before their handshake have a queue of their own behind that of
//! the callers who have proven themselves. So no number of such connections delays a proven caller.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::sync::lock;

/// Maximum number of tickets that are issued at once. The server's own limit of calls is higher, so
/// that this one refuses.
pub const PLACES: usize = 64;
/// The time of a ticket at first, while all places are taken: an API server on one core.
const FIRST_GUESS: Duration = Duration::from_millis(10);
/// The part that the latest ticket has in the mean time of a ticket.
const WEIGHT: f64 = 0.05;
/// A caller is told at least and at most this time. With the maximum, a caller comes again although
/// it will be refused: it may find another service sooner.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(120);
/// The same for a connection that is closed before its handshake, while no proven caller was refused
/// for [`CALM`]: the connections may be those of an attacker. A node waits this long without being
/// told, too.
const LONGEST_CALM: Duration = Duration::from_secs(30);
const CALM: Duration = Duration::from_secs(10);
/// The part of a ticket's time between two turns: nodes come somewhat later than they are told, and
/// a place that is free at a turn is lost.
const SPACING: f64 = 0.85;

/// The callers of one method.
#[derive(Default)]
pub struct Rush(Mutex<State>);

#[derive(Default)]
struct State {
    taken: usize,
    /// The mean time between the ends of two tickets while at least half of the places are taken.
    mean: Option<f64>,
    last_end: Option<Instant>,
    /// When the last caller was refused, and its turn.
    refused: Option<(Instant, Instant)>,
    /// The turn of the last connection that was closed before its handshake.
    turned_away: Option<Instant>,
}

impl Rush {
    /// Takes a place. If none is free, errors with the time after which the caller should ask again.
    pub fn enter(&self, now: Instant) -> Result<Admitted<'_>, Duration> {
        let mut state = lock(&self.0);
        if state.taken < PLACES {
            state.taken += 1;
            return Ok(Admitted(self));
        }
        let turn = state.turn_after(state.refused.map(|(_, turn)| turn), now, LONGEST);
        state.refused = Some((now, turn));
        Err(turn - now)
    }

    /// Returns the time after which the peer of a connection should come again that is closed before
    /// its handshake.
    pub fn turn_away(&self, now: Instant) -> Duration {
        let mut state = lock(&self.0);
        let is_calm = |(at, _)| now.saturating_duration_since(at) > CALM;
        let longest = match state.refused.is_none_or(is_calm) {
            true => LONGEST_CALM,
            false => LONGEST,
        };
        let last = state.turned_away.max(state.refused.map(|(_, turn)| turn));
        let turn = state.turn_after(last, now, longest);
        state.turned_away = Some(turn);
        turn - now
    }

    fn leave(&self, now: Instant) {
        let mut state = lock(&self.0);
        let last_end = state.last_end.replace(now);
        // the times between two tickets say nothing while nobody waits
        if state.taken > PLACES / 2
            && let Some(last_end) = last_end
        {
            let took = now.saturating_duration_since(last_end).as_secs_f64();
            let mean = state.mean.unwrap_or(FIRST_GUESS.as_secs_f64());
            state.mean = Some(mean + WEIGHT * (took.min(1.0) - mean));
        }
        state.taken -= 1;
    }
}

impl State {
    fn turn_after(&self, last: Option<Instant>, now: Instant, longest: Duration) -> Instant {
        let ticket = self.mean.map_or(FIRST_GUESS, Duration::from_secs_f64);
        let turn = last.map_or(now, |last| last + ticket.mul_f64(SPACING));
        turn.clamp(now + SHORTEST, now + longest)
    }
}

/// A place, until this is dropped.
pub struct Admitted<'a>(&'a Rush);

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.0.leave(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::mem::forget;

    use super::*;

    /// Fills all places, and lets tickets end one after the other, each taking this time.
    fn busy(ticket: Duration, tickets: usize) -> (Rush, Instant) {
        let rush = Rush::default();
        let mut now = Instant::now();
        (0..PLACES).for_each(|_| forget(rush.enter(now)));
        for _ in 0..tickets {
            now += ticket;
            rush.leave(now);
            forget(rush.enter(now));
        }
        (rush, now)
    }

    #[test]
    fn as_many_as_there_are_places_enter_and_a_place_is_free_again_after_its_ticket() {
        let rush = Rush::default();
        let now = Instant::now();
        let places: Vec<_> = (0..PLACES).map(|_| rush.enter(now)).collect();
        assert!(places.iter().all(Result::is_ok));
        assert_eq!(rush.enter(now).err(), Some(SHORTEST));
        drop(places);
        assert!(rush.enter(now).is_ok());
    }

    #[test]
    fn the_refused_get_turns_one_after_the_other_at_the_rate_of_the_tickets() {
        for ticket in [Duration::from_millis(4), Duration::from_millis(50)] {
            let (rush, now) = busy(ticket, 500);
            let told: Vec<Duration> = (0..1000).map(|_| rush.enter(now).err().unwrap()).collect();
            assert_eq!(told[0], SHORTEST);
            let spacing = ticket.mul_f64(SPACING);
            let wanted = SHORTEST + 999 * spacing;
            let range = wanted.mul_f64(0.99)..wanted.mul_f64(1.01);
            assert!(range.contains(&told[999]), "{:?} of {wanted:?}", told[999]);
            // half of them later, the queue is half as long
            let later = now + SHORTEST + 500 * spacing;
            let last = rush.enter(later).err().unwrap();
            let wanted = 500 * spacing;
            let range = wanted.mul_f64(0.95).max(SHORTEST)..=wanted.mul_f64(1.05).max(SHORTEST);
            assert!(range.contains(&last), "{last:?} of {wanted:?}");
        }
    }

    #[test]
    fn connections_without_a_handshake_come_after_the_proven_callers_and_do_not_delay_them() {
        let ticket = Duration::from_millis(50);
        let (rush, now) = busy(ticket, 500);
        (0..100).for_each(|_| _ = rush.enter(now).err().unwrap());
        let told: Vec<Duration> = (0..100).map(|_| rush.turn_away(now)).collect();
        assert!(told.is_sorted() && told[0] > SHORTEST + 99 * ticket.mul_f64(0.8));
        (0..100_000).for_each(|_| _ = rush.turn_away(now));
        assert_eq!(rush.turn_away(now), LONGEST);
        let proven = rush.enter(now).err().unwrap();
        assert!(proven < told[1], "{proven:?}");
    }

    #[test]
    fn while_no_proven_caller_is_refused_many_connections_make_nobody_wait_for_long() {
        let (rush, now) = (Rush::default(), Instant::now());
        (0..100_000).for_each(|_| _ = rush.turn_away(now));
        assert_eq!(rush.turn_away(now), LONGEST_CALM);
        let (rush, now) = busy(Duration::from_millis(4), 500);
        assert!(rush.enter(now).is_err());
        (0..100_000).for_each(|_| _ = rush.turn_away(now));
        assert_eq!(rush.turn_away(now), LONGEST);
        let later = now + 2 * CALM;
        assert_eq!(rush.turn_away(later), LONGEST_CALM);
    }

    #[test]
    fn nobody_is_told_to_wait_for_ever_and_a_quiet_time_does_not_slow_the_rate() {
        let (rush, now) = busy(Duration::from_secs(3), 500);
        let told: Vec<Duration> = (0..1000).map(|_| rush.enter(now).err().unwrap()).collect();
        assert_eq!(told[999], LONGEST);
        let (rush, mut now) = busy(Duration::from_millis(4), 500);
        (0..PLACES).for_each(|_| rush.leave(now));
        for _ in 0..100 {
            now += Duration::from_secs(5);
            forget(rush.enter(now));
            rush.leave(now);
        }
        let mean = lock(&rush.0).mean.unwrap();
        assert!(mean < 0.005, "{mean}");
    }
}
