//! The requirements that only policies of Constellation write. They are judged as long as such a policy is in force.

pub mod snp;
pub mod tdx;
