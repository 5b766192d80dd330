//! Calls the operator's Helm (version 3.13 or later, or 4), which installs charts and removes them.
//!
//! Helm also installs manifests, as a chart that has only them. So Helm knows which objects belong to an add-on, deletes those that
//! a new version no longer has, and undoes a change that failed.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use base::child_process::{self, ChildFailure};
use base::crypto::Secret;
use base::stop::Stop;
use base::text::{hex, quoted};
use serde_json::Value;

use super::file::{Addon, Content};

/// The label of the releases that this program has made.
const LABEL: &str = "firstlight-addon=true";
/// The oldest version that labels releases.
const OLDEST: (u32, u32) = (3, 13);
/// What an error is about that concerns no single add-on.
const ALL: &str = "the add-ons of earlier lists";
/// Time limit of a call that changes nothing.
const ASK: Duration = Duration::from_secs(60);
/// Time limit to undo a change that failed.
const UNDO: Duration = Duration::from_secs(300);
/// The chart of an add-on that consists of manifests.
const CHART: &str = r#"{"apiVersion": "v2", "name": "manifests", "version": "0.0.0"}"#;
/// Its template: it returns the manifests unchanged, even if they contain the braces of templates.
const TEMPLATE: &str = r#"{{ .Files.Get "manifests.yaml" }}"#;

/// Helm, and the folder with the verified charts.
pub struct Helm {
    folder: PathBuf,
    kubeconfig: OsString,
    stop: Stop,
}

/// A release of an add-on in the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelmRelease {
    /// Its revision, from 1.
    pub revision: u64,
    /// Its status, such as `deployed`, `failed` or `pending-upgrade`.
    pub status: String,
    /// Its description, in which this program keeps the add-on's digest.
    pub description: String,
}

/// Why a call of Helm failed.
#[derive(Debug)]
pub enum Error {
    /// Helm is not on PATH, or does not start.
    Missing(io::Error),
    /// A chart cannot be written to a folder for Helm.
    Folder(PathBuf, io::Error),
    /// Helm refused what it was asked for: about which add-on, and its error.
    Refused(String, child_process::Error),
    /// Helm's answer cannot be read: about which add-on, and why.
    Answer(String, String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Missing(error) => write!(
                f,
                "cannot use helm, which installs add-ons: {error}; install Helm 3.13 or later, so that it is on PATH"
            ),
            Error::Folder(path, error) => write!(f, "cannot write {}: {error}", path.display()),
            Error::Refused(about, error) => write!(f, "{about}: {error}"),
            Error::Answer(about, why) => {
                write!(f, "{about}: cannot read the answer of helm: {why}")
            }
        }
    }
}

impl std::error::Error for Error {}

impl Helm {
    /// Checks that Helm starts, and makes a private folder for charts. `kubeconfigs` name the cluster.
    pub fn find(kubeconfigs: &[PathBuf]) -> Result<Helm, Error> {
        let folder = std::env::temp_dir().join(format!(
            "firstlight-addons-{}",
            hex(Secret::random(8).expose())
        ));
        let kubeconfig = std::env::join_paths(kubeconfigs).map_err(|error| {
            Error::Missing(io::Error::other(format!(
                "the path of a kubeconfig: {error}"
            )))
        })?;
        let helm = Helm {
            folder,
            kubeconfig,
            stop: Stop::new(),
        };
        let answer = child_process::output(
            command().args(["version", "--template", "{{.Version}}"]),
            ASK,
            &helm.stop,
            &mut |_| {},
        );
        let answer = answer.map_err(|error| match error.cause {
            ChildFailure::Start(error) => Error::Missing(error),
            _ => Error::Missing(io::Error::other(error.to_string())),
        })?;
        let answer = String::from_utf8_lossy(answer.expose());
        if version(&answer).is_none_or(|version| version < OLDEST) {
            return Err(Error::Missing(io::Error::other(format!(
                "it is {}",
                quoted(&*answer, 40)
            ))));
        }
        let made = DirBuilder::new().mode(0o700).create(&helm.folder);
        made.map_err(|error| Error::Folder(helm.folder.clone(), error))?;
        Ok(helm)
    }

