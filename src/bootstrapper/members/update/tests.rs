use std::cell::Cell;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use base::boot::timeline::Timeline;
use base::stop::Stop;
use base::text::hex;
use image::{KnownConditions, Platform, RegisterBank, Stage, Units};
use ring::digest::{SHA256, digest};
use serde_json::json;
use ssh::signature;
use support::boot_image::{disk, run, systemd_boot, uki};
use support::mutation::mutations;
use tempfile::TempDir;

use super::place::Words;
use super::trial::{Trial, TrialEnd};
use super::*;

const DEFAULT: &str = "EFI/BOOT/BOOTX64.EFI";
const MIB: u64 = 1 << 20;

/// A machine that runs 0.1.0, and the operator with a key.
pub(super) struct Setting {
    folder: TempDir,
    pub(super) place: ImageDisk,
    pub(super) keys: Vec<PublicKey>,
    pub(super) root: Vec<u8>,
    pub(super) hashes: Vec<u8>,
    /// The kernel image of the running version.
    pub(super) running: Vec<u8>,
}

/// A release as an operator has it.
pub(super) struct Made {
    list: Vec<u8>,
    signature: String,
    pub(super) content: Vec<u8>,
    pub(super) uki: Vec<u8>,
}

fn unified(version: &str) -> Vec<u8> {
    let boot = systemd_boot("trixie");
    let line = format!(
        "console=ttyS0 firstlight-image={version} systemd.verity_root_data=UUID=of-{version}"
    );
    // any program is a kernel here
    let kernel = fs::read(boot.join("systemd-bootx64.efi")).unwrap();
    let sections: [(&str, &[u8]); 4] = [
        (".osrel", b"ID=debian\n"),
        (".cmdline", line.as_bytes()),
        (".initrd", b"070701"),
        (".linux", &kernel),
    ];
    uki(&boot.join("linuxx64.efi.stub"), &sections)
}

impl Made {
    pub(super) fn offer<'a>(
        &'a self,
        content: &'a mut &'a [u8],
        policy: Option<&'a Policy>,
    ) -> Offer<'a> {
        Offer {
            list: &self.list,
            signature: &self.signature,
            content,
            policy,
        }
    }
}

impl Setting {
    pub(super) fn new() -> Setting {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let manager = fs::read(systemd_boot("trixie").join("systemd-bootx64.efi")).unwrap();
        let running = unified("0.1.0");
        let spare = vec![0; running.len() + 4096];
        disk(
            &path("disk"),
            40,
            32,
            &[
                (DEFAULT, &manager),
                ("loader/loader.conf", b"timeout 0\n"),
                ("EFI/Linux/SPARE1", &spare),
                ("EFI/Linux/SPARE2", &spare),
                ("EFI/Linux/firstlight_0.1.0.efi", &running),
            ],
        );
        fs::write(path("root"), vec![0xee; 300_000]).unwrap();
        fs::write(path("hashes"), vec![0xee; 50_000]).unwrap();
        run(Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(path("key")));
        let key = fs::read_to_string(path("key.pub")).unwrap();
        let place = ImageDisk {
            running: Words {
                version: ImageVersion::parse("0.1.0").unwrap(),
                root: "UUID=of-0.1.0".into(),
            },
            disk: path("disk"),
            esp: (path("disk"), MIB),
            root: path("root"),
            hashes: path("hashes"),
        };
        Setting {
            keys: vec![PublicKey::from_line(&key).unwrap()],
            place,
            folder,
            root: (0..200_000u32).map(|it| (it / 7) as u8).collect(),
            hashes: vec![0x55; 40_000],
            running,
        }
    }

    fn sign(&self, namespace: &str, list: &[u8]) -> String {
        let file = self.folder.path().join("list");
        let _ = fs::remove_file(file.with_extension("sig"));
        fs::write(&file, list).unwrap();
        run(Command::new("ssh-keygen")
            .args(["-q", "-Y", "sign", "-n", namespace, "-f"])
            .arg(self.folder.path().join("key"))
            .arg(&file));
        fs::read_to_string(self.folder.path().join("list.sig")).unwrap()
    }

