//! Launches: blocks one after another, the threads of a block in turn, barriers and shuffles where they meet.

use super::execute::{Counter, Fault, Stop, Surroundings, advance};
use super::instruction::{Operation, Shuffle, ShuffleMode};
use super::memory::{DeviceMemory, Global};
use super::parse::GARBAGE;
use super::{Kernel, Launch, Order, Special, Touched, Trap};

const LANES: usize = 32;

/// Runs a launch to its end and says which bytes it touched, or traps at the first thing that is wrong.
pub fn run(kernel: &Kernel, launch: &Launch<'_>, memory: &mut dyn DeviceMemory) -> Result<Touched, Trap> {
    check(kernel, launch)?;
    let mut global = Global::new(memory);
    let mut shared = vec![0; kernel.shared_bytes + launch.shared_bytes as usize];
    let mut windows = Windows::new(kernel, launch);
    for z in 0..launch.grid[2] {
        for y in 0..launch.grid[1] {
            for x in 0..launch.grid[0] {
                shared.fill(GARBAGE as u8);
                let (parameters, shared, global) = (launch.parameters, &mut shared[..], &mut global);
                let around = Surroundings { kernel, parameters, shared, global };
                Block { launch, around, windows: &mut windows, index: [x, y, z], threads: Vec::new() }.run()?;
            }
        }
    }
    Ok(global.touched())
}

/// What a driver refuses before anything runs.
fn check(kernel: &Kernel, launch: &Launch<'_>) -> Result<(), Trap> {
    let refuse = |what: String| Err(Trap { address: None, message: format!("kernel {}: {what}", kernel.name) });
    let (needed, given) = (kernel.parameter_bytes, launch.parameters.len());
    if given < needed {
        return refuse(format!("{given} bytes of parameters, {needed} are needed"));
    }
    let most = kernel.max_threads.unwrap_or(1024).min(1024);
    let threads = launch.block.iter().try_fold(1u32, |product, size| product.checked_mul(*size));
    if !threads.is_some_and(|threads| (1..=most).contains(&threads)) {
        return refuse(format!("a block of {:?} threads, at most {most} are possible", launch.block));
    }
    if launch.grid.contains(&0) {
        return refuse(format!("a grid of {:?} blocks", launch.grid));
    }
    Ok(())
}

/// Registers of threads that have begun and not ended. A place is used again as soon as its thread ends, which keeps those of
/// threads that never wait in the processor's cache.
struct Windows<'a> {
    kernel: &'a Kernel,
    launch: &'a Launch<'a>,
    all: Vec<u64>,
    free: Vec<usize>,
}

