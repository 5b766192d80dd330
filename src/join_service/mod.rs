//! The join service of a control plane: lets machines in that prove what they run.
//!
//! Attested TLS ([`crate::atls`]) does the proving: a caller's certificate carries an attestation document that meets the
//! [`policy`] in force, or there is no connection. What a caller may have then:
//!
//! - `/join.API/IssueRejoinTicket`: the key of the disk that it names and the measurement secret, for a node that boots
//!   again. Both come from the key service ([`keys`]).
//! - `/join.API/IssueJoinTicket`: not in this version.
//!
//! A caller learns from the code whether to come again: `INVALID_ARGUMENT` and `INTERNAL` are lasting, `UNAVAILABLE` passes.
//! What went wrong inside is for this service's log only.

pub mod keys;
pub mod policy;

use std::sync::Arc;

use crate::crypto::{KEY_LEN, MEASUREMENT_SECRET_ID, Secret};
use crate::grpc::{Call, Code, Router, Status};
use crate::kms::Uuid;
use crate::logger::peer;
use crate::proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest, IssueRejoinTicketResponse,
};
use keys::KeyClient;

/// The gRPC method for nodes that boot again.
pub const ISSUE_REJOIN_TICKET: &str = "/join.API/IssueRejoinTicket";
/// The gRPC method for new nodes.
pub const ISSUE_JOIN_TICKET: &str = "/join.API/IssueJoinTicket";

/// Its methods.
pub fn router(keys: Arc<KeyClient>) -> Router {
    Router::new()
        .unary(ISSUE_REJOIN_TICKET, move |call: &Call, request: IssueRejoinTicketRequest| {
            rejoin_ticket(&keys, call, &request)
        })
        .unary(ISSUE_JOIN_TICKET, |call: &Call, _: IssueJoinTicketRequest| {
            log::warn!("{}: asked for a join ticket", peer(call.peer()));
            Err::<IssueJoinTicketResponse, _>(Status::new(
                Code::Unimplemented,
                "this version of the join service lets known nodes in again, but no new ones",
            ))
        })
}

fn rejoin_ticket(
    keys: &KeyClient,
    call: &Call,
    request: &IssueRejoinTicketRequest,
) -> Result<IssueRejoinTicketResponse, Status> {
    let peer = peer(call.peer());
    let uuid = Uuid::parse(&request.disk_uuid).ok_or_else(|| {
        log::warn!("{peer}: refused a rejoin ticket: the disk's UUID is none: {:.40?}", request.disk_uuid);
        Status::new(Code::InvalidArgument, "disk_uuid: expected a UUID of 8-4-4-4-12 hexadecimal digits")
    })?;
    let key = |id: &str| -> Result<Secret, Status> {
        keys.data_key(id, KEY_LEN, call.deadline()).map_err(|error| refusal(&peer, &uuid, &error))
    };
    let measurement_secret = key(MEASUREMENT_SECRET_ID)?;
    let state_disk_key = key(uuid.as_str())?;
    log::info!("{peer}: rejoin ticket for disk {uuid}");
    Ok(IssueRejoinTicketResponse {
        state_disk_key: state_disk_key.expose().to_vec(),
        measurement_secret: measurement_secret.expose().to_vec(),
    })
}

/// Tells the log what happened and the caller whether to come again.
fn refusal(peer: &str, uuid: &Uuid, error: &keys::Error) -> Status {
    match error {
        keys::Error::Passing(text) => {
            log::warn!("{peer}: no rejoin ticket for disk {uuid} now: {text}");
            Status::new(Code::Unavailable, "keys are not to be had at the moment: try again")
        }
        keys::Error::Lasting(text) => {
            log::error!("{peer}: no rejoin ticket for disk {uuid}: {text}");
            Status::new(Code::Internal, "the join service could not make a ticket: its log says why")
        }
    }
}
