//! The order in which lower tiers are asked, and the tables `[[tier]]` of the configuration file,
//! which give that order. Flags are the short form of the first tier of each kind.

use super::problem::Problem;
use super::suggest::nearest;

/// The kind of a tier, in the usual order of tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Disk,
    Peers,
    Remote,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Disk, Self::Peers, Self::Remote];

    /// Returns the name of the kind in a table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Peers => "peers",
            Self::Remote => "remote",
        }
    }

    /// Returns the keys of a table of this kind.
    fn keys(self) -> &'static [Key] {
        match self {
            Self::Disk => DISK,
            Self::Peers => PEERS,
            Self::Remote => REMOTE,
        }
    }

    /// Returns the name that a setting has in a table of this kind, if it has one.
    pub(super) fn key_of(self, setting: &str) -> Option<&'static str> {
        let (key, _) = self.keys().iter().find(|(_, short)| *short == setting)?;
        Some(key)
    }
}

/// Returns the kinds of the tiers in the order of their tables. The engine asks the tiers in this order. A kind without a table comes before the first table of a kind that usually follows it.
pub(super) fn order(tables: &[Kind]) -> Vec<Kind> {
    let mut order = tables.to_vec();
    for kind in Kind::ALL {
        if !order.contains(&kind) {
            let follows = order.iter().position(|other| *other > kind);
            order.insert(follows.unwrap_or(order.len()), kind);
        }
    }
    order
}

/// A key of a tier's table, and the key that is its short form.
type Key = (&'static str, &'static str);

const DISK: &[Key] = &[
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
];

const PEERS: &[Key] = &[
    ("url", "p2p_peer"),
    ("listen", "p2p_listen"),
    ("advertise", "p2p_advertise"),
    ("directory", "p2p_directory"),
    ("key", "p2p_key"),
    ("transport", "p2p_transport"),
    ("encrypt", "p2p_encrypt"),
    ("interfaces", "p2p_interfaces"),
    ("name", "p2p_name"),
    ("locate_timeout", "p2p_locate_timeout"),
    ("pending_timeout", "p2p_pending_timeout"),
    ("max_wait", "p2p_max_wait"),
    ("serve_rate", "p2p_serve_rate"),
];

const REMOTE: &[Key] = &[
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
];

/// Keys that a kind lacks although other kinds have them, and the reason.
const FOREIGN: &[(Kind, &str, &str)] = &[(
    Kind::Disk,
    "ttl",
    "a disk evicts its oldest chunks by size; set size",
)];

/// Settings by their key.
pub(super) type Keys = Vec<(String, toml::Value)>;

/// The tables of a file, in their short forms.
#[derive(Default)]
pub(super) struct Tables {
    /// Kinds of the tables, in order.
    pub(super) kinds: Vec<Kind>,
    /// Keys of the first table of each kind.
    pub(super) first: Keys,
    /// Keys of each further store, and the number of its table, from 1.
    pub(super) further: Vec<(usize, Keys)>,
}

/// Converts the tables of a file to their short forms.
pub(super) fn flatten(file: &str, tables: &toml::Value, problems: &mut Vec<Problem>) -> Tables {
    let mut found = Tables::default();
    let mut refuse = |subject: String, text: String| problems.push(Problem { subject, text });
    let tables = match tables.as_array() {
        Some(tables) => tables.as_slice(),
        None => {
            let text = format!("expected tables, [[tier]], found {}", kind_of(tables));
            refuse(format!("{file}: tier"), text);
            &[]
        }
    };
    for (number, table) in tables.iter().enumerate() {
        let subject = format!("{file}: tier {}", number + 1);
        let Some(table) = table.as_table() else {
            refuse(
                subject,
                format!("expected a table, found {}", kind_of(table)),
            );
            continue;
        };
        let named = table.get("kind").and_then(toml::Value::as_str);
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| Some(kind.name()) == named);
        let Some(kind) = kind else {
            let kinds = Kind::ALL.map(Kind::name);
            let found = named.map_or_else(|| "none".to_owned(), |kind| format!("{kind:?}"));
            refuse(
                subject,
                format!("expected kind = one of {kinds:?}, found {found}"),
            );
            continue;
        };
        let name = kind.name();
        let is_first = !found.kinds.contains(&kind);
        if !is_first && kind != Kind::Remote {
            let text = format!(
                "expected one tier of kind {name:?}; name all its folders or peers in its url"
            );
            refuse(subject, text);
            continue;
        }
        if kind == Kind::Disk && !found.kinds.is_empty() {
            let text = "expected the table of kind \"disk\" before all others: this server knows \
                        what its drives hold, so drives are always asked first";
            refuse(subject.clone(), text.to_owned());
        }
        found.kinds.push(kind);
        let mut flat = Keys::new();
        if !table.contains_key("url") {
            refuse(
                subject.clone(),
                "expected url: the location of the tier".to_owned(),
            );
        }
        for (key, value) in table {
            if key == "kind" {
                continue;
            }
            let subject = format!("{subject}: {key}");
            let known = kind.keys().iter().find(|(known, _)| known == key);
            let foreign = FOREIGN
                .iter()
                .find(|(of, foreign, _)| *of == kind && foreign == key);
            match (known, foreign) {
                (Some((_, short)), _) => flat.push(((*short).to_owned(), value.clone())),
                (None, Some((_, _, why))) => {
                    refuse(subject, format!("not possible for kind {name:?}: {why}"));
                }
                (None, None) => {
                    let meant = nearest(key, kind.keys().iter().map(|(key, _)| *key));
                    let meant =
                        meant.map_or_else(String::new, |key| format!("; did you mean {key}?"));
                    refuse(
                        subject,
                        format!("unknown key of a tier of kind {name:?}{meant}"),
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

/// Returns the type of a TOML value, with its article.
pub(super) fn kind_of(value: &toml::Value) -> String {
    let kind = value.type_str();
    let article = if kind.starts_with(['a', 'i']) {
        "an"
    } else {
        "a"
    };
    format!("{article} {kind}")
}

#[cfg(test)]
mod tests {
    use super::Kind::{Disk, Peers, Remote};
    use super::*;

    #[test]
    fn tables_order_the_tiers_and_others_come_where_they_usually_are() {
        for (tables, expected) in [
            (&[][..], &[Disk, Peers, Remote][..]),
            (&[Remote], &[Disk, Peers, Remote]),
            (&[Remote, Peers], &[Disk, Remote, Peers]),
            (&[Disk, Remote, Remote], &[Disk, Peers, Remote, Remote]),
            (&[Remote, Peers, Remote], &[Disk, Remote, Peers, Remote]),
            (&[Peers], &[Disk, Peers, Remote]),
        ] {
            assert_eq!(order(tables), expected, "{tables:?}");
        }
    }
}
