//! Amazon Web Services: the instance metadata service in its second version (IMDSv2), and the APIs of EC2, Elastic Load Balancing and
//! resource tags.
//!
//! | what | where |
//! |---|---|
//! | name, provider ID, address | the instance identity document |
//! | role, cluster, hash of the init secret | the tags `constellation-role`, `constellation-uid`, `constellation-init-secret-hash` of the instance, which its metadata must have (`InstanceMetadataTags`) |
//! | peers | EC2 `DescribeInstances`: the running instances with the cluster's `constellation-uid` |
//! | load balancer | the only one with the cluster's `constellation-uid` (`tag:GetResources`); its DNS name (`DescribeLoadBalancers`) |
//!
//! Requests to the APIs are signed with the credentials of the instance's role, as [`super::credentials`] finds them.

use std::fmt;

use super::client::{ApiCall, SignedClient, is_name, name, query};
use super::xml::{Node, child, children, document, text_at};
use base::machines::{Error, Instance, Role};
use cloud::http::{AWS, excerpt};
use http::form;

use crate::CloudMetadata;
use serde::Deserialize;
use serde_json::json;

use crate::answer::{nonsense, parsed};
use crate::pages;
use crate::place::Endpoints;
use crate::range::Range;
use crate::service::{Alias, Service, bcrypt_hash};

/// The names by which `--metadata` replaces the address of an API.
const APIS: [&str; 3] = ["ec2", "elb", "tagging"];
/// Maximum size in bytes of a page of 1000 instances.
const MAX_PAGE: u64 = 24 << 20;
/// The states of an instance that exists: all except `terminated`.
const EXISTING: [&str; 5] = ["pending", "running", "stopping", "stopped", "shutting-down"];
/// The states of an instance that is a peer.
const RUNNING: [&str; 1] = ["running"];
/// A client of the services. A call sends one request for each page, and further ones if it needs a new token or new credentials.
pub struct AwsClient(SignedClient);

impl AwsClient {
    /// Makes a client of the services at these addresses: `[URL][,ec2=URL][,elb=URL][,tagging=URL]`. Sends no request.
    pub fn new(place: Option<&str>) -> Result<AwsClient, Error> {
        Endpoints::parse(place, AWS, &APIS, &[])?;
        Ok(AwsClient(SignedClient::new(place)?))
    }

    /// Returns the ID of the cluster by which its resources are tagged.
    fn uid(&self) -> Result<String, Error> {
        const NAME: &str = "constellation-uid";
        let request = self
            .0
            .imds_request(&format!("meta-data/tags/instance/{NAME}"));
        name(&request, "the cluster's ID", &self.0.tag(NAME)?)
    }

    /// Returns the cluster's instances in these states. `parse` reads one page of them.
    fn all<T>(
        &self,
        states: &[&str],
        parse: impl Fn(&str, &[u8]) -> Result<(Vec<T>, Option<String>), Error>,
    ) -> Result<Vec<T>, Error> {
        let uid = self.uid()?;
        pages::all(
            |mark| {
                let (request, page) = self.page(&uid, states, mark)?;
                parse(&request, &page)
            },
            |got| Error::Nonsense {
                request: "EC2 DescribeInstances".into(),
                expected: "the instances of the cluster",
                got,
            },
        )
    }

    /// Returns a description of the request, for errors, and one page of the cluster's instances.
    fn page(
        &self,
        uid: &str,
        states: &[&str],
        mark: Option<&str>,
    ) -> Result<(String, Vec<u8>), Error> {
        let states: Vec<_> = (1..)
            .zip(states)
            .map(|(number, state)| (format!("Filter.2.Value.{number}"), *state))
            .collect();
        let mut parameters = vec![
            ("Filter.1.Name", "tag:constellation-uid"),
            ("Filter.1.Value.1", uid),
            ("Filter.2.Name", "instance-state-name"),
            ("MaxResults", "1000"),
        ];
        parameters.extend(states.iter().map(|(name, state)| (name.as_str(), *state)));
        parameters.extend(mark.map(|mark| ("NextToken", mark)));
        self.0
            .describe_instances(&parameters, MAX_PAGE)
            .map_err(|failed| failed.error)
    }
}

