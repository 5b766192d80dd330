//! Opens a LUKS2 volume of an ordinary virtual machine by attestation, without Kubernetes: a key
//! broker gives the key to the machine that the record of the volume names.
//!
//! ```text
//! enroll        key broker ─► key ─► cryptsetup: a further keyslot, a token ─► settings of the volume
//!                                    (--format: a new volume, and a recovery key in keyslot 0)
//! copy-header   header ─► copy in memory, which is checked
//! serve         crypttab ─► systemd-cryptsetup, with the copy ─► socket ─► this program ─► key broker
//!                                    ◄──────────────────────────── key ──────────┘
//! ```
//!
//! cryptsetup makes and changes the header, and systemd-cryptsetup opens the volume: its other keyslots and tokens stay. This
//! program gets the key, and gives it to systemd-cryptsetup only if it opens the copy.
//!
//! A host can write any header, and another one at each read: one with which nothing is encrypted, or whose volume key the host knows.
//! So the key goes only to a program that reads the checked copy, and a keyslot is made only for the volume key of such a copy.
//!
//! A false key broker could choose the key of a new volume. So a ticket counts only if its
//! measurement secret and salt give the ID of the broker ([`settings::Volume::cluster`]).

pub mod broker;
pub mod cryptsetup;
pub mod enroll;
pub mod error;
pub mod header;
pub mod manage;
pub mod recovery_key;
pub mod serve;
pub mod settings;

use std::io;
use std::thread;

use base::stop::Stop;

/// Keeps secrets out of core dumps and swap, and returns the stop that SIGTERM and SIGINT set. No
/// thread may run yet.
pub fn prepare() -> io::Result<Stop> {
    sys::process::keep_memory_private()?;
    if let Err(error) = sys::process::lock_memory() {
        log::debug!("cannot lock memory, so the kernel may write secrets to swap: {error}");
    }
    let signals = sys::signal::StopSignals::block()?;
    let stop = Stop::new();
    let on_signal = stop.clone();
    let wait = move || {
        match signals.wait() {
            Ok(signal) => log::info!("{signal}: stopping"),
            Err(error) => log::error!("cannot wait for signals: {error}"),
        }
        on_signal.stop();
    };
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(stop)
}
