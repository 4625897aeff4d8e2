//! TLS to stores.

use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use crate::store::StoreError;

/// Returns a configuration that trusts the system's certificates, or those in `SSL_CERT_FILE`.
///
/// # Errors
/// [`StoreError::Unavailable`] if there are none although the store `needs_some`.
pub(crate) fn config(needs_some: bool) -> Result<ClientConfig, StoreError> {
    // Another part of the process may have chosen a provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() && needs_some {
        return Err(StoreError::unavailable(
            "TLS: no certificate is trusted on this host: install ca-certificates, or name a file of them in SSL_CERT_FILE",
        ));
    }
    let config = ClientConfig::builder().with_root_certificates(roots);
    Ok(config.with_no_client_auth())
}
