//! The credentials that sign requests to AWS. The services and the operator's command take those of the variables
//! `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; if these are not set, those of the instance's role
//! (IMDSv2). A node takes only the role's.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base::machines::Error;
use base::text::quoted;
use base::time;
use serde::Deserialize;
use zeroize::Zeroizing;

use super::sigv4;

/// The variables for credentials, which AWS' own programs read too ("AWS SDKs and Tools Reference Guide").
const KEY_ID: &str = "AWS_ACCESS_KEY_ID";
const SECRET_KEY: &str = "AWS_SECRET_ACCESS_KEY";
const SESSION_TOKEN: &str = "AWS_SESSION_TOKEN";
/// The variables for the region; the first one that is set counts.
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];
/// The variable for the address of the instance's metadata service.
pub const IMDS: &str = "AWS_EC2_METADATA_SERVICE_ENDPOINT";
/// The variable for the address of EC2.
pub const EC2: &str = "AWS_ENDPOINT_URL_EC2";

/// Returns the value of a variable of the environment.
pub type Variables = fn(&str) -> Option<String>;

/// Returns the value of a variable of this program's environment.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// How long before they expire a token and credentials are renewed. AWS offers new credentials at least five minutes before the old
/// ones expire ("Retrieve security credentials from instance metadata").
pub(crate) const EARLY: Duration = Duration::from_secs(300);

/// The credentials of the instance's role.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Credentials {
    access_key_id: String,
    secret_access_key: Zeroizing<String>,
    token: Zeroizing<String>,
    /// When they expire, by the clock of AWS.
    expiration: String,
    /// The name of the role.
    #[serde(skip)]
    pub(crate) role: String,
}

/// Whose credentials sign.
pub enum AwsSigner {
    /// Those of the environment variables.
    Variables {
        /// The ID of the access key.
        id: String,
        /// The secret access key.
        secret: Zeroizing<String>,
        /// The token of a session.
        token: Option<Zeroizing<String>>,
    },
    /// Those of the instance's role.
    Role(Arc<Credentials>),
}

/// What is wrong with the variables. No text contains a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VariableError {
    /// The value of this variable is not the name of a region.
    Region(&'static str, String),
    /// The value of this variable has a character that no credential has.
    Character(String),
    /// Only one of the two variables of an access key is set.
    OnlyOne,
}

impl fmt::Display for VariableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VariableError::Region(name, value) => {
                write!(
                    f,
                    "{name}: {} is not the name of a region",
                    quoted(value, 80)
                )
            }
            VariableError::Character(name) => {
                write!(f, "{name} has an invalid character")
            }
            VariableError::OnlyOne => {
                write!(f, "only one of {KEY_ID} and {SECRET_KEY} is set: set both")
            }
        }
    }
}

impl std::error::Error for VariableError {}

/// The reason why a request cannot be signed. No text contains a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unsigned {
    /// The variables are wrong.
    Wrong(VariableError),
    /// The variables are not set, and the instance has no credentials.
    Absent(String),
}

impl fmt::Display for Unsigned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unsigned::Wrong(error) => error.fmt(f),
            Unsigned::Absent(why) => f.write_str(why),
        }
    }
}

impl AwsSigner {
    /// Returns the credentials of the variables. If these are not set, `role` returns those of the instance's role.
    pub fn find(
        variables: Variables,
        role: impl FnOnce() -> Result<Arc<Credentials>, Error>,
    ) -> Result<AwsSigner, Unsigned> {
        let value = |name| variable(variables, name).map_err(Unsigned::Wrong);
        match (value(KEY_ID)?, value(SECRET_KEY)?) {
            (Some(id), Some(secret)) => Ok(AwsSigner::Variables {
                id: id.to_string(),
                secret,
                token: value(SESSION_TOKEN)?,
            }),
            (None, None) => role().map(AwsSigner::Role).map_err(|error| {
                Unsigned::Absent(format!(
                    "there are no credentials: {KEY_ID} and {SECRET_KEY} are not set, and the instance gives none: {error}"
                ))
            }),
            _ => Err(Unsigned::Wrong(VariableError::OnlyOne)),
        }
    }

    /// Returns the key that signs.
    fn key(&self) -> sigv4::AccessKey<'_> {
        match self {
            AwsSigner::Variables { id, secret, .. } => sigv4::AccessKey { id, secret },
            AwsSigner::Role(credentials) => credentials.key(),
        }
    }

    /// Returns the value of the field `x-amz-security-token`, if there is one.
    fn token(&self) -> Option<&str> {
        match self {
            AwsSigner::Variables { token, .. } => token.as_deref().map(String::as_str),
            AwsSigner::Role(credentials) => Some(&credentials.token),
        }
    }

    /// Returns all header fields of a signed request: its own, and those of the signature and the credentials. `at` is the time by
    /// the clock of AWS.
    pub fn sign(
        &self,
        request: &sigv4::SignedRequest<'_>,
        (service, region): (&str, &str),
        host: &str,
        at: SystemTime,
    ) -> Vec<(String, String)> {
        let date = sigv4::date(at);
        let mut fields = request.fields.to_vec();
        fields.extend([("host", host), ("x-amz-date", &date)]);
        fields.extend(self.token().map(|token| ("x-amz-security-token", token)));
        fields.sort_unstable();
        let signed = sigv4::SignedRequest {
            fields: &fields,
            ..*request
        };
        let signature = sigv4::authorization(&self.key(), region, service, &date, &signed);
        // the client writes the host
        fields.retain(|(name, _)| *name != "host");
        fields.push(("authorization", &signature));
        let owned = fields.iter();
        owned
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    /// Says where the credentials are from.
    pub fn origin(&self) -> &'static str {
        match self {
            AwsSigner::Variables { .. } => KEY_ID,
            AwsSigner::Role(_) => "the instance's role",
        }
    }

    /// Says where the credentials are from, with the name of the role.
    pub fn named_origin(&self) -> String {
        match self {
            AwsSigner::Variables { .. } => format!("the identity of {KEY_ID}"),
            AwsSigner::Role(credentials) => format!("the instance's role {}", credentials.role),
        }
    }
}

