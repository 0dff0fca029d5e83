//! The faces of conversion: what is refused, what is copied, scales at their edges; and that vectors make no difference. That every
//! value rounds rightly is shown in `tests/kernels.rs`, where the kernels and independent arithmetic are compared with it.

use super::loops::CHUNK;
use super::*;
use crate::dtype::Dtype;

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn formats_are_those_of_their_element_types() {
    for float in Float::ALL {
        assert_eq!(Float::of(float.dtype()), Some(float));
        assert_eq!(float.dtype().bits(), float.bytes() * 8);
        assert_eq!(float.name(), float.dtype().name().to_lowercase());
    }
    assert_eq!(Float::of(Dtype::F4), None);
    assert_eq!(Float::of(Dtype::F8_E8M0), None, "an exponent is a scale, not a value");
    assert_eq!(Float::ALL.into_iter().filter(|float| float.is_target()).count(), 3);
}

#[test]
fn equal_formats_are_copied_bit_by_bit() {
    let source = [1, 0x7c, 255, 255, 0, 0x7d];
    for float in [Float::F16, Float::F8E4M3, Float::F8E5M2Fnuz] {
        let mut target = [0; 6];
        assert_eq!(convert(&source, float, &mut target, float, None), Ok(0));
        assert_eq!(target, source, "signalling NaNs too");
    }
}

#[test]
fn what_cannot_be_done_is_refused_and_nothing_is_written() {
    let mut target = [7; 8];
    let scales = Scales { values: (&[2.0]).into(), first: 0, columns: 2, block_rows: 1, block_columns: 2 };
    let unsupported = |from, to, scaled| Err(ConvertError::Unsupported { from, to, scaled });
    assert_eq!(convert(&[0; 8], Float::F32, &mut target, Float::F64, None), unsupported(Float::F32, Float::F64, false));
    assert_eq!(
        convert(&[0; 8], Float::F16, &mut target, Float::F8E4M3, None),
        unsupported(Float::F16, Float::F8E4M3, false)
    );
    let error = convert(&[0; 16], Float::F64, &mut target, Float::F32, Some(scales)).unwrap_err();
    assert_eq!(error.to_string(), "no conversion from F64 to F32 with scales");
    for source in [&[0; 7][..], &[0; 9], &[0; 3], &[0; 10]] {
        let error = convert(source, Float::F16, &mut target, Float::F32, None).unwrap_err();
        assert!(matches!(error, ConvertError::Lengths { source_element: 2, target_bytes: 8, .. }), "{error}");
    }
    let wrong =
        |scales: Scales<'_>, target: &mut [u8]| convert(&[0; 2], Float::F8E4M3, target, Float::F32, Some(scales));
    for scales in [
        Scales { values: (&[]).into(), ..scales },
        Scales { first: 1, ..scales },
        Scales { first: u64::MAX, ..scales },
        Scales { columns: 0, ..scales },
        Scales { block_rows: 0, ..scales },
        Scales { block_columns: 0, ..scales },
        Scales { block_columns: 1, ..scales },
    ] {
        assert!(matches!(wrong(scales, &mut target), Err(ConvertError::Scales { .. })), "{scales:?}");
    }
    let error = wrong(Scales { first: 2, ..scales }, &mut target).unwrap_err();
    assert_eq!(error.to_string(), "the elements need 2 block scales, and there are 1");
    assert_eq!(target, [7; 8]);
    assert_eq!(wrong(scales, &mut target), Ok(0));
    assert_eq!(convert(&[], Float::F32, &mut [], Float::F16, None), Ok(0));
}

