//! Progress bars.

use indicatif::ProgressStyle;

/// Returns the style of a bar from a constant template, which a test draws.
pub(crate) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a constant template that a test draws")
}
