//! The kernels that ship, run from their PTX by the interpreter, in both orders of threads: bit for bit what the CPU's conversion
//! gives, and what arithmetic written another way gives.

use swcuda::ptx::{Module, Order};
use vramp::convert::{Float, Scales, Values, convert, transpose};
use vramp::digest::{checksum, checksum_finish};

mod machine;
pub(crate) mod reference;

use machine::{Blocks, Cast, MODULES, Memory, SOURCES, kernel, launch, parameters};
use reference::{bits, expected, expected_all};

const TARGETS: [Float; 3] = [Float::F32, Float::F16, Float::BF16];
const EIGHT_BITS: [Float; 4] = [Float::F8E4M3, Float::F8E5M2, Float::F8E4M3Fnuz, Float::F8E5M2Fnuz];

/// Bits that differ from call to call and not from run to run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 ^ self.0 >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(27)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(len).collect()
    }
}

fn convert_on_cpu(from: Float, source: &[u8], to: Float, blocks: Option<&Blocks>) -> (Vec<u8>, u64) {
    let mut target = vec![0xa5; source.len() / from.bytes() as usize * to.bytes() as usize];
    let scales = blocks.map(|blocks| Scales {
        values: (&blocks.scales).into(),
        first: blocks.first,
        columns: blocks.columns,
        block_rows: blocks.block_rows,
        block_columns: blocks.block_columns,
    });
    let overflowed = convert(source, from, &mut target, to, scales).unwrap();
    (target, overflowed)
}

/// Names the first element that differs.
fn assert_same(what: &str, source: &[u8], from: Float, to: Float, got: &(Vec<u8>, u64), wanted: &(Vec<u8>, u64)) {
    let (input, output) = (from.bytes() as usize, to.bytes() as usize);
    let pairs = got.0.chunks_exact(output).zip(wanted.0.chunks_exact(output)).enumerate();
    for (index, (got, wanted)) in pairs {
        if got != wanted {
            let element = source.get(index * input..(index + 1) * input).map_or(0, bits);
            let (from, to) = (from.name(), to.name());
            let (got, wanted) = (bits(got), bits(wanted));
            panic!("{what}, {from} {element:#x} (element {index}) to {to}: {got:#x} instead of {wanted:#x}");
        }
    }
    assert_eq!((got.0.len(), got.1), (wanted.0.len(), wanted.1), "{what}, {} to {}: overflows", from.name(), to.name());
}

/// Kernel and CPU against the reference, by fours and one by one, aligned and not.
fn check_all(from: Float, source: &[u8], to: Float) {
    let wanted = expected_all(from, source, to, |_| None);
    assert_same("CPU", source, from, to, &convert_on_cpu(from, source, to, None), &wanted);
    let aligned = Cast::new(from, to, source);
    let width = from.bytes() as usize;
    for (what, cast) in [
        ("by fours", aligned.clone()),
        ("by fours, reversed", Cast { order: Order::Reverse, ..aligned.clone() }),
        ("one by one", Cast { offset: width, ..aligned.clone() }),
        ("bytewise, reversed", Cast { offset: width * 4 - 1, order: Order::Reverse, ..aligned }),
    ] {
        assert_same(what, source, from, to, &cast.run(), &wanted);
    }
}

#[test]
fn every_module_parses_and_asks_for_no_more_than_the_oldest_driver_has() {
    for (module, (name, text)) in MODULES.iter().zip(SOURCES) {
        assert_eq!(module.isa(), (8, 0), "{name}");
        assert!(text.starts_with("// sha256 ") && !text.contains(".ftz") && !text.contains("fma"), "{name}");
    }
    let names: Vec<&str> = MODULES.iter().flat_map(Module::kernels).map(|kernel| &*kernel.name).collect();
    let casts = Float::ALL.iter().flat_map(|from| TARGETS.map(|to| (*from, to))).filter(|(from, to)| from != to);
    let casts: Vec<String> = casts.map(|(from, to)| format!("cast_{}_{}", from.name(), to.name())).collect();
    assert!(casts.iter().all(|name| names.contains(&name.as_str())), "{names:?}");
    let wide = EIGHT_BITS.into_iter().chain([Float::E2M1x2]);
    let wide: Vec<String> =
        wide.flat_map(|from| TARGETS.map(|to| format!("wide_{}_{}", from.name(), to.name()))).collect();
    assert!(wide.iter().all(|name| names.contains(&name.as_str())), "{names:?}");
    assert_eq!(names.len(), casts.len() + wide.len() + 6, "casts, gather, checksum and four transpositions");
    for kernel in MODULES.iter().flat_map(Module::kernels) {
        assert_eq!(kernel.max_threads, Some(256), "{}", kernel.name);
    }
}

