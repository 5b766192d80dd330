//! OpenStack: the metadata service of Nova, and the APIs of Keystone (identity, v3), Nova (compute), Neutron (network), and Octavia
//! (load balancers).
//!
//! | what | where |
//! |---|---|
//! | name, provider ID, role, cluster, hash of the init secret | `meta_data.json` of the metadata service; the last three are properties (`meta`) |
//! | address | the metadata service in the form of EC2 |
//! | credentials, region, load balancer | the user data: JSON with Constellation's keys, `openstack-..` |
//! | peers | Nova: the servers with the tag `constellation-uid-UID`, by their fixed address in the cluster's subnet, which Neutron knows by the same tag |
//! | load balancer, if the user data has none | Octavia: the only one with this tag |

use base::sync::lock;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use base::time;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use zeroize::Zeroizing;

use super::answer::{Entries, Lost, nonsense, nullable, parsed};
use super::bearer::{Bearer, Token, message};
use super::https::api as api_at;
use super::pages;
use super::place::Endpoints;
use super::range::Range;
use super::service::{Alias, Service, bcrypt_hash};
use base::machines::{Error, Instance, Role};
use cloud::http::{Fields, Http, LINK_LOCAL, MAX_BODY, excerpt};
use http::encoded;

use crate::CloudMetadata;

/// The version of the metadata service. Constellation uses the same.
const VERSION: &str = "openstack/2018-08-27";
/// The version of Nova's API. Constellation uses the same. Servers have their tags since 2.26.
const NOVA: Fields<'static> = &[("x-openstack-nova-api-version", "2.42")];
/// Maximum size in bytes of a page of servers, and of a catalog.
const MAX_PAGE: u64 = 16 << 20;
const MAX_CATALOG: u64 = 1 << 20;
/// Servers on a page; a cloud may give fewer.
const SIZE: &str = "1000";
const NEXT: &str = "the user of the user data needs the role of docs/clouds.md in the project";

/// A client of the services.
pub struct OpenstackClient {
    metadata: Http,
    bearer: Bearer,
    /// The endpoints of the last token.
    catalog: Mutex<Option<Arc<Catalog>>>,
}

/// The description of a server by the metadata service.
#[derive(Debug, Deserialize)]
pub struct Description {
    uuid: String,
    name: String,
    #[serde(default, deserialize_with = "nullable")]
    project_id: String,
    #[serde(default, deserialize_with = "nullable")]
    meta: BTreeMap<String, String>,
}

/// The settings that an operator gives to the machines.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct UserData {
    openstack_auth_url: Option<String>,
    openstack_user_domain_name: Option<String>,
    openstack_region_name: Option<String>,
    openstack_username: Option<String>,
    openstack_password: Option<Zeroizing<String>>,
    openstack_application_credential_id: Option<String>,
    openstack_application_credential_secret: Option<Zeroizing<String>>,
    openstack_load_balancer_endpoint: Option<String>,
}

/// The endpoints of the APIs in a region.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Catalog {
    compute: Option<String>,
    network: Option<String>,
    load_balancer: Option<String>,
}

/// A server of Nova.
#[derive(Debug, Deserialize)]
struct Server {
    id: String,
    name: String,
    #[serde(default, deserialize_with = "nullable")]
    status: String,
    #[serde(rename = "OS-EXT-STS:task_state")]
    task: Option<String>,
    #[serde(default, deserialize_with = "nullable")]
    tags: Vec<String>,
    #[serde(default, deserialize_with = "nullable")]
    addresses: BTreeMap<String, Vec<Address>>,
    /// An address of the server that an administrator set.
    #[serde(rename = "accessIPv4")]
    access_ipv4: Option<String>,
    #[serde(rename = "accessIPv6")]
    access_ipv6: Option<String>,
    /// Properties that an administrator set.
    #[serde(default, deserialize_with = "nullable")]
    metadata: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
struct Address {
    addr: String,
    #[serde(rename = "OS-EXT-IPS:type", default, deserialize_with = "nullable")]
    kind: String,
}

impl OpenstackClient {
    /// Makes a client of the metadata service at this address: `[URL]`. The user data and Keystone have the addresses of the APIs.
    /// Sends no request.
    pub fn new(place: Option<&str>) -> Result<OpenstackClient, Error> {
        let place = Endpoints::parse(place, LINK_LOCAL, &[], &[])?;
        Ok(OpenstackClient {
            metadata: Http::new(&place.service),
            bearer: Bearer::new(("x-auth-token", ""), NEXT),
            catalog: Mutex::default(),
        })
    }

