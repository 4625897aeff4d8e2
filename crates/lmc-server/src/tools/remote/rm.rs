//! `lmc remote rm`: removes the chunks of a model, a tenant or a space.

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use super::du::shown;
use super::removing::{Action, Picked, Selection, remove_descriptions};
use super::selectors::Selectors;
use super::{Target, Url};
use crate::config::parse_duration;
use crate::stdout::{out, outln};

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Examples:
  lmc remote rm file:///mnt/shared/lmc --model meta-llama/Llama-3.1-8B
  lmc remote rm redis://cache:6379 --tenant salt.txt --dry-run
  lmc remote rm s3://bucket/lmc --all --older-than 30d --yes
Several selectors narrow the selection. Models and tenants are found by the descriptions of spaces, which
daemons write. `lmc remote du` shows the descriptions, and the ids of spaces without one. Daemons that
use the store continue: the removed chunks are misses for them.";

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) url: Url,
    #[command(flatten)]
    selectors: Selectors,
    /// Only chunks older than this, such as 12h or 30d, by the store's clock.
    #[arg(long, value_name = "DURATION")]
    older_than: Option<String>,
    /// Chunks of all models, tenants and spaces.
    #[arg(long, conflicts_with_all = ["model", "space", "tenant"])]
    all: bool,
    /// Only show how many chunks would be removed.
    #[arg(long)]
    dry_run: bool,
    /// Remove without asking.
    #[arg(long)]
    yes: bool,
}

pub(super) async fn run(target: Target, arguments: &Arguments) -> Result<()> {
    let older_than = arguments
        .older_than
        .as_deref()
        .map(older_than)
        .transpose()?;
    let spaces = match arguments.all {
        true => None,
        false => {
            let picked = arguments.selectors.spaces(&target).await?;
            Some(picked.context(
                "expected --model, --space or --tenant; to remove the chunks of all models and tenants, use --all",
            )?)
        }
    };
    let selection = Selection { spaces, older_than };
    if arguments.dry_run || !arguments.yes {
        let picked = selection.apply(&target, Action::Count).await?;
        say_ageless(picked);
        let found = shown(picked.usage);
        outln!("{found} would be removed from {}", target.url);
        if arguments.dry_run {
            return Ok(());
        }
        if !is_confirmed()? {
            bail!("nothing was removed");
        }
    }
    let picked = selection.apply(&target, Action::Remove).await?;
    if arguments.yes {
        say_ageless(picked);
    }
    outln!("removed {} from {}", shown(picked.usage), target.url);
    if selection.older_than.is_none() {
        let picks = async |_: &_, _, space| Ok(selection.has(space));
        remove_descriptions(&target, Action::Remove, picks).await?;
    }
    Ok(())
}

pub(super) fn older_than(text: &str) -> Result<Duration> {
    parse_duration(text).map_err(|error| anyhow!("--older-than {text}: {error}"))
}

fn say_ageless(picked: Picked) {
    if picked.ageless > 0 {
        outln!(
            "{} chunks stay: the store does not give their age, so --older-than picks none of them; \
             Redis expires them if daemons have --remote-ttl",
            picked.ageless
        );
    }
}

/// Asks at the terminal.
fn is_confirmed() -> Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("nothing was removed: without a terminal, --yes is required");
    }
    out!("Remove them? [y/N] ");
    io::stdout().flush()?;
    let mut answer = String::new();
    io::stdin().lock().take(100).read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
