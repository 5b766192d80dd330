//! Requests over HTTPS (RFC 9110): no redirect, no proxy, an answer of limited size, a time limit.

use std::path::Path;
use std::time::Duration;

pub use base::network::request::Fields;
use base::network::request::Request;
use http::{Client, ClientPolicy, Roots};
use zeroize::Zeroizing;

use super::error::Error;

/// Time limit of a request, from the first packet to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum bytes of an answer.
const MAX_BODY: u64 = 64 << 10;
/// The variable that names a file with the trusted authorities for all TLS clients, as in OpenSSL.
const CERT_FILE: &str = "SSL_CERT_FILE";

/// A server.
pub struct KmsServer {
    client: Client,
    /// `https://HOST[:PORT]`.
    base: String,
}

/// An answer with any status.
pub struct KmsResponse {
    /// The status code.
    pub status: u16,
    /// The content, which may contain a key.
    pub body: Zeroizing<Vec<u8>>,
}

impl KmsServer {
    /// Makes a client of the server at `https://HOST[:PORT]`. The authorities that may certify it are in the file `ca`, else in the
    /// file that SSL_CERT_FILE names, else in those of this machine's distribution. Sends no request.
    pub fn new(url: &str, ca: Option<&str>) -> Result<KmsServer, Error> {
        let base = checked(url)?;
        let of_environment = std::env::var(CERT_FILE).ok();
        let ca = ca.or(of_environment.as_deref()).map(Path::new);
        let roots = Roots::load(ca)?;
        let client = Client::new(ClientPolicy::new(roots), TIMEOUT);
        Ok(KmsServer { client, base })
    }

    /// Returns `HOST[:PORT]`.
    pub fn host(&self) -> &str {
        http::host(&self.base)
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
        http::is_loopback(&self.base)
    }

    /// Returns whether a URL has the host and the port of this server.
    pub fn is_at(&self, url: &str) -> Result<bool, Error> {
        let url = checked(url)?;
        Ok(http::path_below(&self.base, &url).is_some())
    }

    /// Returns the host without its port.
    pub fn name(&self) -> &str {
        http::name(&self.base)
    }

    /// Sends one request; `path` begins with a slash. A redirect is not followed.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        fields: Fields<'_>,
        body: &[u8],
    ) -> Result<KmsResponse, Error> {
        let away = |error: http::Error| Error::Away(format!("{}: {error}", self.host()));
        let request = Request {
            method,
            url: &format!("{}{path}", self.base),
            fields,
            body: Some(body).filter(|body| !body.is_empty()),
            limit: MAX_BODY,
        };
        let answer = self.client.open(&request, TIMEOUT).map_err(away)?;
        let status = answer.status();
        if (300..400).contains(&status) {
            return Err(Error::Answer(format!(
                "{}: it redirects {path} (status {status}), but redirects are not followed",
                self.host()
            )));
        }
        let body = answer.read().map_err(away)?;
        Ok(KmsResponse { status, body })
    }
}

/// Checks that this is `https://HOST[:PORT]`, and returns it without a slash at the end.
fn checked(url: &str) -> Result<String, Error> {
    let base = url.trim_end_matches('/');
    let has_path = base.matches('/').count() > 2;
    let why = match http::check(base) {
        Ok(()) if !has_path => return Ok(base.to_owned()),
        Ok(()) => "it has more than a host and a port".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Error::Uri(format!(
        "the address {:?}: {why}: expected https://HOST[:PORT]",
        http::shown(url)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hosts_behind_https_are_servers() {
        for good in ["https://a", "https://a:8200/", "https://[::1]:8200"] {
            assert!(KmsServer::new(good, None).is_ok(), "{good}");
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
            assert!(KmsServer::new(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_server_is_its_host_and_port() {
        let same = |a: &str, b: &str| KmsServer::new(a, None).unwrap().is_at(b).unwrap();
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
        let error = KmsServer::new("https://a", file.path().to_str())
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("contains no certificate"),
            "{error}"
        );
    }
}
