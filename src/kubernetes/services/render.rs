//! Renders the manifests from the templates of the Helm chart in charts/firstlight, which is the
//! only source for installations with and without Helm.
//!
//! The templates of these objects use only a few forms of Go's template language. A PATH is below
//! `.Values`, `.Release` or `.Chart`. A test compares the result with Helm's. The other templates
//! of the chart are for clusters with Helm only.
//!
//! ```text
//!  {{ PATH | toJson }}                  JSON, which is valid YAML: a value cannot become anything else
//!  {{ concat PATH PATH | toJson }}      two lists as one
//!  {{ include "NAME" . | toJson }}      what a helper of _helpers.tpl returns ([`computed`])
//!  {{- include "NAME" . | nindent N }}  the lines of a definition in _labels.tpl, N columns to the right
//!  {{- if PATH }} .. {{- end }}         its lines if the value is not empty; `if not PATH`: if it is;
//!                                       `if concat PATH PATH`
//!  {{- range $key, $value := PATH }} .. {{- end }}
//!                                       its lines for each field of an object
//! ```

use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::super::NAMESPACE;
use super::super::yaml;
use super::master_secret;

const CHART: &str = include_str!("../../../charts/firstlight/Chart.yaml");
const VALUES: &str = include_str!("../../../charts/firstlight/values.yaml");
const LABELS: &str = include_str!("../../../charts/firstlight/templates/_labels.tpl");
/// The release name in the objects, and the program that manages them: with Helm, the operator's
/// name and Helm.
const RELEASE: &str = "firstlight";
const TEMPLATES: [(&str, &str); 9] = [
    (
        "join-config.yaml",
        include_str!("../../../charts/firstlight/templates/join-config.yaml"),
    ),
    (
        "key-service.yaml",
        include_str!("../../../charts/firstlight/templates/key-service.yaml"),
    ),
    (
        "join-service.yaml",
        include_str!("../../../charts/firstlight/templates/join-service.yaml"),
    ),
    (
        "join-service-limits.yaml",
        include_str!("../../../charts/firstlight/templates/join-service-limits.yaml"),
    ),
    (
        "member-controller.yaml",
        include_str!("../../../charts/firstlight/templates/member-controller.yaml"),
    ),
    (
        "member-controller-limits.yaml",
        include_str!("../../../charts/firstlight/templates/member-controller-limits.yaml"),
    ),
    (
        "joining-nodes.yaml",
        include_str!("../../../charts/firstlight/templates/joining-nodes.yaml"),
    ),
    (
        "admission-objects.yaml",
        include_str!("../../../charts/firstlight/templates/admission-objects.yaml"),
    ),
    (
        "admission.yaml",
        include_str!("../../../charts/firstlight/templates/admission.yaml"),
    ),
];
/// Objects on which others depend come first, as in Helm. The limits of a role come before the
/// role. What limits everybody comes last, after the roles of the accounts that may pass.
const ORDER: [&str; 12] = [
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "NetworkPolicy",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "Service",
    "DaemonSet",
];

/// Why the manifests cannot be rendered.
#[derive(Debug, PartialEq, Eq)]
pub enum RenderError {
    /// A value is null.
    Null(String),
    /// A value would permit everything.
    Open(String),
    /// A file of the chart, or what is made of it, is not YAML.
    Yaml(&'static str, yaml::Error),
    /// A template has an unknown form, or needs a value that does not exist.
    Template(&'static str, TemplateFault),
}

/// What is wrong with a template.
#[derive(Debug, PartialEq, Eq)]
pub enum TemplateFault {
    /// A form is none of those above; a clause.
    Form(&'static str),
    /// There is no value at a path.
    NoValue(String),
    /// The value at a path has not this type.
    Type(String, &'static str),
    /// Something is wrong with an action.
    Action(String, Box<TemplateFault>),
}

impl fmt::Display for RenderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RenderError::Null(path) => {
                write!(f, "the value {path} is null: give it, or leave it out")
            }
            RenderError::Open(name) => write!(
                f,
                "the value {name} is not a list with an entry that limits something: it would permit everything"
            ),
            RenderError::Yaml(name, error) => write!(f, "{name}: {error}"),
            RenderError::Template(name, fault) => write!(f, "{name}: {fault}"),
        }
    }
}

impl fmt::Display for TemplateFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateFault::Form(why) => f.write_str(why),
            TemplateFault::NoValue(path) => write!(f, "there is no value {path}"),
            TemplateFault::Type(path, expected) => write!(f, "{path} is not {expected}"),
            TemplateFault::Action(action, fault) => write!(f, "{{{{{action}}}}}: {fault}"),
        }
    }
}

impl std::error::Error for RenderError {}

/// Returns the chart's own values.
pub fn defaults() -> Result<Value, RenderError> {
    yaml::document(VALUES).map_err(|error| RenderError::Yaml("values.yaml", error))
}

/// Returns the objects with these values of the chart, in the order of their creation.
pub fn objects(more: Value) -> Result<Vec<Value>, RenderError> {
    let mut values = defaults()?;
    merge(&mut values, more);
    check(&values)?;
    let chart = yaml::document(CHART).map_err(|error| RenderError::Yaml("Chart.yaml", error))?;
    let context = json!({
        "Values": values,
        "Release": {"Name": RELEASE, "Namespace": NAMESPACE, "Service": RELEASE},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    });
    let mut objects = Vec::new();
    for (name, template) in TEMPLATES {
        let text = fill(template, &context).map_err(|fault| RenderError::Template(name, fault))?;
        objects.extend(yaml::documents(&text).map_err(|error| RenderError::Yaml(name, error))?);
    }
    let place = |object: &Value| {
        let place = ORDER.iter().position(|kind| object["kind"] == **kind);
        place
            .filter(|_| !limits_everybody(object))
            .unwrap_or(ORDER.len())
    };
    objects.sort_by_key(place);
    Ok(objects)
}

