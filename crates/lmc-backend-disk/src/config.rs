//! How the tier is set up, and opening it.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lmc_memory::Arena;
use thiserror::Error;
use tracing::{info, warn};

use crate::admission::Admission;
use crate::backend::DiskBackend;
use crate::claim::{claim, sign};
use crate::drive::{Drive, DriveSettings, HEADER_NAME};
use crate::format::{DriveHeader, FormatError, VERSION};
use crate::index::MAX_SEGMENTS;
use crate::log::{recover, segment_name, segment_numbers};
use crate::volume::{AlignedBuf, BLOCK, EngineChoice, FolderConfig, FolderVolume, Kind, Volume};

/// What a drive's folder is made under before it is whole.
pub(crate) const UNFINISHED_HEADER: &str = "drive.unfinished";
/// Least bytes of a drive.
const MIN_SIZE: u64 = 4 << 20;

/// How bytes are moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskIo {
    /// By io_uring where the kernel lets us, else by threads.
    #[default]
    Auto,
    /// By io_uring, or not at all.
    Uring,
    /// By threads that block.
    Threads,
}

/// Which chunks are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admit {
    /// All that are offered.
    #[default]
    Always,
    /// Those that are offered a second time: spares the drive what never comes again.
    SecondTouch,
}

/// Settings of a disk tier. `Default:` values stand with each setter.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    paths: Vec<PathBuf>,
    size: u64,
    keep_free: u64,
    segment_bytes: Option<u64>,
    io: DiskIo,
    depth: u32,
    admit: Admit,
    max_writing: u64,
    probe_every: Duration,
    arena: Option<Arc<Arena>>,
    /// Open what is there, and make nothing.
    existing: bool,
}

/// Why a disk tier cannot be opened. Nothing on the drive was changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// No folder was named.
    #[error("a disk tier needs at least one folder")]
    NoFolder,
    /// The folder is not there and cannot be made.
    #[error(
        "{path}: the folder is not there and cannot be made: {source}; make it, or name another"
    )]
    Missing {
        /// The folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The folder cannot be written.
    #[error(
        "{path}: no file can be written there: {source}; check its owner and whether it is mounted read-only"
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another process has it.
    #[error("{path}: in use by another lmc ({owner}); stop that one, or name another folder")]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Who has it.
        owner: String,
    },
    /// The folder is no drive of lmc.
    #[error("{path}: no chunks of lmc are here; name a folder that `lmc serve --disk` has used")]
    NoDrive {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds something else.
    #[error("{path}: holds something and no `{HEADER_NAME}` of lmc; name an empty folder")]
    NotOurs {
        /// The folder.
        path: PathBuf,
    },
    /// It was written by a later lmc, or is damaged where all begins.
    #[error("{path}: {source}")]
    Format {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        source: io::Error,
    },
    /// Less than a tier can work with.
    #[error("{path}: {size} bytes for each drive are too few, {least} are the least")]
    TooSmall {
        /// The folder.
        path: PathBuf,
        /// What was asked for.
        size: u64,
        /// What is needed.
        least: u64,
    },
    /// The file system is smaller than what was asked for.
    #[error(
        "{path}: {size} bytes were asked for, the file system has room for {room}; ask for less, or free some"
    )]
    Space {
        /// The folder.
        path: PathBuf,
        /// What was asked for, for this drive.
        size: u64,
        /// What can be had, with what the folder holds already.
        room: u64,
    },
    /// Its segments and logs are more files than the process may open.
    #[error(
        "{path}: the drive has more files than may be open at a time; raise the limit (ulimit -n)"
    )]
    OpenFiles {
        /// The folder.
        path: PathBuf,
    },
    /// The system refused something.
    #[error("{path}: {source}")]
    Io {
        /// The folder.
        path: PathBuf,
        /// What it refused.
        source: io::Error,
    },
}

