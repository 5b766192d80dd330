//! Asks one node for evidence: attested TLS in the strong form, to the server that each member runs. A
//! node that is accepted is also asked for the generation of its state disk.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::decide::{Answer, Reason};
use base::text::printable;
use booted_proto::generation::{GENERATION, GenerationRequest, GenerationResponse};
use kubernetes::machine_record::MachineRecord;
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
    pub answer: Answer,
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

impl From<Answer> for Asked {
    fn from(answer: Answer) -> Asked {
        Asked {
            answer,
            proved: None,
        }
    }
}

/// Asks the node at this address. Its evidence must be accepted by the validator, must be that of the
/// machine in its record, and its state disk must know the recorded generation.
pub fn ask(
    address: SocketAddr,
    validator: &Arc<dyn Validator>,
    record: Option<&MachineRecord>,
) -> Asked {
    let (machine, recorded) = match record {
        Some(record) => (Some(record.machine.as_str()), record.generation.as_str()),
        None => (None, ""),
    };
    let proved = prove(address, validator).and_then(|transport| {
        let name = transport.identity.clone();
        match judge(name.as_deref(), machine) {
            Answer::Accepted => {}
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
            answer: Answer::Accepted,
            proved: Some(proved),
        },
        Err(answer) => answer.into(),
    }
}

/// Connects to the machine at this address, whose evidence the validator accepts.
fn prove(address: SocketAddr, validator: &Arc<dyn Validator>) -> Result<Transport, Answer> {
    let unreachable = |error: io::Error| none("Unreachable", format!("{address}: {error}"));
    let socket = TcpStream::connect_timeout(&address, CONNECT).map_err(unreachable)?;
    let judge = verifier::judge(validator.clone());
    let client = atls::Client::new(None, Some(judge)).require_strong();
    let connected = client.connect(socket, Instant::now() + PROVE);
    connected.map_err(|error| failed(address, error))
}

/// Asks an accepted machine for the generation of its state disk, which must know the recorded one.
/// Earlier versions do not know the method: `None`.
fn generation(
    transport: Transport,
    address: SocketAddr,
    recorded: &str,
) -> Result<Option<String>, Answer> {
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
        Err(status) if status.code() == Code::Unimplemented => return Ok(None),
        Err(status) => return Err(none("NoGeneration", format!("{address}: {status}"))),
        Ok(answer) => answer,
    };
    let current = printable(&answer.current, GENERATION_LEN);
    match answer.is_unknown {
        false => Ok(Some(current)),
        true => Err(Answer::Refused(Reason {
            word: "OldDisk",
            message: format!(
                "the state disk is an older copy: it does not know generation {recorded}, which it had at the last evidence; \
                 it has {current}. Somebody brought an old copy back, or restored a backup: see docs/watch.md"
            ),
        })),
    }
}

fn failed(address: SocketAddr, error: atls::Error) -> Answer {
    match error {
        atls::Error::Refused(refused) => of_refusal(&verifier::refusal_of(refused)),
        atls::Error::TimedOut => none("TimedOut", format!("{address}: {error}")),
        atls::Error::Closed | atls::Error::Socket(_) => {
            none("Unreachable", format!("{address}: {error}"))
        }
        // another program has the port, or the node cannot use its TPM
        _ => none("NoEvidence", format!("{address}: {error}")),
    }
}

fn none(word: &'static str, message: String) -> Answer {
    Answer::None(Reason { word, message })
}

/// Returns what a refusal means. Without current collateral the verifier cannot judge: that is no fault
/// of the node, unless there is another reason beside it.
fn of_refusal(refusal: &Refusal) -> Answer {
    let reason = Reason {
        word: word(refusal.kind),
        message: refusal.to_string().chars().take(MESSAGE).collect(),
    };
    let is_of_verifier = |kind| matches!(kind, Kind::Collateral | Kind::Expired);
    let mut all = refusal.others.iter().map(|other| other.kind);
    match is_of_verifier(refusal.kind) && all.all(is_of_verifier) {
        true => Answer::None(reason),
        false => Answer::Refused(reason),
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
fn judge(machine: Option<&str>, recorded: Option<&str>) -> Answer {
    match (machine, recorded.filter(|recorded| !recorded.is_empty())) {
        (machine, Some(recorded)) if machine != Some(recorded) => Answer::Refused(Reason {
            word: "OtherMachine",
            message: format!(
                "another machine of the cluster answers at the node's address: expected {recorded}, got {}",
                machine.unwrap_or("a machine without a name")
            ),
        }),
        (Some(machine), None) => none(
            "NoRecord",
            format!(
                "no record names this node's machine, so any machine of the cluster could be at its address; it proves to \
                 be {machine}: see docs/watch.md"
            ),
        ),
        _ => Answer::Accepted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word_of(answer: Answer) -> (&'static str, &'static str) {
        match answer {
            Answer::Accepted => ("accepted", ""),
            Answer::Refused(reason) => ("refused", reason.word),
            Answer::None(reason) => ("none", reason.word),
        }
    }

    #[test]
    fn only_the_machine_of_the_record_is_accepted() {
        for (machine, recorded, expected) in [
            (Some("m"), Some("m"), ("accepted", "")),
            (Some("m"), Some("n"), ("refused", "OtherMachine")),
            (None, Some("m"), ("refused", "OtherMachine")),
            (Some("m"), Some(""), ("none", "NoRecord")),
            (Some("m"), None, ("none", "NoRecord")),
            (None, None, ("accepted", "")),
            (None, Some(""), ("accepted", "")),
        ] {
            assert_eq!(word_of(judge(machine, recorded)), expected);
        }
    }

    #[test]
    fn missing_collateral_is_no_fault_of_the_node() {
        let of = |kind: Kind| word_of(of_refusal(&kind.because("text")));
        assert_eq!(of(Kind::Measurement), ("refused", "Measurement"));
        assert_eq!(of(Kind::Revoked), ("refused", "Revoked"));
        assert_eq!(of(Kind::Collateral), ("none", "Collateral"));
        assert_eq!(of(Kind::Expired), ("none", "Expired"));
        let both = [Kind::Collateral, Kind::Outdated].map(|kind| kind.because("text"));
        let both = verifier::reasons::unless_none(both.into()).unwrap_err();
        assert_eq!(word_of(of_refusal(&both)), ("refused", "Collateral"));
    }

    #[test]
    fn a_message_is_bounded() {
        let refusal = Kind::Measurement.because("ä".repeat(5000));
        let Answer::Refused(reason) = of_refusal(&refusal) else {
            panic!()
        };
        assert_eq!(reason.message.chars().count(), MESSAGE);
    }
}
