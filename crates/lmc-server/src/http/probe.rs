//! Health of the engines' side, checked over a separate connection, as engines ask.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{Client, Reply, Request, Service, ServiceStatus};
use tokio::sync::Semaphore;

/// Timeout of the engines' socket and of the service's state.
const DEADLINE: Duration = Duration::from_secs(2);
/// Checks that may be stuck at a time; a stuck server must not use a thread for every scrape.
const AT_ONCE: usize = 8;

/// Checks a service from outside.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    service: Service,
    engines: SocketAddr,
    free: Arc<Semaphore>,
}

impl Probe {
    /// Makes the probe of a service whose engines connect to `engines`.
    pub(super) fn new(service: Service, mut engines: SocketAddr) -> Self {
        // A wildcard address is for listening; connections need an address.
        match engines {
            SocketAddr::V4(v4) if v4.ip().is_unspecified() => {
                engines.set_ip(Ipv4Addr::LOCALHOST.into());
            }
            SocketAddr::V6(v6) if v6.ip().is_unspecified() => {
                engines.set_ip(Ipv6Addr::LOCALHOST.into());
            }
            _ => {}
        }
        let free = Arc::new(Semaphore::new(AT_ONCE));
        Self {
            service,
            engines,
            free,
        }
    }

    /// Returns a probe that does not wait for the checks of this one.
    pub(crate) fn alone(&self) -> Self {
        Self {
            free: Arc::new(Semaphore::new(AT_ONCE)),
            ..self.clone()
        }
    }

    /// Asks the engines' own socket, then the state behind it. Returns the state, or names what is stuck.
    pub(crate) async fn run(&self) -> Result<ServiceStatus, String> {
        self.engines().await?;
        self.status().await
    }

    /// Asks the engines' own socket.
    pub(crate) async fn engines(&self) -> Result<(), String> {
        let engines = self.engines;
        let asked = self.within_deadline("the engines' socket", move || {
            let mut client = Client::connect(engines, DEADLINE)?;
            client.ask(&Request::Noop)
        });
        match asked.await? {
            Ok(Reply::Text(_)) => Ok(()),
            Ok(other) => Err(stuck(format!("the engines' socket answered {other:?}"))),
            Err(error) => Err(stuck(format!(
                "the engines' socket does not answer: {error}"
            ))),
        }
    }

    /// Returns the state of the service.
    pub(crate) async fn status(&self) -> Result<ServiceStatus, String> {
        let service = self.service.clone();
        self.within_deadline("the service", move || service.status(Instant::now()))
            .await
    }

    /// Runs a check that may block on a thread for blocking work.
    async fn within_deadline<T: Send + 'static>(
        &self,
        what: &str,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let free = Arc::clone(&self.free);
        let looked = async move {
            let permit = free
                .acquire_owned()
                .await
                .expect("the semaphore is never closed");
            tokio::task::spawn_blocking(move || {
                // Released when the check ends, also after the deadline.
                let _permit = permit;
                look()
            })
            .await
        };
        match tokio::time::timeout(DEADLINE, looked).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(stuck(format!("{what} failed: {error}"))),
            Err(_) => Err(stuck(format!(
                "{what} does not answer within {} s",
                DEADLINE.as_secs()
            ))),
        }
    }
}

/// Adds the remedy to the reason why engines are not served.
fn stuck(reason: String) -> String {
    format!("{reason}: read the server's log, and restart the server if this lasts")
}
