//! The node's program: `bootstrapper unlock` in the initramfs, `bootstrapper run` in the booted system.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::{io, thread};

use firstlight::attestation::{Issuer, qemu_vtpm};
use firstlight::bootstrapper::{Bootstrapper, Ending, member};
use firstlight::kubernetes::components::{Policy, Settings};
use firstlight::metadata::Metadata;
use firstlight::program::{self, Failure};
use firstlight::proto::{init, recoverproto};
use firstlight::state_disk::{Unlock, handover};
use firstlight::stop::Stop;
use firstlight::sys::wiping::Wiping;
use firstlight::timeline::Timeline;
use firstlight::{logger, quotes, sys, tpm};
use lexopt::prelude::*;
use log::LevelFilter;

/// Copies of secrets do not outlive their use in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

const HELP: &str = "\
bootstrapper: makes a fresh confidential VM a trusted node of a Kubernetes cluster

  bootstrapper unlock [OPTIONS]   in the initramfs: opens (or formats) the state disk and mounts it
  bootstrapper run [OPTIONS]      in the booted system: becomes, or starts, a member of a cluster; then answers
                                  `firstlight status` until SIGTERM

Options
  --csp NAME           where this machine runs (environment: CONSTEL_CSP); known: qemu
  --variant NAME       how it attests (environment: CONSTEL_ATTESTATION_VARIANT); known: qemu-vtpm
  --metadata URL       the metadata service, when it is not at its usual place
  --tpm LOCATION       device:/dev/tpmrm0 (the default where it exists), swtpm:host=ADDRESS,port=PORT
  --disk PATH          the state disk; by default the one with serial number \"state\"
  --mount PATH         where the state disk is mounted             [/run/state]
  --key-file PATH      where unlock leaves the passphrase of a new disk for run
                                                                   [/run/cryptsetup-keys.d/state.key]
  --listen ADDRESS     where the operator reaches this node       [0.0.0.0]
  --mke2fs PATH        the program that makes ext4                 [/sbin/mke2fs]
  --components DIR     components of the image, by the last part of their URL: taken from here when their hash fits
  --allow-unverified-components
                       installs components without a hash, too
  --events PATH        writes the events there, too: a few lines that may leave the machine (/dev/virtio-ports/events, a file)
  --debug              more log lines
  -h, --help           this text

Examples
  bootstrapper unlock --csp qemu --variant qemu-vtpm
  bootstrapper run --csp qemu --variant qemu-vtpm --components /opt/components --events /dev/virtio-ports/events

Exit codes: 0 done (run: a member that was stopped), 1 failed (the last line says why), 2 wrong usage, 3 (run) the disk is marked for reset: reboot,
143 stopped by SIGTERM.
";

struct Options {
    csp: String,
    variant: String,
    metadata: Option<String>,
    tpm: Option<tpm::Location>,
    disk: Option<PathBuf>,
    root: PathBuf,
    key_file: PathBuf,
    listen: IpAddr,
    mke2fs: PathBuf,
    components: Option<PathBuf>,
    allow_unverified: bool,
    events: Option<PathBuf>,
    debug: bool,
}

#[derive(Clone, Copy)]
enum Command {
    Unlock,
    Run,
}

impl Command {
    fn name(self) -> &'static str {
        match self {
            Command::Unlock => "unlock",
            Command::Run => "run",
        }
    }
}

/// Exit code: the state disk is marked for reset.
const RESET: u8 = 3;
/// Exit code: stopped by SIGTERM or SIGINT, as a shell has it.
const STOPPED: u8 = 143;

fn main() -> ExitCode {
    program::main("bootstrapper", HELP, |arguments| {
        let (command, options) = parse(arguments)?;
        logger::init(if options.debug { LevelFilter::Debug } else { LevelFilter::Info });
        let timeline = Timeline::new(command.name());
        let timeline = match &options.events {
            // a boot does not fail over it
            Some(path) => timeline.also_to(path).unwrap_or_else(|error| {
                log::warn!("no events to {}: {error}", path.display());
                timeline
            }),
            None => timeline,
        };
        timeline.event("start", concat!("firstlight ", env!("CARGO_PKG_VERSION")));
        let stop = prepare().map_err(Failure::failed)?;
        let result = match command {
            Command::Unlock => unlock(options, timeline, &stop),
            Command::Run => run(options, timeline, &stop),
        };
        timeline.peak_memory();
        match result {
            Ok(ending) if ending.is_member() => Ok(()),
            Ok(Ending::Reset) => {
                Err(Failure::Failed(RESET, "reboot this machine: its state disk starts afresh".into()))
            }
            Ok(_) => Err(Failure::Failed(STOPPED, "stopped by a signal".into())),
            Err(error) => {
                timeline.event("error", &error);
                let code = if stop.is_stopped() { STOPPED } else { program::FAILED };
                Err(Failure::Failed(code, error))
            }
        }
    })
}