    fn metadata(&self, path: &str) -> Result<(String, Zeroizing<Vec<u8>>), Error> {
        let answer = self.metadata.get(path, &[], MAX_BODY)?;
        Ok((
            format!("GET {}", self.metadata.url(path)),
            Zeroizing::new(answer),
        ))
    }

    fn description(&self) -> Result<Description, Error> {
        let (request, body) = self.metadata(&format!("{VERSION}/meta_data.json"))?;
        parse_description(&request, &body)
    }

    fn user_data(&self) -> Result<UserData, Error> {
        let (request, body) = self.metadata(&format!("{VERSION}/user_data"))?;
        parse_user_data(&request, &body)
    }

    /// Returns a property of this server.
    fn property(&self, description: &Description, name: &str) -> Result<String, Error> {
        let value = description.meta.get(name).cloned();
        value.ok_or_else(|| Error::Denied {
            request: format!("GET {}", self.metadata.url(VERSION)),
            why: format!("the server has no property {name}"),
            next: format!("set it: openstack server set --property {name}=VALUE SERVER"),
        })
    }

    /// Returns the tag of the cluster's resources.
    fn tag(&self, description: &Description) -> Result<String, Error> {
        let uid = self.property(description, "constellation-uid")?;
        Ok(format!("constellation-uid-{uid}"))
    }

    /// Gets a token from Keystone, and the catalog.
    fn token(&self) -> Result<Token, Error> {
        let (description, data) = (self.description()?, self.user_data()?);
        let place = || format!("GET {}", self.metadata.url(&format!("{VERSION}/user_data")));
        let (url, body) = credentials(&description, &data).map_err(|missing| Error::Denied {
            request: place(),
            why: format!("the user data has no {missing}"),
            next: "put the credentials of docs/clouds.md into it".into(),
        })?;
        let url = url.trim_end_matches('/');
        let keystone = api_at(&if url.ends_with("/v3") {
            url.to_owned()
        } else {
            format!("{url}/v3")
        })?;
        let fields = [("content-type", "application/json")];
        let body = Some(body.as_bytes());
        let answer = keystone.send("POST", "auth/tokens", &fields, body, MAX_CATALOG)?;
        let token = answer.field("X-Subject-Token").map(str::to_owned);
        if answer.status != 201 {
            return Err(match message(&answer.body) {
                Some(message) => Error::Denied {
                    why: format!("status {}: {message}", answer.status),
                    request: answer.request,
                    next: "the credentials in the user data must be valid".into(),
                },
                None => answer.error(),
            });
        }
        let region = data.openstack_region_name.as_deref();
        let (seconds, catalog) = parse_token(&answer.request, region, &answer.body)?;
        *lock(&self.catalog) = Some(Arc::new(catalog));
        let token = token.and_then(|token| Token::new(Zeroizing::new(token), seconds));
        token.ok_or_else(|| Error::Nonsense {
            request: answer.request,
            expected: "a token in the field X-Subject-Token",
            got: "none".into(),
        })
    }

    /// Returns an API's answer for this path. `endpoint` picks the API from the catalog, which comes with the first token.
    fn get(
        &self,
        endpoint: impl Fn(&Catalog) -> Option<String>,
        service: &str,
        path: &str,
        fields: Fields<'_>,
    ) -> Result<(String, Vec<u8>), Error> {
        let known = || {
            let catalog = lock(&self.catalog);
            catalog.clone()
        };
        let catalog = match known() {
            Some(catalog) => catalog,
            None => {
                self.bearer.renew(&|| self.token())?;
                known().unwrap_or_default()
            }
        };
        let Some(url) = endpoint(&catalog) else {
            // the next attempt gets a new one
            *lock(&self.catalog) = None;
            return Err(Error::Denied {
                request: "POST auth/tokens".into(),
                why: format!(
                    "Keystone does not have exactly one public endpoint of {service} in the region"
                ),
                next: "name the region in the user data: openstack-region-name".into(),
            });
        };
        let api = api_at(&url)?;
        let answer = self
            .bearer
            .get(&api, path, fields, MAX_PAGE, &|| self.token())?;
        Ok((format!("GET {}", api.url(path)), answer))
    }

