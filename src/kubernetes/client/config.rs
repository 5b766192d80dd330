//! The address of the API server, its authentication, and the client's credentials: from a
//! kubeconfig (Kubernetes' `v1 Config`) or from the files of a pod.
//!
//! A kubeconfig can have other features than certificate and token: programs to run, passwords, proxies, servers without
//! authentication, and acting as another user. Such features are refused, not ignored. Entries that the current context does not
//! use are not checked.

use std::collections::{BTreeSet, HashMap};
use std::env;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use http::{ClientCertificate, Roots};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Map, Value};
use zeroize::Zeroizing;

use super::super::kubelet_certificate::NO_KEY;
use super::super::yaml;
use super::Error;
use base::text::quoted;

/// The directory with a pod's service account token, the cluster's CA and its namespace.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The maximum size of a kubeconfig, a bundle of CAs or a token.
const MAX_FILE: usize = 1 << 20;
/// How often a token is read again. A token is valid for at least ten minutes. The kubelet replaces it after four fifths of that
/// time, so the old one is still valid then.
const TOKEN_AGE: Duration = Duration::from_secs(60);

/// How to reach a cluster.
pub struct ApiAccess {
    pub(super) server: String,
    /// The URL of the proxy.
    pub(super) proxy: Option<String>,
    pub(super) roots: Roots,
    pub(super) credentials: Credentials,
}

/// The credentials of the client: a certificate, a token or both.
#[derive(Default)]
pub(super) struct Credentials {
    /// A TLS client certificate.
    pub certificate: Option<ClientCertificate>,
    /// A bearer token.
    pub token: Option<TokenFile>,
}

impl ApiAccess {
    /// Reads the current context of a kubeconfig. Its file names are relative to its directory.
    pub fn from_kubeconfig_file(path: &Path) -> Result<ApiAccess, Error> {
        ApiAccess::of_files(&[path.into()])
    }

    /// Reads the current context of a person's kubeconfigs, as kubectl does for `$KUBECONFIG`. If several entries have the same name,
    /// the first one counts. If there are several files, missing ones are skipped. The environment may name a proxy.
    pub fn from_kubeconfig_files(paths: &[PathBuf]) -> Result<ApiAccess, Error> {
        let mut config = ApiAccess::of_files(paths)?;
        let proxy = http::proxy::of_environment(&config.server);
        config.proxy = proxy.map_err(|why| config_error("the environment", why))?;
        Ok(config)
    }

    fn of_files(paths: &[PathBuf]) -> Result<ApiAccess, Error> {
        let mut all: Option<Kubeconfig> = None;
        let (mut names, mut missing) = (Vec::new(), None);
        for path in paths {
            let content = match read(path) {
                Err(Error::File(_, error)) if error.kind() == ErrorKind::NotFound => {
                    missing = missing.or(Some(Error::File(path.into(), error)));
                    continue;
                }
                content => content?,
            };
            let name = path.display().to_string();
            let text = str::from_utf8(&content).map_err(|_| config_error(&name, "is not UTF-8"))?;
            let directory = path.parent().unwrap_or(Path::new(".")).into();
            names.push(name.clone());
            let further = Kubeconfig::parse(text, Origin { name, directory })?;
            match &mut all {
                None => all = Some(further),
                Some(all) => all.add(further),
            }
        }
        match (all, missing) {
            (Some(all), _) => all.current(&names.join(", ")),
            (None, Some(missing)) => Err(missing),
            (None, None) => Err(config_error("the kubeconfig", "no file is named")),
        }
    }

    /// Parses a kubeconfig. `name` is its name in errors, and relative paths are relative to `directory`.
    pub fn from_kubeconfig(text: &str, name: &str, directory: &Path) -> Result<ApiAccess, Error> {
        let origin = Origin {
            name: name.into(),
            directory: directory.into(),
        };
        Kubeconfig::parse(text, origin)?.current(name)
    }

    /// Returns a pod's configuration: the address from the environment, and the files of [`SERVICE_ACCOUNT`].
    pub fn in_cluster() -> Result<ApiAccess, Error> {
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
        ApiAccess::of_service_account(
            &format!("https://{host}:{port}"),
            Path::new(SERVICE_ACCOUNT),
        )
    }

