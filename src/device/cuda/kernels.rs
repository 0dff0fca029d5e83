//! The kernels as the driver compiled them, and one typed launch for each.
//!
//! The PTX is part of the program; its sources and what each kernel promises are in `kernels/`. A launch starts work in a
//! stream and returns; what it touches must stay until the stream has passed it. Each kernel has a twin in `convert` or
//! `digest` that gives the same bits.
#![allow(unsafe_code)] // launches code on memory that callers answer for

use std::collections::BTreeMap;
use std::ffi::{CString, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys;

use super::driver::{Refusal, call};
use super::gpu::Bound;
use super::handles::StreamHandle;
use crate::convert::Float;
use crate::device::BlockScale;

macro_rules! modules {
    ($($name:literal)*) => {
        /// The kernels in PTX (ISA 8.0, sm_75), by module, each text ended by a zero: any driver from CUDA 12.0 on compiles
        /// them for any GPU from Turing on.
        const MODULES: &[(&str, &str)] = &[
            $(($name, concat!(include_str!(concat!("../../../kernels/ptx/", $name, ".ptx")), "\0")),)*
        ];
    };
}

modules! {
    "checksum" "move" "convert_bf16" "convert_f16" "convert_f32" "convert_f64" "convert_f8_e4m3" "convert_f8_e4m3fnuz"
    "convert_f8_e5m2" "convert_f8_e5m2fnuz" "convert_e2m1x2"
}

/// Threads of a block, for all kernels.
const BLOCK: c_uint = 256;

/// Rows and columns of a tile of `transpose`.
const TILE: u64 = 32;

/// Blocks of a launch, at most: enough for the largest GPU, and each thread takes several elements of a large tensor.
const MOST_BLOCKS: u64 = 4096;

/// The kernels that have been compiled, each module when it was first needed.
#[derive(Default)]
pub(super) struct Kernels {
    compiled: Mutex<Compiled>,
}

#[derive(Default)]
struct Compiled {
    modules: BTreeMap<String, usize>,
    functions: BTreeMap<String, usize>,
}

/// A kernel by its name, and the module that has it.
struct Kernel {
    module: String,
    name: String,
}

impl Kernel {
    fn cast(from: Float, to: Float) -> Kernel {
        Kernel { module: format!("convert_{}", from.name()), name: format!("cast_{}_{}", from.name(), to.name()) }
    }

    /// The same with scales in double precision.
    fn wide(from: Float, to: Float) -> Kernel {
        Kernel { module: format!("convert_{}", from.name()), name: format!("wide_{}_{}", from.name(), to.name()) }
    }

    fn of(module: &str, name: &str) -> Kernel {
        Kernel { module: module.to_owned(), name: name.to_owned() }
    }
}

/// One entry of the table of `gather`: rows that are packed to an address.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GatherEntry {
    /// First byte of the first row, counted from the base.
    pub(super) source: u64,
    /// Address of the packed rows.
    pub(super) target: u64,
    /// Bytes of a row.
    pub(super) run: u64,
    /// Bytes from the start of one row to the next.
    pub(super) stride: u64,
    /// Number of rows.
    pub(super) runs: u64,
}

/// The parameters of `cast`.
#[derive(Debug, Clone, Copy)]
pub(super) struct CastLaunch {
    pub(super) from: Float,
    pub(super) to: Float,
    /// Address of the first element.
    pub(super) source: u64,
    /// Address of the converted elements.
    pub(super) target: u64,
    /// Elements in all.
    pub(super) elements: u64,
    /// Elements of a row.
    pub(super) run: u64,
    /// Elements from the start of one row to the next.
    pub(super) stride: u64,
    /// The scales and where their table is.
    pub(super) scale: Option<(BlockScale, TableAt)>,
    /// Address of the counter of finite numbers that became infinite.
    pub(super) overflowed: u64,
}

/// Where a table of scales is.
#[derive(Debug, Clone, Copy)]
pub(super) enum TableAt {
    /// F32, one for each block.
    Single(u64),
    /// F64: one for each block where `codes` is 0, else one for each value of the byte of each block at `codes`.
    Wide { codes: u64, values: u64 },
}

impl Kernels {
    /// Has the driver compile what a conversion needs, ahead of its use.
    pub(super) fn require_cast(&self, bound: &Bound<'_>, from: Float, to: Float) -> Result<(), Refusal> {
        // Pairs always have scales, in double precision.
        let kernel = if from == Float::E2M1x2 { Kernel::wide(from, to) } else { Kernel::cast(from, to) };
        self.function(bound, &kernel).map(drop)
    }

    /// The same for `gather`.
    pub(super) fn require_gather(&self, bound: &Bound<'_>) -> Result<(), Refusal> {
        self.function(bound, &Kernel::of("move", "gather")).map(drop)
    }

    /// Gives the modules back. Nothing of them may run any more.
    pub(super) fn unload(self, bound: &Bound<'_>) {
        for module in self.compiled.into_inner().unwrap_or_else(PoisonError::into_inner).modules.into_values() {
            // SAFETY: loaded by `module`, unloaded once.
            let _ = unsafe { call!(bound.driver(), cuModuleUnload(module as sys::CUmodule)) };
        }
    }

