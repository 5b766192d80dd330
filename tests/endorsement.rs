//! The endorsement key of a TPM, against swtpm with certificates of its local authority, and tpm2-tools.

use std::fs;
use std::path::{Path, PathBuf};

use attest::tpm::{Credential, EndorsementKind, Error, Location, Tpm};
use support::openssl::openssl;
use support::swtpm::{self, Swtpm};
use tempfile::TempDir;

/// A TPM as its vendor delivers it.
struct Delivered {
    tpm: Swtpm,
    folder: TempDir,
}

impl Delivered {
    fn start() -> Delivered {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        fs::create_dir(&state).unwrap();
        swtpm::manufacture(&state, &folder.path().join("authority"));
        Delivered {
            tpm: Swtpm::start_in(&state),
            folder,
        }
    }

    fn location(&self) -> Location {
        self.tpm.location().parse().unwrap()
    }

    fn open(&self) -> Tpm {
        Tpm::open(&self.location()).unwrap()
    }

    fn authority(&self) -> PathBuf {
        self.folder.path().join("authority")
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Makes the endorsement key with tpm2-tools; returns the file with its public part (TPM2B_PUBLIC).
    fn endorsement_key_of_tpm2_tools(&self, algorithm: &str) -> String {
        let (context, public) = (self.file("ek.ctx"), self.file("ek.pub"));
        let arguments = ["-c", &context, "-G", algorithm, "-u", &public];
        self.tpm.tool("tpm2_createek", &arguments);
        self.tpm.tool("tpm2_flushcontext", &["-t"]);
        public
    }

    /// Makes a credential for a TPM2B_PUBLIC and the Name of an attestation key with tpm2-tools, which need no TPM for that.
    fn credential_of_tpm2_tools(&self, public: &str, name: &str, secret: &[u8]) -> Credential {
        let (plain, made) = (self.file("secret"), self.file("credential"));
        fs::write(&plain, secret).unwrap();
        let arguments = ["-T", "none", "-u", public, "-s", &plain, "-n", name];
        self.tpm.tool(
            "tpm2_makecredential",
            &[&arguments[..], &["-o", &made]].concat(),
        );
        read_credential(Path::new(&made))
    }

    /// Returns the Name of the attestation key in hexadecimal, as tpm2-tools read it.
    fn key_name(&self) -> String {
        self.open().attestation_key().unwrap();
        let name = self.file("name");
        self.tpm
            .tool("tpm2_readpublic", &["-c", "0x81008f01", "-n", &name]);
        hex(&fs::read(name).unwrap())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads the file form of tpm2-tools: magic, version, then both structures with their lengths.
fn read_credential(file: &Path) -> Credential {
    let bytes = fs::read(file).unwrap();
    assert_eq!(bytes[..8], [0xba, 0xdc, 0xc0, 0xde, 0, 0, 0, 1]);
    let (blob, rest) = sized(&bytes[8..]);
    let (secret, _) = sized(rest);
    Credential { blob, secret }
}

fn sized(bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let end = 2 + usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
    (bytes[2..end].to_vec(), &bytes[end..])
}

const ALGORITHMS: [(EndorsementKind, &str); 3] = [
    (EndorsementKind::Rsa2048, "rsa2048"),
    (EndorsementKind::P256, "ecc256"),
    (EndorsementKind::P384, "ecc384"),
];

#[test]
fn a_tpm_tells_the_certificates_of_its_endorsement_keys() {
    let delivered = Delivered::start();
    let found = delivered.open().endorsements().unwrap();
    let kinds: Vec<_> = found.iter().map(|endorsement| endorsement.kind).collect();
    assert_eq!(kinds, [EndorsementKind::Rsa2048, EndorsementKind::P384]);
    for endorsement in found {
        assert!(endorsement.chain.is_empty());
        let file = delivered.folder.path().join("certificate.der");
        fs::write(file, &endorsement.certificate).unwrap();
        let text = openssl(
            delivered.folder.path(),
            "x509 -inform DER -in certificate.der -noout -issuer",
        );
        assert!(text.contains("swtpm-localca"), "{text}");
    }
    let plain = Swtpm::start();
    let mut tpm = Tpm::open(&plain.location().parse().unwrap()).unwrap();
    assert_eq!(tpm.endorsements().unwrap(), []);
}

#[test]
fn a_credential_of_tpm2_tools_is_decrypted_with_every_template() {
    let delivered = Delivered::start();
    let name = delivered.key_name();
    for (kind, algorithm) in ALGORITHMS {
        let public = delivered.endorsement_key_of_tpm2_tools(algorithm);
        let credential = delivered.credential_of_tpm2_tools(&public, &name, &[7; 32]);
        // more often than the TPM has slots for keys and sessions
        for _ in 0..5 {
            let mut tpm = delivered.open();
            let secret = tpm.activate(kind, &credential).unwrap();
            assert_eq!(secret.expose(), [7; 32], "{kind:?}");
        }
        let other = format!("000b{}", "ab".repeat(32));
        let of_another_key = delivered.credential_of_tpm2_tools(&public, &other, &[7; 32]);
        let mut altered = credential.clone();
        *altered.blob.last_mut().unwrap() ^= 1;
        let wrong_secret = Credential {
            secret: of_another_key.secret.clone(),
            ..credential.clone()
        };
        let empty = Credential {
            blob: vec![],
            secret: vec![],
        };
        for wrong in [of_another_key, altered, wrong_secret, empty] {
            let mut tpm = delivered.open();
            for _ in 0..4 {
                let error = tpm.activate(kind, &wrong).unwrap_err();
                assert!(matches!(error, Error::Credential), "{kind:?}: {error}");
            }
            // what failed leaves nothing behind
            let secret = tpm.activate(kind, &credential).unwrap();
            assert_eq!(secret.expose(), [7; 32], "{kind:?}");
        }
    }
}
