//! URLs of S3, and the endpoint and credentials from the environment and files of the AWS tools.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use hyper::Uri;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;

use super::error::S3UrlError;
use super::profile::Profile;

/// Longest prefix: keys of S3 have at most 1,024 bytes, and a name needs up to 165 of them.
const MAX_PREFIX: usize = 768;

/// A bucket and the prefix of all keys there: `s3://bucket[/prefix]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Url {
    pub(super) bucket: String,
    /// Prefix of all keys: empty, or ending with a slash, such as `lmc/`.
    pub(super) prefix: String,
}

impl fmt::Display for S3Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix)
    }
}

impl FromStr for S3Url {
    type Err = S3UrlError;

    fn from_str(text: &str) -> Result<Self, S3UrlError> {
        let rest = text.strip_prefix("s3://");
        let rest = rest.ok_or(S3UrlError::Url("another scheme"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains('@') {
            let reason = "credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, not from the URL";
            return Err(S3UrlError::Url(reason));
        }
        let is_of_bucket = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if !(1..=255).contains(&bucket.len()) || !bucket.chars().all(is_of_bucket) {
            return Err(S3UrlError::Url(
                "the bucket's name has letters, digits, dots and dashes",
            ));
        }
        let prefix = prefix.trim_end_matches('/');
        let is_of_prefix = |c: char| is_of_bucket(c) || matches!(c, '/' | '=' | '+' | ',');
        let is_plain = prefix.chars().all(is_of_prefix) && Path::parse(prefix).is_ok();
        if prefix.len() > MAX_PREFIX || prefix.starts_with('/') || !is_plain {
            return Err(S3UrlError::Url(
                "the prefix has letters, digits and -._=+, in parts that are not empty, . or ..",
            ));
        }
        let end = if prefix.is_empty() { "" } else { "/" };
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix: format!("{prefix}{end}"),
        })
    }
}

/// Endpoint, region and credentials, found as the AWS tools find them in environment and files.
#[derive(Clone, Default)]
pub(super) struct Access {
    options: Vec<(AmazonS3ConfigKey, String)>,
    endpoint: Option<Uri>,
}

/// Omits the values.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

