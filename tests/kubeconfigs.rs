//! Forms of kubeconfigs, compared with kubectl: our client accepts the forms that kubectl accepts, and sends the server the same
//! credentials. A table lists the exceptions.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{ApiAccess, Client, Error};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustls::crypto::ring;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;

use common::kube_apiserver::build;

/// The results of both programs for a form.
#[derive(Clone, Copy)]
enum Verdict {
    /// Both accept it. The server sees this: a certificate, a token, or both.
    Both(&'static str),
    /// Neither accepts it. Our error has this part.
    Neither(&'static str),
    /// Only kubectl accepts it. Our error has this part.
    OnlyKubectl(&'static str),
    /// Only our client accepts it: the faulty part is not in the current context.
    OnlyWe(&'static str),
}
use Verdict::{Both, Neither, OnlyKubectl, OnlyWe};

/// A server that answers each request with the credentials that it saw, in the place of Kubernetes' version.
struct Seer {
    url: String,
    /// CA, client certificate and client key in PEM.
    pem: [String; 3],
}

impl Seer {
    fn start() -> Seer {
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate().unwrap();
        let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
        let issuer = Issuer::from_params(&ca, &ca_key);
        let issue = |names: &[&str], usage| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(DnType::CommonName, "one");
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &issuer).unwrap().pem();
            (certificate, key.serialize_pem())
        };
        let server = issue(&["127.0.0.1"], ExtendedKeyUsagePurpose::ServerAuth);
        let client = issue(&[], ExtendedKeyUsagePurpose::ClientAuth);
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(der(&ca_pem)).unwrap();
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone())
            .allow_unauthenticated()
            .build()
            .unwrap();
        let key = PrivateKeyDer::from_pem_slice(server.1.as_bytes()).unwrap();
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![der(&server.0)], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let config = Arc::new(config);
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let tls = ServerConnection::new(config.clone()).unwrap();
                thread::spawn(move || answer(StreamOwned::new(tls, socket)));
            }
        });
        Seer {
            url,
            pem: [ca_pem, client.0, client.1],
        }
    }
}

/// Answers one request. A client may end the connection before, because it refuses the form.
fn answer(mut stream: StreamOwned<ServerConnection, TcpStream>) -> std::io::Result<()> {
    let mut seen = vec![];
    let mut lines = BufReader::new(&mut stream);
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? <= 2 {
            break;
        }
        if let Some(token) = line.to_ascii_lowercase().strip_prefix("authorization: ") {
            seen.push(token.trim().to_owned());
        }
    }
    if stream.conn.peer_certificates().is_some() {
        seen.insert(0, "certificate".into());
    }
    let body = format!(r#"{{"gitVersion":"{}"}}"#, seen.join(" "));
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len())?;
    stream.conn.send_close_notify();
    stream.flush()
}

/// Breaks a text into lines of 64 characters.
fn lines(text: &str, before: &str, between: &str) -> String {
    let all: Vec<String> = text
        .as_bytes()
        .chunks(64)
        .map(|line| format!("{before}{}", str::from_utf8(line).unwrap()))
        .collect();
    all.join(between)
}

/// A kubeconfig whose parts can be replaced.
struct Form {
    head: String,
    cluster: String,
    clusters: String,
    context: String,
    contexts: String,
    current: String,
    user: String,
    users: String,
}

impl Form {
    fn text(&self) -> String {
        format!(
            "{}clusters:\n- name: c\n  cluster:\n{}{}contexts:\n- name: x\n  context: {}\n{}{}users:\n- name: u\n  user:\n{}{}",
            self.head,
            self.cluster,
            self.clusters,
            self.context,
            self.contexts,
            self.current,
            self.user,
            self.users
        )
    }
}

