//! The migration of a cluster from Constellation. Its disks have no records, and their headers do
//! not name their cluster. While migration is on, such disks are opened as well. The operator sets
//! its end, because an attacker with the disk of a volume could have it opened as a state disk
//! until then.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use base::time;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The last day on which disks without a record are accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Migration {
    end: Option<SystemTime>,
}

impl Migration {
    /// Returns whether such disks are accepted now.
    pub fn is_on(&self, now: SystemTime) -> bool {
        self.end.is_some_and(|end| now < end)
    }

    /// Logs the state of the migration when the service starts.
    pub fn announce(&self, now: SystemTime) {
        match self.end.map(time::seconds) {
            Some(end) if self.is_on(now) => log::warn!(
                "migration is on until {end} (--migrate-until): this service also opens disks without a record, even if their \
                 header names no cluster"
            ),
            Some(end) => {
                log::warn!("migration ended at {end}: remove the option --migrate-until")
            }
            None => {}
        }
    }
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self
            .end
            .and_then(|end| end.checked_sub(DAY))
            .map(time::seconds);
        f.write_str(
            last.as_deref()
                .and_then(|last| last.get(..10))
                .unwrap_or_default(),
        )
    }
}

/// A text that is no date.
#[derive(Debug, PartialEq, Eq)]
pub struct NoDate(String);

impl fmt::Display for NoDate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: expected a date like 2027-01-31", self.0)
    }
}

impl std::error::Error for NoDate {}

impl FromStr for Migration {
    type Err = NoDate;

    /// Parses a date such as `2027-01-31`, the last day in UTC. An empty text means never.
    fn from_str(text: &str) -> Result<Migration, NoDate> {
        if text.is_empty() {
            return Ok(Migration::default());
        }
        let start = time::parse(&format!("{text}T00:00:00Z"));
        let end = start.and_then(|start| start.checked_add(DAY));
        let end = end.ok_or_else(|| NoDate(text.to_owned()))?;
        Ok(Migration { end: Some(end) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_day_that_is_given_is_the_last() {
        let migration: Migration = "2027-01-31".parse().unwrap();
        let at = |text| migration.is_on(time::parse(text).unwrap());
        assert_eq!(
            (
                migration.to_string().as_str(),
                Migration::default().to_string().as_str()
            ),
            ("2027-01-31", "")
        );
        assert!(at("2026-11-22T00:00:00Z") && at("2027-01-31T23:59:59Z"));
        assert!(!at("2027-02-01T00:00:00Z") && !at("2030-01-01T00:00:00Z"));
    }

    #[test]
    fn it_is_off_unless_there_is_a_date() {
        assert!(
            !"".parse::<Migration>()
                .unwrap()
                .is_on(SystemTime::UNIX_EPOCH)
        );
        for bad in [
            "2027",
            "31.1.2027",
            "2027-01-31T00:00:00Z",
            "2027-13-01",
            " 2027-01-31",
            "forever",
        ] {
            assert_eq!(bad.parse::<Migration>(), Err(NoDate(bad.into())));
        }
    }
}
