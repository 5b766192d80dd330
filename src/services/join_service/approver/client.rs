//! Client certificates of kubelets (`kubernetes.io/kube-apiserver-client-kubelet`): by them the API server knows a node.
//!
//! A new node asks with the bootstrap token of its join ticket, and gets the certificate of the node that the ticket is of,
//! as its record says, and of no other. From then on a node asks with the certificate that it has, for the same name.
//! Kubernetes' own approver (pkg/controller/certificates/approver) does the latter in the same way; of tokens it looks at the
//! group alone, so that whoever has one can be any node. Ours are of a group that it does not approve for.

use serde_json::Value;

use super::{
    Approve, Deny, GROUP, Judgement, Leave, REQUESTER, USER_PREFIX, deny, is_of_group, read,
    user_of,
};
use kubernetes::NAMESPACE;
use kubernetes::machine_record::{self, Record};
use kubernetes::services::TICKET_GROUP;

/// Certificates by which kubelets are clients of the API server.
pub const SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// What it must be for.
pub const CLIENT_AUTH: &str = "client auth";
/// The user name of a token's bearer, before the token's identifier.
const TOKEN_PREFIX: &str = "system:bootstrap:";

/// What is asked for, in the right form.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    /// Whose certificate.
    pub node: String,
    by: By,
}

#[derive(Debug, PartialEq, Eq)]
enum By {
    /// The identifier of a bootstrap token.
    Token(String),
    /// A node's certificate.
    Node(String),
}

/// Who asks, and for what: all that can be judged by the request alone.
pub fn examine(request: &Value) -> Result<Asked, Judgement> {
    let of_group = |prefix: &str, group: &str| {
        let rest = user_of(request)
            .strip_prefix(prefix)
            .filter(|rest| !rest.is_empty());
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
            let why = "neither a join ticket's token nor a node asks: Kubernetes' own approver or an administrator may decide";
            return Err(Leave(REQUESTER, why.into()));
        }
    };
    let asked = read(request, CLIENT_AUTH)?;
    if !asked.names.is_empty() || !asked.addresses.is_empty() {
        return deny(
            "name",
            "a client certificate has no names or addresses beside its subject".into(),
        );
    }
    // as it stands there, which is what the API server will go by
    let node = asked
        .common_name
        .strip_prefix(USER_PREFIX)
        .unwrap_or_default()
        .to_owned();
    Ok(Asked { node, by })
}

