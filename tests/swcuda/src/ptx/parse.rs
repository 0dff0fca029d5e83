//! Modules, kernels, declarations and names. Whatever it does not know is an error that quotes it.

use std::collections::HashMap;

use super::decode::decode;
use super::instruction::{Address, Instruction, Operation, Type};
use super::text::{Cursor, Piece, operands, without_comments};
use super::{Kernel, Module, Parameter, Registers, Special, Statement};

/// What registers and shared memory hold before they are written: no plausible value, address or index.
pub(super) const GARBAGE: u64 = 0xdead_beef_dead_beef;

pub(super) fn module(text: &str) -> Result<Module, String> {
    let text = without_comments(text);
    let mut cursor = Cursor::new(&text);
    let (mut isa, mut kernels, mut shared) = (None, Vec::new(), Vec::new());
    while !cursor.is_at_end() {
        match cursor.word() {
            ".version" => isa = Some(version(cursor.word()).ok_or_else(|| cursor.error("not a version"))?),
            ".target" => drop(cursor.until('\n')?),
            ".address_size" => match cursor.word() {
                "64" => {}
                other => return Err(cursor.error(&format!("addresses of {other} bits are not supported"))),
            },
            ".visible" | ".weak" | ".extern" => {}
            ".shared" => shared.push(Declaration::parse(cursor.until(';')?).map_err(|error| cursor.error(&error))?),
            ".entry" => kernels.push(entry(&mut cursor, &shared)?),
            other => return Err(cursor.error(&format!("unsupported PTX: {other:?} outside of a kernel"))),
        }
    }
    let isa = isa.ok_or("PTX without .version")?;
    if kernels.is_empty() { Err("PTX without .entry".into()) } else { Ok(Module { isa, kernels }) }
}

fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A kernel, from its name to its closing brace.
fn entry(cursor: &mut Cursor<'_>, shared: &[Declaration]) -> Result<Kernel, String> {
    let name = cursor.until('(')?.to_owned();
    let mut names = Names::default();
    names.scopes.push(HashMap::new());
    // A kernel without registers has one nevertheless, so that no thread's window is empty.
    names.place(GARBAGE)?;
    for text in operands(cursor.until(')')?) {
        names.parameter(text).map_err(|error| cursor.error(&error))?;
    }
    for declaration in shared {
        names.shared(declaration.clone());
    }
    let max_threads = performance(cursor.until('{')?).map_err(|error| cursor.error(&error))?;
    let (code, statements) = body(cursor, &mut names).map_err(|error| format!("kernel {name}: {error}"))?;
    Ok(Kernel {
        name,
        parameters: names.parameters,
        parameter_bytes: names.parameter_bytes,
        max_threads,
        shared_bytes: names.shared_bytes,
        code,
        statements,
        registers: names.registers,
    })
}

/// The directives between parameters and body: how many threads a block may have.
fn performance(text: &str) -> Result<Option<u32>, String> {
    let mut most = None;
    for directive in text.split('.').map(str::trim).filter(|directive| !directive.is_empty()) {
        let (name, values) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        let product = operands(values).iter().try_fold(1u32, |product, value| product.checked_mul(value.parse().ok()?));
        match name {
            "maxntid" | "reqntid" => most = product,
            "minnctapersm" | "maxnreg" => {}
            _ => return Err(format!("unsupported PTX: .{directive}")),
        }
    }
    Ok(most)
}

type Body = (Vec<Instruction>, Vec<Statement>);

fn body(cursor: &mut Cursor<'_>, names: &mut Names) -> Result<Body, String> {
    let (mut code, mut statements) = (Vec::new(), Vec::new());
    let (mut labels, mut branches) = (HashMap::new(), Vec::new());
    names.scopes.push(HashMap::new());
    while names.scopes.len() > 1 {
        let line = cursor.line();
        match cursor.piece()? {
            Piece::Open => names.scopes.push(HashMap::new()),
            Piece::Close => drop(names.scopes.pop()),
            Piece::Label(label) => drop(labels.insert(label, index(code.len())?)),
            Piece::Statement(text) => {
                let located = |error: String| format!("PTX line {line}: {error}: `{text}`");
                if let Some(declaration) = text.strip_prefix('.') {
                    names.declare(declaration).map_err(located)?;
                    continue;
                }
                let statement = index(statements.len())?;
                let (decoded, label) = decode(text, statement, names).map_err(located)?;
                branches.extend(label.map(|label| (code.len(), label, line)));
                code.push(decoded);
                statements.push(Statement { line, text: text.split_whitespace().collect::<Vec<_>>().join(" ") });
            }
        }
    }
    // Control that runs off the end has returned.
    let statement = index(statements.len())?;
    statements.push(Statement { line: cursor.line(), text: "}".into() });
    code.push(Instruction { guard: None, operation: Operation::Exit, statement });
    for (at, label, line) in branches {
        let target =
            labels.get(label).ok_or_else(|| format!("PTX line {line}: there is no such label: `bra {label}`"))?;
        code[at].operation = Operation::Branch { target: *target };
    }
    Ok((code, statements))
}

