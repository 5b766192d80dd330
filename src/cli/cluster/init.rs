//! `firstlight init`: makes a booted node the first of a new cluster.
//!
//! The master secret and the measurement salt must not be lost, so the command writes them to disk
//! before it sends them to the node. The node accepts only one request. If the connection is lost,
//! or the command is run again, the same request attaches to the set-up that the node is running.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::cluster::{addons::Addons, apply};
use crate::shell::{error::Error, files, interrupt, output::Output, progress::Progress};
use crate::trust::{
    components,
    components::{ListExceptions, Servers},
    policy,
};
use crate::workspace::{
    connect::{Endpoint, Node, NodeOption, Reached, TpmTrust, TrustOptions, read_policy_of},
    keeping::Wish,
    kubeconfig::{self as kubeconfig_file, KUBECONFIG_FILE, default_path, merge},
    master_secret::{self, MASTER_SECRET_FILE, SecretSource},
    options::{MetadataOptions, PolicyOptions, time},
    state::{KnownNode, STATE_FILE, State},
};
use base::crypto::{
    CLUSTER_ID_LEN, Dek, KEY_LEN, MEASUREMENT_SALT_LEN, MEASUREMENT_SECRET_ID, Secret, cluster_id,
};
use base::machines::Role;
use base::master_secret::{MasterSecret, NO_STORE};
use base::text::hex;
use clap::Args;
use kubernetes::kubeconfig;
use kubernetes::parameters::{self, KubernetesVersion, Networks};
use kubernetes::services::{self, Phase};
use proto::components::Component;
use proto::init;
use proto::init::init_response::Kind;
use proto::init::{InitRequest, InitResponse, ProgressResponse};
use rpc::grpc::{CallOptions, Channel, Code, Metadata, Status};
use serde_json::json;
use ssh::operators::OperatorList;
use verifier::{KeyName, Variant};

/// The gRPC method.
const INIT: &str = "/init.API/Init";
/// Maximum bytes of the node's log; a Constellation node sends its whole journal when it fails.
const MAX_LOG: usize = 64 << 20;

/// Make a booted node the first of a new cluster
///
/// Connects over attested TLS, checks that the node meets the policy, and sends it the master secret. Waits for a
/// node that still boots, and shows what the node does. The node's work does not depend on the connection: if the
/// connection is lost, run the same command with the same files again to watch the work and get its result.
///
/// The policy or the command line must name the node's attestation key. The node's console shows the name;
/// `firstlight measure` writes it into the policy.
///
/// With --kubernetes-version the node becomes the first control plane of a cluster. Without it the node's disk gets
/// its permanent key, and no cluster is made.
#[derive(Debug, Args)]
#[command(mut_arg("endpoint", |it| it.help("The node; the default port is 9000")), after_help = "Examples:
  firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt --kubernetes-version v1.36.4
  firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret secret.txt --kms 'kms://aws-kms?keyName=ARN'
  pass show cluster/init | firstlight init --endpoint [fd00::1]:9000 --policy policy.json --init-secret -")]
pub(crate) struct CommandLine {
    #[command(flatten)]
    node: NodeOption,
    #[command(flatten)]
    pub policy: PolicyOptions,
    /// The secret whose hash the node gets from the metadata, in a file that only you may read; - is standard input
    #[arg(long, value_name = "FILE")]
    init_secret: PathBuf,
    /// The master secret; a new one is written if the file does not exist, and it is never overwritten; without it
    /// the cluster cannot be recovered
    #[arg(long, value_name = "FILE", default_value = MASTER_SECRET_FILE)]
    master_secret: PathBuf,
    #[command(flatten)]
    wish: Wish,
    #[command(flatten)]
    trust: TrustOptions,
    /// With any, also take a policy without `"require": "strong"`: it accepts evidence of the old form of attested TLS, the
    /// only one of nodes of Constellation, which another machine can pass on
    #[arg(long, value_name = "FORM", value_parser = ["strong", "any"], default_value = "strong")]
    require: String,
    /// The file for the measurement salt, the cluster ID, and the node's attestation key
    #[arg(long, value_name = "FILE", default_value = STATE_FILE)]
    state: PathBuf,
    /// The file for the administrator's kubeconfig; must not exist
    #[arg(long, value_name = "FILE", default_value = KUBECONFIG_FILE)]
    kubeconfig: PathBuf,
    /// Also add the kubeconfig to the file that kubectl reads ($KUBECONFIG, else ~/.kube/config)
    #[arg(long)]
    merge_kubeconfig: bool,
    /// The file for the node's log; it is written if the node fails
    #[arg(long, value_name = "FILE", default_value = "firstlight-cluster.log")]
    log: PathBuf,
    /// The cluster's name; by default the node chooses it
    #[arg(long, value_name = "NAME")]
    cluster_name: Option<String>,
    /// Show each line of the node's progress, not only its phases
    #[arg(short, long)]
    verbose: bool,
    /// Check the files and the node, and say what would be done; send and write nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: Output,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30m")]
    timeout: Duration,
    #[command(flatten, next_help_heading = "A cluster, with --kubernetes-version")]
    cluster: ClusterToMake,
}

