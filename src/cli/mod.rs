//! (to come)

mod files;
mod master_secret;
mod progress;
mod state;
