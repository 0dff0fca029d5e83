//! Which part of a checkpoint stands for the whole: one run of neighbouring tensors, or several runs spread evenly over the files.
//!
//! What a load costs depends on how large its pieces are, so the sizes in the part must be spread as in the whole. Tensors are
//! never picked for being small: runs of neighbours keep what lies between large tensors. A tensor that a run has no room for is
//! cut. Pure functions over sizes; nothing here knows a file.

/// Pieces from this size on are read in parts of the same size, so that all of them count alike.
const LARGE: u64 = 4 << 20;

/// What a piece costs beside its bytes, in bytes.
const EACH: u64 = 128 << 10;

/// Classes of sizes: powers of two up to [`LARGE`].
const CLASSES: usize = 25;

/// Numbers of runs that are tried, the fewest first.
const RUNS: [u64; 10] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];

/// The number of places within its share of the files that a run may begin at.
const PLACES: u64 = 8;

/// A part that differs by less than this from the whole is as good as another.
const ALIKE: f64 = 0.05;

/// What a part loses for room that it leaves: less is measured.
const EMPTY: f64 = 0.3;

/// A part of a checkpoint.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Part {
    /// Which tensors, as indices in the order of the files; and to about how many bytes they are cut, if they are.
    pub(super) taken: Vec<(usize, Option<u64>)>,
    /// Number of runs of neighbours.
    pub(super) runs: usize,
    /// How much the sizes differ from those of the whole: 0 not at all, 1 in everything.
    pub(super) unlike: f64,
}

/// The tensors in the order of the files. `cut` says how many bytes one has when it is cut to at most so many; `None` where it
/// cannot be.
pub(super) fn choose(sizes: &[u64], most: u64, cut: impl Fn(usize, u64) -> Option<u64>) -> Part {
    let whole = Spread::of(sizes.iter().copied());
    let mut best: Option<(f64, Part)> = None;
    for runs in RUNS {
        for place in 0..PLACES {
            let part = spread(sizes, most, runs, place, &cut);
            let pieces = || part.taken.iter().map(|&(at, cut)| cut.unwrap_or(sizes[at]));
            let unlike = whole.difference(&Spread::of(pieces()));
            let bytes: u64 = pieces().sum();
            let cost = unlike + EMPTY * (1.0 - (as_f64(bytes) / as_f64(most.max(1))).min(1.0));
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, Part { unlike, ..part }));
            }
        }
        if best.as_ref().is_some_and(|(cost, _)| *cost < ALIKE) {
            break; // fewer and longer runs are more like a load of the whole
        }
    }
    best.map(|(_, part)| part).unwrap_or_default()
}

/// So many runs, one in each of as many equal shares of the cost.
fn spread(sizes: &[u64], most: u64, runs: u64, place: u64, cut: &impl Fn(usize, u64) -> Option<u64>) -> Part {
    let total: u64 = sizes.iter().fold(0, |sum, size| sum.saturating_add(*size));
    let cost: u64 = sizes.iter().fold(0, |sum, size| sum.saturating_add(cost_of(*size)));
    let (share, room) = (cost / runs, part_of(cost, most, total) / runs);
    // What is left of the room of this run, and of the bytes of all.
    let (mut left, mut left_bytes) = (0u64, most);
    let (mut part, mut next, mut at) = (Part::default(), 0, 0u64);
    for run in 0..runs {
        let begin = share * run + share.saturating_sub(room) / (PLACES - 1) * place;
        let end = if run + 1 == runs { u64::MAX } else { share * (run + 1) };
        // Up to the tensor in which the run begins.
        while sizes.get(next).is_some_and(|size| at.saturating_add(cost_of(*size)) <= begin) {
            at = at.saturating_add(cost_of(sizes[next]));
            next += 1;
        }
        left = left.saturating_add(room);
        let before = part.taken.len();
        while let Some(&size) = sizes.get(next).filter(|_| at < end) {
            let fits = left.min(left_bytes);
            let whole = size == 0 || size <= fits;
            let piece = if whole { Some(size) } else { cut(next, fits).filter(|bytes| (1..=fits).contains(bytes)) };
            if let Some(bytes) = piece {
                part.taken.push((next, (bytes < size).then_some(bytes)));
                left = left.saturating_sub(cost_of(bytes));
                left_bytes -= bytes;
            }
            at = at.saturating_add(cost_of(size));
            next += 1;
            if !whole {
                break; // the run is full
            }
        }
        part.runs += usize::from(part.taken.len() > before);
    }
    part
}

