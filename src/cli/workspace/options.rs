//! The options that several commands share and that belong to no other module.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base::crypto::CLUSTER_ID_LEN;
use base::machines::Cloud;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cloud::Machines;
use cloud_api::listed;
use kubernetes::services::MetadataService;
use verifier::{KeyName, Policy, Variant, variant};

use crate::shell::{error::Error, files};
use crate::workspace::{
    connect::{self, KeyOptions},
    sources::SourceOptions,
    state::{ClusterOptions, State},
};

/// The attestation variant of the nodes.
#[derive(Debug, Args)]
pub struct VariantOption {
    #[arg(
        long,
        alias = "variant",
        value_name = "VARIANT",
        value_parser = PossibleValuesParser::new(variant::NAMES).try_map(|name| Variant::named(&name).map_err(|it| it.to_string())),
        help = format!("How the nodes attest themselves; by default as the policy says, else {}", variant::DEFAULT),
    )]
    pub attestation_variant: Option<&'static Variant>,
}

impl VariantOption {
    /// Returns the variant: from the option, else from the policy, else the default.
    pub fn of(&self, policy: Option<&Path>) -> Result<&'static Variant, Error> {
        match self.named(policy) {
            Some(variant) => Ok(variant),
            None => Variant::named(variant::DEFAULT).map_err(Error::content),
        }
    }

    /// Returns the variant from the option, else from the policy.
    pub fn named(&self, policy: Option<&Path>) -> Option<&'static Variant> {
        self.attestation_variant.or_else(|| named_in(policy?))
    }
}

/// By what a node is judged.
#[derive(Debug, Args)]
pub struct PolicyOptions {
    /// The attestation policy that the node must meet (JSON)
    #[arg(long, value_name = "FILE")]
    pub policy: PathBuf,
    #[command(flatten)]
    attestation: VariantOption,
    #[command(flatten)]
    pub sources: SourceOptions,
}

impl PolicyOptions {
    /// Returns the attestation variant of the node.
    pub fn variant(&self) -> Result<&'static Variant, Error> {
        self.attestation.of(Some(&self.policy))
    }
}

/// What a machine must be.
#[derive(Debug)]
pub struct Expectation {
    /// The attestation policy that the machine must meet.
    pub policy: PathBuf,
    /// The attestation variant of the machine.
    pub variant: &'static Variant,
    /// Additional attestation keys that are accepted.
    pub keys: Vec<KeyName>,
    /// The state file, which has the cluster's ID and its nodes' attestation keys; it may be missing.
    pub state: PathBuf,
    /// The cluster's ID; replaces the one in the state file.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
}

impl Expectation {
    /// Returns what the command line says.
    pub fn of(
        policy: PolicyOptions,
        keys: KeyOptions,
        cluster: ClusterOptions,
    ) -> Result<Expectation, Error> {
        Ok(Expectation {
            variant: policy.variant()?,
            policy: policy.policy,
            keys: keys.attestation_key,
            state: cluster.state,
            cluster_id: cluster.cluster_id,
        })
    }

    /// Reads the policy for machines of this variant, which also accepts the keys in the state file, and the cluster's ID.
    pub fn read(&self, variant: &Variant) -> Result<(Policy, Option<[u8; CLUSTER_ID_LEN]>), Error> {
        let state = State::find(&self.state)?;
        let known = state.iter().flat_map(|state| &state.attestation_keys);
        let policy = connect::read_policy_with(variant, &self.policy, &self.keys, known.copied())?;
        let of_state = state.as_ref().and_then(|state| state.cluster_id);
        Ok((policy, self.cluster_id.or(of_state)))
    }
}

/// The metadata service that the join service asks.
#[derive(Debug, Args)]
pub struct MetadataOptions {
    /// The cloud whose metadata service the join service asks for the machines and their roles; with none, it accepts machines
    /// of any name, but no control planes
    #[arg(
        long,
        alias = "csp",
        value_name = "CLOUD",
        ignore_case = true,
        value_parser = PossibleValuesParser::new(["none"].into_iter().chain(base::machines::NAMES)),
    )]
    cloud_provider: Option<String>,
    /// The address of the metadata service, as seen from the control planes: http://HOST[:PORT]; by default the cloud's usual
    /// address; with --cloud-provider static, file:PATH is the list of machines
    #[arg(long, value_name = "URL")]
    metadata: Option<String>,
}

