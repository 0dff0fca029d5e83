//! Modules and kernels: PTX text, run by the interpreter in stream order, its accesses logged byte by byte.
//!
//! Only PTX can run here: machine code (cubin, fatbin) needs a GPU and is refused. What a kernel touches is known after
//! it ran; until then it holds every allocation that one of its parameters points into. A byte that it reads must have
//! been written before the launch: a kernel that reads back what it wrote itself to fresh memory is reported as well,
//! since an atomic operation on a counter that nobody set to zero looks the same.

use std::ffi::{CStr, c_char, c_void};
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule, CUresult};

use crate::address::Alias;
use crate::clock::{Access, Mode, StreamId};
use crate::config::Order;
use crate::footprint::Footprint;
use crate::handle::{Seen, Sort};
use crate::ptx;
use crate::report::Kind;
use crate::state::{self, Answer, Guard, State};
use crate::stream::Operation;
use crate::work::Work;

/// Shared memory that a launch may ask for without asking for more first.
const SHARED_LIMIT: u32 = 48 << 10;

/// A loaded module.
pub(crate) struct Loaded {
    module: Arc<ptx::Module>,
    pub(crate) device: usize,
}

/// A function of a module.
#[derive(Clone)]
pub(crate) struct Function {
    module: Arc<ptx::Module>,
    of: u64,
    index: usize,
    device: usize,
}

/// One launch.
pub(crate) struct Run {
    module: Arc<ptx::Module>,
    index: usize,
    parameters: Vec<u8>,
    shape: Shape,
}

/// The grid of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

impl Shape {
    /// The limits that all devices since compute capability 3.0 have.
    fn is_valid(&self) -> bool {
        let within = |sizes: [u32; 3], limits: [u32; 3]| {
            sizes.iter().zip(limits).all(|(&size, limit)| size > 0 && size <= limit)
        };
        let threads: u64 = self.block.iter().map(|&size| u64::from(size)).product();
        let blocks = within(self.block, [1024, 1024, 64]) && threads <= 1024;
        within(self.grid, [i32::MAX as u32, 65535, 65535]) && blocks && self.shared_bytes <= SHARED_LIMIT
    }
}