#[test]
fn scales_change_at_the_edges_of_blocks_and_rows() {
    // 3 x 5 in blocks of 2 x 2: scales 1 to 6.
    let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let scales = Scales { values: (&values).into(), first: 0, columns: 5, block_rows: 2, block_columns: 2 };
    let all = [1.0, 1.0, 2.0, 2.0, 3.0, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0];
    for first in 0..all.len() {
        let wanted = &all[first..];
        let mut target = vec![0; wanted.len() * 4];
        let scales = Scales { first: first as u64, ..scales };
        convert(&bytes(&vec![1.0; wanted.len()]), Float::F32, &mut target, Float::F32, Some(scales)).unwrap();
        assert_eq!(floats(&target), wanted, "from {first} on");
    }
    // One scale for all, given as one block however large.
    let scales =
        Scales { values: (&[0.5]).into(), first: 0, columns: 15, block_rows: u64::MAX, block_columns: u64::MAX };
    let mut target = vec![0; 60];
    convert(&bytes(&all), Float::F32, &mut target, Float::F32, Some(scales)).unwrap();
    assert_eq!(floats(&target), all.map(|value| value / 2.0));
}

#[test]
fn chunks_join_and_misaligned_slices_are_taken() {
    const { assert!(7001 > 3 * CHUNK) };
    let values: Vec<f32> = (0..7001).map(|at: u16| f32::from(at) * 1.37 - 900.0).collect();
    let source = [&[0], &bytes(&values)[..]].concat();
    let mut narrow = vec![0; 1 + values.len() * 2];
    for (to, back) in [(Float::F16, 1.0 / 1024.0), (Float::BF16, 1.0 / 128.0)] {
        assert_eq!(convert(&source[1..], Float::F32, &mut narrow[1..], to, None), Ok(0));
        let mut wide = vec![0; 1 + values.len() * 4];
        convert(&narrow[1..], to, &mut wide[1..], Float::F32, None).unwrap();
        for (value, found) in values.iter().zip(floats(&wide[1..])) {
            assert!((value - found).abs() <= value.abs() * back, "{value} became {found}");
        }
    }
}

#[test]
fn scale_tensors_decode_to_tables() {
    let single = |values: &[f32]| Some(Table::Single(values.into()));
    assert_eq!(Table::decode(&bytes(&[1.5, -2.0]), Dtype::F32), single(&[1.5, -2.0]));
    assert_eq!(Table::decode(&[0, 0x3c, 0, 0xc0], Dtype::F16), single(&[1.0, -2.0]));
    assert_eq!(Table::decode(&[0x80, 0x3f], Dtype::BF16), single(&[1.0]));
    assert_eq!(Table::decode(&0.1f64.to_le_bytes(), Dtype::F64), Some(Table::Wide([0.1].into())));
    for dtype in [Dtype::F8_E8M0, Dtype::U8] {
        let codes = [127, 128, 0, 254, 255].into();
        let table = Table::decode(&[127, 128, 0, 254, 255], dtype);
        assert_eq!(table, Some(Table::Coded { codes, meaning: Meaning::Exponents }));
    }
    let exponents = Meaning::Exponents.values();
    assert_eq!([127, 128, 0, 254].map(|code| exponents[code]), [1.0, 2.0, 2f64.powi(-127), 2f64.powi(127)]);
    assert!(exponents[255].is_nan() && exponents.len() == 256);
    assert_eq!(Table::decode(&[1, 2, 3], Dtype::F16), None);
    assert_eq!(Table::decode(&[1; 9], Dtype::F64), None);
    assert_eq!(Table::decode(&[1], Dtype::F8_E4M3), None);
    assert_eq!(Table::decode(&[0; 4], Dtype::I32), None);
    assert_eq!(Table::decode(&[], Dtype::F32), single(&[]));
}

#[test]
fn transposition_takes_any_element_and_refuses_wrong_sizes() {
    for bytes in [1usize, 2, 3, 4, 8, 16, 24] {
        let (rows, columns) = (37usize, 70usize);
        let source: Vec<u8> = (0..=250).cycle().take(rows * columns * bytes).collect();
        let mut target = vec![0; source.len()];
        transpose(&source, &mut target, rows as u64, columns as u64, bytes).unwrap();
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let element = |matrix: &[u8], index: usize| matrix[index * bytes..][..bytes].to_vec();
            assert_eq!(element(&target, column * rows + row), element(&source, row * columns + column));
        }
    }
    assert!(transpose(&[0; 12], &mut [0; 12], 2, 2, 4).is_err());
    assert!(transpose(&[0; 12], &mut [0; 8], 3, 1, 4).is_err());
    assert!(transpose(&[0; 12], &mut [0; 12], u64::MAX, u64::MAX, 4).is_err());
    assert_eq!(transpose(&[], &mut [], 0, 5, 4), Ok(()));
    assert_eq!(transpose(&[], &mut [], 5, 5, 0), Ok(()));
}

