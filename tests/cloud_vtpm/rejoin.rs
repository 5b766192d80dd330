//! A join service, as its program, gives machines of each variant the key of their disk, and refuses those that its policy does not
//! name.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::attested::within;
use proto::join::{ISSUE_REJOIN_TICKET, IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use rpc::grpc::Channel;
use serde_json::{Value, json};
use support::program::{self, Program};
use tempfile::TempDir;
use verifier::{Issuer, qemu_snp};

use crate::meeting::Correct;
use crate::{
    aws_nitro_tpm, azure_sev_snp, azure_tdx, azure_trustedlaunch, gcp_sev_es, gcp_tdx, sev_snp,
};

/// The disk of the tests, and the first bytes of its key with a master secret and a salt of 32 zeros each.
const UUID: &str = "00000000-0000-0000-0000-000000000000";
const DISK_KEY: [u8; 4] = [0x2b, 0x5c, 0x82, 0x9f];

/// A key service and a join service.
struct Services {
    _keys: Program,
    join: Program,
    address: SocketAddr,
    folder: TempDir,
}

impl Services {
    /// Starts both programs, the join service with the policy of this machine and further options.
    fn start(machine: &Correct, options: &[&str]) -> Services {
        let folder = tempfile::tempdir().unwrap();
        for name in ["mastersecret", "salt"] {
            fs::write(folder.path().join(name), [0; 32]).unwrap();
        }
        let mut command = Command::new(program::built("key-service"));
        command
            .args(["--master-secret", "mastersecret", "--salt=salt"])
            .args(["--clients", "any", "--listen", "127.0.0.1:0"]);
        let keys = Program::start(command.current_dir(folder.path()));
        let key_service = address(&keys.expect("serving data keys")).to_string();

        put(&folder, &machine.policy);
        let mut command = Command::new(program::built("join-service"));
        command
            .args(["--key-service-endpoint", &key_service])
            .args(["--key-service-auth=none", "--listen", "127.0.0.1:0"])
            .args(["--config", ".", "--attestation-variant"])
            .arg(machine.variant.name)
            .args(options);
        if let Some(collateral) = &machine.collateral {
            fs::write(folder.path().join("collateral.json"), collateral).unwrap();
            command.args(["--collateral", "collateral.json"]);
        }
        let join = Program::start(command.current_dir(folder.path()));
        Services {
            address: address(&join.expect("serving join requests")),
            _keys: keys,
            join,
            folder,
        }
    }

    /// Gives the join service another policy.
    fn set_policy(&self, policy: &Value) {
        put(&self.folder, policy);
        self.join.expect("a new policy is in force");
    }

    /// Asks for the key of the disk as this machine. Returns its first bytes, or why the machine gets no key.
    fn rejoin(&self, issuer: &Arc<dyn Issuer>) -> Result<[u8; 4], String> {
        let client = atls::Client::new(Some(issuer.clone()), None);
        let socket = TcpStream::connect(self.address).unwrap();
        let soon = Instant::now() + Duration::from_secs(60);
        let transport = client.connect(socket, soon).map_err(|e| e.to_string())?;
        let channel = Channel::new(transport, "join-service").unwrap();
        let request = IssueRejoinTicketRequest {
            disk_uuid: UUID.into(),
        };
        let ticket: IssueRejoinTicketResponse = channel
            .unary(ISSUE_REJOIN_TICKET, &request, &within(60))
            .map_err(|status| status.to_string())?;
        Ok(*ticket.state_disk_key.first_chunk().unwrap())
    }
}

/// Writes the file of the policy in one step, so that no reader sees a part of it.
fn put(folder: &TempDir, policy: &Value) {
    let mut policy = policy.clone();
    policy["measurements"] = json!({"15": {"expected": "00".repeat(32)}});
    policy["exceptions"] = json!(["any-image", "zero-registers"]);
    // no request for AMD's list is sent
    if policy.get("amdRootKey").is_some() {
        policy["snp"]["revocationList"] = "optional".into();
    }
    let new = folder.path().join("new");
    fs::write(&new, policy.to_string()).unwrap();
    fs::rename(new, folder.path().join("attestationConfig")).unwrap();
}

/// Returns the first address in a line.
fn address(line: &str) -> SocketAddr {
    let words = line.split(|c: char| c.is_whitespace() || c == ',');
    words.filter_map(|word| word.parse().ok()).next().unwrap()
}

#[test]
fn a_machine_of_each_variant_gets_the_key_of_its_disk() {
    for machine in [
        azure_trustedlaunch::correct,
        azure_sev_snp::correct,
        azure_tdx::correct,
        gcp_sev_es::correct,
        gcp_tdx::correct,
        sev_snp::correct_of_google,
        sev_snp::correct_of_aws,
        sev_snp::correct_of_aws_with_documents,
        aws_nitro_tpm::correct,
    ] {
        let machine = machine();
        let name = machine.variant.name;
        let services = Services::start(&machine, &["--kds=none", "--pcs=none"]);
        let got = services.rejoin(&machine.issuer);
        assert_eq!(got, Ok(DISK_KEY), "{name}: {}", services.join.output());

        let mut of_another = machine.policy.clone();
        of_another["attestationKeys"] = json!([format!("000b{}", "22".repeat(32))]);
        services.set_policy(&of_another);
        let error = services.rejoin(&machine.issuer).unwrap_err();
        services.join.expect("its attestation key is");
        // the service writes its knowledge of the machine only into its log
        assert!(!error.contains("its attestation key is"), "{name}: {error}");
    }
}

/// Machines without a TPM: the launch digest, and whether the machine has joined in this boot.
#[test]
fn a_machine_with_an_accepted_launch_digest_gets_the_key_until_it_has_joined() {
    let folder = tempfile::tempdir().unwrap();
    let register: tpm::Location = format!("snp:{}/run/cluster", folder.path().display())
        .parse()
        .unwrap();
    let chip = sev_snp::Chip::new(|_| ());
    let issuer = Arc::new(qemu_snp::LaunchIssuer::new(chip, register.clone()));
    let launched = |byte: &str| {
        let digests = json!({"snp": {"launchMeasurements": [byte.repeat(48)]}});
        sev_snp::with(sev_snp::ours(), &digests)
    };
    let machine = Correct::new(&qemu_snp::VARIANT, issuer, launched("aa"), folder);
    let services = Services::start(&machine, &["--kds=none", "--pcs=none"]);
    let got = services.rejoin(&machine.issuer);
    assert_eq!(got, Ok(DISK_KEY), "{}", services.join.output());
    services.set_policy(&launched("11"));
    services.rejoin(&machine.issuer).unwrap_err();
    services.join.expect("MEASUREMENT is aaaa");
    services.set_policy(&launched("aa"));
    verifier::mark(&register, &[7; 32]).unwrap();
    services.rejoin(&machine.issuer).unwrap_err();
    services
        .join
        .expect("register of the cluster ID: expected 0000");
}

#[test]
fn a_join_service_on_ec2_asks_as_the_role_of_its_instance() {
    let mut machine = aws_nitro_tpm::correct();
    machine.policy = aws_nitro_tpm::with_list(machine.policy, "accounts", "123456789012");
    for (owner, refusal) in [
        ("123456789012", None),
        (
            "210987654321",
            Some("account of the machine is \"210987654321\""),
        ),
    ] {
        let (api, requests) = aws_nitro_tpm::api(owner, aws_nitro_tpm::OF_ROLE);
        let host = aws_nitro_tpm::host_with_role();
        let place = format!("{},ec2={api}", host.url());
        let services = Services::start(&machine, &["--cloud-provider=aws", "--metadata", &place]);
        let got = services.rejoin(&machine.issuer);
        match refusal {
            None => assert_eq!(got, Ok(DISK_KEY), "{}", services.join.output()),
            Some(why) => {
                got.unwrap_err();
                services.join.expect(why);
            }
        }
        assert_eq!(requests.load(Ordering::SeqCst), 1);
    }
}
