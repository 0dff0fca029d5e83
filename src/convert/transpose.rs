//! Transposition of a 2-D tensor in memory. Values stay as they are.

use super::float::ConvertError;

/// Edge of the square tiles that are turned one by one, in elements: both sides of a tile stay in the first-level cache.
const TILE: usize = 32;

/// Writes `target[column][row] = source[row][column]` for a row-major tensor of `rows` x `columns` elements of `element_bytes`
/// each. An error, with nothing written, if either slice does not hold exactly that many bytes.
pub fn transpose(
    source: &[u8],
    target: &mut [u8],
    rows: u64,
    columns: u64,
    element_bytes: usize,
) -> Result<(), ConvertError> {
    let (source_bytes, target_bytes) = (source.len(), target.len());
    let wrong = ConvertError::Lengths {
        source_bytes,
        source_element: element_bytes,
        target_bytes,
        target_element: element_bytes,
    };
    let size = |count: u64| usize::try_from(count).map_err(|_| wrong);
    let (rows, columns) = (size(rows)?, size(columns)?);
    let needed = rows.checked_mul(columns).and_then(|elements| elements.checked_mul(element_bytes));
    if needed != Some(source_bytes) || source_bytes != target_bytes {
        return Err(wrong);
    }
    if needed == Some(0) {
        return Ok(());
    }
    match element_bytes {
        1 => turn::<1>(source, target, rows, columns),
        2 => turn::<2>(source, target, rows, columns),
        4 => turn::<4>(source, target, rows, columns),
        8 => turn::<8>(source, target, rows, columns),
        16 => turn::<16>(source, target, rows, columns),
        _ => turn_any(source, target, rows, columns, element_bytes),
    }
    Ok(())
}

fn turn<const N: usize>(source: &[u8], target: &mut [u8], rows: usize, columns: usize) {
    let (source, target) = (source.as_chunks::<N>().0, target.as_chunks_mut::<N>().0);
    for top in (0..rows).step_by(TILE) {
        let bottom = (top + TILE).min(rows);
        for left in (0..columns).step_by(TILE) {
            for column in left..(left + TILE).min(columns) {
                let line = &mut target[column * rows + top..column * rows + bottom];
                for (element, row) in line.iter_mut().zip(top..) {
                    *element = source[row * columns + column];
                }
            }
        }
    }
}

fn turn_any(source: &[u8], target: &mut [u8], rows: usize, columns: usize, bytes: usize) {
    for (index, element) in target.chunks_exact_mut(bytes).enumerate() {
        let from = (index % rows * columns + index / rows) * bytes;
        element.copy_from_slice(&source[from..from + bytes]);
    }
}
