//! QEMU guests with soft-RoCE: real RDMA verbs on a machine that has no device for them.
//!
//! A guest is a kernel of the distribution and an initramfs with the two sides, NIXL, and what
//! they need; nothing is installed but QEMU. It runs in emulation, with or without KVM: that
//! takes a minute and works everywhere.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::devices::PortCounters;
use crate::janitor::Janitor;
use crate::two_sides::{Report, Suite, within};
use crate::ucx::{self, Nixl};
use crate::{packages, ports, shown};

const INIT: &str = include_str!("init.sh");
/// Modules without which there is no soft-RoCE. The modules that these depend on are added.
const NEEDED: [&str; 5] = ["virtio_pci", "virtio_net", "dummy", "ib_uverbs", "rdma_rxe"];
/// Modules that a kernel asks for by name when it needs them, which no guest has `modprobe` for:
/// soft-RoCE's checksum.
const ASKED_FOR: &str = "crc32_generic";
/// Folder of a part that has the modules and the list of them in the order in which they are loaded.
const MODULES: &str = "modules";
/// Begins the names of folders with parts. Parts of another layout need another beginning.
const PARTS: &str = "rdma-guest-";
const PROVIDER: &str = "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so";
const FLAGS: &str = "--channel nixl --arena-mib 48 --sweep-kib 1024 --timeout 30 --limit 200";
/// Time from the start of a guest to its end; with the whole suite.
const LIMIT: Duration = Duration::from_secs(360);
const SUITE_LIMIT: Duration = Duration::from_secs(1500);
const COMMAND: Duration = Duration::from_secs(60);
/// Prints `insmod FILE` for each module in the order in which it can be loaded. The order differs
/// between kernels: `virtio_ring` depended on `virtio` until Debian's 6.1.192, where `virtio`
/// depends on `virtio_ring`.
const ORDER: &str = r#"PATH=$PATH:/usr/sbin:/sbin base=$1 version=$2 optional=$3; shift 3
depends() { modprobe --ignore-install --show-depends -d "$base" -S "$version" "$1"; }
depmod -b "$base" "$version"
for module; do depends "$module"; done
depends "$optional" || true"#;
/// Packs a folder into an initramfs, whose files belong to root.
const PACK: &str = r#"cd "$1"; find . | cpio --quiet --create --format=newc --owner=0:0"#;

/// The programs that run in guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Both sides in one guest, then [`PROPERTIES`].
    One,
    /// A side in each of two guests, with a link between them.
    Two,
    /// The whole suite.
    Suite,
}

/// Properties of the suite that an emulated machine has time for.
const PROPERTIES: &str = "writes_and_reads_of_all_sizes,sends_and_receives_of_all_sizes,\
     closing_ends_what_is_under_way,a_peer_dies_while_it_is_written,a_peer_starts_again";

/// The files that a guest boots from.
pub(crate) struct Guest {
    kernel: PathBuf,
    image: PathBuf,
}

/// The output of the driver's guest.
#[derive(Default)]
pub(crate) struct GuestOutput {
    pub(crate) report: Report,
    pub(crate) before: PortCounters,
    pub(crate) after: PortCounters,
    /// Lines of UCX's log.
    pub(crate) ucx: String,
    pub(crate) suite: Suite,
    device: String,
    problems: Vec<String>,
    over: bool,
}

impl GuestOutput {
    fn line(&mut self, line: &str) -> Result<()> {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "@driver" if rest.starts_with('{') => self.report.line(rest)?,
            "@counter" => {
                let words: Vec<&str> = rest.split(' ').collect();
                let [when, name, value] = words[..] else {
                    bail!("no counter: {line}");
                };
                let counters = match when {
                    "before" => &mut self.before,
                    _ => &mut self.after,
                };
                counters.0.insert(name.to_owned(), value.parse()?);
            }
            "@ucx" => self.ucx += &format!("{rest}\n"),
            "@property" => self.suite.wanted += 1,
            "@suite" => self.suite.line(rest),
            "@suite-ucx" => self.suite.ucx += &format!("{rest}\n"),
            "@device" => rest.clone_into(&mut self.device),
            "@problem" | "@stderr" | "@server" => self.problems.push(line.to_owned()),
            "@over" => self.over = true,
            _ => {}
        }
        Ok(())
    }
}

/// Returns the folder of things that are kept between runs.
fn cache() -> Result<PathBuf> {
    let named = std::env::var_os("LMC_CACHE_DIR").map(PathBuf::from);
    let home = || Some(Path::new(&std::env::var_os("HOME")?).join(".cache/lmc"));
    named
        .or_else(home)
        .context("neither LMC_CACHE_DIR nor HOME is set")
}

