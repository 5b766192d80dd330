//! `bootstrapper restore-etcd`: makes etcd of this control plane, the one that is left, a cluster of
//! one member with the data of a snapshot.
//!
//! ```text
//! checks ─► plan ─► question ─► etcdutl ─► pods stopped ─► checks ─► data swapped ─► pods started ─► API server answers
//!   │refused            record begins          │failed          │refused     │killed: the same command goes on      record ends
//!   └► nothing changed                         └──► pods started as before   └─► --undo: the old data again, pods started
//! ```
//!
//! **Why it is safe.** Two clusters of etcd with the same members' names and the same objects are the
//! danger: both would accept changes. So the command refuses while the old one has a leader, or
//! could have one again as far as this node can see ([`checks`]). Members whose machines are only
//! cut off from this node cannot be seen; the plan says that they must be off. The restored cluster
//! has an ID of its own, so old members cannot talk to it: without a token of its own, the first
//! control plane would have the ID of the old cluster.
//!
//! No data of etcd are deleted: [`place`] says where everything is.

pub mod changes;
mod checks;
pub mod database;
pub mod failed_check;
mod manifest;
mod place;
mod snapshot;
mod voucher;

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use base::child_process;
use base::options::{Opt, Table, put};
use base::program::{self, Failure};
use base::stop::Stop;
use disk::state_disk::node_state::NodeState;
use kubernetes::client::{ApiAccess, Client, NAMESPACES, Selector};
use lexopt::Parser;
use node::options;
use serde_json::Value;

use crate::members::renew;
use crate::steps::{error::Error as Step, job::Job, setup};
use changes::Changes;
use checks::{EtcdState, Others};
use failed_check::{FailedCheck, failed_check};
use manifest::{EtcdManifest, shown};
use place::{Data, PODS, RestoreFolders, RestoreRecord};
use snapshot::{PrivateCopy, Snapshot};
use voucher::Voucher;

/// etcdutl in the image of mkosi.
const ETCDUTL_OF_IMAGE: &str = "/usr/lib/firstlight/etcdutl";
/// Number of revisions that the restored etcd is ahead of the snapshot. Controllers and kubelets
/// remember versions of objects; the old cluster has not had this many after the snapshot.
const BUMP: u64 = 1_000_000_000;
/// Time limit for etcdutl, which reads and writes at most 8 GiB.
const ETCDUTL: Duration = Duration::from_secs(30 * 60);
/// Time limit for the kubelet to stop both pods. It looks every 20 seconds, and lets a pod end for 30.
const STOPPED: Duration = Duration::from_secs(5 * 60);
/// How long both must not run: longer than the kubelet takes to see that a manifest is gone.
const SETTLED: Duration = Duration::from_secs(45);
/// The part of this time from one look at etcd's leader to the next: a second. An election takes one, or two.
const LOOK: u32 = 45;
/// Time limit for the kubelet to start both, and for the API server to answer.
const STARTED: Duration = Duration::from_secs(15 * 60);
const ANSWER: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(500);
/// The values of the options.
#[derive(Default)]
pub struct Options {
    /// The options that all programs of a node share.
    pub shared: options::Options,
    etcdutl: PathBuf,
    is_dry_run: bool,
    is_agreed: bool,
    is_undo: bool,
    unsigned: String,
}

/// The options that only this command has.
pub const OPTIONS: &Table<Options> = &[
    (
        Opt::value(
            "etcdutl",
            "FILE",
            "the program etcdutl of the same release as the cluster's etcd; by default that of the mkosi image",
        ),
        |it, _, value| put(&mut it.etcdutl, Ok(value.into())),
    ),
    (
        Opt::flag(
            "dry-run",
            "checks everything, shows the plan, and changes nothing",
        ),
        |it, _, _| put(&mut it.is_dry_run, Ok(true)),
    ),
    (Opt::flag("yes", "does not ask"), |it, _, _| {
        put(&mut it.is_agreed, Ok(true))
    }),
    (
        Opt::value(
            "unsigned",
            "SHA256",
            "restores a snapshot whose signature is missing or cannot be verified here, if it has this SHA-256: give the one that \
             `firstlight etcd snapshot` printed, as somebody may have changed the file since",
        ),
        |it, _, value| put(&mut it.unsigned, program::text(value)),
    ),
    (
        Opt::flag(
            "undo",
            "gives etcd its old data back, unless the restoration has succeeded; takes no snapshot",
        ),
        |it, _, _| put(&mut it.is_undo, Ok(true)),
    ),
];

