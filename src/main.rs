//! The program `vramp`: starts a command and turns its outcome into an exit status. The commands are in `cli`.
//!
//! It never ends by a panic's status (101): a panic is caught, said to be a bug of ours, and ends with 5.

mod cli;

fn main() {
    let code = cli::main();
    // Freeing gigabytes piece by piece costs a user time and gives nothing: the process ends with everything it holds.
    std::process::exit(code.into())
}
