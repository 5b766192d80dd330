//! What a service counts and measures, in Prometheus' text format (version 0.0.4), over plain HTTP.
//!
//! ```
//! # use metrics::{Counter, Histogram, Labelled, Registry};
//! # use std::time::Duration;
//! let registry = Registry::new();
//! let attempts: Labelled<Counter, 2> =
//!     registry.labelled("firstlight_join_attempts_total", "Nodes that asked for a ticket.", ["result", "reason"]);
//! let seconds: Histogram = registry.add("firstlight_join_seconds", "Time that a ticket took.");
//! attempts.with(["refused", "name"]).inc();
//! seconds.observe(Duration::from_millis(12));
//! assert!(registry.render().contains("firstlight_join_attempts_total{result=\"refused\",reason=\"name\"} 1\n"));
//! ```
//!
//! This file has the registry and the metrics, `exporter` the HTTP server, `process` what the kernel knows of this program.
//! Names follow Prometheus' conventions: `firstlight_` first, base units (`_seconds`, `_bytes`), `_total` for what only grows.
//! Values of labels come from small fixed sets, never from a peer; should that ever be forgotten, further ones are counted
//! together ([`MAX_SERIES`]).
//!
//! Why no crate: `prometheus-client` brings parking_lot and a second text format that needs negotiation, for what are 200
//! lines here; `tiny_http` has no time-outs and starts threads without a limit. The request's head is read by `httparse`,
//! which the HTTP client has brought already.

mod exporter;
mod process;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use exporter::Exporter;

/// Combinations of label values that one family has at most; further ones share a last one, [`OTHER`].
pub const MAX_SERIES: usize = 200;
/// The value of every label of the series that stands for those beyond [`MAX_SERIES`].
pub const OTHER: &str = "other";

/// Upper bounds of a histogram's buckets in milliseconds, as Prometheus' own libraries have them (5 ms to 10 s), and some more
/// at either end: a key takes microseconds, a ticket may wait for half a minute. Beside each bound its text in seconds.
const BUCKETS: [(u64, &str); 15] = [
    (1, "0.001"),
    (2, "0.002"),
    (5, "0.005"),
    (10, "0.01"),
    (25, "0.025"),
    (50, "0.05"),
    (100, "0.1"),
    (250, "0.25"),
    (500, "0.5"),
    (1000, "1"),
    (2500, "2.5"),
    (5000, "5"),
    (10_000, "10"),
    (30_000, "30"),
    (60_000, "60"),
];

/// What can be registered: [`Counter`], [`Gauge`], [`Histogram`].
pub trait Metric: Clone + Default + Send + Sync + 'static {
    /// Its name in a `# TYPE` line.
    const KIND: &'static str;
    /// Adds its lines; `labels` are `a="b",c="d"` or empty.
    fn write(&self, out: &mut String, name: &str, labels: &str);
}

/// Something that only grows. Clones share the value.
#[derive(Clone, Default)]
pub struct Counter(Arc<AtomicU64>);

/// Something that goes up and down. Clones share the value.
#[derive(Clone, Default)]
pub struct Gauge(Arc<AtomicI64>);

/// How long something took, counted in buckets. Clones share the values.
#[derive(Clone, Default)]
pub struct Histogram(Arc<Buckets>);

/// A metric for each combination of label values. Clones share them.
#[derive(Clone)]
pub struct Labelled<M, const N: usize>(Arc<Series<M, N>>);

/// Counts as one in a gauge until it is dropped.
pub struct InGauge(Gauge);

/// All metrics of a program. Clones share them.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<BTreeMap<&'static str, Family>>>);

#[derive(Default)]
struct Buckets {
    /// Observations in each bucket and in none below; the last is for what is longer than every bound.
    counts: [AtomicU64; BUCKETS.len() + 1],
    nanoseconds: AtomicU64,
}

struct Series<M, const N: usize> {
    names: [&'static str; N],
    metrics: Mutex<BTreeMap<[String; N], M>>,
}

struct Family {
    kind: &'static str,
    help: &'static str,
    sources: Vec<Source>,
}

/// Adds the lines of the family of this name.
type Source = Box<dyn Fn(&mut String, &str) + Send + Sync>;

impl Counter {
    /// One more.
    pub fn inc(&self) {
        self.add(1);
    }

