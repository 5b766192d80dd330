//! OpenStack: the metadata service of Nova, and Keystone v3, Nova, Neutron and Octavia in the form of their API references.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use base::machines::{Instance, Role};
use base::time;
use cloud_api::Service;
use serde_json::{Value, json};
use support::ROOT;

use super::server::{self, Answer, Request};
use super::{HASH, client, error};

const TAG: &str = "constellation-uid-constell1";

/// A project with a cluster of one control plane and some workers.
struct Project {
    workers: usize,
    url: OnceLock<String>,
    user_data: Mutex<String>,
    token: AtomicUsize,
    tokens: AtomicUsize,
    may_list: AtomicBool,
}

fn start(cloud: &str, workers: usize) -> (Arc<dyn Service>, Arc<Project>) {
    let project = Arc::new(Project {
        workers,
        url: OnceLock::new(),
        user_data: Mutex::default(),
        token: AtomicUsize::new(1),
        tokens: AtomicUsize::new(0),
        may_list: AtomicBool::new(true),
    });
    let (of_metadata, of_apis) = (project.clone(), project.clone());
    let metadata = server::start(move |request| of_metadata.metadata(request));
    let url = server::start(move |request| of_apis.apis(request));
    project.url.set(url.clone()).unwrap();
    project.set(json!({
        "openstack-auth-url": format!("{url}/identity/v3"),
        "openstack-user-domain-name": "Default",
        "openstack-region-name": "RegionOne",
        "openstack-username": "node",
        "openstack-password": "secret",
        "openstack-load-balancer-endpoint": "203.0.113.9",
    }));
    (client(cloud, &metadata), project)
}

impl Project {
    fn set(&self, user_data: Value) {
        *self.user_data.lock().unwrap() = user_data.to_string();
    }

    fn metadata(&self, request: &Request) -> Answer {
        match &*request.path {
            "/openstack/2018-08-27/meta_data.json" => Answer::json(
                200,
                json!({
                    "uuid": "d8e02d56",
                    "name": "control-plane-0",
                    "project_id": "p1",
                    "meta": {
                        "constellation-uid": "constell1",
                        "constellation-role": "control-plane",
                        "constellation-init-secret-hash": HASH,
                    },
                }),
            ),
            "/openstack/2018-08-27/user_data" => {
                let data = self.user_data.lock().unwrap().clone();
                Answer::new(200, "application/octet-stream", data)
            }
            "/1.0/meta-data/local-ipv4" => Answer::text(200, "192.168.178.2"),
            _ => Answer::new(404, "text/html", "<h1>404 Not Found</h1>"),
        }
    }

    fn apis(&self, request: &Request) -> Answer {
        if request.path == "/identity/v3/auth/tokens" {
            return self.authenticate(request);
        }
        let valid = format!("gAAAA-{}", self.token.load(Ordering::SeqCst));
        if request.field("x-auth-token") != Some(&valid) {
            return Answer::json(
                401,
                json!({"error": {"code": 401, "message": "The request you have made requires authentication."}}),
            );
        }
        if !is_permitted(request) {
            return Answer::json(
                403,
                json!({"error": {"code": 403, "message": "No access rule permits this request."}}),
            );
        }
        if request.parameter("tags") != Some(TAG) {
            return Answer::json(400, json!({"badRequest": {"code": 400, "message": "tags"}}));
        }
        match &*request.path {
            "/compute/v2.1/servers/detail" => self.servers(request),
            "/network/v2.0/networks" => {
                Answer::json(200, json!({"networks": [{"name": "constell-net"}]}))
            }
            "/network/v2.0/subnets" => Answer::json(
                200,
                json!({"subnets": [
                    {"name": "lb-net", "cidr": "192.168.177.0/24"},
                    {"name": "constell-net", "cidr": "192.168.0.0/16"},
                ]}),
            ),
            "/load-balancer/v2.0/lbaas/loadbalancers" => Answer::json(
                200,
                json!({"loadbalancers": [{"id": "l", "vip_address": "192.168.177.9"}]}),
            ),
            _ => Answer::json(
                404,
                json!({"itemNotFound": {"code": 404, "message": request.path}}),
            ),
        }
    }

