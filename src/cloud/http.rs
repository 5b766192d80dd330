//! Requests to a service of the cloud: to one of the host, which machines reach at an address of their own network (metadata services,
//! and those that sign for confidential machines), and to the cloud's API over HTTPS. The answers come from the host or the cloud, so
//! each is limited in time and size. No redirect is followed.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use base::time;
use ureq::config::ConfigBuilder;
use ureq::http::{HeaderMap, Request, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::AgentScope;
use ureq::{Agent, AsSendBody};

use super::Error;

/// The link-local address of the services of Azure, AWS and Google Compute Engine.
pub const LINK_LOCAL: &str = "http://169.254.169.254";
/// Maximum size in bytes of an answer that is not a list.
pub const MAX_BODY: u64 = 64 << 10;

/// Time limit of a request, from the first packet to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of the connection. A lost SYN is sent again after 1 and after 3 seconds (RFC 6298 §2.1).
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Time limit of a request to an API: a page of a thousand machines takes seconds.
const API_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest pause that a service can demand: a wrong value must not keep a node out for hours.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Maximum number of characters of an invalid answer in an error.
const SHOWN: usize = 120;

/// The header fields of a request: names and values.
pub type Fields<'a> = &'a [(&'a str, &'a str)];

/// A client of one service. Each call makes one request, without retries.
pub struct Http {
    agent: Agent,
    base: String,
    /// Until when the service wants no request, and why.
    pause: Mutex<Option<(Instant, String)>>,
}

/// An answer with any status.
pub struct Answer {
    /// The request: method and URL.
    pub request: String,
    pub status: u16,
    headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Answer {
    /// Returns the content of a successful answer. A page for people is the answer of a proxy.
    pub fn content(self) -> Result<Vec<u8>, Error> {
        if self.status != 200 {
            return Err(self.error());
        }
        let media_type = self.field("Content-Type").unwrap_or_default();
        match media_type.to_ascii_lowercase().starts_with("text/html") {
            false => Ok(self.body),
            true => Err(Error::Nonsense {
                got: format!(
                    "text/html (a proxy may be in the way): {:?}",
                    excerpt(&self.body)
                ),
                request: self.request,
                expected: "an answer of the API",
            }),
        }
    }

    /// Returns the value of a header field.
    pub fn field(&self, name: &str) -> Option<&str> {
        Some(self.headers.get(name)?.to_str().ok()?.trim())
    }

    /// Returns when the service sent the answer.
    pub fn date(&self) -> Option<SystemTime> {
        http_date(self.field("Date")?)
    }

    /// Returns the error of an answer without success.
    pub fn error(&self) -> Error {
        Error::Status {
            request: self.request.clone(),
            status: self.status,
            body: excerpt(&self.body),
        }
    }
}

impl Http {
    /// Makes a client of the service of the host at this base URL, e.g. [`LINK_LOCAL`].
    pub fn new(base_url: &str) -> Http {
        Http::within(base_url, TIMEOUT)
    }

    /// Makes a client with this time limit of a request.
    pub fn within(base_url: &str, limit: Duration) -> Http {
        Http::with(base_url, limit, |config| config.max_idle_connections(0))
    }

    /// Makes a client of the cloud's API at this base URL: `https://..`, or `http://` on an address of this machine. The image's
    /// certificates of authorities decide whether it is the API.
    pub fn api(base_url: &str) -> Result<Http, Error> {
        check_api(base_url).map_err(|problem| Error::Url {
            url: base_url.to_owned(),
            problem: format!("{problem}; expected https://HOST[:PORT][/PATH]"),
        })?;
        Ok(Http::with(base_url, API_TIMEOUT, |config| {
            config.tls_config(
                TlsConfig::builder()
                    .root_certs(roots())
                    .unversioned_rustls_crypto_provider(tls::provider())
                    .build(),
            )
        }))
    }

    fn with(
        base_url: &str,
        limit: Duration,
        more: impl FnOnce(ConfigBuilder<AgentScope>) -> ConfigBuilder<AgentScope>,
    ) -> Http {
        let config = Agent::config_builder()
            .timeout_global(Some(limit))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            // no proxy: proxy settings in the environment must not redirect the request
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")));
        Http {
            agent: more(config).build().into(),
            base: base_url.trim_end_matches('/').to_owned(),
            pause: Mutex::default(),
        }
    }

    /// Returns the URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.base)
    }

    /// Returns path and query of a URL of this service; `None` if it is another one's. The usual port may be there or not.
    pub fn path_of<'a>(&self, url: &'a str) -> Option<&'a str> {
        let (own, other): (Uri, Uri) = (self.base.parse().ok()?, url.parse().ok()?);
        let port = |uri: &Uri| {
            uri.port_u16()
                .or((uri.scheme_str()? == "https").then_some(443))
        };
        let is_same = own.scheme() == other.scheme()
            && own.host()?.eq_ignore_ascii_case(other.host()?)
            && port(&own) == port(&other)
            && !other.authority()?.as_str().contains('@');
        let (_, rest) = url.split_once("://")?;
        let (_, path) = rest.split_once('/').filter(|_| is_same)?;
        let below = own.path().trim_matches('/');
        match below {
            "" => Some(path),
            _ => path.strip_prefix(below)?.strip_prefix('/'),
        }
    }

    /// Returns `HOST[:PORT]`, as a request names it.
    pub fn host(&self) -> &str {
        let (_, rest) = self.base.split_once("://").unwrap_or_default();
        rest.split('/').next().unwrap_or_default()
    }

    /// Returns the answer to GET, at most `limit` bytes.
    pub fn get(&self, path: &str, fields: Fields<'_>, limit: u64) -> Result<Vec<u8>, Error> {
        self.successful("GET", path, fields, (), limit)
    }

    /// Returns the answer to PUT without a body.
    pub fn put(&self, path: &str, fields: Fields<'_>) -> Result<Vec<u8>, Error> {
        self.successful("PUT", path, fields, &b""[..], MAX_BODY)
    }

    /// Returns the answer to POST with JSON. The type is `application/json` without parameters: Azure refuses others.
    pub fn post_json(&self, path: &str, fields: Fields<'_>, json: &str) -> Result<Vec<u8>, Error> {
        let of_json = [fields, &[("Content-Type", "application/json")]].concat();
        self.successful("POST", path, &of_json, json.as_bytes(), MAX_BODY)
    }

    fn successful(
        &self,
        method: &str,
        path: &str,
        fields: Fields<'_>,
        body: impl AsSendBody,
        limit: u64,
    ) -> Result<Vec<u8>, Error> {
        let answer = self.send(method, path, fields, body, limit)?;
        match answer.status {
            200 => Ok(answer.body),
            _ => Err(answer.error()),
        }
    }

    /// Returns the answer to a request, at most `limit` bytes. An answer that demands a pause (429 or 503 with `Retry-After`) is an
    /// error, and so is each request before the end of the pause, which is then not sent.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        fields: Fields<'_>,
        body: impl AsSendBody,
        limit: u64,
    ) -> Result<Answer, Error> {
        let url = self.url(path);
        let request = format!("{method} {url}");
        self.check_pause(&request)?;
        let unreachable = |error: ureq::Error| Error::Unreachable {
            request: request.clone(),
            error: error.to_string(),
        };
        let with_field = |builder: ureq::http::request::Builder, (name, value): &(&str, &str)| {
            builder.header(*name, *value)
        };
        let prepared = fields
            .iter()
            .fold(Request::builder().method(method).uri(&url), with_field)
            .body(body)
            .map_err(|error| unreachable(error.into()))?;
        let mut response = self.agent.run(prepared).map_err(unreachable)?;
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let body = response.body_mut().with_config().limit(limit).read_to_vec();
        let answer = Answer {
            status,
            headers,
            body: match status {
                200 => body.map_err(unreachable)?,
                _ => body.unwrap_or_default(),
            },
            request: request.clone(),
        };
        if let (429 | 503, Some(pause)) = (status, answer.field("Retry-After")) {
            self.demand_pause(status, retry_pause(pause, SystemTime::now()));
            self.check_pause(&request)?;
        }
        Ok(answer)
    }

    fn demand_pause(&self, status: u16, pause: Option<Duration>) {
        let until = Instant::now() + pause.unwrap_or_default().min(LONGEST_PAUSE);
        let why = format!("the service answered with status {status} and demands a pause");
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner) = Some((until, why));
    }

    fn check_pause(&self, request: &str) -> Result<(), Error> {
        let pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
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

/// Says as a clause what is wrong with the base URL of an API.
pub fn check_api(url: &str) -> Result<(), String> {
    let uri: Uri = url.parse().map_err(|error| format!("{error}"))?;
    let host = uri.host().unwrap_or_default();
    if host.is_empty() {
        return Err("it has no host".into());
    }
    let authority = uri.authority().map(|authority| authority.as_str());
    if authority.is_some_and(|authority| authority.contains('@')) {
        return Err("it contains a user name".into());
    }
    if uri.query().is_some() || url.contains('#') {
        return Err("it has more than a path after its host".into());
    }
    let literal = host.trim_start_matches('[').trim_end_matches(']');
    let is_own = literal.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    match uri.scheme_str() {
        Some("https") => Ok(()),
        Some("http") if is_own => Ok(()),
        _ => Err("requests with credentials need https".into()),
    }
}

/// Returns the certificates of web servers' authorities of this image. Without any, each request says that the certificate of the
/// API is not trusted.
fn roots() -> RootCerts {
    let authorities = tls::web_authorities(None).unwrap_or_default();
    if authorities.is_empty() {
        log::warn!("this image has no certificates of web servers' authorities");
    }
    let of_ureq = authorities
        .iter()
        .map(|der| Certificate::from_der(der).to_owned());
    of_ureq.collect::<Vec<_>>().into()
}

/// Returns the time of a `Retry-After`: seconds, or a date (RFC 9110 §10.2.3).
fn retry_pause(value: &str, now: SystemTime) -> Option<Duration> {
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // more digits than the type holds are as long as the longest pause
        return Some(value.parse().map_or(LONGEST_PAUSE, Duration::from_secs));
    }
    Some(http_date(value)?.duration_since(now).unwrap_or_default())
}

