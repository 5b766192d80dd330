//! The init of a fresh node: checks the whole request before it changes anything, then runs the
//! steps after the node lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::first::cluster::{self, ClusterPlan};
use crate::steps::{
    error::{self, Error},
    job::Job,
    setup::{self, NodeParts},
};
use base::crypto::MEASUREMENT_SALT_LEN;
use base::crypto::{
    CLUSTER_ID_LEN, Dek, KEY_LEN, MEASUREMENT_SECRET_ID, SSH_HOST_CA_SEED_ID, SSH_USER_CA_SEED_ID,
    Secret, cluster_id,
};
use base::machines::Role;
use base::master_secret::MasterSecret;
use base::stop::Stop;
use base::text::hex;
use disk::state_disk::NodeState;
use kubernetes::wrapping_key;
use node::service_trust::ClusterId;
use proto::init::InitRequest;
use rpc::grpc::{Code, Status};
use ssh::operators::{Newest, OperatorList};

/// The result of a successful init.
#[derive(Clone)]
pub struct Done {
    /// The ID of the cluster, which the node has measured; it proves to the operator that the node
    /// has the right secrets.
    pub cluster: [u8; CLUSTER_ID_LEN],
    /// The administrator's kubeconfig; empty if the request asked for no Kubernetes cluster.
    pub kubeconfig: Arc<Secret>,
}

/// Why an init is refused. Nothing on the node has changed.
#[derive(Debug)]
pub enum InitRefused {
    /// The init secret is wrong.
    Secret,
    /// The init secret was not checked: when to try again.
    Busy(Duration),
    /// The request's location of the master secret cannot be used.
    MasterSecret(base::master_secret::Error),
    /// The measurement salt has a wrong length.
    Salt(usize),
    /// The keys cannot be derived.
    Derivation(base::master_secret::Error),
    /// The metadata service does not describe this machine.
    NoIdentity(base::machines::Error),
    /// The machine of this name is a worker.
    Worker(String),
    /// The machine cannot become the node that the request describes.
    Node(error::SetupRefused),
    /// The request is for another cluster than the setting `cluster-id` names: the ID of each.
    OtherCluster {
        /// The request's.
        got: [u8; CLUSTER_ID_LEN],
        /// The setting's.
        expected: [u8; CLUSTER_ID_LEN],
    },
    /// The list of operators who sign policies is wrong.
    Operators(ssh::operators::Error),
    /// There is a list of operators, and no Kubernetes whose services would ask for signatures.
    OperatorsWithoutKubernetes,
    /// Another cluster has the node lock.
    Locked,
    /// This node is stopping.
    Stopping,
}

impl InitRefused {
    /// Returns the code for the operator's program.
    pub fn code(&self) -> Code {
        match self {
            InitRefused::Secret => Code::PermissionDenied,
            InitRefused::MasterSecret(_)
            | InitRefused::Salt(_)
            | InitRefused::Operators(_)
            | InitRefused::OperatorsWithoutKubernetes
            | InitRefused::Node(_) => Code::InvalidArgument,
            InitRefused::Worker(_) | InitRefused::Locked | InitRefused::OtherCluster { .. } => {
                Code::FailedPrecondition
            }
            InitRefused::Busy(_) | InitRefused::NoIdentity(_) | InitRefused::Stopping => {
                Code::Unavailable
            }
            InitRefused::Derivation(_) => Code::Internal,
        }
    }
}

