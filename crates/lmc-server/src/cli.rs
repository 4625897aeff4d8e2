//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches as _, Subcommand as _};
use clap_complete::Shell;
use lmc_backend_disk::FORMAT_VERSION;
use lmc_vllm_adapter::LMCACHE_RELEASE;
use rustix::process::Resource;

use crate::config::{
    self, ALL_SETTINGS, ConfigError, Info, Loaded, Raw, ServeConfig, Shape, TransferMode, Verdict,
};
use crate::start::{self, Background};
use crate::stdout::out;
use crate::text::{error_text, version};
use crate::{bench, daemon, doctor, limits, stdout, tools, transfer_config};

const EXAMPLES: &str = "\
Examples:
  lmc serve                                  a quarter of the free memory, port 5555
  lmc serve --l1-size-gb 100GiB --port 6555  another size and port
  lmc serve --config lmc.toml --print-config the settings in effect, and their origins
  lmc status                                 hits, memory, disk, workers and latencies";

/// The examples, and the line for vLLM.
fn examples() -> String {
    let line = transfer_config("127.0.0.1", 5555, TransferMode::Auto);
    format!(
        "{EXAMPLES}\n\n\
         Then start vLLM on the same host, as the same user. `lmc serve` prints this line for the\n\
         address and port that it listens on:\n  \
         vllm serve MODEL --kv-transfer-config \\\n    '{line}'"
    )
}

/// Runs the program with these arguments, the name of the program first.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let code = run_command(args);
    match stdout::has_failed() {
        true => ExitCode::FAILURE,
        false => code,
    }
}

fn run_command(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let matches = match command().try_get_matches_from(&args) {
        Ok(matches) => matches,
        Err(error) => {
            // Help and version are errors to clap, but successes to the caller.
            let code = if error.use_stderr() { 2 } else { 0 };
            print_parse_error(&error, &args);
            return ExitCode::from(code);
        }
    };
    // Each connection and each segment of a disk tier is an open file. The usual limit is low because of
    // programs that call `select`.
    limits::raise(Resource::Nofile);
    let outcome = match matches.subcommand() {
        Some(("serve", matches)) => return serve(matches),
        Some(("doctor", matches)) => return examine(matches),
        Some(("bench", matches)) => return bench::run(matches),
        Some(("replay", matches)) => bench::replay::run(matches),
        Some(("completions", matches)) => completions(matches).map(|()| ExitCode::SUCCESS),
        Some(("man", matches)) => man(matches).map(|()| ExitCode::SUCCESS),
        _ => tools::Tool::from_arg_matches(&matches)
            .map_err(anyhow::Error::from)
            .and_then(|tool| tools::run(&tool)),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("lmc: {}", error_text(&error));
            ExitCode::FAILURE
        }
    }
}

/// Prints an error about the command line, or help. An error repeats arguments, which may hold
/// passwords.
fn print_parse_error(error: &clap::Error, args: &[OsString]) {
    let text = error.to_string();
    let args: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
    let masked = config::mask_arguments(&text, args.iter().map(AsRef::as_ref));
    if masked == text {
        // In colour.
        let _ = error.print();
    } else {
        eprint!("{masked}");
    }
}

fn command() -> Command {
    let command = Command::new("lmc")
        .version(version())
        .long_version(format!(
            "{}\n\
             protocol     LMCache multiprocess, as of lmcache {LMCACHE_RELEASE}\n\
             disk format  {FORMAT_VERSION}",
            version()
        ))
        .about("A KV-cache layer for LLM serving: keeps the KV caches that engines have computed, and returns them.")
        .after_help(examples())
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(serve_command())
        .subcommand(doctor_command());
    tools::Tool::augment_subcommands(command)
        .subcommand(bench::command())
        .subcommand(bench::replay::command())
        .subcommand(
            Command::new("completions")
                .about("Prints a completion script for a shell")
                .after_help("For bash: lmc completions bash > /etc/bash_completion.d/lmc")
                .arg(
                    Arg::new("shell")
                        .required(true)
                        .value_name("SHELL")
                        .value_parser(clap::value_parser!(Shell)),
                ),
        )
        .subcommand(
            Command::new("man")
                .about("Prints the manual page of lmc or of one of its commands")
                .after_help("To read it: lmc man serve | man -l -")
                .arg(Arg::new("command").value_name("COMMAND").num_args(0..))
                .arg(
                    Arg::new("folder")
                        .long("folder")
                        .value_name("FOLDER")
                        .value_parser(clap::value_parser!(PathBuf))
                        .conflicts_with("command")
                        .help("Write the pages of all commands into this folder"),
                ),
        )
}