    /// Creates a configuration from the server's address and a directory with `ca.crt` and `token`.
    pub fn of_service_account(server: &str, directory: &Path) -> Result<ApiAccess, Error> {
        let (ca, token) = (directory.join("ca.crt"), directory.join("token"));
        let roots = certificates(&ca.display().to_string(), &read(&ca)?)?;
        // A missing token is reported now, not at the first call.
        read_token(&token)?;
        ApiAccess::new(
            server,
            "the environment",
            roots,
            Credentials {
                certificate: None,
                token: Some(TokenFile::new(token)),
            },
        )
    }

    fn new(
        server: &str,
        name: &str,
        roots: Vec<CertificateDer<'static>>,
        credentials: Credentials,
    ) -> Result<ApiAccess, Error> {
        if server.is_empty() {
            return Err(config_error(name, "the cluster has no server"));
        }
        http::check(server).map_err(|why| {
            let server = quoted(http::shown(server), 200);
            config_error(
                name,
                format!("server {server}: {why}: expected https://HOST:PORT"),
            )
        })?;
        Ok(ApiAccess {
            server: server.trim_end_matches('/').to_owned(),
            proxy: None,
            roots: roots.into(),
            credentials,
        })
    }

    /// Returns the configuration of the same cluster at another address: `https://HOST:PORT`.
    pub fn at(self, server: &str) -> Result<ApiAccess, Error> {
        Ok(ApiAccess {
            roots: self.roots,
            ..ApiAccess::new(server, "the address", Vec::new(), self.credentials)?
        })
    }

    /// Returns the server as `https://HOST:PORT`.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Returns the authorities that may certify the server.
    pub fn authorities(&self) -> &[CertificateDer<'static>] {
        self.roots.certificates()
    }

    /// Returns the client's own certificate, DER, if it has one.
    pub fn certificate(&self) -> Option<&[u8]> {
        Some(self.credentials.certificate.as_ref()?.der())
    }
}

impl fmt::Debug for ApiAccess {
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

    /// Returns the current token. If a new one cannot be read, returns the old one.
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
                log::warn!(
                    "cannot read the new token for the API server, so the old one stays in use: {error}"
                );
                self.read = Some((token.clone(), Instant::now()));
                Ok(token)
            }
            (Err(error), None) => Err(error),
        }
    }

    /// Reads the file again after the server refused `token`. Returns whether it contains another one.
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
    // The capacity is sufficient for the whole file, because a growing vector would leave copies of the token in freed memory.
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
        // the library's error shows a line of the file, and the file can be a private key by mistake
        Err(_) => Err(config_error(name, "expected certificates in PEM")),
    }
}

/// Parses the certificate and its key, and checks that they match.
fn client_certificate(
    name: &str,
    certificate: &[u8],
    key: &[u8],
) -> Result<ClientCertificate, Error> {
    let chain = certificates(&format!("{name}: the client certificate"), certificate)?;
    let problem =
        |what: &str, error: &dyn fmt::Display| config_error(name, format!("{what}: {error}"));
    PrivateKeyDer::from_pem_slice(key).map_err(|_| problem("the client key", &NO_KEY))?;
    ClientCertificate::new(chain, key)
        .map_err(|error| problem("the client certificate and its key", &error))
}

/// The parts of a kubeconfig that this client uses, from one file or from several. As in Go, a field that is null
/// or an empty text means the same as a missing one.
struct Kubeconfig {
    current_context: String,
    contexts: Vec<Named<Context>>,
    clusters: Vec<Named<Cluster>>,
    users: Vec<Named<User>>,
}

/// An entry of one of its lists.
struct Named<T> {
    name: String,
    entry: T,
    origin: Rc<Origin>,
}

