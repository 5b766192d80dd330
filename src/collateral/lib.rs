//! Fetches what validators need: certificates of AMD's chips, AMD's revocation lists, Intel's collateral of TDX platforms, the
//! authorities of Google's machines, and the verdicts of EC2 and of Microsoft's attestation service on machines. Only the services
//! and the operator's command link this crate. A node fetches nothing: it uses only what the evidence contains.
//!
//! ```text
//! validator ─► Fetching ─► cache ─► store: directory, file or ConfigMap
//!                     │         └─► kds, pcs, issuers ─► https ─► AMD, Intel, Google, or servers of the operator
//!                     ├──► ec2 ─► EC2, with credentials of the operator or of the service's machine
//!                     └──► maa ─► https ─► Microsoft's attestation service that the policy names
//! ```
//!
//! The answers of AMD, Intel, Google and a store are not trusted. Each answer must be the requested item, so that none can replace
//! another, and the validator verifies its signatures each time. A hostile server or store can only make a validation fail. The
//! answers of EC2 and of Microsoft's service are trusted: AWS vouches for machines with a NitroTPM, and Microsoft for the firmware
//! of Azure. An authority that this machine trusts must certify these two servers; the authorities of `--collateral-ca` do not
//! count for them.

mod cache;
mod config_map;
mod describe;
mod ec2;
mod flags;
mod https;
mod issuers;
mod item;
mod kds;
mod maa;
mod pcs;
mod store;
mod x509;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hardware::snp::chain::{self, Fetched};
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::tcb::Product;
use hardware::tdx::dcap::named_platform;
use hardware::tdx::{TdxCollateral, TdxQuote};
use http::Roots;
use kubernetes::client::Client;
use verifier::instance::CloudInstance;
use verifier::maa::{Question, Word};
use verifier::sources::Sources;

use cache::{Cache, CachedItem, Origin, Patience};
use ec2::Ec2;
use https::FetchFailure;
use issuers::{GOOGLE, Issuers};
use item::{Item, ItemContent, PckAuthority};
use kds::Kds;
use maa::Maa;
use pcs::Pcs;
use store::{CollateralFile, Directory, Nowhere, Store};

pub use ec2::Ec2Caller;
pub use flags::{Flags, OPTIONS};
pub use hardware::{Cause, Unavailable};
pub use kds::AMD;
pub use pcs::{INTEL, Update};

/// The parsers that the fuzz targets and mutation tests call with hostile bytes.
pub mod parsers {
    pub use crate::config_map::stored as config_map;
    pub use crate::describe::parse_described;
    pub use crate::issuers::of as issuer;
    pub use crate::item::{Item, PckAuthority, chip_of};
    pub use crate::maa::parse as token;
    pub use crate::pcs::{der_or_digits, issuer_chain, signed};
    pub use http::retry_after;
}

/// The store, for the tests with a real API server.
pub mod stores {
    pub use crate::config_map::ConfigMapStore;
    pub use crate::store::Store;
}

/// Time limit of one validation for certificates and collateral, and again for the verdict of a cloud. Twice this limit is less
/// than the 20 seconds that a node's attested handshake may take.
const TIME: Duration = Duration::from_secs(8);

/// From which servers certificates and collateral are fetched, and where they are stored.
#[derive(Clone)]
pub struct FetchSettings {
    /// The URL of AMD's key distribution service, or of a server with the same paths; `None` if nothing is fetched from it.
    pub kds: Option<String>,
    /// The URL of Intel's service, or of a caching service (PCCS); `None` if nothing is fetched from it.
    pub pcs: Option<String>,
    /// The URL of Google's storage service, or of a server with the same paths; `None` if nothing is fetched from it.
    pub issuers: Option<String>,
    /// Which of Intel's evaluations counts.
    pub update: Update,
    /// The file with the authorities that may certify these servers (PEM); without it, those of this machine's distribution.
    pub ca: Option<PathBuf>,
    /// Where fetched items are stored.
    pub kept: Kept,
    /// How EC2 is asked about machines of Amazon Web Services; `None` if it is not asked.
    pub ec2: Option<Ec2Caller>,
    /// How Microsoft's attestation service is asked about machines of Azure; `None` if it is not asked.
    pub maa: Option<Microsoft>,
    /// Time limit of one validation for certificates and collateral, and again for the verdict of a cloud.
    pub time: Duration,
    /// Returns the time in seconds since 1970.
    pub clock: fn() -> u64,
}

