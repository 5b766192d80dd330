//! Versions of the image, and the namespace of the signatures of updates.

use std::fmt;

/// The namespace of a signature: `ssh-keygen -Y sign -n firstlight-update` makes one.
pub const NAMESPACE: &str = "firstlight-update";

/// A version of the image: numbers with dots between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageVersion(Vec<u64>);

impl ImageVersion {
    /// Parses up to four numbers.
    pub fn parse(text: &str) -> Option<ImageVersion> {
        let number = |part: &str| {
            let is_plain = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            let is_canonical = part == "0" || !part.starts_with('0');
            part.parse().ok().filter(|_| is_plain && is_canonical)
        };
        let numbers: Option<Vec<u64>> = text.split('.').map(number).collect();
        numbers
            .filter(|it| (2..=4).contains(&it.len()))
            .map(ImageVersion)
    }

    /// Returns whether this version is newer than the other one.
    pub fn is_newer_than(&self, other: &ImageVersion) -> bool {
        self.0 > other.0
    }
}

impl fmt::Display for ImageVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&parts.join("."))
    }
}
