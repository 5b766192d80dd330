//! `firstlight`, the operator's command: `init`, `apply`, `recover`, `measure`. One file a command, and beside them what
//! they share: the operator's `files`, `connect` for reaching a node, `progress` for what is shown meanwhile.
//!
//! Results go to standard output, everything else to standard error. Exit codes are [`crate::program`]'s and the two here.

mod apply;
mod connect;
mod files;
mod init;
mod master_secret;
mod measure;
mod progress;
mod recover;
mod state;

use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use lexopt::prelude::*;
use log::LevelFilter;

use crate::bootstrapper::init_server;
use crate::kubernetes::services;
use crate::logger;
use crate::program::{self, Failure};
use crate::state_disk::recovery;
use crate::sys::process;
use connect::Endpoint;

/// The node proved to be something else than the policy wants. Trying again does not help.
pub const ATTESTATION_REFUSED: u8 = 3;
/// The node was not reached, or did not answer, in the time given.
pub const UNREACHABLE: u8 = 4;

/// What `--help` prints.
pub const HELP: &str = "\
firstlight: makes confidential virtual machines a cluster, and brings it back

Usage: firstlight COMMAND [OPTION]..

Commands:
  init      make a booted node the first of a new cluster
  apply     bring the services of the control planes into a cluster
  recover   bring the key to a node that waits for one to open its disk
  measure   write the attestation policy that a machine meets

Options:
  -h, --help      this text; after a command, that command's
      --version   the version

Exit codes:
  0  done
  1  failed, or the node refused
  2  the arguments make no sense
  3  attestation refused: the node is not what the policy wants; the text names register, expected and got
  4  the node was not reached, or did not answer, in the time given

Example, from a node's first boot to its recovery:
  firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --status
  firstlight recover --endpoint 10.42.1.100 --policy policy.json
";

const INIT_HELP: &str = "\
firstlight init: makes a booted node the first of a new cluster

Connects over attested TLS, checks that the node meets the policy, and hands it the master secret. Waits for a node that
still boots. May be repeated as long as the node was not initialised: it then uses the same master secret and salt.

Usage: firstlight init --endpoint HOST[:PORT] --policy FILE --init-secret FILE [OPTION]..

  --endpoint HOST[:PORT]  the node; port 9000 unless given
  --policy FILE           the attestation policy that it must meet (JSON)
  --init-secret FILE      the secret whose hash the node has, in a file that only you may read; - is standard input
  --master-secret FILE    made if there is none, mode 0600, never overwritten; who loses it cannot recover the cluster
                          [firstlight-mastersecret.json]
  --state FILE            measurement salt and cluster ID [firstlight-state.json]
  --kubeconfig FILE       where to put the administrator's kubeconfig; must not exist [firstlight-admin.conf]
  --log FILE              what the node says when it fails is added here [firstlight-cluster.log]
  --cluster-name NAME     [the node's default]
  --timeout TIME          for everything together, as 90s, 10m or 1h [10m]

Examples:
  firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt
  pass show cluster/init | firstlight init --endpoint [fd00::1]:9000 --policy policy.json --init-secret -
";

const APPLY_HELP: &str = "\
firstlight apply: brings the services of the control planes into a cluster

Join service and key service, with the master secret and the attestation policy, as the Helm chart in charts/firstlight
has them. May be repeated, also with another image or policy: the manifests of before are saved first, into a folder
with the date, and where the new ones are refused or do not get ready in time all is made as it was before.

Usage: firstlight apply --policy FILE --image IMAGE [OPTION]..

  --policy FILE         the attestation policy that nodes must meet (JSON)
  --image IMAGE         a container image with /join-service and /key-service
  --kubeconfig FILE     the administrator's [firstlight-admin.conf]
  --master-secret FILE  the cluster's master secret [firstlight-mastersecret.json]
  --state FILE          has the measurement salt [firstlight-state.json]
  --node-port PORT      of the join service on every control plane [30090]
  --backups DIR         where the folder with the manifests of before is made [.]
  --skip-wait           return when the API server has taken them; nothing is rolled back that does not get ready
  --timeout TIME        until they are ready, as 90s, 10m or 1h [10m]
  --print               print the manifests (JSON, with the master secret) and ask no cluster

Examples:
  firstlight apply --policy policy.json --image registry.example.com/firstlight:0.1.0
  firstlight apply --policy policy.json --image registry.example.com/firstlight:0.1.0 --skip-wait
";

const RECOVER_HELP: &str = "\
firstlight recover: brings the key to a node that waits for one to open its disk

A node whose cluster cannot let it in again, since no other control plane runs, waits in its initramfs. This command
connects to it over attested TLS, checks that it meets the policy, and hands it the master secret; it succeeds once the
node has opened its disk. Of several nodes behind one address it recovers one a run.

Usage: firstlight recover --endpoint HOST[:PORT] --policy FILE [OPTION]..

  --endpoint HOST[:PORT]  the node; port 9999 unless given
  --policy FILE           the attestation policy that it must meet (JSON)
  --master-secret FILE    the cluster's master secret [firstlight-mastersecret.json]
  --status                only ask what the node waits for: the disk, since when, what it tried
  --timeout TIME          for everything together, as 90s, 10m or 1h [10m]

Examples:
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --status
  firstlight recover --endpoint 10.42.1.100 --policy policy.json --master-secret /media/safe/mastersecret.json
";

const MEASURE_HELP: &str = "\
firstlight measure: writes the attestation policy that this machine meets

Run on a node of known good software, it prints a policy (JSON) that demands what the TPM's SHA-256 registers hold now.
PCR 15 is put down as zero, as it is in a node that belongs to no cluster yet.

Usage: firstlight measure [OPTION]..

  --tpm LOCATION  device:PATH or swtpm:host=ADDRESS,port=PORT [/dev/tpmrm0, else /dev/tpm0]
  --pcrs LIST     the registers to demand [4,8,9,11,12,13,15: those that the image decides]

Examples:
  firstlight measure > policy.json
  firstlight measure --tpm swtpm:host=127.0.0.1,port=2321 --pcrs 4,9,15
";

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
const MASTER_SECRET_FILE: &str = "firstlight-mastersecret.json";

/// The command of the arguments.
pub fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    logger::init(LevelFilter::Warn);
    // the master secret passes through here
    process::keep_memory_private()
        .map_err(|error| Failure::failed(format!("cannot keep memory out of core dumps: {error}")))?;
    match args.next()? {
        Some(Value(command)) => match command.to_str() {
            Some("init") => init::run(&init_options(args)?),
            Some("apply") => apply::run(&apply_options(args)?),
            Some("recover") => recover::run(&recover_options(args)?),
            Some("measure") => measure::run(&measure_options(args)?),
            Some("help") => Err(Failure::Help),
            _ => Err(Failure::Usage(format!("there is no command {command:?}"))),
        },
        Some(Long("help") | Short('h')) => Err(Failure::Help),
        Some(Long("version")) => Err(Failure::Version),
        Some(other) => Err(other.unexpected().into()),
        None => Err(Failure::Usage("a command is missing".into())),
    }
}

