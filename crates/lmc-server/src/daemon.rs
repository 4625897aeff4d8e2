//! `lmc serve`: starts everything, waits for a signal, stops everything.

use std::io::ErrorKind;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lmc_backend::Backend;
use lmc_backend_p2p::P2pBackend;
use lmc_backend_remote::RemoteTier;
use lmc_engine::{EngineConfig, EngineContext, EngineHost, LowerTier, TierPolicy};
use lmc_key::ChunkHasher;
use lmc_memory::Arena;
use lmc_vllm_adapter::{Service, ServiceConfig, ZmqConfig};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};

use crate::config::{
    ConfigError, Loaded, LogFormat, SegmentName, ServeConfig, TierSettings, human_bytes,
    human_duration, is_loopback, policy_name,
};
use crate::http::{self, Http, Probe};
use crate::late_filter::LateFilter;
use crate::reload::Reload;
use crate::salts::SaltDigests;
use crate::signals::Signals;
use crate::start::Background;
use crate::supervisor::Supervisor;
use crate::text::error_text;
use crate::vllm::own_transfer_config;
use crate::{
    disk, log, losses, nixl, notices, occupant, peers, pool, remote, spans, state, transfer_config,
};

/// Serves until a signal, and returns the exit code of the process. `read` reads the settings again;
/// `background` is `None` unless `lmc start` has started this process.
pub(crate) fn run(
    loaded: Loaded,
    read: impl Fn() -> Result<Loaded, ConfigError> + Send + Sync + 'static,
    background: Option<Background>,
) -> ExitCode {
    nixl::set_variables(&loaded.config);
    if let Err(error) = log::to_stderr(&loaded.config.log_level, loaded.config.log_format) {
        eprintln!("lmc serve: cannot start threads: {error}");
        return ExitCode::FAILURE;
    }
    for warning in &loaded.warnings {
        warn!("{warning}");
    }
    for note in &loaded.notes {
        info!("{note}");
    }
    let format = loaded.config.log_format;
    let stop = start(loaded, read, background);
    if let Err(error) = &stop {
        match format {
            LogFormat::Text => log::print(&format!("lmc serve: {}", error_text(error))),
            LogFormat::Json => error!("{}", error_text(error)),
        }
    }
    log::flush();
    match stop {
        Ok(Stop::Clean) => ExitCode::SUCCESS,
        // A thread is stuck, and returning would wait for it. The pool's name is already removed.
        Ok(Stop::Forced) => std::process::exit(1),
        Ok(Stop::PoolLost) => ExitCode::from(POOL_LOST),
        Err(_) => ExitCode::FAILURE,
    }
}

/// Exit code of a server whose pool was lost; a restart creates a new pool.
const POOL_LOST: u8 = 3;

/// Time that the drives have to open, and the interval of log lines until they are open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(300);
const OPEN_NEWS: Duration = Duration::from_secs(10);

/// Time that the HTTP side has for the answers under way, after everything else has stopped.
const HTTP_STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// End of a server that had started.
enum Stop {
    /// Everything under way was answered.
    Clean,
    /// Stopped by a deadline or a second signal.
    Forced,
    /// Stopped in order, because another process took the pool's memory away.
    PoolLost,
}

fn start(
    loaded: Loaded,
    read: impl Fn() -> Result<Loaded, ConfigError> + Send + Sync + 'static,
    background: Option<Background>,
) -> Result<Stop> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let number = AtomicUsize::new(0);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(2, 8))
        .thread_name_fn(move || format!("lmc-net-{}", number.fetch_add(1, Ordering::Relaxed)))
        .enable_all()
        .build()
        .context("cannot start threads")?;
    let stop = runtime.block_on(serve(loaded, read, background, cores));
    // Dropping the runtime would wait for a health check that is stuck.
    runtime.shutdown_background();
    stop
}

