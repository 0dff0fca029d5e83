//! One thread, from where it stands to where it ends or has to wait. Knows no other thread.

use super::Kernel;
use super::instruction::{Address, Binary, Comparison, FloatBinary, Operation, Space, Type, Unary, mask};
use super::memory::Global;

/// Taken branches after which a thread is taken to be in an endless loop.
pub(super) const BRANCH_LIMIT: u32 = 100_000_000;

/// What went wrong at an instruction.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) address: Option<u64>,
    pub(super) message: String,
}

impl Fault {
    pub(super) fn new(message: impl Into<String>) -> Fault {
        Fault { address: None, message: message.into() }
    }
}

/// Why a thread does not go on. The counter stands behind a barrier, and at a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    End,
    Barrier,
    Shuffle,
}

/// What the threads of a block see together.
pub(super) struct Surroundings<'a, 'b> {
    pub(super) kernel: &'a Kernel,
    pub(super) parameters: &'a [u8],
    pub(super) shared: &'a mut [u8],
    pub(super) global: &'a mut Global<'b>,
}

/// Where a thread stands.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counter {
    pub(super) at: usize,
    pub(super) branches: u32,
}

/// Runs until the thread stops. After a fault the counter stands at the instruction that failed.
pub(super) fn advance(
    counter: &mut Counter,
    registers: &mut [u64],
    around: &mut Surroundings<'_, '_>,
) -> Result<Stop, Fault> {
    let kernel = around.kernel;
    loop {
        let instruction = &kernel.code[counter.at];
        if let Some((predicate, negated)) = instruction.guard
            && (registers[predicate as usize] & 1 == 1) == negated
        {
            counter.at += 1;
            continue;
        }
        match &instruction.operation {
            Operation::Branch { target } => {
                counter.branches += 1;
                if counter.branches > BRANCH_LIMIT {
                    return Err(Fault::new(format!("an endless loop: {BRANCH_LIMIT} branches taken")));
                }
                counter.at = *target as usize;
                continue;
            }
            Operation::Exit => return Ok(Stop::End),
            Operation::Shuffle(_) => return Ok(Stop::Shuffle),
            Operation::Barrier => {
                counter.at += 1;
                return Ok(Stop::Barrier);
            }
            Operation::Nothing => {}
            Operation::Parameter { .. }
            | Operation::Load { .. }
            | Operation::Store { .. }
            | Operation::AtomicAdd { .. } => {
                memory(&instruction.operation, registers, around)?;
            }
            operation => {
                let (d, value) = compute(operation, registers);
                registers[d as usize] = value;
            }
        }
        counter.at += 1;
    }
}

fn memory(operation: &Operation, registers: &mut [u64], around: &mut Surroundings<'_, '_>) -> Result<(), Fault> {
    match operation {
        Operation::Parameter { ty, target, offset } => {
            for (index, place) in target.as_slice().iter().enumerate() {
                let start = offset + index * ty.bytes();
                registers[*place as usize] = little_endian(&around.parameters[start..start + ty.bytes()], *ty);
            }
        }
        Operation::Load { space, ty, target, address } => {
            let places = target.as_slice();
            let mut bytes = [0; 16];
            let bytes = &mut bytes[..ty.bytes() * places.len()];
            fetch(*space, value_of(*address, registers), bytes, around)?;
            for (place, bytes) in places.iter().zip(bytes.chunks_exact(ty.bytes())) {
                registers[*place as usize] = little_endian(bytes, *ty);
            }
        }
        Operation::Store { space, ty, source, address } => {
            let places = source.as_slice();
            let mut bytes = [0; 16];
            let bytes = &mut bytes[..ty.bytes() * places.len()];
            for (place, bytes) in places.iter().zip(bytes.chunks_exact_mut(ty.bytes())) {
                bytes.copy_from_slice(&registers[*place as usize].to_le_bytes()[..ty.bytes()]);
            }
            put(*space, value_of(*address, registers), bytes, around)?;
        }
        Operation::AtomicAdd { ty, d, address, a } => {
            let value = registers[*a as usize] & ty.mask();
            let before = around.global.add(value_of(*address, registers), ty.bytes(), value)?;
            if let Some(d) = d {
                registers[*d as usize] = before;
            }
        }
        _ => {}
    }
    Ok(())
}

