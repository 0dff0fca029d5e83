//! The interpreter by itself: each instruction against Rust's arithmetic, and everything that must trap or be refused.

use std::ops::Range;

use super::*;

/// One allocation of words at 4096.
struct Words(Vec<u64>);

const BASE: u64 = 4096;

impl DeviceMemory for Words {
    fn allocation(&mut self, address: u64) -> Option<Range<u64>> {
        let range = BASE..BASE + self.0.len() as u64 * 8;
        range.contains(&address).then_some(range)
    }

    fn host(&self, address: u64) -> *mut u8 {
        self.0.as_ptr().cast::<u8>().wrapping_add((address - BASE) as usize).cast_mut()
    }
}

const REGISTERS: &str = ".reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %d<16>; .reg .f32 %f<8>;";

fn module(body: &str) -> Result<Module, String> {
    let text = format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 out, .param .u32 n)\n{{ {REGISTERS} {body} }}"
    );
    Module::parse(&text)
}

fn launch_body(body: &str, words: &mut Words, threads: u32, order: Order) -> Result<Touched, Trap> {
    let module = module(body).unwrap();
    let mut parameters = BASE.to_le_bytes().to_vec();
    parameters.extend(7u32.to_le_bytes());
    let launch = Launch { parameters: &parameters, grid: [1; 3], block: [threads, 1, 1], shared_bytes: 0, order };
    run(&module.kernels()[0], &launch, words)
}

/// What `%d0` holds after the instructions, with `%d1`, `%d2`, `%d3` set.
fn result_of(instructions: &str, a: u64, b: u64, c: u64) -> u64 {
    let mut words = Words(vec![0]);
    let body = format!(
        "mov.u64 %d1, {a}; mov.u64 %d2, {b}; mov.u64 %d3, {c}; mov.u64 %d0, 0;
         cvt.u32.u64 %r1, %d1; cvt.u32.u64 %r2, %d2; cvt.u32.u64 %r3, %d3; cvt.u16.u64 %h1, %d1; cvt.u16.u64 %h2, %d2;
         {instructions}; ld.param.u64 %d9, [out]; st.global.u64 [%d9], %d0; ret;"
    );
    launch_body(&body, &mut words, 1, Order::Forward).unwrap();
    words.0[0]
}

const VALUES: [u64; 9] =
    [0, 1, 2, 31, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x1234_5678_9abc_def0, 0xfedc_ba98_8765_4321];

/// Every pair of values through an instruction on 64 bits and through its meaning.
fn check64(instruction: &str, meaning: impl Fn(u64, u64) -> u64) {
    for (a, b) in VALUES.iter().flat_map(|a| VALUES.map(|b| (*a, b))) {
        assert_eq!(result_of(instruction, a, b, 0), meaning(a, b), "{instruction} of {a:#x}, {b:#x}");
    }
}

/// The same on 32 bits, result in `%r0`.
fn check32(instruction: &str, meaning: impl Fn(u32, u32) -> u32) {
    let instruction = format!("{instruction}; cvt.u64.u32 %d0, %r0");
    check64(&instruction, |a, b| meaning(a as u32, b as u32).into());
}

#[test]
fn integers() {
    check64("add.s64 %d0, %d1, %d2", u64::wrapping_add);
    check64("sub.s64 %d0, %d1, %d2", u64::wrapping_sub);
    check64("mul.lo.s64 %d0, %d1, %d2", u64::wrapping_mul);
    check64("mul.hi.u64 %d0, %d1, %d2", |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64);
    check64("mul.hi.s64 %d0, %d1, %d2", |a, b| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64);
    check64("mul.wide.u32 %d0, %r1, %r2", |a, b| u64::from(a as u32) * u64::from(b as u32));
    check64("mul.wide.s32 %d0, %r1, %r2", |a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64);
    check64("mad.wide.u32 %d0, %r1, %r2, 5", |a, b| (u64::from(a as u32) * u64::from(b as u32)).wrapping_add(5));
    check32("mad.lo.s32 %r0, %r1, %r2, -3", |a, b| a.wrapping_mul(b).wrapping_sub(3));
    check64("div.u64 %d0, %d1, %d2", |a, b| a.checked_div(b).unwrap_or(u64::MAX));
    check32("div.s32 %r0, %r1, %r2", |a, b| if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 });
    check32("rem.u32 %r0, %r1, %r2", |a, b| a.checked_rem(b).unwrap_or(u32::MAX));
    check32("rem.s32 %r0, %r1, %r2", |a, b| if b == 0 { u32::MAX } else { (a as i32).wrapping_rem(b as i32) as u32 });
    check32("min.s32 %r0, %r1, %r2", |a, b| (a as i32).min(b as i32) as u32);
    check64("min.u64 %d0, %d1, %d2", u64::min);
    check64("max.s64 %d0, %d1, %d2", |a, b| (a as i64).max(b as i64) as u64);
    check32("neg.s32 %r0, %r1", |a, _| a.wrapping_neg());
    check32("abs.s32 %r0, %r1", |a, _| (a as i32).unsigned_abs());
}