async fn serve(
    loaded: Loaded,
    read: impl Fn() -> Result<Loaded, ConfigError> + Send + Sync + 'static,
    background: Option<Background>,
    cores: usize,
) -> Result<Stop> {
    let started = Instant::now();
    let config = &loaded.config.clone();
    let mut signals = Signals::new()?;
    let supervisor = Supervisor::of_environment();
    // The ports first: a process that uses them most likely has the pool, too.
    let http_socket = bind_http(&config.http_host, config.http_port, "--http-port");
    let http_socket = match (ensure_free(config).await, http_socket.await) {
        (Ok(()), Ok(socket)) => socket,
        (Err(error), Ok(_)) | (Ok(()), Err(error)) => return Err(error),
        (Err(engines), Err(http)) => bail!("{engines:#}\nlmc serve: {http:#}"),
    };
    let metrics_socket = match config.prometheus_port {
        Some(port) => Some(bind_http(&config.host, port, "--prometheus-port").await?),
        None => None,
    };
    // The memory of a server that was killed may have to be freed first.
    supervisor.starting("creating the pool", OPEN_TIMEOUT);
    let arena = Arc::new(pool::make(config, cores)?);
    // Members of the directory may be peers of this server.
    let directory = peers::host_directory(config, &arena).inspect_err(|_| arena.unlink())?;
    let prepared = prepare(config, &arena, &mut signals, &supervisor).await;
    let Opened {
        service,
        digests,
        peers,
        stores,
    } = match prepared.inspect_err(|_| arena.unlink())? {
        Ok(opened) => opened,
        Err(stop) => {
            arena.unlink();
            return Ok(stop);
        }
    };
    let reload = Reload::new(loaded, read, service.clone(), digests);
    let reload = Arc::new(reload.inspect_err(|_| arena.unlink())?);
    let zmq = ZmqConfig {
        host: config.host.clone(),
        port: config.port,
        ipc_path: config.ipc_path.clone(),
        trusted_users: config.trusted_users.clone(),
        stop_timeout: config.shutdown_timeout,
        ..ZmqConfig::default()
    };
    let server = zmq.bind(service.clone()).await.map_err(|error| {
        let why = match error.address.starts_with("ipc://") {
            true => "the socket of --ipc-path cannot be opened: choose another path, or stop \
                         the server that listens there"
                .to_owned(),
            false => occupied(&error.source, config.port, "--port"),
        };
        anyhow!(error).context(why)
    })?;
    let address = server.local_addr();
    let http_address = http_socket
        .local_addr()
        .context("the HTTP socket has no address")?;
    summary(config, &service, &arena);
    warn_of_the_network(config);
    let scheme = match config.http_tls_cert {
        Some(_) => "https",
        None => "http",
    };
    let http_url = format!("{scheme}://{http_address}");
    let (stop, stopped) = watch::channel(false);
    let mut http = Http::new(service.clone(), address, Arc::clone(&reload));
    let probe = http.probe().alone();
    let changes = http.changes().clone();
    if let Some(Ok(address)) = metrics_socket.as_ref().map(TcpListener::local_addr) {
        info!("metrics alone on {scheme}://{address}/metrics (--prometheus-port)");
    }
    http.metrics_socket = metrics_socket;
    http.peers = peers;
    http.stores = stores;
    http.directory = directory.as_ref().map(|server| Arc::clone(server.host()));
    http.stopping = Some(stopped.clone());
    let (stop_http, http_stopped) = watch::channel(false);
    let http = tokio::spawn(http::serve(http_socket, http, http_stopped));
    if let Some(background) = &background {
        background.listens(&http_url);
    }
    let ticks = tokio::spawn(tick(service.clone(), background, stopped.clone()));
    let reloads = tokio::spawn(reload_on_signal(reload, signals.reload(), stopped.clone()));
    let losses = tokio::spawn(losses::watch(service.clone(), stopped.clone()));
    let (stop_notices, notices_stopped) = watch::channel(false);
    let notices = notices::send(
        service.clone(),
        config.pd_notify.clone(),
        notices_stopped.clone(),
    );
    let spans = spans::send(
        service.clone(),
        config.otlp_endpoint.clone(),
        notices_stopped,
    );
    let notices = tokio::spawn(async { tokio::join!(notices, spans) });
    let prefault = tokio::spawn(watch_prefault(Arc::clone(&arena), stopped.clone()));
    let for_watchdog = stopped.clone();
    let mut engines = tokio::spawn(server.run(stopped));
    info!(
        "listening for engines on tcp://{address}, HTTP on {http_url} \
         ({:.0} ms after the start)",
        started.elapsed().as_secs_f64() * 1e3
    );
    let for_vllm = match (&config.shm_name, &config.ipc_path) {
        (SegmentName::Sealed, Some(socket)) => own_transfer_config(socket),
        _ => transfer_config(&config.host, address.port(), config.transfer_mode),
    };
    info!(
        "for vLLM on this host, as the same user: vllm serve MODEL --kv-transfer-config \
         '{for_vllm}'"
    );
    supervisor.ready();
    let supervisor = Arc::new(supervisor);
    let watchdog = tokio::spawn({
        let supervisor = Arc::clone(&supervisor);
        async move { supervisor.watch(|| condition(&probe), for_watchdog).await }
    });
    let ended = tokio::select! {
        signal = signals.first() => signal,
        () = pool::lost(&arena) => {
            error!(
                "the pool was lost: a process truncated its shared memory, or /dev/shm had no page \
                 for a hole that a process punched; no chunk of the pool is served or written to disk any more; find the process that writes to {}, and start the server again",
                arena.shared_name().map_or_else(String::new, |name| name.path().display().to_string())
            );
            "the loss of the pool"
        }
        () = unused(|| service.connections(), config.exit_when_idle) => {
            "--exit-when-idle-seconds without an engine"
        }
        ended = &mut engines => {
            ended.context("serving engines failed")?;
            bail!("serving engines ended by itself");
        }
    };
    info!(
        "stopping after {ended}: finishing requests in flight (timeout {}); a second SIGTERM \
         or SIGINT stops at once",
        human_duration(config.shutdown_timeout)
    );
    supervisor.stopping(kill_timeout(config));
    stop.send_replace(true);
    let drained = async {
        let _ = tokio::join!(
            engines,
            changes.end(),
            ticks,
            reloads,
            losses,
            prefault,
            watchdog
        );
    };
    let closed = async {
        let deadline = Instant::now() + stop_timeout(config);
        let stop = tokio::select! {
            () = drained => Stop::Clean,
            () = tokio::time::sleep(config.shutdown_timeout + Duration::from_secs(1)) => {
                warn!("stopped at the timeout with requests in flight");
                Stop::Forced
            }
        };
        // Engines have stopped storing.
        stop_notices.send_replace(true);
        let _ = tokio::join!(notices, close_tiers(&service, deadline));
        stop_http.send_replace(true);
        // With a timeout, so that a client that does not read its answer does not delay the stop.
        let _ = tokio::time::timeout(HTTP_STOP_TIMEOUT, http).await;
        stop
    };
    let stop = tokio::select! {
        stop = closed => stop,
        signal = signals.second() => {
            stopped_at_once(signal, &service);
            Stop::Forced
        }
    };
    let stop = match stop {
        Stop::Clean if arena.is_lost() => Stop::PoolLost,
        stop => stop,
    };
    drop(directory);
    arena.unlink();
    info!(
        "stopped after {:.1} s of service",
        started.elapsed().as_secs_f64()
    );
    Ok(stop)
}

