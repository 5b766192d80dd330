//! The steps that init and join share after the node lock: the commit of the disk, the components,
//! kubeadm and its configuration.

use std::env;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::lock::{node_lock::Locking, race::Entrant};
use crate::state::{
    header_lock::HeaderLock,
    peers,
    state_disk::{Handover, NewDisk, mark_begun, mark_complete},
};
use crate::steps::{
    error::{Error, SetupRefused},
    job::{Job, without_tokens},
};
use crate::trust::service_trust::ServiceTrust;
use attest::Issuer;
use base::boot::timeline::Timeline;
use base::crypto::{CLUSTER_ID_LEN, Secret};
use base::machines::Instance;
use base::stop::Stop;
use base::{child_process, file};
use disk::luks::Peers;
use disk::state_disk::NodeState;
use kubernetes::components::{self, InstallSettings, KubernetesComponent, Step};
use kubernetes::kubeadm;
use kubernetes::kubelet_certificate::{self, KubeletCertificate};
use kubernetes::parameters::{self, NodeName};
use kubernetes::wrapping_key;
use ssh::operators::Newest;

/// The directory of the components' programs; in PATH it comes before the image's own directories.
pub const PROGRAMS: &str = "/run/state/bin";
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Bytes of a download between two progress lines.
const TELL_EVERY: u64 = 16 << 20;

/// The parts of the node that a set-up uses.
pub struct NodeParts {
    /// Whether a cloud controller manager will initialize the node.
    pub has_cloud_controller: bool,
    /// The metadata service, which describes this machine.
    pub metadata: Arc<dyn cloud_api::Service>,
    /// Where the state disk is mounted.
    pub root: PathBuf,
    /// The state disk, and its passphrase until the commit.
    pub disk: Handover,
    /// Makes evidence of what this machine runs.
    pub issuer: Arc<dyn Issuer>,
    /// The requirements for the evidence of a join service.
    pub trust: ServiceTrust,
    /// The TPM whose PCR 15 is the node lock.
    pub tpm: tpm::Location,
    /// Limits what components may do.
    pub policy: components::ComponentPolicy,
    /// How components are downloaded.
    pub settings: components::InstallSettings,
    /// How long kubeadm waits for each part of Kubernetes; `None`: as long as kubeadm does by default.
    pub kubeadm_timeout: Option<Duration>,
    /// Prints events on the console.
    pub timeline: Timeline,
    /// The addresses of the join services, as known just before the lock.
    pub peers: OnceLock<Peers>,
}

impl NodeParts {
    /// Takes the node lock for a cluster, as [`Entrant::lock`] does, and reports it on the console.
    /// Asks the metadata service for the addresses of the join services first: after the lock, the
    /// set-up waits for no server until the disk has its permanent key.
    pub fn lock(&self, entrant: &Entrant, cluster: [u8; CLUSTER_ID_LEN]) -> Option<Locking> {
        let what = "the metadata service to name the control planes";
        let ask = || peers::known(&*self.metadata, Peers::default()).peers;
        self.peers
            .get_or_init(|| self.timeline.waiting_for(what, ask));
        let what = format!("{:#} to extend PCR 15", self.tpm);
        let locking = self.timeline.waiting_for(what, || entrant.lock(cluster));
        if let Some(Locking::Taken) = locking {
            self.timeline
                .event("locked", "this node belongs to a cluster from here on");
        }
        locking
    }

    /// Commits the disk: writes the addresses of the join services into its header, marks the
    /// set-up as begun, gives the disk the key that `key_of` derives for its UUID, and binds it to
    /// the cluster of this measurement secret. Returns the UUID.
    pub fn commit_disk(
        &self,
        state: &NodeState,
        measurement_secret: &Secret,
        key_of: impl FnOnce(&str) -> Result<Secret, Error>,
    ) -> Result<String, Error> {
        let failed = |error| Error::Disk("set up the state disk", error);
        let mut disk =
            NewDisk::open(&self.disk).map_err(|error| Error::Disk("open the state disk", error))?;
        let uuid = disk.uuid();
        let key = key_of(&uuid)?;
        let _lock = HeaderLock::take(&self.disk.device).map_err(Error::Header)?;
        let peers = self.peers.get().filter(|peers| !peers.is_empty());
        // the node asks again when it is a member
        if let Some(Err(error)) = peers.map(|peers| disk.name_peers(peers)) {
            log::warn!("cannot write the join services' addresses to the state disk: {error}");
        }
        mark_begun(&self.root).map_err(failed)?;
        disk.commit(&self.root, state, &key, measurement_secret)
            .map_err(failed)?;
        self.timeline
            .event("committed", "the state disk has its permanent key");
        Ok(uuid)
    }