/// Returns whether an object is what puts a policy of admission.yaml or admission-objects.yaml in force.
fn limits_everybody(object: &Value) -> bool {
    object["kind"] == "ValidatingAdmissionPolicyBinding" && !limits_own(&object["metadata"]["name"])
}

/// Returns whether the policy of this name limits an account of our own.
fn limits_own(name: &Value) -> bool {
    name == "join-service" || name == "member-controller"
}

/// Merges values: fields of `more` replace those of `values`, as in Helm.
fn merge(values: &mut Value, more: Value) {
    match (values, more) {
        (Value::Object(values), Value::Object(more)) => {
            for (key, value) in more {
                merge(values.entry(key).or_insert(Value::Null), value);
            }
        }
        (value, more) => *value = more,
    }
}

/// The lists that, if empty, would make a NetworkPolicy allow everything.
const GUARDS: [&str; 5] = [
    "/joinService/metricsClients",
    "/joinService/watchClients",
    "/keyService/clients",
    "/keyService/metricsClients",
    "/keyService/kms/ports",
];

/// Refuses null values, like the chart's values.schema.json: to Kubernetes, a field with null is
/// absent, so null would remove a restriction.
fn check(values: &Value) -> Result<(), RenderError> {
    if let Some(path) = null_in(values) {
        return Err(RenderError::Null(path));
    }
    for path in GUARDS {
        let list = values.pointer(path).and_then(Value::as_array);
        let is_open = |entry: &Value| {
            entry.as_object().is_none_or(|entry| entry.is_empty())
                || path.ends_with("ports") && entry.get("port").is_none()
        };
        if list.is_none_or(|list| list.is_empty() || list.iter().any(is_open)) {
            return Err(RenderError::Open(path[1..].replace('/', ".")));
        }
    }
    Ok(())
}

/// Returns the path of the first null in a value.
fn null_in(value: &Value) -> Option<String> {
    let within = |(name, value): (String, &Value)| {
        let path = null_in(value)?;
        Some(name + if path.is_empty() { "" } else { "." } + &path)
    };
    match value {
        Value::Null => Some(String::new()),
        Value::Array(values) => {
            let mut named = values.iter().enumerate();
            named.find_map(|(at, value)| within((at.to_string(), value)))
        }
        Value::Object(values) => values
            .iter()
            .find_map(|(name, value)| within((name.clone(), value))),
        _ => None,
    }
}

/// Renders a template with these values.
fn fill(template: &str, context: &Value) -> Result<String, TemplateFault> {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    let mut is_in_block = false;
    while let Some((before, action)) = rest.split_once("{{") {
        let (action, after) = action
            .split_once("}}")
            .ok_or(TemplateFault::Form("{{ without }}"))?;
        rest = after;
        let problem = |fault| TemplateFault::Action(action.to_owned(), Box::new(fault));
        let form = |expected| problem(TemplateFault::Form(expected));
        let Some(control) = action.strip_prefix("- ").map(str::trim) else {
            let expression = action.trim().strip_suffix("| toJson");
            let expression = expression.ok_or_else(|| form("expected {{ .PATH | toJson }}"))?;
            let value = evaluate(expression.trim(), context).map_err(problem)?;
            out.push_str(before);
            out.push_str(&value.to_string());
            continue;
        };
        // The white space before the action belongs to it.
        out.push_str(before.trim_end());
        if let Some(name) = control.strip_prefix("include ") {
            out.push_str(&lines(name, context).map_err(problem)?);
            continue;
        }
        if is_in_block && control == "end" {
            is_in_block = false;
            continue;
        }
        let block = || {
            let block = rest.split_once("{{- end }}");
            block.ok_or_else(|| form("expected {{- end }}"))
        };
        if let (Some(condition), false) = (control.strip_prefix("if "), is_in_block) {
            let negated = condition.strip_prefix("not ");
            let value = evaluate(negated.unwrap_or(condition), context).map_err(problem)?;
            if is_empty(&value) == negated.is_some() {
                is_in_block = true;
            } else {
                rest = block()?.1;
            }
        } else if let (Some(path), false) =
            (control.strip_prefix("range $key, $value := "), is_in_block)
        {
            let fields = lookup(path, context).map_err(problem)?.as_object();
            let fields = fields.ok_or_else(|| form("expected an object"))?;
            let (body, after) = block()?;
            for (key, value) in fields {
                let field = json!({"$key": key, "$value": value});
                out.push_str(fill(body, &field)?.trim_end());
            }
            rest = after;
        } else {
            return Err(form("expected {{- if .PATH }} .. {{- end }}"));
        }
    }
    if is_in_block {
        Err(TemplateFault::Form("{{- if without {{- end }}"))
    } else {
        Ok(out + rest)
    }
}

/// Returns the value at a path, or the key or the value of a `range`.
fn lookup<'a>(path: &str, context: &'a Value) -> Result<&'a Value, TemplateFault> {
    let path = path.trim();
    let below = path.strip_prefix('.');
    let below = below.or_else(|| path.starts_with('$').then_some(path));
    below
        .ok_or(TemplateFault::Form(
            "expected a path that begins with a dot",
        ))?
        .split('.')
        .try_fold(context, |value, key| value.get(key))
        .ok_or_else(|| TemplateFault::NoValue(path.to_owned()))
}

/// Returns what an action inserts as JSON.
fn evaluate(expression: &str, context: &Value) -> Result<Value, TemplateFault> {
    if let Some(paths) = expression.strip_prefix("concat ") {
        let mut all = Vec::new();
        for path in paths.split_whitespace() {
            let list = lookup(path, context)?.as_array();
            let list = list.ok_or_else(|| TemplateFault::Type(path.to_owned(), "a list"));
            all.extend_from_slice(list?);
        }
        return Ok(Value::Array(all));
    }
    match expression.strip_prefix("include ") {
        Some(name) => computed(name, context),
        None => lookup(expression, context).cloned(),
    }
}

