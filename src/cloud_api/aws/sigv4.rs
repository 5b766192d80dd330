//! Signatures of requests to AWS: Signature Version 4 ("AWS Signature Version 4 for API requests" in the IAM User Guide).

use std::time::SystemTime;

use base::text::hex;
use base::time;
use ring::{digest, hmac};
use zeroize::Zeroizing;

/// The access key that signs.
pub struct AccessKey<'a> {
    /// The ID of the access key.
    pub id: &'a str,
    /// The secret access key.
    pub secret: &'a str,
}

/// A request. It has no query: its parameters are in its body.
pub struct SignedRequest<'a> {
    /// The method.
    pub method: &'a str,
    /// The absolute path, encoded.
    pub path: &'a str,
    /// The header fields that are signed: names in lower case, sorted; among them `host` and `x-amz-date`.
    pub fields: &'a [(&'a str, &'a str)],
    /// The content.
    pub body: &'a [u8],
}

/// Returns the value of the field `x-amz-date`, e.g. `20150830T123600Z`.
pub fn date(at: SystemTime) -> String {
    time::seconds(at)
        .chars()
        .filter(|c| !matches!(c, '-' | ':'))
        .collect()
}

/// Returns the value of the field `Authorization`. `date` is that of [`date`].
pub fn authorization(
    key: &AccessKey<'_>,
    region: &str,
    service: &str,
    date: &str,
    request: &SignedRequest<'_>,
) -> String {
    let day = date.split('T').next().unwrap_or_default();
    let scope = format!("{day}/{region}/{service}/aws4_request");
    let signed: Vec<_> = request.fields.iter().map(|(name, _)| *name).collect();
    let signed = signed.join(";");
    let to_sign = format!(
        "AWS4-HMAC-SHA256\n{date}\n{scope}\n{}",
        sha256(canonical(request, &signed).as_bytes())
    );
    let secret = Zeroizing::new(format!("AWS4{}", key.secret).into_bytes());
    let signing_key = [day, region, service, "aws4_request", &to_sign]
        .iter()
        .fold(secret, |key, part| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
            Zeroizing::new(hmac::sign(&key, part.as_bytes()).as_ref().to_vec())
        });
    format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={signed}, Signature={}",
        key.id,
        hex(&signing_key)
    )
}

/// Returns the canonical form of a request.
fn canonical(request: &SignedRequest<'_>, signed: &str) -> String {
    let field = |(name, value): &(&str, &str)| {
        let words: Vec<_> = value.split(' ').filter(|word| !word.is_empty()).collect();
        format!("{name}:{}\n", words.join(" "))
    };
    format!(
        "{}\n{}\n\n{}\n{signed}\n{}",
        request.method,
        request.path,
        request.fields.iter().map(field).collect::<String>(),
        sha256(request.body)
    )
}

/// Returns the SHA-256 in hexadecimal digits, for the field `x-amz-content-sha256`.
pub fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    const TOKEN: &str = "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwthAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA==";

    /// The requests of the AWS Signature Version 4 test suite (aws-sig-v4-test-suite) that have no query and no field twice.
    #[test]
    fn the_published_test_suite_gives_its_signatures() {
        let at = UNIX_EPOCH + Duration::from_secs(1_440_938_160);
        let key = AccessKey {
            id: "AKIDEXAMPLE",
            secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
        };
        let (host, when) = (("host", "example.amazonaws.com"), date(at));
        let when = ("x-amz-date", when.as_str());
        assert_eq!(when.1, "20150830T123600Z");
        let form = ("content-type", "application/x-www-form-urlencoded");
        for (name, method, path, fields, body, signature) in [
            (
                "get-vanilla",
                "GET",
                "/",
                &[host, when][..],
                "",
                "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                "get-utf8",
                "GET",
                "/%E1%88%B4",
                &[host, when],
                "",
                "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85",
            ),
            (
                "get-header-value-trim",
                "GET",
                "/",
                &[
                    host,
                    ("my-header1", "value1"),
                    ("my-header2", "\"a   b   c\""),
                    when,
                ],
                "",
                "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
            ),
            (
                "post-vanilla",
                "POST",
                "/",
                &[host, when],
                "",
                "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            ),
            (
                "post-header-key-sort",
                "POST",
                "/",
                &[host, ("my-header1", "value1"), when],
                "",
                "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c",
            ),
            (
                "post-x-www-form-urlencoded",
                "POST",
                "/",
                &[form, host, when],
                "Param1=value1",
                "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
            ),
            (
                "post-sts-header-before",
                "POST",
                "/",
                &[host, when, ("x-amz-security-token", TOKEN)],
                "",
                "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead",
            ),
        ] {
            let request = SignedRequest {
                method,
                path,
                fields,
                body: body.as_bytes(),
            };
            let signed: Vec<_> = fields.iter().map(|(name, _)| *name).collect();
            let expected = format!(
                "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders={}, Signature={signature}",
                signed.join(";")
            );
            let got = authorization(&key, "us-east-1", "service", when.1, &request);
            assert_eq!(got, expected, "{name}");
        }
    }
}