#[test]
fn bits() {
    check64("and.b64 %d0, %d1, %d2", |a, b| a & b);
    check32("or.b32 %r0, %r1, %r2", |a, b| a | b);
    check64("xor.b64 %d0, %d1, %d2", |a, b| a ^ b);
    check32("not.b32 %r0, %r1", |a, _| !a);
    check64("shl.b64 %d0, %d1, %r2", |a, b| a.checked_shl(b as u32).unwrap_or(0));
    check64("shr.u64 %d0, %d1, %r2", |a, b| a.checked_shr(b as u32).unwrap_or(0));
    check32("shr.s32 %r0, %r1, %r2", |a, b| ((a as i32) >> b.min(31)) as u32);
    check64("shr.s64 %d0, %d1, %r2", |a, b| ((a as i64) >> (b as u32).min(63)) as u64);
    check32("shf.l.wrap.b32 %r0, %r1, %r2, 9", |a, b| b << 9 | a >> 23);
    check32("shf.r.wrap.b32 %r0, %r1, %r2, 41", |a, b| a >> 9 | b << 23);
    check32("shf.l.clamp.b32 %r0, %r1, %r2, 40", |a, _| a);
    check32("popc.b32 %r0, %r1", |a, _| a.count_ones());
    check32("clz.b32 %r0, %r1", |a, _| a.leading_zeros());
    check32("clz.b64 %r0, %d3", |_, _| 64);
    check32("brev.b32 %r0, %r1", |a, _| a.reverse_bits());
    check32("bfe.u32 %r0, %r1, 5, 9", |a, _| a >> 5 & 0x1ff);
    check32("bfe.s32 %r0, %r1, 4, 8", |a, _| ((a << 20) as i32 >> 24) as u32);
    check32("bfe.s32 %r0, %r1, 28, 8", |a, _| (a as i32 >> 28) as u32);
    check32("bfe.u32 %r0, %r1, 3, 0", |_, _| 0);
    check32("bfi.b32 %r0, %r1, %r2, 8, 12", |a, b| (b & !0xf_ff00) | (a & 0xfff) << 8);
    check32("bfi.b32 %r0, %r1, %r2, 28, 12", |a, b| (b & 0x0fff_ffff) | a << 28);
    check32("prmt.b32 %r0, %r1, %r2, 30292", |a, b| {
        // 0x7654: the bytes of b.
        let _ = a;
        b
    });
    check32("prmt.b32 %r0, %r1, %r2, 291", |a, _| a.swap_bytes());
    check32("prmt.b32 %r0, %r1, %r2, 48051", |a, _| if a >> 31 == 1 { 0xffff_ff00 } else { 0 } | a >> 24);
    check32("lop3.b32 %r0, %r1, %r2, %r3, 150", |a, b| a ^ b);
    check32("lop3.b32 %r0, %r1, %r2, 255, 202", |a, b| (a & b) | (!a & 255));
}