impl fmt::Display for InitRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InitRefused::Secret => f.write_str("invalid init secret"),
            InitRefused::Busy(pause) => f.write_str(Status::busy(*pause).message()),
            InitRefused::MasterSecret(error) | InitRefused::Derivation(error) => error.fmt(f),
            InitRefused::Salt(length) => write!(
                f,
                "measurement_salt has {length} bytes, expected {MEASUREMENT_SALT_LEN}"
            ),
            InitRefused::Operators(error) => write!(f, "policy_operators: {error}"),
            InitRefused::OperatorsWithoutKubernetes => f.write_str(
                "policy_operators: only the services of a Kubernetes cluster ask for signatures, and the request has no version of Kubernetes",
            ),
            InitRefused::NoIdentity(error) => {
                write!(f, "this node does not know its own identity: {error}")
            }
            InitRefused::Worker(name) => write!(
                f,
                "this machine ({name}) is a worker: init a control plane instead"
            ),
            InitRefused::Node(refused) => refused.fmt(f),
            InitRefused::OtherCluster { got, expected } => write!(
                f,
                "this machine's image is for the cluster {} (setting cluster-id), but this master secret and state file make the cluster \
                 {}: use the files of the image's cluster",
                hex(expected),
                hex(got)
            ),
            InitRefused::Locked => f.write_str(
                "node is already being activated: it joins a cluster that gave it a ticket, or it accepted another \
                 operator's init",
            ),
            InitRefused::Stopping => f.write_str("this node is stopping"),
        }
    }
}

/// The secrets of a request, and the ID of the cluster that they define.
pub struct InitSecrets {
    kms: MasterSecret,
    salt: [u8; MEASUREMENT_SALT_LEN],
    /// The cluster's ID.
    pub cluster: [u8; CLUSTER_ID_LEN],
}

impl InitSecrets {
    /// Takes the secrets from a request; checks nothing else.
    pub fn new(request: &InitRequest) -> Result<InitSecrets, InitRefused> {
        let kms = MasterSecret::from_uris(&request.kms_uri, &request.storage_uri)
            .map_err(InitRefused::MasterSecret)?;
        let salt = request.measurement_salt.as_slice();
        let salt: [u8; MEASUREMENT_SALT_LEN] =
            salt.try_into().map_err(|_| InitRefused::Salt(salt.len()))?;
        let measurement_secret =
            derive(&kms, &Dek::named(MEASUREMENT_SECRET_ID)).map_err(InitRefused::Derivation)?;
        let cluster = cluster_id(&measurement_secret, &salt);
        Ok(InitSecrets { kms, salt, cluster })
    }
}

/// A request that passed every check that is possible before the lock.
pub struct Init {
    keys: InitSecrets,
    /// Additional names under which clients reach the node.
    names: Vec<String>,
    /// The list of the operators who sign policies.
    operators: Option<String>,
    plan: Option<ClusterPlan>,
}

impl Init {
    /// Checks the whole request; changes nothing on the node.
    pub fn new(
        keys: InitSecrets,
        request: &InitRequest,
        node: &NodeParts,
    ) -> Result<Init, InitRefused> {
        if let Some(ClusterId(expected)) = node.trust.settings.cluster
            && expected != keys.cluster
        {
            let got = keys.cluster;
            return Err(InitRefused::OtherCluster { got, expected });
        }
        let operators = operators(request).map_err(InitRefused::Operators)?;
        if operators.is_some() && request.kubernetes_version.is_empty() {
            return Err(InitRefused::OperatorsWithoutKubernetes);
        }
        let timeline = node.timeline;
        let me = timeline
            .waiting_for("the metadata service to name this machine", || {
                node.metadata.own_instance()
            })
            .map_err(InitRefused::NoIdentity)?;
        if me.role == Role::Worker {
            return Err(InitRefused::Worker(me.name));
        }
        let plan = if request.kubernetes_version.is_empty() {
            None
        } else {
            let endpoint = timeline
                .waiting_for("the metadata service to name the load balancer", || {
                    node.metadata.load_balancer_endpoint()
                })
                .map_err(InitRefused::NoIdentity)?;
            let kubernetes =
                setup::kubernetes_node(node.has_cloud_controller, &me, node.kubeadm_timeout);
            let plan = kubernetes
                .and_then(|machine| ClusterPlan::new(request, machine, &endpoint, &node.policy));
            Some(plan.map_err(InitRefused::Node)?)
        };
        Ok(Init {
            keys,
            names: request.apiserver_cert_sans.clone(),
            operators,
            plan,
        })
    }

