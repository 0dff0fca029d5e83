//! The benchmark: each stage of a load measured alone on this machine and these files, T = S / B predicted from that, loads
//! with the page cache in a proved state, and the comparison of the two.
//!
//! `data` is what comes out. It prints nothing, reads no environment, and knows no device by name.

mod data;

pub use data::{
    BenchReport, BenchStage, CacheState, Cause, Ceiling, Load, Machine, Prediction, Proof, Reason, Sample, Setting,
    Spread, StageBench, State, Subject, TimelineEvent, Trial, Verdict,
};
