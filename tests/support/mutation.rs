//! Hostile variants of valid inputs for the tests of parsers, which are the same in each run, and the stored inputs of fuzzers.

use std::fs::File;
use std::io::Read;

use crate::random::Random;

/// Returns `count` variants of `valid`, each with a few changes: bits flipped; bytes set, truncated, doubled, moved or deleted.
pub fn mutations(valid: &[u8], count: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut random = Random::new(1);
    (0..count).map(move |_| {
        let mut bytes = valid.to_vec();
        for _ in 0..1 + random.below(4) {
            mutate(&mut bytes, &mut random);
        }
        bytes
    })
}

/// Returns the stored inputs of a fuzzer (`fuzz/corpus/TARGET.tar.gz`), each with its name.
pub fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let path = format!("{}/fuzz/corpus/{target}.tar.gz", crate::ROOT);
    let file = File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let inputs: Vec<_> = archive
        .entries()
        .expect("an archive")
        .map(|entry| {
            let mut entry = entry.expect("an input");
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).expect("its bytes");
            let name = entry.path().expect("a name").display().to_string();
            (format!("{path}: {name}"), bytes)
        })
        .collect();
    assert!(!inputs.is_empty(), "{path} is empty");
    inputs
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    /// Bytes that parsers treat as special.
    const SPECIAL: &[u8] = b"\0\xff\x7f\x80\"{}[],:%=&?\\/ \n+-.0e";
    let at = random.below(bytes.len() + 1);
    let end = at + random.below(bytes.len() + 1 - at);
    match random.below(6) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = SPECIAL[random.below(SPECIAL.len())],
        2 => bytes.insert(at, SPECIAL[random.below(SPECIAL.len())]),
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..end)),
        5 => {
            let copy = bytes[at..end].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        _ => {}
    }
}
