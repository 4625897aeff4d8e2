//! Tokens that a server finds in each of its tiers.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::tools::format::list;
use crate::tools::http::{Call, HttpUrl};

/// Name of memory among the tiers.
const MEMORY: &str = "dram";

/// Tokens that lookups asked for and found, as a server counts them for all its engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TierTokens {
    asked: u64,
    /// Tokens found, by the name of the tier.
    found: BTreeMap<String, u64>,
}

impl TierTokens {
    /// Asks a server for its counts since its start. Returns `None` if it does not answer, or is not lmc.
    pub(super) fn of(url: &HttpUrl) -> Option<Self> {
        Self::parse(&Call::get("/status").send(url).ok()?)
    }

    fn parse(status: &Value) -> Option<Self> {
        let status = &status["lmc"];
        let counts = &status["counts"];
        let lower = list(&status["lower"]).iter();
        let lower = lower.map(|tier| Some((tier["tier"].as_str()?, tier["hit_tokens"].as_u64()?)));
        let memory = Some((MEMORY, counts["hit_tokens_dram"].as_u64()?));
        let found = [memory].into_iter().chain(lower);
        let found = found.map(|tier| tier.map(|(name, tokens)| (name.to_owned(), tokens)));
        Some(Self {
            asked: counts["lookup_tokens"].as_u64()?,
            found: found.collect::<Option<_>>()?,
        })
    }

    /// Returns the shares of the tokens asked for since `before` that each tier had. Returns `None` if there
    /// were none, or the server was restarted.
    pub(super) fn shares_since(&self, before: &Self) -> Option<TierShares> {
        let asked = self
            .asked
            .checked_sub(before.asked)
            .filter(|&asked| asked > 0)?;
        let share = |(name, tokens): (&String, &u64)| {
            let tokens = tokens.checked_sub(before.found.get(name).copied().unwrap_or(0))?;
            Some((name.clone(), tokens as f64 / asked as f64))
        };
        self.found
            .iter()
            .map(share)
            .collect::<Option<_>>()
            .map(TierShares)
    }
}

/// Share of the tokens asked for that each tier had, by its name.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TierShares(BTreeMap<String, f64>);

impl TierShares {
    /// Returns the shares as text, memory first.
    pub(super) fn text(&self) -> String {
        let (memory, lower): (Vec<_>, Vec<_>) =
            self.0.iter().partition(|(name, _)| *name == MEMORY);
        let shown = memory.into_iter().chain(lower).map(|(name, share)| {
            let name = if name == MEMORY { "memory" } else { name };
            format!("{name} {:.1} %", 100.0 * share)
        });
        shown.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn json(&self) -> Value {
        json!(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(asked: u64, memory: u64, disk: u64) -> TierTokens {
        let status = json!({"lmc": {
            "counts": {"lookup_tokens": asked, "hit_tokens_dram": memory},
            "lower": [{"tier": "disk", "hit_tokens": disk}],
        }});
        TierTokens::parse(&status).expect("the status of lmc")
    }

    #[test]
    fn shares_are_those_of_the_tokens_asked_for_meanwhile() {
        let shares = tokens(300, 60, 20).shares_since(&tokens(100, 10, 0));
        let shares = shares.expect("tokens were asked for");
        assert_eq!(shares.text(), "memory 25.0 %, disk 10.0 %");
        assert_eq!(shares.json(), json!({"dram": 0.25, "disk": 0.1}));
    }

    #[test]
    fn nothing_is_said_of_another_server_or_after_a_restart() {
        assert_eq!(TierTokens::parse(&json!({"is_healthy": true})), None);
        assert_eq!(tokens(5, 1, 1).shares_since(&tokens(100, 10, 0)), None);
        assert_eq!(tokens(5, 1, 1).shares_since(&tokens(5, 1, 1)), None);
    }
}
