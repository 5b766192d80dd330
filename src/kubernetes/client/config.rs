//! The address of the API server, its authentication, and the client's credentials: from a
//! kubeconfig (Kubernetes' `v1 Config`) or from the files of a pod.
//!
//! Features of a kubeconfig other than certificate and token are refused and not ignored: programs
//! to run, passwords, proxies, and servers without authentication.

use std::env;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use serde::Deserialize;
use ureq::http::Uri;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts};
use zeroize::Zeroizing;

use super::super::yaml;
use super::Error;
use base::text::quoted;

/// The directory with a pod's service account token, the cluster's CA and its namespace.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The maximum size of a kubeconfig, a bundle of CAs or a token.
const MAX_FILE: usize = 1 << 20;
/// How often a token is read again. The kubelet replaces it after four fifths of its validity,
/// which is at least ten minutes, and the old one stays valid meanwhile.
const TOKEN_AGE: Duration = Duration::from_secs(60);

/// How to reach a cluster.
pub struct Config {
    pub(super) server: String,
    pub(super) roots: Vec<Certificate<'static>>,
    pub(super) credentials: Credentials,
}

/// The credentials of the client.
pub enum Credentials {
    /// No authentication.
    Anonymous,
    /// A TLS client certificate.
    Certificate(ClientCert),
    /// A bearer token.
    Token(Zeroizing<String>),
    /// The file of a bearer token, which is replaced before the token expires.
    TokenFile(PathBuf),
}

impl Config {
    /// Reads the current context of a kubeconfig. Its file names are relative to its directory.
    pub fn from_kubeconfig_file(path: &Path) -> Result<Config, Error> {
        let content = read(path)?;
        let text =
            str::from_utf8(&content).map_err(|_| config_error(path.display(), "is not UTF-8"))?;
        Config::from_kubeconfig(
            text,
            &path.display().to_string(),
            path.parent().unwrap_or(Path::new(".")),
        )
    }

    /// Parses a kubeconfig. `name` is its name in errors, and relative paths are relative to
    /// `directory`.
    pub fn from_kubeconfig(text: &str, name: &str, directory: &Path) -> Result<Config, Error> {
        let value = yaml::document(text).map_err(|error| Error::from((name.to_owned(), error)))?;
        let kubeconfig: Kubeconfig =
            serde_json::from_value(value).map_err(|error| config_error(name, error))?;
        kubeconfig.current(name, directory)
    }

