//! The clock of the booted machine: tells the image's time service, chrony, which servers to ask, and
//! says on the console whether the clock is set. The node waits for neither (docs/boot.md, "The
//! clock").
//!
//! The first of these that exists names the servers: the setting `time-servers`, the field
//! `timeServers` of the list of machines, the cloud, [`PUBLIC`]. Of these only the setting is
//! measured. A server without NTS, and a device of the host, set the clock as their network or host
//! wants.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::boot::timeline::Timeline;
use base::child_process;
use base::file;
use base::machines::{Cloud, is_host};
use base::stop::Stop;
use base::text::quoted;
use base::time;
use cloud_api::Service;
use sys::clock;

/// The folder whose files our chrony.conf includes. An image whose chrony takes its servers from this
/// program creates it (mkosi/mkosi.extra/usr/lib/tmpfiles.d).
const FOLDER: &str = "/run/chrony-firstlight";
const FILE: &str = "time-servers.conf";
const UNIT: &str = "chrony.service";
/// Time limit of the restart of chrony, which may wait for the mount of /var.
const RESTART: Duration = Duration::from_secs(120);
/// Servers with NTS of three operators in three countries: two of them must agree.
const PUBLIC: &str = "nts:time.cloudflare.com,nts:nts.netnod.se,nts:ptbtime1.ptb.de";
const MAX_SOURCES: usize = 8;
/// Characters of a wrong source in an error.
const SHOWN: usize = 80;
/// How often the kernel is asked whether the clock is set, before and after it is.
const LOOK: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// How often a server with the list of machines is asked again that does not answer.
const TRIES: u32 = 12;

/// What a time service asks for the time.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    /// A time server, by NTP.
    Server {
        /// Its name or address.
        host: String,
        /// Whether it proves itself by a certificate (Network Time Security, RFC 8915).
        has_nts: bool,
    },
    /// A clock of the host, by its path below `/dev`.
    Device(String),
}

/// Why a list of time sources cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WrongSources {
    /// This is not a source.
    NotASource(String),
    /// This source occurs twice.
    Repeated(String),
    /// There are more than [`MAX_SOURCES`].
    TooMany,
    /// The list of machines names this device.
    OfTheHost(String),
    /// The machine has none of these devices, and there is no server.
    NoDevice(String),
}

impl fmt::Display for WrongSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WrongSources::NotASource(text) => write!(
                f,
                "{} is not a time source: expected HOST, nts:HOST or /dev/ptp..",
                quoted(text, SHOWN)
            ),
            WrongSources::Repeated(source) => write!(f, "{source} occurs twice"),
            WrongSources::TooMany => write!(f, "expected at most {MAX_SOURCES} time sources"),
            WrongSources::OfTheHost(device) => write!(
                f,
                "{device} is a device: only the setting time-servers can name one"
            ),
            WrongSources::NoDevice(devices) => write!(
                f,
                "there is no {devices}: does the image have its driver? Or name a server in the setting time-servers"
            ),
        }
    }
}

impl std::error::Error for WrongSources {}

impl Source {
    fn parse(text: &str) -> Result<Source, WrongSources> {
        let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if let Some(name) = text.strip_prefix("/dev/ptp")
            && name.bytes().all(is_of_name)
            && name.len() < 32
        {
            return Ok(Source::Device(text.into()));
        }
        let (host, has_nts) = match text.strip_prefix("nts:") {
            Some(host) => (host, true),
            None => (text, false),
        };
        // also keeps line breaks and further options out of chrony's configuration
        if is_host(host) {
            Ok(Source::Server {
                host: host.into(),
                has_nts,
            })
        } else {
            Err(WrongSources::NotASource(text.into()))
        }
    }

    /// Returns chrony's directive (chrony.conf(5)).
    fn directive(&self) -> String {
        match self {
            Source::Server { host, has_nts } => {
                let nts = if *has_nts { " nts" } else { "" };
                // the first four measurements within seconds
                format!("server {host} iburst{nts}\n")
            }
            // as Microsoft has it for Hyper-V: less trusted than servers of stratum 1
            Source::Device(path) => {
                format!("refclock PHC {path} poll 3 dpoll -2 offset 0 stratum 2\n")
            }
        }
    }

    /// Returns the path of a device that is not there. With such a device chrony does not start.
    fn missing(&self) -> Option<&str> {
        match self {
            Source::Device(path) if !Path::new(path).exists() => Some(path),
            _ => None,
        }
    }
}

