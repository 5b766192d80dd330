//! How a command fails.

/// Exit code: the node does not meet the policy. A retry does not help.
pub const ATTESTATION_REFUSED: u8 = 3;
/// Exit code: the node could not be reached, or did not answer in time.
pub const UNREACHABLE: u8 = 4;
