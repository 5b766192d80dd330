//! The requirements of a Constellation policy for Azure's TDX machines; this program applies them
//! to every TDX machine, in addition to its own (`tdx`). The members are in the same object as
//! `measurements`.
//!
//! ```json
//! {"measurements":{..},"qeSVN":0,"pceSVN":0,"teeTCBSVN":"05..","qeVendorID":"939a..","mrSeam":"..","xfam":"e702060000000000","intelRootKey":"-----BEGIN .."}
//! ```

use base::text::quoted;
use hardware::PlatformClaims;
use hardware::claims::{Property, TcbPart};
use hardware::tdx::Verifier;
use hardware::tdx::quote::TdxQuote;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};

use super::super::error::{Fault, PolicyError};
use crate::refusal::{Kind, Refusal};
use crate::{hex, unhex};

/// Maximum length of a wrong value in an error.
const SHOWN: usize = 120;

/// The requirements. An absent one has no effect. `latest` as a version is refused: Constellation's
/// tool replaces it by a number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OldTdxRequirements {
    /// The minimum version of the quoting enclave.
    #[serde(rename = "qeSVN", skip_serializing_if = "Option::is_none")]
    pub qe_svn: Option<u16>,
    /// The minimum version of the provisioning certification enclave.
    #[serde(rename = "pceSVN", skip_serializing_if = "Option::is_none")]
    pub pce_svn: Option<u16>,
    /// The minimum version of each part of the TDX module and the platform: 16 bytes in
    /// hexadecimal.
    #[serde(rename = "teeTCBSVN", skip_serializing_if = "Option::is_none")]
    pub tee_tcb_svn: Option<String>,
    /// The vendor of the quoting enclave: 16 bytes in hexadecimal.
    #[serde(rename = "qeVendorID", skip_serializing_if = "Option::is_none")]
    pub qe_vendor_id: Option<String>,
    /// The measurement of the TDX module: 48 bytes in hexadecimal.
    #[serde(rename = "mrSeam", skip_serializing_if = "Option::is_none")]
    pub mr_seam: Option<String>,
    /// The processor features of the machine: 8 bytes in hexadecimal, little endian.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xfam: Option<String>,
    /// The root certificate in PEM to which all of Intel's certificates must lead, in place of the
    /// built-in root; or empty.
    #[serde(rename = "intelRootKey", skip_serializing_if = "Option::is_none")]
    pub intel_root_key: Option<String>,
}

impl OldTdxRequirements {
    /// Returns a clause that says what is wrong with a requirement.
    pub fn check_form(&self) -> Result<(), PolicyError> {
        for (name, text, bytes) in [
            ("teeTCBSVN", &self.tee_tcb_svn, 16),
            ("qeVendorID", &self.qe_vendor_id, 16),
            ("mrSeam", &self.mr_seam, 48),
            ("xfam", &self.xfam, 8),
        ] {
            let text = text.as_deref().unwrap_or_default();
            let is_hex = text.len() == 2 * bytes && text.bytes().all(|it| it.is_ascii_hexdigit());
            if !text.is_empty() && !is_hex {
                let digits = 2 * bytes;
                return Err(Fault::Requirement.because(format!(
                    "{name}: expected {digits} hex digits, got {}",
                    quoted(text, SHOWN)
                )));
            }
        }
        self.root().map(drop)
    }

    /// Returns the verifier under the root in `intelRootKey`; `None` if it is empty.
    pub fn root(&self) -> Result<Option<Verifier>, PolicyError> {
        let pem = self.intel_root_key.as_deref().unwrap_or_default();
        if pem.is_empty() {
            return Ok(None);
        }
        let wrong = |why| Fault::Requirement.because(format!("intelRootKey: {why}"));
        let mut all = CertificateDer::pem_slice_iter(pem.as_bytes());
        match (all.next(), all.next()) {
            (Some(Ok(root)), None) if *root == *roots::INTEL_SGX.root.der => Verifier::of_intel()
                .map(Some)
                .map_err(|why| Fault::Requirement.because(why)),
            (Some(Ok(root)), None) => Verifier::under("intelRootKey", &root)
                .map(Some)
                .map_err(|why| wrong(String::from(why))),
            _ => Err(wrong("expected a certificate in PEM, or nothing".into())),
        }
    }

    /// Returns the versions of the host's enclaves.
    fn enclaves(&self, quote: &TdxQuote<'_>) -> [TcbPart; 2] {
        // the header: version, types, QE SVN at 8, PCE SVN at 10, vendor of the quoting enclave at
        // 12
        let number = |at: usize| {
            Some(u16::from_le_bytes(
                quote.signed.get(at..at + 2)?.try_into().ok()?,
            ))
        };
        [("qeSVN", self.qe_svn, 8), ("pceSVN", self.pce_svn, 10)].map(|(name, minimum, at)| {
            TcbPart {
                name,
                got: number(at).unwrap_or(0).into(),
                minimum: minimum.unwrap_or(0).into(),
            }
        })
    }

    /// Adds to a machine's claims the values in its quote that these requirements compare.
    pub fn show(&self, quote: &TdxQuote<'_>, claims: &mut PlatformClaims) {
        claims.tcb.extend(self.enclaves(quote));
        if let Some(minimum) = &self.tee_tcb_svn {
            claims.properties.push(Property {
                name: "minimum of TEE_TCB_SVN",
                value: minimum.to_ascii_lowercase(),
            });
        }
        claims.properties.push(Property {
            name: "QE vendor",
            value: hex(quote.signed.get(12..28).unwrap_or_default()),
        });
    }

    /// Checks a quote. An error names the requirement that is not met.
    pub fn check(&self, quote: &TdxQuote<'_>) -> Result<(), Refusal> {
        for TcbPart { name, got, minimum } in self.enclaves(quote) {
            if got < minimum {
                let text = format!("{name} is {got}, below the minimum {minimum}");
                return Err(Kind::Outdated.because(text).of(name).values(minimum, got));
            }
        }
        let minimum = self
            .tee_tcb_svn
            .as_deref()
            .and_then(unhex::<16>)
            .unwrap_or_default();
        let got = quote.body.tee_tcb_svn;
        if got.iter().zip(minimum).any(|(got, minimum)| *got < minimum) {
            let (got, minimum) = (hex(&got), hex(&minimum));
            let text =
                format!("teeTCBSVN is {got}, below the minimum {minimum} in one of its bytes");
            let refusal = Kind::Outdated.because(text).of("teeTCBSVN");
            return Err(refusal.values(minimum, got));
        }
        for (name, expected, got) in [
            (
                "qeVendorID",
                &self.qe_vendor_id,
                quote.signed.get(12..28).unwrap_or_default(),
            ),
            ("mrSeam", &self.mr_seam, &quote.body.mr_seam),
            ("xfam", &self.xfam, &quote.body.xfam.to_le_bytes()),
        ] {
            let expected = expected.as_deref().unwrap_or_default().to_ascii_lowercase();
            if !expected.is_empty() && expected != hex(got) {
                let got = hex(got);
                let text = format!("{name} is {got}, expected {expected}");
                return Err(Kind::Measurement
                    .because(text)
                    .of(name)
                    .values(expected, got));
            }
        }
        Ok(())
    }
}
