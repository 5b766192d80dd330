//! A small HTTP [`server`], and the HTTPS client of all programs: one [`Client`], whose [`ClientPolicy`] says what it accepts. Only this crate uses the HTTP library.
//!
//! Every client verifies the server by its [`Roots`], limits the time of a request and the size of an answer, and says in its errors what
//! failed, but never what a header field contained. By default it uses no proxy, and follows no redirect, which would send
//! credentials to another server. `unlock` does not link this crate: it asks the host's services by plain HTTP (`cloud::plain`).
//!
//! | client | what differs from [`ClientPolicy::new`] |
//! |---|---|
//! | a cloud's API ([`api`]) | HTTP without TLS to an address of this machine |
//! | vendors' collateral (`collateral::https`) | pauses and limits of requests for each server |
//! | key management services (`keywrap::https`) | 20 s a request, an answer of 64 KiB |
//! | the API of Kubernetes (`kubernetes::client`) | a client certificate; a connection for each thread; in a person's command, the proxy |
//! | downloads of components (`kubernetes::components`) | proxies, redirects, and HTTP if a hash is known; a server may be silent for 20 s |
//! | what Kubernetes publishes (`firstlight components`) | proxies, redirects |

#![forbid(unsafe_code)]

mod address;
mod connector;
mod error;
pub mod proxy;
mod roots;
pub mod server;

pub use address::{UrlError, check, encoded, form, host, is_loopback, name, path_below, shown};
pub use error::{Error, ErrorKind};
pub use roots::{CA_BUNDLES, CertificateError, ClientCertificate, Roots};

use std::io::Read;
use std::time::{Duration, SystemTime};

use base::network::request::{NoAnswer, Request, RequestTransport, Response, USER_AGENT};
use ureq::http::HeaderValue;
use ureq::tls::TlsConfig;
use ureq::{Agent, Body};
use zeroize::Zeroizing;

/// The content of an answer, which the caller reads in pieces.
pub type BodyReader = ureq::BodyReader<'static>;

/// Time limit of a request to a cloud's API: a page of a thousand machines takes seconds.
const TIME_OF_API: Duration = Duration::from_secs(30);
/// The capacity of a buffer for content that may be secret.
const SECRET: usize = 32 << 10;

/// The rules of a client: what it accepts.
pub struct ClientPolicy {
    /// The authorities of the server's certificate.
    pub roots: Roots,
    /// The client's own certificate.
    pub identity: Option<ClientCertificate>,
    /// Whether HTTP without TLS is refused, also where a redirect leads to it.
    pub only_tls: bool,
    /// How many redirects are followed. Without any, the redirect is the answer.
    pub redirects: u32,
    /// Which proxy is used.
    pub proxy: Proxy,
    /// How long the server may be silent.
    pub silence: Option<Duration>,
    /// The number of connections that stay open.
    pub connections: usize,
}

impl ClientPolicy {
    /// Only HTTPS, no redirect, no proxy.
    pub fn new(roots: Roots) -> ClientPolicy {
        ClientPolicy {
            roots,
            identity: None,
            only_tls: true,
            redirects: 0,
            proxy: Proxy::None,
            silence: None,
            connections: 3,
        }
    }
}

/// Which proxy a client uses.
pub enum Proxy {
    /// None.
    None,
    /// The one that the environment names for the server of a request, as curl understands it.
    OfEnvironment,
    /// The one at this URL, such as that of [`proxy::of_environment`].
    At(String),
}

/// A client. Clones share its connections.
#[derive(Clone)]
pub struct Client {
    agent: Agent,
    time: Duration,
}

/// Makes a client of a cloud's API at this base URL: `https://..`, or `http://` on an address of this machine. The server must have
/// a certificate of an authority that the image trusts. The error is a clause.
pub fn api(base_url: &str) -> Result<Client, UrlError> {
    check_api(base_url)?;
    // without authorities each request fails, with the error that the server's certificate is not trusted
    let roots = Roots::load(None).unwrap_or_default();
    if roots.is_empty() {
        log::warn!("this image has no CA certificates, so HTTPS requests will fail");
    }
    let policy = ClientPolicy {
        only_tls: false,
        ..ClientPolicy::new(roots)
    };
    Ok(Client::new(policy, TIME_OF_API))
}

/// Checks the base URL of a cloud's API.
pub fn check_api(url: &str) -> Result<(), UrlError> {
    match check(url) {
        Err(_) if is_loopback(url) && url.starts_with("http://") => {
            check(&url.replacen("http:", "https:", 1))
        }
        Err(_) if url.starts_with("http://") => Err(UrlError::Plain),
        other => other,
    }
}

