//! The settings that messages speak of, by names that every front end can replace by its own.
//!
//! The library knows fields of its options and no flags. Where a message advises to change one, it holds [`Setting::name`] in
//! backticks; a program or a binding passes its messages through [`Setting::translate`].

use std::fmt;

macro_rules! settings {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// A setting that an error or a warning advises to change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Setting {
            $($(#[$doc])* $variant,)*
        }

        impl Setting {
            /// All of them.
            pub const ALL: &'static [Setting] = &[$(Setting::$variant,)*];

            /// Where the library has it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Setting::$variant => $name,)*
                }
            }
        }
    };
}

settings! {
    /// Tensors to load, by names and patterns.
    Include = "Selection::include";
    /// Tensors to leave out.
    Exclude = "Selection::exclude";
    /// Ranges of tensors.
    Slices = "Selection::slices";
    /// Prefixes that are removed from names.
    StripPrefix = "Selection::strip_prefix";
    /// Names that mean the bytes of another tensor.
    Ties = "Selection::ties";
    /// The dimension along which a tensor is cut for a rank.
    TensorParallelDims = "TensorParallel::dims";
    /// The conversion of floating-point tensors.
    Convert = "Options::convert";
    /// Whether a conversion may make finite numbers infinite.
    AllowOverflow = "Convert::allow_overflow";
    /// The longest header that is read.
    MaxHeaderBytes = "OpenOptions::max_header_bytes";
    /// Which of several copies of a checkpoint is meant.
    Variant = "OpenOptions::variant";
    /// The key of a PyTorch file's object under which the tensors are.
    Key = "OpenOptions::key";
    /// Whether unknown objects of PyTorch's files are passed over.
    SkipUnknown = "OpenOptions::skip_unknown";
    /// Number and size of the staging buffers.
    Staging = "Options::staging";
    /// The list of a checkpoint's tensors.
    TensorNames = "Checkpoint::tensors";
    /// The search for better options, which makes a profile.
    Tune = "vramp_bench::tune";
    /// The benchmark, which measures limits.
    Bench = "vramp_bench::run";
}

impl Setting {
    /// The settings that a message speaks of.
    pub fn named_in(message: &str) -> Vec<Setting> {
        Setting::ALL.iter().copied().filter(|setting| message.contains(&setting.to_string())).collect()
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
        for &setting in Setting::ALL {
            let message = format!("raise the limit with {setting}, or load less");
            assert_eq!(Setting::named_in(&message), [setting]);
            assert_eq!(Setting::translate(&message, |_| "--flag"), "raise the limit with --flag, or load less");
        }
        assert!(Setting::named_in("Selection::include without backticks").is_empty());
    }
}
