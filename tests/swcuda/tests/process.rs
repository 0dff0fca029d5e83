//! Programs in processes of their own, that find the double as any program finds the driver: by `LD_LIBRARY_PATH`.
//!
//! The program is this test itself, started again for one scenario.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::path::PathBuf;
use std::process::{Command, Output};

use support::{alloc, begin, destroy, end, free, free_pinned, host, pinned, stream};
use swcuda::{Config, Double, Schedule};

const SCENARIO: &str = "SWCUDA_TEST_SCENARIO";

/// A folder of this test's own, with the links in it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("swcuda-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Double::link_folder(&path);
        Double::link_folder(&path);
        Folder(path)
    }

    /// Starts this test's program for a scenario.
    fn run(&self, scenario: &str, config: &Config, more: &[(&str, &str)]) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "scenario", "--nocapture"]).env(SCENARIO, scenario);
        command.env("LD_LIBRARY_PATH", &self.0).env("SWCUDA_REPORT", self.0.join("report"));
        command.envs(config.environment()).envs(more.iter().copied()).output().unwrap()
    }

    fn report(&self) -> String {
        std::fs::read_to_string(self.0.join("report")).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The program; does nothing when it is run as a test.
#[test]
fn scenario() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    // SAFETY: opens and closes the library, as a program does that wants to know whether there is a driver.
    assert!(unsafe { cudarc::driver::sys::is_culib_present() });
    if scenario == "none" {
        println!("code {:?}", call!(cuInit(0)));
        return;
    }
    begin(0);
    let (stream, device, buffer) = (stream(), alloc(4096), pinned(4096));
    host(buffer, 4096).fill(1);
    match scenario.as_str() {
        "right" => {}
        "fault" => println!("code {:?}", call!(cuMemsetD8_v2(device, 1, 16))),
        "reuse" => {
            call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), 4096, stream)).unwrap();
            host(buffer, 4096).fill(2);
            call!(cuStreamSynchronize(stream)).unwrap();
        }
        // SAFETY: none; this is the mistake.
        "dereference" => println!("read {}", unsafe { *(device as *const u8) }),
        // SAFETY: as above.
        "freed" => {
            free_pinned(buffer);
            println!("read {}", unsafe { *buffer });
        }
        "leak" => {
            call!(cuMemcpyHtoD_v2(device, [0_u8; 16].as_ptr().cast(), 16)).unwrap();
            return;
        }
        other => panic!("no scenario {other}"),
    }
    free_pinned(buffer);
    free(device);
    destroy(&[stream]);
    end(0);
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_right_program_leaves_figures_and_no_report() {
    let folder = Folder::new("right");
    let output = folder.run("right", &Config::default(), &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output).matches("swcuda: ").count(), 1, "{}", stderr(&output));
    assert!(stderr(&output).contains("swcuda: this is a test double, no GPU"));
    let report = folder.report();
    assert!(report.lines().all(|line| line.starts_with("stat ")), "{report}");
    for line in ["stat leak.allocations 0", "stat pageable_copies 0", "stat call.cuMemAlloc_v2 1"] {
        assert!(report.lines().any(|found| found == line), "{line} in {report}");
    }
    let quiet = folder.run("right", &Config::default(), &[("SWCUDA_QUIET", "1")]);
    assert_eq!(stderr(&quiet).matches("swcuda: ").count(), 0);
}

#[test]
fn a_wrong_program_is_told_at_its_end() {
    let folder = Folder::new("reuse");
    let output = folder.run("reuse", &Config::default().schedule(Schedule::Lazy), &[]);
    assert!(stderr(&output).contains("swcuda: SOURCE_CHANGED: "), "{}", stderr(&output));
    assert!(folder.report().starts_with("SOURCE_CHANGED: "));
}

#[test]
fn what_is_not_given_back_is_a_leak() {
    let folder = Folder::new("leak");
    let config = Config { pageable_is_error: true, ..Config::default() };
    folder.run("leak", &config, &[]);
    let report = folder.report();
    assert_eq!(report.lines().filter(|line| line.starts_with("LEAK: ")).count(), 3, "{report}");
    for line in ["stat leak.pins 1", "stat leak.streams 1", "stat leak.contexts 1", "stat pageable_copies 1"] {
        assert!(report.lines().any(|found| found == line), "{line} in {report}");
    }
    assert!(report.contains("PAGEABLE: "));
}

#[test]
fn faults_come_by_the_environment() {
    let folder = Folder::new("fault");
    let faults = [("SWCUDA_FAULTS", "cuMemsetD8:1=719,flip:3,nonsense")];
    let output = folder.run("fault", &Config::default(), &faults);
    assert!(String::from_utf8_lossy(&output.stdout).contains("code Err(CUDA_ERROR_LAUNCH_FAILED)"));
    assert!(stderr(&output).contains("swcuda: CONFIG: SWCUDA_FAULTS"), "{}", stderr(&output));
}

#[test]
fn device_memory_and_freed_memory_cannot_be_touched() {
    use std::os::unix::process::ExitStatusExt;
    let folder = Folder::new("touch");
    for scenario in ["dereference", "freed"] {
        let output = folder.run(scenario, &Config::default(), &[]);
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{scenario}");
    }
}

#[test]
fn visible_devices_are_read_from_the_environment() {
    let folder = Folder::new("none");
    for none in ["", "-1"] {
        let config = Config { visible_devices: Some(none.to_owned()), ..Config::default() };
        let output = folder.run("none", &config, &[]);
        assert!(String::from_utf8_lossy(&output.stdout).contains("code Err(CUDA_ERROR_NO_DEVICE)"));
    }
    let output = folder.run("none", &Config::default(), &[("CUDA_VISIBLE_DEVICES", "0,5")]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("code Ok(())"));
}
