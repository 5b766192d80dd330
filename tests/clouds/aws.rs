//! AWS: moto serves the APIs ([`common::aws`]). What moto cannot do (a clock that differs, throttling,
//! endless pages), a server of this file does in the form of the API reference.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use base::machines::{Instance, Role};
use base::time;
use cloud_api::Service;
use common::aws::{HASH, Imds, Moto, credentials, lone_instance, place};
use serde_json::{Value, json};

use super::server::{self, Answer, Request};
use super::{client, error};

fn instance(machine: &Value) -> Instance {
    let text = |name: &str| machine[name].as_str().unwrap().to_owned();
    Instance {
        name: text("instanceId"),
        provider_id: format!("aws:///{}/{}", text("availabilityZone"), text("instanceId")),
        role: Role::parse(&text("role")),
        vpc_ip: Some(text("privateIp").parse().unwrap()),
    }
}

#[test]
fn a_cluster_in_moto_is_found_with_the_permissions_of_the_docs() {
    let moto = Moto::get();
    let machines: Vec<_> = moto.cluster["machines"]
        .as_array()
        .unwrap()
        .iter()
        .map(instance)
        .collect();
    let balancer = moto.cluster["balancer"].as_str().unwrap();
    assert_eq!(machines[0].role, Role::ControlPlane);

    let (control_plane, imds) = moto.machine(0);
    assert_eq!(control_plane.own_instance().unwrap(), machines[0]);
    assert_eq!(control_plane.init_secret_hash().unwrap(), HASH);
    assert_eq!(control_plane.load_balancer_endpoint().unwrap(), balancer);
    // not the machine of the other cluster, and not the one that was deleted
    let mut peers = control_plane.peers().unwrap();
    peers.sort_by_key(|peer| machines.iter().position(|machine| *machine == *peer));
    assert_eq!(peers, machines);
    // one token and one set of credentials were enough
    assert_eq!(imds.tokens.load(Ordering::SeqCst), 1);
    assert_eq!(imds.credentials.load(Ordering::SeqCst), 1);

    // the names and addresses that AWS's controller writes into a Node, with a second IPv6 address
    let aliases = control_plane.aliases().unwrap();
    for machine in moto.cluster["machines"].as_array().unwrap() {
        let text = |name: &str| machine[name].as_str().unwrap();
        let own = (aliases.iter()).find(|alias| alias.machine == text("instanceId"));
        let own = own.unwrap();
        assert_eq!(own.names, [text("privateDnsName"), text("publicDnsName")]);
        for name in ["privateIp", "publicIp", "ipv6", "secondIpv6"] {
            let address = text(name).parse().unwrap();
            assert!(own.addresses.contains(&address), "{name}: {own:?}");
        }
    }
    // the list has a machine that does not run, too
    let resting = moto.cluster["resting"].as_str().unwrap();
    assert!(aliases.iter().any(|alias| alias.machine == resting));
    assert!(machines.iter().all(|machine| machine.name != resting));
    assert_eq!(aliases.len(), machines.len() + 1);

    // a worker finds the cluster by its load balancer, and has no permission to list the machines
    let (worker, _) = moto.machine(1);
    assert_eq!(worker.own_instance().unwrap(), machines[1]);
    assert_eq!(worker.load_balancer_endpoint().unwrap(), balancer);
    let error = error(worker.peers());
    assert!(
        error.contains("needs the permission ec2:DescribeInstances"),
        "{error}"
    );

    // a host that gives this machine another role
    imds.set("meta-data/tags/instance/constellation-role", "worker");
    let error = super::error(control_plane.own_instance());
    assert!(
        error.contains("refused") && error.contains("role"),
        "{error}"
    );
}

#[test]
fn a_signature_with_another_secret_is_refused_and_new_credentials_are_tried_once() {
    let moto = Moto::get();
    let (metadata, imds) = moto.machine(0);
    let path = "meta-data/iam/security-credentials/control-plane";
    let right = moto.cluster["credentials"]["control-plane"].clone();
    let mut wrong = right.clone();
    wrong["SecretAccessKey"] = json!("wrong");
    imds.set(path, &wrong.to_string());
    let error = error(metadata.peers());
    assert!(error.contains("AuthFailure"), "{error}");
    assert_eq!(imds.credentials.load(Ordering::SeqCst), 2);
    imds.set(path, &right.to_string());
    assert_eq!(metadata.peers().unwrap().len(), 3);
}

