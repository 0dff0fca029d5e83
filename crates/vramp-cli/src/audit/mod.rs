//! `vramp audit`: what a program that unpickles a file would run, said without running it.
//!
//! The findings are the library's; here they become text, JSON or SARIF, and an exit status. The word for a file without findings is
//! what was checked, never that it is harmless. `files` says which files a folder has and what of them is told.

mod files;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};
use vramp::checkpoint::torch::audit::{Audit, NamedGlobal, OfType, Verdict};
use vramp::checkpoint::{Finding, Severity};

use self::files::{Looked, Unreadable};
use super::args::{AuditArgs, AuditFormat, FailOn};
use super::interrupt::Interrupt;
use super::output::{Failure, Output, even_unheard};
use super::text::{self, Align, BAD, BOLD, DIM, GOOD, Table, WARN};

/// All files together.
#[derive(Serialize)]
struct Summary<'a> {
    path: String,
    verdict: Verdict,
    format: &'a str,
    meaning: &'static str,
    globals: Vec<&'a NamedGlobal>,
    findings: Vec<Value>,
    tensors: BTreeMap<&'a str, OfType>,
    files: &'a [Audit],
    /// Files of a folder that neither are nor hold a pickle, and are no weights.
    others: u64,
    unreadable: &'a [Unreadable],
    /// Files and folders that vanished while the folder was looked through.
    vanished: u64,
}

pub(crate) fn run(args: &AuditArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let format = format(args)?;
    let mut looked = files::look(&args.path, interrupt)?;
    let verdict = looked.audits.iter().map(|audit| audit.verdict).max().unwrap_or(Verdict::Clean);
    even_unheard(match format {
        AuditFormat::Json => output.json(&summary(&args.path, verdict, &looked)),
        AuditFormat::Sarif => output.json(&sarif(&looked)),
        AuditFormat::Text => output.text(&report(&looked)),
    })?;
    if !looked.unreadable.is_empty() {
        return Err(looked.unreadable.swap_remove(0).failure);
    }
    let fails = match args.fail_on {
        FailOn::Notice => verdict >= Verdict::Notice,
        FailOn::Suspicious => verdict >= Verdict::Suspicious,
        FailOn::Dangerous => verdict >= Verdict::Dangerous,
    };
    match verdict {
        Verdict::Malformed => Err(Failure::Refused),
        _ if fails => Err(Failure::CheckFailed),
        _ => Ok(()),
    }
}

/// The one format that was asked for.
fn format(args: &AuditArgs) -> Result<AuditFormat, Failure> {
    match (args.json, args.format) {
        (true, None | Some(AuditFormat::Json)) => Ok(AuditFormat::Json),
        (true, Some(AuditFormat::Text | AuditFormat::Sarif)) => Err(Failure::Usage(
            "--json and --format ask for two formats: leave --json out, or say --format json".to_owned(),
        )),
        (false, format) => Ok(format.unwrap_or(AuditFormat::Text)),
    }
}

fn meaning(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Clean | Verdict::Notice => "contains only allow-listed constructs",
        Verdict::Malformed => "damaged, or against the rules of its format",
        Verdict::Suspicious => "holds what no honest writer of weights needs",
        Verdict::Dangerous => "names what is known to run code",
        _ => "not known to this program",
    }
}

fn summary<'a>(path: &Path, verdict: Verdict, looked: &'a Looked) -> Summary<'a> {
    let audits = &looked.audits;
    let mut tensors: BTreeMap<&str, OfType> = BTreeMap::new();
    for (dtype, of_type) in audits.iter().flat_map(|audit| &audit.tensors) {
        let sum = tensors.entry(dtype).or_default();
        sum.tensors += of_type.tensors;
        sum.bytes = sum.bytes.saturating_add(of_type.bytes);
    }
    let finding = |(audit, finding): (&Audit, &Finding)| {
        let mut value = serde_json::to_value(finding).unwrap_or_default();
        if let Some(object) = value.as_object_mut() {
            object.insert("place".into(), place(audit, finding).into());
        }
        value
    };
    let format = match audits.as_slice() {
        [only] => only.format,
        _ => "folder",
    };
    Summary {
        path: path.display().to_string(),
        verdict,
        format,
        meaning: meaning(verdict),
        globals: audits.iter().flat_map(|audit| &audit.globals).collect(),
        findings: all(audits).map(finding).collect(),
        tensors,
        files: audits,
        others: looked.others,
        unreadable: &looked.unreadable,
        vanished: looked.vanished,
    }
}

