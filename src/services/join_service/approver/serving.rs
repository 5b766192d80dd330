//! Judges serving certificates of kubelets (`kubernetes.io/kubelet-serving`). Kubelets renew them
//! themselves.
//!
//! ```text
//! requester: a kubelet ─► subject: its own name, for serving ─► the record of its join: addresses
//!       │ no                     │ no                         ─► the cloud: still the machine's address
//!       ▼                        ▼                                  │ no         │ no answer
//!      left                    denied                             denied        left
//! ```

use std::net::IpAddr;

use base::text::quoted;
use serde_json::Value;

use super::super::refusal::Refusal;
use super::request::Judgement::{Approve, Deny, Leave};
use super::request::{GROUP, Judgement, REQUESTER, USER_PREFIX, deny, is_of_group, read, user_of};
use kubernetes::NAMESPACE;
use kubernetes::certificate_request::CertificateRequest;
use kubernetes::machine_record::{self, Record};

/// The signer of kubelets' serving certificates.
pub const SIGNER: &str = "kubernetes.io/kubelet-serving";
/// The required usage.
pub const SERVER_AUTH: &str = "server auth";

/// The validated request of a kubelet.
#[derive(Debug, PartialEq, Eq)]
pub struct RequestedCertificate {
    pub node: String,
    pub addresses: Vec<IpAddr>,
}

/// Checks everything that the request alone shows: the requester, the usages, the subject and the
/// names.
pub fn examine(request: &Value) -> Result<RequestedCertificate, Judgement> {
    let user = user_of(request);
    let Some(node) = user
        .strip_prefix(USER_PREFIX)
        .filter(|_| is_of_group(request, GROUP))
    else {
        return Err(Leave(
            REQUESTER,
            "the requester is not a kubelet: an administrator may decide on it".into(),
        ));
    };
    let CertificateRequest {
        common_name,
        names,
        addresses,
        ..
    } = read(request, SERVER_AUTH)?;
    if common_name != user {
        return deny(
            "subject",
            format!(
                "{} requests the certificate of {}",
                quoted(user, 80),
                quoted(&common_name, 80)
            ),
        );
    }
    if let Some(name) = names.iter().find(|name| *name != node) {
        return deny(
            "name",
            format!(
                "{} is not the name of the node {}",
                quoted(name, 80),
                quoted(node, 80)
            ),
        );
    }
    if names.is_empty() && addresses.is_empty() {
        return deny(
            "name",
            "a serving certificate needs a name or an address".into(),
        );
    }
    Ok(RequestedCertificate {
        node: node.to_owned(),
        addresses,
    })
}