impl DiskConfig {
    /// A tier in these folders, one for each drive, of `size` bytes altogether.
    pub fn new(paths: impl IntoIterator<Item = impl Into<PathBuf>>, size: u64) -> Self {
        Self {
            paths: paths.into_iter().map(Into::into).collect(),
            size,
            keep_free: 1 << 30,
            segment_bytes: None,
            io: DiskIo::Auto,
            depth: 64,
            admit: Admit::Always,
            max_writing: 1 << 30,
            probe_every: Duration::from_secs(5),
            arena: None,
            existing: false,
        }
    }

    /// For a folder that is there, to look into it: with room for what it holds and a little
    /// more.
    ///
    /// # Errors
    /// [`DiskError::NoDrive`], or what else is wrong with the folder.
    pub fn existing(path: impl Into<PathBuf>) -> Result<Self, DiskError> {
        let path = path.into();
        let size = enough_for(&path)?;
        Ok(Self {
            existing: true,
            ..Self::new([path], size).with_keep_free(0)
        })
    }

    /// Sets the bytes that each file system keeps free. Default: 1 GiB.
    pub fn with_keep_free(mut self, bytes: u64) -> Self {
        self.keep_free = bytes;
        self
    }

    /// Sets the bytes of a segment, for folders that are made anew. A chunk must fit into one.
    /// Default: a 64th of the drive's share, 64 MiB to 1 GiB; above 512 GiB, a 512th.
    pub fn with_segment_bytes(mut self, bytes: u64) -> Self {
        self.segment_bytes = Some(bytes);
        self
    }

    /// Sets how bytes are moved. Default: [`DiskIo::Auto`].
    pub fn with_io(mut self, io: DiskIo) -> Self {
        self.io = io;
        self
    }

    /// Sets the operations that a drive is given at a time. Default: 64.
    pub fn with_depth(mut self, depth: u32) -> Self {
        self.depth = depth.max(1);
        self
    }

    /// Sets which chunks are kept. Default: [`Admit::Always`].
    pub fn with_admission(mut self, admit: Admit) -> Self {
        self.admit = admit;
        self
    }

    /// Sets the bytes that may be on their way to each drive; more are declined. Default: 1 GiB.
    pub fn with_max_writing(mut self, bytes: u64) -> Self {
        self.max_writing = bytes;
        self
    }

    /// Sets the time between two looks at a drive that was taken out. Default: 5 s.
    pub fn with_probe_every(mut self, every: Duration) -> Self {
        self.probe_every = every;
        self
    }

    /// Names the memory of the pool, so that the kernel can be told of it once instead of with
    /// every read and write. Default: none.
    pub fn with_arena(mut self, arena: Arc<Arena>) -> Self {
        self.arena = Some(arena);
        self
    }

