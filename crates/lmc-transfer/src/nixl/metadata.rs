//! What agents of NIXL 1.x say of themselves, read before NIXL reads it: that takes it for sound,
//! and what was changed crashes the process.
//!
//! Metadata is `nixlSerDes|` and fields, each of them a tag, the length of its bytes (u64), its
//! bytes and `|`. Numbers are little-endian; `*` is as often as the number before says.
//!
//! | tag | bytes |
//! |---|---|
//! | `Agent` | the agent's name |
//! | `Conns` | number of backends (u64) |
//! | `t`, `c` * | a backend's name; how its agent is connected to |
//! | | `MemSection` |
//! | `nixlSecElms` | number of sections (u64) |
//! | `bknd` * | a backend's name |
//! | `nixlDList` * | `nixlSDList` |
//! | `t` * | kind of memory (u32) |
//! | `n` * | number of regions (u64) |
//! | * | a region: address, bytes, device (u64 each); how its memory is reached |
//!
//! What says how is the backend's. That of UCX is read as well: the address of a worker
//! (`ucp/wireup/address.c` there, its version 1) and packed remote keys (`ucp/core/ucp_rkey.c`).
//! Both name what their transports know by lengths, and what those bytes say is theirs to check.

use super::agent::Remote;

const OPENING: &[u8] = b"nixlSerDes|";
/// Bytes of a backend's name at most.
const MAX_BACKEND: usize = 64;
/// Kinds of memory: the host's, a GPU's, and three kinds of storage.
const KINDS: u32 = 5;
const DRAM: u32 = 0;
const UCX: &[u8] = b"UCX";

/// Whether metadata is what NIXL would write of the peer's agent; if not, why not.
pub(super) fn check(remote: &Remote, backend: &str) -> Result<(), String> {
    read(remote, backend).map_err(|fault| format!("the peer's metadata is not NIXL's: {fault}"))
}

fn read(remote: &Remote, backend: &str) -> Result<(), String> {
    let mut fields = Fields::new(&remote.metadata)?;
    if fields.next(b"Agent")? != remote.agent.as_bytes() {
        return Err("it is of another agent".to_owned());
    }
    let mut backends = Vec::new();
    for _ in 0..fields.number(b"Conns")? {
        let name = fields.backend(b"t")?;
        if backends.contains(&name) {
            return Err("a backend comes twice".to_owned());
        }
        let connection = fields.next(b"c")?;
        if connection.is_empty() || name == UCX && !is_worker_address(connection) {
            let fault = "its agent's address is not understood, which must be of UCX's version 1";
            return Err(fault.to_owned());
        }
        backends.push(name);
    }
    if !backends.contains(&backend.as_bytes()) {
        return Err(format!("its agent has no backend {backend}"));
    }
    if fields.next(b"")? != b"MemSection" {
        return Err("its memory is expected after its backends".to_owned());
    }
    for _ in 0..fields.number(b"nixlSecElms")? {
        let name = fields.backend(b"bknd")?;
        if !backends.contains(&name) {
            return Err("memory of a backend that it has not".to_owned());
        }
        fields.section(name)?;
    }
    match fields.0 {
        [] => Ok(()),
        rest => Err(format!("{} bytes after its end", rest.len())),
    }
}

/// The fields that are still to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn new(metadata: &'a [u8]) -> Result<Self, String> {
        let rest = metadata.strip_prefix(OPENING);
        rest.map(Self).ok_or("it does not begin so".to_owned())
    }

    /// The bytes of the next field, which has this tag.
    fn next(&mut self, tag: &[u8]) -> Result<&'a [u8], String> {
        let read = || {
            let (len, rest) = self.0.strip_prefix(tag)?.split_first_chunk()?;
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (bytes, rest) = rest.split_at_checked(len)?;
            Some((bytes, rest.strip_prefix(b"|")?))
        };
        let tag = String::from_utf8_lossy(tag);
        let (bytes, rest) = read().ok_or(format!("no whole field {tag:?} where one must be"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn number(&mut self, tag: &[u8]) -> Result<u64, String> {
        let bytes = self.next(tag)?.try_into();
        let fault = |_| format!("{:?} has not 8 bytes", String::from_utf8_lossy(tag));
        Ok(u64::from_le_bytes(bytes.map_err(fault)?))
    }

    fn backend(&mut self, tag: &[u8]) -> Result<&'a [u8], String> {
        let name = self.next(tag)?;
        let sound = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let is_name = (1..=MAX_BACKEND).contains(&name.len()) && name.iter().all(sound);
        is_name.then_some(name).ok_or("no backend".to_owned())
    }

    /// The memory that a backend reaches.
    fn section(&mut self, backend: &[u8]) -> Result<(), String> {
        if self.next(b"nixlDList")? != b"nixlSDList" {
            return Err("a list of another kind".to_owned());
        }
        let kind = self.next(b"t")?.try_into().map(u32::from_le_bytes);
        let kind = kind.ok().filter(|kind| *kind < KINDS);
        let kind = kind.ok_or("memory of no kind that there is")?;
        let regions = self.number(b"n")?;
        if regions == 0 {
            return Err("a list of nothing".to_owned());
        }
        for _ in 0..regions {
            let region = self.next(b"")?.split_first_chunk::<24>();
            let (_, key) = region.ok_or("a region of less than 24 bytes")?;
            if backend == UCX && !is_remote_key(key, kind) {
                return Err("how its memory is reached is not understood".to_owned());
            }
        }
        Ok(())
    }
}

