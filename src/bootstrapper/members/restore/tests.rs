//! A restoration with three members of the real etcd on loopback, of which two are lost, and with the real etcdctl and etcdutl (`make
//! kubernetes-api`). The test does the work of the kubelet: it runs etcd while its manifest is there. In place of the API server it asks
//! etcd, whose answer needs a majority, too.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use base::boot::timeline::Timeline;
use base::crypto::Secret;
use kubernetes::etcd_signature::{self, Statement};
use support::foreign::fetched;
use support::program::printed;
use tempfile::TempDir;

use super::*;

const ADDRESSES: [&str; 3] = ["127.88.0.1", "127.88.0.2", "127.88.0.3"];
const NAMES: [&str; 3] = ["a", "b", "c"];
const SALT: &[u8; 32] = b"the salt of one cluster of tests";
/// The wrapping key of the control plane that is left.
const KEY: [u8; 32] = [9; 32];
const LIMIT: Duration = Duration::from_secs(60);
/// The steps after which a restoration is killed.
const STEPS: [&str; 8] = [
    "begun",
    "restored",
    "kube-apiserver",
    "etcd",
    "stopped",
    "aside",
    "replaced",
    "answered",
];

/// A member of etcd; it is killed when this is dropped.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn arguments(index: usize, data: &Path) -> Vec<String> {
    let url = |port: u16| format!("http://{}:{port}", ADDRESSES[index]);
    let all = NAMES
        .iter()
        .zip(ADDRESSES)
        .map(|(name, address)| format!("{name}=http://{address}:2380"));
    [
        ("name", NAMES[index].to_owned()),
        ("data-dir", data.display().to_string()),
        ("listen-client-urls", url(2379)),
        ("advertise-client-urls", url(2379)),
        ("listen-peer-urls", url(2380)),
        ("initial-advertise-peer-urls", url(2380)),
        ("initial-cluster", all.collect::<Vec<_>>().join(",")),
        ("listen-metrics-urls", url(2381)),
        ("unsafe-no-fsync", "true".into()),
    ]
    .map(|(name, value)| format!("--{name}={value}"))
    .to_vec()
}

fn start(index: usize, data: &Path) -> Member {
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(data.with_extension("log"))
        .unwrap();
    static ETCD: OnceLock<PathBuf> = OnceLock::new();
    let etcd = ETCD.get_or_init(|| {
        let build = Path::new(support::ROOT).join("tools/kubernetes.sh");
        let folder = Command::new(build).arg("etcd").output().unwrap().stdout;
        Path::new(String::from_utf8(folder).unwrap().trim()).join("bin/etcd")
    });
    // it ends however the test ends
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(etcd);
    command
        .args(arguments(index, data))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Member(command.stderr(log).spawn().unwrap())
}

/// Runs etcdctl at a member; returns what it prints, or `None` if it fails.
fn etcdctl(index: usize, words: &[&str]) -> Option<String> {
    let mut command = Command::new(fetched("etcd-tools.sh").join("etcdctl"));
    command.arg(format!("--endpoints=http://{}:2379", ADDRESSES[index]));
    command.args(["--command-timeout=3s", "--dial-timeout=2s"]);
    printed(command.args(words))
}

/// Returns a value that a member has, also without a majority.
fn value(key: &str) -> Option<String> {
    let value = etcdctl(0, &["get", key, "--consistency=s", "--print-value-only"])?;
    (!value.is_empty()).then(|| value.trim().to_owned())
}

