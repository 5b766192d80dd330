//! Types for the values that an operator or a cloud chooses for a cluster and its nodes. They hold
//! only values that Kubernetes accepts. All functions are pure. Each error names the given value
//! and what is expected.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::SystemTime;

use base::text::quoted;
use base::time;

/// The supported minor versions of Kubernetes 1, from the first with kubeadm's v1beta4 to the newest: the number, and the day after
/// which its project makes no more patch releases (kubernetes.io/releases, "End Of Life Date").
pub const MINORS: [(u32, &str); 7] = [
    (31, "2025-11-11"),
    (32, "2026-02-28"),
    (33, "2026-06-28"),
    (34, "2026-10-27"),
    (35, "2027-02-28"),
    (36, "2027-06-28"),
    (37, "2027-10-28"),
];
/// The newest of them.
const NEWEST: u32 = MINORS[MINORS.len() - 1].0;
/// The default name of a cluster, as in Constellation.
pub const DEFAULT_CLUSTER_NAME: &str = "constellation";
/// Kubeadm's default network of services (DefaultServicesSubnet).
const DEFAULT_SERVICE_SUBNET: &str = "10.96.0.0/12";

/// The maximum length of a label value (k8s.io/apimachinery LabelValueMaxLength). A node's name is
/// the value of `kubernetes.io/hostname`.
const MAX_LABEL: usize = 63;
/// The maximum length of an RFC 1123 name (k8s.io/apimachinery DNS1123SubdomainMaxLength).
const MAX_SUBDOMAIN: usize = 253;
/// The maximum length of a provider ID. Those of Azure, the longest ones, have fewer than 300 characters.
const MAX_PROVIDER_ID: usize = 512;
/// Kubeadm's MaximumBitsForServiceSubnet.
const MAX_SERVICE_BITS: u8 = 20;
/// The minimum number of host bits: the DNS service has the tenth address, and kubeadm's
/// MinimumAddressesInServiceSubnet is 10.
const MIN_SERVICE_BITS: u8 = 4;
/// The prefixes of the networks that the controller manager gives each node for its pods, IPv4 and IPv6
/// (defaultNodeMaskCIDRIPv4, defaultNodeMaskCIDRIPv6).
const NODE_PREFIXES: (u8, u8) = (24, 64);
/// The maximum number of bits that tell the nodes' networks apart: kubeadm's PodSubnetNodeMaskMaxDiff.
const MAX_NODE_BITS: u8 = 16;
/// Networks whose addresses Kubernetes refuses as those of endpoints (ValidateEndpointIP): the machine itself, a link, groups. And
/// the IPv4 addresses in IPv6 form, whose family the programs of Kubernetes do not agree on.
const RESERVED: [Subnet; 7] = [
    ipv4([127, 0, 0, 0], 8),
    ipv4([169, 254, 0, 0], 16),
    ipv4([224, 0, 0, 0], 4),
    ipv6([0, 0, 0, 1], 128),
    ipv6([0xfe80, 0, 0, 0], 10),
    ipv6([0xff00, 0, 0, 0], 8),
    ipv6([0, 0xffff, 0, 0], 96),
];

/// An invalid value, described by a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid(String);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Invalid {}

fn invalid<T>(why: String) -> Result<T, Invalid> {
    Err(Invalid(why))
}

/// A supported version of Kubernetes, such as `v1.34.4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubernetesVersion {
    /// The minor version, such as 34.
    pub minor: u32,
    /// The patch version, such as 4.
    pub patch: u32,
}

impl FromStr for KubernetesVersion {
    type Err = Invalid;

    /// Parses `v1.MINOR.PATCH`. Refuses labels such as `stable-1`, which kubeadm would look up on
    /// the network, and pre-releases.
    fn from_str(text: &str) -> Result<KubernetesVersion, Invalid> {
        let version = || {
            let (minor, patch) = text.strip_prefix("v1.")?.split_once('.')?;
            Some(KubernetesVersion {
                minor: number(minor)?,
                patch: number(patch)?,
            })
        };
        match version() {
            Some(version) if version.end_of_life().is_some() => Ok(version),
            Some(_) => invalid(format!(
                "Kubernetes {text} is not supported; expected v1.{} to v1.{}",
                MINORS[0].0, NEWEST
            )),
            None if text
                .strip_prefix("v1.")
                .is_some_and(|minor| number(minor).is_some()) =>
            {
                invalid(format!(
                    "{text:?} is not a version with its patch: write for example {text}.0, or a later one of https://kubernetes.io/releases"
                ))
            }
            None => invalid(format!(
                "{text:?} is not a version of Kubernetes; expected a version like v1.{}.0",
                NEWEST
            )),
        }
    }
}

