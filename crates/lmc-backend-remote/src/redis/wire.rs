//! A connection to one Redis server on which values go straight between the socket and slots.

use std::io;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::Login;
use crate::format::HEADER_LEN;
use crate::store::{GetItem, Got, HeaderBytes, Put, PutItem, PutMode, StoreError, until};

/// Longest line that is believed.
const MAX_LINE: u64 = 1024;
/// Pause before the kernel asks whether a silent connection still lives.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Code of the error of a key that has no string.
pub(super) const WRONG_TYPE: &str = "WRONGTYPE";
/// Bytes that are read at a time where they do not go to a slot.
const BUFFER: usize = 16 << 10;

/// An open stream.
trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for S {}

/// A server's address, by host name and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// A connection whose requests are answered in their order. One on which a request was given up is
/// of no further use.
pub(super) struct Wire {
    stream: BufReader<Box<dyn Stream>>,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}

/// A reply, without the bytes of a bulk string.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Status,
    Number(i64),
    Bulk(u64),
    Null,
    Error(String),
}

/// Outcome of a request that the server answered.
#[derive(Debug)]
pub(super) enum Answered<T> {
    Done(T),
    /// The server of this address has the key now.
    Moved(Address),
    /// The server of this address has the key, whose slot is on its way there: this request alone
    /// goes there.
    Ask(Address),
    /// The server refused the request.
    Refused(StoreError),
    /// The server no longer serves the keys: others have to be found.
    Lost(StoreError),
}

/// Circumstances of a request for a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Milliseconds that a value lives, where it expires.
    pub(super) ttl_ms: Option<u64>,
    /// The key's slot is on its way to the server.
    pub(super) is_asking: bool,
}

impl Wire {
    #[cfg(test)]
    pub(super) fn over(
        stream: impl AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static,
    ) -> Self {
        Self {
            stream: BufReader::with_capacity(BUFFER, Box::new(stream)),
        }
    }

    /// Connects and logs in.
    pub(super) async fn connect(
        address: &Address,
        login: &Login,
        deadline: Instant,
    ) -> Result<Self, StoreError> {
        until(deadline, Self::connect_now(address, login)).await
    }

    async fn connect_now(address: &Address, login: &Login) -> Result<Self, StoreError> {
        let Address { host, port } = address;
        let cannot = |error: io::Error| {
            StoreError::unavailable(format_args!("cannot connect to {host}:{port}: {error}"))
        };
        let stream = TcpStream::connect((host.as_str(), *port)).await;
        let stream = stream.map_err(cannot)?;
        stream.set_nodelay(true).map_err(cannot)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
        let kept = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        kept.map_err(cannot)?;
        let stream: Box<dyn Stream> = match &login.tls {
            None => Box::new(stream),
            Some(tls) => {
                let name = ServerName::try_from(host.clone());
                let name = name.map_err(|error| cannot(io::Error::other(error)))?;
                let connector = TlsConnector::from(tls.clone());
                Box::new(connector.connect(name, stream).await.map_err(cannot)?)
            }
        };
        let mut wire = Self {
            stream: BufReader::with_capacity(BUFFER, stream),
        };
        if let Some(password) = &login.password {
            let user = login.username.as_deref().unwrap_or("default");
            wire.command(&["AUTH", user, password]).await?;
        }
        if login.db != 0 {
            wire.command(&["SELECT", &login.db.to_string()]).await?;
        }
        Ok(wire)
    }

