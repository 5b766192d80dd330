//! The TPMs of clouds: swtpm is provisioned as each cloud provisions its own, with tpm2-tools. The variants issue and validate over
//! attested TLS; the authorities that certify are of the tests.

mod authority;
mod azure_trustedlaunch;
mod cloud_tpm;
mod host;
mod meeting;
mod prepared_keys;
