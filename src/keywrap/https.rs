//! Requests over HTTPS (RFC 9110): no redirect, no proxy, an answer of limited size, a time limit.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use ureq::Agent;
use ureq::http::{Request, Uri};
use zeroize::Zeroizing;

use super::error::Error;

/// Time limit of a request, from the first packet to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit of the connection. A lost SYN is sent again after 1 and after 3 seconds (RFC 6298 §2.1).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of an answer.
const MAX_BODY: u64 = 64 << 10;
/// The variable that names a file of authorities for all TLS clients, as OpenSSL has it.
const CERT_FILE: &str = "SSL_CERT_FILE";

/// A server.
pub struct Server {
    agent: Agent,
    /// `https://HOST[:PORT]`.
    base: String,
    /// `HOST[:PORT]`, for texts and requests.
    host: String,
}

/// The header fields of a request: names and values.
pub type Fields<'a> = &'a [(&'a str, &'a str)];

/// An answer with any status.
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The content, which may contain a key.
    pub body: Zeroizing<Vec<u8>>,
}

impl Server {
    /// Makes a client of the server at `https://HOST[:PORT]`, whose certificate leads to an authority in the file `ca`, or in the file
    /// that SSL_CERT_FILE names, or in those of this machine's distribution. Sends no request.
    pub fn new(url: &str, ca: Option<&str>) -> Result<Server, Error> {
        let (base, host) = parse(url)?;
        let of_environment = std::env::var(CERT_FILE).ok();
        let ca = ca.or(of_environment.as_deref()).map(Path::new);
        let roots = web_tls::roots(ca).map_err(Error::Credentials)?;
        let config = Agent::config_builder()
            .tls_config(web_tls::config(roots).build())
            .https_only(true)
            // no proxy: proxy settings in the environment must not redirect the request
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_global(Some(TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")));
        Ok(Server {
            agent: config.build().into(),
            base,
            host,
        })
    }

    /// Returns `HOST[:PORT]`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns whether the server's name is that of a host in this domain.
    pub fn is_below(&self, domain: &str) -> bool {
        let name = self.name().to_ascii_lowercase();
        let host = name.strip_suffix(domain);
        host.and_then(|host| host.strip_suffix('.'))
            .is_some_and(|host| !host.is_empty())
    }

    /// Returns whether the server is on this machine, by its address.
    pub fn is_loopback(&self) -> bool {
        let literal = self.name().trim_start_matches('[').trim_end_matches(']');
        literal.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }

    /// Returns whether a URL is of this server: host and port.
    pub fn is_at(&self, url: &str) -> Result<bool, Error> {
        let whole = |host: &str| {
            let host = host.to_ascii_lowercase();
            match name_of(&host).len() == host.len() {
                true => host + ":443",
                false => host,
            }
        };
        parse(url).map(|(_, host)| whole(&host) == whole(&self.host))
    }

    /// Returns the host without its port.
    pub fn name(&self) -> &str {
        name_of(&self.host)
    }

    /// Sends one request; `path` begins with a slash. A redirect is not followed.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        fields: Fields<'_>,
        body: &[u8],
    ) -> Result<Answer, Error> {
        let away = |error: ureq::Error| Error::Away(format!("{}: {error}", self.host));
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base));
        let with_field = |request: ureq::http::request::Builder, (name, value): &(&str, &str)| {
            request.header(*name, *value)
        };
        let request = fields.iter().fold(request, with_field);
        let malformed = |error: ureq::http::Error| away(error.into());
        let mut response = match body {
            [] => self.agent.run(request.body(()).map_err(malformed)?),
            body => self.agent.run(request.body(body).map_err(malformed)?),
        }
        .map_err(away)?;
        let status = response.status().as_u16();
        if (300..400).contains(&status) {
            return Err(Error::Answer(format!(
                "{}: it redirects {path} (status {status}), which is not followed",
                self.host
            )));
        }
        let body = response.body_mut().with_config().limit(MAX_BODY);
        Ok(Answer {
            status,
            body: Zeroizing::new(body.read_to_vec().map_err(away)?),
        })
    }
}

/// Parses `https://HOST[:PORT]`, and returns it without a slash at the end, and `HOST[:PORT]`.
fn parse(url: &str) -> Result<(String, String), Error> {
    let fault = |why: &str| {
        Error::Uri(format!(
            "the address {url:?} {why}: expected https://HOST[:PORT]"
        ))
    };
    let base = url.trim_end_matches('/').to_owned();
    let uri: Uri = base.parse().map_err(|_| fault("is malformed"))?;
    if uri.scheme_str() != Some("https") {
        return Err(fault("does not begin with https://"));
    }
    let host = uri.authority().map(|authority| authority.as_str());
    let host = host.ok_or_else(|| fault("has no host"))?.to_owned();
    if host.contains('@') || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(fault("has more than a host and a port"));
    }
    Ok((base, host))
}

/// Returns the host of `HOST[:PORT]`.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hosts_behind_https_are_servers() {
        for good in ["https://a", "https://a:8200/", "https://[::1]:8200"] {
            assert!(Server::new(good, None).is_ok(), "{good}");
        }
        for bad in [
            "",
            "a",
            "http://a",
            "https://",
            "https://u:p@a",
            "https://a/b",
            "https://a?b",
        ] {
            assert!(Server::new(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_server_is_its_host_and_port() {
        let same = |a: &str, b: &str| Server::new(a, None).unwrap().is_at(b).unwrap();
        assert!(same("https://Vault.example", "https://vault.example:443/"));
        assert!(same("https://[::1]:8200", "https://[::1]:8200/"));
        for other in [
            "https://vault.example:8200",
            "https://vault.example.evil",
            "https://evil",
        ] {
            assert!(!same("https://vault.example", other), "{other}");
        }
    }

    #[test]
    fn a_file_of_authorities_that_has_none_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Server::new("https://a", file.path().to_str())
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("contains no certificate"),
            "{error}"
        );
    }
}
