//! The tables of docs/configuration.md, compared with the settings. The page itself holds the text
//! around the tables.

use std::fmt::Write;

use super::foreign::{Verdict, foreign_flags};
use super::setting::{Group, Shape};
use super::settings::ALL;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");

fn settings() -> String {
    let mut out = String::new();
    let mut group: Option<Group> = None;
    for info in ALL {
        if group.replace(info.group) != Some(info.group) {
            let gap = if out.is_empty() { "" } else { "\n" };
            let heading = info.group.heading();
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "{gap}## {heading}\n\n| flag | default | meaning |\n|---|---|---|"
            );
        }
        let default = if info.default.is_empty() {
            "none"
        } else {
            info.default
        };
        let value = match info.shape {
            Shape::Switch => String::new(),
            _ => format!(" {}", info.placeholder),
        };
        let (name, help) = (info.name, info.help.trim());
        let _ = writeln!(out, "| `--{name}{value}` | `{default}` | {help} |");
    }
    out
}

fn flags_of_lmcache() -> String {
    let mut out = String::from("| flag | here | instead |\n|---|---|---|\n");
    for flag in foreign_flags() {
        let mut verdict = match flag.verdict {
            Verdict::Ignore => "ignored",
            Verdict::Refuse => "refused",
        }
        .to_owned();
        for (index, value) in flag.harmless.iter().enumerate() {
            verdict += if index == 0 { ", except " } else { ", " };
            verdict += &match *value {
                "no" => format!("`--no-{}`", flag.name),
                "" => "when empty".to_owned(),
                value => format!("`{value}`"),
            };
        }
        let _ = writeln!(out, "| `--{}` | {verdict} | {} |", flag.name, flag.advice);
    }
    out
}

fn with_table(page: &str, name: &str, table: &str) -> String {
    let (begin, end) = (
        format!("<!-- {name}: begin -->\n"),
        format!("<!-- {name}: end -->"),
    );
    let (before, rest) = page
        .split_once(&begin)
        .expect("the page has the table's begin");
    let (_, after) = rest.split_once(&end).expect("the page has the table's end");
    format!("{before}{begin}{table}{end}{after}")
}

/// Writes the tables when it runs with `LMC_WRITE_DOCS=1`.
#[test]
fn the_documentation_lists_every_setting() {
    let page = std::fs::read_to_string(PAGE).expect("the page exists");
    let wanted = with_table(&page, "settings", &settings());
    let wanted = with_table(&wanted, "flags of LMCache", &flags_of_lmcache());
    if std::env::var_os("LMC_WRITE_DOCS").is_some() {
        std::fs::write(PAGE, &wanted).expect("the page can be written");
        return;
    }
    let mut lines = page.lines().zip(wanted.lines());
    let changed = lines.find_map(|(old, new)| (old != new).then(|| format!("{old}\n->\n{new}")));
    assert!(
        page == wanted,
        "write docs/configuration.md with LMC_WRITE_DOCS=1: {changed:?}"
    );
}