    /// Returns a pod's configuration: the address from the environment, and the files of
    /// [`SERVICE_ACCOUNT`].
    pub fn in_cluster() -> Result<Config, Error> {
        let variable = |name: &str| {
            env::var(name)
                .map_err(|_| config_error(name, "is not set: this is not a pod of a cluster"))
        };
        let (host, port) = (
            variable("KUBERNETES_SERVICE_HOST")?,
            variable("KUBERNETES_SERVICE_PORT")?,
        );
        // An IPv6 address needs brackets in a URL.
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host
        };
        Config::of_service_account(
            &format!("https://{host}:{port}"),
            Path::new(SERVICE_ACCOUNT),
        )
    }

    /// Creates a configuration from a server and a directory with `ca.crt` and `token`.
    pub fn of_service_account(server: &str, directory: &Path) -> Result<Config, Error> {
        let (ca, token) = (directory.join("ca.crt"), directory.join("token"));
        let roots = certificates(&ca.display().to_string(), &read(&ca)?)?;
        // A missing token is reported now, not at the first call.
        read_token(&token)?;
        Config::new(
            server,
            "the environment",
            roots,
            Credentials::TokenFile(token),
        )
    }

    fn new(
        server: &str,
        name: &str,
        roots: Vec<CertificateDer<'static>>,
        credentials: Credentials,
    ) -> Result<Config, Error> {
        let uri: Uri = server.parse().map_err(|error| {
            config_error(name, format!("server {}: {error}", quoted(server, 200)))
        })?;
        if uri.scheme_str() != Some("https")
            || uri.host().is_none_or(str::is_empty)
            || uri.query().is_some()
        {
            return Err(config_error(
                name,
                format!("server {}: expected https://HOST:PORT", quoted(server, 200)),
            ));
        }
        let roots = roots
            .iter()
            .map(|root| Certificate::from_der(root).to_owned())
            .collect();
        Ok(Config {
            server: server.trim_end_matches('/').to_owned(),
            roots,
            credentials,
        })
    }

    /// Returns the configuration of the same cluster at another address: `https://HOST:PORT`.
    pub fn at(self, server: &str) -> Result<Config, Error> {
        Ok(Config {
            roots: self.roots,
            ..Config::new(server, "the address", Vec::new(), self.credentials)?
        })
    }

    /// Returns the server as `https://HOST:PORT`.
    pub fn server(&self) -> &str {
        &self.server
    }

    pub(super) fn root_certs(&self) -> RootCerts {
        RootCerts::from(self.roots.clone())
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// A token, which is read again after some time.
pub(super) struct TokenFile {
    /// The file; `None` for a constant token.
    path: Option<PathBuf>,
    read: Option<(Zeroizing<String>, Instant)>,
}

impl TokenFile {
    pub fn new(path: PathBuf) -> TokenFile {
        TokenFile {
            path: Some(path),
            read: None,
        }
    }

    /// Creates a constant token.
    pub fn fixed(token: Zeroizing<String>) -> TokenFile {
        TokenFile {
            path: None,
            read: Some((token, Instant::now())),
        }
    }

    /// Returns the present token. If a new one cannot be read, the old one is used.
    pub fn token(&mut self) -> Result<Zeroizing<String>, Error> {
        match &self.read {
            Some((token, at)) if self.path.is_none() || at.elapsed() < TOKEN_AGE => {
                return Ok(token.clone());
            }
            _ => {}
        }
        match (self.read_again(), self.read.take()) {
            (Ok(token), _) => {
                self.read = Some((token.clone(), Instant::now()));
                Ok(token)
            }
            (Err(error), Some((token, _))) => {
                log::warn!("{error}: the old token stays in use");
                self.read = Some((token.clone(), Instant::now()));
                Ok(token)
            }
            (Err(error), None) => Err(error),
        }
    }

    /// Reads the file again after the server refused `token`. Returns whether it contains another
    /// one.
    pub fn refused(&mut self, token: &str) -> bool {
        let fresh = self
            .read_again()
            .ok()
            .filter(|fresh| fresh.as_str() != token);
        let found = fresh.is_some();
        if let Some(fresh) = fresh {
            self.read = Some((fresh, Instant::now()));
        }
        found
    }

    fn read_again(&self) -> Result<Zeroizing<String>, Error> {
        self.path.as_deref().map_or_else(
            || Err(config_error("the token", "is in no file")),
            read_token,
        )
    }
}

fn read_token(path: &Path) -> Result<Zeroizing<String>, Error> {
    let content = read(path)?;
    let token = str::from_utf8(&content).unwrap_or_default().trim();
    // The characters of a header value (RFC 6750 §2.1, slightly extended).
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(config_error(path.display(), "contains no token"));
    }
    Ok(Zeroizing::new(token.to_owned()))
}

fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, Error> {
    let io_error = |error| Error::File(path.into(), error);
    let file = File::open(path).map_err(io_error)?;
    // The capacity is sufficient for the whole file, because a growing vector would leave copies
    // behind.
    let len = file
        .metadata()
        .map_err(io_error)?
        .len()
        .min(MAX_FILE as u64) as usize;
    let mut content = Zeroizing::new(Vec::with_capacity(len + 1));
    file.take(MAX_FILE as u64 + 1)
        .read_to_end(&mut content)
        .map_err(io_error)?;
    match content.len() {
        0..=MAX_FILE => Ok(content),
        _ => Err(config_error(
            path.display(),
            format!("is larger than {MAX_FILE} bytes"),
        )),
    }
}

fn config_error(of: impl fmt::Display, problem: impl fmt::Display) -> Error {
    Error::Config(of.to_string(), problem.to_string())
}

