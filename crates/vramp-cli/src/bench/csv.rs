//! A benchmark as a table for other programs: one line a sample. `stage`: a stage alone; `ceiling`: one beside the loads, at its best
//! setting; `own`: the same at the loads' own setting, where that is another; `opening`: opening and planning; `load`: a load.
//!
//! RFC 4180: a comma between fields, quotes where a field needs them, CR LF at the end of a line.

use std::io::{self, Write};

use vramp_bench::{BenchReport, BenchStage, Sample, Setting};

use super::labels;

const HEAD: &str = "kind,state,stage,way,block_bytes,at_once,round,bytes,seconds,bytes_per_second,setup_seconds";

/// What a line is about.
struct Line<'a> {
    kind: &'a str,
    state: &'a str,
    stage: &'a str,
    setting: Option<&'a Setting>,
    round: usize,
    sample: Sample,
    setup_seconds: Option<f64>,
}

/// Writes the table.
pub(crate) fn write(report: &BenchReport, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "{HEAD}\r\n")?;
    for stage in &report.stages {
        for trial in &stage.trials {
            let name = labels::stage(stage.stage);
            lines("stage", "", name, &trial.setting, &trial.samples, out)?;
        }
    }
    for state in &report.states {
        let name = labels::state(state.state);
        for ceiling in &state.ceilings {
            let stage = labels::stage(ceiling.stage);
            lines("ceiling", name, stage, &ceiling.setting, &ceiling.samples, out)?;
            lines(
                "own",
                name,
                stage,
                ceiling.own_setting.as_ref().unwrap_or(&ceiling.setting),
                &ceiling.own_samples,
                out,
            )?;
        }
        for (round, &seconds) in state.opening_seconds.iter().enumerate() {
            let (sample, stage) = (Sample { bytes: 0, seconds }, labels::stage(BenchStage::Opening));
            let line = Line { kind: "opening", state: name, stage, setting: None, round, sample, setup_seconds: None };
            write_line(&line, out)?;
        }
        for (round, load) in state.loads.iter().enumerate() {
            let sample = Sample { bytes: load.report.bytes, seconds: load.seconds };
            let setup_seconds = Some(load.setup_seconds);
            let line = Line { kind: "load", state: name, stage: "", setting: None, round, sample, setup_seconds };
            write_line(&line, out)?;
        }
    }
    Ok(())
}

fn lines(
    kind: &str,
    state: &str,
    stage: &str,
    setting: &Setting,
    samples: &[Sample],
    out: &mut dyn Write,
) -> io::Result<()> {
    let setting = Some(setting);
    samples.iter().enumerate().try_for_each(|(round, &sample)| {
        write_line(&Line { kind, state, stage, setting, round, sample, setup_seconds: None }, out)
    })
}

fn write_line(line: &Line<'_>, out: &mut dyn Write) -> io::Result<()> {
    let of_setting = |of: &dyn Fn(&Setting) -> String| line.setting.map_or(String::new(), of);
    let rate = (line.sample.bytes > 0).then(|| line.sample.rate());
    let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
    let fields = [
        line.kind.to_owned(),
        line.state.to_owned(),
        quoted(line.stage),
        of_setting(&|setting| quoted(&setting.way)),
        of_setting(&|setting| setting.block_bytes.to_string()),
        of_setting(&|setting| setting.at_once.to_string()),
        (line.round + 1).to_string(),
        line.sample.bytes.to_string(),
        number(Some(line.sample.seconds)),
        number(rate),
        number(line.setup_seconds),
    ];
    write!(out, "{}\r\n", fields.join(","))
}

fn quoted(field: &str) -> String {
    let needs = field.contains([',', '"', '\r', '\n']);
    if needs { format!("\"{}\"", field.replace('"', "\"\"")) } else { field.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn every_sample_is_a_line_and_every_line_has_all_fields() {
        let report = sample::report();
        let mut out = Vec::new();
        write(&report, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let trials: usize = report.stages.iter().flat_map(|stage| &stage.trials).map(|it| it.samples.len()).sum();
        let ceilings: usize = report.states.iter().flat_map(|state| &state.ceilings).map(|it| it.samples.len()).sum();
        let own: usize = report.states.iter().flat_map(|state| &state.ceilings).map(|it| it.own_samples.len()).sum();
        let loads: usize = report.states.iter().map(|state| state.loads.len()).sum();
        let opening: usize = report.states.iter().map(|state| state.opening_seconds.len()).sum();
        assert!(own > 0 && opening == loads);
        assert_eq!(text.matches("\r\n").count(), 1 + trials + ceilings + own + opening + loads);
        let commas = HEAD.matches(',').count();
        for line in text.lines() {
            let outside: String = line.split('"').step_by(2).collect();
            assert_eq!(outside.matches(',').count(), commas, "{line}");
        }
        assert!(text.contains("\r\nstage,,storage,\"O_DIRECT, io_uring\",131072,1,1,536870912,"), "{text}");
        assert!(text.contains("\r\nload,cold,,,,,1,536870912,0."), "{text}");
        assert!(text.contains("\r\nown,cold,storage,\"O_DIRECT, threads\","), "{text}");
        assert!(text.contains("\r\nopening,cold,opening and planning,,,,1,0,0.002,,\r\n"), "{text}");
        assert!(text.contains("\r\nstage,,driver's context,cuCtxCreate,0,1,1,0,0.12,,\r\n"), "{text}");
    }

    #[test]
    fn fields_are_quoted_where_they_need_it() {
        assert_eq!((quoted("a").as_str(), quoted("a,\"b\"").as_str()), ("a", "\"a,\"\"b\"\"\""));
    }
}