    /// Marks the set-up as complete: from now on the node unlocks and starts by itself after a
    /// reboot.
    pub fn complete(&self) -> Result<(), Error> {
        mark_complete(&self.root)
            .map_err(|error| Error::Disk("finish the set-up of the state disk", error))?;
        self.timeline
            .event("complete", "this node comes back by itself after a reboot");
        Ok(())
    }
}

/// The result of the wait for an init or a join.
pub enum SetupOutcome {
    /// The wait was stopped; nothing has changed.
    None,
    /// The node is a member.
    Done,
    /// The set-up failed after the lock: the node must reboot, which resets it.
    Failed(Arc<Error>),
}

/// Returns this machine as kubeadm's configuration describes it. `kubeadm_timeout` is for a slow
/// machine.
pub fn kubernetes_node(
    has_cloud_controller: bool,
    me: &Instance,
    kubeadm_timeout: Option<Duration>,
) -> Result<kubeadm::NodeSettings, SetupRefused> {
    Ok(kubeadm::NodeSettings {
        name: NodeName::from_machine(&me.name)?,
        ip: me
            .vpc_ip
            .ok_or_else(|| SetupRefused::NoAddress(me.name.clone()))?,
        provider_id: parameters::provider_id(&me.provider_id)?,
        external_cloud_provider: has_cloud_controller,
        kubeadm_timeout,
    })
}

/// Installs the components, and reports the progress of each.
pub fn install_components<T: Clone>(
    components: &[KubernetesComponent],
    settings: &InstallSettings,
    stop: &Stop,
    job: &Job<T>,
) -> Result<(), Error> {
    let mut told = vec![0; components.len()];
    let mut tell = |number: usize, step| {
        let name = components[number].name();
        match step {
            Step::Present => job.line(&format!("{name}: already in place")),
            Step::Installed => job.line(&format!("{name}: installed")),
            Step::Retrying { why, pause } => {
                job.line(&format!(
                    "{name}: {why}; the next try is in {} s",
                    pause.as_secs().max(1)
                ));
            }
            Step::Received { bytes, total } if bytes - told[number] >= TELL_EVERY => {
                told[number] = bytes;
                let of = total
                    .map(|total| format!(" of {}", total >> 20))
                    .unwrap_or_default();
                job.line(&format!("{name}: {}{of} MiB", bytes >> 20));
            }
            Step::Received { .. } => {}
        }
    };
    components::install(components, settings, stop, &mut tell).map_err(Error::Components)
}

/// kubeadm, with the path of its configuration file, which may contain secrets.
pub struct Kubeadm(pub &'static str);

impl Kubeadm {
    /// Writes the configuration, and the other files that kubeadm expects.
    pub fn configure(&self, configuration: &str) -> Result<(), Error> {
        write(
            Path::new(kubeadm::AUDIT_POLICY_PATH),
            0o644,
            kubeadm::AUDIT_POLICY.as_bytes(),
        )?;
        make_directory(Path::new(kubeadm::PATCHES))?;
        write(Path::new(self.0), 0o600, configuration.as_bytes())
    }

    /// Runs `kubeadm` with these arguments and the configuration, and reports each line that it
    /// prints.
    pub fn run<T: Clone>(
        &self,
        words: &[&str],
        options: &[&str],
        limit: Duration,
        stop: &Stop,
        job: &Job<T>,
    ) -> Result<(), Error> {
        run(self.command(words).args(options), limit, stop, job)
    }

    /// Runs `kubeadm` like [`Kubeadm::run`], but returns its standard output, which may be secret.
    pub fn output<T: Clone>(
        &self,
        words: &[&str],
        options: &[&str],
        limit: Duration,
        stop: &Stop,
        job: &Job<T>,
    ) -> Result<Secret, Error> {
        let mut command = self.command(words);
        command.args(options);
        child_process::output(&mut command, limit, stop, &mut |line| job.line(line))
            .map_err(command_failed)
    }

    /// Returns the command `kubeadm` with these arguments and the configuration.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = program("kubeadm");
        command.args(words).args(["--config", self.0]);
        command
    }
}

/// Runs a command, and reports each line that it prints.
pub fn run<T: Clone>(
    command: &mut Command,
    limit: Duration,
    stop: &Stop,
    job: &Job<T>,
) -> Result<(), Error> {
    let mut tell = |line: &str| {
        job.line(line);
        match slow(line) {
            Some(part) if part.contains(" not healthy ") => job.line(
                "if this machine is only slow, the setting kubeadm-timeout=SECONDS lets kubeadm wait longer",
            ),
            Some(part) => job.line(&format!("this machine is slow: {part}")),
            None => {}
        }
    };
    child_process::run(command, Stdio::null(), limit, stop, &mut tell).map_err(command_failed)
}

