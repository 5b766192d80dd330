//! Further versions of the image, signed for updates: docs/images/update.md

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use machine::{root, script};
use serde_json::{Value, json};
use support::boot_image::run;

use crate::node::policy;
use crate::words::with_words;

pub struct Release {
    /// The image of a whole disk.
    pub image: PathBuf,
    /// The folder with the files that a node downloads.
    pub folder: PathBuf,
    pub policy: Value,
}

impl Release {
    /// Versions that are newer than that of this checkout.
    pub const GOOD: &str = "100.1";
    const BAD: &str = "100.2";

    /// The image of the test with another version, which tests/whole/prepare.sh builds.
    pub fn good() -> Release {
        let built = root().join("target/mkosi/kubernetes-next");
        let image = built.join("firstlight-kubernetes.raw");
        Release {
            folder: built.join("update"),
            policy: serde_json::from_str(&policy(&image, &["--name", Release::GOOD])).unwrap(),
            image,
        }
    }

    /// Makes a release from an image of this version. Its machines never count as healthy, because the trial ends after a second.
    pub fn bad(folder: &Path, made: &Path, version: &str) -> Release {
        let uki = folder.join("firstlight.efi");
        let words = "firstlight.trial-limit=1";
        with_words(
            &made.with_extension("efi"),
            &uki,
            version,
            Release::BAD,
            words,
        )
        .unwrap();
        let update = made.with_file_name("update");
        for part in ["root.img", "hashes.img"] {
            std::os::unix::fs::symlink(update.join(part), folder.join(part)).unwrap();
        }
        let list = fs::read(update.join("release.json")).unwrap();
        let mut list: Value = serde_json::from_slice(&list).unwrap();
        let digest = run(Command::new("sha256sum").arg(&uki));
        let size = fs::metadata(&uki).unwrap().len();
        list["version"] = Release::BAD.into();
        list["image"] = json!({"size": size, "sha256": digest[..64]});
        let file = folder.join("release.json");
        fs::write(&file, list.to_string()).unwrap();
        let sign = ["-q", "-Y", "sign", "-n", "firstlight-update", "-f"];
        run(Command::new("ssh-keygen").args(sign).arg(maker()).arg(file));
        Release {
            image: made.to_owned(),
            folder: folder.to_owned(),
            policy: serde_json::from_str(&policy_with(made, &uki)).unwrap(),
        }
    }
}

/// The policy of a machine with this image that boots another kernel image.
fn policy_with(image: &Path, uki: &Path) -> String {
    let disk = uki.with_extension("raw");
    machine::write_log::copy(image, &disk).unwrap();
    let mtool = |name: &str| {
        let mut command = Command::new(name);
        command.env("MTOOLS_SKIP_CHECK", "1").arg("-i");
        command.arg(format!("{}@@1M", disk.display()));
        command
    };
    run(mtool("mdel").arg("::EFI/Linux/SPARE1"));
    run(mtool("mcopy").arg(uki).arg("::EFI/Linux/other.efi"));
    let options = ["--name", Release::BAD, "--uki", "EFI/Linux/other.efi"];
    let policy = policy(&disk, &options);
    fs::remove_file(disk).unwrap();
    policy
}

/// The key that signs updates.
fn maker() -> PathBuf {
    keys().join("maker")
}

/// The folder of the keys that the image trusts.
pub fn keys() -> PathBuf {
    script("tests/whole/keys.sh", &[]).unwrap().into()
}
