//! Checks on the answers of a metadata service. The host can forge these answers. Answers that contradict each other, or that would
//! send a node to itself, are refused: no honest cloud gives them.

use base::sync::lock;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;

use base::machines::{Error, Instance, Role, is_host};

use crate::CloudMetadata;

use crate::range::Range;
use crate::service::{Alias, Service};

/// The metadata service of a cloud, whose answers are checked.
pub struct Guarded {
    client: Box<dyn Service>,
    /// This machine, as the first answer described it.
    own: Mutex<Option<Instance>>,
}

impl Guarded {
    /// Checks the answers of this client.
    pub fn new(client: impl Service + 'static) -> Guarded {
        Guarded {
            client: Box::new(client),
            own: Mutex::default(),
        }
    }
}

impl CloudMetadata for Guarded {
    fn own_instance(&self) -> Result<Instance, Error> {
        let own = self.client.own_instance()?;
        if let Some(fault) = own.vpc_ip.and_then(fault_of_address) {
            let why = format!(
                "this machine has the address {}, which {fault}",
                shown(&own)
            );
            return Err(Error::Refused(why));
        }
        let mut known = lock(&self.own);
        if let Some(known) = known.as_ref() {
            check_same(known, &own)?;
        }
        *known = Some(own.clone());
        Ok(own)
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        let known = lock(&self.own).clone();
        let own = known.map_or_else(|| self.own_instance(), Ok)?;
        let ranges = self.client.ranges()?;
        let mut peers = self.client.peers()?;
        peers.retain(|peer| {
            let Some(address) = peer.vpc_ip else {
                return true;
            };
            let fault = fault_of_address(address).map(str::to_owned).or_else(|| {
                let is_in = ranges.is_empty() || ranges.iter().any(|range| range.contains(address));
                let ranges: Vec<_> = ranges.iter().map(Range::to_string).collect();
                (!is_in).then(|| format!("is outside the cluster's network {}", ranges.join(", ")))
            });
            if let Some(fault) = &fault {
                log::warn!(
                    "metadata: ignoring the machine {}: its address {fault}",
                    shown(peer)
                );
            }
            fault.is_none()
        });
        let (mut names, mut addresses) = (HashMap::new(), HashMap::new());
        for peer in &peers {
            if names.insert(&peer.name, ()).is_some() {
                let why = format!("the list of machines contains {:?} twice", peer.name);
                return Err(Error::Refused(why));
            }
            let Some(address) = peer.vpc_ip else {
                continue;
            };
            if let Some(other) = addresses.insert(address, &peer.name) {
                let name = &peer.name;
                let why =
                    format!("the machines {other:?} and {name:?} have one address, {address}");
                return Err(Error::Refused(why));
            }
        }
        if let Some(listed) = peers.iter().find(|peer| peer.name == own.name) {
            check_same(&own, listed)?;
            if listed.vpc_ip != own.vpc_ip {
                let why = format!(
                    "this machine is {} in the list of machines, and {} by its own metadata",
                    shown(listed),
                    shown(&own)
                );
                return Err(Error::Refused(why));
            }
        }
        Ok(peers)
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        let host = self.client.load_balancer_endpoint()?;
        let fault = match host.parse() {
            Ok(address) => fault_of_address(address),
            Err(_) if !is_host(&host) => Some("is not a host name"),
            Err(_) => {
                let name = host.trim_end_matches('.').to_ascii_lowercase();
                let is_own = name == "localhost" || name.ends_with(".localhost");
                is_own.then_some("is this machine")
            }
        };
        match fault {
            None => Ok(host),
            Some(fault) => {
                let host: String = host.chars().take(100).collect();
                let why = format!("the load balancer is at {host:?}, which {fault}");
                Err(Error::Refused(why))
            }
        }
    }
}

impl Service for Guarded {
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        let mut aliases = self.client.aliases()?;
        for alias in &mut aliases {
            (alias.addresses).retain(|address| fault_of_address(*address).is_none());
        }
        Ok(aliases)
    }

    fn init_secret_hash(&self) -> Result<String, Error> {
        self.client.init_secret_hash()
    }
}

/// Says what is wrong with an address that a machine of a cloud's network cannot have.
fn fault_of_address(address: IpAddr) -> Option<&'static str> {
    let address = address.to_canonical();
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    match address {
        _ if address.is_loopback() => Some("is a loopback address"),
        _ if address.is_unspecified() => Some("is no machine's address"),
        _ if address.is_multicast() => Some("is a multicast address"),
        _ if is_link_local => Some("is a link-local address"),
        _ => None,
    }
}

/// Checks that two answers describe one machine. A role may still be missing in the first.
fn check_same(known: &Instance, other: &Instance) -> Result<(), Error> {
    let is_role = known.role == Role::Unknown || known.role == other.role;
    // Azure writes the names of resources sometimes in upper case and sometimes in lower case
    let is_id = known.provider_id.eq_ignore_ascii_case(&other.provider_id);
    if known.name == other.name && is_id && is_role {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "this machine was {}, and is now {}: a machine keeps its name and its role",
        shown(known),
        shown(other)
    )))
}

