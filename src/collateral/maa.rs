//! A client of Microsoft's attestation service (MAA), by its REST reference ("Attestation - Attest Sev Snp Vm", 2022-08-01):
//!
//! ```text
//! POST /attest/SevSnpVm?api-version=2022-08-01
//! {"report":base64url({"SnpReport":..,"VcekCertChain":..}),"runtimeData":{"data":..,"dataType":"JSON"}} ─► {"token":JWT}
//! ```
//!
//! The signature of the token is not verified. The token comes from the service itself, over TLS to the host that the policy names.
//! The keys that verify it come from the same host, in self-signed certificates, so the signature would prove nothing more. The
//! verdicts are kept only in memory.
//!
//! ```text
//! report ─► a word that still counts ──────► returned at once
//!        ─► the service is asked about it ─► wait for that answer, until the deadline
//!        ─► its chip has had its share ────► fail at once
//!        ─► ask
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use base::sync::{lock, wait_timeout};
use base::text;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hardware::snp::report::Report;
use hardware::{Cause, Unavailable};
use http::Roots;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde_json::json;
use verifier::maa::{Question, Word};

use crate::https::{CollateralServer, FetchFailure, FetchRequest, Limit, retried};

/// Path and query of the request.
const PATH: &str = "/attest/SevSnpVm?api-version=2022-08-01";
/// Maximum size in bytes of an answer: a token has about 5 KiB.
const MAX_ANSWER: usize = 64 << 10;
/// Maximum number of services: each policy of a program names one.
const MAX_SERVICES: usize = 16;
/// Maximum number of verdicts in memory: more than a cluster has nodes. A further one replaces the one that expires first.
const MAX_VERDICTS: usize = 4096;
/// How many requests are sent at once to a service, and the pause before each further one. The limit allows a new, large cluster.
const AT_ONCE: u32 = 32;
const PAUSE: Duration = Duration::from_secs(1);
/// The same for all machines on one chip, because root on one machine can make any number of reports. It is less than the limit of a service.
const AT_ONCE_OF_CHIP: u32 = 4;
const PAUSE_OF_CHIP: Duration = Duration::from_secs(15);
/// Maximum number of callers that wait for one answer; a further one fails at once. Each is a thread of a service.
const MAX_WAITING: usize = 8;
/// How long a verdict is valid at most. The service's tokens are valid for eight hours.
const LONGEST: Duration = Duration::from_secs(8 * 3600);
/// Pause after the service refused a report, or did not vouch for it.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// How long a failed connection is remembered. Callers that waited for it get its error; the next caller sends a request, unless
/// the server demanded a pause.
const AWAY_PAUSE: Duration = Duration::from_secs(1);

/// The services and their verdicts.
pub struct Maa {
    /// The authorities that may certify the services, or why there are none. A caller gets this error only when a request would be sent.
    roots: Result<Roots, http::CertificateError>,
    /// Returns the time in seconds since 1970.
    clock: fn() -> u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    services: HashMap<String, Arc<CollateralServer>>,
    verdicts: HashMap<Asked, Said>,
    /// The requests that run. Each caller that waits for the answer also holds a reference.
    running: HashMap<Asked, Arc<()>>,
    /// The limits of chips about which requests were sent lately, by CHIP_ID.
    chips: HashMap<[u8; 64], Limit>,
}

/// SHA-256 of URL, report and runtime data, in hexadecimal. The certificates are not a part of it: they add nothing to the report.
type Asked = String;

/// A service's verdict on a report, and how long it is valid.
struct Said {
    word: Result<Arc<Word>, Unavailable>,
    until: Instant,
}

