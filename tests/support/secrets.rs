//! Searches memory for secrets: in plain, in hexadecimal and in base64, and each piece of 16 bytes for itself, because a copy may be
//! incomplete. It reads a process as the kernel shows it to root (`/proc/PID/mem`), or the memory of a whole virtual machine from a
//! file.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// Length in bytes of the pieces that are searched.
const PIECE: usize = 16;
/// Every search text begins with so many bytes, by which it is found.
const KEY: usize = 8;
/// The longest search text: a piece in hexadecimal.
const LONGEST: usize = 2 * PIECE;
/// Bytes before and after a hit that a report shows.
const AROUND: usize = 48;
pub const PAGE: usize = 4096;

/// The secrets to search for.
#[derive(Default)]
pub struct Secrets {
    needles: Vec<Needle>,
    by_key: HashMap<[u8; KEY], Vec<usize>>,
    /// Which values the hash of a key has, so that most positions need no look into the map.
    hashes: Vec<bool>,
}

struct Needle {
    text: Vec<u8>,
    secret: String,
    /// The bytes of the secret that the text has.
    bytes: Range<usize>,
    form: &'static str,
}

/// A part of a secret in memory.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The name of the secret.
    pub secret: String,
    /// The bytes of the secret.
    pub bytes: Range<usize>,
    /// How the bytes are encoded.
    pub form: &'static str,
    /// The address of the first byte; in the memory of a machine, the physical address.
    pub at: u64,
    /// What the memory belongs to.
    pub owner: String,
    /// The memory before and after, as text.
    pub around: String,
}

impl Hit {
    /// Returns the number of the page.
    pub fn page(&self) -> u64 {
        self.at / PAGE as u64
    }
}

impl fmt::Display for Hit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.bytes;
        write!(
            f,
            "{}, bytes {start}..{end} in {}, at {:#x} ({}): {}",
            self.secret, self.form, self.at, self.owner, self.around
        )
    }
}

/// Returns the hits as one text for the message of a failed test.
pub fn list(hits: &[Hit]) -> String {
    hits.iter().map(|hit| format!("\n  {hit}")).collect()
}

impl Secrets {
    /// Adds a secret of at least 16 bytes.
    pub fn add(&mut self, name: &str, secret: &[u8]) {
        assert!(secret.len() >= PIECE, "{name} is too short");
        let last = secret.len() - PIECE;
        for start in (0..last).step_by(PIECE).chain([last]) {
            let bytes = start..start + PIECE;
            let piece = &secret[bytes.clone()];
            let hex: String = piece.iter().map(|byte| format!("{byte:02x}")).collect();
            let mut texts = vec![
                (piece.to_vec(), "plain"),
                (hex.to_uppercase().into_bytes(), "hexadecimal"),
                (hex.into_bytes(), "hexadecimal"),
            ];
            for alignment in 0..3 {
                // only the characters that depend on no other byte
                let input = [&[0; 2][..alignment], piece].concat();
                let characters = (8 * alignment).div_ceil(6)..8 * input.len() / 6;
                for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
                    let text = engine.encode(&input)[characters.clone()].to_owned();
                    texts.push((text.into_bytes(), "base64"));
                }
            }
            texts.dedup();
            for (text, form) in texts {
                self.add_needle(Needle {
                    text,
                    secret: name.to_owned(),
                    bytes: bytes.clone(),
                    form,
                });
            }
        }
    }

    fn add_needle(&mut self, needle: Needle) {
        let key = needle.text[..KEY].try_into().unwrap();
        self.hashes.resize(1 << 16, false);
        self.hashes[hash(key)] = true;
        let same_key = self.by_key.entry(key).or_default();
        same_key.push(self.needles.len());
        self.needles.push(needle);
    }

    /// Searches `content`, which begins at this address.
    pub fn find(&self, content: &[u8], address: u64, owner: &str) -> Vec<Hit> {
        let mut hits: Vec<Hit> = vec![];
        for (at, key) in content.windows(KEY).enumerate() {
            let key: [u8; KEY] = key.try_into().unwrap();
            if !self.hashes[hash(key)] {
                continue;
            }
            for number in self.by_key.get(&key).into_iter().flatten() {
                let needle = &self.needles[*number];
                if content[at..].starts_with(&needle.text) {
                    let (from, to) = (at.saturating_sub(AROUND), at + needle.text.len() + AROUND);
                    let around = &content[from..to.min(content.len())];
                    hits.push(Hit {
                        secret: needle.secret.clone(),
                        bytes: needle.bytes.clone(),
                        form: needle.form,
                        at: address + at as u64,
                        owner: owner.to_owned(),
                        around: String::from_utf8_lossy(&around.escape_ascii().collect::<Vec<_>>())
                            .into_owned(),
                    });
                }
            }
        }
        hits
    }

    /// Searches all memory of a process.
    pub fn in_process(&self, process: u32) -> Vec<Hit> {
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        let memory = File::open(format!("/proc/{process}/mem")).unwrap();
        let stacks = stacks(process);
        let mut hits = vec![];
        for line in maps.lines() {
            let mut words = line.split_ascii_whitespace();
            let (from, to) = words.next().unwrap().split_once('-').unwrap();
            let [from, to] = [from, to].map(|address| u64::from_str_radix(address, 16).unwrap());
            let name = words.nth(4).unwrap_or("anonymous").to_owned();
            let mut content = vec![0; (to - from) as usize];
            // a region may have been unmapped meanwhile
            if memory.read_exact_at(&mut content, from).is_err() {
                continue;
            }
            // the heap of musl may be in the same region as a stack
            let stacks = stacks.range(from..to).map(|(pointer, thread)| {
                format!(", with the stack of thread {thread} above {pointer:#x}")
            });
            let owner = name + &stacks.collect::<String>();
            hits.extend(self.find(&content, from, &owner));
        }
        hits
    }

    /// Searches a file that holds the memory of a machine.
    pub fn in_file(&self, path: &Path) -> io::Result<Vec<Hit>> {
        const CHUNK: usize = 256 * PAGE;
        let mut file = File::open(path)?;
        // the end of each chunk is searched again before the next one
        let (mut window, mut start, mut hits) = (vec![], 0, vec![]);
        loop {
            let kept = window.len().min(LONGEST + AROUND);
            start += (window.len() - kept) as u64;
            window.drain(..window.len() - kept);
            if file.by_ref().take(CHUNK as u64).read_to_end(&mut window)? == 0 {
                break;
            }
            if window.iter().all(|byte| *byte == 0) {
                continue;
            }
            for hit in self.find(&window, start, "memory of the machine") {
                if !hits.iter().any(|old: &Hit| {
                    (old.at, &old.secret, &old.bytes) == (hit.at, &hit.secret, &hit.bytes)
                }) {
                    hits.push(hit);
                }
            }
        }
        Ok(hits)
    }
}

