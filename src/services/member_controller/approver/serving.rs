//! Judges serving certificates of kubelets (`kubernetes.io/kubelet-serving`). Kubelets renew them
//! themselves.
//!
//! ```text
//! requester: a kubelet ─► subject: its own name, for serving ─► the node has an open record of its join
//!       │ no                     │ no                                 │ yes       │ no
//!       ▼                        ▼                                    ▼           ▼
//!      left                    denied                     each name and address  left
//!                                                             is the machine's, says the cloud: approved
//!                                                             is another one's:                 denied
//!                                                             is not known (yet):               left
//! ```
//!
//! A worker's request for a name or an address of the API server is left, even if the cloud says that it is the worker's: clients of
//! the API server would trust its certificate. So is one for an address with which another control plane has joined.
//!
//! A kubelet requests what its Node object says. A cloud's controller writes further names and
//! addresses there: internal and external DNS names, external addresses, those of further network
//! interfaces. We ask the cloud ourselves, because a node may change its own Node. Without a
//! metadata service, only the node's name and the addresses of its record are known.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use base::text::quoted;

use super::membership::Membership;
use super::request::Judgement::{Approve, Deny, Leave};
use super::request::{GROUP, Judgement, REQUESTER, USER_PREFIX, deny, is_of_group, read};
use crate::cluster::KubeadmSettings;
use crate::cluster::known_machines::{CloudMachine, KnownMachines};
use crate::cluster::refusal::TicketRefusal;
use kubernetes::NAMESPACE;
use kubernetes::certificate_request::CertificateRequest;
use kubernetes::machine_record::MachineRecord;
use kubernetes::objects::CertificateSigningRequest;

/// The signer of kubelets' serving certificates.
pub const SIGNER: &str = "kubernetes.io/kubelet-serving";
/// The required usage.
pub const SERVER_AUTH: &str = "server auth";

/// The validated request of a kubelet.
#[derive(Debug, PartialEq, Eq)]
pub struct RequestedServingCertificate {
    pub node: String,
    pub wanted: Vec<RequestedName>,
}

/// A name or an address in the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestedName {
    /// A DNS name.
    Name(String),
    /// An address.
    Address(IpAddr),
}

impl fmt::Display for RequestedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestedName::Name(name) => f.write_str(&quoted(name, 80)),
            RequestedName::Address(address) => address.fmt(f),
        }
    }
}

impl RequestedName {
    /// Returns whether `machine`, the machine of `node`, has this name or address.
    fn is_of(&self, node: &str, machine: &CloudMachine) -> bool {
        match self {
            RequestedName::Name(name) => {
                name == node || machine.names().any(|own| own.eq_ignore_ascii_case(name))
            }
            RequestedName::Address(address) => {
                machine.addresses().any(|own| own == address.to_canonical())
            }
        }
    }

    /// Returns whether the node of this record joined with this name or address.
    fn is_in(&self, record: &MachineRecord) -> bool {
        match self {
            RequestedName::Name(name) => *name == record.node,
            RequestedName::Address(address) => record.has_address(*address),
        }
    }

    /// Returns another node than `node` whose machine has this name or address in the cloud's list.
    fn other_owner<'a>(&self, node: &str, machines: &'a KnownMachines) -> Option<&'a str> {
        match self {
            RequestedName::Name(name) => machines.other_with_name(name, node),
            RequestedName::Address(address) => machines.other_with_address(*address, node),
        }
    }

    /// Returns whether it is a name of the cluster's services, which no machine has.
    fn is_of_services(&self) -> bool {
        let RequestedName::Name(name) = self else {
            return false;
        };
        let name = name.to_ascii_lowercase();
        let mut labels = name.split('.');
        matches!(labels.next(), Some("kubernetes" | "localhost" | "*"))
            || labels.any(|label| label == "svc")
            || name.ends_with(".cluster.local")
    }

    /// Returns whether clients reach the API server under it.
    fn is_of_api_server(&self, kubeadm: &KubeadmSettings) -> bool {
        match self {
            RequestedName::Name(name) => kubeadm.is_served_under(name),
            RequestedName::Address(address) => kubeadm.is_served_under(&address.to_string()),
        }
    }

    /// Returns the reason for a denial in one word.
    fn reason(&self) -> &'static str {
        match self {
            RequestedName::Name(_) => "name",
            RequestedName::Address(_) => "address",
        }
    }
}

