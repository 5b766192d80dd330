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

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{Error, Fault};
use super::token;
use machines::is_host;

/// The `type` of the token.
const TYPE: &str = "firstlight-peers";
/// The first number of the token: token 1 is the cluster's.
const FIRST_ID: u32 = 2;
/// Maximum number of control planes; further ones are left out.
const MAX_CONTROL_PLANES: usize = 32;

/// The addresses of the join services of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peers {
    /// The host name or address under which all control planes are reached.
    pub load_balancer: Option<String>,
    /// The addresses of the control planes.
    pub control_planes: Vec<IpAddr>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Json {
    #[serde(rename = "type")]
    kind: String,
    keyslots: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    load_balancer: Option<String>,
    control_planes: Vec<IpAddr>,
}

impl Peers {
    /// Returns whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.load_balancer.is_none() && self.control_planes.is_empty()
    }

    /// Returns these addresses in the order of the token, so that two lists in different orders are
    /// equal.
    fn sorted(&self) -> Peers {
        let mut sorted = self.clone();
        sorted.control_planes.sort();
        sorted.control_planes.dedup();
        sorted.control_planes.truncate(MAX_CONTROL_PLANES);
        sorted.load_balancer.take_if(|name| !is_host(name));
        sorted
    }
}

/// Reads the token from the metadata. The error says what is wrong.
pub(super) fn read(tokens: &Value) -> Result<Option<Peers>, Fault> {
    let Some((id, token)) = token::find(tokens, TYPE)? else {
        return Ok(None);
    };
    let json = Json::deserialize(token)
        .map_err(|error| format!("token {id}: {:.200}", error.to_string()))?;
    let number = json.control_planes.len();
    if number > MAX_CONTROL_PLANES {
        Err(format!(
            "token {id}: {number} control planes, expected at most {MAX_CONTROL_PLANES}"
        ))?;
    }
    if !json.load_balancer.as_deref().is_none_or(is_host) {
        Err(format!(
            "token {id}: loadBalancer is neither an IP address nor a DNS name"
        ))?;
    }
    Ok(Some(Peers {
        load_balancer: json.load_balancer,
        control_planes: json.control_planes,
    }))
}

/// Writes the token. Returns whether it has changed.
pub(super) fn set(metadata: &mut Value, peers: &Peers) -> Result<bool, Error> {
    let peers = peers.sorted();
    if read(&metadata["tokens"]).is_ok_and(|known| known.as_ref() == Some(&peers)) {
        return Ok(false);
    }
    let json = Json {
        kind: TYPE.into(),
        keyslots: vec![],
        load_balancer: peers.load_balancer,
        control_planes: peers.control_planes,
    };
    let json = serde_json::to_value(json).expect("strings are JSON");
    token::set(metadata, FIRST_ID, json).map(|()| true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use support::mutation::mutations;

    fn peers(planes: &[&str]) -> Peers {
        Peers {
            load_balancer: Some("cluster.example".into()),
            control_planes: planes.iter().map(|one| one.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn it_is_read_as_it_was_written_and_the_same_is_not_written_again() {
        let mut metadata = json!({"tokens": {"0": {"type": "a"}, "1": {"type": "b"}}});
        assert_eq!(read(&metadata["tokens"]), Ok(None));
        assert!(set(&mut metadata, &peers(&["10.0.0.2", "10.0.0.1", "fd00::1"])).unwrap());
        let text = r#"{"controlPlanes":["10.0.0.1","10.0.0.2","fd00::1"],"keyslots":[],"loadBalancer":"cluster.example","type":"firstlight-peers"}"#;
        assert_eq!(metadata["tokens"]["2"].to_string(), text);
        let found = read(&metadata["tokens"]).unwrap().unwrap();
        assert_eq!(found, peers(&["10.0.0.1", "10.0.0.2", "fd00::1"]));
        let same = peers(&["fd00::1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]);
        assert!(!set(&mut metadata, &same).unwrap());
        // new addresses replace the old ones
        assert!(set(&mut metadata, &peers(&["10.0.0.3"])).unwrap());
        assert_eq!(metadata["tokens"].as_object().unwrap().len(), 3);
        let found = read(&metadata["tokens"]).unwrap().unwrap();
        assert_eq!(found, peers(&["10.0.0.3"]));
    }

    #[test]
    fn a_list_of_many_control_planes_is_cut_off() {
        let mut metadata = json!({"tokens": {}});
        let many = Peers {
            load_balancer: None,
            control_planes: (0..1000)
                .map(|n| IpAddr::from([10, 0, (n >> 8) as u8, n as u8]))
                .collect(),
        };
        assert!(set(&mut metadata, &many).unwrap());
        let found = read(&metadata["tokens"]).unwrap().unwrap();
        assert_eq!(found.control_planes.len(), MAX_CONTROL_PLANES);
        assert!(!set(&mut metadata, &many).unwrap());
    }

    #[test]
    fn what_is_wrong_with_a_token_is_said_and_a_good_one_replaces_it() {
        let good = json!({"type": TYPE, "keyslots": [], "controlPlanes": ["10.0.0.1"], "later": 1});
        assert!(read(&json!({"1": good})).unwrap().is_some());
        for (field, value, why) in [
            ("controlPlanes", json!(["x"]), "token 1: invalid IP address"),
            (
                "controlPlanes",
                json!(vec!["10.0.0.1"; 33]),
                "33 control planes",
            ),
            (
                "loadBalancer",
                json!(""),
                "neither an IP address nor a DNS name",
            ),
            (
                "loadBalancer",
                json!("a\nb"),
                "neither an IP address nor a DNS name",
            ),
            ("loadBalancer", json!(7), "token 1: invalid type"),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            let error = read(&json!({"1": bad})).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            let mut metadata = json!({"tokens": {"1": bad}});
            assert!(set(&mut metadata, &peers(&["10.0.0.1"])).unwrap());
            assert!(read(&metadata["tokens"]).unwrap().is_some());
        }
        let twice = read(&json!({"1": good, "2": good}))
            .unwrap_err()
            .to_string();
        assert!(twice.contains("more than one"), "{twice}");
        let mut metadata = json!({"tokens": {"1": good, "2": good}});
        assert!(set(&mut metadata, &peers(&["10.0.0.1"])).unwrap());
        assert_eq!(
            read(&metadata["tokens"]).unwrap(),
            Some(peers(&["10.0.0.1"]))
        );
    }

    #[test]
    fn a_mutated_token_is_read_within_its_limits_or_refused() {
        let mut metadata = json!({"tokens": {}});
        set(&mut metadata, &peers(&["10.0.0.1", "fd00::1"])).unwrap();
        let text = metadata["tokens"].to_string();
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
