//! Signs a snapshot with a key that follows from the operator's master secret. Each control plane can verify it.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base::crypto::{MEASUREMENT_SALT_LEN, Secret};
use base::text::hex;
use base::time;
use kubernetes::client::Client;
use kubernetes::etcd_signature::{Statement, file_of};
use kubernetes::{services, wrapping_key};

use super::download::DownloadedSnapshot;
use crate::cluster::init::expected_cluster_id;
use crate::nodes::etcd_members::Etcd;
use crate::shell::{error::Error, files};
use crate::workspace::{master_secret::SecretSource, state};

/// The key, and the cluster that it is of.
pub struct Signer {
    key: Secret,
    cluster: String,
}

impl Signer {
    /// Reads the master secret. Refuses one of another cluster, if the state file shows that: no control plane would accept the signature.
    pub fn of(client: &Client, secret: &SecretSource, state: &Path) -> Result<Signer, Error> {
        let kms = secret.read()?;
        let salt = services::present_salt(client)?.unwrap_or_default();
        let salt: [u8; MEASUREMENT_SALT_LEN] = salt.try_into().map_err(|_| {
            Error::Refused(
                "the cluster has no measurement salt (ConfigMap kube-system/join-config): run `firstlight apply` first"
                    .into(),
            )
        })?;
        let cluster = expected_cluster_id(&kms, &salt)?;
        let state = state::State::find(state)?;
        let state = state.filter(|it| it.measurement_salt == salt);
        if let Some(expected) = state
            .and_then(|it| it.cluster_id)
            .filter(|it| *it != cluster)
        {
            return Err(Error::content(format!(
                "this is the master secret of another cluster: expected one that makes the cluster {} (see the state file), got one that \
                 makes {}",
                hex(&expected),
                hex(&cluster)
            )));
        }
        Ok(Signer {
            key: wrapping_key::of(&kms),
            cluster: hex(&cluster),
        })
    }

    /// Writes the signature beside a snapshot, which has the objects through this revision of an etcd of
    /// this version. Returns its path.
    pub fn sign(
        &self,
        file: &Path,
        etcd: &Etcd,
        snapshot: &DownloadedSnapshot,
        revision: u64,
        version: &str,
    ) -> Result<PathBuf, Error> {
        let statement = Statement {
            cluster: self.cluster.clone(),
            node: etcd.node().into(),
            machine: etcd.plane().record.machine.clone(),
            revision,
            sha256: snapshot.hash.clone(),
            etcd: version.into(),
            saved: time::seconds(SystemTime::now()),
            firstlight: env!("CARGO_PKG_VERSION").into(),
            ..Statement::default()
        };
        let path = file_of(file);
        files::create_private(&path, statement.sign(&self.key).as_bytes())?;
        Ok(path)
    }
}
