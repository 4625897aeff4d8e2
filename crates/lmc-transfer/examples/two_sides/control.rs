//! Commands of the driver to the server: lines over a TCP connection of their own,
//! one answer for each. Nothing of the channel passes here.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::Failure;

/// One end of the connection.
pub(crate) struct Control {
    reader: BufReader<TcpStream>,
}

impl Control {
    /// Connects to a server that may not be up yet.
    pub(crate) fn connect(address: &str, timeout: Duration) -> Result<Self, Failure> {
        let begun = Instant::now();
        loop {
            let error = match Self::try_connect(address) {
                Ok(control) => return Ok(control),
                Err(error) => error,
            };
            if begun.elapsed() > timeout {
                return Err(format!("no server listens at {address}: {error}").into());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn try_connect(address: &str) -> std::io::Result<Self> {
        let mut last = std::io::Error::other("no such address");
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
                Ok(stream) => return Self::new(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    pub(crate) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        let reader = BufReader::new(stream);
        Ok(Self { reader })
    }

    /// The longest that a line is waited for.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> std::io::Result<()> {
        self.reader.get_ref().set_read_timeout(Some(timeout))
    }

    /// Returns the address of this side.
    pub(crate) fn local(&self) -> std::io::Result<SocketAddr> {
        self.reader.get_ref().local_addr()
    }

    /// Sends a line.
    pub(crate) fn say(&mut self, line: &str) -> std::io::Result<()> {
        let line = format!("{line}\n");
        self.reader.get_mut().write_all(line.as_bytes())
    }

    /// The next line; none when the other side is gone.
    pub(crate) fn hear(&mut self) -> std::io::Result<Option<String>> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line)?;
        Ok((read > 0).then(|| line.trim_end().to_owned()))
    }

    /// The answer to what was said: what stands after `ok`.
    pub(crate) fn answer(&mut self) -> Result<String, Failure> {
        let Some(answer) = self.hear()? else {
            return Err("the server is gone".into());
        };
        let Some(rest) = answer.strip_prefix("ok") else {
            return Err(format!("the server: {answer}").into());
        };
        Ok(rest.trim_start().to_owned())
    }

    /// Says a line and waits for its answer.
    pub(crate) fn ask(&mut self, line: &str) -> Result<String, Failure> {
        self.say(line)?;
        self.answer()
    }
}