/// Returns whether guests can be had here.
pub(crate) fn possible() -> Result<()> {
    ensure!(
        std::env::consts::ARCH == "x86_64",
        "guests are made for x86_64 only, this is {}",
        std::env::consts::ARCH
    );
    packages::obtainable("qemu-system-x86_64", "qemu-system-x86")?;
    packages::obtainable("rdma", "iproute2")?;
    packages::obtainable("cpio", "cpio")?;
    if kept(&cache()?).is_none() {
        let debian = packages::found("apt-get") && packages::found("dpkg-deb");
        ensure!(
            debian,
            "the guest's kernel comes from Debian, and there is no apt-get here"
        );
    }
    Ok(())
}

/// Installs and fetches what is missing.
pub(crate) fn prepare() -> Result<()> {
    packages::install("qemu-system-x86_64", "qemu-system-x86")?;
    packages::install("rdma", "iproute2")?;
    packages::install("cpio", "cpio")?;
    parts().map(drop)
}

/// The parts that were fetched before.
fn kept(cache: &Path) -> Option<PathBuf> {
    let kept = fs::read_dir(cache).ok()?;
    let kept = kept.filter_map(|entry| Some(entry.ok()?.path()));
    let whole = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(PARTS)
    };
    kept.filter(whole).max()
}

/// The folder with a kernel, its modules, a shell, and the verbs of soft-RoCE; fetched once.
fn parts() -> Result<PathBuf> {
    let cache = cache()?;
    fs::create_dir_all(&cache)?;
    if let Some(folder) = kept(&cache) {
        return Ok(folder);
    }
    let kernel =
        packages::depends("linux-image-amd64").context("a guest boots Debian's newest kernel")?;
    let part = cache.join(format!("guest.{}", std::process::id()));
    let _ = fs::remove_dir_all(&part);
    let fetched = fetch(&kernel, &part);
    // Two runs at once fetch the same; one of them is kept.
    let whole = cache.join(format!("{PARTS}{kernel}"));
    if fetched.is_err() || fs::rename(&part, &whole).is_err() {
        fs::remove_dir_all(&part)?;
    }
    fetched.map(|()| whole)
}

/// Fetches parts with the kernel of a package. All of its modules are unpacked, because only the modules
/// name what they need; then the others are removed.
fn fetch(kernel: &str, part: &Path) -> Result<()> {
    let unpacked = part.join("kernel");
    fs::create_dir_all(&unpacked)?;
    let members = ["./boot/vmlinuz-*", "*/lib/modules/*"].map(str::to_owned);
    packages::extract(kernel, &members, &unpacked)?;
    let files = files(&unpacked)?;
    let image = files.iter().find(|path| starts_with(path, "vmlinuz-"));
    let image = image.with_context(|| format!("{kernel} holds no kernel"))?;
    fs::rename(image, part.join("vmlinuz"))?;
    let folder = part.join(MODULES);
    fs::create_dir_all(&folder)?;
    let mut order = String::new();
    for file in load_order(&unpacked)? {
        let name = file.file_stem().context("a module has a name")?;
        let name = name.to_string_lossy().into_owned();
        if !order.lines().any(|known| known == name) {
            fs::rename(&file, folder.join(format!("{name}.ko")))?;
            order += &format!("{name}\n");
        }
    }
    fs::write(folder.join("order"), order)?;
    fs::remove_dir_all(&unpacked)?;
    packages::extract("busybox-static", &["*/bin/busybox".to_owned()], part)?;
    packages::extract("ibverbs-providers", &[format!("./{PROVIDER}")], part)
}

/// Returns the modules that guests load, decompressed, each after those that it depends on. A
/// module that others share is named again.
fn load_order(kernel: &Path) -> Result<Vec<PathBuf>> {
    packages::install("depmod", "kmod")?;
    // Debian's packages have moved from /lib to /usr/lib.
    let bases = [kernel.to_owned(), kernel.join("usr")];
    let base = bases.iter().find(|base| base.join("lib/modules").is_dir());
    let base = base.context("the kernel's package holds no modules")?;
    let version = fs::read_dir(base.join("lib/modules"))?.next();
    let version = version.context("the kernel's package names no version")??;
    let mut ask = Command::new("sh");
    ask.args(["-ec", ORDER, "sh"]).arg(base);
    ask.arg(version.file_name()).arg(ASKED_FOR).args(NEEDED);
    let said = shown::capture(&mut ask, COMMAND)?;
    // Options of this machine may follow the file's name.
    said.lines()
        .filter_map(|line| line.strip_prefix("insmod ")?.split(' ').next())
        .map(|file| decompressed(Path::new(file)))
        .collect()
}