/// Warns of ports that other hosts can reach and nothing protects.
fn warn_of_the_network(config: &ServeConfig) {
    let open = |who: &str, host: &str, remedy: &str| {
        warn!(
            "{who} can reach this server from other hosts ({host}), and the server does not \
             authenticate them: {remedy}restrict access in the network, or listen on 127.0.0.1"
        );
    };
    if !is_loopback(&config.host) {
        open("engines", &config.host, "");
    }
    let metrics_host = config.prometheus_port.map(|_| &config.host);
    let mut is_token_bare = false;
    for (who, host) in [
        ("HTTP clients", Some(&config.http_host)),
        ("readers of metrics", metrics_host),
    ] {
        let Some(host) = host.filter(|host| !is_loopback(host)) else {
            continue;
        };
        match config.http_token_file {
            None => open(who, host, "set --http-token-file, "),
            Some(_) => is_token_bare |= config.http_tls_cert.is_none(),
        }
    }
    if is_token_bare {
        warn!("the HTTP token can be read on the network: set --http-tls-cert and --http-tls-key");
    }
}

fn stopped_at_once(signal: &str, service: &Service) {
    match service.engine().unwritten_bytes() {
        0 => warn!("stopped at once after a second {signal}"),
        unwritten => warn!(
            unwritten_bytes = unwritten,
            "stopped at once after a second {signal}: up to {} of chunks were not written to disk",
            human_bytes(unwritten)
        ),
    }
}

