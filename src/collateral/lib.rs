//! What validators fetch and cache: certificates of chips, collateral of quotes, the word of clouds. Only services and the operator's
//! command link this crate; a node judges what evidence contains.

use std::sync::Arc;

use attest::attestation::sources::Sources;

/// Fetches from the vendors and the clouds, and caches.
struct Online;

impl Sources for Online {}

/// Returns the sources of a program that may use the network.
pub fn online() -> Arc<dyn Sources> {
    Arc::new(Online)
}
