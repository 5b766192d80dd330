//! Google Cloud: the metadata server of Compute Engine, and the Compute Engine API.
//!
//! | what | where |
//! |---|---|
//! | project, zone, name, hash of the init secret | the metadata server |
//! | role, cluster | the labels `constellation-role` and `constellation-uid` of the instance (`instances.get`) |
//! | peers | the running instances of the region and network with the cluster's label (`instances.aggregatedList`) |
//! | load balancer | the forwarding rule with the labels `constellation-uid` and `constellation-use=kubernetes`: global, else of the region |
//!
//! Requests to the API have the token of the instance's service account.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::OnceLock;

use serde::Deserialize;
use zeroize::Zeroizing;

use super::answer::{Entries, Lost, nonsense, nullable, parsed};
use super::bearer::{Bearer, Token};
use super::https::api;
use super::pages;
use super::place::Endpoints;
use super::service::{Alias, Service, bcrypt_hash};
use base::machines::{Error, Instance, Role};
use cloud::http::{GOOGLE, Http, MAX_BODY, excerpt};
use http::encoded;

use crate::CloudMetadata;

/// The address of the API.
const API: &str = "https://compute.googleapis.com";
/// Maximum size in bytes of a page of 500 instances.
const MAX_PAGE: u64 = 16 << 20;
const LABELS: [&str; 2] = ["constellation-uid", "constellation-role"];
const NEXT: &str = "the instance's service account needs the permissions of docs/clouds.md and the scope cloud-platform";

/// A client of the services.
pub struct GcpClient {
    metadata: Http,
    compute: Http,
    bearer: Bearer,
    own: OnceLock<Own>,
}

/// The metadata server's description of this machine, which never changes.
#[derive(Debug, Clone)]
struct Own {
    project: String,
    zone: String,
    name: String,
}

/// An instance, as the API describes it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    name: String,
    #[serde(default, deserialize_with = "nullable")]
    status: String,
    #[serde(default, deserialize_with = "nullable")]
    labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "nullable")]
    network_interfaces: Vec<Interface>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Interface {
    #[serde(default, deserialize_with = "nullable")]
    name: String,
    #[serde(default, deserialize_with = "nullable")]
    network: String,
    #[serde(rename = "networkIP", default)]
    network_ip: Option<String>,
    #[serde(default, deserialize_with = "nullable")]
    ipv6_address: Option<String>,
    #[serde(default, deserialize_with = "nullable")]
    access_configs: Vec<Access>,
    #[serde(default, deserialize_with = "nullable")]
    ipv6_access_configs: Vec<Access>,
}

/// An external address of an interface.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Access {
    #[serde(rename = "natIP")]
    nat_ip: Option<String>,
    external_ipv6: Option<String>,
}

/// The instance that asks, and the cluster to which it belongs.
#[derive(Debug)]
pub struct GcpInstance {
    /// The instance.
    pub instance: Instance,
    /// The ID of the cluster.
    pub uid: String,
    /// The URL of the network of its first interface.
    pub network: String,
}

impl GcpClient {
    /// Makes a client of the services at these addresses: `[URL][,compute=URL]`. Sends no request.
    pub fn new(place: Option<&str>) -> Result<GcpClient, Error> {
        let place = Endpoints::parse(place, GOOGLE, &["compute"], &[])?;
        Ok(GcpClient {
            metadata: Http::new(&place.service),
            compute: api(place.api("compute").unwrap_or(API))?,
            bearer: Bearer::new(("authorization", "Bearer "), NEXT),
            own: OnceLock::new(),
        })
    }

    /// Returns the metadata server's answer for a path. If the name or address leads to another server, its answer has no
    /// `Metadata-Flavor` and is refused.
    fn metadata(&self, path: &str) -> Result<Vec<u8>, Error> {
        let path = format!("computeMetadata/v1/{path}");
        let fields = [("Metadata-Flavor", "Google")];
        let answer = self.metadata.send("GET", &path, &fields, None, MAX_BODY)?;
        match answer.field("Metadata-Flavor") {
            Some("Google") => answer.content(),
            _ => Err(Error::Nonsense {
                request: answer.request,
                expected: "an answer with the field Metadata-Flavor: Google",
                got: "another server's".into(),
            }),
        }
    }

