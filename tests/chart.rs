//! Tests of the Helm chart with a real Helm, and of what it makes with a real kube-apiserver (`make kubernetes-api`).

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::kube_apiserver::{Cluster, PATIENCE};
use kubernetes::client::{CONFIG_MAPS, DAEMON_SETS, Object, PODS, Resource, Selector};
use kubernetes::wrapping_key;
use kubernetes::yaml;
use serde_json::{Value, json};
use services::probe::serve_health;
use support::program::Program;
use tempfile::TempDir;
use verifier::Policy;

const NAMESPACE: &str = "kube-system";
/// The API group of the Prometheus operator.
const MONITORING: &str = "monitoring.coreos.com";
const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;
const VALUES: &str = include_str!("../charts/firstlight/values.yaml");
const SCHEMA: &str = include_str!("../charts/firstlight/values.schema.json");
const ALERTS: &str = include_str!("../charts/firstlight/files/alerts.yaml");
const DASHBOARD: &str = include_str!("../charts/firstlight/files/dashboard.json");
const README: &str = include_str!("../charts/firstlight/README.md");

fn chart() -> PathBuf {
    Path::new(support::ROOT).join("charts/firstlight")
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

fn base64(byte: u8) -> String {
    BASE64_STANDARD.encode([byte; 32])
}

/// Returns the master secret of [`operator`], as `firstlight wrap --for-control-planes` writes it.
fn encrypted() -> String {
    let secret = |byte| Secret::new(vec![byte; 32]);
    let kms = MasterSecret::new(secret(2), secret(3)).unwrap();
    wrapping_key::encrypt(kms.uri().as_bytes(), &wrapping_key::of(&kms)).unwrap()
}

/// Returns the values that the chart requires, and in addition `more`.
fn values(more: Value) -> Value {
    let mut values = json!({
        "image": "example.com/a:1",
        "attestationPolicy": POLICY,
        "measurementSalt": base64(1),
        "masterSecret": {"encrypted": encrypted()},
    });
    for (name, value) in more.as_object().unwrap() {
        values[name] = value.clone();
    }
    values
}

/// Runs Helm on the chart. The values go through standard input, which no other user can read.
fn helm(command: &[&str], values: &Value) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let mut running = Command::new(tool("helm.sh"))
        .args(["--namespace", NAMESPACE])
        .args(command)
        .arg(chart())
        .args(["--values", "-", "--kube-version", "1.34.4"])
        .env("HELM_CACHE_HOME", dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = running.stdin.take().unwrap();
    input.write_all(values.to_string().as_bytes()).unwrap();
    drop(input);
    running.wait_with_output().unwrap()
}

/// Returns the objects that Helm makes of the chart with these values, which `helm lint` accepts.
fn objects(values: &Value) -> Vec<Value> {
    let lint = helm(&["lint", "--strict"], values);
    let said = text(&lint.stdout);
    assert!(lint.status.success(), "{said}{}", text(&lint.stderr));
    let made = helm(&["template", "firstlight"], values);
    assert!(made.status.success(), "{}", text(&made.stderr));
    yaml::documents(text(&made.stdout)).unwrap()
}

/// Returns the path that a script prints after it has fetched or built what is missing, which can take minutes.
fn tool(script: &str) -> PathBuf {
    let tool = Path::new(support::ROOT).join("tools").join(script);
    let output = Command::new(tool).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "tools/{script}: {said}");
    text(&output.stdout).trim().into()
}

fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let is_it = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    let found = objects.iter().find(is_it);
    found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

/// Returns whether an object exists only while `helm test` runs.
fn is_hook(object: &Value) -> bool {
    object["metadata"]["annotations"]["helm.sh/hook"] == "test"
}

/// Returns the paths of all values with their defaults. The schema says which objects have values of their own.
fn leaves(path: &str, schema: &Value, values: &Value, out: &mut Vec<(String, Value)>) {
    let properties = schema["properties"].as_object().unwrap();
    let values = values.as_object().unwrap();
    for name in properties
        .keys()
        .filter(|name| path.is_empty() && *name != "global" || !path.is_empty())
    {
        assert!(
            values.contains_key(name),
            "values.yaml has no default of {path}{name}, which is in the schema"
        );
    }
    for (name, value) in values {
        let path = format!("{path}{name}");
        let schema = properties.get(name);
        let schema = schema.unwrap_or_else(|| panic!("values.schema.json has no {path}"));
        let is_closed = schema["additionalProperties"] == false;
        let has_all = value.as_object().is_some_and(|value| !value.is_empty());
        if is_closed && has_all {
            leaves(&format!("{path}."), schema, value, out)
        } else {
            out.push((path, value.clone()))
        }
    }
}

#[test]
fn each_value_is_in_the_schema_and_with_its_default_in_the_readme() {
    let mut wanted = Vec::new();
    let schema = serde_json::from_str(SCHEMA).unwrap();
    leaves("", &schema, &yaml::document(VALUES).unwrap(), &mut wanted);
    let rows = README.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
        let name = cells.next()?.trim_end_matches('`');
        let default = cells.next()?.trim_matches('`');
        Some((name.to_owned(), serde_json::from_str(default).unwrap()))
    });
    let rows: Vec<(String, Value)> = rows.collect();
    for row in &wanted {
        assert!(
            rows.contains(row),
            "the README of the chart must have the row | `{}` | `{}` |",
            row.0,
            row.1
        );
    }
    assert_eq!(rows.len(), wanted.len(), "the README has too many values");
}

/// Returns a folder with an operator's files: those of [`values`].
fn operator() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let secret = json!({"key": base64(2), "salt": base64(3)});
    let state = json!({"version": 1, "measurementSalt": base64(1)});
    for (name, content) in [
        ("policy.json", POLICY),
        ("firstlight-mastersecret.json", &secret.to_string()),
        ("firstlight-state.json", &state.to_string()),
    ] {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    dir
}

