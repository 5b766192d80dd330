//! A page of docs/clouds, and its blocks of commands.

use std::fs;
use std::path::Path;

use support::ROOT;

/// These words in the paragraph before a block say that no test runs it.
const NOT_RUN: &str = "ot run by our tests";

/// The heading of the section that deletes everything ends so.
pub const TEAR_DOWN: &str = "Tear down";

pub struct Page {
    /// Its name without the ending, such as `aws`.
    pub name: String,
    text: String,
}

/// The commands between two fences.
pub struct Block {
    /// The number of its first line in the page.
    pub line: usize,
    /// The last heading before it.
    pub section: String,
    pub text: String,
    pub is_run: bool,
}

impl Page {
    pub fn read(name: &str) -> Page {
        let path = Path::new(ROOT).join(format!("docs/clouds/{name}.md"));
        Page {
            name: name.to_owned(),
            text: fs::read_to_string(path).unwrap(),
        }
    }

    pub fn all() -> Vec<Page> {
        let entries = fs::read_dir(Path::new(ROOT).join("docs/clouds")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names = names.filter_map(|name| Some(name.strip_suffix(".md")?.to_owned()));
        names.map(|name| Page::read(&name)).collect()
    }

    /// Returns how the page's commands write a range of ports.
    pub fn range(&self) -> &'static str {
        match &*self.name {
            "openstack" => ":",
            _ => "-",
        }
    }

    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        let (mut paragraph, mut section) = (String::new(), String::new());
        let mut block: Option<Block> = None;
        self.text
            .lines()
            .enumerate()
            .filter_map(move |(number, line)| {
                match (&mut block, line) {
                    (Some(_), "```") => {
                        paragraph.clear();
                        return block.take();
                    }
                    (Some(block), line) => block.text += &format!("{line}\n"),
                    (None, "```sh") => {
                        block = Some(Block {
                            line: number + 2,
                            section: section.clone(),
                            text: String::new(),
                            is_run: !paragraph.contains(NOT_RUN),
                        });
                    }
                    (None, line) if line.starts_with('#') => {
                        section = line.trim_start_matches('#').trim().to_owned();
                        paragraph.clear();
                    }
                    // a blank line follows each paragraph, also the one before a block
                    (None, "") => paragraph += "\n\n",
                    (None, line) => {
                        if paragraph.ends_with("\n\n") {
                            paragraph.clear();
                        }
                        paragraph += line;
                    }
                }
                None
            })
    }

    /// Returns a script of the blocks that are run. It stops at the first command that fails. Before it deletes everything, it writes
    /// a line to its third descriptor, and waits for a line on its input.
    pub fn script(&self, before: &str) -> String {
        let mut script = format!("set -euo pipefail\n{before}\n");
        let mut is_at_end = false;
        for block in self.blocks().filter(|block| block.is_run) {
            if !is_at_end && block.section.ends_with(TEAR_DOWN) {
                is_at_end = true;
                script += &format!("echo '{TEAR_DOWN}' >&3\nread -r _\n");
            }
            let (name, line) = (&self.name, block.line);
            script += &format!("echo '{name}.md:{line}'\n{{\n{}}} </dev/null\n", block.text);
        }
        assert!(is_at_end, "{}: no section {TEAR_DOWN:?}", self.name);
        script
    }
}
