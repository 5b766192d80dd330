//! The HTTP/2 and gRPC layer stays small enough to be read in one sitting.

use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of lines of code in `src/rpc/h2` and `src/rpc/grpc`, without tests, comments and
/// blank lines.
const MOST: usize = 5320;
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

#[test]
fn http2_and_grpc_stay_small() {
    let source = Path::new(support::ROOT).join("src/rpc");
    let (mut code, mut all) = (0, 0);
    for file in ["h2", "grpc"]
        .iter()
        .flat_map(|folder| files(&source.join(folder)))
    {
        let text = fs::read_to_string(file).unwrap();
        // A test module ends its file.
        for line in text
            .lines()
            .take_while(|line| *line != "#[cfg(test)]")
            .map(str::trim_start)
        {
            all += 1;
            code += usize::from(!line.is_empty() && !line.starts_with("//"));
        }
    }
    println!("{code} lines of code, {all} lines with comments and blank ones");
    assert!((1000..MOST).contains(&code), "{code} lines");
}
