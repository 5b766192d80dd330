use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use base::machines::{Error, Instance};
use cloud_api::CloudMetadata;
use support::foreign::fetched;
use support::mutation::mutations;

use super::*;

/// The configuration of the image's chrony.
const CONF: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../mkosi/mkosi.extra/etc/chrony/chrony.conf"
);

fn sources(text: &str) -> TimeServers {
    text.parse().unwrap()
}

#[test]
fn the_setting_is_a_short_list_of_servers_and_devices() {
    let list = sources("nts:time.example, 10.0.0.5,nts:fd00::5,/dev/ptp_kvm,/dev/ptp0");
    assert_eq!(
        list.configuration("test"),
        "# bootstrapper writes this file at its start, from: test\n\
         server time.example iburst nts\n\
         server 10.0.0.5 iburst\n\
         server fd00::5 iburst nts\n\
         refclock PHC /dev/ptp_kvm poll 3 dpoll -2 offset 0 stratum 2\n\
         refclock PHC /dev/ptp0 poll 3 dpoll -2 offset 0 stratum 2\n\
         minsources 3\n"
    );
    let same: TimeServers = list.to_string().parse().unwrap();
    assert_eq!(same, list);

    for (wrong, why) in [
        ("", "\"\" is not a time source"),
        ("a,", "\"\" is not a time source"),
        ("a nts", "\"a nts\" is not"),
        ("a\nallow all", "\"a\\nallow all\" is not"),
        ("nts:nts:a", "is not a time source"),
        ("nts:/dev/ptp0", "is not a time source"),
        ("/dev/ptp0 pps", "is not a time source"),
        ("/dev/ptp/../sda", "is not a time source"),
        ("/dev/sda", "is not a time source"),
        ("a,A", "A occurs twice"),
        ("a,b,c,d,e,f,g,h,i", "at most 8"),
    ] {
        let error = wrong.parse::<TimeServers>().unwrap_err().to_string();
        assert!(error.contains(why), "{wrong:?}: {error}");
    }
}

#[test]
fn a_majority_of_three_or_more_sources_must_agree() {
    for (list, expected) in [("a", 1), ("a,b", 1), ("a,b,c", 2), ("a,b,c,d", 3)] {
        let text = sources(list).configuration("test");
        assert!(
            text.ends_with(&format!("\nminsources {expected}\n")),
            "{text}"
        );
    }
}

/// A line of chrony's configuration can run a program (`mailonchange`), open ports (`allow`) and write files.
#[test]
fn no_list_adds_a_directive_or_an_option() {
    let valid = b"nts:time.example,10.0.0.5,/dev/ptp_kvm";
    let mut accepted = 0;
    for bytes in mutations(valid, 20_000) {
        let Ok(list) = String::from_utf8_lossy(&bytes).parse::<TimeServers>() else {
            continue;
        };
        accepted += 1;
        for line in list.configuration("test").lines().skip(1) {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["server", host, "iburst"] | ["server", host, "iburst", "nts"] => {
                    assert!(is_host(host), "{line:?}");
                }
                ["refclock", "PHC", device, ref options @ ..] => {
                    assert!(device.starts_with("/dev/ptp"), "{line:?}");
                    assert_eq!(
                        options,
                        ["poll", "3", "dpoll", "-2", "offset", "0", "stratum", "2"]
                    );
                }
                ["minsources", "1" | "2" | "3" | "4" | "5"] => {}
                _ => panic!("{line:?}"),
            }
        }
    }
    assert!(accepted > 100, "{accepted}");
}