/// Writes a source as the setting has it.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Server { host, has_nts } => {
                f.write_str(if *has_nts { "nts:" } else { "" })?;
                f.write_str(host)
            }
            Source::Device(path) => f.write_str(path),
        }
    }
}

/// The value of the setting `time-servers`: one to [`MAX_SOURCES`] sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeServers(Vec<Source>);

impl FromStr for TimeServers {
    type Err = WrongSources;

    fn from_str(text: &str) -> Result<TimeServers, WrongSources> {
        let mut sources: Vec<Source> = vec![];
        for part in text.split(',') {
            let source = Source::parse(part.trim_matches(' '))?;
            let name = source.to_string();
            if sources
                .iter()
                .any(|it| it.to_string().eq_ignore_ascii_case(&name))
            {
                return Err(WrongSources::Repeated(name));
            }
            if sources.len() == MAX_SOURCES {
                return Err(WrongSources::TooMany);
            }
            sources.push(source);
        }
        Ok(TimeServers(sources))
    }
}

impl fmt::Display for TimeServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(Source::to_string).collect();
        f.write_str(&all.join(", "))
    }
}

impl TimeServers {
    /// Parses the list of a source that is not trusted, which cannot make the host's clock the node's.
    fn of_metadata(text: &str) -> Result<TimeServers, WrongSources> {
        let sources: TimeServers = text.parse()?;
        let device = |it: &&Source| matches!(it, Source::Device(_));
        match sources.0.iter().find(device) {
            Some(device) => Err(WrongSources::OfTheHost(device.to_string())),
            None => Ok(sources),
        }
    }

    /// Removes the devices that do not exist; the error names them if nothing is left.
    fn existing(mut self) -> Result<TimeServers, WrongSources> {
        let missing: Vec<&str> = self.0.iter().filter_map(Source::missing).collect();
        let missing = missing.join(", ");
        if !missing.is_empty() {
            log::info!("skipping the time source {missing}: the device does not exist");
        }
        self.0.retain(|it| it.missing().is_none());
        if self.0.is_empty() {
            Err(WrongSources::NoDevice(missing))
        } else {
            Ok(self)
        }
    }

    /// Returns the file for chrony.
    fn configuration(&self, from: &str) -> String {
        let directives: String = self.0.iter().map(Source::directive).collect();
        // a majority, so that one server that lies sets nothing. With two servers each may be down
        let agreeing = match self.0.len() {
            count @ 3.. => count / 2 + 1,
            _ => 1,
        };
        format!(
            "# bootstrapper writes this file at its start, from: {from}\n{directives}minsources {agreeing}\n"
        )
    }
}

/// Returns the sources and who named them.
fn chosen(
    setting: Option<TimeServers>,
    listed: Option<&str>,
    cloud: Option<&str>,
) -> Result<(TimeServers, &'static str), WrongSources> {
    if let Some(sources) = setting {
        return Ok((sources.existing()?, "setting time-servers"));
    }
    match listed.map(TimeServers::of_metadata) {
        Some(Ok(sources)) => return Ok((sources, "list of machines")),
        Some(Err(why)) => log::warn!("ignoring timeServers of the list of machines: {why}"),
        None => {}
    }
    if let Some(Ok(sources)) = cloud.map(TimeServers::from_str)
        && let Ok(sources) = sources.existing()
    {
        return Ok((sources, "cloud"));
    }
    Ok((PUBLIC.parse()?, "default"))
}

/// Returns whether a time service has set the clock; `None` if the kernel does not say so.
pub fn is_synchronized() -> Option<bool> {
    sys::clock::is_synchronized().ok()
}

/// The time service of this machine.
pub struct TimeService {
    /// The setting of the image.
    pub setting: Option<TimeServers>,
    /// May name time servers.
    pub metadata: Arc<dyn Service>,
    /// The cloud of this machine.
    pub cloud: Cloud,
    /// Ends the thread.
    pub stop: Stop,
    /// Prints events on the console.
    pub timeline: Timeline,
}

impl TimeService {
    /// Starts a thread that configures chrony, and then reports the clock. Without the thread the node
    /// works, with the clock that it has.
    pub fn start(self) {
        let work = move || {
            // the node says so before it asks anybody
            let first = self.first_look();
            self.configure(Path::new(FOLDER));
            if let Some((was_set, before)) = first {
                self.watch(was_set, before);
            }
        };
        let started = thread::Builder::new().name("clock".into()).spawn(work);
        if let Err(error) = started {
            log::warn!("cannot start the thread that gives chrony its time servers: {error}");
        }
    }

