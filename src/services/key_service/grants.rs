//! Which caller gets which keys.
//!
//! ```text
//! kube-system/join-service=disk,ssh,measurement;default/s3proxy=id:s3proxy-kek
//! ```
//!
//! A caller is one of these: `NAMESPACE/NAME`, a service account with a verified token; [`LOCAL`],
//! a program of the key service's own machine, identified by that machine's TPM; [`MEMBER`],
//! another machine of this cluster, proved by its TPM; [`ANYONE`], any client of a service without
//! authentication.
//!
//! Attestation does not distinguish a worker from a control plane. So a member gets neither the SSH
//! authority of all nodes nor the measurement secret, even if the operator grants them.

use std::fmt;
use std::str::FromStr;

use base::crypto::{
    MEASUREMENT_SECRET_ID, SSH_HOST_CA_SEED_ID, SSH_USER_CA_PUBLIC_ID, SSH_USER_CA_SEED_ID,
};
use base::uuid::Uuid;
use kubernetes::services::grants::parse;
pub use kubernetes::services::grants::{ANYONE, InvalidGrants, LOCAL, MEMBER};
use kubernetes::services::{JOIN_SERVICE_ACCOUNT, MEMBER_CONTROLLER_ACCOUNT};

/// The beginning of the ids of volumes of CSI drivers.
pub const VOLUME_PREFIX: &str = "volume-";

/// The class of a key. The id determines it, except that the cluster's records distinguish
/// [`Class::Disk`] and [`Class::Volume`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The key of a state disk or a volume. The id is a LUKS2 UUID.
    Disk,
    /// The key of a volume. The id is that of a volume of a CSI driver ([`super::volumes`]), or a
    /// LUKS2 UUID that no record of a state disk contains ([`super::disks`]).
    Volume,
    /// The same, for a client without a token ([`super::constellation`]). It cannot be granted.
    OldVolume,
    /// The parts of the SSH certificate authorities in join tickets: the seed of the host
    /// authority, with which an attacker could pose as any node, and the public key of the user
    /// authority.
    Ssh,
    /// The seed of the SSH certificate authority for users. It permits a login to every node. Only
    /// Constellation's join service asks for it.
    SshUsers,
    /// The measurement secret. The cluster's ID is derived from it and the salt, which is not
    /// secret.
    Measurement,
    /// A key of any other name, such as that of the S3 proxy.
    Other,
}

const CLASSES: [Class; 6] = [
    Class::Disk,
    Class::Volume,
    Class::Ssh,
    Class::SshUsers,
    Class::Measurement,
    Class::Other,
];

/// Keys with which one can create nodes and clusters. A worker is a member too, so members never
/// get them.
const NEVER_A_MEMBERS: [&str; 4] = [
    SSH_HOST_CA_SEED_ID,
    SSH_USER_CA_SEED_ID,
    SSH_USER_CA_PUBLIC_ID,
    MEASUREMENT_SECRET_ID,
];

/// Why members do not get them.
const NOT_FOR_MEMBERS: &str =
    "member may not have keys of this class: a worker is a member as well; use local";

impl Class {
    /// Returns the class of the key with this id. A UUID is [`Class::Disk`], because the id does
    /// not tell whether it is a volume's.
    pub fn of(id: &str) -> Class {
        match id {
            MEASUREMENT_SECRET_ID => Class::Measurement,
            SSH_HOST_CA_SEED_ID | SSH_USER_CA_PUBLIC_ID => Class::Ssh,
            SSH_USER_CA_SEED_ID => Class::SshUsers,
            _ if Uuid::parse(id).is_some() => Class::Disk,
            _ if id.starts_with(VOLUME_PREFIX) => Class::Volume,
            _ => Class::Other,
        }
    }

    /// Returns the name in grants, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Class::Disk => "disk",
            Class::Volume => "volume",
            Class::OldVolume => "old-volume",
            Class::Ssh => "ssh",
            Class::SshUsers => "ssh-users",
            Class::Measurement => "measurement",
            Class::Other => "other",
        }
    }
}

/// The classes and ids that are granted to each caller. Other callers get nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grants(Vec<(String, Grant)>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Grant {
    classes: Vec<Class>,
    ids: Vec<String>,
}

impl Grant {
    fn allows(&self, id: &str) -> bool {
        self.classes.contains(&Class::of(id)) || self.ids.iter().any(|own| own == id)
    }
}