/// Starts an instance and an API of EC2 that this closure answers.
fn with_ec2(
    answer: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> (Arc<dyn Service>, Arc<Imds>) {
    let (imds, url) = lone_instance();
    let api = server::start(answer);
    (client("aws", &place(&url, &api)), imds)
}

/// Returns a page of this many instances, from this number on.
fn page(from: usize, count: usize, next: Option<&str>) -> Answer {
    let mut items = String::new();
    for number in from..from + count {
        let address = std::net::Ipv4Addr::from_bits(0x0a07_0100 + number as u32);
        items += &format!(
            "<item><instancesSet><item><instanceId>i-{number:017x}</instanceId><instanceState><code>16</code><name>running</name>\
             </instanceState><placement><availabilityZone>eu-central-1a</availabilityZone></placement>\
             <privateIpAddress>{address}</privateIpAddress><tagSet><item><key>constellation-role</key><value>worker</value></item>\
             </tagSet></item></instancesSet></item>"
        );
    }
    let next = next.map_or(String::new(), |next| {
        format!("<nextToken>{next}</nextToken>")
    });
    xml(
        200,
        format!(
            "<DescribeInstancesResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>r</requestId>\
             <reservationSet>{items}</reservationSet>{next}</DescribeInstancesResponse>"
        ),
    )
}

pub fn xml(status: u16, body: impl Into<String>) -> Answer {
    Answer::new(status, "text/xml;charset=UTF-8", body)
}

pub fn refusal(status: u16, code: &str) -> Answer {
    let error = format!("<Error><Code>{code}</Code><Message>No.</Message></Error>");
    let body = format!("<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>");
    xml(status, body)
}

#[test]
fn a_hundred_thousand_machines_are_listed_page_by_page() {
    let (metadata, imds) = with_ec2(|request| {
        for (name, value) in [
            ("Action", "DescribeInstances"),
            ("Version", "2016-11-15"),
            ("Filter.1.Name", "tag:constellation-uid"),
            ("Filter.1.Value.1", "constell1"),
            ("Filter.2.Name", "instance-state-name"),
            ("Filter.2.Value.1", "running"),
            ("MaxResults", "1000"),
        ] {
            if request.form(name).as_deref() != Some(value) {
                return refusal(400, name);
            }
        }
        let number: usize = request
            .form("NextToken")
            .map_or(0, |mark| mark[3..].parse().unwrap());
        let next = (number < 99).then(|| format!("a+/{}", number + 1));
        page(1 + number * 1000, 1000, next.as_deref())
    });
    imds.set(
        "meta-data/network/interfaces/macs/02:29:96:8f:6a:2d/vpc-ipv4-cidr-blocks",
        "10.0.0.0/8",
    );
    let peers = metadata.peers().unwrap();
    assert_eq!(peers.len(), 100_000);
    assert_eq!(peers[99_999].name, format!("i-{:017x}", 100_000));
}

#[test]
fn machines_outside_the_network_are_not_peers() {
    // the first 256 numbers after 10.7.255.1 leave 10.7.0.0/16
    let (metadata, _) = with_ec2(|_| page(0xfe01, 256, None));
    assert_eq!(metadata.peers().unwrap().len(), 255);
}

#[test]
fn pages_that_repeat_are_refused() {
    let (metadata, _) = with_ec2(|_| page(1, 1, Some("again")));
    let error = error(metadata.peers());
    assert!(error.contains("pages repeat"), "{error}");
}

#[test]
fn a_clock_that_differs_is_noticed_and_corrected() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let (metadata, _) = with_ec2(move |request| {
        counted.fetch_add(1, Ordering::SeqCst);
        // the clock of AWS is an hour ahead
        let now = SystemTime::now() + Duration::from_secs(3600);
        let sent = request.field("x-amz-date").unwrap();
        let sent = format!(
            "{}-{}-{}T{}:{}:{}Z",
            &sent[..4],
            &sent[4..6],
            &sent[6..8],
            &sent[9..11],
            &sent[11..13],
            &sent[13..15]
        );
        let age = now
            .duration_since(time::parse(&sent).unwrap())
            .unwrap_or_default();
        if age > Duration::from_secs(300) {
            refusal(400, "RequestExpired").with("Date", httpdate::fmt_http_date(now))
        } else {
            page(1, 1, None).with("Date", httpdate::fmt_http_date(now))
        }
    });
    assert_eq!(metadata.peers().unwrap().len(), 1);
    assert_eq!(requests.load(Ordering::SeqCst), 2);
    // the difference is remembered
    assert_eq!(metadata.peers().unwrap().len(), 1);
    assert_eq!(requests.load(Ordering::SeqCst), 3);
}

