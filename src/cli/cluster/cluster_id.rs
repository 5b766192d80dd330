//! `firstlight cluster-id`: the ID that a cluster will have, before its first node exists.

use std::path::PathBuf;

use base::text::hex;
use clap::Args;
use serde_json::json;

use crate::cluster::init::expected_cluster_id;
use crate::shell::{error::Error, output::Output};
use crate::workspace::{
    keeping::Wish,
    master_secret::{self, MASTER_SECRET_FILE, SecretOrigin},
    state::{STATE_FILE, State},
};

/// Print the ID of a cluster, for the setting cluster-id of its image
///
/// The ID follows from the master secret and the salt in the state file. If a file does not exist, the command makes
/// it, as `firstlight init` would; init then takes these files, and the node gets this ID.
///
/// A node whose image has the setting cluster-id accepts only tickets, keys and an init of this cluster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight cluster-id
  firstlight cluster-id --master-secret secret.json --state state.json")]
pub struct Options {
    /// The master secret; a new one is written if the file does not exist
    #[arg(long, value_name = "FILE", default_value = MASTER_SECRET_FILE)]
    master_secret: PathBuf,
    /// Write a new master secret only wrapped by this key of an external KMS (docs/kms.md); quote the URI in a shell
    #[arg(long, value_name = "URI")]
    kms: Option<String>,
    /// With --kms: make the key if it is missing
    #[arg(long, requires = "kms")]
    create_key: bool,
    /// The file with the measurement salt; a new one is written if it does not exist
    #[arg(long, value_name = "FILE", default_value = STATE_FILE)]
    state: PathBuf,
    #[command(flatten)]
    output: Output,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let (secret, output) = (&options.master_secret, options.output);
    let wish = Wish {
        kms: options.kms.clone(),
        create_key: options.create_key,
        access: None,
    };
    let state = &options.state;
    let state = match State::find(state)? {
        Some(state) => state,
        None => State::create(state)?,
    };
    let (kms, origin) = master_secret::open_or_create(secret, &wish)?;
    if origin == SecretOrigin::Created {
        log::warn!(
            "a new master secret is in {}: back it up; without it, the cluster cannot be recovered",
            secret.display()
        );
    }
    let id = expected_cluster_id(&kms, &state.measurement_salt)?;
    if let Some(other) = state.cluster_id.filter(|it| *it != id) {
        return Err(Error::content(format!(
            "the state file is of the cluster {}, and this master secret makes the cluster {}: one of the two files belongs to another cluster",
            hex(&other),
            hex(&id)
        )));
    }
    output.json(&json!({"clusterID": hex(&id)}))?;
    output.say(hex(&id))
}
