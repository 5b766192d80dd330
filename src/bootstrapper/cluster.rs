//! The steps that make a node with a committed disk the first of a Kubernetes cluster:
//!
//! ```text
//! components ─► kubeadm preflight ─► certs ─► kubelet's certificate ─► kubeadm init ─► kubeconfig
//!   ─► API: version, annotation, this machine's record
//! ```
//!
//! Whatever an operator or the metadata service can get wrong is refused by [`Plan::new`], before anything is changed.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::command;
use super::etcd;
use super::init::Done;
use super::job::Job;
use super::kubelet;
use super::setup::{self, Error, Kubeadm, Node, Refused};
use base::backoff::Backoff;
use base::crypto::Secret;
use base::stop::Stop;
use cloud::Instance;
use kms::Uuid;
use kubernetes::client::{CONFIG_MAPS, Client, Config, NODES};
use kubernetes::components::{self, Component};
use kubernetes::machine_record::{self, Record};
use kubernetes::parameters::{self, Networks};
use kubernetes::{kubeadm, kubelet_certificate};
use proto::components::Component as Wire;
use proto::init::InitRequest;

/// Told what is to be; no secrets.
const KUBEADM: Kubeadm = Kubeadm("/run/firstlight/kubeadm-init.yaml");

/// For one try of kubeadm's preflight checks, which fetch the images of the control plane.
const PREFLIGHT: Duration = Duration::from_secs(10 * 60);
/// How long they are tried: the container runtime may just be starting, a registry pausing.
const PREFLIGHT_TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// For what only writes files.
const SHORT: Duration = Duration::from_secs(5 * 60);
/// For kubeadm init, which has time-outs of its own for each of its waits.
const INIT: Duration = Duration::from_secs(30 * 60);
/// For the API's first answer, and for each call after it.
const API: Duration = Duration::from_secs(5 * 60);
/// For this machine's record, tries included.
const RECORD: Duration = Duration::from_secs(30);
/// Of a node: the ConfigMap with its components.
const COMPONENTS: &str = "constellation.edgeless.systems/kubernetes-components";

/// A cluster that can be: what kubeadm is told, and the components.
pub struct Plan {
    cluster: kubeadm::Cluster,
    node: kubeadm::Node,
    components: Vec<Component>,
    /// The same as they came; they are published in the cluster.
    wire: Vec<Wire>,
    skip_phases: Vec<&'static str>,
}

/// The kubeconfig where no cluster was asked for.
pub fn none() -> Secret {
    log::info!("no version of Kubernetes was asked for: no cluster is set up");
    Secret::new(Vec::new())
}

impl Plan {
    /// Checks the request, what the metadata service says of this machine, and the load balancer's host.
    pub fn new(
        request: &InitRequest,
        me: &Instance,
        endpoint: &str,
        policy: &components::Policy,
    ) -> Result<Plan, Refused> {
        let node = setup::kubernetes_node(me)?;
        let alternative_names = request
            .apiserver_cert_sans
            .iter()
            .filter(|name| !name.is_empty());
        let cluster = kubeadm::Cluster {
            version: request.kubernetes_version.parse()?,
            name: parameters::cluster_name(&request.cluster_name)?,
            endpoint: parameters::host(endpoint)?,
            alternative_names: alternative_names
                .map(|name| parameters::alternative_name(name))
                .collect::<Result<_, _>>()?,
            networks: Networks::parse(&request.service_cidr, &request.pod_cidr, Some(node.ip))?,
            patience: None,
        };
        let wire = request.kubernetes_components.clone();
        let components = wire
            .iter()
            .map(|wire| Component::parse(wire, policy))
            .collect::<Result<_, _>>();
        let components = components.map_err(Refused::Component)?;
        // the old operator's tool brings its own, but for its conformance tests' kube-proxy
        let mut skip_phases = vec!["preflight", "certs"];
        if !request.kubeadm_addons {
            skip_phases.push("addon/coredns");
        }
        if !request.kubeadm_addons && !request.conformance_mode {
            skip_phases.push("addon/kube-proxy");
        }
        Ok(Plan {
            cluster,
            node,
            components,
            wire,
            skip_phases,
        })
    }

    /// The steps; the module's picture. `principals` are the names in the SSH host certificate. The administrator's kubeconfig.
    pub fn run(
        &self,
        node: &Node,
        disk: &str,
        principals: &[String],
        stop: &Stop,
        job: &Job<Done>,
    ) -> Result<Secret, Error> {
        job.phase("components");
        setup::install_components(&self.components, &node.settings, stop, job)?;
        KUBEADM.configure(&kubeadm::init(&self.cluster, &self.node))?;

        job.phase("kubeadm preflight");
        self.preflight(stop, job)?;
        job.phase("certificates");
        KUBEADM.run(&["init", "phase", "certs", "all"], &[], SHORT, stop, job)?;
        self.issue_kubelet_certificate()?;
        job.phase("kubeadm init");
        let skip = format!("--skip-phases={}", self.skip_phases.join(","));
        let options = ["--skip-token-print", &skip];
        kubelet::watched(stop, job, |stop| {
            KUBEADM.run(&["init"], &options, INIT, stop, job)
        })?;

        job.phase("kubeconfig");
        let kubeconfig = self.make_kubeconfig(stop, job)?;
        etcd::prioritize_io(stop);

        job.phase("Kubernetes API");
        let client = self.connect(&kubeconfig, stop, job)?;
        self.publish(&client)?;
        // the cluster works without it
        if let Err(why) = self.record(&client.within(RECORD), node, disk, principals) {
            job.line(&format!(
                "warning: {why}; until somebody records this machine, its name and disk are not bound to it"
            ));
        }
        Ok(kubeconfig)
    }

