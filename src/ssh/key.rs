//! Public keys in three formats: the wire format of SSH (RFC 4253 §6.6), a line of a `.pub` file,
//! and the unencrypted part of OpenSSH's private key file (PROTOCOL.key of its sources).

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use ring::signature::{Ed25519KeyPair, KeyPair};
use zeroize::Zeroizing;

use super::wire::{WireError, WireReader, Writer};
use base::crypto::{self, Secret};

/// Name of the kind of key that this program makes (RFC 8709 §4).
pub const ED25519: &str = "ssh-ed25519";
/// Length in bytes of such a key and of its seed.
pub const ED25519_LEN: usize = 32;
/// Length in bytes of an Ed25519 key in the wire format (RFC 8709 §4): name and key, each after its length.
pub const ED25519_BLOB_LEN: usize = 4 + ED25519.len() + 4 + ED25519_LEN;

const BEGIN: &str = "-----BEGIN OPENSSH PRIVATE KEY-----";
const END: &str = "-----END OPENSSH PRIVATE KEY-----";
const MAGIC: &[u8] = b"openssh-key-v1\0";
/// Base64 characters per line of a private key file, as in ssh-keygen.
const LINE: usize = 70;
/// The unencrypted private part is padded to a multiple of this many bytes (PROTOCOL.key §3).
const BLOCK: usize = 8;

/// A kind of key that can be certified: its name, the name of its certificates, and the number of strings after the name. These are
/// the kinds that OpenSSH accepts by default (ssh-keygen(1) -t); DSA is none of them since 7.0.
pub(super) struct Kind {
    name: &'static str,
    pub(super) certificate: &'static str,
    fields: usize,
}

const KINDS: [Kind; 7] = [
    Kind {
        name: ED25519,
        certificate: "ssh-ed25519-cert-v01@openssh.com",
        fields: 1,
    },
    Kind {
        name: "ssh-rsa",
        certificate: "ssh-rsa-cert-v01@openssh.com",
        fields: 2,
    },
    Kind {
        name: "ecdsa-sha2-nistp256",
        certificate: "ecdsa-sha2-nistp256-cert-v01@openssh.com",
        fields: 2,
    },
    Kind {
        name: "ecdsa-sha2-nistp384",
        certificate: "ecdsa-sha2-nistp384-cert-v01@openssh.com",
        fields: 2,
    },
    Kind {
        name: "ecdsa-sha2-nistp521",
        certificate: "ecdsa-sha2-nistp521-cert-v01@openssh.com",
        fields: 2,
    },
    Kind {
        name: "sk-ssh-ed25519@openssh.com",
        certificate: "sk-ssh-ed25519-cert-v01@openssh.com",
        fields: 2,
    },
    Kind {
        name: "sk-ecdsa-sha2-nistp256@openssh.com",
        certificate: "sk-ecdsa-sha2-nistp256-cert-v01@openssh.com",
        fields: 3,
    },
];

/// A well-formed public key of a kind that can be certified.
#[derive(Clone)]
pub struct PublicKey {
    pub(super) kind: &'static Kind,
    blob: Vec<u8>,
    /// The comment of the line of a `.pub` file, which names the owner; may be empty.
    comment: String,
}

impl PublicKey {
    /// Makes the Ed25519 key of these bytes.
    pub(super) fn ed25519(key: &[u8]) -> PublicKey {
        let blob = Writer::default()
            .string(ED25519.as_bytes())
            .string(key)
            .bytes()
            .to_vec();
        PublicKey {
            kind: &KINDS[0],
            blob,
            comment: String::new(),
        }
    }

    /// Parses the bytes that SSH sends (RFC 4253 §6.6).
    pub fn from_blob(blob: &[u8]) -> Result<PublicKey, Error> {
        let mut reader = WireReader::new(blob);
        let name = reader.string()?;
        let kind = KINDS.iter().find(|kind| kind.name.as_bytes() == name);
        let kind = kind.ok_or_else(|| Error::Kind(String::from_utf8_lossy(name).into_owned()))?;
        for _ in 0..kind.fields {
            let field = reader.string()?;
            if field.is_empty() || (kind.name == ED25519 && field.len() != ED25519_LEN) {
                return Err(Error::Malformed);
            }
        }
        reader.end()?;
        Ok(PublicKey {
            kind,
            blob: blob.to_vec(),
            comment: String::new(),
        })
    }

    /// Parses the name of a certificate and the fields of the key in it (PROTOCOL.certkeys). `reader` is at the fields.
    pub(super) fn from_certificate(
        name: &[u8],
        reader: &mut WireReader<'_>,
    ) -> Result<PublicKey, Error> {
        let kind = KINDS
            .iter()
            .find(|kind| kind.certificate.as_bytes() == name);
        let kind = kind.ok_or_else(|| Error::Kind(String::from_utf8_lossy(name).into_owned()))?;
        let mut blob = Writer::default().string(kind.name.as_bytes());
        for _ in 0..kind.fields {
            blob = blob.string(reader.string()?);
        }
        PublicKey::from_blob(blob.bytes())
    }

