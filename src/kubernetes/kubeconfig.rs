//! Builds the administrator's kubeconfig again from the one that a node sends, before any program
//! on the operator's machine reads it.
//!
//! A kubeconfig can name programs that kubectl runs (`exec`), files that it reads, and proxies that
//! it uses. So only four values of the node's text are used, and each is validated: the server's
//! address, the cluster's CA, the client's certificate and its key. The caller sets the names.

use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use serde_json::Value;
use zeroize::Zeroizing;

use super::kubelet_certificate::{NO_KEY, pem};
use super::{parameters, yaml};
use base::crypto::Secret;
use base::text::quoted;

/// The maximum number of certificates in a bundle of CAs or in a client's chain.
const MAX_CERTIFICATES: usize = 16;

/// Why a kubeconfig cannot be built. Fields have the names of the given kubeconfig; no text shows a key.
#[derive(Debug, PartialEq)]
pub enum KubeconfigError {
    /// The given one is not UTF-8.
    Encoding,
    /// The given one is not YAML.
    Yaml(yaml::Error),
    /// A field is missing.
    Missing(&'static str),
    /// A list has no entry with this name.
    NoEntry(&'static str, String),
    /// The server is not `https://HOST:PORT`.
    Server(String),
    /// The value of a field is not in base64.
    Base64(&'static str, base64::DecodeError),
    /// The value of a field is not certificates in PEM.
    Pem(&'static str),
    /// The value of a field has no certificates in PEM, or too many.
    Count(&'static str),
    /// The value of a field contains something that is no certificate.
    Certificate(&'static str),
    /// The client's key is not a private key.
    Key,
    /// The client's key is not that of its certificate.
    Mismatch(rustls::Error),
}

impl fmt::Display for KubeconfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use KubeconfigError::*;
        match self {
            Encoding => f.write_str("it is not UTF-8"),
            Yaml(error) => error.fmt(f),
            Missing(field) => write!(f, "{field} is missing"),
            NoEntry(list, name) => {
                write!(f, "its {list} contain no entry named {}", quoted(name, 80))
            }
            Server(got) => {
                write!(f, "server: {}, expected https://HOST:PORT", quoted(got, 80))
            }
            Base64(field, error) => write!(f, "{field}: expected base64: {error}"),
            Pem(field) => write!(f, "{field}: expected certificates in PEM"),
            Count(field) => {
                write!(
                    f,
                    "{field}: expected 1 to {MAX_CERTIFICATES} certificates in PEM"
                )
            }
            Certificate(field) => write!(
                f,
                "{field}: it contains something other than X.509 certificates"
            ),
            Key => write!(f, "client-key-data: {NO_KEY}"),
            Mismatch(error) => {
                write!(f, "client-certificate-data and client-key-data: {error}")
            }
        }
    }
}

impl std::error::Error for KubeconfigError {}

/// Builds a kubeconfig from the server, CA, client certificate and client key of the current
/// context in `text`. Its names are `cluster`, `user` and, as kubeadm does it, `user@cluster`.
pub fn rebuild(text: &[u8], cluster: &str, user: &str) -> Result<Secret, KubeconfigError> {
    let text = str::from_utf8(text).map_err(|_| KubeconfigError::Encoding)?;
    let given = yaml::document(text).map_err(KubeconfigError::Yaml)?;
    let context = named(
        &given,
        "contexts",
        text_of(&given["current-context"], "current-context")?,
    )?;
    let of = |list: &'static str, entry: &'static str| -> Result<&Value, KubeconfigError> {
        Ok(&named(&given, list, text_of(&context["context"][entry], entry)?)?[entry])
    };
    let (from, of_user) = (of("clusters", "cluster")?, of("users", "user")?);

    let server = text_of(&from["server"], "server")?;
    let endpoint = server
        .strip_prefix("https://")
        .filter(|endpoint| parameters::is_endpoint(endpoint));
    let endpoint = endpoint.ok_or_else(|| KubeconfigError::Server(server.to_owned()))?;
    let authority = certificates(
        &from["certificate-authority-data"],
        "certificate-authority-data",
    )?;
    let chain = certificates(
        &of_user["client-certificate-data"],
        "client-certificate-data",
    )?;
    let key = decoded(&of_user["client-key-data"], "client-key-data")?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|_| KubeconfigError::Key)?;
    let key_text = key_text(&key);
    let (authority_text, chain_text) = (certificates_text(&authority), certificates_text(&chain));
    CertifiedKey::from_der(chain, key, &tls::provider()).map_err(KubeconfigError::Mismatch)?;

    Ok(Secret::new(
        format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: {cluster:?}\n  cluster:\n    server: https://{endpoint}\n    \
             certificate-authority-data: {authority_text}\nusers:\n- name: {user:?}\n  user:\n    \
             client-certificate-data: {chain_text}\n    client-key-data: {}\ncontexts:\n- name: \
             \"{user}@{cluster}\"\n  context:\n    cluster: {cluster:?}\n    user: \
             {user:?}\ncurrent-context: \"{user}@{cluster}\"\n",
            *key_text
        )
        .into_bytes(),
    ))
}

/// Returns the entry of this name in one of a kubeconfig's lists.
fn named<'a>(
    kubeconfig: &'a Value,
    list: &'static str,
    name: &str,
) -> Result<&'a Value, KubeconfigError> {
    let entries = kubeconfig[list].as_array().into_iter().flatten();
    let mut found = entries.filter(|entry| entry["name"] == name);
    found
        .next()
        .ok_or_else(|| KubeconfigError::NoEntry(list, name.to_owned()))
}