fn all(audits: &[Audit]) -> impl Iterator<Item = (&Audit, &Finding)> {
    audits.iter().flat_map(|audit| audit.findings.iter().map(move |finding| (audit, finding)))
}

/// `file!member`.
fn place(audit: &Audit, finding: &Finding) -> String {
    let member = finding.member.as_ref().map_or(String::new(), |member| format!("!{member}"));
    format!("{}{member}", audit.path.display())
}

/// Static Analysis Results Interchange Format 2.1.0, for services that show findings beside code.
fn sarif(looked: &Looked) -> Value {
    let audits = &looked.audits;
    let result = |(audit, finding): (&Audit, &Finding)| {
        let level = match finding.severity {
            Severity::Notice => "note",
            Severity::Malformed => "warning",
            _ => "error",
        };
        let position = finding.spot.as_ref().and_then(|spot| spot.position).unwrap_or(0);
        json!({
            "ruleId": finding.rule,
            "level": level,
            "message": {"text": finding.to_string()},
            "locations": [{"physicalLocation": {
                "artifactLocation": {"uri": audit.path.display().to_string()},
                "region": {"byteOffset": position},
            }}],
            "properties": finding,
        })
    };
    let rules: std::collections::BTreeSet<&str> = all(audits).map(|(_, finding)| finding.rule).collect();
    let rules: Vec<Value> = rules.into_iter().map(|rule| json!({"id": rule})).collect();
    let notification = |file: &Unreadable| {
        json!({
            "level": "error",
            "message": {"text": file.why},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": file.path}}}],
        })
    };
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {"name": "vramp", "version": env!("CARGO_PKG_VERSION"), "rules": rules}},
            "invocations": [{
                "executionSuccessful": looked.unreadable.is_empty(),
                "toolExecutionNotifications": looked.unreadable.iter().map(notification).collect::<Vec<_>>(),
            }],
            "results": all(audits).map(result).collect::<Vec<_>>(),
        }],
    })
}

// ---- text

fn report(looked: &Looked) -> String {
    let mut out = String::new();
    let (notes, told): (Vec<&Audit>, Vec<&Audit>) = looked.audits.iter().partition(|audit| is_note(audit));
    told.iter().for_each(|audit| one(audit, &mut out));
    notices(&notes, &mut out);
    if looked.vanished > 0 {
        let files = text::plural(looked.vanished, "file");
        let _ = writeln!(out, "{files} vanished meanwhile and were not looked at");
    }
    if looked.others > 0 {
        let files = text::plural(looked.others, "other file");
        let _ = writeln!(out, "{files} looked at: no weights, and no pickle in them");
    }
    if looked.audits.is_empty() {
        out.push_str("no file here that could hold weights or code\n");
    }
    for file in &looked.unreadable {
        let _ = writeln!(out, "{} {}", text::styled(BAD, "not looked at"), text::escape(&file.why));
    }
    out
}

fn one(audit: &Audit, out: &mut String) {
    let style = match audit.verdict {
        Verdict::Clean => GOOD,
        Verdict::Notice => DIM,
        Verdict::Malformed => WARN,
        _ => BAD,
    };
    let path = text::escape(&audit.path.display().to_string());
    let word = serde_json::to_value(audit.verdict).ok().and_then(|word| word.as_str().map(str::to_owned));
    let verdict = format!("{}: {}", word.unwrap_or_default(), meaning(audit.verdict));
    let _ = writeln!(out, "{}\n{}", text::styled(BOLD, path), text::styled(style, verdict));
    let protocol = audit.protocol.map_or(String::new(), |protocol| format!(", pickle protocol {protocol}"));
    let _ = writeln!(out, "{}{protocol}, checksums {}", audit.format, audit.crc);
    for (dtype, of_type) in &audit.tensors {
        let _ =
            writeln!(out, "{} of {dtype}, {}", text::plural(of_type.tensors, "tensor"), text::decimal(of_type.bytes));
    }
    if !audit.shared.is_empty() {
        let groups = text::plural(audit.shared.len() as u64, "group");
        let _ = writeln!(out, "{groups} of tensors that share a storage");
    }
    if audit.bytes_in_no_tensor > 0 {
        let _ = writeln!(out, "{} of storages in no tensor", text::decimal(audit.bytes_in_no_tensor));
    }
    findings(audit, out);
    globals(audit, out);
    out.push('\n');
}

