//! Quotes of a hierarchy of our own, which has the shape of Intel's. A test changes the parts before they are signed.

use std::time::{Duration, SystemTime};

use base::time;
use hardware::tdx::dcap::Hex;
use hardware::tdx::{TdxCollateral, Verifier};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    CustomExtension, DnType, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use rustls::pki_types::CertificateDer;
use serde_json::Value;
use verifier::Policy;

/// The serial numbers of the certificates.
pub const ROOT: u64 = 1;
pub const AUTHORITY: u64 = 2;
pub const SIGNER: u64 = 3;
pub const PCK: u64 = 7;
/// The certificates of the chain in a quote.
pub const CHAIN: [&str; 3] = ["pck", "authority", "root"];

/// The parts of a quote and its collateral. The default is a genuine machine that is up to date.
#[derive(Clone)]
pub struct Parts {
    pub root: CertificateParams,
    pub authority: CertificateParams,
    pub signer: CertificateParams,
    pub pck: CertificateParams,
    pub root_list: CertificateRevocationListParams,
    pub pck_list: CertificateRevocationListParams,
    /// The issuer of the PCK certificate and of the signer's: `root` or `authority`.
    pub issuer_of_pck: &'static str,
    pub issuer_of_signer: &'static str,
    /// The certificates of the quote in their order, and those of the signer: `pck`, `authority`, `signer`, `root`.
    pub chain: Vec<&'static str>,
    pub chain_of_signer: Vec<&'static str>,
    /// The processor's versions in the PCK certificate; `None`: it has an empty extension.
    pub svns: Option<([u8; 16], u16)>,
    pub header: Vec<u8>,
    pub body: Vec<u8>,
    pub qe_report: Vec<u8>,
    pub authentication: Vec<u8>,
    /// The type of the quote's certification data, and of the enclave's.
    pub certification: [u16; 2],
    /// The statuses of the present levels of the platform, the TDX module and the quoting enclave. Below each is an older one, `OutOfDate`.
    pub status: &'static str,
    pub module_status: &'static str,
    pub qe_status: &'static str,
    /// When the TCB information and the QE identity were issued, until when they are valid, and the number of their evaluation (JSON).
    pub dates: String,
    /// The replacements in the TCB information and the QE identity.
    pub info: Vec<(&'static str, &'static str)>,
    pub identity: Vec<(&'static str, &'static str)>,
    /// The key that signs the quote, the enclave's report, the texts of the collateral is another one.
    pub other_attestation_key: bool,
    pub other_pck: bool,
    pub other_signer: bool,
    /// The keys in PEM, in the order in which they are needed; without them each quote has a hierarchy of its own.
    pub keys: Vec<String>,
}

impl Default for Parts {
    fn default() -> Parts {
        Parts {
            root: authority("Intel SGX Root CA", ROOT),
            authority: authority("Intel SGX PCK Platform CA", AUTHORITY),
            signer: leaf("Intel SGX TCB Signing", SIGNER),
            pck: leaf("Intel SGX PCK Certificate", PCK),
            root_list: list(),
            pck_list: list(),
            issuer_of_pck: "authority",
            issuer_of_signer: "root",
            chain: CHAIN.into(),
            chain_of_signer: vec!["signer", "root"],
            svns: Some(([5; 16], 11)),
            header: header(),
            body: body(),
            qe_report: qe_report(),
            authentication: vec![0x55; 32],
            certification: [6, 5],
            status: "UpToDate",
            module_status: "UpToDate",
            qe_status: "UpToDate",
            dates: dates("2025-06-20T00:00:00Z", "2025-07-20T00:00:00Z"),
            info: vec![],
            identity: vec![],
            other_attestation_key: false,
            other_pck: false,
            other_signer: false,
            keys: vec![],
        }
    }
}

fn leaf(name: &str, serial: u64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    let intel = "Intel Corporation";
    params
        .distinguished_name
        .push(DnType::OrganizationName, intel);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2049, 1, 1);
    params.serial_number = Some(SerialNumber::from(serial));
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::ContentCommitment,
    ];
    params
}

