//! Warnings about a cast: which weights stay packed, get another name or shape, or have no scale. One line each.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::fault::{counted, quoted};

/// Names that are shown of each kind.
const SHOWN: usize = 3;

/// What is to be said, gathered tensor by tensor.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) packed: Packed,
    /// Dequantised weights.
    pub(super) unpacked: Vec<Unpacked>,
    /// Whether some of them are experts whose rows stay as stored.
    pub(super) stored_rows: bool,
    /// 8-bit floats without a scale.
    pub(super) unscaled: Vec<(usize, Arc<str>)>,
}

/// A weight that is dequantised.
#[derive(Debug)]
pub(super) struct Unpacked {
    pub(super) scheme: &'static str,
    /// Its name before.
    pub(super) was: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) shape: Arc<[usize]>,
}

/// Packed weights that stay so.
#[derive(Debug, Default)]
pub(super) struct Packed {
    schemes: BTreeMap<String, Vec<Arc<str>>>,
    /// Why the first of those stays that might have been dequantised.
    why: Option<(Arc<str>, String)>,
}

impl Packed {
    pub(super) fn add(&mut self, scheme: &str, name: &Arc<str>, why: Option<String>) {
        self.schemes.entry(scheme.to_owned()).or_default().push(Arc::clone(name));
        if self.why.is_none() {
            self.why = why.map(|why| (Arc::clone(name), why));
        }
    }

    fn warning(&self) -> Option<String> {
        let count = self.schemes.values().map(Vec::len).sum();
        let schemes: Vec<String> = self
            .schemes
            .iter()
            .map(|(scheme, names)| format!("{} {scheme} ({})", names.len(), first(names.iter().map(AsRef::as_ref))))
            .collect();
        let why = self
            .why
            .as_ref()
            .map_or(String::new(), |(name, why)| format!("; {} cannot be dequantised: {why}", quoted(name)));
        let stay = if count == 1 { "stays" } else { "stay" };
        let what = counted(count, "packed weight");
        (count > 0).then(|| format!("{what} {stay} quantised, with what belongs to them: {}{why}", schemes.join(", ")))
    }
}

impl Notes {
    /// The lines. `is_used` tells which tensors are used up as scales.
    pub(super) fn warnings(self, is_used: impl Fn(usize) -> bool) -> Vec<String> {
        let unscaled: Vec<&str> =
            self.unscaled.iter().filter(|(at, _)| !is_used(*at)).map(|(_, name)| name.as_ref()).collect();
        let without = (!unscaled.is_empty()).then(|| {
            let what = counted(unscaled.len(), "8-bit float tensor");
            let (is, lies) = if unscaled.len() == 1 { ("is", "it") } else { ("are", "them") };
            let names = first(unscaled.iter().copied());
            format!("{what} {is} converted without scales, since none lie beside {lies}: {names}")
        });
        self.packed.warning().into_iter().chain(self.unpacked()).chain(without).collect()
    }

    fn unpacked(&self) -> Option<String> {
        let one = |Unpacked { scheme, was, name, shape }: &Unpacked| {
            let renamed = if was == name { String::new() } else { format!(" as {}", quoted(name)) };
            format!("{scheme} {}{renamed}, now {shape:?}", quoted(was))
        };
        let shown: Vec<String> = self.unpacked.iter().take(SHOWN).map(one).collect();
        let more = if self.unpacked.len() > SHOWN { "; …" } else { "" };
        let rows = if self.stored_rows {
            "; experts keep the order of their dimensions, [experts, out, in], and their names (transformers wants [experts, in, out])"
        } else {
            ""
        };
        let is = if self.unpacked.len() == 1 { "is" } else { "are" };
        let what = counted(self.unpacked.len(), "packed 4-bit weight");
        (!shown.is_empty()).then(|| format!("{what} {is} dequantised: {}{more}{rows}", shown.join("; ")))
    }
}

/// The first few names, quoted.
fn first<'n>(names: impl ExactSizeIterator<Item = &'n str>) -> String {
    let more = if names.len() > SHOWN { ", …" } else { "" };
    let shown: Vec<String> = names.take(SHOWN).map(quoted).collect();
    format!("{}{more}", shown.join(", "))
}