impl<'a> Windows<'a> {
    fn new(kernel: &'a Kernel, launch: &'a Launch<'a>) -> Windows<'a> {
        Windows { kernel, launch, all: Vec::new(), free: Vec::new() }
    }

    fn len(&self) -> usize {
        self.kernel.registers.initial.len()
    }

    fn get(&mut self, window: usize) -> &mut [u64] {
        let len = self.len();
        &mut self.all[window * len..][..len]
    }

    /// A window as a thread finds it.
    fn open(&mut self, thread: usize, block: [u32; 3]) -> usize {
        let len = self.len();
        let window = self.free.pop().unwrap_or_else(|| {
            self.all.resize(self.all.len() + len, 0);
            self.all.len() / len - 1
        });
        let (kernel, launch) = (self.kernel, self.launch);
        let registers = self.get(window);
        registers.copy_from_slice(&kernel.registers.initial);
        let place = place_of(thread, launch.block);
        for (register, special) in &kernel.registers.special {
            registers[*register as usize] = u64::from(match *special {
                Special::Thread(dimension) => place[dimension],
                Special::BlockSize(dimension) => launch.block[dimension],
                Special::Block(dimension) => block[dimension],
                Special::GridSize(dimension) => launch.grid[dimension],
                Special::Lane => (thread % LANES) as u32,
            });
        }
        window
    }
}

fn place_of(thread: usize, block: [u32; 3]) -> [u32; 3] {
    let thread = thread as u32;
    [thread % block[0], thread / block[0] % block[1], thread / (block[0] * block[1])]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    Runs,
    Waits(Stop),
    Ended,
}

#[derive(Debug, Clone, Copy)]
struct Thread {
    state: State,
    counter: Counter,
    window: usize,
}

struct Block<'a, 'b> {
    launch: &'a Launch<'a>,
    around: Surroundings<'a, 'b>,
    windows: &'a mut Windows<'b>,
    index: [u32; 3],
    threads: Vec<Thread>,
}

impl Block<'_, '_> {
    /// In rounds: every thread that can run does so until it stops, then those that wait for each other are let go.
    fn run(&mut self) -> Result<(), Trap> {
        let count = self.launch.block.iter().product::<u32>() as usize;
        self.threads = vec![Thread { state: State::New, counter: Counter::default(), window: 0 }; count];
        loop {
            for turn in 0..count {
                let thread = if self.launch.order == Order::Forward { turn } else { count - 1 - turn };
                if matches!(self.threads[thread].state, State::New | State::Runs) {
                    self.advance(thread)?;
                }
            }
            let mut moved = false;
            for warp in (0..count).step_by(LANES) {
                moved |= self.exchange(warp..(warp + LANES).min(count))?;
            }
            if !moved && !self.release()? {
                return Ok(());
            }
        }
    }

    fn advance(&mut self, index: usize) -> Result<(), Trap> {
        let mut thread = self.threads[index];
        if thread.state == State::New {
            thread.window = self.windows.open(index, self.index);
        }
        let registers = self.windows.get(thread.window);
        let result = advance(&mut thread.counter, registers, &mut self.around);
        let stop = result.map_err(|fault| self.trap(index, thread.counter.at, fault))?;
        thread.state = if stop == Stop::End { State::Ended } else { State::Waits(stop) };
        if stop == Stop::End {
            self.windows.free.push(thread.window);
        }
        self.threads[index] = thread;
        Ok(())
    }

    /// Lets the threads go that wait at the barrier, if all that have not ended do. `false` if all have ended.
    fn release(&mut self) -> Result<bool, Trap> {
        let mut waiting = (0..self.threads.len()).filter(|thread| self.threads[*thread].state != State::Ended);
        let Some(first) = waiting.next() else { return Ok(false) };
        let stand = |thread: usize| (self.threads[thread].state, self.threads[thread].counter.at);
        if let Some(other) = waiting.find(|thread| stand(*thread) != stand(first)) {
            let (other_at, first_at) = (self.waits_at(other), self.waits_at(first));
            let elsewhere = self.statement(other_at);
            let message = format!("waits for ever, thread {other} waits elsewhere: {elsewhere}");
            return Err(self.trap(first, first_at, Fault::new(message)));
        }
        if self.threads[first].state != State::Waits(Stop::Barrier) {
            return Err(self.trap(first, self.waits_at(first), Fault::new("waits for ever")));
        }
        for thread in &mut self.threads {
            if thread.state != State::Ended {
                thread.state = State::Runs;
            }
        }
        Ok(true)
    }

    /// The instruction at which a thread waits.
    fn waits_at(&self, thread: usize) -> usize {
        let Thread { state, counter, .. } = self.threads[thread];
        counter.at - usize::from(state == State::Waits(Stop::Barrier))
    }

