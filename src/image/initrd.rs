//! Finds the files in an initrd: archives in the `newc` format of the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst, one after the other, each
//! uncompressed or compressed. Of the compression formats, only gzip is supported.

use std::collections::BTreeSet;
use std::io::{self, Read};

use flate2::bufread::GzDecoder;

/// The length of a member's header: a magic number of 6 digits, then fields of 8 hexadecimal
/// digits.
const HEADER: usize = 110;
const MAGICS: [&[u8]; 2] = [b"070701", b"070702"];
/// The fields with the length of the file and of its name.
const FILE_SIZE: usize = 6;
const NAME_SIZE: usize = 11;
/// Maximum length of a name with its terminating zero (PATH_MAX).
const MAX_NAME: usize = 4096;
/// Maximum number of bytes that are decompressed from an initrd.
const MAX_UNPACKED: u64 = 1 << 30;
const TRAILER: &[u8] = b"TRAILER!!!";

/// The files that were found in an initrd.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// The files that were searched for.
    pub found: BTreeSet<&'static str>,
    /// The files that were searched for.
    pub unread: Option<&'static str>,
}

/// Looks for files in an initrd. Each of `wanted` is the end of a path, such as `bin/sshd` or
/// `sshd`.
pub fn find(initrd: &[u8], wanted: &[&'static str]) -> Files {
    let (mut rest, mut files, mut left) = (initrd, Files::default(), MAX_UNPACKED);
    while let Some(start) = rest.iter().position(|byte| *byte != 0) {
        rest = &rest[start..];
        let mut see = |name: &[u8]| {
            let is_it = |end: &&&str| {
                let before = name.strip_suffix(end.as_bytes());
                before.is_some_and(|before| before.is_empty() || before.ends_with(b"/"))
            };
            files.found.extend(wanted.iter().find(is_it));
        };
        let read = match rest {
            [b'0', ..] => archive(&mut rest, &mut see),
            [0x1f, 0x8b, ..] => gunzipped(&mut rest, &mut left, &mut see),
            _ => Err("it is compressed in another way than by gzip"),
        };
        if read.is_err() {
            files.unread = read.err();
            break;
        }
    }
    files
}

/// Reads the archives in a gzip stream, of which at most `left` bytes are decompressed.
fn gunzipped(
    packed: &mut &[u8],
    left: &mut u64,
    see: &mut impl FnMut(&[u8]),
) -> Result<(), &'static str> {
    let mut stream = GzDecoder::new(packed).take(*left);
    loop {
        *left = stream.limit();
        let mut first = [0];
        match stream.read(&mut first) {
            Ok(0) if stream.limit() > 0 => return Ok(()),
            Ok(1) if first == [0] => {}
            Ok(1) => archive(&mut first.chain(&mut stream), see)?,
            _ => return Err("its gzip stream is damaged or too long"),
        }
    }
}

/// Reads an archive up to its trailer; passes the names of its members to `see`.
fn archive(archive: &mut impl Read, see: &mut impl FnMut(&[u8])) -> Result<(), &'static str> {
    const DAMAGED: &str = "its archive is damaged";
    loop {
        let mut header = [0; HEADER];
        archive.read_exact(&mut header).map_err(|_| DAMAGED)?;
        let field = |index: usize| {
            let digits = str::from_utf8(&header[6 + 8 * index..][..8]).ok()?;
            u32::from_str_radix(digits, 16).ok()
        };
        let sizes = field(FILE_SIZE).zip(field(NAME_SIZE));
        let (size, name_size) = sizes
            .filter(|_| MAGICS.contains(&&header[..6]))
            .ok_or(DAMAGED)?;
        let mut name = [0; MAX_NAME];
        let name = name.get_mut(..name_size as usize).ok_or(DAMAGED)?;
        archive.read_exact(name).map_err(|_| DAMAGED)?;
        skip(archive, padding(HEADER as u64 + u64::from(name_size)))?;
        let name = name.strip_suffix(b"\0").ok_or(DAMAGED)?;
        if name == TRAILER {
            return Ok(());
        }
        see(name);
        skip(archive, u64::from(size) + padding(size.into()))?;
    }
}

/// Returns the number of bytes up to the next multiple of four.
fn padding(length: u64) -> u64 {
    length.next_multiple_of(4) - length
}

fn skip(archive: &mut impl Read, bytes: u64) -> Result<(), &'static str> {
    match io::copy(&mut archive.take(bytes), &mut io::sink()) {
        Ok(skipped) if skipped == bytes => Ok(()),
        _ => Err("its archive is cut off"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use support::mutation::mutations;

    use super::super::cpio;
    use super::*;

    const WANTED: [&str; 3] = ["sshd", "lib/marker", "waagent"];

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    }

    fn found(initrd: &[u8]) -> (Vec<&'static str>, Option<&'static str>) {
        let files = find(initrd, &WANTED);
        (files.found.into_iter().collect(), files.unread)
    }

    #[test]
    fn files_are_found_in_archives_one_behind_the_other_and_in_gzip_streams() {
        let [one, two] = ["sshd", "lib/marker"].map(|name| cpio::archive(name, b"content"));
        let none = cpio::archive("xsshd", b"sshd");
        let both = [&one[..], &[0; 512], &two].concat();
        assert_eq!(found(&both), (vec!["lib/marker", "sshd"], None));
        let packed = [&none[..], &gzip(&both), &none].concat();
        assert_eq!(found(&packed), (vec!["lib/marker", "sshd"], None));
        assert_eq!(found(&[]), (vec![], None));
        let zstd = [&one[..], b"\x28\xb5\x2f\xfd"].concat();
        let (names, unread) = found(&zstd);
        assert_eq!(names, ["sshd"]);
        assert!(unread.unwrap().contains("compressed"));
        assert!(found(&one[..one.len() - 20]).1.unwrap().contains("damaged"));
        let cut = gzip(&both);
        assert!(found(&cut[..cut.len() / 2]).1.is_some());
    }

    #[test]
    fn mutated_initrds_cause_no_panic() {
        let plain = cpio::archive("sshd", b"content");
        let packed = [&plain[..], &gzip(&plain)].concat();
        for bytes in mutations(&packed, 20_000) {
            find(&bytes, &WANTED);
        }
    }
}
