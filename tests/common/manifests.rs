//! The settings of the services in tests and benches that need their manifests.

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use kubernetes::services::ServiceSettings;
use kubernetes::services::master_secret::MasterSecretStorage;

/// Returns the chart's default settings with this policy, and with a master secret and a salt of zeros.
pub fn settings(policy: &str) -> ServiceSettings {
    ServiceSettings {
        image: "example.com/firstlight:1".into(),
        variant: "qemu-vtpm".into(),
        policy: policy.into(),
        measurement_salt: vec![7; 32],
        kms: MasterSecret::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap(),
        keeping: MasterSecretStorage::default(),
        node_port: None,
        migrate_until: None,
        old_clients_until: None,
        grants: None,
        metadata: None,
        require_strong: None,
        watch: None,
        watch_action: None,
        watch_issuer: None,
        signed: Default::default(),
    }
}
