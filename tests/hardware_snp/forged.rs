//! A hierarchy of our own, which has the shape of AMD's, and the report of a chip that it signs.

use std::collections::BTreeSet;
use std::fs;
use std::sync::OnceLock;

use hardware::snp::report::LEN;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use support::openssl::openssl;

/// Our own roots, authorities, chips and clouds, as openssl makes them.
pub struct Hierarchy {
    folder: tempfile::TempDir,
    vcek: EcdsaKeyPair,
    vlek: EcdsaKeyPair,
}

/// The chip of [`Hierarchy`].
pub const CHIP: [u8; 64] = [0xc5; 64];
/// The cloud of the VLEK.
pub const CLOUD: &str = "CN=cc-us-east-2.amazonaws.com";

/// Padding and digest of AMD's signatures.
const PSS: &str = "-sha384 -sigopt rsa_padding_mode:pss -sigopt rsa_pss_saltlen:48";
/// The arc of AMD's extensions.
const ARC: &str = "1.3.6.1.4.1.3704.1";

/// A certificate: its file, the key, the name of the subject, the signer, the extensions, the days until it ends, the options of
/// the signature.
struct Made {
    name: &'static str,
    key: &'static str,
    subject: &'static str,
    issuer: &'static str,
    extensions: String,
    days: u32,
    signature: &'static str,
}

