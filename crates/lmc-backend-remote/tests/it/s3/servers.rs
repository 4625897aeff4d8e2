//! Servers of S3: real ones, and one in between that does harm on the way.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use lmc_testkit::{Folder, Process, free_port, until};

pub(crate) const KEY: &str = "marked-key-id";
pub(crate) const SECRET: &str = "marked-secret-7c1f";
pub(crate) const TOKEN: &str = "marked-token-93ab";
/// Short: `s3s-fs` has a file for each key, whose name is longer than that of bucket and key together,
/// and at most 255 bytes.
pub(crate) const BUCKET: &str = "lmc";

/// Returns the variables by which lmc finds the server at a port.
pub(crate) fn variables(port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
        ("AWS_SESSION_TOKEN", TOKEN.to_owned()),
    ]
}

/// A real server with one bucket.
pub(crate) struct Server {
    kind: Kind,
    pub(crate) port: u16,
    pub(crate) folder: Folder,
    pub(crate) process: Process,
}

#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Files in a folder; signatures are checked.
    Files,
    /// The semantics of AWS, in memory; every signature is good.
    Moto,
}

impl Server {
    pub(crate) fn start(kind: Kind) -> Self {
        let (port, folder) = (free_port(), Folder::temporary());
        let process = launch(kind, port, &folder);
        let this = Self {
            kind,
            port,
            folder,
            process,
        };
        this.wait();
        this
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    pub(crate) fn start_again(&mut self) {
        self.process = launch(self.kind, self.port, &self.folder);
        self.wait();
    }

    fn wait(&self) {
        until("the server answers", || {
            ask(self.port, "GET / HTTP/1.1").starts_with("HTTP/1.1")
        });
        match self.kind {
            Kind::Files => fs::create_dir_all(self.folder.join(BUCKET)).expect("a bucket"),
            Kind::Moto => {
                let made = ask(self.port, &format!("PUT /{BUCKET} HTTP/1.1"));
                assert!(made.starts_with("HTTP/1.1 200"), "{made}");
            }
        }
    }
}

fn launch(kind: Kind, port: u16, folder: &Folder) -> Process {
    let port = port.to_string();
    let mut command;
    match kind {
        Kind::Files => {
            command = Command::new("s3s-fs");
            command.args(["--host", "127.0.0.1", "--port", &port]);
            command.args(["--access-key", KEY, "--secret-key", SECRET, folder.text()]);
            command.env("RUST_LOG", "error");
        }
        Kind::Moto => {
            command = Command::new("moto_server");
            command.args(["-H", "127.0.0.1", "-p", &port]);
        }
    }
    Process::spawn(command.stdout(Stdio::null()))
}

/// Sends a request without a body; returns the start of the answer, or nothing.
fn ask(port: u16, line: &str) -> String {
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        let head = format!(
            "{line}\r\nhost: 127.0.0.1:{port}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        let mut answer = vec![0; 1000];
        let len = stream.read(&mut answer)?;
        io::Result::Ok(String::from_utf8_lossy(&answer[..len]).into_owned())
    };
    ask().unwrap_or_default()
}

/// The harm that is done to a request.
pub(crate) enum Fault {
    /// No harm: the request goes to the server.
    None,
    /// The answer ends after some bytes, and the connection with it.
    CutAfter(usize),
    /// After some bytes of the answer nothing more comes.
    StallAfter(usize),
    /// The client gets this answer, and the server no request.
    Answer(Vec<u8>),
}

impl Fault {
    pub(crate) fn error(status: u16, code: &str, text: &str) -> Self {
        let body = format!("<Error><Code>{code}</Code><Message>{text}</Message></Error>");
        Self::answer(&format!("{status} Status"), "", body)
    }

    pub(crate) fn answer(status: &str, headers: &str, body: impl AsRef<[u8]>) -> Self {
        let (body, len) = (body.as_ref(), body.as_ref().len());
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {len}\r\n{headers}connection: close\r\n\r\n"
        );
        Self::Answer([head.as_bytes(), body].concat())
    }
}

/// Stands before a server and does to each request the harm that a function of its head and number names.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    pub(crate) requests: Arc<AtomicUsize>,
}

impl Proxy {
    pub(crate) fn start(
        server: u16,
        fault: impl Fn(&str, usize) -> Fault + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let requests = Arc::new(AtomicUsize::new(0));
        let (fault, count) = (Arc::new(fault), Arc::clone(&requests));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (fault, count) = (Arc::clone(&fault), Arc::clone(&count));
                // A client may leave.
                thread::spawn(move || drop(serve(stream, server, &*fault, &count)));
            }
        });
        Self { port, requests }
    }
}

/// Serves one request of a connection.
fn serve(
    mut client: TcpStream,
    server: u16,
    fault: &dyn Fn(&str, usize) -> Fault,
    count: &AtomicUsize,
) -> io::Result<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).to_lowercase();
    let fault = fault(&text, count.fetch_add(1, Ordering::SeqCst));
    let len = text.split_once("content-length: ").map_or("0", |(_, l)| l);
    let len: u64 = len.split("\r\n").next().unwrap_or("0").parse().unwrap_or(0);
    let body = client.try_clone()?.take(len);
    if let Fault::Answer(answer) = fault {
        io::copy(&mut { body }, &mut io::sink())?;
        client.write_all(&answer)?;
        return client.shutdown(Shutdown::Write);
    }
    let mut server = TcpStream::connect(("127.0.0.1", server))?;
    head.truncate(head.len() - 2);
    server.write_all(&head)?;
    server.write_all(b"connection: close\r\n\r\n")?;
    io::copy(&mut { body }, &mut server)?;
    let most = match fault {
        Fault::CutAfter(most) | Fault::StallAfter(most) => most as u64,
        _ => u64::MAX,
    };
    io::copy(&mut server.take(most), &mut client)?;
    if let Fault::StallAfter(_) = fault {
        // Until the client has left.
        io::copy(&mut client, &mut io::sink())?;
    }
    client.shutdown(Shutdown::Both)
}
