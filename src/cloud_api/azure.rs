//! Microsoft Azure: the instance metadata service (IMDS), and Azure Resource Manager.
//!
//! | what | where |
//! |---|---|
//! | name, provider ID, address, role, cluster, hash of the init secret | the metadata service; the last three are tags |
//! | peers | the machines of the scale sets in the resource group that have the cluster's tag `constellation-uid` |
//! | load balancer | the first one in the resource group with the cluster's tag: the public address of its first frontend, else the private one |
//!
//! Requests to the API have the token of the machine's managed identity. If the machine has several, `--metadata` names one.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::OnceLock;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use super::answer::{Entries, Lost, nonsense, nullable, parsed};
use super::bearer::{Bearer, Token, message};
use super::https::api as api_at;
use super::pages;
use super::place::Endpoints;
use super::service::{Alias, Service, bcrypt_hash};
use base::machines::{Error, Instance, Role};
use cloud::http::{Http, LINK_LOCAL, MAX_BODY, excerpt};
use http::encoded;

use crate::CloudMetadata;

/// The clouds of Azure (`azEnvironment`) and their addresses of the API.
const ENVIRONMENTS: [(&str, &str); 3] = [
    ("AzurePublicCloud", "https://management.azure.com"),
    (
        "AzureUSGovernmentCloud",
        "https://management.usgovcloudapi.net",
    ),
    ("AzureChinaCloud", "https://management.chinacloudapi.cn"),
];
/// The versions of the APIs.
const IMDS_VERSION: &str = "2021-02-01";
const TOKEN_VERSION: &str = "2018-02-01";
const COMPUTE_VERSION: &str = "2024-07-01";
/// The API has the network interfaces and public addresses of scale sets only in this version.
const INTERFACES_VERSION: &str = "2018-10-01";
const NETWORK_VERSION: &str = "2024-05-01";
/// Maximum size in bytes of a page.
const MAX_PAGE: u64 = 16 << 20;
const UID: &str = "constellation-uid";
const ROLE: &str = "constellation-role";
const HASH: &str = "constellation-init-secret-hash";
const NEXT: &str =
    "the machine's managed identity needs the role of docs/clouds.md in the resource group";

/// A client of the services.
pub struct AzureClient {
    imds: Http,
    place: Endpoints,
    bearer: Bearer,
    api: OnceLock<Http>,
}