fn index(len: usize) -> Result<u32, String> {
    u32::try_from(len).map_err(|_| "too much PTX".to_owned())
}

/// `.align 8 .b8 name[64]`, without the state space.
#[derive(Debug, Clone)]
struct Declaration {
    name: String,
    align: usize,
    bytes: usize,
}

impl Declaration {
    fn parse(text: &str) -> Result<Declaration, String> {
        let wrong = || format!("unsupported declaration: {text:?}");
        let (mut align, mut element, mut name) = (None, None, None);
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            match word.strip_prefix('.') {
                Some("align") => align = words.next().and_then(|align| align.parse().ok()),
                // A pointer's address space and alignment: hints that bind nobody.
                Some("ptr" | "global") => {}
                Some(other) => element = Type::parse(other).map(Type::bytes),
                None => name = Some(word),
            }
        }
        let (name, element) = (name.ok_or_else(wrong)?, element.ok_or_else(wrong)?);
        let (name, count) = match name.split_once('[') {
            None => (name, 1),
            // `name[]`: its size comes with the launch.
            Some((name, "]")) => (name, 0),
            Some((name, count)) => {
                (name, count.strip_suffix(']').and_then(|count| count.parse().ok()).ok_or_else(wrong)?)
            }
        };
        let bytes = element.checked_mul(count).ok_or_else(wrong)?;
        let align: usize = align.unwrap_or(element);
        if align.is_power_of_two() { Ok(Declaration { name: name.to_owned(), align, bytes }) } else { Err(wrong()) }
    }
}

#[derive(Debug, Clone, Copy)]
enum Name {
    Register(u32),
    /// Offset in shared memory.
    Shared(usize),
}

/// The names of a kernel, and the places of its registers.
#[derive(Debug, Default)]
pub(super) struct Names {
    scopes: Vec<HashMap<String, Name>>,
    constants: HashMap<u64, u32>,
    registers: Registers,
    parameters: Vec<Parameter>,
    parameter_names: Vec<String>,
    parameter_bytes: usize,
    shared_bytes: usize,
}

impl Names {
    fn parameter(&mut self, text: &str) -> Result<(), String> {
        let text = text.strip_prefix(".param").ok_or_else(|| format!("not a parameter: {text:?}"))?;
        let Declaration { name, align, bytes } = Declaration::parse(text)?;
        let offset = self.parameter_bytes.next_multiple_of(align);
        self.parameters.push(Parameter { offset, bytes });
        self.parameter_names.push(name);
        self.parameter_bytes = offset + bytes;
        Ok(())
    }

    fn shared(&mut self, declaration: Declaration) {
        let offset = self.shared_bytes.next_multiple_of(declaration.align);
        self.shared_bytes = offset + declaration.bytes;
        self.name(declaration.name, Name::Shared(offset));
    }

