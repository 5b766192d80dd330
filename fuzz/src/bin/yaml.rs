//! YAML: if a document is accepted, the JSON of its value is accepted too, and has the same value.
#![no_main]

use kubernetes::yaml;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for document in yaml::documents(text).unwrap_or_default() {
        let again = yaml::document(&document.to_string());
        assert!(again.as_ref() == Ok(&document), "{document} {again:?}");
    }
});
