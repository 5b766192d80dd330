//! A software TPM in which tpm2-tools make the keys and indices that a cloud makes in its TPMs.

use std::fs;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::json;
use support::swtpm::Swtpm;
use tpm::{KeySource, Location, Tpm};
use verifier::vtpm::{self, VariantData};
use verifier::{Issuer, hcl};

pub const USER_DATA: &[u8] = b"the hash of a certificate's key.";
pub const NONCE: &[u8] = b"the verifier's own random number";
pub const ATTRIBUTES_OF_GCE: &str =
    "platformcreate|ppwrite|ppread|writedefine|ownerread|authread|no_da";
pub const ATTRIBUTES_OF_AZURE: &str = "platformcreate|authread|authwrite|ownerread|no_da";
/// The templates of GCE's attestation keys: TPMT_PUBLIC without the key.
pub const TEMPLATES: [(u32, &str); 2] = [
    (
        0x01c1_0001,
        "0001000b00050072000000100014000b0800000000000000",
    ),
    (
        0x01c1_0003,
        "0023000b00050072000000100018000b0003001000000000",
    ),
];

/// A TPM as a cloud provisions it.
pub struct CloudTpm {
    pub tpm: Swtpm,
    dir: tempfile::TempDir,
}

impl CloudTpm {
    pub fn start() -> CloudTpm {
        CloudTpm {
            tpm: Swtpm::start(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Provides the templates of both attestation keys.
    pub fn gce() -> CloudTpm {
        let cloud = CloudTpm::start();
        for (index, template) in TEMPLATES {
            cloud.store(index, &unhex(template), ATTRIBUTES_OF_GCE, None);
        }
        cloud
    }

    /// Provides the attestation key of Azure.
    pub fn azure_key() -> CloudTpm {
        let cloud = CloudTpm::start();
        let context = cloud.path("ak");
        let key = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|noda|restricted|sign";
        let template = [
            "-G",
            "rsa2048:rsassa-sha256:null",
            "-g",
            "sha256",
            "-a",
            key,
        ];
        let make = [&["-C", "e", "-c", &context][..], &template].concat();
        cloud.tpm.tool("tpm2_createprimary", &make);
        let keep = ["-C", "o", "-c", &context, "0x81000003"];
        cloud.tpm.tool("tpm2_evictcontrol", &keep);
        cloud.tpm.tool("tpm2_flushcontext", &["-t"]);
        cloud
    }

    /// Provides the attestation key and a report of the paravisor. The index has the greatest length that swtpm allows, so zeros
    /// follow the report.
    pub fn azure(alter: impl Fn(&mut Vec<u8>)) -> CloudTpm {
        let cloud = CloudTpm::azure_key();
        let key = cloud.key(AZURE);
        // TPMT_PUBLIC ends with the modulus
        let mut report = hcl_report(&runtime_data(&key[key.len() - 256..]));
        alter(&mut report);
        report.resize(2048, 0);
        cloud.store(hcl::INDEX, &report, ATTRIBUTES_OF_AZURE, Some("hcl"));
        cloud
    }

    pub fn store(&self, index: u32, data: &[u8], attributes: &str, password: Option<&str>) {
        let (index, file) = (format!("{index:#x}"), self.path("data"));
        fs::write(&file, data).unwrap();
        let size = data.len().to_string();
        let mut define = vec!["-C", "p", &index, "-s", &size, "-a", attributes];
        define.extend(password.into_iter().flat_map(|password| ["-p", password]));
        self.tpm.tool("tpm2_nvdefine", &define);
        let write = match password {
            Some(password) => ["-C", &index, "-P", password, &index, "-i", &file].to_vec(),
            None => ["-C", "p", &index, "-i", &file].to_vec(),
        };
        self.tpm.tool("tpm2_nvwrite", &write);
    }

    /// Returns the attestation key (TPMT_PUBLIC).
    pub fn key(&self, source: KeySource) -> Vec<u8> {
        let mut tpm = Tpm::open(&self.location()).unwrap();
        tpm.attestation_key(source).unwrap()
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn location(&self) -> Location {
        self.tpm.location().parse().unwrap()
    }

    pub fn issue(&self, machine: impl VariantData + 'static) -> Vec<u8> {
        vtpm::TpmIssuer::new(self.location(), None, Arc::new(machine))
            .issue(USER_DATA, NONCE)
            .unwrap()
    }
}

/// The source of Azure's attestation key.
pub const AZURE: KeySource = hcl::KEY;

pub fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

pub fn runtime_data(modulus: &[u8]) -> String {
    let n = URL_SAFE_NO_PAD.encode(modulus);
    json!({
        "keys": [{"kid": "HCLAkPub", "key_ops": ["sign"], "kty": "RSA", "e": "AQAB", "n": n}],
        "vm-configuration": {"secure-boot": true, "vmUniqueId": "0"},
    })
    .to_string()
}

/// Returns a report with an unsigned report of SEV-SNP whose REPORT_DATA is the hash of the runtime data.
pub fn hcl_report(runtime_data: &str) -> Vec<u8> {
    let hash = ring::digest::digest(&ring::digest::SHA256, runtime_data.as_bytes());
    let mut hardware = [0; 1184];
    hardware[0x50..0x70].copy_from_slice(hash.as_ref());
    let length = runtime_data.len() as u32;
    let numbers = [length + 20, 1, 2, 1, length].map(u32::to_le_bytes);
    [
        &b"HCLA"[..],
        &[0; 28],
        &hardware,
        numbers.as_flattened(),
        runtime_data.as_bytes(),
    ]
    .concat()
}
