//! Restarts pods of the control plane by their manifests, as `kubectl rollout restart` restarts
//! those of a Deployment: by an annotation of the pod.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::steps::job::Job;
use base::file;
use base::stop::Stop;
use kubernetes::client::{self, ApiAccess, Client, PODS, SELF_SUBJECT_REVIEWS};
use kubernetes::control_planes::static_pod_name;
use kubernetes::objects::{Pod, SelfSubjectReview};
use kubernetes::{NAMESPACE, yaml};

/// The annotation of a pod: the end of the certificate with which it was started.
const ANNOTATION: &str = "firstlight/certificate-ends";
/// Time limit for the kubelet to replace a pod, which delays a program that has just failed.
const RESTART: Duration = Duration::from_secs(10 * 60);
/// Time limit for an answer of the API server.
const ANSWER: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);

/// Makes the kubelet restart a pod of the control plane, unless the annotation in its manifest has
/// `certificate_ends`: the pod then runs with the newest certificate. Waits until the pod is ready.
/// A manifest of `kubeadm init`, `join` or `upgrade` has no annotation: it changes only if
/// `is_renewal`, because kubeadm has started the pod with the newest certificate. `kubernetes` is
/// the folder of the cluster's files.
pub fn restart(
    kubernetes: &Path,
    pod: &'static str,
    certificate_ends: &str,
    is_renewal: bool,
    stop: &Stop,
    job: &Job<()>,
) -> Result<(), Error> {
    let path = kubernetes.join("manifests").join(format!("{pod}.yaml"));
    let failed = |error| Error::Io(path.clone(), error);
    let manifest = fs::read_to_string(&path).map_err(failed)?;
    let present = annotation(&manifest).ok_or_else(|| Error::Manifest(path.clone()))?;
    if present.is_none() && !is_renewal {
        return Ok(());
    }
    if present.as_deref() == Some(certificate_ends) {
        if !is_renewal {
            return Ok(());
        }
    } else {
        let new =
            annotate(&manifest, certificate_ends).ok_or_else(|| Error::Manifest(path.clone()))?;
        job.line(&format!(
            "{pod} restarts with its certificate that ends at {certificate_ends}"
        ));
        // outside of the kubelet's folder, where each file is a pod
        let fresh = kubernetes.join(format!("{pod}.yaml"));
        file::replace(&fresh, new.as_bytes(), 0o600).map_err(failed)?;
        fs::rename(&fresh, &path).map_err(failed)?;
        file::sync_directory(&path).map_err(failed)?;
    }
    wait(kubernetes, pod, certificate_ends, stop)
}

/// Why a pod does not run with its new certificate. `Display` is a sentence.
#[derive(Debug)]
pub enum Error {
    /// The manifest cannot be read or written.
    Io(PathBuf, io::Error),
    /// The manifest has no `metadata` in the form of kubeadm.
    Manifest(PathBuf),
    /// This pod is not ready: why, as far as it is known.
    NotReady(&'static str, String),
    /// The wait was stopped.
    Stopped,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(path, error) => write!(f, "cannot access {}: {error}", path.display()),
            Error::Manifest(path) => write!(
                f,
                "{}: `metadata` is not as kubeadm writes it, so the pod does not restart by itself: restart this node",
                path.display()
            ),
            Error::NotReady(pod, why) => write!(
                f,
                "{pod} has a new certificate, and was not ready with it after {} min: {why}; see its log, below /var/log/pods",
                RESTART.as_secs() / 60
            ),
            Error::Stopped => f.write_str("stopped by a signal; the next run continues"),
        }
    }
}

impl std::error::Error for Error {}

/// Returns the annotation of a manifest, if it has one; `None` if it is no manifest.
fn annotation(manifest: &str) -> Option<Option<String>> {
    let manifest = yaml::document(manifest).ok()?;
    let metadata = manifest.get("metadata")?;
    let value = metadata
        .get("annotations")
        .and_then(|all| all.get(ANNOTATION));
    Some(value.and_then(Value::as_str).map(str::to_owned))
}

/// Returns the manifest with this annotation instead of an earlier one; all other lines stay.
/// `None` if `metadata` is not a block as kubeadm writes it.
fn annotate(manifest: &str, value: &str) -> Option<String> {
    let own = format!("    {ANNOTATION}:");
    let mut lines: Vec<&str> = manifest
        .lines()
        .filter(|line| !line.starts_with(&own))
        .collect();
    let start = lines.iter().position(|line| *line == "metadata:")? + 1;
    let of_block = lines[start..]
        .iter()
        .take_while(|line| line.starts_with(' '));
    let added = format!("{own} {value:?}");
    let place = of_block.clone().position(|line| *line == "  annotations:");
    match place {
        Some(index) => lines.insert(start + index + 1, &added),
        None => lines
            .splice(start..start, ["  annotations:", &added])
            .for_each(drop),
    }
    let new = lines.join("\n") + "\n";
    // another form of `metadata` has become wrong, or has another annotation
    (annotation(&new)?.as_deref() == Some(value)).then_some(new)
}

/// Waits until the API has the pod of this node with this annotation, and says that it is ready.
fn wait(kubernetes: &Path, pod: &'static str, value: &str, stop: &Stop) -> Result<(), Error> {
    let not_ready = |why: String| Error::NotReady(pod, why);
    let client = |file: &str| {
        let config = ApiAccess::from_kubeconfig_file(&kubernetes.join(file));
        let config = config.map_err(|error| not_ready(error.to_string()))?;
        Ok(Client::new(config, stop).within(ANSWER))
    };
    let (admin, kubelet) = (client("admin.conf")?, client("kubelet.conf")?);
    let end = Instant::now() + RESTART;
    loop {
        let why = match is_ready_here(&admin, &kubelet, pod, value) {
            Ok(true) => return Ok(()),
            Ok(false) => "the API server does not report this pod as ready".to_owned(),
            Err(error) => error.to_string(),
        };
        if stop.wait(PAUSE) {
            return Err(Error::Stopped);
        }
        if Instant::now() > end {
            return Err(not_ready(why));
        }
    }
}

