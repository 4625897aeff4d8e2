//! `lmc remote check`: checks that a store can be used from this host, measures it, and says what to change.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use lmc_backend::in_order;
use lmc_backend_remote::format::{
    ClearsError, Header, Name, PROBE_FOLDER, PROBE_SPACE, Scope, ValueName, probe,
};
use lmc_backend_remote::{
    GetItem, Got, Opened, Put, PutItem, PutMode, Store, StoreError, read_clears,
};
use lmc_memory::{ArenaConfig, Pool, PoolConfig, SealedSlot};

use super::listing::Listing;
use super::{Target, explained, memory};
use crate::config::human_bytes;
use crate::stdout::outln;

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Example:
  lmc remote check file:///mnt/shared/lmc
The check takes a few seconds. It writes at most 130 MiB under names that no daemon reads, and removes
these values again. The exit code is 1 if there is a fault. `lmc remote gc` removes the values of a
killed check.";

/// Time for one operation.
const STEP: Duration = Duration::from_secs(10);
/// Time to find the probes in a listing. Redis walks all its keys for a listing.
const LIST: Duration = Duration::from_secs(30);
/// Sizes of the values that are measured.
const SIZES: [u64; 2] = [64 << 10, 4 << 20];
/// Limit on the values of one size that are written one at a time, and in parallel.
const MOST: usize = 16;
/// Time for one measurement.
const MEASURE: Duration = Duration::from_millis(300);
/// Time to write or read in parallel, as estimated from the time of single values.
const BATCH: Duration = Duration::from_secs(2);
/// Difference of clocks from which the check prints a note, in milliseconds.
const SKEW_MS: i64 = 60_000;

/// A fault after which the remaining steps are skipped.
struct Stopped;

struct Check {
    target: Target,
    store: Arc<dyn Store>,
    pool: Pool,
    /// Names of the values that may be in the store.
    written: HashSet<Name>,
    faults: u32,
}

pub(super) async fn run(target: Target) -> Result<()> {
    let bytes = (MOST as u64 + 2) * SIZES[1];
    let arena = ArenaConfig::anonymous(usize::try_from(bytes)?).build()?;
    let mut check = Check {
        store: target.opened.store(),
        target,
        pool: Pool::new(Arc::new(arena), PoolConfig::default())?,
        written: HashSet::new(),
        faults: 0,
    };
    outln!("checking {}", check.target.url);
    // Faults are already printed. The written values are removed in any case.
    let _ = check.use_store().await;
    check.clean_up().await;
    match check.faults {
        0 => {
            outln!("the store can be used");
            Ok(())
        }
        1 => bail!("1 fault in {}", check.target.url),
        faults => bail!("{faults} faults in {}", check.target.url),
    }
}

fn ok(text: &str) {
    outln!("ok     {text}");
}

fn note(text: &str) {
    outln!("note   {text}");
}

fn step() -> Instant {
    Instant::now() + STEP
}

impl Check {
    fn fault(&mut self, text: &str) -> Stopped {
        outln!("FAULT  {text}");
        self.faults += 1;
        Stopped
    }

    fn failed(&mut self, doing: &str, error: &StoreError) -> Stopped {
        self.fault(&format!("{doing} failed: {}", explained(error)))
    }

    async fn use_store(&mut self) -> Result<(), Stopped> {
        self.clears().await?;
        self.small_object().await?;
        for size in SIZES {
            self.measure(size).await?;
        }
        self.overwrite().await?;
        self.listing().await?;
        self.facts().await;
        Ok(())
    }

    /// Reads the object of clears, which a daemon reads first.
    async fn clears(&mut self) -> Result<(), Stopped> {
        let set = read_clears(&*self.store, step()).await;
        match set.map_err(|error| self.failed("reading the object of clears", &error))? {
            Ok(None) => ok("the store answers; no server has used it yet"),
            Ok(Some(record)) => match record.clears.total() {
                0 => ok("the store answers; no clear was passed on through it"),
                clears => ok(&format!(
                    "the store answers; {clears} clears were passed on through it"
                )),
            },
            Err(error @ ClearsError::Damaged) => note(&format!(
                "{error}: running daemons write it again; if none runs, all chunks count as cleared"
            )),
            Err(error) => {
                self.fault(&format!("{error}: use one release of lmc with one store"));
            }
        }
        Ok(())
    }

    /// Writes and reads a small object, such as clears and descriptions are.
    async fn small_object(&mut self) -> Result<(), Stopped> {
        let name = Name::Space(PROBE_FOLDER, PROBE_SPACE);
        let bytes = format!("{{\"check\": {}}}\n", random(0)).into_bytes();
        self.written.insert(name);
        let written = self.store.write(name, bytes.clone().into(), step()).await;
        if let Err(error) = written {
            return Err(self.failed("writing a small object", &error));
        }
        match self.store.read(name, bytes.len(), step()).await {
            Ok(Some(found)) if found == bytes => Ok(()),
            Ok(_) => Err(self.fault("a small object that was just written has other bytes: end other running checks, and remove any cache between this host and the store")),
            Err(error) => Err(self.failed("reading a small object", &error)),
        }
    }