impl Grants {
    /// Returns the class of the grant by which `caller` gets the key of this id, or `None` without
    /// such a grant. For [`Class::Volume`], the key of a state disk must still be refused.
    pub fn allow(&self, caller: &str, id: &str) -> Option<Class> {
        // It computes the cluster's ID. It needs no grant, and none gives it another key.
        if caller == MEMBER_CONTROLLER_ACCOUNT {
            return Some(Class::Measurement).filter(|class| *class == Class::of(id));
        }
        let (_, grant) = self.0.iter().find(|(name, _)| name == caller)?;
        match Class::of(id) {
            // Of all pods, only the join service needs keys of state disks.
            Class::Disk
                if grant.allows(id) && caller.contains('/') && caller != JOIN_SERVICE_ACCOUNT =>
            {
                Some(Class::Volume)
            }
            Class::Disk if !grant.allows(id) && grant.classes.contains(&Class::Volume) => {
                Some(Class::Volume)
            }
            // A grant of an earlier version.
            Class::Volume if grant.classes.contains(&Class::Disk) => Some(Class::Volume),
            class => grant.allows(id).then_some(class),
        }
    }

    /// Returns whether the class of keys of volumes is granted by its name.
    pub fn have_volumes(&self) -> bool {
        self.0
            .iter()
            .any(|(_, grant)| grant.classes.contains(&Class::Volume))
    }

    /// Returns the service accounts with a grant for keys of volumes, which CSI drivers have.
    pub fn drivers(&self) -> Vec<String> {
        let have = |grant: &Grant| grant.classes.contains(&Class::Volume);
        let all = self
            .0
            .iter()
            .filter(|(caller, grant)| caller.contains('/') && have(grant));
        all.map(|(caller, _)| caller.clone()).collect()
    }

    /// Returns all callers with a grant.
    pub fn callers(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(caller, _)| caller.as_str())
    }
}

impl FromStr for Grants {
    type Err = InvalidGrants;

    fn from_str(text: &str) -> Result<Grants, InvalidGrants> {
        let mut grants = Vec::new();
        for (caller, items) in parse(text)? {
            let mut grant = Grant::default();
            for item in items {
                match CLASSES.into_iter().find(|class| class.name() == item) {
                    Some(class) => grant.classes.push(class),
                    None => grant
                        .ids
                        .extend(item.strip_prefix("id:").map(str::to_owned)),
                }
            }
            if caller == MEMBER
                && let Some(id) = NEVER_A_MEMBERS.into_iter().find(|id| grant.allows(id))
            {
                return Err(InvalidGrants::new(Class::of(id).name(), NOT_FOR_MEMBERS));
            }
            grants.push((caller.to_owned(), grant));
        }
        Ok(Grants(grants))
    }
}

