//! How a cluster stores its master secret: plain, or wrapped by an external KMS.
//!
//! Each form is a Secret of its own, and immutable. So with a new form the pods of the key service
//! restart, and a pod that cannot use it is not ready: then the installation is rolled back, and
//! the previous Secret still exists. It is deleted when all pods use the new one
//! ([`delete_superseded`]).

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::super::NAMESPACE;
use super::super::client::{
    self, Client, DAEMON_SETS, NETWORK_POLICIES, Object, SECRETS, Selector,
};
use base::text::hex;
use kms::ClusterKms;

/// The Secret of the plain master secret; the name is Constellation's.
const PLAIN: &str = "constellation-mastersecret";
/// The beginning of the names of Secrets with a wrapped master secret. A part of the SHA-256 of the
/// content follows.
const WRAPPED: &str = "firstlight-mastersecret-";
/// Bytes of the hash in the name.
const HASH_LEN: usize = 4;
/// The key in the Secret's data under which each form stores the master secret.
const KEY: &str = "mastersecret";
/// The labels of our objects.
const LABEL: (&str, &str) = ("app.kubernetes.io/part-of", "firstlight");

/// How the cluster stores the master secret.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Keeping {
    /// As it does now. A cluster that has no key service yet stores it plain.
    #[default]
    AsBefore,
    /// As it is.
    Plain,
    /// Wrapped by an external KMS.
    Wrapped {
        /// The content of the file of `firstlight wrap`.
        file: String,
        /// The values of the chart below `keyService.kms`.
        access: Value,
    },
    /// In this existing Secret.
    Existing {
        /// The name of the Secret.
        secret: String,
        /// The values of the chart below `keyService.kms`.
        access: Value,
    },
}

impl Keeping {
    /// Returns the name of the Secret.
    fn secret_name(&self) -> String {
        match self {
            Keeping::AsBefore | Keeping::Plain => PLAIN.into(),
            Keeping::Wrapped { file, .. } => {
                let hash = digest(&SHA256, file.as_bytes());
                format!("{WRAPPED}{}", hex(&hash.as_ref()[..HASH_LEN]))
            }
            Keeping::Existing { secret, .. } => secret.clone(),
        }
    }

    /// Returns the chart values, with the master secret if it is stored plain.
    pub(super) fn values(&self, kms: &ClusterKms) -> (Value, Value) {
        let base64 = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
        match self {
            Keeping::AsBefore | Keeping::Plain => (
                json!({"key": base64(kms.key().expose()), "salt": base64(kms.salt().expose())}),
                json!({}),
            ),
            Keeping::Wrapped { access, .. } | Keeping::Existing { access, .. } => (
                json!({"existingSecret": self.secret_name()}),
                access.clone(),
            ),
        }
    }

    /// Returns the Secret with the wrapped master secret. The Secret with the plain one is in the
    /// chart.
    pub(super) fn secret(&self) -> Option<Value> {
        let Keeping::Wrapped { file, .. } = self else {
            return None;
        };
        let (label, value) = LABEL;
        Some(json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.secret_name(), "namespace": NAMESPACE, "labels": {label: value}},
            "type": "Opaque",
            "immutable": true,
            "data": {KEY: BASE64_STANDARD.encode(file)},
        }))
    }

    /// Replaces [`Keeping::AsBefore`] by what the cluster has.
    pub(super) fn resolve(&self, client: &Client) -> Result<Keeping, client::Error> {
        match self {
            Keeping::AsBefore => Ok(present(client)?.unwrap_or(Keeping::Plain)),
            other => Ok(other.clone()),
        }
    }
}

/// Returns the Secret and the values with which the present key service was installed, by any
/// program; `None` if there is no key service, or if it has the plain master secret.
pub fn present(client: &Client) -> Result<Option<Keeping>, client::Error> {
    let named = |resource: &client::Resource| resource.in_namespace(NAMESPACE).named("key-service");
    let Some(set) = client.find(&named(&DAEMON_SETS))? else {
        return Ok(None);
    };
    let pod = &set["spec"]["template"]["spec"];
    let volume = |name: &str, field: &str| {
        let mut volumes = pod["volumes"].as_array().into_iter().flatten();
        let volume = volumes.find(|volume| volume["name"] == name);
        let field = volume.and_then(|volume| volume.pointer(field)?.as_str());
        field.unwrap_or_default().to_owned()
    };
    let secret = volume("config", "/secret/secretName");
    if [PLAIN, ""].contains(&secret.as_str()) {
        return Ok(None);
    }
    let container = &pod["containers"][0];
    let mut access = json!({
        "enabled": container.get("startupProbe").is_some(),
        "env": container.get("env").cloned().unwrap_or(json!([])),
        "credentialsSecret": volume("kms", "/secret/secretName"),
        "authoritiesConfigMap": volume("authorities", "/configMap/name"),
    });
    let audience = volume("vault", "/projected/sources/0/serviceAccountToken/audience");
    if !audience.is_empty() {
        access["audience"] = audience.into();
    }
    let policy = client.find(&named(&NETWORK_POLICIES))?.unwrap_or_default();
    // the rule for the KMS is the last one, after those for the API server, names and metadata
    let rules = policy.pointer("/spec/egress").and_then(Value::as_array);
    if let Some([_, _, _, rule]) = rules.map(Vec::as_slice) {
        access["ports"] = rule["ports"].clone();
    }
    Ok(Some(Keeping::Existing { secret, access }))
}

/// Returns the content of the present key service's Secret: raw, or the file of `firstlight wrap`.
pub fn content(client: &Client) -> Result<Option<Zeroizing<Vec<u8>>>, client::Error> {
    let keeping = present(client)?.unwrap_or(Keeping::Plain);
    let secret = client.find(&object(&keeping.secret_name()))?;
    let data = secret.and_then(|mut secret| {
        let text = secret["data"][KEY]
            .as_str()
            .map(|text| BASE64_STANDARD.decode(text));
        let content = text.and_then(Result::ok).map(Zeroizing::new);
        client::wipe(&mut secret);
        content
    });
    Ok(data)
}

/// Deletes our Secrets that have the master secret in another form than `keeping`. Returns their
/// names.
pub(super) fn delete_superseded(
    client: &Client,
    keeping: &Keeping,
) -> Result<Vec<Object>, client::Error> {
    let (label, value) = LABEL;
    let selector = Selector::labels(&format!("{label}={value}"));
    let mut found = client.list(&SECRETS.in_namespace(NAMESPACE), &selector)?;
    let mut deleted = Vec::new();
    for secret in &mut found.items {
        let name = secret["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        client::wipe(secret);
        let is_one = name == PLAIN || name.starts_with(WRAPPED);
        if is_one && name != keeping.secret_name() && client.delete_if_there(&object(&name))? {
            deleted.push(object(&name));
        }
    }
    Ok(deleted)
}

fn object(name: &str) -> Object {
    SECRETS.in_namespace(NAMESPACE).named(name)
}
