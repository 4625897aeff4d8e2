//! Errors of S3's URLs and settings.

use thiserror::Error;

/// Reason why a text is not the URL of a bucket, or why settings of the AWS tools are unusable. Does not
/// repeat a text, which may contain a secret by mistake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum S3UrlError {
    /// The text is not the URL of a bucket.
    #[error("expected s3://bucket/prefix: {0}")]
    Url(&'static str),
    /// A setting of the AWS tools has an invalid value.
    #[error("{0}")]
    Setting(&'static str),
    /// A file of the AWS tools exists but cannot be read.
    #[error("{} cannot be read: {reason}; check its permissions, or name another file in AWS_SHARED_CREDENTIALS_FILE or AWS_CONFIG_FILE", path.display())]
    File {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Text for an operator.
        reason: String,
    },
}
