//! The files of the AWS tools: `~/.aws/credentials` and `~/.aws/config`.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::error::S3UrlError;

/// Most bytes of a file that are accepted.
const MAX_FILE: u64 = 1 << 20;
/// Keys with which a profile takes its credentials from another source.
const ELSEWHERE: [&str; 6] = [
    "role_arn",
    "sso_session",
    "sso_start_url",
    "credential_process",
    "web_identity_token_file",
    "login_session",
];

type Section = HashMap<String, String>;

/// The sections of a file by name. Lines below a key without a value, as in `s3 =`, become keys such as
/// `s3.endpoint_url`.
type Sections = HashMap<String, Section>;

/// The settings of one profile.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Profile {
    /// The endpoint for S3.
    pub(super) endpoint: Option<String>,
    /// The region.
    pub(super) region: Option<String>,
    /// Access key id, secret access key and session token.
    pub(super) keys: Option<(String, String, Option<String>)>,
    /// Name of the setting with which the profile takes its credentials from another source, if it does.
    pub(super) elsewhere: Option<&'static str>,
}

impl Profile {
    /// Reads the profile that these variables name, in the files that they name. Returns a `Profile` without
    /// settings if there are no files.
    ///
    /// # Errors
    /// [`S3UrlError`] for a file that cannot be read, and for a named profile that is in neither file.
    pub(super) fn read(variables: &HashMap<String, String>) -> Result<Self, S3UrlError> {
        let variable = |name: &str| variables.get(name).filter(|value| !value.is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let file = |name: &str, default: &str| {
            let named = variable(name);
            let path = match named {
                Some(path) => match path.strip_prefix("~/") {
                    Some(rest) => home.as_ref().map(|home| home.join(rest)),
                    None => Some(PathBuf::from(path)),
                },
                None => home.as_ref().map(|home| home.join(default)),
            };
            path.map_or_else(|| Ok(Sections::new()), |path| read(&path, named.is_some()))
        };
        let credentials = file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials")?;
        let config = file("AWS_CONFIG_FILE", ".aws/config")?;
        let named = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"));
        let this = Self::of(
            &credentials,
            &config,
            named.map_or("default", String::as_str),
        );
        match this {
            Some(this) => Ok(this),
            None if named.is_some() => Err(S3UrlError::Setting(
                "AWS_PROFILE (or AWS_DEFAULT_PROFILE) names a profile that is in neither ~/.aws/credentials nor ~/.aws/config: add it there, or unset the variable",
            )),
            None => Ok(Self::default()),
        }
    }

    /// Returns the settings of a profile from both files; `None` if it is in neither.
    fn of(credentials: &Sections, config: &Sections, name: &str) -> Option<Self> {
        let own = credentials.get(name);
        let other = config.get(&format!("profile {name}"));
        // Only the default profile may be named without the word `profile`.
        let other = other.or_else(|| config.get(name).filter(|_| name == "default"));
        if own.is_none() && other.is_none() {
            return None;
        }
        // The credentials file has precedence.
        let sections = || own.into_iter().chain(other);
        let value = |key: &str| {
            let found = sections().find_map(|section| section.get(key));
            found.filter(|value| !value.is_empty()).cloned()
        };
        let services = value("services").and_then(|name| config.get(&format!("services {name}")));
        let of_s3 = services.and_then(|services| services.get("s3.endpoint_url").cloned());
        // Both keys from the same file, never one from each.
        let keys = sections().find_map(|section| {
            let value = |key: &str| section.get(key).filter(|value| !value.is_empty()).cloned();
            let pair = (value("aws_access_key_id")?, value("aws_secret_access_key")?);
            Some((pair.0, pair.1, value("aws_session_token")))
        });
        let elsewhere = ELSEWHERE.into_iter().find(|key| value(key).is_some());
        Some(Self {
            endpoint: of_s3.or_else(|| value("endpoint_url")),
            region: value("region"),
            elsewhere: elsewhere.filter(|_| keys.is_none()),
            keys,
        })
    }
}

/// Reads a file; returns nothing if it does not exist. A file that no variable names is ignored with a
/// warning if this user must not read it. Errors repeat nothing from the file.
fn read(path: &Path, is_named: bool) -> Result<Sections, S3UrlError> {
    let mut text = String::new();
    let wrong = |reason: &str| {
        Err(S3UrlError::File {
            path: path.to_owned(),
            reason: reason.to_owned(),
        })
    };
    // One byte more, to detect that the file is longer.
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text));
    match read {
        Ok(len) if len as u64 <= MAX_FILE => Ok(parse(&text)),
        Ok(_) => wrong("it has more than 1 MiB"),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Sections::new()),
        Err(error)
            if !is_named
                && matches!(
                    error.kind(),
                    ErrorKind::PermissionDenied | ErrorKind::NotADirectory
                ) =>
        {
            tracing::warn!(
                path = %path.display(),
                reason = %error,
                "a file of the AWS tools cannot be read and is ignored"
            );
            Ok(Sections::new())
        }
        Err(error) => wrong(&error.to_string()),
    }
}

