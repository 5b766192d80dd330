//! The cluster's CA, and the files and the wrapping key that further control planes need, from the
//! disk of a control plane.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use zeroize::Zeroizing;

use crate::cluster::refusal::TicketRefusal;
use crate::policy_operators::PolicyOperators;
use base::crypto::Secret;
use kubernetes::certificate_request::CertificateRequest;
use kubernetes::certificate_request::kubelet_request::authority_hashes;
use kubernetes::kubelet_certificate::ClusterCa;
use kubernetes::wrapping_key;
use proto::join::ControlPlaneCertOrKey;
use ssh::operators::Newest;

/// The directory of kubeadm's certificates.
pub const DIRECTORY: &str = "/etc/kubernetes/pki";
/// The files that a control plane needs before kubeadm runs. Kubeadm creates the others.
pub const CONTROL_PLANE_FILES: [&str; 8] = [
    "ca.crt",
    "ca.key",
    "etcd/ca.crt",
    "etcd/ca.key",
    "front-proxy-ca.crt",
    "front-proxy-ca.key",
    "sa.key",
    "sa.pub",
];

/// The directories of certificates and of the wrapping key. They are read for each ticket, because an
/// operator may renew the files.
pub struct Pki {
    certificates: PathBuf,
    wrapping_key: PathBuf,
}

/// The cluster's CA.
pub struct Ca {
    /// All certificates that sign for the API server, PEM.
    pub certificates: Vec<u8>,
    /// The pin of the first certificate in kubeadm's format: `sha256:` and the SHA-256 hash of its
    /// SubjectPublicKeyInfo.
    pub pin: String,
    authority: ClusterCa,
}

impl Pki {
    /// Uses these directories: of certificates, and of the wrapping key.
    pub fn new(certificates: &Path, wrapping_key: &Path) -> Pki {
        Pki {
            certificates: certificates.into(),
            wrapping_key: wrapping_key.into(),
        }
    }

    /// Reads the CA certificate and its key.
    pub fn ca(&self) -> Result<Ca, TicketRefusal> {
        let certificates = self.read("ca.crt")?;
        let key = self.read("ca.key")?;
        let broken = |error: &dyn Display| {
            let path = self.certificates.join("ca.crt");
            TicketRefusal::internal("pki", format!("cannot use {}: {error}", path.display()))
        };
        // The new node checks the certificates in the ticket in the same way.
        let hashes = authority_hashes(&certificates).map_err(|error| broken(&error))?;
        Ok(Ca {
            authority: ClusterCa::new(&certificates, &key).map_err(|error| broken(&error))?,
            certificates: certificates.to_vec(),
            pin: hashes.into_iter().next().unwrap_or_default(),
        })
    }

    /// Reads the eight files. Each has its name relative to the directory.
    pub fn control_plane_files(&self) -> Result<Vec<ControlPlaneCertOrKey>, TicketRefusal> {
        let read = |name: &&str| {
            let content = self.read(name)?;
            Ok(ControlPlaneCertOrKey {
                name: (*name).into(),
                data: content.to_vec(),
            })
        };
        CONTROL_PLANE_FILES.iter().map(read).collect()
    }

    /// Reads the wrapping key; `None` in a cluster of an earlier version.
    pub fn wrapping_key(&self) -> Result<Option<Secret>, TicketRefusal> {
        wrapping_key::read(&self.wrapping_key)
            .map_err(|error| TicketRefusal::internal("wrapping-key", error.to_string()))
    }

    /// Reads the list of the operators who sign policies, and the newest policy; `None` if the cluster has no operators.
    pub fn operators(&self) -> Result<Option<(String, Newest)>, TicketRefusal> {
        PolicyOperators::reading(&self.wrapping_key)
            .to_hand_over()
            .map_err(|error| TicketRefusal::internal("operators", error.to_string()))
    }

    fn read(&self, name: &str) -> Result<Zeroizing<Vec<u8>>, TicketRefusal> {
        let path = self.certificates.join(name);
        let read = fs::read(&path).map_err(|error| {
            TicketRefusal::internal("pki", format!("cannot read {}: {error}", path.display()))
        })?;
        if !read.is_empty() {
            Ok(Zeroizing::new(read))
        } else {
            Err(TicketRefusal::internal(
                "pki",
                format!("{}: the file is empty", path.display()),
            ))
        }
    }
}

impl Ca {
    /// Issues a kubelet's serving certificate, PEM.
    pub fn certify(&self, request: &CertificateRequest) -> Result<Vec<u8>, TicketRefusal> {
        let CertificateRequest {
            node,
            addresses,
            public_key,
            ..
        } = request;
        let issued = self
            .authority
            .certify(public_key, node, &[], addresses, SystemTime::now());
        issued
            .map(String::into_bytes)
            .map_err(|error| TicketRefusal::internal("pki", error.to_string()))
    }

    /// Issues a kubelet's first client certificate, PEM.
    pub fn certify_client(&self, request: &CertificateRequest) -> Result<Vec<u8>, TicketRefusal> {
        let issued =
            self.authority
                .certify_client(&request.public_key, &request.node, SystemTime::now());
        issued
            .map(String::into_bytes)
            .map_err(|error| TicketRefusal::internal("pki", error.to_string()))
    }
}