#[test]
fn moves_conversions_and_predicates() {
    check64("cvt.s64.s32 %d0, %r1", |a, _| i64::from(a as i32) as u64);
    check64("cvt.u64.u16 %d0, %h1", |a, _| a & 0xffff);
    check64("cvt.s64.s8 %d0, %r1", |a, _| i64::from(a as i8) as u64);
    check32("cvt.u32.u8 %r0, %r1", |a, _| a & 0xff);
    check64("mov.b32 {%h3, %h4}, %r1; mov.b32 %r0, {%h4, %h3}; cvt.u64.u32 %d0, %r0", |a, _| {
        (a as u32).rotate_left(16).into()
    });
    check64("mov.b64 {%r4, %r5}, %d1; mov.b64 %d0, {%r5, %r4}", |a, _| a.rotate_left(32));
    check64("{ .reg .b16 tmp; mov.b32 {tmp, %h5}, %r1; } cvt.u64.u16 %d0, %h5", |a, _| a >> 16 & 0xffff);
    check64("mov.u32 %r0, %ntid.x; cvt.u64.u32 %d0, %r0", |_, _| 1);
    check64("ld.param.u32 %d0, [n]", |_, _| 7);
    check64("ld.param.u32 %r0, [out+4]; cvt.u64.u32 %d0, %r0", |_, _| 0);
    type Meaning = fn(u64, u64) -> bool;
    let comparisons: [(&str, Meaning); 9] = [
        ("eq.s64", |a, b| a == b),
        ("ne.b64", |a, b| a != b),
        ("lt.u64", |a, b| a < b),
        ("lt.s64", |a, b| (a as i64) < b as i64),
        ("le.u64", |a, b| a <= b),
        ("gt.s64", |a, b| a as i64 > b as i64),
        ("ge.u64", |a, b| a >= b),
        ("hi.u64", |a, b| a > b),
        ("ls.u64", |a, b| a <= b),
    ];
    for (name, meaning) in comparisons {
        check64(&format!("setp.{name} %p1, %d1, %d2; selp.u64 %d0, 1, 0, %p1"), |a, b| meaning(a, b).into());
        check64(&format!("setp.{name} %p1, %d1, %d2; @!%p1 mov.u64 %d0, 9"), |a, b| if meaning(a, b) { 0 } else { 9 });
    }
    check64(
        "setp.eq.u32 %p1, %r1, 1; setp.eq.u32 %p2, %r2, 1; and.pred %p3, %p1, %p2; not.pred %p4, %p3; selp.b64 %d0, 3, 4, %p4",
        |a, b| {
            if a as u32 == 1 && b as u32 == 1 { 4 } else { 3 }
        },
    );
}

#[test]
fn floats_round_once_and_have_one_nan() {
    for (a, b) in [(1.5f32, 3.25f32), (1e-30, 1e-12), (3e38, 2.0), (-0.0, 5.0), (16_777_216.0, 1.0)] {
        for (name, wanted) in [("add", a + b), ("sub", a - b), ("mul", a * b)] {
            let text = format!(
                "mov.b32 %f1, %r1; mov.b32 %f2, %r2; {name}.rn.f32 %f3, %f1, %f2; mov.b32 %r0, %f3; cvt.u64.u32 %d0, %r0"
            );
            assert_eq!(
                result_of(&text, a.to_bits().into(), b.to_bits().into(), 0),
                wanted.to_bits().into(),
                "{name} {a} {b}"
            );
        }
    }
    let text = "mov.b32 %f1, %r1; mul.rn.f32 %f3, %f1, 0f3F800000; mov.b32 %r0, %f3; cvt.u64.u32 %d0, %r0";
    assert_eq!(result_of(text, 0xffc1_2345, 0, 0), 0x7fff_ffff, "a GPU forgets sign and payload");
    let text = "mov.b32 %f1, %r1; cvt.f64.f32 %d3, %f1; mul.rn.f64 %d0, %d3, %d2";
    for (a, b) in [(1.5f32, 0.1f64), (1e-45, 1e-300), (3e38, -1e300), (-0.0, 5.0)] {
        let wanted = (f64::from(a) * b).to_bits();
        assert_eq!(result_of(text, a.to_bits().into(), b.to_bits(), 0), wanted, "{a} times {b}");
    }
    assert_eq!(result_of(text, 0xffc1_2345, 1.0f64.to_bits(), 0), 0x7fff_ffff_ffff_ffff, "nor of F64");
}

#[test]
fn vectors_atomics_and_what_was_touched() {
    let mut words = Words((0..64).collect());
    let body =
        "ld.param.u64 %d9, [out]; ld.global.nc.v2.u64 {%d1, %d2}, [%d9+16]; st.global.v2.u64 [%d9+32], {%d2, %d1};
        ld.global.v4.u8 {%h0, %h1, %h2, %h3}, [%d9+8]; st.global.u8 [%d9+100], %h0; st.u16 [%d9+102], 513;
        atom.global.add.u64 %d3, [%d9+48], 5; red.global.add.u32 [%d9+56], 1; st.global.u64 [%d9], %d3; ret;";
    let touched = launch_body(body, &mut words, 1, Order::Forward).unwrap();
    assert_eq!((words.0[0], words.0[4], words.0[5], words.0[6], words.0[7]), (6, 3, 2, 11, 8));
    assert_eq!(words.0[12], 12 & 0xff | 1 << 32 | 513 << 48);
    let reads = vec![BASE + 8..BASE + 12, BASE + 16..BASE + 32, BASE + 48..BASE + 60];
    let writes = vec![BASE..BASE + 8, BASE + 32..BASE + 60, BASE + 100..BASE + 101, BASE + 102..BASE + 104];
    assert_eq!(touched, Touched { reads, writes });
}

