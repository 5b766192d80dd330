//! Requests to a service of the cloud. The answers come from the host or the cloud, so each is
//! limited in time and size. No redirect is followed. Services of the host are called without TLS
//! ([`plain`](super::plain)): machines reach them at an address of their own network (metadata
//! services, and services that sign for confidential machines). The crate `cloud_api` asks the
//! cloud's API over HTTPS.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base::machines::Error;
pub use base::network::request::Fields;
use base::network::request::{NoAnswer, Request, RequestTransport};
use base::sync::lock;
use base::text::of_error;
use serde::de::DeserializeOwned;

use super::plain::{Plain, Url, find};

/// The link-local address of the host services of Azure, AWS and Google Compute Engine.
pub const LINK_LOCAL: &str = "http://169.254.169.254";
/// The addresses of the metadata service of AWS. Machines in an IPv6-only subnet reach only the
/// second.
pub const AWS: &str = "http://169.254.169.254 http://[fd00:ec2::254]";
/// The addresses of the metadata service of Google.
pub const GOOGLE: &str = "http://169.254.169.254 http://[fd20:ce::254]";
/// Maximum size in bytes of an answer that is not a list.
pub const MAX_BODY: u64 = 64 << 10;

/// Time limit of a request, from the first packet to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest pause that a service can demand: a wrong value must not keep a node out for hours.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Maximum number of characters of an invalid answer in an error.
const SHOWN: usize = 120;

/// A client of one service. Each call makes one request, without retries, but tries each address of
/// the service.
pub struct Http {
    transport: Box<dyn RequestTransport>,
    /// The base URLs of the service: its addresses.
    bases: Vec<String>,
    /// The index of the URL that is tried first: the one that gave the last answer.
    current: AtomicUsize,
    /// The time until which the service wants no request, and the reason.
    pause: Mutex<Option<(Instant, String)>>,
}

/// An answer with any status.
pub struct PlainResponse {
    /// The request: method and URL.
    pub request: String,
    /// The HTTP status.
    pub status: u16,
    fields: Vec<(String, String)>,
    pause: Option<Duration>,
    /// The body.
    pub body: Vec<u8>,
}

impl PlainResponse {
    /// Returns the content of a successful answer. An HTML page is the answer of a proxy, so it is
    /// an error.
    pub fn content(self) -> Result<Vec<u8>, Error> {
        let media_type = self.field("Content-Type").unwrap_or_default();
        let is_page = media_type.to_ascii_lowercase().starts_with("text/html");
        if self.status == 200 && is_page {
            Err(Error::Nonsense {
                got: format!(
                    "text/html (a proxy may be in the way): {:?}",
                    excerpt(&self.body)
                ),
                request: self.request,
                expected: "an answer of the API",
            })
        } else {
            self.successful()
        }
    }

    /// Returns the body of a successful answer, whatever it is.
    pub fn successful(self) -> Result<Vec<u8>, Error> {
        match self.status {
            200 => Ok(self.body),
            _ => Err(self.error()),
        }
    }

    /// Returns the value of a header field.
    pub fn field(&self, name: &str) -> Option<&str> {
        find(&self.fields, name).map(str::trim)
    }

    /// Returns the error for an answer with another status than success.
    pub fn error(&self) -> Error {
        Error::Status {
            request: self.request.clone(),
            status: self.status,
            body: excerpt(&self.body),
        }
    }
}

impl Http {
    /// Makes a client of the service of the host at this base URL, e.g. [`LINK_LOCAL`], or at
    /// several URLs separated by spaces, e.g. [`AWS`].
    pub fn new(base_url: &str) -> Http {
        Http::by(base_url, Plain(TIMEOUT))
    }

    /// Makes a client of the service at this base URL, which sends its requests through
    /// `transport`.
    pub fn by(base_url: &str, transport: impl RequestTransport + 'static) -> Http {
        Http {
            transport: Box::new(transport),
            bases: (base_url.split(' '))
                .map(|base| base.trim_end_matches('/').to_owned())
                .collect(),
            current: AtomicUsize::new(0),
            pause: Mutex::default(),
        }
    }

