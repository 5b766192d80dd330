//! Asks one node for evidence: attested TLS in the strong form, to the server that each member runs. A
//! node that is accepted is also asked for the generation of its state disk.
//!
//! Where it is asked decides what an answer means. Its record has the addresses with which its machine joined; the Node's own
//! address can be changed by its kubelet and by network plugins, so it leads anywhere:
//!
//! ```text
//!                         the machine of the record    another machine, or none that is proven
//! address of the record   accepted or refused          foreign
//! other address           accepted or refused          no evidence
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::decide::{NodeAnswer, WatchReason};
use base::text::printable;
use kubernetes::machine_record::MachineRecord;
use proto::generation::{GENERATION, GenerationRequest, GenerationResponse};
use proto::init::PORT;
use rpc::grpc::{CallOptions, Channel, Code};
use transport::Transport;
use verifier::refusal::Kind;
use verifier::{Claims, Refusal, Validator};

/// The time limit to connect. A lost SYN is sent again after 1 second (RFC 6298 §2.1).
const CONNECT: Duration = Duration::from_secs(3);
/// The time limit for evidence: callers take turns at the node's TPM, which may take a second.
const PROVE: Duration = Duration::from_secs(15);
/// The longest generation in characters that is recorded.
const GENERATION_LEN: usize = 40;
/// The longest message of a condition in characters.
const MESSAGE: usize = 1000;

/// What a node has answered.
pub struct Asked {
    /// The result.
    pub answer: NodeAnswer,
    /// The address of the Node that is not in its record, if there is one.
    pub moved: Option<IpAddr>,
    /// What it has proved, if it is accepted.
    pub proved: Option<Proved>,
}

/// What an accepted node has proved.
pub struct Proved {
    /// The machine; `None` if the evidence of the variant names none.
    pub machine: Option<Arc<str>>,
    /// The ID of the policy's image that it runs, if known.
    pub image: Option<Arc<str>>,
    /// Whether a platform signed the evidence or endorsed its key.
    pub has_platform: bool,
    /// The present generation of its state disk, if it tells one.
    pub generation: Option<String>,
}

impl From<NodeAnswer> for Asked {
    fn from(answer: NodeAnswer) -> Asked {
        Asked {
            answer,
            moved: None,
            proved: None,
        }
    }
}

/// A place where a node is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    address: IpAddr,
    /// Whether it is an address of the record.
    is_recorded: bool,
}

/// Returns where a node is asked, in this order until there is evidence that counts, and the address of its Node that is not in its
/// record. `node` is the Node's address.
fn places(node: Option<IpAddr>, record: Option<&MachineRecord>) -> (Vec<Place>, Option<IpAddr>) {
    let of_node = node.map(|address| Place {
        address,
        is_recorded: record.is_some_and(|record| record.has_address(address)),
    });
    let recorded = record.and_then(|record| record.addresses.first());
    let recorded = recorded.map(|address| Place {
        address: *address,
        is_recorded: true,
    });
    // elsewhere only a name in the evidence proves that it is this machine
    let names_machine = record.is_none_or(|record| !record.machine.is_empty());
    match (of_node, recorded) {
        (Some(own), _) if own.is_recorded => (vec![own], None),
        (Some(own), None) if names_machine => (vec![own], None),
        (Some(own), Some(recorded)) if names_machine => (vec![recorded, own], node),
        (Some(_), Some(recorded)) => (vec![recorded], node),
        (None, Some(recorded)) => (vec![recorded], None),
        (_, None) => (vec![], None),
    }
}

/// Asks the node, whose Node has the address `node`. Its evidence must be accepted by the validator, must be that of the
/// machine in its record, and its state disk must know the recorded generation.
pub fn ask(
    node: Option<IpAddr>,
    validator: &Arc<dyn Validator>,
    record: Option<&MachineRecord>,
) -> Asked {
    let (places, moved) = places(node, record);
    let mut first: Option<Asked> = None;
    for place in places {
        let asked = ask_at(place, validator, record);
        let has_none = matches!(asked.answer, NodeAnswer::None(_));
        // the first one is where it should be
        let asked = first.filter(|_| has_none).unwrap_or(asked);
        first = Some(Asked { moved, ..asked });
        if !has_none {
            break;
        }
    }
    let message =
        "neither the Node nor the record has an address at which the machine could prove itself";
    first.unwrap_or_else(|| none("NoAddress", message.into()).into())
}

