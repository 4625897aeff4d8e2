//! The suite over sockets.

use crate::support::socket::{Tcp, Unix};

mod tcp {
    lmc_transfer::conformance!(super::Tcp::default());
}

mod unix {
    lmc_transfer::conformance!(super::Unix::new());
}
