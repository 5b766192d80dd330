//! A list of machines as a metadata service: it shows which of its machines this one is.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use base::machines::{Error, Instance, Role};
use base::network::resolver;
use cloud::r#static::{ListedMetadata, StaticMachine};
use cloud::{Machines, Problem};
use transport::dial;

use crate::service::is_bcrypt;
use crate::{CloudMetadata, Service};

/// How long name servers may take.
const TIME_OF_NAME: Duration = Duration::from_secs(10);

impl CloudMetadata for ListedMetadata {
    fn own_instance(&self) -> Result<Instance, Error> {
        let addresses = sys::interfaces::addresses()
            .map_err(|error| self.failed(format!("this machine's addresses: {error}")))?;
        let addresses: Vec<_> = addresses
            .into_iter()
            .filter(|it| !it.is_loopback())
            .collect();
        own(&self.list()?, &addresses).map_err(|problem| self.failed(problem))
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        Ok(instances(&self.list()?))
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        Ok(self.list()?.endpoint().to_owned())
    }
}

impl Service for ListedMetadata {
    fn init_secret_hash(&self) -> Result<String, Error> {
        let list = self.list()?;
        let hash = init_secret_hash(&list).map_err(|problem| self.failed(problem))?;
        hash.map(str::to_owned).ok_or_else(|| {
            self.failed("it has no initSecretHash, so no operator can initialize this machine")
        })
    }

    fn time_servers(&self) -> Result<Option<String>, Error> {
        Ok(self.list()?.time_servers)
    }
}

/// Returns the bcrypt hash of the init secret, if the list has one.
pub fn init_secret_hash(list: &Machines) -> Result<Option<&str>, Problem> {
    let hash = list.init_secret_hash.as_deref();
    if hash.is_none_or(is_bcrypt) {
        Ok(hash)
    } else {
        // the error does not repeat the text, which may be the init secret itself
        Err(Problem::Malformed(
        "initSecretHash is not a bcrypt hash of 60 characters: `firstlight hash-secret` makes one".into(),
    ))
    }
}

/// Returns the machine that `self` names, or else [`at`].
fn own(list: &Machines, addresses: &[IpAddr]) -> Result<Instance, Problem> {
    match list.this() {
        Some(this) => Ok(instance(this)),
        None => at(list, addresses).map_err(|why| {
            Problem::Unidentified(format!("{why}. Or name this machine in \"self\""))
        }),
    }
}

/// Returns the only machine that has one of these addresses. For a list that many machines share,
/// so `self` is ignored.
pub fn at(list: &Machines, own: &[IpAddr]) -> Result<Instance, Problem> {
    let all = list.machines.iter().map(instance);
    let mut here = all.filter(|one| one.vpc_ip.is_some_and(|address| own.contains(&address)));
    match (here.next(), here.next()) {
        (Some(one), None) => Ok(one),
        (Some(one), Some(other)) => Err(Problem::Unidentified(format!(
            "the addresses {own:?} are those of {} and of {}: correct the list",
            one.name, other.name
        ))),
        (None, _) => Err(Problem::Unidentified(format!(
            "no machine of the list has one of the addresses {own:?}: correct the list"
        ))),
    }
}

/// Returns all machines. A DNS name that cannot be resolved gives a machine without an address.
pub fn instances(list: &Machines) -> Vec<Instance> {
    list.machines.iter().map(instance).collect()
}

fn instance(machine: &StaticMachine) -> Instance {
    Instance {
        name: machine.name.clone(),
        provider_id: machine.provider_id.clone(),
        role: Role::parse(&machine.role),
        vpc_ip: address(machine),
    }
}

fn address(StaticMachine { name, address, .. }: &StaticMachine) -> Option<IpAddr> {
    if let Ok(address) = address.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    match resolver::resolve(address, Instant::now() + TIME_OF_NAME) {
        Ok(found) => dial::best(&found),
        Err(error) => {
            log::warn!("cannot find the address of the machine {name}: {error}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";

    fn list() -> String {
        format!(
            r#"{{"endpoint":"cluster.example","initSecretHash":"{HASH}","machines":[
                {{"name":"control-plane-0","role":"control-plane","address":"10.0.0.11"}},
                {{"name":"worker-0","role":"Worker","address":"fd00::2","providerID":"metal:///2"}}]}}"#
        )
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_machine_is_the_one_whose_address_it_has() {
        let list = Machines::parse(list().as_bytes()).unwrap();
        let here = at(&list, &[address("192.0.2.1"), address("fd00::2")]);
        let expected = Instance {
            name: "worker-0".into(),
            provider_id: "metal:///2".into(),
            role: Role::Worker,
            vpc_ip: Some(address("fd00::2")),
        };
        assert_eq!(here, Ok(expected));
        let nowhere = own(&list, &[address("192.0.2.1")]).unwrap_err();
        assert!(
            nowhere.to_string().contains("192.0.2.1") && nowhere.to_string().contains("\"self\""),
            "{nowhere}"
        );
        // a list from a server is for many machines: none of them is "self"
        let nowhere = at(&list, &[address("192.0.2.1")]).unwrap_err();
        assert!(
            nowhere.to_string().contains("correct the list")
                && !nowhere.to_string().contains("self"),
            "{nowhere}"
        );
        let both = at(&list, &[address("10.0.0.11"), address("fd00::2")]);
        assert!(
            both.unwrap_err()
                .to_string()
                .contains("those of control-plane-0 and of worker-0")
        );
        assert_eq!(list.endpoint(), "cluster.example");
        assert_eq!(init_secret_hash(&list), Ok(Some(HASH)));
        assert_eq!(instances(&list).len(), 2);
    }

    #[test]
    fn a_list_with_another_hash_of_the_init_secret_still_names_its_machines() {
        let secret = list().replace(HASH, "my secret");
        let list = Machines::parse(secret.as_bytes()).unwrap();
        assert_eq!(instances(&list).len(), 2);
        let error = init_secret_hash(&list).unwrap_err().to_string();
        assert!(
            error.contains("bcrypt") && !error.contains("my secret"),
            "{error}"
        );
    }

    #[test]
    fn a_machine_that_the_list_names_needs_no_address() {
        let json = list().replacen('{', r#"{"self":"control-plane-0","#, 1);
        let list = Machines::parse(json.as_bytes()).unwrap();
        assert_eq!(own(&list, &[]).unwrap().name, "control-plane-0");
        let json = list_with_self("Control-Plane-0");
        let list = Machines::parse(json.as_bytes()).unwrap();
        assert_eq!(own(&list, &[]).unwrap().name, "control-plane-0");
    }

    fn list_with_self(name: &str) -> String {
        list().replacen('{', &format!(r#"{{"self":"{name}","#), 1)
    }

    #[test]
    fn a_machine_is_found_by_its_address_in_any_form() {
        let json = list().replace("10.0.0.11", "::ffff:10.0.0.11");
        let list = Machines::parse(json.as_bytes()).unwrap();
        let own = own(&list, &[address("10.0.0.11")]).unwrap();
        assert_eq!(
            (own.name.as_str(), own.vpc_ip),
            ("control-plane-0", Some(address("10.0.0.11")))
        );
    }
}
