//! The items that are fetched: the name of each in the store, and the check that an answer is the requested item.

use std::fmt;
use std::sync::Arc;

use base::der::{DerReader, OCTET_STRING};
use base::text::{self, hex};
use base::x509;
use hardware::snp::certificate::ChipCertificate;
use hardware::snp::report::ReportSigner;
use hardware::snp::tcb::{Product, Tcb};
use hardware::tdx::TdxCollateral;
use hardware::{Cause, Unavailable};
use ring::digest::{SHA256, digest};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::Deserialize;

use crate::x509::{RevocationList, UnverifiedCertificate};

/// subjectKeyIdentifier, 2.5.29.14 (RFC 5280 §4.2.1): the content of the OID.
const SUBJECT_KEY: &[u8] = &[0x55, 0x1d, 0x0e];
/// Maximum size of a certificate in bytes: those of AMD have at most 1.6 KiB.
pub const MAX_CERTIFICATE: usize = 8 << 10;
/// Maximum size of a revocation list in bytes.
pub const MAX_LIST: usize = 256 << 10;
/// Maximum size of a chain of certificates in PEM in bytes.
pub const MAX_CHAIN: usize = 32 << 10;
/// Maximum size of a collateral's JSON in bytes: a genuine one has about 40 KiB.
pub const MAX_COLLATERAL: usize = 1 << 20;

/// One item that AMD, Intel or Google publishes. Its form in a cache is that of the files that the vendors' tools use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// The certificate of a chip's key for one TCB, in DER. It never changes.
    Vcek {
        /// The line of processors.
        product: Product,
        /// The chip: 64 bytes, of a Turin 8.
        chip: Vec<u8>,
        /// The versions of the firmware from which the chip derives the key.
        tcb: Tcb,
    },
    /// The authority that issued the certificate of an attestation key, in DER.
    Issuer {
        /// Where it is published.
        path: String,
        /// The identifier of its key.
        key: Vec<u8>,
    },
    /// AMD's list of revoked authorities, in DER.
    Revoked(Product, ReportSigner),
    /// Intel's collateral of a kind of platform, in JSON.
    Tdx {
        /// The family, model, platform and SKU.
        fmspc: [u8; 6],
        /// The authority that certified the platform.
        authority: PckAuthority,
    },
}

/// The authority of Intel that certified a platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PckAuthority {
    /// The authority of platforms with several processors.
    Platform,
    /// The authority of single processors.
    Processor,
}

/// The content of an item.
#[derive(Debug, Clone)]
pub enum ItemContent {
    /// A certificate or list.
    Der(Vec<u8>),
    /// Intel's collateral.
    Tdx(Arc<TdxCollateral>),
}

impl Item {
    /// Returns the name of a file or key: letters, digits, `-` and `.`.
    pub fn name(&self) -> String {
        let line = |product: &Product| product.to_string().to_lowercase();
        match self {
            Item::Vcek { product, chip, tcb } => format!(
                "vcek-{}-{}-{}.{}.{}.{}.{}.der",
                line(product),
                hex(chip),
                tcb.fmc,
                tcb.bootloader,
                tcb.tee,
                tcb.snp,
                tcb.microcode
            ),
            Item::Issuer { path, key } => {
                let place = digest(&SHA256, format!("{path} {}", hex(key)).as_bytes());
                format!("issuer-{}.der", hex(place.as_ref()))
            }
            Item::Revoked(product, ReportSigner::Vcek) => format!("vcek-{}.crl", line(product)),
            Item::Revoked(product, ReportSigner::Vlek) => format!("vlek-{}.crl", line(product)),
            Item::Tdx { fmspc, authority } => {
                format!("tdx-{}-{}.json", hex(fmspc), authority.name())
            }
        }
    }

    /// Returns whether strangers can name such items: certificates of chips, and of the issuers of attestation keys.
    pub fn is_named_by_strangers(&self) -> bool {
        matches!(self, Item::Vcek { .. } | Item::Issuer { .. })
    }

    /// Returns whether the item is stored as soon as its server has sent it. An issuer is not, because anybody can publish one: it
    /// is stored after a validator has verified it.
    pub fn is_kept_at_once(&self) -> bool {
        !matches!(self, Item::Issuer { .. })
    }

