//! The checks, in the order of their findings. Each is a function of the facts, and asks nothing.

mod certificates;
mod control_plane;
mod files;
mod inside;
mod nodes;
mod services;
#[cfg(test)]
pub mod tests;

use super::diagnosis::Diagnosis;
use super::gathered::Gathered;
use crate::cluster::status::objects::ObjectList;

/// A check.
pub struct Check {
    /// The keyword in the output, and in docs/day-two/doctor.md.
    pub name: &'static str,
    /// The lists of the API server without which it would find what is not there; `None` if it does not judge what the API server
    /// says.
    needs: Option<&'static [ObjectList]>,
    run: fn(&Gathered) -> Vec<Diagnosis>,
}

impl Check {
    /// Returns the findings; none if the facts are not there.
    pub fn run(&self, facts: &Gathered) -> Vec<Diagnosis> {
        let is_known = match self.needs {
            None => true,
            Some(_) if facts.unlisted.is_some() => false,
            Some(lists) => lists.iter().all(|list| facts.view.objects.has(*list)),
        };
        if is_known { (self.run)(facts) } else { vec![] }
    }
}

const fn check(
    name: &'static str,
    needs: &'static [ObjectList],
    run: fn(&Gathered) -> Vec<Diagnosis>,
) -> Check {
    Check {
        name,
        needs: Some(needs),
        run,
    }
}

const fn always(name: &'static str, run: fn(&Gathered) -> Vec<Diagnosis>) -> Check {
    Check {
        name,
        needs: None,
        run,
    }
}

/// All checks.
pub const CHECKS: &[Check] = &[
    always("api-server", control_plane::api_server),
    check("endpoint", &[], control_plane::endpoint),
    check(
        "control-plane",
        &[ObjectList::ControlPlane],
        control_plane::control_plane,
    ),
    check("etcd", &[ObjectList::ControlPlane], control_plane::etcd),
    check("versions", &[], control_plane::versions),
    check("end-of-life", &[], control_plane::end_of_life),
    check("attestation", &[], nodes::attestation),
    check("ready", &[], nodes::ready),
    check("network-plugin", &[], nodes::network_plugin),
    check("cloud-controller", &[], nodes::cloud_controller),
    check("records", &[ObjectList::Maps], nodes::records),
    check("addresses", &[ObjectList::Maps], nodes::addresses),
    check("clocks", &[], nodes::clocks),
    always("certificates", certificates::certificates),
    always("authorities", certificates::authorities),
    check(
        "certificate-requests",
        &[ObjectList::Requests],
        certificates::requests,
    ),
    check(
        "certificate-approval",
        &[ObjectList::Bindings],
        certificates::approval,
    ),
    check("system-pods", &[], control_plane::system_pods),
    check("services", &[ObjectList::DaemonSets], services::services),
    check("policy", &[ObjectList::Maps], services::policy),
    check(
        "old-clients",
        &[ObjectList::DaemonSets],
        services::old_clients,
    ),
    check("migration", &[ObjectList::DaemonSets], services::migration),
    check("plaintext", &[ObjectList::DaemonSets], services::plaintext),
    check(
        "old-form",
        &[ObjectList::DaemonSets, ObjectList::Maps],
        services::old_form,
    ),
    check("collateral", &[ObjectList::Maps], services::collateral),
    check(
        "master-secret",
        &[ObjectList::DaemonSets, ObjectList::MasterSecrets],
        services::master_secret,
    ),
    check(
        "bootstrap-tokens",
        &[ObjectList::Tokens],
        services::bootstrap_tokens,
    ),
    check("ports", &[ObjectList::Services], inside::ports),
    check(
        "admission",
        &[
            ObjectList::Policies,
            ObjectList::DaemonSets,
            ObjectList::ControlPlane,
        ],
        inside::admission,
    ),
    check(
        "accounts",
        &[ObjectList::Bindings, ObjectList::Roles],
        inside::accounts,
    ),
    always("files", files::files),
    always("state", files::state),
    check("unread", &[], control_plane::unread),
];
