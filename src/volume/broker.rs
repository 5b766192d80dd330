//! Requests the key of a volume from the key broker, which is a join service with records of disks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use attest::{Issuer, KeyName};
use base::crypto::{KEY_LEN, MEASUREMENT_SALT_LEN, Secret, cluster_id};
use base::stop::Stop;
use base::sync::lock;
use base::text::hex;
use base::uuid::Uuid;
use node::service_trust::{ClusterId, TrustSettings};
use node::ticket_client::{
    self, HostSource, JoinServicePeer, Listing, TicketFailure, TicketRequester,
};
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};

use super::error::Error;
use super::settings::Volume;

/// How often the signals of this program and the time limit are checked.
const TICK: Duration = Duration::from_millis(100);

/// Checks a key on the volume. The error says why the key is not used.
pub type CheckKey = Box<dyn Fn(&Secret) -> Result<(), Error> + Send + Sync>;

struct Asking {
    uuid: Uuid,
    cluster: ClusterId,
    settings: TrustSettings,
    issuer: Arc<dyn Issuer>,
    check: CheckKey,
    /// Set when a key was accepted, or nobody waits for one any more.
    finished: Stop,
    key: Mutex<Option<Secret>>,
    /// The last failure of each service. Only a change is logged.
    failures: Mutex<BTreeMap<String, String>>,
}

/// Asks all hosts of the key broker, again and again, until one sends a key that `check` accepts.
pub fn key(volume: &Volume, check: CheckKey, stop: &Stop) -> Result<Secret, Error> {
    volume.check()?;
    let (Some(uuid), Some(cluster)) = (volume.uuid.clone(), volume.cluster) else {
        return Err(Error::Setting("uuid or cluster-id is missing".into()));
    };
    let issuer = volume.issuer()?;
    announce(issuer.as_ref());
    let asking = Arc::new(Asking {
        uuid,
        cluster,
        settings: volume.demands(),
        issuer,
        check,
        finished: Stop::new(),
        key: Mutex::default(),
        failures: Mutex::default(),
    });
    let hosts = volume.brokers.clone();
    let source = HostSource {
        name: "the settings of the volume",
        goes_on: false,
        list: Arc::new(move || {
            Ok(Listing {
                hosts: hosts.clone(),
                is_complete: true,
            })
        }),
    };
    let deadline = volume.timeout.map(|timeout| Instant::now() + timeout);
    let requests = ticket_client::start(vec![source], asking.clone());
    let _requests = requests.map_err(Error::Thread)?;
    // also if this thread panics
    let _finished = asking.finished.stop_on_drop();
    while !asking.finished.wait(TICK) {
        if stop.is_stopped() {
            return Err(Error::Stopped);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Error::Late(asking.summary()));
        }
    }
    let key = lock(&asking.key).take();
    key.ok_or(Error::Stopped)
}

/// Logs the name of this machine's attestation key, by which a policy can accept the machine.
fn announce(issuer: &dyn Issuer) {
    match issuer.machine() {
        Ok(Some(machine)) => {
            if let Ok(name) = machine.parse::<KeyName>() {
                log::info!("this machine's attestation key: {name}");
            }
            log::info!("this machine's name in the key broker's records: {machine}");
        }
        Ok(None) => {}
        Err(error) => log::warn!("cannot read the name of the attestation key: {error}"),
    }
}

impl Asking {
    fn summary(&self) -> String {
        let failures = lock(&self.failures);
        let failures = failures
            .iter()
            .map(|(source, text)| format!("{source}: {text}"));
        failures.collect::<Vec<_>>().join("; ")
    }

    /// Returns the key of a ticket, which must be from the broker with this ID.
    fn key_of(&self, mut ticket: IssueRejoinTicketResponse) -> Result<Secret, TicketFailure> {
        let key = Secret::new(std::mem::take(&mut ticket.state_disk_key));
        let secret = Secret::new(std::mem::take(&mut ticket.measurement_secret));
        let salt = &ticket.measurement_salt;
        if (key.len(), secret.len(), salt.len()) != (KEY_LEN, KEY_LEN, MEASUREMENT_SALT_LEN) {
            return Err(TicketFailure::lasting(format!(
                "sent a key of {} bytes, a measurement secret of {} bytes and a salt of {} bytes, expected {KEY_LEN}, {KEY_LEN} and \
                 {MEASUREMENT_SALT_LEN}: it is not the join service of a key broker",
                key.len(),
                secret.len(),
                salt.len()
            )));
        }
        let id = cluster_id(&secret, salt);
        if id == self.cluster.0 {
            Ok(key)
        } else {
            Err(TicketFailure::lasting(format!(
                "is another key broker: expected the cluster-id {}, got {}",
                hex(&self.cluster.0),
                hex(&id)
            )))
        }
    }
}

impl TicketRequester for Asking {
    const MAX_PAUSE: Duration = Duration::from_secs(15);
    const MAX_SERVER_PAUSE: Duration = Duration::from_secs(60);

    fn finished(&self) -> &Stop {
        &self.finished
    }

    fn issuer(&self) -> &Arc<dyn Issuer> {
        &self.issuer
    }

    fn demands(&self) -> &TrustSettings {
        &self.settings
    }

    fn request(&self, service: &JoinServicePeer) -> Result<(), TicketFailure> {
        let request = IssueRejoinTicketRequest {
            disk_uuid: self.uuid.to_string(),
        };
        let connection = service.connect(self, None)?;
        let key = self.key_of(connection.call(ISSUE_REJOIN_TICKET, &request)?)?;
        let mut accepted = lock(&self.key);
        if accepted.is_none() {
            (self.check)(&key).map_err(|why| format!("sent a key that does not fit: {why}"))?;
            log::info!("got the key of {} from {service}", self.uuid);
            *accepted = Some(key);
            drop(accepted);
            self.finished.stop();
        }
        Ok(())
    }

    fn asked(&self, source: &str) {
        log::debug!("asked {source}");
    }

    fn answered(&self, _: &str) {}

    fn note(&self, source: &str, failure: &TicketFailure) {
        let before = lock(&self.failures).insert(source.into(), failure.text.clone());
        if before.as_ref() != Some(&failure.text) {
            log::warn!("{source}: {}; asking again", failure.text);
        }
    }

    fn forget(&self, source: &str) {
        lock(&self.failures).remove(source);
    }
}
