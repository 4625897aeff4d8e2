//! A connection to one Redis server. Values are moved directly between the socket and slots; of all other
//! answers, at most the expected length is read.

use std::io;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::Login;
use crate::format::HEADER_LEN;
use crate::store::{GetItem, Got, HeaderBytes, Put, PutItem, PutMode, StoreError, until};

/// Longest line that is accepted.
const MAX_LINE: u64 = 1024;
/// Deepest nesting of arrays: a cluster's slots, a range, its nodes, their metadata.
const MAX_DEPTH: usize = 4;
/// Pause before the kernel checks whether a silent connection is still alive.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Code of the error for a key that is not a string.
pub(super) const WRONG_TYPE: &str = "WRONGTYPE";
/// Bytes that are read or written at a time, except to and from slots.
const BUFFER: usize = 16 << 10;

/// An open stream.
trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for S {}

/// Address of a server: host name and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// A connection whose requests are answered in order. After a request on it was cancelled, the connection is
/// unusable.
pub(super) struct Wire {
    stream: BufStream<Box<dyn Stream>>,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}

/// The first line of a reply: the whole reply, except for strings with a length and arrays.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Status,
    Number(i64),
    Bulk(u64),
    Array(u64),
    Null,
    Error(String),
}

/// A whole reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Status,
    Number(i64),
    Bytes(Bytes),
    Array(Vec<Self>),
    Null,
    Error(String),
}

/// A command, and the limit of its answer.
#[derive(Clone, Debug)]
pub(super) struct Command {
    encoded: Vec<u8>,
    /// Most bytes of memory for the answer, in addition to one line.
    limit: u64,
}

impl Command {
    /// Makes a command that is answered with a line.
    pub(super) fn new<P: AsRef<[u8]>>(parts: impl AsRef<[P]>) -> Self {
        Self {
            encoded: encode(parts.as_ref()),
            limit: 0,
        }
    }

    /// Sets the most bytes of the answer: the bytes of its strings, and [`ELEMENT`] for each element of its
    /// arrays.
    pub(super) fn answered_by(self, limit: usize) -> Self {
        let limit = limit as u64;
        Self { limit, ..self }
    }
}

/// Bytes of memory for each element of an array.
pub(super) const ELEMENT: usize = size_of::<Answer>();

/// Outcome of a request that the server answered.
#[derive(Debug)]
pub(super) enum Answered<T> {
    Done(T),
    /// The server with this address now has the key.
    Moved(Address),
    /// The key's slot is being migrated to the server with this address: only this request goes there.
    Ask(Address),
    /// The server refused the request.
    Refused(StoreError),
    /// The server no longer serves the keys: the servers have to be found again.
    Lost(StoreError),
}

impl<T> Answered<T> {
    /// Converts the result of a completed request.
    pub(super) fn map<U>(self, change: impl FnOnce(T) -> U) -> Answered<U> {
        match self {
            Self::Done(done) => Answered::Done(change(done)),
            Self::Moved(to) => Answered::Moved(to),
            Self::Ask(to) => Answered::Ask(to),
            Self::Refused(error) => Answered::Refused(error),
            Self::Lost(error) => Answered::Lost(error),
        }
    }
}

/// Conditions of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Terms {
    /// Time to live of a value in milliseconds, if it expires.
    pub(super) ttl_ms: Option<u64>,
    /// True if the key's slot is being migrated to the server.
    pub(super) is_asking: bool,
}

