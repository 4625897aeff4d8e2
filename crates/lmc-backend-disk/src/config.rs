//! Configuration of the tier, and opening the tier.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lmc_backend::Host;
use lmc_key::SpaceId;
use lmc_memory::Arena;
use tracing::{info, warn};

use crate::DiskIo;
use crate::backend::DiskBackend;
use crate::claim::{Claim, Content, content, remove_remains};
use crate::drive::{Drive, DriveSettings};
use crate::drive_set::{DriveSet, absolute, ago, now};
use crate::error::DiskError;
use crate::files::{HEADER_NAME, replace_file};
use crate::format::{BLOCK_LEN, DriveHeader, FormatError, VERSION};
use crate::id::{hex, random_id};
use crate::index::MAX_SEGMENTS;
use crate::log::{recover, segment_name, segment_numbers};
use crate::set::{SET_NAME, SetRecord};
use crate::spaces::{Unreachable, UnreachableSegment, cut, is_unreachable, unreachable};
use crate::volume::{BLOCK, FolderConfig, FolderVolume, Medium, NO_SIZE, Volume, medium};

/// Time that a batch waits for a drive before the drive counts as stalled.
const STALL: Duration = Duration::from_millis(500);

/// Time that a closing drive waits for its threads.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Smallest size of a drive in bytes.
const MIN_SIZE: u64 = 4 << 20;

/// Configuration of a disk tier. The doc comment of each setter names its default.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    paths: Vec<PathBuf>,
    size: u64,
    keep_free: u64,
    segment_bytes: Option<u64>,
    io: DiskIo,
    depth: u32,
    max_writing: u64,
    probe_every: Duration,
    arena: Option<Arc<Arena>>,
    key_settings: Option<String>,
    /// Creates a drive in a folder that has none.
    new_drives: bool,
    /// Opens existing drives, and creates none.
    existing: bool,
}

impl DiskConfig {
    /// Returns the configuration of a tier in these folders, one for each drive, of `size` bytes in total.
    pub fn new(paths: impl IntoIterator<Item = impl Into<PathBuf>>, size: u64) -> Self {
        Self {
            paths: paths.into_iter().map(Into::into).collect(),
            size,
            keep_free: 1 << 30,
            segment_bytes: None,
            io: DiskIo::Auto,
            depth: 64,
            max_writing: 1 << 30,
            probe_every: Duration::from_secs(2),
            arena: None,
            key_settings: None,
            new_drives: false,
            existing: false,
        }
    }

    /// Returns a configuration for inspecting existing drives, each with capacity for its content and a
    /// little more. The drives are not compared with each other.
    ///
    /// # Errors
    /// [`DiskError::NoDrive`], or another error of a folder.
    pub fn existing(
        paths: impl IntoIterator<Item = impl Into<PathBuf>>,
    ) -> Result<Self, DiskError> {
        let this = Self::new(paths, 0).with_keep_free(0);
        for path in &this.paths {
            enough_for(path)?;
        }
        Ok(Self {
            existing: true,
            ..this
        })
    }

    /// Creates a drive in each folder that has none, and the folder if it does not exist. Default: such a
    /// folder is refused ([`DiskError::NoDriveYet`]), because it may be a mount point whose file system is
    /// not mounted.
    pub fn with_new_drives(mut self) -> Self {
        self.new_drives = true;
        self
    }

    /// Names the settings that are part of every key of this process, such as the chunk size. Each drive
    /// records under which settings its chunks were stored, see [`DiskBackend::unreachable`]. Only the first
    /// 252 bytes count. Default: none.
    pub fn with_key_settings(mut self, settings: &str) -> Self {
        self.key_settings = Some(cut(settings));
        self
    }

    /// Sets the bytes that each file system keeps free. Default: 1 GiB.
    pub fn with_keep_free(mut self, bytes: u64) -> Self {
        self.keep_free = bytes;
        self
    }