    /// Converts elements.
    ///
    /// # Safety
    /// Source, table and counter are readable and the target and the counter writable, for what the numbers say, until the
    /// stream has passed this point.
    pub(super) unsafe fn cast(
        &self,
        bound: &Bound<'_>,
        stream: &StreamHandle,
        launch: &CastLaunch,
    ) -> Result<(), Refusal> {
        let unscaled = BlockScale { table: 0, first: 0, columns: 1, block_rows: 1, block_columns: 1 };
        let (scale, table) = launch.scale.unwrap_or((unscaled, TableAt::Single(0)));
        let (kernel, table) = match table {
            TableAt::Single(scales) => (Kernel::cast(launch.from, launch.to), vec![scales]),
            TableAt::Wide { codes, values } => (Kernel::wide(launch.from, launch.to), vec![codes, values]),
        };
        let before = [launch.source, launch.target, launch.elements, launch.run, launch.stride];
        let behind = [scale.first, scale.columns, scale.block_rows, scale.block_columns, launch.overflowed];
        let mut parameters: Vec<u64> = before.into_iter().chain(table).chain(behind).collect();
        let blocks = launch.elements.div_ceil(u64::from(BLOCK));
        // SAFETY: the caller's promise; all parameters are 64 bits wide.
        unsafe { self.launch(bound, stream, &kernel, [blocks, 1], &mut parameters) }
    }

    /// Packs the rows of the `count` entries of the table at the address `table`; sources count from `base`.
    ///
    /// # Safety
    /// The table and what it names are the caller's until the stream has passed this point.
    pub(super) unsafe fn gather(
        &self,
        bound: &Bound<'_>,
        stream: &StreamHandle,
        [base, table]: [u64; 2],
        count: u32,
    ) -> Result<(), Refusal> {
        let mut parameters = [base, table, u64::from(count)]; // the count is 32 bits: the lower half comes first
        // SAFETY: the caller's promise.
        unsafe { self.launch(bound, stream, &Kernel::of("move", "gather"), [2, u64::from(count)], &mut parameters) }
    }

    /// Adds the checksum of the `bytes` bytes at `source` (a multiple of 8) to the sum at the address `sum`.
    ///
    /// # Safety
    /// The bytes are readable and the sum writable until the stream has passed this point.
    pub(super) unsafe fn checksum(
        &self,
        bound: &Bound<'_>,
        stream: &StreamHandle,
        source: u64,
        bytes: u64,
        sum: u64,
    ) -> Result<(), Refusal> {
        let blocks = bytes.div_ceil(8 * u64::from(BLOCK));
        // SAFETY: the caller's promise.
        unsafe {
            self.launch(bound, stream, &Kernel::of("checksum", "checksum"), [blocks, 1], &mut [source, bytes, sum])
        }
    }

    /// Exchanges rows and columns of `rows` x `columns` elements of 1, 2, 4 or 8 bytes.
    ///
    /// # Safety
    /// The source is readable and the target writable, aligned for the elements, until the stream has passed this point.
    pub(super) unsafe fn transpose(
        &self,
        bound: &Bound<'_>,
        stream: &StreamHandle,
        [source, target]: [u64; 2],
        [rows, columns]: [u64; 2],
        element_bytes: u64,
    ) -> Result<(), Refusal> {
        let kernel = Kernel::of("move", &format!("transpose_{element_bytes}"));
        let blocks = [columns.div_ceil(TILE).saturating_mul(rows.div_ceil(TILE)), 1]; // the kernel strides over tiles by x
        // SAFETY: the caller's promise.
        unsafe { self.launch(bound, stream, &kernel, blocks, &mut [source, target, rows, columns]) }
    }

    /// # Safety
    /// The parameters are those of the kernel, and what they name is the caller's until the stream has passed.
    unsafe fn launch(
        &self,
        bound: &Bound<'_>,
        stream: &StreamHandle,
        kernel: &Kernel,
        blocks: [u64; 2],
        parameters: &mut [u64],
    ) -> Result<(), Refusal> {
        let function = self.function(bound, kernel)?;
        let [x, y] = blocks.map(|blocks| c_uint::try_from(blocks.clamp(1, MOST_BLOCKS)).unwrap_or(1));
        let mut pointers: Vec<*mut c_void> =
            parameters.iter_mut().map(|parameter| std::ptr::from_mut(parameter).cast()).collect();
        let (pointers, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the driver copies the parameters before it returns; the rest is the caller's promise.
        unsafe {
            call!(bound.driver(), cuLaunchKernel(function, x, y, 1, BLOCK, 1, 1, 0, stream.raw(), pointers, none))
        }
    }

    fn function(&self, bound: &Bound<'_>, kernel: &Kernel) -> Result<sys::CUfunction, Refusal> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = compiled.functions.get(&kernel.name) {
            return Ok(function as sys::CUfunction);
        }
        let module = compiled.module(bound, &kernel.module)?;
        let name = CString::new(kernel.name.as_str()).map_err(|_| MISSING)?;
        let mut function: sys::CUfunction = std::ptr::null_mut();
        // SAFETY: writes one handle; the module is loaded and the name ends in a zero.
        unsafe { call!(bound.driver(), cuModuleGetFunction(&raw mut function, module, name.as_ptr())) }?;
        compiled.functions.insert(kernel.name.clone(), function as usize);
        Ok(function)
    }
}

/// The program has no such kernel.
const MISSING: Refusal = Refusal { call: "cuModuleGetFunction", code: 500 };

impl Compiled {
    /// The module of that name. The driver compiles it for this GPU (and keeps the result for later processes, where it may).
    fn module(&mut self, bound: &Bound<'_>, name: &str) -> Result<sys::CUmodule, Refusal> {
        if let Some(&module) = self.modules.get(name) {
            return Ok(module as sys::CUmodule);
        }
        let (_, text) = MODULES.iter().find(|(known, _)| *known == name).ok_or(MISSING)?;
        let mut module: sys::CUmodule = std::ptr::null_mut();
        // SAFETY: writes one handle, and reads text that ends in a zero.
        unsafe { call!(bound.driver(), cuModuleLoadData(&raw mut module, text.as_ptr().cast())) }?;
        self.modules.insert(name.to_owned(), module as usize);
        Ok(module)
    }
}