/// Checks everything that the request alone shows: the requester, the usages, the subject and the
/// names.
pub fn examine(
    request: &CertificateSigningRequest,
) -> Result<RequestedServingCertificate, Judgement> {
    let user = &request.spec.username;
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
    if common_name != *user {
        return deny(
            "subject",
            format!(
                "{} requests the certificate of {}",
                quoted(user, 80),
                quoted(&common_name, 80)
            ),
        );
    }
    let names = names.into_iter().map(RequestedName::Name);
    let wanted: Vec<_> = names
        .chain(addresses.into_iter().map(RequestedName::Address))
        .collect();
    if let Some(name) = wanted.iter().find(|wanted| wanted.is_of_services()) {
        return deny(
            "name",
            format!("{name} is a name of the cluster's services"),
        );
    }
    if wanted.is_empty() {
        return deny(
            "name",
            "a serving certificate needs a name or an address".into(),
        );
    }
    Ok(RequestedServingCertificate {
        node: node.to_owned(),
        wanted,
    })
}

/// Compares the request with the record of the node's join, and with the cloud's list of names and
/// addresses. `owner` returns the node of this cluster with a name, or with an address in its
/// record. `control_plane` returns the other control plane with an address in its record. `kubeadm` has the
/// names of the API server. Calls `cloud` only if there is a record.
pub fn compare(
    asked: &RequestedServingCertificate,
    membership: &Membership,
    kubeadm: Result<KubeadmSettings, TicketRefusal>,
    owner: impl Fn(&RequestedName) -> Option<String>,
    control_plane: impl Fn(IpAddr) -> Option<String>,
    cloud: impl FnOnce() -> Option<Result<Arc<KnownMachines>, TicketRefusal>>,
) -> Judgement {
    let node = &asked.node;
    let record = match membership.open_record(node) {
        Ok(record) => record,
        Err(judgement) => return judgement,
    };
    if let Err(judgement) = membership.check_node(node) {
        return judgement;
    }
    let map = format!("ConfigMap {NAMESPACE}/{}", record.name);
    match kubeadm {
        _ if record.control_plane => {}
        Err(refusal) => return Leave(refusal.reason, refusal.to_string()),
        Ok(kubeadm) => {
            let is_of_server = |wanted: &&RequestedName| wanted.is_of_api_server(&kubeadm);
            if let Some(wanted) = asked.wanted.iter().find(is_of_server) {
                let why = format!(
                    "{wanted} belongs to the cluster's API server, and {node} is not a control plane"
                );
                // not denied: a record from before records had roles may be a control plane's
                return Leave("api-server", why);
            }
        }
    }
    let judgement = match cloud() {
        None => compare_with_record(asked, record, &map, owner),
        Some(Ok(machines)) => compare_with_cloud(asked, &machines, &map, owner),
        Some(Err(refusal)) => Leave("metadata", refusal.to_string()),
    };
    let of_other = |wanted: &RequestedName| match wanted {
        RequestedName::Address(address) if !record.control_plane => {
            Some((*address, control_plane(*address)?))
        }
        _ => None,
    };
    match (&judgement, asked.wanted.iter().find_map(of_other)) {
        // not denied: the cloud may have given the address of a deleted machine to this one
        (Approve(..), Some((address, other))) => Leave(
            "api-server",
            format!(
                "the control plane {other} joined with {address}, where clients reach its API server, and {node} is not a control \
                 plane; if {other} no longer exists, delete its record; else approve the request by hand"
            ),
        ),
        _ => judgement,
    }
}

