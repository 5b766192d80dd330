//! The tables of clouds and of attestation variants are the only places that list them: the programs' help texts and the Helm
//! chart agree with the tables, and no other source file names an entry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use support::ROOT;
use support::program::built;
use verifier::variant;

#[test]
fn the_chart_accepts_the_clouds_and_variants_of_the_tables() {
    let schema = fs::read_to_string(Path::new(ROOT).join("charts/firstlight/values.schema.json"));
    let schema: Value = serde_json::from_str(&schema.unwrap()).unwrap();
    let properties = &schema["properties"];
    assert_eq!(
        properties["attestationVariant"]["enum"],
        json!(variant::NAMES)
    );
    // an empty name means that the join service has no metadata service
    let clouds: Vec<_> = [""].iter().chain(&machines::NAMES).collect();
    assert_eq!(properties["cloudProvider"]["enum"], json!(clouds));
}

#[test]
fn each_help_text_lists_the_clouds_and_the_variants() {
    let (clouds, variants) = (machines::NAMES.join(", "), variant::NAMES.join(", "));
    for (program, arguments, listed) in [
        ("unlock", &["--help"][..], &[&clouds, &variants][..]),
        ("bootstrapper", &["--help"], &[&clouds, &variants]),
        ("join-service", &["--help"], &[&clouds, &variants]),
        ("key-service", &["--help"], &[&variants]),
    ] {
        let output = Command::new(built(program)).args(arguments).output();
        let help = String::from_utf8(output.unwrap().stdout).unwrap();
        for names in listed {
            let is_listed = |line: &str| line.contains(&format!(": {names}"));
            assert!(help.lines().any(is_listed), "{program}: {names}\n{help}");
        }
    }
}

#[test]
fn the_page_of_limits_lists_the_versions_of_kubernetes() {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/support.md")).unwrap();
    let rows =
        kubernetes::parameters::MINORS.map(|(minor, end)| format!("| v1.{minor} | {end} |\n"));
    assert!(
        page.contains(&rows.concat()),
        "expected in docs/support.md:\n{}",
        rows.concat()
    );
}

#[test]
fn each_variant_has_a_page_of_its_own() {
    let read = |path: &str| fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_default();
    let overview = read("docs/attestation.md");
    for name in variant::NAMES {
        let page = read(&format!("docs/platforms/{name}.md"));
        assert!(page.starts_with(&format!("# `{name}`: ")), "{name}");
        let row = format!("| [`{name}`](platforms/{name}.md) |");
        assert!(overview.contains(&row), "docs/attestation.md: no {row}");
        let headings: Vec<&str> = page.lines().filter(|it| it.starts_with("## ")).collect();
        let expected = [
            "## What to do",
            "## What is proven",
            "## What is trusted",
            "## What is not proven",
        ];
        assert_eq!(headings[..4], expected, "{name}");
    }
}

/// Returns the Rust files below `folder`, without those of tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = vec![];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && name != "tests" {
            files.extend(sources(&path));
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn only_its_file_and_the_table_name_a_cloud_or_a_variant() {
    let src = Path::new(ROOT).join("src");
    let files = sources(&src);
    let module = |name: &str| name.replace('-', "_");
    let entries = [
        ("attest", "attest/variant.rs", &variant::NAMES[..]),
        ("cloud", "machines/lib.rs", &machines::NAMES[..]),
    ];
    for (folder, table, names) in entries {
        for name in names {
            let own = src.join(folder).join(module(name));
            for file in &files {
                let in_its_room = file.starts_with(&own) || *file == own.with_extension("rs");
                // variants of one vendor share parts; the crate verifier has the other half of each
                let is_variant = folder != "cloud"
                    && [folder, "verifier"]
                        .iter()
                        .any(|it| file.starts_with(src.join(it)));
                // the files of the clouds, and the functions that choose among them
                let is_api = folder == "cloud"
                    && (file.starts_with(src.join("cloud_api"))
                        || file.starts_with(src.join("aws"))
                        // the list of crates, of which one has that name
                        || *file == src.join("base/logger.rs")
                        || *file == src.join("cloud/lib.rs"));
                // the URI of a key or of a store names the cloud that keeps it, and who asks EC2 about a machine names AWS
                let name_of_file = module(name);
                let is_of_keys = [
                    "kms/uri.rs",
                    // the table of stores
                    "keywrap/store/mod.rs",
                    &format!("keywrap/{name_of_file}_kms.rs"),
                    &format!("keywrap/{name_of_file}_credentials.rs"),
                    &format!("keywrap/store/{name_of_file}.rs"),
                    "collateral/ec2.rs",
                    "collateral/describe.rs",
                    // what a fresh node demands of a join service by its own platform, which no variant of unlock needs
                    "bootstrapper/platform.rs",
                ]
                .iter()
                .any(|known| *file == src.join(known));
                let is_table = *file == src.join(table);
                if in_its_room || is_variant || is_api || is_of_keys || is_table {
                    continue;
                }
                let text = fs::read_to_string(file).unwrap();
                let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
                let names_it = code.lines().filter(|line| {
                    // an example of a command line, a module, the head of a documentation page
                    let is_prose = line.trim_start().starts_with("//")
                        || line.contains("--csp")
                        // the crate of that name
                        || line.starts_with("use aws::")
                        || line.starts_with("pub mod ");
                    !is_prose
                        && (line.contains(&format!("{}::", module(name)))
                            || line.contains(&format!("\"{name}\"")))
                });
                let found: Vec<_> = names_it.collect();
                assert!(found.is_empty(), "{}: {found:#?}", file.display());
            }
        }
    }
}
