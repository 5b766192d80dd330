//! The steps of a move. Each can be repeated, so a move continues where it stopped, also by another operator.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base::crypto::{CLUSTER_ID_LEN, MEASUREMENT_SALT_LEN};
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client, NODES, Selector};
use kubernetes::constellation::node_version::{COMPONENTS, IMAGE, IMAGE_VERSION, NodeVersion};
use kubernetes::control_planes::is_labelled;
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::objects::NodeObject;
use kubernetes::services::migration::Migration;
use kubernetes::services::{self, Before, Maker, Phase};

use super::facts::{self, Facts};
use super::nodes;
use super::plan;
use super::record::{self, Earlier, FILE, MigrationRecord, MoveStep, STEPS, Seal, Texts};
use super::wanted::Options;
use super::workspace::Workspace;
use crate::cluster::{apply, init::expected_cluster_id};
use crate::shell::{error::Error, interrupt, progress::Progress};
use crate::trust::policy::both_images;
use crate::workspace::{
    keeping::Wish,
    state::{STATE_FILE, State},
};

/// NodeVersion's imageVersion while the nodes run Firstlight. It is no number, so that Constellation's command replaces no image.
pub const IMAGE_OF_FIRSTLIGHT: &str = "firstlight";

/// A move of a cluster.
pub struct Move<'a> {
    /// The cluster.
    pub client: &'a Client,
    /// The options of the command line.
    pub options: &'a Options,
    /// Shows the progress.
    pub progress: &'a Progress,
    /// Seals the record.
    pub seal: Seal,
    salt: [u8; MEASUREMENT_SALT_LEN],
    id: [u8; CLUSTER_ID_LEN],
}

