//! `vramp completions` and `vramp man`: made from the arguments, so that they cannot be out of date.

use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use super::args::Arguments;
use super::output::{Failure, Output};

/// Prints the completion script of a shell.
pub(crate) fn completions(shell: Shell, output: Output) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "vramp", &mut script);
    output.text(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of the program, or writes one page a command into a folder.
pub(crate) fn man(dir: Option<&Path>, output: Output) -> Result<(), Failure> {
    // No page is written for `help`, so none may point to it.
    let command = Arguments::command().disable_help_subcommand(true);
    let Some(dir) = dir else {
        let page = page(command).map_err(|source| failed("cannot make the manual page", None, source))?;
        return output.text(&String::from_utf8_lossy(&page));
    };
    let write = |source| failed(&format!("cannot write manual pages to {}", dir.display()), Some(dir), source);
    std::fs::create_dir_all(dir).map_err(write)?;
    clap_mangen::generate_to(command, dir).map_err(write)
}

fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    Ok(page)
}

fn failed(what: &str, path: Option<&Path>, source: io::Error) -> Failure {
    Failure::System { what: what.to_owned(), path: path.map(Path::to_owned), source }
}
