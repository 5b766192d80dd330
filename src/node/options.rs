//! The command-line options that both programs on a node share, and how the programs start.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{io, thread};

use attest::{Issuer, Variant, variant};
use base::logger;
use base::network;
use base::program::{self, Failure};
use base::stop::Stop;
use base::timeline::Timeline;
use disk::state_disk::handover;
use lexopt::{Arg, Parser};
use log::LevelFilter;
use machines::Cloud;

use crate::service_trust;

/// Returns the part of the help text that describes [`Options`].
pub fn help() -> String {
    let (clouds, variants) = (machines::NAMES.join(", "), variant::NAMES.join(", "));
    format!(
        "  --cloud-provider NAME       the cloud of this machine (environment: CONSTEL_CSP; also --csp); supported: {clouds}
  --attestation-variant NAME  the attestation variant (environment: CONSTEL_ATTESTATION_VARIANT; also --variant);
                       supported: {variants}
  --metadata URL       the metadata service; by default at the address that the cloud defines
  --tpm LOCATION       device:/dev/tpmrm0 (the default if it exists) or swtpm:host=ADDRESS,port=PORT
  --disk PATH          the state disk; by default the disk with serial number \"state\"
  --mount PATH         the mount point of the state disk           [/run/state]
  --key-file PATH      the file with which the initramfs hands the passphrase of a new disk to the booted system
                                                                   [/run/cryptsetup-keys.d/state.key]
  --record PATH        the record of this boot's events, for `firstlight status --timeline`  [/run/firstlight/timeline]
  --listen ADDRESS     the address on which the node serves the operator; by default all, of IPv6 and IPv4
  --cluster-id HEX     takes tickets of this cluster only; by default of any cluster
  --require strong     refuses join services of the old form of attested TLS; `bootstrapper` of a fresh node also refuses those that prove
                       nothing, and needs what pins them: --cluster-id, attestationKeys in --service-policy, or the values of its own
                       cloud platform
  --events PATH        also writes the events, which contain no secrets, to a file or device (/dev/virtio-ports/events)
  --debug              log at debug level
  --log-format FORMAT  text, or json: one object a line with ts, level, logger, msg, uptime  [text]
  -h, --help           print this text
"
    )
}

/// Exit code of a program that SIGTERM or SIGINT stopped: 128 + 15, as shells report SIGTERM.
pub const STOPPED: u8 = 143;

/// The options of both programs.
pub struct Options {
    csp: String,
    /// The name of the attestation variant.
    pub variant: String,
    /// The URL of the metadata service, or the path of the list of machines; `None` is the cloud's
    /// default.
    pub metadata: Option<String>,
    tpm: Option<tpm::Location>,
    /// The state disk; if `None`, it is found by its serial number.
    pub disk: Option<PathBuf>,
    /// The mount point of the state disk.
    pub root: PathBuf,
    /// The file that hands the passphrase of a new disk to the booted system.
    pub key_file: PathBuf,
    /// The address on which the node serves the operator.
    pub listen: IpAddr,
    record: PathBuf,
    events: Option<PathBuf>,
    /// The settings about join services.
    pub services: service_trust::Settings,
    debug: bool,
    log_format: logger::Format,
}

