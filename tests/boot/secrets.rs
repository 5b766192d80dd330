//! Searches the memory of a whole machine, as its host reads it, for secrets that have done their work: after the first boot, init,
//! a rejoin and a recovery. A host can read it where nothing encrypts it; a later owner of a page can, and a crash dump shows it.
//!
//! Two places may hold a secret: the file with the passphrase of the first boot, until init, and the kernel, which needs the volume
//! key. Every other copy fails the test, which names its page, and what the kernel says about the page (`/proc/kpageflags`).

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, disk_mac_key};
use base::master_secret::MasterSecret;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::area_key::area_keys;
use disk::luks::{Header, Probe, probe};
use machine::flow::{self, PATIENCE, Setting};
use machine::vm::Vm;
use machine::{Context, Failure, Result};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use support::secrets::{Hit, PAGE, Secrets, list};

const GIB: u64 = 1 << 30;
/// Written into the machine, so that the search has something to find.
const PLANTED: &str = "kT3xV9qLm2Rz8wYc5nHb7jPd4sGf6tQa";
/// The flags of include/uapi/linux/kernel-page-flags.h that say what a page is for.
const FLAGS: [(u32, &str); 6] = [
    (5, "LRU"),
    (7, "slab"),
    (10, "free"),
    (11, "mapped"),
    (12, "anonymous"),
    (14, "tmpfs"),
];

#[test]
#[ignore = "boots a machine: make boot"]
fn memory_holds_no_secret_after_its_work() -> Result<()> {
    let mut setting = Setting::new("memory", GIB)?;
    let mut vm = flow::new_machine(&mut setting)?;
    vm.command(&format!("echo {PLANTED} >/run/planted"), PATIENCE)?;
    let dump = dump(&setting, &mut vm)?;
    let mut secrets = Secrets::default();
    secrets.add("planted text", PLANTED.as_bytes());
    let found = secrets.in_file(&dump).context("search the memory")?;
    assert!(!found.is_empty(), "the search must find what was planted");

    let (header, state) = header(&setting)?;
    let (passphrase, at) = passphrase(&dump, &header, &state)?;
    println!("the passphrase of the first boot is at {at:#x}, in its file");
    let mut first = Secrets::default();
    first.add("passphrase of the first boot", passphrase.expose());
    add_area_key(&mut first, "first area key", &setting, &passphrase);
    let volume_key = header.unlock(&mut &state, &passphrase);
    let volume_key = volume_key.context("open the header")?;
    let mut left = judge("first boot", &mut vm, &first, &dump, Some(at))?;
    left += kernel_only("first boot", &mut vm, &volume_key, &dump)?;

    setting.init(&vm)?;
    vm.console.wait_for(" complete:", PATIENCE)?;
    vm.command(
        "echo written before the reboot >/run/state/proof && sync",
        PATIENCE,
    )?;
    let cluster = vm.command("cat /sys/class/tpm/tpm0/pcr-sha256/15", PATIENCE)?;
    let cluster = cluster.to_ascii_lowercase();
    let mut secrets = first;
    add_cluster(&mut secrets, &setting, &header)?;
    left += look("init", &setting, &mut vm, &secrets, &volume_key)?;
    vm.shut_down(PATIENCE)?;

    setting.start_services()?;
    let mut vm = flow::member_again(setting.machine.boot()?, " ticket:", &cluster)?;
    left += look("rejoin", &setting, &mut vm, &secrets, &volume_key)?;
    vm.shut_down(PATIENCE)?;

    let mut vm = flow::recovered(&mut setting, &cluster)?;
    left += look("recovery", &setting, &mut vm, &secrets, &volume_key)?;
    vm.shut_down(PATIENCE)?;
    assert_eq!(left, 0, "secrets were left in memory, see above");
    Ok(())
}

/// Searches all memory of the machine after `stage`. Returns the number of copies that must not be there.
fn look(
    stage: &str,
    setting: &Setting,
    vm: &mut Vm,
    secrets: &Secrets,
    volume_key: &Secret,
) -> Result<usize> {
    let dump = dump(setting, vm)?;
    let left = judge(stage, vm, secrets, &dump, None)?;
    Ok(left + kernel_only(stage, vm, volume_key, &dump)?)
}

/// Prints the copies of `secrets` outside of the page at `allowed`, and returns their number.
fn judge(
    stage: &str,
    vm: &mut Vm,
    secrets: &Secrets,
    dump: &Path,
    allowed: Option<u64>,
) -> Result<usize> {
    let mut hits = secrets.in_file(dump).context("search the memory")?;
    hits.retain(|hit| Some(hit.page()) != allowed.map(|at| at / PAGE as u64));
    for hit in &mut hits {
        hit.owner = owner(vm, hit.page())?;
    }
    println!("{stage}: {} copies are left{}", hits.len(), list(&hits));
    Ok(hits.len())
}