impl<'a> Move<'a> {
    /// Reads the master secret and the cluster's measurement salt.
    pub fn new(
        client: &'a Client,
        options: &'a Options,
        progress: &'a Progress,
    ) -> Result<Move<'a>, Error> {
        let salt = services::present_salt(client)?.unwrap_or_default();
        let salt = salt.try_into().map_err(|salt: Vec<u8>| {
            Error::content(format!(
                "join-config: expected a measurement salt of 32 bytes, got {}. Is this a cluster of Constellation? Nothing was changed",
                salt.len()
            ))
        })?;
        let secret = options.master_secret.read()?;
        let id = expected_cluster_id(&secret, &salt)?;
        Ok(Move {
            client,
            options,
            progress,
            seal: Seal::new(&secret, &id)?,
            salt,
            id,
        })
    }

    /// Does the steps that are left.
    pub fn apply(&self) -> Result<MigrationRecord, Error> {
        let mut record = match self.record()? {
            None => self.begin()?,
            Some(record) => self.go_on(record)?,
        };
        let last = if self.options.end {
            MoveStep::End
        } else {
            MoveStep::Nodes
        };
        let done = record.done;
        for step in STEPS
            .into_iter()
            .filter(|step| (*step > done) && (*step <= last))
        {
            self.progress.line(format!("step {}", step.name()));
            interrupt::means(
                "what is done stays; run the same command again, or `firstlight migrate undo`",
            );
            record.begun = record.begun.max(step);
            record.save(self.client, &self.seal)?;
            self.step(step, &record)
                .map_err(|error| stopped(step, error))?;
            record.done = step;
            record.save(self.client, &self.seal)?;
        }
        Ok(record)
    }

    /// Takes the options that are given into a move that has begun.
    fn go_on(&self, mut record: MigrationRecord) -> Result<MigrationRecord, Error> {
        if record.is_undone {
            return Err(Error::blocked(
                "the move is being undone: run `firstlight migrate undo` until it is done. Nothing was changed",
            ));
        }
        let wanted = record.merged(&self.options.wanted);
        let is_changed = wanted != record.wanted;
        if record.done == MoveStep::End {
            return if is_changed {
                Err(Error::Usage(
                "the move is complete, so these options have no effect: give them to `firstlight apply`".into(),
            ))
            } else {
                Ok(record)
            };
        }
        if is_changed {
            // each step can be repeated
            record.done = MoveStep::Save;
        }
        record.wanted = wanted;
        check_day(&record.wanted)?;
        self.adopt_state()?;
        record.save(self.client, &self.seal)?;
        Ok(record)
    }

    /// Returns the record of the move: that of the cluster, or else the operator's, if the services have moved.
    pub fn record(&self) -> Result<Option<MigrationRecord>, Error> {
        let own = MigrationRecord::in_file(&self.seal)?;
        match (MigrationRecord::find(self.client, &self.seal)?, own) {
            (Some(record), Some(own)) if own.before != record.before => {
                Err(Error::Content(format!(
                    "{FILE} and {} say different things about what the cluster had before: they are of two moves. Move the file away if it is \
                 of an earlier one",
                    record::place()
                )))
            }
            (Some(record), _) => Ok(Some(record)),
            (None, Some(own)) if services::maker(self.client)? == Some(Maker::Firstlight) => {
                self.progress
                    .line(format!("{} is missing: using {FILE}", record::place()));
                Ok(Some(own))
            }
            (None, _) => Ok(None),
        }
    }

    /// Checks that nothing blocks the move, and saves what it changes.
    fn begin(&self) -> Result<MigrationRecord, Error> {
        self.progress.phase("reading the cluster");
        let facts = Facts::read(self.client)?;
        let workspace = Workspace::read(&self.options.master_secret);
        let wanted = &self.options.wanted;
        let blocks = plan::blocks(&facts, &workspace, wanted);
        if !blocks.is_empty() {
            let blocks: Vec<_> = blocks.iter().map(ToString::to_string).collect();
            return Err(Error::blocked(format!(
                "{}. Nothing was changed",
                blocks.join("; ")
            )));
        }
        let missing = wanted.missing(&facts);
        if !missing.is_empty() {
            return Err(Error::Usage(format!("give {}", missing.join("; "))));
        }
        self.progress
            .line(format!("step {}", MoveStep::Save.name()));
        self.adopt_state()?;
        let texts = Texts::of(wanted);
        let policy = facts.policy.clone().unwrap_or_default();
        let options = self.services(&texts, &policy, vec![Phase::Policy])?;
        let manifests = apply::manifests(&options, self.client)?;
        let field = |version: &NodeVersion| {
            [IMAGE, IMAGE_VERSION, COMPONENTS].map(|name| version.field(name).to_owned())
        };
        let before = Earlier {
            kubernetes: facts.version.clone(),
            kubeadm: facts::kubeadm_version(self.client)?,
            policy,
            node_version: facts.node_version.as_ref().map(field),
            agent_check: nodes::agent_check(self.client)?,
            objects: Before::read(self.client, &manifests)?,
        };
        if services::maker(self.client)? != Some(Maker::Constellation) {
            return Err(Error::blocked(
                "another operator has begun to move this cluster: run the same command again",
            ));
        }
        let mut record = MigrationRecord::new(texts, before);
        record.save(self.client, &self.seal)?;
        self.progress
            .line(format!("saved in {FILE} and in {}", record::place()));
        Ok(record)
    }

    /// Writes the state file, by which the other commands know the cluster, if it does not exist.
    pub fn adopt_state(&self) -> Result<(), Error> {
        match State::find(Path::new(STATE_FILE))? {
            Some(state) if state.measurement_salt != self.salt => Err(Error::content(format!(
                "{STATE_FILE} is of another cluster: its measurement salt differs from that in join-config. Move the file away"
            ))),
            Some(_) => Ok(()),
            None => Ok(State::adopt(Path::new(STATE_FILE), self.salt, self.id)?),
        }
    }

    /// Does a step.
    pub fn step(&self, step: MoveStep, record: &MigrationRecord) -> Result<(), Error> {
        let (wanted, before) = (&record.wanted, &record.before);
        match step {
            MoveStep::Save => Ok(()),
            MoveStep::Services => {
                self.bring(&self.services(wanted, &before.policy, vec![Phase::Policy])?)?;
                for removed in Before::remove_left_over(self.client)? {
                    self.progress
                        .line(format!("{removed}: deleted, because nothing uses it"));
                }
                Ok(())
            }
            MoveStep::Policy => {
                let present = services::present_policy(self.client)?.unwrap_or_default();
                self.accept(&both_images(&present, &wanted.policy)?, wanted)
            }
            MoveStep::Nodes => {
                check_day(wanted)?;
                self.nodes(wanted)
            }
            MoveStep::End => self.end(wanted),
        }
    }

    /// Makes this the policy.
    pub fn accept(&self, policy: &str, wanted: &Texts) -> Result<(), Error> {
        self.bring(&self.services(wanted, policy, vec![Phase::Services])?)
    }

    fn nodes(&self, wanted: &Texts) -> Result<(), Error> {
        self.progress.line(
            "from here on `undo` has to move nodes, too; where the node operator replaces machines, the disks of replaced ones do not \
             come back",
        );
        if moves_nodes(self.client)? {
            self.check_options()?;
            nodes::check_agent(self.client, "")?;
            let set = (node_image(wanted)?, IMAGE_OF_FIRSTLIGHT);
            return nodes::by_operator(self.client, set, self.options.timeout, self.progress);
        }
        self.ask_nodes(wanted)?;
        nodes::settle(
            self.client,
            wanted.node_image.as_deref(),
            IMAGE_OF_FIRSTLIGHT,
        )
    }

    /// Refuses an option that has no effect in this cluster.
    pub fn check_options(&self) -> Result<(), Error> {
        if self.options.nodes_moved && moves_nodes(self.client)? {
            Err(Error::Usage(
            "--nodes-moved: Constellation's node operator moves the nodes of this cluster, and would replace those that you start".into(),
        ))
        } else {
            Ok(())
        }
    }

    /// Refuses to go on while a node does not prove the new image.
    fn ask_nodes(&self, wanted: &Texts) -> Result<(), Error> {
        if self.options.nodes_moved {
            return Ok(());
        }
        let variant = services::present_variant(self.client)?.unwrap_or_default();
        let state = State::open(Path::new(STATE_FILE))?;
        let left = nodes::unproven(self.client, &variant, &wanted.policy, &state, self.progress)?;
        if left.is_empty() {
            Ok(())
        } else {
            Err(Error::blocked(format!(
                "{}\nThen run the same command again; if the nodes cannot be asked from here, with --nodes-moved",
                nodes::by_hand(&left)
            )))
        }
    }

    fn end(&self, wanted: &Texts) -> Result<(), Error> {
        self.check_options()?;
        let version = NodeVersion::find(self.client)?;
        if version.is_some_and(|version| version.names_an_image()) {
            nodes::check(self.client, node_image(wanted)?)?;
        } else {
            self.ask_nodes(wanted)?;
        }
        let clients = services::all_old_clients(self.client)?;
        let drivers = clients.drivers.iter();
        for client in drivers
            .chain(&clients.s3_proxies)
            .chain(&clients.maybe_s3_proxies)
        {
            self.progress
                .line(format!("{client} gets no key from now on"));
        }
        self.record_workers()?;
        let never = Texts {
            migrate_until: Some(String::new()),
            old_clients_until: Some(String::new()),
            ..wanted.clone()
        };
        let last = apply::Options {
            keeps_superseded: false,
            ..self.services(&never, &wanted.policy, vec![])?
        };
        self.bring(&last)
    }

    /// Records the workers that have no record: from now on their kubelets renew no certificate without one. `apply` has
    /// recorded the control planes.
    fn record_workers(&self) -> Result<(), Error> {
        let nodes = self
            .client
            .list_as::<NodeObject>(&NODES.all(), &Selector::default())?;
        for node in nodes.items.iter().filter(|node| !is_labelled(node)) {
            let name = &node.metadata.name;
            let record = MachineRecord {
                name: machine_record::name_of_node(name),
                node: name.clone(),
                ..MachineRecord::default()
            };
            let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(&record.name);
            if self.client.find(&at)?.is_none() {
                machine_record::write_if_absent(self.client, &record)?;
                self.progress.line(format!(
                    "{name}: recorded as a worker, so that its kubelet can renew its certificates"
                ));
            }
        }
        Ok(())
    }

    fn bring(&self, options: &apply::Options) -> Result<(), Error> {
        let applied = apply::bring_in(self.client, options, self.progress)?;
        self.progress.line(apply::summary(&applied));
        Ok(())
    }

    /// Returns the options of `firstlight apply` for a step with this policy.
    pub fn services(
        &self,
        wanted: &Texts,
        policy: &str,
        skip_phases: Vec<Phase>,
    ) -> Result<apply::Options, Error> {
        let day = |day: &Option<String>| {
            let parsed = day.as_deref().map(str::parse).transpose();
            parsed.map_err(|error| Error::content(format!("{FILE}: {error}")))
        };
        Ok(apply::Options {
            kubeconfig: self.options.kubeconfig.clone(),
            // errors name it
            policy: "the policy of this step".into(),
            policy_text: Some(policy.to_owned()),
            // only the policy of the step says it: after `--end`, `undo` must admit nodes of Constellation again
            require_strong: Some(false),
            watch: None,
            watch_action: None,
            watch_issuer: None,
            variant: None,
            image: wanted.image.clone(),
            addons: None,
            operator_changes: None,
            skip_phases,
            master_secret: self.options.master_secret.clone(),
            wish: Wish::default(),
            state: STATE_FILE.into(),
            node_port: None,
            migration: day(&wanted.migrate_until)?,
            old_clients: day(&wanted.old_clients_until)?,
            grants: wanted.grants.clone(),
            metadata: None,
            backups: PathBuf::from("."),
            skip_wait: false,
            print: false,
            is_dry_run: false,
            // `undo` brings back the key service that reads it
            keeps_superseded: true,
            control_planes: self.options.control_planes.clone(),
            output: self.options.output,
            timeout: self.options.timeout,
        })
    }
}

