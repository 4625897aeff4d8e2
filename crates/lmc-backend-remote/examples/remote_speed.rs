//! Speed of the tier over a store, or of the bare way to the same store; `cargo xtask bench remote`
//! runs it. Prints a line of JSON.
//!
//! `remote_speed WHO URL BYTES COUNT [TTL]`: WHO is `lmc`, or `bare`: for `redis://…` the crate `redis`
//! with as many connections, for `s3://…` the crate `object_store` with as many requests at a time,
//! for `file://…` threads that write, rename and read files. BYTES is the length of a value, COUNT
//! the number of values, TTL the seconds that lmc has them expire after in Redis.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use lmc_backend::conformance::{fill_value, test_key};
use lmc_backend::{Backend, LoadItem, LocateHint, Located, NoEngine, StoreItem, WriteBackend};
use lmc_backend_remote::format::PROBE_FOLDER;
use lmc_backend_remote::redis::RedisConfig;
use lmc_backend_remote::s3::{Connector, S3Config};
use lmc_backend_remote::{FileConfig, RemoteConfig, Store};
use lmc_key::ChunkKey;
use lmc_memory::{ArenaConfig, Pool, PoolConfig, Prefault, SealedSlot};
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt, PutPayload};
use tokio::runtime::{Builder, Runtime};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Values that are written and read at a time by the bare way: as many as lmc has connections.
const AT_ONCE: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(120);
/// Values that are read one after the other.
const SINGLES: usize = 32;
/// Times that the headers of all values are read; their median counts.
const LOOKUPS: usize = 11;

struct Figures {
    put: Took,
    get: Took,
    /// Time to read one value, nothing else under way.
    single: Duration,
    /// Median time to read the headers of all values, at most 512.
    locate: Option<Duration>,
}

