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
    /// The file with the register of the cluster ID of an SEV-SNP machine without a TPM.
    Snp(PathBuf),
}

/// Parses the notation of tpm2-tools: `device:PATH`, `swtpm:host=ADDRESS,port=PORT`; and
/// `tdx:FOLDER`, `snp:FILE`.
impl FromStr for Location {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Location, Self::Err> {
        match text.split_once(':').filter(|(_, path)| !path.is_empty()) {
            Some(("device", path)) => return Ok(Location::Device(path.into())),
            Some(("tdx", folder)) => return Ok(Location::Tdx(folder.into())),
            Some(("snp", file)) => return Ok(Location::Snp(file.into())),
            _ => {}
        }
        let network = text.strip_prefix("swtpm:").and_then(|words| {
            let value = |name: &str| words.split(',').find_map(|word| word.strip_prefix(name));
            let (host, port) = (value("host=")?, value("port=")?);
            Some(Location::Swtpm(host.parse().ok()?, port.parse().ok()?))
        });
        network.ok_or("expected device:PATH, swtpm:host=ADDRESS,port=PORT, tdx:FOLDER or snp:FILE")
    }
}

/// `{:#}` also says what is at this location.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            let is_tpm = matches!(self, Location::Device(_) | Location::Swtpm(..));
            let what = if is_tpm { "TPM" } else { "registers" };
            write!(f, "the {what} at ")?;
        }
        match self {
            Location::Device(path) => write!(f, "device:{}", path.display()),
            Location::Swtpm(host, port) => write!(f, "swtpm:host={host},port={port}"),
            Location::Tdx(folder) => write!(f, "tdx:{}", folder.display()),
            Location::Snp(file) => write!(f, "snp:{}", file.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_read_as_tpm2_tools_writes_them() {
        for text in [
            "device:/dev/tpmrm0",
            "swtpm:host=127.0.0.1,port=2321",
            "tdx:/sys/a",
            "snp:/run/a:b",
        ] {
            assert_eq!(text.parse::<Location>().unwrap().to_string(), text);
        }
        for (text, said) in [
            ("device:/dev/a", "the TPM at device:/dev/a"),
            ("tdx:/sys/a", "the registers at tdx:/sys/a"),
            ("snp:/run/a", "the registers at snp:/run/a"),
        ] {
            assert_eq!(format!("{:#}", text.parse::<Location>().unwrap()), said);
        }
        assert_eq!(
            "swtpm:port=1,host=::1".parse(),
            Ok(Location::Swtpm("::1".parse().unwrap(), 1))
        );
        for text in [
            "",
            "device:",
            "tdx:",
            "snp:",
            "swtpm:",
            "swtpm:host=a,port=1",
            "swtpm:host=127.0.0.1,port=99999",
            "mssim:",
        ] {
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
    }
}
