//! The output of other programs, such as kubectl and Helm. [`super`] has the rules for
//! child processes.

use std::io::{self, Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::run::{ChildFailure, DRAIN, Error, MAX_WAITING, Running, name, send_lines};
use crate::crypto::Secret;
use crate::stop::Stop;

/// Maximum bytes that [`output`] returns: a kubeconfig has about 6 KiB.
const MAX_OUTPUT: usize = 1 << 20;
/// Bytes that are reserved for the output: a vector that grows leaves copies of a secret behind.
const USUAL_OUTPUT: usize = 64 << 10;

/// Runs `command` in the foreground, so that it may ask a person at the terminal, until it succeeds. `input` is its standard input. Returns
/// its standard output; the standard error is this program's.
pub fn in_foreground(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, Error> {
    let failed = |program, cause| Error {
        program,
        cause,
        last_lines: vec![],
    };
    let name = name(command);
    let started = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed(name.clone(), ChildFailure::Start(error)));
    let mut child = started?;
    if let Some(mut pipe) = child.stdin.take() {
        // a program that ends early says why
        let _ = pipe.write_all(input);
    }
    let output = child
        .wait_with_output()
        .map_err(|error| failed(name.clone(), ChildFailure::Output(error)))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(failed(name, ChildFailure::Failed(output.status)))
    }
}

/// Runs `command` like [`super::run`] without a standard input, but returns its standard
/// output, which may be secret; `tell` gets only standard error.
pub fn output(
    command: &mut Command,
    limit: Duration,
    stop: &Stop,
    tell: &mut dyn FnMut(&str),
) -> Result<Secret, Error> {
    let mut running = Running::start(command, Stdio::null())?;
    let (sender, lines) = mpsc::sync_channel(MAX_WAITING);
    running.read(
        |child| child.stderr.take(),
        move |pipe| send_lines(pipe, &sender),
    )?;
    let (sender, output) = mpsc::sync_channel(1);
    running.read(
        |child| child.stdout.take(),
        move |pipe| drop(sender.send(read_all(pipe))),
    )?;
    running.finish(lines, limit, stop, tell)?;
    let output = output
        .recv_timeout(DRAIN)
        .unwrap_or_else(|_| Err(io::Error::other("another process keeps it open")));
    output.map_err(|error| Error {
        program: name(command),
        cause: ChildFailure::Output(error),
        last_lines: vec![],
    })
}

fn read_all(mut pipe: impl Read) -> io::Result<Secret> {
    let mut bytes = Vec::with_capacity(USUAL_OUTPUT);
    pipe.by_ref()
        .take(MAX_OUTPUT as u64 + 1)
        .read_to_end(&mut bytes)?;
    // the rest is read too, so that the program does not fail because its pipe is full
    io::copy(&mut pipe, &mut io::sink())?;
    if bytes.len() <= MAX_OUTPUT {
        Ok(Secret::new(bytes))
    } else {
        Err(io::Error::other(format!(
            "it is longer than {MAX_OUTPUT} bytes"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child_process::run::tests::{BRIEF, LONG, sh};

    #[test]
    fn output_is_returned_and_not_told() {
        let mut told = vec![];
        let script = "echo secret; echo working >&2";
        let bytes = output(&mut sh(script), LONG, &Stop::new(), &mut |line| {
            told.push(line.to_owned())
        })
        .unwrap();
        assert_eq!(bytes.expose(), b"secret\n");
        assert_eq!(told, ["working"]);
    }

    #[test]
    fn the_time_limit_also_ends_a_program_whose_output_is_wanted() {
        let late = output(&mut sh("exec sleep 3600"), BRIEF, &Stop::new(), &mut |_| ());
        assert!(matches!(late.unwrap_err().cause, ChildFailure::Late(_)));
    }

    #[test]
    fn a_child_that_the_program_leaves_behind_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        // the child keeps the pipes open
        let script = format!("sleep 3600 & echo $! >{}; echo done", pid.display());
        let bytes = output(&mut sh(&script), LONG, &Stop::new(), &mut |_| {}).unwrap();
        assert_eq!(bytes.expose(), b"done\n");
        let pid = std::fs::read_to_string(pid).unwrap();
        // a zombie has ended, too: there may be no process that waits for it
        let stat = format!("/proc/{}/stat", pid.trim());
        let has_ended = || std::fs::read_to_string(&stat).map_or(true, |it| it.contains(") Z "));
        let pause = Duration::from_millis(50);
        assert!((0..100).any(|_| has_ended() || {
            std::thread::sleep(pause);
            false
        }));
    }

    #[test]
    fn a_process_that_left_the_group_and_keeps_the_pipes_blocks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid").display().to_string();
        let script = format!(
            "setsid sh -c 'echo $$ >{pid}; exec sleep 3600' & while [ ! -s {pid} ]; do :; done; echo done"
        );
        let error = output(&mut sh(&script), LONG, &Stop::new(), &mut |_| {}).unwrap_err();
        assert!(matches!(error.cause, ChildFailure::Output(_)), "{error:?}");
        let kill = format!("kill -9 $(cat {pid})");
        output(&mut sh(&kill), LONG, &Stop::new(), &mut |_| {}).unwrap();
    }

    #[test]
    fn long_output_is_an_error() {
        let flood = format!("head -c {} /dev/zero", 2 * MAX_OUTPUT);
        let error = output(&mut sh(&flood), LONG, &Stop::new(), &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }
}