    fn configure(&self, folder: &Path) {
        if !folder.exists() {
            return log::info!(
                "leaving chrony's time servers as they are: there is no folder {}",
                folder.display()
            );
        }
        let listed = match &self.setting {
            Some(_) => None,
            None => self.listed(LOOK),
        };
        let cloud = cloud_api::time_source(self.cloud);
        let (sources, from) = match chosen(self.setting.clone(), listed.as_deref(), cloud) {
            Ok(chosen) => chosen,
            Err(why) => return self.failed(why),
        };
        let is_new = match write(folder, &sources.configuration(from)) {
            Ok(is_new) => is_new,
            Err(error) => return self.failed(format_args!("{}: {error}", folder.display())),
        };
        self.timeline
            .event("time-servers", format_args!("{sources} ({from})"));
        if is_new && let Err(error) = self.restart() {
            self.failed(error);
        }
    }

    /// Returns the servers of the list of machines, which a server may have that does not answer yet.
    fn listed(&self, pause: Duration) -> Option<String> {
        let mut tries = 0;
        loop {
            match self.metadata.time_servers() {
                Ok(listed) => return listed,
                Err(base::machines::Error::Unreachable { .. })
                    if tries < TRIES && !self.stop.wait(pause) =>
                {
                    tries += 1;
                }
                Err(error) => {
                    log::warn!("cannot read time servers from the list of machines: {error}");
                    return None;
                }
            }
        }
    }

    fn failed(&self, why: impl fmt::Display) {
        self.timeline.event(
            "clock",
            format_args!("cannot give chrony its time servers: {why}"),
        );
    }

    /// Restarts chrony: it opens devices only at its start.
    fn restart(&self) -> Result<(), child_process::Error> {
        let mut systemctl = Command::new("systemctl");
        systemctl.args(["restart", UNIT]);
        let tell = &mut |line: &str| log::info!("systemctl: {line}");
        child_process::run(&mut systemctl, Stdio::null(), RESTART, &self.stop, tell)
    }

    /// Says whether the clock is set. Returns that, and how far it is ahead of the boot.
    fn first_look(&self) -> Option<(bool, i128)> {
        let Some(was_set) = is_synchronized() else {
            log::warn!("cannot ask the kernel whether a time service has set the clock");
            return None;
        };
        self.timeline.event(
            "clock",
            if was_set {
                format!("{}, set by a time service", now())
            } else {
                format!(
                    "{}, not yet set by a time service; the node does not wait for it",
                    now()
                )
            },
        );
        Some((was_set, ahead_of_boot()))
    }

    /// Says once when the clock gets set, and in the log when it is no longer.
    fn watch(&self, mut was_set: bool, mut before: i128) {
        let mut was_ever_set = was_set;
        while !self.stop.wait(if was_set { LOOK_AGAIN } else { LOOK }) {
            let is_set = is_synchronized().unwrap_or(was_set);
            match (was_set, is_set) {
                (false, true) if !was_ever_set => {
                    let moved = moved(ahead_of_boot() - before);
                    let text = format_args!("{}, set by a time service{moved}", now()).to_string();
                    self.timeline.event("clock", text);
                    was_ever_set = true;
                }
                (false, true) => log::info!("the clock is synchronized again"),
                (true, false) => log::warn!(
                    "the clock is no longer synchronized: `firstlight logs NODE --unit chrony` says why"
                ),
                _ => {}
            }
            (was_set, before) = (is_set, if is_set { before } else { ahead_of_boot() });
        }
    }
}

/// Replaces the file, and returns whether its content is new.
fn write(folder: &Path, content: &str) -> io::Result<bool> {
    let path = folder.join(FILE);
    if fs::read(&path).is_ok_and(|old| old == content.as_bytes()) {
        return Ok(false);
    }
    // chrony's user reads it
    file::replace(&path, content.as_bytes(), 0o644)?;
    Ok(true)
}

fn now() -> String {
    time::seconds(SystemTime::now())
}

/// Returns how many milliseconds the clock is ahead of the time since power-on. It changes only when
/// the clock is set.
fn ahead_of_boot() -> i128 {
    let since_boot = clock::since_boot().as_millis() as i128;
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(now) => now.as_millis() as i128 - since_boot,
        Err(early) => -(early.duration().as_millis() as i128) - since_boot,
    }
}

/// Describes a step of the clock by so many milliseconds; empty if it is short.
fn moved(milliseconds: i128) -> String {
    match milliseconds / 1000 {
        // chrony corrects less than a second without a step
        0 => String::new(),
        seconds @ ..0 => format!(", {} s back", -seconds),
        seconds => format!(", {seconds} s forward"),
    }
}

#[cfg(test)]
mod tests;
