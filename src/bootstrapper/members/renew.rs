//! `bootstrapper renew`: renews the certificates of a control plane before they end. systemd runs it
//! at each boot and once a day.
//!
//! ```text
//! kubeadm certs check-expiration ─► one ends within 120 days? ─► save all ─► kubeadm certs renew all ─► restart pods
//!                                             │no                 in the file PENDING, until all pods are back ▲
//!                                             └─► nothing                                                      │
//! PENDING exists: the last run did not end ─► restore what it saved, and renew; if kubeadm had ended ──────────┘
//! ```
//!
//! An authority that ends within a year gets a new certificate before kubeadm signs ([`authorities`]).
//! Each node, also a worker, takes the new certificate of the cluster's authority from the API.
//!
//! **Which program restarts, and when.** kube-controller-manager and kube-scheduler read their
//! kubeconfig only at their start. The API server reads its files again, but it also has a
//! certificate for connections to itself in its memory, which ends a year after its start (three
//! years from v1.34 on). etcd reads its certificates for each connection, so it restarts only
//! after its authority got a new one, once in nine years.
//!
//! Nothing here compares the times of processes, files and certificates: clocks are set, and files
//! have any date. No process gets a signal, either. Instead the manifest of a pod
//! says with which certificate it was started ([`static_pods`]): the kubelet replaces the pod when
//! the manifest changes, once, also if this program was killed in between. Writing the same again
//! restarts nothing.
//!
//! kubeadm overwrites each file in place. If the disk is full or the power fails, a file may be
//! empty, and then kubeadm can neither list nor renew. So all files are saved in [`PENDING`] first.

mod kubelet_client;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::members::authorities::{self, NewAuthority};
use crate::steps::{error::Error as Step, etcd, job::Job, kubelet, setup, static_pods};
use base::boot::timeline::Timeline;
use base::stop::Stop;
use base::{child_process, file};
use kubernetes::kubeadm::KUBELET_CLIENT_CERTIFICATE;

/// The folder of the cluster's files. A lock on it keeps two runs of kubeadm apart.
pub const KUBERNETES: &str = "/etc/kubernetes";
/// A renewal that has not ended ([`Pending`]), in [`KUBERNETES`].
const PENDING: &str = "firstlight-renewal.json";
/// A restoration of etcd that has not ended, in [`KUBERNETES`] (`restore/place.rs`).
const RESTORATION: &str = "restore-etcd/record.json";
/// A certificate is renewed when it has less than this left: a third of its year.
const RENEW_WITHIN: i64 = 120 * DAY;
/// An authority gets a new certificate when the present one has less than this left.
const RENEW_AUTHORITY_WITHIN: i64 = 365 * DAY;
const DAY: i64 = 24 * 60 * 60;
/// Time limit for kubeadm, which first asks the API server for its configuration.
const KUBEADM: Duration = Duration::from_secs(5 * 60);
/// The static pods that restart after each renewal, and kubeadm's names of their certificates.
const PODS: [(&str, &str); 3] = [
    ("kube-apiserver", "apiserver"),
    ("kube-controller-manager", "controller-manager.conf"),
    ("kube-scheduler", "scheduler.conf"),
];
/// The pod that restarts if its authority has a new certificate.
const ETCD: (&str, &str) = ("etcd", "etcd-ca");

/// Renews the certificates of this node that end soon, and restarts the programs that use them.
pub fn run(stop: &Stop, timeline: Timeline) -> Result<(), Error> {
    let _alone = lock()?;
    let job = Job::<()>::new(timeline);
    job.begin();
    let kubernetes = Path::new(KUBERNETES);
    let node = Node {
        kubernetes,
        stop,
        job: &job,
    };
    if kubernetes.join(RESTORATION).exists() {
        log::warn!(
            "a restoration of etcd is not finished: run `bootstrapper restore-etcd` again, or with --undo"
        );
    }
    if kubernetes.join("manifests/kube-apiserver.yaml").exists() {
        let certificate = Path::new(KUBELET_CLIENT_CERTIFICATE);
        if kubelet_client::renew_ended(certificate, kubernetes, SystemTime::now())? {
            job.line(
                "the kubelet's certificate has expired: restarting the kubelet with a new one",
            );
            kubelet::restart(stop, &job)?;
        }
        node.renew_control_plane()?;
        // a restart of etcd, by this run or by the kubelet, has taken the priority from it
        etcd::prioritize_io(stop, &timeline);
    }
    Ok(authorities::follow(kubernetes, stop, &job)?)
}

