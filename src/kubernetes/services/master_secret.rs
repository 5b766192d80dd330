//! How a cluster stores its master secret: encrypted with the wrapping key of its control planes
//! ([`wrapping_key`]); the content is the master secret itself, or the form that an external KMS must
//! unwrap.
//!
//! Each form is a Secret of its own, and immutable. So with a new form the pods of the key service
//! restart, and a pod that cannot use it is not ready: then the installation is rolled back, and
//! the previous Secret still exists. It is deleted when all pods use the new one
//! ([`delete_superseded`]).
//!
//! A cluster of an earlier version, or of Constellation, has a Secret that is not encrypted, and its
//! control planes have no wrapping key. It moves in two steps, and serves in each; if the first is
//! repeated, nothing changes:
//!
//! ```text
//! 1  the key service still reads the old Secret, and writes the wrapping key of its control plane
//! 2  the key service reads the encrypted Secret; the old one is deleted
//! ```

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::super::NAMESPACE;
use super::super::client::{
    self, Client, DAEMON_SETS, NETWORK_POLICIES, Object, SECRETS, Selector,
};
use super::super::objects::{NetworkPolicy, SecretObject};
use super::super::wrapping_key::{self, Undecipherable};
use base::master_secret::{MasterSecret, NO_STORE};
use base::text::hex;

/// The Secret of Constellation and of earlier versions, which is not encrypted.
pub(super) const PLAIN: &str = "constellation-mastersecret";
/// The beginning of the names of our other Secrets. A part of the SHA-256 of the content follows.
const PREFIX: &str = "firstlight-mastersecret-";
/// Bytes of the hash in the name.
const HASH_LEN: usize = 4;
/// The key in the Secret's data under which each form stores the master secret.
const KEY: &str = "mastersecret";
/// The label of our objects.
const LABEL: (&str, &str) = ("app.kubernetes.io/part-of", "firstlight");
/// The beginning of a master secret as a key URI.
const URI: &[u8] = b"kms://";

/// How the cluster stores the master secret.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MasterSecretStorage {
    /// As it does now. A new cluster needs no external KMS.
    #[default]
    AsBefore,
    /// Without an external KMS.
    Own,
    /// Wrapped by an external KMS.
    Wrapped {
        /// The content of the file of `firstlight wrap`.
        file: String,
        /// The values of the chart below `keyService.kms`.
        access: Value,
    },
}

/// What a key service reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// The name of the Secret.
    pub secret: String,
    /// The values of the chart below `keyService.kms`.
    pub access: Value,
}

/// What the key service reads after a step of an installation.
#[derive(Debug)]
pub(super) struct Stored {
    /// The Secret, if it exists, or the content of a new one.
    secret: Secret,
    /// The values of the chart below `keyService.kms`.
    access: Value,
    /// Whether the key service writes the wrapping key, because its Secret is not encrypted.
    places_wrapping_key: bool,
}

#[derive(Debug)]
enum Secret {
    /// Its name.
    Existing(String),
    /// Its content, encrypted.
    New(String),
}

impl Stored {
    /// Encrypts a master secret in any form.
    fn encrypted(form: &[u8], access: Value, kms: &MasterSecret) -> Result<Stored, Undecipherable> {
        let content = wrapping_key::encrypt(form, &wrapping_key::of(kms))?;
        Ok(Stored {
            secret: Secret::New(content),
            access,
            places_wrapping_key: false,
        })
    }

    /// Returns the chart's values `masterSecret` and `keyService.kms`.
    pub fn values(&self) -> (Value, Value) {
        let (encrypted, existing) = match &self.secret {
            Secret::Existing(name) => ("", &**name),
            Secret::New(content) => (&**content, ""),
        };
        let secret = json!({
            "encrypted": encrypted,
            "existingSecret": existing,
            "placeWrappingKey": self.places_wrapping_key,
        });
        (secret, self.access.clone())
    }
}

/// Returns the name of the Secret with this content.
pub(super) fn name_of(encrypted: &str) -> String {
    let hash = digest(&SHA256, encrypted.as_bytes());
    format!("{PREFIX}{}", hex(&hash.as_ref()[..HASH_LEN]))
}

/// Why it is not known what the key service is to read.
#[derive(Debug)]
pub(super) enum Error {
    /// The API server refused a request or did not answer.
    Api(client::Error),
    /// The cluster has another master secret.
    Other(Undecipherable),
}

impl MasterSecretStorage {
    /// Returns what the key service of a new cluster reads.
    pub(super) fn of_new(&self, kms: &MasterSecret) -> Result<Stored, Undecipherable> {
        match self {
            MasterSecretStorage::AsBefore | MasterSecretStorage::Own => {
                Stored::encrypted(kms.uri().as_bytes(), json!({}), kms)
            }
            MasterSecretStorage::Wrapped { file, access } => {
                Stored::encrypted(file.as_bytes(), access.clone(), kms)
            }
        }
    }

