//! Azure: the instance metadata service with managed identities, and Azure Resource Manager in the form of its REST reference.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use base::machines::{Instance, Role};
use cloud_api::Service;
use serde_json::{Value, json};
use support::ROOT;

use super::server::{self, Answer, Request};
use super::{HASH, client, error};

const GROUP: &str = "/subscriptions/8d10da13/resourceGroups/constell-rg";
const SETS: &str = "virtualMachineScaleSets";
/// Machines on a page.
const SIZE: usize = 100;

/// A resource group with a cluster of one control plane and some workers, each in a scale set.
#[derive(Default)]
struct Group {
    workers: usize,
    url: OnceLock<String>,
    token: AtomicUsize,
    tokens: AtomicUsize,
    /// Whether the machine is a worker and has the role of one, or the identity that must be named.
    is_worker: AtomicBool,
    has_many_identities: AtomicBool,
    is_private: AtomicBool,
    is_foreign_link: AtomicBool,
    has_long_user_data: AtomicBool,
    /// Whether the role lacks the permission to list the public addresses of machines.
    is_old_role: AtomicBool,
}

fn start(workers: usize, more: &str) -> (Arc<dyn Service>, Arc<Group>) {
    let group = Arc::new(Group {
        workers,
        ..Group::default()
    });
    let (of_imds, of_api) = (group.clone(), group.clone());
    let imds = server::start(move |request| of_imds.imds(request));
    let api = server::start(move |request| of_api.api(request));
    group.url.set(api.clone()).unwrap();
    (client("azure", &format!("{imds},arm={api}{more}")), group)
}

fn id(set: &str, number: usize) -> String {
    format!("{GROUP}/providers/Microsoft.Compute/{SETS}/{set}/virtualMachines/{number}")
}

