//! Which servers may get credentials: those that the operator has named.
//!
//! The file of a wrapped master secret has the address of its KMS, and nothing proves who wrote the file. A token that goes to the
//! address in it would go to whoever wrote it. So the address counts only if the operator has named it too: in the URI that a command
//! got as an argument, or in a variable, as the service's own programs have it.

use super::error::Error;
use super::https::Server;
use super::uri::Author;
use super::variable::variable;

/// Refuses a server that is named only by a file. `variables` are those with which the operator names the service's address.
pub fn check(server: &Server, author: Author, variables: &[&str]) -> Result<(), Error> {
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

    /// Nothing sets this variable.
    const VARIABLES: [&str; 1] = ["FIRSTLIGHT_TEST_ADDRESS"];

    #[test]
    fn a_server_that_only_a_file_names_gets_nothing() {
        let server = Server::new("https://vault.example:8200", None).unwrap();
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
