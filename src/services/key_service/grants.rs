//! Which caller may have which keys.
//!
//! ```text
//! kube-system/join-service=disk,ssh,measurement;default/s3proxy=id:s3proxy-kek
//! ```
//!
//! Callers: `NAMESPACE/NAME` is a service account that has shown a token, [`LOCAL`] a program of the key service's own machine,
//! by that machine's TPM, [`MEMBER`] another machine that has proved by its TPM to be of this cluster, [`ANYONE`] whoever reaches
//! a service that asks for no proof.
//!
//! A worker proves as much as a control plane does. So a member gets neither the SSH authority of all nodes nor the measurement
//! secret, whatever the operator grants.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use base::crypto::{
    MEASUREMENT_SECRET_ID, SSH_HOST_CA_SEED_ID, SSH_USER_CA_PUBLIC_ID, SSH_USER_CA_SEED_ID,
};
use kms::Uuid;
use kubernetes::services::JOIN_SERVICE_ACCOUNT;

/// A program of the key service's own machine.
pub const LOCAL: &str = "local";
/// Another machine of the cluster.
pub const MEMBER: &str = "member";
/// Nobody in particular.
pub const ANYONE: &str = "anyone";

/// Kinds of keys, told apart by their ids; [`Class::Disk`] and [`Class::Volume`] by the cluster's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Of state disks and of volumes: the id is a LUKS2 UUID.
    Disk,
    /// Of volumes alone: the id is a LUKS2 UUID that no record of a state disk has ([`super::disks`]).
    Volume,
    /// Of the SSH certificate authorities what tickets need: the seed of the one for hosts, by which one can pose as any node
    /// to an operator, and the public key of the one for users.
    Ssh,
    /// The seed of the SSH certificate authority for users: whoever has it can log in to every node. Only the old system's
    /// join service asks for it.
    SshUsers,
    /// The measurement secret: with the salt, which is no secret, it gives the cluster's ID.
    Measurement,
    /// Any other name, as that of the S3 proxy.
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

/// They make nodes and clusters, and a worker is a member, too.
const NEVER_A_MEMBERS: [&str; 4] = [
    SSH_HOST_CA_SEED_ID,
    SSH_USER_CA_SEED_ID,
    SSH_USER_CA_PUBLIC_ID,
    MEASUREMENT_SECRET_ID,
];

impl Class {
    /// The class of the key of this id; whether a UUID is a volume's the id does not say.
    pub fn of(id: &str) -> Class {
        match id {
            MEASUREMENT_SECRET_ID => Class::Measurement,
            SSH_HOST_CA_SEED_ID | SSH_USER_CA_PUBLIC_ID => Class::Ssh,
            SSH_USER_CA_SEED_ID => Class::SshUsers,
            _ if Uuid::parse(id).is_some() => Class::Disk,
            _ => Class::Other,
        }
    }

    /// As in grants, the log and the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Class::Disk => "disk",
            Class::Volume => "volume",
            Class::Ssh => "ssh",
            Class::SshUsers => "ssh-users",
            Class::Measurement => "measurement",
            Class::Other => "other",
        }
    }
}

/// Who may have what. Nobody else may have anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grants(BTreeMap<String, Grant>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Grant {
    classes: BTreeSet<Class>,
    ids: BTreeSet<String>,
}

impl Grant {
    fn allows(&self, id: &str) -> bool {
        self.classes.contains(&Class::of(id)) || self.ids.contains(id)
    }
}

impl Grants {
    /// As a key of which class `caller` may have the one of this id. With [`Class::Volume`] it may not if that is a state disk's.
    pub fn allow(&self, caller: &str, id: &str) -> Option<Class> {
        let grant = self.0.get(caller)?;
        match Class::of(id) {
            // of the pods, the join service alone has to do with state disks
            Class::Disk
                if grant.allows(id) && caller.contains('/') && caller != JOIN_SERVICE_ACCOUNT =>
            {
                Some(Class::Volume)
            }
            Class::Disk if !grant.allows(id) && grant.classes.contains(&Class::Volume) => {
                Some(Class::Volume)
            }
            class => grant.allows(id).then_some(class),
        }
    }

    /// Whether somebody may have keys of volumes alone by the name of that class.
    pub fn have_volumes(&self) -> bool {
        self.0
            .values()
            .any(|grant| grant.classes.contains(&Class::Volume))
    }