impl Maa {
    /// Makes a client of the services that these roots certify. Sends no request.
    pub fn new(roots: Result<Roots, http::CertificateError>, clock: fn() -> u64) -> Maa {
        Maa {
            roots,
            clock,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Returns the service's verdict on a report.
    pub fn word(
        &self,
        question: &Question<'_>,
        deadline: Instant,
    ) -> Result<Arc<Word>, Unavailable> {
        let Question {
            url,
            report,
            runtime_data,
            ..
        } = *question;
        let asked = [url.as_bytes(), report, runtime_data].map(sha256);
        let asked = sha256(asked.concat().as_bytes());
        if let Some(said) = self.state().known(&asked) {
            return said;
        }
        let report = Report::parse(report)?;
        let service = self.service(url)?;
        if let Some(said) = self.wait(&asked, &report.chip_id, deadline)? {
            return said;
        }
        let _running = Running(self, &asked);
        let content = content(question);
        let request = FetchRequest {
            path: PATH,
            types: &["application/json"],
            limit: MAX_ANSWER,
            content: Some(&content),
        };
        let answer = retried(deadline, || service.send(&request, deadline));
        let (word, until) = match answer {
            Ok(answer) => match self.read(url, &report, &answer.body) {
                Ok((word, counts)) => (Ok(Arc::new(word)), Instant::now() + counts),
                Err(why) => (Err(why), Instant::now() + REFUSED_PAUSE),
            },
            Err(FetchFailure::Final(why)) => {
                let why = match why.cause {
                    Cause::Unknown => why.and(": is maaURL right?"),
                    _ => why,
                };
                (Err(why), Instant::now() + REFUSED_PAUSE)
            }
            Err(FetchFailure::Later(why, _) | FetchFailure::Full(why, _)) => {
                self.state().give_back(&report.chip_id);
                (Err(why), Instant::now() + AWAY_PAUSE)
            }
        };
        let said = Said {
            word: word.clone(),
            until,
        };
        self.state().keep(asked.clone(), said);
        word
    }

    /// Returns the cached verdict on a report, or waits for a request about it that runs. If there is neither, and the chip has
    /// quota left, the caller must send the request.
    fn wait(
        &self,
        asked: &Asked,
        chip: &[u8; 64],
        deadline: Instant,
    ) -> Result<Option<Result<Arc<Word>, Unavailable>>, Unavailable> {
        let mut state = self.state();
        loop {
            if let Some(said) = state.known(asked) {
                return Ok(Some(said));
            }
            let now = Instant::now();
            let Some(run) = state.running.get(asked).cloned() else {
                state.count(chip, now)?;
                state.running.insert(asked.clone(), Arc::default());
                return Ok(None);
            };
            // one reference is the map's, and one this caller's
            if Arc::strong_count(&run) - 2 == MAX_WAITING {
                let why = format!("{MAX_WAITING} others wait for its answer: try again");
                return Err(Cause::Limited.because(why));
            }
            if now >= deadline {
                let why = "it has not answered yet: try again";
                return Err(Cause::Pending.because(why));
            }
            state = wait_timeout(&self.changed, state, deadline - now);
        }
    }

    /// Returns the verdict in an answer, and how long it is valid. A negative verdict is valid only for a short time: the service
    /// may learn of new firmware.
    fn read(
        &self,
        url: &str,
        report: &Report,
        answer: &[u8],
    ) -> Result<(Word, Duration), Unavailable> {
        let word = parse(answer)?;
        let left = word.expires.saturating_sub((self.clock)());
        if left == 0 {
            let why = "the token has expired: is the clock of this machine right?";
            return Err(Cause::Expired.because(why));
        }
        let counts = match word.check(url, report) {
            Ok(()) => LONGEST,
            Err(_) => REFUSED_PAUSE,
        };
        // the clock has whole seconds, and the token ends with one
        Ok((word, Duration::from_secs(left - 1).min(counts)))
    }

    fn service(&self, url: &str) -> Result<Arc<CollateralServer>, Unavailable> {
        let mut state = self.state();
        if let Some(known) = state.services.get(url) {
            return Ok(known.clone());
        }
        let roots = self.roots.as_ref();
        let roots = roots.map_err(|why| Cause::Setting.because(format!("SSL_CERT_FILE: {why}")))?;
        if roots.is_empty() {
            let why = "this machine has no CA certificates of web servers (ca-certificates); SSL_CERT_FILE can name a file";
            return Err(Cause::Setting.because(why));
        }
        let server = CollateralServer::new(url, roots).map_err(|why| why.about("maaURL"))?;
        let server = Arc::new(server.with_limit(AT_ONCE, PAUSE));
        if state.services.len() >= MAX_SERVICES {
            state.services.clear();
        }
        state.services.insert(url.into(), server.clone());
        Ok(server)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// A running request, until it is dropped. Others may wait for its answer.
struct Running<'a>(&'a Maa, &'a Asked);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state().running.remove(self.1);
        self.0.changed.notify_all();
    }
}

impl State {
    /// Returns the cached verdict on a report, if it is still valid.
    fn known(&self, asked: &Asked) -> Option<Result<Arc<Word>, Unavailable>> {
        let said = self.verdicts.get(asked)?;
        (said.until > Instant::now()).then(|| said.word.clone())
    }

    /// Counts a request about a chip. Fails if too many were sent about the chip's machines.
    fn count(&mut self, chip: &[u8; 64], now: Instant) -> Result<(), Unavailable> {
        if self.chips.len() >= MAX_VERDICTS {
            self.chips.retain(|_, limit| !limit.is_full(now));
        }
        let limit = self.chips.entry(*chip);
        let limit = limit.or_insert_with(|| Limit::new(AT_ONCE_OF_CHIP, PAUSE_OF_CHIP, now));
        limit.take(now).map_err(|until| {
            let seconds = (until - now).as_secs() + 1;
            let why = format!(
                "too many requests about machines on this chip were sent: try again in {seconds} s"
            );
            Cause::Limited.because(why)
        })
    }

    /// Gives back a counted request about a chip.
    fn give_back(&mut self, chip: &[u8; 64]) {
        if let Some(limit) = self.chips.get_mut(chip) {
            limit.give_back();
        }
    }

    fn keep(&mut self, asked: Asked, said: Said) {
        self.verdicts.insert(asked, said);
        while self.verdicts.len() > MAX_VERDICTS {
            let first = self.verdicts.iter().min_by_key(|(_, said)| said.until);
            let Some(first) = first.map(|(asked, _)| asked.clone()) else {
                return;
            };
            self.verdicts.remove(&first);
        }
    }
}

/// Returns the content of the request.
fn content(question: &Question<'_>) -> String {
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let report = json!({
        "SnpReport": encode(question.report),
        "VcekCertChain": encode(question.certificates),
    });
    let runtime_data = json!({"data": encode(question.runtime_data), "dataType": "JSON"});
    json!({"report": encode(report.to_string().as_bytes()), "runtimeData": runtime_data})
        .to_string()
}

/// Returns the verdict in an answer: the claims of a token (RFC 7519), in the compact form of RFC 7515.
pub fn parse(answer: &[u8]) -> Result<Word, Unavailable> {
    #[derive(Deserialize)]
    struct Answer {
        token: String,
    }
    let faulty = |what, error| Unavailable::malformed(text::of_error(error)).about(what);
    let answer: Answer =
        serde_json::from_slice(answer).map_err(|error| faulty("the answer has no token", error))?;
    let parts: Vec<&str> = answer.token.split('.').collect();
    let [_, claims, _] = parts[..] else {
        return Err(Unavailable::malformed(
            "the token does not have the three parts of a JWT",
        ));
    };
    let claims = URL_SAFE_NO_PAD
        .decode(claims)
        .map_err(|_| Unavailable::malformed("the claims of the token are not in base64url"))?;
    let claims = String::from_utf8(claims)
        .map_err(|_| Unavailable::malformed("the claims of the token are not UTF-8"))?;
    serde_json::from_str(&claims).map_err(|error| faulty("the claims of the token", error))
}

/// Returns the SHA-256 in hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    text::hex(digest(&SHA256, bytes).as_ref())
}

#[cfg(test)]
mod tests {
    use hardware::snp::report::LEN;
    use support::mutation::mutations;

