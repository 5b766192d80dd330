//! Collateral that a peer sends with its document, for a program that fetches none.
//!
//! AMD, Intel or Google signed it, so the sender need not be trusted: it can only omit the collateral, or
//! send an older one that is still valid.

use std::sync::{Arc, OnceLock};

use hardware::snp::chain::Fetched;
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::tcb::Product;
use hardware::tdx::{TdxCollateral, TdxQuote};
use hardware::{Cause, Unavailable};
use proto::attested;

use super::printable;
use super::sources::Sources;

/// Why there is no list of revoked certificates.
const NO_LIST: &str = "the peer sent no revocation list of AMD, and this program fetches none";
/// Maximum length of an error of serde_json in a log line.
const SHOWN_ERROR: usize = 160;

/// The sources for the judgement of one peer: only what the peer sent.
#[derive(Default)]
pub struct Carried(OnceLock<attested::Collateral>);

impl Carried {
    /// Stores what the peer sent. A connection has exactly one proof of a peer, so a second call
    /// has no effect.
    pub fn take(&self, collateral: &attested::Collateral) {
        let _ = self.0.set(collateral.clone());
    }

    /// Returns AMD's certificates that the peer sent, with the certificate of this chip.
    fn of_amd(&self, leaf: Option<Vec<u8>>) -> Result<Arc<Fetched>, Unavailable> {
        let brought = self.0.get().filter(|it| !it.amd_authority.is_empty());
        let brought = brought.ok_or_else(|| Cause::Offline.because(NO_LIST))?;
        let list = &brought.amd_revoked;
        Ok(Arc::new(Fetched {
            leaf,
            intermediate: brought.amd_authority.clone(),
            revoked: if list.is_empty() {
                Err(Cause::Offline.because(NO_LIST))
            } else {
                Ok(list.clone())
            },
        }))
    }
}

impl Sources for Carried {
    fn tdx_collateral(&self, _quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        let brought = self.0.get().filter(|it| !it.intel.is_empty());
        let brought = brought.ok_or_else(|| Cause::Offline.because(
            "the peer sent no collateral of its TDX platform, and this program fetches none: the peer may still be fetching it, or failed \
             (its log says why)",
        ))?;
        let read = serde_json::from_slice(&brought.intel);
        read.map(Arc::new).map_err(|error| {
            let error = printable(&error.to_string(), SHOWN_ERROR);
            Unavailable::malformed(error).about("the collateral that the peer sent cannot be read")
        })
    }

    fn snp_certificates(
        &self,
        _report: &Report,
        product: Product,
    ) -> Result<Arc<Fetched>, Unavailable> {
        let chip = self.0.get().map(|brought| &brought.amd_chip);
        match chip.filter(|chip| !chip.is_empty()) {
            Some(chip) => self.of_amd(Some(chip.clone())),
            None => Err(Cause::Offline.because(format!(
                "the peer, a {product}, sent no certificate of its chip, and this program fetches none"
            ))),
        }
    }

    fn snp_authority(
        &self,
        _product: Product,
        _signer: ReportSigner,
    ) -> Result<Arc<Fetched>, Unavailable> {
        self.of_amd(None)
    }

    fn issuer(&self, _certificate: &[u8]) -> Result<Option<Vec<u8>>, Unavailable> {
        let brought = self.0.get().map(|brought| &brought.key_authority);
        Ok(brought.filter(|one| !one.is_empty()).cloned())
    }
}
