//! Where the TPM is.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The location of the TPM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A device node.
    Device(PathBuf),
    /// A software TPM on a TCP port, with its control channel on the next port.
    Swtpm(IpAddr, u16),
    /// The folder with the registers of a TDX machine, which has no TPM.
    Tdx(PathBuf),
}

/// Parses the notation of tpm2-tools: `device:PATH`, `swtpm:host=ADDRESS,port=PORT`; and
/// `tdx:FOLDER`.
impl FromStr for Location {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Location, Self::Err> {
        if let Some(path) = text.strip_prefix("device:").filter(|path| !path.is_empty()) {
            return Ok(Location::Device(path.into()));
        }
        if let Some(folder) = text.strip_prefix("tdx:").filter(|path| !path.is_empty()) {
            return Ok(Location::Tdx(folder.into()));
        }
        let network = text.strip_prefix("swtpm:").and_then(|parameters| {
            let value = |name| {
                parameters
                    .split(',')
                    .find_map(|p: &str| p.strip_prefix(name)?.strip_prefix('='))
            };
            Some(Location::Swtpm(
                value("host")?.parse().ok()?,
                value("port")?.parse().ok()?,
            ))
        });
        network.ok_or("expected device:PATH, swtpm:host=ADDRESS,port=PORT or tdx:FOLDER")
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Device(path) => write!(f, "device:{}", path.display()),
            Location::Swtpm(host, port) => write!(f, "swtpm:host={host},port={port}"),
            Location::Tdx(folder) => write!(f, "tdx:{}", folder.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_read_as_tpm2_tools_writes_them() {
        for text in ["device:/dev/tpmrm0", "swtpm:host=127.0.0.1,port=2321"] {
            assert_eq!(text.parse::<Location>().unwrap().to_string(), text);
        }
        assert_eq!(
            "swtpm:port=1,host=::1".parse(),
            Ok(Location::Swtpm("::1".parse().unwrap(), 1))
        );
        for text in [
            "",
            "device:",
            "swtpm:",
            "swtpm:host=a,port=1",
            "swtpm:host=127.0.0.1,port=99999",
            "mssim:",
        ] {
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
    }
}