    /// Sends a command of the login that is answered with a status. An error's text is dropped, but
    /// for its code: it may repeat the command, with the password.
    async fn command(&mut self, parts: &[&str]) -> Result<(), StoreError> {
        self.stream.write_all(&encode(parts)).await?;
        self.stream.flush().await?;
        match self.reply().await? {
            Reply::Status => Ok(()),
            Reply::Error(text) => Err(refused(code_of(&text), 0)),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends the request for a value, and for the time that it has left where values expire.
    pub(super) async fn ask(&mut self, name: &str, terms: Terms) -> io::Result<()> {
        let mut request = match terms {
            Terms {
                is_asking: true, ..
            } => encode(&["ASKING"]),
            Terms {
                ttl_ms: Some(_), ..
            } => encode(&["PTTL", name]),
            Terms { ttl_ms: None, .. } => Vec::new(),
        };
        request.extend(encode(&["GET", name]));
        self.stream.write_all(&request).await?;
        self.stream.flush().await
    }

    /// Reads the answer to what came before a request. What is wrong with the key is said again.
    async fn left(&mut self) -> Result<Option<u64>, StoreError> {
        match self.reply().await? {
            Reply::Status | Reply::Error(_) => Ok(None),
            Reply::Number(left) => Ok(u64::try_from(left).ok()),
            other => Err(unexpected(&other)),
        }
    }

    /// Reads the answer to the oldest request. On an error the connection is of no further use, and
    /// the item is whole.
    pub(super) async fn value(
        &mut self,
        item: &mut Option<GetItem>,
        terms: Terms,
    ) -> Result<Answered<Got>, StoreError> {
        let left = match terms.is_asking || terms.ttl_ms.is_some() {
            true => self.left().await?,
            false => None,
        };
        let age = terms
            .ttl_ms
            .zip(left)
            .map(|(ttl, left)| ttl.saturating_sub(left));
        let age = age.map(Duration::from_millis);
        let reply = self.reply().await?;
        let mut take = || {
            item.take()
                .ok_or_else(|| StoreError::unavailable("no item"))
        };
        let len = match reply {
            Reply::Null => return Ok(Answered::Done(Got::Absent(take()?.slot))),
            Reply::Bulk(len) => len,
            // A key of another program instead of a value.
            Reply::Error(text) if code_of(&text) == WRONG_TYPE => {
                let (slot, refusal) = (take()?.slot, crate::format::Refusal::Damaged);
                return Ok(Answered::Done(Got::Refused { refusal, slot }));
            }
            Reply::Error(text) => return Ok(answer_of(&text, 0)),
            other => return Err(unexpected(&other)),
        };
        if len < HEADER_LEN as u64 {
            self.skip(len + 2).await?;
            let (slot, refusal) = (take()?.slot, crate::format::Refusal::Damaged);
            return Ok(Answered::Done(Got::Refused { refusal, slot }));
        }
        let mut header: HeaderBytes = [0; HEADER_LEN];
        self.stream.read_exact(&mut header).await?;
        let held = item.as_mut();
        let held = held.ok_or_else(|| StoreError::unavailable("no item"))?;
        let got = match held.check(&header, len) {
            Ok(header) => {
                self.skip(header.payload_offset - HEADER_LEN as u64).await?;
                self.stream.read_exact(held.slot.bytes_mut()).await?;
                self.skip(len - header.value_len()).await?;
                Ok(header)
            }
            Err(refusal) => {
                self.skip(len - HEADER_LEN as u64).await?;
                Err(refusal)
            }
        };
        let mut end = [0; 2];
        self.stream.read_exact(&mut end).await?;
        if end != *b"\r\n" {
            return Err(StoreError::unavailable("the server's answer has no end"));
        }
        let slot = match item.take() {
            Some(item) => item.slot,
            None => return Err(StoreError::unavailable("no item")),
        };
        Ok(Answered::Done(match got {
            Ok(header) => Got::Value { header, slot, age },
            Err(refusal) => Got::Refused { refusal, slot },
        }))
    }

    /// Sends a value: its header and its slot, without a copy.
    pub(super) async fn send(
        &mut self,
        name: &str,
        item: &PutItem,
        terms: Terms,
    ) -> io::Result<()> {
        if terms.is_asking {
            self.stream.write_all(&encode(&["ASKING"])).await?;
        }
        let (before, after) = encode_set(name, item, terms.ttl_ms);
        let payload = Bytes::from_owner(item.slot.clone());
        let mut value = before.chain(payload).chain(after);
        self.stream.write_all_buf(&mut value).await?;
        self.stream.flush().await
    }

    /// Reads the answer to the oldest value that was sent. On an error the connection is of no further
    /// use.
    pub(super) async fn sent(
        &mut self,
        len: u64,
        terms: Terms,
    ) -> Result<Answered<Result<Put, StoreError>>, StoreError> {
        if terms.is_asking {
            self.left().await?;
        }
        match self.reply().await? {
            Reply::Status => Ok(Answered::Done(Ok(Put::Written))),
            Reply::Null => Ok(Answered::Done(Ok(Put::Present))),
            Reply::Error(text) => Ok(answer_of(&text, len)),
            other => Err(unexpected(&other)),
        }
    }

    async fn skip(&mut self, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let buffered = self.stream.fill_buf().await?.len() as u64;
            if buffered == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let taken = buffered.min(len);
            self.stream.consume(taken as usize);
            len -= taken;
        }
        Ok(())
    }

    async fn reply(&mut self) -> Result<Reply, StoreError> {
        let mut line = Vec::new();
        let mut limited = (&mut self.stream).take(MAX_LINE);
        limited.read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Err(StoreError::unavailable("the server closed the connection"));
        }
        parse(&line).ok_or_else(|| StoreError::unavailable("the server does not speak RESP"))
    }
}

fn parse(line: &[u8]) -> Option<Reply> {
    let (kind, text) = line.strip_suffix(b"\r\n")?.split_first()?;
    let text = str::from_utf8(text).ok()?;
    Some(match kind {
        b'+' => Reply::Status,
        b'-' => Reply::Error(text.to_owned()),
        b':' => Reply::Number(text.parse().ok()?),
        b'$' if text == "-1" => Reply::Null,
        b'$' => Reply::Bulk(text.parse().ok()?),
        b'_' if text.is_empty() => Reply::Null,
        _ => return None,
    })
}

