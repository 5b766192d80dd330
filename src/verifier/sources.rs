//! The data that a validator needs and evidence may not contain: certificates of chips, collateral,
//! statements of a cloud.

use std::sync::Arc;

use hardware::Cause;
pub use hardware::Unavailable;
use hardware::snp::chain::Fetched;
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::tcb::Product;
use hardware::tdx::{TdxCollateral, TdxQuote};

use super::instance::CloudInstance;
use super::maa::{Question, Word};

/// Gets the data that evidence does not contain. Each method uses its cache if it can, and never
/// blocks longer than its deadline. A program without access to the network uses [`offline`].
pub trait Sources: Send + Sync {
    /// Returns whether the program fetches collateral, or has a cache. Only such a program can
    /// require lists of revoked certificates that evidence does not contain.
    fn fetches(&self) -> bool {
        false
    }

    /// Returns Intel's collateral of the platform in a quote. If the sources fetch, the validator
    /// has first verified that this platform signed the quote: otherwise anybody could cause
    /// requests.
    fn tdx_collateral(&self, _quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        Err(Cause::Offline.because(
            "this program fetches no collateral of TDX platforms, and the machine sent none: put Intel's collateral into its file \
             /etc/firstlight/tdx-collateral.json",
        ))
    }

    /// Returns what [`Sources::tdx_collateral`] returns without a request, for a quote that is not
    /// verified yet. Without network access both methods return the same.
    fn tdx_collateral_at_hand(&self, _quote: &TdxQuote<'_>) -> Option<Arc<TdxCollateral>> {
        None
    }

    /// Returns the certificates of the chip in a report, for a machine that did not send its
    /// chip's. The report is not verified, so it can name any chip; but a validator has checked its
    /// content against the requirements. A report of version 2 does not contain the product, so the
    /// caller passes it.
    fn snp_certificates(
        &self,
        _report: &Report,
        product: Product,
    ) -> Result<Arc<Fetched>, Unavailable> {
        Err(Cause::Offline.because(format!(
            "this program fetches no certificates of AMD's chips, and the machine, a {product}, sent none"
        )))
    }

    /// Returns AMD's CA certificate for a product and its revocation list, for a machine that sent
    /// its chip's certificate. It does not depend on the report, so no report can prevent a
    /// validator from getting the list.
    fn snp_authority(
        &self,
        product: Product,
        _signer: ReportSigner,
    ) -> Result<Arc<Fetched>, Unavailable> {
        Err(Cause::Offline.because(format!(
            "this program fetches no revocation list of AMD for {product}"
        )))
    }

    /// Returns the certificate of the CA that issued this certificate, for a machine that did not
    /// send it. Neither certificate is verified here. `None` if this certificate has no URL of its
    /// issuer, or if this program does not fetch.
    fn issuer(&self, _certificate: &[u8]) -> Result<Option<Vec<u8>>, Unavailable> {
        Ok(None)
    }

    /// Keeps the result of [`Sources::issuer`] for a certificate, after the validator verified the
    /// chain through it. Before that, it is kept in memory only, because anybody can publish a CA
    /// certificate.
    fn keep_issuer(&self, _certificate: &[u8]) {}

    /// Returns the token of Microsoft's attestation service about an Azure machine. The caller has
    /// verified the report and everything else, and compares the token with the report.
    fn microsofts_word(&self, question: &Question<'_>) -> Result<Arc<Word>, Unavailable> {
        Err(Cause::Offline.because(format!(
            "this program does not ask {}: only the services and firstlight do",
            question.url
        )))
    }

    /// Returns EC2's description of an instance: its account and its zone. The caller has verified
    /// that the instance has this ID, and everything else: an invented ID must not cause a request.
    fn ec2_instance(&self, _id: &str) -> Result<Arc<CloudInstance>, Unavailable> {
        Err(Cause::Offline.because(
            "this program does not ask EC2, so it cannot judge a machine of AWS by a policy with accounts or zones: only the services and \
             firstlight can",
        ))
    }
}

/// Sources without data: evidence must contain everything that its validation needs.
struct Offline;

impl Sources for Offline {}

/// Returns the sources of a program that fetches nothing.
pub fn offline() -> Arc<dyn Sources> {
    Arc::new(Offline)
}
