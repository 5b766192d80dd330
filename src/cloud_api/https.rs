//! Requests to a cloud's API over HTTPS. The server must have a certificate of an authority that the image trusts.

use std::net::IpAddr;
use std::ops::Deref;
use std::time::Duration;

use cloud::http::Http;
use cloud::transport::{CONNECT_TIMEOUT, Request, Response, Transport, USER_AGENT};
use ureq::Agent;
use ureq::http::Uri;
use ureq::tls::RootCerts;

use machines::Error;

/// Time limit of a request to an API: a page of a thousand machines takes seconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A client of an API.
pub struct Api(Http);

impl Deref for Api {
    type Target = Http;

    fn deref(&self) -> &Http {
        &self.0
    }
}

impl Api {
    /// Makes a client of the API at this base URL: `https://..`, or `http://` on an address of this machine.
    pub fn new(base_url: &str) -> Result<Api, Error> {
        check_api(base_url).map_err(|problem| Error::Url {
            url: base_url.to_owned(),
            problem: format!("{problem}; expected https://HOST[:PORT][/PATH]"),
        })?;
        let config = Agent::config_builder()
            .tls_config(web_tls::config(roots()).build())
            .timeout_global(Some(TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            // no proxy: proxy settings in the environment must not redirect the request
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(USER_AGENT);
        Ok(Api(Http::by(base_url, Https(config.build().into()))))
    }

    /// Returns path and query of a URL of this service; `None` if the URL is of another service. The default port may be written or not.
    pub fn path_of<'a>(&self, url: &'a str) -> Option<&'a str> {
        let (own, other): (Uri, Uri) = (self.base().parse().ok()?, url.parse().ok()?);
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
        let (_, rest) = self.base().split_once("://").unwrap_or_default();
        rest.split('/').next().unwrap_or_default()
    }
}

struct Https(Agent);

impl Transport for Https {
    fn send(&self, request: &Request<'_>) -> Result<Response, String> {
        let mut builder = ureq::http::Request::builder()
            .method(request.method)
            .uri(request.url);
        for (name, value) in request.fields {
            builder = builder.header(*name, *value);
        }
        let response = match request.body {
            Some(body) => self.0.run(builder.body(body).map_err(to_string)?),
            None => self.0.run(builder.body(()).map_err(to_string)?),
        };
        let mut response = response.map_err(to_string)?;
        let fields = response.headers().iter();
        let fields = fields.filter_map(|(name, value)| {
            Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
        });
        let fields = fields.collect();
        let body = response.body_mut().with_config().limit(request.limit);
        Ok(Response {
            fields,
            body: body.read_to_vec().map_err(to_string),
            status: response.status().as_u16(),
        })
    }
}

fn to_string(error: impl ToString) -> String {
    error.to_string()
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

/// Returns the certificate authorities of the image, by which the API's certificate is verified. If the image has none, each request
/// fails with the reason that no authority of that certificate is trusted.
fn roots() -> RootCerts {
    let roots = web_tls::roots(None).unwrap_or_else(|_| Vec::new().into());
    if matches!(&roots, RootCerts::Specific(found) if found.is_empty()) {
        log::warn!("this image has no certificates of web servers' authorities");
    }
    roots
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn credentials_go_only_over_https_or_to_this_machine() {
        for good in [
            "https://ec2.eu-central-1.amazonaws.com",
            "https://[2001:db8::1]:8443/path",
            "http://127.0.0.1:5000",
            "http://[::1]:5000",
        ] {
            assert!(Api::new(good).is_ok(), "{good}");
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
            assert!(Api::new(bad).is_err(), "{bad}");
        }
    }

    fn api(base_url: &str) -> Api {
        Api::new(base_url).unwrap()
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
            assert_eq!(api(base).path_of(link), path, "{base} {link}");
        }
        let http = api("https://a");
        for link in mutations(b"https://a:443/b?c=d", 5000) {
            let _ = http.path_of(&String::from_utf8_lossy(&link));
        }
    }
}