/// What a piece costs, in bytes.
fn cost_of(size: u64) -> u64 {
    if size == 0 { 0 } else { size.saturating_add(EACH) }
}

/// The same part of `of` as `part` is of `whole`.
fn part_of(of: u64, part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(of) * u128::from(part) / u128::from(whole.max(1))).unwrap_or(u64::MAX)
}

/// How the cost of pieces is spread over their sizes; adds up to 1.
struct Spread([f64; CLASSES]);

impl Spread {
    fn of(sizes: impl Iterator<Item = u64>) -> Spread {
        let mut classes = [0.0; CLASSES];
        for size in sizes.filter(|size| *size > 0) {
            let class = size.min(LARGE).ilog2() as usize;
            if let Some(cost) = classes.get_mut(class) {
                *cost += as_f64(cost_of(size));
            }
        }
        let all: f64 = classes.iter().sum();
        Spread(classes.map(|cost| cost / all.max(1.0)))
    }

    /// Half of what they differ by in all classes together. Sizes next to a power of two fall into one class or the other by chance, so a
    /// class is compared together with half of its neighbours.
    fn difference(&self, other: &Spread) -> f64 {
        let smooth = |of: &[f64; CLASSES], at: usize| {
            let near = |at: Option<usize>| at.and_then(|at| of.get(at)).copied().unwrap_or(0.0);
            (near(at.checked_sub(1)) + 2.0 * near(Some(at)) + near(Some(at + 1))) / 4.0
        };
        (0..=CLASSES).map(|at| (smooth(&self.0, at) - smooth(&other.0, at)).abs()).sum::<f64>() / 2.0
    }
}

