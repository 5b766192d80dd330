//! EC2's answers about a machine, for which services and the operator's command ask. moto has the machines of two accounts and the
//! policies of the roles. What it cannot do (throttling, silence, machines that are shared) a server of this file does.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use collateral::{Cause, Ec2Caller, FetchSettings, Fetching, Unavailable};
use verifier::instance::CloudInstance;
use verifier::sources::{Sources, offline};

use super::aws::{refusal, xml};
use super::server::{self, Answer, Request};
use common::aws::{Moto, lone_instance, place};

const ID: &str = "i-0123456789abcdef0";
const OTHER_ID: &str = "i-0123456789abcdef1";

/// Returns the sources of a program at this place, with these variables.
fn sources(
    place: Option<&str>,
    variables: fn(&str) -> Option<String>,
    time: Duration,
) -> Arc<Fetching> {
    let place = place.map(str::to_owned);
    Fetching::new(FetchSettings {
        kds: None,
        pcs: None,
        ec2: Some(Ec2Caller { place, variables }),
        time,
        ..FetchSettings::default()
    })
    .unwrap()
}

/// Returns the sources of a service on an instance whose EC2 is this closure.
fn with_ec2(
    time: Duration,
    answer: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> Arc<Fetching> {
    let (_, imds) = lone_instance();
    let api = server::start(answer);
    sources(Some(&place(&imds, &api)), |_| None, time)
}

fn described(id: &str, account: &str, state: &str) -> Answer {
    xml(
        200,
        format!(
            "<DescribeInstancesResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>r</requestId><reservationSet><item>\
             <reservationId>r-0</reservationId><ownerId>{account}</ownerId><instancesSet><item><instanceId>{id}</instanceId>\
             <imageId>ami-0</imageId><instanceState><code>16</code><name>{state}</name></instanceState>\
             <placement><availabilityZone>eu-central-1a</availabilityZone></placement><tpmSupport>v2.0</tpmSupport>\
             <networkInterfaceSet><item><ownerId>999999999999</ownerId></item></networkInterfaceSet></item></instancesSet></item>\
             </reservationSet></DescribeInstancesResponse>"
        ),
    )
}

/// Answers for the instance that is asked for.
fn owned(request: &Request) -> Answer {
    let id = request.form("InstanceId.1").unwrap();
    described(&id, "123456789012", "running")
}

fn refused(sources: &Fetching, id: &str) -> Unavailable {
    sources.ec2_instance(id).unwrap_err()
}

const LONG: Duration = Duration::from_secs(30);

#[test]
fn ec2_says_account_zone_and_image_of_a_machine_in_moto() {
    let moto = Moto::get();
    let (place, imds) = moto.place(0);
    let sources = sources(Some(&place), |_| None, LONG);
    for machine in moto.cluster["machines"].as_array().unwrap() {
        let text = |name: &str| machine[name].as_str().unwrap().to_owned();
        let got = sources.ec2_instance(&text("instanceId")).unwrap();
        let expected = CloudInstance {
            id: Some(text("instanceId")),
            account: Some("123456789012".into()),
            zone: Some(text("availabilityZone")),
            image: moto.cluster["image"].as_str().map(str::to_owned),
            ..CloudInstance::default()
        };
        assert_eq!(*got, expected);
    }
    // the program does not ask again about a known instance, even without a role
    imds.remove("meta-data/iam/security-credentials/");
    let id = moto.cluster["machines"][1]["instanceId"].as_str().unwrap();
    sources.ec2_instance(id).unwrap();
}

#[test]
fn an_operator_asks_with_the_variables_of_aws() {
    fn variables(name: &str) -> Option<String> {
        let cluster = &Moto::get().cluster;
        let credentials = &cluster["credentials"]["verifier"];
        let value = match name {
            "AWS_ACCESS_KEY_ID" => &credentials["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY" => &credentials["SecretAccessKey"],
            "AWS_SESSION_TOKEN" => &credentials["Token"],
            "AWS_ENDPOINT_URL_EC2" => &cluster["url"],
            "AWS_DEFAULT_REGION" => return Some("eu-central-1".into()),
            // no server is there: no request may need it
            "AWS_EC2_METADATA_SERVICE_ENDPOINT" => return Some("http://127.0.0.1:1".into()),
            _ => return None,
        };
        value.as_str().map(str::to_owned)
    }
    let id = Moto::get().cluster["machines"][0]["instanceId"].as_str();
    let got = sources(None, variables, LONG).ec2_instance(id.unwrap());
    assert_eq!(got.unwrap().account.as_deref(), Some("123456789012"));

    for (variables, why) in [
        (
            (|name| match name {
                "AWS_DEFAULT_REGION" => None,
                _ => variables(name),
            }) as fn(&str) -> Option<String>,
            "the region is not known, set AWS_REGION",
        ),
        (
            |name| match name {
                "AWS_REGION" => Some("x.example/".into()),
                _ => variables(name),
            },
            "AWS_REGION: \"x.example/\" is not the name of a region",
        ),
        (
            |name| match name {
                "AWS_SECRET_ACCESS_KEY" => None,
                _ => variables(name),
            },
            "only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set",
        ),
        (
            |name| match name {
                "AWS_SECRET_ACCESS_KEY" => Some("wrong".into()),
                _ => variables(name),
            },
            "AuthFailure",
        ),
        (
            |name| match name {
                "AWS_ENDPOINT_URL_EC2" => Some("http://10.0.0.1".into()),
                _ => variables(name),
            },
            "requests with credentials need https",
        ),
        (
            |name| match name {
                "AWS_EC2_METADATA_SERVICE_ENDPOINT" => Some("http://127.0.0.1:1".into()),
                _ => None,
            },
            "there are no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set",
        ),
    ] {
        let error = refused(&sources(None, variables, LONG), id.unwrap());
        assert_eq!(error.cause, Cause::Setting);
        let error = error.to_string();
        assert!(error.contains(why), "{error}, expected {why}");
        assert!(!error.contains("wrong"), "{error}");
    }
}

#[test]
fn a_machine_that_is_not_of_the_account_or_does_not_run_is_refused_by_name() {
    let moto = Moto::get();
    let id = |name: &str| moto.cluster[name].as_str().unwrap();
    let (place, _) = moto.place(0);
    let of_moto = sources(Some(&place), |_| None, LONG);
    for (id, cause, why) in [
        (
            id("foreign"),
            Cause::Unknown,
            "the machine is another customer's",
        ),
        (
            ID,
            Cause::Unknown,
            "EC2 in eu-central-1 knows no instance i-0123456789abcdef0",
        ),
        (
            id("stopped"),
            Cause::Mismatch,
            "is stopped, expected running",
        ),
        (
            id("deleted"),
            Cause::Mismatch,
            "is terminated, expected running",
        ),
    ] {
        let error = refused(&of_moto, id);
        assert_eq!(error.cause, cause);
        let error = error.to_string();
        assert!(error.contains(why) && error.contains(id), "{error}");
    }
    // a refused machine does not keep others from an answer
    let own = moto.cluster["machines"][0]["instanceId"].as_str().unwrap();
    of_moto.ec2_instance(own).unwrap();

    for (answer, why) in [
        (
            refusal(400, "InvalidInstanceID.Malformed"),
            "is not the ID of an instance",
        ),
        (
            described(OTHER_ID, "123456789012", "running"),
            "got \"i-0123456789abcdef1\"",
        ),
        (described(ID, "me", "running"), "with the account \"me\""),
        (
            xml(200, "<html/>"),
            "expected the instance i-0123456789abcdef0",
        ),
    ] {
        let sources = with_ec2(LONG, move |_| answer.clone());
        let error = refused(&sources, ID);
        assert_eq!(error.cause, Cause::Malformed);
        let error = error.to_string();
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn a_role_without_the_permission_is_named() {
    let (place, _) = Moto::get().place(1);
    let error = refused(&sources(Some(&place), |_| None, LONG), ID).to_string();
    let needed = "the instance's role worker needs the permission ec2:DescribeInstances";
    assert!(error.contains(needed), "{error}");
    assert!(error.contains("asking EC2 again in"), "{error}");

    let (imds, url) = lone_instance();
    imds.remove("meta-data/iam/security-credentials/");
    let nobody = sources(Some(&place_of(&url)), |_| None, LONG);
    let error = refused(&nobody, ID).to_string();
    assert!(error.contains("the instance has no role"), "{error}");
}

fn place_of(imds: &str) -> String {
    place(imds, "http://127.0.0.1:1")
}

#[test]
fn many_validations_of_a_machine_make_one_request() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let sources = with_ec2(LONG, move |request| {
        counted.fetch_add(1, Ordering::SeqCst);
        assert_eq!(request.form("Action").unwrap(), "DescribeInstances");
        thread::sleep(Duration::from_millis(300));
        owned(request)
    });
    let start = Arc::new(Barrier::new(32));
    let all: Vec<_> = (0..32)
        .map(|_| {
            let (sources, start) = (sources.clone(), start.clone());
            thread::spawn(move || {
                start.wait();
                sources.ec2_instance(ID).unwrap()
            })
        })
        .collect();
    for one in all {
        assert_eq!(one.join().unwrap().id.as_deref(), Some(ID));
    }
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    sources.ec2_instance(OTHER_ID).unwrap();
    assert_eq!(requests.load(Ordering::SeqCst), 2);
}

#[test]
fn at_most_eight_requests_run_at_once_and_all_machines_get_an_answer() {
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (now, seen) = (running.clone(), most.clone());
    let sources = with_ec2(LONG, move |request| {
        seen.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(50));
        now.fetch_sub(1, Ordering::SeqCst);
        owned(request)
    });
    let all: Vec<_> = (0..64)
        .map(|number| {
            let sources = sources.clone();
            thread::spawn(move || sources.ec2_instance(&format!("i-{number:017x}")).unwrap())
        })
        .collect();
    for one in all {
        one.join().unwrap();
    }
    let most = most.load(Ordering::SeqCst);
    assert!((2..=8).contains(&most), "{most}");
}

#[test]
fn a_refusal_counts_for_some_seconds() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let sources = with_ec2(LONG, move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        refusal(400, "InvalidInstanceID.NotFound")
    });
    for _ in 0..5 {
        assert_eq!(refused(&sources, ID).cause, Cause::Unknown);
    }
    assert_eq!(requests.load(Ordering::SeqCst), 1);
}

