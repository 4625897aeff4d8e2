//! Passwords in URLs, which no output shows.

/// Stands for a password.
const MASK: &str = "***";

/// Returns a text with the password of each URL in it masked: `redis://user:***@host`.
///
/// A password ends at the last `@` before the end of the URL's authority, so that one that holds
/// an `@` is masked as a whole.
pub(crate) fn mask_passwords(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        masked.push_str(before);
        let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '/' | '?' | '#');
        // A password may hold what ends an authority: then it ends at the URL's last `@`.
        let end_of_url = url.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\''));
        let whole = &url[..end_of_url.unwrap_or(url.len())];
        let user_info = match whole.rfind('@') {
            Some(at) => &whole[..at],
            None => "",
        };
        rest = match user_info.split_once(':') {
            Some((user, _)) if !user.contains(is_end) => {
                masked.push_str(user);
                masked.push(':');
                masked.push_str(MASK);
                &url[user_info.len()..]
            }
            _ => url,
        };
    }
    masked.push_str(rest);
    masked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_of_a_url_is_masked_and_nothing_else() {
        for (text, shown) in [
            (
                "redis://user:secret@host:6379/0",
                "redis://user:***@host:6379/0",
            ),
            ("rediss://:secret@host", "rediss://:***@host"),
            (
                "a redis://u:s@h and s3://k:t@b",
                "a redis://u:***@h and s3://k:***@b",
            ),
            ("redis://u:p@ss@h", "redis://u:***@h"),
            ("redis://u:p/s#s?@h/0", "redis://u:***@h/0"),
            (
                "url = \"redis://u:s@h\" # x@y",
                "url = \"redis://u:***@h\" # x@y",
            ),
            ("http://127.0.0.1:8080/a", "http://127.0.0.1:8080/a"),
            ("/data/a,/data/b", "/data/a,/data/b"),
            ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ] {
            assert_eq!(mask_passwords(text), shown);
        }
    }
}
