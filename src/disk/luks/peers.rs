//! The token with the addresses of the cluster's join services, which the node asks at its next
//! boot.
//!
//! ```text
//! {"type": "firstlight-peers", "keyslots": [], "loadBalancer": "cluster.example", "controlPlanes": ["10.0.0.11", "10.0.0.12"]}
//! ```
//!
//! Nothing authenticates it, as nothing authenticates what a metadata service says: a wrong address
//! costs a request, and leads to no key that opens the disk.

use std::net::IpAddr;

use serde_json::Value;

use super::error::HeaderFault::{self, Malformed};
use super::error::ensure;
use super::json::{text, texts};
use super::token;
use base::machines::is_host;
use base::text::quoted;

/// The `type` of the token.
pub const PEERS_TYPE: &str = "firstlight-peers";
/// Maximum number of control planes.
pub const MAX_CONTROL_PLANES: usize = 32;

/// The addresses of the join services of a cluster, as the token has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peers {
    /// The host name or address under which all control planes are reached.
    pub load_balancer: Option<String>,
    /// The addresses of the control planes.
    pub control_planes: Vec<IpAddr>,
}

impl Peers {
    /// Returns whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.load_balancer.is_none() && self.control_planes.is_empty()
    }
}

/// Reads the token from the metadata. The error says what is wrong.
pub(super) fn read(tokens: &Value) -> Result<Option<Peers>, HeaderFault> {
    let Some((id, token)) = token::find(tokens, PEERS_TYPE)? else {
        return Ok(None);
    };
    let it = format!("token {id}");
    let control_planes = texts(&it, token, "controlPlanes")?;
    let number = control_planes.len();
    ensure(number <= MAX_CONTROL_PLANES, Malformed, || {
        format!("{it}: {number} control planes, expected at most {MAX_CONTROL_PLANES}")
    })?;
    let address = |text: &str| {
        let invalid = |_| format!("{it}: {} is not an IP address", quoted(text, 80));
        text.parse().map_err(invalid)
    };
    let load_balancer = match &token["loadBalancer"] {
        Value::Null => None,
        _ => Some(text(&it, token, "loadBalancer")?),
    };
    ensure(load_balancer.is_none_or(is_host), Malformed, || {
        format!("{it}: loadBalancer is neither an IP address nor a DNS name")
    })?;
    Ok(Some(Peers {
        load_balancer: load_balancer.map(str::to_owned),
        control_planes: control_planes
            .into_iter()
            .map(address)
            .collect::<Result<_, _>>()?,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use support::mutation::mutations;

    #[test]
    fn what_is_wrong_with_a_token_is_said() {
        let good =
            json!({"type": PEERS_TYPE, "keyslots": [], "controlPlanes": ["10.0.0.1"], "later": 1});
        let read_good = read(&json!({"1": good})).unwrap().unwrap();
        assert_eq!(read_good.control_planes, [IpAddr::from([10, 0, 0, 1])]);
        assert_eq!(read_good.load_balancer, None);
        for (field, value, why) in [
            (
                "controlPlanes",
                json!(["x"]),
                "token 1: \"x\" is not an IP address",
            ),
            (
                "controlPlanes",
                json!(vec!["10.0.0.1"; 33]),
                "33 control planes",
            ),
            (
                "loadBalancer",
                json!(""),
                "loadBalancer is not a non-empty string",
            ),
            (
                "loadBalancer",
                json!("a\nb"),
                "neither an IP address nor a DNS name",
            ),
            (
                "loadBalancer",
                json!(7),
                "token 1: loadBalancer is not a non-empty string",
            ),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            let error = read(&json!({"1": bad})).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let twice = read(&json!({"1": good, "2": good}))
            .unwrap_err()
            .to_string();
        assert!(twice.contains("more than one"), "{twice}");
    }

    #[test]
    fn a_mutated_token_is_read_within_its_limits_or_refused() {
        let token = json!({"type": PEERS_TYPE, "keyslots": [], "loadBalancer": "cluster.example",
            "controlPlanes": ["10.0.0.1", "fd00::1"]});
        let text = json!({"2": token}).to_string();
        let mut whole = 0;
        for bytes in mutations(text.as_bytes(), 20_000) {
            let Ok(tokens) = serde_json::from_slice::<Value>(&bytes) else {
                continue;
            };
            if let Ok(Some(peers)) = read(&tokens) {
                whole += 1;
                assert!(peers.control_planes.len() <= MAX_CONTROL_PLANES);
                assert!(peers.load_balancer.is_none_or(|name| is_host(&name)));
            }
        }
        assert!((10..20_000).contains(&whole), "{whole}");
    }
}
