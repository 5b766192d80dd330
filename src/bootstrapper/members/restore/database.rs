//! The members of etcd in its database, which is also the content of a snapshot, and its objects.
//! Without a majority etcd lists its members to no tool of version 3.5, and a member that does not run
//! lists nothing.
//!
//! The database is a B+ tree of bbolt. Each of its first two pages names a root; the one with the
//! higher transaction number and a right checksum is valid. The root has the buckets (bbolt's page.go,
//! bucket.go and meta.go). All numbers are little-endian.
//!
//! - The bucket `members` has one JSON object for each member (etcd's
//!   server/storage/schema/membership.go).
//! - The bucket `key` has each change of an object: the key is the revision (8 bytes, `_`, 8 bytes, and
//!   `t` if the object was deleted; big-endian), and the value the protobuf message `mvccpb.KeyValue`
//!   with the object's key (1) and value (5) (server/storage/mvcc/revision.go,
//!   api/mvccpb/kv.proto).

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};

use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};

use serde_json::{Value, json};

use super::failed_check::{FailedCheck, failed_check};

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
const MEMBERS: &[u8] = b"members";
const OBJECTS: &[u8] = b"key";
/// The bytes of a revision, without the mark of a deletion.
const REVISION: usize = 17;
const DELETED: u8 = b't';
const MAX_PAGE: usize = 64 << 10;
/// The maximum bytes of a page with its overflow. A page of members has far less; an object has at most 1.5 MiB, unless etcd is told
/// otherwise.
const MAX_BYTES: usize = 16 << 20;
/// The maximum number of pages that are read: the root has some 15 buckets.
const MAX_PAGES: u64 = 256;

/// Is called with the flags, key and value of each element of a leaf.
type Each<'a> = dyn FnMut(u32, &[u8], &[u8]) -> io::Result<()> + 'a;
/// The objects: the SHA-256 of each value by its key.
pub type StoredObjects = BTreeMap<String, [u8; SHA256_OUTPUT_LEN]>;

/// A member of etcd as the database has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredMember {
    /// The name; empty if the member never started.
    pub name: String,
    /// The URLs at which other members reach it.
    pub urls: Vec<String>,
}

/// Reads the members from a database. The error is a clause.
pub fn members(file: impl Read + Seek) -> Result<Vec<StoredMember>, FailedCheck> {
    let mut members = vec![];
    let read = bucket(file, MEMBERS, MAX_PAGES, &mut |_, _, value| {
        let member = serde_json::from_slice(value).ok();
        let member = member.and_then(|value| StoredMember::of(&value));
        members.push(member.ok_or_else(|| malformed("a member is not as etcd writes it"))?);
        Ok(())
    });
    let read = read.and_then(|()| {
        if members.is_empty() {
            Err(malformed("it has no member"))
        } else {
            Ok(members)
        }
    });
    read.map_err(|error| failed_check!("{error}"))
}