    pub(super) fn release(&self, version: &str) -> Made {
        let uki = unified(version);
        let part = |bytes: &[u8]| json!({"size": bytes.len(), "sha256": hex(digest(&SHA256, bytes).as_ref())});
        let list = json!({"version": version, "image": part(&uki), "root": part(&self.root), "hashes": part(&self.hashes)});
        let list = list.to_string().into_bytes();
        Made {
            signature: self.sign(NAMESPACE, &list),
            list,
            content: [&uki[..], &self.root, &self.hashes].concat(),
            uki,
        }
    }

    pub(super) fn run(&self, made: &Made, policy: Option<&Policy>) -> Result<ImageVersion, Error> {
        let content = &mut &made.content[..];
        run_offer(&self.place, &self.keys, made.offer(content, policy))
    }

    /// Returns the policy of machines that boot this image from the disk.
    fn policy(&self, uki: &[u8]) -> Policy {
        let disk = File::open(&self.place.disk).unwrap();
        let image = Image::added(disk, uki).unwrap();
        let given = KnownConditions {
            stage: Some(Stage::Booted),
            secure_boot: Some(false),
            units: Some(Units::All),
        };
        let value = |pcr| {
            let value = image.value(Platform::Tpm(RegisterBank::Sha256), pcr, &given);
            json!({"expected": hex(&value.unwrap()), "warnOnly": false})
        };
        let zero = json!({"expected": "00".repeat(32), "warnOnly": false});
        let text = json!({"measurements": {"4": value(4), "11": value(11), "15": zero}});
        Policy::from_json(&text.to_string()).unwrap()
    }

    /// Returns the names of the images that boot, by mtools.
    fn images(&self) -> Vec<String> {
        let esp = format!("{}@@1M", self.place.disk.display());
        let listed = run(Command::new("mdir").args(["-b", "-i", &esp, "::EFI/Linux"]));
        let paths = listed.lines().filter(|line| line.ends_with(".efi"));
        let mut names: Vec<String> = paths
            .map(|path| path.rsplit('/').next().unwrap().to_owned())
            .collect();
        names.sort();
        names
    }

    /// Returns everything that an update may change.
    pub(super) fn disks(&self) -> Vec<Vec<u8>> {
        self.paths().map(|path| fs::read(path).unwrap()).into()
    }

    pub(super) fn restore(&self, disks: &[Vec<u8>]) {
        for (path, bytes) in self.paths().into_iter().zip(disks) {
            fs::write(path, bytes).unwrap();
        }
    }

    fn paths(&self) -> [&Path; 3] {
        let place = &self.place;
        [&place.disk, &place.root, &place.hashes].map(PathBuf::as_path)
    }

    fn is_unchanged_by(&self, made: &Made, policy: Option<&Policy>) -> Error {
        let before = self.disks();
        let error = self.run(made, policy).unwrap_err();
        assert!(before == self.disks(), "{error}");
        error
    }
}

fn run_offer(
    place: &ImageDisk,
    keys: &[PublicKey],
    offer: Offer<'_>,
) -> Result<ImageVersion, Error> {
    super::run(place, keys, offer, &mut |text| println!("{text}"))
}

#[test]
fn an_update_is_in_the_other_slot_and_boots_next_to_the_running_version() {
    let setting = Setting::new();
    let made = setting.release("0.2.0");
    let policy = setting.policy(&made.uki);
    let version = setting.run(&made, Some(&policy)).unwrap();
    assert_eq!(version.to_string(), "0.2.0");
    assert_eq!(
        setting.images(),
        ["firstlight_0.1.0.efi", "firstlight_0.2.0+3.efi"]
    );
    let [_, root, hashes] = &setting.disks()[..] else {
        panic!()
    };
    assert!(root.starts_with(&setting.root) && root.len() == 300_000);
    assert!(hashes.starts_with(&setting.hashes));
    let esp = format!("{}@@1M", setting.place.disk.display());
    let copy = setting.folder.path().join("copy");
    run(Command::new("mcopy")
        .args(["-i", &esp, "::EFI/Linux/firstlight_0.2.0+3.efi"])
        .arg(&copy));
    assert!(fs::read(copy).unwrap() == made.uki);
    // the same again: what an operator does who does not know how it ended
    setting.run(&made, Some(&policy)).unwrap();
    setting.run(&setting.release("0.10.0"), None).unwrap();
    assert_eq!(
        setting.images(),
        ["firstlight_0.1.0.efi", "firstlight_0.10.0+3.efi"]
    );
}