    fn network<T: DeserializeOwned>(&self, path: &str) -> Result<(String, T), Error> {
        let endpoint = |catalog: &Catalog| catalog.network.clone();
        let (request, body) = self.get(endpoint, "the network", path, &[])?;
        let list = parsed(&request, "a list", &body)?;
        Ok((request, list))
    }

    /// Returns the subnet of the cluster. The cluster's network is the only one with the tag, and the subnet has the network's name.
    fn subnet(&self, tag: &str) -> Result<Range, Error> {
        #[derive(Deserialize)]
        struct Networks {
            networks: Vec<Named>,
        }
        #[derive(Deserialize)]
        struct Named {
            name: String,
        }
        #[derive(Deserialize)]
        struct Subnets {
            subnets: Vec<Subnet>,
        }
        #[derive(Deserialize)]
        struct Subnet {
            name: String,
            cidr: String,
        }
        let tag = encoded(tag);
        let (request, found): (_, Networks) =
            self.network(&format!("v2.0/networks?tags={tag}&fields=name"))?;
        let [Named { name }] = found.networks.as_slice() else {
            return Err(Error::Nonsense {
                request,
                expected: "one network with the cluster's tag",
                got: found.networks.len().to_string(),
            });
        };
        let (request, found): (_, Subnets) =
            self.network(&format!("v2.0/subnets?tags={tag}&fields=name&fields=cidr"))?;
        let subnet = found.subnets.iter().find(|subnet| subnet.name == *name);
        let range = subnet.and_then(|subnet| Range::parse(&subnet.cidr));
        range.ok_or_else(|| Error::Nonsense {
            request,
            expected: "a subnet with the cluster's tag and the name of its network",
            got: format!("{} with other names", found.subnets.len()),
        })
    }

    /// Returns the results of `parse` for all pages of the list of servers with this tag.
    fn servers<T>(
        &self,
        tag: &str,
        parse: impl Fn(&str, &[u8]) -> Result<(Vec<T>, Option<String>), Error>,
    ) -> Result<Vec<T>, Error> {
        pages::all(
            |mark| {
                let mut path = format!("servers/detail?tags={}&limit={SIZE}", encoded(tag));
                if let Some(mark) = mark {
                    path += &format!("&marker={}", encoded(mark));
                }
                let endpoint = |catalog: &Catalog| catalog.compute.clone();
                let (request, body) = self.get(endpoint, "compute", &path, NOVA)?;
                parse(&request, &body)
            },
            |got| Error::Nonsense {
                request: "GET servers/detail".into(),
                expected: "the servers of the cluster",
                got,
            },
        )
    }
}

impl CloudMetadata for OpenstackClient {
    fn own_instance(&self) -> Result<Instance, Error> {
        let description = self.description()?;
        let (request, address) = self.metadata("1.0/meta-data/local-ipv4")?;
        let role = self.property(&description, "constellation-role")?;
        Ok(Instance {
            vpc_ip: Some(parse_address(&request, &address)?),
            role: Role::parse(&role),
            name: description.name,
            provider_id: provider_id(&description.uuid),
        })
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        let tag = self.tag(&self.description()?)?;
        let subnet = self.subnet(&tag)?;
        self.servers(&tag, |request, body| {
            parse_servers(request, &tag, &subnet, body)
        })
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        if let Some(host) = self.user_data()?.openstack_load_balancer_endpoint {
            return Ok(host);
        }
        let tag = self.tag(&self.description()?)?;
        let path = format!("v2.0/lbaas/loadbalancers?tags={}", encoded(&tag));
        let endpoint = |catalog: &Catalog| catalog.load_balancer.clone();
        let (request, body) = self.get(endpoint, "load balancers", &path, &[])?;
        parse_load_balancers(&request, &body)
    }
}

impl Service for OpenstackClient {
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        let tag = self.tag(&self.description()?)?;
        self.servers(&tag, |request, body| parse_aliases(request, &tag, body))
    }

