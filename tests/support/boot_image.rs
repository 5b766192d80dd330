//! Unified kernel images and disks with an EFI system partition, made by the tools that distributions use: objcopy, sfdisk,
//! mkfs.fat, mtools. It also makes a firmware for TDX machines, byte by byte.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns systemd's EFI stub and boot manager of a Debian release (bookworm: 252, trixie: 257, sid: the newest), a folder with
/// linuxx64.efi.stub and systemd-bootx64.efi.
pub fn systemd_boot(suite: &str) -> PathBuf {
    script("stub.sh", &[suite])
}

/// Returns Debian's kernel for virtual machines.
pub fn kernel() -> PathBuf {
    let folder = script("kernel.sh", &[]).join("boot");
    let files = std::fs::read_dir(&folder).expect("the kernel's folder");
    let mut files = files.map(|file| file.expect("a file").path());
    files
        .find(|file| file.to_string_lossy().contains("/vmlinuz-"))
        .expect("a kernel")
}

fn script(name: &str, arguments: &[&str]) -> PathBuf {
    let script = Path::new(crate::ROOT).join("tools").join(name);
    run(Command::new(script).args(arguments)).trim().into()
}

/// Runs a program that must succeed; returns what it printed.
pub fn run(command: &mut Command) -> String {
    let output = crate::program::run(command);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Makes a unified kernel image: the stub, with these sections in this order after its own sections.
pub fn uki(stub: &Path, sections: &[(&str, &[u8])]) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    // in memory the sections begin after the stub's
    let table = run(Command::new("objdump").arg("-h").arg(stub));
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let ends = table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.first()?.parse::<u32>().ok()?;
        Some(number(words.get(2)?)? + number(words.get(3)?)?)
    });
    let mut address = ends.max().expect("a section");
    let mut objcopy = Command::new("objcopy");
    for (index, (name, content)) in sections.iter().enumerate() {
        let file = folder.path().join(index.to_string());
        std::fs::write(&file, content).expect("a section's file");
        address = address.next_multiple_of(0x1000);
        objcopy
            .arg("--add-section")
            .arg(format!("{name}={}", file.display()))
            .arg("--change-section-vma")
            .arg(format!("{name}={address:#x}"));
        address += content.len() as u64;
    }
    let image = folder.path().join("image.efi");
    run(objcopy.arg(stub).arg(&image));
    std::fs::read(image).expect("the image")
}

/// Signs a program for Secure Boot with Debian's test key, which the package ovmf has.
pub fn signed(program: &[u8]) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    let [image, key] = ["image.efi", "key"].map(|name| folder.path().join(name));
    std::fs::write(&image, program).expect("the image");
    run(Command::new("openssl")
        .args(["pkey", "-passin", "pass:snakeoil", "-in"])
        .arg("/usr/share/ovmf/PkKek-1-snakeoil.key")
        .arg("-out")
        .arg(&key));
    run(Command::new("sbsign")
        .args(["--cert", "/usr/share/ovmf/PkKek-1-snakeoil.pem", "--key"])
        .args([&key, Path::new("--output"), &image, &image]));
    std::fs::read(image).expect("the image")
}

/// Makes a raw disk image with an EFI system partition of `mebibytes` that has these files, followed by an empty partition. `fat`
/// is the kind of file system: 12, 16, 32.
pub fn disk(path: &Path, mebibytes: u64, fat: u32, files: &[(&str, &[u8])]) {
    const MIB: u64 = 1 << 20;
    let disk = std::fs::File::create(path).expect("a disk");
    disk.set_len((mebibytes + 4) * MIB).expect("a disk");
    let table =
        format!("label: gpt\nstart=2048, size={mebibytes}MiB, type=uefi\nsize=1MiB, type=linux\n");
    let input = path.with_extension("table");
    std::fs::write(&input, table).expect("a file");
    let input = std::fs::File::open(input).expect("a file");
    run(Command::new("/sbin/sfdisk")
        .arg("--quiet")
        .arg(path)
        .stdin(input));
    let partition = path.with_extension("esp");
    let esp = std::fs::File::create(&partition).expect("a partition");
    esp.set_len(mebibytes * MIB).expect("a partition");
    let mut format = Command::new("/sbin/mkfs.vfat");
    run(format
        .args(["-F", &fat.to_string(), "-n", "ESP"])
        .arg(&partition));
    let mtool = |name: &str| {
        let mut command = Command::new(name);
        command
            .env("MTOOLS_SKIP_CHECK", "1")
            .arg("-i")
            .arg(&partition);
        command
    };
    let content = path.with_extension("file");
    for (file, bytes) in files {
        for (end, _) in file.match_indices('/') {
            let folder = format!("::{}", &file[..end]);
            // mdir fails if the folder does not exist
            let there = mtool("mdir").arg(&folder).output().expect("mdir");
            if !there.status.success() {
                run(mtool("mmd").arg(&folder));
            }
        }
        std::fs::write(&content, bytes).expect("a file");
        run(mtool("mcopy")
            .arg("-o")
            .arg(&content)
            .arg(format!("::{file}")));
    }
    let mut copy = Command::new("dd");
    copy.args(["bs=1M", "seek=1", "conv=notrunc,sparse", "status=none"]);
    run(copy
        .arg(format!("if={}", partition.display()))
        .arg(format!("of={}", path.display())));
}

/// A section of a firmware for TDX machines: position and length in the file, address and length in memory, type, attributes.
pub type TdxSection = (u32, u32, u64, u64, u32, u32);

/// Makes a firmware for TDX machines like OVMF, with these sections. It begins with two pages of content.
pub fn tdx_firmware(sections: &[TdxSection]) -> Vec<u8> {
    let mut file: Vec<u8> = (0..8192u32).map(|at| at as u8).collect();
    let mut metadata = b"TDVF".to_vec();
    metadata.extend((16 + 32 * sections.len() as u32).to_le_bytes());
    metadata.extend([1, 0, 0, 0, sections.len() as u8, 0, 0, 0]);
    for (offset, raw, address, len, kind, attributes) in sections {
        metadata.extend([offset.to_le_bytes(), raw.to_le_bytes()].concat());
        metadata.extend([address.to_le_bytes(), len.to_le_bytes()].concat());
        metadata.extend([kind.to_le_bytes(), attributes.to_le_bytes()].concat());
    }
    let guid = b"\x35\x65\x7a\xe4\x4a\x98\x98\x47\x86\x5e\x46\x85\xa7\xbf\x8e\xc2";
    let footer = b"\xde\x82\xb5\x96\xb2\x1f\xf7\x45\xba\xea\xa3\x66\xc5\x5a\x08\x2d";
    let from_end = metadata.len() as u32 + 22 + 18 + 32;
    file.extend(metadata);
    file.extend(from_end.to_le_bytes());
    file.extend([&[22, 0][..], guid, &[40, 0], footer, &[0; 32]].concat());
    file
}
