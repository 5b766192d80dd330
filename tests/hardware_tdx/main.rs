//! Quotes of TDX machines: genuine ones, and ones that a hierarchy of the tests signs, each with one fault.

mod carried;
mod forged;
mod genuine;
mod hostile;
#[path = "../node/json.rs"]
mod json;
mod machine;

use hardware::Refusal;
use hardware::tdx::quote::TdxQuote;
use hardware::tdx::tcb::TcbStatus;
use hardware::tdx::{TdxCollateral, TdxRequirements, Verified, Verifier};

/// A time at which the collateral of `tdx_quote`, and of our own hierarchy, was valid: 2025-07-01.
const JULY_2025: u64 = 1_751_328_000;

/// Verifies a quote under Intel's root.
fn verify<'q>(
    quote: &'q [u8],
    collateral: &TdxCollateral,
    now: u64,
) -> Result<Verified<'q>, Refusal> {
    let quote = TdxQuote::parse(quote)?;
    Verifier::of_intel().unwrap().verify(quote, collateral, now)
}
