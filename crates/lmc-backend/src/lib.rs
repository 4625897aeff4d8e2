//! lmc-backend
