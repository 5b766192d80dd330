//! AMD's key distribution service (57230 "VCEK Certificate and KDS Interface", chapter 4):
//!
//! ```text
//! /vcek/v1/Milan/CHIP?blSPL=3&teeSPL=0&snpSPL=8&ucodeSPL=115             the certificate of a chip, DER
//! /vcek/v1/Turin/CHIP?fmcSPL=0&blSPL=0&teeSPL=0&snpSPL=0&ucodeSPL=9      the same; CHIP has 8 bytes in place of 64
//! /vcek/v1/Milan/crl, /vlek/v1/Milan/crl                                 the list of revoked authorities, DER
//! ```
//!
//! Certificates of VLEKs are not fetched: clouds give them to their machines, which send them. The authorities are built in.

use std::time::{Duration, Instant};

use base::text::hex;
use hardware::Unavailable;
use hardware::snp::report::ReportSigner;
use hardware::snp::tcb::{Product, Tcb};
use http::Roots;

use crate::https::{CollateralServer, FetchFailure, FetchRequest};
use crate::item::{MAX_CERTIFICATE, MAX_LIST};

/// AMD's own server.
pub const AMD: &str = "https://kdsintf.amd.com";

/// The media types of a certificate or a list in DER.
const DER: &[&str] = &[
    "application/pkix-cert",
    "application/pkix-crl",
    "application/x-x509-ca-cert",
    "application/x-pkcs7-crl",
    "application/octet-stream",
    "binary/octet-stream",
];
/// How many certificates of chips are requested at once, and the pause before each further one. Strangers can name any chips:
/// without a limit they could make AMD's service refuse this program. The limit allows a new, large cluster.
const CHIPS_AT_ONCE: u32 = 32;
const PAUSE_OF_CHIPS: Duration = Duration::from_secs(2);

/// A client of the service.
pub struct Kds {
    /// The client for certificates of chips. It is a separate one: when the service demands a pause of these requests, lists can
    /// still be fetched.
    chips: CollateralServer,
    lists: CollateralServer,
}

impl Kds {
    /// Makes a client of the service at this URL.
    pub fn new(url: &str, roots: &Roots) -> Result<Kds, Unavailable> {
        Ok(Kds {
            chips: CollateralServer::new(url, roots)?.with_limit(CHIPS_AT_ONCE, PAUSE_OF_CHIPS),
            lists: CollateralServer::new(url, roots)?,
        })
    }

    /// Returns the certificate of a chip's key for one TCB.
    pub fn vcek(
        &self,
        product: Product,
        chip: &[u8],
        tcb: &Tcb,
        deadline: Instant,
    ) -> Result<Vec<u8>, FetchFailure> {
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
        get(&self.chips, &path, MAX_CERTIFICATE, deadline)
    }

    /// Returns the list of revoked authorities.
    pub fn revoked(
        &self,
        product: Product,
        signer: ReportSigner,
        deadline: Instant,
    ) -> Result<Vec<u8>, FetchFailure> {
        let path = format!("/{}/v1/{product}/crl", folder(signer));
        get(&self.lists, &path, MAX_LIST, deadline)
    }
}

fn get(
    server: &CollateralServer,
    path: &str,
    limit: usize,
    deadline: Instant,
) -> Result<Vec<u8>, FetchFailure> {
    let request = FetchRequest {
        path,
        types: DER,
        limit,
        content: None,
    };
    server.send(&request, deadline).map(|answer| answer.body)
}

fn folder(signer: ReportSigner) -> &'static str {
    match signer {
        ReportSigner::Vcek => "vcek",
        ReportSigner::Vlek => "vlek",
    }
}