/// Parses a date as servers must send it (RFC 9110 §5.6.7, IMF-fixdate): `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<SystemTime> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let parts: Vec<_> = text.split(' ').collect();
    let &[_, day, month, year, clock, "GMT"] = parts.as_slice() else {
        return None;
    };
    let month = 1 + MONTHS.iter().position(|name| *name == month)?;
    time::parse(&format!("{year}-{month:02}-{day}T{clock}Z"))
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
    use support::mutation::mutations;

    /// Sends one request to a server that answers it; returns what the server got.
    fn request(send: impl FnOnce(&Http) -> Result<Vec<u8>, Error>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::new(&format!("http://{}/", listener.local_addr().unwrap()));
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut got = vec![];
            let mut part = [0; 4096];
            // only JSON comes behind the fields
            let end = |got: &[u8]| match got.starts_with(b"POST") {
                true => got.ends_with(b"}"),
                false => got.ends_with(b"\r\n\r\n"),
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
    fn dates_and_pauses_are_read_as_servers_send_them() {
        // the example of RFC 9110
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(at));
        for (value, seconds) in [
            ("0", Some(0)),
            ("120", Some(120)),
            ("99999999999999999999999", Some(300)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:48:37 GMT", Some(0)),
            ("", None),
            ("-1", None),
            ("soon", None),
            ("Sun, 06 Nov 1994 08:50:37 CET", None),
        ] {
            let expected = seconds.map(Duration::from_secs);
            assert_eq!(retry_pause(value, at), expected, "{value}");
        }
        for value in mutations(b"Sun, 06 Nov 1994 08:49:37 GMT", 5000) {
            let _ = retry_pause(&String::from_utf8_lossy(&value), at);
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
            assert!(Http::api(good).is_ok(), "{good}");
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
        ] {
            assert!(Http::api(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_link_leads_to_the_same_service_or_nowhere() {
        for (base, link, path) in [
            ("https://a", "https://a/b?c=d", Some("b?c=d")),
            ("https://a", "https://A:443/b", Some("b")),
            ("https://a:443/x", "https://a/x/b", Some("b")),
            ("http://127.0.0.1:80", "http://127.0.0.1:80/b", Some("b")),
            ("https://a", "http://a/b", None),
            ("https://a", "https://b/b", None),
            ("https://a", "https://a.b/b", None),
            ("https://a", "https://a:444/b", None),
            ("https://a", "https://a@b/b", None),
            ("https://a", "https://u@a/b", None),
            ("https://a/x", "https://a/xy/b", None),
            ("https://a", "/b", None),
            ("https://a", "", None),
        ] {
            assert_eq!(Http::new(base).path_of(link), path, "{base} {link}");
        }
        let http = Http::new("https://a");
        for link in mutations(b"https://a:443/b?c=d", 5000) {
            let _ = http.path_of(&String::from_utf8_lossy(&link));
        }
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
            // a second request would find nobody
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
