//! A hierarchy of our own, which has the shape of AMD's, and the report of a chip that it signs.

use std::fs;
use std::sync::OnceLock;

use hardware::snp::report::LEN;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use support::openssl::openssl;

/// Our own root, intermediate and chip, as openssl makes them.
pub struct Hierarchy {
    folder: tempfile::TempDir,
    key: EcdsaKeyPair,
}

/// The chip of [`Hierarchy`].
pub const CHIP: [u8; 64] = [0xc5; 64];

impl Hierarchy {
    pub fn get() -> &'static Hierarchy {
        static ONE: OnceLock<Hierarchy> = OnceLock::new();
        ONE.get_or_init(Hierarchy::new)
    }

    fn new() -> Hierarchy {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        const PSS: &str = "-sha384 -sigopt rsa_padding_mode:pss -sigopt rsa_pss_saltlen:48";
        let chip = "C5".repeat(64);
        let extensions = format!(
            "[ca]\nbasicConstraints=critical,CA:true\nkeyUsage=critical,keyCertSign,cRLSign\n[vcek]\n\
             1.3.6.1.4.1.3704.1.1=DER:020100\n\
             1.3.6.1.4.1.3704.1.2=DER:16084D696C616E2D4230\n\
             1.3.6.1.4.1.3704.1.3.1=DER:020104\n1.3.6.1.4.1.3704.1.3.2=DER:020101\n\
             1.3.6.1.4.1.3704.1.3.3=DER:020118\n1.3.6.1.4.1.3704.1.3.8=DER:020200DB\n\
             1.3.6.1.4.1.3704.1.4=DER:{chip}\n"
        );
        fs::write(at.join("extensions"), extensions).unwrap();
        for (name, subject, issuer, section) in [
            ("ark", "ARK-Milan", None, "ca"),
            // another key with the name of the root
            ("other", "ARK-Milan", None, "ca"),
            ("ask", "SEV-Milan", Some("ark"), "ca"),
            ("vcek", "SEV-VCEK", Some("ask"), "vcek"),
        ] {
            let algorithm = match name {
                "vcek" => "EC -pkeyopt ec_paramgen_curve:P-384",
                _ => "RSA -pkeyopt rsa_keygen_bits:2048",
            };
            openssl(
                at,
                &format!("genpkey -algorithm {algorithm} -out {name}.key"),
            );
            openssl(
                at,
                &format!("req -new -key {name}.key -subj /CN={subject} -out {name}.csr"),
            );
            let signer = match issuer {
                None => format!("-signkey {name}.key"),
                Some(issuer) => format!("-CA {issuer}.pem -CAkey {issuer}.key"),
            };
            openssl(
                at,
                &format!(
                    "x509 -req -in {name}.csr {signer} -days 3650 -set_serial {serial} -extfile extensions -extensions {section} {PSS} -out {name}.pem",
                    serial = subject.len()
                ),
            );
        }
        openssl(
            at,
            "pkcs8 -topk8 -nocrypt -in vcek.key -outform DER -out vcek.pkcs8",
        );
        let pkcs8 = PrivatePkcs8KeyDer::from(fs::read(at.join("vcek.pkcs8")).unwrap());
        let key = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P384_SHA384_FIXED_SIGNING,
            pkcs8.secret_pkcs8_der(),
            &SystemRandom::new(),
        );
        Hierarchy {
            folder,
            key: key.unwrap(),
        }
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

    /// Signs a report with the key of the chip.
    pub fn sign(&self, report: &mut [u8]) {
        let signature = self
            .key
            .sign(&SystemRandom::new(), &report[..0x2a0])
            .unwrap();
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
