//! The library's settings in the program's words: messages name a field of the options, people type a flag.

use vramp::setting::Setting;

/// The flag, or the command, by which a user changes a setting.
fn flag(setting: Setting) -> &'static str {
    match setting {
        Setting::Include => "--include",
        Setting::Exclude => "--exclude",
        Setting::Slices => "--slice",
        Setting::StripPrefix => "--strip-prefix",
        Setting::Ties => "--tied",
        Setting::TensorParallelDims => "--tp-dim GLOB=DIM",
        Setting::Convert => "--dtype",
        Setting::AllowOverflow => "--allow-overflow",
        Setting::MaxHeaderBytes => "--max-header-bytes",
        Setting::Variant => "--variant",
        Setting::Key => "--key",
        Setting::SkipUnknown => "--skip-unknown",
        Setting::Staging => "--staging",
        Setting::TensorNames => "`vramp inspect PATH --tree`",
        Setting::Tune => "`vramp bench PATH --tune --save-profile FILE`",
        Setting::Bench => "`vramp bench PATH`",
        _ => setting.name(),
    }
}

/// A message of the library with its settings as flags.
pub(crate) fn in_message(message: &str) -> String {
    Setting::translate(message, flag)
}

/// The same for several.
pub(crate) fn in_messages<'a>(messages: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    messages.into_iter().map(|message| in_message(message)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_flag_or_a_command() {
        for &setting in Setting::ALL {
            assert!(flag(setting).starts_with("--") || flag(setting).starts_with("`vramp "), "{setting}");
        }
    }
}