#[test]
fn pairs_become_two_numbers_each_with_one_scale() {
    let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let number = |bits: u8| numbers[usize::from(bits & 7)] * if bits & 8 == 0 { 1.0f32 } else { -1.0 };
    let source: Vec<u8> = (0..=255).cycle().take(5 * 700).collect();
    // 5 rows of 700 bytes in blocks of 8 bytes, the last ragged, from the 11th byte on.
    let codes: Vec<u8> = (20..220u8).cycle().take(5 * 88).collect();
    let scales = Scales { values: Values::Exponents(&codes), first: 11, columns: 700, block_rows: 1, block_columns: 8 };
    let mut target = vec![0; (source.len() - 11) * 8];
    assert_eq!(convert(&source[11..], Float::E2M1x2, &mut target, Float::F32, Some(scales)), Ok(0));
    let found = floats(&target);
    for (at, byte) in source.iter().enumerate().skip(11) {
        let scale = 2f32.powi(i32::from(codes[at / 700 * 88 + at % 700 / 8]) - 127);
        let wanted = [number(byte & 15) * scale, number(byte >> 4) * scale];
        assert_eq!(found[(at - 11) * 2..][..2], wanted, "byte {at}");
    }
    assert!(matches!(
        convert(&source, Float::E2M1x2, &mut vec![0; source.len() * 2], Float::BF16, None),
        Err(ConvertError::Lengths { .. })
    ));
}

#[test]
fn wide_scales_are_rounded_once() {
    // 1.125 (E4M3 0x39) times a number whose product lies just above the middle between two BF16 numbers.
    let scale = (1.0 + 2f64.powi(-8) + 2f64.powi(-40)) / 1.125;
    let values = Values::Wide(&[scale]);
    let scales = Scales { values, first: 0, columns: 1, block_rows: 1, block_columns: 1 };
    let mut target = [0; 2];
    convert(&[0x39], Float::F8E4M3, &mut target, Float::BF16, Some(scales)).unwrap();
    assert_eq!(u16::from_le_bytes(target), 0x3f81, "by way of F32 it would be the tie, and 0x3f80");
    // Beyond F32, and back within it.
    let scales = Scales { values: Values::Wide(&[1e300, f64::NAN, f64::INFINITY]), columns: 3, ..scales };
    let mut target = [0; 12];
    assert_eq!(convert(&[0x38; 3], Float::F8E4M3, &mut target, Float::F32, Some(scales)), Ok(1));
    assert_eq!(floats(&target)[0], f32::INFINITY);
    assert_eq!(floats(&target)[1].to_bits(), f32::NAN.to_bits());
}

/// Elements of a format: all of them where they are few, else every exponent with mantissas around the places where rounding to
/// other formats turns, and many that look random.
fn elements_of(format: Float) -> Vec<u8> {
    let random = (0..20_000u64).map(|at| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).map(|bits| bits ^ bits >> 31);
    let around = |exponents: u64, mantissa_bits: u32, kept: [u32; 3]| {
        let turns = kept.into_iter().flat_map(move |kept| {
            let half = 1u64 << (mantissa_bits - kept - 1);
            [half, 2 * half, 3 * half, (1 << mantissa_bits) - half].into_iter()
        });
        let turns: Vec<u64> = turns.flat_map(|turn| [turn - 1, turn, turn + 1]).chain([0]).collect();
        (0..2 * exponents).flat_map(move |upper| {
            turns.clone().into_iter().map(move |turn| (upper << mantissa_bits) + (turn & ((1 << mantissa_bits) - 1)))
        })
    };
    match format {
        Float::F64 => around(2048, 52, [7, 10, 23]).chain(random).flat_map(u64::to_le_bytes).collect(),
        Float::F32 => {
            let bits = around(256, 23, [3, 7, 10]).chain(random.map(|bits| bits >> 32));
            bits.flat_map(|bits| u32::try_from(bits).unwrap().to_le_bytes()).collect()
        }
        Float::F16 | Float::BF16 => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        _ => (0..=255).collect(),
    }
}