/// Refuses to move nodes after the day on which disks of Constellation open for the last time.
pub fn check_day(wanted: &Texts) -> Result<(), Error> {
    let day: Option<Migration> = (wanted.migrate_until.as_deref()).and_then(|day| day.parse().ok());
    if day.is_some_and(|day| day.is_on(SystemTime::now())) {
        Ok(())
    } else {
        Err(Error::content(format!(
            "the day of --migrate-until ({}) is over: a node of Constellation that restarts gets no key. Give a later day",
            wanted.migrate_until.as_deref().unwrap_or_default()
        )))
    }
}

fn node_image(wanted: &Texts) -> Result<&str, Error> {
    wanted.node_image.as_deref().ok_or_else(|| {
        Error::Usage(
            "--node-image is missing: NodeVersion needs the image as the cloud names it".into(),
        )
    })
}

/// Returns whether Constellation's node operator replaces nodes of this cluster.
pub fn moves_nodes(client: &Client) -> Result<bool, Error> {
    let version = NodeVersion::find(client)?;
    let operator = facts::node_operator(client)?;
    Ok(version.is_some_and(|version| version.names_an_image())
        && operator.is_some_and(|operator| operator.is_on))
}

fn stopped(step: MoveStep, error: Error) -> Error {
    error.with_text(|text| {
        format!(
            "the step {} is not done: {text}\nWhat is done stays. Run the same command again, or `firstlight migrate undo`",
            step.name()
        )
    })
}
