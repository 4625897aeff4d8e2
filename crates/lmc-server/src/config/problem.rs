//! Problems of a configuration.

use std::fmt;

use super::secret::mask_passwords;

/// One thing that is wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Setting or file that has the problem: `--port 70000`, `LMC_PORT=x`, `lmc.toml: port = 70000`.
    pub subject: String,
    /// Expectation, and the remedy.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Masks also a URL in a setting that takes no URL.
        let text = format!("{}: {}", self.subject, self.text);
        f.write_str(&mask_passwords(&text))
    }
}

/// All problems of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The problems, in the order in which settings are listed.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [one] => write!(f, "{one}"),
            many => {
                write!(f, "{} problems in the configuration", many.len())?;
                many.iter()
                    .try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for ConfigError {}