impl Figures {
    /// Measures a client that puts and gets values by their numbers.
    async fn of_bare<P, G>(
        count: usize,
        at_once: usize,
        put: impl Fn(usize) -> P,
        get: impl Fn(usize) -> G,
    ) -> Result<Self>
    where
        P: Future<Output = Result<()>>,
        G: Future<Output = Result<()>>,
    {
        Ok(Self {
            put: all(count, at_once, put).await?,
            get: all(count, at_once, &get).await?,
            single: single(count, async |n| get(n).await).await?,
            locate: None,
        })
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [who, url, len, count, ttl @ ..] = &arguments[..] else {
        return Err("expected WHO URL BYTES COUNT".into());
    };
    let ttl = ttl.first().map(|ttl| ttl.parse()).transpose()?;
    let ttl = ttl.map(Duration::from_secs);
    let (len, count): (u64, u64) = (len.parse()?, count.parse()?);
    let arena = ArenaConfig::anonymous((2 * (count + 1) * len.next_multiple_of(4096)) as usize);
    // As a server's pool: no call pays for its pages.
    let arena = arena
        .with_prefault(Prefault::Background { threads: 2 })
        .build()?;
    while arena.prefault_progress().done < arena.prefault_progress().total {
        std::thread::sleep(Duration::from_millis(1));
    }
    let pool = Pool::new(Arc::new(arena), PoolConfig::default())?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let keys: Vec<ChunkKey> = (0..count).map(test_key).collect();
    let slots: Result<Vec<SealedSlot>> = keys.iter().map(|key| filled(&pool, key, len)).collect();
    let slots = slots?;
    let figures = match (&**who, url.split_once("://")) {
        ("lmc", _) => ours(&runtime, (url, ttl), &pool, &keys, &slots)?,
        ("bare", Some(("file", folder))) => {
            files(&runtime, Path::new(folder), &pool, &keys, &slots)?
        }
        ("bare", Some(("s3", _))) => runtime.block_on(bare_s3(url, &pool, &keys, &slots))?,
        ("bare", Some(_)) => runtime.block_on(bare_redis(url, &pool, &keys, &slots))?,
        _ => return Err("expected lmc or bare, and a URL".into()),
    };
    let bytes = (count * len) as f64;
    let speed = |took: &Took| bytes / took.time.as_secs_f64() / 1e9;
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    println!(
        "{{\"put_gb_per_s\": {}, \"get_gb_per_s\": {}, \"put_busy\": {}, \"get_busy\": {}, \
         \"get_one_us\": {}, \"locate_us\": {}}}",
        speed(&figures.put),
        speed(&figures.get),
        figures.put.busy,
        figures.get.busy,
        micros(figures.single),
        figures.locate.map_or(0.0, micros),
    );
    Ok(())
}

fn filled(pool: &Pool, key: &ChunkKey, len: u64) -> Result<SealedSlot> {
    let mut slot = pool.reserve(len).ok_or("the pool is full")?;
    fill_value(key, slot.bytes_mut());
    Ok(slot.written().seal())
}

fn ours(
    runtime: &Runtime,
    (url, ttl): (&str, Option<Duration>),
    pool: &Pool,
    keys: &[ChunkKey],
    slots: &[SealedSlot],
) -> Result<Figures> {
    let store: Arc<dyn Store> = match url.split_once("://") {
        Some(("file", folder)) => Arc::new(FileConfig::new(folder).open()?),
        Some(("s3", _)) => Arc::new(S3Config::new(url.parse()?, env::vars())?.open()?),
        _ => {
            let mut config = RedisConfig::new(url.parse()?);
            config.ttl = ttl;
            Arc::new(config.open()?)
        }
    };
    let config = RemoteConfig::default();
    let tier = config.start(
        store,
        Arc::new(NoEngine::default()),
        runtime.handle().clone(),
    );
    runtime.block_on(async {
        if !tier.ready(Instant::now() + TIMEOUT).await {
            return Err("the store does not answer".into());
        }
        let items = keys.iter().zip(slots);
        let items = items.map(|(key, slot)| StoreItem::new(*key, slot.clone()));
        let begun = Clock::now()?;
        let mut stored = tier.store(items.collect(), begun.at + TIMEOUT);
        while let Some((_, stored)) = stored.next().await {
            stored?;
        }
        let put = begun.took()?;
        let asked = &keys[..keys.len().min(512)];
        let mut lookups = Vec::new();
        for _ in 0..LOOKUPS {
            let begun = Instant::now();
            for located in tier
                .locate(asked, LocateHint::none(), begun + TIMEOUT)
                .await
            {
                if !matches!(located?, Located::Present(_)) {
                    return Err("a value is missing".into());
                }
            }
            lookups.push(begun.elapsed());
        }
        lookups.sort_unstable();
        let locate = lookups[LOOKUPS / 2];
        let load = async |keys: &[ChunkKey], slots: &[SealedSlot]| -> Result<()> {
            let item = |(key, slot): (&ChunkKey, &SealedSlot)| {
                Some(LoadItem::new(*key, pool.reserve(slot.len())?))
            };
            let items: Option<Vec<_>> = keys.iter().zip(slots).map(item).collect();
            let items = items.ok_or("the pool is full")?;
            let mut loaded = tier.load(items, Instant::now() + TIMEOUT);
            while let Some((_, loaded)) = loaded.next().await {
                loaded.hit().ok_or("a miss")?;
            }
            Ok(())
        };
        let begun = Clock::now()?;
        load(keys, slots).await?;
        let get = begun.took()?;
        Ok(Figures {
            put,
            get,
            single: single(keys.len(), async |n| {
                load(&keys[n..=n], &slots[n..=n]).await
            })
            .await?,
            locate: Some(locate),
        })
    })
}

/// The crate `redis`: its parser copies a value once, and so does the way into the slot.
async fn bare_redis(
    url: &str,
    pool: &Pool,
    keys: &[ChunkKey],
    slots: &[SealedSlot],
) -> Result<Figures> {
    let client = redis::Client::open(url)?;
    let mut connections = Vec::new();
    for _ in 0..AT_ONCE {
        connections.push(client.get_multiplexed_async_connection().await?);
    }
    let name = |key: &ChunkKey| format!("bare/{}", PROBE_FOLDER.value(*key));
    let set = async |n: usize| -> Result<()> {
        let mut connection = connections[n % AT_ONCE].clone();
        let mut set = redis::cmd("SET");
        set.arg(name(&keys[n])).arg(slots[n].bytes());
        Ok(set.query_async(&mut connection).await?)
    };
    let get = async |n: usize| -> Result<()> {
        let mut connection = connections[n % AT_ONCE].clone();
        let mut get = redis::cmd("GET");
        let value: Vec<u8> = get.arg(name(&keys[n])).query_async(&mut connection).await?;
        let mut slot = pool.reserve(value.len() as u64).ok_or("the pool is full")?;
        slot.bytes_mut().copy_from_slice(&value);
        Ok(())
    };
    Figures::of_bare(keys.len(), AT_ONCE, set, get).await
}

/// The crate `object_store` with the client that lmc uses, as many requests at a time, and what it
/// reads copied into the slot.
async fn bare_s3(
    url: &str,
    pool: &Pool,
    keys: &[ChunkKey],
    slots: &[SealedSlot],
) -> Result<Figures> {
    let config = S3Config::new(url.parse()?, env::vars())?;
    let client = config.client(Connector::new(&config)?)?;
    let name = |key: &ChunkKey| Key::from(format!("bare/{}", PROBE_FOLDER.value(*key)));
    let put = async |n: usize| -> Result<()> {
        let bytes = Bytes::from_owner(slots[n].clone());
        client.put(&name(&keys[n]), PutPayload::from(bytes)).await?;
        Ok(())
    };
    let get = async |n: usize| -> Result<()> {
        let result = client.get(&name(&keys[n])).await?;
        let mut slot = pool.reserve(result.meta.size).ok_or("the pool is full")?;
        let (mut body, mut at) = (result.into_stream(), 0);
        while let Some(bytes) = body.next().await {
            let bytes = bytes?;
            let end = at + bytes.len();
            let part = slot.bytes_mut().get_mut(at..end);
            part.ok_or("a longer value")?.copy_from_slice(&bytes);
            at = end;
        }
        Ok(())
    };
    Figures::of_bare(keys.len(), config.values_at_once, put, get).await
}

/// Threads with the calls of the standard library, without the page cache.
fn files(
    runtime: &Runtime,
    folder: &Path,
    pool: &Pool,
    keys: &[ChunkKey],
    slots: &[SealedSlot],
) -> Result<Figures> {
    let path = |key: &ChunkKey| -> PathBuf {
        folder
            .join("bare")
            .join(PROBE_FOLDER.value(*key).to_string().replace('/', "-"))
    };
    fs::create_dir_all(folder.join("bare"))?;
    let each = |one: &(dyn Fn(usize) -> Result<()> + Sync)| -> Result<Took> {
        let begun = Clock::now()?;
        std::thread::scope(|scope| {
            let part = |first| move || (first..keys.len()).step_by(AT_ONCE).try_for_each(one);
            let threads: Vec<_> = (0..AT_ONCE).map(|first| scope.spawn(part(first))).collect();
            let mut ends = threads.into_iter().map(|thread| thread.join());
            ends.try_for_each(|end| end.map_err(|_| "a thread panicked")?)
        })?;
        begun.took()
    };
    let write = |n: usize| -> Result<()> {
        let temporary = path(&keys[n]).with_extension("new");
        let mut file = direct()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)?;
        file.write_all(slots[n].bytes())?;
        Ok(fs::rename(&temporary, path(&keys[n]))?)
    };
    let read = |n: usize| -> Result<()> {
        let mut slot = pool.reserve(slots[n].len()).ok_or("the pool is full")?;
        let mut file = direct().read(true).open(path(&keys[n]))?;
        Ok(file.read_exact(slot.bytes_mut())?)
    };
    let (put, get) = (each(&write)?, each(&read)?);
    let single = runtime.block_on(single(keys.len(), async |n| read(n)))?;
    fs::remove_dir_all(folder.join("bare"))?;
    Ok(Figures {
        put,
        get,
        single,
        locate: None,
    })
}

