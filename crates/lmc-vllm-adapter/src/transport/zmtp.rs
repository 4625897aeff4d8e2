//! ZMTP 3.1 with the NULL mechanism, as a decoder and encoder without IO.
//!
//! Source: <https://rfc.zeromq.org/spec/37/>. Every length is checked against [`Limits`] before its
//! bytes are stored, and memory grows with the bytes that arrived, not with announced lengths.

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;

/// Size in bytes of the greeting that each side sends first.
pub(crate) const GREETING_LEN: usize = 64;
const SIGNATURE_FIRST: u8 = 0xff;
const SIGNATURE_LAST: u8 = 0x7f;
const MECHANISM: &[u8] = b"NULL";
const FLAG_MORE: u8 = 1;
const FLAG_LONG: u8 = 2;
const FLAG_COMMAND: u8 = 4;
/// Most bytes of a command; real ones contain only names and small properties.
const MAX_COMMAND: usize = 4096;

/// Size limits of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of one message, all frames together.
    pub message_bytes: usize,
    /// Most frames of one message.
    pub frames: usize,
}

impl Default for Limits {
    /// Returns 32 MiB and 16 frames; a prompt of a million tokens takes at most 5 MB.
    fn default() -> Self {
        Self {
            message_bytes: 32 << 20,
            frames: 16,
        }
    }
}

/// Fault in the bytes of a connection. Each fault ends the connection.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ZmtpError {
    /// The first bytes are not a ZMTP signature.
    #[error("peer does not speak zmtp: unexpected byte {0:#04x} in the signature of its greeting")]
    Signature(u8),
    /// The version is older than 3.0.
    #[error("peer speaks zmtp {0}, this server needs 3.0 or later")]
    Version(u8),
    /// The security mechanism is not NULL.
    #[error("peer requests security mechanism {0:?}, this server supports only NULL")]
    Mechanism(String),
    /// A reserved or contradictory frame flag is set.
    #[error(
        "frame flags {0:#04x} are invalid: expected only 1 (more), 2 (long) and 4 (command), \
         and not 1 with 4"
    )]
    Flags(u8),
    /// A command is longer than the limit.
    #[error("command has {0} bytes, the limit is {MAX_COMMAND}")]
    Command(u64),
    /// A command cannot be parsed or is not expected in this phase.
    #[error("malformed or unexpected command: {0}")]
    BadCommand(&'static str),
    /// A message is larger than the limit.
    #[error("message has at least {found} bytes, the limit is {max}")]
    MessageBytes {
        /// Bytes announced so far.
        found: u64,
        /// Most bytes that a message may have.
        max: usize,
    },
    /// A message has more frames than the limit.
    #[error("message has more than {0} frames")]
    Frames(usize),
}

/// Event on a connection, as the [`Decoder`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The handshake is complete; contains the socket type of the other end.
    Ready(Bytes),
    /// A heartbeat; reply with [`encode_pong`] and this context.
    Ping(Bytes),
    /// A complete message, frame by frame.
    Message(Vec<Bytes>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Handshake,
    Traffic,
}

/// Decodes the bytes of one connection into [`Event`]s.
#[derive(Debug)]
pub(crate) struct Decoder {
    limits: Limits,
    phase: Phase,
    frames: Vec<Bytes>,
    message_bytes: u64,
}

