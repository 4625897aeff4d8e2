//! Warns of chunks that lower tiers lose or do not return. Stores and lookups succeed without these
//! chunks, so no client reports them.

use std::time::Duration;

use lmc_engine::LowerStatus;
use lmc_vllm_adapter::Service;
use tokio::sync::watch;
use tokio::time::{Instant, interval};
use tracing::warn;

/// Time between two reads of the counters.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Name of the tier of peers.
const PEERS: &str = "peers";
/// Shortest time between two warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Chunks that a tier has lost or did not return.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Losses {
    dropped: u64,
    write_failed: u64,
    promote_failed: u64,
}

/// Warns until `stopped` turns true: of the first loss at once, of later losses once a minute.
pub(crate) async fn watch(service: Service, mut stopped: watch::Receiver<bool>) {
    if !service.engine().has_lower_tiers() {
        return;
    }
    let mut news = News::default();
    let mut every = interval(LOOK_EVERY);
    loop {
        tokio::select! {
            _ = every.tick() => {}
            _ = stopped.wait_for(|&stop| stop) => return,
        }
        for (tier, losses) in news.of(&service.engine().lower_status(), Instant::now()) {
            warn_of(&tier, losses);
        }
    }
}

/// The logged losses, and the time of the last warning.
#[derive(Default)]
struct News {
    reported: Vec<Losses>,
    last: Option<Instant>,
}

impl News {
    /// Returns the tiers that have lost chunks since the last warning, if another warning is due.
    fn of(&mut self, tiers: &[LowerStatus], now: Instant) -> Vec<(String, Losses)> {
        if self.last.is_some_and(|last| now < last + WARN_EVERY) {
            return Vec::new();
        }
        self.reported.resize(tiers.len(), Losses::default());
        let mut news = Vec::new();
        for (tier, reported) in tiers.iter().zip(&mut self.reported) {
            let since = Losses {
                dropped: tier.write_dropped - reported.dropped,
                write_failed: tier.write_failed - reported.write_failed,
                promote_failed: tier.promote_failed - reported.promote_failed,
            };
            if since != Losses::default() {
                news.push((tier.tier.clone(), since));
                reported.dropped = tier.write_dropped;
                reported.write_failed = tier.write_failed;
                reported.promote_failed = tier.promote_failed;
                self.last = Some(now);
            }
        }
        news
    }
}

/// A loss of chunks, with its remedy.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Warning {
    Dropped,
    WriteFailed,
    ReadFailed,
    PeerReadFailed,
}

impl Warning {
    /// Returns the warnings of a tier's losses, each with the number of chunks.
    fn of(tier: &str, losses: Losses) -> impl Iterator<Item = (Self, u64)> {
        let read_failed = match tier {
            PEERS => Self::PeerReadFailed,
            _ => Self::ReadFailed,
        };
        let all = [
            (Self::Dropped, losses.dropped),
            (Self::WriteFailed, losses.write_failed),
            (read_failed, losses.promote_failed),
        ];
        all.into_iter().filter(|(_, chunks)| *chunks > 0)
    }

    fn text(self) -> &'static str {
        match self {
            Self::Dropped => {
                "chunks were not written to a lower tier because they arrive faster than the tier writes; they will be misses once the nearer tiers evict them; write less with --disk-admit, --remote-admit or --remote-salts, or add drives"
            }
            Self::WriteFailed => {
                "chunks could not be written to a lower tier, and will be misses once memory evicts them: GET /status shows the tier's fault"
            }
            Self::ReadFailed => {
                "chunks could not be read from a lower tier, and are recomputed: GET /status shows the tier's fault"
            }
            Self::PeerReadFailed => {
                "chunks could not be read from a peer, and are recomputed: `lmc peers` shows which peer failed and why, and docs/p2p.md says what to do"
            }
        }
    }
}

fn warn_of(tier: &str, losses: Losses) {
    for (warning, chunks) in Warning::of(tier, losses) {
        warn!(tier, chunks, "{}", warning.text());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Until f2c35f9 no log line reported that 752 of 2,352 chunks never reached the disk.
    #[test]
    fn the_first_loss_is_reported_at_once_and_later_ones_together() {
        let mut disk = LowerStatus::default();
        disk.tier = "disk".to_owned();
        let mut news = News::default();
        let start = Instant::now();
        let mut look = |disk: &LowerStatus, seconds: u64| {
            let found = news.of(
                std::slice::from_ref(disk),
                start + Duration::from_secs(seconds),
            );
            found.first().map(|(_, losses)| *losses)
        };
        assert_eq!(look(&disk, 0), None);
        disk.write_dropped = 3;
        let dropped = |dropped| Losses {
            dropped,
            ..Losses::default()
        };
        assert_eq!(look(&disk, 1), Some(dropped(3)));
        disk.write_dropped = 700;
        assert_eq!(look(&disk, 2), None, "within a minute");
        disk.write_dropped = 752;
        assert_eq!(look(&disk, 61), Some(dropped(749)));
        assert_eq!(look(&disk, 200), None, "nothing since");
        disk.promote_failed = 1;
        let read_failed = Losses {
            promote_failed: 1,
            ..Losses::default()
        };
        assert_eq!(look(&disk, 201), Some(read_failed));
    }

    /// Reads that failed at a peer's death were once reported as chunks that a drive had lost.
    #[test]
    fn failed_reads_are_not_failed_writes_and_those_of_peers_are_named() {
        let losses = Losses {
            dropped: 0,
            write_failed: 2,
            promote_failed: 3,
        };
        let of = |tier| Warning::of(tier, losses).collect::<Vec<_>>();
        let write_failed = (Warning::WriteFailed, 2);
        assert_eq!(of("disk"), [write_failed, (Warning::ReadFailed, 3)]);
        assert_eq!(of(PEERS), [write_failed, (Warning::PeerReadFailed, 3)]);
    }

    /// For a shared store, the only remedy in the log once was to add drives.
    #[test]
    fn dropped_chunks_have_a_remedy_for_each_kind_of_tier() {
        let losses = Losses {
            dropped: 1,
            ..Losses::default()
        };
        for tier in ["disk", "remote", "remote2"] {
            let found = Warning::of(tier, losses).collect::<Vec<_>>();
            assert_eq!(found, [(Warning::Dropped, 1)]);
        }
        for setting in ["--disk-admit", "--remote-admit", "--remote-salts", "drives"] {
            assert!(Warning::Dropped.text().contains(setting), "{setting}");
        }
    }
}
