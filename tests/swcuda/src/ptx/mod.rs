//! Runs PTX text on the CPU: the very text that ships, one CUDA thread at a time, every access checked.
//!
//! [`Module::parse`] reads the text into instructions (`text` finds the statements, `parse` the declarations, `decode` makes
//! `instruction`s); [`run`] executes a launch (`execute` one thread to its next stop, `warp` blocks with their barriers
//! and shuffles, `memory` the checks).
//!
//! What it has that a GPU has not: bounds to the byte, alignment, a record of the bytes that were touched, a choice of the
//! order in which threads run (a missing barrier shows in one order or the other: run both), garbage instead of zeros in whatever
//! was not written, an end to endless loops, and traps that name the block, the thread and the statement.
//!
//! What it has not: a memory model (each thread's writes are seen at once), more than one thread at a time, speed, floating point
//! beyond what the kernels use. An instruction that it does not know is an error when the text is read, never a guess.

use std::fmt;
use std::ops::Range;

mod decode;
mod execute;
mod instruction;
mod memory;
mod parse;
#[cfg(test)]
mod tests;
mod text;
mod warp;

pub use memory::DeviceMemory;
pub use warp::run;

use instruction::Instruction;

/// Read PTX.
#[derive(Debug)]
pub struct Module {
    isa: (u32, u32),
    kernels: Vec<Kernel>,
}

impl Module {
    /// Reads PTX text. The error names the line and the statement that is wrong or not supported.
    pub fn parse(text: &str) -> Result<Module, String> {
        parse::module(text)
    }

    /// The version of the PTX language that the text asks for: a driver older than it refuses the text.
    pub fn isa(&self) -> (u32, u32) {
        self.isa
    }

    /// The kernels in the order of the text.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The index of the kernel of that name.
    pub fn kernel(&self, name: &str) -> Option<usize> {
        self.kernels.iter().position(|kernel| kernel.name == name)
    }
}

/// One `.entry`.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its parameters in order.
    pub parameters: Vec<Parameter>,
    /// Bytes of all parameters, laid out.
    pub parameter_bytes: usize,
    /// The most threads a block may have, where the text says so (`.maxntid`).
    pub max_threads: Option<u32>,
    /// Bytes of shared memory that the text declares.
    pub shared_bytes: usize,
    code: Vec<Instruction>,
    statements: Vec<Statement>,
    registers: Registers,
}

/// Where a parameter lies in the parameter bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parameter {
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// A statement as it was written, for messages.
#[derive(Debug)]
struct Statement {
    line: u32,
    text: String,
}

/// What a thread's registers hold before its first instruction. Constants and special registers (`%tid.x`) have places among
/// them, so that every operand is an index.
#[derive(Debug, Default)]
struct Registers {
    initial: Vec<u64>,
    special: Vec<(u32, Special)>,
}

/// A special register, by its dimension where it has several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Special {
    Thread(usize),
    BlockSize(usize),
    Block(usize),
    GridSize(usize),
    Lane,
}

/// In which order the threads of a block run, between barriers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Thread 0 first.
    Forward,
    /// Thread 0 last.
    Reverse,
}

impl Order {
    /// Both.
    pub const BOTH: [Order; 2] = [Order::Forward, Order::Reverse];
}

/// One launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The parameters' bytes, laid out as [`Kernel::parameters`] says.
    pub parameters: &'a [u8],
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Bytes of shared memory beyond what the kernel declares.
    pub shared_bytes: u32,
    /// The order of the threads.
    pub order: Order,
}

/// Which bytes of device memory a launch read and wrote: sorted, neighbours merged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Bytes that were read.
    pub reads: Vec<Range<u64>>,
    /// Bytes that were written. Atomic operations read and write.
    pub writes: Vec<Range<u64>>,
}

/// A launch that went wrong. What it had written until then stays written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    /// The address that was to be accessed, if that was what went wrong.
    pub address: Option<u64>,
    /// Kernel, block, thread, PTX statement and what was wrong with it.
    pub message: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Trap {}