/// Parses the arguments of the command, and restores etcd, or undoes what an earlier run did.
pub fn main(
    snapshot: Option<&Path>,
    arguments: Parser,
    source: &'static str,
) -> Result<(), Failure> {
    let mut options = Options::default();
    options::parse(OPTIONS, arguments, source, &mut options, |it| {
        &mut it.shared
    })?;
    let wrong = |why: &str| Failure::Usage(format!("restore-etcd: {why}"));
    let has_etcdutl = !options.etcdutl.as_os_str().is_empty();
    let snapshot = match (snapshot, options.is_undo) {
        (None, true) => Path::new("/"),
        (Some(_), true) => return Err(wrong("--undo takes no snapshot")),
        (None, false) => return Err(wrong("the file of the snapshot is missing")),
        (Some(path), false) => path,
    };
    options.shared.start_log();
    let stop = Stop::new();
    let job = Job::<()>::new(base::boot::timeline::Timeline::new("restore-etcd"));
    job.begin();
    let absolute = |path: &Path| {
        let found = fs::canonicalize(path);
        found.map_err(|error| Failure::failed(format!("cannot find {}: {error}", path.display())))
    };
    if has_etcdutl {
        options.etcdutl = absolute(&options.etcdutl)?;
    }
    let snapshot = absolute(snapshot)?;
    act(&options, &snapshot, &stop, &job, &print, &ask).map_err(Failure::failed)
}

/// Restores etcd of this node, or undoes what an earlier run did.
fn act(
    options: &Options,
    snapshot: &Path,
    stop: &Stop,
    job: &Job<()>,
    tell: &dyn Fn(&str),
    ask: AskOperator<'_>,
) -> Result<(), Error> {
    let etcdutl = if options.etcdutl.as_os_str().is_empty() {
        Path::new(ETCDUTL_OF_IMAGE)
    } else {
        &options.etcdutl
    };
    if !options.is_undo && !etcdutl.exists() {
        return Err(Error::Refused(failed_check!(
            "there is no {}: this image has no etcdutl, so name one by --etcdutl",
            etcdutl.display()
        )));
    }
    let restore = Restore {
        kubernetes: Path::new(renew::KUBERNETES),
        root: &options.shared.root,
        snapshot,
        etcdutl,
        api: &|| revision(stop),
        connect: &checks::connect,
        settle: SETTLED,
        stop,
        job,
        tell,
        ask,
        reached: &|_| (),
    };
    let _alone = renew::lock().map_err(|error| Error::Refused(error.to_string().into()))?;
    if options.is_undo {
        restore.undo(options)
    } else {
        restore.run(options)
    }
}

/// Asks the operator; the error is a sentence.
pub type AskOperator<'a> = &'a dyn Fn(&str) -> Result<(), FailedCheck>;

/// The request of an operator's call.
pub struct RestoreCall<'a> {
    /// Where the state disk is mounted.
    pub root: &'a Path,
    /// The snapshot, with its signature beside it.
    pub snapshot: &'a Path,
    /// Whether only the plan is wanted.
    pub is_dry_run: bool,
    /// Whether etcd gets its old data again.
    pub is_undo: bool,
    /// The SHA-256 of a snapshot without a signature, for which the operator vouches; or empty.
    pub unsigned: &'a str,
}

