//! Figures of all rounds of a benchmark.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::figures::median;

/// Figures by row, by who was measured, and by what was measured of it; one value for each round.
/// Rows keep the order of their first value.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    cells: Vec<(String, String)>,
    values: BTreeMap<(String, String, &'static str), Vec<f64>>,
}

impl Rounds {
    /// Adds a round of one cell.
    pub(crate) fn add(&mut self, row: &str, who: &str, figures: &[(&'static str, f64)]) {
        let cell = (row.to_owned(), who.to_owned());
        for &(what, value) in figures {
            let key = (cell.0.clone(), cell.1.clone(), what);
            self.values.entry(key).or_default().push(value);
        }
        if !self.cells.contains(&cell) {
            self.cells.push(cell);
        }
    }

    /// Names of the rows.
    pub(crate) fn rows(&self) -> Vec<&str> {
        let mut rows: Vec<&str> = Vec::new();
        for (row, _) in &self.cells {
            if !rows.contains(&&**row) {
                rows.push(row);
            }
        }
        rows
    }

    /// Names of those that were measured in a row.
    pub(crate) fn measured(&self, row: &str) -> impl Iterator<Item = &str> {
        let cells = self.cells.iter().filter(move |(of, _)| of == row);
        cells.map(|(_, who)| &**who)
    }

    fn values(&self, row: &str, who: &str, what: &'static str) -> Option<&[f64]> {
        let key = (row.to_owned(), who.to_owned(), what);
        self.values.get(&key).map(|values| &**values)
    }

    /// Returns the median of a cell's rounds.
    pub(crate) fn median(&self, row: &str, who: &str, what: &'static str) -> Option<f64> {
        self.values(row, who, what).map(median)
    }

    /// Returns the median of what lies between two cells in each round.
    pub(crate) fn between(
        &self,
        row: &str,
        cells: [&str; 2],
        what: &'static str,
        of: impl Fn(f64, f64) -> f64,
    ) -> Option<f64> {
        Some(median(&self.each_between(row, cells, what, of)?))
    }

    /// Returns what lies between two cells in each round.
    pub(crate) fn each_between(
        &self,
        row: &str,
        [who, other]: [&str; 2],
        what: &'static str,
        of: impl Fn(f64, f64) -> f64,
    ) -> Option<Vec<f64>> {
        let pairs = self.values(row, who, what)?.iter();
        let pairs = pairs.zip(self.values(row, other, what)?);
        Some(pairs.map(|(&a, &b)| of(a, b)).collect())
    }

    pub(crate) fn json(&self) -> Value {
        let cell = |(row, who): &(String, String)| {
            let mut value = json!({"what": row, "who": who});
            for ((_, _, what), rounds) in self
                .values
                .iter()
                .filter(|((of, by, _), _)| (of, by) == (row, who))
            {
                value[what] = json!(rounds);
            }
            value
        };
        self.cells.iter().map(cell).collect()
    }
}

/// Shows a figure, or a dash where there is none.
pub(crate) fn shown(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), show)
}
