//! Precedence of the layers and the texts of errors, as data.

use std::collections::HashSet;
use std::path::Path;

use super::layers::Layers;
use super::*;

fn text(value: &str) -> Raw {
    Raw::Text(value.to_owned())
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter()
        .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()))
        .collect()
}

fn flags(list: &[(&str, &str)]) -> Vec<(String, Raw)> {
    list.iter()
        .map(|(name, value)| ((*name).to_owned(), text(value)))
        .collect()
}

/// Loads with a file that exists only as text.
fn load(
    given: &[(&str, &str)],
    variables: &[(&str, &str)],
    file: &str,
) -> Result<Loaded, ConfigError> {
    let path = std::env::temp_dir().join(format!(
        "lmc-config-{}-{:?}.toml",
        std::process::id(),
        std::thread::current().id()
    ));
    std::fs::write(&path, file).unwrap();
    let loaded = ServeConfig::load(flags(given), pairs(variables), Some(&path));
    std::fs::remove_file(&path).unwrap();
    loaded.map_err(|mut error| {
        for problem in &mut error.problems {
            problem.subject = problem
                .subject
                .replace(&path.display().to_string(), "lmc.toml");
        }
        error
    })
}

#[test]
fn every_default_parses() {
    let loaded = ServeConfig::load([], [], None).unwrap();
    assert_eq!(
        loaded.entries.len(),
        ALL_SETTINGS.len(),
        "a setting is never taken"
    );
    assert!(
        loaded
            .entries
            .iter()
            .all(|entry| entry.source == SettingOrigin::Default)
    );
    assert_eq!(loaded.config.host, "127.0.0.1");
    assert_eq!((loaded.config.port, loaded.config.http_port), (5555, 8080));
    assert_eq!(loaded.config.pool_size, PoolSize::Auto);
    assert_eq!(loaded.config.quotas, []);
}

#[test]
fn flags_win_over_variables_over_the_file_over_defaults() {
    fn check(
        flag: Option<&str>,
        variable: Option<&str>,
        file: Option<&str>,
        want: u16,
        from: &str,
    ) {
        let given: Vec<_> = flag.map(|v| ("port", v)).into_iter().collect();
        let variables: Vec<_> = variable.map(|v| ("LMC_PORT", v)).into_iter().collect();
        let file = file.map(|v| format!("port = {v}")).unwrap_or_default();
        let loaded = load(&given, &variables, &file).unwrap();
        assert_eq!(loaded.config.port, want);
        let entry = loaded
            .entries
            .iter()
            .find(|entry| entry.info.name == "port")
            .unwrap();
        let source = entry.source.to_string();
        assert!(source.starts_with(from), "{source}");
    }
    check(Some("1"), Some("2"), Some("3"), 1, "flag --port");
    check(None, Some("2"), Some("3"), 2, "variable LMC_PORT");
    check(None, None, Some("3"), 3, "file ");
    check(None, None, None, 5555, "default");
    check(Some("1"), None, Some("3"), 1, "flag --port");
}

#[test]
fn the_file_can_be_named_by_a_variable() {
    let path = std::env::temp_dir().join(format!("lmc-named-{}.toml", std::process::id()));
    std::fs::write(&path, "chunk_size = 64").unwrap();
    let variables = [("LMC_CONFIG".to_owned(), path.display().to_string())];
    let loaded = ServeConfig::load([], variables, None);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(loaded.unwrap().config.chunk_size, 64);
}

fn salt(text: &str) -> lmc_key::Salt {
    text.parse().expect("a salt")
}

#[test]
fn values_have_their_units() {
    let loaded = load(
        &[
            ("l1-size-gb", "1.5GB"),
            ("session-ttl-seconds", "5m"),
            ("eviction-trigger-watermark", "80%"),
        ],
        &[
            ("LMC_L1_ALIGN_BYTES", "64KiB"),
            ("LMC_QUOTA", "a=1GiB, b=2"),
        ],
        "lock_memory = true\nl1_read_ttl_seconds = 30\neviction_ratio = 0.25\nhost = \"[::1]\"",
    )
    .unwrap()
    .config;
    assert_eq!(loaded.pool_size, PoolSize::Bytes(1_500_000_000));
    assert_eq!(loaded.session_ttl.as_secs(), 300);
    assert_eq!(loaded.eviction_watermark, 0.8);
    assert_eq!(loaded.align_bytes, 65_536);
    assert_eq!(
        loaded.quotas,
        vec![(salt("a"), 1 << 30), (salt("b"), 2 << 30)]
    );
    assert_eq!(loaded.lock_memory, lmc_memory::Demand::Required);
    assert_eq!(loaded.read_ttl.as_secs(), 30);
    assert_eq!(loaded.eviction_ratio, 0.25);
    assert_eq!(loaded.host, "::1");
}

