//! `firstlight node update`: sends a release of the image to a node.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use proto::operator::{Caller, UPDATE, UpdateRequest, UpdateResponse};
use rpc::grpc::{CallOptions, Channel, Code, Requests, Status};

use super::session::NodeSession;
use crate::shell::{error::Error, files, output::Output};

/// Bytes of a part of the content or of the policy, which fits the size of a request.
const PART: usize = 16 << 10;
/// The files of a release, as tools/mkosi.sh makes them: the list, and the content in the order of the call.
const LIST: &str = "release.json";
const CONTENT: [&str; 3] = ["firstlight.efi", "root.img", "hashes.img"];

/// A release in a folder.
pub struct ImageRelease {
    list: Vec<u8>,
    signature: String,
    content: [PathBuf; 3],
    /// The policy that the node compares with.
    policy: String,
}

impl ImageRelease {
    /// Reads the small files of the folder, and the file of the policy.
    pub fn read(folder: &Path, policy: &Path) -> Result<ImageRelease, Error> {
        let text = |path: &Path| -> Result<String, Error> {
            let bytes = files::read(path)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let signature = folder.join(format!("{LIST}.sig"));
        if !signature.exists() {
            return Err(Error::blocked(format!(
                "there is no {}: sign the release with ssh-keygen -Y sign -n firstlight-update -f KEY {}",
                signature.display(),
                folder.join(LIST).display()
            )));
        }
        Ok(ImageRelease {
            list: files::read_bytes(&folder.join(LIST))?,
            signature: text(&signature)?,
            content: CONTENT.map(|name| folder.join(name)),
            policy: text(policy)?,
        })
    }

    /// Sends the release to the node of this session, and prints what the node says.
    pub fn send(&self, session: &NodeSession<'_>, node: &str, output: Output) -> Result<(), Error> {
        session.call(|channel, caller, _| self.call(channel, caller, node, output))
    }

    fn call(
        &self,
        channel: &Channel,
        caller: Caller,
        node: &str,
        output: Output,
    ) -> Result<(), Status> {
        let (mut requests, answers) =
            channel.streaming::<UpdateRequest, UpdateResponse>(UPDATE, &CallOptions::default())?;
        let own = |error: io::Error| Status::new(Code::Internal, error.to_string());
        let sent = requests.send(&UpdateRequest {
            caller: Some(caller),
            node: node.to_owned(),
            list: self.list.clone(),
            signature: self.signature.clone(),
            ..UpdateRequest::default()
        });
        // a node that refuses the call says why in its answer
        let sent = match sent {
            Ok(()) => self.send_content(&mut requests).map_err(own)?,
            Err(_) => false,
        };
        if sent {
            requests.finish()?;
        }
        for answer in answers {
            let text = answer?.text;
            let said = output.say(format!("{node}: {text}"));
            said.map_err(|error| Status::new(Code::Internal, error.to_string()))?;
        }
        Ok(())
    }

    /// Returns whether everything was sent: not if the node has ended the call. The error is about a file.
    fn send_content(&self, requests: &mut Requests<UpdateRequest>) -> io::Result<bool> {
        let mut policy = self.policy.as_str();
        while !policy.is_empty() {
            let mut ends = (0..=PART.min(policy.len())).rev();
            let end = ends.find(|it| policy.is_char_boundary(*it));
            let (part, rest) = policy.split_at(end.unwrap_or(policy.len()));
            let part = UpdateRequest {
                policy: part.to_owned(),
                ..UpdateRequest::default()
            };
            if requests.send(&part).is_err() {
                return Ok(false);
            }
            policy = rest;
        }
        let mut part = vec![0; PART];
        for path in &self.content {
            let wrong = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            let mut file = File::open(path).map_err(wrong)?;
            loop {
                let len = file.read(&mut part).map_err(wrong)?;
                if len == 0 {
                    break;
                }
                let request = UpdateRequest {
                    content: part[..len].to_vec(),
                    ..UpdateRequest::default()
                };
                if requests.send(&request).is_err() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}
