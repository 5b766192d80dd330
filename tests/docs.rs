//! Checks the documents against the repository and the programs: each page is in the book, the target of each link exists, each
//! command line in a block of code is valid.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use support::ROOT;
use support::program::{PROGRAMS, built};

/// A page: its path in the repository, and its text.
struct Page {
    path: PathBuf,
    text: String,
}

/// A line of a page.
enum Line<'a> {
    /// A line of text, not of a block of code.
    Text(&'a str),
    /// A line of a block of code.
    Code(&'a str),
}

impl Page {
    fn read(path: &Path) -> Page {
        let text = fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
        Page {
            path: path.to_owned(),
            text,
        }
    }

    /// Returns the lines without the fences of blocks of code, and without diagrams.
    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        // the language of the present block
        let mut block = None;
        self.text.lines().filter_map(move |line| {
            let fence = line.trim_start().strip_prefix("```");
            match (block, fence) {
                (None, Some(language)) => block = Some(language),
                (Some(_), Some(_)) => block = None,
                (None, None) => return Some(Line::Text(line)),
                (Some("mermaid"), None) => {}
                (Some(_), None) => return Some(Line::Code(line)),
            }
            None
        })
    }

    fn texts(&self) -> impl Iterator<Item = &str> {
        self.lines().filter_map(|line| match line {
            Line::Text(line) => Some(line),
            Line::Code(_) => None,
        })
    }

    /// Returns the names by which a link reaches a heading, as GitHub and mdBook make them.
    fn anchors(&self) -> BTreeSet<String> {
        let mut count: HashMap<String, usize> = HashMap::new();
        let headings = self.texts().filter(|line| line.starts_with('#'));
        headings
            .map(|line| {
                let heading = line.trim_start_matches('#').trim();
                let name: String = without_links(heading)
                    .to_lowercase()
                    .chars()
                    .filter(|char| char.is_alphanumeric() || " -_".contains(*char))
                    .map(|char| if char == ' ' { '-' } else { char })
                    .collect();
                let count = count.entry(name.clone()).or_default();
                *count += 1;
                match *count {
                    1 => name,
                    number => format!("{name}-{}", number - 1),
                }
            })
            .collect()
    }

    /// Returns the targets of the links.
    fn links(&self) -> Vec<String> {
        let text: String = self.texts().map(|line| without_code(line) + "\n").collect();
        let mut links: Vec<String> = text
            .split("](")
            .skip(1)
            .map(|rest| rest.split(')').next().unwrap().to_owned())
            .collect();
        let named = text.lines().filter(|line| line.starts_with('['));
        links.extend(named.filter_map(|line| Some(line.split_once("]: ")?.1.trim().to_owned())));
        links
    }

    /// Returns the command lines in blocks of code, and those that are pieces of code in the text, without the prompt. A line that ends with a
    /// backslash goes on in the next one.
    fn command_lines(&self) -> Vec<String> {
        let mut found = vec![];
        let mut begun = String::new();
        for line in self.lines() {
            match line {
                Line::Code(line) => {
                    let line = line.trim();
                    begun += line.strip_prefix("$ ").unwrap_or(line);
                    match begun.strip_suffix('\\') {
                        Some(rest) => begun = rest.to_owned(),
                        None => found.push(std::mem::take(&mut begun)),
                    }
                }
                Line::Text(line) => {
                    found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
                }
            }
        }
        found
    }
}

/// Returns a line without its pieces of code.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Returns a heading with the text of a link in place of the link.
fn without_links(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text += before;
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    text + rest
}

