//! Kernel modules: what each needs, and the order in which `insmod` accepts them.
//!
//! The order is derived from the modules themselves, because it differs between kernels:
//! `virtio_ring` depended on `virtio` until Debian's 6.1.192, where `virtio` depends on
//! `virtio_ring`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::shown;

const DECOMPRESSION: Duration = Duration::from_secs(30);

/// Modules that must be loaded before a module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Modules whose symbols it uses (`depends=`).
    hard: Vec<String>,
    /// Modules that it asks for by name, where the kernel has them (`softdep=pre:`).
    soft: Vec<String>,
}

impl Needs {
    /// Reads the strings of a `.modinfo` section.
    fn parse(modinfo: &[u8]) -> Self {
        let mut needs = Self::default();
        for string in modinfo.split(|&byte| byte == 0) {
            let string = String::from_utf8_lossy(string);
            if let Some(names) = string.strip_prefix("depends=") {
                let names = names.split(',').filter(|name| !name.is_empty());
                needs.hard.extend(names.map(normalized));
            } else if let Some(names) = string.strip_prefix("softdep=") {
                let mut is_pre = false;
                for word in names.split_whitespace() {
                    match word {
                        "pre:" => is_pre = true,
                        "post:" => is_pre = false,
                        name if is_pre => needs.soft.push(normalized(name)),
                        _ => {}
                    }
                }
            }
        }
        needs
    }
}

/// Files of modules by name, and the names of what is built into the kernel.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
}

impl Modules {
    /// Sorts the files of a kernel package. Other files are ignored.
    ///
    /// # Errors
    /// A list of built-in modules cannot be read.
    pub(crate) fn among(files: &[PathBuf]) -> Result<Self> {
        let mut modules = Self::default();
        for path in files {
            let name = file_name(path);
            if name == "modules.builtin" {
                let list = fs::read_to_string(path).with_context(|| path.display().to_string())?;
                let names = list.lines().filter_map(|line| module_name(Path::new(line)));
                modules.built_in.extend(names);
            } else if let Some(name) = module_name(path) {
                modules.files.insert(name, path.clone());
            }
        }
        Ok(modules)
    }

    /// The modules that must be loaded to have `required` and, where the kernel has them,
    /// `optional`: each after all that it needs. Compressed files are decompressed in place.
    ///
    /// # Errors
    /// The kernel lacks a module, or one cannot be read.
    pub(crate) fn load_order(
        &self,
        required: &[&str],
        optional: &[&str],
    ) -> Result<Vec<(String, PathBuf)>> {
        let mut plain = BTreeMap::new();
        let has = |name: &str| self.files.contains_key(name);
        for name in required {
            ensure!(
                has(name) || self.built_in.contains(*name),
                "the kernel has no module {name}"
            );
        }
        let roots: Vec<&str> = required.iter().chain(optional).copied().collect();
        let roots: Vec<&str> = roots.into_iter().filter(|name| has(name)).collect();
        let order = sorted(&roots, |name| {
            let Some(file) = self.files.get(name) else {
                return Ok(None);
            };
            let file = decompressed(file)?;
            let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
            let needs = section(&bytes, ".modinfo").map(Needs::parse);
            let needs = needs.with_context(|| format!("{} is not a module", file.display()))?;
            for need in &needs.hard {
                ensure!(
                    has(need) || self.built_in.contains(need),
                    "module {name} depends on {need}, which the kernel's package lacks"
                );
            }
            plain.insert(name.to_owned(), file);
            Ok(Some(needs))
        })?;
        let with_file = |name: String| {
            let file = plain.remove(&name).context("a sorted module was read")?;
            Ok((name, file))
        };
        order.into_iter().map(with_file).collect()
    }
}