struct Node<'a> {
    /// [`KUBERNETES`]
    kubernetes: &'a Path,
    stop: &'a Stop,
    job: &'a Job<()>,
}

impl Node<'_> {
    fn renew_control_plane(&self) -> Result<(), Error> {
        let file = PendingFile(self.kubernetes);
        let mut pending = file.read()?.unwrap_or_default();
        let is_torn = !pending.files.is_empty();
        if is_torn {
            self.job
                .line("the last renewal was interrupted: restoring the previous certificates");
            file.restore(&pending)?;
        }
        let mut list = self.list()?;
        let authorities = self.new_authorities(&list);
        if is_torn || list.end_soon() || !authorities.is_empty() {
            pending = self.renew(&file, &list, &authorities, pending)?;
            list = self.list()?;
            for certificate in &list.certificates {
                if certificate.left < RENEW_WITHIN {
                    log::warn!("kubeadm did not renew a certificate: {certificate}");
                } else {
                    self.job.line(&certificate.to_string());
                }
            }
        }
        self.restart(&list, &pending)?;
        Ok(file.end()?)
    }

    /// Makes new certificates for the authorities that end within a year. Without its key, an
    /// authority gets none, which must not keep the others from being renewed.
    fn new_authorities(&self, list: &List) -> Vec<NewAuthority> {
        let mut new = vec![];
        for old in list.old_authorities() {
            match NewAuthority::of(self.kubernetes, &old.path()) {
                Ok(one) => new.push(one),
                Err(error) => {
                    log::warn!("cannot renew the CA certificate {old}: {error}")
                }
            }
        }
        new
    }

    /// Renews all certificates. Returns which pods have to restart.
    fn renew(
        &self,
        file: &PendingFile,
        list: &List,
        authorities: &[NewAuthority],
        before: Pending,
    ) -> Result<Pending, Error> {
        self.job.phase("renew");
        let mut pending = Pending {
            files: file.contents(list)?,
            ..before
        };
        pending.restart(PODS.map(|(pod, _)| pod));
        if authorities.iter().any(NewAuthority::is_of_etcd) {
            pending.restart([ETCD.0]);
        }
        file.write(&pending)?;
        for authority in authorities {
            authority.write(self.job)?;
        }
        let mut kubeadm = setup::program("kubeadm");
        kubeadm.args(["certs", "renew", "all"]);
        if let Err(error) = setup::run(&mut kubeadm, KUBEADM, self.stop, self.job) {
            // programs that read their files again get the old ones; the next run begins anew
            file.restore(&pending)?;
            return Err(error.into());
        }
        file.sync(&pending)?;
        pending.files.clear();
        file.write(&pending)?;
        Ok(pending)
    }

    /// Restarts one pod after the other, if its certificate is new. Tries all of them before it
    /// returns the first error. The API server needs etcd.
    fn restart(&self, list: &List, pending: &Pending) -> Result<(), Error> {
        let mut result = Ok(());
        for (pod, name) in [ETCD].into_iter().chain(PODS) {
            let mut all = list.certificates.iter().chain(&list.authorities);
            let Some(certificate) = all.find(|one| one.name == name) else {
                continue;
            };
            let is_pending = pending.pods.iter().any(|one| one == pod);
            let (stop, job) = (self.stop, self.job);
            let restarted = static_pods::restart(
                self.kubernetes,
                pod,
                &certificate.end,
                is_pending,
                stop,
                job,
            );
            result = result.and(restarted.map_err(Error::Pod));
        }
        result
    }

    fn list(&self) -> Result<List, Error> {
        let mut check = setup::program("kubeadm");
        check.args(["certs", "check-expiration", "--output", "json"]);
        let mut tell = |line: &str| self.job.line(line);
        let list = child_process::output(&mut check, KUBEADM, self.stop, &mut tell);
        let list = list.map_err(Step::Command)?;
        List::read(list.expose()).ok_or(Error::List)
    }
}