impl Answer {
    /// Returns the text, if the answer is an error.
    pub(super) fn error(&self) -> Option<&str> {
        match self {
            Self::Error(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a number that is not negative; some commands answer with numbers as text.
    pub(super) fn number(&self) -> Option<u64> {
        match self {
            Self::Number(number) => u64::try_from(*number).ok(),
            Self::Bytes(_) => self.text()?.parse().ok(),
            _ => None,
        }
    }

    /// Returns the text of a string answer.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Bytes(bytes) => str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// Returns the elements of an array.
    pub(super) fn elements(&self) -> Option<&[Self]> {
        match self {
            Self::Array(elements) => Some(elements),
            _ => None,
        }
    }
}

impl Wire {
    #[cfg(test)]
    pub(super) fn over(
        stream: impl AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static,
    ) -> Self {
        Self {
            stream: BufStream::with_capacity(BUFFER, BUFFER, Box::new(stream)),
        }
    }

    /// Connects and logs in.
    pub(super) async fn connect(
        address: &Address,
        login: &Login,
        deadline: Instant,
    ) -> Result<Self, StoreError> {
        let connected = until(deadline, Self::connect_now(address, login)).await;
        connected.map_err(|error| login.clean(error))
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
            stream: BufStream::with_capacity(BUFFER, BUFFER, stream),
        };
        let mut commands = Vec::new();
        match (&login.username, &login.password) {
            (Some(user), Some(password)) => commands.push(Command::new(["AUTH", user, password])),
            // Redis before version 6 has no users.
            (None, Some(password)) => commands.push(Command::new(["AUTH", password])),
            (_, None) => {}
        }
        if login.db != 0 {
            commands.push(Command::new(["SELECT", &login.db.to_string()]));
        }
        for command in commands {
            let terms = Terms::default();
            let answers = wire.exchange(&[command], terms).await?;
            match answers.as_slice() {
                [Answer::Status] => {}
                // The rest of the text may repeat the command, with the password.
                [Answer::Error(text)] => return Err(refused(code_of(text), 0)),
                _ => {
                    return Err(StoreError::unavailable(
                        "the login has an unexpected answer",
                    ));
                }
            }
        }
        Ok(wire)
    }

    /// Sends commands, and returns their answers.
    async fn exchange(
        &mut self,
        commands: &[Command],
        terms: Terms,
    ) -> Result<Vec<Answer>, StoreError> {
        self.send_commands(commands, terms).await?;
        self.flush().await?;
        self.read_answers(commands, terms).await
    }

    /// Sends commands, and returns their answers. An error among the answers is an error of this call.
    pub(super) async fn ask(
        &mut self,
        commands: &[Command],
        deadline: Instant,
    ) -> Result<Vec<Answer>, StoreError> {
        let answers = until(deadline, self.exchange(commands, Terms::default())).await?;
        match answers.iter().find_map(Answer::error) {
            Some(text) => Err(refused(text, 0)),
            None => Ok(answers),
        }
    }

    /// Sends everything that was written.
    pub(super) async fn flush(&mut self) -> io::Result<()> {
        self.stream.flush().await
    }

    /// Writes commands.
    pub(super) async fn send_commands(
        &mut self,
        commands: &[Command],
        terms: Terms,
    ) -> io::Result<()> {
        for command in commands {
            if terms.is_asking {
                self.stream.write_all(&encode(&["ASKING"])).await?;
            }
            self.stream.write_all(&command.encoded).await?;
        }
        Ok(())
    }

    /// Reads the answers to the oldest commands. After an error the connection is unusable.
    async fn read_answers(
        &mut self,
        commands: &[Command],
        terms: Terms,
    ) -> Result<Vec<Answer>, StoreError> {
        let mut answers = Vec::with_capacity(commands.len());
        for command in commands {
            if terms.is_asking {
                self.left().await?;
            }
            answers.push(self.answer(command.limit).await?);
        }
        Ok(answers)
    }

    /// Reads the answers to the oldest commands, which concern one key. After an error the connection is
    /// unusable.
    pub(super) async fn answers(
        &mut self,
        commands: &[Command],
        terms: Terms,
    ) -> Result<Answered<Vec<Answer>>, StoreError> {
        let answers = self.read_answers(commands, terms).await?;
        let elsewhere = answers.iter().filter_map(Answer::error).find_map(|text| {
            let answered = answer_of(text, 0);
            (!matches!(answered, Answered::Refused(_))).then_some(answered)
        });
        Ok(elsewhere.unwrap_or(Answered::Done(answers)))
    }

    /// Reads an answer of at most `limit` bytes, in addition to a line.
    async fn answer(&mut self, limit: u64) -> Result<Answer, StoreError> {
        let mut free = limit;
        let mut take = move |len: u64| {
            free = free.checked_sub(len).ok_or_else(|| {
                StoreError::unavailable(format_args!(
                    "the server's answer has more than the expected {limit} bytes"
                ))
            })?;
            Ok::<_, StoreError>(())
        };
        // Incomplete arrays, each with the number of its elements.
        let mut open: Vec<(u64, Vec<Answer>)> = Vec::new();
        loop {
            let mut answer = match self.reply().await? {
                Reply::Status => Answer::Status,
                Reply::Number(number) => Answer::Number(number),
                Reply::Null => Answer::Null,
                Reply::Error(text) => {
                    if !open.is_empty() {
                        take(text.len() as u64)?;
                    }
                    Answer::Error(text)
                }
                Reply::Bulk(len) => {
                    take(len)?;
                    let mut bytes = vec![0; len as usize];
                    self.stream.read_exact(&mut bytes).await?;
                    self.end().await?;
                    Answer::Bytes(bytes.into())
                }
                Reply::Array(len) => {
                    take(len.saturating_mul(ELEMENT as u64))?;
                    if open.len() == MAX_DEPTH {
                        return Err(StoreError::unavailable(
                            "the server's answer has arrays that are nested too deeply",
                        ));
                    }
                    open.push((len, Vec::new()));
                    if len > 0 {
                        continue;
                    }
                    open.pop();
                    Answer::Array(Vec::new())
                }
            };
            loop {
                let Some((len, mut elements)) = open.pop() else {
                    return Ok(answer);
                };
                elements.push(answer);
                if (elements.len() as u64) < len {
                    open.push((len, elements));
                    break;
                }
                answer = Answer::Array(elements);
            }
        }
    }

    /// Writes the request for a value, and for its remaining time to live if values expire.
    pub(super) async fn ask_for_value(&mut self, name: &str, terms: Terms) -> io::Result<()> {
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
        self.stream.write_all(&request).await
    }

    /// Reads the answer to the query for the remaining time, which precedes the request. An error about the
    /// key is repeated by the next answer.
    async fn left(&mut self) -> Result<Option<u64>, StoreError> {
        match self.reply().await? {
            Reply::Status | Reply::Error(_) => Ok(None),
            Reply::Number(left) => Ok(u64::try_from(left).ok()),
            other => Err(unexpected(&other)),
        }
    }

    /// Reads the answer to the oldest request. After an error the connection is unusable, and the item is
    /// intact.
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
            // The key belongs to another program and is not a value.
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
        self.end().await?;
        let slot = match item.take() {
            Some(item) => item.slot,
            None => return Err(StoreError::unavailable("no item")),
        };
        Ok(Answered::Done(match got {
            Ok(header) => Got::Value { header, slot, age },
            Err(refusal) => Got::Refused { refusal, slot },
        }))
    }

    /// Writes a value, header and slot, without a copy.
    pub(super) async fn send_value(
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
        self.stream.write_all_buf(&mut value).await
    }

    /// Reads the answer to the oldest value that was sent. After an error the connection is unusable.
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

    /// Reads the end of a string.
    async fn end(&mut self) -> Result<(), StoreError> {
        let mut end = [0; 2];
        self.stream.read_exact(&mut end).await?;
        match end == *b"\r\n" {
            true => Ok(()),
            false => Err(StoreError::unavailable("the server's answer has no end")),
        }
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
        b'*' if text == "-1" => Reply::Null,
        b'*' => Reply::Array(text.parse().ok()?),
        b'_' if text.is_empty() => Reply::Null,
        _ => return None,
    })
}