    /// Returns the name of the kind of key, as `ssh-ed25519`.
    pub fn kind(&self) -> &'static str {
        self.kind.name
    }

    /// Returns the fingerprint as ssh-keygen prints it: `SHA256:` and the digest in base64 without padding.
    pub fn fingerprint(&self) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, &self.blob);
        format!("SHA256:{}", STANDARD_NO_PAD.encode(digest))
    }

    /// Parses the first line of a `.pub` file: name, base64, comment.
    pub fn from_line(text: &str) -> Result<PublicKey, Error> {
        if text.contains("PRIVATE KEY-----") {
            return Err(Error::Private);
        }
        let line = text
            .lines()
            .map(str::trim)
            .find(|line| !line.is_empty() && !line.starts_with('#'));
        let line = line.ok_or(Error::Empty)?;
        let (name, rest) = line.split_once([' ', '\t']).ok_or(Error::Malformed)?;
        let (base64, comment) = rest
            .trim_start()
            .split_once([' ', '\t'])
            .unwrap_or((rest.trim_start(), ""));
        if name.ends_with("-cert-v01@openssh.com") {
            return Err(Error::Kind(name.into()));
        }
        let blob = STANDARD.decode(base64).map_err(|_| Error::Malformed)?;
        let key = Self::from_blob(&blob)?;
        if key.kind.name != name {
            return Err(Error::Malformed);
        }
        Ok(PublicKey {
            comment: comment.trim().into(),
            ..key
        })
    }

    /// Parses the public part of OpenSSH's private key file, which may be encrypted; the private part is not read.
    pub fn from_private_key_file(text: &str) -> Result<PublicKey, Error> {
        let text = text.trim();
        if text.is_empty() {
            return Err(Error::Empty);
        }
        let base64 = text
            .strip_prefix(BEGIN)
            .and_then(|text| text.strip_suffix(END))
            .ok_or(Error::Malformed)?;
        // allocates the full capacity first: a string that grows leaves copies of the private key in freed memory
        let mut compact = Zeroizing::new(String::with_capacity(base64.len()));
        compact.extend(base64.chars().filter(|c| !c.is_ascii_whitespace()));
        let mut bytes = Zeroizing::new(vec![0; base64::decoded_len_estimate(compact.len())]);
        let len = STANDARD
            .decode_slice(compact.as_bytes(), &mut bytes)
            .map_err(|_| Error::Malformed)?;
        let body = bytes[..len].strip_prefix(MAGIC).ok_or(Error::Malformed)?;
        let mut reader = WireReader::new(body);
        let (_cipher, _kdf, _kdf_options) = (reader.string()?, reader.string()?, reader.string()?);
        match reader.u32()? {
            1 => Self::from_blob(reader.string()?),
            _ => Err(Error::Malformed),
        }
    }

    /// Returns the bytes that SSH sends.
    pub fn blob(&self) -> &[u8] {
        &self.blob
    }

    /// Returns the bytes after the name.
    pub(super) fn fields(&self) -> &[u8] {
        &self.blob[4 + self.kind.name.len()..]
    }

    /// Returns whether the line of a `.pub` file is a certificate of this key (PROTOCOL.certkeys:
    /// its name, a nonce, the key). Its issuer and its content are not checked.
    pub(super) fn is_certified_in(&self, line: &str) -> bool {
        let certified = || {
            let (name, rest) = line.split_once(' ')?;
            let blob = STANDARD.decode(rest.split(' ').next()?).ok()?;
            let mut reader = WireReader::new(&blob);
            let is_named =
                reader.string().ok()? == name.as_bytes() && name == self.kind.certificate;
            let nonce = reader.string().ok()?.len();
            Some(is_named && blob[4 + name.len() + 4 + nonce..].starts_with(self.fields()))
        };
        certified().unwrap_or(false)
    }

    /// Returns the comment, which names the owner; may be empty.
    pub fn comment(&self) -> &str {
        &self.comment
    }

    /// Returns the line of a `.pub` file, without comment and line break.
    pub fn line(&self) -> String {
        line(self.kind.name, &self.blob)
    }
}

impl PartialEq for PublicKey {
    /// Compares the keys without their comments.
    fn eq(&self, other: &Self) -> bool {
        self.blob == other.blob
    }
}

impl Eq for PublicKey {}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line())
    }
}

