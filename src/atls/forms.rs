//! The forms of attested TLS that an end accepts, as ALPN protocols.

use super::ALPN_H2;
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
    /// Returns the ALPN protocol names that a client offers, in the order of preference.
    pub fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Forms::Both | Forms::OldFirst => vec![ALPN_STRONG.to_vec(), ALPN_H2.to_vec()],
            Forms::OnlyStrong => vec![ALPN_STRONG.to_vec()],
            Forms::OnlyOld => vec![ALPN_H2.to_vec()],
        }
    }

    /// Returns whether a server selects the strong form for a client that `offers` protocols. A
    /// server that knows no other form refuses all others later.
    pub fn selects_strong(self, offers: impl Fn(&[u8]) -> bool, old: &[&[u8]]) -> bool {
        match self {
            Forms::Both => offers(ALPN_STRONG),
            Forms::OldFirst => offers(ALPN_STRONG) && !old.iter().any(|old| offers(old)),
            Forms::OnlyStrong => true,
            Forms::OnlyOld => false,
        }
    }
}