impl CloudMetadata for AwsClient {
    fn own_instance(&self) -> Result<Instance, Error> {
        let identity = self.0.identity()?;
        let role = self.0.tag("constellation-role")?;
        Ok(Instance {
            name: identity.instance_id.clone(),
            provider_id: provider_id(&identity.availability_zone, &identity.instance_id),
            role: Role::parse(String::from_utf8_lossy(&role).trim()),
            vpc_ip: match &identity.private_ip {
                Some(ip) => ip.parse().ok(),
                None => first_ip(&self.0.imds("meta-data/ipv6")?),
            },
        })
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        self.all(&RUNNING, parse_instances)
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        let uid = self.uid()?;
        let apis = self.0.apis()?;
        let wanted = json!({
            "ResourceTypeFilters": ["elasticloadbalancing:loadbalancer"],
            "TagFilters": [{"Key": "constellation-uid", "Values": [uid]}],
        })
        .to_string();
        let call = ApiCall {
            content_type: "application/x-amz-json-1.1",
            target: Some("ResourceGroupsTaggingAPI_20170126.GetResources"),
            ..query("tagging", "tag:GetResources", &wanted)
        };
        let request = format!("POST {}", apis.tagging.url(""));
        let arn = parse_arn(&request, &self.0.call(&apis.tagging, &call)?)?;
        let parameters = form(&[
            ("Action", "DescribeLoadBalancers"),
            ("Version", "2015-12-01"),
            ("LoadBalancerArns.member.1", &arn),
        ]);
        let permission = "elasticloadbalancing:DescribeLoadBalancers";
        let call = query("elasticloadbalancing", permission, &parameters);
        let request = format!("POST {}", apis.elb.url(""));
        parse_dns_name(&request, &self.0.call(&apis.elb, &call)?)
    }
}

