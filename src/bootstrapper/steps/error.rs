//! Why this machine does not become a node: [`SetupRefused`] before the node lock, when nothing has
//! changed, and [`Error`] after it, when the set-up has failed and the node starts over.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::lock::node_lock;
use crate::state::{header_lock, state_disk};
use base::child_process;
use kubernetes::parameters::Invalid;
use kubernetes::{client, components, kubelet_certificate};

/// Why this machine cannot become a node of a cluster; `Display` is a sentence.
#[derive(Debug)]
pub enum SetupRefused {
    /// A value of the request or the metadata service is invalid.
    Value(Invalid),
    /// A component is invalid.
    Component(components::Error),
    /// The metadata service has no address of the machine with this name.
    NoAddress(String),
    /// The metadata service does not say the role of the machine with this name.
    NoRole(String),
    /// The kubelet's key cannot be made.
    Kubelet(kubelet_certificate::Error),
    /// The SSH host key cannot be used.
    HostKey(ssh::host::Error),
    /// This node's addresses cannot be listed.
    Addresses(io::Error),
    /// The state disk cannot be used.
    Disk(state_disk::Error),
}

impl fmt::Display for SetupRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupRefused::Value(error) => error.fmt(f),
            SetupRefused::Component(error) => error.fmt(f),
            SetupRefused::NoAddress(name) => write!(
                f,
                "the metadata service does not have the address of this machine ({name}) in the cluster's network yet"
            ),
            SetupRefused::NoRole(name) => write!(
                f,
                "the metadata service does not say whether {name} is a control plane or a worker"
            ),
            SetupRefused::Kubelet(error) => error.fmt(f),
            SetupRefused::HostKey(error) => error.fmt(f),
            SetupRefused::Addresses(error) => write!(f, "this node's addresses: {error}"),
            SetupRefused::Disk(error) => write!(f, "the state disk: {error}"),
        }
    }
}

impl std::error::Error for SetupRefused {}

impl From<Invalid> for SetupRefused {
    fn from(error: Invalid) -> SetupRefused {
        SetupRefused::Value(error)
    }
}

/// The step of the set-up that failed, and why.
#[derive(Debug)]
pub enum Error {
    /// The node lock was not taken.
    Lock(node_lock::Error),
    /// A key cannot be derived.
    Key(base::master_secret::Error),
    /// An action with the state disk failed: its name, and why.
    Disk(&'static str, state_disk::Error),
    /// The lock of the state disk's header was not taken.
    Header(header_lock::Error),
    /// A part of emergency SSH cannot be set up: its name, and why.
    Ssh(&'static str, Box<dyn std::error::Error + Send + Sync>),
    /// A component was not installed.
    Components(components::Error),
    /// A program failed.
    Command(child_process::Error),
    /// The kubelet exited too often; the last lines of its log.
    Kubelet(Vec<String>),
    /// The kubelet's certificate cannot be made or written.
    Certificate(kubelet_certificate::Error),
    /// A call of the Kubernetes API failed.
    Api(client::Error),
    /// A file of the set-up cannot be read or written.
    Io(PathBuf, io::Error),
    /// The thread of the set-up cannot be started.
    Thread(io::Error),
    /// This node is stopping.
    Stopped,
    /// A thread panicked.
    Defect,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Lock(error) => write!(f, "cannot lock the node: {error}"),
            Error::Key(error) => error.fmt(f),
            Error::Disk(action, error) => write!(f, "cannot {action}: {error}"),
            Error::Header(error) => error.fmt(f),
            Error::Ssh(part, error) => write!(f, "{part}: {error}"),
            Error::Components(error) => write!(f, "cannot install the components: {error}"),
            Error::Command(error) => error.fmt(f),
            Error::Kubelet(words) => write!(
                f,
                "the kubelet exits again and again; its last lines:\n{}",
                words.join("\n")
            ),
            Error::Certificate(error) => error.fmt(f),
            Error::Api(error) => write!(f, "after kubeadm init: {error}"),
            Error::Io(path, error) => write!(f, "cannot access {}: {error}", path.display()),
            Error::Thread(error) => write!(f, "cannot start the thread of the set-up: {error}"),
            Error::Stopped => f.write_str("this node was stopped during its set-up"),
            Error::Defect => f.write_str("the bootstrapper has a defect; its log says where"),
        }
    }
}

impl std::error::Error for Error {}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

impl From<base::master_secret::Error> for Error {
    fn from(error: base::master_secret::Error) -> Error {
        Error::Key(error)
    }
}