/// Parses sections. A line outside a section is skipped, and a later value replaces an earlier one, as in the
/// AWS tools.
fn parse(text: &str) -> Sections {
    let mut sections = Sections::new();
    let mut section: Option<String> = None;
    let mut outer: Option<String> = None;
    // Indentation of the last key that does not belong to another key's value.
    let mut key_indent: Option<usize> = None;
    for line in text.lines() {
        let text = without_comment(line);
        if text.is_empty() {
            continue;
        }
        if let Some(name) = text.strip_prefix('[') {
            section = name.split_once(']').map(|(name, _)| section_name(name));
            (outer, key_indent) = (None, None);
            if let Some(name) = &section {
                sections.entry(name.clone()).or_default();
            }
            continue;
        }
        let (Some(name), Some((key, value))) = (&section, text.split_once('=')) else {
            continue;
        };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
        let indent = line.len() - line.trim_start().len();
        let key = match (key_indent.is_some_and(|of_key| indent > of_key), &outer) {
            (true, Some(outer)) => format!("{outer}.{key}"),
            // The line continues a value.
            (true, None) => continue,
            (false, _) => {
                key_indent = Some(indent);
                outer = value.is_empty().then(|| key.clone());
                key
            }
        };
        let section = sections.entry(name.clone()).or_default();
        section.insert(key, value.to_owned());
    }
    sections
}

/// Returns a line without its comment, which begins the line or follows a blank.
fn without_comment(line: &str) -> &str {
    let text = line.trim();
    if text.starts_with(['#', ';']) {
        return "";
    }
    let comments = [" #", " ;", "\t#", "\t;"];
    let end = comments.iter().filter_map(|start| text.find(start)).min();
    text[..end.unwrap_or(text.len())].trim_end()
}

