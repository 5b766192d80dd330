//! The public HTTP/2 conformance suite against our server, run by tools/h2spec.sh: no case fails and none is skipped.

use std::path::Path;
use std::process::Command;

#[test]
fn h2spec_passes_whole_in_plaintext_and_over_tls() {
    // Cargo builds target/…/debug/examples/h2_server together with the tests, in
    // target/…/debug/deps.
    let this = std::env::current_exe().unwrap();
    let server = this.ancestors().nth(2).unwrap().join("examples/h2_server");
    let script = Path::new(support::ROOT).join("tools/h2spec.sh");
    let output = Command::new(script).arg(server).output().unwrap();
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    println!("{said}{errors}");
    assert!(output.status.success());
    for mode in ["plaintext", "TLS"] {
        let summary = said
            .lines()
            .find(|line| line.starts_with(&format!("h2spec --strict, {mode}: ")));
        assert!(
            summary.is_some_and(|line| line.ends_with(" 0 skipped, 0 failed")),
            "{mode}"
        );
    }
}
