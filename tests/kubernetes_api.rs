//! Tests of the Kubernetes client with a real kube-apiserver and a real etcd (`make kubernetes-api`).
//!
//! The first run builds both from source, which takes minutes. So `cargo test` skips these tests.

mod kubeconfigs;

use common::kube_apiserver;

use std::fs;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use base::stop::Stop;
use collateral::parsers::Item;
use collateral::stores::{ConfigMapStore, Store};
use hardware::snp::report::ReportSigner;
use hardware::snp::tcb::Product;
use kube_apiserver::{Cluster, PATIENCE, config};
use kubernetes::client::{
    ApiAccess, CLUSTER_ROLE_BINDINGS, CONFIG_MAPS, Client, Collection, CollectionEvent, Error,
    NAMESPACES, NODES, PODS, Resource, SELF_SUBJECT_REVIEWS, SERVICE_ACCOUNTS, Selector,
};
use kubernetes::client_certificate::{Subject, kubeconfig};
use kubernetes::kubeconfig::rebuild;
use kubernetes::objects::{ConfigMap, ObjectMeta};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};

fn client() -> Client {
    Cluster::shared().client(&Stop::new())
}

/// ConfigMaps of a namespace for this test only.
fn config_maps(client: &Client, namespace: &str) -> Collection {
    client
        .create_if_absent(&NAMESPACES.all(), &json!({"metadata": {"name": namespace}}))
        .unwrap();
    CONFIG_MAPS.in_namespace(namespace)
}

