//! How the cluster stores the master secret: the meaning of `--kms` of `firstlight init` and
//! `firstlight apply`.

use std::path::PathBuf;

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, cluster_id};
use base::master_secret::MasterSecret;
use clap::Args;
use keywrap::{Author, KeyEncryptionKey, Wrapped};
use kubernetes::client::Client;
use kubernetes::services;
use kubernetes::services::master_secret::{self, MasterSecretStorage, Present};
use kubernetes::wrapping_key::Undecipherable;
use serde_json::{Map, Value, json};

use crate::shell::{error::Error, files};
use crate::workspace::state::State;

/// The key URI of a cluster that stores its master secret itself, as in Constellation.
const CLUSTER: &str = "kms://cluster-kms";
/// The chart values that the file of `--kms-access` may contain.
const FIELDS: [&str; 5] = [
    "ports",
    "env",
    "audience",
    "credentialsSecret",
    "authoritiesConfigMap",
];

/// The form that the operator asks for.
#[derive(Debug, Clone, Default, Args)]
pub struct Wish {
    /// Write a new master secret only as the key of this external KMS wraps it (docs/kms.md), and keep it so in the cluster;
    /// quote it in a shell
    #[arg(long, value_name = "URI")]
    pub kms: Option<String>,
    /// With --kms: make the key if it is missing
    #[arg(long, requires = "kms")]
    pub create_key: bool,
    /// With --kms: what the key service needs to reach it, JSON with ports, env, credentialsSecret and authoritiesConfigMap
    /// as in the chart's keyService.kms; by default the port of the URI
    #[arg(long = "kms-access", value_name = "FILE", requires = "kms")]
    pub access: Option<PathBuf>,
}

/// The key of an external KMS.
pub struct External<'a> {
    /// Its URI.
    pub uri: &'a str,
    /// Its client.
    pub key: Box<dyn KeyEncryptionKey>,
}

impl Wish {
    /// Returns the external key, if the operator asks for one.
    pub fn key(&self) -> Result<Option<External<'_>>, keywrap::Error> {
        match self.kms.as_deref() {
            None | Some(CLUSTER) => Ok(None),
            Some(uri) => Ok(Some(External {
                uri,
                key: keywrap::open(uri)?,
            })),
        }
    }

    /// Wraps the master secret.
    pub fn wrap(
        &self,
        secret: &MasterSecret,
        External { uri, key }: &External<'_>,
    ) -> Result<String, keywrap::Error> {
        key.prepare(self.create_key)?;
        Ok(Wrapped::wrap(secret, uri, &**key)?.text())
    }

    /// Wraps the master secret if the operator asks for it and the cluster does not have it in this
    /// form yet. `client` is `None` if there is no cluster to compare with.
    pub fn keeping(
        &self,
        secret: &MasterSecret,
        state: &State,
        client: Option<&Client>,
    ) -> Result<MasterSecretStorage, Error> {
        let Some(uri) = &self.kms else {
            return Ok(MasterSecretStorage::AsBefore);
        };
        let there = client.map(master_secret::content).transpose();
        let there = there?.flatten();
        let there = there.map(|content| master_secret::opened(&content, secret));
        let there = there.transpose().map_err(other_cluster)?;
        check_cluster(secret, state, there.as_deref().map(Vec::as_slice), uri)?;
        let Some(external) = self.key()? else {
            return Ok(MasterSecretStorage::Own);
        };
        let access = self.access(uri)?;
        let same = |content: &[u8]| {
            // the content is kept, even if it is the URI of a store
            let wrapped = keywrap::find(content, Author::File)?.ok()?;
            let is_same = wrapped.kms() == uri && wrapped.unwrap(&*external.key).ok()? == *secret;
            let file = String::from_utf8(content.to_vec()).ok()?;
            is_same.then_some(file)
        };
        let file = match there.and_then(|content| same(&content)) {
            Some(file) => file,
            None => self.wrap(secret, &external)?,
        };
        Ok(MasterSecretStorage::Wrapped { file, access })
    }

    /// Returns the values of the chart below `keyService.kms`.
    fn access(&self, uri: &str) -> Result<Value, Error> {
        let port = keywrap::port(uri)?;
        let mut access = json!({"enabled": true, "ports": [{"protocol": "TCP", "port": port}]});
        let naming = keywrap::naming(uri)?;
        let Some(path) = &self.access else {
            name_server(&mut access, naming);
            return Ok(access);
        };
        let unusable = |why: String| Error::content(format!("{}: {why}", path.display()));
        let content = files::read(path)?;
        let given: Map<String, Value> =
            serde_json::from_slice(&content).map_err(|error| unusable(error.to_string()))?;
        for (name, value) in given {
            if !FIELDS.contains(&name.as_str()) {
                let expected = FIELDS.join(", ");
                return Err(unusable(format!(
                    "the field {name:?} is unknown: expected {expected}"
                )));
            }
            access[name] = value;
        }
        name_server(&mut access, naming);
        Ok(access)
    }
}

