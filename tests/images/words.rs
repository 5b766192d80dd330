//! A kernel image of another version, without a build.

use machine::{Context, Failure, Result};
use std::fs;
use std::path::Path;
use std::process::Command;
use support::boot_image::run;

/// Makes a kernel image of another version, with further words on its command line.
pub fn with_words(from: &Path, to: &Path, old: &str, new: &str, words: &str) -> Result<()> {
    let [line, release] = ["cmdline", "osrel"].map(|it| to.with_extension(it));
    let copy = to.with_extension("copy");
    let section = |name: &str, file: &Path| format!("{name}={}", file.display());
    run(Command::new("objcopy")
        .args(["--dump-section", &section(".cmdline", &line)])
        .args(["--dump-section", &section(".osrel", &release)])
        .args([from, &copy]));
    let read = |path: &Path| fs::read_to_string(path).context("read a section");
    let text = read(&line)?.replace(
        &format!("firstlight-image={old}"),
        &format!("firstlight-image={new}"),
    );
    let text = format!("{} {words}", text.trim_end_matches(['\0', '\n', ' ']));
    fs::write(&line, &text).context("write a command line")?;
    let named = read(&release)?.replace(
        &format!("IMAGE_VERSION=\"{old}\""),
        &format!("IMAGE_VERSION=\"{new}\""),
    );
    fs::write(&release, named).context("write a release")?;
    run(Command::new("objcopy")
        .args(["--update-section", &section(".cmdline", &line)])
        .args(["--update-section", &section(".osrel", &release)])
        .args([from, to]));
    let _ = fs::remove_file(copy);
    // objcopy leaves the size in memory as it was (PE format, "Section Table")
    let mut image = fs::read(to).context("read a kernel image")?;
    let header = image.windows(8).position(|it| it == b".cmdline");
    let header = header.ok_or_else(|| Failure("there is no section .cmdline".to_owned()))?;
    image[header + 8..header + 12].copy_from_slice(&(text.len() as u32).to_le_bytes());
    fs::write(to, image).context("write a kernel image")
}
