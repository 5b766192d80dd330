//! The parameters of a TPM's responses (TPM 2.0 part 3). If the host emulates the TPM, the host
//! controls these bytes. Each function returns `None` for bytes that have another form. A length in
//! them never decides how much memory is allocated.

use base::bytes::Reader;
use base::crypto::Secret;

use super::bank::Bank;

/// Returns the parameters of a response with sessions: the parameters come after their size, and
/// the sessions come after the parameters.
pub fn of_sessions(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader(bytes);
    let len = reader.u32_be()?;
    Some(reader.take(len as usize)?.to_vec())
}

/// Reads TPMS_CAPABILITY_DATA with TPM_CAP_HANDLES.
pub fn handles(bytes: &[u8]) -> Option<Vec<u32>> {
    let mut reader = Reader(bytes);
    // moreData, the capability
    reader.take(1 + 4)?;
    list(&mut reader, |reader| reader.u32_be())
}

/// Reads TPMS_CAPABILITY_DATA with TPM_CAP_PCRS: the allocated banks that this program knows, with
/// their PCRs.
pub fn banks(bytes: &[u8]) -> Option<Vec<(Bank, Vec<u32>)>> {
    let mut reader = Reader(bytes);
    reader.take(1 + 4)?;
    let selections = list(&mut reader, selection)?;
    let known = |(id, slots): (u16, Vec<u32>)| Some((Bank::with_id(id.into())?, slots));
    let allocated = |(_, slots): &(Bank, Vec<u32>)| !slots.is_empty();
    Some(
        selections
            .into_iter()
            .filter_map(known)
            .filter(allocated)
            .collect(),
    )
}

/// Reads the response to TPM2_PCR_Read: the values.
pub fn pcrs(bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut reader = Reader(bytes);
    // pcrUpdateCounter
    reader.take(4)?;
    list(&mut reader, selection)?;
    list(&mut reader, |reader| Some(reader.tpm2b()?.to_vec()))
}

/// Reads the parameters of TPM2_Quote: TPMS_ATTEST and TPMT_SIGNATURE.
pub fn quote(bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut reader = Reader(bytes);
    Some((reader.tpm2b()?.to_vec(), reader.0.to_vec()))
}

/// Reads one TPM2B at the front: TPMT_PUBLIC of TPM2_ReadPublic, the data of TPM2_NV_Read.
pub fn first(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(Reader(bytes).tpm2b()?.to_vec())
}

/// Reads the parameters of TPM2_ActivateCredential.
pub fn secret(bytes: &[u8]) -> Option<Secret> {
    Some(Secret::new(Reader(bytes).tpm2b()?.to_vec()))
}

/// Reads the response to TPM2_CreatePrimary: the handle, which comes before the size of the
/// parameters, and TPMT_PUBLIC.
pub fn created(bytes: &[u8]) -> Option<(u32, Vec<u8>)> {
    let mut reader = Reader(bytes);
    let handle = reader.u32_be()?;
    Some((handle, first(&of_sessions(reader.0)?)?))
}

/// Reads the response to TPM2_StartAuthSession: handle and nonce.
pub fn session(bytes: &[u8]) -> Option<(u32, Vec<u8>)> {
    let mut reader = Reader(bytes);
    let session = (reader.u32_be()?, reader.tpm2b()?.to_vec());
    (!session.1.is_empty() && reader.0.is_empty()).then_some(session)
}

/// The content of TPM2_NV_ReadPublic for an NV index.
pub struct NvPublic {
    /// TPMA_NV
    pub attributes: u32,
    /// The size of the data in bytes.
    pub size: usize,
    /// The Name of the index.
    pub name: Vec<u8>,
}

/// Reads the response to TPM2_NV_ReadPublic.
pub fn nv_public(bytes: &[u8]) -> Option<NvPublic> {
    let mut reader = Reader(bytes);
    let mut public = Reader(reader.tpm2b()?);
    // nvIndex, nameAlg
    public.take(4 + 2)?;
    let attributes = public.u32_be()?;
    public.tpm2b()?;
    Some(NvPublic {
        attributes,
        size: public.u16_be()?.into(),
        name: reader.tpm2b()?.to_vec(),
    })
}

