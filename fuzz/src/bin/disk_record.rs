//! The record of a disk in the folder of a join service without Kubernetes.
#![no_main]

use std::sync::LazyLock;

use base::uuid::Uuid;
use libfuzzer_sys::fuzz_target;
use services::join_service::file_records::fields;

static DISK: LazyLock<Uuid> =
    LazyLock::new(|| Uuid::parse("0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22").expect("a UUID"));

fuzz_target!(|bytes: &[u8]| {
    if let Ok(fields) = fields(bytes, &DISK) {
        assert!(fields["machine"].is_string());
        let named = fields.get("disk").and_then(|disk| disk.as_str());
        assert!(named.is_none_or(|named| Uuid::parse(named).as_ref() == Some(&*DISK)));
    }
});
