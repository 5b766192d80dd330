//! The options that several commands share and that belong to no other module.

use std::path::Path;
use std::time::Duration;

use base::machines::Cloud;
use base::options::Opt;
use base::program;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cloud::Machines;
use cloud_api::listed;
use kubernetes::services::MetadataService;
use verifier::{Variant, variant};

use crate::shell::{error::Error, files, usage::Given};
use crate::workspace::connect;

/// The policy of a node.
pub const POLICY: Opt = Opt::needed(
    "policy",
    "FILE",
    "the attestation policy that the node must meet (JSON)",
);

/// The attestation variant of the nodes; [`variant_of`] reads it.
pub const VARIANT: Opt = Opt::value(
    "attestation-variant",
    "VARIANT",
    "how the nodes attest themselves",
)
.one_of(&variant::NAMES)
.was("variant")
.or(variant::DEFAULT);

/// The limit of a command, which [`time`] parses.
pub const TIMEOUT: Opt = Opt::value(
    "timeout",
    "TIME",
    "the limit for the whole command, as 90s, 10m or 1h",
);

/// The names of the clouds, and `none`.
const CLOUDS: [&str; base::machines::NAMES.len() + 1] = {
    let mut names = ["none"; base::machines::NAMES.len() + 1];
    let mut index = 0;
    while index < base::machines::NAMES.len() {
        names[index] = base::machines::NAMES[index];
        index += 1;
    }
    names
};

/// The cloud of a new cluster.
pub const CLOUD_PROVIDER: Opt = Opt::value(
    "cloud-provider",
    "CLOUD",
    "the cloud whose metadata service the join service asks for the machines and their roles; with none, it accepts machines \
     of any name, but no control planes",
).one_of(&CLOUDS)
.was("csp")
.or(base::machines::DEFAULT.name());

/// The cloud of a cluster that may exist.
pub const CLOUD_PROVIDER_OF_APPLY: Opt = Opt::value(
    "cloud-provider",
    "CLOUD",
    "the cloud whose metadata service the join service asks for the machines and their roles; with none, it accepts machines \
     of any name, but no control planes; without it the cluster's stays, and a new one is qemu",
).one_of(&CLOUDS)
.was("csp");

/// The address of the metadata service; [`metadata_of`] reads both.
pub const METADATA: Opt = Opt::value(
    "metadata",
    "URL",
    "the address of the metadata service, as seen from the control planes: http://HOST[:PORT]; by default the cloud's usual \
     address; with --cloud-provider static, file:PATH is the list of machines",
);

/// Whether the command returns before the services are ready.
pub const SKIP_WAIT: Opt = Opt::flag(
    "skip-wait",
    "return as soon as the API server has accepted the services; do not roll back if they never get ready",
)
// Constellation's name
.was("skip-helm-wait");

/// Returns the attestation variant of the nodes: from the option, else from the policy, else the
/// option's default.
pub fn variant_of(given: &Given) -> Result<&'static Variant, Error> {
    match named_variant(given)? {
        Some(variant) => Ok(variant),
        None => given.parsed("attestation-variant", Variant::named),
    }
}

/// Returns the attestation variant from the option, else from the policy.
pub fn named_variant(given: &Given) -> Result<Option<&'static Variant>, Error> {
    if given.has("attestation-variant") {
        let named = given.parsed("attestation-variant", Variant::named);
        return named.map(Some);
    }
    let has_option = |name: &&str| given.command().options.iter().any(|it| it.name == *name);
    let mut policies = ["policy", "add-to"].into_iter().filter(has_option);
    Ok(policies.find_map(|option| named_in(&given.path(option))))
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

/// Returns the metadata service for the join service. Checks only the form of the options: the
/// address may be reachable only from within the cluster.
pub fn metadata_of(given: &Given) -> Result<MetadataService, Error> {
    let cloud = given.text("cloud-provider")?.to_ascii_lowercase();
    if given.value("cloud-provider").is_none() {
        return Err(Error::Usage(
            "--metadata: --cloud-provider is missing: it names the cloud whose service is at this address".into(),
        ));
    }
    let url = given.value("metadata").map(program::text).transpose()?;
    if cloud == "none" {
        return match url {
            Some(_) => Err(Error::Usage(
                "--metadata: --cloud-provider none has no metadata service".into(),
            )),
            None => Ok(MetadataService {
                cloud: None,
                url: None,
            }),
        };
    }
    let url = match url.as_deref().and_then(|url| url.strip_prefix("file:")) {
        Some(path) => Some(inline(path.as_ref())?),
        None => url,
    };
    let named = Cloud::named(&cloud);
    match named.and_then(|cloud| cloud_api::metadata(cloud, url.as_deref())) {
        Ok(_) => Ok(MetadataService {
            cloud: Some(cloud),
            url,
        }),
        Err(error @ base::machines::Error::Url { .. }) => {
            Err(Error::Usage(format!("--metadata: {error}")))
        }
        Err(error) => Err(Error::Usage(format!("--cloud-provider: {error}, or none"))),
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
    Err(Error::failed(format!("{}: {why}", file.display())))
}

/// Parses a list of registers.
pub fn pcrs(text: &str) -> Result<Vec<u32>, &'static str> {
    let pcrs: Result<_, _> = text.split(',').map(str::parse).collect();
    pcrs.map_err(|_| "expected numbers separated by commas, as 4,9,15")
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
    use crate::cluster::{apply, init};
    use crate::commands;

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

    /// Parses the command line after `firstlight`.
    fn given(args: &[&str]) -> Given {
        let program = &commands::PROGRAM;
        let command = program
            .commands
            .iter()
            .find(|command| command.name == args[0])
            .unwrap();
        command
            .parse(
                program,
                vec![],
                lexopt::Parser::from_args(&args[1..]),
                |_| Ok(vec![]),
            )
            .unwrap()
    }

    fn refusal<T>(options: Result<T, Error>) -> String {
        match options.err() {
            Some(Error::Usage(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_services_are_told_which_metadata_service_to_ask() {
        let apply = |more: &[&str]| {
            let args = [&["apply", "--policy", "p", "--image", "i"], more].concat();
            apply::options(&given(&args)).map(|options| options.metadata.unwrap_or_default())
        };
        let init = |more: &[&str]| {
            let args = [
                &[
                    "init",
                    "--endpoint",
                    "h",
                    "--policy",
                    "p",
                    "--init-secret",
                    "s",
                ],
                more,
            ]
            .concat();
            init::options(&given(&args))
                .map(|options| options.kubernetes.map(|kubernetes| kubernetes.metadata))
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
                "the cloud \"home\" is not supported; supported: ",
            ),
            (
                &["--cloud-provider", ""],
                "the cloud \"\" is not supported; supported: ",
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
        assert!(refusal(init(&["--metadata", url])).contains("--kubernetes-version is missing"));
        assert!(
            refusal(init(&[&cluster[..2], &["--metadata", url]].concat()))
                .contains("--image is missing")
        );
    }
}