impl KubernetesVersion {
    /// Returns the last day on which its project repairs this minor version, as `2026-10-27`; `None` for an unsupported one.
    fn end_of_life(&self) -> Option<&'static str> {
        let minor = MINORS.iter().find(|(minor, _)| *minor == self.minor);
        minor.map(|(_, end)| *end)
    }

    /// Returns the end of that day; `None` for an unsupported version.
    pub fn last_day(&self) -> Option<SystemTime> {
        time::parse(&format!("{}T23:59:59Z", self.end_of_life()?))
    }

    /// Returns a warning if the minor version gets no more repairs at this time.
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        let end = self.end_of_life()?;
        let is_over = self.last_day()? < now;
        is_over.then(|| {
            format!(
                "Kubernetes v1.{} gets no more security updates since {end}: the newest supported version is v1.{NEWEST}",
                self.minor
            )
        })
    }

    /// Refuses an upgrade that kubeadm does not make: to an older version, or past a minor one.
    pub fn check_upgrade(&self, to: &KubernetesVersion) -> Result<(), Invalid> {
        match *to {
            to if to < *self => invalid(format!(
                "{to} is older than {self}: Kubernetes cannot be downgraded"
            )),
            to if to.minor > self.minor + 1 => invalid(format!(
                "{to} is too far from {self}: kubeadm takes one minor version at a time, so upgrade to v1.{} first",
                self.minor + 1
            )),
            _ => Ok(()),
        }
    }
}

/// Parses a number of semantic versioning: without sign and leading zeros.
fn number(text: &str) -> Option<u32> {
    let is_plain =
        text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| is_plain)
}

impl fmt::Display for KubernetesVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v1.{}.{}", self.minor, self.patch)
    }
}

/// The name of a Node object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeName(String);

impl NodeName {
    /// Derives the name from a machine's name in its cloud: in lower case, with `-` instead of `_`,
    /// as in Constellation.
    pub fn from_machine(name: &str) -> Result<NodeName, Invalid> {
        let compliant = name.to_ascii_lowercase().replace('_', "-");
        if !is_subdomain(&compliant) {
            return invalid(format!(
                "a node cannot be named {name:?}: expected letters, digits, `-` and `.`, and a letter or digit at the beginning \
                 and end of each part; rename the machine"
            ));
        }
        if compliant.len() > MAX_LABEL {
            return invalid(format!(
                "a node cannot be named {name:?}: it has {} characters, expected at most {MAX_LABEL}; rename the machine",
                compliant.len()
            ));
        }
        Ok(NodeName(compliant))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Validates the name of a cluster, which becomes part of the user's name in the kubeconfig.
/// Returns the default for an empty name.
pub fn cluster_name(name: &str) -> Result<String, Invalid> {
    match name {
        "" => Ok(DEFAULT_CLUSTER_NAME.into()),
        _ if is_subdomain(name) && name.len() <= MAX_LABEL => Ok(name.into()),
        _ => invalid(format!(
            "a cluster cannot be named {name:?}: expected at most {MAX_LABEL} lower-case letters, digits, `-` and `.`"
        )),
    }
}

/// Validates a provider ID, which the metadata service chooses; it may be empty. It becomes one of the words in the environment
/// variable KUBELET_KUBEADM_ARGS: systemd would split it at a space, and the rest would be further arguments of the kubelet.
pub fn provider_id(id: &str) -> Result<String, Invalid> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:/@+=,%()".contains(&byte);
    if id.len() <= MAX_PROVIDER_ID && id.bytes().all(is_valid) {
        Ok(id.into())
    } else {
        invalid(format!(
            "{} cannot be a provider ID: expected at most {MAX_PROVIDER_ID} letters, digits and -._~:/@+=,%(), as in aws:///ZONE/INSTANCE",
            quoted(id, 80)
        ))
    }
}

/// Validates the name or address of a host, such as a load balancer, without a port.
pub fn host(host: &str) -> Result<String, Invalid> {
    if host.parse::<IpAddr>().is_ok() || is_subdomain(host) {
        Ok(host.into())
    } else {
        invalid(format!(
            "{host:?} is neither an address nor a host name in lower case; expected no port"
        ))
    }
}

/// Returns whether the text is a host and a port. An IPv6 address must be in brackets (RFC 3986
/// §3.2.2).
pub fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_host = match host.strip_prefix('[') {
        Some(address) => address
            .strip_suffix(']')
            .is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()),
        None => self::host(host).is_ok() && !matches!(host.parse(), Ok(IpAddr::V6(_))),
    };
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit())
        && port.parse::<u16>().is_ok_and(|port| port > 0);
    is_host && is_port
}

