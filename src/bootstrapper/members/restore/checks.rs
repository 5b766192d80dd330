//! The preconditions for replacing etcd of this node: the remaining members of the old cluster of
//! etcd must not have a majority, now or later.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use base::network::request::{CONNECT_TIMEOUT, Request, RequestTransport};
use base::stop::Stop;
use cloud::plain::Plain;

use super::database::{self, StoredMember};
use super::failed_check::{FailedCheck, failed_check};
use super::manifest::{EtcdManifest, address, shown};
use super::place::RestoreFolders;

/// How often this program asks whether etcd has a leader.
const LOOKS: u32 = 5;
const ANSWER: Duration = Duration::from_secs(5);
const MAX_METRICS: u64 = 4 << 20;
/// The metric of etcd that says whether it has a leader.
const HAS_LEADER: &str = "etcd_server_has_leader";

/// The state of etcd on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtcdState {
    /// It runs, and says that it has no leader.
    Leaderless,
    /// It does not run, and its data are there.
    Stopped,
}

/// Refuses if etcd of this node has a leader, or if this cannot be known. Asks several times, with this
/// pause. The error is a sentence.
pub fn state(
    etcd: &EtcdManifest,
    place: &RestoreFolders,
    pause: Duration,
    stop: &Stop,
) -> Result<EtcdState, FailedCheck> {
    let look = || match has_leader(&etcd.metrics) {
        Ok(true) => Err(failed_check!(
            "etcd on this node has a leader, so a majority of its members works: there is nothing to restore. If the API server does not \
             answer, see its log below /var/log/pods/. {} says {HAS_LEADER} 1",
            etcd.metrics
        )),
        Ok(false) => Ok(EtcdState::Leaderless),
        Err(why) => stopped(etcd, place, &why),
    };
    let first = look()?;
    for _ in 1..LOOKS {
        if stop.wait(pause) {
            return Err("stopped by a signal".into());
        }
        if look()? != first {
            return Err(
                "etcd on this node starts or stops just now: run this command again".into(),
            );
        }
    }
    Ok(first)
}

/// Returns that etcd is stopped, if nothing has its database. `why` it does not answer.
fn stopped(
    etcd: &EtcdManifest,
    place: &RestoreFolders,
    why: &str,
) -> Result<EtcdState, FailedCheck> {
    match place.lock() {
        Ok(Some(_)) => Ok(EtcdState::Stopped),
        Ok(None) => Err(failed_check!(
            "etcd on this node runs, but does not say whether it has a leader: {}: {why}",
            etcd.metrics
        )),
        Err(error) => Err(failed_check!(
            "etcd on this node does not run, and has no data: nothing shows that this machine was a member ({error})"
        )),
    }
}

/// Asks etcd by its metrics whether it has a leader. The error says why it is not known.
pub fn has_leader(metrics: &str) -> Result<bool, FailedCheck> {
    let request = Request {
        method: "GET",
        url: &format!("{}/metrics", metrics.trim_end_matches('/')),
        fields: &[],
        body: None,
        limit: MAX_METRICS,
    };
    let answer = Plain(ANSWER).send(&request);
    let answer = answer.map_err(|error| error.to_string())?;
    let body = answer.body.map_err(|error| error.to_string())?;
    leader(answer.status, &String::from_utf8_lossy(&body))
}

fn leader(status: u16, metrics: &str) -> Result<bool, FailedCheck> {
    let mut values = metrics
        .lines()
        .filter_map(|line| line.strip_prefix(HAS_LEADER)?.strip_prefix(' '));
    match (status, values.next(), values.next()) {
        (200, Some("0"), None) => Ok(false),
        (200, Some("1"), None) => Ok(true),
        (200, ..) => Err(failed_check!("there is no {HAS_LEADER} 0 or 1")),
        _ => Err(failed_check!("HTTP status {status}")),
    }
}

/// The other members that may exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Others {
    /// Their names and URLs.
    pub members: Vec<StoredMember>,
    /// Notes about them for the operator.
    pub notes: Vec<String>,
}

/// Returns all other members that the data of this node, the snapshot or the manifest names: each of the
/// three may be older than the others. The error is a sentence.
pub fn others(
    etcd: &EtcdManifest,
    place: &RestoreFolders,
    snapshot: &File,
) -> Result<Others, FailedCheck> {
    let local = File::open(place.database()).map_err(|error| failed_check!("{error}"));
    let local = local.and_then(|file| database::members(BufReader::new(file)));
    let has_own = |members: &[StoredMember]| members.iter().any(|it| it.urls.contains(&etcd.url));
    let mut notes = vec![];
    let mut members = database::members(BufReader::new(snapshot))
        .map_err(|why| format!("the members in the snapshot cannot be read: {why}"))?;
    if !has_own(&members) {
        notes
            .push("this member is not in the snapshot: it joined later, or was removed".to_owned());
    }
    match local {
        Ok(local) if !has_own(&local) => {
            return Err(failed_check!(
                "etcd's data on this node do not name {} as a member: it was removed from the cluster, so its data are old",
                etcd.url
            ));
        }
        Ok(local) => members.extend(local),
        Err(why) => notes.push(format!("etcd's data on this node cannot be read: {why}")),
    }
    members.extend(etcd.initial.iter().map(|url| StoredMember {
        name: String::new(),
        urls: vec![url.clone()],
    }));
    let mut others: Vec<StoredMember> = vec![];
    for mut member in members {
        member
            .urls
            .retain(|url| *url != etcd.url && !others.iter().any(|it| it.urls.contains(url)));
        if !member.urls.is_empty() {
            others.push(member);
        }
    }
    Ok(Others {
        members: others,
        notes,
    })
}

