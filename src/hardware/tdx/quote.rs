//! TDX quotes of version 4 and 5 (Intel TDX DCAP Quote Generation Library, "Quote Format").
//! Integers are little-endian.
//!
//! ```text
//! version 4:  header 48 ‖ body of TDX 1.0, 584 ‖ length of the signature u32 ‖ signature
//! version 5:  header 48 ‖ type of the body u16 ‖ its length u32 ‖ body ‖ length of the signature u32 ‖ signature
//! signature:  ECDSA r ‖ s 64 ‖ attestation key 64 ‖ type 6 u16 ‖ length u32
//!             ‖ report of the quoting enclave 384 ‖ its signature by the PCK 64
//!             ‖ length u16, authentication data ‖ type 5 u16 ‖ length u32, PCK certificate chain in PEM
//! ```

use std::fmt;

use base::bytes::Reader;
pub use tee::tdx::{MAX_QUOTE, REGISTER_LEN, Register};

use crate::refusal::{Kind, Refusal};

/// The `tee_type` of TDX in the header.
const TEE_TDX: u32 = 0x81;
/// The `attestation_key_type` ECDSA P-256.
const ECDSA_P256: u16 = 2;
/// The quoting enclave of Intel; other vendors have none.
const INTEL_QE: [u8; 16] = [
    0x93, 0x9a, 0x72, 0x33, 0xf7, 0x9c, 0x4c, 0xa9, 0x94, 0x0a, 0x0d, 0xb3, 0x95, 0x7f, 0x06, 0x07,
];
/// Types of the certification data: the report of the quoting enclave, which contains a PCK
/// certificate chain.
const QE_REPORT: u16 = 6;
const PCK_CHAIN: u16 = 5;

/// A quote whose structure is valid. Nothing in it is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TdxQuote<'a> {
    /// 4 or 5.
    pub version: u16,
    /// The report of the machine.
    pub body: Body,
    /// Header and body, which the attestation key signed.
    pub signed: &'a [u8],
    /// The signature of the attestation key, r ‖ s.
    pub signature: &'a [u8; 64],
    /// The attestation key, x ‖ y.
    pub attestation_key: &'a [u8; 64],
    /// The report of the quoting enclave, which names the attestation key.
    pub qe_report: &'a [u8; 384],
    /// The signature of the PCK over that report, r ‖ s.
    pub qe_signature: &'a [u8; 64],
    /// Data that the enclave's report covers in addition to the attestation key.
    pub authentication: &'a [u8; 32],
    /// The certificate chain of the PCK in PEM.
    pub pck_chain: &'a [u8],
}

/// The report of a trust domain (TD) in a quote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body {
    /// The security version of each part of the TDX module and the platform.
    pub tee_tcb_svn: [u8; 16],
    /// The measurement of the TDX module.
    pub mr_seam: Register,
    /// The signer of the TDX module: zero for Intel.
    pub mr_signer_seam: Register,
    /// The attributes of the TDX module.
    pub seam_attributes: u64,
    /// The attributes of the TD.
    pub td_attributes: Attributes,
    /// The processor features that the TD may use.
    pub xfam: u64,
    /// The measurement of the initial content of the TD: its firmware.
    pub mr_td: Register,
    /// The configuration that the host sets, which is not software.
    pub mr_config_id: Register,
    /// The owner that the host sets.
    pub mr_owner: Register,
    /// The configuration that the owner sets.
    pub mr_owner_config: Register,
    /// The registers that software in the TD extends.
    pub rtmr: [Register; 4],
    /// The data that the issuer of the quote bound to it.
    pub report_data: [u8; 64],
    /// The versions of the present TDX module, and the service TDs bound to the TD; `None` in a
    /// body of TDX 1.0.
    pub td15: Option<Td15>,
    /// The service TDs bound to the TD at its creation and now; `None` in a body without them.
    pub service_tds: Option<[ServiceTd; 2]>,
}

/// The addition of TDX 1.5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Td15 {
    /// As [`Body::tee_tcb_svn`], of the present module. It differs if the module was updated while
    /// the TD ran.
    pub tee_tcb_svn2: [u8; 16],
    /// The measurement of service TDs, zero without any.
    pub mr_service_td: Register,
}

/// The service TDs of a TD, in a body of "TDX 1.5 extended" (Intel's `sgx_report2_body_v1_5_ex_t`):
/// zero without any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceTd {
    /// The hash of their measurements.
    pub hash: Register,
    /// Their attributes.
    pub attributes: u64,
}

