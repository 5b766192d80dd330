//! The verification service of Constellation (`/verify.API/GetAttestation`): ours is asked by grpc-go, and `firstlight verify --plain`
//! asks one of grpc-go.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use support::foreign::go_program;
use support::program::Peer;
use support::swtpm::PCR_4;
use verifier::{Evidence, Issuer, Measurement, Policy, Validator, qemu_vtpm};

use crate::mutual::{Host, hex, own_cluster};
use crate::setting::{MASTER_KEY, Setting, wait_for_port};
use crate::status::{expect, verify_by};

/// The user data of each document of such a service.
const USER_DATA: &[u8] = b"VerifyService";

fn grpc_go() -> PathBuf {
    go_program("grpc_go", env!("CARGO_TARGET_TMPDIR"))
}

/// Returns what a client with grpc-go gets: a document, or `error CODE MESSAGE`.
fn ask(service: &SocketAddr, nonce: &[u8]) -> Vec<u8> {
    let output = Command::new(grpc_go())
        .args(["-attestation", &service.to_string(), "-nonce", &hex(nonce)])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    output.stdout
}

fn policy(setting: &Setting) -> PathBuf {
    setting.policy_of(&[(4, PCR_4), (15, [0; 32])])
}

#[test]
fn a_client_of_the_old_system_verifies_the_machine_of_our_join_service() {
    let setting = Setting::new();
    let host = Host::new(Some(own_cluster()), None);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let (policy, socket) = (policy(&setting), host.socket());
    let address = SocketAddr::new(setting.host(3), 30081);
    let listen = address.to_string();
    let http = SocketAddr::new(setting.host(3), 30080);
    let on_http = format!("--verification-http={http}");
    let more = [
        "--evidence",
        socket.to_str().unwrap(),
        "--verification",
        &listen,
        &on_http,
    ];
    let service = setting.join_service_with(3, keys, &policy, &more);
    wait_for_port(address);
    wait_for_port(http);

    let nonce = [5; 32];
    let document = ask(&address, &nonce);
    let cluster = Measurement {
        expected: vec![0; 32],
        warn_only: false,
    };
    let member = Policy::new([(15, cluster)].into()).unwrap();
    let member = member.expecting_cluster(&own_cluster());
    let validator = qemu_vtpm::validator(Arc::new(member));
    let identified = validator.judge(&Evidence::new(&document, &nonce));
    assert_eq!(identified.unwrap().user_data, USER_DATA);
    assert!(
        validator
            .judge(&Evidence::new(&document, &[6; 32]))
            .is_err()
    );
    for (nonce, why) in [
        (&[][..], "nonce is required to issue attestation"),
        (&[5; 15][..], "15 bytes, expected 16 to 32"),
        // longer data could be the input of attested TLS's hash
        (&[5; 33][..], "33 bytes, expected 16 to 32"),
    ] {
        let said = String::from_utf8(ask(&address, nonce)).unwrap();
        let is_named = said.starts_with("error InvalidArgument") && said.contains(why);
        assert!(is_named, "{said}");
    }

    let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
    let by_http = |query: &str| {
        let answer = agent.get(format!("http://{http}/{query}")).call();
        let body = answer.map(|mut answer| answer.body_mut().read_to_string().unwrap());
        body.map_err(|error| error.to_string())
    };
    let encoded = URL_SAFE.encode(nonce);
    let answer = by_http(&format!("?nonce={encoded}")).unwrap();
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let document = STANDARD.decode(answer["data"].as_str().unwrap()).unwrap();
    let identified = validator.judge(&Evidence::new(&document, &nonce));
    assert_eq!(identified.unwrap().user_data, USER_DATA);
    for query in ["", "?nonce=", "?nonce=!!!!", "?nonce=AAAA"] {
        let error = by_http(query).unwrap_err();
        assert!(error.contains("400"), "{query}: {error}");
    }

    let verify = |more: &[&str]| {
        let more = [&["--plain"], more].concat();
        verify_by(&setting, &policy, &listen, &more)
    };
    let id = hex(&own_cluster());
    let proven = verify(&["--cluster-id", &id, "--save", "kept.json"]);
    expect(&proven, 0, &["proven", "form:      plain", &id]);
    expect(&verify(&["--fresh"]), 3, &["PCR 15  differs"]);
    let again = ["--evidence=kept.json", "--cluster-id", &id, "--policy"];
    let policy = policy.display().to_string();
    let again = [&["verify"], &again[..], &[&policy]].concat();
    let judged = setting.firstlight(&again).output().unwrap();
    assert!(judged.status.success(), "{}", service.output());
}

#[test]
fn our_operator_verifies_a_verification_service_of_the_old_system() {
    let setting = Setting::new();
    let host = Host::new(Some(own_cluster()), None);
    let policy = policy(&setting);
    let id = hex(&own_cluster());
    let verify = |user_data: &'static [u8]| {
        let issuer = qemu_vtpm::issuer(host.location(), None);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let evidence = listener.local_addr().unwrap().to_string();
        // the peer answers one caller
        let answers = thread::spawn(move || {
            let (mut caller, _) = listener.accept().unwrap();
            let mut nonce = vec![];
            caller.read_to_end(&mut nonce).unwrap();
            let document = issuer.issue(user_data, &nonce).unwrap();
            caller.write_all(&document).unwrap();
        });
        let service = Peer::start(Command::new(grpc_go()).args(["-evidence", &evidence]));
        let address = service.address.to_string();
        let options = ["--plain", "--cluster-id", &id];
        let said = verify_by(&setting, &policy, &address, &options);
        answers.join().unwrap();
        said
    };
    expect(&verify(USER_DATA), 0, &["proven", "form:      plain", &id]);
    let other = verify(b"VerifyServices");
    expect(&other, 3, &["not one of a verification service"]);
    // no server answers
    let nobody = format!("{}:30081", setting.host(9));
    let nobody = verify_by(&setting, &policy, &nobody, &["--plain", "--fresh"]);
    expect(&nobody, 4, &["unreachable"]);
}