#[test]
#[ignore = "needs Helm: make kubernetes-api"]
fn firstlight_apply_and_helm_make_the_same_objects() {
    let dir = operator();
    let printed = Command::new(support::program::built("firstlight"))
        .args(["apply", "--print", "--policy", "policy.json"])
        .args(["--image", "example.com/a:1", "--cloud-provider", "QEMU"])
        .args(["--metadata", "http://10.9.0.1:81"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let mut ours: Value = serde_json::from_slice(&printed.stdout).unwrap();
    let ours = ours["items"].as_array_mut().unwrap();
    let mut theirs = objects(&values(
        json!({"joinService": {"metadata": "http://10.9.0.1:81"}}),
    ));
    // Hooks are not part of a release.
    theirs.retain(|object| !is_hook(object));
    let place = |object: &Value| Object::of(object).unwrap().to_string();
    ours.sort_by_key(place);
    theirs.sort_by_key(place);
    let places = |objects: &[Value]| objects.iter().map(place).collect::<Vec<_>>();
    assert_eq!(places(ours), places(&theirs));
    for (ours, theirs) in ours.iter_mut().zip(&mut theirs) {
        // Only this label differs: it says what manages the object.
        for (object, manager) in [(&mut *ours, "firstlight"), (&mut *theirs, "Helm")] {
            let labels = object["metadata"]["labels"].as_object_mut().unwrap();
            let label = labels.remove("app.kubernetes.io/managed-by");
            assert_eq!(label.unwrap(), manager);
        }
        assert_eq!(ours, theirs);
    }
}

#[test]
#[ignore = "needs Helm: make kubernetes-api"]
fn values_that_would_do_harm_or_are_not_known_are_refused() {
    let refused = |wrong: Value, problem: &str| {
        let refused = helm(&["template", "firstlight"], &values(wrong.clone()));
        let said = text(&refused.stderr);
        let is_refused = !refused.status.success() && said.contains("don't meet");
        assert!(is_refused && said.contains(problem), "{wrong}: {said}");
    };
    let policy = |policy: Value| json!({"attestationPolicy": policy});
    let measured = |registers: Value| policy(json!({"measurements": registers}));
    // The sentences that the user sees.
    for (wrong, problem) in [
        (
            json!({"image": {"tag": "1"}}),
            "at '/image/repository': minLength: got 0, want 1",
        ),
        (
            json!({"image": {"repository": "a:1"}}),
            "at '/image/repository': 'a:1' does not match pattern",
        ),
        (
            json!({"image": {"repository": "a", "tag": "a b"}}),
            "at '/image/tag': 'a b' does not match pattern",
        ),
        (
            json!({"image": {"repository": "a", "digest": "sha256:1"}}),
            "at '/image/digest': 'sha256:1' does not match pattern '^(sha256:[0-9a-f]{64})?$'",
        ),
        (
            json!({"image": {"repository": "a", "pullPolicy": "always"}}),
            "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'",
        ),
        (
            json!({"image": ""}),
            "at '/image': minLength: got 0, want 1",
        ),
        (
            json!({"joinService": {"nodePort": 29999}}),
            "at '/joinService/nodePort': minimum: got 29,999, want 30,000",
        ),
        (
            json!({"joinService": {"nodePort": 32768}}),
            "at '/joinService/nodePort': maximum: got 32,768, want 32,767",
        ),
        (
            json!({"joinService": {"migrateUntil": "2027-02-29"}}),
            "'2027-02-29' is not valid date: parsing time \"2027-02-29\": day out of range",
        ),
        (
            json!({"keyService": {"oldClientsUntil": "2027-02-29"}}),
            "at '/keyService/oldClientsUntil'",
        ),
        (
            json!({"joinService": {"migrateUntil": "2027-01-31T00:00:00Z"}}),
            "'2027-01-31T00:00:00Z' is not valid date",
        ),
        (
            json!({"joinService": {"podLabels": {"app.kubernetes.io/name": "a"}}}),
            "invalid propertyName 'app.kubernetes.io/name'",
        ),
        (
            json!({"joinService": {"podLabels": {"team": 1}}}),
            "at '/joinService/podLabels/team': got number, want string",
        ),
        (
            json!({"joinService": {"serviceAccount": {"annotations": {"a": 1}}}}),
            "at '/joinService/serviceAccount/annotations/a': got number, want string",
        ),
        (
            json!({"keyService": {"serviceAccount": {"name": "a"}}}),
            "at '/keyService/serviceAccount': additional properties 'name' not allowed",
        ),
        (
            json!({"joinService": {"env": [{"value": "a"}]}}),
            "at '/joinService/env/0': missing property 'name'",
        ),
        (
            json!({"keyService": {"env": [{"name": "A", "value": null}]}}),
            "at '/keyService/env/0/value': got null, want",
        ),
        (
            json!({"keyService": {"extraArgs": [1]}}),
            "at '/keyService/extraArgs/0': got number, want string",
        ),
        (
            policy("policy.json".into()),
            "at '/attestationPolicy': 'policy.json' does not match pattern",
        ),
        (
            policy(json!({"require": "strong"})),
            "at '/attestationPolicy': missing property 'measurements'",
        ),
        (
            policy(json!({"measurements": {"4": "0".repeat(64)}, "requier": "strong"})),
            "at '/attestationPolicy': additional properties 'requier' not allowed",
        ),
        (
            policy(json!({"measurements": {"4": "0".repeat(64)}, "require": "weak"})),
            "at '/attestationPolicy/require': value must be 'strong'",
        ),
        (
            policy(json!({"measurements": {"4": "0".repeat(64)}, "snp": {"flors": []}})),
            "invalid propertyName 'flors'",
        ),
        (
            policy(json!({"measurements": {"4": "0".repeat(64)}, "tdx": {"xfam": null}})),
            "at '/attestationPolicy/tdx/xfam': got null",
        ),
        (
            measured(json!({})),
            "at '/attestationPolicy/measurements': minProperties: got 0, want 1",
        ),
        (
            measured(json!({"32": "0".repeat(64)})),
            "invalid propertyName '32'",
        ),
        (
            measured(json!({"4": "00"})),
            "at '/attestationPolicy/measurements/4': '00' does not match pattern",
        ),
        (
            measured(json!({"4": {"warnOnly": true}})),
            "at '/attestationPolicy/measurements/4': missing property 'expected'",
        ),
    ] {
        refused(wrong, problem);
    }
    for (wrong, problem) in [
        (json!({"imagge": "a"}), "imagge"),
        (json!({"joinService": {"nodeprot": 1}}), "nodeprot"),
        (json!({"keyService": {"a": 1}}), "keyService"),
        (json!({"keyService": {"kms": {"ports": []}}}), "ports"),
        (json!({"masterSecret": {"a": 1}}), "masterSecret"),
        (json!({"masterSecret": {"encrypted": ""}}), "encrypted"),
        // Values of an earlier version: the API, and the values in the release's Secret, had the master secret.
        (
            json!({"masterSecret": {"key": base64(2), "salt": base64(3)}}),
            "masterSecret",
        ),
        (
            json!({"masterSecret": {"encrypted": base64(2)}}),
            "encrypted",
        ),
        (
            json!({"masterSecret": {"encrypted": encrypted(), "existingSecret": "a"}}),
            "masterSecret",
        ),
        // The DaemonSet and the NetworkPolicies would not find their pods.
        (
            json!({"joinService": {"podLabels": {"k8s-app": "a"}}}),
            "k8s-app",
        ),
        (
            json!({"keyService": {"podLabels": {"k8s-app": "join-service"}}}),
            "k8s-app",
        ),
        // Other nodes have no files of a control plane.
        (
            json!({"nodeSelector": {"node-role.kubernetes.io/control-plane": null}}),
            "nodeSelector",
        ),
        (json!({"priorityClassName": ""}), "priorityClassName"),
        (
            json!({"podDisruptionBudget": {"minAvailable": "50%"}}),
            "minAvailable",
        ),
        (json!({"imagePullSecrets": ["a"]}), "imagePullSecrets"),
        (
            json!({"metrics": {"serviceMonitor": {"interval": "often"}}}),
            "interval",
        ),
        (
            json!({"metrics": {"rules": {"docs": "docs.example"}}}),
            "docs",
        ),
    ] {
        refused(wrong, problem);
    }
    // Kubernetes treats a field with null as absent, and without a field that limits access, everybody has access.
    for (wrong, problem) in [
        (
            json!({"keyService": {"clients": [{"podSelector": {"matchLabels": null}}]}}),
            "matchLabels",
        ),
        (json!({"keyService": {"clients": [null]}}), "clients"),
        (json!({"keyService": {"clients": [{}]}}), "clients"),
        (
            json!({"joinService": {"metricsClients": [{"namespaceSelector": null}]}}),
            "namespaceSelector",
        ),
        (
            json!({"keyService": {"kms": {"ports": [{"port": null}]}}}),
            "port",
        ),
        (
            json!({"keyService": {"resources": {"limits": null}}}),
            "limits",
        ),
        (json!({"keyService": null}), "keyService"),
    ] {
        refused(wrong, problem);
    }
    let mut all = Vec::new();
    let schema = serde_json::from_str(SCHEMA).unwrap();
    leaves("", &schema, &yaml::document(VALUES).unwrap(), &mut all);
    for (path, _) in all {
        let names = path.rsplit('.');
        let last = path.rsplit('.').next().unwrap();
        let wrong = names.fold(Value::Null, |value, name| json!({ name: value }));
        refused(wrong, last);
    }
    // Without values, the chart cannot be installed.
    let missing = helm(&["template", "firstlight"], &json!({}));
    assert!(!missing.status.success());
    assert!(text(&missing.stderr).contains("image"));
}

#[test]
#[ignore = "needs Helm: make kubernetes-api"]
fn what_no_schema_can_check_is_refused_with_the_reason() {
    let refused = |command: &[&str], more: Value, problem: &str| {
        let refused = helm(command, &values(more.clone()));
        let said = text(&refused.stderr);
        let is_refused = !refused.status.success() && said.contains(problem);
        assert!(is_refused, "{command:?} {more}: {said}");
    };
    let template = ["template", "firstlight"];
    refused(
        &[&template[..], &["--namespace", "other"]].concat(),
        json!({}),
        "Firstlight cannot be installed into the namespace \"other\", only into kube-system: pass --namespace kube-system. \
         Kubernetes accepts bootstrap tokens",
    );
    for (policy, problem) in [
        (
            r#"{"measurements":"#,
            "attestationPolicy is not a JSON object: unexpected end of JSON input. Pass the file",
        ),
        (
            r#"{"measurements":{}}"#,
            "attestationPolicy has no registers in `measurements`, so it would accept every machine: expected {",
        ),
        (
            r#"{"measurements":[1]}"#,
            "attestationPolicy has no registers in `measurements`",
        ),
        (
            r#"{"measurements":{"32":"00"}}"#,
            "attestationPolicy: \"32\" is not a PCR: expected 0 to 31",
        ),
        (
            r#"{"measurements":{"4":{"expected":"00"}}}"#,
            "attestationPolicy: PCR 4: expected 64 hex digits (a TDX machine: 96), got \"00\"",
        ),
    ] {
        refused(&template, json!({"attestationPolicy": policy}), problem);
    }
    refused(
        &template,
        json!({"joinService": {"watchIssuer": "https://results.example"}}),
        "joinService.watchIssuer needs joinService.watch",
    );
    // `extraArgs` cannot replace an option that the chart sets: the chart knows all of them.
    let usual = objects(&values(json!({})));
    for (service, name) in [
        ("joinService", "join-service"),
        ("keyService", "key-service"),
        ("memberController", "member-controller"),
    ] {
        let set = find(&usual, "DaemonSet", name);
        let command = &set["spec"]["template"]["spec"]["containers"][0]["command"];
        let words = command.as_array().unwrap().iter();
        let options = words.filter_map(|word| word.as_str()?.strip_prefix("--"));
        let mut count = 0;
        for option in options {
            count += 1;
            refused(
                &template,
                json!({service: {"extraArgs": ["-v", format!("--{option}=a")]}}),
                &format!("{service}.extraArgs: the chart itself sets --{option}: use the value"),
            );
        }
        assert!(count > 5, "{command}");
    }
}

#[test]
#[ignore = "needs Helm: make kubernetes-api"]
fn an_image_is_composed_or_given_as_a_whole() {
    let digest = format!("sha256:{}", "0".repeat(64));
    for (image, reference, pulled) in [
        (json!("example.com/a:1"), "example.com/a:1", "IfNotPresent"),
        (
            json!({"repository": "example.com:5000/a"}),
            concat!("example.com:5000/a:", env!("CARGO_PKG_VERSION")),
            "IfNotPresent",
        ),
        (
            json!({"repository": "example.com/a", "tag": "2", "pullPolicy": "Always"}),
            "example.com/a:2",
            "Always",
        ),
        (
            json!({"repository": "example.com/a", "digest": digest}),
            &format!("example.com/a@{digest}"),
            "IfNotPresent",
        ),
        (
            json!({"repository": "example.com/a", "tag": "2", "digest": digest}),
            &format!("example.com/a:2@{digest}"),
            "IfNotPresent",
        ),
    ] {
        let objects = objects(&values(json!({"image": image})));
        let sets = ["join-service", "key-service", "member-controller"].map(|name| {
            let set = find(&objects, "DaemonSet", name);
            &set["spec"]["template"]["spec"]
        });
        let test = &find(&objects, "Pod", "firstlight-test")["spec"];
        for pod in sets.into_iter().chain([test]) {
            let container = &pod["containers"][0];
            assert_eq!(container["image"], reference);
            assert_eq!(container["imagePullPolicy"], pulled);
        }
    }
}

#[test]
#[ignore = "needs Helm: make kubernetes-api"]
fn a_policy_as_an_object_is_the_policy_as_json() {
    let policy: Value = serde_json::from_str(POLICY).unwrap();
    let objects = objects(&values(json!({"attestationPolicy": policy})));
    let data = &find(&objects, "ConfigMap", "join-config")["data"];
    let given = data["attestationConfig"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(given).unwrap(), policy);
}

#[test]
fn the_schema_has_all_words_of_a_policy_and_no_other_one() {
    // The services would refuse this text.
    let source = include_str!("../src/verifier/policy/field_names.rs");
    let words = source.split_once("const FIELDS: &str = r#\"").unwrap().1;
    let words = words.split_once("\"#;").unwrap().0;
    let words: Value = serde_json::from_str(words).unwrap();
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let policy = &schema["definitions"]["policy"]["properties"];
    let names = |object: &Value| -> BTreeSet<String> {
        let object = object.as_object().unwrap();
        object.keys().cloned().collect()
    };
    assert_eq!(names(policy), names(&words));
    for part in ["cloud", "tdx", "snp", "firmwareSignerConfig"] {
        let known = policy[part]["propertyNames"]["enum"].as_array().unwrap();
        let known = known.iter().map(|word| word.as_str().unwrap().to_owned());
        assert_eq!(
            known.collect::<BTreeSet<_>>(),
            names(&words[part]),
            "{part}"
        );
    }
    let image = &policy["alsoAccepted"]["items"]["properties"];
    assert_eq!(names(image), names(&words["alsoAccepted"]));
    let register = &schema["definitions"]["registers"]["additionalProperties"]["else"];
    assert_eq!(
        names(&register["properties"]),
        names(&words["measurements"][""])
    );
}

#[test]
fn the_chart_says_what_artifact_hub_shows() {
    let chart = yaml::document(&fs::read_to_string(chart().join("Chart.yaml")).unwrap()).unwrap();
    let icon = BASE64_STANDARD.encode(fs::read(self::chart().join("icon.svg")).unwrap());
    assert_eq!(
        chart["icon"],
        format!("data:image/svg+xml;base64,{icon}"),
        "Chart.yaml must have the content of icon.svg"
    );
    for name in ["version", "appVersion"] {
        assert_eq!(chart[name], env!("CARGO_PKG_VERSION"), "{name}");
    }
    for name in ["home", "kubeVersion", "description"] {
        assert!(chart[name].is_string(), "Chart.yaml has no {name}");
    }
    assert!(chart["sources"][0].is_string() && chart["maintainers"][0]["email"].is_string());
    let annotations = chart["annotations"].as_object().unwrap();
    assert!(
        annotations
            .keys()
            .all(|name| name.starts_with("artifacthub.io/"))
    );
    assert_eq!(annotations["artifacthub.io/category"], "security");
    // Helm refuses annotations that are not texts.
    assert!(annotations.values().all(Value::is_string));
}

/// Returns a value other than the default for each optional setting.
fn everything() -> Value {
    values(json!({
        "image": {"repository": "example.com/a", "tag": "2", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"example.com/zone": "a"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}},
        ]}},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "system-cluster-critical",
        "logFormat": "json",
        "podDisruptionBudget": {"minAvailable": 1},
        "metrics": {
            "serviceMonitor": {"enabled": true, "interval": "1m", "labels": {"release": "a"}},
            "rules": {"enabled": true, "docs": "https://docs.example/", "labels": {"release": "b"}},
            "dashboard": {"enabled": true, "labels": {"grafana_dashboard": "2"}},
        },
        "joinService": {
            "resources": {"requests": {"cpu": "20m"}, "limits": {"memory": "300Mi"}},
            "podLabels": {"team": "a"},
            "podAnnotations": {"example.com/note": "{{ not a template }}"},
            "serviceAccount": {"annotations": {"example.com/role": "a"}},
            "env": [{"name": "A", "value": "a"}],
            "extraArgs": ["-v", "-1"],
        },
        "memberController": {
            "resources": {"limits": {"memory": "200Mi"}},
            "podLabels": {"team": "c"},
            "podAnnotations": {"example.com/note": "c"},
            "serviceAccount": {"annotations": {"example.com/role": "c"}},
            "env": [{"name": "A", "value": "c"}],
            "extraArgs": ["-v", "2"],
        },
        "keyService": {
            "resources": {"limits": {"memory": "100Mi"}},
            "podLabels": {"team": "b"},
            "podAnnotations": {"example.com/note": "b"},
            "serviceAccount": {"annotations": {"example.com/role": "b"}},
            "env": [{"name": "A", "value": "b"}],
            "extraArgs": ["-v", "1"],
        },
    }))
}