    use super::*;

    /// The claims of an answer, in the order of Microsoft's sample.
    fn claims() -> String {
        let digits = |byte: &str, len: usize| byte.repeat(len);
        json!({
            "exp": 1_900_000_000u64, "iat": 1_649_941_220u64, "iss": "https://x.weu.attest.azure.net",
            "x-ms-attestation-type": "sevsnpvm", "x-ms-compliance-status": "azure-compliant-cvm",
            "x-ms-runtime": {"keys": []}, "x-ms-sevsnpvm-authorkeydigest": digits("00", 48),
            "x-ms-sevsnpvm-hostdata": digits("00", 32), "x-ms-sevsnpvm-idkeydigest": digits("cc", 48),
            "x-ms-sevsnpvm-is-debuggable": false, "x-ms-sevsnpvm-launchmeasurement": digits("aa", 48),
            "x-ms-sevsnpvm-reportdata": digits("dd", 64), "x-ms-sevsnpvm-vmpl": 0,
        })
        .to_string()
    }

    fn answer(claims: &str) -> Vec<u8> {
        let claims = URL_SAFE_NO_PAD.encode(claims);
        json!({"token": format!("eyJh.{claims}.c2ln")})
            .to_string()
            .into_bytes()
    }

    #[test]
    fn a_token_has_each_claim_once_and_all_that_count() {
        let word = parse(&answer(&claims())).unwrap();
        assert_eq!(word.compliance, "azure-compliant-cvm");
        assert_eq!((word.vmpl, word.expires), (0, 1_900_000_000));
        let twice = r#"{"x-ms-attestation-type":"sevsnpvm","#;
        for (bad, why) in [
            (
                answer(&claims().replace("\"iss\"", "\"is\"")),
                "missing field `iss`",
            ),
            (answer(&claims().replacen('{', twice, 1)), "duplicate field"),
            (
                answer(&claims().replace(":false", ":\"false\"")),
                "invalid type",
            ),
            (
                answer(&claims().replace("\"x-ms-sevsnpvm-vmpl\":0", "\"x-ms-sevsnpvm-vmpl\":-1")),
                "invalid value",
            ),
            (b"{\"token\":\"a.b\"}".to_vec(), "three parts"),
            (b"{\"token\":\"a.+.c\"}".to_vec(), "base64url"),
            // also in a claim that is not used
            (b"{\"token\":\"a.eyL_Ijox.c\"}".to_vec(), "not UTF-8"),
            (b"{\"error\":{}}".to_vec(), "no token"),
        ] {
            let error = parse(&bad).unwrap_err();
            assert_eq!(error.cause, Cause::Malformed);
            assert!(error.to_string().contains(why), "{error}, expected {why}");
        }
        for altered in mutations(&answer(&claims()), 5_000) {
            if let Err(error) = parse(&altered) {
                assert!(error.to_string().len() < 400, "{error}");
            }
        }
    }

