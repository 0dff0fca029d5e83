//! The machine: a stack, marks, a memo, and one step for each opcode of the protocols 0 to 5.
//!
//! Where Python would import or call, it notes a name or a call. What is wrong is noted too, and where some unpickler of Python
//! goes on, so does the machine: a name must not be hidden behind a fault. Nothing recurses, and every growing list has a limit;
//! beyond it values are forgotten, names are not. `literals` reads plain values, `containers` fills lists and dictionaries.

use std::collections::HashMap;

use super::input::{Input, Read};
use super::{
    Arena, Broken, Call, Danger, Global, Id, MAX_CONTAINERS, MAX_GLOBALS, MAX_ITEMS, MAX_MEMO, MAX_STACK, MAX_VALUES,
    NO_OFFSET, Ran, Span, Value, globals, text,
};
use crate::finding::Severity;

/// A memo slot beyond this many times the pickle's length is no honest writer's.
const MEMO_SLACK: u64 = 1 << 16;
/// Above the limit of values this many are kept, the newest.
const NEWEST: usize = 1 << 20;

/// Runs the pickle that `bytes` begin with, to its end or to where no unpickler goes on. They are the first of `whole` bytes.
pub fn run(bytes: Vec<u8>, whole: u64) -> Ran {
    run_as(bytes, whole, false)
}

/// The same as Python's unpickler in C runs a file: where a value crosses the end of its frame, what is left of the frame is lost to
/// it, and it sees other names. Worth asking only where there is a fault of a frame.
pub fn run_skipping(bytes: Vec<u8>, whole: u64) -> Ran {
    run_as(bytes, whole, true)
}

fn run_as(bytes: Vec<u8>, whole: u64, skips: bool) -> Ran {
    let mut machine = Machine::new(&bytes, whole, skips);
    let done = machine.run();
    let stopped = done.is_ok();
    let result = done.map_err(|broken| machine.input.note(broken)).ok();
    let Machine { mut arena, input, extra, protocol, .. } = machine;
    let Input { at: end, wants, faults, .. } = input;
    let result = result.filter(|_| !faults.iter().any(Broken::blocks));
    (arena.bytes, arena.extra) = (bytes, extra);
    Ran { arena, result, end, wants, stopped, protocol, faults }
}

/// Values that exist once.
const NONE: Id = 0;
const TRUE: Id = 1;
const FALSE: Id = 2;
pub(super) const EMPTY: Id = 3;
const UNKNOWN: Id = 4;

