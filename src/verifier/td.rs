//! The common part of the TDX variants: the judgement of a quote, and Intel's collateral.

use std::sync::Arc;

pub use attest::td::*;
use hardware::tdx::{TdxCollateral, TdxQuote, Verifier};
use rustls::pki_types::UnixTime;

use super::policy::{Fault, PolicyError};
use super::refusal::Refusal;
use super::sources::Sources;
use super::{PlatformClaims, Policy};
use proto::attested::Collateral as Brought;

/// Judges quotes of the hardware.
pub struct QuoteJudge {
    verifier: Verifier,
    policy: Arc<Policy>,
    sources: Arc<dyn Sources>,
}

impl QuoteJudge {
    /// Makes a judge by a policy. Trusts Intel's root; with `intelRootKey` only that root instead.
    pub fn new(
        policy: &Arc<Policy>,
        sources: &Arc<dyn Sources>,
    ) -> Result<QuoteJudge, PolicyError> {
        let verifier = match policy.old_tdx().root()? {
            Some(root) => root,
            None => Verifier::of_intel().map_err(|why| Fault::Requirement.because(why))?,
        };
        Ok(QuoteJudge {
            verifier,
            policy: policy.clone(),
            sources: sources.clone(),
        })
    }

    /// Judges under another root.
    pub fn with_root(self, verifier: Verifier) -> QuoteJudge {
        QuoteJudge { verifier, ..self }
    }

    /// Returns what a quote proves. `sent` is the collateral that the machine sent; the collateral
    /// of the sources has priority.
    pub fn judge(
        &self,
        quote: TdxQuote<'_>,
        sent: Option<&TdxCollateral>,
        now: UnixTime,
    ) -> Result<PlatformClaims, Refusal> {
        let (now, policy) = (now.as_secs(), &self.policy);
        policy.old_tdx().check(&quote)?;
        let fetched = match self.sources.tdx_collateral_at_hand(&quote) {
            Some(collateral) => Ok(collateral),
            None => self.fetch(&quote, now),
        };
        let collateral = match (&fetched, sent) {
            (Ok(fetched), _) => fetched,
            (Err(_), Some(sent)) => sent,
            (Err(why), None) => return Err(why.clone()),
        };
        let verified = self.verifier.verify(quote, collateral, now)?;
        let mut claims = policy.tdx().judge(&verified)?;
        policy.old_tdx().show(verified.quote(), &mut claims);
        Ok(claims)
    }

    /// Returns collateral that is not cached. A stranger's quote must not cause a request, so
    /// checks that need no collateral come first.
    fn fetch(&self, quote: &TdxQuote<'_>, now: u64) -> Result<Arc<TdxCollateral>, Refusal> {
        if self.sources.fetches() {
            let signer = self.verifier.signed_platform(quote, now)?;
            self.policy.tdx().check(quote, &signer)?;
        }
        Ok(self.sources.tdx_collateral(quote)?)
    }
}

/// Returns Intel's collateral for the platform of a quote in the form in which a peer sends it, or
/// `None` if these sources do not have it.
pub(super) fn collateral_of(quote: &[u8], sources: &dyn Sources) -> Option<Brought> {
    let quote = TdxQuote::parse(quote).ok()?;
    let collateral = sources.tdx_collateral(&quote).ok()?;
    Some(Brought {
        intel: serde_json::to_vec(&*collateral).ok()?,
        ..Brought::default()
    })
}
