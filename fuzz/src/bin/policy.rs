//! The measurement policy: an accepted policy enforces something, and parses to the same policy after it was written.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use verifier::Policy;

fuzz_target!(|text: &str| {
    let Ok(policy) = Policy::from_json(text) else {
        return;
    };
    let none = BTreeMap::new();
    assert!(
        policy
            .mismatches(&none)
            .any(|(_, measurement, _)| !measurement.warn_only)
    );
    let written = cli::trust::policy::text(&policy);
    assert_eq!(Policy::from_json(&written).as_ref(), Ok(&policy));
});