#[test]
fn every_half_and_every_bfloat16_converts_exactly() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (from, to) in
        [(Float::F16, Float::F32), (Float::F16, Float::BF16), (Float::BF16, Float::F32), (Float::BF16, Float::F16)]
    {
        check_all(from, &all, to);
    }
    // The crate that everyone uses agrees, NaNs included.
    for bits in 0..=u16::MAX {
        let (wide, _) = expected(Float::F16, bits.into(), Float::F32, None);
        assert_eq!(wide, u64::from(half::f16::from_bits(bits).to_f32().to_bits()), "f16 {bits:#x}");
        let (wide, _) = expected(Float::BF16, bits.into(), Float::F32, None);
        assert_eq!(wide, u64::from(half::bf16::from_bits(bits).to_f32().to_bits()), "bf16 {bits:#x}");
    }
}

#[test]
fn every_eight_bit_float_converts_exactly() {
    let all: Vec<u8> = (0..=255).collect();
    for from in EIGHT_BITS {
        for to in TARGETS {
            check_all(from, &all, to);
        }
    }
    let known = [
        (Float::F8E4M3, 0x7e, 448.0),
        (Float::F8E4M3, 0x01, 2f32.powi(-9)),
        (Float::F8E5M2, 0x7b, 57_344.0),
        (Float::F8E5M2, 0xfc, f32::NEG_INFINITY),
        (Float::F8E4M3Fnuz, 0x7f, 240.0),
        (Float::F8E4M3Fnuz, 0x01, 2f32.powi(-10)),
        (Float::F8E5M2Fnuz, 0x7f, 57_344.0),
        (Float::F8E5M2Fnuz, 0x81, -2f32.powi(-17)),
    ];
    for (from, byte, value) in known {
        let (target, _) = Cast::new(from, Float::F32, &[byte]).run();
        assert_eq!(target, value.to_le_bytes(), "{from:?} {byte:#x}");
    }
}

/// Mantissas where rounding to a format with `kept` bits of them turns, and random ones.
fn mantissas(bits: u32, kept: &[u32], random: &mut Random) -> Vec<u64> {
    let mask = (1 << bits) - 1;
    let mut found = vec![0, 1, mask, mask - 1, random.next() & mask];
    for kept in kept {
        let last = 1u64 << (bits - kept);
        let half = last / 2;
        for base in [0, last, mask & !(last - 1), (random.next() & mask) & !(last - 1)] {
            found.extend([base, base + 1, base + half - 1, base + half, base + half + 1, base + last - 1]);
        }
    }
    found
}

#[test]
fn single_precision_rounds_exactly_at_every_exponent() {
    let mut random = Random(1);
    let mut values = Vec::new();
    for exponent in 0..256 {
        for mantissa in mantissas(23, &[1, 4, 7, 9, 10], &mut random) {
            values.extend([0, 1 << 31].map(|sign| (sign | exponent << 23 | mantissa) as u32));
        }
    }
    values.extend((0..100_000).map(|_| random.next() as u32));
    let source: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for to in [Float::F16, Float::BF16] {
        check_all(Float::F32, &source, to);
    }
    for bits in values {
        let value = f32::from_bits(bits);
        assert_eq!(
            expected(Float::F32, bits.into(), Float::F16, None).0,
            u64::from(half::f16::from_f32(value).to_bits())
        );
        assert_eq!(
            expected(Float::F32, bits.into(), Float::BF16, None).0,
            u64::from(half::bf16::from_f32(value).to_bits())
        );
    }
}

