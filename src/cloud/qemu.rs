//! The metadata service for QEMU: HTTP on a fixed address of the host in the network of the
//! machines.
//!
//! | path | body |
//! |---|---|
//! | `/self` | an object: `{"Name":"control-plane-0","ProviderID":"qemu:///..","Role":"ControlPlane","VPCIP":"10.42.1.100"}` |
//! | `/peers` | an array of such objects, or null |
//! | `/endpoint` | a string: the address of the first control plane |
//! | `/initsecrethash` | text: a bcrypt hash |
//! | `/timeservers` | text: time servers in the form of the setting `time-servers`; only of `firstlight metadata serve` |
//!
//! The keys are the field names of a Go structure, whose parser ignores case; this module accepts
//! the spellings that occur. Unused fields (`SecondaryIPRange`, `AliasIPRanges`) and unknown fields
//! are ignored.

use std::net::IpAddr;

use base::machines::{Error, Instance, Role, is_host};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::http::{Http, MAX_BODY, check_url, excerpt};

/// The URL of the service in a network that Constellation's Terraform code made.
pub const BASE_URL: &str = "http://10.42.0.1:8080";

/// Maximum size in bytes of the list of peers: 20 000 peers of 200 bytes each.
const MAX_PEERS_BODY: u64 = 4 << 20;

/// Makes a client of the service at this URL; `None` is [`BASE_URL`].
pub fn client(url: Option<&str>) -> Result<QemuMetadata, Error> {
    url.map_or(Ok(()), check_url)?;
    let http = Http::new(url.unwrap_or(BASE_URL));
    Ok(QemuMetadata { http })
}

/// A client of the service. Each call makes one request.
pub struct QemuMetadata {
    http: Http,
}

impl QemuMetadata {
    /// Returns the URL of a path and the answer to it.
    pub fn get(&self, path: &str, limit: u64) -> Result<(String, Vec<u8>), Error> {
        Ok((self.http.url(path), self.http.get(path, &[], limit)?))
    }

    /// Returns all machines with a valid description.
    pub fn peers(&self) -> Result<Vec<Instance>, Error> {
        let (url, body) = self.get("peers", MAX_PEERS_BODY)?;
        parse_peers(&url, &body)
    }

    /// Returns the host name or address under which all control planes are reached.
    pub fn endpoint(&self) -> Result<String, Error> {
        let (url, body) = self.get("endpoint", MAX_BODY)?;
        parse_endpoint(&url, &body)
    }
}

/// Parses the answer to `/self`; `url` is for the error.
pub fn parse_self(url: &str, body: &[u8]) -> Result<Instance, Error> {
    instance(json(url, "an instance", body)?).map_err(|got| nonsense(url, "an instance", got))
}

/// Parses the answer to `/peers`. An invalid instance is logged and omitted, so that it does not
/// hide the others.
pub fn parse_peers(url: &str, body: &[u8]) -> Result<Vec<Instance>, Error> {
    let peers: Option<Vec<WireInstance>> = json(url, "a list of instances", body)?;
    let sensible = |wire| {
        instance(wire)
            .inspect_err(|wrong| log::warn!("{url}: ignoring {wrong}"))
            .ok()
    };
    Ok(peers
        .unwrap_or_default()
        .into_iter()
        .filter_map(sensible)
        .collect())
}

/// Parses the answer to `/endpoint`.
pub fn parse_endpoint(url: &str, body: &[u8]) -> Result<String, Error> {
    const EXPECTED: &str = "a host's address or name";
    let host: String = json(url, EXPECTED, body)?;
    if is_host(&host) {
        Ok(host)
    } else {
        Err(nonsense(url, EXPECTED, excerpt(host.as_bytes())))
    }
}

#[derive(Deserialize)]
struct WireInstance {
    #[serde(rename = "Name", alias = "name")]
    name: String,
    #[serde(
        rename = "ProviderID",
        alias = "providerID",
        alias = "providerId",
        alias = "providerid",
        default
    )]
    provider_id: String,
    #[serde(rename = "Role", alias = "role", default)]
    role: String,
    #[serde(
        rename = "VPCIP",
        alias = "vpcIP",
        alias = "vpcIp",
        alias = "vpcip",
        default
    )]
    vpc_ip: String,
}

