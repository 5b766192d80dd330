//! While a cluster moves here from the old system it has disks that nobody has recorded, and whose headers do not say of which
//! cluster they are. To open those, too, has an end that the operator sets: until then the holder of a volume's disk can have it
//! opened as a state disk.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use base::time;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Until when disks of before are taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Migration {
    end: Option<SystemTime>,
}

impl Migration {
    /// Whether they are taken now.
    pub fn is_on(&self, now: SystemTime) -> bool {
        self.end.is_some_and(|end| now < end)
    }

    /// What the log says of it when the service starts.
    pub fn announce(&self, now: SystemTime) {
        match self.end.map(time::seconds) {
            Some(end) if self.is_on(now) => log::warn!(
                "migration is on until {end} (--migrate-until): disks without a record, and without a word of their cluster, \
                 are opened"
            ),
            Some(end) => log::warn!("migration is over since {end}: --migrate-until may go"),
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

impl FromStr for Migration {
    type Err = String;

    /// `2027-01-31`: that day, in UTC, is the last. Nothing: never.
    fn from_str(text: &str) -> Result<Migration, String> {
        if text.is_empty() {
            return Ok(Migration::default());
        }
        let start = time::parse(&format!("{text}T00:00:00Z"));
        let end = start.and_then(|start| start.checked_add(DAY));
        let end = end.ok_or_else(|| format!("{text:?}: expected a date as 2027-01-31"))?;
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
            assert!(
                bad.parse::<Migration>()
                    .unwrap_err()
                    .contains("expected a date as 2027-01-31"),
                "{bad}"
            );
        }
    }
}
