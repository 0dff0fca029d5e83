//! The machine: a stack, marks, a memo, and one step for each opcode of the protocols 0 to 5.
//!
//! Where Python would import or call, it notes a name or a call. It stops at the first thing that is wrong; what was pushed
//! until then stays known. Nothing recurses, and every growing list has a limit.

use std::collections::HashMap;

use super::input::{Input, Read};
use super::text::{self, Decimal};
use super::{
    Arena, Broken, Call, Global, Id, MAX_CONTAINERS, MAX_INTEGER_BYTES, MAX_ITEMS, MAX_MEMO, MAX_STACK, MAX_VALUES,
    Ran, Span, Value,
};

/// A memo slot beyond this many times the pickle's length is no honest writer's.
const MEMO_SLACK: u64 = 1 << 16;

/// Runs the pickle that begins at byte `at` of `bytes`, to its end or to what is wrong with it.
pub fn run(bytes: Vec<u8>, at: usize) -> Ran {
    let mut machine = Machine::new(&bytes, at);
    let result = machine.run();
    let Machine { mut arena, input, extra, protocol, .. } = machine;
    let end = input.at;
    arena.bytes = bytes;
    arena.bytes.extend_from_slice(&extra);
    let (result, broken) = result.map_or_else(|broken| (None, Some(broken)), |id| (Some(id), None));
    Ran { arena, result, end, protocol, broken }
}

/// Values that exist once.
const NONE: Id = 0;
const TRUE: Id = 1;
const FALSE: Id = 2;
const EMPTY: Id = 3;

