//! A strict reader of Prometheus' text format, which refuses what scrapers only tolerate.

use std::collections::{BTreeMap, BTreeSet};

/// One line with a value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

/// The samples of one name, with its kind and its help.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) kind: String,
    pub(crate) samples: Vec<Sample>,
}

/// Families of a page, by their names.
pub(crate) type Page = BTreeMap<String, Family>;

/// Names of units that are not the base unit of what they measure.
const DERIVED: [&str; 12] = [
    "ms", "us", "ns", "millis", "micros", "nanos", "minutes", "hours", "kb", "mb", "gb", "percent",
];

/// Reads a page.
///
/// # Errors
/// The first line that is not as it has to be, with the reason.
pub(crate) fn parse(text: &str) -> Result<Page, String> {
    let mut page = Page::new();
    let mut seen = BTreeSet::new();
    let mut open: Option<(String, Family)> = None;
    let mut help: Option<String> = None;
    for line in text.lines() {
        let fault = |why: &str| format!("{why}: {line}");
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let Some((name, text)) = rest.split_once(' ') else {
                return Err(fault("a help without a text"));
            };
            if !text.ends_with('.') || text.contains('\\') {
                return Err(fault("a help is a sentence"));
            }
            close(&mut page, open.take())?;
            help = Some(name.to_owned());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, kind)) = rest.split_once(' ') else {
                return Err(fault("a type without a kind"));
            };
            if help.take().as_deref() != Some(name) {
                return Err(fault("a type that does not follow its help"));
            }
            check_name(name, kind).map_err(|why| fault(&why))?;
            if !seen.insert(name.to_owned()) {
                return Err(fault("a name is opened twice"));
            }
            let family = Family {
                kind: kind.to_owned(),
                samples: Vec::new(),
            };
            open = Some((name.to_owned(), family));
        } else {
            let sample = sample(line).map_err(|why| fault(&why))?;
            let Some((name, family)) = &mut open else {
                return Err(fault("a sample without a type"));
            };
            let is_of_it = match family.kind.as_str() {
                "histogram" => ["_bucket", "_sum", "_count"]
                    .iter()
                    .any(|end| sample.name.strip_suffix(end) == Some(name)),
                _ => sample.name == *name,
            };
            if !is_of_it {
                return Err(fault("a sample of another name"));
            }
            let same =
                |other: &Sample| (&other.name, &other.labels) == (&sample.name, &sample.labels);
            if family.samples.iter().any(same) {
                return Err(fault("a series is there twice"));
            }
            family.samples.push(sample);
        }
    }
    close(&mut page, open)?;
    match text.ends_with('\n') {
        true => Ok(page),
        false => Err("the last line has no end".to_owned()),
    }
}

fn check_name(name: &str, kind: &str) -> Result<(), String> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !name.chars().all(is_name) {
        return Err("a name of other characters than a-z, 0-9 and _".to_owned());
    }
    if !["counter", "gauge", "histogram"].contains(&kind) {
        return Err("an unknown kind".to_owned());
    }
    if name.ends_with("_total") != (kind == "counter") {
        return Err("counters, and nothing else, end in _total".to_owned());
    }
    match name.split('_').find(|part| DERIVED.contains(part)) {
        Some(unit) => Err(format!("{unit} is no base unit")),
        None => Ok(()),
    }
}

