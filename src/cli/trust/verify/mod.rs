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

use crate::shell::{
    error::Error,
    files,
    output::{OUTPUT, Output, say_all},
    usage::{Command, Given, Operand},
};
use crate::workspace::{
    connect::{ATTESTATION_KEY, ENDPOINT, Endpoint, host_of, keys_of, read_policy_with},
    options::{POLICY, TIMEOUT, VARIANT, time, variant_of},
    sources::{KEPT, OFFLINE},
    state::{CLUSTER_ID, CLUSTER_STATE, State, cluster_id},
};
use base::crypto::CLUSTER_ID_LEN;
use base::options::Opt;
use demand::Demand;
pub use demand::EvidenceSource;
use report::Report;
pub use report::{image_of, meaning, refusals};
use verifier::{KeyName, Variant};

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "verify",
    summary: "verify what a node or a join service proves",
    about: &[
        "Connects over attested TLS, in the strong form if the peer knows it, and checks the policy and the cluster's ID \
         (PCR 15). It prints what was proven: the form, the role, the stage of the boot, the image, the cluster, the attestation \
         key, and why the policy accepts the key; what the hardware or the cloud signed about the platform; then each register. \
         A join service (port 30090) proves itself only in the strong form.",
        "With --save the evidence is kept, also that of a machine that is refused: `firstlight verify --evidence` verifies it again, \
         by the same policy or another one, and `firstlight explain` shows the events behind its registers. A file does not prove \
         when it was written, so keep it as you keep a log.",
        "The exit code is 0 if the machine proves all of it, 3 if it does not meet the policy, and 4 if it cannot be reached. With \
         -o json, standard output has the result in each of these cases.",
    ],
    operand: Some(Operand {
        value: "HOST[:PORT]",
        words: &[],
        is_needed: false,
        help: "the server; the default port is 9000, and with --plain 30081",
    }),
    options: &[
        ENDPOINT,
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        Opt::value(
            "evidence",
            "FILE",
            "verify evidence that --save wrote, instead of a server's",
        ),
        Opt::flag(
            "plain",
            "ask a verification service (`/verify.API/GetAttestation`), as Constellation has, without TLS",
        ),
        Opt::value(
            "save",
            "FILE",
            "write the evidence to this file, whether it is accepted or refused",
        ),
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        Opt::flag(
            "fresh",
            "the machine must belong to no cluster, as before its init, or in its initramfs",
        ),
        OUTPUT,
        TIMEOUT.or("30s"),
    ],
    examples: &[
        "firstlight verify 10.42.1.100 --policy policy.json",
        "firstlight verify 10.42.1.100:30090 --policy policy.json -o json",
        "firstlight verify 10.42.1.100:9999 --policy policy.json --fresh --save evidence.json",
        "firstlight verify --evidence evidence.json --policy policy.json --fresh",
    ],
    run: |given| run(&options(given)?),
};

fn options(given: &Given) -> Result<Options, Error> {
    if given.has("fresh") && given.has("cluster-id") {
        return Err(Error::Usage(
            "--fresh and --cluster-id: give one of the two".into(),
        ));
    }
    Ok(Options {
        source: evidence_source(given)?,
        policy: given.path("policy"),
        variant: variant_of(given)?,
        keys: keys_of(given)?,
        state: given.path("state"),
        cluster_id: if given.has("cluster-id") {
            Some(given.parsed("cluster-id", cluster_id)?)
        } else {
            None
        },
        is_fresh: given.has("fresh"),
        save: given.has("save").then(|| given.path("save")),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn evidence_source(given: &Given) -> Result<EvidenceSource, Error> {
    let host = host_of(given)?;
    let endpoint = |port| match &host {
        None => {
            let text = "name the server (HOST[:PORT]), or a file with its evidence (--evidence)";
            Err(Error::Usage(text.into()))
        }
        Some(host) => Endpoint::parse(host, port),
    };
    match (given.has("evidence"), given.has("plain")) {
        (false, false) => Ok(EvidenceSource::Server(endpoint(proto::init::PORT)?)),
        (false, true) => Ok(EvidenceSource::Plain(endpoint(proto::verify::NODE_PORT)?)),
        (true, false) if host.is_none() => Ok(EvidenceSource::File(given.path("evidence"))),
        (true, _) => Err(Error::Usage(
            "--evidence: give neither a server nor --plain with it".into(),
        )),
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The source of the evidence.
    pub source: EvidenceSource,
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
pub fn run(options: &Options) -> Result<(), Error> {
    let source = &options.source;
    let (demand, variant, presented, verdict) = match source {
        EvidenceSource::File(path) => {
            let (presented, variant) = presented::read(path)?;
            let demand = demand(options, variant)?;
            let verdict = presented.judged_by(&*demand.validator()?);
            (demand, variant, Some(presented), Ok(verdict))
        }
        EvidenceSource::Plain(endpoint) => {
            let demand = demand(options, options.variant)?;
            let (presented, verdict) = ask::plain(endpoint, &demand, options.timeout)?;
            (demand, options.variant, presented, verdict)
        }
        EvidenceSource::Server(endpoint) => {
            let demand = demand(options, options.variant)?;
            let (presented, verdict) = ask::attested(endpoint, &demand, options.timeout)?;
            (demand, options.variant, presented, verdict)
        }
    };
    if let (Some(path), Some(presented)) = (&options.save, &presented) {
        let text = presented.to_json(variant, &source.to_string());
        files::replace_private(path, text.as_bytes())?;
    }
    let report = Report::new(source, &demand, presented.as_ref(), verdict);
    say_all(&if options.output == Output::Json {
        report.json()
    } else {
        report.text()
    })?;
    match &report.verdict {
        report::Verdict::Proven => Ok(()),
        report::Verdict::Refused(why) => Err(Error::Attestation(format!(
            "{source}: attestation refused: {why}"
        ))),
        report::Verdict::Unreachable(why) => Err(Error::Unreachable(format!("{source}: {why}"))),
    }
}

fn demand(options: &Options, variant: &'static Variant) -> Result<Demand, Error> {
    let state = State::find(&options.state)?;
    let known = state
        .iter()
        .flat_map(|state| state.attestation_keys.iter().copied());
    let policy = read_policy_with(&options.policy, &options.keys, known)?;
    let cluster = if options.is_fresh {
        None
    } else {
        let of_state = state.as_ref().and_then(|state| state.cluster_id);
        let id = options.cluster_id.or(of_state);
        Some(id.ok_or_else(|| {
            Error::Usage(
                "the cluster's ID is unknown: give --cluster-id, a --state file that has it, or --fresh".into(),
            )
        })?)
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
