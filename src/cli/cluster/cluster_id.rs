//! `firstlight cluster-id`: the ID that a cluster will have, before its first node exists.

use std::path::Path;

use base::options::Opt;
use base::program;
use base::text::hex;
use serde_json::json;

use crate::cluster::init::expected_cluster_id;
use crate::shell::{
    error::Error,
    output::{OUTPUT, Output},
    usage::Command,
};
use crate::workspace::{
    keeping::{CREATE_KEY, Wish},
    master_secret::{self, MASTER_SECRET_FILE, Origin},
    state::{STATE_FILE, State},
};

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "cluster-id",
    summary: "print the ID of a cluster, for the setting cluster-id of its image",
    about: &[
        "The ID follows from the master secret and the salt in the state file. If a file does not exist, the command makes it, as \
         `firstlight init` would; init then takes these files, and the node gets this ID.",
        "A node whose image has the setting cluster-id accepts only tickets, keys and an init of this cluster.",
    ],
    operand: None,
    options: &[
        Opt::value(
            "master-secret",
            "FILE",
            "the master secret; a new one is written if the file does not exist",
        )
        .or(MASTER_SECRET_FILE),
        Opt::value(
            "kms",
            "URI",
            "write a new master secret only as the key of this external KMS wraps it (docs/kms.md); quote it in a shell",
        ),
        CREATE_KEY,
        Opt::value(
            "state",
            "FILE",
            "the file with the measurement salt; a new one is written if it does not exist",
        )
        .or(STATE_FILE),
        OUTPUT,
    ],
    examples: &[
        "firstlight cluster-id",
        "firstlight cluster-id --master-secret secret.json --state state.json",
    ],
    run: |given| {
        let wish = Wish {
            kms: given.value("kms").map(program::text).transpose()?,
            create_key: given.has("create-key"),
            access: None,
        };
        let (secret, state) = (given.path("master-secret"), given.path("state"));
        run(&secret, &wish, &state, Output::of(given)?)
    },
};

fn run(secret: &Path, wish: &Wish, state: &Path, output: Output) -> Result<(), Error> {
    if wish.kms.is_none() && wish.create_key {
        return Err(Error::Usage("--create-key needs --kms".into()));
    }
    let state = match State::find(state)? {
        Some(state) => state,
        None => State::create(state)?,
    };
    let (kms, origin) = master_secret::open_or_create(secret, wish).map_err(Error::failed)?;
    if origin == Origin::Created {
        log::warn!(
            "a new master secret is in {}: without it the cluster cannot be recovered",
            secret.display()
        );
    }
    let id = expected_cluster_id(&kms, &state.measurement_salt)?;
    if let Some(other) = state.cluster_id.filter(|it| *it != id) {
        return Err(Error::failed(format!(
            "the state file is of the cluster {}, and this master secret makes the cluster {}: one of the two files belongs to another cluster",
            hex(&other),
            hex(&id)
        )));
    }
    output.json(&json!({"clusterID": hex(&id)}))?;
    output.say(hex(&id))
}
