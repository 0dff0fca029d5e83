//! The audit: what a program that unpickles would run is named, whatever the file is besides, and every file of a folder is
//! accounted for.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use vramp::checkpoint::Severity;
use vramp::checkpoint::torch::audit::{Audit, Verdict, audit, audit_bytes};
use vramp::testing::torch::{Member, Pickle, archive, members, zip};
use vramp::testing::watched;

use super::cli::{Said, vramp};

const EVIL: &[u8] = b"cos\ngetenv\n(S'HOME'\ntR.";

fn names(audit: &Audit, module: &str, name: &str) -> bool {
    audit.globals.iter().any(|global| (global.module.as_str(), global.name.as_str()) == (module, name))
}

fn rules(audit: &Audit) -> Vec<&str> {
    audit.findings.iter().map(|finding| finding.rule).collect()
}

/// A safetensors file of one tensor of bytes, whose header is `header` bytes long.
fn safetensors(header: usize, data: &[u8]) -> Vec<u8> {
    let json = format!(r#"{{"t":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, data.len());
    [&(header as u64).to_le_bytes()[..], format!("{json:header$}").as_bytes(), data].concat()
}

fn audited(bytes: &[u8]) -> Audit {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, bytes).unwrap();
    audit(path).unwrap()
}

// ---- what else a file is

/// The length of the header is `V`: to an unpickler all up to the first line break in the tensor is a text.
#[test]
fn a_safetensors_file_that_runs_as_a_pickle_is_told_so() {
    let data = [b"\n", EVIL].concat();
    let file = safetensors(0x56, &data);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, &file).unwrap();
    vramp::checkpoint::Checkpoint::open(&path).unwrap();
    let audit = audited(&file);
    assert_eq!((audit.format, audit.verdict), ("safetensors", Verdict::Dangerous));
    assert!(rules(&audit).contains(&"polyglot") && names(&audit, "os", "getenv"), "{:?}", audit.findings);
    assert_eq!(audited(&safetensors(0x56, b"\nno pickle")).verdict, Verdict::Clean);
}

#[test]
fn what_stands_behind_or_between_the_tensors_is_looked_at() {
    let plain = safetensors(128, b"1234");
    assert_eq!(audited(&plain).verdict, Verdict::Clean);
    let gap = [&plain[..60], b"\x80\x02", EVIL, &plain[60..]].concat();
    let new = [b"\x80\x02", &b"X\x02\0\0\0osX\x06\0\0\0getenv\x93."[..]].concat();
    for file in [[&plain, EVIL].concat(), [&plain, &new[..]].concat(), gap] {
        let audit = audited(&file);
        assert_eq!(audit.verdict, Verdict::Dangerous, "{:?}", audit.findings);
        assert!(names(&audit, "os", "getenv") && rules(&audit).contains(&"extra-pickle"));
    }
    // An archive within a tensor, with a comment behind it.
    let mut inner = archive(EVIL, &[]);
    let end = inner.len() - 2;
    inner[end..].copy_from_slice(&[3, 0]);
    inner.extend(b"end");
    let audit = audited(&safetensors(128, &inner));
    assert!(rules(&audit).contains(&"prefix-data") && names(&audit, "os", "getenv"), "{:?}", audit.findings);
}

/// A member's name is where a tar begins.
#[test]
fn a_tar_that_runs_as_a_pickle_is_told_so() {
    let audit = audit_bytes(&tar(&[(EVIL, b'0', b"data")])).unwrap();
    assert_eq!((audit.format, audit.verdict), ("tar", Verdict::Dangerous));
    assert!(rules(&audit).contains(&"polyglot"));
}

#[test]
fn text_is_no_pickle_for_its_first_letter() {
    let audit = audit_bytes(b"click\nnumpy\ntorch\n").unwrap();
    assert_eq!(audit.format, "unknown");
    assert!(names(&audit, "lick", "numpy") && audit.verdict == Verdict::Notice, "{:?}", audit.findings);
    assert_eq!(audit_bytes(b"cos\nsystem\n").unwrap().format, "pickle");
    let source = audit_bytes(b"import sys\nsys.modules.pop(x)\n").unwrap();
    assert_eq!((source.format, source.verdict), ("unknown", Verdict::Notice), "{:?}", source.findings);
}

/// `G` takes eight bytes for a number, `C` as many as the next letter says, and a full stop ends a pickle.
const BY_CHANCE: &[&[u8]] = &[
    b"GIT v1.5.2.1 Release Notes\n==========\nFixes since v1.5.2\n",
    b"Copyright (c) 2008-2025 The AsmJit Authors\n\nThis software is provided 'as-is', without any express or implied warranty. \
      In no event will the authors be held liable.\n",
    b"I18\n.\nmore\n",
    b"N. Wirth\n",
    b"(]. R.\n",
    b"copyright (c) by us\nall rights reserved\n.\nmore\n",
];

