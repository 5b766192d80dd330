//! The settings of an installation, and the steps that it reports.

use std::path::PathBuf;
use std::time::Duration;

/// The settings of an installation.
pub struct InstallSettings {
    /// The deadline of each component, including its retries.
    pub deadline: Duration,
    /// How long a server may be silent during a response.
    pub stall: Duration,
    /// The number of concurrent downloads.
    pub at_once: usize,
    /// The maximum number of bytes of a component, as fetched.
    pub max_len: u64,
    /// Files with the PEM certificates that TLS trusts. The first existing one is used. They belong to the image, which is
    /// measured. The image's owner adds the certificate of a mirror there. A list in this program would become outdated.
    pub ca_bundles: Vec<PathBuf>,
    /// A directory of the image with components, named by the last segment of their URL. They are used if the hash matches.
    pub image: Option<PathBuf>,
}

impl Default for InstallSettings {
    fn default() -> InstallSettings {
        InstallSettings {
            deadline: Duration::from_secs(20 * 60),
            stall: Duration::from_secs(20),
            at_once: 4,
            max_len: 1 << 30,
            ca_bundles: http::CA_BUNDLES.map(PathBuf::from).to_vec(),
            image: None,
        }
    }
}

/// A step of one component's installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The component was in place already.
    Present,
    /// A part of the component was received.
    Received {
        /// Bytes received so far.
        bytes: u64,
        /// Bytes in total, if the server says so.
        total: Option<u64>,
    },
    /// The attempt failed and will be repeated.
    Retrying {
        /// The reason, as a clause.
        why: String,
        /// The pause before the next attempt.
        pause: Duration,
    },
    /// The component is in place now.
    Installed,
}
