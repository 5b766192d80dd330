//! Which TPMs are accepted: not a program without a TPM, and not a machine that already belongs to a cluster.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine;
use proto::init::{InitRequest, InitResponse};
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use proto::recoverproto::{RecoverMessage, RecoverResponse};
use rpc::grpc::{Call, CallOptions, Channel, Code, Limits, Router, Sender, Server, Status};
use serde_json::json;
use tpm::Tpm;
use verifier::{KeyName, qemu_vtpm};

use crate::forger::Forger;
use crate::program::Program;
use crate::setting::{MASTER_KEY, Setting, set_private};

type Issuer = Arc<dyn verifier::Issuer>;

/// The servers to which an operator sends the master secret; they keep each key URI that they get.
struct Node {
    server: Server,
    got: Arc<Mutex<Vec<String>>>,
}

impl Node {
    fn of(issuer: Issuer) -> Node {
        Node::with(atls::Server::new(Some(issuer), None))
    }

    fn with(tls: atls::Server) -> Node {
        let got: Arc<Mutex<Vec<String>>> = Arc::default();
        let (recovered, initialized) = (got.clone(), got.clone());
        let recover = move |_: &Call, message: RecoverMessage| {
            recovered.lock().unwrap().push(message.kms_uri.clone());
            Ok(RecoverResponse {})
        };
        let init = move |_: &Call, request: InitRequest, _: &mut Sender<InitResponse>| {
            initialized.lock().unwrap().push(request.kms_uri.clone());
            Err(Status::new(Code::Aborted, "that is all that was wanted"))
        };
        let router = Router::new()
            .unary("/recoverproto.API/Recover", recover)
            .server_streaming("/init.API/Init", init);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Node {
            server: Server::start("node", listener, Arc::new(tls), router, Limits::default())
                .unwrap(),
            got,
        }
    }

    /// Runs `recover` or `init` for the node; returns exit code and output.
    fn operate(&self, setting: &Setting, what: &str, policy: &str, more: &[&str]) -> (i32, String) {
        let endpoint = self.server.local_addr().to_string();
        let mut command = setting.firstlight(&[
            what,
            "--endpoint",
            &endpoint,
            "--policy",
            policy,
            "--timeout",
            "20s",
        ]);
        match what {
            "init" => {
                let secret = setting.file("init-secret", "secret");
                set_private(&secret);
                command.args(["--require=any", "--init-secret"]).arg(secret)
            }
            _ => command
                .arg("--master-secret")
                .arg(setting.master_secret(MASTER_KEY)),
        };
        let mut operator = Program::start(command.args(more));
        (operator.exit().code().unwrap(), operator.output())
    }

    fn has_master_secret(&self) -> bool {
        !self.got.lock().unwrap().is_empty()
    }
}

