//! What a machine's own metadata says about the machine and its peers. The crate `cloud_api` has
//! the clients of the clouds' APIs, where only an API knows the peers.
//!
//! The metadata comes from the host, which is not trusted: a node uses it only together with
//! attestation.

pub mod http;
pub mod peers;
pub mod plain;
pub mod qemu;
pub mod r#static;

pub use r#static::{Machines, Problem};

use std::sync::Arc;

use machines::{Cloud, Made};

/// What a machine's own metadata says about its cluster, without a cloud API.
#[derive(Clone, Copy)]
pub enum Own {
    /// All machines, from a list that needs no network. The function makes the client of the list
    /// at a location, in the form of `--metadata`; `None` is the default. Sends no request.
    List(fn(place: Option<&str>) -> Made),
    /// All machines, from a metadata service.
    Service(fn(place: Option<&str>) -> Made),
    /// The tag [`peers::TAG`] of the machine.
    Tag(peers::Ask),
}

/// Returns what the own metadata of a machine in this cloud says.
pub fn own(cloud: Cloud) -> Own {
    match cloud {
        Cloud::Static => Own::List(|place| Ok(Arc::new(r#static::client(place)?))),
        Cloud::Qemu => Own::Service(|place| Ok(Arc::new(qemu::client(place)?))),
        Cloud::Aws => Own::Tag(peers::aws),
        Cloud::Gcp => Own::Tag(peers::gcp),
        Cloud::Azure => Own::Tag(peers::azure),
        Cloud::OpenStack | Cloud::Stackit => Own::Tag(peers::openstack),
    }
}
