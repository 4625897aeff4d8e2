//! The login of a store is shown nowhere, whether the store takes it or not.
//! `cargo xtask test-remote` runs the test that needs a server.

#[allow(dead_code, reason = "the tests of the tier use all of it")]
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::thread;

use lmc_testkit::{Folder, until};

use crate::common::Server;
use crate::common::prompt::{CHUNKS, register, retrieve, store};
use crate::common::redis::Redis;
use crate::s3_servers::{Fault, Proxy};

/// A part of every secret here.
const MARK: &str = "marked-";
const PASSWORD: &str = "marked-secret-7c1f";

/// The ways to give a store's URL to the program.
#[derive(Clone, Copy, Debug)]
enum Way {
    Flag,
    File,
    Variable,
}

/// A URL with a login, and the variables of the program.
struct Login {
    url: String,
    variables: Vec<(&'static str, String)>,
}

impl Login {
    fn of(url: String) -> Self {
        let variables = Vec::new();
        Self { url, variables }
    }

    /// Returns the program with the variables, and the flags that name the store.
    fn lmc(&self, way: Way, folder: &Folder) -> (Command, Vec<String>) {
        let mut command = crate::common::lmc();
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let flags = match way {
            Way::Flag => vec!["--remote".to_owned(), self.url.clone()],
            Way::Variable => {
                command.env("LMC_REMOTE", &self.url);
                Vec::new()
            }
            Way::File => {
                let table = format!("[[tier]]\nkind = \"remote\"\nurl = \"{}\"\n", self.url);
                let file = folder.join("lmc.toml");
                std::fs::write(&file, table).expect("space");
                vec!["--config".to_owned(), file.display().to_string()]
            }
        };
        (command, flags)
    }

    /// Runs a daemon with this login, uses it, asks for everything that it and the commands show,
    /// and checks that no secret is in there.
    fn is_not_shown(&self, way: Way, is_taken: bool) {
        let folder = Folder::temporary();
        let (program, flags) = self.lmc(way, &folder);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        // All that the libraries say, too.
        let flags = [&flags[..], &["--log-level", "trace"]].concat();
        let server = Server::start_by(program, &flags);
        match is_taken {
            true => drop(server.line("remote store in use")),
            false => until("the store has refused the login", || {
                let status = server.get("/status");
                status.contains("\"fault\":\"") && !status.contains("has not answered yet")
            }),
        }
        let mut client = server.client();
        let shm_name = register(&mut client);
        store(&mut client, &shm_name);
        let read = retrieve(&mut client, &shm_name, "reading");
        assert_eq!(read, CHUNKS as u64, "memory needs no store");

        let mut shown = Vec::new();
        for path in [
            "/status",
            "/metrics",
            "/config",
            "/healthcheck",
            "/cache/clear/shared",
        ] {
            shown.push((path.to_owned(), server.get(path)));
        }
        let at = format!("127.0.0.1:{}", server.http);
        for line in ["status", "status --json", "clear", "clear --shared"] {
            let (mut command, _) = self.lmc(Way::Flag, &folder);
            let said = command.args(line.split(' ')).args(["--url", &at]).output();
            shown.push((line.to_owned(), text(said.expect("it runs"))));
        }
        let (mut command, flags) = self.lmc(way, &folder);
        let printed = command.arg("serve").args(flags).arg("--print-config");
        let printed = text(printed.output().expect("it runs"));
        assert!(printed.contains("remote"), "{printed}");
        shown.push(("--print-config".to_owned(), printed));
        let (mut command, _) = self.lmc(Way::Variable, &folder);
        let checked = command.args(["remote", "check"]).output();
        shown.push(("remote check".to_owned(), text(checked.expect("it runs"))));
        shown.push(("the log".to_owned(), server.log().join("\n")));
        server.terminate();
        for (what, text) in shown {
            assert!(!text.is_empty(), "{what} is empty");
            assert!(!text.contains(MARK), "{what}, {way:?}: {text}");
        }
    }
}

fn text(output: Output) -> String {
    let parts = [output.stdout, output.stderr];
    parts
        .map(|part| String::from_utf8_lossy(&part).into_owned())
        .concat()
}

/// Starts a server that refuses every command, and repeats it.
fn refusing_redis() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut asked = [0; 4096];
                while let Ok(len @ 1..) = stream.read(&mut asked) {
                    let asked = String::from_utf8_lossy(&asked[..len]).replace("\r\n", " ");
                    // Several commands may come at once.
                    let commands = asked.matches('*').count().max(1);
                    let answer = format!("-WRONGPASS invalid login: {asked}\r\n").repeat(commands);
                    if stream.write_all(answer.as_bytes()).is_err() {
                        break;
                    }
                }
            });
        }
    });
    port
}

#[test]
fn the_login_of_a_redis_that_refuses_and_repeats_it_is_shown_nowhere() {
    let port = refusing_redis();
    let login = Login::of(format!("redis://user:{PASSWORD}@127.0.0.1:{port}/1"));
    for way in [Way::Flag, Way::File, Way::Variable] {
        login.is_not_shown(way, false);
    }
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn the_login_of_a_redis_is_shown_nowhere() {
    let redis = Redis::start(&["--requirepass", PASSWORD]);
    let login = |password| Login::of(format!("redis://:{password}@127.0.0.1:{}", redis.port));
    login(PASSWORD).is_not_shown(Way::File, true);
    login(PASSWORD).is_not_shown(Way::Variable, true);
    login("marked-wrong").is_not_shown(Way::File, false);
}

#[test]
fn keys_that_an_s3_refuses_and_repeats_are_shown_nowhere() {
    let repeated = format!(
        "no {} {} {}",
        crate::s3_servers::KEY,
        crate::s3_servers::SECRET,
        crate::s3_servers::TOKEN
    );
    let refuse = move |head: &str, _| {
        let text = format!("{repeated} {head}");
        Fault::error(403, "InvalidAccessKeyId", &text)
    };
    // No request reaches a server behind it.
    let proxy = Proxy::start(0, refuse);
    let login = Login {
        url: "s3://bucket/of/lmc".to_owned(),
        variables: crate::s3_servers::variables(proxy.port),
    };
    for way in [Way::Flag, Way::File] {
        login.is_not_shown(way, false);
    }
}
