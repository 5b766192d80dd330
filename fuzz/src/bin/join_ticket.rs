//! What a node makes of a join service's answer: a ticket is refused, or all of it can be used.
#![no_main]

use std::sync::LazyLock;

use bootstrapper::ticket::{Expected, Ticket};
use kubernetes::components::Policy;
use kubernetes::kubelet_request::{KubeletRequest, authority_hashes};
use kubernetes::parameters::NodeName;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::join::IssueJoinTicketResponse;
use ssh::PublicKey;

static KUBELET: LazyLock<KubeletRequest> = LazyLock::new(|| {
    let name = NodeName::from_machine("worker-1").expect("a name");
    KubeletRequest::new(&name, [10, 42, 1, 7].into()).expect("a key")
});
/// The one of the kept inputs.
static HOST_KEY: LazyLock<PublicKey> = LazyLock::new(|| {
    let line = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILR0FseonmwTcSWFE0usA7Jhv/450JfmwMdC3i5wcbSI";
    PublicKey::from_line(line).expect("a key")
});

fuzz_target!(|bytes: &[u8]| {
    let _ = authority_hashes(bytes);
    let _ = KUBELET.complete(bytes);
    let Ok(ticket) = IssueJoinTicketResponse::decode(bytes) else {
        return;
    };
    let policy = Policy::default();
    for control_plane in [true, false] {
        let expected = Expected {
            control_plane,
            kubelet: &KUBELET,
            host_key: &HOST_KEY,
            policy: &policy,
        };
        // this run's key is in no input, so that the last check, of the certificate, refuses what passes all others
        assert!(Ticket::check(ticket.clone(), &expected).is_err());
    }
});