/// Set in the header of a worker's address: its number follows. Nothing else is. Version 1 is 0.
const HEADER: u8 = 0x20;
/// Set in the first byte of a device that has no transports: here UCX says its version, last.
const EMPTY: u8 = 0x80;
/// The last device, or the last transport of a device.
const LAST: u8 = 0x80;
/// The number of the device's paths follows.
const PATHS: u8 = 0x40;
/// The device's place in the system follows.
const PLACE: u8 = 0x20;
/// Set in a transport's length where addresses of endpoints follow, which no worker has.
const ENDPOINTS: u8 = 0x40;
/// Transports of all devices at most.
const MAX_TRANSPORTS: usize = 128;

fn is_worker_address(address: &[u8]) -> bool {
    worker_address(address).is_some_and(<[u8]>::is_empty)
}

/// What comes after a worker's address; none where there is no such address.
fn worker_address(address: &[u8]) -> Option<&[u8]> {
    let (header, rest) = address.split_first_chunk::<9>()?;
    if header[0] != HEADER {
        return None;
    }
    let mut rest = rest;
    let mut transports = 0;
    loop {
        let ([domain, flags], device) = rest.split_first_chunk()?;
        let len = usize::from(flags & 0x1f);
        if domain & EMPTY != 0 {
            return (*flags == LAST).then_some(device);
        }
        let more = usize::from(flags & PATHS != 0) + usize::from(flags & PLACE != 0);
        if flags & LAST != 0 {
            return None;
        }
        rest = device.get(more + len..)?;
        loop {
            // Checksum of its name; overhead, bandwidth, latency; flags; length and its flags.
            let (transport, behind) = rest.split_first_chunk::<19>()?;
            let number = |at| {
                f32::from_le_bytes([at, at + 1, at + 2, at + 3].map(|at: usize| transport[at]))
            };
            let (overhead, bandwidth, latency) = (number(2), number(6), number(10));
            let seconds = 0.0..1.0;
            let sound = seconds.contains(&overhead)
                && seconds.contains(&latency)
                && bandwidth > 0.0
                && bandwidth.is_finite();
            transports += 1;
            let flags = transport[18];
            if !sound || flags & ENDPOINTS != 0 || transports > MAX_TRANSPORTS {
                return None;
            }
            rest = behind.get(usize::from(flags & 0x3f)..)?;
            if flags & LAST != 0 {
                break;
            }
        }
    }
}

/// Kinds of memory that UCX knows; the first is the host's.
const UCX_KINDS: u8 = 9;

