//! A peer's message never takes much more memory than its own size, whatever fields it has.

use prost::Message;
use prost::encoding::encode_varint;
use proto::attested::{Collateral, Offer, Proof};
use proto::evidence::{EvidenceRequest, EvidenceResponse};
use proto::generation::{GenerationRequest, GenerationResponse};
use proto::init::{InitRequest, InitResponse};
use proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use proto::node::{TimelineRequest, TimelineResponse};
use proto::recoverproto::{RecoverMessage, RecoverResponse, StatusRequest, StatusResponse};
use proto::verify::{GetAttestationRequest, GetAttestationResponse};
use rpc::grpc;
use support::memory::{self, Counting};

/// Bytes of a message on the wire.
const LENGTH: usize = 64 << 10;
/// Memory in bytes that the fields of a message may take in addition to three times its length: one copy of a field, and a
/// list of them that grows.
const MOST: usize = 256 << 10;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns a field with a length.
fn field(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    encode_varint(content.len() as u64, &mut bytes);
    [bytes, content.to_vec()].concat()
}

/// Returns messages of as many fields as fit, each of one kind: empty ones with a length, numbers, packed numbers; also within
/// one or two messages.
fn hostile() -> Vec<Vec<u8>> {
    let mut flat = vec![];
    for tag in 1..16 {
        flat.push([tag << 3 | 2, 0].repeat(LENGTH / 2));
        flat.push([tag << 3, 1].repeat(LENGTH / 2));
        flat.push(field(tag, &vec![1; LENGTH]));
    }
    let within = |messages: &[Vec<u8>]| -> Vec<Vec<u8>> {
        let tags = [1, 2, 3, 4, 7, 8, 10];
        let wrapped = tags.map(|tag| messages.iter().map(move |message| field(tag, message)));
        wrapped.into_iter().flatten().collect()
    };
    let once = within(&flat);
    let twice = within(&once[..flat.len() * 4]);
    [flat, once, twice].concat()
}

fn check<M: Message + Default>(name: &str, messages: &[Vec<u8>]) -> usize {
    let mut worst = 0;
    for message in messages {
        let (_, held) = memory::most(|| grpc::decode::<M>(message, name));
        assert!(
            held <= MOST + 3 * message.len(),
            "{name} takes {held} bytes for {} that begin with {:?}",
            message.len(),
            &message[..12]
        );
        worst = worst.max(held);
    }
    println!("{name}: at most {} KiB", worst >> 10);
    worst
}

/// Calls `check` for each type.
macro_rules! each {
    ($messages:expr; $($type:ty),* $(,)?) => { [$(check::<$type>(stringify!($type), $messages)),*] };
}

#[test]
fn no_message_takes_much_more_memory_than_its_length() {
    let messages = hostile();
    let worst = each!(&messages; Offer, Proof, Collateral, EvidenceRequest, EvidenceResponse, InitRequest, InitResponse,
        IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest, IssueRejoinTicketResponse,
        GetDataKeyRequest, GetDataKeyResponse, GenerationRequest, GenerationResponse, TimelineRequest, TimelineResponse, RecoverMessage, RecoverResponse,
        StatusRequest, StatusResponse, GetAttestationRequest, GetAttestationResponse);
    assert!(
        worst.iter().any(|bytes| *bytes > LENGTH),
        "something is counted"
    );
}

/// The largest messages that a node accepts: 64 components, a control plane's files, names of an API server.
#[test]
fn the_largest_genuine_messages_are_decoded() {
    let component = proto::components::Component {
        url: "data:application/json;base64,".to_owned() + &"A".repeat(1000),
        hash: "sha256:".to_owned() + &"0".repeat(64),
        install_path: "/opt/kubernetes/patches/kube-apiserver+json.json".into(),
        extract: true,
    };
    let mut request = InitRequest::default();
    request.kubernetes_components = vec![component.clone(); 64];
    request.apiserver_cert_sans = vec!["a-long-name.of.an.api-server.example.com".into(); 300];
    request.kms_uri = "kms://".into();
    let bytes = request.encode_to_vec();
    assert!(bytes.len() < proto::init::MAX_REQUEST, "{}", bytes.len());
    let decoded = grpc::decode::<InitRequest>(&bytes, "request").unwrap();
    assert!(decoded == request);
    let mut ticket = IssueJoinTicketResponse::default();
    ticket.kubernetes_components = vec![component; 64];
    let file = proto::join::ControlPlaneCertOrKey {
        name: "apiserver-kubelet-client.crt".into(),
        data: vec![7; 4000],
    };
    ticket.control_plane_files = vec![file; 20];
    let bytes = ticket.encode_to_vec();
    assert!(bytes.len() < proto::join::MAX_TICKET, "{}", bytes.len());
    let decoded = grpc::decode::<IssueJoinTicketResponse>(&bytes, "ticket").unwrap();
    assert!(decoded == ticket);
    println!(
        "an init of {} bytes, a ticket of {} bytes",
        request.encoded_len(),
        bytes.len()
    );
}

/// The limits of requests that SPECIFICATION.md promises.
#[test]
fn each_server_has_the_promised_limit_of_its_requests() {
    let limits = [
        proto::init::MAX_REQUEST,
        proto::join::MAX_REQUEST,
        proto::recoverproto::MAX_REQUEST,
        proto::kms::MAX_REQUEST,
        proto::verify::MAX_REQUEST,
    ];
    assert_eq!(limits, [128 << 10, 64 << 10, 16 << 10, 2 << 10, 256]);
}
