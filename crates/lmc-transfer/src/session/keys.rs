//! The key that all peers share, and the identity that each has of its own.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use snow::params::{DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use thiserror::Error;

/// Bytes of a shared key at least. Peers that connect may test guesses offline against a recorded
/// handshake, so a key must not be guessable.
pub const MIN_KEY: usize = 32;
/// Bytes of a file with secrets at most.
pub const MAX_SECRETS: u64 = 1 << 20;

/// A file with a secret, or an identity, that cannot be used.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// A shared key of fewer than [`MIN_KEY`] bytes.
    #[error(
        "a shared key of {found} bytes: at least {MIN_KEY} are required; create one with \
         `openssl rand -hex 32`"
    )]
    Short {
        /// Bytes of the key.
        found: usize,
    },
    /// A key file without a key, or with more than two.
    #[error("{found} keys: expected one key per line, one or two of them")]
    Count {
        /// Keys in the file.
        found: usize,
    },
    /// A text that is not 32 bytes in hexadecimal.
    #[error("expected 64 hexadecimal digits")]
    Hex,
    /// A file with a secret that users other than its owner may read or write.
    #[error(
        "{path} has mode {mode:o}, owner {owner} and group {group}, so that other users may read \
         it; expected no permissions of others: chmod 600 {path}. A file of root may be readable by a \
         group of this process (for a Kubernetes Secret: defaultMode: 0400, and fsGroup where the \
         container does not run as root)"
    )]
    Exposed {
        /// The file.
        path: String,
        /// Permission bits of the file.
        mode: u32,
        /// User id of the file's owner.
        owner: u32,
        /// Group id of the file.
        group: u32,
    },
    /// The file cannot be read or written.
    #[error("cannot use {path}: {error}")]
    File {
        /// The file.
        path: String,
        /// Cause of the failure.
        error: Arc<io::Error>,
    },
}

fn file_error(path: &Path, error: io::Error) -> KeyError {
    let path = path.display().to_string();
    KeyError::File {
        path,
        error: error.into(),
    }
}

/// Reads a file with secrets. Only the owner of the file may have permissions on it; if root owns it,
/// a group of this process may read it as well.
///
/// # Errors
/// [`KeyError::Exposed`], or [`KeyError::File`] for a file that cannot be read or has more than
/// [`MAX_SECRETS`] bytes.
pub fn read_secret(path: &Path) -> Result<String, KeyError> {
    let wrong = |error| file_error(path, error);
    let file = fs::File::open(path).map_err(wrong)?;
    let metadata = file.metadata().map_err(wrong)?;
    let (mode, owner, group) = (metadata.mode() & 0o777, metadata.uid(), metadata.gid());
    if !is_private(mode, owner, || is_own_group(group)) {
        return Err(KeyError::Exposed {
            path: path.display().to_string(),
            mode,
            owner,
            group,
        });
    }
    let mut text = String::new();
    let read = file.take(MAX_SECRETS + 1).read_to_string(&mut text);
    if read.map_err(wrong)? as u64 > MAX_SECRETS {
        return Err(wrong(io::ErrorKind::FileTooLarge.into()));
    }
    Ok(text)
}

/// Returns true if a file with these permissions may hold a secret of this process.
///
/// A process that does not run as root reads a file of root by its group only. Kubernetes mounts
/// Secrets in this way for a pod with an `fsGroup`: with mode 0440, root as the owner, and that group.
fn is_private(mode: u32, owner: u32, is_own_group: impl FnOnce() -> bool) -> bool {
    match mode & 0o077 {
        0 => true,
        0o040 => owner == 0 && is_own_group(),
        _ => false,
    }
}

/// Returns true if this process is in a group.
fn is_own_group(group: u32) -> bool {
    let others = rustix::process::getgroups().unwrap_or_default();
    let own = std::iter::once(rustix::process::getegid()).chain(others);
    own.into_iter().any(|own| own.as_raw() == group)
}

/// A secret that all peers share. A handshake proves it without revealing it.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// Makes a key from a secret of at least [`MIN_KEY`] bytes; random ones are required.
    ///
    /// # Errors
    /// [`KeyError::Short`].
    pub fn new(secret: &[u8]) -> Result<Self, KeyError> {
        if secret.len() < MIN_KEY {
            let found = secret.len();
            return Err(KeyError::Short { found });
        }
        Ok(Self::derive(b"lmc-transfer shared key", secret))
    }

    /// Makes a key from random bytes.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn random() -> io::Result<Self> {
        super::random().map(Self)
    }

    fn derive(label: &[u8], secret: &[u8]) -> Self {
        let digest = Sha256::new().chain_update(label).chain_update(secret);
        Self(digest.finalize().into())
    }

    /// The key that sides without a key use. It proves nothing.
    pub(crate) fn none() -> Self {
        Self::derive(b"lmc-transfer without a key", b"")
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// One or two shared keys: the first is used to connect, both are accepted.
///
/// A key is rotated without an outage in three steps: add the new key as the second one on every
/// host, make it the first one on every host, remove the old one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    first: Key,
    second: Option<Key>,
}

