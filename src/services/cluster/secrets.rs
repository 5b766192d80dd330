//! The secrets in a ticket: keys of the key service, and the measurement salt.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::keys::{self, KeyClient};
use super::refusal::TicketRefusal;
use base::crypto::{
    KEY_LEN, MEASUREMENT_SALT_LEN, MEASUREMENT_SECRET_ID, SSH_HOST_CA_SEED_ID,
    SSH_USER_CA_PUBLIC_ID, SSH_USER_CA_SEED_ID, Secret,
};
use base::uuid::Uuid;
use ssh::key::ED25519_BLOB_LEN;
use ssh::{Authority, PublicKey};

/// The measurement salt, raw bytes, in the configuration directory.
const MEASUREMENT_SALT_FILE: &str = "measurementSalt";

/// The secrets of the cluster. Those that are the same in every ticket are requested once.
pub struct Secrets {
    keys: KeyClient,
    config_dir: PathBuf,
    measurement_secret: OnceLock<Secret>,
    ssh: OnceLock<Arc<SshAuthorities>>,
}

/// The part of the cluster's two SSH authorities that tickets need. It does not permit a login
/// anywhere.
pub struct SshAuthorities {
    /// Signs the host certificates of nodes.
    pub hosts: Authority,
    /// The authority of users, which nodes trust.
    pub users: PublicKey,
}

impl Secrets {
    /// Returns whether the key service has given a key.
    pub fn are_served(&self) -> bool {
        self.keys.has_answered()
    }

    /// Uses this client of the key service, and the salt in this directory.
    pub fn new(keys: KeyClient, config_dir: PathBuf) -> Secrets {
        Secrets {
            keys,
            config_dir,
            measurement_secret: OnceLock::new(),
            ssh: OnceLock::new(),
        }
    }

    /// Returns the key of a state disk.
    pub fn disk_key(
        &self,
        disk: &Uuid,
        deadline: Option<Instant>,
    ) -> Result<Secret, TicketRefusal> {
        Ok(self.keys.data_key(disk.as_str(), KEY_LEN, deadline)?)
    }

    /// Returns the measurement secret.
    pub fn measurement_secret(&self, deadline: Option<Instant>) -> Result<Secret, TicketRefusal> {
        if let Some(secret) = self.measurement_secret.get() {
            return Ok(secret.clone());
        }
        let secret = self
            .keys
            .data_key(MEASUREMENT_SECRET_ID, KEY_LEN, deadline)?;
        Ok(self.measurement_secret.get_or_init(|| secret).clone())
    }

    /// Returns the SSH authorities.
    pub fn ssh(&self, deadline: Option<Instant>) -> Result<Arc<SshAuthorities>, TicketRefusal> {
        if let Some(ssh) = self.ssh.get() {
            return Ok(ssh.clone());
        }
        let authority = |id| {
            let seed = self.keys.data_key(id, KEY_LEN, deadline)?;
            Authority::from_seed(&seed)
                .map_err(|error| TicketRefusal::internal("keys-refused", error.to_string()))
        };
        let users = self
            .keys
            .data_key(SSH_USER_CA_PUBLIC_ID, ED25519_BLOB_LEN, deadline)?;
        let users = match PublicKey::from_blob(users.expose()) {
            Ok(key) => key,
            // Constellation's key service does not know this identifier, and derives a symmetric
            // key from it.
            Err(_) => authority(SSH_USER_CA_SEED_ID)?.public().clone(),
        };
        let hosts = authority(SSH_HOST_CA_SEED_ID)?;
        let ssh = Arc::new(SshAuthorities { hosts, users });
        Ok(self.ssh.get_or_init(|| ssh).clone())
    }

    /// Reads the cluster's measurement salt.
    pub fn measurement_salt(&self) -> Result<Secret, TicketRefusal> {
        let path = self.config_dir.join(MEASUREMENT_SALT_FILE);
        let refuse = |details: String| {
            let message = "the services have no measurement salt: `firstlight apply` installs it, and docs/standalone.md makes one without Kubernetes";
            TicketRefusal::missing("salt", message)
                .with_details(format!("{}: {details}", path.display()))
        };
        match fs::read(&path) {
            Ok(salt) if salt.len() == MEASUREMENT_SALT_LEN => Ok(Secret::new(salt)),
            Ok(salt) => Err(refuse(format!(
                "expected {MEASUREMENT_SALT_LEN} bytes, got {}",
                salt.len()
            ))),
            Err(error) => Err(refuse(error.to_string())),
        }
    }
}

impl From<keys::Error> for TicketRefusal {
    fn from(error: keys::Error) -> TicketRefusal {
        match error {
            keys::Error::Temporary(details) => {
                let message = "the key service does not answer at the moment: try again";
                TicketRefusal::temporary("keys", message, Duration::from_secs(2))
                    .with_details(details)
            }
            // the reason names no secret, and the node's operator has no other information
            keys::Error::Waiting(reason) => {
                let message = format!("the key service cannot give keys yet: {reason}");
                TicketRefusal::temporary("keys-waiting", message, Duration::from_secs(5))
            }
            keys::Error::Permanent(details) => TicketRefusal::internal("keys-refused", details),
        }
    }
}