    /// Returns the base URL that is tried first.
    pub fn base(&self) -> &str {
        &self.bases[self.current.load(Ordering::Relaxed)]
    }

    /// Returns the URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.base())
    }

    /// Returns the answer to GET, at most `limit` bytes.
    pub fn get(&self, path: &str, fields: Fields<'_>, limit: u64) -> Result<Vec<u8>, Error> {
        self.send("GET", path, fields, None, limit)?.successful()
    }

    /// Returns the answer to GET, which is JSON; `expected` names its content in an error.
    pub fn get_json<T: DeserializeOwned>(
        &self,
        path: &str,
        fields: Fields<'_>,
        expected: &'static str,
    ) -> Result<T, Error> {
        let body = self.get(path, fields, MAX_BODY)?;
        serde_json::from_slice(&body).map_err(|error| Error::Nonsense {
            request: format!("GET {}", self.url(path)),
            expected,
            got: of_error(error),
        })
    }

    /// Returns the answer to PUT without a body.
    pub fn put(&self, path: &str, fields: Fields<'_>) -> Result<Vec<u8>, Error> {
        self.send("PUT", path, fields, Some(b""), MAX_BODY)?
            .successful()
    }

    /// Returns the answer to POST with JSON. The type is `application/json` without parameters:
    /// Azure refuses others.
    pub fn post_json(&self, path: &str, fields: Fields<'_>, json: &str) -> Result<Vec<u8>, Error> {
        let of_json = [fields, &[("Content-Type", "application/json")]].concat();
        self.send("POST", path, &of_json, Some(json.as_bytes()), MAX_BODY)?
            .successful()
    }

    /// Returns the answer of the first address that answers, at most `limit` bytes. An answer that
    /// demands a pause (429 or 503 with `Retry-After`) is an error. Until the pause ends, each
    /// further request fails without being sent.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        fields: Fields<'_>,
        body: Option<&[u8]>,
        limit: u64,
    ) -> Result<PlainResponse, Error> {
        self.check_pause(&format!("{method} {}", self.url(path)))?;
        let first = self.current.load(Ordering::Relaxed);
        // a path in place of the URL, which depends on the address
        let asked = Request {
            method,
            url: path,
            fields,
            body,
            limit,
        };
        let mut answer = self.send_once(&asked);
        for other in (0..self.bases.len()).filter(|other| *other != first) {
            let Err(Error::Unreachable { request, error }) = answer else {
                break;
            };
            self.current.store(other, Ordering::Relaxed);
            answer = match self.send_once(&asked) {
                Err(Error::Unreachable { error: more, .. }) => {
                    let error = format!("{error}; at {}: {more}", self.base());
                    self.current.store(first, Ordering::Relaxed);
                    Err(Error::Unreachable { request, error })
                }
                other => other,
            };
        }
        let answer = answer?;
        if let (429 | 503, Some(pause)) = (answer.status, answer.pause) {
            let why = format!(
                "the service answered with status {} and demands a pause",
                answer.status
            );
            let until = Instant::now() + pause.min(LONGEST_PAUSE);
            *lock(&self.pause) = Some((until, why));
            self.check_pause(&answer.request)?;
        }
        Ok(answer)
    }

    fn send_once(&self, asked: &Request<'_>) -> Result<PlainResponse, Error> {
        let url = self.url(asked.url);
        let request = format!("{} {url}", asked.method);
        let unreachable = |error: NoAnswer| Error::Unreachable {
            request: request.clone(),
            error: error.to_string(),
        };
        let sent = self.transport.send(&Request {
            url: &url,
            ..*asked
        });
        let response = sent.map_err(unreachable)?;
        let status = response.status;
        Ok(PlainResponse {
            status,
            fields: response.fields,
            pause: response.pause,
            body: match status {
                200 => response.body.map_err(unreachable)?,
                _ => response.body.unwrap_or_default(),
            },
            request: request.clone(),
        })
    }

    fn check_pause(&self, request: &str) -> Result<(), Error> {
        let pause = lock(&self.pause);
        match &*pause {
            Some((until, why)) if *until > Instant::now() => Err(Error::Unreachable {
                request: request.to_owned(),
                error: format!(
                    "{why}; it is asked again in {} s",
                    until.duration_since(Instant::now()).as_secs() + 1
                ),
            }),
            _ => Ok(()),
        }
    }
}

