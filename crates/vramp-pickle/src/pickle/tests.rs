//! The machine against hand-written pickles: what it reads, what it refuses, and that it never does more than the bytes allow.

use proptest::prelude::*;

use super::*;

fn ran(bytes: &[u8]) -> Ran {
    run(bytes.to_vec(), bytes.len() as u64)
}

fn rule(bytes: &[u8]) -> &'static str {
    let ran = ran(bytes);
    let walked = ran.result.and_then(|root| walk(&ran.arena, root).broken);
    ran.faults.first().cloned().or(walked).map_or("", |broken| broken.rule)
}

fn said(bytes: &[u8]) -> String {
    let ran = ran(bytes);
    ran.result.map_or_else(|| format!("{:?}", ran.faults), |root| ran.arena.preview(root))
}

#[test]
fn every_protocol_s_way_to_say_a_thing_says_it() {
    for (bytes, meaning) in [
        (&b"(I1\nI01\nL-5L\nF2.5\nNt."[..], "(1, True, -5, 2.5, None)"),
        (b"\x80\x02(K\x01\x88J\xff\xff\xff\xffM\x00\x01t.", "(1, True, -1, 256)"),
        (b"\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01.", "18446744073709551616"),
        (b"\x80\x02G\x3f\xf0\x00\x00\x00\x00\x00\x00.", "1.0"),
        (b"(S'a\\n'\nVb\\u00e9\nU\x01cX\x01\x00\x00\x00dt.", r#"("a\n", "bé", "c", "d")"#),
        (b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x85.", r#"("a")"#),
        (b"](I1\nI2\ne.", "[1, 2]"),
        (b"(lp0\nI1\nag0\n0.", "[1]"),
        (b"(I1\nI2\nd.", "{1 entries}"),
        (b"\x80\x04\x8f(K\x01K\x02\x90.", "[1, 2]"),
        (b"\x80\x04(K\x01K\x02\x91.", "(1, 2)"),
        (b"\x80\x05\x96\x02\x00\x00\x00\x00\x00\x00\x00hi.", "2 bytes"),
        (b"K\x012\x86.", "(1, 1)"),
        (b"K\x07(K\x01K\x021.", "7"),
        (b"cos\nsystem\n(S'x'\ntR.", r#"os.system("x")"#),
        (b"(S'x'\nios\nsystem\n.", r#"os.system("x")"#),
        (b"(cos\nsystem\nS'x'\no.", r#"os.system("x")"#),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
    ] {
        assert_eq!(said(bytes), meaning, "{}", bytes.escape_ascii());
    }
}

#[test]
fn what_is_wrong_has_a_name() {
    for (bytes, name) in [
        (&b""[..], "truncated"),
        (b"K", "truncated"),
        (b"K\x01", "truncated"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", "truncated"),
        (b"\xff.", "opcode"),
        (b"\x80\x09N.", "proto-version"),
        (b"N\x80\x02.", "proto-misplaced"),
        (b".", "stack-underflow"),
        (b"N\x87.", "stack-underflow"),
        (b"Nt.", "mark-missing"),
        (b"(N0.", "stack-underflow"),
        (b"h\x00.", "memo-missing"),
        (b"Nr\xff\xff\xff\xff.", "memo-index"),
        (b"X\x01\x00\x00\x00\xff.", "text-encoding"),
        (b"\x8b\xff\xff\xff\xff.", "number-range"),
        (b"\x82\x01.", "extension"),
        (b"\x97.", "out-of-band"),
        (b"NK\x01a.", "append-target"),
        (b"NK\x01K\x02s.", "setitem-target"),
        (b"}(K\x01u.", "stack-shape"),
        (b"NNb.", "build-target"),
        (b"NNR.", "argument-type"),
        (b"cos\nsystem\nNR.", "argument-type"),
        (b"\x80\x04NN\x93.", "global-not-string"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.", "frame"),
        (b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00\x8c\x01a.", "frame"),
        (b"]q\x00h\x00a.", "cycle"),
        (b"}q\x00K\x01h\x00s.", "cycle"),
        (b"}(K\x01NK\x01Nu.", "duplicate-key"),
        (b"}(K\x01NI01\nNu.", "duplicate-key"),
        (b"}]Ns.", "dict-key"),
    ] {
        assert_eq!(rule(bytes), name, "{}", bytes.escape_ascii());
    }
    let wide = [&b"\x8a\xff"[..], &[1; 255], b"."].concat();
    assert_eq!(rule(&wide), "integer-limit");
    assert_eq!(rule(&[&b"I"[..], &[b'9'; 5000], b"\n."].concat()), "integer-limit");
}

#[test]
fn depth_and_sharing_cost_what_the_bytes_cost() {
    let deep = [&b")"[..], &[0x85; 200_000], b"."].concat();
    assert_eq!(rule(&deep), "depth-limit");
    // Each round makes a list that holds the one before twice.
    let mut bomb = b"]K\x01aq\x00".to_vec();
    for slot in 1..100u8 {
        bomb.extend([b"]h", &[slot - 1][..], b"ah", &[slot - 1], b"aq", &[slot]].concat());
    }
    bomb.push(b'.');
    assert_eq!(rule(&bomb), "resource-limit");
    assert_eq!(rule(&[0x94].repeat(0)), "truncated");
    assert_eq!(rule(&[&b"N"[..], &vec![0x94; MAX_MEMO + 1], b"."].concat()), "resource-limit");
    assert_eq!(rule(&vec![b'N'; MAX_STACK + 1]), "resource-limit");
}

#[test]
fn what_was_popped_stays_known() {
    let ran = ran(b"cos\ngetenv\n(S'HOME'\ntR0N.");
    let root = ran.result.unwrap();
    let walk = walk(&ran.arena, root);
    let global = ran.arena.globals[0];
    assert_eq!((ran.arena.names(&global), global.offset), (("os", "getenv"), 0));
    assert!(!walk.reaches(global.id) && walk.reaches(root));
    assert_eq!(ran.arena.calls[0].offset, 21);
}

#[test]
fn a_broken_pickle_still_tells_what_came_before() {
    let ran = ran(b"cos\ngetenv\n(S'HOME'\ntR\xff");
    assert_eq!(ran.faults[0].rule, "opcode");
    assert_eq!(ran.arena.names(&ran.arena.globals[0]), ("os", "getenv"));
}

/// What one of Python's unpicklers takes, or an unpickler that somebody else wrote on top of them, must not hide what follows.
#[test]
fn no_fault_that_some_unpickler_survives_hides_a_name() {
    let frame = |len: u64| [&b"\x95"[..], &len.to_le_bytes()].concat();
    let cases: &[(&[u8], &str)] = &[
        (b"I1_0\n", ""),
        (b"I 7\t\n", ""),
        (b"I+1\n", ""),
        (b"I010\n", "number-range"),
        (b"I0x1f\n", "number-range"),
        (b"I5\0junk\n", "number-range"),
        (b"L0x10L\n", "number-range"),
        (b"F1_0.5\n", ""),
        (b"F1e999\n", ""),
        (b"F nan \n", ""),
        (b"S'\\157\\q\\7'\n", ""),
        (
            br"V\\u0041\ud800
",
            "text-encoding",
        ),
        (b"X\x03\0\0\0\xed\xa0\x80", "text-encoding"),
        (b"P\n", ""),
        (b"NQ", ""),
        (b"\x82\x07", "extension"),
        (b"\x83\x07\x01", "extension"),
        (b"\x84\x07\x01\0\0", "extension"),
        (b"\x97\x98", "out-of-band"),
        (b"\x80\x09", "proto-version"),
        (b"NNp\n1", "number-range"),
        (b"Np 1_0 \ng10\n", ""),
        (b"Np+0\ng-0\n", ""),
        (b"Np99999999999999999999\ng99999999999999999999\n", "memo-index"),
        (b"Nr\xff\xff\xff\xff", "memo-index"),
        (b"h\x07", "memo-missing"),
        (b"\x96\x01\0\0\0\0\0\0\0aK\x01a", "append-target"),
        (b"NK\x01a", "append-target"),
        (b"cbuiltins\nset\nK\x01K\x01s", "setitem-target"),
        (b"cbuiltins\nset\n}b", "build-target"),
        (b"N}b", "build-target"),
        (b"cbuiltins\nset\n]R", "argument-type"),
        (b"cbuiltins\nset\n]\x81", "argument-type"),
        (b"cbuiltins\nset\n)NR", "argument-type"),
        (b"cbuiltins\nstr\n)Rq\0h\0\x93", "global-not-string"),
        (b"\x8a\x90\x01\x01", "truncated"),
    ];
    let long = [&b"\x8a\x90"[..], &[1; 0x90], b"0N"].concat();
    let framed: Vec<(Vec<u8>, &str)> = vec![
        (frame(1), "frame"),
        ([frame(40), frame(2)].concat(), "frame"),
        (frame(1 << 40), "frame"),
        (long, "integer-limit"),
    ];
    for (bytes, name) in cases.iter().map(|(bytes, name)| (bytes.to_vec(), *name)).chain(framed) {
        let ran = ran(&[&bytes, &b"cos\nsystem\n."[..]].concat());
        let named = ran.arena.globals.iter().any(|global| ran.arena.names(global) == ("os", "system"));
        let stops = matches!(name, "truncated") || bytes == b"NNp\n1";
        assert_eq!(named, !stops, "{}: {:?}", bytes.escape_ascii(), ran.faults);
        assert_eq!(ran.faults.first().map_or("", |fault| fault.rule), name, "{}", bytes.escape_ascii());
        assert_eq!(ran.result.is_some(), !ran.faults.iter().any(Broken::blocks));
    }
}

#[test]
fn what_is_imported_before_the_pickle_breaks_is_named() {
    // INST without a mark; a last line without its end, whose last byte Python's own reader drops.
    for bytes in [&b"ios\nsystem\n"[..], b"cos\nsystemX", b"\x80\x04\x8c\x02os\x8c\x06system\x93\xff"] {
        let ran = ran(bytes);
        assert_eq!(ran.arena.names(&ran.arena.globals[0]), ("os", "system"), "{}", bytes.escape_ascii());
        assert!(ran.result.is_none() && !ran.stopped);
    }
}

/// Python's unpickler in C reads frames ahead, and loses what is left of one when a value crosses its end.
#[test]
fn what_the_unpickler_in_c_sees_across_frames_is_seen() {
    for (len, bytes, name) in [
        (5u64, &b"cos\nxsystem\n."[..], "system"),
        (7, b"cos\nabXsystem\n.", "system"),
        (100, b"cos\nsystem\n.", "system"),
        (4, b"cos\nsystem\n.", "system"),
        (3, b"Xab\x02\0\0\0os\x8c\x06system\x93.", "system"),
        (3, b"C\x02ab\x8c\x02os\x8c\x06system\x93.", "system"),
    ] {
        let all = [&b"\x80\x04\x95"[..], &len.to_le_bytes(), bytes].concat();
        let ran = run_skipping(all.clone(), all.len() as u64);
        let names: Vec<_> = ran.arena.globals.iter().map(|global| ran.arena.names(global)).collect();
        assert_eq!(names, [("os", name)], "{} {:?}", bytes.escape_ascii(), ran.faults);
    }
}

/// 16 MB of harmless values reached the limit, and what followed was not read.
#[test]
fn no_limit_hides_a_name() {
    let evil = b"V\\u006fs\n\x8c\x06system\x93.";
    for padding in [
        [&b"V"[..], &vec![0xff; 40 << 20], b"\n0"].concat(),
        b"K\x010".repeat(MAX_VALUES + 1),
        vec![b'N'; MAX_STACK + 1],
        vec![b'('; MAX_STACK + 1],
        vec![b']'; MAX_CONTAINERS + 1],
        [&b"N"[..], &vec![0x94; MAX_MEMO + 1]].concat(),
        b"c\nx\n0".repeat(MAX_GLOBALS + 1),
    ] {
        let ran = ran(&[&padding, &evil[..]].concat());
        let last = ran.arena.globals.last().unwrap();
        assert_eq!(ran.arena.names(last), ("os", "system"));
        assert_eq!((ran.faults[0].rule, ran.result, ran.stopped), ("resource-limit", None, true));
    }
}

#[test]
fn a_fault_stands_where_its_value_was_made() {
    for (bytes, rule, offset) in [
        (&b"N0]q\x00h\x00a."[..], "cycle", Some(2)),
        (b"}(K\x01NK\x01Nu.", "duplicate-key", Some(5)),
        (b"}(NNNNu.", "duplicate-key", None),
        (b"}]Ns.", "dict-key", Some(1)),
    ] {
        let ran = ran(bytes);
        let broken = walk(&ran.arena, ran.result.unwrap()).broken.unwrap();
        assert_eq!((broken.rule, broken.offset), (rule, offset), "{}", bytes.escape_ascii());
    }
    let ran = ran(&[&b"N0)"[..], &[0x85; 2000], b"."].concat());
    assert_eq!(walk(&ran.arena, ran.result.unwrap()).broken.unwrap().offset, Some(3 + 2000 - 1 - 1000));
}

/// Which keys Python takes for one.
#[test]
fn equal_keys_are_those_of_python() {
    for (first, second, same) in [
        (&b"K\x01"[..], &b"I01\n"[..], true),
        (b"K\x01", b"G\x3f\xf0\0\0\0\0\0\0", true),
        (b"G\x80\0\0\0\0\0\0\0", b"K\0", true),
        (b"K\x01", b"X\x01\0\0\x001", false),
        (b"\x8a\x09\0\0\0\0\0\0\0\0\x01", b"\x8a\x0a\0\0\0\0\0\0\0\0\x01\0", true),
        (b"(K\x01K\x02\x91", b"(K\x02K\x01K\x02\x91", true),
        (b"K\x01K\x02\x86", b"K\x02K\x01\x86", false),
        (b"K\x01\x85\x85", b"I1\n\x85\x85", true),
        (b"S'a'\n", b"Va\n", true),
        (b"S'a'\n", b"C\x01a", false),
        (b"cx\ny\n", b"cx\ny\n", false),
    ] {
        let bytes = [b"}(", first, b"N", second, b"Nu."].concat();
        assert_eq!(rule(&bytes) == "duplicate-key", same, "{}", bytes.escape_ascii());
    }
}

/// Pieces of pickles, so that random ones get somewhere.
fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop::sample::select(vec![
        &b"N"[..],
        b"K\x01",
        b"(",
        b"t",
        b"]",
        b"}",
        b"a",
        b"e",
        b"s",
        b"u",
        b"q\x00",
        b"h\x00",
        b"\x85",
        b"\x86",
        b"R",
        b"b",
        b"0",
        b"2",
        b"cos\nx\n",
        b"X\x01\x00\x00\x00a",
        b"Q",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x81",
        b"o",
        b"1",
        b"\x94",
        b"\x93",
        b"I01\n",
    ]);
    prop::collection::vec(piece, 0..60).prop_map(|pieces| [pieces.concat(), b".".to_vec()].concat())
}

proptest! {
    #[test]
    fn no_pickle_panics_and_every_id_is_in_the_arena(bytes in prop_oneof![opcodes(), prop::collection::vec(any::<u8>(), 0..200)]) {
        let ran = ran(&bytes);
        prop_assert!(ran.end <= bytes.len());
        prop_assert_eq!(ran.result.is_some(), ran.stopped && !ran.faults.iter().any(Broken::blocks));
        let Some(root) = ran.result else { return Ok(()) };
        let walk = walk(&ran.arena, root);
        prop_assert!(walk.reaches(root));
        for id in 0..Id::try_from(ran.arena.values.len()).unwrap() {
            let mut next = 0;
            while let Some(child) = ran.arena.child(id, next) {
                prop_assert!((child as usize) < ran.arena.values.len());
                prop_assert!(!walk.reaches(id) || walk.reaches(child));
                next += 1;
            }
        }
        prop_assert!(ran.arena.preview(root).chars().count() <= 121);
    }
}