/// What comes before the first secret and the first thread.
fn prepare() -> io::Result<Stop> {
    sys::process::keep_memory_private()?;
    if let Err(error) = sys::process::lock_memory() {
        log::warn!("memory is not locked: {error}");
    }
    let signals = sys::signal::StopSignals::block()?;
    let stop = Stop::new();
    let on_signal = stop.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        match signals.wait() {
            Ok(signal) => log::warn!("{signal}: stopping"),
            Err(error) => log::error!("waiting for signals: {error}"),
        }
        on_signal.stop();
    })?;
    Ok(stop)
}

fn unlock(options: Options, timeline: Timeline, stop: &Stop) -> Result<Ending, String> {
    let (tpm, issuer) = attestation(&options)?;
    let unlock = Unlock {
        metadata: metadata(&options)?,
        disk: options.disk,
        root: options.root,
        key_file: options.key_file,
        mke2fs: options.mke2fs,
        recovery: SocketAddr::new(options.listen, recoverproto::PORT),
        issuer: quotes::noted(timeline, issuer),
        tpm,
        stop: stop.clone(),
        timeline,
    };
    unlock.run().map(|()| Ending::Member).map_err(|error| error.to_string())
}

fn run(options: Options, timeline: Timeline, stop: &Stop) -> Result<Ending, String> {
    let (tpm, issuer) = attestation(&options)?;
    let listen = SocketAddr::new(options.listen, init::PORT);
    let bootstrapper = Bootstrapper {
        metadata: metadata(&options)?,
        disk: options.disk,
        root: options.root,
        key_file: options.key_file,
        listen,
        issuer: quotes::noted(timeline, issuer.clone()),
        tpm,
        policy: Policy { allow_unverified: options.allow_unverified, ..Policy::default() },
        settings: Settings { image: options.components, ..Settings::default() },
        stop: stop.clone(),
        timeline,
    };
    let ending = bootstrapper.run().map_err(|error| error.to_string())?;
    if ending.is_member() {
        // its quotes are asked for by strangers: they are no events
        member::serve(listen, issuer, stop, &timeline);
    }
    Ok(ending)
}

fn attestation(options: &Options) -> Result<(tpm::Location, Arc<dyn Issuer>), String> {
    if options.variant != qemu_vtpm::VARIANT {
        return Err(format!("attestation variant {:?} is not known; known: {}", options.variant, qemu_vtpm::VARIANT));
    }
    let location = match &options.tpm {
        Some(location) => location.clone(),
        None => tpm::Location::default_device().map_err(|error| error.to_string())?,
    };
    let issuer = qemu_vtpm::Issuer::new(location.clone(), Some(qemu_vtpm::EVENT_LOG.into()));
    Ok((location, Arc::new(issuer)))
}

fn metadata(options: &Options) -> Result<Arc<Metadata>, String> {
    Metadata::of(&options.csp, options.metadata.as_deref()).map(Arc::new).map_err(|error| error.to_string())
}

fn parse(mut arguments: lexopt::Parser) -> Result<(Command, Options), Failure> {
    let environment = |name| std::env::var(name).unwrap_or_default();
    let mut options = Options {
        csp: environment("CONSTEL_CSP"),
        variant: environment("CONSTEL_ATTESTATION_VARIANT"),
        metadata: None,
        tpm: None,
        disk: None,
        root: "/run/state".into(),
        key_file: handover::KEY_FILE.into(),
        listen: Ipv4Addr::UNSPECIFIED.into(),
        mke2fs: "/sbin/mke2fs".into(),
        components: None,
        allow_unverified: false,
        events: None,
        debug: false,
    };
    let mut command = None;
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => return Err(Failure::Help),
            Long("version") => return Err(Failure::Version),
            Long("csp") => options.csp = program::text(arguments.value()?)?,
            Long("variant") => options.variant = program::text(arguments.value()?)?,
            Long("metadata") => options.metadata = Some(program::text(arguments.value()?)?),
            Long("tpm") => options.tpm = Some(program::parsed("tpm", arguments.value()?)?),
            Long("disk") => options.disk = Some(arguments.value()?.into()),
            Long("mount") => options.root = arguments.value()?.into(),
            Long("key-file") => options.key_file = arguments.value()?.into(),
            Long("listen") => options.listen = program::parsed("listen", arguments.value()?)?,
            Long("mke2fs") => options.mke2fs = arguments.value()?.into(),
            Long("components") => options.components = Some(arguments.value()?.into()),
            Long("allow-unverified-components") => options.allow_unverified = true,
            Long("events") => options.events = Some(arguments.value()?.into()),
            Long("debug") => options.debug = true,
            Value(name) if command.is_none() && name == "unlock" => command = Some(Command::Unlock),
            Value(name) if command.is_none() && name == "run" => command = Some(Command::Run),
            other => return Err(other.unexpected().into()),
        }
    }
    let command = command.ok_or_else(|| Failure::Usage("say what to do: unlock or run".into()))?;
    Ok((command, options))
}
