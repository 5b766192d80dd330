//! The environment of a node that joins: a cluster's CAs, a join service with the test's answers, and a kubeadm that records its
//! arguments. The node has its own root file system, so that the test writes nothing to this machine's.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use base::crypto::Secret;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bootstrapper::trust::ticket::CONTROL_PLANE_FILES;
use kubernetes::certificate_request::kubelet_request::authority_hashes;
use proto::components::Component;
use proto::join::{ControlPlaneCertOrKey, IssueJoinTicketRequest, IssueJoinTicketResponse};
use rpc::grpc::{Call, Limits, Router, Server, Status};
use verifier::{Issuer, Measurement, Policy, qemu_vtpm};

use crate::setting::Setting;
use support::openssl::openssl;
use support::program::Program;

pub const DISK_KEY: [u8; 32] = [11; 32];
pub const MEASUREMENT_SECRET: [u8; 32] = [12; 32];
pub const MEASUREMENT_SALT: [u8; 32] = [13; 32];
pub const TOKEN: &str = "abcdef.0123456789abcdef";

/// The folders that the node has for itself while it runs; components are installed in `/run/state`.
const OWN: &str = "etc opt run var/lib";

impl Setting {
    /// `bootstrapper` of a machine of this role. Its `/etc`, `/opt`, `/run` and `/var/lib` are folders of this test. In
    /// `/etc/hosts` the only name is `localhost`.
    pub fn joining(&self, disk: &Path, role: &str) -> Command {
        self.metadata
            .set_self(&self.instance("Node_2", 2).replace("ControlPlane", role));
        let root = self.path("root");
        let script = format!(
            "set -e; for d in {OWN}; do mkdir -p \"$0/$d\"; done; echo 127.0.0.1 localhost >\"$0/etc/hosts\"
             for d in {OWN}; do mount --bind \"$0/$d\" /$d; done; exec \"$@\""
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]);
        if fs::metadata("/proc/self").unwrap().uid() != 0 {
            command.arg("--map-root-user");
        }
        let inner = self.bootstrapper(disk);
        command
            .args(["sh", "-c", &script])
            .arg(&root)
            .arg(inner.get_program())
            .args(inner.get_args());
        command
    }

    /// A file of the node.
    pub fn in_node(&self, path: &str) -> PathBuf {
        self.path("root").join(path.trim_start_matches('/'))
    }

    /// The arguments of the node's kubeadm, one line for each call.
    pub fn kubeadm_calls(&self) -> String {
        fs::read_to_string(self.path("kubeadm/calls")).unwrap_or_default()
    }

    /// A cluster whose nodes get a kubeadm that records its arguments, and the files that it finds, in `kubeadm/` of this test.
    /// Then it runs the shell commands in `more`, with the number of the call in `$n`.
    pub fn cluster(&self, more: &str) -> Arc<Cluster> {
        let (ca, notes) = (self.path("ca"), self.path("kubeadm"));
        fs::create_dir_all(&ca).unwrap();
        fs::create_dir_all(&notes).unwrap();
        openssl(&ca, "ecparam -name prime256v1 -genkey -noout -out ca.key");
        openssl(
            &ca,
            "req -x509 -key ca.key -subj /CN=kubernetes -out ca.crt",
        );
        let notes = notes.display();
        let script = format!(
            "#!/bin/sh
             notes='{notes}'
             echo \"$@\" >>\"$notes/calls\"
             n=$(wc -l <\"$notes/calls\")
             mkdir \"$notes/$n\"
             cp -a /run/firstlight /etc/kubernetes \"$notes/$n\"
             {more}
             exit 0\n"
        );
        let script = format!("data:text/plain;base64,{}", STANDARD.encode(script));
        let ssh = ssh::Authority::from_seed(&Secret::new(vec![7; 32])).unwrap();
        Arc::new(Cluster {
            ca,
            script,
            ssh,
            signing: Mutex::default(),
        })
    }

    /// A join service on machine `number` that proves nothing, like Constellation's. It calls `answer` for each request, with the
    /// number of earlier requests.
    pub fn join_service_that<A>(&self, number: u8, answer: A) -> JoinService
    where
        A: Fn(&Call, IssueJoinTicketRequest, u32) -> Result<IssueJoinTicketResponse, Status>
            + Send
            + Sync
            + 'static,
    {
        self.serve_joins(number, answer, atls::Server::only_old)
    }

    /// Like [`Setting::join_service_that`], but the service proves its machine with `issuer`.
    pub fn join_service_of<A>(&self, number: u8, issuer: Arc<dyn Issuer>, answer: A) -> JoinService
    where
        A: Fn(&Call, IssueJoinTicketRequest, u32) -> Result<IssueJoinTicketResponse, Status>
            + Send
            + Sync
            + 'static,
    {
        self.serve_joins(number, answer, |server| server.attest_strong(issuer))
    }

    fn serve_joins<A>(
        &self,
        number: u8,
        answer: A,
        form: impl FnOnce(atls::Server) -> atls::Server,
    ) -> JoinService
    where
        A: Fn(&Call, IssueJoinTicketRequest, u32) -> Result<IssueJoinTicketResponse, Status>
            + Send
            + Sync
            + 'static,
    {
        let asked = AtomicU32::new(0);
        let handler = move |call: &Call, request: IssueJoinTicketRequest| {
            answer(call, request, asked.fetch_add(1, Ordering::SeqCst))
        };
        let router = Router::new().unary("/join.API/IssueJoinTicket", handler);
        let listener = TcpListener::bind(SocketAddr::new(self.host(number), 30090)).unwrap();
        let fresh = Measurement {
            expected: vec![0; 32],
            warn_only: false,
        };
        let policy = Arc::new(Policy::new([(15, fresh)].into()).unwrap());
        let tls = form(atls::Server::new(
            None,
            Some(verifier::judge(Arc::new(qemu_vtpm::validator(policy)))),
        ));
        JoinService {
            _server: Server::start("join", listener, Arc::new(tls), router, Limits::default())
                .unwrap(),
        }
    }
}

