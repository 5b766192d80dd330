//! Tests the endorsement key of a TPM with swtpm, whose certificates come from a local authority, and with tpm2-tools.

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cli::trust::policy::Edit;
use endorsement::certificate::verify;
use endorsement::credential::EndorsementKey;
use endorsement::model;
use endorsement::roots::{self, TpmRoot};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use support::foreign::go_module;
use support::openssl::openssl;
use support::swtpm::{self, Swtpm};
use tempfile::TempDir;
use tpm::{Credential, EndorsementKind, Error, KeyEndorsement, KeySource, Location, Tpm};
use verifier::policy::Fault;
use verifier::sources::offline;
use verifier::{
    CertifiedKey, Evidence, Exception, Issuer, KeyName, MachineIdentity, Measurement, Policy,
    Variant, qemu_vtpm, variant,
};

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
        let _ = fs::remove_file(&context);
        let arguments = ["-c", &context, "-G", algorithm, "-u", &public];
        self.tpm.tool("tpm2_createek", &arguments);
        self.tpm.tool("tpm2_flushcontext", &["-t"]);
        public
    }

    /// Makes a primary key with the template L-1 or L-2 and this unique field; returns the file with its public part (TPM2B_PUBLIC).
    fn primary_of_tpm2_tools(&self, scheme: &str, unique: &[u8]) -> String {
        let [context, public, policy, field] =
            ["own.ctx", "own.pub", "policy", "unique"].map(|it| self.file(it));
        fs::write(&policy, unhex(POLICY_A)).unwrap();
        fs::write(&field, unique).unwrap();
        let scheme = format!("{scheme}:null:aes128cfb");
        let attributes =
            "fixedtpm|fixedparent|sensitivedataorigin|adminwithpolicy|restricted|decrypt";
        let make = [
            "-C", "e", "-c", &context, "-G", &scheme, "-g", "sha256", "-a", attributes, "-L",
            &policy, "-u", &field,
        ];
        self.tpm.tool("tpm2_createprimary", &make);
        let read = ["-c", &context, "-f", "tss", "-o", &public];
        self.tpm.tool("tpm2_readpublic", &read);
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

    /// Returns the endorsement key that tpm2-tools made last, from its SubjectPublicKeyInfo.
    fn endorsement_key(&self, kind: EndorsementKind) -> EndorsementKey {
        let (context, info) = (self.file("ek.ctx"), self.file("ek.der"));
        let arguments = ["-c", &context, "-f", "der", "-o", &info];
        self.tpm.tool("tpm2_readpublic", &arguments);
        self.tpm.tool("tpm2_flushcontext", &["-t"]);
        EndorsementKey::parse(kind, &fs::read(info).unwrap()).unwrap()
    }

    /// Decrypts a credential with tpm2-tools and the endorsement key that they made last.
    fn activate_by_tpm2_tools(&self, kind: EndorsementKind, credential: &Credential) -> Vec<u8> {
        let (made, plain) = (self.file("made"), self.file("plain"));
        write_credential(Path::new(&made), credential);
        let (session, context) = (self.file("session"), self.file("ek.ctx"));
        let mut arguments = vec![
            "-c",
            "0x81008f01",
            "-C",
            &context,
            "-i",
            &made,
            "-o",
            &plain,
        ];
        let by_session = format!("session:{session}");
        if kind != EndorsementKind::P384 {
            let start = ["--policy-session", "-S", &session];
            self.tpm.tool("tpm2_startauthsession", &start);
            let policy = ["-S", &session, "-c", "endorsement"];
            self.tpm.tool("tpm2_policysecret", &policy);
            arguments.extend(["-P", &by_session]);
        }
        self.tpm.tool("tpm2_activatecredential", &arguments);
        self.tpm.tool("tpm2_flushcontext", &["-t"]);
        self.tpm.tool("tpm2_flushcontext", &["-l"]);
        fs::read(plain).unwrap()
    }

    /// Certifies the P-256 endorsement key by the local authority, and writes this certificate and that of the authority into the TPM.
    fn add_p256_certificate(&self) {
        self.endorsement_key_of_tpm2_tools("ecc256");
        let (context, key) = (self.file("ek.ctx"), self.file("ek.pem"));
        let arguments = ["-c", &context, "-f", "pem", "-o", &key];
        self.tpm.tool("tpm2_readpublic", &arguments);
        self.tpm.tool("tpm2_flushcontext", &["-t"]);
        let folder = self.folder.path();
        let extensions = "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,keyAgreement\nextendedKeyUsage=2.23.133.8.1\n\
                          subjectAltName=critical,dirName:model\n[model]\nCN=vTPM\n";
        fs::write(folder.join("extensions"), extensions).unwrap();
        openssl(
            folder,
            "ecparam -name prime256v1 -genkey -noout -out any.key",
        );
        openssl(folder, "req -new -key any.key -subj / -out request");
        openssl(
            folder,
            "x509 -req -in request -force_pubkey ek.pem -extfile extensions -days 2 -set_serial 7 -sha256 -outform DER \
             -out p256.der -CA authority/certificate.pem -CAkey authority/signing-key.pem",
        );
        openssl(
            folder,
            "x509 -in authority/certificate.pem -outform DER -out authority.der",
        );
        for (index, file) in [("0x01c0000a", "p256.der"), ("0x01c00100", "authority.der")] {
            let file = self.file(file);
            // with padding
            let size = (fs::read(&file).unwrap().len() + 50).to_string();
            let attributes = "ownerwrite|ownerread|authread";
            let define = ["-C", "o", index, "-s", &size, "-a", attributes];
            self.tpm.tool("tpm2_nvdefine", &define);
            self.tpm
                .tool("tpm2_nvwrite", &["-C", "o", index, "-i", &file]);
        }
    }

    /// Writes this value into a new NV index.
    fn write_index(&self, index: u32, value: &[u8]) {
        let (file, index) = (self.file("nv"), format!("{index:#x}"));
        fs::write(&file, value).unwrap();
        let size = value.len().to_string();
        let attributes = "ownerwrite|ownerread|authread";
        let define = ["-C", "o", &index, "-s", &size, "-a", attributes];
        self.tpm.tool("tpm2_nvdefine", &define);
        let write = ["-C", "o", &index, "-i", &file];
        self.tpm.tool("tpm2_nvwrite", &write);
    }

    /// Returns the root of the local authority, with the authority itself if `whole`: PEM.
    fn root(&self, whole: bool) -> String {
        let root = swtpm::root_of(&self.authority());
        if whole {
            root + &swtpm::issuer_of(&self.authority())
        } else {
            root
        }
    }

    /// Returns the Name of the attestation key in hexadecimal, as tpm2-tools read it.
    fn key_name(&self) -> String {
        self.open().attestation_key(KeySource::Own).unwrap();
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

fn write_credential(file: &Path, credential: &Credential) {
    let mut bytes = vec![0xba, 0xdc, 0xc0, 0xde, 0, 0, 0, 1];
    for part in [&credential.blob, &credential.secret] {
        bytes.extend((part.len() as u16).to_be_bytes());
        bytes.extend_from_slice(part);
    }
    fs::write(file, bytes).unwrap();
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

const POLICY_A: &str = "837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa";

/// Returns the template L-1 or L-2 with another unique field: a point without its second coordinate.
fn template(kind: EndorsementKind) -> Vec<u8> {
    let common = format!("000b000300b20020{POLICY_A}000600800043");
    unhex(&match kind {
        EndorsementKind::Rsa2048 => {
            format!("0001{common}00100800000000000100{}", "5a".repeat(256))
        }
        _ => format!("0023{common}0010000300100020{}0000", "5a".repeat(32)),
    })
}

/// Vendors may write another template into the NV index behind the certificate, and a nonce, with which the certified key is made.
#[test]
fn a_credential_is_for_the_key_of_the_vendors_own_template_and_nonce() {
    let (rsa, ecc) = (EndorsementKind::Rsa2048, EndorsementKind::P256);
    // tpm2-tools take lengths in the byte order of the machine, and only the first coordinate of a point. A nonce of zeros gives the
    // point of the profile, and a nonce without a template has no effect
    let rsa_with = |modulus: &str| Some(("rsa2048", format!("0001{modulus}")));
    for (kind, has_template, nonce, unique) in [
        (rsa, true, vec![], rsa_with(&"5a".repeat(256))),
        (
            rsa,
            true,
            vec![7; 20],
            rsa_with(&("07".repeat(20) + &"00".repeat(236))),
        ),
        (rsa, true, vec![7; 256], rsa_with(&"07".repeat(256))),
        (rsa, false, vec![7; 20], None),
        (
            ecc,
            true,
            vec![],
            Some(("ecc256", format!("2000{}", "5a".repeat(32)))),
        ),
        (ecc, true, vec![0; 20], None),
    ] {
        let delivered = Delivered::start();
        if has_template {
            delivered.write_index(kind as u32 + 2, &template(kind));
        }
        if !nonce.is_empty() {
            delivered.write_index(kind as u32 + 1, &nonce);
        }
        let public = match unique {
            Some((scheme, unique)) => delivered.primary_of_tpm2_tools(scheme, &unhex(&unique)),
            None if kind == rsa => delivered.endorsement_key_of_tpm2_tools("rsa2048"),
            None => delivered.endorsement_key_of_tpm2_tools("ecc256"),
        };
        let name = delivered.key_name();
        let credential = delivered.credential_of_tpm2_tools(&public, &name, b"of the vendor");
        let secret = delivered
            .open()
            .activate(KeySource::Own, kind, &credential)
            .unwrap_or_else(|error| panic!("{kind:?}, nonce {nonce:?}: {error}"));
        assert_eq!(secret.expose(), b"of the vendor");
    }
}

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
            let secret = tpm.activate(KeySource::Own, kind, &credential).unwrap();
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
                let error = tpm.activate(KeySource::Own, kind, &wrong).unwrap_err();
                assert!(matches!(error, Error::Credential), "{kind:?}: {error}");
            }
            // a failed attempt leaves no object in the TPM
            let secret = tpm.activate(KeySource::Own, kind, &credential).unwrap();
            assert_eq!(secret.expose(), [7; 32], "{kind:?}");
        }
    }
}

