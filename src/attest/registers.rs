//! The registers of a machine, and the one of them that names its cluster.

use base::crypto::CLUSTER_ID_LEN;
use base::text::hex;
use ring::digest::{Algorithm, SHA256, SHA384, digest};

/// The kind of a machine's registers. It follows from the length of a value, so a policy does not
/// name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Registers {
    /// The SHA-256 PCRs of a TPM, by their numbers.
    Pcrs,
    /// The SHA-384 registers of a TDX machine: 0 is MRTD, 1 to 4 are RTMR 0 to 3, as in
    /// Constellation.
    Rtmrs,
}

/// The value of the register that a machine extends with the ID of its cluster: SHA-256 PCR 15, or
/// RTMR 3 of a TDX machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterRegister(Vec<u8>);

impl Registers {
    /// Returns the kind of a register with this value; `None` if no kind has this length.
    pub fn of(value: &[u8]) -> Option<Registers> {
        let kinds = [Registers::Pcrs, Registers::Rtmrs];
        kinds.into_iter().find(|kind| kind.len() == value.len())
    }

    fn hash(self) -> &'static Algorithm {
        match self {
            Registers::Pcrs => &SHA256,
            Registers::Rtmrs => &SHA384,
        }
    }

    /// Returns the digest that extends a register when this cluster ID is measured.
    pub(super) fn digest(self, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Vec<u8> {
        digest(self.hash(), cluster_id).as_ref().into()
    }

    /// Returns the length of a value in bytes.
    fn len(self) -> usize {
        self.hash().output_len()
    }

    /// Returns the register of the cluster ID of a machine that has joined no cluster in this boot.
    pub fn fresh(self) -> ClusterRegister {
        ClusterRegister(vec![0; self.len()])
    }

    /// Returns the register of the cluster ID after one extension, from zero, with this ID.
    pub fn after(self, cluster_id: &[u8; CLUSTER_ID_LEN]) -> ClusterRegister {
        let mut text = vec![0; self.len()];
        text.extend(self.digest(cluster_id));
        ClusterRegister(digest(self.hash(), &text).as_ref().into())
    }
}

impl ClusterRegister {
    /// Takes the value of the register; `None` if no kind has this length.
    pub fn new(value: &[u8]) -> Option<ClusterRegister> {
        Registers::of(value).map(|_| ClusterRegister(value.into()))
    }

    /// Returns whether the machine has joined this cluster.
    pub fn is_of(&self, cluster_id: &[u8; CLUSTER_ID_LEN]) -> bool {
        *self == self.kind().after(cluster_id)
    }

    /// Returns the kind of the machine's registers.
    pub fn kind(&self) -> Registers {
        Registers::of(&self.0).unwrap_or(Registers::Pcrs)
    }
}

impl AsRef<[u8]> for ClusterRegister {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Display for ClusterRegister {
    /// Writes lower-case hexadecimal digits.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_register_of_the_cluster_id_matches_the_vectors_of_the_old_system() {
        let id: [u8; 32] = [
            0x12, 0x8c, 0x16, 0x43, 0x78, 0xfe, 0x87, 0x67, 0xf9, 0x98, 0xfb, 0xdf, 0xe4, 0xb4,
            0xd6, 0x46, 0x3e, 0xc5, 0xae, 0x1b, 0x66, 0x4e, 0xa5, 0x99, 0x9b, 0xc2, 0x74, 0x17,
            0x60, 0x7a, 0xe9, 0xb6,
        ];
        for (kind, id, expected) in [
            (
                Registers::Pcrs,
                id,
                "23400370357e846478cce7cc0c76cdfe4da077cc57b36dee0f665ede2c8b3f2f",
            ),
            (
                Registers::Pcrs,
                [0x11; 32],
                "1e60f81404c2f085dc1bb30642c0c23cd3f77bd32424888abb3fc0f9908f1adf",
            ),
            (
                Registers::Rtmrs,
                id,
                "894927a8d9fda1b23231f7a1a9505fd67f41cfe6b8cb66e7a15fcc04529aeae2708795d00dbfc191bf1b5d88a97f55d9",
            ),
        ] {
            let register = kind.after(&id);
            assert_eq!(register.to_string(), expected);
            assert!(register.is_of(&id) && !register.is_of(&[0; 32]));
            assert_eq!(register.kind(), kind);
        }
    }
}
