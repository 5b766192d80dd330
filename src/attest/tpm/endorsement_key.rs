//! The endorsement key (EK): a decryption key that the vendor of the TPM has certified. It cannot sign. It proves that another key
//! is in the same TPM: the TPM decrypts a credential only if it holds both the EK and the key that the credential names
//! (TPM2_MakeCredential and TPM2_ActivateCredential, part 1 §24).

/// The template of an endorsement key ("TCG EK Credential Profile", annex B). The value is the NV index of its certificate (§2.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum EndorsementKind {
    /// Template L-1: RSA with 2048 bits, SHA-256, AES-128.
    Rsa2048 = 0x01c0_0002,
    /// Template L-2: P-256, SHA-256, AES-128.
    P256 = 0x01c0_000a,
    /// Template H-3: P-384, SHA-384, AES-256.
    P384 = 0x01c0_0016,
}

impl EndorsementKind {
    /// All templates that this program knows.
    pub const ALL: [EndorsementKind; 3] = [
        EndorsementKind::Rsa2048,
        EndorsementKind::P256,
        EndorsementKind::P384,
    ];

    /// Returns the template whose certificate has this NV index.
    pub fn with_index(index: u32) -> Option<EndorsementKind> {
        EndorsementKind::ALL
            .into_iter()
            .find(|kind| *kind as u32 == index)
    }
}

/// What a TPM tells about one of its endorsement keys. Nothing of it is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endorsement {
    /// The template of the key.
    pub kind: EndorsementKind,
    /// The certificate of the key: X.509, DER.
    pub certificate: Vec<u8>,
    /// The certificates above it, as far as the TPM has them: X.509, DER.
    pub chain: Vec<Vec<u8>>,
}

/// An encrypted secret for a TPM with a certain endorsement key and a certain attestation key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    /// The content of the TPM2B_ID_OBJECT, without its length.
    pub blob: Vec<u8>,
    /// The content of the TPM2B_ENCRYPTED_SECRET, without its length.
    pub secret: Vec<u8>,
}
