//! The plan against a naive reader: for random files, selections, limits and residencies, carrying the plan out byte by byte
//! gives each tensor its bytes, each written once, within the limits of both sides, whatever the order of the input.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use vramp::convert::{Float, Table, convert};
use vramp::device::{BlockScale, Cast, DeviceLimits};
use vramp::dtype::Dtype;
use vramp::extent::{Extent, Strided};
use vramp::plan::{Landing, LoadPlan, PlanOptions, RouteChoice, ShardFacts, Transfer, Wanted, WantedCast, plan};
use vramp::storage::{Limits, Residency, Route};

#[derive(Debug, Clone)]
struct Case {
    files: Vec<Vec<u8>>,
    facts: Vec<ShardFacts>,
    wanted: Vec<Wanted>,
    device: DeviceLimits,
    options: PlanOptions,
}

/// The bytes a tensor must have, straight from its runs.
fn naive(case: &Case, wanted: &Wanted) -> Vec<u8> {
    let mut bytes = vec![0; wanted.bytes as usize];
    let place = |at: u64| wanted.cast.map_or(at, |wanted| wanted.cast.converted(at)) as usize;
    for runs in &wanted.runs {
        for run in (0..runs.count).map(|index| runs.nth(index)) {
            let from = &case.files[run.shard as usize][run.offset as usize..(run.offset + run.run) as usize];
            let cast = wanted.cast.map(|WantedCast { cast, origin }| {
                let first = (run.offset - origin) / cast.from.bytes();
                Cast { scale: cast.scale.map(|scale| BlockScale { first, ..scale }), ..cast }
            });
            bytes[place(run.at)..place(run.at + run.run)].copy_from_slice(&converted(from, cast, 0));
        }
    }
    bytes
}

/// What a run of a piece becomes; `skipped` elements of the piece lie before it.
fn converted(from: &[u8], cast: Option<Cast>, skipped: u64) -> Vec<u8> {
    let Some(cast) = cast else { return from.to_vec() };
    let mut to = vec![0; cast.converted(from.len() as u64) as usize];
    let scales = cast.scale.map(|scale| scale.table_in(std::slice::from_ref(table()), skipped).unwrap());
    convert(from, cast.from, &mut to, cast.to, scales).unwrap();
    to
}

/// Scales for any tensor of these tests.
fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| Table::Single((0..60_000u16).map(|index| f32::from(index % 977) / 64.0).collect()))
}

/// Carries the plan out: the arena, and how often each byte of it was written.
fn carry_out(case: &Case, plan: &LoadPlan) -> (Vec<u8>, Vec<u8>) {
    let mut arena = vec![0; plan.arena_bytes as usize];
    let mut writes = vec![0; plan.arena_bytes as usize];
    let mut write = |at: u64, bytes: &[u8]| {
        for (index, byte) in bytes.iter().enumerate() {
            arena[at as usize + index] = *byte;
            writes[at as usize + index] += 1;
        }
    };
    for transfer in &plan.transfers {
        let read = &case.files[transfer.shard as usize][transfer.offset as usize..][..transfer.len as usize];
        match &transfer.landing {
            Landing::InPlace { arena } => write(*arena, read),
            Landing::Staged { pieces } => {
                for placed in pieces {
                    let (piece, mut to) = (placed.piece, placed.arena);
                    for run in 0..piece.count {
                        let at = (piece.at + run * piece.stride) as usize;
                        let skipped = piece.cast.map_or(0, |cast| run * piece.stride / cast.from.bytes());
                        let bytes = converted(&read[at..at + piece.run as usize], piece.cast, skipped);
                        write(to, &bytes);
                        to += bytes.len() as u64;
                    }
                }
            }
        }
    }
    (arena, writes)
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let plan = plan(&case.wanted, &case.facts, case.device, case.options).unwrap();
    let (arena, writes) = carry_out(case, &plan);
    prop_assert_eq!(plan.placements.len(), case.wanted.len());
    for (wanted, placed) in case.wanted.iter().zip(&plan.placements) {
        prop_assert_eq!(&wanted.name, &placed.name);
        let range = placed.arena as usize..(placed.arena + placed.bytes) as usize;
        prop_assert!(arena[range.clone()] == naive(case, wanted), "{} of {:#?}", wanted.name, plan);
        prop_assert!(writes[range].iter().all(|&count| count == 1), "a byte of {} not written once", wanted.name);
        let align = wanted.dtype.alignment().max(case.device.align);
        prop_assert!(placed.arena.is_multiple_of(align), "{} at {}", wanted.name, placed.arena);
    }
    prop_assert!(writes.iter().all(|&count| count <= 1));
    let mut distinct = HashMap::new();
    for (wanted, placed) in case.wanted.iter().zip(&plan.placements).filter(|(wanted, _)| wanted.bytes > 0) {
        let first = distinct.entry((&wanted.runs, wanted.cast)).or_insert(placed.arena);
        prop_assert_eq!(*first, placed.arena, "{} has another place than the same bytes", wanted.name);
    }
    prop_assert_eq!(plan.tensor_bytes(), distinct_bytes(case));
    for transfer in &plan.transfers {
        let facts = &case.facts[transfer.shard as usize];
        prop_assert!(transfer.len > 0 && transfer.offset + transfer.len <= facts.bytes);
        if transfer.route == Route::Direct {
            let limits = facts.direct.unwrap();
            if let Landing::InPlace { arena } = transfer.landing {
                prop_assert_eq!(arena % limits.memory_align, transfer.offset % limits.memory_align);
            } else {
                prop_assert!(transfer.offset.is_multiple_of(limits.align));
                let end = transfer.offset + transfer.len;
                prop_assert!(end.is_multiple_of(limits.align) || end == facts.bytes);
            }
        }
        match &transfer.landing {
            Landing::Staged { .. } => prop_assert!(transfer.len <= case.options.buffer_bytes),
            Landing::InPlace { .. } => prop_assert!(case.device.host_visible || transfer.route == Route::GpuDirect),
        }
        if transfer.route == Route::GpuDirect {
            check_gpu_direct(case, transfer)?;
        }
    }
    Ok(())
}