impl Access {
    /// Reads variables whose names begin with `AWS_`, and for the remaining settings the files of the AWS
    /// tools. Ignores other variables except `HOME`, and empty ones.
    pub(super) fn of(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, S3UrlError> {
        let of_aws = |name: &str| name.starts_with("AWS_") || name == "HOME";
        let variables = variables.into_iter();
        let variables = variables.filter(|(name, value)| of_aws(name) && !value.is_empty());
        let variables: HashMap<String, String> = variables.collect();
        let mut this = Self::default();
        for (name, value) in &variables {
            match name.to_ascii_lowercase().parse() {
                // The bucket comes from the URL, and the endpoint is determined below.
                Ok(
                    AmazonS3ConfigKey::Bucket
                    | AmazonS3ConfigKey::Endpoint
                    | AmazonS3ConfigKey::S3Endpoint,
                )
                | Err(_) => {}
                Ok(key) => this.options.push((key, value.clone())),
            }
        }
        let profile = Profile::read(&variables)?;
        let variable = |name: &str| variables.get(name).cloned();
        // The endpoint for S3 alone has precedence.
        let endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
        let endpoint = endpoint.into_iter().find_map(variable);
        let endpoint = endpoint.or_else(|| profile.endpoint.clone());
        let ignored = variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS");
        let endpoint = endpoint
            .filter(|_| !ignored.is_some_and(|ignored| ignored.eq_ignore_ascii_case("true")));
        this.endpoint = endpoint.map(|text| self::endpoint(&text)).transpose()?;
        let has_web_identity = variables.contains_key("AWS_WEB_IDENTITY_TOKEN_FILE");
        this.complete(profile, has_web_identity);
        Ok(this)
    }

    /// Takes from a profile the region and the keys that the variables lack.
    fn complete(&mut self, profile: Profile, has_web_identity: bool) {
        use AmazonS3ConfigKey as Key;
        let has = |key| self.options.iter().any(|(found, _)| *found == key);
        let has_region = has(Key::Region) || has(Key::DefaultRegion);
        let has_keys = has(Key::AccessKeyId) || has(Key::SecretAccessKey) || has_web_identity;
        if let Some(region) = profile.region.filter(|_| !has_region) {
            self.options.push((Key::Region, region));
        }
        match (profile.keys, profile.elsewhere) {
            _ if has_keys => {}
            (Some((id, secret, token)), _) => {
                // A session token that belongs to other keys.
                self.options.retain(|(key, _)| *key != Key::Token);
                self.options.push((Key::AccessKeyId, id));
                self.options.push((Key::SecretAccessKey, secret));
                self.options.extend(token.map(|token| (Key::Token, token)));
            }
            (None, Some(setting)) => tracing::warn!(
                setting,
                "the AWS profile takes its credentials from another source, which lmc does not support; the metadata services of container and instance are asked instead: give the profile keys, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ),
            (None, None) => {}
        }
    }

    pub(super) fn is_plain_http(&self) -> bool {
        let endpoint = self.endpoint.as_ref();
        endpoint.is_some_and(|endpoint| endpoint.scheme_str() == Some("http"))
    }

    /// Returns a builder with these settings. Without a configured endpoint, a bucket has its own host at
    /// AWS, unless its name has dots, which no certificate covers.
    pub(super) fn builder(&self, bucket: &str) -> AmazonS3Builder {
        let has_own_host = self.endpoint.is_none() && !bucket.contains('.');
        let mut builder = AmazonS3Builder::new()
            .with_virtual_hosted_style_request(has_own_host)
            .with_allow_http(self.is_plain_http())
            .with_bucket_name(bucket);
        for (key, value) in &self.options {
            builder = builder.with_config(*key, value);
        }
        match &self.endpoint {
            Some(endpoint) => builder.with_endpoint(endpoint.to_string()),
            None => builder,
        }
    }
}

fn endpoint(text: &str) -> Result<Uri, S3UrlError> {
    let wrong = S3UrlError::Setting(
        "the endpoint in AWS_ENDPOINT_URL, or endpoint_url of the profile, is not http://host[:port] or https://host[:port]",
    );
    let uri: Uri = text.parse().map_err(|_| wrong.clone())?;
    let scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    let host = uri.authority().filter(|host| !host.as_str().contains('@'));
    match scheme && host.is_some() && uri.query().is_none() {
        true => Ok(uri),
        false => Err(wrong),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_bucket_and_a_prefix() {
        for (text, shown) in [
            ("s3://bucket", "s3://bucket/"),
            ("s3://my.bucket-1/", "s3://my.bucket-1/"),
            ("s3://bucket/a/b=c", "s3://bucket/a/b=c/"),
            ("s3://bucket/a/", "s3://bucket/a/"),
        ] {
            let url: S3Url = text.parse().expect(text);
            assert_eq!(url.to_string(), shown);
            assert_eq!(shown.parse(), Ok(url));
        }
    }

    #[test]
    fn errors_do_not_repeat_the_text() {
        for text in [
            "",
            "s3:/secret",
            "http://secret/a",
            "s3:///secret",
            "s3://key:secret@bucket/a",
            "s3://secret?x=y",
            "s3://bucket//secret",
            "s3://bucket/secret//b",
            "s3://bucket/../secret",
            "s3://bucket/secret?x",
            "s3://bucket/secret\n",
            &format!("s3://bucket/{}", "secret/".repeat(200)),
        ] {
            let error = text.parse::<S3Url>().expect_err(text).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        for text in [
            "secret",
            "ftp://secret",
            "http://key:secret@host",
            "https://host/?secret",
        ] {
            let variables = [("AWS_ENDPOINT_URL".to_owned(), text.to_owned())];
            let error = Access::of(variables).expect_err(text).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_environment_says_what_the_aws_tools_take_from_it() {
        let access = |variables: &[(&str, &str)]| {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            Access::of(variables.iter().map(owned)).expect("settings")
        };
        let value = |access: &Access, key| access.builder("bucket").get_config_value(&key);
        let both = access(&[
            ("AWS_ENDPOINT_URL_S3", "http://first:9000"),
            ("AWS_ENDPOINT_URL", "https://second"),
            ("AWS_SESSION_TOKEN", ""),
            ("AWS_REGION", "eu-west-1"),
            ("AWS_DEFAULT_REGION", "eu-west-2"),
            ("AWS_BUCKET", "another"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("HOME", "/root"),
        ]);
        use AmazonS3ConfigKey as Key;
        let found = [
            (Key::Endpoint, Some("http://first:9000/")),
            (Key::Region, Some("eu-west-1")),
            (Key::Token, None),
            (Key::Bucket, Some("bucket")),
            (Key::SecretAccessKey, Some("secret")),
            (Key::VirtualHostedStyleRequest, Some("false")),
        ];
        for (key, expected) in found {
            assert_eq!(value(&both, key).as_deref(), expected, "{key:?}");
        }
        assert!(both.is_plain_http() && !format!("{both:?}").contains("secret"));
        let none = access(&[("AWS_DEFAULT_REGION", "eu-west-2")]);
        assert_eq!(value(&none, Key::Region).as_deref(), Some("eu-west-2"));
        let own_host = value(&none, Key::VirtualHostedStyleRequest);
        assert_eq!(own_host.as_deref(), Some("true"));
        assert!(!none.is_plain_http());
    }

    #[test]
    fn variables_come_before_the_profile() {
        let home = lmc_testkit::Folder::temporary();
        std::fs::create_dir(home.join(".aws")).expect("a folder");
        let text = "[default]\naws_access_key_id = of-file\naws_secret_access_key = secret-of-file\n\
                    region = eu-west-1\nendpoint_url = http://of.file:9000\n";
        std::fs::write(home.join(".aws/config"), text).expect("space");
        let access = |variables: &[(&str, &str)]| {
            let own = [("HOME", home.text())];
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            Access::of(own.iter().chain(variables).map(owned)).expect("settings")
        };
        use AmazonS3ConfigKey as Key;
        let values = |access: &Access| {
            [
                Key::AccessKeyId,
                Key::SecretAccessKey,
                Key::Token,
                Key::Region,
                Key::Endpoint,
            ]
            .map(|key| {
                access
                    .builder("bucket")
                    .get_config_value(&key)
                    .unwrap_or_default()
            })
        };
        let of_file = access(&[("AWS_SESSION_TOKEN", "of-others")]);
        let endpoint = "http://of.file:9000/";
        let expected = ["of-file", "secret-of-file", "", "eu-west-1", endpoint];
        assert_eq!(values(&of_file), expected);
        assert!(of_file.is_plain_http() && !format!("{of_file:?}").contains("of-file"));
        let variables = [
            ("AWS_ACCESS_KEY_ID", "own"),
            ("AWS_SECRET_ACCESS_KEY", "own-secret"),
            ("AWS_SESSION_TOKEN", "own-token"),
            ("AWS_DEFAULT_REGION", "eu-west-2"),
            ("AWS_ENDPOINT_URL", "https://own"),
        ];
        let expected = [
            "own",
            "own-secret",
            "own-token",
            "eu-west-2",
            "https://own/",
        ];
        assert_eq!(values(&access(&variables)), expected);
        let others = access(&[
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere"),
            ("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "TRUE"),
        ]);
        assert_eq!(values(&others), ["", "", "", "eu-west-1", ""]);
    }
}
