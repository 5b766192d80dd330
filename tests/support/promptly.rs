//! The only upper bounds of elapsed time in tests: for a fault that shows itself in nothing but a wait.

use std::time::{Duration, Instant};

/// How many times as long as on an idle machine a step may take.
const FACTOR: u32 = 20;

/// Asserts that what began at `since` took at most [`FACTOR`] times as long as on an idle machine, `usual`. The wait that the test
/// excludes must be longer than that.
#[track_caller]
pub fn assert_no_wait(since: Instant, usual: Duration) {
    let took = since.elapsed();
    assert!(
        took < FACTOR * usual,
        "it took {took:?}, expected {usual:?}, and at most {FACTOR} times as long"
    );
}
