//! Times as the Kubernetes API writes them: RFC 3339 in UTC, with seconds (meta/v1 Time) or
//! microseconds (MicroTime). Times in certificates.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::der::{Malformed, element};

/// The tag of UTCTime (X.690 §8.25, X.680 §47).
const UTC_TIME: u8 = 0x17;
/// The tag of GeneralizedTime (X.680 §46).
const GENERALIZED_TIME: u8 = 0x18;

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

/// Formats a time like `2026-11-21T14:00:00.000000Z`.
pub fn micros(at: SystemTime) -> String {
    let whole = seconds(at);
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    format!(
        "{}.{:06}Z",
        whole.trim_end_matches('Z'),
        since.subsec_micros()
    )
}

/// Parses both formats, with a precision of microseconds. Returns `None` if `text` is not a time in
/// UTC since 1970.
pub fn parse(text: &str) -> Option<SystemTime> {
    let text = text.strip_suffix('Z')?;
    let (whole, fraction) = text.split_at_checked(19)?;
    let is_fraction =
        |digits: &&str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let digits = if fraction.is_empty() {
        "0"
    } else {
        fraction.strip_prefix('.').filter(is_fraction)?
    };
    let micros = (0..6).fold(0, |micros, at| {
        micros * 10
            + digits
                .as_bytes()
                .get(at)
                .map_or(0, |byte| u64::from(byte - b'0'))
    });
    let fits = whole.bytes().enumerate().all(|(at, byte)| match at {
        4 | 7 => byte == b'-',
        10 => byte == b'T',
        13 | 16 => byte == b':',
        _ => byte.is_ascii_digit(),
    });
    if !fits {
        return None;
    }
    let number = |from: usize, to: usize| whole.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    // 60 is a leap second.
    if year < 1970
        || !(1..=12).contains(&month)
        || !(1..=31).contains(&day)
        || hour > 23
        || minute > 59
        || second > 60
    {
        return None;
    }
    // Years are counted from March, so that a leap day is the last day of a year.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    // 1970-01-01 counted in the same way.
    let days = days.checked_sub(719_468)?;
    let whole = Duration::from_secs(((days * 24 + hour) * 60 + minute) * 60 + second);
    UNIX_EPOCH.checked_add(whole + Duration::from_micros(micros))
}

/// Encodes seconds since 1970 as RFC 5280 §4.1.2.5 demands: UTCTime until 2049, GeneralizedTime
/// from 2050.
pub fn to_der(seconds: u64) -> Vec<u8> {
    let (year, month, day) = date(seconds / 86_400);
    let second = seconds % 86_400;
    let rest = format!(
        "{month:02}{day:02}{:02}{:02}{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    );
    if year < 2050 {
        element(
            UTC_TIME,
            &[format!("{:02}", year % 100).as_bytes(), rest.as_bytes()],
        )
    } else {
        element(
            GENERALIZED_TIME,
            &[format!("{year:04}").as_bytes(), rest.as_bytes()],
        )
    }
}

/// Returns the seconds since 1970 of an element, its tag and its content, if it is a UTCTime or
/// GeneralizedTime in the only form that RFC 5280 §4.1.2.5 allows.
pub fn of_der((tag, text): (u8, &[u8])) -> Result<u64, Malformed> {
    let text = std::str::from_utf8(text).map_err(|_| Malformed)?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2).ok_or(Malformed)?;
            let century = if year < "50" { "20" } else { "19" };
            (format!("{century}{year}"), rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4).ok_or(Malformed)?;
            (year.to_owned(), rest)
        }
        _ => return Err(Malformed),
    };
    let part = |from: usize| rest.get(from..from + 2).ok_or(Malformed);
    let (month, day, hour) = (part(0)?, part(2)?, part(4)?);
    let (minute, second, end) = (part(6)?, part(8)?, rest.get(10..).ok_or(Malformed)?);
    let time = parse(&format!(
        "{year}-{month}-{day}T{hour}:{minute}:{second}{end}"
    ));
    let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map(|since| since.as_secs()).ok_or(Malformed)
}

#[cfg(test)]
mod tests {
    use crate::der::{DerReader, OCTET_STRING};

    use super::*;
    use support::mutation::mutations;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn times_are_encoded_as_rfc_5280_demands() {
        // The texts are from `date -u -d @...`.
        for (seconds, text) in [
            (0, &b"\x17\x0d700101000000Z"[..]),
            (951_782_399, b"\x17\x0d000228235959Z"),
            (951_782_400, b"\x17\x0d000229000000Z"),
            (1_735_689_599, b"\x17\x0d241231235959Z"),
            (1_795_240_800, b"\x17\x0d261121060000Z"),
            (2_524_607_999, b"\x17\x0d491231235959Z"),
            (2_524_608_000, b"\x18\x0f20500101000000Z"),
            (4_107_542_400, b"\x18\x0f21000301000000Z"),
        ] {
            assert_eq!(
                String::from_utf8_lossy(&to_der(seconds)),
                String::from_utf8_lossy(text)
            );
        }
    }

    #[test]
    fn times_match_the_calendar_in_both_directions() {
        for (number, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(
                (seconds(at(number)).as_str(), parse(text)),
                (text, Some(at(number)))
            );
        }
        assert_eq!(
            micros(at(1) + Duration::from_micros(7)),
            "1970-01-01T00:00:01.000007Z"
        );
        assert_eq!(
            parse("1970-01-01T00:00:01.000007Z"),
            Some(at(1) + Duration::from_micros(7))
        );
        assert_eq!(
            parse("1970-01-01T00:00:01.9Z"),
            Some(at(1) + Duration::from_micros(900_000))
        );
        assert_eq!(
            parse("1970-01-01T00:00:01.1234567Z"),
            Some(at(1) + Duration::from_micros(123_456))
        );
        for day in 0..40_000 {
            assert_eq!(
                parse(&seconds(at(day * 86_400 + 5))),
                Some(at(day * 86_400 + 5))
            );
        }
    }

    #[test]
    fn text_that_is_not_a_time_is_none() {
        for text in [
            "",
            "Z",
            "1969-12-31T23:59:59Z",
            "2026-13-01T00:00:00Z",
            "2026-01-01T00:00:00",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00+01:00",
            "2026-01-01 00:00:00Z",
            "+026-01-01T00:00:00Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        for bytes in mutations(b"2026-11-21T14:00:00.000000Z", 20_000) {
            let _ = parse(&String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn both_forms_of_a_time_are_read_and_no_other() {
        for at in [0, 951_782_400, 1_795_240_800, 2_524_607_999, 2_524_608_000] {
            let der = to_der(at);
            assert_eq!(of_der(DerReader::new(&der).read().unwrap()), Ok(at));
        }
        for bad in [
            &b""[..],
            b"2611210600Z",
            b"261121060000",
            b"261121060000+0100",
            b"261321060000Z",
            b"2\xc3\xa4121060000Z",
        ] {
            assert_eq!(of_der((UTC_TIME, bad)), Err(Malformed));
        }
        assert_eq!(of_der((OCTET_STRING, b"261121060000Z")), Err(Malformed));
    }
}
