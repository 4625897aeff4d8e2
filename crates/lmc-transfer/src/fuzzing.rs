//! Entry points of the fuzz targets: each takes any bytes and panics when a rule is broken.
//!
//! The rules: nothing from outside panics or takes more memory than its bound; what decodes
//! survives the round trip through our own encoder.

/// Decodes the frames of a socket's stream, and the messages of its handshake.
pub fn transfer_frame(data: &[u8]) {
    crate::socket::fuzz(data);
}
