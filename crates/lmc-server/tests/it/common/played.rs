//! An HTTP server that a test plays.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use lmc_testkit::DEADLINE;
use serde_json::Value;

/// A request that the server got, and its connection.
pub(crate) struct Asked {
    pub(crate) line: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) connection: TcpStream,
}

impl Asked {
    pub(crate) fn read(connection: TcpStream) -> Option<Self> {
        let mut reader = BufReader::new(connection.try_clone().expect("a copy"));
        let mut line = || {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            Some(line.trim_end().to_owned())
        };
        let first = line().filter(|line| !line.is_empty())?;
        let mut headers = Vec::new();
        while let Some(line) = line().filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(": ").expect("a header");
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        let mut asked = Self {
            line: first,
            headers,
            body: Vec::new(),
            connection,
        };
        let length = asked.header("content-length").unwrap_or("0").parse();
        asked.body = vec![0; length.expect("a length")];
        reader.read_exact(&mut asked.body).ok()?;
        Some(asked)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| &value[..])
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub(crate) fn answer(mut self, status: u16, body: &str) {
        let length = body.len();
        let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nx-engine: yes");
        let _ = write!(self.connection, "{head}\r\nconnection: close\r\n\r\n{body}");
    }

    /// Begins an answer whose length is not known.
    pub(crate) fn begin(&mut self) {
        self.send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    }

    pub(crate) fn part(&mut self, text: &str) {
        self.send(&format!("{:x}\r\n{text}\r\n", text.len()));
    }

    pub(crate) fn send(&mut self, text: &str) {
        self.connection.write_all(text.as_bytes()).expect("sent");
    }

    /// Returns true if the other side does not close the connection in this time.
    pub(crate) fn stays_open(&mut self, time: Duration) -> bool {
        let timeout = self.connection.set_read_timeout(Some(time));
        timeout.expect("a timeout");
        let end = self.connection.read(&mut [0]);
        end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    /// Waits until the other side has closed the connection.
    pub(crate) fn wait_for_end(mut self) {
        self.connection
            .set_read_timeout(Some(DEADLINE))
            .expect("a timeout");
        let mut rest = [0; 1];
        let end = self.connection.read(&mut rest);
        assert!(
            matches!(end, Ok(0))
                || end.is_err_and(|error| { error.kind() == std::io::ErrorKind::ConnectionReset })
        );
    }
}

/// A server: its requests as they come.
pub(crate) struct HttpServer {
    pub(crate) port: u16,
    pub(crate) requests: Receiver<Asked>,
}

impl HttpServer {
    pub(crate) fn start() -> Self {
        Self::at(0)
    }

    pub(crate) fn at(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (sender, requests) = channel();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let sender: Sender<Asked> = sender.clone();
                thread::spawn(move || Asked::read(connection).map(|asked| sender.send(asked)));
            }
        });
        Self { port, requests }
    }

    pub(crate) fn url(&self) -> String {
        url(self.port)
    }

    pub(crate) fn next(&self) -> Asked {
        self.requests.recv_timeout(DEADLINE).expect("a request")
    }

    pub(crate) fn has_none(&self) -> bool {
        self.requests.try_recv().is_err()
    }
}

/// Returns the address of a server at this port.
pub(crate) fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}
