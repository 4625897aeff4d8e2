//! Finds and loads NIXL's library.

use std::env;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::ConnectError;

/// The library's file, and its SONAME.
const NAME: &str = "libnixl_capi.so";
/// The variable that names the library's file.
const VARIABLE: &str = "LMC_NIXL_LIBRARY";

/// Set when the library is loaded; guarded, so that it is loaded once.
static LOADED: Mutex<bool> = Mutex::new(false);

/// Loads the library, from `configured` if given. Once a call has succeeded, further calls do
/// nothing.
pub(super) fn load(configured: Option<&Path>) -> Result<(), ConnectError> {
    let mut loaded = LOADED.lock();
    if *loaded {
        return Ok(());
    }
    let mut faults = Vec::new();
    let found = candidates(configured, env::var_os(VARIABLE))
        .into_iter()
        .any(|path| open(&path).map_err(|fault| faults.push(fault)).is_ok());
    // Asked before any other call, which would abort the process without a library; and not
    // earlier, because nixl-sys keeps the answer for good.
    if !found || nixl_sys::is_stub() {
        return Err(ConnectError::Library(missing(&faults)));
    }
    *loaded = true;
    Ok(())
}

fn missing(faults: &[String]) -> String {
    format!(
        "NIXL's library {NAME} cannot be loaded ({}). Install it with `pip install \
         nixl-cu12==1.5.1` (it needs no GPU), and name it: {VARIABLE}=\
         …/site-packages/.nixl_cu12.mesonpy.libs/{NAME} in the environment, or library in \
         NixlConfig",
        faults.join("; ")
    )
}

/// Returns the paths to try, in order. A configured path is the only one.
fn candidates(configured: Option<&Path>, variable: Option<OsString>) -> Vec<PathBuf> {
    if let Some(path) = configured {
        return vec![path.to_owned()];
    }
    if let Some(path) = variable.filter(|path| !path.is_empty()) {
        return vec![path.into()];
    }
    let mut found = vec![PathBuf::from(NAME)];
    found.extend(python_roots().iter().flat_map(|root| wheels(root)));
    found
}

/// Returns the prefixes of the active Python: its environment, or that of `python3` in the path.
fn python_roots() -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(env::var_os);
    let mut roots: Vec<PathBuf> = named.map(PathBuf::from).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    let python = env::split_paths(&path).find(|folder| folder.join("python3").exists());
    roots.extend(python.and_then(|folder| folder.parent().map(Path::to_owned)));
    roots
}

/// Returns the libraries of NIXL's wheels in a Python prefix, the newest CUDA last.
fn wheels(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for python in folders(&root.join("lib"), "python3") {
        for packages in ["site-packages", "dist-packages"] {
            found.extend(folders(&python.join(packages), ".nixl_cu"));
        }
    }
    found.sort();
    found.into_iter().map(|folder| folder.join(NAME)).collect()
}

/// Lists the entries of a folder whose names begin with `start`.
fn folders(parent: &Path, start: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let begins = |name: &OsStr| name.as_bytes().starts_with(start.as_bytes());
    entries
        .filter(|entry| begins(&entry.file_name()))
        .map(|entry| entry.path())
        .collect()
}

/// Loads a library for good: nixl-sys later opens the same library by its SONAME.
fn open(path: &Path) -> Result<(), String> {
    // The library finds its neighbours from its own folder, which is not that of a link to it.
    let path = match path.is_absolute().then(|| fs::canonicalize(path)) {
        Some(Ok(real)) => real,
        Some(Err(_)) | None => path.to_owned(),
    };
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| format!("{}: a path with a zero byte", path.display()))?;
    // SAFETY: the name is a C string. The library's constructors run; the user who names the file
    // is responsible for them.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: dlerror gives none or a C string that stands until the next call of this thread.
    let reason = unsafe {
        let reason = libc::dlerror();
        (!reason.is_null()).then(|| CStr::from_ptr(reason).to_string_lossy().into_owned())
    };
    Err(reason.unwrap_or_else(|| format!("{}: cannot be opened", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_how_to_install_it() {
        let path = Path::new("/nonexistent/libnixl_capi.so");
        let error = load(Some(path))
            .expect_err("there is no such file")
            .to_string();
        for part in [
            "/nonexistent/libnixl_capi.so",
            "pip install nixl-cu12==1.5.1",
            VARIABLE,
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_path_that_is_configured_is_the_only_one() {
        let configured = candidates(Some(Path::new("/a")), Some("/b".into()));
        assert_eq!(configured, [PathBuf::from("/a")]);
        assert_eq!(candidates(None, Some("/b".into())), [PathBuf::from("/b")]);
        assert_eq!(candidates(None, None)[0], Path::new(NAME));
        assert_eq!(candidates(None, Some("".into()))[0], Path::new(NAME));
    }

    #[test]
    fn wheels_are_found_in_a_python_prefix() {
        let root = env::temp_dir().join(format!("lmc-nixl-wheels-{}", std::process::id()));
        let folder = root.join("lib/python3.11/site-packages/.nixl_cu12.mesonpy.libs");
        fs::create_dir_all(&folder).expect("a folder");
        assert_eq!(wheels(&root), [folder.join(NAME)]);
        fs::remove_dir_all(&root).expect("the folder goes");
    }
}
