//! Brings a newer version of the image, which the caller sends, to the slot that does not run.

use std::io::{self, Read};

use proto::operator::{UpdateRequest, UpdateResponse};
use rpc::grpc::{Call, Code, Receiver, Sender, Status};
use verifier::Policy;

use super::OperatorService;
use super::callers::Right;
use crate::members::update::{self, Error, ImageDisk, Offer};

/// Maximum size of a policy in bytes: as a ConfigMap has it.
const MAX_POLICY: usize = 1 << 20;

impl OperatorService {
    pub(super) fn update(
        &self,
        call: &Call,
        requests: &mut Receiver<UpdateRequest>,
        sender: &mut Sender<UpdateResponse>,
    ) -> Result<(), Status> {
        let invalid = |text: &str| Status::new(Code::InvalidArgument, text);
        let first = requests
            .next()
            .ok_or_else(|| invalid("the call ends too early"))??;
        let caller = self
            .callers
            .of_call(call, first.caller.as_ref(), Right::Change)?;
        // a member without Kubernetes has no name
        if self.own_name().is_ok() || !first.node.is_empty() {
            self.check_name(&first.node)?;
        }
        let Ok(_alone) = self.updating.try_lock() else {
            let text = "another call updates this machine just now";
            return Err(Status::new(Code::Aborted, text));
        };
        self.record.add(call, &caller, "update of the image")?;
        let place = ImageDisk::find(&self.machine.files).map_err(status)?;
        let (policy, part) = policy(requests)?;
        let mut content = Content {
            requests,
            part,
            read: 0,
        };
        let offer = Offer {
            list: &first.list,
            signature: &first.signature,
            content: &mut content,
            policy: Some(&policy),
        };
        // the update goes on if the operator no longer reads; it ends if the operator no longer sends
        let mut say = |text: &str| {
            let text = text.to_owned();
            drop(sender.send(&UpdateResponse { text }));
        };
        let timeline = self.machine.timeline;
        match update::run(&place, &self.machine.update_keys, offer, &mut say) {
            Ok(version) => {
                timeline.event("update", format_args!("the next boot tries {version}"));
                Ok(())
            }
            Err(error) => {
                timeline.event("update", format_args!("refused: {error}"));
                Err(status(error))
            }
        }
    }
}

/// Reads the requests with the policy, and the first one with content.
fn policy(requests: &mut Receiver<'_, UpdateRequest>) -> Result<(Policy, Vec<u8>), Status> {
    let invalid = |text: String| Status::new(Code::InvalidArgument, text);
    let mut text = String::new();
    for request in requests {
        let request = request?;
        text.push_str(&request.policy);
        if text.len() > MAX_POLICY {
            return Err(invalid(format!(
                "the policy is longer than {MAX_POLICY} bytes"
            )));
        }
        if !request.content.is_empty() {
            let policy = Policy::from_json(&text);
            let policy = policy.map_err(|error| invalid(format!("the policy: {error}")))?;
            return Ok((policy, request.content));
        }
    }
    Err(invalid("the call ends too early".into()))
}

fn status(error: Error) -> Status {
    Status::new(Code::FailedPrecondition, error.to_string())
}

/// The content of all requests.
struct Content<'a, 'b> {
    requests: &'a mut Receiver<'b, UpdateRequest>,
    part: Vec<u8>,
    read: usize,
}

impl Read for Content<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.read == self.part.len() {
            match self.requests.next() {
                None => return Ok(0),
                Some(request) => self.part = request.map_err(io::Error::other)?.content,
            }
            self.read = 0;
        }
        let count = (&self.part[self.read..]).read(buffer)?;
        self.read += count;
        Ok(count)
    }
}
