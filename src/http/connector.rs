//! How the HTTP library connects: by our resolver and dialler, and only if no open connection can be
//! used.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ::transport::dial::dial;
use base::network::request::CONNECT_TIMEOUT;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    self, Buffers, ConnectProxyConnector, ConnectionDetails, Connector, Either, LazyBuffers,
    NextTimeout, RustlsConnector, ShutdownHandle, Transport,
};
use ureq::{Agent, Error, Timeout};

/// Makes the library's client.
pub fn agent(config: Config) -> Agent {
    let connector = ().chain(ConnectProxyConnector::default());
    let connector = connector.chain(Tcp).chain(Tls::default());
    Agent::with_parts(config, connector, AtConnection)
}

/// Leaves names to [`Tcp`]: the library resolves a name also if it then uses an open connection.
#[derive(Debug)]
struct AtConnection;

impl Resolver for AtConnection {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut nowhere = self.empty();
        // the library demands an address
        nowhere.push(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        Ok(nowhere)
    }
}

/// Connects to the host of the URL.
#[derive(Debug)]
struct Tcp;

impl<In: Transport> Connector<In> for Tcp {
    type Out = Either<In, Socket>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        through_proxy: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        if let Some(transport) = through_proxy {
            return Ok(Some(Either::A(transport)));
        }
        let uri = details.uri;
        let port = match uri.scheme_str() {
            Some("http") => 80,
            _ => 443,
        };
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let deadline = Instant::now() + left(details);
        let port = uri.port_u16().unwrap_or(port);
        let stream = dial(host, port, deadline, CONNECT_TIMEOUT);
        let stream = Arc::new(stream.map_err(io::Error::other)?);
        let handle = Arc::downgrade(&stream) as Weak<dyn ShutdownHandle>;
        (details.register_shutdown)(handle)?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(Either::B(Socket { stream, buffers })))
    }
}

/// Returns the time that is left for the connection.
fn left(details: &ConnectionDetails<'_>) -> Duration {
    if details.timeout.after.is_not_happening() {
        CONNECT_TIMEOUT
    } else {
        *details.timeout.after
    }
}

/// TLS with a time limit of its own. The server has done nothing if it passes.
#[derive(Debug, Default)]
struct Tls(RustlsConnector);

impl<In: Transport> Connector<In> for Tls {
    type Out = <RustlsConnector as Connector<In>>::Out;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        transport: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        let used = match details.now {
            transport::time::Instant::Exact(begin) => begin.elapsed(),
            _ => Duration::ZERO,
        };
        let timeout = NextTimeout {
            after: left(details).min(used + CONNECT_TIMEOUT).into(),
            reason: Timeout::Connect,
            ..details.timeout
        };
        let details = ConnectionDetails {
            uri: details.uri,
            addrs: details.resolver.empty(),
            config: details.config,
            request_level: details.request_level,
            resolver: details.resolver,
            now: details.now,
            timeout,
            current_time: details.current_time.clone(),
            run_connector: details.run_connector.clone(),
            register_shutdown: details.register_shutdown.clone(),
        };
        self.0.connect(&details, transport)
    }
}

/// A connection without TLS.
struct Socket {
    stream: Arc<TcpStream>,
    buffers: LazyBuffers,
}

impl Transport for Socket {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let timeout = timeout.for_write();
        self.stream.set_write_timeout(checked(timeout)?)?;
        let sent = (&*self.stream).write_all(&self.buffers.output()[..amount]);
        sent.map_err(|error| timed(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let timeout = timeout.for_read();
        let until = checked(timeout)?.map(|left| Instant::now() + left);
        let amount = loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let left = left.map(|left| left.max(Duration::from_millis(1)));
            self.stream.set_read_timeout(left)?;
            match (&*self.stream).read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read.map_err(|error| timed(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        // nothing may arrive between two requests
        let mut byte = [0];
        let is_silent = self.stream.set_nonblocking(true).is_ok()
            && matches!(self.stream.peek(&mut byte), Err(error) if error.kind() == ErrorKind::WouldBlock);
        is_silent && self.stream.set_nonblocking(false).is_ok()
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Socket")
            .field(&self.stream.peer_addr().ok())
            .finish()
    }
}

/// Returns how long a read or write may take; an error if its time has passed.
fn checked(timeout: NextTimeout) -> Result<Option<Duration>, Error> {
    if timeout.after.is_zero() {
        Err(Error::Timeout(timeout.reason))
    } else {
        Ok(timeout.not_zero().map(|left| *left))
    }
}

fn timed(error: io::Error, timeout: NextTimeout) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => error.into(),
    }
}
