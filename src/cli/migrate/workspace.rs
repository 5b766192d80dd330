//! The files of Constellation's command in the operator's folder, its workspace.

use std::io;
use std::path::{Path, PathBuf};

use base::crypto::{CLUSTER_ID_LEN, MEASUREMENT_SALT_LEN};
use base::master_secret::MasterSecret;
use kubernetes::services::master_secret;
use kubernetes::yaml;
use serde_json::Value;
use verifier::variant::ALL;

use crate::cluster::init::expected_cluster_id;
use crate::shell::{error::Error, files};
use crate::workspace::{master_secret::SecretSource, state::unhex};

/// The kubeconfig that Constellation's command writes.
pub const KUBECONFIG_FILE: &str = "constellation-admin.conf";
/// The master secret that it writes.
pub const MASTER_SECRET_FILE: &str = "constellation-mastersecret.json";
const CONFIG_FILE: &str = "constellation-conf.yaml";
const STATE_FILE: &str = "constellation-state.yaml";
/// The folder with the state of the cloud's resources.
const TERRAFORM: &str = "constellation-terraform";

/// What the files say.
pub struct Workspace {
    /// The master secret, or why it cannot be read.
    pub master_secret: Result<MasterSecret, Error>,
    /// The state file, if it exists.
    pub state: Option<Result<OldState, Error>>,
    /// The configuration file, if it exists.
    pub config: Option<Result<OldConfig, Error>>,
    /// Whether the state of the cloud's resources is there.
    pub has_terraform: bool,
}

/// `constellation-state.yaml`, as far as it says which cluster it is of.
#[derive(Debug, PartialEq, Eq)]
pub struct OldState {
    /// The cluster's ID.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// The measurement salt.
    pub salt: Option<[u8; MEASUREMENT_SALT_LEN]>,
    /// The host of the load balancer.
    pub endpoint: String,
}

/// `constellation-conf.yaml`, as far as the move needs it.
#[derive(Debug, PartialEq, Eq)]
pub struct OldConfig {
    /// The attestation variant.
    pub variant: Option<&'static str>,
    /// The version of the nodes' image.
    pub image: String,
}

impl Workspace {
    /// Reads the files in the present folder.
    pub fn read(secret: &SecretSource) -> Workspace {
        Workspace {
            master_secret: secret.read(),
            state: file(STATE_FILE, OldState::parse),
            config: file(CONFIG_FILE, OldConfig::parse),
            has_terraform: Path::new(TERRAFORM).is_dir(),
        }
    }

    /// Returns what contradicts the cluster with this measurement salt and master secret, as sentences.
    pub fn contradictions(&self, salt: Option<&[u8]>, master_secret: Option<&[u8]>) -> Vec<String> {
        let mut found = Vec::new();
        let secret = match &self.master_secret {
            Ok(secret) => secret,
            Err(error) => {
                found.push(format!("the master secret: {error}"));
                return found;
            }
        };
        // Constellation has no external KMS, so that each other content is of another cluster
        let is_own = |content| {
            let opened = master_secret::opened(content, secret);
            opened.is_ok_and(|there| *there == secret.key().expose())
        };
        if master_secret.is_some_and(|content| !is_own(content)) {
            found.push(
                "the master secret differs from the one in the cluster: it is of another cluster, and no disk would open with it"
                    .into(),
            );
        }
        let state = match &self.state {
            None => return found,
            Some(Err(error)) => {
                found.push(error.to_string());
                return found;
            }
            Some(Ok(state)) => state,
        };
        let salt = salt.and_then(|salt| salt.try_into().ok());
        if let (Some(own), Some(there)) = (state.salt, salt)
            && own != there
        {
            found.push(format!(
                "{STATE_FILE}: its measurement salt differs from that of the cluster: it is of another cluster"
            ));
        }
        let id = salt.and_then(|salt| expected_cluster_id(secret, &salt).ok());
        if let (Some(own), Some(there)) = (state.cluster_id, id)
            && own != there
        {
            found.push(format!(
                "{STATE_FILE}: its cluster ID is not the one that the master secret and the cluster's measurement salt make"
            ));
        }
        found
    }
}