#[test]
fn damaged_and_short_content_leaves_only_the_running_version_and_can_be_repeated() {
    let setting = Setting::new();
    let good = setting.release("0.2.0");
    let ends = [
        good.uki.len(),
        good.uki.len() + setting.root.len(),
        good.content.len(),
    ];
    for end in ends {
        let mut damaged = setting.release("0.2.0");
        damaged.content[end - 1] ^= 1;
        let error = setting.run(&damaged, None).unwrap_err();
        assert!(matches!(error, Error::Content(..)), "{error}");
        assert_eq!(setting.images(), ["firstlight_0.1.0.efi"]);
        damaged.content.truncate(end - 1);
        let error = setting.run(&damaged, None).unwrap_err();
        assert!(error.to_string().contains("1 bytes too early"), "{error}");
        assert_eq!(setting.images(), ["firstlight_0.1.0.efi"]);
        setting.run(&good, None).unwrap();
        assert_eq!(setting.images().len(), 2);
    }
}

#[test]
fn without_a_right_signature_nothing_is_written() {
    let mut setting = Setting::new();
    let mut made = setting.release("0.2.0");
    let right = made.signature.clone();
    made.signature = setting.sign("file", &made.list);
    let error = setting.is_unchanged_by(&made, None);
    assert!(matches!(
        error,
        Error::Signature(signature::Error::OtherNamespace)
    ));
    made.signature = setting.sign(NAMESPACE, b"another list");
    let error = setting.is_unchanged_by(&made, None);
    assert!(matches!(
        error,
        Error::Signature(signature::Error::Signature)
    ));
    made.signature = String::new();
    let error = setting.is_unchanged_by(&made, None);
    assert!(matches!(
        error,
        Error::Signature(signature::Error::Malformed)
    ));
    made.signature = right;
    let stranger = Setting::new().keys;
    let own = std::mem::replace(&mut setting.keys, stranger);
    let error = setting.is_unchanged_by(&made, None);
    assert!(matches!(
        error,
        Error::Signature(signature::Error::OtherKey)
    ));
    setting.keys.clear();
    assert!(matches!(setting.is_unchanged_by(&made, None), Error::NoKey));
    setting.keys = own;
    setting.run(&made, None).unwrap();
}