    /// Asks Helm whether it can render an add-on. Helm asks no cluster; this program passes the version of Kubernetes, which a
    /// chart may read.
    pub fn check(&self, addon: &Addon, kubernetes_version: &str) -> Result<(), Error> {
        let chart = self.write(addon)?;
        let mut command = command();
        command
            .args([
                "template",
                "--kube-version",
                kubernetes_version,
                &addon.name,
            ])
            .arg(chart);
        self.run_with_values(addon, &mut command, ASK)
    }

    /// Returns an add-on's release, or `None` if the cluster has none.
    pub fn release(&self, addon: &Addon) -> Result<Option<HelmRelease>, Error> {
        // unlike `helm status`, it does not print the manifests, which can be large
        let mut command = command();
        command.args(["history", &addon.name, "--max", "1", "--output", "json"]);
        let answer = match self.ask(addon, &mut command) {
            Err(Error::Refused(_, error)) if says(&error, "release: not found") => return Ok(None),
            answer => answer?,
        };
        let answer: Value = serde_json::from_slice(answer.expose())
            .map_err(|error| Error::Answer(about(addon), error.to_string()))?;
        let text = |field: &str| answer[0][field].as_str().unwrap_or_default().to_owned();
        match answer[0]["revision"].as_u64() {
            Some(_) if text("status") == "uninstalled" => Ok(None),
            Some(revision) => Ok(Some(HelmRelease {
                revision,
                status: text("status"),
                description: text("description"),
            })),
            None => Err(Error::Answer(about(addon), "it has no revision".into())),
        }
    }

    /// Installs an add-on, or upgrades it. Returns when the API server has accepted its objects.
    pub fn install(&self, addon: &Addon, limit: Duration) -> Result<(), Error> {
        let mut command = command();
        command
            .args(["upgrade", &addon.name])
            .arg(self.chart(addon));
        command.args([
            "--install",
            "--create-namespace",
            "--reset-values",
            "--labels",
            LABEL,
        ]);
        command.args(["--description", &addon.digest]);
        command.arg(format!("--timeout={}s", limit.as_secs().max(1)));
        self.run_with_values(addon, &mut command, limit + ASK)
    }

    /// Undoes a call of [`Helm::install`]: restores the previous revision of the release, or removes a new release.
    pub fn undo(&self, addon: &Addon, before: Option<&HelmRelease>) -> Result<(), Error> {
        let mut command = command();
        match before {
            Some(before) => command.args(["rollback", &addon.name, &before.revision.to_string()]),
            None => command.args(["uninstall", &addon.name, "--ignore-not-found"]),
        };
        command.arg(format!("--timeout={}s", UNDO.as_secs()));
        self.settle(addon, &mut command);
        child_process::run(
            &mut command,
            Stdio::null(),
            UNDO + ASK,
            &self.stop,
            &mut |_| {},
        )
        .map_err(|error| Error::Refused(about(addon), error))
    }

    /// Returns the releases that this program has made, by name and namespace.
    pub fn releases(&self) -> Result<Vec<(String, String)>, Error> {
        let mut command = command();
        command.args([
            "list",
            "--all-namespaces",
            "--selector",
            LABEL,
            "--output",
            "json",
        ]);
        command.env("KUBECONFIG", &self.kubeconfig);
        let answer = child_process::output(&mut command, ASK, &self.stop, &mut |_| {})
            .map_err(|error| Error::Refused(ALL.into(), error))?;
        let answer: Vec<Value> = serde_json::from_slice(answer.expose())
            .map_err(|error| Error::Answer(ALL.into(), error.to_string()))?;
        let text =
            |release: &Value, field: &str| release[field].as_str().unwrap_or_default().to_owned();
        Ok(answer
            .iter()
            .map(|release| (text(release, "name"), text(release, "namespace")))
            .collect())
    }

