//! Google's launch endorsements: the measurements of a firmware for its confidential machines,
//! signed by Google (github.com/google/gce-tcb-verifier, `proto/endorsement.proto`).
//!
//! [`LaunchEndorsement::parse`] verifies nothing. [`LaunchEndorsement::verify`] gives the content if Google's root certifies its
//! signer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::text::hex;
use base::x509::{Certificate, DIGITAL_SIGNATURE, may_certify};
use prost::Message;
use ring::digest::{SHA256, SHA384, digest};
use roots::chain;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, UnixTime};
use webpki::ring::RSA_PSS_2048_8192_SHA256_LEGACY_KEY;
use webpki::{EndEntityCert, KeyUsage};

use super::error::Error;
use super::snp::PredictedDigest;

/// Maximum size of a file in bytes. Genuine ones have 5 KiB.
const MAX_FILE: usize = 1 << 20;
/// The signature algorithm of both the root and the signer.
const SIGNATURE: &dyn SignatureVerificationAlgorithm = RSA_PSS_2048_8192_SHA256_LEGACY_KEY;
/// id-kp-codeSigning, 1.3.6.1.5.5.7.3.3: the content of the OID.
const CODE_SIGNING: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 3];
/// How the PEM form of a root starts.
const PEM: &[u8] = b"-----BEGIN";
/// The end of the year 9999.
const LAST_SECOND: u64 = 253_402_300_799;

/// The SHA-256 of the certificate (DER) that Google publishes as GCE-cc-tcb-root_1.crt.
pub const KNOWN_ROOT: [u8; 32] = [
    0xe8, 0x76, 0xbc, 0x69, 0x78, 0xbf, 0x4f, 0x3d, 0xa4, 0x45, 0xf9, 0x8a, 0x0a, 0x82, 0x36, 0x3c,
    0x8c, 0x0b, 0xae, 0x5a, 0x1f, 0xc0, 0x33, 0xc6, 0xdf, 0x65, 0x84, 0x6a, 0x6c, 0xb0, 0xf1, 0x8c,
];

/// VMLaunchEndorsement.
#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(bytes = "vec", tag = "1")]
    golden: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    signature: Vec<u8>,
}

/// VMGoldenMeasurement. The CA certificates (ca_bundle) are not read, because they are not needed
/// to verify the signer.
#[derive(Clone, PartialEq, Message)]
struct GoldenMessage {
    #[prost(message, optional, tag = "1")]
    timestamp: Option<Timestamp>,
    #[prost(uint64, tag = "2")]
    cl_spec: u64,
    #[prost(bytes = "vec", tag = "3")]
    commit: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    digest: Vec<u8>,
    #[prost(message, optional, tag = "7")]
    sev_snp: Option<SnpMessage>,
    #[prost(message, optional, tag = "8")]
    tdx: Option<TdxMessage>,
}

/// google.protobuf.Timestamp.
#[derive(Clone, PartialEq, Message)]
struct Timestamp {
    #[prost(int64, tag = "1")]
    seconds: i64,
}

/// VMSevSnp.
#[derive(Clone, PartialEq, Message)]
struct SnpMessage {
    #[prost(uint32, tag = "1")]
    svn: u32,
    #[prost(btree_map = "uint32, bytes", tag = "2")]
    measurements: BTreeMap<u32, Vec<u8>>,
    #[prost(uint64, tag = "5")]
    policy: u64,
    #[prost(bytes = "vec", tag = "7")]
    svsm_measurement: Vec<u8>,
}

/// VMTdx.
#[derive(Clone, PartialEq, Message)]
struct TdxMessage {
    #[prost(uint32, tag = "1")]
    svn: u32,
    #[prost(message, repeated, tag = "2")]
    measurements: Vec<TdxMeasurement>,
}

/// VMTdx.Measurement.
#[derive(Clone, PartialEq, Message)]
struct TdxMeasurement {
    #[prost(uint32, tag = "1")]
    ram_gib: u32,
    #[prost(bytes = "vec", tag = "3")]
    mrtd: Vec<u8>,
}

/// The file of an endorsement, not verified.
#[derive(Debug, Clone, PartialEq)]
pub struct LaunchEndorsement {
    signed: Vec<u8>,
    signature: Vec<u8>,
    certificate: Vec<u8>,
    golden: Golden,
}

