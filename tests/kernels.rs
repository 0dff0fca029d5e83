//! The kernels that ship, run from their PTX by the interpreter, against the CPU's conversions and against arithmetic written
//! another way.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::LazyLock;

use swcuda::ptx::{DeviceMemory, Kernel, Launch, Module, Order, Touched, Trap};

const SOURCES: &[&str] = &[
    include_str!("../kernels/ptx/checksum.ptx"),
    include_str!("../kernels/ptx/move.ptx"),
    include_str!("../kernels/ptx/convert_f64.ptx"),
    include_str!("../kernels/ptx/convert_f32.ptx"),
    include_str!("../kernels/ptx/convert_f16.ptx"),
    include_str!("../kernels/ptx/convert_bf16.ptx"),
    include_str!("../kernels/ptx/convert_f8_e4m3.ptx"),
    include_str!("../kernels/ptx/convert_f8_e5m2.ptx"),
    include_str!("../kernels/ptx/convert_f8_e4m3fnuz.ptx"),
    include_str!("../kernels/ptx/convert_f8_e5m2fnuz.ptx"),
];

static MODULES: LazyLock<Vec<Module>> =
    LazyLock::new(|| SOURCES.iter().map(|text| Module::parse(text).unwrap()).collect());

fn kernel(name: &str) -> &'static Kernel {
    let found = MODULES.iter().find_map(|module| Some(&module.kernels()[module.kernel(name)?]));
    found.unwrap_or_else(|| panic!("no kernel {name}"))
}

#[test]
fn every_module_parses_and_asks_for_no_more_than_the_oldest_driver_has() {
    for module in MODULES.iter() {
        assert_eq!(module.isa(), (8, 0));
    }
}