#[test]
fn an_older_or_equal_version_is_refused() {
    let setting = Setting::new();
    for version in ["0.0.9", "0.1.0"] {
        let error = setting.is_unchanged_by(&setting.release(version), None);
        assert!(matches!(error, Error::Older(..)), "{error}");
    }
    let is_newer = |one: &str, other: &str| {
        let of = |text| ImageVersion::parse(text).unwrap();
        of(one).is_newer_than(&of(other))
    };
    assert!(is_newer("0.10.0", "0.9.9") && is_newer("1.0", "0.9.9"));
    assert!(!is_newer("0.9.9", "0.10.0") && !is_newer("1.2", "1.2"));
    for wrong in [
        "",
        "1",
        "1.",
        "1.02",
        "1.2.3.4.5",
        "v1.2",
        "1.2-rc1",
        "1.+2",
    ] {
        assert_eq!(ImageVersion::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn an_image_that_the_policy_refuses_is_not_written_and_the_registers_are_named() {
    let setting = Setting::new();
    let made = setting.release("0.2.0");
    let of_running = setting.policy(&unified("0.1.0"));
    let error = setting
        .is_unchanged_by(&made, Some(&of_running))
        .to_string();
    assert!(error.contains("join services would refuse"), "{error}");
    for register in ["PCR 4: expected ", "PCR 11: expected "] {
        assert!(error.contains(register), "{error}");
    }
}

#[test]
fn an_update_during_a_trial_is_refused() {
    let mut setting = Setting::new();
    setting.run(&setting.release("0.2.0"), None).unwrap();
    setting.place.running =
        Words::of("firstlight-image=0.2.0 systemd.verity_root_data=UUID=of-0.2.0").unwrap();
    let made = setting.release("0.3.0");
    let error = setting.is_unchanged_by(&made, None);
    assert!(matches!(error, Error::OnTrial(_)), "{error}");
}

#[test]
fn an_image_that_does_not_fit_to_the_machine_is_refused() {
    let mut setting = Setting::new();
    let made = setting.release("0.2.0");
    setting.place.running.root = "UUID=of-0.2.0".into();
    let error = setting.is_unchanged_by(&made, None).to_string();
    assert!(
        error.contains("UUID=of-0.2.0 as the running version"),
        "{error}"
    );
    setting.place.running.root = "UUID=of-0.1.0".into();
    fs::write(&setting.place.hashes, b"too small").unwrap();
    let error = setting.is_unchanged_by(&made, None);
    assert!(matches!(error, Error::Room("hashes", 40_000, 9)), "{error}");
}

#[test]
fn no_mutated_list_is_accepted() {
    let setting = Setting::new();
    let made = setting.release("0.2.0");
    for list in mutations(&made.list, 2000).filter(|it| *it != made.list) {
        assert!(SignedRelease::verify(&list, &made.signature, &setting.keys).is_err());
    }
}

fn trial(setting: &Setting, is_healthy: &dyn Fn() -> bool) -> TrialEnd {
    let rules = Trial {
        files: Path::new("/nowhere"),
        record: Path::new("/nowhere"),
        healthy: Duration::from_millis(50),
        limit: Duration::from_millis(400),
    };
    let timeline = Timeline::new("trial");
    rules
        .run_at(&setting.place, &Stop::new(), &timeline, is_healthy)
        .unwrap()
}

#[test]
fn a_healthy_version_is_kept_and_another_one_is_not() {
    let mut setting = Setting::new();
    assert_eq!(trial(&setting, &|| panic!("no trial")), TrialEnd::None);
    setting.run(&setting.release("0.2.0"), None).unwrap();
    setting.place.running.version = ImageVersion::parse("0.2.0").unwrap();
    assert_eq!(trial(&setting, &|| false), TrialEnd::Refused);
    // healthy now and then, but never long enough
    let asked = Cell::new(0);
    let unsteady = || {
        asked.set(asked.get() + 1);
        asked.get() % 2 == 0
    };
    assert_eq!(trial(&setting, &unsteady), TrialEnd::Refused);
    assert_eq!(
        setting.images(),
        ["firstlight_0.1.0.efi", "firstlight_0.2.0+3.efi"]
    );
    assert_eq!(trial(&setting, &|| true), TrialEnd::Kept);
    assert_eq!(
        setting.images(),
        ["firstlight_0.1.0.efi", "firstlight_0.2.0.efi"]
    );
    assert_eq!(trial(&setting, &|| panic!("no trial")), TrialEnd::None);
}

/// Serves the files of a release, each in one answer, until the test ends.
fn serve(made: &Made, uki_len: usize, root_len: usize) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/release/", listener.local_addr().unwrap());
    let (uki, rest) = made.content.split_at(uki_len);
    let (root, hashes) = rest.split_at(root_len);
    let files = [
        ("/release/release.json", made.list.clone()),
        (
            "/release/release.json.sig",
            made.signature.clone().into_bytes(),
        ),
        ("/release/firstlight.efi", uki.to_vec()),
        ("/release/root.img", root.to_vec()),
        ("/release/hashes.img", hashes.to_vec()),
    ];
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let len = stream.read(&mut request).unwrap();
            let request = String::from_utf8_lossy(&request[..len]).into_owned();
            let path = request.split(' ').nth(1).unwrap_or_default();
            let (status, body) = match files.iter().find(|(name, _)| *name == path) {
                Some((_, body)) => ("200 OK", &body[..]),
                None => ("404 Not Found", &b""[..]),
            };
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream
                .write_all(head.as_bytes())
                .and_then(|()| stream.write_all(body));
        }
    });
    url
}