impl Client {
    /// Makes a client. `time` is the default time limit of a request, from the first packet to the last byte of the answer.
    pub fn new(policy: ClientPolicy, time: Duration) -> Client {
        let tls = TlsConfig::builder()
            .root_certs(policy.roots.into())
            .client_cert(policy.identity.map(Into::into))
            .unversioned_rustls_crypto_provider(tls::provider());
        let mut config = Agent::config_builder()
            .tls_config(tls.build())
            .https_only(policy.only_tls)
            .max_redirects(policy.redirects)
            .max_redirects_will_error(policy.redirects > 0)
            .http_status_as_error(false)
            .timeout_per_read(policy.silence)
            .timeout_per_write(policy.silence)
            .max_idle_connections(policy.connections.max(10))
            .max_idle_connections_per_host(policy.connections)
            .user_agent(USER_AGENT);
        config = match policy.proxy {
            Proxy::None => config.proxy(None),
            Proxy::OfEnvironment => config,
            // the caller has checked the URL; without a proxy the server cannot be reached, or it can
            Proxy::At(url) => config.proxy(ureq::Proxy::new(&url).ok()),
        };
        Client {
            agent: connector::agent(config.build()),
            time,
        }
    }

    /// Sends one request, whose answer must be complete within this time. Returns the answer before its content is read.
    pub fn open(&self, request: &Request<'_>, within: Duration) -> Result<StreamedResponse, Error> {
        self.open_by(request, within, false)
    }

    /// Sends one request as [`Client::open`] does; `only_tls` refuses redirects to HTTP without TLS for this request.
    pub fn open_by(
        &self,
        request: &Request<'_>,
        within: Duration,
        only_tls: bool,
    ) -> Result<StreamedResponse, Error> {
        let mut head = ureq::http::Request::builder()
            .method(request.method)
            .uri(request.url);
        for (name, value) in request.fields {
            let mut value = HeaderValue::from_str(value).map_err(|_| Error::of_field(name))?;
            // the value may be a credential, so no message shows it
            value.set_sensitive(true);
            head = head.header(*name, value);
        }
        let invalid = |error: ureq::http::Error| Error::from(ureq::Error::from(error));
        let (agent, limit) = (&self.agent, request.limit);
        let within = Some(within.max(Duration::from_millis(1)));
        macro_rules! run {
            ($body:expr) => {{
                let request = agent.configure_request(head.body($body).map_err(invalid)?);
                let request = request.timeout_global(within);
                agent.run(match only_tls {
                    true => request.https_only(true).build(),
                    false => request.build(),
                })
            }};
        }
        let response = match request.body {
            Some(body) => run!(body),
            None => run!(()),
        }?;
        let (head, body) = response.into_parts();
        Ok(StreamedResponse { head, body, limit })
    }

    /// Ends all requests.
    pub fn shutdown(&self) {
        self.agent.clone().shutdown();
    }
}

impl RequestTransport for Client {
    fn send(&self, request: &Request<'_>) -> Result<Response, NoAnswer> {
        let failed = |error: Error| NoAnswer::Connection(error.to_string());
        let answer = self.open(request, self.time).map_err(failed)?;
        Ok(Response {
            status: answer.status(),
            fields: answer.fields(),
            pause: answer.pause(),
            body: answer.read().map(|body| body.to_vec()).map_err(failed),
        })
    }
}

/// An answer with any status, whose content is not yet read.
pub struct StreamedResponse {
    head: ureq::http::response::Parts,
    body: Body,
    limit: u64,
}

impl StreamedResponse {
    /// Returns the status.
    pub fn status(&self) -> u16 {
        self.head.status.as_u16()
    }

    /// Returns the value of a header field, if it is text.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }

