//! What a validator needs and evidence may not contain: certificates of chips, collateral, the word of a cloud.

use std::sync::Arc;

/// Gets what evidence does not contain. Each method answers from a cache where it can, and never blocks longer than its deadline.
/// A program without access to the network uses [`offline`].
pub trait Sources: Send + Sync {}

/// Has nothing: evidence must contain all that its validation needs.
struct Offline;

impl Sources for Offline {}

/// Returns the sources of a program that fetches nothing.
pub fn offline() -> Arc<dyn Sources> {
    Arc::new(Offline)
}