    /// Returns the ID of the new cluster.
    pub fn cluster(&self) -> [u8; CLUSTER_ID_LEN] {
        self.keys.cluster
    }

    /// Runs the steps after the lock. Each step survives power loss; the mark of completion is the
    /// last one.
    pub fn run(&self, node: &NodeParts, stop: &Stop, job: &Job<Done>) -> Result<Done, Error> {
        job.phase("state disk");
        let state = NodeState {
            role: Role::ControlPlane,
            measurement_salt: self.keys.salt,
        };
        let measurement_secret = derive(&self.keys.kms, &Dek::named(MEASUREMENT_SECRET_ID))?;
        let disk = node.commit_disk(&state, &measurement_secret, |uuid| {
            Ok(derive(&self.keys.kms, &Dek::disk(uuid))?)
        })?;
        job.phase("emergency SSH");
        let principals = self.certify_host(node, stop)?;
        let kubeconfig = match &self.plan {
            Some(plan) => {
                setup::place_wrapping_key(&wrapping_key::of(&self.keys.kms))?;
                if let Some(list) = &self.operators {
                    setup::place_operators(list, &self.cluster(), &Newest::default())?;
                }
                plan.run(node, &disk, &principals, stop, job)?
            }
            None => cluster::none(),
        };
        node.complete()?;
        Ok(Done {
            cluster: self.cluster(),
            kubeconfig: Arc::new(kubeconfig),
        })
    }

    /// Sets up emergency SSH: the holder of the master secret can log in, and recognizes the node
    /// by the names returned here.
    fn certify_host(&self, node: &NodeParts, stop: &Stop) -> Result<Vec<String>, Error> {
        let authority = |id| {
            let seed = derive(&self.keys.kms, &Dek::named(id))?;
            ssh::Authority::from_seed(&seed)
                .map_err(|error| Error::Ssh("the SSH authority", error.into()))
        };
        let (hosts, users) = (
            authority(SSH_HOST_CA_SEED_ID)?,
            authority(SSH_USER_CA_SEED_ID)?,
        );
        // wildcard names are only for TLS
        let names: Vec<String> = self
            .names
            .iter()
            .filter(|name| ssh::is_principal(name))
            .cloned()
            .collect();
        let principals = ssh::host::principals(&names)
            .map_err(|error| Error::Ssh("this node's addresses", error.into()))?;
        ssh::host::install_host_certificate(&node.root, &hosts, users.public(), &principals)
            .map_err(|error| Error::Ssh("the SSH host certificate", error.into()))?;
        ssh::host::reload_sshd(stop);
        Ok(principals)
    }
}

/// Checks the list of the operators who sign policies; `None` if the cluster has none.
fn operators(request: &InitRequest) -> Result<Option<String>, ssh::operators::Error> {
    if request.policy_operators.is_empty() {
        return Ok(None);
    }
    OperatorList::parse(&request.policy_operators)?;
    Ok(Some(request.policy_operators.clone()))
}

fn derive(kms: &MasterSecret, name: &Dek) -> Result<Secret, base::master_secret::Error> {
    kms.dek(name, KEY_LEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_without_usable_secrets_is_refused_for_good() {
        let refused = |kms: &str, salt| {
            let mut request = InitRequest::default();
            request.kms_uri = kms.into();
            request.storage_uri = "storage://no-store".into();
            request.measurement_salt = vec![1; salt];
            let refused = InitSecrets::new(&request).err().unwrap();
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
            refused
        };
        let sound = "kms://cluster-kms?key=AAAAAAAAAAAAAAAAAAAAAA&salt=AAAAAAAAAAAAAAAAAAAAAA";
        assert!(matches!(refused(sound, 31), InitRefused::Salt(31)));
        assert!(matches!(
            refused("kms://", 32),
            InitRefused::MasterSecret(_)
        ));
    }
}
