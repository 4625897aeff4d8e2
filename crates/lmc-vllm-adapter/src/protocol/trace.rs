//! The trace that a request is part of, as W3C Trace Context names it.

/// Name of the entry of a request with its `traceparent`.
pub(crate) const TRACE_PARENT: &str = "lmcache.traceparent";
/// Bytes of the value, at most: later versions may add fields.
pub(crate) const MAX_TRACE_PARENT: usize = 256;

/// Parent of a request's spans: a span of its caller.
///
/// ```
/// # use lmc_vllm_adapter::TraceParent;
/// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// let parent = TraceParent::parse(text).expect("it is of version 00");
/// assert!(parent.is_sampled);
/// assert_eq!(TraceParent::parse("00-none"), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// Id of the trace; not all zero.
    pub trace: [u8; 16],
    /// Id of the caller's span; not all zero.
    pub span: [u8; 8],
    /// True if the caller records the trace.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Parses a `traceparent` of version 00, or the fields of version 00 in a later one. Returns
    /// `None` for any other text: a caller's mistake costs the trace and nothing else.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let [version] = hex::<1>(parts.next()?)?;
        let (trace, span) = (hex::<16>(parts.next()?)?, hex::<8>(parts.next()?)?);
        let [flags] = hex::<1>(parts.next()?)?;
        let has_more = parts.next().is_some();
        let is_valid = version != 0xFF && !(version == 0 && has_more);
        (is_valid && trace != [0; 16] && span != [0; 8]).then_some(Self {
            trace,
            span,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// Parses lower-case hexadecimal digits, two for each byte.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let digits = text.as_bytes();
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_taken_as_its_standard_says_or_not_at_all() {
        let (trace, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        let parse = |text: String| TraceParent::parse(&text);
        let sampled = parse(format!("00-{trace}-{span}-01")).expect("the standard's example");
        assert_eq!((sampled.trace[0], sampled.span[1]), (0x4B, 0xF0));
        let other = parse(format!("00-{trace}-{span}-02")).expect("another flag");
        assert!(sampled.is_sampled && !other.is_sampled);
        // A later version may have more.
        assert_eq!(parse(format!("01-{trace}-{span}-01-more")), Some(sampled));
        let zero = "0".repeat(32);
        for wrong in [
            String::new(),
            format!("ff-{trace}-{span}-01"),
            format!("00-{trace}-{span}-01-more"),
            format!("00-{trace}-{span}"),
            format!("00-{zero}-{span}-01"),
            format!("00-{trace}-{}-01", &zero[..16]),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{trace}é-{span}-01"),
            format!("00-{}-{span}-01", &trace[2..]),
        ] {
            assert_eq!(parse(wrong.clone()), None, "{wrong}");
        }
    }
}