fn compare_with_record(
    asked: &RequestedServingCertificate,
    record: &MachineRecord,
    map: &str,
    owner: impl Fn(&RequestedName) -> Option<String>,
) -> Judgement {
    let node = &asked.node;
    let unknown = |wanted: &&RequestedName| !wanted.is_in(record);
    let Some(wanted) = asked.wanted.iter().find(unknown) else {
        let why = format!("{node} joined with this name and address, according to {map}");
        return Approve("recorded", why);
    };
    if let Some(other) = owner(wanted).filter(|other| other != node) {
        return of_other(wanted, node, &other);
    }
    if record.addresses.is_empty() && matches!(wanted, RequestedName::Address(_)) {
        let why = format!("{map} has no addresses, and no metadata service lists those of {node}");
        return Leave("no-addresses", why);
    }
    let why = format!(
        "{node} did not join with {wanted}, according to {map}, and there is no metadata service to ask"
    );
    Leave("unconfirmed", why)
}

fn compare_with_cloud(
    asked: &RequestedServingCertificate,
    machines: &KnownMachines,
    map: &str,
    owner: impl Fn(&RequestedName) -> Option<String>,
) -> Judgement {
    let node = &asked.node;
    let Some(machine) = machines.get(node) else {
        let why =
            format!("the cloud's metadata service knows no machine of this cluster named {node}");
        return Leave("unknown-machine", why);
    };
    let unknown = |wanted: &&RequestedName| !wanted.is_of(node, machine);
    let Some(wanted) = asked.wanted.iter().find(unknown) else {
        // a cloud may give a machine the name of a node that it does not list
        let names = (asked.wanted.iter()).filter(|wanted| matches!(wanted, RequestedName::Name(_)));
        let others = names.filter_map(|wanted| Some((wanted, owner(wanted)?)));
        if let Some((wanted, other)) = others.into_iter().find(|(_, other)| other != node) {
            return of_other(wanted, node, &other);
        }
        return match shared(&asked.wanted, node, machines) {
            Some((wanted, other)) => Leave(
                "unconfirmed",
                format!(
                    "the metadata service says that {wanted} belongs to {other} as well as to {node}"
                ),
            ),
            None => Approve(
                "recorded",
                format!(
                    "{node} joined, according to {map}, and the metadata service confirms its names and addresses"
                ),
            ),
        };
    };
    let other = wanted.other_owner(node, machines).map(str::to_owned);
    // another machine may have got this address since a machine joined with it
    let other =
        other.or_else(|| matches!(wanted, RequestedName::Name(_)).then(|| owner(wanted))?);
    match other {
        Some(other) => of_other(wanted, node, &other),
        None => Leave(
            "unconfirmed",
            format!("the metadata service does not say (yet) that {wanted} belongs to {node}"),
        ),
    }
}

/// Returns a name or address that another machine has too, and that machine. In two networks, two
/// machines may have the same address.
fn shared<'a>(
    wanted: &'a [RequestedName],
    node: &str,
    machines: &'a KnownMachines,
) -> Option<(&'a RequestedName, &'a str)> {
    let mut wanted = wanted.iter();
    wanted.find_map(|one| Some((one, one.other_owner(node, machines)?)))
}