/// Timeout of a stop, with the writes to disk.
fn stop_timeout(config: &ServeConfig) -> Duration {
    config.shutdown_timeout + Duration::from_secs(5)
}

/// Timeout after which a service manager may kill a server that stops.
fn kill_timeout(config: &ServeConfig) -> Duration {
    stop_timeout(config) + Duration::from_secs(5)
}

/// Opens the tiers on a thread of its own, because a drive may not answer. Returns how the server stopped
/// if a signal comes first.
async fn prepare(
    config: &ServeConfig,
    arena: &Arc<Arena>,
    signals: &mut Signals,
    supervisor: &Supervisor,
) -> Result<Result<Opened, Stop>> {
    let mut made = {
        let (config, arena) = (config.clone(), Arc::clone(arena));
        tokio::task::spawn_blocking(move || make_service(&config, &arena))
    };
    let failed = "opening the tiers failed";
    let begun = Instant::now();
    loop {
        tokio::select! {
            made = &mut made => return Ok(Ok(made.context(failed)??)),
            signal = signals.first() => {
                supervisor.stopping(kill_timeout(config));
                warn!("stopping after {signal} once the tiers are open; a second signal stops at once");
                break;
            }
            () = tokio::time::sleep(OPEN_NEWS) => {}
        }
        let waited = begun.elapsed();
        if waited >= OPEN_TIMEOUT {
            bail!(
                "the disk tier did not open within {}: check whether its drives answer, or start \
                 without --disk",
                human_duration(OPEN_TIMEOUT)
            );
        }
        let news = format!(
            "opening the disk tier has taken {:.0} s so far",
            waited.as_secs_f64()
        );
        info!("{news}");
        supervisor.starting(&news, 3 * OPEN_NEWS);
    }
    let timeout = stop_timeout(config);
    let deadline = Instant::now() + timeout;
    tokio::select! {
        made = &mut made => {
            close_tiers(&made.context(failed)??.service, deadline).await;
            Ok(Err(Stop::Clean))
        }
        _ = signals.second() => Ok(Err(Stop::Forced)),
        () = tokio::time::sleep(timeout) => Ok(Err(Stop::Forced)),
    }
}

/// Waits for writes to lower tiers, and closes them.
async fn close_tiers(service: &Service, deadline: Instant) {
    if !service.engine().has_lower_tiers() {
        return;
    }
    let left = deadline.saturating_duration_since(Instant::now());
    info!(
        "flushing to lower tiers (timeout {:.0} s)",
        left.as_secs_f64()
    );
    let engine = service.engine().clone();
    let closed = tokio::task::spawn_blocking(move || engine.close(deadline)).await;
    let report = closed.unwrap_or_default();
    for (tier, reason) in &report.failed {
        warn!("tier {tier} was not closed: {reason}; chunks acknowledged as durable are kept");
    }
    if report.late + report.declined + report.write_failed > 0 {
        warn!(
            "chunks not written to lower tiers: {} for lack of time, {} declined, {} failed writes",
            report.late, report.declined, report.write_failed
        );
    }
}

