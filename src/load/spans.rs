//! What happened when, for subscribers of the `tracing` crate (feature `tracing`).
//!
//! An adapter: it passes on what an [`Observer`] is told, and knows no more than that.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tracing::Span;

use super::control::Observer;
use super::trace::TraceEvent;
use crate::plan::LoadPlan;

/// Passes each [`TraceEvent`] on to `tracing`: at level TRACE, in a span `vramp::load` at level INFO, which lies in the span
/// that the load began in and ends with the next load or with the observer.
///
/// Reads and uploads overlap and are told once they are over, so they are events with `start_us` and `duration_us` and no
/// spans of their own.
#[derive(Debug, Default)]
pub struct TracingObserver {
    span: Mutex<Option<Span>>,
}

impl TracingObserver {
    /// An observer for [`TransferOptions::observer`](super::TransferOptions::observer).
    pub fn new() -> TracingObserver {
        TracingObserver::default()
    }
}

impl Observer for TracingObserver {
    fn planned(&self, plan: &LoadPlan) {
        let (bytes, tensors) = (plan.read_bytes(), plan.placements.len());
        let span = tracing::info_span!("vramp::load", bytes, tensors);
        *self.span.lock().unwrap_or_else(PoisonError::into_inner) = Some(span);
    }

    fn advanced(&self, _done: u64) {}

    fn event(&self, event: &TraceEvent) {
        if !tracing::enabled!(tracing::Level::TRACE) {
            return;
        }
        let span = self.span.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let &TraceEvent { lane, name, start, duration, bytes, shard, offset } = event;
        let (start_us, duration_us) = (microseconds(start), microseconds(duration));
        tracing::trace!(parent: span.as_ref().and_then(Span::id), name, ?lane, start_us, duration_us, bytes, shard, offset);
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::checkpoint::Selection;
    use crate::device::CpuDevice;
    use crate::load::{Loader, TransferOptions};
    use crate::testing::Synthetic;

    /// Adds up the bytes of the reads in the span of the load.
    #[derive(Clone, Default)]
    struct Sum {
        spans: Arc<AtomicU64>,
        bytes: Arc<AtomicU64>,
    }

    #[derive(Default)]
    struct Fields {
        is_read: bool,
        bytes: u64,
    }

    impl Visit for Fields {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "bytes" {
                self.bytes = value;
            }
        }

        fn record_str(&mut self, field: &Field, value: &str) {
            self.is_read |= (field.name(), value) == ("name", "read");
        }

        fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}
    }

    impl Subscriber for Sum {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target().starts_with("vramp")
        }

        fn new_span(&self, span: &Attributes<'_>) -> Id {
            assert_eq!(span.metadata().name(), "vramp::load");
            Id::from_u64(1 + self.spans.fetch_add(1, Ordering::SeqCst))
        }

        fn event(&self, event: &Event<'_>) {
            let mut fields = Fields::default();
            event.record(&mut fields);
            if fields.is_read && event.parent() == Some(&Id::from_u64(1)) {
                self.bytes.fetch_add(fields.bytes, Ordering::SeqCst);
            }
        }

        fn record(&self, _span: &Id, _values: &Record<'_>) {}

        fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

        fn enter(&self, _span: &Id) {}

        fn exit(&self, _span: &Id) {}
    }

    #[test]
    fn a_subscriber_is_told_of_every_byte_that_is_read() {
        let Synthetic { checkpoint, .. } = Synthetic::new(5, 3, 300_000, |_, file| file);
        let options =
            TransferOptions { observer: Some(Arc::new(TracingObserver::new())), ..TransferOptions::default() };
        let mut loader = Loader::new(Arc::new(CpuDevice::new()), options);
        let prepared = loader.prepare(checkpoint.clone(), &checkpoint.select(&Selection::default()).unwrap()).unwrap();
        let sum = Sum::default();
        tracing::subscriber::with_default(sum.clone(), || loader.load(&prepared)).unwrap();
        assert_eq!(sum.spans.load(Ordering::SeqCst), 1);
        assert_eq!(sum.bytes.load(Ordering::SeqCst), prepared.plan.read_bytes());
    }
}
