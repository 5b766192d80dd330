//! A release on a web server, and the policy in force in the cluster.

use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use http::{BodyReader, Client as WebClient, ClientPolicy, Roots};
use kubernetes::NAMESPACE;
use kubernetes::client::{ApiAccess, CONFIG_MAPS, Client};
use kubernetes::objects::ConfigMap;
use verifier::Policy;

use super::error::Error;
use super::release::MAX_LIST;
use base::network::request::Request;
use base::stop::Stop;
use ssh::signature::MAX_SIGNATURE;

/// The files of a release: the list, and the content in the order in which it is read.
const LIST: &str = "release.json";
const CONTENT: [&str; 3] = ["firstlight.efi", "root.img", "hashes.img"];
/// How long a download may take, and how long the server may be silent.
const TIME: Duration = Duration::from_secs(3600);
const SILENCE: Duration = Duration::from_secs(60);
/// How long the API server has for an answer.
const ANSWER: Duration = Duration::from_secs(60);
/// The ConfigMap of the join services, and its field with the policy.
const JOIN_CONFIG: &str = "join-config";
const POLICY: &str = "attestationConfig";

/// A folder of a web server with a release.
pub struct Remote {
    url: String,
    client: WebClient,
}

impl Remote {
    /// Names the folder by its URL, `https://..`. The server must have a certificate of an authority that the image trusts; the release
    /// itself is signed.
    pub fn new(url: &str) -> Result<Remote, Error> {
        http::check(url).map_err(|error| Error::Download(url.into(), error.to_string()))?;
        let policy = ClientPolicy {
            silence: Some(SILENCE),
            ..ClientPolicy::new(Roots::load(None).unwrap_or_default())
        };
        Ok(Remote::by(url, WebClient::new(policy, TIME)))
    }

    pub(super) fn by(url: &str, client: WebClient) -> Remote {
        Remote {
            url: url.trim_end_matches('/').into(),
            client,
        }
    }

    /// Returns the list and its signature.
    pub fn list(&self) -> Result<(Vec<u8>, String), Error> {
        let read = |name: &str, limit: usize| {
            let mut bytes = vec![];
            let mut reader = self.open(name)?.take(limit as u64 + 1);
            let read = reader.read_to_end(&mut bytes);
            read.map_err(|error| self.failed(name, error.to_string()))?;
            if bytes.len() <= limit {
                Ok(bytes)
            } else {
                Err(self.failed(name, format!("it has more than {limit} bytes")))
            }
        };
        // base64 and its lines
        let signature = read(&format!("{LIST}.sig"), 2 * MAX_SIGNATURE)?;
        let signature = String::from_utf8_lossy(&signature).into_owned();
        Ok((read(LIST, MAX_LIST)?, signature))
    }

    /// Returns the content. Requests each file only after the previous one was read.
    pub fn content(&self) -> UpdateContent<'_> {
        UpdateContent {
            remote: self,
            next: 0,
            open: None,
        }
    }

    fn open(&self, name: &str) -> Result<BodyReader, Error> {
        let url = format!("{}/{name}", self.url);
        let request = Request {
            method: "GET",
            url: &url,
            fields: &[],
            body: None,
            limit: u64::MAX,
        };
        let answer = self.client.open(&request, TIME);
        let answer = answer.map_err(|error| self.failed(name, error.to_string()))?;
        match answer.status() {
            200 => Ok(answer.into_reader()),
            status => Err(self.failed(name, format!("expected the status 200, got {status}"))),
        }
    }

    fn failed(&self, name: &str, why: String) -> Error {
        Error::Download(format!("{}/{name}", self.url), why)
    }
}

/// The files of the content as one.
pub struct UpdateContent<'a> {
    remote: &'a Remote,
    next: usize,
    open: Option<BodyReader>,
}

impl Read for UpdateContent<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(reader) = &mut self.open {
                match reader.read(buffer)? {
                    0 => self.open = None,
                    count => return Ok(count),
                }
            }
            let Some(name) = CONTENT.get(self.next) else {
                return Ok(0);
            };
            self.open = Some(self.remote.open(name).map_err(io::Error::other)?);
            self.next += 1;
        }
    }
}

/// Returns the policy of the join services of the cluster whose kubelet has this kubeconfig; `None` without Kubernetes, where no join
/// service is known.
pub fn policy_in_force(kubeconfig: &Path) -> Result<Option<Policy>, Error> {
    if !kubeconfig.exists() {
        return Ok(None);
    }
    let unknown = |why: String| Error::NoPolicy(why);
    let config = ApiAccess::from_kubeconfig_file(kubeconfig);
    let config = config.map_err(|error| unknown(error.to_string()))?;
    let map = CONFIG_MAPS.in_namespace(NAMESPACE).named(JOIN_CONFIG);
    let map = Client::new(config, &Stop::new())
        .within(ANSWER)
        .get_as(&map);
    let map: ConfigMap = map.map_err(|error| unknown(error.to_string()))?;
    let text = map.data.get(POLICY);
    let text = text.ok_or_else(|| unknown(format!("{JOIN_CONFIG} has no policy")))?;
    let policy = Policy::from_json(text).map_err(|error| unknown(error.to_string()))?;
    Ok(Some(policy))
}
