//! The steps that make a node with a committed disk the first of a Kubernetes cluster:
//!
//! ```text
//! components ─► kubeadm preflight ─► certs ─► kubelet's certificate ─► kubeadm init ─► kubeconfig
//!   ─► API: version, annotation, kubeadm's bindings, this machine's record
//! ```
//!
//! [`ClusterPlan::new`] refuses every invalid value of the operator or the metadata service before
//! anything is changed.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::json;

use crate::steps::{
    error::{Error, SetupRefused},
    etcd,
    job::Job,
    kubelet,
    setup::{self, Kubeadm, NodeParts},
};
use base::backoff::Backoff;
use base::child_process::ChildFailure;
use base::crypto::Secret;
use base::stop::Stop;
use base::uuid::Uuid;
use kubernetes::client::{ApiAccess, CONFIG_MAPS, Client, NODES};
use kubernetes::components::{self, KubernetesComponent};
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::parameters::{self, Networks};
use kubernetes::services::kubeadm_bindings;
use kubernetes::{kubeadm, kubelet_certificate};
use proto::components::Component as Wire;
use proto::init::InitRequest;

/// kubeadm's configuration for the init; it has no secrets.
const KUBEADM: Kubeadm = Kubeadm("/run/firstlight/kubeadm-init.yaml");

/// Time limit for one try of kubeadm's preflight checks, which pull the control plane's images.
const PREFLIGHT: Duration = Duration::from_secs(10 * 60);
/// Maximum number of tries: the container runtime may still be starting, or a registry may be
/// unavailable for a moment.
const PREFLIGHT_TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time limit for commands that only write files.
const SHORT: Duration = Duration::from_secs(5 * 60);
/// Time limit for `kubeadm init`, which has its own time-outs for each of its waits.
const INIT: Duration = Duration::from_secs(30 * 60);
/// Time limit for the API's first answer, and for each call after it.
const API: Duration = Duration::from_secs(5 * 60);
/// Time limit for writing this machine's record, including all tries.
const RECORD: Duration = Duration::from_secs(30);
/// Annotation of a Node: the name of the ConfigMap with its components.
const COMPONENTS: &str = "constellation.edgeless.systems/kubernetes-components";

/// A valid cluster: kubeadm's configuration, and the components.
pub struct ClusterPlan {
    cluster: kubeadm::ClusterSettings,
    node: kubeadm::NodeSettings,
    components: Vec<KubernetesComponent>,
    /// The components as the request has them; they are published in the cluster.
    wire: Vec<Wire>,
    skip_phases: Vec<&'static str>,
}

/// Returns an empty kubeconfig, for a request without a version of Kubernetes.
pub fn none() -> Secret {
    log::info!("skipping the set-up of Kubernetes: the init request has no Kubernetes version");
    Secret::new(Vec::new())
}

impl ClusterPlan {
    /// Checks the request for this `node`, and the load balancer's host.
    pub fn new(
        request: &InitRequest,
        node: kubeadm::NodeSettings,
        endpoint: &str,
        policy: &components::ComponentPolicy,
    ) -> Result<ClusterPlan, SetupRefused> {
        let alternative_names = request
            .apiserver_cert_sans
            .iter()
            .filter(|name| !name.is_empty());
        let cluster = kubeadm::ClusterSettings {
            version: request.kubernetes_version.parse()?,
            name: parameters::cluster_name(&request.cluster_name)?,
            endpoint: parameters::host(endpoint)?,
            alternative_names: alternative_names
                .map(|name| parameters::alternative_name(name))
                .collect::<Result<_, _>>()?,
            networks: Networks::parse(&request.service_cidr, &request.pod_cidr, Some(node.ip))?,
        };
        let wire = request.kubernetes_components.clone();
        let components = wire
            .iter()
            .map(|wire| KubernetesComponent::parse(wire, policy))
            .collect::<Result<_, _>>();
        let components = components.map_err(SetupRefused::Component)?;
        // the operator's tool of Constellation installs its own add-ons, except kube-proxy, which
        // Constellation's conformance tests need
        let mut skip_phases = vec!["preflight", "certs"];
        if !request.kubeadm_addons {
            skip_phases.push("addon/coredns");
        }
        if !request.kubeadm_addons && !request.conformance_mode {
            skip_phases.push("addon/kube-proxy");
        }
        Ok(ClusterPlan {
            cluster,
            node,
            components,
            wire,
            skip_phases,
        })
    }