#[test]
fn the_setting_comes_first_then_the_list_the_cloud_and_public_servers() {
    let chosen = |setting: Option<&str>, listed, cloud| {
        let (sources, from) = chosen(setting.map(sources), listed, cloud).unwrap();
        (sources.to_string(), from)
    };
    let own = Some("nts:own.example");
    for (setting, listed, cloud, expected) in [
        (
            own,
            Some("listed"),
            Some("cloud"),
            ("nts:own.example", "setting time-servers"),
        ),
        (
            None,
            Some("listed"),
            Some("cloud"),
            ("listed", "list of machines"),
        ),
        (None, None, Some("cloud"), ("cloud", "cloud")),
        // the list is not trusted: it cannot make the host's clock the node's, or break the file
        (None, Some("/dev/ptp0"), Some("cloud"), ("cloud", "cloud")),
        (None, Some("a\nallow"), Some("cloud"), ("cloud", "cloud")),
    ] {
        let (sources, from) = chosen(setting, listed, cloud);
        assert_eq!((&*sources, from), expected);
    }
    for cloud in [None, Some("/dev/ptp_of_no_machine")] {
        let (sources, from) = chosen(None, None, cloud);
        assert_eq!(sources.matches("nts:").count(), 3, "{sources}");
        assert_eq!(from, "default");
    }
    // the operator's choice is not replaced by another one
    let missing = super::chosen(Some(sources("/dev/ptp_of_no_machine")), None, None).unwrap_err();
    assert_eq!(
        missing,
        WrongSources::NoDevice("/dev/ptp_of_no_machine".into())
    );
    // chrony would not start
    let (left, _) = chosen(Some("a,/dev/ptp_of_no_machine"), None, None);
    assert_eq!(left, "a");
}

#[test]
fn the_sources_of_each_cloud_are_valid() {
    for cloud in base::machines::NAMES {
        if let Some(source) = cloud_api::time_source(Cloud::named(cloud).unwrap()) {
            sources(source);
        }
    }
}

#[test]
fn a_correction_is_described_if_it_is_a_step() {
    assert_eq!(moved(900), "");
    assert_eq!(moved(-900), "");
    assert_eq!(moved(31_536_000_000), ", 31536000 s forward");
    assert_eq!(moved(-2500), ", 2 s back");
}

/// A list of machines, of which so many requests fail with an error.
struct Listed {
    servers: Option<&'static str>,
    failures: AtomicU32,
    error: fn() -> Error,
    asked: AtomicU32,
}

impl CloudMetadata for Listed {
    fn own_instance(&self) -> Result<Instance, Error> {
        unreachable!("the clock does not ask")
    }
    fn peers(&self) -> Result<Vec<Instance>, Error> {
        unreachable!("the clock does not ask")
    }
    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        unreachable!("the clock does not ask")
    }
}

impl Service for Listed {
    fn init_secret_hash(&self) -> Result<String, Error> {
        unreachable!("the clock does not ask")
    }
    fn time_servers(&self) -> Result<Option<String>, Error> {
        self.asked.fetch_add(1, SeqCst);
        let fails = |left: u32| left.checked_sub(1);
        match self.failures.fetch_update(SeqCst, SeqCst, fails) {
            Ok(_) => Err((self.error)()),
            Err(_) => Ok(self.servers.map(str::to_owned)),
        }
    }
}

fn listed(servers: Option<&'static str>, failures: u32, error: fn() -> Error) -> Arc<Listed> {
    Arc::new(Listed {
        servers,
        failures: failures.into(),
        error,
        asked: 0.into(),
    })
}

fn unreachable() -> Error {
    Error::Unreachable {
        request: "GET http://metadata/peers".into(),
        error: "connection refused".into(),
    }
}

fn service(servers: Option<&'static str>) -> TimeService {
    service_of(listed(servers, 0, unreachable))
}

fn service_of(metadata: Arc<Listed>) -> TimeService {
    TimeService {
        setting: None,
        metadata,
        cloud: Cloud::Static,
        stop: Stop::new(),
        timeline: Timeline::new("run"),
    }
}

#[test]
fn a_list_of_machines_that_is_not_reachable_yet_is_asked_again() {
    let nonsense = || Error::Status {
        request: "GET http://metadata/peers".into(),
        status: 404,
        body: String::new(),
    };
    for (failures, error, expected, requests) in [
        (0, unreachable as fn() -> Error, Some("a"), 1),
        (TRIES, unreachable, Some("a"), TRIES + 1),
        (TRIES + 1, unreachable, None, TRIES + 1),
        (1, nonsense, None, 1),
    ] {
        let metadata = listed(Some("a"), failures, error);
        let found = service_of(metadata.clone()).listed(Duration::ZERO);
        assert_eq!(found.as_deref(), expected, "{failures}");
        assert_eq!(metadata.asked.load(SeqCst), requests, "{failures}");
    }
    let service = service_of(listed(Some("a"), 1, unreachable));
    service.stop.stop();
    assert_eq!(service.listed(LOOK), None);
}

