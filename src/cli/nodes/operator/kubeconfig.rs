//! `firstlight kubeconfig`: a new certificate for the API server, from a control plane.

use base::crypto::Secret;
use base::options::Opt;
use kubernetes::client_certificate::Subject;
use kubernetes::kubeconfig::rebuild;
use proto::operator::{KUBECONFIG, KubeconfigRequest, KubeconfigResponse};
use serde_json::json;

use super::session::{CERTIFICATE, KEY, Operator, POLICY};
use crate::shell::{
    error::Error,
    files,
    output::{OUTPUT, Output},
    progress::Progress,
    usage::{Command, Given, Operand},
};
use crate::workspace::{
    connect::ATTESTATION_KEY,
    kubeconfig::{self, KUBECONFIG_FILE, default_path},
    master_secret::{MASTER_SECRET, SHARE_FILE},
    options::{TIMEOUT, VARIANT},
    sources::{KEPT, OFFLINE},
    state::{CLUSTER_ID, CLUSTER_STATE},
};

/// The group of administrators, since Kubernetes v1.29 (kubeadm: ClusterAdminsGroupAndClusterRoleBinding).
const ADMINISTRATORS: &str = "kubeadm:cluster-admins";
/// The user if no other is named, and the end of its entry's name in a kubeconfig.
const ADMINISTRATOR: &str = "firstlight-admin";

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "kubeconfig",
    summary: "make a kubeconfig: for you, or for a colleague with less rights",
    about: &[
        "Asks a control plane for a new client certificate of Kubernetes. It works when the API server is down, and when all \
         certificates of the cluster but its authority's have expired. Kubernetes cannot revoke a certificate: give colleagues short \
         ones, and groups to which a RoleBinding gives what they need.",
        "The node is verified like in `firstlight verify`, the operator proves to have the master secret, or a certificate by it, and \
         the node writes the call down.",
    ],
    operand: Some(Operand {
        is_needed: false,
        help: "a control plane: its name in the state file, or HOST[:PORT]; by default the first one of the state file that answers",
        ..super::NODE
    }),
    options: &[
        Opt::value("for", "NAME", "the user, as RoleBindings name it").or(ADMINISTRATOR),
        Opt::value(
            "group",
            "NAME",
            "a group of the user, in place of the group of administrators; may be repeated",
        ),
        Opt::value(
            "hours",
            "NUMBER",
            "how long it is valid; at most 8784, a year",
        )
        .or("720"),
        Opt::value(
            "cluster-name",
            "NAME",
            "the name of the cluster in the file",
        )
        .or("kubernetes"),
        Opt::value("file", "FILE", "the file for the kubeconfig").or(KUBECONFIG_FILE),
        Opt::flag("overwrite", "replace an existing file"),
        Opt::flag(
            "merge",
            "also add it to the file that kubectl reads ($KUBECONFIG, else ~/.kube/config)",
        ),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        MASTER_SECRET,
        SHARE_FILE,
        CERTIFICATE,
        KEY,
        OUTPUT,
        TIMEOUT.or("2m"),
    ],
    examples: &[
        "firstlight kubeconfig --overwrite",
        "firstlight kubeconfig control-plane-0 --for anna --group developers --hours 24 --file anna.conf",
    ],
    run,
};

fn run(given: &Given) -> Result<(), Error> {
    let (operator, output) = (Operator::of(given)?, Output::of(given)?);
    let file = given.path("file");
    if file.exists() && !given.has("overwrite") {
        return Err(Error::failed(format!(
            "{} exists: --overwrite replaces it, --file names another one",
            file.display()
        )));
    }
    let nodes = if given.has_operand() {
        vec![given.operand()?]
    } else {
        operator.control_planes()
    };
    if nodes.is_empty() {
        return Err(Error::Usage(
            "the state file has no control plane: give the address of one, HOST[:PORT]".into(),
        ));
    }
    let hours: u32 = given.parsed("hours", str::parse)?;
    let groups = given.texts("group")?;
    let user = given.text("for")?;
    let groups = if groups.is_empty() {
        vec![ADMINISTRATORS.into()]
    } else {
        groups
    };
    Subject::new(&user, &groups).map_err(|error| Error::Usage(error.to_string()))?;
    let request = KubeconfigRequest {
        caller: None,
        user: user.clone(),
        groups,
        seconds: u64::from(hours) * 3600,
    };
    let made = of_first(&operator, &nodes, &request)?;
    let cluster = given.text("cluster-name")?;
    let entry = format!("{cluster}-{user}");
    let built = rebuild(&made.kubeconfig, &cluster, &entry)
        .map_err(|error| Error::Refused(format!("the node's kubeconfig: {error}")))?;
    if given.has("overwrite") {
        files::replace_private(&file, built.expose())?
    } else {
        files::create_private(&file, built.expose())?
    }
    output.say(format_args!(
        "A kubeconfig of {user} in {}, valid for {hours} hours, is in {}",
        request.groups.join(", "),
        file.display()
    ))?;
    let context = if given.has("merge") {
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
