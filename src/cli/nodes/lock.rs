//! Lets one command work at a time that takes nodes away, for ever or for a reboot: two would each count the control plane that the
//! other one takes.
//!
//! The Lease is renewed every few seconds. One that is not renewed any more, because its command was killed, is taken over.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use base::crypto::random;
use base::stop::Stop;
use base::text::hex;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, LEASES, Object};
use kubernetes::objects::Lease;
use serde_json::{Value, json};

use crate::shell::{
    error::Error,
    progress::{Progress, printable},
};

/// The name of the Lease.
const NAME: &str = "firstlight-nodes";
/// How often the Lease is renewed.
const RENEWAL: Duration = Duration::from_secs(4);
/// How long a Lease must be unchanged, by the clock of this machine, before another command takes it.
const VALIDITY: Duration = Duration::from_secs(20);
/// How long ago the last renewal may be of a command that is shown as running.
const SHOWN: Duration = Duration::from_secs(60);

/// The Lease, held. Dropping it ends the renewal, and deletes the Lease.
pub struct Lock {
    client: Client,
    holder: String,
    stop: Stop,
    renewal: Option<JoinHandle<()>>,
}

fn object() -> Object {
    LEASES.in_namespace(NAMESPACE).named(NAME)
}

/// Returns the fields of the Lease that somebody holds.
fn held_by(holder: &str) -> Value {
    let now = time::micros(SystemTime::now());
    json!({"spec": {"holderIdentity": holder, "leaseDurationSeconds": VALIDITY.as_secs(), "renewTime": now}})
}

impl Lock {
    /// Takes the Lease for a command, or waits until one that is not renewed has ended.
    pub fn take(client: &Client, command: &str, progress: &Progress) -> Result<Lock, Error> {
        // the operator's name helps the next one, and the random part tells two commands of one operator apart
        let user = std::env::var("USER").unwrap_or_else(|_| "unknown".into());
        let holder = format!("{user}-{} (firstlight {command})", hex(&random::<4>()));
        let mut seen: Option<(String, Instant)> = None;
        loop {
            let mut new = json!({"metadata": {"name": NAME}});
            client::merge(&mut new, held_by(&holder));
            if client.create_if_absent(&LEASES.in_namespace(NAMESPACE), &new)? {
                break;
            }
            let Some((lease, whole)) = client.find_whole::<Lease>(&object())? else {
                continue;
            };
            // the answer to an earlier try was lost
            if lease.spec.holder_identity == holder {
                break;
            }
            let version = &lease.metadata.resource_version;
            let other = printable(&lease.spec.holder_identity);
            let (before, since) = seen.get_or_insert_with(|| {
                progress.phase(format!("waiting whether {other} still runs"));
                (version.clone(), Instant::now())
            });
            if version != before {
                return Err(Error::Refused(format!(
                    "{other} changes the nodes of this cluster at this moment (Lease {NAMESPACE}/{NAME}): wait until it has ended, \
                     because both count the members of etcd that stay"
                )));
            }
            if since.elapsed() >= VALIDITY {
                match client.write(&object(), Some(whole), held_by(&holder)) {
                    Ok(_) => break,
                    Err(error) if error.is_conflict() || error.is_not_found() => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            if client.stopped_within(Duration::from_secs(1)) {
                return Err(client::Error::Stopped.into());
            }
        }
        let mut lock = Lock {
            client: client.within(RENEWAL),
            holder,
            stop: Stop::new(),
            renewal: None,
        };
        lock.start()?;
        Ok(lock)
    }

    fn start(&mut self) -> Result<(), Error> {
        let (client, holder, stop) = (self.client.clone(), self.holder.clone(), self.stop.clone());
        let renew = move || {
            while !stop.wait(RENEWAL) {
                let renewed = client.modify_as(&object(), |lease: Lease, _| {
                    let is_ours = lease.spec.holder_identity == holder;
                    is_ours.then(|| held_by(&holder))
                });
                // `check` finds out whether the Lease is lost
                if let Err(error) = renewed {
                    log::debug!("{error}: renewing the Lease again");
                }
            }
        };
        let thread = thread::Builder::new().name("lease".into()).spawn(renew);
        self.renewal = Some(thread.map_err(Error::failed)?);
        Ok(())
    }

    /// Checks before a change that no other command has taken the Lease.
    pub fn check(&self) -> Result<(), Error> {
        let lease = self.client.within(VALIDITY).find_as(&object())?;
        let lease: Lease = lease.unwrap_or_default();
        if lease.spec.holder_identity == self.holder {
            Ok(())
        } else {
            Err(Error::Refused(format!(
                "the Lease {NAMESPACE}/{NAME} is no longer that of this command but of {:?}, because the API server did not answer for \
             {} s, or somebody deleted it: run the command again, which goes on",
                printable(&lease.spec.holder_identity),
                VALIDITY.as_secs()
            )))
        }
    }
}

/// Returns who runs this command, for people: a Lease that was renewed lately, by the clock of this machine.
pub fn holder(client: &Client, command: &str) -> Result<Option<String>, client::Error> {
    let lease: Lease = client.find_as(&object())?.unwrap_or_default();
    let renewed = time::parse(&lease.spec.renew_time).unwrap_or(SystemTime::UNIX_EPOCH);
    // clocks may differ, so a time to come is late enough
    let is_old = renewed.elapsed().is_ok_and(|age| age > SHOWN);
    let holder = lease.spec.holder_identity;
    let is_its = holder.ends_with(&format!("(firstlight {command})"));
    Ok((is_its && !is_old).then_some(holder))
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(renewal) = self.renewal.take() {
            let _ = renewal.join();
        }
        // a Lease that stays ends by itself
        if let Ok(Some(lease)) = self.client.find_as::<Lease>(&object())
            && lease.spec.holder_identity == self.holder
        {
            let _ = self.client.delete_as(&object(), &lease.metadata);
        }
    }
}
