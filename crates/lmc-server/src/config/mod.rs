//! Configuration of `lmc serve`: one table of settings, four layers, one typed result.

#[cfg(test)]
mod docs;
mod foreign;
mod layers;
mod log_level;
mod parse;
mod problem;
mod secret;
mod serve;
mod service_links;
mod setting;
mod settings;
mod size;
mod suggest;
mod tiers;

pub use foreign::{Foreign, Verdict, foreign_flags};
pub use layers::{Entry, SettingOrigin};
pub(crate) use log_level::check_level;
pub use log_level::filter_of;
pub(crate) use parse::quotas as parse_quotas;
pub use parse::{
    HostPort, LogFormat, NoticeTarget, PeerTransport, PoolSize, RemoteUrl, SegmentName, StateDir,
    TransferMode, policy_name,
};
pub use problem::{ConfigError, Problem};
pub(crate) use secret::{mask_arguments, mask_password_of};
pub(crate) use serve::{LEAST_DRIVE, is_loopback};
pub use serve::{Loaded, print_config};
pub use setting::{Group, Info, Raw, Secret, Shape};
pub use settings::{
    ALL as ALL_SETTINGS, DiskSettings, PeersSettings, RemoteSettings, ServeConfig, TierSettings,
};
pub use size::{GIB, human_bytes, human_duration};
pub(crate) use size::{parse_bytes, parse_duration};
pub use suggest::nearest;

#[cfg(test)]
mod tests;
