//! From the text of a statement to an instruction. It refuses what execution could not do exactly; modifiers that it does not know
//! are never passed over.

use super::instruction::{
    Binary, Comparison, FloatBinary, Instruction, Kind, Operation, Places, Shuffle, ShuffleMode, Space, Type, Unary,
};
use super::parse::Names;
use super::text::{members, operands};

/// The operation's name and what follows it after dots.
struct Mnemonic<'a> {
    name: &'a str,
    types: Vec<Type>,
    modifiers: Vec<&'a str>,
}

impl<'a> Mnemonic<'a> {
    fn new(text: &'a str) -> Mnemonic<'a> {
        let mut parts = text.split('.');
        let name = parts.next().unwrap_or_default();
        let (types, modifiers): (Vec<&str>, Vec<&str>) = parts.partition(|part| Type::parse(part).is_some());
        Mnemonic { name, types: types.into_iter().filter_map(Type::parse).collect(), modifiers }
    }

    /// Takes a modifier out, and says whether it was there.
    fn take(&mut self, modifier: &str) -> bool {
        let at = self.modifiers.iter().position(|found| *found == modifier);
        at.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// The first of `choices` that is there, taken out.
    fn choose<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(modifier, _)| self.take(modifier)).map(|(_, meaning)| *meaning)
    }

    /// The one type, once nothing else is left over.
    fn only_type(&self) -> Result<Type, String> {
        match (&self.types[..], &self.modifiers[..]) {
            ([ty], []) => Ok(*ty),
            _ => Err(UNSUPPORTED.into()),
        }
    }

    fn nothing_left(&self) -> Result<(), String> {
        if self.types.is_empty() && self.modifiers.is_empty() { Ok(()) } else { Err(UNSUPPORTED.into()) }
    }
}

const UNSUPPORTED: &str = "unsupported PTX";

