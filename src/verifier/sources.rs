//! What a validator needs and evidence may not contain: certificates of chips, collateral, the word of a cloud.

use std::sync::Arc;

use hardware::snp::chain::Fetched;
use hardware::snp::report::{Report, Signer};
use hardware::snp::tcb::Product;
use hardware::tdx::{Collateral, Quote};

use super::instance::Instance;
use super::maa::{Question, Word};

/// Gets what evidence does not contain. Each method answers from a cache where it can, and never blocks longer than its deadline.
/// A program without access to the network uses [`offline`].
pub trait Sources: Send + Sync {
    /// Returns whether the program fetches, or has a cache. Only such a program can demand lists of revoked certificates that evidence does
    /// not contain.
    fn fetches(&self) -> bool {
        false
    }

    /// Returns Intel's collateral of the platform that a quote names. If the sources fetch, a validator has verified that this platform
    /// signed the quote: what anybody can name would be fetched for anybody.
    fn tdx_collateral(&self, _quote: &Quote<'_>) -> Result<Arc<Collateral>, String> {
        Err(
            "this program fetches no collateral of TDX platforms, and the machine sent none: put Intel's collateral into its file \
             /etc/firstlight/tdx-collateral.json"
                .into(),
        )
    }

    /// Returns what [`Sources::tdx_collateral`] would return without a request, for a quote of which nothing is verified yet. Sources that
    /// do not fetch have nothing at hand that the other method has not.
    fn tdx_collateral_at_hand(&self, _quote: &Quote<'_>) -> Option<Arc<Collateral>> {
        None
    }

    /// Returns the certificates of the chip that a report names, for a machine that did not send its chip's. Nothing of the report is
    /// verified, so anybody can name any chip; a validator has compared what the report says with its demands. A report of version 2 does
    /// not tell its product, so the caller names it.
    fn snp_certificates(&self, _report: &Report, product: Product) -> Result<Arc<Fetched>, String> {
        Err(format!(
            "this program fetches no certificates of AMD's chips, and the machine, a {product}, sent none"
        ))
    }

    /// Returns AMD's authority of a product and its revocation list, for a machine that sent its chip's certificate. It does not depend
    /// on the report, so no report can keep a validator from the list.
    fn snp_authority(&self, product: Product, _signer: Signer) -> Result<Arc<Fetched>, String> {
        Err(format!(
            "this program fetches no revocation list of AMD for {product}"
        ))
    }

    /// Returns the certificate of the authority that issued this certificate, for a machine that did not send it. Neither certificate is
    /// verified here. `None` if this certificate has no URL of its issuer, or if this program does not fetch.
    fn issuer(&self, _certificate: &[u8]) -> Result<Option<Vec<u8>>, String> {
        Ok(None)
    }

    /// Keeps what [`Sources::issuer`] returned for a certificate: the validator has verified the chain through it. Until then it takes no room
    /// that outlives the program, since anybody can publish an authority.
    fn keep_issuer(&self, _certificate: &[u8]) {}

    /// Returns what Microsoft's attestation service says of a machine of Azure. The caller has verified the report and all else, and compares
    /// the word with the report.
    fn microsofts_word(&self, question: &Question<'_>) -> Result<Arc<Word>, String> {
        Err(format!(
            "this program does not ask {}: only the services and firstlight do",
            question.url
        ))
    }

    /// Returns what EC2 says of an instance of Amazon Web Services: its account and its zone. The caller has verified that the instance
    /// has this ID, and all else: whoever made up an ID must not cause a request.
    fn ec2_instance(&self, _id: &str) -> Result<Arc<Instance>, String> {
        Err(
            "this program does not ask EC2, so it cannot judge a machine of AWS by a policy with accounts or zones: only the services and \
             firstlight can"
                .into(),
        )
    }
}

/// Has nothing: evidence must contain all that its validation needs.
struct Offline;

impl Sources for Offline {}

/// Returns the sources of a program that fetches nothing.
pub fn offline() -> Arc<dyn Sources> {
    Arc::new(Offline)
}
