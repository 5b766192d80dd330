//! The versions of the trusted computing base (TCB_VERSION, 56860 §2.2). They are compared part by
//! part: a high version of one part does not compensate for a low version of another.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::claims::TcbPart;
use crate::json::is_default;
use crate::refusal::{Kind, Refusal};

/// A line of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Product {
    /// EPYC 7003.
    Milan,
    /// EPYC 9004 and 8004: Genoa, Bergamo and Siena.
    Genoa,
    /// EPYC 9005.
    Turin,
}

/// The kind of a chip from CPUID: family and model with their extended parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpuid {
    /// The family.
    pub family: u8,
    /// The model.
    pub model: u8,
    /// The stepping.
    pub stepping: u8,
}

/// The version of each part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tcb {
    /// The firmware of the microcontroller; only Turin has one.
    #[serde(skip_serializing_if = "is_default")]
    pub fmc: u8,
    /// The bootloader of the security processor.
    pub bootloader: u8,
    /// The operating system of the security processor.
    pub tee: u8,
    /// The SNP firmware.
    pub snp: u8,
    /// The lowest microcode of all cores.
    pub microcode: u8,
}

/// The TCB versions of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tcbs {
    /// The version that runs now.
    pub current: Tcb,
    /// The version for which the chip derived its key.
    pub reported: Tcb,
    /// The version below which the platform never goes.
    pub committed: Tcb,
    /// The version that ran when the guest was launched or imported.
    pub launch: Tcb,
}

impl Product {
    /// All products.
    pub const ALL: [Product; 3] = [Product::Milan, Product::Genoa, Product::Turin];

    /// Returns the product of a chip.
    pub fn of(cpuid: Cpuid) -> Result<Product, Refusal> {
        match (cpuid.family, cpuid.model) {
            (0x19, 0x00..=0x0f) => Ok(Product::Milan),
            (0x19, 0x10..=0x1f | 0xa0..=0xaf) => Ok(Product::Genoa),
            (0x1a, 0x00..=0x11) => Ok(Product::Turin),
            _ => Err(Kind::Unproven.because(format!("no known product has {cpuid}"))),
        }
    }

    /// Returns the product by the name in certificates and on AMD's key server.
    pub fn named(name: &str) -> Option<Product> {
        Product::ALL
            .into_iter()
            .find(|product| product.to_string() == name)
    }
}

impl Tcb {
    /// Reads the layout of a product. Its reserved bytes must be zero.
    pub fn parse(bytes: [u8; 8], product: Product) -> Result<Tcb, Refusal> {
        let (tcb, reserved) = match (product, bytes) {
            (Product::Turin, [fmc, bootloader, tee, snp, a, b, c, microcode]) => (
                Tcb {
                    fmc,
                    bootloader,
                    tee,
                    snp,
                    microcode,
                },
                [a, b, c, 0],
            ),
            (_, [bootloader, tee, a, b, c, d, snp, microcode]) => (
                Tcb {
                    fmc: 0,
                    bootloader,
                    tee,
                    snp,
                    microcode,
                },
                [a, b, c, d],
            ),
        };
        match reserved {
            [0, 0, 0, 0] => Ok(tcb),
            _ => Err(Kind::Malformed.because(format!(
                "the TCB {bytes:02x?} has reserved bytes that a {product} does not use"
            ))),
        }
    }

    /// Returns each part with its name.
    fn named(&self) -> [(&'static str, u8); 5] {
        [
            ("fmc", self.fmc),
            ("bootloader", self.bootloader),
            ("tee", self.tee),
            ("snp", self.snp),
            ("microcode", self.microcode),
        ]
    }

    /// Returns the parts that are lower than those of `minimum`: name, version, minimum.
    pub fn below(&self, minimum: &Tcb) -> Vec<(&'static str, u8, u8)> {
        let pairs = self.named().into_iter().zip(minimum.named());
        pairs
            .filter(|((_, got), (_, minimum))| got < minimum)
            .map(|((name, got), (_, minimum))| (name, got, minimum))
            .collect()
    }

    /// Returns the higher version of each part.
    pub fn max(&self, other: &Tcb) -> Tcb {
        Tcb {
            fmc: self.fmc.max(other.fmc),
            bootloader: self.bootloader.max(other.bootloader),
            tee: self.tee.max(other.tee),
            snp: self.snp.max(other.snp),
            microcode: self.microcode.max(other.microcode),
        }
    }

    /// Returns the parts of a product for a person.
    pub fn parts(&self, product: Product, minimum: &Tcb) -> Vec<TcbPart> {
        let pairs = self.named().into_iter().zip(minimum.named());
        pairs
            .filter(|((name, _), _)| *name != "fmc" || product == Product::Turin)
            .map(|((name, got), (_, minimum))| TcbPart {
                name,
                got: got.into(),
                minimum: minimum.into(),
            })
            .collect()
    }
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Product::Milan => "Milan",
            Product::Genoa => "Genoa",
            Product::Turin => "Turin",
        })
    }
}

impl fmt::Display for Tcb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self
            .named()
            .map(|(name, version)| format!("{name} {version}"));
        f.write_str(&parts.join(", "))
    }
}

impl fmt::Display for Cpuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the family {:#x}, model {:#x}, stepping {}",
            self.family, self.model, self.stepping
        )
    }
}