#[test]
fn quotas_are_a_table_in_the_file() {
    let loaded = load(&[], &[], "[quota]\ntenant-a = \"10GiB\"\n\"b,c=d\" = 1").unwrap();
    assert_eq!(
        loaded.config.quotas,
        vec![(salt("b,c=d"), 1 << 30), (salt("tenant-a"), 10 << 30)]
    );
}

#[test]
fn problems_name_the_setting_the_expectation_and_the_nearest_name() {
    fn check(given: &[(&str, &str)], variables: &[(&str, &str)], file: &str, want: &[&str]) {
        let error = load(given, variables, file).expect_err("a bad configuration");
        let found: Vec<String> = error.problems.iter().map(ToString::to_string).collect();
        assert_eq!(found, want);
    }
    check(
        &[("port", "70000")],
        &[],
        "",
        &["--port 70000: expected a port number from 0 to 65535"],
    );
    check(
        &[("shm-name", "sealed")],
        &[],
        "",
        &["--shm-name sealed: sealed requires --ipc-path, over which the pool is passed"],
    );
    check(
        &[],
        &[("LMC_EVICTION_POLICY", "lur")],
        "",
        &["LMC_EVICTION_POLICY=lur: expected one of LRU, S3FIFO, ARC, noop; did you mean LRU?"],
    );
    check(
        &[],
        &[],
        "l1_sizegb = 4",
        &["lmc.toml: l1_sizegb: unknown key; did you mean l1_size_gb?"],
    );
    check(
        &[],
        &[],
        "colour = \"red\"",
        &["lmc.toml: colour: unknown key; `lmc serve --print-config` lists all keys"],
    );
    check(
        &[],
        &[],
        "http-port = 80",
        &["lmc.toml: http-port: unknown key; did you mean http_port?"],
    );
    check(
        &[],
        &[],
        "chunk_size = [1, 2]",
        &["lmc.toml: chunk_size: expected a string, number or boolean, found an array"],
    );
    check(
        &[],
        &[],
        "l1_size_gb = \"lots\"",
        &[
            "lmc.toml: l1_size_gb = lots: expected a size such as 500GiB, 1.5GB or 64MiB (a bare number counts in GiB)",
        ],
    );
    check(
        &[("worker-reap-timeout-seconds", "5")],
        &[],
        "",
        &[
            "--worker-reap-timeout-seconds 5: expected 0 (never) or at least 30 seconds, three of the engine's heartbeats",
        ],
    );
    check(
        &[("worker-registration-grace-seconds", "60")],
        &[],
        "",
        &[
            "--worker-registration-grace-seconds 60: expected at least worker_reap_timeout_seconds (2m); otherwise \
             workers that warm up would be removed before they can ping",
        ],
    );
    check(
        &[("http-port", "5555")],
        &[],
        "",
        &["--http-port 5555: expected another port than --port 5555, which engines connect to"],
    );
    // Peers would be sent to an address where nothing listens.
    for at in ["10.0.0.1:0", "0.0.0.0:7700", "[::]:7700"] {
        let want = format!(
            "--p2p-advertise {at}: expected an address and a port that peers can connect to, not port 0 or a wildcard"
        );
        check(&[("p2p-advertise", at)], &[], "", &[&want]);
    }
    // All problems at once, not only the first.
    check(
        &[("chunk-size", "0")],
        &[("LMC_PREFAULT", "maybe")],
        "prot = 1",
        &[
            "lmc.toml: prot: unknown key; did you mean port?",
            "--chunk-size 0: expected a whole number from 1 to 65536",
            "LMC_PREFAULT=maybe: expected true or false",
        ],
    );
}

#[test]
fn a_file_that_is_not_there_or_not_toml_is_a_problem() {
    let error = ServeConfig::load([], [], Some(Path::new("/nowhere/lmc.toml"))).unwrap_err();
    let found = error.to_string();
    assert!(
        found.starts_with("--config /nowhere/lmc.toml: the file cannot be read:"),
        "{found}"
    );
    let error = load(&[], &[], "port = = 1").unwrap_err().to_string();
    assert!(
        error.starts_with("lmc.toml: not valid TOML in line 1:"),
        "{error}"
    );
}

