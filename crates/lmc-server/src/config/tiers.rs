//! The tables `[[tier]]` of the configuration file: one for each tier, the fastest first. A flag is
//! the short form for the first tier of its kind.

use super::layers::Problem;
use super::suggest::nearest;

/// A key of a tier's table, and the key that is its short form.
type Key = (&'static str, &'static str);

/// The kind that may have several tables.
const REMOTE: &str = "remote";

/// The kinds of tiers, each with the keys of its table.
const KINDS: &[(&str, &[Key])] = &[
    (
        "peers",
        &[
            ("url", "p2p_peer"),
            ("listen", "p2p_listen"),
            ("advertise", "p2p_advertise"),
            ("directory", "p2p_directory"),
            ("key", "p2p_key"),
            ("transport", "p2p_transport"),
            ("encrypt", "p2p_encrypt"),
            ("nixl_port", "p2p_nixl_port"),
            ("interfaces", "p2p_interfaces"),
            ("name", "p2p_name"),
            ("locate_timeout", "p2p_locate_timeout"),
            ("pending_timeout", "p2p_pending_timeout"),
            ("serve_rate", "p2p_serve_rate"),
        ],
    ),
    (
        "disk",
        &[
            ("url", "disk"),
            ("create", "disk_create"),
            ("size", "disk_size"),
            ("keep_free", "disk_keep_free"),
            ("write", "disk_write"),
            ("admit", "disk_admit"),
            ("timeout", "disk_read_timeout_seconds"),
            ("io", "disk_io"),
            ("depth", "disk_depth"),
            ("state_dir", "state_dir"),
            ("fill", "disk_fill"),
        ],
    ),
    (
        REMOTE,
        &[
            ("url", "remote"),
            ("size", "remote_size"),
            ("ttl", "remote_ttl"),
            ("write", "remote_write"),
            ("admit", "remote_admit"),
            ("salts", "remote_salts"),
            ("key", "remote_key"),
            ("fill", "remote_fill"),
            ("locate_timeout", "remote_locate_timeout"),
            ("timeout", "remote_timeout_seconds"),
            ("negative_ttl", "remote_negative_ttl"),
        ],
    ),
];

/// Keys that other kinds have, and why a kind without them does not.
const FOREIGN: &[(&str, &str, &str)] = &[(
    "disk",
    "ttl",
    "a disk evicts its oldest chunks by size; set size",
)];

/// Settings by their key.
pub(super) type Keys = Vec<(String, toml::Value)>;

/// The tables of a file, in their short forms.
#[derive(Default)]
pub(super) struct Tables {
    /// Keys of the first table of each kind.
    pub(super) first: Keys,
    /// Keys of each further store, and the number of its table, from 1.
    pub(super) further: Vec<(usize, Keys)>,
}

/// Returns the name that a setting has in a table, if it has one in a table of a further store.
pub(super) fn key_of_store(setting: &str) -> Option<&'static str> {
    let (_, keys) = KINDS.iter().find(|(kind, _)| *kind == REMOTE)?;
    let (key, _) = keys.iter().find(|(_, short)| *short == setting)?;
    Some(key)
}

/// Returns the keys of a file that has the tables in place of their short forms.
pub(super) fn flatten(file: &str, tables: &toml::Value, problems: &mut Vec<Problem>) -> Tables {
    let mut found = Tables::default();
    let mut seen: Vec<&str> = Vec::new();
    let mut refuse = |subject: String, text: String| problems.push(Problem { subject, text });
    let tables = match tables.as_array() {
        Some(tables) => tables.as_slice(),
        None => {
            let text = format!("expected tables, [[tier]], found a {}", tables.type_str());
            refuse(format!("{file}: tier"), text);
            &[]
        }
    };
    for (number, table) in tables.iter().enumerate() {
        let subject = format!("{file}: tier {}", number + 1);
        let Some(table) = table.as_table() else {
            refuse(
                subject,
                format!("expected a table, found a {}", table.type_str()),
            );
            continue;
        };
        let named = table.get("kind").and_then(toml::Value::as_str);
        let kind = KINDS.iter().find(|(kind, _)| Some(*kind) == named);
        let Some((kind, keys)) = kind else {
            let kinds: Vec<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
            let found = named.map_or_else(|| "none".to_owned(), |kind| format!("{kind:?}"));
            refuse(
                subject,
                format!("expected kind = one of {kinds:?}, found {found}"),
            );
            continue;
        };
        let is_first = !seen.contains(kind);
        if !is_first && *kind != REMOTE {
            let text = format!(
                "expected one tier of kind {kind:?}; name all its folders or peers in its url"
            );
            refuse(subject, text);
            continue;
        }
        seen.push(kind);
        let mut flat = Keys::new();
        if !table.contains_key("url") {
            refuse(
                subject.clone(),
                "expected url: the location of the tier".to_owned(),
            );
        }
        for (name, value) in table {
            if name == "kind" {
                continue;
            }
            let subject = format!("{subject}: {name}");
            let known = keys.iter().find(|(key, _)| key == name);
            let foreign = FOREIGN
                .iter()
                .find(|(of, key, _)| of == kind && key == name);
            match (known, foreign) {
                (Some((_, short)), _) => flat.push(((*short).to_owned(), value.clone())),
                (None, Some((_, _, why))) => {
                    refuse(subject, format!("not possible for kind {kind:?}: {why}"));
                }
                (None, None) => {
                    let meant = nearest(name, keys.iter().map(|(key, _)| *key));
                    let meant =
                        meant.map_or_else(String::new, |key| format!("; did you mean {key}?"));
                    refuse(
                        subject,
                        format!("unknown key of a tier of kind {kind:?}{meant}"),
                    );
                }
            }
        }
        match is_first {
            true => found.first.extend(flat),
            false => found.further.push((number + 1, flat)),
        }
    }
    found
}
