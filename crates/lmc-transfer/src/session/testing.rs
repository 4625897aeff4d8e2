//! A peer made by hand, for tests: the initiator's half of a handshake, step by step.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use super::noise::{Handshake, Opening, PREAMBLE, Role, opening_len, sealed_len};
use super::{Identity, Key, Message, Opener, Sealer};

pub(crate) use super::noise::{VERSION, preamble};

/// A handshake over a blocking socket.
pub(crate) struct RawSession {
    pub(crate) stream: TcpStream,
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

/// The first message of a handshake.
pub(crate) fn first_message(identity: &Identity, key: Option<&Key>) -> (Handshake, Vec<u8>) {
    let none = Key::none();
    let key = key.unwrap_or(&none);
    let mut noise = Handshake::connect(Role::Initiator, identity, key);
    let bytes = Opening::Connect(noise.write()).encode();
    (noise, bytes)
}

/// A request to join a handshake that does not exist.
pub(crate) fn stray_join() -> Vec<u8> {
    let mut noise = Handshake::join(Role::Initiator, &[1; 32], 1);
    let opening = Opening::Join {
        session: [1; 16],
        stream: 1,
        noise: noise.write(),
    };
    opening.encode()
}

/// A Noise message that is not the first.
pub(crate) fn out_of_order() -> Vec<u8> {
    Opening::Continue(vec![0; 48]).encode()
}

pub(crate) fn read_opening(stream: &mut TcpStream) -> io::Result<Opening> {
    let mut first = [0; PREAMBLE];
    stream.read_exact(&mut first)?;
    let mut bytes = vec![0; opening_len(first).map_err(io::Error::other)?];
    stream.read_exact(&mut bytes)?;
    Opening::decode(&bytes).map_err(io::Error::other)
}

/// The acceptor's half up to its first message.
pub(crate) fn answer(
    stream: &mut TcpStream,
    identity: &Identity,
    key: Option<&Key>,
) -> io::Result<Handshake> {
    let none = Key::none();
    let Opening::Connect(message) = read_opening(stream)? else {
        return Err(io::Error::other("out of order"));
    };
    let mut noise = Handshake::connect(Role::Acceptor, identity, key.unwrap_or(&none));
    noise.read(&message).map_err(io::Error::other)?;
    stream.write_all(&Opening::Continue(noise.write()).encode())?;
    Ok(noise)
}

impl RawSession {
    /// Proves the key and the identity.
    pub(crate) fn prove(
        mut stream: TcpStream,
        identity: &Identity,
        key: Option<&Key>,
    ) -> io::Result<Self> {
        let (mut noise, first) = first_message(identity, key);
        stream.write_all(&first)?;
        let Opening::Continue(message) = read_opening(&mut stream)? else {
            return Err(io::Error::other("refused"));
        };
        noise.read(&message).map_err(io::Error::other)?;
        stream.write_all(&Opening::Continue(noise.write()).encode())?;
        let (sealer, opener, _) = noise.finish().map_err(io::Error::other)?;
        Ok(Self {
            stream,
            sealer,
            opener,
        })
    }

    pub(crate) fn send(&mut self, message: &Message) -> io::Result<()> {
        let plain = postcard::to_extend(message, Vec::new()).expect("serialized");
        let mut bytes = (plain.len() as u32).to_le_bytes().to_vec();
        self.sealer.seal(&plain, &mut bytes);
        self.stream.write_all(&bytes)
    }

    pub(crate) fn recv(&mut self) -> io::Result<Message> {
        let mut len = [0; 4];
        self.stream.read_exact(&mut len)?;
        let mut sealed = vec![0; sealed_len(u32::from_le_bytes(len) as usize)];
        self.stream.read_exact(&mut sealed)?;
        let mut plain = Vec::new();
        let opened = self.opener.open(&sealed, &mut plain);
        opened.map_err(io::Error::other)?;
        postcard::from_bytes(&plain).map_err(io::Error::other)
    }
}
