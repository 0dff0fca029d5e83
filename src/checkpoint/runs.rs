//! Where the bytes of a tensor, or of a slice of it, lie: the fewest strided runs that hold them.
//!
//! Pure geometry: shapes and extents in, byte runs out. It reads nothing and refuses nothing; `selection` has checked that
//! a slice lies within its tensor and cuts on whole bytes.

use std::ops::Range;

use super::{Part, Slice, TensorData, TensorInfo};
use crate::extent::{Extent, Strided};

impl TensorInfo {
    /// The runs that make up the tensor, or a slice of it that [`Checkpoint::select`](super::Checkpoint::select) has
    /// accepted, ordered by their place in it. Each selected byte is in exactly one; an empty tensor has none. A tensor of
    /// unknown type has runs only as a whole.
    pub fn runs(&self, slice: Option<&Slice>) -> Vec<Strided> {
        if let (TensorData::Whole(extent), None) = (&self.data, slice) {
            return contiguous(extent);
        }
        let whole = Window { start: vec![0; self.shape.len()], shape: self.shape.to_vec() };
        let window = slice.map_or(whole.clone(), |slice| whole.cut(slice));
        let mut runs = match (&self.data, self.dtype.bits()) {
            (TensorData::Whole(extent), Some(bits)) => box_runs(bits, extent, &whole, &window),
            (TensorData::Parts(parts), Some(bits)) => {
                parts.iter().flat_map(|part| box_runs(bits, &part.extent, &part.into(), &window)).collect()
            }
            (_, None) => Vec::new(),
        };
        runs.sort_unstable_by_key(|run| run.at);
        joined(runs)
    }
}

/// The part of some runs that makes up the bytes `part` of the selected tensor, counted from its first byte. At most three runs
/// for each one.
pub(crate) fn runs_within(runs: &[Strided], part: &Range<u64>) -> Vec<Strided> {
    runs.iter().flat_map(|run| within(run, part)).collect()
}

fn within(run: &Strided, part: &Range<u64>) -> Vec<Strided> {
    let step = run.at_stride.max(1);
    // The first run that ends behind the start of the part, and the first that begins at its end or behind it.
    let first = (part.start + 1).saturating_sub(run.at + run.run).div_ceil(step).min(run.count);
    let end = part.end.saturating_sub(run.at).div_ceil(step).min(run.count);
    if run.run == 0 || first >= end {
        return Vec::new();
    }
    let cut = |index: u64| {
        let one = run.nth(index);
        let (start, stop) = (one.at.max(part.start), (one.at + one.run).min(part.end));
        let (offset, len) = (one.offset + (start - one.at), stop - start);
        Strided { offset, run: len, stride: len, at: start - part.start, at_stride: len, ..one }
    };
    let is_whole = |index: u64| cut(index).run == run.run;
    let (mut cuts, mut middle) = (Vec::new(), first..end);
    if !is_whole(first) {
        cuts.push(cut(first));
        middle.start += 1;
    }
    let last = (middle.start < middle.end && !is_whole(end - 1)).then(|| cut(end - 1));
    middle.end -= u64::from(last.is_some());
    match middle.end.saturating_sub(middle.start) {
        0 => {}
        1 => cuts.push(cut(middle.start)),
        count => cuts.push(Strided { count, stride: run.stride, at_stride: run.at_stride, ..cut(middle.start) }),
    }
    cuts.extend(last);
    cuts
}

/// A box of elements.
#[derive(Debug, Clone)]
struct Window {
    start: Vec<usize>,
    shape: Vec<usize>,
}

impl From<&Part> for Window {
    fn from(part: &Part) -> Window {
        Window { start: part.start.clone(), shape: part.shape.clone() }
    }
}

impl Window {
    fn cut(&self, slice: &Slice) -> Window {
        let mut window = self.clone();
        if let (Some(start), Some(len)) = (window.start.get_mut(slice.dim), window.shape.get_mut(slice.dim)) {
            (*start, *len) = (slice.start, slice.end.saturating_sub(slice.start));
        }
        window
    }