/// The file of an entry.
struct Origin {
    /// Its name in errors.
    name: String,
    /// Relative paths are relative to this directory.
    directory: PathBuf,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: bool,
    proxy_url: Option<String>,
    tls_server_name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<Zeroizing<String>>,
    token: Option<Zeroizing<String>>,
    // This name is in camel case, unlike its neighbours.
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    username: Option<IgnoredAny>,
    exec: Option<IgnoredAny>,
    auth_provider: Option<IgnoredAny>,
    // Without these a request would be executed as another user than kubectl's.
    r#as: Option<IgnoredAny>,
    as_uid: Option<IgnoredAny>,
    as_groups: Vec<IgnoredAny>,
    as_user_extra: HashMap<String, IgnoredAny>,
}

impl Kubeconfig {
    /// Parses the first document of a text, as kubectl does.
    fn parse(text: &str, origin: Origin) -> Result<Kubeconfig, Error> {
        // kubectl skips a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let documents = yaml::documents(text);
        let documents = documents.map_err(|error| Error::from((origin.name.clone(), error)))?;
        let origin = Rc::new(origin);
        let wrong = |error: WrongField| config_error(&origin.name, error);
        let other = |problem: String| config_error(&origin.name, problem);
        let mut fields = match documents.into_iter().next() {
            Some(Value::Object(fields)) => fields,
            // an empty file, or one with comments only, has no entries
            None | Some(Value::Null) => Map::new(),
            _ => return Err(other("it is not a kubeconfig: expected a mapping".into())),
        };
        remove_empty(&mut fields);
        for (field, expected) in [("apiVersion", "v1"), ("kind", "Config")] {
            if fields.get(field).is_some_and(|got| got != expected) {
                let problem = format!("it is not a kubeconfig: {field} is not {expected}");
                return Err(other(problem));
            }
        }
        Ok(Kubeconfig {
            current_context: taken(&mut fields, "current-context").map_err(wrong)?,
            contexts: entries(&mut fields, "contexts", "context", &origin).map_err(wrong)?,
            clusters: entries(&mut fields, "clusters", "cluster", &origin).map_err(wrong)?,
            users: entries(&mut fields, "users", "user", &origin).map_err(wrong)?,
        })
    }

    /// Adds the entries of a further file. If two entries have the same name, the first one counts.
    fn add(&mut self, further: Kubeconfig) {
        if self.current_context.is_empty() {
            self.current_context = further.current_context;
        }
        add(&mut self.contexts, further.contexts);
        add(&mut self.clusters, further.clusters);
        add(&mut self.users, further.users);
    }

    /// Returns the configuration of the current context. `name` is the file's name in errors.
    fn current(self, name: &str) -> Result<ApiAccess, Error> {
        if self.current_context.is_empty() {
            return Err(config_error(name, "current-context is missing"));
        }
        let context = the(self.contexts, "context", &self.current_context, name)?.entry;
        let cluster = the(self.clusters, "cluster", &context.cluster, name)?;
        let user = the(self.users, "user", &context.user, name)?;
        ApiAccess::new(
            &cluster.entry.server,
            &cluster.origin.name,
            cluster.entry.roots(&cluster.origin)?,
            user.entry.credentials(&user.origin)?,
        )
    }
}

fn add<T>(all: &mut Vec<Named<T>>, further: Vec<Named<T>>) {
    let known: BTreeSet<String> = all.iter().map(|one| one.name.clone()).collect();
    let is_new = |one: &Named<T>| !known.contains(&one.name);
    all.extend(further.into_iter().filter(is_new));
}

/// Returns the only entry of this name.
fn the<T>(all: Vec<Named<T>>, what: &str, wanted: &str, name: &str) -> Result<Named<T>, Error> {
    let wrong = |problem: String| Err(config_error(name, problem));
    let mut found = all.into_iter().filter(|one| one.name == wanted);
    let wanted = quoted(wanted, 80);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => wrong(format!("there is more than one {what} {wanted}")),
        (None, _) => wrong(format!("there is no {what} {wanted}")),
    }
}

/// Removes what is null or an empty text.
fn remove_empty(fields: &mut Map<String, Value>) {
    fields.retain(|_, value| !value.is_null() && value != "");
    for value in fields.values_mut() {
        match value {
            Value::Object(fields) => remove_empty(fields),
            Value::Array(items) => {
                items.retain(|item| !item.is_null());
                items
                    .iter_mut()
                    .filter_map(Value::as_object_mut)
                    .for_each(remove_empty);
            }
            _ => {}
        }
    }
}

