//! The common part of the SEV-SNP variants: the check of the signature on the chip's report, and of
//! the report's content. `attest` describes the instance info, which contains the report.

use std::sync::Arc;

pub use attest::snp::*;
use hardware::refusal::{Kind, Refusal};
use hardware::snp::certificate::ChipCertificate;
use hardware::snp::chain::{Chain, Fetched, check_list};
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::requirements::{RevocationCheck, SnpRequirements};
use hardware::snp::tcb::Product;
use hardware::{Unavailable, snp};
use roots::chain::in_words;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};

use super::constellation::snp::Enforcement;
use super::document::Document;
use super::policy::{Fault, PolicyError};
use super::sources::Sources;
use super::{PlatformClaims, Policy};
use proto::attested::Collateral;

/// Maximum number of certificates that a machine sends in addition to its chip's: ASK and ARK.
const MAX_CHAIN: usize = 2;
/// Why a report without a certificate of its chip is not judged.
const NO_LEAF: &str = "the certificate of the chip is not available";

/// Returns the certificates that the machine sent, without the one of the chip's key.
fn sent_chain(info: &InstanceInfo) -> Result<Vec<Vec<u8>>, Refusal> {
    let chain = info.cert_chain.as_ref();
    chain.map_or(Ok(vec![]), |chain| several(&chain.0))
}

/// The collateral for the judgement of a report.
struct Needed {
    /// The certificate of the chip's or the cloud's key that the machine sent.
    sent: Option<Vec<u8>>,
    product: Product,
    signer: ReportSigner,
}

impl Needed {
    fn of(report: &Report, info: &InstanceInfo) -> Result<Needed, Refusal> {
        let sent = info.report_signer.as_ref();
        let sent = sent.map(|pem| only(&pem.0)).transpose()?;
        let signer = report.signer()?;
        let product = match (report.cpuid, &sent) {
            (Some(cpuid), _) => Product::of(cpuid)?,
            (None, Some(leaf)) => ChipCertificate::parse(leaf)?.product,
            // newer chips have newer report versions
            (None, None) => Product::Milan,
        };
        Ok(Needed {
            sent,
            product,
            signer,
        })
    }

    /// Returns the collateral that the sources have.
    fn fetch(&self, report: &Report, sources: &dyn Sources) -> Result<Arc<Fetched>, Unavailable> {
        match self.sent {
            Some(_) => sources.snp_authority(self.product, self.signer),
            None => sources.snp_certificates(report, self.product),
        }
    }
}

/// Returns the collateral for a document, or `None` if these sources do not have it.
pub fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Collateral> {
    let document: Document = serde_json::from_slice(document).ok()?;
    let info: InstanceInfo = serde_json::from_slice(&document.instance_info?.0).ok()?;
    collateral_of(&info, sources)
}

/// Like [`collateral`], for the instance info of a document.
pub fn collateral_of(info: &InstanceInfo, sources: &dyn Sources) -> Option<Collateral> {
    let report = Report::parse(&info.attestation_report.0).ok()?;
    let needed = Needed::of(&report, info).ok()?;
    let fetched = needed.fetch(&report, sources).ok()?;
    Some(Collateral {
        amd_chip: fetched.leaf.clone().unwrap_or_default(),
        amd_authority: fetched.intermediate.clone(),
        amd_revoked: fetched.revoked.clone().unwrap_or_default(),
        ..Collateral::default()
    })
}

/// A trusted root, with the certificates below it that machines need not send.
struct Authority {
    /// The product; `None` for a root in the policy, which may belong to any product.
    product: Option<Product>,
    root: Vec<u8>,
    between: Vec<Vec<u8>>,
}

impl Authority {
    /// Returns whether the root is trusted for machines of this product.
    fn is_of(&self, product: Product) -> bool {
        self.product.is_none_or(|of| of == product)
    }

    /// Returns the name of the root in claims.
    fn name(&self) -> String {
        let product = self.product.as_ref();
        product.map_or("amdRootKey".into(), |product| format!("ARK-{product}"))
    }
}