#[test]
fn unknown_variables_are_warned_about_and_strangers_are_not() {
    fn check(name: &str, want: &[&str]) {
        let loaded = ServeConfig::load([], [(name.to_owned(), "x".to_owned())], None).unwrap();
        assert_eq!(loaded.warnings, want, "{name}");
    }
    check(
        "LMC_HTTPPORT",
        &["variable LMC_HTTPPORT is not a setting and was ignored; did you mean LMC_HTTP_PORT?"],
    );
    check(
        "LMC_ZZZ_QQQ",
        &["variable LMC_ZZZ_QQQ is not a setting and was ignored"],
    );
    check("LMC_URL", &[]);
    check("LMC_NIXL_LIBRARY", &[]);
    check("LMCACHE_CHUNK_SIZE", &[]);
    check("HOME", &[]);
}

#[test]
fn the_printed_configuration_reads_back_as_itself() {
    let loaded = load(
        &[("l1-size-gb", "2GiB"), ("eviction-ratio", "0.25")],
        &[("LMC_LOG_LEVEL", "info,lmc=debug"), ("LMC_QUOTA", "a=1GiB")],
        "session_ttl_seconds = \"5m\"",
    )
    .unwrap();
    let printed = print_config(&loaded, &[("max-workers", "2 here".to_owned())]);
    assert!(printed.contains("l1_size_gb = \"2GiB\""), "{printed}");
    assert!(printed.contains("# flag --l1-size-gb"), "{printed}");
    assert!(printed.contains("# variable LMC_LOG_LEVEL"), "{printed}");
    assert!(printed.contains("# default; 2 here"), "{printed}");
    let again = load(&[], &[], &printed).unwrap();
    assert_eq!(again.config, loaded.config);
}

#[test]
fn layers_keep_the_first_problem_of_a_file_apart_from_its_good_keys() {
    let mut layers = Layers::new(ALL_SETTINGS, [], []);
    layers.parse_file(Path::new("lmc.toml"), "port = 6000\nnope_nope = 1");
    let info = ALL_SETTINGS.iter().find(|info| info.name == "port");
    assert_eq!(layers.take(info.expect("a setting"), parse::port), 6000);
    assert_eq!(layers.finish().unwrap_err().problems.len(), 1);
}

#[test]
fn a_tier_table_is_the_long_form_of_the_flags() {
    let file = "[[tier]]\nkind = \"disk\"\nurl = \"/a,/b\"\nsize = \"20GiB\"\nwrite = \"back\"\n\
                timeout = 3\n";
    let config = load(&[], &[], file).unwrap().config;
    let flat = "disk = \"/a,/b\"\ndisk_size = \"20GiB\"\ndisk_write = \"back\"\n\
                disk_read_timeout_seconds = 3\n";
    assert_eq!(
        format!("{config:?}"),
        format!("{:?}", load(&[], &[], flat).unwrap().config)
    );
    // A flag wins over the table, as over any key.
    let flagged = load(&[("disk-write", "through")], &[], file)
        .unwrap()
        .config;
    let disk = flagged.disk().expect("a tier of drives");
    assert_eq!(disk.write, lmc_engine::WritePolicy::Through);
}

#[test]
fn further_stores_have_tables_of_their_own() {
    let file = "[[tier]]\nkind = \"remote\"\nurl = \"redis://a\"\nttl = \"1h\"\nfill = true\n\
                [[tier]]\nkind = \"remote\"\nurl = \"s3://b/c\"\nadmit = 2\n\
                [[tier]]\nkind = \"remote\"\nurl = \"file:///d\"\nsize = \"1TiB\"\n";
    let loaded = load(&[("remote-admit", "second")], &[], file).unwrap();
    let stores = |config: &ServeConfig| {
        let store = |store: &RemoteSettings| {
            (
                store.url.as_ref().map(ToString::to_string),
                store.ttl,
                store.fill,
                store.admit,
                store.size,
            )
        };
        config.remotes().map(store).collect::<Vec<_>>()
    };
    use lmc_engine::Admission::{Always, Reused};
    let url = |url: &str| Some(url.to_owned());
    let hour = Some(std::time::Duration::from_secs(3600));
    let expected = [
        (url("redis://a:6379/0"), hour, true, Reused(1), None),
        (url("s3://b/c/"), None, false, Reused(2), None),
        (url("file:///d"), None, false, Always, Some(1 << 40)),
    ];
    assert_eq!(stores(&loaded.config), expected);
    let printed = print_config(&loaded, &[]);
    let again = load(&[], &[], &printed).unwrap();
    assert_eq!(stores(&again.config), expected, "{printed}");

    let refusal = |file: &str| load(&[], &[], file).unwrap_err().to_string();
    let twice = "[[tier]]\nkind = \"remote\"\nurl = \"redis://a\"\n".repeat(2);
    assert!(
        refusal(&twice).contains("a store that no earlier table names"),
        "{}",
        refusal(&twice)
    );
    let wrong = file.replace("admit = 2", "admit = \"x\"");
    let wrong = refusal(&wrong);
    assert!(
        wrong.starts_with("lmc.toml: tier 2: remote_admit"),
        "{wrong}"
    );
}

