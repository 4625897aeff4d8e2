//! Access to the HTTP side beyond this host: a bearer token, and TLS.

use std::fmt;
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, ensure};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use lmc_transfer::read_secret;
use lmc_vllm_adapter::TrustedUsers;
use parking_lot::RwLock;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier as _;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{CertificateError, Error, RootCertStore, ServerConfig};

use crate::config::ServeConfig;

/// Smallest number of characters of a token.
const LEAST_TOKEN: usize = 16;

/// Rules for connections and requests, from the last reading of the configuration's files.
pub(crate) struct Access {
    pub(super) trusted_users: TrustedUsers,
    pub(super) token: Option<Token>,
    /// Host names that requests may use, in lower case.
    pub(super) host_names: Vec<String>,
    pub(super) tls: Option<TlsAcceptor>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

impl Access {
    /// Reads the files that the configuration names.
    ///
    /// # Errors
    /// A file cannot be read, other users may read it, or its content is invalid. The error names the setting.
    pub(crate) fn read(config: &ServeConfig) -> Result<Self> {
        let token = config.http_token_file.as_deref().map(token_of);
        let tls = config
            .http_tls_cert
            .as_deref()
            .zip(config.http_tls_key.as_deref());
        let names = [&config.http_host].into_iter();
        let names = names.chain(&config.http_allowed_hosts);
        Ok(Self {
            trusted_users: config.trusted_users.clone(),
            host_names: names.map(|name| name.to_ascii_lowercase()).collect(),
            token: token.transpose().context("--http-token-file")?.map(Token),
            tls: tls.map(|(cert, key)| acceptor(cert, key)).transpose()?,
        })
    }
}

/// The access that is in effect. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct LiveAccess(Arc<RwLock<Arc<Access>>>);

impl LiveAccess {
    pub(crate) fn new(access: Access) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(access))))
    }

    pub(super) fn now(&self) -> Arc<Access> {
        Arc::clone(&self.0.read())
    }

    /// Replaces the access for connections and requests that begin from now on.
    pub(crate) fn set(&self, access: Access) {
        *self.0.write() = Arc::new(access);
    }
}

/// A secret that a request must carry.
pub(crate) struct Token(String);

impl Token {
    #[cfg(test)]
    pub(super) fn new(token: &str) -> Self {
        Self(token.to_owned())
    }

    /// Returns true if the headers carry the token.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let mut shown = headers.get_all(AUTHORIZATION).into_iter();
        shown.any(|value| {
            let Some((scheme, shown)) = value.as_bytes().split_first_chunk::<7>() else {
                return false;
            };
            scheme.eq_ignore_ascii_case(b"bearer ") && self.is(shown.trim_ascii())
        })
    }

    /// Compares in a time that depends only on the length.
    fn is(&self, shown: &[u8]) -> bool {
        let token = self.0.as_bytes();
        let differs = |all: u8, (one, other): (&u8, &u8)| black_box(all | (one ^ other));
        token.len() == shown.len() && token.iter().zip(shown).fold(0, differs) == 0
    }
}

/// Reads a file with a token on its first line.
///
/// # Errors
/// The file cannot be read, other users may read it, or the line is not a token.
pub(crate) fn token_of(path: &Path) -> Result<String> {
    let text = read_secret(path)?;
    let token = text.lines().next().unwrap_or_default().trim();
    let is_token = token.len() >= LEAST_TOKEN && token.bytes().all(|byte| byte.is_ascii_graphic());
    ensure!(
        is_token,
        "{}: expected a token of at least {LEAST_TOKEN} visible characters on the first line; create \
         a token with (umask 077; openssl rand -hex 32 > FILE)",
        path.display()
    );
    Ok(token.to_owned())
}

