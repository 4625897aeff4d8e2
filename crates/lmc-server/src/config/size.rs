//! Sizes and durations as people write them.

use std::time::Duration;

/// One binary gigabyte, the unit LMCache means by "GB".
pub const GIB: u64 = 1 << 30;

/// Parses a size. A bare number counts in `unit` bytes; otherwise the suffix decides:
/// `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024, `KB`, `MB`, `GB`, `TB` powers of 1000, `B` bytes.
///
/// # Errors
/// A text that says what was expected.
pub(crate) fn parse_bytes(text: &str, unit: u64) -> Result<u64, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    // "1e3" is a number, not a size in unknown units.
    let (number, suffix) = text.split_at(split);
    let factor = match suffix.trim().to_ascii_lowercase().as_str() {
        "" => unit,
        "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(expected_size(unit)),
    };
    let number: f64 = number.trim().parse().map_err(|_| expected_size(unit))?;
    let bytes = number * factor as f64;
    // 2^63 and above cannot be mapped anyway, and would lose precision in f64.
    if !bytes.is_finite() || !(0.0..9.2e18).contains(&bytes) {
        return Err(expected_size(unit));
    }
    Ok(bytes as u64)
}

fn expected_size(unit: u64) -> String {
    let bare = if unit == GIB {
        "a bare number counts in GiB"
    } else {
        "a bare number counts in bytes"
    };
    format!("expected a size such as 500GiB, 1.5GB or 64MiB ({bare})")
}

/// Prints a size with three significant digits, for people.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value >= 100.0 => format!("{value:.0} {}", UNITS[unit]),
        _ if value >= 10.0 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

/// Parses a duration: bare numbers are seconds; `ms`, `s`, `m`, `h` and `d` are understood.
///
/// # Errors
/// A text that says what was expected.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    const EXPECTED: &str =
        "expected a number of seconds, or a duration such as 250ms, 10s, 5m, 1h or 30d";
    let text = text.trim();
    let split = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let factor = match suffix.trim() {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(EXPECTED.to_owned()),
    };
    let number: f64 = number.trim().parse().map_err(|_| EXPECTED.to_owned())?;
    // A century is longer than any setting means, and keeps every later sum in range.
    let seconds = number * factor;
    if !(0.0..=3.2e9).contains(&seconds) {
        return Err(EXPECTED.to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Prints a duration as `parse_duration` reads it.
pub fn human_duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds >= 3600.0 && seconds % 3600.0 == 0.0 {
        format!("{}h", seconds / 3600.0)
    } else if seconds >= 60.0 && seconds % 60.0 == 0.0 {
        format!("{}m", seconds / 60.0)
    } else if seconds >= 1.0 || seconds == 0.0 {
        format!("{seconds}s")
    } else {
        format!("{}ms", seconds * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check = |text: &str, unit: u64, want: Option<u64>| {
            assert_eq!(parse_bytes(text, unit).ok(), want, "{text}")
        };
        check("20", GIB, Some(20 << 30));
        check("0.5", GIB, Some(1 << 29));
        check("4096", 1, Some(4096));
        check("500GiB", GIB, Some(500 << 30));
        check("500 gib", 1, Some(500 << 30));
        check("1.5GB", GIB, Some(1_500_000_000));
        check("64MiB", 1, Some(64 << 20));
        check("2t", 1, Some(2 << 40));
        check("12B", GIB, Some(12));
        for bad in [
            "",
            "GiB",
            "-1",
            "1 2",
            "ten",
            "5XB",
            "1e30",
            "nan",
            "inf",
            "99999999TiB",
        ] {
            check(bad, GIB, None);
        }
    }

    #[test]
    fn durations() {
        let check = |text: &str, want: Option<f64>| {
            assert_eq!(
                parse_duration(text).ok().map(|d| d.as_secs_f64()),
                want,
                "{text}"
            );
        };
        check("300", Some(300.0));
        check("0", Some(0.0));
        check("0.25", Some(0.25));
        check("250ms", Some(0.25));
        check("5m", Some(300.0));
        check("1h", Some(3600.0));
        check("30d", Some(2_592_000.0));
        for bad in ["", "-1", "1w", "nan", "inf", "soon"] {
            check(bad, None);
        }
    }

    #[test]
    fn durations_print_as_they_are_read() {
        for text in ["0s", "250ms", "10s", "5m", "2h", "90s"] {
            assert_eq!(human_duration(parse_duration(text).unwrap()), text);
        }
    }

    #[test]
    fn people_read_three_digits() {
        let check = |bytes: u64, want: &str| assert_eq!(human_bytes(bytes), want);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1536, "1.50 KiB");
        check(10 << 30, "10.0 GiB");
        check(500 << 30, "500 GiB");
    }
}
