//! The layers of the configuration, and which of them wins: flag, variable, file, default.

use std::fmt;
use std::path::{Path, PathBuf};

use super::problem::{ConfigError, Problem};
use super::secret::mask_passwords;
use super::service_links::Services;
use super::setting::{Info, Raw, Secret, Shape};
use super::suggest::nearest;
use super::tiers::{Kind, kind_of};

/// Variables that begin with `LMC_` and are not settings of the server.
const OTHER_VARIABLES: &[&str] = &[
    "LMC_CONFIG",
    "LMC_URL",
    "LMC_CA_FILE",
    "LMC_WRITE_DOCS",
    "LMC_CACHE_DIR",
    "LMC_NIXL_LIBRARY",
];

/// Prefixes of variables of other programs: our tests and benches.
const OTHER_PREFIXES: &[&str] = &["LMC_TEST_", "LMC_BENCH_", "LMC_XTASK_"];

/// Origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingOrigin {
    /// A flag on the command line.
    Flag(String),
    /// An environment variable.
    Variable(String),
    /// The TOML file.
    File(PathBuf),
    /// The default.
    Default,
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "flag {flag}"),
            Self::Variable(name) => write!(f, "variable {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// The value of a setting from the layer that wins, before parsing, and its origin.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The setting.
    pub info: &'static Info,
    /// Value as it was written.
    pub raw: Raw,
    /// Origin of the entry.
    pub source: SettingOrigin,
}

impl Entry {
    /// Returns the value as it was written, without passwords, and with each salt as `shown_salt`
    /// names it.
    pub fn shown(&self, shown_salt: impl Fn(&str) -> String) -> String {
        let join = |parts: Vec<String>| parts.join(",");
        match (self.info.secret(), &self.raw) {
            (Some(Secret::Salts), Raw::Text(text)) if text.trim() != "all" => join(
                text.split(',')
                    .map(|salt| shown_salt(salt.trim()))
                    .collect(),
            ),
            (Some(Secret::Quotas), raw) | (_, raw @ Raw::Pairs(_)) => {
                let pairs = raw.pairs().unwrap_or_default().into_iter();
                join(
                    pairs
                        .map(|(salt, size)| format!("{}={size}", shown_salt(&salt)))
                        .collect(),
                )
            }
            (_, Raw::Text(text)) => mask_passwords(text),
        }
    }
}

/// The values that were given, by layer.
#[derive(Default)]
pub(crate) struct Layers {
    /// Every setting.
    settings: &'static [Info],
    flags: Vec<(String, Raw)>,
    variables: Vec<(String, String)>,
    file: Option<PathBuf>,
    keys: Vec<(String, Raw)>,
    /// Kinds of the file's tables `[[tier]]`, in order.
    tables: Vec<Kind>,
    stores: Vec<Self>,
    problems: Vec<Problem>,
    warnings: Vec<String>,
    notes: Vec<String>,
    entries: Vec<Entry>,
}

impl Layers {
    /// Takes the values of `settings` from the command line and the environment. `flags` holds names without
    /// their dashes; only variables that begin with `LMC_` are read.
    pub(crate) fn new(
        settings: &'static [Info],
        flags: impl IntoIterator<Item = (String, Raw)>,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let mut layers = Self {
            settings,
            flags: flags.into_iter().collect(),
            ..Self::default()
        };
        let variables = variables.into_iter();
        let variables: Vec<_> = variables
            .filter(|(name, _)| name.starts_with("LMC_"))
            .collect();
        let services = Services::of(&variables);
        layers.notes.extend(services.note());
        for (name, value) in variables {
            if services.wrote(&name, &value) {
                continue;
            }
            if settings.iter().any(|info| info.variable() == name) {
                layers.variables.push((name, value));
            } else if !OTHER_VARIABLES.contains(&name.as_str())
                && !OTHER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            {
                let known: Vec<String> = settings.iter().map(|info| info.variable()).collect();
                let known = known
                    .iter()
                    .map(String::as_str)
                    .chain(OTHER_VARIABLES.iter().copied());
                layers.warnings.push(match nearest(&name, known) {
                    Some(name_meant) => {
                        format!("variable {name} is not a setting and was ignored; did you mean {name_meant}?")
                    }
                    None => format!("variable {name} is not a setting and was ignored"),
                });
            }
        }
        layers
    }