impl Keys {
    /// Accepts `second` as well.
    #[must_use]
    pub fn or(self, second: Key) -> Self {
        Self {
            second: Some(second),
            ..self
        }
    }

    /// Reads a key file: one key per line, one or two of them. Blank lines and lines that begin
    /// with `#` are ignored.
    ///
    /// # Errors
    /// [`KeyError`], also those of [`read_secret`].
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        read_secret(path)?.parse()
    }

    /// Returns a digest of a text under the first key: the same on every side with that key, and
    /// useless for guessing the text without it.
    pub fn digest(&self, text: &[u8]) -> [u8; 16] {
        let key = Key::derive(b"lmc-transfer digest", self.first.bytes());
        let hash = DefaultResolver.resolve_hash(&HashChoice::Blake2s);
        let mut hash = hash.expect("snow is built with BLAKE2s");
        let mut digest = [0; 32];
        hash.hmac(key.bytes(), text, &mut digest);
        *digest
            .first_chunk()
            .expect("a digest has more than 16 bytes")
    }

    /// The key that this side connects with.
    pub(crate) fn first(&self) -> &Key {
        &self.first
    }

    /// The keys that this side accepts.
    pub(crate) fn accepted(&self) -> impl Iterator<Item = &Key> {
        [Some(&self.first), self.second.as_ref()]
            .into_iter()
            .flatten()
    }
}

impl From<Key> for Keys {
    fn from(first: Key) -> Self {
        Self {
            first,
            second: None,
        }
    }
}

impl FromStr for Keys {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let lines = text.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys: Result<Vec<Key>, KeyError> =
            lines.map(|line| Key::new(line.as_bytes())).collect();
        let mut keys = keys?.into_iter();
        let found = keys.len();
        match (keys.next(), keys.next(), keys.next()) {
            (Some(first), second, None) => Ok(Self { first, second }),
            _ => Err(KeyError::Count { found }),
        }
    }
}

/// A key pair (X25519) that belongs to one peer and proves its name.
#[derive(Clone)]
pub struct Identity(Arc<Pair>);

struct Pair {
    private: [u8; 32],
    public: PublicIdentity,
}

/// The public half of an [`Identity`], written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicIdentity([u8; 32]);

impl Identity {
    /// Makes an identity that lasts as long as the value.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> io::Result<Self> {
        let mut private = [0; 32];
        getrandom::fill(&mut private).map_err(io::Error::other)?;
        Ok(Self::from_private(private))
    }

    /// Reads an identity from a file, or makes one and writes it there, readable by its owner
    /// only.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn load_or_create(path: &Path) -> Result<Self, KeyError> {
        let failed = |error| file_error(path, error);
        match read_secret(path) {
            Ok(text) => Ok(Self::from_private(from_hex(text.trim())?)),
            Err(KeyError::File { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                let identity = Self::generate().map_err(failed)?;
                let mut options = OpenOptions::new();
                options.write(true).create_new(true).mode(0o600);
                let mut file = options.open(path).map_err(failed)?;
                let text = hex(&identity.0.private) + "\n";
                file.write_all(text.as_bytes()).map_err(failed)?;
                file.sync_all().map_err(failed)?;
                Ok(identity)
            }
            Err(error) => Err(error),
        }
    }

    fn from_private(private: [u8; 32]) -> Self {
        let dh = DefaultResolver.resolve_dh(&DHChoice::Curve25519);
        let mut dh = dh.expect("snow is built with X25519");
        dh.set(&private);
        let public = dh.pubkey().try_into().expect("X25519 keys have 32 bytes");
        let public = PublicIdentity(public);
        Self(Arc::new(Pair { private, public }))
    }

    /// The public half, to be listed in [`crate::ChannelConfig::known_peers`] of other peers.
    pub fn public(&self) -> PublicIdentity {
        self.0.public
    }

    pub(crate) fn private(&self) -> &[u8; 32] {
        &self.0.private
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.public())
    }
}

impl PublicIdentity {
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for PublicIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for PublicIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicIdentity {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        from_hex(text).map(Self)
    }
}