fn of_other(wanted: &RequestedName, node: &str, other: &str) -> Judgement {
    Deny(
        wanted.reason(),
        format!("{wanted} belongs to {other}, not to {node}"),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::machines::{Instance, Role};
    use cloud_api::Alias;

    use super::super::membership::tests::member;
    use super::super::request::tests::{IP, good, pkcs10, reason, request};
    use super::*;

    fn record(addresses: &[&str]) -> MachineRecord {
        let addresses = addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect();
        MachineRecord {
            node: "n".into(),
            name: "join-node-n".into(),
            addresses,
            ..MachineRecord::default()
        }
    }

    #[test]
    fn a_kubelets_request_for_its_own_name_and_addresses_has_the_right_form() {
        let asked = RequestedServingCertificate {
            node: "n".into(),
            wanted: vec![
                RequestedName::Name("n".into()),
                RequestedName::Address(IP.parse().unwrap()),
            ],
        };
        assert_eq!(examine(&good()), Ok(asked));
        let mut with_rsa = good();
        let usages = ["key encipherment", "digital signature", SERVER_AUTH];
        with_rsa.spec.usages = usages.map(str::to_owned).into();
        assert!(examine(&with_rsa).is_ok());
    }

    fn denied(request: CertificateSigningRequest) -> &'static str {
        match examine(&request) {
            Err(Deny(reason, _)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_with_other_usages_is_denied() {
        for usages in [
            &[] as &[&str],
            &["digital signature"],
            &[SERVER_AUTH, "client auth"],
            &["any"],
        ] {
            let mut request = good();
            request.spec.usages = usages.iter().map(|it| (*it).to_owned()).collect();
            assert_eq!(denied(request), "usages");
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
            (user, vec!["n", "kubernetes"], vec![IP], "name"),
            (user, vec!["KUBERNETES.default"], vec![IP], "name"),
            (user, vec!["n.default.svc"], vec![IP], "name"),
            (user, vec!["n.cluster.local"], vec![], "name"),
            (user, vec!["localhost"], vec![], "name"),
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
        for (user, group) in [
            ("kubernetes-admin", GROUP),
            ("system:bootstrap:abcdef", GROUP),
            ("", GROUP),
            ("system:node:n", "system:authenticated"),
        ] {
            let mut request = good();
            request.spec.username = user.into();
            request.spec.groups = vec![group.into()];
            assert!(matches!(examine(&request), Err(Leave("requester", _))));
        }
    }

    /// Judges a request of the node `n` for a name or an address. The cluster has a node `m`, which
    /// joined with 10.0.0.9.
    fn judged(
        text: &str,
        record: Option<&MachineRecord>,
        cloud: Option<Result<&Arc<KnownMachines>, TicketRefusal>>,
    ) -> Judgement {
        let cloud = cloud.map(|known| known.cloned());
        let wanted = match text.parse() {
            Ok(address) => RequestedName::Address(address),
            Err(_) => RequestedName::Name(text.into()),
        };
        let asked = RequestedServingCertificate {
            node: "n".into(),
            wanted: vec![RequestedName::Name("n".into()), wanted],
        };
        let owner = |wanted: &RequestedName| {
            let of_m = [
                RequestedName::Name("m".into()),
                RequestedName::Address("10.0.0.9".parse().unwrap()),
            ];
            of_m.contains(wanted).then(|| "m".to_owned())
        };
        let plane = |address: IpAddr| {
            let own = address.to_canonical().to_string() == "10.0.0.10";
            own.then(|| "plane".to_owned())
        };
        let membership = member(record);
        compare(&asked, &membership, Ok(kubeadm()), owner, plane, || cloud)
    }

    /// What a cloud knows of this machine and of `other`.
    fn machines(names: &[&str], addresses: &[&str]) -> Arc<KnownMachines> {
        listed(&[
            ("n", names, addresses),
            (
                "other",
                &["ip-10-0-0-8.example"],
                &["10.0.0.8", "203.0.113.8"],
            ),
        ])
    }

    fn listed(all: &[(&str, &[&str], &[&str])]) -> Arc<KnownMachines> {
        let instance = |name: &str| Instance {
            name: name.into(),
            provider_id: String::new(),
            role: Role::Worker,
            vpc_ip: None,
        };
        let alias = |(machine, names, addresses): &(&str, &[&str], &[&str])| Alias {
            machine: (*machine).into(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            addresses: addresses.iter().map(|one| one.parse().unwrap()).collect(),
        };
        let instances = all.iter().map(|(name, ..)| instance(name)).collect();
        Arc::new(KnownMachines::new(
            instances,
            all.iter().map(alias).collect(),
        ))
    }

    fn kubeadm() -> KubeadmSettings {
        KubeadmSettings {
            endpoint: "10.0.0.50:6443".into(),
            names: vec!["*.api.example".into()],
            services: vec!["10.96.0.0/16".parse().unwrap()],
            version: None,
        }
    }

    #[test]
    fn a_worker_gets_no_name_or_address_of_the_api_server() {
        let taken = ["10.0.0.50", "::ffff:10.0.0.50", "10.96.0.1"];
        let own = [&[IP][..], &taken].concat();
        let (worker, names) = (record(&own), ["a.api.example"]);
        let plane = MachineRecord {
            control_plane: true,
            ..worker.clone()
        };
        let cloud = machines(&names, &own);
        for text in [
            "10.0.0.50",
            "::ffff:10.0.0.50",
            "10.96.0.1",
            "a.api.example",
        ] {
            let judgement = judged(text, Some(&worker), Some(Ok(&cloud)));
            let expected = format!("{text} belongs to the cluster's API server");
            assert!(
                matches!(&judgement, Leave("api-server", why) if why.replace('"', "").starts_with(&expected)),
                "{judgement:?}"
            );
            let judgement = judged(text, Some(&plane), Some(Ok(&cloud)));
            assert_eq!(reason(judgement), "recorded", "{text}");
        }
        assert_eq!(
            reason(judged("10.0.0.50", Some(&worker), None)),
            "api-server"
        );
        // without the cluster's configuration nobody knows these names
        let asked = examine(&good()).unwrap();
        let unknown = TicketRefusal::missing("kubeadm-config", "not there");
        let judgement = compare(
            &asked,
            &member(Some(&worker)),
            Err(unknown),
            |_| None,
            |_| None,
            || None,
        );
        assert_eq!(reason(judgement), "kubeadm-config");
    }

    #[test]
    fn a_worker_gets_no_address_with_which_another_control_plane_joined() {
        let own = [IP, "10.0.0.10", "::ffff:10.0.0.10"];
        let (worker, cloud) = (record(&own), machines(&[], &own));
        let plane = MachineRecord {
            control_plane: true,
            ..worker.clone()
        };
        for text in ["10.0.0.10", "::ffff:10.0.0.10"] {
            for cloud in [Some(Ok(&cloud)), None] {
                let judgement = judged(text, Some(&worker), cloud);
                assert!(
                    matches!(&judgement, Leave("api-server", why) if why.starts_with(&format!("the control plane plane joined with {text}"))),
                    "{judgement:?}"
                );
            }
            assert_eq!(
                reason(judged(text, Some(&plane), Some(Ok(&cloud)))),
                "recorded"
            );
        }
        // what is denied otherwise stays denied
        let of_other = listed(&[("n", &[], &[IP]), ("plane", &[], &own)]);
        for text in ["10.0.0.10", "::ffff:10.0.0.10"] {
            assert_eq!(
                reason(judged(text, Some(&record(&[IP])), Some(Ok(&of_other)))),
                "address"
            );
        }
        // an IPv4 address in the form of IPv6, which a user of the cloud can set, is another machine's too
        let twice = machines(&[], &[IP, "::ffff:10.0.0.8"]);
        assert_eq!(
            reason(judged(
                "::ffff:10.0.0.8",
                Some(&record(&[IP])),
                Some(Ok(&twice))
            )),
            "unconfirmed"
        );
    }

    #[test]
    fn without_a_cloud_the_record_of_the_join_decides() {
        let (bound, old) = (record(&[IP, "fd00::7"]), record(&[]));
        for (text, record, expected) in [
            (IP, &bound, "recorded"),
            ("fd00::7", &bound, "recorded"),
            ("10.0.0.9", &bound, "address"),
            ("10.0.0.8", &bound, "unconfirmed"),
            ("m", &bound, "name"),
            ("ip-10-0-0-7.example", &bound, "unconfirmed"),
            // An old record has no address.
            (IP, &old, "no-addresses"),
            ("10.0.0.9", &old, "address"),
        ] {
            let judgement = judged(text, Some(record), None);
            assert_eq!(reason(judgement.clone()), expected, "{text}: {judgement:?}");
        }
        let judgement = judged("10.0.0.9", Some(&bound), None);
        assert!(matches!(judgement, Deny(_, why) if why == "10.0.0.9 belongs to m, not to n"));
        assert_eq!(reason(judged(IP, None, None)), "no-record");
        // A record under another node's name, which only an administrator can create.
        let other = MachineRecord {
            node: "m".into(),
            ..record(&[IP])
        };
        assert_eq!(reason(judged(IP, Some(&other), None)), "no-record");
    }

    /// What the controllers of AWS and Google write into a Node.
    #[test]
    fn a_cloud_confirms_further_names_and_addresses_of_its_machine() {
        let bound = record(&[IP]);
        let names = ["ip-10-0-0-7.example", "ec2-203-0-113-7.example"];
        let cloud = machines(&names, &[IP, "203.0.113.7", "2001:db8::7", "2001:db8::8"]);
        for (text, expected) in [
            (IP, "recorded"),
            ("203.0.113.7", "recorded"),
            ("2001:db8::8", "recorded"),
            ("ip-10-0-0-7.example", "recorded"),
            ("EC2-203-0-113-7.example", "recorded"),
            // another machine of the cluster has this name or address
            ("10.0.0.8", "address"),
            ("203.0.113.8", "address"),
            ("ip-10-0-0-8.example", "name"),
            ("other", "name"),
            // a node that the cloud does not list
            ("m", "name"),
            // it joined with this address, and the cloud may have given the address to another
            // machine since then
            ("10.0.0.9", "unconfirmed"),
            ("203.0.113.9", "unconfirmed"),
            ("ip-10-0-0-9.example", "unconfirmed"),
        ] {
            for record in [&bound, &record(&[])] {
                let judgement = judged(text, Some(record), Some(Ok(&cloud)));
                assert_eq!(reason(judgement.clone()), expected, "{text}: {judgement:?}");
            }
        }
        // a property of the machine is the name of a node that the cloud does not list
        let posing = machines(&["m"], &[IP]);
        let judgement = judged("m", Some(&bound), Some(Ok(&posing)));
        assert_eq!(reason(judgement), "name");
        // in another network, another machine has the same address
        let twice = machines(&[], &[IP, "10.0.0.8"]);
        for (text, expected) in [("10.0.0.8", "unconfirmed"), (IP, "recorded")] {
            let judgement = judged(text, Some(&bound), Some(Ok(&twice)));
            assert_eq!(reason(judgement.clone()), expected, "{text}: {judgement:?}");
        }
        // The machine has another address now.
        let moved = machines(&[], &["10.0.0.6"]);
        assert_eq!(
            reason(judged(IP, Some(&bound), Some(Ok(&moved)))),
            "unconfirmed"
        );
        let gone = listed(&[]);
        assert_eq!(
            reason(judged(IP, Some(&bound), Some(Ok(&gone)))),
            "unknown-machine"
        );
        let silent = TicketRefusal::temporary("metadata", "no answer", Duration::from_secs(5));
        assert_eq!(
            reason(judged(IP, Some(&bound), Some(Err(silent)))),
            "metadata"
        );
        let asked = examine(&good()).unwrap();
        let judgement = compare(
            &asked,
            &Membership {
                has_node: false,
                ..member(Some(&bound))
            },
            Ok(kubeadm()),
            |_| None,
            |_| None,
            || None,
        );
        assert_eq!(reason(judgement), "no-node");
    }
}
