//! The progress bar of a load or a conversion: on stderr, only where that is a terminal, ten times a second at most.
//!
//! It observes the load and never takes part in it: the bytes move the same way with and without it.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vramp::load::Observer;
use vramp::plan::LoadPlan;

/// Loads that are over by then show no bar.
const GRACE: Duration = Duration::from_millis(200);

const TEMPLATE: &str =
    "{bar:30.cyan/dim} {percent:>3} %  {decimal_bytes} of {decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left";

/// A bar that follows a load.
pub(crate) struct Progress {
    bar: ProgressBar,
    since: Instant,
    /// Bytes that the plan reads. Given to the bar only when it shows, since telling it draws it.
    total: AtomicU64,
}

impl Progress {
    /// The bar, if stderr is a terminal.
    pub(crate) fn on_terminal() -> Option<Arc<Progress>> {
        std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
            Arc::new(Progress {
                bar: bar.with_style(style.progress_chars("██░")),
                since: Instant::now(),
                total: AtomicU64::new(0),
            })
        })
    }

    /// Shows that `done` bytes of `total` are done.
    pub(crate) fn show(&self, done: u64, total: u64) {
        if self.since.elapsed() > GRACE {
            if self.bar.length() != Some(total) {
                self.bar.set_length(total);
            }
            self.bar.set_position(done);
        }
    }

    /// Takes the bar off the screen.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Progress {
    fn planned(&self, plan: &LoadPlan) {
        self.total.store(plan.read_bytes(), Ordering::Relaxed);
    }

    fn advanced(&self, done: u64) {
        self.show(done, self.total.load(Ordering::Relaxed));
    }
}
