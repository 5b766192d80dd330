//! Whether a machine is off. Kubernetes cannot know: `Ready=Unknown` and a Lease that ends also mean a machine without a network, a
//! kubelet that was stopped, or a control plane whose own API server has ended with its member of etcd. Its containers run then, and
//! start a second time elsewhere when its Node is deleted.
//!
//! So an API server of the others asks the kubelet itself. An answer proves that the machine runs. That there is none proves only
//! something if there was one before, in the same run of the command, and the operator was asked to power the machine off in between.
//! Otherwise the operator has to say that it is off.

use std::time::{Duration, Instant};

use kubernetes::client::{self, Client, LEASES, NODES};

use super::plan::Leaving;
use crate::error::Error;
use crate::objects::{is_silent, text};
use crate::progress::Progress;

/// The namespace of kubelets' Leases. A kubelet renews its Lease every ten seconds.
const LEASES_OF_NODES: &str = "kube-node-lease";
/// How long neither the kubelet may answer nor its Lease may change.
const SILENCE: Duration = Duration::from_secs(60);
/// The limit of one question. An API server tries for 30 s to reach a kubelet.
const PATIENCE: Duration = Duration::from_secs(45);
/// The pause between two looks at the machines.
const PAUSE: Duration = Duration::from_secs(2);
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
    /// Asks the kubelet of a node through the API server.
    pub fn ask(client: &Client, node: &str) -> Result<Kubelet, Error> {
        Kubelet::of(client.within(PATIENCE).ask_kubelet(node)).map_err(Error::from)
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

/// A machine that was asked to be powered off.
struct Machine<'a> {
    leaving: &'a Leaving,
    /// What the kubelet wrote last into its Lease.
    renewed: String,
    /// Since when neither the kubelet nor its Lease has said anything.
    silent: Option<Instant>,
    /// What was heard last.
    last: Kubelet,
}

impl Machine<'_> {
    /// Looks once whether the machine is off.
    fn is_off(&mut self, client: &Client) -> Result<bool, Error> {
        let name = &self.leaving.name;
        let Some(node) = client.find(&NODES.named(name))? else {
            return Ok(true);
        };
        let begun = Instant::now();
        self.last = Kubelet::ask(client, name)?;
        let renewed = renewal(client, name)?;
        let is_renewed = renewed != self.renewed;
        self.renewed = renewed;
        // the operator has said so
        let is_declared = !self.leaving.runs();
        match &self.last {
            Kubelet::Answers => self.silent = None,
            _ if is_renewed => self.silent = None,
            _ if is_declared && is_silent(&node) => return Ok(true),
            Kubelet::Unknown(_) if !is_declared => self.silent = None,
            _ => {
                let since = *self.silent.get_or_insert(begun);
                return Ok(since.elapsed() >= SILENCE);
            }
        }
        Ok(false)
    }
}

/// Returns when the kubelet of a node has renewed its Lease.
fn renewal(client: &Client, name: &str) -> Result<String, Error> {
    let lease = client.find(&LEASES.in_namespace(LEASES_OF_NODES).named(name))?;
    Ok(text(&lease.unwrap_or_default(), "/spec/renewTime").to_owned())
}

/// Waits until the machines are off whose Nodes exist.
pub fn wait_until_off(
    client: &Client,
    progress: &Progress,
    nodes: &[Leaving],
    deadline: Instant,
) -> Result<(), Error> {
    let mut machines = Vec::new();
    for leaving in nodes.iter().filter(|it| it.node.is_some()) {
        machines.push(Machine {
            leaving,
            renewed: renewal(client, &leaving.name)?,
            silent: None,
            last: Kubelet::Answers,
        });
    }
    let mut said = String::new();
    loop {
        let mut left = Vec::new();
        for mut machine in machines {
            if !machine.is_off(client)? {
                left.push(machine);
            }
        }
        machines = left;
        if machines.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let each = machines.iter().map(|it| state(&it.leaving.name, &it.last));
            let each: Vec<_> = each.collect();
            return Err(Error::Failed(format!(
                "{}. Nothing else of it was deleted. Power the machine off, and run the command again, which goes on; if the \
                 machine is off and the command cannot see it: --machines-off",
                each.join("; ")
            )));
        }
        let names: Vec<_> = machines.iter().map(|it| it.leaving.name.as_str()).collect();
        let names = names.join(", ");
        if names != said {
            progress.phase(format!(
                "power off {names} now: waiting until its kubelet does not answer for {} s",
                SILENCE.as_secs()
            ));
            said = names;
        }
        if client.stopped_within(PAUSE) {
            return Err(client::Error::Stopped.into());
        }
    }
}

fn state(name: &str, last: &Kubelet) -> String {
    match last {
        Kubelet::Answers => format!("the kubelet of {name} still answers, so its machine runs"),
        Kubelet::Silent(why) => format!(
            "the kubelet of {name} has not been silent for {} s ({why})",
            SILENCE.as_secs()
        ),
        Kubelet::Unknown(why) => format!("nobody can tell whether {name} runs ({why})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(code: u16, reason: &str, message: &str) -> Kubelet {
        let refused = client::Refused {
            request: "get nodes a/proxy".into(),
            code,
            reason: reason.into(),
            message: message.into(),
            retry_after: None,
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
