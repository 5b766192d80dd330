//! AMD's key distribution service (57230 "VCEK Certificate and KDS Interface", chapter 4):
//!
//! ```text
//! /vcek/v1/Milan/CHIP?blSPL=3&teeSPL=0&snpSPL=8&ucodeSPL=115             the certificate of a chip, DER
//! /vcek/v1/Turin/CHIP?fmcSPL=0&blSPL=0&teeSPL=0&snpSPL=0&ucodeSPL=9      the same; CHIP has 8 bytes in place of 64
//! /vcek/v1/Milan/cert_chain, /vlek/v1/Milan/cert_chain                   ASK or ASVK, then ARK, PEM
//! /vcek/v1/Milan/crl, /vlek/v1/Milan/crl                                 the list of revoked authorities, DER
//! ```
//!
//! Clouds have the certificates of VLEKs, so machines send them.

use std::time::Instant;

use base::text;
use hardware::snp::report::Signer;
use hardware::snp::tcb::{Product, Tcb};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::https::{Failure, Request, Server};
use crate::item::{MAX_CERTIFICATE, MAX_CHAIN, MAX_LIST, hex};

/// AMD's own server.
pub const AMD: &str = "https://kdsintf.amd.com";

/// The media types of one certificate or list in DER.
const DER: &[&str] = &[
    "application/pkix-cert",
    "application/pkix-crl",
    "application/x-x509-ca-cert",
    "application/x-pkcs7-crl",
    "application/octet-stream",
    "binary/octet-stream",
];
/// The media types of certificates in PEM.
const PEM: &[&str] = &[
    "application/x-pem-file",
    "application/pem-certificate-chain",
    "application/x-x509-ca-cert",
    "application/octet-stream",
    "binary/octet-stream",
    "text/plain",
];

/// A client of the service.
pub struct Kds(pub Server);

impl Kds {
    /// Returns the certificate of a chip's key for one TCB.
    pub fn vcek(
        &self,
        product: Product,
        chip: &[u8],
        tcb: &Tcb,
        deadline: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let fmc = match product {
            Product::Turin => format!("fmcSPL={}&", tcb.fmc),
            Product::Milan | Product::Genoa => String::new(),
        };
        let path = format!(
            "/vcek/v1/{product}/{}?{fmc}blSPL={}&teeSPL={}&snpSPL={}&ucodeSPL={}",
            hex(chip),
            tcb.bootloader,
            tcb.tee,
            tcb.snp,
            tcb.microcode
        );
        self.get(&path, DER, MAX_CERTIFICATE, deadline)
    }

    /// Returns the certificate of the authority below AMD's root.
    pub fn authority(
        &self,
        product: Product,
        signer: Signer,
        deadline: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let path = format!("/{}/v1/{product}/cert_chain", folder(signer));
        let pem = self.get(&path, PEM, MAX_CHAIN, deadline)?;
        authority(&pem).map_err(|why| Failure::Bad(format!("the chain of a {product}: {why}")))
    }

    /// Returns the list of revoked authorities.
    pub fn revoked(
        &self,
        product: Product,
        signer: Signer,
        deadline: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let path = format!("/{}/v1/{product}/crl", folder(signer));
        self.get(&path, DER, MAX_LIST, deadline)
    }

    fn get(
        &self,
        path: &str,
        types: &[&str],
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let request = Request { path, types, limit };
        self.0.get(&request, deadline).map(|answer| answer.body)
    }
}

fn folder(signer: Signer) -> &'static str {
    match signer {
        Signer::Vcek => "vcek",
        Signer::Vlek => "vlek",
    }
}

/// Returns the DER of the first certificate of a chain, which the root must follow. The root itself is not used: the program has it.
pub fn authority(pem: &[u8]) -> Result<Vec<u8>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).take(3).collect();
    match &certificates.map_err(|error| format!("it is not PEM: {}", text::of_error(error)))?[..] {
        [authority, _root] => Ok(authority.to_vec()),
        others => Err(format!(
            "it has {} certificates, expected the authority and the root",
            others.len()
        )),
    }
}
