//! The forms of attested TLS that an end accepts, as ALPN protocols.

use proto::attested::ALPN as ALPN_STRONG;

/// The forms that an end accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Forms {
    Both,
    /// Prefers the old form: uses the strong form only if the peer does not offer the old one.
    OldFirst,
    OnlyStrong,
    /// Like a program of Constellation.
    OnlyOld,
}

impl Forms {
    /// Returns the ALPN protocol names in the order of preference. `old` are those of the old form.
    pub fn protocols(self, old: &[&[u8]]) -> Vec<Vec<u8>> {
        let strong: &[&[u8]] = &[ALPN_STRONG];
        let protocols = match self {
            Forms::Both => [strong, old],
            Forms::OldFirst => [old, strong],
            Forms::OnlyStrong => [strong, &[]],
            Forms::OnlyOld => [&[], old],
        };
        let protocols = protocols.concat().into_iter();
        protocols.map(<[u8]>::to_vec).collect()
    }

    /// Returns whether a server selects the strong form, as rustls does by the order of
    /// `protocols`.
    pub fn selects_strong<'a>(
        self,
        offered: impl Iterator<Item = &'a [u8]>,
        old: &[&[u8]],
    ) -> bool {
        let protocols = self.protocols(old);
        let offered: Vec<&[u8]> = offered.collect();
        let selected = protocols
            .iter()
            .find(|known| offered.contains(&known.as_slice()));
        selected.is_some_and(|selected| selected == ALPN_STRONG)
    }
}