    fn authenticate(&self, request: &Request) -> Answer {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let by_password = json!({"auth": {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"name": "node", "domain": {"name": "Default"}, "password": "secret"}},
            },
            "scope": {"project": {"id": "p1"}},
        }});
        let by_credential = json!({"auth": {"identity": {
            "methods": ["application_credential"],
            "application_credential": {"id": "ac1", "secret": "acsecret"},
        }}});
        let is_json = request.field("content-type") == Some("application/json");
        if request.method != "POST" || !is_json || (body != by_password && body != by_credential) {
            return Answer::json(
                401,
                json!({"error": {"code": 401, "message": "The request you have made requires authentication."}}),
            );
        }
        self.tokens.fetch_add(1, Ordering::SeqCst);
        let url = self.url.get().unwrap();
        let endpoints = |path: &str| {
            json!([
                {"interface": "internal", "region": "RegionOne", "region_id": "RegionOne", "url": "http://10.0.0.1"},
                {"interface": "public", "region": "RegionOne", "region_id": "RegionOne", "url": format!("{url}{path}")},
                {"interface": "public", "region": "RegionTwo", "region_id": "RegionTwo", "url": "https://two.example"},
            ])
        };
        let end = SystemTime::now() + Duration::from_secs(3600);
        let token = format!("gAAAA-{}", self.token.load(Ordering::SeqCst));
        Answer::json(
            201,
            json!({"token": {"expires_at": time::micros(end), "catalog": [
                {"type": "compute", "endpoints": endpoints("/compute/v2.1")},
                {"type": "network", "endpoints": endpoints("/network")},
                {"type": "load-balancer", "endpoints": endpoints("/load-balancer")},
            ]}}),
        )
        .with("X-Subject-Token", token)
    }

    fn servers(&self, request: &Request) -> Answer {
        if !self.may_list.load(Ordering::SeqCst) {
            let why = "Policy doesn't allow os_compute_api:servers:detail to be performed.";
            return Answer::json(403, json!({"forbidden": {"code": 403, "message": why}}));
        }
        // before 2.26 a server has no tags
        assert_eq!(request.field("x-openstack-nova-api-version"), Some("2.42"));
        // a cloud may return fewer entries than requested
        let size = request
            .parameter("limit")
            .unwrap()
            .parse::<usize>()
            .unwrap()
            .min(500);
        let from = request
            .parameter("marker")
            .map_or(0, |mark| mark[1..].parse::<usize>().unwrap() + 1);
        let to = (from + size).min(self.workers + 1);
        let servers: Vec<_> = (from..to)
            .map(|number| {
                let (id, name, role) = match number {
                    0 => ("d8e02d56".into(), "control-plane-0".into(), "control-plane"),
                    _ => (format!("s{number}"), format!("worker-{number}"), "worker"),
                };
                let address = std::net::Ipv4Addr::from_bits(0xc0a8_b202 + number as u32);
                json!({
                    "id": id,
                    "name": name,
                    "status": "ACTIVE",
                    "OS-EXT-STS:task_state": null,
                    "tags": [format!("constellation-role-{role}"), TAG],
                    "addresses": {"constell-net": [
                        {"addr": "203.0.113.77", "version": 4, "OS-EXT-IPS:type": "floating"},
                        {"addr": address.to_string(), "version": 4, "OS-EXT-IPS:type": "fixed"},
                    ]},
                })
            })
            .collect();
        let mut page = json!({"servers": servers});
        if to <= self.workers {
            // as behind a proxy at which TLS ends
            page["servers_links"] =
                json!([{"rel": "next", "href": "http://nova.internal/servers/detail"}]);
        }
        Answer::json(200, page)
    }
}