/// Validates a name for the API server's certificate: a host, or `*.` and a domain.
pub fn alternative_name(name: &str) -> Result<String, Invalid> {
    host(
        name.strip_prefix("*.")
            .filter(|domain| domain.parse::<IpAddr>().is_err() && name.len() <= MAX_SUBDOMAIN)
            .unwrap_or(name),
    )
    .map(|_| name.to_owned())
    .map_err(|_| {
        Invalid(format!(
            "{name:?} cannot be a name in a certificate; expected an address or a host name"
        ))
    })
}

/// Returns whether the text is a DNS subdomain in lower case (RFC 1123 §2.1, k8s.io/apimachinery
/// IsDNS1123Subdomain).
fn is_subdomain(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= MAX_SUBDOMAIN
        && text.split('.').all(|part| {
            let part = part.as_bytes();
            part.iter()
                .all(|byte| is_alphanumeric(byte) || *byte == b'-')
                && part.first().is_some_and(is_alphanumeric)
                && part.last().is_some_and(is_alphanumeric)
        })
}

/// A network: its first address and the length of its prefix, such as `10.96.0.0/12`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet {
    address: IpAddr,
    prefix: u8,
}

impl Subnet {
    /// Returns whether the network contains this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4()
            && (bits(self.address) ^ bits(address)) & self.mask() == 0
    }

    /// Returns whether the networks have a common address.
    pub fn overlaps(&self, other: &Subnet) -> bool {
        self.contains(other.address) || other.contains(self.address)
    }

    /// Returns the number of bits of its addresses.
    fn width(&self) -> u8 {
        if self.address.is_ipv4() { 32 } else { 128 }
    }

    /// Returns the prefix of the part that each node gets for its pods.
    fn node_prefix(&self) -> u8 {
        if self.address.is_ipv4() {
            NODE_PREFIXES.0
        } else {
            NODE_PREFIXES.1
        }
    }

    /// Refuses another prefix than these; `whose` and `why` are parts of the error.
    fn check_prefix(
        &self,
        whose: &str,
        expected: RangeInclusive<u8>,
        why: &str,
    ) -> Result<(), Invalid> {
        if expected.contains(&self.prefix) {
            return Ok(());
        }
        invalid(format!(
            "{whose} network {self} is too small or too large; expected a prefix of {} to {} bits{why}",
            expected.start(),
            expected.end()
        ))
    }

    fn mask(&self) -> u128 {
        let host_bits = self.width() - self.prefix;
        // An IPv4 address uses the lowest 32 bits.
        u128::MAX.checked_shl(host_bits.into()).unwrap_or(0)
    }
}

const fn ipv4(address: [u8; 4], prefix: u8) -> Subnet {
    let [a, b, c, d] = address;
    let address = IpAddr::V4(Ipv4Addr::new(a, b, c, d));
    Subnet { address, prefix }
}