#[test]
fn double_precision_rounds_once() {
    let mut random = Random(2);
    let mut values = Vec::new();
    let interesting = (1023 - 155..1023 - 120).chain(1023 - 30..1023 + 20).chain(1023 + 122..1023 + 132);
    for exponent in interesting.chain([0, 1, 2, 500, 1500, 2046, 2047]) {
        // Where F32 would round to a tie of the narrower format, and a second rounding would go wrong, is among them.
        for mantissa in mantissas(52, &[1, 4, 7, 10, 23], &mut random) {
            values.extend([0, 1 << 63].map(|sign| sign | exponent << 52 | mantissa));
        }
    }
    values.extend((0..30_000).map(|_| random.next()));
    let narrow = |_| (random.next() & !(0x7ff << 52)) | (1023 - 40 + random.next() % 60) << 52;
    values.extend((0..30_000).map(narrow));
    let source: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for to in TARGETS {
        check_all(Float::F64, &source, to);
    }
    for bits in values {
        let value = f64::from_bits(bits);
        if !value.is_nan() {
            assert_eq!(
                expected(Float::F64, bits, Float::F32, None).0,
                u64::from((value as f32).to_bits()),
                "{value:e}"
            );
        }
    }
    // 1 + 2^-11 + 2^-40: above the tie of F16, and rounded to F32 first it would be the tie.
    let (target, _) = Cast::new(Float::F64, Float::F16, &(1.0 + 2f64.powi(-11) + 2f64.powi(-40)).to_le_bytes()).run();
    assert_eq!(bits(&target), 0x3c01);
}

#[test]
fn scales_multiply_in_single_precision() {
    let (subnormal, huge) = (f32::from_bits(3), f32::MAX);
    let scales = [1.0, 0.0, -0.0, -1.5, 0.37, subnormal, -subnormal, 2f32.powi(-120), huge, -huge, 1e30, f32::NAN];
    let scales = [&scales[..], &[f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xff80_0001)]].concat();
    let all: Vec<u8> = (0..=255).collect();
    let halves: Vec<u8> = (0..=u16::MAX).step_by(97).flat_map(u16::to_le_bytes).collect();
    let mut cases: Vec<(Float, &[u8])> = EIGHT_BITS.map(|from| (from, &all[..])).to_vec();
    cases.extend([(Float::F16, &halves[..]), (Float::BF16, &halves[..])]);
    for (from, source) in cases {
        for to in TARGETS.into_iter().filter(|to| *to != from) {
            for &scale in &scales {
                let elements = source.len() as u64 / from.bytes();
                // One scale for all, as per-tensor scales are given.
                let (block_rows, block_columns, columns) = (1, elements, elements);
                let blocks = Blocks { scales: vec![scale], first: 0, columns, block_rows, block_columns };
                let wanted = expected_all(from, source, to, |_| Some(scale));
                assert_same("CPU", source, from, to, &convert_on_cpu(from, source, to, Some(&blocks)), &wanted);
                // So many elements of one byte with one scale that the CPU makes a table.
                let (many, wanted_many) = (source.repeat(20), (wanted.0.repeat(20), wanted.1 * 20));
                let large = Blocks { columns: columns * 20, block_columns: columns * 20, ..blocks.clone() };
                assert_same("CPU", &many, from, to, &convert_on_cpu(from, &many, to, Some(&large)), &wanted_many);
                for offset in [0, from.bytes() as usize] {
                    let cast = Cast { blocks: Some(blocks.clone()), offset, ..Cast::new(from, to, source) };
                    assert_same(&format!("times {scale:e}"), source, from, to, &cast.run(), &wanted);
                }
            }
        }
    }
}

/// What a wide scale makes of an element, number by number: F64 arithmetic, rounded once.
fn expected_wide(from: Float, element: u8, to: Float, scale: f64) -> Vec<(u64, bool)> {
    let numbers = match from {
        Float::E2M1x2 => vec![reference::e2m1(element & 15), reference::e2m1(element >> 4)],
        _ => vec![reference::value(from, element.into())],
    };
    numbers.into_iter().map(|number| reference::product(number, scale, to)).collect()
}

