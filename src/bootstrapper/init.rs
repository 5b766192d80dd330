//! The init of a fresh node: checks the whole request before it changes anything, then runs the
//! steps after the node lock.

use std::sync::Arc;

use super::cluster::{self, Plan};
use super::job::Job;
use super::setup::Node;
use base::crypto::MEASUREMENT_SALT_LEN;
use base::crypto::{
    CLUSTER_ID_LEN, Dek, KEY_LEN, MEASUREMENT_SECRET_ID, SSH_HOST_CA_SEED_ID, SSH_USER_CA_SEED_ID,
    Secret, cluster_id,
};
use base::stop::Stop;
use booted_proto::init::InitRequest;
use disk::state_disk::NodeState;
use kms::ClusterKms;
use machines::Role;
use rpc::grpc::{Code, Status};

/// The result of a successful init.
#[derive(Clone)]
pub struct Done {
    /// The ID of the cluster, which the node has measured; it proves to the operator that the node
    /// has the right secrets.
    pub cluster: [u8; CLUSTER_ID_LEN],
    /// The administrator's kubeconfig; empty if the request asked for no Kubernetes cluster.
    pub kubeconfig: Arc<Secret>,
}

/// The secrets of a request, and the ID of the cluster that they define.
pub struct Keys {
    kms: ClusterKms,
    salt: [u8; MEASUREMENT_SALT_LEN],
    /// The cluster's ID.
    pub cluster: [u8; CLUSTER_ID_LEN],
}

impl Keys {
    /// Takes the secrets from a request; checks nothing else.
    pub fn new(request: &InitRequest) -> Result<Keys, Status> {
        let kms = ClusterKms::from_uris(&request.kms_uri, &request.storage_uri)
            .map_err(|e| invalid(e.to_string()))?;
        let salt: [u8; MEASUREMENT_SALT_LEN] = request
            .measurement_salt
            .as_slice()
            .try_into()
            .map_err(|_| {
                let length = request.measurement_salt.len();
                invalid(format!(
                    "measurement_salt has {length} bytes, expected {MEASUREMENT_SALT_LEN}"
                ))
            })?;
        let measurement_secret = derive(&kms, &Dek::named(MEASUREMENT_SECRET_ID))
            .map_err(|why| Status::new(Code::Internal, why))?;
        let cluster = cluster_id(&measurement_secret, &salt);
        Ok(Keys { kms, salt, cluster })
    }
}

/// A request that passed every check that is possible before the lock.
pub struct Init {
    keys: Keys,
    /// Additional names under which clients reach the node.
    names: Vec<String>,
    plan: Option<Plan>,
}

impl Init {
    /// Checks the whole request; changes nothing on the node.
    pub fn new(keys: Keys, request: &InitRequest, node: &Node) -> Result<Init, Status> {
        let unavailable = |error| {
            Status::new(
                Code::Unavailable,
                format!("this node does not know its own identity: {error}"),
            )
        };
        let timeline = node.timeline;
        let me = timeline
            .waiting_for("the metadata service to name this machine", || {
                node.metadata.own_instance()
            })
            .map_err(|error| unavailable(error.to_string()))?;
        if me.role == Role::Worker {
            let why = format!(
                "this machine ({}) is a worker: init another one, which is a control plane",
                me.name
            );
            return Err(Status::new(Code::FailedPrecondition, why));
        }
        let plan = match request.kubernetes_version.is_empty() {
            true => None,
            false => {
                let endpoint = timeline
                    .waiting_for("the metadata service to name the load balancer", || {
                        node.metadata.load_balancer_endpoint()
                    })
                    .map_err(|error| unavailable(error.to_string()))?;
                Some(
                    Plan::new(request, node.cloud, &me, &endpoint, &node.policy)
                        .map_err(|error| invalid(error.to_string()))?,
                )
            }
        };
        Ok(Init {
            keys,
            names: request.apiserver_cert_sans.clone(),
            plan,
        })
    }

    /// Returns the ID of the new cluster.
    pub fn cluster(&self) -> [u8; CLUSTER_ID_LEN] {
        self.keys.cluster
    }

    /// Runs the steps after the lock. Each step survives power loss; the mark of completion is the
    /// last one.
    pub fn run(&self, node: &Node, stop: &Stop, job: &Job<Done>) -> Result<Done, String> {
        job.phase("state disk");
        let state = NodeState {
            role: Role::ControlPlane,
            measurement_salt: self.keys.salt,
        };
        let measurement_secret = derive(&self.keys.kms, &Dek::named(MEASUREMENT_SECRET_ID))?;
        let disk = node.commit_disk(&state, &measurement_secret, |uuid| {
            derive(&self.keys.kms, &Dek::disk(uuid))
        })?;
        job.phase("emergency SSH");
        let principals = self.certify_host(node, stop)?;
        let kubeconfig = match &self.plan {
            Some(plan) => plan
                .run(node, &disk, &principals, stop, job)
                .map_err(|error| error.to_string())?,
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
    fn certify_host(&self, node: &Node, stop: &Stop) -> Result<Vec<String>, String> {
        let authority = |id| {
            let seed = derive(&self.keys.kms, &Dek::named(id))?;
            ssh::Authority::from_seed(&seed).map_err(|error| format!("the SSH authority: {error}"))
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
            .map_err(|error| format!("this node's addresses: {error}"))?;
        ssh::host::install_host_certificate(&node.root, &hosts, users.public(), &principals)
            .map_err(|error| format!("the SSH host certificate: {error}"))?;
        ssh::host::reload_sshd(stop);
        Ok(principals)
    }
}

fn invalid(why: String) -> Status {
    Status::new(Code::InvalidArgument, why)
}

fn derive(kms: &ClusterKms, name: &Dek) -> Result<Secret, String> {
    kms.dek(name, KEY_LEN).map_err(|error| error.to_string())
}
