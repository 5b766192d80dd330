//! The members of etcd in its database, which is also the content of a snapshot. Without a majority
//! etcd lists its members to no tool of version 3.5, and a member that does not run lists nothing.
//!
//! The database is a B+ tree of bbolt. Each of its first two pages names a root; the one with the
//! higher transaction number and a right checksum is valid. The root has the buckets, and the bucket
//! `members` has one JSON object for each member (bbolt's page.go, bucket.go and meta.go; etcd's
//! server/storage/schema/membership.go). All numbers are little-endian.

use std::io::{self, Read, Seek, SeekFrom};

use serde_json::{Value, json};

use super::objection::{Objection, objection};

/// The bytes of a page before its content.
const HEADER: usize = 16;
const META_LEN: usize = 64;
const MAGIC: u32 = 0xED0C_DAED;
const BRANCH: u16 = 1;
const LEAF: u16 = 2;
/// The flag of an element that is a bucket.
const BUCKET: u32 = 1;
/// The bytes of a bucket's value before its only page, if that is in the value.
const BUCKET_HEADER: usize = 16;
const NAME: &[u8] = b"members";
const MAX_PAGE: usize = 64 << 10;
/// The maximum bytes of a page with its overflow. A page of members has far less.
const MAX_BYTES: usize = 4 << 20;
/// The maximum number of pages that are read: the root has some 15 buckets.
const MAX_PAGES: usize = 256;

/// Is called with the flags, key and value of each element of a leaf.
type Each<'a> = dyn FnMut(u32, &[u8], &[u8]) + 'a;

/// A member of etcd as the database has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The name; empty if the member never started.
    pub name: String,
    /// The URLs at which other members reach it.
    pub urls: Vec<String>,
}

/// Reads the members from a database. The error is a clause.
pub fn members(file: impl Read + Seek) -> Result<Vec<Member>, Objection> {
    let mut pages = Pages {
        file,
        size: 0,
        left: MAX_PAGES,
    };
    let read = |pages: &mut Pages<_>| {
        let root = pages.root()?;
        let mut bucket = None;
        pages.leaves(root, &mut |flags, key, value| {
            if flags & BUCKET != 0 && key == NAME {
                bucket = Some(value.to_vec());
            }
        })?;
        let bucket = bucket.ok_or_else(|| malformed("it has no bucket of members"))?;
        let mut members = vec![];
        let mut add = |_: u32, _: &[u8], value: &[u8]| {
            let member = serde_json::from_slice(value).ok();
            members.push(member.and_then(|value| Member::of(&value)));
        };
        match number(&bucket, 0)? {
            // a small bucket is a page in its value
            0 => elements(bucket.get(BUCKET_HEADER..).unwrap_or_default(), &mut add)?,
            page => pages.leaves(page, &mut add)?,
        }
        let members: Option<Vec<Member>> = members.into_iter().collect();
        let members = members.filter(|members| !members.is_empty());
        members.ok_or_else(|| malformed("a member is not as etcd writes it"))
    };
    read(&mut pages).map_err(|error: io::Error| objection!("{error}"))
}

impl Member {
    /// Returns the member that a JSON object of etcd describes.
    pub fn of(value: &Value) -> Option<Member> {
        let urls = value.get("peerURLs")?.as_array()?.iter();
        let urls: Option<Vec<_>> = urls.map(|url| url.as_str().map(str::to_owned)).collect();
        Some(Member {
            name: value.get("name").and_then(Value::as_str)?.to_owned(),
            urls: urls.filter(|urls| !urls.is_empty())?,
        })
    }

    /// Returns the JSON object.
    pub fn json(&self) -> Value {
        json!({"name": self.name, "peerURLs": self.urls})
    }
}

struct Pages<F> {
    file: F,
    /// The bytes of a page.
    size: usize,
    /// How many pages may still be read.
    left: usize,
}