/// The attributes of a TD (TDX Module ABI, "ATTRIBUTES").
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Attributes(pub u64);

fn malformed<T>(why: impl Into<String>) -> Result<T, Refusal> {
    Err(Kind::Malformed.because(why))
}

fn short() -> Refusal {
    Kind::Malformed.because("the quote ends too early")
}

impl<'a> TdxQuote<'a> {
    /// Parses a quote. Zeros may follow it, as some quoting services pad their buffers; other bytes
    /// may not.
    pub fn parse(bytes: &'a [u8]) -> Result<TdxQuote<'a>, Refusal> {
        if bytes.len() > MAX_QUOTE {
            let len = bytes.len();
            return malformed(format!(
                "the quote has {len} bytes, expected at most {MAX_QUOTE}"
            ));
        }
        let mut all = Reader(bytes);
        let version = parse_header(all.take(48).ok_or_else(short)?)?;
        let (kind, len) = match version {
            4 => (2, 584),
            _ => {
                let kind = all.u16_le().ok_or_else(short)?;
                (kind, all.u32_le().ok_or_else(short)? as usize)
            }
        };
        let expected = match kind {
            2 => 584,
            3 => 648,
            4 => 885,
            1 => return malformed("the quote is that of an SGX enclave"),
            _ => return malformed(format!("the quote has a body of the unknown type {kind}")),
        };
        if len != expected {
            return malformed(format!(
                "the body of the quote has {len} bytes, expected {expected}"
            ));
        }
        let body = parse_body(all.take(len).ok_or_else(short)?, kind).ok_or_else(short)?;
        let signed = &bytes[..bytes.len() - all.0.len()];
        let len = all.u32_le().ok_or_else(short)? as usize;
        let mut rest = Reader(all.take(len).ok_or_else(short)?);
        if all.0.iter().any(|byte| *byte != 0) {
            return malformed("bytes other than padding follow the quote");
        }
        let signature = rest.array().ok_or_else(short)?;
        let attestation_key = rest.array().ok_or_else(short)?;
        let mut certification = Reader(certification(&mut rest, QE_REPORT)?);
        if !rest.0.is_empty() {
            return malformed("bytes follow the signature of the quote");
        }
        let qe_report = certification.array().ok_or_else(short)?;
        let qe_signature = certification.array().ok_or_else(short)?;
        let len = certification.u16_le().ok_or_else(short)?;
        if len != 32 {
            return malformed(format!(
                "the authentication data of the quoting enclave has {len} bytes, expected 32"
            ));
        }
        let authentication = certification.array().ok_or_else(short)?;
        let pck_chain = self::certification(&mut certification, PCK_CHAIN)?;
        if !certification.0.is_empty() {
            return malformed("bytes follow the certificates of the quote");
        }
        Ok(TdxQuote {
            version,
            body,
            signed,
            signature,
            attestation_key,
            qe_report,
            qe_signature,
            authentication,
            pck_chain,
        })
    }
}

/// Returns the version.
fn parse_header(header: &[u8]) -> Result<u16, Refusal> {
    let mut header = Reader(header);
    let version = header.u16_le().ok_or_else(short)?;
    let key_type = header.u16_le().ok_or_else(short)?;
    let tee = header.u32_le().ok_or_else(short)?;
    header.take(4).ok_or_else(short)?; // the versions of QE and PCE, zero in genuine quotes; the QE report has its own
    let vendor = header.take(16).ok_or_else(short)?;
    match (version, tee) {
        (4 | 5, TEE_TDX) => {}
        (4 | 5, _) => {
            return malformed(format!(
                "the quote is of the technology {tee:#x}, expected TDX (0x81)"
            ));
        }
        _ => return malformed(format!("the quote has version {version}, expected 4 or 5")),
    }
    if key_type != ECDSA_P256 {
        return malformed(format!(
            "the attestation key of the quote has the type {key_type}, expected 2 (ECDSA P-256)"
        ));
    }
    if vendor != INTEL_QE {
        return malformed("the quoting enclave is not Intel's");
    }
    Ok(version)
}

/// Parses a body of this type, whose length is right.
fn parse_body(body: &[u8], kind: u16) -> Option<Body> {
    let mut body = Reader(body);
    Some(Body {
        tee_tcb_svn: *body.array()?,
        mr_seam: *body.array()?,
        mr_signer_seam: *body.array()?,
        seam_attributes: body.u64_le()?,
        td_attributes: Attributes(body.u64_le()?),
        xfam: body.u64_le()?,
        mr_td: *body.array()?,
        mr_config_id: *body.array()?,
        mr_owner: *body.array()?,
        mr_owner_config: *body.array()?,
        rtmr: [
            *body.array()?,
            *body.array()?,
            *body.array()?,
            *body.array()?,
        ],
        report_data: *body.array()?,
        td15: match kind {
            2 => None,
            _ => Some(Td15 {
                tee_tcb_svn2: *body.array()?,
                mr_service_td: *body.array()?,
            }),
        },
        service_tds: match kind {
            4 => Some(parse_service_tds(&mut body)?),
            _ => None,
        },
    })
}

/// Parses the end of a body of "TDX 1.5 extended".
fn parse_service_tds(body: &mut Reader<'_>) -> Option<[ServiceTd; 2]> {
    let service_td = |body: &mut Reader<'_>| {
        Some(ServiceTd {
            hash: *body.array()?,
            attributes: body.u64_le()?,
        })
    };
    body.take(1 + 32 + 48)?; // the number of the machine in the TD, the ID of this start, the hash of devices
    let created = service_td(body)?;
    body.take(16 + 16 + 12)?; // the platform on which the TD was created
    Some([created, service_td(body)?])
}