fn init_options(mut args: lexopt::Parser) -> Result<init::Options, Failure> {
    let (mut endpoint, mut policy, mut init_secret) = (None, None, None);
    let mut master_secret = PathBuf::from(MASTER_SECRET_FILE);
    let mut state = PathBuf::from("firstlight-state.json");
    let mut kubeconfig = PathBuf::from("firstlight-admin.conf");
    let mut log = PathBuf::from("firstlight-cluster.log");
    let mut cluster_name = String::new();
    let mut timeout = DEFAULT_TIMEOUT;
    while let Some(arg) = args.next()? {
        match arg {
            Long("endpoint") => endpoint = Some(endpoint_of(&mut args, init_server::PORT)?),
            Long("policy") => policy = Some(args.value()?.into()),
            Long("init-secret") => init_secret = Some(args.value()?.into()),
            Long("master-secret") => master_secret = args.value()?.into(),
            Long("state") => state = args.value()?.into(),
            Long("kubeconfig") => kubeconfig = args.value()?.into(),
            Long("log") => log = args.value()?.into(),
            Long("cluster-name") => cluster_name = program::text(args.value()?)?,
            Long("timeout") => timeout = timeout_of(&mut args)?,
            Long("help") | Short('h') => return Err(Failure::HelpOn(INIT_HELP)),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(init::Options {
        endpoint: needed(endpoint, "endpoint")?,
        policy: needed(policy, "policy")?,
        init_secret: needed(init_secret, "init-secret")?,
        master_secret,
        state,
        kubeconfig,
        log,
        cluster_name,
        timeout,
    })
}

fn apply_options(mut args: lexopt::Parser) -> Result<apply::Options, Failure> {
    let (mut policy, mut image) = (None, None);
    let mut kubeconfig = PathBuf::from("firstlight-admin.conf");
    let mut master_secret = PathBuf::from(MASTER_SECRET_FILE);
    let mut state = PathBuf::from("firstlight-state.json");
    let mut node_port = services::NODE_PORT;
    let mut backups = PathBuf::from(".");
    let (mut skip_wait, mut print) = (false, false);
    let mut timeout = DEFAULT_TIMEOUT;
    while let Some(arg) = args.next()? {
        match arg {
            Long("policy") => policy = Some(args.value()?.into()),
            Long("image") => image = Some(program::text(args.value()?)?),
            Long("kubeconfig") => kubeconfig = args.value()?.into(),
            Long("master-secret") => master_secret = args.value()?.into(),
            Long("state") => state = args.value()?.into(),
            Long("node-port") => node_port = program::parsed("node-port", args.value()?)?,
            Long("backups") => backups = args.value()?.into(),
            Long("skip-wait") => skip_wait = true,
            Long("print") => print = true,
            Long("timeout") => timeout = timeout_of(&mut args)?,
            Long("help") | Short('h') => return Err(Failure::HelpOn(APPLY_HELP)),
            other => return Err(other.unexpected().into()),
        }
    }
    let (policy, image) = (needed(policy, "policy")?, needed(image, "image")?);
    Ok(apply::Options {
        kubeconfig,
        policy,
        image,
        master_secret,
        state,
        node_port,
        backups,
        skip_wait,
        print,
        timeout,
    })
}

fn recover_options(mut args: lexopt::Parser) -> Result<recover::Options, Failure> {
    let (mut endpoint, mut policy, mut master_secret, mut status) = (None, None, None, false);
    let mut timeout = DEFAULT_TIMEOUT;
    while let Some(arg) = args.next()? {
        match arg {
            Long("endpoint") => endpoint = Some(endpoint_of(&mut args, recovery::PORT)?),
            Long("policy") => policy = Some(args.value()?.into()),
            Long("master-secret") => master_secret = Some(args.value()?.into()),
            Long("status") => status = true,
            Long("timeout") => timeout = timeout_of(&mut args)?,
            Long("help") | Short('h') => return Err(Failure::HelpOn(RECOVER_HELP)),
            other => return Err(other.unexpected().into()),
        }
    }
    let action = match (status, master_secret) {
        (true, None) => recover::Action::Status,
        (true, Some(_)) => return Err(Failure::Usage("--status needs no --master-secret".into())),
        (false, file) => recover::Action::Push(file.unwrap_or_else(|| MASTER_SECRET_FILE.into())),
    };
    Ok(recover::Options { endpoint: needed(endpoint, "endpoint")?, policy: needed(policy, "policy")?, action, timeout })
}

fn measure_options(mut args: lexopt::Parser) -> Result<measure::Options, Failure> {
    let mut options = measure::Options { tpm: None, pcrs: measure::PCRS.into() };
    while let Some(arg) = args.next()? {
        match arg {
            Long("tpm") => options.tpm = Some(program::parsed("tpm", args.value()?)?),
            Long("pcrs") => options.pcrs = pcrs_of(&program::text(args.value()?)?)?,
            Long("help") | Short('h') => return Err(Failure::HelpOn(MEASURE_HELP)),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(options)
}

fn pcrs_of(text: &str) -> Result<Vec<u32>, Failure> {
    let pcrs: Result<_, _> = text.split(',').map(str::parse).collect();
    pcrs.map_err(|_| Failure::Usage(format!("--pcrs {text:?}: expected numbers with commas between them, as 4,9,15")))
}

fn needed<T>(value: Option<T>, name: &str) -> Result<T, Failure> {
    value.ok_or_else(|| Failure::Usage(format!("--{name} is missing")))
}

fn endpoint_of(args: &mut lexopt::Parser, default_port: u16) -> Result<Endpoint, Failure> {
    let text = program::text(args.value()?)?;
    Endpoint::parse(&text, default_port).map_err(|error| Failure::Usage(format!("--endpoint: {error}")))
}

fn timeout_of(args: &mut lexopt::Parser) -> Result<Duration, Failure> {
    let text = program::text(args.value()?)?;
    time(&text).ok_or_else(|| Failure::Usage(format!("--timeout {text:?}: expected 1s to 24h, as 90s, 10m or 1h")))
}

/// A whole number of seconds, minutes or hours, from a second to a day.
fn time(text: &str) -> Option<Duration> {
    let unit = match text.chars().last()? {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return None,
    };
    let seconds = text[..text.len() - 1].parse::<u64>().ok()?.checked_mul(unit)?;
    (1..=24 * 3600).contains(&seconds).then(|| Duration::from_secs(seconds))
}

/// A result, on standard output.
fn say(result: impl Display) -> Result<(), Failure> {
    writeln!(io::stdout(), "{result}").map_err(|error| Failure::failed(format!("standard output: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_minutes_or_hours_within_a_day() {
        assert_eq!(time("90s"), Some(Duration::from_secs(90)));
        assert_eq!(time("10m"), Some(Duration::from_secs(600)));
        assert_eq!(time("24h"), Some(Duration::from_secs(86400)));
        for text in
            ["", "s", "0s", "25h", "-1s", "1.5h", "10", "10d", "99999999999999999999s", "1ü", "99999999999999999h"]
        {
            assert_eq!(time(text), None, "{text}");
        }
    }

    #[test]
    fn every_line_of_help_fits_a_wide_terminal() {
        for line in [HELP, INIT_HELP, APPLY_HELP, RECOVER_HELP, MEASURE_HELP].iter().flat_map(|help| help.lines()) {
            assert!(line.len() <= 120, "{line}");
        }
    }
}