fn completions(matches: &ArgMatches) -> Result<()> {
    let shell: Shell = *matches.get_one("shell").expect("clap requires it");
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "lmc", &mut script);
    stdout::bytes(&script);
    Ok(())
}

fn man(matches: &ArgMatches) -> Result<()> {
    if let Some(folder) = matches.get_one::<PathBuf>("folder") {
        return clap_mangen::generate_to(command(), folder)
            .with_context(|| format!("cannot write manual pages into {}", folder.display()));
    }
    let mut page = command();
    page.build();
    for name in matches.get_many::<String>("command").into_iter().flatten() {
        let found = page.find_subcommand(name).cloned();
        page =
            found.with_context(|| format!("{name}: no such command; `lmc --help` lists them"))?;
    }
    let name = page.get_bin_name().unwrap_or("lmc").replace(' ', "-");
    let mut text = Vec::new();
    clap_mangen::Man::new(page.name(name)).render(&mut text)?;
    stdout::bytes(&text);
    Ok(())
}

fn serve_command() -> Command {
    let command = Command::new("serve")
        .visible_alias("server")
        .about("Serves engines on this host over LMCache's multiprocess protocol")
        .long_about(
            "Serves engines on this host over LMCache's multiprocess protocol.\n\n\
             Each setting below is a flag, a variable (LMC_…, capitals) and a key of a TOML file.\n\
             Flags win over variables, variables over the file.",
        )
        .after_help(examples())
        .arg(
            Arg::new("print-config")
                .long("print-config")
                .action(ArgAction::SetTrue)
                .help("Print the settings in effect and where each came from, and exit."),
        )
        .arg(
            Arg::new("detached")
                .long("detached")
                .action(ArgAction::SetTrue)
                .hide(true)
                .help("For `lmc start`: run independently of the process that started the server."),
        );
    let mut command = with_settings(command);
    for foreign in config::foreign_flags() {
        command = command.arg(optional(foreign.name)).arg(no(foreign.name));
    }
    command
}

fn doctor_command() -> Command {
    let command = Command::new("doctor")
        .about("Checks whether this host has what a server needs, and says what to change")
        .after_help(doctor::HELP)
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print JSON: problems, warnings, and for each check what was found and the remedy."),
        );
    with_settings(command)
}

/// Adds the settings of a server, and the flag for a file with settings.
fn with_settings(command: Command) -> Command {
    let file = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(clap::value_parser!(PathBuf))
        .help("A TOML file with settings; also LMC_CONFIG.");
    let settings = ALL_SETTINGS.iter().flat_map(arguments);
    command.arg(file).args(settings)
}

/// Returns the argument of a setting, and for a switch also the argument that turns it off.
fn arguments(info: &'static Info) -> Vec<Arg> {
    let help = format!("{} [default: {}]", info.help.trim(), shown(info.default));
    let arg = Arg::new(info.name)
        .long(info.name)
        .help(help)
        .help_heading(info.group.heading())
        .value_name(info.placeholder)
        .allow_hyphen_values(true);
    match info.shape {
        Shape::Value => vec![arg],
        Shape::Pairs => vec![arg.action(ArgAction::Append)],
        Shape::Switch => vec![
            arg.num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true"),
            no(info.name),
        ],
    }
}

fn shown(default: &str) -> &str {
    if default.is_empty() { "none" } else { default }
}

fn optional(name: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .hide(true)
        .num_args(0..=1)
        .default_missing_value("")
}

fn no(name: &'static str) -> Arg {
    let long: &'static str = Box::leak(format!("no-{name}").into_boxed_str());
    Arg::new(long)
        .long(long)
        .hide(true)
        .action(ArgAction::SetTrue)
}

