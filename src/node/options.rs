//! What both programs on a node are told about the machine, and how they start.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::{io, thread};

use attest::attestation::{Issuer, qemu_vtpm};
use attest::tpm;
use base::logger;
use base::program::{self, Failure};
use base::stop::Stop;
use base::timeline::Timeline;
use cloud::Metadata;
use disk::state_disk::handover;
use lexopt::{Arg, Parser};
use log::LevelFilter;

/// The part of the help text that is about [`Options`].
pub const HELP: &str = "\
  --csp NAME           where this machine runs (environment: CONSTEL_CSP); known: qemu
  --variant NAME       how it attests (environment: CONSTEL_ATTESTATION_VARIANT); known: qemu-vtpm
  --metadata URL       the metadata service, when it is not at its usual place
  --tpm LOCATION       device:/dev/tpmrm0 (the default where it exists), swtpm:host=ADDRESS,port=PORT
  --disk PATH          the state disk; by default the one with serial number \"state\"
  --mount PATH         where the state disk is mounted             [/run/state]
  --key-file PATH      where the initramfs leaves the passphrase of a new disk for the booted system
                                                                   [/run/cryptsetup-keys.d/state.key]
  --listen ADDRESS     where the operator reaches this node       [0.0.0.0]
  --events PATH        writes the events there, too: a few lines that may leave the machine (/dev/virtio-ports/events, a file)
  --debug              more log lines
  -h, --help           this text
";

/// Exit code: stopped by SIGTERM or SIGINT, as a shell has it.
pub const STOPPED: u8 = 143;

/// What both programs are told.
pub struct Options {
    csp: String,
    variant: String,
    metadata: Option<String>,
    tpm: Option<tpm::Location>,
    /// The state disk; found by its serial number when absent.
    pub disk: Option<PathBuf>,
    /// Where it is mounted.
    pub root: PathBuf,
    /// Where the passphrase of a new disk is left for the booted system.
    pub key_file: PathBuf,
    /// Where the operator reaches this node.
    pub listen: IpAddr,
    events: Option<PathBuf>,
    debug: bool,
}

impl Options {
    /// What holds where nothing is said, but for what the environment says.
    pub fn new() -> Options {
        let environment = |name| std::env::var(name).unwrap_or_default();
        Options {
            csp: environment("CONSTEL_CSP"),
            variant: environment("CONSTEL_ATTESTATION_VARIANT"),
            metadata: None,
            tpm: None,
            disk: None,
            root: "/run/state".into(),
            key_file: handover::KEY_FILE.into(),
            listen: Ipv4Addr::UNSPECIFIED.into(),
            events: None,
            debug: false,
        }
    }

    /// Takes every argument; those that are not of [`HELP`] are for `more`, which says by its result whether it knows them.
    pub fn parse(
        &mut self,
        mut arguments: Parser,
        mut more: impl FnMut(&str, &mut Parser) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        while let Some(argument) = arguments.next()? {
            let name = match &argument {
                Arg::Short('h') => "help".to_owned(),
                Arg::Long(name) => (*name).to_owned(),
                _ => return Err(argument.unexpected().into()),
            };
            match name.as_str() {
                "help" => return Err(Failure::Help),
                "version" => return Err(Failure::Version),
                "csp" => self.csp = program::text(arguments.value()?)?,
                "variant" => self.variant = program::text(arguments.value()?)?,
                "metadata" => self.metadata = Some(program::text(arguments.value()?)?),
                "tpm" => self.tpm = Some(program::parsed("tpm", arguments.value()?)?),
                "disk" => self.disk = Some(arguments.value()?.into()),
                "mount" => self.root = arguments.value()?.into(),
                "key-file" => self.key_file = arguments.value()?.into(),
                "listen" => self.listen = program::parsed("listen", arguments.value()?)?,
                "events" => self.events = Some(arguments.value()?.into()),
                "debug" => self.debug = true,
                _ if more(&name, &mut arguments)? => {}
                _ => return Err(Failure::Usage(format!("invalid option '--{name}'"))),
            }
        }
        Ok(())
    }

    /// What comes before the first secret and the first thread: the log, the console's events of this stage, memory that is in
    /// no core dump, and what SIGTERM stops.
    pub fn start(&self, stage: &'static str) -> Result<(Timeline, Stop), Failure> {
        logger::init(if self.debug {
            LevelFilter::Debug
        } else {
            LevelFilter::Info
        });
        let timeline = Timeline::new(stage);
        let timeline = match &self.events {
            // a boot does not fail over it
            Some(path) => timeline.also_to(path).unwrap_or_else(|error| {
                log::warn!("no events to {}: {error}", path.display());
                timeline
            }),
            None => timeline,
        };
        timeline.event("start", concat!("firstlight ", env!("CARGO_PKG_VERSION")));
        Ok((timeline, prepare().map_err(Failure::failed)?))
    }

    /// The TPM, and what proves with it what this machine runs.
    pub fn attestation(&self) -> Result<(tpm::Location, Arc<dyn Issuer>), String> {
        if self.variant != qemu_vtpm::VARIANT {
            return Err(format!(
                "attestation variant {:?} is not known; known: {}",
                self.variant,
                qemu_vtpm::VARIANT
            ));
        }
        let location = match &self.tpm {
            Some(location) => location.clone(),
            None => tpm::Location::default_device().map_err(|error| error.to_string())?,
        };
        let issuer = qemu_vtpm::Issuer::new(location.clone(), Some(qemu_vtpm::EVENT_LOG.into()));
        Ok((location, Arc::new(issuer)))
    }

    /// Who this machine and its peers are.
    pub fn metadata(&self) -> Result<Arc<Metadata>, String> {
        Metadata::of(&self.csp, self.metadata.as_deref())
            .map(Arc::new)
            .map_err(|error| error.to_string())
    }
}

impl Default for Options {
    fn default() -> Self {
        Options::new()
    }
}

fn prepare() -> io::Result<Stop> {
    sys::process::keep_memory_private()?;
    if let Err(error) = sys::process::lock_memory() {
        log::warn!("memory is not locked: {error}");
    }
    let signals = sys::signal::StopSignals::block()?;
    let stop = Stop::new();
    let on_signal = stop.clone();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            match signals.wait() {
                Ok(signal) => log::warn!("{signal}: stopping"),
                Err(error) => log::error!("waiting for signals: {error}"),
            }
            on_signal.stop();
        })?;
    Ok(stop)
}

/// How a program ends whose work failed with `error`: by the signal that stopped it, if one did.
pub fn failed(timeline: &Timeline, stop: &Stop, error: String) -> Failure {
    timeline.event("error", &error);
    let code = if stop.is_stopped() {
        STOPPED
    } else {
        program::FAILED
    };
    Failure::Failed(code, error)
}
