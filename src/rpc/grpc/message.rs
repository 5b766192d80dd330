//! Messages on a stream: the 5-byte prefix and size limits.

use std::collections::VecDeque;
use transport::message::Undecodable;

use prost::Message;

use super::status::{Code, Status};
use base::crypto::buffer::Bytes;

/// Length of the prefix in bytes: Compressed-Flag and Message-Length.
const PREFIX: usize = 5;

/// Encodes a message with its prefix, ready for DATA frames.
pub fn encode<M: Message>(message: &M) -> Result<Bytes, Status> {
    let mut bytes = Bytes::default();
    encode_into(message, &mut bytes).map(|()| bytes)
}

/// Encodes a message with its prefix into `bytes`, whose content it replaces.
pub(super) fn encode_into<M: Message>(message: &M, bytes: &mut Bytes) -> Result<(), Status> {
    let length = message.encoded_len();
    let Ok(announced) = u32::try_from(length) else {
        return Err(Status::new(
            Code::ResourceExhausted,
            format!("a message of {length} bytes is too large for gRPC"),
        ));
    };
    bytes.clear();
    if bytes.0.capacity() < PREFIX + length {
        *bytes = Bytes::with_capacity(PREFIX + length);
    }
    bytes.0.push(0);
    bytes.0.extend_from_slice(&announced.to_be_bytes());
    // The buffer has room for exactly this, and `Vec<u8>` accepts any number of bytes.
    message.encode_raw(&mut bytes.0);
    Ok(())
}

/// Decodes a message that somebody else has sent. `what` names it in the error.
pub fn decode<M: Message + Default>(bytes: &[u8], what: &str) -> Result<M, Status> {
    let status = |why: Undecodable| {
        Status::new(
            Code::Internal,
            format!("the {what} cannot be decoded: {why}"),
        )
    };
    transport::message::decode(bytes).map_err(status)
}

/// Puts messages together from the payloads of DATA frames.
#[derive(Default)]
pub(super) struct Assembler {
    prefix: [u8; PREFIX],
    prefix_length: usize,
    /// Length and received part of the current message, once its prefix is complete.
    partial: Option<(usize, Bytes)>,
    /// Length of the longest message that was received in full. Up to this length, memory is
    /// allocated as announced.
    longest: usize,
    /// Buffer for the next message.
    spare: Bytes,
    /// The first of the complete messages. It is outside of the queue, because most streams have
    /// one message and a queue costs an allocation.
    first: Option<Bytes>,
    more: VecDeque<Bytes>,
}

impl Assembler {
    /// Adds a piece of the stream. Errors if a message is compressed or larger than `limit` bytes;
    /// the caller must then stop. `has_encoding` says whether the peer named a compression
    /// (`grpc-encoding`). We support none, and without the name compression is a violation.
    pub(super) fn feed(
        &mut self,
        mut piece: &[u8],
        limit: usize,
        has_encoding: bool,
    ) -> Result<(), Status> {
        while !piece.is_empty() {
            let Some((length, bytes)) = &mut self.partial else {
                let taken = piece.len().min(PREFIX - self.prefix_length);
                self.prefix[self.prefix_length..self.prefix_length + taken]
                    .copy_from_slice(&piece[..taken]);
                self.prefix_length += taken;
                piece = &piece[taken..];
                if self.prefix_length == PREFIX {
                    self.prefix_length = 0;
                    let length = self.announced(limit, has_encoding)?;
                    // The announced length does not determine the allocation; the buffer doubles as
                    // bytes arrive.
                    self.partial =
                        Some((length, self.room(length.min(self.longest.max(piece.len())))));
                    self.complete_if_whole();
                }
                continue;
            };
            let taken = piece.len().min(*length - bytes.len());
            bytes.extend(&piece[..taken], *length);
            piece = &piece[taken..];
            self.complete_if_whole();
        }
        Ok(())
    }

    fn room(&mut self, least: usize) -> Bytes {
        let spare = std::mem::take(&mut self.spare);
        if spare.0.capacity() >= least {
            spare
        } else {
            Bytes::with_capacity(least)
        }
    }

    /// Takes back the buffer of a message.
    pub(super) fn reuse(&mut self, mut spent: Bytes) {
        spent.clear();
        self.spare = spent;
    }

