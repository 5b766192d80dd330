//! The sources of the addresses of the cluster's join services, in the order in which a reboot asks
//! them. No source is a cloud API.
//!
//! 1. the setting `peers` of the image
//! 2. the list of machines, if the cloud is `static`
//! 3. the header of the state disk, which `bootstrapper` keeps current
//! 4. the metadata of the machine itself, by plain HTTP: the tag [`TAG`](cloud::peers::TAG), or a
//!    service that describes all machines
//!
//! A service has several lists: the first listing asks for all of them.
//!
//! No source is trusted: a wrong host does not have the key that opens the disk.

use std::net::IpAddr;
use std::sync::Arc;

use base::machines::{Cloud, Error};
use cloud::Own;
use disk::luks::{Header, HeaderFault, Peers};
use node::ticket_client::{HostSource, Listing, TicketFailure};

/// Advice for a node whose sources lead to no join service.
pub const MOVED: &str = "if all control planes have moved, name one of them by the setting peers or in the machine's tag \
                         firstlight-peers, or run `firstlight recover`";

/// The sources other than the header.
pub struct PeerSources {
    before: Vec<HostSource>,
    after: Vec<HostSource>,
}

impl PeerSources {
    /// Returns the sources of a machine in this cloud: the hosts in the setting `peers`, and the
    /// metadata at this location. Sends no request.
    pub fn new(
        setting: &[String],
        cloud: Cloud,
        place: Option<&str>,
    ) -> Result<PeerSources, Error> {
        let (mut before, mut after) = (fixed("setting peers", setting), vec![]);
        let Own { is_local, lists } = cloud::own(cloud, place)?;
        let group = if is_local { &mut before } else { &mut after };
        group.extend(lists.into_iter().map(|(name, hosts)| HostSource {
            goes_on: !is_local,
            ..source(name, move || Ok(hosts()?))
        }));
        Ok(PeerSources { before, after })
    }

    /// Returns all sources of a machine whose disk has this header.
    pub fn with(&self, header: &Header) -> Vec<HostSource> {
        let of_header = in_header(header.peers());
        [&self.before[..], &of_header, &self.after].concat()
    }
}

/// Returns the sources that a header contains.
fn in_header(peers: Result<Option<Peers>, HeaderFault>) -> Vec<HostSource> {
    const NAME: &str = "disk header";
    let known = peers.map(Option::unwrap_or_default);
    match known {
        Ok(peers) if peers.is_empty() => {
            let why =
                "it names no control plane: the disk is from Constellation or an older Firstlight";
            vec![source(NAME, move || Err(why.to_owned().into()))]
        }
        Ok(peers) => {
            let planes = peers.control_planes.iter().map(IpAddr::to_string);
            let hosts: Vec<_> = planes.chain(peers.load_balancer).collect();
            fixed(NAME, &hosts)
        }
        Err(why) => vec![source(NAME, move || Err(why.to_string().into()))],
    }
}

/// Returns these hosts as sources. Addresses come before names: a DNS server that does not answer
/// then delays no request to them.
fn fixed(name: &'static str, hosts: &[String]) -> Vec<HostSource> {
    let is_address = |host: &&String| host.parse::<IpAddr>().is_ok();
    let (addresses, names): (Vec<_>, Vec<_>) = hosts.iter().partition(is_address);
    let parts = [addresses, names].into_iter();
    let parts = parts.filter(|hosts| !hosts.is_empty());
    parts
        .map(|hosts| {
            let hosts: Vec<String> = hosts.into_iter().cloned().collect();
            source(name, move || Ok(hosts.clone()))
        })
        .collect()
}

fn source(
    name: &'static str,
    list: impl Fn() -> Result<Vec<String>, TicketFailure> + Send + Sync + 'static,
) -> HostSource {
    let list = move || {
        let (hosts, is_complete) = (list()?, true);
        Ok(Listing { hosts, is_complete })
    };
    HostSource {
        name,
        goes_on: false,
        list: Arc::new(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(sources: &[HostSource]) -> Vec<(&str, Result<Vec<String>, TicketFailure>)> {
        let listed = |source: &HostSource| (source.list)().map(|listing| listing.hosts);
        let hosts = sources.iter().map(|source| (source.name, listed(source)));
        hosts.collect()
    }

    #[test]
    fn the_addresses_of_a_header_come_before_its_name() {
        let peers = Peers {
            load_balancer: Some("cluster.example".into()),
            control_planes: vec![[10, 0, 0, 1].into()],
        };
        let found = in_header(Ok(Some(peers.clone())));
        let expected = [
            ("disk header", Ok(vec!["10.0.0.1".into()])),
            ("disk header", Ok(vec!["cluster.example".into()])),
        ];
        assert_eq!(listed(&found), expected);
        let address = Peers {
            load_balancer: Some("10.0.0.9".into()),
            ..peers
        };
        let found = in_header(Ok(Some(address)));
        let expected = vec!["10.0.0.1".to_owned(), "10.0.0.9".into()];
        assert_eq!(listed(&found), [("disk header", Ok(expected))]);
    }

    #[test]
    fn a_header_without_peers_says_why() {
        for (peers, why) in [
            (Ok(None), "it names no control plane"),
            (Ok(Some(Peers::default())), "it names no control plane"),
            (Err("token 1: x".to_owned().into()), "token 1: x"),
        ] {
            let found = in_header(peers);
            let [(_, Err(error))] = &listed(&found)[..] else {
                panic!("{:?}", listed(&found));
            };
            assert!(error.text.contains(why), "{error:?}");
        }
    }

    #[test]
    fn each_cloud_has_its_sources_around_the_header() {
        let setting = ["a.example".to_owned(), "10.0.0.1".into()];
        for cloud in base::machines::ALL {
            let sources = PeerSources::new(&setting, cloud, None).unwrap();
            let count = (sources.before.len(), sources.after.len());
            let expected = match cloud {
                Cloud::Static => (3, 0),
                Cloud::Qemu => (2, 2),
                _ => (2, 1),
            };
            assert_eq!(count, expected, "{}", cloud.name());
            assert!(sources.before.iter().all(|source| !source.goes_on));
            assert!(sources.after.iter().all(|source| source.goes_on));
        }
        assert!(PeerSources::new(&[], Cloud::Aws, Some("10.0.0.1")).is_err());
    }
}
