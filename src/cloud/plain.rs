//! HTTP/1.1 without TLS (RFC 9112): one request for each connection. It uses no HTTP crate, because
//! one has a hundred times as much code.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use base::network::request::{
    CONNECT_TIMEOUT, NoAnswer, Request, RequestTransport, Response, USER_AGENT, seconds,
};
use base::network::resolver;

/// Maximum size in bytes of the data before an answer's body, and of the data after its last chunk.
const MAX_HEAD: usize = 32 << 10;
/// Maximum number of interim answers (RFC 9110 §15.2).
const MAX_INTERIM: usize = 8;

/// Sends requests without TLS. Each request has this time limit.
pub struct Plain(pub Duration);

impl RequestTransport for Plain {
    fn send(&self, request: &Request<'_>) -> Result<Response, NoAnswer> {
        let end = Instant::now() + self.0;
        let url = Url::parse(request.url).map_err(|why| NoAnswer::Request(why.into()))?;
        let head = head(request, &url)?;
        let mut stream = connect(&url, end)?;
        stream.set_write_timeout(Some(self.0))?;
        let sent = [head.as_bytes(), request.body.unwrap_or_default()].concat();
        stream.write_all(&sent)?;
        receive(&mut BufReader::new(Timed { stream, end }), request.limit)
    }
}

/// A URL `http://HOST[:PORT][/TARGET]`.
#[derive(Debug, PartialEq, Eq)]
pub struct Url<'a> {
    /// The host, an IPv6 address without its brackets, and the port.
    host: &'a str,
    port: u16,
    /// Host and port as written in the URL.
    authority: &'a str,
    /// Path and query without the first `/`.
    target: &'a str,
}

impl<'a> Url<'a> {
    /// Parses a URL. The error is a clause that says what is wrong.
    pub fn parse(url: &'a str) -> Result<Url<'a>, &'static str> {
        let rest = url.strip_prefix("http://");
        let rest = rest.ok_or("it does not begin with http://")?;
        if !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("it has an invalid character");
        }
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if authority.contains('@') {
            return Err("it contains a user name");
        }
        let after_host = match authority.strip_prefix('[') {
            Some(literal) => literal.find(']').map_or(0, |at| at + 2),
            None => authority.find(':').unwrap_or(authority.len()),
        };
        let (host, port) = authority.split_at(after_host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err("it has no host");
        }
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => 80,
            port => port.and_then(|port| number(port, 10)).unwrap_or(0),
        };
        if !(1..=u16::MAX.into()).contains(&port) {
            return Err("its port is invalid");
        }
        Ok(Url {
            host,
            port: port as u16,
            authority,
            target: target.strip_prefix('/').unwrap_or(target),
        })
    }

    /// Checks the base URL of a service. The error is a clause that says what is wrong.
    pub fn check_base(url: &str) -> Result<(), &'static str> {
        if Url::parse(url)?.target.contains(['?', '#']) {
            Err("it has more than a path after its host")
        } else {
            Ok(())
        }
    }
}

/// Returns the request up to its body.
fn head(request: &Request<'_>, url: &Url<'_>) -> Result<String, NoAnswer> {
    let Request { method, fields, .. } = request;
    let mut head = format!(
        "{method} /{} HTTP/1.1\r\nHost: {}\r\nUser-Agent: {USER_AGENT}\r\nAccept: */*\r\nConnection: close\r\n",
        url.target, url.authority
    );
    for (name, value) in *fields {
        // a line break would start another field
        if !value.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(NoAnswer::Request(format!(
                "the value of the field {name} has an invalid character"
            )));
        }
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(body) = request.body {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    Ok(head)
}

/// Connects to the first address of the host that accepts. It tries one after the other, because
/// `transport::dial` would add 12 KB to `unlock`.
fn connect(url: &Url<'_>, end: Instant) -> Result<TcpStream, NoAnswer> {
    let addresses = resolver::resolve(url.host, end);
    let addresses = addresses.map_err(|error| NoAnswer::Connection(error.to_string()))?;
    let mut failed = NoAnswer::Late;
    for address in addresses {
        let end = end.min(Instant::now() + CONNECT_TIMEOUT);
        match sys::net::connect(SocketAddr::new(address, url.port), end, &|| false) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = NoAnswer::Connection(error.to_string()),
        }
    }
    Err(failed)
}

