//! Ends a command that a signal interrupts: completes the line on the terminal, and says which
//! changes remain and what to do next.

use crate::shell::error::Error;
use std::io::{self, IsTerminal, Write};
use std::process;
use std::sync::Mutex;
use std::thread;

use base::sync::lock;
use sys::signal::{StopSignal, StopSignals};

/// The sentences about what an interruption at this moment leaves behind; empty if nothing was
/// changed.
static MEANING: Mutex<&'static str> = Mutex::new("");

/// Blocks SIGINT and SIGTERM for all threads, and waits for them in a thread of its own. Call it
/// before any other thread runs.
pub fn watch(command: String) -> Result<(), Error> {
    let signals = StopSignals::block()
        .map_err(|error| Error::failed(format!("cannot block signals: {error}")))?;
    let wait = move || {
        if let Ok(signal) = signals.wait() {
            end(&command, signal);
        }
    };
    thread::Builder::new()
        .name("signals".into())
        .spawn(wait)
        .map(|_| ())
        .map_err(|error| Error::failed(format!("cannot wait for signals: {error}")))
}

/// Sets the sentences for an interruption from now on.
pub fn means(text: &'static str) {
    *lock(&MEANING) = text;
}

fn end(command: &str, signal: StopSignal) -> ! {
    let meaning = lock(&MEANING);
    let mut out = io::stderr().lock();
    let clear = if out.is_terminal() { "\r\x1b[K" } else { "" };
    let meaning = if meaning.is_empty() {
        "nothing was changed"
    } else {
        *meaning
    };
    // standard error may be closed
    let _ = writeln!(out, "{clear}firstlight {command}: {signal}: {meaning}");
    process::exit(exit_code(signal))
}

/// Returns the exit code that shells use for a process that this signal has ended.
fn exit_code(signal: StopSignal) -> i32 {
    match signal {
        StopSignal::Int => 130,
        StopSignal::Term => 143,
    }
}
