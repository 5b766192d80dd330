//! A bucket of Google Cloud Storage.
//!
//! ```text
//! storage://gcp?bucket=BUCKET&name=NAME[&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! API: Cloud Storage JSON API v1, `objects: get` with `alt=media`, and `objects: insert` with `uploadType=multipart`, as Google's own
//! clients have it, and the condition `ifGenerationMatch=0`.

use serde_json::json;

use super::super::error::{Error, said};
use super::super::gcp_credentials::{GcpTokens, is_googles, message_of};
use super::super::https::{KmsResponse, KmsServer};
use super::super::patience::patiently;
use super::super::uri::Query;
use super::kind::{FileStore, StoreKind};

/// This store's entry in the table of all stores.
pub const STORE: StoreKind = StoreKind {
    name: "gcp",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "bucket=BUCKET&name=NAME[&endpoint=https://HOST[:PORT]][&caFile=FILE]";
/// The host of the API: tokens are sent only to it.
const API: &str = "storage.googleapis.com";
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

/// The type of a message with metadata and content.
const MULTIPART: &str = "multipart/related; boundary=part";

struct Object {
    server: KmsServer,
    bucket: String,
    name: String,
    callers: GcpTokens,
}

fn open(mut query: Query) -> Result<Box<dyn FileStore>, Error> {
    let bucket = query.need("bucket")?;
    let name = query.need_path("name")?;
    let endpoint = query.take("endpoint");
    let ca = query.take("caFile");
    query.finish(PARAMETERS)?;
    // "Bucket names"
    let is_allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
    if !(3..=222).contains(&bucket.len())
        || !bucket.bytes().all(is_allowed)
        || bucket.starts_with('.')
    {
        return Err(Error::Uri(format!(
            "bucket={bucket} is not the name of a bucket"
        )));
    }
    let endpoint = endpoint.unwrap_or_else(|| format!("https://{API}"));
    let server = KmsServer::new(&endpoint, ca.as_deref())?;
    if !is_googles(&server, API) {
        return Err(Error::Uri(format!(
            "the endpoint {endpoint:?} is not that of Cloud Storage, and the program sends its token only there: expected https://{API}"
        )));
    }
    let callers = GcpTokens { scope: SCOPE, ca };
    Ok(Box::new(Object {
        server,
        bucket,
        name,
        callers,
    }))
}

impl FileStore for Object {
    fn read(&self) -> Result<KmsResponse, Error> {
        let (bucket, name) = (&self.bucket, encoded(&self.name));
        self.call(
            "storage.objects.get",
            "GET",
            &format!("/storage/v1/b/{bucket}/o/{name}?alt=media"),
            &[],
        )
    }

    fn create(&self, content: &[u8]) -> Result<(), Error> {
        let path = format!(
            "/upload/storage/v1/b/{}/o?uploadType=multipart&ifGenerationMatch=0",
            self.bucket
        );
        let body = multipart(&self.name, content);
        self.call("storage.objects.create", "POST", &path, &body)
            .map(|_| ())
    }
}

impl Object {
    /// Returns the successful answer to a request. Errors name the permission that the request needs.
    fn call(
        &self,
        permission: &str,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<KmsResponse, Error> {
        let caller = self.callers.caller()?;
        let mut fields = vec![("authorization", &**caller.authorization)];
        if !body.is_empty() {
            fields.push(("content-type", MULTIPART));
        }
        patiently(|| {
            let answer = self.server.send(method, path, &fields, body)?;
            if answer.status == 200 {
                return Ok(answer);
            }
            let message = words(&answer.body);
            let text = format!(
                "{}: {method} {}/{}: status {}{}",
                self.server.host(),
                self.bucket,
                self.name,
                answer.status,
                said(&message)
            );
            Err(refusal(
                answer.status,
                &message,
                text,
                permission,
                &caller.origin,
            ))
        })
    }
}

/// Returns name and content as one message (RFC 2387). A wrapped master secret contains no CR, so it cannot contain the delimiter.
fn multipart(name: &str, content: &[u8]) -> Vec<u8> {
    let name = json!({ "name": name });
    let head = format!(
        "--part\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{name}\r\n--part\r\nContent-Type: application/json\r\n\r\n"
    );
    [head.as_bytes(), content, b"\r\n--part--\r\n"].concat()
}

/// Returns a name as one segment of a path. The slash is the only character in it that must be encoded.
fn encoded(name: &str) -> String {
    name.replace('/', "%2F")
}

/// Returns the message of an error. Cloud Storage sends some as a plain text.
fn words(body: &[u8]) -> String {
    message_of(body).unwrap_or_else(|| String::from_utf8_lossy(body).into_owned())
}

/// Returns the error for a status ("HTTP status and error codes for JSON"), with what to do.
fn refusal(status: u16, message: &str, text: String, permission: &str, origin: &str) -> Error {
    let refused = |next: String| Error::Refused(format!("{text}; {next}"));
    match status {
        412 => Error::Exists,
        408 | 429 | 500.. => Error::Busy(text),
        401 => Error::Credentials(format!("{text}; the token of {origin} is not accepted")),
        403 if message.contains("insufficient authentication scopes") => {
            refused("give the instance the scope cloud-platform".into())
        }
        403 => refused(format!(
            "{origin} needs the permission {permission} on the bucket (docs/kms.md)"
        )),
        404 => refused(
            "there is no such bucket, or no such file in it: `firstlight wrap --out` writes it"
                .into(),
        ),
        _ => Error::Refused(text),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::super::super::error::check_refusals;
    use super::*;

    #[test]
    fn each_status_says_what_to_do_and_whether_to_wait() {
        let of =
            |status, message: &str| refusal(status, message, "text".into(), "PERMISSION", "ORIGIN");
        let passing = [408, 429, 500, 503].map(|status| (status, ""));
        let lasting = [
            (401, "", "token of ORIGIN"),
            (
                403,
                "a@b does not have access",
                "ORIGIN needs the permission PERMISSION on the bucket",
            ),
            (403, "insufficient authentication scopes.", "cloud-platform"),
            (404, "", "no such bucket, or no such file"),
            (412, "", "a file with this name exists"),
            (400, "", "text"),
        ];
        check_refusals(of, &passing, &lasting);
    }

    #[test]
    fn errors_of_the_api_are_read_and_others_shown() {
        assert_eq!(
            words(br#"{"error": {"code": 404, "message": "Not Found"}}"#),
            "Not Found"
        );
        assert_eq!(words(b"No such object: a/b"), "No such object: a/b");
        for body in mutations(br#"{"error": {"code": 404, "message": "Not Found"}}"#, 5000) {
            words(&body);
        }
    }
}