/// Returns the kinds of the tiers of a file, and checks that the printed settings have the same kinds.
fn kinds(flags: &[(&str, &str)], file: &str) -> Vec<&'static str> {
    let kinds = |config: &ServeConfig| {
        let kinds = config.tiers.iter().map(TierSettings::name);
        kinds.collect::<Vec<_>>()
    };
    let loaded = load(flags, &[], file).unwrap();
    let printed = print_config(&loaded, &[]);
    let again = load(&[], &[], &printed).unwrap();
    assert_eq!(again.config, loaded.config, "{printed}");
    kinds(&loaded.config)
}

#[test]
fn tiers_are_in_the_order_of_their_tables() {
    const DISK: &str = "[[tier]]\nkind = \"disk\"\nurl = \"/a\"\n";
    const PEERS: &str = "[[tier]]\nkind = \"peers\"\nurl = \"none\"\nlisten = \"127.0.0.1:7700\"\n";
    let store = |url: &str| format!("[[tier]]\nkind = \"remote\"\nurl = \"{url}\"\n");
    let (near, far) = (store("redis://a"), store("s3://b/c"));
    let listen = [("p2p-listen", "127.0.0.1:7700")];
    assert_eq!(kinds(&[], ""), [""; 0]);
    assert_eq!(
        kinds(&[("disk", "/a"), ("remote", "redis://a"), listen[0]], ""),
        ["disk", "peers", "remote"]
    );
    assert_eq!(
        kinds(&[], &format!("{DISK}{near}{PEERS}{far}")),
        ["disk", "remote", "peers", "remote"]
    );
    assert_eq!(kinds(&[], &format!("{near}{PEERS}")), ["remote", "peers"]);
    // A flag has no order, so that its tier is where it usually is.
    assert_eq!(
        kinds(&listen, &format!("{DISK}{near}")),
        ["disk", "peers", "remote"]
    );
    assert_eq!(kinds(&[("disk", "/a")], &near), ["disk", "remote"]);
    // A flag can take a store out.
    assert_eq!(
        kinds(&[("remote", "none")], &format!("{near}{PEERS}{far}")),
        ["peers", "remote"]
    );

    let error = load(&[], &[], &format!("{PEERS}{DISK}")).unwrap_err();
    let [problem] = &error.problems[..] else {
        panic!("{error}");
    };
    assert_eq!(problem.subject, "lmc.toml: tier 2");
    assert!(problem.text.contains("before all others"), "{problem}");
}

#[test]
fn admission_takes_a_number_of_reuses() {
    use lmc_engine::Admission::{Always, Reused};
    let admitted = |text: &str| parse::admission(&self::text(text));
    for (text, admission) in [("always", Always), ("second", Reused(1)), ("1", Reused(1))] {
        assert_eq!(admitted(text), Ok(admission));
    }
    assert_eq!(admitted("14"), Ok(Reused(14)));
    for wrong in ["15", "-1", "secnd"] {
        let error = admitted(wrong).expect_err("not possible");
        assert!(error.ends_with("or a number up to 14"), "{error}");
    }
}