/// Compares the request with the record of the node's join. Calls `cloud` for the machine's address
/// only if there is a record.
pub fn compare(
    asked: &RequestedCertificate,
    record: Option<&Record>,
    is_there: bool,
    cloud: impl FnOnce() -> Option<Result<Option<IpAddr>, Refusal>>,
) -> Judgement {
    let RequestedCertificate { node, addresses } = asked;
    let map = format!(
        "ConfigMap {NAMESPACE}/{}",
        machine_record::name_of_node(node)
    );
    let Some(record) = record.filter(|record| record.node == *node) else {
        let why = format!(
            "there is no {map}: the join of {node} is not recorded; approve the request by hand, or let the node join again"
        );
        return Leave("no-record", why);
    };
    if !is_there {
        return Leave("no-node", format!("there is no node {node}"));
    }
    if let Some(address) = addresses
        .iter()
        .find(|one| !record.addresses.is_empty() && !record.addresses.contains(one))
    {
        return Deny(
            "address",
            format!("{address} is not an address with which {node} joined, according to {map}"),
        );
    }
    let cloud = match cloud() {
        None if record.addresses.is_empty() && !addresses.is_empty() => {
            let why =
                format!("{map} has no addresses, and no metadata service lists those of {node}");
            return Leave("no-addresses", why);
        }
        None => {
            return Approve(format!(
                "{node} joined with this name and address, according to {map}"
            ));
        }
        Some(Err(refusal)) => {
            return Leave(
                "metadata",
                format!("{} ({})", refusal.message(), refusal.details),
            );
        }
        Some(Ok(None)) => {
            let why = format!(
                "the cloud's metadata service knows no machine of this cluster named {node}, or no address of it"
            );
            return Leave("unknown-machine", why);
        }
        Some(Ok(Some(address))) => address,
    };
    match addresses.iter().find(|address| **address != cloud) {
        Some(address) => Deny(
            "address",
            format!("{address} is not the address of {node} in the cluster's network"),
        ),
        None if record.addresses.is_empty() => Approve(format!(
            "{node} joined, according to {map}, and the metadata service confirms its address"
        )),
        None => Approve(format!(
            "{node} joined with this name and address, according to {map}, and the metadata service confirms them"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::super::request::tests::{IP, good, pkcs10, reason, request};
    use super::*;

    fn record(addresses: &[&str]) -> Record {
        let addresses = addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect();
        Record {
            node: "n".into(),
            name: "join-node-n".into(),
            addresses,
            ..Record::default()
        }
    }

    #[test]
    fn a_kubelets_request_for_its_own_name_and_addresses_has_the_right_form() {
        let asked = RequestedCertificate {
            node: "n".into(),
            addresses: vec![IP.parse().unwrap()],
        };
        assert_eq!(examine(&good()), Ok(asked));
        let mut with_rsa = good();
        with_rsa["spec"]["usages"] = json!(["key encipherment", "digital signature", SERVER_AUTH]);
        assert!(examine(&with_rsa).is_ok());
    }

    fn with(pointer: &str, value: Value) -> Value {
        let mut request = good();
        *request.pointer_mut(pointer).unwrap() = value;
        request
    }

    fn denied(request: Value) -> &'static str {
        match examine(&request) {
            Err(Deny(reason, _)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_with_other_usages_is_denied() {
        for usages in [
            json!([]),
            json!(["digital signature"]),
            json!([SERVER_AUTH, "client auth"]),
            json!(["any"]),
        ] {
            assert_eq!(denied(with("/spec/usages", usages)), "usages");
        }
    }

    #[test]
    fn a_request_for_another_name_is_denied() {
        let user = "system:node:n";
        for (common_name, names, addresses, reason) in [
            ("system:node:m", vec!["n"], vec![IP], "subject"),
            // Node names are compared without case here, but readers of the certificate may not do
            // so.
            ("system:node:N", vec!["n"], vec![IP], "subject"),
            ("system:masters", vec!["n"], vec![IP], "certificate-request"),
            (user, vec!["m"], vec![IP], "name"),
            (user, vec!["n", "kubernetes"], vec![IP], "name"),
            (user, vec!["n.cluster.local"], vec![], "name"),
            (user, vec![], vec![], "name"),
        ] {
            assert_eq!(
                denied(request(&pkcs10(common_name, &names, &addresses))),
                reason,
                "{common_name} {names:?}"
            );
        }
    }

    #[test]
    fn a_request_of_another_requester_is_left() {
        for (pointer, value) in [
            ("/spec/username", json!("kubernetes-admin")),
            ("/spec/username", json!("system:bootstrap:abcdef")),
            ("/spec/username", Value::Null),
            ("/spec/groups", json!(["system:authenticated"])),
        ] {
            assert!(matches!(
                examine(&with(pointer, value)),
                Err(Leave("requester", _))
            ));
        }
    }

    #[test]
    fn only_addresses_of_the_join_that_are_still_valid_are_approved() {
        let asked = |address: &str| RequestedCertificate {
            node: "n".into(),
            addresses: vec![address.parse().unwrap()],
        };
        let cloud = |address: &str| Some(Ok(Some(address.parse().unwrap())));
        let unreachable = || Refusal::temporary("metadata", "no answer", Duration::from_secs(5));
        let (bound, old) = (record(&[IP, "fd00::7"]), record(&[]));
        for (address, record, of_cloud, expected) in [
            (IP, Some(&bound), None, "approved"),
            ("fd00::7", Some(&bound), None, "approved"),
            (IP, Some(&bound), cloud(IP), "approved"),
            ("10.0.0.8", Some(&bound), None, "address"),
            ("10.0.0.8", Some(&bound), cloud("10.0.0.8"), "address"),
            // The machine has another address now.
            (IP, Some(&bound), cloud("10.0.0.8"), "address"),
            (IP, Some(&bound), Some(Ok(None)), "unknown-machine"),
            (IP, Some(&bound), Some(Err(unreachable())), "metadata"),
            // An old record has no address.
            (IP, Some(&old), cloud(IP), "approved"),
            ("10.0.0.8", Some(&old), cloud(IP), "address"),
            (IP, Some(&old), None, "no-addresses"),
            (IP, None, cloud(IP), "no-record"),
        ] {
            let judged = compare(&asked(address), record, true, || of_cloud.clone());
            assert_eq!(reason(judged.clone()), expected, "{address}: {judged:?}");
        }
        assert_eq!(
            reason(compare(&asked(IP), Some(&bound), false, || None)),
            "no-node"
        );
        // A record under another node's name, which only an administrator can create.
        let other = Record {
            node: "m".into(),
            ..record(&[IP])
        };
        assert_eq!(
            reason(compare(&asked(IP), Some(&other), true, || None)),
            "no-record"
        );
    }
}