/// Like [`main`], for an operator's call. `tell` and `ask` reach the caller.
pub fn by_call(
    asked: &RestoreCall<'_>,
    stop: &Stop,
    job: &Job<()>,
    tell: &dyn Fn(&str),
    ask: AskOperator<'_>,
) -> Result<(), Error> {
    let mut options = Options {
        is_dry_run: asked.is_dry_run,
        is_undo: asked.is_undo,
        unsigned: asked.unsigned.into(),
        ..Options::default()
    };
    options.shared.root = asked.root.into();
    act(&options, asked.snapshot, stop, job, tell, ask)
}

/// Why the API server does not give its revision.
pub struct NoRevision {
    /// Nothing has answered, or an API server without etcd.
    pub is_silent: bool,
    /// The reason.
    pub why: String,
}

/// Returns the revision of etcd that the API server has, at the address of the cluster.
fn revision(stop: &Stop) -> Result<u64, NoRevision> {
    let path = Path::new(renew::KUBERNETES).join("admin.conf");
    let answer = || {
        let client = Client::new(ApiAccess::from_kubeconfig_file(&path)?, stop);
        client
            .within(ANSWER)
            .list(&NAMESPACES.all(), &Selector::default())
    };
    let list = answer().map_err(|error: kubernetes::client::Error| NoRevision {
        is_silent: error.is_temporary() && error.code().is_none_or(|code| code >= 500),
        why: error.to_string(),
    })?;
    list.resource_version.parse().map_err(|_| NoRevision {
        is_silent: false,
        why: "the API server's resourceVersion is not a number".into(),
    })
}

/// Returns the arguments of etcdutl that make the data of a cluster of one member, which has this name
/// and URL. The ID of the cluster depends on `time`.
pub fn etcdutl_arguments(
    snapshot: &Path,
    data: &Path,
    name: &str,
    url: &str,
    time: u64,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = ["snapshot", "restore"].map(OsString::from).to_vec();
    arguments.extend([snapshot.into(), "--data-dir".into(), data.into()]);
    let more = [
        format!("--name={name}"),
        format!("--initial-cluster={name}={url}"),
        format!("--initial-advertise-peer-urls={url}"),
        format!("--initial-cluster-token=firstlight-restore-{time}"),
        format!("--bump-revision={BUMP}"),
        "--mark-compacted".into(),
    ];
    arguments.extend(more.map(OsString::from));
    arguments
}