/// Checks the base URL of a service.
pub fn check_url(url: &str) -> Result<(), Error> {
    Url::check_base(url).map_err(|problem| Error::Url {
        url: url.to_owned(),
        problem: format!("{problem}; expected http://HOST[:PORT]"),
    })
}

/// Returns the beginning of an answer, for an error.
pub fn excerpt(body: &[u8]) -> String {
    let shown = String::from_utf8_lossy(&body[..body.len().min(SHOWN)]).into_owned();
    if body.len() > SHOWN {
        format!("{shown}..")
    } else {
        shown
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Sends one request to a test server that answers it; returns what the server received.
    fn request(send: impl FnOnce(&Http) -> Result<Vec<u8>, Error>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::new(&format!("http://{}/", listener.local_addr().unwrap()));
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut got = vec![];
            let mut part = [0; 4096];
            // only JSON follows the header fields
            let end = |got: &[u8]| {
                if got.starts_with(b"POST") {
                    got.ends_with(b"}")
                } else {
                    got.ends_with(b"\r\n\r\n")
                }
            };
            while !end(&got) {
                let len = stream.read(&mut part).unwrap();
                got.extend(&part[..len]);
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            stream.write_all(answer).unwrap();
            String::from_utf8(got).unwrap().to_ascii_lowercase()
        });
        assert_eq!(send(&http).unwrap(), b"ok");
        server.join().unwrap()
    }

    #[test]
    fn a_demanded_pause_is_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::new(&format!("http://{}/", listener.local_addr().unwrap()));
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let answer = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(answer).unwrap();
            // a second request would get no answer
        });
        for _ in 0..2 {
            let error = http.get("x", &[], MAX_BODY).unwrap_err().to_string();
            assert!(
                error.contains("503") && error.contains("it is asked again in"),
                "{error}"
            );
        }
        server.join().unwrap();
    }

    #[test]
    fn the_address_that_answers_is_asked_and_remembered() {
        let listener = TcpListener::bind("[::1]:0").unwrap();
        let answering = format!("http://{}", listener.local_addr().unwrap());
        let http = Http::new(&format!("http://127.0.0.1:1 {answering}"));
        let server = thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(answer).unwrap();
            }
        });
        for _ in 0..2 {
            // a response with any status is an answer
            let error = http.get("x", &[], MAX_BODY).unwrap_err();
            assert!(
                matches!(&error, Error::Status { status: 404, request, .. } if request.contains(&answering)),
                "{error}"
            );
            assert_eq!(http.base(), answering);
        }
        server.join().unwrap();
        let http = Http::new("http://127.0.0.1:1 http://[::1]:1");
        let error = http.get("x", &[], MAX_BODY).unwrap_err().to_string();
        assert!(
            error.contains("GET http://127.0.0.1:1/x: ") && error.contains("; at http://[::1]:1: "),
            "{error}"
        );
    }

    #[test]
    fn a_request_has_its_fields_and_json_its_bare_type() {
        let fields = [("Metadata", "true")];
        let got = request(|http| http.get("a/b?c=d", &fields, MAX_BODY));
        assert!(got.starts_with("get /a/b?c=d http/1.1\r\n") && got.contains("metadata: true\r\n"));
        let got = request(|http| http.put("token", &[("X-Ttl", "60")]));
        assert!(got.starts_with("put /token http/1.1\r\n") && got.contains("x-ttl: 60\r\n"));
        let got = request(|http| http.post_json("quote", &fields, r#"{"report":"AA"}"#));
        assert!(got.starts_with("post /quote http/1.1\r\n"), "{got}");
        assert!(got.contains("content-type: application/json\r\n"), "{got}");
        assert!(got.ends_with("\r\n\r\n{\"report\":\"aa\"}"), "{got}");
    }
}