/// Reads the certificates of a file.
///
/// # Errors
/// The file cannot be read, or holds no certificate.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = fs::read(path).with_context(|| format!("{}", path.display()))?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let found = read.map_err(|error| anyhow!("{}: {error}", path.display()))?;
    ensure!(
        !found.is_empty(),
        "{}: expected certificates in PEM, found none",
        path.display()
    );
    Ok(found)
}

/// Checks the times between which the first certificate of a file is valid. Clients refuse it outside of them.
///
/// # Errors
/// The file cannot be read, or the certificate is expired or not valid yet.
pub(crate) fn check_times(path: &Path, now: UnixTime) -> Result<()> {
    let certificates = certificates(path)?;
    let mut roots = RootCertStore::empty();
    roots
        .add(certificates[0].clone())
        .with_context(|| format!("{}", path.display()))?;
    let provider = Arc::new(ring::default_provider());
    let verifier =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
    let name = ServerName::try_from("localhost")?;
    // The times are checked first. An error after them, such as an unknown issuer, says nothing about them.
    let checked = verifier.verify_server_cert(&certificates[0], &[], &name, &[], now);
    let Err(Error::InvalidCertificate(error)) = checked else {
        return Ok(());
    };
    let is_of_times = matches!(
        error,
        CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. }
    );
    ensure!(!is_of_times, "{}: {error}", path.display());
    Ok(())
}

fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor> {
    let certificates = certificates(cert).context("--http-tls-cert")?;
    let text = read_secret(key).context("--http-tls-key")?;
    let private = PrivateKeyDer::from_pem_slice(text.as_bytes())
        .map_err(|error| anyhow!("--http-tls-key: {}: {error}", key.display()))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let mut config = builder
        .with_safe_default_protocol_versions()
        .context("TLS")?
        .with_no_client_auth()
        .with_single_cert(certificates, private)
        .context("--http-tls-cert and --http-tls-key")?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use axum::http::HeaderValue;
    use lmc_testkit::Folder;

    use super::*;

    #[test]
    fn a_request_carries_the_whole_token_or_is_refused() {
        let token = Token::new("0123456789abcdef");
        let shows = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                let value = HeaderValue::from_str(value).expect("a header");
                headers.append(AUTHORIZATION, value);
            }
            token.is_in(&headers)
        };
        for values in [
            &["Bearer 0123456789abcdef"][..],
            &["bearer  0123456789abcdef "],
            &["Basic eDp5", "Bearer 0123456789abcdef"],
        ] {
            assert!(shows(values), "{values:?}");
        }
        for values in [
            &[][..],
            &[""],
            &["Bearer"],
            &["Bearer "],
            &["Bearer 0123456789abcde"],
            &["Bearer 0123456789abcdef0"],
            &["Bearer 0123456789abcdeg"],
            &["Basic 0123456789abcdef"],
            &["0123456789abcdef"],
        ] {
            assert!(!shows(values), "{values:?}");
        }
    }

    #[test]
    fn a_certificate_is_valid_between_its_times() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tls/server.crt");
        let at = |seconds| {
            let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
            check_times(Path::new(path), now)
        };
        assert!(check_times(Path::new(path), UnixTime::now()).is_ok());
        assert!(at(0).is_err());
        assert!(at(10_000 * 365 * 86_400).is_err());
    }

    #[test]
    fn a_file_without_a_token_is_refused() {
        let folder = Folder::temporary();
        let path = folder.join("token");
        let read = |text: &str, mode| {
            fs::write(&path, text).expect("a file");
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("its owner's");
            token_of(&path)
        };
        let token = read("0123456789abcdef\nsecond line\n", 0o600);
        assert_eq!(token.expect("a token"), "0123456789abcdef");
        for (text, mode) in [
            ("", 0o600),
            ("\n0123456789abcdef", 0o600),
            ("0123456789abcde", 0o600),
            ("0123456789 abcdef", 0o600),
            ("0123456789abcdef", 0o644),
        ] {
            assert!(read(text, mode).is_err(), "{text:?} {mode:o}");
        }
    }
}
