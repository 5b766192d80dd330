//! `firstlight support`: facts of nodes, and what the API server says of them, in one archive, for a person who looks for a fault.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use flate2::Compression;
use flate2::write::GzEncoder;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Collection, EVENTS, NODES, PODS, Selector};
use kubernetes::machine_record::{MachineRecord, RECORDS};
use proto::node::{TIMELINE, TimelineRequest, TimelineResponse};
use proto::operator::{SUPPORT, SupportRequest, SupportResponse};
use rpc::grpc::{Code, Status};
use serde_json::{Value, json};

use super::session::{Operator, OperatorOptions};
use crate::shell::{error::Error, files, output::Output, progress::Progress};
use crate::workspace::{
    kubeconfig::{self, KubeconfigOption},
    options::time,
};

/// Maximum bytes that one node sends.
const MAX: usize = 64 << 20;

/// The files of a node, by their names.
type Facts = BTreeMap<String, Vec<u8>>;

/// Collect versions, settings, states and logs of nodes in an archive
///
/// Asks each node for its versions, settings, boot record, units, disks, addresses and journal, and the API server
/// for nodes, events, pods of kube-system and records of machines, and writes them into one archive. No secret of
/// Firstlight is in it, and no Secret of Kubernetes; programs of yours may have written theirs into the journal, so
/// look before you pass it on.
///
/// The node is verified, and the operator proves to have the master secret, or a certificate by it, as in `firstlight
/// logs`. A node or an API server that does not answer has the reason in the archive.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight support
  firstlight support worker-0 control-plane-0 --file fault.tar.gz")]
pub(crate) struct CommandLine {
    /// Names of nodes in the state file, or HOST[:PORT]; by default all of the state file
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,
    /// The archive; must not exist
    #[arg(long, value_name = "FILE", default_value = "firstlight-support.tar.gz")]
    file: PathBuf,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    pub operator: OperatorOptions,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "5m")]
    timeout: Duration,
}

/// Runs the command.
pub fn run(given: &CommandLine) -> Result<(), Error> {
    let CommandLine { file, output, .. } = given;
    let operator = Operator::of(&given.operator, given.timeout)?;
    let nodes = operator.named_or_all(&given.nodes)?;
    let mut archive = Facts::new();
    let mut failed = vec![];
    for node in &nodes {
        let folder = folder(node);
        match facts(&operator, node) {
            Ok(facts) => archive.extend(
                facts
                    .into_iter()
                    .map(|(name, it)| (format!("{folder}/{name}"), it)),
            ),
            Err(error) => {
                archive.insert(
                    format!("{folder}/no-answer"),
                    format!("{error}\n").into_bytes(),
                );
                failed.push(error.to_string());
            }
        }
    }
    let objects = objects(&given.kubeconfig.paths()).unwrap_or_else(|error| {
        Facts::from([("no-answer".into(), format!("{error}\n").into_bytes())])
    });
    archive.extend(
        objects
            .into_iter()
            .map(|(name, it)| (format!("kubernetes/{name}"), it)),
    );
    files::create_private(file, &tar_gz(&archive).map_err(Error::failed)?)?;
    output.json(&json!({"file": file, "nodes": nodes, "failed": failed}))?;
    output.say(format_args!(
        "The facts of {} nodes are in {}",
        nodes.len(),
        file.display()
    ))?;
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::Unreachable(failed.join("\n")))
    }
}

fn facts(operator: &Operator, node: &str) -> Result<Facts, Error> {
    let progress = Progress::on_stderr();
    let session = operator.connect(node, &progress)?;
    progress.phase(format!("reading the facts of {node}"));
    session.call(|channel, caller, options| {
        let (mut facts, mut size) = (Facts::new(), 0);
        let request = SupportRequest {
            caller: Some(caller),
        };
        for part in channel.server_streaming::<_, SupportResponse>(SUPPORT, &request, options)? {
            let part = part?;
            size += part.content.len() + part.name.len();
            if size > MAX || !is_name(&part.name) {
                let text = "the node sends more than 64 MiB, or a fact whose name is no name";
                return Err(Status::new(Code::OutOfRange, text));
            }
            facts.entry(part.name).or_default().extend(part.content);
        }
        let boot: TimelineResponse = channel.unary(TIMELINE, &TimelineRequest {}, options)?;
        facts.insert("boot-record".into(), boot.record.into_bytes());
        Ok(facts)
    })
}

/// Returns what the API server says of nodes: of each object only the fields that can have no secret.
fn objects(paths: &[PathBuf]) -> Result<Facts, Error> {
    let progress = Progress::on_stderr();
    let client = kubeconfig::reach(paths, &progress)?;
    progress.phase("reading objects of the API server");
    let records = Selector::labels(RECORDS);
    let mut facts = Facts::new();
    type Keep = fn(Value) -> Value;
    let mut add = |name: &str, collection: Collection, selector: &Selector, keep: Keep| {
        let content = match client.list_keeping(&collection, selector, keep) {
            Ok(list) => list.items.iter().map(|it| format!("{it}\n")).collect(),
            Err(error) => format!("{error}\n"),
        };
        facts.insert(name.into(), content.into_bytes());
    };
    let all = Selector::default();
    add("nodes", NODES.all(), &all, |node| {
        kept(&node, &["spec", "status"])
    });
    add("pods", PODS.in_namespace(NAMESPACE), &all, |pod| {
        let mut short = kept(&pod, &["status"]);
        short["spec"]["nodeName"] = pod["spec"]["nodeName"].clone();
        short
    });
    add(
        "records",
        CONFIG_MAPS.in_namespace(NAMESPACE),
        &records,
        |map| {
            let map = serde_json::from_value(map).unwrap_or_default();
            MachineRecord::read(&map).map_or(Value::Null, |record| record.to_object())
        },
    );
    for namespace in ["default", NAMESPACE] {
        let events = EVENTS.in_namespace(namespace);
        add(&format!("events-{namespace}"), events, &all, |event| {
            kept(
                &event,
                &[
                    "type",
                    "reason",
                    "regarding",
                    "note",
                    "eventTime",
                    "series",
                    "deprecatedLastTimestamp",
                ],
            )
        });
    }
    Ok(facts)
}

/// Returns the names, times and owners of an object, and these fields. An annotation can have anything.
fn kept(object: &Value, fields: &[&str]) -> Value {
    const METADATA: [&str; 6] = [
        "name",
        "namespace",
        "labels",
        "creationTimestamp",
        "deletionTimestamp",
        "ownerReferences",
    ];
    let mut short = json!({"metadata": {}});
    for field in METADATA {
        short["metadata"][field] = object["metadata"][field].clone();
    }
    for field in fields {
        short[*field] = object[*field].clone();
    }
    if let Some(status) = short["status"].as_object_mut() {
        // the list of images on a node is most of its object
        status.remove("images");
    }
    short
}

fn tar_gz(files: &Facts) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(vec![], Compression::default()));
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        archive.append_data(&mut header, name, &content[..])?;
    }
    archive.into_inner()?.finish()
}

/// Returns whether the name of a fact can be that of a file, whoever wrote it.
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Returns the folder of a node in the archive.
fn folder(node: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || ".-".contains(c) {
            c
        } else {
            '_'
        }
    };
    node.chars().map(plain).collect()
}
