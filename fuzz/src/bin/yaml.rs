//! YAML: a document that is accepted is accepted as the JSON of its value too, and is the same.
#![no_main]

use kubernetes::yaml;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for document in yaml::documents(text).unwrap_or_default() {
        let again = yaml::document(&document.to_string());
        assert!(again.as_ref() == Ok(&document), "{document} {again:?}");
    }
});
