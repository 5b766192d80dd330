//! The join of a node that has its ticket, after the node lock:
//!
//! ```text
//! state disk: commit ─► node files ─► emergency SSH ─► components ─► certificates ─► kubeadm join ─► complete
//!                                                                        ▲              │ a temporary reason
//!                                                                        └─ kubeadm reset
//! ```
//!
//! After kubeadm has announced the new member to etcd, there is no reset between the tries: it would
//! stop the member, and a cluster of two control planes would lose etcd's majority. The next try
//! begins with the join of etcd.
//!
//! Each step can be repeated. A step that fails ends the join: the disk is reset, and the node
//! starts over at its next boot.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::steps::{
    error::Error,
    etcd,
    job::Job,
    kubelet,
    setup::{self, Kubeadm, NodeParts, install_components, program},
};
use crate::trust::ticket::Ticket;
use base::backoff::Backoff;
use base::child_process::ChildFailure;
use base::crypto::CLUSTER_ID_LEN;
use base::file;
use base::machines::Role;
use base::stop::Stop;
use disk::state_disk::NodeState;
use kubernetes::kubeadm::{self, JoinStart, Trust};
use kubernetes::parameters;

/// kubeadm's configuration for the join; it has the token.
const KUBEADM: Kubeadm = Kubeadm("/run/firstlight/kubeadm-join.yaml");
/// The directory of the keys and certificates that all control planes share.
const PKI: &str = "/etc/kubernetes/pki";
/// The directory of the operator's files, below the mount point of the state disk.
const NODE_FILES: &str = "firstlight/files";

/// Time limit for one try of `kubeadm join`, which has its own time limit for each wait. A control
/// plane also pulls images.
const JOIN: Duration = Duration::from_secs(15 * 60);
/// Time limit for `kubeadm reset`.
const RESET: Duration = Duration::from_secs(10 * 60);
/// Maximum number of tries of `kubeadm join`.
const TRIES: u32 = 5;
/// Lifetime of Constellation's tokens: a try that starts later always fails.
const TOKEN_LIFE: Duration = Duration::from_secs(15 * 60);
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// kubeadm's exit code when its preflight checks fail and nothing was changed (kubeadm's
/// PreFlightExitCode).
const PREFLIGHT_FAILED: i32 = 2;
/// kubeadm's exit code for an invalid configuration (ValidationExitCode).
const CONFIGURATION_REFUSED: i32 = 3;
/// Texts in kubeadm's last lines, in lower case, that indicate a temporary failure.
const PASSING: [&str; 17] = [
    "timed out",
    "timeout",
    "deadline exceeded",
    "connection refused",
    "connection reset",
    "no route to host",
    "network is unreachable",
    "unexpected eof",
    "no such host",
    "server is currently unable",
    "too many requests",
    "etcdserver:",
    // etcd's new member, on a slow machine
    "is not started",
    // one API server does not know the token yet, or has not signed with it yet
    "unauthorized",
    "jws signature",
    "not yet available",
    // the same node, as the previous try registered it
    "status \"ready\" already exists",
];

/// Texts that indicate a permanent failure, even if other lines look temporary: the API server
/// belongs to another cluster.
const LASTING: [&str; 3] = [
    "failed to verify certificate",
    "unknown authority",
    "none of the public keys",
];

/// A checked ticket, and the node that received it.
pub struct Join {
    ticket: Ticket,
    node: kubeadm::NodeSettings,
    role: Role,
    api_server: String,
    since: Instant,
}

impl Join {
    /// Creates the join of `node`. As in Constellation, the node uses the load balancer that the
    /// metadata service names instead of the ticket's API server, unless that load balancer is the
    /// node itself.
    pub fn new(
        ticket: Ticket,
        node: kubeadm::NodeSettings,
        role: Role,
        load_balancer: Option<&str>,
    ) -> Join {
        let balanced = load_balancer.and_then(|host| balanced(host, node.ip));
        let api_server = balanced.unwrap_or_else(|| ticket.api_server.clone());
        Join {
            ticket,
            node,
            role,
            api_server,
            since: Instant::now(),
        }
    }

    /// Returns the ID of the cluster to join.
    pub fn cluster(&self) -> [u8; CLUSTER_ID_LEN] {
        self.ticket.cluster()
    }

