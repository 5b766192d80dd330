//! The hosts that are asked for a ticket: those that the sources name now, and those that they named
//! within the last minute.
//!
//! No source is trusted: a DNS server or a metadata service may name wrong addresses. They cost time
//! only while it does so. A host that no source names any more is forgotten after [`FORGET_AFTER`],
//! or earlier if a full list needs room for a host that a source names now. A short pause keeps the
//! hosts of a name for which the DNS servers give only a part of the addresses at a time.
//!
//! A source or a name that cannot be asked keeps the addresses of its last answer.

use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Maximum number of hosts. No cluster has this many control planes; the limit is for hostile
/// sources.
pub const MAX_HOSTS: usize = 64;
/// How long a host is asked after a source named it last.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of addresses that are used of one name, so that a wrong answer for a name does not
/// displace the hosts of other sources.
const MAX_OF_NAME: usize = 16;

/// The last answer of one source.
#[derive(Default)]
pub struct HostsAnswer(Vec<Name>);

/// A name or an address that a source listed, and its addresses.
struct Name {
    name: String,
    addresses: Vec<IpAddr>,
}

impl HostsAnswer {
    /// Replaces the answer by a new one. `resolve` returns the addresses of a name, or `None` if it
    /// cannot be resolved. If the new answer is not complete, names of the earlier answer are kept
    /// after it.
    pub fn replace(
        &mut self,
        names: Vec<String>,
        is_complete: bool,
        mut resolve: impl FnMut(&str) -> Option<Vec<IpAddr>>,
    ) {
        let mut before = std::mem::take(&mut self.0);
        for name in names.into_iter().take(MAX_HOSTS) {
            let known = before.iter().position(|known| known.name == name);
            let known = known.map(|at| before.remove(at).addresses);
            let mut addresses = resolve(&name).or(known).unwrap_or_default();
            addresses.truncate(MAX_OF_NAME);
            self.0.push(Name { name, addresses });
        }
        if !is_complete {
            self.0.append(&mut before);
            self.0.truncate(MAX_HOSTS);
        }
    }

    /// Returns the addresses of all names.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.0
            .iter()
            .flat_map(|name| name.addresses.iter().copied())
    }
}

/// The hosts that are asked, each with its work. There are few, so a search through all is fast, and
/// small in the initramfs.
pub struct Hosts<T>(Vec<Host<T>>);

struct Host<T> {
    address: IpAddr,
    /// When a source named it last.
    named: Instant,
    work: T,
}

impl<T> Hosts<T> {
    /// Creates an empty list.
    pub fn new() -> Hosts<T> {
        Hosts(Vec::new())
    }

    /// Returns whether there is no host.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes that a source names this host in the listing that began at `listing`. If the host is
    /// new, `start` starts its work. If the list is full, the new host replaces one that no source
    /// has named in this listing, which is returned; if there is none, the new host is left out.
    pub fn add(
        &mut self,
        address: IpAddr,
        listing: Instant,
        start: impl FnOnce() -> Option<T>,
    ) -> Option<(IpAddr, T)> {
        if let Some(known) = self.0.iter_mut().find(|host| host.address == address) {
            known.named = listing;
            return None;
        }
        let mut displaced = None;
        if self.0.len() >= MAX_HOSTS {
            let stale = (0..self.0.len()).filter(|at| self.0[*at].named < listing);
            displaced = Some(stale.min_by_key(|at| self.0[*at].named)?);
        }
        let work = start()?;
        let displaced = displaced.map(|at| self.take(at));
        self.0.push(Host {
            address,
            named: listing,
            work,
        });
        displaced
    }

    /// Removes the next host that no source has named for [`FORGET_AFTER`], and returns it.
    pub fn forget(&mut self, now: Instant) -> Option<(IpAddr, T)> {
        let is_old = |host: &Host<T>| now - host.named >= FORGET_AFTER;
        let old = self.0.iter().position(is_old)?;
        Some(self.take(old))
    }

    fn take(&mut self, at: usize) -> (IpAddr, T) {
        let Host { address, work, .. } = self.0.swap_remove(at);
        (address, work)
    }

