//! Our Grafana board and alert rules: every metric, label and value that they name is on the page of a
//! real server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use lmc_testkit::{Folder, free_port, until};
use serde_json::Value;

use crate::common::page::{Page, parse};
use crate::common::prompt::{CHUNKS, Prompt, register, retrieve};
use crate::common::{Server, drive_flags};

pub(crate) const RULES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../packaging/prometheus/lmc.rules.yml"
);
pub(crate) const BOARD: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../packaging/grafana/lmc.json"
);

/// Labels that Prometheus adds, and that of buckets.
const ADDED: [&str; 3] = ["instance", "job", "le"];

/// Returns a board of Grafana.
pub(crate) fn board(path: &str) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|why| panic!("{path}: {why}"));
    serde_json::from_str(&text).expect("JSON")
}

/// Returns all queries of a board for Prometheus.
pub(crate) fn queries(board: &Value) -> Vec<String> {
    match board {
        Value::Object(fields) => {
            let own = fields.get("expr").and_then(Value::as_str);
            let inner = fields.values().flat_map(queries);
            own.map(str::to_owned).into_iter().chain(inner).collect()
        }
        Value::Array(items) => items.iter().flat_map(queries).collect(),
        _ => Vec::new(),
    }
}

/// Returns the expressions of rules: each value of `expr`, over several lines where it is folded.
fn expressions(rules: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut indent = None;
    for line in rules.lines() {
        let text = line.trim_start();
        let depth = line.len() - text.len();
        if let Some(expression) = text.strip_prefix("expr:") {
            found.push(expression.trim().trim_start_matches(">-").to_owned());
            indent = Some(depth);
        } else if let Some(last) = found
            .last_mut()
            .filter(|_| indent.is_some_and(|at| depth > at))
        {
            *last += " ";
            *last += text;
        } else {
            indent = None;
        }
    }
    found
}

/// A metric that a query names, with its matchers: label and text.
#[derive(Debug, PartialEq)]
struct Selector {
    name: String,
    matchers: Vec<(String, String)>,
}

/// Returns the metrics that a query names, and the labels that it groups by.
fn selectors(query: &str) -> (Vec<Selector>, Vec<String>) {
    let (mut found, mut labels) = (Vec::new(), Vec::new());
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut rest = query;
    while let Some(start) = rest.find(is_word) {
        rest = &rest[start..];
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let word = &rest[..end];
        rest = &rest[end..];
        if word.starts_with("lmc_") || word.starts_with("lmcache_") {
            let mut matchers = Vec::new();
            if let Some(inner) = rest.strip_prefix('{') {
                let (inner, after) = inner.split_once('}').expect("an end of the matchers");
                rest = after;
                for matcher in inner
                    .split("\",")
                    .map(|matcher| matcher.trim_end_matches('"'))
                {
                    let (label, value) = matcher.split_once('"').expect("a value");
                    let label = label.trim_end_matches(['=', '~', '!']);
                    matchers.push((label.to_owned(), value.to_owned()));
                }
            }
            found.push(Selector {
                name: word.to_owned(),
                matchers,
            });
        } else if ["by", "on", "ignoring", "without"].contains(&word) {
            let list = rest
                .trim_start()
                .strip_prefix('(')
                .expect("a list of labels");
            let (list, after) = list.split_once(')').expect("its end");
            rest = after;
            labels.extend(list.split(',').map(|label| label.trim().to_owned()));
        } else if let Some(range) = rest.strip_prefix('[') {
            rest = range.split_once(']').expect("its end").1;
        }
    }
    (found, labels)
}

/// Labels of each series' name on a page, with the values of each.
fn names(page: &Page) -> BTreeMap<&str, BTreeMap<&str, BTreeSet<&str>>> {
    let mut names: BTreeMap<&str, BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
    for sample in page.values().flat_map(|family| &family.samples) {
        let labels = names.entry(&sample.name).or_default();
        for (label, value) in &sample.labels {
            labels.entry(label).or_default().insert(value);
        }
    }
    names
}