    /// Runs the steps after the lock. Each step survives power loss; the mark of completion is the
    /// last one.
    pub fn run(&self, node: &NodeParts, stop: &Stop, job: &Job<()>) -> Result<(), Error> {
        job.phase("state disk");
        let state = NodeState {
            role: self.role,
            measurement_salt: self.ticket.measurement_salt,
        };
        node.commit_disk(&state, &self.ticket.measurement_secret, |_| {
            Ok(self.ticket.disk_key.clone())
        })?;
        if let Some(key) = &self.ticket.wrapping_key {
            setup::place_wrapping_key(key)?;
        }
        if let Some((list, newest)) = &self.ticket.operators {
            setup::place_operators(list, &self.cluster(), newest)?;
        }
        job.phase("node files");
        for (name, content) in &self.ticket.node_files {
            let path = node.root.join(NODE_FILES).join(name);
            setup::write(&path, 0o600, content.expose())?;
        }
        job.phase("emergency SSH");
        self.certify_host(node, stop)?;
        job.phase("components");
        install_components(&self.ticket.components, &node.settings, stop, job)?;
        job.phase("kubeadm join");
        self.join(stop, job)?;
        etcd::prioritize_io(stop, &node.timeline);
        node.complete()
    }

    fn certify_host(&self, node: &NodeParts, stop: &Stop) -> Result<(), Error> {
        let (authority, certificate) = (&self.ticket.ssh_authority, &self.ticket.ssh_certificate);
        ssh::host::install(&node.root, authority, certificate)
            .map_err(|error| Error::Ssh("the SSH host certificate", error.into()))?;
        if let Some(missing) = missing_for_ssh(authority, certificate) {
            node.timeline.event("ssh", missing);
        }
        ssh::host::reload_sshd(stop);
        Ok(())
    }

    /// Tries `kubeadm join` until it succeeds, fails for a permanent reason, or the token is too
    /// old.
    fn join(&self, stop: &Stop, job: &Job<()>) -> Result<(), Error> {
        let _token_files = TokenFiles;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut is_changed = false;
        for attempt in 1.. {
            let start = if attempt > 1 && self.is_announced() {
                JoinStart::AtEtcd
            } else {
                self.write_files()?;
                JoinStart::Beginning
            };
            self.configure(start)?;
            let joined = kubelet::watched(stop, job, |stop| {
                let limit = JOIN + self.node.kubeadm_timeout.unwrap_or_default();
                KUBEADM.run(&["join"], &[], limit, stop, job)
            });
            let Err(error) = joined else { return Ok(()) };
            is_changed |= !is_preflight(&error);
            if !may_pass(&error) || attempt == TRIES || self.since.elapsed() > TOKEN_LIFE {
                if is_changed && self.role == Role::ControlPlane && !stop.is_stopped() {
                    // its disk will be formatted: etcd should not count on this member then
                    clean_up(stop, job);
                }
                return Err(error);
            }
            let pause = backoff.pause();
            let is_announced = self.is_announced();
            job.line(&format!(
                "kubeadm join failed; the next try is in {} s{}",
                pause.as_secs().max(1),
                if is_announced {
                    ", and continues with etcd, which already has this member"
                } else {
                    ""
                }
            ));
            if is_changed && !is_announced {
                clean_up(stop, job);
            }
            if stop.wait(pause) {
                return Err(Error::Stopped);
            }
        }
        Ok(())
    }

    /// Returns whether kubeadm has announced this member to etcd, after which it writes etcd's manifest.
    fn is_announced(&self) -> bool {
        self.role == Role::ControlPlane && Path::new(etcd::MANIFEST).exists()
    }

    /// Writes the files that kubeadm reads, except its configuration. A `kubeadm reset` removes
    /// most of them.
    fn write_files(&self) -> Result<(), Error> {
        for (name, is_secret, content) in &self.ticket.control_plane_files {
            let mode = if *is_secret { 0o600 } else { 0o644 };
            setup::write(&Path::new(PKI).join(name), mode, content.expose())?;
        }
        setup::write_certificate(&self.ticket.kubelet)?;
        setup::write_client_certificate(self.ticket.kubelet_client.as_ref())?;
        if let Trust::Authority(authority) = &self.ticket.trust {
            let discovery = kubeadm::discovery(&self.api_server, authority);
            setup::write(Path::new(kubeadm::DISCOVERY), 0o600, discovery.as_bytes())?;
        }
        Ok(())
    }

    /// Writes kubeadm's configuration.
    fn configure(&self, start: JoinStart) -> Result<(), Error> {
        let settings = kubeadm::JoinSettings {
            api_server: self.api_server.clone(),
            token: self.ticket.token.clone(),
            trust: self.ticket.trust.clone(),
            control_plane: self.role == Role::ControlPlane,
            start,
        };
        KUBEADM.configure(&kubeadm::join_configuration(&settings, &self.node))
    }
}

/// Returns what emergency SSH lacks after a ticket of an earlier release of Constellation.
fn missing_for_ssh(authority: &[u8], certificate: &[u8]) -> Option<&'static str> {
    match (authority, certificate) {
        ([], _) => {
            Some("the ticket has no SSH authority: emergency SSH does not work on this node")
        }
        (_, []) => {
            Some("the ticket has no SSH host certificate: SSH clients cannot verify this node")
        }
        _ => None,
    }
}

