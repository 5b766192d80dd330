//! The addresses of servers, as operators and services write them (RFC 3986).

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;

/// What is wrong with a URL. The text is a clause, and does not repeat the URL, which may have a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrlError {
    /// It is no URL.
    Malformed,
    /// Its scheme is not `https`.
    Scheme,
    /// It has no host.
    NoHost,
    /// It has a user name.
    User,
    /// It has a query or a fragment.
    MoreThanPath,
    /// It has no TLS, and its requests have credentials.
    Plain,
}

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UrlError::Malformed => "it is malformed",
            UrlError::Scheme => "it does not begin with https://",
            UrlError::NoHost => "it has no host",
            UrlError::User => "it contains a user name",
            UrlError::MoreThanPath => "it has more than a path after its host",
            UrlError::Plain => "requests with credentials need https",
        })
    }
}

impl std::error::Error for UrlError {}

/// Checks that this is `https://HOST[:PORT][/PATH]`, without a user, a query or a fragment.
pub fn check(url: &str) -> Result<(), UrlError> {
    let uri: Uri = url.parse().map_err(|_| UrlError::Malformed)?;
    if uri.scheme_str() != Some("https") {
        return Err(UrlError::Scheme);
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(UrlError::NoHost);
    }
    if host(url).contains('@') {
        return Err(UrlError::User);
    }
    if uri.query().is_some() || url.contains('#') {
        Err(UrlError::MoreThanPath)
    } else {
        Ok(())
    }
}

/// Returns `HOST[:PORT]` of a URL, as in the field `Host` of a request.
pub fn host(url: &str) -> &str {
    let (_, rest) = url.split_once("://").unwrap_or_default();
    rest.split('/').next().unwrap_or_default()
}

/// Returns the host of a URL without its port, and without the brackets of an address.
pub fn name(url: &str) -> &str {
    let host = host(url);
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => name,
        _ => host,
    };
    name.trim_start_matches('[').trim_end_matches(']')
}

/// Returns whether the server is on this machine, by its address.
pub fn is_loopback(url: &str) -> bool {
    name(url).parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Returns path and query of a URL below a base URL; `None` if the URL is of another service. The default port may be written or not.
pub fn path_below<'a>(base: &str, url: &'a str) -> Option<&'a str> {
    let (own, other): (Uri, Uri) = (base.parse().ok()?, url.parse().ok()?);
    let port = |uri: &Uri| {
        uri.port_u16()
            .or((uri.scheme_str()? == "https").then_some(443))
    };
    let is_same = own.scheme() == other.scheme()
        && own.host()?.eq_ignore_ascii_case(other.host()?)
        && port(&own) == port(&other)
        && !other.authority()?.as_str().contains('@');
    let (_, rest) = url.split_once("://").filter(|_| is_same)?;
    let path = rest.split_once('/').map_or("", |(_, path)| path);
    match own.path().trim_matches('/') {
        "" => Some(path),
        below => path.strip_prefix(below)?.strip_prefix('/'),
    }
}

/// Returns a URL for messages, without the parts that can be secret: the user and the query. Of a text that is not a URL, returns
/// only the beginning.
pub fn shown(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = host.rsplit('@').next().unwrap_or(host);
            format!("{scheme}://{host}{path}")
        }
        None => {
            let first = url.split(',').next().unwrap_or_default();
            first.chars().take(100).collect()
        }
    }
}

/// Returns text as a part of a URL (RFC 3986 §2.1).
pub fn encoded(text: &str) -> String {
    let mut url = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                url.push(byte.into());
            }
            _ => url.push_str(&format!("%{byte:02X}")),
        }
    }
    url
}

/// Returns parameters as a form (`application/x-www-form-urlencoded`), in which everything but letters, digits and `-._~` is encoded.
pub fn form(parameters: &[(&str, &str)]) -> String {
    let encoded: Vec<_> = parameters
        .iter()
        .map(|(name, value)| format!("{name}={}", encoded(value)))
        .collect();
    encoded.join("&")
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn only_hosts_behind_https_are_servers() {
        for good in [
            "https://a",
            "https://a:8200/",
            "https://[::1]:8200/x",
            "HTTPS://a",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("", UrlError::Malformed),
            ("a", UrlError::Scheme),
            ("http://a", UrlError::Scheme),
            ("file:///a", UrlError::Malformed),
            ("https://", UrlError::Malformed),
            ("https://u:p@a", UrlError::User),
            ("https://a?b", UrlError::MoreThanPath),
            ("https://a/#b", UrlError::MoreThanPath),
        ] {
            assert_eq!(check(bad), Err(why), "{bad}");
        }
    }

    #[test]
    fn a_link_leads_to_the_same_service_or_nowhere() {
        for (base, link, path) in [
            ("https://a", "https://a/b?c=d", Some("b?c=d")),
            ("https://a", "https://A:443/b", Some("b")),
            ("https://a:443/x", "https://a/x/b", Some("b")),
            ("https://a", "https://a", Some("")),
            ("http://127.0.0.1:80", "http://127.0.0.1:80/b", Some("b")),
            ("https://[::1]:8200", "https://[::1]:8200/", Some("")),
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
            assert_eq!(path_below(base, link), path, "{base} {link}");
        }
        for link in mutations(b"https://a:443/b?c=d", 5000) {
            let _ = path_below("https://a", &String::from_utf8_lossy(&link));
        }
    }
}
