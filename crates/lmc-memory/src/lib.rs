//! lmc-memory