/// How Microsoft's attestation service is asked.
#[derive(Clone)]
pub struct Microsoft {
    /// The file with the authorities that may certify it (PEM); without it, those of this machine's distribution.
    pub ca: Option<PathBuf>,
}

impl Default for Microsoft {
    /// The authorities in the file that the variable `SSL_CERT_FILE` names, as OpenSSL has it.
    fn default() -> Microsoft {
        let file = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
        Microsoft {
            ca: file.map(PathBuf::from),
        }
    }
}

/// Where fetched items are stored.
#[derive(Clone)]
pub enum Kept {
    /// Nowhere: after each start everything is fetched again.
    Nowhere,
    /// In a directory, which is made if it does not exist.
    Directory(PathBuf),
    /// In a file with the collateral of one kind of platform, which is never written.
    File(PathBuf),
    /// In a ConfigMap: namespace and name.
    ConfigMap(Client, String, String),
}

impl Default for FetchSettings {
    /// The vendors' own servers.
    fn default() -> FetchSettings {
        FetchSettings {
            kds: Some(AMD.into()),
            pcs: Some(INTEL.into()),
            issuers: Some(GOOGLE.into()),
            update: Update::default(),
            ca: None,
            kept: Kept::Nowhere,
            ec2: Some(Ec2Caller::default()),
            maa: Some(Microsoft::default()),
            time: TIME,
            clock: || {
                let since = SystemTime::now().duration_since(UNIX_EPOCH);
                since.map_or(0, |since| since.as_secs())
            },
        }
    }
}

/// The sources of collateral in a program that may use the network.
pub struct Fetching {
    cache: Arc<Cache>,
    ec2: Option<Arc<Ec2>>,
    maa: Option<Arc<Maa>>,
    time: Duration,
    /// Whether callers wait for servers.
    waits: bool,
}

impl std::fmt::Debug for Fetching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.statistics().fmt(f)
    }
}

/// Counts what happened since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchStatistics {
    /// How often an item was valid in memory.
    pub hits: u64,
    /// How many items came from the store.
    pub loaded: u64,
    /// How many items came from a server.
    pub fetched: u64,
    /// How many fetches failed.
    pub failed: u64,
    /// The age in seconds of the oldest list or collateral that is in use; `None` without any.
    pub oldest: Option<u64>,
}

impl Fetching {
    /// Makes the sources. An error names the wrong setting.
    pub fn new(settings: FetchSettings) -> Result<Arc<Fetching>, Unavailable> {
        let servers = Servers::new(&settings)?;
        let store: Box<dyn Store> = match settings.kept {
            Kept::Nowhere => Box::new(Nowhere),
            Kept::Directory(path) => Box::new(Directory::new(&path)?),
            Kept::File(path) => Box::new(CollateralFile(path)),
            Kept::ConfigMap(client, namespace, name) => {
                Box::new(config_map::ConfigMapStore::new(&client, &namespace, &name))
            }
        };
        // without requests no authorities are needed
        let maa = settings.maa.map(|maa| {
            let roots = Roots::load(maa.ca.as_deref());
            Arc::new(Maa::new(roots, settings.clock))
        });
        let cache = Cache::new(Box::new(servers), store, settings.clock);
        Ok(Arc::new(Fetching {
            cache: Arc::new(cache),
            ec2: settings.ec2.as_ref().map(Ec2::new),
            maa,
            time: settings.time,
            waits: true,
        }))
    }

    /// Returns sources that never wait: they return items from the memory of these sources, and fetch missing items in the
    /// background. They ask no cloud for a verdict.
    pub fn at_hand(&self) -> Arc<dyn Sources> {
        Arc::new(Fetching {
            waits: false,
            ..self.without_verdicts()
        })
    }

