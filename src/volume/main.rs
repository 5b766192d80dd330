//! `firstlight-volume`: runs in an ordinary virtual machine, and opens its LUKS2 volume by attestation.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use base::logger;
use base::options::{self, HELP, Opt, Table, VERSION, put, take};
use base::program::{self, Failure, text};
use log::LevelFilter;
use sys::wiping::Wiping;
use volume::cryptsetup::Luks;
use volume::enroll::Enrollment;
use volume::settings::{self, FOLDER, Folders, HEADERS, Volume};
use volume::{manage, prepare, recovery_key, serve};
use zeroize::Zeroizing;

/// Wipes freed memory, so that no copies of secrets remain in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

/// The socket of `serve`, as the unit has it.
const SOCKET: &str = "/run/firstlight/volume";
const CRYPTTAB: &str = "/etc/crypttab";

/// The options of the command line.
#[derive(Default)]
struct Given {
    name: Option<String>,
    format: bool,
    key_file: Option<PathBuf>,
    folder: Option<PathBuf>,
    headers: Option<PathBuf>,
    crypttab: Option<PathBuf>,
    volume: Volume,
}

/// The options without those about a volume.
const OPTIONS: &Table<Given> = &[
    (
        Opt::value("name", "NAME", "the name of the volume in /etc/crypttab"),
        |it, _, value| put(&mut it.name, text(value).map(Some)),
    ),
    (
        Opt::flag(
            "format",
            "enroll: make a new LUKS2 volume on a blank device, and print its recovery key",
        ),
        |it, _, _| put(&mut it.format, Ok(true)),
    ),
    (
        Opt::value(
            "key-file",
            "FILE",
            "enroll: a key that opens the present LUKS2 volume, byte by byte; - is the standard input",
        ),
        |it, _, value| put(&mut it.key_file, Ok(Some(value.into()))),
    ),
    (
        Opt::value(
            "folder",
            "DIR",
            "the settings of volumes, a file with the name of each",
        )
        .or(FOLDER),
        |it, _, value| put(&mut it.folder, Ok(Some(value.into()))),
    ),
    (
        Opt::value("headers", "DIR", "the checked copies of headers, in memory").or(HEADERS),
        |it, _, value| put(&mut it.headers, Ok(Some(value.into()))),
    ),
    (
        Opt::value(
            "crypttab",
            "FILE",
            "copy-header, status: the table of volumes",
        )
        .or(CRYPTTAB),
        |it, _, value| put(&mut it.crypttab, Ok(Some(value.into()))),
    ),
];

fn help() -> String {
    let groups = [
        options::of(OPTIONS),
        options::of(settings::OPTIONS),
        vec![&HELP, &VERSION],
    ];
    let options = options::help(&groups.concat());
    format!(
        "\
firstlight-volume: opens a LUKS2 volume of a virtual machine by attestation, with a key from a key broker

Usage: firstlight-volume enroll --name NAME --device PATH --broker HOST[,HOST..] --cluster-id HEX [--format | --key-file FILE]
       firstlight-volume check-recovery-key --device PATH
       firstlight-volume status [--name NAME]
       firstlight-volume remove --name NAME
       firstlight-volume copy-header --name NAME
       firstlight-volume serve

enroll adds a keyslot to the volume, and leaves its other keyslots as they are. check-recovery-key reads a recovery key from the
standard input, and says whether it opens the volume. status describes the enrolled volumes. remove takes the key broker's keyslot and
token from the volume, and deletes its settings. Units start the other two: copy-header makes and checks the copy of the header
that systemd-cryptsetup reads, and serve gives it the key.

{options}
Exit codes: 0 done, 1 failed, 2 invalid arguments.

Examples:
  firstlight-volume enroll --name data --device /dev/vdb --broker 10.0.0.5 --cluster-id 9c… --format
  systemd-ask-password -n | firstlight-volume enroll --name data --device /dev/vdb --broker 10.0.0.5 --cluster-id 9c… --key-file -
"
    )
}

fn main() -> ExitCode {
    program::main("firstlight-volume", &help(), run)
}

fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    let is_command = |word: &OsStr| !word.to_string_lossy().starts_with('-');
    let command = args.raw_args()?.next_if(is_command);
    let mut given = Given::default();
    options::parse(args, |name, args| {
        Ok(take(OPTIONS, name, args, &mut given)?.is_some()
            || take(settings::OPTIONS, name, args, &mut given.volume)?.is_some())
    })?;
    logger::init(LevelFilter::Info, logger::Format::default());
    match command.as_deref().and_then(|word| word.to_str()) {
        Some("enroll") => enroll(given),
        Some("check-recovery-key") => check_recovery_key(given),
        Some("status") => status(given),
        Some("remove") => remove(given),
        Some("copy-header") => copy_header(given),
        Some("serve") => {
            let stop = prepare().map_err(Failure::failed)?;
            serve::run(&given.folders(), &stop).map_err(Failure::failed)
        }
        other => Err(Failure::Usage(format!(
            "expected a command, enroll, check-recovery-key, status, remove, copy-header or serve, got {:?}",
            other.unwrap_or_default()
        ))),
    }
}

