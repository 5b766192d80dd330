//! What `firstlight status` found: text for people, JSON for programs, and the exit code.

use std::borrow::Cow;
use std::fmt::Write;
use std::iter;

use proto::init;
use proto::recoverproto;
use serde_json::{Value, json};
use verifier::refusal::Kind;
use verifier::{Exception, KeyName, OTHER_VARIANT, Refusal};

use super::answer::{SERVICES, ServerAnswer};
use crate::cluster::recover;
use crate::shell::error::{ATTESTATION_REFUSED, Error, UNREACHABLE};
pub use crate::shell::error::{FRESH, OTHER_CLUSTER, WAITS_FOR_KEY};
use crate::shell::progress::{block, printable};
use crate::workspace::connect::{ClusterMembership, Endpoint};
use base::crypto::CLUSTER_ID_LEN;
use base::text::hex;

/// Exit code: only a join service answers, which sends no evidence about its node.
pub const UNPROVEN: u8 = 8;

/// The answers of a node's servers.
pub struct StatusReport {
    /// The node, as named by the operator or the API server.
    pub address: String,
    /// Each server's address, and its answer.
    pub answers: Vec<(Endpoint, ServerAnswer)>,
    /// The ID of the operator's cluster, if it is known.
    pub cluster: Option<[u8; CLUSTER_ID_LEN]>,
    /// Whether the policy names no attestation keys.
    pub names_no_keys: bool,
    /// The flaws that the policy may have.
    pub exceptions: Vec<Exception>,
}

/// The state of a node: its name for programs, the exit code, and its sentence for people.
pub struct ReportedState {
    pub name: &'static str,
    pub code: u8,
    pub text: Cow<'static, str>,
}

const MEMBER: ReportedState = ReportedState {
    name: "member",
    code: 0,
    text: Cow::Borrowed("it is a member of the cluster"),
};

/// Why a node's evidence could not be judged, which says nothing against the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unjudged {
    /// This machine does not have the vendor's collateral.
    Collateral,
    /// The evidence is of another attestation variant than the command expects.
    Variant,
}

impl StatusReport {
    /// Creates the report of a node that cannot be asked.
    pub fn silent(address: &str, cluster: Option<[u8; CLUSTER_ID_LEN]>) -> StatusReport {
        StatusReport {
            address: address.to_owned(),
            answers: vec![],
            cluster,
            names_no_keys: false,
            exceptions: vec![],
        }
    }

    /// Returns the result of the whole command.
    pub fn result(&self) -> Result<(), Error> {
        let ReportedState { code, text, .. } = self.state();
        match code {
            0 => Ok(()),
            _ => Err(Error::State(code, format!("{}: {text}", self.address))),
        }
    }

