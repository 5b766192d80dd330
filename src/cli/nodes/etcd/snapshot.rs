//! etcd saves the snapshot in the folder of the logs of a pod, where the kubelet of the control plane serves it, and from which it
//! deletes it with the pod. So nothing else listens, and the image of etcd needs no program but etcdctl.
//!
//! The pod belongs to a Job: if this command is cut off, Kubernetes deletes the Job, its pod and the file after some minutes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::crypto::random;
use base::text::hex;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, JOBS, Object, PODS, Selector};
use kubernetes::control_planes::has_owner;
use kubernetes::etcd_signature::file_of;
use kubernetes::objects::{AnyObject, Pod, PodVolume};
use serde::Deserialize;
use serde_json::{Value, json};

use super::download::{DownloadedSnapshot, ExpectedFile, download};
use super::signer::Signer;
use crate::nodes::etcd_members::{Etcd, EtcdPlace};
use crate::shell::{
    consent,
    error::Error,
    files::FileError,
    interrupt,
    output::Output,
    progress::{Progress, printable},
};
use crate::workspace::{kubeconfig, master_secret::SecretSource};

/// The folder of the logs of pods on a node, and the same folder as the kubelet serves it.
const LOGS: &str = "/var/log/pods";
const SERVED: &str = "pods";
/// Where the pod has the folder of the snapshot.
const FOLDER: &str = "/snapshot";
const FILE: &str = "snapshot.db";
/// The annotation of the Job with the challenge: random digits, which only somebody knows who may read Jobs of kube-system, or etcd. Pods
/// do not get it.
const CHALLENGE: &str = "firstlight/challenge";
/// How long etcd may take to save.
const LIMIT: Duration = Duration::from_secs(15 * 60);
const SAVE_LIMIT: &str = "14m";
/// When Kubernetes deletes a Job that this command left.
const KEPT: Duration = Duration::from_secs(10 * 60);
/// How long the kubelet may take to delete the logs of a pod. It looks every minute.
const GONE: Duration = Duration::from_secs(4 * 60);
const START: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);
const LONG_PAUSE: Duration = Duration::from_secs(5);

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The file of the snapshot.
    pub file: PathBuf,
    /// Whether the operator need not be asked.
    pub is_agreed: bool,
    /// Whether only the plan is shown.
    pub is_dry_run: bool,
    /// The master secret that signs; `None` to sign nothing.
    pub secret: Option<SecretSource>,
    /// The state file, which may be missing.
    pub state: PathBuf,
    /// The administrator's kubeconfigs.
    pub kubeconfig: Vec<PathBuf>,
    /// The form of the output.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Saves a snapshot.
pub fn run(options: &Options) -> Result<(), Error> {
    let own = [options.file.clone(), file_of(&options.file)];
    if let Some(there) = own.into_iter().find(|it| it.exists()) {
        let exists = std::io::ErrorKind::AlreadyExists.into();
        return Err(FileError::Io("create", there, exists).into());
    }
    let client = kubeconfig::client(&options.kubeconfig)?;
    let patient = client.within(options.timeout);
    let mut progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    patient.wait_ready(&mut |why| progress.line(why))?;
    let etcd = find(&client)?;
    let readers = readers(&client, etcd.node())?;
    let out = options.output;
    out.say(plan(options, etcd.node(), &readers))?;
    if options.is_dry_run {
        out.json(&json!({"saved": false, "node": etcd.node(), "readers": readers}))?;
        return out.say("nothing was done");
    }
    if !options.is_agreed {
        // its line on the terminal would overwrite the question
        drop(progress);
        consent::ask("Save a snapshot?", "--dry-run")?;
        progress = Progress::on_stderr();
    }
    let secret = options.secret.as_ref();
    let signer = secret.map(|secret| Signer::of(&client, secret, &options.state));
    let signer = signer.transpose()?;
    interrupt::means(
        "the snapshot is not complete: delete FILE.*.part here, if there is one, since it has Secrets; Kubernetes deletes the Job \
         firstlight-etcd-.. in kube-system and its file on the control plane within half an hour",
    );
    let job = SaveJob::create(&client, &etcd)?;
    let (state, path) = job.wait(&etcd, &progress)?;
    progress.phase(format!("bringing the snapshot from {}", etcd.node()));
    etcd.check()?;
    let content = patient.node_file(etcd.node(), &path)?;
    let expected = ExpectedFile {
        length: content.length(),
        challenge: &job.challenge,
        node: etcd.node(),
    };
    let snapshot = download(&expected, content.into_reader(), &options.file)?;
    let signature = signer.map(|it| {
        let revision = state.header.revision;
        it.sign(&options.file, &etcd, &snapshot, revision, &state.version)
    });
    let signature = signature.transpose()?;
    // deletes the Job
    drop(job);
    interrupt::means("the snapshot is complete; Kubernetes deletes the file on the control plane");
    wait_until_gone(&client, &progress, etcd.node(), &path);
    drop(progress);
    out.json(&json!({
        "saved": true, "node": etcd.node(), "file": options.file, "size": snapshot.length, "sha256": snapshot.hash,
        "revision": state.header.revision, "etcd": state.version, "readers": readers, "signature": signature,
    }))?;
    out.say(done(&options.file, &snapshot, &state, etcd.node()))?;
    out.say(match &signature {
        Some(path) => format!("signed with the master secret: {}; keep it with the snapshot", path.display()),
        None => format!(
            "warning: not signed, because no master secret was given: `bootstrapper restore-etcd` will take the snapshot only with \
             --unsigned {}",
            snapshot.hash
        ),
    })
}