#[test]
fn text_that_runs_as_a_pickle_by_chance_and_names_nothing_is_a_notice_at_most() {
    let folder = tempfile::tempdir().unwrap();
    for (at, text) in BY_CHANCE.iter().enumerate() {
        let put = |name: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            audit(path).unwrap()
        };
        for name in [format!("LICENSE{at}"), format!("notes{at}.txt")] {
            let audit = put(name);
            assert_eq!((audit.format, audit.verdict), ("unknown", Verdict::Notice), "{text:?}: {:?}", audit.findings);
        }
        // What should be weights is not.
        let audit = put(format!("model{at}.bin"));
        assert_eq!(audit.verdict, Verdict::Malformed, "{text:?}: {:?}", audit.findings);
    }
    let said = vramp(&["audit", folder.path().join("LICENSE0").to_str().unwrap()]);
    assert_eq!(said.code, Some(0), "{}", said.out);
}

#[test]
fn text_hides_no_pickle_that_names_something() {
    for text in BY_CHANCE {
        for evil in [EVIL, b"\x80\x02cmodels\nrun\n)R.", b"cmodels\nrun\n)R."] {
            // Right behind the full stop that ends it: who reads two pickles reads that one.
            let stop = text.iter().position(|byte| *byte == b'.').unwrap();
            let ends: Vec<usize> = (stop..text.len()).filter(|at| text[*at] == b'.').collect();
            let hidden = ends.iter().any(|end| {
                let file = [&text[..=*end], evil].concat();
                let audit = audit_bytes(&file).unwrap();
                audit.verdict >= Verdict::Suspicious && !audit.globals.is_empty()
            });
            assert!(hidden, "{text:?} {evil:?}");
        }
        let audit = audit_bytes(&[text, EVIL].concat()).unwrap();
        assert_eq!(audit.verdict, Verdict::Dangerous, "{text:?}: {:?}", audit.findings);
    }
    // Plain data is a pickle where nothing follows it.
    let plain = audit_bytes(b"(dp0\nS'a'\np1\nI1\ns.\n").unwrap();
    assert_eq!((plain.format, plain.protocol), ("pickle", Some(0)));
}

#[test]
fn paths_for_python_are_no_damaged_weights() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text, verdict) in [
        (
            "precedence.pth",
            &b"import os; var = 'SETUPTOOLS'; enabled = os.environ.get(var) == 'local'; .\n"[..],
            Verdict::Notice,
        ),
        ("easy-install.pth", b"./package\n/usr/lib/other\n", Verdict::Notice),
        ("page.pth", b"<!DOCTYPE html><html>", Verdict::Malformed),
        ("evil.pth", EVIL, Verdict::Dangerous),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let audit = audit(path).unwrap();
        assert_eq!(audit.verdict, verdict, "{name}: {:?}", audit.findings);
    }
}

// ---- tar