    fn init_secret_hash(&self) -> Result<String, Error> {
        let description = self.description()?;
        let hash = self.property(&description, "constellation-init-secret-hash")?;
        let request = format!("GET {}", self.metadata.url(VERSION));
        bcrypt_hash(&request, hash.as_bytes())
    }
}

/// Returns Keystone's URL and the request for a token: with an application credential, else with user name and password in the
/// project of the server. The error is the name of the missing key.
fn credentials(
    description: &Description,
    data: &UserData,
) -> Result<(String, Zeroizing<String>), &'static str> {
    let url = data
        .openstack_auth_url
        .clone()
        .ok_or("openstack-auth-url")?;
    if let Some(id) = &data.openstack_application_credential_id {
        let secret = data.openstack_application_credential_secret.as_ref();
        let secret = secret.ok_or("openstack-application-credential-secret")?;
        let body = json!({"auth": {"identity": {
            "methods": ["application_credential"],
            "application_credential": {"id": id, "secret": **secret},
        }}});
        return Ok((url, Zeroizing::new(body.to_string())));
    }
    let user = data
        .openstack_username
        .as_ref()
        .ok_or("openstack-username")?;
    let password = data
        .openstack_password
        .as_ref()
        .ok_or("openstack-password")?;
    let domain = data.openstack_user_domain_name.as_ref();
    let domain = domain.ok_or("openstack-user-domain-name")?;
    let mut body = json!({"auth": {"identity": {
        "methods": ["password"],
        "password": {"user": {"name": user, "domain": {"name": domain}, "password": **password}},
    }}});
    if !description.project_id.is_empty() {
        body["auth"]["scope"] = json!({"project": {"id": description.project_id}});
    }
    Ok((url, Zeroizing::new(body.to_string())))
}

/// Parses `meta_data.json`.
pub fn parse_description(request: &str, body: &[u8]) -> Result<Description, Error> {
    const EXPECTED: &str = "the description of a server";
    let description: Description = parsed(request, EXPECTED, body)?;
    if description.name.is_empty() || description.uuid.is_empty() {
        Err(Error::Nonsense {
            request: request.to_owned(),
            expected: EXPECTED,
            got: "one without a name or a UUID".into(),
        })
    } else {
        Ok(description)
    }
}

/// Parses the user data; the error does not repeat it.
pub fn parse_user_data(request: &str, body: &[u8]) -> Result<UserData, Error> {
    serde_json::from_slice(body).map_err(|error| Error::Nonsense {
        request: request.to_owned(),
        expected: "user data with the keys openstack-..",
        // the error has only the position and no text of the user data, which can be secret
        got: format!(
            "no such JSON in line {}, column {}",
            error.line(),
            error.column()
        ),
    })
}

/// Parses an address.
pub fn parse_address(request: &str, body: &[u8]) -> Result<IpAddr, Error> {
    let text = String::from_utf8_lossy(body);
    text.trim().parse().map_err(|_| Error::Nonsense {
        request: request.to_owned(),
        expected: "an address",
        got: format!("{:?}", excerpt(body)),
    })
}

