//! Credentials are sent only to servers that the operator has named.
//!
//! The file of a wrapped master secret contains the address of its KMS, and nothing proves who wrote the file. An attacker who
//! replaces the file could put the address of a server of their own there and receive a token. So a program uses the address only
//! if the operator has named it too: in the URI that is an argument of the command, or in a variable, which the service's own
//! programs read too.

use super::error::Error;
use super::https::KmsServer;
use super::uri::Author;
use super::variable::variable;

/// Refuses a server that only the file names. `variables` are the environment variables with which the operator can
/// name it.
pub fn check(server: &KmsServer, author: Author, variables: &[&str]) -> Result<(), Error> {
    if author == Author::Operator {
        return Ok(());
    }
    for name in variables {
        let Some(url) = variable(name)? else { continue };
        let is_it = server.is_at(&url);
        if is_it.map_err(|error| Error::Credentials(format!("{name}: {error}")))? {
            return Ok(());
        }
    }
    let (host, name) = (server.host(), variables[0]);
    Err(Error::Credentials(format!(
        "the wrapped master secret names the server {host}, and credentials go only to servers that the operator named: if it is \
         yours, set {name}=https://{host}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A variable that nothing sets.
    const VARIABLES: [&str; 1] = ["FIRSTLIGHT_TEST_ADDRESS"];

    #[test]
    fn a_server_that_only_a_file_names_gets_nothing() {
        let server = KmsServer::new("https://vault.example:8200", None).unwrap();
        assert_eq!(check(&server, Author::Operator, &VARIABLES), Ok(()));
        let error = check(&server, Author::File, &VARIABLES).unwrap_err();
        assert!(!error.may_pass());
        assert!(
            error.to_string().ends_with(
                "if it is yours, set FIRSTLIGHT_TEST_ADDRESS=https://vault.example:8200"
            ),
            "{error}"
        );
    }
}