    /// First element and count of what both have along one dimension; nothing if that is none.
    fn common(&self, other: &Window, dim: usize) -> Option<(usize, usize)> {
        let first = self.start[dim].max(other.start[dim]);
        let end = (self.start[dim] + self.shape[dim]).min(other.start[dim] + other.shape[dim]);
        end.checked_sub(first).filter(|&count| count > 0).map(|count| (first, count))
    }
}

fn contiguous(extent: &Extent) -> Vec<Strided> {
    let &Extent { shard, offset, len } = extent;
    let one = Strided { shard, offset, run: len, stride: len, count: 1, at: 0, at_stride: len };
    if len == 0 { Vec::new() } else { vec![one] }
}

/// One of the nested loops that walk a box: steps in bits in the file and in the selected tensor.
#[derive(Debug, Clone, Copy)]
struct Loop {
    count: u64,
    from: u64,
    to: u64,
}

/// The runs of what `stored` (a box that lies row-major in `extent`) and `window` have in common.
fn box_runs(bits: u64, extent: &Extent, stored: &Window, window: &Window) -> Vec<Strided> {
    if stored.shape.contains(&0) || window.shape.contains(&0) {
        // Products of the other dimensions may pass 64 bits.
        return Vec::new();
    }
    let (mut from, mut to) = (bits, bits);
    let (mut offset, mut at) = (0, 0);
    let mut run = bits;
    let mut loops: Vec<Loop> = Vec::new();
    for dim in (0..window.shape.len()).rev() {
        let Some((first, count)) = stored.common(window, dim) else { return Vec::new() };
        offset += (first - stored.start[dim]) as u64 * from;
        at += (first - window.start[dim]) as u64 * to;
        nest(&mut run, &mut loops, Loop { count: count as u64, from, to });
        from *= stored.shape[dim] as u64;
        to *= window.shape[dim] as u64;
    }
    let base = Strided {
        shard: extent.shard,
        offset: extent.offset + offset / 8,
        run: run / 8,
        stride: run / 8,
        count: 1,
        at: at / 8,
        at_stride: run / 8,
    };
    unrolled(base, loops)
}

/// Adds the next outer loop: to the run where its steps follow each other without a gap on both sides, to the loop inside
/// where that goes on evenly, else as a loop of its own.
fn nest(run: &mut u64, loops: &mut Vec<Loop>, outer: Loop) {
    match loops.last_mut() {
        _ if outer.count == 1 => {}
        None if (outer.from, outer.to) == (*run, *run) => *run *= outer.count,
        Some(inner) if (outer.from, outer.to) == (inner.count * inner.from, inner.count * inner.to) => {
            inner.count *= outer.count;
        }
        _ => loops.push(outer),
    }
}

/// The longest loop becomes the stride; the others are written out.
fn unrolled(base: Strided, mut loops: Vec<Loop>) -> Vec<Strided> {
    let Some(longest) = (0..loops.len()).max_by_key(|&at| loops[at].count) else { return vec![base] };
    let longest = loops.swap_remove(longest);
    let first = Strided { count: longest.count, stride: longest.from / 8, at_stride: longest.to / 8, ..base };
    loops.iter().fold(vec![first], |runs, outer| {
        let steps = (0..outer.count).flat_map(|step| runs.iter().map(move |run| (step, run)));
        let moved = |(step, run): (u64, &Strided)| Strided {
            offset: run.offset + step * (outer.from / 8),
            at: run.at + step * (outer.to / 8),
            ..*run
        };
        steps.map(moved).collect()
    })
}

/// Runs that follow each other both in the file and in the tensor become one.
fn joined(runs: Vec<Strided>) -> Vec<Strided> {
    let mut joined: Vec<Strided> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if follows(last, &run) => {
                let len = last.run + run.run;
                *last = Strided { run: len, stride: len, at_stride: len, ..*last };
            }
            _ => joined.push(run),
        }
    }
    joined
}

fn follows(last: &Strided, next: &Strided) -> bool {
    let single = last.count == 1 && next.count == 1 && last.shard == next.shard;
    single && last.offset + last.run == next.offset && last.at + last.run == next.at
}

