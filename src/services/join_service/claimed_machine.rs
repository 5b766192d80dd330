//! Checks that a caller is the machine that it claims to be, by the cloud's list of machines
//! ([`Instances`]).
//!
//! Attestation proves what a machine runs, but not which machine of the cloud it is. The source
//! address tells that: in a cloud's network, no other machine can have it. A load balancer may hide
//! the address. A machine behind a load balancer can join only as a worker, which gets nothing but
//! what any worker gets. A control plane has to call directly.
//!
//! Without a list, only workers are accepted: with any name, but only with their own source address.

use std::net::IpAddr;
use std::time::Duration;

use super::request::JoinRequest;
use crate::cluster::instances::Instances;
use crate::cluster::known_machines::KnownMachines;
use crate::cluster::refusal::TicketRefusal;
use base::machines::{Instance, Role};

/// When a control plane that called through a load balancer may try again. By then the load
/// balancer may have been reconfigured to keep source addresses.
const NOT_DIRECT: Duration = Duration::from_secs(60);

/// Checks that the machine at address `peer` may have the name, addresses and role that it asks
/// for. Returns whether the source address proves that it is that machine.
pub fn check(
    instances: &Instances,
    asked: &JoinRequest,
    peer: Option<IpAddr>,
) -> Result<bool, TicketRefusal> {
    let name = asked.node();
    // A dual-stack socket reports an IPv4 caller as an IPv4-mapped IPv6 address.
    let peer = peer.map(|peer| peer.to_canonical());
    let Some(list) = instances.listed(name) else {
        return check_unlisted(asked, peer).map(|()| false);
    };
    let list = list?;
    let instance = list.get(name).ok_or_else(|| {
        let message =
            format!("the cloud's metadata service knows no machine of this cluster named {name}");
        TicketRefusal::denied("unknown-machine", message)
    })?;
    let instance = &instance.instance;
    check_instance(asked, instance)?;
    let is_it = is_direct(asked, instance, peer, &list)?;
    // No machine may get an SSH host certificate for another node.
    let others = |principal: &&String| list.other_with(principal, name).is_some();
    match asked.principals.iter().find(others) {
        None => Ok(is_it),
        Some(other) => {
            let message =
                format!("host_certificate_principals: {other} is another machine of this cluster");
            Err(TicketRefusal::denied("principal-of-other", message))
        }
    }
}

/// Checks a request if there is no list of machines.
fn check_unlisted(asked: &JoinRequest, peer: Option<IpAddr>) -> Result<(), TicketRefusal> {
    if asked.control_plane {
        return Err(TicketRefusal::missing(
            "role",
            "control planes cannot join: this join service has no metadata service that lists them; start it with \
             --cloud-provider",
        ));
    }
    match asked
        .addresses()
        .iter()
        .find(|address| Some(**address) != peer)
    {
        None => Ok(()),
        Some(address) => {
            let message = format!(
                "certificate_request: {address} is not the address from which this machine calls"
            );
            Err(TicketRefusal::denied("address", message))
        }
    }
}

/// Returns whether the caller has the address of the machine that it claims to be. Returns `false`
/// if the address is hidden by a load balancer and the request is for a worker.
fn is_direct(
    asked: &JoinRequest,
    instance: &Instance,
    peer: Option<IpAddr>,
    list: &KnownMachines,
) -> Result<bool, TicketRefusal> {
    if peer.is_some() && peer == instance.vpc_ip {
        return Ok(true);
    }
    let name = asked.node();
    if let Some(other) = peer.and_then(|peer| list.other_with_address(peer, name)) {
        let message = format!("the machine that calls has the address of {other}, not of {name}");
        return Err(TicketRefusal::denied("machine-of-other", message));
    }
    // The role of the cloud counts as well: a worker request of a control plane machine yields a
    // certificate for the address of an API server.
    if !asked.control_plane && instance.role != Role::ControlPlane {
        return Ok(false);
    }
    let address = instance.vpc_ip.map_or(
        "an address that the metadata service does not list".into(),
        |ip| ip.to_string(),
    );
    let message = format!(
        "a control plane has to call a join service directly from its own address ({address}), not through a load balancer"
    );
    Err(TicketRefusal::temporary("not-direct", message, NOT_DIRECT))
}

fn check_instance(asked: &JoinRequest, instance: &Instance) -> Result<(), TicketRefusal> {
    let name = asked.node();
    if let Some(address) = asked
        .addresses()
        .iter()
        .find(|address| instance.vpc_ip != Some(**address))
    {
        let message = format!(
            "certificate_request: {address} is not the address of {name} in the cluster's network"
        );
        return Err(TicketRefusal::denied("address", message));
    }
    if asked.control_plane && instance.role != Role::ControlPlane {
        let message = format!(
            "{name} is not a control plane: its role in the cloud is {}",
            instance.role
        );
        return Err(TicketRefusal::denied("role", message));
    }
    Ok(())
}