#[test]
fn a_wrong_tier_table_is_refused_with_what_is_known() {
    let problems = |file: &str| {
        let error = load(&[], &[], file).unwrap_err();
        let of = |problem: &Problem| (problem.subject.clone(), problem.text.clone());
        error.problems.iter().map(of).collect::<Vec<_>>()
    };
    for (table, subject, part) in [
        ("url = \"/a\"", "lmc.toml: tier 1", "found none"),
        (
            "kind = \"redis\"\nurl = \"r\"",
            "lmc.toml: tier 1",
            "[\"disk\", \"peers\", \"remote\"], found \"redis\"",
        ),
        ("kind = \"disk\"", "lmc.toml: tier 1", "expected url"),
        (
            "kind = \"disk\"\nurl = \"/a\"\nttl = 5",
            "lmc.toml: tier 1: ttl",
            "not possible",
        ),
        (
            "kind = \"disk\"\nurl = \"/a\"\nsice = 5",
            "lmc.toml: tier 1: sice",
            "did you mean size?",
        ),
    ] {
        let found = problems(&format!("[[tier]]\n{table}\n"));
        let [(at, text)] = &found[..] else {
            panic!("{table}: {found:?}");
        };
        assert_eq!(at, subject);
        assert!(text.contains(part), "{text}");
    }
    let twice = "[[tier]]\nkind = \"disk\"\nurl = \"/a\"\n".repeat(2);
    assert!(problems(&twice)[0].1.contains("expected one tier of kind"));
    let both = "disk = \"/b\"\n[[tier]]\nkind = \"disk\"\nurl = \"/a\"\n";
    assert!(
        problems(both)[0]
            .1
            .contains("also set in the table of its tier")
    );
    assert!(problems("tier = 5\n")[0].1.contains("[[tier]]"));
}

/// Until 336c9b4 the mask looked for `://`, so that a URL with a typing error was repeated whole.
#[test]
fn no_error_repeats_a_setting_that_may_hold_a_secret() {
    const SECRET: &str = "MARKED-SECRET";
    let wrong = [
        ("remote", format!("redis:/user:{SECRET}@cache:6379")),
        ("remote", format!("redis:user:{SECRET}@cache")),
        ("remote", format!("redis//user:{SECRET}@cache")),
        ("remote", format!("user:{SECRET}@cache:6379")),
        ("remote", format!("redis;//:{SECRET}@cache")),
        ("remote", format!("redis://:{SECRET}@cache:port")),
        ("remote", format!("rediss://u:{SECRET}@a,b")),
        ("remote", format!("redis://u:{SECRET}@cache/x")),
        ("remote", format!("s3//{SECRET}@bucket")),
        ("quota", format!("{SECRET}=much")),
        ("quota", SECRET.to_owned()),
        ("quota", format!("20GiB={SECRET}")),
        ("quota", format!("a/{SECRET}=20GiB")),
        ("remote-salts", format!("a,{SECRET}/b")),
    ];
    let tried = wrong.iter().map(|(name, _)| *name).collect::<HashSet<_>>();
    let secret = ALL_SETTINGS.iter().filter(|info| info.secret().is_some());
    assert_eq!(tried, secret.map(|info| info.name).collect());
    let twice = format!("[quota]\n{SECRET} = 1\n{SECRET} = 2\n");
    let error = load(&[], &[], &twice).expect_err("two values").to_string();
    assert!(!error.contains(SECRET), "{error}");
    for (name, value) in &wrong {
        let key = name.replace('-', "_");
        let variable = format!("LMC_{}", key.to_uppercase());
        let file = format!("{key} = \"{value}\"\n");
        let cut = format!("{key} = \"{value}\n");
        let table = format!("[[tier]]\nkind = \"remote\"\nurl = \"{value}\"\n");
        let errors = [
            (load(&[(name, value)], &[], ""), format!("--{name}: ")),
            (
                load(&[], &[(&variable, value)], ""),
                format!("{variable}: "),
            ),
            (load(&[], &[], &file), format!("lmc.toml: {key}: ")),
            (load(&[], &[], &cut), "lmc.toml: not valid TOML".to_owned()),
            (load(&[], &[], &table), "lmc.toml: ".to_owned()),
        ];
        for (number, (loaded, starts)) in errors.into_iter().enumerate() {
            if *name != "remote" && number == 4 {
                continue;
            }
            let error = loaded.expect_err(value).to_string();
            assert!(!error.contains(SECRET), "{error}");
            assert!(error.starts_with(&starts), "{error}");
        }
    }
}

