//! The requirements of a fresh node with `require=strong` on a join service, which it derives from its own platform. The services
//! run the node's image, or claim to run it: their SHA-256 registers are those of the node.

use std::process::Command;
use std::sync::Arc;

use bootstrapper::trust::platform;
use bootstrapper::trust::service_trust::{self, ServiceProof, ServiceTrust};
use common::evidence::{self, Bringing};
use node::service_trust::{ClusterId, TrustSettings};
use proto::attested::Collateral;
use serde_json::{Value, json};
use tpm::{Location, Tpm};
use verifier::aws_hypervisor::NitroTpm as Documents;
use verifier::aws_nitro_tpm::AwsMachine;
use verifier::aws_sev_snp::AwsSnpMachine;
use verifier::{
    Issuer, Variant, aws_nitro_tpm, aws_sev_snp, azure_sev_snp, azure_tdx, azure_trustedlaunch,
    gcp_sev_es, gcp_tdx, qemu_vtpm, vtpm,
};

use crate::authority::Authority;
use crate::aws_nitro_tpm::{Hypervisor, good, host};
use crate::cloud_tpm::CloudTpm;
use crate::forged_tdx::Parts;
use crate::gcp_sev_es::{Machine as Google, events, good_in};
use crate::host::Host;
use crate::nitro_tpm::NitroTpm;
use crate::sev_snp::{Chip, aws_with, ours, with};
use crate::{azure_sev_snp as azure_snp, azure_tdx as tdx};

/// The cluster of the services.
const CLUSTER: [u8; 32] = [7; 32];
/// The boot loader of the image.
const LOADER: &[u8] = b"the boot loader";
/// The MRTD of forged quotes, and where a stored report of TDX has it.
const MRTD: u8 = 0xa0;
const STORED_MRTD: std::ops::Range<usize> = 32 + 528..32 + 576;

/// The requirements of a fresh node with this TPM, whose `service-policy` has these fields.
fn trust(
    variant: &'static Variant,
    tpm: &Location,
    members: &Value,
) -> Result<ServiceTrust, platform::Error> {
    trust_with(variant, tpm, members, None)
}

fn trust_with(
    variant: &'static Variant,
    tpm: &Location,
    members: &Value,
    cluster: Option<ClusterId>,
) -> Result<ServiceTrust, platform::Error> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("service-policy");
    let policy = with(
        json!({"measurements": {"4": "11".repeat(32)}, "name": "another image"}),
        members,
    );
    std::fs::write(&file, policy.to_string()).unwrap();
    let settings = TrustSettings {
        require_strong: true,
        cluster,
    };
    let policy = service_trust::read_policy(&file).unwrap();
    let trust = ServiceTrust::new(settings, Some(policy), variant, tpm.clone()).unwrap();
    platform::demanding(trust, tpm)
}

/// Connects the node to a join service; returns what the service proved, or why it is refused.
fn join(trust: &ServiceTrust, service: Arc<dyn Issuer>) -> Result<ServiceProof, String> {
    let judge = trust.judge().unwrap();
    let client = atls::Client::new(None, None)
        .verify_strong(Some(verifier::judge(judge.clone())))
        .require_strong();
    evidence::meet(&client, service)?;
    Ok(judge.proof().unwrap().clone())
}

/// Boots the image, and joins the cluster if the machine is that of a service.
fn boot(tpm: &Location, is_member: bool) {
    let mut tpm = Tpm::open(tpm).unwrap();
    tpm.pcr_event(4, LOADER).unwrap();
    if is_member {
        tpm.measure_cluster_id(&CLUSTER).unwrap();
    }
}

fn expect_refused(joined: Result<ServiceProof, String>, why: &str) {
    let refused = joined.unwrap_err();
    assert!(refused.contains(why), "{refused}, expected {why}");
}

/// A machine with a NitroTPM.
struct Nitro {
    tpm: NitroTpm,
    host: Host,
}

impl Nitro {
    fn start(authority: &Authority) -> Nitro {
        let hypervisor = Hypervisor::new(authority, &good(), |_| ());
        Nitro {
            tpm: NitroTpm::start(hypervisor),
            host: host(),
        }
    }

    fn issuer(&self) -> Arc<dyn Issuer> {
        let machine = AwsMachine::new(self.host.url(), Some(Arc::new(Documents::default())));
        let location = self.tpm.location();
        Arc::new(vtpm::TpmIssuer::new(location, None, Arc::new(machine)))
    }