/// Asks the engines' own socket, and the state behind it. A server may serve although its state is not known.
async fn condition(probe: &Probe) -> Result<&'static str, String> {
    probe.engines().await?;
    let status = probe.status().await;
    Ok(status.map_or("its state is not known", |status| http::condition(&status)))
}

/// Logs when all memory of the pool is present, or why it will not be.
async fn watch_prefault(arena: Arc<Arena>, mut stopped: watch::Receiver<bool>) {
    let started = Instant::now();
    let mut every = tokio::time::interval(Duration::from_millis(250));
    let mut warned = false;
    loop {
        tokio::select! {
            _ = every.tick() => {}
            _ = stopped.wait_for(|&stop| stop) => return,
        }
        let progress = arena.prefault_progress();
        if let Some(error) = progress.error
            && !warned
        {
            warned = true;
            warn!(
                "pool: only {} of {} are present: {error}",
                human_bytes(progress.done),
                human_bytes(progress.total),
            );
        }
        if progress.done >= progress.total {
            if progress.total > 0 {
                let seconds = started.elapsed().as_secs_f64();
                info!(
                    "pool: all {} are present, after {seconds:.1} s",
                    human_bytes(progress.total)
                );
            }
            return;
        }
    }
}

async fn tick(
    service: Service,
    background: Option<Background>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut every = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = every.tick() => {}
            _ = stopped.wait_for(|&stop| stop) => return,
        }
        // A tick may read files of /proc.
        let (service, background) = (service.clone(), background.clone());
        let ticked = tokio::task::spawn_blocking(move || {
            service.tick(Instant::now());
            if let Some(background) = background {
                background.keep_log_short();
            }
        });
        if let Err(error) = ticked.await {
            warn!(%error, "a periodic task failed; it runs again with the next tick");
        }
    }
}

/// Reads the settings again at each such signal.
async fn reload_on_signal(
    reload: Arc<Reload>,
    signal: Arc<Notify>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = signal.notified() => {}
            _ = stopped.wait_for(|&stop| stop) => return,
        }
        let reload = Arc::clone(&reload);
        let read = tokio::task::spawn_blocking(move || reload.now()).await;
        match read {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => warn!(
                "settings not reloaded; the old ones stay in effect: {}",
                error_text(&error)
            ),
            Err(error) => warn!(%error, "settings not reloaded; the old ones stay in effect"),
        }
    }
}

/// Returns once there was no connection for this long. `connections` returns the number of open connections
/// and the number of all since the start, so that a connection between two checks counts as well.
async fn unused(connections: impl Fn() -> (u64, u64), limit: Option<Duration>) {
    let Some(limit) = limit else {
        return std::future::pending().await;
    };
    let mut every = tokio::time::interval(Duration::from_secs(1).min(limit));
    let mut since = tokio::time::Instant::now();
    let mut before = 0;
    while since.elapsed() < limit {
        every.tick().await;
        let (open, accepted) = connections();
        if open > 0 || accepted != before {
            since = tokio::time::Instant::now();
        }
        before = accepted;
    }
}

async fn bind_http(host: &str, port: u16, flag: &str) -> Result<TcpListener> {
    TcpListener::bind((host, port)).await.map_err(|error| {
        let why = occupied(&error, port, flag);
        anyhow!(error)
            .context(format!("cannot listen on http://{host}:{port}"))
            .context(why)
    })
}

/// Fails early, with a better error text, when another server has the port.
async fn ensure_free(config: &ServeConfig) -> Result<()> {
    if config.port == 0 {
        return Ok(());
    }
    match TcpListener::bind((config.host.as_str(), config.port)).await {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            Err(anyhow!(occupied(&error, config.port, "--port")))
        }
        _ => Ok(()),
    }
}

/// Names the process that holds a port, and the remedy.
fn occupied(error: &std::io::Error, port: u16, flag: &str) -> String {
    if error.kind() != ErrorKind::AddrInUse {
        return format!(
            "port {port} cannot be opened: check {flag} and the host setting next to it"
        );
    }
    match occupant::of_port(port) {
        Some(holder) => {
            format!("port {port} is held by {holder}: stop it, or choose another {flag}")
        }
        None => format!(
            "port {port} is in use: stop the process that listens there, or choose another {flag}"
        ),
    }
}

