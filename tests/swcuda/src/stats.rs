//! Figures: what the double counted, in the form that tests read and in the lines that travel.
//!
//! The times are the model's where there is one. They are never a GPU's.

use std::collections::BTreeMap;
use std::fmt::Write;

/// One direction of one device.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct EngineStats {
    /// Copies: begun ones where there is a model, else those that are done.
    pub copies: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Seconds in which the engine copied: by the model, or measured where there is none.
    pub busy_seconds: f64,
    /// Times that the engine had nothing to do between two copies.
    pub gaps: u64,
    /// Seconds of those.
    pub gap_seconds: f64,
    /// When the first copy began, in seconds since the double was reset.
    pub first_start: Option<f64>,
    /// When the last copy ended.
    pub last_end: Option<f64>,
}

/// The engines of one device.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct DeviceStats {
    /// Host to device.
    pub h2d: EngineStats,
    /// Device to host.
    pub d2h: EngineStats,
}

/// What was counted since the double was reset.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Stats {
    /// By device ordinal.
    pub devices: Vec<DeviceStats>,
    /// Copies whose host side was not pinned, so that they blocked.
    pub pageable_copies: u64,
    /// Bytes of those.
    pub pageable_bytes: u64,
    /// Copies within a device.
    pub device_copies: u64,
    /// Fills (`cuMemset...`).
    pub fills: u64,
    /// Kernels run.
    pub kernels: u64,
    /// Third-party writes (`swcuda_dma_write`).
    pub dma_writes: u64,
    /// Bytes of those.
    pub dma_bytes: u64,
    /// Operations queued, of all kinds.
    pub operations: u64,
    /// Most bytes of device memory in use at once, over all devices.
    pub peak_bytes: u64,
    /// Most bytes of host memory pinned at once.
    pub peak_pinned_bytes: u64,
}

/// What is alive now.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Live {
    /// Device allocations.
    pub allocations: u64,
    /// Pinned or registered ranges of host memory.
    pub pins: u64,
    /// Streams, without the default ones.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules.
    pub modules: u64,
    /// Primary contexts, each as often as it is retained.
    pub contexts: u64,
    /// Operations queued or running.
    pub queued: u64,
}

impl Stats {
    /// Bytes copied from host to devices.
    pub fn h2d_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.h2d.bytes).sum()
    }

    /// Bytes copied from devices to the host.
    pub fn d2h_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.d2h.bytes).sum()
    }

    fn fields(&mut self) -> [(&'static str, &mut u64); 10] {
        [
            ("pageable_copies", &mut self.pageable_copies),
            ("pageable_bytes", &mut self.pageable_bytes),
            ("device_copies", &mut self.device_copies),
            ("fills", &mut self.fills),
            ("kernels", &mut self.kernels),
            ("dma_writes", &mut self.dma_writes),
            ("dma_bytes", &mut self.dma_bytes),
            ("operations", &mut self.operations),
            ("peak_bytes", &mut self.peak_bytes),
            ("peak_pinned_bytes", &mut self.peak_pinned_bytes),
        ]
    }

    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        for (name, value) in self.clone().fields() {
            let _ = writeln!(text, "{name} {value}");
        }
        for (ordinal, device) in self.devices.iter().enumerate() {
            device.h2d.write(&mut text, &format!("device{ordinal}.h2d"));
            device.d2h.write(&mut text, &format!("device{ordinal}.d2h"));
        }
        text
    }

    pub(crate) fn from_text(text: &str) -> Stats {
        let values = values(text);
        let mut stats = Stats::default();
        for (name, value) in stats.fields() {
            *value = count(&values, name);
        }
        for ordinal in 0.. {
            let h2d = EngineStats::read(&values, &format!("device{ordinal}.h2d"));
            let d2h = EngineStats::read(&values, &format!("device{ordinal}.d2h"));
            let (Some(h2d), Some(d2h)) = (h2d, d2h) else { break };
            stats.devices.push(DeviceStats { h2d, d2h });
        }
        stats
    }
}

impl EngineStats {
    fn write(&self, text: &mut String, prefix: &str) {
        let _ = writeln!(text, "{prefix}.copies {}", self.copies);
        let _ = writeln!(text, "{prefix}.bytes {}", self.bytes);
        let _ = writeln!(text, "{prefix}.busy_seconds {}", self.busy_seconds);
        let _ = writeln!(text, "{prefix}.gaps {}", self.gaps);
        let _ = writeln!(text, "{prefix}.gap_seconds {}", self.gap_seconds);
        for (name, value) in [("first_start", self.first_start), ("last_end", self.last_end)] {
            if let Some(value) = value {
                let _ = writeln!(text, "{prefix}.{name} {value}");
            }
        }
    }

    fn read(values: &BTreeMap<&str, &str>, prefix: &str) -> Option<EngineStats> {
        let get = |name: &str| values.get(format!("{prefix}.{name}").as_str()).copied();
        let seconds = |name: &str| get(name).and_then(|value| value.parse::<f64>().ok());
        Some(EngineStats {
            copies: get("copies")?.parse().ok()?,
            bytes: get("bytes")?.parse().ok()?,
            busy_seconds: seconds("busy_seconds")?,
            gaps: get("gaps")?.parse().ok()?,
            gap_seconds: seconds("gap_seconds")?,
            first_start: seconds("first_start"),
            last_end: seconds("last_end"),
        })
    }
}

impl Live {
    fn fields(&mut self) -> [(&'static str, &mut u64); 7] {
        [
            ("allocations", &mut self.allocations),
            ("pins", &mut self.pins),
            ("streams", &mut self.streams),
            ("events", &mut self.events),
            ("modules", &mut self.modules),
            ("contexts", &mut self.contexts),
            ("queued", &mut self.queued),
        ]
    }

    pub(crate) fn to_text(&self) -> String {
        self.clone().fields().map(|(name, value)| format!("{name} {value}\n")).concat()
    }

    pub(crate) fn from_text(text: &str) -> Live {
        let values = values(text);
        let mut live = Live::default();
        for (name, value) in live.fields() {
            *value = count(&values, name);
        }
        live
    }
}

fn values(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(' ')).collect()
}

fn count(values: &BTreeMap<&str, &str>, name: &str) -> u64 {
    values.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let engine = EngineStats { copies: 2, bytes: 77, busy_seconds: 0.25, first_start: Some(1.5), ..<_>::default() };
        let device = DeviceStats { h2d: engine, d2h: EngineStats::default() };
        let stats =
            Stats { devices: vec![device.clone(), device], pageable_copies: 3, peak_bytes: 9, ..<_>::default() };
        assert_eq!(Stats::from_text(&stats.to_text()), stats);
        assert_eq!(stats.h2d_bytes(), 154);
        let live = Live { pins: 4, queued: 1, ..Live::default() };
        assert_eq!(Live::from_text(&live.to_text()), live);
    }
}