/// Parses the answer of Keystone: for how many seconds the token is valid, and the public endpoints in this region. Without a region each
/// service must have one endpoint only.
pub fn parse_token(
    request: &str,
    region: Option<&str>,
    body: &[u8],
) -> Result<(u64, Catalog), Error> {
    #[derive(Deserialize)]
    struct Answer {
        token: Given,
    }
    #[derive(Deserialize)]
    struct Given {
        expires_at: String,
        #[serde(default, deserialize_with = "nullable")]
        catalog: Vec<Service>,
    }
    #[derive(Deserialize)]
    struct Service {
        #[serde(rename = "type")]
        kind: String,
        #[serde(default, deserialize_with = "nullable")]
        endpoints: Vec<Endpoint>,
    }
    #[derive(Deserialize)]
    struct Endpoint {
        interface: String,
        region_id: Option<String>,
        /// The same, for older clients.
        region: Option<String>,
        url: String,
    }
    const EXPECTED: &str = "a token with a catalog";
    let nonsense = |got: String| nonsense(request, EXPECTED, got);
    let answer: Answer = parsed(request, EXPECTED, body)?;
    let Given {
        expires_at,
        catalog,
    } = answer.token;
    let end = time::parse(&expires_at).ok_or_else(|| {
        nonsense(format!(
            "one that ends at {:?}",
            excerpt(expires_at.as_bytes())
        ))
    })?;
    let left = end
        .duration_since(SystemTime::now())
        .unwrap_or(Duration::ZERO);
    let endpoint = |kind: &str| {
        let services = catalog.iter().filter(|service| service.kind == kind);
        let mut fitting = services
            .flat_map(|service| &service.endpoints)
            .filter(|one| {
                let own = one.region_id.as_ref().or(one.region.as_ref());
                let is_here = region.is_none_or(|region| own.is_some_and(|own| own == region));
                one.interface == "public" && is_here
            });
        match (fitting.next(), fitting.next()) {
            (Some(endpoint), None) => Some(endpoint.url.clone()),
            _ => None,
        }
    };
    // the endpoint of Neutron has no version, or its version
    let unversioned = |url: String| {
        let url = url.trim_end_matches('/');
        url.strip_suffix("/v2.0").unwrap_or(url).to_owned()
    };
    let catalog = Catalog {
        compute: endpoint("compute"),
        network: endpoint("network").map(unversioned),
        load_balancer: endpoint("load-balancer").map(unversioned),
    };
    Ok((left.as_secs(), catalog))
}

/// Parses a page of servers: the servers with the cluster's tag, a role and a fixed address in the subnet, and the marker of the
/// next page. A server that is being deleted is omitted.
pub fn parse_servers(
    request: &str,
    tag: &str,
    subnet: &Range,
    body: &[u8],
) -> Result<(Vec<Instance>, Option<String>), Error> {
    let (servers, next) = parse_page(request, tag, body, Lost::LeftOut)?;
    let machines = servers.into_iter().filter_map(|server| {
        let mut roles = server.tags.iter();
        let role = roles.find_map(|tag| tag.strip_prefix("constellation-role-"));
        let role = role.map_or(Role::Unknown, Role::parse);
        let mut addresses = server.addresses.values().flatten();
        let address = addresses.find_map(|address| {
            let is_fixed = address.kind == "fixed";
            let address: IpAddr = address.addr.parse().ok().filter(|_| is_fixed)?;
            subnet.contains(address).then_some(address)
        });
        if role == Role::Unknown || address.is_none() {
            let name = excerpt(server.name.as_bytes());
            log::warn!(
                "metadata: {request}: ignoring the server {name:?}: it has no role, or no address in {subnet}"
            );
            return None;
        }
        Some(Instance {
            name: server.name,
            provider_id: provider_id(&server.id),
            role,
            vpc_ip: address,
        })
    });
    Ok((machines.collect(), next))
}

/// Parses the same page: names and addresses of the servers, as OpenStack's controller has them: the addresses in all networks, fixed
/// and floating, the access addresses, and the property `hostname`.
pub fn parse_aliases(
    request: &str,
    tag: &str,
    body: &[u8],
) -> Result<(Vec<Alias>, Option<String>), Error> {
    let (servers, next) = parse_page(request, tag, body, Lost::Refused)?;
    let aliases = servers.into_iter().map(|mut server| {
        let in_networks = server.addresses.values().flatten();
        let all = (in_networks.map(|address| &address.addr)).chain(
            [&server.access_ipv4, &server.access_ipv6]
                .into_iter()
                .flatten(),
        );
        Alias {
            addresses: all.filter_map(|text| text.parse().ok()).collect(),
            machine: server.name,
            names: server.metadata.remove("hostname").into_iter().collect(),
        }
    });
    Ok((aliases.collect(), next))
}