/// AMD's extensions of a key that signs reports, after a change.
fn extensions(change: impl Fn(&mut Vec<(&'static str, String)>)) -> String {
    let mut list: Vec<(&str, String)> = [
        ("1", "020100"),
        ("2", "16084D696C616E2D4230"), // Milan-B0
        ("3.1", "020104"),
        ("3.2", "020101"),
        ("3.3", "020118"),
        ("3.8", "020200DB"),
        ("4", &"C5".repeat(64)),
    ]
    .map(|(tail, der)| (tail, der.to_owned()))
    .to_vec();
    change(&mut list);
    let line = |(tail, der): &(&str, String)| format!("{ARC}.{tail}=DER:{der}\n");
    list.iter().map(line).collect()
}

/// The text as IA5String.
fn ia5(text: &str) -> String {
    let hex: String = text.bytes().map(|byte| format!("{byte:02X}")).collect();
    format!("16{:02X}{hex}", text.len())
}

/// The extensions of a VLEK: it names a cloud and no chip.
fn of_vlek(list: &mut Vec<(&'static str, String)>) {
    list.retain(|(tail, _)| *tail != "4");
    list[1].1 = ia5("Milan");
    list.push(("5", ia5(CLOUD)));
}

/// All certificates. A certificate with a fault has the fault's name.
fn certificates() -> Vec<Made> {
    const CA: &str = "basicConstraints=critical,CA:true\nkeyUsage=critical,keyCertSign,cRLSign\n";
    let authority = |name, subject, issuer, extensions: &str| Made {
        name,
        key: match name {
            "ask-no-ca" | "ask-usage" | "ask-short" | "ask-of-other" => "ask",
            own => own,
        },
        subject,
        issuer,
        extensions: extensions.into(),
        days: 3650,
        signature: PSS,
    };
    let leaf = |name, issuer, extensions: String| Made {
        name,
        key: if name.starts_with("vlek") {
            "vlek"
        } else {
            "vcek"
        },
        subject: if name.starts_with("vlek") {
            "SEV-VLEK"
        } else {
            "SEV-VCEK"
        },
        issuer,
        extensions,
        days: 3650,
        signature: PSS,
    };
    let vcek =
        |name, change: fn(&mut Vec<(&'static str, String)>)| leaf(name, "ask", extensions(change));
    let vlek = |name, change: fn(&mut Vec<(&'static str, String)>)| {
        let both = |list: &mut Vec<_>| {
            of_vlek(list);
            change(list);
        };
        leaf(name, "asvk", extensions(both))
    };
    let mut all = vec![
        authority("ark", "ARK-Milan", "", CA),
        // another key with the name of the root
        authority("other", "ARK-Milan", "", CA),
        authority("ask", "SEV-Milan", "ark", CA),
        authority("asvk", "SEV-VLEK-Milan", "ark", CA),
        authority("ark-genoa", "ARK-Genoa", "", CA),
        authority("ask-genoa", "SEV-Genoa", "ark-genoa", CA),
        authority(
            "ask-no-ca",
            "SEV-Milan",
            "ark",
            "basicConstraints=critical,CA:false\n",
        ),
        authority(
            "ask-usage",
            "SEV-Milan",
            "ark",
            "basicConstraints=critical,CA:true\nkeyUsage=critical,digitalSignature\n",
        ),
        authority("ask-short", "SEV-Milan", "ark", CA),
        authority("ask-of-other", "SEV-Milan", "other", CA),
        vcek("vcek", |_| ()),
        vlek("vlek", |_| ()),
        vlek("vlek-chip", |list| list.push(("4", "C5".repeat(64)))),
        vlek("vlek-no-cloud", |list| drop(list.pop())),
        vcek("vcek-cloud", |list| list.push(("5", ia5(CLOUD)))),
        vcek("vcek-no-chip", |list| drop(list.pop())),
        vcek("vcek-short-chip", |list| list[6].1 = "C5".repeat(8)),
        vcek("vcek-rome", |list| list[1].1 = ia5("Rome-B0")),
        vcek("vcek-no-product", |list| drop(list.remove(1))),
        vcek("vcek-of-genoa", |list| list[1].1 = ia5("Genoa")),
        vcek("vcek-no-tee", |list| drop(list.remove(3))),
        vcek("vcek-large", |list| list[2].1 = "02020104".into()),
        vcek("vcek-unused", |list| list.push(("3.5", "020101".into()))),
        vcek("vcek-fmc", |list| list.push(("3.9", "020101".into()))),
        vcek("vcek-short", |_| ()),
        vcek("vcek-ca", |_| ()),
        vcek("vcek-pkcs1", |_| ()),
        vcek("vcek-p256", |_| ()),
        vcek("vcek-name", |_| ()),
        vcek("vcek-usages", |_| ()),
        leaf("vcek-of-asvk", "asvk", extensions(|_| ())),
        leaf("vlek-of-ask", "ask", extensions(of_vlek)),
    ];
    for made in &mut all {
        match made.name {
            "vcek-short" | "ask-short" => made.days = 30,
            "vcek-pkcs1" => made.signature = "-sha384",
            "vcek-ca" => made.extensions += CA,
            "vcek-p256" => made.key = "p256",
            "vcek-name" => made.subject = "SEV-VECK",
            "vcek-usages" => {
                let usages: Vec<_> = (0..300)
                    .map(|it| format!("1.3.6.1.4.1.99999.{it}"))
                    .collect();
                made.extensions += &format!("extendedKeyUsage={}\n", usages.join(","));
            }
            _ => {}
        }
    }
    all
}

impl Hierarchy {
    pub fn get() -> &'static Hierarchy {
        static ONE: OnceLock<Hierarchy> = OnceLock::new();
        ONE.get_or_init(Hierarchy::new)
    }

    fn new() -> Hierarchy {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let made = certificates();
        let keys: BTreeSet<_> = made.iter().map(|made| made.key).collect();
        for key in keys {
            let algorithm = match key {
                "vcek" | "vlek" => "EC -pkeyopt ec_paramgen_curve:P-384",
                "p256" => "EC -pkeyopt ec_paramgen_curve:P-256",
                _ => "RSA -pkeyopt rsa_keygen_bits:2048",
            };
            openssl(
                at,
                &format!("genpkey -algorithm {algorithm} -out {key}.key"),
            );
        }
        for Made {
            name,
            key,
            subject,
            issuer,
            extensions,
            days,
            signature,
        } in made
        {
            fs::write(at.join("extensions"), format!("[all]\n{extensions}")).unwrap();
            openssl(
                at,
                &format!("req -new -key {key}.key -subj /CN={subject} -out request"),
            );
            let signer = match issuer {
                "" => format!("-signkey {key}.key"),
                issuer => format!("-CA {issuer}.pem -CAkey {issuer}.key"),
            };

            openssl(
                at,
                &format!(
                    "x509 -req -in request {signer} -days {days} -set_serial {serial} -extfile extensions -extensions all {signature} -out {name}.pem",
                    serial = subject.len()
                ),
            );
        }
        let key = |name: &str| {
            openssl(
                at,
                &format!("pkcs8 -topk8 -nocrypt -in {name}.key -outform DER -out pkcs8"),
            );
            let pkcs8 = PrivatePkcs8KeyDer::from(fs::read(at.join("pkcs8")).unwrap());
            let (algorithm, random) = (&ECDSA_P384_SHA384_FIXED_SIGNING, SystemRandom::new());
            EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.secret_pkcs8_der(), &random).unwrap()
        };
        let (vcek, vlek) = (key("vcek"), key("vlek"));
        Hierarchy { folder, vcek, vlek }
    }

    pub fn certificate(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.folder.path().join(format!("{name}.pem"))).unwrap()
    }

    /// Returns a list of revoked certificates in DER with these serial numbers (two digits each), which is valid from and until these times
    /// (`20250101000000Z`). `signer` is the name of a certificate.
    pub fn list(&self, signer: &str, serials: &[&str], from: &str, until: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let (at, of) = (folder.path(), self.folder.path().display());
        let settings = "[all]\ndatabase=index\ndefault_md=sha384\ncrlnumber=number\ncrl_extensions=extensions\n\
                        [extensions]\nauthorityKeyIdentifier=keyid\n";
        fs::write(at.join("settings"), settings).unwrap();
        fs::write(at.join("number"), "01\n").unwrap();
        let line = |serial: &&str| {
            format!("R\t350101000000Z\t240101000000Z\t{serial}\tunknown\t/CN=revoked\n")
        };
        let index: String = serials.iter().map(line).collect();
        fs::write(at.join("index"), index).unwrap();
        openssl(
            at,
            &format!(
                "ca -gencrl -config settings -name all -keyfile {of}/{signer}.key -cert {of}/{signer}.pem -crl_lastupdate {from} \
                 -crl_nextupdate {until} -sigopt rsa_padding_mode:pss -sigopt rsa_pss_saltlen:48 -out list.pem"
            ),
        );
        openssl(at, "crl -in list.pem -outform DER -out list.der");
        fs::read(at.join("list.der")).unwrap()
    }

    /// Signs a report with the key that it names: that of the chip, or that of the cloud.
    pub fn sign(&self, report: &mut [u8]) {
        let key = match (report[0x48] >> 2) & 7 {
            1 => &self.vlek,
            _ => &self.vcek,
        };
        let signature = key.sign(&SystemRandom::new(), &report[..0x2a0]).unwrap();
        for (half, at) in signature.as_ref().chunks(48).zip([0x2a0, 0x2e8]) {
            let little_endian: Vec<u8> = half.iter().rev().copied().collect();
            report[at..at + 48].copy_from_slice(&little_endian);
        }
    }
}

/// Returns a report of version 5 that is correct, without its signature.
pub fn correct_report() -> Vec<u8> {
    let mut report = vec![0; LEN];
    let mut put = |at: usize, bytes: &[u8]| report[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[5]);
    put(4, &[7]);
    put(8, &0x0302_0125_u64.to_le_bytes());
    put(0x34, &[1]);
    put(0x40, &[0b10_1000]);
    put(0x90, &[0xaa; 48]);
    put(0xc0, &[0xbb; 32]);
    put(0xe0, &[0xcc; 48]);
    put(0x110, &[0xdd; 48]);
    put(0x48, &[1]);
    for at in [0x38, 0x180, 0x1e0, 0x1f0] {
        put(at, &[4, 1, 0, 0, 0, 0, 0x18, 0xdb]);
    }
    put(0x188, &[0x19, 1, 1]);
    put(0x1a0, &CHIP);
    put(0x1e8, &[40, 58, 1, 0, 40, 58, 1]);
    put(0x1f8, &[3]);
    put(0x200, &[7]);
    report
}

/// Turns a report into one that a VLEK signs: it names no chip.
pub fn sign_by_the_cloud(report: &mut [u8]) {
    report[0x48] |= 1 << 2;
    report[0x1a0..0x1e0].fill(0);
}