/// Returns `host:port` of the API server behind a load balancer; `None` if `host` is this node or
/// is invalid.
fn balanced(host: &str, own: IpAddr) -> Option<String> {
    let host = parameters::host(host).ok()?;
    match host.parse::<IpAddr>() {
        Ok(address) if address == own => None,
        Ok(IpAddr::V6(address)) => Some(format!("[{address}]:{}", kubeadm::API_SERVER_PORT)),
        _ => Some(format!("{host}:{}", kubeadm::API_SERVER_PORT)),
    }
}

/// Returns whether another try may succeed: the API server was unreachable or not ready, or a step
/// timed out.
fn may_pass(error: &Error) -> bool {
    let Error::Command(error) = error else {
        return false;
    };
    match &error.cause {
        ChildFailure::Late(_) => true,
        ChildFailure::Failed(status) => match status.code() {
            // the container runtime may still be starting, or a registry may be unavailable for a
            // moment
            Some(PREFLIGHT_FAILED) => true,
            Some(CONFIGURATION_REFUSED) | None => false,
            Some(_) => {
                let text = error.last_lines.join("\n").to_lowercase();
                let says = |all: &[&str]| all.iter().any(|words| text.contains(words));
                says(&PASSING) && !says(&LASTING)
            }
        },
        _ => false,
    }
}

/// Returns whether kubeadm has changed nothing in this try, because its first checks failed.
fn is_preflight(error: &Error) -> bool {
    let Error::Command(error) = error else {
        return false;
    };
    matches!(&error.cause, ChildFailure::Failed(status) if status.code() == Some(PREFLIGHT_FAILED))
}

/// Removes what a failed try left behind: kubelet, manifests, and as far as kubeadm can, the member of etcd. A failure is
/// only reported; the next try may still succeed.
fn clean_up(stop: &Stop, job: &Job<()>) {
    let mut reset = program("kubeadm");
    reset.args(["reset", "--force", "--cri-socket", kubeadm::CONTAINERD]);
    if let Err(error) = setup::run(&mut reset, RESET, stop, job) {
        job.line(&format!("cannot clean up: {error}"));
    }
}

/// The files that contain the token. Dropping this value removes them, whether the join succeeded
/// or not.
struct TokenFiles;

impl Drop for TokenFiles {
    fn drop(&mut self) {
        for path in [KUBEADM.0, kubeadm::DISCOVERY] {
            if let Err(error) = file::remove_if_present(Path::new(path)) {
                log::warn!("cannot remove {path}, which contains the bootstrap token: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;
    use base::child_process;

    fn ended(cause: ChildFailure, line: &str) -> Error {
        Error::Command(child_process::Error {
            program: "kubeadm join".into(),
            cause,
            last_lines: vec![line.into()],
        })
    }

    fn failed(code: i32, line: &str) -> Error {
        ended(ChildFailure::Failed(ExitStatus::from_raw(code << 8)), line)
    }

    #[test]
    fn only_what_can_pass_is_tried_again() {
        for line in [
            "error execution phase preflight: couldn't validate the identity of the API Server: Get \"https://10.0.0.1:6443\": \
             dial tcp 10.0.0.1:6443: connect: connection refused",
            "error execution phase kubelet-start: timed out waiting for the condition",
            "error execution phase control-plane-join/etcd: etcdserver: can only promote a learner member",
            "couldn't validate the identity of the API Server: could not find a JWS signature in the cluster-info ConfigMap",
            "failed to get config map: Unauthorized",
        ] {
            assert!(may_pass(&failed(1, line)), "{line}");
        }
        for line in [
            "",
            "cluster CA found in cluster-info ConfigMap is invalid: none of the public keys are pinned",
            "couldn't validate the identity of the API Server: Abort reading the cluster-info ConfigMap after timeout of 5m0s: \
             Get \"https://10.0.0.1:6443\": tls: failed to verify certificate: x509: certificate signed by unknown authority",
        ] {
            assert!(!may_pass(&failed(1, line)), "{line}");
        }
        assert!(may_pass(&failed(2, "[ERROR CRI]")) && !may_pass(&failed(3, "timeout")));
        assert!(may_pass(&ended(ChildFailure::Late(JOIN), "")) && !may_pass(&Error::Stopped));
        let killed = ChildFailure::Failed(ExitStatus::from_raw(9));
        assert!(!may_pass(&ended(killed, "timeout")));
    }

    #[test]
    fn a_load_balancer_goes_before_the_ticket_unless_it_is_this_node() {
        let own = "10.0.0.2".parse().unwrap();
        assert_eq!(balanced("10.0.0.1", own).as_deref(), Some("10.0.0.1:6443"));
        assert_eq!(
            balanced("lb.example", own).as_deref(),
            Some("lb.example:6443")
        );
        assert_eq!(balanced("fd00::1", own).as_deref(), Some("[fd00::1]:6443"));
        assert_eq!(
            (balanced("10.0.0.2", own), balanced("a:1", own)),
            (None, None)
        );
    }
}
