//! Sets what is not converted aside by name: why, and how many tensors a load or a conversion would lack because of it.
//!
//! It decides which of NumPy's arrays are weights. Whether a loss is refused is the caller's decision.

use std::collections::HashSet;

use crate::aside::{ARRAY, Array, Aside, BESIDE, IN_OBJECT, Loss, Lost, OF_TYPE, WHOLE_MODEL};
use crate::contained::Count;
use crate::meaning::Wrappers;
use crate::objects::{Key, Meaning, Objects, What};
use crate::pickle::Id;

impl Objects<'_> {
    pub(crate) fn put_aside(&mut self, id: Id, path: u32, why: String, tell: bool, what: What) {
        match what {
            What::Tensor(word) => {
                self.note_state_dict(path);
                self.set_aside(path, why, tell, Lost::load(1, word));
            }
            What::Type => {
                self.note_state_dict(path);
                self.set_aside(path, why, tell, Lost::convert(1, OF_TYPE));
            }
            What::Array { .. } | What::Opaque => {
                let whole = self.module(id).is_some();
                let inside = self.inside(id);
                let why = match (inside, why.split_once(": ")) {
                    (Some(inside), Some((_, class))) if whole => {
                        format!("{WHOLE_MODEL}: {class} with {} in it", inside.words())
                    }
                    (Some(inside), _) => format!("{why} with {} in it", inside.words()),
                    (None, _) => why,
                };
                let tensors = inside.map_or(0, |inside| inside.tensors);
                self.set_aside(path, why, tell || inside.is_some(), Lost::load(tensors, IN_OBJECT));
                if let (What::Array { is_like_weights: true, is_matrix }, Some(parent), Some(aside)) =
                    (what, self.parent_by_text(path), self.aside.last_mut())
                {
                    aside.array = Some(Array { parent, is_matrix });
                }
            }
        }
    }

    /// The container that holds a value under a text.
    fn parent_by_text(&self, path: u32) -> Option<u32> {
        match self.paths.get(path as usize) {
            Some((parent, Key::Of(key))) if self.arena.as_text(*key).is_some() => Some(*parent),
            _ => None,
        }
    }

    pub(crate) fn note_state_dict(&mut self, path: u32) {
        self.state_dicts.extend(self.parent_by_text(path));
    }

    /// Which of NumPy's arrays are weights: matrices of floats that a dictionary holds under a text, and every array of numbers that
    /// lies so beside them or beside tensors. Others are data: states of random generators lie in tuples, records of a training have
    /// one dimension.
    pub(crate) fn find_weights(&mut self) {
        let matrices = self.aside.iter().filter_map(|aside| aside.array).filter(|array| array.is_matrix);
        let state_dicts: HashSet<u32> = self.state_dicts.iter().copied().chain(matrices.map(|it| it.parent)).collect();
        for aside in &mut self.aside {
            if aside.array.is_some_and(|array| state_dicts.contains(&array.parent)) {
                (aside.tensors, aside.loss) = (aside.tensors + 1, Loss::OfLoad(ARRAY));
            }
        }
    }

    pub(crate) fn set_aside(&mut self, path: u32, why: String, tell: bool, lost: Lost) {
        let (name, typed) = self.names(path);
        let name = if path == 0 { typed } else { name };
        self.name_bytes += name.len() + why.len();
        let Lost { tensors, loss } = lost;
        self.aside.push(Aside { name, why, tell, tensors, loss, array: None });
    }

    /// How many tensors are in a value that is not entered, if there are any.
    pub(crate) fn inside(&mut self, id: Id) -> Option<Count> {
        let inner: Vec<Id> = (0..).map_while(|index| self.arena.child(id, index)).collect();
        let holds = inner.iter().any(|inner| self.below.holds(*inner));
        holds.then(|| self.below.count(&inner, &HashSet::new()))
    }

    /// Sets aside the tensors in a value that hangs on `owner` and is no part of the object: attributes by their names, and so on
    /// for what hangs on those.
    pub(crate) fn leave(&mut self, id: Id, path: u32, owner: &str) {
        // An attribute may lead back to what it hangs on.
        let (mut open, mut seen) = (vec![(id, path)], HashSet::new());
        while let Some((id, path)) = open.pop() {
            if !seen.insert(id) || !self.below.holds(id) || self.is_full() {
                continue;
            }
            let Some(attributes) = self.attributes(id) else {
                let count = self.below.count(&[id], &HashSet::new());
                let why = format!("{owner} with {} beside it that cannot be loaded", count.words());
                self.set_aside(path, why, true, Lost::convert(count.tensors, BESIDE));
                continue;
            };
            for (key, value) in attributes {
                if !self.below.holds(value) || self.is_full() {
                    continue;
                }
                let mut wrappers = Wrappers::default();
                let what = match self.meaning(value, &mut wrappers) {
                    Ok(Meaning::Dense(dense)) => format!("a tensor of {} {:?}", dense.kind.name, dense.shape),
                    Ok(Meaning::Aside { why, what: What::Tensor(_) | What::Type, .. }) => why,
                    _ => format!("an object with {} in it", self.below.counted(&[value])),
                };
                let tensors = self.below.count(&[value], &HashSet::new()).tensors;
                let path = self.step(path, Key::Of(key));
                let why = format!("{what}, an attribute of {owner} and not loaded");
                self.set_aside(path, why, true, Lost::convert(tensors, BESIDE));
                open.extend(wrappers.beside.into_iter().map(|beside| (beside, path)));
            }
        }
    }
}
