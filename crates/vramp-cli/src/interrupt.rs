//! Ctrl-C and SIGTERM: throw the library's cancel switch, and make sure that the process ends within a second (of a save that has
//! written 10 GB and more: within a few, which the file system takes to free them).
//!
//! The first signal asks politely; a watchdog ends the process when that does not help (a read from a dead server never
//! returns). A second signal ends it at once. A temporary folder that is registered here, and what a save has not finished,
//! is removed on every one of these ways. One ordinary thread waits for the signals and every other one blocks them, so that
//! ordinary code may run, and a main thread that sits in a wait that no signal ends keeps nobody from noticing.
//!
//! The command, the watchdog and a second signal may all come to an end at the same moment. One of them ends the process:
//! it never says twice why, and its exit status never belies its words.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use vramp::Error;
use vramp::durable::FileStore;
use vramp::load::Cancel;
use vramp::os::{self, BlockedSignals};
use vramp::save::Leftovers;

use super::output::{Failure, Output};

/// How long the polite way may take.
const PATIENCE: Duration = Duration::from_millis(800);

/// How long saying so may take.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How long removing what a save has not finished may take: a storage that does not answer must not keep the process.
const TIDYING: Duration = Duration::from_secs(2);

const INTERRUPTED: i32 = 130;

/// Whether somebody ends the process already.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Of several interrupts the one that ends the process holds this, and never lets go.
static INTERRUPTION: Mutex<()> = Mutex::new(());

/// For a command that is done: returns if nobody else ends the process, else never. An interrupt takes a few seconds at most.
pub(crate) fn nobody_else_ends_the_process() {
    while ENDING.swap(true, Ordering::AcqRel) {
        thread::park();
    }
}

/// What an interrupt does.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt {
    cancel: Cancel,
    folder: Arc<Mutex<Option<PathBuf>>>,
    leftovers: Leftovers,
}

impl Interrupt {
    /// Takes over SIGINT, SIGTERM and SIGHUP (unless that is ignored, as under `nohup`). Call it before there are other threads:
    /// they do not take the signals because the one that starts them does not.
    pub(crate) fn install(output: Output) -> Interrupt {
        let interrupt = Interrupt { cancel: Cancel::new(), folder: Arc::default(), leftovers: Leftovers::default() };
        let ours = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
        let ours: Vec<i32> = ours.into_iter().filter(|it| *it != libc::SIGHUP || !os::is_ignored(*it)).collect();
        let Ok(blocked) = BlockedSignals::block(&ours) else { return interrupt };
        let here = interrupt.clone();
        let take = move || {
            while blocked.wait().is_ok() {
                here.arrived(output);
            }
        };
        if thread::Builder::new().name("vramp-signals".to_owned()).spawn(take).is_err() {
            // Where the signals cannot be taken over they end the process the ordinary way.
            let _ = blocked.unblock();
        }
        interrupt
    }

    /// The switch to give to a load.
    pub(crate) fn cancel(&self) -> Cancel {
        self.cancel.clone()
    }

    /// Demands that nobody has asked to stop.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled.into()) } else { Ok(()) }
    }

    /// A folder to remove when the process ends by an interrupt.
    pub(crate) fn remove_on_interrupt(&self, folder: Option<&Path>) {
        *self.folder.lock().unwrap_or_else(PoisonError::into_inner) = folder.map(Path::to_owned);
    }

    /// Where a save is to note what must be removed when the process ends by an interrupt.
    pub(crate) fn leftovers(&self) -> Leftovers {
        self.leftovers.clone()
    }

    fn arrived(&self, output: Output) {
        if self.cancel.is_cancelled() {
            self.end(output);
        }
        self.cancel.cancel();
        let watchdog = self.clone();
        let watch = move || {
            thread::sleep(PATIENCE);
            watchdog.end(output);
        };
        if thread::Builder::new().spawn(watch.clone()).is_err() {
            watch();
        }
    }

    fn end(&self, output: Output) -> ! {
        let _never_released = INTERRUPTION.lock();
        let nobody_said_why = !ENDING.swap(true, Ordering::AcqRel);
        let folder = self.folder.lock().unwrap_or_else(PoisonError::into_inner).take();
        let leftovers = self.leftovers.clone();
        within(TIDYING, move || {
            if let Some(folder) = folder {
                // Once more, in case a file was made in it meanwhile.
                let _ = std::fs::remove_dir_all(&folder).or_else(|_| std::fs::remove_dir_all(&folder));
            }
            leftovers.remove(&FileStore);
        });
        if nobody_said_why {
            // Stderr may be a full pipe that nobody reads.
            within(LAST_WORDS, move || output.failure(&Error::Cancelled.into(), None));
        } else {
            // The command has come to its end by itself; that pipe may be where it hangs.
            thread::sleep(LAST_WORDS);
        }
        std::process::exit(INTERRUPTED)
    }
}

/// Does `work`, or gives it up when it takes longer.
fn within(limit: Duration, work: impl FnOnce() + Send + 'static) {
    let (done, heard) = mpsc::channel();
    let work = move || {
        work();
        let _ = done.send(());
    };
    if thread::Builder::new().spawn(work).is_ok() {
        let _ = heard.recv_timeout(limit);
    }
}