impl Decoder {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            phase: Phase::Greeting,
            frames: Vec::new(),
            message_bytes: 0,
        }
    }

    /// Returns true after the handshake.
    pub(crate) fn is_ready(&self) -> bool {
        self.phase == Phase::Traffic
    }

    /// Returns the bytes of the complete frames of an incomplete message.
    pub(crate) fn message_bytes(&self) -> usize {
        self.frames.iter().map(Bytes::len).sum()
    }

    /// Returns true if a message is incomplete.
    pub(crate) fn in_message(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Decodes the next event, or returns `None` until `input` has more bytes.
    pub(crate) fn next(&mut self, input: &mut BytesMut) -> Result<Option<Event>, ZmtpError> {
        loop {
            if self.phase == Phase::Greeting {
                if !self.greeting(input)? {
                    return Ok(None);
                }
                continue;
            }
            let Some((flags, body)) = self.frame(input)? else {
                return Ok(None);
            };
            if flags & FLAG_COMMAND != 0 {
                match self.command(body)? {
                    Some(event) => return Ok(Some(event)),
                    None => continue,
                }
            }
            if self.phase != Phase::Traffic {
                return Err(ZmtpError::BadCommand("a message came before READY"));
            }
            self.frames.push(body);
            if flags & FLAG_MORE == 0 {
                self.message_bytes = 0;
                return Ok(Some(Event::Message(std::mem::take(&mut self.frames))));
            }
        }
    }

    /// Returns the bytes that the frame at the front of `input` lacks, if its header is complete.
    /// The result is at most what [`Limits`] allow.
    pub(crate) fn missing(&self, input: &[u8]) -> usize {
        let (header, len) = match (self.phase, input) {
            (Phase::Traffic, [flags, rest @ ..]) if flags & FLAG_LONG != 0 => {
                let Some(len) = rest.first_chunk::<8>() else {
                    return 0;
                };
                (9, u64::from_be_bytes(*len))
            }
            _ => return 0,
        };
        let len = usize::try_from(len)
            .unwrap_or(usize::MAX)
            .min(self.limits.message_bytes);
        (header + len).saturating_sub(input.len())
    }

    fn greeting(&mut self, input: &mut BytesMut) -> Result<bool, ZmtpError> {
        // The signature is checked as soon as it arrives: a browser or a port scanner never sends
        // all 64 bytes.
        match input.first() {
            Some(&SIGNATURE_FIRST) | None => {}
            Some(&other) => return Err(ZmtpError::Signature(other)),
        }
        if let Some(&last) = input.get(9)
            && last != SIGNATURE_LAST
        {
            return Err(ZmtpError::Signature(last));
        }
        if let Some(&major) = input.get(10)
            && major < 3
        {
            return Err(ZmtpError::Version(major));
        }
        if input.len() < GREETING_LEN {
            return Ok(false);
        }
        let greeting = input.split_to(GREETING_LEN);
        let name = greeting[12..32]
            .split(|&byte| byte == 0)
            .next()
            .unwrap_or_default();
        if name != MECHANISM {
            return Err(ZmtpError::Mechanism(
                String::from_utf8_lossy(name).into_owned(),
            ));
        }
        self.phase = Phase::Handshake;
        Ok(true)
    }

    /// Removes one frame from the input if all of it has arrived.
    fn frame(&mut self, input: &mut BytesMut) -> Result<Option<(u8, Bytes)>, ZmtpError> {
        let Some(&flags) = input.first() else {
            return Ok(None);
        };
        if flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) != 0
            || flags & (FLAG_MORE | FLAG_COMMAND) == FLAG_MORE | FLAG_COMMAND
        {
            return Err(ZmtpError::Flags(flags));
        }
        let (header, len) = if flags & FLAG_LONG == 0 {
            let Some(&len) = input.get(1) else {
                return Ok(None);
            };
            (2, u64::from(len))
        } else {
            let Some(len) = input.get(1..9) else {
                return Ok(None);
            };
            (
                9,
                u64::from_be_bytes(len.try_into().expect("the slice has eight bytes")),
            )
        };
        if flags & FLAG_COMMAND != 0 {
            if len > MAX_COMMAND as u64 {
                return Err(ZmtpError::Command(len));
            }
        } else {
            let found = self.message_bytes.saturating_add(len);
            if found > self.limits.message_bytes as u64 {
                return Err(ZmtpError::MessageBytes {
                    found,
                    max: self.limits.message_bytes,
                });
            }
            if self.frames.len() >= self.limits.frames {
                return Err(ZmtpError::Frames(self.limits.frames));
            }
        }
        // Bounded by the limits above, so it fits.
        let len = len as usize;
        if input.len() < header + len {
            return Ok(None);
        }
        if flags & FLAG_COMMAND == 0 {
            self.message_bytes += len as u64;
        }
        input.advance(header);
        Ok(Some((flags, input.split_to(len).freeze())))
    }

    fn command(&mut self, mut body: Bytes) -> Result<Option<Event>, ZmtpError> {
        let name = short_string(&mut body).ok_or(ZmtpError::BadCommand("it has no name"))?;
        match (&name[..], self.phase) {
            (b"READY", Phase::Handshake) => {
                self.phase = Phase::Traffic;
                let mut socket_type = Bytes::new();
                while !body.is_empty() {
                    let (key, value) = property(&mut body)
                        .ok_or(ZmtpError::BadCommand("a READY property is malformed"))?;
                    if key.eq_ignore_ascii_case(b"Socket-Type") {
                        socket_type = value;
                    }
                }
                match &socket_type[..] {
                    b"DEALER" | b"REQ" | b"ROUTER" => Ok(Some(Event::Ready(socket_type))),
                    _ => Err(ZmtpError::BadCommand(
                        "socket type is not DEALER, REQ or ROUTER",
                    )),
                }
            }
            (b"PING", Phase::Traffic) => {
                // Two bytes of time to live, then up to 16 bytes of context for the PONG.
                if body.len() < 2 {
                    return Err(ZmtpError::BadCommand("PING has no time to live"));
                }
                body.advance(2);
                Ok(Some(Event::Ping(body.slice(..body.len().min(16)))))
            }
            (b"ERROR", _) => Err(ZmtpError::BadCommand("peer sent ERROR")),
            (_, Phase::Traffic) => Ok(None),
            _ => Err(ZmtpError::BadCommand("READY must be the first command")),
        }
    }
}