/// Returns the certification data of this type.
fn certification<'a>(reader: &mut Reader<'a>, expected: u16) -> Result<&'a [u8], Refusal> {
    let kind = reader.u16_le().ok_or_else(short)?;
    if kind != expected {
        return malformed(format!(
            "the quote has certification data of the type {kind}, expected {expected}"
        ));
    }
    let len = reader.u32_le().ok_or_else(short)? as usize;
    reader.take(len).ok_or_else(short)
}

/// The names of the attributes by bit. Bits 18 to 22 have a meaning that Intel's library does not
/// judge; the others are reserved.
const ATTRIBUTES: [(u32, &str); 13] = [
    (0, "DEBUG"),
    (4, "HGS_PLUS_PROF"),
    (5, "PERF_PROF"),
    (6, "PMT_PROF"),
    (16, "ICSSD"),
    (17, "SERVTD_EXT"),
    (27, "LASS"),
    (28, "SEPT_VE_DISABLE"),
    (29, "MIGRATABLE"),
    (30, "PKS"),
    (31, "KL"),
    (62, "TPA"),
    (63, "PERFMON"),
];

impl Attributes {
    /// The attributes of a TD without debugging and without special features: only SEPT_VE_DISABLE.
    /// TDs in Azure, which run below a paravisor, have no attribute set.
    pub const USUAL: Attributes = Attributes(1 << 28);
    /// Another TD can serve the TD, and move it to another platform: SERVTD_EXT, MIGRATABLE.
    const OF_SERVICE_TD: u64 = 1 << 17 | 1 << 29;

    /// Returns whether the host can look into the TD.
    pub fn is_debug(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns those of the attributes that a policy can never allow: migration, service TDs, and
    /// bits without a known meaning.
    pub fn never_allowed(self) -> Attributes {
        let known = ATTRIBUTES
            .iter()
            .fold(0, |known, (bit, _)| known | 1 << bit);
        Attributes(self.0 & (!known | Attributes::OF_SERVICE_TD))
    }
}

impl fmt::Display for Attributes {
    /// Writes the value, and the names of the bits that are set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)?;
        let set = (0..64).filter(|bit| self.0 >> bit & 1 == 1);
        let name = |bit| match ATTRIBUTES.iter().find(|(known, _)| *known == bit) {
            Some((_, name)) => (*name).into(),
            None => format!("reserved bit {bit}"),
        };
        let names: Vec<String> = set.map(name).collect();
        if names.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", names.join(", "))
        }
    }
}

impl fmt::Debug for Attributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The report of an enclave (Intel SDM volume 3D, REPORTBODY).
pub(super) struct Enclave<'a> {
    pub misc_select: &'a [u8; 4],
    pub attributes: &'a [u8; 16],
    pub mr_signer: &'a [u8; 32],
    pub product: u16,
    pub svn: u16,
}

impl<'a> Enclave<'a> {
    pub fn parse(report: &'a [u8; 384]) -> Option<Enclave<'a>> {
        let at = |offset: usize| Reader(&report[offset..]);
        Some(Enclave {
            misc_select: at(16).array()?,
            attributes: at(48).array()?,
            mr_signer: at(128).array()?,
            product: at(256).u16_le()?,
            svn: at(258).u16_le()?,
        })
    }
}
