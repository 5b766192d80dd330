//! Requests to a service of the host, which machines reach at an address of their own network: metadata services, and those that sign
//! for confidential machines. The answers come from the host, so each is limited in time and size.

use std::time::Duration;

use ureq::http::Request;
use ureq::{Agent, AsSendBody};

use super::Error;

/// The link-local address of the services of Azure, AWS and Google Compute Engine.
pub const LINK_LOCAL: &str = "http://169.254.169.254";
/// Maximum size in bytes of an answer that is not a list.
pub const MAX_BODY: u64 = 64 << 10;

/// Time limit of a request, from the first packet to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of the connection. A lost SYN is sent again after 1 and after 3 seconds (RFC 6298 §2.1).
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum number of characters of an invalid answer in an error.
const SHOWN: usize = 120;

/// The header fields of a request: names and values.
pub type Fields<'a> = &'a [(&'a str, &'a str)];

/// A client of one service. Each call makes one request, without retries.
pub struct Http {
    agent: Agent,
    base: String,
}

impl Http {
    /// Makes a client of the service at this base URL, e.g. [`LINK_LOCAL`].
    pub fn new(base_url: &str) -> Http {
        Http::within(base_url, TIMEOUT)
    }

    /// Makes a client with this time limit of a request.
    pub(super) fn within(base_url: &str, limit: Duration) -> Http {
        let config = Agent::config_builder()
            .timeout_global(Some(limit))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            // no proxy: proxy settings in the environment must not redirect the request
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .max_idle_connections(0)
            .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")))
            .build();
        Http {
            agent: config.into(),
            base: base_url.trim_end_matches('/').to_owned(),
        }
    }

    /// Returns the URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.base)
    }

    /// Returns the answer to GET, at most `limit` bytes.
    pub fn get(&self, path: &str, fields: Fields<'_>, limit: u64) -> Result<Vec<u8>, Error> {
        self.send("GET", path, fields, (), limit)
    }

    /// Returns the answer to PUT without a body.
    pub fn put(&self, path: &str, fields: Fields<'_>) -> Result<Vec<u8>, Error> {
        self.send("PUT", path, fields, &b""[..], MAX_BODY)
    }

    /// Returns the answer to POST with JSON. The type is `application/json` without parameters: Azure refuses others.
    pub fn post_json(&self, path: &str, fields: Fields<'_>, json: &str) -> Result<Vec<u8>, Error> {
        let of_json = [fields, &[("Content-Type", "application/json")]].concat();
        self.send("POST", path, &of_json, json.as_bytes(), MAX_BODY)
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        fields: Fields<'_>,
        body: impl AsSendBody,
        limit: u64,
    ) -> Result<Vec<u8>, Error> {
        let url = self.url(path);
        let request = format!("{method} {url}");
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
        let body = response.body_mut().with_config().limit(limit).read_to_vec();
        match status {
            200 => body.map_err(unreachable),
            _ => Err(Error::Status {
                request,
                status,
                body: excerpt(&body.unwrap_or_default()),
            }),
        }
    }
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
