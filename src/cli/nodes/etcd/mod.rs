//! `firstlight etcd snapshot`: saves the objects of the cluster in a file of the operator. `firstlight etcd restore` brings them back.
//!
//! `snapshot` makes etcd save them on a control plane, `download` brings them here, compares etcd's own hash and shows that they are of this
//! cluster, and `signer` signs them.

mod download;
mod restore;
mod signer;
mod snapshot;

use base::options::Opt;
use base::program;

use crate::nodes::operator::session::{CERTIFICATE, KEY, Operator, POLICY};
use crate::shell::{
    error::Error,
    output::{OUTPUT, Output},
    usage::{Command, Given, Operand, suggestion},
};
use crate::workspace::{
    connect::ATTESTATION_KEY,
    kubeconfig::{KUBECONFIG, kubeconfigs_of},
    master_secret::{MASTER_SECRET_FILE, SHARE_FILE, SecretSource, master_secret_of},
    options::{TIMEOUT, VARIANT, time},
    sources::{KEPT, OFFLINE},
    state::{CLUSTER_ID, CLUSTER_STATE},
};
use snapshot::Options;

const ACTIONS: [&str; 2] = ["snapshot", "restore"];
/// The options that only `restore` has.
const OF_RESTORE: [&str; 11] = [
    "node",
    "undo",
    "unsigned",
    "policy",
    "attestation-variant",
    "collateral",
    "offline",
    "attestation-key",
    "cluster-id",
    "certificate",
    "key",
];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "etcd",
    summary: "save the objects of the cluster in a file, or bring them back",
    about: &[
        "snapshot shows the plan, asks, and then: lets etcd of a control plane save a snapshot, by a Job for some seconds; brings it here through the \
         API server and the kubelet; compares the hash that etcd added; looks for what it has written into the cluster just before; and \
         deletes the Job and the file on the control plane. A control plane is what a record says is one, not a label.",
        "With the master secret it also writes FILE.signature, which says what the snapshot is of. restore verifies it. Keep both files.",
        "The file contains every Secret of the cluster in plaintext. It is created with mode 0600, and only if it is complete.",
        "restore is for a cluster whose etcd has lost its majority. It sends the snapshot to the control plane that is left. This node \
         checks that no other etcd runs, shows who signed the snapshot and which rights it changes, asks, and makes etcd a cluster of one \
         member with the objects of the snapshot. The node is verified, and the operator proves to have the master secret, or a \
         certificate by it. Run again after an interruption, it goes on; --undo gives etcd its old data again until it has succeeded \
         (docs/day-two/etcd.md).",
    ],
    operand: Some(Operand {
        value: "snapshot|restore FILE..",
        words: &ACTIONS,
        is_needed: true,
        help: "the file of the snapshot; snapshot makes it, restore --undo needs none",
    }),
    options: &[
        Opt::flag("yes", "do not ask"),
        Opt::flag("dry-run", "show the plan, and do nothing"),
        Opt::value("node", "NAME[=HOST]", "restore: the control plane that is left, with its address if the state file does not have it"),
        Opt::flag("undo", "restore: give etcd its old data again"),
        Opt::value(
            "unsigned",
            "SHA256",
            "restore: accept a snapshot without a signature if it has this SHA-256, which `etcd snapshot` printed: you vouch for the file",
        ),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        ATTESTATION_KEY,
        CLUSTER_ID,
        CERTIFICATE,
        KEY,
        Opt::value(
            "master-secret",
            "FILE",
            "the master secret, with which the snapshot is signed, and which proves the operator; without this option snapshot signs only if the \
             default file exists",
        )
        .or(MASTER_SECRET_FILE),
        SHARE_FILE,
        CLUSTER_STATE,
        KUBECONFIG,
        OUTPUT,
        TIMEOUT.or("1h"),
    ],
    examples: &[
        "firstlight etcd snapshot snapshot.db --dry-run",
        "firstlight etcd snapshot snapshot.db --yes --master-secret firstlight-mastersecret.json",
        "firstlight etcd restore snapshot.db --node control-plane-2",
        "firstlight etcd restore --undo --node control-plane-2=10.42.1.102",
    ],
    run,
};

fn run(given: &Given) -> Result<(), Error> {
    let action = given.operand()?;
    match action.as_str() {
        "snapshot" => match OF_RESTORE.iter().find(|name| given.has(name)) {
            Some(name) => Err(Error::Usage(format!("--{name} is for restore"))),
            None => snapshot::run(&options(given)?),
        },
        "restore" => restore::run(&of_restore(given)?, &Operator::of(given)?),
        _ => {
            let suggestion = suggestion("", &action, ACTIONS);
            Err(Error::Usage(format!(
                "there is no action {action:?}{suggestion}"
            )))
        }
    }
}

fn of_restore(given: &Given) -> Result<restore::Options, Error> {
    let files = given.further().iter().cloned().map(program::text);
    let files = files.collect::<Result<Vec<String>, _>>()?;
    let file = match (&files[..], given.has("undo")) {
        ([file], false) => Some(file.into()),
        ([], true) => None,
        (_, true) => return Err(Error::Usage("restore --undo takes no file".into())),
        _ => {
            return Err(Error::Usage(
                "expected firstlight etcd restore FILE --node NAME".into(),
            ));
        }
    };
    if Output::of(given)? == Output::Json {
        return Err(Error::Usage("restore prints text, no JSON".into()));
    }
    if !given.has("node") {
        let text = "restore needs --node: the control plane that is left";
        return Err(Error::Usage(text.into()));
    }
    let node = given.text("node")?;
    let (name, at) = node.split_once('=').unwrap_or((&node, &node));
    Ok(restore::Options {
        file,
        node: (name.into(), at.into()),
        is_dry_run: given.has("dry-run"),
        is_agreed: given.has("yes"),
        unsigned: if given.has("unsigned") {
            given.text("unsigned")?
        } else {
            String::new()
        },
    })
}

fn options(given: &Given) -> Result<Options, Error> {
    let files = given.further().iter().cloned().map(program::text);
    let files = files.collect::<Result<Vec<String>, _>>()?;
    let [file] = &files[..] else {
        return Err(Error::Usage(
            "expected firstlight etcd snapshot FILE".into(),
        ));
    };
    Ok(Options {
        file: file.into(),
        is_agreed: given.has("yes"),
        is_dry_run: given.has("dry-run"),
        secret: match master_secret_of(given)? {
            SecretSource::File(path) if !given.has("master-secret") && !path.exists() => None,
            source => Some(source),
        },
        state: given.path("state"),
        kubeconfig: kubeconfigs_of(given),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}