fn certificates(name: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(config_error(name, "it contains no certificate")),
        Err(error) => Err(config_error(
            name,
            format!("expected certificates in PEM: {error}"),
        )),
    }
}

/// Parses the certificate and its key, and checks that they match.
fn client_certificate(name: &str, certificate: &[u8], key: &[u8]) -> Result<Credentials, Error> {
    let chain = certificates(&format!("{name}: the client certificate"), certificate)?;
    let problem =
        |what: &str, error: &dyn fmt::Display| config_error(name, format!("{what}: {error}"));
    let own = PrivateKey::from_pem(key).map_err(|error| problem("the client key", &error))?;
    let key =
        PrivateKeyDer::from_pem_slice(key).map_err(|error| problem("the client key", &error))?;
    let certs: Vec<_> = chain
        .iter()
        .map(|certificate| Certificate::from_der(certificate).to_owned())
        .collect();
    // The HTTP library panics if the pair does not match.
    CertifiedKey::from_der(chain, key, &tls::provider())
        .map_err(|error| problem("the client certificate and its key", &error))?;
    Ok(Credentials::Certificate(ClientCert::new_with_certs(
        &certs, own,
    )))
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    #[serde(default)]
    current_context: String,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
    proxy_url: Option<String>,
    tls_server_name: Option<String>,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Deserialize)]
struct User {
    #[serde(rename = "client-certificate")]
    client_certificate: Option<PathBuf>,
    #[serde(rename = "client-certificate-data")]
    client_certificate_data: Option<String>,
    #[serde(rename = "client-key")]
    client_key: Option<PathBuf>,
    #[serde(rename = "client-key-data")]
    client_key_data: Option<Zeroizing<String>>,
    token: Option<Zeroizing<String>>,
    // In camel case, as an exception among its neighbours.
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    username: Option<serde::de::IgnoredAny>,
    exec: Option<serde::de::IgnoredAny>,
    #[serde(rename = "auth-provider")]
    auth_provider: Option<serde::de::IgnoredAny>,
}

impl Kubeconfig {
    fn current(self, name: &str, directory: &Path) -> Result<Config, Error> {
        let wanted = &self.current_context;
        let missing = |what: &str, of: &str| {
            config_error(name, format!("there is no {what} {}", quoted(of, 80)))
        };
        if wanted.is_empty() {
            return Err(config_error(name, "current-context is missing"));
        }
        let context = self
            .contexts
            .into_iter()
            .find(|context| context.name == *wanted);
        let context = context.ok_or_else(|| missing("context", wanted))?.context;
        let cluster = self
            .clusters
            .into_iter()
            .find(|cluster| cluster.name == context.cluster);
        let cluster = cluster
            .ok_or_else(|| missing("cluster", &context.cluster))?
            .cluster;
        let user = self
            .users
            .into_iter()
            .find(|user| user.name == context.user);
        let user = user.ok_or_else(|| missing("user", &context.user))?.user;
        Config::new(
            &cluster.server,
            name,
            cluster.roots(name, directory)?,
            user.credentials(name, directory)?,
        )
    }
}

impl Cluster {
    fn roots(&self, name: &str, directory: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
        let unsupported = [
            (self.insecure_skip_tls_verify, "insecure-skip-tls-verify"),
            (self.proxy_url.is_some(), "proxy-url"),
            (self.tls_server_name.is_some(), "tls-server-name"),
        ];
        refuse(name, &unsupported)?;
        let data = self.certificate_authority_data.as_deref();
        let pem = either(
            name,
            directory,
            "certificate-authority",
            data,
            self.certificate_authority.as_deref(),
        )?;
        let pem = pem.ok_or_else(|| config_error(name, "certificate-authority-data is missing"))?;
        certificates(&format!("{name}: certificate-authority"), &pem)
    }
}

