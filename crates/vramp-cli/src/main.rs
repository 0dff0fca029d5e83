//! The program `vramp`: one file a command, from what was typed ([`args`]) to the options of the library.
//!
//! Only this package reads environment variables, writes to the standard streams and takes signals. A command returns what it
//! did or a [`Failure`]; this file turns that into the exit status. It never ends by a panic's status (101): a panic is caught,
//! called a bug of vramp, and ends with 5.

mod args;
mod audit;
mod bench;
mod companions;
mod convert;
mod demo;
mod digests;
mod documents;
mod estimate;
mod flags;
mod fleet;
mod inspect;
mod interrupt;
mod limits;
mod listing;
mod load;
mod options;
mod output;
mod plan;
mod progress;
mod report;
mod screen;
mod strict;
mod text;
mod trace;
mod tree;
mod values;
mod view;
mod whole_file;
mod wrap;

use std::any::Any;
use std::ffi::OsStr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;

use clap::Parser;
use clap::error::ErrorKind;
use vramp::Error;
use vramp::os;

use args::{Arguments, Command, Speech};
use interrupt::Interrupt;
use output::{Failure, INTERNAL_ERROR, Level, Output};

/// What the first panic said, on whichever thread.
static PANIC: OnceLock<String> = OnceLock::new();

/// What is left to say where even a small allocation or a thread's stack is not to be had.
const ABORTED: &str = "error: out of memory: the program could not go on\n  because: a limit on memory (ulimit -v, a container's) \
                       or the machine's own was reached; give it more, or load less\n";
const ABORTED_JSON: &str = "{\"error\":{\"kind\":\"out_of_memory\",\"message\":\"out of memory: the program could not go on\",\
                            \"path\":null,\"tensor\":null,\"causes\":[\"a limit on memory or the machine's own was reached\"]}}\n";

fn main() {
    let code = exit_status();
    // Freeing gigabytes piece by piece costs a user time and gives nothing: the process ends with everything it holds.
    std::process::exit(code.into())
}

/// Runs the program; returns its exit status.
fn exit_status() -> u8 {
    panic::set_hook(Box::new(|info| {
        let _ = PANIC.set(info.to_string());
    }));
    if os::is_memory_limited() {
        os::share_one_arena();
    }
    os::report_aborts(if asked_for_json() { ABORTED_JSON } else { ABORTED }, INTERNAL_ERROR.into());
    os::let_large_writes_fail(); // else the kernel ends the program in the middle of a save, and nothing is removed
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return not_understood(&error),
    };
    let output = Output { json: arguments.command.wants_json(), level: level(&arguments.speech) };
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| run(&arguments.command, output)));
    interrupt::nobody_else_ends_the_process();
    match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => {
            match (&failure, PANIC.get()) {
                (Failure::Library(error @ Error::Poisoned { .. }), Some(panic)) => {
                    output.error(error.kind().as_str(), &error.to_string(), std::slice::from_ref(panic), None, None);
                }
                _ => output.failure(&failure, arguments.command.path()),
            }
            failure.exit_code()
        }
        Err(payload) => internal_error(output, &*payload),
    }
}

fn run(command: &Command, output: Output) -> Result<(), Failure> {
    match command {
        Command::Completions { shell } => documents::completions(*shell, output),
        Command::Man { dir } => documents::man(dir.as_deref(), output),
        Command::Estimate(args) => estimate::run(args, output),
        Command::Inspect(args) => inspect::run(args, output, &Interrupt::install(output)),
        Command::Load(args) => load::run(args, output, &Interrupt::install(output)),
        Command::Audit(args) => audit::run(args, output, &Interrupt::install(output)),
        Command::Verify(args) => strict::run(args, output, &Interrupt::install(output)),
        Command::Bench(args) => bench::run(args, output, &Interrupt::install(output)),
        Command::Convert(args) => convert::run(args, output, &Interrupt::install(output)),
        Command::Demo(args) => demo::run(args, output, &Interrupt::install(output)),
    }
}

/// Help, version, or wrong usage, which is one line of JSON where JSON was asked for.
fn not_understood(error: &clap::Error) -> u8 {
    let is_answer = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if is_answer {
        return answer(&error.render().ansi().to_string());
    }
    if !asked_for_json() {
        // A stderr that is gone leaves nobody to tell.
        let _ = error.print();
    } else {
        let message = error.to_string();
        let message = message.trim().strip_prefix("error: ").unwrap_or(message.trim());
        Output { json: true, ..Output::default() }.error("usage", message, &[], None, None);
    }
    2
}

/// Prints help or the version, which are results like others: what cannot be written is a failure.
fn answer(text: &str) -> u8 {
    let output = Output::default();
    output.text(text).map_or_else(
        |failure| {
            output.failure(&failure, None);
            failure.exit_code()
        },
        |()| 0,
    )
}

fn level(speech: &Speech) -> Level {
    match speech {
        Speech { quiet: true, .. } => Level::Quiet,
        Speech { verbose: true, .. } => Level::Verbose,
        _ => Level::Usual,
    }
}

fn asked_for_json() -> bool {
    std::env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == OsStr::new("--json"))
}

fn internal_error(output: Output, payload: &dyn Any) -> u8 {
    let said = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let said = said.or_else(|| payload.downcast_ref::<String>().cloned());
    let said = PANIC.get().cloned().or(said).unwrap_or_else(|| "a panic without words".to_owned());
    output.error("internal", "internal error: this is a bug of vramp, please report it", &[said], None, None);
    INTERNAL_ERROR
}
