//! Amazon Web Services: the credentials of requests, their signatures, the client of the instance's metadata service and of the
//! APIs, and the APIs' answers in XML.
//!
//! ```text
//! credentials   the variables of the environment, or the instance's role
//! sigv4         the signature of a request
//! client        IMDSv2; EC2, Elastic Load Balancing, tags: signed, with the clock of AWS
//! xml, error    what the APIs answer
//! peers         a machine, its peers, and their load balancer
//! ```

mod client;
pub mod credentials;
mod error;
mod peers;
pub mod sigv4;
pub mod xml;

pub use client::{Failed, InstanceIdentity, SignedClient, domain, is_name, parse_identity};
pub use error::{is_of_credentials, parse_error};
pub use peers::{AwsClient, parse_aliases, parse_arn, parse_dns_name, parse_instances};