fn hash(key: [u8; KEY]) -> usize {
    (u64::from_le_bytes(key).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as usize
}

/// Returns the names of a process's threads by their stack pointers, as far as they are in a system call.
fn stacks(process: u32) -> BTreeMap<u64, String> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let stack = |task: &Path| {
        // proc(5): the last two numbers are the stack pointer and the program counter
        let call = fs::read_to_string(task.join("syscall")).ok()?;
        let pointer = call.split_ascii_whitespace().rev().nth(1)?.to_owned();
        let pointer = u64::from_str_radix(pointer.strip_prefix("0x")?, 16).ok()?;
        let name = fs::read_to_string(task.join("comm")).ok()?;
        Some((pointer, name.trim_end().to_owned()))
    };
    tasks.filter_map(|task| stack(&task.ok()?.path())).collect()
}

/// Checks that a process writes no core dump, by the text of its `/proc/PID/limits`.
pub fn assert_no_core_dumps(limits: &str) {
    let mut lines = limits.lines();
    let core = lines.find(|line| line.starts_with("Max core file size"));
    let core: Vec<_> = core.unwrap().split_whitespace().skip(4).take(2).collect();
    assert_eq!(core, ["0", "0"]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_secret_is_found_in_each_form_and_in_part() {
        let secret: Vec<u8> = (0..32_u8).map(|n| n.wrapping_mul(37) ^ 0xa5).collect();
        let mut secrets = Secrets::default();
        secrets.add("secret", &secret);
        let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut forms = vec![
            secret.clone(),
            hex.to_uppercase().into_bytes(),
            hex.into_bytes(),
        ];
        for before in 0..3 {
            let input = [&vec![b'x'; before], &secret[..], b"y"].concat();
            forms.push(STANDARD_NO_PAD.encode(&input).into_bytes());
            forms.push(URL_SAFE_NO_PAD.encode(&input).into_bytes());
        }
        for form in forms {
            let memory = [&b"before"[..], &form, b"behind"].concat();
            let hits = secrets.find(&memory, 0x1000, "test");
            let found: Vec<Range<usize>> = hits.iter().map(|hit| hit.bytes.clone()).collect();
            assert_eq!(found, [0..16, 16..32], "{}", memory.escape_ascii());
            assert!(hits[0].at >= 0x1006 && hits[0].around.starts_with("before"));
            // the second half is missing, and then a bit of the first one
            let mut cut = memory[..6 + form.len() * 3 / 4].to_vec();
            assert_eq!(secrets.find(&cut, 0, "test").len(), 1);
            cut[12] ^= 1;
            assert!(secrets.find(&cut, 0, "test").is_empty());
        }
    }

    #[test]
    fn a_secret_is_found_once_across_the_chunks_of_a_file() {
        let secret: Vec<u8> = (1..=32).collect();
        let mut secrets = Secrets::default();
        secrets.add("secret", &secret);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut memory = vec![0; 600 * PAGE];
        for at in [256 * PAGE - 40, 512 * PAGE - 8, 599 * PAGE] {
            memory[at..at + 32].copy_from_slice(&secret);
        }
        file.write_all(&memory).unwrap();
        let hits = secrets.in_file(file.path()).unwrap();
        let at: Vec<u64> = hits.iter().map(|hit| hit.at).collect();
        let expected = [256 * PAGE - 40, 512 * PAGE - 8, 599 * PAGE];
        let expected = expected.map(|at| at as u64).map(|at| [at, at + 16]);
        assert_eq!(at, expected.concat());
        assert_eq!(hits[0].page(), 255);
    }
}
