//! `bench --html FILE`: the report as one file that any browser shows: no script, no font, no picture and no address in it.
//!
//! Every number that is drawn also stands in a table. What comes from files and the system is escaped in `escape`.

mod canvas;
mod compare;
mod downsample;
mod escape;
mod markup;
mod stages;

use vramp_bench::{BenchReport, CacheState, Ceiling, StageBench, State, Tuning};

use super::super::text;
use super::{advice, labels, text as plain, tuning};
use escape::escaped;
use markup::{folded, paragraph, table};

const STYLE: &str = include_str!("report.css");

/// The browser refuses whatever this file might be made to fetch.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// The whole document.
pub(crate) fn document(report: &BenchReport, tuning: Option<&Tuning>) -> String {
    let title = escaped(&format!("vramp bench: {}", labels::name(report)));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    out.push_str(&header(report));
    out.push_str("<main>\n");
    out.push_str(&tiles(report));
    if !report.states.is_empty() {
        out.push_str(&compared(report));
    }
    for state in &report.states {
        out.push_str(&of_state(state));
    }
    out.extend(tuning.map(tuned));
    out.push_str(&surveys(&report.stages));
    out.push_str(&environment(report));
    out.push_str("</main>\n");
    out.push_str(&footer(report));
    out.push_str("</body>\n</html>\n");
    out
}

fn header(report: &BenchReport) -> String {
    let mut out =
        format!("<header>\n<p class=\"eyebrow\">vramp bench</p>\n<h1>{}</h1>\n", escaped(&labels::name(report)));
    let about = [labels::subject(report), format!("to {}", labels::device(report)), labels::date(report.unix_seconds)];
    out.push_str(&paragraph("lead", &about.join(" · ")));
    out.push_str(&paragraph("lead", &labels::machine(report).join(" · ")));
    out.extend(labels::part(report).map(|part| paragraph("lead", &part)));
    out.push_str(&warnings(&report.warnings));
    out.push_str("</header>\n");
    out
}

fn warnings(warnings: &[String]) -> String {
    if warnings.is_empty() {
        return String::new();
    }
    let items: String = warnings.iter().map(|warning| format!("<li>{}</li>", escaped(warning))).collect();
    format!("<div class=\"warning\"><strong>Know before you believe a number</strong><ul>{items}</ul></div>\n")
}

// ---- the verdict

fn tiles(report: &BenchReport) -> String {
    let mut out = String::from("<div class=\"tiles\">\n");
    for (state, (_, advice)) in report.states.iter().zip(advice::of(report)) {
        out.push_str(&tile(state, &advice));
    }
    out.push_str("</div>\n");
    if !report.states.is_empty() {
        out.push_str(&paragraph("hint", WHAT_T_IS));
    }
    out
}

/// What T is, beside the first numbers that are compared with it.
const WHAT_T_IS: &str = "T is a prediction: opening and planning, and then the bytes by the rate of the slowest stage, measured alone in turn \
     with the loads. Less than 1 times T is a load that met a faster moment of the machine than its stages did.";

fn tile(state: &State, advice: &str) -> String {
    let (name, prediction) = (labels::state(state.state), &state.prediction);
    let took = state.seconds().map_or("none".to_owned(), |it| labels::spread(it, text::seconds));
    let limit = labels::limit(prediction.bound_by, prediction.bytes_per_second);
    let rate = labels::load_rate(state).map_or(String::new(), |rate| format!(" at {}", text::rate(rate)));
    let facts = [
        (
            "predicted",
            format!("T = {}: the median took {}", text::seconds(prediction.seconds), labels::times_predicted(state)),
        ),
        ("loads", format!("{took}, median of {}", state.loads.len())),
        ("limit", limit),
        ("set-up", plain::setup(state)),
    ];
    let facts: String =
        facts.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escaped(value))).collect();
    let doubtful = !state.proof.proven || state.verdict.reached > advice::FASTER;
    let big = if doubtful { "big doubtful" } else { "big" };
    format!(
        "<section class=\"tile\"><h2>{}</h2><p class=\"{big}\">{} <small>{}</small></p>\n<dl>{facts}</dl>\n{}{}</section>\n",
        capitalised(name),
        escaped(&text::seconds(state.verdict.seconds)),
        escaped(rate.trim_start()),
        badge(state),
        paragraph("advice", &format!("{}.", capitalised(advice))),
    )
}

