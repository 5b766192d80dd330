//! The certificate table that a host gives with a report of SEV-SNP: each entry lies within the table, and each entry that a
//! machine sends can be parsed as a certificate. The seed has the certificate of a chip of the tests.
#![no_main]

use hardware::snp::certificate::ChipCertificate;
use hardware::snp::report::LEN;
use libfuzzer_sys::fuzz_target;
use tee::certificate_table::{CertificateTable, EntryKind};
use verifier::IssueError;
use verifier::snp::{InstanceInfo, Reporter};

/// A host that gives this table.
struct Host<'a>(&'a [u8]);

impl Reporter for Host<'_> {
    fn report(&self, report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), IssueError> {
        let mut report = vec![0; LEN];
        // version, guest policy, signature algorithm
        (report[0], report[0xa], report[0x34]) = (2, 2, 1);
        report[0x50..0x90].copy_from_slice(report_data);
        Ok((report, self.0.to_vec()))
    }
}

fuzz_target!(|bytes: &[u8]| {
    let table = CertificateTable::parse(bytes);
    let sent = InstanceInfo::of(&Host(bytes), &[7; 64], None);
    assert_eq!(table.is_ok(), sent.is_ok());
    let (Ok(table), Ok(sent)) = (table, sent) else {
        return;
    };
    for kind in [
        EntryKind::VCEK,
        EntryKind::VLEK,
        EntryKind::ASK,
        EntryKind::ARK,
        EntryKind::CRL,
    ] {
        if let Some(content) = table.get(kind) {
            assert!(bytes.as_ptr_range().contains(&content.as_ptr()) || content.is_empty());
            let _ = ChipCertificate::parse(content);
        }
    }
    assert_eq!(
        sent.report_signer.is_some(),
        table.get(EntryKind::VCEK).is_some()
    );
});