impl User {
    fn credentials(self, name: &str, directory: &Path) -> Result<Credentials, Error> {
        let unsupported = [
            (self.exec.is_some(), "exec"),
            (self.auth_provider.is_some(), "auth-provider"),
            (self.username.is_some(), "username"),
        ];
        refuse(name, &unsupported)?;
        let data = self.client_certificate_data.as_deref();
        let certificate = either(
            name,
            directory,
            "client-certificate",
            data,
            self.client_certificate.as_deref(),
        )?;
        let data = self.client_key_data.as_ref().map(|data| data.as_str());
        let key = either(
            name,
            directory,
            "client-key",
            data,
            self.client_key.as_deref(),
        )?;
        match (certificate, key, self.token_file, self.token) {
            (Some(certificate), Some(key), _, _) => client_certificate(name, &certificate, &key),
            (Some(_), None, _, _) => Err(config_error(
                name,
                "there is a client certificate without its key",
            )),
            // The file has precedence, as in kubectl.
            (None, _, Some(path), _) => Ok(Credentials::TokenFile(directory.join(path))),
            (None, _, None, Some(token)) if token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Ok(Credentials::Token(token))
            }
            (None, _, None, Some(_)) => {
                Err(config_error(name, "the token contains invalid characters"))
            }
            (None, _, None, None) => Ok(Credentials::Anonymous),
        }
    }
}

fn refuse(name: &str, unsupported: &[(bool, &str)]) -> Result<(), Error> {
    match unsupported.iter().find(|(there, _)| *there) {
        Some((_, field)) => Err(config_error(name, format!("{field} is not supported"))),
        None => Ok(()),
    }
}

