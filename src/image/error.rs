//! Why an image, a firmware or an endorsement of one cannot be used.

use std::{fmt, io};

/// Why an image, a firmware or an endorsement of one cannot be used. Each has a clause for a
/// person, which begins with the place in the image.
#[derive(Debug)]
pub enum Error {
    /// The disk cannot be read.
    Read(String, io::Error),
    /// The file is not of the expected format.
    Foreign(String),
    /// The file is cut off, or contradicts itself.
    Malformed(String),
    /// The file is well-formed, but its registers cannot be computed, or no machine starts it.
    Unsupported(String),
    /// The image has no such file, section or profile, or the endorsement no such machine.
    NotFound(String),
    /// The image has several, and the caller did not choose one.
    Ambiguous(String),
    /// The endorsement is not signed by the root, or is not of this firmware.
    Untrusted(String),
}

impl Error {
    /// Adds the place in the image: a path, a section.
    pub(crate) fn within(mut self, place: impl fmt::Display) -> Error {
        use Error::*;
        let (Read(text, _)
        | Foreign(text)
        | Malformed(text)
        | Unsupported(text)
        | NotFound(text)
        | Ambiguous(text)
        | Untrusted(text)) = &mut self;
        text.insert_str(0, &format!("{place}: "));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Error::*;
        match self {
            Read(what, error) => write!(f, "{what}: {error}"),
            Foreign(text) | Malformed(text) | Unsupported(text) | NotFound(text)
            | Ambiguous(text) | Untrusted(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}
