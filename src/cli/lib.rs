//! `firstlight`, the operator's command. Each command has a file. The commands share the tables of
//! `commands` (from which `usage`, `completions` and `man` are made), the operator's `files`,
//! `connect`, which reaches a node, and `progress`, which shows the progress of a command that
//! waits.
//!
//! Results go to standard output, everything else to standard error. The exit codes are those of
//! [`base::program`], the two here, and those of `status`.

mod addons;
mod apply;
pub mod chart;
mod collateral;
mod commands;
mod completions;
mod components;
mod config;
mod connect;
pub mod explain;
mod files;
mod hash_secret;
mod init;
mod interrupt;
mod keeping;
mod kubeconfig;
mod launch_digest;
mod launch_endorsement;
mod man;
mod master_secret;
mod measure;
mod measure_image;
mod metadata;
mod output;
pub mod policy;
mod progress;
mod recover;
mod roots;
mod share;
pub mod shares;
mod sources;
mod ssh;
mod state;
mod status;
pub mod timeline;
mod upgrade;
mod usage;
pub mod verify;
mod version;
mod warnings;
mod wrap;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use base::crypto::CLUSTER_ID_LEN;
use base::program::{self, Failure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cloud::Machines;
use connect::{Endpoint, Trust};
use hardware::snp::tcb::Product;
use keeping::Wish;
use kubernetes::parameters::Version;
use kubernetes::services::migration::Migration;
use kubernetes::services::{MetadataService, Phase};
use lexopt::prelude::*;
use machines::Cloud;
use master_secret::Source;
use output::{Output, say, say_all};
use proto::recoverproto;
use sys::process;
use usage::Given;
use verifier::{KeyName, Registers, Variant};

/// The values of `apply --require`.
const REQUIRE: [&str; 2] = ["strong", "any"];
/// The names of AMD's products.
const PRODUCTS: [&str; 3] = ["Milan", "Genoa", "Turin"];
/// Exit code: the node does not meet the policy. A retry does not help.
pub const ATTESTATION_REFUSED: u8 = 3;
/// Exit code: the node could not be reached, or did not answer in time.
pub const UNREACHABLE: u8 = 4;

/// Returns the text that `--help` prints.
pub fn help() -> String {
    commands::PROGRAM.help()
}

/// Runs the command that the arguments name.
pub fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    warnings::init();
    // this process's memory contains the master secret
    process::keep_memory_private().map_err(|error| {
        Failure::failed(format!("cannot keep memory out of core dumps: {error}"))
    })?;
    let program = &commands::PROGRAM;
    let command = |name: OsString| {
        let name = program::text(name)?;
        let names = program.commands.iter().map(|command| command.name);
        let found = program.commands.iter().find(|command| command.name == name);
        found.ok_or_else(|| {
            let suggestion = usage::suggestion("", &name, names);
            Failure::Usage(format!("there is no command {name:?}{suggestion}"))
        })
    };
    let mut before = usage::Values::new();
    let command = loop {
        match args.next()? {
            Some(Value(name)) if name == "help" => {
                let about = match args.next()? {
                    Some(Value(name)) => command(name)?,
                    Some(other) => return Err(other.unexpected().into()),
                    None => return Err(Failure::Help),
                };
                return Err(match args.next()? {
                    Some(more) => more.unexpected().into(),
                    None => Failure::HelpOn(about.help(program)),
                });
            }
            Some(Value(name)) => break command(name)?,
            Some(Long("help") | Short('h')) => return Err(Failure::Help),
            Some(Long("version") | Short('V')) => break command("version".into())?,
            Some(Long("output") | Short('o')) => before.push((output::OUTPUT.name, args.value()?)),
            Some(Long(unknown)) => {
                let known = ["help", "version", output::OUTPUT.name];
                let suggestion = usage::suggestion("--", unknown, known);
                let text = format!("there is no option --{unknown} before a command{suggestion}");
                return Err(Failure::Usage(text));
            }
            Some(other) => return Err(other.unexpected().into()),
            None => return Err(Failure::Usage("a command is missing".into())),
        }
    };
    let run = || {
        let given = command.parse(program, before, args, config::defaults)?;
        // this command waits for signals itself
        if command.name != "metadata" {
            interrupt::watch(command.name)?;
        }
        sources::set(&given)?;
        (command.run)(&given)
    };
    run().map_err(|failure| failure.of_command(command.name))
}