#[test]
fn wide_and_coded_scales_are_multiplied_in_double_precision() {
    let mut random = Random(11);
    let mut scales: Vec<f64> =
        vec![1.0, -0.0, 1e-300, 1e300, f64::NAN, f64::INFINITY, 0.1, 2f64.powi(-127), 2f64.powi(127)];
    scales.extend(
        (0..247).map(|_| f64::from_bits(random.next() & !(0x7ff << 52) | (1023 - 20 + random.next() % 40) << 52)),
    );
    // 256 scales: 16 rows of 128 bytes in blocks of 8, and coded so that each block has another one.
    let source: Vec<u8> = (0..16 * 128).map(|at| (at * 7 + at / 256) as u8).collect();
    let codes: Vec<u8> = (0..=255u8).map(|code| code.wrapping_mul(91)).collect();
    for from in EIGHT_BITS.into_iter().chain([Float::E2M1x2]) {
        for to in TARGETS {
            for coded in [false, true] {
                let scale = |at: usize| if coded { scales[usize::from(codes[at / 8])] } else { scales[at / 8] };
                let parts: Vec<(u64, bool)> = source
                    .iter()
                    .enumerate()
                    .flat_map(|(at, byte)| expected_wide(from, *byte, to, scale(at)))
                    .collect();
                let bytes = parts.iter().flat_map(|(bits, _)| bits.to_le_bytes()[..to.bytes() as usize].to_vec());
                let wanted = (bytes.collect::<Vec<u8>>(), parts.iter().filter(|part| part.1).count() as u64);
                let values = if coded { Values::Coded(&codes, &scales) } else { Values::Wide(&scales) };
                let on_cpu = Scales { values, first: 0, columns: 128, block_rows: 1, block_columns: 8 };
                let mut target = vec![0xa5; wanted.0.len()];
                let overflowed = convert(&source, from, &mut target, to, Some(on_cpu)).unwrap();
                assert!((target, overflowed) == wanted, "CPU, {from:?} to {to:?}, coded: {coded}");
                for (offset, order) in [(0, Order::Forward), (1, Order::Reverse)] {
                    let codes = coded.then_some(&codes[..]);
                    let got = machine::wide(from, to, &source, offset, codes, &scales, [0, 128, 1, 8], order);
                    assert!(got == wanted, "{from:?} to {to:?}, coded: {coded}, offset {offset}");
                }
            }
        }
    }
}

/// 200 x `columns` elements in blocks, a different scale each.
fn ragged(columns: u64, block_rows: u64, block_columns: u64, random: &mut Random) -> (Vec<u8>, Blocks) {
    let source = random.bytes(200 * columns as usize);
    let blocks = 200u64.div_ceil(block_rows) * columns.div_ceil(block_columns);
    let scales = (0..blocks).map(|index| 0.25 + index as f32 * 0.37).collect();
    (source, Blocks { scales, first: 0, columns, block_rows, block_columns })
}

fn scale_of(blocks: &Blocks, element: u64) -> Option<f32> {
    let (row, column) = (element / blocks.columns, element % blocks.columns);
    let across = blocks.columns.div_ceil(blocks.block_columns);
    let index = row / blocks.block_rows * across + column / blocks.block_columns;
    Some(blocks.scales[index as usize])
}

#[test]
fn block_scales_hold_at_ragged_edges_and_in_slices() {
    let mut random = Random(3);
    // 300 columns go by fours in blocks of 128 x 128; in blocks of 6 columns, or where there are 301, they cannot.
    for (columns, block_rows, block_columns) in [(300, 128, 128), (301, 128, 128), (300, 5, 6), (300, 1, 300)] {
        let (source, blocks) = ragged(columns, block_rows, block_columns, &mut random);
        let (from, to) = (Float::F8E4M3, Float::BF16);
        let wanted = expected_all(from, &source, to, |index| scale_of(&blocks, index as u64));
        assert_same("CPU", &source, from, to, &convert_on_cpu(from, &source, to, Some(&blocks)), &wanted);
        for order in Order::BOTH {
            let cast = Cast { blocks: Some(blocks.clone()), order, ..Cast::new(from, to, &source) };
            assert_same("whole", &source, from, to, &cast.run(), &wanted);
        }
        // Rows 100 to 200, columns from `left` on: a strided slice that begins in the middle of a block.
        for (left, width) in [(0, columns), (120, 100), (4, 296), (1, 13), (126, 8)] {
            let first = 100 * columns + left;
            let tail = &source[first as usize..];
            let blocks = Blocks { first, ..blocks.clone() };
            let place = |index: u64| index / width * columns + index % width;
            let slice: Vec<u8> = (0..100 * width).map(|index| tail[place(index) as usize]).collect();
            let wanted = expected_all(from, &slice, to, |index| scale_of(&blocks, first + place(index as u64)));
            for (offset, order) in [(0, Order::Forward), (1, Order::Reverse)] {
                let cast = Cast::new(from, to, tail);
                let (elements, run, stride, blocks) = (100 * width, width, columns, Some(blocks.clone()));
                let cast = Cast { elements, run, stride, blocks, offset, order, ..cast };
                assert_same("slice", &slice, from, to, &cast.run(), &wanted);
            }
            // On the CPU a row at a time.
            let mut target = Vec::new();
            for (row, part) in slice.chunks_exact(width as usize).enumerate() {
                let blocks = Blocks { first: first + row as u64 * columns, ..blocks.clone() };
                target.extend(convert_on_cpu(from, part, to, Some(&blocks)).0);
            }
            assert_same("CPU, slice", &slice, from, to, &(target, 0), &wanted);
        }
    }
}