/// Why etcd is not restored. `Display` is a sentence that says what to do.
#[derive(Debug)]
pub enum Error {
    /// It is not safe, or not possible: nothing was changed.
    Refused(FailedCheck),
    /// Failed before etcd got other data, for this reason. Both pods run as before, or why they do not.
    Back(FailedCheck, Result<(), Step>),
    /// Failed when etcd had other data, or in part.
    Between(FailedCheck),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Refused(why) => write!(f, "{why}; nothing was changed"),
            Error::Back(why, Ok(())) => write!(
                f,
                "{why}\netcd has its data as before, and starts again with the API server; correct the cause, and run the same command again"
            ),
            Error::Back(why, Err(error)) => write!(
                f,
                "{why}\netcd has its data as before, but does not start again: {error}; run `bootstrapper restore-etcd --undo`"
            ),
            Error::Between(why) => write!(
                f,
                "{why}\nif a restoration has begun, the same command continues it, and `bootstrapper restore-etcd --undo` gives etcd its \
                 old data back"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// A restoration. Tests have other folders, and another API server.
pub struct Restore<'a> {
    /// The folder of the cluster's files.
    pub kubernetes: &'a Path,
    /// Where the state disk is mounted.
    pub root: &'a Path,
    /// The snapshot.
    pub snapshot: &'a Path,
    /// etcdutl.
    pub etcdutl: &'a Path,
    /// Returns the revision of etcd that the API server has.
    pub api: &'a dyn Fn() -> Result<u64, NoRevision>,
    /// Connects to another member.
    pub connect: checks::Connect<'a>,
    /// How long both pods must not run before the data are exchanged.
    pub settle: Duration,
    /// Stops the restoration.
    pub stop: &'a Stop,
    /// Reports the steps.
    pub job: &'a Job<()>,
    /// Tells the operator.
    pub tell: &'a dyn Fn(&str),
    /// Asks the operator.
    pub ask: AskOperator<'a>,
    /// Is called after each step.
    pub reached: &'a dyn Fn(&str),
}

/// What the checks have found.
struct Plan {
    etcd: EtcdManifest,
    place: RestoreFolders,
    api_server: String,
    snapshot: Snapshot,
    copy: PrivateCopy,
    voucher: Voucher,
    changes: Result<Changes, FailedCheck>,
    state: Option<EtcdState>,
    others: Others,
    silent: Vec<String>,
    record: RestoreRecord,
    /// The restoration has begun before.
    has_begun: bool,
}

impl Restore<'_> {
    /// Checks, shows the plan, asks, and restores etcd.
    pub fn run(&self, options: &Options) -> Result<(), Error> {
        self.job.phase("etcd checks");
        let plan = self.check(options).map_err(|why| {
            if self.has_begun() {
                Error::Between(why)
            } else {
                Error::Refused(why)
            }
        })?;
        (self.tell)(&plan.to_string());
        if !self.agreed(options, "Restore etcd?")? {
            return Ok(());
        }
        let Plan { place, record, .. } = &plan;
        if !plan.has_begun {
            place.begin(record).map_err(failed)?;
            self.reached("begun");
        }
        if place.data(record) == Data::Before {
            self.job.phase("etcd snapshot");
            self.make_data(&plan).map_err(failed)?;
            self.reached("restored");
            self.job.phase("etcd stop");
            self.replace_data(&plan)?;
        } else if place.data(record) == Data::Between {
            let _lock = self.stop_pods(place, &plan.etcd).map_err(Error::Between)?;
            place.put_restored(record).map_err(failed)?;
        }
        self.job.phase("etcd start");
        self.start(place).map_err(failed)?;
        self.wait_for_api(record)?;
        self.reached("answered");
        place.end().map_err(failed)?;
        (self.tell)(&plan.done());
        Ok(())
    }

    /// Gives etcd its old data back, if a restoration has begun and has not succeeded.
    pub fn undo(&self, options: &Options) -> Result<(), Error> {
        let (etcd, place, _) = self.manifests().map_err(Error::Refused)?;
        let begun = place
            .record()
            .map_err(|error| Error::Refused(error.to_string().into()))?;
        let record = begun.ok_or_else(|| Error::Refused("no restoration has begun".into()))?;
        let folder = place.of(&record, "");
        if !folder.exists() {
            return Err(Error::Refused(failed_check!(
                "{} is gone, and with it the old data: if the cluster works, delete {}",
                folder.display(),
                place.folder().display()
            )));
        }
        if place.data(&record) == Data::Restored
            && (self.api)().is_ok_and(|revision| revision >= record.revision)
        {
            return Err(Error::Refused(
                "the restoration has succeeded: the API server has the objects of the snapshot. To end it, run the command with the \
                 snapshot and without --undo"
                    .into(),
            ));
        }
        (self.tell)(&format!(
            "etcd and the API server stop, etcd gets its old data back ({}) if they were replaced, and both start",
            place.of(&record, "before").display(),
        ));
        if !self.agreed(options, "Undo the restoration?")? {
            return Ok(());
        }
        if place.data(&record) != Data::Before {
            self.job.phase("etcd stop");
            let _lock = self.stop_pods(&place, &etcd).map_err(Error::Between)?;
            place.put_back(&record).map_err(failed)?;
            self.reached("put back");
        }
        self.job.phase("etcd start");
        self.start(&place).map_err(failed)?;
        place.end().map_err(failed)?;
        (self.tell)(&format!(
            "etcd has its old data. Delete {} when you do not need it: it has every Secret of the cluster",
            folder.display()
        ));
        Ok(())
    }