/// Returns whether one of these variables is set for the key service.
fn is_set(env: &Value, names: &[&str]) -> bool {
    let mut variables = env.as_array().into_iter().flatten();
    variables.any(|variable| names.iter().any(|name| variable["name"] == *name))
}

/// Refuses a cluster whose new key service would send no token to its KMS, because no variable has
/// the KMS's address. Clusters of earlier versions lack this variable: there, only the wrapped
/// master secret has the address.
pub fn check_named(client: &Client, kms: &MasterSecret) -> Result<(), Error> {
    let present = master_secret::present(client)?;
    let Some(Present { secret, access }) = present else {
        return Ok(());
    };
    let content = master_secret::content(client)?;
    let content = content.map(|content| master_secret::opened(&content, kms));
    let content = content.transpose().map_err(other_cluster)?;
    // if a store holds the wrapped master secret, only the key service reads it
    let wrapped = content.filter(|content| keywrap::is_wrapped(content));
    let Some(Ok(wrapped)) = wrapped.and_then(|content| keywrap::find(&content, Author::File))
    else {
        return Ok(());
    };
    match keywrap::naming(wrapped.kms())? {
        Some((names, server)) if !is_set(&access["env"], names) => Err(Error::blocked(format!(
            "the new pods of the key service would get no credentials for their KMS: the Secret {secret} names the server {server}, \
             and {} is not set for them. Nothing was changed. If that server is yours, give --kms '{}'",
            names[0],
            wrapped.kms()
        ))),
        _ => Ok(()),
    }
}

/// Passes the server in the operator's URI to the key service, unless the operator has set such a
/// variable.
fn name_server(access: &mut Value, naming: Option<(&[&str], String)>) {
    let Some((names, value)) = naming else { return };
    let env = access
        .as_object_mut()
        .map(|access| access.entry("env").or_insert(json!([])));
    if let Some(env) = env
        && !is_set(env, names)
        && let Some(env) = env.as_array_mut()
    {
        env.push(json!({"name": names[0], "value": value}));
    }
}

/// Refuses a master secret of another cluster: no disk of this cluster would open with it.
fn check_cluster(
    secret: &MasterSecret,
    state: &State,
    there: Option<&[u8]>,
    kms: &str,
) -> Result<(), Error> {
    let is_known = match (&state.cluster_id, there) {
        (Some(id), _) => {
            let measurement = secret
                .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
                .map_err(Error::failed)?;
            cluster_id(&measurement, &state.measurement_salt) == *id
        }
        (None, Some(content)) => match keywrap::unwrapped(content, Author::File, Some(kms)) {
            None => content == secret.key().expose(),
            Some(unwrapped) => unwrapped
                .map(|there| there == *secret)
                .map_err(|error| {
                    Error::failed(format!(
                        "the state file has no cluster ID, so this command cannot check whether the cluster uses this master secret: {error}"
                    ))
                })?,
        },
        // a new cluster
        (None, None) => true,
    };
    if is_known {
        Ok(())
    } else {
        Err(other_cluster(Undecipherable::Key))
    }
}

fn other_cluster(why: Undecipherable) -> Error {
    Error::failed(services::Error::MasterSecret(why))
}
