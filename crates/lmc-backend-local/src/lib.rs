//! lmc-backend-local