/// Prints the copies of the volume key, and returns the number of those outside of the kernel.
fn kernel_only(stage: &str, vm: &mut Vm, volume_key: &Secret, dump: &Path) -> Result<usize> {
    let mut secrets = Secrets::default();
    secrets.add("volume key", volume_key.expose());
    let mut hits = secrets.in_file(dump).context("search the memory")?;
    for hit in &mut hits {
        hit.owner = owner(vm, hit.page())?;
    }
    let of_kernel = |hit: &&Hit| hit.owner == "slab" || hit.owner == "kernel";
    let (known, left): (Vec<_>, Vec<_>) = hits.iter().partition(of_kernel);
    println!(
        "{stage}: the kernel has {} pieces of the volume key; {} are left elsewhere{}",
        known.len(),
        left.len(),
        left.iter()
            .map(|hit| format!("\n  {hit}"))
            .collect::<String>()
    );
    assert!(!known.is_empty(), "the search must find the volume key");
    Ok(left.len())
}

/// Writes the machine's memory to a file, while the machine stands still.
fn dump(setting: &Setting, vm: &mut Vm) -> Result<std::path::PathBuf> {
    let path = setting.path("memory");
    // above 2 GiB, q35 puts a part of it at another address
    assert!(setting.machine.memory <= 2048);
    let bytes = u64::from(setting.machine.memory) << 20;
    vm.monitor("stop")?;
    vm.monitor(&format!("pmemsave 0 {bytes} \"{}\"", path.display()))?;
    vm.monitor("cont")?;
    let written = fs::metadata(&path).context("look at the memory")?.len();
    if written == bytes {
        Ok(path)
    } else {
        Err(Failure(format!(
            "the memory has {written} bytes, expected {bytes}"
        )))
    }
}

/// What the kernel says about a page.
fn owner(vm: &mut Vm, page: u64) -> Result<String> {
    let command =
        format!("dd if=/proc/kpageflags bs=8 skip={page} count=1 2>/dev/null | od -An -t x8");
    let flags = vm.command(&command, PATIENCE)?;
    let flags = u64::from_str_radix(flags.trim(), 16).context("read the flags of a page")?;
    let names = FLAGS.iter().filter(|(bit, _)| flags >> bit & 1 == 1);
    let names: Vec<&str> = names.map(|(_, name)| *name).collect();
    Ok(if names.is_empty() {
        "kernel".to_owned()
    } else {
        names.join(" ")
    })
}

/// The header of the state disk, and the disk.
fn header(setting: &Setting) -> Result<(Header, File)> {
    let disk = File::open(setting.machine.disk("state")).context("open the disk")?;
    match probe(&mut &disk).context("read the header")? {
        Probe::Luks(header) => Ok((header, disk)),
        _ => Err(Failure("the disk has no header".to_owned())),
    }
}

/// Finds the passphrase of the first boot in memory: its file is a page that begins with 32 random bytes and is zero behind them.
fn passphrase(dump: &Path, header: &Header, disk: &File) -> Result<(Secret, u64)> {
    let memory = File::open(dump).context("open the memory")?;
    let pages = memory.metadata().context("look at the memory")?.len() / PAGE as u64;
    for at in (0..pages).map(|page| page * PAGE as u64) {
        let mut page = [0; PAGE];
        memory
            .read_exact_at(&mut page, at)
            .context("read the memory")?;
        let (start, rest) = page.split_at(KEY_LEN);
        let different: std::collections::BTreeSet<&u8> = start.iter().collect();
        if different.len() < KEY_LEN * 2 / 3 || rest.iter().any(|byte| *byte != 0) {
            continue;
        }
        let candidate = Secret::new(start.to_vec());
        if header.unlock(&mut &*disk, &candidate).is_ok() {
            return Ok((candidate, at));
        }
    }
    Err(Failure(
        "no page of the memory is the file with the passphrase".to_owned(),
    ))
}

/// Adds the secrets of the cluster, which the operator's master secret tells.
fn add_cluster(secrets: &mut Secrets, setting: &Setting, header: &Header) -> Result<()> {
    let file = fs::read(setting.path(flow::MASTER_SECRET)).context("read the master secret")?;
    let file: serde_json::Value =
        serde_json::from_slice(&file).context("read the master secret")?;
    let [key, salt] = ["key", "salt"].map(|field| STANDARD.decode(file[field].as_str().unwrap()));
    let key = key.context("read the master secret")?;
    secrets.add("master secret", &key);
    secrets.add("init secret", flow::INIT_SECRET.as_bytes());
    let salt = Secret::new(salt.context("read the salt")?);
    let kms = MasterSecret::new(Secret::new(key), salt).context("use the master secret")?;
    let derived = |dek: Dek| kms.dek(&dek, KEY_LEN).context("derive a key");
    let disk_key = derived(Dek::disk(&header.uuid()))?;
    secrets.add("disk key", disk_key.expose());
    add_area_key(secrets, "area key", setting, &disk_key);
    let measurement_secret = derived(Dek::named(MEASUREMENT_SECRET_ID))?;
    secrets.add("measurement secret", measurement_secret.expose());
    let mac_key = disk_mac_key(&measurement_secret);
    secrets.add("key of the disk's MAC", mac_key.expose());
    for id in [
        base::crypto::SSH_USER_CA_SEED_ID,
        base::crypto::SSH_HOST_CA_SEED_ID,
    ] {
        secrets.add(id, derived(Dek::named(id))?.expose());
    }
    Ok(())
}

/// Adds the keys of the keyslots that argon2 derives from `passphrase`.
fn add_area_key(secrets: &mut Secrets, name: &str, setting: &Setting, passphrase: &Secret) {
    for key in area_keys(&setting.machine.disk("state"), passphrase) {
        secrets.add(name, &key);
    }
}
