//! The tables of clouds, of attestation variants and of options are the only places that list them: the programs' help texts, the
//! Helm chart and the documents agree with the tables, and no other source file names a cloud or a variant.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use base::options::{self, Opt};
use node::settings::OF_ONE_PROGRAM;
use serde_json::{Value, json};
use support::ROOT;
use support::program::built;
use verifier::variant;

/// Returns the help text of a program.
fn help(program: &str) -> String {
    let output = Command::new(built(program)).arg("--help").output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Returns the words of which the value of an option is one: what a help text has between the last parentheses about the option.
fn words(help: &str, option: &str) -> Vec<String> {
    let first = format!("  --{option} ");
    let mut lines = help.lines().skip_while(|line| !line.starts_with(&first));
    let row = lines.next().unwrap().to_owned();
    // the further lines are indented
    let more = lines.take_while(|line| line.starts_with("    "));
    let row = more.fold(row, |row, line| format!("{row} {}", line.trim()));
    let words = row.rsplit_once('(').unwrap().1;
    let words = words.split_once(')').unwrap().0.split(", ");
    words.map(str::to_owned).collect()
}

#[test]
fn the_chart_accepts_the_words_that_the_services_accept() {
    let schema = fs::read_to_string(Path::new(ROOT).join("charts/firstlight/values.schema.json"));
    let schema: Value = serde_json::from_str(&schema.unwrap()).unwrap();
    let help = help("join-service");
    let of_service = "/joinService/properties";
    for (value, option, can_be_empty) in [
        (
            "/attestationVariant".to_owned(),
            "attestation-variant",
            false,
        ),
        // an empty value means that the option is not set
        ("/cloudProvider".to_owned(), "cloud-provider", true),
        ("/logFormat".to_owned(), "log-format", false),
        (format!("{of_service}/tcbUpdate"), "tcb-update", true),
        (format!("{of_service}/require"), "require", true),
    ] {
        let accepted = &schema["properties"].pointer(&value).unwrap()["enum"];
        let empty = can_be_empty.then(String::new).into_iter();
        let expected: Vec<String> = empty.chain(words(&help, option)).collect();
        assert_eq!(*accepted, json!(expected), "{value}");
    }
}

#[test]
fn the_chart_gives_the_services_options_that_they_have() {
    let mut checked = 0;
    for program in ["join-service", "key-service"] {
        let help = help(program);
        let path = format!("charts/firstlight/templates/{program}.yaml");
        let template = fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
        let arguments = template
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- --"));
        for option in arguments {
            checked += 1;
            assert!(
                help.contains(&format!("--{option} ")),
                "{program}: --{option}"
            );
        }
    }
    assert!(checked > 10, "{checked} options");
}

#[test]
fn each_help_text_lists_the_clouds_and_the_variants() {
    for program in ["unlock", "bootstrapper", "join-service", "key-service"] {
        let help = help(program);
        assert_eq!(
            words(&help, "attestation-variant"),
            variant::NAMES,
            "{program}"
        );
        if program != "key-service" {
            assert_eq!(
                words(&help, "cloud-provider"),
                base::machines::NAMES,
                "{program}"
            );
        }
    }
}

/// Returns the settings among options.
fn settings(options: Vec<&'static Opt>) -> impl Iterator<Item = &'static Opt> {
    options.into_iter().filter(|opt| opt.is_setting)
}

#[test]
fn each_program_of_a_node_knows_the_settings_of_the_other_one() {
    let unlock = options::of(unlock::options::OPTIONS);
    let own = [unlock, options::of(bootstrapper::options::OPTIONS)].concat();
    let form = |opt: &Opt| match opt.value {
        "" => opt.name.to_owned(),
        _ => format!("{}=", opt.name),
    };
    let own: BTreeSet<String> = settings(own).map(form).collect();
    assert_eq!(own, OF_ONE_PROGRAM.map(str::to_owned).into());
}

#[test]
fn the_page_of_settings_has_each_setting_and_no_other() {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/images/settings.md")).unwrap();
    let rows = page
        .lines()
        .skip_while(|line| !line.starts_with("| setting |"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let listed: BTreeSet<&str> = rows.map(|row| row.split('`').nth(1).unwrap()).collect();
    let shared = options::of(node::options::OPTIONS);
    let unlock = options::of(unlock::options::OPTIONS);
    let all = [shared, unlock, options::of(bootstrapper::options::OPTIONS)].concat();
    assert_eq!(listed, settings(all).map(|opt| opt.name).collect());
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
fn the_page_of_refusals_lists_each_kind() {
    let source = fs::read_to_string(Path::new(ROOT).join("src/refusal/lib.rs")).unwrap();
    let page = fs::read_to_string(Path::new(ROOT).join("docs/refusals.md")).unwrap();
    let names: Vec<&str> = (source.lines())
        .filter_map(|line| line.trim().strip_prefix("Kind::")?.split('"').nth(1))
        .collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        let row = format!("| `{name}` |");
        assert!(page.contains(&row), "docs/refusals.md: no {row}");
    }
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
        ("cloud", "base/machines.rs", &base::machines::NAMES[..]),
    ];
    for (folder, table, names) in entries {
        for name in names {
            let own = src.join(folder).join(module(name));
            for file in &files {
                let in_its_room = file.starts_with(&own) || *file == own.with_extension("rs");
                // variants of one vendor share parts; the other part of each variant is in the crate verifier
                let is_variant = folder != "cloud"
                    && [folder, "verifier"]
                        .iter()
                        .any(|it| file.starts_with(src.join(it)));
                // the files of the clouds, and the functions that choose among them
                let is_api = folder == "cloud"
                    && (file.starts_with(src.join("cloud_api"))
                        // the list of crates; one of them has that name
                        || *file == src.join("base/logger.rs")
                        || *file == src.join("cloud/lib.rs"));
                // the URI of a key or of a store names the cloud that keeps it, and the programs that ask EC2 about a machine name AWS
                let name_of_file = module(name);
                let is_of_keys = [
                    "base/master_secret/uri.rs",
                    // the table of stores
                    "keywrap/store/mod.rs",
                    &format!("keywrap/{name_of_file}_kms.rs"),
                    &format!("keywrap/{name_of_file}_credentials.rs"),
                    &format!("keywrap/store/{name_of_file}.rs"),
                    "collateral/ec2.rs",
                    "collateral/describe.rs",
                    // the requirements of a fresh node on a join service, by its own platform; no variant of unlock needs them
                    "bootstrapper/trust/platform.rs",
                ]
                .iter()
                .any(|known| *file == src.join(known));
                let is_table = *file == src.join(table);
                if in_its_room || is_variant || is_api || is_of_keys || is_table {
                    continue;
                }
                let text = fs::read_to_string(file).unwrap();
                let text = text.replace("\npub mod tests", "\nmod tests");
                let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
                let names_it = code.lines().filter(|line| {
                    // an example of a command line, a module, the head of a documentation page
                    let is_prose = line.trim_start().starts_with("//")
                        || line.contains("--csp")
                        // signed requests, which other programs of AWS need, too
                        || line.starts_with("use cloud_api::aws::")
                        // a vendor's folder of variants: the folder of AWS has the cloud's name
                        || line.starts_with("pub use platforms::")
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

/// The log has other levels for libraries.
#[test]
fn the_log_knows_each_crate_of_the_project() {
    let src = Path::new(ROOT).join("src");
    let text = fs::read_to_string(src.join("base/logger.rs")).unwrap();
    let list = text.split("const OURS: &str = \"").nth(1).unwrap();
    let list = list.split('"').next().unwrap().replace('\\', " ");
    let listed: Vec<_> = list.split_whitespace().map(str::to_owned).collect();
    let folders = fs::read_dir(&src).unwrap();
    let mut crates: Vec<_> = folders
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    crates.sort();
    assert_eq!(listed, crates);
}

/// Targets of make that build, install or print something, or that another target runs.
const NO_TESTS: [&str; 13] = [
    "help",
    "setup",
    "build",
    "lint",
    "unit",
    "boot",
    "check-deps",
    "image",
    "mkosi",
    "proto",
    "release",
    "nightly",
    "nightly-due",
];
/// Takes an hour, for a kernel that changes once in some months.
const BY_HAND: &str = "reproducible-kernel";

#[test]
fn the_nightly_run_has_each_target_that_tests_and_covers_what_is_shipped() {
    let read = |name: &str| fs::read_to_string(Path::new(ROOT).join(name)).unwrap();
    let makefile = read("Makefile");
    let described = makefile.lines().filter(|line| line.contains(" ## "));
    let targets: BTreeSet<&str> = described
        .map(|line| line.split(':').next().unwrap())
        .collect();
    let nightly = read("tests/nightly.tsv");
    let rows: Vec<[&str; 3]> = (nightly.lines())
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split('\t').collect::<Vec<_>>().try_into().unwrap())
        .collect();
    let listed: BTreeSet<&str> = rows.iter().map(|[target, ..]| *target).collect();
    let others: BTreeSet<&str> = NO_TESTS.into_iter().chain([BY_HAND]).collect();
    assert_eq!(listed.len(), rows.len(), "a target is listed twice");
    assert_eq!(&listed | &others, targets);

    let paths = rows.iter().flat_map(|[_, minutes, paths]| {
        assert!(minutes.parse::<u32>().is_ok(), "{minutes}");
        paths.split(' ')
    });
    let paths: BTreeSet<&str> = paths.filter(|path| *path != ".").collect();
    for path in &paths {
        assert!(Path::new(ROOT).join(path).exists(), "{path} is not there");
    }
    for shipped in [
        "src",
        "charts",
        "initramfs",
        "mkosi",
        "systemd",
        "packaging",
        "infra",
        "docs/clouds",
    ] {
        assert!(
            paths.contains(shipped),
            "no target but `test` covers {shipped}"
        );
    }
}