#[test]
fn strided_runs_of_every_width_and_alignment() {
    let mut random = Random(4);
    for from in [Float::F64, Float::F32, Float::F16, Float::F8E5M2] {
        let width = from.bytes() as usize;
        let to = if from == Float::F16 { Float::F32 } else { Float::BF16 };
        let source = random.bytes(2000 * width);
        for (elements, run, stride) in
            [(0, 1, 1), (1, 1, 7), (399, 7, 31), (400, 8, 32), (402, 8, 32), (1000, 1000, 1000)]
        {
            let place = |index: u64| (index / run * stride + index % run) as usize * width;
            let packed: Vec<u8> = (0..elements).flat_map(|index| source[place(index)..][..width].to_vec()).collect();
            let wanted = expected_all(from, &packed, to, |_| None);
            for offset in [0, 1, width, 2 * width + 1] {
                let cast = Cast { elements, run, stride, offset, ..Cast::new(from, to, &source) };
                assert_same("strided", &packed, from, to, &cast.run(), &wanted);
            }
        }
    }
}

#[test]
fn overflows_are_counted_only_where_a_finite_value_became_infinite() {
    let values = [1e30, -1e30, 65_520.0, 65_519.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0];
    let source: Vec<u8> = values.iter().cycle().take(5000).flat_map(|value| value.to_le_bytes()).collect();
    let finite = 3 * 5000 / 8;
    assert_eq!(Cast::new(Float::F32, Float::F16, &source).run().1, finite);
    assert_eq!(convert_on_cpu(Float::F32, &source, Float::F16, None).1, finite);
    assert_eq!(Cast::new(Float::F32, Float::BF16, &source).run().1, 0);
    let largest = f32::MAX.to_le_bytes();
    assert_eq!(Cast::new(Float::F32, Float::BF16, &largest).run().1, 1);
    assert_eq!(convert_on_cpu(Float::F32, &largest, Float::BF16, None).1, 1);
    // Without a counter nothing is counted, and nothing else changes.
    let mut memory = Memory::default();
    let (source, target) = (memory.put(&source), memory.room(5000 * 2));
    let values = parameters(&[source, target, 5000, 5000, 5000, 0, 0, 0, 0, 0, 0]);
    let touched = launch(kernel("cast_f32_f16"), &mut memory, &values, [3, 1], Order::Forward).unwrap();
    assert_eq!(touched.writes, std::iter::once(target..target + 10_000).collect::<Vec<_>>());
}

/// One entry of the table of `gather`.
#[derive(Debug, Clone, Copy)]
struct Entry {
    source: usize,
    target: usize,
    run: usize,
    stride: usize,
    runs: usize,
}

fn gather(source: &[u8], target_len: usize, entries: &[Entry], grid: [u32; 2], order: Order) -> Vec<u8> {
    let mut memory = Memory::default();
    let (base, target) = (memory.put(source), memory.room(target_len));
    let row = |entry: &Entry| {
        let at = target + entry.target as u64;
        [entry.source as u64, at, entry.run as u64, entry.stride as u64, entry.runs as u64]
    };
    let table = parameters(&entries.iter().flat_map(row).collect::<Vec<u64>>());
    let table = memory.put(&table);
    let mut values = parameters(&[base, table]);
    values.extend((entries.len() as u32).to_le_bytes());
    launch(kernel("gather"), &mut memory, &values, grid, order).unwrap();
    memory.get(target, target_len).to_vec()
}

