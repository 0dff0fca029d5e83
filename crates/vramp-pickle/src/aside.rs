//! What of an object is set aside by name: why, and how many tensors a load or a conversion would lack because of it.
//!
//! Plain data. Whether a loss is refused is the caller's decision.

/// How the reason of a module that was pickled as a whole begins.
pub const WHOLE_MODEL: &str = "a whole model, torch.save(model)";

/// What it means that something is passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Loss {
    /// It is plain data, or it was agreed to.
    #[default]
    None,
    /// A conversion to safetensors would lack it. The word says what is lost.
    OfConvert(&'static str),
    /// A load would lack it too.
    OfLoad(&'static str),
}

/// Something that was passed over.
#[derive(Debug, Clone)]
pub struct Aside {
    /// The keys that lead to it.
    pub name: String,
    /// What it is, and so why.
    pub why: String,
    /// Whether it is a warning.
    pub tell: bool,
    /// Tensors that are lost with it.
    pub tensors: u64,
    /// What that means.
    pub loss: Loss,
    /// The container that holds it under a text, for an array of numbers.
    pub(crate) array: Option<Array>,
}

impl Aside {
    pub(crate) fn new(name: impl Into<String>, why: impl Into<String>, tensors: u64, loss: Loss) -> Aside {
        Aside { name: name.into(), why: why.into(), tell: false, tensors, loss, array: None }
    }

    /// Whether it is a module that was pickled as a whole.
    pub fn is_whole_model(&self) -> bool {
        self.why.starts_with(WHOLE_MODEL)
    }

    /// Whether it is the object itself.
    pub fn is_root(&self) -> bool {
        self.name == ROOT
    }

    /// Whether it is an object of an unknown class.
    pub(crate) fn is_unknown(&self) -> bool {
        self.why.starts_with(UNKNOWN) || self.is_whole_model()
    }
}

/// Where an array of numbers lies, by its container.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Array {
    pub(crate) parent: u32,
    pub(crate) is_matrix: bool,
}

/// What an object loses that is set aside.
pub(crate) struct Lost {
    pub(crate) tensors: u64,
    pub(crate) loss: Loss,
}

pub(crate) const NOTHING: Lost = Lost { tensors: 0, loss: Loss::None };
/// Words for what is lost.
pub(crate) const IN_OBJECT: &str = "tensor in an object that is not read";
pub(crate) const BESIDE: &str = "tensor that hangs on another value";
pub(crate) const OF_TYPE: &str = "tensor of a type that safetensors lacks";
pub(crate) const ARRAY: &str = "NumPy array of weights";

impl Lost {
    pub(crate) fn load(tensors: u64, word: &'static str) -> Lost {
        Lost { tensors, loss: if tensors > 0 { Loss::OfLoad(word) } else { Loss::None } }
    }

    pub(crate) fn convert(tensors: u64, word: &'static str) -> Lost {
        Lost { tensors, loss: if tensors > 0 { Loss::OfConvert(word) } else { Loss::None } }
    }
}

/// What the object itself is called, and how the reason of an unknown object begins.
pub(crate) const ROOT: &str = "the object itself";

pub(crate) const UNKNOWN: &str = "an unknown object";
