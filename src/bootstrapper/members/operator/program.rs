//! The output of a program, for a caller who may go away.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::Duration;

use rpc::grpc::{Call, Code, Status};

use base::child_process::{self, ChildFailure, MAX_WAITING, Running};
use base::stop::Stop;

/// How often it is checked whether the caller has gone away.
const TICK: Duration = Duration::from_millis(500);
/// Bytes of a part of the output.
const PART: usize = 16 << 10;
/// Maximum number of parts that wait to be sent. A program that prints faster has to wait.
const PARTS: usize = 4;

/// Runs `command` in English, and gives its standard output to `tell` in parts, until the program ends, the caller goes away, or `stop`.
/// An error has the last lines of the standard error.
pub fn stream(
    command: &mut Command,
    limit: Duration,
    call: &Call,
    stop: &Stop,
    mut tell: impl FnMut(&[u8]) -> Result<(), Status>,
) -> Result<(), Status> {
    let failed = |error: child_process::Error| Status::new(Code::Internal, error.to_string());
    command.env("LC_ALL", "C.UTF-8").env_remove("LANGUAGE");
    let mut running = Running::start(command, Stdio::null()).map_err(failed)?;
    let (sender, lines) = mpsc::sync_channel(MAX_WAITING);
    running
        .read(
            |child| child.stderr.take(),
            move |pipe| child_process::send_lines(pipe, &sender),
        )
        .map_err(failed)?;
    let (sender, parts) = mpsc::sync_channel(PARTS);
    running
        .read(
            |child| child.stdout.take(),
            move |pipe| send_parts(pipe, &sender),
        )
        .map_err(failed)?;

    // one signal for the end of the program, for whatever reason
    let end = Stop::new();
    let of_stop = end.clone();
    let _stopped = stop.on_stop(move || of_stop.stop());
    let (sent, result) = thread::scope(|scope| {
        let over = Stop::new();
        scope.spawn({
            let (over, end) = (over.clone(), end.clone());
            move || {
                while !over.wait(TICK) {
                    if call.is_cancelled() {
                        end.stop();
                    }
                }
            }
        });
        let running = scope.spawn(|| running.finish(lines, limit, &end, &mut |_| ()));
        let sent = parts.iter().try_for_each(|part| tell(&part));
        if sent.is_err() {
            end.stop();
        }
        drop(parts);
        let result = running.join();
        over.stop();
        (sent, result)
    });
    sent?;
    match result {
        Ok(Err(error)) if matches!(error.cause, ChildFailure::Stopped) => {
            Err(Status::new(Code::Cancelled, "the call was ended"))
        }
        Ok(result) => result.map_err(failed),
        Err(_) => Err(Status::new(
            Code::Internal,
            "a thread of the node panicked: its log says where",
        )),
    }
}

fn send_parts(mut pipe: impl Read, sender: &SyncSender<Vec<u8>>) {
    let mut part = vec![0; PART];
    while let Ok(len) = pipe.read(&mut part) {
        if len == 0 || sender.send(part[..len].to_vec()).is_err() {
            return;
        }
    }
}
