use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

fn name(tag: &str) -> String {
    format!("lmc_test_{tag}_{}", std::process::id())
}

fn write(arena: &Arena, at: usize, byte: u8) {
    assert!(at < arena.len());
    // SAFETY: inside the arena, which only the calling test uses.
    unsafe { arena.base_ptr().add(at).write(byte) };
}

fn read(arena: &Arena, at: usize) -> u8 {
    assert!(at < arena.len());
    // SAFETY: as above.
    unsafe { arena.base_ptr().add(at).read() }
}

#[test]
fn anonymous_memory_is_zero_and_writable_to_its_end() {
    let arena = ArenaConfig::anonymous(10_000).build().unwrap();
    assert_eq!(arena.len(), 12_288);
    assert_eq!(read(&arena, 12_287), 0);
    write(&arena, 12_287, 5);
    assert_eq!(read(&arena, 12_287), 5);
    assert_eq!(arena.shared_name(), None);
    assert_eq!(arena.prefault_progress(), PrefaultProgress::default());
}

#[test]
fn a_shared_arena_is_a_file_that_others_map_and_that_goes_at_drop() {
    let name = name("file");
    let arena = ArenaConfig::shared(&name, 1 << 20).build().unwrap();
    let path = arena.shared_name().unwrap().path();
    let owner = arena.shared_name().unwrap().owner_path();
    write(&arena, 4097, 42);
    assert_eq!(fs::read(&path).unwrap()[4097], 42);
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(
        (meta.len(), meta.permissions().mode() & 0o777),
        (1 << 20, 0o600)
    );
    assert_eq!(
        fs::read_to_string(&owner).unwrap(),
        format!(
            "pid {} {}",
            std::process::id(),
            arena.shared_name().unwrap()
        )
    );
    drop(arena);
    assert!(!path.exists() && !owner.exists());
}

#[test]
fn the_error_of_a_second_owner_names_the_first() {
    let name = name("held");
    let first = ArenaConfig::shared(&name, 4096).build().unwrap();
    let err = ArenaConfig::shared(&name, 4096).build().unwrap_err();
    assert!(matches!(err, ArenaError::Held { .. }));
    let text = err.to_string();
    assert!(
        text.contains(&format!("(pid {})", std::process::id())),
        "{text}"
    );
    assert!(first.shared_name().unwrap().path().exists());
    drop(first);
    ArenaConfig::shared(&name, 4096).build().unwrap();
}

#[test]
fn an_unlinked_name_belongs_to_the_next_owner() {
    let name = name("unlinked");
    let first = ArenaConfig::shared(&name, 4096).build().unwrap();
    first.unlink();
    write(&first, 0, 1);
    let second = ArenaConfig::shared(&name, 4096).build().unwrap();
    drop(first);
    assert!(second.shared_name().unwrap().path().exists());
    assert_eq!(read(&second, 0), 0);
}

#[test]
fn a_segment_of_another_program_is_left_alone() {
    let name = SharedName::new(&name("foreign")).unwrap();
    fs::write(name.path(), b"not lmc's").unwrap();
    let err = ArenaConfig::shared(name.as_str(), 4096)
        .build()
        .unwrap_err();
    assert!(matches!(err, ArenaError::NotOurs { .. }), "{err}");
    assert_eq!(fs::read(name.path()).unwrap(), b"not lmc's");
    assert!(!name.owner_path().exists());
    fs::remove_file(name.path()).unwrap();
}

#[test]
fn a_shared_arena_beyond_dev_shm_is_refused_and_leaves_no_name() {
    let name = name("space");
    let err = ArenaConfig::shared(&name, 1 << 45).build().unwrap_err();
    let text = err.to_string();
    assert!(
        matches!(err, ArenaError::Space { need, .. } if need == 1 << 45),
        "{text}"
    );
    assert!(text.contains("remount,size="), "{text}");
    let name = SharedName::new(&name).unwrap();
    assert!(!name.path().exists() && !name.owner_path().exists());
}

#[test]
fn prefault_makes_all_pages_present_and_keeps_bytes() {
    for config in [
        ArenaConfig::anonymous(80 << 20),
        ArenaConfig::shared(name("prefault"), 80 << 20),
    ] {
        let arena = config
            .with_prefault(Prefault::Background { threads: 2 })
            .build()
            .unwrap();
        write(&arena, (80 << 20) - 1, 9);
        let total = 80 << 20;
        lmc_testkit::until("all pages are present", || {
            assert_eq!(arena.prefault_progress().error, None);
            arena.prefault_progress().done == total
        });
        assert_eq!(
            arena.prefault_progress(),
            PrefaultProgress {
                done: total,
                total,
                error: None
            }
        );
        assert_eq!(read(&arena, (80 << 20) - 1), 9);
        if let Some(name) = arena.shared_name() {
            use std::os::unix::fs::MetadataExt;
            assert_eq!(fs::metadata(name.path()).unwrap().blocks() * 512, total);
        }
    }
}

