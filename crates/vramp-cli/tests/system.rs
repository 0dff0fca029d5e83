//! The program under pressure from the system: signals while the main thread waits, limits on memory and threads, file systems that
//! do not have the route that was asked for.
#![allow(unsafe_code)] // limits and a filter of system calls are set between fork and exec

use std::fmt::Write as _;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::json;
use vramp::testing::torch::{Member, archive, state_dict, zip};
use vramp::testing::{Feature, required, safetensors, watched};

use crate::cli::{command, folder, signal, until, vramp};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// `count` tensors of U8 with `bytes` bytes each.
fn model(folder: &Path, count: usize, bytes: usize) -> PathBuf {
    let data: Vec<Vec<u8>> = (0..count).map(|at| vec![at as u8 + 1; bytes]).collect();
    let names: Vec<String> = (0..count).map(|at| format!("t{at}")).collect();
    let shape = [bytes];
    let tensors: Vec<_> =
        names.iter().zip(&data).map(|(name, data)| (name.as_str(), "U8", &shape[..], data.as_slice())).collect();
    let path = folder.join("m.safetensors");
    std::fs::write(&path, safetensors(&tensors, json!({}))).unwrap();
    path
}

// ---- signals

/// The signals that each thread of a process blocks, by the thread's name.
fn blocked(pid: u32) -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let field = |name: &str| Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned());
        Some((field("Name:")?, u64::from_str_radix(&field("SigBlk:")?, 16).ok()?))
    };
    tasks.filter_map(of).collect()
}

/// A main thread that waits on something else than a read of ours (here a pipe nobody writes to) takes no signal itself: the thread
/// for signals does, so that it would not matter if the wait were one that signals cannot end.
#[test]
fn a_main_thread_that_waits_for_ever_is_ended_by_a_signal() {
    for (signals, code) in [(&["-INT"][..], 130), (&["-TERM"], 130), (&["-HUP"], 130), (&["-INT", "-TERM"], 130)] {
        let folder = folder();
        let path = model(folder.path(), 1, 8);
        let args = ["verify", text(&path), "--spec", "-", "--json"];
        let mut child = command(&args);
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _nobody_writes_to_it = child.stdin.take();
        until(|| blocked(child.id()).iter().any(|(name, _)| name == "vramp-signals"));
        let ours = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].iter().fold(0u64, |all, signal| all | 1 << (signal - 1));
        until(|| {
            // The one that waits for them has them unblocked while it waits.
            let threads = blocked(child.id());
            threads.len() >= 2
                && threads.iter().filter(|(name, _)| name != "vramp-signals").all(|(_, it)| it & ours == ours)
        });
        signals.iter().for_each(|name| signal(&child, name));
        let Output { status, stderr, .. } = watched(move || child.wait_with_output().unwrap());
        assert_eq!(status.code(), Some(code), "{signals:?}");
        let said = String::from_utf8(stderr).unwrap();
        assert!(said.lines().count() == 1 && said.contains("\"cancelled\""), "{said}");
    }
}

/// A process that was started to ignore hang-ups (`nohup`) goes on after one.
#[test]
fn an_ignored_hang_up_stays_ignored() {
    let folder = folder();
    let path = model(folder.path(), 1, 8);
    let mut child = std::process::Command::new("sh");
    child.args([
        "-c",
        "trap '' HUP; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_vramp"),
        "verify",
        text(&path),
        "--spec",
        "-",
    ]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until(|| blocked(child.id()).iter().any(|(name, _)| name == "vramp-signals"));
    signal(&child, "-HUP");
    let spec = json!({"tensors": {"t0": {"dtype": "U8", "shape": [8]}}}).to_string();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), spec.as_bytes()).unwrap();
    assert_eq!(watched(move || child.wait().unwrap()).code(), Some(0));
}

// ---- limits