/// Returns the result of a helper in _helpers.tpl. The operator gives the complete image reference,
/// and the policy as JSON.
fn computed(name: &str, context: &Value) -> Result<Value, TemplateFault> {
    let text = |path: &str| {
        let text = lookup(path, context)?.as_str();
        text.ok_or_else(|| TemplateFault::Type(path.to_owned(), "a text"))
    };
    Ok(match name {
        r#""firstlight.image" ."# => text(".Values.image")?.into(),
        r#""firstlight.imagePullPolicy" ."# => "IfNotPresent".into(),
        r#""firstlight.policy" ."# => text(".Values.attestationPolicy")?.into(),
        r#""firstlight.version" ."# => text(".Chart.AppVersion")?.replace('+', "_").into(),
        r#""firstlight.chart" ."# => {
            let (name, version) = (text(".Chart.Name")?, text(".Chart.Version")?);
            format!("{name}-{version}").replace('+', "_").into()
        }
        r#""firstlight.masterSecret" ."# => match text(".Values.masterSecret.existingSecret")? {
            "" => master_secret::name_of(text(".Values.masterSecret.encrypted")?).into(),
            existing => existing.into(),
        },
        r#""firstlight.masterSecretData" ."# => BASE64_STANDARD
            .encode(text(".Values.masterSecret.encrypted")?)
            .into(),
        _ => return Err(TemplateFault::Form("there is no such helper")),
    })
}

/// Returns the lines of a definition in _labels.tpl: `"NAME" . | nindent N`.
fn lines(include: &str, context: &Value) -> Result<String, TemplateFault> {
    let parts = include.split_once(" . | nindent ");
    let (name, columns) = parts.ok_or(TemplateFault::Form(
        "expected {{- include \"NAME\" . | nindent N }}",
    ))?;
    let columns: usize = columns
        .parse()
        .map_err(|_| TemplateFault::Form("expected a number of columns"))?;
    let start = format!("{{{{- define {name} -}}}}");
    let found = LABELS.split_once(&start);
    let body = found.and_then(|(_, rest)| rest.split_once("{{- end }}"));
    let (body, _) = body.ok_or(TemplateFault::Form("there is no such definition"))?;
    let indent = format!("\n{}", " ".repeat(columns));
    // The definition begins and ends without the white space around it.
    let filled = fill(body.trim(), context)?;
    Ok(filled
        .split('\n')
        .map(|line| indent.clone() + line)
        .collect())
}

