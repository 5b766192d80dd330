//! `firstlight recover --all`: brings the nodes of a cluster back after all were off.
//!
//! ```text
//!              ┌──── no answer, asked again ────┐
//!              ▼                                │
//!   asking ─► verified ─► key sent ─► opened ─► member
//!     │          │            │
//!     │          │            └─► rejected: the key does not open its disk
//!     │          └─ a worker: its cluster opens its disk ─► member
//!     └─► refused: it does not meet the policy
//! ```
//!
//! The nodes themselves show how far a recovery is, so a run that was cut off is only started again:
//! a node that waits has its recovery server (port 9999), and a node that is back proves on port 9000
//! that it is a member of the cluster.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::board::{Board, RecoveryState, Row};
use super::calls::{self, RecoverySecrets};
use super::targets::{self, Target};
use crate::cluster::init::expected_cluster_id;
use crate::shell::{
    error::{ATTESTATION_REFUSED, Error, FRESH, OTHER_CLUSTER, UNREACHABLE, WAITS_FOR_KEY},
    interrupt,
    output::{Output, say_all},
    progress::{Progress, human},
};
use crate::workspace::{
    connect::{
        Attempt, ClusterMembership, Endpoint, Node, Noted, Reached, TpmTrust, and_known,
        read_policy_of,
    },
    master_secret::SecretSource,
    state::State,
};
use base::crypto::CLUSTER_ID_LEN;
use base::machines::Role;
use base::master_secret::MasterSecret;
use base::program::FAILED;
use base::sync::lock;
use base::text::hex;
use base::time;
use proto::init;
use proto::recoverproto::StatusResponse;
use rpc::grpc::{Code, Status};
use serde_json::json;
use verifier::{KeyName, Policy, Refusal, Stage, Validator, Variant};

/// The exit codes, the most severe first: that of the command is that of its worst node.
const SEVERITY: [u8; 6] = [
    ATTESTATION_REFUSED,
    FAILED,
    OTHER_CLUSTER,
    FRESH,
    WAITS_FOR_KEY,
    UNREACHABLE,
];
/// How often a node is asked whether it is back, or still waits.
const WATCH: Duration = Duration::from_secs(5);
/// The longest pause before a node that does not answer is asked again.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long the recovery server of a node still answers after the node has got its key, with a wide
/// margin. Later, the node waits again.
const AFTER_OPENING: Duration = Duration::from_secs(15);
/// How many nodes the last error names.
const NAMED: usize = 10;

/// The options of the command line.
pub struct Options {
    /// The nodes that the operator names, in place of those in the state file.
    pub nodes: Option<String>,
    /// The attestation policy that the nodes must meet.
    pub policy: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// The TPMs that may get the master secret.
    pub trust: TpmTrust,
    /// The state file, which has the ID of the cluster, its nodes and their keys.
    pub state: PathBuf,
    /// The source of the master secret.
    pub master_secret: SecretSource,
    /// Whether nothing is sent.
    pub is_dry_run: bool,
    /// How many nodes are asked at the same time.
    pub at_once: usize,
    /// How long workers may take to come back by themselves.
    pub rejoin_within: Duration,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let deadline = Instant::now() + options.timeout;
    let (state, cluster) = cluster_of(options)?;
    let policy = read_policy_of(options.variant, &options.policy)?;
    let known: BTreeSet<KeyName> = state
        .attestation_keys
        .iter()
        .copied()
        .chain(state.nodes.iter().filter_map(|node| node.key))
        .collect();
    let waiting = policy.clone().at(Stage::Initramfs).expecting_fresh();
    let trust = options.trust.clone().and_known(known.iter().copied());
    let judge = trust.validator(options.variant, waiting)?;
    let kms = options.master_secret.read()?;
    check_secret(&kms, &state, &cluster)?;
    let targets = targets_of(options, &state, &judge)?;
    let fleet = Fleet {
        options,
        cluster,
        policy: and_known(policy, known.iter().copied())?,
        judge,
        key: RecoverySecrets {
            kms,
            measurement_salt: Vec::new(),
        },
        known,
        board: Board::new(targets, options.is_dry_run),
        deadline,
        majority: OnceLock::new(),
        unsaved: Mutex::new(None),
        state,
    };
    fleet.drive();
    fleet.report()
}