fn ask_at(place: Place, validator: &Arc<dyn Validator>, record: Option<&MachineRecord>) -> Asked {
    let address = SocketAddr::new(place.address, PORT);
    let recorded = record.map_or("", |record| record.generation.as_str());
    let proved = prove(address, validator, &|refusal| {
        of_refusal(refusal, place, record)
    });
    let proved = proved.and_then(|transport| {
        let name = transport.identity.clone();
        match judge(name.as_deref(), place, record) {
            NodeAnswer::Accepted => {}
            answer => return Err(answer),
        }
        let claims = transport.claims.as_ref();
        let claims = claims.and_then(|claims| claims.downcast_ref::<Claims>());
        Ok(Proved {
            machine: name,
            image: claims.and_then(|claims| claims.image.clone()),
            has_platform: claims.is_some_and(|claims| claims.platform.is_some()),
            generation: generation(transport, address, recorded)?,
        })
    });
    match proved {
        Ok(proved) => Asked {
            answer: NodeAnswer::Accepted,
            moved: None,
            proved: Some(proved),
        },
        Err(answer) => answer.into(),
    }
}

/// Connects to the machine at this address, whose evidence the validator accepts.
fn prove(
    address: SocketAddr,
    validator: &Arc<dyn Validator>,
    refused: &dyn Fn(&Refusal) -> NodeAnswer,
) -> Result<Transport, NodeAnswer> {
    let unreachable = |error: io::Error| none("Unreachable", format!("{address}: {error}"));
    let socket = TcpStream::connect_timeout(&address, CONNECT).map_err(unreachable)?;
    let judge = verifier::judge(validator.clone());
    let client = atls::Client::new(None, Some(judge)).require_strong();
    let connected = client.connect(socket, Instant::now() + PROVE);
    connected.map_err(|error| failed(address, error, refused))
}

/// Asks an accepted machine for the generation of its state disk, which must know the recorded one.
/// Earlier versions do not know the method: `None`, unless a generation is recorded.
fn generation(
    transport: Transport,
    address: SocketAddr,
    recorded: &str,
) -> Result<Option<String>, NodeAnswer> {
    let options = CallOptions {
        timeout: Some(PROVE),
        ..CallOptions::default()
    };
    let request = GenerationRequest {
        recorded: recorded.into(),
    };
    let answer = Channel::new(transport, &address.to_string())
        .and_then(|channel| channel.unary(GENERATION, &request, &options));
    let answer: GenerationResponse = match answer {
        Err(status) if status.code() == Code::Unimplemented => {
            return without_generations(recorded);
        }
        Err(status) => return Err(none("NoGeneration", format!("{address}: {status}"))),
        Ok(answer) => answer,
    };
    let current = printable(&answer.current, GENERATION_LEN);
    if answer.is_unknown {
        Err(NodeAnswer::Refused(WatchReason {
            word: "OldDisk",
            message: format!(
                "the state disk is an older copy: it does not know generation {recorded}, which it had at the last evidence; \
             it has {current}. Somebody brought an old copy back, or restored a backup: see docs/watch.md"
            ),
        }))
    } else {
        Ok(Some(current))
    }
}

/// Returns what a machine with an earlier version has proved, which knows no generations. An old copy
/// of its disk has the old image, too, and the policy may still accept that image. So a machine that
/// had a generation must not come back without one.
fn without_generations(recorded: &str) -> Result<Option<String>, NodeAnswer> {
    if recorded.is_empty() {
        Ok(None)
    } else {
        Err(NodeAnswer::Refused(WatchReason {
            word: "OldDisk",
            message: format!(
                "the node runs an earlier version, which knows no generations, and its state disk had generation {recorded} at \
             the last evidence: the disk may be an older copy, with its older image. If somebody went back to that image \
             on purpose, accept the disk: see docs/state-disk.md"
            ),
        }))
    }
}

fn failed(
    address: SocketAddr,
    error: atls::Error,
    refused: &dyn Fn(&Refusal) -> NodeAnswer,
) -> NodeAnswer {
    match error {
        atls::Error::Refused(why) => refused(&verifier::refusal_of(why)),
        atls::Error::TimedOut => none("TimedOut", format!("{address}: {error}")),
        atls::Error::Closed | atls::Error::Socket(_) => {
            none("Unreachable", format!("{address}: {error}"))
        }
        // another program has the port, or the node cannot use its TPM
        _ => none("NoEvidence", format!("{address}: {error}")),
    }
}

fn none(word: &'static str, message: String) -> NodeAnswer {
    NodeAnswer::None(WatchReason { word, message })
}