/// Returns the provider ID, in the form that OpenStack's controller writes and reads.
fn provider_id(uuid: &str) -> String {
    format!("openstack:///{uuid}")
}

/// Returns the servers of a page with the cluster's tag that are not being deleted, and the marker of the next page.
fn parse_page(
    request: &str,
    tag: &str,
    body: &[u8],
    lost: Lost,
) -> Result<(Vec<Server>, Option<String>), Error> {
    #[derive(Deserialize)]
    struct Page {
        servers: Entries<Server>,
        #[serde(default, deserialize_with = "nullable")]
        servers_links: Vec<Link>,
    }
    #[derive(Deserialize)]
    struct Link {
        rel: String,
    }
    let page: Page = parsed(request, "a page of servers", body)?;
    // use only the marker in the link: behind a proxy the host in the link may be another one
    let has_next = page.servers_links.iter().any(|link| link.rel == "next");
    let last = page.servers.0.last().and_then(|server| match server {
        Ok(server) => Some(server.id.clone()),
        Err(unread) => unread.id.clone(),
    });
    let is_member = |server: &Server| {
        let is_deleted = matches!(&*server.status, "DELETED" | "SOFT_DELETED")
            || server.task.as_deref() == Some("deleting");
        !is_deleted && !server.name.is_empty() && server.tags.iter().any(|other| other == tag)
    };
    let servers = page.servers.read(request, lost)?;
    let members = servers.into_iter().filter(is_member);
    Ok((members.collect(), last.filter(|_| has_next)))
}