/// Bytes of the tensors, those that are made of the same bytes in the same way once.
fn distinct_bytes(case: &Case) -> u64 {
    let mut seen = HashSet::new();
    let distinct = case.wanted.iter().filter(|wanted| seen.insert((&wanted.runs, wanted.cast)));
    distinct.map(|wanted| wanted.bytes).sum()
}

/// A read that the device makes itself is whole blocks of a file that it takes, lands where it can, and was not ruled out.
fn check_gpu_direct(case: &Case, transfer: &Transfer) -> Result<(), TestCaseError> {
    let facts = &case.facts[transfer.shard as usize];
    let limits = facts.gpu_direct.unwrap();
    prop_assert!(!case.device.host_visible);
    prop_assert!(matches!(case.options.route, RouteChoice::Auto | RouteChoice::GpuDirect));
    prop_assert!(transfer.offset.is_multiple_of(limits.align) && transfer.len.is_multiple_of(limits.align));
    prop_assert!(transfer.len <= limits.max_read);
    let Landing::InPlace { arena } = transfer.landing else { panic!("a staged read by the device") };
    prop_assert_eq!(arena % limits.memory_align, transfer.offset % limits.memory_align);
    let warm = facts.residency.share(transfer.range()) >= 0.6;
    prop_assert!(!warm || case.options.route == RouteChoice::GpuDirect, "warm bytes past the host, unasked");
    Ok(())
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F64])
}

/// How a tensor of a file is selected: whole, not at all, or rows cut to a part of their columns.
#[derive(Debug, Clone)]
enum Choice {
    Whole,
    Nothing,
    Columns { rows: u64, start: u64, width: u64 },
}

fn choice() -> impl Strategy<Value = Choice> {
    prop_oneof![
        6 => Just(Choice::Whole),
        2 => Just(Choice::Nothing),
        2 => (1..9u64, 0..64u64, 1..64u64).prop_map(|(rows, start, width)| Choice::Columns { rows, start, width }),
    ]
}

fn tensor() -> impl Strategy<Value = (Dtype, u64, Choice)> {
    let elements = prop_oneof![8 => 0..200u64, 2 => 1000..70_000u64, 1 => 100_000..400_000u64];
    (dtype(), elements, choice())
}

fn limits(direct: bool) -> impl Strategy<Value = Option<Limits>> {
    let some = (prop::sample::select(vec![512u64, 4096]), prop::sample::select(vec![4u64, 64, 512, 4096])).prop_map(
        |(align, memory_align)| Some(Limits { align, memory_align, max_read: 256 << 10, gap: 4096, depth: 4 }),
    );
    if direct { some.boxed() } else { prop_oneof![Just(None), some].boxed() }
}