/// A policy that every fresh machine meets, with these attestation keys.
fn policy(setting: &Setting, keys: &[&str]) -> String {
    let keys = if keys.is_empty() {
        String::new()
    } else {
        format!(r#","attestationKeys":["{}"]"#, keys.join("\",\""))
    };
    let text = format!(
        r#"{{"exceptions":["any-image"],"measurements":{{"8":"{0}","15":"{0}"}}{keys}}}"#,
        "00".repeat(32)
    );
    setting
        .file("config/attestationConfig", text)
        .display()
        .to_string()
}

#[test]
fn a_program_without_a_tpm_gets_no_master_secret_unless_any_is_trusted() {
    let setting = Setting::new();
    let (forger, genuine) = (Forger::new(), setting.key_name().to_string());
    let forged = forger.key_name().to_string();
    let node = Node::of(Arc::new(forger));
    for what in ["recover", "init"] {
        for (named, more, why) in [
            (&[][..], &[][..], "and the policy names no key"),
            (
                &[],
                &["--attestation-key", &genuine],
                "none of the accepted keys: the policy names 0, --attestation-key 1:",
            ),
            (
                &[genuine.as_str()],
                &[],
                "not the one that the policy names",
            ),
        ] {
            let (code, said) = node.operate(&setting, what, &policy(&setting, named), more);
            assert!(
                code == 3 && said.contains(&forged) && said.contains(why),
                "{what}: {code}: {said}"
            );
            assert!(!node.has_master_secret(), "{what}: {said}");
            let says_so = said.contains("Nothing was sent to a node");
            assert_eq!(says_so, what == "init", "{said}");
        }
        // the program answers correctly, so only its key was refused
        let open = policy(&setting, &[]);
        for more in [&["--trust-any-tpm"][..], &["--attestation-key", &forged]] {
            let (_, said) = node.operate(&setting, what, &open, more);
            assert!(node.has_master_secret(), "{what}: {said}");
            assert_eq!(
                said.contains("even one that has no TPM"),
                more == ["--trust-any-tpm"],
                "{said}"
            );
            node.got.lock().unwrap().clear();
        }
        let (code, said) = node.operate(
            &setting,
            what,
            &open,
            &["--trust-any-tpm", "--attestation-key", &genuine],
        );
        assert!(
            code == 2 && said.contains("cannot be used with '--attestation-key"),
            "{said}"
        );
    }
}

#[test]
fn a_refusal_says_which_source_names_the_accepted_keys() {
    let setting = Setting::new();
    let [first, second] = [1, 2].map(|byte| KeyName::of(&[byte]).to_string());
    let salt = base64::prelude::BASE64_STANDARD.encode([7; 32]);
    let state = setting.file(
        "state.json",
        json!({"version": 1, "measurementSalt": salt, "attestationKeys": [first]}).to_string(),
    );
    let state = state.display().to_string();
    let node = Node::of(Arc::new(Forger::new()));
    for what in ["recover", "init"] {
        for (named, more, why) in [
            (&[][..], &[][..], "the policy names 0, the state file 1:"),
            (&[&*second], &[], "the policy names 1, the state file 1:"),
            (&[&*first], &[], "not the one that the policy names:"),
            (
                &[],
                &["--attestation-key", &second],
                "the policy names 0, --attestation-key 1, the state file 1:",
            ),
        ] {
            let more: Vec<_> = ["--state", &state].iter().chain(more).copied().collect();
            let (code, said) = node.operate(&setting, what, &policy(&setting, named), &more);
            assert!(code == 3 && said.contains(why), "{what}: {code}: {said}");
        }
    }
    // `status` and `verify` read the keys by another way
    let (endpoint, named) = (node.server.local_addr(), policy(&setting, &[&second]));
    for command in [&["status"][..], &["verify", "--fresh"]] {
        let endpoint = endpoint.to_string();
        let files = [&*endpoint, "--policy", &named, "--state", &state];
        let mut operator = Program::start(&mut setting.firstlight(&[command, &files].concat()));
        assert_eq!(operator.exit().code(), Some(3));
        operator.expect("the policy names 1, the state file 1:");
    }
}

/// The request of Constellation's init server ends with `service_cidr`: the server ignores further fields.
#[test]
fn an_init_server_of_constellation_gets_no_secret_with_options_that_it_would_ignore() {
    let setting = Setting::new();
    let reference = Node::with(atls::Server::new(Some(Arc::new(Forger::new())), None).only_old());
    let ours = Node::of(Arc::new(Forger::new()));
    let (policy, list) = (policy(&setting, &[]), setting.file("components.json", "[]"));
    let list = list.display().to_string();
    let accepted = "--accept-components=missing-programs";
    let cluster = [
        "--kubernetes-version=v1.36.4",
        "--components",
        &list,
        accepted,
    ];
    let pods = "--pod-cidr=10.244.0.0/16";
    for (more, lost) in [
        (&[pods, "--skip-addons"][..], &["--pod-cidr"][..]),
        (&[], &["give --skip-addons"]),
        (&[pods], &["--pod-cidr", "give --skip-addons"]),
        (&["--skip-addons", "--service-cidr=10.97.0.0/16"], &[]),
    ] {
        for is_dry in [false, true] {
            let all = [&["--trust-any-tpm"], &cluster[..], more, &["--dry-run"]].concat();
            let all = &all[..all.len() - usize::from(!is_dry)];
            let (code, said) = reference.operate(&setting, "init", &policy, all);
            let expected = if is_dry && lost.is_empty() { 0 } else { 1 };
            assert_eq!(code, expected, "{more:?}: {said}");
            let is_named = lost.iter().all(|option| said.contains(option));
            assert!(is_named, "{more:?}: {said}");
            let gets = !is_dry && lost.is_empty();
            assert_eq!(reference.has_master_secret(), gets, "{more:?}: {said}");
            assert_eq!(said.contains("Nothing was sent"), !gets, "{said}");
            reference.got.lock().unwrap().clear();
        }
        let all = [&["--trust-any-tpm"], &cluster[..], more].concat();
        let (_, said) = ours.operate(&setting, "init", &policy, &all);
        assert!(ours.has_master_secret(), "{more:?}: {said}");
        ours.got.lock().unwrap().clear();
    }
    let (code, said) = reference.operate(&setting, "init", &policy, &["--trust-any-tpm"]);
    assert!(
        code == 1 && said.contains("give --kubernetes-version"),
        "{said}"
    );
    assert!(!reference.has_master_secret(), "{said}");
}

#[test]
fn status_and_verify_judge_by_the_key_that_the_operator_names() {
    let setting = Setting::new();
    let forger = Forger::new();
    let (genuine, forged) = (
        setting.key_name().to_string(),
        forger.key_name().to_string(),
    );
    let node = Node::of(Arc::new(forger));
    let endpoint = node.server.local_addr().to_string();
    let open = policy(&setting, &[]);
    for (command, accepted) in [(&["status"][..], 5), (&["verify", "--fresh"], 0)] {
        for (key, expected) in [(&forged, accepted), (&genuine, 3)] {
            let mut arguments = vec![command[0], &endpoint, "--policy", &open, "--timeout=20s"];
            arguments.extend_from_slice(&command[1..]);
            arguments.extend(["--attestation-key", key]);
            let mut operator = Program::start(&mut setting.firstlight(&arguments));
            let code = operator.exit().code();
            let said = operator.output();
            assert_eq!(code, Some(expected), "{command:?}: {said}");
        }
    }
}

/// The firmware measures into another bank, so the values of this bank prove nothing: whatever the policy says, the machine gets
/// neither a master secret nor a ticket, and `verify` refuses it.
#[test]
fn a_machine_whose_firmware_does_not_extend_the_bank_gets_nothing() {
    let mut setting = Setting::new();
    setting.tpm.reset();
    let location = setting.tpm.location().parse().unwrap();
    let issuer: Issuer = Arc::new(qemu_vtpm::issuer(location, None));
    let node = Node::of(issuer.clone());
    let policy = policy(&setting, &[]);
    let why = "does not extend the SHA-256 bank";
    for what in ["recover", "init"] {
        let (code, said) = node.operate(&setting, what, &policy, &["--trust-any-tpm"]);
        assert!(code == 3 && said.contains(why), "{what}: {code}: {said}");
        assert!(!node.has_master_secret(), "{what}: {said}");
    }
    let endpoint = node.server.local_addr().to_string();
    let arguments = ["verify", &endpoint, "--policy", &policy, "--fresh"];
    let mut verify = Program::start(&mut setting.firstlight(&arguments));
    assert_eq!(verify.exit().code(), Some(3), "{}", verify.output());
    assert!(verify.output().contains(why), "{}", verify.output());

    let (_service, keys) = setting.key_service(3, MASTER_KEY);
    let service = setting.join_service(5, keys, policy.as_ref());
    let address = SocketAddr::new(setting.host(5), 30090);
    assert!(rejoin(address, issuer).is_err());
    service.expect(why);
}

#[test]
fn a_machine_of_another_cluster_gets_no_master_secret_whatever_the_policy_says_of_pcr_15() {
    let setting = Setting::new();
    let location = setting.tpm.location().parse().unwrap();
    Tpm::open(&location)
        .unwrap()
        .pcr_event(15, &[7; 32])
        .unwrap();
    let node = Node::of(Arc::new(qemu_vtpm::issuer(location, None)));
    let zero = "00".repeat(32);
    for text in [
        format!(r#"{{"exceptions":["any-image"],"measurements":{{"8":"{zero}"}}}}"#),
        format!(
            r#"{{"exceptions":["any-image"],"measurements":{{"8":"{zero}","15":{{"expected":"{zero}","warnOnly":true}}}}}}"#
        ),
    ] {
        let policy = setting.file("open.json", text).display().to_string();
        for what in ["recover", "init"] {
            let (code, said) = node.operate(&setting, what, &policy, &["--trust-any-tpm"]);
            assert!(
                code == 3 && said.contains("PCR 15") && !node.has_master_secret(),
                "{what}: {code}: {said}"
            );
        }
    }
}

/// The join service's answer to a machine that reboots.
fn rejoin(service: SocketAddr, issuer: Issuer) -> Result<IssueRejoinTicketResponse, String> {
    let socket = TcpStream::connect(service).unwrap();
    let client = atls::Client::new(Some(issuer), None);
    let transport = client
        .connect(socket, Instant::now() + Duration::from_secs(10))
        .map_err(|e| e.to_string())?;
    let channel = Channel::new(transport, "x").map_err(|status| status.to_string())?;
    let request = IssueRejoinTicketRequest {
        disk_uuid: "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22".into(),
    };
    let options = CallOptions {
        timeout: Some(Duration::from_secs(10)),
        ..CallOptions::default()
    };
    channel
        .unary("/join.API/IssueRejoinTicket", &request, &options)
        .map_err(|status| status.to_string())
}

#[test]
fn a_join_service_lets_in_the_machines_that_its_policy_names_and_says_when_it_names_none() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(4, MASTER_KEY);
    let (forger, issuer): (Issuer, Issuer) = (
        Arc::new(Forger::new()),
        Arc::new(qemu_vtpm::issuer(
            setting.tpm.location().parse().unwrap(),
            None,
        )),
    );
    let named = policy(&setting, &[&setting.key_name().to_string()]);
    let service = setting.join_service(3, keys, named.as_ref());
    let address = SocketAddr::new(setting.host(3), 30090);
    assert!(
        rejoin(address, issuer.clone()).is_ok(),
        "{}",
        service.output()
    );
    assert!(rejoin(address, forger.clone()).is_err());
    service.expect("not the one that the policy names");
    assert!(
        !service.output().contains("any TPM is accepted"),
        "{}",
        service.output()
    );

    // an old policy still works, and the log explains the consequence
    let service = setting.join_service(5, keys, policy(&setting, &[]).as_ref());
    service.expect("any TPM is accepted");
    let address = SocketAddr::new(setting.host(5), 30090);
    assert!(rejoin(address, forger).is_ok(), "{}", service.output());

    // a member of any cluster is not a fresh machine
    let open = format!(
        r#"{{"exceptions":["any-image"],"measurements":{{"8":"{}"}}}}"#,
        "00".repeat(32)
    );
    let service = setting.join_service(6, keys, &setting.file("config/attestationConfig", open));
    let address = SocketAddr::new(setting.host(6), 30090);
    assert!(
        rejoin(address, issuer.clone()).is_ok(),
        "{}",
        service.output()
    );
    Tpm::open(&setting.tpm.location().parse().unwrap())
        .unwrap()
        .pcr_event(15, &[7; 32])
        .unwrap();
    assert!(rejoin(address, issuer).is_err());
    service.expect("PCR 15");
}