/// Parses a file of the present folder; `None` if there is none.
fn file<T>(name: &str, parse: fn(&Value) -> Result<T, Error>) -> Option<Result<T, Error>> {
    let content = match files::read(Path::new(name)) {
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => return None,
        Err(error) => return Some(Err(error.into())),
        Ok(content) => content,
    };
    let parsed = str::from_utf8(&content)
        .map_err(Error::content)
        .and_then(|text| yaml::document(text).map_err(Error::content))
        .and_then(|value| parse(&value));
    Some(parsed.map_err(|error| {
        let path = PathBuf::from(name);
        Error::content(format!("{}: {error}", path.display()))
    }))
}

impl OldState {
    fn parse(value: &Value) -> Result<OldState, Error> {
        if value["version"] != "v1" {
            return Err(Error::content(format!(
                "a state file of version {}, expected \"v1\"",
                value["version"]
            )));
        }
        let values = &value["clusterValues"];
        Ok(OldState {
            cluster_id: hexadecimal(values, "clusterID")?,
            salt: hexadecimal(values, "measurementSalt")?,
            endpoint: text(&value["infrastructure"]["clusterEndpoint"]),
        })
    }
}

/// Returns the variant with this name in the configuration, such as `awsSEVSNP` for `aws-sev-snp`.
fn variant_of(name: &str) -> Option<&'static str> {
    let mut names = ALL.iter().map(|variant| variant.name);
    names.find(|own| own.replace('-', "").eq_ignore_ascii_case(name))
}

