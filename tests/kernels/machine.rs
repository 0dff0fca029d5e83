//! A device for one launch after another: its memory, and calls of the kernels that ship.

use std::ops::Range;
use std::sync::LazyLock;

use swcuda::ptx::{DeviceMemory, Kernel, Launch, Module, Order, Touched, Trap, run};
use vramp::Float;

/// The shipped text, by the name of its file.
pub(super) const SOURCES: &[(&str, &str)] = &[
    ("checksum", include_str!("../../kernels/ptx/checksum.ptx")),
    ("move", include_str!("../../kernels/ptx/move.ptx")),
    ("convert_f64", include_str!("../../kernels/ptx/convert_f64.ptx")),
    ("convert_f32", include_str!("../../kernels/ptx/convert_f32.ptx")),
    ("convert_f16", include_str!("../../kernels/ptx/convert_f16.ptx")),
    ("convert_bf16", include_str!("../../kernels/ptx/convert_bf16.ptx")),
    ("convert_f8_e4m3", include_str!("../../kernels/ptx/convert_f8_e4m3.ptx")),
    ("convert_f8_e5m2", include_str!("../../kernels/ptx/convert_f8_e5m2.ptx")),
    ("convert_f8_e4m3fnuz", include_str!("../../kernels/ptx/convert_f8_e4m3fnuz.ptx")),
    ("convert_f8_e5m2fnuz", include_str!("../../kernels/ptx/convert_f8_e5m2fnuz.ptx")),
    ("convert_e2m1x2", include_str!("../../kernels/ptx/convert_e2m1x2.ptx")),
];

pub(super) static MODULES: LazyLock<Vec<Module>> =
    LazyLock::new(|| SOURCES.iter().map(|(_, text)| Module::parse(text).unwrap()).collect());

pub(super) fn kernel(name: &str) -> &'static Kernel {
    let found = MODULES.iter().find_map(|module| Some(&module.kernels()[module.kernel(name)?]));
    found.unwrap_or_else(|| panic!("no kernel {name}"))
}

/// Allocations that begin at multiples of 256 and end where they end, with gaps between them.
#[derive(Default)]
pub(super) struct Memory {
    allocations: Vec<(Range<u64>, Vec<u64>)>,
}

impl Memory {
    /// Room for `len` bytes, filled with a pattern that no kernel writes by chance.
    pub(super) fn room(&mut self, len: usize) -> u64 {
        let last = self.allocations.last().map_or(0x7f00_0000_0000, |(range, _)| range.end);
        let start = last.next_multiple_of(256) + 512;
        self.allocations.push((start..start + len as u64, vec![0xa5a5_a5a5_a5a5_a5a5; len.div_ceil(8).max(1)]));
        start
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> u64 {
        self.put_at(bytes, 0)
    }

    /// Bytes that begin `offset` bytes behind a multiple of 256.
    pub(super) fn put_at(&mut self, bytes: &[u8], offset: usize) -> u64 {
        let start = self.room(bytes.len() + offset);
        let words = &mut self.allocations.last_mut().unwrap().1;
        bytemuck::cast_slice_mut(words)[offset..offset + bytes.len()].copy_from_slice(bytes);
        start + offset as u64
    }

    pub(super) fn get(&self, address: u64, len: usize) -> &[u8] {
        let (range, words) = self.find(address).unwrap();
        &bytemuck::cast_slice(words)[(address - range.start) as usize..][..len]
    }

    fn find(&self, address: u64) -> Option<&(Range<u64>, Vec<u64>)> {
        // An empty allocation has no byte that it holds.
        self.allocations.iter().find(|(range, _)| range.contains(&address) || range.start == address)
    }
}

impl DeviceMemory for Memory {
    fn allocation(&mut self, address: u64) -> Option<Range<u64>> {
        let found = self.allocations.iter().find(|(range, _)| range.contains(&address));
        found.map(|(range, _)| range.clone())
    }

