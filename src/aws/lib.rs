//! Amazon Web Services: the credentials of requests, their signatures, the client of the instance's metadata service and of the
//! APIs, and the APIs' answers in XML.
//!
//! ```text
//! credentials   the variables of the environment, or the instance's role
//! sigv4         the signature of a request
//! client        IMDSv2; EC2, Elastic Load Balancing, tags: signed, with the clock of AWS
//! xml, error    what the APIs answer
//! ```

#![forbid(unsafe_code)]

mod client;
pub mod credentials;
mod error;
pub mod sigv4;
pub mod xml;

pub use client::{
    Apis, Call, Client, Failed, Identity, domain, is_name, name, parse_identity, query,
};
pub use error::{is_of_credentials, parse_error};