impl<F: Read + Seek> Pages<F> {
    /// Returns the page of the root, and learns the size of pages.
    fn root(&mut self) -> io::Result<u64> {
        let mut newest = None;
        // if the first page is damaged, pages have the size that they have on x86-64
        for at in 0..2 {
            let at = at
                * if self.size == 0 {
                    4096
                } else {
                    self.size as u64
                };
            let Ok(meta) = self.read(at, HEADER + META_LEN) else {
                continue;
            };
            let meta = &meta[HEADER..];
            let size = word(meta, 8)? as usize;
            let is_valid = word(meta, 0)? == MAGIC
                && number(meta, 56)? == checksum(&meta[..56])
                && (HEADER + META_LEN..=MAX_PAGE).contains(&size);
            if is_valid {
                self.size = size;
                newest = newest.max(Some((number(meta, 48)?, number(meta, 16)?)));
            }
        }
        let newest = newest.ok_or_else(|| malformed("it is no database of etcd, or damaged"))?;
        Ok(newest.1)
    }

    /// Calls `each` with the flags, key and value of each element below this page.
    fn leaves(&mut self, page: u64, each: &mut Each) -> io::Result<()> {
        let mut open = vec![page];
        while let Some(page) = open.pop() {
            self.left = self
                .left
                .checked_sub(1)
                .ok_or_else(|| malformed("it has too many pages"))?;
            let at = page
                .checked_mul(self.size as u64)
                .ok_or_else(|| malformed("a page is outside"))?;
            let head = self.read(at, HEADER)?;
            let bytes = (word(&head, 12)? as usize)
                .checked_add(1)
                .and_then(|pages| pages.checked_mul(self.size))
                .filter(|bytes| *bytes <= MAX_BYTES);
            let content = self.read(at, bytes.ok_or_else(|| malformed("a page is too long"))?)?;
            match half(&content, 8)? {
                BRANCH => {
                    for index in 0..half(&content, 10)?.into() {
                        open.push(number(&content, HEADER + index * 16 + 8)?);
                    }
                }
                _ => elements(&content, each)?,
            }
        }
        Ok(())
    }

    fn read(&mut self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        self.file.seek(SeekFrom::Start(at))?;
        let mut content = Vec::new();
        (&mut self.file)
            .take(bytes as u64)
            .read_to_end(&mut content)?;
        match content.len() == bytes {
            true => Ok(content),
            false => Err(malformed("a page is outside")),
        }
    }
}

/// Calls `each` with the flags, key and value of each element of a leaf.
fn elements(page: &[u8], each: &mut Each) -> io::Result<()> {
    if half(page, 8)? != LEAF {
        return Err(malformed("a page has another kind than expected"));
    }
    for index in 0..half(page, 10)?.into() {
        let at = HEADER + index * 16;
        let [flags, place, key, value] = [0, 4, 8, 12].map(|field| word(page, at + field));
        let [place, key, value] = [place?, key?, value?].map(|number| number as usize);
        let rest = page.get(at..).and_then(|rest| rest.get(place..));
        let split = rest.and_then(|rest| rest.split_at_checked(key));
        let found = split.and_then(|(key, rest)| Some((key, rest.get(..value)?)));
        let (key, value) = found.ok_or_else(|| malformed("an element is outside of its page"))?;
        each(flags?, key, value);
    }
    Ok(())
}

