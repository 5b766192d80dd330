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

use machines::{Cloud, Error, Role};

/// Lists host names and addresses. Each call reads or requests them again.
pub type Hosts = Arc<dyn Fn() -> Result<Vec<String>, Error> + Send + Sync>;

/// What a machine's own metadata says about its cluster, without a cloud API.
pub struct Own {
    /// Whether it needs no network.
    pub is_local: bool,
    /// Lists of hosts that may have a join service, with their names for people.
    pub lists: Vec<(&'static str, Hosts)>,
}

/// Returns what the own metadata of a machine in this cloud says. `place` is its location in the
/// form of `--metadata`; `None` is the default. Sends no request.
pub fn own(cloud: Cloud, place: Option<&str>) -> Result<Own, Error> {
    let ask = match cloud {
        Cloud::Static => return r#static::client(place).map(of_list),
        Cloud::Qemu => return qemu::client(place).map(of_service),
        Cloud::Aws => peers::aws,
        Cloud::Gcp => peers::gcp,
        Cloud::Azure => peers::azure,
        Cloud::OpenStack | Cloud::Stackit => peers::openstack,
    };
    let tag = peers::Tag::new(ask, place)?;
    Ok(Own {
        is_local: false,
        lists: vec![("machine's tag", Arc::new(move || tag.hosts()))],
    })
}

fn of_list(list: r#static::ListedMetadata) -> Own {
    let hosts = move || {
        let list = list.list()?;
        let planes = list.control_planes().map(|one| one.address.clone());
        Ok(planes.chain([list.endpoint().to_owned()]).collect())
    };
    Own {
        is_local: true,
        lists: vec![("list of machines", Arc::new(hosts))],
    }
}

fn of_service(service: qemu::QemuMetadata) -> Own {
    let service = Arc::new(service);
    let other = service.clone();
    let planes = move || {
        let planes = service.peers()?.into_iter();
        let planes = planes.filter(|one| one.role == Role::ControlPlane);
        let addresses = planes.filter_map(|one| one.vpc_ip);
        Ok(addresses.map(|address| address.to_string()).collect())
    };
    let endpoint = move || Ok(vec![other.endpoint()?]);
    Own {
        is_local: false,
        lists: vec![
            ("load balancer", Arc::new(endpoint)),
            ("control planes", Arc::new(planes)),
        ],
    }
}
