//! The record of a move: how far it is, what the operator wants, and what the cluster had before. It is in a Secret of the cluster, so that
//! another operator can continue, and in a file of the operator.

use std::io;
use std::path::Path;

use base::crypto::CLUSTER_ID_LEN;
use base::master_secret::MasterSecret;
use base::text::hex;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, Object, SECRETS, version_of};
use kubernetes::objects::SecretObject;
use kubernetes::services::Before;
use kubernetes::services::migration::Migration;
use ring::{hkdf, hmac};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::wanted::{Wanted, WantedPolicy};
use crate::shell::{
    error::Error,
    files::{self, FileError},
};
use crate::workspace::state::unhex;

/// The operator's file.
pub const FILE: &str = "firstlight-migration.json";
/// The same after the move was undone.
const UNDONE_FILE: &str = "firstlight-migration.undone.json";
/// The name of the Secret.
const SECRET: &str = "firstlight-migration";
/// The key of the record in its data.
const KEY: &str = "record";
/// The field with the seal.
const MAC: &str = "mac";
const VERSION: u32 = 1;

/// The steps of a move, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveStep {
    /// What the move changes is saved.
    Save,
    /// The services are those of Firstlight.
    Services,
    /// The policy accepts both images.
    Policy,
    /// Each node runs the new image.
    Nodes,
    /// Nothing of the old forms is accepted.
    End,
}

/// All steps.
pub const STEPS: [MoveStep; 5] = [
    MoveStep::Save,
    MoveStep::Services,
    MoveStep::Policy,
    MoveStep::Nodes,
    MoveStep::End,
];

impl MoveStep {
    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            MoveStep::Save => "save",
            MoveStep::Services => "services",
            MoveStep::Policy => "policy",
            MoveStep::Nodes => "nodes",
            MoveStep::End => "end",
        }
    }
}

/// By what a record proves that somebody with the master secret wrote it. Whoever can only write Secrets cannot make one, and so cannot
/// make an operator write or delete objects.
pub struct Seal {
    key: hmac::Key,
    /// The ID of the cluster.
    cluster: String,
}

impl Seal {
    /// Returns the seal of the cluster with this master secret and this ID.
    pub fn new(secret: &MasterSecret, cluster: &[u8; CLUSTER_ID_LEN]) -> Result<Seal, Error> {
        // the key service gives only keys whose labels begin with "key-"
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, secret.salt().expose());
        let root = root.extract(secret.key().expose());
        let key = root.expand(&[b"firstlight migration record"], hmac::HMAC_SHA256);
        Ok(Seal {
            key: key.map_err(Error::failed)?.into(),
            cluster: hex(cluster),
        })
    }
}

/// The record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationRecord {
    /// The last step that began.
    pub begun: MoveStep,
    /// The last step that ended.
    pub done: MoveStep,
    /// Whether `undo` has begun. Then only `undo` continues.
    pub is_undone: bool,
    /// What the operator wants.
    pub wanted: Texts,
    /// What the cluster had.
    pub before: Earlier,
    /// The resourceVersion of the Secret that was read or written last.
    version: Option<String>,
}

/// What the operator wants, as texts; a date is empty for never.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Texts {
    /// The policy of the new image.
    pub policy: String,
    /// The container image.
    pub image: String,
    /// The image of the nodes.
    pub node_image: Option<String>,
    /// The last day on which disks without a record open.
    pub migrate_until: Option<String>,
    /// The last day on which clients without a token are served.
    pub old_clients_until: Option<String>,
    /// The grants of the key service.
    pub grants: Option<String>,
}

/// What the cluster had.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Earlier {
    /// The version of the API server.
    pub kubernetes: String,
    /// The version that kubeadm had recorded.
    pub kubeadm: String,
    /// The policy.
    pub policy: String,
    /// NodeVersion's image, its version, and its components; `None` without NodeVersion.
    pub node_version: Option<[String; 3]>,
    /// What the kubelet checked of the upgrade agent's socket.
    pub agent_check: Option<String>,
    /// The objects of the services.
    pub objects: Before,
}

impl MigrationRecord {
    /// Returns a new record, which is not saved yet.
    pub fn new(wanted: Texts, before: Earlier) -> MigrationRecord {
        MigrationRecord {
            begun: MoveStep::Save,
            done: MoveStep::Save,
            is_undone: false,
            wanted,
            before,
            version: None,
        }
    }

    /// Returns the record of the move of this cluster; `None` if no move has begun.
    pub fn find(client: &Client, seal: &Seal) -> Result<Option<MigrationRecord>, Error> {
        let Some(secret) = client.find_as::<SecretObject>(&place())? else {
            return Ok(None);
        };
        let mut record = MigrationRecord::parse(&content(&secret), seal).map_err(|error| {
            Error::content(format!(
                "{}: {error}. If no move of this cluster has begun, delete it",
                place()
            ))
        })?;
        record.version = Some(secret.metadata.resource_version);
        Ok(Some(record))
    }