/// `address` has its first group, and its last three.
const fn ipv6(address: [u16; 4], prefix: u8) -> Subnet {
    let [first, a, b, c] = address;
    let address = IpAddr::V6(Ipv6Addr::new(first, 0, 0, 0, 0, a, b, c));
    Subnet { address, prefix }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

impl FromStr for Subnet {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Subnet, Invalid> {
        let subnet = || {
            let (address, prefix) = text.split_once('/')?;
            let subnet = Subnet {
                address: address.parse().ok()?,
                prefix: u8::try_from(number(prefix)?).ok()?,
            };
            (subnet.prefix <= subnet.width()).then_some(subnet)
        };
        match subnet() {
            Some(subnet) if bits(subnet.address) & !subnet.mask() == 0 => Ok(subnet),
            Some(_) => invalid(format!(
                "{text:?} is an address in a network, not a network: its host bits must be 0"
            )),
            None => invalid(format!(
                "{text:?} is not a network; expected a network like {DEFAULT_SERVICE_SUBNET}"
            )),
        }
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// The networks of services and of pods. Each is one network, or one IPv4 and one IPv6 network for
/// dual stack. If empty, the default of kubeadm or of the pod network is used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// The networks of services.
    pub services: Vec<Subnet>,
    /// The networks of pods.
    pub pods: Vec<Subnet>,
}

impl Networks {
    /// Parses two lists of networks, separated by commas. `node` is an address of the node: it must be in none of them, and the API
    /// server requires its family of the first network of services.
    pub fn parse(services: &str, pods: &str, node: Option<IpAddr>) -> Result<Networks, Invalid> {
        let networks = Networks {
            services: subnets(services)?,
            pods: subnets(pods)?,
        };
        // The default network of services must not overlap either.
        let services = if services.is_empty() {
            subnets(DEFAULT_SERVICE_SUBNET)?
        } else {
            networks.services.clone()
        };
        for subnet in &services {
            let width = subnet.width();
            let prefixes = width - MAX_SERVICE_BITS..=width - MIN_SERVICE_BITS;
            subnet.check_prefix("the services'", prefixes, "")?;
        }
        for subnet in &networks.pods {
            let each = subnet.node_prefix();
            let why = format!(": each node gets a /{each} of it");
            subnet.check_prefix("the pods'", each - MAX_NODE_BITS..=each, &why)?;
        }
        networks.check_families(services[0], node)?;
        for subnet in services.iter().chain(&networks.pods) {
            if let Some(reserved) = RESERVED.iter().find(|it| it.overlaps(subnet)) {
                return invalid(format!(
                    "the network {subnet} has addresses of {reserved}, which neither a service nor a pod can have; choose another network"
                ));
            }
        }
        for (service, pod) in services
            .iter()
            .flat_map(|service| networks.pods.iter().map(move |pod| (service, pod)))
        {
            if service.overlaps(pod) {
                return invalid(format!(
                    "the services' network {service} and the pods' {pod} overlap; choose other networks"
                ));
            }
        }
        let taken = |subnet: &&Subnet| node.is_some_and(|node| subnet.contains(node));
        match (services.iter().chain(&networks.pods).find(taken), node) {
            (Some(subnet), Some(node)) => invalid(format!(
                "the network {subnet} of the services or pods contains the node's own address {node}; choose another network"
            )),
            _ => Ok(networks),
        }
    }

    /// Refuses networks with which the API server does not start, or no pod reaches it: `first` is the first network of services.
    fn check_families(&self, first: Subnet, node: Option<IpAddr>) -> Result<(), Invalid> {
        let family = |is_ipv4| if is_ipv4 { "IPv4" } else { "IPv6" };
        if let Some(node) = node
            && node.is_ipv4() != first.address.is_ipv4()
        {
            let expected = family(node.is_ipv4());
            let next = match self.services.len() {
                0 => "name one (--service-cidr), because the default is an IPv4 network",
                1 => "choose another network",
                _ => "put the other network first",
            };
            return invalid(format!(
                "the services' first network is {first}, but the node's address is {node}: the API server requires an {expected} network; {next}"
            ));
        }
        // Without networks, the default of services says nothing of the machines.
        let is_known = node.is_some() || !self.services.is_empty();
        let reaches = |pod: &Subnet| pod.address.is_ipv4() == first.address.is_ipv4();
        if is_known && !self.pods.is_empty() && !self.pods.iter().any(reaches) {
            return invalid(format!(
                "the pods' network is {}, but the services' first network is {first}: pods with {} addresses only cannot reach the API \
                 server; choose another network",
                self.pods[0],
                family(self.pods[0].address.is_ipv4())
            ));
        }
        Ok(())
    }
}

fn subnets(text: &str) -> Result<Vec<Subnet>, Invalid> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let subnets: Vec<Subnet> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
    match subnets[..] {
        [_] => Ok(subnets),
        [first, second] if first.address.is_ipv4() != second.address.is_ipv4() => Ok(subnets),
        _ => invalid(format!(
            "{text:?} has too many networks; expected one, or one IPv4 and one IPv6 network"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};
    use std::process::Command;

    use super::*;
    use crate::kubeadm::{self, ClusterSettings, NodeSettings};
    use support::mutation::mutations;
    use support::random::Random;

    #[test]
    fn a_provider_id_is_one_word_without_quotes() {
        for good in [
            "",
            "aws:///eu-central-1a/i-0123456789abcdef0",
            "azure:///subscriptions/8D/resourceGroups/a_(b).c/providers/Microsoft.Compute/virtualMachineScaleSets/s/virtualMachines/0",
            "in-memory://workers-x7k2p",
        ] {
            assert_eq!(provider_id(good).unwrap(), good);
        }
        for bad in [
            "qemu:///a --anonymous-auth=true",
            "a\tb",
            "a\nb",
            "\"a\"",
            "a'b",
            "a\\b",
            "$HOME",
            "ä",
            &"a".repeat(513),
        ] {
            let error = provider_id(bad).unwrap_err().to_string();
            assert!(
                error.contains("cannot be a provider ID") && error.len() < 300,
                "{error}"
            );
        }
    }

    #[test]
    fn versions_in_range_are_read_and_others_are_refused_with_the_range() {
        assert_eq!(
            "v1.34.4".parse(),
            Ok(KubernetesVersion {
                minor: 34,
                patch: 4
            })
        );
        assert_eq!(
            "v1.31.0".parse::<KubernetesVersion>().unwrap().to_string(),
            "v1.31.0"
        );
        for text in ["v1.30.14", "v1.38.0", "v1.0.0"] {
            let error = text.parse::<KubernetesVersion>().unwrap_err().to_string();
            assert!(
                error.contains(text) && error.contains("v1.31 to v1.37"),
                "{error}"
            );
        }
        for text in [
            "",
            "1.34.4",
            "v1.34",
            "v1.34.4-rc.0",
            "v1.34.4+build",
            "stable-1",
            "v2.0.0",
            "v1.034.4",
            "v1.34.+4",
        ] {
            assert!(
                text.parse::<KubernetesVersion>()
                    .unwrap_err()
                    .to_string()
                    .contains("is not a version"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_version_that_gets_no_more_updates_is_warned_of() {
        let warning = |text: &str, now: &str| {
            let version: KubernetesVersion = text.parse().unwrap();
            version.warning(time::parse(now).unwrap())
        };
        assert_eq!(warning("v1.34.9", "2026-10-27T12:00:00Z"), None);
        let late = warning("v1.34.9", "2026-10-28T00:00:00Z").unwrap();
        assert!(
            late.contains("v1.34 gets no more security updates since 2026-10-27"),
            "{late}"
        );
        assert!(MINORS.is_sorted_by_key(|(_, end)| end));
    }

    /// Fails from the day on which the newest supported version gets no more updates: then add newer ones.
    #[test]
    fn the_newest_version_gets_updates() {
        let newest: KubernetesVersion = format!("v1.{NEWEST}.0").parse().unwrap();
        assert_eq!(newest.warning(SystemTime::now()), None);
    }

    #[test]
    fn an_upgrade_goes_forward_and_skips_no_minor_version() {
        let check = |from: &str, to: &str| {
            let [from, to] = [from, to].map(|text| text.parse::<KubernetesVersion>().unwrap());
            from.check_upgrade(&to).map_err(|error| error.to_string())
        };
        for (from, to) in [
            ("v1.34.4", "v1.34.4"),
            ("v1.34.4", "v1.34.10"),
            ("v1.34.4", "v1.35.0"),
        ] {
            assert_eq!(check(from, to), Ok(()), "{from} -> {to}");
        }
        for (from, to, says) in [
            ("v1.34.4", "v1.34.3", "older than v1.34.4"),
            ("v1.34.4", "v1.33.9", "older than v1.34.4"),
            ("v1.34.4", "v1.36.0", "upgrade to v1.35 first"),
        ] {
            let error = check(from, to).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn machines_names_become_node_names_or_are_refused() {
        for (name, node) in [
            ("control-plane-0", "control-plane-0"),
            ("My_Node.example", "my-node.example"),
            ("1", "1"),
        ] {
            assert_eq!(NodeName::from_machine(name).unwrap().as_str(), node);
        }
        for name in [
            "", "-a", "a-", "a_", "a..b", ".a", "a.-b", "a b", "\u{fc}", "a/b",
        ] {
            assert!(
                NodeName::from_machine(name)
                    .unwrap_err()
                    .to_string()
                    .contains("rename"),
                "{name}"
            );
        }
        assert!(NodeName::from_machine(&"a".repeat(63)).is_ok());
        assert!(
            NodeName::from_machine(&"a".repeat(64))
                .unwrap_err()
                .to_string()
                .contains("64 characters")
        );
    }

    #[test]
    fn hosts_and_certificate_names_are_addresses_or_domains() {
        for name in ["10.0.0.1", "fd00::1", "lb.example", "localhost"] {
            assert!(
                host(name).is_ok() && alternative_name(name).is_ok(),
                "{name}"
            );
        }
        assert!(alternative_name("*.example.org").is_ok() && host("*.example.org").is_err());
        assert!(alternative_name(&format!("*.{}", ["a"; 126].join("."))).is_ok());
        assert!(alternative_name(&format!("*.{}", ["a"; 127].join("."))).is_err());
        for name in [
            "",
            "a:6443",
            "https://a",
            "A.example",
            "*.",
            "a.*.b",
            "*.10.0.0.1",
        ] {
            assert!(
                host(name).is_err() && alternative_name(name).is_err(),
                "{name}"
            );
        }
        assert_eq!(cluster_name("").unwrap(), "constellation");
        assert!(
            cluster_name("prod.eu-1").is_ok()
                && cluster_name("a b").is_err()
                && cluster_name("$(x)").is_err()
        );
    }

    #[test]
    fn networks_that_make_sense_are_taken() {
        let node = Some("192.168.178.2".parse().unwrap());
        for (services, pods) in [
            ("", ""),
            ("10.96.0.0/12", "10.244.0.0/16"),
            ("10.0.0.0/28", "10.0.1.0/24"),
            ("10.96.0.0/16,fd00:1::/108", "fd00:2::/48,10.244.0.0/16"),
            // pods without IPv6 reach services by IPv4
            ("10.96.0.0/16,fd00:1::/108", "10.244.0.0/16"),
        ] {
            let networks = Networks::parse(services, pods, node).unwrap();
            let text = networks
                .services
                .iter()
                .map(Subnet::to_string)
                .collect::<Vec<_>>()
                .join(",");
            assert_eq!(text, services);
        }
    }

    #[test]
    fn networks_that_make_no_sense_are_refused() {
        let node = Some("10.9.0.5".parse().unwrap());
        for (services, pods, why) in [
            ("10.96.0.0", "", "not a network;"),
            ("10.96.0.0/33", "", "not a network;"),
            ("10.96.0.0/-1", "", "not a network;"),
            ("10.96.0.0/012", "", "not a network;"),
            ("fd00::/129", "", "not a network;"),
            ("10.96.0.0/12,", "", "not a network;"),
            (" 10.96.0.0/12", "", "not a network;"),
            ("10.96.0.1/12", "", "host bits"),
            ("10.96.0.0/12,10.0.0.0/16", "", "too many"),
            ("10.96.0.0/16,fd00::/112,fd01::/112", "", "too many"),
            (
                "10.0.0.0/11",
                "",
                "too small or too large; expected a prefix of 12 to 28",
            ),
            ("10.0.0.0/29", "", "too small"),
            ("0.0.0.0/0", "", "too large"),
            ("::/0", "", "expected a prefix of 108 to 124"),
            (
                "",
                "10.244.0.0/25",
                "a prefix of 8 to 24 bits: each node gets a /24",
            ),
            ("", "0.0.0.0/7", "a prefix of 8 to 24 bits"),
            (
                "",
                "fd00::/65",
                "a prefix of 48 to 64 bits: each node gets a /64",
            ),
            ("", "fd00::/47", "a prefix of 48 to 64 bits"),
            ("fd02::/112", "", "requires an IPv4 network; choose another"),
            ("fd02::/112,10.96.0.0/16", "", "put the other network first"),
            ("", "fd00::/48", "with IPv6 addresses only cannot reach"),
            ("", "169.254.0.0/24", "has addresses of 169.254.0.0/16"),
            ("127.96.0.0/12", "", "has addresses of 127.0.0.0/8"),
            ("", "10.8.0.0/16,fe80::/48", "has addresses of fe80::/10"),
            ("", "10.8.0.0/16,::/48", "has addresses of ::1/128"),
            (
                "10.96.0.0/16,::ffff:10.0.0.0/112",
                "",
                "of ::ffff:0.0.0.0/96",
            ),
            ("10.96.0.0/12", "10.0.0.0/8", "overlap"),
            ("10.96.0.0/12", "10.100.0.0/16", "overlap"),
            ("", "10.100.0.0/16", "overlap"),
            ("10.9.0.0/16", "", "own address 10.9.0.5"),
            ("", "10.8.0.0/14", "own address 10.9.0.5"),
        ] {
            let error = Networks::parse(services, pods, node)
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{services} {pods}: {error}");
        }
        let of_ipv6 =
            |services, pods| Networks::parse(services, pods, Some("fd00:9::5".parse().unwrap()));
        assert!(of_ipv6("fd02::/112", "fd00::/48").is_ok());
        let error = of_ipv6("", "fd00::/48").unwrap_err().to_string();
        assert!(error.contains("name one (--service-cidr)"), "{error}");
        // what an operator's machine can see, which does not know the node's address
        let error = Networks::parse("fd02::/112", "10.244.0.0/16", None).unwrap_err();
        assert!(error.to_string().contains("cannot reach the API server"));
    }

    /// Returns one of them.
    fn one_of<T: Copy>(random: &mut Random, values: &[T]) -> T {
        values[random.below(values.len())]
    }

    const GOOD_SERVICES: [&str; 8] = [
        "",
        "10.96.0.0/16",
        "10.96.0.0/12",
        "10.96.0.0/28",
        "fd02::/108",
        "fd02::/124",
        "10.96.0.0/16,fd02::/112",
        "fd02::/112,10.96.0.0/16",
    ];
    const GOOD_PODS: [&str; 8] = [
        "",
        "10.244.0.0/16",
        "10.244.0.0/24",
        "172.0.0.0/8",
        "fd00::/48",
        "fd00::/64",
        "10.244.0.0/16,fd00::/56",
        "fd00::/56,10.244.0.0/16",
    ];

    /// Returns a list of networks as operators write them, good and bad.
    fn some_networks(random: &mut Random) -> String {
        let any = |random: &mut Random| {
            let (address, good) = if random.below(2) == 0 {
                (
                    one_of(
                        random,
                        &[
                            "10.0.0.0",
                            "10.9.0.0",
                            "172.16.0.0",
                            "127.0.0.0",
                            "224.0.0.0",
                            "0.0.0.0",
                        ],
                    ),
                    &[8, 12, 16, 24, 28][..],
                )
            } else {
                (
                    one_of(
                        random,
                        &[
                            "fd00::",
                            "fd02::",
                            "2001:db8::",
                            "fe80::",
                            "::",
                            "::ffff:0:0",
                        ],
                    ),
                    &[48, 56, 64, 108, 112, 124][..],
                )
            };
            let address: IpAddr = address.parse().unwrap();
            let prefix = match random.below(3) {
                0 => random.below(if address.is_ipv4() { 33 } else { 129 }) as u8,
                _ => one_of(random, good),
            };
            let mask = Subnet { address, prefix }.mask();
            let address = match address {
                IpAddr::V4(address) => IpAddr::V4((u32::from(address) & mask as u32).into()),
                IpAddr::V6(address) => IpAddr::V6((u128::from(address) & mask).into()),
            };
            Subnet { address, prefix }.to_string()
        };
        let count = one_of(random, &[0, 1, 1, 1, 2, 2, 2, 3]);
        (0..count)
            .map(|_| any(random))
            .collect::<Vec<_>>()
            .join(",")
    }

    /// Returns what Kubernetes' own code says of each configuration of kubeadm: nothing if it accepts it.
    fn verdicts_of_kubernetes(configurations: &[String]) -> Vec<String> {
        let program = std::env::var_os("FIRSTLIGHT_CHECK_PARAMETERS")
            .expect("FIRSTLIGHT_CHECK_PARAMETERS must name the program of tests/kubernetes_go");
        let mut input = tempfile::tempfile().unwrap();
        for configuration in configurations {
            serde_json::to_writer(&input, configuration).unwrap();
            writeln!(input).unwrap();
        }
        input.rewind().unwrap();
        let output = Command::new(program).stdin(input).output().unwrap();
        let [verdicts, said] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(output.status.success(), "{said}");
        let verdicts: Vec<String> = verdicts
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(verdicts.len(), configurations.len(), "{said}");
        verdicts
    }

    /// A set that passes `init`'s check and is refused afterwards costs the machine, because its lock is set in between.
    #[test]
    #[ignore = "needs FIRSTLIGHT_CHECK_PARAMETERS, a program of tools/kubernetes.sh"]
    fn kubernetes_itself_accepts_each_set_that_passes_and_refuses_what_we_say_it_does() {
        let mut random = Random::new(1);
        let (mut sets, mut configurations) = (Vec::new(), Vec::new());
        while sets.len() < 2000 {
            let (mut services, mut pods) = (some_networks(&mut random), some_networks(&mut random));
            // two of three lists are at the edge of what is good
            if random.below(3) > 0 {
                services = one_of(&mut random, &GOOD_SERVICES).into();
            }
            if random.below(3) > 0 {
                pods = one_of(&mut random, &GOOD_PODS).into();
            }
            let ip: IpAddr = one_of(&mut random, &["10.9.0.5", "192.168.1.2", "fd00:9::5"])
                .parse()
                .unwrap();
            let (label, domain) = ("a".repeat(63), ["a"; 127].join("."));
            let hosts = [
                "lb.example",
                "10.9.0.100",
                "fd00::1",
                "1.2.3.4.5",
                &label,
                &domain,
            ];
            let wildcard = format!("*.{}", one_of(&mut random, &hosts));
            let (endpoint, san) = (one_of(&mut random, &hosts), one_of(&mut random, &hosts));
            let machine = one_of(&mut random, &["control_plane-0", "1", "A.b.c", "-", &label]);
            let (Ok(endpoint), Ok(name), Ok(services_alone), Ok(pods_alone)) = (
                host(endpoint),
                NodeName::from_machine(machine),
                subnets(&services),
                subnets(&pods),
            ) else {
                continue;
            };
            let names = [san, &wildcard].map(alternative_name);
            let verdict = Networks::parse(&services, &pods, Some(ip));
            let cluster = ClusterSettings {
                version: "v1.36.0".parse().unwrap(),
                name: cluster_name(one_of(&mut random, &["", "prod", "a.b", &label])).unwrap(),
                endpoint,
                alternative_names: names.into_iter().flatten().collect(),
                networks: Networks {
                    services: services_alone,
                    pods: pods_alone,
                },
            };
            let node = NodeSettings {
                name,
                ip,
                provider_id: String::new(),
                external_cloud_provider: random.below(2) == 0,
                kubeadm_timeout: None,
            };
            configurations.push(kubeadm::init(&cluster, &node));
            sets.push((
                format!("services {services:?}, pods {pods:?}, node {ip}"),
                verdict,
            ));
        }
        let (mut taken, mut refused) = (0, 0);
        for ((set, ours), theirs) in sets.iter().zip(verdicts_of_kubernetes(&configurations)) {
            match ours {
                Ok(_) => {
                    assert_eq!(theirs, "", "{set}");
                    taken += 1;
                }
                Err(Invalid(why)) if why.contains("too small") || why.contains("requires an") => {
                    assert_ne!(theirs, "", "{set}: {why}");
                    refused += 1;
                }
                // our own demands
                Err(_) => (),
            }
        }
        println!(
            "of {} sets, {taken} are taken by both, {refused} are refused by both",
            sets.len()
        );
        assert!(taken > 300 && refused > 300);
    }

    #[test]
    fn mutated_networks_read_as_themselves_or_not_at_all() {
        let mut good = 0;
        for bytes in mutations(b"10.96.0.0/12,fd00:1::/108", 20_000) {
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(networks) = Networks::parse(&text, "", None) {
                good += 1;
                for subnet in networks.services {
                    assert_eq!(subnet.to_string().parse(), Ok(subnet));
                }
            }
            let _ = (
                text.parse::<KubernetesVersion>(),
                NodeName::from_machine(&text),
                alternative_name(&text),
            );
        }
        assert!(good > 50, "{good}");
    }
}
