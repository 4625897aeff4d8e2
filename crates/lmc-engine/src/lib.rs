//! lmc-engine
