//! Settings of the tier.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::BootClock;

/// Settings of a [`RemoteTier`](super::RemoteTier).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteConfig {
    /// Name of the tier in logs and metrics. Default: `remote`.
    pub name: String,
    /// Time for which a key that the store lacks is not looked up again. Default: 2 s.
    pub absent_ttl: Duration,
    /// Most keys that are remembered as absent. Default: 65,536.
    pub max_absent: usize,
    /// Time after which a missing answer of the store counts as a failure, even if the caller waits for less.
    /// Default: 2 s.
    pub timeout: Duration,
    /// Pause between two reads of the clears that other daemons have passed on. The store is used only if the
    /// last read was within three such pauses. Default: 2 s.
    pub clears_interval: Duration,
    /// Clock for the time since that read. Default: `CLOCK_BOOTTIME`.
    pub boot_clock: BootClock,
    /// Pause before the clears are read again after a failure, and before a request tries a path of the store
    /// that was taken out: the first pause, and the longest one. Default: 250 ms and 15 s.
    pub probe_pause: (Duration, Duration),
    /// Digest of salts in descriptions of spaces, under a key that an operator has. Default: none; all spaces
    /// with a salt look alike.
    pub salt_digest: Option<SaltDigest>,
}

type Digest = dyn Fn(&str) -> [u8; 16] + Send + Sync;

/// A function that returns the digest of a salt.
#[derive(Clone)]
pub struct SaltDigest(Arc<Digest>);

impl SaltDigest {
    /// Makes digests by a function of the salt.
    pub fn new(digest: impl Fn(&str) -> [u8; 16] + Send + Sync + 'static) -> Self {
        Self(Arc::new(digest))
    }

    pub(super) fn of(&self, salt: &str) -> [u8; 16] {
        (self.0)(salt)
    }
}

impl fmt::Debug for SaltDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SaltDigest")
    }
}

impl RemoteConfig {
    /// Returns the settings of the nth store of a program, counted from 0. The stores are named `remote`,
    /// `remote2`, `remote3`.
    pub fn nth(number: usize) -> Self {
        let mut this = Self::default();
        if number > 0 {
            this.name += &(number + 1).to_string();
        }
        this
    }
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            name: "remote".to_owned(),
            absent_ttl: Duration::from_secs(2),
            max_absent: 65_536,
            timeout: Duration::from_secs(2),
            clears_interval: Duration::from_secs(2),
            boot_clock: BootClock::default(),
            probe_pause: (Duration::from_millis(250), Duration::from_secs(15)),
            salt_digest: None,
        }
    }
}