fn hex(bytes: &[u8; 32]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<[u8; 32], KeyError> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(KeyError::Hex);
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).map_err(|_| KeyError::Hex)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| KeyError::Hex)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_file_holds_one_or_two_keys_of_32_bytes() {
        let (a, b) = ("a".repeat(32), "b".repeat(40));
        let key = |text: &str| Key::new(text.as_bytes()).expect("long enough");
        let keys: Keys = format!("# current\n{a}\n\n").parse().expect("one key");
        assert_eq!(keys, Keys::from(key(&a)));
        let keys: Keys = format!("{a}\n  {b}  \n").parse().expect("two keys");
        assert_eq!(keys, Keys::from(key(&a)).or(key(&b)));
        assert!(keys.accepted().eq([&key(&a), &key(&b)]));
        let error = "short".parse::<Keys>().expect_err("5 bytes");
        assert!(matches!(error, KeyError::Short { found: 5 }));
        for (text, found) in [(String::new(), 0), (format!("{a}\n{b}\n{a}"), 3)] {
            let error = text.parse::<Keys>().expect_err("no or three keys");
            assert!(matches!(error, KeyError::Count { found: n } if n == found));
        }
    }

    #[test]
    fn a_key_file_that_others_may_read_is_refused() {
        let folder = lmc_testkit::Folder::temporary();
        let path = folder.join("key");
        lmc_testkit::write_secret(&path, &"a".repeat(32));
        Keys::read(&path).expect("only its owner may read it");
        for mode in [0o604, 0o620, 0o444, 0o460, 0o450, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
            let error = Keys::read(&path).expect_err("others may read it");
            assert!(matches!(error, KeyError::Exposed { mode: m, .. } if m == mode));
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn the_group_may_read_a_file_of_root_alone() {
        for (mode, owner, is_own, expected) in [
            (0o440, 0, true, true),
            (0o640, 0, true, true),
            (0o440, 0, false, false),
            (0o440, 65534, true, false),
            (0o460, 0, true, false),
            (0o444, 0, true, false),
            (0o441, 0, true, false),
            (0o400, 65534, false, true),
        ] {
            let found = is_private(mode, owner, || is_own);
            assert_eq!(found, expected, "{mode:o} {owner} {is_own}");
        }
        let own = fs::metadata("/proc/self").expect("proc").gid();
        assert!(is_own_group(own));
        assert!(!is_own_group(u32::MAX - 7));
    }

    /// Kubernetes mounts a Secret so for a pod with an `fsGroup`. Such a key was refused, and the mode
    /// that the refusal named cannot be read by a user other than root.
    #[test]
    fn a_secret_of_root_and_an_own_group_is_read() {
        if !lmc_testkit::is_root() {
            return println!("skipped: not root");
        }
        let folder = lmc_testkit::Folder::temporary();
        let path = folder.join("key");
        lmc_testkit::write_secret(&path, &"a".repeat(32));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).expect("it is ours");
        Keys::read(&path).expect("its group is that of root, as which this test runs");
        for (owner, group) in [(0, 54_321), (54_321, 0)] {
            std::os::unix::fs::chown(&path, Some(owner), Some(group)).expect("it is root");
            let error = Keys::read(&path).expect_err("others may read it");
            assert!(
                matches!(error, KeyError::Exposed { owner: o, group: g, .. } if (o, g) == (owner, group))
            );
        }
    }

    #[test]
    fn a_digest_is_that_of_the_first_key_and_its_text() {
        let (a, b) = ("a".repeat(32), "b".repeat(32));
        let keys = |text: &str| text.parse::<Keys>().expect("one or two keys");
        let digest = keys(&a).digest(b"tenant");
        assert_eq!(digest, keys(&format!("{a}\n{b}")).digest(b"tenant"));
        assert_ne!(digest, keys(&format!("{b}\n{a}")).digest(b"tenant"));
        assert_ne!(digest, keys(&a).digest(b"tenant-b"));
    }

    #[test]
    fn an_identity_is_kept_in_its_file() {
        let path = std::env::temp_dir().join(format!("lmc-identity-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let made = Identity::load_or_create(&path).expect("made");
        let read = Identity::load_or_create(&path).expect("read");
        assert_eq!(made.public(), read.public());
        assert_eq!(made.private(), read.private());
        let other = Identity::generate().expect("random numbers");
        assert_ne!(made.public(), other.public());
        let public = made.public();
        assert_eq!(
            public.to_string().parse::<PublicIdentity>().ok(),
            Some(public)
        );
        fs::write(&path, "0123").expect("written");
        assert!(matches!(
            Identity::load_or_create(&path),
            Err(KeyError::Hex)
        ));
        fs::remove_file(&path).expect("removed");
    }
}