/// Looks for bytes in a file.
fn has(file: &Path, bytes: &[u8]) -> Option<()> {
    let content = fs::read(file).unwrap();
    content
        .windows(bytes.len())
        .any(|it| it == bytes)
        .then_some(())
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited for {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until etcd runs and has no leader. A member that starts without a majority serves only its metrics.
fn leaderless() {
    let metrics = format!("http://{}:2381", ADDRESSES[0]);
    wait_for("etcd without a leader", || {
        checks::has_leader(&metrics)
            .is_ok_and(|has| !has)
            .then_some(())
    });
}

/// Runs etcd of the first control plane while its manifest is in the kubelet's folder.
struct Kubelet(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Kubelet {
    fn start(folder: &Path) -> Kubelet {
        let over = Arc::new(AtomicBool::new(false));
        let (ended, folder) = (over.clone(), folder.to_owned());
        let run = move || {
            let mut etcd = None;
            while !ended.load(Ordering::Relaxed) {
                match folder.join("kubernetes/manifests/etcd.yaml").exists() {
                    true if etcd.is_none() => etcd = Some(start(0, &folder.join("data/etcd"))),
                    true => {}
                    false => etcd = None,
                }
                thread::sleep(Duration::from_millis(20));
            }
        };
        Kubelet(over, Some(thread::spawn(run)))
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.take().map(JoinHandle::join);
    }
}

/// Writes the signature of a snapshot beside it, as `firstlight etcd snapshot` does.
fn sign(snapshot: &Path) {
    let content = fs::read(snapshot).unwrap();
    let statement = Statement {
        node: "plane-a".into(),
        sha256: base::text::hex(&content[content.len() - 32..]),
        ..Statement::default()
    };
    let signature = statement.sign(&Secret::new(KEY.to_vec()));
    fs::write(etcd_signature::file_of(snapshot), signature).unwrap();
}

/// What is left of a cluster after two of its three control planes are lost, as often as a test needs it.
struct Lost {
    folder: TempDir,
}

impl Lost {
    /// Makes the cluster, a snapshot, a later object, and loses two members.
    fn new() -> Lost {
        let lost = Lost {
            folder: TempDir::new().unwrap(),
        };
        let mut members = vec![];
        for (index, name) in NAMES.iter().enumerate() {
            members.push(start(index, &lost.path(name)));
        }
        wait_for("a leader", || etcdctl(0, &["put", "kept", "saved"]));
        etcdctl(0, &["put", "/registry/clusterrolebindings/old", "a"]).unwrap();
        let salt = lost.path("salt");
        fs::write(&salt, SALT).unwrap();
        let mut put = Command::new(fetched("etcd-tools.sh").join("etcdctl"));
        put.arg(format!("--endpoints=http://{}:2379", ADDRESSES[0]))
            .args(["put", "join-config"]);
        assert!(
            put.stdin(fs::File::open(&salt).unwrap())
                .status()
                .unwrap()
                .success()
        );
        etcdctl(
            0,
            &[
                "snapshot",
                "save",
                lost.path("snapshot.db").to_str().unwrap(),
            ],
        )
        .unwrap();
        sign(&lost.path("snapshot.db"));
        etcdctl(0, &["del", "/registry/clusterrolebindings/old"]).unwrap();
        etcdctl(0, &["put", "/registry/clusterroles/new", "a"]).unwrap();
        etcdctl(0, &["put", "later", "lost"]).unwrap();
        wait_for("the object at this member", || value("later"));
        let file = lost.path("a/member/snap/db");
        wait_for("the object in the file", || has(&file, b"later"));
        drop(members);
        lost
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the control plane that is left, before anything was done. No kubelet runs.
    fn left(&self) -> Left {
        let folder = TempDir::new().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [
            "kubernetes/manifests",
            "kubernetes/firstlight",
            "data",
            "root/constellation",
        ] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("kubernetes/firstlight/wrapping-key"), KEY).unwrap();
        let copied = Command::new("cp")
            .arg("-a")
            .arg(self.path("a"))
            .arg(at("data/etcd"))
            .status();
        assert!(copied.unwrap().success());
        let words: String = arguments(0, &at("data/etcd"))
            .iter()
            .map(|word| format!("    - {word}\n"))
            .collect();
        let pod = |command: &str, image: &str| {
            format!(
                "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - command:\n{command}    image: registry.k8s.io/{image}\n  \
                 volumes:\n  - hostPath:\n      path: {}\n",
                at("data/etcd").display()
            )
        };
        let tag = fetched("etcd-tools.sh").display().to_string();
        let tag = tag.rsplit_once("-v").unwrap().1.to_owned();
        let etcd = pod(&format!("    - etcd\n{words}"), &format!("etcd:{tag}-0"));
        let api = "    - kube-apiserver\n    - --advertise-address=127.88.0.1\n";
        fs::write(at("kubernetes/manifests/etcd.yaml"), etcd).unwrap();
        fs::write(
            at("kubernetes/manifests/kube-apiserver.yaml"),
            pod(api, "kube-apiserver:v1"),
        )
        .unwrap();
        let left = Left {
            folder,
            snapshot: self.path("snapshot.db"),
            silent: Cell::new(true),
        };
        left.set_salt(SALT);
        left
    }
}

struct Left {
    folder: TempDir,
    snapshot: PathBuf,
    /// Whether the API server does not answer without a majority.
    silent: Cell<bool>,
}

impl Left {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn set_salt(&self, salt: &[u8; 32]) {
        use base64::{Engine, engine::general_purpose::STANDARD};
        let state =
            serde_json::json!({"Role": "ControlPlane", "MeasurementSalt": STANDARD.encode(salt)});
        fs::write(
            self.path("root/constellation/node_state.json"),
            state.to_string(),
        )
        .unwrap();
    }

    /// Starts the kubelet, and waits until etcd answers without a leader.
    fn start(&self) -> Kubelet {
        let kubelet = Kubelet::start(self.folder.path());
        leaderless();
        kubelet
    }

    /// Restores, or undoes. `reached` is called after each step.
    fn with(&self, options: &Options, reached: &dyn Fn(&str)) -> Result<(), Error> {
        self.restoration(reached, |restore| {
            if options.is_undo {
                restore.undo(options)
            } else {
                restore.run(options)
            }
        })
    }

    /// Returns the plan for people.
    fn plan(&self) -> String {
        let plan = |restore: &Restore| restore.check(&agreed()).unwrap().to_string();
        self.restoration(&|_| (), plan)
    }

    fn restoration<R>(&self, reached: &dyn Fn(&str), act: impl FnOnce(&Restore) -> R) -> R {
        let stop = Stop::new();
        let job = Job::new(Timeline::new("test"));
        let api = || {
            let no_majority = || NoRevision {
                is_silent: self.silent.get(),
                why: "no majority".into(),
            };
            let said = etcdctl(0, &["get", "x", "--write-out", "json"]).ok_or_else(no_majority)?;
            let said: Value = serde_json::from_str(&said).unwrap();
            Ok(said["header"]["revision"].as_u64().unwrap())
        };
        // on loopback a machine that is off refuses
        let connect = |address| match checks::connect(address) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Err(io::ErrorKind::HostUnreachable.into())
            }
            connected => connected,
        };
        let (kubernetes, root) = (self.path("kubernetes"), self.path("root"));
        let restore = Restore {
            kubernetes: &kubernetes,
            root: &root,
            snapshot: &self.snapshot,
            etcdutl: &fetched("etcd-tools.sh").join("etcdutl"),
            api: &api,
            connect: &connect,
            settle: Duration::from_secs(1),
            stop: &stop,
            job: &job,
            tell: &|_| (),
            ask: &|_| Ok(()),
            reached,
        };
        act(&restore)
    }

    fn run(&self) -> Result<(), Error> {
        self.with(&agreed(), &|_| ())
    }

    fn undo(&self) -> Result<(), Error> {
        self.with(
            &Options {
                is_undo: true,
                ..agreed()
            },
            &|_| (),
        )
    }

    /// Restores, and is killed after this step.
    fn killed_after(&self, step: &str) {
        let kill = |reached: &str| assert!(reached != step, "killed after {step}");
        let killed = catch_unwind(AssertUnwindSafe(|| self.with(&agreed(), &kill)));
        assert!(killed.is_err(), "{step} was not reached");
    }

    /// Returns the error of a restoration that is refused. Checks that nothing has changed.
    fn refused(&self) -> String {
        let before = self.files();
        let error = self.run().unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
        assert_eq!(self.files(), before, "{error}");
        error.to_string()
    }

    /// Returns the paths of all files, except for those that etcd itself makes and removes.
    fn files(&self) -> BTreeSet<PathBuf> {
        let output = Command::new("find")
            .arg(self.folder.path())
            .output()
            .unwrap();
        let all = String::from_utf8(output.stdout).unwrap();
        let all = all.lines().filter(|path| !path.contains("/member/"));
        all.map(PathBuf::from).collect()
    }

    fn assert_restored(&self) {
        assert_eq!(wait_for("etcd", || value("kept")), "saved");
        assert_eq!(value("later"), None);
        wait_for("a leader", || etcdctl(0, &["put", "new", "1"]));
        let members = etcdctl(0, &["member", "list"]).unwrap();
        assert_eq!(members.lines().count(), 1, "{members}");
        assert!(!self.path("kubernetes/restore-etcd/record.json").exists());
        let data = fs::read_dir(self.path("data/etcd"))
            .unwrap()
            .map(|it| it.unwrap().path());
        let before: Vec<_> = data
            .filter(|path| path.join("before/snap/db").exists())
            .collect();
        assert_eq!(before.len(), 1, "the data of before");
        let mode = fs::metadata(self.path("data/etcd/member")).unwrap();
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(mode.permissions().mode() & 0o7777, 0o700);
    }

    /// Checks that etcd has all data of before, and both manifests are in their place.
    fn assert_as_before(&self) {
        leaderless();
        assert!(has(&self.path("data/etcd/member/snap/db"), b"later").is_some());
        assert_eq!(etcdctl(0, &["get", "kept"]), None, "there is a majority");
        for pod in PODS {
            assert!(
                self.path(&format!("kubernetes/manifests/{pod}.yaml"))
                    .exists()
            );
        }
    }
}

fn agreed() -> Options {
    Options {
        is_agreed: true,
        ..Options::default()
    }
}

/// Only one test at a time has the addresses.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[test]
#[ignore = "needs etcd: make kubernetes-api"]
fn nothing_is_restored_while_the_old_cluster_could_have_a_majority() {
    let _alone = alone();
    let lost = Lost::new();
    let left = lost.left();
    let kubelet = left.start();
    // all is good, except for one thing each
    let b = start(1, &lost.path("b"));
    wait_for("a leader", || etcdctl(0, &["put", "again", "1"]));
    let said = left.refused();
    assert!(said.contains("etcd on this node has a leader"), "{said}");
    // a member that hangs may come back
    let freeze = |signal: &str| {
        let number = b.0.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &number])
                .status()
                .unwrap()
                .success()
        );
    };
    freeze("-STOP");
    wait_for("the end of the leader", || {
        etcdctl(0, &["get", "x"]).is_none().then_some(())
    });
    let said = left.refused();
    assert!(
        said.contains("another member of etcd answers: b at 127.88.0.2:2380"),
        "{said}"
    );
    drop(b);

    left.set_salt(&[7; 32]);
    assert!(left.refused().contains("from another cluster"));
    left.set_salt(SALT);
    // a forged backup has another signature, or none
    let [signature, aside] = ["snapshot.db.signature", "aside"].map(|name| lost.path(name));
    fs::rename(&signature, &aside).unwrap();
    assert!(
        left.refused()
            .contains("the snapshot's signature cannot be verified")
    );
    fs::write(&signature, "{}\nhmac-sha256 00\n").unwrap();
    assert!(left.refused().contains("the signature is wrong"));
    fs::rename(&aside, &signature).unwrap();
    let plan = left.plan();
    for line in [
        "signed with this cluster's master secret",
        "by etcd (without a name) on plane-a (machine unknown)",
        "changes permissions and settings:\n  gone: ClusterRole new\n  new: ClusterRoleBinding old\n1.",
    ] {
        assert!(plan.contains(line), "no {line:?} in {plan}");
    }
    let good = fs::read(&left.snapshot).unwrap();
    let changed = Left {
        snapshot: left.path("changed.db"),
        ..left
    };
    let mut bytes = good.clone();
    bytes[5000] ^= 1;
    fs::write(&changed.snapshot, bytes).unwrap();
    assert!(changed.refused().contains("it was changed"));
    fs::write(&changed.snapshot, good).unwrap();
    sign(&changed.snapshot);
    changed.silent.set(false);
    assert!(changed.refused().contains("an API server answers"));
    changed.silent.set(true);
    // the manifest names a member that neither the data nor the snapshot has
    let manifest = changed.path("kubernetes/manifests/etcd.yaml");
    let text = fs::read_to_string(&manifest).unwrap();
    let more = "--initial-cluster=d=http://127.88.0.4:2380,";
    fs::write(&manifest, text.replace("--initial-cluster=", more)).unwrap();
    let listener = TcpListener::bind("127.88.0.4:2380").unwrap();
    let said = changed.refused();
    assert!(
        said.contains("answers: (without a name) at 127.88.0.4:2380"),
        "{said}"
    );
    drop(listener);
    fs::write(&manifest, text).unwrap();
    let plan = Options {
        is_dry_run: true,
        ..Options::default()
    };
    let before = changed.files();
    changed.with(&plan, &|step| panic!("{step}")).unwrap();
    assert_eq!(changed.files(), before);
    // a member that does not run, with data that cannot be read
    drop(kubelet);
    let database = changed.path("data/etcd/member/snap/db");
    let whole = fs::read(&database).unwrap();
    fs::write(&database, vec![0; whole.len()]).unwrap();
    let listener = TcpListener::bind("127.88.0.3:2380").unwrap();
    let said = changed.refused();
    assert!(
        said.contains("another member of etcd answers: c at 127.88.0.3:2380"),
        "{said}"
    );
    drop(listener);
    changed.with(&plan, &|step| panic!("{step}")).unwrap();
    fs::remove_dir_all(changed.path("data/etcd/member")).unwrap();
    assert!(changed.refused().contains("has no data"));
}

