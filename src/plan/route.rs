//! Which route the reads of a range take, and how long they may be: decided by choice, by residency and by what the file wants.

use std::ops::Range;

use super::data::{PlanOptions, RouteChoice, ShardFacts};
use crate::storage::{Limits, Route};

/// Above this share of resident bytes a read goes through the page cache. Break-even on the machines measured: reading a
/// cold page buffered costs twice what it costs direct, a warm one a sixth.
const WARM_SHARE: f64 = 0.6;

/// The way for the reads of a range, by choice or by residency.
pub(super) fn route_of(range: Range<u64>, facts: &ShardFacts, choice: RouteChoice) -> Route {
    let through_cache = || Route::Buffered;
    match choice {
        RouteChoice::Buffered => Route::Buffered,
        RouteChoice::Mapped if facts.mappable => Route::Mapped,
        RouteChoice::Mapped => Route::Buffered,
        RouteChoice::Direct => facts.direct.map_or_else(through_cache, |_| Route::Direct),
        RouteChoice::Auto | RouteChoice::GpuDirect => match facts.direct {
            Some(_) if !is_warm(range, facts) => Route::Direct,
            _ => through_cache(),
        },
    }
}

pub(super) fn is_warm(range: Range<u64>, facts: &ShardFacts) -> bool {
    facts.residency.share(range) >= WARM_SHARE
}

pub(super) fn limits_of(route: Route, facts: &ShardFacts) -> Limits {
    match route {
        Route::Direct => facts.direct.unwrap_or(facts.cached),
        _ => facts.cached,
    }
}

/// The longest range of a file that one staging buffer takes, whatever its alignment.
pub(super) fn staged_max(facts: &ShardFacts, options: PlanOptions) -> u64 {
    let block = facts.direct.map_or(1, |limits| limits.align);
    options.buffer_bytes.saturating_sub(2 * (block - 1))
}
