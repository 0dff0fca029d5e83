//! What is there and what is missing: the answers a person gets, on the double.

use swcuda::{Config, Fault};
use vramp::device::{self, CudaDevice};

use super::Rig;

fn refusal(name: &str) -> String {
    device::open(name).err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn a_device_is_found_by_number_and_by_uuid() {
    let Some(_double) = Rig::double(Config { devices: 2, ..Config::default() }) else { return };
    let found = CudaDevice::list().unwrap();
    assert_eq!(found.iter().map(|gpu| gpu.ordinal).collect::<Vec<_>>(), [0, 1]);
    assert!(found[0].product.contains("no GPU") && found[0].uuid.starts_with("GPU-") && found[0].uuid != found[1].uuid);
    for (name, real) in [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")] {
        assert_eq!(device::open(name).unwrap().name(), real);
    }
    assert_eq!(device::open(&format!("cuda:{}", found[1].uuid)).unwrap().name(), "cuda:1");
    let unknown = refusal("cuda:GPU-ffffffff-none");
    assert!(unknown.contains(&found[0].uuid) && unknown.contains(&found[1].uuid), "{unknown}");
    assert!(refusal("cuda:GPU-").contains("2 devices"), "{}", refusal("cuda:GPU-"));
    assert!(refusal("cuda:2").contains("2 devices here: cuda:0 to cuda:1"), "{}", refusal("cuda:2"));
    assert_eq!(device::open_default().0.name(), "cuda:0");
}

#[test]
fn hidden_devices_are_not_there_and_the_others_are_renumbered() {
    let hidden = |visible: &str| Config { devices: 3, visible_devices: Some(visible.to_owned()), ..Config::default() };
    let Some(double) = Rig::double(hidden("2,0")) else { return };
    let two = CudaDevice::list().unwrap();
    assert_eq!(two.len(), 2);
    drop(double);
    let double = Rig::double(Config { devices: 3, ..Config::default() }).unwrap();
    let three = CudaDevice::list().unwrap();
    assert_eq!([&two[0].uuid, &two[1].uuid], [&three[2].uuid, &three[0].uuid]);
    drop(double);
    let _double = Rig::double(hidden("")).unwrap();
    assert!(refusal("cuda:0").contains("CUDA_VISIBLE_DEVICES"), "{}", refusal("cuda:0"));
    let (fallen_back, why) = device::open_default();
    assert_eq!((fallen_back.name().as_str(), why.is_none()), ("cpu", true), "no device is no mistake");
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    let Some(double) = Rig::double(Config::default()) else { return };
    for (code, words) in
        [(803, "restart after a driver update"), (802, "fabric manager"), (34, "stubs"), (100, "CUDA_VISIBLE")]
    {
        double.inject(Fault::Call { name: "cuInit".to_owned(), nth: 1, code });
        let said = refusal("cuda:0");
        assert!(said.contains(words) && said.contains(&code.to_string()), "{said}");
    }
    double.inject(Fault::Call { name: "cuInit".to_owned(), nth: 1, code: 803 });
    let (fallen_back, why) = device::open_default();
    assert!(fallen_back.name() == "cpu" && why.unwrap().to_string().contains("803"), "a broken driver is told");
}