/// A running join service; dropping it stops it.
pub struct JoinService {
    _server: Server,
}

/// The cluster that issues valid tickets.
pub struct Cluster {
    ca: PathBuf,
    script: String,
    ssh: ssh::Authority,
    signing: Mutex<()>,
}

impl Cluster {
    /// Returns a valid ticket for this request.
    pub fn ticket(&self, request: &IssueJoinTicketRequest) -> IssueJoinTicketResponse {
        let _one = self.signing.lock().unwrap();
        fs::write(self.ca.join("request"), &request.certificate_request).unwrap();
        openssl(&self.ca, "req -inform der -in request -noout -verify");
        openssl(
            &self.ca,
            "x509 -req -inform der -in request -CA ca.crt -CAkey ca.key -CAcreateserial -out crt",
        );
        let cluster_ca = fs::read(self.ca.join("ca.crt")).unwrap();
        let host_key = ssh::PublicKey::from_blob(&request.host_public_key).unwrap();
        let certificate = self
            .ssh
            .host_certificate(
                &host_key,
                &request.host_certificate_principals,
                SystemTime::now(),
            )
            .unwrap();
        let file = |name: &str| ControlPlaneCertOrKey {
            name: name.into(),
            data: format!("-----BEGIN {name}-----\n").into_bytes(),
        };
        IssueJoinTicketResponse {
            state_disk_key: DISK_KEY.to_vec(),
            measurement_salt: MEASUREMENT_SALT.to_vec(),
            measurement_secret: MEASUREMENT_SECRET.to_vec(),
            kubelet_cert: fs::read(self.ca.join("crt")).unwrap(),
            api_server_endpoint: "10.42.1.100:6443".into(),
            token: TOKEN.into(),
            discovery_token_ca_cert_hash: authority_hashes(&cluster_ca).unwrap().remove(0),
            control_plane_files: if request.is_control_plane {
                CONTROL_PLANE_FILES.map(|(name, _)| file(name)).to_vec()
            } else {
                vec![]
            },
            node_files: vec![],
            wrapping_key: vec![],
            policy_operators: String::new(),
            policy_number: 0,
            policy_statement: String::new(),
            // a serving certificate, too: its content does not matter here
            kubelet_client_cert: if request.has_client_key {
                fs::read(self.ca.join("crt")).unwrap()
            } else {
                vec![]
            },
            kubernetes_version: String::new(),
            kubernetes_components: vec![self.kubeadm()],
            authorized_ca_public_key: format!("{}\n", self.ssh.public_line()).into_bytes(),
            host_certificate: format!("{certificate}\n").into_bytes(),
            cluster_ca: if request.accepts_cluster_ca {
                cluster_ca
            } else {
                vec![]
            },
        }
    }

    /// The kubeadm of its nodes.
    pub fn kubeadm(&self) -> Component {
        let (url, install_path) = (self.script.clone(), "/run/state/bin/kubeadm".into());
        Component {
            url,
            install_path,
            ..Component::default()
        }
    }

    /// The cluster's CA, PEM.
    pub fn authority(&self) -> String {
        fs::read_to_string(self.ca.join("ca.crt")).unwrap()
    }
}

/// Checks that the node's output does not disclose its token.
pub fn assert_no_token(node: &Program) {
    let output = node.output();
    assert!(
        !output.contains(TOKEN) && !output.contains(TOKEN.split_once('.').unwrap().1),
        "{output}"
    );
}
