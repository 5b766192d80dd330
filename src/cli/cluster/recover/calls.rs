//! The calls of a node's recovery server, and what it answers.

use std::time::{Duration, Instant};

use crate::shell::progress::{human, printable};
use base::master_secret::{MasterSecret, NO_STORE};
use proto::recoverproto::{
    RECOVER, RecoverMessage, RecoverResponse, STATUS, StatusRequest, StatusResponse,
};
use rpc::grpc::{CallOptions, Channel, Status};
use serde_json::{Value, json};

/// Time limit of a status call, which the node answers from memory.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a recover call. The argon2id of a Constellation keyslot may need a GiB of memory
/// and much time on a small machine.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(120);

/// The secrets that are sent to a node.
pub struct RecoverySecrets {
    /// The master secret.
    pub kms: MasterSecret,
    /// The measurement salt; empty unless the cluster is migrating.
    pub measurement_salt: Vec<u8>,
}

/// Asks the node what it waits for.
pub fn status(channel: &Channel) -> Result<StatusResponse, Status> {
    let options = CallOptions {
        timeout: Some(STATUS_TIMEOUT),
        ..CallOptions::default()
    };
    channel.unary(STATUS, &StatusRequest {}, &options)
}

/// Sends the master secret; OK means that the key opens the disk.
pub fn bring(channel: &Channel, key: &RecoverySecrets, deadline: Instant) -> Result<(), Status> {
    let timeout = deadline
        .saturating_duration_since(Instant::now())
        .min(RECOVER_TIMEOUT);
    let options = CallOptions {
        timeout: Some(timeout),
        ..CallOptions::default()
    };
    let message = RecoverMessage {
        kms_uri: key.kms.uri().to_string(),
        storage_uri: NO_STORE.into(),
        measurement_salt: key.measurement_salt.clone(),
    };
    channel
        .unary(RECOVER, &message, &options)
        .map(|RecoverResponse {}| ())
}

/// Returns the status as lines for people, with names of the same width.
pub fn facts(status: &StatusResponse) -> Vec<(&'static str, String)> {
    let or = |text: &str, other: &str| printable(if text.is_empty() { other } else { text });
    let mut facts = vec![
        ("Disk:       ", or(&status.disk_uuid, "not known yet")),
        ("State:      ", or(&status.state, "not known")),
        (
            "Since:      ",
            human(Duration::from_secs(status.waiting_seconds)),
        ),
    ];
    facts.extend(
        status
            .waiting_for
            .iter()
            .map(|source| ("Waiting for:", printable(source))),
    );
    facts
}

/// Returns the status for programs.
pub fn json(status: &StatusResponse) -> Value {
    json!({
        "disk": (!status.disk_uuid.is_empty()).then_some(&status.disk_uuid),
        "state": status.state,
        "seconds": status.waiting_seconds,
        "for": status.waiting_for,
    })
}

/// Returns the status in a phrase.
pub fn summary(status: &StatusResponse) -> String {
    let disk = if status.disk_uuid.is_empty() {
        "not known yet"
    } else {
        &status.disk_uuid
    };
    let (disk, state) = (printable(disk), printable(&status.state));
    format!(
        "disk {disk}, {state} for {}",
        human(Duration::from_secs(status.waiting_seconds))
    )
}
