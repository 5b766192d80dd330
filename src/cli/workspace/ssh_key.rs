//! The SSH key of an operator, which signs: in a file, in an agent, or on a FIDO2 token. ssh-keygen reaches it.

use std::path::Path;
use std::process::Command;

use base::child_process;

use crate::shell::error::Error;

/// Signs `message` in this namespace (PROTOCOL.sshsig) with the key in this file, or with that of an agent whose public key is in this
/// file. ssh-keygen asks for a passphrase or a touch. Returns what it prints: the signature in lines of base64.
pub fn sign(key: &Path, namespace: &str, message: &[u8]) -> Result<String, Error> {
    let mut command = Command::new("ssh-keygen");
    command
        .args(["-q", "-Y", "sign", "-n", namespace, "-f"])
        .arg(key);
    let output = child_process::in_foreground(&mut command, message)
        .map_err(|error| failed(key, &error.to_string()))?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Returns the error for a key whose signature cannot be used.
pub fn failed(key: &Path, why: &str) -> Error {
    Error::failed(format!("cannot sign with the key {}: {why}", key.display()))
}
