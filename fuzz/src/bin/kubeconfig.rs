//! A node's kubeconfig: what is rebuilt of it is rebuilt the same again, and has the lines of ours and no others.
#![no_main]

use kubernetes::kubeconfig::rebuild;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Ok(built) = rebuild(text, "cluster") {
        assert!(rebuild(built.expose(), "cluster").as_ref() == Ok(&built));
        assert_eq!(built.expose().split(|byte| *byte == b'\n').count(), 19);
    }
});