fn sample(line: &str) -> Result<Sample, String> {
    let (series, value) = line.rsplit_once(' ').ok_or("no value")?;
    let (name, mut rest) = match series.split_once('{') {
        Some((name, labels)) => (
            name,
            labels.strip_suffix('}').ok_or("no end of the labels")?,
        ),
        None => (series, ""),
    };
    let mut labels = BTreeMap::new();
    while !rest.is_empty() {
        let (label, quoted) = rest.split_once("=\"").ok_or("a label without a value")?;
        let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if label.is_empty() || !label.chars().all(is_label) {
            return Err(format!("{label} is no name of a label"));
        }
        let mut text = String::new();
        let mut chars = quoted.char_indices();
        let end = loop {
            match chars.next() {
                Some((_, '\\')) => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, c @ ('\\' | '"'))) => text.push(c),
                    _ => return Err("an unknown escape".to_owned()),
                },
                Some((at, '"')) => break at,
                Some((_, c)) => text.push(c),
                None => return Err("a value without an end".to_owned()),
            }
        };
        if labels.insert(label.to_owned(), text).is_some() {
            return Err(format!("{label} is there twice"));
        }
        rest = &quoted[end + 1..];
        rest = match rest.strip_prefix(',') {
            Some(more) if !more.is_empty() => more,
            None if rest.is_empty() => rest,
            _ => return Err("labels without a comma between them".to_owned()),
        };
    }
    let value = match value {
        "NaN" | "+Inf" | "-Inf" => return Err("no number".to_owned()),
        value => value.parse().map_err(|_| "no number")?,
    };
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Ends a family: checks what only all of its samples show.
fn close(page: &mut Page, open: Option<(String, Family)>) -> Result<(), String> {
    let Some((name, family)) = open else {
        return Ok(());
    };
    if family.kind == "counter" && family.samples.iter().any(|sample| sample.value < 0.0) {
        return Err(format!("{name} is below 0"));
    }
    if family.kind == "histogram" {
        check_buckets(&name, &family.samples)?;
    }
    page.insert(name, family);
    Ok(())
}

fn check_buckets(name: &str, samples: &[Sample]) -> Result<(), String> {
    let mut series: BTreeMap<_, Vec<(f64, f64)>> = BTreeMap::new();
    for sample in samples
        .iter()
        .filter(|sample| sample.name.ends_with("_bucket"))
    {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le").ok_or(format!("{name} lacks le"))?;
        let bound = match bound.as_str() {
            "+Inf" => f64::INFINITY,
            bound => bound.parse().map_err(|_| format!("{name}: le {bound}"))?,
        };
        series
            .entry(labels)
            .or_default()
            .push((bound, sample.value));
    }
    for (labels, buckets) in &series {
        let of = |end: &str| {
            let name = format!("{name}{end}");
            let same = |sample: &&Sample| sample.name == name && sample.labels == *labels;
            samples.iter().find(same).map(|sample| sample.value)
        };
        let rises = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        let last = buckets.last().copied().unwrap_or_default();
        if !buckets.windows(2).all(rises)
            || last.0 != f64::INFINITY
            || Some(last.1) != of("_count")
            || of("_sum").is_none()
        {
            return Err(format!("{name}{labels:?} is no histogram: {buckets:?}"));
        }
    }
    Ok(())
}

#[test]
fn a_page_that_scrapers_only_tolerate_is_refused() {
    let fine = "# HELP a_total One.\n# TYPE a_total counter\na_total{b=\"c\\\"d\",e=\"f\"} 1\n";
    let page = parse(fine).expect("a page");
    assert_eq!(page["a_total"].samples[0].labels["b"], "c\"d");
    let head = |name: &str, kind: &str| format!("# HELP {name} One.\n# TYPE {name} {kind}\n");
    for wrong in [
        "a 1\n".to_owned(),
        "# TYPE a gauge\na 1\n".to_owned(),
        head("a", "counter"),
        head("a_total", "gauge"),
        head("a_ms", "gauge"),
        head("a", "gauge").repeat(2),
        head("a", "gauge") + "b 1\n",
        head("a", "gauge") + "a 1\na 2\n",
        head("a", "gauge") + "a NaN\n",
        head("a", "gauge") + "a{b=\"c\"d=\"e\"} 1\n",
        head("a", "gauge") + "a{b=\"c} 1\n",
        head("a", "gauge") + "a 1",
        head("a", "histogram")
            + "a_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 1\n",
        head("a", "histogram") + "a_bucket{le=\"1\"} 1\na_sum 1\na_count 1\n",
    ] {
        assert!(parse(&wrong).is_err(), "{wrong}");
    }
}