    /// Returns sources that share these items, but ask no cloud for a verdict.
    pub fn without_verdicts(&self) -> Fetching {
        Fetching {
            cache: self.cache.clone(),
            ec2: None,
            maa: None,
            time: self.time,
            waits: self.waits,
        }
    }

    /// Returns what happened since the start.
    pub fn statistics(&self) -> FetchStatistics {
        let counts = &self.cache.counts;
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FetchStatistics {
            hits: value(&counts.hits),
            loaded: value(&counts.loaded),
            fetched: value(&counts.fetched),
            failed: value(&counts.failed),
            oldest: self.cache.oldest(),
        }
    }

    fn der(
        &self,
        item: &Item,
        patience: Patience,
        deadline: Instant,
    ) -> Result<Vec<u8>, Unavailable> {
        match &self.entry(item, patience, deadline)?.content {
            ItemContent::Der(der) => Ok(der.clone()),
            ItemContent::Tdx(_) => Err(Unavailable::malformed(format!("{item} is not DER"))),
        }
    }

    fn entry(
        &self,
        item: &Item,
        patience: Patience,
        deadline: Instant,
    ) -> Result<Arc<CachedItem>, Unavailable> {
        let patience = if self.waits { patience } else { Patience::None };
        self.cache.get(item, patience, deadline)
    }

    /// Returns AMD's authority of a product, which the program has, and its revocation list or why it cannot be had.
    fn authority(
        &self,
        product: Product,
        signer: ReportSigner,
        deadline: Instant,
    ) -> Result<Fetched, Unavailable> {
        let intermediate = chain::authority(product, signer).ok_or_else(|| {
            let why = format!("the authority of {signer}s of a {product} is not known");
            Cause::Unknown.because(why)
        })?;
        // a policy may accept machines without the list: then a server that is away must not delay each validation
        let list = Item::Revoked(product, signer);
        Ok(Fetched {
            leaf: None,
            intermediate: intermediate.into(),
            revoked: self.der(&list, Patience::UntilFirstFailure, deadline),
        })
    }
}

impl Sources for Fetching {
    fn fetches(&self) -> bool {
        true
    }

    fn tdx_collateral(&self, quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        let item = of_platform(quote)?;
        let deadline = Instant::now() + self.time;
        match &self.entry(&item, Patience::Full, deadline)?.content {
            ItemContent::Tdx(collateral) => Ok(collateral.clone()),
            ItemContent::Der(_) => Err(Unavailable::malformed(format!("{item} is not JSON"))),
        }
    }

    fn tdx_collateral_at_hand(&self, quote: &TdxQuote<'_>) -> Option<Arc<TdxCollateral>> {
        match &self.cache.at_hand(&of_platform(quote).ok()?)?.content {
            ItemContent::Tdx(collateral) => Some(collateral.clone()),
            ItemContent::Der(_) => None,
        }
    }

    fn snp_certificates(
        &self,
        report: &Report,
        product: Product,
    ) -> Result<Arc<Fetched>, Unavailable> {
        let deadline = Instant::now() + self.time;
        let signer = report.signer()?;
        let leaf = match signer {
            ReportSigner::Vlek => None,
            ReportSigner::Vcek => Some(self.der(&vcek(report, product)?, Patience::Full, deadline)),
        };
        if let (true, Some(Err(why))) = (self.waits, &leaf) {
            return Err(why.clone());
        }
        // for a caller that does not wait, all missing items are fetched in the background at once
        let authority = self.authority(product, signer, deadline)?;
        Ok(Arc::new(Fetched {
            leaf: leaf.transpose()?,
            ..authority
        }))
    }

    fn snp_authority(
        &self,
        product: Product,
        signer: ReportSigner,
    ) -> Result<Arc<Fetched>, Unavailable> {
        let deadline = Instant::now() + self.time;
        Ok(Arc::new(self.authority(product, signer, deadline)?))
    }

    fn issuer(&self, certificate: &[u8]) -> Result<Option<Vec<u8>>, Unavailable> {
        if let Some(known) = issuers::known(certificate) {
            return Ok(Some(known.into()));
        }
        let Some(item) = issuers::of(certificate)? else {
            return Ok(None);
        };
        let deadline = Instant::now() + self.time;
        self.der(&item, Patience::Full, deadline).map(Some)
    }