    /// Claims the image: the SHA-256 register is right, as in a quote by another key, and the one that AWS signs is not.
    fn claim(&self) {
        let digest = ring::digest::digest(&ring::digest::SHA256, LOADER);
        let digest: String = digest.as_ref().iter().map(|b| format!("{b:02x}")).collect();
        let extended = Command::new("tpm2_pcrextend")
            .arg(format!("4:sha256={digest}"))
            .env("TPM2TOOLS_TCTI", self.tpm.notation())
            .status();
        assert!(extended.unwrap().success());
        let mut tpm = Tpm::open(&self.tpm.location()).unwrap();
        tpm.measure_cluster_id(&CLUSTER).unwrap();
    }
}

#[test]
fn a_node_at_aws_demands_the_sha_384_registers_that_it_has_itself() {
    let authority = Authority::new();
    let roots = json!({"cloud": {"roots": [authority.root_pem()]}});
    let node = CloudTpm::start();
    let tpm = node.location();
    // firmware that does not extend this bank
    let error = trust(&aws_nitro_tpm::VARIANT, &tpm, &roots);
    let error = error.err().unwrap().to_string();
    let why = "require=strong cannot pin the join services: with the variant aws-nitro-tpm, the firmware extends no SHA-384 PCR";
    assert!(error.contains(why), "{error}");
    boot(&tpm, false);

    let member = Nitro::start(&authority);
    boot(&member.tpm.location(), true);
    let liar = Nitro::start(&authority);
    liar.claim();
    // a program at AWS without a TPM, which has its own host
    let program = CloudTpm::start();
    boot(&program.location(), true);
    let of_program = Arc::new(AwsMachine::new(member.host.url(), None));
    let of_program = vtpm::TpmIssuer::new(program.location(), None, of_program);

    let strict = trust(&aws_nitro_tpm::VARIANT, &tpm, &roots).unwrap();
    let proof = join(&strict, member.issuer()).unwrap();
    assert!(proof.to_string().starts_with("proves an accepted image"));
    expect_refused(join(&strict, liar.issuer()), "SHA-384 PCR 4: expected ");
    let why = "sent no attestation document of its NitroTPM";
    expect_refused(join(&strict, Arc::new(of_program)), why);

    // the registers in the policy are required in addition to the node's own
    let zero = json!({"exceptions": ["zero-registers"], "cloud": {"roots": [authority.root_pem()], "sha384": {"4": "0".repeat(96)}}});
    let wide = trust(&aws_nitro_tpm::VARIANT, &tpm, &zero).unwrap();
    join(&wide, member.issuer()).unwrap();
    join(&wide, liar.issuer()).unwrap();
}

#[test]
fn a_node_at_aws_with_sev_snp_demands_the_same() {
    let authority = Authority::new();
    let node = CloudTpm::start();
    boot(&node.location(), false);
    let members = with(ours(), &json!({"cloud": {"roots": [authority.root_pem()]}}));
    let strict = trust(&aws_sev_snp::VARIANT, &node.location(), &members).unwrap();
    let member = Nitro::start(&authority);
    boot(&member.tpm.location(), true);
    let machine = AwsSnpMachine::new(Chip::new(|_| ()), Some(Arc::new(Documents::default())));
    let issuer = vtpm::TpmIssuer::new(member.tpm.location(), None, Arc::new(machine));
    join(&strict, Arc::new(issuer)).unwrap();
    // this hypervisor signs a bank of zeros, as for a machine with another image
    let other = CloudTpm::start();
    boot(&other.location(), true);
    let hypervisor = Arc::new(Hypervisor::new(&authority, &good(), |_| ()));
    let issuer = aws_with(&other, Chip::new(|_| ()), Some(hypervisor));
    expect_refused(join(&strict, issuer), "SHA-384 PCR 4: expected ");
    let issuer = aws_with(&other, Chip::new(|_| ()), None);
    expect_refused(join(&strict, issuer), "sent no attestation document");
}

