//! The names of a checkpoint as a tree, with numbered parts that are alike (the layers of a transformer) shown once.
//!
//! Pure text. It does not recurse deeper than names have dots, and folds names that have absurdly many.

use std::collections::BTreeMap;

use super::listing::Listed;
use super::text::{self, DIM};

/// Deeper parts of a name stay together: a header may hold a name of a million dots.
const MOST_LEVELS: usize = 32;

#[derive(Default)]
struct Node<'a> {
    tensor: Option<&'a Listed>,
    children: BTreeMap<Part<'a>, Node<'a>>,
}

/// One part of a name; numbers sort by value and before words.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part<'a> {
    Number(u64, &'a str),
    Word(&'a str),
}

impl<'a> Part<'a> {
    fn of(text: &'a str) -> Part<'a> {
        text.parse().map_or(Part::Word(text), |number| Part::Number(number, text))
    }

    fn text(self) -> &'a str {
        match self {
            Part::Number(_, text) | Part::Word(text) => text,
        }
    }
}

/// The tree of all tensors.
pub(crate) fn text(listed: &[Listed]) -> String {
    let mut root = Node::default();
    for tensor in listed {
        let mut node = &mut root;
        for part in tensor.name.splitn(MOST_LEVELS, '.') {
            node = node.children.entry(Part::of(part)).or_default();
        }
        node.tensor = Some(tensor);
    }
    let mut out = String::new();
    root.draw("", &mut out);
    out
}

impl Node<'_> {
    fn draw(&self, indent: &str, out: &mut String) {
        let groups = self.groups();
        for (index, group) in groups.iter().enumerate() {
            let last = index + 1 == groups.len();
            let (branch, below) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let (label, node) = group.joined();
            out.push_str(&format!("{}{label}{}\n", text::styled(DIM, format!("{indent}{branch}")), node.facts(group)));
            node.draw(&format!("{indent}{below}"), out);
        }
    }

    /// Children, neighbours with numbers and equal contents together.
    fn groups(&self) -> Vec<Group<'_>> {
        let mut groups: Vec<Group<'_>> = Vec::new();
        for (&part, node) in &self.children {
            let signature = node.signature();
            match groups.last_mut() {
                Some(group) if group.takes(part, &signature) => {
                    group.last = part;
                    group.count += 1;
                }
                _ => groups.push(Group { first: part, last: part, count: 1, node, signature }),
            }
        }
        groups
    }

    /// Types and shapes of everything below, without the names above: equal for layers that are alike.
    fn signature(&self) -> String {
        let mut out = self.tensor.map(|tensor| format!("{}{:?}", tensor.dtype, tensor.shape)).unwrap_or_default();
        for (part, node) in &self.children {
            out.push_str(&format!("({}:{})", part.text(), node.signature()));
        }
        out
    }

    /// Type, shape and size of a tensor; number and size of what is below otherwise.
    fn facts(&self, group: &Group<'_>) -> String {
        let times = if group.count > 1 { format!("  ({} alike, each:)", group.count) } else { String::new() };
        let own = self.tensor.map(|tensor| {
            let (dtype, shape) = (text::escape(&tensor.dtype), text::shape(&tensor.shape));
            format!("  {dtype} {shape}  {}", text::decimal(tensor.bytes))
        });
        let (tensors, bytes) = self.totals();
        let below = (!self.children.is_empty())
            .then(|| format!("  {}, {}", text::plural(tensors, "tensor"), text::decimal(bytes)));
        text::styled(DIM, format!("{times}{}{}", own.unwrap_or_default(), below.unwrap_or_default()))
    }

    fn totals(&self) -> (u64, u64) {
        let own = self.tensor.map_or((0, 0), |tensor| (1, tensor.bytes));
        self.children.values().map(Node::totals).fold(own, |a, b| (a.0 + b.0, a.1.saturating_add(b.1)))
    }
}

/// Neighbouring children that are alike.
struct Group<'a> {
    first: Part<'a>,
    last: Part<'a>,
    count: usize,
    node: &'a Node<'a>,
    signature: String,
}

impl<'a> Group<'a> {
    fn takes(&self, part: Part<'_>, signature: &str) -> bool {
        let numbers = |a, b| matches!((a, b), (Part::Number(last, _), Part::Number(next, _)) if last + 1 == next);
        numbers(self.last, part) && self.signature == signature
    }

    /// The label, joined with those of only children below, and the node where that ends.
    fn joined(&self) -> (String, &'a Node<'a>) {
        if self.count > 1 {
            let label = format!("{} … {}", text::escape(self.first.text()), text::escape(self.last.text()));
            return (label, self.node);
        }
        let (mut label, mut node) = (text::escape(self.first.text()), self.node);
        while let (None, 1, Some((part, only))) = (node.tensor, node.children.len(), node.children.first_key_value()) {
            label = format!("{label}.{}", text::escape(part.text()));
            node = only;
        }
        (label, node)
    }
}
