//! Judges what other machines prove (RFC 9334: the verifier). Until the next step, the crate `attest` compiles the files beside this one.
