//! `firstlight collateral`: fetches the collateral of a TDX quote, or the certificates of an
//! SEV-SNP report, for machines and validators that have no access to the network.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::sources::sources;
use super::verify::presented;
use super::{files, say_all};
use base::program::Failure;
use hardware::Unavailable;
use base::sync::lock;
use hardware::snp::chain::Fetched;
use hardware::snp::report::{Report, Signer};
use hardware::snp::tcb::Product;
use hardware::tdx::{Collateral, Quote};
use verifier::sources::Sources;

/// Characters in a line of PEM (RFC 7468 §2).
const LINE: usize = 64;

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// A quote, a report, or evidence that `firstlight verify --save` wrote.
    pub evidence: PathBuf,
    /// The product of a report that does not name it.
    pub product: Option<Product>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let bytes = files::read(&options.evidence).map_err(Failure::failed)?;
    let fetched = fetch(options, &bytes);
    let fault = |why| Failure::failed(format!("{}: {why}", options.evidence.display()));
    say_all(&fetched.map_err(fault)?)
}

fn fetch(options: &Options, bytes: &[u8]) -> Result<String, String> {
    if let Ok(quote) = Quote::parse(bytes) {
        return json(&*sources().tdx_collateral(&quote)?);
    }
    if let Ok(report) = Report::parse(bytes) {
        let named = report.cpuid.and_then(|cpuid| Product::of(cpuid).ok());
        let product = options.product.or(named).ok_or(
            "the report does not name the product of its chip: give --product, as --product Milan",
        )?;
        return Ok(pem(&*sources().snp_certificates(&report, product)?));
    }
    of_evidence(bytes)
}

/// Fetches the collateral that validators of the evidence need. No policy applies here: a validator
/// checks its requirements before it fetches.
fn of_evidence(bytes: &[u8]) -> Result<String, String> {
    let (presented, variant) = presented::parse(bytes)
        .map_err(|why| format!("neither a TDX quote nor an SEV-SNP report, and {why}"))?;
    let collateral = variant.collateral.ok_or_else(|| {
        format!(
            "evidence of the variant {} needs no collateral",
            variant.name
        )
    })?;
    let noting = Noting {
        sources: sources(),
        noted: Mutex::new(Err(format!(
            "the evidence of the variant {} cannot be read",
            variant.name
        ))),
    };
    // the result has the form in which peers send collateral
    let _ = collateral(presented.document(), &noting);
    let noted = lock(&noting.noted);
    noted.clone()
}

/// Notes what is fetched.
struct Noting {
    sources: Arc<dyn Sources>,
    noted: Mutex<Result<String, String>>,
}

impl Noting {
    fn note(&self, text: Result<String, String>) {
        *lock(&self.noted) = text;
    }
}

impl Sources for Noting {
    fn tdx_collateral(&self, quote: &Quote<'_>) -> Result<Arc<Collateral>, Unavailable> {
        let fetched = self.sources.tdx_collateral(quote);
        self.note(
            fetched
                .clone()
                .map_err(String::from)
                .and_then(|it| json(&it)),
        );
        fetched
    }

    fn fetches(&self) -> bool {
        self.sources.fetches()
    }

    fn snp_certificates(
        &self,
        report: &Report,
        product: Product,
    ) -> Result<Arc<Fetched>, Unavailable> {
        let fetched = self.sources.snp_certificates(report, product);
        self.note(fetched.clone().map(|it| pem(&it)).map_err(String::from));
        fetched
    }

    fn snp_authority(&self, product: Product, signer: Signer) -> Result<Arc<Fetched>, Unavailable> {
        let fetched = self.sources.snp_authority(product, signer);
        self.note(fetched.clone().map(|it| pem(&it)).map_err(String::from));
        fetched
    }
}

/// Returns the content of a machine's /etc/firstlight/tdx-collateral.json.
fn json(collateral: &Collateral) -> Result<String, String> {
    let text = serde_json::to_string_pretty(collateral).map_err(|error| error.to_string())?;
    Ok(text + "\n")
}

/// Returns the certificates from the chip's up to below the root, and the list of revoked CAs.
fn pem(fetched: &Fetched) -> String {
    let mut text = String::new();
    let certificates = fetched.leaf.iter().chain([&fetched.intermediate]);
    let certificates = certificates.map(|der| ("CERTIFICATE", der));
    for (label, der) in certificates.chain(fetched.revoked.iter().map(|der| ("X509 CRL", der))) {
        text += &format!("-----BEGIN {label}-----\n");
        let mut digits = &STANDARD.encode(der)[..];
        while !digits.is_empty() {
            let (line, rest) = digits.split_at(digits.len().min(LINE));
            text += line;
            text.push('\n');
            digits = rest;
        }
        text += &format!("-----END {label}-----\n");
    }
    text
}
