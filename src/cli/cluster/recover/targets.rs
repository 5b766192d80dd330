//! The nodes of a fleet: those in the state file, in a list of machines, or on the command line.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::shell::{error::Error, files};
use crate::workspace::{
    connect::{Attempt, Endpoint, Node},
    state::{KnownNode, State},
};
use base::machines::Role;
use base::sync::lock;
use cloud::Machines;
use proto::recoverproto;
use verifier::{KeyName, Validator};

/// Maximum number of addresses in a network, as a power of two.
const MOST_BITS: u32 = 12;
/// The number of addresses of a network that are tried at the same time.
const AT_ONCE: usize = 64;
/// Time limit of a connection to an address of a network, at which there may be no machine.
const CONNECT: Duration = Duration::from_secs(3);
/// Time limit until a server at such an address has proven what it is.
const PROOF: Duration = Duration::from_secs(30);

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its name; empty if it is unknown.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// The recovery server at each of its addresses.
    pub endpoints: Vec<Endpoint>,
}

/// A network in which waiting nodes are looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScannedNetwork {
    first: IpAddr,
    bits: u32,
}

/// Returns the nodes that the operator names, and the networks.
pub fn named(text: &str, state: &State) -> Result<(Vec<Target>, Vec<ScannedNetwork>), Error> {
    let path = Path::new(text);
    if path.is_file() {
        let list = Machines::parse(&files::read(path)?)
            .map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
        let targets = list.machines.iter().map(|machine| {
            Ok(Target {
                name: machine.name.clone(),
                role: Role::parse(&machine.role),
                endpoints: vec![Endpoint::parse(&machine.address, recoverproto::PORT)?],
            })
        });
        return Ok((targets.collect::<Result<_, Error>>()?, vec![]));
    }
    let (mut targets, mut networks) = (vec![], vec![]);
    for word in text.split(',').map(str::trim).filter(|it| !it.is_empty()) {
        if word.contains('/') {
            networks.push(ScannedNetwork::parse(word)?)
        } else {
            targets.push(at(Endpoint::parse(word, recoverproto::PORT)?, state))
        }
    }
    Ok((targets, networks))
}

/// Returns the nodes in the state file.
pub fn in_state(state: &State) -> Result<Vec<Target>, Error> {
    let target = |node: &KnownNode| {
        let endpoint = |address: &String| Endpoint::parse(address, recoverproto::PORT);
        Ok(Target {
            name: node.name.clone(),
            role: node.role,
            endpoints: node
                .addresses
                .iter()
                .map(endpoint)
                .collect::<Result<_, Error>>()?,
        })
    };
    state.nodes.iter().map(target).collect()
}

/// Returns the node at an address; name and role are those of the node that the state file has there.
fn at(endpoint: Endpoint, state: &State) -> Target {
    let is_here = |address: &String| same_host(address, endpoint.host());
    let known = (state.nodes.iter()).find(|node| node.addresses.iter().any(is_here));
    Target {
        name: known.map(|node| node.name.clone()).unwrap_or_default(),
        role: known.map_or(Role::Unknown, |node| node.role),
        endpoints: vec![endpoint],
    }
}

/// Returns the node of the state file that has this attestation key.
pub fn with_key<'a>(state: &'a State, key: &KeyName) -> Option<&'a KnownNode> {
    state
        .nodes
        .iter()
        .find(|node| node.key.as_ref() == Some(key))
}

fn same_host(one: &str, other: &str) -> bool {
    match (one.parse::<IpAddr>(), other.parse::<IpAddr>()) {
        (Ok(one), Ok(other)) => one.to_canonical() == other.to_canonical(),
        _ => one.eq_ignore_ascii_case(other),
    }
}

impl ScannedNetwork {
    /// Parses `10.42.2.0/24`.
    fn parse(text: &str) -> Result<ScannedNetwork, Error> {
        let wrong = |why: &str| Error::Usage(format!("--nodes: {text:?}: {why}"));
        let form = || wrong("it is neither a file nor a network: expected as 10.42.2.0/24");
        let (address, prefix) = text.split_once('/').ok_or_else(form)?;
        let address: IpAddr = address.parse().map_err(|_| form())?;
        let prefix: u32 = prefix.parse().map_err(|_| form())?;
        let bits = match address {
            IpAddr::V4(_) => 32u32,
            IpAddr::V6(_) => 128,
        };
        let bits = bits.checked_sub(prefix).ok_or_else(form)?;
        if bits > MOST_BITS {
            return Err(wrong(
                "a network has at most 4096 addresses: name smaller ones",
            ));
        }
        let mask = |value: u128| value & !((1u128 << bits) - 1);
        let first = match address {
            // the mask leaves the upper bits of the 32, so the value still fits
            IpAddr::V4(v4) => Ipv4Addr::from(mask(v4.to_bits().into()) as u32).into(),
            IpAddr::V6(v6) => Ipv6Addr::from(mask(v6.to_bits())).into(),
        };
        Ok(ScannedNetwork { first, bits })
    }