impl Group {
    fn role(&self) -> &'static str {
        if self.is_worker.load(Ordering::SeqCst) {
            "worker"
        } else {
            "control-plane"
        }
    }

    fn imds(&self, request: &Request) -> Answer {
        let is_asked = request.field("metadata") == Some("true");
        if !is_asked || request.field("x-forwarded-for").is_some() {
            return Answer::json(
                400,
                json!({"error": "Bad request. Required metadata header not specified"}),
            );
        }
        match (&*request.path, request.parameter("api-version")) {
            ("/metadata/instance", Some("2021-02-01")) => {
                let role = self.role();
                let tags = [
                    ("constellation-uid", "constell1"),
                    ("constellation-role", role),
                ];
                let mut tags: Vec<_> = tags
                    .map(|(name, value)| json!({"name": name, "value": value}))
                    .into();
                tags.push(json!({"name": "constellation-init-secret-hash", "value": HASH}));
                let length = if self.has_long_user_data.load(Ordering::SeqCst) {
                    5 << 20
                } else {
                    10
                };
                Answer::json(
                    200,
                    json!({
                        "compute": {
                            "azEnvironment": "AzurePublicCloud",
                            "osProfile": {"computerName": format!("{role}000000")},
                            "resourceGroupName": "constell-rg",
                            // the API writes the group's name with other upper and lower case letters
                            "resourceId": id(role, 0).replace("constell-rg", "CONSTELL-RG"),
                            "subscriptionId": "8d10da13",
                            "tagsList": tags,
                            "userData": "x".repeat(length),
                        },
                        "network": {"interface": [{
                            "ipv4": {"ipAddress": [{"privateIpAddress": address(role, 0), "publicIpAddress": ""}]},
                            "ipv6": {"ipAddress": []},
                        }]},
                    }),
                )
            }
            ("/metadata/identity/oauth2/token", Some("2018-02-01")) => {
                let resource = request.parameter("resource");
                assert_eq!(resource, Some("https://management.azure.com/"));
                let named = request.parameter("client_id");
                if self.has_many_identities.load(Ordering::SeqCst) && named != Some("1234-abcd") {
                    let why =
                        "Multiple user assigned identities exist, please specify the clientId";
                    return Answer::json(
                        400,
                        json!({"error": "invalid_request", "error_description": why}),
                    );
                }
                self.tokens.fetch_add(1, Ordering::SeqCst);
                let token = format!("eyJ0.{}", self.token.load(Ordering::SeqCst));
                Answer::json(
                    200,
                    json!({"access_token": token, "expires_in": "86399", "token_type": "Bearer"}),
                )
            }
            _ => Answer::json(400, json!({"error": "Bad request: api-version"})),
        }
    }

    fn api(&self, request: &Request) -> Answer {
        let valid = format!("Bearer eyJ0.{}", self.token.load(Ordering::SeqCst));
        if request.field("authorization") != Some(&valid) {
            return problem(
                401,
                "ExpiredAuthenticationToken",
                "The access token expiry is in the past.",
            );
        }
        let path = request.path.strip_prefix(GROUP).unwrap_or_default();
        let parts: Vec<_> = path.split('/').skip(2).collect();
        let (action, version) = match parts[..] {
            ["Microsoft.Compute", SETS] => ("", "2024-07-01"),
            ["Microsoft.Compute", SETS, _, "virtualMachines"] => ("/virtualMachines", "2024-07-01"),
            ["Microsoft.Compute", SETS, _, "networkInterfaces"] => {
                ("/networkInterfaces", "2018-10-01")
            }
            ["Microsoft.Compute", SETS, _, "publicipaddresses"] => {
                ("/publicIPAddresses", "2018-10-01")
            }
            ["Microsoft.Network", "loadBalancers"] => ("/", "2024-05-01"),
            ["Microsoft.Network", "publicIPAddresses", _] => ("/", "2024-05-01"),
            _ => return problem(404, "ResourceNotFound", path),
        };
        if request.parameter("api-version") != Some(version) {
            return problem(400, "InvalidApiVersionParameter", "No.");
        }
        let action = match parts[0] {
            "Microsoft.Compute" => format!("Microsoft.Compute/{SETS}{action}/read"),
            _ => format!("Microsoft.Network/{}/read", parts[1]),
        };
        let role = fs::read_to_string(format!("{ROOT}/docs/clouds/azure-{}.json", self.role()));
        let role: Value = serde_json::from_str(&role.unwrap()).unwrap();
        let is_old =
            self.is_old_role.load(Ordering::SeqCst) && action.ends_with("/publicIPAddresses/read");
        if is_old || !role["Actions"].as_array().unwrap().contains(&json!(action)) {
            let why =
                format!("The client does not have authorization to perform action '{action}'");
            return problem(403, "AuthorizationFailed", &why);
        }
        match parts[..] {
            [_, SETS] => list(
                [
                    ("control-plane", "constell1"),
                    ("worker", "constell1"),
                    ("other", "x"),
                ]
                .map(|(name, uid)| json!({"name": name, "tags": {"constellation-uid": uid}}))
                .into(),
            ),
            [_, _, set, "publicipaddresses"] => list(vec![json!({
                "id": format!("{}/public", id(set, 0)).to_lowercase(),
                "properties": {"ipAddress": public(set)},
            })]),
            [_, _, set, kind] => self.page(request, set, kind == "virtualMachines"),
            [_, "loadBalancers"] => list(vec![self.balancer()]),
            _ => Answer::json(200, json!({"properties": {"ipAddress": "203.0.113.8"}})),
        }
    }

    fn page(&self, request: &Request, set: &str, is_of_machines: bool) -> Answer {
        let all = match set {
            "control-plane" => 1,
            "worker" => self.workers,
            _ => panic!("the scale set of another cluster"),
        };
        let from = request
            .parameter("$skiptoken")
            .map_or(0, |mark| mark.parse().unwrap());
        let to = (from + SIZE).min(all);
        let machine = |number: usize| {
            json!({
                "id": id(set, number),
                "instanceId": number.to_string(),
                "tags": {"constellation-uid": "constell1", "constellation-role": set},
                "properties": {
                    "osProfile": {"computerName": format!("{set}{number:06}")},
                    "provisioningState": "Succeeded",
                },
            })
        };
        let interface = |number: usize| {
            json!({"properties": {
                "primary": true,
                "virtualMachine": {"id": id(set, number)},
                "ipConfigurations": [{"properties": {
                    "primary": true,
                    "privateIPAddress": address(set, number),
                    // the resource of each machine's public address; that of only one has an address
                    "publicIPAddress": {"id": format!("{}/public", id(set, number))},
                    "subnet": {"id": format!("{GROUP}/providers/Microsoft.Network/virtualNetworks/net/subnets/node")},
                }}],
            }})
        };
        let value: Vec<_> = (from..to)
            .map(|number| {
                if is_of_machines {
                    machine(number)
                } else {
                    interface(number)
                }
            })
            .collect();
        let mut page = json!({"value": value});
        if to < all {
            let version = request.parameter("api-version").unwrap();
            let base = if self.is_foreign_link.load(Ordering::SeqCst) {
                "http://127.0.0.1:1"
            } else {
                self.url.get().unwrap()
            };
            let path = &request.path;
            page["nextLink"] = json!(format!(
                "{base}{path}?api-version={version}&$skiptoken={to}"
            ));
        }
        Answer::json(200, page)
    }

    fn balancer(&self) -> Value {
        let frontend = if self.is_private.load(Ordering::SeqCst) {
            json!({"privateIPAddress": "10.9.0.200"})
        } else {
            json!({"publicIPAddress": {"id": format!("{GROUP}/providers/Microsoft.Network/publicIPAddresses/lb")}})
        };
        json!({
            "tags": {"constellation-uid": "constell1"},
            "properties": {"frontendIPConfigurations": [{"properties": frontend}]},
        })
    }
}

