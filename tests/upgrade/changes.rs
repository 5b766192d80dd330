//! The page that says what this version changes for its users.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use common::previous;
use kubernetes::yaml;
use serde_json::Value;
use support::ROOT;
use support::program::built;

const PAGE: &str = include_str!("../../docs/changes.md");

/// Returns the page of options of the programs in a folder.
fn page_of_options(programs: &Path) -> String {
    let mut script = Command::new(Path::new(ROOT).join("tools/options.sh"));
    let printed = script.arg(programs).output().unwrap();
    assert!(printed.status.success(), "{script:?}");
    String::from_utf8(printed.stdout).unwrap()
}

/// Returns the options of each command in a page of options, without programs that one of the releases does not have. An option
/// begins its line, with at most six spaces before it; text that was wrapped has more.
fn options(page: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let commands = page.split("\n## `").skip(1);
    let of = |section| {
        let (name, help): (&str, &str) = str::split_once(section, '`').unwrap();
        let lines = help.lines().filter_map(|line| {
            let option = line.trim_start();
            let is_option = line.len() - option.len() <= 6;
            let (short, long) = option.split_once("--").filter(|_| is_option)?;
            (short.is_empty() || short.ends_with(", ") && short.len() == 4).then_some(long)
        });
        let words = lines.filter_map(|line| line.split([' ', '=']).next());
        (name, words.collect::<BTreeSet<&str>>())
    };
    let commands = commands.map(of);
    commands.filter(|(_, words)| !words.is_empty()).collect()
}

/// Returns the options of all commands of a program.
fn of_program<'a>(
    commands: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    program: &str,
) -> BTreeSet<&'a str> {
    let own = commands
        .iter()
        .filter(|(name, _)| name.split(' ').next() == Some(program));
    own.flat_map(|(_, options)| options).copied().collect()
}

/// Returns the paths of all values of a chart.
fn values(chart: &Path) -> BTreeSet<String> {
    fn leaves(path: &str, value: &Value, out: &mut BTreeSet<String>) {
        match value.as_object().filter(|fields| !fields.is_empty()) {
            Some(fields) if fields.keys().all(|name| !name.contains(['/', '.'])) => {
                for (name, value) in fields {
                    leaves(&format!("{path}.{name}"), value, out);
                }
            }
            _ => drop(out.insert(path.trim_start_matches('.').to_owned())),
        }
    }
    let text = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let mut out = BTreeSet::new();
    leaves("", &yaml::documents(&text).unwrap()[0], &mut out);
    out
}

/// An option that another command of the program had before means the same there, so only new words count.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn the_page_of_changes_names_each_new_and_each_missing_command_option_and_value() {
    let (before, now) = (previous::folder().join("source"), Path::new(ROOT));
    let before_page = page_of_options(&previous::folder().join("bin"));
    let now_page = page_of_options(built("firstlight").parent().unwrap());
    let (commands_before, commands) = (options(&before_page), options(&now_page));
    let mut words = BTreeSet::new();
    for (some, others) in [(&commands, &commands_before), (&commands_before, &commands)] {
        for (command, options) in some {
            let known = of_program(others, command.split(' ').next().unwrap());
            if others.contains_key(command) {
                words.extend(options.difference(&known).map(|word| format!("--{word}")))
            } else {
                words.insert(command.to_string());
            }
        }
    }
    let chart = Path::new("charts/firstlight");
    let (values_before, values) = (values(&before.join(chart)), values(&now.join(chart)));
    words.extend(values_before.symmetric_difference(&values).cloned());
    assert!(words.len() > 10, "{words:?}");
    let is_named = |word: &&String| {
        let ends = ['`', ' ', ',', ')'];
        ends.iter()
            .any(|end| PAGE.contains(&format!("{word}{end}")))
    };
    let unnamed: Vec<_> = words.iter().filter(|word| !is_named(word)).collect();
    assert!(
        unnamed.is_empty(),
        "docs/changes.md does not name {unnamed:?}"
    );
}

/// Each heading of a version has its page.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn the_page_of_changes_is_that_of_this_version() {
    let heading = format!("# What {} changes for you\n", env!("CARGO_PKG_VERSION"));
    assert!(PAGE.starts_with(&heading), "{heading}");
    let manifest = previous::folder().join("source/Cargo.toml");
    let manifest = fs::read_to_string(manifest).unwrap();
    let (_, version) = manifest.split_once("\nversion = \"").unwrap();
    let (version, _) = version.split_once('"').unwrap();
    assert!(PAGE.contains(&format!("\nFrom {version}. ")), "{version}");
}
