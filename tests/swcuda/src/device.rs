//! Devices, which of them are visible, and their primary contexts.
//!
//! A device's sticky error outlives its context: the driver's manual says that the process must end. This file frees
//! nothing itself; `lifetime` ends a context.

use cudarc::driver::sys::CUresult;

use crate::clock::StreamId;
use crate::engine::Engine;
use crate::state::{Answer, State};
use crate::stats::DeviceStats;

/// What every device is called. It says what it is, so that it says so in every log.
pub(crate) const NAME: &str = "Software CUDA (test double, no GPU)";

/// One visible device.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its number before `CUDA_VISIBLE_DEVICES`.
    pub(crate) physical: usize,
    /// How often its primary context is retained.
    pub(crate) references: u64,
    pub(crate) flags: u32,
    /// The error that every later call on the context answers.
    pub(crate) sticky: Option<CUresult>,
    /// Bytes of memory in use.
    pub(crate) used: u64,
    pub(crate) default_stream: Option<StreamId>,
    pub(crate) engines: [Engine; 2],
    /// Number of the handle of its memory pool.
    pub(crate) pool: u64,
}

impl Device {
    /// The UUID of the device that was number `physical` before any selection.
    pub(crate) fn uuid(physical: usize) -> [u8; 16] {
        let mut uuid = *b"\x5c\xda\x00\x00software-no\0";
        uuid[2] = physical as u8;
        uuid[15] = physical as u8;
        uuid
    }

    /// The UUID as `CUDA_VISIBLE_DEVICES` and nvidia-smi write it.
    pub(crate) fn uuid_text(physical: usize) -> String {
        let hex: String = Device::uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// The PCI address, one bus for each device.
    pub(crate) fn pci(physical: usize) -> String {
        format!("0000:{:02X}:00.0", physical + 1)
    }
}

/// Which devices a list in the form of `CUDA_VISIBLE_DEVICES` selects, in its order. The list ends at the first entry
/// that is no device; a device named twice makes the list invalid as a whole.
pub(crate) fn visible(list: Option<&str>, devices: usize) -> Vec<usize> {
    let Some(list) = list else { return (0..devices).collect() };
    let mut chosen = Vec::new();
    for entry in list.split(',') {
        let Some(device) = named(entry.trim(), devices) else { break };
        if chosen.contains(&device) {
            return Vec::new();
        }
        chosen.push(device);
    }
    chosen
}

/// The device of an ordinal, or of a UUID or the beginning of one that no other device shares.
fn named(entry: &str, devices: usize) -> Option<usize> {
    if entry.starts_with("GPU-") {
        let mut matching = (0..devices).filter(|&device| Device::uuid_text(device).starts_with(entry));
        return matching.next().filter(|_| matching.next().is_none());
    }
    entry.parse().ok().filter(|&ordinal| ordinal < devices)
}

impl State {
    /// Makes the devices that this process may see.
    pub(crate) fn make_devices(&mut self) {
        // Only a driver that was never reset asks the environment: a test in this process means what its configuration
        // says, on whatever machine it runs.
        let environment = || std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|_| self.epoch == 0);
        let list = self.config.visible_devices.clone().or_else(environment);
        let chosen = visible(list.as_deref(), self.config.devices);
        self.stats.devices = vec![DeviceStats::default(); chosen.len()];
        let devices = chosen.into_iter().map(|physical| Device {
            physical,
            references: 0,
            flags: 0,
            sticky: None,
            used: 0,
            default_stream: None,
            engines: [Engine::default(), Engine::default()],
            pool: self.handles.fresh(),
        });
        self.devices = devices.collect();
    }

    /// The device of a `CUdevice`.
    pub(crate) fn device(&mut self, ordinal: i32) -> Answer<&mut Device> {
        let index = usize::try_from(ordinal).ok();
        index.and_then(|index| self.devices.get_mut(index)).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_selects_in_its_order_and_ends_at_the_first_invalid_entry() {
        assert_eq!(visible(None, 3), [0, 1, 2]);
        assert_eq!(visible(Some("2,0"), 3), [2, 0]);
        assert_eq!(visible(Some("1,7,0"), 3), [1]);
        for none in ["", "-1", "x,0", "NoDevFiles", "0,0"] {
            assert!(visible(Some(none), 3).is_empty(), "{none}");
        }
    }

    #[test]
    fn a_uuid_selects_its_device_by_any_unambiguous_beginning() {
        let uuid = Device::uuid_text(1);
        assert_eq!(uuid.len(), "GPU-".len() + 36);
        assert_eq!(visible(Some(&format!("{uuid},0")), 3), [1, 0]);
        assert_eq!(visible(Some(&uuid[..12]), 3), [1]);
        assert!(visible(Some("GPU-5c"), 3).is_empty(), "three devices begin so");
        assert_ne!(Device::pci(0), Device::pci(1));
    }
}
