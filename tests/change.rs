//! Files that shrink, are replaced, rewritten or deleted at random moments of a load, for each route: always an error or the
//! whole right bytes, never a signal (it would end the test program), never a hang.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::{CpuDevice, Device};
use vramp::load::{Loader, Observer, TransferOptions};
use vramp::plan::{LoadPlan, RouteChoice};
use vramp::report::Staging;
use vramp::testing::{Random, watched};

use crate::files::{Folder, folder};

#[derive(Debug, Clone, Copy)]
enum Harm {
    Truncate,
    Replace,
    Rewrite,
    Delete,
}

/// Does harm to a shard when the load has made so many steps (0: right after planning).
struct Saboteur {
    harm: Harm,
    shard: std::path::PathBuf,
    steps: AtomicU64,
}

impl Saboteur {
    fn step(&self) {
        if self.steps.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let len = fs::metadata(&self.shard).map_or(0, |data| data.len());
        match self.harm {
            Harm::Truncate => fs::OpenOptions::new().write(true).open(&self.shard).unwrap().set_len(len / 3).unwrap(),
            Harm::Delete => fs::remove_file(&self.shard).unwrap(),
            Harm::Rewrite => {
                use std::os::unix::fs::FileExt;
                let file = fs::OpenOptions::new().write(true).open(&self.shard).unwrap();
                file.write_all_at(&vec![0xEE; 4096], len / 2).unwrap();
            }
            Harm::Replace => {
                let other = self.shard.with_extension("new");
                fs::write(&other, vec![0xEE; len as usize]).unwrap();
                fs::rename(&other, &self.shard).unwrap();
            }
        }
    }
}

impl Observer for Saboteur {
    fn planned(&self, _plan: &LoadPlan) {
        self.step();
    }

    fn advanced(&self, _done: u64) {
        self.step();
    }
}

/// Loads while the shard is harmed; says whether the load was refused.
fn load_while_harmed(made: &Folder, harm: Harm, steps: u64, route: RouteChoice, device: Arc<dyn Device>) -> bool {
    let shard = made.shards[steps as usize % made.shards.len()].clone();
    let saboteur = Arc::new(Saboteur { harm, shard, steps: AtomicU64::new(steps + 1) });
    let staging = Some(Staging { count: 3, bytes: 64 << 10 });
    let options = TransferOptions::default().route(route).staging(staging).observer(saboteur);
    let mut loader = Loader::new(device, options);
    let load = || {
        let checkpoint = Checkpoint::open(made.path())?;
        let selected = checkpoint.select(&Selection::default())?;
        let prepared = loader.prepare(checkpoint.clone(), &selected)?;
        loader.load(&prepared)
    };
    let mut load = load;
    match load() {
        Err(_) => true,
        Ok(loaded) => {
            for (name, bytes) in &made.expected {
                assert!(
                    loaded.tensor(name).unwrap().bytes().unwrap() == bytes,
                    "{harm:?} by {route:?}: half-old {name}"
                );
            }
            false
        }
    }
}

fn harmed(route: RouteChoice) {
    watched(move || {
        let mut random = Random::new(route as u64 + 1);
        let mut refused = [0; 4];
        for round in 0..100 {
            let harm = [Harm::Truncate, Harm::Replace, Harm::Rewrite, Harm::Delete][round % 4];
            let made = folder(round as u64, 3, 4, 300_000);
            // Some loads land in place, others go through staging (the alignment forbids the other).
            let device = if round % 3 == 0 { CpuDevice::with_align(4096) } else { CpuDevice::new() };
            let steps = random.below(12) as u64;
            refused[round % 4] += usize::from(load_while_harmed(&made, harm, steps, route, Arc::new(device)));
        }
        assert!(refused[..3].iter().all(|&count| count > 5), "harm that nobody noticed tests nothing: {refused:?}");
    });
}

#[test]
fn harm_during_a_load_by_the_automatic_route() {
    harmed(RouteChoice::Auto);
}

#[test]
fn harm_during_a_direct_load() {
    harmed(RouteChoice::Direct);
}

#[test]
fn harm_during_a_buffered_load() {
    harmed(RouteChoice::Buffered);
}

#[test]
fn harm_during_a_mapped_load() {
    harmed(RouteChoice::Mapped);
}

#[test]
fn the_error_names_the_file_and_what_happened() {
    let made = folder(1, 1, 4, 300_000);
    let saboteur = |harm| Arc::new(Saboteur { harm, shard: made.shards[0].clone(), steps: AtomicU64::new(1) });
    let options = TransferOptions::default().observer(saboteur(Harm::Truncate));
    let mut loader = Loader::new(Arc::new(CpuDevice::new()), options);
    let checkpoint = Checkpoint::open(made.path()).unwrap();
    let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default()).unwrap()).unwrap();
    let before = fs::metadata(&made.shards[0]).unwrap().len();
    let error = loader.load(&prepared).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("model.safetensors") && message.contains(&before.to_string()), "{message}");
    assert!(message.contains(&(before / 3).to_string()), "{message}");
    assert_eq!((error.kind().as_str(), error.exit_code()), ("changed", 3));
}