/// The service, and the tiers that the operator asks about.
struct Opened {
    service: Service,
    digests: SaltDigests,
    peers: Option<Arc<P2pBackend>>,
    stores: Vec<Arc<RemoteTier>>,
}

fn make_service(config: &ServeConfig, arena: &Arc<Arena>) -> Result<Opened> {
    let mut engine = EngineConfig::default();
    engine.policy = config.eviction_policy;
    engine.align = usize::try_from(config.align_bytes).context("--l1-align-bytes")?;
    engine.high_watermark = config.eviction_watermark;
    let low = config.eviction_watermark - config.eviction_ratio;
    engine.low_watermark = low.max(config.eviction_watermark / 100.0);
    engine.promotion_timeout = config.read_timeout;
    engine.recompute_time = config.recompute_rate.map(|tokens_per_second| {
        Duration::from_secs_f64(config.chunk_size as f64 / tokens_per_second as f64)
    });
    if let Some(peers) = config.peers() {
        engine.pending_timeout = peers.pending_timeout;
    }
    // First the state file, then the drives, which may know more clears. Only then may tiers serve
    // chunks or ask other servers.
    let clears = state::open_clears(config)?;
    let host = EngineHost::new(clears);
    let on_disk = LateFilter::default();
    let mut drives = None;
    if let Some(settings) = config.disk() {
        let mut policy = TierPolicy::default();
        policy.write = settings.write;
        policy.admit = settings.admit;
        policy.fill = settings.fill;
        policy.spaces = on_disk.filter();
        policy.write_queue_bytes = Some(disk::max_writing(arena.len() as u64));
        let disk = disk::open(config, settings, arena, &host)?;
        host.learn_of(&*disk)?;
        drives = Some(LowerTier::new(disk, policy));
    }
    let peers = peers::open(config, arena, host.clone())?;
    let remotes = remote::open(config, &host)?;
    let mut of_stores = remotes.iter().map(remote::Remote::lower_tier);
    let lower = config.tiers.iter().filter_map(|tier| match tier {
        TierSettings::Disk(_) => drives.take(),
        TierSettings::Peers(settings) => {
            let mut policy = TierPolicy::default();
            policy.locate_timeout = settings.locate_timeout;
            let tier = Arc::clone(peers.as_ref()?) as Arc<dyn Backend>;
            Some(LowerTier::new(tier, policy))
        }
        TierSettings::Remote(_) => of_stores.next(),
    });
    let lower: Vec<LowerTier> = lower.collect();
    let stores = remotes.iter().map(remote::Remote::tier).collect();
    let engine = engine.start(EngineContext::new(Arc::clone(arena), host).with_tiers(lower))?;
    let service = service_config(config)?.start(engine)?;
    on_disk.decide(service.lasting_spaces());
    let digests = SaltDigests::new(remote::keys(config, config.remotes().next())?)?;
    for (store, remote) in config.remotes().zip(remotes) {
        let picked = store.salts.as_ref();
        let picked = picked.map(|salts| salts.iter().map(|salt| service.tenant(salt)).collect());
        remote.serve(&service, picked);
    }
    Ok(Opened {
        service,
        digests,
        peers,
        stores,
    })
}

fn service_config(config: &ServeConfig) -> Result<ServiceConfig> {
    let chunk_size = u32::try_from(config.chunk_size).context("--chunk-size")?;
    let mut service = ServiceConfig::new(ChunkHasher::new(config.hash_algorithm, chunk_size)?);
    service.identity = config.identity.clone();
    service.hash_memo_bytes = usize::try_from(config.hash_memo_size).context("--hash-memo-size")?;
    service.null_block_id = config.null_block_id;
    service.isolated_ipc = config.isolated_ipc;
    service.lookup_lease = config.read_ttl;
    service.transfer_deadline = config.write_ttl;
    service.session_ttl = config.session_ttl;
    service.reap_timeout = config.reap_timeout;
    service.registration_grace = config.registration_grace;
    service.orphan_grace = config.orphan_grace;
    service.slot_grace = config.slot_grace;
    service.kv_event_log_size = config.kv_event_log_size;
    service.request_log = config.request_log;
    service.max_usages = config.metrics_tenants;
    service.notices = !config.pd_notify.is_empty();
    service.max_spans = match config.otlp_endpoint {
        Some(_) => spans::MAX_QUEUED,
        None => 0,
    };
    if let Some(peers) = config.peers() {
        service.max_source_wait = peers.max_wait;
    }
    if let Some(threads) = config.copy_threads {
        service.copy_threads = threads;
    }
    Ok(service)
}