/// Returns what a refusal means. Without current collateral the verifier cannot judge: that is no fault
/// of the node, unless there is another reason beside it. A refusal says something about the node only if the evidence is that
/// of its machine, or if evidence names no machine and comes from its address.
fn of_refusal(refusal: &Refusal, place: Place, record: Option<&MachineRecord>) -> NodeAnswer {
    let reason = WatchReason {
        word: word(refusal.kind),
        message: refusal.to_string().chars().take(MESSAGE).collect(),
    };
    let is_of_verifier = |kind| matches!(kind, Kind::Collateral | Kind::Expired);
    let mut all = refusal.others.iter().map(|other| other.kind);
    if is_of_verifier(refusal.kind) && all.all(is_of_verifier) {
        return NodeAnswer::None(reason);
    }
    let machine = refusal.machine.as_deref();
    let recorded = record.map(|record| record.machine.as_str());
    match (machine, recorded) {
        (Some(machine), Some(recorded)) if machine == recorded => NodeAnswer::Refused(reason),
        (None, Some("")) if place.is_recorded => NodeAnswer::Refused(reason),
        _ if place.is_recorded => NodeAnswer::Foreign(WatchReason {
            message: format!(
                "the server at {} is refused, and nothing shows that it is the node's machine: {}",
                place.address, reason.message
            ),
            ..reason
        }),
        _ => none(
            "NoRecord",
            format!(
                "the server at {}, an address that no record has, is refused: {}",
                place.address, reason.message
            ),
        ),
    }
}

/// Returns the name of a kind of refusal as the reason of a condition.
fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Malformed => "Malformed",
        Kind::Signature => "Signature",
        Kind::Chain => "Chain",
        Kind::Certificate => "Certificate",
        Kind::Revoked => "Revoked",
        Kind::Expired => "Expired",
        Kind::Nonce => "Nonce",
        Kind::Form => "Form",
        Kind::Binding => "Binding",
        Kind::Measurement => "Measurement",
        Kind::Machine => "Machine",
        Kind::Outdated => "Outdated",
        Kind::Protection => "Protection",
        Kind::Collateral => "Collateral",
        Kind::Unproven => "Unproven",
    }
}

