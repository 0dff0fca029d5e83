//! What a file would do to a program that trusts it: every global that its pickles name, every oddity of its container, found
//! without executing anything.
//!
//! It looks at content, and at what other readers could take the file for: members under a second name, bytes before, between and
//! after members, archives in comments. One extension counts: a `.distcp` file is read item by item, and as a whole only where the
//! `.metadata` beside it says so. Everything found stays in one list; [`Verdict`] is the worst of it. It never says that a file is
//! harmless, only that it holds nothing but what is on the allow-list.
//!
//! `look` chooses the readers, `scan` finds pickles in loose bytes, `unpack` looks into archives, `data` keeps what they find.

mod data;
mod look;
mod names;
mod scan;
mod unpack;

pub use data::{Audit, OfType, Verdict};
pub use look::{Items, audit_bytes, audit_file, special};
pub use names::{FOREIGN, WEIGHTS, end_of_name};

pub use crate::pickled::NamedGlobal;
