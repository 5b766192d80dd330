//! A bucket of Amazon S3, or of a server with the same API.
//!
//! ```text
//! storage://aws?bucket=BUCKET&region=REGION&key=KEY[&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! API: Amazon S3 API Reference, `GetObject`, and `PutObject` with the condition `If-None-Match: *`.

use cloud_api::aws::credentials::AwsSigner;
use cloud_api::aws::sigv4;

use super::super::aws_credentials::{AwsCredentials, check_region, check_server, send};
use super::super::error::{Error, said};
use super::super::https::{Fields, KmsResponse, KmsServer};
use super::super::patience::patiently;
use super::super::uri::Query;
use super::kind::{FileStore, StoreKind};

/// This store's entry in the table of all stores.
pub const STORE: StoreKind = StoreKind {
    name: "aws",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str =
    "bucket=BUCKET&region=REGION&key=KEY[&endpoint=https://HOST[:PORT]][&caFile=FILE]";

/// Variables with the address of the API, which AWS' own programs read too.
const ENDPOINT: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];

struct Object {
    server: KmsServer,
    bucket: String,
    key: String,
    region: String,
    callers: AwsCredentials,
}

fn open(mut query: Query) -> Result<Box<dyn FileStore>, Error> {
    let bucket = query.need("bucket")?;
    let region = check_region(query.need("region")?)?;
    let key = query.need_path("key")?;
    let endpoint = query.take("endpoint");
    let ca = query.take("caFile");
    let author = query.author;
    query.finish(PARAMETERS)?;
    // "General purpose bucket naming rules"
    let is_allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
    if !(3..=63).contains(&bucket.len())
        || !bucket.bytes().all(is_allowed)
        || bucket.starts_with('.')
    {
        return Err(Error::Uri(format!(
            "bucket={bucket} is not the name of a bucket"
        )));
    }
    let endpoint = endpoint
        .unwrap_or_else(|| format!("https://s3.{region}.{}", cloud_api::aws::domain(&region)));
    let server = KmsServer::new(&endpoint, ca.as_deref())?;
    check_server(&server, ("s3", &region), author, &ENDPOINT)?;
    Ok(Box::new(Object {
        server,
        bucket,
        key,
        region,
        callers: AwsCredentials::new()?,
    }))
}

impl FileStore for Object {
    fn read(&self) -> Result<KmsResponse, Error> {
        self.call("GET", &[], &[])
    }

    fn create(&self, content: &[u8]) -> Result<(), Error> {
        let fields = [("content-type", "application/json"), ("if-none-match", "*")];
        self.call("PUT", &fields, content).map(|_| ())
    }
}

impl Object {
    /// Returns the successful answer to a request.
    fn call(&self, method: &str, fields: Fields<'_>, body: &[u8]) -> Result<KmsResponse, Error> {
        let signer = self.callers.signer()?;
        let (path, hash) = (
            format!("/{}/{}", self.bucket, self.key),
            sigv4::sha256(body),
        );
        let fields = [fields, &[("x-amz-content-sha256", &*hash)]].concat();
        let place = ("s3", &*self.region);
        patiently(|| {
            let to = (method, &*path);
            let answer = send(&signer, &self.server, place, to, &fields, body);
            let answer = answer.map_err(|error| match error {
                Error::Answer(why) => Error::Answer(format!(
                    "{why}; the bucket is in another region than {}, or the endpoint is not that of S3",
                    self.region
                )),
                error => error,
            })?;
            match answer.status {
                200 => Ok(answer),
                _ => Err(self.refusal(&signer, method, &answer)),
            }
        })
    }

    fn refusal(&self, signer: &AwsSigner, method: &str, answer: &KmsResponse) -> Error {
        let (code, message) = cloud_api::aws::parse_error(&answer.body);
        let (host, status) = (self.server.host(), answer.status);
        let object = format!("{}/{}", self.bucket, self.key);
        let said = said(&format!("{code}: {message}"));
        let text = format!("{host}: {method} {object}: status {status}{said}");
        refusal(status, &code, text, method, &object, signer.origin())
    }
}

/// Returns the error for a status and a code ("Error responses" in the API Reference), with what to do.
fn refusal(
    status: u16,
    code: &str,
    text: String,
    method: &str,
    object: &str,
    origin: &str,
) -> Error {
    let refused = |next: String| Error::Refused(format!("{text}; {next}"));
    let permission = match method {
        "PUT" => "s3:PutObject",
        _ => "s3:GetObject",
    };
    match code {
        "PreconditionFailed" => Error::Exists,
        // another request writes at the same time
        "ConditionalRequestConflict" | "SlowDown" | "OperationAborted" => Error::Busy(text),
        "NoSuchBucket" => refused("make the bucket, or correct its name".into()),
        "NoSuchKey" => refused("there is no such file: `firstlight wrap --out` writes it".into()),
        "AccessDenied" => refused(format!(
            "{origin} needs the permission {permission} on arn:aws:s3:::{object} (docs/kms.md); S3 says the same if there is no such \
             file and the permission s3:ListBucket is missing"
        )),
        "AuthorizationHeaderMalformed" => refused("is it the right region?".into()),
        "SignatureDoesNotMatch" | "RequestTimeTooSkewed" => Error::Credentials(format!(
            "{text}; the secret key of {origin} is wrong, or this machine's clock is"
        )),
        "InvalidAccessKeyId" => {
            Error::Credentials(format!("{text}; the credentials of {origin} are wrong"))
        }
        _ if cloud_api::aws::is_of_credentials(code) => Error::Credentials(format!(
            "{text}; the credentials of {origin} are wrong or have expired"
        )),
        _ if status == 412 => Error::Exists,
        _ if status == 429 || status >= 500 => Error::Busy(text),
        _ => Error::Refused(text),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::error::check_refusals;
    use super::*;

    #[test]
    fn each_code_says_what_to_do_and_whether_to_wait() {
        let of = |status, code: &str| refusal(status, code, "text".into(), "PUT", "a/b", "ORIGIN");
        let passing = [
            (503, "SlowDown"),
            (409, "ConditionalRequestConflict"),
            (500, "InternalError"),
        ];
        let lasting = [
            (412, "PreconditionFailed", "a file with this name exists"),
            (404, "NoSuchBucket", "make the bucket"),
            (404, "NoSuchKey", "firstlight wrap --out"),
            (
                403,
                "AccessDenied",
                "ORIGIN needs the permission s3:PutObject on arn:aws:s3:::a/b",
            ),
            (400, "AuthorizationHeaderMalformed", "right region"),
            (
                403,
                "SignatureDoesNotMatch",
                "the secret key of ORIGIN is wrong",
            ),
            (403, "InvalidAccessKeyId", "credentials of ORIGIN are wrong"),
            (
                400,
                "ExpiredToken",
                "credentials of ORIGIN are wrong or have expired",
            ),
            (400, "", "text"),
        ];
        check_refusals(of, &passing, &lasting);
    }
}