    fn announced(&self, limit: usize, has_encoding: bool) -> Result<usize, Status> {
        let [flag, length @ ..] = self.prefix;
        let length = u32::from_be_bytes(length) as usize;
        match flag {
            0 if length <= limit => Ok(length),
            0 => Err(Status::new(
                Code::ResourceExhausted,
                format!("a message of {length} bytes is larger than the limit of {limit}"),
            )),
            1 if has_encoding => Err(Status::new(
                Code::Unimplemented,
                "compressed messages are not supported; use the encoding identity",
            )),
            // The flag is set without `grpc-encoding`, which compression.md forbids.
            _ => Err(Status::new(
                Code::Internal,
                format!("the Compressed-Flag {flag} of a message is invalid"),
            )),
        }
    }

    fn complete_if_whole(&mut self) {
        if let Some((length, bytes)) = self
            .partial
            .take_if(|(length, bytes)| bytes.len() == *length)
        {
            self.longest = self.longest.max(length);
            match self.first {
                None => self.first = Some(bytes),
                Some(_) => self.more.push_back(bytes),
            }
        }
    }

    /// Removes and returns the next complete message.
    pub(super) fn pop(&mut self) -> Option<Bytes> {
        std::mem::replace(&mut self.first, self.more.pop_front())
    }

    /// Returns the number of complete messages.
    pub(super) fn waiting(&self) -> usize {
        usize::from(self.first.is_some()) + self.more.len()
    }

    /// Returns whether the stream may end here.
    pub(super) fn is_between_messages(&self) -> bool {
        self.partial.is_none() && self.prefix_length == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;
    use support::random::Random;

    fn framed(messages: &[&[u8]]) -> Vec<u8> {
        let frame =
            |message: &&[u8]| [&[0], &(message.len() as u32).to_be_bytes()[..], message].concat();
        messages.iter().flat_map(frame).collect()
    }

    #[test]
    fn messages_survive_any_cut() {
        let large = vec![7; 100_000];
        let stream = framed(&[b"", b"one", &large, b"", b"two"]);
        for step in [1, 2, 5, 7, 16_384, 1 << 20] {
            let mut assembler = Assembler::default();
            for piece in stream.chunks(step) {
                assembler.feed(piece, 100_000, false).unwrap();
            }
            assert!(assembler.is_between_messages());
            for expected in [&b""[..], b"one", &large, b"", b"two"] {
                assert_eq!(&*assembler.pop().unwrap(), expected);
            }
            assert!(assembler.pop().is_none());
        }
    }

    #[test]
    fn an_announced_length_is_not_allocated() {
        let mut assembler = Assembler::default();
        assembler
            .feed(&[0, 0, 0x40, 0, 0, 1], 4 << 20, false)
            .unwrap();
        assert!(assembler.partial.as_ref().unwrap().1.0.capacity() <= 16);
        assert!(!assembler.is_between_messages());
    }

    #[test]
    fn compressed_and_too_large_messages_are_refused() {
        let code_with = |prefix: &[u8], encoding| {
            Assembler::default()
                .feed(prefix, 10, encoding)
                .unwrap_err()
                .code()
        };
        let code = |prefix: &[u8]| code_with(prefix, false);
        assert_eq!(code(&[0, 0, 0, 0, 11]), Code::ResourceExhausted);
        assert_eq!(code(&[0, 0xff, 0xff, 0xff, 0xff]), Code::ResourceExhausted);
        assert_eq!(code(&[1, 0, 0, 0, 1]), Code::Internal);
        assert_eq!(code_with(&[1, 0, 0, 0, 1], true), Code::Unimplemented);
        assert_eq!(code(&[2, 0, 0, 0, 1]), Code::Internal);
    }

    #[test]
    fn mutated_streams_never_panic_and_stay_within_the_limit() {
        let seed = framed(&[b"", b"one", &[7; 300]]);
        let mut random = Random::new(0x9177);
        for hostile in mutations(&seed, 20_000) {
            let mut assembler = Assembler::default();
            for piece in hostile.chunks(1 + random.below(64)) {
                if assembler.feed(piece, 400, true).is_err() {
                    break;
                }
            }
            while let Some(message) = assembler.pop() {
                assert!(message.len() <= 400);
            }
        }
    }
}
