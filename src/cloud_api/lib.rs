//! Clients of the clouds' APIs and metadata services. An API knows a machine's peers and the address of the cluster. Other programs get
//! signed requests and tokens from here. Each cloud has a file, and a line in [`CLIENTS`].
//!
//! The program of the initramfs does not link this crate: a reboot needs only addresses, which the state disk's header has.

pub mod aws;
pub mod aws_caller;
pub mod azure;
mod bearer;
pub mod gcp;
mod guard;
mod https;
pub mod openstack;
mod pages;
mod place;
pub mod sigv4;

/// Reads the code and the message of an error. Azure's storage has them in the same XML as AWS.
pub use aws::parse_error;

use std::sync::Arc;

use cloud::http;
use cloud::plain::Url;
use cloud::{Alias, Cloud, Error, Instance, Made, Metadata, Range, Role, bcrypt_hash, is_host};
use guard::Guarded;

/// Makes the client of a cloud's services. The argument is that of [`metadata`].
type Make = fn(Option<&str>) -> Made;

/// The clouds whose API is asked, with the function that makes the client of each.
const CLIENTS: &[(Cloud, Make)] = &[
    (cloud::AWS, |place| guarded(aws::Client::new(place)?)),
    (cloud::GCP, |place| guarded(gcp::Client::new(place)?)),
    (cloud::AZURE, |place| guarded(azure::Client::new(place)?)),
    (cloud::OPENSTACK, |place| {
        guarded(openstack::Client::new(place)?)
    }),
    (cloud::STACKIT, |place| {
        guarded(openstack::Client::new(place)?)
    }),
];

fn guarded(client: impl Metadata + 'static) -> Made {
    Ok(Arc::new(Guarded::new(client)))
}

/// Creates the client of the services of a cloud that describe a machine and its peers. `place`, e.g. `http://10.42.0.1:8080`, replaces
/// the default. Sends no request.
pub fn metadata(cloud: &Cloud, place: Option<&str>) -> Made {
    if let Some(made) = cloud.metadata(place) {
        return made;
    }
    let client = CLIENTS.iter().find(|(known, _)| known.name == cloud.name);
    match client {
        Some((_, make)) => make(place),
        None => Err(Error::UnknownCloud(cloud.name.to_owned())),
    }
}

/// Returns parameters as a form (`application/x-www-form-urlencoded`), in which everything but letters, digits and `-._~` is encoded.
fn form(parameters: &[(&str, &str)]) -> String {
    let encoded: Vec<_> = parameters
        .iter()
        .map(|(name, value)| format!("{name}={}", encoded(value)))
        .collect();
    encoded.join("&")
}

/// Returns text as a part of a URL (RFC 3986 §2.1).
pub fn encoded(text: &str) -> String {
    let mut url = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                url.push(byte.into());
            }
            _ => url.push_str(&format!("%{byte:02X}")),
        }
    }
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cloud_has_one_client() {
        for cloud in cloud::ALL {
            assert!(metadata(cloud, None).is_ok(), "{}", cloud.name);
            let has_api = CLIENTS.iter().any(|(known, _)| known.name == cloud.name);
            assert!(has_api != cloud.metadata(None).is_some(), "{}", cloud.name);
        }
    }
}
