//! Tests that the commands and flags in the documents exist.

use std::fs;
use std::path::{Path, PathBuf};

use super::command;

/// Returns the documents of the repository that are for readers of this version.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pages = |folder: PathBuf| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    let crates = pages(root.join("crates")).map(|folder| folder.join("README.md"));
    let docs =
        pages(root.join("docs")).filter(|path| path.extension().is_some_and(|end| end == "md"));
    // This page names commands that no longer exist.
    let docs = docs.filter(|path| !path.ends_with("removed.md"));
    let own = ["README.md", "CONTRIBUTING.md", "packaging/README.md"].map(|name| root.join(name));
    let all = own.into_iter().chain(docs).chain(crates);
    all.filter(|path| path.is_file()).collect()
}

/// Returns the command lines of a document: in blocks of code, and in backticks.
fn command_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for (number, part) in text.split("```").enumerate() {
        let part = part.replace("\\\n", " ");
        let found: Vec<&str> = match number % 2 {
            1 => part.lines().collect(),
            _ => part.split('`').skip(1).step_by(2).collect(),
        };
        for line in found {
            let line = line.trim_start_matches("$ ").trim_start_matches("sudo ");
            // Environment variables precede the command.
            let is_variable = |word: &&str| word.contains('=') && !word.starts_with('-');
            let words: Vec<&str> = line.split_whitespace().skip_while(is_variable).collect();
            if let ["lmc", next, ..] = words[..]
                && next != "="
            {
                lines.push(words.join(" "));
            }
        }
    }
    lines
}

/// Checks the names of commands and flags of a line, but not the values of flags.
fn check(line: &str) -> Result<(), String> {
    let mut at = command();
    at.build();
    let mut is_command = true;
    for word in line.split_whitespace().skip(1) {
        if ["#", "|", "&&", ";", ">"].contains(&word) {
            break;
        }
        let word = word.trim_matches(['[', ']', '…', ',']);
        if let Some(flag) = word.strip_prefix("--") {
            let flag = flag.split('=').next().unwrap_or(flag);
            let names = |arg: &clap::Arg| {
                let all = arg.get_long_and_visible_aliases().unwrap_or_default();
                all.contains(&flag) || arg.get_all_aliases().unwrap_or_default().contains(&flag)
            };
            if !at.get_arguments().any(names) {
                return Err(format!("{} has no --{flag}", at.get_name()));
            }
        } else if is_command && at.has_subcommands() {
            let next = at.find_subcommand(word).cloned();
            match next {
                Some(next) => at = next,
                None if at.is_subcommand_required_set() => {
                    return Err(format!("{} has no {word:?}", at.get_name()));
                }
                None => is_command = false,
            }
        }
    }
    Ok(())
}

#[test]
fn the_documents_name_commands_and_flags_that_exist() {
    let mut checked = 0;
    let mut wrong = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).expect("a document");
        for line in command_lines(&text) {
            checked += 1;
            if let Err(error) = check(&line) {
                wrong.push(format!("{}: {line}: {error}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 100, "{checked} lines");
}

#[test]
fn names_that_do_not_exist_are_found() {
    let lines =
        command_lines("Run `lmc serve --no-such-flag`.\n```\nA=b lmc nothing # text\n```\n");
    assert_eq!(lines, ["lmc serve --no-such-flag", "lmc nothing # text"]);
    assert_eq!(
        check(&lines[0]),
        Err("serve has no --no-such-flag".to_owned())
    );
    assert_eq!(check(&lines[1]), Err("lmc has no \"nothing\"".to_owned()));
    assert_eq!(check("lmc status --json # text --x"), Ok(()));
}
