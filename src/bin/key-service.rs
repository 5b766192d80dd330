//! Derives data keys for the services of a control plane.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use firstlight::key_service::{self, Config};
use firstlight::logger;
use firstlight::program::{self, Failure};
use lexopt::prelude::*;

const HELP: &str = "\
key-service: derives data keys from the master secret for the services of a control plane

Callers prove nothing and the connection is not encrypted: it listens on loopback unless told that the network around it
is encrypted and trusted.

Usage: key-service [OPTION]..

  --listen ADDRESS:PORT  where to listen [127.0.0.1:9000]
  --port PORT            the port alone
  --allow-plaintext      listen on other than loopback addresses
  --master-secret FILE   raw bytes, at least 16 [/var/config/mastersecret]
  --salt FILE            raw bytes, at least 32 [/var/config/salt]
  -v LEVEL               -1 debug, 0 info, 1 warnings, 2 errors [0]
  -h, --help             this text
      --version          the version

Exit codes: 0 after SIGTERM or SIGINT, 1 failed, 2 the arguments make no sense.

Examples:
  key-service --master-secret ./mastersecret --salt ./salt
  key-service --listen 0.0.0.0:9000 --allow-plaintext
";

fn main() -> ExitCode {
    program::main("key-service", HELP, run)
}

fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    let mut verbosity = 0;
    let mut config = Config {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), key_service::PORT),
        master_secret: key_service::MASTER_SECRET_FILE.into(),
        salt: key_service::SALT_FILE.into(),
        allow_plaintext: false,
    };
    while let Some(arg) = args.next()? {
        match arg {
            Long("listen") => config.listen = program::parsed("listen", args.value()?)?,
            Long("port") => config.listen.set_port(program::parsed("port", args.value()?)?),
            Long("allow-plaintext") => config.allow_plaintext = true,
            Long("master-secret") => config.master_secret = args.value()?.into(),
            Long("salt") => config.salt = args.value()?.into(),
            Short('v') => verbosity = program::parsed("v", args.value()?)?,
            Long("help") | Short('h') => return Err(Failure::Help),
            Long("version") => return Err(Failure::Version),
            other => return Err(other.unexpected().into()),
        }
    }
    let signals = program::prepare_service(logger::level_of_verbosity(verbosity))?;
    let server = key_service::start(&config).map_err(Failure::failed)?;
    program::wait_until_stopped(&signals, key_service::GRACE)?;
    server.stop(key_service::GRACE);
    Ok(())
}