/// Compares the machine that proved itself with the one in the record. The evidence of some variants
/// names no machine; then the record names none either, and there is nothing to compare.
fn judge(machine: Option<&str>, place: Place, record: Option<&MachineRecord>) -> NodeAnswer {
    let recorded = record.map(|record| record.machine.as_str());
    let machine_or_none = machine.unwrap_or("a machine without a name");
    match (machine, recorded) {
        (Some(machine), Some(recorded)) if machine == recorded => NodeAnswer::Accepted,
        (None, Some("")) if place.is_recorded => NodeAnswer::Accepted,
        (_, None | Some("")) => none(
            "NoRecord",
            format!(
                "no record names this node's machine, so any machine of the cluster could be at its address; the \
                 machine there is {machine_or_none}: see docs/watch.md"
            ),
        ),
        (_, Some(recorded)) => {
            let reason = WatchReason {
                word: "OtherMachine",
                message: format!(
                    "another machine of the cluster answers at {}: expected {recorded}, got {machine_or_none}",
                    place.address
                ),
            };
            if place.is_recorded {
                NodeAnswer::Foreign(reason)
            } else {
                NodeAnswer::None(reason)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word_of(answer: NodeAnswer) -> (&'static str, &'static str) {
        match answer {
            NodeAnswer::Accepted => ("accepted", ""),
            NodeAnswer::Refused(reason) => ("refused", reason.word),
            NodeAnswer::Foreign(reason) => ("foreign", reason.word),
            NodeAnswer::None(reason) => ("none", reason.word),
        }
    }

    fn record(machine: &str, addresses: &[&str]) -> MachineRecord {
        MachineRecord {
            machine: machine.into(),
            addresses: addresses.iter().map(|it| it.parse().unwrap()).collect(),
            ..MachineRecord::default()
        }
    }

    fn place(is_recorded: bool) -> Place {
        Place {
            address: "10.0.0.7".parse().unwrap(),
            is_recorded,
        }
    }

    #[test]
    fn a_node_is_asked_where_its_machine_joined_and_not_where_its_node_object_points() {
        let of = |node: &str, record: Option<&MachineRecord>| {
            let (places, moved) = places(node.parse().ok(), record);
            let places = places
                .iter()
                .map(|it| (it.address.to_string(), it.is_recorded));
            (places.collect::<Vec<_>>(), moved.map(|it| it.to_string()))
        };
        let place = |address: &str, is_recorded| (address.to_owned(), is_recorded);
        let (own, other) = ("10.0.0.7", "10.0.0.9");
        let bound = record("m", &["fd00::7", own]);
        assert_eq!(of(own, Some(&bound)), (vec![place(own, true)], None));
        assert_eq!(of("", Some(&bound)), (vec![place("fd00::7", true)], None));
        // the Node's address has been changed, or the machine has another one since it joined
        let both = vec![place("fd00::7", true), place(other, false)];
        assert_eq!(of(other, Some(&bound)), (both, Some(other.into())));
        // evidence without a name proves nothing there
        let nameless = record("", &[own]);
        assert_eq!(of(own, Some(&nameless)), (vec![place(own, true)], None));
        assert_eq!(
            of(other, Some(&nameless)),
            (vec![place(own, true)], Some(other.into()))
        );
        assert_eq!(of(other, Some(&record("", &[]))), (vec![], None));
        for record in [Some(&record("m", &[])), None] {
            assert_eq!(of(other, record), (vec![place(other, false)], None));
        }
    }

    #[test]
    fn only_the_machine_of_the_record_is_accepted() {
        for (machine, recorded, is_recorded, expected) in [
            (Some("m"), Some("m"), true, ("accepted", "")),
            // wherever it is, its evidence names it
            (Some("m"), Some("m"), false, ("accepted", "")),
            (Some("m"), Some("n"), true, ("foreign", "OtherMachine")),
            (None, Some("m"), true, ("foreign", "OtherMachine")),
            // anybody may have pointed the Node there
            (Some("m"), Some("n"), false, ("none", "OtherMachine")),
            (Some("m"), Some(""), true, ("none", "NoRecord")),
            (Some("m"), None, false, ("none", "NoRecord")),
            (None, None, false, ("none", "NoRecord")),
            (None, Some(""), true, ("accepted", "")),
            (None, Some(""), false, ("none", "NoRecord")),
        ] {
            let record = recorded.map(|machine| record(machine, &[]));
            let answer = judge(machine, place(is_recorded), record.as_ref());
            assert_eq!(word_of(answer), expected, "{machine:?} {recorded:?}");
        }
    }

    #[test]
    fn a_refusal_counts_only_if_the_evidence_is_that_of_the_machine_in_the_record() {
        for (machine, recorded, is_recorded, expected) in [
            (Some("m"), Some("m"), true, ("refused", "Measurement")),
            (Some("m"), Some("m"), false, ("refused", "Measurement")),
            (Some("m"), Some("n"), true, ("foreign", "Measurement")),
            (None, Some("m"), true, ("foreign", "Measurement")),
            (Some("m"), Some("n"), false, ("none", "NoRecord")),
            (None, Some("m"), false, ("none", "NoRecord")),
            (Some("m"), None, false, ("none", "NoRecord")),
            (Some("m"), Some(""), true, ("foreign", "Measurement")),
            // the evidence of this variant names no machine
            (None, Some(""), true, ("refused", "Measurement")),
        ] {
            let mut refusal = Kind::Measurement.because("text");
            refusal.machine = machine.map(Into::into);
            let record = recorded.map(|machine| record(machine, &[]));
            let answer = of_refusal(&refusal, place(is_recorded), record.as_ref());
            assert_eq!(word_of(answer), expected, "{machine:?} {recorded:?}");
        }
    }

    #[test]
    fn a_version_without_generations_is_accepted_only_if_none_was_recorded() {
        assert_eq!(without_generations(""), Ok(None));
        let refused = without_generations("2-9f86d081").unwrap_err();
        assert_eq!(word_of(refused), ("refused", "OldDisk"));
    }

    #[test]
    fn missing_collateral_is_no_fault_of_the_node() {
        let record = record("m", &[]);
        let of = |refusal: Refusal| {
            word_of(of_refusal(
                &refusal.by("m".into()),
                place(true),
                Some(&record),
            ))
        };
        let kind = |kind: Kind| of(kind.because("text"));
        assert_eq!(kind(Kind::Measurement), ("refused", "Measurement"));
        assert_eq!(kind(Kind::Revoked), ("refused", "Revoked"));
        assert_eq!(kind(Kind::Collateral), ("none", "Collateral"));
        assert_eq!(kind(Kind::Expired), ("none", "Expired"));
        let both = [Kind::Collateral, Kind::Outdated].map(|kind| kind.because("text"));
        let both = verifier::Refusal::join(both.into()).unwrap_err();
        assert_eq!(of(both), ("refused", "Collateral"));
    }

    #[test]
    fn a_message_is_bounded() {
        let refusal = Kind::Measurement.because("ä".repeat(5000)).by("m".into());
        let answer = of_refusal(&refusal, place(true), Some(&record("m", &[])));
        let NodeAnswer::Refused(reason) = answer else {
            panic!()
        };
        assert_eq!(reason.message.chars().count(), MESSAGE);
    }
}
