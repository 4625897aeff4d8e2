//! Parts of both sides: flags, an arena, its pool, and a channel over it.

use std::error::Error;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot};
use lmc_transfer::conformance::fill_value;
use lmc_transfer::{Address, ChannelConfig, Key, OnConnect, Rights, SocketConfig, TransferChannel};

use crate::pattern;

pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// Name of the serving side.
pub(crate) const SERVER: &str = "serve";

/// The key of both sides.
const KEY: &[u8] = b"the key that the two sides share";

/// Flags after the verb.
#[derive(Clone)]
pub(crate) struct Flags {
    /// Address of the control connection, `HOST:PORT`.
    pub(crate) address: String,
    /// `socket` or `nixl`.
    pub(crate) kind: String,
    /// NIXL's backend.
    pub(crate) backend: String,
    /// Address that the channel listens at; a port that is free unless given.
    pub(crate) at: Option<Address>,
    /// Bytes of each side's arena.
    pub(crate) arena: usize,
    /// Bytes of the largest batch of the sweep; 0 for no sweep.
    pub(crate) sweep: u64,
    /// Timeout of one operation.
    pub(crate) timeout: Duration,
    /// Timeout of everything together.
    pub(crate) limit: Duration,
}

impl Flags {
    pub(crate) fn parse(address: &str, args: &[String]) -> Result<Self, Failure> {
        let mut flags = Self {
            address: address.to_owned(),
            kind: "socket".to_owned(),
            backend: "UCX".to_owned(),
            at: None,
            arena: 256 << 20,
            sweep: 64 << 20,
            timeout: Duration::from_secs(20),
            limit: Duration::from_secs(300),
        };
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            let value = args.next().ok_or_else(|| format!("{flag} takes a value"))?;
            let number = || {
                let number = value.parse::<u32>();
                number.map_err(|_| format!("{flag} takes a number, found {value:?}"))
            };
            match flag.as_str() {
                "--channel" => flags.kind.clone_from(value),
                "--backend" => flags.backend.clone_from(value),
                "--at" => flags.at = Some(value.parse()?),
                "--arena-mib" => flags.arena = (number()? as usize) << 20,
                "--sweep-kib" => flags.sweep = u64::from(number()?) << 10,
                "--timeout" => flags.timeout = Duration::from_secs(number()?.into()),
                "--limit" => flags.limit = Duration::from_secs(number()?.into()),
                other => return Err(format!("unknown flag {other:?}").into()),
            }
        }
        Ok(flags)
    }

    /// The flags as they would be typed, without `--at`.
    pub(crate) fn typed(&self) -> Vec<String> {
        let pairs = [
            ("--channel", self.kind.clone()),
            ("--backend", self.backend.clone()),
            ("--arena-mib", (self.arena >> 20).to_string()),
            ("--sweep-kib", (self.sweep >> 10).to_string()),
            ("--timeout", self.timeout.as_secs().to_string()),
            ("--limit", self.limit.as_secs().to_string()),
        ];
        let words = pairs.map(|(flag, value)| [flag.to_owned(), value]);
        words.into_iter().flatten().collect()
    }
}

/// A channel with the pool of the arena that it registered.
pub(crate) struct Side {
    pub(crate) pool: Pool,
    pub(crate) channel: Arc<dyn TransferChannel>,
}

impl Side {
    /// A channel that listens on `host`.
    pub(crate) fn open(
        flags: &Flags,
        name: &str,
        host: IpAddr,
        on_connect: Option<OnConnect>,
    ) -> Result<Self, Failure> {
        Self::open_with_key(flags, name, host, on_connect, KEY)
    }

    /// Opens a channel with another key.
    pub(crate) fn open_with_key(
        flags: &Flags,
        name: &str,
        host: IpAddr,
        on_connect: Option<OnConnect>,
        key: &[u8],
    ) -> Result<Self, Failure> {
        let arena = Arc::new(ArenaConfig::anonymous(flags.arena).build()?);
        let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
        let mut config = ChannelConfig::new(name.parse()?, arena);
        config.on_connect = on_connect;
        config.keys = Some(Key::new(key)?.into());
        config.open_arena = true;
        config.rights = Rights::ReadWrite;
        config.handshake_timeout = flags.timeout;
        let at = flags.at.clone().unwrap_or_else(|| Address::Tcp {
            host: host.to_string(),
            port: 0,
        });
        let channel = channel(flags, config, at)?;
        Ok(Self { pool, channel })
    }

    /// Objects of these sizes.
    pub(crate) fn objects(&self, sizes: &[u64], seed: u64) -> Result<Vec<SealedSlot>, Failure> {
        let mut objects = Vec::with_capacity(sizes.len());
        for (number, &size) in sizes.iter().enumerate() {
            let mut slot = self.reserve(size)?;
            fill_value(seed, number, slot.bytes_mut());
            objects.push(slot.written().seal());
        }
        Ok(objects)
    }

    /// Slots of these sizes that hold no object.
    pub(crate) fn targets(&self, sizes: &[u64]) -> Result<Vec<ReservedSlot>, Failure> {
        let mut slots = Vec::with_capacity(sizes.len());
        for &size in sizes {
            let mut slot = self.reserve(size)?;
            pattern::clear(slot.bytes_mut());
            slots.push(slot);
        }
        Ok(slots)
    }

    pub(crate) fn reserve(&self, size: u64) -> Result<ReservedSlot, Failure> {
        let slot = self.pool.reserve(size);
        slot.ok_or_else(|| format!("no capacity for {size} bytes: --arena-mib is too small").into())
    }
}

fn channel(
    flags: &Flags,
    config: ChannelConfig,
    at: Address,
) -> Result<Arc<dyn TransferChannel>, Failure> {
    match flags.kind.as_str() {
        "socket" => Ok(Arc::new(SocketConfig::new(config, at).build()?)),
        #[cfg(feature = "nixl")]
        "nixl" => {
            let mut nixl = lmc_transfer::NixlConfig::default();
            nixl.backend.clone_from(&flags.backend);
            let mut config = SocketConfig::new(config, at);
            config.nixl = Some(nixl.open(&config.channel)?);
            Ok(Arc::new(config.build()?))
        }
        other => Err(format!("this program was built without a channel {other:?}").into()),
    }
}