/// Returns the data of a field in the kubeconfig or in the file that it names. The former has
/// precedence, as in kubectl.
fn either(
    name: &str,
    directory: &Path,
    field: &str,
    data: Option<&str>,
    path: Option<&Path>,
) -> Result<Option<Zeroizing<Vec<u8>>>, Error> {
    match (data.filter(|data| !data.is_empty()), path) {
        (Some(data), _) => {
            let bytes = BASE64_STANDARD.decode(data);
            let bytes = bytes.map_err(|error| {
                config_error(name, format!("{field}-data: expected base64: {error}"))
            })?;
            Ok(Some(Zeroizing::new(bytes)))
        }
        (None, Some(path)) => read(&directory.join(path)).map(Some),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;
    use support::mutation::mutations;

    fn pair() -> (String, String) {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(vec!["kubernetes".into()]).unwrap();
        (cert.pem(), signing_key.serialize_pem())
    }

    /// Builds a kubeconfig as kubeadm does.
    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nclusters:\n- cluster:\n{cluster}  name: kubernetes\ncontexts:\n- context:\n    cluster: \
             kubernetes\n    user: kubernetes-admin\n  name: kubernetes-admin@kubernetes\ncurrent-context: \
             kubernetes-admin@kubernetes\nkind: Config\nusers:\n- name: kubernetes-admin\n  user:\n{user}"
        )
    }

    fn cluster(ca: &str) -> String {
        let ca = BASE64_STANDARD.encode(ca);
        format!("    certificate-authority-data: {ca}\n    server: https://10.0.0.1:6443\n")
    }

    fn with_certificate(certificate: &str, key: &str) -> String {
        let (certificate, key) = (
            BASE64_STANDARD.encode(certificate),
            BASE64_STANDARD.encode(key),
        );
        format!("    client-certificate-data: {certificate}\n    client-key-data: {key}\n")
    }

    fn parsed(text: &str) -> Result<Config, String> {
        Config::from_kubeconfig(text, "admin.conf", Path::new("/nowhere"))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_kubeconfig_of_kubeadm_is_understood() {
        let (certificate, key) = pair();
        let config = parsed(&kubeconfig(
            &cluster(&certificate),
            &with_certificate(&certificate, &key),
        ))
        .unwrap();
        assert_eq!(config.server(), "https://10.0.0.1:6443");
        assert!(
            matches!(config.credentials, Credentials::Certificate(_)) && config.roots.len() == 1
        );
        assert_eq!(
            config.at("https://127.0.0.1:1").unwrap().server(),
            "https://127.0.0.1:1"
        );
    }

    #[test]
    fn tokens_and_files_are_understood() {
        let (certificate, key) = pair();
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [
            ("ca.crt", &certificate),
            ("c.crt", &certificate),
            ("c.key", &key),
        ] {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let cluster = "    certificate-authority: ca.crt\n    server: https://a\n";
        let parsed = |user: &str| {
            let config =
                Config::from_kubeconfig(&kubeconfig(cluster, user), "admin.conf", dir.path());
            config.unwrap().credentials
        };
        let files = "    client-certificate: c.crt\n    client-key: c.key\n";
        assert!(matches!(parsed(files), Credentials::Certificate(_)));
        assert!(
            matches!(parsed("    token: abc\n"), Credentials::Token(token) if token.as_str() == "abc")
        );
        let file = dir.path().join("t");
        assert!(
            matches!(parsed("    tokenFile: t\n    token: abc\n"), Credentials::TokenFile(path) if path == file)
        );
        assert!(matches!(parsed("    {}\n"), Credentials::Anonymous));
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        let (certificate, key) = pair();
        let good = with_certificate(&certificate, &key);
        let refused = |cluster: &str, user: &str| parsed(&kubeconfig(cluster, user)).unwrap_err();
        let ca = cluster(&certificate);
        for (extra, field) in [
            (
                "    insecure-skip-tls-verify: true\n",
                "insecure-skip-tls-verify",
            ),
            ("    proxy-url: http://a\n", "proxy-url"),
            ("    tls-server-name: a\n", "tls-server-name"),
        ] {
            assert_eq!(
                refused(&format!("{ca}{extra}"), &good),
                format!("admin.conf: {field} is not supported")
            );
        }
        assert_eq!(
            refused(&ca, "    exec: {command: sh}\n"),
            "admin.conf: exec is not supported"
        );
        assert_eq!(
            refused(&ca, "    username: a\n"),
            "admin.conf: username is not supported"
        );
        let plain = ca.replace("https:", "http:");
        assert!(refused(&plain, &good).ends_with("expected https://HOST:PORT"));
        let missing = refused("    server: https://a\n", &good);
        assert_eq!(missing, "admin.conf: certificate-authority-data is missing");
        let other_key = pair().1;
        let refusal = refused(&ca, &with_certificate(&certificate, &other_key));
        assert!(
            refusal.starts_with("admin.conf: the client certificate and its key: "),
            "{refusal}"
        );
        assert!(
            refused(&ca, "    client-key: k\n    client-certificate: c\n").contains("/nowhere/c")
        );
        assert!(
            parsed("current-context: a")
                .unwrap_err()
                .contains("there is no context \"a\"")
        );
        assert!(
            parsed("a: 1")
                .unwrap_err()
                .contains("current-context is missing")
        );
        assert!(parsed("1").is_err());
    }

    #[test]
    fn no_mutation_of_a_kubeconfig_makes_the_parser_panic() {
        let (certificate, key) = pair();
        let text = kubeconfig(
            &cluster(&certificate),
            &with_certificate(&certificate, &key),
        );
        for bytes in mutations(text.as_bytes(), 3_000) {
            let _ = parsed(&String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_refused_token_is_read_again_and_a_file_that_is_gone_leaves_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "first\n").unwrap();
        let mut file = TokenFile::new(path.clone());
        assert_eq!(file.token().unwrap().as_str(), "first");
        assert!(!file.refused("first"));
        std::fs::write(&path, "second").unwrap();
        // The file is not read for every call.
        assert_eq!(file.token().unwrap().as_str(), "first");
        assert!(file.refused("first"));
        assert_eq!(file.token().unwrap().as_str(), "second");
        std::fs::remove_file(&path).unwrap();
        file.read = file
            .read
            .map(|(token, at)| (token, at.checked_sub(TOKEN_AGE).unwrap()));
        assert_eq!(file.token().unwrap().as_str(), "second");
        std::fs::write(&path, "two words").unwrap();
        assert!(
            TokenFile::new(path)
                .token()
                .unwrap_err()
                .to_string()
                .ends_with("contains no token")
        );
    }
}
