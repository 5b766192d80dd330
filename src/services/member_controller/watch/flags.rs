//! The options of the watch.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use super::decide::{Rules, WatchAction};
use super::{ElectionTimes, Options, Place};
use base::network::any_address;
use base::options::{Opt, Table, put};
use base::program::{Failure, text};

/// The shortest and the longest interval in seconds. A TPM needs up to a second for each answer.
const INTERVAL: (u64, u64) = (60, 86_400);
/// The shortest and the longest time of silence in seconds.
const SILENCE: (u64, u64) = (60, 30 * 86_400);
/// The percentage of refused nodes above which nothing follows.
const SHARE: u8 = 20;
/// The port of the HTTP server for attestation results.
const PORT: u16 = 9095;
/// The longest URL of an issuer.
const MAX_URL: usize = 200;

/// The options. The chart passes each of them, and an empty value means that it is not set.
pub const OPTIONS: &Table<WatchFlags> = &[
    (Opt::value("watch", "SECONDS", "asks each member for fresh evidence once in this time, 60 to 86400, and shows the result at its Node; one replica does this [off]"),
     |it, name, value| put(&mut it.interval, seconds(name, value, INTERVAL))),
    (Opt::value("watch-action", "WORD", "with --watch: what happens to a node whose evidence is refused: only a report, also a taint, or also a cordon").one_of(&["report", "taint", "cordon"]).or("report"),
     |it, name, value| put(&mut it.action, action(name, value))),
    (Opt::value("watch-silence", "SECONDS", "with --watch: a node that gives no evidence for this time, 60 to 2592000, is treated as a refused one [never]"),
     |it, name, value| put(&mut it.silence, seconds(name, value, SILENCE))),
    (Opt::value("watch-share", "PERCENT", "with --watch: if more of the nodes are refused at once, or all, it is only reported, 0 to 100").or("20"),
     |it, name, value| put(&mut it.share, share(name, value))),
    (Opt::value("watch-close-disks", "WORD", "with --watch: yes keeps the key of its disk from a machine whose evidence is refused, until it is accepted again or an operator permits it").one_of(&["yes", "no"]).or("no"),
     |it, name, value| put(&mut it.close_disks, yes(name, value))),
    (Opt::value("watch-issuer", "URL", "with --watch: publishes the result of each accepted node as a signed token, an attestation result (EAR) that OpenID Connect relying parties can verify; https://HOST[:PORT][/PATH], at which they reach --watch-listen [none]"),
     |it, name, value| put(&mut it.issuer, issuer(name, value))),
    (Opt::value("watch-listen", "ADDRESS:PORT", "with --watch-issuer: the address of the HTTP server for these tokens and the keys that verify them").or("*:9095"),
     |it, name, value| put(&mut it.listen, listen(name, value))),
];

/// The values of [`OPTIONS`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct WatchFlags {
    interval: Option<Duration>,
    action: Option<WatchAction>,
    silence: Option<Duration>,
    share: Option<u8>,
    close_disks: bool,
    issuer: Option<String>,
    listen: Option<SocketAddr>,
}

impl WatchFlags {
    /// Returns the options of the watch; `None` if it is off.
    pub fn finish(self) -> Result<Option<Options>, Failure> {
        let Some(interval) = self.interval else {
            return match self.issuer {
                None => Ok(None),
                Some(_) => Err(Failure::Usage("--watch-issuer: it needs --watch".into())),
            };
        };
        let listen = self.listen.unwrap_or((any_address(), PORT).into());
        Ok(Some(Options {
            interval,
            rules: Rules {
                action: self.action.unwrap_or(WatchAction::Report),
                silence: self.silence,
                share: self.share.unwrap_or(SHARE),
                close_disks: self.close_disks,
            },
            issuer: self.issuer.map(|url| Place { url, listen }),
            times: ElectionTimes::default(),
        }))
    }
}

fn wrong(name: &str, value: &str, expected: &str) -> Failure {
    Failure::Usage(format!("--{name} {value:?}: expected {expected}"))
}

fn seconds(
    name: &str,
    value: OsString,
    (least, most): (u64, u64),
) -> Result<Option<Duration>, Failure> {
    let value = text(value)?;
    if value.is_empty() {
        return Ok(None);
    }
    match value.parse() {
        Ok(seconds) if (least..=most).contains(&seconds) => Ok(Some(Duration::from_secs(seconds))),
        _ => Err(wrong(name, &value, &format!("{least} to {most} seconds"))),
    }
}

fn listen(name: &str, value: OsString) -> Result<Option<SocketAddr>, Failure> {
    if value.is_empty() {
        Ok(None)
    } else {
        crate::listen(name, value).map(Some)
    }
}

fn share(name: &str, value: OsString) -> Result<Option<u8>, Failure> {
    let value = text(value)?;
    if value.is_empty() {
        return Ok(None);
    }
    match value.parse() {
        Ok(share @ 0..=100) => Ok(Some(share)),
        _ => Err(wrong(name, &value, "0 to 100 percent")),
    }
}

fn action(name: &str, value: OsString) -> Result<Option<WatchAction>, Failure> {
    match text(value)?.as_str() {
        "" => Ok(None),
        "report" => Ok(Some(WatchAction::Report)),
        "taint" => Ok(Some(WatchAction::Taint)),
        "cordon" => Ok(Some(WatchAction::Cordon)),
        other => Err(wrong(name, other, "report, taint or cordon")),
    }
}

