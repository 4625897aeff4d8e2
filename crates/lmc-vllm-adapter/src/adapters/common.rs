//! The values that both adapters share: the engine's description, and the connected server.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::adapters::link::Link;
use crate::adapters::log::{Level, Log};
use crate::adapters::{AdapterError, EngineDescription, Prompt, Timeouts};
use crate::protocol::{
    ABANDON_EARLIER, CacheKey, ENGINE_KEYS, IdentityDigest, NOTICES, POOL_DESCRIPTOR, Reply,
    Request, RequestConfigs, UNITS, WAIT_LOOKUP,
};

/// Properties of a server that requests depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) chunk_size: u32,
    /// True if the server understands identities and chunk hashes in keys.
    pub(crate) engine_keys: bool,
    /// True if the server releases the slots of a worker's earlier connections on request.
    pub(crate) abandon_earlier: bool,
    /// True if the server passes the pool's descriptor over this connection.
    pub(crate) pool_descriptor: bool,
    /// True if the server reports where the chunks of a lookup came from.
    pub(crate) wait_lookup: bool,
    /// True if the engine keeps tails and the server accepts them.
    pub(crate) tails: bool,
    /// True if the server sends notices of the ends of stores.
    pub(crate) notices: bool,
}

impl Server {
    /// Returns true if the server understands the name of a prompt.
    pub(crate) fn understands(self, prompt: &Prompt) -> bool {
        match prompt {
            Prompt::Tokens(_) => true,
            Prompt::Chunks(_) | Prompt::Blocks(_) => self.engine_keys,
            Prompt::Tail(_) => self.tails,
        }
    }
}

/// State of the connection to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerState {
    /// True if a server is connected.
    pub is_healthy: bool,
    /// Tokens of one chunk; 0 until a server has been connected.
    pub chunk_size: u32,
    /// The engine's blocks of one chunk; 0 until a server has been connected.
    pub num_blocks_per_chunk: u32,
    /// True if prompts are named by the engine's block hashes.
    pub hash_mode: bool,
    /// True if the engine keeps tails and the server accepts them.
    pub tails: bool,
    /// True if the server sends notices of the ends of stores.
    pub notices: bool,
}

/// The engine's description and the connected server.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) engine: EngineDescription,
    pub(crate) timeouts: Timeouts,
    pub(crate) log: Arc<Log>,
    identity: IdentityDigest,
    /// Name of the model for servers that know no identities: one for each identity.
    own_model: String,
    /// The last server; its chunk size stays when it is gone.
    server: Mutex<Option<Server>>,
    /// Chunk size of the last server whose chunks are not whole blocks.
    refused: Mutex<Option<u32>>,
}

impl Common {
    pub(crate) fn new(engine: EngineDescription, timeouts: Timeouts) -> Result<Self, AdapterError> {
        if engine.block_size == 0 || engine.world_size == 0 || engine.num_kv_readers == 0 {
            let text = "block_size, world_size and num_kv_readers must be 1 or more";
            return Err(AdapterError::Invalid(text.to_owned()));
        }
        let digest = blake3::hash(engine.identity.as_bytes()).to_hex();
        Ok(Self {
            timeouts,
            log: Arc::default(),
            identity: IdentityDigest::of(&engine.identity),
            own_model: format!("{}+lmc-{}", engine.model, &digest[..16]),
            server: Mutex::default(),
            refused: Mutex::default(),
            engine,
        })
    }

    /// Returns the last server that was connected.
    pub(crate) fn server(&self) -> Option<Server> {
        *self.server.lock()
    }

    /// Returns the state of the connection.
    pub(crate) fn state(&self, link: &Link) -> ServerState {
        let server = self.server();
        let chunk_size = server.map_or(0, |server| server.chunk_size);
        ServerState {
            is_healthy: link.session() != 0,
            chunk_size,
            num_blocks_per_chunk: chunk_size / self.engine.block_size,
            hash_mode: self.engine.hash_mode && server.is_some_and(|server| server.engine_keys),
            tails: server.is_some_and(|server| server.tails),
            notices: server.is_some_and(|server| server.notices),
        }
    }

