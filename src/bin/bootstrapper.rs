//! The node's program: `bootstrapper unlock` in the initramfs, `bootstrapper run` in the booted system.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use firstlight::attestation::{Issuer, qemu_vtpm};
use firstlight::bootstrapper::{Bootstrapper, Ending, init_server};
use firstlight::metadata::Metadata;
use firstlight::state_disk::{Unlock, handover, recovery};
use firstlight::stop::Stop;
use firstlight::timeline::Timeline;
use firstlight::{logger, sys, tpm};
use lexopt::prelude::*;

const HELP: &str = "\
bootstrapper: makes a fresh confidential VM a trusted node of a Kubernetes cluster

  bootstrapper unlock [OPTIONS]   in the initramfs: opens (or formats) the state disk and mounts it
  bootstrapper run [OPTIONS]      in the booted system: becomes, or starts, a member of a cluster

Options
  --csp NAME           where this machine runs (environment: CONSTEL_CSP); known: qemu
  --variant NAME       how it attests (environment: CONSTEL_ATTESTATION_VARIANT); known: qemu-vtpm
  --metadata URL       the metadata service, when it is not at its usual place
  --tpm LOCATION       device:/dev/tpmrm0 (the default where it exists), swtpm:host=ADDRESS,port=PORT
  --disk PATH          the state disk; by default the one with serial number \"state\"
  --mount PATH         where the state disk is mounted             [/run/state]
  --listen ADDRESS     where the operator reaches this node       [0.0.0.0]
  --mke2fs PATH        the program that makes ext4                 [/sbin/mke2fs]
  --debug              more log lines
  -h, --help           this text

Exit codes: 0 done, 1 failed (the last line says why), 2 wrong usage, 3 (run) the disk is marked for reset: reboot,
143 stopped by SIGTERM.
";

struct Options {
    csp: String,
    variant: String,
    metadata: Option<String>,
    tpm: Option<String>,
    disk: Option<PathBuf>,
    root: PathBuf,
    listen: IpAddr,
    mke2fs: PathBuf,
    debug: bool,
}

enum Command {
    Unlock,
    Run,
}

fn main() -> ExitCode {
    let (command, options) = match parse() {
        Ok(Some(parsed)) => parsed,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("error: {error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    logger::init(if options.debug { log::LevelFilter::Debug } else { log::LevelFilter::Info });
    sys::process::protect_secrets();
    let stop = Stop::new();
    let result = sys::signal::on_terminate({
        let stop = stop.clone();
        move || stop.stop()
    })
    .map_err(|error| format!("handling SIGTERM: {error}"))
    .and_then(|()| match command {
        Command::Unlock => unlock(options, &stop),
        Command::Run => run(options, &stop),
    });
    match result {
        Ok(_) if stop.is_stopped() => ExitCode::from(143),
        Ok(code) => code,
        Err(error) => {
            Timeline::new(command_name()).event("error", &error);
            if stop.is_stopped() { ExitCode::from(143) } else { ExitCode::FAILURE }
        }
    }
}

fn command_name() -> &'static str {
    if std::env::args().nth(1).as_deref() == Some("run") { "run" } else { "unlock" }
}

fn unlock(options: Options, stop: &Stop) -> Result<ExitCode, String> {
    let timeline = Timeline::new("unlock");
    timeline.event("start", concat!("firstlight ", env!("CARGO_PKG_VERSION")));
    let (tpm, issuer) = attestation(&options, &timeline)?;
    let unlock = Unlock {
        metadata: metadata(&options)?,
        disk: options.disk,
        root: options.root,
        key_file: handover::KEY_FILE.into(),
        mke2fs: options.mke2fs,
        recovery: SocketAddr::new(options.listen, recovery::PORT),
        issuer,
        tpm,
        stop: stop.clone(),
        timeline,
    };
    unlock.run().map_err(|error| error.to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn run(options: Options, stop: &Stop) -> Result<ExitCode, String> {
    let timeline = Timeline::new("run");
    timeline.event("start", concat!("firstlight ", env!("CARGO_PKG_VERSION")));
    let (tpm, issuer) = attestation(&options, &timeline)?;
    let bootstrapper = Bootstrapper {
        metadata: metadata(&options)?,
        disk: options.disk,
        root: options.root,
        key_file: handover::KEY_FILE.into(),
        listen: SocketAddr::new(options.listen, init_server::PORT),
        issuer,
        tpm,
        stop: stop.clone(),
        timeline,
    };
    Ok(match bootstrapper.run().map_err(|error| error.to_string())? {
        Ending::Reset => ExitCode::from(3),
        Ending::Member | Ending::Initialized | Ending::Stopped => ExitCode::SUCCESS,
    })
}

fn attestation(options: &Options, timeline: &Timeline) -> Result<(tpm::Location, Arc<dyn Issuer>), String> {
    if options.variant != qemu_vtpm::VARIANT {
        return Err(format!("attestation variant {:?} is not known; known: {}", options.variant, qemu_vtpm::VARIANT));
    }
    let location = match &options.tpm {
        Some(text) => text.parse().map_err(|error: tpm::Error| error.to_string())?,
        None => tpm::Location::default_device().map_err(|error| error.to_string())?,
    };
    let issuer = qemu_vtpm::Issuer::new(location.clone(), Some(qemu_vtpm::EVENT_LOG.into()));
    Ok((location, timeline.issuer(Arc::new(issuer))))
}

fn metadata(options: &Options) -> Result<Arc<Metadata>, String> {
    Metadata::new(&options.csp, options.metadata.as_deref()).map(Arc::new).map_err(|error| error.to_string())
}

fn parse() -> Result<Option<(Command, Options)>, lexopt::Error> {
    let environment = |name| std::env::var(name).unwrap_or_default();
    let mut options = Options {
        csp: environment("CONSTEL_CSP"),
        variant: environment("CONSTEL_ATTESTATION_VARIANT"),
        metadata: None,
        tpm: None,
        disk: None,
        root: "/run/state".into(),
        listen: Ipv4Addr::UNSPECIFIED.into(),
        mke2fs: "/sbin/mke2fs".into(),
        debug: false,
    };
    let mut command = None;
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Short('h') | Long("help") => return Ok(None),
            Long("csp") => options.csp = parser.value()?.string()?,
            Long("variant") => options.variant = parser.value()?.string()?,
            Long("metadata") => options.metadata = Some(parser.value()?.string()?),
            Long("tpm") => options.tpm = Some(parser.value()?.string()?),
            Long("disk") => options.disk = Some(parser.value()?.into()),
            Long("mount") => options.root = parser.value()?.into(),
            Long("listen") => options.listen = parser.value()?.parse()?,
            Long("mke2fs") => options.mke2fs = parser.value()?.into(),
            Long("debug") => options.debug = true,
            Value(name) if command.is_none() && name == "unlock" => command = Some(Command::Unlock),
            Value(name) if command.is_none() && name == "run" => command = Some(Command::Run),
            other => return Err(other.unexpected()),
        }
    }
    match command {
        Some(command) => Ok(Some((command, options))),
        None => Err("say what to do: unlock or run".into()),
    }
}
