//! Machines without a metadata service: a list of the cluster's machines, in a file of the image or
//! from the hypervisor.
//!
//! ```json
//! {
//!   "endpoint": "cluster.example",
//!   "initSecretHash": "$2a$10$..",
//!   "machines": [
//!     {"name": "control-plane-0", "role": "control-plane", "address": "10.0.0.11"},
//!     {"name": "worker-0", "role": "worker", "address": "worker-0.example"}
//!   ],
//!   "self": "worker-0"
//! }
//! ```
//!
//! All machines can have the same list: without `self`, a machine finds its own entry by its
//! address. `address` is an IP address or a DNS name. Without `endpoint` the first control plane is
//! the endpoint. `initSecretHash` is needed only by a machine that will be initialized. `timeServers`
//! has the form of the setting `time-servers`, without devices.
//!
//! `--metadata` says where the list is:
//!
//! | value | place |
//! |---|---|
//! | `file:PATH` | a file |
//! | `base64:TEXT` | the value itself, for the kernel command line |
//! | `fw_cfg` | QEMU's `-fw_cfg name=opt/firstlight/machines,file=FILE` |
//! | `smbios` | an OEM string (SMBIOS type 11) that begins with `firstlight.machines=` |
//!
//! Without `--metadata` the first of these locations that exists is used: [`FILE`], `fw_cfg`,
//! `smbios`.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::IpAddr;

use base::machines::{Error, Role, is_host};
use base::text::quoted;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

/// The file with the list that an image contains.
pub const FILE: &str = "/etc/firstlight/machines.json";
/// The file in which the kernel shows the list of QEMU (module qemu_fw_cfg).
const FW_CFG: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/firstlight/machines/raw";
/// The table of SMBIOS structures, as the firmware made it.
const SMBIOS: &str = "/sys/firmware/dmi/tables/DMI";
/// The beginning of the OEM string with the list.
const OEM_PREFIX: &[u8] = b"firstlight.machines=";
/// Maximum size of a list in bytes: 20 000 machines of 200 bytes each.
const MAX_LIST: u64 = 4 << 20;

/// Where a list is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    File(String),
    Inline(String),
    FwCfg,
    Smbios,
    /// The first of the default locations that exists.
    Usual,
}

impl Place {
    fn parse(text: Option<&str>) -> Result<Place, &'static str> {
        let Some(text) = text else {
            return Ok(Place::Usual);
        };
        match text.split_once(':') {
            Some(("file", path)) if path.starts_with('/') => Ok(Place::File(path.into())),
            Some(("base64", encoded)) if !encoded.is_empty() => Ok(Place::Inline(encoded.into())),
            None if text == "fw_cfg" => Ok(Place::FwCfg),
            None if text == "smbios" => Ok(Place::Smbios),
            _ => Err("expected file:/PATH, base64:TEXT, fw_cfg or smbios"),
        }
    }

    /// Reads the list; `None` if the location does not exist.
    fn read(&self) -> Result<Option<Vec<u8>>, Problem> {
        match self {
            Place::File(path) => read(path),
            Place::FwCfg => read(FW_CFG),
            Place::Inline(encoded) => STANDARD
                .decode(encoded)
                .map(Some)
                .map_err(|error| Problem::Unreadable(format!("it is not base64: {error}"))),
            Place::Smbios => match read(SMBIOS)? {
                Some(table) => Ok(oem_string(&table, OEM_PREFIX)),
                None => Ok(None),
            },
            Place::Usual => {
                for place in [Place::File(FILE.into()), Place::FwCfg, Place::Smbios] {
                    if let Some(list) = place
                        .read()
                        .map_err(|why| Problem::Unreadable(format!("{place}: {why}")))?
                    {
                        return Ok(Some(list));
                    }
                }
                Ok(None)
            }
        }
    }
}

/// Writes the location for messages.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File(path) => f.write_str(path),
            Place::Inline(_) => f.write_str("the value of --metadata"),
            Place::FwCfg => write!(f, "fw_cfg ({FW_CFG})"),
            Place::Smbios => write!(f, "SMBIOS type 11 ({SMBIOS})"),
            Place::Usual => write!(f, "{FILE}, fw_cfg, SMBIOS type 11"),
        }
    }
}

fn read(path: &str) -> Result<Option<Vec<u8>>, Problem> {
    let mut bytes = vec![];
    let unreadable = |why| Err(Problem::Unreadable(why));
    let read = File::open(path).and_then(|file| file.take(MAX_LIST + 1).read_to_end(&mut bytes));
    match read {
        Ok(_) if bytes.len() as u64 > MAX_LIST => {
            unreadable(format!("it has more than {MAX_LIST} bytes"))
        }
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => unreadable(error.to_string()),
    }
}