#[test]
fn a_prefault_is_stopped_by_drop() {
    // Far more than there is memory for; only a stop lets this end.
    let arena = ArenaConfig::anonymous(1 << 40)
        .with_prefault(Prefault::Background { threads: 1 })
        .build()
        .unwrap();
    assert_eq!(arena.prefault_progress().total, 1 << 40);
    drop(arena);
}

#[test]
fn huge_pages_are_had_or_the_remedy_is_named() {
    let auto = ArenaConfig::anonymous(3 << 20)
        .with_huge_pages(Demand::Auto)
        .build()
        .unwrap();
    assert_eq!(auto.len(), 4 << 20);
    assert_eq!(auto.base_ptr().as_ptr() as usize % (2 << 20), 0);
    assert!(auto.report().huge_pages || !auto.report().notes.is_empty());
    match ArenaConfig::anonymous(1 << 44)
        .with_huge_pages(Demand::Required)
        .build()
    {
        Err(err) => assert!(err.to_string().contains("vm.nr_hugepages="), "{err}"),
        Ok(_) => panic!("16 TiB of huge pages"),
    }
    match ArenaConfig::shared(name("huge"), 4096)
        .with_huge_pages(Demand::Required)
        .build()
    {
        Err(err) => assert!(err.to_string().contains("remount,huge="), "{err}"),
        Ok(arena) => assert!(arena.report().huge_pages),
    }
}

#[test]
fn a_numa_node_that_is_not_there_is_refused() {
    let err = ArenaConfig::anonymous(4096)
        .with_numa_node(Some(500))
        .build()
        .unwrap_err();
    assert!(matches!(err, ArenaError::Numa { node: 500, .. }), "{err}");
    match ArenaConfig::anonymous(4096).with_numa_node(Some(0)).build() {
        Ok(arena) => {
            write(&arena, 0, 1);
            assert_eq!(arena.report().numa_node, Some(0));
        }
        Err(err) => assert!(err.to_string().contains("CAP_SYS_NICE"), "{err}"),
    }
}

#[test]
fn locking_is_had_or_the_remedy_is_named() {
    match ArenaConfig::anonymous(1 << 20)
        .with_lock(Demand::Required)
        .build()
    {
        Ok(arena) => {
            assert!(arena.report().locked);
            write(&arena, 0, 1);
        }
        Err(err) => assert!(err.to_string().contains("ulimit -l"), "{err}"),
    }
    let auto = ArenaConfig::anonymous(1 << 20)
        .with_lock(Demand::Auto)
        .build()
        .unwrap();
    assert!(auto.report().locked || auto.report().notes[0].contains("not locked"));
}

#[test]
fn impossible_configurations_are_refused() {
    for bytes in [0, usize::MAX] {
        let err = ArenaConfig::anonymous(bytes).build().unwrap_err();
        assert!(matches!(err, ArenaError::Size { .. }));
    }
    let none = Prefault::Background { threads: 0 };
    let err = ArenaConfig::anonymous(1)
        .with_prefault(none)
        .build()
        .unwrap_err();
    assert!(matches!(err, ArenaError::PrefaultThreads));
    let err = ArenaConfig::shared("a/b", 1).build().unwrap_err();
    assert!(matches!(err, ArenaError::Name(_)));
}

/// Finding 7 of the review: any process that mapped the pool could kill the server by truncating it.
#[test]
fn a_shared_arena_that_is_cut_short_is_lost_and_its_process_lives() {
    for in_use in [false, true] {
        let arena = ArenaConfig::shared(name("cut"), 1 << 20).build().unwrap();
        let path = arena.shared_name().unwrap().path();
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        write(&arena, 5, 7);
        assert!(!arena.check_lost());
        file.set_len(4096).unwrap();
        if in_use {
            assert_eq!(read(&arena, 500_000), 0);
            assert!(arena.is_lost());
            write(&arena, 500_000, 1);
        }
        assert!(arena.check_lost() && arena.is_lost());
        file.set_len(1 << 20).unwrap();
        assert!(arena.check_lost(), "a lost arena stays lost");
    }
    assert!(!ArenaConfig::anonymous(1).build().unwrap().check_lost());
}

#[test]
fn a_policy_of_numactl_is_lifted() {
    // SAFETY: the kernel reads the mask, and writes the policy.
    let set = |mask: libc::c_ulong| unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            libc::MPOL_BIND,
            &raw const mask,
            64,
        )
    };
    let policy = || {
        let mut policy: libc::c_int = -1;
        // SAFETY: as above; no mask and no address are asked about.
        let result = unsafe {
            let none = std::ptr::null_mut::<libc::c_ulong>();
            libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, none, 0, 0, 0)
        };
        assert_eq!(result, 0);
        policy
    };
    if set(1) != 0 {
        let why = io::Error::last_os_error();
        println!("SKIPPED: no policy can be set here: {why}");
        return;
    }
    assert_eq!(policy(), libc::MPOL_BIND);
    use_all_nodes().unwrap();
    assert_eq!(policy(), libc::MPOL_DEFAULT);
}