impl Credentials {
    fn key(&self) -> sigv4::AccessKey<'_> {
        sigv4::AccessKey {
            id: &self.access_key_id,
            secret: &self.secret_access_key,
        }
    }

    /// Returns whether they are still valid for some time.
    pub(crate) fn last(&self, now: SystemTime) -> bool {
        time::parse(&self.expiration).is_some_and(|end| now + EARLY < end)
    }
}

/// Parses the credentials of a role; the error does not repeat them.
pub fn parse_credentials(request: &str, body: &[u8]) -> Result<Credentials, Error> {
    let is_visible = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    match serde_json::from_slice::<Credentials>(body) {
        Ok(credentials)
            if is_visible(&credentials.access_key_id)
                && is_visible(&credentials.token)
                && time::parse(&credentials.expiration).is_some() =>
        {
            Ok(credentials)
        }
        _ => Err(Error::Nonsense {
            request: request.to_owned(),
            expected: "credentials of the instance's role",
            got: format!("{} bytes of something else", body.len()),
        }),
    }
}

/// Returns the region that the variables name.
pub fn region(variables: Variables) -> Result<Option<String>, VariableError> {
    for name in REGIONS {
        match variables(name).filter(|region| !region.is_empty()) {
            Some(region) if is_region(&region) => return Ok(Some(region)),
            Some(region) => return Err(VariableError::Region(name, region)),
            None => {}
        }
    }
    Ok(None)
}

/// Returns whether text can be the name of a region. The name becomes a part of the name of the server that gets the signed request.
pub fn is_region(text: &str) -> bool {
    let is_label = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=40).contains(&text.len()) && text.bytes().all(is_label)
}

/// Returns the value of a variable with a credential; an empty variable counts as not set.
pub fn variable(
    variables: Variables,
    name: &str,
) -> Result<Option<Zeroizing<String>>, VariableError> {
    let value = variables(name).filter(|value| !value.is_empty());
    match value.map(Zeroizing::new) {
        Some(value) if !value.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Err(VariableError::Character(name.into()))
        }
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    /// The example of "Retrieve security credentials from instance metadata" there.
    const CREDENTIALS: &str = r#"{
  "Code" : "Success",
  "LastUpdated" : "2012-04-26T16:39:16Z",
  "Type" : "AWS-HMAC",
  "AccessKeyId" : "ASIAIOSFODNN7EXAMPLE",
  "SecretAccessKey" : "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
  "Token" : "token",
  "Expiration" : "2017-05-17T15:09:54Z"
}"#;

    fn nobody() -> Result<Arc<Credentials>, Error> {
        Err(Error::Refused("no role".into()))
    }

    #[test]
    fn both_variables_sign_and_one_alone_is_an_error() {
        let set: Variables = |name| match name {
            KEY_ID => Some("AKID".into()),
            SECRET_KEY => Some("secret".into()),
            SESSION_TOKEN => Some(String::new()),
            _ => None,
        };
        let signer = AwsSigner::find(set, nobody).unwrap();
        assert_eq!((signer.key().id, signer.key().secret), ("AKID", "secret"));
        assert_eq!((signer.token(), signer.origin()), (None, KEY_ID));
        for (variables, why) in [
            ((|_| None) as Variables, "no role"),
            (|name| (name == KEY_ID).then(|| "a".into()), "only one of"),
            (
                |name| (name == SECRET_KEY).then(|| "se\ncret".into()),
                "AWS_SECRET_ACCESS_KEY has an invalid character",
            ),
        ] {
            let error = AwsSigner::find(variables, nobody)
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains(why) && !error.contains("cret\""), "{error}");
        }
    }

    #[test]
    fn the_first_region_counts_and_is_a_part_of_a_name() {
        let both: Variables = |name| match name {
            "AWS_REGION" => Some("eu-west-1".into()),
            _ => Some("us-east-1".into()),
        };
        assert_eq!(region(both), Ok(Some("eu-west-1".into())));
        let second: Variables = |name| (name == "AWS_DEFAULT_REGION").then(|| "us-east-1".into());
        assert_eq!(region(second), Ok(Some("us-east-1".into())));
        assert_eq!(region(|_| None), Ok(None));
        let error = VariableError::Region("AWS_REGION", "evil.example/".into());
        assert_eq!(region(|_| Some("evil.example/".into())), Err(error));
    }

    #[test]
    fn credentials_are_read_and_never_shown() {
        let credentials = parse_credentials("GET x", CREDENTIALS.as_bytes()).unwrap();
        let end = time::parse("2017-05-17T15:09:54Z").unwrap();
        assert!(credentials.last(end - EARLY - Duration::from_secs(1)));
        assert!(!credentials.last(end - EARLY));
        let bad = CREDENTIALS.replace("\"token\"", "\"to\\nken\"");
        let error = parse_credentials("GET x", bad.as_bytes()).err().unwrap();
        assert!(!error.to_string().contains("wJalr"), "{error}");
        for body in mutations(CREDENTIALS.as_bytes(), 5000) {
            let _ = parse_credentials("GET x", &body);
        }
    }
}
