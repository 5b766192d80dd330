//! The answers of servers of certificates, and stored entries: chains in header fields and PEM, Intel's signed JSON, pauses,
//! entries of each kind, and a machine's certificate with the URL of its issuer. The first byte chooses one of them, and the rest
//! is its content.
#![no_main]

use std::time::{Duration, UNIX_EPOCH};

use collateral::parsers::{
    Item, PckAuthority, chip_of, config_map, der_or_digits, issuer, issuer_chain, retry_after,
    signed,
};
use hardware::snp::report::ReportSigner;
use hardware::snp::tcb::{Product, Tcb};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(bytes);
    let of_chip = |product, len| Item::Vcek {
        product,
        chip: vec![0x1e; len],
        tcb: Tcb::default(),
    };
    let item = match kind % 12 {
        0 => of_chip(Product::Milan, 64),
        1 => of_chip(Product::Turin, 8),
        2 => Item::Revoked(Product::Milan, ReportSigner::Vcek),
        3 => Item::Revoked(Product::Milan, ReportSigner::Vlek),
        4 => Item::Tdx {
            fmspc: [0xb0, 0xc0, 0x6f, 0, 0, 0],
            authority: PckAuthority::Platform,
        },
        5 => {
            let now = UNIX_EPOCH + Duration::from_secs(1_795_000_000);
            let _ = retry_after(&text, now);
            return;
        }
        6 => {
            if let Ok(pem) = issuer_chain(&text) {
                assert!(pem.len() <= text.len());
            }
            return;
        }
        7 => {
            if let Ok((value, _)) = signed("tcbInfo", bytes) {
                assert!(value.starts_with('{') && value.ends_with('}') && text.contains(&value));
            }
            return;
        }
        8 => {
            assert!(chip_of(&text).is_none_or(|chip| text.contains(chip)));
            let _ = PckAuthority::of_chain(bytes);
            assert!(der_or_digits(bytes).len() <= bytes.len());
            return;
        }
        10 => Item::Issuer {
            path: "/privateca-content-1/ca.crt".into(),
            key: vec![1; 20],
        },
        11 => {
            if let Ok(Some(item)) = issuer(bytes) {
                assert!(item.is_named_by_strangers() && item.name().len() < 100);
            }
            return;
        }
        _ => {
            if let Ok(object) = serde_json::from_slice(bytes) {
                let _ = config_map(&object, "vcek-milan.crl");
            }
            return;
        }
    };
    let _ = item.read(bytes);
});
