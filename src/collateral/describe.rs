//! EC2's description of one instance: `DescribeInstances` with its ID ("Amazon EC2 API Reference").

use base::machines::Error as ApiError;
use base::text::quoted;
use cloud::http::excerpt;
use cloud_api::aws::credentials::Unsigned;
use cloud_api::aws::xml::{child, children, document, text_at};
use cloud_api::aws::{Failed, SignedClient, is_name};
use hardware::{Cause, Unavailable};

/// Maximum size in bytes of an answer: an instance with fifteen network interfaces of fifty addresses each has less.
const MAX_ANSWER: u64 = 1 << 20;

/// An instance of the caller's account, or one that is shared with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The account that owns the instance: 12 digits.
    pub account: String,
    /// The zone, e.g. `eu-central-1a`.
    pub zone: String,
    /// The image from which it was started.
    pub image: String,
    /// The state, e.g. `running`.
    pub state: String,
}

/// Asks EC2 for an instance. EC2 answers only for instances of the caller's account, and for those that are shared with it. The
/// kind of the error is [`Cause::Setting`] if the caller's credentials, permissions or settings are the reason.
pub fn describe(client: &SignedClient, id: &str) -> Result<Described, Unavailable> {
    // without credentials the region does not matter
    let unsigned = |why: Unsigned| Cause::Setting.because(why.to_string());
    client.signer().map(drop).map_err(unsigned)?;
    let region = client.region().map_err(|error| {
        Cause::Setting
            .because(format!("{error:#}"))
            .about("the region is not known, set AWS_REGION")
    })?;
    let answer = client.describe_instances(&[("InstanceId.1", id)], MAX_ANSWER);
    let (request, body) = answer.map_err(|failed| undescribed(failed, id, region))?;
    let described = parse_described(id, &body);
    described.map_err(|why| why.about(request))
}

/// Returns why an instance is not described ("Error codes for the Amazon EC2 API").
fn undescribed(failed: Failed, id: &str, region: &str) -> Unavailable {
    match failed.code.as_str() {
        "InvalidInstanceID.NotFound" => {
            let why = format!(
                "EC2 in {region} knows no instance {id} in the account of this program: the machine is another customer's, or in another \
                 region"
            );
            Cause::Unknown.because(why)
        }
        "InvalidInstanceID.Malformed" => Unavailable::malformed(format!(
            "EC2 says that {} is not the ID of an instance",
            quoted(id, 80)
        )),
        _ => {
            let kind = match &failed.error {
                ApiError::Unreachable { .. } => Cause::Unreachable,
                _ if failed.is_later => Cause::Busy,
                _ => Cause::Setting,
            };
            kind.because(format!("{:#}", failed.error))
        }
    }
}

/// Parses the answer to the question for one instance.
pub fn parse_described(id: &str, body: &[u8]) -> Result<Described, Unavailable> {
    let nonsense = |got| Unavailable::malformed(format!("expected the instance {id}, got {got}"));
    let document = document(body).map_err(|error| nonsense(error.to_string()))?;
    let root = document.root_element();
    let reservations = child(root, "reservationSet")
        .filter(|_| root.has_tag_name("DescribeInstancesResponse"))
        .into_iter()
        .flat_map(|set| children(set, "item"));
    // an instance has exactly one reservation, and the request named only this instance
    let reservation = only(reservations).ok_or_else(|| nonsense(format!("{:?}", excerpt(body))))?;
    let instances = child(reservation, "instancesSet")
        .into_iter()
        .flat_map(|set| children(set, "item"));
    let instance = only(instances)
        .ok_or_else(|| nonsense("a reservation with no instance or several".into()))?;
    let got = text_at(instance, &["instanceId"]);
    if got != id {
        return Err(nonsense(format!("{:?}", excerpt(got.as_bytes()))));
    }
    let described = Described {
        account: text_at(reservation, &["ownerId"]).to_owned(),
        zone: text_at(instance, &["placement", "availabilityZone"]).to_owned(),
        image: text_at(instance, &["imageId"]).to_owned(),
        state: text_at(instance, &["instanceState", "name"]).to_owned(),
    };
    let is_account = |text: &str| text.len() == 12 && text.bytes().all(|b| b.is_ascii_digit());
    for (what, text, is_right) in [
        (
            "account",
            &described.account,
            is_account(&described.account),
        ),
        ("zone", &described.zone, is_name(&described.zone)),
        ("image", &described.image, is_name(&described.image)),
        ("state", &described.state, is_name(&described.state)),
    ] {
        if !is_right {
            let text = excerpt(text.as_bytes());
            return Err(nonsense(format!("one with the {what} {text:?}")));
        }
    }
    Ok(described)
}

