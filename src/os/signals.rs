//! Signals that end a process, for programs: one thread takes them, whatever the others wait for. A library leaves signals to its
//! program, so nothing here is called by the library.
#![allow(unsafe_code)] // signal masks and one handler, of numbers and of memory that the calling function owns

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

/// Signals that the calling thread, and every thread that it starts from then on, does not take.
///
/// A signal to the process goes to any one thread that does not block it, and mostly to the first. Where that sits in a wait that
/// signals cannot end (a server that does not answer), the signal waits as long as it does, though others could take it. So all
/// threads block them, and one waits for them.
#[derive(Clone, Copy, Debug)]
pub struct BlockedSignals {
    set: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks these signals, by their numbers.
    ///
    /// # Errors
    /// What the kernel says: that a number is no signal.
    pub fn block(signals: &[i32]) -> io::Result<BlockedSignals> {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `set` is a whole signal set.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        for &signal in signals {
            // SAFETY: `set` was made an empty set above.
            if unsafe { libc::sigaddset(set.as_mut_ptr(), signal) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: made by sigemptyset.
        let blocked = BlockedSignals { set: unsafe { set.assume_init() } };
        blocked.mask(libc::SIG_BLOCK).map(|()| blocked)
    }

    /// Has the calling thread take them again.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn unblock(&self) -> io::Result<()> {
        self.mask(libc::SIG_UNBLOCK)
    }

    /// Waits for one of them and takes it. Every thread of the process must block them.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn wait(&self) -> io::Result<i32> {
        let mut signal = 0;
        // SAFETY: `set` is a whole signal set, `signal` a number to write to.
        match unsafe { libc::sigwait(&raw const self.set, &raw mut signal) } {
            0 => Ok(signal),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    fn mask(&self, how: i32) -> io::Result<()> {
        // SAFETY: `set` is a whole signal set, and the old mask is not asked for.
        match unsafe { libc::pthread_sigmask(how, &raw const self.set, std::ptr::null_mut()) } {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }
}

/// Whether the process was started to ignore a signal, as `nohup` does with SIGHUP.
pub fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `action` is a whole sigaction, and none is set.
    let failed = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } != 0;
    // SAFETY: made of integers and an optional address, so that even the zeros it began as are a valid value.
    let action = unsafe { action.assume_init() };
    !failed && action.sa_sigaction == libc::SIG_IGN
}

static LAST_WORDS: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static LAST_WORDS_LEN: AtomicUsize = AtomicUsize::new(0);
static LAST_STATUS: AtomicI32 = AtomicI32::new(1);

/// Has a process that aborts itself (an allocation that cannot fail has failed) say `words` on stderr and end with `status`, not
/// by a signal. For programs.
pub fn report_aborts(words: &'static str, status: i32) {
    LAST_WORDS_LEN.store(words.len(), Ordering::SeqCst);
    LAST_STATUS.store(status, Ordering::SeqCst);
    LAST_WORDS.store(words.as_ptr().cast_mut(), Ordering::SeqCst);
    let handler: extern "C" fn(i32) = end_aborted;
    // SAFETY: the handler calls nothing but write and _exit, which handlers may.
    unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
}

extern "C" fn end_aborted(_: i32) {
    let words = LAST_WORDS.load(Ordering::SeqCst);
    // SAFETY: address and length of a text that lives as long as the process; a write changes nothing of it.
    unsafe { libc::write(2, words.cast_const().cast(), LAST_WORDS_LEN.load(Ordering::SeqCst)) };
    // SAFETY: ends the process.
    unsafe { libc::_exit(LAST_STATUS.load(Ordering::SeqCst)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::watched;

    #[test]
    fn a_blocked_signal_waits_for_whoever_asks() {
        watched(|| {
            // Of this thread alone, so that no other test notices.
            let blocked = BlockedSignals::block(&[libc::SIGUSR1, libc::SIGUSR2]).unwrap();
            // SAFETY: takes a number; the thread blocks the signal.
            assert_eq!(unsafe { libc::raise(libc::SIGUSR2) }, 0);
            assert_eq!(blocked.wait().unwrap(), libc::SIGUSR2);
            blocked.unblock().unwrap();
        });
        assert!(BlockedSignals::block(&[100_000]).is_err());
        assert!(!is_ignored(libc::SIGUSR1) && !is_ignored(100_000));
    }
}