    /// Sets the bytes of a segment, for new folders. A chunk must fit into one segment. Default: a 64th of
    /// the drive's share, 64 MiB to 1 GiB; above 512 GiB, a 512th.
    pub fn with_segment_bytes(mut self, bytes: u64) -> Self {
        self.segment_bytes = Some(bytes);
        self
    }

    /// Sets the I/O engine. Default: [`DiskIo::Auto`].
    pub fn with_io(mut self, io: DiskIo) -> Self {
        self.io = io;
        self
    }

    /// Sets the most operations that a drive is given at a time. Default: 64.
    pub fn with_depth(mut self, depth: u32) -> Self {
        self.depth = depth.max(1);
        self
    }

    /// Sets the most bytes that may be waiting or being written to each drive; further chunks are declined.
    /// Default: 1 GiB.
    pub fn with_max_writing(mut self, bytes: u64) -> Self {
        self.max_writing = bytes;
        self
    }

    /// Sets the interval at which each drive's files are checked, and at which a drive that was taken out is
    /// probed. Default: 2 s.
    pub fn with_probe_every(mut self, every: Duration) -> Self {
        self.probe_every = every;
        self
    }

    /// Sets the memory of the pool, which is then registered with the kernel once instead of at every read
    /// and write. Default: none.
    pub fn with_arena(mut self, arena: Arc<Arena>) -> Self {
        self.arena = Some(arena);
        self
    }

