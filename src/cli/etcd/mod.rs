//! `firstlight etcd snapshot`: saves the objects of the cluster in a file of the operator.
//!
//! `snapshot` makes etcd save them on a control plane, `download` brings them here, compares etcd's own hash and shows that they are of this
//! cluster, and `signer` signs them.

mod download;
mod signer;
mod snapshot;

use base::options::Opt;
use base::program;

use super::error::Error;
use super::kubeconfig::{KUBECONFIG, kubeconfigs_of};
use super::master_secret::{MASTER_SECRET_FILE, SHARE_FILE, SecretSource, master_secret_of};
use super::options::{TIMEOUT, time};
use super::output::{OUTPUT, Output};
use super::state::CLUSTER_STATE;
use super::usage::{Command, Given, Operand, suggestion};
use snapshot::Options;

const ACTIONS: [&str; 1] = ["snapshot"];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "etcd",
    summary: "save the objects of the cluster in a file",
    about: &[
        "Shows the plan, asks, and then: lets etcd of a control plane save a snapshot, by a Job for some seconds; brings it here through the \
         API server and the kubelet; compares the hash that etcd added; looks for what it has written into the cluster just before; and \
         deletes the Job and the file on the control plane. A control plane is what a record says is one, not a label.",
        "With the master secret it also writes FILE.signature, which says what the snapshot is of. `bootstrapper restore-etcd` verifies it. \
         Keep both files.",
        "The file contains every Secret of the cluster in plaintext. It is created with mode 0600, and only if it is complete. \
         docs/day-two/etcd.md says how to restore it.",
    ],
    operand: Some(Operand {
        value: "snapshot FILE..",
        words: &ACTIONS,
        is_needed: true,
        help: "the file, which must not exist",
    }),
    options: &[
        Opt::flag("yes", "do not ask"),
        Opt::flag("dry-run", "show the plan, and do nothing"),
        Opt::value(
            "master-secret",
            "FILE",
            "the master secret, with which the snapshot is signed; without this option it is signed only if the default file exists",
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
    ],
    run: |given| snapshot::run(&options(given)?),
};

fn options(given: &Given) -> Result<Options, Error> {
    let action = given.operand()?;
    if action != ACTIONS[0] {
        let suggestion = suggestion("", &action, ACTIONS);
        return Err(Error::Usage(format!(
            "there is no action {action:?}{suggestion}"
        )));
    }
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