/// The metadata service's description of the machine.
#[derive(Debug, Clone, Deserialize)]
pub struct InstanceDocument {
    compute: Compute,
    #[serde(default, deserialize_with = "nullable")]
    network: Network,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Compute {
    resource_id: String,
    subscription_id: String,
    resource_group_name: String,
    #[serde(default, deserialize_with = "nullable")]
    az_environment: String,
    os_profile: Profile,
    #[serde(default, deserialize_with = "nullable")]
    tags_list: Vec<Tag>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Profile {
    computer_name: String,
}

#[derive(Debug, Clone, Deserialize)]
struct Tag {
    name: String,
    value: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Network {
    #[serde(default, deserialize_with = "nullable")]
    interface: Vec<Interface>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Interface {
    #[serde(deserialize_with = "nullable")]
    ipv4: Addresses,
    #[serde(deserialize_with = "nullable")]
    ipv6: Addresses,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Addresses {
    #[serde(deserialize_with = "nullable")]
    ip_address: Vec<Address>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Address {
    private_ip_address: String,
}

impl InstanceDocument {
    fn tag(&self, name: &str) -> Option<&str> {
        let mut tags = self.compute.tags_list.iter();
        let found = tags.find(|tag| tag.name.eq_ignore_ascii_case(name))?;
        Some(found.value.trim())
    }

    /// Returns the first IPv4 address of the first interface, else its first IPv6 address.
    fn address(&self) -> Option<IpAddr> {
        let first = self.network.interface.first()?;
        let mut all = first.ipv4.ip_address.iter().chain(&first.ipv6.ip_address);
        all.find_map(|address| address.private_ip_address.parse().ok())
    }

    /// Returns the path of the resource group.
    fn group(&self) -> String {
        let (subscription, group) = (
            encoded(&self.compute.subscription_id),
            encoded(&self.compute.resource_group_name),
        );
        format!("subscriptions/{subscription}/resourceGroups/{group}")
    }
}

/// The tags of a resource. Azure compares their names without regard to case.
#[derive(Default, Deserialize)]
#[serde(transparent)]
struct Tags(BTreeMap<String, String>);

impl Tags {
    fn get(&self, name: &str) -> Option<&String> {
        let mut tags = self.0.iter();
        let found = tags.find(|(other, _)| other.eq_ignore_ascii_case(name))?;
        Some(found.1)
    }
}

/// A page of a list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
#[serde(bound = "T: DeserializeOwned")]
struct Page<T> {
    value: Entries<T>,
    next_link: Option<String>,
}

/// A scale set.
#[derive(Deserialize)]
struct ScaleSet {
    name: String,
    #[serde(default, deserialize_with = "nullable")]
    tags: Tags,
}

/// A machine of a scale set, without its address.
#[derive(Deserialize)]
struct Machine {
    id: String,
    #[serde(default, deserialize_with = "nullable")]
    tags: Tags,
    properties: MachineProperties,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MachineProperties {
    os_profile: Profile,
    #[serde(default, deserialize_with = "nullable")]
    provisioning_state: String,
}

/// A network interface of a scale set.
#[derive(Deserialize)]
struct MachineInterface {
    properties: InterfaceProperties,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InterfaceProperties {
    primary: Option<bool>,
    virtual_machine: Option<Id>,
    #[serde(default, deserialize_with = "nullable")]
    ip_configurations: Vec<Configuration>,
}

#[derive(Deserialize)]
struct Id {
    id: String,
}

#[derive(Deserialize)]
struct Configuration {
    properties: ConfigurationProperties,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfigurationProperties {
    primary: Option<bool>,
    #[serde(rename = "privateIPAddress")]
    private_ip_address: Option<String>,
    #[serde(rename = "publicIPAddress")]
    public_ip_address: Option<Id>,
    subnet: Option<Id>,
}

/// A public address.
#[derive(Deserialize)]
struct Public {
    #[serde(default, deserialize_with = "nullable")]
    id: String,
    properties: PublicProperties,
}

#[derive(Deserialize)]
struct PublicProperties {
    /// `None` before Azure has chosen it.
    #[serde(rename = "ipAddress")]
    address: Option<IpAddr>,
}

/// A load balancer.
#[derive(Deserialize)]
struct LoadBalancer {
    #[serde(default, deserialize_with = "nullable")]
    tags: Tags,
    properties: LoadBalancerProperties,
}

#[derive(Deserialize)]
struct LoadBalancerProperties {
    #[serde(
        rename = "frontendIPConfigurations",
        default,
        deserialize_with = "nullable"
    )]
    frontends: Vec<Configuration>,
}

/// Where a load balancer is.
#[derive(Debug, PartialEq, Eq)]
pub enum Frontend {
    /// At this private address.
    Private(String),
    /// At the public address with this ID, a path of the API.
    Public(String),
}

impl AzureClient {
    /// Makes a client of the services at these addresses: `[URL][,arm=URL][,identity=CLIENT_ID]`. Sends no request.
    pub fn new(place: Option<&str>) -> Result<AzureClient, Error> {
        let place = Endpoints::parse(place, LINK_LOCAL, &["arm"], &["identity"])?;
        Ok(AzureClient {
            imds: Http::new(&place.service),
            place,
            bearer: Bearer::new(("authorization", "Bearer "), NEXT),
            api: OnceLock::new(),
        })
    }

    fn imds(&self, path: &str) -> Result<Vec<u8>, Error> {
        self.imds.get(path, &[("Metadata", "true")], MAX_BODY * 4)
    }

    fn document(&self) -> Result<InstanceDocument, Error> {
        let path = format!("metadata/instance?api-version={IMDS_VERSION}&format=json");
        parse_document(&format!("GET {}", self.imds.url(&path)), &self.imds(&path)?)
    }

    /// Returns a tag of this machine.
    fn tag(&self, document: &InstanceDocument, name: &str) -> Result<String, Error> {
        let tag = document.tag(name).map(str::to_owned);
        tag.ok_or_else(|| Error::Denied {
            request: format!("GET {}", self.imds.url("metadata/instance")),
            why: format!("the machine has no tag {name}"),
            next: "set it on the scale set, and update its machines".into(),
        })
    }

    /// Returns the ID of the cluster.
    fn uid(&self, document: &InstanceDocument) -> Result<String, Error> {
        self.tag(document, UID)
    }

    /// Returns the API of this cloud.
    fn api(&self, document: &InstanceDocument) -> Result<&Http, Error> {
        if let Some(api) = self.api.get() {
            return Ok(api);
        }
        let url = self.place.api("arm").unwrap_or(environment(document));
        let api = api_at(url)?;
        Ok(self.api.get_or_init(|| api))
    }

    fn token(&self, document: &InstanceDocument) -> Result<Token, Error> {
        let resource = format!("{}/", environment(document));
        self.token_for(&resource).map_err(|error| match error {
            // no identity, or several
            Error::Status {
                request,
                status: 400,
                body,
            } => Error::Denied {
                request,
                why: format!("the machine has no such managed identity: {body:?}"),
                next: "assign one to the scale set; if there are several, name one: metadata=,identity=CLIENT_ID".into(),
            },
            other => other,
        })
    }

    /// Returns a token of the managed identity for the service with this URL.
    pub fn token_for(&self, resource: &str) -> Result<Token, Error> {
        let resource = encoded(resource);
        let mut path = format!(
            "metadata/identity/oauth2/token?api-version={TOKEN_VERSION}&resource={resource}"
        );
        if let Some(identity) = self.place.value("identity") {
            path += &format!("&client_id={}", encoded(identity));
        }
        let request = format!("GET {}", self.imds.url(&path));
        parse_token(&request, &Zeroizing::new(self.imds(&path)?))
    }

    /// Returns the API's answer for this path.
    fn get(&self, document: &InstanceDocument, path: &str) -> Result<(String, Vec<u8>), Error> {
        let api = self.api(document)?;
        let new = || self.token(document);
        let answer = self.bearer.get(api, path, &[], MAX_PAGE, &new)?;
        Ok((format!("GET {}", api.url(path)), answer))
    }

    /// Returns all pages of a list.
    fn list<T: DeserializeOwned>(
        &self,
        document: &InstanceDocument,
        path: &str,
        version: &str,
        lost: Lost,
    ) -> Result<Vec<T>, Error> {
        let api = self.api(document)?;
        let path = format!("{path}?api-version={version}");
        let request = format!("GET {}", api.url(&path));
        let nonsense = |got: String| nonsense(&request, "a list", got);
        let entries = pages::all(
            |link| {
                let (request, body) = match link {
                    None => self.get(document, &path)?,
                    // a link to another server would send the token there
                    Some(link) => match http::path_below(api.base(), link) {
                        Some(path) => self.get(document, path)?,
                        None => {
                            let link = excerpt(link.as_bytes());
                            return Err(nonsense(format!("a next page at {link:?}")));
                        }
                    },
                };
                let page: Page<T> = parsed(&request, "a page of a list", &body)?;
                Ok((page.value.0, page.next_link))
            },
            nonsense,
        )?;
        Entries(entries).read(&request, lost)
    }

    /// Returns the machines of the cluster's scale sets. `join` makes them from the path of one set, and the API's lists of it: its
    /// machines, and their network interfaces.
    fn machines<T>(
        &self,
        document: &InstanceDocument,
        lost: Lost,
        join: impl Fn(&str, Vec<Machine>, Vec<MachineInterface>) -> Result<Vec<T>, Error>,
    ) -> Result<Vec<T>, Error> {
        let uid = self.uid(document)?;
        let compute = format!("{}/providers/Microsoft.Compute", document.group());
        let path = format!("{compute}/virtualMachineScaleSets");
        let sets: Vec<ScaleSet> = self.list(document, &path, COMPUTE_VERSION, lost)?;
        let mut found = vec![];
        for set in sets {
            if set.tags.get(UID) != Some(&uid) {
                continue;
            }
            let path = format!("{path}/{}", encoded(&set.name));
            let machines = format!("{path}/virtualMachines");
            let machines: Vec<Machine> = self.list(document, &machines, COMPUTE_VERSION, lost)?;
            let interfaces = format!("{path}/networkInterfaces");
            let interfaces = self.list(document, &interfaces, INTERFACES_VERSION, lost)?;
            found.extend(join(&path, machines, interfaces)?);
        }
        Ok(found)
    }

    /// Returns the public addresses of a scale set's machines; none if the role of the managed identity is from before it had the
    /// permission.
    fn public_addresses(
        &self,
        document: &InstanceDocument,
        set: &str,
    ) -> Result<Vec<Public>, Error> {
        let path = format!("{set}/publicipaddresses");
        match self.list(document, &path, INTERFACES_VERSION, Lost::LeftOut) {
            Err(error @ Error::Denied { .. }) => {
                log::debug!("cannot list the public addresses of machines: {error}");
                Ok(vec![])
            }
            other => other,
        }
    }
}

impl CloudMetadata for AzureClient {
    fn own_instance(&self) -> Result<Instance, Error> {
        let document = self.document()?;
        Ok(Instance {
            role: Role::parse(&self.tag(&document, ROLE)?),
            vpc_ip: document.address(),
            name: document.compute.os_profile.computer_name,
            provider_id: format!("azure://{}", document.compute.resource_id),
        })
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        let document = self.document()?;
        let peers = self.machines(&document, Lost::LeftOut, |_, machines, interfaces| {
            Ok(join(machines, interfaces))
        })?;
        Ok(in_network_of(&document.compute.resource_id, peers))
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        let document = self.document()?;
        let uid = self.uid(&document)?;
        let path = format!(
            "{}/providers/Microsoft.Network/loadBalancers",
            document.group()
        );
        let balancers: Vec<LoadBalancer> =
            self.list(&document, &path, NETWORK_VERSION, Lost::LeftOut)?;
        let missing = |why: &str| Error::Denied {
            request: format!("GET {path}"),
            why: why.to_owned(),
            next: format!("give the load balancer the tag {UID}={uid} and a frontend"),
        };
        let mut balancers = balancers.into_iter();
        let balancer = balancers.find(|balancer| balancer.tags.get(UID) == Some(&uid));
        let balancer = balancer.ok_or_else(|| missing("no load balancer has the cluster's tag"))?;
        match frontend(balancer) {
            None => Err(missing("the load balancer of the cluster has no frontend")),
            Some(Frontend::Private(address)) => Ok(address),
            Some(Frontend::Public(id)) => {
                let path = format!("{id}?api-version={NETWORK_VERSION}");
                let (request, body) = self.get(&document, &path)?;
                parse_public_address(&request, &body)
            }
        }
    }
}

impl Service for AzureClient {
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        let document = self.document()?;
        self.machines(&document, Lost::Refused, |set, machines, interfaces| {
            let public = self.public_addresses(&document, set)?;
            Ok(join_aliases(machines, interfaces, public))
        })
    }

    fn init_secret_hash(&self) -> Result<String, Error> {
        let hash = self.tag(&self.document()?, HASH)?;
        let request = format!("GET {}", self.imds.url("metadata/instance"));
        bcrypt_hash(&request, hash.as_bytes())
    }
}

/// Returns the address of the API in the cloud of a machine.
fn environment(document: &InstanceDocument) -> &'static str {
    let wanted = document.compute.az_environment.as_str();
    let found = ENVIRONMENTS.iter().find(|(name, _)| *name == wanted);
    found.unwrap_or(&ENVIRONMENTS[0]).1
}

/// Parses the metadata service's document.
pub fn parse_document(request: &str, body: &[u8]) -> Result<InstanceDocument, Error> {
    const EXPECTED: &str = "the metadata of a machine";
    let document: InstanceDocument = parsed(request, EXPECTED, body)?;
    let compute = &document.compute;
    // names of resources have at most 260 characters, and no character that separates parts of a path or lines
    let is_name = |text: &str| {
        let is_allowed = |c: char| c.is_alphanumeric() || "-_.()/".contains(c);
        (1..=1024).contains(&text.len()) && text.chars().all(is_allowed)
    };
    for (what, text) in [
        ("resourceId", &compute.resource_id),
        ("subscriptionId", &compute.subscription_id),
        ("resourceGroupName", &compute.resource_group_name),
        ("computerName", &compute.os_profile.computer_name),
    ] {
        if !is_name(text) {
            return Err(Error::Nonsense {
                request: request.to_owned(),
                expected: EXPECTED,
                got: format!("one with {what} {:?}", excerpt(text.as_bytes())),
            });
        }
    }
    Ok(document)
}

/// Parses the token of a managed identity; the error does not repeat it.
pub fn parse_token(request: &str, body: &[u8]) -> Result<Token, Error> {
    #[derive(Deserialize)]
    struct Given {
        access_token: Zeroizing<String>,
        /// Seconds, as text.
        expires_in: String,
    }
    let given: Option<Given> = serde_json::from_slice(body).ok();
    given
        .and_then(|given| Token::new(given.access_token, given.expires_in.parse().ok()?))
        .ok_or_else(|| Error::Nonsense {
            request: request.to_owned(),
            expected: "a token",
            got: match message(body) {
                Some(message) => format!("{message:?}"),
                None => format!("{} bytes of something else", body.len()),
            },
        })
}

/// A machine, and the lower-case path of its virtual network.
type Placed = (Instance, Option<String>);

/// Returns the machines that are not being deleted, with the addresses of their primary interfaces.
fn join(machines: Vec<Machine>, interfaces: Vec<MachineInterface>) -> Vec<Placed> {
    let mut addresses = HashMap::new();
    for interface in interfaces {
        let properties = interface.properties;
        let (Some(machine), Some(true)) = (properties.virtual_machine, properties.primary) else {
            continue;
        };
        let mut configurations = properties.ip_configurations.into_iter();
        let first = configurations.find(|one| one.properties.primary == Some(true));
        let Some(ConfigurationProperties {
            private_ip_address,
            subnet,
            ..
        }) = first.map(|one| one.properties)
        else {
            continue;
        };
        let address = private_ip_address.and_then(|address| address.parse::<IpAddr>().ok());
        let subnet = subnet.map(|subnet| subnet.id.to_ascii_lowercase());
        let network = subnet.and_then(|id| Some(id.split_once("/subnets/")?.0.to_owned()));
        addresses.insert(machine.id.to_ascii_lowercase(), (address, network));
    }
    let mut of_machine = |machine: Machine| {
        let found = addresses.remove(&machine.id.to_ascii_lowercase());
        let (vpc_ip, network) = found.unwrap_or_default();
        let role = machine.tags.get(ROLE);
        let instance = Instance {
            vpc_ip,
            name: machine.properties.os_profile.computer_name,
            role: role.map_or(Role::Unknown, |role| Role::parse(role)),
            provider_id: format!("azure://{}", machine.id),
        };
        (instance, network)
    };
    machines
        .into_iter()
        .filter(|machine| {
            !machine
                .properties
                .provisioning_state
                .eq_ignore_ascii_case("Deleting")
        })
        .map(&mut of_machine)
        .filter(|(machine, _)| !machine.name.is_empty())
        .collect()
}

/// Returns the addresses of the machines: of all configurations of all interfaces, in their networks and public.
fn join_aliases(
    machines: Vec<Machine>,
    interfaces: Vec<MachineInterface>,
    public: Vec<Public>,
) -> Vec<Alias> {
    let public: HashMap<String, IpAddr> = (public.into_iter())
        .filter_map(|one| Some((one.id.to_ascii_lowercase(), one.properties.address?)))
        .collect();
    let mut addresses: HashMap<String, Vec<IpAddr>> = HashMap::new();
    for interface in interfaces {
        let Some(machine) = interface.properties.virtual_machine else {
            continue;
        };
        let configurations = interface.properties.ip_configurations.into_iter();
        let own = addresses
            .entry(machine.id.to_ascii_lowercase())
            .or_default();
        own.extend(configurations.flat_map(|one| {
            let id = one.properties.public_ip_address;
            let public = id.and_then(|id| public.get(&id.id.to_ascii_lowercase()));
            let private = one.properties.private_ip_address;
            [private.and_then(|text| text.parse().ok()), public.copied()]
                .into_iter()
                .flatten()
        }));
    }
    let alias = |machine: Machine| Alias {
        addresses: (addresses.remove(&machine.id.to_ascii_lowercase())).unwrap_or_default(),
        machine: machine.properties.os_profile.computer_name,
        names: vec![],
    };
    machines.into_iter().map(alias).collect()
}

/// Returns the machines in the virtual network of the machine with this ID. If that machine is not in the list, returns all.
fn in_network_of(own: &str, machines: Vec<Placed>) -> Vec<Instance> {
    let own_id = format!("azure://{own}");
    let own = machines
        .iter()
        .find(|(machine, _)| machine.provider_id.eq_ignore_ascii_case(&own_id));
    let network = own.and_then(|(_, network)| network.clone());
    let is_in = |(machine, other): &Placed| {
        let is_in = network.is_none() || *other == network;
        if !is_in {
            log::warn!(
                "metadata: ignoring the machine {:?}: it is in another network",
                machine.name
            );
        }
        is_in
    };
    let in_it = machines.into_iter().filter(is_in);
    in_it.map(|(machine, _)| machine).collect()
}

/// Parses a page of machines and one of their interfaces.
pub fn parse_machines(
    request: &str,
    machines: &[u8],
    interfaces: &[u8],
) -> Result<Vec<Instance>, Error> {
    let machines: Page<Machine> = parsed(request, "a page of machines", machines)?;
    let interfaces: Page<MachineInterface> = parsed(request, "a page of interfaces", interfaces)?;
    let machines = machines.value.read(request, Lost::LeftOut)?;
    let interfaces = interfaces.value.read(request, Lost::LeftOut)?;
    let placed = join(machines, interfaces);
    Ok(placed.into_iter().map(|(machine, _)| machine).collect())
}

/// Returns where the first frontend of a load balancer is: at its public address, else at its private one.
fn frontend(balancer: LoadBalancer) -> Option<Frontend> {
    let frontends = &balancer.properties.frontends;
    let public = frontends
        .iter()
        .find_map(|one| one.properties.public_ip_address.as_ref());
    if let Some(Id { id }) = public {
        let is_path = id.starts_with("/subscriptions/") && !id.contains(['?', '#', '%', ' ', '\\']);
        let is_path = is_path && id.split('/').all(|part| part != "..");
        return is_path.then(|| Frontend::Public(id[1..].to_owned()));
    }
    let private = frontends
        .iter()
        .find_map(|one| one.properties.private_ip_address.clone());
    private.map(Frontend::Private)
}

/// Parses a page of load balancers: where the first one with this tag is.
pub fn parse_load_balancers(
    request: &str,
    uid: &str,
    body: &[u8],
) -> Result<Option<Frontend>, Error> {
    let page: Page<LoadBalancer> = parsed(request, "a page of load balancers", body)?;
    let mut all = page.value.read(request, Lost::LeftOut)?.into_iter();
    let found = all.find(|one| one.tags.get(UID).is_some_and(|other| other == uid));
    Ok(found.and_then(frontend))
}

/// Parses a public address.
pub fn parse_public_address(request: &str, body: &[u8]) -> Result<String, Error> {
    const EXPECTED: &str = "a public address";
    let public: Public = parsed(request, EXPECTED, body)?;
    let address = public.properties.address;
    let address = address.ok_or_else(|| Error::Nonsense {
        request: request.to_owned(),
        expected: EXPECTED,
        got: "one without ipAddress".into(),
    })?;
    Ok(address.to_string())
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;
    use crate::answer::tests::with_wrong_fields;

    /// The metadata of a machine of a scale set, in the form of "Azure Instance Metadata Service for Linux virtual machines".
    const DOCUMENT: &str = r#"{"compute":{"azEnvironment":"AzurePublicCloud","location":"westeurope","name":"constell-scale-set_0",
        "osProfile":{"adminUsername":"","computerName":"constell-worker000000"},"resourceGroupName":"constell-rg",
        "resourceId":"/subscriptions/8d10da13/resourceGroups/constell-rg/providers/Microsoft.Compute/virtualMachineScaleSets/w/virtualMachines/0",
        "subscriptionId":"8d10da13","tags":"x:y","tagsList":[{"name":"constellation-uid","value":"constell1"},{"name":"constellation-role","value":"worker"}],
        "vmScaleSetName":"w"},"network":{"interface":[{"ipv4":{"ipAddress":[{"privateIpAddress":"10.9.0.4","publicIpAddress":""}],
        "subnet":[{"address":"10.9.0.0","prefix":"16"}]},"ipv6":{"ipAddress":[]},"macAddress":"000D3A"}]}}"#;
    const MACHINES: &str = r#"{"value":[{"id":"/subscriptions/8D/resourceGroups/RG/virtualMachines/0","name":"w_0","instanceId":"0","tags":{"constellation-role":"worker"},
        "properties":{"osProfile":{"computerName":"w000000"},"provisioningState":"Succeeded"}},
        {"id":"/x/1","properties":{"osProfile":{"computerName":"w000001"},"provisioningState":"Deleting"}}]}"#;
    const INTERFACES: &str = r#"{"value":[{"id":"n","properties":{"primary":true,"virtualMachine":{"id":"/subscriptions/8d/resourceGroups/rg/virtualMachines/0"},
        "ipConfigurations":[{"properties":{"primary":false,"privateIPAddress":"10.9.0.9"}},
        {"properties":{"primary":true,"privateIPAddress":"10.9.0.4","publicIPAddress":{"id":"/subscriptions/8d/PUBLIC/0"},"subnet":{"id":"/a/virtualNetworks/net/subnets/s"}}}]}}]}"#;
    const PUBLIC: &str = r#"{"value":[{"id":"/subscriptions/8d/public/0","properties":{"ipAddress":"203.0.113.9"}},
        {"id":"/subscriptions/8d/public/1","properties":{}}]}"#;
    const BALANCERS: &str = r#"{"value":[{"name":"other","tags":{},"properties":{}},{"name":"lb","tags":{"constellation-uid":"constell1"},
        "properties":{"frontendIPConfigurations":[{"properties":{"privateIPAddress":"10.9.0.200"}},
        {"properties":{"publicIPAddress":{"id":"/subscriptions/8d/ip"}}}]}}]}"#;

    #[test]
    fn the_metadata_of_a_machine_is_read() {
        let document = parse_document("GET x", DOCUMENT.as_bytes()).unwrap();
        assert_eq!(document.tag(ROLE), Some("worker"));
        assert_eq!(document.address(), Some("10.9.0.4".parse().unwrap()));
        assert_eq!(
            document.group(),
            "subscriptions/8d10da13/resourceGroups/constell-rg"
        );
        assert_eq!(environment(&document), "https://management.azure.com");
        let ipv6 = DOCUMENT.replace("\"10.9.0.4\"", "\"\"").replace(
            r#""ipv6":{"ipAddress":[]"#,
            r#""ipv6":{"ipAddress":[{"privateIpAddress":"2001:db8::4"}]"#,
        );
        let document = parse_document("GET x", ipv6.as_bytes()).unwrap();
        assert_eq!(document.address(), Some("2001:db8::4".parse().unwrap()));
        for (from, to) in [("constell-rg\",\n", "a?b\",\n"), ("8d10da13\"", "\"")] {
            let lying = DOCUMENT.replace(from, to);
            assert!(parse_document("GET x", lying.as_bytes()).is_err(), "{to}");
        }
    }

    #[test]
    fn a_machine_has_the_addresses_of_all_configurations() {
        fn all<T: DeserializeOwned>(body: &str) -> Vec<T> {
            let page: Page<T> = parsed("GET x", "", body.as_bytes()).unwrap();
            page.value.read("GET x", Lost::Refused).unwrap()
        }
        let aliases = join_aliases(all(MACHINES), all(INTERFACES), all(PUBLIC));
        let addresses = ["10.9.0.9", "10.9.0.4", "203.0.113.9"];
        let addresses = addresses.map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(aliases[0].machine, "w000000");
        assert_eq!(aliases[0].addresses, addresses);
    }

    #[test]
    fn machines_get_the_addresses_of_their_primary_interfaces() {
        let found = parse_machines("GET x", MACHINES.as_bytes(), INTERFACES.as_bytes()).unwrap();
        // the machine that is being deleted is not listed
        assert_eq!(
            found,
            [Instance {
                name: "w000000".into(),
                provider_id: "azure:///subscriptions/8D/resourceGroups/RG/virtualMachines/0".into(),
                role: Role::Worker,
                vpc_ip: Some("10.9.0.4".parse().unwrap()),
            }]
        );
    }

    #[test]
    fn an_entry_with_a_wrong_field_does_not_hide_the_others() {
        let other = r#"{"id":"/x/2","tags":{"constellation-role":"worker"},"properties":{"osProfile":{"computerName":"w000002"}}}"#;
        let list = MACHINES.replace("]}", &format!(",{other}]}}"));
        for list in with_wrong_fields(&list, "/value/0") {
            let found = parse_machines("GET x", list.as_bytes(), INTERFACES.as_bytes());
            let found = found.unwrap_or_else(|error| panic!("{list}: {error}"));
            assert!(found.iter().any(|one| one.name == "w000002"), "{list}");
            let page: Page<Machine> = parsed("GET x", "", list.as_bytes()).unwrap();
            // names and addresses say which machines are gone, so this list must be complete
            let all = page.value.read("GET x", Lost::Refused);
            assert!(all.map_or(true, |all| all.len() == 3), "{list}");
        }
        for list in with_wrong_fields(INTERFACES, "/value/0") {
            parse_machines("GET x", MACHINES.as_bytes(), list.as_bytes()).unwrap();
        }
        for list in with_wrong_fields(BALANCERS, "/value/0") {
            let found = parse_load_balancers("GET x", "constell1", list.as_bytes()).unwrap();
            assert!(found.is_some(), "{list}");
        }
        // a machine without a profile is named
        let without = list.replace(r#""osProfile":{"computerName":"w000000"},"#, "");
        let page: Page<Machine> = parsed("GET x", "", without.as_bytes()).unwrap();
        let error = page.value.read("GET x", Lost::Refused).err().unwrap();
        let error = error.to_string();
        assert!(
            error.contains("w_0") && error.contains("osProfile"),
            "{error}"
        );
    }

    #[test]
    fn names_of_tags_are_compared_without_regard_to_case() {
        let machines = MACHINES.replace("constellation-role", "Constellation-Role");
        let found = parse_machines("GET x", machines.as_bytes(), INTERFACES.as_bytes()).unwrap();
        assert_eq!(found[0].role, Role::Worker);
        let document = DOCUMENT.replace("constellation-role", "CONSTELLATION-ROLE");
        let document = parse_document("GET x", document.as_bytes()).unwrap();
        assert_eq!(document.tag(ROLE), Some("worker"));
        let balancers = BALANCERS.replace("constellation-uid", "constellation-UID");
        let found = parse_load_balancers("GET x", "constell1", balancers.as_bytes()).unwrap();
        assert!(found.is_some());
        // and their values are not
        let other = parse_load_balancers("GET x", "CONSTELL1", balancers.as_bytes()).unwrap();
        assert!(other.is_none());
    }

    #[test]
    fn a_machine_in_another_network_is_no_peer() {
        let machine = |name: &str, network: &str| {
            let instance = Instance {
                name: name.into(),
                provider_id: format!("azure:///VM/{name}"),
                role: Role::Worker,
                vpc_ip: None,
            };
            (instance, Some(network.to_owned()))
        };
        let all = || {
            vec![
                machine("a", "net"),
                machine("b", "net"),
                machine("c", "other"),
            ]
        };
        let names = |own: &str| -> Vec<_> {
            let found = in_network_of(own, all());
            found.into_iter().map(|machine| machine.name).collect()
        };
        assert_eq!(names("/vm/a"), ["a", "b"]);
        assert_eq!(names("/vm/x"), ["a", "b", "c"]);
    }

    #[test]
    fn a_load_balancer_is_at_its_public_address_or_else_at_its_private_one() {
        let found = |body: &str| parse_load_balancers("GET x", "constell1", body.as_bytes());
        let public = Frontend::Public("subscriptions/8d/ip".into());
        assert_eq!(found(BALANCERS).unwrap(), Some(public));
        let private = BALANCERS.replace("publicIPAddress", "other");
        let address = Frontend::Private("10.9.0.200".into());
        assert_eq!(found(&private).unwrap(), Some(address));
        // another server would get the token
        for id in ["https://x/", "/subscriptions/../x", "/subscriptions/x?y"] {
            let lying = BALANCERS.replace("/subscriptions/8d/ip", id);
            assert_eq!(found(&lying).unwrap(), None, "{id}");
        }
        let address =
            parse_public_address("GET x", br#"{"properties":{"ipAddress":"203.0.113.4"}}"#);
        assert_eq!(address.unwrap(), "203.0.113.4");
    }

    #[test]
    fn a_token_is_read_and_never_shown() {
        let good =
            br#"{"access_token":"eyJ0","expires_in":"86399","resource":"r","token_type":"Bearer"}"#;
        assert!(parse_token("GET x", good).is_ok());
        let error = parse_token("GET x", br#"{"access_token":"eyJ0 ","expires_in":"1"}"#);
        let error = error.err().unwrap().to_string();
        assert!(!error.contains("eyJ0"), "{error}");
    }

    #[test]
    fn mutated_answers_are_read_or_refused() {
        let (mut good, mut bad) = (0, 0);
        for body in mutations(MACHINES.as_bytes(), 10_000) {
            match parse_machines("GET x", &body, INTERFACES.as_bytes()) {
                Ok(machines) => {
                    good += 1;
                    assert!(machines.iter().all(|machine| !machine.name.is_empty()));
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().len() < 4096);
                }
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        for body in mutations(INTERFACES.as_bytes(), 5000) {
            let _ = parse_machines("GET x", MACHINES.as_bytes(), &body);
        }
        for body in mutations(DOCUMENT.as_bytes(), 5000) {
            if let Ok(document) = parse_document("GET x", &body) {
                assert!(!document.group().contains(['?', '#', ' ']));
            }
        }
        for body in mutations(BALANCERS.as_bytes(), 5000) {
            let _ = parse_load_balancers("GET x", "constell1", &body);
            let _ = parse_public_address("GET x", &body);
            let _ = parse_token("GET x", &body);
        }
    }
}