fn encode(parts: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
    for part in parts {
        bytes.extend_from_slice(format!("${}\r\n{part}\r\n", part.len()).as_bytes());
    }
    bytes
}

/// Returns what goes before and after the bytes of a slot.
fn encode_set(name: &str, item: &PutItem, ttl_ms: Option<u64>) -> (Bytes, Bytes) {
    let mut options: Vec<String> = Vec::new();
    if item.mode == PutMode::Create {
        options.push("NX".to_owned());
    }
    if let Some(ttl) = ttl_ms {
        options.extend(["PX".to_owned(), ttl.to_string()]);
    }
    let parts = 3 + options.len();
    let (name_len, value_len) = (name.len(), item.header.value_len());
    let before = format!("*{parts}\r\n$3\r\nSET\r\n${name_len}\r\n{name}\r\n${value_len}\r\n");
    let mut before = before.into_bytes();
    before.extend(item.start());
    let mut after = String::from("\r\n");
    for option in options {
        after.push_str(&format!("${}\r\n{option}\r\n", option.len()));
    }
    (before.into(), after.into())
}

/// Sorts an error of the server. `needed`: bytes of the value that it was given.
fn answer_of<T>(text: &str, needed: u64) -> Answered<T> {
    match code_of(text) {
        // MOVED SLOT HOST:PORT
        "MOVED" => node_of(text).map(Answered::Moved),
        "ASK" => node_of(text).map(Answered::Ask),
        "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" => Some(Answered::Lost(refused(text, needed))),
        _ => None,
    }
    .unwrap_or_else(|| Answered::Refused(refused(text, needed)))
}

/// Returns the server that another one names.
fn node_of(text: &str) -> Option<Address> {
    let (host, port) = text.split(' ').nth(2)?.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']).to_owned();
    let port = port.parse().ok()?;
    (!host.is_empty()).then_some(Address { host, port })
}

/// Returns the code of an error of the server.
fn code_of(text: &str) -> &str {
    text.split(' ').next().unwrap_or_default()
}

/// Returns the error that a server's text means. The text is to be cleaned before it is shown.
pub(super) fn refused(text: &str, needed: u64) -> StoreError {
    let reason = text.to_owned();
    match code_of(text) {
        "OOM" => StoreError::Full { needed },
        "NOAUTH" | "WRONGPASS" | "NOPERM" | "READONLY" | "MISCONF" => StoreError::Denied { reason },
        _ => StoreError::Unavailable { reason },
    }
}

fn unexpected(reply: &Reply) -> StoreError {
    StoreError::unavailable(format_args!(
        "the server gave an unexpected answer: {reply:?}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_parsed_and_all_else_is_refused() {
        for (line, reply) in [
            ("+OK\r\n", Some(Reply::Status)),
            (":-3\r\n", Some(Reply::Number(-3))),
            ("$12\r\n", Some(Reply::Bulk(12))),
            ("$-1\r\n", Some(Reply::Null)),
            ("_\r\n", Some(Reply::Null)),
            ("-ERR no\r\n", Some(Reply::Error("ERR no".to_owned()))),
            ("$-2\r\n", None),
            ("$99999999999999999999\r\n", None),
            ("$1\n", None),
            ("OK\r\n", None),
            ("\r\n", None),
            ("HTTP/1.1 400 Bad Request\r\n", None),
        ] {
            assert_eq!(parse(line.as_bytes()), reply, "{line:?}");
        }
    }

    #[test]
    fn errors_are_sorted_by_their_code() {
        let moved = |text| match answer_of::<()>(text, 0) {
            Answered::Moved(Address { host, port }) => Some((host, port)),
            _ => None,
        };
        assert_eq!(
            moved("MOVED 3999 10.0.0.1:6381"),
            Some(("10.0.0.1".to_owned(), 6381))
        );
        assert_eq!(
            moved("MOVED 3999 [::1]:6381"),
            Some(("::1".to_owned(), 6381))
        );
        assert_eq!(moved("MOVED 3999 :6381"), None);
        assert_eq!(moved("MOVED"), None);
        assert!(matches!(
            answer_of::<()>("ASK 3999 10.0.0.1:6381", 0),
            Answered::Ask(Address { port: 6381, .. })
        ));
        assert!(matches!(
            answer_of::<()>("READONLY You can't write", 0),
            Answered::Lost(StoreError::Denied { .. })
        ));
        assert!(matches!(
            refused("OOM command not allowed", 7),
            StoreError::Full { needed: 7 }
        ));
        assert!(matches!(
            refused("WRONGPASS bad", 0),
            StoreError::Denied { .. }
        ));
        assert!(matches!(
            refused("LOADING", 0),
            StoreError::Unavailable { .. }
        ));
    }
}
