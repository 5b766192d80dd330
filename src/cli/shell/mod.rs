//! The frame of the program: options, files, output, progress, errors, the help and what is made of it.

pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod consent;
pub(crate) mod error;
pub(crate) mod files;
pub(crate) mod interrupt;
pub(crate) mod man;
pub(crate) mod output;
pub(crate) mod progress;
pub(crate) mod version;
pub(crate) mod warnings;
