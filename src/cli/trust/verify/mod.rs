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
    output::{Output, say_all},
};
use crate::workspace::{
    connect::{Endpoint, KeyOptions, NodeOption},
    options::{Expectation, PolicyOptions, time},
    state::ClusterOptions,
};
use clap::Args;
pub use demand::EvidenceSource;
use demand::MachineRequirements;
use report::VerifyReport;
pub use report::{image_of, meaning};
use verifier::Variant;

/// Verify what a node or a join service proves
///
/// Connects over attested TLS, in the strong form if the peer knows it, and checks the policy and the cluster's ID
/// (PCR 15). It prints what was proven: the form, the role, the stage of the boot, the image, the cluster, the
/// attestation key, and why the policy accepts the key; what the hardware or the cloud signed about the platform;
/// then each register. A join service (port 30090) proves itself only in the strong form.
///
/// With --save the evidence is kept, also that of a machine that is refused: `firstlight verify --evidence` verifies
/// it again, by the same policy or another one, and `firstlight explain` shows the events behind its registers. A
/// file does not prove when it was written, so keep it as you keep a log.
///
/// The exit code is 0 if the machine proves all of it, 3 if it does not meet the policy, and 4 if it cannot be
/// reached. With -o json, standard output has the result in each of these cases.
#[derive(Debug, Args)]
#[command(mut_arg("host", |it| it.help("The server; the default port is 9000, and with --plain 30081")), after_help = "Examples:
  firstlight verify 10.42.1.100 --policy policy.json
  firstlight verify 10.42.1.100:30090 --policy policy.json -o json
  firstlight verify 10.42.1.100:9999 --policy policy.json --fresh --save evidence.json
  firstlight verify --evidence evidence.json --policy policy.json --fresh")]
pub(crate) struct CommandLine {
    #[command(flatten)]
    node: NodeOption,
    #[command(flatten)]
    pub policy: PolicyOptions,
    /// Verify evidence that --save wrote, instead of a server's
    #[arg(long, value_name = "FILE", conflicts_with_all = ["host", "endpoint", "plain"])]
    evidence: Option<PathBuf>,
    /// The server is a verification service as Constellation has it (`/verify.API/GetAttestation`), without TLS
    #[arg(long)]
    plain: bool,
    /// Write the evidence to this file, whether it is accepted or refused
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    #[command(flatten)]
    keys: KeyOptions,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// The machine must belong to no cluster, as before its init, or in its initramfs
    #[arg(long, conflicts_with = "cluster_id")]
    fresh: bool,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30s")]
    timeout: Duration,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        Ok(Options {
            source: match (self.evidence, self.node.host(), self.plain) {
                (Some(file), ..) => EvidenceSource::File(file),
                (None, Some(host), false) => {
                    EvidenceSource::Server(Endpoint::parse(host, proto::init::PORT)?)
                }
                (None, Some(host), true) => {
                    EvidenceSource::Plain(Endpoint::parse(host, proto::verify::NODE_PORT)?)
                }
                (None, None, _) => {
                    let text =
                        "name the server (HOST[:PORT]), or a file with its evidence (--evidence)";
                    return Err(Error::Usage(text.into()));
                }
            },
            expected: Expectation::of(self.policy, self.keys, self.cluster)?,
            is_fresh: self.fresh,
            save: self.save,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The source of the evidence.
    pub source: EvidenceSource,
    /// What the machine must be.
    pub expected: Expectation,
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
    let (source, variant) = (&options.source, options.expected.variant);
    let (demand, variant, presented, verdict) = match source {
        EvidenceSource::File(path) => {
            let (presented, variant) = presented::read(path)?;
            let demand = demand(options, variant)?;
            let verdict = presented.judged_by(&*demand.validator()?);
            (demand, variant, Some(presented), Ok(verdict))
        }
        EvidenceSource::Plain(endpoint) => {
            let demand = demand(options, variant)?;
            let (presented, verdict) = ask::plain(endpoint, &demand, options.timeout)?;
            (demand, variant, presented, verdict)
        }
        EvidenceSource::Server(endpoint) => {
            let demand = demand(options, variant)?;
            let (presented, verdict) = ask::attested(endpoint, &demand, options.timeout)?;
            (demand, variant, presented, verdict)
        }
    };
    if let (Some(path), Some(presented)) = (&options.save, &presented) {
        let text = presented.to_json(variant, &source.to_string());
        files::replace_private(path, text.as_bytes())?;
    }
    let report = VerifyReport::new(source, &demand, presented.as_ref(), verdict);
    say_all(&if options.output == Output::Json {
        report.json()
    } else {
        report.text()
    })?;
    match &report.verdict {
        report::VerifyOutcome::Proven => Ok(()),
        report::VerifyOutcome::Refused(why) => Err(Error::attestation(
            why.clone(),
            format!("{source}: attestation refused"),
        )),
        report::VerifyOutcome::Unreachable(why) => {
            Err(Error::Unreachable(format!("{source}: {why}")))
        }
    }
}

fn demand(options: &Options, variant: &'static Variant) -> Result<MachineRequirements, Error> {
    let (policy, cluster) = options.expected.read(variant)?;
    let cluster = if options.is_fresh {
        None
    } else {
        Some(cluster.ok_or_else(|| {
            Error::Usage(
                "the cluster's ID is unknown: give --cluster-id, a --state file that has it, or --fresh".into(),
            )
        })?)
    };
    let policy = match &cluster {
        Some(id) => policy.expecting_cluster(id),
        None => policy.expecting_fresh(),
    };
    Ok(MachineRequirements {
        variant,
        policy,
        cluster,
    })
}
