//! The suite that every channel passes, and tools for tests of channels.
//!
//! [`conformance!`](macro@crate::conformance) makes a test of each property over a [`Rig`], which
//! knows how to start a kind of channel and how to kill one; [`properties`] gives the same as a
//! list. Every byte is derived from its stamp, object and length, so a wrong one shows itself.

mod connecting;
mod dying;
mod ending;
mod leasing;

mod model;
pub use model::{Guarantee, RandomTest, Tally};

mod moving;
mod pairing;
mod refusing;

mod rig;
pub use rig::{Property, Rig};

mod rng;
pub use rng::Rng;

mod side;
pub use side::Side;

mod value;
pub use value::{Mismatch, check_value, fill_value};

/// The functions that tests call; the names are those of [`crate::conformance!`].
#[doc(hidden)]
pub mod property {
    pub use super::connecting::*;
    pub use super::dying::*;
    pub use super::ending::*;
    pub use super::leasing::*;
    pub use super::model::random_operations;
    pub use super::moving::*;
    pub use super::pairing::*;
    pub use super::refusing::*;
}

/// The one list of properties, handed to another macro.
#[doc(hidden)]
#[macro_export]
macro_rules! __properties {
    ($then:ident $($argument:tt)*) => {
        $crate::$then! {
            {$($argument)*}
            connects_once_with_messages_each_way
            calls_for_the_same_peer_connect_once
            both_sides_connect_at_the_same_time
            many_peers_are_kept_apart
            messages_are_as_long_as_allowed
            another_peer_answers
            keys_are_proven
            keys_are_rotated
            no_peer_answers
            a_stalled_handshake_ends
            handlers_that_fail
            closing_ends_a_connect
            no_more_peers_than_allowed
            writes_and_reads_of_all_sizes
            writes_and_reads_of_full_batches
            a_range_is_read_more_than_once
            calls_change_hands
            empty_batches_are_done_at_once
            indices_count_in_units_of_the_peer
            both_directions_from_several_threads
            sends_and_receives_of_all_sizes
            sends_and_receives_of_full_batches
            tags_are_kept_apart
            fewer_objects_than_slots
            lengths_must_agree
            no_peer_at_the_other_end
            a_tag_is_used_again
            slots_of_another_arena
            slots_between_units
            numbers_that_do_not_go_together
            ranges_outside_the_arena
            peers_that_are_not_known
            batches_that_are_too_large
            a_closed_channel
            closing_ends_what_is_under_way
            closing_ends_its_own_reads_and_writes
            a_close_without_time
            a_close_ends_all_writing
            a_closed_channel_begins_again
            a_dropped_channel_leaves_nothing
            deadlines_that_pass
            deadlines_far_away
            dropped_connects
            dropped_reads_and_writes
            dropped_sends_and_receives
            a_dead_peer_is_noticed
            a_peer_dies_while_it_is_read
            a_peer_dies_while_it_is_written
            a_close_with_a_dead_peer
            a_peer_starts_again
            a_peer_that_started_again_connects
            a_lease_is_for_its_slots_and_its_peer
            a_revoked_lease_serves_no_peer
            reads_of_revoked_leases_are_never_torn
            writes_under_revoked_leases_never_land
            a_lease_ends_with_its_peer
            indices_of_an_earlier_incarnation_are_stale
            rights_are_kept
            a_peer_is_disconnected
            random_operations
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_tests {
    ({$rig:expr} $($property:ident)*) => {$(
        #[test]
        fn $property() {
            $crate::conformance::property::$property(&$rig);
        }
    )*};
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_list {
    ({$rig:ty} $($property:ident)*) => {
        vec![$((stringify!($property), property::$property::<$rig> as Property<$rig>)),*]
    };
}

/// One test for each property of a channel. Each makes its own rig with the expression.
#[macro_export]
macro_rules! conformance {
    ($rig:expr) => {
        $crate::__properties! { __conformance_tests $rig }
    };
}

/// Returns every property by name, for programs that are not tests.
pub fn properties<R: Rig>() -> Vec<(&'static str, Property<R>)> {
    crate::__properties! { __conformance_list R }
}
