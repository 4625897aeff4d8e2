//! NIXL in tests: the variables of NIXL and UCX, and what UCX says that it did.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::nixl;

/// NIXL's library.
pub(crate) struct Nixl {
    library: PathBuf,
}

/// Variables of UCX for transports that wait for an answer of the peer's device: it gives up
/// after about two seconds instead of 47. With fewer attempts, packets that an emulated network
/// lost ended requests between living guests.
const RC: [(&str, &str); 2] = [("UCX_RC_TIMEOUT", "200ms"), ("UCX_RC_RETRY_COUNT", "7")];

impl Nixl {
    /// The library that `LMC_NIXL_LIBRARY` names, else that of PyPI; and what channels over it
    /// are built with.
    pub(crate) fn find() -> Result<Self> {
        nixl::build_tools()?;
        let library = match std::env::var_os("LMC_NIXL_LIBRARY") {
            Some(library) => PathBuf::from(library),
            None => nixl::library()?,
        };
        // Its neighbours are found from where it lies itself.
        let library = library
            .canonicalize()
            .with_context(|| format!("no library {}", library.display()))?;
        Ok(Self { library })
    }

    /// `libnixl_capi.so`.
    pub(crate) fn library(&self) -> &Path {
        &self.library
    }

    /// The wheel's folder of what the library needs, beside the library's own.
    pub(crate) fn needs(&self) -> Result<PathBuf> {
        let own = self
            .library
            .parent()
            .context("the library lies in a folder")?;
        let name = own.file_name().and_then(|name| name.to_str());
        // `.nixl_cu12.mesonpy.libs` and `nixl_cu12.libs`
        let name = name.and_then(|name| name.strip_prefix('.')?.strip_suffix(".mesonpy.libs"));
        let name = name.with_context(|| format!("{} is not of a wheel", own.display()))?;
        Ok(own.with_file_name(format!("{name}.libs")))
    }

    /// The wheel's own copy of a library, whose name has a hash in it.
    pub(crate) fn bundled(&self, start: &str) -> Result<PathBuf> {
        let folder = self.needs()?;
        let mut found = std::fs::read_dir(&folder)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                path.file_name()
                    .is_some_and(|n| n.to_string_lossy().starts_with(start))
            });
        let found = found.next();
        found.with_context(|| format!("no {start}… in {}", folder.display()))
    }

    /// The environment of a process. `device` is a name of UCX's such as `lo` or `rxe0:1`; UCX
    /// logs to `{side}.ucx` in `logs`.
    pub(crate) fn variables(
        &self,
        transports: &str,
        device: Option<&str>,
        logs: &Path,
        side: &str,
    ) -> Vec<(String, String)> {
        let library = self.library.display().to_string();
        let log = logs.join(format!("{side}.ucx")).display().to_string();
        let mut variables = vec![("LMC_NIXL_LIBRARY".to_owned(), library)];
        variables.extend(environment(transports, device, &log));
        variables
    }
}

/// Returns the variables of UCX and NIXL.
pub(crate) fn environment(
    transports: &str,
    device: Option<&str>,
    log: &str,
) -> Vec<(String, String)> {
    let mut variables = vec![
        ("UCX_TLS", transports),
        // The module for EFA breaks the exit of a process where Debian's libibverbs is.
        ("UCX_MODULES", "^efa"),
        ("UCX_LOG_LEVEL", "info"),
        ("NIXL_LOG_LEVEL", "ERROR"),
        ("UCX_LOG_FILE", log),
    ];
    variables.extend(device.map(|device| ("UCX_NET_DEVICES", device)));
    if transports.starts_with("rc") {
        variables.extend(RC);
    }
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    variables.into_iter().map(owned).collect()
}

/// Reads from UCX's log how it reaches peers: the text after `cfg#1`. That of a process to itself
/// is left out.
pub(crate) fn configurations(log: &str) -> Vec<&str> {
    let between =
        |line: &&str| line.contains("intra-node cfg#") || line.contains("inter-node cfg#");
    log.lines()
        .filter(between)
        .filter_map(|line| line.split_once("cfg#"))
        .map(|(_, configuration)| configuration.trim())
        .collect()
}

/// The configuration that names a transport, in every line that names any.
///
/// # Errors
/// UCX chose another, or says nothing.
pub(crate) fn expect(log: &str, transport: &str) -> Result<String> {
    let found = configurations(log);
    let Some(first) = found.first() else {
        bail!("UCX does not say how it reached the peer");
    };
    match found.iter().find(|line| !line.contains(transport)) {
        Some(other) => bail!("UCX did not use {transport}: cfg#{other}"),
        None => Ok(format!("cfg#{first}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "[1.5] [vm:1:0] ucp_worker.c:1997 UCX  INFO    init self cfg#0 rma(rc_verbs/rxe0:1)\n\
         [1.6] [vm:1:1] ucp_worker.c:1997 UCX  INFO    init intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo)";

    #[test]
    fn a_configuration_for_oneself_proves_nothing() {
        assert_eq!(configurations(TCP), ["1 rma_am(tcp/lo)  am(tcp/lo)"]);
        assert!(expect(TCP, "rma(rc_").is_err());
        assert!(expect(TCP, "tcp/").is_ok());
        assert!(expect("", "tcp/").is_err());
        let fell_back = format!("{TCP}\nx inter-node cfg#2 rma(rc_verbs/rxe0:1)");
        assert!(expect(&fell_back, "rma(rc_").is_err());
    }
}