/// Reads the objects of a database whose keys `is_wanted` accepts, as they were at its last revision. The error is a clause.
pub fn objects(
    mut file: impl Read + Seek,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Result<StoredObjects, FailedCheck> {
    let mut newest = BTreeMap::new();
    let mut read = || {
        let length = file.seek(SeekFrom::End(0))?;
        // no page has less bytes
        let pages = length / 512 + 1;
        bucket(&mut file, OBJECTS, pages, &mut |_, revision, value| {
            let is_deleted = match revision.get(REVISION..) {
                Some([]) => false,
                Some([DELETED]) => true,
                _ => return Err(malformed("a revision is not as etcd writes it")),
            };
            let (key, value) = key_and_value(value)
                .ok_or_else(|| malformed("an object is not as etcd writes it"))?;
            // an API server also reads an object whose key is no text
            let key = String::from_utf8_lossy(key);
            if !is_wanted(&key) {
                return Ok(());
            }
            let revision = revision[..REVISION].to_vec();
            let entry = newest.entry(key.into_owned()).or_insert((vec![], None));
            // pages come in no order
            if revision > entry.0 {
                let hash = || digest(&SHA256, value).as_ref().try_into().ok();
                *entry = (revision, (!is_deleted).then(hash).flatten());
            }
            Ok(())
        })
    };
    read().map_err(|error: io::Error| failed_check!("{error}"))?;
    let present = newest
        .into_iter()
        .filter_map(|(key, (_, hash))| Some((key, hash?)));
    Ok(present.collect())
}

/// Calls `each` with the elements of a bucket. Reads at most so many pages.
fn bucket(file: impl Read + Seek, name: &[u8], max_pages: u64, each: &mut Each) -> io::Result<()> {
    let mut pages = Pages {
        file,
        size: 0,
        left: max_pages,
    };
    let root = pages.root()?;
    let mut found = None;
    pages.leaves(root, &mut |flags, key, value| {
        if flags & BUCKET != 0 && key == name {
            found = Some(value.to_vec());
        }
        Ok(())
    })?;
    let found = found.ok_or_else(|| malformed("it lacks a bucket"))?;
    match number(&found, 0)? {
        // a small bucket is a page in its value
        0 => elements(found.get(BUCKET_HEADER..).unwrap_or_default(), each),
        page => pages.leaves(page, each),
    }
}

/// Returns the fields 1 and 5 of a protobuf message, empty if they are missing; `None` if it is malformed.
fn key_and_value(mut message: &[u8]) -> Option<(&[u8], &[u8])> {
    let (mut key, mut value): (&[u8], &[u8]) = (&[], &[]);
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        match tag & 7 {
            0 => drop(varint(&mut message)?),
            2 => {
                let length = usize::try_from(varint(&mut message)?).ok()?;
                let (content, rest) = message.split_at_checked(length)?;
                message = rest;
                match tag >> 3 {
                    1 => key = content,
                    5 => value = content,
                    _ => {}
                }
            }
            _ => return None,
        }
    }
    Some((key, value))
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(first & 0x7f).checked_shl(shift)?;
        if first & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

impl StoredMember {
    /// Returns the member that a JSON object of etcd describes.
    pub fn of(value: &Value) -> Option<StoredMember> {
        let urls = value.get("peerURLs")?.as_array()?.iter();
        let urls: Option<Vec<_>> = urls.map(|url| url.as_str().map(str::to_owned)).collect();
        Some(StoredMember {
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
    left: u64,
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
        if content.len() == bytes {
            Ok(content)
        } else {
            Err(malformed("a page is outside"))
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
        each(flags?, key, value)?;
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
            leaf(&[(BUCKET, b"key", b""), (BUCKET, MEMBERS, &older)]),
            branch,
            leaf(&[
                (BUCKET, b"key", b""),
                (BUCKET, MEMBERS, &bucket),
                (0, MEMBERS, b""),
            ]),
            leaf(&[(0, b"1", &a), (0, b"2", &b)]),
        ])
    }

    fn names(bytes: &[u8]) -> Result<Vec<String>, FailedCheck> {
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

    fn revision(main: u64, sub: u64, is_deleted: bool) -> Vec<u8> {
        let end: &[u8] = if is_deleted { b"t" } else { b"" };
        [&main.to_be_bytes()[..], b"_", &sub.to_be_bytes(), end].concat()
    }

    fn object(key: &str, value: &[u8]) -> Vec<u8> {
        let field = |tag: u8, content: &[u8]| [&[tag, content.len() as u8], content].concat();
        // the numbers of the creation and of the change are between both
        let numbers = [0x10, 0x80, 0x01, 0x18, 0x07];
        [
            &field(0x0a, key.as_bytes())[..],
            &numbers,
            &field(0x2a, value),
        ]
        .concat()
    }

    /// Two leaves of objects below a branch.
    fn database_of_objects() -> Vec<u8> {
        let (old, new, gone) = (
            object("/a/1", b"old"),
            object("/a/1", b"new"),
            object("/a/2", b"x"),
        );
        let (other, deletion) = (object("/b/1", b"y"), object("/a/2", b""));
        let mut branch = vec![0; HEADER + 32];
        (branch[8], branch[10]) = (BRANCH as u8, 2);
        (branch[HEADER + 8], branch[HEADER + 24]) = (4, 5);
        let mut bucket = vec![0; BUCKET_HEADER];
        bucket[0] = 3;
        file(&[
            meta(8, 2),
            meta(9, 2),
            leaf(&[(BUCKET, OBJECTS, &bucket)]),
            branch,
            leaf(&[
                (0, &revision(2, 9, false), &old),
                (0, &revision(3, 0, false), &gone),
                (0, &revision(3, 2, false), &other),
            ]),
            leaf(&[
                (0, &revision(3, 1, false), &new),
                (0, &revision(4, 0, true), &deletion),
            ]),
        ])
    }

    #[test]
    fn objects_are_those_of_the_last_revision() {
        let is_wanted = |key: &str| key.starts_with("/a/");
        let read = |bytes: &[u8]| objects(Cursor::new(bytes), &is_wanted);
        let good = database_of_objects();
        let found = read(&good).unwrap();
        let hash: [u8; 32] = digest(&SHA256, b"new").as_ref().try_into().unwrap();
        assert_eq!(found, BTreeMap::from([("/a/1".to_owned(), hash)]));
        assert!(read(&database()).unwrap_err().contains("a page"));
        for tail in mutations(&good[2 * SIZE..], 20_000) {
            let _ = read(&[&good[..2 * SIZE], &tail].concat());
        }
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