/// Reads a list, which begins with the number of its elements. Each element has bytes, so if the
/// number is too large, reading ends at the end of the bytes.
fn list<T>(
    reader: &mut Reader<'_>,
    element: impl Fn(&mut Reader<'_>) -> Option<T>,
) -> Option<Vec<T>> {
    let mut elements = vec![];
    for _ in 0..reader.u32_be()? {
        elements.push(element(reader)?);
    }
    Some(elements)
}

/// Reads TPMS_PCR_SELECTION: a bank's TPM_ALG_ID and its PCRs.
fn selection(reader: &mut Reader<'_>) -> Option<(u16, Vec<u32>)> {
    let bank = reader.u16_be()?;
    let len = reader.u8()?;
    let bits = reader.take(len.into())?;
    let is_set = |slot: &u32| bits[*slot as usize / 8] >> (slot % 8) & 1 == 1;
    // our commands select only the first 24 PCRs
    let slots = (0..u32::from(len).min(3) * 8).filter(is_set);
    Some((bank, slots.collect()))
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    /// Responses of swtpm 0.7.1, without their headers.
    const BANKS: &[u8] =
        b"\0\0\0\0\x05\0\0\0\x05\0\x04\x03\xff\xff\xff\0\x0b\x03\xff\xff\xff\0\x0c\x03\0\0\0\
        \0\x12\x03\xff\xff\xff\0\x0d\x03\x01\0\x80";
    const SESSION: &[u8] = b"\x03\0\0\0\0\x04abcd";
    const NV_PUBLIC: &[u8] = b"\0\x0e\x01\xc0\0\x02\0\x0b\x42\x02\0\x02\0\0\x04\0\0\x04\0\x0bNN";

    /// Reads the parameters of each command, whatever the bytes are.
    fn read_all(bytes: &[u8]) {
        let _ = (of_sessions(bytes), handles(bytes));
        let _ = (banks(bytes), pcrs(bytes), quote(bytes));
        let _ = (first(bytes), secret(bytes), created(bytes));
        let _ = (session(bytes), nv_public(bytes));
    }

    #[test]
    fn responses_are_read() {
        let all: Vec<u32> = (0..24).collect();
        let known = [
            (Bank::Sha1, all.clone()),
            (Bank::Sha256, all),
            (Bank::Sha512, vec![0, 23]),
        ];
        assert_eq!(banks(BANKS).unwrap(), known);
        assert_eq!(session(SESSION), Some((0x0300_0000, b"abcd".to_vec())));
        let index = nv_public(NV_PUBLIC).unwrap();
        assert_eq!((index.attributes, index.size), (0x4202_0002, 1024));
        assert_eq!(index.name, b"\0\x0bNN");
        assert_eq!(
            handles(b"\0\0\0\0\x01\0\0\0\x01\x81\0\0\x01"),
            Some(vec![0x8100_0001])
        );
        let made = created(b"\x80\0\0\0\0\0\0\x06\0\x02AB\0\0rest").unwrap();
        assert_eq!(made, (0x8000_0000, b"AB".to_vec()));
    }

    #[test]
    fn bytes_of_another_form_are_refused_without_a_panic_or_a_large_allocation() {
        // four thousand million elements
        assert_eq!(handles(b"\0\0\0\0\x01\xff\xff\xff\xff\x81\0\0\x01"), None);
        assert_eq!(pcrs(b"\0\0\0\0\xff\xff\xff\xff"), None);
        assert_eq!(session(b"\x03\0\0\0\0\0"), None);
        assert_eq!(session(b"\x03\0\0\0\0\x01ab"), None);
        for genuine in [BANKS, SESSION, NV_PUBLIC] {
            for end in 0..genuine.len() {
                read_all(&genuine[..end]);
            }
            mutations(genuine, 5_000).for_each(|bytes| read_all(&bytes));
        }
    }
}
