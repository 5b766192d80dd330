//! Reports of SEV-SNP: genuine ones from packages of others, and ones that a hierarchy of the tests signs, each with one fault.

mod certificates;
mod demands;
mod forged;
mod machine;
mod peer;
mod revocation;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use forged::{CHIP, Hierarchy, correct_report};
use hardware::PlatformClaims;
use hardware::json::{Digits, Number};
use hardware::refusal::{Kind, Refusal};
use hardware::snp::certificate::ChipCertificate;
use hardware::snp::chain::Chain;
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::requirements::{Chip, Floor, SnpRequirements};
use hardware::snp::tcb::{Product, Tcb};
use hardware::snp::verify;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, UnixTime};
use support::foreign::rust_crate;
use support::mutation::mutations;

/// Returns the folder of the package `sev`.
fn package() -> PathBuf {
    rust_crate("sev", "sev")
}

fn evidence(name: &str) -> Vec<u8> {
    fs::read(package().join("tests/certs_data").join(name)).unwrap()
}

/// Returns AMD's certificate of a product: `ark` or `ask`.
fn amd(product: Product, name: &str) -> CertificateDer<'static> {
    let product = product.to_string().to_lowercase();
    let folder = package().join("src/certs/snp/builtin").join(product);
    CertificateDer::from_pem_file(folder.join(format!("{name}.pem"))).unwrap()
}

/// The report of a Milan in version 2: all its TCBs are bootloader 3, tee 0, snp 8, microcode 115.
fn milan_report() -> Vec<u8> {
    let digits = evidence("report_milan.hex");
    let digits = std::str::from_utf8(&digits).unwrap().trim();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// 2025-01-01: both chips' certificates are valid.
fn now() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(1_735_689_600))
}

#[test]
fn a_genuine_report_of_a_milan_leads_to_amd() {
    let (ark, ask) = (amd(Product::Milan, "ark"), amd(Product::Milan, "ask"));
    let (report, vcek) = (milan_report(), evidence("vcek_milan.der"));
    let chain = Chain {
        leaf: &vcek,
        intermediate: &ask,
        root: &ark,
        revoked: None,
    };
    let parsed = Report::parse(&report).unwrap();
    let minimum = Tcb {
        bootloader: 3,
        snp: 8,
        microcode: 115,
        ..Tcb::default()
    };
    let demands = SnpRequirements {
        minimum,
        minimum_firmware: (1, 52, 4),
        forbidden_platform_bits: Number(0b10),
        // it was started without an ID block
        family_ids: vec![Digits([0; 16])],
        image_ids: vec![Digits([0; 16])],
        ..SnpRequirements::default()
    };
    let claims = verify(&parsed, &chain, &demands, now()).unwrap();
    let refused = |change: fn(&mut SnpRequirements)| {
        let mut demands = demands.clone();
        change(&mut demands);
        let refusal = verify(&parsed, &chain, &demands, now()).unwrap_err();
        refusal.text.clone()
    };
    for (refusal, why) in [
        (
            refused(|it| it.minimum_firmware.2 = 5),
            "CURRENT_VERSION is 1.52.4, below the minimum 1.52.5",
        ),
        (
            refused(|it| it.forbidden_platform_bits = Number(0b11)),
            "the platform info has the bits 0x1",
        ),
        (
            refused(|it| it.family_ids = vec![Digits([1; 16])]),
            "FAMILY_ID is 0000",
        ),
        (
            refused(|it| it.image_ids = vec![Digits([1; 16])]),
            "IMAGE_ID is 0000",
        ),
    ] {
        assert!(refusal.contains(why), "{why}: {refusal}");
    }
    assert_eq!(claims.technology, "AMD SEV-SNP (Milan)");
    assert_eq!(claims.signed_by, "SEV-Milan, SEV-VCEK");
    assert_eq!(claims.chip.unwrap().len(), 128);
    // a change of any signed byte is refused
    for at in [0x10, 0x50, 0x90, 0x29f] {
        let mut altered = report.clone();
        altered[at] ^= 1;
        if let Ok(altered) = Report::parse(&altered) {
            let why = verify(&altered, &chain, &demands, now()).unwrap_err();
            assert_eq!(why.kind, Kind::Signature, "{at:#x}: {why}");
        }
    }
}

