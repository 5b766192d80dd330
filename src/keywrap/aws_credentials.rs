//! Requests to AWS, signed by whom [`aws_caller`](cloud::aws_caller) finds: the variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`
//! and `AWS_SESSION_TOKEN`, or the instance's role (IMDSv2).

use std::time::SystemTime;

use cloud::aws::Client;
use cloud::aws_caller::{self, Signer, Unsigned};
use cloud::sigv4;

use super::error::Error;
use super::https::{Answer, Fields, Server};

/// Where credentials are looked for.
pub struct Callers(Client);

impl Callers {
    /// Sends no request.
    pub fn new() -> Result<Callers, Error> {
        Client::of_caller(None, aws_caller::environment)
            .map(Callers)
            .map_err(|error| Error::Credentials(format!("{}: {error}", aws_caller::IMDS)))
    }

    /// Returns who signs now.
    pub fn signer(&self) -> Result<Signer, Error> {
        self.0.signer().map_err(|why| match why {
            Unsigned::Wrong(why) => Error::Credentials(why),
            // the service of an instance that has just started may still be away
            Unsigned::Absent(why) => Error::Away(why),
        })
    }
}

/// Sends one signed request: the service and its region, the method and the path, header fields.
pub fn send(
    signer: &Signer,
    server: &Server,
    (service, region): (&str, &str),
    (method, path): (&str, &str),
    fields: Fields<'_>,
    body: &[u8],
) -> Result<Answer, Error> {
    let date = sigv4::date(SystemTime::now());
    let mut fields = fields.to_vec();
    fields.extend([("host", server.host()), ("x-amz-date", &*date)]);
    fields.extend(signer.token().map(|token| ("x-amz-security-token", token)));
    fields.sort_unstable();
    let request = sigv4::Request {
        method,
        path,
        fields: &fields,
        body,
    };
    let authorization = sigv4::authorization(&signer.key(), region, service, &date, &request);
    fields.retain(|(name, _)| *name != "host");
    fields.push(("authorization", &authorization));
    server.send(method, path, &fields, body)
}

/// Refuses what is not the name of a region: it becomes a part of the server's name, to which a key goes.
pub fn check_region(region: String) -> Result<String, Error> {
    match aws_caller::is_region(&region) {
        true => Ok(region),
        false => Err(Error::Uri(format!(
            "{region:?} is not the name of a region"
        ))),
    }
}
