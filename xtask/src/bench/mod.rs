//! `cargo xtask bench`.

use anyhow::{Result, bail};

pub(crate) fn run(args: &[String]) -> Result<bool> {
    bail!("unknown benchmark {args:?}")
}