/// Returns the attestation variant that a policy names. Does not read a file that cannot be read
/// twice, such as a pipe. Reports no error in the policy: the command that uses the policy does.
pub fn named_in(policy: &Path) -> Option<&'static Variant> {
    let is_file = std::fs::metadata(policy).is_ok_and(|it| it.is_file());
    let policy = is_file
        .then(|| connect::read_policy(policy).ok())
        .flatten()?;
    Variant::named(policy.variant()?).ok()
}

impl MetadataOptions {
    /// Returns the metadata service for the join service, if its cloud is given. Checks only the form of the options: the
    /// address may be reachable only from within the cluster.
    pub fn service(self) -> Result<Option<MetadataService>, Error> {
        let cloud = match (self.cloud_provider, &self.metadata) {
            (Some(cloud), _) => cloud.to_ascii_lowercase(),
            (None, None) => return Ok(None),
            (None, Some(_)) => {
                return Err(Error::Usage(
                    "--metadata: --cloud-provider is missing: it names the cloud whose service is at this address".into(),
                ));
            }
        };
        let url = match self.metadata {
            Some(_) if cloud == "none" => {
                return Err(Error::Usage(
                    "--metadata: --cloud-provider none has no metadata service".into(),
                ));
            }
            Some(url) => Some(match url.strip_prefix("file:") {
                Some(path) => inline(path.as_ref())?,
                None => url,
            }),
            None => None,
        };
        if cloud == "none" {
            return Ok(Some(MetadataService { cloud: None, url }));
        }
        let named = Cloud::named(&cloud);
        match named.and_then(|cloud| cloud_api::metadata(cloud, url.as_deref())) {
            Ok(_) => Ok(Some(MetadataService {
                cloud: Some(cloud),
                url,
            })),
            Err(error) => Err(Error::Usage(format!("--metadata: {error}"))),
        }
    }
}

/// Returns the content of a list of machines, because the join service cannot read the operator's
/// file.
fn inline(file: &Path) -> Result<String, Error> {
    // an argument of a program has at most 128 KiB (Linux)
    const MAX_LIST: usize = 90 << 10;
    let list = files::read(file)?;
    let machines = Machines::parse(&list);
    let checked = machines.and_then(|it| listed::init_secret_hash(&it).map(drop));
    let why = match checked {
        Ok(()) if list.len() <= MAX_LIST => {
            return Ok(format!("base64:{}", STANDARD.encode(&*list)));
        }
        Ok(()) => format!("it has more than {MAX_LIST} bytes: use `firstlight metadata serve`"),
        Err(error) => error.to_string(),
    };
    Err(Error::content(format!("{}: {why}", file.display())))
}

/// Returns the parser of a value that is one of these words.
pub fn words<T: Clone + Send + Sync + 'static, const N: usize>(
    all: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let names = all.clone().map(|(word, _)| word);
    PossibleValuesParser::new(names).try_map(move |given| {
        let found = all.iter().find(|(word, _)| *word == given);
        found.map(|(_, value)| value.clone()).ok_or("unknown word")
    })
}