fn short_string(body: &mut Bytes) -> Option<Bytes> {
    let len = usize::from(*body.first()?);
    if body.len() < 1 + len {
        return None;
    }
    body.advance(1);
    Some(body.split_to(len))
}

fn property(body: &mut Bytes) -> Option<(Bytes, Bytes)> {
    let key = short_string(body)?;
    let len = u32::from_be_bytes(body.get(..4)?.try_into().ok()?) as usize;
    if body.len() - 4 < len {
        return None;
    }
    body.advance(4);
    Some((key, body.split_to(len)))
}

/// Returns the greeting that this side sends.
pub(crate) fn greeting() -> [u8; GREETING_LEN] {
    let mut bytes = [0; GREETING_LEN];
    bytes[0] = SIGNATURE_FIRST;
    bytes[9] = SIGNATURE_LAST;
    bytes[10] = 3;
    bytes[11] = 1;
    bytes[12..12 + MECHANISM.len()].copy_from_slice(MECHANISM);
    bytes
}

/// Appends the READY command of a socket of this type.
pub(crate) fn encode_ready(socket_type: &str, out: &mut BytesMut) {
    let mut body = Vec::with_capacity(64);
    body.push(5);
    body.extend_from_slice(b"READY");
    for (key, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        body.push(key.len() as u8);
        body.extend_from_slice(key.as_bytes());
        body.extend_from_slice(&(value.len() as u32).to_be_bytes());
        body.extend_from_slice(value.as_bytes());
    }
    encode_frame(&body, FLAG_COMMAND, out);
}

/// Appends the PONG command, the reply to a heartbeat.
pub(crate) fn encode_pong(context: &[u8], out: &mut BytesMut) {
    let mut body = Vec::with_capacity(5 + context.len());
    body.push(4);
    body.extend_from_slice(b"PONG");
    body.extend_from_slice(context);
    encode_frame(&body, FLAG_COMMAND, out);
}

/// Appends one message.
pub(crate) fn encode_message<F: AsRef<[u8]>>(frames: &[F], out: &mut BytesMut) {
    for (index, frame) in frames.iter().enumerate() {
        let more = if index + 1 < frames.len() {
            FLAG_MORE
        } else {
            0
        };
        encode_frame(frame.as_ref(), more, out);
    }
}