    /// Returns the record in the operator's file, if there is one.
    pub fn in_file(seal: &Seal) -> Result<Option<MigrationRecord>, Error> {
        match files::read_private(Path::new(FILE)) {
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(content) => MigrationRecord::parse(&content, seal)
                .map(Some)
                .map_err(|error| FileError::Content(FILE.into(), error.to_string()).into()),
        }
    }

    /// Parses a record, and checks its seal.
    fn parse(content: &[u8], seal: &Seal) -> Result<MigrationRecord, Error> {
        let mut value: Value = serde_json::from_slice(content).map_err(Error::content)?;
        let mac = value.as_object_mut().and_then(|fields| fields.remove(MAC));
        let mac = mac.as_ref().and_then(Value::as_str).and_then(unhex::<32>);
        let is_sealed = mac
            .is_some_and(|mac| hmac::verify(&seal.key, value.to_string().as_bytes(), &mac).is_ok());
        if !is_sealed || value["cluster"] != seal.cluster.as_str() {
            return Err(Error::content(
                "it was not written with the master secret of this cluster",
            ));
        }
        if value["version"] != VERSION {
            return Err(Error::content(format!(
                "a record of version {}, expected {VERSION}",
                value["version"]
            )));
        }
        let before = &value["before"];
        let text = |name: &str| before[name].as_str().map(str::to_owned);
        let list = |name: &str| before[name].as_array().cloned().unwrap_or_default();
        let step = |name: &str| serde_json::from_value(value[name].clone()).map_err(Error::content);
        Ok(MigrationRecord {
            begun: step("begun")?,
            done: step("done")?,
            is_undone: value["undone"] == true,
            wanted: serde_json::from_value(value["wanted"].clone()).map_err(Error::content)?,
            before: Earlier {
                kubernetes: text("kubernetes").unwrap_or_default(),
                kubeadm: text("kubeadm").unwrap_or_default(),
                policy: text("policy").unwrap_or_default(),
                node_version: serde_json::from_value(before["nodeVersion"].clone())
                    .map_err(Error::content)?,
                agent_check: text("agentCheck"),
                objects: Before {
                    objects: list("objects"),
                    absent: list("absent"),
                },
            },
            version: None,
        })
    }

    fn text(&self, seal: &Seal) -> String {
        let Earlier {
            kubernetes,
            kubeadm,
            policy,
            node_version,
            agent_check,
            objects,
        } = &self.before;
        let mut record = json!({
            "version": VERSION,
            "cluster": seal.cluster,
            "begun": self.begun,
            "done": self.done,
            "undone": self.is_undone,
            "wanted": self.wanted,
            "before": {
                "kubernetes": kubernetes,
                "kubeadm": kubeadm,
                "policy": policy,
                "nodeVersion": node_version,
                "agentCheck": agent_check,
                "objects": objects.objects,
                "absent": objects.absent,
            },
        });
        let mac = hmac::sign(&seal.key, record.to_string().as_bytes());
        record[MAC] = hex(mac.as_ref()).into();
        format!("{record:#}\n")
    }

    /// Writes the record into the cluster, unless another operator has written it since, and then into the operator's file.
    pub fn save(&mut self, client: &Client, seal: &Seal) -> Result<(), Error> {
        let text = self.text(seal);
        let mut secret = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": SECRET,
                "namespace": NAMESPACE,
                "labels": {"app.kubernetes.io/part-of": "firstlight"},
            },
            "type": "Opaque",
            "data": {KEY: BASE64_STANDARD.encode(&text)},
        });
        let saved = match &self.version {
            None => client.create(&place().collection(), &secret),
            Some(version) => {
                secret["metadata"]["resourceVersion"] = version.as_str().into();
                client.update(&place(), &secret)
            }
        };
        let saved = saved.map_err(|error| {
            if error.is_already_exists() || error.is_conflict() { Error::Refused(format!(
                "{}: another operator moves this cluster at this moment: see how far the move is, and run the same command again",
                place()
            )) } else { error.into() }
        })?;
        self.version = Some(version_of(&saved).to_owned());
        Ok(files::replace_private(Path::new(FILE), text.as_bytes())?)
    }

    /// Removes the record after everything was restored. The operator's file gets another name.
    pub fn remove(client: &Client) -> Result<(), Error> {
        client.delete_if_there(&place())?;
        match std::fs::rename(FILE, UNDONE_FILE) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(FileError::Io("rename", FILE.into(), error).into())
            }
            _ => Ok(()),
        }
    }

    /// Returns what the operator wants now: the options given, or else those of the record.
    pub fn merged(&self, given: &Wanted) -> Texts {
        let mut wanted = self.wanted.clone();
        let new = Texts::of(given);
        let replace = |old: &mut String, new: String| {
            if !new.is_empty() {
                *old = new;
            }
        };
        replace(&mut wanted.policy, new.policy);
        replace(&mut wanted.image, new.image);
        wanted.node_image = new.node_image.or(wanted.node_image);
        wanted.migrate_until = new.migrate_until.or(wanted.migrate_until);
        wanted.old_clients_until = new.old_clients_until.or(wanted.old_clients_until);
        wanted.grants = new.grants.or(wanted.grants);
        wanted
    }
}

