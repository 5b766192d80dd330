//! The names of registers in a verifier's messages, and which register has the ID of the cluster.

use attest::{ClusterRegister, Registers};
use tpm::CLUSTER_ID_PCR;

/// The registers of one kind in messages.
pub trait RegisterNames {
    /// Returns the index of the register of the cluster ID.
    fn of_cluster_id(self) -> u32;
    /// Returns the name of a register in messages.
    fn name(self, index: u32) -> String;
}

impl RegisterNames for Registers {
    fn of_cluster_id(self) -> u32 {
        match self {
            Registers::Pcrs => CLUSTER_ID_PCR,
            Registers::Rtmrs => 4,
        }
    }

    fn name(self, index: u32) -> String {
        match (self, index) {
            (Registers::Pcrs, _) => format!("PCR {index}"),
            (Registers::Rtmrs, 0) => "MRTD".into(),
            (Registers::Rtmrs, _) => format!("RTMR {}", index - 1),
        }
    }
}

/// The register of the cluster ID in messages.
pub trait NamedRegister {
    /// Returns its name.
    fn name(&self) -> String;
    /// Returns whether the machine has joined no cluster in this boot.
    fn is_fresh(&self) -> bool;
}

impl NamedRegister for ClusterRegister {
    fn name(&self) -> String {
        self.kind().name(self.kind().of_cluster_id())
    }

    fn is_fresh(&self) -> bool {
        *self == self.kind().fresh()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_have_the_names_of_their_kind() {
        let names = |kind: Registers| [0, 4].map(|index| kind.name(index));
        assert_eq!(names(Registers::Pcrs), ["PCR 0", "PCR 4"]);
        assert_eq!(names(Registers::Rtmrs), ["MRTD", "RTMR 3"]);
        for (kind, name) in [(Registers::Pcrs, "PCR 15"), (Registers::Rtmrs, "RTMR 3")] {
            assert_eq!(kind.fresh().name(), name);
            assert!(kind.fresh().is_fresh() && !kind.after(&[0; 32]).is_fresh());
        }
    }
}
