//! Evidence of confidential hardware: reports and quotes of AMD SEV-SNP and Intel TDX, the certificates that sign them, and what
//! an operator can demand of them. Everything takes bytes and a time and returns values; only the files named `guest.rs` talk to
//! the kernel of a confidential machine.

pub mod claims;
pub mod snp;
pub mod tdx;
pub mod tsm;

pub use claims::PlatformClaims;

/// Returns bytes in lower-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
