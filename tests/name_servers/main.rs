//! Broken name servers: our programs connect wherever a program in Go, such as kubectl, does. Each test runs in a network of its own,
//! with a name server of its own; it needs root or user namespaces.

mod server;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{env, thread};

use common::simple_server::SimpleServer;
use support::foreign::go_program;
use transport::dial::dial;

use server::Mode::{Code, Dropped, Garbage, Good, Slow, Truncated, WrongId};
use server::{A, AAAA, NameServer};

/// Response codes.
const EMPTY: u8 = 0;
const FORMERR: u8 = 1;
const SERVFAIL: u8 = 2;
const NXDOMAIN: u8 = 3;
const NOTIMP: u8 = 4;
const REFUSED: u8 = 5;

/// Set in the process that has its own network.
const INSIDE: &str = "FIRSTLIGHT_TEST_OF_NAME_SERVERS";
const HOST: &str = "api.example.test";

const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"11":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;

/// Runs a test in a new process in a network with only `lo`, with this resolv.conf.
fn in_network(test: &str, resolv_conf: &str, run: fn()) {
    if env::var_os(INSIDE).is_some() {
        return run();
    }
    // built before, because the network has no registry
    go_program("dial_go", env!("CARGO_TARGET_TMPDIR"));
    support::program::built("firstlight");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("resolv.conf"), resolv_conf).unwrap();
    fs::write(dir.path().join("hosts"), "127.0.0.1 localhost\n").unwrap();
    let script = "ip link set lo up && mount --bind resolv.conf /etc/resolv.conf && mount --bind hosts /etc/hosts && exec \"$@\"";
    let output = Command::new("unshare")
        .args([
            "--map-root-user",
            "--net",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
        ])
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "")
        // a proxy of the person who runs the tests
        .env_remove("HTTPS_PROXY")
        .env_remove("https_proxy")
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

#[test]
fn where_a_go_program_connects_so_do_ours() {
    let file = "nameserver 127.0.0.1\noptions timeout:1 attempts:2\n";
    in_network("where_a_go_program_connects_so_do_ours", file, || {
        let name_server = NameServer::start();
        let server = ["127.0.0.1:0", "[::1]:0"].map(|own| TcpListener::bind(own).unwrap());
        let [v4, v6] = server.map(|listener| {
            let port = listener.local_addr().unwrap().port();
            thread::spawn(move || listener.incoming().for_each(drop));
            port
        });
        // a server of one IP version shows which address was used
        let modes = [
            (Good, Code(EMPTY), Some(v4)),
            (Good, Code(FORMERR), Some(v4)),
            (Good, Code(SERVFAIL), Some(v4)),
            (Good, Code(NXDOMAIN), Some(v4)),
            (Good, Code(NOTIMP), Some(v4)),
            (Good, Code(REFUSED), Some(v4)),
            (Good, Dropped, Some(v4)),
            (Good, Slow(300), Some(v4)),
            (Good, Slow(300), Some(v6)),
            (Good, Truncated, Some(v6)),
            (Good, WrongId, Some(v4)),
            (Good, Garbage, Some(v4)),
            (Good, Good, Some(v4)),
            (Good, Good, Some(v6)),
            (Truncated, Code(NXDOMAIN), Some(v4)),
            (Code(EMPTY), Good, Some(v6)),
            (Code(SERVFAIL), Good, Some(v6)),
            (Code(NXDOMAIN), Good, Some(v6)),
            (Code(REFUSED), Good, Some(v6)),
            (Dropped, Good, Some(v6)),
            (Garbage, Good, Some(v6)),
            (WrongId, Good, Some(v6)),
            (Slow(300), Good, Some(v4)),
            (Code(EMPTY), Code(EMPTY), None),
            (Code(NXDOMAIN), Code(NXDOMAIN), None),
            (Code(SERVFAIL), Code(SERVFAIL), None),
            (Code(REFUSED), Code(REFUSED), None),
            (Dropped, Dropped, None),
        ];
        let go = go_program("dial_go", env!("CARGO_TARGET_TMPDIR"));
        for (a, aaaa, port) in modes {
            let mode = format!("A {a:?}, AAAA {aaaa:?}, port {port:?}");
            name_server.set(a, aaaa);
            let to = port.unwrap_or(v4);
            let theirs = Command::new(&go)
                .arg(format!("{HOST}:{to}"))
                .output()
                .unwrap();
            name_server.set(a, aaaa);
            let deadline = Instant::now() + Duration::from_secs(60);
            let ours = dial(HOST, to, deadline, Duration::from_secs(8));
            let ours = ours.map_err(|error| error.to_string());
            assert_eq!(
                theirs.status.success(),
                port.is_some(),
                "{mode}: {theirs:?}"
            );
            assert_eq!(ours.is_ok(), port.is_some(), "{mode}: {ours:?}");
            if let Err(error) = ours {
                let asked = "asked name server 127.0.0.1, waited ";
                assert!(
                    error.contains(HOST) && error.contains(asked),
                    "{mode}: {error}"
                );
            }
        }
    });
}