/// Every conversion that there is.
fn conversions() -> impl Iterator<Item = (Float, Float)> {
    let pairs = Float::ALL.into_iter().flat_map(|from| Float::ALL.map(|to| (from, to)));
    pairs.filter(|(from, to)| to.is_target() && from != to)
}

fn converted(source: &[u8], from: Float, to: Float, scales: Option<Scales<'_>>, vectors: Vectors) -> (Vec<u8>, u64) {
    let mut target = vec![0xa5; source.len() / from.width() * to.width()];
    let overflowed = by_chunks(source, from, &mut target, to, scales, vectors);
    (target, overflowed)
}

#[test]
fn every_value_becomes_the_same_in_vectors_of_every_width() {
    for (from, to) in conversions() {
        let source = elements_of(from);
        let usual = converted(&source, from, to, None, Vectors::Usual);
        assert!(converted(&source, from, to, None, Vectors::widest()) == usual, "{from:?} to {to:?}");
        for scale in [1.0, -0.37, 1e30, 1e-40, f32::MAX, f32::INFINITY, f32::NAN] {
            let (values, columns) = ([scale], u64::MAX);
            let wide = [f64::from(scale)];
            let wide = Scales { values: Values::Wide(&wide), first: 0, columns, block_rows: 1, block_columns: columns };
            if from != Float::F64 {
                let usual = converted(&source, from, to, Some(wide), Vectors::Usual);
                assert!(
                    converted(&source, from, to, Some(wide), Vectors::widest()) == usual,
                    "{from:?} to {to:?}, wide"
                );
            }
            let scales = Scales { values: (&values).into(), first: 0, columns, block_rows: 1, block_columns: columns };
            let scales = Some(scales);
            let usual = converted(&source, from, to, scales, Vectors::Usual);
            let widest = converted(&source, from, to, scales, Vectors::widest());
            assert!(widest == usual, "{from:?} to {to:?} times {scale}");
        }
    }
}

#[test]
fn any_number_of_elements_at_any_address_is_each_converted_as_if_alone() {
    let values: Vec<f32> = (0..80u16).map(|at| f32::from(at) * 0.11 - 3.0).collect();
    for (from, to) in conversions() {
        // What lies in the middle, where the exponents change.
        let all = elements_of(from);
        let source = &all[all.len() / 3..][..80 * from.width() + 7];
        for (len, offset) in (0..70).flat_map(|len| [0, 1, 7].map(|offset| (len, offset))) {
            let source = &source[offset..][..len * from.width()];
            let scales = Scales { values: (&values).into(), first: 3, columns: 80, block_rows: 1, block_columns: 1 };
            for scales in [None, Some(scales)] {
                let mut target = vec![0xa5; offset + len * to.width()];
                let overflowed = by_chunks(source, from, &mut target[offset..], to, scales, Vectors::widest());
                let alone = source.chunks(from.width()).enumerate().map(|(at, element)| {
                    let scales = scales.map(|scales| Scales { first: 3 + at as u64, ..scales });
                    converted(element, from, to, scales, Vectors::Usual)
                });
                let (elements, overflows): (Vec<_>, Vec<_>) = alone.unzip();
                assert_eq!(target[offset..], elements.concat(), "{from:?} to {to:?}, {len} from {offset} on");
                assert_eq!(overflowed, overflows.iter().sum::<u64>());
            }
        }
    }
}
