//! Log files with one JSON object a line: the present file, and older files in the same folder.
//!
//! A writer renames the file when it is long, and begins a new one. A caller that follows the log gets all
//! lines of both files.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::stop::Stop;
use base::time;
use rpc::grpc::{Call, Code, Status};

/// Maximum time of a call that reads logs; the caller may end it before.
pub const LIMIT: Duration = Duration::from_secs(24 * 3600);
/// How often the program looks for new lines while a caller follows the log.
const TICK: Duration = Duration::from_millis(500);
/// Bytes that are sent at once, at least, if there are as many.
const PART: usize = 16 << 10;
/// Maximum bytes of a line; the rest of a longer one counts as a line of its own.
const MAX_LINE: u64 = 1 << 20;
/// What stands before the time in a line: of the API server's audit log, and of the record of calls.
const TIMES: [&[u8]; 2] = [b"\"stageTimestamp\":\"", b"\"time\":\""];
/// The characters of a time without fractions of a second: `2026-11-29T02:30:00`.
const SECONDS: usize = 19;

/// Which lines are wanted.
#[derive(Default)]
pub struct LogFilter {
    /// Lines since this time, from older files too; `None`: all lines of the present file.
    pub since: Option<SystemTime>,
    /// At most this many last lines, from older files too; 0: all.
    pub lines: u32,
    /// Whether new lines are sent until the caller ends the call.
    pub follow: bool,
}

/// A log.
pub struct LogFile {
    /// The file that is written now.
    pub present: PathBuf,
    /// Returns whether a file with this name in the same folder is an older one. Sorted by name,
    /// they are in order of time.
    pub is_older: fn(&str) -> bool,
}

impl LogFile {
    /// Returns the API server's audit log: it renames `audit.log` to `audit-2026-11-29T02-30-00.000.log`.
    pub fn of_audit(present: PathBuf) -> LogFile {
        LogFile {
            present,
            is_older: |name| name.starts_with("audit-") && name.ends_with(".log"),
        }
    }

    /// Gives the wanted lines to `tell` in parts, until the end, or until the caller goes away.
    pub fn stream(
        &self,
        wanted: &LogFilter,
        call: &Call,
        stop: &Stop,
        tell: &mut dyn FnMut(&[u8]) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let failed = |path: &Path, error: io::Error| {
            let code = match error.kind() {
                ErrorKind::NotFound => Code::NotFound,
                _ => Code::Internal,
            };
            Status::new(code, format!("cannot read {}: {error}", path.display()))
        };
        let present = open(&self.present).map_err(|error| failed(&self.present, error))?;
        let mut files = self.older(wanted);
        // it may be an older one by now
        let is_present =
            |it: &BufReader<File>| matches!((inode(it), inode(&present)), (Ok(a), Ok(b)) if a == b);
        files.retain(|(_, file)| !is_present(file));
        files.push((self.present.clone(), present));
        let skipped = match wanted.lines {
            0 => 0,
            lines => {
                skip(&mut files, u64::from(lines)).map_err(|error| failed(&self.present, error))?
            }
        };
        let mut sending = Sending {
            since: wanted.since.map(|it| time::seconds(it).into_bytes()),
            begun: vec![],
            part: vec![],
            call,
            stop,
            tell,
        };
        let mut last = None;
        for (path, mut file) in files.into_iter().skip(skipped) {
            sending
                .read(&mut file)
                .map_err(|error| failed(&path, error))??;
            last = Some(file);
        }
        let Some(mut file) = last.filter(|_| wanted.follow) else {
            return sending.end();
        };
        sending.flush()?;
        let started = Instant::now();
        loop {
            let own = inode(&file);
            let named = fs::metadata(&self.present).map(|it| (it.dev(), it.ino()));
            // nothing is written to a renamed file any more, and so it is read as a whole here
            sending
                .read(&mut file)
                .map_err(|error| failed(&self.present, error))??;
            sending.flush()?;
            match (own, named) {
                (Ok(own), Ok(named)) if own != named => match open(&self.present) {
                    Ok(new) => file = new,
                    // renamed again
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(failed(&self.present, error)),
                },
                _ if stop.wait(TICK) || call.is_cancelled() || started.elapsed() > LIMIT => {
                    return Err(ended());
                }
                _ => {}
            }
        }
    }