fn value_of(address: Address, registers: &[u64]) -> u64 {
    registers[address.base as usize].wrapping_add(address.offset)
}

/// A value as a register holds it: a signed one is extended to all 64 bits, as `ld.s8` into a wider register does.
fn little_endian(bytes: &[u8], ty: Type) -> u64 {
    let mut padded = [0; 8];
    padded[..bytes.len()].copy_from_slice(bytes);
    let value = u64::from_le_bytes(padded);
    if ty.is_signed() { sign_extend(value, ty.bits).cast_unsigned() } else { value }
}

fn fetch(space: Space, address: u64, bytes: &mut [u8], around: &mut Surroundings<'_, '_>) -> Result<(), Fault> {
    if space == Space::Shared {
        let range = shared_range(address, bytes.len(), around.shared.len())?;
        bytes.copy_from_slice(&around.shared[range]);
        return Ok(());
    }
    match bytes.len() {
        1 => bytes.copy_from_slice(&around.global.read::<1>(address)?),
        2 => bytes.copy_from_slice(&around.global.read::<2>(address)?),
        4 => bytes.copy_from_slice(&around.global.read::<4>(address)?),
        8 => bytes.copy_from_slice(&around.global.read::<8>(address)?),
        _ => bytes.copy_from_slice(&around.global.read::<16>(address)?),
    }
    Ok(())
}

fn put(space: Space, address: u64, bytes: &[u8], around: &mut Surroundings<'_, '_>) -> Result<(), Fault> {
    if space == Space::Shared {
        let range = shared_range(address, bytes.len(), around.shared.len())?;
        around.shared[range].copy_from_slice(bytes);
        return Ok(());
    }
    let mut padded = [0; 16];
    padded[..bytes.len()].copy_from_slice(bytes);
    let value = u128::from_le_bytes(padded);
    match bytes.len() {
        1 => around.global.write(address, (value as u8).to_le_bytes()),
        2 => around.global.write(address, (value as u16).to_le_bytes()),
        4 => around.global.write(address, (value as u32).to_le_bytes()),
        8 => around.global.write(address, (value as u64).to_le_bytes()),
        _ => around.global.write(address, padded),
    }
}

fn shared_range(address: u64, bytes: usize, len: usize) -> Result<std::ops::Range<usize>, Fault> {
    // Addresses in shared memory have 32 bits.
    let start = (address & mask(32)) as usize;
    if !start.is_multiple_of(bytes) {
        return Err(Fault::new(format!("a misaligned access to {bytes} bytes at {start} of shared memory")));
    }
    if start + bytes > len {
        return Err(Fault::new(format!("an access to {bytes} bytes at {start} of shared memory, which has {len}")));
    }
    Ok(start..start + bytes)
}

fn sign_extend(value: u64, bits: u32) -> i64 {
    (value << (64 - bits)).cast_signed() >> (64 - bits)
}

