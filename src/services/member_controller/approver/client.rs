//! Judges client certificates of kubelets (`kubernetes.io/kube-apiserver-client-kubelet`). They
//! authenticate a node to the API server.
//!
//! A new node asks with the bootstrap token of its join ticket. It gets the certificate of the node
//! in the ticket's record, and of no other. Later, a node asks with its present certificate, for
//! the same name, and needs an open record. Kubernetes' own approver (pkg/controller/certificates/approver)
//! knows no records: it would approve each such request, also of a node that was removed. So the bindings with
//! which kubeadm turns it on are deleted ([`kubernetes::services::kubeadm_bindings`]). The tokens of join tickets
//! are in a group that it does not approve.

use base::text::quoted;

use super::membership::{Membership, check_open};
use super::request::Judgement::{Approve, Leave};
use super::request::{GROUP, Judgement, REQUESTER, USER_PREFIX, deny, is_of_group, read};
use kubernetes::NAMESPACE;
use kubernetes::machine_record;
use kubernetes::objects::CertificateSigningRequest;
use kubernetes::services::TICKET_GROUP;
use kubernetes::services::migration::Migration;

/// The signer of kubelets' client certificates.
pub const SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// The required usage.
pub const CLIENT_AUTH: &str = "client auth";
/// The prefix of a token bearer's user name, before the token's identifier.
const TOKEN_PREFIX: &str = "system:bootstrap:";

/// The validated request of a kubelet.
#[derive(Debug, PartialEq, Eq)]
pub struct RequestedClientCertificate {
    /// The node in the subject.
    pub node: String,
    /// The hash of its key.
    key: String,
    by: By,
}

#[derive(Debug, PartialEq, Eq)]
enum By {
    /// The bearer of the bootstrap token with this identifier.
    Token(String),
    /// The bearer of this node's certificate.
    Node(String),
}

/// Checks everything that the request alone shows: the requester, the usages and the names.
pub fn examine(
    request: &CertificateSigningRequest,
) -> Result<RequestedClientCertificate, Judgement> {
    let of_group = |prefix: &str, group: &str| {
        let rest = request.spec.username.strip_prefix(prefix);
        let rest = rest.filter(|rest| !rest.is_empty());
        rest.filter(|_| is_of_group(request, group))
            .map(str::to_owned)
    };
    let by = match (
        of_group(TOKEN_PREFIX, TICKET_GROUP),
        of_group(USER_PREFIX, GROUP),
    ) {
        (Some(token), _) => By::Token(token),
        (None, Some(node)) => By::Node(node),
        (None, None) => {
            let why = "the requester is neither a join ticket's token nor a node: Kubernetes' own approver or an administrator may decide";
            return Err(Leave(REQUESTER, why.into()));
        }
    };
    let asked = read(request, CLIENT_AUTH)?;
    if !asked.names.is_empty() || !asked.addresses.is_empty() {
        return deny(
            "name",
            "a client certificate must not have names or addresses besides its subject".into(),
        );
    }
    // The name is taken literally, as the API server does.
    let node = asked
        .common_name
        .strip_prefix(USER_PREFIX)
        .unwrap_or_default()
        .to_owned();
    let key = asked.key_hash();
    Ok(RequestedClientCertificate { node, key, by })
}

/// Decides whether the requester may be this node. `node_of_token` returns the node of a token's ticket,
/// and `migration` is the day until which nodes without a record renew their certificates.
pub fn compare(
    asked: &RequestedClientCertificate,
    membership: &Membership,
    node_of_token: impl FnOnce(&str) -> Option<String>,
    migration: Option<Migration>,
) -> Judgement {
    let node = &asked.node;
    let judged = match &asked.by {
        By::Token(token) => of_ticket(token, asked, membership, node_of_token),
        By::Node(own) if own != node => deny(
            "subject",
            format!(
                "the node {} requests the certificate of {}",
                quoted(own, 80),
                quoted(node, 80)
            ),
        ),
        By::Node(_) => of_member(node, membership, migration),
    };
    judged.unwrap_or_else(|judgement| judgement)
}

