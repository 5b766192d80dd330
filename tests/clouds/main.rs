//! Tests the clients of the clouds' metadata and APIs: against emulators where they exist, otherwise against servers that follow
//! the published APIs and check each request.

mod aws;
mod azure;
mod ec2;
mod gcp;
mod openstack;
mod tls;

use std::sync::Arc;

use base::machines::Cloud;
use cloud_api::Service;
use common::aws::HASH;
use common::cloud_server as server;

/// Makes the client of a cloud whose services are here.
fn client(cloud: &str, place: &str) -> Arc<dyn Service> {
    let cloud = Cloud::named(cloud).unwrap();
    cloud_api::metadata(cloud, Some(place)).unwrap()
}

/// Returns the text of the error.
fn error<T: std::fmt::Debug>(result: Result<T, base::machines::Error>) -> String {
    result.unwrap_err().to_string()
}