impl Options {
    /// Returns the default options; the cloud and the attestation variant come from the
    /// environment.
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
            listen: network::any_address(),
            record: "/run/firstlight/timeline".into(),
            events: None,
            services: service_trust::Settings::default(),
            debug: false,
            log_format: logger::Format::default(),
        }
    }

    /// Parses all arguments. Passes an option that [`help`] does not list to `more`, which returns
    /// whether it knows the option.
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
                "cloud-provider" | "csp" => self.csp = program::text(arguments.value()?)?,
                "attestation-variant" | "variant" => {
                    self.variant = program::text(arguments.value()?)?;
                }
                "metadata" => self.metadata = Some(program::text(arguments.value()?)?),
                "tpm" => self.tpm = Some(program::parsed("tpm", arguments.value()?)?),
                "disk" => self.disk = Some(arguments.value()?.into()),
                "mount" => self.root = arguments.value()?.into(),
                "key-file" => self.key_file = arguments.value()?.into(),
                "record" => self.record = arguments.value()?.into(),
                "listen" => self.listen = program::parsed("listen", arguments.value()?)?,
                "events" => self.events = Some(arguments.value()?.into()),
                "cluster-id" => {
                    let id = program::parsed("cluster-id", arguments.value()?)?;
                    self.services.cluster = Some(id);
                }
                "require" => match program::text(arguments.value()?)?.as_str() {
                    "strong" => self.services.require_strong = true,
                    other => {
                        let text = format!("--require {other:?}: expected strong");
                        return Err(Failure::Usage(text));
                    }
                },
                "debug" => self.debug = true,
                "log-format" => {
                    self.log_format = program::parsed("log-format", arguments.value()?)?;
                }
                _ if more(&name, &mut arguments)? => {}
                _ => return Err(Failure::Usage(format!("invalid option '--{name}'"))),
            }
        }
        Ok(())
    }

    /// Prepares the process before the first secret and the first thread exist: starts the log and
    /// the console events of `stage`, excludes memory from core dumps and locks it, and returns the
    /// stop that SIGTERM and SIGINT set.
    pub fn start(&self, stage: &'static str) -> Result<(Timeline, Stop), Failure> {
        self.start_log();
        let timeline = Timeline::new(stage);
        // missing events are no reason to fail the boot
        let or = |without: Timeline, path: &Path, with: io::Result<Timeline>| {
            with.unwrap_or_else(|error| {
                log::warn!("cannot write events to {}: {error}", path.display());
                without
            })
        };
        let timeline = or(timeline, &self.record, timeline.recorded_at(&self.record));
        let timeline = match &self.events {
            Some(path) => or(timeline, path, timeline.also_to(path)),
            None => timeline,
        };
        timeline.event("start", concat!("firstlight ", env!("CARGO_PKG_VERSION")));
        Ok((timeline, prepare().map_err(Failure::failed)?))
    }

    /// Starts the log.
    pub fn start_log(&self) {
        let level = match self.debug {
            true => LevelFilter::Debug,
            false => LevelFilter::Info,
        };
        logger::init(level, self.log_format);
    }

    /// Returns the TPM and the issuer that attests this machine with it.
    pub fn attestation(&self) -> Result<(tpm::Location, Arc<dyn Issuer>), String> {
        let variant = Variant::named(&self.variant).map_err(|error| error.to_string())?;
        let location = match &self.tpm {
            Some(location) => location.clone(),
            None => (variant.location)().map_err(|error| error.to_string())?,
        };
        let issuer = (variant.issuer)(&location);
        Ok((location, issuer))
    }

    /// Returns the cloud of this machine.
    pub fn cloud(&self) -> Result<Cloud, String> {
        Cloud::named(&self.csp).map_err(|error| error.to_string())
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
        log::warn!("cannot lock memory, so the kernel may swap it out: {error}");
    }
    let signals = sys::signal::StopSignals::block()?;
    let stop = Stop::new();
    let on_signal = stop.clone();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            match signals.wait() {
                Ok(signal) => log::warn!("{signal}: stopping"),
                Err(error) => log::error!("cannot wait for signals: {error}"),
            }
            on_signal.stop();
        })?;
    Ok(stop)
}

/// Reports `error` and returns how the program ends: with exit code [`STOPPED`] if a signal stopped
/// it, else as failed.
pub fn failed(timeline: &Timeline, stop: &Stop, error: String) -> Failure {
    timeline.event("error", &error);
    let code = if stop.is_stopped() {
        STOPPED
    } else {
        program::FAILED
    };
    Failure::Failed(code, error)
}
