//! Google Cloud: the metadata server of Compute Engine ("About VM metadata"), and the Compute Engine API in the form of its reference.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use base::machines::{Instance, Role};
use cloud_api::Service;
use serde_json::{Map, Value, json};
use support::ROOT;

use super::server::{self, Answer, Request};
use super::{HASH, client, error};

const NETWORK: &str = "https://www.googleapis.com/compute/v1/projects/p-1/global/networks/net";
/// A project with a cluster of one control plane and some workers.
struct Project {
    workers: usize,
    /// The number of the valid token, and how many were given.
    token: AtomicUsize,
    tokens: AtomicUsize,
    lists: AtomicUsize,
    /// Whether the service account has the role of workers.
    is_worker: AtomicBool,
    is_global: AtomicBool,
    pages_repeat: AtomicBool,
}

fn start(workers: usize) -> (Arc<dyn Service>, Arc<Project>) {
    let project = Arc::new(Project {
        workers,
        token: AtomicUsize::new(1),
        tokens: AtomicUsize::new(0),
        lists: AtomicUsize::new(0),
        is_worker: AtomicBool::new(false),
        is_global: AtomicBool::new(true),
        pages_repeat: AtomicBool::new(false),
    });
    let (of_metadata, of_api) = (project.clone(), project.clone());
    let metadata = server::start(move |request| of_metadata.metadata(request));
    let api = server::start(move |request| of_api.api(request));
    (client("gcp", &format!("{metadata},compute={api}")), project)
}

impl Project {
    fn metadata(&self, request: &Request) -> Answer {
        let flavored = |status, body: String| {
            Answer::new(status, "application/text", body)
                .with("Metadata-Flavor", "Google")
                .with("Server", "Metadata Server for VM")
        };
        // the server refuses requests that a proxy forwarded, and those without the field
        let has_flavor = request.field("metadata-flavor") == Some("Google");
        if !has_flavor || request.field("x-forwarded-for").is_some() {
            return Answer::new(403, "text/html", "Missing Metadata-Flavor:Google header.");
        }
        let path = request.path.strip_prefix("/computeMetadata/v1/");
        match path.unwrap_or_default() {
            "project/project-id" => flavored(200, "p-1".into()),
            "instance/zone" => flavored(200, "projects/123456/zones/europe-west3-b".into()),
            "instance/name" => flavored(200, "control-plane-0".into()),
            "instance/attributes/constellation-init-secret-hash" => flavored(200, HASH.into()),
            "instance/service-accounts/default/token" => {
                self.tokens.fetch_add(1, Ordering::SeqCst);
                let token = format!("ya29.{}", self.token.load(Ordering::SeqCst));
                let body =
                    json!({"access_token": token, "expires_in": 3599, "token_type": "Bearer"});
                flavored(200, body.to_string())
            }
            _ => flavored(404, "<!DOCTYPE html>".into()),
        }
    }

    fn api(&self, request: &Request) -> Answer {
        let valid = format!("Bearer ya29.{}", self.token.load(Ordering::SeqCst));
        if request.field("authorization") != Some(&valid) {
            return problem(401, "Request had invalid authentication credentials.");
        }
        let Some(path) = request.path.strip_prefix("/compute/v1/projects/p-1") else {
            return problem(404, "Not Found");
        };
        let role = if self.is_worker.load(Ordering::SeqCst) {
            "worker"
        } else {
            "control-plane"
        };
        let permission = match path.split('/').skip(1).collect::<Vec<_>>()[..] {
            ["zones", _, "instances", _] => "compute.instances.get",
            ["aggregated", "instances"] => "compute.instances.list",
            ["global", "forwardingRules"] => "compute.globalForwardingRules.list",
            ["regions", _, "forwardingRules"] => "compute.forwardingRules.list",
            _ => return problem(404, "Not Found"),
        };
        let role = fs::read_to_string(format!("{ROOT}/docs/clouds/gcp-{role}.yaml")).unwrap();
        let is_permitted = role.lines().any(|line| line == format!("  - {permission}"));
        if !is_permitted {
            let message = format!("Required '{permission}' permission for 'projects/p-1'");
            return problem(403, &message);
        }
        let filter = request.parameter("filter").unwrap_or_default();
        match path {
            "/zones/europe-west3-b/instances/control-plane-0" => {
                Answer::json(200, machine("control-plane-0", "control-plane", 0))
            }
            "/aggregated/instances" if filter == "labels.constellation-uid:constell1" => {
                self.machines(request)
            }
            "/global/forwardingRules" | "/regions/europe-west3/forwardingRules"
                if filter
                    == "(labels.constellation-uid:constell1) AND (labels.constellation-use:kubernetes)" =>
            {
                let is_global = path.starts_with("/global");
                if is_global == self.is_global.load(Ordering::SeqCst) {
                    Answer::json(
                        200,
                        rules(if is_global {
                            "203.0.113.7"
                        } else {
                            "192.168.178.9"
                        }),
                    )
                } else {
                    Answer::json(200, json!({"kind": "compute#forwardingRuleList"}))
                }
            }
            _ => problem(400, &format!("Invalid request {path} {filter}")),
        }
    }

