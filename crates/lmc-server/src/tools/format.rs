//! Values of a server's answer as text for people.

use lmc_key::Printable;
use serde_json::Value;

use crate::config::human_bytes;

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

pub(super) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

pub(super) fn bytes(value: &Value) -> String {
    human_bytes(value.as_u64().unwrap_or(0))
}

pub(super) fn text(value: &Value) -> String {
    // A text may come from an engine, such as a model's name, and hold any character.
    value
        .as_str()
        .map_or_else(|| value.to_string(), |text| Printable(text).to_string())
}

pub(super) fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 {
        format!("{:.1} %", 100.0 * part / whole)
    } else {
        "-".to_owned()
    }
}

pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Formats a time that a server gives in seconds; `-` if it gives none.
pub(super) fn took(seconds: &Value) -> String {
    seconds.as_f64().map_or_else(|| "-".to_owned(), duration)
}
