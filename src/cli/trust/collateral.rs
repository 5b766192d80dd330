//! `firstlight collateral`: fetches the collateral of a TDX quote, or the certificates of an
//! SEV-SNP report, for machines and validators that have no access to the network.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::shell::{
    error::Error,
    files::{self, FileError},
    output::say_all,
};
use crate::trust::verify::presented;
use crate::workspace::sources::{SourceOptions, sources};
use base::sync::lock;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use collateral::{FetchSettings, Update};
use hardware::snp::chain::Fetched;
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::tcb::Product;
use hardware::tdx::{TdxCollateral, TdxQuote};
use hardware::{Cause, Unavailable};
use verifier::sources::Sources;

/// Characters in a line of PEM (RFC 7468 §2).
const LINE: usize = 64;

/// The names of AMD's products.
const PRODUCTS: [&str; 3] = ["Milan", "Genoa", "Turin"];

/// Fetch the collateral of a quote, or the certificates of a report
///
/// Prints the certificates that prove who signed the quote of a TDX machine or the report of an SEV-SNP machine, for
/// machines and verifiers that can reach neither Intel nor AMD. For a quote, it is Intel's collateral (JSON), which a
/// machine sends if it has it as /etc/firstlight/tdx-collateral.json; it is valid for up to 30 days. For a report, it
/// is the certificate of the chip, that of AMD's authority, and AMD's list of revoked authorities (PEM).
///
/// This command verifies nothing: the verifier of a machine verifies its quote or report, and this output.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight collateral quote.bin > tdx-collateral.json
  firstlight collateral report.bin --product Milan > chip.pem
  firstlight collateral evidence.json --pcs https://pccs.example.com:8081 --collateral-ca pccs.pem")]
pub struct Options {
    /// A quote, a report, or evidence that `firstlight verify --save` wrote
    #[arg(value_name = "FILE")]
    evidence: PathBuf,
    /// The line of AMD's processors, for a report of version 2, which does not name it
    #[arg(long, value_name = "PRODUCT", value_parser = PossibleValuesParser::new(PRODUCTS).try_map(|name| Product::named(&name).ok_or("unknown")))]
    product: Option<Product>,
    #[command(flatten)]
    sources: SourceOptions,
    /// AMD's key distribution service, or a mirror of it
    #[arg(long, value_name = "URL", default_value = collateral::AMD)]
    kds: String,
    /// Intel's provisioning certification service, or a caching service (PCCS)
    #[arg(long, value_name = "URL", default_value = collateral::INTEL)]
    pcs: String,
    /// Intel's newest evaluation, or the one that gives operators months to update
    #[arg(long, value_name = "EVALUATION", value_parser = PossibleValuesParser::new(["early", "standard"]).try_map(|name| name.parse::<Update>().map_err(|error| error.to_string())), default_value = "early")]
    tcb_update: Update,
    /// The authorities of these servers' own certificates (PEM); without it, those of this machine
    #[arg(long, value_name = "FILE")]
    collateral_ca: Option<PathBuf>,
}

impl Options {
    /// Sets the sources of what the command fetches.
    pub fn set_sources(&self) -> Result<(), Error> {
        let url = |text: &String| Some(text.clone()).filter(|url| url != "none");
        let mut settings = FetchSettings {
            kds: url(&self.kds),
            pcs: url(&self.pcs),
            update: self.tcb_update,
            ca: self.collateral_ca.clone(),
            ..FetchSettings::default()
        };
        if settings.kds.is_none() && settings.pcs.is_none() {
            settings.issuers = None;
        }
        self.sources.set(settings)
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let bytes = files::read(&options.evidence)?;
    let fetched = fetch(options, &bytes);
    let name = options.evidence.display();
    let of = |error| match error {
        Error::Refused(why) => Error::Refused(format!("{name}: {why}")),
        Error::Unreachable(why) => Error::Unreachable(format!("{name}: {why}")),
        other => FileError::Content(options.evidence.clone(), other.to_string()).into(),
    };
    say_all(&fetched.map_err(of)?)
}

/// Returns the error for what no source has. Its text says what each server answered.
fn refused(error: Unavailable) -> Error {
    let text = error.to_string();
    match error.cause {
        Cause::Unreachable | Cause::Busy => Error::Unreachable(text),
        _ => Error::Refused(text),
    }
}

fn fetch(options: &Options, bytes: &[u8]) -> Result<String, Error> {
    if let Ok(quote) = TdxQuote::parse(bytes) {
        let fetched = sources().tdx_collateral(&quote);
        return Ok(json(&*fetched.map_err(refused)?));
    }
    if let Ok(report) = Report::parse(bytes) {
        let named = report.cpuid.and_then(|cpuid| Product::of(cpuid).ok());
        let product = options.product.or(named).ok_or_else(|| {
            let text = "the report does not name the product of its chip: give --product, as --product Milan";
            Error::content(text)
        })?;
        let fetched = sources().snp_certificates(&report, product);
        return Ok(pem(&*fetched.map_err(refused)?));
    }
    of_evidence(bytes)
}

/// Fetches the collateral that validators of the evidence need. No policy applies here: a validator
/// checks its requirements before it fetches.
fn of_evidence(bytes: &[u8]) -> Result<String, Error> {
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
    noted.clone().map_err(Error::Refused)
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
    fn tdx_collateral(&self, quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        let fetched = self.sources.tdx_collateral(quote);
        let text = fetched.clone().map(|it| json(&it));
        self.note(text.map_err(String::from));
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

    fn snp_authority(
        &self,
        product: Product,
        signer: ReportSigner,
    ) -> Result<Arc<Fetched>, Unavailable> {
        let fetched = self.sources.snp_authority(product, signer);
        self.note(fetched.clone().map(|it| pem(&it)).map_err(String::from));
        fetched
    }
}

/// Returns the content of a machine's /etc/firstlight/tdx-collateral.json.
fn json(collateral: &TdxCollateral) -> String {
    let text = serde_json::to_string_pretty(collateral);
    text.expect("strings and numbers are JSON") + "\n"
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