/// Parses a whole number of seconds, minutes or hours, from a second to a day. A number without a
/// unit means seconds.
pub fn time(text: &str) -> Result<Duration, &'static str> {
    let seconds = || {
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[number.len()..] {
            "" | "s" => 1,
            "m" => 60,
            "h" => 3600,
            _ => return None,
        };
        let seconds = number.parse::<u64>().ok()?.checked_mul(unit)?;
        (1..=24 * 3600)
            .contains(&seconds)
            .then(|| Duration::from_secs(seconds))
    };
    seconds().ok_or("expected 1s to 24h, as 90, 90s, 10m or 1h")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::{self, Command};

    #[test]
    fn times_are_seconds_minutes_or_hours_within_a_day() {
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(time("3"), Ok(Duration::from_secs(3)));
        assert_eq!(time("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(time("24h"), Ok(Duration::from_secs(86400)));
        for text in [
            "",
            "s",
            "0s",
            "25h",
            "-1s",
            "1.5h",
            "0",
            "+",
            "10d",
            "10ms",
            "99999999999999999999s",
            "1ü",
            "99999999999999999h",
        ] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    fn refusal<T>(options: Result<T, Error>) -> String {
        match options.err() {
            Some(error) if error.exit_code() == base::program::USAGE => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn parsed(args: &[&str], more: &[&str]) -> Result<Command, Error> {
        let all = [&["firstlight"], args, more].concat();
        let all: Vec<_> = all.into_iter().map(Into::into).collect();
        commands::parse(&all).map(|(_, command)| command)
    }

    #[test]
    fn the_services_are_told_which_metadata_service_to_ask() {
        let apply = |more: &[&str]| match parsed(&["apply", "--policy", "p", "--image", "i"], more)?
        {
            Command::Apply(it) => Ok(it.options()?.metadata.unwrap_or_default()),
            _ => panic!(),
        };
        let needed = [
            "init",
            "--endpoint",
            "h",
            "--policy",
            "p",
            "--init-secret",
            "s",
        ];
        let init = |more: &[&str]| match parsed(&needed, more)? {
            Command::Init(it) => Ok(it
                .options()?
                .kubernetes
                .map(|kubernetes| kubernetes.metadata)),
            _ => panic!(),
        };
        let (url, cluster) = (
            "http://10.9.0.1:81",
            ["--kubernetes-version", "v1.34.4", "--image", "i"],
        );
        let of = |cloud: Option<&str>, url: Option<&str>| MetadataService {
            cloud: cloud.map(Into::into),
            url: url.map(Into::into),
        };
        for (more, expected) in [
            (&[][..], MetadataService::default()),
            (
                &["--cloud-provider", "qemu", "--metadata", url],
                of(Some("qemu"), Some(url)),
            ),
            (&["--csp", "QEMU"], of(Some("qemu"), None)),
            (&["--cloud-provider", "none"], of(None, None)),
        ] {
            assert_eq!(apply(more).unwrap(), expected);
            assert_eq!(
                init(&[&cluster[..], more].concat()).unwrap().unwrap(),
                expected
            );
        }
        for (more, problem) in [
            (
                &["--cloud-provider", "qemu", "--metadata", "10.9.0.1:81"][..],
                "--metadata: metadata: \"10.9.0.1:81\" is not a valid address",
            ),
            (
                &["--cloud-provider", "qemu", "--metadata", ""],
                "--metadata: metadata: \"\" is not a valid address",
            ),
            (
                &["--metadata", url, "--cloud-provider", "none"],
                "--cloud-provider none has no metadata service",
            ),
            (
                &["--cloud-provider", "home"],
                "invalid value 'home' for '--cloud-provider <CLOUD>'",
            ),
            (
                &["--cloud-provider", ""],
                "a value is required for '--cloud-provider <CLOUD>'",
            ),
        ] {
            for text in [
                refusal(apply(more)),
                refusal(init(&[&cluster[..], more].concat())),
            ] {
                assert!(text.contains(problem), "{text}");
            }
        }
        // the default is for a new cluster; an existing one may be in another cloud
        let alone = init(&[&cluster[..], &["--metadata", url]].concat());
        assert_eq!(alone.unwrap().unwrap(), of(Some("qemu"), Some(url)));
        assert!(refusal(apply(&["--metadata", url])).contains("--cloud-provider is missing"));
        // without the services nothing uses this option
        assert!(refusal(init(&["--metadata", url])).contains("--kubernetes-version <VERSION>"));
        assert!(
            refusal(init(&[&cluster[..2], &["--metadata", url]].concat()))
                .contains("--image <IMAGE>")
        );
    }
}
