//! What to change, in one sentence for each state, chosen from the verdict. Pure text: nothing here measures.

use vramp_bench::{BenchReport, BenchStage, CacheState, Cause, Ceiling, Reason, State};

use super::super::text::{self, rate, seconds};
use super::labels;

/// A load that reaches more than this of T was faster than it by more than measurements differ.
pub(super) const FASTER: f64 = 1.1;

/// One that reaches less was slower than its limit explains.
const SLOWER: f64 = 0.9;

/// One sentence for each state of the report, in its order.
pub(crate) fn of(report: &BenchReport) -> Vec<(CacheState, String)> {
    report.states.iter().map(|state| (state.state, for_state(report, state))).collect()
}

fn for_state(report: &BenchReport, state: &State) -> String {
    if !state.proof.proven {
        return unproven(state.state);
    }
    match state.verdict.reason {
        Some(reason) => for_reason(state, reason),
        None if state.verdict.reached > FASTER => {
            format!(
                "the loads were faster than predicted ({} times T): the limits were measured at a slower moment, so measure again on a quiet machine or with more --rounds",
                labels::factor(1.0 / state.verdict.reached)
            )
        }
        None if state.verdict.reached < SLOWER => {
            format!(
                "the loads took {} times T, and no stage explains it: repeat it on a quiet machine or with more --rounds before changing anything",
                labels::factor(1.0 / state.verdict.reached)
            )
        }
        None => format!("{}: {}", limit(state), remedy(report, state)),
    }
}

fn unproven(state: CacheState) -> String {
    match state {
        CacheState::Cold => "the files could not be dropped from the page cache, so these loads are not cold: use a file system on a disk, and close what else reads the files",
        CacheState::Warm => "the files did not stay in the page cache, so these loads are not warm: a machine with more free memory, or a smaller checkpoint, would show warm loads",
    }
    .to_owned()
}

/// `the limit is storage at 2.10 GB/s`.
fn limit(state: &State) -> String {
    format!("the limit is {}", labels::limit(state.prediction.bound_by, state.prediction.bytes_per_second))
}

/// What would make the limiting stage faster, and how far that helps.
fn remedy(report: &BenchReport, state: &State) -> String {
    let what = match state.prediction.bound_by {
        BenchStage::Opening => "fewer and larger tensors and files would help; more bandwidth would not",
        BenchStage::Storage => "a faster drive, or a second one beside it, would help",
        BenchStage::PageCache | BenchStage::HostCopy => {
            "more or faster memory channels, or more cores to copy with, would help"
        }
        BenchStage::PageCacheToFresh if report.machine.device == "cpu" => {
            "--route view copies nothing, and memory kept from an earlier load spares the first touch; else faster memory would help"
        }
        BenchStage::PageCacheToFresh => "faster memory, or more cores, would help",
        BenchStage::FirstTouch => "memory kept from an earlier load, or transparent huge pages, would help",
        BenchStage::Context => "a process that is kept between loads makes the driver's context only once",
        BenchStage::Pinning => {
            "a loader that is kept between loads locks its staging buffers only once; fewer of them (--staging) lock sooner"
        }
        BenchStage::Upload => {
            "a slot with more or faster lanes would help; check that the link runs at its full width and generation"
        }
        BenchStage::Download => "a slot with more or faster lanes would help",
        BenchStage::Kernels => "a checkpoint stored in the type that is wanted needs no conversion",
        _ => "only that stage being faster would help",
    };
    format!("{what}{}", until_the_next(state))
}

/// `, until the limit is upload at 11.0 GB/s (up to 1.3 times as fast)`.
fn until_the_next(state: &State) -> String {
    let (Some(next), Some(factor)) = (next_slowest(state), state.verdict.next_is_faster_by) else {
        return String::new();
    };
    let gain = match factor {
        factor if factor < 1.05 => "hardly any gain".to_owned(),
        factor => format!("up to {factor:.1} times as fast"),
    };
    format!(", until the limit is {} ({gain})", labels::limit(next.stage, next.bytes_per_second))
}