/// The words after every thread has stored `%d0` at its own place.
fn per_thread(body: &str, threads: u32, order: Order) -> Result<Vec<u64>, String> {
    let mut words = Words(vec![0; threads as usize]);
    let body = format!(
        "mov.u32 %r9, %tid.x; ld.param.u64 %d9, [out]; mul.wide.u32 %d8, %r9, 8; add.s64 %d9, %d9, %d8; {body}
         cvt.u64.u32 %d0, %r0; st.global.u64 [%d9], %d0; ret;"
    );
    launch_body(&body, &mut words, threads, order).map_err(|trap| trap.message)?;
    Ok(words.0)
}

#[test]
fn shuffles() {
    let lane = |from: &dyn Fn(u64) -> u64| {
        (0..64).map(|thread| thread / 32 * 32 + from(thread % 32) + 100).collect::<Vec<u64>>()
    };
    for order in Order::BOTH {
        let shuffled = |text: &str| {
            let text = format!("add.u32 %r1, %r9, 100; shfl.sync.{text}, -1; @!%p1 add.u32 %r0, %r0, 0;");
            per_thread(&text, 64, order).unwrap()
        };
        assert_eq!(shuffled("down.b32 %r0|%p1, %r1, 4, 31"), lane(&|lane| if lane + 4 < 32 { lane + 4 } else { lane }));
        assert_eq!(shuffled("up.b32 %r0|%p1, %r1, 4, 0"), lane(&|lane| if lane >= 4 { lane - 4 } else { lane }));
        assert_eq!(shuffled("bfly.b32 %r0|%p1, %r1, 1, 31"), lane(&|lane| lane ^ 1));
        assert_eq!(shuffled("idx.b32 %r0|%p1, %r1, 3, 31"), lane(&|_| 3));
        // Halves of a warp: clamp 15 of segment mask 16.
        assert_eq!(
            shuffled("down.b32 %r0|%p1, %r1, 8, 4111"),
            lane(&|lane| if lane % 16 < 8 { lane + 8 } else { lane })
        );
    }
}

const EXCHANGE: &str = ".shared .align 4 .b8 tile[256]; mov.u32 %r4, tile; shl.b32 %r5, %r9, 2; add.u32 %r6, %r4, %r5;
    st.shared.u32 [%r6], %r9; BARRIER xor.b32 %r5, %r5, 252; add.u32 %r6, %r4, %r5; ld.shared.u32 %r0, [%r6];";

#[test]
fn barriers_and_what_happens_without() {
    let reversed: Vec<u64> = (0..64).rev().collect();
    for order in Order::BOTH {
        assert_eq!(per_thread(&EXCHANGE.replace("BARRIER", "bar.sync 0;"), 64, order).unwrap(), reversed);
        let racing = per_thread(&EXCHANGE.replace("BARRIER", ""), 64, order).unwrap();
        assert!(racing.contains(&0xefef_efef), "unwritten shared memory is garbage: {racing:x?}");
    }
}

#[test]
fn threads_that_wait_for_each_other_for_ever_are_named() {
    let trap = |body: &str| per_thread(body, 64, Order::Forward).unwrap_err();
    let divergent = trap("setp.lt.u32 %p1, %r9, 32; @%p1 bra A; bar.sync 0; bra B; A: bar.sync 0; B: mov.u32 %r0, 1;");
    assert!(divergent.contains("thread (0, 0, 0)") && divergent.contains("thread 32 waits elsewhere"), "{divergent}");
    let partial =
        trap("setp.lt.u32 %p1, %r9, 8; @%p1 bra A; shfl.sync.idx.b32 %r0, %r9, 0, 31, -1; A: mov.u32 %r0, 1;");
    assert!(partial.contains("a shuffle with thread 0, which has ended"), "{partial}");
    let outside = trap("shfl.sync.idx.b32 %r0, %r9, 0, 31, 1;");
    assert!(outside.contains("not in its own mask"), "{outside}");
}