/// The file without compression, which newer kernel packages use.
fn decompressed(file: &Path) -> Result<PathBuf> {
    let ending = file.extension().unwrap_or_default().to_string_lossy();
    let (program, flags): (_, &[&str]) = match &*ending {
        "ko" => return Ok(file.to_owned()),
        "xz" => ("xz", &["--decompress"]),
        "zst" => ("zstd", &["--decompress", "--rm", "--quiet"]),
        "gz" => ("gzip", &["--decompress"]),
        other => bail!("{}: unknown compression {other:?}", file.display()),
    };
    let plain = file.with_extension("");
    if !plain.exists() {
        shown::capture(Command::new(program).args(flags).arg(file), COMMAND)
            .with_context(|| format!("the kernel's modules are compressed: {program} is needed"))?;
    }
    Ok(plain)
}

fn starts_with(path: &Path, start: &str) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with(start)
}

/// All files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        match path.is_dir() {
            true => files.extend(self::files(&path)?),
            false => files.push(path),
        }
    }
    Ok(files)
}

/// The root of a guest's file system, as a folder here; removed at the end.
struct Root(PathBuf);

impl Root {
    fn new(folder: PathBuf) -> Result<Self> {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(Self(folder))
    }

    /// Returns where a path of the guest lies here, and makes its folder.
    fn here(&self, path: &str) -> Result<PathBuf> {
        let here = self.0.join(path.trim_start_matches('/'));
        fs::create_dir_all(here.parent().context("a path in the root")?)?;
        Ok(here)
    }

    /// Copies a file, or what a link points to.
    fn file(&self, path: &str, from: &Path) -> Result<()> {
        let copied = fs::copy(from, self.here(path)?);
        copied.map(drop).with_context(|| from.display().to_string())
    }

    fn script(&self, path: &str, text: &str) -> Result<()> {
        let here = self.here(path)?;
        fs::write(&here, text)?;
        Ok(fs::set_permissions(
            here,
            fs::Permissions::from_mode(0o755),
        )?)
    }

    fn link(&self, path: &str, to: &str) -> Result<()> {
        Ok(symlink(to, self.here(path)?)?)
    }