    /// Runs the steps of the module's picture, and returns the administrator's kubeconfig.
    /// `principals` are the names in the SSH host certificate.
    pub fn run<T: Clone + Send>(
        &self,
        node: &NodeParts,
        disk: &str,
        principals: &[String],
        stop: &Stop,
        job: &Job<T>,
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
            KUBEADM.run(&["init"], &options, INIT + self.more_time(), stop, job)
        })?;

        job.phase("kubeconfig");
        let kubeconfig = self.make_kubeconfig(stop, job)?;
        etcd::prioritize_io(stop, &node.timeline);

        job.phase("Kubernetes API");
        let client = self.connect(&kubeconfig, stop, job)?;
        self.publish(&client)?;
        // they would let each kubelet renew its certificate, also that of a node that was removed
        kubeadm_bindings::delete(&client)?;
        // the cluster works without the record
        if let Err(why) = self.record(&client.within(RECORD), node, disk, principals) {
            job.line(&format!(
                "warning: cannot write the record of this machine: {why}; without it, join service and key service do not serve here, and \
                 the kubelet cannot renew its certificates. `firstlight apply` records that this is a control plane, but does not \
                 bind its name and disk to the machine: only another join does"
            ));
        }
        Ok(kubeconfig)
    }

    /// Runs the preflight checks until they succeed: a failed check has changed nothing, and its
    /// cause may go away.
    fn preflight<T: Clone>(&self, stop: &Stop, job: &Job<T>) -> Result<(), Error> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for _ in 1..PREFLIGHT_TRIES {
            match KUBEADM.run(&["init", "phase", "preflight"], &[], PREFLIGHT, stop, job) {
                Err(Error::Command(error)) if matches!(error.cause, ChildFailure::Failed(_)) => {}
                ended => return ended,
            }
            let pause = backoff.pause();
            job.line(&format!(
                "the checks failed; the next try is in {} s",
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

    /// Returns the time that a slow machine gets in addition.
    fn more_time(&self) -> Duration {
        self.node.kubeadm_timeout.unwrap_or_default()
    }

    fn make_kubeconfig<T: Clone>(&self, stop: &Stop, job: &Job<T>) -> Result<Secret, Error> {
        let client = format!("{}-admin", self.cluster.name);
        let options = ["--client-name", &client, "--org", "system:masters"];
        KUBEADM.output(&["kubeconfig", "user"], &options, SHORT, stop, job)
    }
}

impl ClusterPlan {
    fn connect<T: Clone>(
        &self,
        kubeconfig: &Secret,
        stop: &Stop,
        job: &Job<T>,
    ) -> Result<Client, Error> {
        let kubeconfig = std::str::from_utf8(kubeconfig.expose()).unwrap_or_default();
        let config =
            ApiAccess::from_kubeconfig(kubeconfig, "kubeadm's kubeconfig", Path::new("/"))?;
        let client = Client::new(config, stop).within(API + self.more_time());
        client.wait_ready(&mut |line| job.line(line))?;
        Ok(client)
    }

    /// Publishes the cluster's version and components: joining nodes install them, and upgrades
    /// start from them. Objects and names are the same as Constellation's.
    fn publish(&self, client: &Client) -> Result<(), Error> {
        let config_maps = CONFIG_MAPS.in_namespace("kube-system");
        let list = components::config_map(&self.cluster.version, &self.wire);
        client.create_if_absent(&config_maps, &list)?;
        client.create_if_absent(
            &config_maps,
            &json!({"metadata": {"name": "internal-config"}}),
        )?;
        client.annotate(
            &NODES.named(self.node.name.as_str()),
            &[(
                COMPONENTS,
                list["metadata"]["name"].as_str().unwrap_or_default(),
            )],
        )?;
        Ok(())
    }

    /// Records that this disk, name and address belong to this machine. A join service does the
    /// same for machines that join. So no other machine gets them, and the kubelet's certificate
    /// can be renewed.
    fn record(
        &self,
        client: &Client,
        node: &NodeParts,
        disk: &str,
        principals: &[String],
    ) -> Result<(), Box<dyn std::error::Error>> {
        let disk = Uuid::parse(disk).ok_or("its disk has no UUID")?;
        let machine = node.issuer.machine().map_err(|error| error.to_string())?;
        let host_key = ssh::host::host_key(&node.root)?;
        let name = self.node.name.as_str();
        let record = MachineRecord {
            control_plane: true,
            direct: true,
            addresses: vec![self.node.ip],
            host_key: host_key.line(),
            principals: principals.to_vec(),
            ..MachineRecord::of_node(name, &disk, machine.as_deref(), "", "")
        };
        Ok(machine_record::write_if_absent(client, &record)?)
    }
}