#[test]
fn faults_trap_and_say_where() {
    let trap = |body: &str| {
        let body = format!("ld.param.u64 %d9, [out]; {body} ret;");
        launch_body(&body, &mut Words(vec![0; 4]), 2, Order::Reverse).unwrap_err()
    };
    let past = trap("st.global.u64 [%d9+32], 1;");
    assert_eq!(past.address, Some(BASE + 32));
    for part in
        ["kernel k, block (0, 0, 0), thread (1, 0, 0), PTX line 5 `st.global.u64 [%d9+32], 1`", "no live allocation"]
    {
        assert!(past.message.contains(part), "{}", past.message);
    }
    assert!(trap("ld.global.v2.u64 {%d1, %d2}, [%d9+24];").message.contains("misaligned access to 16 bytes"));
    assert!(trap("ld.global.u32 %r1, [%d9+2];").message.contains("misaligned"));
    assert!(trap("ld.global.u64 %d1, [%d5];").message.contains("0xdeadbeefdeadbeef"), "registers begin as garbage");
    assert!(trap("ld.shared.u32 %r1, [%d9];").message.contains("shared memory, which has 0"));
    assert!(trap("A: bra A;").message.contains("endless loop"));
}

#[test]
fn launches_that_no_driver_takes() {
    let module = Module::parse(
        ".version 7.1 .target sm_75\n.address_size 64 // a comment\n .entry k(.param .align 8 .b8 p[12], .param .u8 q, .param .u64 r)
         .maxntid 64, 2, 1 { /* nothing
         at all */ }",
    )
    .unwrap();
    let kernel = &module.kernels()[module.kernel("k").unwrap()];
    assert_eq!((module.isa(), module.kernel("l")), ((7, 1), None));
    let places: Vec<(usize, usize)> = kernel.parameters.iter().map(|place| (place.offset, place.bytes)).collect();
    assert_eq!((places, kernel.parameter_bytes), (vec![(0, 12), (12, 1), (16, 8)], 24));
    let run = |bytes: usize, block: u32, grid: u32| {
        let (parameters, grid, block) = (&vec![0; bytes][..], [grid, 1, 1], [block, 1, 1]);
        let launch = Launch { parameters, grid, block, shared_bytes: 0, order: Order::Forward };
        super::run(kernel, &launch, &mut Words(vec![])).map_err(|trap| trap.message)
    };
    assert_eq!(run(24, 128, 1), Ok(Touched::default()));
    assert!(run(23, 128, 1).unwrap_err().contains("23 bytes of parameters, 24 are needed"));
    assert!(run(24, 129, 1).unwrap_err().contains("at most 128"));
    assert!(run(24, 0, 1).is_err() && run(24, 1, 0).is_err());
}

#[test]
fn what_is_not_known_is_refused_with_its_line() {
    for statement in [
        "mul.f32 %f1, %f1, %f2",
        "mul.rn.ftz.f32 %f1, %f1, %f2",
        "fma.rn.f32 %f1, %f1, %f1, %f2",
        "add.rn.f64 %d1, %d1, %d2",
        "mul.f64 %d1, %d1, %d2",
        "cvt.rn.f32.f64 %f1, %d1",
        "cvt.rn.f32.u32 %f1, %r1",
        "cvt.sat.u8.u32 %r1, %r1",
        "add.cc.u32 %r1, %r1, %r2",
        "setp.lt.and.u32 %p1, %r1, %r2, %p2",
        "atom.global.max.u32 %r1, [%d1], %r2",
        "atom.shared.add.u32 %r1, [%d1], %r2",
        "ld.const.u32 %r1, [%d1]",
        "ld.global.v3.u32 {%r1, %r2, %r3}, [%d1]",
        "ld.global.v4.u64 {%d1, %d2, %d3, %d4}, [%d5]",
        "ld.param.u64 %d1, [n]",
        "ld.param.u64 %d1, [nobody]",
        "bar.sync 1",
        "bar.sync 0, 64",
        "bra.uni NOWHERE",
        "call f",
        "cvta.to.shared.u64 %d1, %d2",
        "vote.sync.all.pred %p1, %p2, -1",
        "mov.u32 %r99, 1",
        "mov.u32 %r1, %clock",
        "add.u32 %r1, %r2",
        ".local .b8 depot[8]",
    ] {
        let error = module(&format!("\n\n{statement}; ret;")).unwrap_err();
        assert!(error.contains("PTX line 7"), "{statement}: {error}");
        assert!(error.contains(statement.split('.').next().unwrap()), "{error}");
    }
    for text in [
        "",
        ".version 8.0",
        ".version 8.0 .global .u32 x;",
        ".version 8.0 .address_size 32",
        ".version 8.0 .entry k() {",
    ] {
        assert!(Module::parse(text).is_err(), "{text:?}");
    }
}