impl Service for AwsClient {
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        self.all(&EXISTING, parse_aliases)
    }

    fn init_secret_hash(&self) -> Result<String, Error> {
        const NAME: &str = "constellation-init-secret-hash";
        let request = self
            .0
            .imds_request(&format!("meta-data/tags/instance/{NAME}"));
        bcrypt_hash(&request, &self.0.tag(NAME)?)
    }

    fn ranges(&self) -> Result<Vec<Range>, Error> {
        let mac = self.0.imds("meta-data/mac")?;
        let mac = name(&self.0.imds_request("meta-data/mac"), "an address", &mac)?;
        let mut ranges = vec![];
        for kind in ["vpc-ipv4-cidr-blocks", "vpc-ipv6-cidr-blocks"] {
            let path = format!("meta-data/network/interfaces/macs/{mac}/{kind}");
            match self.0.imds(&path) {
                Ok(list) => {
                    let list = String::from_utf8_lossy(&list);
                    ranges.extend(list.lines().filter_map(|line| Range::parse(line.trim())));
                }
                // a network without addresses of this kind
                Err(Error::Status { status: 404, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(ranges)
    }
}

fn provider_id(zone: &str, instance: &str) -> String {
    format!("aws:///{zone}/{instance}")
}

/// Returns the first line if it is an address.
fn first_ip(body: &[u8]) -> Option<std::net::IpAddr> {
    let text = String::from_utf8_lossy(body);
    text.lines().next()?.trim().parse().ok()
}

/// Parses a page of `DescribeInstances`: the running instances, and the token of the next page. An instance without a role or an
/// address is logged and omitted: Constellation does not list it either.
pub fn parse_instances(
    request: &str,
    body: &[u8],
) -> Result<(Vec<Instance>, Option<String>), Error> {
    parse_page(request, body, instance)
}

/// Parses a page of `DescribeInstances`: names and addresses of the instances that exist, and the token of the next page. These are
/// the addresses that AWS's controller gives to a Node: those of all attached interfaces, the public address, and the DNS names.
pub fn parse_aliases(request: &str, body: &[u8]) -> Result<(Vec<Alias>, Option<String>), Error> {
    parse_page(request, body, alias)
}

fn parse_page<T>(
    request: &str,
    body: &[u8],
    parse: impl Fn(Node<'_, '_>) -> Option<Result<T, Ignored>>,
) -> Result<(Vec<T>, Option<String>), Error> {
    let nonsense = |why: String| nonsense(request, "a page of instances", why);
    let document = document(body).map_err(|error| nonsense(error.to_string()))?;
    let root = document.root_element();
    if !root.has_tag_name("DescribeInstancesResponse") {
        let name = excerpt(root.tag_name().name().as_bytes());
        return Err(nonsense(format!("a {name:?}")));
    }
    let instances = child(root, "reservationSet")
        .into_iter()
        .flat_map(|set| children(set, "item"))
        .filter_map(|reservation| child(reservation, "instancesSet"))
        .flat_map(|set| children(set, "item"));
    let described = instances.filter_map(parse).filter_map(|parsed| {
        parsed
            .inspect_err(|why| log::warn!("metadata: {request}: ignoring {why}"))
            .ok()
    });
    let next = child(root, "nextToken").and_then(|next| next.text());
    Ok((described.collect(), next.map(str::to_owned)))
}

/// Why a running instance is not in the list.
enum Ignored {
    /// Its ID or its zone cannot be a part of a provider ID.
    Id(String, String),
    /// It has no tag with its role.
    NoRole(String),
    /// It has no address.
    Address(String, String),
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ignored::Id(id, zone) => write!(f, "an instance with ID {id:?} in the zone {zone:?}"),
            Ignored::NoRole(id) => write!(f, "{id}: it has no tag constellation-role"),
            Ignored::Address(id, text) => write!(f, "{id}: its address is {text:?}"),
        }
    }
}

/// Returns whether a described instance is in one of these states.
fn is_in(item: Node<'_, '_>, states: &[&str]) -> bool {
    states.contains(&text_at(item, &["instanceState", "name"]))
}

/// Returns a described instance; `None` if it is not running.
fn instance(item: Node<'_, '_>) -> Option<Result<Instance, Ignored>> {
    is_in(item, &RUNNING).then(|| running_instance(item))
}

fn running_instance(item: Node<'_, '_>) -> Result<Instance, Ignored> {
    let text = |path: &[&str]| text_at(item, path);
    let (id, zone) = (
        text(&["instanceId"]),
        text(&["placement", "availabilityZone"]),
    );
    if !is_name(id) || !is_name(zone) {
        let (id, zone) = (excerpt(id.as_bytes()), excerpt(zone.as_bytes()));
        return Err(Ignored::Id(id, zone));
    }
    let role = child(item, "tagSet")
        .into_iter()
        .flat_map(|tags| children(tags, "item"))
        .find(|tag| child(*tag, "key").and_then(|key| key.text()) == Some("constellation-role"))
        .and_then(|tag| child(tag, "value")?.text())
        .ok_or_else(|| Ignored::NoRole(id.to_owned()))?;
    let address = match (text(&["privateIpAddress"]), text(&["ipv6Address"])) {
        ("", ipv6) => ipv6,
        (ipv4, _) => ipv4,
    };
    let address = address
        .parse()
        .map_err(|_| Ignored::Address(id.to_owned(), excerpt(address.as_bytes())))?;
    Ok(Instance {
        name: id.to_owned(),
        provider_id: provider_id(zone, id),
        role: Role::parse(role),
        vpc_ip: Some(address),
    })
}

/// Returns names and addresses of a described instance; `None` if it no longer exists.
fn alias(item: Node<'_, '_>) -> Option<Result<Alias, Ignored>> {
    is_in(item, &EXISTING).then(|| Ok(existing_alias(item)))
}

fn existing_alias(item: Node<'_, '_>) -> Alias {
    let interfaces = child(item, "networkInterfaceSet").into_iter();
    let addresses = interfaces
        .flat_map(|set| children(set, "item"))
        .filter(|interface| text_at(*interface, &["status"]) == "in-use")
        .flat_map(|interface| {
            [
                ("privateIpAddressesSet", "privateIpAddress"),
                ("ipv6AddressesSet", "ipv6Address"),
            ]
            .into_iter()
            .filter_map(move |(set, name)| Some((child(interface, set)?, name)))
        })
        .flat_map(|(set, name)| children(set, "item").map(move |item| text_at(item, &[name])))
        .chain(["ipAddress", "ipv6Address"].map(|name| text_at(item, &[name])));
    let names = ["privateDnsName", "dnsName"].map(|name| text_at(item, &[name]));
    Alias {
        machine: text_at(item, &["instanceId"]).to_owned(),
        addresses: addresses.filter_map(|text| text.parse().ok()).collect(),
        names: (names.iter())
            .filter(|name| !name.is_empty())
            .map(|name| (*name).to_owned())
            .collect(),
    }
}

/// Parses the answer of `GetResources` to the request for the load balancer. Returns its ARN.
pub fn parse_arn(request: &str, body: &[u8]) -> Result<String, Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Resources {
        resource_tag_mapping_list: Vec<Resource>,
    }
    #[derive(Deserialize)]
    struct Resource {
        #[serde(rename = "ResourceARN")]
        arn: String,
    }
    const EXPECTED: &str = "one load balancer with the cluster's tag constellation-uid";
    let nonsense = |got: String| nonsense(request, EXPECTED, got);
    let resources: Resources = parsed(request, EXPECTED, body)?;
    match resources.resource_tag_mapping_list.as_slice() {
        [Resource { arn }] if arn.starts_with("arn:") && arn.len() <= 2048 => Ok(arn.clone()),
        [Resource { arn }] => Err(nonsense(format!("{:?}", excerpt(arn.as_bytes())))),
        other => Err(nonsense(format!("{}", other.len()))),
    }
}