fn gpu_limits() -> impl Strategy<Value = Option<Limits>> {
    let some = (prop::sample::select(vec![1u64, 512, 4096]), prop::sample::select(vec![64u64 << 10, 16 << 20]))
        .prop_map(|(memory_align, max_read)| Some(Limits { align: 4096, memory_align, max_read, gap: 0, depth: 8 }));
    prop_oneof![Just(None), some.clone(), some]
}

fn residency(bytes: u64) -> impl Strategy<Value = Residency> {
    let granule = 64 << 10;
    let granules = prop::collection::vec(any::<bool>(), bytes.div_ceil(granule) as usize);
    prop_oneof![
        Just(Residency::none(bytes)),
        Just(Residency::all(bytes)),
        granules.prop_map(move |all| {
            let resident = all.iter().enumerate();
            let resident = resident.map(|(i, &warm)| if warm { (bytes - i as u64 * granule).min(granule) } else { 0 });
            Residency::from_granules(bytes, granule, resident.collect())
        }),
    ]
}

fn file(shard: u32) -> impl Strategy<Value = (Vec<u8>, ShardFacts, Vec<Wanted>)> {
    let repeats = prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..4);
    (8..2000u64, prop::collection::vec(tensor(), 0..12), repeats).prop_flat_map(move |(header, tensors, repeats)| {
        let (mut offset, mut wanted) = (header, Vec::new());
        for (index, (dtype, elements, choice)) in tensors.into_iter().enumerate() {
            let bytes = elements * dtype.bits() / 8;
            wanted.extend(want(shard, index, dtype, offset, bytes, choice));
            offset += bytes;
        }
        wanted.extend(again(&wanted, &repeats));
        let mut bytes: Vec<u8> = Vec::with_capacity(offset as usize);
        bytes.extend((0..offset).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ shard as u8));
        let facts = (limits(false), gpu_limits(), residency(offset), any::<bool>());
        let facts = facts.prop_map(move |(direct, gpu_direct, residency, mappable)| {
            let cached = Limits { align: 1, memory_align: 1, max_read: 256 << 10, gap: 4096, depth: 4 };
            ShardFacts { bytes: offset, residency, direct, gpu_direct, cached, mappable }
        });
        (Just(bytes), facts, Just(wanted))
    })
}

/// Some of the tensors once more: the same bytes under another name, or the second half of them.
fn again(wanted: &[Wanted], repeats: &[(prop::sample::Index, bool)]) -> Vec<Wanted> {
    let repeat = |(at, (index, whole)): (usize, &(prop::sample::Index, bool))| {
        let tensor = wanted.get(index.index(wanted.len().max(1)))?;
        let name: Arc<str> = format!("{}.{at}", tensor.name).into();
        match tensor.runs.as_slice() {
            [run] if !whole && run.count == 1 && tensor.cast.is_none() => {
                let (offset, len) = (run.offset + run.run / 2, run.run - run.run / 2);
                let runs = vec![Strided::contiguous(Extent { offset, len, shard: run.shard }, 0)];
                let shape = [len as usize].into();
                Some(Wanted { name, runs, bytes: len, shape, dtype: Dtype::U8, ..tensor.clone() })
            }
            _ => Some(Wanted { name, ..tensor.clone() }),
        }
    };
    repeats.iter().enumerate().filter_map(repeat).collect()
}

fn want(shard: u32, index: usize, dtype: Dtype, offset: u64, bytes: u64, choice: Choice) -> Option<Wanted> {
    let whole = Strided::contiguous(Extent { shard, offset, len: bytes }, 0);
    let is_cut = matches!(choice, Choice::Columns { .. });
    let runs = match choice {
        Choice::Nothing => return None,
        Choice::Whole if bytes == 0 => Vec::new(),
        Choice::Whole => vec![whole],
        Choice::Columns { rows, start, width } => {
            let pitch = bytes / rows;
            let run = width.min(pitch.saturating_sub(start));
            let columns = Strided { offset: offset + start, run, stride: pitch, count: rows, at_stride: run, ..whole };
            if run == 0 { Vec::new() } else { vec![columns] }
        }
    };
    let stored: u64 = runs.iter().map(|run| run.run * run.count).sum();
    // Column slices here are bytes of any width, so they are bytes.
    let dtype = if is_cut { Dtype::U8 } else { dtype };
    let pitch = runs.first().map_or(1, |run| run.stride.max(1));
    let cast = cast_of(&dtype, pitch, offset + index as u64);
    let dtype = cast.map_or(dtype, |cast| cast.to.dtype());
    let (bytes, cast) =
        (cast.map_or(stored, |cast| cast.converted(stored)), cast.map(|cast| WantedCast { cast, origin: offset }));
    let name: Arc<str> = format!("{shard}.{index}").into();
    Some(Wanted { name, aliases: Vec::new(), dtype, shape: [bytes as usize].into(), bytes, runs, cast, place: None })
}

