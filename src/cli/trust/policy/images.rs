//! The images of a policy while a cluster goes from one to the next.

use serde_json::Value;
use verifier::{Image, Policy, Variant};

use super::edit::{Edit, changed, image, without_empty};
use super::text::text;
use crate::shell::error::Error;

/// The name of an image without one in a policy with several.
const UNNAMED: &str = "firstlight";

/// Returns the policy `old` that also accepts the images of `new`. Its other requirements are those of `old`, which the present nodes meet;
/// it may have the flaws of both.
pub fn both_images(old: &str, new: &str) -> Result<String, Error> {
    let (mut both, new) = (
        Policy::from_json(old).map_err(Error::content)?,
        Policy::from_json(new).map_err(Error::content)?,
    );
    for image in new.images() {
        let is_there = both.images().iter().any(|it| {
            it.measurements() == image.measurements() && it.initramfs() == image.initramfs()
        });
        if is_there {
            continue;
        }
        let base = match image.name() {
            "" => UNNAMED,
            name => name,
        };
        let mut name = base.to_owned();
        for number in 2..both.images().len() + 2 {
            if both.images().iter().all(|it| it.name() != name) {
                break;
            }
            name = format!("{base} {number}");
        }
        both = both
            .and_image(&name, image.clone())
            .map_err(Error::content)?;
    }
    let exceptions = new.exceptions().iter().copied();
    Ok(text(&exceptions.fold(both, Policy::permitting)))
}

/// Returns the policy `of` with only those of its images that `is_kept` names. Everything else stays, but exceptions for flaws that
/// only the other images have. Refuses if no image is left.
pub fn only_images(
    of: &str,
    variant: &Variant,
    is_kept: impl Fn(&Image) -> bool,
) -> Result<String, Error> {
    let policy = Policy::from_json(of).map_err(Error::content)?;
    let kept = policy.images().iter().filter(|it| is_kept(it));
    let mut kept: Vec<Value> = kept.map(|it| without_empty(image(it, it.name()))).collect();
    if kept.is_empty() {
        return Err(Error::content("no image would be left in the policy"));
    }
    if kept.len() == policy.images().len() {
        return Ok(of.to_owned());
    }
    let first = kept.remove(0);
    let left = changed(&policy, |json| {
        let (Some(members), Value::Object(mut first)) = (json.as_object_mut(), first) else {
            return;
        };
        if first.get("name").is_some_and(|name| name == "") {
            first.remove("name");
        }
        for name in ["name", "initramfs", "acpiTables", "alsoAccepted"] {
            members.remove(name);
        }
        members.extend(first);
        if !kept.is_empty() {
            members.insert("alsoAccepted".into(), kept.into());
        }
    });
    let left = left.map_err(Error::content)?;
    let useless = variant.useless_exceptions(&left);
    Ok(text(&left.forbidding(&useless).map_err(Error::content)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use verifier::Exception;

    fn policy(pcr4: &str, more: &str) -> String {
        format!(
            r#"{{{more}"measurements":{{"4":{{"expected":"{}","warnOnly":false}},"15":{{"expected":"{}","warnOnly":false}}}}}}"#,
            pcr4.repeat(32),
            "00".repeat(32)
        )
    }

    #[test]
    fn both_images_are_accepted_with_the_requirements_that_the_present_nodes_meet() {
        let keys = format!(r#""attestationKeys":["000b{}"],"#, "ab".repeat(32));
        let (old, new) = (policy("11", ""), policy("22", &keys));
        let both = Policy::from_json(&both_images(&old, &new).unwrap()).unwrap();
        let values: Vec<_> = both
            .images()
            .iter()
            .map(|it| it.measurements()[&4].expected[0])
            .collect();
        assert_eq!(values, [0x11, 0x22]);
        assert_eq!(both.images()[1].name(), "firstlight");
        assert!(
            both.believes_any_key(),
            "the present nodes have no keys in a policy"
        );
        // again, and an image that is accepted already
        let text = both_images(&old, &new).unwrap();
        assert_eq!(both_images(&text, &new).unwrap(), text);
        assert!(both_images(&old, "{}").is_err());
        // a third image has another name
        let third = Policy::from_json(&both_images(&text, &policy("33", "")).unwrap()).unwrap();
        assert_eq!(third.images()[2].name(), "firstlight 2");
    }
    #[test]
    fn the_images_that_stay_keep_their_registers_and_the_other_requirements_stay() {
        let keys = format!(
            r#""attestationKeys":["000b{}"],"name":"old","require":"strong","#,
            "ab".repeat(32)
        );
        let both = both_images(&policy("11", &keys), &policy("22", r#""name":"new","#)).unwrap();
        let read = |text: &str| Policy::from_json(text).unwrap();
        let id = |at: usize| read(&both).images()[at].id().clone();
        let variant = Variant::named("qemu-vtpm").unwrap();
        for (at, name) in [(0, "old"), (1, "new")] {
            let only = read(&only_images(&both, variant, |it| *it.id() == id(at)).unwrap());
            assert_eq!(only.images().len(), 1);
            assert_eq!(
                (only.images()[0].name(), only.images()[0].id()),
                (name, &id(at))
            );
            assert_eq!(only.keys(), read(&both).keys());
            assert!(only.requires_strong());
        }
        assert_eq!(only_images(&both, variant, |_| true).unwrap(), both);
        assert!(only_images(&both, variant, |_| false).is_err());
    }

    #[test]
    fn an_exception_goes_with_the_last_image_that_needs_it() {
        let variant = Variant::named("qemu-vtpm").unwrap();
        let flawed = |pcr: &str, exceptions: &str| {
            let value = "11".repeat(32);
            format!(r#"{{"exceptions":[{exceptions}],"measurements":{{"{pcr}":"{value}"}}}}"#)
        };
        let old = flawed("9", r#""any-image""#);
        let both = both_images(&old, &flawed("4", r#""any-image","zero-registers""#)).unwrap();
        let exceptions_with = |pcr: u32| {
            let has_it = |image: &Image| image.measurements().contains_key(&pcr);
            let only = Policy::from_json(&only_images(&both, variant, has_it).unwrap()).unwrap();
            only.exceptions().to_vec()
        };
        assert_eq!(exceptions_with(9), [Exception::AnyImage]);
        assert_eq!(exceptions_with(4), []);
    }
}
