//! `firstlight roots`: the certificates of vendors that the programs trust.

use std::fmt::Write;

use clap::Args;
use serde_json::{Value, json};

use crate::shell::{
    error::Error,
    output::{Output, say_all},
};

/// List the certificates of vendors that the programs trust
///
/// A root is trusted only for what it certifies. The field `endorsementRoots` of a policy takes the names of those
/// that certify endorsement keys of TPMs.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  firstlight roots -o json | jq -r '.[].certificates[].sha256'")]
pub struct Options {
    /// The form of the output.
    #[command(flatten)]
    pub output: Output,
}

/// Runs the command.
pub fn run(output: Output) -> Result<(), Error> {
    say_all(&if output == Output::Json {
        format!("{:#}\n", json())
    } else {
        table()
    })
}

fn json() -> Value {
    let roots = ::roots::ALL.iter().map(|root| {
        let certificates = root.certificates().map(|certificate| {
            json!({
                "subject": certificate.subject,
                "sha256": certificate.sha256,
                "expires": certificate.expires,
            })
        });
        json!({
            "name": root.name,
            "vendor": root.vendor,
            "certifies": root.purpose.words(),
            "source": root.source,
            "certificates": certificates.collect::<Vec<_>>(),
        })
    });
    roots.collect()
}

/// Returns a paragraph for each root: its certificates with their fingerprints, the root first.
fn table() -> String {
    let mut text = String::new();
    for root in ::roots::ALL {
        // writing to a string does not fail
        let _ = writeln!(
            text,
            "{} ({}): {}",
            root.name,
            root.vendor,
            root.purpose.words()
        );
        for certificate in root.certificates() {
            let (sha256, expires) = (certificate.sha256, certificate.expires);
            let _ = writeln!(
                text,
                "  SHA-256 {sha256}  until {expires}  {}",
                certificate.subject
            );
        }
        let _ = writeln!(text, "  source: {}\n", root.source);
    }
    text.truncate(text.trim_end().len() + 1);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_have_every_certificate() {
        let (table, json) = (table(), json());
        let listed: Vec<_> = json
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|root| root["certificates"].as_array().unwrap())
            .map(|certificate| certificate["sha256"].as_str().unwrap())
            .collect();
        let all = ::roots::ALL.iter().flat_map(|root| root.certificates());
        assert_eq!(
            listed,
            all.map(|certificate| certificate.sha256)
                .collect::<Vec<_>>()
        );
        assert!(listed.iter().all(|sha256| table.contains(sha256)));
        assert!(table.ends_with("CA%202021.crt\n"), "{table}");
    }
}
