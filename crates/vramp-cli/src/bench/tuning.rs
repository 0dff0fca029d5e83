//! What a search for better options found, as a person reads it and as the file that loads take. Pure text.

use std::io;

use vramp::load::Profile;
use vramp_bench::{Spread, TuneTrial, Tuning};

use super::super::text::{self, Align, BOLD, GOOD, Table};
use super::super::wrap::line;

/// The whole.
pub(crate) fn text(tuning: &Tuning) -> String {
    let mut out = line(&text::styled(BOLD, "tuning"), &verdict(tuning));
    out.extend(
        compared(tuning).map(|[state, usual, tuned]| line(&state, &format!("{usual} before, {tuned} with them"))),
    );
    if !tuning.trials.is_empty() {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
        table.heading(HEADS);
        for trial in &tuning.trials {
            let [what, look, confirmed, kept] = row(trial);
            let plain = anstyle::Style::new();
            table.styled_row([(plain, what), (plain, look), (plain, confirmed), (GOOD, kept)]);
        }
        out.push_str(&line("", MEANING));
        out.push_str(&table.render());
    }
    out.extend(not_reached(tuning).map(|values| line("no time for", &values)));
    out
}

/// What the numbers of [`row`] mean.
pub(crate) const MEANING: &str =
    "each value: the time with it, as a share of that with the best so far (at first the defaults): less is better";

/// What the columns of [`row`] are: times with a value by times without it.
pub(crate) const HEADS: [&str; 4] = ["tried", "one pair", "several pairs", ""];

/// The values that were not tried.
pub(crate) fn not_reached(tuning: &Tuning) -> Option<String> {
    (!tuning.not_reached.is_empty()).then(|| text::escape(&tuning.not_reached.join(", ")))
}

/// What came of it, in a sentence.
pub(crate) fn verdict(tuning: &Tuning) -> String {
    let tried = text::plural(tuning.trials.len() as u64, "value");
    let rest = match tuning.not_reached.len() {
        0 => String::new(),
        rest => format!(" ({rest} more: the time was up)"),
    };
    let tried = format!("{tried} tried in {}{rest}", text::seconds(tuning.seconds));
    match options(&tuning.profile) {
        options if options.is_empty() => format!("{tried}: none is clearly better than the defaults"),
        options => {
            format!("{tried}: loads take {} of the time with {}", text::percent(tuning.ratio), options.join(", "))
        }
    }
}

/// The options that a profile sets, as `direct_depth = 4`.
pub(crate) fn options(profile: &Profile) -> Vec<String> {
    let number = |name: &str, value: Option<u64>| value.map(|value| format!("{name} = {value}"));
    let count = |name: &str, value: Option<usize>| number(name, value.map(|value| value as u64));
    let staging = profile.staging.map(|it| format!("staging = {}x{}", it.count, text::binary(it.bytes as u64)));
    let all = [
        staging,
        profile.read_bytes.map(|bytes| format!("read_bytes = {}", text::binary(bytes))),
        count("lanes", profile.lanes),
        profile.engine.map(|engine| format!("engine = {engine:?}").to_lowercase()),
        count("direct_depth", profile.direct_depth),
        count("page_cache_threads", profile.page_cache_threads),
        count("populate_threads", profile.populate_threads),
    ];
    all.into_iter().flatten().collect()
}

/// For each state: its name, the time with the defaults, and with the options found. Nothing if those are the defaults.
pub(crate) fn compared(tuning: &Tuning) -> impl Iterator<Item = [String; 3]> {
    let is_new = !options(&tuning.profile).is_empty();
    let of = |state: &str, both: Option<[Spread; 2]>| {
        let [usual, tuned] = both?.map(|spread| super::labels::spread(spread, text::seconds));
        Some([state.to_owned(), usual, tuned])
    };
    let states = [of("cold", tuning.cold_seconds), of("warm", tuning.warm_seconds)];
    states.into_iter().flatten().filter(move |_| is_new)
}

/// A value that was tried: what, the time with it by the time without it at a first look and in several pairs, whether it was kept.
pub(crate) fn row(trial: &TuneTrial) -> [String; 4] {
    let kept = if trial.kept { "kept" } else { "" };
    let confirmed = trial.confirmed.map_or(String::new(), text::percent);
    [text::escape(&trial.what), text::percent(trial.ratio), confirmed, kept.to_owned()]
}

/// A profile as a file.
pub(crate) fn file_of(profile: &Profile) -> io::Result<Vec<u8>> {
    let mut file = serde_json::to_vec_pretty(profile)?;
    file.push(b'\n');
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn what_was_found_is_said_with_its_gain_and_nothing_is_promised_of_nothing() {
        let found = anstream::adapter::strip_str(&text(&sample::tuning())).to_string();
        let expected = "\
tuning      2 values tried in 30.0 s (1 more: the time was up): loads take 90 %
            of the time with read_bytes = 8 MiB
cold        200 ms [190 ms … 210 ms] before, 180 ms [170 ms … 190 ms] with them
            each value: the time with it, as a share of that with the best so
            far (at first the defaults): less is better
tried                 one pair  several pairs
direct_depth = 2         112 %
read_bytes = 8388608      88 %           90 %  kept
no time for lanes = 4
";
        assert_eq!(found, expected, "{found}");
        let (trials, not_reached) = (Vec::new(), Vec::new());
        let none = Tuning { profile: Profile::new("cpu", "ext4"), trials, not_reached, ..sample::tuning() };
        let found = anstream::adapter::strip_str(&text(&none)).to_string();
        let expected = "tuning      0 values tried in 30.0 s: none is clearly better than the defaults\n";
        assert_eq!(found, expected);
    }

    #[test]
    fn the_file_is_what_a_load_takes() {
        let profile = sample::tuning().profile;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), file_of(&profile).unwrap()).unwrap();
        assert_eq!(Profile::read(file.path()).unwrap(), profile);
    }
}