    /// Returns the last part of a path in the metadata server's answer, such as `projects/1/zones/europe-west3-b`.
    fn name(&self, path: &str) -> Result<String, Error> {
        let answer = self.metadata(path)?;
        parse_name(&self.metadata.url(path), &answer)
    }

    fn own(&self) -> Result<&Own, Error> {
        if let Some(own) = self.own.get() {
            return Ok(own);
        }
        let own = Own {
            project: self.name("project/project-id")?,
            zone: self.name("instance/zone")?,
            name: self.name("instance/name")?,
        };
        Ok(self.own.get_or_init(|| own))
    }

    /// Returns a token of the instance's service account.
    pub fn token(&self) -> Result<Token, Error> {
        const PATH: &str = "instance/service-accounts/default/token";
        let answer = self.metadata(PATH).map_err(|error| match error {
            Error::Status {
                request,
                status: 404,
                ..
            } => Error::Denied {
                request,
                why: "the instance has no service account".into(),
                next: "attach one with the permissions of docs/clouds.md".into(),
            },
            other => other,
        })?;
        parse_token(&self.metadata.url(PATH), &Zeroizing::new(answer))
    }

    /// Returns the API's answer for a path below the project.
    fn compute(&self, path: &str) -> Result<(String, Vec<u8>), Error> {
        let project = encoded(&self.own()?.project);
        let path = format!("compute/v1/projects/{project}/{path}");
        let new = || self.token();
        let answer = self.bearer.get(&self.compute, &path, &[], MAX_PAGE, &new)?;
        Ok((format!("GET {}", self.compute.url(&path)), answer))
    }

    fn member(&self) -> Result<GcpInstance, Error> {
        let own = self.own()?;
        let (zone, name) = (encoded(&own.zone), encoded(&own.name));
        let (request, body) = self.compute(&format!("zones/{zone}/instances/{name}"))?;
        let member = parse_member(&request, &own.project, &own.zone, &body)?;
        if member.instance.name == own.name {
            Ok(member)
        } else {
            Err(Error::Refused(format!(
                "this machine is {:?} for the metadata server, and {:?} for the API",
                own.name, member.instance.name
            )))
        }
    }

    /// Returns all pages of a list below the project.
    fn list<T>(
        &self,
        path: &str,
        filter: &str,
        parse: impl Fn(&str, &[u8]) -> Result<(Vec<T>, Option<String>), Error>,
    ) -> Result<Vec<T>, Error> {
        pages::all(
            |mark| {
                let mut path = format!("{path}?maxResults=500&filter={}", encoded(filter));
                if let Some(mark) = mark {
                    path += &format!("&pageToken={}", encoded(mark));
                }
                let (request, body) = self.compute(&path)?;
                parse(&request, &body)
            },
            |got| Error::Nonsense {
                request: format!("GET {}", self.compute.url(path)),
                expected: "a list",
                got,
            },
        )
    }
}

impl CloudMetadata for GcpClient {
    fn own_instance(&self) -> Result<Instance, Error> {
        Ok(self.member()?.instance)
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        let (own, member) = (self.own()?, self.member()?);
        let filter = format!("labels.constellation-uid:{}", member.uid);
        self.list("aggregated/instances", &filter, |request, body| {
            parse_instances(request, &own.project, region(&own.zone), &member, body)
        })
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        let (own, uid) = (self.own()?, self.member()?.uid);
        let filter =
            format!("(labels.constellation-uid:{uid}) AND (labels.constellation-use:kubernetes)");
        let regional = format!("regions/{}/forwardingRules", encoded(region(&own.zone)));
        for path in ["global/forwardingRules", &regional] {
            let parse = |request: &str, body: &[u8]| parse_forwarding_rules(request, &uid, body);
            if let Some(address) = self.list(path, &filter, parse)?.into_iter().next() {
                return Ok(address);
            }
        }
        Err(Error::Denied {
            request: format!("GET {}", self.compute.url(&regional)),
            why: "no forwarding rule, global or of the region, has the cluster's labels".into(),
            next: format!(
                "set the labels constellation-uid={uid} and constellation-use=kubernetes"
            ),
        })
    }
}