pub(super) struct Machine<'a> {
    pub(super) input: Input<'a>,
    pub(super) arena: Arena,
    stack: Vec<Id>,
    marks: Vec<usize>,
    /// Whether the lower part of the stack was forgotten.
    bottomless: bool,
    memo: HashMap<u64, Id>,
    /// Slots of more than 64 bits, by their decimal digits.
    wide_memo: HashMap<Vec<u8>, Id>,
    /// Text that had to be decoded; it follows the pickle in the arena.
    pub(super) extra: Vec<u8>,
    items: usize,
    /// Values that took the place of older ones.
    replaced: usize,
    protocol: u8,
    pub(super) bytes: &'a [u8],
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8], whole: u64, skips: bool) -> Machine<'a> {
        let values =
            vec![Value::None, Value::Bool(true), Value::Bool(false), Value::Tuple(Span::default()), Value::Unknown];
        let offsets = vec![NO_OFFSET; values.len()];
        Machine {
            input: Input::new(bytes, whole, skips),
            arena: Arena { values, offsets, ..Arena::default() },
            stack: Vec::new(),
            marks: Vec::new(),
            bottomless: false,
            memo: HashMap::new(),
            wide_memo: HashMap::new(),
            extra: Vec::new(),
            items: 0,
            replaced: 0,
            protocol: 0,
            bytes,
        }
    }

    fn run(&mut self) -> Read<Id> {
        loop {
            match self.input.opcode()? {
                b'.' => {
                    self.input.stop();
                    return self.pop();
                }
                opcode => self.step(opcode)?,
            }
        }
    }

    fn step(&mut self, opcode: u8) -> Read<()> {
        match opcode {
            0x80 => self.protocol()?,
            b'N' => self.push_id(NONE),
            0x88 | 0x89 => self.push_truth(opcode == 0x88),
            b')' => self.push_id(EMPTY),
            b'J' | b'K' | b'M' | b'I' | b'L' | 0x8a | 0x8b => self.integer(opcode)?,
            b'F' | b'G' => self.float(opcode)?,
            b'X' | 0x8c | 0x8d | b'V' => self.unicode(opcode)?,
            b'B' | b'C' | 0x8e | 0x96 => self.byte_string(opcode)?,
            b'S' | b'T' | b'U' => self.old_string(opcode)?,
            b'(' => self.mark(),
            b'0' => self.pop_or_mark()?,
            b'1' => self.pop_mark().map(drop)?,
            b'2' => self.top().map(|top| self.push_id(top))?,
            b't' | 0x85 | 0x86 | 0x87 => self.tuple(opcode)?,
            b']' | b'l' => self.new_list(opcode, Value::List)?,
            0x8f => self.new_list(opcode, Value::Set)?,
            0x91 => self.frozen_set()?,
            b'}' | b'd' => self.new_dict(opcode)?,
            b'a' | b'e' | 0x90 => self.append(opcode)?,
            b's' | b'u' => self.set_items(opcode)?,
            b'p' | b'q' | b'r' | 0x94 => self.put(opcode)?,
            b'g' | b'h' | b'j' => self.get(opcode)?,
            b'c' | 0x93 => self.global(opcode)?,
            b'R' | b'o' | b'i' | 0x81 | 0x92 => self.call(opcode)?,
            b'b' => self.build()?,
            b'P' | b'Q' => self.persistent(opcode)?,
            0x95 => self.input.u64().map(|len| self.input.frame(len))?,
            0x82..=0x84 => self.extension(opcode)?,
            0x97 => self.out_of_band(),
            // It makes the value on top one that cannot be written to.
            0x98 => self.top().map(|_| self.note("out-of-band", "a buffer that is not in the file"))?,
            other => return Err(self.input.broken("opcode", format!("the byte 0x{other:02x} is no opcode"))),
        }
        Ok(())
    }

    fn protocol(&mut self) -> Read<()> {
        self.protocol = self.input.u8()?;
        if self.input.opcode_at != 0 {
            self.note_hostile("proto-misplaced", "PROTO stands within the pickle");
        }
        if self.protocol > 5 {
            self.note("proto-version", format!("protocol {}; 5 is the highest known", self.protocol));
        }
        Ok(())
    }

    pub(super) fn note(&mut self, rule: &'static str, what: impl Into<String>) {
        self.input.note(self.input.broken(rule, what));
    }

    pub(super) fn note_hostile(&mut self, rule: &'static str, what: impl Into<String>) {
        self.input.note(self.input.hostile(rule, what));
    }

    pub(super) fn note_limit(&mut self, what: &str, limit: usize) {
        self.note_hostile_as("resource-limit", || format!("more than {limit} {what}"));
    }

    /// The same as `note_hostile`, of what may be met with every opcode.
    fn note_hostile_as(&mut self, rule: &'static str, what: impl FnOnce() -> String) {
        if !self.input.knows(rule, Severity::Suspicious) {
            self.note_hostile(rule, what());
        }
    }

    // ---- the stack

    pub(super) fn push(&mut self, value: Value) {
        let id = self.add(value);
        self.push_id(id);
    }

    pub(super) fn add(&mut self, value: Value) -> Id {
        let offset = self.offset();
        let mut at = self.arena.values.len();
        if at < MAX_VALUES {
            self.arena.values.push(value);
            self.arena.offsets.push(offset);
        } else {
            self.note_limit("values", MAX_VALUES);
            at = MAX_VALUES - NEWEST + self.replaced % NEWEST;
            self.replaced += 1;
            if let (Some(old), Some(old_offset)) = (self.arena.values.get_mut(at), self.arena.offsets.get_mut(at)) {
                (*old, *old_offset) = (value, offset);
            }
        }
        Id::try_from(at).unwrap_or(UNKNOWN)
    }

    pub(super) fn push_id(&mut self, id: Id) {
        if self.stack.len() >= MAX_STACK {
            self.note_limit("values on the stack", MAX_STACK);
            let forgotten = MAX_STACK / 2;
            self.stack.drain(..forgotten);
            self.marks.iter_mut().for_each(|mark| *mark = mark.saturating_sub(forgotten));
            self.bottomless = true;
        }
        self.stack.push(id);
    }

    pub(super) fn push_unknown(&mut self) {
        self.push_id(UNKNOWN);
    }

    pub(super) fn push_truth(&mut self, truth: bool) {
        self.push_id(if truth { TRUE } else { FALSE });
    }

    /// The value on top, above the last mark.
    pub(super) fn top(&self) -> Read<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(top) if self.stack.len() > floor => Ok(*top),
            _ if self.bottomless && floor == 0 => Ok(UNKNOWN),
            _ => Err(self.input.broken("stack-underflow", "an opcode takes a value that is not there")),
        }
    }

    pub(super) fn pop(&mut self) -> Read<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn mark(&mut self) {
        if self.marks.len() >= MAX_STACK {
            self.note_limit("marks", MAX_STACK);
            self.marks.drain(..MAX_STACK / 2);
            self.bottomless = true;
        }
        self.marks.push(self.stack.len());
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
    pub(super) fn pop_mark(&mut self) -> Read<Vec<Id>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark.min(self.stack.len()))),
            None if self.bottomless => Ok(std::mem::take(&mut self.stack)),
            None => Err(self.input.broken("mark-missing", "an opcode looks for a mark that is not there")),
        }
    }

    /// Counts items of containers. Those above the limit are not kept.
    pub(super) fn count(&mut self, items: usize) -> bool {
        let fits = self.items.saturating_add(items) <= MAX_ITEMS;
        if fits {
            self.items += items;
        } else {
            self.note_limit("items", MAX_ITEMS);
        }
        fits
    }

    pub(super) fn has_room(&mut self) -> bool {
        let containers = self.arena.lists.len() + self.arena.dicts.len() + self.arena.calls.len();
        if containers >= MAX_CONTAINERS {
            self.note_limit("containers", MAX_CONTAINERS);
        }
        containers < MAX_CONTAINERS
    }

    // ---- the memo

    fn put(&mut self, opcode: u8) -> Read<()> {
        let used = self.memo.len() + self.wide_memo.len();
        let slot = match opcode {
            b'p' => self.slot()?,
            b'q' => Ok(self.input.u8()?.into()),
            b'r' => Ok(self.input.u32()?.into()),
            _ => Ok(used as u64),
        };
        let top = self.top()?;
        let len = self.input.whole;
        if !slot.as_ref().is_ok_and(|slot| *slot <= len.saturating_add(MEMO_SLACK)) {
            let shown = slot.as_ref().map_or("of more than 64 bits".to_owned(), u64::to_string);
            self.note_hostile_as("memo-index", || format!("memo slot {shown} in a pickle of {len} bytes"));
        }
        if used >= MAX_MEMO {
            self.note_limit("memo entries", MAX_MEMO);
            return Ok(());
        }
        match slot {
            Ok(slot) => self.memo.insert(slot, top),
            Err(digits) => self.wide_memo.insert(digits, top),
        };
        Ok(())
    }

    fn get(&mut self, opcode: u8) -> Read<()> {
        let slot = match opcode {
            b'g' => self.slot()?,
            b'h' => Ok(self.input.u8()?.into()),
            _ => Ok(self.input.u32()?.into()),
        };
        let found = match &slot {
            Ok(slot) => self.memo.get(slot),
            Err(digits) => self.wide_memo.get(digits),
        };
        let found = found.copied();
        if found.is_none() && !self.input.knows("memo-missing", Severity::Malformed) {
            // An unpickler that reads several pickles may keep its memo.
            let shown = slot.map_or("of more than 64 bits".to_owned(), |slot| slot.to_string());
            self.note("memo-missing", format!("memo slot {shown} was never set"));
        }
        self.push_id(found.unwrap_or(UNKNOWN));
        Ok(())
    }

    /// A slot in decimal; its digits where it has more than 64 bits.
    fn slot(&mut self) -> Read<Result<u64, Vec<u8>>> {
        let line = self.input.line()?;
        let Some((false, digits)) = text::slot(self.slice(line)) else {
            return Err(self.input.broken("number-range", "a memo slot that is none"));
        };
        let small = std::str::from_utf8(&digits).ok().and_then(|digits| format!("0{digits}").parse().ok());
        Ok(small.ok_or(digits))
    }

    // ---- names and calls

    fn global(&mut self, opcode: u8) -> Read<()> {
        if opcode == b'c' {
            let (module, name) = (self.name()?, self.name()?);
            self.push_global(module, name, "GLOBAL");
            return Ok(());
        }
        let (name, module) = (self.pop()?, self.pop()?);
        let values = [module, name].map(|id| self.arena.get(id));
        if !matches!(values, [Value::Text(_), Value::Text(_)]) {
            self.note_hostile("global-not-string", "the name of a global is no text that stands in the pickle");
        }
        match values.map(|value| self.text(value)) {
            [Some(module), Some(name)] => self.push_global(module, name, "STACK_GLOBAL"),
            _ => self.push_unknown(),
        }
        Ok(())
    }

    /// What some unpickler takes for text.
    fn text(&mut self, value: Value) -> Option<Span> {
        match value {
            Value::Text(span) => Some(span),
            Value::Bytes(span) => self.latin1(span),
            _ => None,
        }
    }

    /// A line that is a name.
    fn name(&mut self) -> Read<Span> {
        let line = self.input.line()?;
        match std::str::from_utf8(self.slice(line)) {
            Ok(_) => Ok(line),
            Err(_) => Err(self.input.broken("text-encoding", "a name that is not UTF-8")),
        }
    }

    fn push_global(&mut self, module: Span, name: Span, opcode: &'static str) {
        let known = self.arena.globals.len();
        if known >= MAX_GLOBALS {
            self.note_limit("globals", MAX_GLOBALS);
            if known >= 2 * MAX_GLOBALS || self.danger(module, name) != Danger::Dangerous {
                return self.push_unknown();
            }
        }
        let id = self.add(Value::Global(u32::try_from(known).unwrap_or(u32::MAX)));
        self.arena.globals.push(Global { module, name, offset: self.offset(), opcode, id });
        self.push_id(id);
    }

    fn danger(&self, module: Span, name: Span) -> Danger {
        let text = |span| std::str::from_utf8(self.slice(span)).unwrap_or_default();
        globals::danger(text(module), text(name))
    }

    pub(super) fn offset(&self) -> u32 {
        u32::try_from(self.input.opcode_at).unwrap_or(NO_OFFSET)
    }

    fn extension(&mut self, opcode: u8) -> Read<()> {
        let code = match opcode {
            0x82 => self.input.u8()?.into(),
            0x83 => self.input.u16()?.into(),
            _ => self.input.i32()?,
        };
        self.note_hostile_as("extension", || format!("extension code {code}: a name hidden in a registry"));
        self.push_unknown();
        Ok(())
    }

    fn out_of_band(&mut self) {
        self.note("out-of-band", "a buffer that is not in the file");
        self.push_unknown();
    }

    fn call(&mut self, opcode: u8) -> Read<()> {
        let (function, arguments, opcode) = match opcode {
            b'R' => self.pop_call("REDUCE")?,
            0x81 => self.pop_call("NEWOBJ")?,
            0x92 => {
                let keywords = self.pop()?;
                let (function, positional, opcode) = self.pop_call("NEWOBJ_EX")?;
                (function, self.add_tuple(&[positional, keywords]), opcode)
            }
            b'i' => {
                let (module, name) = (self.name()?, self.name()?);
                // One of Python's unpicklers imports before it looks for the mark.
                self.push_global(module, name, "INST");
                let class = self.pop()?;
                let arguments = self.pop_mark()?;
                (class, self.add_tuple(&arguments), "INST")
            }
            _ => {
                let arguments = self.pop_mark()?;
                let Some((class, arguments)) = arguments.split_first() else {
                    return Err(self.input.broken("stack-underflow", "OBJ without a class"));
                };
                (*class, self.add_tuple(arguments), "OBJ")
            }
        };
        self.push_call(function, arguments, opcode);
        Ok(())
    }

    fn pop_call(&mut self, opcode: &'static str) -> Read<(Id, Id, &'static str)> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        Ok((function, arguments, opcode))
    }

    fn push_call(&mut self, function: Id, arguments: Id, opcode: &'static str) {
        let callable = matches!(
            self.arena.get(function),
            Value::Global(_) | Value::Call(_) | Value::Persistent(_) | Value::Unknown
        );
        if !callable {
            self.note("argument-type", "what is called is neither a name nor made by a call");
        }
        if !matches!(self.arena.get(arguments), Value::Tuple(_)) {
            self.note("argument-type", "the arguments of a call are no tuple");
        }
        if !self.has_room() {
            return self.push_unknown();
        }
        let id = self.add(Value::Call(u32::try_from(self.arena.calls.len()).unwrap_or(u32::MAX)));
        let offset = self.offset();
        let (state, list, dict) = (None, None, None);
        let (state_offset, is_rebuilt) = (0, false);
        self.arena.calls.push(Call {
            function,
            arguments,
            state,
            state_offset,
            is_rebuilt,
            list,
            dict,
            offset,
            opcode,
            id,
        });
        self.push_id(id);
    }

    fn build(&mut self) -> Read<()> {
        let (state, target) = (self.pop()?, self.top()?);
        match self.arena.get(target) {
            Value::Call(at) => {
                let now = self.offset();
                let Some(call) = self.arena.calls.get_mut(at as usize) else { return Ok(()) };
                call.state_offset = now;
                match call.state {
                    None => call.state = Some(state),
                    // Both stay in view: as with a state and slots, what is in either hangs on the object.
                    Some(first) => {
                        call.is_rebuilt = true;
                        let both = self.add_tuple(&[first, state]);
                        if let Some(call) = self.arena.calls.get_mut(at as usize) {
                            call.state = Some(both);
                        }
                    }
                }
            }
            Value::Global(_) => {
                self.note_hostile("build-target", "a state is given to a name: it would change what the name means");
            }
            Value::Unknown => {}
            _ => self.note("build-target", "a state is given to what no call has made"),
        }
        Ok(())
    }

    fn persistent(&mut self, opcode: u8) -> Read<()> {
        let id = match opcode {
            b'Q' => self.pop()?,
            _ => {
                let line = self.name()?;
                self.add(Value::Text(line))
            }
        };
        self.push(Value::Persistent(id));
        Ok(())
    }
}
