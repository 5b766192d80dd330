//! Whether a packet from outside of the cluster can reach a pod with the address of a node as its source. Then an address
//! proves nothing about its sender.
//!
//! | what forwards packets to Services | a packet from outside for a ClusterIP |
//! |---|---|
//! | kube-proxy | is forwarded, with the address of the node that received it as its source |
//! | Cilium in place of kube-proxy | is dropped (`DROP_IS_CLUSTER_IP` of Cilium's `nodeport.h`), unless `bpf-lb-external-clusterip` is set |
//!
//! Cilium with masquerading by iptables has a rule that does the same as kube-proxy with each packet from outside for a pod of
//! another node (`-o cilium_host`); masquerading by BPF changes only packets of pods. A packet from outside may also be forged
//! with the address of a node. Its sender can use only a connection whose answers it can read, so answers to nodes must be
//! encrypted: WireGuard with node encryption.
//!
//! What is read are the settings of Cilium's chart and the pods of kubeadm's kube-proxy, by their label and service account: a
//! kubelet can write a mirror pod with any label, but not with an account. An agent may run with others: by
//! arguments, by a CiliumNodeConfig, or because it has not restarted.

use crate::NAMESPACE;
use crate::client::{CONFIG_MAPS, Client, Error, PODS, Selector};
use crate::objects::{ConfigMap, Pod};

/// The settings of Cilium's agents, which its chart writes.
const CILIUM_CONFIG: &str = "cilium-config";

/// Returns why a packet from outside can have the address of a node, or `None` if the network drops such packets. It lists
/// ConfigMaps of kube-system, and pods.
pub fn why_open(client: &Client) -> Result<Option<String>, Error> {
    let named = Selector::fields(&format!("metadata.name={CILIUM_CONFIG}"));
    let found = client.list_as(&CONFIG_MAPS.in_namespace(NAMESPACE), &named)?;
    let Some(config) = found.items.first() else {
        return Ok(Some(format!(
            "there is no ConfigMap {NAMESPACE}/{CILIUM_CONFIG}"
        )));
    };
    if let Some(why) = why_cilium_is_open(config) {
        return Ok(Some(why));
    }
    let kube_proxy = Selector::labels("k8s-app=kube-proxy");
    let found = client.list_keeping(&PODS.in_namespace(NAMESPACE), &kube_proxy, |pod: Pod| {
        let is_one = pod.spec.host_network && pod.spec.service_account_name == "kube-proxy";
        is_one.then_some(pod.metadata.name)
    })?;
    let name = found.items.into_iter().flatten().next();
    Ok(name.map(|name| format!("kube-proxy runs beside Cilium, as the pod {name}")))
}

/// Returns the first setting of Cilium that does not keep packets from outside away.
fn why_cilium_is_open(settings: &ConfigMap) -> Option<String> {
    // "strict" is the word of Cilium before 1.14
    let needed: [(&str, &[&str]); 5] = [
        ("kube-proxy-replacement", &["true", "strict"]),
        ("enable-bpf-masquerade", &["true"]),
        ("bpf-lb-external-clusterip", &["false", ""]),
        ("enable-wireguard", &["true"]),
        ("encrypt-node", &["true"]),
    ];
    needed.into_iter().find_map(|(name, good)| {
        let value = settings.text(name);
        let is_good = good.contains(&value);
        (!is_good).then(|| {
            format!(
                "{name} is {value:?} in the ConfigMap {CILIUM_CONFIG}, expected {:?}",
                good[0]
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cilium_keeps_packets_from_outside_away_only_with_these_settings() {
        let of_constellation = json!({"data": {"kube-proxy-replacement": "strict", "enable-bpf-masquerade": "true",
            "enable-wireguard": "true", "encrypt-node": "true"}});
        let of_constellation: ConfigMap = serde_json::from_value(of_constellation).unwrap();
        assert_eq!(why_cilium_is_open(&of_constellation), None);
        for (name, value) in [
            ("kube-proxy-replacement", "false"),
            ("kube-proxy-replacement", "partial"),
            ("enable-bpf-masquerade", "false"),
            ("bpf-lb-external-clusterip", "true"),
            ("enable-wireguard", "false"),
            ("encrypt-node", "false"),
        ] {
            let mut settings = of_constellation.clone();
            settings.data.insert(name.into(), value.into());
            let why = why_cilium_is_open(&settings).expect(name);
            assert!(why.contains(name) && why.contains(value), "{why}");
        }
        for name in [
            "kube-proxy-replacement",
            "enable-bpf-masquerade",
            "enable-wireguard",
            "encrypt-node",
        ] {
            let mut settings = of_constellation.clone();
            settings.data.remove(name);
            assert!(why_cilium_is_open(&settings).is_some(), "{name}");
        }
        assert!(why_cilium_is_open(&ConfigMap::default()).is_some());
    }
}
