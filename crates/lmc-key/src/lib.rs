//! lmc-key
