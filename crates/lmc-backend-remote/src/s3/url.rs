//! URLs of S3, and what the environment says of an endpoint and of credentials.

use std::fmt;
use std::str::FromStr;

use hyper::Uri;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use thiserror::Error;

/// Longest prefix: keys of S3 have at most 1,024 bytes, and a name needs 128 of them.
const MAX_PREFIX: usize = 768;

/// A bucket and the prefix of all keys there: `s3://bucket[/prefix]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Url {
    pub(super) bucket: String,
    /// Empty, or the end of a folder: `lmc/`.
    pub(super) prefix: String,
}

/// The reason why a text is not the URL of a bucket. Does not repeat the text, which may hold a
/// secret by mistake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected s3://bucket/prefix: {0}")]
pub struct S3UrlError(&'static str);

impl fmt::Display for S3Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix)
    }
}

impl FromStr for S3Url {
    type Err = S3UrlError;

    fn from_str(text: &str) -> Result<Self, S3UrlError> {
        let rest = text.strip_prefix("s3://");
        let rest = rest.ok_or(S3UrlError("another scheme"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains('@') {
            let reason = "credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, not from the URL";
            return Err(S3UrlError(reason));
        }
        let is_of_bucket = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if !(1..=255).contains(&bucket.len()) || !bucket.chars().all(is_of_bucket) {
            return Err(S3UrlError(
                "the bucket's name has letters, digits, dots and dashes",
            ));
        }
        let prefix = prefix.trim_end_matches('/');
        let is_of_prefix = |c: char| is_of_bucket(c) || matches!(c, '/' | '=' | '+' | ',');
        let is_plain = prefix.chars().all(is_of_prefix) && Path::parse(prefix).is_ok();
        if prefix.len() > MAX_PREFIX || prefix.starts_with('/') || !is_plain {
            return Err(S3UrlError(
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

/// Endpoint, region and credentials, as the AWS tools take them from the environment.
#[derive(Clone, Default)]
pub(super) struct Access {
    options: Vec<(AmazonS3ConfigKey, String)>,
    endpoint: Option<Uri>,
}

/// Leaves the values out.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

impl Access {
    /// Reads variables whose names begin with `AWS_`; others are ignored, and so are empty ones.
    pub(super) fn of(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, S3UrlError> {
        let mut this = Self::default();
        let mut endpoint = None;
        for (name, value) in variables {
            if !name.starts_with("AWS_") || value.is_empty() {
                continue;
            }
            match name.to_ascii_lowercase().parse() {
                // The endpoint for S3 alone comes first.
                Ok(AmazonS3ConfigKey::S3Endpoint) => endpoint = Some(value),
                Ok(AmazonS3ConfigKey::Endpoint) => endpoint = endpoint.or(Some(value)),
                // The bucket is the URL's.
                Ok(AmazonS3ConfigKey::Bucket) | Err(_) => {}
                Ok(key) => this.options.push((key, value)),
            }
        }
        this.endpoint = endpoint.map(|text| self::endpoint(&text)).transpose()?;
        Ok(this)
    }

    pub(super) fn is_plain_http(&self) -> bool {
        let endpoint = self.endpoint.as_ref();
        endpoint.is_some_and(|endpoint| endpoint.scheme_str() == Some("http"))
    }

    /// Returns a builder with the settings. Without an endpoint of its own, a bucket has its own
    /// host at AWS, unless its name has dots, which no certificate covers.
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
    let wrong = S3UrlError(
        "the endpoint in AWS_ENDPOINT_URL is not http://host[:port] or https://host[:port]",
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
}