/// The result of an operation on registers, and its place. [`Operation::Split`] writes the others itself.
fn compute(operation: &Operation, registers: &mut [u64]) -> (u32, u64) {
    let get = |place: u32, bits: u32| registers[place as usize] & mask(bits);
    match *operation {
        Operation::Move { ty, d, a } => (d, get(a, ty.bits)),
        Operation::Binary { what, ty, d, a, b } => {
            // The distance of a shift has 32 bits, whatever the type.
            let shifts = matches!(what, Binary::ShiftLeft | Binary::ShiftRight);
            (d, binary(what, ty, get(a, ty.bits), get(b, if shifts { 32 } else { ty.bits })) & ty.mask())
        }
        Operation::Compare { what, ty, d, a, b } => (d, u64::from(compare(what, ty, get(a, ty.bits), get(b, ty.bits)))),
        Operation::Convert { to, from, d, a } => {
            let value = get(a, from.bits);
            let value = if from.is_signed() { sign_extend(value, from.bits).cast_unsigned() } else { value };
            (d, value & to.mask())
        }
        Operation::Select { ty, d, a, b, predicate } => (d, get(if get(predicate, 1) == 1 { a } else { b }, ty.bits)),
        Operation::MultiplyWide { ty, d, a, b, c } => {
            let c = c.map_or(0, |c| get(c, 2 * ty.bits));
            let (a, b) = (get(a, ty.bits), get(b, ty.bits));
            let product = if ty.is_signed() {
                sign_extend(a, ty.bits).wrapping_mul(sign_extend(b, ty.bits)).cast_unsigned()
            } else {
                a * b
            };
            (d, product.wrapping_add(c) & mask(2 * ty.bits))
        }
        Operation::MultiplyAdd { ty, d, a, b, c } => {
            (d, get(a, ty.bits).wrapping_mul(get(b, ty.bits)).wrapping_add(get(c, ty.bits)) & ty.mask())
        }
        Operation::Float { bits: 64, d, a, b, .. } => (d, product(get(a, 64), get(b, 64))),
        Operation::Float { what, d, a, b, .. } => (d, float(what, get(a, 32), get(b, 32))),
        Operation::Widen { d, a } => (d, widened(get(a, 32))),
        Operation::Unary { what, ty, d, a } => (d, unary(what, ty, get(a, ty.bits))),
        Operation::Split { ty, parts, a } => {
            let (value, bits) = (get(a, ty.bits), ty.bits / parts.as_slice().len() as u32);
            for (index, part) in (0..).zip(&parts.as_slice()[1..]) {
                registers[*part as usize] = value >> (bits * (index + 1)) & mask(bits);
            }
            (parts.as_slice()[0], value & mask(bits))
        }
        Operation::Join { ty, d, parts } => {
            let bits = ty.bits / parts.as_slice().len() as u32;
            let joined =
                (0..).zip(parts.as_slice()).fold(0, |all, (index, part)| all | get(*part, bits) << (bits * index));
            (d, joined)
        }
        Operation::FunnelShift { left, clamp, d, a, b, c } => {
            let value = get(b, 32) << 32 | get(a, 32);
            let distance = if clamp { get(c, 32).min(32) } else { get(c, 32) % 32 };
            (d, if left { value << distance >> 32 } else { value >> distance } & mask(32))
        }
        Operation::ExtractBits { ty, d, a, position, len } => {
            (d, extract(ty, get(a, ty.bits), get(position, 8) as u32, get(len, 8) as u32))
        }
        Operation::InsertBits { ty, d, a, b, position, len } => {
            let (position, len) = (get(position, 8) as u32, get(len, 8) as u32);
            let field = field(ty, position, len);
            let inserted = get(a, ty.bits).checked_shl(position).unwrap_or(0);
            (d, get(b, ty.bits) & !field | inserted & field)
        }
        Operation::Permute { d, a, b, selector } => (d, permute(get(b, 32) << 32 | get(a, 32), get(selector, 16))),
        Operation::Logic3 { d, a, b, c, table } => (d, logic3(get(a, 32), get(b, 32), get(c, 32), get(table, 8))),
        // The others do not come here.
        _ => (0, registers[0]),
    }
}

fn binary(what: Binary, ty: Type, a: u64, b: u64) -> u64 {
    let signed = |value: u64| sign_extend(value, ty.bits);
    match what {
        Binary::Add => a.wrapping_add(b),
        Binary::Subtract => a.wrapping_sub(b),
        Binary::Multiply => a.wrapping_mul(b),
        Binary::MultiplyHigh if ty.is_signed() => ((i128::from(signed(a)) * i128::from(signed(b))) >> ty.bits) as u64,
        Binary::MultiplyHigh => ((u128::from(a) * u128::from(b)) >> ty.bits) as u64,
        // A division by zero gives no particular value on a GPU, and no trap.
        Binary::Divide | Binary::Remainder if b == 0 => u64::MAX,
        Binary::Divide if ty.is_signed() => signed(a).wrapping_div(signed(b)).cast_unsigned(),
        Binary::Divide => a / b,
        Binary::Remainder if ty.is_signed() => signed(a).wrapping_rem(signed(b)).cast_unsigned(),
        Binary::Remainder => a % b,
        Binary::Minimum if ty.is_signed() => signed(a).min(signed(b)).cast_unsigned(),
        Binary::Minimum => a.min(b),
        Binary::Maximum if ty.is_signed() => signed(a).max(signed(b)).cast_unsigned(),
        Binary::Maximum => a.max(b),
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::ShiftLeft if b >= u64::from(ty.bits) => 0,
        Binary::ShiftLeft => a << b,
        Binary::ShiftRight if ty.is_signed() => (signed(a) >> b.min(63)).cast_unsigned(),
        Binary::ShiftRight if b >= u64::from(ty.bits) => 0,
        Binary::ShiftRight => a >> b,
    }
}