    /// Exchanges values between the lanes of a warp whose shuffle all its members have reached. Whether any did.
    fn exchange(&mut self, warp: std::ops::Range<usize>) -> Result<bool, Trap> {
        let waits = |thread: &Thread| thread.state == State::Waits(Stop::Shuffle);
        let mut moved = false;
        for first in warp.clone() {
            if !waits(&self.threads[first]) {
                continue;
            }
            let at = self.threads[first].counter.at;
            let Operation::Shuffle(shuffle) = self.around.kernel.code[at].operation else { continue };
            let members = self.value(first, shuffle.members);
            let member = |thread: &usize| members >> (thread - warp.start) & 1 == 1;
            if !member(&first) {
                return Err(self.trap(
                    first,
                    at,
                    Fault::new(format!("a lane that is not in its own mask {members:#x}")),
                ));
            }
            let lanes: Vec<usize> = warp.clone().filter(member).collect();
            if let Some(ended) = lanes.iter().find(|lane| self.threads[**lane].state == State::Ended) {
                return Err(self.trap(
                    first,
                    at,
                    Fault::new(format!("a shuffle with thread {ended}, which has ended")),
                ));
            }
            let together = |lane: &usize| waits(&self.threads[*lane]) && self.threads[*lane].counter.at == at;
            if lanes.iter().all(together) {
                self.shuffle(shuffle, warp.start, &lanes);
                moved = true;
            }
        }
        Ok(moved)
    }

    fn value(&mut self, thread: usize, register: u32) -> u64 {
        let window = self.threads[thread].window;
        self.windows.get(window)[register as usize] & 0xffff_ffff
    }

    fn shuffle(&mut self, shuffle: Shuffle, start: usize, lanes: &[usize]) {
        let mut results = Vec::with_capacity(lanes.len());
        for &thread in lanes {
            let (by, clamp) = (self.value(thread, shuffle.lane), self.value(thread, shuffle.clamp));
            let from = source_lane(shuffle.mode, (thread - start) as u64, by, clamp);
            let source = from.map_or(thread, |lane| start + lane);
            // What a lane that takes no part would give is not defined.
            let value = if lanes.contains(&source) { self.value(source, shuffle.value) } else { GARBAGE & 0xffff_ffff };
            results.push((thread, value, from.is_some()));
        }
        for (thread, value, in_range) in results {
            let Thread { window, .. } = self.threads[thread];
            let registers = self.windows.get(window);
            registers[shuffle.target as usize] = value;
            if let Some(flag) = shuffle.in_range {
                registers[flag as usize] = u64::from(in_range);
            }
            self.threads[thread].counter.at += 1;
            self.threads[thread].state = State::Runs;
        }
    }

    fn statement(&self, at: usize) -> String {
        let kernel = self.around.kernel;
        let statement = &kernel.statements[kernel.code[at].statement as usize];
        format!("PTX line {} `{}`", statement.line, statement.text)
    }

    fn trap(&self, thread: usize, at: usize, fault: Fault) -> Trap {
        let ([x, y, z], [i, j, k]) = (self.index, place_of(thread, self.launch.block));
        let (name, statement) = (&self.around.kernel.name, self.statement(at));
        let what = fault.message;
        let message = format!("kernel {name}, block ({x}, {y}, {z}), thread ({i}, {j}, {k}), {statement}: {what}");
        Trap { address: fault.address, message }
    }
}

/// The lane to take from; `None` if it is out of range, where a lane keeps its own value.
fn source_lane(mode: ShuffleMode, lane: u64, by: u64, clamp: u64) -> Option<usize> {
    let (lane, by) = (lane as i64, (by & 31) as i64);
    let (bound, segment) = ((clamp & 31) as i64, (clamp >> 8 & 31) as i64);
    let (least, most) = (lane & segment, (lane & segment) | (bound & !segment));
    let (source, in_range) = match mode {
        ShuffleMode::Up => (lane - by, lane - by >= most),
        ShuffleMode::Down => (lane + by, lane + by <= most),
        ShuffleMode::Butterfly => (lane ^ by, lane ^ by <= most),
        ShuffleMode::Index => (least | (by & !segment), least | (by & !segment) <= most),
    };
    in_range.then(|| usize::try_from(source).ok()).flatten()
}