fn find(client: &Client) -> Result<Etcd<'_>, Error> {
    match Etcd::find(client, &[])? {
        EtcdPlace::There(etcd) => Ok(*etcd),
        EtcdPlace::OnlyOn(nodes) => Err(Error::Refused(format!(
            "no etcd is ready that may be asked (its pods are on {}): see the warnings, start the machines, or bring etcd back \
             (docs/day-two/etcd.md)",
            printable(&nodes.join(", "))
        ))),
        EtcdPlace::Elsewhere => Err(Error::Refused(
            "etcd runs in no pod of kubeadm: save it where it runs".into(),
        )),
    }
}

/// Returns the names of the pods on a node that can read the snapshot meanwhile: they mount the folder of the logs, or are privileged.
fn readers(client: &Client, node: &str) -> Result<Vec<String>, Error> {
    let selector = Selector::fields(&format!("spec.nodeName={node}"));
    let pods = client.list_as::<Pod>(&PODS.all(), &selector)?;
    let can_read = |pod: &&Pod| {
        let mounts_logs = |it: &PodVolume| {
            // on a node /var is a folder of the state disk, and /var/run is /run
            let path = it.host_path.path.replacen("/var/run", "/run", 1);
            let mut names = [LOGS.to_owned(), format!("/run/state{LOGS}")].into_iter();
            !path.is_empty() && names.any(|it| Path::new(&it).starts_with(&path))
        };
        let spec = &pod.spec;
        let mut containers = spec.containers.iter();
        spec.host_pid
            || spec.volumes.iter().any(mounts_logs)
            || containers.any(|it| it.security_context.privileged)
    };
    let readers = pods.items.iter().filter(can_read);
    Ok(readers.map(|pod| pod.metadata.place()).collect())
}

fn plan(options: &Options, node: &str, readers: &[String]) -> String {
    let file = &options.file;
    let who = if readers.is_empty() {
        "no pod there mounts this folder or is privileged".to_owned()
    } else {
        format!(
            "these pods can read it, because they mount this folder or are privileged: {}",
            printable(&readers.join(", "))
        )
    };
    format!(
        "etcd on {node} saves a snapshot, which comes here as {}. For about a minute it is also in {LOGS} of {node}: {who}. It contains every \
         Secret of the cluster in plaintext. {}",
        file.display(),
        if options.secret.is_some() {
            format!(
                "It is signed with the master secret, in {}",
                file_of(file).display()
            )
        } else {
            "It is not signed, because no master secret was given (--master-secret)".to_owned()
        }
    )
}

fn done(file: &Path, snapshot: &DownloadedSnapshot, state: &State, node: &str) -> String {
    format!(
        "saved: {}, {} bytes, of revision {} or later, by etcd {} on {node}; it has the SHA-256 that etcd added: {}\nwarning: it contains every \
         Secret of the cluster in plaintext: encrypt it before you store it",
        file.display(),
        snapshot.length,
        state.header.revision,
        printable(&state.version),
        snapshot.hash
    )
}

/// The Job that saves. Dropping it deletes it, and with it the pod and the file.
struct SaveJob<'a> {
    client: &'a Client,
    at: Object,
    uid: String,
    challenge: String,
}

