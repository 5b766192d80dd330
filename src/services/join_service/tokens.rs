//! Bootstrap tokens (Kubernetes, "Authenticating with Bootstrap Tokens"). A kubelet requests its
//! client certificate with one.
//!
//! Each token is for one node, and is deleted when that node exists ([`super::cleaner`]). The
//! cluster's bootstrap signer rewrites a ConfigMap for each token that may sign. Therefore only
//! clients that need token discovery get such a token.

use std::time::SystemTime;

use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use crate::cluster::TOKEN_VALIDITY;
use base::crypto::random;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, DAEMON_SETS, Object, SECRETS};
use kubernetes::services::TICKET_GROUP;

/// The lengths of the two halves of a token.
const ID_LEN: usize = 6;
const SECRET_LEN: usize = 16;

/// Creates a token identifier. It is not secret.
pub fn id() -> String {
    letters(ID_LEN).to_string()
}

/// Returns the Secret of the token with this identifier.
pub fn object(id: &str) -> Object {
    SECRETS
        .in_namespace(NAMESPACE)
        .named(&format!("bootstrap-token-{id}"))
}

/// Returns whether a member controller is ready, which approves the certificates that the bearers of tokens
/// request. It is ready when it has the list of such requests.
pub fn are_served(api: &Client) -> Result<bool, client::Error> {
    let controllers = DAEMON_SETS
        .in_namespace(NAMESPACE)
        .named("member-controller");
    let found = api.find(&controllers)?;
    Ok(found.is_some_and(|set| set["status"]["numberReady"].as_u64() > Some(0)))
}

/// Creates the token and returns it as `id.secret`.
pub fn create(
    client: &Client,
    id: &str,
    node: &str,
    may_sign: bool,
) -> Result<Zeroizing<String>, client::Error> {
    let secret = letters(SECRET_LEN);
    let mut data = json!({
        "token-id": id,
        "token-secret": secret.as_str(),
        "description": format!("join ticket of node {node}"),
        "expiration": time::seconds(SystemTime::now() + TOKEN_VALIDITY),
        "usage-bootstrap-authentication": "true",
        "auth-extra-groups": TICKET_GROUP,
    });
    if may_sign {
        data["usage-bootstrap-signing"] = "true".into();
    }
    let mut token = json!({
        "metadata": {
            "name": format!("bootstrap-token-{id}"),
            "labels": {"app.kubernetes.io/part-of": "firstlight", "firstlight/node": node},
        },
        "type": "bootstrap.kubernetes.io/token",
        "stringData": data,
    });
    let created = client.create(&SECRETS.in_namespace(NAMESPACE), &token);
    client::wipe(&mut token);
    client::wipe(&mut created?);
    Ok(Zeroizing::new(format!("{id}.{}", secret.as_str())))
}

/// Returns random characters of `[a-z0-9]`, each with the same probability.
fn letters(len: usize) -> Zeroizing<String> {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    /// The largest multiple of 36 in a byte. Larger values would make some characters more likely.
    const FAIR: u8 = 252;
    let mut text = Zeroizing::new(String::with_capacity(len));
    while text.len() < len {
        let mut bytes = random::<32>();
        let fair = bytes.iter().filter(|byte| **byte < FAIR);
        let wanted = len - text.len();
        text.extend(
            fair.take(wanted)
                .map(|byte| char::from(LETTERS[usize::from(byte % 36)])),
        );
        bytes.zeroize();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_of_the_form_that_kubernetes_takes_and_differ() {
        for len in [ID_LEN, SECRET_LEN, 100] {
            let text = letters(len);
            assert!(
                text.len() == len
                    && text
                        .bytes()
                        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
            );
        }
        assert_ne!(letters(SECRET_LEN), letters(SECRET_LEN));
        let all = letters(20_000);
        assert!(
            (b'a'..=b'z').chain(b'0'..=b'9').all(|letter| all
                .bytes()
                .filter(|byte| *byte == letter)
                .count()
                > 300)
        );
    }
}