/// The cluster to make.
#[derive(Debug, Args)]
#[command(
    mut_arg("cloud_provider", |it| it.default_value(base::machines::DEFAULT.name()).requires("image")),
    mut_arg("metadata", |it| it.requires("image")),
    mut_arg("accept_components", |it| it.requires("kubernetes_version")),
)]
struct ClusterToMake {
    /// The version of Kubernetes, v1.31 or later; v1.36 without a patch number means its newest patch
    #[arg(long, value_name = "VERSION")]
    kubernetes_version: Option<String>,
    /// The list of programs that the node installs first, as `firstlight components` makes it; without it, init makes
    /// it in the same way
    #[arg(long, requires = "kubernetes_version", value_name = "FILE")]
    components: Option<PathBuf>,
    #[command(flatten)]
    exceptions: ListExceptions,
    /// The services' addresses; by default 10.96.0.0/12
    #[arg(long, requires = "kubernetes_version", value_name = "NETWORK")]
    service_cidr: Option<String>,
    /// The pods' addresses; by default the network plugin chooses them
    #[arg(long, requires = "kubernetes_version", value_name = "NETWORK")]
    pod_cidr: Option<String>,
    /// A further name or address of the API server; may be repeated
    #[arg(long, requires = "kubernetes_version", value_name = "NAME")]
    apiserver_san: Vec<String>,
    /// A container image with /join-service, /key-service and /member-controller, which are installed in the new cluster; without it, run
    /// `firstlight apply` later
    #[arg(long, requires = "kubernetes_version", value_name = "IMAGE")]
    image: Option<String>,
    /// A list (YAML) of charts and manifests to install, such as the network plugin; needs Helm (docs/addons.md)
    #[arg(long, requires = "kubernetes_version", value_name = "FILE")]
    addons: Option<PathBuf>,
    #[command(flatten)]
    metadata: MetadataOptions,
    /// Return as soon as the API server has accepted the services; do not roll back if they never get ready
    #[arg(long, requires = "kubernetes_version", alias = "skip-helm-wait")]
    skip_wait: bool,
    /// Do not install kubeadm's CoreDNS and kube-proxy, if the network plugin has its own
    #[arg(long, requires = "kubernetes_version")]
    skip_addons: bool,
    /// The list of operators (JSON), of whom several must sign each policy of the cluster
    /// (docs/day-two/signed-policies.md); without it, no policy needs a signature
    #[arg(long, requires = "kubernetes_version", value_name = "FILE")]
    operators: Option<PathBuf>,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let both = [&self.init_secret, &self.master_secret];
        if both.into_iter().all(|path| files::is_standard_input(path)) {
            return Err(Error::Usage(
                "--init-secret - and --master-secret -: only one can be on standard input".into(),
            ));
        }
        Ok(Options {
            endpoint: self.node.endpoint(proto::init::PORT)?,
            variant: self.policy.variant()?,
            policy: self.policy.policy,
            trust: self.trust.trust(),
            requires_strong: self.require == "strong",
            init_secret: self.init_secret,
            master_secret: self.master_secret,
            wish: self.wish,
            state: self.state,
            kubeconfig: self.kubeconfig,
            merge_kubeconfig: self.merge_kubeconfig,
            log: self.log,
            cluster_name: self.cluster_name.unwrap_or_default(),
            kubernetes: self.cluster.kubernetes(self.timeout)?,
            verbose: self.verbose,
            is_dry_run: self.dry_run,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

impl ClusterToMake {
    fn kubernetes(self, limit: Duration) -> Result<Option<Kubernetes>, Error> {
        let Some(version) = self.kubernetes_version else {
            return Ok(None);
        };
        // the node refuses other versions, and so does `firstlight components`
        let components = self.components;
        let servers = Servers::default();
        Ok(Some(Kubernetes {
            version: components::version(&version, components.as_deref(), &servers, limit)?,
            components,
            exceptions: self.exceptions,
            service_cidr: self.service_cidr.unwrap_or_default(),
            pod_cidr: self.pod_cidr.unwrap_or_default(),
            apiserver_sans: self.apiserver_san,
            has_kubeadm_addons: !self.skip_addons,
            addons: self.addons,
            image: self.image,
            metadata: self.metadata.service()?.unwrap_or_default(),
            skip_wait: self.skip_wait,
            operators: self.operators,
        }))
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The node's address.
    pub endpoint: Endpoint,
    /// The attestation policy that the node must meet.
    pub policy: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// The TPMs that may get the master secret.
    pub trust: TpmTrust,
    /// Whether the policy must require the strong form of attested TLS.
    pub requires_strong: bool,
    /// The file of the init secret; `-` is standard input.
    pub init_secret: PathBuf,
    /// The file of the master secret, which is made if it does not exist.
    pub master_secret: PathBuf,
    /// How the cluster stores the master secret, and in which form a new one is written.
    pub wish: Wish,
    /// The state file.
    pub state: PathBuf,
    /// The file for the administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// Whether to add the kubeconfig to the file that kubectl reads.
    pub merge_kubeconfig: bool,
    /// The file for the log of a node whose set-up fails.
    pub log: PathBuf,
    /// The cluster's name; empty for the node's default.
    pub cluster_name: String,
    /// The cluster to make; if `None`, the node only gets the permanent key of its disk.
    pub kubernetes: Option<Kubernetes>,
    /// Whether to show each line of the node's progress, and not only its phases.
    pub verbose: bool,
    /// Whether to check everything, and to send and write nothing.
    pub is_dry_run: bool,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// The cluster to make.
#[derive(Debug)]
pub struct Kubernetes {
    /// The version of Kubernetes, as `v1.34.4`.
    pub version: KubernetesVersion,
    /// The file with the list of components; if `None`, the list is made from what the servers of Kubernetes publish.
    pub components: Option<PathBuf>,
    /// The faults that this list may have.
    pub exceptions: ListExceptions,
    /// The services' network; empty for kubeadm's default.
    pub service_cidr: String,
    /// The pods' network; empty if the network plugin chooses it.
    pub pod_cidr: String,
    /// Additional names and addresses of the API server.
    pub apiserver_sans: Vec<String>,
    /// Whether kubeadm installs CoreDNS and kube-proxy.
    pub has_kubeadm_addons: bool,
    /// The list of add-ons; if `None`, none are installed.
    pub addons: Option<PathBuf>,
    /// The services' container image; if `None`, the services are not installed.
    pub image: Option<String>,
    /// The metadata service from which the join service gets the list of machines.
    pub metadata: services::MetadataService,
    /// Whether to return before the services are ready.
    pub skip_wait: bool,
    /// The list of operators; if `None`, policies need no signature.
    pub operators: Option<PathBuf>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let policy = read_policy_of(options.variant, &options.policy)?;
    if options.requires_strong && !policy.requires_strong() {
        return Err(Error::content(format!(
            "{}: evidence of the old form of attested TLS is accepted, which another machine can pass on: add \"require\":\"strong\", \
             as `firstlight measure` does, or give --require any",
            options.policy.display()
        )));
    }
    let node = |cluster: Option<&[u8; CLUSTER_ID_LEN]>, state: Option<&State>| {
        let known = state.iter().flat_map(|state| &state.attestation_keys);
        let trust = options.trust.clone().and_known(known.copied());
        let policy = policy.clone();
        Node::to_initialize(&options.endpoint, options.variant, policy, &trust, cluster)
    };
    if options.is_dry_run {
        rehearse(node, options)
    } else {
        initialize(node, options)
    }
}

/// The operator's input, checked.
struct Brought {
    cluster_name: String,
    init_secret: Secret,
    /// `None` if there is no state file yet.
    state: Option<State>,
    /// The files that the node downloads and installs. Empty if the operator asks for no cluster.
    components: Vec<Component>,
    /// `None` if policies need no signature.
    operators: Option<Operators>,
}

/// The operators of the new cluster.
struct Operators {
    /// The text of the list.
    text: String,
    list: OperatorList,
    /// The ID of the cluster for which they have signed the policy; `None` if no services are installed yet.
    signed_for: Option<String>,
}

impl Operators {
    /// Refuses a policy that is signed for another cluster.
    fn check(&self, cluster: &[u8; CLUSTER_ID_LEN]) -> Result<(), Error> {
        let cluster = hex(cluster);
        match self.signed_for.as_ref().filter(|id| **id != cluster) {
            None => Ok(()),
            Some(id) => Err(Error::content(format!(
                "the operators have signed the policy for the cluster {id}, but this master secret makes the cluster {cluster}: propose it \
                 again with the ID that `firstlight cluster-id` prints"
            ))),
        }
    }
}

fn check(options: &Options) -> Result<Brought, Error> {
    let cluster_name = parameters::cluster_name(&options.cluster_name).map_err(Error::content)?;
    let init_secret = read_init_secret(&options.init_secret)?;
    if options.kubeconfig.exists() {
        let path = options.kubeconfig.display();
        return Err(Error::blocked(format!(
            "{path} exists: it belongs to another cluster; move it away"
        )));
    }
    let state = State::find(&options.state)?;
    if let Some(id) = state.as_ref().and_then(|state| state.cluster_id) {
        let path = options.state.display();
        return Err(Error::blocked(format!(
            "cluster {} already exists; to make another one, move {path} away",
            hex(&id)
        )));
    }
    if options.merge_kubeconfig {
        kubeconfig_file::check(&default_path())?;
    }
    let (components, operators) = match &options.kubernetes {
        Some(kubernetes) => {
            let operators = kubernetes.operators(&options.policy)?;
            (kubernetes.check(options.timeout)?, operators)
        }
        None => (vec![], None),
    };
    Ok(Brought {
        cluster_name,
        init_secret,
        state,
        components,
        operators,
    })
}

/// Checks the operator's input, and that the node meets the policy; reports what an init would do.
/// Sends and writes nothing.
fn rehearse(
    node: impl Fn(Option<&[u8; CLUSTER_ID_LEN]>, Option<&State>) -> Result<Node, Error>,
    options: &Options,
) -> Result<(), Error> {
    let deadline = Instant::now() + options.timeout;
    let brought = check(options)?;
    let kms = options.wish.kms.as_deref();
    let kms = match master_secret::read_wrapped(&options.master_secret, kms) {
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => None,
        read => Some(read?),
    };
    let external = options.wish.key()?;
    if let (Some(external), false) = (&external, options.wish.create_key) {
        external.key.prepare(false)?;
    }
    let cluster = match (&kms, &brought.state) {
        (Some(kms), Some(state)) => Some(expected_cluster_id(kms, &state.measurement_salt)?),
        _ => None,
    };
    if let (Some(operators), Some(cluster)) = (&brought.operators, &cluster) {
        operators.check(cluster)?;
    }
    let node = node(cluster.as_ref(), brought.state.as_ref())?;
    let progress = Progress::on_stderr();
    let reached = node.reach(deadline, &progress)?;
    drop(progress);
    check_carried(options, &reached)
        .map_err(|error| error.with_text(|text| format!("{text}. Nothing was sent")))?;
    let key = reached.key;

    let (output, endpoint) = (options.output, &options.endpoint);
    let secret = options.master_secret.display();
    output.say(format_args!(
        "{endpoint} meets the policy {}",
        options.policy.display()
    ))?;
    output.say(match (&kms, external) {
        (Some(_), _) => format!("It would get the master secret in {secret}"),
        (None, None) => format!("It would get a new master secret, written to {secret}"),
        (None, Some(external)) => format!(
            "It would get a new master secret, written to {secret} as {} wraps it",
            external.uri
        ),
    })?;
    say_cluster(options, &brought)?;
    output.json(&json!({
        "node": endpoint.to_string(),
        "key": key.map(|key| key.to_string()),
        "cluster": cluster.map(|id| hex(&id)),
        "masterSecret": options.master_secret,
        "isNewMasterSecret": kms.is_none(),
        "kubernetes": options.kubernetes.as_ref().map(|it| it.version.to_string()),
        "services": options.kubernetes.as_ref().and_then(|it| it.image.as_ref()),
        "operators": brought.operators.as_ref().map(|it| it.list.names().collect::<Vec<_>>()),
    }))?;
    output.say("Nothing was sent or written")
}

/// Says what cluster an init would make.
fn say_cluster(options: &Options, brought: &Brought) -> Result<(), Error> {
    let output = options.output;
    let Some(kubernetes) = &options.kubernetes else {
        return output.say("No cluster would be set up on it: --kubernetes-version is not given");
    };
    output.say(format_args!(
        "It would become the first control plane of a cluster {:?} with Kubernetes {} ({} components), kubeconfig {}",
        brought.cluster_name,
        kubernetes.version,
        brought.components.len(),
        options.kubeconfig.display()
    ))?;
    if let Some(Operators { list, .. }) = &brought.operators {
        output.say(format_args!(
            "Each of its policies would need signatures by {} of {}",
            list.required(),
            list.names().collect::<Vec<_>>().join(", ")
        ))?;
    }
    match &kubernetes.image {
        Some(image) => output.say(format_args!(
            "Then the services of {image} would be installed"
        )),
        None => Ok(()),
    }
}

fn initialize(
    node: impl Fn(Option<&[u8; CLUSTER_ID_LEN]>, Option<&State>) -> Result<Node, Error>,
    options: &Options,
) -> Result<(), Error> {
    let deadline = Instant::now() + options.timeout;
    let Brought {
        cluster_name,
        init_secret,
        state,
        components,
        operators,
    } = check(options)?;
    // report a faulty policy before anything is written
    node(None, state.as_ref())?;
    let mut state = match state {
        Some(state) => state,
        None => State::create(&options.state)?,
    };
    let (kms, origin) = master_secret::open_or_create(&options.master_secret, &options.wish)?;
    let output = options.output;
    output.say(format_args!(
        "{} {}",
        match origin {
            master_secret::SecretOrigin::Created => "A new master secret is in",
            master_secret::SecretOrigin::Found => "Using the master secret in",
        },
        options.master_secret.display()
    ))?;
    let expected = expected_cluster_id(&kms, &state.measurement_salt)?;
    let node = node(Some(&expected), Some(&state))?;
    let mut request = request(options, &kms, &state, &init_secret, components);
    if let Some(operators) = operators {
        operators.check(&expected)?;
        request.policy_operators = operators.text;
    }
    let answered = send(&node, &request, options, deadline)?;
    if answered.success.cluster_id != expected {
        return Err(Error::refused(format!(
            "the node's cluster ID is {}, but the cluster ID of this master secret is {}: do not use this node",
            hex(&answered.success.cluster_id),
            hex(&expected)
        )));
    }
    // write these first: a later init, recovery or status needs them, even if the kubeconfig cannot be written
    state.attestation_keys.extend(answered.key);
    state.cluster_id = Some(expected);
    // its name is unknown until the API server lists it
    state.nodes = vec![KnownNode {
        name: String::new(),
        role: Role::ControlPlane,
        addresses: vec![options.endpoint.host().to_owned()],
        key: answered.key,
    }];
    state.save()?;
    interrupt::means("the node is initialized, and the state file has its cluster ID and key");
    output.say(format_args!("Cluster ID: {}", hex(&expected)))?;
    if keep_result(options, &answered, &cluster_name)? {
        bring_services(options, deadline)
    } else {
        output.say("The node is initialized; no cluster was set up on it")
    }
}

/// Refuses what an init server of Constellation would ignore: its request has no field for it.
fn check_carried(options: &Options, reached: &Reached) -> Result<(), Error> {
    if !reached.is_constellation {
        return Ok(());
    }
    let no_cluster = options.kubernetes.is_none();
    let is_kubernetes = |has: fn(&Kubernetes) -> bool| options.kubernetes.as_ref().is_some_and(has);
    let lost: Vec<&str> = [
        (no_cluster, "it always makes a cluster: give --kubernetes-version"),
        (
            is_kubernetes(|it| !it.pod_cidr.is_empty()),
            "it does not know --pod-cidr: leave it out, and set the pods' addresses in the network plugin's own configuration",
        ),
        (
            is_kubernetes(|it| it.has_kubeadm_addons),
            "it installs neither CoreDNS nor kube-proxy: give --skip-addons, and install them as add-ons",
        ),
        (
            is_kubernetes(|it| it.operators.is_some()),
            "it does not know --operators, and its cluster accepts policies without signatures: leave it out",
        ),
    ]
    .into_iter()
    .filter_map(|(is_lost, what)| is_lost.then_some(what))
    .collect();
    if lost.is_empty() {
        Ok(())
    } else {
        Err(Error::refused(format!(
            "{}: the node has the init server of Constellation: {}",
            options.endpoint,
            lost.join("; ")
        )))
    }
}

/// The answer of an initialized node, and its attestation key.
struct Answered {
    success: Success,
    key: Option<KeyName>,
}

/// Sends the request until the node answers. After a lost connection the node continues its set-up, and the same request attaches
/// to it.
fn send(
    node: &Node,
    request: &InitRequest,
    options: &Options,
    deadline: Instant,
) -> Result<Answered, Error> {
    let progress = Progress::on_stderr();
    let mut watching = Watching::new(&progress, options);
    let mut was_sent = false;
    interrupt::means(
        "nothing was sent to a node; the master secret stays in its file, and the next init uses it",
    );
    loop {
        let reached = node.reach(deadline, &progress).and_then(|reached| {
            check_carried(options, &reached)?;
            Ok(reached)
        });
        let reached = reached.inspect_err(|_| {
            if !was_sent {
                let file = options.master_secret.display();
                progress.line(format!(
                    "Nothing was sent to a node. The master secret stays in {file}, and the next init uses it"
                ));
            }
        })?;
        progress.phase(format!("initializing {}", options.endpoint));
        was_sent = true;
        interrupt::means(if reached.is_constellation {
            "the node runs Constellation and stops its set-up without the connection; start the machine anew"
        } else {
            "the node continues; run the same command with the same files again to watch it and to get its result"
        });
        let key = reached.key;
        match watching.exchange(&reached.channel, request, deadline) {
            Err(NoSuccess::Ended(status)) if is_lost(&status) && Instant::now() < deadline => {
                progress.line(format!(
                    "{}: {}; asking again",
                    options.endpoint,
                    short(&status.to_string())
                ));
                let left = deadline.saturating_duration_since(Instant::now());
                thread::sleep(status.retry_after().unwrap_or_default().min(left));
            }
            answer => {
                let success = answer.map_err(|failure| failure.into_failure(options))?;
                watching.finish();
                return Ok(Answered { success, key });
            }
        }
    }
}

/// Writes the kubeconfig, and prints the command's result. Returns whether the node made a cluster.
fn keep_result(
    options: &Options,
    Answered { success, key }: &Answered,
    cluster_name: &str,
) -> Result<bool, Error> {
    let output = options.output;
    let kubeconfig = keep_kubeconfig(options, &success.kubeconfig, cluster_name)?;
    let result = json!({
        "cluster": hex(&success.cluster_id),
        "node": options.endpoint.to_string(),
        "key": key.map(|key| key.to_string()),
        "masterSecret": options.master_secret,
        "state": options.state,
        "kubeconfig": kubeconfig.as_ref().map(|_| &options.kubeconfig),
    });
    // before the services are installed: this message is true even if the installation fails
    output.json(&result)?;
    let Some(kubeconfig) = kubeconfig else {
        return Ok(false);
    };
    output.say(format_args!(
        "Administrator's kubeconfig: {}",
        options.kubeconfig.display()
    ))?;
    if options.merge_kubeconfig {
        let path = default_path();
        let context = merge(&path, kubeconfig.expose())?;
        output.say(format_args!(
            "It is also the current context of {}: {context}",
            path.display()
        ))?;
    }
    Ok(true)
}

impl Kubernetes {
    /// Checks for input that the node would refuse, and returns the components that it installs.
    fn check(&self, limit: Duration) -> Result<Vec<Component>, Error> {
        Networks::parse(&self.service_cidr, &self.pod_cidr, None).map_err(Error::content)?;
        for name in &self.apiserver_sans {
            parameters::alternative_name(name)
                .map_err(|error| Error::content(format!("--apiserver-san: {error}")))?;
        }
        if let Some(list) = &self.addons {
            let addons = Addons::read(list, &[]).map_err(Error::content)?;
            addons
                .check(&self.version.to_string())
                .map_err(Error::content)?;
        }
        if let Some(warning) = self.version.warning(SystemTime::now()) {
            log::warn!("{warning}");
        }
        let file = self.components.as_deref();
        components::of(&self.version, file, &self.exceptions, limit)
    }

    /// Reads the list of operators. Enough of them must have signed the policy in this file if the services are installed, too: they
    /// take no other.
    fn operators(&self, file: &Path) -> Result<Option<Operators>, Error> {
        let Some(path) = &self.operators else {
            return Ok(None);
        };
        let (text, list) = policy::read_operators(path)?;
        if list.cluster().is_some() || list.previous().is_some() {
            return Err(Error::content(format!(
                "{}: it replaces another list: the first list of a cluster has no field \"cluster\" and no field \"previous\"",
                path.display()
            )));
        }
        let signed_for = match self.image {
            Some(_) => Some(policy::check_signed(file, &list)?),
            None => None,
        };
        Ok(Some(Operators {
            text,
            list,
            signed_for,
        }))
    }
}

/// Installs the services, if an image is given.
fn bring_services(options: &Options, deadline: Instant) -> Result<(), Error> {
    let Some(kubernetes) = &options.kubernetes else {
        return Ok(());
    };
    if kubernetes.image.is_none() {
        options.output.say(
            "No other node can join yet: `firstlight apply` installs the services that admit nodes",
        )?;
    }
    let skip_phases = match kubernetes.image {
        Some(_) => vec![],
        None if kubernetes.addons.is_none() => return Ok(()),
        None => vec![Phase::Policy, Phase::Services],
    };
    let applied = apply::apply(&apply::Options {
        // the policy has the requirement, unless the operator drops it
        require_strong: (!options.requires_strong).then_some(false),
        watch: None,
        watch_action: None,
        watch_issuer: None,
        variant: Some(options.variant),
        kubeconfig: vec![options.kubeconfig.clone()],
        policy: options.policy.clone(),
        policy_text: None,
        image: kubernetes.image.clone().unwrap_or_default(),
        addons: kubernetes.addons.clone(),
        operator_changes: None,
        skip_phases,
        master_secret: SecretSource::File(options.master_secret.clone()),
        wish: options.wish.clone(),
        state: options.state.clone(),
        node_port: None,
        migration: None,
        old_clients: None,
        grants: None,
        metadata: Some(kubernetes.metadata.clone()),
        backups: ".".into(),
        skip_wait: kubernetes.skip_wait,
        print: false,
        is_dry_run: false,
        keeps_superseded: false,
        control_planes: vec![],
        output: options.output,
        timeout: deadline.saturating_duration_since(Instant::now()),
    });
    let applied = applied.inspect_err(|_| {
        log::warn!("the cluster is made, but its services are not ready: continue with `firstlight apply`, not with init");
    })?;
    options.output.say(apply::summary(&applied))
}

/// Writes the kubeconfig of a node whose init is complete; returns `None` if it has none, because
/// no cluster was made.
fn keep_kubeconfig(
    options: &Options,
    sent: &Secret,
    cluster_name: &str,
) -> Result<Option<Secret>, Error> {
    if sent.is_empty() {
        return Ok(None);
    }
    let lost = |why: String| {
        Error::failed(format!(
            "the node is initialized, and {} has its cluster ID and key, but there is no kubeconfig: {why}. `firstlight kubeconfig` \
             makes one",
            options.state.display()
        ))
    };
    let built = kubeconfig::rebuild(
        sent.expose(),
        cluster_name,
        &format!("{cluster_name}-admin"),
    )
    .map_err(|why| {
        lost(format!(
            "its kubeconfig does not have the form of kubeadm's: {why}"
        ))
    })?;
    files::create_private(&options.kubeconfig, built.expose())
        .map_err(|error| lost(error.to_string()))?;
    Ok(Some(built))
}

/// Reads the init secret, without the line break that editors and `echo` leave.
pub fn read_init_secret(path: &Path) -> Result<Secret, Error> {
    let content = files::read_secret(path)?;
    let line = content.strip_suffix(b"\n").unwrap_or(&content);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line.is_empty() {
        Err(Error::content(format!(
            "the init secret in {} is empty",
            path.display()
        )))
    } else {
        Ok(Secret::new(line.to_vec()))
    }
}

/// Returns the ID of the cluster with this master secret and this salt.
pub fn expected_cluster_id(
    kms: &MasterSecret,
    salt: &[u8; MEASUREMENT_SALT_LEN],
) -> Result<[u8; CLUSTER_ID_LEN], Error> {
    let measurement_secret = kms
        .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
        .map_err(Error::failed)?;
    Ok(cluster_id(&measurement_secret, salt))
}

/// Returns whether a call ended because its connection was lost.
fn is_lost(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled)
}

fn request(
    options: &Options,
    kms: &MasterSecret,
    state: &State,
    init_secret: &Secret,
    components: Vec<Component>,
) -> InitRequest {
    let mut request = InitRequest::default();
    request.kms_uri = kms.uri().to_string();
    request.storage_uri = NO_STORE.into();
    request.measurement_salt = state.measurement_salt.to_vec();
    request.init_secret = init_secret.expose().to_vec();
    request.cluster_name = options.cluster_name.clone();
    if let Some(kubernetes) = &options.kubernetes {
        request.kubernetes_components = components;
        request.kubernetes_version = kubernetes.version.to_string();
        request.service_cidr = kubernetes.service_cidr.clone();
        request.pod_cidr = kubernetes.pod_cidr.clone();
        request.apiserver_cert_sans = kubernetes.apiserver_sans.clone();
        request.kubeadm_addons = kubernetes.has_kubeadm_addons;
    }
    request
}

/// The answer of a node that succeeded.
struct Success {
    kubeconfig: Secret,
    cluster_id: Vec<u8>,
}

enum NoSuccess {
    /// The node failed or refused, for this reason; its log.
    Refused(String, Log),
    /// The call ended before the node's result.
    Ended(Status),
    /// The node sent no result.
    Nothing,
    /// The node's log cannot be written.
    Local(files::FileError),
}

/// In a phase that takes longer than this, one line of the node is printed after each such
/// interval, even if the operator did not ask for lines.
const SILENCE: Duration = Duration::from_secs(30);

/// The progress of a node's set-up, over any number of connections.
struct Watching<'a> {
    progress: &'a Progress,
    options: &'a Options,
    /// Number of progress messages so far; a node sends all of them on each connection.
    seen: usize,
    /// The node's present phase, and its beginning by the node's clock.
    phase: Option<(String, Duration)>,
    /// The time of the latest message, by the node's clock.
    latest: Duration,
    /// The time of the latest line that was printed.
    told: Duration,
    /// The lines of the phases, for the log of a failure.
    log: Log,
}

impl<'a> Watching<'a> {
    fn new(progress: &'a Progress, options: &'a Options) -> Watching<'a> {
        let log = Log::new(&options.log);
        Watching {
            progress,
            options,
            seen: 0,
            phase: None,
            latest: Duration::ZERO,
            told: Duration::ZERO,
            log,
        }
    }

    fn exchange(
        &mut self,
        channel: &Channel,
        request: &InitRequest,
        deadline: Instant,
    ) -> Result<Success, NoSuccess> {
        let timeout = Some(deadline.saturating_duration_since(Instant::now()));
        let mut metadata = Metadata::new();
        metadata
            .insert(init::PROGRESS, "1")
            .map_err(NoSuccess::Ended)?;
        let options = CallOptions { timeout, metadata };
        let mut responses = channel
            .server_streaming(INIT, request, &options)
            .map_err(NoSuccess::Ended)?;
        let mut number = 0;
        let error = loop {
            let response: InitResponse = responses
                .next()
                .ok_or(NoSuccess::Nothing)?
                .map_err(NoSuccess::Ended)?;
            match response.kind {
                Some(Kind::InitSuccess(mut success)) => {
                    let kubeconfig = Secret::new(std::mem::take(&mut success.kubeconfig));
                    return Ok(Success {
                        kubeconfig,
                        cluster_id: std::mem::take(&mut success.cluster_id),
                    });
                }
                Some(Kind::InitFailure(failure)) => break failure.error,
                Some(Kind::Log(chunk)) => self.log.add(&chunk.log)?,
                Some(Kind::Progress(event)) => {
                    number += 1;
                    if number > self.seen {
                        self.seen = number;
                        self.show(&event)?;
                    }
                }
                // a message of a later version
                None => {}
            }
        };
        // the node's log follows; Constellation ends it with an error status although the log is
        // complete
        while let Some(Ok(InitResponse {
            kind: Some(Kind::Log(chunk)),
        })) = responses.next()
        {
            self.log.add(&chunk.log)?;
        }
        let log = std::mem::replace(&mut self.log, Log::new(&self.options.log));
        Err(NoSuccess::Refused(error, log))
    }

    fn show(&mut self, event: &ProgressResponse) -> Result<(), NoSuccess> {
        self.latest = Duration::from_millis(event.elapsed_millis);
        if event.line.is_empty() {
            self.finish();
            self.phase = Some((event.phase.clone(), self.latest));
            self.progress.phase(event.phase.as_str());
            return Ok(());
        }
        let begun = self
            .phase
            .as_ref()
            .map_or(Duration::ZERO, |(_, since)| *since);
        if self.options.verbose || self.latest.saturating_sub(begun.max(self.told)) >= SILENCE {
            self.told = self.latest;
            self.progress.line(format!("  {}", event.line));
        }
        let at = self.latest.as_secs_f64();
        self.log
            .add(format!("{at:9.3}s {}: {}\n", event.phase, event.line).as_bytes())
    }

    /// Ends the present phase, and prints its duration.
    fn finish(&mut self) {
        if let Some((phase, since)) = self.phase.take() {
            let took = self.latest.saturating_sub(since).as_secs_f64();
            self.progress.line(format!("{phase}: {took:.1} s"));
        }
    }
}

impl NoSuccess {
    fn into_failure(self, options: &Options) -> Error {
        let endpoint = &options.endpoint;
        match self {
            NoSuccess::Refused(error, log) => {
                let kept = match log.len {
                    0 => String::new(),
                    len => format!("\nIts log ({len} bytes) is in {}", options.log.display()),
                };
                Error::Refused(format!(
                    "{endpoint}: the node could not be initialized: {}{kept}",
                    short(&error)
                ))
            }
            NoSuccess::Ended(status) => match status.code() {
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                    Error::Unreachable(format!(
                        "{endpoint}: the call ended before the node answered: {}\nThe node may continue: run the same \
                     command again to ask it",
                        short(&status.to_string())
                    ))
                }
                _ => Error::Refused(format!(
                    "{endpoint}: the node refused: {}",
                    short(&status.to_string())
                )),
            },
            NoSuccess::Nothing => Error::refused(format!(
                "{endpoint}: the node ended the call without an answer"
            )),
            NoSuccess::Local(error) => Error::failed(error),
        }
    }
}

/// Returns a peer's text, cut to the size of a screen.
fn short(text: &str) -> String {
    const MAX: usize = 2000;
    text.chars().take(MAX).collect()
}

/// The node's log, which is appended to a file; the first chunk creates the file.
struct Log {
    path: PathBuf,
    file: Option<File>,
    len: usize,
}

impl Log {
    fn new(path: &Path) -> Log {
        Log {
            path: path.into(),
            file: None,
            len: 0,
        }
    }