    /// Returns the addresses of machines: in IPv4 the first and the last one of a network belong to
    /// none.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let count = 1u32 << self.bits;
        let range = match (self.first, count) {
            (IpAddr::V4(_), 4..) => 1..count - 1,
            _ => 0..count,
        };
        let first = self.first;
        range.map(move |number| match first {
            IpAddr::V4(v4) => Ipv4Addr::from(v4.to_bits() + number).into(),
            IpAddr::V6(v6) => Ipv6Addr::from(v6.to_bits() + u128::from(number)).into(),
        })
    }
}

/// Returns the nodes of these networks whose recovery server speaks attested TLS, whether `judge`
/// accepts them or not.
pub fn scan(networks: &[ScannedNetwork], judge: &Arc<dyn Validator>, state: &State) -> Vec<Target> {
    let all: Vec<IpAddr> = networks
        .iter()
        .flat_map(ScannedNetwork::addresses)
        .collect();
    let left = Mutex::new(all.into_iter());
    let found = Mutex::new(vec![]);
    let search = || {
        loop {
            // a `while let` would hold the lock in its body
            let Some(address) = lock(&left).next() else {
                return;
            };
            if let Some(endpoint) = waiting_at(address, judge) {
                lock(&found).push((address, endpoint));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(search);
        }
    });
    let mut found = std::mem::take(&mut *lock(&found));
    found.sort_by_key(|(address, _)| *address);
    found
        .into_iter()
        .map(|(_, endpoint)| at(endpoint, state))
        .collect()
}

fn waiting_at(address: IpAddr, judge: &Arc<dyn Validator>) -> Option<Endpoint> {
    let socket = SocketAddr::new(address, recoverproto::PORT);
    TcpStream::connect_timeout(&socket, CONNECT).ok()?;
    let endpoint = Endpoint::parse(&address.to_string(), recoverproto::PORT).ok()?;
    let node = Node::judged_by(&endpoint, judge.clone());
    match node.attempt(Instant::now() + PROOF) {
        Err(Attempt::Passing(_)) => None,
        Ok(_) | Err(Attempt::Refused(_)) => Some(endpoint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(dir: &Path) -> State {
        let path = dir.join("state.json");
        let mut state = State::create(&path).unwrap();
        state.nodes = vec![KnownNode {
            name: "worker-0".into(),
            role: Role::Worker,
            addresses: vec!["10.0.0.5".into(), "fd00::5".into()],
            key: None,
        }];
        state
    }

    #[test]
    fn a_network_has_the_addresses_of_its_machines() {
        let of = |text: &str| -> Vec<String> {
            let network = ScannedNetwork::parse(text).unwrap();
            network.addresses().map(|it| it.to_string()).collect()
        };
        assert_eq!(of("10.0.0.9/32"), ["10.0.0.9"]);
        assert_eq!(of("10.0.0.9/31"), ["10.0.0.8", "10.0.0.9"]);
        assert_eq!(of("10.0.0.9/30"), ["10.0.0.9", "10.0.0.10"]);
        assert_eq!(of("10.0.17.9/20").len(), 4094);
        assert_eq!(of("10.0.17.9/20")[0], "10.0.16.1");
        assert_eq!(of("255.255.255.255/30")[1], "255.255.255.254");
        assert_eq!(of("fd00::7/127"), ["fd00::6", "fd00::7"]);
        for bad in [
            "10.0.0.0/19",
            "10.0.0.0/33",
            "10.0.0.0/x",
            "a/24",
            "fd00::/64",
            "/",
        ] {
            assert!(ScannedNetwork::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_address_has_the_name_and_role_that_the_state_file_has_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(dir.path());
        let (targets, networks) = named("fd00:0::5, 10.0.0.6:99,10.1.0.0/28", &state).unwrap();
        let shown: Vec<_> = targets
            .iter()
            .map(|it| (it.name.as_str(), it.role, it.endpoints[0].to_string()))
            .collect();
        assert_eq!(
            shown,
            [
                ("worker-0", Role::Worker, "[fd00:0::5]:9999".to_owned()),
                ("", Role::Unknown, "10.0.0.6:99".to_owned()),
            ]
        );
        assert_eq!(networks, [ScannedNetwork::parse("10.1.0.0/28").unwrap()]);
        let both = in_state(&state).unwrap();
        assert_eq!(both[0].endpoints.len(), 2);
    }

    #[test]
    fn a_list_of_machines_names_them_and_their_roles() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("machines.json");
        let text = r#"{"machines":[{"name":"cp-0","role":"control-plane","address":"10.0.0.7"}]}"#;
        std::fs::write(&list, text).unwrap();
        let state = state(dir.path());
        let (targets, _) = named(list.to_str().unwrap(), &state).unwrap();
        assert_eq!(
            (&*targets[0].name, targets[0].role),
            ("cp-0", Role::ControlPlane)
        );
        std::fs::write(&list, "{}").unwrap();
        let error = named(list.to_str().unwrap(), &state).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("machines.json: it is not a list of machines")
        );
    }
}