impl fmt::Display for Grants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entry = |(caller, grant): &(String, Grant)| {
            let classes = grant.classes.iter().map(|class| class.name().to_owned());
            let items: Vec<_> = classes
                .chain(grant.ids.iter().map(|id| format!("id:{id}")))
                .collect();
            format!("{caller}={}", items.join(","))
        };
        f.write_str(&self.0.iter().map(entry).collect::<Vec<_>>().join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const GRANTS: &str =
        "default/s3proxy=id:s3proxy-kek;kube-system/join-service=disk,ssh,measurement";
    const UUID: &str = "00000000-0000-0000-0000-000000000000";

    #[test]
    fn each_caller_gets_its_classes_and_others_get_none() {
        let grants: Grants = GRANTS.parse().unwrap();
        let allowed = |caller: &str| {
            [
                UUID,
                "measurementSecret",
                "ca_emergency_ssh_host",
                "ca_emergency_ssh.pub",
                "ca_emergency_ssh",
                "s3proxy-kek",
                "else",
            ]
            .map(|id| grants.allow(caller, id).is_some())
        };
        assert_eq!(
            allowed("kube-system/join-service"),
            [true, true, true, true, false, false, false]
        );
        assert_eq!(
            allowed("default/s3proxy"),
            [false, false, false, false, false, true, false]
        );
        for caller in [
            "default/join-service",
            "kube-system/join-service ",
            "",
            LOCAL,
            MEMBER,
            ANYONE,
        ] {
            assert_eq!(allowed(caller), [false; 7], "{caller}");
        }
        let old: Grants = "kube-system/join-service=ssh-users".parse().unwrap();
        assert!(
            old.allow("kube-system/join-service", "ca_emergency_ssh")
                .is_some()
        );
        assert!(
            "anyone=other"
                .parse::<Grants>()
                .unwrap()
                .allow(ANYONE, "else")
                .is_some()
        );
    }

    #[test]
    fn of_all_pods_the_join_service_alone_has_keys_of_state_disks() {
        let class = |caller: &str, item: &str, id: &str| {
            let grants: Grants = format!("{caller}={item}").parse().unwrap();
            assert_eq!(grants.have_volumes(), item.contains("volume"));
            grants.allow(caller, id)
        };
        for caller in [JOIN_SERVICE_ACCOUNT, LOCAL, MEMBER, ANYONE] {
            assert_eq!(class(caller, "disk", UUID), Some(Class::Disk), "{caller}");
            assert_eq!(
                class(caller, &format!("id:{UUID}"), UUID),
                Some(Class::Disk),
                "{caller}"
            );
            assert_eq!(
                class(caller, "volume", UUID),
                Some(Class::Volume),
                "{caller}"
            );
        }
        for item in [
            "disk",
            "volume",
            &format!("id:{UUID}"),
            &format!("id:{UUID},volume"),
        ] {
            assert_eq!(
                class("default/csi", item, UUID),
                Some(Class::Volume),
                "{item}"
            );
            assert_eq!(class("default/csi", item, "else"), None, "{item}");
        }
        assert_eq!(class("default/csi", "other", UUID), None);
    }

    #[test]
    fn the_member_controller_has_the_measurement_secret_and_nothing_else_whatever_is_granted() {
        let all = format!("{MEMBER_CONTROLLER_ACCOUNT}=disk,volume,ssh,ssh-users,other,id:{UUID}");
        for text in [GRANTS, &all] {
            let grants: Grants = text.parse().unwrap();
            let class = |id| grants.allow(MEMBER_CONTROLLER_ACCOUNT, id);
            assert_eq!(class(MEASUREMENT_SECRET_ID), Some(Class::Measurement));
            let others = [
                UUID,
                SSH_HOST_CA_SEED_ID,
                SSH_USER_CA_SEED_ID,
                "volume-a",
                "else",
            ];
            assert_eq!(others.map(class), [None; 5], "{text}");
        }
    }

    #[test]
    fn a_key_has_a_class_by_its_id_and_case_does_not_make_another() {
        assert_eq!(
            Class::of("F0000000-0000-0000-0000-000000000000"),
            Class::Disk
        );
        assert_eq!(Class::of("measurementsecret"), Class::Other);
        assert_eq!(Class::of(&UUID[1..]), Class::Other);
    }

    #[test]
    fn an_invalid_grant_is_refused_with_its_reason() {
        let (caller, class) = ("expected NAMESPACE/NAME", "expected disk, volume");
        for (text, part, why) in [
            ("", "", "at least one grant"),
            (" ; ", " ; ", "at least one grant"),
            ("a", "a", "expected CALLER="),
            ("a=disk", "a", caller),
            ("A/b=disk", "A/b", caller),
            ("a/b/c=disk", "a/b/c", caller),
            ("a/b=disks", "disks", class),
            ("a/b=", "", class),
            ("a/b=id:", "id:", class),
            ("a/b=disk; a/b=ssh", "a/b", "two grants"),
            ("member=disk,ssh", "ssh", NOT_FOR_MEMBERS),
            ("member=ssh-users", "ssh-users", NOT_FOR_MEMBERS),
            (
                "local=disk;member=id:ca_emergency_ssh",
                "ssh-users",
                NOT_FOR_MEMBERS,
            ),
            ("member=id:ca_emergency_ssh_host", "ssh", NOT_FOR_MEMBERS),
            ("member=measurement", "measurement", NOT_FOR_MEMBERS),
            (
                "member=id:measurementSecret",
                "measurement",
                NOT_FOR_MEMBERS,
            ),
        ] {
            let error = text.parse::<Grants>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{part:?}: ")) && error.contains(why),
                "{text}: {error}"
            );
        }
        let names = kubernetes::services::grants::CLASSES;
        assert_eq!(CLASSES.map(Class::name), names);
    }

    #[test]
    fn formatted_grants_parse_to_the_same_grants() {
        assert_eq!(GRANTS.parse::<Grants>().unwrap().to_string(), GRANTS);
        for text in mutations(GRANTS.as_bytes(), 3000) {
            if let Ok(grants) = String::from_utf8_lossy(&text).parse::<Grants>() {
                assert_eq!(grants.to_string().parse::<Grants>(), Ok(grants));
            }
        }
    }
}