/// A field with another form than expected: its path, and why.
struct WrongField(String, serde_json::Error);

impl fmt::Display for WrongField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0, self.1)
    }
}

impl WrongField {
    fn below(self, parent: impl fmt::Display) -> WrongField {
        WrongField(format!("{parent}: {}", self.0), self.1)
    }
}

/// Takes a field; the default if there is none.
fn taken<T: DeserializeOwned + Default>(
    fields: &mut Map<String, Value>,
    field: &str,
) -> Result<T, WrongField> {
    let value = fields.remove(field).map(serde_json::from_value).transpose();
    Ok(value
        .map_err(|error| WrongField(field.into(), error))?
        .unwrap_or_default())
}

/// Takes a list of entries, each with a name and one further field.
fn entries<T: DeserializeOwned + Default>(
    fields: &mut Map<String, Value>,
    list: &str,
    field: &str,
    origin: &Rc<Origin>,
) -> Result<Vec<Named<T>>, WrongField> {
    let entries: Vec<Map<String, Value>> = taken(fields, list)?;
    let named = |mut entry: Map<String, Value>| {
        let name: String = taken(&mut entry, "name").map_err(|why| why.below(list))?;
        let of = |why: WrongField| why.below(quoted(&name, 80)).below(list);
        let entry = taken(&mut entry, field).map_err(of)?;
        Ok(Named {
            name,
            entry,
            origin: origin.clone(),
        })
    };
    entries.into_iter().map(named).collect()
}

impl Cluster {
    fn roots(&self, origin: &Origin) -> Result<Vec<CertificateDer<'static>>, Error> {
        let name = &origin.name;
        let unsupported = [
            (self.insecure_skip_tls_verify, "insecure-skip-tls-verify"),
            (self.proxy_url.is_some(), "proxy-url"),
            (self.tls_server_name.is_some(), "tls-server-name"),
        ];
        refuse(name, &unsupported)?;
        let pem = either(
            origin,
            "certificate-authority",
            self.certificate_authority_data.as_deref(),
            self.certificate_authority.as_deref(),
        )?;
        let pem = pem.ok_or_else(|| config_error(name, "certificate-authority-data is missing"))?;
        certificates(&format!("{name}: certificate-authority"), &pem)
    }
}

impl User {
    fn credentials(self, origin: &Origin) -> Result<Credentials, Error> {
        let name = &origin.name;
        let unsupported = [
            (self.exec.is_some(), "exec"),
            (self.auth_provider.is_some(), "auth-provider"),
            (self.username.is_some(), "username"),
            (self.r#as.is_some(), "as"),
            (self.as_uid.is_some(), "as-uid"),
            (!self.as_groups.is_empty(), "as-groups"),
            (!self.as_user_extra.is_empty(), "as-user-extra"),
        ];
        refuse(name, &unsupported)?;
        let certificate = either(
            origin,
            "client-certificate",
            self.client_certificate_data.as_deref(),
            self.client_certificate.as_deref(),
        )?;
        let key = either(
            origin,
            "client-key",
            self.client_key_data.as_deref().map(String::as_str),
            self.client_key.as_deref(),
        )?;
        let certificate = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(client_certificate(name, &certificate, &key)?),
            (Some(_), None) => {
                let problem = "there is a client certificate without its key";
                return Err(config_error(name, problem));
            }
            (None, _) => None,
        };
        let token = token(origin, self.token_file, self.token)?;
        if certificate.is_none() && token.is_none() {
            return Err(config_error(
                name,
                "the user has no credentials: expected client-certificate-data and client-key-data, or token",
            ));
        }
        Ok(Credentials { certificate, token })
    }
}

