//! Measures the validation of evidence whose certificates are cached, and compares it with the cost of only verifying its
//! signatures. The evidence is genuine reports of hardware, and whole documents of each variant, which a software TPM and
//! hierarchies of the tests have signed.
//!
//! `cargo bench --bench validation [-- COUNT]`. No network is used. The time of each row is the shortest of five rounds.

#![allow(dead_code, unused_imports)] // only tests use the rest of these modules

#[path = "../tests/cloud_vtpm/authority.rs"]
mod authority;
#[path = "../tests/cloud_vtpm/aws_nitro_tpm.rs"]
mod aws_nitro_tpm;
#[path = "../tests/cloud_vtpm/azure_sev_snp.rs"]
mod azure_sev_snp;
#[path = "../tests/cloud_vtpm/azure_tdx.rs"]
mod azure_tdx;
#[path = "../tests/cloud_vtpm/azure_trustedlaunch.rs"]
mod azure_trustedlaunch;
#[path = "../tests/cloud_vtpm/cloud_tpm.rs"]
mod cloud_tpm;
#[path = "../tests/hardware_snp/forged.rs"]
mod forged_snp;
#[path = "../tests/hardware_tdx/forged.rs"]
mod forged_tdx;
#[path = "../tests/cloud_vtpm/gcp_sev_es.rs"]
mod gcp_sev_es;
#[path = "../tests/cloud_vtpm/host.rs"]
mod host;
#[path = "../tests/node/json.rs"]
mod json;
#[path = "../tests/cloud_vtpm/meeting.rs"]
mod meeting;
#[path = "../tests/cloud_vtpm/sev_snp.rs"]
mod sev_snp;

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use base::der::{BIT_STRING, DerReader, INTEGER, SEQUENCE, context};
use collateral::{FetchSettings, Fetching, Kept};
use hardware::snp::chain::Chain;
use hardware::snp::report::Report;
use hardware::snp::tcb::Product;
use hardware::tdx::{TdxCollateral, TdxQuote, Verifier};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED,
    ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, KeyPair, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_SHA384, RsaKeyPair, UnparsedPublicKey,
    VerificationAlgorithm,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer, UnixTime};
use support::foreign::rust_crate;
use support::openssl::openssl;
use verifier::sources::Sources;

/// 2025-07-01: all certificates and lists are valid.
const NOW: u64 = 1_751_328_000;
/// The different signatures of a TDX quote: on the PCK, its authority, the certificate that signs Intel's JSON, the TCB
/// information, the identity, the enclave's report, the quote, and two lists.
const TDX_SIGNATURES: usize = 9;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = arguments.iter().find_map(|argument| argument.parse().ok());
    // `cargo test --all-targets` also calls benches, without this argument, to check that they run
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let count = number.unwrap_or(if is_bench { 500 } else { 2 });
    println!("| evidence | signatures µs | validation µs | factor | of it the cache µs |");
    println!("|---|---:|---:|---:|---:|");
    snp(count);
    tdx(count);
    variants(count);
}

/// Whole documents: the TPM's quote, and the endorsement of its key.
fn variants(count: u32) {
    let unit = Signatures::new();
    for (name, sample, signatures) in [
        (
            "azure-trustedlaunch",
            (|| azure_trustedlaunch::correct().sample()) as fn() -> meeting::Sample,
            // quote; two certificates
            [1, 0, 2, 0],
        ),
        // quote; report and its two certificates
        (
            "azure-sev-snp",
            || azure_sev_snp::correct().sample(),
            [1, 0, 1, 2],
        ),
        ("azure-tdx", azure_tdx::sample, [1, TDX_SIGNATURES, 0, 0]),
        // quote; certificate
        (
            "gcp-sev-es",
            || gcp_sev_es::correct().sample(),
            [1, 0, 1, 0],
        ),
        (
            "gcp-sev-snp",
            || sev_snp::correct_of_google().sample(),
            [1, 0, 2, 2],
        ),
        (
            "aws-sev-snp",
            || sev_snp::correct_of_aws().sample(),
            [1, 0, 1, 2],
        ),
        // quote; document and certificate
        (
            "aws-nitro-tpm",
            || aws_nitro_tpm::correct().sample(),
            [1, 0, 2, 0],
        ),
    ] {
        let (document, judge) = sample();
        let checks = [&unit.rsa, &unit.p256, &unit.p384, &unit.pss];
        let floor = || {
            for (check, number) in checks.iter().zip(signatures) {
                (0..number).for_each(|_| check.verify());
            }
        };
        let validation = || {
            judge
                .judge(&verifier::Evidence::new(&document, cloud_tpm::NONCE))
                .unwrap();
        };
        row(name, count, floor, validation, || {});
    }
}