impl Service for GcpClient {
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        let (own, member) = (self.own()?, self.member()?);
        let filter = format!("labels.constellation-uid:{}", member.uid);
        self.list("aggregated/instances", &filter, |request, body| {
            parse_aliases(request, &own.project, region(&own.zone), &member, body)
        })
    }

    fn init_secret_hash(&self) -> Result<String, Error> {
        const PATH: &str = "instance/attributes/constellation-init-secret-hash";
        let request = format!("GET {}", self.metadata.url(PATH));
        bcrypt_hash(&request, &self.metadata(PATH)?)
    }
}

/// Returns the region of a zone: `europe-west3` of `europe-west3-b`.
fn region(zone: &str) -> &str {
    zone.rsplit_once('-').map_or(zone, |(region, _)| region)
}

/// Returns whether text may be a part of a path and of a filter: letters, digits and `-_.:`.
fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (1..=128).contains(&text.len()) && text.bytes().all(is_allowed) && !text.starts_with('.')
}

/// Parses a name in an answer of the metadata server: the last part of a path.
pub fn parse_name(url: &str, body: &[u8]) -> Result<String, Error> {
    let text = String::from_utf8_lossy(body);
    match text.trim().rsplit('/').next() {
        Some(name) if is_name(name) => Ok(name.to_owned()),
        _ => Err(nonsense(
            &format!("GET {url}"),
            "a name",
            format!("{:?}", excerpt(body)),
        )),
    }
}

/// Parses the token of a service account; the error does not repeat it.
pub fn parse_token(url: &str, body: &[u8]) -> Result<Token, Error> {
    #[derive(Deserialize)]
    struct Given {
        access_token: Zeroizing<String>,
        expires_in: u64,
    }
    let given: Option<Given> = serde_json::from_slice(body).ok();
    given
        .and_then(|given| Token::new(given.access_token, given.expires_in))
        .ok_or_else(|| {
            let got = format!("{} bytes of something else", body.len());
            nonsense(&format!("GET {url}"), "a token", got)
        })
}

/// Parses the description of the instance that asks.
pub fn parse_member(
    request: &str,
    project: &str,
    zone: &str,
    body: &[u8],
) -> Result<GcpInstance, Error> {
    const EXPECTED: &str = "an instance with the labels constellation-uid and constellation-role";
    let described: Described = parsed(request, EXPECTED, body)?;
    let uid = described.labels.get(LABELS[0]).filter(|uid| is_name(uid));
    let uid = uid.cloned().ok_or_else(|| {
        let labels: Vec<_> = described.labels.keys().map(String::as_str).collect();
        let labels = excerpt(labels.join(", ").as_bytes());
        nonsense(request, EXPECTED, format!("one with the labels {labels:?}"))
    })?;
    let network = described.network_interfaces.first();
    Ok(GcpInstance {
        uid,
        network: network
            .map(|first| first.network.clone())
            .unwrap_or_default(),
        instance: instance(described, project, zone)
            .map_err(|why| nonsense(request, EXPECTED, why.to_string()))?,
    })
}

/// What is wrong with a described instance.
enum Invalid {
    /// Its name cannot be a part of a provider ID.
    Name(String),
    /// Its address is not an IP address.
    Address(String),
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Invalid::Name(name) => write!(f, "one with the name {name:?}"),
            Invalid::Address(name) => write!(f, "{name} with an invalid address"),
        }
    }
}

/// Converts an instance.
fn instance(described: Described, project: &str, zone: &str) -> Result<Instance, Invalid> {
    let name = described.name;
    if !is_name(&name) {
        return Err(Invalid::Name(excerpt(name.as_bytes())));
    }
    let interface = described
        .network_interfaces
        .iter()
        .find(|interface| interface.name == "nic0");
    let address = interface.and_then(|nic| nic.network_ip.as_ref().or(nic.ipv6_address.as_ref()));
    let address = address.map(|address| address.parse::<IpAddr>()).transpose();
    let role = described.labels.get(LABELS[1]);
    Ok(Instance {
        provider_id: format!("gce://{project}/{zone}/{name}"),
        role: role.map_or(Role::Unknown, |role| Role::parse(role)),
        vpc_ip: address.map_err(|_| Invalid::Address(name.clone()))?,
        name,
    })
}