/// A connection with a deadline for reading.
struct Timed {
    stream: TcpStream,
    end: Instant,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

/// Reads an answer, whose body may have `limit` bytes. The error says why there is no answer.
pub fn receive(reader: &mut impl BufRead, limit: u64) -> Result<Response, NoAnswer> {
    for _ in 0..=MAX_INTERIM {
        let mut left = MAX_HEAD;
        let status = parse_status(&line(reader, &mut left)?)?;
        let fields = read_fields(reader, &mut left)?;
        if status >= 200 {
            return Ok(Response {
                status,
                body: match status {
                    204 | 304 => Ok(vec![]),
                    _ => read_body(reader, &fields, limit),
                },
                pause: find(&fields, "Retry-After").and_then(seconds),
                fields,
            });
        }
    }
    Err(NoAnswer::Malformed(
        "it sends only interim answers (status 1xx)",
    ))
}

/// Reads a line of at most `left` bytes, without its end.
fn line(reader: &mut impl BufRead, left: &mut usize) -> Result<String, NoAnswer> {
    let mut bytes = vec![];
    let read = reader
        .by_ref()
        .take(*left as u64)
        .read_until(b'\n', &mut bytes);
    *left -= read?;
    match bytes.strip_suffix(b"\n") {
        Some(line) => {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            Ok(String::from_utf8_lossy(line).into_owned())
        }
        None if *left == 0 => Err(NoAnswer::TooLong("the answer's head", MAX_HEAD as u64)),
        None => Err(NoAnswer::Malformed(
            "the connection ended within the answer",
        )),
    }
}

/// Parses a status line, e.g. `HTTP/1.1 200 OK`.
fn parse_status(line: &str) -> Result<u16, NoAnswer> {
    let mut words = line.splitn(3, ' ');
    let is_http = words.next().is_some_and(|word| word.starts_with("HTTP/1."));
    let status = words.next().filter(|word| is_http && word.len() == 3);
    let status = status.and_then(|word| word.parse().ok());
    let status = status.filter(|status| (100..1000).contains(status));
    status.ok_or(NoAnswer::Malformed("the answer is not HTTP/1.1"))
}

/// Reads header fields up to the empty line after them.
fn read_fields(
    reader: &mut impl BufRead,
    left: &mut usize,
) -> Result<Vec<(String, String)>, NoAnswer> {
    let mut fields = vec![];
    loop {
        let line = line(reader, left)?;
        if line.is_empty() {
            return Ok(fields);
        }
        // a name that ends with a space, and a line that continues the previous one, are not fields
        // (RFC 9112 §5)
        let field = line.split_once(':').filter(|(name, _)| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
        });
        let (name, value) = field.ok_or(NoAnswer::Malformed(
            "the answer has an invalid header field",
        ))?;
        fields.push((name.to_owned(), value.trim().to_owned()));
    }
}

/// Returns the value of the first field with this name.
pub fn find<'a>(fields: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let mut fields = fields.iter();
    let found = fields.find(|(known, _)| known.eq_ignore_ascii_case(name))?;
    Some(&found.1)
}

/// Reads a body as its fields frame it (RFC 9112 §6.3).
fn read_body(
    reader: &mut impl BufRead,
    fields: &[(String, String)],
    limit: u64,
) -> Result<Vec<u8>, NoAnswer> {
    let mut body = vec![];
    if let Some(coding) = find(fields, "Transfer-Encoding") {
        if !coding.eq_ignore_ascii_case("chunked") {
            return Err(NoAnswer::Malformed(
                "the answer has an unknown transfer encoding",
            ));
        }
        read_chunks(reader, &mut body, limit)?;
        return Ok(body);
    }
    let is_length = |(name, _): &&(String, String)| name.eq_ignore_ascii_case("Content-Length");
    let mut lengths = fields.iter().filter(is_length).map(|(_, length)| length);
    match lengths.next() {
        Some(length) if lengths.all(|other| other == length) => {
            let length = number(length, 10)
                .ok_or(NoAnswer::Malformed("the answer has an invalid length"))?;
            append(reader, &mut body, length, limit)?;
        }
        Some(_) => return Err(NoAnswer::Malformed("the answer has two lengths")),
        None => {
            let read = reader.by_ref().take(limit + 1).read_to_end(&mut body);
            if read? as u64 > limit {
                return Err(too_long(limit));
            }
        }
    }
    Ok(body)
}

/// Reads chunks and the fields after the last one.
fn read_chunks(reader: &mut impl BufRead, body: &mut Vec<u8>, limit: u64) -> Result<(), NoAnswer> {
    // chunk size lines count, too, so that their extensions cannot be endless
    let mut left = MAX_HEAD;
    loop {
        let line_of_size = line(reader, &mut left)?;
        let size = line_of_size.split(';').next().unwrap_or_default().trim();
        let size = number(size, 16).ok_or(NoAnswer::Malformed(
            "the answer has an invalid size of a chunk",
        ))?;
        if size == 0 {
            return read_fields(reader, &mut left).map(drop);
        }
        append(reader, body, size, limit)?;
        if !line(reader, &mut left)?.is_empty() {
            return Err(NoAnswer::Malformed("the answer has a chunk without an end"));
        }
    }
}

