//! The programs of Constellation's charts that a move leaves as they are, and who patches them from now on.

use serde_json::{Value, json};

use super::facts::FoundWorkload;

/// A program of Constellation, or one that it installs.
struct Part {
    /// Its name for people.
    name: &'static str,
    /// The names of its DaemonSets and Deployments. One that ends with `*` is the beginning of the names.
    workloads: &'static [&'static str],
    /// Who patches it from now on, and what to do.
    advice: &'static str,
}

/// Constellation's charts, in the order of their installation.
const PARTS: [Part; 14] = [
    Part {
        name: "Cilium",
        workloads: &["cilium", "cilium-operator", "hubble-*"],
        advice: "nobody patches Constellation's fork. After the move, install Cilium's own chart with encryption (docs/network.md)",
    },
    Part {
        name: "CoreDNS",
        workloads: &["coredns"],
        advice: "you: set its image with each version of Kubernetes; kubeadm does not find it, because its ConfigMap is edg-coredns",
    },
    Part {
        name: "verification service",
        workloads: &["verification-service"],
        advice: "nobody. Nodes of Firstlight prove themselves to `firstlight status`; remove it at the end, or let the join service \
                 answer in its place (docs/services.md, --verification)",
    },
    Part {
        name: "cloud controller manager",
        workloads: &["cloud-controller-manager", "cloud-node-manager"],
        advice: "you: from the cloud's own releases (docs/clouds/controller-manager.md)",
    },
    Part {
        name: "autoscaler",
        workloads: &["constellation-cluster-autoscaler"],
        advice: "you: from its project's releases. Constellation's node operator switches it on and off \
                 (docs/day-two/autoscaling.md)",
    },
    Part {
        name: "Google's guest agent",
        workloads: &["gcp-guest-agent"],
        advice: "nobody patches Constellation's image of it; it keeps the load balancer's address on the nodes",
    },
    Part {
        name: "cert-manager",
        workloads: &["cert-manager", "cert-manager-*"],
        advice: "you: from its project's releases. Constellation needs it only for its node operator",
    },
    Part {
        name: "node operator",
        workloads: &["constellation-operator-controller-manager"],
        advice: "nobody. It replaces nodes whose image or components differ from NodeVersion; keep it only for that \
                 (docs/migration.md)",
    },
    Part {
        name: "node maintenance operator",
        workloads: &["node-maintenance-operator*"],
        advice: "you: from its project's releases (medik8s), as long as the node operator needs it to drain nodes",
    },
    Part {
        name: "CSI driver",
        workloads: &[
            "csi-azuredisk-*",
            "csi-gce-pd-*",
            "ebs-csi-*",
            "csi-cinder-*",
            "openstack-cinder-csi-*",
            "csi-snapshot-controller",
            "snapshot-controller",
        ],
        advice: "nobody patches Constellation's forks. Move the data to volumes of another driver before old clients are off \
                 (docs/storage.md)",
    },
    Part {
        name: "konnectivity",
        workloads: &["konnectivity-agent", "konnectivity-server"],
        advice: "nobody; it is of an early version. The API server of Firstlight's nodes asks kubelets directly: remove it",
    },
    Part {
        name: "load balancer controller",
        workloads: &["aws-load-balancer-controller", "yawol-*"],
        advice: "you: from its project's releases",
    },
    Part {
        name: "S3 proxy",
        workloads: &["s3proxy"],
        advice: "nobody. It asks for its key without a token: replace it before old clients are off (docs/migration.md)",
    },
    Part {
        name: "Constellation's debug tools",
        workloads: &["debugd*", "filebeat*", "logstash*", "metricbeat*"],
        advice: "nobody: remove them. No image for use has them",
    },
];

/// A program that was found.
pub struct FoundPart {
    name: &'static str,
    advice: &'static str,
    /// Each with its place and its image.
    workloads: Vec<(String, String)>,
}

/// Returns the programs of Constellation among these workloads.
pub fn found(workloads: &[FoundWorkload], further_drivers: &[String]) -> Vec<FoundPart> {
    let of = |part: &Part| {
        let is_driver = part.name == "CSI driver";
        let own = workloads.iter().filter(|workload| {
            let named = part
                .workloads
                .iter()
                .any(|name| is_named(&workload.name, name));
            named || is_driver && further_drivers.contains(&workload.place)
        });
        FoundPart {
            name: part.name,
            advice: part.advice,
            workloads: own
                .map(|workload| (workload.place.clone(), workload.image.clone()))
                .collect(),
        }
    };
    let all = PARTS.iter().map(of);
    all.filter(|part| !part.workloads.is_empty()).collect()
}

fn is_named(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    }
}

impl FoundPart {
    /// Returns the lines for people.
    pub fn text(&self) -> String {
        let places = self.workloads.iter();
        let places: Vec<_> = places
            .map(|(place, image)| format!("{place} {image}"))
            .collect();
        format!("{} ({}): {}", self.name, places.join(", "), self.advice)
    }

    /// Returns the JSON for programs.
    pub fn json(&self) -> Value {
        let workloads = self.workloads.iter();
        let workloads = workloads.map(|(place, image)| json!({"workload": place, "image": image}));
        json!({
            "name": self.name,
            "patches": self.advice,
            "workloads": workloads.collect::<Vec<Value>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_known_by_the_names_of_their_workloads() {
        let workload = |place: &str| FoundWorkload {
            place: place.into(),
            name: place.split('/').nth(1).unwrap().into(),
            image: "registry.example/a@sha256:00".into(),
        };
        let all = [
            "kube-system/cilium",
            "kube-system/cilium-operator",
            "kube-system/join-service",
            "kube-system/cert-manager-webhook",
            "kube-system/node-maintenance-operator-controller-manager",
            "storage/own-driver",
            "default/cilium-like",
            "default/web",
        ]
        .map(workload);
        let names = |drivers: &[String]| -> Vec<_> {
            found(&all, drivers)
                .iter()
                .map(|part| (part.name, part.workloads.len()))
                .collect()
        };
        let expected = [
            ("Cilium", 2),
            ("cert-manager", 1),
            ("node maintenance operator", 1),
        ];
        assert_eq!(names(&[]), expected);
        let driver = ["storage/own-driver".to_owned()];
        assert!(names(&driver).contains(&("CSI driver", 1)));
    }
}
