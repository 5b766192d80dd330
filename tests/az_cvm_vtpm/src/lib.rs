//! Empty: the manifest is what is needed.
