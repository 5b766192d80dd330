//! Metrics read by Prometheus' own Python library, and checked by its `promtool` if that is installed.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use services::metrics::{Counter, Exporter, Gauge, Histogram, Labelled, Registry};
use support::foreign::python;

fn registry() -> Registry {
    let registry = Registry::new();
    registry.add_process();
    let attempts: Labelled<Counter, 2> = registry.labelled(
        "firstlight_test_attempts_total",
        "Attempts, \"quoted\" \\ and\nso on.",
        ["result", "reason"],
    );
    attempts.with(["refused", "a \"name\"\\\n"]).add(3);
    attempts.with(["ok", ""]).inc();
    let waiting: Gauge = registry.add("firstlight_test_waiting", "Who waits.");
    waiting.set(-2);
    let seconds: Labelled<Histogram, 1> =
        registry.labelled("firstlight_test_seconds", "Time of a step.", ["step"]);
    for milliseconds in [1, 20, 90_000] {
        seconds
            .with(["key"])
            .observe(Duration::from_millis(milliseconds));
    }
    registry
}

#[test]
fn the_library_of_prometheus_reads_what_was_counted() {
    let exporter = Exporter::start("127.0.0.1:0".parse().unwrap(), &registry()).unwrap();
    let root = Path::new(support::ROOT);
    let output = python()
        .arg(root.join("tests/interop/metrics.py"))
        .arg(exporter.local_addr().to_string())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let said = String::from_utf8(output.stdout).unwrap();
    for line in [
        "counter firstlight_test_attempts_total {reason=,result=ok} 1",
        "counter firstlight_test_attempts_total {reason=a \"name\"\\",
        "gauge firstlight_test_waiting {} -2",
        "histogram firstlight_test_seconds_bucket {le=0.001,step=key} 1",
        "histogram firstlight_test_seconds_bucket {le=0.025,step=key} 2",
        "histogram firstlight_test_seconds_bucket {le=60,step=key} 2",
        "histogram firstlight_test_seconds_bucket {le=+Inf,step=key} 3",
        "histogram firstlight_test_seconds_count {step=key} 3",
        "histogram firstlight_test_seconds_sum {step=key} 90.021",
    ] {
        assert!(said.lines().any(|found| found == line), "{line}:\n{said}");
    }
    assert!(
        said.contains("gauge process_resident_memory_bytes {} "),
        "{said}"
    );
    assert!(
        said.contains("counter process_cpu_seconds_total {} "),
        "{said}"
    );
}

#[test]
fn promtool_accepts_names_and_format() {
    let Ok(mut promtool) = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    else {
        // Debian's package `prometheus` has promtool, together with a server. The test above
        // already has a reader of the format.
        return eprintln!("promtool is not installed: skipped");
    };
    promtool
        .stdin
        .take()
        .unwrap()
        .write_all(registry().render().as_bytes())
        .unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success() && said.is_empty(),
        "{}",
        String::from_utf8_lossy(&said)
    );
}