/// Asserts that all that queries name is on a page.
fn check(page: &Page, queries: &[String]) {
    let names = names(page);
    let all_labels: BTreeSet<&str> = names
        .values()
        .flat_map(|labels| labels.keys().copied())
        .collect();
    for query in queries {
        let (selectors, labels) = selectors(query);
        assert!(!selectors.is_empty() || query.starts_with("up{"), "{query}");
        for label in labels {
            let is_known = all_labels.contains(&*label) || ADDED.contains(&&*label);
            assert!(is_known, "{label} in {query}");
        }
        for Selector { name, matchers } in selectors {
            let Some(labels) = names.get(&*name) else {
                panic!("{name} in {query}");
            };
            for (label, value) in matchers {
                if ADDED[..2].contains(&&*label) {
                    continue;
                }
                let values = labels
                    .get(&*label)
                    .unwrap_or_else(|| panic!("{label} in {query}"));
                for value in value.split('|') {
                    // Prometheus 3 writes the bounds of buckets so.
                    let value = value.strip_suffix(".0").unwrap_or(value);
                    assert!(values.contains(value), "{label}={value} in {query}");
                }
            }
        }
    }
}

/// Returns the page of a server with every tier, of which all metrics have series.
fn full_page() -> Page {
    let (drive, store) = (Folder::temporary(), Folder::temporary());
    let url = format!("file://{}", store.text());
    let listen = format!("127.0.0.1:{}", free_port());
    let disk = drive_flags(&drive, "512MiB");
    let shared = ["--remote", &url, "--p2p-listen", &listen];
    let server = Server::start(&[&disk[..], &shared].concat());
    let mut client = server.client();
    let shm_name = register(&mut client);
    Prompt(1).store(&mut client, &shm_name);
    until("the chunks are found", || {
        Prompt(1).retrieve(&mut client, &shm_name, "request") == CHUNKS as u64
    });
    retrieve(&mut client, &shm_name, "missed");
    let answer = server.get("/metrics");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    parse(body).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn the_board_and_the_rules_name_what_the_page_has() {
    let page = full_page();
    let board = queries(&board(BOARD));
    assert!(board.len() > 50, "{} queries", board.len());
    check(&page, &board);
    let rules = fs::read_to_string(RULES).expect("the rules");
    let expressions = expressions(&rules);
    assert_eq!(expressions.len(), rules.matches("- alert: ").count());
    check(&page, &expressions);
}

/// An alert without a text on what to do is of no use at night, and an alert that no test fires may never
/// fire.
#[test]
fn every_alert_is_explained_and_fired_by_a_test() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/alerts.md");
    let page = fs::read_to_string(page).expect("the page");
    let rules = fs::read_to_string(RULES).expect("the rules");
    let alerts: Vec<&str> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    assert!(alerts.len() > 15, "{alerts:?}");
    // The tests of alerts.rs name the alerts that they fire as strings, and no others.
    let fired: BTreeSet<&str> = include_str!("alerts.rs")
        .split('"')
        .filter(|text| text.starts_with("Lmc"))
        .collect();
    assert_eq!(fired, alerts.iter().copied().collect());
    for alert in alerts {
        assert!(page.contains(&format!("| `{alert}` |")), "{alert}");
    }
}

#[test]
fn what_queries_name_is_found_in_them() {
    let query =
        "sum by (a, le) (rate(lmc_b_bucket{c=~\"d|e\",f!=\"g\"}[5m])) / ignoring(h) lmc_i > 0.5";
    let (found, labels) = selectors(query);
    let text = |text: &str| text.to_owned();
    let expected = [
        Selector {
            name: text("lmc_b_bucket"),
            matchers: vec![(text("c"), text("d|e")), (text("f"), text("g"))],
        },
        Selector {
            name: text("lmc_i"),
            matchers: Vec::new(),
        },
    ];
    assert_eq!(found, expected);
    assert_eq!(labels, ["a", "le", "h"]);
    let rules = "- alert: A\n  expr: >-\n    a\n    + b\n  for: 1m\n- alert: B\n  expr: c > 0\n";
    assert_eq!(expressions(rules), [" a + b", "c > 0"]);
}