impl OldConfig {
    fn parse(value: &Value) -> Result<OldConfig, Error> {
        let attestation = value["attestation"].as_object();
        let given = attestation.into_iter().flatten();
        let given: Vec<_> = given.filter(|(_, value)| !value.is_null()).collect();
        Ok(OldConfig {
            variant: match given[..] {
                [(name, _)] => variant_of(name),
                _ => None,
            },
            image: text(&value["image"]),
        })
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns bytes that are written in hexadecimal digits; `None` if they are absent or empty.
fn hexadecimal<const N: usize>(values: &Value, name: &str) -> Result<Option<[u8; N]>, Error> {
    let digits = match &values[name] {
        Value::Null => return Ok(None),
        Value::String(text) if text.is_empty() => return Ok(None),
        Value::String(text) => unhex(text),
        // digits without a letter, which YAML reads as a number, have lost their form
        _ => None,
    };
    let expected = format!("{name}: expected {} hexadecimal digits", 2 * N);
    digits.map(Some).ok_or(Error::Content(expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::Secret;
    use support::mutation::mutations;

    /// The ID that a master secret, its salt and a measurement salt of zeros make.
    const ID: &str = "823267d1276b940d1f04b9fac150721f196bf1090e125684d4efd8416a691588";

    fn state(id: &str, salt: &str) -> Result<OldState, Error> {
        let text = format!(
            "version: v1 # Schema version of this state file.\n# Cloud.\ninfrastructure:\n    uid: 1a2b3c4d\n    \
             clusterEndpoint: 203.0.113.7\n    initSecret: 00ff\n    apiServerCertSANs:\n        - 203.0.113.7\n\
             clusterValues:\n    clusterID: {id}\n    ownerID: \"\"\n    measurementSalt: {salt}\n"
        );
        OldState::parse(&yaml::document(&text).unwrap())
    }

    fn workspace(state: Option<Result<OldState, Error>>) -> Workspace {
        let secret = || Secret::new(vec![0; 32]);
        Workspace {
            master_secret: Ok(MasterSecret::new(secret(), secret()).unwrap()),
            state,
            config: None,
            has_terraform: false,
        }
    }

    #[test]
    fn the_files_are_of_this_cluster_or_it_is_said_how_they_differ() {
        let zeros = format!("\"{}\"", "0".repeat(64));
        let own = || Some(state(ID, &zeros));
        let said = |state, salt: [u8; 32], secret: [u8; 32]| {
            workspace(state)
                .contradictions(Some(&salt), Some(&secret))
                .join("\n")
        };
        assert_eq!(said(own(), [0; 32], [0; 32]), "");
        assert_eq!(said(None, [0; 32], [0; 32]), "");
        assert!(said(None, [0; 32], [1; 32]).contains("of another cluster"));
        let other = said(own(), [1; 32], [0; 32]);
        assert!(
            other.contains("measurement salt differs") && other.contains("cluster ID is not"),
            "{other}"
        );
        let wrong = said(Some(state(&"ab".repeat(32), &zeros)), [0; 32], [0; 32]);
        assert!(wrong.contains("cluster ID is not"), "{wrong}");
        let short = said(Some(state("abcd", &zeros)), [0; 32], [0; 32]);
        assert!(short.contains("expected 64 hexadecimal digits"), "{short}");
        let missing = Workspace {
            master_secret: Err(Error::content("no such file")),
            ..workspace(None)
        };
        let missing = missing.contradictions(None, None);
        assert_eq!(missing, ["the master secret: no such file"]);
    }

    #[test]
    fn the_configuration_names_one_variant() {
        let variant = |attestation: &str| {
            let text = format!(
                "version: v4\nimage: v2.16.4\nname: constell\nkubernetesVersion: v1.29.8\nattestation:{attestation}\n"
            );
            OldConfig::parse(&yaml::document(&text).unwrap()).unwrap()
        };
        let measurements =
            "\n        measurements:\n            4: {expected: aa, warnOnly: false}";
        for (name, expected) in [
            ("awsSEVSNP", "aws-sev-snp"),
            ("awsNitroTPM", "aws-nitro-tpm"),
            ("azureSEVSNP", "azure-sev-snp"),
            ("azureTDX", "azure-tdx"),
            ("azureTrustedLaunch", "azure-trustedlaunch"),
            ("gcpSEVES", "gcp-sev-es"),
            ("gcpSEVSNP", "gcp-sev-snp"),
            ("qemuVTPM", "qemu-vtpm"),
            ("qemuTDX", "qemu-tdx"),
        ] {
            let config = variant(&format!("\n    {name}:{measurements}"));
            assert_eq!(
                (config.variant, config.image.as_str()),
                (Some(expected), "v2.16.4")
            );
        }
        assert_eq!(variant(" {}").variant, None);
        assert_eq!(variant("\n    later:\n        a: b").variant, None);
        let two = variant("\n    awsSEVSNP: {a: b}\n    qemuVTPM: {a: b}");
        assert_eq!(two.variant, None);
        assert_eq!(
            variant("\n    awsSEVSNP: {a: b}\n    qemuVTPM: null").variant,
            Some("aws-sev-snp")
        );
    }

    #[test]
    fn mutated_files_are_read_or_refused() {
        let text = format!(
            "version: v1\ninfrastructure: {{clusterEndpoint: a}}\nattestation: {{qemuVTPM: {{}}}}\nimage: v2\n\
             clusterValues: {{clusterID: {ID}, measurementSalt: {ID}}}\n"
        );
        let read = |bytes: &[u8]| {
            let value = yaml::document(str::from_utf8(bytes).ok()?).ok()?;
            OldConfig::parse(&value).ok()?;
            OldState::parse(&value).ok()
        };
        assert!(read(text.as_bytes()).is_some());
        let good = mutations(text.as_bytes(), 20_000)
            .filter(|bytes| read(bytes).is_some())
            .count();
        assert!((10..20_000).contains(&good), "{good}");
    }
}