    #[test]
    fn verdicts_beyond_the_limit_go_by_their_end() {
        let mut state = State::default();
        let now = Instant::now();
        for number in 0..=MAX_VERDICTS {
            let until = now + Duration::from_secs(number as u64);
            state.keep(
                number.to_string(),
                Said {
                    word: Err(Cause::Unknown.because("no")),
                    until,
                },
            );
        }
        assert_eq!(state.verdicts.len(), MAX_VERDICTS);
        assert!(!state.verdicts.contains_key("0"));
    }

    #[test]
    fn a_chip_that_asks_often_keeps_no_other_one_from_it() {
        let (mut state, now) = (State::default(), Instant::now());
        for _ in 0..AT_ONCE_OF_CHIP {
            state.count(&[1; 64], now).unwrap();
        }
        let error = state.count(&[1; 64], now).unwrap_err();
        assert_eq!(error.cause, Cause::Limited);
        let text = error.to_string();
        assert!(text.ends_with("try again in 16 s"), "{text}");
        state.count(&[2; 64], now).unwrap();
        state.count(&[1; 64], now + PAUSE_OF_CHIP).unwrap();
        // limits that are fully available again are removed
        let later = now + PAUSE_OF_CHIP * (AT_ONCE_OF_CHIP + 1);
        for number in 0..=MAX_VERDICTS as u64 {
            let mut chip = [3; 64];
            chip[..8].copy_from_slice(&number.to_le_bytes());
            state.count(&chip, later).unwrap();
        }
        assert_eq!(state.chips.len(), MAX_VERDICTS + 1);
        state.count(&[1; 64], later).unwrap();
        state.count(&[4; 64], later + PAUSE_OF_CHIP).unwrap();
        assert_eq!(state.chips.len(), 1);
    }

    #[test]
    fn a_word_counts_until_its_end_and_one_that_does_not_vouch_a_minute() {
        let mut report = [0; LEN];
        // version, policy, algorithm of the signature
        (report[0], report[0xa], report[0x34]) = (2, 2, 1);
        for (range, byte) in [(0x50..0x90, 0xdd), (0x90..0xc0, 0xaa), (0xe0..0x110, 0xcc)] {
            report[range].fill(byte);
        }
        let report = Report::parse(&report).unwrap();
        let counts = |clock, claims: &str| {
            let maa = Maa::new(Ok(Roots::default()), clock);
            let url = "https://x.weu.attest.azure.net/";
            maa.read(url, &report, &answer(claims))
                .map(|(_, counts)| counts)
        };
        let claims = claims();
        let seconds = |seconds| Ok(Duration::from_secs(seconds));
        assert_eq!(counts(|| 1_899_999_990, &claims), seconds(9));
        assert_eq!(counts(|| 1_800_000_000, &claims), Ok(LONGEST));
        let other = claims.replace("azure-compliant-cvm", "none");
        assert_eq!(counts(|| 1_800_000_000, &other), Ok(REFUSED_PAUSE));
        let error = counts(|| 1_900_000_000, &claims).unwrap_err();
        assert_eq!(error.cause, Cause::Expired, "{error}");
    }
}