/// Returns all forms: a name, the text, the verdict.
fn forms(seer: &Seer) -> Vec<(&'static str, String, Verdict)> {
    let [ca, certificate, key] = seer.pem.each_ref().map(|pem| BASE64_STANDARD.encode(pem));
    let url = &seer.url;
    let pair = format!("    client-certificate-data: {certificate}\n    client-key-data: {key}\n");
    let server = format!("    server: {url}\n");
    let with_ca = format!("    certificate-authority-data: {ca}\n{server}");
    let form = |change: &dyn Fn(&mut Form)| {
        let mut form = Form {
            head: "apiVersion: v1\nkind: Config\n".into(),
            cluster: with_ca.clone(),
            clusters: String::new(),
            context: "{cluster: c, user: u}".into(),
            contexts: String::new(),
            current: "current-context: x\n".into(),
            user: pair.clone(),
            users: String::new(),
        };
        change(&mut form);
        form.text()
    };
    let authority = |value: &str| {
        let cluster = format!("    certificate-authority-data: {value}\n{server}");
        form(&|it| it.cluster.clone_from(&cluster))
    };
    let cluster = |more: &str| form(&|it| it.cluster = format!("{with_ca}    {more}\n"));
    let at = |url: &str| form(&|it| it.cluster = with_ca.replace(&seer.url, url));
    let user = |fields: &str| form(&|it| it.user = fields.to_owned());
    let and_user = |more: &str| form(&|it| it.user = format!("{pair}    {more}\n"));
    let token = |fields: &str| user(&format!("    token: abc\n    {fields}\n"));
    let clusters = |more: &str| form(&|it| it.clusters = format!("{more}\n"));
    let users = |more: &str| form(&|it| it.users = format!("{more}\n"));
    let contexts = |more: &str| form(&|it| it.contexts = format!("{more}\n"));
    let context = |own: &str| form(&|it| it.context = own.to_owned());
    let current = |line: &str| form(&|it| it.current = line.to_owned());
    let head = |more: &str| form(&|it| it.head += more);
    let plain = form(&|_| {});
    let wrapped = lines(&ca, "      ", "\n");
    let json = {
        let value = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority-data": ca}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"client-certificate-data": certificate, "client-key-data": key}}],
        });
        value.to_string()
    };
    let cert = "certificate";
    vec![
        ("as kubeadm writes it", plain.clone(), Both(cert)),
        ("JSON", json, Both(cert)),
        (
            "base64 in a block",
            authority(&format!("|\n{wrapped}")),
            Both(cert),
        ),
        (
            "base64 in a folded block",
            authority(&format!(">\n{wrapped}")),
            Neither("expected base64"),
        ),
        (
            "base64 on several plain lines",
            authority(&format!("\n{wrapped}")),
            Neither("expected base64"),
        ),
        (
            "base64 with quoted line breaks",
            authority(&format!("\"{}\"", lines(&ca, "", "\\n"))),
            Both(cert),
        ),
        (
            "base64 with line breaks of Windows",
            authority(&format!("\"{}\"", lines(&ca, "", "\\r\\n"))),
            Both(cert),
        ),
        (
            "base64 with a tab",
            authority(&format!("\"{}\"", lines(&ca, "", "\\t"))),
            Neither("expected base64"),
        ),
        (
            "base64 with a blank",
            authority(&format!("\"{}\"", lines(&ca, "", " "))),
            Neither("expected base64"),
        ),
        (
            "binary of the base64",
            authority(&format!("!!binary {}", BASE64_STANDARD.encode(&ca))),
            Both(cert),
        ),
        (
            "binary of the base64 in a block",
            authority(&format!(
                "!!binary |\n{}",
                lines(&BASE64_STANDARD.encode(&ca), "      ", "\n")
            )),
            Both(cert),
        ),
        (
            "binary of the PEM",
            authority(&format!("!!binary {ca}")),
            Neither("expected base64"),
        ),
        ("no base64", authority("\"!!\""), Neither("expected base64")),
        (
            "key in a block",
            user(&format!(
                "    client-certificate-data: {certificate}\n    client-key-data: |\n{}\n",
                lines(&key, "      ", "\n")
            )),
            Both(cert),
        ),
        (
            "certificate with quoted line breaks",
            user(&format!(
                "    client-certificate-data: \"{}\"\n    client-key-data: {key}\n",
                lines(&certificate, "", "\\n")
            )),
            Both(cert),
        ),
        (
            "empty data and a file",
            authority("\"\"\n    certificate-authority: ca.crt"),
            Both(cert),
        ),
        (
            "an empty file name and data",
            cluster("certificate-authority: \"\""),
            Both(cert),
        ),
        (
            "a missing file beside data",
            cluster("certificate-authority: /nowhere"),
            OnlyWe(cert),
        ),
        (
            "no authority",
            form(&|it| it.cluster.clone_from(&server)),
            Neither("certificate-authority-data is missing"),
        ),
        ("an empty proxy", cluster("proxy-url: \"\""), Both(cert)),
        ("a proxy that is null", cluster("proxy-url:"), Both(cert)),
        (
            "an empty server name",
            cluster("tls-server-name: \"\""),
            Both(cert),
        ),
        (
            "a server name",
            cluster("tls-server-name: 127.0.0.1"),
            OnlyKubectl("tls-server-name is not supported"),
        ),
        (
            "insecure that is null",
            cluster("insecure-skip-tls-verify:"),
            Both(cert),
        ),
        (
            "insecure that is false",
            cluster("insecure-skip-tls-verify: false"),
            Both(cert),
        ),
        (
            "insecure that is a text",
            cluster("insecure-skip-tls-verify: \"false\""),
            Neither("expected a boolean"),
        ),
        (
            "insecure",
            form(&|it| it.cluster = format!("{server}    insecure-skip-tls-verify: true\n")),
            OnlyKubectl("insecure-skip-tls-verify is not supported"),
        ),
        (
            "an unknown field of a cluster",
            cluster("bogus: 1"),
            Both(cert),
        ),
        (
            "disable-compression",
            cluster("disable-compression: true"),
            Both(cert),
        ),
        (
            "a slash behind the server",
            at(&format!("{url}/")),
            Both(cert),
        ),
        (
            "a path behind the server",
            at(&format!("{url}/k8s/clusters/a")),
            Both(cert),
        ),
        (
            "a scheme in upper case",
            at(&url.replace("https", "HTTPS")),
            Both(cert),
        ),
        (
            "a server without a scheme",
            at(&url.replace("https://", "")),
            Neither("expected https://HOST:PORT"),
        ),
        (
            "a server without TLS",
            at(&url.replace("https", "http")),
            Neither("expected https://HOST:PORT"),
        ),
        (
            "a blank behind the server",
            at(&format!("\"{url} \"")),
            Neither("server"),
        ),
        (
            "no server",
            form(&|it| it.cluster = with_ca.replace(&server, "")),
            Neither("has no server"),
        ),
        (
            "names in upper case",
            form(&|it| it.cluster = with_ca.replace("server", "Server")),
            Neither("has no server"),
        ),
        (
            "empty user and password",
            and_user("username: \"\"\n    password: \"\""),
            Both(cert),
        ),
        (
            "a password without a user",
            and_user("password: x"),
            Both(cert),
        ),
        (
            "a user name",
            and_user("username: a"),
            OnlyKubectl("username is not supported"),
        ),
        (
            "programs that are null",
            and_user("exec: null\n    auth-provider: ~"),
            Both(cert),
        ),
        (
            "an empty program",
            and_user("exec: {}"),
            Neither("exec is not supported"),
        ),
        (
            "an empty provider",
            and_user("auth-provider: {}"),
            Neither("auth-provider is not supported"),
        ),
        (
            "a program",
            and_user(
                "exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, interactiveMode: Never}",
            ),
            OnlyKubectl("exec is not supported"),
        ),
        (
            "another user to act as",
            and_user("as: someone"),
            OnlyKubectl("as is not supported"),
        ),
        (
            "nobody to act as",
            and_user("as: \"\"\n    as-groups: []"),
            Both(cert),
        ),
        (
            "empty tokens beside a certificate",
            and_user("token: \"\"\n    tokenFile: \"\""),
            Both(cert),
        ),
        (
            "a token and a certificate",
            and_user("token: abc"),
            Both("certificate bearer abc"),
        ),
        ("a token", token("tokenFile: \"\""), Both("bearer abc")),
        (
            "a token and a file that is null",
            token("tokenFile: null"),
            Both("bearer abc"),
        ),
        (
            "a token and its file",
            token("tokenFile: token"),
            Both("bearer of-file"),
        ),
        (
            "a token and a missing file",
            token("tokenFile: nothing"),
            Both("bearer abc"),
        ),
        (
            "a missing file",
            user("    tokenFile: nothing\n"),
            Neither("nothing"),
        ),
        (
            "an empty token",
            user("    token: \"\"\n"),
            Neither("has no credentials"),
        ),
        (
            "a token with a line break",
            user("    token: \"abc\\n\"\n"),
            Neither("invalid characters"),
        ),
        // no server accepts it, because a blank ends the token
        (
            "a token with a blank",
            user("    token: \"a b\"\n"),
            OnlyKubectl("invalid characters"),
        ),
        (
            "a token that is a number",
            user("    token: 12345\n"),
            Neither("expected a string"),
        ),
        (
            "a file of another name",
            user("    token-file: token\n"),
            Neither("has no credentials"),
        ),
        (
            "empty data and files",
            user(
                "    client-certificate-data: \"\"\n    client-certificate: client.crt\n    client-key-data: \"\"\n    \
                 client-key: client.key\n",
            ),
            Both(cert),
        ),
        (
            "empty file names and data",
            and_user("client-certificate: \"\"\n    client-key: \"\""),
            Both(cert),
        ),
        (
            "a certificate without its key",
            token(&format!("client-certificate-data: {certificate}")),
            Neither("without its key"),
        ),
        (
            "a key without its certificate",
            token(&format!("client-key-data: {key}")),
            Both("bearer abc"),
        ),
        (
            "another cluster that is empty",
            clusters("- name: other\n  cluster: {}"),
            Both(cert),
        ),
        (
            "another cluster that is null",
            clusters("- name: other\n  cluster:"),
            Both(cert),
        ),
        (
            "another cluster without the field",
            clusters("- name: other"),
            Both(cert),
        ),
        ("a cluster that is nothing", clusters("-"), Both(cert)),
        ("a cluster without a name", clusters("- {}"), Both(cert)),
        (
            "another cluster with wrong base64",
            clusters(
                "- name: other\n  cluster: {server: https://a, certificate-authority-data: \"!\"}",
            ),
            OnlyWe(cert),
        ),
        (
            "another cluster with a number",
            clusters("- name: other\n  cluster: {server: 5}"),
            Neither("expected a string"),
        ),
        (
            "another user that is null",
            users("- name: other\n  user:"),
            Both(cert),
        ),
        (
            "another user that is empty",
            users("- name: other\n  user: {}"),
            Both(cert),
        ),
        (
            "another user without the field",
            users("- name: other"),
            Both(cert),
        ),
        ("a user that is nothing", users("- ~"), Both(cert)),
        (
            "a user without a name",
            users("- user: {token: a}"),
            Both(cert),
        ),
        (
            "another user with a program",
            users("- name: other\n  user: {exec: {command: aws}}"),
            Both(cert),
        ),
        (
            "another user that is a text",
            users("- name: other\n  user: text"),
            Neither("users: \"other\""),
        ),
        (
            "another context that is null",
            contexts("- name: other\n  context:"),
            Both(cert),
        ),
        (
            "another context without a user",
            contexts("- name: other\n  context: {cluster: c}"),
            Both(cert),
        ),
        ("a context that is nothing", contexts("-"), Both(cert)),
        (
            "a context without a name",
            contexts("- context: {cluster: c, user: u}"),
            Both(cert),
        ),
        (
            "two clusters of one name",
            clusters("- name: c\n  cluster: {server: https://a}"),
            Neither("more than one cluster"),
        ),
        (
            "a name that is a number",
            form(&|it| it.context = "{cluster: 1, user: u}".into()),
            Neither("expected a string"),
        ),
        (
            "a context without a user",
            context("{cluster: c}"),
            Neither("there is no user"),
        ),
        (
            "a context with an empty user",
            context("{cluster: c, user: \"\"}"),
            Neither("there is no user"),
        ),
        (
            "a context with an unknown user",
            context("{cluster: c, user: z}"),
            Neither("there is no user \"z\""),
        ),
        (
            "a context without a cluster",
            context("{user: u}"),
            Neither("there is no cluster"),
        ),
        (
            "a context that is empty",
            context(""),
            Neither("there is no cluster"),
        ),
        (
            "a user that is empty",
            user(""),
            Neither("has no credentials"),
        ),
        (
            "no users",
            context("{cluster: c}")
                .split("users:")
                .next()
                .unwrap()
                .into(),
            Neither("there is no user"),
        ),
        (
            "no current context",
            current(""),
            Neither("current-context is missing"),
        ),
        (
            "an empty current context",
            current("current-context: \"\"\n"),
            Neither("current-context is missing"),
        ),
        (
            "a current context that is null",
            current("current-context:\n"),
            Neither("current-context is missing"),
        ),
        (
            "an unknown current context",
            current("current-context: z\n"),
            Neither("there is no context \"z\""),
        ),
        ("preferences", head("preferences: {}\n"), Both(cert)),
        (
            "extensions",
            head("extensions:\n- name: a\n  extension: {a: 1}\n"),
            Both(cert),
        ),
        ("an unknown field", head("bogus: 1\n"), Both(cert)),
        (
            "neither version nor kind",
            form(&|it| it.head = String::new()),
            Both(cert),
        ),
        (
            "another kind",
            plain.replace("kind: Config", "kind: Other"),
            Neither("kind is"),
        ),
        (
            "another version",
            plain.replace("apiVersion: v1", "apiVersion: v2"),
            Neither("apiVersion is"),
        ),
        (
            "line breaks of Windows",
            plain.replace('\n', "\r\n"),
            Both(cert),
        ),
        ("a byte order mark", format!("\u{feff}{plain}"), Both(cert)),
        (
            "a second document",
            format!("{plain}---\na: 1\n"),
            Both(cert),
        ),
        (
            "a marker before the document",
            format!("---\n{plain}"),
            Both(cert),
        ),
        (
            "a marker behind the document",
            format!("{plain}---\n"),
            Both(cert),
        ),
        (
            "an end of the document",
            format!("{plain}...\n"),
            Both(cert),
        ),
        ("an anchor", authority(&format!("&a {ca}")), Both(cert)),
        // aliases can make a large document of a small text
        (
            "an alias",
            clusters(
                "- name: other\n  cluster: &b {server: https://a}\n- name: third\n  cluster: *b",
            ),
            OnlyKubectl("an alias"),
        ),
        // it is not obvious which of the two fields has an effect
        (
            "a field that occurs twice",
            head("kind: Config\n"),
            OnlyKubectl("occurs twice"),
        ),
        (
            "nothing",
            String::new(),
            Neither("current-context is missing"),
        ),
    ]
}

