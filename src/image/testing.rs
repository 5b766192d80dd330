//! Small valid inputs for the tests of the parsers. tests/measure.rs has images made by the usual
//! tools.

/// Returns an EFI program with these sections.
pub fn program(sections: &[(&str, &[u8])]) -> Vec<u8> {
    const HEADERS: usize = 1024;
    let mut bytes = vec![0; HEADERS];
    bytes[..2].copy_from_slice(b"MZ");
    bytes[0x3c] = 0x40;
    bytes[0x40..0x44].copy_from_slice(b"PE\0\0");
    bytes[0x46] = sections.len() as u8;
    // the optional header: PE32+ with 16 data directories
    let optional = 0x44 + 20;
    bytes[0x54..0x56].copy_from_slice(&240u16.to_le_bytes());
    bytes[optional..optional + 2].copy_from_slice(&0x20bu16.to_le_bytes());
    bytes[optional + 60..optional + 64].copy_from_slice(&(HEADERS as u32).to_le_bytes());
    bytes[optional + 108] = 16;
    for (index, (name, content)) in sections.iter().enumerate() {
        let header = optional + 240 + 40 * index;
        let raw = bytes.len();
        let mut data = content.to_vec();
        data.resize(content.len().next_multiple_of(16), 0);
        bytes[header..header + name.len()].copy_from_slice(name.as_bytes());
        for (at, value) in [(8, content.len()), (16, data.len()), (20, raw)] {
            bytes[header + at..header + at + 4].copy_from_slice(&(value as u32).to_le_bytes());
        }
        bytes.append(&mut data);
    }
    bytes
}

/// Returns a unified kernel image of this version of systemd-stub, with further sections.
pub fn unified(version: &str, sections: &[(&str, &[u8])]) -> Vec<u8> {
    let magic = format!("#### LoaderInfo: systemd-stub {version} ####\0");
    let kernel = program(&[(".text", b"a kernel")]);
    let own: [(&str, &[u8]); 6] = [
        (".sbat", b"sbat,1"),
        (".sdmagic", magic.as_bytes()),
        (".osrel", b"ID=test\n"),
        (".cmdline", b"console=ttyS0"),
        (".initrd", b"initrd"),
        (".linux", &kernel),
    ];
    program(&[&own, sections].concat())
}

/// Returns a disk with an EFI system partition (FAT12) that has this file as \EFI\BOOT\BOOTX64.EFI.
pub fn disk(file: &[u8]) -> Vec<u8> {
    const SECTOR: usize = 512;
    const ESP: usize = 3;
    // boot sector, table, root directory, then the clusters of a sector each
    const DATA: usize = ESP + 3;
    let sectors = 2 + file.len().div_ceil(SECTOR);
    let mut disk = vec![0; (DATA + sectors) * SECTOR];
    let mut put = |at: usize, bytes: &[u8]| disk[at..at + bytes.len()].copy_from_slice(bytes);
    let header = SECTOR;
    put(header, b"EFI PART");
    put(header + 72, &2u64.to_le_bytes());
    put(header + 80, &4u32.to_le_bytes());
    put(header + 84, &128u32.to_le_bytes());
    put(2 * SECTOR, &super::gpt::ESP);
    put(2 * SECTOR + 32, &(ESP as u64).to_le_bytes());
    put(
        2 * SECTOR + 40,
        &((DATA + sectors - 1) as u64).to_le_bytes(),
    );
    let boot = ESP * SECTOR;
    put(boot + 11, &512u16.to_le_bytes());
    put(boot + 13, &[1, 1, 0, 1, 16, 0]);
    put(boot + 19, &((3 + sectors) as u16).to_le_bytes());
    put(boot + 22, &1u16.to_le_bytes());
    put(boot + 510, &[0x55, 0xaa]);
    // clusters: 2 is \EFI, 3 is \EFI\BOOT, from 4 on the file
    let last = 1 + sectors;
    let next = |cluster: usize| match cluster {
        0..=3 => 0xfff,
        _ if cluster == last => 0xfff,
        _ => cluster + 1,
    };
    for pair in 0..=last / 2 {
        let (even, odd) = (next(2 * pair), next(2 * pair + 1));
        let three = [even as u8, (even >> 8 | odd << 4) as u8, (odd >> 4) as u8];
        put(boot + SECTOR + 3 * pair, &three);
    }
    let entry = |name: &[u8; 11], attributes: u8, cluster: u16, size: usize| {
        let mut entry = [0; 32];
        entry[..11].copy_from_slice(name);
        entry[11] = attributes;
        entry[26..28].copy_from_slice(&cluster.to_le_bytes());
        entry[28..].copy_from_slice(&(size as u32).to_le_bytes());
        entry
    };
    put((DATA - 1) * SECTOR, &entry(b"EFI        ", 0x10, 2, 0));
    put(DATA * SECTOR, &entry(b"BOOT       ", 0x10, 3, 0));
    put(
        (DATA + 1) * SECTOR,
        &entry(b"BOOTX64 EFI", 0x20, 4, file.len()),
    );
    put((DATA + 2) * SECTOR, file);
    disk
}
