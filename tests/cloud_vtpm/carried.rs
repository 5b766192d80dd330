//! A node and a join service whose machine is one of AWS: the service brings AMD's list of revoked certificates, which the node
//! does not fetch. The node's request, the service, its cache and the host's evidence are the genuine ones; AMD's servers are of
//! the tests.

use std::cell::RefCell;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use bootstrapper::trust::evidence::Attester;
use bootstrapper::trust::service_trust::{self, ServiceTrust};
use collateral::{FetchSettings, Fetching};
use common::evidence::{self, Bringing};
use common::join_setup::lone_config;
use proto::attested::Collateral;
use serde_json::{Value, json};
use services::join_service::evidence::RemoteIssuer;
use services::join_service::{Config, JoinService};
use tpm::Tpm;
use verifier::{Issuer, aws_sev_snp};

use crate::cloud_tpm::CloudTpm;
use crate::collateral_server::{Answer, Server};
use crate::forged_snp::Hierarchy;
use crate::sev_snp::{Chip, aws, ours, with};

/// The cluster of the service.
const CLUSTER: [u8; 32] = [7; 32];
/// The warning of a node without a usable list.
const NOT_KNOWN: &str = "cannot check whether AMD has revoked the chip's certificates";

thread_local! {
    static LOGGED: RefCell<Vec<String>> = const { RefCell::new(vec![]) };
}

/// Keeps what each thread logs.
struct Kept;

impl log::Log for Kept {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LOGGED.with_borrow_mut(|all| all.push(record.args().to_string()));
    }

    fn flush(&self) {}
}

/// Returns the result of some work, and the lines that it logs in this thread.
fn logged<T>(work: impl FnOnce() -> T) -> (T, String) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Kept).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    LOGGED.take();
    let result = work();
    (result, LOGGED.take().join("\n"))
}

/// Returns a list of these serial numbers that is in force.
fn list(serials: &[&str]) -> Vec<u8> {
    Hierarchy::get().list("ark", serials, "20250101000000Z", "20490101000000Z")
}

/// A node, and the machine of a join service with the evidence of its host.
struct Meeting {
    node: CloudTpm,
    machine: CloudTpm,
    dir: tempfile::TempDir,
}

impl Meeting {
    fn new() -> Meeting {
        let meeting = Meeting {
            node: CloudTpm::start(),
            machine: CloudTpm::start(),
            dir: tempfile::tempdir().unwrap(),
        };
        let tpm = meeting.machine.location();
        Tpm::open(&tpm)
            .unwrap()
            .measure_cluster_id(&CLUSTER)
            .unwrap();
        meeting
    }

    /// Returns the socket at which the host gives evidence from now on.
    fn evidence(&self) -> PathBuf {
        let socket = self.dir.path().join("evidence");
        let host = Attester {
            issuer: aws(&self.machine, Chip::new(|_| ())),
            tpm: self.machine.location(),
        };
        evidence::give(host, &socket);
        socket
    }

    /// Starts the join service, which fetches from this server of AMD, or fetches nothing.
    fn service(&self, amd: Option<&Server>) -> (JoinService, Option<Arc<Fetching>>) {
        let socket = self.evidence();
        let nodes = with(
            ours(),
            &json!({"exceptions": ["any-image"], "measurements": {"15": "00".repeat(32)}, "snp": {"revocationList": "optional"}}),
        );
        std::fs::write(self.dir.path().join("attestationConfig"), nodes.to_string()).unwrap();
        let collateral = amd.map(|server| Fetching::new(settings(server)).unwrap());
        let service = JoinService::start(Config {
            variant: &aws_sev_snp::VARIANT,
            evidence: Some(socket),
            collateral: collateral.clone(),
            ..lone_config(self.dir.path())
        });
        (service.unwrap(), collateral)
    }

