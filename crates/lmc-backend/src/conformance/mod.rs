//! The kit that every tier passes, and wrappers of tiers for tests.
//!
//! [`Conformance`] runs random operations from a printed seed against a tier and a map. Every
//! value is derived from its key, so a wrong read shows itself. [`Faulty`] wraps a tier in seeded
//! errors, delays and misses, [`Delayed`] makes it slow or late, and [`Gated`] makes it wait; the
//! kit knows what a faulty tier may and may not do.

mod block_on;
pub use block_on::block_on;

mod blocking;
pub use blocking::{clear_all, lens_of, load_batch, store_batch};

mod delayed;
pub use delayed::Delayed;

mod faulty;
pub use faulty::{Faults, Faulty};

mod forward;

mod gated;
pub use gated::{Gated, Operation};

mod in_time;

mod kit;
pub use kit::{Conformance, Guarantee, Tally};

mod rng;
pub use rng::Rng;

mod value;
pub use value::{Mismatch, check_value, fill_value, test_hash, test_key};
