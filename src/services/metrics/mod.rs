//! Metrics of a service in Prometheus' text format (version 0.0.4), served over plain HTTP.
//!
//! ```
//! # use services::metrics::{Counter, Histogram, Labelled, Registry};
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
//! This file has the registry and the metrics, `exporter` serves them, `process` the kernel's
//! data about this process. Names follow Prometheus' conventions: the prefix `firstlight_`, base
//! units (`_seconds`, `_bytes`), and `_total` for counters. Label values come from small fixed
//! sets, never from a peer. In case of a mistake, [`MAX_SERIES`] limits their number.
//!
//! There is no crate for this: `prometheus-client` depends on parking_lot and has a second text
//! format that needs negotiation; it would replace only about 200 lines.

mod exporter;
mod process;

use base::sync::lock;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub use exporter::Exporter;

/// Maximum number of combinations of label values in one family; all further ones share the series
/// [`OTHER`].
pub const MAX_SERIES: usize = 200;
/// The value of all labels in the series for combinations beyond [`MAX_SERIES`].
pub const OTHER: &str = "other";

/// Upper bounds of a histogram's buckets in milliseconds, each with its text in seconds. Those from
/// 5 ms to 10 s are the defaults of Prometheus' own libraries. There are some more at both ends,
/// because a key takes microseconds and a ticket may wait for half a minute.
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

/// A metric that can be registered: [`Counter`], [`Gauge`] or [`Histogram`].
pub trait Metric: Clone + Default + Send + Sync + 'static {
    /// The type in the `# TYPE` line.
    const KIND: &'static str;
    /// Appends the sample lines; `labels` is `a="b",c="d"` or empty.
    fn write(&self, out: &mut String, name: &str, labels: &str);
}

/// A value that only grows. Clones share it.
#[derive(Clone, Default)]
pub struct Counter(Arc<AtomicU64>);

/// A value that goes up and down. Clones share it.
#[derive(Clone, Default)]
pub struct Gauge(Arc<AtomicI64>);

/// Durations, counted in buckets. Clones share them.
#[derive(Clone, Default)]
pub struct Histogram(Arc<Buckets>);

/// One metric for each combination of label values. Clones share them.
#[derive(Clone)]
pub struct Labelled<M, const N: usize>(Arc<Series<M, N>>);

/// Counts as one in a gauge until it is dropped.
pub struct InFlight(Gauge);

/// All metrics of a program. Clones share them.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<BTreeMap<&'static str, Family>>>);

#[derive(Default)]
struct Buckets {
    /// Number of observations per bucket, without those in lower buckets. The last bucket is for
    /// durations above all bounds.
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

/// Appends the sample lines of the family with this name.
type Source = Box<dyn Fn(&mut String, &str) + Send + Sync>;

impl Counter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `more`.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Gauge {
    /// Sets the value.
    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Adds `more`, which may be negative.
    pub fn add(&self, more: i64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Adds one until the returned value is dropped, to count running work.
    pub fn enter(&self) -> InFlight {
        self.add(1);
        InFlight(self.clone())
    }

    /// Returns the value.
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

impl Histogram {
    /// Records a duration.
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

    /// Runs `work` and records its duration.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.observe(started.elapsed());
        result
    }

    /// Returns the number of recorded durations.
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
    /// Returns the metric with these label values, in the order of the label names.
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
        lock(&self.0.metrics)
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
    /// Creates a registry without metrics.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Adds a metric without labels. `help` is a sentence.
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

    /// Adds a metric with these labels: one series for each combination of their values.
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

    /// Adds a gauge whose value is computed when the metrics are read; `None` omits it. Several
    /// gauges of one name must differ in their labels.
    pub fn gauge_of(
        &self,
        name: &'static str,
        help: &'static str,
        of: &[(&'static str, &str)],
        value: impl Fn() -> Option<f64> + Send + Sync + 'static,
    ) {
        self.callback(name, help, Gauge::KIND, of, value);
    }

    /// Adds a counter whose value is computed when the metrics are read; `None` omits it.
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

    fn register(&self, name: &'static str, help: &'static str, kind: &'static str, source: Source) {
        debug_assert!(is_name(name, "_:"), "{name}");
        let mut families = lock(&self.0);
        let family = families.entry(name).or_insert_with(|| Family {
            kind,
            help,
            sources: Vec::new(),
        });
        debug_assert_eq!(family.kind, kind, "{name} is registered as two kinds");
        family.sources.push(source);
    }

    /// Returns all metrics in the text format.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(8 << 10);
        for (name, family) in lock(&self.0).iter() {
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
    // Writing to a `String` never fails.
    let _ = if labels.is_empty() {
        writeln!(out, "{name} {value}")
    } else {
        writeln!(out, "{name}{{{labels}}} {value}")
    };
}

fn labels<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    pairs
        .map(|(name, value)| format!("{name}=\"{}\"", escaped(value, true)))
        .collect::<Vec<_>>()
        .join(",")
}

/// Escapes a help text, or a label's value, in which quotes are escaped too.
fn escaped(text: &str, quotes: bool) -> String {
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    if quotes {
        text.replace('"', "\\\"")
    } else {
        text
    }
}

/// Returns whether `name` has only letters, digits and `more`, and does not begin with a digit.
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
    fn a_gauge_counts_what_is_in_flight_until_it_ends() {
        let gauge = Gauge::default();
        let first = gauge.enter();
        let second = gauge.clone().enter();
        assert_eq!(gauge.get(), 2);
        drop((first, second));
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn endless_label_values_do_not_fill_the_memory() {
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
