//! Repeats requests that a service refuses because it is overloaded.

use std::thread;
use std::time::{Duration, Instant};

use base::backoff::Backoff;

use super::error::Error;

/// How long a request is repeated. After that, the caller may try again itself.
const LIMIT: Duration = Duration::from_secs(10);
/// The first and the longest pause between two requests.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Repeats an attempt while the service is busy.
pub fn patiently<T>(attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    within(LIMIT, attempt)
}

fn within<T>(limit: Duration, mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let begin = Instant::now();
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    loop {
        let pause = backoff.pause();
        match attempt() {
            Err(Error::Busy(why)) if begin.elapsed() + pause > limit => {
                let seconds = limit.as_secs();
                return Err(Error::Busy(format!("{why}; tried for {seconds} s")));
            }
            Err(Error::Busy(_)) => thread::sleep(pause),
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_busy_service_is_asked_again_and_not_forever() {
        let mut count = 0;
        let result = patiently(|| {
            count += 1;
            match count {
                3 => Ok(count),
                _ => Err(Error::Busy("busy".into())),
            }
        });
        assert_eq!(result, Ok(3));
        let mut count = 0;
        let result: Result<(), Error> = patiently(|| {
            count += 1;
            Err(Error::Away("away".into()))
        });
        assert_eq!((result, count), (Err(Error::Away("away".into())), 1));
        let busy = || Err::<(), _>(Error::Busy("busy".into()));
        let error = within(Duration::ZERO, busy).unwrap_err();
        assert!(error.may_pass() && error.to_string() == "busy; tried for 0 s");
    }
}