#[test]
fn an_image_without_the_folder_gets_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("chrony-firstlight");
    service(Some("a")).configure(&folder);
    assert!(!folder.exists());
}

#[test]
fn the_file_is_written_once_and_chronys_user_can_read_it() {
    let dir = tempfile::tempdir().unwrap();
    // a file of the same servers: chrony, which the test must not touch, is not restarted
    let expected = sources("nts:a,b").configuration("list of machines");
    assert!(write(dir.path(), &expected).unwrap());
    service(Some("nts:a,b")).configure(dir.path());
    assert!(!write(dir.path(), &expected).unwrap());
    let path = dir.path().join(FILE);
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o644);
    assert_eq!(fs::read_to_string(path).unwrap(), expected);
}

/// Writes the image's configuration, which includes the files of `folder`, and some more lines.
fn image_conf(folder: &Path, more: &str) -> std::path::PathBuf {
    let conf = fs::read_to_string(CONF).unwrap();
    assert!(conf.contains(&format!("\nconfdir {FOLDER}\n")), "{conf}");
    let conf = conf.replace(FOLDER, folder.to_str().unwrap());
    // the state of chrony stays in the test's folder
    let conf = conf.replace("/var/lib/chrony", folder.to_str().unwrap());
    let path = folder.join("chrony");
    fs::write(&path, conf + more).unwrap();
    path
}

/// Runs chronyd of Debian 13 so that it prints its configuration.
fn printed(conf: &Path) -> Output {
    let mut chronyd = Command::new(fetched("chrony.sh").join("chronyd"));
    chronyd.args(["-p", "-f"]).arg(conf).output().unwrap()
}

#[test]
fn chrony_accepts_the_images_configuration_with_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let conf = image_conf(dir.path(), "");
    let list = sources("nts:time.example,10.0.0.5,fd00::5,/dev/ptp_kvm");
    write(dir.path(), &list.configuration("test")).unwrap();
    let output = printed(&conf);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    for line in [
        "server time.example iburst nts",
        "server 10.0.0.5 iburst",
        "server fd00::5 iburst",
        "refclock PHC /dev/ptp_kvm poll 3 dpoll -2 offset 0 stratum 2",
        "minsources 3",
        "port 0",
        "cmdport 0",
    ] {
        assert!(said.lines().any(|it| it == line), "{line}: {said}");
    }

    fs::write(dir.path().join("wrong.conf"), "server a iburst nts=yes\n").unwrap();
    let refused = printed(&conf);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && why.contains("wrong.conf"),
        "{why}"
    );
}