    /// Reads the file at `path` as the layer above the defaults. [`Layers::finish`] returns the problems
    /// of the file.
    pub(crate) fn read_file(&mut self, path: &Path) {
        match std::fs::read_to_string(path) {
            Ok(text) => self.parse_file(path, &text),
            Err(error) => self.problems.push(Problem {
                subject: format!("--config {}", path.display()),
                text: format!("the file cannot be read: {error}"),
            }),
        }
    }

    /// Takes `text` as the contents of the file at `path`.
    pub(crate) fn parse_file(&mut self, path: &Path, text: &str) {
        self.file = Some(path.to_owned());
        let table = match text.parse::<toml::Table>() {
            Ok(table) => table,
            Err(error) => {
                self.problems.push(Problem {
                    subject: path.display().to_string(),
                    text: not_toml(text, &error),
                });
                return;
            }
        };
        let file = path.display().to_string();
        let mut table = table;
        if let Some(tables) = table.remove("tier") {
            let tables = super::tiers::flatten(&file, &tables, &mut self.problems);
            self.tables = tables.kinds;
            for (number, keys) in tables.further {
                let mut store = Self {
                    settings: self.settings,
                    file: Some(PathBuf::from(format!("{file}: tier {number}"))),
                    ..Self::default()
                };
                store.read_keys(keys);
                self.stores.push(store);
            }
            for (key, value) in tables.first {
                if table.insert(key.clone(), value).is_some() {
                    self.problems.push(Problem {
                        subject: format!("{file}: {key}"),
                        text: "is also set in the table of its tier: set it in one of the two only"
                            .to_owned(),
                    });
                }
            }
        }
        self.read_keys(table);
    }

    fn read_keys(&mut self, keys: impl IntoIterator<Item = (String, toml::Value)>) {
        let file = self.file.clone().unwrap_or_default();
        for (key, value) in keys {
            let subject = format!("{}: {key}", file.display());
            let Some(info) = self.settings.iter().find(|info| info.key() == key) else {
                let keys: Vec<String> = self.settings.iter().map(|info| info.key()).collect();
                let meant = match nearest(&key, keys.iter().map(String::as_str)) {
                    Some(name) => format!("; did you mean {name}?"),
                    None => "; `lmc serve --print-config` lists all keys".to_owned(),
                };
                self.problems.push(Problem {
                    subject,
                    text: format!("unknown key{meant}"),
                });
                continue;
            };
            match raw_of(&value, info.shape) {
                Ok(raw) => self.keys.push((key, raw)),
                Err(text) => self.problems.push(Problem { subject, text }),
            }
        }
    }

    /// Returns the value of a setting from the layer that wins. For a value that cannot be parsed it
    /// records a problem and returns the default, so that all problems are found at once.
    pub(crate) fn take<T>(
        &mut self,
        info: &'static Info,
        parse: impl Fn(&Raw) -> Result<T, String>,
    ) -> T {
        let entry = self.winner(info);
        let parsed = parse(&entry.raw);
        let value = parsed.unwrap_or_else(|text| {
            self.problems.push(Problem {
                subject: subject_of(&entry),
                text,
            });
            parse(&default_of(info)).expect("defaults parse; a test proves it")
        });
        self.entries.push(entry);
        value
    }

    /// Returns the kinds of the file's tables `[[tier]]`, in order.
    pub(super) fn tables(&self) -> &[Kind] {
        &self.tables
    }

    /// Takes the layers of each store after the first: its table, over the defaults.
    pub(crate) fn take_stores(&mut self) -> Vec<Self> {
        std::mem::take(&mut self.stores)
    }

