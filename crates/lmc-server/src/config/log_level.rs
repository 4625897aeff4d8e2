//! The setting `--log-level`. `tracing`'s filters take any word as the name of a module, so with a
//! mistyped level nothing would be logged. Here each word must be known.

use super::setting::Raw;
use super::suggest::nearest;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// Crates that log: our crates, `lmc` for all of them, and dependencies.
const CRATES: [&str; 15] = [
    "lmc",
    "lmc_server",
    "lmc_vllm_adapter",
    "lmc_engine",
    "lmc_backend",
    "lmc_backend_local",
    "lmc_backend_disk",
    "lmc_backend_p2p",
    "lmc_backend_remote",
    "lmc_transfer",
    "lmc_memory",
    "lmc_key",
    "axum",
    "hyper",
    "ureq",
];

pub(crate) fn parse(raw: &Raw) -> Result<String, String> {
    check_level(raw.text()?)
}

/// Checks the value of a flag of another command, as [`parse`] does.
pub(crate) fn check_level(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err(expected("", &LEVELS));
    }
    let mut parts = text.split(',').map(str::trim);
    parts.try_for_each(check)?;
    Ok(text.to_owned())
}

/// Returns the filter for `tracing` of a checked setting. If the setting has no level for all modules,
/// modules that it does not name log at `info`.
pub fn filter_of(setting: &str) -> String {
    let mut parts: Vec<&str> = setting.split(',').map(str::trim).collect();
    if !parts.iter().any(|part| is_level(part)) {
        parts.insert(0, "info");
    }
    parts.join(",")
}

fn is_level(word: &str) -> bool {
    LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word))
}

fn check(part: &str) -> Result<(), String> {
    match part.split_once('=') {
        Some((_, level)) if !is_level(level) => Err(expected(level, &LEVELS)),
        None if is_level(part) => Ok(()),
        Some((module, _)) => check_module(module, &CRATES),
        None => check_module(part, &[LEVELS.as_slice(), &CRATES].concat()),
    }
}

fn check_module(module: &str, known: &[&str]) -> Result<(), String> {
    let mut path = module.split("::");
    let of_crate = path.next().is_some_and(|name| CRATES.contains(&name));
    let is_name = |name: &str| {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        !name.is_empty() && name.chars().all(allowed)
    };
    match of_crate && path.all(is_name) {
        true => Ok(()),
        false => Err(expected(module, known)),
    }
}

fn expected(found: &str, known: &[&str]) -> String {
    let levels = LEVELS.join(", ");
    let expected = format!(
        "expected one of {levels}, or a level and levels of single modules, such as \
         info,lmc_engine=debug"
    );
    match nearest(found, known.iter().copied()) {
        Some(name) => format!("{expected}; did you mean {name}?"),
        None => expected,
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::EnvFilter;

    use super::*;

    fn read(text: &str) -> Result<String, String> {
        parse(&Raw::Text(text.to_owned()))
    }

    #[test]
    fn levels_and_modules_that_are_known_are_taken() {
        for text in [
            "info",
            "WARN",
            "off",
            "info,lmc_engine=debug",
            "lmc_engine::lower=trace",
            "lmc_vllm_adapter",
            "debug, hyper=warn",
        ] {
            assert_eq!(read(text).as_deref(), Ok(text));
            assert!(EnvFilter::try_new(filter_of(text)).is_ok(), "{text}");
        }
    }

    #[test]
    fn modules_of_every_crate_under_the_server_are_taken() {
        let manifest = include_str!("../../Cargo.toml");
        let tables = manifest.split("\n[dependencies]\n").nth(1);
        let own = tables.and_then(|tables| tables.split("\n[").next());
        let own = own.expect("a table of dependencies").lines();
        let names: Vec<String> = own
            .filter_map(|line| line.split(['.', ' ', '=']).next())
            .filter(|name| name.starts_with("lmc-"))
            .map(|name| name.replace('-', "_"))
            .collect();
        assert!(names.len() > 5, "{names:?}");
        for name in names {
            let text = format!("{name}=debug");
            assert_eq!(read(&text).as_deref(), Ok(text.as_str()));
        }
    }

    /// Until f2c35f9 these started a server that logged nothing at all.
    #[test]
    fn words_that_are_no_level_are_refused_with_the_nearest() {
        for (text, meant) in [
            ("inof", "info"),
            ("dbug", "debug"),
            ("wran", "warn"),
            ("info,lmc_engin=debug", "lmc_engine"),
            ("lmc_engine=debgu", "debug"),
            ("lmc_enginee", "lmc_engine"),
        ] {
            let refused = read(text).expect_err(text);
            assert!(
                refused.ends_with(&format!("did you mean {meant}?")),
                "{refused}"
            );
        }
        for text in [
            "loud",
            "",
            ",",
            "=",
            "info=",
            "3",
            "lmc_engine::=info",
            "[span]=info",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn modules_that_a_filter_does_not_name_keep_their_level() {
        assert_eq!(filter_of("lmc_engine=debug"), "info,lmc_engine=debug");
        assert_eq!(filter_of("lmc_engine=debug,warn"), "lmc_engine=debug,warn");
    }
}