/// Returns whether the pod of a program on this node has this annotation and is ready. `kubelet` is the client of this node's kubelet. The
/// kubelet of another node may give a pod of its own each name, label and annotation, but can bind it only to its own node.
pub fn is_ready_here(
    admin: &Client,
    kubelet: &Client,
    program: &str,
    value: &str,
) -> Result<bool, client::Error> {
    let kind = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    let review: SelfSubjectReview = kubelet.create_as(&SELF_SUBJECT_REVIEWS.all(), &kind)?;
    let user = review.status.user_info.username;
    let node = user.trim_start_matches("system:node:");
    let name = static_pod_name(program, node);
    let pod = admin.find_as(&PODS.in_namespace(NAMESPACE).named(&name))?;
    Ok(pod.is_some_and(|pod| is_ready(&pod, value) && !is_elsewhere(&pod, node)))
}

/// Returns whether a pod is bound to another node.
fn is_elsewhere(pod: &Pod, node: &str) -> bool {
    let bound = &pod.spec.node_name;
    !bound.is_empty() && bound != node
}

fn is_ready(pod: &Pod, value: &str) -> bool {
    pod.is_ready() && pod.metadata.annotation(ANNOTATION) == Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head of a manifest of kubeadm v1.34.
    fn manifest(annotations: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n{annotations}  labels:\n    component: kube-scheduler\n    tier: control-plane\n  \
             name: kube-scheduler\n  namespace: kube-system\nspec:\n  containers:\n  - command:\n    - kube-scheduler\nstatus: {{}}\n"
        )
    }

    const ONE: &str = "2027-11-26T23:00:00Z";
    const TWO: &str = "2028-03-26T23:00:00Z";

    #[test]
    fn a_manifest_gets_the_annotation_and_nothing_else_changes() {
        let kubeadm = "  annotations:\n    kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint: 10.0.0.1:6443\n";
        for annotations in ["", kubeadm] {
            let old = manifest(annotations);
            assert_eq!(annotation(&old), Some(None));
            let new = annotate(&old, ONE).unwrap();
            let mut expected = yaml::document(&old).unwrap();
            expected["metadata"]["annotations"][ANNOTATION] = json!(ONE);
            assert_eq!(yaml::document(&new).unwrap(), expected);
            assert_eq!(annotation(&new).unwrap().as_deref(), Some(ONE));
            assert_eq!(annotate(&new, ONE).unwrap(), new);
            let newer = annotate(&new, TWO).unwrap();
            assert_eq!(newer, annotate(&old, TWO).unwrap());
        }
    }

    #[test]
    fn a_manifest_of_another_form_is_refused() {
        for other in [
            manifest("  annotations: {a: b}\n"),
            manifest("  annotations:\n    firstlight/certificate-ends : x\n"),
            manifest("").replace("metadata:\n", "\"metadata\":\n"),
            "{\"kind\": \"Pod\", \"metadata\": {}}".into(),
            String::new(),
            "kind: [".into(),
        ] {
            assert_eq!(annotate(&other, ONE), None, "{other}");
        }
        assert_eq!(annotation(""), None);
        assert_eq!(annotation("kind: Pod\n"), None);
    }

    #[test]
    fn a_manifest_changes_once_for_a_certificate() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("manifests")).unwrap();
        let path = folder.path().join("manifests/kube-scheduler.yaml");
        fs::write(&path, manifest("")).unwrap();
        let job = Job::new(base::boot::timeline::Timeline::new("test"));
        // without admin.conf, nothing is waited for
        let restart = |ends: &str, is_renewal| {
            let stop = Stop::new();
            restart(
                folder.path(),
                "kube-scheduler",
                ends,
                is_renewal,
                &stop,
                &job,
            )
        };
        let read = || fs::read_to_string(&path).unwrap();
        restart(ONE, false).unwrap();
        assert_eq!(read(), manifest(""), "a pod of kubeadm is left alone");
        let said = restart(ONE, true).unwrap_err();
        assert!(
            matches!(said, Error::NotReady("kube-scheduler", _)),
            "{said}"
        );
        assert_eq!(read(), annotate(&manifest(""), ONE).unwrap());
        restart(ONE, false).unwrap();
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        // a renewal that was interrupted only waits
        restart(ONE, true).unwrap_err();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
        // renewed by hand
        restart(TWO, false).unwrap_err();
        assert_eq!(read(), annotate(&manifest(""), TWO).unwrap());
        let names = fs::read_dir(folder.path().join("manifests")).unwrap();
        assert_eq!(names.count(), 1, "each file there is a pod");
        assert!(matches!(
            super::restart(folder.path(), "none", ONE, true, &Stop::new(), &job),
            Err(Error::Io(..))
        ));
    }

    #[test]
    fn a_pod_is_back_when_the_one_with_the_new_certificate_is_ready() {
        let pod = |ends: &str, ready: &str| {
            let pod = json!({"metadata": {"annotations": {ANNOTATION: ends}}, "status": {"conditions": [
                {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]}});
            serde_json::from_value(pod).unwrap()
        };
        assert!(is_ready(&pod(ONE, "True"), ONE));
        assert!(!is_ready(&pod(ONE, "False"), ONE));
        assert!(!is_ready(&pod(TWO, "True"), ONE));
        assert!(!is_ready(&Pod::default(), ONE));
    }
}