#[cfg(test)]
mod tests {
    #![allow(clippy::cast_possible_truncation)]

    use super::*;
    use crate::dtype::{Dtype, StoredDtype};
    use proptest::prelude::*;

    fn tensor(dtype: impl Into<StoredDtype>, shape: &[usize], data: TensorData) -> TensorInfo {
        TensorInfo { name: "w".into(), dtype: dtype.into(), shape: shape.into(), data }
    }

    fn whole(dtype: Dtype, shape: &[usize], offset: u64) -> TensorInfo {
        let len = dtype.tensor_bytes(shape).unwrap();
        tensor(dtype, shape, TensorData::Whole(Extent { shard: 0, offset, len }))
    }

    #[test]
    fn rows_are_one_run_and_columns_are_one_stride() {
        let w = whole(Dtype::F32, &[12, 5], 100);
        let rows = w.runs(Some(&Slice { dim: 0, start: 3, end: 6 }));
        let one = Strided { shard: 0, offset: 160, run: 60, stride: 60, count: 1, at: 0, at_stride: 60 };
        assert_eq!(rows, [one]);
        let columns = w.runs(Some(&Slice { dim: 1, start: 1, end: 3 }));
        let many = Strided { shard: 0, offset: 104, run: 8, stride: 20, count: 12, at: 0, at_stride: 8 };
        assert_eq!(columns, [many]);
    }

    #[test]
    fn a_middle_dimension_takes_one_stride_too() {
        let w = whole(Dtype::U8, &[4, 6, 3], 0);
        let runs = w.runs(Some(&Slice { dim: 1, start: 2, end: 4 }));
        assert_eq!(runs, [Strided { shard: 0, offset: 6, run: 6, stride: 18, count: 4, at: 0, at_stride: 6 }]);
    }

    #[test]
    fn packed_elements_are_counted_in_bits() {
        let w = whole(Dtype::F4, &[4, 8], 10);
        let runs = w.runs(Some(&Slice { dim: 1, start: 2, end: 6 }));
        assert_eq!(runs, [Strided { shard: 0, offset: 11, run: 2, stride: 4, count: 4, at: 0, at_stride: 2 }]);
    }

    #[test]
    fn nothing_has_no_runs_and_a_scalar_has_one() {
        assert!(whole(Dtype::F32, &[0, 4], 8).runs(None).is_empty());
        assert_eq!(whole(Dtype::F32, &[], 8).runs(None).len(), 1);
    }

    #[test]
    fn the_whole_of_an_unknown_type_is_one_run() {
        let extent = Extent { shard: 1, offset: 8, len: 7 };
        let runs = tensor(StoredDtype::Unknown("X".into()), &[3], TensorData::Whole(extent)).runs(None);
        assert_eq!((runs[0].offset, runs[0].run, runs.len()), (8, 7, 1));
    }

    /// Shape, cut positions along each dimension, bytes of an element, slice.
    type Case = (Vec<usize>, Vec<Vec<usize>>, u64, Option<Slice>);

    fn cases() -> impl Strategy<Value = Case> {
        let dims = prop::collection::vec((1usize..5, prop::collection::vec(0usize..5, 0..3)), 0..4);
        (
            dims,
            prop::sample::select(vec![1u64, 2, 4]),
            any::<prop::sample::Index>(),
            0usize..5,
            0usize..5,
            any::<bool>(),
        )
            .prop_map(|(dims, width, dim, a, b, sliced)| {
                let shape: Vec<usize> = dims.iter().map(|(len, _)| *len).collect();
                let slice = (sliced && !shape.is_empty()).then(|| {
                    let dim = dim.index(shape.len());
                    let (a, b) = (a.min(shape[dim]), b.min(shape[dim]));
                    Slice { dim, start: a.min(b), end: a.max(b) }
                });
                (shape, dims.into_iter().map(|(_, cuts)| cuts).collect(), width, slice)
            })
    }