struct Machine<'a> {
    input: Input<'a>,
    input_len: usize,
    arena: Arena,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
    /// Text that had to be decoded; it follows the pickle in the arena.
    extra: Vec<u8>,
    items: usize,
    protocol: u8,
    bytes: &'a [u8],
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8], at: usize) -> Machine<'a> {
        let values = vec![Value::None, Value::Bool(true), Value::Bool(false), Value::Tuple(Span::default())];
        Machine {
            input: Input::new(bytes, at),
            input_len: bytes.len(),
            arena: Arena { values, ..Arena::default() },
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            extra: Vec::new(),
            items: 0,
            protocol: 0,
            bytes,
        }
    }

    fn run(&mut self) -> Read<Id> {
        let start = self.input.at;
        if self.input_len == start {
            return Err(self.input.broken("truncated", "the pickle is empty"));
        }
        loop {
            match self.input.opcode()? {
                b'.' => return self.pop(),
                0x80 => self.protocol(start)?,
                opcode => self.step(opcode)?,
            }
        }
    }

    fn protocol(&mut self, start: usize) -> Read<()> {
        let protocol = self.input.u8()?;
        if self.input.opcode_at != start {
            return Err(self.input.hostile("proto-misplaced", "PROTO stands within the pickle"));
        }
        if protocol > 5 {
            return Err(self.input.broken("proto-version", format!("protocol {protocol}; 5 is the highest known")));
        }
        self.protocol = protocol;
        Ok(())
    }

    fn step(&mut self, opcode: u8) -> Read<()> {
        match opcode {
            b'N' => self.push_id(NONE),
            0x88 => self.push_id(TRUE),
            0x89 => self.push_id(FALSE),
            b')' => self.push_id(EMPTY),
            b'J' | b'K' | b'M' | b'I' | b'L' | 0x8a | 0x8b => self.integer(opcode),
            b'F' | b'G' => self.float(opcode),
            b'X' | 0x8c | 0x8d | b'V' => self.unicode(opcode),
            b'B' | b'C' | 0x8e | 0x96 => self.byte_string(opcode),
            b'S' | b'T' | b'U' => self.old_string(opcode),
            b'(' => self.mark(),
            b'0' => self.pop_or_mark(),
            b'1' => self.pop_mark().map(drop),
            b'2' => self.top().and_then(|top| self.push_id(top)),
            b't' | 0x85 | 0x86 | 0x87 => self.tuple(opcode),
            b']' | b'l' => self.new_list(opcode, Value::List),
            0x8f => self.new_list(opcode, Value::Set),
            0x91 => self.frozen_set(),
            b'}' | b'd' => self.new_dict(opcode),
            b'a' | b'e' | 0x90 => self.append(opcode),
            b's' | b'u' => self.set_items(opcode),
            b'p' | b'q' | b'r' | 0x94 => self.put(opcode),
            b'g' | b'h' | b'j' => self.get(opcode),
            b'c' | 0x93 => self.global(opcode),
            b'R' | b'o' | b'i' | 0x81 | 0x92 => self.call(opcode),
            b'b' => self.build(),
            b'P' | b'Q' => self.persistent(opcode),
            0x95 => self.input.u64().and_then(|len| self.input.frame(len)),
            0x82..=0x84 => Err(self.input.hostile("extension", "an extension code: a name hidden in a registry")),
            0x97 | 0x98 => Err(self.input.broken("out-of-band", "a buffer that is not in the file")),
            other => Err(self.input.broken("opcode", format!("the byte 0x{other:02x} is no opcode"))),
        }
    }

    // ---- the stack

    fn push(&mut self, value: Value) -> Read<()> {
        let id = self.add(value)?;
        self.push_id(id)
    }

    fn add(&mut self, value: Value) -> Read<Id> {
        let id = self.arena.values.len();
        if id >= MAX_VALUES {
            return Err(self.too_many("values", MAX_VALUES));
        }
        self.arena.values.push(value);
        Ok(u32::try_from(id).unwrap_or(u32::MAX))
    }

    fn push_id(&mut self, id: Id) -> Read<()> {
        if self.stack.len() >= MAX_STACK {
            return Err(self.too_many("values on the stack", MAX_STACK));
        }
        self.stack.push(id);
        Ok(())
    }

    fn too_many(&self, what: &str, limit: usize) -> Broken {
        self.input.hostile("resource-limit", format!("more than {limit} {what}"))
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Read<Id> {
        let popped = if self.stack.len() > self.floor() { self.stack.pop() } else { None };
        popped.ok_or_else(|| self.input.broken("stack-underflow", "an opcode takes a value that is not there"))
    }

    fn top(&self) -> Read<Id> {
        let above = self.stack.get(self.floor()..).unwrap_or_default();
        above.last().copied().ok_or_else(|| self.input.broken("stack-underflow", "an opcode looks at an empty stack"))
    }

    fn mark(&mut self) -> Read<()> {
        if self.marks.len() >= MAX_STACK {
            return Err(self.too_many("marks", MAX_STACK));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn pop_or_mark(&mut self) -> Read<()> {
        match self.marks.last() {
            Some(&mark) if mark == self.stack.len() => {
                self.marks.pop();
                Ok(())
            }
            _ => self.pop().map(drop),
        }
    }

    /// The values above the last mark.
    fn pop_mark(&mut self) -> Read<Vec<Id>> {
        let Some(mark) = self.marks.pop() else {
            return Err(self.input.broken("mark-missing", "an opcode looks for a mark that is not there"));
        };
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    /// Counts items of containers.
    fn count(&mut self, items: usize) -> Read<()> {
        self.items = self.items.saturating_add(items);
        if self.items > MAX_ITEMS { Err(self.too_many("items", MAX_ITEMS)) } else { Ok(()) }
    }

    fn demand_room_for_container(&self) -> Read<()> {
        let containers = self.arena.lists.len() + self.arena.dicts.len() + self.arena.calls.len();
        if containers >= MAX_CONTAINERS { Err(self.too_many("containers", MAX_CONTAINERS)) } else { Ok(()) }
    }

    // ---- plain values

    fn integer(&mut self, opcode: u8) -> Read<()> {
        let number = match opcode {
            b'J' => i64::from(self.input.i32()?),
            b'K' => i64::from(self.input.u8()?),
            b'M' => i64::from(self.input.u16()?),
            b'I' | b'L' => return self.decimal(opcode),
            _ => return self.long(opcode),
        };
        self.push(Value::Int(number))
    }

    fn long(&mut self, opcode: u8) -> Read<()> {
        let len = if opcode == 0x8a { i64::from(self.input.u8()?) } else { i64::from(self.input.i32()?) };
        let Ok(len) = u64::try_from(len) else {
            return Err(self.input.broken("number-range", format!("an integer of {len} bytes")));
        };
        let span = self.input.span(len)?;
        let taken = self.slice(span);
        match text::small(taken) {
            Some(small) => self.push(Value::Int(small)),
            None if taken.len() > MAX_INTEGER_BYTES => Err(self.too_wide(taken.len() <= 256)),
            None => self.push(Value::Big(span)),
        }
    }

    fn too_wide(&self, harmless: bool) -> Broken {
        let bits = MAX_INTEGER_BYTES * 8;
        let what = format!("an integer of more than {bits} bits");
        if harmless { self.input.broken("integer-limit", what) } else { self.input.hostile("integer-limit", what) }
    }

    fn decimal(&mut self, opcode: u8) -> Read<()> {
        let line = self.input.line()?;
        let line = self.slice(line);
        let digits = match (opcode, line) {
            (b'I', b"01") => return self.push_id(TRUE),
            (b'I', b"00") => return self.push_id(FALSE),
            (b'L', [digits @ .., b'L']) => digits,
            (_, digits) => digits,
        };
        match text::decimal(digits.trim_ascii(), MAX_INTEGER_BYTES) {
            Decimal::Small(number) => self.push(Value::Int(number)),
            Decimal::Big(bytes) => {
                let span = self.keep(&bytes);
                self.push(Value::Big(span))
            }
            Decimal::TooWide => Err(self.too_wide(false)),
            Decimal::NotANumber => Err(self.input.broken("number-range", "an integer that is none")),
        }
    }

    fn float(&mut self, opcode: u8) -> Read<()> {
        if opcode == b'G' {
            let number = f64::from_be_bytes(self.input.array()?);
            return self.push(Value::Float(number));
        }
        let line = self.input.line()?;
        let number = std::str::from_utf8(self.slice(line)).ok().and_then(|text| text.trim().parse().ok());
        let number = number.ok_or_else(|| self.input.broken("number-range", "a number that is none"))?;
        self.push(Value::Float(number))
    }

    fn unicode(&mut self, opcode: u8) -> Read<()> {
        if opcode == b'V' {
            let line = self.input.line()?;
            let text = text::raw_unicode(self.slice(line)).ok_or_else(|| self.not_text())?;
            let span = self.keep(text.as_bytes());
            return self.push(Value::Text(span));
        }
        let len = match opcode {
            b'X' => u64::from(self.input.u32()?),
            0x8c => u64::from(self.input.u8()?),
            _ => self.input.u64()?,
        };
        let span = self.input.span(len)?;
        std::str::from_utf8(self.slice(span)).map_err(|_| self.not_text())?;
        self.push(Value::Text(span))
    }

    fn not_text(&self) -> Broken {
        self.input.broken("text-encoding", "text that is not UTF-8")
    }

    fn byte_string(&mut self, opcode: u8) -> Read<()> {
        let len = match opcode {
            b'B' => u64::from(self.input.u32()?),
            b'C' => u64::from(self.input.u8()?),
            _ => self.input.u64()?,
        };
        let span = self.input.span(len)?;
        self.push(Value::Bytes(span))
    }

    /// Strings of Python 2: text where they are UTF-8, bytes otherwise.
    fn old_string(&mut self, opcode: u8) -> Read<()> {
        let span = match opcode {
            b'S' => {
                let line = self.input.line()?;
                let inner = text::unquote(self.slice(line).trim_ascii());
                let inner = inner.ok_or_else(|| self.input.broken("text-encoding", "a string that is not quoted"))?;
                self.keep(&inner)
            }
            b'T' => {
                let len = self.input.i32()?;
                let negative = || self.input.broken("number-range", format!("a string of {len} bytes"));
                let len = u64::try_from(len).map_err(|_| negative())?;
                self.input.span(len)?
            }
            _ => {
                let len = self.input.u8()?;
                self.input.span(len.into())?
            }
        };
        let is_text = std::str::from_utf8(self.slice(span)).is_ok();
        self.push(if is_text { Value::Text(span) } else { Value::Bytes(span) })
    }

    /// The bytes of a span: of the pickle, or of what was decoded.
    fn slice(&self, span: Span) -> &[u8] {
        let (start, len) = (span.start as usize, span.len as usize);
        match start.checked_sub(self.input_len) {
            None => self.bytes.get(start..start + len).unwrap_or_default(),
            Some(start) => self.extra.get(start..start + len).unwrap_or_default(),
        }
    }

    /// Keeps decoded bytes: never longer than what they were decoded from.
    fn keep(&mut self, bytes: &[u8]) -> Span {
        let start = u32::try_from(self.input_len + self.extra.len()).unwrap_or(u32::MAX);
        self.extra.extend_from_slice(bytes);
        Span { start, len: u32::try_from(bytes.len()).unwrap_or(0) }
    }

    // ---- containers

    fn tuple(&mut self, opcode: u8) -> Read<()> {
        let items = match opcode {
            b't' => self.pop_mark()?,
            fixed => self.pop_many(usize::from(fixed - 0x84))?,
        };
        if items.is_empty() {
            return self.push_id(EMPTY);
        }
        let span = self.store(&items)?;
        self.push(Value::Tuple(span))
    }

    fn pop_many(&mut self, count: usize) -> Read<Vec<Id>> {
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        Ok(items)
    }

    fn store(&mut self, items: &[Id]) -> Read<Span> {
        self.count(items.len())?;
        let start = u32::try_from(self.arena.items.len()).unwrap_or(u32::MAX);
        self.arena.items.extend_from_slice(items);
        Ok(Span { start, len: u32::try_from(items.len()).unwrap_or(0) })
    }

    fn frozen_set(&mut self) -> Read<()> {
        let items = self.pop_mark()?;
        let span = self.store(&items)?;
        self.push(Value::FrozenSet(span))
    }

    fn new_list(&mut self, opcode: u8, kind: fn(u32) -> Value) -> Read<()> {
        let items = if opcode == b'l' { self.pop_mark()? } else { Vec::new() };
        self.count(items.len())?;
        let at = self.add_list(items)?;
        self.push(kind(at))
    }

    fn add_list(&mut self, items: Vec<Id>) -> Read<u32> {
        self.demand_room_for_container()?;
        self.arena.lists.push(items);
        Ok(u32::try_from(self.arena.lists.len() - 1).unwrap_or(u32::MAX))
    }

    fn add_dict(&mut self, pairs: Vec<(Id, Id)>) -> Read<u32> {
        self.demand_room_for_container()?;
        self.arena.dicts.push(pairs);
        Ok(u32::try_from(self.arena.dicts.len() - 1).unwrap_or(u32::MAX))
    }

    fn new_dict(&mut self, opcode: u8) -> Read<()> {
        let pairs = if opcode == b'd' { self.pop_pairs()? } else { Vec::new() };
        self.count(pairs.len() * 2)?;
        let at = self.add_dict(pairs)?;
        self.push(Value::Dict(at))
    }

    fn pop_pairs(&mut self) -> Read<Vec<(Id, Id)>> {
        let items = self.pop_mark()?;
        let pairs = items.chunks_exact(2).filter_map(|pair| Some((*pair.first()?, *pair.last()?)));
        match items.len() % 2 {
            0 => Ok(pairs.collect()),
            _ => Err(self.input.broken("stack-shape", format!("{} values where pairs must be", items.len()))),
        }
    }

    fn append(&mut self, opcode: u8) -> Read<()> {
        let items = if opcode == b'a' { vec![self.pop()?] } else { self.pop_mark()? };
        self.count(items.len())?;
        let target = self.top()?;
        let list = match (self.arena.get(target), opcode) {
            (Value::Set(list), 0x90) => list,
            (Value::List(list), b'a' | b'e') => list,
            (Value::Call(call), _) => self.list_of_call(call)?,
            _ => return Err(self.input.broken("append-target", "items are appended to what is no list")),
        };
        if let Some(list) = self.arena.lists.get_mut(list as usize) {
            list.extend(items);
        }
        Ok(())
    }

    fn set_items(&mut self, opcode: u8) -> Read<()> {
        let pairs = match opcode {
            b'u' => self.pop_pairs()?,
            _ => {
                let pair = self.pop_many(2)?;
                pair.first().copied().zip(pair.last().copied()).into_iter().collect()
            }
        };
        self.count(pairs.len() * 2)?;
        let target = self.top()?;
        let dict = match self.arena.get(target) {
            Value::Dict(dict) => dict,
            Value::Call(call) => self.dict_of_call(call)?,
            _ => return Err(self.input.broken("setitem-target", "items are set on what is no dictionary")),
        };
        if let Some(dict) = self.arena.dicts.get_mut(dict as usize) {
            dict.extend(pairs);
        }
        Ok(())
    }

    fn list_of_call(&mut self, call: u32) -> Read<u32> {
        if let Some(list) = self.arena.calls.get(call as usize).and_then(|call| call.list) {
            return Ok(list);
        }
        let list = self.add_list(Vec::new())?;
        if let Some(call) = self.arena.calls.get_mut(call as usize) {
            call.list = Some(list);
        }
        Ok(list)
    }

    fn dict_of_call(&mut self, call: u32) -> Read<u32> {
        if let Some(dict) = self.arena.calls.get(call as usize).and_then(|call| call.dict) {
            return Ok(dict);
        }
        let dict = self.add_dict(Vec::new())?;
        if let Some(call) = self.arena.calls.get_mut(call as usize) {
            call.dict = Some(dict);
        }
        Ok(dict)
    }

    // ---- the memo

    fn put(&mut self, opcode: u8) -> Read<()> {
        let slot = match opcode {
            b'p' => self.slot()?,
            b'q' => self.input.u8()?.into(),
            b'r' => self.input.u32()?.into(),
            _ => self.memo.len() as u64,
        };
        if slot > self.input_len as u64 + MEMO_SLACK {
            return Err(self
                .input
                .hostile("memo-index", format!("memo slot {slot} in a pickle of {} bytes", self.input_len)));
        }
        if self.memo.len() >= MAX_MEMO {
            return Err(self.too_many("memo entries", MAX_MEMO));
        }
        let top = self.top()?;
        self.memo.insert(slot, top);
        Ok(())
    }

    fn get(&mut self, opcode: u8) -> Read<()> {
        let slot = match opcode {
            b'g' => self.slot()?,
            b'h' => self.input.u8()?.into(),
            _ => self.input.u32()?.into(),
        };
        match self.memo.get(&slot) {
            Some(&id) => self.push_id(id),
            None => Err(self.input.broken("memo-missing", format!("memo slot {slot} was never set"))),
        }
    }

    fn slot(&mut self) -> Read<u64> {
        let line = self.input.line()?;
        let slot = std::str::from_utf8(self.slice(line)).ok().and_then(|text| text.trim().parse().ok());
        slot.ok_or_else(|| self.input.broken("number-range", "a memo slot that is no number"))
    }

    // ---- names and calls

    fn global(&mut self, opcode: u8) -> Read<()> {
        if opcode == b'c' {
            let (module, name) = (self.input.line()?, self.input.line()?);
            return self.push_global(module, name, "GLOBAL");
        }
        let (name, module) = (self.pop()?, self.pop()?);
        match (self.arena.get(module), self.arena.get(name)) {
            (Value::Text(module), Value::Text(name)) => self.push_global(module, name, "STACK_GLOBAL"),
            _ => Err(self.input.hostile("global-not-string", "the name of a global is no text")),
        }
    }

    fn push_global(&mut self, module: Span, name: Span, opcode: &'static str) -> Read<()> {
        if [module, name].iter().any(|&span| std::str::from_utf8(self.slice(span)).is_err()) {
            return Err(self.not_text());
        }
        let at = u32::try_from(self.arena.globals.len()).unwrap_or(u32::MAX);
        let id = self.add(Value::Global(at))?;
        self.arena.globals.push(Global { module, name, offset: self.offset(), opcode, id });
        self.push_id(id)
    }

    fn offset(&self) -> u32 {
        u32::try_from(self.input.opcode_at).unwrap_or(u32::MAX)
    }

    fn call(&mut self, opcode: u8) -> Read<()> {
        let (function, arguments, opcode) = match opcode {
            b'R' => self.pop_call("REDUCE")?,
            0x81 => self.pop_call("NEWOBJ")?,
            0x92 => {
                let keywords = self.pop()?;
                let (function, positional, opcode) = self.pop_call("NEWOBJ_EX")?;
                let span = self.store(&[positional, keywords])?;
                (function, self.add(Value::Tuple(span))?, opcode)
            }
            b'i' => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                let arguments = self.pop_mark()?;
                self.push_global(module, name, "INST")?;
                (self.pop()?, self.add_tuple(&arguments)?, "INST")
            }
            _ => {
                let mut arguments = self.pop_mark()?;
                if arguments.is_empty() {
                    return Err(self.input.broken("stack-underflow", "OBJ without a class"));
                }
                (arguments.remove(0), self.add_tuple(&arguments)?, "OBJ")
            }
        };
        self.push_call(function, arguments, opcode)
    }

    fn add_tuple(&mut self, items: &[Id]) -> Read<Id> {
        let span = self.store(items)?;
        self.add(Value::Tuple(span))
    }

    fn pop_call(&mut self, opcode: &'static str) -> Read<(Id, Id, &'static str)> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        Ok((function, arguments, opcode))
    }

    fn push_call(&mut self, function: Id, arguments: Id, opcode: &'static str) -> Read<()> {
        if !matches!(self.arena.get(function), Value::Global(_) | Value::Call(_)) {
            return Err(self.input.broken("argument-type", "what is called is neither a name nor made by a call"));
        }
        if !matches!(self.arena.get(arguments), Value::Tuple(_)) {
            return Err(self.input.broken("argument-type", "the arguments of a call are no tuple"));
        }
        self.demand_room_for_container()?;
        let at = u32::try_from(self.arena.calls.len()).unwrap_or(u32::MAX);
        let id = self.add(Value::Call(at))?;
        let offset = self.offset();
        self.arena.calls.push(Call { function, arguments, state: None, list: None, dict: None, offset, opcode, id });
        self.push_id(id)
    }

    fn build(&mut self) -> Read<()> {
        let (state, target) = (self.pop()?, self.top()?);
        let Value::Call(call) = self.arena.get(target) else {
            return Err(self.input.broken("build-target", "a state is given to what no call has made"));
        };
        let Some(call) = self.arena.calls.get_mut(call as usize) else { return Ok(()) };
        if call.state.replace(state).is_some() {
            return Err(self.input.hostile("build-target", "a state is given twice"));
        }
        Ok(())
    }

    fn persistent(&mut self, opcode: u8) -> Read<()> {
        if opcode == b'Q' {
            let id = self.pop()?;
            return self.push(Value::Persistent(id));
        }
        let line = self.input.line()?;
        std::str::from_utf8(self.slice(line)).map_err(|_| self.not_text())?;
        let id = self.add(Value::Text(line))?;
        self.push(Value::Persistent(id))
    }
}