fn encode<P: AsRef<[u8]>>(parts: &[P]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.as_ref().len() + 16).sum();
    let mut bytes = Vec::with_capacity(len + 16);
    bytes.extend_from_slice(format!("*{}\r\n", parts.len()).as_bytes());
    for part in parts {
        let part = part.as_ref();
        bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// Returns the bytes before and after the bytes of a slot.
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

/// Classifies an error of the server. `needed`: bytes of the value that the server was given.
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

/// Returns the server that a redirection names.
fn node_of(text: &str) -> Option<Address> {
    let (host, port) = text.split(' ').nth(2)?.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']).to_owned();
    let port = port.parse().ok()?;
    (!host.is_empty()).then_some(Address { host, port })
}

/// Returns the code of an error of the server.
pub(super) fn code_of(text: &str) -> &str {
    text.split(' ').next().unwrap_or_default()
}

/// Converts a server's error text. The text has to be cleaned before it is shown.
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

    #[tokio::test]
    async fn answers_are_taken_in_up_to_their_limit() {
        async fn read(bytes: impl Into<Vec<u8>>, limit: usize) -> Option<Answer> {
            let bytes = io::Cursor::new(bytes.into());
            Wire::over(bytes).answer(limit as u64).await.ok()
        }
        let array = |elements| Some(Answer::Array(elements));
        let one = |limit| read("$3\r\nabc\r\n", limit);
        assert_eq!(one(3).await, Some(Answer::Bytes("abc".into())));
        assert_eq!(one(2).await, None);
        assert_eq!(read("$8589934592\r\n", 1 << 20).await, None);
        assert_eq!(read("$3\r\nabcd\r\n", 3).await, None, "no end");
        let two = |limit| read("*2\r\n*0\r\n*1\r\n$-1\r\n", limit);
        let expected = vec![Answer::Array(vec![]), Answer::Array(vec![Answer::Null])];
        assert_eq!(two(3 * ELEMENT).await, array(expected));
        assert_eq!(two(3 * ELEMENT - 1).await, None);
        assert_eq!(read("*9223372036854775807\r\n", usize::MAX).await, None);
        assert_eq!(read("*-1\r\n", 0).await, Some(Answer::Null));
        let nested = |depth| "*1\r\n".repeat(depth) + ":1\r\n";
        assert!(read(nested(MAX_DEPTH), 1 << 20).await.is_some());
        assert_eq!(read(nested(MAX_DEPTH + 1), 1 << 20).await, None);
        let line = "x".repeat(MAX_LINE as usize - 3);
        let error = format!("-{line}\r\n");
        let shown = read(error.clone(), 0).await;
        assert_eq!(shown, Some(Answer::Error(line.clone())));
        assert_eq!(read(format!("-x{line}\r\n"), 0).await, None);
        // Errors in an array take memory as strings do.
        let error = || format!("*1\r\n{error}");
        assert_eq!(read(error(), ELEMENT).await, None);
        assert!(read(error(), ELEMENT + line.len()).await.is_some());
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
