//! Empty, because the tests need only the manifest.