/// Google's statements about a firmware: a "golden measurement".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Golden {
    /// When Google signed it.
    pub signed_at: SystemTime,
    /// The common name of the signer's certificate.
    pub signer: String,
    /// The number of the change from which the firmware was built, in Google's own repository; 0 if
    /// unknown.
    pub changelist: u64,
    /// The commit from which the firmware was built; empty if unknown.
    pub commit: Vec<u8>,
    /// The SHA-384 of the firmware's file.
    pub firmware: [u8; 48],
    /// What SEV-SNP measures.
    pub snp: Option<Snp>,
    /// What TDX measures.
    pub tdx: Option<Tdx>,
}

/// What SEV-SNP measures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snp {
    /// The security version number of the firmware.
    pub svn: u32,
    /// The launch digest for each number of processors that the hypervisor prepares.
    pub measurements: BTreeMap<u32, PredictedDigest>,
    /// The guest policy with which Google starts such machines, according to Google.
    pub policy: u64,
    /// Whether it also endorses a secure VM service module (SVSM); its launch digest is left out.
    pub has_svsm: bool,
}

/// What TDX measures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tdx {
    /// The security version number of the firmware.
    pub svn: u32,
    /// Each MRTD with the memory in GiB of the machines that have it; 0 means any memory.
    pub measurements: Vec<(u32, [u8; 48])>,
}

impl LaunchEndorsement {
    /// Reads the file of an endorsement.
    pub fn parse(file: &[u8]) -> Result<LaunchEndorsement, Error> {
        if file.len() > MAX_FILE {
            return Err(foreign(format!("it has more than {MAX_FILE} bytes")));
        }
        let outer = File::decode(file).map_err(foreign)?;
        let message = GoldenMessage::decode(&outer.golden[..]).map_err(foreign)?;
        let golden = golden(&message)?;
        Ok(LaunchEndorsement {
            signed: outer.golden,
            signature: outer.signature,
            certificate: message.cert,
            golden,
        })
    }

    /// Returns the content if this root certifies the signer at this time, and the signer signed
    /// it.
    pub fn verify(&self, root: &SignerRoot, now: SystemTime) -> Result<&Golden, Error> {
        root.verify(now)?;
        let wrong = |why: String| {
            Error::Untrusted(format!("the certificate of the endorsement's signer {why}"))
        };
        let fields =
            Certificate::parse(&self.certificate).map_err(|_| wrong("cannot be read".into()))?;
        let leaf = CertificateDer::from(&self.certificate[..]);
        let leaf = EndEntityCert::try_from(&leaf)
            .map_err(|error| wrong(format!("is refused: {}", chain::in_words(&error))))?;
        let anchor = webpki::anchor_from_trusted_cert(&root.0)
            .map_err(|error| untrusted(&format!("cannot be read: {}", chain::in_words(&error))))?;
        leaf.verify_for_usage(
            &[SIGNATURE],
            &[anchor],
            &[],
            UnixTime::since_unix_epoch(since_epoch(now)),
            KeyUsage::required_if_present(CODE_SIGNING),
            None,
            None,
        )
        .map_err(|error| wrong(in_words(&error)))?;
        // the library does not check this
        if !matches!(fields.key_usage(), Some(bits) if bits & DIGITAL_SIGNATURE != 0) {
            return Err(wrong("is not for signatures (key usage)".into()));
        }
        leaf.verify_signature(SIGNATURE, &self.signed, &self.signature)
            .map_err(|_| {
                let text = "the signature of the endorsement is wrong: it is altered, or damaged: fetch it again";
                Error::Untrusted(text.into())
            })?;
        Ok(&self.golden)
    }
}

/// The root that certifies the signers of endorsements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignerRoot(CertificateDer<'static>);

impl SignerRoot {
    /// Reads a file with one certificate, DER or PEM.
    pub fn parse(file: &[u8]) -> Result<SignerRoot, Error> {
        let other = || Error::Foreign("expected one certificate, DER or PEM".into());
        let der = if file.trim_ascii_start().starts_with(PEM) {
            let mut all = CertificateDer::pem_slice_iter(file);
            match (all.next(), all.next()) {
                (Some(Ok(one)), None) => one,
                _ => return Err(other()),
            }
        } else {
            CertificateDer::from(file.to_vec())
        };
        Certificate::parse(&der).map_err(|_| other())?;
        Ok(SignerRoot(der))
    }

