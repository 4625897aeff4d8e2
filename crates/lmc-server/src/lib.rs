//! The `lmc` daemon and its command-line tools, as a library so that tests can run them.

pub mod config;
