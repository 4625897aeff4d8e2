//! The valid name nearest to a mistyped one.

/// Returns the candidate that a mistyped name most likely means, if one is near enough.
pub fn nearest<'a>(found: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let found = normal(found);
    candidates
        .into_iter()
        .map(|candidate| (distance(&found, &normal(candidate)), candidate))
        // A third of the letters may be wrong; beyond that a suggestion only confuses.
        .filter(|(distance, candidate)| *distance * 3 <= candidate.len().max(found.len()))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn normal(name: &str) -> String {
    name.to_ascii_lowercase().replace('-', "_")
}

/// Returns Levenshtein's distance; a swap of two neighbouring letters counts once.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[i - 1][j] + 1)
                .min(rows[i][j - 1] + 1)
                .min(rows[i - 1][j - 1] + change);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant() {
        let names = [
            "port",
            "http_port",
            "host",
            "http_host",
            "l1_size_gb",
            "chunk_size",
        ];
        let check =
            |found: &str, want: Option<&str>| assert_eq!(nearest(found, names), want, "{found}");
        check("prot", Some("port"));
        check("http-port", Some("http_port"));
        check("HTTPPORT", Some("http_port"));
        check("chunksize", Some("chunk_size"));
        check("l1_size", Some("l1_size_gb"));
        check("color", None);
        check("", None);
    }
}
