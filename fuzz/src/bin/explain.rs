//! `firstlight explain`: whatever a log or a document contains, the report has a limited size and no control characters for a terminal.
#![no_main]

use cli::trust::explain::explained;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Ok(text) = explained(input) {
        let is_shown = |c: char| c == '\n' || !c.is_control();
        assert!(text.chars().all(is_shown), "{text}");
        assert!(text.len() <= 10_000 + 300 * input.len());
    }
});
