//! A client that speaks the protocol over one connection, for load generators and tests.
//!
//! It blocks, so a thread that uses it measures the server and not a runtime.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use thiserror::Error;

use crate::protocol::{Operation, Reply, Request, ValueError, decode_reply, encode_request};
use crate::transport::{Decoder, Event, Limits, ZmtpError, encode_message, encode_ready, greeting};

const READ_CHUNK: usize = 16 << 10;

/// A call that has no answer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The connection cannot be opened or broke.
    #[error("connection to the server: {0}")]
    Io(#[from] io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// No answer within the deadline.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The server does not speak ZMTP as expected.
    #[error("server: {0}")]
    Zmtp(#[from] ZmtpError),
    /// An answer that cannot be read.
    #[error("malformed answer to {operation}: {error}")]
    Reply {
        /// What was asked.
        operation: Operation,
        /// What is wrong with the answer.
        error: ValueError,
    },
    /// The server refused the request.
    #[error("server refused {operation}: {text}")]
    Refused {
        /// What was asked.
        operation: Operation,
        /// Why not.
        text: String,
    },
    /// An answer of a kind that the operation does not have.
    #[error("unexpected answer to {operation}: {reply:?}")]
    Unexpected {
        /// What was asked.
        operation: Operation,
        /// What came.
        reply: Box<Reply>,
    },
}

/// One connection to a server.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    decoder: Decoder,
    input: BytesMut,
    output: BytesMut,
    next_uid: u64,
    timeout: Duration,
}

impl Client {
    /// Connects and shakes hands. Each call may take up to `timeout`.
    ///
    /// # Errors
    /// [`ClientError`] when nobody listens there or it is no ROUTER socket.
    pub fn connect(address: impl ToSocketAddrs, timeout: Duration) -> Result<Self, ClientError> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let mut output = BytesMut::with_capacity(READ_CHUNK);
        output.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut output);
        let limits = Limits {
            message_bytes: 1 << 30,
            frames: 64,
        };
        let mut client = Self {
            stream,
            decoder: Decoder::new(limits),
            input: BytesMut::new(),
            output,
            next_uid: 0,
            timeout,
        };
        client.flush()?;
        let deadline = Instant::now() + timeout;
        while !client.decoder.is_ready() {
            client.event(deadline)?;
        }
        Ok(client)
    }

    /// Asks and waits for the answer. A refusal comes back as [`Reply::Error`].
    ///
    /// # Errors
    /// [`ClientError`] when there is no answer or it cannot be read.
    pub fn call(&mut self, request: &Request) -> Result<Reply, ClientError> {
        let frames = self.send(request)?;
        self.receive(frames, request.operation())
    }

    /// As [`Self::call`], with a refusal as an error.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        match self.call(request)? {
            Reply::Error(text) => Err(ClientError::Refused {
                operation: request.operation(),
                text,
            }),
            reply => Ok(reply),
        }
    }

    /// Sends a request and returns its number, for [`Self::receive`].
    ///
    /// # Errors
    /// [`ClientError::Io`].
    pub fn send(&mut self, request: &Request) -> Result<u64, ClientError> {
        let uid = self.next_uid;
        self.next_uid += 1;
        self.send_frames(&encode_request(uid, request))?;
        Ok(uid)
    }

    /// Sends frames as they are, well-formed or not.
    ///
    /// # Errors
    /// [`ClientError::Io`].
    pub fn send_frames(&mut self, frames: &[Bytes]) -> Result<(), ClientError> {
        encode_message(frames, &mut self.output);
        self.flush()
    }

    /// Sends what [`encode_request_frames`] made, so that a load generator encodes a long prompt
    /// once and sends it often.
    ///
    /// # Errors
    /// [`ClientError::Io`].
    pub fn send_encoded(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        self.stream.set_write_timeout(Some(self.timeout))?;
        self.stream.write_all(bytes)?;
        Ok(())
    }

    /// Waits for the answer to request `uid`, passing over answers to others.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn receive(&mut self, uid: u64, operation: Operation) -> Result<Reply, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let expected = encode_request(uid, &Request::Noop).swap_remove(0);
        loop {
            let frames = self.receive_frames_until(deadline)?;
            if frames.first() == Some(&expected) {
                return decode_reply(operation, &frames[1..])
                    .map_err(|error| ClientError::Reply { operation, error });
            }
        }
    }

    /// Waits for the next message, whatever it is.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn receive_frames(&mut self) -> Result<Vec<Bytes>, ClientError> {
        self.receive_frames_until(Instant::now() + self.timeout)
    }

    fn receive_frames_until(&mut self, deadline: Instant) -> Result<Vec<Bytes>, ClientError> {
        loop {
            if let Some(Event::Message(frames)) = self.event(deadline)? {
                return Ok(frames);
            }
        }
    }

    /// The next event, or nothing when bytes came that do not complete one.
    fn event(&mut self, deadline: Instant) -> Result<Option<Event>, ClientError> {
        if let Some(event) = self.decoder.next(&mut self.input)? {
            return Ok(Some(event));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Timeout(self.timeout));
        }
        self.stream.set_read_timeout(Some(left))?;
        let filled = self.input.len();
        self.input.resize(filled + READ_CHUNK, 0);
        let read = self.stream.read(&mut self.input[filled..]);
        self.input
            .truncate(filled + read.as_ref().map_or(0, |&read| read));
        match read {
            Ok(0) => Err(ClientError::Closed),
            Ok(_) => Ok(self.decoder.next(&mut self.input)?),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    Err(ClientError::Timeout(self.timeout))
                }
                io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error.into()),
            },
        }
    }

    fn flush(&mut self) -> Result<(), ClientError> {
        self.stream.set_write_timeout(Some(self.timeout))?;
        self.stream.write_all(&self.output)?;
        self.output.clear();
        Ok(())
    }
}

/// The bytes of a request as they travel on a connection that is open.
pub fn encode_request_frames(uid: u64, request: &Request) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    encode_message(&encode_request(uid, request), &mut bytes);
    bytes.to_vec()
}
