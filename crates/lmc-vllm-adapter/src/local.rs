//! Addresses at which engines look for a server of their host.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// Path of the Unix socket at which lmc's own connector looks for a server first. Next come the
/// socket in [`user_folder`] and [`LOCAL_ADDRESS`], where the server must belong to this user or
/// root.
pub const LOCAL_SOCKET: &str = "/run/lmc/lmc.sock";

/// Address at which the connector looks last.
pub const LOCAL_ADDRESS: &str = "127.0.0.1:5555";

/// Returns the folder of the server that `lmc start` runs for this user: `/run/lmc` for root,
/// `/tmp/lmc-UID` for others.
pub fn user_folder() -> PathBuf {
    let user = geteuid();
    match user.is_root() {
        true => "/run/lmc".into(),
        false => format!("/tmp/lmc-{}", user.as_raw()).into(),
    }
}

/// Checks that no other user can put a socket into a folder.
///
/// # Errors
/// The folder is missing, belongs to another user, or others may write to it; the error says what
/// to do.
pub fn check_private(folder: &Path) -> io::Result<()> {
    let shown = folder.display();
    let found = fs::symlink_metadata(folder)
        .map_err(|error| io::Error::new(error.kind(), format!("{shown}: {error}")))?;
    let user = geteuid().as_raw();
    if !found.is_dir() {
        return Err(io::Error::other(format!("{shown} is not a folder")));
    }
    if found.uid() != user {
        return Err(io::Error::other(format!(
            "{shown} belongs to user {}, not to {user}, and that user could answer in the \
             server's name; remove it",
            found.uid()
        )));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "other users may write to {shown}: `chmod go-w {shown}`"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use lmc_testkit::Folder;

    use super::*;

    #[test]
    fn a_folder_to_which_others_may_write_is_refused() {
        let folder = Folder::temporary();
        let mode = |mode| {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(&folder, mode).expect("it is ours");
        };
        mode(0o755);
        check_private(&folder).expect("others only read");
        for wrong in [0o775, 0o757, 0o777] {
            mode(wrong);
            let refused = check_private(&folder).expect_err("others may write");
            assert!(refused.to_string().contains("chmod"), "{refused}");
        }
        mode(0o700);
        let link = folder.join("link");
        symlink(&*folder, &link).expect("a link");
        assert!(check_private(&link).is_err());
        assert!(check_private(&folder.join("none")).is_err());
    }
}
