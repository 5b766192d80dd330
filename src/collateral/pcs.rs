//! Intel's provisioning certification service (PCS API version 4), or a caching service of the operator with the same paths (PCCS).
//!
//! ```text
//! /tdx/certification/v4/tcb?fmspc=FMSPC&update=early         TCB information; its chain in the field TCB-Info-Issuer-Chain
//! /tdx/certification/v4/qe/identity?update=early             identity of the enclave; SGX-Enclave-Identity-Issuer-Chain
//! /sgx/certification/v4/pckcrl?ca=platform&encoding=der      revoked platforms; SGX-PCK-CRL-Issuer-Chain
//! /sgx/certification/v4/rootcacrl                            revoked authorities: PCCS only; Intel has it on another server
//! ```

use std::time::Instant;

use base::text::{hex, unhex};
use hardware::tdx::TdxCollateral;
use hardware::tdx::dcap::Hex;
use hardware::{Cause, Unavailable};
use http::Roots;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::https::{CollateralServer, FetchFailure, FetchRequest, FetchedAnswer};
use crate::item::{MAX_CHAIN, MAX_LIST, PckAuthority, check_chain, limited};

/// Intel's own server.
pub const INTEL: &str = "https://api.trustedservices.intel.com";
/// Where Intel has the list of the root.
const INTEL_ROOT: &str = "https://certificates.trustedservices.intel.com";
/// The ends that other tools write behind the URL of a PCCS.
const PATH: &str = "/sgx/certification/v4";

/// Maximum size of TCB information and identities in bytes: genuine ones have at most 20 KiB.
const MAX_JSON: usize = 256 << 10;

const JSON: &[&str] = &["application/json"];
const CRL: &[&str] = &[
    "application/pkix-crl",
    "application/octet-stream",
    "binary/octet-stream",
    "application/x-pkcs7-crl",
    "text/plain",
    // Intel's PCCS sends hexadecimal digits with this media type; they are parsed strictly
    "text/html",
];

/// Which of Intel's evaluations is used after Intel has published a vulnerability.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Update {
    /// The newest: a platform without the update is out of date at once.
    #[default]
    Early,
    /// The earlier one: Intel gives operators months until they must meet the newest.
    Standard,
}

impl std::str::FromStr for Update {
    type Err = Unavailable;

    fn from_str(name: &str) -> Result<Update, Unavailable> {
        match name {
            "early" => Ok(Update::Early),
            "standard" => Ok(Update::Standard),
            _ => {
                let why = format!("{name:?}: expected early or standard");
                Err(Cause::Setting.because(why))
            }
        }
    }
}

/// A client of the service.
pub struct Pcs {
    server: CollateralServer,
    /// The server of the root's list; `None` if it is the same server.
    root: Option<CollateralServer>,
    update: Update,
}

impl Pcs {
    /// Makes a client of the service at this URL.
    pub fn new(url: &str, update: Update, roots: &Roots) -> Result<Pcs, Unavailable> {
        let url = url.trim_end_matches('/');
        let root = (url == INTEL).then(|| CollateralServer::new(INTEL_ROOT, roots));
        Ok(Pcs {
            server: CollateralServer::new(url.strip_suffix(PATH).unwrap_or(url), roots)?,
            root: root.transpose()?,
            update,
        })
    }

    /// Returns all collateral of a kind of platform.
    pub fn collateral(
        &self,
        fmspc: &[u8; 6],
        authority: PckAuthority,
        deadline: Instant,
    ) -> Result<TdxCollateral, FetchFailure> {
        let update = match self.update {
            Update::Early => "update=early",
            Update::Standard => "update=standard",
        };
        let fmspc = hex(fmspc).to_uppercase();
        let path = format!("/tdx/certification/v4/tcb?fmspc={fmspc}&{update}");
        let info = get(&self.server, &path, JSON, MAX_JSON, deadline)?;
        let path = format!("/tdx/certification/v4/qe/identity?{update}");
        let identity = get(&self.server, &path, JSON, MAX_JSON, deadline)?;
        let path = format!("{PATH}/pckcrl?ca={}&encoding=der", authority.name());
        let pck_crl = get(&self.server, &path, CRL, 2 * MAX_LIST, deadline)?;
        let root_crl = match &self.root {
            Some(server) => get(server, "/IntelSGXRootCA.der", CRL, MAX_LIST, deadline),
            None => {
                let path = format!("{PATH}/rootcacrl");
                get(&self.server, &path, CRL, 2 * MAX_LIST, deadline)
            }
        }?;
        Ok(assembled(&info, &identity, &pck_crl, &root_crl)?)
    }
}