fn address(set: &str, number: usize) -> String {
    let from = if set == "worker" {
        0x0a0a_0001
    } else {
        0x0a09_0004
    };
    std::net::Ipv4Addr::from_bits(from + number as u32).to_string()
}

fn public(set: &str) -> &'static str {
    match set {
        "worker" => "203.0.113.10",
        _ => "203.0.113.11",
    }
}

fn list(value: Vec<Value>) -> Answer {
    Answer::json(200, json!({"value": value}))
}

fn problem(status: u16, code: &str, message: &str) -> Answer {
    Answer::json(status, json!({"error": {"code": code, "message": message}}))
}

#[test]
fn a_cluster_is_found_in_the_scale_sets_of_its_resource_group() {
    let (metadata, group) = start(250, "");
    let own = metadata.own_instance().unwrap();
    assert_eq!(
        own,
        Instance {
            name: "control-plane000000".into(),
            provider_id: format!(
                "azure://{}",
                id("control-plane", 0).replace("constell-rg", "CONSTELL-RG")
            ),
            role: Role::ControlPlane,
            vpc_ip: Some("10.9.0.4".parse().unwrap()),
        }
    );
    assert_eq!(metadata.init_secret_hash().unwrap(), HASH);
    let peers = metadata.peers().unwrap();
    assert_eq!(peers.len(), 251);
    assert_eq!(peers[250].name, "worker000249");
    assert_eq!(
        peers[250].provider_id,
        format!("azure://{}", id("worker", 249))
    );
    assert_eq!(peers[250].vpc_ip, Some("10.10.0.250".parse().unwrap()));
    assert_eq!(metadata.load_balancer_endpoint().unwrap(), "203.0.113.8");
    group.is_private.store(true, Ordering::SeqCst);
    assert_eq!(metadata.load_balancer_endpoint().unwrap(), "10.9.0.200");
    assert_eq!(group.tokens.load(Ordering::SeqCst), 1);
    // the token expires
    group.token.fetch_add(1, Ordering::SeqCst);
    assert_eq!(metadata.peers().unwrap().len(), 251);
    assert_eq!(group.tokens.load(Ordering::SeqCst), 2);
}

#[test]
fn a_machine_has_the_address_in_its_network_and_its_public_one() {
    let (metadata, group) = start(2, "");
    let addresses = || {
        let mut aliases = metadata.aliases().unwrap();
        aliases.sort_by(|one, other| one.machine.cmp(&other.machine));
        let texts = aliases.into_iter().map(|alias| {
            let addresses: Vec<_> = alias.addresses.iter().map(ToString::to_string).collect();
            format!("{} {}", alias.machine, addresses.join(" "))
        });
        texts.collect::<Vec<_>>()
    };
    let all = [
        "control-plane000000 10.9.0.4 203.0.113.11",
        "worker000000 10.10.0.1 203.0.113.10",
        "worker000001 10.10.0.2",
    ];
    assert_eq!(addresses(), all);
    // a role from before the permission
    group.is_old_role.store(true, Ordering::SeqCst);
    let private = all.map(|text| text.split(" 203").next().unwrap());
    assert_eq!(addresses(), private);
}

#[test]
fn a_next_page_elsewhere_does_not_get_the_token() {
    let (metadata, group) = start(250, "");
    group.is_foreign_link.store(true, Ordering::SeqCst);
    let error = error(metadata.peers());
    assert!(
        error.contains("a next page at \"http://127.0.0.1:1/"),
        "{error}"
    );
}

#[test]
fn one_of_several_identities_must_be_named() {
    let (metadata, group) = start(1, "");
    group.has_many_identities.store(true, Ordering::SeqCst);
    let error = error(metadata.peers());
    assert!(
        error.contains("identity=CLIENT_ID") && error.contains("Multiple user"),
        "{error}"
    );
    let (metadata, group) = start(1, ",identity=1234-abcd");
    group.has_many_identities.store(true, Ordering::SeqCst);
    assert_eq!(metadata.peers().unwrap().len(), 2);
}

#[test]
fn a_worker_needs_no_list_of_machines() {
    let (metadata, group) = start(1, "");
    group.is_worker.store(true, Ordering::SeqCst);
    assert_eq!(metadata.own_instance().unwrap().role, Role::Worker);
    metadata.load_balancer_endpoint().unwrap();
    let error = error(metadata.peers());
    for part in [
        "does not have authorization",
        "docs/clouds.md",
        "status 403",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_document_of_five_mebibytes_is_refused() {
    let (metadata, group) = start(1, "");
    group.has_long_user_data.store(true, Ordering::SeqCst);
    let error = error(metadata.own_instance());
    assert!(
        error.contains("metadata/instance") && error.len() < 500,
        "{error}"
    );
}