#[test]
fn a_release_is_fetched_from_a_web_server() {
    let setting = Setting::new();
    let made = setting.release("0.2.0");
    let url = serve(&made, made.uki.len(), setting.root.len());
    let client = || {
        let mut policy = http::ClientPolicy::new(http::Roots::default());
        policy.only_tls = false;
        http::Client::new(policy, Duration::from_secs(60))
    };
    let fetch = |url: &str| {
        let remote = remote::Remote::by(url, client());
        let (list, signature) = remote.list()?;
        let offer = Offer {
            list: &list,
            signature: &signature,
            content: &mut remote.content(),
            policy: None,
        };
        run_offer(&setting.place, &setting.keys, offer)
    };
    let missing = fetch(&format!("{url}other")).unwrap_err().to_string();
    assert!(
        missing.contains("release.json.sig: expected the status 200, got 404"),
        "{missing}"
    );
    assert_eq!(setting.images(), ["firstlight_0.1.0.efi"]);
    fetch(&url).unwrap();
    assert_eq!(
        setting.images(),
        ["firstlight_0.1.0.efi", "firstlight_0.2.0+3.efi"]
    );
    // another file in the place of one of the parts
    let (listed, other) = (setting.release("0.3.0"), setting.release("0.4.0"));
    let mixed = Made {
        content: other.content,
        ..listed
    };
    let url = serve(&mixed, mixed.uki.len(), setting.root.len());
    let error = fetch(&url).unwrap_err();
    assert!(matches!(error, Error::Content("image", _)), "{error}");
    let plain = remote::Remote::new("http://192.0.2.1/release")
        .err()
        .unwrap();
    assert!(matches!(plain, Error::Download(..)), "{plain}");
}

/// A machine as sysfs shows it: the root file system is on the second slot.
#[test]
fn the_slot_that_does_not_run_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| folder.path().join(path);
    let write = |path: &str, text: &str| {
        fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        fs::write(at(path), text).unwrap();
    };
    write(
        "proc/cmdline",
        "console=ttyS0 firstlight-image=0.2.0 systemd.verity_root_data=UUID=x quiet\n",
    );
    let names = [
        "esp",
        "firstlight-a",
        "firstlight-a-verity",
        "firstlight-b",
        "firstlight-b-verity",
    ];
    for (index, name) in names.iter().enumerate() {
        let part = format!("sys/devices/vda/vda{}/uevent", index + 1);
        write(&part, &format!("DEVTYPE=partition\nPARTNAME={name}\n"));
    }
    write("sys/devices/dm-0/dm/name", "root\n");
    write("sys/devices/dm-1/dm/name", "state\n");
    let link = |from: &str, to: &str| {
        fs::create_dir_all(at(from).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(at(to), at(from)).unwrap();
    };
    link("sys/class/block/dm-1", "sys/devices/dm-1");
    link("sys/class/block/dm-0", "sys/devices/dm-0");
    link("sys/devices/dm-0/slaves/vda4", "sys/devices/vda/vda4");
    link("sys/devices/dm-0/slaves/vda5", "sys/devices/vda/vda5");
    let place = ImageDisk::find(folder.path()).unwrap();
    assert_eq!(place.running.version.to_string(), "0.2.0");
    assert_eq!(place.running.root, "UUID=x");
    assert_eq!(
        [&place.disk, &place.esp.0, &place.root, &place.hashes],
        [
            &at("dev/vda"),
            &at("dev/vda1"),
            &at("dev/vda2"),
            &at("dev/vda3")
        ]
    );
    write("proc/cmdline", "console=ttyS0");
    assert!(matches!(
        ImageDisk::find(folder.path()),
        Err(Error::NoSlots)
    ));
}
