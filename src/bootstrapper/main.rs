//! Makes the booted machine a member of a cluster, or starts the programs of a member.

use std::error::Error;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use base::boot::timeline::Timeline;
use base::machines::Cloud;
use base::options::{help, of};
use base::program::{self, Failure};
use base::stop::Stop;
use bootstrapper::members::operator::{MemberMachine, OperatorService};
use bootstrapper::members::update::remote::{self, Remote};
use bootstrapper::members::update::trial::{Trial, TrialEnd};
use bootstrapper::members::update::{self, ImageDisk, Offer};
use bootstrapper::members::{member, renew, restore, upgrade};
use bootstrapper::options::{OPTIONS, Settings};
use bootstrapper::state::generation::Generations;
use bootstrapper::state::peers;
use bootstrapper::steps::clock::TimeService;
use bootstrapper::trust::evidence::{self, Attester};
use bootstrapper::trust::service_trust::ServiceTrust;
use bootstrapper::{Bootstrapper, RunOutcome};
use lexopt::Parser;
use node::options::{self, Options, STOPPED, all};
use node::quotes;
use node::settings;
use proto::init;
use sys::keeping::WipingAllocator;
use verifier::Variant;

/// Wipes freed memory, so that no copy of a secret stays in a buffer of a library. Keeps some wiped
/// blocks for later allocations.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

const HELP: &str = "\
bootstrapper: makes a fresh confidential VM a trusted node of a Kubernetes cluster

Usage: bootstrapper [OPTIONS]      joins a cluster, or starts the member that it already is; then answers `firstlight status`
                                   until SIGTERM
       bootstrapper upgrade [LIST] brings this node to the version of Kubernetes of the list of components in this file, or on
                                   standard input, as `firstlight components` makes it; may be run again
       bootstrapper renew          renews the certificates of this node that end soon, and restarts the programs that use them;
                                   systemd runs it at each boot and once a day
       bootstrapper update [URL]   brings the release of the image in this folder of a web server (default: --update-url) to the slot that
                                   does not run, if the policy of the join services accepts it; the next boot tries it
       bootstrapper trial          keeps a new version of the image if this machine becomes a healthy member with it, or fails; systemd
                                   runs it at each boot, and restarts the machine if it fails
       bootstrapper restore-etcd SNAPSHOT --etcdutl FILE [--dry-run] [--yes]
       bootstrapper restore-etcd --undo [--dry-run] [--yes]
                                   makes etcd of this control plane, if it is the only one that is left, a cluster with the objects
                                   of the snapshot; shows its plan and asks; may be run again, or undone until it has succeeded

Options
";
const RESTORE_HELP: &str = "
Options of restore-etcd
";
const MORE_HELP: &str = "
Example
  bootstrapper --cloud-provider qemu --attestation-variant qemu-vtpm --components /opt/components --events /dev/virtio-ports/events
  bootstrapper --settings
  bootstrapper upgrade < components.json

Exit codes: 0 the node is a member, and the program was stopped; 1 failed (the last line says why); 2 wrong usage;
3 the disk is marked for reset: reboot the machine; 143 stopped by SIGTERM before the node was a member.
";

/// The kubelet of a node of Kubernetes has this file.
const KUBELET_CONFIG: &str = "/etc/kubernetes/kubelet.conf";
/// The defaults of `--trial-healthy` and `--trial-limit`.
const TRIAL_HEALTHY: Duration = Duration::from_secs(300);
const TRIAL_LIMIT: Duration = Duration::from_secs(1800);
/// Exit code: the state disk is marked for reset.
const RESET: u8 = 3;

