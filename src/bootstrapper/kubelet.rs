//! The kubelet of a node that has been a member before this boot. (On the way to becoming one, kubeadm starts it.)

use std::process::Command;
use std::time::Duration;

use super::command::{self, Error};
use crate::stop::Stop;

/// For the unit's start, with what it waits for.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// Starts the kubelet's unit, which is not enabled: only a node whose disk its cluster opened runs it. By systemctl, which is
/// wherever systemd is, and waits for the result; a D-Bus client of our own would do no more.
pub fn start(stop: &Stop) -> Result<(), Error> {
    let mut command = Command::new("systemctl");
    command.args(["start", "kubelet.service"]);
    command::run(&mut command, LIMIT, stop, &mut |line| log::info!("systemctl: {line}"))
}