impl Drop for SaveJob<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.client.delete_if_there(&self.at) {
            log::warn!(
                "cannot delete the Job: {error}; Kubernetes deletes it and its snapshot {} min after it ends",
                KEPT.as_secs() / 60
            );
        }
    }
}

impl<'a> SaveJob<'a> {
    fn create(client: &'a Client, etcd: &Etcd) -> Result<SaveJob<'a>, Error> {
        let name = format!("firstlight-etcd-{}", hex(&random::<4>()));
        let jobs = JOBS.in_namespace(NAMESPACE);
        let challenge = hex(&random::<32>());
        let mut manifest = manifest(&name, etcd)?;
        manifest["metadata"]["annotations"] = json!({CHALLENGE: challenge});
        let created: AnyObject = client.create_as(&jobs, &manifest)?;
        Ok(SaveJob {
            client,
            at: jobs.named(&name),
            uid: created.metadata.uid,
            challenge,
        })
    }

    /// Waits until the snapshot is saved. Returns the state of etcd before, and the path of the file at the kubelet.
    fn wait(&self, etcd: &Etcd, progress: &Progress) -> Result<(State, String), Error> {
        progress.phase(format!(
            "etcd on {} saves a snapshot, by the Job {NAMESPACE}/{}",
            etcd.node(),
            self.at.name()
        ));
        let pod = etcd.wait(&self.pod(etcd.node())?, LIMIT)?;
        let ran = etcd.ran(&pod, &["read", "status", "save"])?;
        let [read, status, save] = &ran[..] else {
            return Err(Error::refused("expected the logs of three containers"));
        };
        if !read.is_done {
            return Err(etcd.failed("read its newest objects", read));
        }
        if !status.is_done {
            return Err(etcd.failed("tell its state", status));
        }
        if !save.is_done {
            return Err(etcd.failed("save a snapshot", save));
        }
        let state =
            State::read(&status.log).ok_or_else(|| etcd.failed("tell its state", status))?;
        state.check(etcd.node())?;
        let (name, uid) = (&pod.metadata.name, &pod.metadata.uid);
        Ok((
            state,
            format!("{SERVED}/{NAMESPACE}_{name}_{uid}{FOLDER}/{FILE}"),
        ))
    }

    /// Returns the pod of the Job, as soon as it exists. Each kubelet may make a pod with the label, but none that the Job owns.
    fn pod(&self, node: &str) -> Result<Object, Error> {
        let selector =
            Selector::labels(&format!("batch.kubernetes.io/job-name={}", self.at.name()));
        let end = Instant::now() + START;
        loop {
            let all = PODS.in_namespace(NAMESPACE);
            let pods = self.client.list_as(&all, &selector)?;
            let is_own = |pod: &&Pod| {
                has_owner(pod, "Job", self.at.name(), &self.uid) && pod.spec.node_name == node
            };
            if let Some(pod) = pods.items.iter().find(is_own) {
                return Ok(all.named(&pod.metadata.name));
            }
            if Instant::now() >= end {
                return Err(Error::Refused(format!(
                    "{} has no pod after {} s: does the controller manager run, and do policies permit the pod? kubectl -n {NAMESPACE} \
                     describe job {}",
                    self.at,
                    START.as_secs(),
                    self.at.name()
                )));
            }
            if self.client.stopped_within(PAUSE) {
                return Err(client::Error::Stopped.into());
            }
        }
    }
}

/// Makes the Job: etcdctl asks for etcd's state, and then saves a snapshot into the folder of the pod's logs.
fn manifest(name: &str, etcd: &Etcd) -> Result<Value, Error> {
    let path = format!("{FOLDER}/{FILE}");
    let mut spec = etcd.pod_spec(&[
        // it answers only when this member has all that was committed before
        (
            "read",
            &["get", "/", "--prefix", "--limit", "1", "--keys-only"],
        ),
        ("status", &["endpoint", "status", "--write-out", "json"]),
        (
            "save",
            &["snapshot", "save", &path, "--command-timeout", SAVE_LIMIT],
        ),
    ])?;
    let mut save = spec["containers"][2].take();
    let mounts = save["volumeMounts"].as_array_mut();
    let folder = format!("{NAMESPACE}_$(POD)_$(UID){FOLDER}");
    mounts
        .map(|mounts| {
            mounts.push(json!({"name": "logs", "mountPath": FOLDER, "subPathExpr": folder}))
        })
        .ok_or_else(|| Error::failed("expected a list of mounts"))?;
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    save["env"] = json!([field("POD", "metadata.name"), field("UID", "metadata.uid")]);
    spec["initContainers"] = json!([spec["containers"][0].take(), spec["containers"][1].take()]);
    spec["containers"] = json!([save]);
    let volumes = spec["volumes"].as_array_mut();
    volumes
        .map(|volumes| {
            volumes.push(json!({"name": "logs", "hostPath": {"path": LOGS, "type": "Directory"}}))
        })
        .ok_or_else(|| Error::failed("expected a list of volumes"))?;
    spec["activeDeadlineSeconds"] = LIMIT.as_secs().into();
    let labels = json!({"app.kubernetes.io/part-of": "firstlight"});
    Ok(json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "backoffLimit": 0, "ttlSecondsAfterFinished": KEPT.as_secs(), "activeDeadlineSeconds": LIMIT.as_secs(),
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }))
}