/// The data that the judgement of a report needs in addition to the report.
pub struct Collected {
    product: Product,
    /// The certificate of the chip's or the cloud's key.
    leaf: Vec<u8>,
    /// The CA certificates that are not built in.
    between: Vec<Vec<u8>>,
    /// AMD's revocation list, or why it is missing.
    revoked: Result<Vec<u8>, Unavailable>,
}

impl Collected {
    /// Returns each chain to this root.
    fn chains<'a>(
        &'a self,
        authority: &'a Authority,
        revoked: Option<&'a [u8]>,
    ) -> impl Iterator<Item = Chain<'a>> {
        let intermediates = authority.between.iter().chain(&self.between);
        intermediates.map(move |intermediate| Chain {
            leaf: &self.leaf,
            intermediate,
            root: &authority.root,
            revoked,
        })
    }
}

/// Judges reports of chips.
pub struct ReportJudge {
    authorities: Vec<Authority>,
    demands: SnpRequirements,
    policy: Arc<Policy>,
    sources: Arc<dyn Sources>,
    /// As [`Sources::fetches`].
    fetches: bool,
}

impl ReportJudge {
    /// Makes a judge by a policy. Trusts AMD's roots; with `amdRootKey` only this root, which may
    /// be another one, with `amdSigningKey` below it.
    pub fn new(
        policy: &Arc<Policy>,
        sources: &Arc<dyn Sources>,
    ) -> Result<ReportJudge, PolicyError> {
        Ok(ReportJudge {
            authorities: authorities(policy)?,
            demands: policy.snp().of_report(),
            policy: policy.clone(),
            sources: sources.clone(),
            fetches: sources.fetches(),
        })
    }

    /// Returns whether the policy limits the firmware (by measurement, signer or MAA) or lists each
    /// chip.
    pub fn pins_firmware(&self) -> bool {
        let signer = self.policy.snp().firmware_signer_config.as_ref();
        let knows_signers = signer.is_some_and(|it| match it.enforcement_policy {
            Enforcement::WarnOnly => false,
            Enforcement::Equal => !it.accepted_key_digests.is_empty(),
            // a signer that the policy does not list is refused without MAA's token
            Enforcement::MaaFallback => true,
        });
        knows_signers || self.demands.pins_firmware()
    }

    /// Returns what a machine's report proves, if its REPORT_DATA are these bytes.
    pub fn judge(
        &self,
        info: &InstanceInfo,
        report_data: &[u8; 64],
        now: UnixTime,
    ) -> Result<PlatformClaims, Refusal> {
        let report = Report::parse(&info.attestation_report.0)?;
        if report.report_data != *report_data {
            let text = "REPORT_DATA is not that of this connection and its key: the report was made for another one";
            return Err(Kind::Nonce.because(text).of("REPORT_DATA"));
        }
        let signer = &report.id_key_digest;
        if self.policy.snp().check_firmware_signer(signer)?.is_some() {
            let refusal = Kind::Measurement.because(
                "firmwareSignerConfig does not name ID_KEY_DIGEST, and Microsoft's attestation service (MAAFallback) knows only machines of Azure",
            );
            return Err(refusal.of("firmwareSignerConfig"));
        }
        self.judge_report(&report, &self.collect(&report, info)?, now)
    }

    /// Collects what the judgement of a report needs: what the machine sent, and the rest from the
    /// sources. Only this step may send a request, so the caller has already checked REPORT_DATA
    /// and the firmware's signer.
    pub fn collect(&self, report: &Report, info: &InstanceInfo) -> Result<Collected, Refusal> {
        let needed = Needed::of(report, info)?;
        if needed.sent.is_none() {
            self.check_before_fetching(report, &needed)?;
        }
        let mut between = sent_chain(info)?;
        let fetched = needed.fetch(report, &*self.sources);
        let leaf = match (needed.sent, &fetched) {
            (Some(sent), _) => sent,
            (None, Ok(fetched)) => {
                let missing = || Kind::Collateral.because(NO_LEAF);
                fetched.leaf.clone().ok_or_else(missing)?
            }
            (None, Err(why)) => return Err(why.clone().into()),
        };
        between.extend(fetched.iter().map(|fetched| fetched.intermediate.clone()));
        Ok(Collected {
            product: needed.product,
            leaf,
            between,
            revoked: fetched.and_then(|fetched| fetched.revoked.clone()),
        })
    }

