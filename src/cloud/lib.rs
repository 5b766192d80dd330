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

use base::machines::{Cloud, Error, Role};

/// Lists host names and addresses. Each call reads or requests them again.
pub type ListHosts = Arc<dyn Fn() -> Result<Vec<String>, Error> + Send + Sync>;

/// What a machine's own metadata says about its cluster, without a cloud API.
pub struct Own {
    /// Whether it needs no network.
    pub is_local: bool,
    /// Lists of hosts that may have a join service, with their names for people.
    pub lists: Vec<(&'static str, ListHosts)>,
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
    let tag = peers::MachineTag::new(ask, place)?;
    Ok(Own {
        is_local: false,
        lists: vec![("machine's tag", Arc::new(move || tag.hosts()))],
    })
}

fn of_list(list: r#static::ListedMetadata) -> Own {
    let hosts = move || {
        let list = list.list()?;
        let own = list.this().map(|one| &*one.address);
        let planes = list.control_planes().map(|one| &*one.address);
        let hosts = planes.chain([list.endpoint()]);
        // this machine has no join service before it has its key
        let others = hosts.filter(|host| Some(*host) != own);
        Ok(others.map(str::to_owned).collect())
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

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use support::metadata::MetadataServer;

    use super::*;

    fn listed(own: Own) -> Vec<(&'static str, Vec<String>)> {
        let lists = own.lists.into_iter();
        lists.map(|(name, list)| (name, list().unwrap())).collect()
    }

    #[test]
    fn a_list_of_machines_gives_the_endpoint_and_the_other_control_planes() {
        let machines = r#""machines":[{"name":"w","role":"worker","address":"10.0.0.9"},
            {"name":"a","role":"control-plane","address":"10.0.0.1"},
            {"name":"b","role":"control-plane","address":"b.example"}]"#;
        for (more, expected) in [
            ("", &["10.0.0.1", "b.example", "10.0.0.1"][..]),
            (
                r#","endpoint":"c.example""#,
                &["10.0.0.1", "b.example", "c.example"],
            ),
            (r#","self":"w""#, &["10.0.0.1", "b.example", "10.0.0.1"]),
            // not this machine, neither by its name nor as the endpoint
            (r#","self":"A""#, &["b.example"]),
            (
                r#","self":"b","endpoint":"c.example""#,
                &["10.0.0.1", "c.example"],
            ),
        ] {
            let place = format!(
                "base64:{}",
                STANDARD.encode(format!("{{{machines}{more}}}"))
            );
            let own = own(Cloud::Static, Some(&place)).unwrap();
            assert!(own.is_local);
            let expected = expected.iter().map(|host| (*host).to_owned()).collect();
            assert_eq!(listed(own), [("list of machines", expected)], "{more}");
        }
    }

    #[test]
    fn a_service_gives_the_endpoint_and_the_control_planes() {
        let server = MetadataServer::start(([127, 0, 0, 1], 0).into());
        server.set_endpoint("lb.example");
        server.set_peers(
            r#"[{"Name":"w","ProviderID":"qemu:///w","Role":"Worker","VPCIP":"10.0.0.9"},
                {"Name":"a","ProviderID":"qemu:///a","Role":"ControlPlane","VPCIP":"10.0.0.1"}]"#,
        );
        let own = own(Cloud::Qemu, Some(&format!("http://{}", server.address))).unwrap();
        assert!(!own.is_local);
        let expected = [
            ("load balancer", vec!["lb.example".to_owned()]),
            ("control planes", vec!["10.0.0.1".to_owned()]),
        ];
        assert_eq!(listed(own), expected);
    }
}
