//! The forms of attested TLS that an end accepts, as parameters of TLS.

use proto::attested::ALPN as ALPN_STRONG;
use rustls::SupportedProtocolVersion;

/// The forms that an end accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Forms {
    Both,
    /// The strong form only with a peer that does not offer the old one.
    OldFirst,
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
        let strong: &[&[u8]] = &[ALPN_STRONG];
        let (versions, protocols) = match self {
            Forms::Both => (rustls::ALL_VERSIONS, [strong, old]),
            Forms::OldFirst => (rustls::ALL_VERSIONS, [old, strong]),
            Forms::OnlyStrong => (Self::TLS13, [strong, &[]]),
            Forms::OnlyOld => (rustls::ALL_VERSIONS, [&[], old]),
        };
        let protocols = protocols.concat().into_iter().map(<[u8]>::to_vec);
        (versions, protocols.collect())
    }

    /// Returns whether a server selects the strong form, as rustls does by the order of `parameters`.
    pub fn selects_strong<'a>(
        self,
        offered: impl Iterator<Item = &'a [u8]>,
        old: &[&[u8]],
    ) -> bool {
        let (_, protocols) = self.parameters(old);
        let offered: Vec<&[u8]> = offered.collect();
        let selected = protocols
            .iter()
            .find(|known| offered.contains(&known.as_slice()));
        selected.is_some_and(|selected| selected == ALPN_STRONG)
    }
}
