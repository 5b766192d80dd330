//! The command-line options that both programs on a node share, and how the programs start.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{io, thread};

use attest::{AttesterVariant, Issuer, variant};
use base::boot::timeline::Timeline;
use base::logger;
use base::machines::Cloud;
use base::network;
use base::options::{self, HELP, Opt, Table, VERSION, put, take};
use base::program::{self, Failure, parsed, text};
use base::stop::Stop;
use disk::state_disk::handover;
use lexopt::Parser;
use log::LevelFilter;

use crate::{service_trust, settings};

/// The options of both programs.
pub const OPTIONS: &Table<Options> = &[
    (Opt::value("cloud-provider", "NAME", "the cloud of this machine (environment: CONSTEL_CSP; also --csp)").was("csp").one_of(&base::machines::NAMES).setting(),
     |it, _, value| put(&mut it.csp, text(value))),
    (Opt::value("attestation-variant", "NAME", "the attestation variant (environment: CONSTEL_ATTESTATION_VARIANT; also --variant)").was("variant").one_of(&variant::NAMES).setting(),
     |it, _, value| put(&mut it.variant, text(value))),
    (Opt::value("metadata", "URL", "the metadata service; by default at the address that the cloud defines").setting(),
     |it, _, value| put(&mut it.metadata, text(value).map(Some))),
    (Opt::value("tpm", "LOCATION", "device:/dev/tpmrm0 (the default if it exists) or swtpm:host=ADDRESS,port=PORT; with qemu-tdx tdx:FOLDER, with qemu-snp snp:FILE").setting(),
     |it, name, value| put(&mut it.tpm, parsed(name, value).map(Some))),
    (Opt::value("disk", "PATH", "the state disk; by default the disk with serial number \"state\"").setting(),
     |it, _, value| put(&mut it.disk, Ok(Some(value.into())))),
    (Opt::value("mount", "PATH", "the mount point of the state disk").or(MOUNT),
     |it, _, value| put(&mut it.root, Ok(value.into()))),
    (Opt::value("key-file", "PATH", "the file in which the initramfs leaves the passphrase of a new disk for the booted system").or(handover::KEY_FILE),
     |it, _, value| put(&mut it.key_file, Ok(value.into()))),
    (Opt::value("record", "PATH", "the record of this boot's events, for `firstlight status --timeline`").or(RECORD),
     |it, _, value| put(&mut it.record, Ok(value.into()))),
    (Opt::value("listen", "ADDRESS", "the address on which the node serves the operator; by default all, of IPv6 and IPv4").setting(),
     |it, name, value| put(&mut it.listen, parsed(name, value))),
    (Opt::value("cluster-id", "HEX", "accepts tickets, disk keys and an init only from this cluster; by default from any; required with qemu-snp").setting(),
     |it, name, value| put(&mut it.services.cluster, parsed(name, value).map(Some))),
    (Opt::value("require", "strong", "refuses join services that use the old form of attested TLS; `bootstrapper` of a fresh node also refuses those without evidence, and pins them by --cluster-id, attestationKeys in --service-policy, or the values of its own cloud platform").setting(),
     |it, name, value| put(&mut it.services.require_strong, strong(name, value))),
    (Opt::value("events", "PATH", "also writes the events, which contain no secrets, to a file or device (/dev/virtio-ports/events)").setting(),
     |it, _, value| put(&mut it.events, Ok(Some(value.into())))),
    (Opt::flag("debug", "log at debug level").setting(), |it, _, _| put(&mut it.debug, Ok(true))),
    (Opt::value("log-format", "FORMAT", "text, or json: one object a line with ts, level, logger, msg, uptime").or("text").setting(),
     |it, name, value| put(&mut it.log_format, parsed(name, value))),
];

/// Why a machine of the variant `qemu-snp` does not start.
const NO_CLUSTER: &str = "the attestation variant qemu-snp needs the setting cluster-id in the image: `firstlight cluster-id` prints it";
const MOUNT: &str = "/run/state";
const RECORD: &str = "/run/firstlight/timeline";

fn strong(name: &str, value: OsString) -> Result<bool, Failure> {
    match text(value)?.as_str() {
        "strong" => Ok(true),
        other => Err(Failure::Usage(format!(
            "--{name} {other:?}: expected strong"
        ))),
    }
}

