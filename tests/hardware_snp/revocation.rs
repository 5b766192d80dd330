//! AMD's list of revoked certificates, which the root of the tests signs here.

use base::der::{BOOLEAN, DerReader, OBJECT_IDENTIFIER, OCTET_STRING, SEQUENCE, context};
use hardware::snp::chain::{Chain, check_list};
use hardware::snp::report::ReportSigner;
use rustls_pki_types::UnixTime;
use support::mutation::mutations;

use crate::forged::Hierarchy;

const FROM: &str = "20250101000000Z";
const UNTIL: &str = "20490101000000Z";

/// Verifies the certificates of the tests with a list.
fn verify(list: &[u8]) -> Result<(), String> {
    let [leaf, ask, ark] = ["vcek", "ask", "ark"].map(|name| Hierarchy::get().certificate(name));
    let chain = Chain {
        leaf: &leaf,
        intermediate: &ask,
        root: &ark,
        revoked: Some(list),
    };
    let verified = chain.verify(ReportSigner::Vcek, UnixTime::now()).map(drop);
    verified.map_err(|refusal| refusal.to_string())
}

fn by_the_root(serials: &[&str]) -> Vec<u8> {
    Hierarchy::get().list("ark", serials, FROM, UNTIL)
}

fn refusal(list: &[u8]) -> String {
    verify(list).unwrap_err()
}

#[test]
fn a_list_without_these_certificates_refuses_nothing() {
    verify(&by_the_root(&[])).unwrap();
    verify(&by_the_root(&["0A", "70"])).unwrap();
}

#[test]
fn a_revoked_authority_is_found() {
    let why = refusal(&by_the_root(&["0A", "09"]));
    assert!(
        why.contains("the authority that issued it is revoked"),
        "{why}"
    );
}

#[test]
fn a_revoked_key_of_a_chip_is_found() {
    let why = refusal(&by_the_root(&["0A", "08"]));
    assert!(
        why.contains("it is revoked") && why.contains("number 08"),
        "{why}"
    );
}

#[test]
fn a_list_that_has_expired_is_refused() {
    let list = Hierarchy::get().list("ark", &[], "20240101000000Z", "20240201000000Z");
    let why = refusal(&list);
    assert!(why.contains("revoked certificates has expired"), "{why}");
}

#[test]
fn a_list_that_is_not_valid_yet_is_refused() {
    let why = refusal(&Hierarchy::get().list("ark", &[], "20480101000000Z", UNTIL));
    assert!(
        why.contains("revoked certificates is not valid yet"),
        "{why}"
    );
}

#[test]
fn a_list_of_another_issuer_is_refused() {
    let why = refusal(&Hierarchy::get().list("ask", &[], FROM, UNTIL));
    assert!(why.contains("was not issued by the root"), "{why}");
    // a list of an authority with the right name, but another key
    let why = refusal(&Hierarchy::get().list("other", &[], FROM, UNTIL));
    assert!(why.contains("is not signed by the root"), "{why}");
}

#[test]
fn an_altered_list_is_refused() {
    let list = by_the_root(&["0A"]);
    let ark = Hierarchy::get().certificate("ark");
    let check = |list: &[u8]| check_list(list, &ark, UnixTime::now());
    check(&list).unwrap();
    for altered in mutations(&list, 500).filter(|altered| *altered != list) {
        assert!(verify(&altered).is_err());
        assert!(check(&altered).is_err());
    }
    assert!(verify(&[]).is_err());
}

/// The library would ignore such a list, and accept a revoked authority; it would not even check the list's signature.
#[test]
fn a_list_that_says_that_it_is_for_other_certificates_counts_only_if_the_root_signed_it() {
    let list = by_the_root(&["09"]);
    // issuingDistributionPoint { a URI, onlyContainsUserCerts }, critical
    let name = [0xa0, 5, 0xa0, 3, 0x86, 1, b'u'];
    let scope = base::der::element(SEQUENCE, &[&name, &[0x81, 1, 0xff]]);
    let oid = [OBJECT_IDENTIFIER, 3, 0x55, 0x1d, 0x1c, BOOLEAN, 1, 0xff];
    let value = base::der::element(OCTET_STRING, &[&scope]);
    let scope = base::der::element(SEQUENCE, &[&oid, &value]);
    let mut whole = DerReader::new(DerReader::new(&list).expect(SEQUENCE).unwrap());
    let mut tbs = DerReader::new(whole.expect(SEQUENCE).unwrap());
    let (mut parts, mut rest) = (vec![], vec![]);
    while let Ok((tag, content)) = tbs.read() {
        // the extensions come last
        let content = if tag == context(0) {
            let all = DerReader::new(content).expect(SEQUENCE).unwrap();
            base::der::element(SEQUENCE, &[all, &scope])
        } else {
            content.to_vec()
        };
        parts.push(base::der::element(tag, &[&content]));
    }
    while let Ok((tag, content)) = whole.read() {
        rest.extend(base::der::element(tag, &[content]));
    }
    let tbs = base::der::element(SEQUENCE, &[&parts.concat()]);
    let forged = base::der::element(SEQUENCE, &[&tbs, &rest]);
    let why = refusal(&forged);
    assert!(why.contains("is not signed by the root"), "{why}");
}
