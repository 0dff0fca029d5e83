//! The settings that messages speak of, by names that every front end can replace by its own.
//!
//! The library knows fields of its options and no flags. Where a message advises to change one, it holds [`Setting::name`] in
//! backticks; a program or a binding passes its messages through [`Setting::translate`].

use std::fmt;

/// A setting that an error or a warning advises to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Setting {
    /// Tensors to load, by names and patterns.
    Include,
    /// Tensors to leave out.
    Exclude,
    /// Ranges of tensors.
    Slices,
    /// Prefixes that are removed from names.
    StripPrefix,
    /// Names that mean the bytes of another tensor.
    Ties,
    /// The dimension along which a tensor is cut for a rank.
    TensorParallelDims,
    /// The conversion of floating-point tensors.
    Convert,
    /// Whether a conversion may make finite numbers infinite.
    AllowOverflow,
    /// The longest header that is read.
    MaxHeaderBytes,
    /// Which of several copies of a checkpoint is meant.
    Variant,
    /// The key of a PyTorch file's object under which the tensors are.
    Key,
    /// Whether unknown objects of PyTorch's files are passed over.
    SkipUnknown,
    /// Number and size of the staging buffers.
    Staging,
    /// The list of a checkpoint's tensors.
    TensorNames,
    /// The search for better options, which makes a profile.
    Tune,
    /// The benchmark, which measures limits.
    Bench,
}

impl Setting {
    /// All of them.
    pub const ALL: [Setting; 16] = [
        Setting::Include,
        Setting::Exclude,
        Setting::Slices,
        Setting::StripPrefix,
        Setting::Ties,
        Setting::TensorParallelDims,
        Setting::Convert,
        Setting::AllowOverflow,
        Setting::MaxHeaderBytes,
        Setting::Variant,
        Setting::Key,
        Setting::SkipUnknown,
        Setting::Staging,
        Setting::TensorNames,
        Setting::Tune,
        Setting::Bench,
    ];

    /// Where the library has it.
    pub fn name(self) -> &'static str {
        match self {
            Setting::Include => "Selection::include",
            Setting::Exclude => "Selection::exclude",
            Setting::Slices => "Selection::slices",
            Setting::StripPrefix => "Selection::strip_prefix",
            Setting::Ties => "Selection::ties",
            Setting::TensorParallelDims => "TensorParallel::dims",
            Setting::Convert => "Options::convert",
            Setting::AllowOverflow => "Convert::allow_overflow",
            Setting::MaxHeaderBytes => "OpenOptions::max_header_bytes",
            Setting::Variant => "OpenOptions::variant",
            Setting::Key => "OpenOptions::key",
            Setting::SkipUnknown => "OpenOptions::skip_unknown",
            Setting::Staging => "Options::staging",
            Setting::TensorNames => "Checkpoint::tensors",
            Setting::Tune => "vramp_bench::tune",
            Setting::Bench => "vramp_bench::run",
        }
    }

    /// The settings that a message speaks of.
    pub fn named_in(message: &str) -> Vec<Setting> {
        Setting::ALL.into_iter().filter(|setting| message.contains(&setting.to_string())).collect()
    }

    /// The message with each setting under the name that `name` gives it.
    pub fn translate(message: &str, name: impl Fn(Setting) -> &'static str) -> String {
        let named = Setting::named_in(message).into_iter();
        named.fold(message.to_owned(), |text, setting| text.replace(&setting.to_string(), name(setting)))
    }
}

/// The name in backticks, as messages hold it.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_is_found_by_a_name_of_its_own() {
        for setting in Setting::ALL {
            let message = format!("raise the limit with {setting}, or load less");
            assert_eq!(Setting::named_in(&message), [setting]);
            assert_eq!(Setting::translate(&message, |_| "--flag"), "raise the limit with --flag, or load less");
        }
        assert!(Setting::named_in("Selection::include without backticks").is_empty());
    }
}
