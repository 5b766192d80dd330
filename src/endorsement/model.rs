//! The TPM that the certificate of an endorsement key names: vendor and model in the subjectAltName, as a directoryName ("TCG EK
//! Credential Profile", §3.2.9). Most vendors write a relative name for each attribute, Nuvoton one for all.

use base::der::{
    DerReader, Malformed, OBJECT_IDENTIFIER, PRINTABLE_STRING, SEQUENCE, SET, UTF8_STRING, context,
};
use base::x509::Certificate;
use verifier::policy::tpm::{TpmModel, TpmVendor};

/// subjectAltName, 2.5.29.17 (RFC 5280 §4.2.1.6): the content of the OID.
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
/// tcg-at-tpmManufacturer, 2.23.133.2.1.
const MANUFACTURER: &[u8] = &[0x67, 0x81, 0x05, 0x02, 0x01];
/// tcg-at-tpmModel, 2.23.133.2.2.
const MODEL: &[u8] = &[0x67, 0x81, 0x05, 0x02, 0x02];
/// directoryName, a choice of GeneralName.
const DIRECTORY_NAME: u8 = context(4);
/// Maximum length of the name of a model in bytes.
const MAX_MODEL: usize = 64;

/// Returns the TPM that a certificate (DER) names; `None` if it does not name exactly one vendor and one model in the form of the
/// profile. The certificate is not verified here.
pub fn named(certificate: &[u8]) -> Option<TpmModel> {
    let certificate = Certificate::parse(certificate).ok()?;
    let (vendor, model) = read(certificate.extension(SUBJECT_ALT_NAME)?).ok()?;
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(str::to_owned);
    let is_printable = |name: &String| {
        let is_plain = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
        (1..=MAX_MODEL).contains(&name.len()) && name.bytes().all(is_plain)
    };
    Some(TpmModel {
        vendor: TpmVendor::of_certificate(&text(vendor?)?)?,
        name: text(model?).filter(is_printable)?,
    })
}

/// The texts of vendor and model.
type Texts<'a> = (Option<&'a [u8]>, Option<&'a [u8]>);

/// Returns the texts of vendor and model. Each may be there once.
fn read(names: &[u8]) -> Result<Texts<'_>, Malformed> {
    let mut outer = DerReader::new(names);
    let mut names = DerReader::new(outer.expect(SEQUENCE)?);
    outer.end()?;
    let (mut vendor, mut model) = (None, None);
    while !names.is_empty() {
        let (DIRECTORY_NAME, name) = names.read()? else {
            continue;
        };
        let mut name = DerReader::new(name);
        let mut relative = DerReader::new(name.expect(SEQUENCE)?);
        name.end()?;
        while !relative.is_empty() {
            let mut attributes = DerReader::new(relative.expect(SET)?);
            while !attributes.is_empty() {
                let mut attribute = DerReader::new(attributes.expect(SEQUENCE)?);
                let kind = attribute.expect(OBJECT_IDENTIFIER)?;
                let (tag, value) = attribute.read()?;
                attribute.end()?;
                let place = match kind {
                    MANUFACTURER => &mut vendor,
                    MODEL => &mut model,
                    _ => continue,
                };
                let is_text = matches!(tag, UTF8_STRING | PRINTABLE_STRING);
                if !is_text || place.replace(value).is_some() {
                    return Err(Malformed);
                }
            }
        }
    }
    Ok((vendor, model))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::der::element;
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    use support::mutation::mutations;

    /// A genuine certificate of STMicroelectronics for the endorsement key of a TPM 1.2, whose name has the same form: from the tests
    /// of the NSA's HIRS, HIRS_Utils/src/test/resources/certificates/nuc-1/tpmcert.pem.
    const STM: &[u8] = include_bytes!("../../tests/data/stm-ek.pem");

    fn attribute(kind: &[u8], tag: u8, value: &str) -> Vec<u8> {
        let kind = element(OBJECT_IDENTIFIER, &[kind]);
        element(SEQUENCE, &[&kind, &element(tag, &[value.as_bytes()])])
    }

    /// Returns a subjectAltName with these relative names.
    fn subject(relative: &[Vec<u8>]) -> Vec<u8> {
        let sets: Vec<_> = relative.iter().map(|it| element(SET, &[it])).collect();
        let name = element(DIRECTORY_NAME, &[&element(SEQUENCE, &[&sets.concat()])]);
        // a dNSName before it
        element(SEQUENCE, &[&element(0x82, &[b"tpm"]), &name])
    }

    #[test]
    fn a_genuine_certificate_names_its_vendor() {
        let certificate = CertificateDer::from_pem_slice(STM).unwrap();
        let tpm = named(&certificate).unwrap();
        assert_eq!(tpm.to_string(), "STM ST33ZP24PVSP");
        for certificate in mutations(&certificate, 5000) {
            if let Some(tpm) = named(&certificate) {
                assert!((1..=MAX_MODEL).contains(&tpm.name.len()));
            }
        }
    }

    #[test]
    fn the_attributes_are_in_one_relative_name_or_in_several() {
        let vendor = attribute(MANUFACTURER, UTF8_STRING, "id:4E544300");
        let model = attribute(MODEL, PRINTABLE_STRING, "NPCT75x");
        let version = attribute(&[0x67, 0x81, 0x05, 0x02, 0x03], UTF8_STRING, "id:00070002");
        let both = (Some(&b"id:4E544300"[..]), Some(&b"NPCT75x"[..]));
        for good in [
            vec![vendor.clone(), model.clone(), version.clone()],
            // as in certificates of Nuvoton
            vec![[version.clone(), model.clone(), vendor.clone()].concat()],
        ] {
            assert_eq!(read(&subject(&good)), Ok(both));
        }
        let [only_vendor, only_model] =
            [&vendor, &model].map(|it| subject(std::slice::from_ref(it)));
        assert_eq!(read(&only_model), Ok((None, both.1)));
        let wrong_type = attribute(MANUFACTURER, 0x1e, "id:4E544300");
        for bad in [
            subject(&[vendor.clone(), vendor]),
            subject(&[wrong_type, model]),
            [&only_vendor[..], &[0]].concat(),
            only_vendor[..20].to_vec(),
        ] {
            assert_eq!(read(&bad), Err(Malformed));
        }
    }
}