/// Logs the most important settings in a few lines.
fn summary(config: &ServeConfig, service: &Service, arena: &Arena) {
    let report = arena.report();
    let backing = match arena.shared_name() {
        Some(name) => format!("shared memory {}", name.path().display()),
        None if arena.shared_file().is_some() => {
            "sealed memory without a name: only lmc's own connector can map it".to_owned()
        }
        None => "private memory: workers that copy by themselves are refused".to_owned(),
    };
    info!(
        "pool: {} in {backing}{}{}",
        human_bytes(report.bytes as u64),
        if report.huge_pages {
            ", huge pages"
        } else {
            ""
        },
        if report.locked { ", locked" } else { "" },
    );
    info!(
        "chunks of {} tokens, hashed with {}, evicted by {} above {:.0} %",
        config.chunk_size,
        service.config().hasher.algorithm(),
        policy_name(config.eviction_policy),
        config.eviction_watermark * 100.0,
    );
    if !config.identity.is_empty() {
        info!(
            "--identity {:?} is part of every chunk's key",
            config.identity.as_str()
        );
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use parking_lot::Mutex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_ends_after_the_limit_without_a_connection() {
        let counts = Mutex::new((1, 1));
        let limit = Some(Duration::from_secs(600));
        let mut unused = std::pin::pin!(unused(|| *counts.lock(), limit));
        let ends_within = async |unused: &mut Pin<&mut _>, seconds| {
            let time = Duration::from_secs(seconds);
            tokio::time::timeout(time, unused).await.is_ok()
        };
        assert!(!ends_within(&mut unused, 1_000).await, "one is open");
        *counts.lock() = (0, 1);
        assert!(!ends_within(&mut unused, 595).await);
        // A connection was open between two checks.
        *counts.lock() = (0, 2);
        assert!(!ends_within(&mut unused, 595).await);
        assert!(ends_within(&mut unused, 10).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_without_a_limit_goes_on() {
        let unused = unused(|| (0, 0), None);
        let year = Duration::from_secs(365 * 24 * 3600);
        assert!(tokio::time::timeout(year, unused).await.is_err());
    }

    #[test]
    fn the_settings_begin_as_the_service_does() {
        let config = ServeConfig::load([], [], None).expect("valid").config;
        let found = service_config(&config).expect("valid");
        let expected = ServiceConfig::new(found.hasher);
        let times = |service: &ServiceConfig| {
            [
                service.lookup_lease,
                service.transfer_deadline,
                service.session_ttl,
                service.reap_timeout,
                service.registration_grace,
                service.orphan_grace,
                service.slot_grace,
            ]
        };
        assert_eq!(times(&found), times(&expected));
        assert_eq!(found.hash_memo_bytes, expected.hash_memo_bytes);
        assert_eq!(found.null_block_id, expected.null_block_id);
        assert_eq!(found.isolated_ipc, expected.isolated_ipc);
        assert_eq!(found.request_log, expected.request_log);
        assert_eq!(found.max_usages, expected.max_usages);
        assert_eq!(found.kv_event_log_size, expected.kv_event_log_size);
        let isolated = [("LMC_ISOLATED_IPC".to_owned(), "true".to_owned())];
        let config = ServeConfig::load([], isolated, None).expect("valid").config;
        assert!(service_config(&config).expect("valid").isolated_ipc);
    }
}