#[allow(clippy::cast_precision_loss)] // a share has no use for the 54th bit
fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Rows of 4 KiB.
    fn rows(sizes: &[u64]) -> impl Fn(usize, u64) -> Option<u64> {
        |at, most| Some(most.min(sizes[at]) / 4096 * 4096).filter(|bytes| *bytes > 0)
    }

    fn bytes(sizes: &[u64], part: &Part) -> u64 {
        part.taken.iter().map(|&(at, cut)| cut.unwrap_or(sizes[at])).sum()
    }

    /// Each layer's tensors one after the other, between two large ones.
    fn transformer(layers: usize, large: u64) -> Vec<u64> {
        let layer = [16 * MIB, 4 * MIB, 4 * MIB, 16 * MIB, 56 * MIB, 56 * MIB, 56 * MIB, 8192, 8192];
        let mut sizes = vec![large];
        sizes.extend(layer.iter().cycle().take(layers * layer.len()));
        sizes.extend([8192, large]);
        sizes
    }

    #[test]
    fn layers_of_a_model_are_one_run_and_small_tensors_are_not_picked() {
        // What was measured before: one that did not fit was passed over, and all later small ones were taken.
        let sizes = transformer(32, 1000 * MIB);
        let part = choose(&sizes, 768 * MIB, rows(&sizes));
        assert_eq!(part.runs, 1, "{part:?}");
        assert!(part.unlike < ALIKE, "{part:?}");
        let small = part.taken.iter().filter(|(at, _)| sizes[*at] == 8192).count() as u64;
        let expected = 65 * bytes(&sizes, &part) / sizes.iter().sum::<u64>();
        assert!(small.abs_diff(expected) <= 3, "{small} small ones, {expected} expected");
    }

    #[test]
    fn sizes_that_lie_apart_are_all_there() {
        // As safetensors sorts them: all of one type, then all of the next.
        let groups = [vec![256; 4000], vec![MIB / 2; 400], vec![64 * MIB; 60]];
        let sizes = groups.concat();
        let part = choose(&sizes, 256 * MIB, rows(&sizes));
        let of = |size| part.taken.iter().filter(|(at, _)| sizes[*at] == size).count();
        let share = 256.0 * MIB as f64 / sizes.iter().sum::<u64>() as f64;
        for (group, size) in groups.iter().zip([256, MIB / 2]) {
            let expected = group.len() as f64 * share;
            let found = of(size) as f64;
            assert!(found > expected * 0.4 && found < expected * 2.5, "{found} of {size} bytes, {expected} expected");
        }
        assert!(part.unlike < 0.1, "{}", part.unlike);
    }

    #[test]
    fn one_huge_tensor_is_cut_and_one_that_cannot_be_is_left() {
        let sizes = [100 << 30];
        let part = choose(&sizes, 768 * MIB, rows(&sizes));
        assert_eq!((part.taken, part.runs), (vec![(0, Some(768 * MIB))], 1));
        let none = choose(&sizes, 768 * MIB, |_, _| None);
        assert!(none.taken.is_empty());
        assert!(choose(&[], 1, |_, _| None).taken.is_empty());
    }

    /// What of the pieces' bytes lies in pieces below a size, and how many pieces there are for each of their bytes.
    fn share_below(sizes: impl Iterator<Item = u64> + Clone, below: u64) -> f64 {
        let all: u64 = sizes.clone().sum();
        sizes.filter(|size| *size < below).sum::<u64>() as f64 / all as f64
    }

    /// Checkpoints: layers that repeat, sorted by size, by type, in any order; with giants, with very small tensors.
    fn checkpoints() -> impl Strategy<Value = Vec<u64>> {
        let kinds = prop::collection::vec((8u32..28, 1usize..200), 1..9);
        (kinds, 0u8..4, 1usize..40, any::<u64>()).prop_map(|(kinds, order, repeat, seed)| {
            let kinds: Vec<(u64, usize)> = kinds.into_iter().map(|(log2, count)| (3 << (log2 - 1), count)).collect();
            let once = || kinds.iter().flat_map(|&(size, count)| std::iter::repeat_n(size, count.div_ceil(repeat)));
            let mut sizes: Vec<u64> = (0..repeat).flat_map(|_| once()).collect();
            match order {
                0 => {} // layers
                1 => sizes.sort_unstable(),
                2 => sizes.sort_unstable_by_key(|size| (size.ilog2() % 3, *size)), // by type
                _ => {
                    let mut random = vramp::testing::Random::new(seed);
                    (1..sizes.len()).rev().for_each(|at| sizes.swap(at, random.below(at + 1)));
                }
            }
            sizes
        })
    }

    proptest! {
        #[test]
        fn a_part_is_like_the_whole(sizes in checkpoints(), divisor in 2u64..24) {
            let total: u64 = sizes.iter().sum();
            let most = (total / divisor).max(64 * MIB).min(total);
            let part = choose(&sizes, most, rows(&sizes));
            let pieces = || part.taken.iter().map(|&(at, cut)| cut.unwrap_or(sizes[at]));
            prop_assert!(bytes(&sizes, &part) <= most && bytes(&sizes, &part) > most / 2, "{} of {most}", bytes(&sizes, &part));
            prop_assert!(part.taken.windows(2).all(|pair| pair[0].0 < pair[1].0), "each once, in order");
            for below in [4 << 10, 64 << 10, MIB, 4 * MIB] {
                let (whole, here) = (share_below(sizes.iter().copied(), below), share_below(pieces(), below));
                prop_assert!((whole - here).abs() < 0.15, "below {below}: {whole:.3} of the whole, {here:.3} of the part");
            }
            // Small pieces cost time and no bytes: their number must not be another.
            let number = |below: u64, sizes: &mut dyn Iterator<Item = u64>| sizes.filter(|size| *size < below).count() as f64;
            let whole = number(64 << 10, &mut sizes.iter().copied()) / total as f64 * bytes(&sizes, &part) as f64;
            let here = number(64 << 10, &mut pieces());
            let slack = 0.25 * bytes(&sizes, &part) as f64 / EACH as f64;
            prop_assert!((whole - here).abs() < slack.max(8.0), "{here} small pieces, {whole:.0} expected");
        }
    }
}