/// Parses a page of `instances.aggregatedList`: the running instances of the region in the network and cluster of `member`, and the
/// token of the next page. If the API could not ask a zone of the region, this is an error: a list must be complete.
pub fn parse_instances(
    request: &str,
    project: &str,
    region: &str,
    member: &GcpInstance,
    body: &[u8],
) -> Result<(Vec<Instance>, Option<String>), Error> {
    let (members, next) = parse_page(request, region, member, body, Lost::LeftOut)?;
    let running = (members.into_iter()).filter(|(described, _)| described.status == "RUNNING");
    let described = running.filter_map(|(described, zone)| {
        instance(described, project, &zone)
            .inspect_err(|why| log::warn!("metadata: {request}: ignoring {why}"))
            .ok()
    });
    Ok((described.collect(), next))
}

/// Parses the same page: names and addresses of these instances, also of those that do not run. These are the addresses of all interfaces, as Google's controller
/// has them, and the names in Compute Engine's internal DNS, zonal and global.
pub fn parse_aliases(
    request: &str,
    project: &str,
    region: &str,
    member: &GcpInstance,
    body: &[u8],
) -> Result<(Vec<Alias>, Option<String>), Error> {
    let (members, next) = parse_page(request, region, member, body, Lost::Refused)?;
    let aliases = members.into_iter().map(|(described, zone)| {
        let name = described.name;
        let addresses = described.network_interfaces.into_iter().flat_map(|nic| {
            let external = (nic.access_configs.into_iter())
                .chain(nic.ipv6_access_configs)
                .flat_map(|access| [access.nat_ip, access.external_ipv6]);
            [nic.network_ip, nic.ipv6_address]
                .into_iter()
                .chain(external)
                .flatten()
                .collect::<Vec<_>>()
        });
        Alias {
            addresses: addresses.filter_map(|text| text.parse().ok()).collect(),
            names: vec![
                format!("{name}.{zone}.c.{project}.internal"),
                format!("{name}.c.{project}.internal"),
            ],
            machine: name,
        }
    });
    Ok((aliases.collect(), next))
}

/// The instances of the cluster on a page with their zones, and the token of the next page.
type Members = (Vec<(Described, String)>, Option<String>);

fn parse_page(
    request: &str,
    region: &str,
    member: &GcpInstance,
    body: &[u8],
    lost: Lost,
) -> Result<Members, Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Page {
        #[serde(default, deserialize_with = "nullable")]
        items: BTreeMap<String, Zone>,
        next_page_token: Option<String>,
    }
    #[derive(Deserialize)]
    struct Zone {
        #[serde(default, deserialize_with = "nullable")]
        instances: Entries<Described>,
        warning: Option<Warning>,
    }
    #[derive(Deserialize)]
    struct Warning {
        #[serde(default, deserialize_with = "nullable")]
        code: String,
    }
    const EXPECTED: &str = "a list of instances by zone";
    let page: Page = parsed(request, EXPECTED, body)?;
    let mut machines = vec![];
    for (path, content) in page.items {
        let zone = path.strip_prefix("zones/").unwrap_or_default();
        if !is_name(zone) || self::region(zone) != region {
            continue;
        }
        let warning = content.warning.map(|warning| warning.code);
        if let Some(code) = warning.filter(|code| code != "NO_RESULTS_ON_PAGE") {
            let code = excerpt(code.as_bytes());
            return Err(nonsense(request, EXPECTED, format!("{code:?} for {zone}")));
        }
        for described in content.instances.read(request, lost)? {
            let network = described.network_interfaces.first().map(|nic| &nic.network);
            let is_member = described.labels.get(LABELS[0]) == Some(&member.uid);
            if !is_member || network != Some(&member.network) {
                continue;
            }
            machines.push((described, zone.to_owned()));
        }
    }
    Ok((machines, page.next_page_token))
}