    /// Returns the client of a node whose setting service-policy has these members.
    fn client(&self, further: &Value) -> atls::Client {
        let policy = with(
            ours(),
            &json!({"exceptions": ["any-image"], "measurements": {"8": "00".repeat(32)}}),
        );
        let file = self.dir.path().join("service-policy");
        std::fs::write(&file, with(policy, further).to_string()).unwrap();
        let policy = service_trust::read_policy(&file).unwrap();
        let (variant, tpm) = (&aws_sev_snp::VARIANT, self.node.location());
        let trust = ServiceTrust::new(Default::default(), Some(policy), variant, tpm).unwrap();
        atls::Client::new(Some(aws(&self.node, Chip::new(|_| ()))), None)
            .verify_strong(Some(verifier::judge(trust.judge().unwrap())))
            .to_join_service()
            .require_strong()
    }

    /// Connects the node to the service. Returns why it refuses the service, and what it logs.
    fn join_service(&self, further: &Value, service: &JoinService) -> (Result<(), String>, String) {
        let client = self.client(further);
        let socket = TcpStream::connect(service.local_addr()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let (connected, logged) = logged(|| client.connect(socket, deadline).map(drop));
        (connected.map_err(|error| error.to_string()), logged)
    }

    /// As [`Meeting::join_service`], to a server that proves itself by this issuer.
    fn join_issuer(
        &self,
        further: &Value,
        issuer: Arc<dyn Issuer>,
    ) -> (Result<(), String>, String) {
        let client = self.client(further);
        logged(|| evidence::meet(&client, issuer))
    }
}

/// Answers as AMD's service, with this list.
fn amd(list: Vec<u8>) -> Server {
    amd_that(list, || ())
}

/// As [`amd`], but calls a function before each answer.
fn amd_that(list: Vec<u8>, before: impl Fn() + Send + Sync + 'static) -> Server {
    Server::start(move |target| {
        before();
        match target {
            "/vcek/v1/Milan/crl" => Answer::ok("application/octet-stream", list.clone()),
            _ => Answer::status("404 Not Found"),
        }
    })
}

fn settings(amd: &Server) -> FetchSettings {
    FetchSettings {
        kds: Some(amd.url()),
        pcs: None,
        ca: Some(amd.ca()),
        ..FetchSettings::default()
    }
}

/// Waits until the service has fetched the list for its own machine, before any node asks it.
fn wait_until_prepared(fetching: &Fetching) {
    let limit = Instant::now() + Duration::from_secs(60);
    while fetching.statistics().fetched < 1 {
        assert!(Instant::now() < limit, "{fetching:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_node_judges_a_join_service_by_the_list_that_the_service_brings() {
    let meeting = Meeting::new();
    let required = json!({"snp": {"revocationList": "required"}});
    let optional = json!({"snp": {"revocationList": "optional"}});
    let server = amd(list(&["0A"]));
    let (service, fetching) = meeting.service(Some(&server));
    wait_until_prepared(&fetching.unwrap());
    for policy in [&json!({}), &required, &optional] {
        let (joined, logged) = meeting.join_service(policy, &service);
        joined.unwrap();
        assert_eq!(logged, "", "{policy}");
    }
    service.stop(Duration::ZERO);

    // the serial numbers of the authority and of the chip
    for (serial, why) in [
        ("09", "the authority that issued it is revoked"),
        ("08", "it is revoked: the list"),
    ] {
        let server = amd(list(&[serial]));
        let (service, fetching) = meeting.service(Some(&server));
        wait_until_prepared(&fetching.unwrap());
        for policy in [&json!({}), &required, &optional] {
            let (refused, _) = meeting.join_service(policy, &service);
            let refused = refused.unwrap_err();
            assert!(refused.contains(why), "{refused}");
            assert!(
                !refused.contains("service-policy"),
                "the image is right: {refused}"
            );
        }
        service.stop(Duration::ZERO);
    }

    // as an old service, which sends no collateral
    let (service, _) = meeting.service(None);
    for policy in [&json!({}), &optional] {
        let (joined, logged) = meeting.join_service(policy, &service);
        joined.unwrap();
        assert!(logged.contains(NOT_KNOWN), "{logged}");
        assert!(
            logged.contains("the peer sent no revocation list of AMD"),
            "{logged}"
        );
    }
    let (refused, _) = meeting.join_service(&required, &service);
    let refused = refused.unwrap_err();
    let why = "the list of AMD's revoked certificates is missing, but the policy requires it";
    assert!(refused.contains(why), "{refused}");
}

#[test]
fn a_join_service_that_has_no_list_yet_does_not_wait_for_it() {
    let meeting = Meeting::new();
    let answers = Arc::new(AtomicBool::new(false));
    let (may_answer, genuine) = (answers.clone(), list(&[]));
    let server = amd_that(genuine, move || {
        while !may_answer.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let fetching = Fetching::new(FetchSettings {
        // longer than a node waits
        time: Duration::from_secs(600),
        ..settings(&server)
    })
    .unwrap();
    let issuer = RemoteIssuer::new(&aws_sev_snp::VARIANT, meeting.evidence());
    let issuer = Arc::new(issuer.with_collateral(&fetching));
    let (joined, logged) = meeting.join_issuer(&json!({}), issuer.clone());
    joined.unwrap();
    assert!(logged.contains(NOT_KNOWN), "{logged}");
    answers.store(true, Ordering::Relaxed);
    wait_until_prepared(&fetching);
    let (joined, logged) = meeting.join_issuer(&json!({}), issuer);
    joined.unwrap();
    assert_eq!(logged, "");
}

#[test]
fn a_list_that_is_not_amd_s_of_today_does_not_count_and_is_named() {
    let meeting = Meeting::new();
    let hierarchy = Hierarchy::get();
    let (from, until) = ("20250101000000Z", "20490101000000Z");
    let issuer = RemoteIssuer::new(&aws_sev_snp::VARIANT, meeting.evidence());
    let issuer: Arc<dyn Issuer> = Arc::new(issuer);
    let join = |policy: &Value, collateral: Collateral| {
        let issuer = issuer.clone();
        meeting.join_issuer(policy, Arc::new(Bringing { issuer, collateral }))
    };
    let of = |list: Vec<u8>| Collateral {
        amd_authority: hierarchy.certificate("ask").to_vec(),
        amd_revoked: list,
        ..Collateral::default()
    };
    join(&json!({}), of(list(&["0A"]))).0.unwrap();
    let genuine = list(&["0A"]);
    let mut altered = genuine.clone();
    let last = altered.len() - 1;
    altered[last] ^= 1;
    for (list, why) in [
        (
            hierarchy.list("ark", &[], "20240101000000Z", "20240201000000Z"),
            "has expired at 2024-02-01T00:00:00Z",
        ),
        (
            hierarchy.list("ark", &[], "20480101000000Z", until),
            "is not valid yet",
        ),
        (
            hierarchy.list("other", &[], from, until),
            "is not signed by the root",
        ),
        (
            hierarchy.list("ark-genoa", &[], from, until),
            "was not issued by the root",
        ),
        (
            hierarchy.list("ask", &[], from, until),
            "was not issued by the root",
        ),
        (altered, "is not signed by the root"),
        (genuine[..100].to_vec(), "cannot be read"),
        (vec![0x30; 120 << 10], "cannot be read"),
        (vec![], "the peer sent no revocation list of AMD"),
    ] {
        let (joined, logged) = join(&json!({}), of(list.clone()));
        joined.unwrap();
        assert!(
            logged.contains(NOT_KNOWN) && logged.contains(why),
            "{logged}, expected {why}"
        );
        let required = json!({"snp": {"revocationList": "required"}});
        let (refused, _) = join(&required, of(list));
        let refused = refused.unwrap_err();
        assert!(
            refused.contains("revoked certificates is missing") && refused.contains(why),
            "{refused}, expected {why}"
        );
    }
}
