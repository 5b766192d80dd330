//! A node and a join service whose machine is one of TDX: the service brings Intel's collateral, which the node does not fetch, and
//! no file of the host has. The node's request, the service's cache and the host's evidence are the genuine ones.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use bootstrapper::trust::evidence::Attester;
use bootstrapper::trust::service_trust::ServiceTrust;
use collateral::{FetchSettings, Fetching, Kept};
use common::at::At;
use common::evidence::{self, Bringing};
use hardware::snp::report::ReportSigner;
use hardware::snp::tcb::Product;
use prost::Message;
use proto::attested;
use rcgen::date_time_ymd;
use services::join_service::evidence::RemoteIssuer;
use support::mutation::mutations;
use tpm::Location;
use verifier::carried::Carried;
use verifier::sources::Sources;
use verifier::{IssueError, Issuer, Registers, Variant, qemu_tdx, td};

use super::forged::{PCK, Parts, revoked};
use super::machine::kernels_folder;
use super::*;

/// The cluster of the service.
const CLUSTER: [u8; 32] = [7; 32];

/// A member of the cluster, whose quotes one hierarchy signs.
static MEMBER: LazyLock<Parts> = LazyLock::new(|| {
    let mut parts = Parts::default();
    parts.keep_keys();
    parts.body[472..520].copy_from_slice(Registers::Rtmrs.after(&CLUSTER).as_ref());
    parts
});

/// The variant under the root of the hierarchy, at a time at which its collateral is valid.
static VARIANT: Variant = qemu_tdx::VARIANT.judged_by(|policy, sources| {
    let policy = Arc::new(policy);
    // a policy that accepts any image has no JSON, so it cannot name the root
    let hardware = td::QuoteJudge::new(&policy, sources)?;
    let hardware = hardware.with_root(MEMBER.sign(&[0; 64]).verifier());
    let validator = qemu_tdx::TdValidator::new(policy, hardware)?;
    Ok(Arc::new(At(JULY_2025, Arc::new(validator))))
});

/// Makes the quotes of the member.
struct Quoter;

impl td::Quoter for Quoter {
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, IssueError> {
        Ok(MEMBER.sign(report_data).quote)
    }
}

/// Returns Intel's collateral of the member, after a change of the texts that Intel signs.
fn collateral_with(change: impl FnOnce(&mut Parts)) -> TdxCollateral {
    let mut parts = MEMBER.clone();
    change(&mut parts);
    parts.sign(&[0; 64]).collateral
}

/// The folders of a node and of the machine of a join service, as the kernel shows their registers.
struct Meeting {
    node: tempfile::TempDir,
    member: tempfile::TempDir,
    dir: tempfile::TempDir,
}

fn location(folder: &tempfile::TempDir) -> Location {
    format!("tdx:{}", folder.path().display()).parse().unwrap()
}