    /// Returns where Helm finds the chart of an add-on.
    fn chart(&self, addon: &Addon) -> PathBuf {
        let name = match addon.content {
            Content::Archive(_) => format!("{}.tgz", addon.name),
            _ => addon.name.clone(),
        };
        self.folder.join(&addon.namespace).join(name)
    }

    fn write(&self, addon: &Addon) -> Result<PathBuf, Error> {
        let chart = self.chart(addon);
        let written = match &addon.content {
            Content::Archive(bytes) => write_file(&chart, bytes),
            Content::Folder(files) => files
                .iter()
                .try_for_each(|(path, bytes)| write_file(&chart.join(path), bytes)),
            Content::Manifests(bytes) => write_file(&chart.join("Chart.yaml"), CHART.as_bytes())
                .and_then(|()| write_file(&chart.join("manifests.yaml"), bytes))
                .and_then(|()| {
                    write_file(&chart.join("templates/manifests.yaml"), TEMPLATE.as_bytes())
                }),
        };
        written.map_err(|error| Error::Folder(chart.clone(), error))?;
        Ok(chart)
    }

    fn settle(&self, addon: &Addon, command: &mut Command) {
        command
            .args(["--namespace", &addon.namespace])
            .env("KUBECONFIG", &self.kubeconfig);
    }

    fn ask(&self, addon: &Addon, command: &mut Command) -> Result<Secret, Error> {
        self.settle(addon, command);
        child_process::output(command, ASK, &self.stop, &mut |_| {})
            .map_err(|error| Error::Refused(about(addon), error))
    }

    /// Runs a command of Helm with the add-on's values. They may be secret, so they are neither in a file nor among the arguments.
    fn run_with_values(
        &self,
        addon: &Addon,
        command: &mut Command,
        limit: Duration,
    ) -> Result<(), Error> {
        let input = values(&addon.values)
            .map_err(|error| Error::Folder("values in memory".into(), error))?;
        self.settle(addon, command.args(["--values", "-"]));
        child_process::run(command, input.into(), limit, &self.stop, &mut |_| {})
            .map_err(|error| Error::Refused(about(addon), error))
    }
}

impl Drop for Helm {
    fn drop(&mut self) {
        // only this user can read a folder that cannot be removed; the values of charts are not in it
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns a command of Helm without the variables by which it would use another cluster or storage than the kubeconfigs say, or show
/// values in its errors.
fn command() -> Command {
    const FOREIGN: [&str; 11] = [
        "HELM_DEBUG",
        "HELM_DRIVER",
        "HELM_KUBEAPISERVER",
        "HELM_KUBEASGROUPS",
        "HELM_KUBEASUSER",
        "HELM_KUBECAFILE",
        "HELM_KUBECONTEXT",
        "HELM_KUBEINSECURE_SKIP_TLS_VERIFY",
        "HELM_KUBETLS_SERVER_NAME",
        "HELM_KUBETOKEN",
        "HELM_NAMESPACE",
    ];
    let mut command = Command::new("helm");
    for variable in FOREIGN {
        command.env_remove(variable);
    }
    command
}

fn about(addon: &Addon) -> String {
    format!("add-on {}", addon.name)
}

/// Returns major and minor version of an answer such as `v3.18.6`.
fn version(answer: &str) -> Option<(u32, u32)> {
    let mut parts = answer.trim().strip_prefix('v')?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn values(values: &Value) -> io::Result<fs::File> {
    let mut file = sys::block::memory_file(c"values")?;
    file.write_all(values.to_string().as_bytes())?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)
}

/// Returns whether Helm's last lines contain this text. Its exit code is the same for every error.
fn says(error: &child_process::Error, text: &str) -> bool {
    error.last_lines.iter().any(|line| line.contains(text))
}
