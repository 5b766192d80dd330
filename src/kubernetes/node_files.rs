//! The operator's files for new nodes (docs/node-files.md): what the join service sends in a ticket,
//! and the node accepts.

use std::fmt;

/// Maximum number of files.
pub const MAX_FILES: usize = 64;
/// Maximum bytes of all names and contents together. A Secret of Kubernetes has at most 1 MiB; this is
/// less, because the join service holds the files of all tickets that it issues at the same time.
pub const MAX_BYTES: usize = 256 << 10;
/// Maximum bytes of a name (apimachinery, DNS1123SubdomainMaxLength, for the keys of a Secret).
const MAX_NAME: usize = 253;

/// Why files are refused; `Display` is a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnfitFiles {
    /// There are more than [`MAX_FILES`].
    TooMany(usize),
    /// They have more than [`MAX_BYTES`].
    TooLarge(usize),
    /// The name is not one that a key of a Secret can have.
    Name(String),
    /// Two files have this name.
    Twice(String),
}

impl fmt::Display for UnfitFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnfitFiles::TooMany(count) => write!(f, "{count} files, expected at most {MAX_FILES}"),
            UnfitFiles::TooLarge(bytes) => write!(
                f,
                "{bytes} bytes with their names, expected at most {MAX_BYTES}"
            ),
            UnfitFiles::Name(name) => write!(
                f,
                "{name:?} is no name: expected at most {MAX_NAME} letters, digits, '-', '_' and '.', without '..' at the beginning"
            ),
            UnfitFiles::Twice(name) => write!(f, "{name} occurs twice"),
        }
    }
}

/// Returns whether a key of a Secret can have this name (apimachinery, IsConfigMapKey). It is the name
/// of one file in a directory: it has no slash, and is neither `.` nor begins with `..`.
pub fn is_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(is_allowed)
        && name != "."
        && !name.starts_with("..")
}

/// Checks the names and lengths of files.
pub fn check<'a>(files: impl Iterator<Item = (&'a str, usize)>) -> Result<(), UnfitFiles> {
    let mut names: Vec<&str> = Vec::new();
    let mut bytes = 0usize;
    for (name, len) in files {
        if !is_name(name) {
            let shown = name.chars().take(MAX_NAME).collect();
            return Err(UnfitFiles::Name(shown));
        }
        if names.contains(&name) {
            return Err(UnfitFiles::Twice(name.into()));
        }
        names.push(name);
        bytes = bytes.saturating_add(name.len()).saturating_add(len);
        if names.len() > MAX_FILES {
            return Err(UnfitFiles::TooMany(names.len()));
        }
    }
    match bytes {
        0..=MAX_BYTES => Ok(()),
        _ => Err(UnfitFiles::TooLarge(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_file_of_one_directory() {
        for name in ["token", ".dockerconfigjson", "ca.crt", "A_b-c.9", "a..b"] {
            assert!(is_name(name), "{name}");
        }
        let long = "x".repeat(MAX_NAME + 1);
        for name in [
            "", ".", "..", "..data", "a/b", "/etc", "a b", "a\0", "ä", "a\n", &long,
        ] {
            assert!(!is_name(name), "{name:?}");
        }
    }

    #[test]
    fn too_many_too_large_and_equal_files_are_refused() {
        let names: Vec<String> = (0..=MAX_FILES).map(|n| n.to_string()).collect();
        let files = |count| names.iter().take(count).map(|name| (name.as_str(), 1));
        assert_eq!(check(files(MAX_FILES)), Ok(()));
        assert_eq!(
            check(files(MAX_FILES + 1)),
            Err(UnfitFiles::TooMany(MAX_FILES + 1))
        );
        assert_eq!(check([("a", MAX_BYTES - 1)].into_iter()), Ok(()));
        for len in [MAX_BYTES, usize::MAX] {
            assert!(matches!(
                check([("a", len)].into_iter()),
                Err(UnfitFiles::TooLarge(_))
            ));
        }
        let twice = [("a", 1), ("a", 2)].into_iter();
        assert_eq!(check(twice), Err(UnfitFiles::Twice("a".into())));
        let up = [("../a", 1)].into_iter();
        assert_eq!(check(up), Err(UnfitFiles::Name("../a".into())));
    }
}
