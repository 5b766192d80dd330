//! Clients of the clouds' APIs and metadata services. An API knows a machine's peers and the address of the cluster. Each cloud
//! with an API has a file.
//!
//! The program of the initramfs does not link this crate: a reboot needs only addresses, and the state disk's header has these.

mod answer;
pub mod aws;
pub mod azure;
mod bearer;
pub mod gcp;
mod guard;
mod https;
pub mod listed;
pub mod openstack;
mod pages;
mod place;
mod range;
mod service;

pub use range::Range;
pub use service::{Alias, CloudMetadata, Made, Service, bcrypt_hash};

use std::sync::Arc;

use base::machines::Cloud;
use guard::Guarded;

/// Creates the client of a cloud's services, which describe a machine and its peers. `place`, e.g. `http://10.42.0.1:8080`,
/// replaces the default. Sends no request.
pub fn metadata(cloud: Cloud, place: Option<&str>) -> Made {
    match cloud {
        Cloud::Aws => guarded(aws::AwsClient::new(place)?),
        Cloud::Gcp => guarded(gcp::GcpClient::new(place)?),
        Cloud::Azure => guarded(azure::AzureClient::new(place)?),
        Cloud::OpenStack | Cloud::Stackit => guarded(openstack::OpenstackClient::new(place)?),
        // they need no API
        Cloud::Qemu => Ok(Arc::new(cloud::qemu::client(place)?)),
        Cloud::Static => Ok(Arc::new(cloud::r#static::client(place)?)),
    }
}

/// Returns the time source that a cloud offers to each machine, in the form of the setting
/// `time-servers`. It belongs to the host, as the machine's clock does.
pub fn time_source(cloud: Cloud) -> Option<&'static str> {
    match cloud {
        Cloud::Aws => Some("169.254.169.123"),
        // metadata.google.internal
        Cloud::Gcp => Some("169.254.169.254"),
        // the driver hv_utils; udev names the device
        Cloud::Azure => Some("/dev/ptp_hyperv"),
        Cloud::OpenStack | Cloud::Stackit | Cloud::Qemu | Cloud::Static => None,
    }
}

fn guarded(client: impl Service + 'static) -> Made {
    Ok(Arc::new(Guarded::new(client)))
}