fn main() -> ExitCode {
    let of_restore = help(&of(restore::OPTIONS));
    let help = [
        HELP,
        &help(&all(OPTIONS)),
        RESTORE_HELP,
        &of_restore,
        MORE_HELP,
    ]
    .concat();
    program::main("bootstrapper", &help, |mut arguments| {
        let mut settings = Settings::default();
        let mut words = arguments.raw_args()?;
        let is_renewal = words.next_if(|word| word == "renew").is_some();
        let is_trial = words
            .next_if(|word| !is_renewal && word == "trial")
            .is_some();
        let is_update = words
            .next_if(|word| !is_renewal && !is_trial && word == "update")
            .is_some();
        if is_update {
            let url = words.next_if(|word| !is_option(word));
            read_settings(&mut settings, arguments)?;
            return update(&settings, url.as_deref());
        }
        let is_upgrade = words.next_if(|word| !is_renewal && !is_trial && word == "upgrade");
        let mut is_command = is_renewal || is_upgrade.is_some();
        let is_restoration = words
            .next_if(|word| !is_command && !is_trial && word == "restore-etcd")
            .is_some();
        is_command = is_restoration || is_upgrade.is_some();
        let file = words.next_if(|word| is_command && !is_option(word));
        if is_restoration {
            return restore::main(
                file.as_deref().map(Path::new),
                arguments,
                settings::ARGUMENTS,
            );
        }
        if is_renewal {
            settings.parse(arguments, settings::ARGUMENTS)?;
            return renew(&settings.shared);
        }
        // an upgrade obeys the image's limits on components, and its time limit for kubeadm; a trial the image's times
        settings.read = is_upgrade.is_some() || is_trial;
        settings.parse(arguments, settings::ARGUMENTS)?;
        if settings.read {
            for (source, option) in settings::read(&all(OPTIONS)) {
                let option = option.map_err(Failure::Usage)?;
                settings.parse(Parser::from_args([option]), source)?;
            }
        }
        if is_trial {
            return trial(&settings);
        }
        match (is_upgrade, settings.serve_evidence) {
            (Some(_), _) => upgrade(&settings, file.as_deref()),
            (None, true) => serve_evidence(&settings.shared),
            (None, false) => start(settings),
        }
    })
}

fn serve_evidence(options: &Options) -> Result<(), Failure> {
    // this process has no secrets and writes no boot record; a signal ends it
    options.start_log();
    sys::process::keep_memory_private().map_err(Failure::failed)?;
    let (tpm, issuer) = options.attestation().map_err(Failure::failed)?;
    evidence::serve(Attester { issuer, tpm }).map_err(Failure::failed)
}

fn is_option(word: &OsStr) -> bool {
    word.as_encoded_bytes().starts_with(b"-")
}

fn upgrade(settings: &Settings, list: Option<&OsStr>) -> Result<(), Failure> {
    // the boot record stays unchanged; a signal ends the program, and the next run continues
    settings.shared.start_log();
    let timeline = Timeline::new("upgrade");
    let list: Box<dyn Read> = match list {
        None => Box::new(io::stdin()),
        Some(path) => Box::new(File::open(path).map_err(|error| {
            Failure::failed(format!("cannot read {}: {error}", path.display()))
        })?),
    };
    let upgraded = upgrade::run(
        list,
        &settings.policy,
        &settings.components,
        settings.kubeadm_timeout,
        &Stop::new(),
        timeline,
    );
    let (from, to) = upgraded.map_err(Failure::failed)?;
    timeline.event("upgraded", format_args!("{from} -> {to}"));
    Ok(())
}

/// Reads the arguments and the settings of the image.
fn read_settings(settings: &mut Settings, arguments: Parser) -> Result<(), Failure> {
    settings.parse(arguments, settings::ARGUMENTS)?;
    for (source, option) in settings::read(&all(OPTIONS)) {
        let option = option.map_err(Failure::Usage)?;
        settings.parse(Parser::from_args([option]), source)?;
    }
    Ok(())
}

fn update(settings: &Settings, url: Option<&OsStr>) -> Result<(), Failure> {
    // the boot record stays unchanged; a signal ends the program, and the next run begins again
    settings.shared.start_log();
    let timeline = Timeline::new("update");
    let url = url.map(|it| it.to_string_lossy().into_owned());
    let url = url.or_else(|| settings.update_url.clone()).ok_or_else(|| {
        Failure::Usage("expected bootstrapper update URL, or the setting update-url=".into())
    })?;
    let run = || -> Result<_, update::Error> {
        let place = ImageDisk::find(Path::new("/"))?;
        let remote = Remote::new(&url)?;
        let (list, signature) = remote.list()?;
        let policy = remote::policy_in_force(Path::new(KUBELET_CONFIG))?;
        let offer = Offer {
            list: &list,
            signature: &signature,
            content: &mut remote.content(),
            policy: policy.as_ref(),
        };
        let mut say = |text: &str| timeline.event("update", text);
        update::run(&place, &settings.update_keys, offer, &mut say)
    };
    run().map(drop).map_err(Failure::failed)
}