/// The roots and all that they need, each name after those that it needs. `needs` returns `None`
/// for what is not loaded from a file.
fn sorted(
    roots: &[&str],
    mut needs: impl FnMut(&str) -> Result<Option<Needs>>,
) -> Result<Vec<String>> {
    enum Visit {
        Enter(String),
        Leave(String),
    }
    let mut order = Vec::new();
    let mut entered = BTreeSet::new();
    let mut open = BTreeSet::new();
    let enter = |name: &str| Visit::Enter(name.to_owned());
    let mut stack: Vec<Visit> = roots.iter().rev().map(|name| enter(name)).collect();
    while let Some(visit) = stack.pop() {
        let name = match visit {
            Visit::Leave(name) => {
                open.remove(&name);
                order.push(name);
                continue;
            }
            Visit::Enter(name) => name,
        };
        if !entered.insert(name.clone()) {
            ensure!(!open.contains(&name), "module {name} depends on itself");
            continue;
        }
        let Some(found) = needs(&name)? else {
            continue;
        };
        open.insert(name.clone());
        stack.push(Visit::Leave(name));
        let all = found.hard.iter().chain(&found.soft);
        stack.extend(all.rev().map(|name| enter(name)));
    }
    Ok(order)
}

/// A module's name as the kernel writes it.
fn normalized(name: &str) -> String {
    name.replace('-', "_")
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The name of the module that a file holds.
fn module_name(path: &Path) -> Option<String> {
    let name = file_name(path);
    let (stem, ending) = name.split_once(".ko")?;
    let is_module = ["", ".xz", ".zst", ".gz"].contains(&ending);
    is_module.then(|| normalized(stem))
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
    let mut command = Command::new(program);
    shown::capture(command.args(flags).arg(file), DECOMPRESSION)
        .with_context(|| format!("the kernel's modules are compressed: {program} is needed"))?;
    Ok(file.with_extension(""))
}

/// The bytes of a section of a 64-bit little-endian ELF file; `None` where it has none of that
/// name or is no such file.
fn section<'a>(elf: &'a [u8], wanted: &str) -> Option<&'a [u8]> {
    // Offsets of the fields: man 5 elf, `Elf64_Ehdr` and `Elf64_Shdr`.
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let field = elf.get(at..at.checked_add(bytes)?)?;
        let add = |sum: usize, &byte: &u8| (sum << 8) | usize::from(byte);
        Some(field.iter().rev().fold(0, add))
    };
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (headers, size) = (number(0x28, 8)?, number(0x3a, 2)?);
    let (count, names) = (number(0x3c, 2)?, number(0x3e, 2)?);
    let header = |index: usize| headers.checked_add(index.checked_mul(size)?);
    let content = |header: usize| {
        let (at, bytes) = (number(header + 0x18, 8)?, number(header + 0x20, 8)?);
        elf.get(at..at.checked_add(bytes)?)
    };
    let names = content(header(names)?)?;
    for index in 0..count {
        let header = header(index)?;
        let name = names.get(number(header, 4)?..)?;
        let name = name.split(|&byte| byte == 0).next()?;
        if name == wanted.as_bytes() {
            return content(header);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `.modinfo` of Debian's 6.1.192-2, shortened; `crc_pre` is made up.
    const KERNEL: [(&str, &str); 10] = [
        (
            "virtio",
            "license=GPL\0depends=virtio_ring\0retpoline=Y\0intree=Y\0name=virtio\0\
             vermagic=6.1.0-56-amd64 SMP preempt mod_unload modversions \0",
        ),
        ("virtio_ring", "license=GPL\0depends=\0name=virtio_ring\0"),
        (
            "virtio_pci",
            "alias=pci:v00001AF4d*sv*sd*bc*sc*i*\0\
             depends=virtio_ring,virtio_pci_modern_dev,virtio_pci_legacy_dev,virtio\0",
        ),
        ("virtio_pci_modern_dev", "depends=\0"),
        ("virtio_pci_legacy_dev", "depends=\0"),
        (
            "virtio_net",
            "depends=virtio_ring,virtio,net-failover\0softdep=pre: crc-pre absent post: late\0",
        ),
        ("net_failover", "depends=failover\0"),
        ("failover", "depends=\0"),
        ("crc_pre", "depends=\0"),
        ("late", "depends=\0"),
    ];

    /// An ELF file with a section of names and `.modinfo`, as `ld -r` lays them out.
    fn elf(modinfo: &[u8]) -> Vec<u8> {
        let names = b"\0.shstrtab\0.modinfo\0";
        let headers = 64 + names.len() + modinfo.len();
        let mut file = vec![0; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[0x28..0x30].copy_from_slice(&(headers as u64).to_le_bytes());
        for (at, value) in [(0x3a, 64_u16), (0x3c, 3), (0x3e, 1)] {
            file[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        file.extend(names);
        file.extend(modinfo);
        file.extend([0; 64]);
        let contents = [
            (1_u32, 64, names.len()),
            (11, 64 + names.len(), modinfo.len()),
        ];
        for (name, at, bytes) in contents {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(bytes as u64).to_le_bytes());
            file.extend(header);
        }
        file
    }

    /// A kernel's folder in `target`, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn with(name: &str, modules: &[(&str, &str)], built_in: &str) -> (Self, Vec<PathBuf>) {
            let folder = std::env::temp_dir().join(format!("lmc-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).expect("a temporary folder");
            let mut files = vec![folder.join("modules.builtin"), folder.join("vmlinuz-6.1")];
            fs::write(&files[0], built_in).expect("a file");
            for (name, modinfo) in modules {
                let file = folder.join(format!("{name}.ko"));
                fs::write(&file, elf(modinfo.as_bytes())).expect("a file");
                files.push(file);
            }
            (Self(folder), files)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn names(order: Vec<(String, PathBuf)>) -> Vec<String> {
        order.into_iter().map(|(name, _)| name).collect()
    }

    /// A fixed order loaded `virtio` before `virtio_ring`. Debian's 6.1.192 turned that
    /// dependency round, and on a new machine every guest came up without its device.
    #[test]
    fn each_module_comes_after_those_that_it_needs() {
        let (_folder, files) = Folder::with("order", &KERNEL, "kernel/lib/crc32.ko\n");
        let modules = Modules::among(&files).expect("the folder is there");
        let order = modules
            .load_order(&["virtio_pci", "virtio_net", "crc32"], &["nowhere"])
            .expect("all is there");
        let wanted = [
            "virtio_ring",
            "virtio_pci_modern_dev",
            "virtio_pci_legacy_dev",
            "virtio",
            "virtio_pci",
            "failover",
            "net_failover",
            "crc_pre",
            "virtio_net",
        ];
        assert_eq!(names(order), wanted);
    }

    #[test]
    fn older_kernels_turn_the_order_round() {
        let older = [
            ("virtio", "depends=\0"),
            ("virtio_ring", "depends=virtio\0"),
        ];
        let (_folder, files) = Folder::with("older", &older, "");
        let modules = Modules::among(&files).expect("the folder is there");
        let order = modules.load_order(&["virtio_ring"], &[]).expect("there");
        assert_eq!(names(order), ["virtio", "virtio_ring"]);
    }

    #[test]
    fn what_a_kernel_lacks_is_named() {
        let broken = [
            ("rdma_rxe", "depends=ib_core\0"),
            ("dummy", "depends=dummy\0"),
        ];
        let (_folder, files) = Folder::with("lacks", &broken, "");
        let modules = Modules::among(&files).expect("the folder is there");
        for (required, wanted) in [
            ("virtio_net", "no module virtio_net"),
            ("rdma_rxe", "depends on ib_core"),
            ("dummy", "dummy depends on itself"),
        ] {
            let error = modules.load_order(&[required], &[]).expect_err(required);
            assert!(format!("{error:#}").contains(wanted), "{error:#}");
        }
    }

    #[test]
    fn a_compressed_module_is_read() {
        let (folder, files) = Folder::with("packed", &[("dummy", "depends=\0")], "");
        let file = &files[2];
        if shown::capture(Command::new("xz").arg(file), DECOMPRESSION).is_err() {
            println!("skipped: no xz here");
            return;
        }
        let packed = folder.0.join("dummy.ko.xz");
        let modules = Modules::among(&[packed]).expect("a name");
        let order = modules.load_order(&["dummy"], &[]).expect("it is there");
        assert_eq!(order, [("dummy".to_owned(), file.clone())]);
    }

    #[test]
    fn a_truncated_file_is_no_module() {
        let whole = elf(b"depends=a,b\0");
        let needs = section(&whole, ".modinfo").map(Needs::parse);
        assert_eq!(needs.expect("a module").hard, ["a", "b"]);
        for length in 0..whole.len() - 64 {
            assert_eq!(section(&whole[..length], ".modinfo"), None, "{length}");
        }
    }
}