/// Appends this many bytes to a body that may have `limit` bytes.
fn append(
    reader: &mut impl BufRead,
    body: &mut Vec<u8>,
    length: u64,
    limit: u64,
) -> Result<(), NoAnswer> {
    if length > limit.saturating_sub(body.len() as u64) {
        return Err(too_long(limit));
    }
    let read = reader.by_ref().take(length).read_to_end(body)?;
    if read as u64 == length {
        Ok(())
    } else {
        Err(NoAnswer::Malformed(
            "the connection ended within the answer",
        ))
    }
}

fn too_long(limit: u64) -> NoAnswer {
    NoAnswer::TooLong("the answer", limit)
}

/// Parses digits without a sign.
fn number(text: &str, radix: u32) -> Option<u64> {
    let number = u64::from_str_radix(text, radix).ok();
    number.filter(|_| !text.starts_with('+'))
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    fn received(answer: &[u8], limit: u64) -> Result<Response, NoAnswer> {
        receive(&mut &answer[..], limit)
    }

    fn body(answer: &str) -> Result<Vec<u8>, NoAnswer> {
        received(answer.as_bytes(), 10)?.body
    }

    #[test]
    fn a_body_is_framed_by_its_length_by_chunks_or_by_the_end() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokmore", "ok"),
            ("HTTP/1.0 200\r\n\r\nok", "ok"),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nX: y\r\n\r\n",
                "abcd",
            ),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\nContent-Length:2\n\nok",
                "ok",
            ),
            ("HTTP/1.1 204 No Content\r\n\r\n", ""),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789",
                "0123456789",
            ),
        ] {
            assert_eq!(body(answer).unwrap(), expected.as_bytes(), "{answer}");
        }
        let found = received(b"HTTP/1.1 503 Slow Down\r\nRetry-After:  60 \r\n\r\n", 10).unwrap();
        assert_eq!(found.status, 503);
        assert_eq!(found.fields, [("Retry-After".into(), "60".into())]);
    }

    #[test]
    fn an_answer_that_is_cut_off_too_long_or_wrong_is_refused() {
        for (answer, why) in [
            ("", "ended"),
            ("HTTP/1.1 200 OK\r\nA: b\r\n", "ended"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "ended"),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n",
                "more than 10 bytes",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
                "invalid length",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
                "two lengths",
            ),
            ("HTTP/1.1 200 OK\r\n\r\n0123456789a", "more than 10 bytes"),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
                "transfer encoding",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
                "more than 10 bytes",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n012345\r\n6\r\n012345\r\n",
                "more than 10 bytes",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
                "without an end",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
                "size of a chunk",
            ),
            ("HTTP/1.1 200 OK\r\nno field\r\n\r\n", "header field"),
            ("HTTP/1.1 200 OK\r\nA: b\r\n c: d\r\n\r\n", "header field"),
            ("HTTP/2 200\r\n\r\n", "HTTP/1.1"),
            ("ICY 200 OK\r\n\r\n", "HTTP/1.1"),
            ("HTTP/1.1 20 OK\r\n\r\n", "HTTP/1.1"),
        ] {
            let error = body(answer).unwrap_err().to_string();
            assert!(error.contains(why), "{answer}: {error}");
        }
        let endless = format!("HTTP/1.1 200 OK\r\nA: {}", "b".repeat(MAX_HEAD));
        assert!(body(&endless).unwrap_err().to_string().contains("head"));
        let interim = "HTTP/1.1 100 Continue\r\n\r\n".repeat(20);
        assert!(body(&interim).unwrap_err().to_string().contains("interim"));
    }

    #[test]
    fn mutated_answers_have_at_most_the_limit() {
        let mut good = 0;
        for answer in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nA: b\r\n\r\n01234567"[..],
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n4\r\n4567\r\n0\r\n\r\n",
        ] {
            for bytes in mutations(answer, 20_000) {
                if let Ok(Response { body: Ok(body), .. }) = received(&bytes, 10) {
                    good += 1;
                    assert!(body.len() <= 10);
                }
            }
        }
        assert!(good > 100, "{good}");
    }

    #[test]
    fn a_value_cannot_begin_another_field() {
        let url = Url::parse("http://[2001:db8::1]:8080/a/b?c=d").unwrap();
        let request = |value| Request {
            method: "PUT",
            url: "",
            fields: &[],
            body: Some(value),
            limit: 0,
        };
        let text = head(&request(b"ab"), &url).unwrap();
        assert!(text.starts_with("PUT /a/b?c=d HTTP/1.1\r\nHost: [2001:db8::1]:8080\r\n"));
        assert!(text.ends_with("Content-Length: 2\r\n\r\n"), "{text}");
        let fields = [("A", "b\r\nC: d")];
        let bad = Request {
            fields: &fields,
            ..request(b"")
        };
        assert!(
            head(&bad, &url)
                .unwrap_err()
                .to_string()
                .contains("field A")
        );
        for url in mutations(b"http://[2001:db8::1]:8080/a?b", 5000) {
            if let Ok(url) = Url::parse(&String::from_utf8_lossy(&url)) {
                assert!(!url.host.is_empty() && url.port > 0);
            }
        }
    }
}
