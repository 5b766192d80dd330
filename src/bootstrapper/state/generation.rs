//! Generations of the state disk. A host can bring back an old copy of the whole disk: each sector is
//! then authentic. So a member writes a new generation into the encrypted file system when it starts
//! and once a day, and keeps those before. The join service that watches the members records the
//! present one, and asks at the next time whether the disk has the recorded one. An old copy does not
//! (docs/state-disk.md).
//!
//! ```text
//! firstlight/generations   NUMBER-ID, one a line, the present one last: 12-9f86d081884c7d65
//! ```

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::crypto::random;
use base::file;
use base::sync::lock;
use base::text::{hex, printable};
use proto::generation::{GENERATION, GenerationRequest, GenerationResponse};
use rpc::grpc::{Call, Code, Router, Status};

/// The path of the file below the mount point.
const FILE: &str = "firstlight/generations";
/// How many generations the disk remembers: more than those of a year, if it boots seldom.
const MOST: usize = 512;
/// Bytes of the longest line: a number of 64 bits, and an identifier of 8 bytes.
const LINE: usize = 20 + 1 + 16 + 1;
/// How often a machine that does not reboot begins a generation.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// One generation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Generation {
    /// One more than that of the generation before.
    number: u64,
    /// Random: two disks that go on from the same copy have different ones.
    id: [u8; 8],
}

impl Generation {
    fn parse(text: &str) -> Option<Generation> {
        let (number, id) = text.split_once('-')?;
        let is_lower_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if id.len() != 16 || !id.bytes().all(is_lower_hex) {
            return None;
        }
        let id = u64::from_str_radix(id, 16).ok()?.to_be_bytes();
        Some(Generation {
            number: number.parse().ok()?,
            id,
        })
    }

    /// Returns the generation after the last one of `all`.
    fn after(all: &[Generation]) -> Generation {
        let last = all.last().map_or(0, |last| last.number);
        Generation {
            number: last.saturating_add(1),
            id: random(),
        }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.number, hex(&self.id))
    }
}

/// The generations of a mounted state disk.
pub struct Generations {
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    /// From the oldest one to the present one; the reason if they cannot be read or written.
    all: Result<Vec<Generation>, String>,
    raised: Instant,
}

impl Generations {
    /// Reads the generations of the disk that is mounted at `root`, and begins a new one. A member
    /// works without them: if that fails, the reason goes to the log and to callers that ask for
    /// the generations.
    pub fn open(root: &Path) -> Generations {
        let path = root.join(FILE);
        let all = read(&path).and_then(|before| raise(&path, before));
        let generations = Generations {
            path,
            state: Mutex::new(State {
                all: Ok(vec![]),
                raised: Instant::now(),
            }),
        };
        generations.note(all);
        generations
    }

    /// Begins a new generation if the present one is a day old. Call it each hour.
    pub fn raise_daily(&self) {
        if lock(&self.state).raised.elapsed() >= DAY {
            self.raise();
        }
    }

    fn raise(&self) {
        let before = lock(&self.state).all.clone();
        // what could not be read stays unread until the next boot
        if let Ok(before) = before {
            self.note(raise(&self.path, before));
        }
    }

    fn note(&self, all: io::Result<Vec<Generation>>) {
        let all = all.map_err(|error| format!("{}: {error}", self.path.display()));
        if let Err(why) = &all {
            log::warn!("cannot write the next generation number to the state disk: {why}");
        }
        *lock(&self.state) = State {
            all,
            raised: Instant::now(),
        };
    }

    /// Adds the method that returns the present generation.
    pub fn serve(self: &Arc<Generations>, router: Router) -> Router {
        let generations = self.clone();
        router.unary(GENERATION, move |_: &Call, request: GenerationRequest| {
            generations.answer(&request.recorded)
        })
    }

    fn answer(&self, recorded: &str) -> Result<GenerationResponse, Status> {
        let state = lock(&self.state);
        let all = state
            .all
            .as_ref()
            .map_err(|why| Status::new(Code::Internal, why.clone()))?;
        let is_unknown = match recorded {
            "" => false,
            text => {
                let recorded = Generation::parse(text).ok_or_else(|| {
                    let text = printable(text, LINE);
                    let why =
                        format!("expected a generation such as 12-9f86d081884c7d65, got {text}");
                    Status::new(Code::InvalidArgument, why)
                })?;
                !all.contains(&recorded)
            }
        };
        let current = all.last().map(Generation::to_string).unwrap_or_default();
        Ok(GenerationResponse {
            current,
            is_unknown,
        })
    }
}