    /// Removes all hosts, and returns their work.
    pub fn into_work(self) -> impl Iterator<Item = T> {
        self.0.into_iter().map(|host| host.work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<T> Hosts<T> {
        fn has(&self, address: IpAddr) -> bool {
            self.0.iter().any(|host| host.address == address)
        }
    }

    const RIGHT: [u8; 4] = [192, 0, 2, 1];
    const INTERVAL: Duration = Duration::from_secs(15);

    /// A name whose DNS answers change, and the hosts that are asked.
    struct Listed {
        now: Instant,
        header: HostsAnswer,
        name: HostsAnswer,
        hosts: Hosts<()>,
    }

    impl Listed {
        fn new() -> Listed {
            Listed {
                now: Instant::now(),
                header: HostsAnswer::default(),
                name: HostsAnswer::default(),
                hosts: Hosts::new(),
            }
        }

        /// Lists once: `dns` answers for a name, and the disk's header names one address.
        fn list(&mut self, dns: Option<&[[u8; 4]]>) {
            let addresses = dns.map(|all| all.iter().map(|it| IpAddr::from(*it)).collect());
            let names = |name: &str| vec![name.to_owned()];
            self.name
                .replace(names("joins.test"), true, |_| addresses.clone());
            let own = |name: &str| Some(vec![name.parse().unwrap()]);
            self.header.replace(names("198.51.100.1"), true, own);
            for host in self.name.addresses().chain(self.header.addresses()) {
                self.hosts.add(host, self.now, || Some(()));
            }
            while self.hosts.forget(self.now).is_some() {}
            self.now += INTERVAL;
        }

        fn asks(&self, host: [u8; 4]) -> bool {
            self.hosts.has(IpAddr::from(host))
        }
    }

    fn wrong(round: u8) -> Vec<[u8; 4]> {
        (1..=40).map(|last| [203, 0, round, last]).collect()
    }

    #[test]
    fn wrong_answers_cost_time_only_while_they_come() {
        let mut listed = Listed::new();
        for round in 0..100 {
            listed.list(Some(&wrong(round)));
            assert!(listed.asks([198, 51, 100, 1]), "that of the header");
            assert!(listed.hosts.0.len() <= MAX_HOSTS);
        }
        assert!(!listed.asks(RIGHT));
        listed.list(Some(&[RIGHT]));
        assert!(listed.asks(RIGHT), "it has a place at once");
        for _ in 0..4 {
            listed.list(Some(&[RIGHT]));
        }
        assert_eq!(listed.hosts.0.len(), 2, "the wrong ones are forgotten");
    }

    #[test]
    fn a_host_stays_while_its_name_cannot_be_resolved() {
        let mut listed = Listed::new();
        listed.list(Some(&[RIGHT]));
        for _ in 0..100 {
            listed.list(None);
        }
        assert!(listed.asks(RIGHT));
        listed.list(Some(&[[192, 0, 2, 2]]));
        assert!(
            listed.asks(RIGHT),
            "a name may have more addresses than an answer"
        );
        for _ in 0..4 {
            listed.list(Some(&[[192, 0, 2, 2]]));
        }
        assert!(!listed.asks(RIGHT));
    }

    #[test]
    fn an_incomplete_answer_keeps_the_names_of_the_last_one() {
        let mut answer = HostsAnswer::default();
        let mut replace = |names: &[&str], is_complete| {
            let names = names.iter().map(|&name| name.into()).collect();
            answer.replace(names, is_complete, |name| Some(vec![name.parse().unwrap()]));
            answer
                .addresses()
                .map(|it| it.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(replace(&["192.0.2.1"], true), ["192.0.2.1"]);
        assert_eq!(replace(&["192.0.2.2"], false), ["192.0.2.2", "192.0.2.1"]);
        assert_eq!(replace(&["192.0.2.1"], false), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(replace(&[], false), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(replace(&["192.0.2.3"], true), ["192.0.2.3"]);
    }

    #[test]
    fn a_full_list_displaces_only_hosts_that_no_source_names_now() {
        let (mut hosts, first) = (Hosts::new(), Instant::now());
        let host = |last: u8| IpAddr::from([203, 0, 113, last]);
        for last in 0..MAX_HOSTS as u8 {
            assert!(hosts.add(host(last), first, || Some(last)).is_none());
        }
        assert!(hosts.add(host(200), first, || Some(200)).is_none());
        assert!(!hosts.has(host(200)));
        let second = first + INTERVAL;
        hosts.add(host(0), second, || None);
        // no thread can be started
        assert!(hosts.add(host(200), second, || None).is_none());
        assert_eq!(
            hosts.add(host(200), second, || Some(200)),
            Some((host(1), 1))
        );
        assert_eq!(hosts.0.len(), MAX_HOSTS);
    }
}
