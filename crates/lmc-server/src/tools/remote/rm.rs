//! `lmc remote rm`: removes the chunks of a model, a tenant or a space.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use lmc_backend_remote::format::{Name, Scope, SpaceRecord};
use lmc_key::{Salt, SpaceId};

use super::du::shown;
use super::listing::{Listing, descriptions};
use super::removing::{Action, Picked, Selection, remove_descriptions};
use super::{Target, Url};
use crate::config::parse_duration;
use crate::daemon::DEFAULT_SALT;

/// Most bytes of a file with a salt.
const MAX_SALT_FILE: u64 = 4096;

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Examples:
  lmc remote rm file:///mnt/shared/lmc --model meta-llama/Llama-3.1-8B
  lmc remote rm redis://cache:6379 --tenant salt.txt --dry-run
  lmc remote rm s3://bucket/lmc --all --older-than 30d --yes
Selectors narrow each other. A model and a tenant are found by the descriptions of spaces, which
daemons write; `lmc remote du` shows them, and the ids of spaces that have none. Daemons that use
the store go on: what is removed is a miss for them.";

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) url: Url,
    /// Only chunks of this model.
    #[arg(long)]
    model: Option<String>,
    /// Only chunks of the space with this id, of 32 digits.
    #[arg(long, value_name = "ID")]
    space: Option<String>,
    /// Only chunks of the tenant whose cache_salt is in this file; _default for none.
    #[arg(long, value_name = "SALT_FILE")]
    tenant: Option<PathBuf>,
    /// Only chunks that are older, such as 12h or 30d, by the store's clock.
    #[arg(long, value_name = "DURATION")]
    older_than: Option<String>,
    /// Chunks of all models, tenants and spaces.
    #[arg(long, conflicts_with_all = ["model", "space", "tenant"])]
    all: bool,
    /// Only show how many chunks would be removed.
    #[arg(long)]
    dry_run: bool,
    /// Remove without a question.
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
        false => Some(spaces(&target, arguments).await?),
    };
    let selection = Selection { spaces, older_than };
    if arguments.dry_run || !arguments.yes {
        let picked = selection.apply(&target, Action::Count).await?;
        say_ageless(picked);
        let found = shown(picked.usage);
        println!("{found} would be removed from {}", target.url);
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
    println!("removed {} from {}", shown(picked.usage), target.url);
    if selection.older_than.is_none() {
        let picks = async |_: &_, space| {
            let spaces = selection.spaces.as_ref();
            Ok(spaces.is_none_or(|spaces| spaces.contains(&space)))
        };
        remove_descriptions(&target, Action::Remove, picks).await?;
    }
    Ok(())
}

pub(super) fn older_than(text: &str) -> Result<Duration> {
    parse_duration(text).map_err(|error| anyhow!("--older-than {text}: {error}"))
}

fn say_ageless(picked: Picked) {
    if picked.ageless > 0 {
        println!(
            "{} chunks are left: the store does not say how old they are, so --older-than picks \
             none of them; a Redis expires them where daemons have --remote-ttl",
            picked.ageless
        );
    }
}

/// Asks at the terminal.
fn is_confirmed() -> Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("nothing was removed: --yes is required where no terminal can be asked");
    }
    print!("Remove them? [y/N] ");
    io::stdout().flush()?;
    let mut answer = String::new();
    io::stdin().lock().take(100).read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Returns the spaces that the selectors pick; at least one.
async fn spaces(target: &Target, arguments: &Arguments) -> Result<HashSet<SpaceId>> {
    let space = arguments.space.as_ref().map(|text| {
        let id: Option<SpaceId> = text.parse().ok();
        id.with_context(|| {
            format!(
                "--space {text}: expected the 32 digits of an id, as `lmc remote du` shows them"
            )
        })
    });
    let space = space.transpose()?;
    let salt = arguments.tenant.as_deref().map(read_salt).transpose()?;
    let (model, salt) = (arguments.model.as_deref(), salt.as_ref());
    if model.is_none() && salt.is_none() {
        let id = space.context("expected --model, --space or --tenant; to remove the chunks of all models and tenants, give --all")?;
        return Ok(HashSet::from([id]));
    }
    let is_picked = |record: &SpaceRecord| {
        model.is_none_or(|model| record.fields().model.as_str() == model)
            && salt.is_none_or(|salt| record.is_of(salt))
    };
    let store = target.opened.store();
    let mut picked = HashSet::new();
    let mut listing = Listing::of_scope(&target.opened, Scope::Spaces);
    while let Some(page) = listing.next().await? {
        let ids = page.iter().filter_map(|object| match object.name {
            Name::Space(id) => Some(id).filter(|id| space.is_none_or(|space| space == *id)),
            _ => None,
        });
        let ids: Vec<SpaceId> = ids.collect();
        let records = descriptions(&store, &ids).await?;
        picked.extend(
            records
                .into_iter()
                .filter(|(_, r)| is_picked(r))
                .map(|(id, _)| id),
        );
    }
    if picked.is_empty() {
        bail!(
            "no space is described with that model and tenant: `lmc remote du {}` shows what is there",
            target.url
        );
    }
    Ok(picked)
}

/// Reads a salt. The error does not repeat it.
fn read_salt(path: &Path) -> Result<Salt> {
    let shown = path.display();
    let mut text = String::new();
    let file = File::open(path).with_context(|| format!("--tenant {shown}"))?;
    let read = file.take(MAX_SALT_FILE).read_to_string(&mut text);
    read.with_context(|| format!("--tenant {shown}"))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match text {
        "" => bail!(
            "--tenant {shown}: the file is empty; write {DEFAULT_SALT} into it for traffic without a salt"
        ),
        DEFAULT_SALT => Ok(Salt::default()),
        // The text of the error has a character of the salt.
        salt => Salt::parse(salt).map_err(|_| {
            anyhow!(
                "--tenant {shown}: expected one salt of at most 128 characters, without @, / and \\"
            )
        }),
    }
}