    /// Packs everything into an initramfs.
    fn pack(&self, image: &Path) -> Result<()> {
        let file = fs::File::create(image).with_context(|| image.display().to_string())?;
        let mut pack = Command::new("sh");
        pack.args(["-ec", PACK, "sh"]).arg(&self.0).stdout(file);
        let packed = pack.status().context("cannot run sh")?;
        ensure!(packed.success(), "cpio could not pack the initramfs");
        Ok(())
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Guest {
    /// Makes the initramfs.
    pub(crate) fn make(program: &Path, suite: &Path, nixl: &Nixl, folder: &Path) -> Result<Self> {
        let parts = parts()?;
        let files = files(&parts)?;
        let kernel = parts.join("vmlinuz");
        let root = Root::new(folder.join("initramfs"))?;
        for path in ["proc", "sys", "dev", "tmp", "etc/libibverbs.d"] {
            fs::create_dir_all(root.0.join(path))?;
        }
        let busybox = files.iter().find(|path| starts_with(path, "busybox"));
        let busybox = busybox.context("the guest's parts hold no busybox")?;
        root.file("bin/busybox", busybox)?;
        for path in files
            .iter()
            .filter(|path| path.starts_with(parts.join(MODULES)))
        {
            let name = path.strip_prefix(&parts)?;
            root.file(&name.to_string_lossy(), path)?;
        }
        let mut roots = vec![program.to_owned(), suite.to_owned()];
        for tool in ["ip", "rdma"] {
            let path = shown::capture(
                Command::new("sh").args(["-c", &format!("command -v {tool}")]),
                COMMAND,
            )?;
            let path = PathBuf::from(path.trim());
            root.file(&format!("bin/{tool}"), &path)?;
            roots.push(path);
        }
        root.file("bin/two_sides", program)?;
        root.file("bin/suite", suite)?;
        let library = pack_nixl(&root, nixl, &mut roots)?;
        pack_libraries(&root, &roots, &wheel(nixl)?)?;
        // The wheel's libibverbs looks for providers where Red Hat keeps them, so a variable names them; and
        // a provider's `libibverbs.so.1` must be the copy that is loaded already.
        let provider = parts.join(PROVIDER);
        root.file(PROVIDER, &provider)?;
        let provider = PROVIDER.strip_suffix("-rdmav34.so").expect("it ends so");
        let verbs = nixl.bundled("libibverbs-")?;
        root.link("verbs/libibverbs.so.1", &in_guest(&verbs, &wheel(nixl)?)?)?;
        let mut variables = format!(
            "export LMC_NIXL_LIBRARY={library} LD_LIBRARY_PATH=/verbs IBV_DRIVERS=/{provider}\n\
             FLAGS='{FLAGS}'\n"
        );
        for (name, value) in ucx::environment("rc,self", Some("rxe0:1"), "/tmp/ucx") {
            variables += &format!("export {name}='{value}'\n");
        }
        root.script("variables", &variables)?;
        root.script("init", INIT)?;
        let image = folder.join("initramfs.cpio");
        root.pack(&image)?;
        Ok(Self { kernel, image })
    }

    /// Boots, and reads what the driver's side says until it is over.
    pub(crate) fn run(
        &self,
        layout: Layout,
        logs: &Path,
        until: Option<Instant>,
    ) -> Result<GuestOutput> {
        let limit = match layout {
            Layout::Suite => SUITE_LIMIT,
            Layout::One | Layout::Two => LIMIT,
        };
        let deadline = Instant::now() + within(limit, until)?;
        let mut janitor = Janitor::new()?;
        let mut output = GuestOutput::default();
        let mut server = None;
        let mut link = None;
        if layout == Layout::Two {
            let port = ports::free()?;
            let mut running = self.boot(
                "serve",
                Some(&format!("listen=127.0.0.1:{port}")),
                logs,
                &mut janitor,
            )?;
            // The other guest joins when this one listens.
            running.until(deadline, |line| Ok(line.starts_with("@serving")))?;
            server = Some(running);
            link = Some(format!("connect=127.0.0.1:{port}"));
        }
        let role = match layout {
            Layout::One => "both",
            Layout::Two => "drive",
            Layout::Suite => "suite",
        };
        let mut driver = self.boot(role, link.as_deref(), logs, &mut janitor)?;
        let heard = driver.until(deadline, |line| {
            let shown = [
                "@driver", "@suite ", "@device", "@problem", "@stderr", "@server",
            ];
            if shown.iter().any(|kind| line.starts_with(kind)) {
                println!("    {line}");
            }
            output.line(line)?;
            Ok(output.over)
        });
        drop((driver, server));
        output.report.is_right()?;
        output.suite.is_right()?;
        heard?;
        ensure!(
            output.over,
            "the guest ended early; see {}",
            logs.join(format!("{role}.serial")).display()
        );
        Ok(output)
    }

    fn boot(
        &self,
        role: &str,
        link: Option<&str>,
        logs: &Path,
        janitor: &mut Janitor,
    ) -> Result<Running> {
        let properties = match role {
            "both" => PROPERTIES,
            "suite" => "all",
            _ => "",
        };
        let mut qemu = Command::new("qemu-system-x86_64");
        let cores = if link.is_some() { 1 } else { 2 };
        let machine = format!(
            "-accel tcg,thread=multi -cpu max -m 1500 -smp {cores} -display none -nodefaults \
             -serial stdio -no-reboot"
        );
        qemu.args(machine.split_whitespace())
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.image)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 panic=-1 loglevel=4 lmc.role={role} lmc.properties={properties}"
            ));
        if let Some(link) = link {
            let mac = if role == "serve" { "01" } else { "02" };
            let device = format!(
                "-netdev socket,id=link,{link} \
                 -device virtio-net-pci,netdev=link,mac=52:54:00:77:00:{mac}"
            );
            qemu.args(device.split_whitespace());
        }
        println!("$ {}", shown::typed(&qemu));
        let errors = fs::File::create(logs.join(format!("{role}.qemu")))?;
        let mut child = qemu
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .context("cannot run qemu-system-x86_64")?;
        janitor.in_the_end(&format!("kill -9 {}", child.id()))?;
        let output = child.stdout.take().context("a piped output")?;
        let mut log = fs::File::create(logs.join(format!("{role}.serial")))?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut reader = BufReader::new(output);
            let mut line = Vec::new();
            while reader
                .read_until(b'\n', &mut line)
                .is_ok_and(|read| read > 0)
            {
                let _ = log.write_all(&line);
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                line.clear();
                if sender.send(text).is_err() {
                    break;
                }
            }
        });
        Ok(Running { child, lines })
    }
}