    /// Opens the drives and finds the chunks that were acknowledged before. A drive is emptied first if it
    /// lacks any clear of the host or of another drive, or if its map of clears cannot be read. Changes of
    /// chunks are reported to the host.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(&self, host: &dyn Host) -> Result<DiskBackend, DiskError> {
        if self.paths.is_empty() {
            return Err(DiskError::NoFolder);
        }
        let share = self.size / self.paths.len() as u64;
        if !self.new_drives {
            for path in &self.paths {
                self.is_drive(path)?;
            }
        }
        let drives = self.paths.iter().map(|path| self.open_folder(path, share));
        let drives = drives.collect::<Result<Vec<_>, _>>()?;
        let set = match self.existing {
            true => DriveSet::of(&drives)?,
            false => DriveSet::join(&drives, &self.paths, &host.clears())?,
        };
        let events = host.events();
        drives.iter().for_each(|drive| drive.report_to(events));
        let (unreachable, segments) = self.note_settings(&drives);
        let tier = DiskBackend::new(drives, set).map_err(|source| DiskError::Io {
            path: self.paths[0].clone(),
            source: source.into(),
        })?;
        Ok(tier.with_unreachable(unreachable, segments))
    }

    /// Records the present settings on the drives. Returns the chunks that were stored under other settings,
    /// and the segments that have such chunks.
    fn note_settings(&self, drives: &[Drive]) -> (Vec<Unreachable>, Vec<UnreachableSegment>) {
        let Some(current) = self.key_settings.as_deref().filter(|_| !self.existing) else {
            return Default::default();
        };
        let (mut all, mut segments) = (Vec::new(), Vec::new());
        for (number, (drive, path)) in drives.iter().zip(&self.paths).enumerate() {
            let spaces = drive.spaces();
            if let Err(error) = drive.note_settings(current, &spaces) {
                warn!(
                    path = %path.display(),
                    %error,
                    "cannot record the settings of keys; a later start cannot name the settings of the chunks stored now"
                );
            }
            let others = spaces.iter().filter(|usage| is_unreachable(usage, current));
            let others: HashSet<SpaceId> = others.map(|usage| usage.space).collect();
            if !others.is_empty() {
                let of_drive = drive.segments_with(&others).into_iter();
                segments.extend(of_drive.map(|(segment, generation)| UnreachableSegment {
                    drive: number,
                    segment,
                    generation,
                }));
            }
            all.extend(spaces);
        }
        (unreachable(&all, current), segments)
    }

    /// Refuses a folder that has no drive, before anything in it is changed.
    fn is_drive(&self, path: &Path) -> Result<(), DiskError> {
        if path.is_dir() {
            match content(path).map_err(DiskError::io(path))? {
                Content::Drive | Content::Remains(_) => return Ok(()),
                Content::Nothing => {}
                Content::Other => {
                    let path = path.to_owned();
                    return Err(DiskError::NotOurs { path });
                }
            }
        } else if path.exists() {
            let path = path.to_owned();
            return Err(DiskError::NotAFolder { path });
        }
        Err(DiskError::NoDriveYet {
            path: path.to_owned(),
            expected: self.expected_at(path),
        })
    }

    /// Returns the drive that was in a folder before, if the other drives know it.
    fn expected_at(&self, path: &Path) -> String {
        let other = |path: &PathBuf| SetRecord::decode(&fs::read(path.join(SET_NAME)).ok()?).ok();
        let records = self.paths.iter().filter_map(other);
        let path = absolute(path);
        let members = records.flat_map(|record| record.members);
        let here = members.filter(|member| member.path == path);
        let last = here.max_by_key(|member| member.last_seen);
        last.map_or_else(String::new, |member| {
            let id = hex(&member.drive_id);
            format!(
                "; drive {id} was here {}: its file system is not mounted",
                ago(member.last_seen)
            )
        })
    }

    fn open_folder(&self, path: &Path, size: u64) -> Result<Drive, DiskError> {
        let io = DiskError::io(path);
        let size = match self.existing {
            true => enough_for(path)?,
            false => size,
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
        if let Medium::Memory(name) = medium_of(path)?
            && !self.existing
        {
            warn!(
                path = %path.display(),
                "the folder is on {name}: its chunks use memory and are lost at a reboot; name a folder on a drive"
            );
        }
        if path.exists() && !path.is_dir() {
            let path = path.to_owned();
            return Err(DiskError::NotAFolder { path });
        }
        if !path.is_dir() {
            fs::create_dir_all(path).map_err(|source| DiskError::Missing {
                path: path.to_owned(),
                source: source.into(),
            })?;
        }
        let claim = Claim::new(path)?;
        if let Content::Remains(names) = content(path).map_err(io)? {
            warn!(
                path = %path.display(),
                files = names.len(),
                "`{HEADER_NAME}` is missing or cut short in the folder, so the chunks in its other \
                 files cannot be found any more; the drive starts empty (keep programs that remove \
                 files away from the folder)"
            );
            remove_remains(path, &names).map_err(io)?;
        }
        let header = header_of(path)?;
        if let Some(header) = &header {
            is_enough(least_for(header.segment_bytes))?;
        }
        let config = FolderConfig {
            engine: self.io,
            depth: self.depth,
            arena: self.arena.clone(),
            ..FolderConfig::default()
        };
        let folder = FolderVolume::open(path, config).map_err(|source| DiskError::NotWritable {
            path: path.to_owned(),
            source: source.into(),
        })?;
        let held = held_bytes(path).map_err(io)?;
        let free = folder.free().map_err(io)?;
        let available = (free + held).saturating_sub(self.keep_free);
        let size = match size > available && !self.existing {
            false => size,
            // Other files have filled the file system since then: the existing chunks are worth keeping.
            true if header.is_some() => {
                let smaller = size.min(available.max(enough_for(path)?));
                warn!(
                    path = %path.display(),
                    "{size} bytes were asked for, the file system has {available} free; the drive \
                     takes up to {smaller} until the next start"
                );
                smaller
            }
            true => {
                return Err(DiskError::Space {
                    path: path.to_owned(),
                    size,
                    free: available,
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
            stall: STALL,
            leave: LEAVE_TIMEOUT,
        };
        let volume = Arc::new(folder) as Arc<dyn Volume>;
        let opened = open_drive(volume, segment_bytes, settings, Some(claim));
        let (drive, notes) = opened.map_err(|source| {
            let path = path.to_owned();
            match source.raw_os_error() {
                Some(libc::EMFILE) => DiskError::OpenFiles { path },
                Some(_) => DiskError::Io {
                    path,
                    source: source.into(),
                },
                None => DiskError::Format {
                    path,
                    source: source.into(),
                },
            }
        })?;
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
    // A small drive still has several segments. A large one has at most 512, because each is an open file.
    let share = share.min(size / 4).max(size.div_ceil(512));
    share.next_multiple_of(1 << 20)
}

/// Returns the bytes that a folder may take on its file system, including those that it takes already. The
/// folder need not exist, but one above it must.
///
/// # Errors
/// [`DiskError`] if the file system stores no files or does not report its size.
pub fn usable_bytes(path: &Path) -> Result<u64, DiskError> {
    let io = DiskError::io(path);
    medium_of(path)?;
    let held = match path.is_dir() {
        true => held_bytes(path).map_err(io)?,
        false => 0,
    };
    match crate::volume::free_bytes(nearest(path)).map_err(io)? {
        NO_SIZE => Err(DiskError::NoSize {
            path: path.to_owned(),
        }),
        free => Ok(free.saturating_add(held)),
    }
}

/// Returns the folder itself, or the nearest existing one above it.
fn nearest(path: &Path) -> &Path {
    let above = path.ancestors().find(|path| path.is_dir());
    // A name without a folder before it is in the current folder.
    above.unwrap_or(Path::new("."))
}

/// Returns the medium behind a folder's file system.
fn medium_of(path: &Path) -> Result<Medium, DiskError> {
    let found = medium(nearest(path)).map_err(DiskError::io(path))?;
    match found {
        Medium::Nothing(name) => Err(DiskError::NoFiles {
            path: path.to_owned(),
            name,
        }),
        other => Ok(other),
    }
}

/// Returns the bytes that a drive needs for its content and a little more.
fn enough_for(path: &Path) -> Result<u64, DiskError> {
    let Some(header) = header_of(path)? else {
        let path = path.to_owned();
        return Err(DiskError::NoDrive { path });
    };
    // File lengths, because the file system may need less for a file with holes or compression.
    let lengths = |metadata: &fs::Metadata| metadata.len();
    let held = bytes_of_files(path, lengths).map_err(DiskError::io(path))?;
    // In addition to the chunks, the index takes up to a 32nd, and there are two logs.
    Ok(held + held / 16 + 3 * header.segment_bytes + (8 << 20))
}

/// Returns the smallest size of a drive with segments of this size: one segment is written while another is
/// evicted, and the index needs space too.
fn least_for(segment_bytes: u64) -> u64 {
    let segments = segment_bytes.saturating_mul(2);
    segments
        .saturating_add(segments / 16 + (1 << 20))
        .max(MIN_SIZE)
}

/// Reads the header of a folder, if the folder has a drive.
fn header_of(path: &Path) -> Result<Option<DriveHeader>, DiskError> {
    let bytes = match fs::read(path.join(HEADER_NAME)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            let path = path.to_owned();
            return Err(DiskError::Io {
                path,
                source: source.into(),
            });
        }
    };
    let whole = bytes.len() as u64 >= BLOCK;
    let header = match whole {
        true => DriveHeader::decode(&bytes).map_err(io::Error::other),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    };
    let header = header.map_err(|source| DiskError::Format {
        path: path.to_owned(),
        source: source.into(),
    })?;
    Ok(Some(header))
}

/// Returns the bytes that the drive's own files take already.
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

/// Opens the drive on a volume, or creates it.
pub(crate) fn open_drive(
    volume: Arc<dyn Volume>,
    segment_bytes: u64,
    settings: DriveSettings,
    claim: Option<Claim>,
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
    let drive = Drive::start(volume, header, recovered, &made, settings, claim)?;
    Ok((drive, notes))
}

fn make_header(volume: &dyn Volume, segment_bytes: u64) -> io::Result<()> {
    let header = DriveHeader {
        drive_id: random_id(),
        // An invalid size is refused below.
        segment_bytes: segment_bytes
            .checked_next_multiple_of(BLOCK)
            .unwrap_or(u64::MAX),
        created: now(),
    };
    let mut block = [0; BLOCK_LEN];
    header.encode(&mut block);
    DriveHeader::decode(&block).map_err(|error: FormatError| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("version {VERSION}: {error}"),
        )
    })?;
    replace_file(volume, HEADER_NAME, &block)
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
