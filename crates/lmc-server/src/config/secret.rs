//! Passwords in URLs, which no output shows.

/// Stands for a password.
const MASK: &str = "***";

/// Returns a text with the password of each URL in it masked: `redis://user:***@host`.
///
/// A password ends at the last `@` before the end of the URL's authority, so that a password with an
/// `@` is masked as a whole. The login in a Redis URL may hold any character: such a URL is refused
/// elsewhere, but the error repeats it.
pub(crate) fn mask_passwords(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        masked.push_str(before);
        let start = scheme_start(rest, at);
        let is_redis = rest[start..at].starts_with("redis");
        let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '/' | '?' | '#');
        // A password may hold characters that end an authority; it then ends at the URL's last `@`.
        let end_of_url = match is_redis {
            true => end_of_redis(url, rest[..start].chars().next_back()),
            false => url
                .find(|c: char| c.is_whitespace() || is_quote(c))
                .unwrap_or(url.len()),
        };
        let user_info = match url[..end_of_url].rfind('@') {
            Some(at) => &url[..at],
            None => "",
        };
        rest = match user_info.split_once(':') {
            Some((user, _)) if is_redis || !user.contains(is_end) => {
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

/// Returns a text that is one URL, with or without a scheme, with its password masked.
pub(crate) fn mask_password_of(url: &str) -> String {
    let start = url.find("://").map_or(0, |at| at + 3);
    let password = || {
        let (user_info, _) = url[start..].rsplit_once('@')?;
        let (user, _) = user_info.split_once(':')?;
        Some(start + user.len() + 1..start + user_info.len())
    };
    let mut masked = url.to_owned();
    if let Some(password) = password() {
        masked.replace_range(password, MASK);
    }
    masked
}

/// Returns an error about a command line with passwords masked: the error repeats parts of the line.
pub(crate) fn mask_arguments<'a>(error: &str, args: impl Iterator<Item = &'a str>) -> String {
    let mut masked = error.to_owned();
    for arg in args {
        let value = arg.split_once('=').map(|(_, value)| value);
        for part in [Some(arg), value].into_iter().flatten() {
            let shown = mask_password_of(part);
            if shown != part {
                masked = masked.replace(part, &shown);
            }
        }
    }
    mask_passwords(&masked)
}

fn is_quote(c: char) -> bool {
    matches!(c, '"' | '\'')
}

/// Returns the start of the scheme that ends at `end`.
fn scheme_start(text: &str, end: usize) -> usize {
    let is_scheme = |c: char| c.is_ascii_alphanumeric() || c == '-';
    text[..end].trim_end_matches(is_scheme).len()
}

/// Returns the end of the text that may belong to a Redis URL: the closing quote, the next URL, or
/// the end of the whole text.
fn end_of_redis(url: &str, before: Option<char>) -> usize {
    let closing = before.filter(|&c| is_quote(c));
    let mut escaped = false;
    let closed = url.find(|c: char| {
        let is_end = Some(c) == closing && !escaped;
        escaped = c == '\\' && !escaped;
        is_end
    });
    let url = &url[..closed.unwrap_or(url.len())];
    let mut starts = url
        .match_indices("://")
        .map(|(at, _)| scheme_start(url, at));
    let is_next = |start: &usize| {
        let before = url[..*start].chars().next_back();
        before.is_some_and(|c| c.is_whitespace() || is_quote(c) || c == ',')
    };
    starts.find(is_next).unwrap_or(url.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_of_one_url_is_masked_whatever_is_in_it() {
        for (url, shown) in [
            ("http://u:se cret@h:8080", "http://u:***@h:8080"),
            ("u:se'c@ret@h:8080/a", "u:***@h:8080/a"),
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://token@h:8080", "http://token@h:8080"),
        ] {
            assert_eq!(mask_password_of(url), shown);
        }
    }

    #[test]
    fn an_error_about_a_command_line_shows_no_password_of_it() {
        for (error, args, shown) in [
            (
                "argument 'redis://:my'secret@h', use '-- redis://:my'secret@h'",
                vec!["redis://:my'secret@h"],
                "argument 'redis://:***@h', use '-- redis://:***@h'",
            ),
            ("value 'u:s@h'", vec!["--url=u:s@h"], "value 'u:***@h'"),
            (
                "value 's3://k:s@b'",
                vec!["a,s3://k:s@b"],
                "value 's3://k:***@b'",
            ),
            ("argument '--port'", vec!["--port"], "argument '--port'"),
        ] {
            assert_eq!(mask_arguments(error, args.into_iter()), shown);
        }
    }

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
            ("redis://:my secret@host", "redis://:***@host"),
            ("redis://:my\"secret@host", "redis://:***@host"),
            ("redis://:my\nsecret@host", "redis://:***@host"),
            ("redis://team/a:secret@host", "redis://team/a:***@host"),
            ("redis://a,b:my secret@host", "redis://a,b:***@host"),
            ("redis://:my://secret@host", "redis://:***@host"),
            (
                "url = \"redis://:my \\\"secret@h\" # x@y",
                "url = \"redis://:***@h\" # x@y",
            ),
            (
                "redis://:my secret@h: or redis://:your secret@h",
                "redis://:***@h: or redis://:***@h",
            ),
        ] {
            assert_eq!(mask_passwords(text), shown);
        }
    }
}