/// A guest that runs. It is ended with this.
struct Running {
    child: Child,
    lines: Receiver<String>,
}

impl Running {
    /// Reads lines until one is the last, or there are no more.
    fn until(
        &mut self,
        deadline: Instant,
        mut is_last: impl FnMut(&str) -> Result<bool>,
    ) -> Result<()> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if is_last(&line)? {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => bail!("the guest was not done by its deadline"),
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        shown::end(&mut self.child);
    }
}

/// The folder that the wheel was unpacked in.
fn wheel(nixl: &Nixl) -> Result<PathBuf> {
    let wheel = nixl.library().parent().and_then(Path::parent);
    wheel
        .context("the library lies in a wheel")?
        .canonicalize()
        .context("the wheel is there")
}

/// Returns the path of a file of the wheel in the guest; the wheel's folders stay side by side, because
/// they find each other so.
fn in_guest(file: &Path, wheel: &Path) -> Result<String> {
    let file = file.canonicalize()?;
    let below = file.strip_prefix(wheel)?;
    Ok(format!("/nixl/{}", below.display()))
}

/// Adds what NIXL loads by name, and tells where its library lies. What it links to is found
/// from `roots`.
fn pack_nixl(root: &Root, nixl: &Nixl, roots: &mut Vec<PathBuf>) -> Result<String> {
    let wheel = wheel(nixl)?;
    let own = nixl.library().parent().context("a folder")?;
    let needs = nixl.needs()?;
    let mut loaded = vec![
        nixl.library().to_owned(),
        own.join("plugins/libplugin_UCX.so"),
    ];
    for module in ["cma", "ib", "ib_mlx5"] {
        loaded.push(needs.join(format!("ucx/libuct_{module}.so.0.0.0")));
    }
    for bundled in ["libibverbs-", "libmlx5-"] {
        loaded.push(nixl.bundled(bundled)?);
    }
    for file in &loaded {
        root.file(&in_guest(file, &wheel)?, file)?;
    }
    roots.extend(loaded);
    in_guest(nixl.library(), &wheel)
}

/// Adds all libraries that these files link to, and the loader.
fn pack_libraries(root: &Root, roots: &[PathBuf], wheel: &Path) -> Result<()> {
    let linked = shown::capture(Command::new("ldd").args(roots), COMMAND)?;
    for line in linked.lines() {
        let path = line.split_once("=> ").map_or(line, |(_, path)| path).trim();
        let Some((path, _)) = path.split_once(" (") else {
            ensure!(!line.contains("not found"), "ldd: {}", line.trim());
            continue;
        };
        if !path.starts_with('/') {
            continue;
        }
        let file = Path::new(path).canonicalize()?;
        match file.starts_with(wheel) {
            true => root.file(&in_guest(&file, wheel)?, &file)?,
            false if path.contains("ld-linux") => root.file("lib64/ld-linux-x86-64.so.2", &file)?,
            false => {
                let name = Path::new(path).file_name().context("a file has a name")?;
                let name = name.to_string_lossy();
                root.file(&format!("lib/x86_64-linux-gnu/{name}"), &file)?;
            }
        }
    }
    Ok(())
}