impl Meeting {
    fn new() -> Meeting {
        Meeting {
            node: kernels_folder([0xb0, 0xb1, 0xb2, 0]),
            member: kernels_folder([0xb0, 0xb1, 0xb2, 1]),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Returns the evidence of the join service in a pod, from a host that has this file of collateral, or none.
    fn issuer(&self, file: Option<PathBuf>) -> RemoteIssuer {
        let socket = self.dir.path().join("evidence");
        let host = Attester {
            issuer: Arc::new(qemu_tdx::TdIssuer::new(Arc::new(Quoter), file, None)),
            tpm: location(&self.member),
        };
        evidence::give(host, &socket);
        RemoteIssuer::new(&VARIANT, socket)
    }

    /// Connects the node to a service; returns why it refuses it.
    fn join(&self, issuer: Arc<dyn Issuer>) -> Result<(), String> {
        let node = location(&self.node);
        let trust = ServiceTrust::new(Default::default(), None, &VARIANT, node).unwrap();
        let client = atls::Client::new(None, None)
            .verify_strong(Some(verifier::judge(trust.judge().unwrap())))
            .to_join_service();
        evidence::meet(&client, issuer)
    }
}

#[test]
fn a_service_whose_host_has_no_file_is_accepted_with_what_the_service_brings() {
    let meeting = Meeting::new();
    let file = meeting.dir.path().join("kept.json");
    let kept = serde_json::to_vec(&collateral_with(|_| ())).unwrap();
    fs::write(&file, kept).unwrap();
    let fetching = Fetching::new(FetchSettings {
        kds: None,
        pcs: None,
        kept: Kept::File(file),
        clock: || JULY_2025,
        ..FetchSettings::default()
    });
    let issuer = Arc::new(meeting.issuer(None).with_collateral(&fetching.unwrap()));
    // the service looks for it in the background, and the node asks again
    let why = meeting.join(issuer.clone()).unwrap_err();
    assert!(why.contains("the peer sent no collateral"), "{why}");
    let limit = Instant::now() + Duration::from_secs(60);
    while let Err(why) = meeting.join(issuer.clone()) {
        assert!(Instant::now() < limit, "{why}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_file_of_the_host_is_used_if_the_service_brings_nothing() {
    let meeting = Meeting::new();
    let why = meeting.join(Arc::new(meeting.issuer(None))).unwrap_err();
    assert!(why.contains("the peer sent no collateral"), "{why}");
    let file = meeting.dir.path().join("tdx-collateral.json");
    fs::write(&file, serde_json::to_vec(&collateral_with(|_| ())).unwrap()).unwrap();
    let issuer = meeting.issuer(Some(file));
    meeting.join(Arc::new(issuer)).unwrap();
}

#[test]
fn collateral_that_is_wrong_in_one_thing_is_refused_by_its_name() {
    let meeting = Meeting::new();
    let join = |intel: Vec<u8>| {
        meeting.join(Arc::new(Bringing {
            issuer: Arc::new(meeting.issuer(None)),
            collateral: attested::Collateral {
                intel,
                ..attested::Collateral::default()
            },
        }))
    };
    let json = |collateral: TdxCollateral| serde_json::to_vec(&collateral).unwrap();
    let with = |change: fn(&mut Parts)| json(collateral_with(change));
    join(with(|_| ())).unwrap();
    // more than fits into a buffer of TLS, and more than a proof may have
    let padded = |len: usize| [with(|_| ()), vec![b' '; len]].concat();
    join(padded(100 << 10)).unwrap();
    for (intel, why) in [
        (
            with(|it| it.pck_list.revoked_certs = vec![revoked(PCK)]),
            "it, or its authority, is revoked",
        ),
        (
            with(|it| it.pck_list.next_update = date_time_ymd(2025, 6, 30)),
            "a list of revoked certificates (CRL) has expired",
        ),
        (with(|it| it.status = "Revoked"), "is Revoked"),
        (with(|it| it.other_signer = true), "is wrong"),
        (
            with(|it| it.info = vec![("ABABABABABAB", "ABABABABABAC")]),
            "ABABABABABAC",
        ),
        (
            json(Parts::default().sign(&[0; 64]).collateral),
            "the TCB information signer's certificate: it does not lead to the root",
        ),
        (
            b"{}".to_vec(),
            "the collateral that the peer sent cannot be read",
        ),
        (padded(130 << 10), "the peer sent no collateral"),
    ] {
        let refused = join(intel).unwrap_err();
        assert!(refused.contains(why), "{refused}, expected {why}");
    }
}

#[test]
fn an_altered_message_of_collateral_changes_nothing_that_intel_signed() {
    let genuine = collateral_with(|_| ());
    let signed = MEMBER.sign(&[0; 64]);
    let verifier = signed.verifier();
    let message = attested::Collateral {
        amd_authority: vec![0x30; 40],
        amd_revoked: vec![0x30; 40],
        intel: serde_json::to_vec(&genuine).unwrap(),
        ..attested::Collateral::default()
    };
    let mut read = 0;
    for altered in mutations(&message.encode_to_vec(), 2000) {
        let Ok(message) = attested::Collateral::decode(&altered[..]) else {
            continue;
        };
        let carried = Carried::default();
        carried.take(&message);
        let quote = || TdxQuote::parse(&signed.quote).unwrap();
        let authority = carried.snp_authority(Product::Milan, ReportSigner::Vcek);
        assert_eq!(authority.is_ok(), !message.amd_authority.is_empty());
        let collateral = match carried.tdx_collateral(&quote()) {
            Ok(collateral) => collateral,
            Err(why) => {
                assert!(why.to_string().len() < 300, "{why}");
                continue;
            }
        };
        read += 1;
        if verifier.verify(quote(), &collateral, JULY_2025).is_ok() {
            let of = |it: &TdxCollateral| {
                let lists = [&it.root_ca_crl, &it.pck_crl].map(|list| list.0.clone());
                (it.tcb_info.clone(), it.qe_identity.clone(), lists)
            };
            assert_eq!(of(&collateral), of(&genuine));
        }
    }
    assert!(read > 20, "{read}");
}