    /// Returns what a machine's report proves, without I/O. It is judged with the first root and
    /// intermediate certificate that lead to the chip.
    pub fn judge_report(
        &self,
        report: &Report,
        collected: &Collected,
        now: UnixTime,
    ) -> Result<PlatformClaims, Refusal> {
        let mut refusal = None;
        for authority in self.authorities_of(collected.product) {
            // a list that the root did not sign proves nothing, whoever sent it
            let list = collected.revoked.as_deref().map_err(Unavailable::clone);
            let list = list.and_then(|list| {
                check_list(list, &authority.root, now)?;
                Ok(list)
            });
            for chain in collected.chains(authority, list.as_ref().ok().copied()) {
                match snp::verify(report, &chain, &self.demands, now) {
                    Ok(mut claims) => {
                        if let Err(why) = &list {
                            self.accept_without_list(why)?;
                        }
                        claims.signed_by = format!("{}, {}", authority.name(), claims.signed_by);
                        return Ok(claims);
                    }
                    // Keep trying. Remember this error: if the issuer matched, it is the useful
                    // one.
                    Err(another) if refusal.is_none() || another.kind != Kind::Chain => {
                        refusal = Some(another);
                    }
                    Err(_) => {}
                }
            }
        }
        Err(refusal.unwrap_or_else(|| no_root(collected.product)))
    }

    /// Returns the certificates with which a report was accepted, in PEM, from the one of the
    /// chip's key up to the root.
    pub fn certificates(
        &self,
        report: &Report,
        collected: &Collected,
        now: UnixTime,
    ) -> Result<Vec<u8>, Refusal> {
        let chains = self
            .authorities_of(collected.product)
            .flat_map(|authority| collected.chains(authority, None));
        let accepted = |chain: &Chain<'_>| snp::verify(report, chain, &self.demands, now).is_ok();
        let chain = { chains }.find(accepted);
        let chain = chain.ok_or_else(|| no_root(collected.product))?;
        Ok([chain.leaf, chain.intermediate, chain.root]
            .map(pem)
            .join(&b'\n'))
    }

    /// Returns the roots that are trusted for machines of a product.
    fn authorities_of(&self, product: Product) -> impl Iterator<Item = &Authority> {
        self.authorities
            .iter()
            .filter(move |one| one.is_of(product))
    }

    /// Checks a report for which no certificate of the chip is available. Anybody can write a
    /// report that names a chip, so its certificate is fetched only if the machine would be
    /// accepted with it.
    fn check_before_fetching(&self, report: &Report, needed: &Needed) -> Result<(), Refusal> {
        if needed.signer == ReportSigner::Vlek {
            return Err(Kind::Unproven.because(
                "the document lacks the certificate of the VLEK, which only the cloud has",
            ));
        }
        let product = needed.product;
        if self.authorities_of(product).next().is_none() {
            return Err(no_root(product));
        }
        snp::check_claims(report, product, &self.demands)
    }

    /// Accepts a chip without a valid list of revoked certificates, unless the policy requires the
    /// list.
    fn accept_without_list(&self, why: &Unavailable) -> Result<(), Refusal> {
        let is_demanded = match self.demands.revocation_list {
            RevocationCheck::Required => true,
            RevocationCheck::Unsaid => self.fetches,
            RevocationCheck::Optional => false,
        };
        if is_demanded {
            return Err(Kind::Collateral.because(format!(
                "the list of AMD's revoked certificates is missing, but the policy requires it (unless \"revocationList\":\"optional\"): \
                 {why}"
            )));
        }
        log::warn!("cannot check whether AMD has revoked the chip's certificates: {why}");
        Ok(())
    }
}

fn no_root(product: Product) -> Refusal {
    Kind::Chain.because(format!("this policy accepts no root of a {product}"))
}