    /// Everybody who may have anything.
    pub fn callers(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

impl FromStr for Grants {
    type Err = String;

    fn from_str(text: &str) -> Result<Grants, String> {
        let mut grants: BTreeMap<String, Grant> = BTreeMap::new();
        for part in text
            .split(';')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let (caller, items) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?}: expected CALLER=CLASS,CLASS.."))?;
            let (caller, mut grant) = (caller.trim(), Grant::default());
            if !is_caller(caller) {
                return Err(format!(
                    "{caller:?} is no caller: expected NAMESPACE/NAME, {LOCAL}, {MEMBER} or {ANYONE}"
                ));
            }
            for item in items.split(',').map(str::trim) {
                match (
                    CLASSES.into_iter().find(|class| class.name() == item),
                    item.strip_prefix("id:"),
                ) {
                    (Some(class), _) => drop(grant.classes.insert(class)),
                    (None, Some(id)) if !id.is_empty() => drop(grant.ids.insert(id.into())),
                    _ => {
                        return Err(format!(
                            "{item:?}: expected disk, volume, ssh, ssh-users, measurement, other or id:NAME"
                        ));
                    }
                }
            }
            if caller == MEMBER
                && let Some(id) = NEVER_A_MEMBERS.into_iter().find(|id| grant.allows(id))
            {
                let class = Class::of(id).name();
                return Err(format!(
                    "{MEMBER} may not have {class}: a worker is a member, too; see {LOCAL}"
                ));
            }
            if grants.insert(caller.into(), grant).is_some() {
                return Err(format!("{caller} is there twice"));
            }
        }
        if grants.is_empty() {
            Err("nobody may have anything".into())
        } else {
            Ok(Grants(grants))
        }
    }
}

impl fmt::Display for Grants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entry = |(caller, grant): (&String, &Grant)| {
            let classes = grant.classes.iter().map(|class| class.name().to_owned());
            let items: Vec<_> = classes
                .chain(grant.ids.iter().map(|id| format!("id:{id}")))
                .collect();
            format!("{caller}={}", items.join(","))
        };
        f.write_str(&self.0.iter().map(entry).collect::<Vec<_>>().join(";"))
    }
}

fn is_caller(text: &str) -> bool {
    // names of the API: letters, digits, '-' and '.'
    let is_name = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b))
    };
    match text.split_once('/') {
        Some((namespace, name)) => is_name(namespace) && is_name(name),
        None => [LOCAL, MEMBER, ANYONE].contains(&text),
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
    fn each_caller_has_its_classes_and_nobody_else_has_any() {
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
    fn a_key_has_a_class_by_its_id_and_case_does_not_make_another() {
        assert_eq!(
            Class::of("F0000000-0000-0000-0000-000000000000"),
            Class::Disk
        );
        assert_eq!(Class::of("measurementsecret"), Class::Other);
        assert_eq!(Class::of(&UUID[1..]), Class::Other);
    }

    #[test]
    fn what_is_no_grant_is_refused_by_name() {
        for (text, why) in [
            ("", "nobody"),
            (" ; ", "nobody"),
            ("a", "expected CALLER=CLASS"),
            ("a=disk", "\"a\" is no caller"),
            ("A/b=disk", "\"A/b\" is no caller"),
            ("a/b/c=disk", "is no caller"),
            ("a/b=disks", "\"disks\": expected disk, volume, ssh"),
            ("a/b=", "\"\": expected disk"),
            ("a/b=id:", "expected disk"),
            ("a/b=disk; a/b=ssh", "a/b is there twice"),
            ("member=disk,ssh", "member may not have ssh"),
            ("member=ssh-users", "member may not have ssh-users"),
            (
                "local=disk;member=id:ca_emergency_ssh",
                "member may not have ssh-users",
            ),
            (
                "member=id:ca_emergency_ssh_host",
                "member may not have ssh:",
            ),
            ("member=measurement", "member may not have measurement"),
            (
                "member=id:measurementSecret",
                "member may not have measurement",
            ),
        ] {
            let error = text.parse::<Grants>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_read_reads_the_same_after_it_was_written() {
        assert_eq!(GRANTS.parse::<Grants>().unwrap().to_string(), GRANTS);
        for text in mutations(GRANTS.as_bytes(), 3000) {
            if let Ok(grants) = String::from_utf8_lossy(&text).parse::<Grants>() {
                assert_eq!(grants.to_string().parse::<Grants>(), Ok(grants));
            }
        }
    }
}