    /// Returns the header fields that are text.
    pub fn fields(&self) -> Vec<(String, String)> {
        let fields = self.head.headers.iter();
        let text = fields.filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
        text.map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// Returns the pause that the server demands (`Retry-After`).
    pub fn pause(&self) -> Option<Duration> {
        retry_after(self.field("Retry-After")?, SystemTime::now())
    }

    /// Checks that the content has one of these media types, or none. Their parameters do not matter.
    pub fn check_type(&self, types: &[&str]) -> Result<(), Error> {
        match self.head.headers.get("Content-Type") {
            Some(media) if !is_one_of(media.as_bytes(), types) => {
                Err(Error::of_type(media.as_bytes(), types))
            }
            _ => Ok(()),
        }
    }

    /// Returns the length of the content, if the server says it.
    pub fn length(&self) -> Option<u64> {
        self.body.content_length()
    }

    /// Returns a reader of the content. The caller limits how much it reads.
    pub fn into_reader(self) -> BodyReader {
        self.body.into_reader()
    }

    /// Returns the beginning of the content, at most this many bytes, without errors.
    pub fn beginning(self, limit: u64) -> Vec<u8> {
        let mut content = vec![];
        let _ = self.into_reader().take(limit).read_to_end(&mut content);
        content
    }

    /// Returns the whole content, which may have as many bytes as the request allows.
    pub fn read(self) -> Result<Zeroizing<Vec<u8>>, Error> {
        let limit = self.limit;
        // the content may be secret: a buffer that grows would leave copies of it in freed memory
        let mut content = Zeroizing::new(Vec::with_capacity(
            SECRET.min((limit as usize).saturating_add(1)),
        ));
        let mut reader = self.into_reader().take(limit.saturating_add(1));
        reader.read_to_end(&mut content)?;
        if content.len() as u64 <= limit {
            Ok(content)
        } else {
            Err(Error::too_long(limit))
        }
    }
}

/// Returns whether a `Content-Type` is one of these media types.
fn is_one_of(media: &[u8], types: &[&str]) -> bool {
    let media = media.split(|byte| *byte == b';').next().unwrap_or_default();
    let media = media.trim_ascii();
    types
        .iter()
        .any(|expected| media.eq_ignore_ascii_case(expected.as_bytes()))
}

/// Returns the time of a `Retry-After`: seconds, or a date (RFC 9110 §10.2.3).
pub fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    base::network::request::seconds(value)
        .or_else(|| Some(date(value)?.duration_since(now).unwrap_or_default()))
}

/// Parses a date such as that of the field `Date` (RFC 9110 §5.6.7).
pub fn date(value: &str) -> Option<SystemTime> {
    httpdate::parse_http_date(value.trim()).ok()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use support::mutation::mutations;

    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        for (value, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("99999999999999999999999", Some(u32::MAX.into())),
            // one minute after, and one before: the example of RFC 9110
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:48:37 GMT", Some(0)),
            ("", None),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
            ("Sun, 06 Nov 1994 08:50:37 CET", None),
        ] {
            let expected = seconds.map(Duration::from_secs);
            assert_eq!(retry_after(value, now), expected, "{value}");
        }
        for seed in [&b"Sun, 06 Nov 1994 08:49:37 GMT"[..], b"120"] {
            for value in mutations(seed, 5000) {
                let _ = retry_after(&String::from_utf8_lossy(&value), now);
            }
        }
    }

    #[test]
    fn media_types_are_compared_without_parameters() {
        let json = ["application/json"];
        assert!(is_one_of(b"Application/JSON; charset=utf-8", &json));
        for other in [
            &b""[..],
            b"application/jsonx",
            b"text/html",
            b"; application/json",
        ] {
            assert!(!is_one_of(other, &json));
        }
    }

    #[test]
    fn credentials_go_only_over_https_or_to_this_machine() {
        for good in [
            "https://ec2.eu-central-1.amazonaws.com",
            "https://[2001:db8::1]:8443/path",
            "http://127.0.0.1:5000",
            "http://[::1]:5000",
        ] {
            assert!(api(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "ec2.amazonaws.com",
            "http://ec2.amazonaws.com",
            "http://10.0.0.1",
            "http://127.0.0.1.example",
            "http://localhost",
            "https://",
            "https://me@host",
            "https://host/?a",
            "ftp://127.0.0.1",
            "http://me@127.0.0.1",
        ] {
            assert!(api(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_field_cannot_begin_another_one_and_is_not_shown() {
        let client = Client::new(ClientPolicy::new(Roots::default()), TIME_OF_API);
        let request = Request {
            method: "GET",
            url: "https://127.0.0.1:1/",
            fields: &[("authorization", "secret\r\nHost: other")],
            body: None,
            limit: 1,
        };
        let error = client.open(&request, TIME_OF_API).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Invalid);
        let error = error.to_string();
        assert!(
            error.contains("authorization") && !error.contains("secret"),
            "{error}"
        );
        let plain = Request {
            url: "http://127.0.0.1:1/",
            fields: &[],
            ..request
        };
        let error = client.open(&plain, TIME_OF_API).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
    }
}