fn text_of<'a>(value: &'a Value, field: &'static str) -> Result<&'a str, KubeconfigError> {
    value.as_str().ok_or(KubeconfigError::Missing(field))
}

fn decoded(value: &Value, field: &'static str) -> Result<Zeroizing<Vec<u8>>, KubeconfigError> {
    yaml::base64(text_of(value, field)?).map_err(|error| KubeconfigError::Base64(field, error))
}

fn certificates(
    value: &Value,
    field: &'static str,
) -> Result<Vec<CertificateDer<'static>>, KubeconfigError> {
    let bytes = decoded(value, field)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes)
        .take(MAX_CERTIFICATES + 1)
        .collect();
    let certificates = certificates.map_err(|_| KubeconfigError::Pem(field))?;
    if certificates.is_empty() || certificates.len() > MAX_CERTIFICATES {
        return Err(KubeconfigError::Count(field));
    }
    for certificate in &certificates {
        webpki::anchor_from_trusted_cert(certificate)
            .map_err(|_| KubeconfigError::Certificate(field))?;
    }
    Ok(certificates)
}

/// Encodes the parsed certificates again, without any text around them.
fn certificates_text(certificates: &[CertificateDer<'_>]) -> String {
    let all: String = certificates
        .iter()
        .map(|one| pem("CERTIFICATE", one).to_string())
        .collect();
    BASE64_STANDARD.encode(all)
}

fn key_text(key: &PrivateKeyDer<'_>) -> Zeroizing<String> {
    let label = match key {
        PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
        PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
        _ => "PRIVATE KEY",
    };
    Zeroizing::new(BASE64_STANDARD.encode(pem(label, key.secret_der()).as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;
    use crate::client::ApiAccess;
    use support::mutation::mutations;

    /// Builds a kubeconfig as kubeadm does, with additional lines in the cluster and in the user.
    fn kubeconfig(in_cluster: &str, in_user: &str) -> String {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(vec!["kubernetes".into()]).unwrap();
        let (certificate, key) = (
            BASE64_STANDARD.encode(cert.pem()),
            BASE64_STANDARD.encode(signing_key.serialize_pem()),
        );
        format!(
            "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: {certificate}\n    server: \
             https://10.0.0.1:6443\n{in_cluster}  name: kubernetes\ncontexts:\n- context:\n    cluster: kubernetes\n    user: \
             admin\n  name: admin@kubernetes\ncurrent-context: admin@kubernetes\nkind: Config\nusers:\n- name: admin\n  \
             user:\n    client-certificate-data: {certificate}\n    client-key-data: {key}\n{in_user}"
        )
    }

    #[test]
    fn server_and_credentials_of_kubeadms_file_stay_and_names_are_ours() {
        let given = kubeconfig("", "");
        let built = rebuild(given.as_bytes(), "green", "green-admin").unwrap();
        let built = str::from_utf8(built.expose()).unwrap();
        let config = ApiAccess::from_kubeconfig(built, "built", Path::new("/nowhere")).unwrap();
        assert_eq!(config.server(), "https://10.0.0.1:6443");
        let (old, new) = (
            yaml::document(&given).unwrap(),
            yaml::document(built).unwrap(),
        );
        assert_eq!(new["clusters"][0]["cluster"], old["clusters"][0]["cluster"]);
        assert_eq!(new["users"][0]["user"], old["users"][0]["user"]);
        assert_eq!(new["current-context"], "green-admin@green");
        assert_eq!(
            rebuild(built.as_bytes(), "green", "green-admin")
                .unwrap()
                .expose(),
            built.as_bytes()
        );
    }

    #[test]
    fn nothing_else_that_a_hostile_node_writes_is_passed_on() {
        let hostile = kubeconfig(
            "    proxy-url: http://evil\n    insecure-skip-tls-verify: true\n    tls-server-name: evil\n    \
             certificate-authority: /etc/evil\n    extensions: [{name: evil}]\n",
            "    exec: {apiVersion: client.authentication.k8s.io/v1, command: evil, interactiveMode: Never}\n    \
             auth-provider: {name: evil}\n    tokenFile: /evil\n    token: evil\n    client-key: /evil\n    username: evil\n",
        );
        let hostile = format!(
            "{hostile}- name: evil\n  user: {{exec: {{command: evil}}}}\npreferences: {{evil: evil}}\n"
        );
        let built = rebuild(hostile.as_bytes(), "green", "green-admin").unwrap();
        let built = str::from_utf8(built.expose()).unwrap();
        assert!(
            !built.contains("evil") && !built.contains("exec"),
            "{built}"
        );
        let value = yaml::document(built).unwrap();
        let keys = |value: &Value| {
            value
                .as_object()
                .unwrap()
                .keys()
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(
            keys(&value["clusters"][0]["cluster"]),
            ["certificate-authority-data", "server"]
        );
        assert_eq!(
            keys(&value["users"][0]["user"]),
            ["client-certificate-data", "client-key-data"]
        );
        assert_eq!(value["users"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_value_that_is_missing_or_no_such_thing_is_named() {
        let good = kubeconfig("", "");
        let refused = |text: &str| rebuild(text.as_bytes(), "green", "green-admin").unwrap_err();
        for server in [
            "http://10.0.0.1:6443",
            "https://10.0.0.1",
            "https://u@h:1",
            "https://h:1/path",
            "https://h:1\\n x: y",
        ] {
            let text = good.replace("https://10.0.0.1:6443", &format!("\"{server}\""));
            let error = refused(&text);
            assert!(matches!(error, KubeconfigError::Server(_)), "{error}");
        }
        for field in [
            "certificate-authority-data",
            "client-certificate-data",
            "client-key-data",
            "server",
        ] {
            assert_eq!(
                refused(&good.replacen(field, "other", 1)),
                KubeconfigError::Missing(field)
            );
        }
        for field in [
            "certificate-authority-data",
            "client-certificate-data",
            "client-key-data",
        ] {
            for content in ["!", "", "aGVsbG8="] {
                let text: String = good
                    .lines()
                    .map(|line| {
                        if line.contains(field) {
                            format!("    {field}: \"{content}\"\n")
                        } else {
                            format!("{line}\n")
                        }
                    })
                    .collect();
                assert!(
                    refused(&text).to_string().starts_with(field),
                    "{field} {content}"
                );
            }
        }
        // the library would show the line, which is the key
        let pem = generate_simple_self_signed(vec!["kubernetes".into()]).unwrap();
        let pem = pem.signing_key.serialize_pem().replace('\n', "");
        let line: String = good
            .lines()
            .map(|line| {
                if line.contains("client-key-data") {
                    format!("    client-key-data: {}\n", BASE64_STANDARD.encode(&pem))
                } else {
                    format!("{line}\n")
                }
            })
            .collect();
        assert_eq!(refused(&line), KubeconfigError::Key);
        let other = kubeconfig("", "");
        let key = |text: &str| {
            text.lines()
                .find(|line| line.contains("client-key-data"))
                .unwrap()
                .to_owned()
        };
        let error = refused(&good.replace(&key(&good), &key(&other)));
        assert!(matches!(error, KubeconfigError::Mismatch(_)), "{error}");
        let missing = KubeconfigError::Missing("current-context");
        assert_eq!(refused("kind: Config"), missing);
        let missing = KubeconfigError::NoEntry("contexts", "a".into());
        assert_eq!(refused("current-context: a"), missing);
        assert!(
            rebuild(b"\xff", "green", "green-admin").is_err()
                && rebuild(b"", "green", "green-admin").is_err()
        );
    }

    #[test]
    fn mutated_kubeconfigs_are_refused_or_rebuilt_with_the_same_fields() {
        let good = kubeconfig("", "");
        let mut built = 0;
        for mutant in mutations(good.as_bytes(), 3_000) {
            let Ok(text) = rebuild(&mutant, "green", "green-admin") else {
                continue;
            };
            built += 1;
            assert_eq!(
                rebuild(text.expose(), "green", "green-admin").unwrap(),
                text
            );
            assert_eq!(str::from_utf8(text.expose()).unwrap().lines().count(), 18);
        }
        assert!(built > 0);
    }
}