/// Decodes one statement. The label is where it branches to, if it is a branch.
pub(super) fn decode<'a>(
    text: &'a str,
    statement: u32,
    names: &mut Names,
) -> Result<(Instruction, Option<&'a str>), String> {
    let (mut guard, mut rest) = (None, text);
    if let Some(guarded) = text.strip_prefix('@') {
        let (predicate, instruction) = guarded.split_once(char::is_whitespace).ok_or(UNSUPPORTED)?;
        let negated = predicate.starts_with('!');
        guard = Some((names.register(predicate.trim_start_matches('!'))?, negated));
        rest = instruction.trim();
    }
    let (mnemonic, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let (mut mnemonic, texts) = (Mnemonic::new(mnemonic), operands(rest));
    if mnemonic.name == "bra" {
        mnemonic.take("uni");
        mnemonic.nothing_left()?;
        let [label] = texts[..] else { return Err(UNSUPPORTED.into()) };
        return Ok((Instruction { guard, operation: Operation::Branch { target: 0 }, statement }, Some(label)));
    }
    let operation = operation(&mut mnemonic, &texts, names)?;
    Ok((Instruction { guard, operation, statement }, None))
}

fn operation(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    match mnemonic.name {
        "ld" | "ldu" => load(mnemonic, texts, names),
        "st" => store(mnemonic, texts, names),
        "atom" | "red" => atomic(mnemonic, texts, names),
        "mov" => mov(mnemonic, texts, names),
        "ret" | "exit" => {
            mnemonic.take("uni");
            mnemonic.nothing_left()?;
            Ok(Operation::Exit)
        }
        "bar" | "barrier" => barrier(mnemonic, texts),
        "membar" | "fence" => Ok(Operation::Nothing),
        "shfl" => shuffle(mnemonic, texts, names),
        "setp" => compare(mnemonic, texts, names),
        "cvt" => convert(mnemonic, texts, names),
        "cvta" => {
            // Global and generic addresses are the same here; those of other spaces are not.
            mnemonic.take("to");
            if mnemonic.take("global") { arithmetic(mnemonic, texts, names) } else { Err(UNSUPPORTED.into()) }
        }
        "mul" | "mad" => multiply(mnemonic, texts, names),
        _ => arithmetic(mnemonic, texts, names),
    }
}

/// `[target, sources…]`, exactly `N` of them in all.
fn places<const N: usize>(texts: &[&str], names: &mut Names) -> Result<[u32; N], String> {
    let mut found = [0; N];
    if texts.len() != N {
        return Err(format!("{UNSUPPORTED}: {} operands instead of {N}", texts.len()));
    }
    for (index, (place, text)) in found.iter_mut().zip(texts).enumerate() {
        *place = if index == 0 { names.register(text)? } else { names.operand(text)? };
    }
    Ok(found)
}

/// Everything that is a name, one type and operands in order.
fn arithmetic(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    if mnemonic.types.first().is_some_and(|ty| ty.kind == Kind::Float) && mnemonic.name != "selp" {
        return float(mnemonic, texts, names);
    }
    if mnemonic.name == "shf" {
        return funnel_shift(mnemonic, texts, names);
    }
    let ty = mnemonic.only_type()?;
    let binary = |what: Binary, names: &mut Names| {
        let [d, a, b] = places(texts, names)?;
        Ok(Operation::Binary { what, ty, d, a, b })
    };
    let unary = |what: Unary, names: &mut Names| {
        let [d, a] = places(texts, names)?;
        Ok(Operation::Unary { what, ty, d, a })
    };
    let logical = matches!(mnemonic.name, "and" | "or" | "xor" | "not");
    if !ty.is_integer() && !logical && mnemonic.name != "selp" {
        return Err(UNSUPPORTED.into());
    }
    match mnemonic.name {
        "add" => binary(Binary::Add, names),
        "sub" => binary(Binary::Subtract, names),
        "div" => binary(Binary::Divide, names),
        "rem" => binary(Binary::Remainder, names),
        "min" => binary(Binary::Minimum, names),
        "max" => binary(Binary::Maximum, names),
        "and" => binary(Binary::And, names),
        "or" => binary(Binary::Or, names),
        "xor" => binary(Binary::Xor, names),
        "shl" => binary(Binary::ShiftLeft, names),
        "shr" => binary(Binary::ShiftRight, names),
        "not" => unary(Unary::Not, names),
        "neg" => unary(Unary::Negate, names),
        "abs" => unary(Unary::Absolute, names),
        "popc" => unary(Unary::CountOnes, names),
        "clz" => unary(Unary::CountLeadingZeros, names),
        "brev" => unary(Unary::ReverseBits, names),
        "cvta" => {
            let [d, a] = places(texts, names)?;
            Ok(Operation::Move { ty, d, a })
        }
        "selp" => {
            let [d, a, b, predicate] = places(texts, names)?;
            Ok(Operation::Select { ty, d, a, b, predicate })
        }
        "bfe" => {
            let [d, a, position, len] = places(texts, names)?;
            Ok(Operation::ExtractBits { ty, d, a, position, len })
        }
        "bfi" => {
            let [d, a, b, position, len] = places(texts, names)?;
            Ok(Operation::InsertBits { ty, d, a, b, position, len })
        }
        "prmt" if ty.bits == 32 => {
            let [d, a, b, selector] = places(texts, names)?;
            Ok(Operation::Permute { d, a, b, selector })
        }
        "lop3" if ty.bits == 32 => {
            let [d, a, b, c, table] = places(texts, names)?;
            Ok(Operation::Logic3 { d, a, b, c, table })
        }
        _ => Err(UNSUPPORTED.into()),
    }
}

/// F32 and products of F64, with the one rounding that the hosts have too. Without `.rn` a compiler may contract, and `.ftz` is another arithmetic.
fn float(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let rounds = mnemonic.take("rn");
    let ty = mnemonic.only_type()?;
    let what = match mnemonic.name {
        "add" => FloatBinary::Add,
        "sub" => FloatBinary::Subtract,
        "mul" => FloatBinary::Multiply,
        _ => return Err(UNSUPPORTED.into()),
    };
    let is_known = ty.bits == 32 || (ty.bits == 64 && what == FloatBinary::Multiply);
    if !is_known || !rounds {
        return Err(format!("{UNSUPPORTED}: only .rn.f32 and mul.rn.f64 are exact"));
    }
    let [d, a, b] = places(texts, names)?;
    Ok(Operation::Float { what, bits: ty.bits, d, a, b })
}

fn multiply(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    #[derive(Clone, Copy, PartialEq)]
    enum Part {
        Low,
        High,
        Wide,
    }
    let Some(part) = mnemonic.choose(&[("lo", Part::Low), ("hi", Part::High), ("wide", Part::Wide)]) else {
        return arithmetic(mnemonic, texts, names);
    };
    let ty = mnemonic.only_type()?;
    if !ty.is_integer() || (part == Part::Wide && ty.bits > 32) {
        return Err(UNSUPPORTED.into());
    }
    match (mnemonic.name, part) {
        ("mul", Part::Wide) => {
            let [d, a, b] = places(texts, names)?;
            Ok(Operation::MultiplyWide { ty, d, a, b, c: None })
        }
        ("mul", _) => {
            let [d, a, b] = places(texts, names)?;
            let what = if part == Part::Low { Binary::Multiply } else { Binary::MultiplyHigh };
            Ok(Operation::Binary { what, ty, d, a, b })
        }
        (_, Part::Wide) => {
            let [d, a, b, c] = places(texts, names)?;
            Ok(Operation::MultiplyWide { ty, d, a, b, c: Some(c) })
        }
        (_, Part::Low) => {
            let [d, a, b, c] = places(texts, names)?;
            Ok(Operation::MultiplyAdd { ty, d, a, b, c })
        }
        (_, Part::High) => Err(UNSUPPORTED.into()),
    }
}

fn funnel_shift(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let left = mnemonic.choose(&[("l", true), ("r", false)]).ok_or(UNSUPPORTED)?;
    let clamp = mnemonic.choose(&[("clamp", true), ("wrap", false)]).ok_or(UNSUPPORTED)?;
    mnemonic.only_type()?;
    let [d, a, b, c] = places(texts, names)?;
    Ok(Operation::FunnelShift { left, clamp, d, a, b, c })
}

/// Takes the state space and the hints of caches out; `None` for parameters.
fn space(mnemonic: &mut Mnemonic<'_>) -> Option<Space> {
    for hint in ["nc", "volatile", "relaxed", "weak", "gpu", "sys", "ca", "cg", "cs", "lu", "cv", "wb", "wt"] {
        mnemonic.take(hint);
    }
    mnemonic
        .choose(&[("param", None), ("global", Some(Space::Global)), ("shared", Some(Space::Shared))])
        .unwrap_or(Some(Space::Global))
}

/// The registers of a possible vector, as many as the mnemonic says.
fn vector(
    mnemonic: &mut Mnemonic<'_>,
    text: &str,
    mut place: impl FnMut(&str) -> Result<u32, String>,
) -> Result<Places, String> {
    let len = mnemonic.choose(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
    let found = members(text).into_iter().map(&mut place).collect::<Result<Vec<u32>, String>>()?;
    if found.len() == len {
        Places::new(&found)
    } else {
        Err(format!("{} registers in a vector of {len}", found.len()))
    }
}

fn load(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let [target, address] = texts[..] else { return Err(UNSUPPORTED.into()) };
    let space = space(mnemonic);
    let target = vector(mnemonic, target, |text| names.register(text))?;
    let ty = mnemonic.only_type()?;
    let bytes = ty.bytes() * target.as_slice().len();
    if bytes == 0 || bytes > 16 {
        return Err(UNSUPPORTED.into());
    }
    match space {
        None => Ok(Operation::Parameter { ty, target, offset: names.parameter_offset(address, bytes)? }),
        Some(space) => Ok(Operation::Load { space, ty, target, address: names.address(address)? }),
    }
}

fn store(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let [address, source] = texts[..] else { return Err(UNSUPPORTED.into()) };
    let space = space(mnemonic).ok_or(UNSUPPORTED)?;
    let source = vector(mnemonic, source, |text| names.operand(text))?;
    let ty = mnemonic.only_type()?;
    let bytes = ty.bytes() * source.as_slice().len();
    if bytes == 0 || bytes > 16 {
        return Err(UNSUPPORTED.into());
    }
    Ok(Operation::Store { space, ty, source, address: names.address(address)? })
}

fn atomic(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let returns = mnemonic.name == "atom";
    if space(mnemonic) != Some(Space::Global) || !mnemonic.take("add") {
        return Err(UNSUPPORTED.into());
    }
    let ty = mnemonic.only_type()?;
    if !ty.is_integer() || ty.bits < 32 {
        return Err(UNSUPPORTED.into());
    }
    let (d, address, value) = match *texts {
        [d, address, value] if returns => (Some(names.register(d)?), address, value),
        [address, value] if !returns => (None, address, value),
        _ => return Err(UNSUPPORTED.into()),
    };
    Ok(Operation::AtomicAdd { ty, d, address: names.address(address)?, a: names.operand(value)? })
}

fn mov(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let [target, source] = texts[..] else { return Err(UNSUPPORTED.into()) };
    let ty = mnemonic.only_type()?;
    if target.starts_with('{') {
        let parts = members(target).into_iter().map(|part| names.register(part)).collect::<Result<Vec<_>, _>>()?;
        return Ok(Operation::Split { ty, parts: Places::new(&parts)?, a: names.operand(source)? });
    }
    let d = names.register(target)?;
    if source.starts_with('{') {
        let parts = members(source).into_iter().map(|part| names.operand(part)).collect::<Result<Vec<_>, _>>()?;
        return Ok(Operation::Join { ty, d, parts: Places::new(&parts)? });
    }
    Ok(Operation::Move { ty, d, a: names.operand(source)? })
}

/// The one barrier of all threads of a block.
fn barrier(mnemonic: &mut Mnemonic<'_>, texts: &[&str]) -> Result<Operation, String> {
    mnemonic.take("cta");
    mnemonic.take("aligned");
    let sync = mnemonic.take("sync");
    mnemonic.nothing_left()?;
    if sync && texts == ["0"] { Ok(Operation::Barrier) } else { Err(UNSUPPORTED.into()) }
}

fn shuffle(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let modes = [
        ("up", ShuffleMode::Up),
        ("down", ShuffleMode::Down),
        ("bfly", ShuffleMode::Butterfly),
        ("idx", ShuffleMode::Index),
    ];
    if !mnemonic.take("sync") {
        return Err(UNSUPPORTED.into());
    }
    let mode = mnemonic.choose(&modes).ok_or(UNSUPPORTED)?;
    let ty = mnemonic.only_type()?;
    let [target, value, lane, clamp, members] = texts[..] else { return Err(UNSUPPORTED.into()) };
    if ty.bits != 32 {
        return Err(UNSUPPORTED.into());
    }
    let (target, in_range) = target.split_once('|').map_or((target, None), |(target, flag)| (target, Some(flag)));
    Ok(Operation::Shuffle(Shuffle {
        mode,
        target: names.register(target.trim())?,
        in_range: in_range.map(|flag| names.register(flag.trim())).transpose()?,
        value: names.operand(value)?,
        lane: names.operand(lane)?,
        clamp: names.operand(clamp)?,
        members: names.operand(members)?,
    }))
}

fn compare(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let comparisons = [
        ("eq", Comparison::Equal),
        ("ne", Comparison::NotEqual),
        ("lt", Comparison::Less),
        ("lo", Comparison::Less),
        ("le", Comparison::LessOrEqual),
        ("ls", Comparison::LessOrEqual),
        ("gt", Comparison::Greater),
        ("hi", Comparison::Greater),
        ("ge", Comparison::GreaterOrEqual),
        ("hs", Comparison::GreaterOrEqual),
    ];
    let what = mnemonic.choose(&comparisons).ok_or(UNSUPPORTED)?;
    let ty = mnemonic.only_type()?;
    if !ty.is_integer() {
        return Err(UNSUPPORTED.into());
    }
    let [d, a, b] = places(texts, names)?;
    Ok(Operation::Compare { what, ty, d, a, b })
}

/// Between integers only: conversions of floats are the kernels' own integer code, so that nothing hangs on a processor's.
fn convert(mnemonic: &mut Mnemonic<'_>, texts: &[&str], names: &mut Names) -> Result<Operation, String> {
    let ([to, from], []) = (&mnemonic.types[..], &mnemonic.modifiers[..]) else { return Err(UNSUPPORTED.into()) };
    let floats = |ty: &Type, bits| ty.kind == Kind::Float && ty.bits == bits;
    if floats(to, 64) && floats(from, 32) {
        let [d, a] = places(texts, names)?;
        return Ok(Operation::Widen { d, a });
    }
    if !to.is_integer() || !from.is_integer() {
        return Err(UNSUPPORTED.into());
    }
    let [d, a] = places(texts, names)?;
    Ok(Operation::Convert { to: *to, from: *from, d, a })
}
