//! Tokens for services of Azure. They are those of an application, which the variables `AZURE_TENANT_ID`, `AZURE_CLIENT_ID` and
//! `AZURE_CLIENT_SECRET` name (or `AZURE_CLIENT_SECRET_FILE`, the file with the secret), or those of the machine's managed
//! identity. If no secret is set and the machine has several identities, `AZURE_CLIENT_ID` chooses one.
//!
//! API: Microsoft identity platform, client credentials flow.

use std::fs::File;
use std::io::Read;

use cloud_api::azure::AzureClient;
use zeroize::Zeroizing;

use super::error::Error;
use super::https::KmsServer;
use super::oauth;
use super::variable::{is_word, variable};

/// The endpoint of tokens in the public cloud.
pub const PUBLIC_LOGIN: &str = "https://login.microsoftonline.com";
/// The endpoint of tokens in Azure Government (United States).
pub const GOVERNMENT_LOGIN: &str = "https://login.microsoftonline.us";
/// The endpoint of tokens in Azure China.
pub const CHINA_LOGIN: &str = "https://login.chinacloudapi.cn";
/// The variables that Azure's own programs read.
const TENANT: &str = "AZURE_TENANT_ID";
const CLIENT_ID: &str = "AZURE_CLIENT_ID";
const CLIENT_SECRET: &str = "AZURE_CLIENT_SECRET";
const CLIENT_SECRET_FILE: &str = "AZURE_CLIENT_SECRET_FILE";
const AUTHORITY: &str = "AZURE_AUTHORITY_HOST";
const IMDS: &str = "AZURE_POD_IDENTITY_AUTHORITY_HOST";
/// Maximum bytes of a secret.
const MAX_SECRET: u64 = 4 << 10;

/// Gets tokens.
pub struct AzureTokens {
    /// The endpoint of the cloud, if no variable names one.
    pub login: &'static str,
    /// The service that accepts the token: `https://DOMAIN`.
    pub resource: String,
    /// The file with the certificates of the authorities that may certify the endpoint.
    pub ca: Option<String>,
}

/// A token and its owner.
pub struct AzureToken {
    /// The field `Authorization`.
    pub authorization: Zeroizing<String>,
    /// The owner of the token, for errors.
    pub origin: &'static str,
}

impl AzureTokens {
    /// Gets a token.
    pub fn caller(&self) -> Result<AzureToken, Error> {
        let (tenant, client) = (variable(TENANT)?, variable(CLIENT_ID)?);
        let (token, origin) = match (tenant, client, client_secret()?) {
            (Some(tenant), Some(client), Some(secret)) => {
                let token = self.application_token(&tenant, &client, &secret)?;
                (token, "the application of AZURE_CLIENT_ID")
            }
            (None, client, None) => (
                identity_token(client, &self.resource)?,
                "the managed identity",
            ),
            _ => {
                return Err(Error::Credentials(format!(
                    "only some of {TENANT}, {CLIENT_ID} and {CLIENT_SECRET} (or {CLIENT_SECRET_FILE}) are set: set all three for an application, or none of them, or only {CLIENT_ID}, for a managed identity"
                )));
            }
        };
        Ok(AzureToken {
            authorization: Zeroizing::new(format!("Bearer {}", *token)),
            origin,
        })
    }

    /// Gets a token of an application (client credentials flow).
    fn application_token(
        &self,
        tenant: &str,
        client: &str,
        secret: &str,
    ) -> Result<Zeroizing<String>, Error> {
        // the tenant becomes a part of a path; it is an ID or a domain
        if !tenant.split('.').all(|label| is_name(label, 64)) {
            return Err(Error::Credentials(format!(
                "{TENANT} is not the ID or the domain of a tenant"
            )));
        }
        let authority = variable(AUTHORITY)?;
        let authority = authority.as_ref().map_or(self.login, |url| url);
        let server = KmsServer::new(authority, self.ca.as_deref())
            .map_err(|error| Error::Credentials(format!("{AUTHORITY}: {error}")))?;
        let form = [
            ("grant_type", "client_credentials"),
            ("client_id", client),
            ("client_secret", secret),
            ("scope", &*format!("{}/.default", self.resource)),
        ];
        let path = format!("/{tenant}/oauth2/v2.0/token");
        oauth::token(&server, &path, &form, &format!("{CLIENT_ID} {client}"))
    }
}

/// Gets a token of the machine's managed identity, the one with this client ID, or the only one.
fn identity_token(
    client: Option<Zeroizing<String>>,
    resource: &str,
) -> Result<Zeroizing<String>, Error> {
    let service = variable(IMDS)?.unwrap_or_default();
    let mut place = service.to_string();
    if let Some(client) = client {
        place += &format!(",identity={}", *client);
    }
    let place = Some(&*place).filter(|place| !place.is_empty());
    let imds = AzureClient::new(place)
        .map_err(|error| Error::Credentials(format!("{IMDS} or {CLIENT_ID}: {error}")))?;
    let token = imds.token_for(resource).map_err(|error| {
        let next = match error {
            base::machines::Error::Status { status: 400, .. } => {
                "; assign an identity to the machine; if it has several, name one by AZURE_CLIENT_ID"
            }
            _ => "",
        };
        // if the machine has just started or just got its identity, the metadata service may give a token only later
        Error::Away(format!(
            "there are no credentials: {CLIENT_SECRET} and {CLIENT_SECRET_FILE} are not set, and the managed identity gives none: {error}{next}"
        ))
    })?;
    Ok(Zeroizing::new(token.value().to_owned()))
}

/// Returns the secret of the application, from its variable or its file.
fn client_secret() -> Result<Option<Zeroizing<String>>, Error> {
    if let Some(secret) = variable(CLIENT_SECRET)? {
        return Ok(Some(secret));
    }
    let Some(path) = variable(CLIENT_SECRET_FILE)? else {
        return Ok(None);
    };
    let fault = |why: String| {
        Error::Credentials(format!("the file {} of {CLIENT_SECRET_FILE} {why}", *path))
    };
    let mut text = Zeroizing::new(String::with_capacity(MAX_SECRET as usize));
    File::open(&**path)
        .and_then(|file| file.take(MAX_SECRET).read_to_string(&mut text))
        .map_err(|error| fault(format!("cannot be read: {error}")))?;
    if is_word(text.trim()) {
        Ok(Some(Zeroizing::new(text.trim().to_owned())))
    } else {
        Err(fault("has no secret: expected one word".into()))
    }
}

/// Returns whether text is letters, digits and hyphens, as names and versions of keys and the IDs of tenants are.
pub fn is_name(text: &str, max: usize) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=max).contains(&text.len()) && text.bytes().all(is_allowed)
}