/// Returns the only item; `None` if there is none or more than one.
fn only<T>(mut all: impl Iterator<Item = T>) -> Option<T> {
    let one = all.next();
    one.filter(|_| all.next().is_none())
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    /// Returns an instance in the form of the API reference, with the elements that the parser reads and some others.
    fn item() -> String {
        "<item><reservationId>r-1234567890abcdef0</reservationId><ownerId>123456789012</ownerId><groupSet/><instancesSet><item>\
         <instanceId>i-01</instanceId><imageId>ami-bff32ccc</imageId><instanceState><code>16</code><name>running</name></instanceState>\
         <placement><availabilityZone>eu-west-1c</availabilityZone><groupName/><tenancy>default</tenancy></placement>\
         <networkInterfaceSet><item><ownerId>999999999999</ownerId></item></networkInterfaceSet></item></instancesSet></item>"
            .into()
    }

    fn answer(items: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<DescribeInstancesResponse \
             xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>8f7724cf-496f-496e-8fe3-example</requestId>\
             <reservationSet>{items}</reservationSet></DescribeInstancesResponse>"
        )
    }

    #[test]
    fn the_one_instance_that_was_asked_for_is_read() {
        let read = |xml: &str| parse_described("i-01", xml.as_bytes());
        let (one, whole) = (item(), answer(&item()));
        let expected = Described {
            account: "123456789012".into(),
            zone: "eu-west-1c".into(),
            image: "ami-bff32ccc".into(),
            state: "running".into(),
        };
        assert_eq!(read(&whole), Ok(expected));
        let several = whole.replace("</item></instancesSet>", "</item><item/></instancesSet>");
        for (xml, why) in [
            (answer(""), "expected the instance i-01"),
            (answer(&one.repeat(2)), "expected the instance i-01"),
            (several, "no instance or several"),
            (answer("<item/>"), "no instance or several"),
            (whole.replace("i-01", "i-02"), "got \"i-02\""),
            (whole.replace("123456789012", "12345"), "account \"12345\""),
            (whole.replace("eu-west-1c", ""), "zone \"\""),
            (
                whole.replace("Describe", "Run"),
                "expected the instance i-01",
            ),
            (
                whole[..whole.len() - 1].to_owned(),
                "expected the instance i-01",
            ),
        ] {
            let error = read(&xml).unwrap_err();
            assert_eq!(error.cause, Cause::Malformed);
            let error = error.to_string();
            assert!(
                error.contains(why) && error.len() < 1000,
                "{error}, expected {why}"
            );
        }
    }

    #[test]
    fn mutated_answers_are_read_or_refused() {
        let (mut good, mut bad) = (0, 0);
        for body in mutations(answer(&item()).as_bytes(), 10_000) {
            match parse_described("i-01", &body) {
                Ok(described) => {
                    good += 1;
                    assert!(described.account.len() == 12 && is_name(&described.zone));
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().len() < 4096);
                }
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        let deep = "<item>".repeat(100_000) + &"</item>".repeat(100_000);
        assert!(parse_described("i-01", answer(&deep).as_bytes()).is_err());
    }
}
