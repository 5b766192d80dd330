//! `firstlight verify`: shows what a node or a join service proves about its machine.
//!
//! [`demand`] has the requirements for the machine, [`ask`] gets the evidence of a server,
//! [`presented`] judges it, at once or later from a file, and [`report`] shows the result.

mod ask;
pub mod demand;
pub mod presented;
pub mod report;

use std::path::PathBuf;
use std::time::Duration;

use super::connect::read_policy_with;
use super::output::{Output, say_all};
use super::state::State;
use super::{ATTESTATION_REFUSED, UNREACHABLE, files};
use base::crypto::CLUSTER_ID_LEN;
use base::program::Failure;
use demand::Demand;
pub use demand::Source;
use report::Report;
pub use report::meaning;
use verifier::{KeyName, Variant};

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The source of the evidence.
    pub source: Source,
    /// The attestation policy that the machine must meet.
    pub policy: PathBuf,
    /// The attestation variant of the machine.
    pub variant: &'static Variant,
    /// Additional attestation keys that are accepted.
    pub keys: Vec<KeyName>,
    /// The state file, which has the cluster's ID and its nodes' attestation keys; it may be
    /// missing.
    pub state: PathBuf,
    /// The cluster's ID; replaces the one in the state file.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// Whether the machine must belong to no cluster.
    pub is_fresh: bool,
    /// The file to which the evidence is written.
    pub save: Option<PathBuf>,
    /// Whether the output is for a program.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let source = &options.source;
    let (demand, variant, presented, verdict) = match source {
        Source::File(path) => {
            let (presented, variant) = presented::read(path)?;
            let demand = demand(options, variant)?;
            let verdict = presented.judged_by(&*demand.validator()?);
            (demand, variant, Some(presented), Ok(verdict))
        }
        Source::Plain(endpoint) => {
            let demand = demand(options, options.variant)?;
            let (presented, verdict) = ask::plain(endpoint, &demand, options.timeout)?;
            (demand, options.variant, presented, verdict)
        }
        Source::Server(endpoint) => {
            let demand = demand(options, options.variant)?;
            let (presented, verdict) = ask::attested(endpoint, &demand, options.timeout)?;
            (demand, options.variant, presented, verdict)
        }
    };
    if let (Some(path), Some(presented)) = (&options.save, &presented) {
        let text = presented.to_json(variant, &source.to_string());
        files::replace_private(path, text.as_bytes()).map_err(Failure::failed)?;
    }
    let report = Report::new(source, &demand, presented.as_ref(), verdict);
    say_all(&match options.output == Output::Json {
        true => report.json(),
        false => report.text(),
    })?;
    let failed = |code, why: &str| {
        let text = format!("{source}: {why}");
        Err(Failure::Failed(code, text))
    };
    match &report.verdict {
        report::Verdict::Proven => Ok(()),
        report::Verdict::Refused(why) => {
            failed(ATTESTATION_REFUSED, &format!("attestation refused: {why}"))
        }
        report::Verdict::Unreachable(why) => failed(UNREACHABLE, why),
    }
}

fn demand(options: &Options, variant: &'static Variant) -> Result<Demand, Failure> {
    let state = State::find(&options.state).map_err(Failure::failed)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let policy = read_policy_with(&options.policy, &options.keys, known)?;
    let cluster = match options.is_fresh {
        true => None,
        false => {
            let of_state = state.as_ref().and_then(|state| state.cluster_id);
            let id = options.cluster_id.or(of_state);
            Some(id.ok_or_else(|| {
                Failure::Usage(
                    "the cluster's ID is unknown: give --cluster-id, a --state file that has it, or --fresh".into(),
                )
            })?)
        }
    };
    let policy = match &cluster {
        Some(id) => policy.expecting_cluster(id),
        None => policy.expecting_fresh(),
    };
    Ok(Demand {
        variant,
        policy,
        cluster,
    })
}
