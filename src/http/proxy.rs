//! The proxy that the environment names for a server, as kubectl understands it (Go's `http.ProxyFromEnvironment`).

use std::env;
use std::fmt;
use std::net::IpAddr;

use super::address;

/// The variables, the first of which counts that is not empty.
const PROXY: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];
const NO_PROXY: [&str; 2] = ["NO_PROXY", "no_proxy"];

/// Returns the URL of the proxy for requests to `server` (`https://..`), if there is one.
pub fn of_environment(server: &str) -> Result<Option<String>, UnusableProxy> {
    let variable = |names: [&'static str; 2]| {
        let values = names.map(|name| (name, env::var(name).unwrap_or_default()));
        values.into_iter().find(|(_, value)| !value.is_empty())
    };
    let Some((name, proxy)) = variable(PROXY) else {
        return Ok(None);
    };
    let (_, exceptions) = variable(NO_PROXY).unwrap_or_default();
    if !is_used(server, &exceptions) {
        return Ok(None);
    }
    let url = if proxy.contains("://") {
        proxy
    } else {
        format!("http://{proxy}")
    };
    match ureq::Proxy::new(&url) {
        Ok(_) if url.starts_with("http://") || url.starts_with("https://") => Ok(Some(url)),
        _ => Err(UnusableProxy {
            variable: name,
            shown: address::shown(&url),
        }),
    }
}

/// A variable names a proxy that this program cannot use.
#[derive(Debug, PartialEq, Eq)]
pub struct UnusableProxy {
    variable: &'static str,
    shown: String,
}

impl fmt::Display for UnusableProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnusableProxy { variable, shown } = self;
        write!(
            f,
            "{variable}: {shown} is not a proxy that firstlight can use: expected http://HOST:PORT or https://HOST:PORT"
        )
    }
}

impl std::error::Error for UnusableProxy {}

/// Returns whether requests to `server` use a proxy. `exceptions` are those of `NO_PROXY`.
fn is_used(server: &str, exceptions: &str) -> bool {
    let host = address::name(server).to_ascii_lowercase();
    let host = host.trim_end_matches('.');
    let port = address::host(server)
        .rsplit_once(':')
        .filter(|(_, port)| !port.contains(']'))
        .map_or("443", |(_, port)| port);
    let ip: Option<IpAddr> = host.parse().ok();
    if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
        return false;
    }
    let exceptions = exceptions.to_ascii_lowercase();
    !exceptions.split(',').map(str::trim).any(|exception| {
        if let (Some(ip), Some((network, bits))) = (ip, exception.split_once('/')) {
            return is_in(ip, network, bits);
        }
        let (name, of_port) = match exception.rsplit_once(':') {
            // an IPv6 address has colons of its own
            Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port)),
            _ => (exception, None),
        };
        let name = name.trim_start_matches('[').trim_end_matches(']');
        if of_port.is_some_and(|of_port| of_port != port) {
            return false;
        }
        if let Ok(address) = name.parse::<IpAddr>() {
            return ip == Some(address);
        }
        // `.a` and `*.a` are only names below a; `a` is that name, too
        let domain = name.strip_prefix('*').unwrap_or(name);
        let below = domain.strip_prefix('.').unwrap_or(domain);
        match exception {
            "" => false,
            "*" => true,
            _ if below.is_empty() => false,
            _ => {
                (below == domain && host == domain)
                    || host
                        .strip_suffix(below)
                        .is_some_and(|rest| rest.ends_with('.'))
            }
        }
    })
}

/// Returns whether an address is in a network such as `10.0.0.0/8`.
fn is_in(ip: IpAddr, network: &str, bits: &str) -> bool {
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else {
        return false;
    };
    match (ip, network) {
        (IpAddr::V4(ip), IpAddr::V4(network)) if bits <= 32 => {
            let differ = ip.to_bits() ^ network.to_bits();
            differ.checked_shr(32 - bits).unwrap_or_default() == 0
        }
        (IpAddr::V6(ip), IpAddr::V6(network)) if bits <= 128 => {
            let differ = ip.to_bits() ^ network.to_bits();
            differ.checked_shr(128 - bits).unwrap_or_default() == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_proxy_is_understood_as_by_go() {
        for (server, exceptions, is) in [
            ("https://a.example", "", true),
            ("https://localhost:6443", "", false),
            ("https://127.0.0.1:6443", "", false),
            ("https://[::1]:6443", "", false),
            ("https://a.example", "*", false),
            ("https://a.example", "b.example, A.Example", false),
            ("https://x.a.example", "a.example", false),
            ("https://xa.example", "a.example", true),
            ("https://a.example", ".a.example", true),
            ("https://x.a.example", ".a.example", false),
            ("https://x.a.example", "*.a.example", false),
            ("https://a.example:6443", "a.example:6443", false),
            ("https://a.example:6443", "a.example:443", true),
            ("https://a.example", "a.example:443", false),
            ("https://10.1.2.3:6443", "10.0.0.0/8", false),
            ("https://11.1.2.3:6443", "10.0.0.0/8", true),
            ("https://11.1.2.3:6443", "0.0.0.0/0", false),
            ("https://10.1.2.3:6443", "10.1.2.3", false),
            ("https://10.1.2.3:6443", "10.1.2.3:6443", false),
            ("https://10.1.2.3:6443", "2.3", false),
            ("https://[fd00::1]:6443", "fd00::/8", false),
            ("https://[fd00::1]:6443", "fd00::1", false),
            ("https://[fd00::1]:6443", "[fd00::1]:1", true),
            ("https://[fd00::1]", "[fd00::1]:443", false),
            ("https://a.example", "10.0.0.0/8,/,:,.", true),
        ] {
            assert_eq!(is_used(server, exceptions), is, "{server} {exceptions}");
        }
    }
}
