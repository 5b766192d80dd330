//! The certificate table that a host gives to its guests with a report (56421 "GHCB", SNP Extended
//! Guest Request). The host fills it, so nothing in it is trusted.

use base::bytes::Reader;

use crate::Error;

/// Length in bytes of an entry: GUID, offset and length.
const ENTRY: usize = 24;
/// Maximum number of entries; seven kinds are known.
const MAX_ENTRIES: usize = 64;

/// A kind of entry by its GUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryKind([u8; 16]);

impl EntryKind {
    /// The certificate of the chip, DER or PEM: 63da758d-e664-4564-adc5-f4b93be8accd.
    pub const VCEK: EntryKind =
        EntryKind(0x63da758d_e664_4564_adc5_f4b93be8accd_u128.to_be_bytes());
    /// The certificate of the cloud's key: a8074bc2-a25a-483e-aae6-39c045a0b8a1.
    pub const VLEK: EntryKind =
        EntryKind(0xa8074bc2_a25a_483e_aae6_39c045a0b8a1_u128.to_be_bytes());
    /// The intermediate certificate: 4ab7b379-bbac-4fe4-a02f-05aef327c782.
    pub const ASK: EntryKind = EntryKind(0x4ab7b379_bbac_4fe4_a02f_05aef327c782_u128.to_be_bytes());
    /// The root, which is never trusted from here: c0b406a4-a803-4952-9743-3fb6014cd0ae.
    pub const ARK: EntryKind = EntryKind(0xc0b406a4_a803_4952_9743_3fb6014cd0ae_u128.to_be_bytes());
    /// The revocation list of AMD: 92f81bc3-5811-4d3d-97ff-d19f88dc67ea.
    pub const CRL: EntryKind = EntryKind(0x92f81bc3_5811_4d3d_97ff_d19f88dc67ea_u128.to_be_bytes());
    /// Google's endorsement of its firmware: 9f4116cd-c503-4f5a-8f6f-fb68882f4ce2.
    pub const GCE_ENDORSEMENT: EntryKind =
        EntryKind(0x9f4116cd_c503_4f5a_8f6f_fb68882f4ce2_u128.to_be_bytes());
}

/// A table that is well-formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateTable<'a> {
    entries: Vec<(EntryKind, &'a [u8])>,
}

impl<'a> CertificateTable<'a> {
    /// Reads a table; if the host supplies nothing, the table is empty.
    pub fn parse(bytes: &'a [u8]) -> Result<CertificateTable<'a>, Error> {
        let wrong = |why: &str| Error::Malformed(format!("the certificate table {why}"));
        let mut entries: Vec<(EntryKind, &[u8])> = vec![];
        if bytes.is_empty() {
            return Ok(CertificateTable { entries });
        }
        for entry in bytes.chunks_exact(ENTRY) {
            let mut entry = Reader(entry);
            let fields = (entry.array(), entry.u32_le(), entry.u32_le());
            let (Some(guid), Some(offset), Some(len)) = fields else {
                break;
            };
            if *guid == [0; 16] {
                return Ok(CertificateTable { entries });
            }
            if entries.len() == MAX_ENTRIES {
                return Err(wrong(&format!("has more than {MAX_ENTRIES} entries")));
            }
            let kind = EntryKind(*guid);
            if entries.iter().any(|(other, _)| *other == kind) {
                return Err(wrong("has two entries of one kind"));
            }
            let content = bytes.get(offset as usize..);
            let content = content.and_then(|rest| rest.get(..len as usize));
            let outside =
                || Error::Malformed("an entry of the certificate table is outside of it".into());
            entries.push((kind, content.ok_or_else(outside)?));
        }
        Err(wrong("has no end"))
    }

    /// Returns the content of the entry of a kind.
    pub fn get(&self, kind: EntryKind) -> Option<&'a [u8]> {
        let found = self.entries.iter().find(|(other, _)| *other == kind);
        found.map(|(_, content)| *content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// Returns a table of these entries.
    fn table(entries: &[(EntryKind, &[u8])]) -> Vec<u8> {
        let mut offset = ENTRY * (entries.len() + 1);
        let (mut head, mut contents) = (vec![], vec![]);
        for (EntryKind(guid), content) in entries {
            head.extend_from_slice(guid);
            head.extend_from_slice(&(offset as u32).to_le_bytes());
            head.extend_from_slice(&(content.len() as u32).to_le_bytes());
            offset += content.len();
            contents.extend_from_slice(content);
        }
        [head, vec![0; ENTRY], contents].concat()
    }

    #[test]
    fn entries_are_found_by_kind() {
        let bytes = table(&[(EntryKind::VCEK, b"vcek"), (EntryKind::ASK, b"ask")]);
        let read = CertificateTable::parse(&bytes).unwrap();
        assert_eq!(read.get(EntryKind::VCEK), Some(&b"vcek"[..]));
        assert_eq!(read.get(EntryKind::ASK), Some(&b"ask"[..]));
        assert_eq!(read.get(EntryKind::ARK), None);
        assert_eq!(
            CertificateTable::parse(b"").unwrap().get(EntryKind::ASK),
            None
        );
    }

    #[test]
    fn a_table_that_leads_outside_itself_is_refused() {
        let good = table(&[(EntryKind::VCEK, b"vcek")]);
        let with = |at: usize, value: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            bytes
        };
        for (bytes, why) in [
            (with(16, u32::MAX), "outside of it"),
            (with(20, u32::MAX), "outside of it"),
            (with(20, 5), "outside of it"),
            (good[..ENTRY].to_vec(), "outside of it"),
            (
                table(&[(EntryKind::ASK, &b""[..]); 2]),
                "two entries of one kind",
            ),
            (vec![1], "has no end"),
        ] {
            let error = CertificateTable::parse(&bytes).unwrap_err();
            assert!(error.to_string().contains(why), "{bytes:02x?}: {error}");
        }
    }

    #[test]
    fn altered_tables_are_read_without_a_panic() {
        let good = table(&[(EntryKind::VCEK, b"vcek"), (EntryKind::CRL, b"crl")]);
        for bytes in mutations(&good, 5000) {
            let _ = CertificateTable::parse(&bytes);
        }
    }
}