fn direct() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(libc::O_DIRECT);
    options
}

/// Returns the median time of one operation, nothing else under way.
async fn single(count: usize, one: impl AsyncFn(usize) -> Result<()>) -> Result<Duration> {
    let mut times = Vec::new();
    for n in 0..SINGLES.min(count) {
        let begun = Instant::now();
        one(n).await?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).copied().unwrap_or_default())
}

/// Returns the time of all operations, some of them at a time.
async fn all<F: Future<Output = Result<()>>>(
    count: usize,
    at_once: usize,
    one: impl Fn(usize) -> F,
) -> Result<Took> {
    let begun = Clock::now()?;
    let mut done = stream::iter(0..count).map(one).buffer_unordered(at_once);
    while let Some(one) = done.next().await {
        one?;
    }
    begun.took()
}

/// Time of a part of the run, and the share of all cores' time that anything ran in it.
struct Took {
    time: Duration,
    busy: f64,
}

/// The start of a part of the run.
struct Clock {
    at: Instant,
    /// Time of all cores, and that part of it in which they had nothing to do.
    cores: (u64, u64),
}

impl Clock {
    fn now() -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let cores = stat.lines().next().ok_or("no cores")?.split_whitespace();
        let times: Vec<u64> = cores.skip(1).take(8).flat_map(str::parse).collect();
        let idle = times.get(3..5).ok_or("no idle time")?.iter().sum();
        let cores = (times.iter().sum(), idle);
        let at = Instant::now();
        Ok(Self { at, cores })
    }

    fn took(&self) -> Result<Took> {
        let end = Self::now()?;
        let [all, idle] = [end.cores.0 - self.cores.0, end.cores.1 - self.cores.1];
        Ok(Took {
            time: end.at - self.at,
            busy: 1.0 - idle as f64 / all.max(1) as f64,
        })
    }
}