fn init_options(given: &Given) -> Result<init::Options, Failure> {
    let both = ["init-secret", "master-secret"];
    if both
        .iter()
        .all(|name| files::is_standard_input(&given.path(name)))
    {
        return Err(Failure::Usage(
            "--init-secret - and --master-secret -: only one can be on standard input".into(),
        ));
    }
    Ok(init::Options {
        endpoint: endpoint_of(given, booted_proto::init::PORT)?,
        variant: variant_of(given)?,
        policy: given.path("policy"),
        trust: trust_of(given)?,
        init_secret: given.path("init-secret"),
        master_secret: given.path("master-secret"),
        wish: wish_of(given)?,
        state: given.path("state"),
        kubeconfig: given.path("kubeconfig"),
        merge_kubeconfig: given.has("merge-kubeconfig"),
        log: given.path("log"),
        cluster_name: given.text("cluster-name")?,
        kubernetes: kubernetes_of(given)?,
        verbose: given.has("verbose"),
        is_dry_run: given.has("dry-run"),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn wrap_options(given: &Given) -> Result<wrap::Options, Failure> {
    Ok(wrap::Options {
        output: Output::of(given)?,
        kms: given.text("kms")?,
        create_key: given.has("create-key"),
        master_secret: master_secret_of(given)?,
        out: given.path("out"),
    })
}

/// Returns how the master secret is to be stored.
fn wish_of(given: &Given) -> Result<Wish, Failure> {
    let wish = Wish {
        kms: given.value("kms").map(program::text).transpose()?,
        create_key: given.has("create-key"),
        access: given.value("kms-access").map(PathBuf::from),
    };
    if wish.kms.is_none() && (wish.create_key || wish.access.is_some()) {
        return Err(Failure::Usage(
            "--create-key and --kms-access need --kms".into(),
        ));
    }
    Ok(wish)
}

fn kubernetes_of(given: &Given) -> Result<Option<init::Kubernetes>, Failure> {
    if !given.has("kubernetes-version") {
        let alone = [
            "components",
            "service-cidr",
            "pod-cidr",
            "apiserver-san",
            "skip-addons",
            "image",
            "addons",
            "cloud-provider",
            "metadata",
            "skip-wait",
        ];
        return match alone.into_iter().find(|name| given.has(name)) {
            Some(name) => Err(Failure::Usage(format!(
                "--{name} is for a cluster: --kubernetes-version is missing"
            ))),
            None => Ok(None),
        };
    }
    if let (false, Some(name)) = (
        given.has("image"),
        ["cloud-provider", "metadata"]
            .into_iter()
            .find(|name| given.has(name)),
    ) {
        return Err(Failure::Usage(format!(
            "--{name} is for the services: --image is missing"
        )));
    }
    // the node refuses other versions, and so does `firstlight components`
    let version = given.parsed("kubernetes-version", Version::from_str)?;
    Ok(Some(init::Kubernetes {
        version,
        components: given.value("components").map(Into::into),
        service_cidr: given.text("service-cidr")?,
        pod_cidr: given.text("pod-cidr")?,
        apiserver_sans: given.texts("apiserver-san")?,
        has_kubeadm_addons: !given.has("skip-addons"),
        addons: given.value("addons").map(Into::into),
        image: given.value("image").map(program::text).transpose()?,
        metadata: metadata_of(given)?,
        skip_wait: given.has("skip-wait"),
    }))
}

fn apply_options(given: &Given) -> Result<apply::Options, Failure> {
    let skip_phases = given
        .value("skip-phases")
        .map(program::text)
        .transpose()?
        .unwrap_or_default();
    let phase = |name: &str| {
        Phase::parse(name).ok_or_else(|| {
            Failure::Usage(format!(
                "--skip-phases: {name:?} is not a phase: expected policy, services"
            ))
        })
    };
    let skip_phases: Vec<Phase> = skip_phases
        .split(',')
        .filter(|name| !name.is_empty())
        .map(phase)
        .collect::<Result<_, _>>()?;
    let image = given.value("image").map(program::text).transpose()?;
    if image.is_none() && !skip_phases.contains(&Phase::Services) {
        return Err(Failure::Usage("--image is missing".into()));
    }
    let wish = wish_of(given)?;
    if wish.create_key && given.has("dry-run") {
        return Err(Failure::Usage(
            "--create-key makes a key, and --dry-run changes nothing: give one of them".into(),
        ));
    }
    if wish.kms.is_some() && skip_phases.contains(&Phase::Services) {
        return Err(Failure::Usage(
            "--kms changes the key service: --skip-phases services contradicts it".into(),
        ));
    }
    Ok(apply::Options {
        kubeconfig: kubeconfigs_of(given),
        variant: named_variant(given)?,
        policy: given.path("policy"),
        require_strong: match given.one_of("require", &REQUIRE)?.as_str() {
            "" => None,
            form => Some(form == "strong"),
        },
        image: image.unwrap_or_default(),
        addons: given.value("addons").map(Into::into),
        skip_phases,
        master_secret: master_secret_of(given)?,
        wish,
        state: given.path("state"),
        node_port: given
            .value("node-port")
            .map(|port| program::parsed("node-port", port))
            .transpose()?,
        migration: match given.value("migrate-until") {
            Some(never) if never == "never" => Some(Migration::default()),
            date => date
                .map(|date| program::parsed("migrate-until", date))
                .transpose()?,
        },
        metadata: match given.has("cloud-provider") || given.has("metadata") {
            true => Some(metadata_of(given)?),
            false => None,
        },
        backups: given.path("backups"),
        skip_wait: given.has("skip-wait"),
        print: given.has("print"),
        is_dry_run: given.has("dry-run"),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// Returns the metadata service for the join service. Checks only the form of the options: the
/// address may be reachable only from within the cluster.
fn metadata_of(given: &Given) -> Result<MetadataService, Failure> {
    let cloud = given.text("cloud-provider")?.to_ascii_lowercase();
    if given.value("cloud-provider").is_none() {
        return Err(Failure::Usage(
            "--metadata: --cloud-provider is missing: it names the cloud whose service is at this address".into(),
        ));
    }
    let url = given.value("metadata").map(program::text).transpose()?;
    if cloud == "none" {
        return match url {
            Some(_) => Err(Failure::Usage(
                "--metadata: --cloud-provider none has no metadata service".into(),
            )),
            None => Ok(MetadataService {
                cloud: None,
                url: None,
            }),
        };
    }
    let url = match url.as_deref().and_then(|url| url.strip_prefix("file:")) {
        Some(path) => Some(inline(path.as_ref())?),
        None => url,
    };
    let named = Cloud::named(&cloud);
    match named.and_then(|cloud| cloud_api::metadata(cloud, url.as_deref())) {
        Ok(_) => Ok(MetadataService {
            cloud: Some(cloud),
            url,
        }),
        Err(error @ machines::Error::Url { .. }) => {
            Err(Failure::Usage(format!("--metadata: {error}")))
        }
        Err(error) => Err(Failure::Usage(format!(
            "--cloud-provider: {error}, or none"
        ))),
    }
}

/// Returns the content of a list of machines, because the join service cannot read the operator's
/// file.
fn inline(file: &Path) -> Result<String, Failure> {
    // an argument of a program has at most 128 KiB (Linux)
    const MAX_LIST: usize = 90 << 10;
    let list = files::read(file).map_err(Failure::failed)?;
    let why = match Machines::parse(&list) {
        Ok(_) if list.len() <= MAX_LIST => {
            return Ok(format!("base64:{}", STANDARD.encode(&*list)));
        }
        Ok(_) => format!("it has more than {MAX_LIST} bytes: use `firstlight metadata serve`"),
        Err(error) => error.to_string(),
    };
    Err(Failure::failed(format!("{}: {why}", file.display())))
}

fn metadata_options(given: &Given) -> Result<metadata::Options, Failure> {
    match given.operand()?.as_str() {
        "serve" => Ok(metadata::Options {
            machines: given.path("machines"),
            listen: given.parsed("listen", web::parse_listen)?,
        }),
        other => Err(Failure::Usage(format!("{other:?}: expected serve"))),
    }
}

fn recover_options(given: &Given) -> Result<recover::Options, Failure> {
    let secret = ["master-secret", "share"]
        .into_iter()
        .find(|name| given.has(name));
    let action = match (given.has("status"), secret) {
        (true, None) => recover::Action::Status,
        (true, Some(name)) => return Err(Failure::Usage(format!("--status needs no --{name}"))),
        (false, _) => recover::Action::Push {
            master_secret: master_secret_of(given)?,
            is_migrating: given.has("migrate"),
        },
    };
    Ok(recover::Options {
        endpoint: endpoint_of(given, recoverproto::PORT)?,
        variant: variant_of(given)?,
        policy: given.path("policy"),
        trust: trust_of(given)?,
        state: given.path("state"),
        action,
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

/// Returns the attestation variant of the nodes: from the option, else from the policy, else the
/// option's default.
fn variant_of(given: &Given) -> Result<&'static Variant, Failure> {
    match named_variant(given)? {
        Some(variant) => Ok(variant),
        None => given.parsed("attestation-variant", Variant::named),
    }
}

/// Returns the attestation variant from the option, else from the policy.
fn named_variant(given: &Given) -> Result<Option<&'static Variant>, Failure> {
    if given.has("attestation-variant") {
        let named = given.parsed("attestation-variant", Variant::named);
        return named.map(Some);
    }
    let has_option = |name: &&str| given.command().options.iter().any(|it| it.name == *name);
    let mut policies = ["policy", "add-to"].into_iter().filter(has_option);
    Ok(policies.find_map(|option| named_in(&given.path(option))))
}

/// Returns the attestation variant that a policy names. Does not read a file that cannot be read
/// twice, such as a pipe. Reports no error in the policy: the command that uses the policy does.
fn named_in(policy: &Path) -> Option<&'static Variant> {
    let is_file = std::fs::metadata(policy).is_ok_and(|it| it.is_file());
    let policy = is_file
        .then(|| connect::read_policy(policy).ok())
        .flatten()?;
    Variant::named(policy.variant()?).ok()
}

fn policy_options(given: &Given) -> Result<policy::Options, Failure> {
    use policy::Action;
    let action = given.operand()?;
    let texts = given.further().iter().cloned().map(program::text);
    let texts: Vec<String> = texts.collect::<Result<_, _>>()?;
    let action = match (&*action, &*texts) {
        ("check", [file]) => Action::Check(file.into()),
        ("show", [file]) => Action::Show(file.into()),
        ("diff", [old, new]) => Action::Diff(old.into(), new.into()),
        ("add-key", [file, keys @ ..]) if !keys.is_empty() => {
            Action::AddKey(file.into(), keys.into())
        }
        ("remove-key", [file, keys @ ..]) if !keys.is_empty() => {
            Action::RemoveKey(file.into(), keys.into())
        }
        (known, _) if policy::ACTIONS.contains(&known) => {
            let operands = match known {
                "diff" => "FILE FILE",
                "add-key" | "remove-key" => "FILE KEY..",
                _ => "FILE",
            };
            let text = format!("expected firstlight policy {known} {operands}");
            return Err(Failure::Usage(text));
        }
        (other, _) => {
            let suggestion = usage::suggestion("", other, policy::ACTIONS);
            return Err(Failure::Usage(format!(
                "there is no action {other:?}{suggestion}"
            )));
        }
    };
    let trust_any_tpm = given.has("trust-any-tpm");
    if trust_any_tpm && !matches!(action, Action::RemoveKey(..)) {
        return Err(Failure::Usage("--trust-any-tpm is for remove-key".into()));
    }
    let named = match given.has("attestation-variant") {
        true => None,
        false => texts.first().and_then(|file| named_in(file.as_ref())),
    };
    Ok(policy::Options {
        action,
        variant: match named {
            Some(variant) => variant,
            None => variant_of(given)?,
        },
        trust_any_tpm,
        output: Output::of(given)?,
    })
}

/// Returns the TPMs that may get the master secret.
fn keys_of(given: &Given) -> Result<Vec<KeyName>, Failure> {
    given.each_parsed("attestation-key", str::parse)
}

fn trust_of(given: &Given) -> Result<Trust, Failure> {
    let keys = keys_of(given)?;
    match (given.has("trust-any-tpm"), keys.is_empty()) {
        (true, false) => Err(Failure::Usage(
            "--trust-any-tpm: it makes --attestation-key useless; give one of the two".into(),
        )),
        (true, true) => {
            log::warn!("--trust-any-tpm: {}", commands::ANY_TPM_MEANS);
            Ok(Trust::AnyTpm)
        }
        (false, _) => Ok(Trust::Named(keys.into_iter().collect())),
    }
}

fn measure_options(given: &Given) -> Result<measure::Options, Failure> {
    let tpm = match given.value("tpm") {
        Some(location) => Some(program::parsed("tpm", location)?),
        None => None,
    };
    let add_to = given.value("add-to").map(Into::into);
    let name = given.value("name").map(program::text).transpose()?;
    let is_image = given.has_operand() || given.has("kernel");
    let firmware = given.value("tdx-firmware").map(Into::into);
    let endorsement = launch_endorsement::options(given, is_image)?;
    let snp = launch_digest::options(given)?;
    if firmware.is_some() && (tpm.is_some() || snp.is_some()) {
        return Err(Failure::Usage(
            "--tdx-firmware: a TDX machine has neither a TPM nor SEV-SNP: give it without --tpm and --snp-firmware".into(),
        ));
    }
    let variant = variant_of(given)?;
    if is_image && firmware.is_none() && variant.registers == Registers::Rtmrs {
        return Err(Failure::Usage(format!(
            "--attestation-variant {}: without the firmware the registers cannot be computed: --tdx-firmware is missing",
            variant.name
        )));
    }
    if snp.is_some() && !is_image {
        let of_machine = [
            "tpm",
            "trust-any-tpm",
            "pcrs",
            "initrd",
            "cmdline",
            "memory",
            "explain",
        ];
        if let Some(name) = of_machine.iter().find(|name| given.has(name)) {
            return Err(Failure::Usage(format!(
                "--{name}: --snp-firmware without an image and --kernel measures the firmware alone"
            )));
        }
    }
    let pcrs = match given.has("pcrs") {
        true => Some(given.parsed("pcrs", pcrs)?),
        false => None,
    };
    Ok(measure::Options {
        source: match (is_image, firmware) {
            (true, tdx_firmware) => measure::Source::Image {
                image: measure_image::options(given)?,
                tdx_firmware,
                signs_sha384: variant.judges("cloud.sha384"),
            },
            (false, Some(path)) => measure::Source::TdxFirmware(path),
            (false, None) if snp.is_some() || endorsement.is_some() => {
                measure::Source::FirmwareAlone
            }
            (false, None) => measure::Source::Tpm {
                variant,
                location: tpm,
                trust_any_tpm: given.has("trust-any-tpm"),
            },
        },
        pcrs,
        variant: given.has("attestation-variant").then_some(variant),
        name,
        add_to,
        snp,
        endorsement,
    })
}

fn collateral_options(given: &Given) -> Result<collateral::Options, Failure> {
    Ok(collateral::Options {
        evidence: given.operand()?.into(),
        product: Product::named(&given.one_of("product", &PRODUCTS)?),
    })
}

fn status_options(given: &Given) -> Result<status::Options, Failure> {
    let nodes = match host_of(given)? {
        Some(host) => status::Nodes::One(host),
        None => status::Nodes::Cluster(kubeconfigs_of(given)),
    };
    for name in ["timeline", "svg"] {
        if given.has(name) && matches!(nodes, status::Nodes::Cluster(_)) {
            return Err(Failure::Usage(format!(
                "--{name} needs a node: firstlight status HOST --{name}"
            )));
        }
    }
    Ok(status::Options {
        nodes,
        variant: variant_of(given)?,
        policy: given.path("policy"),
        keys: keys_of(given)?,
        state: given.path("state"),
        cluster_id: match given.has("cluster-id") {
            true => Some(given.parsed("cluster-id", cluster_id)?),
            false => None,
        },
        timeline: given.has("timeline"),
        svg: given.has("svg").then(|| given.path("svg")),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn verify_options(given: &Given) -> Result<verify::Options, Failure> {
    if given.has("fresh") && given.has("cluster-id") {
        return Err(Failure::Usage(
            "--fresh and --cluster-id: give one of the two".into(),
        ));
    }
    Ok(verify::Options {
        source: evidence_source(given)?,
        policy: given.path("policy"),
        variant: variant_of(given)?,
        keys: keys_of(given)?,
        state: given.path("state"),
        cluster_id: match given.has("cluster-id") {
            true => Some(given.parsed("cluster-id", cluster_id)?),
            false => None,
        },
        is_fresh: given.has("fresh"),
        save: given.has("save").then(|| given.path("save")),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn evidence_source(given: &Given) -> Result<verify::Source, Failure> {
    let host = host_of(given)?;
    let endpoint = |port| match &host {
        None => {
            let text = "name the server (HOST[:PORT]), or a file with its evidence (--evidence)";
            Err(Failure::Usage(text.into()))
        }
        Some(host) => Endpoint::parse(host, port).map_err(Failure::Usage),
    };
    match (given.has("evidence"), given.has("plain")) {
        (false, false) => Ok(verify::Source::Server(endpoint(booted_proto::init::PORT)?)),
        (false, true) => Ok(verify::Source::Plain(endpoint(
            booted_proto::verify::NODE_PORT,
        )?)),
        (true, false) if host.is_none() => Ok(verify::Source::File(given.path("evidence"))),
        (true, _) => Err(Failure::Usage(
            "--evidence: give neither a server nor --plain with it".into(),
        )),
    }
}

fn explain_options(given: &Given) -> Result<explain::Options, Failure> {
    let path = |name: &str| given.has(name).then(|| given.path(name));
    let image = path("against-image");
    if image.is_some() && given.has("against") {
        return Err(Failure::Usage(
            "--against and --against-image: give one of the two".into(),
        ));
    }
    for name in ["uki", "profile"] {
        if image.is_none() && given.has(name) {
            let text = format!("--{name}: --against-image is missing");
            return Err(Failure::Usage(text));
        }
    }
    let text = |name| given.value(name).map(program::text).transpose();
    let (uki, profile) = (text("uki")?, text("profile")?);
    let source = host_of(given)?;
    Ok(explain::Options {
        source: source.ok_or_else(|| Failure::Usage("FILE|NODE is missing".into()))?,
        against: path("against"),
        image: image.map(|image| measure_image::of_image(image, uki, profile)),
        policy: path("policy"),
        cluster_id: match given.has("cluster-id") {
            true => Some(given.parsed("cluster-id", cluster_id)?),
            false => None,
        },
        systemd_log: path("systemd-log"),
        pcrs: match given.has("pcrs") {
            true => Some(given.parsed("pcrs", pcrs)?),
            false => None,
        },
        variant: variant_of(given)?,
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn components_options(given: &Given) -> Result<components::Options, Failure> {
    let optional = |name: &str| given.value(name).map(Into::into);
    let action = match (given.has_operand(), given.has("check")) {
        (true, false) => {
            let version = given.operand()?;
            components::Action::Make {
                version: version
                    .parse()
                    .map_err(|error| Failure::Usage(format!("{error}")))?,
                servers: components::Servers {
                    downloads: given.text("downloads")?,
                    registry: given.text("registry")?,
                    etcd: given.value("etcd").map(program::text).transpose()?,
                    authorities: optional("ca"),
                },
            }
        }
        (false, true) => components::Action::Check {
            list: given.path("check"),
            files: optional("files"),
        },
        _ => {
            let text = "give either a VERSION, whose list is made, or --check FILE";
            return Err(Failure::Usage(text.into()));
        }
    };
    Ok(components::Options {
        action,
        timeout: given.parsed("timeout", time)?,
    })
}

fn upgrade_options(given: &Given) -> Result<upgrade::Options, Failure> {
    let version = given.operand()?.parse();
    Ok(upgrade::Options {
        version: version.map_err(|error| Failure::Usage(format!("{error}")))?,
        components: given.path("components"),
        kubeconfig: kubeconfigs_of(given),
        dry_run: given.has("dry-run"),
        output: Output::of(given)?,
        timeout: given.parsed("timeout", time)?,
    })
}

fn timeline_options(given: &Given) -> Result<timeline::Options, Failure> {
    Ok(timeline::Options {
        record: given.operand()?.into(),
        svg: given.has("svg").then(|| given.path("svg")),
        output: Output::of(given)?,
    })
}

fn cluster_id(text: &str) -> Result<[u8; CLUSTER_ID_LEN], &'static str> {
    state::unhex(text).ok_or("expected 64 hexadecimal digits")
}

fn ssh_options(given: &Given) -> Result<ssh::Options, Failure> {
    Ok(ssh::Options {
        output: Output::of(given)?,
        key: given.path("key"),
        master_secret: master_secret_of(given)?,
        certificate: given.path("certificate"),
        known_hosts: given.path("known-hosts"),
        old_hosts: given.has("old-hosts"),
        overwrite: given.has("overwrite"),
    })
}

fn share_options(given: &Given) -> Result<share::Options, Failure> {
    let output = Output::of(given)?;
    if output == Output::Json && given.has("qr") {
        return Err(Failure::Usage(
            "--qr draws for people, and -o json prints for programs: give one of them".into(),
        ));
    }
    Ok(share::Options {
        output,
        threshold: given.parsed("threshold", str::parse)?,
        count: given.parsed("shares", str::parse)?,
        master_secret: master_secret_of(given)?,
        out: given.path("out"),
        qr: given.has("qr"),
    })
}

/// Returns the source of the master secret.
fn master_secret_of(given: &Given) -> Result<Source, Failure> {
    let shares = given.texts("share")?;
    match (shares.is_empty(), given.has("master-secret")) {
        (true, _) => Ok(Source::File(given.path("master-secret"))),
        (false, false) => Ok(Source::Shares(shares.into_iter().map(Into::into).collect())),
        (false, true) => Err(Failure::Usage(
            "--share and --master-secret: give one of the two".into(),
        )),
    }
}

/// Returns the node or server in the operand or `--endpoint`.
fn host_of(given: &Given) -> Result<Option<String>, Failure> {
    match (given.has_operand(), given.has("endpoint")) {
        (true, true) => Err(Failure::Usage(
            "the node is given twice: give it either as the operand or by --endpoint".into(),
        )),
        (true, false) => given.operand().map(Some),
        (false, true) => given.text("endpoint").map(Some),
        (false, false) => Ok(None),
    }
}

fn endpoint_of(given: &Given, default_port: u16) -> Result<Endpoint, Failure> {
    let host = host_of(given)?;
    let host = host.ok_or_else(|| {
        Failure::Usage("--endpoint is missing: name the node, HOST[:PORT]".into())
    })?;
    Endpoint::parse(&host, default_port).map_err(Failure::Usage)
}

/// Returns the administrator's kubeconfigs: from the option, else from `$KUBECONFIG` as kubectl
/// reads it, else the option's default.
fn kubeconfigs_of(given: &Given) -> Vec<PathBuf> {
    let option = given.path("kubeconfig");
    if given.has("kubeconfig") {
        return vec![option];
    }
    let named = kubeconfig::of_environment();
    if named.is_empty() {
        return vec![option];
    }
    if option.exists() {
        log::warn!(
            "using the kubeconfig of $KUBECONFIG, not {0} in this folder: to use the latter, give --kubeconfig {0}",
            option.display()
        );
    }
    named
}

fn pcrs(text: &str) -> Result<Vec<u32>, &'static str> {
    let pcrs: Result<_, _> = text.split(',').map(str::parse).collect();
    pcrs.map_err(|_| "expected numbers separated by commas, as 4,9,15")
}

/// Parses a whole number of seconds, minutes or hours, from a second to a day. A number without a
/// unit means seconds.
fn time(text: &str) -> Result<Duration, &'static str> {
    let seconds = || {
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[number.len()..] {
            "" | "s" => 1,
            "m" => 60,
            "h" => 3600,
            _ => return None,
        };
        let seconds = number.parse::<u64>().ok()?.checked_mul(unit)?;
        (1..=24 * 3600)
            .contains(&seconds)
            .then(|| Duration::from_secs(seconds))
    };
    seconds().ok_or("expected 1s to 24h, as 90, 90s, 10m or 1h")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_minutes_or_hours_within_a_day() {
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(time("3"), Ok(Duration::from_secs(3)));
        assert_eq!(time("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(time("24h"), Ok(Duration::from_secs(86400)));
        for text in [
            "",
            "s",
            "0s",
            "25h",
            "-1s",
            "1.5h",
            "0",
            "+",
            "10d",
            "10ms",
            "99999999999999999999s",
            "1ü",
            "99999999999999999h",
        ] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    /// Parses the command line after `firstlight`.
    fn given(args: &[&str]) -> Given {
        let program = &commands::PROGRAM;
        let command = program
            .commands
            .iter()
            .find(|command| command.name == args[0])
            .unwrap();
        command
            .parse(
                program,
                vec![],
                lexopt::Parser::from_args(&args[1..]),
                |_| Ok(vec![]),
            )
            .unwrap()
    }

    fn refusal<T>(options: Result<T, Failure>) -> String {
        match options.err() {
            Some(Failure::Usage(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_services_are_told_which_metadata_service_to_ask() {
        let apply = |more: &[&str]| {
            let args = [&["apply", "--policy", "p", "--image", "i"], more].concat();
            apply_options(&given(&args)).map(|options| options.metadata.unwrap_or_default())
        };
        let init = |more: &[&str]| {
            let args = [
                &[
                    "init",
                    "--endpoint",
                    "h",
                    "--policy",
                    "p",
                    "--init-secret",
                    "s",
                ],
                more,
            ]
            .concat();
            init_options(&given(&args))
                .map(|options| options.kubernetes.map(|kubernetes| kubernetes.metadata))
        };
        let (url, cluster) = (
            "http://10.9.0.1:81",
            ["--kubernetes-version", "v1.34.4", "--image", "i"],
        );
        let of = |cloud: Option<&str>, url: Option<&str>| MetadataService {
            cloud: cloud.map(Into::into),
            url: url.map(Into::into),
        };
        for (more, expected) in [
            (&[][..], MetadataService::default()),
            (
                &["--cloud-provider", "qemu", "--metadata", url],
                of(Some("qemu"), Some(url)),
            ),
            (&["--csp", "QEMU"], of(Some("qemu"), None)),
            (&["--cloud-provider", "none"], of(None, None)),
        ] {
            assert_eq!(apply(more).unwrap(), expected);
            assert_eq!(
                init(&[&cluster[..], more].concat()).unwrap().unwrap(),
                expected
            );
        }
        for (more, problem) in [
            (
                &["--cloud-provider", "qemu", "--metadata", "10.9.0.1:81"][..],
                "--metadata: metadata: \"10.9.0.1:81\" is not a valid place",
            ),
            (
                &["--cloud-provider", "qemu", "--metadata", ""],
                "--metadata: metadata: \"\" is not a valid place",
            ),
            (
                &["--metadata", url, "--cloud-provider", "none"],
                "--cloud-provider none has no metadata service",
            ),
            (
                &["--cloud-provider", "home"],
                "the cloud \"home\" is not supported; supported: ",
            ),
            (
                &["--cloud-provider", ""],
                "the cloud \"\" is not supported; supported: ",
            ),
        ] {
            for text in [
                refusal(apply(more)),
                refusal(init(&[&cluster[..], more].concat())),
            ] {
                assert!(text.contains(problem), "{text}");
            }
        }
        // the default is for a new cluster; an existing one may be in another cloud
        let alone = init(&[&cluster[..], &["--metadata", url]].concat());
        assert_eq!(alone.unwrap().unwrap(), of(Some("qemu"), Some(url)));
        assert!(refusal(apply(&["--metadata", url])).contains("--cloud-provider is missing"));
        // without the services nothing uses this option
        assert!(refusal(init(&["--metadata", url])).contains("--kubernetes-version is missing"));
        assert!(
            refusal(init(&[&cluster[..2], &["--metadata", url]].concat()))
                .contains("--image is missing")
        );
    }

    #[test]
    fn every_line_of_help_fits_a_wide_terminal() {
        let program = &commands::PROGRAM;
        for text in program
            .commands
            .iter()
            .map(|command| command.help(program))
            .chain([help()])
        {
            for line in text.lines() {
                assert!(line.len() <= 120, "{line}");
            }
        }
    }
}