/// Returns the rest of the first OEM string that begins with `prefix`. A structure of SMBIOS has a
/// type, the length of its fixed part, a handle, and strings behind the fixed part: each ends with
/// a zero byte, and the last one with two (SMBIOS 3.7 §6.1.3).
pub fn oem_string(table: &[u8], prefix: &[u8]) -> Option<Vec<u8>> {
    const OEM_STRINGS: u8 = 11;
    let mut rest = table;
    while let [kind, length, ..] = *rest {
        let strings = rest.get(usize::from(length).max(4)..)?;
        let end = strings.windows(2).position(|two| two == [0, 0])?;
        if kind == OEM_STRINGS {
            let mut all = strings[..end].split(|byte| *byte == 0);
            if let Some(found) = all.find_map(|text| text.strip_prefix(prefix)) {
                return Some(found.into());
            }
        }
        rest = &strings[end + 2..];
    }
    None
}

/// The machines of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machines {
    #[serde(default)]
    endpoint: Option<String>,
    /// The bcrypt hash of the init secret, not checked: only the machine that will be initialized needs it.
    #[serde(default, rename = "initSecretHash")]
    pub init_secret_hash: Option<String>,
    /// The time servers, not checked: only the booted system uses them.
    #[serde(default, rename = "timeServers")]
    pub time_servers: Option<String>,
    /// All machines.
    pub machines: Vec<StaticMachine>,
    /// The name of this machine.
    #[serde(default, rename = "self")]
    pub own: Option<String>,
}

/// A machine of a list.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticMachine {
    /// Its name.
    pub name: String,
    /// Its role, in the form of [`Role::parse`].
    pub role: String,
    /// Its address or DNS name.
    pub address: String,
    /// Its ID in the cloud; may be empty.
    #[serde(default, rename = "providerID")]
    pub provider_id: String,
}

/// Why a list of machines gives no answer, as a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// Its place cannot be read, or has none.
    Unreadable(String),
    /// It breaks a rule.
    Malformed(String),
    /// It does not show which of its machines this one is.
    Unidentified(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Problem::*;
        let (Unreadable(why) | Malformed(why) | Unidentified(why)) = self;
        f.write_str(why)
    }
}

impl Machines {
    /// Parses a list. An error says what is wrong with which machine.
    pub fn parse(json: &[u8]) -> Result<Machines, Problem> {
        let wrong = |why: String| Err(Problem::Malformed(why));
        // editors of Windows write a byte order mark
        let json = json.strip_prefix("\u{feff}".as_bytes()).unwrap_or(json);
        let list: Machines = match serde_json::from_slice(json) {
            Ok(list) => list,
            Err(error) => {
                let error = error.to_string();
                return wrong(format!("it is not a list of machines: {error:.160}"));
            }
        };
        let mut names = BTreeSet::new();
        let mut addresses = BTreeSet::new();
        for machine in &list.machines {
            let StaticMachine { name, address, .. } = machine;
            if !is_host(name) || name.len() > 63 || name.parse::<IpAddr>().is_ok() {
                return wrong(format!(
                    "{} is not a name of a machine: expected up to 63 letters, digits, hyphens, dots",
                    quoted(name, 80)
                ));
            }
            if !is_host(address) {
                return wrong(format!(
                    "{name}: {} is neither an IP address nor a DNS name",
                    quoted(address, 80)
                ));
            }
            if Role::parse(&machine.role) == Role::Unknown {
                return wrong(format!(
                    "{name}: the role {} is not known: expected control-plane or worker",
                    quoted(&machine.role, 80)
                ));
            }
            let address = address.parse().map_or_else(
                |_| address.to_ascii_lowercase(),
                |address: IpAddr| address.to_canonical().to_string(),
            );
            if !names.insert(name.to_ascii_lowercase()) || !addresses.insert(address) {
                return wrong(format!("{name}: its name or its address occurs twice"));
            }
        }
        if list.control_planes().next().is_none() {
            return wrong("it has no control plane".into());
        }
        if let Some(own) = &list.own
            && !names.contains(&own.to_ascii_lowercase())
        {
            return wrong(format!(
                "self is {}, which is not one of its machines",
                quoted(own, 80)
            ));
        }
        if let Some(endpoint) = &list.endpoint
            && !is_host(endpoint)
        {
            return wrong(format!(
                "endpoint: {} is neither an IP address nor a DNS name",
                quoted(endpoint, 80)
            ));
        }
        Ok(list)
    }