/// Starts an API server without nodes at [`HOST`]; returns a kubeconfig.
fn api_server() -> String {
    let answer = |request: &str| {
        let body = if request.contains("/version") {
            r#"{"gitVersion":"v1.36.3"}"#
        } else {
            r#"{"kind":"List","metadata":{"resourceVersion":"1"},"items":[]}"#
        };
        (200, body)
    };
    SimpleServer {
        host: HOST,
        answer,
        server_end: 4000,
        client_end: 4000,
    }
    .start()
}

#[test]
fn a_command_asks_for_a_name_once() {
    in_network(
        "a_command_asks_for_a_name_once",
        "nameserver 127.0.0.1\n",
        || {
            let name_server = NameServer::start();
            name_server.set(Good, Code(NXDOMAIN));
            fs::write("admin.conf", api_server()).unwrap();
            fs::write("policy.json", POLICY).unwrap();
            let output = Command::new(support::program::built("firstlight"))
                .args(["status", "--kubeconfig=admin.conf", "--policy=policy.json"])
                .output()
                .unwrap();
            let said = format!("{output:?}");
            assert!(said.contains("The authority of the cluster ends"), "{said}");
            for kind in [A, AAAA] {
                assert_eq!(name_server.asked(HOST, kind), 1, "{said}");
            }
        },
    );
}

#[test]
fn a_silent_name_server_takes_no_longer_than_the_timeout() {
    // the C library would wait a minute
    let file = "nameserver 127.0.0.1\noptions timeout:60 attempts:1\n";
    in_network(
        "a_silent_name_server_takes_no_longer_than_the_timeout",
        file,
        || {
            let name_server = NameServer::start();
            name_server.set(Dropped, Dropped);
            fs::write("admin.conf", api_server()).unwrap();
            fs::write("policy.json", POLICY).unwrap();
            for words in [
                &["status", "--kubeconfig=admin.conf"][..],
                &["status", "node.example.test"],
            ] {
                let output = Command::new(support::program::built("firstlight"))
                    .args(words)
                    .args(["--policy=policy.json", "--timeout=2"])
                    .output()
                    .unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                let waited = said.split("asked name server 127.0.0.1, waited ").nth(1);
                let waited = waited.and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
                assert!(waited.is_some_and(|waited| waited < 60), "{said}");
                assert!(!said.contains("may have executed"), "{said}");
            }
        },
    );
}

/// Starts an HTTP proxy on this machine that passes TLS on (RFC 9110 §9.3.6). It resolves each name to 127.0.0.1. Returns its port, and
/// the requests so far.
fn proxy() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(vec![]));
    let requests = seen.clone();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let mut lines = BufReader::new(client.try_clone().unwrap())
                .lines()
                .map_while(Result::ok);
            let request = lines.next().unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let to = request
                .split([' ', ':'])
                .nth(2)
                .unwrap_or_default()
                .parse()
                .unwrap();
            requests.lock().unwrap().push(request);
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
            (&client).write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            for (mut from, mut to) in [(&client, &server), (&server, &client)]
                .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
            {
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    (port, seen)
}

#[test]
fn a_proxy_of_the_environment_leads_to_the_api_server_as_for_kubectl() {
    let name = "a_proxy_of_the_environment_leads_to_the_api_server_as_for_kubectl";
    in_network(name, "nameserver 127.0.0.1\n", || {
        let name_server = NameServer::start();
        name_server.set(Code(NXDOMAIN), Code(NXDOMAIN));
        fs::write("admin.conf", api_server()).unwrap();
        fs::write("policy.json", POLICY).unwrap();
        let (port, seen) = proxy();
        let (at, closed) = (format!("127.0.0.1:{port}"), "http://u:secret@127.0.0.1:1");
        for (https_proxy, no_proxy, said) in [
            (&*at, "", "The authority of the cluster ends"),
            (
                &format!("http://{at}"),
                "other.test",
                "The authority of the cluster ends",
            ),
            (&at, ".example.test", "has no address: it does not exist"),
            (
                closed,
                "",
                "the environment names the proxy http://127.0.0.1:1;",
            ),
            (
                "socks5://127.0.0.1:1",
                "",
                "HTTPS_PROXY: socks5://127.0.0.1:1 is not a proxy that",
            ),
        ] {
            let output = Command::new(support::program::built("firstlight"))
                .args([
                    "status",
                    "--kubeconfig=admin.conf",
                    "--policy=policy.json",
                    "--timeout=3",
                ])
                .env("HTTPS_PROXY", https_proxy)
                .env("NO_PROXY", no_proxy)
                .output()
                .unwrap();
            let text = format!("{output:?}");
            assert!(
                text.contains(said) && !text.contains("secret"),
                "{https_proxy}: {text}"
            );
        }
        let seen = seen.lock().unwrap();
        assert!(
            seen.iter()
                .all(|request| request.starts_with(&format!("CONNECT {HOST}:")))
        );
        assert!(!seen.is_empty());
    });
}
