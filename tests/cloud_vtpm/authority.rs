//! An authority of the tests in the place of a cloud's: a root, and an intermediate authority.

use base::der;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384,
    PKCS_RSA_SHA256, PublicKeyData, SignatureAlgorithm,
};

/// A fault that a test makes in a certificate.
pub type Alter = fn(&mut CertificateParams);

/// The ends of a certificate's validity as faults, with the reason of each refusal.
pub const WRONG_TIMES: [(Alter, &str); 2] = [
    (
        |params| params.not_after = rcgen::date_time_ymd(2021, 1, 1),
        "has expired",
    ),
    (
        |params| params.not_before = rcgen::date_time_ymd(2059, 1, 1),
        "not valid yet",
    ),
];

pub struct Authority {
    root: Issuer<'static, KeyPair>,
    root_pem: String,
    between: Issuer<'static, KeyPair>,
    between_der: Vec<u8>,
}

/// A key whose private part the tests do not have.
pub struct PublicKey {
    bytes: Vec<u8>,
    algorithm: &'static SignatureAlgorithm,
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

impl PublicKey {
    /// Returns the key of a TPMT_PUBLIC.
    pub fn of_tpm(public: &[u8]) -> PublicKey {
        match public[..2] {
            // TPMT_PUBLIC ends with the modulus, whose first bit is set
            [0, 1] => PublicKey::rsa(&public[public.len() - 256..]),
            // or with the coordinates, each behind its length
            _ => {
                let (x, y) = (public.len() - 66, public.len() - 32);
                PublicKey {
                    bytes: [&[4], &public[x..x + 32], &public[y..]].concat(),
                    algorithm: &PKCS_ECDSA_P256_SHA256,
                }
            }
        }
    }

    pub fn of_pair(pair: &KeyPair) -> PublicKey {
        PublicKey {
            bytes: pair.der_bytes().to_vec(),
            algorithm: pair.algorithm(),
        }
    }

    pub fn rsa(modulus: &[u8]) -> PublicKey {
        let modulus = der::element(der::INTEGER, &[&[0], modulus]);
        let exponent = der::element(der::INTEGER, &[&[1, 0, 1]]);
        PublicKey {
            bytes: der::element(der::SEQUENCE, &[&modulus, &exponent]),
            algorithm: &PKCS_RSA_SHA256,
        }
    }
}

impl Authority {
    pub fn new() -> Authority {
        Authority::altered(|_| ())
    }

    /// Makes one whose intermediate authority has a fault.
    pub fn altered(alter: fn(&mut CertificateParams)) -> Authority {
        let key = || KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        let (root_key, between_key) = (key(), key());
        let root_params = of_authority("the root");
        let root_pem = root_params.self_signed(&root_key).unwrap().pem();
        let root = Issuer::new(root_params, root_key);
        let mut params = of_authority("the authority between");
        // tcg-kp-EKCertificate and tcg-kp-AIKCertificate, as Azure's authorities have them
        params.extended_key_usages = [1, 3]
            .map(|usage| other_usage(&[2, 23, 133, 8, usage]))
            .into();
        alter(&mut params);
        let certificate = params.signed_by(&between_key, &root).unwrap();
        Authority {
            root,
            root_pem,
            between: Issuer::new(params, between_key),
            between_der: certificate.der().to_vec(),
        }
    }

    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }

    /// Returns the certificate of the intermediate authority.
    pub fn between(&self) -> &[u8] {
        &self.between_der
    }

    /// Certifies a key as the intermediate authority.
    pub fn certify(&self, params: &CertificateParams, key: &PublicKey) -> Vec<u8> {
        params.signed_by(key, &self.between).unwrap().der().to_vec()
    }

    /// Certifies a key as the root.
    pub fn certify_as_root(&self, params: &CertificateParams, key: &PublicKey) -> Vec<u8> {
        params.signed_by(key, &self.root).unwrap().der().to_vec()
    }
}

/// Returns the parts that all certificates have in common.
pub fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2060, 1, 1);
    params
}

fn of_authority(name: &str) -> CertificateParams {
    let mut params = params(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

/// Returns the certificate of an attestation key with this extended key usage.
pub fn of_attestation_key(name: &str, usage: Option<&[u64]>) -> CertificateParams {
    let mut params = params(name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usage.into_iter().map(other_usage).collect();
    params
}

pub fn other_usage(usage: &[u64]) -> ExtendedKeyUsagePurpose {
    ExtendedKeyUsagePurpose::Other(usage.to_vec())
}

/// Returns the extension with the address of the issuer's certificate.
pub fn published_at(place: &str) -> CustomExtension {
    let method = der::element(
        der::OBJECT_IDENTIFIER,
        &[&[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x30, 0x02]],
    );
    let uri = der::element(0x86, &[place.as_bytes()]);
    let description = der::element(der::SEQUENCE, &[&method, &uri]);
    let content = der::element(der::SEQUENCE, &[&description]);
    CustomExtension::from_oid_content(&[1, 3, 6, 1, 5, 5, 7, 1, 1], content)
}