/// Returns the name of a section: `profile name`, also for `profile "name"`.
fn section_name(name: &str) -> String {
    let words = name.split_whitespace();
    let words: Vec<&str> = words.map(|word| word.trim_matches(['"', '\''])).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use lmc_testkit::Folder;

    use super::*;

    const CREDENTIALS: &str = "\
# the keys of all profiles
[default]
aws_access_key_id = default-key
aws_secret_access_key=default+secret/with=signs
[ other ]
aws_access_key_id = other-key ; a comment
aws_secret_access_key = other-secret
aws_session_token = other-token
region = eu-west-3
[half]
aws_access_key_id = half-key
[indented]
  aws_access_key_id = indented-key
    = continues
  aws_secret_access_key = indented-secret
";
    const CONFIG: &str = "\
a line of no section
[default]
region = eu-west-1
s3 =
    endpoint_url = http://not.that.one
    max_concurrent_requests = 20
output = json
[profile other]
region = eu-west-2
services = local
endpoint_url = http://all.services:9000
[profile \"in config\"]
AWS_ACCESS_KEY_ID = config-key
aws_secret_access_key = config-secret
endpoint_url = https://of.config
[profile half]
aws_secret_access_key = of-another-pair
sso_session = somewhere
[services local]
dynamodb =
  endpoint_url = http://localhost:8000
s3 =
  endpoint_url = http://localhost:9000
[other]
region = without-the-word
";

    fn profile(name: &str) -> Option<Profile> {
        Profile::of(&parse(CREDENTIALS), &parse(CONFIG), name)
    }

    fn keys(profile: &Profile) -> Option<(&str, &str, Option<&str>)> {
        let keys = profile.keys.as_ref()?;
        Some((&keys.0, &keys.1, keys.2.as_deref()))
    }

    #[test]
    fn a_profile_is_read_from_both_files() {
        let default = profile("default").expect("a profile");
        let pair = ("default-key", "default+secret/with=signs", None);
        assert_eq!(keys(&default), Some(pair));
        assert_eq!(default.region.as_deref(), Some("eu-west-1"));
        assert_eq!((default.endpoint, default.elsewhere), (None, None));

        let other = profile("other").expect("a profile");
        let pair = ("other-key", "other-secret", Some("other-token"));
        assert_eq!(keys(&other), Some(pair));
        assert_eq!(other.region.as_deref(), Some("eu-west-3"));
        assert_eq!(other.endpoint.as_deref(), Some("http://localhost:9000"));

        let in_config = profile("in config").expect("a profile");
        assert_eq!(
            keys(&in_config),
            Some(("config-key", "config-secret", None))
        );
        assert_eq!(in_config.endpoint.as_deref(), Some("https://of.config"));

        let indented = profile("indented").expect("a profile");
        let pair = ("indented-key", "indented-secret", None);
        assert_eq!(keys(&indented), Some(pair));

        // Two halves of two files are no pair.
        let half = profile("half").expect("a profile");
        assert_eq!((keys(&half), half.elsewhere), (None, Some("sso_session")));
        assert!(profile("local").is_none() && profile("services local").is_none());
    }

    #[test]
    fn variables_name_files_and_profile() {
        let home = Folder::temporary();
        std::fs::create_dir(home.join(".aws")).expect("a folder");
        let variables = |more: &[(&str, &str)]| {
            let own = [("HOME", home.text())];
            let all = own.iter().chain(more);
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            all.map(owned).collect::<HashMap<_, _>>()
        };
        let read = |more: &[(&str, &str)]| Profile::read(&variables(more));
        let none = |profile: Result<Profile, _>| profile.is_ok_and(|it| it == Profile::default());
        assert!(none(read(&[])) && none(Profile::read(&HashMap::new())));
        assert!(
            read(&[("AWS_PROFILE", "secret")]).is_err(),
            "no such profile"
        );

        std::fs::write(home.join(".aws/credentials"), CREDENTIALS).expect("space");
        std::fs::write(home.join(".aws/config"), CONFIG).expect("space");
        let of = |more: &[(&str, &str)]| read(more).ok().and_then(|it| it.keys).map(|keys| keys.0);
        let key = |name: &str| Some(name.to_owned());
        assert_eq!(of(&[]), key("default-key"));
        assert_eq!(of(&[("AWS_PROFILE", "")]), key("default-key"));
        assert_eq!(of(&[("AWS_PROFILE", "other")]), key("other-key"));
        assert_eq!(of(&[("AWS_DEFAULT_PROFILE", "other")]), key("other-key"));
        let elsewhere = home.join("elsewhere");
        let named = [(
            "AWS_SHARED_CREDENTIALS_FILE",
            elsewhere.to_str().expect("text"),
        )];
        assert_eq!(of(&named), None);
        std::fs::write(
            &elsewhere,
            "[default]\naws_access_key_id=a\naws_secret_access_key=b\n",
        )
        .expect("space");
        assert_eq!(of(&named), key("a"));
        assert_eq!(
            of(&[("AWS_SHARED_CREDENTIALS_FILE", "~/elsewhere")]),
            key("a")
        );

        // A file that no variable names does not end the start where it cannot be there.
        let nowhere = [("HOME", "/dev/null")];
        assert!(none(read(&nowhere)));
        assert!(read(&[("AWS_CONFIG_FILE", "/dev/null/config")]).is_err());

        for bytes in [b"[default]\nsecret = \xff\n".to_vec(), vec![b'\n'; 2 << 20]] {
            std::fs::write(&elsewhere, bytes).expect("space");
            let error = read(&named).err().expect("it is no such file").to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