/// One signature that can be checked again and again.
struct Check {
    algorithm: &'static dyn VerificationAlgorithm,
    key: Vec<u8>,
    message: Vec<u8>,
    signature: Vec<u8>,
}

impl Check {
    fn verify(&self) {
        UnparsedPublicKey::new(self.algorithm, &self.key)
            .verify(&self.message, &self.signature)
            .unwrap();
    }
}

/// One of each kind.
struct Signatures {
    /// RSA of 2048 bits, PKCS #1, SHA-256: quotes.
    rsa: Check,
    p256: Check,
    p384: Check,
    /// RSA of 2048 bits, PSS, SHA-384: the certificates of AMD in the tests. AMD's own have 4096 bits.
    pss: Check,
}

impl Signatures {
    fn new() -> Signatures {
        let (random, message) = (SystemRandom::new(), vec![7; 1000]);
        let folder = tempfile::tempdir().unwrap();
        for command in [
            "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out pem",
            "pkcs8 -topk8 -nocrypt -in pem -outform DER -out key",
        ] {
            openssl(folder.path(), command);
        }
        let key = PrivatePkcs8KeyDer::from(fs::read(folder.path().join("key")).unwrap());
        let key = RsaKeyPair::from_pkcs8(key.secret_pkcs8_der()).unwrap();
        let of_rsa = |padding, algorithm| {
            let mut signature = vec![0; key.public().modulus_len()];
            key.sign(padding, &random, &message, &mut signature)
                .unwrap();
            Check {
                algorithm,
                key: key.public().as_ref().to_vec(),
                message: message.clone(),
                signature,
            }
        };
        let of_curve = |signing, algorithm| {
            let key = EcdsaKeyPair::generate_pkcs8(signing, &random).unwrap();
            let key = EcdsaKeyPair::from_pkcs8(signing, key.as_ref(), &random).unwrap();
            Check {
                algorithm,
                key: key.public_key().as_ref().to_vec(),
                message: message.clone(),
                signature: key.sign(&random, &message).unwrap().as_ref().to_vec(),
            }
        };
        Signatures {
            rsa: of_rsa(&RSA_PKCS1_SHA256, &RSA_PKCS1_2048_8192_SHA256),
            p256: of_curve(&ECDSA_P256_SHA256_FIXED_SIGNING, &ECDSA_P256_SHA256_FIXED),
            p384: of_curve(&ECDSA_P384_SHA384_FIXED_SIGNING, &ECDSA_P384_SHA384_FIXED),
            pss: of_rsa(&RSA_PSS_SHA384, &RSA_PSS_2048_8192_SHA384),
        }
    }
}

fn sources(kept: Kept) -> std::sync::Arc<Fetching> {
    let settings = FetchSettings {
        kds: None,
        pcs: None,
        kept,
        clock: || NOW,
        ..FetchSettings::default()
    };
    Fetching::new(settings).unwrap()
}