/// Whether who asks may be this node: `record` is the node's, `is_there` whether it has a Node object, `node_of_token` says of
/// which node's ticket a token is.
pub fn compare(
    asked: &Asked,
    record: Option<&Record>,
    is_there: bool,
    node_of_token: impl FnOnce(&str) -> Option<String>,
) -> Judgement {
    let node = &asked.node;
    match &asked.by {
        By::Token(token) => {
            match record.filter(|record| record.node == *node && record.token == *token) {
                Some(record) => Approve(format!(
                    "the token is of the join ticket for {node}, by ConfigMap {NAMESPACE}/{}",
                    record.name
                )),
                None => match node_of_token(token) {
                    Some(other) => Deny(
                        "subject",
                        format!(
                            "the token is of the join ticket for {other}, and asks to be {node:.80?}"
                        ),
                    ),
                    // another replica's ticket may be news
                    None => {
                        let map = machine_record::name_of_node(node);
                        Leave(
                            "no-ticket",
                            format!(
                                "the token is not that of the last join ticket for {node}, by {map}"
                            ),
                        )
                    }
                },
            }
        }
        By::Node(own) if own != node => Deny(
            "subject",
            format!("the node {own:.80?} asks for the certificate of {node:.80?}"),
        ),
        By::Node(_) if !is_there => Leave("no-node", format!("there is no node {node}")),
        By::Node(_) => Approve(format!("{node} renews its own certificate")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{IP, pkcs10, word};
    use super::*;
    use support::mutation::mutations;

    /// By the token `abcdef`, as the API server shows it.
    fn by_token(common_name: &str, names: &[&str], addresses: &[&str]) -> Value {
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

    fn by_node(node: &str, common_name: &str) -> Value {
        let mut request = by_token(common_name, &[], &[]);
        request["spec"]["username"] = format!("system:node:{node}").into();
        request["spec"]["groups"] = json!([GROUP, "system:authenticated"]);
        request
    }

    fn record(node: &str, token: &str) -> Record {
        Record {
            name: machine_record::name_of_node(node),
            node: node.into(),
            token: token.into(),
            ..Record::default()
        }
    }

    /// With the records of the nodes `n`, whose ticket has the token `abcdef`, `m` and `k`, which have no ticket.
    fn judge(request: &Value) -> &'static str {
        let records = [
            record("n", "abcdef"),
            record("m", "fedcba"),
            record("k", ""),
        ];
        let asked = match examine(request) {
            Ok(asked) => asked,
            Err(judgement) => return word(judgement),
        };
        let own = records.iter().find(|record| record.node == asked.node);
        let node_of_token = |id: &str| {
            records
                .iter()
                .find(|record| record.token == id)
                .map(|record| record.node.clone())
        };
        word(compare(&asked, own, own.is_some(), node_of_token))
    }

    #[test]
    fn a_ticket_s_token_gets_the_certificate_of_its_node_and_of_no_other() {
        assert_eq!(judge(&by_token("system:node:n", &[], &[])), "approved");
        for other in ["m", "k", "unknown", "N", "n.", "n "] {
            let judged = judge(&by_token(&format!("system:node:{other}"), &[], &[]));
            assert!(
                ["subject", "certificate-request"].contains(&judged),
                "{other}: {judged}"
            );
        }
        // a token that was replaced, or is news
        let mut stale = by_token("system:node:n", &[], &[]);
        stale["spec"]["username"] = "system:bootstrap:000000".into();
        assert_eq!(judge(&stale), "no-ticket");
        // a record without a token is nobody's
        stale["spec"]["username"] = "system:bootstrap:".into();
        stale["spec"]["request"] = pkcs10("system:node:k", &[], &[]).into();
        assert_eq!(judge(&stale), REQUESTER);
    }

    #[test]
    fn a_node_renews_its_own_certificate_while_it_is_there() {
        assert_eq!(judge(&by_node("n", "system:node:n")), "approved");
        assert_eq!(judge(&by_node("n", "system:node:m")), "subject");
        assert_eq!(judge(&by_node("gone", "system:node:gone")), "no-node");
    }

    #[test]
    fn what_is_no_client_certificate_is_denied_and_other_tokens_are_left() {
        let denied = |request: &Value| match examine(request) {
            Err(Deny(word, _)) => word,
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
            json!([]),
            json!(["digital signature"]),
            json!([CLIENT_AUTH, "server auth"]),
        ] {
            let mut request = good.clone();
            request["spec"]["usages"] = usages;
            assert_eq!(denied(&request), "usages");
        }
        // as of kubeadm and of the old join service: Kubernetes' own approver looks at those
        for (user, groups) in [
            (
                "system:bootstrap:abcdef",
                json!(["system:bootstrappers:kubeadm:default-node-token"]),
            ),
            (
                "kubernetes-admin",
                json!(["system:masters", GROUP, TICKET_GROUP]),
            ),
        ] {
            let mut request = good.clone();
            (request["spec"]["username"], request["spec"]["groups"]) = (user.into(), groups);
            assert_eq!(judge(&request), REQUESTER);
        }
    }

    #[test]
    fn no_mutation_of_a_request_is_approved_for_another_node_or_makes_it_panic() {
        for mutant in mutations(
            by_token("system:node:n", &[], &[]).to_string().as_bytes(),
            5000,
        ) {
            if let Ok(request) = serde_json::from_slice::<Value>(&mutant)
                && let Ok(asked) = examine(&request)
            {
                assert_eq!(asked.node, "n");
            }
        }
    }
}
