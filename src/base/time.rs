//! Times as texts: RFC 3339 in UTC, with seconds (meta/v1 Time of Kubernetes).

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time like `2026-11-21T14:00:00Z`.
pub fn seconds(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let ((year, month, day), second) = (date(seconds / 86_400), seconds % 86_400);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// Returns year, month and day (from 1) of a day since 1970-01-01 in the Gregorian calendar, by
/// Howard Hinnant's civil_from_days.
pub fn date(day: u64) -> (u64, u64, u64) {
    let days = day + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}