fn trial(settings: &Settings) -> Result<(), Failure> {
    // the boot record stays unchanged; a signal ends the program
    settings.shared.start_log();
    let trial = Trial {
        files: Path::new("/"),
        record: settings.shared.record(),
        healthy: settings.trial_healthy.unwrap_or(TRIAL_HEALTHY),
        limit: settings.trial_limit.unwrap_or(TRIAL_LIMIT),
    };
    match trial.run(&Stop::new(), &Timeline::new("trial")) {
        Ok(TrialEnd::Refused) => Err(Failure::failed(
            "the new version of the image did not become healthy in time: the machine restarts",
        )),
        Ok(_) => Ok(()),
        // whether there is a trial is not known, and a node that works must not restart because of a damaged EFI system partition
        Err(error) => {
            log::warn!("cannot run the trial of the new image: {error}");
            Ok(())
        }
    }
}

fn renew(options: &Options) -> Result<(), Failure> {
    // the boot record stays unchanged; a signal ends the program, and the next run continues
    options.start_log();
    renew::run(&Stop::new(), Timeline::new("renew")).map_err(Failure::failed)
}

fn start(settings: Settings) -> Result<(), Failure> {
    let (timeline, stop) = settings.shared.start("run")?;
    let result = run(settings, timeline, &stop);
    timeline.peak_memory();
    match result {
        Ok(ending) if ending.is_member() => Ok(()),
        Ok(RunOutcome::Reset) => Err(Failure::Failed(
            RESET,
            "reboot this machine: it starts over with an empty state disk".into(),
        )),
        Ok(_) => Err(Failure::Failed(STOPPED, "stopped by a signal".into())),
        Err(error) => Err(options::failed(&timeline, &stop, error.to_string())),
    }
}

/// Returns whether kubelet and controller manager leave the cloud's objects to a cloud controller
/// manager (`--cloud-provider=external`).
fn has_external_provider(cloud: Cloud) -> bool {
    matches!(cloud, Cloud::Aws | Cloud::Gcp | Cloud::Azure)
}

fn run(settings: Settings, timeline: Timeline, stop: &Stop) -> Result<RunOutcome, Box<dyn Error>> {
    let options = settings.shared;
    let (tpm, issuer) = options.attestation()?;
    let variant = Variant::named(&options.variant)?;
    let trust = ServiceTrust::new(options.services, settings.services, variant, tpm.clone())?;
    let cloud = options.cloud()?;
    let metadata = cloud_api::metadata(cloud, options.metadata.as_deref())?;
    let keeper = peers::Keeper {
        metadata: metadata.clone(),
        disk: options.disk.clone(),
        cloud,
        stop: stop.clone(),
        timeline,
    };
    TimeService {
        setting: settings.time_servers,
        metadata: metadata.clone(),
        cloud,
        stop: stop.clone(),
        timeline,
    }
    .start();
    let listen = SocketAddr::new(options.listen, init::PORT);
    let (root, disk) = (options.root, options.disk.clone());
    let is_external = has_external_provider(cloud);
    let bootstrapper = Bootstrapper {
        cloud,
        has_cloud_controller: settings.cloud_controller.unwrap_or(is_external),
        metadata,
        disk: options.disk,
        root: root.clone(),
        key_file: options.key_file,
        listen,
        issuer: quotes::reported(timeline, issuer.clone(), tpm.clone()),
        trust,
        tpm,
        policy: settings.policy,
        settings: settings.components,
        kubeadm_timeout: settings.kubeadm_timeout,
        stop: stop.clone(),
        timeline,
    };
    let ending = bootstrapper.run()?;
    if ending.is_member() {
        let keeping = keeper.start();
        let generations = Arc::new(Generations::open(&root));
        // anybody may ask a member for a quote, so these quotes are not logged as events
        let operators = OperatorService::new(MemberMachine {
            root,
            files: "/".into(),
            update_keys: settings.update_keys,
            disk,
            cloud,
            timeline,
            stop: stop.clone(),
        });
        member::serve(listen, issuer, &generations, &operators, stop, &timeline);
        drop(keeping);
    }
    Ok(ending)
}