/// Whether the cache state was really had.
fn badge(state: &State) -> String {
    let (class, said) = if state.proof.proven {
        ("good", format!("{} state proved", labels::state(state.state)))
    } else {
        ("bad", format!("{} state NOT proved: do not trust these numbers", labels::state(state.state)))
    };
    format!("<p><span class=\"badge {class}\">{said}</span></p>\n")
}

fn capitalised(said: &str) -> String {
    let mut letters = said.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

// ---- the loads

fn compared(report: &BenchReport) -> String {
    let mut rows = Vec::new();
    for state in &report.states {
        for (round, load) in state.loads.iter().enumerate() {
            rows.push([
                labels::state(state.state).to_owned(),
                (round + 1).to_string(),
                text::seconds(load.seconds),
                text::rate(text::as_f64(load.report.bytes) / load.seconds.max(f64::MIN_POSITIVE)),
                labels::factor(load.seconds / state.prediction.seconds.max(f64::MIN_POSITIVE)),
                text::seconds(load.setup_seconds),
                share(&state.proof.before, round),
                share(&state.proof.after, round),
            ]);
        }
    }
    let headings =
        ["state", "#load", "#seconds", "#rate", "#times T", "#set-up, apart", "#cached before", "#cached after"];
    let loads = table("Every load, in the order of time", headings, &rows);
    format!(
        "<h2>Cold against warm</h2>\n<section class=\"card\">{}{}</section>\n",
        compare::loads(report),
        folded("Every load as a table", &loads)
    )
}

fn share(shares: &[f64], round: usize) -> String {
    shares.get(round).map_or("-".to_owned(), |share| text::percent(*share))
}

fn of_state(state: &State) -> String {
    let name = match (state.state, state.proof.proven) {
        (CacheState::Cold, true) => "Cold: nothing of the files in the page cache",
        (CacheState::Warm, true) => "Warm: all of the files in the page cache",
        (CacheState::Cold, false) => "Cold, as far as it could be had",
        (CacheState::Warm, false) => "Warm, as far as it could be had",
    };
    let mut out =
        format!("<h2>{name}</h2>\n<section class=\"card\"><h3>What each stage needs, and what the loads took</h3>\n");
    out.push_str(&stages::bars(state));
    out.push_str(&ceilings(state));
    out.push_str(&paragraph("hint", &format!("Page cache {}.", labels::proof(state))));
    out.push_str("</section>\n");
    if !state.timeline.is_empty() {
        out.push_str(&format!(
            "<section class=\"card\"><h3>What happened when, in the median load</h3>\n{}{}<h3>Bytes per second in that load</h3>\n{}{}</section>\n",
            stages::timeline(state),
            paragraph("hint", "Short events are drawn together: the height of a piece is the share of its time that was busy."),
            stages::throughput(state),
            folded("The lanes as a table", &lanes(state)),
        ));
    }
    out
}

fn ceilings(state: &State) -> String {
    let row = |ceiling: &Ceiling| {
        let within = labels::reached_in_load(state, ceiling);
        [
            labels::stage(ceiling.stage).to_owned(),
            labels::rate(ceiling.bytes_per_second),
            within.map_or("-".to_owned(), text::rate),
            text::seconds(ceiling.seconds),
            labels::samples(&ceiling.samples).unwrap_or_default(),
            labels::setting(&ceiling.setting),
        ]
    };
    let rows: Vec<[String; 6]> = state.ceilings.iter().map(row).collect();
    let headings =
        ["stage", "#alone", "#in the load", "#takes", "measured alone, in turn with the loads", "best setting"];
    table("The stages of such a load, which work side by side", headings, &rows)
}

/// What each lane of the timeline did.
fn lanes(state: &State) -> String {
    let (lanes, _) = downsample::lanes(&state.timeline);
    let mut rows = Vec::new();
    for (name, events) in lanes {
        let mut kinds: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let of = || events.iter().filter(|event| event.name == kind);
            let busy: f64 = of().map(|event| event.seconds).sum();
            let bytes: u64 = of().map(|event| event.bytes).sum();
            let bytes = if bytes == 0 { String::new() } else { text::decimal(bytes) };
            rows.push([name.to_owned(), kind.to_owned(), text::count(of().count() as u64), text::seconds(busy), bytes]);
        }
    }
    table("What each lane did", ["lane", "what", "#times", "#seconds together", "#bytes"], &rows)
}

