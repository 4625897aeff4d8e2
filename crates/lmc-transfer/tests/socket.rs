//! The suite over sockets.

#[path = "support/socket.rs"]
mod support;
use support::{Tcp, Unix};

mod tcp {
    lmc_transfer::conformance!(super::Tcp::default());
}

mod unix {
    lmc_transfer::conformance!(super::Unix::new());
}
