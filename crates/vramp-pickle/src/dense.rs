//! Dense tensors as a pickle describes them: which functions of PyTorch make a tensor, of which arguments, and whether the numbers
//! of a dense one fit its storage.
//!
//! It knows no names and reads no byte of a storage. What is no dense tensor is named in words.

use crate::finding::{Checked, fault};
use crate::forms::{Dense, Form};
use crate::kinds;
use crate::objects::{Meaning, Objects, What};
use crate::pickle::{Id, Value};

/// Dimensions of a tensor, as PyTorch and NumPy limit them.
const MAX_RANK: usize = 64;

impl Objects<'_> {
    /// The tensor that is made of these arguments.
    pub(crate) fn dense(&self, arguments: &[Id], form: Form) -> Checked<Meaning> {
        let (least, most) = form.arguments();
        if arguments.len() < least || arguments.len() > most {
            let count = arguments.len();
            return fault(
                "argument-shape",
                format!("a tensor is rebuilt from {count} arguments; {least} to {most} are known"),
            );
        }
        let [storage, offset, size, stride, ..] = arguments else {
            return fault("argument-shape", "too few arguments");
        };
        if !matches!(self.arena.get(*storage), Value::Persistent(_)) {
            return fault(
                "argument-type",
                format!("a tensor over {}, which is no storage", self.arena.preview(*storage)),
            );
        }
        // A storage that is wrong has a finding of its own.
        let Some(declared) = self.storages.get(storage) else { return Ok(Meaning::Plain) };
        let kind = match form {
            Form::V3 => {
                let class = arguments.get(6).and_then(|class| self.arena.as_global(*class));
                match class.and_then(|(module, name)| kinds::of_dtype(module, name)) {
                    Some(kind) => kind,
                    None => return fault("dtype-unknown", "a tensor of an unknown element type"),
                }
            }
            _ if declared.kind.is_untyped() => return fault("argument-type", "a tensor without an element type"),
            _ => declared.kind.clone(),
        };
        let offset = self.number(*offset, "the offset of a tensor")?;
        let shape = self.numbers(*size, "the shape of a tensor")?;
        let strides = self.numbers(*stride, "the strides of a tensor")?;
        let (conj, neg) = self.lazy_bits(arguments.get(least))?;
        let dense = Dense { storage: *storage, kind, shape, strides, offset, conj, neg };
        dense.check(declared)?;
        Ok(match dense.kind.dtype {
            None => Meaning::Aside {
                why: format!("a tensor of {} {:?}, which safetensors lacks", dense.kind.name, dense.shape),
                tell: true,
                what: What::Type,
            },
            Some(_) => Meaning::Dense(Box::new(dense)),
        })
    }

    fn lazy_bits(&self, metadata: Option<&Id>) -> Checked<(bool, bool)> {
        let Some(metadata) = metadata.filter(|id| self.arena.get(**id) != Value::None) else {
            return Ok((false, false));
        };
        if self.arena.as_dict(*metadata).is_none() {
            return fault("argument-type", "the metadata of a tensor are no dictionary");
        }
        let bit = |name| match self.arena.member(*metadata, name).map(|id| self.arena.get(id)) {
            None => Ok(false),
            Some(Value::Bool(bit)) => Ok(bit),
            Some(_) => fault("argument-type", format!("the {name} bit of a tensor is no truth value")),
        };
        Ok((bit("conj")?, bit("neg")?))
    }

    /// A number that cannot be negative.
    pub(crate) fn number(&self, id: Id, what: &str) -> Checked<u64> {
        match self.arena.get(id) {
            Value::Int(number) => {
                u64::try_from(number).or_else(|_| fault("number-range", format!("{what} is {number}")))
            }
            Value::Big(_) => fault("number-range", format!("{what} has more than 64 bits")),
            _ => fault("argument-type", format!("{what} is {}", self.arena.preview(id))),
        }
    }

    /// A number for each dimension.
    pub(crate) fn numbers(&self, id: Id, what: &str) -> Checked<Vec<u64>> {
        let inner = match self.arena.as_call(id).map(|call| (self.arena.as_global(call.function), call.arguments)) {
            Some((Some(("torch", "Size")), arguments)) => {
                self.arena.as_tuple(arguments).and_then(|inner| inner.first().copied())
            }
            _ => Some(id),
        };
        let Some(items) = inner.and_then(|inner| self.arena.as_sequence(inner)) else {
            return fault("argument-type", format!("{what} is {}", self.arena.preview(id)));
        };
        if items.len() > MAX_RANK {
            return fault("rank-limit", format!("{what} has {} dimensions, {MAX_RANK} are the most", items.len()));
        }
        items.iter().map(|item| self.number(*item, what)).collect()
    }
}