    /// Returns all control planes.
    pub fn control_planes(&self) -> impl Iterator<Item = &StaticMachine> {
        let is_control_plane = |one: &&StaticMachine| Role::parse(&one.role) == Role::ControlPlane;
        self.machines.iter().filter(is_control_plane)
    }

    /// Returns the machine that `self` names.
    pub fn this(&self) -> Option<&StaticMachine> {
        let name = self.own.as_ref()?;
        let mut all = self.machines.iter();
        all.find(|one| one.name.eq_ignore_ascii_case(name))
    }

    /// Returns the host name or address under which all control planes are reached.
    pub fn endpoint(&self) -> &str {
        match &self.endpoint {
            Some(endpoint) => endpoint,
            None => {
                &self
                    .control_planes()
                    .next()
                    .expect("parse has checked it")
                    .address
            }
        }
    }
}

/// Reads the list at each call: it may change, and an initramfs may have to wait for the module
/// that provides it.
pub struct ListedMetadata {
    place: Place,
}

/// Makes a client of the list at this place; `None` is the first of the usual places that has one.
pub fn client(place: Option<&str>) -> Result<ListedMetadata, Error> {
    let place = Place::parse(place).map_err(|problem| Error::Url {
        url: place.unwrap_or_default().into(),
        problem: problem.into(),
    })?;
    Ok(ListedMetadata { place })
}

impl ListedMetadata {
    /// Makes the error that something is wrong with the list.
    pub fn failed(&self, problem: impl fmt::Display) -> Error {
        Error::List {
            place: self.place.to_string(),
            problem: problem.to_string(),
        }
    }

