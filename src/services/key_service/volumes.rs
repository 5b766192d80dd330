//! Which volumes a node may open: those that the cluster has attached to it.
//!
//! A CSI driver asks on the node that mounts the volume. Its token names that node ([`TokenNode`]), and
//! its request names the volume, by the name of the driver and the volume's handle. The cluster
//! decides on which node a volume is: the scheduler and the attach controller write that, and no
//! kubelet can.
//!
//! ```text
//! token ─► node ─► VolumeAttachment of (driver, handle, node), attached ─► PersistentVolume of (driver, handle)
//!                  or, if the driver attaches nothing: a pod of the node ─► its claim ─► PersistentVolume
//! ```
//!
//! The id of the key is computed from driver and handle, so that neither a node nor the host can
//! choose it: the host cannot present one volume as another one, and the key of a state disk has
//! another id. The volumes of Constellation's drivers have the key of their LUKS UUID. The
//! administrator writes it into the PersistentVolume ([`LUKS_UUID`]), because only the volume's
//! header has it, which the host can change.

use std::time::{Duration, Instant};

use ring::digest::{Context, SHA256};

use super::grants::VOLUME_PREFIX;
use super::tokens::TokenNode;
use base::text::hex;
use base::uuid::Uuid;
use kubernetes::client::{
    CSI_DRIVERS, Client, Error, NODES, Object, ObjectKind, PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES, PODS, Selector, VOLUME_ATTACHMENTS,
};
use kubernetes::objects::{
    CsiDriver, NodeObject, ObjectMeta, PersistentVolume, PersistentVolumeClaim, Pod,
    VolumeAttachment,
};
use proto::kms::GetDataKeyRequest;
use rpc::grpc::{Code, Status};

/// The annotation of a PersistentVolume whose volume has the key of its LUKS UUID.
pub const LUKS_UUID: &str = "firstlight/luks-uuid";

/// The timeout of all requests to the API server for one key. Clients wait for 5 s.
const TIME: Duration = Duration::from_secs(3);

/// A volume of a CSI driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CsiVolume<'a> {
    /// The driver's name, such as `pd.csi.storage.gke.io`.
    pub driver: &'a str,
    /// The driver's name of the volume.
    pub handle: &'a str,
}

impl<'a> CsiVolume<'a> {
    /// Returns the volume that a request names.
    pub fn of(request: &'a GetDataKeyRequest) -> Option<CsiVolume<'a>> {
        let (driver, handle) = (&request.csi_driver, &request.volume_handle);
        (!driver.is_empty() && !handle.is_empty()).then_some(CsiVolume { driver, handle })
    }

    /// Returns the id of the volume's key.
    pub fn key_id(&self) -> String {
        // The name of a driver contains no null byte.
        VOLUME_PREFIX.to_owned() + &sha256(&[self.driver, "\0", self.handle])
    }

    /// Returns the name that the attach controller gives to a VolumeAttachment.
    fn attachment(&self, node: &str) -> String {
        "csi-".to_owned() + &sha256(&[self.handle, self.driver, node])
    }

    fn is_of(&self, volume: &PersistentVolume) -> bool {
        let csi = &volume.spec.csi;
        csi.driver == self.driver && csi.volume_handle == self.handle
    }
}

/// Why a volume is not on a node, in words.
struct Elsewhere(String);

/// Reads from the API server on which node a volume is.
pub struct Volumes(Client);

impl Volumes {
    /// Creates a client of the API server. It needs the permissions of the chart.
    pub fn new(client: &Client) -> Volumes {
        Volumes(client.clone())
    }

    /// Refuses a volume that is not on this node. With a `uuid`, the PersistentVolume must name it.
    pub fn refuse_other(
        &self,
        volume: &CsiVolume<'_>,
        node: &TokenNode,
        uuid: Option<&Uuid>,
    ) -> Result<(), Status> {
        let checked = self.find(volume, node, Instant::now() + TIME);
        let found = checked.map_err(|error| {
            log::error!("cannot ask the API server on which node a volume is: {error}");
            Status::new(
                Code::Unavailable,
                "cannot check at the moment whether this volume is on the node of the caller: try again",
            )
        })?;
        let found = found.map_err(|Elsewhere(why)| denied(why))?;
        match uuid {
            Some(uuid) if found.annotation(LUKS_UUID) != Some(uuid.as_str()) => {
                let name = &found.name;
                Err(denied(format!(
                    "the PersistentVolume {name} does not name this LUKS UUID: kubectl annotate pv {name} {LUKS_UUID}={}",
                    uuid.as_str()
                )))
            }
            _ => Ok(()),
        }
    }