/// Judges the first certificate, by the token of a ticket.
fn of_ticket(
    token: &str,
    asked: &RequestedClientCertificate,
    membership: &Membership,
    node_of_token: impl FnOnce(&str) -> Option<String>,
) -> Result<Judgement, Judgement> {
    let node = &asked.node;
    let record = membership.record(node)?;
    if let Some(record) = record.filter(|record| record.token == token) {
        check_open(record)?;
        // The token is a Secret of the API, which others can read, too.
        if !record.client_key.is_empty() && record.client_key != asked.key {
            let why = format!(
                "the request has another key than the machine that got the join ticket of {node}: expected the SHA-256 {}, got {}. Find out \
                 who has read the token, a Secret in {NAMESPACE}",
                quoted(&record.client_key, 80),
                asked.key
            );
            return deny("client-key", why);
        }
        let why = format!(
            "the token belongs to the join ticket of {node}, according to ConfigMap {NAMESPACE}/{}",
            record.name
        );
        return Ok(Approve("ticket", why));
    }
    if let Some(other) = node_of_token(token) {
        let why = format!(
            "the token belongs to the join ticket of {other}, but the request is for {}",
            quoted(node, 80)
        );
        return deny("subject", why);
    }
    // The watch may not have delivered another replica's ticket yet.
    let why = format!(
        "the token does not belong to the last join ticket of {node}, according to {}",
        machine_record::name_of_node(node)
    );
    Err(Leave("no-ticket", why))
}

