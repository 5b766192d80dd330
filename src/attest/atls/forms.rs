//! The forms of attested TLS that an end accepts, as parameters of TLS.

use proto::attested::ALPN as ALPN_STRONG;
use rustls::SupportedProtocolVersion;

/// The forms that an end accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Forms {
    Both,
    OnlyStrong,
    /// As a program of the old system.
    OnlyOld,
}

impl Forms {
    /// TLS 1.2 has no exporter that covers the handshake without a further extension.
    const TLS13: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

    /// Returns the versions of TLS, and the ALPN protocol names in the order of preference. `old` are those of the old form.
    pub fn parameters(
        self,
        old: &[&[u8]],
    ) -> (&'static [&'static SupportedProtocolVersion], Vec<Vec<u8>>) {
        let strong = (self != Forms::OnlyOld).then_some(ALPN_STRONG);
        let old = old.iter().copied().filter(|_| self != Forms::OnlyStrong);
        let protocols = strong.into_iter().chain(old).map(<[u8]>::to_vec).collect();
        match self {
            Forms::OnlyStrong => (Self::TLS13, protocols),
            _ => (rustls::ALL_VERSIONS, protocols),
        }
    }
}