fn gathered(source: &[u8], target_len: usize, entries: &[Entry]) -> Vec<u8> {
    let mut target = vec![0xa5; target_len];
    for entry in entries {
        for run in 0..entry.runs {
            let (from, to) = (entry.source + run * entry.stride, entry.target + run * entry.run);
            target[to..to + entry.run].copy_from_slice(&source[from..from + entry.run]);
        }
    }
    target
}

#[test]
fn gather_moves_every_alignment_of_both_ends() {
    let source = Random(5).bytes(4000);
    for source_at in 0..17 {
        for target_at in 0..17 {
            for run in [0, 1, 3, 16, 33, 300] {
                let entry = Entry { source: source_at, target: target_at, run, stride: run, runs: 1 };
                let wanted = gathered(&source, 400, &[entry]);
                let order = if source_at % 2 == 0 { Order::Forward } else { Order::Reverse };
                assert!(gather(&source, 400, &[entry], [1, 1], order) == wanted, "{entry:?}");
            }
        }
    }
    for source_at in [0, 1, 2, 4, 8, 16] {
        for target_at in [0, 1, 2, 4, 8] {
            for (run, stride) in [(1, 2), (2, 6), (4, 12), (8, 24), (16, 48), (32, 33), (48, 48), (3, 100)] {
                let entry = Entry { source: source_at, target: target_at, run, stride, runs: 37 };
                let wanted = gathered(&source, 2000, &[entry]);
                assert!(gather(&source, 2000, &[entry], [2, 1], Order::Forward) == wanted, "{entry:?}");
            }
        }
    }
}

#[test]
fn gather_walks_over_many_entries_and_large_ones() {
    let source = Random(6).bytes(60_000);
    let mut entries = vec![Entry { source: 5, target: 3, run: 20_000, stride: 20_000, runs: 1 }];
    let mut at = 20_003;
    for index in 0..50 {
        let entry = Entry { source: 20_000 + index * 300, target: at, run: index, stride: index + 7, runs: index % 5 };
        at += entry.run * entry.runs;
        entries.push(entry);
    }
    let wanted = gathered(&source, at, &entries);
    for (grid, order) in [([1, 1], Order::Forward), ([5, 3], Order::Reverse), ([2, 64], Order::Forward)] {
        assert!(gather(&source, at, &entries, grid, order) == wanted, "{grid:?}");
    }
    assert_eq!(gather(&source, 4, &[], [1, 1], Order::Forward), [0xa5; 4]);
}

/// The transposed bytes, or the trap, of a module's kernel.
fn transposed(
    module: &Module,
    source: &[u8],
    shape: (u64, u64),
    bytes: usize,
    grid: u32,
    order: Order,
) -> Result<Vec<u8>, String> {
    let mut memory = Memory::default();
    let (from, to) = (memory.put(source), memory.room(source.len()));
    let kernel = &module.kernels()[module.kernel(&format!("transpose_{bytes}")).unwrap()];
    let values = parameters(&[from, to, shape.0, shape.1]);
    launch(kernel, &mut memory, &values, [grid, 1], order).map_err(|trap| trap.message)?;
    Ok(memory.get(to, source.len()).to_vec())
}

fn module(name: &str) -> &'static Module {
    &MODULES[SOURCES.iter().position(|(known, _)| *known == name).unwrap()]
}

#[test]
fn transposition_of_ragged_shapes() {
    let mut random = Random(7);
    for bytes in [1, 2, 4, 8] {
        for (rows, columns) in [(1, 1), (1, 40), (33, 1), (32, 32), (31, 65), (70, 100)] {
            let source = random.bytes((rows * columns) as usize * bytes);
            let mut wanted = vec![0; source.len()];
            for (index, element) in wanted.chunks_exact_mut(bytes).enumerate() {
                let (column, row) = (index / rows as usize, index % rows as usize);
                element.copy_from_slice(&source[(row * columns as usize + column) * bytes..][..bytes]);
            }
            let mut on_cpu = vec![0; source.len()];
            transpose(&source, &mut on_cpu, rows, columns, bytes).unwrap();
            assert!(on_cpu == wanted, "CPU, {rows} x {columns} of {bytes} bytes");
            for order in Order::BOTH {
                let got = transposed(module("move"), &source, (rows, columns), bytes, 2, order).unwrap();
                assert!(got == wanted, "{rows} x {columns} of {bytes} bytes, {order:?}");
            }
        }
    }
}

