//! Prints the attestation document that AWS's library gets from the TPM at `TPM_DEVICE`, as the program `nitro-tpm-attest` does.
//!
//! nitro-peer NONCE-FILE KEY-FILE

fn main() {
    let mut given = std::env::args_os().skip(1).map(|path| std::fs::read(path).unwrap());
    let (nonce, key) = (given.next(), given.next());
    let document = nitro_tpm_attest::attestation_document(None, nonce, key);
    std::io::Write::write_all(&mut std::io::stdout(), &document.unwrap()).unwrap();
}
