//! A node's kubeconfig. The kubeconfig that is rebuilt from it does not change if it is rebuilt again, has only our lines, and can be read
//! by the client.
#![no_main]

use std::path::Path;

use kubernetes::client::ApiAccess;
use kubernetes::kubeconfig::rebuild;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let read = |text: &[u8]| {
        let text = String::from_utf8_lossy(text);
        ApiAccess::from_kubeconfig(&text, "config", Path::new("/nowhere"))
    };
    let _ = read(text);
    if let Ok(built) = rebuild(text, "cluster", "user") {
        assert!(rebuild(built.expose(), "cluster", "user").as_ref() == Ok(&built));
        assert!(read(built.expose()).is_ok());
        assert_eq!(built.expose().split(|byte| *byte == b'\n').count(), 19);
    }
});