    /// So many more.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// How many until now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Gauge {
    /// Is this now.
    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Goes up, or down.
    pub fn add(&self, more: i64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// One more until what is returned is dropped: for what is in flight.
    pub fn enter(&self) -> InGauge {
        self.add(1);
        InGauge(self.clone())
    }

    /// What it is now.
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for InGauge {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

impl Histogram {
    /// It took this long.
    pub fn observe(&self, time: Duration) {
        let milliseconds = time.as_nanos().div_ceil(1_000_000);
        let at = BUCKETS
            .iter()
            .position(|(bound, _)| milliseconds <= (*bound).into())
            .unwrap_or(BUCKETS.len());
        self.0.counts[at].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = time.as_nanos().try_into().unwrap_or(u64::MAX);
        self.0.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Does something, and observes how long that took.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.observe(started.elapsed());
        result
    }

    /// How often something was observed until now.
    pub fn count(&self) -> u64 {
        self.0
            .counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

impl Metric for Counter {
    const KIND: &'static str = "counter";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        sample(out, name, labels, &self.get());
    }
}

impl Metric for Gauge {
    const KIND: &'static str = "gauge";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        sample(out, name, labels, &self.get());
    }
}

impl Metric for Histogram {
    const KIND: &'static str = "histogram";

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        let bounds = BUCKETS.iter().map(|(_, text)| *text).chain(["+Inf"]);
        let mut count = 0;
        for (bound, inside) in bounds.zip(&self.0.counts) {
            count += inside.load(Ordering::Relaxed);
            sample(
                out,
                &format!("{name}_bucket"),
                &format!("{labels}{comma}le=\"{bound}\""),
                &count,
            );
        }
        let seconds = self.0.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        sample(out, &format!("{name}_sum"), labels, &seconds);
        sample(out, &format!("{name}_count"), labels, &count);
    }
}

impl<M: Metric, const N: usize> Labelled<M, N> {
    /// The metric of these label values, in the order of the names.
    pub fn with(&self, values: [&str; N]) -> M {
        let mut metrics = self.lock();
        let key = values.map(str::to_owned);
        let is_known = metrics.contains_key(&key);
        let key = if is_known || metrics.len() < MAX_SERIES {
            key
        } else {
            [(); N].map(|()| OTHER.to_owned())
        };
        metrics.entry(key).or_default().clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<[String; N], M>> {
        self.0
            .metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, out: &mut String, name: &str) {
        for (values, metric) in self.lock().iter() {
            metric.write(
                out,
                name,
                &labels(
                    self.0
                        .names
                        .iter()
                        .copied()
                        .zip(values.iter().map(String::as_str)),
                ),
            );
        }
    }
}

impl Registry {
    /// Without metrics.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// A metric without labels. `help` is a sentence.
    pub fn add<M: Metric>(&self, name: &'static str, help: &'static str) -> M {
        let metric = M::default();
        let source = metric.clone();
        self.register(
            name,
            help,
            M::KIND,
            Box::new(move |out, name| source.write(out, name, "")),
        );
        metric
    }

    /// A metric for each combination of values of these labels.
    pub fn labelled<M: Metric, const N: usize>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: [&'static str; N],
    ) -> Labelled<M, N> {
        debug_assert!(labels.iter().all(|label| is_name(label, "_")), "{labels:?}");
        let metrics = Labelled(Arc::new(Series {
            names: labels,
            metrics: Mutex::default(),
        }));
        let source = metrics.clone();
        self.register(
            name,
            help,
            M::KIND,
            Box::new(move |out, name| source.write(out, name)),
        );
        metrics
    }

    /// A gauge that is asked for when somebody looks; none leaves it out. Several of one name differ in their labels.
    pub fn gauge_of(
        &self,
        name: &'static str,
        help: &'static str,
        of: &[(&'static str, &str)],
        value: impl Fn() -> Option<f64> + Send + Sync + 'static,
    ) {
        self.callback(name, help, Gauge::KIND, of, value);
    }

    /// The same of a counter, for what somebody else counts.
    pub fn counter_of(
        &self,
        name: &'static str,
        help: &'static str,
        of: &[(&'static str, &str)],
        value: impl Fn() -> Option<f64> + Send + Sync + 'static,
    ) {
        self.callback(name, help, Counter::KIND, of, value);
    }

    fn callback(
        &self,
        name: &'static str,
        help: &'static str,
        kind: &'static str,
        of: &[(&'static str, &str)],
        value: impl Fn() -> Option<f64> + Send + Sync + 'static,
    ) {
        let labels = labels(of.iter().copied());
        let source = move |out: &mut String, name: &str| {
            if let Some(value) = value() {
                sample(out, name, &labels, &value);
            }
        };
        self.register(name, help, kind, Box::new(source));
    }

    /// What the kernel knows of this process, under the names that every Prometheus library has for it; and the version.
    pub fn add_process(&self) {
        process::register(self);
    }

    fn register(&self, name: &'static str, help: &'static str, kind: &'static str, source: Source) {
        debug_assert!(is_name(name, "_:"), "{name}");
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let family = families.entry(name).or_insert_with(|| Family {
            kind,
            help,
            sources: Vec::new(),
        });
        debug_assert_eq!(family.kind, kind, "{name} is registered as two kinds");
        family.sources.push(source);
    }

    /// All of it in the text format.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(8 << 10);
        for (name, family) in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            out.push_str(&format!("# HELP {name} {}\n", escaped(family.help, false)));
            out.push_str(&format!("# TYPE {name} {}\n", family.kind));
            family
                .sources
                .iter()
                .for_each(|source| source(&mut out, name));
        }
        out
    }
}

fn sample(out: &mut String, name: &str, labels: &str, value: &dyn std::fmt::Display) {
    // a String takes whatever is written
    let _ = match labels.is_empty() {
        true => writeln!(out, "{name} {value}"),
        false => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

fn labels<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    pairs
        .map(|(name, value)| format!("{name}=\"{}\"", escaped(value, true)))
        .collect::<Vec<_>>()
        .join(",")
}

/// A help text, or a label's value, where quotes are escaped too.
fn escaped(text: &str, quotes: bool) -> String {
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    if quotes {
        text.replace('"', "\\\"")
    } else {
        text
    }
}

/// Letters, digits and `more`, and no digit first.
fn is_name(name: &str, more: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || more.contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_help_type_and_a_line_for_each_series() {
        let registry = Registry::new();
        let requests: Labelled<Counter, 2> =
            registry.labelled("a_total", "Of a\nkind \\ \"x\".", ["code", "why"]);
        requests.with(["ok", ""]).inc();
        requests.with(["bad", "a \"quote\"\\\n"]).add(2);
        requests.with(["ok", ""]).inc();
        let gauge: Gauge = registry.add("b", "B.");
        gauge.set(-3);
        registry.gauge_of("c", "C.", &[("server", "x")], || Some(1.5));
        registry.gauge_of("c", "C.", &[("server", "y")], || None);
        assert_eq!(
            registry.render(),
            "# HELP a_total Of a\\nkind \\\\ \"x\".\n# TYPE a_total counter\n\
             a_total{code=\"bad\",why=\"a \\\"quote\\\"\\\\\\n\"} 2\na_total{code=\"ok\",why=\"\"} 2\n\
             # HELP b B.\n# TYPE b gauge\nb -3\n# HELP c C.\n# TYPE c gauge\nc{server=\"x\"} 1.5\n"
        );
    }

    #[test]
    fn a_histogram_counts_up_to_each_bound_and_the_bound_belongs_to_it() {
        let registry = Registry::new();
        let seconds: Labelled<Histogram, 1> = registry.labelled("a_seconds", "A.", ["step"]);
        let seconds = seconds.with(["x"]);
        for micros in [1, 1000, 1001, 60_000_000, 60_000_001] {
            seconds.observe(Duration::from_micros(micros));
        }
        let text = registry.render();
        for line in [
            "a_seconds_bucket{step=\"x\",le=\"0.001\"} 2",
            "a_seconds_bucket{step=\"x\",le=\"0.002\"} 3",
            "a_seconds_bucket{step=\"x\",le=\"30\"} 3",
            "a_seconds_bucket{step=\"x\",le=\"60\"} 4",
            "a_seconds_bucket{step=\"x\",le=\"+Inf\"} 5",
            "a_seconds_sum{step=\"x\"} 120.002003",
            "a_seconds_count{step=\"x\"} 5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
        assert_eq!(seconds.count(), 5);
    }

    #[test]
    fn what_is_in_flight_is_counted_until_it_ends() {
        let gauge = Gauge::default();
        let first = gauge.enter();
        let second = gauge.clone().enter();
        assert_eq!(gauge.get(), 2);
        drop((first, second));
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn label_values_without_end_do_not_fill_the_memory() {
        let registry = Registry::new();
        let names: Labelled<Counter, 1> = registry.labelled("a_total", "A.", ["name"]);
        for number in 0..10 * MAX_SERIES {
            names.with([&number.to_string()]).inc();
        }
        assert_eq!(names.lock().len(), MAX_SERIES + 1);
        assert_eq!(names.with(["one more"]).get(), 9 * MAX_SERIES as u64);
        assert_eq!(names.with(["7"]).get(), 1);
    }
}
