//! What validators fetch: certificates of chips, collateral of quotes, the word of clouds. Only services and the operator's command
//! link this crate; a node judges what evidence contains.
//!
//! Nothing is fetched yet: evidence must contain all that its validation needs, as for a node.

use std::sync::Arc;

use attest::attestation::sources::Sources;

/// Has no source yet.
struct Online;

impl Sources for Online {}

/// Returns the sources of a program that may use the network.
pub fn online() -> Arc<dyn Sources> {
    Arc::new(Online)
}