/// What the search for better options found.
fn tuned(tuning: &Tuning) -> String {
    let compared: Vec<[String; 3]> = tuning::compared(tuning).collect();
    let against = if compared.is_empty() {
        String::new()
    } else {
        table("Loads with the defaults and with what was found", ["state", "defaults", "found"], &compared)
    };
    let rows: Vec<[String; 4]> = tuning.trials.iter().map(tuning::row).collect();
    let [what, look, confirmed, kept] = tuning::HEADS;
    let heads = [what, &format!("#{look}"), &format!("#{confirmed}"), kept];
    let tried = table(&capitalised(tuning::MEANING), heads, &rows);
    let verdict = paragraph("", &format!("{}.", capitalised(&tuning::verdict(tuning))));
    let missed = tuning::not_reached(tuning).map(|values| paragraph("hint", &format!("No time for {values}.")));
    let tried = folded("Everything that was tried", &tried) + &missed.unwrap_or_default();
    format!("<h2>Search for better options</h2>\n<section class=\"card\">{verdict}{against}{tried}</section>\n")
}

// ---- the stages alone

fn surveys(stages: &[StageBench]) -> String {
    if stages.is_empty() {
        return String::new();
    }
    let mut out = String::from("<h2>Each stage alone</h2>\n");
    for stage in stages.iter().filter(|stage| stage.skipped.is_none()) {
        out.push_str(&format!("<section class=\"card\"><h3>{}</h3>\n", capitalised(labels::stage(stage.stage))));
        out.push_str(&paragraph("hint", &format!("{}.", capitalised(labels::stage_meaning(stage.stage)))));
        out.push_str(&survey(stage));
        out.push_str("</section>\n");
    }
    let skipped = labels::skipped(stages);
    if !skipped.is_empty() {
        out.push_str("<section class=\"card\"><h3>Not measured alone</h3>\n");
        out.extend(skipped.iter().map(|(names, why)| paragraph("", &format!("{}: {why}.", capitalised(names)))));
        out.push_str("</section>\n");
    }
    out
}

fn survey(stage: &StageBench) -> String {
    let best = stage.best().and_then(|trial| Some((labels::samples(&trial.samples)?, labels::setting(&trial.setting))));
    let best = best.map(|(rate, setting)| paragraph("", &format!("Best: {rate} at {setting}.")));
    let charts = compare::survey(stage);
    let rows: Vec<[String; 4]> = stage
        .trials
        .iter()
        .enumerate()
        .map(|(at, trial)| {
            let mark = if stage.best == Some(at) { "best" } else { "" };
            let rate = labels::samples(&trial.samples).unwrap_or_default();
            [labels::setting(&trial.setting), rate, trial.samples.len().to_string(), mark.to_owned()]
        })
        .collect();
    let all = table("Median [least … most] of each setting", ["setting", "reached", "#samples", ""], &rows);
    let hint =
        "The ring marks the best. Lines join medians; where there are few, thin ones reach from the least to the most.";
    let hint = if charts.is_empty() { String::new() } else { paragraph("hint", hint) };
    let all = if rows.len() > 4 && !charts.is_empty() {
        folded(&format!("All {} settings as a table", rows.len()), &all)
    } else {
        all
    };
    best.unwrap_or_default() + &charts + &hint + &all
}

// ---- the machine

fn environment(report: &BenchReport) -> String {
    let machine = &report.machine;
    let row =
        |name: &str, value: String| [name.to_owned(), if value.is_empty() { "not known".to_owned() } else { value }];
    let mut rows = vec![
        row("checkpoint", report.subject.path.display().to_string()),
        row("size", labels::subject(report)),
        row("device", labels::device(report)),
        row("processor", machine.processor.clone()),
        row("cores", machine.cores.to_string()),
        row("memory", machine.memory_bytes.map_or(String::new(), text::both)),
        row("kernel", machine.kernel.clone()),
        row("file system", machine.file_system.clone()),
        row("vramp", report.vramp.clone()),
        row("began", labels::date(report.unix_seconds)),
        row("took", text::seconds(report.seconds)),
    ];
    rows.extend(
        report.states.iter().map(|state| row(&format!("{} state", labels::state(state.state)), labels::proof(state))),
    );
    rows.extend(report.fallbacks.iter().map(|it| row("way not taken", format!("{}: {}", it.what, it.why))));
    let table = table("The machine and what was measured", ["what", "is"], &rows);
    format!("<h2>Machine</h2>\n<section class=\"card wrap\">{table}</section>\n")
}

fn footer(report: &BenchReport) -> String {
    let said = format!(
        "GB is 10^9 bytes, GiB is 2^30 \
         bytes. Made by vramp {}; this file fetches nothing and runs nothing.",
        report.vramp
    );
    format!("<footer>{}</footer>\n", paragraph("", &said))
}

#[cfg(test)]
mod tests;