    /// Writes and reads values of one size, one at a time and in parallel.
    async fn measure(&mut self, size: u64) -> Result<(), Stopped> {
        let slot = self.payload(size)?;
        let shown = human_bytes(size);
        let (mut keys, mut writes, mut reads) = (Vec::new(), Vec::new(), Vec::new());
        let begun = Instant::now();
        while keys.len() < MOST && (keys.is_empty() || begun.elapsed() < MEASURE) {
            let (key, at) = (new_key(), Instant::now());
            self.put(&[key], &slot).await?;
            writes.push(at.elapsed());
            keys.push(key);
        }
        let begun = Instant::now();
        for key in &keys {
            if !reads.is_empty() && begun.elapsed() >= MEASURE {
                break;
            }
            let at = Instant::now();
            self.get(&[*key], &slot).await?;
            reads.push(at.elapsed());
        }
        let (write, read) = (median(writes), median(reads));
        ok(&format!(
            "{shown}: written in {} and read in {}, one at a time",
            millis(write),
            millis(read)
        ));
        let each = write.max(read).as_secs_f64().max(1e-6);
        let count = ((BATCH.as_secs_f64() / each) as usize).min(MOST);
        if count < 2 {
            note(&format!("{shown}: too slow to be measured in parallel"));
            return Ok(());
        }
        let keys: Vec<ValueName> = (0..count).map(|_| new_key()).collect();
        let at = Instant::now();
        self.put(&keys, &slot).await?;
        let write = at.elapsed();
        let at = Instant::now();
        self.get(&keys, &slot).await?;
        let rate = |took: Duration| {
            let bytes = (count as u64 * size) as f64;
            human_bytes((bytes / took.as_secs_f64().max(1e-9)) as u64)
        };
        let (write, read) = (rate(write), rate(at.elapsed()));
        ok(&format!(
            "{shown}: {write}/s written and {read}/s read, {count} at a time"
        ));
        Ok(())
    }

    fn payload(&mut self, size: u64) -> Result<SealedSlot, Stopped> {
        let Some(mut slot) = self.pool.reserve(size) else {
            return Err(self.fault("this host has no memory for a value"));
        };
        let seed = random(size);
        for (n, word) in slot.bytes_mut().chunks_mut(8).enumerate() {
            let random = seed.wrapping_mul(2 * n as u64 + 1).rotate_left(29) ^ seed;
            word.copy_from_slice(&random.to_le_bytes()[..word.len()]);
        }
        Ok(slot.written().seal())
    }

    async fn put(&mut self, keys: &[ValueName], slot: &SealedSlot) -> Result<(), Stopped> {
        for put in self.try_put(keys, slot).await {
            match put {
                Ok(Put::Written) => {}
                Ok(Put::Present) => {
                    return Err(self.fault("a new name exists already: check that the URL names the store itself, and that no other server answers for it"));
                }
                Err(error) => return Err(self.failed("writing a value", &error)),
            }
        }
        Ok(())
    }

    async fn try_put(
        &mut self,
        keys: &[ValueName],
        slot: &SealedSlot,
    ) -> Vec<Result<Put, StoreError>> {
        let offset = self.store.payload_offset();
        let item = |name: &ValueName| {
            let header = Header::raw(name.key, offset, slot.len(), slot.checksum());
            PutItem {
                folder: name.folder,
                header,
                slot: slot.clone(),
                mode: PutMode::Create,
            }
        };
        self.written
            .extend(keys.iter().map(|name| Name::Value(*name)));
        let puts = self.store.put(keys.iter().map(item).collect(), step());
        let puts = in_order(puts, keys.len()).await.into_iter();
        puts.map(|put| put.unwrap_or(Err(StoreError::Deadline)))
            .collect()
    }

    async fn get(&mut self, keys: &[ValueName], slot: &SealedSlot) -> Result<(), Stopped> {
        let reserve = |&name: &ValueName| {
            let slot = self.pool.reserve(slot.len())?;
            Some(GetItem { name, slot })
        };
        let items: Option<Vec<GetItem>> = keys.iter().map(reserve).collect();
        let Some(items) = items else {
            return Err(self.fault("this host has no memory for values"));
        };
        let got = self.store.get(items, step());
        for got in in_order(got, keys.len()).await {
            match got {
                Some(Got::Value {
                    slot: mut found, ..
                }) => {
                    if found.bytes_mut() != slot.bytes() {
                        return Err(self.fault("a value has other bytes than were written: the store or the network damages data; test the memory of both hosts"));
                    }
                }
                Some(Got::Absent(_)) => {
                    return Err(self.fault("a value that was just written is absent: remove any cache between this host and the store, and check that the store does not evict at once"));
                }
                Some(Got::Refused { refusal, .. }) => {
                    return Err(self.fault(&format!(
                        "a value that was just written is not whole: {refusal}"
                    )));
                }
                Some(Got::Failed { error, .. }) => {
                    return Err(self.failed("reading a value", &error));
                }
                None => return Err(self.failed("reading a value", &StoreError::Deadline)),
            }
        }
        Ok(())
    }