/// Returns the token. A file that can be read has precedence, as in kubectl.
fn token(
    origin: &Origin,
    file: Option<PathBuf>,
    token: Option<Zeroizing<String>>,
) -> Result<Option<TokenFile>, Error> {
    if let Some(path) = file.map(|path| origin.directory.join(path)) {
        match (read_token(&path), &token) {
            (Ok(_), _) => return Ok(Some(TokenFile::new(path))),
            (Err(error), None) => return Err(error),
            (Err(_), Some(_)) => {}
        }
    }
    match token {
        Some(token) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => Err(config_error(
            &origin.name,
            "the token contains invalid characters",
        )),
        token => Ok(token.map(TokenFile::fixed)),
    }
}

fn refuse(name: &str, unsupported: &[(bool, &str)]) -> Result<(), Error> {
    match unsupported.iter().find(|(there, _)| *there) {
        Some((_, field)) => Err(config_error(name, format!("{field} is not supported"))),
        None => Ok(()),
    }
}

/// Returns the data of a field in the kubeconfig or in the file that it names. The data in the kubeconfig has precedence, as in
/// kubectl.
fn either(
    origin: &Origin,
    field: &str,
    data: Option<&str>,
    path: Option<&Path>,
) -> Result<Option<Zeroizing<Vec<u8>>>, Error> {
    match (data, path) {
        (Some(data), _) => yaml::base64(data).map(Some).map_err(|error| {
            let problem = format!("{field}-data: expected base64: {error}");
            config_error(&origin.name, problem)
        }),
        (None, Some(path)) => read(&origin.directory.join(path)).map(Some),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine};
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

    fn parsed(text: &str) -> Result<ApiAccess, Error> {
        ApiAccess::from_kubeconfig(text, "admin.conf", Path::new("/nowhere"))
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
        assert!(config.credentials.certificate.is_some() && config.roots.certificates().len() == 1);
        assert_eq!(
            config.at("https://127.0.0.1:1").unwrap().server(),
            "https://127.0.0.1:1"
        );
    }

    /// The library's own error would show the line, which is the key.
    #[test]
    fn no_part_of_a_key_in_one_line_is_shown() {
        let (certificate, key) = pair();
        let line = key.replace('\n', "");
        for (certificate, key) in [(&certificate, &line), (&line, &key)] {
            let text = kubeconfig(&cluster(certificate), &with_certificate(certificate, key));
            let why = parsed(&text).unwrap_err().to_string();
            assert!(why.contains("in PEM"), "{why}");
            assert!(!why.contains(&line[40..60]), "{why}");
        }
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
                ApiAccess::from_kubeconfig(&kubeconfig(cluster, user), "admin.conf", dir.path());
            config.unwrap().credentials
        };
        let files = "    client-certificate: c.crt\n    client-key: c.key\n";
        assert!(parsed(files).certificate.is_some() && parsed(files).token.is_none());
        let token = |user: &str| parsed(user).token.unwrap().token().unwrap();
        assert_eq!(*token("    token: abc\n"), "abc");
        // a token file that cannot be read is skipped, as in kubectl
        let both = "    tokenFile: t\n    token: abc\n";
        assert_eq!(*token(both), "abc");
        std::fs::write(dir.path().join("t"), "of-file\n").unwrap();
        assert_eq!(*token(both), "of-file");
        let all = parsed(&format!("{files}    token: abc\n"));
        assert!(all.certificate.is_some() && all.token.is_some());
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        let (certificate, key) = pair();
        let good = with_certificate(&certificate, &key);
        let refused = |cluster: &str, user: &str| {
            let error = parsed(&kubeconfig(cluster, user)).unwrap_err();
            error.to_string()
        };
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
        for field in [
            "username: a",
            "as: a",
            "as-uid: a",
            "as-groups: [a]",
            "as-user-extra: {a: [b]}",
        ] {
            let name = field.split(':').next().unwrap();
            assert_eq!(
                refused(&ca, &format!("{good}    {field}\n")),
                format!("admin.conf: {name} is not supported")
            );
        }
        assert!(refused(&ca, "    {}\n").starts_with("admin.conf: the user has no credentials: "));
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
                .to_string()
                .contains("there is no context \"a\"")
        );
        assert!(
            parsed("a: 1")
                .unwrap_err()
                .to_string()
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
        // The token file is not read at every call.
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
