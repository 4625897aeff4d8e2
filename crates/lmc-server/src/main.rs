//! The `lmc` binary.
fn main() {}
