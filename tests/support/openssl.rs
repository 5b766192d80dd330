//! Certificates made with openssl(1).

use std::fs;
use std::path::Path;
use std::process::Command;

/// Makes a CA with the certificate `ca.crt` and the key `ca.key` in this directory.
pub fn authority() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    openssl(
        folder.path(),
        "ecparam -name prime256v1 -genkey -noout -out ca.key",
    );
    openssl(
        folder.path(),
        "req -x509 -key ca.key -subj /CN=kubernetes -out ca.crt",
    );
    folder
}

/// Runs openssl in this directory and returns its output.
pub fn openssl(folder: &Path, arguments: &str) -> String {
    let output = Command::new("openssl")
        .args(arguments.split(' '))
        .current_dir(folder)
        .output()
        .expect("openssl: is it installed?");
    assert!(
        output.status.success(),
        "{arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Signs a certificate request (PKCS #10, DER) and returns the certificate in PEM.
pub fn sign(authority: &Path, request: &[u8]) -> Vec<u8> {
    fs::write(authority.join("request"), request).unwrap();
    openssl(
        authority,
        "x509 -req -inform der -in request -CA ca.crt -CAkey ca.key -CAcreateserial -out crt",
    );
    fs::read(authority.join("crt")).unwrap()
}