/// Parses a page of forwarding rules: the addresses of the rules for Kubernetes in this cluster, and the token of the next page.
pub fn parse_forwarding_rules(
    request: &str,
    uid: &str,
    body: &[u8],
) -> Result<(Vec<String>, Option<String>), Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Page {
        #[serde(default, deserialize_with = "nullable")]
        items: Entries<Rule>,
        next_page_token: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Rule {
        #[serde(rename = "IPAddress")]
        address: Option<String>,
        port_range: Option<String>,
        #[serde(default, deserialize_with = "nullable")]
        labels: BTreeMap<String, String>,
    }
    let page: Page = parsed(request, "a list of forwarding rules", body)?;
    let rules = page.items.read(request, Lost::LeftOut)?;
    let addresses = rules.into_iter().filter_map(|rule| {
        let label = |name: &str| rule.labels.get(name).map(String::as_str);
        let is_wanted = label(LABELS[0]) == Some(uid)
            && label("constellation-use") == Some("kubernetes")
            && rule.port_range.is_some();
        rule.address.filter(|_| is_wanted)
    });
    Ok((addresses.collect(), page.next_page_token))
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;
    use crate::answer::tests::with_wrong_fields;

    const NETWORK: &str =
        "https://www.googleapis.com/compute/v1/projects/p-1/global/networks/constell-net";

    /// Returns an instance in the form of the API reference (instances.get).
    fn described(name: &str, status: &str, address: &str, network: &str, uid: &str) -> String {
        format!(
            r#"{{"kind":"compute#instance","id":"1","name":"{name}","status":"{status}","labels":{{"constellation-uid":"{uid}","constellation-role":"worker"}},
            "networkInterfaces":[{{"name":"nic0","network":"{network}","subnetwork":"x","networkIP":"{address}","stackType":"IPV4_ONLY",
            "aliasIpRanges":[{{"ipCidrRange":"10.10.0.0/24"}}]}}],"zone":"https://www.googleapis.com/compute/v1/projects/p-1/zones/europe-west3-b"}}"#
        )
    }

    fn member() -> GcpInstance {
        let body = described("w-1", "RUNNING", "192.168.178.2", NETWORK, "constell1");
        parse_member("GET x", "p-1", "europe-west3-b", body.as_bytes()).unwrap()
    }

    fn instances(body: &str) -> Result<(Vec<Instance>, Option<String>), Error> {
        parse_instances("GET x", "p-1", "europe-west3", &member(), body.as_bytes())
    }

    /// The fields of `networkInterfaces` in the reference of instances.get.
    #[test]
    fn a_machine_has_the_addresses_of_all_interfaces_and_its_internal_names() {
        let described = described("w-1", "RUNNING", "192.168.178.2", NETWORK, "constell1")
            .replace(
                r#""stackType":"IPV4_ONLY","#,
                r#""accessConfigs":[{"type":"ONE_TO_ONE_NAT","name":"External NAT","natIP":"203.0.113.5"}],
                "ipv6AccessConfigs":[{"type":"DIRECT_IPV6","externalIpv6":"2001:db8::5","externalIpv6PrefixLength":96}],"#,
            )
            .replace(r#"}]}],"zone""#, r#"}]},{"name":"nic1","network":"other","networkIP":"10.1.0.5"}],"zone""#);
        let page =
            format!(r#"{{"items":{{"zones/europe-west3-b":{{"instances":[{described}]}}}}}}"#);
        let (aliases, _) =
            parse_aliases("GET x", "p-1", "europe-west3", &member(), page.as_bytes()).unwrap();
        let addresses = ["192.168.178.2", "203.0.113.5", "2001:db8::5", "10.1.0.5"];
        assert_eq!(
            aliases,
            [Alias {
                machine: "w-1".into(),
                names: vec![
                    "w-1.europe-west3-b.c.p-1.internal".into(),
                    "w-1.c.p-1.internal".into()
                ],
                addresses: addresses.map(|address| address.parse().unwrap()).to_vec(),
            }]
        );
    }

    #[test]
    fn a_machine_that_is_off_exists_but_is_no_peer() {
        let off = described("w-1", "TERMINATED", "192.168.178.2", NETWORK, "constell1");
        let page = format!(r#"{{"items":{{"zones/europe-west3-b":{{"instances":[{off}]}}}}}}"#);
        let (aliases, _) =
            parse_aliases("GET x", "p-1", "europe-west3", &member(), page.as_bytes()).unwrap();
        assert_eq!(aliases[0].machine, "w-1");
        assert_eq!(instances(&page).unwrap().0, []);
    }

    #[test]
    fn an_entry_with_a_wrong_field_does_not_hide_the_others() {
        for page in with_wrong_fields(&page_of_two(), "/items/zones~1europe-west3-b/instances/0") {
            let (found, _) = instances(&page).unwrap_or_else(|error| panic!("{page}: {error}"));
            assert!(found.iter().any(|one| one.name == "w-2"), "{page}");
        }
        let rule = r#"{"name":"lb","IPAddress":"203.0.113.4","portRange":"6443-6443","labels":{"constellation-uid":"constell1","constellation-use":"kubernetes"}}"#;
        let page = format!(r#"{{"items":[{rule},{rule}]}}"#);
        for page in with_wrong_fields(&page, "/items/0") {
            let (found, _) = parse_forwarding_rules("GET x", "constell1", page.as_bytes()).unwrap();
            assert!(!found.is_empty(), "{page}");
        }
        // names and addresses say which machines are gone, so this list must be complete
        let nameless = page_of_two().replacen(r#""name":"w-1","#, "", 1);
        let aliases = parse_aliases(
            "GET x",
            "p-1",
            "europe-west3",
            &member(),
            nameless.as_bytes(),
        );
        let error = aliases.unwrap_err().to_string();
        assert!(error.contains("missing field `name`"), "{error}");
    }

    fn page_of_two() -> String {
        let [one, other] = ["w-1", "w-2"]
            .map(|name| described(name, "RUNNING", "192.168.178.2", NETWORK, "constell1"));
        format!(r#"{{"items":{{"zones/europe-west3-b":{{"instances":[{one},{other}]}}}}}}"#)
    }

    #[test]
    fn the_machine_that_asks_is_read() {
        let member = member();
        assert_eq!(member.uid, "constell1");
        assert_eq!(
            member.instance,
            Instance {
                name: "w-1".into(),
                provider_id: "gce://p-1/europe-west3-b/w-1".into(),
                role: Role::Worker,
                vpc_ip: Some("192.168.178.2".parse().unwrap()),
            }
        );
        let bare = r#"{"name":"w-1","labels":{"other":"x"}}"#;
        let error = parse_member("GET x", "p", "z", bare.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("other"), "{error}");
        // the quote would end the filter and begin another one
        let lying = described(
            "w-1",
            "RUNNING",
            "192.168.178.2",
            NETWORK,
            "a) OR (labels.b:c",
        );
        assert!(parse_member("GET x", "p", "z", lying.as_bytes()).is_err());
    }

    #[test]
    fn the_machines_of_the_region_the_network_and_the_cluster_are_peers() {
        let one = |name: &str, status: &str, network: &str, uid: &str| {
            described(name, status, "192.168.178.3", network, uid)
        };
        let here = [
            one("w-2", "RUNNING", NETWORK, "constell1"),
            one("stopping", "STOPPING", NETWORK, "constell1"),
            one("terminated", "TERMINATED", NETWORK, "constell1"),
            one("elsewhere", "RUNNING", "other", "constell1"),
            one("foreign", "RUNNING", NETWORK, "constell12"),
            described("nowhere", "RUNNING", "x", NETWORK, "constell1"),
        ];
        let far = one("far", "RUNNING", NETWORK, "constell1");
        let near = one("near", "RUNNING", NETWORK, "constell1");
        let body = format!(
            r#"{{"items":{{"zones/europe-west3-b":{{"instances":[{}]}},"zones/europe-west3-c":{{"instances":[{near}]}},
            "zones/europe-west4-a":{{"instances":[{far}]}},"regions/europe-west3":{{}},
            "zones/europe-west3-a":{{"warning":{{"code":"NO_RESULTS_ON_PAGE","message":"m"}}}}}},"nextPageToken":"n"}}"#,
            here.join(",")
        );
        let (machines, next) = instances(&body).unwrap();
        let ids: Vec<_> = machines
            .iter()
            .map(|one| one.provider_id.as_str())
            .collect();
        assert_eq!(
            ids,
            [
                "gce://p-1/europe-west3-b/w-2",
                "gce://p-1/europe-west3-c/near"
            ]
        );
        assert_eq!(next.as_deref(), Some("n"));
        // an incomplete list is refused
        let part = r#"{"items":{"zones/europe-west3-a":{"warning":{"code":"UNREACHABLE"}}}}"#;
        let error = instances(part).unwrap_err().to_string();
        assert!(
            error.contains("UNREACHABLE") && error.contains("europe-west3-a"),
            "{error}"
        );
        let other = part.replace("west3", "west4");
        assert_eq!(instances(&other).unwrap(), (vec![], None));
        assert_eq!(instances("{}").unwrap(), (vec![], None));
        assert!(instances("[]").is_err());
    }

    #[test]
    fn the_forwarding_rule_is_that_of_kubernetes() {
        let rule = |address: &str, uid: &str, usage: &str| {
            format!(
                r#"{{"name":"r","IPAddress":"{address}","portRange":"6443-6443","labels":{{"constellation-uid":"{uid}","constellation-use":"{usage}"}}}}"#
            )
        };
        let body = format!(
            r#"{{"kind":"compute#forwardingRuleList","items":[{},{},{},{{"name":"bare"}}]}}"#,
            rule("203.0.113.1", "constell1", "join"),
            rule("203.0.113.2", "other", "kubernetes"),
            rule("203.0.113.3", "constell1", "kubernetes"),
        );
        let found = parse_forwarding_rules("GET x", "constell1", body.as_bytes()).unwrap();
        assert_eq!(found.0, ["203.0.113.3"]);
    }

    #[test]
    fn a_token_is_read_and_never_shown() {
        let body = br#"{"access_token":"ya29.x","expires_in":3599,"token_type":"Bearer"}"#;
        assert!(parse_token("u", body).is_ok());
        for bad in [
            "",
            "{}",
            r#"{"access_token":"","expires_in":1}"#,
            r#"{"access_token":"ya29.x\n","expires_in":1}"#,
            r#"{"access_token":"ya29.x","expires_in":-1}"#,
        ] {
            let error = parse_token("u", bad.as_bytes()).err().unwrap();
            assert!(!error.to_string().contains("ya29"), "{error}");
        }
    }

    #[test]
    fn a_name_is_the_last_part_of_a_path() {
        let name = |body: &str| parse_name("u", body.as_bytes()).ok();
        let zone = name("projects/123456789/zones/europe-west3-b");
        assert_eq!(zone.as_deref(), Some("europe-west3-b"));
        assert_eq!(region(&zone.unwrap()), "europe-west3");
        assert_eq!(
            name("example.com:p-1\n").as_deref(),
            Some("example.com:p-1")
        );
        for bad in ["", "a/", "..", "a b", "a?b", "ä", &"a".repeat(200)] {
            assert_eq!(name(bad), None, "{bad}");
        }
    }

    #[test]
    fn mutated_answers_are_read_or_refused() {
        let one = described("w-2", "RUNNING", "192.168.178.3", NETWORK, "constell1");
        let list = format!(r#"{{"items":{{"zones/europe-west3-b":{{"instances":[{one}]}}}}}}"#);
        let (mut good, mut bad) = (0, 0);
        for body in mutations(list.as_bytes(), 10_000) {
            match instances(&String::from_utf8_lossy(&body)) {
                Ok((machines, _)) => {
                    good += 1;
                    assert!(machines.iter().all(|one| is_name(&one.name)));
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().len() < 4096);
                }
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        for body in mutations(one.as_bytes(), 5000) {
            if let Ok(member) = parse_member("GET x", "p", "z", &body) {
                assert!(is_name(&member.uid));
            }
        }
        let rules = br#"{"items":[{"IPAddress":"203.0.113.3","portRange":"6443-6443","labels":{"constellation-uid":"u","constellation-use":"kubernetes"}}]}"#;
        for body in mutations(rules, 5000) {
            let _ = parse_forwarding_rules("GET x", "u", &body);
            let _ = parse_name("u", &body);
            let _ = parse_token("u", &body);
        }
    }
}