#[test]
fn an_api_that_demands_a_pause_is_left_alone() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let (metadata, _) = with_ec2(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        refusal(503, "RequestLimitExceeded").with("Retry-After", 120)
    });
    for _ in 0..3 {
        let error = error(metadata.peers());
        assert!(error.contains("asked again in"), "{error}");
    }
    assert_eq!(requests.load(Ordering::SeqCst), 1);
}

#[test]
fn expired_tokens_and_credentials_are_renewed() {
    let (metadata, imds) = with_ec2(|request| {
        let by_second = request
            .field("authorization")
            .unwrap()
            .contains("ASIASECOND/");
        if by_second {
            page(1, 1, None)
        } else {
            refusal(400, "RequestExpired")
        }
    });
    let path = "meta-data/iam/security-credentials/control-plane";
    assert!(error(metadata.peers()).contains("RequestExpired"));
    assert_eq!(imds.credentials.load(Ordering::SeqCst), 2);
    imds.set(path, &credentials("ASIASECOND", 6 * 3600).to_string());
    imds.token.fetch_add(1, Ordering::SeqCst);
    assert_eq!(metadata.peers().unwrap().len(), 1);
    assert_eq!(imds.tokens.load(Ordering::SeqCst), 2);
    assert_eq!(imds.credentials.load(Ordering::SeqCst), 3);
    // credentials that expire in four minutes are renewed before that
    imds.set(path, &credentials("ASIASECOND", 240).to_string());
    let (near_end, fresh) = with_ec2(|_| page(1, 1, None));
    fresh.set(path, &credentials("ASIASECOND", 240).to_string());
    for expected in 1..3 {
        near_end.peers().unwrap();
        assert_eq!(fresh.credentials.load(Ordering::SeqCst), expected);
    }
}

#[test]
fn what_is_not_an_answer_of_the_api_is_named() {
    for (answer, parts) in [
        (
            Answer::text(302, "").with("Location", "http://127.0.0.1:1/"),
            &["status 200, got 302"][..],
        ),
        (
            Answer::new(200, "text/html", "<html>Sign in</html>"),
            &["text/html", "proxy"],
        ),
        (xml(200, "<html/>"), &["a page of instances", "html"]),
        (
            xml(200, "<DescribeInstancesResponse>"),
            &["a page of instances"],
        ),
        (xml(500, "x"), &["500"]),
        (
            refusal(403, "UnauthorizedOperation"),
            &[
                "403",
                "UnauthorizedOperation",
                "ec2:DescribeInstances",
                "docs/clouds.md",
            ],
        ),
        (
            refusal(401, "OptInRequired"),
            &["has not enabled this region"],
        ),
    ] {
        let (metadata, _) = with_ec2(move |_| answer.clone());
        let error = error(metadata.peers());
        assert!(
            parts.iter().all(|part| error.contains(part)),
            "{parts:?}: {error}"
        );
    }
}

#[test]
fn a_metadata_service_without_tags_or_role_says_what_to_do() {
    let (metadata, imds) = with_ec2(|_| page(1, 1, None));
    imds.remove("meta-data/iam/security-credentials/");
    let problem = error(metadata.peers());
    assert!(problem.contains("instance profile"), "{problem}");
    imds.remove("meta-data/tags/instance/constellation-role");
    let problem = error(metadata.own_instance());
    assert!(
        problem.contains("InstanceMetadataTags=enabled"),
        "{problem}"
    );
    let long = "x".repeat(5 << 20);
    imds.set("meta-data/tags/instance/constellation-role", &long);
    let problem = error(metadata.own_instance());
    assert!(problem.len() < 500, "{problem}");
    // no answer comes: in a pod the hop limit is too low
    let nobody = client("aws", "http://127.0.0.1:1");
    let problem = error(nobody.own_instance());
    assert!(problem.contains("hop limit"), "{problem}");
    // the service has no tokens: the error must not say that a tag, role or network is missing
    let other = server::start(|_| Answer::new(404, "text/html", "<h1>404 - Not Found</h1>"));
    let other = client("aws", &other);
    for problem in [
        error(other.own_instance()),
        error(other.init_secret_hash()),
        error(other.peers()),
    ] {
        assert!(
            problem.contains("PUT") && problem.contains("gives no tokens"),
            "{problem}"
        );
    }
}