    /// Writes a value that exists.
    async fn overwrite(&mut self) -> Result<(), Stopped> {
        let slot = self.payload(SIZES[0])?;
        let key = new_key();
        self.put(&[key], &slot).await?;
        match self.try_put(&[key], &slot).await.pop() {
            Some(Ok(Put::Present)) => ok("an existing value is not written again"),
            Some(Ok(Put::Written)) => note(
                "the store has no conditional writes: two daemons that store the same chunk both \
                 write it, which costs traffic and is harmless",
            ),
            Some(Err(error)) => return Err(self.failed("writing a value again", &error)),
            None => return Err(self.failed("writing a value again", &StoreError::Deadline)),
        }
        Ok(())
    }

    /// Looks for the probes in a listing.
    async fn listing(&mut self) -> Result<(), Stopped> {
        let is_value = |name: &&Name| matches!(name, Name::Value(_));
        let mut missing: HashSet<Name> = self.written.iter().filter(is_value).copied().collect();
        let (count, mut others) = (missing.len(), 0u64);
        let mut listing = Listing::of_scope(&self.target.opened, Scope::PROBES);
        let listed = tokio::time::timeout(LIST, async {
            while let Some(page) = listing.next().await? {
                for object in page {
                    others += u64::from(!missing.remove(&object.name));
                }
            }
            anyhow::Ok(())
        });
        match listed.await {
            Ok(Ok(())) if missing.is_empty() => ok(&format!("{count} values are listed")),
            Ok(Ok(())) => {
                let missing = missing.len();
                let text = format!(
                    "{missing} of {count} values are not listed: `lmc remote` cannot see all chunks of this store"
                );
                return Err(self.fault(&text));
            }
            Ok(Err(error)) => {
                return Err(self.fault(&format!(
                    "{error}; for a listing, S3 requires the permission s3:ListBucket"
                )));
            }
            Err(_) => note(
                "a listing takes more than 30 s: the store has very many keys, and `lmc remote du` and `rm` take long",
            ),
        }
        if others > 0 {
            note(&format!(
                "the store has {others} values of other checks: if no other check runs now, `lmc remote gc` removes them"
            ));
        }
        Ok(())
    }

    /// Reports properties that depend on the kind of store.
    async fn facts(&mut self) {
        let ahead = match &self.target.opened {
            Opened::File(store) => {
                match store.is_direct() {
                    true => ok("files are read and written without the page cache (O_DIRECT)"),
                    false => note(
                        "the file system does not support O_DIRECT: files go through the page cache, which costs memory and a copy",
                    ),
                }
                store.clock_ahead_ms()
            }
            Opened::Redis(store) => {
                match store.memory(step()).await {
                    Ok(nodes) => {
                        for (is_good, text) in nodes.iter().map(memory) {
                            match is_good {
                                true => ok(&text),
                                false => note(&text),
                            }
                        }
                    }
                    Err(error) => note(&format!(
                        "the store does not answer INFO memory ({error}): check by hand that maxmemory is set"
                    )),
                }
                // A login may lack the right to ask for the time.
                store.clock_ahead_ms(step()).await.ok().flatten()
            }
            Opened::S3(store) => store.clock_ahead_ms(),
            _ => None,
        };
        match ahead {
            None => note("the store's clock is not known"),
            Some(ms) if ms.abs() < SKEW_MS => ok(&format!("the store's clock is {}", skew(ms))),
            Some(ms) => note(&format!(
                "the store's clock is {}: set both by NTP; ages count by the store's clock, and S3 refuses requests that are 15 minutes off",
                skew(ms)
            )),
        }
    }

    /// Removes the written values.
    async fn clean_up(&mut self) {
        let names: Vec<Name> = self.written.drain().collect();
        if names.is_empty() {
            return;
        }
        let removed = self.store.remove(&names, Instant::now() + LIST).await;
        let failed = removed.into_iter().find_map(Result::err);
        if let Some(error) = failed {
            let doing = "removing the written values (`lmc remote gc` removes them later)";
            self.failed(doing, &error);
            return;
        }
        let keys = names.iter().filter_map(|name| name.value());
        let keys: Vec<ValueName> = keys.take(MOST).collect();
        let heads = self.store.heads(&keys, step()).await;
        match heads.into_iter().find(|head| !matches!(head, Ok(None))) {
            None => ok("the written values are removed"),
            Some(Ok(_)) => _ = self.fault("a removed value still exists: remove any cache between this host and the store, and check whether the bucket keeps versions"),
            Some(Err(error)) => _ = self.failed("looking for a removed value", &error),
        }
    }
}

fn skew(ms: i64) -> String {
    let (by, side) = (
        ms.unsigned_abs(),
        if ms < 0 { "behind" } else { "ahead of" },
    );
    match by {
        0..1000 => "within a second of this host's clock".to_owned(),
        _ => format!("{} s {side} this host's clock", by / 1000),
    }
}

fn random(n: u64) -> u64 {
    RandomState::new().hash_one(n)
}

fn new_key() -> ValueName {
    let mut bytes = [0; 32];
    for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&random(n as u64).to_le_bytes());
    }
    probe(bytes)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
