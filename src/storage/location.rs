//! Where a file or folder is: a path of this machine, or a URL. It names a place and looks at nothing.

use std::fmt;
use std::path::{Path, PathBuf};

/// A path or a URL. Errors show it as it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    text: PathBuf,
}

impl Location {
    /// The text as a path. That of a URL begins with its scheme and is no path of this machine.
    pub fn as_path(&self) -> &Path {
        &self.text
    }

    /// The scheme of a URL, as `s3` or `https`; `None` for a path. A path of the form `name://` is not a path that anyone types.
    pub fn scheme(&self) -> Option<&str> {
        let (scheme, _) = self.text.to_str()?.split_once("://")?;
        let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        let begins = scheme.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
        (begins && scheme.bytes().all(is_scheme)).then_some(scheme)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.display().fmt(f)
    }
}

impl AsRef<Path> for Location {
    fn as_ref(&self) -> &Path {
        &self.text
    }
}

impl From<PathBuf> for Location {
    fn from(text: PathBuf) -> Location {
        Location { text }
    }
}

impl From<&Path> for Location {
    fn from(text: &Path) -> Location {
        Location { text: text.to_owned() }
    }
}

impl From<&PathBuf> for Location {
    fn from(text: &PathBuf) -> Location {
        Location { text: text.clone() }
    }
}

impl From<&str> for Location {
    fn from(text: &str) -> Location {
        Location { text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_keeps_its_text_and_a_path_has_no_scheme() {
        let file = Location::from("s3://bucket/model/model.safetensors");
        assert_eq!((file.to_string().as_str(), file.scheme()), ("s3://bucket/model/model.safetensors", Some("s3")));
        for path in ["/a/b", "a", "./x:y", "://", "1a://b", "a b://c"] {
            assert_eq!(Location::from(path).scheme(), None, "{path}");
        }
    }
}
