//! Changes of policies. A changed policy is parsed again, so every reader accepts it.

use std::collections::BTreeMap;

use base::text::hex;
use serde_json::{Value, json};
use verifier::policy::PolicyError;
use verifier::{Exception, Image, KeyName, Measurement, Policy};

use super::text::{registers, value};

/// The register of a TDX machine's firmware.
const MRTD: u32 = 0;

/// A policy, or why the changed policy is invalid.
type Changed = Result<Policy, PolicyError>;

/// Changes of a policy.
pub trait Edit: Sized {
    /// Returns the policy that also accepts these launch digests of SEV-SNP machines. Afterwards it
    /// accepts only the listed digests.
    fn and_launch_digests(self, digests: &[[u8; 48]]) -> Changed;
    /// Returns the policy that also accepts these SHA-384 PCRs in AWS's signed document.
    fn and_sha384(self, pcrs: &BTreeMap<u32, Vec<u8>>) -> Changed;
    /// Returns the policy that accepts each of its images also with each of these values of MRTD,
    /// as further images with the same other registers. An image without MRTD then accepts only
    /// these values. For policies of TDX machines.
    fn and_mrtds(self, mrtds: &[[u8; 48]]) -> Changed;
    /// Returns the policy whose first image has this name.
    fn named(self, name: &str) -> Changed;
    /// Returns the policy whose first image has these registers of the initramfs, where they
    /// differ.
    fn with_initramfs(self, initramfs: BTreeMap<u32, Measurement>) -> Changed;
    /// Returns the policy with further roots that certify attestation keys: names of built-in
    /// roots, or certificates in PEM.
    fn certified_by(self, roots: impl IntoIterator<Item = String>) -> Changed;
    /// Returns the policy without these attestation keys.
    fn disbelieving(self, keys: &[KeyName]) -> Changed;
    /// Returns the policy that does not permit these flaws.
    fn forbidding(self, flaws: &[Exception]) -> Changed;
}

impl Edit for Policy {
    fn and_launch_digests(self, digests: &[[u8; 48]]) -> Changed {
        let new = digests.iter().map(|digest| Value::from(hex(digest)));
        if digests.is_empty() {
            Ok(self)
        } else {
            changed(&self, |json| {
                add(&mut json["snp"]["launchMeasurements"], new);
            })
        }
    }

    fn and_sha384(self, pcrs: &BTreeMap<u32, Vec<u8>>) -> Changed {
        let pcrs = pcrs
            .iter()
            .map(|(pcr, value)| (pcr.to_string(), hex(value)));
        let pcrs: BTreeMap<_, _> = pcrs.collect();
        changed(&self, |json| {
            let sets = &mut json["cloud"]["sha384"];
            if sets.is_object() {
                *sets = json!([sets]);
            }
            add(sets, [json!(pcrs)]);
        })
    }

    fn and_mrtds(self, mrtds: &[[u8; 48]]) -> Changed {
        let mut images: Vec<Value> = vec![];
        let present: Vec<_> = self
            .images()
            .iter()
            .map(|it| image(it, it.name()))
            .collect();
        for of in self.images().iter().filter(|_| !mrtds.is_empty()) {
            let own = of.measurements().get(&MRTD).filter(|own| !own.warn_only);
            if own.is_some() {
                images.push(image(of, of.name()));
            }
            for mrtd in mrtds {
                let is_only = own.is_none() && mrtds.len() == 1;
                let name = match (is_only, of.name()) {
                    (true, name) => name.to_owned(),
                    (false, "") => format!("MRTD {}", hex(&mrtd[..4])),
                    (false, name) => format!("{name}, MRTD {}", hex(&mrtd[..4])),
                };
                let mut new = image(of, &name);
                let index = MRTD.to_string();
                new["measurements"][&index] = json!({"expected": hex(mrtd), "warnOnly": false});
                if let Some(initramfs) = new["initramfs"].as_object_mut() {
                    initramfs.remove(&index);
                }
                let is_same = |other: &Value| {
                    ["measurements", "initramfs"]
                        .iter()
                        .all(|it| other[it] == new[it])
                };
                if !present.iter().chain(&images).any(is_same) {
                    images.push(new);
                }
            }
        }
        if images.is_empty() {
            return Ok(self);
        }
        changed(&self, |json| {
            let Value::Object(first) = without_empty(images.remove(0)) else {
                return;
            };
            if let Some(members) = json.as_object_mut() {
                members.remove("name");
                members.remove("initramfs");
                members.remove("acpiTables");
                members.remove("alsoAccepted");
                members.extend(first);
            }
            if !images.is_empty() {
                json["alsoAccepted"] = images.into_iter().map(without_empty).collect();
            }
        })
    }

    fn named(self, name: &str) -> Changed {
        changed(&self, |json| json["name"] = name.into())
    }

    fn with_initramfs(self, initramfs: BTreeMap<u32, Measurement>) -> Changed {
        if initramfs.is_empty() {
            Ok(self)
        } else {
            changed(&self, |json| json["initramfs"] = registers(&initramfs))
        }
    }

    fn certified_by(self, roots: impl IntoIterator<Item = String>) -> Changed {
        let roots = roots.into_iter().map(Value::from);
        changed(&self, |json| add(&mut json["endorsementRoots"], roots))
    }

    fn disbelieving(self, keys: &[KeyName]) -> Changed {
        let kept = self.keys().iter().filter(|key| !keys.contains(key));
        let kept = kept.map(ToString::to_string).collect();
        changed(&self, |json| set(json, "attestationKeys", kept))
    }

    fn forbidding(self, flaws: &[Exception]) -> Changed {
        let kept = self.exceptions().iter().filter(|it| !flaws.contains(it));
        let kept = kept.map(ToString::to_string).collect();
        changed(&self, |json| set(json, "exceptions", kept))
    }
}

/// Returns the policy whose JSON was changed.
pub(super) fn changed(policy: &Policy, change: impl FnOnce(&mut Value)) -> Changed {
    let mut json = value(policy);
    change(&mut json);
    Policy::from_json(&json.to_string())
}

/// Sets a list, or removes it if it is empty.
fn set(json: &mut Value, name: &str, list: Vec<String>) {
    match json.as_object_mut() {
        Some(members) if list.is_empty() => drop(members.remove(name)),
        _ => json[name] = list.into(),
    }
}

/// Adds entries to a list, except those that it already has. Creates the list if it is absent.
fn add(list: &mut Value, entries: impl IntoIterator<Item = Value>) {
    let mut all = list.as_array().cloned().unwrap_or_default();
    for entry in entries {
        if !all.contains(&entry) {
            all.push(entry);
        }
    }
    *list = all.into();
}

/// Returns an image that has both fields of registers.
pub(super) fn image(image: &Image, name: &str) -> Value {
    let (booted, initramfs) = (image.measurements(), image.initramfs());
    let mut json =
        json!({"name": name, "measurements": registers(booted), "initramfs": registers(initramfs)});
    if image.has_confined_kernel() {
        json["acpiTables"] = "confined".into();
    }
    json
}

/// Returns an image without the initramfs field if that is empty.
pub(super) fn without_empty(mut image: Value) -> Value {
    if let Some(members) = image.as_object_mut() {
        members.retain(|name, value| name != "initramfs" || value != &json!({}));
    }
    image
}
