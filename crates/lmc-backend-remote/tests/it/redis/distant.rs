//! A server that is far away.

use std::io::BufReader;
use std::thread;

use lmc_backend_remote::Got;

use super::*;

/// A server without keys that answers no question for a value before a number of them have come, on
/// whatever connections.
fn far_away(questions: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Streams that wait for an answer, and the number of questions so far.
    let waiting: Arc<Mutex<(Vec<TcpStream>, usize)>> = Arc::default();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let waiting = Arc::clone(&waiting);
            thread::spawn(move || {
                let mut reader = BufReader::new(&stream);
                while let Some(command) = command_of(&mut reader) {
                    if command[0] != "GET" {
                        let _ = (&stream).write_all(b"+OK\r\n");
                        continue;
                    }
                    let mut waiting = waiting.lock();
                    waiting.0.push(stream.try_clone().unwrap());
                    waiting.1 += 1;
                    if waiting.1 >= questions {
                        for mut stream in waiting.0.drain(..) {
                            let _ = stream.write_all(b"$-1\r\n");
                        }
                    }
                }
            });
        }
    });
    port
}

/// Two values were on the way on each of four connections: 256 of 64 KiB took 32 round trips.
#[test]
fn many_small_values_are_on_the_way_at_a_time() {
    let port = far_away(20);
    let config = RedisConfig::new(format!("redis://127.0.0.1:{port}").parse().unwrap());
    let store = config.open().unwrap();
    let folder = ChunkFolder {
        generation: Generation::new([1; 8]),
        clears: ClearsId::NONE,
    };
    let pool = lmc_memory::ArenaConfig::anonymous(4 << 20).build().unwrap();
    let pool = lmc_memory::Pool::new(Arc::new(pool), lmc_memory::PoolConfig::default()).unwrap();
    let item = |number| GetItem {
        name: folder.value(test_key(number)),
        slot: pool.reserve(64 << 10).unwrap(),
    };
    let items: Vec<GetItem> = (0..32).map(item).collect();
    let got: Vec<_> = runtime().block_on(store.get(items, soon()).collect());
    let absent = |(_, got): &(usize, Got)| matches!(got, Got::Absent(_));
    assert_eq!(got.iter().filter(|got| absent(got)).count(), 32);
}