/// Keeps other programs of ours from running kubeadm on this member until the file is closed.
pub fn lock() -> Result<File, Step> {
    let failed = |error| Step::Io(KUBERNETES.into(), error);
    let folder = File::open(KUBERNETES).map_err(failed)?;
    match folder.try_lock() {
        Ok(()) => Ok(folder),
        Err(TryLockError::Error(error)) => Err(failed(error)),
        Err(TryLockError::WouldBlock) => Err(failed(io::Error::other(
            "another upgrade or renewal of certificates runs on this node; run this again when it has ended",
        ))),
    }
}

/// Why certificates are not renewed, or not used. `Display` is a sentence.
#[derive(Debug)]
pub enum Error {
    /// A step failed.
    Step(Step),
    /// kubeadm's list of certificates has another form.
    List,
    /// [`PENDING`] has another form.
    Pending,
    /// A pod does not run with its new certificate.
    Pod(static_pods::Error),
    /// An authority has no new certificate, or this node does not use it.
    Authority(authorities::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Step(error) => error.fmt(f),
            Error::List => f.write_str("kubeadm certs check-expiration: not the list expected"),
            Error::Pending => write!(
                f,
                "{KUBERNETES}/{PENDING} is not what a renewal writes: if all certificates are readable (kubeadm certs check-expiration), remove it"
            ),
            Error::Pod(error) => error.fmt(f),
            Error::Authority(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<Step> for Error {
    fn from(error: Step) -> Error {
        Error::Step(error)
    }
}

impl From<authorities::Error> for Error {
    fn from(error: authorities::Error) -> Error {
        Error::Authority(error)
    }
}

/// Contents of files by their names in [`KUBERNETES`].
type Files = BTreeMap<String, String>;

/// A renewal that has not ended.
#[derive(Debug, Default, PartialEq)]
struct Pending {
    /// The files before the renewal, by their names in [`KUBERNETES`]. Empty: kubeadm has renewed
    /// all of them.
    files: Files,
    /// The pods that have to restart.
    pods: Vec<String>,
}

impl Pending {
    fn restart<const N: usize>(&mut self, pods: [&str; N]) {
        let new = pods.map(str::to_owned);
        self.pods.retain(|pod| !new.contains(pod));
        self.pods.extend(new);
    }
}

/// The file [`PENDING`] in this folder.
struct PendingFile<'a>(&'a Path);

impl PendingFile<'_> {
    /// Returns what the last run has left, or `None` if it has ended.
    fn read(&self) -> Result<Option<Pending>, Error> {
        let text = match fs::read(self.0.join(PENDING)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| self.failed(PENDING, error))?,
        };
        let read = || {
            let mut value: Value = serde_json::from_slice(&text).ok()?;
            Some(Pending {
                files: serde_json::from_value(value.get_mut("files")?.take()).ok()?,
                pods: serde_json::from_value(value.get_mut("pods")?.take()).ok()?,
            })
        };
        read().map(Some).ok_or(Error::Pending)
    }

    fn write(&self, pending: &Pending) -> Result<(), Step> {
        let value = json!({"files": pending.files, "pods": pending.pods});
        file::replace(&self.0.join(PENDING), value.to_string().as_bytes(), 0o600)
            .map_err(|error| self.failed(PENDING, error))
    }

    /// Returns the files of these certificates.
    fn contents(&self, list: &List) -> Result<Files, Step> {
        let mut files = Files::new();
        for name in list.certificates.iter().flat_map(Certificate::files) {
            match fs::read_to_string(self.0.join(&name)) {
                // the key of another holder
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(self.failed(&name, error)),
                Ok(text) => drop(files.insert(name, text)),
            }
        }
        Ok(files)
    }

    /// Writes the saved files again.
    fn restore(&self, pending: &Pending) -> Result<(), Step> {
        for (name, text) in &pending.files {
            let mode = if name.ends_with(".crt") { 0o644 } else { 0o600 };
            file::replace(&self.0.join(name), text.as_bytes(), mode)
                .map_err(|error| self.failed(name, error))?;
        }
        Ok(())
    }

