//! A join service's answer to a node: the ticket is refused, or all parts of it can be used.
#![no_main]

use std::sync::LazyLock;

use bootstrapper::trust::ticket::{Expected, Ticket};
use kubernetes::certificate_request::kubelet_request::{KubeletRequest, authority_hashes};
use kubernetes::components::ComponentPolicy;
use kubernetes::parameters::NodeName;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::join::IssueJoinTicketResponse;
use ssh::PublicKey;

static KUBELET: LazyLock<KubeletRequest> = LazyLock::new(|| {
    let name = NodeName::from_machine("worker-1").expect("a name");
    KubeletRequest::new(&name, [10, 42, 1, 7].into()).expect("a key")
});
/// The host key in the stored inputs.
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
    let policy = ComponentPolicy::default();
    for control_plane in [true, false] {
        let expected = Expected {
            control_plane,
            kubelet: &KUBELET,
            host_key: &HOST_KEY,
            policy: &policy,
        };
        // no input contains this run's key, so the last check, of the certificate, refuses each ticket that passes all others
        assert!(Ticket::check(ticket.clone(), &expected).is_err());
    }
});