    /// Returns the state of the node. A refused attestation comes first, then the node's standing,
    /// then a node that does not answer.
    pub fn state(&self) -> ReportedState {
        let has = |wanted: fn(&ServerAnswer) -> bool| {
            self.answers.iter().any(|(_, answer)| wanted(answer))
        };
        let is = |wanted: ClusterMembership| {
            self.answers
                .iter()
                .any(|(_, answer)| matches!(answer, ServerAnswer::Verified { standing, .. } if *standing == wanted))
        };
        let waits_for_key = |answer: &ServerAnswer| match answer {
            ServerAnswer::Verified { services, .. } => services
                .iter()
                .any(|service| service.port == recoverproto::PORT),
            _ => false,
        };
        let state = |name, code, text: &'static str| ReportedState {
            name,
            code,
            text: text.into(),
        };
        if has(|answer| matches!(answer, ServerAnswer::Refused(_))) {
            state(
                "refused",
                ATTESTATION_REFUSED,
                "attestation refused, see above",
            )
        } else if is(ClusterMembership::Other) {
            let text = "it belongs to another cluster, or the ID of your cluster is unknown";
            state("other-cluster", OTHER_CLUSTER, text)
        } else if is(ClusterMembership::Member) {
            MEMBER
        } else if has(waits_for_key) {
            state(
                "waits-for-key",
                WAITS_FOR_KEY,
                "it waits for the key of its disk",
            )
        } else if is(ClusterMembership::Fresh) {
            state("fresh", FRESH, "it belongs to no cluster yet")
        } else if has(|answer| matches!(answer, ServerAnswer::Guarded)) {
            let text = "only the join service answers, which proves nothing about its node";
            state("unproven", UNPROVEN, text)
        } else if let Some(text) = self.nameless() {
            ReportedState {
                name: "unreachable",
                code: UNREACHABLE,
                text: text.to_owned().into(),
            }
        } else {
            let text = "no server answers: the node is off, still booting, or cannot be reached";
            state("unreachable", UNREACHABLE, text)
        }
    }

    /// Returns why the node is in its state: what its evidence lacks, or else a sentence.
    pub fn reason(&self) -> String {
        match self.refusal() {
            Some(why) => why.to_string(),
            None => self.state().text.into_owned(),
        }
    }

    /// Returns why the node's evidence is refused, if it is.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.answers.iter().find_map(|(_, answer)| match answer {
            ServerAnswer::Refused(why) => Some(why),
            _ => None,
        })
    }

    /// Returns why the node's evidence could not be judged, if that is the only reason of its refusal.
    pub fn unjudged(&self) -> Option<Unjudged> {
        let refusal = self.refusal()?;
        let mut reasons = iter::once(refusal).chain(&refusal.others);
        if refusal.field.as_deref() == Some(OTHER_VARIANT) {
            Some(Unjudged::Variant)
        } else if reasons.all(|reason| reason.kind == Kind::Collateral) {
            Some(Unjudged::Collateral)
        } else {
            None
        }
    }

    /// Returns why the node's name has no address.
    fn nameless(&self) -> Option<&str> {
        self.answers.iter().find_map(|(_, answer)| match answer {
            ServerAnswer::Nobody(why) if why.is_nameless => Some(&*why.text),
            _ => None,
        })
    }

    /// Returns whether the machine has said for each port that no program listens there.
    pub fn is_closed(&self) -> bool {
        let closed =
            |answer: &ServerAnswer| matches!(answer, ServerAnswer::Nobody(why) if why.is_closed);
        !self.answers.is_empty() && self.answers.iter().all(|(_, answer)| closed(answer))
    }

    /// Returns the attestation keys that the node's servers have.
    pub fn keys(&self) -> impl Iterator<Item = KeyName> {
        self.answers.iter().filter_map(|(_, answer)| match answer {
            ServerAnswer::Verified { key, .. } => *key,
            _ => None,
        })
    }

    /// Returns the policy's image that the node proves to run.
    pub fn image(&self) -> Option<&str> {
        self.answers.iter().find_map(|(_, answer)| match answer {
            ServerAnswer::Verified { image, .. } => image.as_deref(),
            _ => None,
        })
    }

    /// Returns whether a time service has set the node's clock, if the node says so.
    pub fn has_set_clock(&self) -> Option<bool> {
        self.answers.iter().find_map(|(_, answer)| match answer {
            ServerAnswer::Verified { has_set_clock, .. } => *has_set_clock,
            _ => None,
        })
    }

    /// Returns the text for people.
    pub fn text(&self) -> String {
        let warning = self.warning().map_or(String::new(), |it| format!("{it}\n"));
        self.servers() + &warning
    }

    /// Returns what each server answers, for people.
    pub fn servers(&self) -> String {
        let mut text = String::new();
        for (endpoint, answer) in &self.answers {
            // writing to a string does not fail
            let _ = self.write(&mut text, endpoint, answer);
        }
        text
    }

    /// Returns warnings about the policy, if it has accepted a server.
    pub fn warning(&self) -> Option<String> {
        let is_attested = |answer: &ServerAnswer| matches!(answer, ServerAnswer::Verified { .. });
        if !self.answers.iter().any(|(_, it)| is_attested(it)) {
            return None;
        }
        let no_keys = self.names_no_keys.then(|| {
            "Policy: names no attestation keys, so every TPM is accepted, also by the services that have this policy".into()
        });
        let exceptions = self.exceptions.iter().map(|exception| {
            format!(
                "Policy: has the exception {exception}, so it does not say what its machines run"
            )
        });
        let all: Vec<String> = no_keys.into_iter().chain(exceptions).collect();
        (!all.is_empty()).then(|| all.join("\n"))
    }

    /// Returns the state of a node with this membership; `states` are those of the servers of a fresh one.
    fn membership(&self, standing: ClusterMembership, states: &[&str]) -> String {
        match (standing, self.cluster) {
            (ClusterMembership::Fresh, _) => states.join("; "),
            (ClusterMembership::Member, Some(id)) => {
                format!("a member of this cluster, {}", hex(&id))
            }
            (_, Some(id)) => format!("a member of another cluster than {}", hex(&id)),
            (_, None) => {
                "a member of a cluster; to check whether it is yours, give --state or --cluster-id"
                    .into()
            }
        }
    }

    fn write(
        &self,
        text: &mut String,
        endpoint: &Endpoint,
        answer: &ServerAnswer,
    ) -> std::fmt::Result {
        let at_port = SERVICES
            .iter()
            .find(|service| service.port == endpoint.port());
        let usual = at_port.map_or(String::new(), |service| format!(" ({})", service.title));
        match answer {
            ServerAnswer::Nobody(reason) => {
                writeln!(
                    text,
                    "{endpoint}{usual}: no answer: {}",
                    printable(&reason.text)
                )
            }
            ServerAnswer::Refused(why) => {
                let why = block(&why.text);
                writeln!(text, "{endpoint}{usual}: attestation refused:\n    {why}")
            }
            ServerAnswer::Guarded => writeln!(
                text,
                "{endpoint} (join service): proves nothing, and requires a proof from callers\n  Node:        probably {}",
                SERVICES[2].state
            ),
            ServerAnswer::Verified {
                standing,
                services,
                key,
                waiting,
                has_set_clock,
                ..
            } => {
                // Constellation's nodes do not list their services
                let is_old = services.is_empty() && *standing == ClusterMembership::Fresh;
                let found = if is_old {
                    at_port.into_iter().collect()
                } else {
                    services.clone()
                };
                let titles: Vec<&str> = found.iter().map(|service| service.title).collect();
                let title = if titles.is_empty() {
                    "member".into()
                } else {
                    titles.join(", ")
                };
                writeln!(text, "{endpoint} ({title}): attested, meets the policy")?;
                let states: Vec<&str> = found.iter().map(|service| service.state).collect();
                let state = self.membership(*standing, &states);
                writeln!(text, "  Node:        {state}")?;
                if *standing != ClusterMembership::Fresh
                    && services.iter().any(|service| service.port == init::PORT)
                {
                    writeln!(
                        text,
                        "  Init:        it has begun, and its result waits for the operator"
                    )?;
                }
                if let Some(key) = key {
                    writeln!(text, "  Key:         {key}")?;
                }
                if *has_set_clock == Some(false) {
                    writeln!(
                        text,
                        "  Clock:       no time service has set it: firstlight doctor says what to do"
                    )?;
                }
                for (name, value) in waiting.iter().flat_map(recover::facts) {
                    writeln!(text, "  {name} {value}")?;
                }
                Ok(())
            }
        }
    }

    /// Returns the JSON for programs, with the events of the node's boot if they are asked for.
    /// docs/cli.md describes it.
    pub fn json(&self, timeline: Option<Value>) -> Value {
        let servers = self.answers.iter().map(|(endpoint, answer)| {
            let (name, reason) = match answer {
                ServerAnswer::Nobody(reason) => ("none", Some(&reason.text)),
                ServerAnswer::Refused(why) => ("refused", Some(&why.text)),
                ServerAnswer::Guarded => ("guarded", None),
                ServerAnswer::Verified { .. } => ("attested", None),
            };
            let mut server = json!({
                "address": endpoint.to_string(),
                "answer": name,
                "reason": reason,
                "standing": null,
                "services": [],
                "key": null,
                "waiting": null,
                "clockSynchronized": null,
            });
            if let ServerAnswer::Verified {
                standing,
                services,
                key,
                waiting,
                has_set_clock,
                ..
            } = answer
            {
                server["standing"] = match standing {
                    ClusterMembership::Fresh => "fresh",
                    ClusterMembership::Member => "member",
                    ClusterMembership::Other => "other",
                }
                .into();
                server["services"] = services.iter().map(|service| service.name).collect();
                server["key"] = key.map(|key| key.to_string()).into();
                server["waiting"] = waiting.as_ref().map(recover::json).into();
                server["clockSynchronized"] = (*has_set_clock).into();
            }
            server
        });
        json!({
            "node": self.address,
            "state": self.state().name,
            "cluster": self.cluster.map(|id| hex(&id)),
            "policyNamesKeys": !self.names_no_keys,
            "policyExceptions": self.exceptions.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "servers": servers.collect::<Vec<Value>>(),
            "timeline": timeline,
        })
    }
}