impl Given {
    fn crypttab(&self) -> PathBuf {
        self.crypttab.clone().unwrap_or_else(|| CRYPTTAB.into())
    }

    fn folders(&self) -> Folders {
        let or = |given: &Option<PathBuf>, default: &str| match given {
            Some(path) => path.clone(),
            None => default.into(),
        };
        Folders {
            volumes: or(&self.folder, FOLDER),
            headers: or(&self.headers, HEADERS),
        }
    }
}

fn enroll(given: Given) -> Result<(), Failure> {
    let folders = given.folders();
    let enrollment = Enrollment {
        name: given.name.ok_or_else(|| missing("--name"))?,
        volume: given.volume,
        format: given.format,
        key_file: given.key_file,
        folders,
    };
    if enrollment.volume.device.is_none() {
        return Err(missing("--device"));
    }
    if enrollment.volume.brokers.is_empty() {
        return Err(missing("--broker"));
    }
    if enrollment.volume.cluster.is_none() {
        return Err(missing("--cluster-id"));
    }
    if enrollment.format && enrollment.key_file.is_some() {
        let text = "--format makes a new volume, which --key-file cannot open: give one of them";
        return Err(Failure::Usage(text.into()));
    }
    let name = enrollment.name.clone();
    let header = enrollment.folders.header_option(&name);
    let stop = prepare().map_err(Failure::failed)?;
    let show = |key: &str| {
        let mut stdout = io::stdout();
        writeln!(stdout, "recovery key: {key}")?;
        writeln!(
            stdout,
            "It opens the new volume without the key broker, in lower case, and is not shown again: write it down now."
        )?;
        stdout.flush()
    };
    let enrolled = enrollment.run(&stop, show).map_err(Failure::failed)?;
    let uuid = &enrolled.uuid;
    println!(
        "keyslot {} of {uuid} has the key of the key broker",
        enrolled.keyslot
    );
    println!("Line for /etc/crypttab: {name} UUID={uuid} {SOCKET} luks,_netdev,nofail,{header}");
    Ok(())
}

fn missing(option: &str) -> Failure {
    Failure::Usage(format!("{option} is missing"))
}

fn copy_header(given: Given) -> Result<(), Failure> {
    let (folders, crypttab) = (given.folders(), given.crypttab());
    let name = given.name.ok_or_else(|| missing("--name"))?;
    let stop = prepare().map_err(Failure::failed)?;
    serve::copy_header(&folders, &name, &crypttab, &stop).map_err(Failure::failed)
}

fn status(given: Given) -> Result<(), Failure> {
    let (folders, crypttab) = (given.folders(), given.crypttab());
    let stop = prepare().map_err(Failure::failed)?;
    let names = match given.name {
        Some(name) => vec![name],
        None => manage::names(&folders).map_err(Failure::failed)?,
    };
    let mut is_well = true;
    for name in names {
        let status = manage::status(&folders, &name, &crypttab, &stop);
        let (text, opens) = status.map_err(Failure::failed)?;
        print!("{text}");
        is_well &= opens;
    }
    if is_well {
        Ok(())
    } else {
        Err(Failure::failed(
            "at least one volume above will not open at the next boot",
        ))
    }
}

fn remove(given: Given) -> Result<(), Failure> {
    let folders = given.folders();
    let name = given.name.ok_or_else(|| missing("--name"))?;
    let stop = prepare().map_err(Failure::failed)?;
    let volume = manage::remove(&folders, &name, &stop).map_err(Failure::failed)?;
    let place = volume.header();
    println!(
        "{} has no keyslot of the key broker any more",
        place.display()
    );
    println!("Remove {name} from /etc/crypttab, or the key file and header= from its line");
    Ok(())
}

fn check_recovery_key(given: Given) -> Result<(), Failure> {
    let device = given.volume.device;
    let device = device.ok_or_else(|| Failure::Usage("--device is missing".into()))?;
    let stop = prepare().map_err(Failure::failed)?;
    let mut typed = Zeroizing::new(String::with_capacity(1024));
    io::stdin().read_line(&mut typed).map_err(Failure::failed)?;
    let key = recovery_key::parse(&typed)
        .map_err(|why| Failure::failed(format!("this is no recovery key: {why}")))?;
    let keyslot = Luks::new(&device, &stop)
        .keyslot(key.as_bytes())
        .map_err(Failure::failed)?;
    let place = device.display();
    match keyslot {
        Some(keyslot) => {
            println!("the recovery key opens keyslot {keyslot} of {place}");
            Ok(())
        }
        None => Err(Failure::failed(format!(
            "the recovery key is typed correctly, but does not open {place}: it is for another volume"
        ))),
    }
}