    fn machines(&self, request: &Request) -> Answer {
        self.lists.fetch_add(1, Ordering::SeqCst);
        let size: usize = request.parameter("maxResults").unwrap().parse().unwrap();
        assert!((1..=500).contains(&size));
        let from: usize = request
            .parameter("pageToken")
            .map_or(0, |mark| mark[2..].parse().unwrap());
        let to = (from + size).min(self.workers);
        let mut zones = Map::new();
        for (number, zone) in ["a", "b", "c"].iter().enumerate() {
            let of_zone = (from..to).filter(|worker| worker % 3 == number);
            let mut instances: Vec<_> = of_zone
                .map(|worker| machine(&format!("worker-{worker}"), "worker", 1 + worker))
                .collect();
            if from == 0 && *zone == "b" {
                instances.push(machine("control-plane-0", "control-plane", 0));
            }
            zones.insert(
                format!("zones/europe-west3-{zone}"),
                json!({"instances": instances}),
            );
        }
        zones.insert(
            "zones/us-east1-b".into(),
            json!({"warning": {"code": "NO_RESULTS_ON_PAGE"}}),
        );
        let mut page = json!({"kind": "compute#instanceAggregatedList", "items": zones});
        if self.pages_repeat.load(Ordering::SeqCst) {
            page["nextPageToken"] = json!("==0");
        } else if to < self.workers {
            page["nextPageToken"] = json!(format!("=={to}"));
        }
        Answer::json(200, page)
    }
}

fn machine(name: &str, role: &str, number: usize) -> Value {
    let address = std::net::Ipv4Addr::from_bits(0x0a00_0002 + number as u32);
    json!({
        "kind": "compute#instance",
        "name": name,
        "status": "RUNNING",
        "labels": {"constellation-uid": "constell1", "constellation-role": role},
        "networkInterfaces": [{"name": "nic0", "network": NETWORK, "networkIP": address.to_string()}],
    })
}

fn rules(address: &str) -> Value {
    json!({"kind": "compute#forwardingRuleList", "items": [{
        "IPAddress": address,
        "IPProtocol": "TCP",
        "portRange": "6443-6443",
        "labels": {"constellation-uid": "constell1", "constellation-use": "kubernetes"},
    }]})
}

fn problem(status: u16, message: &str) -> Answer {
    Answer::json(
        status,
        json!({"error": {"code": status, "message": message}}),
    )
}

#[test]
fn a_cluster_is_found_in_the_zones_of_its_region() {
    let (metadata, project) = start(4);
    let own = metadata.own_instance().unwrap();
    assert_eq!(
        own,
        Instance {
            name: "control-plane-0".into(),
            provider_id: "gce://p-1/europe-west3-b/control-plane-0".into(),
            role: Role::ControlPlane,
            vpc_ip: Some("10.0.0.2".parse().unwrap()),
        }
    );
    assert_eq!(metadata.init_secret_hash().unwrap(), HASH);
    let peers = metadata.peers().unwrap();
    assert_eq!(peers.len(), 5);
    assert!(peers.contains(&own));
    let last = peers.iter().find(|peer| peer.name == "worker-2").unwrap();
    assert_eq!(last.provider_id, "gce://p-1/europe-west3-c/worker-2");
    // a global one, as in Constellation; otherwise one of the region
    assert_eq!(metadata.load_balancer_endpoint().unwrap(), "203.0.113.7");
    project.is_global.store(false, Ordering::SeqCst);
    assert_eq!(metadata.load_balancer_endpoint().unwrap(), "192.168.178.9");
    assert_eq!(project.tokens.load(Ordering::SeqCst), 1);
}

#[test]
fn twenty_thousand_machines_are_listed_and_endless_pages_are_not() {
    let (metadata, project) = start(20_000);
    assert_eq!(metadata.peers().unwrap().len(), 20_001);
    assert_eq!(project.lists.load(Ordering::SeqCst), 40);
    project.pages_repeat.store(true, Ordering::SeqCst);
    let error = error(metadata.peers());
    assert!(error.contains("pages repeat"), "{error}");
}

#[test]
fn a_token_that_ended_is_renewed_once() {
    let (metadata, project) = start(1);
    metadata.peers().unwrap();
    project.token.fetch_add(1, Ordering::SeqCst);
    metadata.peers().unwrap();
    assert_eq!(project.tokens.load(Ordering::SeqCst), 2);
}

#[test]
fn a_worker_needs_no_list_of_machines() {
    let (metadata, project) = start(1);
    project.is_worker.store(true, Ordering::SeqCst);
    metadata.own_instance().unwrap();
    metadata.load_balancer_endpoint().unwrap();
    let error = error(metadata.peers());
    for part in ["compute.instances.list", "docs/clouds.md", "status 403"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn an_answer_without_the_flavor_is_not_the_metadata_servers() {
    let other = server::start(|_| Answer::text(200, "p-1"));
    let error = error(client("gcp", &other).own_instance());
    assert!(error.contains("Metadata-Flavor"), "{error}");
    let redirecting =
        server::start(|_| Answer::text(302, "").with("Location", "http://127.0.0.1:1"));
    let error = super::error(client("gcp", &redirecting).init_secret_hash());
    assert!(
        error.contains("Metadata-Flavor") || error.contains("302"),
        "{error}"
    );
}