    /// Takes over the problems of a store after the first. Returns its settings, except those with
    /// default values.
    pub(crate) fn finish_store(&mut self, store: Self) -> Vec<Entry> {
        self.problems.extend(store.problems);
        let mut entries = store.entries;
        entries.retain(|entry| entry.source != SettingOrigin::Default);
        entries
    }

    /// Records that a setting does not fit the others.
    pub(crate) fn refuse(&mut self, name: &str, text: impl Into<String>) {
        let entry = self.entries.iter().find(|entry| entry.info.name == name);
        self.problems.push(Problem {
            subject: subject_of(entry.expect("every setting was taken")),
            text: text.into(),
        });
    }

    /// Takes the notes about the environment, for the log.
    pub(crate) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Returns the settings that were taken, and the warnings.
    ///
    /// # Errors
    /// [`ConfigError`] with one entry per problem.
    pub(crate) fn finish(self) -> Result<(Vec<Entry>, Vec<String>), ConfigError> {
        if self.problems.is_empty() {
            return Ok((self.entries, self.warnings));
        }
        Err(ConfigError {
            problems: self.problems,
        })
    }

    fn winner(&self, info: &'static Info) -> Entry {
        let flag = self.flags.iter().find(|(name, _)| name == info.name);
        let variable = info.variable();
        let variable = self.variables.iter().find(|(name, _)| *name == variable);
        let key = info.key();
        let key = self.keys.iter().find(|(name, _)| *name == key);
        let (raw, source) = match (flag, variable, key, &self.file) {
            (Some((_, raw)), ..) => (raw.clone(), SettingOrigin::Flag(info.flag())),
            (None, Some((name, value)), ..) => (
                Raw::Text(value.clone()),
                SettingOrigin::Variable(name.clone()),
            ),
            (None, None, Some((_, raw)), Some(path)) => {
                (raw.clone(), SettingOrigin::File(path.clone()))
            }
            _ => (default_of(info), SettingOrigin::Default),
        };
        Entry { info, raw, source }
    }
}

fn default_of(info: &Info) -> Raw {
    Raw::Text(info.default.to_owned())
}

/// Names a setting and its origin, with its value unless the value may hold a secret.
fn subject_of(entry: &Entry) -> String {
    let Entry { info, source, .. } = entry;
    if info.secret().is_some() {
        return match source {
            SettingOrigin::Flag(flag) => flag.clone(),
            SettingOrigin::Variable(name) => name.clone(),
            SettingOrigin::File(path) => format!("{}: {}", path.display(), info.key()),
            SettingOrigin::Default => info.flag(),
        };
    }
    let value = entry.shown(str::to_owned);
    match source {
        SettingOrigin::Flag(flag) => format!("{flag} {value}"),
        SettingOrigin::Variable(name) => format!("{name}={value}"),
        SettingOrigin::File(path) => format!("{}: {} = {value}", path.display(), info.key()),
        SettingOrigin::Default => info.flag(),
    }
}

/// Describes the error of a file with its line number. The line itself may hold a secret and is not repeated.
fn not_toml(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let line = before.map_or(1, |before| before.matches('\n').count() + 1);
    format!("not valid TOML in line {line}: {}", error.message())
}

/// Returns a TOML value in the text form that flags and variables have.
fn raw_of(value: &toml::Value, shape: Shape) -> Result<Raw, String> {
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Boolean(flag) => Ok(flag.to_string()),
        other => Err(format!(
            "expected a string, number or boolean, found {}",
            kind_of(other)
        )),
    };
    match (value, shape) {
        (toml::Value::Table(table), Shape::Pairs) => table
            .iter()
            .map(|(name, value)| Ok((name.clone(), scalar(value)?)))
            .collect::<Result<_, String>>()
            .map(Raw::Pairs),
        _ => scalar(value).map(Raw::Text),
    }
}