#[test]
fn a_node_at_azure_demands_the_signer_of_its_own_paravisor() {
    let boot_of = |change: fn(&mut [u8]), is_member| {
        let machine = azure_snp::Machine::start(change, |_| ());
        boot(&machine.cloud.location(), is_member);
        machine
    };
    let node = boot_of(|_| (), false);
    let root = json!({"amdRootKey": azure_snp::pem("ark")});
    let strict = trust(&azure_sev_snp::VARIANT, &node.cloud.location(), &root).unwrap();
    let member = boot_of(|_| (), true);
    let proof = join(&strict, member.issuer()).unwrap();
    assert!(!proof.by_any_key);
    // the owner of such a processor can sign firmware that claims any key
    let other = boot_of(|report| report[0xe0..0x110].fill(0x99), true);
    expect_refused(join(&strict, other.issuer()), "ID_KEY_DIGEST");
    // an operator names other firmware
    let named = with(root.clone(), &json!({"snp": {"idKeys": ["99".repeat(48)]}}));
    let named = trust(&azure_sev_snp::VARIANT, &node.cloud.location(), &named).unwrap();
    join(&named, other.issuer()).unwrap();
    expect_refused(join(&named, member.issuer()), "ID_KEY_DIGEST");

    // the firmware of this machine is not signed
    let unsigned = boot_of(|report| report[0xe0..0x110].fill(0), false);
    let error = trust(&azure_sev_snp::VARIANT, &unsigned.cloud.location(), &root);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("does not name its firmware"), "{error}");
    let other = CloudTpm::start();
    let error = trust(&azure_sev_snp::VARIANT, &other.location(), &root);
    assert!(matches!(error, Err(platform::Error::PinsNothing(..))));
}

#[test]
fn a_node_at_azure_with_tdx_demands_its_own_paravisor() {
    let node = CloudTpm::azure(|report| {
        tdx::of_tdx(report);
        report[STORED_MRTD].fill(MRTD);
    });
    boot(&node.location(), false);
    let mut parts = Parts::of_today();
    parts.keep_keys();
    let start = |parts: &Parts| {
        let machine = tdx::Machine::start(parts, |_| ());
        boot(&machine.cloud.location(), true);
        let intel = serde_json::to_vec(&machine.signed.collateral).unwrap();
        let collateral = Collateral {
            intel,
            ..Collateral::default()
        };
        let issuer = Arc::new(Bringing {
            issuer: machine.issuer(),
            collateral,
        });
        (issuer, machine)
    };
    let (member, machine) = start(&parts);
    let root = json!({"intelRootKey": machine.signed.root_in_pem});
    let strict = trust(&azure_tdx::VARIANT, &node.location(), &root).unwrap();
    join(&strict, member).unwrap();
    parts.body[136..136 + 48].fill(0x99);
    let (other, _machine) = start(&parts);
    expect_refused(
        join(&strict, other),
        "the measurement of the firmware (MRTD)",
    );
}

#[test]
fn a_node_at_google_demands_its_own_project() {
    let authority = Authority::new();
    let machine = |project: &str, is_member| {
        let machine = Google::start(&events("1", 1));
        machine.certify(&authority, &good_in(project));
        let name = "GET /computeMetadata/v1/project/project-id";
        machine.host.set(name, project.as_bytes());
        boot(&machine.cloud.location(), is_member);
        machine
    };
    let (node, member) = (machine("ours", false), machine("ours", true));
    let other = machine("theirs", true);
    let roots = json!({"cloud": {"roots": [authority.root_pem()]}});
    // the same project is demanded by the other variants of Google
    trust(&gcp_tdx::VARIANT, &node.cloud.location(), &roots).unwrap();
    let strict = trust(&gcp_sev_es::VARIANT, &node.cloud.location(), &roots).unwrap();
    join(&strict, member.issuer()).unwrap();
    let why = "the project of the machine is \"theirs\"";
    expect_refused(join(&strict, other.issuer()), why);
    let named = json!({"cloud": {"roots": [authority.root_pem()], "projects": ["theirs"]}});
    let named = trust(&gcp_sev_es::VARIANT, &node.cloud.location(), &named).unwrap();
    join(&named, other.issuer()).unwrap();
    expect_refused(
        join(&named, member.issuer()),
        "which the policy does not name",
    );
}

#[test]
fn what_pins_without_the_platform_needs_nothing_of_it() {
    let cloud = CloudTpm::start();
    let tpm = cloud.location();
    let keys = json!({"attestationKeys": [format!("000b{}", "22".repeat(32))]});
    for variant in [
        &qemu_vtpm::VARIANT,
        &aws_nitro_tpm::VARIANT,
        &azure_tdx::VARIANT,
        &azure_sev_snp::VARIANT,
        &gcp_sev_es::VARIANT,
        &gcp_tdx::VARIANT,
    ] {
        trust(variant, &tpm, &keys).unwrap();
        trust_with(variant, &tpm, &json!({}), Some(ClusterId(CLUSTER))).unwrap();
        let error = trust(variant, &tpm, &json!({})).err().unwrap();
        let advice = "set cluster-id, or name in service-policy";
        assert!(error.to_string().contains(advice), "{error}");
        assert!(matches!(error, platform::Error::PinsNothing(name, _) if name == variant.name));
    }
    // Azure certifies the key of each machine
    trust(&azure_trustedlaunch::VARIANT, &tpm, &json!({})).unwrap();
}