/// Takes a module's text from the program's pointer.
///
/// # Safety
/// `image` points at PTX text that ends in NUL, or at a cubin or fatbin.
pub(crate) unsafe fn load(state: &mut State, device: usize, image: *const c_void) -> Answer<u64> {
    if image.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: text has at least its NUL; of a binary the four bytes of its magic number exist.
    let head: Vec<u8> = (0..4).map(|i| unsafe { *image.cast::<u8>().add(i) }).take_while(|&byte| byte != 0).collect();
    if head == *b"\x7fELF" || head == [0x50, 0xED, 0x55, 0xBA] {
        let text = "cuModuleLoadData: machine code needs a GPU; the double runs PTX";
        return state.refuse(Kind::Unsupported, text, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
    let text = text.to_str().map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    let module = state.compile(text)?;
    let number = state.handles.fresh();
    state.modules.insert(number, Loaded { module: Arc::new(module), device });
    Ok(number)
}

/// Queues a launch. `parameters` has a pointer for each parameter.
///
/// # Safety
/// Each pointer is valid for the size that the PTX gives its parameter.
pub(crate) unsafe fn launch(
    mut state: Guard,
    function: Function,
    id: StreamId,
    shape: Shape,
    parameters: *const *mut c_void,
) -> Answer {
    let stream_device = state.streams.get(&id).map_or(0, |stream| stream.device);
    if stream_device != function.device {
        let text = format!("cuLaunchKernel: a function of device {} on a stream of {stream_device}", function.device);
        return state.refuse(Kind::WrongContext, &text, CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    if !shape.is_valid() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let kernel = &function.module.kernels()[function.index];
    if parameters.is_null() && !kernel.parameters.is_empty() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let mut bytes = vec![0_u8; kernel.parameter_bytes];
    for (position, parameter) in kernel.parameters.iter().enumerate() {
        let target = bytes.get_mut(parameter.offset..parameter.offset + parameter.bytes);
        let Some(target) = target else { return Err(CUresult::CUDA_ERROR_INVALID_PTX) };
        // SAFETY: the caller's promise.
        let source = unsafe { *parameters.add(position) };
        if source.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(source.cast::<u8>(), target.as_mut_ptr(), target.len()) };
    }
    let holds = state.pointed_at(kernel, &bytes);
    let label = format!("kernel {}", kernel.name);
    let run = Run { module: Arc::clone(&function.module), index: function.index, parameters: bytes, shape };
    let seq = state.enqueue(id, &label, holds, Vec::new(), Work::Kernel(Box::new(run)));
    let clock = state.streams.get(&id).map(|stream| Arc::new(stream.clock.clone())).unwrap_or_default();
    state.log.expect(id, seq, clock);
    Ok(())
}

/// Runs a kernel on its stream's thread.
pub(crate) fn execute(state: Guard, id: StreamId, device: usize, operation: &Operation, run: &Run) -> Guard {
    let order = match state.config.thread_order {
        Order::Forward => ptx::Order::Forward,
        Order::Reverse => ptx::Order::Reverse,
    };
    let mut memory = Memory { alias: state.space.alias(), device, held: Vec::new() };
    let epoch = state.epoch;
    drop(state);
    let kernel = &run.module.kernels()[run.index];
    let launch = ptx::Launch {
        parameters: &run.parameters,
        grid: run.shape.grid,
        block: run.shape.block,
        shared_bytes: run.shape.shared_bytes,
        order,
    };
    let outcome = ptx::run(kernel, &launch, &mut memory);
    let mut state = state::lock();
    if state.epoch != epoch {
        return state;
    }
    match outcome {
        Ok(touched) => state.log_kernel(id, operation, touched),
        Err(trap) => {
            let at = trap.address.map_or_else(String::new, |address| format!(" (address {address:#x})"));
            state.report(Kind::Kernel, &format!("{}: {}{at}", operation.label, trap.message));
            state.fail(device, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }
    state.log.arrived(id, operation.seq);
    memory.held.iter().for_each(|&page| state.drop_pages(page));
    state.stats.kernels += 1;
    state
}

/// Device memory as the interpreter sees it.
struct Memory {
    alias: Alias,
    device: usize,
    held: Vec<u64>,
}

impl ptx::DeviceMemory for Memory {
    fn allocation(&mut self, address: u64) -> Option<Range<u64>> {
        let mut state = state::lock();
        if let Some((base, pin)) = state.pin_at(address) {
            return Some(base..base + pin.bytes);
        }
        let base = state.mapped_around(&(address..address.checked_add(1)?))?;
        let allocation = state.allocations.get(&base).filter(|one| one.device == self.device)?;
        let range = base..base + allocation.bytes;
        if !self.held.contains(&base) {
            self.held.push(base);
            state.hold_pages(base);
        }
        Some(range)
    }

    fn host(&self, address: u64) -> *mut u8 {
        self.alias.bytes(address)
    }
}

impl State {
    fn compile(&mut self, text: &str) -> Answer<ptx::Module> {
        let directive = |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name)).map(str::trim);
        let Some(version) = directive(".version").and_then(|value| value.split_once('.')) else {
            return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
        };
        if driver_for(version).is_none_or(|needed| needed > self.config.driver_version) {
            return Err(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        }
        let (major, minor) = self.config.compute;
        let target = directive(".target").and_then(|value| value.strip_prefix("sm_"));
        let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<i32>().ok();
        if target.and_then(digits).is_some_and(|target| target > major * 10 + minor) {
            return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        match ptx::Module::parse(text) {
            Ok(module) => Ok(module),
            Err(message) => self.refuse(Kind::Ptx, &message, CUresult::CUDA_ERROR_INVALID_PTX),
        }
    }

    /// The module of a handle.
    pub(crate) fn module(&mut self, handle: CUmodule, call: &str) -> Answer<u64> {
        match self.handles.number(Sort::Module, handle) {
            Seen::Number(number) if self.modules.contains_key(&number) => Ok(number),
            Seen::Stale => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
            _ => {
                let text = format!("{call}: {handle:?} is no module, or one that was unloaded");
                self.refuse(Kind::BadHandle, &text, CUresult::CUDA_ERROR_INVALID_HANDLE)
            }
        }
    }

    /// Forgets a module and its functions; launches that are queued keep it alive.
    pub(crate) fn unload(&mut self, number: u64) {
        self.modules.remove(&number);
        self.functions.retain(|_, function| function.of != number);
    }

    /// The number of a new handle of a module's function.
    pub(crate) fn find_function(&mut self, of: u64, name: &str) -> Answer<u64> {
        let loaded = self.modules.get(&of).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let index = loaded.module.kernel(name).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let function = Function { module: Arc::clone(&loaded.module), of, index, device: loaded.device };
        let number = self.handles.fresh();
        self.functions.insert(number, function);
        Ok(number)
    }

    /// The function of a handle.
    pub(crate) fn function(&mut self, handle: CUfunction, call: &str) -> Answer<Function> {
        let seen = self.handles.number(Sort::Function, handle);
        if seen == Seen::Stale {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let Seen::Number(number) = seen else {
            let text = format!("{call}: {handle:?} is no function");
            return self.refuse(Kind::BadHandle, &text, CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        match self.functions.get(&number) {
            Some(function) => Ok(function.clone()),
            None => {
                let text = format!("{call}: a function of a module that was unloaded");
                self.refuse(Kind::BadHandle, &text, CUresult::CUDA_ERROR_INVALID_HANDLE)
            }
        }
    }

    /// The allocations that parameters of 8 bytes point into.
    fn pointed_at(&self, kernel: &ptx::Kernel, bytes: &[u8]) -> Vec<(Footprint, Mode)> {
        let words = kernel.parameters.iter().filter(|parameter| parameter.bytes == 8);
        let words = words.filter_map(|parameter| bytes.get(parameter.offset..parameter.offset + 8)?.try_into().ok());
        let allocations = words.filter_map(|word| self.allocation_at(u64::from_le_bytes(word)));
        allocations.map(|(base, allocation)| (Footprint::flat(base, allocation.bytes), Mode::Hold)).collect()
    }

    /// Enters what a kernel touched into the log.
    fn log_kernel(&mut self, id: StreamId, operation: &Operation, touched: ptx::Touched) {
        for range in touched.reads.iter().filter(|range| !range.is_empty()) {
            self.check_written(&Footprint::flat(range.start, range.end - range.start), &operation.label);
        }
        for range in touched.writes.iter().filter(|range| !range.is_empty()) {
            self.mark_written(&Footprint::flat(range.start, range.end - range.start));
        }
        for (ranges, mode) in [(touched.reads, Mode::Read), (touched.writes, Mode::Write)] {
            let footprint = Footprint::list(ranges);
            if footprint.bounds().is_empty() {
                continue;
            }
            let (clock, label) = (Arc::clone(&operation.clock), Arc::clone(&operation.label));
            self.access(Access { footprint, mode, stream: id, seq: operation.seq, clock, label });
        }
    }
}

/// The driver that a PTX version needs: 8.0 came with 12.0, 9.0 with 13.0.
fn driver_for((major, minor): (&str, &str)) -> Option<i32> {
    let (major, minor): (i32, i32) = (major.trim().parse().ok()?, minor.trim().parse().ok()?);
    Some((major + 4) * 1000 + minor * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_versions_need_drivers() {
        assert_eq!(driver_for(("8", "0")), Some(12000));
        assert_eq!(driver_for(("8", "4")), Some(12040));
        assert_eq!(driver_for(("9", "0")), Some(13000));
        assert_eq!(driver_for(("x", "0")), None);
    }

    #[test]
    fn shapes_have_limits() {
        let shape = |grid, block| Shape { grid, block, shared_bytes: 0 }.is_valid();
        assert!(shape([70_000, 1, 1], [1024, 1, 1]));
        assert!(!shape([1, 70_000, 1], [1, 1, 1]));
        assert!(!shape([1, 1, 1], [1024, 2, 1]));
        assert!(!shape([0, 1, 1], [1, 1, 1]));
    }
}