/// Connects to an address.
pub type Connect<'a> = &'a dyn Fn(SocketAddr) -> io::Result<()>;

/// Connects as the command does.
pub fn connect(address: SocketAddr) -> io::Result<()> {
    TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).map(drop)
}

/// Connects to each of these members. Returns how each does not answer. Refuses if one answers, or
/// cannot check from this node. The error is a sentence.
pub fn silent(members: &[StoredMember], connect: Connect) -> Result<Vec<String>, FailedCheck> {
    let mut silent = vec![];
    for member in members {
        for url in &member.urls {
            let at = format!("{} at {}", shown(&member.name), address(url)?);
            let error = match connect(address(url)?) {
                Ok(()) => {
                    return Err(failed_check!(
                        "another member of etcd answers: {at}. With its data, etcd may get its majority back: start the machines of the \
                         other members. If those are lost, switch off the machine {at}, too, and run this command again"
                    ));
                }
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::TimedOut | ErrorKind::HostUnreachable => {
                    silent.push(format!("{at} does not answer ({error})"));
                }
                ErrorKind::ConnectionRefused => {
                    return Err(failed_check!(
                        "the machine {at} is on, although no etcd listens there now: switch it off until etcd is restored, and for good if it \
                         has its old disk"
                    ));
                }
                _ => {
                    return Err(failed_check!(
                        "cannot check from this node whether the member {at} is off ({error}): correct this node's network first"
                    ));
                }
            }
        }
    }
    Ok(silent)
}

/// Returns whether a program with this name runs with this argument.
pub fn runs(proc: &Path, program: &str, argument: &str) -> bool {
    let Ok(entries) = fs::read_dir(proc) else {
        return true;
    };
    let is_it = |path: &Path| {
        let command = fs::read(path.join("cmdline")).unwrap_or_default();
        let mut words = command.split(|byte| *byte == 0);
        let name = words
            .next()
            .and_then(|word| word.rsplit(|byte| *byte == b'/').next());
        name == Some(program.as_bytes()) && words.any(|word| word == argument.as_bytes())
    };
    entries.flatten().any(|entry| is_it(&entry.path()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn only_a_clear_answer_about_the_leader_counts() {
        let metrics =
            |value: &str| format!("# TYPE {HAS_LEADER} gauge\n{HAS_LEADER} {value}\nx 1\n");
        assert_eq!(leader(200, &metrics("0")), Ok(false));
        assert_eq!(leader(200, &metrics("1")), Ok(true));
        for unclear in ["", "2", "NaN", "1e0", "00"] {
            assert!(leader(200, &metrics(unclear)).is_err(), "{unclear}");
        }
        assert!(leader(200, &metrics("0").repeat(2)).is_err());
        assert!(leader(200, "").is_err());
        assert!(leader(503, &metrics("0")).is_err());
    }

    #[test]
    fn a_member_that_answers_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let member = |url: String| {
            [StoredMember {
                name: "b".into(),
                urls: vec![url],
            }]
        };
        let other = member(format!("https://{}", listener.local_addr().unwrap()));
        let error = silent(&other, &connect).unwrap_err();
        assert!(
            error.contains(&listener.local_addr().unwrap().to_string()),
            "{error}"
        );
        drop(listener);
        let said = silent(&other, &connect).unwrap_err();
        assert!(said.contains("is on, although no etcd listens"), "{said}");
        assert!(silent(&member("https://etcd:2380".into()), &connect).is_err());
        let with = |kind: ErrorKind| silent(&other, &|_| Err(kind.into()));
        assert!(with(ErrorKind::TimedOut).is_ok() && with(ErrorKind::HostUnreachable).is_ok());
        for kind in [
            ErrorKind::NetworkUnreachable,
            ErrorKind::PermissionDenied,
            ErrorKind::Other,
        ] {
            assert!(
                with(kind)
                    .unwrap_err()
                    .contains("cannot check from this node"),
                "{kind}"
            );
        }
    }

    #[test]
    fn a_program_is_known_by_its_name_and_argument() {
        let proc = tempfile::tempdir().unwrap();
        for (number, command) in [
            ("1", "kube-apiserver\0--a=1\0"),
            ("2", "/bin/etcd\0--a=2\0"),
            ("x", ""),
        ] {
            fs::create_dir(proc.path().join(number)).unwrap();
            fs::write(proc.path().join(number).join("cmdline"), command).unwrap();
        }
        let runs = |program: &str, argument: &str| runs(proc.path(), program, argument);
        assert!(runs("kube-apiserver", "--a=1") && runs("etcd", "--a=2"));
        assert!(!runs("kube-apiserver", "--a=2") && !runs("etcd", "--a") && !runs("", ""));
    }
}