fn tar(members: &[(&[u8], u8, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, kind, data) in members {
        let mut header = vec![0; 512];
        header[..name.len()].copy_from_slice(name);
        header[124..135].copy_from_slice(format!("{:011o}", data.len()).as_bytes());
        header[156] = *kind;
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        out.extend(header);
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out
}

#[test]
fn every_pickle_of_every_member_of_a_tar_is_looked_at() {
    let number = b"\x80\x02K\x02.";
    let arguments = b"\x80\x02X\x01\0\0\x000X\x03\0\0\0cpuctorch\nFloatStorage\n\x87.";
    let honest = [&number[..], arguments, &1u64.to_le_bytes(), &1f32.to_le_bytes(), arguments, &[0; 8]].concat();
    let long = [b'n'; 200];
    let plain = audit_bytes(&tar(&[(b"storages", b'0', &honest), (b"sys_info", b'0', b"\x80\x02}.")])).unwrap();
    assert_eq!(plain.verdict, Verdict::Notice, "{:?}", plain.findings);
    assert!(names(&plain, "torch", "FloatStorage"));
    for member in [
        [&honest, EVIL].concat(),
        [&honest, &b"(dp0\n"[..], EVIL].concat(),
        [number, EVIL].concat(),
        EVIL.to_vec(),
        [&b"(S'x'\n"[..], b"ios\ngetenv\n."].concat(),
        [&honest, &b"\x80\x04\x8c\x02os\x8c\x06getenv\x93."[..]].concat(),
    ] {
        for file in [
            tar(&[(b"storages", b'0', &member)]),
            tar(&[(b"././@LongLink", b'L', &long), (b"n", b'0', &member)]),
            tar(&[(b"link", b'2', b""), (b"x", b'7', &member)]),
            [tar(&[(b"a", b'0', b"x")]), vec![0; 1024], member.clone()].concat(),
        ] {
            let audit = audit_bytes(&file).unwrap();
            assert!(names(&audit, "os", "getenv"), "{}: {:?}", member.escape_ascii(), audit.findings);
            assert_eq!((audit.format, audit.verdict), ("tar", Verdict::Dangerous));
        }
    }
}

/// The header's text goes on in the fields of a tar's header, whose checksum only Python reads.
#[test]
fn a_safetensors_file_that_is_a_tar_to_python_is_told_so() {
    let mut file = safetensors(1016, &tar(&[(b"pickle", b'0', b"cx\ny\n.")]));
    file[8..512].fill(b' ');
    file[8..30].copy_from_slice(br#"{"__metadata__":{"x":""#);
    for (at, text) in [(100, &b"0 "[..]), (124, b"00000001000 "), (156, b"0")] {
        file[at..at + text.len()].copy_from_slice(text);
    }
    let json = br#""},"t":{"dtype":"U8","shape":[1024],"data_offsets":[0,1024]}}"#;
    file[512..1024].fill(b' ');
    file[512..512 + json.len()].copy_from_slice(json);
    let sum: u64 = file[..512].iter().map(|byte| u64::from(*byte)).sum();
    let sum = sum - file[148..156].iter().map(|byte| u64::from(*byte)).sum::<u64>() + 256;
    file[148..156].copy_from_slice(format!("0o{sum:06o}").as_bytes());
    let audit = audited(&file);
    assert_eq!((audit.format, audit.verdict), ("safetensors", Verdict::Suspicious), "{:?}", audit.findings);
    assert!(rules(&audit).contains(&"polyglot") && names(&audit, "x", "y"), "{:?}", audit.findings);
}

// ---- pickles

#[test]
fn pickles_behind_the_first_are_named_however_many_there_are() {
    let many = [&b"N.".repeat(5000)[..], EVIL].concat();
    let behind_data = [&b"\x80\x02N."[..], &[7; 5000], EVIL].concat();
    for file in [
        many.clone(),
        behind_data,
        archive(&[&Pickle::new().raw(b"}").stop(), EVIL].concat(), &[]),
        archive(&many, &[]),
    ] {
        let audit = audit_bytes(&file).unwrap();
        assert!(names(&audit, "os", "getenv") && audit.verdict == Verdict::Dangerous, "{:?}", audit.findings);
        assert!(rules(&audit).contains(&"trailing-pickle"));
    }
    // A position is one within the member.
    let audit = audit_bytes(&[&b"N.N."[..], EVIL].concat()).unwrap();
    assert_eq!(audit.globals[0].position, 4);
}

/// Entries of the directory that all lead to one member make a small file look large; a name is listed once, with its count.
#[test]
fn members_that_are_the_same_bytes_are_run_once() {
    let pickle = &Pickle::new().global("x", "y").stop();
    let other = &Pickle::new().global("x", "y").raw(b"0").global("x", "y").stop();
    let mut parts = members(&Pickle::new().raw(b"}").stop(), &[]);
    parts.push(Member::stored("archive/other.pkl", other));
    parts.push(Member::stored("archive/x000.pkl", pickle));
    let file = zip(&parts);
    let (before, end) = file.split_at(file.len() - 22);
    let entry = &before[before.len() - 46 - 16..];
    let mut copies = Vec::new();
    for copy in 1..200 {
        let at = copies.len();
        copies.extend_from_slice(entry);
        copies[at + 46..].copy_from_slice(format!("archive/x{copy:03}.pkl").as_bytes());
    }
    let mut end = end.to_vec();
    let count = u16::from_le_bytes([end[8], end[9]]) + 199;
    let len = u32::from_le_bytes(end[12..16].try_into().unwrap()) + u32::try_from(copies.len()).unwrap();
    end[8..16].copy_from_slice(&[&[count.to_le_bytes(); 2].concat()[..], &len.to_le_bytes()].concat());
    let audit = audit_bytes(&[before, &copies, &end].concat()).unwrap();
    assert!(rules(&audit).contains(&"entry-overlap"), "{:?}", audit.findings);
    let named: Vec<_> = audit.globals.iter().map(|global| (global.name.as_str(), global.count)).collect();
    assert_eq!(named, [("y", 3)]);
}

/// A distributed checkpoint holds its tensors and objects as archives in a row.
#[test]
fn every_archive_of_a_distcp_file_is_looked_at() {
    let honest = archive(&Pickle::new().raw(b"}").stop(), &[]);
    let folder = tempfile::tempdir().unwrap();
    let audited = |name: &str, parts: &[&[u8]]| {
        let path = folder.path().join(name);
        std::fs::write(&path, parts.concat()).unwrap();
        audit(path).unwrap()
    };
    let plain = audited("__0_0.distcp", &[&honest, &honest]);
    assert_eq!((plain.format, plain.verdict), ("torch-zip", Verdict::Notice), "{:?}", plain.findings);
    let evil = archive(EVIL, &[]);
    for parts in [[&evil[..], &honest, &honest], [&honest, &evil, &honest], [&honest, &honest, &evil]] {
        let audit = audited("__0_0.distcp", &parts);
        assert!(names(&audit, "os", "getenv") && audit.verdict == Verdict::Dangerous, "{:?}", audit.findings);
    }
    assert!(audited("model.pt", &[&honest, &honest]).verdict >= Verdict::Malformed);
}

/// To Python's unpickler in C the next pickle begins behind the frame, however early the first one stops in it.
#[test]
fn a_pickle_that_stops_within_its_frame_hides_no_other() {
    let file = [&b"\x80\x04\x95\x04\0\0\0\0\0\0\0N.VxcX\nY\n."[..]].concat();
    let audit = audit_bytes(&file).unwrap();
    assert!(names(&audit, "X", "Y") && rules(&audit).contains(&"frame"), "{:?}", audit.globals);
}

#[test]
fn a_pickle_without_a_mark_where_a_storage_should_be_is_found() {
    let mut all = members(&Pickle::new().raw(b"}").stop(), &[]);
    all.push(Member::stored("archive/data/0", EVIL));
    let audit = audit_bytes(&zip(&all)).unwrap();
    assert!(rules(&audit).contains(&"extra-pickle") && audit.verdict == Verdict::Dangerous);
}

/// Every file of `torch.jit.save` has these, and each was taken for a pickle where a storage should be.
#[test]
fn what_torchscript_says_of_its_source_is_no_surprise_there_and_one_elsewhere() {
    let traces = Pickle::new().global("torch.jit._pickle", "build_intlist").raw(b"](K\x01e\x85R.").bytes();
    let mut parts = members(&Pickle::new().raw(b"}").stop(), &[]);
    parts.push(Member::stored("archive/code/__torch__.py", b"class M(Module):\n"));
    parts.push(Member::stored("archive/code/__torch__.py.debug_pkl", &traces));
    let script = audit_bytes(&zip(&parts)).unwrap();
    assert_eq!((script.format, script.verdict), ("torchscript", Verdict::Notice), "{:?}", script.findings);
    parts.push(Member::stored("archive/data/0.debug_pkl", &traces));
    assert!(rules(&audit_bytes(&zip(&parts)).unwrap()).contains(&"extra-pickle"));
    let mut plain = members(&Pickle::new().raw(b"}").stop(), &[]);
    plain.push(Member::stored("archive/x.debug_pkl", &traces));
    assert!(audit_bytes(&zip(&plain)).unwrap().verdict >= Verdict::Suspicious);
}

/// `torch.export.save` puts the inputs of an example beside the weights, as a file of `torch.save`.
#[test]
fn archives_within_archives_are_looked_into() {
    let exported = |inner: Member| {
        zip(&[
            Member::stored("export/data/weights/weight_0", &[0; 8]),
            Member::stored("export/models/model.json", b"{}"),
            inner,
            Member::stored("export/archive_format", b"pt2"),
            Member::stored("export/archive_version", b"0"),
        ])
    };
    let name = "export/data/sample_inputs/model.pt";
    let honest = exported(Member::stored(name, &archive(&Pickle::new().raw(b"}").stop(), &[])));
    let plain = audit_bytes(&honest).unwrap();
    assert_eq!((plain.format, plain.verdict), ("torch-export", Verdict::Notice), "{:?}", plain.findings);
    let evil = archive(EVIL, &[]);
    let twice = zip(&[Member::stored("a/b.zip", &evil), Member::stored("c", b"text")]);
    for inner in [Member::stored(name, &evil), Member::deflated(name, &evil), Member::stored(name, &twice)] {
        let audit = audit_bytes(&exported(inner)).unwrap();
        assert_eq!((audit.format, audit.verdict), ("torch-export", Verdict::Dangerous), "{:?}", audit.findings);
        let member = audit.findings[0].member.as_deref().unwrap();
        assert!(member.starts_with("export/data/sample_inputs/model.pt!"), "{member}");
        assert!(member.ends_with("archive/data.pkl"), "{member}");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.pt2"), honest).unwrap();
    let refused = vramp::checkpoint::Checkpoint::open(folder.path().join("model.pt2")).unwrap_err();
    assert!(refused.to_string().contains("torch.export"), "{refused}");
}

/// `vramp audit FILE | head` once ended with 0, whatever was found.
#[test]
fn a_verdict_does_not_depend_on_who_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    std::fs::write(&path, EVIL).unwrap();
    for args in [&["audit"][..], &["audit", "--json"], &["audit", "--format", "sarif"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut vramp = Command::new(env!("CARGO_BIN_EXE_vramp"));
        let done = vramp.args(args).arg(&path).stdout(writer).output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{args:?}");
    }
}

/// What `torch.export.load`, `torch.package` and TorchServe run is no pickle.
#[test]
fn code_that_other_readers_run_is_found_where_they_look_for_it() {
    let exported = |name: &str| zip(&[Member::stored(name, b"\x7fELF"), Member::stored("m/archive_format", b"pt2")]);
    let verdict = |file: Vec<u8>| audit_bytes(&file).unwrap().verdict;
    assert_eq!(verdict(exported("m/data/aotinductor/model/x.wrapper.so")), Verdict::Dangerous);
    assert_eq!(verdict(exported("m/models/x.SO")), Verdict::Dangerous);
    assert_eq!(verdict(exported("m/data/weights/weight_0")), Verdict::Notice);
    let weights = || Member::stored("model.pt", &archive(&Pickle::new().raw(b"}").stop(), &[]));
    let served = |extra: Member| zip(&[extra, weights(), Member::stored("MAR-INF/MANIFEST.json", b"{}")]);
    let audit = audit_bytes(&served(Member::stored("handler.py", b"import os"))).unwrap();
    assert_eq!((audit.format, audit.verdict), ("model-archive", Verdict::Suspicious), "{:?}", audit.findings);
    let audit = audit_bytes(&served(Member::stored("index.json", b"{}"))).unwrap();
    assert_eq!((audit.format, audit.verdict), ("model-archive", Verdict::Notice), "{:?}", audit.findings);
    let stack = vramp::testing::torch::legacy(&Pickle::new().raw(b"}").stop(), &[]);
    assert_eq!(verdict(served(Member::deflated("old.pt", &stack))), Verdict::Notice);
    let script = [
        members(&Pickle::new().global("__torch__", "M").raw(b")R").stop(), &[]),
        vec![Member::stored("archive/constants.pkl", b"\x80\x02).")],
    ];
    assert_eq!(verdict(served(Member::stored("script.pt", &zip(&script.concat())))), Verdict::Notice);
    let packaged = zip(&[Member::stored("p/.data/extern_modules", b""), Member::stored("p/m.py", b"import os")]);
    assert_eq!(verdict(packaged), Verdict::Suspicious);
}

/// Where the limit of archives within archives ends the search, that is told; so it is where many share few bytes.
#[test]
fn archives_that_are_not_looked_into_are_told_of() {
    let nest = |file: Vec<u8>| zip(&[Member::stored("a/m.zip", &file), Member::stored("MAR-INF/MANIFEST.json", b"{}")]);
    let four = nest(nest(nest(nest(archive(&Pickle::new().raw(b"}").stop(), &[])))));
    let audit = audit_bytes(&four).unwrap();
    assert!(rules(&audit).contains(&"resource-limit") && audit.verdict == Verdict::Suspicious, "{:?}", audit.findings);
    let inner = zip(&[Member::stored("a", &vec![0; 1 << 20])]);
    let mut parts = vec![Member::stored("MAR-INF/MANIFEST.json", b"{}")];
    parts.extend((0..40).map(|at| Member::deflated(&format!("m{at}.zip"), &inner)));
    let audit = audit_bytes(&zip(&parts)).unwrap();
    assert!(rules(&audit).contains(&"resource-limit"), "{:?}", audit.findings);
}

#[test]
fn no_number_of_harmless_calls_hides_another() {
    let names = (0..1500).fold(Pickle::new(), |pickle, at| pickle.global("aaa", &format!("n{at}")).raw(b"0"));
    let called = (0..3000).fold(names, |pickle, _| pickle.global("collections", "Counter").raw(b")R)R0"));
    let encoded = called.global("_codecs", "encode").text("a").text("zlib").raw(b"\x86R.").bytes();
    let audit = audit_bytes(&encoded).unwrap();
    let said = |what: &str| audit.findings.iter().filter(|finding| finding.what.contains(what)).count();
    assert_eq!((said("Latin-1"), said("result of a call")), (1, 100));
}

#[test]
fn what_calls_another_by_name_is_judged_by_that() {
    let encode = |pickle: Pickle| pickle.global("_codecs", "encode");
    let typed = |pickle: Pickle| pickle.global("torch._tensor", "_rebuild_from_type_v2").raw(b"(");
    let inner = encode(typed(Pickle::new())).global("torch", "Tensor").text("a").text("zlib").raw(b"\x86NtR.").bytes();
    let hidden = Pickle::new().global("torch._tensor", "_rebuild_from_type_v2").raw(b")R.").bytes();
    let by_new = Pickle::new().global("copyreg", "_reconstructor").global("builtins", "bytes");
    let by_new = by_new.global("builtins", "bytes").int(1 << 40).raw(b"\x87R.").bytes();
    for pickle in [inner, hidden, by_new] {
        let audit = audit_bytes(&pickle).unwrap();
        assert!(rules(&audit).contains(&"argument-denied"), "{}: {:?}", pickle.escape_ascii(), audit.findings);
    }
}

/// A namespace's `append` may be anything; names of TorchScript are none of other files.
#[test]
fn what_an_unpickler_would_call_on_an_object_is_suspicious() {
    let namespace = b"\x80\x02cargparse\nNamespace\n)\x81}";
    let state = |key: &str, value: &[u8]| [&b"U"[..], &[key.len() as u8], key.as_bytes(), value, b"sb"].concat();
    // An `OrderedDict([[key, value]])` in place of the dictionary.
    let pairs = |key: &str, value: &[u8]| {
        [b"0ccollections\nOrderedDict\n](](U", &[key.len() as u8][..], key.as_bytes(), value, b"ee\x85Rb"].concat()
    };
    for (rest, verdict) in [
        (state("append", b"\x88"), Verdict::Clean),
        (state("dtype", b"ctorch\nfloat32\n"), Verdict::Clean),
        (state("append", b"ctorch\ndevice\n"), Verdict::Suspicious),
        (state("__setstate__", b"\x88"), Verdict::Suspicious),
        ([state("x", b"\x88"), b"K\x01a".to_vec()].concat(), Verdict::Suspicious),
        ([state("x", b"\x88"), b"(K\x01K\x02u".to_vec()].concat(), Verdict::Suspicious),
        (state("x", b"ctorch.jit._pickle\nbuild_intlist\n"), Verdict::Suspicious),
        (pairs("append", b"\x88"), Verdict::Clean),
        (pairs("append", b"ctorch\ndevice\n"), Verdict::Suspicious),
        (pairs("__setstate__", b"\x88"), Verdict::Suspicious),
    ] {
        let audit = audit_bytes(&[namespace, &rest[..], b"."].concat()).unwrap();
        assert_eq!(audit.verdict, verdict, "{}: {:?}", rest.escape_ascii(), audit.findings);
    }
    for filled in [&b"ccollections\ndeque\n)RK\x01a."[..], b"ccollections\nOrderedDict\n)RK\x01K\x02s."] {
        assert_eq!(audit_bytes(&[b"\x80\x02", filled].concat()).unwrap().verdict, Verdict::Clean);
    }
}

#[test]
fn few_bytes_that_python_makes_much_of_are_suspicious() {
    let large = 1 << 38;
    let call = |module: &str, name: &str, arguments: &dyn Fn(Pickle) -> Pickle| {
        arguments(Pickle::new().global(module, name).raw(b"(")).raw(b"tR.").bytes()
    };
    let builtin = |name: &str, numbers: &[i64]| {
        call("builtins", name, &|pickle| numbers.iter().fold(pickle, |pickle, number| pickle.int(*number)))
    };
    let suspicious = [
        builtin("range", &[large]),
        call("__builtin__", "xrange", &|pickle| pickle.int(large)),
        builtin("range", &[0, -large, -1]),
        builtin("bytes", &[large]),
        builtin("bytearray", &[large]),
        call("builtins", "bytearray", &|pickle| pickle.raw(b"\x8a\x09\0\0\0\0\0\0\0\0\x01")),
        call("builtins", "bytes", &|pickle| pickle.global("builtins", "int").text("99999999999").raw(b"\x85R")),
        call("builtins", "list", &|pickle| pickle.global("builtins", "range").int(large).raw(b"\x85R")),
        call("numpy", "ndarray", &|pickle| pickle.ints(&[1 << 20, 1 << 20])),
        call("numpy.core.multiarray", "_reconstruct", &|pickle| pickle.global("numpy", "ndarray").ints(&[large])),
        call("torch", "FloatStorage", &|pickle| pickle.int(large)),
        call("torch.storage", "UntypedStorage", &|pickle| pickle.int(large)),
        Pickle::new().global("builtins", "bytes").int(large).raw(b"\x85}\x92.").bytes(),
        Pickle::new().global("builtins", "bytearray").int(large).raw(b"\x85\x81.").bytes(),
    ];
    for pickle in suspicious {
        let audit = audit_bytes(&pickle).unwrap();
        assert_eq!(audit.verdict, Verdict::Suspicious, "{}", pickle.escape_ascii());
        assert!(rules(&audit).contains(&"argument-denied"), "{:?}", audit.findings);
    }
    for pickle in [
        builtin("range", &[0, 1000, 3]),
        call("__builtin__", "xrange", &|pickle| pickle.int(1000)),
        builtin("range", &[large, large + 5]),
        builtin("bytes", &[16]),
        builtin("bytearray", &[]),
        call("builtins", "bytearray", &|pickle| pickle.raw(b"C\x03abc")),
        call("builtins", "bytearray", &|pickle| {
            pickle.global("_codecs", "encode").text("a").text("latin1").raw(b"\x86R")
        }),
        call("builtins", "complex", &|pickle| pickle.int(large)),
        call("numpy.core.multiarray", "_reconstruct", &|pickle| pickle.global("numpy", "ndarray").ints(&[0])),
    ] {
        let audit = audit_bytes(&pickle).unwrap();
        assert!(audit.verdict <= Verdict::Notice, "{}: {:?}", pickle.escape_ascii(), audit.findings);
    }
}

#[test]
fn a_finding_says_where_it_is_or_nothing() {
    for (pickle, position) in [(&b"\x80\x02N0]q\x00h\x00a."[..], Some(4)), (b"\x80\x02}(NNNNu.", None)] {
        let audit = audit_bytes(pickle).unwrap();
        let finding = audit.findings.iter().find(|finding| finding.severity > Severity::Notice).unwrap();
        assert_eq!(finding.spot.as_ref().and_then(|spot| spot.position), position, "{finding}");
        assert_eq!(finding.to_string().contains("byte"), position.is_some(), "{finding}");
    }
}

/// A text of megabytes that a thousand names, keys or findings share must not be copied for each.
#[test]
fn what_is_shared_is_not_copied_for_each_use() {
    const SHARED: usize = 8 << 20;
    let shared = "m".repeat(SHARED);
    let begin = || Pickle::new().text(&shared).raw(b"q\x000");
    let named = (0..1000).fold(begin(), |pickle, at| pickle.raw(b"h\x00").text(&format!("n{at}")).raw(b"\x930"));
    let audit = audit_bytes(&named.raw(b"N.").bytes()).unwrap();
    let bytes: usize = audit.globals.iter().map(|global| global.module.len()).sum();
    let said: usize = audit.findings.iter().map(|finding| finding.what.len()).sum();
    assert!(audit.globals.len() == 1000 && bytes + said < 2 << 20, "{bytes} {said}");

    // Ten thousand keys of 8 MB would be 80 GB.
    let keys = |last: i64| {
        let all = (0..10_000).fold(begin().raw(b"}("), |pickle, at| pickle.raw(b"h\x00").int(at).raw(b"\x86N"));
        all.raw(b"h\x00").int(last).raw(b"\x86Nu.").bytes()
    };
    assert!(!rules(&audit_bytes(&keys(10_000)).unwrap()).contains(&"duplicate-key"));
    assert!(rules(&audit_bytes(&keys(77)).unwrap()).contains(&"duplicate-key"));

    let member = "x".repeat(60_000);
    let pickle = (0..2000).fold(Pickle::new(), |pickle, at| pickle.global("aaa", &format!("n{at}")).raw(b"0"));
    let mut all = members(&Pickle::new().raw(b"}").stop(), &[]);
    all.push(Member::stored(&format!("archive/{member}.pkl"), &pickle.raw(b"N.").bytes()));
    let audit = audit_bytes(&zip(&all)).unwrap();
    assert!(serde_json::to_vec(&audit).unwrap().len() < 4 << 20);
}

// ---- folders

fn told(said: &Said) -> Value {
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {} {}", said.out, said.err))
}

#[test]
fn every_file_of_a_folder_is_accounted_for() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let whole = folder.path().to_str().unwrap();
    put("README.md", b"class of models\ncalled so\n");
    put("requirements.txt", b"click\nnumpy\n");
    put("config.json", br#"{"data":{"a":1}}"#);
    put("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR");
    put("vocabulary.npz", &zip(&[Member::stored("a.npy", b"\x93NUMPY")]));
    put("model.gguf", b"GGUF\x03\0\0\0");
    put("__init__.py", b"");
    put("model.safetensors", &safetensors(128, b"1234"));
    let said = vramp(&["audit", whole, "--json"]);
    let json = told(&said);
    assert_eq!((said.code, &json["others"], &json["verdict"]), (Some(0), &7.into(), &"clean".into()), "{json}");
    assert!(vramp(&["audit", whole]).out.contains("7 other files looked at"));

    for (name, bytes, rule, word) in [
        ("a.pt", &b""[..], "empty-file", "empty"),
        ("b.bin", b"<!DOCTYPE html><html>", "not-weights", "HTML"),
        ("c.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42\n", "not-weights", "LFS"),
        ("d.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42\n", "not-weights", "LFS"),
        ("e.ckpt.part", &[1, 2, 3, 4, 5, 6, 7, 8, 9], "not-recognised", "neither"),
        ("f.pth", &[0; 100], "not-weights", "zero bytes"),
        ("g.pt", b"GGUF\x03\0\0\0", "other-format", "GGUF"),
        ("h.pt", &zip(&[Member::stored("a", b"b")]), "pickle-missing", "data.pkl"),
        ("i.safetensors", &[&(1u64 << 30).to_le_bytes()[..], br#"{"t":{"dtype""#].concat(), "safetensors", "header"),
    ] {
        put(name, bytes);
        let said = vramp(&["audit", whole, "--json"]);
        let json = told(&said);
        assert_eq!((said.code, &json["others"], &json["verdict"]), (Some(3), &7.into(), &"malformed".into()), "{json}");
        let findings = json["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["place"].as_str().unwrap().contains(name));
        let found = found.unwrap_or_else(|| panic!("{name}: {json}"));
        assert!(found["rule"] == rule && found["what"].as_str().unwrap().contains(word), "{name}: {found}");
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
}

#[test]
fn what_is_no_regular_file_is_told_of_and_never_opened() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "log"] {
        let status = Command::new("mkfifo").arg(folder.path().join(name)).status().unwrap();
        assert!(status.success());
    }
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("a.pt")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("b.bin")).unwrap();
    let whole = folder.path().to_str().unwrap().to_owned();
    let said = watched(move || vramp(&["audit", &whole, "--json"]));
    let json = told(&said);
    assert_eq!((said.code, &json["verdict"]), (Some(3), &"malformed".into()), "{json}");
    let findings = json["findings"].as_array().unwrap();
    let found: Vec<_> =
        findings.iter().map(|finding| (finding["rule"].as_str().unwrap(), finding["what"].to_string())).collect();
    assert_eq!(found.len(), 3, "{found:?}");
    for (finding, word) in found.iter().zip(["a socket", "a device", "a named pipe"]) {
        assert!(finding.0 == "not-regular" && finding.1.contains(word), "{finding:?}");
    }
}

#[test]
fn many_notices_of_one_kind_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    for at in 0..40 {
        std::fs::write(folder.path().join(format!("{at}.pth")), b"./packages\n").unwrap();
    }
    let array = |pickle: Pickle| pickle.global("numpy", "float64").raw(b"0");
    let many = ["float64", "float32", "int64", "int32", "int8"]
        .iter()
        .fold(Pickle::new(), |pickle, name| pickle.global("numpy", name).raw(b"0"));
    std::fs::write(folder.path().join("many.pkl"), array(many).raw(b"N").stop()).unwrap();
    let said = vramp(&["audit", folder.path().to_str().unwrap()]);
    assert_eq!(said.code, Some(0), "{}", said.out);
    assert!(said.out.contains("40 files, the first") && said.out.lines().count() < 20, "{}", said.out);
    assert!(said.out.contains("5 times numpy-global"), "{}", said.out);
}

#[test]
fn what_cannot_be_read_is_named_and_hides_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("evil.pkl"), EVIL).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path().join("dangling.pt")).unwrap();
    let deep = (0..70).fold(folder.path().to_owned(), |path, at| path.join(format!("d{at}")));
    std::fs::create_dir_all(&deep).unwrap();
    let whole = folder.path().to_str().unwrap();
    let said = vramp(&["audit", whole, "--json"]);
    let json = told(&said);
    assert_eq!((said.code, &json["verdict"]), (Some(4), &"dangerous".into()));
    let unreadable = json["unreadable"].to_string();
    assert!(unreadable.contains("dangling.pt") && unreadable.contains("d64"), "{unreadable}");
    let text = vramp(&["audit", whole]);
    assert!(text.code == Some(4) && text.out.contains("os.getenv") && text.out.contains("dangling.pt"), "{}", text.out);
    let sarif: Value = serde_json::from_str(&vramp(&["audit", whole, "--format", "sarif"]).out).unwrap();
    let invocation = &sarif["runs"][0]["invocations"][0];
    assert_eq!(invocation["executionSuccessful"], false);
    assert_eq!(invocation["toolExecutionNotifications"].as_array().unwrap().len(), 2);
}

#[test]
fn a_path_that_is_not_utf_8_is_written_with_replacements() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"m\xff.pkl"));
    std::fs::write(&path, EVIL).unwrap();
    for of in [path.as_path(), folder.path()] {
        for format in ["json", "sarif", "text"] {
            let audit = Command::new(env!("CARGO_BIN_EXE_vramp"))
                .arg("audit")
                .arg(of)
                .args(["--format", format])
                .output()
                .unwrap();
            let out = String::from_utf8(audit.stdout).unwrap();
            assert!(audit.status.code() == Some(1) && out.contains("m\u{fffd}.pkl"), "{out}");
        }
    }
    assert!(serde_json::to_string(&audit(Path::new(&path)).unwrap()).is_ok());
}

#[test]
fn a_name_is_escaped_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.pkl");
    std::fs::write(&path, b"ca\\b\x1b[1m\nn'\"\n.").unwrap();
    let text = vramp(&["audit", path.to_str().unwrap()]).out;
    assert!(text.contains(r#"names a\b\u{1b}[1m.n'", which"#), "{text}");
}
