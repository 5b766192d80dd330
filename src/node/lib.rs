//! What the two programs on a node share: [`options`] is what they are told and how they start, [`tickets`] asks the join
//! services, [`quotes`] tells the console of attestation.

pub mod options;
pub mod quotes;
pub mod tickets;
