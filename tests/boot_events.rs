//! docs/boot.md explains each event that a node prints on its console, and no other; no child process can stop a boot silently.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every Rust file below `folder`.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files = vec![];
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// The string literals that are the first argument of `call` in a program's code, without its unit tests.
fn first_arguments(source: &str, call: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap();
    let argument = |(at, _): (usize, &str)| {
        let literal = code[at + call.len()..].trim_start().strip_prefix('"');
        assert!(
            literal.is_some() || !code[..at].trim_end().ends_with("timeline"),
            "the name of an event is a literal, so that it can be found: {}",
            &code[at..].lines().next().unwrap()
        );
        Some(literal?.split('"').next().unwrap().to_owned())
    };
    code.match_indices(call).filter_map(argument).collect()
}

/// The events of the program in the folder `program`, and of all crates that are no program of a node.
fn events_of(program: &str) -> BTreeSet<String> {
    let other = ["unlock", "bootstrapper"]
        .into_iter()
        .find(|it| *it != program);
    let other = root().join("src").join(other.unwrap());
    let mut names = BTreeSet::new();
    for file in rust_files(&root().join("src")) {
        if !file.starts_with(&other) {
            names.extend(first_arguments(&read(&file), ".event("));
        }
    }
    names
}

/// The events of the shell scripts of the initramfs: `event NAME`, `fail`, and what they print themselves.
fn events_of_init() -> BTreeSet<String> {
    let init = read(&root().join("initramfs/init"));
    let words: Vec<_> = init.split_whitespace().collect();
    let clean = |word: &str| {
        word.trim_matches(|c: char| !c.is_ascii_alphanumeric())
            .to_owned()
    };
    let mut names: BTreeSet<_> = words
        .windows(2)
        .filter(|pair| pair[0] == "event")
        .map(|pair| clean(pair[1]))
        .collect();
    for script in ["os-init", "udhcpc.script"] {
        let script = read(&root().join("initramfs").join(script));
        let printed = script.split("firstlight[init] ${up}s ").skip(1);
        names.extend(printed.map(|rest| clean(rest.split_whitespace().next().unwrap())));
    }
    names
}

/// The first cells of the tables under the heading of `stage`, without the tables of errors.
fn cells(stage: &str) -> Vec<String> {
    let page = read(&root().join("docs/boot.md"));
    let heading = format!("## `firstlight[{stage}]`");
    let (_, section) = page
        .split_once(&heading)
        .unwrap_or_else(|| panic!("docs/boot.md has no heading {heading}"));
    let section = section.split("\n#").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| format!("`{}", row.split(" | ").next().unwrap()))
        .collect()
}

/// The names in these cells: `phase` for `` `phase: state disk` ``; both names for a cell with two code spans.
fn names_in(cells: &[String], separators: &[char]) -> BTreeSet<String> {
    let spans = cells
        .iter()
        .flat_map(|cell| cell.split('`').skip(1).step_by(2));
    spans
        .map(|span| span.split(separators).next().unwrap().to_owned())
        .collect()
}

fn assert_same(stage: &str, printed: BTreeSet<String>, documented: BTreeSet<String>) {
    assert!(
        !printed.is_empty(),
        "no event of {stage} was found in its sources"
    );
    let missing: Vec<_> = printed.difference(&documented).collect();
    let stale: Vec<_> = documented.difference(&printed).collect();
    assert!(
        missing.is_empty(),
        "docs/boot.md, {stage}: no row explains {missing:?}"
    );
    assert!(
        stale.is_empty(),
        "docs/boot.md, {stage}: nothing prints {stale:?} any more"
    );
}

#[test]
fn each_event_of_unlock_is_explained() {
    assert_same(
        "unlock",
        events_of("unlock"),
        names_in(&cells("unlock"), &[':']),
    );
}

#[test]
fn each_event_of_bootstrapper_is_explained() {
    assert_same(
        "run",
        events_of("bootstrapper"),
        names_in(&cells("run"), &[':']),
    );
}

#[test]
fn each_event_of_the_initramfs_is_explained() {
    // a module's name may follow the first word
    assert_same(
        "init",
        events_of_init(),
        names_in(&cells("init"), &[':', ' ']),
    );
}

#[test]
fn each_phase_of_a_set_up_is_explained() {
    let sources = rust_files(&root().join("src/bootstrapper"));
    let printed = sources
        .iter()
        .flat_map(|file| first_arguments(&read(file), ".phase("));
    let cells = cells("run");
    let phases = cells
        .iter()
        .filter_map(|cell| cell.strip_prefix("`phase: "));
    let documented = phases.map(|cell| cell.trim_end_matches('`').to_owned());
    assert_same("phases", printed.collect(), documented.collect());
}

/// A program that hangs would stop the boot without a message. `base::child_process` gives each a time limit and a stop.
#[test]
fn one_module_starts_child_processes() {
    let starts = |file: &PathBuf| {
        let source = read(file);
        let code = source.split("#[cfg(test)]\nmod tests").next().unwrap();
        let starting = [".spawn()", ".output()", ".status()"];
        code.contains("Command::new") && starting.iter().any(|call| code.contains(call))
            || code.contains(".process_group(")
    };
    let files = rust_files(&root().join("src"));
    let shipped = files.iter().filter(|file| !file.ends_with("tests.rs"));
    let starting: Vec<_> = shipped.filter(|file| starts(file)).collect();
    assert_eq!(starting, [&root().join("src/base/child_process/run.rs")]);
}

#[test]
fn the_page_is_found_from_the_first_pages() {
    assert!(read(&root().join("README.md")).contains("(docs/boot.md"));
    assert!(read(&root().join("docs/architecture.md")).contains("(boot.md"));
}