    /// The boxes of a grid with those cuts.
    fn grid(shape: &[usize], cuts: &[Vec<usize>]) -> Vec<Window> {
        let mut boxes = vec![Window { start: vec![], shape: vec![] }];
        for (len, cuts) in shape.iter().zip(cuts) {
            let mut edges: Vec<usize> = cuts.iter().map(|cut| cut.min(len)).copied().chain([0, *len]).collect();
            edges.sort_unstable();
            edges.dedup();
            boxes = boxes
                .iter()
                .flat_map(|before| {
                    edges.windows(2).map(|edge| {
                        let mut next = before.clone();
                        next.start.push(edge[0]);
                        next.shape.push(edge[1] - edge[0]);
                        next
                    })
                })
                .collect();
        }
        boxes
    }

    /// All index vectors of a box, row-major.
    fn elements(window: &Window) -> Vec<Vec<usize>> {
        window.start.iter().zip(&window.shape).fold(vec![vec![]], |all, (start, len)| {
            all.iter().flat_map(|at| (*start..start + len).map(move |i| [&at[..], &[i]].concat())).collect()
        })
    }

    fn number(shape: &[usize], at: &[usize]) -> u64 {
        shape.iter().zip(at).fold(0, |number, (len, i)| number * *len as u64 + *i as u64)
    }

    /// The bytes of one element of the tensor: its number, twice, so that a wrong byte within an element shows too.
    fn bytes_of(number: u64, width: u64) -> impl Iterator<Item = u8> {
        (0..width).map(move |byte| (number * 7 + byte * 101) as u8)
    }

    proptest! {
        #[test]
        fn copying_the_runs_is_copying_element_by_element((shape, cuts, width, slice) in cases(), step in 1usize..40) {
            let dtype = match width { 1 => Dtype::U8, 2 => Dtype::I16, _ => Dtype::F32 };
            let boxes = grid(&shape, &cuts);
            let (mut file, mut parts) = (vec![0xEE; 3], Vec::new());
            for part in &boxes {
                let offset = file.len() as u64;
                file.extend(elements(part).iter().flat_map(|at| bytes_of(number(&shape, at), width)));
                let extent = Extent { shard: 0, offset, len: file.len() as u64 - offset };
                parts.push(Part { extent, start: part.start.clone(), shape: part.shape.clone() });
            }
            let data = match &parts[..] {
                [one] => TensorData::Whole(one.extent),
                _ => TensorData::Parts(parts),
            };
            let w = tensor(dtype, &shape, data);
            let all = Window { start: vec![0; shape.len()], shape: shape.clone() };
            let window = slice.as_ref().map_or(all.clone(), |slice| all.cut(slice));
            let wanted: Vec<u8> = elements(&window).iter().flat_map(|at| bytes_of(number(&shape, at), width)).collect();

            let mut written = vec![0u8; wanted.len()];
            let mut found = wanted.iter().map(|byte| !byte).collect::<Vec<u8>>();
            for run in w.runs(slice.as_ref()) {
                for k in 0..run.count {
                    let (from, to) = ((run.offset + k * run.stride) as usize, (run.at + k * run.at_stride) as usize);
                    let len = run.run as usize;
                    found[to..to + len].copy_from_slice(&file[from..from + len]);
                    written[to..to + len].iter_mut().for_each(|count| *count += 1);
                }
            }
            prop_assert_eq!(&found, &wanted);
            prop_assert!(written.iter().all(|&count| count == 1));

            // In parts of any size: the same bytes, one part after the other.
            let len = wanted.len() as u64;
            for part in (0..len).step_by(step).map(|start| start..(start + step as u64).min(len)) {
                let mut bytes = vec![None; (part.end - part.start) as usize];
                for run in runs_within(&w.runs(slice.as_ref()), &part) {
                    for k in 0..run.count {
                        let (from, to) = ((run.offset + k * run.stride) as usize, (run.at + k * run.at_stride) as usize);
                        for byte in 0..run.run as usize {
                            prop_assert_eq!(bytes[to + byte].replace(file[from + byte]), None);
                        }
                    }
                }
                let expected: Vec<_> = wanted[part.start as usize..part.end as usize].iter().copied().map(Some).collect();
                prop_assert_eq!(bytes, expected);
            }
        }
    }
}