    /// Returns whether the operator agrees. After a dry run, nobody is asked.
    fn agreed(&self, options: &Options, question: &str) -> Result<bool, Error> {
        if options.is_dry_run {
            (self.tell)("this run has changed nothing");
            return Ok(false);
        }
        if !options.is_agreed {
            (self.ask)(question).map_err(Error::Between)?;
        }
        Ok(true)
    }

    fn has_begun(&self) -> bool {
        let place = self.manifests().map(|(_, place, _)| place);
        place.is_ok_and(|place| !matches!(place.record(), Ok(None)))
    }

    fn reached(&self, step: &str) {
        (self.reached)(step);
    }

    fn manifests(&self) -> Result<(EtcdManifest, RestoreFolders, String), FailedCheck> {
        let [api_server, etcd] = PODS.map(|pod| {
            let path = place::manifest(self.kubernetes, pod)?;
            let text = fs::read_to_string(&path);
            let text = text.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            Ok::<_, FailedCheck>((path, text))
        });
        let named = |path: &Path, why: FailedCheck| failed_check!("{}: {why}", path.display());
        let (path, text) = etcd?;
        let etcd = EtcdManifest::parse(&text).map_err(|why| named(&path, why))?;
        let (path, text) = api_server?;
        let api_server = manifest::api_server(&text).map_err(|why| named(&path, why))?;
        let place = RestoreFolders {
            kubernetes: self.kubernetes.into(),
            data: etcd.data.clone(),
        };
        Ok((etcd, place, api_server))
    }

    /// Refuses what is not safe. The error is a sentence.
    fn check(&self, options: &Options) -> Result<Plan, FailedCheck> {
        let (etcd, place, api_server) = self.manifests()?;
        let salt = NodeState::read(self.root).map_err(|error| error.to_string())?;
        let named = |why: FailedCheck| failed_check!("{}: {why}", self.snapshot.display());
        let copy = PrivateCopy::new(self.snapshot, &place.data).map_err(named)?;
        let snapshot = snapshot::read(&copy, &salt.measurement_salt).map_err(named)?;
        if !snapshot.is_of_cluster {
            return Err(named(
                "it does not contain this cluster's measurement salt, so it is from another cluster, or older than `firstlight init`".into(),
            ));
        }
        let voucher = Voucher::of(self.snapshot, &snapshot, self.kubernetes, &options.unsigned)?;
        self.check_version(&etcd)?;
        let begun = place.record().map_err(|error| error.to_string())?;
        let data = begun.as_ref().map_or(Data::Before, |it| place.data(it));
        if begun.as_ref().is_some_and(|it| it.hash != snapshot.hash) {
            return Err("a restoration with another snapshot has begun: use that one, or first `bootstrapper restore-etcd --undo`".into());
        }
        let (state, others) = match (&begun, data) {
            (_, Data::Unclear) => {
                return Err(failed_check!(
                    "`bootstrapper restore-etcd --undo` was interrupted, or another program has changed {}: only --undo can continue",
                    place.data.display()
                ));
            }
            (Some(record), Data::Between | Data::Restored) => {
                let members = record.others.clone();
                let notes = vec![];
                (None, Others { members, notes })
            }
            _ => {
                let state = checks::state(&etcd, &place, self.settle / LOOK, self.stop)?;
                (Some(state), checks::others(&etcd, &place, copy.file())?)
            }
        };
        // when etcd is restored, a new machine may have the address of a lost one
        let silent = match data {
            Data::Restored => vec![],
            _ => checks::silent(&others.members, self.connect)?,
        };
        if state.is_some() {
            self.check_api()?;
        }
        let has_begun = begun.is_some();
        let record = match begun {
            Some(record) => record,
            None => RestoreRecord {
                hash: snapshot.hash.clone(),
                revision: self.revision(&copy)? + BUMP,
                time: SystemTime::UNIX_EPOCH
                    .elapsed()
                    .unwrap_or_default()
                    .as_secs(),
                others: others.members.clone(),
            },
        };
        let present = match data {
            Data::Between | Data::Restored => place.of(&record, "before/snap/db"),
            _ => place.database(),
        };
        Ok(Plan {
            changes: Changes::read(copy.file(), &present),
            etcd,
            place,
            api_server,
            snapshot,
            copy,
            voucher,
            state,
            others,
            silent,
            record,
            has_begun,
        })
    }