fn authorities(policy: &Policy) -> Result<Vec<Authority>, PolicyError> {
    let of_amd = [
        (Product::Milan, &roots::AMD_MILAN),
        (Product::Genoa, &roots::AMD_GENOA),
        (Product::Turin, &roots::AMD_TURIN),
    ];
    let mut authorities: Vec<_> = of_amd
        .into_iter()
        .map(|(product, root)| Authority {
            product: Some(product),
            root: root.root.der.to_vec(),
            between: root.between.iter().map(|one| one.der.to_vec()).collect(),
        })
        .collect();
    let wrong = |why: String| Fault::Requirement.because(why);
    let named = |name: &str, pem: &Option<String>| {
        let pem = pem.as_deref().filter(|pem| !pem.is_empty());
        pem.map(|pem| {
            only(pem.as_bytes())
                .map_err(|_| wrong(format!("{name}: expected a certificate in PEM, or nothing")))
        })
        .transpose()
    };
    let demands = policy.snp();
    let root = named("amdRootKey", &demands.amd_root_key)?;
    let between = named("amdSigningKey", &demands.amd_signing_key)?;
    if let Some(root) = root {
        authorities.retain(|one| one.root == root);
        if authorities.is_empty() {
            webpki::anchor_from_trusted_cert(&CertificateDer::from(root.as_slice()))
                .map_err(|error| wrong(format!("amdRootKey: {}", in_words(&error))))?;
            authorities.push(Authority {
                product: None,
                root,
                between: vec![],
            });
        }
    }
    for authority in &mut authorities {
        authority.between.extend(between.clone());
    }
    Ok(authorities)
}

/// Returns the certificate in PEM; there must be exactly one.
fn only(pem: &[u8]) -> Result<Vec<u8>, Refusal> {
    match <[Vec<u8>; 1]>::try_from(several(pem)?) {
        Ok([one]) => Ok(one),
        Err(_) => Err(Kind::Malformed.because("the certificate of the chip is not one in PEM")),
    }
}

/// Returns a few certificates in PEM.
fn several(pem: &[u8]) -> Result<Vec<Vec<u8>>, Refusal> {
    let all = CertificateDer::pem_slice_iter(pem).take(MAX_CHAIN + 1);
    let all: Result<Vec<_>, _> = all.map(|one| one.map(|one| one.to_vec())).collect();
    match all {
        Ok(all) if all.len() <= MAX_CHAIN => Ok(all),
        _ => Err(Kind::Malformed.because(format!(
            "the certificates of the chip are not at most {MAX_CHAIN} in PEM"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_of_the_table_becomes_pem_without_what_follows_it() {
        let der = roots::AMD_MILAN.root.der;
        let padded = [der, &[0; 9]].concat();
        let text = pem(&padded);
        assert_eq!(only(&text).unwrap(), der);
        assert_eq!(pem(&[&text[..], b"\n\0\0"].concat()), text);
        assert_eq!(pem(&[0; 4]), b"");
    }

    #[test]
    fn a_root_of_the_policy_replaces_or_narrows_those_of_amd_and_has_its_own_name() {
        let names = |root: Option<&[u8]>| -> Vec<String> {
            let root = root.map_or_else(String::new, |der| String::from_utf8(pem(der)).unwrap());
            let zeros = "00".repeat(32);
            let policy = serde_json::json!({"measurements": {"15": zeros}, "amdRootKey": root});
            let policy = Policy::from_json(&policy.to_string()).unwrap();
            let all = authorities(&policy).unwrap();
            all.iter().map(Authority::name).collect()
        };
        assert_eq!(names(None), ["ARK-Milan", "ARK-Genoa", "ARK-Turin"]);
        assert_eq!(names(Some(roots::AMD_GENOA.root.der)), ["ARK-Genoa"]);
        assert_eq!(names(Some(roots::INTEL_SGX.root.der)), ["amdRootKey"]);
    }

    #[test]
    fn what_a_machine_sends_is_one_certificate_and_a_short_chain() {
        let one = pem(roots::AMD_MILAN.root.der);
        let times = |count: usize| [&one[..], b"\n"].concat().repeat(count);
        assert_eq!(several(&times(2)).unwrap().len(), 2);
        assert!(several(&times(3)).is_err() && only(&times(2)).is_err() && only(b"").is_err());
    }
}
