//! What a checkpoint holds and does not give: each object by its name, why it is not loaded, and how many tensors that loses.
//!
//! Plain data; it reads nothing and refuses nothing.

use serde::Serialize;

/// Something that was passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Skipped {
    /// The key path that leads to it.
    pub name: String,
    /// What it is, and so why.
    pub why: String,
    /// Tensors that are not loaded because of it; none for plain data.
    #[serde(skip_serializing_if = "is_zero")]
    pub tensors: u64,
    #[serde(skip)]
    pub(crate) loss: Loss,
    /// Whether it is a module that was pickled as a whole.
    #[serde(skip)]
    pub(crate) is_whole_model: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What it means that something is passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Loss {
    /// It is plain data, or the user agreed.
    #[default]
    None,
    /// A result of a conversion would lack it; a load warns. The word says what is lost.
    OfConvert(&'static str),
    /// A load would lack it too.
    OfLoad(&'static str),
}

impl Skipped {
    /// Plain data that is passed over.
    pub fn new(name: impl Into<String>, why: impl Into<String>) -> Skipped {
        Skipped { name: name.into(), why: why.into(), tensors: 0, loss: Loss::None, is_whole_model: false }
    }

    pub(crate) fn losing(self, tensors: u64, loss: Loss) -> Skipped {
        Skipped { tensors, loss, ..self }
    }

    pub(super) fn lost(&self, converts: bool) -> Option<&'static str> {
        match self.loss {
            Loss::OfLoad(word) => Some(word),
            Loss::OfConvert(word) if converts => Some(word),
            _ => None,
        }
    }
}