    /// Returns whether its server can publish a newer one before it expires.
    pub fn is_renewed(&self) -> bool {
        matches!(self, Item::Revoked(..) | Item::Tdx { .. })
    }

    /// Parses the bytes from a server or a cache, and checks that they are this item. Returns the content and the last second of
    /// its validity. The signatures are not checked here: the validator verifies them each time.
    pub fn read(&self, bytes: &[u8]) -> Result<(ItemContent, u64), Unavailable> {
        match self {
            Item::Vcek { product, chip, tcb } => {
                let until = UnverifiedCertificate::parse(limited(bytes, MAX_CERTIFICATE)?)?.until;
                let found = ChipCertificate::parse(bytes)?;
                if found.signer != ReportSigner::Vcek || found.product != *product {
                    return Err(other(format!(
                        "it is the {} of a {}, expected the VCEK of a {product}",
                        found.signer, found.product
                    )));
                }
                if found.chip.as_deref() != Some(chip) {
                    return Err(other("it is the certificate of another chip"));
                }
                if found.tcb != *tcb {
                    let tcb = format!("it is for the TCB {}, expected {tcb}", found.tcb);
                    return Err(other(tcb));
                }
                Ok((ItemContent::Der(bytes.into()), until))
            }
            Item::Issuer { key, .. } => {
                let until = UnverifiedCertificate::parse(limited(bytes, MAX_CERTIFICATE)?)?.until;
                if subject_key(bytes) == Some(key) {
                    Ok((ItemContent::Der(bytes.into()), until))
                } else {
                    Err(other("it is the certificate of another authority"))
                }
            }
            Item::Revoked(product, _) => {
                let found = RevocationList::parse(limited(bytes, MAX_LIST)?)?;
                let root = root(*product);
                if found.issuer != root {
                    return Err(other(format!(
                        "it is a list of {}, expected {root}",
                        text::quoted(&found.issuer, 40)
                    )));
                }
                Ok((ItemContent::Der(bytes.into()), found.until))
            }
            Item::Tdx { fmspc, .. } => {
                let bytes = limited(bytes, MAX_COLLATERAL)?;
                let collateral: TdxCollateral = serde_json::from_slice(bytes)
                    .map_err(|error| Unavailable::malformed(text::of_error(error)))?;
                let until = read_collateral(&collateral, fmspc)?;
                Ok((ItemContent::Tdx(Arc::new(collateral)), until))
            }
        }
    }
}

/// Returns the part of an item's name that names a chip or an issuer; `None` if the item is not the certificate of one.
/// Unauthenticated peers can name chips, TCBs and issuers, so such items never replace others.
pub fn chip_of(name: &str) -> Option<&str> {
    let stem = name.strip_suffix(".der")?;
    match stem.strip_prefix("issuer-") {
        Some(place) => Some(place),
        None => Some(stem.strip_prefix("vcek-")?.rsplit_once('-')?.0),
    }
}

impl fmt::Display for Item {
    /// Names the item for a person.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Item::Vcek { product, chip, tcb } => {
                let chip = hex(chip);
                write!(
                    f,
                    "the VCEK of the {product} {chip:.16}.. with the TCB {tcb}"
                )
            }
            Item::Issuer { path, .. } => {
                write!(f, "the issuer {path} of the attestation key's certificate")
            }
            Item::Revoked(product, signer) => {
                write!(
                    f,
                    "the list of revoked authorities of {signer}s of a {product}"
                )
            }
            Item::Tdx { fmspc, authority } => {
                let (fmspc, authority) = (hex(fmspc), authority.name());
                write!(
                    f,
                    "Intel's collateral of platforms with FMSPC {fmspc} ({authority})"
                )
            }
        }
    }
}

impl PckAuthority {
    /// Returns the name in Intel's API.
    pub fn name(self) -> &'static str {
        match self {
            PckAuthority::Platform => "platform",
            PckAuthority::Processor => "processor",
        }
    }

    /// Returns the authority of a PCK certificate chain in PEM.
    pub fn of_chain(pem: &[u8]) -> Result<PckAuthority, Unavailable> {
        let first = CertificateDer::pem_slice_iter(pem).next();
        let Some(Ok(pck)) = first else {
            return Err(Unavailable::malformed("the quote has no PCK certificate"));
        };
        let issuer = UnverifiedCertificate::parse(&pck)
            .map_err(|why| why.about("the PCK certificate"))?
            .issuer;
        match issuer.as_str() {
            "Intel SGX PCK Platform CA" => Ok(PckAuthority::Platform),
            "Intel SGX PCK Processor CA" => Ok(PckAuthority::Processor),
            name => Err(other(format!(
                "the PCK certificate is issued by {}",
                text::quoted(name, 60)
            ))),
        }
    }
}