/// Returns the state of the cluster, and the cluster's ID.
fn cluster_of(options: &Options) -> Result<(State, [u8; CLUSTER_ID_LEN]), Error> {
    let state = State::open(&options.state)?;
    match state.cluster_id {
        Some(id) => Ok((state, id)),
        None => Err(Error::content(format!(
            "{}: it has no clusterID: its init has not ended, or the file was made again. `firstlight cluster-id` prints the ID",
            options.state.display()
        ))),
    }
}

/// Checks that the master secret is that of the cluster, before any node gets it.
fn check_secret(
    kms: &MasterSecret,
    state: &State,
    cluster: &[u8; CLUSTER_ID_LEN],
) -> Result<(), Error> {
    let made = expected_cluster_id(kms, &state.measurement_salt)?;
    if made == *cluster {
        Ok(())
    } else {
        Err(Error::content(format!(
            "the state file is of the cluster {}, and this master secret makes the cluster {}: one of the two belongs to another \
         cluster. Nothing was sent",
            hex(cluster),
            hex(&made)
        )))
    }
}

/// Returns the nodes that the operator names, or else those in the state file.
fn targets_of(
    options: &Options,
    state: &State,
    judge: &Arc<dyn Validator>,
) -> Result<Vec<Target>, Error> {
    let targets = match &options.nodes {
        None => {
            if let Some(listed) = state.nodes_listed {
                let age = SystemTime::now().duration_since(listed).unwrap_or_default();
                options.output.say(format_args!(
                    "{} nodes, as the API server listed them at {} ({} ago)",
                    state.nodes.len(),
                    time::seconds(listed),
                    human(age)
                ))?;
            }
            targets::in_state(state)?
        }
        Some(text) => {
            let (mut targets, networks) = targets::named(text, state)?;
            if !networks.is_empty() {
                let progress = Progress::on_stderr();
                progress.phase("looking for nodes that wait");
                let found = targets::scan(&networks, judge, state);
                progress.line(format!("found {} nodes that wait", found.len()));
                let is_new =
                    |it: &Target| !targets.iter().any(|named| named.endpoints == it.endpoints);
                let found: Vec<Target> = found.into_iter().filter(is_new).collect();
                targets.extend(found);
            }
            targets
        }
    };
    match targets.is_empty() {
        false => Ok(targets),
        true if options.nodes.is_some() => Err(Error::Unreachable(
            "--nodes: no node was found that waits for its key".into(),
        )),
        true => Err(Error::content(format!(
            "{}: it has no nodes: name them by --nodes. While the API server works, `firstlight status` saves them there",
            options.state.display()
        ))),
    }
}

/// A run of the command.
struct Fleet<'a> {
    options: &'a Options,
    cluster: [u8; CLUSTER_ID_LEN],
    /// The policy for booted nodes.
    policy: Policy,
    /// Judges a node that waits for its key.
    judge: Arc<dyn Validator>,
    key: RecoverySecrets,
    /// The attestation keys in the state file.
    known: BTreeSet<KeyName>,
    state: State,
    board: Board,
    deadline: Instant,
    /// When more than half of the control planes had opened their disks.
    majority: OnceLock<Instant>,
    /// Why the state file lacks the key of a recovered node.
    unsaved: Mutex<Option<Error>>,
}

/// What a node's servers say.
enum Look {
    /// It waits for its key, and meets the policy.
    Waits(Reached, Result<StatusResponse, Status>),
    /// It has booted.
    Booted(ClusterMembership),
    /// It does not meet the policy.
    Refused(Refusal),
    /// No server answers.
    Nobody(String),
}