impl GuestOutput {
    /// Returns problems that the report does not name.
    pub(crate) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// The device, as `rdma link show` names it.
    pub(crate) fn device(&self) -> &str {
        &self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compressed_module_is_read() {
        let folder = Root::new(std::env::temp_dir().join(format!("lmc-ko-{}", std::process::id())));
        let folder = folder.expect("a temporary folder");
        let file = folder.0.join("dummy.ko");
        fs::write(&file, "a module").expect("a file");
        if shown::capture(Command::new("xz").arg(&file), COMMAND).is_err() {
            println!("skipped: no xz here");
            return;
        }
        let packed = folder.0.join("dummy.ko.xz");
        for _ in 0..2 {
            assert_eq!(decompressed(&packed).expect("it is there"), file);
        }
        assert_eq!(fs::read(&file).expect("a file"), b"a module");
    }

    /// Makes a module that uses a symbol of each module that it needs.
    fn module(folder: &Path, name: &str, needs: &[&str]) {
        let mut text = format!(
            ".section .modinfo,\"a\"\n.asciz \"name={name}\"\n\
             .section __ksymtab_strings,\"a\"\n.asciz \"of_{name}\"\n.text\n"
        );
        needs
            .iter()
            .for_each(|need| text += &format!(".quad of_{need}\n"));
        let source = folder.join("source.s");
        fs::write(&source, text).expect("a file");
        let mut assemble = Command::new("cc");
        assemble
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(folder.join(format!("{name}.ko")));
        shown::capture(&mut assemble, COMMAND).expect("cc assembles it");
    }

    /// A fixed order loaded `virtio` before `virtio_ring`. Debian's 6.1.192 turned that
    /// dependency round, and on a new machine every guest booted without its device.
    #[test]
    fn each_module_comes_after_those_that_it_needs() {
        if !packages::found("depmod") {
            println!("skipped: no depmod here");
            return;
        }
        for [first, second] in [["virtio_ring", "virtio"], ["virtio", "virtio_ring"]] {
            let root = std::env::temp_dir().join(format!("lmc-{first}-{}", std::process::id()));
            let root = Root::new(root).expect("a temporary folder");
            let folder = root.here("lib/modules/6.1/virtio").expect("a folder");
            let folder = folder.parent().expect("a folder");
            module(folder, first, &[]);
            module(folder, second, &[first]);
            NEEDED
                .iter()
                .for_each(|name| module(folder, name, &[first, second]));
            let order = load_order(&root.0).expect("all is there");
            let at = |name: &str| order.iter().position(|file| starts_with(file, name));
            let (first, second) = (format!("{first}.ko"), format!("{second}.ko"));
            assert!(
                at(&first) < at(&second) && at(&second) < at("virtio_pci"),
                "{order:?}"
            );
            assert!(
                at(&first).is_some() && at("rdma_rxe").is_some(),
                "{order:?}"
            );
        }
    }

    #[test]
    fn a_kernel_without_a_module_is_refused() {
        if !packages::found("depmod") {
            println!("skipped: no depmod here");
            return;
        }
        let root = std::env::temp_dir().join(format!("lmc-lacks-{}", std::process::id()));
        let root = Root::new(root).expect("a temporary folder");
        let folder = root.here("lib/modules/6.1/virtio").expect("a folder");
        module(folder.parent().expect("a folder"), "virtio_pci", &[]);
        let error = load_order(&root.0).expect_err("virtio_net is missing");
        assert!(format!("{error:#}").contains("virtio_net"), "{error:#}");
    }

    #[test]
    fn an_initramfs_holds_files_with_their_folders() {
        if !packages::found("cpio") {
            println!("skipped: no cpio here");
            return;
        }
        let folder = std::env::temp_dir().join(format!("lmc-cpio-{}", std::process::id()));
        let root = Root::new(folder.clone()).expect("a temporary folder");
        root.script("/etc/deep/greeting", "hello").expect("a file");
        root.link("etc/other", "deep/greeting").expect("a link");
        let copy = root.0.join("etc/deep/greeting");
        root.file("bin/copy", &copy).expect("a copy");
        let image = folder.with_extension("cpio");
        root.pack(&image).expect("cpio packs it");
        let mut list = Command::new("sh");
        list.args(["-ec", "cpio --list --quiet < $1 | LC_ALL=C sort", "sh"])
            .arg(&image);
        let listed = shown::capture(&mut list, COMMAND).expect("cpio lists it");
        let _ = fs::remove_file(image);
        assert_eq!(
            listed,
            ".\nbin\nbin/copy\netc\netc/deep\netc/deep/greeting\netc/other\n"
        );
    }

    #[test]
    fn the_serial_line_carries_report_counters_and_log() {
        let mut output = GuestOutput::default();
        let text = "[    0.1] a word of the kernel's\n\
            @device link rxe0/1 state ACTIVE\n\
            @counter before sent_pkts 1\n\
            @driver {\"check\":\"read\",\"ok\":true,\"ms\":3}\n\
            @driver not a result\n\
            @counter after sent_pkts 900\n\
            @property reads_land\n\
            @suite a loader's complaint\n\
            @counter after rcvd_pkts 800\n\
            @ucx x inter-node cfg#1 rma(rc_verbs/rxe0:1)\n\
            @over";
        for line in text.lines() {
            output.line(line).expect("a line of a guest");
        }
        assert!(output.over && output.device.contains("ACTIVE"));
        assert_eq!(output.report.passed, ["read"]);
        assert!(output.after.carried(&output.before, (4096, 4096)).is_some());
        assert!(ucx::expect(&output.ucx, "rma(rc_").is_ok());
        assert_eq!(output.suite.wanted, 1);
    }
}