/// Has the API server check an object by a dry run, and returns it with the server's defaults.
fn try_apply(object: &Value) -> Value {
    let client = Cluster::shared().client(&Stop::new());
    let at = Object::of(object).unwrap_or_else(|_| {
        let resource = match object["kind"].as_str().unwrap() {
            "PodDisruptionBudget" => Resource::namespaced("policy", "v1", "poddisruptionbudgets"),
            "ServiceMonitor" => Resource::namespaced(MONITORING, "v1", "servicemonitors"),
            "PrometheusRule" => Resource::namespaced(MONITORING, "v1", "prometheusrules"),
            "Pod" => PODS,
            kind => panic!("{kind}"),
        };
        let name = object["metadata"]["name"].as_str().unwrap();
        resource.in_namespace(NAMESPACE).named(name)
    });
    let accepted = client.try_apply(&at, object);
    accepted.unwrap_or_else(|error| panic!("{error}: {object:#}"))
}

/// Defines the resources of the Prometheus operator in the API server.
fn define_monitoring() {
    let client = Cluster::shared().client(&Stop::new()).within(PATIENCE);
    let folder = tool("prometheus-crds.sh");
    let group = "apiextensions.k8s.io";
    let definitions = Resource::cluster(group, "v1", "customresourcedefinitions");
    for name in ["servicemonitors", "prometheusrules"] {
        let file = folder.join(format!("monitoring.coreos.com_{name}.yaml"));
        let definition = yaml::document(&fs::read_to_string(file).unwrap()).unwrap();
        let at = definitions.named(definition["metadata"]["name"].as_str().unwrap());
        client.apply(&at, &definition).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let objects = Resource::namespaced(MONITORING, "v1", name).in_namespace(NAMESPACE);
        // The server serves a new resource only some time after it accepted its definition.
        while let Err(error) = client.list(&objects, &Selector::default()) {
            assert!(Instant::now() < deadline, "{error}");
            thread::sleep(Duration::from_millis(200));
        }
    }
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn the_api_server_accepts_the_objects_with_every_value_set() {
    define_monitoring();
    let objects = objects(&everything());
    let accepted: Vec<Value> = objects.iter().map(try_apply).collect();
    let version = env!("CARGO_PKG_VERSION");
    for (name, team, note, level) in [
        ("join-service", "a", "{{ not a template }}", "-1"),
        ("key-service", "b", "b", "1"),
        ("member-controller", "c", "c", "2"),
    ] {
        let set = find(&accepted, "DaemonSet", name);
        let template = &set["spec"]["template"];
        assert_eq!(
            template["metadata"]["labels"],
            json!({
                "app.kubernetes.io/name": name, "app.kubernetes.io/component": name,
                "app.kubernetes.io/instance": "firstlight", "app.kubernetes.io/version": version,
                "app.kubernetes.io/part-of": "firstlight", "k8s-app": name, "team": team,
            })
        );
        let account = find(&accepted, "ServiceAccount", name);
        assert_eq!(account["metadata"]["annotations"]["example.com/role"], team);
        let container = &template["spec"]["containers"][0];
        assert_eq!(container["env"], json!([{"name": "A", "value": team}]));
        assert_eq!(container["args"], json!(["-v", level]));
        assert_eq!(
            template["metadata"]["annotations"]["example.com/note"],
            note
        );
        let pod = &template["spec"];
        assert_eq!(pod["imagePullSecrets"], json!([{"name": "registry"}]));
        assert_eq!(
            pod["nodeSelector"],
            json!({"node-role.kubernetes.io/control-plane": "", "example.com/zone": "a"})
        );
        assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
        assert_eq!(pod["priorityClassName"], "system-cluster-critical");
        let preferred = "/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution";
        assert!(pod.pointer(preferred).is_some(), "{pod}");
        let budget = find(&accepted, "PodDisruptionBudget", name);
        assert_eq!(budget["spec"]["minAvailable"], 1);
        assert_eq!(
            budget["spec"]["selector"]["matchLabels"],
            set["spec"]["selector"]["matchLabels"]
        );
    }
    let join = find(&accepted, "DaemonSet", "join-service");
    assert_eq!(
        join["spec"]["template"]["spec"]["containers"][0]["resources"],
        json!({"requests": {"cpu": "20m", "memory": "16Mi"}, "limits": {"memory": "300Mi"}})
    );
    let monitor = find(&accepted, "ServiceMonitor", "firstlight");
    assert_eq!(
        monitor["metadata"]["labels"],
        json!({
            "app.kubernetes.io/name": "firstlight", "app.kubernetes.io/component": "metrics",
            "app.kubernetes.io/instance": "firstlight", "app.kubernetes.io/version": version,
            "app.kubernetes.io/part-of": "firstlight", "app.kubernetes.io/managed-by": "Helm",
            "helm.sh/chart": format!("firstlight-{version}"), "release": "a",
        })
    );
    let endpoint = &monitor["spec"]["endpoints"][0];
    assert_eq!(endpoint["interval"], "1m");
    for name in ["join-service", "key-service", "member-controller"] {
        let service = find(&accepted, "Service", &format!("{name}-metrics"));
        let labels = &service["metadata"]["labels"];
        let selected = monitor["spec"]["selector"]["matchLabels"].as_object();
        let is_selected = |(key, value): (&String, &Value)| labels[key] == *value;
        assert!(selected.unwrap().iter().all(is_selected), "{labels}");
        // The alerts know the job by it.
        assert_eq!(labels[monitor["spec"]["jobLabel"].as_str().unwrap()], name);
        let port = &service["spec"]["ports"][0];
        assert_eq!(port["name"], endpoint["port"]);
        let set = find(&accepted, "DaemonSet", name);
        let command = &set["spec"]["template"]["spec"]["containers"][0]["command"];
        let served = format!(r#""--metrics","*:{}""#, port["targetPort"]);
        assert!(command.to_string().contains(&served), "{command}");
    }
    let rules = find(&accepted, "PrometheusRule", "firstlight");
    let mut spec = rules["spec"].clone();
    for alert in spec["groups"][0]["rules"].as_array_mut().unwrap() {
        let section = alert["alert"].as_str().unwrap().to_lowercase();
        let annotations = alert["annotations"].as_object_mut().unwrap();
        assert_eq!(
            annotations.remove("runbook_url"),
            Some(format!("https://docs.example/alerts.html#{section}").into())
        );
    }
    assert_eq!(spec, yaml::document(ALERTS).unwrap());
    let dashboard = find(&accepted, "ConfigMap", "firstlight-dashboard");
    assert_eq!(dashboard["metadata"]["labels"]["grafana_dashboard"], "2");
    assert_eq!(dashboard["data"]["firstlight.json"], DASHBOARD);
}

/// Returns an object without what the server or a manager writes.
fn bare(object: &Value) -> Value {
    let mut bare = object.clone();
    let metadata = bare["metadata"].as_object_mut().unwrap();
    for field in [
        "managedFields",
        "resourceVersion",
        "generation",
        "annotations",
    ] {
        metadata.remove(field);
    }
    bare["metadata"]["labels"]["app.kubernetes.io/managed-by"] = Value::Null;
    bare["metadata"]["annotations"] = object["metadata"]["annotations"].clone();
    if let Some(annotations) = bare["metadata"]["annotations"].as_object_mut() {
        annotations.remove("deprecated.daemonset.template.generation");
    }
    bare
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn firstlight_apply_keeps_the_values_that_helm_has_set() {
    let cluster = Cluster::start();
    let client = cluster.client(&Stop::new()).within(PATIENCE);
    client.wait_ready(&mut |_| {}).unwrap();
    let mut given = everything();
    given["admission"] = json!({
        "cloudControllers": [{"kind": "ServiceAccount", "name": "controller", "namespace": "metallb-system"}],
        "cloudNodeManagers": [],
    });
    // without it, no client without a token is served
    let cilium = json!({"metadata": {"name": "cilium-config"}, "data": {
        "kube-proxy-replacement": "true", "enable-bpf-masquerade": "true", "enable-wireguard": "true", "encrypt-node": "true",
    }});
    let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
    client.create(&maps, &cilium).unwrap();
    let clients = |app: &str| json!([{"podSelector": {"matchLabels": {"app": app}}}]);
    for (service, name, value) in [
        ("joinService", "nodePort", json!(30_091)),
        ("joinService", "evidence", json!("")),
        ("joinService", "collateral", json!("/var/cache")),
        ("joinService", "kds", json!("https://kds.example")),
        ("joinService", "metricsClients", clients("a")),
        ("keyService", "metricsClients", clients("b")),
        ("keyService", "clients", clients("c")),
        (
            "keyService",
            "grants",
            json!("kube-system/join-service=disk,ssh;anyone=id:s3proxy-kek"),
        ),
        ("keyService", "oldClientsUntil", json!("2099-12-31")),
    ] {
        given[service][name] = value;
    }
    // only Helm makes the others, and `apply` does not touch them
    let objects = objects(&given);
    let installed: Vec<_> = (objects.iter().filter(|object| !is_hook(object)))
        .filter_map(|object| Some((Object::of(object).ok()?, object)))
        .map(|(at, object)| (client.create(&at.collection(), object).unwrap(), at))
        .collect();
    assert_eq!(installed.len(), 84, "{installed:#?}");

    let dir = operator();
    fs::write(dir.path().join("admin.conf"), cluster.kubeconfig()).unwrap();
    let apply = |more: &[&str]| {
        let applied = Command::new(support::program::built("firstlight"))
            .args(["apply", "--policy=policy.json", "--kubeconfig=admin.conf"])
            .args(more)
            .current_dir(dir.path())
            .output()
            .unwrap();
        let told = text(&applied.stderr);
        assert!(applied.status.success(), "{told}");
        told.to_owned()
    };
    let told = apply(&["--image=example.com/a:2", "--skip-wait"]);
    for (before, at) in installed {
        let mut before = bare(&before);
        let after = bare(&client.get(&at).unwrap());
        if before["kind"] == "DaemonSet" {
            let container = "/spec/template/spec/containers/0";
            let container = before.pointer_mut(container).unwrap();
            let new = &after["spec"]["template"]["spec"]["containers"][0];
            for field in ["resources", "imagePullPolicy"] {
                let said = format!(
                    "{}: {field} becomes {}, the chart's, and was {}",
                    at.name(),
                    new[field],
                    container[field]
                );
                assert!(told.contains(&said), "{said}: {told}");
                container[field] = new[field].clone();
            }
        }
        assert_eq!(before, after, "{at}");
    }
    assert!(
        told.contains(r#"stays as it is: keyService.grants "kube-system/join-service=disk,ssh;anyone=id:s3proxy-kek""#),
        "{told}"
    );

    // a cluster that lost its policy keeps the old form; one without policy and join service is new, and requires the strong form
    let is_strong = || {
        let config = client.get(&maps.named("join-config")).unwrap();
        let policy = config["data"]["attestationConfig"].as_str().unwrap();
        Policy::from_json(policy).unwrap().requires_strong()
    };
    assert!(!is_strong());
    let lose = |object: &Object| {
        client.delete(object).unwrap();
        client.delete(&maps.named("join-config")).unwrap();
        apply(&["--skip-phases=services"]);
    };
    lose(&maps.named("cilium-config"));
    assert!(!is_strong());
    let set = DAEMON_SETS.in_namespace(NAMESPACE).named("join-service");
    lose(&set);
    assert!(is_strong());
}

/// Before the chart had the standard labels, objects had one of them. The API server refuses a DaemonSet with another selector than
/// before, so Helm could not upgrade it.
#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn a_release_with_the_labels_of_before_can_be_upgraded() {
    let client = Cluster::shared().client(&Stop::new()).within(PATIENCE);
    let objects = objects(&values(json!({})));
    for object in objects.iter().filter(|object| !is_hook(object)) {
        let at = Object::of(object).unwrap();
        let mut old = object.clone();
        old["metadata"]["labels"] = json!({"app.kubernetes.io/part-of": "firstlight"});
        let is_set = object["kind"] == "DaemonSet";
        if is_set {
            let labels = json!({"app.kubernetes.io/part-of": "firstlight", "k8s-app": at.name()});
            old["spec"]["selector"] = json!({"matchLabels": {"k8s-app": at.name()}});
            old["spec"]["template"]["metadata"]["labels"] = labels;
        }
        client.apply(&at, &old).unwrap();
        let new = client.apply(&at, object);
        let new = new.unwrap_or_else(|error| panic!("{at}: {error}"));
        assert_eq!(new["metadata"]["labels"], object["metadata"]["labels"]);
        if is_set {
            // The API server's error for another selector.
            let mut other = object.clone();
            let label = json!("firstlight");
            other["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] = label;
            let error = client.try_apply(&at, &other).unwrap_err().to_string();
            assert!(error.contains("field is immutable"), "{error}");
        }
        client.delete_if_there(&at).unwrap();
    }
}

#[test]
#[ignore = "needs Helm: make kubernetes-api"]
fn no_value_gives_an_account_a_right_or_opens_a_port() {
    let (usual, mut all) = (objects(&values(json!({}))), objects(&everything()));
    // An annotation of an account gives it no right in the cluster.
    for account in all.iter_mut().filter(|it| it["kind"] == "ServiceAccount") {
        let metadata = account["metadata"].as_object_mut().unwrap();
        assert!(metadata.remove("annotations").is_some());
    }
    let kinds = |kinds: &'static [&'static str]| {
        move |object: &&Value| kinds.iter().any(|kind| object["kind"] == *kind)
    };
    let of_release = |object: &&Value| !is_hook(object);
    let rights = kinds(&[
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "NetworkPolicy",
    ]);
    let (before, after): (Vec<_>, Vec<_>) = (
        usual.iter().filter(of_release).filter(&rights).collect(),
        all.iter().filter(of_release).filter(&rights).collect(),
    );
    assert!(!before.is_empty());
    assert_eq!(before, after);
    // Metrics are not part of the Service that every host serves.
    let ports = |name| &find(&all, "Service", name)["spec"]["ports"];
    assert_eq!(
        ports("join-service"),
        &find(&usual, "Service", "join-service")["spec"]["ports"]
    );
    for name in [
        "join-service-metrics",
        "key-service-metrics",
        "member-controller-metrics",
    ] {
        assert_eq!(find(&all, "Service", name)["spec"]["clusterIP"], "None");
    }
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn helm_test_may_ask_the_services_for_their_health_and_nothing_else() {
    let objects = objects(&everything());
    let hooks: Vec<Value> = objects.into_iter().filter(is_hook).collect();
    // No controller makes the account of pods without one.
    let client = Cluster::shared().client(&Stop::new());
    let accounts = Resource::namespaced("", "v1", "serviceaccounts").in_namespace(NAMESPACE);
    let account = json!({"metadata": {"name": "default"}});
    client.create_if_absent(&accounts, &account).unwrap();
    let hooks: Vec<Value> = hooks.iter().map(try_apply).collect();
    let names = |kind: &str| {
        let of_kind = hooks.iter().filter(|object| object["kind"] == kind);
        of_kind.count()
    };
    let counts = ["Service", "NetworkPolicy", "Pod"].map(names);
    assert_eq!((counts, hooks.len()), ([3, 3, 1], 7));
    let pod = &find(&hooks, "Pod", "firstlight-test");
    let (labels, spec) = (&pod["metadata"]["labels"], &pod["spec"]);
    // No service's selector finds it.
    assert_eq!(labels["k8s-app"], "firstlight-test");
    assert_eq!(spec["automountServiceAccountToken"], false);
    assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
    assert_eq!(spec["volumes"], Value::Null);
    let container = &spec["containers"][0];
    let context = &container["securityContext"];
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(
        container["command"],
        json!([
            "/join-service",
            "--check",
            "join-service-test.kube-system.svc:9091",
            "--check",
            "key-service-test.kube-system.svc:9000",
            "--check",
            "member-controller-test.kube-system.svc:9091"
        ])
    );
    for (name, port) in [
        ("join-service", 9091),
        ("key-service", 9000),
        ("member-controller", 9091),
    ] {
        let service = &find(&hooks, "Service", &format!("{name}-test"))["spec"];
        assert_eq!(service["selector"], json!({"k8s-app": name}));
        assert_eq!(service["ports"][0]["targetPort"], port);
        let policy = &find(&hooks, "NetworkPolicy", &format!("{name}-test"))["spec"];
        let of_test = json!({"matchLabels": {"k8s-app": "firstlight-test"}});
        let rule = json!([{"from": [{"podSelector": of_test}], "ports": [{"protocol": "TCP", "port": port}]}]);
        assert_eq!(
            (&policy["ingress"], &policy["egress"]),
            (&rule, &Value::Null)
        );
        assert_eq!(
            policy["podSelector"]["matchLabels"],
            json!({"k8s-app": name})
        );
    }
}

#[test]
fn the_program_of_helm_test_asks_servers_for_their_health() {
    let servers = [(); 2].map(|()| serve_health("127.0.0.1:0".parse().unwrap(), || true).unwrap());
    let addresses = servers.each_ref().map(|it| it.local_addr().to_string());
    let mut command = Command::new(support::program::built("join-service"));
    for address in &addresses {
        command.args(["--check", address]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let wanted = addresses.map(|address| format!("{address}: {address} is healthy\n"));
    assert_eq!(text(&output.stdout), wanted.concat());
}

/// Returns the names of the metrics that a service shows at its address for metrics.
fn exported(address: SocketAddr) -> BTreeSet<String> {
    let text = ureq::get(format!("http://{address}/metrics")).call();
    let text = text.unwrap().body_mut().read_to_string().unwrap();
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names = families.flat_map(|family| {
        let (name, kind) = family.split_once(' ').unwrap();
        let endings: &[&str] = match kind {
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        endings.iter().map(move |ending| format!("{name}{ending}"))
    });
    names.collect()
}

/// Returns the names of our metrics and the process's in an expression.
fn used(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("firstlight_") || word.starts_with("process_"))
}

/// Returns the values of all fields `expr` of a document.
fn expressions(document: &Value, out: &mut Vec<String>) {
    match document {
        Value::Object(fields) => {
            let expression = fields.get("expr").and_then(Value::as_str);
            out.extend(expression.map(str::to_owned));
            fields.values().for_each(|value| expressions(value, out));
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, out)),
        _ => {}
    }
}

#[test]
fn alerts_and_dashboard_have_the_metrics_that_the_services_export() {
    let dir = tempfile::tempdir().unwrap();
    let ca = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
    let ca = BASE64_STANDARD.encode(ca.cert.pem());
    // They start while the API server does not answer.
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:1", "certificate-authority-data": ca}}],
        "users": [{"name": "a", "user": {"token": "a"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    });
    for (name, content) in [
        ("kubeconfig", kubeconfig.to_string().as_bytes()),
        ("attestationConfig", POLICY.as_bytes()),
        ("measurementSalt", &[1; 32]),
        ("mastersecret", &[2; 32]),
        ("salt", &[3; 32]),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
    }
    let start = |name: &str, arguments: &[&str]| {
        let mut command = Command::new(support::program::built(name));
        command
            .args(["--metrics", "127.0.0.1:0", "--kubeconfig", "kubeconfig"])
            .args(arguments)
            .current_dir(dir.path());
        let program = Program::start(&mut command);
        let line = program.expect("metrics on http://");
        let address = line.split("http://").nth(1).unwrap();
        let address = address.strip_suffix("/metrics").unwrap().parse().unwrap();
        (program, address)
    };
    let secret = ["--master-secret", "mastersecret", "--salt", "salt"];
    let listen = ["--listen", "127.0.0.1:0"];
    let key_arguments = [&listen[..], &["--clients", "token"], &secret].concat();
    let (_key_service, keys) = start("key-service", &key_arguments);
    let client = ["--key-service", "127.0.0.1:1", "--config", "."];
    let client = [&client[..], &["--key-service-auth", "none"]].concat();
    let join_arguments = [&listen[..], &client].concat();
    // a service whose settings let it prove nothing raises no alert about this
    let (silent, joins) = start("join-service", &join_arguments);
    assert!(!exported(joins).contains("firstlight_join_proves_itself"));
    drop(silent);
    let join_arguments = [&join_arguments[..], &["--evidence", "evidence"]].concat();
    let (_join_service, joins) = start("join-service", &join_arguments);
    let watch_arguments = [
        &client[..],
        &["--watch", "600", "--watch-listen", "127.0.0.1:0"],
        &["--watch-issuer", "https://results.example"],
    ]
    .concat();
    let (_controller, members) = start("member-controller", &watch_arguments);
    let all = [keys, joins, members].map(exported);
    let exported: BTreeSet<String> = all.into_iter().flatten().collect();

    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut shown = Vec::new();
    expressions(&dashboard, &mut shown);
    let mut alerts = Vec::new();
    expressions(&yaml::document(ALERTS).unwrap(), &mut alerts);
    assert!(shown.len() > 20 && alerts.len() > 10);
    for expression in shown.iter().chain(&alerts) {
        let mut names = used(expression).peekable();
        assert!(
            names.peek().is_some() || expression.contains("up{"),
            "{expression} has no metric"
        );
        for name in names {
            assert!(
                exported.contains(name),
                "{expression}: no service exports {name}, only {exported:#?}"
            );
        }
    }
    // The dashboard shows all metrics of the services.
    let shown = shown.join(" ");
    let shown: BTreeSet<&str> = used(&shown).collect();
    for name in exported
        .iter()
        .filter(|name| name.starts_with("firstlight_"))
    {
        let is_shown = shown.contains(name.as_str());
        let is_sum_or_count = name.ends_with("_seconds_sum") || name.ends_with("_seconds_count");
        assert!(is_shown || is_sum_or_count, "the dashboard lacks {name}");
    }
    // docs/services.md explains each of them.
    let docs = fs::read_to_string(Path::new(support::ROOT).join("docs/services.md")).unwrap();
    for name in exported
        .iter()
        .filter(|name| name.starts_with("firstlight_"))
    {
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|ending| name.strip_suffix(ending))
            .unwrap_or(name);
        assert!(
            docs.contains(&format!("`{family}`")),
            "docs/services.md lacks {family}"
        );
    }
}

#[test]
#[ignore = "needs promtool: make kubernetes-api"]
fn alerts_fire_for_what_they_are_about() {
    for arguments in [
        ["check", "rules", "charts/firstlight/files/alerts.yaml"],
        ["test", "rules", "tests/data/alerts.yaml"],
    ] {
        let mut command = Command::new(tool("promtool.sh"));
        let output = command.args(arguments).current_dir(support::ROOT);
        let output = output.output().unwrap();
        let said = text(&output.stdout);
        assert!(output.status.success(), "{said}{}", text(&output.stderr));
    }
    // Each alert is among those that the tests expect.
    let tests = include_str!("data/alerts.yaml");
    let alerts = ALERTS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    for alert in alerts {
        assert!(tests.contains(&format!("alertname=\"{alert}\"")), "{alert}");
    }
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn an_existing_secret_keeps_the_master_secret_out_of_the_release() {
    let by_values = objects(&values(json!({})));
    // Helm keeps the Secret if the release is uninstalled, or names another Secret.
    let secret = find(&by_values, "Secret", "firstlight-mastersecret-849acca9");
    assert_eq!(
        secret["metadata"]["annotations"]["helm.sh/resource-policy"],
        "keep"
    );
    let existing = json!({"encrypted": "", "existingSecret": "my-secret"});
    let by_name = objects(&values(json!({"masterSecret": existing})));
    assert_eq!(by_name.len(), by_values.len() - 1);
    assert!(by_name.iter().all(|object| object["kind"] != "Secret"));
    let set = try_apply(find(&by_name, "DaemonSet", "key-service"));
    let volumes = set["spec"]["template"]["spec"]["volumes"].as_array();
    let secrets: Vec<_> = volumes
        .unwrap()
        .iter()
        .filter_map(|volume| volume.pointer("/secret/secretName"))
        .collect();
    assert_eq!(secrets, ["my-secret"]);
}

#[test]
#[ignore = "needs a kube-apiserver and Helm: make kubernetes-api"]
fn a_wrapped_master_secret_gets_the_way_to_its_service_and_the_time_to_wait() {
    let usual = objects(&values(json!({})));
    let variable =
        json!({"name": "AZURE_CLIENT_SECRET_FILE", "value": "/var/run/secrets/kms/secret"});
    let kms = json!({
        "enabled": true,
        "ports": [{"protocol": "TCP", "port": 8200}],
        "env": [variable],
        "credentialsSecret": "azure",
        "authoritiesConfigMap": "authorities",
    });
    let wrapped = json!({"encrypted": "", "existingSecret": "wrapped"});
    let all = objects(&values(
        json!({"masterSecret": wrapped, "keyService": {"kms": kms, "env": [{"name": "A", "value": "a"}]}}),
    ));
    // An empty list would be another object than the one that the API server has.
    let of_usual = find(&usual, "DaemonSet", "key-service");
    let container = &of_usual["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container.get("env"), None);
    // The list of permitted clients stays.
    let policy = |objects: &[Value]| find(objects, "NetworkPolicy", "key-service")["spec"].clone();
    let (before, after) = (policy(&usual), policy(&all));
    assert_eq!(before["ingress"], after["ingress"]);
    let rules = |policy: &Value| policy["egress"].as_array().unwrap().clone();
    assert_eq!(rules(&before), rules(&after)[..1]);
    assert_eq!(
        rules(&after)[1..],
        [
            json!({"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}),
            json!({"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}, {"ipBlock": {"cidr": "fd00:ec2::254/128"}}, {"ipBlock": {"cidr": "fd20:ce::254/128"}}], "ports": [{"protocol": "TCP", "port": 80}]}),
            json!({"ports": [{"protocol": "TCP", "port": 8200}]}),
        ]
    );
    // The join service reaches a pod that waits, and asks it for the reason.
    let waiting = try_apply(find(&all, "Service", "key-service-waiting"));
    assert_eq!(waiting["spec"]["publishNotReadyAddresses"], true);
    let asks = |objects: &[Value], addresses: &str| {
        let set = find(objects, "DaemonSet", "join-service");
        let command = &set["spec"]["template"]["spec"]["containers"][0]["command"];
        let command = command.as_array().unwrap();
        let option = command.iter().position(|word| word == "--key-service");
        assert_eq!(command[option.unwrap() + 1], addresses);
    };
    asks(&usual, "$(KEY_SERVICE_LOCAL_SERVICE_HOST):9443");
    asks(
        &all,
        "$(KEY_SERVICE_LOCAL_SERVICE_HOST):9443,$(KEY_SERVICE_WAITING_SERVICE_HOST):9443",
    );
    try_apply(find(&all, "NetworkPolicy", "key-service"));
    let set = try_apply(find(&all, "DaemonSet", "key-service"));
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    // The variables of both values.
    assert_eq!(
        container["env"],
        json!([{"name": "A", "value": "a"}, variable])
    );
    let probe = &container["startupProbe"];
    let seconds = |name: &str| probe[name].as_u64().unwrap();
    assert_eq!(seconds("periodSeconds") * seconds("failureThreshold"), 3600);
    let mounts = container["volumeMounts"].as_array().unwrap();
    for (name, path) in [
        ("vault", "/var/run/secrets/vault"),
        ("kms", "/var/run/secrets/kms"),
        ("authorities", "/etc/ssl/certs"),
    ] {
        let mount = mounts.iter().find(|mount| mount["name"] == name).unwrap();
        assert_eq!(
            (&mount["mountPath"], &mount["readOnly"]),
            (&json!(path), &json!(true))
        );
    }
    // The file is at the path where the program first looks for authorities.
    let volumes = pod["volumes"].as_array().unwrap();
    let authorities = volumes
        .iter()
        .find(|volume| volume["name"] == "authorities")
        .unwrap();
    let file = authorities["configMap"]["items"][0]["path"]
        .as_str()
        .unwrap();
    assert_eq!(format!("/etc/ssl/certs/{file}"), http::CA_BUNDLES[0]);
}
