//! Writes the addresses of the cluster's join services into the header of the state disk, for the next
//! boot. The crate `disk` has the form of this token, and reads it.

use base::machines::is_host;
use disk::luks::{Device, Error, Header, MAX_CONTROL_PLANES, Peers};
use serde_json::{Map, Value, json};

/// Writes the addresses with one write of the metadata. Returns whether they have changed; if not,
/// nothing is written. Durable on return.
pub fn set(header: &mut Header, device: &mut impl Device, peers: &Peers) -> Result<bool, Error> {
    let peers = sorted(peers);
    // a faulty token counts as none, and is replaced
    if header.peers().ok().flatten().as_ref() == Some(&peers) {
        return Ok(false);
    }
    let written = header.set_peers_token(device, fields(&peers));
    written.map(|()| true)
}

/// Returns these addresses in the order of the token, so that two lists in different orders are
/// equal. Further control planes than a token may have are left out.
fn sorted(peers: &Peers) -> Peers {
    let mut sorted = peers.clone();
    sorted.control_planes.sort();
    sorted.control_planes.dedup();
    sorted.control_planes.truncate(MAX_CONTROL_PLANES);
    sorted.load_balancer.take_if(|name| !is_host(name));
    sorted
}

fn fields(peers: &Peers) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("controlPlanes".into(), json!(peers.control_planes));
    if let Some(name) = &peers.load_balancer {
        fields.insert("loadBalancer".into(), name.as_str().into());
    }
    fields
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use base::crypto::{KEY_LEN, Secret};
    use disk::luks::{MIN_DEVICE_SIZE, VOLUME_KEY_LEN, format};

    use super::*;

    fn peers(planes: &[&str]) -> Peers {
        Peers {
            load_balancer: Some("cluster.example".into()),
            control_planes: planes.iter().map(|one| one.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn it_is_read_as_it_was_written_and_the_same_is_not_written_again() {
        let mut disk = tempfile::tempfile().unwrap();
        disk.set_len(MIN_DEVICE_SIZE).unwrap();
        let key = Secret::random(VOLUME_KEY_LEN);
        let mut header = format(&mut disk, &key, &Secret::random(KEY_LEN)).unwrap();
        assert_eq!(header.peers(), Ok(None));
        let all = peers(&["10.0.0.2", "10.0.0.1", "fd00::1"]);
        assert!(set(&mut header, &mut disk, &all).unwrap());
        let text = r#"{"controlPlanes":["10.0.0.1","10.0.0.2","fd00::1"],"keyslots":[],"loadBalancer":"cluster.example","type":"firstlight-peers"}"#;
        assert_eq!(header.metadata()["tokens"]["2"].to_string(), text);
        let found = header.peers().unwrap().unwrap();
        assert_eq!(found, peers(&["10.0.0.1", "10.0.0.2", "fd00::1"]));
        let (same, before) = (
            peers(&["fd00::1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]),
            header.sequence_id(),
        );
        assert!(!set(&mut header, &mut disk, &same).unwrap());
        assert_eq!(header.sequence_id(), before);
        // new addresses replace the old ones, and a faulty token
        assert!(set(&mut header, &mut disk, &peers(&["10.0.0.3"])).unwrap());
        let mut faulty = fields(&peers(&[]));
        faulty.insert("controlPlanes".into(), json!(["x"]));
        header.set_peers_token(&mut disk, faulty).unwrap();
        assert!(header.peers().is_err());
        assert!(set(&mut header, &mut disk, &peers(&["10.0.0.3"])).unwrap());
        assert_eq!(header.metadata()["tokens"].as_object().unwrap().len(), 2);
        assert_eq!(header.peers(), Ok(Some(peers(&["10.0.0.3"]))));
        let bad = Peers {
            load_balancer: Some("a\nb".into()),
            ..peers(&["10.0.0.3"])
        };
        assert!(set(&mut header, &mut disk, &bad).unwrap());
        assert_eq!(header.peers().unwrap().unwrap().load_balancer, None);
    }

    #[test]
    fn a_list_of_many_control_planes_is_cut_off() {
        let address = |n: u32| IpAddr::from([10, 0, (n >> 8) as u8, n as u8]);
        let many = Peers {
            load_balancer: None,
            control_planes: (0..1000).map(address).collect(),
        };
        assert_eq!(sorted(&many).control_planes.len(), MAX_CONTROL_PLANES);
        assert_eq!(
            fields(&sorted(&many)).get("loadBalancer"),
            None,
            "a cluster without a load balancer"
        );
    }
}
