//! Entry points of the fuzz targets: each takes any bytes and panics when a rule is broken.
//!
//! The rules: nothing from outside panics or takes more memory than its bound; what decodes
//! survives the round trip through our own encoder.

/// Decodes the frames of a socket's stream, and the messages of its handshake.
pub fn transfer_frame(data: &[u8]) {
    crate::socket::fuzz(data);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn the_committed_seeds_break_no_rule() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/transfer");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).expect("seeds are committed") {
            let path = entry.expect("a file").path();
            super::transfer_frame(&std::fs::read(&path).expect("a file can be read"));
            count += 1;
        }
        assert!(count > 1, "{count} seeds");
    }
}