#[test]
fn the_genuine_key_of_a_turin_leads_to_amd_and_not_to_another_product() {
    let vcek = evidence("vcek_turin.der");
    let chain = |product| (amd(product, "ark"), amd(product, "ask"));
    let check = |ark: &[u8], ask: &[u8], now| {
        let chain = Chain {
            leaf: &vcek,
            intermediate: ask,
            root: ark,
            revoked: None,
        };
        chain.verify(ReportSigner::Vcek, now)
    };
    let (ark, ask) = chain(Product::Turin);
    let certificate = check(&ark, &ask, now()).unwrap();
    assert_eq!(certificate.product, Product::Turin);
    assert_eq!(certificate.chip.unwrap().len(), 8);
    assert_eq!(certificate.tcb.microcode, 9);
    for product in [Product::Milan, Product::Genoa] {
        let (other_ark, other_ask) = chain(product);
        for (ark, ask) in [
            (&other_ark, &other_ask),
            (&other_ark, &ask),
            (&ark, &other_ask),
        ] {
            let refusal = check(ark, ask, now()).unwrap_err();
            assert_eq!(refusal.kind, Kind::Chain, "{refusal:?}");
            assert!(refusal.text.contains("does not lead to the root"));
        }
    }
    for (seconds, expected) in [
        (1_577_836_800, "not valid yet: is the clock"),
        (2_524_608_000, "has expired"),
    ] {
        let then = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let refusal = check(&ark, &ask, then).unwrap_err();
        assert_eq!(refusal.kind, Kind::Expired, "{refusal:?}");
        assert!(refusal.text.contains(expected), "{refusal:?}");
    }
}

impl Hierarchy {
    /// Signs a correct report after a change, and judges it.
    fn judge(
        &self,
        change: impl Fn(&mut [u8]),
        demands: &SnpRequirements,
    ) -> Result<PlatformClaims, Refusal> {
        self.judge_by(["vcek", "ask", "ark"], change, demands)
    }

    /// The same with these certificates: the key that signs, its authority, the root.
    fn judge_by(
        &self,
        names: [&str; 3],
        change: impl Fn(&mut [u8]),
        demands: &SnpRequirements,
    ) -> Result<PlatformClaims, Refusal> {
        let mut report = correct_report();
        change(&mut report);
        self.sign(&mut report);
        let [leaf, ask, ark] = names.map(|name| self.certificate(name));
        let chain = Chain {
            leaf: &leaf,
            intermediate: &ask,
            root: &ark,
            revoked: None,
        };
        verify(&Report::parse(&report)?, &chain, demands, UnixTime::now())
    }
}

/// Returns the strictest requirements that [`correct_report`] meets.
fn strict() -> SnpRequirements {
    let minimum = Tcb {
        fmc: 0,
        bootloader: 4,
        tee: 1,
        snp: 0x18,
        microcode: 0xdb,
    };
    let floor = Floor {
        product: Product::Milan,
        model: Some(1),
        stepping: Some(1),
        minimum,
    };
    SnpRequirements {
        floors: vec![floor],
        minimum_abi: (1, 37),
        minimum_guest_svn: 7,
        refuse_smt: true,
        policy_bits: Number(0b11 << 24),
        platform_bits: Number(1 << 5),
        mitigation_bits: Number(0b11),
        chips: vec![Chip::Long(Digits(CHIP))],
        launch_measurements: vec![Digits([0xaa; 48])],
        host_data: vec![Digits([0xbb; 32])],
        id_keys: vec![Digits([0xcc; 48])],
        author_keys: vec![Digits([0xdd; 48])],
        ..SnpRequirements::default()
    }
}

#[test]
fn a_report_that_meets_every_demand_is_accepted() {
    let claims = Hierarchy::get().judge(|_| {}, &strict()).unwrap();
    assert_eq!(claims.chip.unwrap(), "c5".repeat(64));
    assert!(claims.tcb.iter().all(|part| part.got == part.minimum));
}

