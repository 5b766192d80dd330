//! The boot record: this boot's events, which every server of a node sends to any caller, since the
//! host has already read them on the console.

use base::boot::timeline::Timeline;
use proto::node::{TIMELINE, TimelineRequest, TimelineResponse};
use rpc::grpc::{Call, Code, Router, Status};

/// Adds the method that returns the record. `clock` says whether a time service has set the clock, if
/// the program knows.
pub fn serve(router: Router, timeline: Timeline, clock: fn() -> Option<bool>) -> Router {
    router.unary(TIMELINE, move |_: &Call, _: TimelineRequest| {
        let record = timeline.record().map_err(|error| {
            log::warn!("cannot read the record of this boot: {error}");
            Status::new(
                Code::Internal,
                "the node cannot read the record of its boot",
            )
        })?;
        Ok(TimelineResponse {
            record,
            clock_synchronized: clock(),
        })
    })
}