/// Parses the answer of Octavia: the address of the only load balancer.
pub fn parse_load_balancers(request: &str, body: &[u8]) -> Result<String, Error> {
    #[derive(Deserialize)]
    struct List {
        loadbalancers: Vec<LoadBalancer>,
    }
    #[derive(Deserialize)]
    struct LoadBalancer {
        vip_address: IpAddr,
    }
    const EXPECTED: &str = "one load balancer with the cluster's tag";
    let list: List = parsed(request, EXPECTED, body)?;
    match list.loadbalancers.as_slice() {
        [one] => Ok(one.vip_address.to_string()),
        other => Err(Error::Nonsense {
            request: request.to_owned(),
            expected: EXPECTED,
            got: other.len().to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;
    use crate::answer::tests::with_wrong_fields;

    const DESCRIPTION: &str = r#"{"uuid":"d8e02d56-2648-49a3-bf97-6be8f1204f38","name":"control-plane-0","project_id":"p1","availability_zone":"nova",
        "meta":{"constellation-uid":"constell1","constellation-role":"control-plane"},"hostname":"control-plane-0.novalocal"}"#;
    const USER_DATA: &str = r#"{"openstack-auth-url":"https://keystone.example/v3","openstack-user-domain-name":"Default","openstack-region-name":"RegionOne",
        "openstack-username":"node","openstack-password":"secret","openstack-load-balancer-endpoint":"203.0.113.9"}"#;
    const TOKEN: &str = r#"{"token":{"methods":["password"],"expires_at":"2999-11-07T02:58:43.578887Z","catalog":[
        {"type":"compute","name":"nova","endpoints":[{"interface":"admin","region":"RegionOne","region_id":"RegionOne","url":"https://admin"},
        {"interface":"public","region":"RegionOne","region_id":"RegionOne","url":"https://nova/v2.1"},
        {"interface":"public","region":"RegionTwo","region_id":"RegionTwo","url":"https://other"}]},
        {"type":"network","endpoints":[{"interface":"public","region":"RegionOne","url":"https://neutron/v2.0/"}]}]}}"#;

    #[test]
    fn a_server_has_all_its_addresses_and_the_name_that_its_property_gives() {
        let tag = "constellation-uid-constell1";
        let server = server("w-0", "ACTIVE", &format!("{tag:?}"), "10.8.0.5", "fixed").replace(
            "]}}",
            r#",{"addr":"203.0.113.7","version":4,"OS-EXT-IPS:type":"floating"}]}}"#,
        );
        // as Nova has them without such an address, and with one of each kind
        let access = r#""accessIPv4":"","accessIPv6":"","metadata":{}"#;
        let plain = server.replacen('{', &format!("{{{access},"), 1);
        let access = r#""accessIPv4":"203.0.113.8","accessIPv6":"2001:db8::8","metadata":{"hostname":"w.example","other":"x"}"#;
        let full = server.replacen('{', &format!("{{{access},"), 1);
        let page = format!(r#"{{"servers":[{plain},{full},{server}]}}"#);
        let (aliases, _) = parse_aliases("GET x", tag, page.as_bytes()).unwrap();
        let in_networks = ["10.8.0.5", "203.0.113.7"];
        let all = [&in_networks[..], &["203.0.113.8", "2001:db8::8"]].concat();
        for (alias, addresses, names) in [
            (&aliases[0], &in_networks[..], &[][..]),
            (&aliases[1], &all, &["w.example"]),
            (&aliases[2], &in_networks, &[]),
        ] {
            let addresses = addresses.iter().map(|text| text.parse::<IpAddr>().unwrap());
            assert_eq!(alias.addresses, addresses.collect::<Vec<_>>());
            assert_eq!(alias.names, names);
            assert_eq!(alias.machine, "w-0");
        }
    }

    fn server(name: &str, status: &str, tags: &str, address: &str, kind: &str) -> String {
        format!(
            r#"{{"id":"id-{name}","name":"{name}","status":"{status}","OS-EXT-STS:task_state":null,"tags":[{tags}],
            "addresses":{{"net":[{{"addr":"{address}","version":4,"OS-EXT-IPS:type":"{kind}"}}]}}}}"#
        )
    }

    fn servers(body: &str) -> Result<(Vec<Instance>, Option<String>), Error> {
        let subnet = Range::parse("192.168.178.0/24").unwrap();
        parse_servers("GET x", "constellation-uid-u", &subnet, body.as_bytes())
    }

    #[test]
    fn an_entry_with_a_wrong_field_does_not_hide_the_others() {
        let tags = r#""constellation-role-worker","constellation-uid-u""#;
        let [one, other] =
            ["w-1", "w-2"].map(|name| server(name, "ACTIVE", tags, "192.168.178.4", "fixed"));
        let next = r#""servers_links":[{"rel":"next","href":"http://x"}]"#;
        let page = format!(r#"{{"servers":[{one},{other}],{next}}}"#);
        for page in with_wrong_fields(&page, "/servers/0") {
            let (found, _) = servers(&page).unwrap_or_else(|error| panic!("{page}: {error}"));
            assert!(found.iter().any(|one| one.name == "w-2"), "{page}");
        }
        // the next page begins behind the last server, also behind one that cannot be read
        let page = page.replace(r#""name":"w-2","#, "");
        let (found, next) = servers(&page).unwrap();
        assert_eq!((found.len(), next.as_deref()), (1, Some("id-w-2")));
        // names and addresses say which machines are gone, so this list must be complete
        let error = parse_aliases("GET x", "constellation-uid-u", page.as_bytes()).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("id-w-2") && error.contains("missing field `name`"),
            "{error}"
        );
    }

    #[test]
    fn the_servers_with_tag_role_and_address_are_peers() {
        let tags = r#""constellation-role-worker","constellation-uid-u""#;
        let all = [
            server("w-0", "ACTIVE", tags, "192.168.178.4", "fixed"),
            server("floating", "ACTIVE", tags, "192.168.178.5", "floating"),
            server("elsewhere", "ACTIVE", tags, "10.0.0.1", "fixed"),
            server(
                "other",
                "ACTIVE",
                r#""constellation-role-worker""#,
                "192.168.178.6",
                "fixed",
            ),
            server(
                "bare",
                "ACTIVE",
                r#""constellation-uid-u""#,
                "192.168.178.7",
                "fixed",
            ),
            server("gone", "SOFT_DELETED", tags, "192.168.178.8", "fixed"),
            server("going", "ACTIVE", tags, "192.168.178.9", "fixed")
                .replace("null", "\"deleting\""),
        ];
        let body = format!(
            r#"{{"servers":[{}],"servers_links":[{{"rel":"next","href":"http://x"}}]}}"#,
            all.join(",")
        );
        let (machines, next) = servers(&body).unwrap();
        assert_eq!(
            machines,
            [Instance {
                name: "w-0".into(),
                provider_id: "openstack:///id-w-0".into(),
                role: Role::Worker,
                vpc_ip: Some("192.168.178.4".parse().unwrap()),
            }]
        );
        assert_eq!(next.as_deref(), Some("id-going"));
        assert_eq!(servers(r#"{"servers":[]}"#).unwrap(), (vec![], None));
        assert!(servers("{}").is_err());
    }

    #[test]
    fn the_endpoints_are_the_public_ones_of_the_region() {
        let (seconds, catalog) =
            parse_token("POST x", Some("RegionOne"), TOKEN.as_bytes()).unwrap();
        assert!(seconds > 1 << 30);
        assert_eq!(catalog.compute.as_deref(), Some("https://nova/v2.1"));
        assert_eq!(catalog.network.as_deref(), Some("https://neutron"));
        assert_eq!(catalog.load_balancer, None);
        // two regions, and no setting names one
        let (_, catalog) = parse_token("POST x", None, TOKEN.as_bytes()).unwrap();
        assert_eq!(catalog.compute, None);
        let over = TOKEN.replace("2999", "2015");
        assert_eq!(parse_token("POST x", None, over.as_bytes()).unwrap().0, 0);
    }

    #[test]
    fn the_request_for_a_token_is_keystones() {
        let description = parse_description("GET x", DESCRIPTION.as_bytes()).unwrap();
        let data = parse_user_data("GET x", USER_DATA.as_bytes()).unwrap();
        let (url, body) = credentials(&description, &data).unwrap();
        assert_eq!(url, "https://keystone.example/v3");
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        let user = &body["auth"]["identity"]["password"]["user"];
        assert_eq!(user["domain"]["name"], "Default");
        assert_eq!(user["password"], "secret");
        assert_eq!(body["auth"]["scope"]["project"]["id"], "p1");
        let bare = USER_DATA.replace("openstack-password", "x");
        let bare = parse_user_data("GET x", bare.as_bytes()).unwrap();
        assert_eq!(
            credentials(&description, &bare).err(),
            Some("openstack-password")
        );
        // the error shows nothing of the user data
        let broken = USER_DATA.replace("\"secret\"", "{\"secret\"}");
        let error = parse_user_data("GET x", broken.as_bytes())
            .err()
            .unwrap()
            .to_string();
        assert!(
            !error.contains("secret") && error.contains("line 2"),
            "{error}"
        );
    }

    #[test]
    fn mutated_answers_are_read_or_refused() {
        let tags = r#""constellation-role-worker","constellation-uid-u""#;
        let one = server("w-0", "ACTIVE", tags, "192.168.178.4", "fixed");
        let (mut good, mut bad) = (0, 0);
        for body in mutations(format!(r#"{{"servers":[{one}]}}"#).as_bytes(), 10_000) {
            match servers(&String::from_utf8_lossy(&body)) {
                Ok((machines, _)) => {
                    good += 1;
                    assert!(machines.iter().all(|one| one.vpc_ip.is_some()));
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().len() < 4096);
                }
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        for body in mutations(TOKEN.as_bytes(), 5000) {
            let _ = parse_token("POST x", Some("RegionOne"), &body);
        }
        for body in mutations(DESCRIPTION.as_bytes(), 5000) {
            let _ = parse_description("GET x", &body);
        }
        for body in mutations(USER_DATA.as_bytes(), 5000) {
            if let Err(error) = parse_user_data("GET x", &body) {
                assert!(!error.to_string().contains("secret"), "{error}");
            }
        }
        for body in mutations(br#"{"loadbalancers":[{"vip_address":"192.0.2.1"}]}"#, 5000) {
            let _ = parse_load_balancers("GET x", &body);
            let _ = parse_address("GET x", &body);
        }
    }
}