fn encode_frame(body: &[u8], flags: u8, out: &mut BytesMut) {
    if let Ok(len) = u8::try_from(body.len()) {
        out.extend_from_slice(&[flags, len]);
    } else {
        out.extend_from_slice(&[flags | FLAG_LONG]);
        out.extend_from_slice(&(body.len() as u64).to_be_bytes());
    }
    out.extend_from_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn opened(limits: Limits) -> (Decoder, BytesMut) {
        let mut decoder = Decoder::new(limits);
        let mut input = BytesMut::new();
        input.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut input);
        let ready = decoder.next(&mut input);
        assert_eq!(ready, Ok(Some(Event::Ready(Bytes::from_static(b"DEALER")))));
        (decoder, input)
    }

    #[test]
    fn a_message_survives_any_cut_of_its_bytes() {
        let message = vec![vec![1u8; 3], Vec::new(), vec![7u8; 70_000]];
        let mut stream = BytesMut::new();
        stream.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut stream);
        encode_message(&message, &mut stream);
        for cut in [1, 2, 9, 10, 11, 63, 64, 65, 100, 120, 200, stream.len() - 1] {
            let mut decoder = Decoder::new(Limits::default());
            let mut input = BytesMut::from(&stream[..cut]);
            let mut events = Vec::new();
            while let Some(event) = decoder.next(&mut input).expect("valid prefix") {
                events.push(event);
            }
            input.extend_from_slice(&stream[cut..]);
            while let Some(event) = decoder.next(&mut input).expect("valid rest") {
                events.push(event);
            }
            let Some(Event::Message(frames)) = events.pop() else {
                panic!("no message at {cut}")
            };
            assert_eq!(
                frames,
                message
                    .iter()
                    .map(|f| Bytes::from(f.clone()))
                    .collect::<Vec<_>>()
            );
            assert_eq!(events.len(), 1, "READY alone came before the message");
        }
    }

    #[test]
    fn a_giant_frame_is_refused_from_its_header() {
        let (mut decoder, mut input) = opened(Limits::default());
        input.extend_from_slice(&[FLAG_LONG]);
        input.extend_from_slice(&u64::MAX.to_be_bytes());
        assert!(matches!(
            decoder.next(&mut input),
            Err(ZmtpError::MessageBytes { .. })
        ));
        assert!(input.capacity() < 1 << 20);
    }

    #[test]
    fn a_message_of_endless_small_frames_is_refused() {
        let (mut decoder, mut input) = opened(Limits {
            message_bytes: 1 << 20,
            frames: 4,
        });
        for _ in 0..5 {
            input.extend_from_slice(&[FLAG_MORE, 0]);
        }
        assert_eq!(decoder.next(&mut input), Err(ZmtpError::Frames(4)));
    }

    #[test]
    fn other_protocols_are_recognised_by_their_first_bytes() {
        let check = |bytes: &[u8], expected: ZmtpError| {
            let mut input = BytesMut::from(bytes);
            assert_eq!(
                Decoder::new(Limits::default()).next(&mut input),
                Err(expected)
            );
        };
        check(b"GET / HTTP/1.1\r\n", ZmtpError::Signature(b'G'));
        let mut old = greeting();
        old[10] = 1;
        check(&old, ZmtpError::Version(1));
        let mut plain = greeting();
        plain[12..17].copy_from_slice(b"PLAIN");
        check(&plain, ZmtpError::Mechanism("PLAIN".to_owned()));
    }

    #[test]
    fn a_subscriber_is_refused() {
        let mut input = BytesMut::new();
        input.extend_from_slice(&greeting());
        encode_ready("SUB", &mut input);
        let refused = Decoder::new(Limits::default()).next(&mut input);
        assert!(matches!(refused, Err(ZmtpError::BadCommand(_))));
    }

    #[test]
    fn a_ping_is_answered_with_its_context() {
        let (mut decoder, mut input) = opened(Limits::default());
        encode_frame(b"\x04PING\x00\x0ahello", FLAG_COMMAND, &mut input);
        assert_eq!(
            decoder.next(&mut input),
            Ok(Some(Event::Ping(Bytes::from_static(b"hello"))))
        );
    }

    proptest! {
        #[test]
        fn no_input_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), open: bool) {
            let limits = Limits { message_bytes: 4096, frames: 4 };
            let (mut decoder, mut input) =
                if open { opened(limits) } else { (Decoder::new(limits), BytesMut::new()) };
            input.extend_from_slice(&bytes);
            while let Ok(Some(_)) = decoder.next(&mut input) {}
        }
    }
}