/// Describes a machine for an error.
fn shown(machine: &Instance) -> String {
    let address = machine
        .vpc_ip
        .map_or("no address".into(), |ip| ip.to_string());
    format!(
        "{:?} ({}, {address}, {:?})",
        machine.name, machine.role, machine.provider_id
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A cloud with the answers that a test sets.
    struct Fake {
        own: Arc<Mutex<Instance>>,
        peers: Vec<Instance>,
        load_balancer: &'static str,
    }

    impl CloudMetadata for Fake {
        fn own_instance(&self) -> Result<Instance, Error> {
            Ok(self.own.lock().unwrap().clone())
        }
        fn peers(&self) -> Result<Vec<Instance>, Error> {
            Ok(self.peers.clone())
        }
        fn load_balancer_endpoint(&self) -> Result<String, Error> {
            Ok(self.load_balancer.into())
        }
    }

    impl Service for Fake {
        fn init_secret_hash(&self) -> Result<String, Error> {
            unreachable!("no test asks")
        }
        fn aliases(&self) -> Result<Vec<Alias>, Error> {
            Ok(vec![Alias {
                machine: "a".into(),
                names: vec!["a.example".into()],
                addresses: ["203.0.113.1", "127.0.0.1", "::ffff:127.0.0.1", "fe80::1"]
                    .map(|address| address.parse().unwrap())
                    .to_vec(),
            }])
        }
        fn ranges(&self) -> Result<Vec<Range>, Error> {
            Ok(["10.0.0.0/16", "2001:db8::/56"]
                .map(|range| Range::parse(range).unwrap())
                .to_vec())
        }
    }

    fn machine(name: &str, address: &str) -> Instance {
        Instance {
            name: name.into(),
            provider_id: format!("x:///{name}"),
            role: Role::Worker,
            vpc_ip: Some(address.parse().unwrap()),
        }
    }

    fn guarded(peers: Vec<Instance>, load_balancer: &'static str) -> Guarded {
        Guarded::new(Fake {
            own: Arc::new(Mutex::new(machine("a", "10.0.0.1"))),
            peers,
            load_balancer,
        })
    }

    fn refused(guarded: &Guarded) -> String {
        match guarded.peers() {
            Err(Error::Refused(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn peers_outside_the_network_are_left_out() {
        let good = [machine("a", "10.0.0.1"), machine("b", "2001:db8::2")];
        let bad = [
            "127.0.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "192.0.2.1",
            "::1",
            "fe80::1",
            "::ffff:127.0.0.1",
            "2001:db8:1::1",
        ];
        let bad = bad.map(|address| machine(address, address));
        let guarded = guarded([&good[..], &bad].concat(), "");
        assert_eq!(guarded.peers().unwrap(), good);
    }

    #[test]
    fn a_list_that_contradicts_itself_is_refused() {
        let (own, b) = (machine("a", "10.0.0.1"), machine("b", "10.0.0.2"));
        let why = refused(&guarded(vec![own.clone(), b.clone(), own.clone()], ""));
        assert!(why.contains("\"a\" twice"), "{why}");
        let why = refused(&guarded(vec![own.clone(), machine("c", "10.0.0.1")], ""));
        assert!(why.contains("one address, 10.0.0.1"), "{why}");
        let promoted = Instance {
            role: Role::ControlPlane,
            ..own.clone()
        };
        let why = refused(&guarded(vec![promoted, b.clone()], ""));
        assert!(why.contains("keeps its name and its role"), "{why}");
        let why = refused(&guarded(vec![machine("a", "10.0.0.9"), b], ""));
        assert!(
            why.contains("10.0.0.9") && why.contains("10.0.0.1"),
            "{why}"
        );
    }

    #[test]
    fn a_role_may_appear_and_never_changes() {
        let own = Arc::new(Mutex::new(machine("a", "10.0.0.1")));
        let guarded = Guarded::new(Fake {
            own: own.clone(),
            peers: vec![],
            load_balancer: "",
        });
        let set = |role| own.lock().unwrap().role = role;
        set(Role::Unknown);
        guarded.own_instance().unwrap();
        set(Role::Worker);
        guarded.own_instance().unwrap();
        for role in [Role::ControlPlane, Role::Unknown] {
            set(role);
            let error = guarded.own_instance().unwrap_err().to_string();
            assert!(
                error.contains("Worker") && error.contains("role"),
                "{error}"
            );
        }
        set(Role::Worker);
        guarded.own_instance().unwrap();
        own.lock().unwrap().vpc_ip = Some("127.0.0.1".parse().unwrap());
        assert!(matches!(guarded.own_instance(), Err(Error::Refused(_))));
    }

    #[test]
    fn a_machine_has_public_addresses_and_none_of_this_machine() {
        let aliases = guarded(vec![], "").aliases().unwrap();
        assert_eq!(aliases[0].names, ["a.example"]);
        let public: IpAddr = "203.0.113.1".parse().unwrap();
        assert_eq!(aliases[0].addresses, [public]);
    }

    #[test]
    fn a_load_balancer_on_this_machine_is_refused() {
        for host in ["10.0.0.5", "203.0.113.9", "2001:db8::5", "x-1.elb.example"] {
            let found = guarded(vec![], host).load_balancer_endpoint();
            assert_eq!(found.unwrap(), host);
        }
        for host in [
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "localhost",
            "LocalHost.",
            "x.localhost",
            "169.254.169.254",
            "a b",
            "",
        ] {
            let found = guarded(vec![], host).load_balancer_endpoint();
            assert!(matches!(found, Err(Error::Refused(_))), "{host}");
        }
    }
}