fn summed(module: &Module, source: &[u8], grid: u32, order: Order) -> Result<u64, String> {
    let mut memory = Memory::default();
    let (from, out) = (memory.put(source), memory.put(&[0; 8]));
    let values = parameters(&[from, source.len() as u64, out]);
    launch(&module.kernels()[0], &mut memory, &values, [grid, 1], order).map_err(|trap| trap.message)?;
    Ok(checksum_finish(bits(memory.get(out, 8)), source.len() as u64))
}

#[test]
fn checksums_agree_with_the_cpu_at_every_length() {
    let bytes = Random(8).bytes(100_003);
    for len in (0..100).chain([2047, 2048, 2049, 65_536, 100_003]) {
        for (grid, order) in [(1, Order::Forward), (3, Order::Reverse)] {
            let got = summed(module("checksum"), &bytes[..len], grid, order).unwrap();
            assert_eq!(got, checksum(&bytes[..len]), "{len} bytes, {order:?}");
        }
    }
}

/// The text without its `index`th barrier.
fn without_barrier(text: &str, index: usize) -> String {
    let (at, barrier) = text.match_indices("bar.sync").nth(index).unwrap();
    let end = at + text[at..].find(';').unwrap();
    assert!(text[..at].ends_with(['\t', ' ', '\n']), "{barrier}");
    [&text[..at], &text[end + 1..]].concat()
}

#[test]
fn a_barrier_that_is_missing_shows_in_one_order_of_threads() {
    let source = Random(9).bytes(64 * 64 * 8);
    let find = |name: &str| SOURCES.iter().find(|(known, _)| *known == name).unwrap().1;
    let broken = Module::parse(&without_barrier(find("checksum"), 0)).unwrap();
    let right = |order| summed(&broken, &source, 1, order) == Ok(checksum(&source));
    assert!(!Order::BOTH.into_iter().all(right), "checksum");

    let text = find("move");
    let barriers = text.matches("bar.sync").count();
    assert_eq!(barriers, 8, "two a transposition");
    for index in 0..barriers {
        let broken = Module::parse(&without_barrier(text, index)).unwrap();
        let wrong = [1, 2, 4, 8].into_iter().filter(|bytes| {
            let source = &source[..64 * 64 * bytes];
            let intact = transposed(module("move"), source, (64, 64), *bytes, 1, Order::Forward);
            !Order::BOTH.into_iter().all(|order| transposed(&broken, source, (64, 64), *bytes, 1, order) == intact)
        });
        assert_eq!(wrong.count(), 1, "barrier {index} is one kernel's and is needed there");
    }
}

#[test]
fn an_access_out_of_bounds_names_block_thread_and_statement() {
    let mut memory = Memory::default();
    // One byte less than 64 x 64 elements of 2 bytes need, on either side.
    let (full, short) = (memory.room(8192), memory.room(8191));
    for (source, target, statement) in [(short, full, "ld.global.u16"), (full, short, "st.global.u16")] {
        let values = parameters(&[source, target, 64, 64]);
        let trap = launch(kernel("transpose_2"), &mut memory, &values, [4, 1], Order::Forward).unwrap_err();
        assert_eq!(trap.address, Some(short + 8190));
        for part in ["kernel transpose_2, block (3, 0, 0), thread (255, 0, 0), PTX line ", statement, "2 bytes at 0x"] {
            assert!(trap.message.contains(part), "{part:?} is not in {:?}", trap.message);
        }
    }
    let values = parameters(&[full + 1, short, 1, 1]);
    let trap = launch(kernel("transpose_2"), &mut memory, &values, [1, 1], Order::Forward).unwrap_err();
    assert!(trap.message.contains("misaligned"), "{}", trap.message);
}
