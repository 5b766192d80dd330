//! The TPMs of clouds: the tests provision swtpm with tpm2-tools as each cloud provisions its TPMs. The variants issue and validate
//! over attested TLS. The tests' own authorities certify the keys.

mod authority;
mod aws_nitro_tpm;
mod aws_sev_snp;
mod azure_sev_snp;
mod azure_tdx;
mod azure_trustedlaunch;
mod carried;
mod cloud_tpm;
#[allow(dead_code)] // the tests of collateral use all of it
#[path = "../collateral/server.rs"]
mod collateral_server;
mod endorsed_keys;
#[path = "../hardware_snp/forged.rs"]
mod forged_snp;
#[allow(dead_code)] // the tests of the hardware use all of it
#[path = "../hardware_tdx/forged.rs"]
mod forged_tdx;
mod gcp_sev_es;
mod gcp_tdx;
mod host;
#[path = "../node/json.rs"]
mod json;
mod meeting;
mod microsofts_word;
mod nitro_machine;
mod nitro_tpm;
mod prepared_keys;
mod refusals;
mod rejoin;
mod sev_snp;
mod shown;
mod strong;

use cloud_tpm::NONCE;
use common::at::At;
use verifier::{Evidence, Validator};

/// Returns the correct document of each variant of a cloud, with its validator.
fn samples() -> Vec<meeting::Sample> {
    let machines = [
        azure_trustedlaunch::correct,
        azure_sev_snp::correct,
        gcp_sev_es::correct,
        sev_snp::correct_of_google,
        sev_snp::correct_of_aws,
        sev_snp::correct_of_aws_with_documents,
        aws_nitro_tpm::correct,
    ];
    machines.map(|machine| machine().sample()).into()
}

#[test]
fn each_variant_of_a_cloud_accepts_its_correct_document() {
    let of_tdx = [azure_tdx::sample(), gcp_tdx::sample()];
    for (document, judge) in samples().into_iter().chain(of_tdx) {
        judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    }
}

#[test]
fn each_variant_of_a_cloud_judges_certificates_at_the_time_that_it_is_given() {
    for (document, judge) in samples() {
        let refused = At(0, judge).judge(&Evidence::new(&document, NONCE));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("is not valid yet"), "{refused}");
    }
}
