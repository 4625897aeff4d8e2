//! Resolution of the peers' names to addresses, repeated from time to time.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lmc_backend::now;
use tokio::task::JoinHandle;

use crate::link::timeout_at;
use crate::peers::Failure;

/// Time between two resolutions of a name.
const RESOLVE_EVERY: Duration = Duration::from_secs(30);
/// Time after which a failed resolution is retried.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// Longest wait for a look-up. The look-up continues afterwards, because a system call that has begun cannot
/// be cancelled.
const LOOKUP_WAIT: Duration = Duration::from_secs(2);
/// Most addresses of one name.
const MAX_ADDRESSES: usize = 64;

/// A name and its addresses.
#[derive(Debug, Default)]
struct Name {
    /// Addresses of the last successful look-up.
    addresses: Vec<SocketAddr>,
    /// Reason why the last look-up failed.
    failure: Option<Failure>,
    /// The look-up in progress.
    lookup: Option<JoinHandle<io::Result<Vec<SocketAddr>>>>,
    /// Time of the next look-up; `None` before the first.
    next: Option<Instant>,
}

/// Names with their addresses. Each name has at most one look-up in progress.
#[derive(Debug)]
pub(crate) struct Names(BTreeMap<String, Name>);

impl Names {
    pub(crate) fn new<'a>(names: impl IntoIterator<Item = &'a String>) -> Self {
        let names = names.into_iter();
        Self(names.map(|name| (name.clone(), Name::default())).collect())
    }

    /// Resolves the names whose look-up is due. A name that cannot be resolved keeps its addresses. Returns
    /// true if addresses may have changed.
    pub(crate) async fn resolve<F>(&mut self, lookup: impl Fn(String) -> F) -> bool
    where
        F: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        let due = |name: &Name| name.lookup.is_none() && name.next.is_none_or(|at| at <= now());
        let mut begun = Vec::new();
        for (text, name) in self.0.iter_mut().filter(|(_, name)| due(name)) {
            begun.push(text.clone());
            name.lookup = Some(tokio::spawn(lookup(text.clone())));
        }
        let wait_until = now() + LOOKUP_WAIT;
        let ends = self.0.iter_mut().filter_map(|(text, name)| {
            let ended = name.lookup.as_ref().is_some_and(JoinHandle::is_finished);
            let waited_for = ended || begun.contains(text);
            waited_for.then_some(async move {
                let found = timeout_at(wait_until, name.lookup.as_mut()?).await?;
                name.lookup = None;
                let found = found.unwrap_or_else(|error| Err(io::Error::other(error)));
                let pause = match found {
                    Ok(mut found) => {
                        found.truncate(MAX_ADDRESSES);
                        name.addresses = found;
                        name.failure = None;
                        RESOLVE_EVERY
                    }
                    Err(error) => {
                        let failure = Failure::new(error.to_string(), now());
                        let before = name.failure.replace(failure);
                        if before.is_none_or(|before| before.reason != error.to_string()) {
                            tracing::warn!(name = %text, %error, "the name of a peer cannot be resolved; retrying every 5 s");
                        }
                        RETRY_AFTER
                    }
                };
                name.next = Some(now() + pause);
                Some(())
            })
        });
        join_all(ends).await.contains(&Some(()))
    }

    /// Returns the addresses of a name.
    pub(crate) fn get(&self, name: &String) -> Option<&[SocketAddr]> {
        self.0.get(name).map(|name| &name.addresses[..])
    }

    /// Returns the names with their addresses, and the reason if the last look-up failed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &[SocketAddr], Option<&Failure>)> {
        self.0
            .iter()
            .map(|(text, name)| (text, &name.addresses[..], name.failure.as_ref()))
    }

    /// Returns the addresses of all names.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.0
            .values()
            .flat_map(|name| name.addresses.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    /// One name that could not be resolved once caused a look-up of every name in each second.
    #[tokio::test(start_paused = true)]
    async fn each_name_is_looked_up_in_its_own_time() {
        let asked = Arc::new(Mutex::new(BTreeMap::new()));
        let names = ["good", "bad", "hangs", "good"].map(str::to_owned);
        let mut names = Names::new(&names);
        let begun = now();
        while now() < begun + Duration::from_secs(28) {
            let resolved = names.resolve(|name| {
                *asked.lock().entry(name.clone()).or_insert(0) += 1;
                async move {
                    match &name[..] {
                        "good" => Ok(vec![SocketAddr::from(([10, 0, 0, 1], 7700))]),
                        "bad" => Err(io::ErrorKind::NotFound.into()),
                        _ => std::future::pending().await,
                    }
                }
            });
            resolved.await;
            assert_eq!(names.addresses().count(), 1);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let asked = asked.lock().clone();
        let expected = [("bad", 6), ("good", 1), ("hangs", 1)];
        assert!(
            asked
                .iter()
                .map(|(name, count)| (&name[..], *count))
                .eq(expected),
            "{asked:?}"
        );
    }
}