/// Makes a certificate for localhost that ended in 2025.
fn ended_certificate(folder: &Path, name: &str) {
    let mut openssl = Command::new(fetched("openssl.sh"));
    openssl.current_dir(folder).args([
        "req",
        "-x509",
        "-nodes",
        "-config",
        "/dev/null",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-not_before",
        "20240101000000Z",
        "-not_after",
        "20250101000000Z",
        "-keyout",
        &format!("{name}.key"),
        "-out",
        &format!("{name}.pem"),
    ]);
    let output = openssl.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A time server without NTS whose clock is a year ahead (RFC 5905 §7.3).
const LIAR: &str = r#"
import socket, struct, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.2", 123))
stamp = lambda at: struct.pack(">II", int(at) & 0xffffffff, int(at % 1 * 2**32))
now = lambda: time.time() + 365 * 24 * 60 * 60 + 2208988800
while True:
    request, client = server.recvfrom(1024)
    got = now()
    head = bytes([0x24, 1, 6, 0xe9]) + bytes(8) + b"LIE\0"
    server.sendto(head + stamp(got - 1) + request[40:48] + stamp(got) + stamp(now()), client)
"#;

/// Runs a real server with NTS at 127.0.0.1, the [`LIAR`] at 127.0.0.2, and a client that asks `list`,
/// in a network of their own. Returns the line in which the client says whether it believes a server.
/// The client does not touch the clock, and gives up after so many seconds. It trusts the certificate `trusted`, and `without` is removed
/// from its configuration.
fn client_says(dir: &Path, list: &str, seconds: &str, trusted: &str, without: &str) -> String {
    let folder = tempfile::tempdir_in(dir).unwrap();
    let written = sources(list).configuration("test");
    write(folder.path(), &written).unwrap();
    let common = "bindcmdaddress /\nuser root\n";
    let (dir, own) = (dir.display(), folder.path().display());
    let more = format!("ntstrustedcerts {dir}/{trusted}.pem\npidfile {own}/client.pid\n{common}");
    let conf = image_conf(folder.path(), &more);
    let text = fs::read_to_string(&conf).unwrap();
    assert!(text.contains(without), "{text}");
    fs::write(&conf, text.replace(without, "")).unwrap();
    let server = format!(
        "local stratum 1\ncmdport 0\nbindaddress 127.0.0.1\nallow\nntsserverkey {dir}/server.key\n\
         ntsservercert {dir}/server.pem\npidfile {own}/server.pid\n{common}"
    );
    let server_conf = folder.path().join("server");
    fs::write(&server_conf, server).unwrap();
    // 116C is the port of NTS, 4460
    let script = r#"ip link set lo up
        "$1" -x -d -f "$2" >"$2.log" 2>&1 & server=$!
        python3 -c "$4" & liar=$!
        # without either of them the wait would not end
        until grep -q :116C /proc/net/tcp && grep -q 0200007F:007B /proc/net/udp; do kill -0 $server; kill -0 $liar; sleep 0.1; done
        "$1" -Q -t "$5" -f "$3" 2>&1"#;
    let mut unshare = Command::new("unshare");
    unshare.args(["--map-root-user", "--net", "--pid", "--fork"]);
    unshare.args(["--kill-child", "sh", "-ec", script, "sh"]);
    unshare.arg(fetched("chrony.sh").join("chronyd"));
    unshare.args([&server_conf, &conf]).args([LIAR, seconds]);
    unshare.stdout(Stdio::piped());
    let mut unshare = unshare.spawn().unwrap();
    let output = BufReader::new(unshare.stdout.take().unwrap());
    let mut said = vec![];
    let verdict = output.lines().map(Result::unwrap).find(|line| {
        said.push(line.clone());
        ["System clock wrong by", "TLS handshake", "Timeout reached"]
            .iter()
            .any(|it| line.contains(it))
    });
    unshare.kill().unwrap();
    unshare.wait().unwrap();
    verdict.unwrap_or_else(|| panic!("{said:?}"))
}

/// The clock of this machine is years after the end of the server's certificate, as the clock of a node is that the host has set
/// forward.
#[test]
fn a_wrong_clock_is_corrected_by_nts_and_no_other_server_corrects_it() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["server", "other"] {
        ended_certificate(dir.path(), name);
    }
    let says = |trusted, without| client_says(dir.path(), "nts:localhost", "600", trusted, without);
    let said = says("server", "");
    assert!(said.contains("System clock wrong by"), "{said}");

    let said = says("server", "nocerttimecheck 1\n");
    assert!(said.contains("uses expired certificate"), "{said}");

    // a network that leads the node to a server with another key
    let said = says("other", "");
    assert!(said.contains("is NOT trusted"), "{said}");
}

#[test]
fn a_server_without_nts_sets_the_clock_only_where_no_server_has_it() {
    let dir = tempfile::tempdir().unwrap();
    ended_certificate(dir.path(), "server");
    let says = |list, seconds| client_says(dir.path(), list, seconds, "server", "");
    let wrong_by = |said: &str| -> Option<f64> {
        let (_, rest) = said.split_once("System clock wrong by ")?;
        Some(rest.split(' ').next()?.parse().unwrap())
    };
    let said = says("127.0.0.2", "600");
    assert_eq!(
        wrong_by(&said).map(f64::round),
        Some(31_536_000.0),
        "{said}"
    );

    let said = says("nts:localhost,127.0.0.2", "600");
    assert!(wrong_by(&said).is_some_and(|it| it.abs() < 100.0), "{said}");

    // a network that keeps the servers with NTS away: nothing listens there
    let said = says("nts:127.0.0.9,127.0.0.2", "20");
    assert!(said.contains("Timeout reached"), "{said}");
}