#[test]
fn ec2_that_throttles_is_asked_again_after_pauses() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let sources = with_ec2(LONG, move |request| {
        match counted.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => refusal(503, "RequestLimitExceeded"),
            _ => owned(request),
        }
    });
    let begin = Instant::now();
    sources.ec2_instance(ID).unwrap();
    // half a second at least, then one second
    assert!(
        begin.elapsed() >= Duration::from_millis(1500),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(requests.load(Ordering::SeqCst), 3);

    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let sources = with_ec2(Duration::from_millis(400), move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        refusal(503, "RequestLimitExceeded")
    });
    for id in [ID, OTHER_ID, ID] {
        let error = refused(&sources, id);
        assert_eq!(error.cause, Cause::Busy);
        let error = error.to_string();
        assert!(
            error.contains("RequestLimitExceeded") && error.contains("asking EC2 again in"),
            "{error}"
        );
    }
    assert_eq!(requests.load(Ordering::SeqCst), 1);
}

#[test]
fn a_silent_ec2_delays_nobody_longer_than_the_deadline_and_its_late_answer_counts() {
    let is_silent = Arc::new(AtomicBool::new(false));
    let silent = is_silent.clone();
    let deadline = Duration::from_secs(2);
    let sources = with_ec2(deadline, move |request| {
        while silent.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(20));
        }
        owned(request)
    });
    sources.ec2_instance(OTHER_ID).unwrap();
    is_silent.store(true, Ordering::SeqCst);
    let waiting = {
        let sources = sources.clone();
        thread::spawn(move || {
            let begin = Instant::now();
            (refused(&sources, ID), begin.elapsed())
        })
    };
    // a request about a known instance does not wait
    thread::sleep(Duration::from_millis(100));
    sources.ec2_instance(OTHER_ID).unwrap();
    assert!(!waiting.is_finished());
    let (error, elapsed) = waiting.join().unwrap();
    assert_eq!(error.cause, Cause::Pending, "{error}");
    assert!(elapsed >= deadline, "{elapsed:?}");
    is_silent.store(false, Ordering::SeqCst);
    let begin = Instant::now();
    while sources.ec2_instance(ID).is_err() {
        assert!(begin.elapsed() < LONG);
    }
}

#[test]
fn who_does_not_ask_says_so() {
    let (_, url) = lone_instance();
    let away = sources(Some(&place_of(&url)), |_| None, Duration::from_millis(300));
    let error = refused(&away, ID);
    assert_eq!(error.cause, Cause::Unreachable);
    let about = "cannot ask EC2 about";
    assert!(error.to_string().contains(about), "{error}");
    let closed = FetchSettings {
        kds: None,
        pcs: None,
        ec2: None,
        ..FetchSettings::default()
    };
    let error = refused(&Fetching::new(closed).unwrap(), ID);
    assert_eq!(error.cause, Cause::Offline, "{error}");
    let error = offline().ec2_instance(ID).unwrap_err();
    assert_eq!(error.cause, Cause::Offline, "{error}");
}