    /// Reads an object; it is empty if it does not exist.
    fn read<K: ObjectKind + Default>(
        &self,
        object: &Object,
        deadline: Instant,
    ) -> Result<K, Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        Ok(self.0.within(left).find_as(object)?.unwrap_or_default())
    }

    /// Returns the metadata of the PersistentVolume, or why the volume is not on this node.
    fn find(
        &self,
        volume: &CsiVolume<'_>,
        node: &TokenNode,
        deadline: Instant,
    ) -> Result<Result<ObjectMeta, Elsewhere>, Error> {
        let TokenNode { name, uid } = node;
        let found: NodeObject = self.read(&NODES.named(name), deadline)?;
        if found.metadata.uid != *uid || uid.is_empty() {
            return Ok(Err(Elsewhere(format!(
                "the node {name} of the token was deleted: there is no Node with this name and the UID {uid}"
            ))));
        }
        let at = volume.attachment(name);
        let attachment: VolumeAttachment = self.read(&VOLUME_ATTACHMENTS.named(&at), deadline)?;
        let persistent: PersistentVolume = match &attachment.spec.source.persistent_volume_name {
            Some(persistent) => self.read(&PERSISTENT_VOLUMES.named(persistent), deadline)?,
            None => {
                let driver: CsiDriver = self.read(&CSI_DRIVERS.named(volume.driver), deadline)?;
                if driver.spec.attach_required == Some(false) {
                    return self.mounted(volume, name, deadline);
                }
                PersistentVolume::default()
            }
        };
        let is_attached = attachment.spec.node_name == *name
            && attachment.status.attached
            && !attachment.metadata.is_ending();
        Ok(if is_attached && volume.is_of(&persistent) {
            Ok(persistent.metadata)
        } else {
            Err(Elsewhere(format!(
                "the volume {:?} of {} is not attached to the node {name}: expected the attached VolumeAttachment {at}",
                volume.handle, volume.driver
            )))
        })
    }

    /// Returns the metadata of the PersistentVolume, if a pod of this node uses it.
    fn mounted(
        &self,
        volume: &CsiVolume<'_>,
        node: &str,
        deadline: Instant,
    ) -> Result<Result<ObjectMeta, Elsewhere>, Error> {
        let selector = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
        let pods = self.0.within(TIME).list_keeping(
            &PODS.all(),
            &Selector::fields(&selector),
            |pod: Pod| (pod.metadata, pod.spec.volumes),
        )?;
        for (pod, volumes) in &pods.items {
            // A kubelet writes the mirror pods of its node by itself, without the scheduler.
            if pod.annotation("kubernetes.io/config.mirror").is_some() {
                continue;
            }
            let claims = PERSISTENT_VOLUME_CLAIMS.in_namespace(&pod.namespace);
            for entry in volumes {
                let is_ephemeral = entry.ephemeral.is_some();
                let claim = if is_ephemeral {
                    format!("{}-{}", pod.name, entry.name)
                } else {
                    entry.persistent_volume_claim.claim_name.clone()
                };
                if claim.is_empty() {
                    continue;
                }
                let claim: PersistentVolumeClaim = self.read(&claims.named(&claim), deadline)?;
                let name = &claim.spec.volume_name;
                if name.is_empty() || is_ephemeral && !is_owned_by(&claim.metadata, pod) {
                    continue;
                }
                let persistent: PersistentVolume =
                    self.read(&PERSISTENT_VOLUMES.named(name), deadline)?;
                let is_bound = persistent.spec.claim_ref.uid == claim.metadata.uid;
                if is_bound && volume.is_of(&persistent) {
                    return Ok(Ok(persistent.metadata));
                }
            }
        }
        Ok(Err(Elsewhere(format!(
            "no pod on the node {node} uses the volume {:?} of {}",
            volume.handle, volume.driver
        ))))
    }
}

/// Returns whether a claim was made for an ephemeral volume of this pod, as Kubernetes checks it.
fn is_owned_by(claim: &ObjectMeta, pod: &ObjectMeta) -> bool {
    let mut owners = claim.owner_references.iter();
    !pod.uid.is_empty() && owners.any(|owner| owner.controller && owner.uid == pod.uid)
}

fn denied(why: String) -> Status {
    Status::new(Code::PermissionDenied, why)
}

fn sha256(parts: &[&str]) -> String {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(part.as_bytes());
    }
    hex(context.finish().as_ref())
}