/// Parses the answer of `DescribeLoadBalancers` for one load balancer. Returns its DNS name.
pub fn parse_dns_name(request: &str, body: &[u8]) -> Result<String, Error> {
    let nonsense = |got: String| nonsense(request, "a load balancer with a DNS name", got);
    let document = document(body).map_err(|error| nonsense(error.to_string()))?;
    let path = ["DescribeLoadBalancersResult", "LoadBalancers"];
    let set = path
        .iter()
        .try_fold(document.root_element(), |node, name| child(node, name));
    let mut names = set
        .into_iter()
        .flat_map(|set| children(set, "member"))
        .map(|member| child(member, "DNSName").and_then(|name| name.text()));
    match (names.next(), names.next()) {
        (Some(Some(name)), None) if name.len() <= 253 => Ok(name.to_owned()),
        _ => Err(nonsense(format!("{:?}", excerpt(body)))),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use support::mutation::mutations;

    use super::*;

    /// Returns an instance in the form of the API reference (DescribeInstances), with the elements that the parser reads and some others.
    fn item(id: &str, state: &str, address: &str, tags: &str) -> String {
        format!(
            "<item><reservationId>r-1234567890abcdef0</reservationId><ownerId>123456789012</ownerId><groupSet/><instancesSet><item>\
             <instanceId>{id}</instanceId><imageId>ami-bff32ccc</imageId>\
             <instanceState><code>16</code><name>{state}</name></instanceState>{address}<placement>\
             <availabilityZone>eu-west-1c</availabilityZone><groupName/><tenancy>default</tenancy></placement>\
             <networkInterfaceSet><item><privateIpAddress>10.9.9.9</privateIpAddress></item></networkInterfaceSet>\
             <tagSet>{tags}</tagSet></item></instancesSet></item>"
        )
    }

    fn page(items: &str, next: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<DescribeInstancesResponse \
             xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>8f7724cf-496f-496e-8fe3-example</requestId>\
             <reservationSet>{items}</reservationSet>{next}</DescribeInstancesResponse>"
        )
    }

    fn tag(key: &str, value: &str) -> String {
        format!("<item><key>{key}</key><value>{value}</value></item>")
    }

    fn ipv4(address: &str) -> String {
        format!("<privateIpAddress>{address}</privateIpAddress>")
    }

    fn parsed(xml: &str) -> (Vec<Instance>, Option<String>) {
        parse_instances("POST x", xml.as_bytes()).unwrap()
    }

    #[test]
    fn a_page_of_instances_is_read() {
        let role = |role| tag("Name", "x") + &tag("constellation-role", role);
        let items = [
            item("i-01", "running", &ipv4("10.0.0.1"), &role("control-plane")),
            item(
                "i-02",
                "running",
                "<ipv6Address>2001:db8::2</ipv6Address>",
                &role("worker"),
            ),
            item("i-03", "shutting-down", &ipv4("10.0.0.3"), &role("worker")),
            item("i-04", "terminated", "", &role("worker")),
            // this instance is omitted, with a warning
            item("i-05", "running", &ipv4("10.0.0.5"), ""),
            item("i-06", "running", &ipv4("here"), &role("worker")),
            item("../07", "running", &ipv4("10.0.0.7"), &role("worker")),
        ];
        let (machines, next) = parsed(&page(&items.concat(), "<nextToken>a+b=</nextToken>"));
        assert_eq!(next.as_deref(), Some("a+b="));
        assert_eq!(machines.len(), 2);
        assert_eq!(
            machines[0],
            Instance {
                name: "i-01".into(),
                provider_id: "aws:///eu-west-1c/i-01".into(),
                role: Role::ControlPlane,
                vpc_ip: Some("10.0.0.1".parse().unwrap()),
            }
        );
        assert_eq!(machines[1].vpc_ip, Some("2001:db8::2".parse().unwrap()));
        assert_eq!(parsed(&page("", "")), (vec![], None));
    }

    #[test]
    fn other_xml_is_no_page() {
        let whole = page("", "");
        for (body, why) in [
            ("", "root"),
            ("{}", "{}"),
            ("<html></html>", "html"),
            (&whole[..whole.len() - 1], ""),
            ("<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>", "DTD"),
            (&"<a>".repeat(20_000), ""),
        ] {
            let error = parse_instances("POST x", body.as_bytes()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("a page of instances"), "{error}");
            assert!(error.contains(why) && error.len() < 1000, "{error}");
        }
    }

    #[test]
    fn a_page_with_an_element_in_itself_200_000_times_ends() {
        let deep = "<item>".repeat(200_000) + &"</item>".repeat(200_000);
        let _ = parse_instances("POST x", page(&deep, "").as_bytes());
    }

    #[test]
    fn the_load_balancer_is_the_only_one() {
        let one = r#"{"ResourceARN":"arn:aws:elasticloadbalancing:x","Tags":[]}"#;
        let list =
            |items: &str| format!(r#"{{"PaginationToken":"","ResourceTagMappingList":[{items}]}}"#);
        let found = parse_arn("POST x", list(one).as_bytes()).unwrap();
        assert_eq!(found, "arn:aws:elasticloadbalancing:x");
        for (items, got) in [
            (String::new(), "got 0"),
            (format!("{one},{one}"), "got 2"),
            (r#"{"ResourceARN":"x"}"#.into(), "got \"x\""),
        ] {
            let error = parse_arn("POST x", list(&items).as_bytes()).unwrap_err();
            assert!(error.to_string().ends_with(got), "{error}");
        }
        let members = |members: &str| {
            format!(
                "<DescribeLoadBalancersResponse xmlns=\"http://elasticloadbalancing.amazonaws.com/doc/2015-12-01/\">\
                 <DescribeLoadBalancersResult><LoadBalancers>{members}</LoadBalancers></DescribeLoadBalancersResult>\
                 </DescribeLoadBalancersResponse>"
            )
        };
        let one = "<member><Scheme>internal</Scheme><DNSName>a-1.elb.example</DNSName></member>";
        let name = parse_dns_name("POST x", members(one).as_bytes()).unwrap();
        assert_eq!(name, "a-1.elb.example");
        for other in [String::new(), one.repeat(2), "<member/>".into()] {
            assert!(parse_dns_name("POST x", members(&other).as_bytes()).is_err());
        }
    }

    #[test]
    fn mutated_answers_are_read_or_refused() {
        let mut items = String::new();
        for number in 0..3 {
            let tags = tag("constellation-role", "worker");
            let address = ipv4(&format!("10.0.0.{number}"));
            write!(
                items,
                "{}",
                item(&format!("i-0{number}"), "running", &address, &tags)
            )
            .unwrap();
        }
        let (mut good, mut bad) = (0, 0);
        for body in mutations(page(&items, "<nextToken>x</nextToken>").as_bytes(), 10_000) {
            match parse_instances("POST x", &body) {
                Ok((machines, _)) => {
                    good += 1;
                    assert!(machines.iter().all(|machine| is_name(&machine.name)));
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().len() < 4096);
                }
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        let arn = br#"{"ResourceTagMappingList":[{"ResourceARN":"arn:aws:x"}]}"#;
        for body in mutations(arn, 5000) {
            let _ = parse_arn("POST x", &body);
        }
    }
}
