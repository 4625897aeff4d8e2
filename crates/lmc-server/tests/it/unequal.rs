//! An engine with one rank that takes what two ranks of another host have computed.

use lmc_testkit::{free_port, in_lab, until};
use lmc_vllm_adapter::{
    CacheKey, Client, EngineDrivenContext, EngineRecord, IdentityDigest, Reply, Request,
    RequestConfigs,
};

use crate::common::Server;
use crate::common::prompt::{CHUNKS, await_hits, commit, end, key, prepare, read, worker};

const IDENTITY: &str = "model";
/// Bytes of a token in one layer and plane, in each of two ranks.
const RUN: usize = 16;

fn start(port: u16, peers: &str) -> Server {
    let listen = format!("127.0.0.1:{port}");
    let mut args = vec!["--l1-size-gb", "64MiB", "--p2p-listen", &listen];
    args.extend([
        "--p2p-name",
        if peers.is_empty() { "wide" } else { "narrow" },
    ]);
    args.extend(["--p2p-locate-timeout", "10s"]);
    if !peers.is_empty() {
        args.extend(["--p2p-peer", peers]);
    }
    Server::start(&args)
}

/// A worker of lmc's own client, which says in which order it copies.
struct Worker {
    client: Client,
    shm_name: String,
    instance_id: u64,
    world_size: u32,
    rank: u32,
}

impl Worker {
    fn register(server: &Server, world_size: u32, rank: u32) -> Self {
        let instance_id = 1 + u64::from(rank);
        let hidden = (2 * RUN / 4) as u32 / world_size;
        let context = EngineDrivenContext {
            instance_id,
            world_size,
            record: Some(EngineRecord {
                identity: IDENTITY.to_owned(),
                layout: "tokens".to_owned(),
                unit: None,
            }),
            ..worker(hidden, "float32")
        };
        let mut client = server.client();
        let reply = client.ask(&Request::RegisterEngineDriven(context));
        let Ok(Reply::Registered { shm_name, .. }) = reply else {
            panic!("{reply:?}");
        };
        Self {
            client,
            shm_name,
            instance_id,
            world_size,
            rank,
        }
    }

    fn key(&self, request: &str, configs: RequestConfigs) -> CacheKey {
        CacheKey {
            world_size: self.world_size,
            worker_id: Some(self.rank),
            identity: Some(IdentityDigest::of(IDENTITY)),
            configs,
            ..key(request)
        }
    }

    fn store(&mut self, configs: RequestConfigs) {
        let (key, rank) = (self.key("store", configs), self.rank);
        let named = (key.clone(), self.instance_id);
        let bytes = |chunk, len| part(rank, chunk, len as usize);
        let written = prepare(named, &mut self.client, &self.shm_name, bytes);
        assert_eq!(written, CHUNKS);
        commit((key, self.instance_id), &mut self.client);
    }

    fn look_up(&mut self, request: &str, configs: RequestConfigs) -> u64 {
        let lookup = CacheKey {
            worker_id: None,
            ..self.key(request, configs)
        };
        let reply = self.client.ask(&Request::Lookup(lookup));
        assert_eq!(reply.expect("an answer"), Reply::None);
        await_hits(&mut self.client, request)
    }

    /// Looks the prompt up, and compares what is found. Returns the number of chunks.
    fn find(&mut self, request: &str) -> usize {
        let hits = self.look_up(request, RequestConfigs::default());
        let key = self.key(request, RequestConfigs::default());
        let chunks = read(key, &mut self.client, &self.shm_name, hits);
        for (number, chunk) in chunks.iter().enumerate() {
            let parts = [0, 1].map(|rank| part(rank, number, chunk.len() / 2));
            let [first, second] = parts.each_ref().map(|part| part.chunks(RUN));
            let runs = first
                .zip(second)
                .flat_map(|(first, second)| [first, second]);
            assert_eq!(*chunk, runs.collect::<Vec<_>>().concat(), "chunk {number}");
        }
        end(&mut self.client, request);
        hits as usize
    }
}

/// Bytes that a rank computes.
fn part(rank: u32, chunk: usize, len: usize) -> Vec<u8> {
    let seed = 101 * rank as usize + 7 * chunk;
    let byte = |at: usize| (at * 31 + (at >> 8) + seed) as u8;
    (0..len).map(byte).collect()
}

fn counter(server: &Server, name: &str) -> f64 {
    server.metric(&format!(
        "lmc_tier_events_total{{tier=\"peers\",what=\"{name}\"}}"
    ))
}

#[test]
fn chunks_of_two_ranks_are_pushed_to_an_engine_with_one() {
    let at = free_port();
    let wide = start(at, "");
    let narrow = start(free_port(), &format!("127.0.0.1:{at}"));
    wide.line("peer connected");
    let mut one = Worker::register(&narrow, 1, 0);
    let mut ranks = [0, 1].map(|rank| Worker::register(&wide, 2, rank));
    let mut configs = RequestConfigs::default();
    configs.push_to = "narrow".to_owned();
    for rank in &mut ranks {
        rank.store(configs.clone());
    }
    let all = 2.0 * CHUNKS as f64;
    until("all parts are there", || counter(&wide, "pushed") == all);
    assert_eq!(counter(&narrow, "read"), all);
    assert_eq!(one.find("first"), CHUNKS);
    assert_eq!(one.find("second"), CHUNKS);
    assert_eq!(counter(&narrow, "read"), all);
    // The parts have left DRAM, and are not read again for the next request of the prompt.
    until("the merged chunks alone are there", || {
        narrow.metric("lmc_chunks") == CHUNKS as f64
    });
    assert_eq!(narrow.metric("lmc_chunks_merged_total"), CHUNKS as f64);
    assert_eq!(ranks[0].look_up("again", configs), CHUNKS as u64);
    until("they are pushed again", || {
        counter(&wide, "pushed") == 2.0 * all
    });
    assert_eq!(counter(&narrow, "read"), all);
    assert_eq!(narrow.metric("lmc_chunks"), CHUNKS as f64);
}

#[test]
fn an_engine_with_one_rank_reads_the_chunks_of_two_ranks_from_a_peer() {
    if !in_lab("peers tell each other of new engines every 5 s") {
        return;
    }
    let at = free_port();
    let wide = start(at, "");
    let narrow = start(free_port(), &format!("127.0.0.1:{at}"));
    narrow.line("peer connected");
    let mut one = Worker::register(&narrow, 1, 0);
    let mut ranks = [0, 1].map(|rank| Worker::register(&wide, 2, rank));
    // The second rank has none yet.
    ranks[0].store(RequestConfigs::default());
    let mut request = 0;
    let mut find = || {
        request += 1;
        one.find(&format!("request-{request}"))
    };
    assert_eq!(find(), 0);
    ranks[1].store(RequestConfigs::default());
    until("all chunks are found", || find() == CHUNKS);
    assert_eq!(counter(&narrow, "read"), 2.0 * CHUNKS as f64);
}