/// Runs the program with one limit of its own.
fn limited(args: &[&str], which: libc::__rlimit_resource_t, limit: u64) -> Output {
    let mut command = command(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    let set = move || {
        // SAFETY: `limit` is a whole rlimit.
        match unsafe { libc::setrlimit(which, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: setrlimit is a system call that may be made between fork and exec, on a value of the closure.
    unsafe { command.pre_exec(set) };
    let child = command.spawn().unwrap();
    watched(move || child.wait_with_output().unwrap())
}

/// Bytes of address space that the program needs to say anything at all.
fn least_address_space() -> u64 {
    (24..1024)
        .step_by(8)
        .map(|mib| mib << 20)
        .find(|bytes| limited(&["--version"], libc::RLIMIT_AS, *bytes).status.success())
        .unwrap()
}

#[test]
fn a_limit_of_the_address_space_never_ends_in_a_signal() {
    let folder = folder();
    let path = model(folder.path(), 12, 5 << 20);
    let out = folder.path().join("out.safetensors");
    let least = least_address_space();
    let mut seen = String::new();
    let mut refused = 0;
    for step in 0..24 {
        let limit = least + step * (7 << 20);
        let _ = std::fs::remove_file(&out);
        for args in [&["convert", text(&path), text(&out)][..], &["load", text(&path), "--device", "cpu"]] {
            let Output { status, stderr, .. } = limited(args, libc::RLIMIT_AS, limit);
            let said = String::from_utf8_lossy(&stderr);
            writeln!(seen, "{limit} {} {status} {said}", args[0]).unwrap();
            assert_eq!(status.signal(), None, "{seen}");
            assert!(matches!(status.code(), Some(0 | 4 | 5)), "{seen}");
            assert!(!said.contains("internal error"), "{seen}");
            refused += u32::from(said.contains("RLIMIT_AS (ulimit -v) leaves"));
        }
    }
    assert!(refused > 0, "the limit is never named: {seen}");
}

#[test]
fn the_limit_of_memory_that_counts_is_named() {
    let folder = folder();
    let path = model(folder.path(), 1, 64 << 20);
    for (which, name) in [(libc::RLIMIT_AS, "RLIMIT_AS (ulimit -v)"), (libc::RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)")] {
        let least = if which == libc::RLIMIT_AS { least_address_space() } else { 0 };
        let args = ["load", text(&path), "--device", "cpu", "--json"];
        let Output { status, stderr, .. } = limited(&args, which, least + (100 << 20));
        let said = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(5), "{said}");
        assert!(said.contains(&format!("{name} leaves")) && said.contains("out_of_memory"), "{said}");
    }
}

#[test]
fn the_demo_goes_on_without_a_thread() {
    // A limit on processes does not bind root: the kernel refuses the call instead, as it does for others.
    let folder = folder();
    let args = ["demo", "--bytes", "1MiB", "--dir", text(folder.path()), "--json"];
    let mut command = command(&args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: `refuse_threads` makes system calls only, on values of its own.
    unsafe { command.pre_exec(refuse_threads) };
    let child = command.spawn().unwrap();
    let Output { status, stderr, .. } = watched(move || child.wait_with_output().unwrap());
    let said = String::from_utf8(stderr).unwrap();
    assert!(!said.contains("internal"), "{said}");
    assert_eq!(status.code(), Some(0), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the demo leaves nothing");
}

/// Has the kernel refuse further threads to this process, as it does at the limit of `ulimit -u`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn refuse_threads() -> std::io::Result<()> {
    let statement = |code: u32, k: u32, jf: u8| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let (load, jump) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let give = libc::BPF_RET | libc::BPF_K;
    let refusal = libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32;
    let mut program = [
        statement(load, 0, 0),
        statement(jump, libc::SYS_clone as u32, 1),
        statement(give, refusal, 0),
        statement(jump, libc::SYS_clone3 as u32, 1),
        statement(give, refusal, 0),
        statement(give, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes numbers only.
    let bound = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
    // SAFETY: `filter` points to a whole program, which the kernel copies.
    let bound =
        bound && unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) } == 0;
    if bound { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

// ---- routes

/// The fallbacks that a load reports, as `what: why`.
fn fallbacks(path: &Path, route: &str) -> Vec<String> {
    let said = vramp(&["load", text(path), "--device", "cpu", "--route", route, "--json"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let report = said.json()["report"].clone();
    let list = report["fallbacks"].as_array().unwrap().iter();
    list.map(|it| format!("{}: {}", it["what"].as_str().unwrap(), it["why"].as_str().unwrap())).collect()
}

#[test]
fn direct_reads_of_files_in_memory_are_told_of() {
    let Some(memory) = required(Feature::Tmpfs, tempfile::tempdir_in("/dev/shm")) else { return };
    let path = model(memory.path(), 3, 1 << 20);
    let said = fallbacks(&path, "direct");
    assert!(
        said.iter().any(|it| it == "O_DIRECT: tmpfs keeps its files in memory; read through the page cache"),
        "{said:?}"
    );
    for route in ["auto", "buffered", "mapped"] {
        let said = fallbacks(&path, route);
        assert!(!said.iter().any(|it| it.starts_with("O_DIRECT")), "not asked for: {said:?}");
    }
}

#[test]
fn reads_without_a_whole_block_are_told_of_where_direct_ones_were_asked_for() {
    let folder = folder();
    let path = model(folder.path(), 1, 100);
    let said = fallbacks(&path, "direct");
    assert!(said.iter().any(|it| it.starts_with("O_DIRECT: ")), "{said:?}");
    assert!(!fallbacks(&path, "auto").iter().any(|it| it.contains("no whole block")));
}

#[test]
fn tensors_that_are_made_are_told_of_where_another_route_was_asked_for() {
    let folder = folder();
    let over = vramp::testing::torch::TensorOver {
        key: "0",
        storage: "FloatStorage",
        count: 4096,
        offset: 0,
        shape: &[4096],
        stride: &[1],
        bits: &[],
    };
    let pickle = state_dict(&[("a", over)]);
    let data = vec![0x3f; 4 * 4096];
    let path = folder.path().join("m.pt");
    let deflated = [
        Member::stored("m/data.pkl", &pickle),
        Member::deflated("m/data/0", &data),
        Member::stored("m/version", b"3\n"),
    ];
    std::fs::write(&path, zip(&deflated)).unwrap();
    for (route, what) in [("direct", "O_DIRECT"), ("mapped", "mmap")] {
        let said = fallbacks(&path, route);
        assert!(said.iter().any(|it| it.starts_with(&format!("{what}: ")) && it.contains("deflated")), "{said:?}");
    }
    assert!(!fallbacks(&path, "auto").iter().any(|it| it.contains("deflated")));
    std::fs::write(&path, archive(&pickle, &[("0", &data)])).unwrap();
    assert!(!fallbacks(&path, "mapped").iter().any(|it| it.contains("deflated")));
}