/// Returns the options of a program: its own, and those of both.
pub fn all<T>(own: &'static Table<T>) -> Vec<&'static Opt> {
    [
        options::of(own),
        options::of(OPTIONS),
        vec![&HELP, &VERSION],
    ]
    .concat()
}

/// Parses arguments of a program, with the options of its own that are in the table `own`. `source`
/// gave the arguments; see [`crate::settings`].
pub fn parse<T>(
    own: &Table<T>,
    args: Parser,
    source: &'static str,
    into: &mut T,
    shared: fn(&mut T) -> &mut Options,
) -> Result<(), Failure> {
    options::parse(args, |name, args| {
        let found = match take(own, name, args, into)? {
            None => take(OPTIONS, name, args, shared(into))?,
            found => found,
        };
        if let Some(name) = found {
            let given = &mut shared(into).given;
            // a later source replaces the value of an earlier one
            given.retain(|(other, _)| *other != name);
            given.push((name, source));
        }
        Ok(found.is_some())
    })
}

/// Exit code of a program that SIGTERM or SIGINT stopped: 128 + 15, as shells report SIGTERM.
pub const STOPPED: u8 = 143;

/// The values of [`OPTIONS`].
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
    pub services: service_trust::TrustSettings,
    debug: bool,
    log_format: logger::Format,
    /// The options that are given, each with the source that was used.
    given: Vec<(&'static str, &'static str)>,
}

impl Options {
    /// Returns the default options; the cloud and the attestation variant come from the
    /// environment.
    pub fn new() -> Options {
        let mut given = Vec::new();
        let mut environment = |variable, name| {
            let value = std::env::var(variable).unwrap_or_default();
            if !value.is_empty() {
                given.push((name, settings::ENVIRONMENT));
            }
            value
        };
        Options {
            csp: environment("CONSTEL_CSP", "cloud-provider"),
            variant: environment("CONSTEL_ATTESTATION_VARIANT", "attestation-variant"),
            metadata: None,
            tpm: None,
            disk: None,
            root: MOUNT.into(),
            key_file: handover::KEY_FILE.into(),
            listen: network::any_address(),
            record: RECORD.into(),
            events: None,
            services: service_trust::TrustSettings::default(),
            debug: false,
            log_format: logger::Format::default(),
            given,
        }
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

    /// Returns the file with the record of this boot.
    pub fn record(&self) -> &Path {
        &self.record
    }

    /// Starts the log. It begins with the source of each value that is not the default.
    pub fn start_log(&self) {
        let level = if self.debug {
            LevelFilter::Debug
        } else {
            LevelFilter::Info
        };
        logger::init(level, self.log_format);
        let given = self.given.iter();
        let given: Vec<String> = given
            .map(|(name, from)| format!("{name} ({from})"))
            .collect();
        if !given.is_empty() {
            log::info!("settings that are not the defaults: {}", given.join(", "));
        }
    }

    /// Returns the TPM and the issuer that attests this machine with it.
    pub fn attestation(&self) -> Result<(tpm::Location, Arc<dyn Issuer>), String> {
        let variant = AttesterVariant::named(&self.variant).map_err(|error| error.to_string())?;
        let location = match &self.tpm {
            Some(location) => location.clone(),
            None => (variant.location)().map_err(|error| error.to_string())?,
        };
        // no register of the hardware names the cluster, so the launch digest must
        if matches!(location, tpm::Location::Snp(_)) && self.services.cluster.is_none() {
            return Err(NO_CLUSTER.into());
        }
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
        log::warn!("cannot lock memory, so the kernel may write secrets to swap: {error}");
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The launch digest then contains the cluster, in the command line or in the initrd.
    #[test]
    fn a_machine_without_a_register_of_the_hardware_needs_the_cluster_in_its_image() {
        let mut options = Options::new();
        options.variant = "qemu-snp".into();
        let why = options.attestation().err().unwrap();
        assert!(why.contains("needs the setting cluster-id"), "{why}");
        options.services.cluster = Some(service_trust::ClusterId([7; 32]));
        let (location, issuer) = options.attestation().unwrap();
        assert_eq!(location.to_string(), "snp:/run/firstlight/cluster");
        // another place for the register would go round the setting
        options.tpm = Some("device:/dev/null".parse().unwrap());
        options.services.cluster = None;
        let (_, other) = options.attestation().unwrap();
        let why = other.issue(&[], &[]).unwrap_err().to_string();
        assert!(why.contains("expected snp:FILE"), "{why}");
        assert_eq!(issuer.oid(), other.oid());
    }
}