    /// Opens the older files that can have wanted lines, the oldest first.
    fn older(&self, wanted: &LogFilter) -> Vec<(PathBuf, BufReader<File>)> {
        if wanted.since.is_none() && wanted.lines == 0 {
            return vec![];
        }
        let beside = self.present.parent().and_then(|it| fs::read_dir(it).ok());
        let beside = beside.into_iter().flatten().flatten();
        let older = beside.filter(|it| (self.is_older)(&it.file_name().to_string_lossy()));
        let mut older: Vec<PathBuf> = older.map(|it| it.path()).collect();
        older.sort();
        let opened = older.into_iter().filter_map(|path| {
            let file = open(&path).ok()?;
            let written = file.get_ref().metadata().and_then(|it| it.modified());
            let is_old = matches!((written, wanted.since), (Ok(at), Some(since)) if at < since);
            (!is_old).then_some((path, file))
        });
        opened.collect()
    }
}

fn inode(file: &BufReader<File>) -> io::Result<(u64, u64)> {
    file.get_ref().metadata().map(|it| (it.dev(), it.ino()))
}

fn open(path: &Path) -> io::Result<BufReader<File>> {
    Ok(BufReader::with_capacity(64 << 10, File::open(path)?))
}

fn ended() -> Status {
    Status::new(Code::Cancelled, "the call was ended")
}

/// Skips all but so many lines at the end of the last file, and if it has fewer, of those before it. Returns how many files have none.
fn skip(files: &mut [(PathBuf, BufReader<File>)], lines: u64) -> io::Result<usize> {
    let mut left = lines;
    for index in (0..files.len()).rev() {
        let (_, file) = &mut files[index];
        // how many lines the file has, to skip the first ones
        let all = each_line(file, u64::MAX)?;
        file.seek(SeekFrom::Start(0))?;
        if all >= left {
            each_line(file, all - left)?;
            return Ok(index);
        }
        left -= all;
    }
    Ok(0)
}

/// Reads at most so many lines, and returns how many there were.
fn each_line(file: &mut BufReader<File>, most: u64) -> io::Result<u64> {
    let mut line = vec![];
    let mut count = 0;
    while count < most {
        line.clear();
        if file.take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        count += 1;
    }
    Ok(count)
}

/// Sends lines to the caller.
struct Sending<'a> {
    since: Option<Vec<u8>>,
    /// A line that the writer has not ended yet.
    begun: Vec<u8>,
    part: Vec<u8>,
    call: &'a Call,
    stop: &'a Stop,
    tell: &'a mut dyn FnMut(&[u8]) -> Result<(), Status>,
}

impl Sending<'_> {
    /// Sends the wanted lines until the present end of the file.
    fn read(&mut self, file: &mut BufReader<File>) -> io::Result<Result<(), Status>> {
        while file.take(MAX_LINE).read_until(b'\n', &mut self.begun)? > 0 {
            let is_whole = self.begun.ends_with(b"\n") || self.begun.len() as u64 >= MAX_LINE;
            if !is_whole {
                continue;
            }
            let line = std::mem::take(&mut self.begun);
            self.add(&line);
            if self.part.len() >= PART
                && let Err(status) = self.flush()
            {
                return Ok(Err(status));
            }
        }
        Ok(Ok(()))
    }

    fn add(&mut self, line: &[u8]) {
        let is_old = |since: &Vec<u8>| time_of(line).is_some_and(|at| at < &since[..SECONDS]);
        if !self.since.as_ref().is_some_and(is_old) {
            self.part.extend_from_slice(line);
        }
    }

    fn flush(&mut self) -> Result<(), Status> {
        if self.call.is_cancelled() || self.stop.is_stopped() {
            return Err(ended());
        }
        if self.part.is_empty() {
            Ok(())
        } else {
            (self.tell)(&std::mem::take(&mut self.part))
        }
    }

    fn end(mut self) -> Result<(), Status> {
        let begun = std::mem::take(&mut self.begun);
        self.add(&begun);
        self.flush()
    }
}

/// Returns the time of a line, in UTC, without fractions of a second.
fn time_of(line: &[u8]) -> Option<&[u8]> {
    TIMES.iter().find_map(|before| {
        let found = line.windows(before.len()).position(|it| it == *before)?;
        line.get(found + before.len()..)?.get(..SECONDS)
    })
}

/// Returns the time that a request names in seconds since 1970; `None` for 0.
pub fn since(seconds: u64) -> Option<SystemTime> {
    let at = UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
    (seconds > 0).then_some(at)
}