    /// Returns the SHA-256 of the certificate.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut value = [0; 32];
        value.copy_from_slice(digest(&SHA256, &self.0).as_ref());
        value
    }

    /// Fails unless it is a CA, and valid at this time: the library does not check roots.
    fn verify(&self, now: SystemTime) -> Result<(), Error> {
        let validity = Certificate::parse(&self.0).and_then(|fields| fields.validity());
        let (from, until) = validity.map_err(|_| untrusted("cannot be read"))?;
        let now = since_epoch(now).as_secs();
        if now < from {
            return Err(untrusted(
                "is not valid yet: is the clock of this machine right?",
            ));
        }
        if now > until {
            return Err(untrusted(
                "has expired: take the one that Google publishes now, and an endorsement that leads to it",
            ));
        }
        if may_certify(&self.0) {
            Ok(())
        } else {
            Err(untrusted("is not a CA certificate (key usage)"))
        }
    }
}

impl Golden {
    /// Fails unless this is the endorsed firmware.
    pub fn check_firmware(&self, file: &[u8]) -> Result<(), Error> {
        let found = digest(&SHA384, file);
        if found.as_ref() == self.firmware {
            Ok(())
        } else {
            Err(Error::Untrusted(format!(
                "it is not the endorsed firmware: its SHA-384 is {}, expected {}",
                hex(found.as_ref()),
                hex(&self.firmware)
            )))
        }
    }

    /// Returns the content as lines for a person.
    pub fn explain(&self) -> String {
        let mut text = format!(
            "Google endorses the firmware with the SHA-384 {}\n  signed {} by {:?}\n",
            hex(&self.firmware),
            base::time::seconds(self.signed_at),
            self.signer,
        );
        text += &match (self.changelist, &self.commit[..]) {
            (0, []) => "  it does not name the source from which it was built\n".to_owned(),
            (0, commit) => format!("  built of commit {}\n", hex(commit)),
            (change, []) => format!("  built of change {change}\n"),
            (change, commit) => format!("  built of change {change}, commit {}\n", hex(commit)),
        };
        if let Some(snp) = &self.snp {
            let counts: Vec<_> = snp.measurements.keys().map(u32::to_string).collect();
            text += &format!(
                "  SEV-SNP: SVN {}, guest policy {:#x}, numbers of processors {}{}\n",
                snp.svn,
                snp.policy,
                counts.join(","),
                if snp.has_svsm {
                    ", and SVSM, which is left out"
                } else {
                    ""
                }
            );
        }
        if let Some(tdx) = &self.tdx {
            let memories: BTreeSet<_> = tdx.measurements.iter().map(|(gib, _)| *gib).collect();
            let memories = memories.into_iter().map(|gib| match gib {
                0 => "any memory".into(),
                gib => format!("{gib} GiB"),
            });
            let memories: Vec<_> = memories.collect();
            text += &format!("  TDX: SVN {}, {}\n", tdx.svn, memories.join(", "));
        }
        text
    }
}

impl Snp {
    /// Returns the launch digests of machines with these numbers of processors; if none is given,
    /// all endorsed ones.
    pub fn digests(&self, processors: &[u32]) -> Result<Vec<PredictedDigest>, Error> {
        if self.measurements.is_empty() {
            return Err(not_endorsed("launch digest of SEV-SNP"));
        }
        if processors.is_empty() {
            return Ok(self.measurements.values().copied().collect());
        }
        let one = |count: &u32| {
            self.measurements.get(count).copied().ok_or_else(|| {
                let known: Vec<_> = self.measurements.keys().map(u32::to_string).collect();
                let known = known.join(",");
                not_endorsed(&format!(
                    "machine with {count} processors, but with {known}"
                ))
            })
        };
        processors.iter().map(one).collect()
    }
}

impl Tdx {
    /// Returns each MRTD of machines with this memory in MiB; if none is given, all endorsed ones.
    pub fn mrtds(&self, memory: Option<u64>) -> Result<Vec<[u8; 48]>, Error> {
        let fits = |gib: u32| gib == 0 || memory.is_none_or(|mib| mib == u64::from(gib) << 10);
        let fitting = self.measurements.iter().filter(|(gib, _)| fits(*gib));
        let mut found = vec![];
        for (_, mrtd) in fitting {
            if !found.contains(mrtd) {
                found.push(*mrtd);
            }
        }
        match (found.is_empty(), memory) {
            (false, _) => Ok(found),
            (true, Some(mib)) => Err(not_endorsed(&format!("machine with {mib} MiB"))),
            (true, None) => Err(not_endorsed("MRTD of TDX")),
        }
    }
}