impl Fleet<'_> {
    /// Asks the nodes, several at the same time, until all are done or the deadline.
    fn drive(&self) {
        let workers = self.options.at_once.min(self.board.rows().len());
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some((index, endpoints)) = self.board.next(self.deadline) {
                        self.step(index, &endpoints);
                        self.board.release(index);
                    }
                });
            }
            self.board.paint(self.deadline);
        });
    }

    /// Asks one node, and does what it needs.
    fn step(&self, index: usize, endpoints: &[Endpoint]) {
        let mut failure = None;
        for endpoint in endpoints {
            let look = self.look(endpoint);
            if let Look::Nobody(reason) = look {
                failure.get_or_insert(reason);
                continue;
            }
            self.board.change(index, |rows| {
                rows[index].endpoint = endpoint.clone();
                rows[index].tries = 0;
            });
            return match look {
                Look::Waits(reached, status) => self.waits(index, reached, status),
                Look::Booted(standing) => self.booted(index, standing),
                Look::Refused(why) => self.board.change(index, |rows| {
                    rows[index].becomes(RecoveryState::Refused, why.to_string());
                    rows[index].refusal = Some(why);
                }),
                Look::Nobody(_) => {}
            };
        }
        let reason = failure.unwrap_or_default();
        self.board
            .change(index, |rows| unreachable(&mut rows[index], &reason));
    }

    /// Asks the recovery server at this address, and then the server of a booted node.
    fn look(&self, endpoint: &Endpoint) -> Look {
        let node = Node::judged_by(endpoint, self.judge.clone());
        let reason = match node.attempt(self.deadline) {
            Ok(reached) => {
                let status = calls::status(&reached.channel);
                return Look::Waits(reached, status);
            }
            Err(Attempt::Refused(why)) => return Look::Refused(why),
            Err(Attempt::Passing(reason)) => reason.text,
        };
        let noted = Arc::default();
        let booted = Node::in_any_standing(
            &endpoint.clone().at(init::PORT),
            self.options.variant,
            &self.policy,
            Some(&self.cluster),
            &noted,
        );
        match booted.map(|node| node.attempt(self.deadline)) {
            Ok(Ok(_)) => Look::Booted(
                noted
                    .get()
                    .map_or(ClusterMembership::Other, |it: &Noted| it.standing),
            ),
            Ok(Err(Attempt::Refused(why))) => Look::Refused(why),
            Ok(Err(Attempt::Passing(_))) => Look::Nobody(reason),
            Err(error) => Look::Nobody(error.to_string()),
        }
    }

    fn booted(&self, index: usize, standing: ClusterMembership) {
        self.board.change(index, |rows| {
            let row = &mut rows[index];
            row.again_in(WATCH);
            match standing {
                ClusterMembership::Member => row.becomes(RecoveryState::Member, ""),
                ClusterMembership::Fresh => row.becomes(
                    RecoveryState::Fresh,
                    "it has booted with a new disk, and belongs to no cluster",
                ),
                ClusterMembership::Other => row.becomes(
                    RecoveryState::OtherCluster,
                    format!(
                        "it is a member of another cluster than {}",
                        hex(&self.cluster)
                    ),
                ),
            }
        });
    }

    /// Sends the key to a node that waits, unless it may come back by itself.
    fn waits(&self, index: usize, reached: Reached, status: Result<StatusResponse, Status>) {
        let is_turn = self.board.change(index, |rows| {
            let majority = self.majority(rows);
            let row = &mut rows[index];
            row.key = reached.key;
            if let Some(known) = row.key.and_then(|key| targets::with_key(&self.state, &key)) {
                (row.target.name, row.target.role) = (known.name.clone(), known.role);
            }
            if let Ok(status) = &status {
                row.disk = status.disk_uuid.clone();
            }
            let is_just_opened =
                row.state == RecoveryState::Opened && row.since.elapsed() < AFTER_OPENING;
            if is_just_opened {
                row.again_in(WATCH);
                return false;
            }
            let waits = match self.options.is_dry_run {
                true => Some(status.as_ref().map(calls::summary).unwrap_or_default()),
                false if row.target.role == Role::Worker => self.wait_of_worker(majority),
                false => None,
            };
            match waits {
                Some(why) => {
                    row.becomes(RecoveryState::Verified, why);
                    row.again_in(WATCH);
                    false
                }
                None => {
                    row.becomes(RecoveryState::KeySent, "");
                    row.is_sent = true;
                    true
                }
            }
        });
        if is_turn {
            self.send(index, &reached, status.is_ok());
        }
    }

    /// Returns why a worker does not get the key yet; `None` if it is to get it.
    fn wait_of_worker(&self, (running, planes): (usize, usize)) -> Option<String> {
        let is_most = running * 2 > planes || planes == 0;
        if !is_most && self.majority.get().is_none() {
            let needed = planes / 2 + 1;
            return Some(format!(
                "it waits for its cluster: {running} of {planes} control planes have opened their disks, {needed} are needed"
            ));
        }
        let since = self.majority.get_or_init(Instant::now);
        let is_late = since.elapsed() >= self.options.rejoin_within;
        (planes > 0 && !is_late).then(|| {
            format!(
                "its cluster should open its disk; otherwise it gets the key {} after the control planes",
                human(self.options.rejoin_within)
            )
        })
    }

    /// Returns how many control planes have opened their disks, and how many there are.
    fn majority(&self, rows: &[Row]) -> (usize, usize) {
        use RecoveryState::{Member, Opened, Received};
        let planes = rows
            .iter()
            .filter(|row| row.target.role == Role::ControlPlane);
        let is_open = |row: &&Row| matches!(row.state, Opened | Received | Member);
        let running = planes.clone().filter(is_open).count();
        (running, planes.count())
    }

    fn send(&self, index: usize, reached: &Reached, tells_state: bool) {
        interrupt::means(
            "nodes that have got the key continue their boot; run the same command again to continue",
        );
        let answer = calls::bring(&reached.channel, &self.key, self.deadline);
        if let (Ok(()), Some(key)) = (&answer, reached.key)
            && !self.known.contains(&key)
        {
            self.save(key);
        }
        self.board.change(index, |rows| {
            let row = &mut rows[index];
            row.again_in(WATCH);
            match answer {
                Ok(()) if tells_state => {
                    row.becomes(RecoveryState::Opened, "it continues its boot")
                }
                // a node of Constellation proves nothing after its boot
                Ok(()) => row.becomes(
                    RecoveryState::Received,
                    "its console shows whether the key opens the disk",
                ),
                Err(status) => match status.code() {
                    Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => {
                        unreachable(row, &status.to_string());
                    }
                    _ => row.becomes(
                        RecoveryState::Rejected,
                        format!("it got the key, and continues to wait: {status}"),
                    ),
                },
            }
        });
    }

    /// Adds the key of a recovered node to the state file at once, so that a later run knows it.
    fn save(&self, key: KeyName) {
        let add = |state: &mut State| state.attestation_keys.extend([key]);
        if let Err(error) = State::change(&self.options.state, add) {
            lock(&self.unsaved).get_or_insert(error.into());
        }
    }

    /// Prints the report, and returns the result of the whole command.
    fn report(&self) -> Result<(), Error> {
        let options = self.options;
        options.output.json(&json!({
            "cluster": hex(&self.cluster),
            "dryRun": options.is_dry_run,
            "nodes": self.board.json(),
        }))?;
        if options.output == Output::Text {
            say_all(self.board.text().trim_end_matches('\n'))?;
        }
        if let Some(error) = lock(&self.unsaved).take() {
            return Err(error);
        }
        let rows = self.board.rows();
        let code = |row: &Row| row.state.code(options.is_dry_run);
        let left: Vec<&Row> = rows.iter().filter(|row| code(row) != 0).collect();
        let worst = SEVERITY
            .into_iter()
            .find(|worst| left.iter().any(|row| code(row) == *worst));
        let Some(worst) = worst else {
            return options.output.say(if options.is_dry_run {
                "Nothing was sent"
            } else {
                "All nodes are back"
            });
        };
        let named = left.iter().take(NAMED);
        let named = named.map(|row| format!("{} ({})", row.title(), row.state.name()));
        let mut named: Vec<String> = named.collect();
        if left.len() > NAMED {
            named.push(format!("and {} more", left.len() - NAMED));
        }
        let what = if options.is_dry_run {
            "would not get the key"
        } else {
            "are not back"
        };
        let text = format!(
            "{} of {} nodes {what}: {}",
            left.len(),
            rows.len(),
            named.join(", ")
        );
        Err(Error::State(worst, text))
    }
}

/// Notes that the node does not answer, and has it asked again.
fn unreachable(row: &mut Row, reason: &str) {
    let pause = Duration::from_secs(1 << row.tries.min(4)).min(LONGEST_PAUSE);
    row.tries += 1;
    row.again_in(pause);
    match (row.state, row.is_sent) {
        // it boots
        (RecoveryState::Opened, _) => {}
        (_, true) => row.becomes(
            RecoveryState::Unreachable,
            format!("{reason}\nThe key was sent before: it may have opened its disk and continued its boot"),
        ),
        (_, false) => row.becomes(RecoveryState::Unreachable, reason),
    }
}