#[test]
#[ignore = "needs etcd: make kubernetes-api"]
fn a_restoration_that_is_killed_at_any_step_goes_on_or_is_undone() {
    let _alone = alone();
    let lost = Lost::new();
    let left = lost.left();
    let kubelet = left.start();
    left.run().unwrap();
    left.assert_restored();
    // an old member is no member of the new cluster, and the new one none of the old
    let old = start(1, &lost.path("b"));
    wait_for("the refusal of the old member", || {
        let log = fs::read_to_string(lost.path("b.log")).unwrap();
        log.contains("cluster ID mismatch").then_some(())
    });
    assert_eq!(etcdctl(1, &["get", "kept"]), None);
    left.assert_restored();
    drop((old, kubelet));

    for step in STEPS {
        println!("killed after {step}");
        let left = lost.left();
        let _kubelet = left.start();
        left.killed_after(step);
        left.run().unwrap();
        left.assert_restored();
    }
    for step in &STEPS[..7] {
        println!("undone after {step}");
        let left = lost.left();
        let kubelet = left.start();
        left.killed_after(step);
        left.undo().unwrap();
        left.assert_as_before();
        assert!(
            left.undo()
                .unwrap_err()
                .to_string()
                .contains("no restoration has begun")
        );
        // it works later
        if *step == "replaced" {
            left.run().unwrap();
            left.assert_restored();
        }
        drop(kubelet);
    }

    println!("undone when it has succeeded, and when an undo was killed");
    let left = lost.left();
    let _kubelet = left.start();
    left.killed_after("answered");
    let said = left.undo().unwrap_err().to_string();
    assert!(said.contains("the restoration has succeeded"), "{said}");
    left.run().unwrap();
    left.assert_restored();
    drop(_kubelet);
    let left = lost.left();
    let _kubelet = left.start();
    left.killed_after("replaced");
    let kill = |reached: &str| assert!(reached != "put back", "killed");
    let undo = Options {
        is_undo: true,
        ..agreed()
    };
    assert!(catch_unwind(AssertUnwindSafe(|| left.with(&undo, &kill))).is_err());
    left.killed_after("replaced");
    left.undo().unwrap();
    left.assert_as_before();
}