    /// Opens the drives and finds what was acknowledged before.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(&self) -> Result<DiskBackend, DiskError> {
        if self.paths.is_empty() {
            return Err(DiskError::NoFolder);
        }
        let share = self.size / self.paths.len() as u64;
        let drives = self.paths.iter().map(|path| self.open_folder(path, share));
        let drives = drives.collect::<Result<Vec<_>, _>>()?;
        let admission = match self.admit {
            Admit::Always => None,
            Admit::SecondTouch => Some(Admission::default()),
        };
        DiskBackend::new(drives, admission).map_err(|source| DiskError::Io {
            path: self.paths[0].clone(),
            source,
        })
    }

    fn open_folder(&self, path: &Path, size: u64) -> Result<Drive, DiskError> {
        let io = |source| DiskError::Io {
            path: path.to_owned(),
            source,
        };
        let is_enough = |least| match size < least {
            true => Err(DiskError::TooSmall {
                path: path.to_owned(),
                size,
                least,
            }),
            false => Ok(()),
        };
        is_enough(MIN_SIZE)?;
        if !path.is_dir() {
            fs::create_dir(path).map_err(|source| DiskError::Missing {
                path: path.to_owned(),
                source,
            })?;
        }
        let lock = claim(path)?;
        let header = header_of(path)?;
        if let Some(header) = &header {
            is_enough(least_for(header.segment_bytes))?;
        }
        let config = FolderConfig {
            engine: match self.io {
                DiskIo::Auto => EngineChoice::Auto,
                DiskIo::Uring => EngineChoice::Uring,
                DiskIo::Threads => EngineChoice::Threads,
            },
            depth: self.depth,
            arena: self.arena.clone(),
            ..FolderConfig::default()
        };
        let folder = FolderVolume::open(path, config).map_err(|source| DiskError::NotWritable {
            path: path.to_owned(),
            source,
        })?;
        let held = held_bytes(path).map_err(io)?;
        let free = folder.free().map_err(io)?;
        let room = (free + held).saturating_sub(self.keep_free);
        let size = match size > room && !self.existing {
            false => size,
            // Others have filled the file system since: what is there is worth keeping.
            true if header.is_some() => {
                let smaller = size.min(room.max(enough_for(path)?));
                warn!(
                    path = %path.display(),
                    "{size} bytes were asked for, the file system has room for {room}; the drive \
                     takes up to {smaller} until the next start"
                );
                smaller
            }
            true => {
                return Err(DiskError::Space {
                    path: path.to_owned(),
                    size,
                    room,
                });
            }
        };
        let segment_bytes = self.segment_bytes.unwrap_or_else(|| default_segment(size));
        let settings = DriveSettings {
            capacity: size,
            keep_free: self.keep_free,
            log_bytes: (size / 256)
                .clamp(256 << 10, 64 << 20)
                .next_multiple_of(BLOCK),
            max_writing: self.max_writing,
            probe_every: self.probe_every,
        };
        let volume = Arc::new(folder) as Arc<dyn Volume>;
        let to_sign = lock.try_clone().map_err(io)?;
        let opened = open_drive(volume, segment_bytes, settings, Some(lock));
        let (drive, notes) = opened.map_err(|source| {
            let path = path.to_owned();
            match source.raw_os_error() {
                Some(libc::EMFILE) => DiskError::OpenFiles { path },
                Some(_) => DiskError::Io { path, source },
                None => DiskError::Format { path, source },
            }
        })?;
        sign(&to_sign);
        for note in notes {
            warn!(path = %path.display(), "{note}");
        }
        let usage = drive.usage();
        info!(
            path = %path.display(),
            io = drive.describe(),
            chunks = usage.chunks,
            bytes = usage.bytes,
            "drive opened"
        );
        Ok(drive)
    }
}

fn default_segment(size: u64) -> u64 {
    let share = (size / 64).clamp(64 << 20, 1 << 30);
    // A small drive still has several. A big one has at most 512: each is an open file.
    let share = share.min(size / 4).max(size.div_ceil(512));
    share.next_multiple_of(1 << 20)
}

/// Bytes that a folder can take on its file system, with those that it holds already. The folder
/// need not be there, but one above it must.
///
/// # Errors
/// When there is no such folder, or its file system does not say.
pub fn usable_bytes(path: &Path) -> io::Result<u64> {
    let above = path.ancestors().find(|path| path.is_dir());
    let above = match above {
        // A name without a folder before it is in this one.
        None => Path::new("."),
        Some(above) => above,
    };
    let held = match path.is_dir() {
        true => held_bytes(path)?,
        false => 0,
    };
    Ok(crate::volume::free_bytes(above)? + held)
}

/// Bytes with which a drive holds what it has, and takes a little more.
fn enough_for(path: &Path) -> Result<u64, DiskError> {
    let Some(header) = header_of(path)? else {
        let path = path.to_owned();
        return Err(DiskError::NoDrive { path });
    };
    // However little the file system needs for a file that has holes or can be compressed.
    let lengths = |metadata: &fs::Metadata| metadata.len();
    let held = bytes_of_files(path, lengths).map_err(|source| DiskError::Io {
        path: path.to_owned(),
        source,
    })?;
    // The index takes up to a 32nd beside the chunks, and two logs.
    Ok(held + held / 16 + 3 * header.segment_bytes + (8 << 20))
}

