//! A blocking client of the protocol over one connection, for load generators and tests.
//!
//! It uses no async runtime, so a thread that calls it measures the server only.

use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;

use crate::protocol::{Operation, Reply, Request, ValueError, decode_reply, encode_request};
use crate::transport::{
    Decoder, Event, Limits, ZmtpError, encode_message, encode_ready, greeting, receive_with,
};

const READ_CHUNK: usize = 16 << 10;

/// Why a call of a [`Client`] has no usable reply.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Connecting, reading or writing failed.
    #[error("connection to the server failed: {0}")]
    Io(#[source] Arc<io::Error>),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server did not reply within the client's timeout.
    #[error("no reply within {0:?}")]
    Timeout(Duration),
    /// The server broke the ZMTP protocol.
    #[error("unexpected bytes from the server: {0}")]
    Zmtp(#[from] ZmtpError),
    /// The reply cannot be decoded.
    #[error("malformed reply to {operation}: {error}")]
    Reply {
        /// Operation of the request.
        operation: Operation,
        /// Fault in the reply's value.
        error: ValueError,
    },
    /// The server refused the request.
    #[error("server refused {operation}: {text}")]
    Refused {
        /// Operation of the request.
        operation: Operation,
        /// Reason that the server gave.
        text: String,
    },
    /// The reply has a type that the operation does not reply with.
    #[error("unexpected reply to {operation}: {reply:?}")]
    Unexpected {
        /// Operation of the request.
        operation: Operation,
        /// The reply that arrived.
        reply: Box<Reply>,
    },
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// A connection to a server that sends requests and waits for replies.
#[derive(Debug)]
pub struct Client {
    stream: Socket,
    descriptor: Option<OwnedFd>,
    decoder: Decoder,
    input: BytesMut,
    output: BytesMut,
    next_uid: u64,
    timeout: Duration,
}

impl Client {
    /// Connects and completes the ZMTP handshake. `timeout` limits the handshake and each later
    /// call.
    ///
    /// # Errors
    /// [`ClientError`] when no server listens at the address or it is not a ROUTER socket.
    pub fn connect(address: impl ToSocketAddrs, timeout: Duration) -> Result<Self, ClientError> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Self::over(stream.into(), timeout)
    }

    /// Connects to a server's Unix socket, as [`Self::connect`].
    ///
    /// # Errors
    /// [`ClientError`] when no server listens at the path or it is not a ROUTER socket.
    pub fn connect_unix(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.cloexec(), None)?;
        // A server that is stopped lets connections queue up, and then connecting waits.
        socket.set_write_timeout(Some(timeout))?;
        socket
            .connect(&SockAddr::unix(path)?)
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => ClientError::Timeout(timeout),
                _ => error.into(),
            })?;
        Self::over(socket, timeout)
    }

    fn over(stream: Socket, timeout: Duration) -> Result<Self, ClientError> {
        let mut output = BytesMut::with_capacity(READ_CHUNK);
        output.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut output);
        let limits = Limits {
            message_bytes: 1 << 30,
            frames: 64,
        };
        let mut client = Self {
            stream,
            descriptor: None,
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

    /// Sends a request and waits for its reply. A refusal is returned as [`Reply::Error`].
    ///
    /// # Errors
    /// [`ClientError`] when no reply arrives or it cannot be decoded.
    pub fn call(&mut self, request: &Request) -> Result<Reply, ClientError> {
        let frames = self.send(request)?;
        self.receive(frames, request.operation())
    }

    /// Sends a request and waits for its reply, as [`Self::call`], but returns a refusal as an
    /// error.
    ///
    /// # Errors
    /// [`ClientError`] when no reply arrives, it cannot be decoded, or it is a refusal.
    pub fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        match self.call(request)? {
            Reply::Error(text) => Err(ClientError::Refused {
                operation: request.operation(),
                text,
            }),
            reply => Ok(reply),
        }
    }

    /// Takes the last descriptor that came with a reply, such as the pool's after
    /// [`Operation::PoolDescriptor`].
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }

    /// Sends a request and returns its number, for [`Self::receive`].
    ///
    /// # Errors
    /// [`ClientError::Io`] when the bytes cannot be written.
    pub fn send(&mut self, request: &Request) -> Result<u64, ClientError> {
        let uid = self.next_uid;
        self.next_uid += 1;
        self.send_frames(&encode_request(uid, request))?;
        Ok(uid)
    }

    /// Sends frames unchanged, well-formed or not.
    ///
    /// # Errors
    /// [`ClientError::Io`] when the bytes cannot be written.
    pub fn send_frames(&mut self, frames: &[Bytes]) -> Result<(), ClientError> {
        encode_message(frames, &mut self.output);
        self.flush()
    }

    /// Sends bytes from [`encode_request_frames`], so that a load generator encodes a long prompt
    /// once and sends it many times.
    ///
    /// # Errors
    /// [`ClientError::Io`] when the bytes cannot be written.
    pub fn send_encoded(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        self.stream.set_write_timeout(Some(self.timeout))?;
        self.stream.write_all(bytes)?;
        Ok(())
    }

    /// Waits for the reply to request `uid` and discards replies to other requests.
    ///
    /// # Errors
    /// [`ClientError`] when no reply arrives or it cannot be decoded.
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

    /// Waits for the next message and returns its frames undecoded.
    ///
    /// # Errors
    /// [`ClientError`] when no message arrives.
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

    /// Reads once and returns the next event, or `None` if it is not complete yet.
    fn event(&mut self, deadline: Instant) -> Result<Option<Event>, ClientError> {
        if let Some(event) = self.decoder.next(&mut self.input)? {
            return Ok(Some(event));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Timeout(self.timeout));
        }
        self.stream.set_read_timeout(Some(left))?;
        let (input, descriptor) = (&mut self.input, &mut self.descriptor);
        match receive_with(&self.stream, input, READ_CHUNK, descriptor) {
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

/// Encodes a request as the bytes to send on an open connection.
pub fn encode_request_frames(uid: u64, request: &Request) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    encode_message(&encode_request(uid, request), &mut bytes);
    bytes.to_vec()
}