    /// Reads the list.
    pub fn list(&self) -> Result<Machines, Error> {
        let list = self.place.read().and_then(|found| match found {
            Some(list) => Machines::parse(&list),
            None => Err(Problem::Unreadable("there is no list of machines".into())),
        });
        list.map_err(|problem| self.failed(problem))
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    const HASH: &str = "$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";

    fn list() -> String {
        format!(
            r#"{{"endpoint":"cluster.example","initSecretHash":"{HASH}","machines":[
                {{"name":"control-plane-0","role":"control-plane","address":"10.0.0.11"}},
                {{"name":"worker-0","role":"Worker","address":"fd00::2","providerID":"metal:///2"}}]}}"#
        )
    }

    /// Returns the table with a structure of each of these types, with these strings.
    fn smbios(structures: &[(u8, &[&str])]) -> Vec<u8> {
        let mut table = vec![];
        for (kind, strings) in structures {
            table.extend([*kind, 5, 0, 0, strings.len() as u8]);
            for text in *strings {
                table.extend(text.as_bytes());
                table.push(0);
            }
            table.extend(if strings.is_empty() {
                &[0, 0][..]
            } else {
                &[0]
            });
        }
        table
    }

    #[test]
    fn without_an_endpoint_it_is_the_first_control_plane() {
        let json = list().replace(r#""endpoint":"cluster.example","#, "");
        let list = Machines::parse(json.as_bytes()).unwrap();
        assert_eq!(list.endpoint(), "10.0.0.11");
    }

    #[test]
    fn a_list_may_name_time_servers() {
        let of = |json: &str| Machines::parse(json.as_bytes()).unwrap().time_servers;
        assert_eq!(of(&list()), None);
        let named = list().replacen('{', r#"{"timeServers":"nts:time.example,10.0.0.5","#, 1);
        for named in [&named, &format!("\u{feff}{named}")] {
            assert_eq!(of(named).as_deref(), Some("nts:time.example,10.0.0.5"));
        }
    }

    #[test]
    fn a_wrong_list_is_refused_by_what_is_wrong() {
        let machine = |name: &str, role: &str, address: &str| {
            format!(r#"{{"machines":[{{"name":"{name}","role":"{role}","address":"{address}"}}]}}"#)
        };
        for (json, why) in [
            ("{".into(), "not a list of machines"),
            (r#"{"machines":[]}"#.into(), "no control plane"),
            (machine("w", "worker", "10.0.0.1"), "no control plane"),
            (machine("", "control-plane", "10.0.0.1"), "not a name"),
            (
                machine("10.0.0.1", "control-plane", "10.0.0.1"),
                "not a name",
            ),
            (
                machine("c", "master", "10.0.0.1"),
                "c: the role \"master\" is not known",
            ),
            (
                machine("c", "control-plane", "a b"),
                "c: \"a b\" is neither",
            ),
            (
                list().replace("fd00::2", "10.0.0.11"),
                "worker-0: its name or its address occurs twice",
            ),
            (
                list().replace("worker-0", "control-plane-0"),
                "occurs twice",
            ),
            // the same name, and the same address, in another form
            (
                list().replace("worker-0", "Control-Plane-0"),
                "Control-Plane-0: its name or its address occurs twice",
            ),
            (
                list().replace("fd00::2", "::ffff:10.0.0.11"),
                "worker-0: its name or its address occurs twice",
            ),
            (
                list().replace("10.0.0.11", "fd00:0:0::0:2"),
                "worker-0: its name or its address occurs twice",
            ),
            (
                list()
                    .replace("10.0.0.11", "A.example")
                    .replace("fd00::2", "a.example"),
                "worker-0: its name or its address occurs twice",
            ),
            (machine(&"c".repeat(64), "control-plane", "a"), "not a name"),
            (
                machine(&["c"; 33].join("."), "control-plane", "a"),
                "not a name",
            ),
            (
                machine("c", "control-plane", &"a".repeat(64)),
                "is neither an IP address nor a DNS name",
            ),
            (list().replace("endpoint", "endpiont"), "endpiont"),
            (
                list().replace("cluster.example", "http://x"),
                "endpoint: \"http://x\" is neither",
            ),
            (list().replacen('{', r#"{"self":"x","#, 1), "self is \"x\""),
        ] {
            let error = Machines::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{json}: {error}");
        }
    }

    #[test]
    fn the_place_is_a_file_the_value_itself_or_the_hypervisors() {
        for (text, expected) in [
            (None, Place::Usual),
            (Some("file:/etc/list"), Place::File("/etc/list".into())),
            (Some("base64:e30="), Place::Inline("e30=".into())),
            (Some("fw_cfg"), Place::FwCfg),
            (Some("smbios"), Place::Smbios),
        ] {
            assert_eq!(Place::parse(text), Ok(expected));
        }
        for text in [
            "",
            "file:",
            "file:etc",
            "base64:",
            "http://10.0.0.1",
            "smbios:",
            "FW_CFG",
        ] {
            assert!(client(Some(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn a_list_in_the_value_or_in_a_file_is_read() {
        let inline = format!("base64:{}", STANDARD.encode(list()));
        let list_at = client(Some(&inline)).unwrap();
        let list_there = list_at.list().unwrap();
        assert_eq!(list_there.endpoint(), "cluster.example");
        assert_eq!(list_there.machines.len(), 2);

        let path = std::env::temp_dir().join(format!("machines-{}", std::process::id()));
        let list_at = client(Some(&format!("file:{}", path.display()))).unwrap();
        let missing = list_at.list().unwrap_err().to_string();
        let place = path.display().to_string();
        assert!(
            missing.contains(&place) && missing.contains("there is no list"),
            "{missing}"
        );
        // it may come later
        std::fs::write(&path, list()).unwrap();
        assert_eq!(list_at.list().unwrap().machines.len(), 2);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_oem_string_is_found_among_the_structures_of_smbios() {
        let table = smbios(&[
            (1, &["QEMU", "firstlight.machines=no"]),
            (2, &[]),
            (11, &["io.systemd.credential:a=b", "firstlight.machines={}"]),
            (127, &[]),
        ]);
        assert_eq!(oem_string(&table, OEM_PREFIX), Some(b"{}".to_vec()));
        assert_eq!(
            oem_string(&smbios(&[(11, &["other"]), (127, &[])]), OEM_PREFIX),
            None
        );
        assert_eq!(oem_string(&[], OEM_PREFIX), None);
    }

    #[test]
    fn mutated_lists_and_tables_are_read_or_refused() {
        let table = smbios(&[(1, &["a"]), (11, &["firstlight.machines={}"]), (127, &[])]);
        let mut found = 0;
        for bytes in mutations(&table, 20_000) {
            found += usize::from(oem_string(&bytes, OEM_PREFIX).is_some());
        }
        assert!(found > 100, "{found}");
        let mut good = 0;
        for json in mutations(list().as_bytes(), 20_000) {
            if let Ok(list) = Machines::parse(&json) {
                good += 1;
                assert!(!list.endpoint().is_empty());
            }
        }
        assert!(good > 100, "{good}");
    }
}