/// Returns what took a minute or more, if this line of kubeadm says so: `[control-plane-check]
/// kube-apiserver is healthy after 1m12.5s`, or `is not healthy after 4m0s`.
fn slow(line: &str) -> Option<&str> {
    let (_, part) = line.split_once("-check] ")?;
    let (_, time) = part.split_once("healthy after ")?;
    // Go's text of a duration: 503.2ms, 12.5s, 1m12.5s, 1h0m1s
    let (minutes, _) = time.split_once('m')?;
    let is_slow = !minutes.contains('.') && !time.ends_with("ms");
    is_slow.then_some(part)
}

/// Makes the error of a program whose output may have a bootstrap token.
fn command_failed(mut error: child_process::Error) -> Error {
    for line in &mut error.last_lines {
        *line = without_tokens(line);
    }
    Error::Command(error)
}

/// Returns the command of a program. The program, and programs that it starts, are looked up among
/// the components first.
pub fn program(name: &str) -> Command {
    let path = env::var("PATH").unwrap_or_else(|_| SYSTEM_PATH.into());
    let mut command = Command::new(name);
    command
        .env("PATH", format!("{PROGRAMS}:{path}"))
        .current_dir("/");
    command
}

/// Writes the kubelet's first serving certificate to each path where a kubelet may be configured to
/// read it.
pub fn write_certificate(certificate: &KubeletCertificate) -> Result<(), Error> {
    for (path, key) in kubeadm::KUBELET_CERTIFICATES {
        certificate
            .write(Path::new(path), Path::new(key))
            .map_err(Error::Certificate)?;
    }
    Ok(())
}

/// Gives the kubelet its first client certificate. Without one, it requests one by the token of the ticket; a certificate of an earlier
/// attempt is removed.
pub fn write_client_certificate(certificate: Option<&KubeletCertificate>) -> Result<(), Error> {
    let link = Path::new(kubeadm::KUBELET_CLIENT_CERTIFICATE);
    match certificate {
        Some(certificate) => kubelet_certificate::place_client(link, &certificate.in_one())
            .map_err(Error::Certificate),
        None => file::remove_if_present(link).map_err(|error| Error::Io(link.into(), error)),
    }
}

/// Writes the wrapping key of control planes. Fails if a key of another cluster is there.
pub fn place_wrapping_key(key: &Secret) -> Result<(), Error> {
    let directory = Path::new(wrapping_key::DIRECTORY);
    wrapping_key::place(directory, key).map_err(|error| Error::Io(directory.into(), error))
}

/// Writes the list of the operators who sign policies, for the services of this control plane.
pub fn place_operators(
    list: &str,
    cluster: &[u8; CLUSTER_ID_LEN],
    newest: &Newest,
) -> Result<(), Error> {
    let directory = Path::new(wrapping_key::DIRECTORY);
    ssh::operators::install(directory, list, cluster, newest)
        .map_err(|error| Error::Io(directory.join(ssh::operators::FOLDER), error))
}

fn make_directory(path: &Path) -> Result<(), Error> {
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path);
    made.map_err(|error| Error::Io(path.into(), error))
}

/// Writes a file atomically, and makes its directories.
pub fn write(path: &Path, mode: u32, content: &[u8]) -> Result<(), Error> {
    make_directory(path.parent().unwrap_or(Path::new("/")))?;
    file::replace(path, content, mode).map_err(|error| Error::Io(path.into(), error))
}

#[cfg(test)]
mod tests {
    use super::slow;

    #[test]
    fn a_slow_machine_is_told_what_took_a_minute() {
        for said in [
            "kube-apiserver is healthy after 1m12.5s",
            "The kubelet is not healthy after 4m0.001s",
            "kube-scheduler is healthy after 1h0m3s",
        ] {
            let line = format!("[control-plane-check] {said}");
            assert_eq!(slow(&line), Some(said));
        }
        for line in [
            "[kubelet-check] The kubelet is healthy after 503.2ms",
            "[kubelet-check] The kubelet is healthy after 503ms",
            "[control-plane-check] kube-apiserver is healthy after 59.9s",
            "[control-plane-check] Waiting for healthy control plane components. This can take up to 4m0s",
            "kube-apiserver is healthy after 1m12.5s",
        ] {
            assert_eq!(slow(line), None, "{line}");
        }
    }
}