    /// What fails here has changed nothing, and may pass.
    fn preflight(&self, stop: &Stop, job: &Job<Done>) -> Result<(), Error> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for _ in 1..PREFLIGHT_TRIES {
            match KUBEADM.run(&["init", "phase", "preflight"], &[], PREFLIGHT, stop, job) {
                Err(Error::Command(command::Error::Failed(..))) => {}
                ended => return ended,
            }
            let pause = backoff.pause();
            job.line(&format!(
                "the checks failed; trying them again in {} s",
                pause.as_secs().max(1)
            ));
            if stop.wait(pause) {
                return Err(Error::Stopped);
            }
        }
        KUBEADM.run(&["init", "phase", "preflight"], &[], PREFLIGHT, stop, job)
    }

    fn issue_kubelet_certificate(&self) -> Result<(), Error> {
        let read = |path: &str| fs::read(path).map_err(|error| Error::Io(path.into(), error));
        let key = Secret::new(read(kubeadm::CA_KEY)?);
        let addresses = [self.node.ip];
        let now = SystemTime::now();
        let ca = read(kubeadm::CA_CERTIFICATE)?;
        let issued =
            kubelet_certificate::issue(&ca, key.expose(), &self.node.name, &[], &addresses, now);
        setup::write_certificate(&issued.map_err(Error::Certificate)?)
    }

    fn make_kubeconfig(&self, stop: &Stop, job: &Job<Done>) -> Result<Secret, Error> {
        let client = format!("{}-admin", self.cluster.name);
        let mut command = KUBEADM.command(&["kubeconfig", "user"]);
        command.args(["--client-name", &client, "--org", "system:masters"]);
        command::output(&mut command, SHORT, stop, &mut |line| job.line(line))
            .map_err(Error::Command)
    }
}

impl Plan {
    fn connect(&self, kubeconfig: &Secret, stop: &Stop, job: &Job<Done>) -> Result<Client, Error> {
        let kubeconfig = std::str::from_utf8(kubeconfig.expose()).unwrap_or_default();
        let config = Config::from_kubeconfig(kubeconfig, "kubeadm's kubeconfig", Path::new("/"))?;
        let client = Client::new(config, stop).within(API);
        client.wait_ready(&mut |line| job.line(line))?;
        Ok(client)
    }

    /// Tells the cluster which version it has and with which components: what joining nodes install, and what upgrades start
    /// from. Objects and names are the old system's.
    fn publish(&self, client: &Client) -> Result<(), Error> {
        let name = components::list_hash(&self.wire).replace(':', "-");
        let name = format!("k8s-components-{name}");
        let config_maps = CONFIG_MAPS.in_namespace("kube-system");
        let version = self.cluster.version.to_string();
        let data =
            json!({"components": components::list_json(&self.wire), "cluster-version": version});
        let immutable = json!({"metadata": {"name": name}, "immutable": true, "data": data});
        client.create_if_absent(&config_maps, &immutable)?;
        client.create_if_absent(
            &config_maps,
            &json!({"metadata": {"name": "internal-config"}}),
        )?;
        client.annotate(
            &NODES.named(self.node.name.as_str()),
            &[(COMPONENTS, &name)],
        )?;
        Ok(())
    }

    /// What a join service would have recorded: that this machine has this disk, name and address. So no other gets them, and
    /// the kubelet's certificate can be renewed.
    fn record(
        &self,
        client: &Client,
        node: &Node,
        disk: &str,
        principals: &[String],
    ) -> Result<(), String> {
        let failed = |why: &dyn std::fmt::Display| format!("this machine is not recorded: {why}");
        let disk = Uuid::parse(disk).ok_or_else(|| failed(&"its disk has no UUID"))?;
        let machine = node.issuer.machine().map_err(|error| failed(&error))?;
        let host_key = ssh::host::host_key(&node.root).map_err(|error| failed(&error))?;
        let name = self.node.name.as_str();
        let record = Record {
            control_plane: true,
            direct: true,
            addresses: vec![self.node.ip],
            host_key: host_key.line(),
            principals: principals.to_vec(),
            ..Record::of_node(name, &disk, machine.as_deref(), "", "")
        };
        machine_record::write_if_absent(client, &record).map_err(|error| failed(&error))
    }
}
