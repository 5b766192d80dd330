//! A request for a join ticket, checked in full before anything is looked up.

use std::net::IpAddr;

use super::refusal::Refusal;
use kms::Uuid;
use kubernetes::certificate_request::CertificateRequest;
use proto::join::IssueJoinTicketRequest;
use ssh::PublicKey;

/// A node has a few interfaces with a few addresses each.
const MAX_PRINCIPALS: usize = 64;
/// RFC 1123 §2.1: the longest host name.
const MAX_PRINCIPAL: usize = 253;

/// What a machine asks for.
pub struct Asked {
    /// Of its state disk.
    pub disk: Uuid,
    /// With its name and addresses.
    pub certificate: CertificateRequest,
    /// Whether it is to become a control plane.
    pub control_plane: bool,
    /// Of its sshd.
    pub host_key: PublicKey,
    /// Under which that is to be known; each of the form that a certificate may have.
    pub principals: Vec<String>,
    /// Whether it finds the API server by the CA itself.
    pub accepts_cluster_ca: bool,
}

impl Asked {
    /// Checks the form of everything.
    pub fn check(request: &IssueJoinTicketRequest) -> Result<Asked, Refusal> {
        let disk = disk(&request.disk_uuid)?;
        let certificate =
            CertificateRequest::parse(&request.certificate_request).map_err(|error| {
                Refusal::invalid(
                    "certificate-request",
                    format!("certificate_request: {error}"),
                )
            })?;
        // the name becomes one of the certificate's, which the cluster's own CA signs
        let name = certificate.node.as_str();
        if name == "localhost" || name == "kubernetes" || name.starts_with("kubernetes.") {
            let message = format!(
                "certificate_request: {name} is a name of the API server: rename the machine"
            );
            return Err(Refusal::invalid("certificate-request", message));
        }
        let host_key = PublicKey::from_blob(&request.host_public_key)
            .map_err(|error| Refusal::invalid("host-key", format!("host_public_key: {error}")))?;
        let principals = request.host_certificate_principals.clone();
        if principals.len() > MAX_PRINCIPALS {
            let message = format!(
                "host_certificate_principals: {}, of at most {MAX_PRINCIPALS}",
                principals.len()
            );
            return Err(Refusal::invalid("principals", message));
        }
        let is_bad = |name: &&String| name.len() > MAX_PRINCIPAL || !ssh::is_principal(name);
        if let Some(bad) = principals.iter().find(is_bad) {
            let message =
                format!("host_certificate_principals: {bad:.40?} is no host name or address");
            return Err(Refusal::invalid("principals", message));
        }
        let (control_plane, accepts_cluster_ca) =
            (request.is_control_plane, request.accepts_cluster_ca);
        Ok(Asked {
            disk,
            certificate,
            control_plane,
            host_key,
            principals,
            accepts_cluster_ca,
        })
    }

    /// The name of the Node object.
    pub fn node(&self) -> &str {
        self.certificate.node.as_str()
    }

    /// Those that its kubelet is to serve under.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.certificate.addresses
    }
}

/// The disk of either request.
pub fn disk(uuid: &str) -> Result<Uuid, Refusal> {
    let message = "disk_uuid: expected a UUID of 8-4-4-4-12 hexadecimal digits";
    Uuid::parse(uuid)
        .ok_or_else(|| Refusal::invalid("disk-uuid", message).because(format!("{uuid:.40?}")))
}