fn compare(what: Comparison, ty: Type, a: u64, b: u64) -> bool {
    let order = if ty.is_signed() { sign_extend(a, ty.bits).cmp(&sign_extend(b, ty.bits)) } else { a.cmp(&b) };
    match what {
        Comparison::Equal => order.is_eq(),
        Comparison::NotEqual => order.is_ne(),
        Comparison::Less => order.is_lt(),
        Comparison::LessOrEqual => order.is_le(),
        Comparison::Greater => order.is_gt(),
        Comparison::GreaterOrEqual => order.is_ge(),
    }
}

/// A GPU keeps nothing of a NaN: every NaN result of F32 arithmetic is this one.
const GPU_NAN: u64 = 0x7fff_ffff;

fn float(what: FloatBinary, a: u64, b: u64) -> u64 {
    let (a, b) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
    let result = match what {
        FloatBinary::Add => a + b,
        FloatBinary::Subtract => a - b,
        FloatBinary::Multiply => a * b,
    };
    if result.is_nan() { GPU_NAN } else { u64::from(result.to_bits()) }
}

/// The NaN of F64.
const GPU_NAN_64: u64 = 0x7fff_ffff_ffff_ffff;

fn product(a: u64, b: u64) -> u64 {
    let result = f64::from_bits(a) * f64::from_bits(b);
    if result.is_nan() { GPU_NAN_64 } else { result.to_bits() }
}

fn widened(a: u64) -> u64 {
    let result = f64::from(f32::from_bits(a as u32));
    if result.is_nan() { GPU_NAN_64 } else { result.to_bits() }
}

fn unary(what: Unary, ty: Type, a: u64) -> u64 {
    let unused = 64 - ty.bits;
    match what {
        Unary::Not => !a & ty.mask(),
        Unary::Negate => a.wrapping_neg() & ty.mask(),
        Unary::Absolute => sign_extend(a, ty.bits).unsigned_abs() & ty.mask(),
        Unary::CountOnes => u64::from(a.count_ones()),
        Unary::CountLeadingZeros => u64::from(a.leading_zeros() - unused),
        Unary::ReverseBits => a.reverse_bits() >> unused,
    }
}

/// The bits of a field that lie within the type.
fn field(ty: Type, position: u32, len: u32) -> u64 {
    let ones = if len == 0 { 0 } else { mask(len.min(ty.bits)) };
    ones.checked_shl(position).unwrap_or(0) & ty.mask()
}

fn extract(ty: Type, a: u64, position: u32, len: u32) -> u64 {
    let bits = a.checked_shr(position).unwrap_or(0) & field(ty, 0, len);
    if !ty.is_signed() || len == 0 {
        return bits;
    }
    // The sign is the field's highest bit, or the value's where the field reaches over it.
    let highest = (position + len - 1).min(ty.bits - 1);
    let negative = a >> highest & 1 == 1;
    let kept = field(ty, 0, (highest + 1).saturating_sub(position));
    if negative { (bits & kept | !kept) & ty.mask() } else { bits & kept }
}

fn permute(bytes: u64, selector: u64) -> u64 {
    (0..4).fold(0, |all, index| {
        let choice = selector >> (4 * index) & 15;
        let byte = bytes >> (8 * (choice & 7)) & 0xff;
        let byte = if choice & 8 == 0 { byte } else { 0xff * (byte >> 7) };
        all | byte << (8 * index)
    })
}

fn logic3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let either = |value: u64, wanted: u64| if wanted != 0 { value } else { !value };
    let minterm = |index: u64| either(a, index & 4) & either(b, index & 2) & either(c, index & 1);
    (0..8).filter(|index| table >> index & 1 == 1).fold(0, |all, index| all | minterm(index)) & mask(32)
}