#[test]
#[ignore = "needs etcd: make kubernetes-api"]
fn a_member_that_comes_back_in_the_last_moment_ends_the_restoration() {
    let _alone = alone();
    let lost = Lost::new();
    let left = lost.left();
    let _kubelet = left.start();
    let listener = RefCell::new(None);
    let come_back = |step: &str| {
        if step == "etcd" && listener.borrow().is_none() {
            *listener.borrow_mut() = Some(TcpListener::bind("127.88.0.3:2380").unwrap());
        }
    };
    let error = left.with(&agreed(), &come_back).unwrap_err();
    assert!(matches!(error, Error::Back(..)), "{error}");
    assert!(
        error.to_string().contains("another member of etcd answers"),
        "{error}"
    );
    left.assert_as_before();
    let other = Left {
        snapshot: left.path("other.db"),
        ..left
    };
    // the same content, and so another restoration only by its hash
    let mut content = fs::read(lost.path("snapshot.db")).unwrap();
    content.truncate(content.len() - 32);
    content[4096 * 2 - 1] ^= 1;
    let hash = ring::digest::digest(&ring::digest::SHA256, &content);
    fs::write(&other.snapshot, [&content, hash.as_ref()].concat()).unwrap();
    sign(&other.snapshot);
    let error = other.run().unwrap_err().to_string();
    assert!(
        error.contains("a restoration with another snapshot has begun"),
        "{error}"
    );
    other.undo().unwrap();
    other.assert_as_before();
}

#[test]
#[ignore = "needs etcd: make kubernetes-api"]
fn a_snapshot_that_is_exchanged_after_the_checks_is_not_restored() {
    let _alone = alone();
    let lost = Lost::new();
    let left = lost.left();
    let _kubelet = left.start();
    let mut forged = fs::read(&left.snapshot).unwrap();
    forged.truncate(forged.len() - 32);
    let at = forged.windows(5).position(|it| it == b"saved").unwrap();
    forged[at..][..5].copy_from_slice(b"forge");
    let hash = ring::digest::digest(&ring::digest::SHA256, &forged);
    forged.extend(hash.as_ref());
    let exchange = |step: &str| {
        if step == "begun" {
            fs::write(&left.snapshot, &forged).unwrap();
        }
    };
    left.with(&agreed(), &exchange).unwrap();
    left.assert_restored();
}