/// Returns the content of a message.
fn golden(message: &GoldenMessage) -> Result<Golden, Error> {
    let seconds = message.timestamp.as_ref().map(|time| time.seconds);
    let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok());
    let seconds = seconds.filter(|seconds| *seconds <= LAST_SECOND);
    let snp = message.sev_snp.as_ref().map(|snp| {
        let measurements = snp.measurements.iter();
        let measurements =
            measurements.map(|(count, value)| Ok((*count, measurement(value, "MEASUREMENT")?)));
        Ok::<_, Error>(Snp {
            svn: snp.svn,
            measurements: measurements.collect::<Result<_, Error>>()?,
            policy: snp.policy,
            has_svsm: !snp.svsm_measurement.is_empty(),
        })
    });
    let tdx = message.tdx.as_ref().map(|tdx| {
        let measurements = tdx.measurements.iter();
        let measurements =
            measurements.map(|one| Ok((one.ram_gib, measurement(&one.mrtd, "MRTD")?)));
        Ok::<_, Error>(Tdx {
            svn: tdx.svn,
            measurements: measurements.collect::<Result<_, Error>>()?,
        })
    });
    let signer = Certificate::parse(&message.cert).ok();
    let signer = signer.and_then(|certificate| certificate.common_name());
    Ok(Golden {
        signed_at: UNIX_EPOCH
            + Duration::from_secs(seconds.ok_or_else(|| foreign("it does not contain a time"))?),
        signer: signer.unwrap_or_default().to_owned(),
        changelist: message.cl_spec,
        commit: message.commit.clone(),
        firmware: measurement(&message.digest, "the digest of the firmware")?,
        snp: snp.transpose()?,
        tdx: tdx.transpose()?,
    })
}

fn measurement(bytes: &[u8], what: &str) -> Result<[u8; 48], Error> {
    let len = bytes.len();
    bytes
        .try_into()
        .map_err(|_| foreign(format!("{what} has {len} bytes, expected 48")))
}

fn foreign(why: impl fmt::Display) -> Error {
    Error::Foreign(format!("it is not a launch endorsement of Google: {why}"))
}

fn untrusted(why: &str) -> Error {
    Error::Untrusted(format!("the root {why}"))
}

fn not_endorsed(what: &str) -> Error {
    Error::NotFound(format!("Google endorses no {what}"))
}

fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the error as a clause about the signer's certificate.
fn in_words(error: &webpki::Error) -> String {
    use webpki::Error::*;
    match error {
        CertExpired { .. } => "has expired: fetch an endorsement that Google signed later".into(),
        CertNotValidYet { .. } => "is not valid yet: is the clock of this machine right?".into(),
        UnknownIssuer | InvalidSignatureForPublicKey => "is not signed by the given root".into(),
        CaUsedAsEndEntity => "is a CA certificate".into(),
        RequiredEkuNotFoundContext(_) => {
            "is for another use than signatures of code (extended key usage)".into()
        }
        error => format!("is refused: {}", chain::in_words(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// An endorsement that nobody signed.
    fn unsigned() -> GoldenMessage {
        GoldenMessage {
            timestamp: Some(Timestamp {
                seconds: 1_773_273_600,
            }),
            cl_spec: 123,
            commit: vec![0xc0; 20],
            cert: vec![],
            digest: vec![0xd0; 48],
            sev_snp: Some(SnpMessage {
                svn: 2,
                measurements: [(2, vec![2; 48]), (4, vec![4; 48])].into(),
                policy: 0x7_0000,
                svsm_measurement: vec![],
            }),
            tdx: Some(TdxMessage {
                svn: 3,
                measurements: [(16, 1), (16, 2), (32, 3), (0, 4), (32, 4)]
                    .map(|(ram_gib, byte)| TdxMeasurement {
                        ram_gib,
                        mrtd: vec![byte; 48],
                    })
                    .into(),
            }),
        }
    }

    fn file(golden: &GoldenMessage) -> Vec<u8> {
        let golden = golden.encode_to_vec();
        let signature = vec![0x51; 512];
        File { golden, signature }.encode_to_vec()
    }

    fn parsed(golden: &GoldenMessage) -> Golden {
        LaunchEndorsement::parse(&file(golden)).unwrap().golden
    }

    #[test]
    fn only_the_numbers_of_processors_that_are_asked_for_count() {
        let snp = parsed(&unsigned()).snp.unwrap();
        assert_eq!(snp.digests(&[]).unwrap(), [[2; 48], [4; 48]]);
        assert_eq!(snp.digests(&[4]).unwrap(), [[4; 48]]);
        assert_eq!(
            snp.digests(&[4, 3]).unwrap_err().to_string(),
            "Google endorses no machine with 3 processors, but with 2,4"
        );
    }

    #[test]
    fn only_the_memory_that_is_asked_for_counts_and_each_mrtd_once() {
        let mut message = unsigned();
        let tdx = parsed(&message).tdx.unwrap();
        let bytes = |memory| -> Vec<u8> {
            let all = tdx.mrtds(memory).unwrap();
            all.iter().map(|mrtd| mrtd[0]).collect()
        };
        assert_eq!(bytes(None), [1, 2, 3, 4]);
        assert_eq!(bytes(Some(16 << 10)), [1, 2, 4]);
        assert_eq!(bytes(Some(7)), [4]);
        message.tdx.as_mut().unwrap().measurements.truncate(2);
        let tdx = parsed(&message).tdx.unwrap();
        let error = tdx.mrtds(Some(32 << 10)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Google endorses no machine with 32768 MiB"
        );
    }

    #[test]
    fn an_endorsement_without_measurements_is_no_word_for_all_machines() {
        let mut message = unsigned();
        message.tdx.as_mut().unwrap().measurements.clear();
        message.sev_snp.as_mut().unwrap().measurements.clear();
        let golden = parsed(&message);
        let error = golden.tdx.unwrap().mrtds(None).unwrap_err();
        assert_eq!(error.to_string(), "Google endorses no MRTD of TDX");
        let error = golden.snp.unwrap().digests(&[]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Google endorses no launch digest of SEV-SNP"
        );
    }

    #[test]
    fn a_person_reads_what_is_endorsed() {
        let mut message = unsigned();
        let text = parsed(&message).explain();
        for part in [
            &"d0".repeat(48)[..],
            "signed 2026-03-12T00:00:00Z",
            "change 123, commit c0c0",
            "SEV-SNP: SVN 2, guest policy 0x70000, numbers of processors 2,4\n",
            "TDX: SVN 3, any memory, 16 GiB, 32 GiB\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        message.sev_snp.as_mut().unwrap().svsm_measurement = vec![7; 48];
        message.tdx = None;
        let text = parsed(&message).explain();
        assert!(text.contains("SVSM, which is left out"), "{text}");
        assert!(!text.contains("TDX"), "{text}");
    }

    #[test]
    fn another_firmware_is_refused_with_both_digests() {
        let golden = parsed(&unsigned());
        let error = golden.check_firmware(b"a firmware").unwrap_err();
        let (error, found) = (
            error.to_string(),
            hex(digest(&SHA384, b"a firmware").as_ref()),
        );
        assert!(
            error.contains(&found) && error.contains(&"d0".repeat(48)),
            "{error}"
        );
    }

    #[test]
    fn content_of_another_length_is_named() {
        let refusal = |change: fn(&mut GoldenMessage)| {
            let mut message = unsigned();
            change(&mut message);
            LaunchEndorsement::parse(&file(&message))
                .unwrap_err()
                .to_string()
        };
        for (error, expected) in [
            (
                refusal(|it| it.timestamp = None),
                "it does not contain a time",
            ),
            (
                refusal(|it| it.timestamp = Some(Timestamp { seconds: i64::MAX })),
                "it does not contain a time",
            ),
            (
                refusal(|it| it.digest.clear()),
                "the digest of the firmware has 0 bytes, expected 48",
            ),
            (
                refusal(|it| {
                    let snp = it.sev_snp.as_mut().unwrap();
                    snp.measurements.insert(8, vec![8; 32]);
                }),
                "MEASUREMENT has 32 bytes",
            ),
            (
                refusal(|it| {
                    let tdx = it.tdx.as_mut().unwrap();
                    tdx.measurements[0].mrtd.push(1);
                }),
                "MRTD has 49 bytes",
            ),
        ] {
            assert!(error.contains("not a launch endorsement"), "{error}");
            assert!(error.contains(expected), "{expected}: {error}");
        }
        let long = vec![0; MAX_FILE + 1];
        let error = LaunchEndorsement::parse(&long).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }

    #[test]
    fn altered_files_end_in_an_error_or_in_content_without_a_signature() {
        let valid = file(&unsigned());
        let root = SignerRoot(CertificateDer::from(vec![]));
        for bytes in mutations(&valid, 5000) {
            if let Ok(read) = LaunchEndorsement::parse(&bytes) {
                read.golden.explain();
                assert!(read.verify(&root, UNIX_EPOCH).is_err());
            }
        }
    }
}
