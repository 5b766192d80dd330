//! Requests to AWS, signed with the credentials that [`cloud_api::aws::credentials`] finds: the variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`
//! and `AWS_SESSION_TOKEN`, or the instance's role (IMDSv2).

use std::time::SystemTime;

use cloud_api::aws::credentials::{self, AwsSigner, Unsigned};
use cloud_api::aws::{SignedClient, sigv4};

use super::error::Error;
use super::https::{Fields, KmsResponse, KmsServer};
use super::named;
use super::uri::Author;

/// Finds the credentials for requests to AWS.
pub struct AwsCredentials(SignedClient);

impl AwsCredentials {
    /// Makes the finder. Sends no request.
    pub fn new() -> Result<AwsCredentials, Error> {
        SignedClient::of_caller(None, credentials::environment)
            .map(AwsCredentials)
            .map_err(|error| Error::Credentials(format!("{}: {error}", credentials::IMDS)))
    }

    /// Returns the credentials for the next signature.
    pub fn signer(&self) -> Result<AwsSigner, Error> {
        self.0.signer().map_err(|why| match why {
            Unsigned::Wrong(why) => why.into(),
            // the metadata service of an instance that has just started may not answer yet
            Unsigned::Absent(why) => Error::Away(why),
        })
    }
}

/// Sends one signed request: the service and its region, the method and the path, header fields.
pub fn send(
    signer: &AwsSigner,
    server: &KmsServer,
    place: (&str, &str),
    (method, path): (&str, &str),
    fields: Fields<'_>,
    body: &[u8],
) -> Result<KmsResponse, Error> {
    let request = sigv4::SignedRequest {
        method,
        path,
        fields,
        body,
    };
    let fields = signer.sign(&request, place, server.host(), SystemTime::now());
    let fields: Vec<_> = (fields.iter())
        .map(|(name, value)| (&**name, &**value))
        .collect();
    server.send(method, path, &fields, body)
}

/// Refuses a server that is not this service of AWS, not on this machine, and not named by the operator. A server that gets a
/// signed request can send it to AWS and read the answer. AWS's domains do not suffice as a check: customers of AWS have names in
/// them.
pub fn check_server(
    server: &KmsServer,
    (service, region): (&str, &str),
    author: Author,
    variables: &[&str],
) -> Result<(), Error> {
    let domain = cloud_api::aws::domain(region);
    let is_public = ["", "-fips"].iter().any(|kind| {
        let name = format!("{service}{kind}.{region}.{domain}");
        server.name().eq_ignore_ascii_case(&name)
    });
    let is_private = server.is_below(&format!("{service}.{region}.vpce.{domain}"));
    if is_public || is_private || server.is_loopback() {
        Ok(())
    } else {
        named::check(server, author, variables)
    }
}

/// Refuses a text that is not the name of a region: it becomes a part of the name of the server that gets a key.
pub fn check_region(region: String) -> Result<String, Error> {
    if credentials::is_region(&region) {
        Ok(region)
    } else {
        Err(Error::Uri(format!(
            "{region:?} is not the name of a region"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signed request can be used like a credential for some minutes, and customers of AWS have names in its domains.
    #[test]
    fn a_file_sends_signed_requests_only_to_the_service_itself() {
        let is_asked = |url: &str, author| {
            let server = KmsServer::new(url, None).unwrap();
            check_server(
                &server,
                ("kms", "eu-central-1"),
                author,
                &["FIRSTLIGHT_TEST_ADDRESS"],
            )
            .is_ok()
        };
        for own in [
            "https://kms.eu-central-1.amazonaws.com",
            "https://KMS-fips.eu-central-1.amazonaws.com:443",
            "https://vpce-1-a.kms.eu-central-1.vpce.amazonaws.com",
            "https://127.0.0.1:99",
        ] {
            assert!(is_asked(own, Author::File), "{own}");
        }
        for other in [
            "https://evil.example",
            "https://a1b2.execute-api.eu-central-1.amazonaws.com",
            "https://kms.eu-central-1.amazonaws.com.evil.example",
            "https://kms.us-east-1.amazonaws.com",
            "https://vpce-1.vpce-svc-2.eu-central-1.vpce.amazonaws.com",
            "https://s3.eu-central-1.amazonaws.com",
        ] {
            assert!(!is_asked(other, Author::File), "{other}");
            assert!(is_asked(other, Author::Operator), "{other}");
        }
    }
}