/// Reads the file. A disk without it has no generations.
fn read(path: &Path) -> io::Result<Vec<Generation>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        file => file?,
    };
    let mut text = String::new();
    file.take((MOST * LINE) as u64 + 1)
        .read_to_string(&mut text)?;
    parse(&text).ok_or_else(|| {
        let why = "expected at most 512 lines such as 12-9f86d081884c7d65, with rising numbers";
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

fn parse(text: &str) -> Option<Vec<Generation>> {
    let all: Vec<_> = text.lines().map(Generation::parse).collect::<Option<_>>()?;
    let rises = |pair: &[Generation]| pair[0].number < pair[1].number;
    (all.len() <= MOST && all.windows(2).all(rises)).then_some(all)
}

/// Writes the file with one more generation, durably.
fn raise(path: &Path, mut all: Vec<Generation>) -> io::Result<Vec<Generation>> {
    all.push(Generation::after(&all));
    let surplus = all.len().saturating_sub(MOST);
    all.drain(..surplus);
    let text: String = all.iter().map(|one| format!("{one}\n")).collect();
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    file::replace(path, text.as_bytes(), 0o600)?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn current(generations: &Generations) -> String {
        generations.answer("").unwrap().current
    }

    fn knows(generations: &Generations, recorded: &str) -> bool {
        !generations.answer(recorded).unwrap().is_unknown
    }

    #[test]
    fn a_copy_of_a_disk_does_not_know_what_came_after_it() {
        let root = TempDir::new().unwrap();
        let path = root.path().join(FILE);
        let first = current(&Generations::open(root.path()));
        assert!(first.starts_with("1-"));
        let copy = fs::read(&path).unwrap();

        let disk = Generations::open(root.path());
        let second = current(&disk);
        assert!(second.starts_with("2-"));
        assert!(knows(&disk, &first) && knows(&disk, &second));
        disk.raise();
        let third = current(&disk);
        assert!(knows(&disk, &second));

        // the host brings the copy back: its next generations have the same numbers
        fs::write(&path, copy).unwrap();
        let old = Generations::open(root.path());
        assert!(current(&old).starts_with("2-"));
        assert!(!knows(&old, &second) && !knows(&old, &third) && knows(&old, &first));
        old.raise();
        old.raise();
        assert!(current(&old).starts_with("4-"));
        assert!(!knows(&old, &second) && !knows(&old, &third));
        // a disk that was formatted again
        fs::remove_file(&path).unwrap();
        assert!(!knows(&Generations::open(root.path()), &third));
    }

    #[test]
    fn the_oldest_generations_are_forgotten() {
        let root = TempDir::new().unwrap();
        let disk = Generations::open(root.path());
        let first = current(&disk);
        for _ in 0..MOST - 1 {
            disk.raise();
        }
        assert!(knows(&disk, &first));
        assert_eq!(read(&disk.path).unwrap().len(), MOST);
        disk.raise();
        assert_eq!(read(&disk.path).unwrap().len(), MOST);
        assert!(!knows(&disk, &first));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_no_new_disk() {
        let root = TempDir::new().unwrap();
        let path = root.path().join(FILE);
        let first = current(&Generations::open(root.path()));
        for content in [
            "12",
            "1-0",
            "a-9f86d081884c7d65",
            "1-9F86D081884C7D65",
            "\n",
            "1-+f86d081884c7d65",
        ] {
            fs::write(&path, content).unwrap();
            let disk = Generations::open(root.path());
            let refused = disk.answer(&first).err().unwrap();
            assert_eq!(refused.code(), Code::Internal, "{content}");
            assert!(
                refused.message().contains("firstlight/generations"),
                "{}",
                refused.message()
            );
            disk.raise();
            assert_eq!(
                fs::read_to_string(&path).unwrap(),
                content,
                "it stays for a person"
            );
        }
        fs::write(&path, "2-9f86d081884c7d65\n2-9f86d081884c7d65\n").unwrap();
        assert!(Generations::open(root.path()).answer("").is_err());
        fs::write(&path, format!("{}-9f86d081884c7d65\n", u64::MAX)).unwrap();
        Generations::open(root.path());
    }

    #[test]
    fn a_recorded_generation_that_is_none_is_refused() {
        let root = TempDir::new().unwrap();
        let disk = Generations::open(root.path());
        for recorded in ["12", "-", "12-", &"9".repeat(200), "1-ä234567890abcde"] {
            let refused = disk.answer(recorded).err().unwrap();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.message().len() < 150);
        }
    }

    #[test]
    fn any_file_is_read_or_refused() {
        let valid = "1-9f86d081884c7d65\n2-0f86d081884c7d65\n3-af86d081884c7d65\n";
        for bytes in support::mutation::mutations(valid.as_bytes(), 10_000) {
            if let Some(all) = parse(&String::from_utf8_lossy(&bytes)) {
                assert!(all.len() <= MOST);
            }
        }
    }
}