    fn add(&mut self, chunk: &[u8]) -> Result<(), NoSuccess> {
        let chunk = &chunk[..chunk.len().min(MAX_LOG - self.len)];
        if chunk.is_empty() {
            return Ok(());
        }
        let file = match self.file.take() {
            Some(file) => file,
            None => files::append_private(&self.path).map_err(NoSuccess::Local)?,
        };
        let file = self.file.insert(file);
        file.write_all(chunk).map_err(|error| {
            NoSuccess::Local(files::FileError::Io("write", self.path.clone(), error))
        })?;
        self.len += chunk.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::{Arc, Mutex};
    use std::thread;

    use tempfile::TempDir;

    use super::*;
    use crate::shell::error::UNREACHABLE;
    use proto::init::{InitFailureResponse, InitSuccessResponse, LogResponseType};
    use rpc::grpc::{Call, Limits, Router, Sender, Server};
    use ssh::signature::SigningKey;
    use transport::Accept;
    use verifier::variant;

    /// Starts a node with attested TLS that proves nothing, and with the test's handler.
    fn node<F>(handler: F) -> Server
    where
        F: Fn(&InitRequest, &mut dyn FnMut(Kind)) -> Result<(), Status> + Send + Sync + 'static,
    {
        node_at(TcpListener::bind("127.0.0.1:0").unwrap(), handler)
    }

    fn node_at<F>(listener: TcpListener, handler: F) -> Server
    where
        F: Fn(&InitRequest, &mut dyn FnMut(Kind)) -> Result<(), Status> + Send + Sync + 'static,
    {
        let router = Router::new().server_streaming(
            INIT,
            move |_: &Call, request: InitRequest, out: &mut Sender<InitResponse>| {
                handler(&request, &mut |kind| {
                    out.send(&InitResponse { kind: Some(kind) }).unwrap()
                })
            },
        );
        let tls: Arc<dyn Accept> = Arc::new(atls::Server::new(None, None));
        Server::start("node", listener, tls, router, Limits::default()).unwrap()
    }

    struct Operator {
        dir: TempDir,
        options: Options,
    }

    fn operator(node: &str, timeout: u64) -> Operator {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        files::create_private(&file("init-secret"), b"correct horse\n").unwrap();
        let options = Options {
            variant: Variant::named(variant::DEFAULT).unwrap(),
            endpoint: Endpoint::parse(node, 9000).unwrap(),
            policy: file("none"),
            trust: TpmTrust::AnyTpm,
            requires_strong: true,
            init_secret: file("init-secret"),
            wish: Wish::default(),
            master_secret: file("master.json"),
            state: file("state.json"),
            kubeconfig: file("admin.conf"),
            merge_kubeconfig: false,
            log: file("cluster.log"),
            cluster_name: "green".into(),
            kubernetes: None,
            verbose: false,
            is_dry_run: false,
            output: Output::Text,
            timeout: Duration::from_secs(timeout),
        };
        Operator { dir, options }
    }

    impl Operator {
        fn init(&self) -> Result<(), (u8, String)> {
            match initialize(
                |_, _| {
                    Ok(Node {
                        endpoint: self.options.endpoint.clone(),
                        client: atls::Client::new(None, None),
                    })
                },
                &self.options,
            ) {
                Ok(()) => Ok(()),
                Err(error) => Err((error.exit_code(), error.to_string())),
            }
        }

        fn has(&self, name: &str) -> bool {
            self.dir.path().join(name).exists()
        }
    }

    /// The answer of an honest node.
    fn success(request: &InitRequest, kubeconfig: &[u8]) -> Kind {
        let kms = MasterSecret::from_uris(&request.kms_uri, &request.storage_uri).unwrap();
        let secret = kms
            .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
            .unwrap();
        let mut success = InitSuccessResponse::default();
        success.kubeconfig = kubeconfig.to_vec();
        success.cluster_id = cluster_id(&secret, &request.measurement_salt).to_vec();
        Kind::InitSuccess(success)
    }

    #[test]
    fn a_node_gets_the_secrets_that_are_on_disk_and_the_cluster_id_is_kept() {
        let got = Arc::new(Mutex::new(None));
        let keep = got.clone();
        let node = node(move |request, send| {
            *keep.lock().unwrap() = Some(request.clone());
            send(success(request, b""));
            Ok(())
        });
        let operator = operator(&node.local_addr().to_string(), 20);
        operator.init().unwrap();
        let request = got.lock().unwrap().take().unwrap();
        let state = State::open(&operator.options.state).unwrap();
        let kms = master_secret::read(&operator.options.master_secret).unwrap();
        assert_eq!(request.init_secret, b"correct horse");
        assert_eq!(request.cluster_name, "green");
        assert_eq!(request.measurement_salt, state.measurement_salt);
        assert_eq!(
            MasterSecret::from_uris(&request.kms_uri, &request.storage_uri).unwrap(),
            kms
        );
        assert_eq!(
            state.cluster_id,
            Some(expected_cluster_id(&kms, &state.measurement_salt).unwrap())
        );
        assert!(!operator.has("admin.conf") && !operator.has("cluster.log"));
        let (code, text) = operator.init().unwrap_err();
        assert!(code == 1 && text.contains("already exists"), "{text}");
    }

    /// The form that kubeadm writes, with more lines for the user.
    fn admin_conf(in_user: &str) -> String {
        let pair = rcgen::generate_simple_self_signed(vec!["kubernetes".into()]).unwrap();
        let base64 = |text: String| base64::Engine::encode(&base64::prelude::BASE64_STANDARD, text);
        let (certificate, key) = (
            base64(pair.cert.pem()),
            base64(pair.signing_key.serialize_pem()),
        );
        format!(
            "clusters:\n- name: green\n  cluster: {{server: 'https://10.0.0.1:6443', certificate-authority-data: \
             {certificate}}}\nusers:\n- name: a\n  user:\n    client-certificate-data: {certificate}\n    client-key-data: \
             {key}\n{in_user}contexts:\n- name: c\n  context: {{cluster: green, user: a}}\ncurrent-context: c\n"
        )
    }

    #[test]
    fn of_a_nodes_kubeconfig_only_server_and_credentials_are_kept_where_only_the_operator_reads_them()
     {
        let node = node(|request, send| {
            let hostile = admin_conf("    exec: {command: sh, args: [-c, id]}\n    token: t\n");
            send(success(request, hostile.as_bytes()));
            Ok(())
        });
        let operator = operator(&node.local_addr().to_string(), 20);
        operator.init().unwrap();
        let kept = fs::read_to_string(&operator.options.kubeconfig).unwrap();
        assert!(
            kept.contains("server: https://10.0.0.1:6443")
                && kept.contains("name: \"green-admin\""),
            "{kept}"
        );
        assert!(!kept.contains("exec") && !kept.contains("token"), "{kept}");
        assert_eq!(mode_of(&operator.options.kubeconfig), 0o600);
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn of_a_node_whose_kubeconfig_is_refused_the_cluster_id_is_kept() {
        let node = node(|request, send| {
            send(success(
                request,
                admin_conf("").replace("https:", "http:").as_bytes(),
            ));
            Ok(())
        });
        let operator = operator(&node.local_addr().to_string(), 20);
        let (code, text) = operator.init().unwrap_err();
        assert!(
            code == 1
                && text.contains("expected https://HOST:PORT")
                && text.contains("`firstlight kubeconfig`"),
            "{text}"
        );
        let state = State::open(&operator.options.state).unwrap();
        let kms = master_secret::read(&operator.options.master_secret).unwrap();
        let expected = expected_cluster_id(&kms, &state.measurement_salt).unwrap();
        assert_eq!(state.cluster_id, Some(expected));
        assert!(!operator.has("admin.conf"));
    }

    #[test]
    fn what_is_wrong_with_the_cluster_is_said_before_anything_is_written() {
        let wrong = |change: &dyn Fn(&mut Kubernetes)| {
            let mut operator = operator("127.0.0.1:1", 1);
            operator.options.policy = operator.dir.path().join("policy.json");
            let pcr_4 = format!(
                r#"{{"measurements":{{"4":"{}"}},"require":"strong"}}"#,
                "11".repeat(32)
            );
            fs::write(&operator.options.policy, pcr_4).unwrap();
            let mut kubernetes = Kubernetes {
                version: "v1.36.4".parse().unwrap(),
                components: None,
                exceptions: ListExceptions::default(),
                service_cidr: String::new(),
                pod_cidr: String::new(),
                apiserver_sans: vec![],
                has_kubeadm_addons: true,
                addons: None,
                image: None,
                metadata: services::MetadataService::default(),
                skip_wait: false,
                operators: None,
            };
            change(&mut kubernetes);
            operator.options.kubernetes = Some(kubernetes);
            let (code, text) = operator.init().unwrap_err();
            assert!(
                code == 1 && !operator.has("master.json") && !operator.has("state.json"),
                "{text}"
            );
            text
        };
        let text = wrong(&|it| it.components = Some("/nonexistent/components.json".into()));
        assert!(text.contains("/nonexistent/components.json"), "{text}");
        let list = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(list.path(), "[]").unwrap();
        let wrong = |change: &dyn Fn(&mut Kubernetes)| {
            wrong(&|it| {
                it.components = Some(list.path().into());
                change(it);
            })
        };
        assert!(wrong(&|_| {}).contains("no component is installed as kubelet"));
        let text = wrong(&|it| it.service_cidr = "10.96.0.0/33".into());
        assert!(text.contains("10.96.0.0/33"), "{text}");
        let text = wrong(&|it| it.apiserver_sans = vec!["a b".into()]);
        assert!(text.contains("--apiserver-san: "), "{text}");
        let key = SigningKey::generate().public().line();
        let of_anna = |more: &str| {
            format!(r#"{{{more}"required":1,"operators":[{{"name":"anna","key":"{key}"}}]}}"#)
        };
        let later = format!(r#""previous":"{}","#, "0a".repeat(32));
        let file = tempfile::NamedTempFile::new().unwrap();
        for (content, expected) in [
            (
                of_anna("").replace("anna", ""),
                "the name \"\" of an operator",
            ),
            (of_anna(&later), "it replaces another list"),
        ] {
            fs::write(file.path(), content).unwrap();
            let text = wrong(&|it| it.operators = Some(file.path().into()));
            let name = file.path().display().to_string();
            assert!(text.contains(&name) && text.contains(expected), "{text}");
        }
        // without a signed policy the services would not serve
        fs::write(file.path(), of_anna("")).unwrap();
        let text = wrong(&|it| {
            it.operators = Some(file.path().into());
            it.image = Some("example.com/firstlight:1".into());
        });
        assert!(text.contains("`firstlight policy propose "), "{text}");
    }

    #[test]
    fn a_policy_that_accepts_the_old_form_makes_no_cluster_unless_the_operator_says_so() {
        let mut operator = operator("127.0.0.1:1", 1);
        operator.options.kubeconfig = operator.options.init_secret.clone();
        operator.options.policy = operator.dir.path().join("policy.json");
        let mut error = |policy: &str, requires_strong| {
            let pcr_4 = format!(
                r#"{{"measurements":{{"4":"{}"}}{policy}}}"#,
                "11".repeat(32)
            );
            fs::write(&operator.options.policy, pcr_4).unwrap();
            operator.options.requires_strong = requires_strong;
            run(&operator.options).unwrap_err().to_string()
        };
        let refused = error("", true);
        assert!(
            refused.contains(r#"add "require":"strong""#) && refused.contains("--require any"),
            "{refused}"
        );
        for (policy, requires_strong) in [("", false), (r#","require":"strong""#, true)] {
            // the next check
            let next = error(policy, requires_strong);
            assert!(next.contains("it belongs to another cluster"), "{next}");
        }
    }

    #[test]
    fn a_node_with_another_cluster_id_is_not_taken_for_initialized() {
        let node = node(|_, send| {
            let mut other = InitSuccessResponse::default();
            other.cluster_id = vec![7; 32];
            send(Kind::InitSuccess(other));
            Ok(())
        });
        let operator = operator(&node.local_addr().to_string(), 20);
        let (code, text) = operator.init().unwrap_err();
        assert!(
            code == 1 && text.contains(&"07".repeat(32)) && text.contains("do not use this node"),
            "{text}"
        );
        assert_eq!(
            State::open(&operator.options.state).unwrap().cluster_id,
            None
        );
    }

    #[test]
    fn a_failure_is_shown_and_the_nodes_log_kept_though_the_old_system_ends_it_with_an_error() {
        let node = node(|_, send| {
            send(Kind::InitFailure(InitFailureResponse {
                error: "creating kms client: \x1b[2Jno".into(),
            }));
            for chunk in [vec![b'a'; 1024], vec![b'b'; 1024], vec![b'c'; 5]] {
                send(Kind::Log(LogResponseType { log: chunk }));
            }
            Err(Status::new(Code::Unknown, "creating kms client: no"))
        });
        let operator = operator(&node.local_addr().to_string(), 20);
        for _ in 0..2 {
            let (code, text) = operator.init().unwrap_err();
            assert!(
                code == 1 && text.contains("creating kms client: \u{1b}[2Jno"),
                "{text}"
            );
            assert!(
                text.contains("2053 bytes") && text.contains("cluster.log"),
                "{text}"
            );
        }
        let log = fs::read(&operator.options.log).unwrap();
        assert_eq!((log.len(), &log[2048..2054]), (2 * 2053, &b"ccccca"[..]));
        assert_eq!(mode_of(&operator.options.log), 0o600);
    }

    #[test]
    fn a_refusal_by_status_and_an_empty_answer_are_failures() {
        let refusing = node(|_, _| Err(Status::new(Code::PermissionDenied, "wrong init secret")));
        let (code, text) = operator(&refusing.local_addr().to_string(), 20)
            .init()
            .unwrap_err();
        assert!(code == 1 && text.contains("wrong init secret"), "{text}");
        let silent = node(|_, _| Ok(()));
        let (code, text) = operator(&silent.local_addr().to_string(), 20)
            .init()
            .unwrap_err();
        assert!(code == 1 && text.contains("without an answer"), "{text}");
    }

    /// Forwards connections to `to`, and closes the first one on request.
    fn cutting_proxy(
        to: std::net::SocketAddr,
        cut: Arc<Mutex<Option<TcpStream>>>,
    ) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, node) = (client.unwrap(), TcpStream::connect(to).unwrap());
                cut.lock()
                    .unwrap()
                    .get_or_insert(client.try_clone().unwrap());
                for (mut from, mut to) in [
                    (client.try_clone().unwrap(), node.try_clone().unwrap()),
                    (node, client),
                ] {
                    thread::spawn(move || io::copy(&mut from, &mut to));
                }
            }
        });
        address
    }

    #[test]
    fn a_connection_that_breaks_is_made_again_and_the_same_request_finds_the_node_at_work() {
        let requests = Arc::new(Mutex::new(vec![]));
        let cut: Arc<Mutex<Option<TcpStream>>> = Arc::default();
        let (seen, cutting) = (requests.clone(), cut.clone());
        let node = node(move |request, send| {
            seen.lock().unwrap().push(request.clone());
            let event = |phase: &str, line: &str| {
                Kind::Progress(ProgressResponse {
                    phase: phase.into(),
                    line: line.into(),
                    elapsed_millis: 1,
                })
            };
            send(event("components", ""));
            send(event("components", "kubelet: installed"));
            if seen.lock().unwrap().len() == 1 {
                cutting
                    .lock()
                    .unwrap()
                    .as_ref()
                    .unwrap()
                    .shutdown(Shutdown::Both)
                    .unwrap();
                thread::sleep(Duration::from_millis(300));
                return Ok(());
            }
            send(success(request, b""));
            Ok(())
        });
        let proxy = cutting_proxy(node.local_addr(), cut);
        operator(&proxy.to_string(), 20).init().unwrap();
        let requests = requests.lock().unwrap();
        assert!(requests.len() == 2 && requests[0] == requests[1]);
    }

    #[test]
    fn what_the_node_told_before_it_failed_is_in_the_log() {
        let node = node(|_, send| {
            for line in ["", "[preflight] Running", "[error] no containerd"] {
                let (phase, line) = ("kubeadm preflight".into(), line.into());
                send(Kind::Progress(ProgressResponse {
                    phase,
                    line,
                    elapsed_millis: 1500,
                }));
            }
            send(Kind::InitFailure(InitFailureResponse {
                error: "kubeadm failed".into(),
            }));
            Ok(())
        });
        let operator = operator(&node.local_addr().to_string(), 20);
        let (_, text) = operator.init().unwrap_err();
        assert!(text.contains("kubeadm failed"), "{text}");
        let log = fs::read_to_string(&operator.options.log).unwrap();
        assert_eq!(
            log,
            "    1.500s kubeadm preflight: [preflight] Running\n    1.500s kubeadm preflight: [error] no containerd\n"
        );
    }

    #[test]
    fn a_node_that_is_still_booting_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let operator = operator(&address.to_string(), 30);
        thread::scope(|scope| {
            let result = scope.spawn(|| operator.init());
            thread::sleep(Duration::from_millis(700));
            let _node = node_at(TcpListener::bind(address).unwrap(), |request, send| {
                send(success(request, b""));
                Ok(())
            });
            assert_eq!(result.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_node_that_takes_too_long_is_given_up() {
        let node = node(|_, _| {
            thread::sleep(Duration::from_secs(3));
            Ok(())
        });
        let (code, text) = operator(&node.local_addr().to_string(), 1)
            .init()
            .unwrap_err();
        assert_eq!(code, UNREACHABLE, "{text}");
    }
}