    /// Makes what kubeadm has written into these files durable.
    fn sync(&self, pending: &Pending) -> Result<(), Step> {
        for name in pending.files.keys() {
            let file = File::open(self.0.join(name)).and_then(|file| file.sync_all());
            file.map_err(|error| self.failed(name, error))?;
        }
        Ok(())
    }

    fn end(&self) -> Result<(), Step> {
        match fs::remove_file(self.0.join(PENDING)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.failed(PENDING, error)),
            _ => Ok(()),
        }
    }

    fn failed(&self, name: &str, error: io::Error) -> Step {
        Step::Io(self.0.join(name), error)
    }
}

/// kubeadm's list of this control plane's certificates.
#[derive(Debug, PartialEq)]
struct List {
    certificates: Vec<Certificate>,
    authorities: Vec<Certificate>,
}

/// A certificate in kubeadm's list.
#[derive(Debug, PartialEq)]
struct Certificate {
    /// kubeadm's name of it, such as `apiserver` or `scheduler.conf`.
    name: String,
    /// Its end, RFC 3339.
    end: String,
    /// The seconds until its end.
    left: i64,
    /// The name of the authority that signed it; empty for the certificate of an authority.
    authority: String,
    /// This node lacks the key of its authority.
    is_external: bool,
}

impl List {
    /// Reads the answer of `kubeadm certs check-expiration`. Skips certificates that do not exist.
    fn read(list: &[u8]) -> Option<List> {
        let list: Value = serde_json::from_slice(list).ok()?;
        let of = |kind: &str| {
            let entries = list[kind].as_array()?.iter();
            let entries = entries.filter(|entry| entry["missing"] != true);
            let read = |entry: &Value| {
                Some(Certificate {
                    name: entry["name"].as_str()?.to_owned(),
                    end: entry["expirationDate"].as_str()?.to_owned(),
                    left: entry["residualTime"].as_i64()?,
                    authority: entry["caName"].as_str().unwrap_or_default().to_owned(),
                    is_external: entry["externallyManaged"] == true,
                })
            };
            entries.map(read).collect::<Option<Vec<_>>>()
        };
        Some(List {
            certificates: of("certificates")?,
            authorities: of("certificateAuthorities")?,
        })
    }

    /// Returns whether this node has to renew a certificate now. With its authority each certificate
    /// ends: if it does not end earlier, a renewal changes nothing.
    fn end_soon(&self) -> bool {
        let ends_first = |certificate: &Certificate| {
            let mut all = self.authorities.iter();
            let authority = all.find(|one| one.name == certificate.authority);
            authority.is_none_or(|authority| certificate.left < authority.left - DAY)
        };
        self.certificates
            .iter()
            .any(|one| !one.is_external && one.left < RENEW_WITHIN && ends_first(one))
    }

    /// Returns the authorities that need a new certificate.
    fn old_authorities(&self) -> impl Iterator<Item = &Certificate> {
        let all = self.authorities.iter();
        all.filter(|one| one.left < RENEW_AUTHORITY_WITHIN)
    }
}

impl Certificate {
    /// Returns the names of its files, by kubeadm's rules.
    fn files(&self) -> Vec<String> {
        if self.name.ends_with(".conf") {
            vec![self.name.clone()]
        } else {
            ["crt", "key"]
                .map(|kind| format!("{}.{kind}", self.path()))
                .to_vec()
        }
    }

    /// Returns the name of its files without `.crt` and `.key`.
    fn path(&self) -> String {
        match self.name.strip_prefix("etcd-") {
            Some(name) => format!("pki/etcd/{name}"),
            None => format!("pki/{}", self.name),
        }
    }
}

impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Certificate {
            name, end, left, ..
        } = self;
        match left {
            0.. => write!(f, "{name} ends at {end}, in {} days", left / DAY),
            _ => write!(f, "{name} ended at {end}, {} days ago", -left / DAY),
        }
    }
}

#[cfg(test)]
mod tests;