/// Notices of one kind that are told one by one.
const MOST_NOTICES: usize = 3;

/// Whether there is only one notice to tell of a file, and no more: a folder may have hundreds of these.
fn is_note(audit: &Audit) -> bool {
    let one = matches!(audit.findings.as_slice(), [only] if only.severity == Severity::Notice);
    one && audit.format == "unknown" && audit.globals.is_empty()
}

/// Files with one notice each: those of one kind in a line, where there are many.
fn notices(audits: &[&Audit], out: &mut String) {
    let mut kinds: BTreeMap<&str, Vec<&Audit>> = BTreeMap::new();
    for audit in audits {
        let rule = audit.findings.first().map_or("", |finding| finding.rule);
        kinds.entry(rule).or_default().push(audit);
    }
    for (rule, audits) in kinds {
        if audits.len() <= MOST_NOTICES {
            audits.iter().for_each(|audit| one(audit, out));
            continue;
        }
        let (files, first) = (text::plural(audits.len() as u64, "file"), audits.first());
        let path = first.map_or(String::new(), |audit| text::escape(&audit.path.display().to_string()));
        let what = first.and_then(|audit| audit.findings.first()).map_or(String::new(), ToString::to_string);
        let _ = writeln!(
            out,
            "{}: {files}, the first {path}: {}",
            text::styled(DIM, format!("notice {rule}")),
            text::escape(&what)
        );
    }
}

/// The findings of a file. Notices of one rule are one line where there are many.
fn findings(audit: &Audit, out: &mut String) {
    let notice = |finding: &&Finding| finding.severity == Severity::Notice;
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    audit.findings.iter().filter(notice).for_each(|finding| *counts.entry(finding.rule).or_default() += 1);
    for finding in &audit.findings {
        let count = counts.get(finding.rule).copied().filter(|_| notice(&finding)).unwrap_or(1);
        if count == 0 {
            continue;
        }
        if count > MOST_NOTICES {
            counts.insert(finding.rule, 0);
            let notice = text::styled(DIM, "notice");
            let _ = writeln!(
                out,
                "  {notice} {count} times {}, the first: {}",
                finding.rule,
                text::escape(&finding.to_string())
            );
            continue;
        }
        let style = match finding.severity {
            Severity::Notice => DIM,
            Severity::Malformed => WARN,
            _ => BAD,
        };
        let severity = format!("{:?}", finding.severity).to_lowercase();
        let _ = write!(out, "  {} {}", text::styled(style, severity), text::escape(&finding.to_string()));
        let spot = finding.spot.as_deref();
        if let Some(arguments) = spot.and_then(|spot| spot.arguments.as_deref()) {
            let _ = write!(out, ", called with {}", text::escape(arguments));
        }
        match spot.and_then(|spot| spot.reached) {
            Some(false) => out.push_str(", made and thrown away\n"),
            _ => out.push('\n'),
        }
    }
}

fn globals(audit: &Audit, out: &mut String) {
    if audit.globals.is_empty() {
        return;
    }
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
    table.heading(["global", "times", "class"]);
    for global in &audit.globals {
        let class = serde_json::to_value(global.danger).ok().and_then(|class| class.as_str().map(str::to_owned));
        let name = text::escape(&format!("{}.{}", global.module, global.name));
        table.row([name, text::count(global.count), class.unwrap_or_default()]);
    }
    out.push_str(&table.render());
}