fn config_map(name: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": value}})
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn objects_are_made_read_changed_listed_and_deleted() {
    let client = client();
    let maps = config_maps(&client, "verbs");
    let at = maps.named("a");
    assert!(client.find(&at).unwrap().is_none());
    client.create(&maps, &config_map("a", "1")).unwrap();
    let again = client.create(&maps, &config_map("a", "2")).unwrap_err();
    assert!(again.is_already_exists() && !again.is_temporary());
    assert_eq!(
        again.to_string(),
        "create configmaps verbs/a: AlreadyExists (409): configmaps \"a\" already exists"
    );
    assert!(
        !client
            .create_if_absent(&maps, &config_map("a", "2"))
            .unwrap()
    );
    assert!(
        client
            .create_if_absent(&maps, &config_map("b", "2"))
            .unwrap()
    );

    let mut read = client.get(&at).unwrap();
    assert_eq!(read["data"]["key"], "1");
    read["data"]["key"] = "2".into();
    client.update(&at, &read).unwrap();
    let stale = client.update(&at, &read).unwrap_err();
    assert!(stale.is_conflict(), "{stale}");
    client.merge(&at, &json!({"data": {"more": "3"}})).unwrap();
    client
        .modify(&at, |map| {
            std::mem::replace(&mut map["data"]["key"], "4".into()) != "4"
        })
        .unwrap();
    assert_eq!(
        client.get(&at).unwrap()["data"],
        json!({"key": "4", "more": "3"})
    );
    // fields that no type has stay
    let labelled = json!({"immutable": false, "metadata": {"labels": {"a": "b"}}});
    client.merge(&at, &labelled).unwrap();
    let change = |map: ConfigMap, _: &Value| {
        (map.text("key") != "5").then(|| json!({"data": {"key": "5", "more": null}}))
    };
    for _ in 0..2 {
        client.modify_as(&at, change).unwrap();
    }
    let (map, whole) = client.find_whole::<ConfigMap>(&at).unwrap().unwrap();
    assert_eq!(
        map.data.into_iter().collect::<Vec<_>>(),
        [("key".into(), "5".into())]
    );
    assert_eq!(map.metadata.label("a"), Some("b"));
    assert_eq!(whole["immutable"], false);

    let listed = client
        .list(&maps, &Selector::fields("metadata.name=b"))
        .unwrap();
    assert_eq!(listed.items.iter().map(name).collect::<Vec<_>>(), ["b"]);
    // The object that was read differs from the present one, in its content or altogether.
    let read = ObjectMeta::of(&read);
    let now = || client.get_as::<ConfigMap>(&at).unwrap().metadata;
    assert!(!client.delete_as(&at, &read).unwrap());
    let before = now();
    client.delete(&at).unwrap();
    assert!(!client.delete_as(&at, &before).unwrap());
    client.create(&maps, &config_map("a", "1")).unwrap();
    assert!(!client.delete_as(&at, &before).unwrap());
    assert!(client.delete_as(&at, &now()).unwrap());
    assert!(!client.delete_if_there(&at).unwrap());
    let gone = client.get(&at).unwrap_err();
    assert!(gone.is_not_found());
    assert_eq!(
        gone.to_string(),
        "get configmaps verbs/a: NotFound (404): configmaps \"a\" not found"
    );
}

/// What `firstlight kubeconfig` gets from a control plane.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_api_server_knows_user_and_groups_of_a_kubeconfig_for_a_colleague() {
    let cluster = Cluster::shared();
    let (ca, key) = cluster.ca();
    let subject = Subject::new("anna", &["developers".into(), "auditors".into()]).unwrap();
    let made = |now| {
        let (ca, key, template) = (ca.as_bytes(), key.as_bytes(), cluster.kubeconfig());
        let hour = Duration::from_secs(3600);
        kubeconfig(ca, key, template.as_bytes(), &subject, hour, now).unwrap()
    };
    let review = |now| {
        let rebuilt = rebuild(made(now).expose(), "cluster", "anna").unwrap();
        let text = str::from_utf8(rebuilt.expose()).unwrap();
        let client = Client::new(config(text), &Stop::new());
        client.create(&SELF_SUBJECT_REVIEWS.all(), &json!({}))
    };
    let user = review(SystemTime::now()).unwrap()["status"]["userInfo"].clone();
    assert_eq!(user["username"], "anna");
    let groups = json!(["developers", "auditors", "system:authenticated"]);
    assert_eq!(user["groups"], groups);
    // it begins two hours before it is made, and ends an hour after
    let expired = review(SystemTime::now() - Duration::from_secs(3700));
    assert_eq!(expired.unwrap_err().code(), Some(401));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn apply_sets_and_removes_only_its_own_fields() {
    let client = client();
    let at = config_maps(&client, "apply").named("a");
    let with = |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "apply"}, "data": data});
    client.try_apply(&at, &with(json!({"x": "0"}))).unwrap();
    assert!(client.find(&at).unwrap().is_none());
    let first = client
        .apply(&at, &with(json!({"x": "1", "y": "1"})))
        .unwrap();
    assert_eq!(
        first["metadata"]["managedFields"][0]["manager"],
        "firstlight"
    );
    let same = client
        .apply(&at, &with(json!({"x": "1", "y": "1"})))
        .unwrap();
    assert_eq!(
        first["metadata"]["resourceVersion"],
        same["metadata"]["resourceVersion"]
    );
    client
        .merge(&at, &json!({"data": {"theirs": "1", "x": "changed"}}))
        .unwrap();
    let second = client.apply(&at, &with(json!({"x": "2"}))).unwrap();
    assert_eq!(second["data"], json!({"x": "2", "theirs": "1"}));
    // The server answers 500 to this, as it does to temporary errors.
    let asked = Instant::now();
    let refused = client.apply(&at, &with(json!({"x": 2}))).unwrap_err();
    support::promptly::assert_no_wait(asked, Duration::from_millis(750));
    assert!(
        refused.to_string().contains("expected string, got"),
        "{refused}"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn changes_of_many_at_once_are_all_there() {
    let client = client();
    let maps = config_maps(&client, "conflicts");
    client.create(&maps, &config_map("a", "0")).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let add = |map: &mut Value| {
                        let count: u32 = map["data"]["key"].as_str().unwrap().parse().unwrap();
                        map["data"]["key"] = (count + 1).to_string().into();
                        true
                    };
                    client.modify(&maps.named("a"), add).unwrap();
                }
            });
        }
    });
    assert_eq!(client.get(&maps.named("a")).unwrap()["data"]["key"], "40");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_is_annotated() {
    let client = client();
    client
        .create(
            &NODES.all(),
            &json!({"metadata": {"name": "node-1", "annotations": {"a": "b"}}}),
        )
        .unwrap();
    let node = client
        .annotate(
            &NODES.named("node-1"),
            &[("example.com/components", "k8s-components-1")],
        )
        .unwrap();
    assert_eq!(
        node["metadata"]["annotations"],
        json!({"a": "b", "example.com/components": "k8s-components-1"})
    );
    let missing = client
        .annotate(&NODES.named("node-2"), &[("a", "b")])
        .unwrap_err();
    assert_eq!(
        missing.to_string(),
        "patch nodes node-2: NotFound (404): nodes \"node-2\" not found"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_list_of_several_pages_is_whole() {
    let client = client();
    let maps = config_maps(&client, "pages");
    thread::scope(|scope| {
        for part in 0..4 {
            let (client, maps) = (&client, &maps);
            scope.spawn(move || {
                for number in (part..601).step_by(4) {
                    client
                        .create(maps, &config_map(&format!("a{number:03}"), "x"))
                        .unwrap();
                }
            });
        }
    });
    let list = client.list(&maps, &Selector::default()).unwrap();
    let names: Vec<_> = list
        .items
        .iter()
        .map(|item| name(item).to_owned())
        .collect();
    assert_eq!(
        names,
        (0..601)
            .map(|number| format!("a{number:03}"))
            .collect::<Vec<_>>()
    );
    assert!(
        client
            .list(&maps, &Selector::labels("no=such"))
            .unwrap()
            .items
            .is_empty()
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_list_of_large_objects_comes_in_smaller_pages() {
    let client = client();
    let maps = config_maps(&client, "large");
    let large = "a".repeat(1_000_000);
    for number in 0..36 {
        client
            .create(&maps, &config_map(&format!("a-{number}"), &large))
            .unwrap();
    }
    assert_eq!(
        client
            .list(&maps, &Selector::default())
            .unwrap()
            .items
            .len(),
        36
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_watch_tells_every_change_over_several_streams() {
    let client = client();
    let maps = config_maps(&client, "watch");
    client.create(&maps, &config_map("a", "0")).unwrap();
    let mut watch = client
        .watch::<Value>(&maps, &Selector::fields("metadata.name=a"))
        .with_round(Duration::from_secs(1));
    assert!(
        matches!(watch.next().unwrap(), CollectionEvent::Listed(items) if items.iter().map(name).eq(["a"]))
    );
    let writer = client.clone();
    let changes = thread::spawn(move || {
        let maps = CONFIG_MAPS.in_namespace("watch");
        for number in 1..=15 {
            writer
                .merge(
                    &maps.named("a"),
                    &json!({"data": {"key": number.to_string()}}),
                )
                .unwrap();
            // This object is not selected.
            writer
                .create(&maps, &config_map(&format!("b{number}"), "0"))
                .unwrap();
            thread::sleep(Duration::from_millis(200));
        }
        writer.delete(&maps.named("a")).unwrap();
        writer.create(&maps, &config_map("a", "new")).unwrap();
    });
    for number in 1..=15 {
        let event = watch.next().unwrap();
        assert!(
            matches!(&event, CollectionEvent::Modified(a) if a["data"]["key"] == *format!("{number}")),
            "{number}: {event:?}"
        );
    }
    assert!(matches!(watch.next().unwrap(), CollectionEvent::Deleted(a) if name(&a) == "a"));
    assert!(
        matches!(watch.next().unwrap(), CollectionEvent::Added(a) if a["data"]["key"] == "new")
    );
    changes.join().unwrap();
}

/// A server that has just started sends no bookmark in its first minute.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn bookmarks_bring_a_watch_on_where_nothing_happens() {
    let client = client();
    let maps = config_maps(&client, "bookmarks");
    let mut watch = client.watch::<Value>(&maps, &Selector::fields("metadata.name=none"));
    assert!(matches!(watch.next().unwrap(), CollectionEvent::Listed(items) if items.is_empty()));
    let before: u64 = watch.version().parse().unwrap();
    client.create(&maps, &config_map("a", "0")).unwrap();
    assert_eq!(watch.next_within(Duration::from_secs(70)).unwrap(), None);
    assert!(watch.version().parse::<u64>().unwrap() > before);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_pod_s_token_is_used_and_read_again_when_it_is_replaced() {
    let (cluster, client) = (Cluster::shared(), client());
    config_maps(&client, "tokens");
    let accounts = SERVICE_ACCOUNTS.in_namespace("tokens");
    let token = |account: &str| {
        client
            .create(&accounts, &json!({"metadata": {"name": account}}))
            .unwrap();
        let request = json!({"spec": {"expirationSeconds": 600}});
        let answer = client
            .create_subresource(&accounts.named(account).subresource("token"), &request)
            .unwrap();
        answer["status"]["token"].as_str().unwrap().to_owned()
    };
    let dir = tempfile::tempdir().unwrap();
    fs::copy(cluster.path("ca.crt"), dir.path().join("ca.crt")).unwrap();
    let (first, second) = (token("first"), token("second"));
    fs::write(dir.path().join("token"), &first).unwrap();
    let pod = Client::new(
        ApiAccess::of_service_account(&cluster.server(), dir.path()).unwrap(),
        &Stop::new(),
    );
    let who = || -> Result<String, Error> {
        let reviews = Resource::cluster("authentication.k8s.io", "v1", "selfsubjectreviews");
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
        Ok(
            pod.create(&reviews.all(), &review)?["status"]["userInfo"]["username"]
                .as_str()
                .unwrap()
                .to_owned(),
        )
    };
    assert_eq!(who().unwrap(), "system:serviceaccount:tokens:first");

    let refused = pod
        .get(&CONFIG_MAPS.in_namespace("kube-system").named("join-config"))
        .unwrap_err();
    assert_eq!(refused.code(), Some(403));
    assert!(
        refused.to_string().starts_with(
            "get configmaps kube-system/join-config: Forbidden (403): configmaps \"join-config\" is forbidden: User \
             \"system:serviceaccount:tokens:first\" cannot get resource"
        ),
        "{refused}"
    );

    // The account and its token are deleted. The file contains another token by then.
    fs::write(dir.path().join("token"), &second).unwrap();
    client.delete(&accounts.named("first")).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    // The server caches for some seconds that a token was valid.
    while who().unwrap() != "system:serviceaccount:tokens:second" {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(200));
    }
    client.delete(&accounts.named("second")).unwrap();
    let refused = loop {
        match who() {
            Err(error) => break error,
            Ok(_) => assert!(Instant::now() < deadline),
        }
        thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(refused.code(), Some(401));
    assert!(
        refused
            .to_string()
            .contains("the credentials are not valid, or no longer valid, for this cluster"),
        "{refused}"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_server_of_another_cluster_is_reported_at_once() {
    let cluster = Cluster::shared();
    let other_ca = rcgen::generate_simple_self_signed(vec!["kubernetes".into()])
        .unwrap()
        .cert
        .pem();
    let kubeconfig = cluster.kubeconfig_of("kubernetes-admin", "system:masters", &other_ca);
    let error = Client::new(config(&kubeconfig), &Stop::new())
        .wait_ready(&mut |_| {})
        .unwrap_err();
    assert!(!error.is_temporary());
    assert!(
        error
            .to_string()
            .contains("the server or the kubeconfig belongs to another cluster"),
        "{error}"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_stop_ends_watches_and_waits_at_once() {
    let stop = Stop::new();
    let client = Cluster::shared().client(&stop);
    let maps = config_maps(&client, "stop");
    let mut watch = client.watch::<Value>(&maps, &Selector::default());
    assert!(matches!(watch.next().unwrap(), CollectionEvent::Listed(_)));
    let watching = thread::spawn(move || (watch.next(), Instant::now()));
    let nobody = Cluster::shared()
        .kubeconfig()
        .replace(&Cluster::shared().server(), "https://127.0.0.1:1");
    let nobody = Client::new(config(&nobody), &stop);
    let waiting = thread::spawn(move || (nobody.wait_ready(&mut |_| {}), Instant::now()));
    thread::sleep(Duration::from_millis(1500));
    let stopped = Instant::now();
    stop.stop();
    let (event, at) = watching.join().unwrap();
    assert!(
        matches!(event, Err(Error::Stopped)) && at - stopped < Duration::from_millis(500),
        "{event:?}"
    );
    let (ready, at) = waiting.join().unwrap();
    assert!(
        matches!(ready, Err(Error::Stopped)) && at - stopped < Duration::from_millis(500),
        "{ready:?}"
    );
    assert!(matches!(client.version(), Err(Error::Stopped)));
}

/// The server refuses evictions with 429 and a Retry-After of 10 s until a controller has computed
/// what a budget permits.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_server_that_asks_for_patience_is_asked_again_when_it_said() {
    let client = client();
    config_maps(&client, "patience");
    let accounts = SERVICE_ACCOUNTS.in_namespace("patience");
    client
        .create(&accounts, &json!({"metadata": {"name": "default"}}))
        .unwrap();
    let pods = PODS.in_namespace("patience");
    let pod = json!({
        "metadata": {"name": "a", "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "a", "image": "a"}], "nodeName": "nowhere"},
    });
    client.create(&pods, &pod).unwrap();
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    client
        .merge(&pods.named("a").subresource("status"), &ready)
        .unwrap();
    let budgets =
        Resource::namespaced("policy", "v1", "poddisruptionbudgets").in_namespace("patience");
    let budget = json!({
        "metadata": {"name": "a"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "a"}}},
    });
    client.create(&budgets, &budget).unwrap();
    let eviction =
        json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a"}});
    let evict = |time| {
        client
            .within(time)
            .create_subresource(&pods.named("a").subresource("eviction"), &eviction)
    };

    // it does not wait for a pause that is longer than its limit
    let refused = evict(Duration::from_secs(5)).unwrap_err();
    assert!(refused.is_temporary());
    assert!(
        refused.to_string().contains("TooManyRequests (429): "),
        "{refused}"
    );
    assert!(
        refused.to_string().ends_with("; try again after 10 s"),
        "{refused}"
    );

    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_secs(2));
            let counted = json!({"status": {
                "observedGeneration": 1, "disruptionsAllowed": 1, "currentHealthy": 1, "desiredHealthy": 0, "expectedPods": 1,
            }});
            client.merge(&budgets.named("a").subresource("status"), &counted).unwrap();
        });
        let started = Instant::now();
        evict(Duration::from_secs(60)).unwrap();
        assert!(
            started.elapsed() >= Duration::from_secs(10),
            "{:?}",
            started.elapsed()
        );
    });
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_server_that_dies_freezes_and_comes_back_costs_time_and_nothing_else() {
    let started = Instant::now();
    let mut cluster = Cluster::start();
    let client = cluster.client(&Stop::new());
    let mut said = Vec::new();
    client
        .within(PATIENCE)
        .wait_ready(&mut |text| said.push(text.to_owned()))
        .unwrap();
    println!(
        "etcd and kube-apiserver ready after {:?}, meanwhile: {said:#?}",
        started.elapsed()
    );
    assert!(said[0].contains("does not answer: "), "{said:?}");
    assert!(client.version().unwrap().starts_with("v1."));

    let maps = config_maps(&client, "faults");
    client.create(&maps, &config_map("a", "0")).unwrap();
    let mut watch = client.watch::<Value>(&maps, &Selector::default());
    assert!(
        matches!(watch.next().unwrap(), CollectionEvent::Listed(items) if items.iter().map(name).eq(["a"]))
    );
    client.create(&maps, &config_map("b", "0")).unwrap();
    assert!(matches!(watch.next().unwrap(), CollectionEvent::Added(b) if name(&b) == "b"));

    cluster.freeze_api_server(true);
    let asked = Instant::now();
    let late = client
        .within(Duration::from_secs(2))
        .get(&maps.named("a"))
        .unwrap_err();
    assert!(
        asked.elapsed() >= Duration::from_secs(2),
        "{:?}",
        asked.elapsed()
    );
    assert!(
        late.is_temporary()
            && late
                .to_string()
                .contains("no answer from the API server https://127.0.0.1:"),
        "{late}"
    );
    cluster.freeze_api_server(false);

    cluster.kill_api_server();
    let dead = client
        .within(Duration::from_secs(1))
        .create(&maps, &config_map("c", "0"))
        .unwrap_err();
    assert!(
        dead.to_string()
            .starts_with("create configmaps faults/c: no answer from the API server"),
        "{dead}"
    );
    cluster.start_api_server();
    // There is no wait for readiness: the call itself lasts until the server answers.
    let administrator = client.within(PATIENCE);
    assert_eq!(
        administrator.get(&maps.named("a")).unwrap()["data"]["key"],
        "0"
    );
    assert!(
        administrator
            .create_if_absent(&maps, &config_map("c", "0"))
            .unwrap()
    );
    assert!(matches!(watch.next().unwrap(), CollectionEvent::Added(c) if name(&c) == "c"));

    cluster.forget_history();
    let mut watch = administrator
        .watch::<Value>(&maps, &Selector::default())
        .from_version("1");
    assert!(
        matches!(watch.next().unwrap(), CollectionEvent::Listed(items) if items.iter().map(name).any(|name| name == "c"))
    );

    // The permissions of other users become effective later than the administrator's.
    let bindings = CLUSTER_ROLE_BINDINGS.named("system:public-info-viewer");
    assert_eq!(
        administrator.get(&bindings).unwrap()["kind"],
        "ClusterRoleBinding"
    );
}

/// Three programs share a ConfigMap: what one fetched, the others find, also when they write at once.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn fetched_certificates_are_kept_in_a_config_map() {
    let client = client();
    let maps = config_maps(&client, "collateral");
    let sev = support::foreign::rust_crate("sev", "sev");
    let ask = |product: &str| {
        let path = sev.join(format!("src/certs/snp/builtin/{product}/ask.pem"));
        CertificateDer::from_pem_file(path).unwrap().to_vec()
    };
    let items = [
        ("milan", Product::Milan),
        ("genoa", Product::Genoa),
        ("turin", Product::Turin),
    ];
    let items =
        items.map(|(name, product)| (Item::Revoked(product, ReportSigner::Vcek), ask(name)));
    let store = || ConfigMapStore::new(&client, "collateral", "join-collateral");
    assert!(store().load(&items[0].0).is_none());
    thread::scope(|scope| {
        for (item, der) in &items {
            scope.spawn(|| store().save(item, der));
        }
    });
    for (item, der) in &items {
        assert_eq!(&store().load(item).unwrap().bytes, der);
    }
    let map = client.get(&maps.named("join-collateral")).unwrap();
    assert_eq!(map["binaryData"].as_object().unwrap().len(), 3);
}