    fn name(&mut self, name: String, meaning: Name) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name, meaning);
        }
    }

    /// A declaration in a body, without its first dot.
    fn declare(&mut self, text: &str) -> Result<(), String> {
        let (directive, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match directive {
            "reg" => self.declare_registers(rest.trim()),
            "shared" => {
                self.shared(Declaration::parse(rest)?);
                Ok(())
            }
            "pragma" => Ok(()),
            _ => Err("unsupported PTX".into()),
        }
    }

    /// `.b32 %r<10>` or `.b16 a, b`.
    fn declare_registers(&mut self, text: &str) -> Result<(), String> {
        let wrong = || "unsupported registers".to_owned();
        let (kind, names) = text.split_once(char::is_whitespace).ok_or_else(wrong)?;
        let kind = kind.strip_prefix('.').and_then(Type::parse).ok_or_else(wrong)?;
        for name in operands(names) {
            let Some((stem, count)) = name.split_once('<') else {
                let register = self.place(GARBAGE & kind.mask())?;
                self.name(name.to_owned(), Name::Register(register));
                continue;
            };
            let count: u32 = count.strip_suffix('>').and_then(|count| count.parse().ok()).ok_or_else(wrong)?;
            for number in 0..count {
                let register = self.place(GARBAGE & kind.mask())?;
                self.name(format!("{stem}{number}"), Name::Register(register));
            }
        }
        Ok(())
    }

    fn place(&mut self, initial: u64) -> Result<u32, String> {
        let place = index(self.registers.initial.len())?;
        self.registers.initial.push(initial);
        Ok(place)
    }

    fn find(&self, name: &str) -> Option<Name> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    /// The place of a declared register, or of the sink `_`.
    pub(super) fn register(&mut self, name: &str) -> Result<u32, String> {
        match self.find(name) {
            Some(Name::Register(place)) => Ok(place),
            None if name == "_" => self.place(GARBAGE),
            _ => Err(format!("{name} is no declared register")),
        }
    }

    /// The place of whatever can be read: a register, a special register, a constant, the address of a shared variable.
    pub(super) fn operand(&mut self, text: &str) -> Result<u32, String> {
        match self.find(text) {
            Some(Name::Register(place)) => return Ok(place),
            Some(Name::Shared(offset)) => return self.constant(offset as u64),
            None => {}
        }
        if let Some(special) = special(text) {
            let known = self.registers.special.iter().find(|(_, known)| *known == special);
            if let Some((place, _)) = known {
                return Ok(*place);
            }
            let place = self.place(GARBAGE)?;
            self.registers.special.push((place, special));
            return Ok(place);
        }
        let value = literal(text).ok_or_else(|| format!("{text} is neither declared nor a number"))?;
        self.constant(value)
    }

    pub(super) fn constant(&mut self, value: u64) -> Result<u32, String> {
        if let Some(place) = self.constants.get(&value) {
            return Ok(*place);
        }
        let place = self.place(value)?;
        self.constants.insert(value, place);
        Ok(place)
    }

    /// `[base]`, `[base+4]`, `[base-4]`.
    pub(super) fn address(&mut self, text: &str) -> Result<Address, String> {
        let (base, offset) = base_and_offset(text)?;
        Ok(Address { base: self.operand(base)?, offset })
    }

    /// `[name+4]` of the parameters: the offset, if `bytes` bytes from there are parameters.
    pub(super) fn parameter_offset(&self, text: &str, bytes: usize) -> Result<usize, String> {
        let (base, offset) = base_and_offset(text)?;
        let at = self.parameter_names.iter().position(|name| name == base);
        let start = at.map(|at| self.parameters[at].offset).ok_or_else(|| format!("{base} is no parameter"))?;
        let offset = usize::try_from(offset).ok().and_then(|offset| start.checked_add(offset));
        let fits = offset.filter(|offset| offset.checked_add(bytes).is_some_and(|end| end <= self.parameter_bytes));
        fits.ok_or_else(|| "outside of the parameters".to_owned())
    }
}

fn base_and_offset(text: &str) -> Result<(&str, u64), String> {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let inner = inner.ok_or_else(|| format!("{text} is no address"))?.trim();
    let Some(sign) = inner.rfind(['+', '-']).filter(|at| *at > 0) else { return Ok((inner, 0)) };
    let offset = literal(inner[sign..].trim_start_matches('+').trim());
    Ok((inner[..sign].trim(), offset.ok_or_else(|| format!("{inner} has an odd offset"))?))
}

fn special(text: &str) -> Option<Special> {
    let (name, dimension) = text.split_once('.').unwrap_or((text, "x"));
    let dimension = ["x", "y", "z"].iter().position(|known| *known == dimension)?;
    Some(match name {
        "%tid" => Special::Thread(dimension),
        "%ntid" => Special::BlockSize(dimension),
        "%ctaid" => Special::Block(dimension),
        "%nctaid" => Special::GridSize(dimension),
        "%laneid" => Special::Lane,
        _ => return None,
    })
}

/// Integers, and floats as their bits (`0f3F800000`, `0d…`).
fn literal(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    if let Some(bits) = lower.strip_prefix("0f").filter(|bits| bits.len() == 8) {
        return u64::from_str_radix(bits, 16).ok();
    }
    if let Some(bits) = lower.strip_prefix("0d").filter(|bits| bits.len() == 16) {
        return u64::from_str_radix(bits, 16).ok();
    }
    let digits = lower.trim_end_matches('u');
    if let Some(hex) = digits.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok();
    }
    digits.parse::<u64>().ok().or_else(|| digits.parse::<i64>().ok().map(i64::cast_unsigned))
}