    fn host(&self, address: u64) -> *mut u8 {
        let (range, words) = self.find(address).unwrap();
        words.as_ptr().cast::<u8>().wrapping_add((address - range.start) as usize).cast_mut()
    }
}

/// Parameters of 8 bytes each.
pub(super) fn parameters(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A launch of `grid` blocks of 256 threads.
pub(super) fn launch(
    kernel: &Kernel,
    memory: &mut Memory,
    parameters: &[u8],
    grid: [u32; 2],
    order: Order,
) -> Result<Touched, Trap> {
    let (grid, block) = ([grid[0], grid[1], 1], [256, 1, 1]);
    run(kernel, &Launch { parameters, grid, block, shared_bytes: 0, order }, memory)
}

/// Scales, as both the kernels and the CPU take them.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    pub(super) scales: Vec<f32>,
    pub(super) first: u64,
    pub(super) columns: u64,
    pub(super) block_rows: u64,
    pub(super) block_columns: u64,
}

/// A call of a cast kernel.
#[derive(Debug, Clone)]
pub(super) struct Cast<'a> {
    pub(super) from: Float,
    pub(super) to: Float,
    pub(super) source: &'a [u8],
    /// Bytes by which the source is behind an aligned address.
    pub(super) offset: usize,
    pub(super) elements: u64,
    pub(super) run: u64,
    pub(super) stride: u64,
    pub(super) blocks: Option<Blocks>,
    pub(super) order: Order,
}

impl<'a> Cast<'a> {
    /// All of `source`, aligned.
    pub(super) fn new(from: Float, to: Float, source: &'a [u8]) -> Cast<'a> {
        let elements = source.len() as u64 / from.bytes();
        let (run, stride) = (elements.max(1), elements);
        Cast { from, to, source, offset: 0, elements, run, stride, blocks: None, order: Order::Forward }
    }

    /// The target's bytes and the number of elements that overflowed. What is written must be the target, and no more.
    pub(super) fn run(&self) -> (Vec<u8>, u64) {
        let mut memory = Memory::default();
        let source = memory.put_at(self.source, self.offset);
        let len = (self.elements * self.to.bytes()) as usize;
        let target = memory.room(len);
        let counter = memory.put(&[0; 8]);
        let scales = self.blocks.as_ref().map_or(0, |blocks| memory.put(bytemuck::cast_slice(&blocks.scales)));
        let (first, columns, rows, across) = self
            .blocks
            .as_ref()
            .map_or((0, 0, 0, 0), |blocks| (blocks.first, blocks.columns, blocks.block_rows, blocks.block_columns));
        let Cast { elements, run, stride, .. } = *self;
        let values = [source, target, elements, run, stride, scales, first, columns, rows, across, counter];
        let kernel = kernel(&format!("cast_{}_{}", self.from.name(), self.to.name()));
        // Few blocks, so that the loops go round.
        let grid = [(elements / 1024).clamp(1, 7) as u32, 1];
        let touched = launch(kernel, &mut memory, &parameters(&values), grid, self.order).unwrap();
        let overflowed = u64::from_le_bytes(memory.get(counter, 8).try_into().unwrap());
        let mut expected = Vec::new();
        expected.extend((len > 0).then_some(target..target + len as u64));
        expected.extend((overflowed > 0).then_some(counter..counter + 8));
        assert_eq!(touched.writes, expected, "{} to {}", self.from.name(), self.to.name());
        (memory.get(target, len).to_vec(), overflowed)
    }
}

/// A call of a kernel with wide scales, on all of `source` side by side: the target's bytes and the number of overflows. `shape` is
/// the first element, columns, rows and columns of a block.
#[allow(clippy::too_many_arguments)] // those of the kernel
pub(super) fn wide(
    from: Float,
    to: Float,
    source: &[u8],
    offset: usize,
    codes: Option<&[u8]>,
    values: &[f64],
    shape: [u64; 4],
    order: Order,
) -> (Vec<u8>, u64) {
    let mut memory = Memory::default();
    let elements = source.len() as u64;
    let len = (elements * from.numbers() * to.bytes()) as usize;
    let source = memory.put_at(source, offset);
    let target = memory.room(len);
    let counter = memory.put(&[0; 8]);
    let codes = codes.map_or(0, |codes| memory.put(codes));
    let values = memory.put(bytemuck::cast_slice(values));
    let [first, columns, rows, across] = shape;
    let all = [source, target, elements, elements, elements, codes, values, first, columns, rows, across, counter];
    let kernel = kernel(&format!("wide_{}_{}", from.name(), to.name()));
    let touched = launch(kernel, &mut memory, &parameters(&all), [2, 1], order).unwrap();
    assert_eq!(touched.writes.first(), Some(&(target..target + len as u64)));
    (memory.get(target, len).to_vec(), u64::from_le_bytes(memory.get(counter, 8).try_into().unwrap()))
}
