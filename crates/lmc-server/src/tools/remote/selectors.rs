//! The selectors of `lmc remote gc` and `rm`: a model, a tenant, a space.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use lmc_backend_remote::format::{ChunkFolder, Name, Scope, SpaceRecord};
use lmc_key::{Salt, SpaceId};
use lmc_transfer::read_secret;

use super::Target;
use super::listing::{Listing, descriptions};
use crate::salts::{self, DEFAULT_SALT};

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(super) struct Selectors {
    /// Only chunks of this model.
    #[arg(long)]
    model: Option<String>,
    /// Only chunks of the space with this id, of 32 digits.
    #[arg(long, value_name = "ID")]
    space: Option<String>,
    /// Only chunks of the tenant whose cache_salt is in this file, which other users must not be able to read; _default in the file means no salt.
    #[arg(long, value_name = "SALT_FILE")]
    tenant: Option<PathBuf>,
}

impl Selectors {
    /// Returns the spaces that the selectors pick, at least one; `None` without a selector.
    pub(super) async fn spaces(&self, target: &Target) -> Result<Option<HashSet<SpaceId>>> {
        let space = self.space.as_ref().map(|text| {
            let id: Option<SpaceId> = text.parse().ok();
            id.with_context(|| {
                format!("--space {text}: expected an id of 32 digits, as `lmc remote du` shows it")
            })
        });
        let space = space.transpose()?;
        let salt = self.tenant.as_deref().map(read_salt).transpose()?;
        let (model, salt) = (self.model.as_deref(), salt.as_ref());
        if model.is_none() && salt.is_none() {
            return Ok(space.map(|id| HashSet::from([id])));
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
                Name::Space(folder, id) if space.is_none_or(|space| space == id) => {
                    Some((folder, id))
                }
                _ => None,
            });
            let ids: Vec<(ChunkFolder, SpaceId)> = ids.collect();
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
                "no space has a description with that model and tenant: `lmc remote du {}` shows the spaces",
                target.url
            );
        }
        Ok(Some(picked))
    }
}

/// Reads a salt. The error does not repeat it.
fn read_salt(path: &Path) -> Result<Salt> {
    let shown = path.display();
    let text = read_secret(path).map_err(|error| anyhow!("--tenant: {error}"))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match text {
        "" => bail!(
            "--tenant {shown}: the file is empty; write {DEFAULT_SALT} into it for traffic without a salt"
        ),
        // The error is not passed on: its text contains a character of the salt.
        salt => salts::parse(salt).map_err(|_| {
            anyhow!(
                "--tenant {shown}: expected one salt of at most 128 characters, without @, / and \\"
            )
        }),
    }
}