/// Converts an instance. The error says what is wrong.
fn instance(wire: WireInstance) -> Result<Instance, String> {
    if wire.name.is_empty() {
        return Err("an instance without a name".into());
    }
    let vpc_ip = match wire.vpc_ip.as_str() {
        "" => None,
        ip => Some(ip.parse::<IpAddr>().map_err(|_| {
            format!(
                "{:?} with VPCIP {:?}, which is not an address",
                excerpt(wire.name.as_bytes()),
                excerpt(ip.as_bytes())
            )
        })?),
    };
    Ok(Instance {
        role: Role::parse(&wire.role),
        name: wire.name,
        provider_id: wire.provider_id,
        vpc_ip,
    })
}

fn json<T: DeserializeOwned>(url: &str, expected: &'static str, body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| {
        // the address may contain the whole text
        let error = excerpt(error.to_string().as_bytes());
        nonsense(url, expected, format!("{:?} ({error})", excerpt(body)))
    })
}

fn nonsense(url: &str, expected: &'static str, got: String) -> Error {
    Error::Nonsense {
        request: format!("GET {url}"),
        expected,
        got,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::super::plain::Plain;
    use super::*;
    use support::mutation::mutations;

    const SELF: &str = r#"{"Name":"control-plane-0","ProviderID":"qemu:///hostname/control-plane-0","Role":"ControlPlane","VPCIP":"10.42.1.100","SecondaryIPRange":"","AliasIPRanges":null}"#;

    /// Starts a server that answers one request with these bytes.
    fn answering(answer: Vec<u8>) -> QemuMetadata {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::new(&format!("http://{}", listener.local_addr().unwrap()));
        let client = QemuMetadata { http };
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(&answer);
        });
        client
    }

    impl QemuMetadata {
        fn own(&self) -> Result<Instance, Error> {
            let (url, body) = self.get("self", MAX_BODY)?;
            parse_self(&url, &body)
        }
    }

    fn ok(body: &str) -> QemuMetadata {
        answering(
            format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes(),
        )
    }

    #[test]
    fn an_instance_of_the_old_service_is_read() {
        let expected = Instance {
            name: "control-plane-0".into(),
            provider_id: "qemu:///hostname/control-plane-0".into(),
            role: Role::ControlPlane,
            vpc_ip: Some("10.42.1.100".parse().unwrap()),
        };
        assert_eq!(ok(SELF).own().unwrap(), expected);
        assert_eq!(
            ok(&format!("[{SELF},{SELF}]\n")).peers().unwrap(),
            [expected.clone(), expected]
        );
    }

    #[test]
    fn a_null_list_and_missing_fields_are_tolerated() {
        assert_eq!(ok("null").peers().unwrap(), []);
        let bare = ok(r#"{"name":"w"}"#).own().unwrap();
        assert_eq!(
            bare,
            Instance {
                name: "w".into(),
                provider_id: String::new(),
                role: Role::Unknown,
                vpc_ip: None
            }
        );
    }

    #[test]
    fn a_senseless_peer_does_not_hide_the_others() {
        let peers = ok(&format!(
            r#"[{{"Name":""}},{SELF},{{"Name":"x","VPCIP":"here"}}]"#
        ))
        .peers()
        .unwrap();
        assert_eq!(peers.len(), 1);
        assert_eq!(peers[0].name, "control-plane-0");
    }

    #[test]
    fn the_endpoint_is_read() {
        assert_eq!(ok("\"10.42.1.100\"\n").endpoint().unwrap(), "10.42.1.100");
    }

    #[test]
    fn an_error_page_is_no_answer() {
        let client =
            answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found".to_vec());
        let error = client.endpoint().unwrap_err();
        assert!(
            matches!(&error, Error::Status { status: 404, body, .. } if body == "not found"),
            "{error}"
        );
    }

    #[test]
    fn a_redirect_is_not_followed() {
        let client = answering(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
                .to_vec(),
        );
        assert!(matches!(
            client.own(),
            Err(Error::Status { status: 302, .. })
        ));
    }

    #[test]
    fn nonsense_is_named_in_the_error() {
        let error = ok("<html>").own().unwrap_err().to_string();
        assert!(
            error.contains("/self") && error.contains("an instance") && error.contains("<html>"),
            "{error}"
        );
        // only the beginning of a long answer appears
        let error = ok(&format!("\"{}\"", "a".repeat(4000)))
            .own()
            .unwrap_err()
            .to_string();
        assert!(error.len() < 1000, "{error}");
        for body in [
            "{}",
            r#"{"Name":""}"#,
            r#"{"Name":"x","VPCIP":"10.42"}"#,
            r#"{"Name":7}"#,
            "[]",
            "",
        ] {
            assert!(
                matches!(ok(body).own(), Err(Error::Nonsense { .. })),
                "{body}"
            );
        }
        for body in ["\"\"", "7", "\"a b\"", "\"http://x/\"", "\"a..b\""] {
            assert!(
                matches!(ok(body).endpoint(), Err(Error::Nonsense { .. })),
                "{body}"
            );
        }
    }

    #[test]
    fn a_body_without_end_is_cut_off() {
        let body = " ".repeat(MAX_BODY as usize + 1);
        assert!(matches!(ok(&body).own(), Err(Error::Unreachable { .. })));
    }

    #[test]
    fn nobody_there_is_an_error_at_once_that_names_the_address() {
        let http = Http::new("http://127.0.0.1:1/");
        let error = QemuMetadata { http }.own().unwrap_err().to_string();
        assert!(error.contains("http://127.0.0.1:1/self"), "{error}");
        assert!(!error.contains("in time"), "{error}");
    }

    #[test]
    fn a_service_that_sends_a_byte_at_a_time_runs_into_the_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let http = Http::by(&url, Plain(Duration::from_millis(300)));
        let client = QemuMetadata { http };
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n".to_vec();
            answer.resize(1000, b' ');
            for byte in answer {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        let started = Instant::now();
        assert!(matches!(client.own(), Err(Error::Unreachable { .. })));
        // all of it would take 50 seconds
        support::promptly::assert_no_wait(started, Duration::from_secs(1));
    }

    #[test]
    fn mutated_answers_give_an_instance_or_an_error() {
        let list = format!("[{SELF},{SELF}]");
        let (mut good, mut bad) = (0, 0);
        for body in mutations(list.as_bytes(), 20_000) {
            match json::<Option<Vec<WireInstance>>>("url", "a list", &body) {
                Ok(list) => {
                    list.unwrap_or_default()
                        .into_iter()
                        .for_each(|wire| match instance(wire) {
                            Ok(instance) => {
                                good += 1;
                                assert!(!instance.name.is_empty());
                            }
                            Err(_) => bad += 1,
                        })
                }
                Err(_) => bad += 1,
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        // the maximum depth of a body
        let deep = "[".repeat(MAX_BODY as usize);
        assert!(json::<Option<Vec<WireInstance>>>("url", "a list", deep.as_bytes()).is_err());
    }

    #[test]
    fn a_url_that_nobody_could_be_asked_at_is_refused_at_once() {
        for url in [
            "http://10.42.0.1:8080",
            "http://10.42.0.1",
            "http://[fd00::1]:80/",
            "http://metadata.internal/v1",
        ] {
            assert!(client(Some(url)).is_ok(), "{url}");
        }
        for (url, problem) in [
            ("", "does not begin"),
            ("10.42.0.1", "does not begin"),
            ("/self", "does not begin"),
            ("10.42.0.1:8080", "does not begin"),
            ("https://10.42.0.1", "does not begin"),
            ("ftp://10.42.0.1", "does not begin"),
            ("http://", "no host"),
            ("http://:8080", "no host"),
            ("http://10.42.0.1:", "port"),
            ("http://10.42.0.1:0", "port"),
            ("http://10.42.0.1:99999", "port"),
            ("http://10.42.0.1:x", "port"),
            ("http://me:secret@10.42.0.1", "user name"),
            ("http://10.42.0.1/?a=b", "more than a path"),
            ("http://10.42.0.1/#a", "more than a path"),
            ("http://10.42 0.1", "invalid"),
        ] {
            let error = client(Some(url))
                .err()
                .unwrap_or_else(|| panic!("{url:?}"))
                .to_string();
            assert!(
                error.contains(problem) && error.contains("expected http://HOST[:PORT]"),
                "{url}: {error}"
            );
        }
    }
}
