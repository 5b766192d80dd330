//! The operator's command in real shells and in readers of manual pages.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

static FIRSTLIGHT: LazyLock<String> = LazyLock::new(|| {
    support::program::built("firstlight")
        .to_str()
        .unwrap()
        .to_owned()
});

fn output(command: &mut Command) -> String {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && err.is_empty(),
        "{command:?}: {}\n{out}\n{err}",
        output.status
    );
    out
}

fn firstlight(args: &[&str]) -> String {
    output(Command::new(&*FIRSTLIGHT).args(args))
}

/// Returns bash's completions of the last word, in a folder with an operator's files.
fn bash(dir: &Path, words: &[&str]) -> Vec<String> {
    let script = "source <(\"$0\" completions bash); COMP_WORDS=(firstlight \"$@\"); COMP_CWORD=$#; \
                  _firstlight firstlight \"${@: -1}\" \"${@: -2:1}\" 2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut command = Command::new("bash");
    // compopt(1) fails outside of a completion; its message is suppressed
    command
        .args(["--norc", "-uc", script, &FIRSTLIGHT])
        .args(words)
        .current_dir(dir);
    output(&mut command)
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn bash_completes_commands_options_files_and_words() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("policy of ours.json"), "").unwrap();
    assert_eq!(bash(dir.path(), &["re"]), ["recover"]);
    assert_eq!(bash(dir.path(), &["init", "--pol"]), ["--policy"]);
    assert_eq!(
        bash(dir.path(), &["recover", "--policy", "x", "--statu"]),
        ["--status"]
    );
    assert_eq!(
        bash(dir.path(), &["recover", "--policy", "pol"]),
        ["policy of ours.json"]
    );
    assert_eq!(bash(dir.path(), &["completions", "z"]), ["zsh"]);
    assert!(bash(dir.path(), &["init", ""]).contains(&"--help".to_owned()));
}

#[test]
fn fish_completes_commands_and_options() {
    let dir = tempfile::tempdir().unwrap();
    let complete = |line: &str| -> Vec<String> {
        let script = format!(
            "'{}' completions fish | source; complete -C '{line}'",
            *FIRSTLIGHT
        );
        let mut command = Command::new("fish");
        let text = output(
            command
                .args(["--no-config", "-c", &script])
                .current_dir(dir.path())
                .env("HOME", dir.path()),
        );
        text.lines()
            .map(|line| line.split('\t').next().unwrap().to_owned())
            .collect()
    };
    assert_eq!(complete("firstlight rec"), ["recover"]);
    assert_eq!(complete("firstlight init --pol"), ["--policy"]);
    assert_eq!(complete("firstlight recover --statu"), ["--status"]);
    assert_eq!(complete("firstlight completions zs"), ["zsh"]);
}

/// zsh completes only at a terminal, which zsh/zpty makes. The test runs the completed line to see it.
#[test]
fn zsh_completes_commands_options_and_words() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("_firstlight"),
        firstlight(&["completions", "zsh"]),
    )
    .unwrap();
    let script = r#"
        zmodload zsh/zpty
        zpty shell 'TERM=vt100 zsh -f -i'
        zpty -w shell "fpath=(\$PWD \$fpath); autoload -Uz compinit; compinit -u -d \$PWD/dump"
        zpty -w shell 'firstlight() { print -r -- "r""un: $*." }'
        for line; do
            zpty -w shell "$line"$'\t'
            zpty -r shell text '*run: *.*'
            print -r -- "run: ${${text##*run: }%%.*}."
        done"#;
    let mut command = Command::new("timeout");
    command
        .args(["60", "zsh", "-f", "-c", script, "zsh"])
        .current_dir(dir.path())
        .env("HOME", dir.path());
    command.args([
        "firstlight rec",
        "firstlight init --pol",
        "firstlight completions z",
        "firstlight recover --statu",
        "firstlight verify --pol",
    ]);
    let run: Vec<String> = output(&mut command)
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    assert_eq!(
        run,
        [
            "run: recover.",
            "run: init --policy.",
            "run: completions zsh.",
            "run: recover --status.",
            "run: verify --policy."
        ]
    );
}

#[test]
fn an_unknown_shell_is_wrong_usage() {
    for args in [&["completions"][..], &["completions", "tcsh"]] {
        let output = Command::new(&*FIRSTLIGHT).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn the_manual_page_is_sound_and_says_what_help_says() {
    let page = firstlight(&["man"]);
    let mut lint = Command::new("mandoc");
    // clap_mangen writes more line breaks than it needs, which are warnings
    lint.args(["-Tlint", "-Werror"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut lint = lint.spawn().unwrap();
    lint.stdin
        .take()
        .unwrap()
        .write_all(page.as_bytes())
        .unwrap();
    let lint = lint.wait_with_output().unwrap();
    assert!(
        lint.status.success(),
        "{}",
        String::from_utf8_lossy(&lint.stdout)
    );

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("firstlight.1");
    std::fs::write(&file, page).unwrap();
    for reader in [&["man", "--warnings", "-l"][..], &["mandoc", "-Tutf8"]] {
        let mut command = Command::new(reader[0]);
        command
            .args(&reader[1..])
            .arg(&file)
            .env("MANWIDTH", "300")
            .env("LC_ALL", "C.UTF-8")
            .env("MAN_KEEP_FORMATTING", "");
        let shown = output(&mut command);
        // without the sequences for bold (a character, a backspace, the same character) and underlined text
        let text: Vec<char> = shown.chars().collect();
        let plain: String = (0..text.len())
            .filter(|i| text[*i] != '\u{8}' && text.get(i + 1) != Some(&'\u{8}'))
            .map(|i| text[i])
            .collect();
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let plain = words(&plain);
        for command in ["init", "recover", "measure", "completions", "man"] {
            let help = firstlight(&[command, "--help"]);
            let options = help
                .lines()
                .filter_map(|line| line.strip_prefix("      --"));
            for option in options {
                let name = format!("--{}", option.split("  ").next().unwrap());
                assert!(plain.contains(&words(&name)), "{name} in: {plain}");
            }
            let example = help.lines().last().unwrap().trim();
            assert!(plain.contains(&words(example)), "{example} in: {plain}");
        }
    }
}