    /// Refuses if the API server answers, at the address of the cluster. The error is a sentence.
    fn check_api(&self) -> Result<(), FailedCheck> {
        match (self.api)() {
            Err(error) if error.is_silent => Ok(()),
            Ok(_) => Err(
                "the API server answers, so etcd has a majority: there is nothing to restore"
                    .into(),
            ),
            Err(error) => Err(failed_check!(
                "an API server answers, so etcd may have a majority: {}",
                error.why
            )),
        }
    }

    /// Refuses an etcdutl of another minor version than etcd's.
    fn check_version(&self, etcd: &EtcdManifest) -> Result<(), FailedCheck> {
        let said = self.etcdutl(&["version"])?;
        let version = said
            .lines()
            .find_map(|line| line.strip_prefix("etcdutl version: "));
        let minor = |version: &str| {
            let mut parts = version.split(['.', '-']).map(str::parse::<u32>);
            Some((parts.next()?.ok()?, parts.next()?.ok()?))
        };
        match (
            version.and_then(minor),
            minor(etcd.tag.trim_start_matches('v')),
        ) {
            (Some(tool), Some(etcd)) if tool == etcd => Ok(()),
            // an image of the user's own
            (Some(_), None) => Ok(()),
            _ => Err(failed_check!(
                "{} is etcdutl {}, but etcd of this node is {}: use the etcdutl of the same release",
                self.etcdutl.display(),
                shown(version.unwrap_or("of no known version")),
                shown(&etcd.tag)
            )),
        }
    }

    /// Returns the revision of the snapshot.
    fn revision(&self, copy: &PrivateCopy) -> Result<u64, FailedCheck> {
        let snapshot = copy.path().display().to_string();
        let said = self.etcdutl(&["snapshot", "status", &snapshot, "--write-out", "json"])?;
        let status = said
            .lines()
            .find_map(|line| serde_json::from_str::<Value>(line).ok());
        let revision = status.and_then(|status| status.get("revision")?.as_u64());
        revision
            .filter(|revision| *revision <= u64::MAX - BUMP)
            .ok_or_else(|| "the output of `etcdutl snapshot status` has no revision".into())
    }

    /// Runs etcdutl; returns what it prints.
    fn etcdutl(&self, arguments: &[&str]) -> Result<String, FailedCheck> {
        let mut command = Command::new(self.etcdutl);
        command.args(arguments).current_dir("/");
        let said = child_process::output(&mut command, ETCDUTL, self.stop, &mut |line| {
            log::debug!("{line}");
        });
        let said = said.map_err(|error| error.to_string())?;
        Ok(String::from_utf8_lossy(said.expose()).into_owned())
    }

    /// Makes the data of the snapshot, if they are not complete.
    fn make_data(&self, plan: &Plan) -> Result<(), Step> {
        let Plan {
            place,
            record,
            etcd,
            copy,
            ..
        } = plan;
        if place.is_restored(record) {
            return Ok(());
        }
        let path = place.restoring(record)?;
        let mut restore = Command::new(self.etcdutl);
        restore.args(etcdutl_arguments(
            &copy.path(),
            &path,
            &etcd.name,
            &etcd.url,
            record.time,
        ));
        setup::run(restore.current_dir("/"), ETCDUTL, self.stop, self.job)?;
        place.restored(record, &path)
    }

