//! What a cluster accepts: images, policies, evidence, and the vendors' certificates.

pub(crate) mod collateral;
pub(crate) mod components;
pub mod explain;
pub(crate) mod launch_digest;
pub(crate) mod launch_endorsement;
pub(crate) mod measure;
pub(crate) mod measure_image;
pub mod policy;
pub(crate) mod roots;
pub mod verify;