    fn keep_issuer(&self, certificate: &[u8]) {
        if let Ok(Some(item)) = issuers::of(certificate) {
            self.cache.keep(&item);
        }
    }

    fn microsofts_word(&self, question: &Question<'_>) -> Result<Arc<Word>, Unavailable> {
        let offline = || Cause::Offline.because("requests are disabled (offline)");
        let maa = self.maa.as_ref().ok_or_else(offline)?;
        maa.word(question, Instant::now() + self.time)
    }

    fn ec2_instance(&self, id: &str) -> Result<Arc<CloudInstance>, Unavailable> {
        let ec2 = self.ec2.as_ref().ok_or_else(|| {
            let why = "the policy requires accounts or zones of AWS, which only EC2 knows, but requests are disabled (offline)";
            Cause::Offline.because(why)
        })?;
        ec2.instance(id, Instant::now() + self.time)
    }
}

/// Returns the collateral that a quote needs.
fn of_platform(quote: &TdxQuote<'_>) -> Result<Item, Unavailable> {
    Ok(Item::Tdx {
        fmspc: named_platform(quote)?.fmspc,
        authority: PckAuthority::of_chain(quote.pck_chain)?,
    })
}

/// Returns the certificate for a report.
fn vcek(report: &Report, product: Product) -> Result<Item, Unavailable> {
    Ok(Item::Vcek {
        product,
        chip: report.chip(product)?.into(),
        tcb: report.tcbs(product)?.reported,
    })
}

/// The servers of AMD, Intel and Google, or servers of the operator in their place.
struct Servers {
    kds: Option<Kds>,
    pcs: Option<Pcs>,
    issuers: Option<Issuers>,
    /// Whether any certificate of a web server can be trusted.
    has_roots: bool,
}

impl Servers {
    fn new(settings: &FetchSettings) -> Result<Servers, Unavailable> {
        let roots = Roots::load(settings.ca.as_deref());
        let roots = roots.map_err(|why| Cause::Setting.because(why.to_string()))?;
        let kds = settings.kds.as_deref();
        let pcs = settings.pcs.as_deref();
        let issuers = settings.issuers.as_deref();
        Ok(Servers {
            has_roots: !roots.is_empty(),
            kds: kds.map(|url| Kds::new(url, &roots)).transpose()?,
            pcs: pcs
                .map(|url| Pcs::new(url, settings.update, &roots))
                .transpose()?,
            issuers: issuers.map(|url| Issuers::new(url, &roots)).transpose()?,
        })
    }
}

impl Origin for Servers {
    fn fetch(&self, item: &Item, deadline: Instant) -> Result<Vec<u8>, FetchFailure> {
        let offline = || {
            Cause::Offline.because("it is not in the cache, and requests are disabled (offline)")
        };
        let fetches = match item {
            Item::Issuer { .. } => self.issuers.is_some(),
            _ => self.kds.is_some() || self.pcs.is_some(),
        };
        if !self.has_roots && fetches {
            let why = "this machine has no CA certificates of web servers (ca-certificates); --collateral-ca can name a file";
            return Err(Cause::Setting.because(why).into());
        }
        match item {
            Item::Tdx { fmspc, authority } => {
                let pcs = self.pcs.as_ref().ok_or_else(offline)?;
                let collateral = pcs.collateral(fmspc, *authority, deadline)?;
                Ok(serde_json::to_vec(&collateral).map_err(Unavailable::malformed)?)
            }
            Item::Vcek { product, chip, tcb } => {
                let kds = self.kds.as_ref().ok_or_else(offline)?;
                kds.vcek(*product, chip, tcb, deadline)
            }
            Item::Issuer { path, .. } => {
                let issuers = self.issuers.as_ref().ok_or_else(offline)?;
                issuers.certificate(path, deadline)
            }
            Item::Revoked(product, signer) => {
                let kds = self.kds.as_ref().ok_or_else(offline)?;
                kds.revoked(*product, *signer, deadline)
            }
        }
    }
}
