//! The faces of conversion: what is refused, what is copied, scales at their edges. That every value rounds rightly is shown in
//! `tests/kernels.rs`, where the kernels and independent arithmetic are compared with it.

use super::*;

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn formats_are_those_of_their_element_types() {
    for float in Float::ALL {
        assert_eq!(Float::of(&float.dtype()), Some(float));
        assert_eq!(float.dtype().bits(), Some(float.bytes() * 8));
        assert_eq!(float.name(), float.dtype().name().to_lowercase());
    }
    assert_eq!(Float::of(&Dtype::F4), None);
    assert_eq!(Float::of(&Dtype::F8_E8M0), None, "an exponent is a scale, not a value");
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
    let scales = Scales { values: &[2.0], first: 0, columns: 2, block_rows: 1, block_columns: 2 };
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
        Scales { values: &[], ..scales },
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
    let scales = Scales { values: &values, first: 0, columns: 5, block_rows: 2, block_columns: 2 };
    let all = [1.0, 1.0, 2.0, 2.0, 3.0, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0];
    for first in 0..all.len() {
        let wanted = &all[first..];
        let mut target = vec![0; wanted.len() * 4];
        let scales = Scales { first: first as u64, ..scales };
        convert(&bytes(&vec![1.0; wanted.len()]), Float::F32, &mut target, Float::F32, Some(scales)).unwrap();
        assert_eq!(floats(&target), wanted, "from {first} on");
    }
    // One scale for all, given as one block however large.
    let scales = Scales { values: &[0.5], first: 0, columns: 15, block_rows: u64::MAX, block_columns: u64::MAX };
    let mut target = vec![0; 60];
    convert(&bytes(&all), Float::F32, &mut target, Float::F32, Some(scales)).unwrap();
    assert_eq!(floats(&target), all.map(|value| value / 2.0));
}

#[test]
fn chunks_join_and_misaligned_slices_are_taken() {
    const { assert!(3077 > 3 * CHUNK) };
    let values: Vec<f32> = (0..3077).map(|at: u16| f32::from(at) * 1.37 - 900.0).collect();
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
fn scale_tensors_decode_to_single_precision() {
    assert_eq!(decode_f32(&bytes(&[1.5, -2.0]), &Dtype::F32), Some(vec![1.5, -2.0]));
    assert_eq!(decode_f32(&[0, 0x3c, 0, 0xc0], &Dtype::F16), Some(vec![1.0, -2.0]));
    assert_eq!(decode_f32(&[0x80, 0x3f], &Dtype::BF16), Some(vec![1.0]));
    assert_eq!(decode_f32(&0.1f64.to_le_bytes(), &Dtype::F64), Some(vec![0.1f32]));
    let exponents = decode_f32(&[127, 128, 0, 254, 255], &Dtype::F8_E8M0).unwrap();
    assert_eq!(exponents[..4], [1.0, 2.0, 2f32.powi(-127), 2f32.powi(127)]);
    assert!(exponents[4].is_nan());
    assert_eq!(decode_f32(&[1, 2, 3], &Dtype::F16), None);
    assert_eq!(decode_f32(&[1], &Dtype::F8_E4M3), None);
    assert_eq!(decode_f32(&[0; 4], &Dtype::I32), None);
    assert_eq!(decode_f32(&[], &Dtype::F32), Some(vec![]));
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
