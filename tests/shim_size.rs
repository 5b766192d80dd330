//! The HTTP/2 and gRPC layer stays small enough to be read completely in a short time.

use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of lines of code in `src/rpc/h2` and `src/rpc/grpc`, without tests, comments and
/// blank lines.
const MOST: usize = 5280;
/// Files that are compiled only for tests.
const TESTS: [&str; 3] = ["tests", "tests.rs", "testing.rs"];

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let (folders, sources): (Vec<_>, Vec<_>) = entries
        .filter(|path| !TESTS.iter().any(|tests| path.ends_with(tests)))
        .partition(|path| path.is_dir());
    sources
        .into_iter()
        .chain(folders.iter().flat_map(|folder| files(folder)))
        .collect()
}

/// Returns the lines of a source without its test modules: one in a file of its own, or one that ends the source.
fn code_of(text: &str) -> Vec<&str> {
    let mut code = vec![];
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line != "#[cfg(test)]" {
            code.push(line.trim_start());
            continue;
        }
        let module = lines.find(|line| !line.starts_with("#["));
        if module.is_none_or(|module| !module.ends_with(';')) {
            break;
        }
    }
    code
}

#[test]
fn a_test_module_hides_no_code_behind_it() {
    let text =
        "mod a;\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod b;\n    mod c;\n#[cfg(test)]\nmod d {\n}";
    assert_eq!(code_of(text), ["mod a;", "mod c;"]);
}

#[test]
fn http2_and_grpc_stay_small() {
    let source = Path::new(support::ROOT).join("src");
    let (mut code, mut all) = (0, 0);
    for file in ["rpc/h2", "rpc/grpc"]
        .iter()
        .flat_map(|folder| files(&source.join(folder)))
    {
        let text = fs::read_to_string(file).unwrap();
        for line in code_of(&text) {
            all += 1;
            code += usize::from(!line.is_empty() && !line.starts_with("//"));
        }
    }
    println!("{code} lines of code, {all} lines with comments and blank ones");
    assert!((1000..MOST).contains(&code), "{code} lines");
}
