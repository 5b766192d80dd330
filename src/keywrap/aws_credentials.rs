//! Who signs requests to AWS: the variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or the instance's
//! role (IMDSv2).

use std::env;
use std::sync::Arc;
use std::time::SystemTime;

use cloud::aws::{Client, Credentials};
use cloud::sigv4;
use zeroize::Zeroizing;

use super::error::Error;
use super::https::{Answer, Fields, Server};
use super::variable::variable;

/// The variables that have credentials, and the one with the address of the instance's metadata service, as in AWS' own programs.
const KEY_ID: &str = "AWS_ACCESS_KEY_ID";
const SECRET_KEY: &str = "AWS_SECRET_ACCESS_KEY";
const SESSION_TOKEN: &str = "AWS_SESSION_TOKEN";
const IMDS: &str = "AWS_EC2_METADATA_SERVICE_ENDPOINT";

/// Where credentials are looked for.
pub struct Callers(Client);

/// Who signs.
pub enum Signer {
    /// Who has set the variables.
    Variables {
        /// The ID of the access key.
        id: String,
        /// The secret access key.
        secret: Zeroizing<String>,
        /// The token of a session.
        token: Option<Zeroizing<String>>,
    },
    /// The instance's role.
    Role(Arc<Credentials>),
}

impl Callers {
    /// Sends no request.
    pub fn new() -> Result<Callers, Error> {
        let imds = env::var(IMDS).ok().filter(|url| !url.is_empty());
        Client::new(imds.as_deref())
            .map(Callers)
            .map_err(|error| Error::Credentials(format!("{IMDS}: {error}")))
    }

    /// Returns who signs now.
    pub fn signer(&self) -> Result<Signer, Error> {
        match (variable(KEY_ID)?, variable(SECRET_KEY)?) {
            (Some(id), Some(secret)) => Ok(Signer::Variables {
                id: id.to_string(),
                secret,
                token: variable(SESSION_TOKEN)?,
            }),
            (None, None) => self.0.credentials().map(Signer::Role).map_err(|error| {
                // the service of an instance that has just started may still be away
                Error::Away(format!(
                    "there are no credentials: {KEY_ID} and {SECRET_KEY} are not set, and the instance gives none: {error}"
                ))
            }),
            _ => Err(Error::Credentials(format!(
                "only one of {KEY_ID} and {SECRET_KEY} is set: set both"
            ))),
        }
    }
}

impl Signer {
    fn key(&self) -> sigv4::Key<'_> {
        match self {
            Signer::Variables { id, secret, .. } => sigv4::Key { id, secret },
            Signer::Role(credentials) => credentials.key(),
        }
    }

    fn token(&self) -> Option<&str> {
        match self {
            Signer::Variables { token, .. } => token.as_deref().map(String::as_str),
            Signer::Role(credentials) => Some(credentials.token()),
        }
    }

    /// Says where the credentials are from.
    pub fn origin(&self) -> &'static str {
        match self {
            Signer::Variables { .. } => KEY_ID,
            Signer::Role(_) => "the instance's role",
        }
    }

    /// Sends one signed request: the service and its region, the method and the path, header fields.
    pub fn send(
        &self,
        server: &Server,
        (service, region): (&str, &str),
        (method, path): (&str, &str),
        fields: Fields<'_>,
        body: &[u8],
    ) -> Result<Answer, Error> {
        let date = sigv4::date(SystemTime::now());
        let mut fields = fields.to_vec();
        fields.extend([("host", server.host()), ("x-amz-date", &*date)]);
        fields.extend(self.token().map(|token| ("x-amz-security-token", token)));
        fields.sort_unstable();
        let request = sigv4::Request {
            method,
            path,
            fields: &fields,
            body,
        };
        let authorization = sigv4::authorization(&self.key(), region, service, &date, &request);
        fields.retain(|(name, _)| *name != "host");
        fields.push(("authorization", &authorization));
        server.send(method, path, &fields, body)
    }
}

/// Refuses what is not the name of a region: it becomes a part of the server's name, to which a key goes.
pub fn check_region(region: String) -> Result<String, Error> {
    let is_label = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    match !region.is_empty() && region.len() <= 40 && region.bytes().all(is_label) {
        true => Ok(region),
        false => Err(Error::Uri(format!(
            "{region:?} is not the name of a region"
        ))),
    }
}