fn serve(matches: &ArgMatches) -> ExitCode {
    let mut warnings = Vec::new();
    let mut refused = Vec::new();
    for foreign in config::foreign_flags() {
        let given = matches.get_one::<String>(foreign.name).cloned();
        let off = matches.get_flag(&format!("no-{}", foreign.name));
        let Some(value) = given.or_else(|| off.then(|| "no".to_owned())) else {
            continue;
        };
        match foreign.judge(&value) {
            None => {}
            Some(Verdict::Ignore) => warnings.push(foreign.message()),
            Some(Verdict::Refuse) => refused.push(foreign.message()),
        }
    }
    if !refused.is_empty() {
        eprintln!("lmc serve: {}", refused.join("\nlmc serve: "));
        return ExitCode::from(2);
    }
    let is_detached = matches.get_flag("detached");
    let read = {
        let (matches, file) = (matches.clone(), file_of(matches));
        move || {
            let load = |more| load(&matches, file.as_deref(), more);
            let loaded = load(Vec::new())?;
            match is_detached {
                true => load(start::settings(&loaded.entries)),
                false => Ok(loaded),
            }
        }
    };
    let mut loaded = match read() {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("lmc serve: {error}");
            return ExitCode::from(2);
        }
    };
    loaded.warnings.extend(warnings);
    if matches.get_flag("print-config") {
        for warning in &loaded.warnings {
            eprintln!("lmc serve: warning: {warning}");
        }
        out!("{}", print(&loaded));
        return ExitCode::SUCCESS;
    }
    let background = is_detached.then(|| Background::begin(&loaded.config));
    daemon::run(loaded, read, background)
}

/// Returns the absolute path of the file with settings that a command line names.
fn file_of(matches: &ArgMatches) -> Option<PathBuf> {
    let file = matches.get_one::<PathBuf>("config")?;
    Some(std::path::absolute(file).unwrap_or_else(|_| file.clone()))
}

/// Loads the settings from a command line, the environment and a file; `more` count as flags.
fn load(
    matches: &ArgMatches,
    file: Option<&Path>,
    more: Vec<(String, Raw)>,
) -> Result<Loaded, ConfigError> {
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    ServeConfig::load(flags(matches).into_iter().chain(more), variables, file)
}

fn examine(matches: &ArgMatches) -> ExitCode {
    match load(matches, file_of(matches).as_deref(), Vec::new()) {
        Ok(loaded) => doctor::run(&loaded, matches.get_flag("json")),
        Err(error) => {
            eprintln!("lmc doctor: {error}");
            ExitCode::from(2)
        }
    }
}

fn print(loaded: &Loaded) -> String {
    let mut notes = Vec::new();
    if loaded.config.pool_size == config::PoolSize::Auto {
        let shared = loaded.config.shm_name.is_in_dev_shm();
        let (_, why) = crate::choose_pool_size(crate::FreeMemory::now(shared));
        notes.push(("l1-size-gb", format!("now {why}")));
    }
    config::print_config(loaded, &notes)
}

/// The settings that were given as flags.
fn flags(matches: &ArgMatches) -> Vec<(String, Raw)> {
    let mut given = Vec::new();
    for info in ALL_SETTINGS {
        let name = info.name.to_owned();
        match info.shape {
            Shape::Pairs => {
                let values = matches.get_many::<String>(info.name).into_iter().flatten();
                let text = values.cloned().collect::<Vec<_>>().join(",");
                if !text.is_empty() {
                    given.push((name, Raw::Text(text)));
                }
            }
            Shape::Value | Shape::Switch => {
                if let Some(value) = matches.get_one::<String>(info.name) {
                    given.push((name, Raw::Text(value.clone())));
                } else if info.shape == Shape::Switch
                    && matches.get_flag(&format!("no-{}", info.name))
                {
                    given.push((name, Raw::Text("false".to_owned())));
                }
            }
        }
    }
    given
}

#[cfg(test)]
mod documents;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    fn given(args: &[&str]) -> Vec<(String, String)> {
        let line = ["lmc", "serve"].iter().chain(args);
        let matches = command().try_get_matches_from(line).expect("valid flags");
        let (_, matches) = matches.subcommand().expect("serve");
        flags(matches)
            .into_iter()
            .map(|(name, raw)| (name, raw.text().expect("a text").to_owned()))
            .collect()
    }

    #[test]
    fn flags_of_every_shape_are_read() {
        let check = |args: &[&str], name: &str, value: &str| {
            assert_eq!(
                given(args),
                [(name.to_owned(), value.to_owned())],
                "{args:?}"
            );
        };
        check(&["--port", "6555"], "port", "6555");
        check(&["--l1-use-hugepages"], "l1-use-hugepages", "true");
        check(&["--l1-use-hugepages=false"], "l1-use-hugepages", "false");
        check(&["--no-prefault"], "prefault", "false");
        check(
            &["--quota", "a=1GiB", "--quota", "b=2"],
            "quota",
            "a=1GiB,b=2",
        );
        check(&["--null-block-id", "-1"], "null-block-id", "-1");
        assert_eq!(given(&[]), []);
    }
}