/// Returns the paths of all files of the repository below `folder` whose names end with one of `ends`.
fn files(folder: &str, ends: &[&str]) -> Vec<PathBuf> {
    let mut files = vec![];
    for entry in fs::read_dir(Path::new(ROOT).join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let path = Path::new(folder).join(&name);
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && name != "target" && !name.starts_with('.') {
            files.extend(self::files(path.to_str().unwrap(), ends));
        } else if kind.is_file() && ends.iter().any(|end| name.ends_with(end)) {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn pages() -> Vec<Page> {
    files("", &[".md"])
        .iter()
        .map(|path| Page::read(path))
        .collect()
}

/// Returns the path in the repository to which a link of a page leads, or `None` if it leads out of the repository.
fn target(page: &Path, link: &str) -> Option<PathBuf> {
    let mut path: Vec<&str> = vec![];
    let link = page.parent().unwrap().join(link);
    for part in link.components() {
        match part {
            Component::ParentDir => drop(path.pop()?),
            Component::Normal(name) => path.push(name.to_str().unwrap()),
            _ => {}
        }
    }
    Some(path.iter().collect())
}

fn no_faults(faults: &[String]) {
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

#[test]
fn each_page_is_in_the_book_once() {
    let summary = Page::read(Path::new("docs/SUMMARY.md"));
    let mut listed: Vec<PathBuf> = summary
        .links()
        .iter()
        .map(|link| target(&summary.path, link).unwrap())
        .collect();
    listed.sort();
    let mut pages = files("", &[".md"]);
    pages.retain(|page| *page != summary.path && !page.starts_with("tests"));
    assert_eq!(listed, pages);
}

#[test]
fn each_picture_is_in_a_page_and_says_in_words_what_it_shows() {
    let pages = pages();
    let shown: BTreeSet<PathBuf> = pages
        .iter()
        .flat_map(|page| {
            let links = page.links().into_iter();
            links.filter_map(|link| target(&page.path, &link))
        })
        .collect();
    let pictures = files("docs/pictures", &[""]);
    let mut faults = vec![];
    for picture in &pictures {
        let text = fs::read_to_string(Path::new(ROOT).join(picture)).unwrap();
        if !shown.contains(picture) {
            faults.push(format!("{}: no page shows it", picture.display()));
        }
        for element in ["<title>", "<desc>"] {
            if !text.contains(element) {
                faults.push(format!("{}: no {element}", picture.display()));
            }
        }
    }
    no_faults(&faults);
    assert!(!pictures.is_empty());
}

#[test]
fn each_link_leads_to_a_file_and_a_heading() {
    let pages = pages();
    let anchors: HashMap<&Path, BTreeSet<String>> = pages
        .iter()
        .map(|page| (&*page.path, page.anchors()))
        .collect();
    let mut faults = vec![];
    let mut checked = 0;
    for page in &pages {
        for link in page.links() {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            checked += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => Some(page.path.clone()),
                path => target(&page.path, path),
            };
            let is_there = target.is_some_and(|target| {
                Path::new(ROOT).join(&target).exists()
                    && (anchor.is_empty()
                        || anchors.get(&*target).is_some_and(|it| it.contains(anchor)))
            });
            if !is_there {
                faults.push(format!("{}: {link}", page.path.display()));
            }
        }
    }
    no_faults(&faults);
    assert!(checked > 150, "{checked} links");
}

/// Messages, comments, scripts and the chart name pages: `docs/boot.md#the-clock`.
#[test]
fn each_page_that_a_source_names_is_there() {
    let mut faults = vec![];
    let mut checked = 0;
    let mut named = files(
        "",
        &[
            ".rs", ".sh", ".py", ".yaml", ".toml", ".txt", ".conf", ".service",
        ],
    );
    named.push("Makefile".into());
    for path in named {
        let text = fs::read_to_string(Path::new(ROOT).join(&path)).unwrap();
        for (start, _) in text.match_indices("docs/") {
            let is_other = text[..start]
                .ends_with(|char: char| "/.-_".contains(char) || char.is_alphanumeric());
            let rest = &text[start..];
            let end = rest.find(|char: char| !(char.is_alphanumeric() || "/._-#".contains(char)));
            let name = rest[..end.unwrap_or(rest.len())].trim_end_matches('.');
            let (page, anchor) = name.split_once('#').unwrap_or((name, ""));
            if is_other || !page.ends_with(".md") {
                continue;
            }
            checked += 1;
            let is_there = Path::new(ROOT).join(page).exists()
                && (anchor.is_empty() || Page::read(Path::new(page)).anchors().contains(anchor));
            if !is_there {
                faults.push(format!("{}: {name}", path.display()));
            }
        }
    }
    no_faults(&faults);
    assert!(checked > 10, "{checked} names");
}

/// Returns the words of a line as a shell reads them, one list for each command. A word `…`, `..` or `#` and the words after it are left out.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![vec![]];
    let mut word = String::new();
    let mut quote = None;
    for char in line.chars().chain([' ']) {
        match (quote, char) {
            (Some(open), char) if open == char => quote = None,
            (Some(_), char) => word.push(char),
            (None, '\'' | '"') => quote = Some(char),
            (None, '#') if word.is_empty() => break,
            (None, '|' | ';' | '&' | '(' | ')' | ' ') => {
                if !word.is_empty() {
                    commands.last_mut().unwrap().push(std::mem::take(&mut word));
                }
                if char != ' ' {
                    commands.push(vec![]);
                }
            }
            (None, char) => word.push(char),
        }
    }
    commands
}

/// Returns the output of a program.
fn help(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(built(program)).args(arguments).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Returns the options in a help text.
fn options(help: &str) -> BTreeSet<String> {
    help.split(|char: char| !(char.is_alphanumeric() || char == '-'))
        .filter(|word| word.starts_with('-'))
        .map(str::to_owned)
        .collect()
}

/// Returns the commands that a help text lists in groups, with what they do.
fn listed_commands(help: &str) -> impl Iterator<Item = (&str, &str)> {
    let groups = help.lines().take_while(|line| *line != "Options:");
    groups
        .filter_map(|line| line.strip_prefix("  ")?.split_once(' '))
        .map(|(name, what)| (name, what.trim()))
}

/// Returns the help of each program and command, with the words that ask for it: `firstlight`, `firstlight init`, `unlock`.
fn helps() -> Vec<(String, String)> {
    let of_all = help("firstlight", &["--help"]);
    let commands: Vec<_> = listed_commands(&of_all)
        .map(|(name, _)| {
            let text = help("firstlight", &[name, "--help"]);
            (format!("firstlight {name}"), text)
        })
        .collect();
    let mut helps = vec![("firstlight".to_owned(), of_all.clone())];
    helps.extend(commands);
    for program in PROGRAMS.into_iter().filter(|name| *name != "firstlight") {
        helps.push((program.to_owned(), help(program, &["--help"])));
    }
    helps
}

/// The options of each program and command.
struct Programs(HashMap<String, BTreeSet<String>>);

impl Programs {
    fn ask() -> Programs {
        let helps = helps().into_iter();
        Programs(helps.map(|(name, text)| (name, options(&text))).collect())
    }

    /// Returns the fault of a command line, or that it has none; `None` if the command line is another program's.
    fn fault(&self, program: &str, words: &[String]) -> Option<Option<String>> {
        let program = program.rsplit('/').next().unwrap();
        // `firstlight .. --offline`: whatever the command
        let words = words
            .iter()
            .position(|word| word == "..")
            .map_or(words, |at| &words[..at]);
        let mut known = self.0.get(program)?;
        let is_word = |word: &&String| word.starts_with(|char: char| char.is_ascii_lowercase());
        if let Some(command) = words
            .first()
            .filter(is_word)
            .filter(|_| program == "firstlight")
        {
            // `help` has the name of a command as its operand
            match self.0.get(&format!("firstlight {command}")) {
                Some(options) => known = options,
                None if ["help", "version"].contains(&command.as_str()) => {}
                None => return Some(Some(format!("there is no command {command}"))),
            }
        }
        let is_option = |word: &&str| {
            word.len() > 1
                && word.starts_with('-')
                && !word[1..].starts_with(|char: char| char.is_ascii_digit())
        };
        let unknown = words
            .iter()
            .map(|word| word.split(['=', '…']).next().unwrap())
            .filter(is_option)
            .find(|word| !known.contains(*word));
        Some(unknown.map(|option| format!("there is no option {option}")))
    }
}

/// The book and a release have this page, and the checkout does not.
#[test]
fn the_page_of_options_has_the_help_of_each_program() {
    let mut expected =
        "# All options\n\nThe help of each program and command, as it prints it.\n".to_owned();
    for (name, text) in helps() {
        expected += &format!("\n## `{name}`\n\n```text\n{}\n```\n", text.trim_end());
    }
    let mut script = Command::new(Path::new(ROOT).join("tools/options.sh"));
    let printed = script.arg(built("firstlight").parent().unwrap()).output();
    let printed = printed.unwrap();
    let errors = String::from_utf8_lossy(&printed.stderr);
    assert!(printed.status.success(), "{errors}");
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), expected);
}

/// Figures that pages repeat: the begin of the row in docs/benchmarks.md, the number of the cell, the page, and its words before and after
/// the figure. The page may round.
const FIGURES: [(&str, usize, &str, &str, &str); 14] = [
    (
        "| … and Firstlight ",
        3,
        "README.md",
        "It adds ",
        " MB to an initrd",
    ),
    (
        "| … and clevis ",
        3,
        "README.md",
        "clevis with tang adds ",
        " MB",
    ),
    (
        "| without network, with ",
        3,
        "README.md",
        "its TPM2 token ",
        " MB",
    ),
    (
        "| Firstlight, with the ",
        3,
        "README.md",
        "the open disk it takes ",
        " s",
    ),
    (
        "| clevis with tang |",
        3,
        "README.md",
        "clevis with tang takes ",
        " s",
    ),
    ("| 10 000 |", 6, "README.md", "the longest wait is ", " s"),
    ("| 10 000 |", 9, "README.md", "the service needs ", " MiB"),
    (
        "| … and Firstlight ",
        3,
        "docs/comparison.md",
        "It adds ",
        " MB to an initrd",
    ),
    (
        "| … and clevis ",
        3,
        "docs/comparison.md",
        "clevis with tang adds ",
        " MB",
    ),
    (
        "| Firstlight, with the ",
        3,
        "docs/comparison.md",
        "the open disk it takes ",
        " s",
    ),
    (
        "| 1 000 |",
        2,
        "docs/comparison.md",
        "the join service gives [",
        " to ",
    ),
    (
        "| … and Firstlight ",
        3,
        "docs/images/install.md",
        "[",
        " MB]",
    ),
    (
        "| nothing changes |",
        4,
        "docs/watch.md",
        "\n",
        " % of one core",
    ),
    (
        "| nothing changes |",
        6,
        "docs/watch.md",
        "of one core and ",
        " MiB",
    ),
];

/// A figure has one place, and what another page says of it is the same.
#[test]
fn each_figure_that_a_page_repeats_is_that_of_the_benchmarks() {
    let read = |path: &str| fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
    let benchmarks = read("docs/benchmarks.md");
    let number = |text: &str| -> String {
        let of_number = |char: &char| char.is_ascii_digit() || *char == '.';
        text.chars().take_while(of_number).collect()
    };
    let mut faults = vec![];
    for (row, cell, path, before, after) in FIGURES {
        let line = benchmarks.lines().find(|line| line.starts_with(row));
        let cell = line.and_then(|line| line.split('|').nth(cell)).unwrap();
        let measured = number(cell.trim().trim_start_matches('+'));
        let page = read(path);
        let said = page.split(before).skip(1).find_map(|rest| {
            let said = number(rest);
            (!said.is_empty() && rest[said.len()..].starts_with(after)).then_some(said)
        });
        let Some(said) = said else {
            faults.push(format!(
                "{path}: no figure between {before:?} and {after:?}"
            ));
            continue;
        };
        let digits = said.split_once('.').map_or(0, |(_, digits)| digits.len());
        let rounded = format!("{:.digits$}", measured.parse::<f64>().unwrap());
        if said != rounded {
            faults.push(format!(
                "{path}: {before}{said}{after}: measured {measured}"
            ));
        }
    }
    no_faults(&faults);
}

/// The versions of Kubernetes with which `make test-cluster` makes a cluster, and to which it is upgraded.
#[test]
fn the_pages_name_the_versions_of_kubernetes_that_were_tried() {
    let read = |path: &str| fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
    let after = |text: &str, words: &str| {
        let (_, rest) = text.split_once(words).unwrap();
        let end = |char: char| !(char.is_ascii_digit() || "v.".contains(char));
        rest[..rest.find(end).unwrap_or(rest.len())].to_owned()
    };
    let made = after(
        &read("Makefile"),
        "test-cluster: export KUBERNETES_VERSION = ",
    );
    let upgraded = after(&read("tools/kubernetes.sh"), "${KUBERNETES_VERSION:-");
    for page in ["README.md", "docs/support.md"] {
        let text = read(page);
        for version in [&made, &upgraded] {
            assert!(text.contains(&**version), "{page}: no {version}");
        }
    }
    let tried = read("README.md");
    let named = tried
        .split("Kubernetes v")
        .skip(1)
        .all(|rest| made[1..] == *after(rest, ""));
    assert!(named, "README.md names another version than {made}");
}

/// Returns the versions of Firstlight that a text names, as in `firstlight:1.2.3`, `firstlight-node_1.2.3` or `firstlight (1.2.3)`.
fn versions(text: &str) -> BTreeSet<&str> {
    let is_version = |word: &&str| {
        let numbers: Vec<&str> = word.split('.').collect();
        numbers.len() == 3 && numbers.iter().all(|number| number.parse::<u32>().is_ok())
    };
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("firstlight") {
        let rest = text[at..].trim_start_matches(|c: char| c.is_ascii_lowercase() || c == '-');
        let rest = rest.trim_start_matches([':', '_', ' ', '(']);
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.');
        let word = rest[..end.unwrap_or(rest.len())].trim_end_matches('.');
        found.extend(Some(word).filter(is_version));
    }
    found
}

/// What the lines of examples name is what a reader of this version has.
#[test]
fn each_example_names_this_version() {
    let ends = [".md", ".tf", ".yaml"];
    let folders = ["docs", "charts", "infra", "packaging"];
    let mut files: Vec<PathBuf> = folders.iter().flat_map(|it| files(it, &ends)).collect();
    files.push("packaging/changelog".into());
    // it says what earlier versions need
    files.retain(|path| {
        !["changes.md", "upgrade.md"]
            .iter()
            .any(|end| path.ends_with(end))
    });
    let mut faults = vec![];
    for path in files {
        let text = fs::read_to_string(Path::new(ROOT).join(&path)).unwrap();
        let text = text.split("\n -- ").next().unwrap();
        for version in versions(text) {
            if version != env!("CARGO_PKG_VERSION") {
                faults.push(format!("{} names {version}", path.display()));
            }
        }
    }
    no_faults(&faults);
}

#[test]
fn each_command_line_is_one_of_the_programs_or_of_make() {
    let makefile = fs::read_to_string(Path::new(ROOT).join("Makefile")).unwrap();
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter_map(|line| Some(line.split_once(':')?.0))
        .collect();
    let programs = Programs::ask();
    let mut faults = vec![];
    let mut checked = 0;
    for page in pages() {
        for line in page.command_lines() {
            for words in commands(&line) {
                // variables of the environment stand before the program
                let is_before = |word: &&String| {
                    word.contains('=') || ["sudo", "exec", "time"].contains(&word.as_str())
                };
                let before = words.iter().take_while(is_before).count();
                let Some((program, words)) = words[before..].split_first() else {
                    continue;
                };
                let fault = if program == "make" {
                    let is_target = |word: &&String| {
                        !word.contains('=') && !word.chars().all(char::is_uppercase)
                    };
                    let unknown = words
                        .iter()
                        .filter(is_target)
                        .find(|word| !targets.contains(&***word));
                    unknown.map(|target| format!("make has no target {target}"))
                } else if let Some(fault) = programs.fault(program, words) {
                    fault
                } else {
                    continue;
                };
                checked += 1;
                faults
                    .extend(fault.map(|fault| format!("{}: {line}: {fault}", page.path.display())));
            }
        }
    }
    no_faults(&faults);
    assert!(checked > 100, "{checked} command lines");
}

/// The test of command lines finds the faults that it must find.
#[test]
fn an_unknown_command_option_or_target_is_a_fault() {
    let programs = Programs::ask();
    let fault = |line: &str| {
        let words = commands(line).remove(0);
        let (program, words) = words.split_first().unwrap();
        programs.fault(program, words)
    };
    assert_eq!(
        fault("firstlight status 10.0.0.1 --policy p.json  # --nothing"),
        Some(None)
    );
    assert_eq!(fault("target/dist/unlock --initrd"), Some(None));
    assert_eq!(fault("kubectl get --nothing"), None);
    for line in [
        "firstlight recovr",
        "firstlight init --share x",
        "unlock --nothing=1",
    ] {
        assert!(matches!(fault(line), Some(Some(_))), "{line}");
    }
}

/// Returns all sources with messages as one text: without comments, and with each message on one line.
fn messages() -> String {
    let mut text = String::new();
    for folder in ["src", "initramfs", "systemd", "charts"] {
        for path in files(folder, &[""]) {
            let source = fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_default();
            let mut is_continued = false;
            for line in source
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
            {
                let line = if is_continued {
                    line.trim_start()
                } else {
                    line
                };
                is_continued = line.ends_with('\\');
                text += line.strip_suffix('\\').unwrap_or(line);
                if !is_continued {
                    text.push('\n');
                }
            }
        }
    }
    text.replace("\\\"", "\"")
}

/// Returns the parts of a quoted message that are the same in every case and come from one place in the sources: the text between words
/// in capitals, numbers, `…` and punctuation.
fn fixed_parts(quote: &str) -> Vec<&str> {
    let is_varying = |word: &str| {
        word.contains(|char: char| char.is_ascii_digit())
            || word.len() > 1 && word.chars().all(|char| char.is_ascii_uppercase())
            || word == "N"
    };
    let mut parts = vec![];
    for piece in quote.split(['…', '(', ')', '"', ';', '<', '>', ',']) {
        for piece in piece
            .split(": ")
            .flat_map(|piece| piece.split("join service"))
        {
            let mut start = 0;
            let words = piece.split(|char: char| !char.is_alphanumeric());
            for word in words.filter(|word| is_varying(word)) {
                let at = word.as_ptr() as usize - piece.as_ptr() as usize;
                parts.push(&piece[start..at]);
                start = at + word.len();
            }
            parts.push(&piece[start..]);
        }
    }
    parts.retain_mut(|part| {
        *part = part.trim_matches([' ', ':', '.', '/', '-']);
        part.len() >= 4
    });
    parts
}

/// The first column of a table whose head is one of these words quotes messages of the programs.
#[test]
fn each_message_that_a_page_quotes_is_in_the_sources() {
    const HEADS: [&str; 8] = [
        "event",
        "error",
        "line",
        "message",
        "message or event",
        "what the console says",
        "what the command says",
        "what the log says",
    ];
    let messages = messages();
    let mut faults = vec![];
    let mut checked = 0;
    for page in &pages() {
        let lines: Vec<&str> = page.texts().collect();
        let mut quotes = false;
        for (index, line) in lines.iter().enumerate() {
            let first = line.strip_prefix('|').and_then(|row| row.split('|').next());
            let head = index
                .checked_sub(1)
                .and_then(|above| lines[above].split('|').nth(1));
            match (first, head) {
                (Some(cell), Some(head)) if cell.starts_with("---") => {
                    quotes = HEADS.contains(&head.trim())
                }
                (None, _) => quotes = false,
                (Some(cell), _) if quotes => {
                    for part in cell.split('`').skip(1).step_by(2).flat_map(fixed_parts) {
                        checked += 1;
                        if !messages.contains(part) {
                            faults.push(format!("{}: {cell}: {part:?}", page.path.display()));
                        }
                    }
                }
                _ => {}
            }
        }
    }
    no_faults(&faults);
    assert!(checked > 150, "{checked} parts");
}

/// Returns the texts of the warnings and errors that a source logs: what stands between quotes after `warn!(` and `error!(`.
fn logged(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap();
    let lines = code.lines().map(str::trim);
    let lines = lines.filter(|line| !line.starts_with("//"));
    // a backslash at the end of a line joins it with the next one
    let code = lines.collect::<Vec<_>>().join("\n");
    let code = code.replace("\\\n", "").replace("\\\"", "'");
    let code = code.replace("compile_error!", "");
    let calls = ["warn!(", "error!("].into_iter();
    let after = calls.flat_map(|call| code.split(call).skip(1));
    let texts = after.filter_map(|call| call.trim_start().strip_prefix('"'));
    texts
        .filter_map(|text| Some(text.split_once('"')?.0.to_owned()))
        .collect()
}

#[test]
fn the_page_of_messages_has_each_warning_and_error_of_the_logs() {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/messages.md")).unwrap();
    let (mut faults, mut checked) = (vec![], 0);
    for path in files("src", &[".rs"]) {
        let source = fs::read_to_string(Path::new(ROOT).join(&path)).unwrap();
        for text in logged(&source) {
            // what stands between braces is code
            let fixed = text.split(['{', '}', '(', ')', ':', ';', ',', '"', '\\']);
            let mut fixed = fixed.map(str::trim);
            let Some(start) = fixed.find(|part| part.len() > 10 && part.contains(' ')) else {
                continue;
            };
            checked += 1;
            if !page.contains(start) {
                faults.push(format!("{}: {text:?}: no {start:?}", path.display()));
            }
        }
    }
    no_faults(&faults);
    assert!(checked > 80, "{checked} messages");
}

#[test]
fn the_fixed_parts_of_a_message_are_what_does_not_vary() {
    assert_eq!(
        fixed_parts("waiting: for a key of disk UUID, N s so far"),
        ["waiting", "for a key of disk", "s so far"]
    );
    assert_eq!(fixed_parts("PCR 15 is not zero, …"), ["is not zero"]);
}

#[test]
fn the_reference_has_each_command_and_no_other() {
    let text = help("firstlight", &["--help"]);
    let expected: BTreeSet<String> = listed_commands(&text)
        .map(|(name, what)| format!("| `{name}` | {what} |"))
        .collect();
    let page = Page::read(Path::new("docs/reference.md"));
    let rows = page
        .texts()
        .skip_while(|line| !line.starts_with("| `firstlight` |"));
    let listed = rows.skip(2).take_while(|line| line.starts_with('|'));
    assert_eq!(listed.map(str::to_owned).collect::<BTreeSet<_>>(), expected);
}

#[test]
fn the_page_of_the_alerts_has_each_one_in_the_order_of_its_file() {
    let rules = fs::read_to_string(Path::new(ROOT).join("charts/firstlight/files/alerts.yaml"));
    let rules = rules.unwrap();
    let alerts: Vec<_> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    let page = Page::read(Path::new("docs/alerts.md"));
    let headings = page.text.lines();
    let headings: Vec<_> = headings
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    assert_eq!(headings, alerts);
    // what a command looks for in a log is in the sources
    let sources = messages();
    for line in page.text.lines() {
        if let Some((_, searched)) = line.split_once("| grep ") {
            let searched = searched.trim_start_matches("-v ").trim_matches('\'');
            assert!(sources.contains(searched), "{line}");
        }
    }
}

#[test]
fn the_page_of_the_services_has_each_metric_and_no_other() {
    let names = |text: &str, quote: char| -> BTreeSet<String> {
        let is_of_name = |char: char| char.is_ascii_lowercase() || char == '_';
        text.split(quote)
            .map(|piece| piece.split(|char| !is_of_name(char)).next().unwrap())
            // the names of images on a disk continue with a version
            .filter(|name| {
                name.strip_prefix("firstlight_")
                    .is_some_and(|rest| !rest.is_empty())
            })
            .map(str::to_owned)
            .collect()
    };
    let page = Page::read(Path::new("docs/services.md"));
    assert_eq!(names(&page.text, '`'), names(&messages(), '"'));
}

/// Returns the checks that SPECIFICATION.md names: the words in code of its last column.
fn checks() -> Vec<String> {
    let text = fs::read_to_string(Path::new(ROOT).join("SPECIFICATION.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.trim_end_matches([' ', '|']).rsplit(" | ").next());
    let codes = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    codes.map(str::to_owned).collect()
}

/// Returns the paths of `src/{a,b}.rs`.
fn expanded(path: &str) -> Vec<String> {
    let parts = path.split_once('{').and_then(|(before, rest)| {
        let (names, after) = rest.split_once('}')?;
        Some((before, names, after))
    });
    match parts {
        None => vec![path.to_owned()],
        Some((before, names, after)) => (names.split(','))
            .map(|name| format!("{before}{name}{after}"))
            .collect(),
    }
}

/// Returns the names of the sources' files and folders, of their functions, and of the targets of make.
fn names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for folder in ["src", "tests", "benches", "fuzz/src"] {
        for path in files(folder, &[".rs"]) {
            let text = fs::read_to_string(Path::new(ROOT).join(&path)).unwrap();
            let functions = text.split("fn ").skip(1);
            let functions = functions.filter_map(|rest| rest.split(['(', '<']).next());
            names.extend(functions.map(str::to_owned));
            let parts = path.iter().map(|part| part.to_string_lossy());
            names.extend(parts.map(|part| part.trim_end_matches(".rs").to_owned()));
        }
    }
    let makefile = fs::read_to_string(Path::new(ROOT).join("Makefile")).unwrap();
    let targets = makefile.lines().filter_map(|line| line.split_once(": "));
    names.extend(targets.map(|(target, _)| format!("make {target}")));
    names
}

/// A promise whose check does not exist is not checked.
#[test]
fn each_check_of_the_specification_is_there() {
    let (checks, names) = (checks(), names());
    assert!(checks.len() > 200, "{checks:?}");
    let is_word = |text: &str| {
        text.contains('_')
            && text
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    let mut faults = vec![];
    for check in checks {
        let folders = ["src/", "tests/", "benches/", "fuzz/", "tools/"];
        let is_there = if folders.iter().any(|folder| check.starts_with(folder)) {
            expanded(&check)
                .iter()
                .all(|path| Path::new(ROOT).join(path).exists())
        } else if check.starts_with("make ") || is_word(&check) {
            names.contains(&check)
        } else {
            true
        };
        if !is_there {
            faults.push(format!("SPECIFICATION.md: `{check}` does not exist"));
        }
    }
    no_faults(&faults);
}

/// A weakness that a model shows is one that a test of our programs would find.
#[test]
fn the_page_of_the_migration_lists_what_is_only_for_constellation() {
    let page = Page::read(Path::new("docs/migration.md"));
    let listed: BTreeSet<String> = page
        .text
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| `src/")?.split_once('`')?.0.to_owned()))
        .collect();
    let found = files("src", &[".rs"]).into_iter().filter_map(|file| {
        let at = file.to_str()?.strip_prefix("src/")?.to_owned();
        let (folder, rest) = at.split_once("constellation")?;
        Some(match rest {
            ".rs" => at,
            _ => format!("{folder}constellation"),
        })
    });
    let found: BTreeSet<String> = found.collect();
    let mut faults: Vec<String> = found
        .difference(&listed)
        .map(|code| format!("docs/migration.md does not list src/{code}"))
        .collect();
    let root = Path::new(ROOT).join("src");
    let gone = listed.iter().filter(|code| !root.join(code).exists());
    faults.extend(
        gone.map(|code| format!("docs/migration.md lists src/{code}, which does not exist")),
    );
    no_faults(&faults);
}

#[test]
fn each_weakening_of_a_model_has_its_tests() {
    let mut weakenings = BTreeSet::new();
    for path in files("models", &[".vp"]) {
        let marks = fs::read_to_string(Path::new(ROOT).join(&path)).unwrap();
        let marks = marks.split("// weaken ").skip(1);
        let model = path.file_stem().unwrap().to_str().unwrap();
        weakenings.extend(marks.map(|mark| [model, mark.split(':').next().unwrap()].join(", ")));
    }
    let page = Page::read(Path::new("models/README.md"));
    let rows = page.text.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|row| row.split('`').skip(1).step_by(2).collect::<Vec<_>>());
    let names = names();
    let mut listed = BTreeSet::new();
    for row in rows {
        listed.insert(row[..2].join(", "));
        assert!(row.len() > 2, "{row:?} has no test");
        for test in &row[2..] {
            assert!(names.contains(*test), "{test} does not exist");
        }
    }
    assert_eq!(listed, weakenings);
}

/// `cargo clippy --all-targets` builds no bench with `bench = false`.
#[test]
fn each_bench_is_built_by_make_lint() {
    let read = |path: &str| fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
    let (manifest, makefile) = (read("tests/Cargo.toml"), read("Makefile"));
    let (_, lint) = makefile.split_once("\nlint:").unwrap();
    let (lint, _) = lint.split_once("\n\n").unwrap();
    let benches = manifest.split("[[bench]]").skip(1);
    let benches = benches.map(|bench| bench.split("\n[").next().unwrap());
    let mut left_out = 0;
    for bench in benches.filter(|bench| bench.contains("bench = false")) {
        let (_, name) = bench.split_once("name = \"").unwrap();
        let built = format!("--bench {}", name.split('"').next().unwrap());
        let is_built = |line: &str| line.contains(&built) && !line.contains("--all-targets");
        assert!(lint.lines().any(is_built), "{built} is not in {lint}");
        left_out += 1;
    }
    assert!(left_out > 0);
    assert!(lint.contains("--all-targets"));
}

/// Commands that a person runs on a machine, with a shell there. An underscore stands for the rest of a word.
const BY_HAND: [&str; 17] = [
    "bash",
    "chroot",
    "chronyc",
    "crictl",
    "ctr",
    "etcdctl",
    "journalctl",
    "kubeadm certs",
    "kubeadm init phase",
    "kubeadm token",
    "kubectl debug",
    "nsenter",
    "sh",
    "systemctl",
    "systemd-run",
    "systemd-sysupdate",
    "tpm2_",
];

/// Pages about machines with a shell: hosts, images of another kind, an ordinary VM.
const OTHER_MACHINES: [&str; 5] = [
    "docs/clouds/libvirt.md",
    "docs/clouds/proxmox.md",
    "docs/get-started.md",
    "docs/images/install.md",
    "docs/standalone.md",
];

/// Other lines with such commands: the page, a part of the line, and the words with which the page says where it is possible.
const POSSIBLE: [(&str, &str, &str); 14] = [
    (
        "docs/certificates.md",
        "kubeadm token create",
        "a machine that joins by hand",
    ),
    (
        "docs/day-two/certificates.md",
        "kubeadm certs renew all",
        "Otherwise it runs `kubeadm certs renew all`",
    ),
    (
        "docs/day-two/certificates.md",
        "kubeadm init phase certs",
        "It needs a root shell on each\nnode",
    ),
    (
        "docs/day-two/certificates.md",
        "kubeadm certs check-expiration",
        "It needs a root shell on each\nnode",
    ),
    (
        "docs/day-two/upgrade.md",
        "ssh root@NODE",
        "**By hand**, on images with [sshd]",
    ),
    (
        "docs/init.md",
        "tpm2_readpublic",
        "In an image with tpm2-tools and a shell",
    ),
    (
        "docs/join.md",
        "kubeadm token create",
        "Bootstrap tokens of other programs",
    ),
    (
        "docs/messages.md",
        "tpm2_getcap",
        "in an image that has it and a shell",
    ),
    (
        "docs/messages.md",
        "systemctl stop",
        "the program got a signal, for example from",
    ),
    (
        "docs/policy.md",
        "tpm2_pcrread",
        "in an image that has it and a shell",
    ),
    (
        "docs/services.md",
        "etcdctl defrag",
        "in the pod of etcd by `kubectl exec`",
    ),
    (
        "docs/services.md",
        "ctr --namespace k8s.io",
        "needs an image with [sshd]",
    ),
    (
        "docs/ssh.md",
        "root@NODE",
        "on every node whose image has sshd",
    ),
    (
        "docs/troubleshooting.md",
        "tpm2_dictionarylockout",
        "in an image that has tpm2-tools and a shell",
    ),
];

/// Nobody can run a program on a node with the image of `make mkosi`: it has no shell and no sshd. So a page that names such a command says
/// where it is possible.
#[test]
fn no_page_tells_an_operator_to_run_a_program_on_the_image() {
    let mut faults = vec![];
    let mut unused: BTreeSet<_> = POSSIBLE.iter().collect();
    let is_of_node = |page: &Page| !OTHER_MACHINES.iter().any(|it| page.path == Path::new(it));
    for page in pages().into_iter().filter(is_of_node) {
        let path = page.path.to_str().unwrap();
        for line in page.command_lines() {
            if !commands(&line).iter().any(|words| is_by_hand(words)) {
                continue;
            }
            let says_so = |(of, part, words): &&(&str, &str, &str)| {
                *of == path && line.contains(part) && page.text.contains(words)
            };
            let known: Vec<_> = POSSIBLE.iter().filter(says_so).collect();
            if known.is_empty() {
                faults.push(format!("{path}: {line}"));
            }
            unused.retain(|it| !known.contains(it));
        }
    }
    faults.extend(unused.iter().map(|it| format!("no such line: {it:?}")));
    no_faults(&faults);
}

#[test]
fn a_command_for_a_person_with_a_shell_is_recognized() {
    let is_it = |line: &str| commands(line).iter().any(|words| is_by_hand(words));
    for line in [
        "ssh root@10.0.0.1 cat /proc/cmdline",
        "firstlight logs NODE | sh -x",
        "kubectl debug node/NODE --image busybox",
        "kubectl -n kube-system get pods && systemctl status kubelet",
        "tpm2_getcap handles-persistent",
        "kubeadm certs renew all",
        "systemd-sysupdate update",
    ] {
        assert!(is_it(line), "{line}");
    }
    for line in [
        "kubeadm init",
        "kubectl get nodes",
        "systemctl",
        "firstlight node restart NODE --unit containerd",
    ] {
        assert!(!is_it(line), "{line}");
    }
}

/// Returns whether a person runs this on a machine. A program without an argument is only mentioned.
fn is_by_hand(words: &[String]) -> bool {
    let text = words.join(" ");
    let is_of = |command: &&&str| match command.strip_suffix('_') {
        Some(_) => text.starts_with(**command),
        None => text.starts_with(&format!("{command} ")),
    };
    let is_login = text.starts_with("ssh ") && text.contains("root@");
    is_login || words.len() > 1 && BY_HAND.iter().find(is_of).is_some()
}

/// The programs that bootstrapper runs for an operator's call, each with the package of Debian that has it.
const OF_CALLS: [(&str, &str); 9] = [
    ("chronyc", "chrony"),
    ("df", "coreutils"),
    ("du", "coreutils"),
    ("free", "procps"),
    ("ip", "iproute2"),
    ("journalctl", "systemd"),
    ("ls", "coreutils"),
    ("ps", "procps"),
    ("systemctl", "systemd"),
];

/// Packages that each image of Debian has, because others need them.
const ALWAYS: [&str; 1] = ["coreutils"];

/// Returns the entries of a list in the image's configuration: of `Packages`, or of `RemoveFiles`.
fn of_image(name: &str) -> BTreeSet<String> {
    let files = ["mkosi/mkosi.conf", "mkosi/mkosi.conf.d/release.conf"];
    let read = |path| fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
    let mut all = BTreeSet::new();
    for text in files.map(read) {
        let start = format!("\n{name}=");
        for list in text.split(&start).skip(1) {
            let lines = list.lines().enumerate();
            let lines = lines.take_while(|(index, line)| *index == 0 || line.starts_with(' '));
            let lines = lines
                .map(|(_, line)| line.trim())
                .filter(|it| !it.starts_with('#'));
            all.extend(lines.filter(|it| !it.is_empty()).map(str::to_owned));
        }
    }
    all
}

#[test]
fn the_image_has_the_programs_that_an_operators_calls_run() {
    let (packages, removed) = (of_image("Packages"), of_image("RemoveFiles"));
    let mut faults = vec![];
    let mut unused: BTreeSet<&str> = OF_CALLS.iter().map(|(program, _)| *program).collect();
    let text = files("src/bootstrapper/members/operator", &[".rs"])
        .iter()
        .map(|path| fs::read_to_string(Path::new(ROOT).join(path)).unwrap())
        .map(|text| text.split("#[cfg(test)]").next().unwrap().to_owned())
        .collect::<String>();
    // `Command::new("df")`, and the tables of support.rs: `&["df", ..`
    let starts = ["Command::new(\"", "&[\"", "&[\n            \""];
    for start in starts {
        for rest in text.split(start).skip(1) {
            let program = rest.split('"').next().unwrap();
            match OF_CALLS.iter().find(|(name, _)| *name == program) {
                Some((_, package)) => {
                    unused.remove(program);
                    let is_there = packages.contains(*package) || ALWAYS.contains(package);
                    if !is_there || removed.contains(&format!("/usr/bin/{program}")) {
                        faults.push(format!("{program}: not in the image"));
                    }
                }
                None if start.starts_with("Command") => {
                    faults.push(format!("{program}: of which package?"))
                }
                None => {}
            }
        }
    }
    faults.extend(unused.iter().map(|it| format!("{it}: no call runs it")));
    // what an image has that was built here
    let built = Path::new(ROOT).join("target/mkosi").exists();
    let manifests = built.then(|| files("target/mkosi", &[".manifest"]));
    for manifest in manifests.into_iter().flatten() {
        let text = fs::read_to_string(Path::new(ROOT).join(&manifest)).unwrap();
        if !manifest.to_str().unwrap().contains("firstlight") {
            continue;
        }
        for (program, package) in OF_CALLS {
            if !text.contains(&format!("\"name\": \"{package}\"")) {
                faults.push(format!(
                    "{program}: {} has no {package}",
                    manifest.display()
                ));
            }
        }
    }
    no_faults(&faults);
}

/// `firstlight logs NODE --unit chrony`: a unit of ours, or of a package of the image.
#[test]
fn the_image_has_the_units_that_pages_name() {
    const OF_IMAGE: &str = "mkosi/mkosi.extra/usr/lib/systemd/system";
    let packages = of_image("Packages");
    let mut faults = vec![];
    let mut checked = 0;
    for page in pages() {
        for line in page
            .command_lines()
            .iter()
            .filter(|it| it.contains("--unit "))
        {
            if !line.contains("firstlight logs") && !line.contains("firstlight node") {
                continue;
            }
            checked += 1;
            let unit = line
                .split("--unit ")
                .nth(1)
                .unwrap()
                .split(' ')
                .next()
                .unwrap();
            let file = if unit.contains('.') {
                unit.to_owned()
            } else {
                format!("{unit}.service")
            };
            let is_of_package = unit == "chrony" && packages.contains("chrony");
            let is_for_sshd = unit == "ssh" && page.text.contains("sshd");
            let folders = ["systemd", OF_IMAGE].map(|folder| Path::new(ROOT).join(folder));
            let is_file = folders.iter().any(|folder| folder.join(&file).exists());
            if !is_of_package && !is_for_sshd && !is_file {
                faults.push(format!("{}: {line}", page.path.display()));
            }
        }
    }
    no_faults(&faults);
    assert!(checked > 10, "{checked} lines");
}

/// Returns the rows of a section: an entry of a list, or a paragraph.
fn rows(page: &Page, heading: &str) -> Vec<String> {
    let mut rows = vec![];
    let lines = page.text.lines().map(str::trim_end);
    let section = lines.skip_while(|line| *line != format!("## {heading}"));
    for line in section.skip(1).take_while(|line| !line.starts_with("## ")) {
        let is_numbered = line.starts_with(|char: char| char.is_ascii_digit());
        if line.is_empty() || line.starts_with("* ") || is_numbered {
            rows.push(String::new());
        }
        if let Some(row) = rows.last_mut() {
            *row += line;
            row.push(' ');
        }
    }
    rows
}

/// Returns the path of a name in a row: from the repository's root, or below a folder of another path that the row names.
fn path_of(name: &str, named: &[PathBuf]) -> Option<PathBuf> {
    let folders = named.iter().rev().flat_map(|path| path.ancestors());
    let root = Path::new("");
    let mut paths = folders.chain([root]).map(|folder| folder.join(name));
    paths.find(|path| Path::new(ROOT).join(path).exists())
}

/// Returns whether a source declares `name`, or adds something to the type of this name.
fn declares(source: &str, name: &str) -> bool {
    let is_of_name = |char: char| char.is_alphanumeric() || char == '_';
    source.match_indices(name).any(|(at, _)| {
        let before = source[..at].rsplit([' ', '\n']).nth(1);
        let keywords = [
            "fn", "struct", "enum", "trait", "type", "const", "static", "mod", "impl",
        ];
        source[..at].ends_with(' ')
            && before.is_some_and(|word| keywords.contains(&word))
            && !source[at + name.len()..].starts_with(is_of_name)
    })
}

/// Returns the faults of a row, and the number of names in it: each word in code is a path, or is declared in one of the row's files.
fn faults_of_row(row: &str) -> (Vec<String>, usize) {
    let words = row.split('`').skip(1).step_by(2);
    let is_name = |word: &&str| {
        !word.contains([' ', '"']) && word.starts_with(|char: char| char.is_alphanumeric())
    };
    let mut paths: Vec<PathBuf> = vec![];
    let mut others: Vec<&str> = words.clone().filter(is_name).collect();
    // a name may stand before the folder that it is in
    loop {
        let before = others.len();
        others.retain(|word| match path_of(word, &paths) {
            Some(path) => {
                paths.push(path);
                false
            }
            None => true,
        });
        if others.len() == before {
            break;
        }
    }
    let sources = paths.iter().flat_map(|path| {
        let path = path.to_str().unwrap();
        if Path::new(ROOT).join(path).is_dir() {
            files(path, &[".rs"])
        } else {
            vec![path.into()]
        }
    });
    let read = |path: PathBuf| fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
    let sources: Vec<String> = sources.map(read).collect();
    let is_declared = |name: &str| sources.iter().any(|source| declares(source, name));
    others.retain(|name| !name.split("::").all(is_declared));
    let faults = others.iter().map(|name| {
        format!("`{name}` is no path, and none of the files in this entry declares it: {row}")
    });
    (faults.collect(), words.filter(is_name).count())
}

#[test]
fn each_name_that_the_map_gives_is_there() {
    let page = Page::read(Path::new("docs/architecture.md"));
    let mut faults = vec![];
    let mut checked = 0;
    for row in rows(&page, "Where to look") {
        let (found, names) = faults_of_row(&row);
        faults.extend(found);
        checked += names;
    }
    no_faults(&faults);
    assert!(checked > 50, "{checked} names");
}

#[test]
fn a_name_that_is_not_there_is_a_fault() {
    for (row, wrong) in [
        ("`Init::run` in `src/bootstrapper/first/init.rs`", None),
        ("`src/cli/nodes/rollout/decide.rs`, `steps.rs`", None),
        ("`ALL` in `src/keywrap`", None),
        ("`src/keywrap/gone.rs`", Some("src/keywrap/gone.rs")),
        (
            "`Init::walk` in `src/bootstrapper/first/init.rs`",
            Some("Init::walk"),
        ),
        (
            "`src/cli/nodes/rollout/decide.rs`, `step.rs`",
            Some("step.rs"),
        ),
        ("`AL` in `src/keywrap`", Some("AL")),
        // it is declared elsewhere
        ("`CHECKS` in `src/keywrap`", Some("CHECKS")),
    ] {
        let (faults, _) = faults_of_row(row);
        match wrong {
            None => assert!(faults.is_empty(), "{faults:?}"),
            Some(name) => assert!(faults[0].starts_with(&format!("`{name}` ")), "{faults:?}"),
        }
    }
}