/// A key: its domains (u64, a bit each), the kind of memory (u8), of each domain a length (u8) and
/// so many bytes; then nothing, or a device (u8) and its distance to others (3 bytes each).
fn is_remote_key(key: &[u8], kind: u32) -> bool {
    let Some((header, mut rest)) = key.split_first_chunk::<9>() else {
        return false;
    };
    let [domains @ .., found] = *header;
    if found >= UCX_KINDS || (found == 0) != (kind == DRAM) {
        return false;
    }
    for _ in 0..u64::from_le_bytes(domains).count_ones() {
        let Some((len, bytes)) = rest.split_first() else {
            return false;
        };
        let Some(behind) = bytes.get(usize::from(*len)..) else {
            return false;
        };
        rest = behind;
    }
    rest.is_empty() || rest.len() % 3 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nixl::agent::NixlMemory;

    fn field(tag: &str, bytes: &[u8]) -> Vec<u8> {
        let len = (bytes.len() as u64).to_le_bytes();
        [tag.as_bytes(), &len, bytes, b"|"].concat()
    }

    fn number(tag: &str, number: u64) -> Vec<u8> {
        field(tag, &number.to_le_bytes())
    }

    /// What UCX 1.23 wrote with `UCX_TLS=cma,tcp`, its identity and ports left out.
    fn worker_address() -> Vec<u8> {
        let mut address = vec![HEADER, 1, 2, 3, 4, 5, 6, 7, 8];
        // A device: domain 1, an address of 8 bytes. Its only transport has one of 4.
        address.extend_from_slice(&[1, 8, 233, 7, 88, 12, 122, 25, 42, 76]);
        address.extend_from_slice(&[0xa7, 0xd3]);
        for number in [8e-8_f32, 1.1e10, 6e-8] {
            address.extend_from_slice(&number.to_le_bytes());
        }
        address.extend_from_slice(&[0x36, 0x16, 0, 0x80, LAST | 4, 0, 0, 0xc0, 2]);
        address.extend_from_slice(&[EMPTY | 7, LAST]);
        address
    }

    fn region(key: &[u8]) -> Vec<u8> {
        let numbers = [1_u64 << 40, 8192, 0].map(u64::to_le_bytes);
        field("", &[&numbers.concat(), key].concat())
    }

    /// Of an agent `a` with these backends; the first has these regions.
    fn metadata(backends: &[&str], regions: &[Vec<u8>]) -> Vec<u8> {
        let mut metadata = OPENING.to_vec();
        metadata.extend(field("Agent", b"a"));
        metadata.extend(number("Conns", backends.len() as u64));
        for backend in backends {
            metadata.extend(field("t", backend.as_bytes()));
            metadata.extend(field("c", &worker_address()));
        }
        metadata.extend(field("", b"MemSection"));
        metadata.extend(number("nixlSecElms", 1));
        metadata.extend(field("bknd", backends[0].as_bytes()));
        metadata.extend(field("nixlDList", b"nixlSDList"));
        metadata.extend(field("t", &DRAM.to_le_bytes()));
        metadata.extend(number("n", regions.len() as u64));
        metadata.extend(regions.concat());
        metadata
    }

    fn check(metadata: &[u8]) -> Result<(), String> {
        let remote = Remote {
            agent: "a".to_owned(),
            metadata: metadata.to_vec(),
            base: 0,
            len: 0,
            memory: NixlMemory::Host,
        };
        super::check(&remote, "UCX")
    }

    /// One of no domains, and one of two with the distances of a device.
    fn keys() -> [Vec<u8>; 2] {
        let far = [
            &[0b101, 0, 0, 0, 0, 0, 0, 0, 0][..],
            &[2, 7, 7, 0],
            &[255, 1, 2, 3],
        ];
        [vec![0; 9], far.concat()]
    }

    #[test]
    fn what_nixl_writes_is_taken() {
        let regions = keys().map(|key| region(&key));
        for backends in [&["UCX"][..], &["UCX", "GDS_MT"]] {
            assert_eq!(check(&metadata(backends, &regions)), Ok(()));
        }
    }

    #[test]
    fn what_is_wrong_with_metadata_is_said() {
        let regions = keys().map(|key| region(&key));
        let good = metadata(&["UCX"], &regions);
        let mut longer = good.clone();
        longer.push(b'|');
        let kind = good.windows(5).rposition(|five| five == b"|t\x04\0\0");
        let mut of_no_kind = good.clone();
        of_no_kind[kind.expect("the kind of memory") + 10] = 9;
        let other = b"nixlSerDes|Agent\x01\0\0\0\0\0\0\0b|";
        for (metadata, why) in [
            (b"something else".to_vec(), "does not begin"),
            (other.to_vec(), "of another agent"),
            (good[..good.len() - 1].to_vec(), "no whole field \"\""),
            (longer, "1 bytes after its end"),
            (of_no_kind, "of no kind"),
            (metadata(&["GDS_MT"], &regions), "no backend UCX"),
            (metadata(&["UCX", "UCX"], &regions), "comes twice"),
            (metadata(&["UCX", "a b"], &regions), "no backend"),
            (metadata(&["UCX"], &[]), "a list of nothing"),
            (metadata(&["UCX"], &[field("", b"short")]), "less than 24"),
            (metadata(&["UCX"], &[region(b"")]), "not understood"),
        ] {
            let fault = check(&metadata).expect_err(why);
            assert!(fault.contains(why), "{fault}, and not {why}");
        }
    }

    #[test]
    fn addresses_and_keys_are_read_to_their_last_byte() {
        let address = worker_address();
        assert!(is_worker_address(&address));
        for len in 0..address.len() {
            assert!(!is_worker_address(&address[..len]), "{len} bytes");
        }
        assert!(!is_worker_address(&[&address[..], &[0]].concat()));
        for key in keys() {
            assert!(is_remote_key(&key, DRAM) && !is_remote_key(&key, 1));
        }
        let [_, key] = keys();
        // Without the distances, and without those and the device, it is a whole key as well.
        for len in (0..key.len()).filter(|len| ![13, 14].contains(len)) {
            assert!(!is_remote_key(&key[..len], DRAM), "{len} bytes");
        }
    }

    #[test]
    fn no_change_is_a_panic() {
        let good = metadata(&["UCX"], &keys().map(|key| region(&key)));
        let mut taken = 0;
        for at in 0..good.len() {
            for byte in 0..=255 {
                let mut changed = good.clone();
                changed[at] = byte;
                taken += usize::from(check(&changed).is_ok());
            }
        }
        // Numbers that may be any, and names.
        assert!(taken < good.len() * 256 / 2, "{taken} were taken");
    }
}