#[test]
fn each_fault_of_a_signed_report_is_refused_by_its_name() {
    type Change = (&'static [(usize, u8)], Kind, &'static str);
    let faults: &[Change] = &[
        (&[(0, 1)], Kind::Malformed, "version 1, expected 2 to 5"),
        (&[(0, 6)], Kind::Malformed, "version 6, expected 2 to 5"),
        (&[(0x04, 6)], Kind::Outdated, "GUEST_SVN is 6"),
        (&[(0x08, 36)], Kind::Protection, "demands an ABI below 1.37"),
        (&[(0x0a, 0b0011)], Kind::Protection, "(SMT)"),
        (&[(0x0a, 0b0110)], Kind::Protection, "(MIGRATE_MA)"),
        (&[(0x0a, 0b1010)], Kind::Protection, "(DEBUG)"),
        (&[(0x0a, 0b10_0010)], Kind::Protection, "(CXL_ALLOW)"),
        (&[(0x0a, 0)], Kind::Malformed, "wrong reserved bits"),
        (&[(0x0b, 0b111)], Kind::Malformed, "wrong reserved bits"),
        (
            &[(0x0b, 0b01)],
            Kind::Protection,
            "lacks the bits 0x2000000",
        ),
        (&[(0x30, 1)], Kind::Protection, "VMPL 1, above 0"),
        (&[(0x30, 4)], Kind::Malformed, "VMPL 4, expected 0 to 3"),
        (
            &[(0x30, 255), (0x31, 255), (0x32, 255), (0x33, 255)],
            Kind::Binding,
            "the host requested the report",
        ),
        (&[(0x34, 2)], Kind::Malformed, "signature algorithm 2"),
        (
            &[(0x38, 3)],
            Kind::Outdated,
            "CURRENT_TCB: the version of bootloader is 3",
        ),
        (&[(0x40, 0b10_1001)], Kind::Protection, "(SMT_EN)"),
        (
            &[(0x40, 0)],
            Kind::Protection,
            "platform info lacks the bits 0x20",
        ),
        (&[(0x48, 0)], Kind::Unproven, "(AUTHOR_KEY_EN)"),
        (&[(0x48, 3)], Kind::Signature, "masked the key of the chip"),
        (
            &[(0x48, 5)],
            Kind::Binding,
            "signed by a VLEK, but the certificate",
        ),
        (&[(0x48, 9)], Kind::Signature, "unknown key 2"),
        (&[(0x48, 29)], Kind::Signature, "is not signed"),
        (
            &[(0x48, 33)],
            Kind::Malformed,
            "reserved bits of the signer info",
        ),
        (&[(0x4c, 1)], Kind::Malformed, "reserved bytes 0x4c to 0x4f"),
        (&[(0x90, 0)], Kind::Measurement, "MEASUREMENT is"),
        (&[(0xc0, 0)], Kind::Measurement, "HOST_DATA is"),
        (&[(0xe0, 0)], Kind::Measurement, "ID_KEY_DIGEST is"),
        (&[(0x110, 0)], Kind::Measurement, "AUTHOR_KEY_DIGEST is"),
        (
            &[(0x180, 3)],
            Kind::Binding,
            "but the certificate of its chip is for",
        ),
        (&[(0x182, 1)], Kind::Malformed, "REPORTED_TCB: the TCB"),
        (
            &[(0x188, 0x17)],
            Kind::Unproven,
            "no known product has the family 0x17",
        ),
        (
            &[(0x189, 0x11)],
            Kind::Binding,
            "is of a Genoa, but the certificate",
        ),
        (
            &[(0x18b, 1)],
            Kind::Malformed,
            "reserved bytes 0x18b to 0x19f",
        ),
        (&[(0x1a0, 0)], Kind::Binding, "of another chip"),
        (
            &[(0x1e0, 5)],
            Kind::Outdated,
            "CURRENT_TCB: the version of bootloader is 4, below that of COMMITTED_TCB, 5",
        ),
        (
            &[(0x1e0, 3)],
            Kind::Outdated,
            "COMMITTED_TCB: the version of bootloader is 3, below the minimum 4",
        ),
        (
            &[(0x1e8, 39)],
            Kind::Outdated,
            "the firmware 1.58.39 runs below the committed 1.58.40",
        ),
        (
            &[(0x1f0, 3)],
            Kind::Outdated,
            "LAUNCH_TCB: the version of bootloader is 3, below the minimum 4",
        ),
        (
            &[(0x1f1, 0)],
            Kind::Outdated,
            "LAUNCH_TCB: the version of tee is 0, below the minimum 1",
        ),
        (
            &[(0x1f6, 0x17)],
            Kind::Outdated,
            "LAUNCH_TCB: the version of snp is 23, below the minimum 24",
        ),
        (
            &[(0x1f7, 0xda)],
            Kind::Outdated,
            "LAUNCH_TCB: the version of microcode is 218, below the minimum 219",
        ),
        (
            &[(0x1f8, 1)],
            Kind::Protection,
            "mitigation vectors lack the bits 0x2",
        ),
        (
            &[(0x200, 2)],
            Kind::Protection,
            "mitigation vectors lack the bits 0x1",
        ),
        (
            &[(0x208, 1)],
            Kind::Malformed,
            "reserved bytes 0x208 to 0x29f",
        ),
        (
            &[(0x4a0 - 1, 1)],
            Kind::Malformed,
            "reserved bytes 0x330 to 0x49f",
        ),
        // version 4 has no mitigation vectors
        (
            &[(0, 4), (0x1f8, 0), (0x200, 0)],
            Kind::Unproven,
            "has no mitigation vectors",
        ),
    ];
    for (bytes, kind, expected) in faults {
        let change = |report: &mut [u8]| bytes.iter().for_each(|(at, byte)| report[*at] = *byte);
        match Hierarchy::get().judge(change, &strict()) {
            Ok(_) => panic!("accepted, but expected: {expected}"),
            Err(why) => {
                assert!(why.text.contains(expected), "expected {expected}: {why}");
                assert_eq!(why.kind, *kind, "{why}");
            }
        }
    }
}

#[test]
fn altered_evidence_is_read_without_a_panic() {
    for report in mutations(&milan_report(), 3000) {
        if let Ok(ours) = Report::parse(&report) {
            let _ = ours.signature();
            assert_eq!(ours.signed(), &report[..0x2a0]);
        }
    }
    for name in ["vcek_milan.der", "vcek_turin.der"] {
        for certificate in mutations(&evidence(name), 3000) {
            let _ = ChipCertificate::parse(&certificate);
        }
    }
}
