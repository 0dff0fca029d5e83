//! Every device passes the same suite.

use vramp::device::{CpuDevice, NullDevice};
use vramp::testing::{LazyDevice, device_conformance};

#[test]
fn the_cpu_device_conforms() {
    device_conformance(&CpuDevice::new());
    device_conformance(&CpuDevice::with_align(4096));
}

#[test]
fn the_null_device_conforms() {
    device_conformance(&NullDevice::new());
}

#[test]
fn the_lazy_fake_conforms() {
    (0..20).for_each(|seed| device_conformance(&LazyDevice::new(seed)));
}