    /// Returns what the key service of this cluster reads in the end, and before that if a first step
    /// has to place the wrapping key.
    pub(super) fn steps(
        &self,
        client: &Client,
        kms: &MasterSecret,
    ) -> Result<(Option<Stored>, Stored), Error> {
        let undecipherable = Error::Other;
        let Some((present, content)) = found(client).map_err(Error::Api)? else {
            return Ok((None, self.of_new(kms).map_err(undecipherable)?));
        };
        let form = opened(&content, kms).map_err(undecipherable)?;
        let is_raw = *form == kms.key().expose();
        if !is_raw && !is_form_of_kms(&form) {
            return Err(undecipherable(Undecipherable::Key));
        }
        let is_encrypted = wrapping_key::is_encrypted(&content);
        let last = match self {
            MasterSecretStorage::AsBefore if is_encrypted => Stored {
                secret: Secret::New(String::from_utf8_lossy(&content).into_owned()),
                access: present.access.clone(),
                places_wrapping_key: false,
            },
            MasterSecretStorage::AsBefore if !is_raw => {
                let encrypted = Stored::encrypted(&form, present.access.clone(), kms);
                encrypted.map_err(undecipherable)?
            }
            _ => self.of_new(kms).map_err(undecipherable)?,
        };
        let first = (!is_encrypted).then_some(Stored {
            secret: Secret::Existing(present.secret),
            access: present.access,
            places_wrapping_key: true,
        });
        Ok((first, last))
    }
}

/// Returns the master secret in the content of a Secret: the raw bytes of its key, or the form that an
/// external KMS must unwrap.
pub fn opened(content: &[u8], kms: &MasterSecret) -> Result<Zeroizing<Vec<u8>>, Undecipherable> {
    if !wrapping_key::is_encrypted(content) {
        return Ok(Zeroizing::new(content.to_vec()));
    }
    let form = wrapping_key::decrypt(content, &wrapping_key::of(kms))?;
    if !form.starts_with(URI) {
        return Ok(form);
    }
    let uri = str::from_utf8(&form).map_err(|_| Undecipherable::Key)?;
    let own = MasterSecret::from_uris(uri, NO_STORE).map_err(|_| Undecipherable::Key)?;
    Ok(Zeroizing::new(own.key().expose().to_vec()))
}

/// Returns whether this may be a form that an external KMS must unwrap: JSON, or the URI of a store.
fn is_form_of_kms(form: &[u8]) -> bool {
    form.starts_with(b"storage://") || form.trim_ascii_start().starts_with(b"{")
}

/// Returns the Secret and the values with which the present key service was installed, by any
/// program; `None` if there is no key service.
pub fn present(client: &Client) -> Result<Option<Present>, client::Error> {
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
    let secret = match volume("config", "/secret/secretName") {
        // Constellation's volume is projected from it
        none if none.is_empty() => PLAIN.into(),
        secret => secret,
    };
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
    let policy = client.find_as(&named(&NETWORK_POLICIES))?;
    let policy: NetworkPolicy = policy.unwrap_or_default();
    // the rule for the KMS is the last one, after those for the API server, names and metadata
    if let [_, _, _, rule] = &policy.spec.egress[..] {
        access["ports"] = rule.ports.clone();
    }
    Ok(Some(Present { secret, access }))
}

/// Returns the content of the present key service's Secret, which [`opened`] opens. Without a key
/// service, that of the Secret of Constellation.
pub fn content(client: &Client) -> Result<Option<Zeroizing<Vec<u8>>>, client::Error> {
    Ok(found(client)?.map(|(_, content)| content))
}

type Found = (Present, Zeroizing<Vec<u8>>);

fn found(client: &Client) -> Result<Option<Found>, client::Error> {
    let present = present(client)?.unwrap_or(Present {
        secret: PLAIN.into(),
        access: json!({}),
    });
    let secret: Option<SecretObject> = client.find_as(&object(&present.secret))?;
    let content = secret.and_then(|secret| secret.data.bytes(KEY));
    Ok(content.map(|content| (present, content)))
}

/// Makes the Secret of Constellation's key service again, unless it exists.
pub fn restore_plain(client: &Client, kms: &MasterSecret) -> Result<(), client::Error> {
    let base64 = |secret: &base::crypto::Secret| BASE64_STANDARD.encode(secret.expose());
    let mut secret = json!({
        "metadata": {"name": PLAIN},
        "type": "Opaque",
        "data": {KEY: base64(kms.key()), "salt": base64(kms.salt())},
    });
    let made = client.create_if_absent(&SECRETS.in_namespace(NAMESPACE), &secret);
    client::wipe(&mut secret);
    made.map(drop)
}

/// Deletes the Secrets of Constellation and of ours that have the master secret in another form than
/// the present key service reads. Returns their names.
pub fn delete_superseded(client: &Client) -> Result<Vec<Object>, client::Error> {
    let Some(Present { secret: used, .. }) = present(client)? else {
        return Ok(vec![]);
    };
    let (label, value) = LABEL;
    let ours = Selector::labels(&format!("{label}={value}"));
    let name = |secret: SecretObject| secret.metadata.name;
    let secrets = SECRETS.in_namespace(NAMESPACE);
    let mut found = client.list_keeping(&secrets, &ours, name)?.items;
    // that of Constellation has no label
    found.extend(client.find_as(&object(PLAIN))?.map(name));
    let mut deleted = Vec::new();
    for name in found {
        let is_one = name == PLAIN || name.starts_with(PREFIX);
        if is_one && name != used && client.delete_if_there(&object(&name))? {
            deleted.push(object(&name));
        }
    }
    Ok(deleted)
}

fn object(name: &str) -> Object {
    SECRETS.in_namespace(NAMESPACE).named(name)
}