/// Returns whether Go's templates treat a value as false.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(value) => value.as_f64() == Some(0.0),
        Value::String(value) => value.is_empty(),
        Value::Array(value) => value.is_empty(),
        Value::Object(value) => value.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::settings;
    use super::super::{
        JOIN_SERVICE_ACCOUNT, JOIN_SERVICE_GRANT, KEY_SERVICE_AUDIENCE, MetadataService,
        ServiceSettings, TICKET_GROUP, manifests,
    };
    use super::*;
    use crate::client::Object;
    use crate::wrapping_key;

    #[test]
    fn the_key_service_is_in_the_group_that_may_read_the_wrapping_key() {
        let objects = manifests(&settings()).unwrap();
        let is_it = |object: &&Value| {
            object["kind"] == "DaemonSet" && object["metadata"]["name"] == "key-service"
        };
        let set = objects.iter().find(is_it).unwrap();
        let context = &set["spec"]["template"]["spec"]["securityContext"];
        assert_eq!(context["supplementalGroups"], json!([wrapping_key::GROUP]));
        assert_ne!(context["runAsGroup"], wrapping_key::GROUP);
    }

    #[test]
    fn every_object_has_a_path_and_dependencies_come_first() {
        let objects = manifests(&settings()).unwrap();
        let places: Vec<_> = objects
            .iter()
            .map(|object| Object::of(object).unwrap().to_string())
            .collect();
        assert_eq!(
            places,
            [
                "validatingadmissionpolicies.admissionregistration.k8s.io join-service",
                "validatingadmissionpolicies.admissionregistration.k8s.io member-controller",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-objects",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-controllers",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-nodes",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-pods",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-deletions",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-workers",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-endpoints",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-accounts",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-records",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-volumes",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-addresses",
                "validatingadmissionpolicies.admissionregistration.k8s.io firstlight-removed-nodes",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io join-service",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io member-controller",
                "networkpolicies.networking.k8s.io kube-system/key-service",
                "networkpolicies.networking.k8s.io kube-system/join-service",
                "networkpolicies.networking.k8s.io kube-system/member-controller",
                "serviceaccounts kube-system/key-service",
                "serviceaccounts kube-system/join-service",
                "serviceaccounts kube-system/member-controller",
                "secrets kube-system/firstlight-mastersecret-849acca9",
                "configmaps kube-system/join-config",
                "configmaps kube-system/key-service-ca",
                "clusterroles.rbac.authorization.k8s.io firstlight-key-service",
                "clusterroles.rbac.authorization.k8s.io join-service",
                "clusterroles.rbac.authorization.k8s.io member-controller",
                "clusterroles.rbac.authorization.k8s.io firstlight-joining-nodes",
                "clusterroles.rbac.authorization.k8s.io firstlight-pods",
                "clusterroles.rbac.authorization.k8s.io firstlight-deletions",
                "clusterroles.rbac.authorization.k8s.io firstlight-bindings",
                "clusterroles.rbac.authorization.k8s.io firstlight-endpoints",
                "clusterroles.rbac.authorization.k8s.io firstlight-addresses",
                "clusterroles.rbac.authorization.k8s.io firstlight-own-addresses",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-key-service",
                "clusterrolebindings.rbac.authorization.k8s.io join-service",
                "clusterrolebindings.rbac.authorization.k8s.io member-controller",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-joining-nodes",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-pods",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-deletions",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-bindings",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-endpoints",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-addresses",
                "clusterrolebindings.rbac.authorization.k8s.io firstlight-own-addresses",
                "roles.rbac.authorization.k8s.io kube-system/key-service",
                "roles.rbac.authorization.k8s.io kube-system/join-service",
                "roles.rbac.authorization.k8s.io kube-system/member-controller",
                "roles.rbac.authorization.k8s.io kube-system/firstlight-joining-nodes",
                "roles.rbac.authorization.k8s.io kube-system/firstlight-nodes",
                "roles.rbac.authorization.k8s.io kube-system/firstlight-controllers",
                "roles.rbac.authorization.k8s.io kube-system/firstlight-objects",
                "rolebindings.rbac.authorization.k8s.io kube-system/key-service",
                "rolebindings.rbac.authorization.k8s.io kube-system/join-service",
                "rolebindings.rbac.authorization.k8s.io kube-system/member-controller",
                "rolebindings.rbac.authorization.k8s.io kube-system/firstlight-joining-nodes",
                "rolebindings.rbac.authorization.k8s.io kube-system/firstlight-nodes",
                "rolebindings.rbac.authorization.k8s.io kube-system/firstlight-controllers",
                "rolebindings.rbac.authorization.k8s.io kube-system/firstlight-objects",
                "services kube-system/key-service",
                "services kube-system/key-service-local",
                "services kube-system/join-service",
                "daemonsets.apps kube-system/key-service",
                "daemonsets.apps kube-system/join-service",
                "daemonsets.apps kube-system/member-controller",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-objects",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-controllers",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-nodes",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-pods",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-deletions",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-workers",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-endpoints",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-accounts",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-records",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-volumes",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-addresses",
                "validatingadmissionpolicybindings.admissionregistration.k8s.io firstlight-removed-nodes",
            ]
        );
    }

    /// Returns a line for each rule of a role: its resources with their groups, names and verbs.
    fn lines_of(role: &Value) -> Vec<String> {
        let words = |rule: &Value, field: &str| {
            let words = rule[field].as_array().into_iter().flatten();
            let words: Vec<_> = words.map(|word| word.as_str().unwrap()).collect();
            words.join(",")
        };
        let line = |rule: &Value| {
            let (groups, names) = (words(rule, "apiGroups"), words(rule, "resourceNames"));
            let groups = Some(groups).filter(|groups| !groups.is_empty());
            let names = Some(names).filter(|names| !names.is_empty());
            format!(
                "  {}{}{}: {}",
                words(rule, "resources"),
                groups
                    .map(|groups| format!(".{groups}"))
                    .unwrap_or_default(),
                names.map(|names| format!(" {names}")).unwrap_or_default(),
                words(rule, "verbs"),
            )
        };
        role["rules"].as_array().unwrap().iter().map(line).collect()
    }

    /// Returns the roles of all objects, who has each, and its rules.
    fn rights(objects: &[Value]) -> String {
        let mut lines = vec![];
        for kind in ["ClusterRole", "Role"] {
            for role in objects.iter().filter(|object| object["kind"] == kind) {
                let name = &role["metadata"]["name"];
                let is_of = |object: &&Value| {
                    object["kind"] == format!("{kind}Binding") && object["roleRef"]["name"] == *name
                };
                let subjects = objects.iter().filter(is_of);
                let subjects = subjects.flat_map(|binding| binding["subjects"].as_array().unwrap());
                let subjects: Vec<_> = subjects
                    .map(|subject| match subject["namespace"].as_str() {
                        Some(namespace) => {
                            format!("{namespace}/{}", subject["name"].as_str().unwrap())
                        }
                        None => subject["name"].as_str().unwrap().to_owned(),
                    })
                    .collect();
                lines.push(format!(
                    "{kind} {} of {}",
                    name.as_str().unwrap(),
                    subjects.join(" ")
                ));
                lines.extend(lines_of(role));
            }
        }
        lines.join("\n")
    }

    /// All permissions, with everything on. A new one needs a reason: can it have the name of an object, and can what it writes be
    /// limited in join-service-limits.yaml or member-controller-limits.yaml?
    #[test]
    fn each_account_has_exactly_these_permissions() {
        let settings = ServiceSettings {
            watch: Some("600".into()),
            watch_issuer: Some("https://results.example".into()),
            ..settings()
        };
        let expected = "\
ClusterRole firstlight-key-service of kube-system/key-service
  tokenreviews.authentication.k8s.io: create
  volumeattachments.storage.k8s.io: get,list
  csidrivers.storage.k8s.io: get
  nodes: get,list
  persistentvolumes,persistentvolumeclaims: get
  pods: list
  ciliumnodes.cilium.io: list
ClusterRole join-service of kube-system/join-service
  nodes: list,watch
  events.events.k8s.io: create
  nodeversions.update.edgeless.systems: list,watch
  joiningnodes.update.edgeless.systems: get,create,patch,delete
ClusterRole member-controller of kube-system/member-controller
  nodes: list,watch
  nodes: get,update
  nodes/status: patch
  nodes/attestation.firstlight: assign
  events.events.k8s.io: create
  certificatesigningrequests.certificates.k8s.io: list,watch
  certificatesigningrequests/approval.certificates.k8s.io: update
  signers.certificates.k8s.io kubernetes.io/kube-apiserver-client-kubelet,kubernetes.io/kubelet-serving: approve
  nodeversions.update.edgeless.systems: list,watch
  joiningnodes.update.edgeless.systems: get,delete
ClusterRole firstlight-joining-nodes of system:bootstrappers:firstlight:join-ticket
  nodes: get
  certificatesigningrequests.certificates.k8s.io: create,get,list,watch
ClusterRole firstlight-pods of kube-system/daemon-set-controller system:kube-controller-manager
  pods.firstlight: assign
ClusterRole firstlight-deletions of kube-system/generic-garbage-collector kube-system/node-controller kube-system/pod-garbage-collector kube-system/taint-eviction-controller system:kube-controller-manager system:kube-scheduler
  deletions.firstlight: assign
ClusterRole firstlight-bindings of system:kube-scheduler
  bindings.firstlight: assign
  records.firstlight kube-scheduler: assign
ClusterRole firstlight-endpoints of kube-system/endpoint-controller kube-system/endpointslice-controller kube-system/endpointslicemirroring-controller system:kube-controller-manager
  endpoints.firstlight: assign
ClusterRole firstlight-addresses of kube-system/cloud-controller-manager kube-system/node-controller kube-system/service-controller system:cloud-controller-manager system:kube-controller-manager
  nodes/addresses,addresses.firstlight: assign
ClusterRole firstlight-own-addresses of kube-system/cloud-node-manager
  nodes/own-addresses.firstlight: assign
Role key-service of kube-system/key-service
  configmaps: list
  configmaps key-service-ca: patch
  records.firstlight key-service-ca: assign
Role join-service of kube-system/join-service
  configmaps: get,list,watch,create,update,delete
  secrets: create,delete
  records.firstlight: assign
  leases.coordination.k8s.io: create
  leases.coordination.k8s.io join-control-plane: get,update
  daemonsets.apps member-controller: get
Role member-controller of kube-system/member-controller
  configmaps: get,list,watch,create,update,delete
  records.firstlight: assign
  leases.coordination.k8s.io: create
  leases.coordination.k8s.io join-watch: get,update
  secrets: create
  secrets join-attestation-keys: get,update
Role firstlight-joining-nodes of system:bootstrappers:firstlight:join-ticket
  configmaps kubeadm-config,kubelet-config,kube-proxy: get
Role firstlight-nodes of system:nodes
  configmaps join-config: get
Role firstlight-controllers of system:kube-controller-manager
  accounts.firstlight: assign
  records.firstlight kube-controller-manager: assign
Role firstlight-objects of kube-system/root-ca-cert-publisher kube-system/token-cleaner system:kube-controller-manager
  records.firstlight kube-root-ca.crt,bootstrap-token: assign
";
        assert_eq!(rights(&manifests(&settings).unwrap()), expected.trim_end());
    }

    #[test]
    fn the_chart_has_the_policies_that_the_commands_know() {
        let objects = manifests(&settings()).unwrap();
        let policies = objects.iter().filter(|object| {
            object["kind"] == "ValidatingAdmissionPolicy"
                && !limits_own(&object["metadata"]["name"])
        });
        let names: Vec<_> = policies
            .map(|policy| policy["metadata"]["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, super::super::ADMISSION_POLICIES);
    }

    #[test]
    fn no_account_lists_secrets_or_has_a_wildcard() {
        for object in &manifests(&settings()).unwrap() {
            for rule in object["rules"].as_array().into_iter().flatten() {
                let has = |field: &str, word: &str| {
                    rule[field]
                        .as_array()
                        .is_some_and(|words| words.contains(&word.into()))
                };
                let is_wide = ["apiGroups", "resources", "verbs"]
                    .iter()
                    .any(|field| has(field, "*"));
                assert!(!is_wide, "{rule}");
                let is_read = ["get", "list", "watch", "update", "patch"]
                    .iter()
                    .any(|verb| has("verbs", verb));
                assert!(
                    !has("resources", "secrets") || !is_read || rule["resourceNames"].is_array(),
                    "{rule}"
                );
            }
        }
    }

    #[test]
    fn tokens_of_tickets_are_of_the_group_that_the_chart_knows_and_kubernetes_approves_nothing_for()
    {
        let objects = manifests(&settings()).unwrap();
        let group = json!([{
            "apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": TICKET_GROUP,
        }]);
        let bindings: Vec<_> = objects
            .iter()
            .filter(|object| object["subjects"] == group)
            .collect();
        let roles: Vec<_> = bindings
            .iter()
            .map(|binding| &binding["roleRef"]["name"])
            .collect();
        assert_eq!(
            roles,
            ["firstlight-joining-nodes", "firstlight-joining-nodes"]
        );
        let of_nodes = objects
            .iter()
            .filter(|object| object["metadata"]["name"] == "firstlight-joining-nodes");
        let rules: Vec<_> = of_nodes
            .filter_map(|object| object["rules"].as_array())
            .flatten()
            .collect();
        assert!(rules.len() == 3 && !json!(rules).to_string().contains("nodeclient"));
        let policy = objects
            .iter()
            .find(|object| object["kind"] == "ValidatingAdmissionPolicy")
            .unwrap();
        let group = BASE64_STANDARD.encode(TICKET_GROUP);
        assert!(
            policy["spec"]["validations"]
                .to_string()
                .contains(&format!("\\\"{group}\\\""))
        );
    }

    #[test]
    fn the_join_service_has_a_token_and_a_grant_for_the_key_service_only() {
        let objects = manifests(&settings()).unwrap();
        let set = |name: &str| {
            let is_it = |object: &&Value| {
                object["kind"] == "DaemonSet" && object["metadata"]["name"] == name
            };
            objects.iter().find(is_it).unwrap()["spec"]["template"]["spec"].clone()
        };
        let volumes = set("join-service")["volumes"].clone();
        let tokens: Vec<_> = volumes
            .as_array()
            .unwrap()
            .iter()
            .filter(|v| v.get("projected").is_some())
            .collect();
        let source = &tokens[0]["projected"]["sources"][0]["serviceAccountToken"];
        assert_eq!(
            (tokens.len(), &source["audience"]),
            (1, &json!(KEY_SERVICE_AUDIENCE))
        );
        let command = set("key-service")["containers"][0]["command"].clone();
        let arguments: Vec<_> = command
            .as_array()
            .unwrap()
            .iter()
            .map(|argument| argument.as_str().unwrap())
            .collect();
        let grant = arguments[arguments
            .iter()
            .position(|argument| *argument == "--grant")
            .unwrap()
            + 1];
        assert_eq!(
            grant,
            format!("{JOIN_SERVICE_ACCOUNT}={JOIN_SERVICE_GRANT}")
        );
    }

    #[test]
    fn the_key_service_logs_in_at_vault_by_a_token_that_the_api_server_refuses() {
        let pod = |mut values: Value| {
            values["image"] = "a".into();
            let objects = objects(values).unwrap();
            let is_it = |object: &&Value| {
                object["kind"] == "DaemonSet" && object["metadata"]["name"] == "key-service"
            };
            objects.iter().find(is_it).unwrap()["spec"]["template"]["spec"].clone()
        };
        let named = |list: &Value, name: &str| {
            let list = list.as_array().unwrap();
            list.iter().find(|entry| entry["name"] == name).cloned()
        };
        let own = pod(json!({}));
        assert_eq!(named(&own["volumes"], "vault"), None);
        for (audience, values) in [
            ("vault", json!({"enabled": true})),
            ("other", json!({"enabled": true, "audience": "other"})),
        ] {
            let pod = pod(json!({"keyService": {"kms": values}}));
            let volume = named(&pod["volumes"], "vault").unwrap();
            let source = &volume["projected"]["sources"][0]["serviceAccountToken"];
            assert_eq!(
                (&source["audience"], &source["path"]),
                (&json!(audience), &json!("token"))
            );
            let mount = named(&pod["containers"][0]["volumeMounts"], "vault").unwrap();
            assert_eq!(mount["mountPath"], "/var/run/secrets/vault");
        }
    }

    #[test]
    fn the_join_service_gets_the_metadata_service_of_the_settings() {
        let told = |metadata: MetadataService| {
            let objects = manifests(&ServiceSettings {
                metadata: Some(metadata),
                ..settings()
            })
            .unwrap();
            let is_it = |object: &&Value| {
                object["kind"] == "DaemonSet" && object["metadata"]["name"] == "join-service"
            };
            let set = objects.iter().find(is_it).unwrap();
            let command = set["spec"]["template"]["spec"]["containers"][0]["command"]
                .as_array()
                .unwrap();
            ["--cloud-provider", "--metadata"].map(|option| {
                let place = command
                    .iter()
                    .position(|argument| argument == option)
                    .unwrap();
                command[place + 1].as_str().unwrap().to_owned()
            })
        };
        assert_eq!(told(MetadataService::default()), ["qemu", ""]);
        let there = MetadataService {
            url: Some("http://10.9.0.1:81".into()),
            ..MetadataService::default()
        };
        assert_eq!(told(there), ["qemu", "http://10.9.0.1:81"]);
        assert_eq!(
            told(MetadataService {
                cloud: None,
                url: None
            }),
            ["", ""]
        );
    }

    #[test]
    fn only_with_an_issuer_are_there_a_service_for_results_and_rights_to_its_keys() {
        let with = |issuer: &str| {
            let settings = ServiceSettings {
                watch: Some("600".into()),
                watch_issuer: Some(issuer.into()),
                ..settings()
            };
            let objects = manifests(&settings).unwrap();
            let is_service = |object: &&Value| {
                object["kind"] == "Service" && object["metadata"]["name"] == "join-attestation"
            };
            let of_kind = |kind: &str| {
                let of_kind = objects.iter().filter(|object| {
                    object["kind"] == *kind && object["metadata"]["name"] == "member-controller"
                });
                of_kind.map(Value::to_string).collect::<String>()
            };
            (
                objects.iter().filter(is_service).count(),
                of_kind("Role").contains("join-attestation-keys"),
                of_kind("ValidatingAdmissionPolicy").contains("\"join-attested-"),
            )
        };
        assert_eq!(with(""), (0, false, false));
        assert_eq!(with("https://results.example"), (1, true, true));
    }

    #[test]
    fn a_port_of_a_pod_is_open_to_those_that_it_is_for() {
        let objects = manifests(&settings()).unwrap();
        let of = |kind: &'static str, name: &'static str| {
            let is_it =
                move |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
            objects.iter().find(is_it).unwrap()["spec"].clone()
        };
        let prometheus = json!([{
            "namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
        }]);
        let join_service = json!([{"podSelector": {"matchLabels": {"k8s-app": "join-service"}}}]);
        let watch = json!([{"podSelector": {"matchLabels": {"k8s-app": "member-controller"}}}]);
        let pods = json!([{"namespaceSelector": {}}]);
        // Health checks have no rule: the kubelet of the same node sends them.
        for (name, ingress) in [
            (
                "key-service",
                vec![
                    (&[9000, 9443][..], &join_service),
                    (&[9443], &watch),
                    (&[9092], &prometheus),
                ],
            ),
            (
                "join-service",
                vec![(&[9090, 9093, 9094], &Value::Null), (&[9092], &prometheus)],
            ),
            (
                "member-controller",
                vec![(&[9092], &prometheus), (&[9095], &pods)],
            ),
        ] {
            let (policy, set) = (of("NetworkPolicy", name), of("DaemonSet", name));
            assert_eq!(
                policy["podSelector"]["matchLabels"]["k8s-app"],
                set["template"]["metadata"]["labels"]["k8s-app"]
            );
            assert!(
                policy["policyTypes"]
                    .as_array()
                    .unwrap()
                    .contains(&json!("Ingress"))
            );
            let rules = policy["ingress"].as_array().unwrap();
            assert_eq!(rules.len(), ingress.len());
            for (rule, (ports, from)) in rules.iter().zip(ingress) {
                let tcp = |port| json!({"protocol": "TCP", "port": port});
                let ports: Value = ports.iter().map(tcp).collect();
                assert_eq!((&rule["ports"], &rule["from"]), (&ports, from));
            }
        }
    }

    #[test]
    fn clients_without_a_token_reach_their_own_port_from_every_node_and_only_through_their_day() {
        let told = |until: &str| {
            let objects = manifests(&ServiceSettings {
                old_clients_until: Some(until.into()),
                ..settings()
            })
            .unwrap();
            let of = |kind: &str, name: &str| {
                let is_it =
                    |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
                objects.iter().find(is_it).unwrap()["spec"].clone()
            };
            let (all, own) = (
                of("Service", "key-service"),
                of("Service", "key-service-local"),
            );
            assert_eq!(
                (&all["internalTrafficPolicy"], &own["internalTrafficPolicy"]),
                (&json!("Cluster"), &json!("Local"))
            );
            let ports = |list: &Value, field: &str| -> Vec<_> {
                list.as_array()
                    .unwrap()
                    .iter()
                    .map(|port| port[field].clone())
                    .collect()
            };
            assert_eq!(ports(&own["ports"], "targetPort"), [9443, 9000]);
            let rules = of("NetworkPolicy", "key-service")["ingress"].clone();
            let open: Vec<_> = rules
                .as_array()
                .unwrap()
                .iter()
                .filter(|rule| rule["from"].is_null())
                .collect();
            let open = open
                .iter()
                .flat_map(|rule| ports(&rule["ports"], "port"))
                .collect::<Vec<_>>();
            (ports(&all["ports"], "targetPort"), open)
        };
        assert_eq!(told(""), (vec![json!(9443), json!(9001)], vec![]));
        assert_eq!(
            told("2027-01-31"),
            (vec![json!(9443), json!(9001)], vec![json!(9001)])
        );
    }

    #[test]
    fn no_pod_may_more_than_it_needs() {
        for object in manifests(&settings())
            .unwrap()
            .iter()
            .filter(|object| object["kind"] == "DaemonSet")
        {
            let pod = &object["spec"]["template"]["spec"];
            // The join service uses the API, and reads files of root. The member controller uses the API.
            let name = object["metadata"]["name"].as_str().unwrap();
            let (joins, works) = (name == "join-service", name == "member-controller");
            assert_eq!(pod["automountServiceAccountToken"], joins || works);
            assert_eq!(pod["securityContext"]["runAsNonRoot"] == true, !joins);
            assert_eq!(
                pod["securityContext"]["seccompProfile"]["type"],
                "RuntimeDefault"
            );
            assert!(
                ["hostNetwork", "hostPID", "hostIPC"]
                    .iter()
                    .all(|field| pod.get(*field).is_none())
            );
            for volume in pod["volumes"].as_array().unwrap() {
                let of_host = volume
                    .get("hostPath")
                    .map(|host| host["path"].as_str().unwrap());
                // the files of control planes, the host's evidence socket, and the CAs of web
                // servers, which kubeadm's pods mount too
                let joining = [
                    "/etc/kubernetes/pki",
                    "/etc/kubernetes/firstlight/policy",
                    "/run/firstlight/evidence",
                    "/etc/ssl/certs",
                ];
                let is_allowed = |path| match path {
                    "/etc/kubernetes/firstlight" => !works,
                    "/etc/ssl/certs" => joins || works,
                    path => joins && joining.contains(&path),
                };
                assert!(of_host.is_none_or(is_allowed), "{volume}");
            }
            for container in pod["containers"].as_array().unwrap() {
                let context = &container["securityContext"];
                assert!(
                    container["volumeMounts"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .all(|mount| mount["readOnly"] == true
                            || mount["name"] == "policy-operators")
                );
                assert_eq!(context["readOnlyRootFilesystem"], true);
                assert_eq!(context["allowPrivilegeEscalation"], false);
                assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
                for probe in ["readinessProbe", "livenessProbe"] {
                    assert!(container[probe]["grpc"]["port"].is_u64(), "{container}");
                }
                assert!(container["resources"]["limits"]["memory"].is_string());
            }
        }
    }

    #[test]
    fn a_guard_that_is_null_or_empty_at_any_depth_is_refused() {
        for (value, named) in [
            (
                json!({"keyService": {"clients": null}}),
                "keyService.clients",
            ),
            (json!({"keyService": {"clients": []}}), "keyService.clients"),
            (
                json!({"keyService": {"clients": [{}]}}),
                "keyService.clients",
            ),
            (
                json!({"keyService": {"clients": [{"podSelector": {"matchLabels": null}}]}}),
                "keyService.clients.0.podSelector.matchLabels",
            ),
            (
                json!({"joinService": {"metricsClients": null}}),
                "joinService.metricsClients",
            ),
            (
                json!({"keyService": {"kms": {"ports": null}}}),
                "keyService.kms.ports",
            ),
            (
                json!({"keyService": {"kms": {"ports": []}}}),
                "keyService.kms.ports",
            ),
            (
                json!({"keyService": {"kms": {"ports": [{"protocol": "TCP"}]}}}),
                "keyService.kms.ports",
            ),
            (
                json!({"keyService": {"kms": {"ports": [{"port": null}]}}}),
                "keyService.kms.ports.0.port",
            ),
            (json!({"nodeSelector": null}), "nodeSelector"),
            (json!({"keyService": null}), "keyService"),
        ] {
            match objects(value.clone()) {
                Err(RenderError::Null(path) | RenderError::Open(path)) => assert_eq!(path, named),
                other => panic!("{value}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_value_stays_a_value_whatever_it_looks_like() {
        let hostile = "a\"\n- b: {{ .Values.c | toJson }} # \u{85}\u{2028}'";
        let text = fill(
            "x: {{ .Values.x | toJson }} # {{.Values.n | toJson}}\n",
            &json!({"Values": {"x": hostile, "n": 1}}),
        );
        assert_eq!(
            yaml::document(&text.unwrap()).unwrap(),
            json!({"x": hostile})
        );
    }

    #[test]
    fn a_block_is_there_if_its_value_is_not_empty_or_empty() {
        let template = "a: 1\n{{- if .Values.x }}\nx: {{ .Values.x | toJson }}\n{{- end }}\n\
                        {{- if not .Values.x }}\ny: 1\n{{- end }}\nz: 1\n";
        for (value, text) in [
            (json!([1]), "a: 1\nx: [1]\nz: 1\n"),
            (json!(true), "a: 1\nx: true\nz: 1\n"),
            (json!({}), "a: 1\ny: 1\nz: 1\n"),
            (json!(""), "a: 1\ny: 1\nz: 1\n"),
            (json!(0), "a: 1\ny: 1\nz: 1\n"),
            (json!(null), "a: 1\ny: 1\nz: 1\n"),
        ] {
            let filled = fill(template, &json!({"Values": {"x": value}}));
            assert_eq!(filled.unwrap(), text);
        }
    }

    #[test]
    fn a_range_has_its_lines_for_each_field_in_the_order_of_the_keys() {
        let template = "a: 1\n{{- range $key, $value := .Values.x }}\n{{ $key | toJson }}: {{ $value | toJson }}\n{{- end }}\nz: 1\n";
        for (fields, text) in [
            (
                json!({"c": "{{", "b": 2}),
                "a: 1\n\"b\": 2\n\"c\": \"{{\"\nz: 1\n",
            ),
            (json!({}), "a: 1\nz: 1\n"),
        ] {
            let filled = fill(template, &json!({"Values": {"x": fields}}));
            assert_eq!(filled.unwrap(), text);
        }
    }

    #[test]
    fn two_lists_are_one() {
        let text = fill(
            "{{ concat .Values.x .Values.y | toJson }}",
            &json!({"Values": {"x": [1], "y": [2, 3]}}),
        );
        assert_eq!(text.unwrap(), "[1,2,3]");
        let template = "a\n{{- if concat .Values.x .Values.y }}\nb\n{{- end }}\n";
        for (list, text) in [(json!([]), "a\n"), (json!([1]), "a\nb\n")] {
            let filled = fill(template, &json!({"Values": {"x": [], "y": list}}));
            assert_eq!(filled.unwrap(), text);
        }
    }

    #[test]
    fn a_release_has_standard_labels_and_selectors_find_pods_by_the_old_one_only() {
        let objects = manifests(&settings()).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        for object in &objects {
            let labels = object["metadata"]["labels"].as_object().unwrap();
            for (label, value) in [
                ("app.kubernetes.io/instance", "firstlight"),
                ("app.kubernetes.io/version", version),
                ("app.kubernetes.io/part-of", "firstlight"),
                ("app.kubernetes.io/managed-by", "firstlight"),
                ("helm.sh/chart", &format!("firstlight-{version}")),
            ] {
                assert_eq!(labels[label], value, "{object}");
            }
            let name = &labels["app.kubernetes.io/name"];
            assert_eq!(name, &labels["app.kubernetes.io/component"]);
            let names = [
                "join-service",
                "key-service",
                "member-controller",
                "admission",
            ];
            assert!(names.iter().any(|known| name == known), "{object}");
        }
        for name in ["join-service", "key-service", "member-controller"] {
            let is_it = |object: &&Value| {
                object["kind"] == "DaemonSet" && object["metadata"]["name"] == name
            };
            let set = objects.iter().find(is_it).unwrap();
            // The API server refuses to change it.
            assert_eq!(
                set["spec"]["selector"],
                json!({"matchLabels": {"k8s-app": name}})
            );
            assert_eq!(
                set["spec"]["template"]["metadata"]["labels"],
                json!({
                    "app.kubernetes.io/name": name,
                    "app.kubernetes.io/component": name,
                    "app.kubernetes.io/instance": "firstlight",
                    "app.kubernetes.io/version": version,
                    "app.kubernetes.io/part-of": "firstlight",
                    "k8s-app": name,
                })
            );
        }
    }

    #[test]
    fn other_template_actions_are_refused() {
        for template in [
            "{{- if .Values.x }}",
            "{{- if not .Values.x }}",
            "{{- end }}",
            "{{- else }}",
            "{{- range .Values.x }}{{- end }}",
            "{{- if .Values.x }}{{- if .Values.x }}{{- end }}{{- end }}",
            "{{- if .Values.y }}{{- end }}",
            "{{- range $key, $value := .Values.x }}{{- end }}",
            "{{- range $key, $value := .Values }}",
            "{{- range $key, $value := .Values }}{{ .Values.x | toJson }}{{- end }}",
            "{{ concat .Values.x .Values.x | toJson }}",
            "{{ include \"firstlight.other\" . | toJson }}",
            "{{ include \"firstlight.image\" . }}",
            "{{- include \"firstlight.other\" . | nindent 4 }}",
            "{{- include \"firstlight.labels\" . }}",
            "{{ .Values.x }}",
            "{{ .Values.y | toJson }}",
            "{{ x | toJson }}",
            "{{ if }}",
            "{{ .Values.x | toJson",
        ] {
            assert!(
                fill(template, &json!({"Values": {"x": 1}})).is_err(),
                "{template}"
            );
        }
    }
}