    /// Stops both pods, and gives etcd the data of the snapshot. Until then, a failure starts both again.
    fn replace_data(&self, plan: &Plan) -> Result<(), Error> {
        let Plan {
            place,
            record,
            etcd,
            ..
        } = plan;
        let members = &plan.others.members;
        // the question and etcdutl may have taken long
        let safe = checks::state(etcd, place, self.settle / LOOK, self.stop)
            .and_then(|_| self.check_api())
            .and_then(|()| checks::silent(members, self.connect));
        safe.map_err(Error::Between)?;
        let stopped = self.stop_pods(place, etcd).and_then(|lock| {
            self.reached("stopped");
            // they had time to come back
            checks::silent(members, self.connect).map(|_| lock)
        });
        let _lock = stopped.map_err(|why| Error::Back(why, self.start(place)))?;
        place.put_aside(record).map_err(failed)?;
        self.reached("aside");
        place.put_restored(record).map_err(failed)?;
        self.reached("replaced");
        Ok(())
    }

    /// Lets the kubelet stop both pods. Returns the lock of etcd's database, if there is one. The error is a sentence.
    fn stop_pods(
        &self,
        place: &RestoreFolders,
        etcd: &EtcdManifest,
    ) -> Result<Option<fs::File>, FailedCheck> {
        let api_server = manifest::api_server(&self.read(place, PODS[0])?)?;
        let arguments = [
            format!("--advertise-address={api_server}"),
            format!("--name={}", etcd.name),
        ];
        for pod in PODS {
            place
                .set_running(pod, false)
                .map_err(|error| error.to_string())?;
            self.reached(pod);
        }
        self.job
            .line("waiting until the kubelet has stopped etcd and the API server");
        let end = Instant::now() + STOPPED;
        let (mut lock, mut quiet) = (None, None);
        loop {
            let running = PODS
                .iter()
                .zip(&arguments)
                .find(|(pod, argument)| checks::runs(Path::new("/proc"), pod, argument));
            // a database that is damaged may be missing
            if lock.is_none() && place.database().exists() {
                lock = place.lock().map_err(|error| error.to_string())?;
            }
            let is_free = lock.is_some() || !place.database().exists();
            if running.is_none() && is_free {
                // the kubelet may be about to start a pod again whose manifest it has not missed yet
                let since: Instant = *quiet.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.settle {
                    return Ok(lock);
                }
            } else {
                quiet = None;
            }
            if self.stop.wait(PAUSE) {
                return Err("stopped by a signal".into());
            }
            if Instant::now() > end {
                return Err(failed_check!(
                    "{} still runs {} min after its manifest was moved: does the kubelet run? firstlight logs NODE --unit kubelet",
                    running.map_or(PODS[1], |(pod, _)| *pod),
                    STOPPED.as_secs() / 60
                ));
            }
        }
    }

    fn read(&self, place: &RestoreFolders, pod: &str) -> Result<String, FailedCheck> {
        let path = place::manifest(&place.kubernetes, pod)?;
        fs::read_to_string(&path)
            .map_err(|error| failed_check!("cannot read {}: {error}", path.display()))
    }

    /// Lets the kubelet start both pods.
    fn start(&self, place: &RestoreFolders) -> Result<(), Step> {
        for pod in PODS.into_iter().rev() {
            place.set_running(pod, true)?;
            self.reached(pod);
        }
        Ok(())
    }

    /// Waits until the API server has the objects of the snapshot.
    fn wait_for_api(&self, record: &RestoreRecord) -> Result<(), Error> {
        self.job
            .line("waiting until the API server has the objects of the snapshot");
        let end = Instant::now() + STARTED;
        let mut said = String::new();
        loop {
            let why = match (self.api)() {
                Ok(revision) if revision >= record.revision => return Ok(()),
                Ok(revision) => format!(
                    "it has revision {revision}, which is before {}",
                    record.revision
                ),
                Err(error) => error.why,
            };
            if why != said {
                self.job.line(&why);
                said.clone_from(&why);
            }
            if self.stop.wait(PAUSE) {
                return Err(Error::Between("stopped by a signal".into()));
            }
            if Instant::now() > end {
                return Err(Error::Between(failed_check!(
                    "the API server does not have the objects of the snapshot after {} min: {why}; see the logs of etcd and of the API \
                     server below /var/log/pods/",
                    STARTED.as_secs() / 60
                )));
            }
        }
    }
}