/// Types hold it: whatever a log or an error formats shows no secret of the configuration.
#[test]
fn no_format_shows_a_secret() {
    const SECRET: &str = "MARKED-SECRET";
    let url = format!("redis://user:{SECRET}@host:6379/0");
    let table = format!(
        "[[tier]]\nkind = \"remote\"\nurl = \"redis://a\"\n\
         [[tier]]\nkind = \"remote\"\nurl = \"{url}1\"\nsalts = \"{SECRET}\"\n"
    );
    for info in ALL_SETTINGS {
        let value = match info.secret() {
            None => continue,
            Some(Secret::Url) => url.clone(),
            Some(Secret::Salts) => SECRET.to_owned(),
            Some(Secret::Quotas) => format!("{SECRET}=1"),
        };
        let loaded = load(&[(info.name, &value), ("remote", "redis://b")], &[], &table);
        let mut loaded = loaded.expect(info.name);
        let formatted = format!("{loaded:?} {loaded:#?}");
        assert!(!formatted.contains(SECRET), "{formatted}");
        loaded.entries.extend(loaded.further_remotes.remove(0));
        for entry in loaded.entries {
            let shown = entry.shown(|_| "hidden".to_owned());
            assert!(!shown.contains(SECRET), "{shown}");
        }
    }
}

#[test]
fn a_password_in_a_url_is_in_no_output() {
    const SECRET: &str = "MARKED-SECRET";
    let url = format!("redis://user:{SECRET}@host:6379/0");
    let shown = |flags: &[(&str, &str)], variables: &[(&str, &str)], file: &str| match load(
        flags, variables, file,
    ) {
        Ok(loaded) => {
            let printed = print_config(&loaded, &[]);
            format!("{printed}{:?}", loaded.warnings)
        }
        Err(error) => error.to_string(),
    };
    for text in [
        shown(&[("disk", &url)], &[], ""),
        shown(&[], &[("LMC_DISK", &url)], ""),
        shown(&[("port", &url)], &[], ""),
        shown(&[], &[("LMC_DISK_SIZE", &url)], ""),
        shown(&[], &[], &format!("disk = \"{url}\"\n")),
        shown(&[], &[], &format!("disk = \"{url}\n")),
        shown(&[], &[], &format!("\"{url}\" = 1\n")),
        shown(
            &[],
            &[],
            &format!("[[tier]]\nkind = \"redis\"\nurl = \"{url}\"\n"),
        ),
        shown(&[], &[], &format!("[[tier]]\nkind = \"{url}\"\n")),
        shown(
            &[],
            &[],
            &format!(
                "[[tier]]\nkind = \"remote\"\nurl = \"redis://a\"\n\
                 [[tier]]\nkind = \"remote\"\nurl = \"{url}\"\n"
            ),
        ),
    ] {
        assert!(!text.contains(SECRET), "{text}");
        assert!(text.contains("redis") || text.contains("TOML"), "{text}");
    }
}

/// Kubernetes' variables of a Service, whatever its name.
#[test]
fn variables_of_kubernetes_services_are_ignored_with_one_line() {
    for (name, start, port) in [
        ("lmc", "LMC", 5555),
        ("lmc-http", "LMC_HTTP", 8080),
        ("lmc-server", "LMC_SERVER", 5555),
    ] {
        let at = format!("10.96.0.17:{port}");
        let of = |rest: &str, value: &str| (format!("{start}{rest}"), value.to_owned());
        let port_of = |rest: &str, value: &str| of(&format!("_PORT_{port}_TCP{rest}"), value);
        let variables = [
            of("_SERVICE_HOST", "10.96.0.17"),
            of("_SERVICE_PORT", &port.to_string()),
            of("_SERVICE_PORT_MAIN", &port.to_string()),
            of("_PORT", &format!("tcp://{at}")),
            port_of("", &format!("tcp://{at}")),
            port_of("_PROTO", "tcp"),
            port_of("_PORT", &port.to_string()),
            port_of("_ADDR", "10.96.0.17"),
        ];
        let loaded = ServeConfig::load([], variables.clone(), None).expect("it starts");
        let notes = loaded.notes;
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains(&format!("{name:?}")), "{notes:?}");
        assert_eq!(loaded.warnings, [""; 0]);
        // A pod that sets the variable of a setting means it.
        let own = variables.map(|(name, value)| match name == "LMC_PORT" {
            true => (name, "6000".to_owned()),
            false => (name, value),
        });
        let loaded = ServeConfig::load([], own, None).expect("it starts");
        let port = if start == "LMC" { 6000 } else { 5555 };
        assert_eq!(loaded.config.port, port);
    }
}
