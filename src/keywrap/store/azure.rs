//! A container of Azure Blob Storage.
//!
//! ```text
//! storage://azure?account=ACCOUNT&container=CONTAINER&name=NAME[&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! If the storage account is not in the public cloud, the endpoint names its cloud: `https://ACCOUNT.blob.core.usgovcloudapi.net`.
//!
//! API: Blob service REST API, `Get Blob`, and `Put Blob` with the condition `If-None-Match: *`, version 2021-12-02.

use std::time::SystemTime;

use cloud_api::aws::parse_error;

use super::super::azure_credentials::{
    AzureTokens, CHINA_LOGIN, GOVERNMENT_LOGIN, PUBLIC_LOGIN, is_name,
};
use super::super::error::{Error, said};
use super::super::https::{Fields, KmsResponse, KmsServer};
use super::super::patience::patiently;
use super::super::uri::Query;
use super::kind::{FileStore, StoreKind};

/// This store's entry in the table of all stores.
pub const STORE: StoreKind = StoreKind {
    name: "azure",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str =
    "account=ACCOUNT&container=CONTAINER&name=NAME[&endpoint=https://HOST[:PORT]][&caFile=FILE]";
/// The domains of the accounts, and the endpoint of tokens in each cloud. Tokens are sent only to these domains.
const DOMAINS: [(&str, &str); 3] = [
    ("blob.core.windows.net", PUBLIC_LOGIN),
    ("blob.core.usgovcloudapi.net", GOVERNMENT_LOGIN),
    ("blob.core.chinacloudapi.cn", CHINA_LOGIN),
];
/// The service that accepts the token; its name is the same in each cloud.
const RESOURCE: &str = "https://storage.azure.com";
const VERSION: &str = "2021-12-02";

struct Blob {
    server: KmsServer,
    /// `/CONTAINER/NAME`; an emulator has the account before it.
    path: String,
    callers: AzureTokens,
}

fn open(mut query: Query) -> Result<Box<dyn FileStore>, Error> {
    let account = query.need("account")?;
    let container = query.need("container")?;
    let name = query.need_path("name")?;
    let endpoint = query.take("endpoint");
    let ca = query.take("caFile");
    query.finish(PARAMETERS)?;
    for (parameter, value, is_right) in [
        (
            "account",
            &account,
            is_name(&account, 24) && !account.contains('-'),
        ),
        ("container", &container, is_name(&container, 63)),
    ] {
        if !is_right {
            return Err(Error::Uri(format!(
                "{parameter}={value} is not the name of one"
            )));
        }
    }
    let endpoint = endpoint.unwrap_or_else(|| format!("https://{account}.{}", DOMAINS[0].0));
    let server = KmsServer::new(&endpoint, ca.as_deref())?;
    let is_own = |domain: &str| {
        let name = server.name().to_ascii_lowercase();
        name == format!("{account}.{domain}").to_ascii_lowercase()
    };
    let found = DOMAINS
        .iter()
        .find(|(domain, _)| is_own(domain))
        .or(server.is_loopback().then_some(&DOMAINS[0]));
    let &(_, login) = found.ok_or_else(|| {
        let known = DOMAINS.map(|(domain, _)| domain).join(", ");
        Error::Uri(format!(
            "the endpoint {endpoint:?} is not that of the storage account, and the program sends its token only there: expected https://{account}.DOMAIN, DOMAIN being one of {known}"
        ))
    })?;
    let emulated = if server.is_loopback() {
        format!("/{account}")
    } else {
        String::new()
    };
    Ok(Box::new(Blob {
        path: format!("{emulated}/{container}/{name}"),
        server,
        callers: AzureTokens {
            login,
            resource: RESOURCE.into(),
            ca,
        },
    }))
}

impl FileStore for Blob {
    fn read(&self) -> Result<KmsResponse, Error> {
        self.call("GET", 200, "read", &[], &[])
    }

    fn create(&self, content: &[u8]) -> Result<(), Error> {
        let fields = [
            ("content-type", "application/json"),
            ("if-none-match", "*"),
            ("x-ms-blob-type", "BlockBlob"),
        ];
        self.call("PUT", 201, "add/action", &fields, content)
            .map(|_| ())
    }
}

impl Blob {
    /// Returns the successful answer to a request: the one with this status. Errors name the data action that the request needs.
    fn call(
        &self,
        method: &str,
        success: u16,
        action: &str,
        fields: Fields<'_>,
        body: &[u8],
    ) -> Result<KmsResponse, Error> {
        let caller = self.callers.caller()?;
        patiently(|| {
            let date = httpdate::fmt_http_date(SystemTime::now());
            let common = [
                ("authorization", &**caller.authorization),
                ("x-ms-date", &date),
                ("x-ms-version", VERSION),
            ];
            let fields = [&common, fields].concat();
            let answer = self.server.send(method, &self.path, &fields, body)?;
            match answer.status {
                status if status == success => Ok(answer),
                status => {
                    // the service begins its XML with a byte order mark
                    let xml = answer.body.strip_prefix(b"\xef\xbb\xbf");
                    let (code, message) = parse_error(xml.unwrap_or(&answer.body));
                    let said = said(&format!("{code}: {message}"));
                    let text = format!(
                        "{}: {method} {}: status {status}{said}",
                        self.server.host(),
                        self.path
                    );
                    Err(refusal(status, &code, text, action, caller.origin))
                }
            }
        })
    }
}

/// Returns the error for a status and a code ("Blob service error codes"), with what to do.
fn refusal(status: u16, code: &str, text: String, action: &str, origin: &str) -> Error {
    let refused = |next: String| Error::Refused(format!("{text}; {next}"));
    match (status, code) {
        (409 | 412, "BlobAlreadyExists" | "ConditionNotMet" | "UnauthorizedBlobOverwrite") => {
            Error::Exists
        }
        (408 | 429 | 500.., _) => Error::Busy(text),
        (401, _) => Error::Credentials(format!("{text}; the token of {origin} is not accepted")),
        (403, "AuthorizationPermissionMismatch" | "InsufficientAccountPermissions") => {
            refused(format!(
                "{origin} needs the data action Microsoft.Storage/storageAccounts/blobServices/containers/blobs/{action} (docs/kms.md)"
            ))
        }
        (403, "AuthorizationFailure") => {
            refused("the firewall of the account may refuse this machine".into())
        }
        (404, "ContainerNotFound") => refused("make the container, or correct its name".into()),
        (404, "BlobNotFound") => {
            refused("there is no such file: `firstlight wrap --out` writes it".into())
        }
        _ => Error::Refused(text),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::error::check_refusals;
    use super::*;

    #[test]
    fn each_code_says_what_to_do_and_whether_to_wait() {
        let of = |status, code: &str| refusal(status, code, "text".into(), "add/action", "ORIGIN");
        let passing = [(503, "ServerBusy"), (500, "OperationTimedOut"), (429, "")];
        let lasting = [
            (409, "BlobAlreadyExists", "a file with this name exists"),
            (401, "InvalidAuthenticationInfo", "token of ORIGIN"),
            (
                403,
                "AuthorizationPermissionMismatch",
                "ORIGIN needs the data action Microsoft.Storage/storageAccounts/blobServices/containers/blobs/add/action",
            ),
            (403, "AuthorizationFailure", "firewall"),
            (404, "ContainerNotFound", "make the container"),
            (404, "BlobNotFound", "firstlight wrap --out"),
            (409, "ContainerBeingDeleted", "text"),
        ];
        check_refusals(of, &passing, &lasting);
    }
}