impl Texts {
    /// Returns what these options say.
    pub fn of(wanted: &Wanted) -> Texts {
        let day = |day: &Option<Migration>| day.map(|day| day.to_string());
        let policy = wanted
            .policy
            .as_ref()
            .map(|file: &WantedPolicy| file.text.clone());
        Texts {
            policy: policy.unwrap_or_default(),
            image: wanted.image.clone().unwrap_or_default(),
            node_image: wanted.node_image.clone(),
            migrate_until: day(&wanted.migration),
            old_clients_until: day(&wanted.old_clients),
            grants: wanted.grants.clone(),
        }
    }
}

/// Returns how far the move of this cluster is, without a check of who wrote it: the last step that is done, and whether it is being
/// undone. `None` if there is no record.
pub fn progress(client: &Client) -> Result<Option<(Option<MoveStep>, bool)>, client::Error> {
    let found = client.find_as(&place())?;
    Ok(found.map(|secret| {
        let record: Value = serde_json::from_slice(&content(&secret)).unwrap_or_default();
        let done = serde_json::from_value(record["done"].clone()).ok();
        (done, record["undone"] == true)
    }))
}

fn content(secret: &SecretObject) -> Zeroizing<Vec<u8>> {
    secret.data.bytes(KEY).unwrap_or_default()
}

/// Returns the place of the Secret.
pub fn place() -> Object {
    SECRETS.in_namespace(NAMESPACE).named(SECRET)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::Secret;
    use support::mutation::mutations;

    fn seal(secret: u8, cluster: u8) -> Seal {
        let secret = || Secret::new(vec![secret; 32]);
        let kms = MasterSecret::new(secret(), secret()).unwrap();
        Seal::new(&kms, &[cluster; 32]).unwrap()
    }

    fn record() -> MigrationRecord {
        let wanted = Texts {
            policy: "{}".into(),
            image: "registry.example/a:1".into(),
            node_image: Some("ami-1".into()),
            migrate_until: Some("2027-01-31".into()),
            old_clients_until: Some(String::new()),
            grants: None,
        };
        let before = Earlier {
            kubernetes: "v1.31.13".into(),
            kubeadm: "v1.31.13".into(),
            policy: "{}".into(),
            node_version: Some(["ami-0".into(), "v2.16.4".into(), "k8s-components-x".into()]),
            agent_check: Some("Socket".into()),
            objects: Before {
                objects: vec![json!({"kind": "ConfigMap"})],
                absent: vec![json!({"kind": "Role"})],
            },
        };
        MigrationRecord {
            begun: MoveStep::Nodes,
            done: MoveStep::Policy,
            ..MigrationRecord::new(wanted, before)
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let bare = MigrationRecord {
            is_undone: true,
            ..MigrationRecord::new(Texts::default(), Earlier::default())
        };
        let seal = seal(1, 2);
        for record in [record(), bare] {
            let text = record.text(&seal);
            assert_eq!(
                MigrationRecord::parse(text.as_bytes(), &seal).unwrap(),
                record
            );
        }
    }

    #[test]
    fn a_record_of_somebody_without_the_master_secret_or_of_another_cluster_is_refused() {
        let text = record().text(&seal(1, 2));
        let refused = |text: &str, seal: &Seal| {
            let error = MigrationRecord::parse(text.as_bytes(), seal).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("not written with the master secret"),
                "{error}"
            );
        };
        refused(&text, &seal(3, 2));
        refused(&text, &seal(1, 3));
        refused(&text.replace("\"Role\"", "\"Secret\""), &seal(1, 2));
        refused("{}", &seal(1, 2));
        let mut without: Value = serde_json::from_str(&text).unwrap();
        without.as_object_mut().unwrap().remove(MAC);
        refused(&without.to_string(), &seal(1, 2));
    }

    #[test]
    fn options_replace_what_the_record_has_and_nothing_else() {
        let given = Wanted {
            image: Some("registry.example/a:2".into()),
            migration: Some("2027-02-28".parse().unwrap()),
            ..Wanted::default()
        };
        let expected = Texts {
            image: "registry.example/a:2".into(),
            migrate_until: Some("2027-02-28".into()),
            ..record().wanted
        };
        assert_eq!(record().merged(&given), expected);
        assert_eq!(record().merged(&Wanted::default()), record().wanted);
    }

    #[test]
    fn mutated_records_are_read_or_refused() {
        let seal = seal(1, 2);
        let text = record().text(&seal);
        // spaces between the fields have no meaning
        let good = mutations(text.as_bytes(), 20_000)
            .filter_map(|bytes| MigrationRecord::parse(&bytes, &seal).ok())
            .collect::<Vec<_>>();
        assert!(good.iter().all(|it| *it == record()), "{good:?}");
    }
}