/// FNV-1a, 64 bits.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn half(bytes: &[u8], at: usize) -> io::Result<u16> {
    field(bytes, at).map(u16::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> io::Result<u32> {
    field(bytes, at).map(u32::from_le_bytes)
}

fn number(bytes: &[u8], at: usize) -> io::Result<u64> {
    field(bytes, at).map(u64::from_le_bytes)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; N]> {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().ok_or_else(|| malformed("a page is cut off"))
}

fn malformed(why: &'static str) -> io::Error {
    io::Error::other(why)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use support::mutation::mutations;

    use super::*;

    const SIZE: usize = 4096;

    /// Returns a leaf page with these elements.
    fn leaf(elements: &[(u32, &[u8], &[u8])]) -> Vec<u8> {
        let mut page = vec![0; HEADER + elements.len() * 16];
        page[8] = LEAF as u8;
        page[10] = elements.len() as u8;
        for (index, (flags, key, value)) in elements.iter().enumerate() {
            let at = HEADER + index * 16;
            let place = (page.len() - at) as u32;
            let fields = [*flags, place, key.len() as u32, value.len() as u32];
            for (number, field) in fields.iter().enumerate() {
                page[at + number * 4..][..4].copy_from_slice(&field.to_le_bytes());
            }
            page.extend([*key, value].concat());
        }
        page
    }

    fn meta(transaction: u64, root: u64) -> Vec<u8> {
        let mut meta = vec![0; META_LEN];
        meta[..4].copy_from_slice(&MAGIC.to_le_bytes());
        meta[8..12].copy_from_slice(&(SIZE as u32).to_le_bytes());
        meta[16..24].copy_from_slice(&root.to_le_bytes());
        meta[48..56].copy_from_slice(&transaction.to_le_bytes());
        let sum = checksum(&meta[..56]);
        meta[56..].copy_from_slice(&sum.to_le_bytes());
        [vec![0; HEADER], meta].concat()
    }

    fn file(pages: &[Vec<u8>]) -> Vec<u8> {
        let whole = pages.iter().flat_map(|page| {
            let mut page = page.clone();
            page.resize(SIZE, 0);
            page
        });
        whole.collect()
    }

    fn one(name: &str, url: &str) -> Vec<u8> {
        format!(r#"{{"id":7,"peerURLs":["{url}"],"name":"{name}","clientURLs":["x"]}}"#)
            .into_bytes()
    }

    /// The members are in a page of their own, below a branch; the older root has others.
    fn database() -> Vec<u8> {
        let [a, b] = [
            one("a", "https://10.0.0.1:2380"),
            one("", "https://10.0.0.2:2380"),
        ];
        let inline = leaf(&[(0, b"8", &one("old", "https://10.0.0.9:2380"))]);
        let older = [vec![0; BUCKET_HEADER], inline].concat();
        let mut bucket = vec![0; BUCKET_HEADER];
        bucket[0] = 5;
        let mut branch = vec![0; HEADER + 16];
        (branch[8], branch[10], branch[HEADER + 8]) = (BRANCH as u8, 1, 4);
        file(&[
            meta(8, 2),
            meta(9, 3),
            leaf(&[(BUCKET, b"key", b""), (BUCKET, NAME, &older)]),
            branch,
            leaf(&[
                (BUCKET, b"key", b""),
                (BUCKET, NAME, &bucket),
                (0, NAME, b""),
            ]),
            leaf(&[(0, b"1", &a), (0, b"2", &b)]),
        ])
    }

    fn names(bytes: &[u8]) -> Result<Vec<String>, Objection> {
        let members = members(Cursor::new(bytes))?;
        Ok(members.into_iter().map(|it| it.name).collect())
    }

    #[test]
    fn the_newest_valid_root_counts() {
        let mut good = database();
        assert_eq!(names(&good).unwrap(), ["a", ""]);
        let urls = members(Cursor::new(&good)).unwrap().remove(1).urls;
        assert_eq!(urls, ["https://10.0.0.2:2380"]);
        good[SIZE + HEADER + 20] ^= 1;
        assert_eq!(names(&good).unwrap(), ["old"]);
        good[HEADER] ^= 1;
        assert!(names(&good).unwrap_err().contains("no database of etcd"));
    }

    #[test]
    fn a_first_page_that_is_damaged_costs_nothing() {
        let mut damaged = database();
        damaged[..SIZE].fill(0xff);
        assert_eq!(names(&damaged).unwrap(), ["a", ""]);
    }

    #[test]
    fn a_tree_without_an_end_is_refused() {
        let mut bytes = database();
        // the branch is its own child
        bytes[3 * SIZE + HEADER + 8] = 3;
        assert!(names(&bytes).unwrap_err().contains("too many pages"));
        let mut bytes = database();
        bytes[3 * SIZE + 12..][..4].fill(0xff);
        assert!(names(&bytes).unwrap_err().contains("too long"));
    }

    #[test]
    fn mutated_databases_are_refused_or_have_members() {
        let good = database();
        // the checksums protect the roots, so the rest is mutated alone, too
        for tail in mutations(&good[2 * SIZE..], 20_000) {
            let _ = names(&[&good[..2 * SIZE], &tail].concat());
        }
        for bytes in mutations(&good, 2_000) {
            let _ = names(&bytes);
        }
    }
}
