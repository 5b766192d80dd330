//! Archives of components, plain and gzipped. Their checksums are made right, because a wrong one ends the extraction.
#![no_main]

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::path::Path;

use libfuzzer_sys::fuzz_target;

// the included file uses this path
use base::stop;

#[allow(dead_code)] // no code reads the errors' fields here
#[path = "../../../src/kubernetes/components/archive.rs"]
mod archive;

fuzz_target!(|data: &[u8]| {
    let fixed: Vec<u8> = data.chunks(512).flat_map(with_checksum).collect();
    for bytes in [&fixed[..], data] {
        let outer = Path::new("/dev/shm").join(format!("firstlight-fuzz-{}", std::process::id()));
        let root = outer.join("root");
        fs::create_dir_all(&root).expect("a directory");
        let packed = outer.join("archive");
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(&packed)
            .expect("a file");
        file.write_all(bytes)
            .and_then(|()| file.rewind())
            .expect("room in memory");
        let _ = archive::unpack(file, &root, &stop::Stop::new());
        assert_eq!(fs::read_dir(&outer).expect("still there").count(), 2);
        fs::remove_dir_all(&outer).expect("only files and directories");
    }
});

/// The checksum of a header is the sum of its bytes, with spaces in the checksum's place (POSIX.1-2017 pax, ustar).
fn with_checksum(block: &[u8]) -> Vec<u8> {
    let mut block = block.to_vec();
    if block.len() == 512 && block.iter().any(|byte| *byte != 0) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    block
}
