//! Restarts the machine or a unit, switches the machine off, or frees space on its disk.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use disk::state_disk::device;
use kubernetes::kubeadm::KUBELET_CERTIFICATES;
use kubernetes::kubelet_certificate;
use proto::operator::{Action, ControlRequest, ControlResponse};
use rpc::grpc::{Call, Code, Status};

use super::OperatorService;
use super::callers::Right;
use super::logs::check_unit;
use crate::state::{header_lock::HeaderLock, state_disk};
use crate::steps::etcd;
use base::child_process;

/// Time limit for one call of systemctl; a unit may take as long to restart.
const LIMIT: Duration = Duration::from_secs(5 * 60);

impl OperatorService {
    pub(super) fn control(
        &self,
        call: &Call,
        request: &ControlRequest,
    ) -> Result<ControlResponse, Status> {
        let caller = self
            .callers
            .of_call(call, request.caller.as_ref(), Right::Change)?;
        let invalid = |text: String| Status::new(Code::InvalidArgument, text);
        let node = self.check_name(&request.node)?;
        let action = Action::try_from(request.action).unwrap_or(Action::Unknown);
        let (what, arguments): (_, &[&str]) = match action {
            Action::Clean => ("clean", &[]),
            Action::Unknown => return Err(invalid("this node does not know that action".into())),
            Action::Reboot => ("reboot", &["reboot", "--no-block"]),
            Action::PowerOff => ("shutdown", &["poweroff", "--no-block"]),
            Action::Reset => {
                self.check_no_etcd(&node)?;
                ("reset", &["reboot", "--no-block"])
            }
            Action::RestartUnit => {
                check_unit(&request.unit)?;
                ("restart", &["restart", "--", &request.unit])
            }
        };
        self.record
            .add(call, &caller, format!("{what} {}", request.unit).trim())?;
        let machine = &self.machine;
        if action == Action::Clean {
            let report = self.clean();
            return Ok(ControlResponse { node, report });
        }
        if action == Action::Reset {
            let failed = |error: String| Status::new(Code::Internal, error);
            let disk = device::find(
                machine.disk.as_deref(),
                machine.cloud,
                &machine.stop,
                &machine.timeline,
            );
            let disk = disk.map_err(|error| failed(error.to_string()))?;
            let _lock = HeaderLock::take(&disk).map_err(|error| failed(error.to_string()))?;
            state_disk::mark_for_reset(&disk).map_err(|error| failed(error.to_string()))?;
        }
        let mut command = Command::new("systemctl");
        child_process::run(
            command.args(arguments),
            Stdio::null(),
            LIMIT,
            &machine.stop,
            &mut |line| log::info!("systemctl: {line}"),
        )
        .map_err(|error| Status::new(Code::Internal, error.to_string()))?;
        let report = String::new();
        Ok(ControlResponse { node, report })
    }

    /// Refuses a control plane: its member of etcd would stay, and expect the data that it had.
    fn check_no_etcd(&self, node: &str) -> Result<(), Status> {
        if self.machine.file(etcd::MANIFEST).exists() {
            Err(Status::new(
                Code::FailedPrecondition,
                format!(
                    "{node} is a control plane, which cannot be reset: run `firstlight node remove {node} --may-return`, then give the machine a blank disk"
                ),
            ))
        } else {
            Ok(())
        }
    }

    /// Returns the name of this node if the caller means it: the proof of the node does not say which member of the cluster it is, and
    /// addresses move.
    pub(super) fn check_name(&self, meant: &str) -> Result<String, Status> {
        let node = self.own_name()?;
        if node == meant {
            Ok(node)
        } else {
            Err(Status::new(
                Code::FailedPrecondition,
                format!("this is the node {node}, the call is for {meant:?}"),
            ))
        }
    }

    /// Returns the name of this node in its cluster, which its kubelet's first certificate has.
    pub(super) fn own_name(&self) -> Result<String, Status> {
        let paths = KUBELET_CERTIFICATES.map(|(certificate, _)| certificate);
        let node = paths
            .iter()
            .filter_map(|path| fs::read(self.machine.file(path)).ok())
            .find_map(|certificate| kubelet_certificate::node_of(&certificate));
        node.ok_or_else(|| {
            let paths = paths.join(" or ");
            let text =
                format!("the node does not know its name: no certificate of a kubelet in {paths}");
            Status::new(Code::Internal, text)
        })
    }
}