/// The fields of TCB information and identities that name the platform and the validity.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    id: String,
    #[serde(default)]
    fmspc: String,
    next_update: String,
}

/// Checks that collateral is complete and for this kind of platform. Returns the time at which the first of its parts expires.
fn read_collateral(collateral: &TdxCollateral, fmspc: &[u8; 6]) -> Result<u64, Unavailable> {
    let head = |name: &str, text: &str| -> Result<(Head, u64), Unavailable> {
        let head: Head = serde_json::from_str(text).map_err(|error| {
            Unavailable::malformed(text::of_error(error)).about(format!("the {name}"))
        })?;
        let end = base::time::parse(&head.next_update)
            .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
            .ok_or_else(|| Unavailable::malformed(format!("the {name} has no end")))?;
        Ok((head, end.as_secs()))
    };
    let (info, info_until) = head("TCB information", &collateral.tcb_info)?;
    let (identity, identity_until) = head("QE identity", &collateral.qe_identity)?;
    if info.id != "TDX" || !info.fmspc.eq_ignore_ascii_case(&hex(fmspc)) {
        return Err(other(format!(
            "the TCB information is of {} platforms with FMSPC {:.20}, expected \"TDX\" and {}",
            text::quoted(&info.id, 20),
            info.fmspc,
            hex(fmspc)
        )));
    }
    if identity.id != "TD_QE" {
        return Err(other(format!(
            "the identity is of {}, expected \"TD_QE\"",
            text::quoted(&identity.id, 20)
        )));
    }
    for (name, chain) in [
        ("TCB information", &collateral.tcb_info_issuer_chain),
        ("QE identity", &collateral.qe_identity_issuer_chain),
    ] {
        check_chain(chain.as_bytes())
            .map_err(|why| why.about(format!("the chain of the {name}")))?;
    }
    let list = |name: &str, der: &[u8]| {
        let list = RevocationList::parse(der).map_err(|why| why.about(format!("the {name}")))?;
        Ok::<_, Unavailable>(list.until)
    };
    let root_until = list("root CRL", &collateral.root_ca_crl.0)?;
    let pck_until = list("PCK CRL", &collateral.pck_crl.0)?;
    Ok(info_until
        .min(identity_until)
        .min(root_until)
        .min(pck_until))
}

/// Checks that a text is a chain of two to four certificates in PEM: a signer and its root at least.
pub fn check_chain(pem: &[u8]) -> Result<(), Unavailable> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(limited(pem, MAX_CHAIN)?)
        .take(5)
        .collect();
    let certificates = certificates.map_err(|_| Unavailable::malformed("it is not PEM"))?;
    if !(2..=4).contains(&certificates.len()) {
        let count = certificates.len();
        let count = format!("it has {count} certificates, expected 2 to 4");
        return Err(Unavailable::malformed(count));
    }
    certificates
        .iter()
        .try_for_each(|der| UnverifiedCertificate::parse(der).map(drop))
}

/// Returns the error about an item that is not the requested one.
fn other(what: impl Into<String>) -> Unavailable {
    Cause::Mismatch.because(what)
}

/// Checks the number of bytes.
pub fn limited(bytes: &[u8], limit: usize) -> Result<&[u8], Unavailable> {
    if bytes.len() <= limit {
        Ok(bytes)
    } else {
        Err(Cause::TooLarge.because(format!(
            "it has {} bytes, expected at most {limit}",
            bytes.len()
        )))
    }
}

fn root(product: Product) -> String {
    format!("ARK-{product}")
}

/// Returns the identifier of the key of a certificate.
pub fn subject_key(certificate: &[u8]) -> Option<&[u8]> {
    let extension = x509::Certificate::parse(certificate)
        .ok()?
        .extension(SUBJECT_KEY)?;
    DerReader::new(extension).expect(OCTET_STRING).ok()
}
