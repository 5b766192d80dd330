//! What an operator asks of a member: logs, facts, a certificate for Kubernetes, a restart. It needs no shell, no API server, and no
//! certificate of Kubernetes that is still valid.
//!
//! ```text
//!  caller proven ([`callers`]) ─► request sound? ─► written down ([`record`]) ─► done
//! ```
//!
//! The operator first verifies the node by attested TLS, and then proves to be one: by a certificate of the cluster's SSH authority for
//! users, which follows from the master secret and which each node has on its state disk, and by a signature of this connection. A
//! caller without such a certificate can use no other method.

mod callers;
mod clean;
mod control;
mod files;
mod kubeconfig;
mod logs;
mod program;
mod record;
mod restore;
mod support;
mod update;

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use base::machines::Cloud;
use proto::operator::{
    CONTROL, KUBECONFIG, LOGS, LogsResponse, RESTORE_ETCD, REVOKE, RevokeRequest, RevokeResponse,
    SUPPORT, SupportResponse, UPDATE,
};
use rpc::grpc::{Call, Router, Sender, Status};
use ssh::key::PublicKey;

use base::boot::timeline::Timeline;
use base::stop::Stop;
use callers::{OperatorCallers, Right};
use record::CallRecord;

/// The machine of a member.
pub struct MemberMachine {
    /// Where the state disk is mounted.
    pub root: PathBuf,
    /// The folder of all other files: `/`.
    pub files: PathBuf,
    /// The state disk, for a reset; `None` finds it by its serial number.
    pub disk: Option<PathBuf>,
    /// The keys that may sign updates of the image.
    pub update_keys: Vec<PublicKey>,
    /// The cloud.
    pub cloud: Cloud,
    /// Reports a reset.
    pub timeline: Timeline,
    /// Ends running calls.
    pub stop: Stop,
}

impl MemberMachine {
    /// Returns the file with this absolute path.
    fn file(&self, path: &str) -> PathBuf {
        self.files.join(path.trim_start_matches('/'))
    }

    /// Returns the ID of the machine, which names the folder of its journal; empty if it has none.
    fn id(&self) -> String {
        let id = fs::read_to_string(self.file("/etc/machine-id")).unwrap_or_default();
        id.trim().to_owned()
    }
}

/// The service of a member.
pub struct OperatorService {
    callers: OperatorCallers,
    record: CallRecord,
    /// Taken while etcd is restored.
    restoring: Mutex<()>,
    /// Taken while the image is updated.
    updating: Mutex<()>,
    machine: MemberMachine,
}

impl OperatorService {
    /// Makes the service of this machine.
    pub fn new(machine: MemberMachine) -> Arc<OperatorService> {
        Arc::new(OperatorService {
            callers: OperatorCallers::of(&machine.root),
            record: CallRecord::of(&machine.root),
            restoring: Mutex::new(()),
            updating: Mutex::new(()),
            machine,
        })
    }

    /// Adds the methods.
    pub fn serve(self: &Arc<Self>, router: Router) -> Router {
        let [
            of_logs,
            of_support,
            of_restore,
            of_kubeconfig,
            of_control,
            of_revoke,
            of_update,
        ] = std::array::from_fn(|_| self.clone());
        router
            .server_streaming(
                LOGS,
                move |call, request, sender: &mut Sender<LogsResponse>| {
                    of_logs.logs(call, &request, sender)
                },
            )
            .server_streaming(
                SUPPORT,
                move |call, request, sender: &mut Sender<SupportResponse>| {
                    of_support.support(call, &request, sender)
                },
            )
            .streaming(RESTORE_ETCD, move |call, requests, sender| {
                of_restore.restore_etcd(call, requests, sender)
            })
            .streaming(UPDATE, move |call, requests, sender| {
                of_update.update(call, requests, sender)
            })
            .unary(KUBECONFIG, move |call, request| {
                of_kubeconfig.kubeconfig(call, &request)
            })
            .unary(CONTROL, move |call, request| {
                of_control.control(call, &request)
            })
            .unary(REVOKE, move |call, request| {
                of_revoke.revoke(call, &request)
            })
    }

    fn revoke(&self, call: &Call, request: &RevokeRequest) -> Result<RevokeResponse, Status> {
        let caller = self
            .callers
            .of_call(call, request.caller.as_ref(), Right::Change)?;
        let fingerprint = &request.fingerprint;
        let undo = if request.undo {
            "accept again"
        } else {
            "revoke"
        };
        callers::check_fingerprint(fingerprint)?;
        self.record
            .add(call, &caller, &format!("{undo} {fingerprint}"))?;
        self.callers.revoke(fingerprint, request.undo)?;
        Ok(RevokeResponse {})
    }
}