/// Judges a renewal. It proves nothing but that the kubelet has the present certificate.
fn of_member(
    node: &str,
    membership: &Membership,
    migration: Option<Migration>,
) -> Result<Judgement, Judgement> {
    let has_record = membership.record(node)?.is_some();
    if let Some(migration) = migration.filter(|_| !has_record) {
        membership.check_node(node)?;
        let why = format!(
            "{node} renews its own certificate without a record, which --migrate-until permits through {migration}"
        );
        return Ok(Approve("migration", why));
    }
    let record = membership.open_record(node)?;
    membership.check_node(node)?;
    let why = format!(
        "{node} renews its own certificate, and is recorded in ConfigMap {NAMESPACE}/{}",
        record.name
    );
    Ok(Approve("recorded", why))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use std::time::SystemTime;

    use super::super::membership::tests::member;
    use super::super::request::Judgement::Deny;
    use super::super::request::tests::{IP, pkcs10, reason};
    use super::*;
    use kubernetes::machine_record::MachineRecord;
    use support::mutation::mutations;

    /// Builds a request with the token `abcdef`, as the API server returns it.
    fn by_token(
        common_name: &str,
        names: &[&str],
        addresses: &[&str],
    ) -> CertificateSigningRequest {
        from_value(json_by_token(common_name, names, addresses)).unwrap()
    }

    fn json_by_token(common_name: &str, names: &[&str], addresses: &[&str]) -> Value {
        json!({
            "metadata": {"name": "csr-1", "resourceVersion": "1"},
            "spec": {
                "signerName": SIGNER, "username": "system:bootstrap:abcdef", "usages": ["digital signature", CLIENT_AUTH],
                "groups": ["system:bootstrappers", TICKET_GROUP, "system:authenticated"],
                "request": pkcs10(common_name, names, addresses),
            },
            "status": {},
        })
    }

    fn by_node(node: &str, common_name: &str) -> CertificateSigningRequest {
        let mut request = by_token(common_name, &[], &[]);
        request.spec.username = format!("system:node:{node}");
        request.spec.groups = [GROUP, "system:authenticated"].map(str::to_owned).into();
        request
    }

    fn record(node: &str, token: &str) -> MachineRecord {
        MachineRecord {
            name: machine_record::name_of_node(node),
            node: node.into(),
            token: token.into(),
            ..MachineRecord::default()
        }
    }

    /// Judges with the records of the nodes `n`, whose ticket has the token `abcdef`, `m`, whose
    /// ticket has another, and `k`, which has none.
    fn judge(request: &CertificateSigningRequest) -> &'static str {
        let records = [
            record("n", "abcdef"),
            record("m", "fedcba"),
            record("k", ""),
        ];
        let asked = match examine(request) {
            Ok(asked) => asked,
            Err(judgement) => return reason(judgement),
        };
        let own = records.iter().find(|record| record.node == asked.node);
        let node_of_token = |id: &str| {
            records
                .iter()
                .find(|record| record.token == id)
                .map(|record| record.node.clone())
        };
        reason(compare(&asked, &member(own), node_of_token, None))
    }

    #[test]
    fn a_ticket_s_token_gets_the_certificate_of_its_node_and_of_no_other() {
        assert_eq!(judge(&by_token("system:node:n", &[], &[])), "ticket");
        for other in ["m", "k", "unknown", "N", "n.", "n "] {
            let judged = judge(&by_token(&format!("system:node:{other}"), &[], &[]));
            assert!(
                ["subject", "certificate-request"].contains(&judged),
                "{other}: {judged}"
            );
        }
        // A token that was replaced, or is not known yet.
        let mut stale = by_token("system:node:n", &[], &[]);
        stale.spec.username = "system:bootstrap:000000".into();
        assert_eq!(judge(&stale), "no-ticket");
        // A record without a token matches no token.
        stale.spec.username = "system:bootstrap:".into();
        stale.spec.request = pkcs10("system:node:k", &[], &[]);
        assert_eq!(judge(&stale), REQUESTER);
    }

    #[test]
    fn the_token_of_a_machine_that_has_named_its_key_is_worth_nothing_with_another_key() {
        let request = by_token("system:node:n", &[], &[]);
        let asked = examine(&request).unwrap();
        let of = |key: &str| {
            let record = MachineRecord {
                client_key: key.into(),
                ..record("n", "abcdef")
            };
            reason(compare(&asked, &member(Some(&record)), |_| None, None))
        };
        assert_eq!(of(&asked.key), "ticket");
        assert_eq!(of(&"0".repeat(64)), "client-key");
        assert_eq!(of("a text that is no hash"), "client-key");
    }

    #[test]
    fn a_node_renews_its_own_certificate_while_it_is_there_and_its_record_is_open() {
        assert_eq!(judge(&by_node("n", "system:node:n")), "recorded");
        assert_eq!(judge(&by_node("n", "system:node:m")), "subject");
        assert_eq!(judge(&by_node("gone", "system:node:gone")), "no-record");
        let asked = examine(&by_node("n", "system:node:n")).unwrap();
        let of = |membership: &Membership, migration| {
            reason(compare(&asked, membership, |_| None, migration))
        };
        let open = record("n", "");
        let without_node = Membership {
            has_node: false,
            ..member(Some(&open))
        };
        assert_eq!(of(&without_node, None), "no-node");
        let closed = MachineRecord {
            refused: Some(SystemTime::UNIX_EPOCH),
            ..open.clone()
        };
        assert_eq!(of(&member(Some(&closed)), None), "refused-before");
        let removed = Membership {
            removed: Some(Default::default()),
            ..member(Some(&open))
        };
        assert_eq!(of(&removed, None), "removed");

        // nodes from before records existed
        let day: Migration = "2027-01-31".parse().unwrap();
        let is_there = member(None);
        assert_eq!(of(&is_there, Some(day)), "migration");
        let gone = Membership::default();
        assert_eq!(of(&gone, Some(day)), "no-node");
        for closed in [&member(Some(&closed)), &removed] {
            assert_ne!(of(closed, Some(day)), "migration");
        }
    }

    #[test]
    fn the_token_of_a_node_that_was_refused_or_removed_is_worth_nothing() {
        let asked = examine(&by_token("system:node:n", &[], &[])).unwrap();
        let of = |membership: &Membership| reason(compare(&asked, membership, |_| None, None));
        let open = record("n", "abcdef");
        assert_eq!(of(&member(Some(&open))), "ticket");
        let closed = MachineRecord {
            refused: Some(SystemTime::UNIX_EPOCH),
            ..open.clone()
        };
        assert_eq!(of(&member(Some(&closed))), "refused-before");
        let removed = Membership {
            removed: Some(Default::default()),
            ..member(Some(&open))
        };
        assert_eq!(of(&removed), "removed");
    }

    #[test]
    fn other_usages_and_names_are_denied_and_other_tokens_are_left() {
        let denied = |request: &CertificateSigningRequest| match examine(request) {
            Err(Deny(reason, _)) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(denied(&by_token("system:node:n", &["n"], &[])), "name");
        assert_eq!(denied(&by_token("system:node:n", &[], &[IP])), "name");
        assert_eq!(
            denied(&by_token("system:masters", &[], &[])),
            "certificate-request"
        );
        let good = by_token("system:node:n", &[], &[]);
        for usages in [
            &[] as &[&str],
            &["digital signature"],
            &[CLIENT_AUTH, "server auth"],
        ] {
            let mut request = good.clone();
            request.spec.usages = usages.iter().map(|it| (*it).to_owned()).collect();
            assert_eq!(denied(&request), "usages");
        }
        // Tokens of kubeadm and of Constellation's join service are judged by Kubernetes' own
        // approver.
        for (user, groups) in [
            (
                "system:bootstrap:abcdef",
                &["system:bootstrappers:kubeadm:default-node-token"][..],
            ),
            ("kubernetes-admin", &["system:masters", GROUP, TICKET_GROUP]),
        ] {
            let mut request = good.clone();
            request.spec.username = user.into();
            request.spec.groups = groups.iter().map(|it| (*it).to_owned()).collect();
            assert_eq!(judge(&request), REQUESTER);
        }
    }

    #[test]
    fn no_mutation_of_a_request_is_approved_for_another_node_or_makes_it_panic() {
        for mutant in mutations(
            json_by_token("system:node:n", &[], &[])
                .to_string()
                .as_bytes(),
            5000,
        ) {
            if let Ok(request) = serde_json::from_slice(&mutant)
                && let Ok(asked) = examine(&request)
            {
                assert_eq!(asked.node, "n");
            }
        }
    }
}
