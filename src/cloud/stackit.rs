//! STACKIT: the same services as OpenStack's, under another name.

use super::{Cloud, openstack as same};

/// STACKIT.
pub const CLOUD: Cloud = Cloud {
    name: "stackit",
    ..same::CLOUD
};