/// Every third tensor is converted; bytes as 8-bit floats, with a scale for each block.
fn cast_of(dtype: &Dtype, columns: u64, lot: u64) -> Option<Cast> {
    let (from, to) = match dtype {
        _ if !lot.is_multiple_of(3) => return None,
        Dtype::U8 if lot.is_multiple_of(2) => (Float::E2M1x2, Float::BF16),
        Dtype::U8 => (Float::F8E4M3, Float::BF16),
        Dtype::BF16 => (Float::BF16, Float::F32),
        Dtype::F32 => (Float::F32, Float::F16),
        _ => (Float::F64, Float::BF16),
    };
    let blocks = BlockScale { table: 0, first: 0, columns, block_rows: 3, block_columns: 64 };
    Some(Cast { from, to, scale: (from.bytes() == 1).then_some(blocks) })
}

fn case() -> impl Strategy<Value = Case> {
    let device = (any::<bool>(), prop::sample::select(vec![1u64, 64, 256]))
        .prop_map(|(host_visible, align)| DeviceLimits { host_visible, keeps: true, align, staging: (1, 1 << 20) });
    let route = prop::sample::select(vec![
        RouteChoice::Auto,
        RouteChoice::Auto,
        RouteChoice::Direct,
        RouteChoice::Buffered,
        RouteChoice::Mapped,
        RouteChoice::GpuDirect,
        RouteChoice::GpuDirect,
    ]);
    let buffer = prop::sample::select(vec![16u64 << 10, 64 << 10, 1 << 20]);
    (
        prop::collection::vec(Just(()), 1..4).prop_flat_map(|n| (0..n.len() as u32).map(file).collect::<Vec<_>>()),
        device,
        route,
        buffer,
    )
        .prop_map(|(files, device, route, buffer_bytes)| {
            let mut case = Case {
                files: Vec::new(),
                facts: Vec::new(),
                wanted: Vec::new(),
                device,
                options: PlanOptions { route, buffer_bytes },
            };
            for (bytes, facts, wanted) in files {
                case.files.push(bytes);
                case.facts.push(facts);
                case.wanted.extend(wanted);
            }
            case
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn a_plan_brings_each_selected_byte_once(case in case()) {
        check(&case)?;
    }

    #[test]
    fn the_order_of_the_input_does_not_matter(case in case(), seed in any::<u64>()) {
        let before = plan(&case.wanted, &case.facts, case.device, case.options).unwrap();
        let mut shuffled = case.clone();
        let mut state = seed | 1;
        for i in (1..shuffled.wanted.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            shuffled.wanted.swap(i, (state >> 33) as usize % (i + 1));
        }
        let after = plan(&shuffled.wanted, &shuffled.facts, case.device, case.options).unwrap();
        check(&shuffled)?;
        prop_assert_eq!(before.arena_bytes, after.arena_bytes);
        prop_assert_eq!(before.transfers.len(), after.transfers.len());
    }
}

fn whole(name: &str, dtype: Dtype, offset: u64, len: u64) -> Wanted {
    let runs = vec![Strided::contiguous(Extent { shard: 0, offset, len }, 0)];
    Wanted {
        name: name.into(),
        aliases: Vec::new(),
        dtype,
        shape: [len as usize].into(),
        bytes: len,
        runs,
        cast: None,
        place: None,
    }
}

fn local(memory_align: u64, residency: Residency, bytes: u64) -> ShardFacts {
    let cached = Limits { align: 1, memory_align: 1, max_read: 4 << 20, gap: 64 << 10, depth: 4 };
    let direct = Some(Limits { align: 512, memory_align, max_read: 4 << 20, gap: 64 << 10, depth: 4 });
    ShardFacts { bytes, residency, direct, gpu_direct: None, cached, mappable: true }
}

const CPU: DeviceLimits = DeviceLimits { host_visible: true, keeps: true, align: 1, staging: (1, 1 << 20) };
const AUTO: PlanOptions = PlanOptions { route: RouteChoice::Auto, buffer_bytes: 4 << 20 };

#[test]
fn a_cold_file_lands_in_place_and_a_half_warm_one_takes_both_roads() {
    let bytes = (64 << 20) + 1000;
    let tensors = [whole("a", Dtype::BF16, 1000, 32 << 20), whole("b", Dtype::BF16, 1000 + (32 << 20), 32 << 20)];
    let cold = plan(&tensors, &[local(512, Residency::none(bytes), bytes)], CPU, AUTO).unwrap();
    assert_eq!((cold.staged(), cold.route_bytes(Route::Direct)), (0, 64 << 20));
    assert!(cold.transfers.len() <= 18, "{}", cold.transfers.len());
    let granules = (0..17u64).map(|i| if i < 8 { 4 << 20 } else { 0 }).collect();
    let half = Residency::from_granules(bytes, 4 << 20, granules);
    let mixed = plan(&tensors, &[local(512, half, bytes)], CPU, AUTO).unwrap();
    assert_eq!(mixed.staged(), 0);
    assert!(mixed.route_bytes(Route::Direct) >= 30 << 20 && mixed.route_bytes(Route::Buffered) >= 27 << 20);
}

#[test]
fn tensors_keep_the_files_residue_unless_their_alignment_forbids_it() {
    let bytes = (8 << 20) + 1002;
    let (cold, warm) = (local(512, Residency::none(bytes), bytes), local(512, Residency::all(bytes), bytes));
    let at = |tensor: Wanted, facts: &ShardFacts, device: DeviceLimits| {
        let plan = plan(&[tensor], std::slice::from_ref(facts), device, AUTO).unwrap();
        (plan.placements[0].arena, plan.staged() == plan.transfers.len())
    };
    // BF16 at an even offset stays where it is in its page, cold or warm.
    for facts in [&cold, &warm] {
        assert_eq!(at(whole("a", Dtype::BF16, 1002, 8 << 20), facts, CPU), (1002, false));
    }
    // F64 at an odd offset moves to a good address: by a buffered read when warm, through staging when cold.
    let odd = || whole("a", Dtype::F64, 1001, 8 << 20);
    assert_eq!((at(odd(), &cold, CPU), at(odd(), &warm, CPU)), ((0, true), (0, false)));
    // A device that wants more alignment than the file has gets it the same way.
    let strict = DeviceLimits { align: 256, ..CPU };
    let even = || whole("a", Dtype::BF16, 1002, 8 << 20);
    assert_eq!((at(even(), &cold, strict), at(even(), &warm, strict)), ((0, true), (0, false)));
}

#[test]
fn narrow_columns_are_read_once_with_their_gaps_and_far_ones_are_not() {
    let slice = |pitch: u64, rows: u64| Strided {
        shard: 0,
        offset: 100,
        run: 1024,
        stride: pitch,
        count: rows,
        at: 0,
        at_stride: 1024,
    };
    let want = |runs: Strided| {
        let bytes = runs.run * runs.count;
        vec![Wanted {
            name: "w".into(),
            aliases: Vec::new(),
            dtype: Dtype::F32,
            shape: [].into(),
            bytes,
            runs: vec![runs],
            cast: None,
            place: None,
        }]
    };
    let bytes = 1 << 30;
    let facts = [local(512, Residency::none(bytes), bytes)];
    let near = plan(&want(slice(8192, 1000)), &facts, CPU, AUTO).unwrap();
    assert!(
        near.transfers.len() <= 3 && near.read_bytes() < 8192 * 1001,
        "{} {}",
        near.transfers.len(),
        near.read_bytes()
    );
    let far = plan(&want(slice(1 << 20, 1000)), &facts, CPU, AUTO).unwrap();
    assert!(far.read_bytes() <= 1000 * 2048, "{}", far.read_bytes());
}

#[test]
fn a_hundred_thousand_tensors_stay_few_reads() {
    let tensors: Vec<_> =
        (0..100_000u64).map(|i| whole(&format!("t{i}"), Dtype::BF16, 10_000_000 + i * 4096, 4096)).collect();
    let bytes = 10_000_000 + 100_000 * 4096;
    let plan = plan(&tensors, &[local(512, Residency::none(bytes), bytes)], CPU, AUTO).unwrap();
    assert!(plan.transfers.len() < 110 && plan.staged() == 0, "{}", plan.transfers.len());
}

#[test]
fn a_staging_buffer_below_two_blocks_is_refused_with_both_numbers() {
    let facts = [local(512, Residency::none(1 << 20), 1 << 20)];
    let tensors = [whole("a", Dtype::F64, 1001, 4096)];
    let error = plan(&tensors, &facts, CPU, PlanOptions { buffer_bytes: 512, ..AUTO }).unwrap_err().to_string();
    assert!(error.contains("1024") && error.contains("512") && error.contains("`Options::staging`"), "{error}");
}

const GPU: DeviceLimits = DeviceLimits { host_visible: false, keeps: true, align: 256, staging: (1, 1 << 20) };
const PAST_HOST: PlanOptions = PlanOptions { route: RouteChoice::GpuDirect, buffer_bytes: 4 << 20 };

fn readable(memory_align: u64, residency: Residency, bytes: u64) -> ShardFacts {
    let gpu_direct = Some(Limits { align: 4096, memory_align, max_read: 16 << 20, gap: 0, depth: 8 });
    ShardFacts { gpu_direct, ..local(512, residency, bytes) }
}

#[test]
fn a_device_that_reads_itself_gets_all_whole_blocks_and_the_ends_are_staged() {
    let bytes = (64 << 20) + 1024;
    let tensors = [whole("a", Dtype::BF16, 1024, 32 << 20), whole("b", Dtype::BF16, 1024 + (32 << 20), 32 << 20)];
    let plan = plan(&tensors, &[readable(4096, Residency::all(bytes), bytes)], GPU, PAST_HOST).unwrap();
    let past_host: Vec<_> = plan.transfers.iter().filter(|transfer| transfer.route == Route::GpuDirect).collect();
    assert_eq!((past_host.len(), plan.staged()), (4, 2), "{plan}");
    assert_eq!(plan.route_bytes(Route::GpuDirect), (64 << 20) - 4096, "all but 3072 bytes before and 1024 after");
    assert_eq!((plan.placements[0].arena, plan.placements[1].arena), (1024, 1024 + (32 << 20)));
}

/// A header of any length puts tensors anywhere: they must not all be sent by way of the host for that.
#[test]
fn tensors_that_cannot_keep_their_residue_are_read_by_a_device_that_shifts_them_and_staged_for_one_that_does_not() {
    let bytes = (8 << 20) + 1000;
    let at = |memory_align| {
        let facts = [readable(memory_align, Residency::none(bytes), bytes)];
        let plan = plan(&[whole("a", Dtype::BF16, 1000, 8 << 20)], &facts, GPU, PAST_HOST).unwrap();
        (plan.placements[0].arena % 256, plan.route_bytes(Route::GpuDirect))
    };
    assert_eq!((at(1), at(4096)), ((0, (8 << 20) - 4096), (0, 0)));
}

#[test]
fn a_device_that_reads_itself_is_left_out_where_somebody_else_chose_or_the_bytes_are_in_memory() {
    let bytes = 64 << 20;
    let tensors = [whole("a", Dtype::BF16, 0, 64 << 20)];
    let granules = (0..16u64).map(|i| if i < 8 { 4 << 20 } else { 0 }).collect();
    let half = [readable(1, Residency::from_granules(bytes, 4 << 20, granules), bytes)];
    let past_host = |device, route| {
        let plan = plan(&tensors, &half, device, PlanOptions { route, ..PAST_HOST }).unwrap();
        plan.route_bytes(Route::GpuDirect)
    };
    assert_eq!((past_host(GPU, RouteChoice::GpuDirect), past_host(GPU, RouteChoice::Auto)), (64 << 20, 32 << 20));
    for route in [RouteChoice::Direct, RouteChoice::Buffered, RouteChoice::Mapped] {
        assert_eq!(past_host(GPU, route), 0);
    }
    assert_eq!(past_host(CPU, RouteChoice::GpuDirect), 0, "the host can address it: there is nothing to go past");
    let placed = [Wanted { place: Some(0), ..tensors[0].clone() }];
    assert_eq!(plan(&placed, &half, GPU, PAST_HOST).unwrap().route_bytes(Route::GpuDirect), 0);
}