fn authority(name: &str, serial: u64) -> CertificateParams {
    let mut params = leaf(name, serial);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn list() -> CertificateRevocationListParams {
    CertificateRevocationListParams {
        this_update: date_time_ymd(2025, 6, 20),
        next_update: date_time_ymd(2025, 7, 20),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![],
        key_identifier_method: KeyIdMethod::Sha256,
    }
}

/// Returns an entry of a list.
pub fn revoked(serial: u64) -> RevokedCertParams {
    RevokedCertParams {
        serial_number: SerialNumber::from(serial),
        revocation_time: date_time_ymd(2025, 1, 1),
        reason_code: None,
        invalidity_date: None,
    }
}

fn header() -> Vec<u8> {
    let vendor = [
        0x93, 0x9a, 0x72, 0x33, 0xf7, 0x9c, 0x4c, 0xa9, 0x94, 0x0a, 0x0d, 0xb3, 0x95, 0x7f, 0x06,
        0x07,
    ];
    [
        &[4, 0, 2, 0, 0x81, 0, 0, 0, 0, 0, 0, 0][..],
        &vendor,
        &[0; 20],
    ]
    .concat()
}

/// Returns a body of TDX 1.0: MRTD is full of a0, RTMR 0 to 2 of b0 to b2, RTMR 3 is zero.
fn body() -> Vec<u8> {
    let mut body = vec![0; 584];
    body[..16].copy_from_slice(&[4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
    body[120..128].copy_from_slice(&0x1000_0000_u64.to_le_bytes());
    body[128..136].copy_from_slice(&0xe7_u64.to_le_bytes());
    body[136..184].fill(0xa0);
    for rtmr in 0..3 {
        body[328 + 48 * rtmr..376 + 48 * rtmr].fill(0xb0 + rtmr as u8);
    }
    body
}

/// Returns the report of a quoting enclave; its REPORTDATA is filled in later, unless it has some.
fn qe_report() -> Vec<u8> {
    let mut report = vec![0; 384];
    report[48] = 0x11;
    report[128..160].fill(0xaa);
    report[256..260].copy_from_slice(&[2, 0, 4, 0]);
    report
}

fn dates(issued: &str, next: &str) -> String {
    format!(r#""issueDate":"{issued}","nextUpdate":"{next}","tcbEvaluationDataNumber":20"#)
}

fn info(dates: &str, status: &str, module_status: &str) -> String {
    let level = |[sgx, pce, tdx]: [u8; 3], year: u16, status: &str| {
        let svns = |svn: u8| [format!(r#"{{"svn":{svn}}}"#).as_str(); 16].join(",");
        let (sgx, tdx) = (svns(sgx), svns(tdx));
        format!(
            r#"{{"tcb":{{"sgxtcbcomponents":[{sgx}],"tdxtcbcomponents":[{tdx}],"pcesvn":{pce}}},"tcbDate":"{year}-03-13T00:00:00Z",{status}}}"#
        )
    };
    let present = level([5, 11, 3], 2024, &format!(r#""tcbStatus":"{status}""#));
    let old = r#""tcbStatus":"OutOfDate","advisoryIDs":["INTEL-SA-00001"]"#;
    let old = level([4, 10, 2], 2023, old);
    let (zero, none, all) = ("00".repeat(48), "00".repeat(8), "ff".repeat(8));
    let module = format!(r#""mrsigner":"{zero}","attributes":"{none}","attributesMask":"{all}""#);
    let levels = svn_levels(module_status);
    format!(
        r#"{{"id":"TDX","version":3,{dates},"fmspc":"ABABABABABAB","pceId":"0000","tcbType":0,"tdxModule":{{{module}}},"tcbLevels":[{old},{present}],"tdxModuleIdentities":[{{"id":"TDX_01",{module},{levels}}}]}}"#
    )
}

fn identity(dates: &str, status: &str) -> String {
    let attributes = "11".to_owned() + &"00".repeat(15);
    let mask = "FB".to_owned() + &"FF".repeat(15);
    let (signer, levels) = ("aa".repeat(32), svn_levels(status));
    format!(
        r#"{{"id":"TD_QE","version":2,{dates},"miscselect":"00000000","miscselectMask":"FFFFFFFF","attributes":"{attributes}","attributesMask":"{mask}","mrsigner":"{signer}","isvprodid":2,{levels}}}"#
    )
}

fn svn_levels(status: &str) -> String {
    format!(
        r#""tcbLevels":[{{"tcb":{{"isvsvn":4}},"tcbDate":"2024-03-13T00:00:00Z","tcbStatus":"{status}"}},{{"tcb":{{"isvsvn":3}},"tcbDate":"2023-03-13T00:00:00Z","tcbStatus":"OutOfDate","advisoryIDs":["INTEL-SA-00002"]}}]"#
    )
}

/// Replaces texts, each of which must occur.
fn replaced(text: String, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    })
}

impl Parts {
    /// Returns a correct machine whose collateral a program accepts today.
    pub fn of_today() -> Parts {
        let day = Duration::from_secs(24 * 3600);
        let (issued, next) = (SystemTime::now() - day, SystemTime::now() + day);
        let list = CertificateRevocationListParams {
            this_update: issued.into(),
            next_update: next.into(),
            ..list()
        };
        Parts {
            root_list: list.clone(),
            pck_list: list,
            dates: dates(&time::seconds(issued), &time::seconds(next)),
            ..Parts::default()
        }
    }

    /// Makes all quotes and all collateral those of one hierarchy.
    pub fn keep_keys(&mut self) {
        let pem = |_| KeyPair::generate().unwrap().serialize_pem();
        self.keys = (0..5).map(pem).collect();
    }

    /// Makes the body one of version 5: of TDX 1.5 (type 3) or "TDX 1.5 extended" (type 4), whose module has these versions now.
    pub fn version_5(&mut self, kind: u8, svn2: [u8; 16]) {
        self.header[0] = 5;
        self.body.extend(svn2);
        self.body.extend([0; 48]);
        if kind == 4 {
            self.body.extend([0; 237]);
        }
    }

    /// Signs the parts, with REPORTDATA in the body if it has none.
    pub fn sign(&self, report_data: &[u8; 64]) -> Signed {
        let mut keys = self.keys.iter();
        let mut key = || match keys.next() {
            Some(pem) => KeyPair::from_pem(pem).unwrap(),
            None => KeyPair::generate().unwrap(),
        };
        let root = CertifiedIssuer::self_signed(self.root.clone(), key()).unwrap();
        let authority = CertifiedIssuer::signed_by(self.authority.clone(), key(), &root).unwrap();
        let (signer_key, pck_key, attestation_key) = (key(), key(), fixed(&key()));
        let issuer = |name| match name {
            "root" => &root,
            _ => &authority,
        };
        let issue = |params: &CertificateParams, key: &KeyPair, by| {
            params.signed_by(key, issuer(by)).unwrap().pem()
        };
        let signer = issue(&self.signer, &signer_key, self.issuer_of_signer);
        let mut pck = self.pck.clone();
        let content = self.svns.map_or(vec![0x30, 0], extension);
        let oid = [1, 2, 840, 113741, 1, 13, 1];
        pck.custom_extensions = vec![CustomExtension::from_oid_content(&oid, content)];
        let pck = issue(&pck, &pck_key, self.issuer_of_pck);
        let chain = |names: &[&str]| -> String {
            let pem = |name: &&str| match *name {
                "pck" => pck.clone(),
                "signer" => signer.clone(),
                "authority" => authority.pem(),
                "root" => root.pem(),
                _ => panic!("{name}"),
            };
            names.iter().map(pem).collect()
        };

        let key = attestation_key.public_key().as_ref();
        let mut report = self.qe_report.clone();
        if report[320..] == [0; 64] {
            let named = [&key[1..], &self.authentication].concat();
            report[320..352].copy_from_slice(digest(&SHA256, &named).as_ref());
        }
        let other = || fixed(&KeyPair::generate().unwrap());
        let pck_key = if self.other_pck {
            other()
        } else {
            fixed(&pck_key)
        };
        let pem = chain(&self.chain);
        let certification = [
            &report[..],
            &sign(&pck_key, &report),
            &(self.authentication.len() as u16).to_le_bytes(),
            &self.authentication,
            &self.certification[1].to_le_bytes(),
            &(pem.len() as u32).to_le_bytes(),
            pem.as_bytes(),
        ]
        .concat();
        let mut body = self.body.clone();
        if body[520..584] == [0; 64] {
            body[520..584].copy_from_slice(report_data);
        }
        let mut signed = self.header.clone();
        if signed[0] == 5 {
            let kind: u16 = match body.len() {
                648 => 3,
                885 => 4,
                _ => 2,
            };
            signed.extend(kind.to_le_bytes());
            signed.extend((body.len() as u32).to_le_bytes());
        }
        signed.extend(body);
        let signing = if self.other_attestation_key {
            &other()
        } else {
            &attestation_key
        };
        let signature = [
            &sign(signing, &signed)[..],
            &key[1..],
            &self.certification[0].to_le_bytes(),
            &(certification.len() as u32).to_le_bytes(),
            &certification,
        ]
        .concat();
        let len = (signature.len() as u32).to_le_bytes();

        let signer_key = if self.other_signer {
            other()
        } else {
            fixed(&signer_key)
        };
        let info = replaced(
            info(&self.dates, self.status, self.module_status),
            &self.info,
        );
        let identity = replaced(identity(&self.dates, self.qe_status), &self.identity);
        let hex = |text: &str| Hex(sign(&signer_key, text.as_bytes()));
        let list = |params: &CertificateRevocationListParams, issuer| {
            Hex(params.signed_by(issuer).unwrap().der().to_vec())
        };
        let collateral = TdxCollateral {
            tcb_info_signature: hex(&info),
            tcb_info: info,
            tcb_info_issuer_chain: chain(&self.chain_of_signer),
            qe_identity_signature: hex(&identity),
            qe_identity: identity,
            qe_identity_issuer_chain: chain(&self.chain_of_signer),
            root_ca_crl: list(&self.root_list, &*root),
            pck_crl: list(&self.pck_list, &*authority),
            pck_crl_issuer_chain: String::new(),
        };
        Signed {
            root: root.der().clone(),
            root_in_pem: root.pem(),
            quote: [&signed[..], &len, &signature].concat(),
            collateral,
        }
    }
}

/// A quote with its collateral.
pub struct Signed {
    root: CertificateDer<'static>,
    pub root_in_pem: String,
    pub quote: Vec<u8>,
    pub collateral: TdxCollateral,
}

impl Signed {
    /// Returns a verifier under the root of this hierarchy.
    pub fn verifier(&self) -> Verifier {
        Verifier::under("root of the tests", &self.root).unwrap()
    }

    /// Returns the policy with the root of this hierarchy.
    pub fn trusting(&self, policy: &Policy) -> Policy {
        let mut policy: Value = serde_json::from_str(&cli::trust::policy::text(policy)).unwrap();
        policy["intelRootKey"] = self.root_in_pem.clone().into();
        Policy::from_json(&policy.to_string()).unwrap()
    }
}

fn fixed(key: &KeyPair) -> EcdsaKeyPair {
    let document = key.serialize_der();
    let random = SystemRandom::new();
    EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &document, &random).unwrap()
}

fn sign(key: &EcdsaKeyPair, text: &[u8]) -> Vec<u8> {
    let signature = key.sign(&SystemRandom::new(), text).unwrap();
    signature.as_ref().into()
}

/// Returns DER of a value.
fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    base::der::element(tag, &[content])
}

/// Returns the extension of a PCK with these versions of the processor and the PCE.
fn extension((cpu, pce): ([u8; 16], u16)) -> Vec<u8> {
    let oid = |arcs: &[u8]| {
        let base = [0x2a, 0x86, 0x48, 0x86, 0xf8, 0x4d, 0x01, 0x0d, 0x01];
        der(0x06, &[&base, arcs].concat())
    };
    let pair = |arcs: &[u8], value: Vec<u8>| der(0x30, &[oid(arcs), value].concat());
    let mut tcb: Vec<u8> = (1..)
        .zip(cpu)
        .flat_map(|(n, svn)| pair(&[2, n], der(2, &[svn])))
        .collect();
    tcb.extend(pair(&[2, 17], der(2, &pce.to_be_bytes()[1..])));
    tcb.extend(pair(&[2, 18], der(4, &cpu)));
    let entries = [
        pair(&[1], der(4, &[0xee; 16])),
        pair(&[2], der(0x30, &tcb)),
        pair(&[3], der(4, &[0; 2])),
        pair(&[4], der(4, &[0xab; 6])),
        pair(&[5], der(10, &[1])),
        pair(&[6], der(4, &[0xdd; 16])),
    ];
    der(0x30, &entries.concat())
}