/// Returns the credentials that the server sees if our client reads the file.
fn ours(path: &Path) -> Result<String, String> {
    let config = ApiAccess::from_kubeconfig_file(path).map_err(|error| error.to_string())?;
    let client = Client::new(config, &Stop::new()).within(Duration::from_secs(20));
    client.version().map_err(|error| error.to_string())
}

/// Returns the credentials that the server sees if kubectl reads the file.
fn kubectls(kubectl: &Path, path: &Path) -> Result<String, String> {
    let output = Command::new(kubectl)
        .arg("--kubeconfig")
        .arg(path)
        .args(["get", "--raw", "/version", "--request-timeout=20s"])
        .env_clear()
        .env("HOME", path.parent().unwrap())
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let version: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    Ok(version["gitVersion"].as_str().unwrap().to_owned())
}

fn folder(seer: &Seer) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let [ca, certificate, key] = &seer.pem;
    let token = "of-file\n".to_owned();
    for (name, content) in [
        ("ca.crt", ca),
        ("client.crt", certificate),
        ("client.key", key),
        ("token", &token),
    ] {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

#[test]
fn forms_of_kubeconfigs_are_taken_or_refused_by_what_is_wrong() {
    let seer = Seer::start();
    let folder = folder(&seer);
    let path = folder.path().join("config");
    for (name, text, verdict) in forms(&seer) {
        fs::write(&path, text).unwrap();
        let got = ours(&path);
        match (verdict, &got) {
            (Both(seen) | OnlyWe(seen), Ok(got)) if seen == got => {}
            (Neither(why) | OnlyKubectl(why), Err(got)) if got.contains(why) => {}
            _ => panic!("{name}: {got:?}"),
        }
    }
}

#[test]
#[ignore = "needs kubectl: make kubernetes-api"]
fn kubectl_decides_about_the_same_forms_as_we_do() {
    let kubectl = build(&["kubectl"]).join("kubectl");
    let seer = Seer::start();
    let folder = folder(&seer);
    let path = folder.path().join("config");
    for (name, text, verdict) in forms(&seer) {
        fs::write(&path, text).unwrap();
        let got = kubectls(&kubectl, &path);
        match (verdict, &got) {
            (Both(seen), Ok(got)) if seen == got => {}
            (OnlyKubectl(_), Ok(_)) | (Neither(_) | OnlyWe(_), Err(_)) => {}
            _ => panic!("{name}: {got:?}"),
        }
    }
}

#[test]
fn of_several_kubeconfigs_the_first_entry_of_a_name_counts() {
    let seer = Seer::start();
    let folder = folder(&seer);
    let [ca, ..] = seer.pem.each_ref().map(|pem| BASE64_STANDARD.encode(pem));
    let below = folder.path().join("below");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("token"), "of-below").unwrap();
    let one = folder.path().join("one");
    let two = below.join("two");
    fs::write(
        &one,
        format!(
            "current-context: x\nclusters:\n- name: c\n  cluster: {{server: '{}', certificate-authority-data: {ca}}}\n",
            seer.url
        ),
    )
    .unwrap();
    fs::write(
        &two,
        "current-context: y\ncontexts:\n- name: x\n  context: {cluster: c, user: u}\nclusters:\n- name: c\n  cluster: \
         {server: 'https://127.0.0.1:1'}\nusers:\n- name: u\n  user: {tokenFile: token}\n",
    )
    .unwrap();
    let missing = folder.path().join("missing");
    let version = |files: &[&Path]| {
        let files: Vec<_> = files.iter().map(|file| (*file).to_owned()).collect();
        let config = ApiAccess::from_kubeconfig_files(&files).map_err(|error| error.to_string())?;
        let client = Client::new(config, &Stop::new()).within(Duration::from_secs(20));
        client.version().map_err(|error| error.to_string())
    };
    assert_eq!(
        version(&[&one, &missing, &two]),
        Ok("bearer of-below".into())
    );
    // kubectl takes these files as empty ones
    let empty = folder.path().join("empty");
    for text in ["", "# a comment\n", "---\n", "null\n"] {
        fs::write(&empty, text).unwrap();
        assert_eq!(
            version(&[&empty, &one, &two]),
            Ok("bearer of-below".into()),
            "{text:?}"
        );
    }
    fs::write(&empty, "[]\n").unwrap();
    assert!(
        version(&[&empty, &one, &two])
            .unwrap_err()
            .contains("expected a mapping")
    );
    assert!(
        version(&[&one])
            .unwrap_err()
            .contains("there is no context")
    );
    assert!(version(&[&missing]).unwrap_err().contains("missing"));
}

#[test]
fn a_server_without_an_address_is_said_at_once_and_nothing_was_sent() {
    let seer = Seer::start();
    let [ca, ..] = seer.pem.each_ref().map(|pem| BASE64_STANDARD.encode(pem));
    let text = format!(
        "current-context: x\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\nclusters:\n- name: c\n  cluster: \
         {{server: 'https://nowhere.invalid:6443', certificate-authority-data: {ca}}}\nusers:\n- name: u\n  user: {{token: t}}\n"
    );
    let config = ApiAccess::from_kubeconfig(&text, "config", Path::new("/nowhere")).unwrap();
    let client = Client::new(config, &Stop::new()).within(Duration::from_secs(3));
    // the first request of an operator's command
    let error = client.resolve().unwrap_err();
    assert!(matches!(error, Error::NoAddress { .. }), "{error}");
    // a node goes on asking
    let started = Instant::now();
    let error = client.version().unwrap_err().to_string();
    assert!(started.elapsed() > Duration::from_secs(1), "{error}");
    assert!(
        error.starts_with(
            "the name of the API server https://nowhere.invalid:6443 has no address: "
        ) && !error.contains("may have executed"),
        "{error}"
    );
}