/// Least bytes of a drive of such segments: one is written to while another is given up, and the
/// index stands beside them.
fn least_for(segment_bytes: u64) -> u64 {
    let segments = segment_bytes.saturating_mul(2);
    segments
        .saturating_add(segments / 16 + (1 << 20))
        .max(MIN_SIZE)
}

/// What a folder says of itself, if it holds a drive.
fn header_of(path: &Path) -> Result<Option<DriveHeader>, DiskError> {
    let bytes = match fs::read(path.join(HEADER_NAME)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            let path = path.to_owned();
            return Err(DiskError::Io { path, source });
        }
    };
    let whole = bytes.len() as u64 >= BLOCK;
    let header = match whole {
        true => DriveHeader::decode(&bytes).map_err(io::Error::other),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    };
    let header = header.map_err(|source| DiskError::Format {
        path: path.to_owned(),
        source,
    })?;
    Ok(Some(header))
}

/// Bytes that the folder's own files take already.
fn held_bytes(path: &Path) -> io::Result<u64> {
    bytes_of_files(path, |metadata| metadata.blocks() * 512)
}

fn bytes_of_files(path: &Path, of_file: impl Fn(&fs::Metadata) -> u64) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(path)? {
        let metadata = entry?.metadata()?;
        if metadata.is_file() {
            bytes += of_file(&metadata);
        }
    }
    Ok(bytes)
}

/// Opens the drive on a volume, or makes it.
pub(crate) fn open_drive(
    volume: Arc<dyn Volume>,
    segment_bytes: u64,
    settings: DriveSettings,
    lock: Option<File>,
) -> io::Result<(Drive, Vec<String>)> {
    let mut names = volume.list()?;
    if !names.iter().any(|name| name == HEADER_NAME) {
        make_header(&*volume, segment_bytes)?;
        names = volume.list()?;
    }
    let header = volume.read_all(HEADER_NAME)?;
    let header = DriveHeader::decode((*header).as_ref()).map_err(io::Error::other)?;
    let mut made = segment_numbers(&names);
    let mut recovered = recover(&*volume, &names, &header.drive_id, header.segment_bytes)?;
    let mut notes = std::mem::take(&mut recovered.notes);
    let possible = made.partition_point(|&number| number < MAX_SEGMENTS);
    for stray in made.drain(possible..) {
        let name = segment_name(stray);
        notes.push(format!("{name}: no segment has that number; left alone"));
    }
    let drive = Drive::start(volume, header, recovered, &made, settings, lock)?;
    Ok((drive, notes))
}

fn make_header(volume: &dyn Volume, segment_bytes: u64) -> io::Result<()> {
    let random = || {
        RandomState::new()
            .hash_one(std::process::id())
            .to_le_bytes()
    };
    let mut drive_id = [0; 16];
    drive_id[..8].copy_from_slice(&random());
    drive_id[8..].copy_from_slice(&random());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let header = DriveHeader {
        drive_id,
        // What is no size is refused below.
        segment_bytes: segment_bytes
            .checked_next_multiple_of(BLOCK)
            .unwrap_or(u64::MAX),
        created: now.map_or(0, |now| now.as_secs()),
    };
    let mut block = AlignedBuf::new(BLOCK);
    header.encode(&mut block);
    DriveHeader::decode(&block).map_err(|error: FormatError| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("version {VERSION}: {error}"),
        )
    })?;
    let file = volume.open(UNFINISHED_HEADER, Some(BLOCK))?;
    crate::drive::wait_for(volume, Kind::Write, file, 0, Some(block))?;
    crate::drive::wait_for(volume, Kind::Sync, file, 0, None)?;
    volume.close(file);
    volume.rename(UNFINISHED_HEADER, HEADER_NAME)?;
    volume.sync_names()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_of_any_size_has_several_segments_and_not_many() {
        let sizes = (22..50).flat_map(|power| [1u64 << power, (1 << power) + 12_345]);
        for size in sizes {
            let segments = size / default_segment(size);
            assert!((2..=512).contains(&segments), "{segments} of {size} bytes");
        }
        // What a size of before has stays as it is.
        assert_eq!(default_segment(512 << 30), 1 << 30);
    }
}