/// Returns whether the access rules of the docs permit a request.
fn is_permitted(request: &Request) -> bool {
    let rules = fs::read_to_string(format!("{ROOT}/docs/clouds/openstack-control-plane.json"));
    let rules: Value = serde_json::from_str(&rules.unwrap()).unwrap();
    let (service, path) = request.path[1..].split_once('/').unwrap();
    let needed = json!({"service": service, "method": request.method, "path": format!("/{path}")});
    rules.as_array().unwrap().contains(&needed)
}

#[test]
fn a_cluster_is_found_by_its_tags() {
    for cloud in ["openstack", "stackit"] {
        let (metadata, project) = start(cloud, 1200);
        let own = metadata.own_instance().unwrap();
        assert_eq!(
            own,
            Instance {
                name: "control-plane-0".into(),
                provider_id: "openstack:///d8e02d56".into(),
                role: Role::ControlPlane,
                vpc_ip: Some("192.168.178.2".parse().unwrap()),
            }
        );
        assert_eq!(metadata.init_secret_hash().unwrap(), HASH);
        let peers = metadata.peers().unwrap();
        assert_eq!(peers.len(), 1201);
        assert!(peers.contains(&own));
        assert_eq!(peers[1200].vpc_ip, Some("192.168.182.178".parse().unwrap()));
        assert_eq!(metadata.load_balancer_endpoint().unwrap(), "203.0.113.9");
        assert_eq!(project.tokens.load(Ordering::SeqCst), 1);
        // the token expires
        project.token.fetch_add(1, Ordering::SeqCst);
        assert_eq!(metadata.peers().unwrap().len(), 1201);
        assert_eq!(project.tokens.load(Ordering::SeqCst), 2);
    }
}

#[test]
fn an_application_credential_needs_no_password() {
    let (metadata, project) = start("openstack", 1);
    let url = project.url.get().unwrap();
    project.set(json!({
        "openstack-auth-url": format!("{url}/identity"),
        "openstack-region-name": "RegionOne",
        "openstack-application-credential-id": "ac1",
        "openstack-application-credential-secret": "acsecret",
    }));
    assert_eq!(metadata.peers().unwrap().len(), 2);
    // without an endpoint in the user data, Octavia returns it
    assert_eq!(metadata.load_balancer_endpoint().unwrap(), "192.168.177.9");
}

#[test]
fn wrong_credentials_and_missing_permissions_are_named() {
    let (metadata, project) = start("openstack", 1);
    project.may_list.store(false, Ordering::SeqCst);
    let problem = error(metadata.peers());
    assert!(
        problem.contains("Policy doesn't allow") && problem.contains("docs/clouds.md"),
        "{problem}"
    );
    let url = project.url.get().unwrap().clone();
    let user_data = |password: &str, region: &str| {
        json!({
            "openstack-auth-url": format!("{url}/identity/v3"),
            "openstack-user-domain-name": "Default",
            "openstack-region-name": region,
            "openstack-username": "node",
            "openstack-password": password,
        })
    };
    let (metadata, other) = start("openstack", 1);
    other.set(user_data("wrong-password", "RegionOne"));
    let problem = error(metadata.peers());
    assert!(
        problem.contains("status 401") && problem.contains("must be valid"),
        "{problem}"
    );
    assert!(!problem.contains("wrong-password"), "{problem}");
    other.set(user_data("secret", "RegionThree"));
    let problem = error(metadata.peers());
    assert!(problem.contains("openstack-region-name"), "{problem}");
    other.set(json!({"openstack-auth-url": "http://keystone.example/v3", "openstack-application-credential-id": "a", "openstack-application-credential-secret": "b"}));
    let (metadata, third) = start("openstack", 1);
    third.set(serde_json::from_str(&other.user_data.lock().unwrap()).unwrap());
    let problem = error(metadata.peers());
    assert!(problem.contains("need https"), "{problem}");
    third.set(json!({}));
    let problem = error(metadata.peers());
    assert!(problem.contains("no openstack-auth-url"), "{problem}");
    *third.user_data.lock().unwrap() = "x".repeat(5 << 20);
    assert!(error(metadata.load_balancer_endpoint()).len() < 500);
}