/// What a member of etcd says about itself.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct State {
    /// The head of its answer.
    pub header: Header,
    /// Its version.
    pub version: String,
    /// The member that leads; zero if there is none.
    leader: u64,
    errors: Option<Vec<String>>,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Header {
    /// The revision of its newest object.
    pub revision: u64,
}

#[derive(Deserialize)]
struct Endpoint {
    #[serde(rename = "Status")]
    status: State,
}

impl State {
    /// Reads the log of `etcdctl endpoint status`, which also has lines of etcdctl's own log.
    fn read(log: &str) -> Option<State> {
        let endpoints: Vec<Endpoint> = log
            .lines()
            .find_map(|line| serde_json::from_str(line).ok())?;
        endpoints.into_iter().next().map(|it| it.status)
    }

    /// Refuses a member that cannot know the newest objects, or whose data are damaged.
    fn check(&self, node: &str) -> Result<(), Error> {
        let errors = self
            .errors
            .iter()
            .flatten()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ");
        if self.leader == 0 || errors.contains("CORRUPT") {
            Err(Error::Refused(format!(
                "etcd on {node} is not healthy, so it may have old or damaged data (leader {:x}, errors: {}): nothing was saved. See \
             docs/day-two/etcd.md",
                self.leader,
                printable(&errors)
            )))
        } else {
            Ok(())
        }
    }
}

/// Waits until the kubelet has deleted the file.
fn wait_until_gone(client: &Client, progress: &Progress, node: &str, path: &str) {
    progress.phase(format!(
        "waiting until the kubelet of {node} has deleted the file there"
    ));
    let end = Instant::now() + GONE;
    loop {
        let found = client.node_file(node, path);
        if found.as_ref().is_err_and(client::Error::is_not_found) {
            return;
        }
        if Instant::now() >= end || client.stopped_within(LONG_PAUSE) {
            let why = found
                .err()
                .map_or("it is still there".to_owned(), |error| error.to_string());
            log::warn!(
                "the snapshot in /var/log/{path} of {node} may still exist ({why}): delete it yourself"
            );
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    const STATUS: &str = r#"[{"Endpoint":"https://127.0.0.1:2379","Status":{"header":{"cluster_id":1,"member_id":2,"revision":4711,"raft_term":2},"version":"3.6.5","dbSize":20480,"leader":2}}]"#;

    #[test]
    fn only_a_healthy_member_saves() {
        let state = |text: &str| State::read(&format!("{{\"level\":\"warn\"}}\n{text}\n")).unwrap();
        let good = state(STATUS);
        assert_eq!((good.header.revision, &*good.version), (4711, "3.6.5"));
        good.check("a").unwrap();
        let full = STATUS.replace(
            "\"leader\"",
            "\"errors\":[\"memberID:2 alarm:NOSPACE \"],\"leader\"",
        );
        state(&full).check("a").unwrap();
        let without = STATUS.replace("\"leader\":2", "\"errors\":[\"etcdserver: no leader\"]");
        let error = state(&without).check("a").unwrap_err().to_string();
        assert!(error.contains("no leader"), "{error}");
        assert!(
            state(&full.replace("NOSPACE", "CORRUPT"))
                .check("a")
                .is_err()
        );
        assert_eq!(State::read("Error: context deadline exceeded"), None);
        assert_eq!(State::read("[]"), None);
        for log in mutations(STATUS.as_bytes(), 5000) {
            if let Some(state) = State::read(&String::from_utf8_lossy(&log)) {
                let _ = state.check("a");
            }
        }
    }
}
