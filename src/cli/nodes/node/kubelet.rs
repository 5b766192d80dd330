//! What an API server hears from the kubelet of a node: the only program on a machine that always listens, and needs no other machine for
//! an answer.

use std::time::Duration;

use kubernetes::client::{self, Client};
use kubernetes::control_planes::asks_other_machine;
use kubernetes::machine_record::MachineRecord;
use kubernetes::objects::NodeObject;

use crate::shell::error::Error;

/// The limit of one question. An API server tries for 30 s to reach a kubelet.
const PATIENCE: Duration = Duration::from_secs(45);
/// How an API server begins its own error about a kubelet that it does not reach.
const NOT_REACHED: &str = "error trying to reach service: ";
/// How it ends this error if nothing answers at the address, not even another program or a router in between.
const NOTHING_THERE: [&str; 4] = [
    "i/o timeout",
    "no route to host",
    "connection timed out",
    "host is down",
];

/// What an API server hears from a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kubelet {
    /// An answer, also one that refuses: the machine runs.
    Answers,
    /// Nothing: the machine is off, or the API server does not reach it.
    Silent(String),
    /// Something else: it says nothing about the machine.
    Unknown(String),
}

impl Kubelet {
    /// Asks the kubelet of a node through the API server. Nothing is asked at an address that is not in the record of the node: whether
    /// another machine answers says nothing about this one.
    pub fn ask(
        client: &Client,
        node: &NodeObject,
        record: Option<&MachineRecord>,
    ) -> Result<Kubelet, Error> {
        if let Some(why) = record.and_then(|record| asks_other_machine(node, record)) {
            return Ok(Kubelet::Unknown(why));
        }
        let name = &node.metadata.name;
        Kubelet::of(client.within(PATIENCE).ask_kubelet(name)).map_err(Error::from)
    }

    fn of(heard: Result<(), client::Error>) -> Result<Kubelet, client::Error> {
        let refused = match heard {
            Ok(()) => return Ok(Kubelet::Answers),
            Err(client::Error::Refused(refused)) => refused,
            // the API server itself does not answer
            Err(error) if error.is_temporary() => return Ok(Kubelet::Unknown(error.to_string())),
            Err(error) => return Err(error),
        };
        let why = refused.message.clone();
        Ok(match why.strip_prefix(NOT_REACHED) {
            Some(fault) if !fault.contains("dial tcp") => Kubelet::Answers,
            Some(fault) if NOTHING_THERE.iter().any(|end| fault.ends_with(end)) => {
                Kubelet::Silent(fault.to_owned())
            }
            Some(fault) => Kubelet::Unknown(fault.to_owned()),
            None if refused.reason.is_empty() && is_of_kubelet(refused.code, &why) => {
                Kubelet::Answers
            }
            None if refused.code == 403 => return Err(client::Error::Refused(refused)),
            None => Kubelet::Unknown(why),
        })
    }

    /// Returns why the kubelet does not answer.
    pub fn fault(&self) -> Option<&str> {
        match self {
            Kubelet::Answers => None,
            Kubelet::Silent(why) | Kubelet::Unknown(why) => Some(why),
        }
    }
}

/// Returns whether an error without a reason, as those of the API server have it, is that of a kubelet. A kubelet whose own API server has
/// ended cannot ask it for permission, and says so with status 500. Load balancers use 502 to 504.
fn is_of_kubelet(code: u16, text: &str) -> bool {
    let words = ["Authorization error", "healthz check failed"];
    (400..500).contains(&code) || code == 500 && words.iter().any(|it| text.contains(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(code: u16, reason: &str, message: &str) -> Kubelet {
        let refused = client::ApiStatus {
            request: "get nodes a/proxy".into(),
            code,
            reason: reason.into(),
            message: message.into(),
            retry_after: None,
            ended: None,
        };
        Kubelet::of(Err(client::Error::Refused(Box::new(refused)))).unwrap()
    }

    #[test]
    fn only_an_address_at_which_nothing_answers_is_silent() {
        assert_eq!(Kubelet::of(Ok(())).unwrap(), Kubelet::Answers);
        let fault = |why: &str| {
            heard(
                503,
                "ServiceUnavailable",
                &format!("error trying to reach service: {why}"),
            )
        };
        for silent in [
            "dial tcp 10.0.0.3:10250: i/o timeout",
            "dial tcp 10.0.0.3:10250: connect: no route to host",
        ] {
            assert_eq!(fault(silent), Kubelet::Silent(silent.into()));
        }
        // somebody is there
        for answer in [
            "tls: failed to verify certificate: x509: certificate has expired",
            "net/http: TLS handshake timeout",
            "read tcp 10.0.0.1:4->10.0.0.3:10250: read: connection reset by peer",
        ] {
            assert_eq!(fault(answer), Kubelet::Answers, "{answer}");
        }
        assert_eq!(heard(401, "", "Unauthorized"), Kubelet::Answers);
        assert_eq!(heard(403, "", "Forbidden (user=u)"), Kubelet::Answers);
        let of_plane = "Authorization error (user=kube-apiserver-kubelet-client, verb=get, resource=nodes, subresource(s)=[proxy])";
        assert_eq!(heard(500, "", of_plane), Kubelet::Answers);
        // the machine may run without a kubelet; the API server may have no network or no name service
        for unknown in [
            "dial tcp 10.0.0.3:10250: connect: connection refused",
            "dial tcp 10.0.0.3:10250: connect: network is unreachable",
            "dial tcp: lookup a: no such host",
        ] {
            assert_eq!(fault(unknown), Kubelet::Unknown(unknown.into()));
        }
        for code in [500, 502, 503] {
            let of_other = heard(code, "", "etcdserver: leader changed");
            assert!(matches!(of_other, Kubelet::Unknown(_)), "{code}");
        }
    }
}
