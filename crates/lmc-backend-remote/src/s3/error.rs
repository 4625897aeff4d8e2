//! Why S3 cannot be used with these settings.

use thiserror::Error;

/// The reason why a text is not the URL of a bucket, or why the settings of the AWS tools are not
/// usable. Does not repeat a text, which may hold a secret by mistake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum S3UrlError {
    /// The text is not the URL of a bucket.
    #[error("expected s3://bucket/prefix: {0}")]
    Url(&'static str),
    /// A setting of the AWS tools has a value that cannot be.
    #[error("{0}")]
    Setting(&'static str),
    /// A file of the AWS tools is there and cannot be read.
    #[error("{} cannot be read: {reason}; see to its permissions, or name another file by AWS_SHARED_CREDENTIALS_FILE or AWS_CONFIG_FILE", path.display())]
    File {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Text for a person.
        reason: String,
    },
}
