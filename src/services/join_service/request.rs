//! The validation of a join request. It ends before any other service is asked.

use std::net::IpAddr;

use crate::cluster::refusal::TicketRefusal;
use base::text::quoted;
use base::uuid::Uuid;
use kubernetes::certificate_request::CertificateRequest;
use proto::join::IssueJoinTicketRequest;
use ssh::PublicKey;

/// The maximum number of principals. A node has a few interfaces with a few addresses each.
const MAX_PRINCIPALS: usize = 64;
/// The longest host name (RFC 1123 §2.1).
const MAX_PRINCIPAL: usize = 253;

/// A validated join request.
pub struct JoinRequest {
    /// The UUID of the machine's state disk.
    pub disk: Uuid,
    /// The certificate signing request of the kubelet, with the node's name and addresses.
    pub certificate: CertificateRequest,
    /// Whether the machine joins as a control plane.
    pub control_plane: bool,
    /// The public host key of the machine's sshd; `None` of a machine that runs Constellation before
    /// v2.24.0.
    pub host_key: Option<PublicKey>,
    /// Host names and addresses for the SSH host certificate. Each has a valid form.
    pub principals: Vec<String>,
    /// Whether the machine trusts the API server by the CA certificate in the ticket, and needs no
    /// token discovery.
    pub accepts_cluster_ca: bool,
    /// Whether the first client certificate of its kubelet has the key of `certificate`.
    pub has_client_key: bool,
}

impl JoinRequest {
    /// Validates every field of the request. Only while a cluster moves from Constellation, the SSH
    /// host key may be missing.
    pub fn validate(
        request: &IssueJoinTicketRequest,
        is_migrating: bool,
    ) -> Result<JoinRequest, TicketRefusal> {
        let disk = disk(&request.disk_uuid)?;
        let certificate =
            CertificateRequest::parse(&request.certificate_request).map_err(|error| {
                TicketRefusal::invalid(
                    "certificate-request",
                    format!("certificate_request: {error}"),
                )
            })?;
        // The cluster's own CA signs this name, so it must not be a name of the API server.
        let name = certificate.node.as_str();
        if name == "localhost" || name == "kubernetes" || name.starts_with("kubernetes.") {
            let message = format!(
                "certificate_request: {name} is a name of the API server: rename the machine"
            );
            return Err(TicketRefusal::invalid("certificate-request", message));
        }
        let host_key = host_key(&request.host_public_key, is_migrating)?;
        let principals = request.host_certificate_principals.clone();
        if principals.len() > MAX_PRINCIPALS {
            let message = format!(
                "host_certificate_principals: {} entries, expected at most {MAX_PRINCIPALS}",
                principals.len()
            );
            return Err(TicketRefusal::invalid("principals", message));
        }
        let is_bad = |name: &&String| name.len() > MAX_PRINCIPAL || !ssh::is_principal(name);
        if let Some(bad) = principals.iter().find(is_bad) {
            let message = format!(
                "host_certificate_principals: {} is not a host name or address",
                quoted(bad, 40)
            );
            return Err(TicketRefusal::invalid("principals", message));
        }
        let (control_plane, accepts_cluster_ca) =
            (request.is_control_plane, request.accepts_cluster_ca);
        Ok(JoinRequest {
            disk,
            certificate,
            control_plane,
            host_key,
            principals,
            accepts_cluster_ca,
            has_client_key: request.has_client_key,
        })
    }

    /// Returns the name of the Node object.
    pub fn node(&self) -> &str {
        self.certificate.node.as_str()
    }

    /// Returns the hash of the key of the kubelet's first client certificate; empty if the machine, of an earlier version, has not said which
    /// key that is.
    pub fn client_key(&self) -> String {
        if self.has_client_key {
            self.certificate.key_hash()
        } else {
            String::new()
        }
    }

    /// Returns the addresses of the kubelet's serving certificate.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.certificate.addresses
    }
}

fn host_key(blob: &[u8], is_migrating: bool) -> Result<Option<PublicKey>, TicketRefusal> {
    let refuse = |why: &str| TicketRefusal::invalid("host-key", format!("host_public_key: {why}"));
    match blob {
        [] if is_migrating => Ok(None),
        [] => Err(refuse(
            "it is missing, as in requests of Constellation before v2.24.0, which are served only through the day of --migrate-until",
        )),
        blob => PublicKey::from_blob(blob)
            .map(Some)
            .map_err(|error| refuse(&error.to_string())),
    }
}

/// Parses the disk's UUID of a join or rejoin request.
pub fn disk(uuid: &str) -> Result<Uuid, TicketRefusal> {
    let message = "disk_uuid: expected a UUID of 8-4-4-4-12 hexadecimal digits";
    Uuid::parse(uuid)
        .ok_or_else(|| TicketRefusal::invalid("disk-uuid", message).with_details(quoted(uuid, 40)))
}
