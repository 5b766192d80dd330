//! The machines that the cloud lists, found by the names of their nodes, or by any name or address.

use std::iter;
use std::net::IpAddr;

use super::index::Index;
use base::machines::Instance;
use cloud_api::Alias;
use kubernetes::parameters::NodeName;

/// The machines that the cloud lists, with an index of their names and addresses.
#[derive(Default)]
pub struct KnownMachines {
    /// By their numbers. If two have the same node, both are here.
    machines: Vec<CloudMachine>,
    /// The numbers of the machines by all their names and addresses.
    index: Index,
}

/// A machine that the cloud lists.
pub struct CloudMachine {
    /// The name of its node.
    node: String,
    /// Its entry in the cloud's list of machines.
    pub instance: Instance,
    /// Its names and addresses that are not in that entry. Empty if they were not asked for.
    alias: Alias,
}

/// What a machine is found by: a name in lower case, or an address. An IPv4-mapped IPv6 address counts as
/// the IPv4 address.
#[derive(PartialEq, Hash)]
enum Key {
    Name(String),
    Address(IpAddr),
}

fn name(name: &str) -> Key {
    Key::Name(name.to_ascii_lowercase())
}

impl CloudMachine {
    /// Returns its names in the cloud.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let own = iter::once(&self.instance.name);
        own.chain(&self.alias.names).map(String::as_str)
    }

    /// Returns its addresses. An IPv4-mapped IPv6 address is returned as the IPv4 address.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let own = self.instance.vpc_ip.iter();
        own.chain(&self.alias.addresses).map(IpAddr::to_canonical)
    }

    fn keys(&self) -> impl Iterator<Item = Key> {
        let names = iter::once(&*self.node).chain(self.names());
        let names = names.map(name);
        names.chain(self.addresses().map(Key::Address))
    }
}

impl KnownMachines {
    /// Creates a list of these machines, with these further names and addresses. A machine whose name
    /// cannot be that of a node is left out, and so are names of machines that are not among them. Of two
    /// machines with the same node, the later one is the node's.
    pub fn new(instances: Vec<Instance>, aliases: Vec<Alias>) -> KnownMachines {
        let node = |name: &str| Some(NodeName::from_machine(name).ok()?.as_str().to_owned());
        let mut known = KnownMachines::default();
        for instance in instances {
            if let Some(node) = node(&instance.name) {
                known.machines.push(CloudMachine {
                    node,
                    instance,
                    alias: Alias::default(),
                });
                known.update_index(known.machines.len() - 1);
            }
        }
        for alias in aliases {
            let number = node(&alias.machine).and_then(|node| known.number_of(&node));
            if let Some(number) = number
                && known.machines[number].instance.name == alias.machine
            {
                let own = &mut known.machines[number].alias;
                own.names.extend(alias.names);
                own.addresses.extend(alias.addresses);
                known.update_index(number);
            }
        }
        known
    }

    fn update_index(&mut self, number: usize) {
        for key in self.machines[number].keys() {
            self.index.insert(key, number);
        }
    }

    fn number_of(&self, node: &str) -> Option<usize> {
        let found = self.index.with_hash_of(name(node));
        found
            .filter(|number| self.machines[*number].node == node)
            .last()
    }

    /// Returns the machine of this node.
    pub fn get(&self, node: &str) -> Option<&CloudMachine> {
        Some(&self.machines[self.number_of(node)?])
    }

    /// Returns a node other than `node` whose machine has this name, or this address as a text.
    pub fn other_with(&self, text: &str, node: &str) -> Option<&str> {
        let address = text.parse().ok();
        let with_address = address.and_then(|address| self.other_with_address(address, node));
        with_address.or_else(|| self.other_with_name(text, node))
    }

    /// Returns a node other than `node` whose machine has this name. Case does not matter.
    pub fn other_with_name(&self, name: &str, node: &str) -> Option<&str> {
        self.other(&self::name(name), node)
    }

    /// Returns a node other than `node` whose machine has this address. An IPv4-mapped IPv6
    /// address counts as the IPv4 address.
    pub fn other_with_address(&self, address: IpAddr, node: &str) -> Option<&str> {
        self.other(&Key::Address(address.to_canonical()), node)
    }

    fn other(&self, key: &Key, node: &str) -> Option<&str> {
        let owners = self.index.with_hash_of(key);
        let owners = owners.map(|number| &self.machines[number]);
        let mut others = owners.filter(|owner| owner.node != node);
        let other = others.find(|other| other.keys().any(|own| own == *key))?;
        Some(&other.node)
    }
}

#[cfg(test)]
mod tests {
    use base::machines::Role;

    use super::*;

    fn instance(name: &str, address: &str) -> Instance {
        Instance {
            name: name.into(),
            provider_id: String::new(),
            role: Role::Worker,
            vpc_ip: address.parse().ok(),
        }
    }

    fn alias(machine: &str, names: &[&str], addresses: &[&str]) -> Alias {
        Alias {
            machine: machine.into(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            addresses: addresses.iter().map(|one| one.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn another_machine_is_found_by_each_of_its_names_and_addresses() {
        let instances = vec![
            instance("a-1", "10.0.0.11"),
            instance("A_1", "10.0.0.1"),
            instance("b", ""),
            instance("c", "::ffff:10.0.0.3"),
            instance("10.0.0.9", ""),
            instance("no node!", "10.0.0.7"),
        ];
        let aliases = vec![
            alias("A_1", &["A.example"], &[]),
            alias("b", &["b.example", "both"], &["fd00::2"]),
            alias("c", &["both"], &[]),
            alias("c", &["c.example"], &[]),
            // of machines that are not those of a node
            alias("a-1", &["x.example"], &[]),
            alias("d", &["d.example"], &["10.0.0.2"]),
        ];
        let machines = KnownMachines::new(instances, aliases);
        for (text, other_than_a, other_than_c) in [
            ("a-1", None, Some("a-1")),
            ("a_1", None, Some("a-1")),
            ("a.EXAMPLE", None, Some("a-1")),
            ("10.0.0.1", None, Some("a-1")),
            // the earlier machine of the same node
            ("10.0.0.11", None, Some("a-1")),
            ("::ffff:10.0.0.1", None, Some("a-1")),
            ("fd00:0::2", Some("b"), Some("b")),
            ("10.0.0.3", Some("c"), None),
            ("C.example", Some("c"), None),
            // a name that looks like an address
            ("10.0.0.9", Some("10.0.0.9"), Some("10.0.0.9")),
            ("10.0.0.2", None, None),
            ("10.0.0.7", None, None),
            ("x.example", None, None),
            ("d.example", None, None),
            ("", None, None),
        ] {
            assert_eq!(machines.other_with(text, "a-1"), other_than_a, "{text}");
            assert_eq!(machines.other_with(text, "c"), other_than_c, "{text}");
        }
        let own = machines.get("a-1").map(|own| &*own.instance.name);
        assert_eq!(own, Some("A_1"));
        // two machines have this name: each of them has another owner of it
        assert_eq!(machines.other_with("both", "b"), Some("c"));
        assert_eq!(machines.other_with("both", "c"), Some("b"));
        assert!(matches!(
            machines.other_with("both", "a-1"),
            Some("b" | "c")
        ));
    }
}