impl Plan {
    /// Returns what the operator has to do after the restoration.
    fn done(&self) -> String {
        let mut lost = String::new();
        for member in &self.others.members {
            if !member.name.is_empty() {
                lost = lost + " " + &shown(&member.name);
            }
        }
        let remove = if lost.is_empty() {
            String::new()
        } else {
            format!(
                " Next, from your own machine:\n  firstlight node remove{lost} --machines-off\nThen start new machines, or the old ones with \
             blank disks."
            )
        };
        format!(
            "etcd is restored: a cluster of one member, {}.{remove} When the cluster is good, delete the snapshot on this node and each folder \
             {}: all have every Secret of the cluster",
            shown(&self.etcd.name),
            self.place.data.join("restore-*").display()
        )
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan {
            etcd,
            place,
            snapshot,
            voucher,
            changes,
            record,
            ..
        } = self;
        writeln!(
            f,
            "This member of etcd: {}, {}, {}, data in {}",
            shown(&etcd.name),
            etcd.url,
            shown(&etcd.tag),
            etcd.data.display()
        )?;
        let state = match self.state {
            Some(EtcdState::Leaderless) => {
                "it runs and has no leader; the API server does not answer"
            }
            Some(EtcdState::Stopped) => {
                "it does not run, and its data are there; the API server does not answer"
            }
            None => {
                "it has the data of the snapshot already, or a part: this run continues an interrupted one"
            }
        };
        writeln!(f, "  {state}")?;
        for note in &self.others.notes {
            writeln!(f, "  {note}")?;
        }
        for said in &self.silent {
            writeln!(f, "Other member: {said}")?;
        }
        writeln!(
            f,
            "Snapshot: revision {}, {} bytes of this cluster, SHA-256 {}; later changes are lost",
            record.revision - BUMP,
            snapshot.length,
            snapshot.hash
        )?;
        writeln!(f, "  {voucher}")?;
        match changes {
            Ok(changes) => writeln!(f, "{changes}")?,
            Err(why) => writeln!(
                f,
                "Cannot tell which roles, bindings, admission policies, webhooks and records it changes: {why}"
            )?,
        }
        write!(
            f,
            "1. etcdutl makes the data of a cluster of one member, in {}\n\
             2. etcd and the API server stop: their manifests move to {}\n\
             3. {} moves to {}, and the data of the snapshot take its place\n\
             4. both start again, and the API server (at {}) must have revision {} or a later one\n\
             The machines of all other members must be off, and stay off, also if this node only cannot reach them: with their disks they \
             would be a second cluster of the same name",
            place.of(record, "restored").display(),
            place.folder().display(),
            place.member().display(),
            place.of(record, "before").display(),
            shown(&self.api_server),
            record.revision
        )
    }
}

fn failed(error: Step) -> Error {
    Error::Between(error.to_string().into())
}

/// Prints a text for the operator at the terminal.
fn print(text: &str) {
    // if standard output is closed, nobody reads it
    let _ = writeln!(io::stdout(), "{text}");
}

/// Asks the operator at the terminal. The error is a sentence.
fn ask(question: &str) -> Result<(), FailedCheck> {
    if !io::stdin().is_terminal() {
        let text =
            "standard input is not a terminal, so the command cannot ask: give --yes or --dry-run";
        return Err(text.into());
    }
    print(&format!("{question} Type yes:"));
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    match (read, answer.trim()) {
        (Ok(_), "yes") => Ok(()),
        _ => Err("the answer was not yes".into()),
    }
}

#[cfg(test)]
mod tests;
