//! `firstlight kubeconfig`: a new certificate for the API server, from a control plane.

use std::path::PathBuf;
use std::time::Duration;

use base::crypto::Secret;
use clap::Args;
use kubernetes::client_certificate::Subject;
use kubernetes::kubeconfig::rebuild;
use proto::operator::{KUBECONFIG, KubeconfigRequest, KubeconfigResponse};
use serde_json::json;

use super::session::{Operator, OperatorOptions};
use crate::shell::{error::Error, files, output::Output, progress::Progress};
use crate::workspace::{
    kubeconfig::{self, KUBECONFIG_FILE, default_path},
    options::time,
};

/// The group of administrators, since Kubernetes v1.29 (kubeadm: ClusterAdminsGroupAndClusterRoleBinding).
const ADMINISTRATORS: &str = "kubeadm:cluster-admins";
/// The user if no other is named, and the end of its entry's name in a kubeconfig.
const ADMINISTRATOR: &str = "firstlight-admin";

/// Make a kubeconfig: for you, or for a colleague with less rights
///
/// Asks a control plane for a new client certificate of Kubernetes. It works when the API server is down, and when
/// all certificates of the cluster but its authority's have expired. Kubernetes cannot revoke a certificate: give
/// colleagues short ones, and groups to which a RoleBinding gives what they need.
///
/// The node is verified like in `firstlight verify`, the operator proves to have the master secret, or a certificate
/// by it, and the node writes the call down.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight kubeconfig --overwrite
  firstlight kubeconfig control-plane-0 --for anna --group developers --hours 24 --file anna.conf")]
pub(crate) struct CommandLine {
    /// A control plane: its name in the state file, or HOST[:PORT]; by default the first one of the state file that
    /// answers
    node: Option<String>,
    /// The user, as RoleBindings name it
    #[arg(long = "for", value_name = "NAME", default_value = ADMINISTRATOR)]
    user: String,
    /// A group of the user, in place of the group of administrators; may be repeated
    #[arg(long, value_name = "NAME")]
    group: Vec<String>,
    /// How long it is valid; at most 8784, a year
    #[arg(long, value_name = "NUMBER", default_value_t = 720)]
    hours: u32,
    /// The name of the cluster in the file
    #[arg(long, value_name = "NAME", default_value = "kubernetes")]
    cluster_name: String,
    /// The file for the kubeconfig
    #[arg(long, value_name = "FILE", default_value = KUBECONFIG_FILE)]
    file: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    overwrite: bool,
    /// Also add it to the file that kubectl reads ($KUBECONFIG, else ~/.kube/config)
    #[arg(long)]
    merge: bool,
    #[command(flatten)]
    pub operator: OperatorOptions,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2m")]
    timeout: Duration,
}

/// Runs the command.
pub fn run(given: &CommandLine) -> Result<(), Error> {
    let CommandLine {
        user,
        cluster_name: cluster,
        file,
        hours,
        overwrite,
        output,
        ..
    } = given;
    let operator = Operator::of(&given.operator, given.timeout)?;
    if file.exists() && !overwrite {
        return Err(Error::blocked(format!(
            "{} exists: --overwrite replaces it, --file names another one",
            file.display()
        )));
    }
    let nodes = match &given.node {
        Some(node) => vec![node.clone()],
        None => operator.control_planes(),
    };
    if nodes.is_empty() {
        return Err(Error::Usage(
            "the state file has no control plane: give the address of one, HOST[:PORT]".into(),
        ));
    }
    let groups = if given.group.is_empty() {
        vec![ADMINISTRATORS.into()]
    } else {
        given.group.clone()
    };
    Subject::new(user, &groups).map_err(|error| Error::Usage(error.to_string()))?;
    let request = KubeconfigRequest {
        caller: None,
        user: user.clone(),
        groups,
        seconds: u64::from(*hours) * 3600,
    };
    let made = of_first(&operator, &nodes, &request)?;
    let entry = format!("{cluster}-{user}");
    let built = rebuild(&made.kubeconfig, cluster, &entry)
        .map_err(|error| Error::Refused(format!("the node's kubeconfig: {error}")))?;
    if *overwrite {
        files::replace_private(file, built.expose())?
    } else {
        files::create_private(file, built.expose())?
    }
    output.say(format_args!(
        "A kubeconfig of {user} in {}, valid for {hours} hours, is in {}",
        request.groups.join(", "),
        file.display()
    ))?;
    let context = if given.merge {
        Some(merge(&built)?)
    } else {
        None
    };
    if let Some(context) = &context {
        output.say(format_args!("kubectl uses its context {context}"))?;
    }
    output.json(&json!({
        "file": file, "user": user, "groups": request.groups, "hours": hours, "context": context,
    }))
}

/// Asks the nodes one after the other, until one makes the certificate.
fn of_first(
    operator: &Operator,
    nodes: &[String],
    request: &KubeconfigRequest,
) -> Result<KubeconfigResponse, Error> {
    let progress = Progress::on_stderr();
    let mut last = None;
    for node in nodes {
        let made = operator.connect(node, &progress).and_then(|session| {
            session.call(|channel, caller, options| {
                let request = KubeconfigRequest {
                    caller: Some(caller),
                    ..request.clone()
                };
                channel.unary(KUBECONFIG, &request, options)
            })
        });
        match made {
            Ok(made) => return Ok(made),
            Err(error @ Error::Unreachable(_)) => {
                progress.line(error.to_string());
                last = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| Error::failed("no node was asked")))
}

fn merge(built: &Secret) -> Result<String, Error> {
    Ok(kubeconfig::merge(&default_path(), built.expose())?)
}