/// Makes a new Ed25519 key. Returns the content of its private key file, which no passphrase protects, and the public key.
pub fn generate() -> (Secret, PublicKey) {
    let seed = Secret::random(ED25519_LEN);
    let pair =
        Ed25519KeyPair::from_seed_unchecked(seed.expose()).expect("a seed of this length is a key");
    let (public, check) = (pair.public_key().as_ref(), crypto::random());
    let check = u32::from_ne_bytes(check);
    let pair = Zeroizing::new([seed.expose(), public].concat());
    let private = Writer::default()
        .u32(check)
        .u32(check)
        .string(ED25519.as_bytes())
        .string(public)
        .string(&pair);
    let mut private = private.string(b"");
    for padding in (1..).take((BLOCK - private.bytes().len() % BLOCK) % BLOCK) {
        private = private.raw(&[padding]);
    }
    let public = PublicKey::ed25519(public);
    let none = b"none";
    let file = Writer::default()
        .raw(MAGIC)
        .string(none)
        .string(none)
        .string(b"")
        .u32(1);
    let file = file.string(public.blob()).string(private.bytes());
    let base64 = Zeroizing::new(STANDARD.encode(file.bytes()));
    let mut text = Vec::with_capacity(2 * base64.len() + BEGIN.len() + END.len());
    for line in [BEGIN.as_bytes()]
        .into_iter()
        .chain(base64.as_bytes().chunks(LINE))
        .chain([END.as_bytes()])
    {
        text.extend_from_slice(line);
        text.push(b'\n');
    }
    (Secret::new(text), public)
}

/// Returns name and base64.
pub(super) fn line(name: &str, blob: &[u8]) -> String {
    format!("{name} {}", STANDARD.encode(blob))
}

/// Why a text or bytes are not a public key that can be certified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// There is no text.
    Empty,
    /// The format is wrong.
    Malformed,
    /// It is a private key instead of a public key.
    Private,
    /// Keys of this kind cannot be certified.
    Kind(String),
}

impl From<WireError> for Error {
    fn from(_: WireError) -> Error {
        Error::Malformed
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Empty => f.write_str("it contains no key"),
            Error::Malformed => f.write_str("it is not an SSH key in OpenSSH's format"),
            Error::Private => {
                f.write_str("it is a private key; use the public key, whose file name ends in .pub")
            }
            Error::Kind(name) => {
                let known: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
                let name: String = name.chars().take(60).collect();
                write!(
                    f,
                    "keys of the kind {name:?} cannot be certified; known: {}",
                    known.join(", ")
                )
            }
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    // the name in RFC 8709, with the golden CA key of src/ssh/mod.rs
    const LINE: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILR0FseonmwTcSWFE0usA7Jhv/450JfmwMdC3i5wcbSI someone@some.where";

    #[test]
    fn a_line_reads_back_with_its_comment() {
        let key = PublicKey::from_line(&format!("# a comment\n\n{LINE}\nmore")).unwrap();
        assert_eq!(format!("{} {}", key.line(), key.comment()), LINE);
        assert_eq!(PublicKey::from_blob(key.blob()).unwrap(), key);
    }

    #[test]
    fn what_is_no_public_key_is_refused_by_reason() {
        for (text, expected) in [
            ("", Error::Empty),
            ("\n# nothing\n", Error::Empty),
            ("ssh-ed25519", Error::Malformed),
            ("ssh-ed25519 !", Error::Malformed),
            ("ssh-ed25519 AAAA", Error::Malformed),
            (&LINE.replace("ssh-ed25519 ", "ssh-rsa "), Error::Malformed),
            (BEGIN, Error::Private),
            (
                "ssh-ed25519-cert-v01@openssh.com AAAA",
                Error::Kind("ssh-ed25519-cert-v01@openssh.com".into()),
            ),
            ("ssh-dss AAAAB3NzaC1kc3M=", Error::Kind("ssh-dss".into())),
        ] {
            assert_eq!(PublicKey::from_line(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn a_generated_key_file_holds_the_public_key() {
        let (file, public) = generate();
        let text = std::str::from_utf8(file.expose()).unwrap();
        assert_eq!(PublicKey::from_private_key_file(text).unwrap(), public);
        assert!(text.lines().all(|line| line.len() <= super::LINE));
        assert_ne!(generate().1, public);
    }

    #[test]
    fn mutated_files_give_a_key_or_an_error() {
        let (file, public) = generate();
        let files = mutations(file.expose(), 20_000)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let good = files
            .filter(|text| PublicKey::from_private_key_file(text) == Ok(public.clone()))
            .count();
        assert!((10..20_000).contains(&good), "{good}");
        let lines = mutations(LINE.as_bytes(), 20_000)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let good = lines.filter_map(|text| PublicKey::from_line(&text).ok());
        let good = good
            .inspect(|key| assert_eq!(PublicKey::from_line(&key.line()).as_ref(), Ok(key)))
            .count();
        assert!((10..20_000).contains(&good), "{good}");
        let blob = PublicKey::from_line(LINE).unwrap().blob;
        let good = mutations(&blob, 20_000)
            .filter(|bytes| PublicKey::from_blob(bytes).is_ok())
            .count();
        assert!((10..20_000).contains(&good), "{good}");
    }
}
