//! The errors of the APIs, in XML or JSON.

use serde::Deserialize;

use super::xml::{child, document};

/// Maximum number of characters that are kept of a code or a message.
const MAX_SHOWN: usize = 300;

/// Returns code and message of an API's error in XML or JSON; both are empty if the answer is not such an error.
pub fn parse_error(body: &[u8]) -> (String, String) {
    #[derive(Deserialize)]
    struct OfJson {
        #[serde(rename = "__type")]
        code: String,
        #[serde(alias = "Message", default)]
        message: String,
    }
    let short = |text: &str| text.chars().take(MAX_SHOWN).collect::<String>();
    if let Ok(error) = serde_json::from_slice::<OfJson>(body) {
        let code = error.code.rsplit('#').next().unwrap_or_default();
        return (short(code), short(&error.message));
    }
    let Ok(document) = document(body) else {
        return Default::default();
    };
    let error = document
        .root()
        .descendants()
        .find(|node| node.has_tag_name("Error"));
    let text = |name| {
        let text = error.and_then(|error| child(error, name)?.text());
        short(text.unwrap_or_default())
    };
    (text("Code"), text("Message"))
}

/// Returns whether an error's code says that the credentials are not, or no longer, valid.
pub fn is_of_credentials(code: &str) -> bool {
    matches!(
        code,
        "AuthFailure"
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "InvalidClientTokenId"
            | "RequestExpired"
            | "UnrecognizedClientException"
    )
}

/// Returns whether an error's code says that there were too many requests ("Error codes for the Amazon EC2 API").
pub(crate) fn is_throttling(code: &str) -> bool {
    matches!(
        code,
        "RequestLimitExceeded" | "Throttling" | "ThrottlingException"
    )
}

/// Says what an operator can do about an error.
pub(crate) fn advice(code: &str, origin: &str, permission: &str) -> String {
    match code {
        "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" => {
            format!("{origin} needs the permission {permission} (docs/clouds.md)")
        }
        _ if is_throttling(code) => "the API will be asked again".into(),
        "OptInRequired" | "InvalidRegion" => "the account has not enabled this region".into(),
        _ => "this is an error of the cloud's API".into(),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn errors_of_all_apis_are_read() {
        for (body, code, message) in [
            (
                "<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>Request limit exceeded.</Message></Error></Errors>\
                 <RequestID>x</RequestID></Response>",
                "RequestLimitExceeded",
                "Request limit exceeded.",
            ),
            (
                "<ErrorResponse xmlns=\"http://elasticloadbalancing.amazonaws.com/doc/2015-12-01/\"><Error><Type>Sender</Type>\
                 <Code>LoadBalancerNotFound</Code><Message>m</Message></Error></ErrorResponse>",
                "LoadBalancerNotFound",
                "m",
            ),
            (
                r#"{"__type":"com.amazon.coral#ThrottlingException","Message":"Rate exceeded"}"#,
                "ThrottlingException",
                "Rate exceeded",
            ),
            ("<html>", "", ""),
            ("", "", ""),
        ] {
            let expected = (code.to_owned(), message.to_owned());
            assert_eq!(parse_error(body.as_bytes()), expected, "{body}");
        }
        for body in mutations(br#"{"__type":"a#b","message":"c"}"#, 5000) {
            let _ = parse_error(&body);
        }
    }
}