#[test]
fn tpm2_tools_and_the_tpm_decrypt_our_credential_with_every_template() {
    let (delivered, other) = (Delivered::start(), Delivered::start());
    let name = unhex(&delivered.key_name());
    for (kind, algorithm) in ALGORITHMS {
        delivered.endorsement_key_of_tpm2_tools(algorithm);
        let key = delivered.endorsement_key(kind);
        let credential = key.make_credential(&name, &[9; 32]).unwrap();
        let secret = delivered.activate_by_tpm2_tools(kind, &credential);
        assert_eq!(secret, [9; 32], "{kind:?}");
        let secret = delivered
            .open()
            .activate(KeySource::Own, kind, &credential)
            .unwrap();
        assert_eq!(secret.expose(), [9; 32], "{kind:?}");
        // a wrong Name, another TPM
        let of_another_key = key.make_credential(&[0; 34], &[9; 32]).unwrap();
        for (tpm, credential) in [(&delivered, &of_another_key), (&other, &credential)] {
            let error = tpm
                .open()
                .activate(KeySource::Own, kind, credential)
                .unwrap_err();
            assert!(matches!(error, Error::Credential), "{kind:?}: {error}");
            // it still works
            tpm.open().attestation_key(KeySource::Own).unwrap();
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// Returns the policy of a fresh machine.
fn policy() -> Policy {
    let fresh = Measurement {
        expected: vec![0; 32],
        warn_only: false,
    };
    let policy = Policy::new(BTreeMap::from([(15, fresh)])).unwrap();
    policy.permitting(Exception::AnyImage)
}

fn qemu() -> &'static Variant {
    Variant::named(variant::DEFAULT).unwrap()
}

fn peer(key: &[u8], endorsements: &[KeyEndorsement]) -> MachineIdentity {
    MachineIdentity {
        key: key.into(),
        endorsements: endorsements.into(),
    }
}

const USER_DATA: &[u8] = b"what the connection binds";
const NONCE: &[u8] = b"the verifier's own random number";

#[test]
fn a_key_is_certified_by_the_root_of_its_vendor() {
    let (delivered, other) = (Delivered::start(), Delivered::start());
    let key = delivered.open().attestation_key(KeySource::Own).unwrap();
    let name = KeyName::of(&key);
    let found = delivered.open().endorsements().unwrap();
    let document = qemu_vtpm::issuer(delivered.location(), None)
        .issue(USER_DATA, NONCE)
        .unwrap();
    let certified = policy().certified_by([delivered.root(true)]).unwrap();
    let validator = endorsement::validator(qemu(), certified.clone(), &offline()).unwrap();
    let properties = validator.properties();
    assert!(properties.challenges && !properties.believes_any_tpm);

    // the P-384 key before the RSA key; then each of them
    for (endorsements, kind) in [
        (&found[..], EndorsementKind::P384),
        (&found[..1], EndorsementKind::Rsa2048),
        (&found[1..], EndorsementKind::P384),
    ] {
        let challenge = validator
            .challenge(&peer(&key, endorsements))
            .unwrap()
            .unwrap();
        assert_eq!((challenge.kind, challenge.certified_by.len()), (kind, 64));
        let secret = delivered
            .open()
            .activate(KeySource::Own, kind, &challenge.credential);
        assert_eq!(secret.unwrap().expose(), &challenge.secret[..]);
        // a machine that has the certificate but not the TPM
        let error = other
            .open()
            .activate(KeySource::Own, kind, &challenge.credential);
        assert!(matches!(error, Err(Error::Credential)));
    }
    let certified_by = |key| Evidence {
        certified: Some(key),
        ..Evidence::new(&document, NONCE)
    };
    let certified_key = |name| CertifiedKey { name, tpm: None };
    let own = certified_key(name);
    let identified = validator.judge(&certified_by(&own)).unwrap();
    assert_eq!(identified.user_data, USER_DATA);

    // the old form, which has no challenge, and the certified key of another machine
    let of_another = KeyName::of(&other.open().attestation_key(KeySource::Own).unwrap());
    let of_another = certified_key(of_another);
    for refused in [
        validator.judge(&Evidence::new(&document, NONCE)),
        validator.judge(&certified_by(&of_another)),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("only the strong form"), "{error}");
    }

    // a named key needs no certificate, although other keys do
    let both = certified.clone().believing([name]).unwrap();
    let both = endorsement::validator(qemu(), both, &offline()).unwrap();
    assert!(both.challenge(&peer(&key, &[])).unwrap().is_none());
    assert!(both.judge(&Evidence::new(&document, NONCE)).is_ok());

    // a program that does not verify certificates
    let plain = qemu().validator_for(certified, &offline()).unwrap();
    let Err(error) = plain.challenge(&peer(&key, &found)) else {
        panic!("the policy was ignored")
    };
    assert!(error.to_string().contains("does not verify"), "{error}");
}

/// The local authority of swtpm names it as IBM's: id:00001014.
#[test]
fn the_certificate_shows_whose_tpm_it_is() {
    let delivered = Delivered::start();
    let key = delivered.open().attestation_key(KeySource::Own).unwrap();
    let found = delivered.open().endorsements().unwrap();
    let issuer = qemu_vtpm::issuer(delivered.location(), None);
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let root = delivered.root(true);
    let with = |tpm: &str, keys: &[KeyName]| {
        let policy = policy().certified_by([root.clone()]).unwrap();
        let policy = policy.believing(keys.iter().copied()).unwrap();
        let mut json: serde_json::Value =
            serde_json::from_str(&cli::trust::policy::text(&policy)).unwrap();
        json["tpm"] = serde_json::from_str(tpm).unwrap();
        let policy = Policy::from_json(&json.to_string());
        policy.and_then(|policy| endorsement::validator(qemu(), policy, &offline()))
    };
    let judge = |tpm: &str, keys: &[KeyName]| {
        let validator = with(tpm, keys).unwrap();
        // a listed key needs a certificate too
        let challenge = validator.challenge(&peer(&key, &found)).unwrap().unwrap();
        let certified = CertifiedKey {
            name: KeyName::of(&key),
            tpm: challenge.tpm,
        };
        let evidence = Evidence {
            certified: Some(&certified),
            ..Evidence::new(&document, NONCE)
        };
        let judged = validator.judge(&evidence).map(|it| it.tpm.unwrap());
        judged.map(|tpm| format!("{} {} {:?}", tpm.vendor, tpm.model, tpm.firmware))
    };
    let own = r#"{"vendors":["IFX","id:00001014"]}"#;
    for keys in [&[][..], &[KeyName::of(&key)]] {
        // the attestation key is in the owner hierarchy
        assert_eq!(judge(own, keys).unwrap(), "id:00001014 swtpm None");
        let error = judge(r#"{"vendors":["IFX"]}"#, keys).unwrap_err();
        assert!(
            error.text.contains("vendor of its TPM is id:00001014"),
            "{error}"
        );
    }
    let listed = with(own, &[KeyName::of(&key)]).unwrap();
    let error = listed.judge(&Evidence::new(&document, NONCE)).unwrap_err();
    assert!(
        error
            .text
            .contains("no verified certificate of its endorsement key"),
        "{error}"
    );
    assert!(listed.challenge(&peer(&key, &[])).is_err());
    // the quote of such a machine does not show the version
    let floors = r#"{"floors":[{"vendor":"IFX","minimum":"0x1"}]}"#;
    let error = with(floors, &[]).err().unwrap().to_string();
    assert!(
        error.contains("tpm.floors: the attestation variant qemu-vtpm cannot check"),
        "{error}"
    );
    // without roots no certificate counts
    let text =
        r#"{"measurements":{"4":"00"},"tpm":{"vendors":["IFX"]}}"#.replace("00", &"11".repeat(32));
    let error = Policy::from_json(&text).unwrap_err().to_string();
    assert!(
        error.contains("tpm: only a certified endorsement key"),
        "{error}"
    );
}

#[test]
fn what_is_not_certified_is_refused_by_its_own_text() {
    let (delivered, other) = (Delivered::start(), Delivered::start());
    let key = delivered.open().attestation_key(KeySource::Own).unwrap();
    let found = delivered.open().endorsements().unwrap();
    let challenge = |roots: Vec<String>, key: &[u8], endorsements: &[KeyEndorsement]| {
        let policy = policy().certified_by(roots).unwrap();
        let validator = endorsement::validator(qemu(), policy, &offline()).unwrap();
        validator.challenge(&peer(key, endorsements))
    };
    let refused = |roots, key: &[u8], endorsements: &[KeyEndorsement], why: &str| {
        let Err(error) = challenge(roots, key, endorsements) else {
            panic!("accepted, expected: {why}")
        };
        assert!(error.to_string().contains(why), "{error}, expected: {why}");
    };
    let good = || vec![delivered.root(true)];
    refused(good(), &key, &[], "swtpm_setup --create-ek-cert");
    refused(good(), b"", &found, "attestation key is truncated");
    let mut signs_anything = key.clone();
    signs_anything[5] &= !1; // restricted
    refused(
        good(),
        &signs_anything,
        &found,
        "can sign data that the TPM did not",
    );
    // the intermediate authority is missing; the other one has the same name
    let root_alone = vec![delivered.root(false)];
    refused(root_alone.clone(), &key, &found, "none of the roots");
    refused(vec![other.root(true)], &key, &found, "a signature is wrong");
    let google = roots::names().map(String::from).collect();
    refused(google, &key, &found, "none of the roots");

    // now the TPM holds the intermediate authority
    delivered.add_p256_certificate();
    let found = delivered.open().endorsements().unwrap();
    let kinds: Vec<_> = found.iter().map(|endorsement| endorsement.kind).collect();
    assert_eq!(kinds, EndorsementKind::ALL);
    let made = challenge(root_alone, &key, &found).unwrap().unwrap();
    assert_eq!(made.kind, EndorsementKind::P256);
    let secret = delivered
        .open()
        .activate(KeySource::Own, made.kind, &made.credential);
    assert_eq!(secret.unwrap().expose(), &made.secret[..]);

    let unknown = policy().certified_by(["acme".into()]).unwrap();
    let Err(error) = endorsement::validator(qemu(), unknown, &offline()) else {
        panic!("the root was ignored")
    };
    assert_eq!(error.fault, Fault::Root);
    assert!(
        error
            .to_string()
            .contains("endorsementRoots: the root \"acme\" is not known"),
        "{error}"
    );
}

/// Connects two machines over attested TLS; returns the error of each side.
fn meet(client: atls::Client, server: atls::Server) -> [Option<String>; 2] {
    let soon = Instant::now() + Duration::from_secs(60);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let server = thread::spawn(move || server.handshake(far, soon).map(|_| ()));
    let client = client.connect(near, soon).map(|_| ());
    [client, server.join().unwrap()].map(|result| result.err().map(|error| error.to_string()))
}

#[test]
fn the_strong_form_proves_both_tpms_in_one_connection() {
    let (one, other, plain) = (Delivered::start(), Delivered::start(), Swtpm::start());
    let issuer =
        |location: Location| -> Arc<dyn Issuer> { Arc::new(qemu_vtpm::issuer(location, None)) };
    let demand = |root: String| {
        let policy = policy().certified_by([root]).unwrap();
        vec![endorsement::validator(qemu(), policy, &offline()).unwrap()]
    };
    let server = || {
        atls::Server::new(
            Some(issuer(one.location())),
            verifier::judge_of_any(demand(other.root(true))),
        )
    };
    let client = |location| {
        atls::Client::new(
            Some(issuer(location)),
            verifier::judge_of_any(demand(one.root(true))),
        )
    };
    assert_eq!(meet(client(other.location()), server()), [None, None]);

    let refused = |client, server, by_client: Option<&str>, by_server: Option<&str>| {
        let errors = meet(client, server);
        for (error, why) in errors.iter().zip([by_client, by_server]) {
            let error = error.as_deref().unwrap();
            assert!(error.contains(why.unwrap_or("")), "{error}");
        }
    };
    let plain = plain.location().parse().unwrap();
    let no_certificate = Some("swtpm_setup --create-ek-cert");
    refused(client(plain), server(), None, no_certificate);
    // each side has the root of the other side
    let swapped = atls::Client::new(
        Some(issuer(other.location())),
        verifier::judge_of_any(demand(other.root(true))),
    );
    refused(swapped, server(), Some("a signature is wrong"), None);
    let old = client(other.location()).only_old();
    refused(old, server(), None, None);
}

/// Nuvoton and others write a header before the certificate: a tag, a type, and the length.
#[test]
fn a_certificate_behind_a_header_is_found() {
    let tpm = Swtpm::start();
    let folder = tempfile::tempdir().unwrap();
    let certificate = [&[0x30, 0x81, 128][..], &[7; 128]].concat();
    let file = folder.path().join("stored");
    fs::write(&file, [&[0x10, 1, 0, 0, 131][..], &certificate].concat()).unwrap();
    let index = (EndorsementKind::P256 as u32).to_string();
    let rights = "ownerread|ownerwrite|authread|authwrite";
    tpm.tool(
        "tpm2_nvdefine",
        &[&index, "-C", "o", "-s", "136", "-a", rights],
    );
    tpm.tool(
        "tpm2_nvwrite",
        &[&index, "-C", "o", "-i", file.to_str().unwrap()],
    );
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let identity = issuer.identity().unwrap();
    assert_eq!(identity.endorsements[0].certificate, certificate);
}

/// Genuine certificates of shielded VMs of Google, of 2022; the roots are of the same module. Attestation keys have certificates from
/// the same authority, so their key usage must be refused.
#[test]
fn genuine_certificates_of_google_lead_to_the_roots_in_this_program() {
    let module = go_module("event_logs_go", "github.com/google/go-tpm-tools");
    let folder = module.join("internal/test/certificates");
    let roots: Vec<_> = roots::names()
        .map(|name| TpmRoot::parse(name).unwrap())
        .collect();
    // 2024-01-01: the certificates are valid from 2022 to 2052
    let time = UnixTime::since_unix_epoch(Duration::from_secs(1_704_067_200));
    let model_of = |file| (file == "uca").then_some("GOOG vTPM");
    for (file, root) in [("uca", "google-2018"), ("pca", "google-2022")] {
        for (algorithm, kind) in [
            ("rsa", EndorsementKind::Rsa2048),
            ("ecc", EndorsementKind::P256),
        ] {
            let read = |usage: &str| {
                let file = folder.join(format!("{file}_tpm_{algorithm}_{usage}_cert.pem"));
                let certificate = CertificateDer::from_pem_file(file).unwrap();
                KeyEndorsement {
                    kind,
                    certificate: certificate.to_vec(),
                    chain: vec![],
                }
            };
            let (key, found) = verify(&read("enc"), &roots, time).unwrap();
            assert_eq!(found, root);
            let tpm = model::named(&read("enc").certificate).map(|tpm| tpm.to_string());
            assert_eq!(tpm.as_deref(), model_of(file));
            assert!(key.make_credential(&[0; 34], &[1; 32]).is_ok());
            let error = verify(&read("sign"), &roots, time).unwrap_err();
            assert!(error.text.contains("(key usage)"), "{error}");
        }
    }
}

/// If a TPM cannot return its certificates, the program asks it again; after a TPM has returned them, the program does not ask it again.
#[test]
fn certificates_that_could_not_be_read_are_read_later() {
    let tpm = Swtpm::start();
    let folder = tempfile::tempdir().unwrap();
    // the index of the certificate exists, but nothing was written to it: TPM2_NV_Read fails
    let index = (EndorsementKind::P256 as u32).to_string();
    let rights = "ownerread|ownerwrite|authread|authwrite";
    tpm.tool(
        "tpm2_nvdefine",
        &[&index, "-C", "o", "-s", "131", "-a", rights],
    );
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let first = issuer.identity().unwrap();
    assert!(!first.key.is_empty() && first.endorsements.is_empty());
    assert_eq!(issuer.known_identity().unwrap(), first);

    let certificate = [&[0x30, 0x81, 128][..], &[7; 128]].concat();
    let file = folder.path().join("certificate");
    fs::write(&file, &certificate).unwrap();
    tpm.tool(
        "tpm2_nvwrite",
        &[&index, "-C", "o", "-i", file.to_str().unwrap()],
    );
    let end = Instant::now() + Duration::from_secs(120);
    while issuer.identity().unwrap().endorsements.is_empty() {
        assert!(Instant::now() < end, "the TPM is not asked again");
        thread::sleep(Duration::from_millis(500));
    }
    let known = issuer.known_identity().unwrap();
    assert_eq!(known.endorsements[0].certificate, certificate);
    assert_eq!(known.key, first.key);
}