/// The stage that takes longest after the limiting one.
fn next_slowest(state: &State) -> Option<&Ceiling> {
    let others = state.ceilings.iter().filter(|ceiling| ceiling.stage != state.prediction.bound_by);
    others.max_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Why the load took longer than T, and what to do about that first.
fn for_reason(state: &State, reason: Reason) -> String {
    let lost = format!("{} of {}", seconds(reason.seconds), seconds(state.verdict.seconds));
    match reason.cause {
        Cause::Opening => format!(
            "opening and planning took {lost}: fewer and larger shards, or headers that are in the page cache, would help"
        ),
        Cause::Allocating => format!("reserving memory took {lost}: memory kept from an earlier load would help"),
        Cause::Bookkeeping => {
            format!("the loader's own work took {lost}: fewer and larger tensors, or a faster core, would help")
        }
        Cause::Staging => format!("reads and uploads waited for each other for {lost}: {}", more_staging(state)),
        Cause::ReadSetting => format!("reads of another size or number would save {lost}: {}", better_reads(state)),
        Cause::SlowerTogether(stage) => {
            format!(
                "{} ran slower within the load than alone, by {lost}: {}",
                labels::stage(stage),
                apart(state, stage)
            )
        }
        _ => format!("something that has no name here took {lost}: --html shows when"),
    }
}

fn more_staging(state: &State) -> String {
    match state.median_load().map(|load| load.report.staging).filter(|staging| staging.count > 0) {
        Some(staging) => {
            let size = staging.bytes as u64;
            let have = format!("{} of {}", text::plural(staging.count as u64, "buffer"), text::binary(size));
            format!("try more than the {have}, as --staging {}", typed(staging.count.saturating_mul(2), size))
        }
        None => "try more or larger staging buffers (--staging COUNTxBYTES)".to_owned(),
    }
}

fn better_reads(state: &State) -> String {
    let Some(ceiling) = state.ceilings.iter().find(|ceiling| ceiling.stage == state.prediction.bound_by) else {
        return "see the settings that were tried".to_owned();
    };
    let own = format!(" and the load's own setting {}", rate(ceiling.own_bytes_per_second));
    let best = format!("{} reached {}", labels::setting(&ceiling.setting), rate(ceiling.bytes_per_second));
    let staged = state.median_load().is_some_and(|load| load.report.staging.count > 0);
    let (count, size) = (ceiling.setting.at_once.max(1), ceiling.setting.block_bytes);
    let how = if staged && size > 0 { format!("; try --staging {}", typed(count, size)) } else { String::new() };
    format!("{best}{own}{how}")
}

fn apart(state: &State, stage: BenchStage) -> String {
    let ceiling = state.ceilings.iter().find(|ceiling| ceiling.stage == stage);
    let rates = ceiling.and_then(|ceiling| {
        let within = labels::reached_in_load(state, ceiling)?;
        Some(format!("{} instead of {}; ", rate(within), rate(ceiling.bytes_per_second)))
    });
    format!("{}more cores, or a machine on which nothing else runs, would help", rates.unwrap_or_default())
}

/// As `--staging` takes it.
fn typed(count: usize, bytes: u64) -> String {
    format!("{count}x{}", text::binary(bytes).replace(' ', ""))
}

#[cfg(test)]
mod tests {
    use vramp::report::Staging;

    use super::super::sample;
    use super::*;

    /// The advice of the first state after a change to it.
    fn advice(change: impl FnOnce(&mut BenchReport)) -> String {
        let mut report = sample::report();
        change(&mut report);
        of(&report)[0].1.clone()
    }

    fn bound_by(stage: BenchStage) -> String {
        advice(|report| report.states[0].prediction.bound_by = stage)
    }

    fn because(cause: Cause) -> String {
        advice(|report| report.states[0].verdict.reason = Some(Reason { cause, seconds: 0.1 }))
    }

    #[test]
    fn the_limit_is_named_with_its_rate_and_how_far_its_remedy_helps() {
        let said = bound_by(BenchStage::Storage);
        assert_eq!(
            said,
            "the limit is storage at 2.00 GB/s: a faster drive, or a second one beside it, would help, until the limit is \
             cache to fresh memory at 8.00 GB/s (up to 4.0 times as fast)"
        );
        let alone = advice(|report| report.states[0].ceilings.truncate(1));
        assert!(alone.ends_with("beside it, would help"), "{alone}");
        let close = advice(|report| report.states[0].verdict.next_is_faster_by = Some(1.01));
        assert!(close.ends_with("(hardly any gain)"), "{close}");
    }

    #[test]
    fn every_stage_has_a_remedy_of_its_own() {
        let cases = [
            (BenchStage::PageCache, "memory channels"),
            (BenchStage::PageCacheToFresh, "--route view"),
            (BenchStage::FirstTouch, "huge pages"),
            (BenchStage::HostCopy, "memory channels"),
            (BenchStage::Context, "kept between loads"),
            (BenchStage::Pinning, "--staging"),
            (BenchStage::Upload, "full width and generation"),
            (BenchStage::Download, "lanes"),
            (BenchStage::Kernels, "stored in the type"),
        ];
        for (stage, part) in cases {
            let said = bound_by(stage);
            assert!(
                said.starts_with(&format!("the limit is {}", labels::stage(stage))) && said.contains(part),
                "{stage:?}: {said}"
            );
        }
        let on_a_gpu = advice(|report| {
            report.machine.device = "cuda:0".to_owned();
            report.states[0].prediction.bound_by = BenchStage::PageCacheToFresh;
        });
        assert!(!on_a_gpu.contains("--route view"), "{on_a_gpu}");
    }

    #[test]
    fn a_reason_comes_first_and_brings_its_numbers() {
        let cases = [
            (Cause::Opening, "larger shards"),
            (Cause::Allocating, "memory kept"),
            (Cause::Bookkeeping, "larger tensors"),
            (Cause::Staging, "try more or larger staging buffers (--staging COUNTxBYTES)"),
            (Cause::ReadSetting, "O_DIRECT, io_uring, 16 × 8 MiB reached 2.00 GB/s"),
            (Cause::SlowerTogether(BenchStage::Storage), "storage ran slower"),
        ];
        for (cause, part) in cases {
            let said = because(cause);
            assert!(said.contains("100 ms of 276 ms") && said.contains(part), "{cause:?}: {said}");
        }
    }

    #[test]
    fn what_can_be_typed_is_said_as_it_is_typed() {
        let staged = |cause| {
            advice(|report| {
                let state = &mut report.states[0];
                state.loads.iter_mut().for_each(|load| load.report.staging = Staging { count: 8, bytes: 4 << 20 });
                state.ceilings[0].own_bytes_per_second = 1.5e9;
                state.verdict.reason = Some(Reason { cause, seconds: 0.1 });
            })
        };
        let said = staged(Cause::Staging);
        assert!(said.ends_with("try more than the 8 buffers of 4 MiB, as --staging 16x4MiB"), "{said}");
        let said = staged(Cause::ReadSetting);
        assert!(said.ends_with("and the load's own setting 1.50 GB/s; try --staging 16x8MiB"), "{said}");
    }

    #[test]
    fn what_was_not_proved_is_not_explained() {
        let cold = advice(|report| report.states[0].proof.proven = false);
        assert!(cold.contains("not cold"), "{cold}");
        let warm = {
            let mut report = sample::report();
            report.states[1].proof.proven = false;
            of(&report)[1].1.clone()
        };
        assert!(warm.contains("not warm"), "{warm}");
        let faster = advice(|report| report.states[0].verdict.reached = 1.2);
        let slower = advice(|report| report.states[0].verdict.reached = 0.5);
        assert!(slower.contains("2.00 times T, and no stage explains it"), "{slower}");
        assert!(faster.contains("0.83 times T") && faster.contains("--rounds"), "{faster}");
    }
}