fn snp(count: u32) {
    let package = rust_crate("sev", "sev");
    let read = |name: &str| fs::read(package.join("tests/certs_data").join(name)).unwrap();
    let pem = |name: &str| {
        let path = package.join("src/certs/snp/builtin/milan").join(name);
        CertificateDer::from_pem_file(path).unwrap().to_vec()
    };
    let digits = String::from_utf8(read("report_milan.hex")).unwrap();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    let report: Vec<u8> = (0..digits.trim().len()).step_by(2).map(byte).collect();
    let report = Report::parse(&report).unwrap();
    let (vcek, ask, ark) = (read("vcek_milan.der"), pem("ask.pem"), pem("ark.pem"));

    let folder = tempfile::tempdir().unwrap();
    let chip: String = report
        .chip_id
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let name = format!("vcek-milan-{chip}-0.3.0.8.115.der");
    fs::write(folder.path().join(name), &vcek).unwrap();
    let sources = sources(Kept::Directory(folder.path().into()));

    let cached = || sources.snp_certificates(&report, Product::Milan).unwrap();
    let validation = || {
        let fetched = cached();
        let chain = Chain {
            leaf: fetched.leaf.as_ref().unwrap(),
            intermediate: &fetched.intermediate,
            root: &ark,
            revoked: None,
        };
        let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
        let certificate = chain.verify(report.signer().unwrap(), now).unwrap();
        certificate.verify_signature(&report).unwrap();
    };
    let signatures = || {
        for (subject, issuer) in [(&vcek, &ask), (&ask, &ark)] {
            let (signed, signature, _) = parts(subject);
            UnparsedPublicKey::new(&RSA_PSS_2048_8192_SHA384, parts(issuer).2)
                .verify(signed, signature)
                .unwrap();
        }
        UnparsedPublicKey::new(&ECDSA_P384_SHA384_FIXED, parts(&vcek).2)
            .verify(report.signed(), &report.signature().unwrap())
            .unwrap();
    };
    row(
        "SEV-SNP report (Milan)",
        count,
        signatures,
        validation,
        || {
            black_box(cached());
        },
    );
}

fn tdx(count: u32) {
    let samples = rust_crate("dcap_qvl", "dcap-qvl").join("sample");
    let bytes = fs::read(samples.join("tdx_quote")).unwrap();
    let quote = TdxQuote::parse(&bytes).unwrap();
    let kept = fs::read(samples.join("tdx_quote_collateral.json")).unwrap();
    let collateral: TdxCollateral = serde_json::from_slice(&kept).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("collateral.json");
    fs::write(&file, serde_json::to_vec(&collateral).unwrap()).unwrap();
    let (sources, verifier) = (sources(Kept::File(file)), Verifier::of_intel().unwrap());

    let cached = || sources.tdx_collateral(&quote).unwrap();
    let validation = || {
        let quote = TdxQuote::parse(&bytes).unwrap();
        verifier.verify(quote, &cached(), NOW).unwrap();
    };
    let mut key = vec![4];
    key.extend(quote.attestation_key);
    let signatures = || {
        for _ in 0..TDX_SIGNATURES {
            UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &key)
                .verify(quote.signed, quote.signature)
                .unwrap();
        }
    };
    row("TDX quote", count, signatures, validation, || {
        black_box(cached());
    });
}

/// Prints a row of the table.
fn row(name: &str, count: u32, signatures: impl Fn(), validation: impl Fn(), cached: impl Fn()) {
    // fills the cache
    validation();
    let (floor, whole, cached) = (
        time(count, signatures),
        time(count, validation),
        time(count, cached),
    );
    let factor = whole / floor;
    println!("| {name} | {floor:.0} | {whole:.0} | {factor:.2} | {cached:.1} |");
}

/// Returns microseconds of one call.
fn time(count: u32, work: impl Fn()) -> f64 {
    let round = || {
        let started = Instant::now();
        for _ in 0..count {
            work();
        }
        started.elapsed().as_secs_f64() * 1e6 / f64::from(count)
    };
    (0..5).map(|_| round()).fold(f64::INFINITY, f64::min)
}

/// Returns the signed bytes of a certificate, its signature, and its key.
fn parts(der: &[u8]) -> (&[u8], &[u8], &[u8]) {
    let mut certificate = DerReader::new(DerReader::new(der).expect(SEQUENCE).unwrap());
    let signed = certificate.expect_whole(SEQUENCE).unwrap();
    certificate.expect(SEQUENCE).unwrap();
    let signature = certificate.expect(BIT_STRING).unwrap();
    let mut tbs = DerReader::new(DerReader::new(signed).expect(SEQUENCE).unwrap());
    for tag in [context(0), INTEGER, SEQUENCE, SEQUENCE, SEQUENCE, SEQUENCE] {
        tbs.expect(tag).unwrap();
    }
    let mut key = DerReader::new(tbs.expect(SEQUENCE).unwrap());
    key.expect(SEQUENCE).unwrap();
    let key = key.expect(BIT_STRING).unwrap();
    // the first byte is the number of unused bits
    (signed, &signature[1..], &key[1..])
}