fn get(
    server: &CollateralServer,
    path: &str,
    types: &[&str],
    limit: usize,
    deadline: Instant,
) -> Result<FetchedAnswer, FetchFailure> {
    let request = FetchRequest {
        path,
        types,
        limit,
        content: None,
    };
    server.send(&request, deadline)
}

fn assembled(
    info: &FetchedAnswer,
    identity: &FetchedAnswer,
    pck_crl: &FetchedAnswer,
    root_crl: &FetchedAnswer,
) -> Result<TdxCollateral, Unavailable> {
    let (tcb_info, tcb_info_signature) = signed("tcbInfo", &info.body)?;
    let (qe_identity, qe_identity_signature) = signed("enclaveIdentity", &identity.body)?;
    // the first name is that of version 4, the second that of version 3, which some caching services kept
    let of_info = ["TCB-Info-Issuer-Chain", "SGX-TCB-Info-Issuer-Chain"];
    Ok(TdxCollateral {
        tcb_info,
        tcb_info_signature,
        tcb_info_issuer_chain: chain(info, &of_info)?,
        qe_identity,
        qe_identity_signature,
        qe_identity_issuer_chain: chain(identity, &["SGX-Enclave-Identity-Issuer-Chain"])?,
        root_ca_crl: Hex(der_or_digits(&root_crl.body)),
        pck_crl: Hex(der_or_digits(&pck_crl.body)),
        pck_crl_issuer_chain: chain(pck_crl, &["SGX-PCK-CRL-Issuer-Chain"])?,
    })
}

/// Returns the chain in a header field of one of these names.
fn chain(answer: &FetchedAnswer, names: &[&str]) -> Result<String, Unavailable> {
    let value = answer.field(names);
    let absent = || format!("the answer has no field {} with text", names[0]);
    let value = value.ok_or_else(|| Unavailable::malformed(absent()))?;
    issuer_chain(value).map_err(|why| why.about(format!("the field {}", names[0])))
}

/// Returns the PEM of an issuer chain from the value of its field, in which it is percent-encoded (RFC 3986 §2.1).
pub fn issuer_chain(value: &str) -> Result<String, Unavailable> {
    limited(value.as_bytes(), 3 * MAX_CHAIN)?;
    let decoded = percent_decode_str(value).decode_utf8();
    let pem = decoded.map_err(|_| Unavailable::malformed("it is not text"))?;
    check_chain(pem.as_bytes())?;
    Ok(pem.into_owned())
}

/// Returns the exact bytes of the value that is signed, and the signature: `{"tcbInfo":{..},"signature":".."}`. If the value were
/// parsed and written again, it would have other bytes than Intel signed.
pub fn signed(name: &str, body: &[u8]) -> Result<(String, Hex), Unavailable> {
    #[derive(Deserialize)]
    struct Rest {
        signature: Hex,
    }
    let form = format!("the answer is not {{\"{name}\":{{..}},\"signature\":\"..\"}}");
    let fault = || Unavailable::malformed(&form);
    let text = std::str::from_utf8(body).map_err(|_| fault())?;
    let value = (|| {
        let rest = text.trim_start().strip_prefix('{')?.trim_start();
        let rest = rest
            .strip_prefix('"')?
            .strip_prefix(name)?
            .strip_prefix('"')?;
        Some(rest.trim_start().strip_prefix(':')?.trim_start())
    })()
    .ok_or_else(fault)?;
    let mut values = serde_json::Deserializer::from_str(value).into_iter::<IgnoredAny>();
    if !value.starts_with('{') || !matches!(values.next(), Some(Ok(_))) {
        return Err(fault());
    }
    let (value, rest) = value.split_at(values.byte_offset());
    let rest = rest.trim_start().strip_prefix(',').ok_or_else(fault)?;
    let rest: Rest = serde_json::from_str(&format!("{{{rest}")).map_err(|_| fault())?;
    Ok((value.to_owned(), rest.signature))
}

/// Returns the bytes of a list. A PCCS writes some lists as hexadecimal digits. DER never begins with such a digit.
pub fn der_or_digits(body: &[u8]) -> Vec<u8> {
    let digits = std::str::from_utf8(body.trim_ascii()).ok();
    digits.and_then(unhex).unwrap_or_else(|| body.to_vec())
}