/// Reads the URL of the issuer. Relying parties fetch the keys from there, so a network between must not
/// be able to replace them: it is HTTPS, but for tests on this machine.
fn issuer(name: &str, value: OsString) -> Result<Option<String>, Failure> {
    let value = text(value)?;
    let is_plain = value.bytes().all(|byte| {
        byte.is_ascii_alphanumeric()
            || matches!(byte, b':' | b'/' | b'.' | b'-' | b'_' | b'[' | b']')
    });
    let secure = value.strip_prefix("https://");
    let local = value.strip_prefix("http://127.0.0.1:");
    let rest = secure.or(local).unwrap_or_default();
    let is_url = is_plain && value.len() <= MAX_URL && !rest.is_empty() && !rest.starts_with('/');
    match (value.as_str(), is_url && !value.ends_with('/')) {
        ("", _) => Ok(None),
        (_, true) => Ok(Some(value)),
        _ => Err(wrong(
            name,
            &value,
            "https://HOST[:PORT][/PATH] without a slash at its end",
        )),
    }
}

fn yes(name: &str, value: OsString) -> Result<bool, Failure> {
    match text(value)?.as_str() {
        "" | "no" => Ok(false),
        "yes" => Ok(true),
        other => Err(wrong(name, other, "yes or no")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(all: &[(&str, &str)]) -> Result<WatchFlags, String> {
        let mut flags = WatchFlags::default();
        for (name, value) in all {
            let (opt, set) = OPTIONS.iter().find(|(opt, _)| opt.name == *name).unwrap();
            set(&mut flags, opt.name, value.into()).map_err(|failure| match failure {
                Failure::Usage(text) => text,
                _ => panic!(),
            })?;
        }
        Ok(flags)
    }

    #[test]
    fn the_watch_is_off_unless_it_has_an_interval() {
        let names = OPTIONS.iter().map(|(opt, _)| (opt.name, ""));
        let empty = parsed(&names.collect::<Vec<_>>()).unwrap();
        assert_eq!(empty, WatchFlags::default());
        assert!(empty.finish().is_ok_and(|it| it.is_none()));
        let options = parsed(&[("watch", "600")]).unwrap().finish();
        let options = options.unwrap_or_else(|_| panic!()).unwrap();
        assert_eq!(options.issuer, None);
        assert_eq!(options.interval, Duration::from_secs(600));
        let expected = Rules {
            action: WatchAction::Report,
            silence: None,
            share: 20,
            close_disks: false,
        };
        assert_eq!(options.rules, expected);
        let all = [
            ("watch", "60"),
            ("watch-action", "cordon"),
            ("watch-silence", "2592000"),
            ("watch-share", "0"),
            ("watch-close-disks", "yes"),
        ];
        let expected = Rules {
            action: WatchAction::Cordon,
            silence: Some(Duration::from_secs(2_592_000)),
            share: 0,
            close_disks: true,
        };
        let options = parsed(&all).unwrap().finish();
        let options = options.unwrap_or_else(|_| panic!()).unwrap();
        assert_eq!(options.rules, expected);
    }

    #[test]
    fn results_are_published_only_with_a_watch_and_at_a_url_of_https() {
        let of = |all: &[(&str, &str)]| {
            let options = parsed(all).unwrap().finish();
            options.map(|options| options.and_then(|it| it.issuer))
        };
        let url = "https://results.example:8443/cluster-1";
        let place = of(&[("watch", "600"), ("watch-issuer", url)]);
        let place = place.unwrap_or_else(|_| panic!()).unwrap();
        assert_eq!((&*place.url, place.listen.port()), (url, PORT));
        let local = [
            ("watch", "600"),
            ("watch-issuer", "http://127.0.0.1:7"),
            ("watch-listen", "127.0.0.1:7"),
        ];
        let place = of(&local).unwrap_or_else(|_| panic!()).unwrap();
        assert_eq!(place.listen, "127.0.0.1:7".parse().unwrap());
        let Err(Failure::Usage(why)) = of(&[("watch-issuer", url)]) else {
            panic!()
        };
        assert!(why.contains("--watch-issuer: it needs --watch"), "{why}");
    }

    #[test]
    fn values_outside_their_limits_are_refused_with_what_was_expected() {
        for (name, value, expected) in [
            ("watch", "59", "60 to 86400 seconds"),
            ("watch", "86401", "60 to 86400 seconds"),
            ("watch", "1h", "60 to 86400 seconds"),
            ("watch-silence", "-1", "60 to 2592000 seconds"),
            ("watch-action", "evict", "report, taint or cordon"),
            ("watch-share", "101", "0 to 100 percent"),
            ("watch-close-disks", "true", "yes or no"),
            ("watch-issuer", "http://results.example", "https://HOST"),
            ("watch-issuer", "https://", "https://HOST"),
            ("watch-issuer", "https:///path", "https://HOST"),
            (
                "watch-issuer",
                "https://results.example/",
                "without a slash",
            ),
            ("watch-issuer", "https://results.example?a", "https://HOST"),
            ("watch-issuer", "results.example", "https://HOST"),
        ] {
            let refused = parsed(&[(name, value)]).unwrap_err();
            assert!(
                refused.contains(expected) && refused.contains(name),
                "{refused}"
            );
        }
    }
}