    /// Returns the next of the requests that ask for the server's properties; `None` after them.
    ///
    /// # Errors
    /// The reason why this server cannot be used.
    pub(crate) fn next_setup(&self, replies: &[Reply]) -> Result<Option<Request>, String> {
        match replies {
            [] => Ok(Some(Request::GetChunkSize)),
            [_] => Ok(Some(Request::GetExperimental)),
            [Reply::Int(chunk_size), Reply::Strings(capabilities)] => {
                let chunk_size = u32::try_from(*chunk_size).unwrap_or(0);
                let knows = |name| capabilities.iter().any(|known| known == name);
                let engine = &self.engine;
                let wants_tails =
                    engine.tails && engine.hash_mode && chunk_size > engine.block_size;
                self.connected(Server {
                    chunk_size,
                    tails: wants_tails && knows(ENGINE_KEYS) && knows(UNITS),
                    engine_keys: knows(ENGINE_KEYS),
                    abandon_earlier: knows(ABANDON_EARLIER),
                    pool_descriptor: knows(POOL_DESCRIPTOR),
                    wait_lookup: knows(WAIT_LOOKUP),
                    notices: knows(NOTICES),
                })?;
                Ok(None)
            }
            _ => Err(format!("unexpected answers to the setup: {replies:?}")),
        }
    }

    /// Checks a server that was connected, and keeps its properties.
    fn connected(&self, server: Server) -> Result<(), String> {
        let (chunk_size, block_size) = (server.chunk_size, self.engine.block_size);
        if chunk_size == 0 {
            return Err("its chunk size is 0".to_owned());
        }
        if !chunk_size.is_multiple_of(block_size) {
            *self.refused.lock() = Some(chunk_size);
            let error = AdapterError::ChunkSize {
                chunk_size,
                block_size,
            };
            return Err(error.to_string());
        }
        let mut known = self.server.lock();
        // The engine's counts of chunks would mean something else.
        if let Some(known) = *known
            && known.chunk_size != chunk_size
        {
            return Err(format!(
                "its chunk size is {chunk_size}, it was {} before: restart the engine, or the \
                 server with the former --chunk-size",
                known.chunk_size
            ));
        }
        if self.engine.hash_mode && !server.engine_keys && known.is_none() {
            let text = "the server understands no block hashes: prompts are named by their \
                        tokens, and requests with images or embeddings are not cached";
            self.log.push(Level::Warning, text.to_owned());
        }
        *known = Some(server);
        Ok(())
    }

    /// Waits for the first server, or for a server whose chunks do not fit the engine.
    ///
    /// # Errors
    /// [`AdapterError::ChunkSize`] where the server's chunks are not whole blocks of the engine.
    pub(crate) fn wait_for_server(&self, link: &Link) -> Result<(), AdapterError> {
        let is_refused = || self.refused.lock().is_some();
        if !link.wait_until_up(self.timeouts.start, is_refused)
            && let Some(chunk_size) = *self.refused.lock()
        {
            return Err(AdapterError::ChunkSize {
                chunk_size,
                block_size: self.engine.block_size,
            });
        }
        Ok(())
    }

    /// Returns the model's name for a server.
    pub(crate) fn model(&self, server: Server) -> &str {
        match server.engine_keys {
            true => &self.engine.model,
            false => &self.own_model,
        }
    }

    /// Returns a key for a range of a prompt's tokens.
    pub(crate) fn key(
        &self,
        server: Server,
        request_id: &str,
        prompt: &Prompt,
        range: Range<usize>,
        cache_salt: &str,
        configs: &RequestConfigs,
    ) -> CacheKey {
        let mut key = CacheKey {
            model_name: self.model(server).to_owned(),
            world_size: self.engine.world_size,
            request_id: request_id.to_owned(),
            cache_salt: cache_salt.to_owned(),
            num_kv_readers: self.engine.num_kv_readers,
            identity: server.engine_keys.then_some(self.identity),
            configs: configs.clone(),
            ..CacheKey::default()
        };
        prompt.name(&mut key, range, server.chunk_size, self.engine.block_size);
        key
    }
}
