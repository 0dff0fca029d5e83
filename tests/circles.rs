//! Files name each other in one direction: no file uses one that uses it, directly or by way of others. Reads the sources of every
//! package. What a parent module does for its children, declaring and re-exporting them, is no use of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Circles that have a reason; ARCHITECTURE.md gives it under "Circles". Each is the set of its files.
const WITH_REASON: &[&[&str]] = &[&[
    "device::cuda",
    "device::cuda::cufile",
    "device::cuda::direct",
    "device::cuda::download",
    "device::cuda::gpu",
    "device::cuda::handles",
    "device::cuda::kernels",
    "device::cuda::memory",
    "device::cuda::pinning",
    "device::cuda::stream",
    "device::direct",
    "device::download",
    "device::null",
    "device::port",
    "device::region",
]];

/// A module: its path within the package, as `load::run`.
type Module = Vec<String>;

/// The sources of one package by module, without comments, unit tests and the bodies of strings.
struct Package(BTreeMap<Module, String>);

impl Package {
    fn read(root: &Path) -> Package {
        let mut modules = BTreeMap::new();
        collect(root, &mut Vec::new(), &mut modules);
        Package(modules)
    }

    /// What each module uses. The crate's root only declares.
    fn uses(&self) -> BTreeMap<&Module, BTreeSet<&Module>> {
        let mut uses = BTreeMap::new();
        for (module, code) in self.0.iter().filter(|(module, _)| !module.is_empty()) {
            let mut named: Vec<Vec<String>> = Vec::new();
            for Statement { public, paths } in statements(code) {
                named.extend(paths.into_iter().filter(|path| !public || is_used_again(code, path)));
            }
            named.extend(inline_paths(code));
            let targets = named.iter().filter_map(|path| self.resolve(module, path, 0));
            uses.insert(module, targets.filter(|target| *target != module && !target.is_empty()).collect());
        }
        uses
    }

    /// The module that holds what `path` names, seen from `module`: through re-exports, to where the item is defined.
    fn resolve(&self, module: &Module, path: &[String], depth: usize) -> Option<&Module> {
        let mut rest = path;
        let mut at: Module = match rest.first()?.as_str() {
            "crate" => Vec::new(),
            "super" | "self" => module.clone(),
            child => [&module[..], &[child.to_owned()]].concat(),
        };
        if matches!(rest[0].as_str(), "crate") {
            rest = &rest[1..];
        } else if matches!(rest[0].as_str(), "super" | "self") {
            while let Some(word @ ("super" | "self")) = rest.first().map(String::as_str) {
                if word == "super" {
                    at.pop();
                }
                rest = &rest[1..];
            }
        } else {
            self.0.get(&at)?;
            rest = &rest[1..];
        }
        while let Some(next) = rest.first() {
            let inner = [&at[..], std::slice::from_ref(next)].concat();
            if !self.0.contains_key(&inner) {
                break;
            }
            at = inner;
            rest = &rest[1..];
        }
        let (found, code) = self.0.get_key_value(&at)?;
        let name = match rest.first() {
            Some(name) if depth < 8 => name,
            _ => return Some(found),
        };
        let reexported = statements(code).flat_map(|it| it.paths).find(|path| path.last() == Some(name));
        match reexported {
            Some(path) if path.len() > 1 => self.resolve(found, &path, depth + 1).or(Some(found)),
            _ => Some(found),
        }
    }
}

fn collect(folder: &Path, module: &mut Module, modules: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let stem = entry.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_test = stem == "tests" || stem == "testing";
        if is_test {
            continue;
        }
        if entry.is_dir() {
            module.push(stem);
            collect(&entry, module, modules);
            module.pop();
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            let own: Module = match stem.as_str() {
                "mod" | "lib" | "main" => module.clone(),
                _ => [&module[..], &[stem]].concat(),
            };
            modules.insert(own, code_of(&fs::read_to_string(&entry).unwrap()));
        }
    }
}

/// The code alone: comments and the unit tests at the end taken away.
fn code_of(text: &str) -> String {
    let text = text.split("\nmod tests {").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// One `use` statement.
struct Statement {
    public: bool,
    paths: Vec<Vec<String>>,
}

fn statements(code: &str) -> impl Iterator<Item = Statement> + '_ {
    code.match_indices("use ").filter_map(|(at, _)| {
        let line = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        let public = line.starts_with("pub");
        if !(line.is_empty() || public) {
            return None;
        }
        let tree = code[at + 4..].split(';').next()?;
        Some(Statement { public, paths: expanded(tree) })
    })
}

/// Whether code that re-exports `path` also uses it itself.
fn is_used_again(code: &str, path: &[String]) -> bool {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let name = path.last().map_or("", String::as_str);
    let body = without_declarations(code);
    let is_whole = |at: usize| !body[..at].ends_with(is_word) && !body[at + name.len()..].starts_with(is_word);
    body.match_indices(name).any(|(at, _)| is_whole(at))
}

/// The code without its `use` and `mod` statements.
fn without_declarations(code: &str) -> String {
    let (mut body, mut declares) = (String::new(), false);
    for line in code.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let first = words.iter().find(|word| !word.starts_with("pub") && !word.ends_with(')'));
        declares |= matches!(first, Some(&("use" | "mod")));
        if !declares {
            body += line;
            body.push('\n');
        }
        declares &= !line.contains(';');
    }
    body
}

/// The paths of a use tree: `a::{b, c::d}` is `a::b` and `a::c::d`; `self` at the end is the module itself.
fn expanded(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some((before, group)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        let mut path: Vec<String> = path.split("::").map(|word| word.trim().to_owned()).collect();
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        return vec![path];
    };
    let group = &group[..group.rfind('}').unwrap_or(group.len())];
    let (mut depth, mut start, mut members) = (0, 0, Vec::new());
    for (at, letter) in group.char_indices().chain([(group.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                members.push(group[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let of = |member: &&str| expanded(&format!("{}{member}", before.trim()));
    members.iter().filter(|member| !member.is_empty()).flat_map(of).collect()
}

/// Paths in the code that begin with `crate`, `super` or `self`.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start).filter(|(at, _)| !code[..*at].ends_with(|it| is_word(it) || it == ':'))
        {
            let rest = &code[at..];
            let end = rest.find(|letter: char| !is_word(letter) && letter != ':').unwrap_or(rest.len());
            let words = rest[..end].split("::").filter(|word| !word.is_empty()).map(str::to_owned);
            let line = code[..at].rsplit('\n').next().unwrap_or_default().trim_start();
            if !(line.starts_with("use ") || line.starts_with("pub")) {
                found.push(words.collect());
            }
        }
    }
    found
}

/// The sets of modules that reach each other.
fn circles<'a>(uses: &BTreeMap<&'a Module, BTreeSet<&'a Module>>) -> Vec<BTreeSet<&'a Module>> {
    let reached = |from: &'a Module| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(module) = open.pop() {
            let next = uses.get(module).into_iter().flatten().filter(|next| seen.insert(**next));
            open.extend(next.copied().collect::<Vec<_>>());
        }
        seen
    };
    let reach: BTreeMap<&Module, BTreeSet<&Module>> = uses.keys().map(|module| (*module, reached(module))).collect();
    let circle = |(module, seen): (&&'a Module, &BTreeSet<&'a Module>)| {
        let back = |other: &&&Module| reach.get(**other).is_some_and(|seen| seen.contains(module));
        seen.contains(module).then(|| seen.iter().filter(back).copied().collect::<BTreeSet<_>>())
    };
    let all: BTreeSet<_> = reach.iter().filter_map(circle).collect();
    all.into_iter().collect()
}

#[test]
fn no_file_uses_one_that_uses_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let packages = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut wrong = Vec::new();
    for package in packages.chain([root.to_owned()]) {
        let sources = Package::read(&package.join("src"));
        assert!(!sources.0.is_empty());
        let uses = sources.uses();
        for circle in circles(&uses) {
            let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            if WITH_REASON.iter().any(|known| names == *known) {
                continue;
            }
            let ties = circle.iter().flat_map(|from| uses[from].intersection(&circle).map(move |to| (from, to)));
            let ties: Vec<_> = ties.map(|(from, to)| format!("  {} uses {}", from.join("::"), to.join("::"))).collect();
            wrong.push(format!("{}: {names:?}\n{}", package.file_name().unwrap().display(), ties.join("\n")));
        }
    }
    assert!(wrong.is_empty(), "files that use each other:\n{}", wrong.join("\n"));
}

#[test]
fn circles_are_found() {
    let package = |files: &[(&str, &str)]| {
        let module = |name: &str| name.split("::").filter(|word| !word.is_empty()).map(str::to_owned).collect();
        Package(files.iter().map(|(name, code)| (module(name), code_of(code))).collect())
    };
    let found = |files: &[(&str, &str)]| circles(&package(files).uses()).len();
    assert_eq!(found(&[("", "mod a; mod b;"), ("a", "use crate::b::B;"), ("b", "// use crate::a::A;")]), 0);
    assert_eq!(found(&[("", "mod a; mod b;"), ("a", "use crate::b::B;"), ("b", "fn f() { crate::a::g() }")]), 1);
    // By way of a re-export, and of the parent.
    let facade = ("m", "mod a;\nmod b;\npub use a::A;\npub(crate) use b::B;");
    assert_eq!(found(&[facade, ("m::a", ""), ("m::b", "use super::{A, c};")]), 0);
    assert_eq!(found(&[facade, ("m::a", "use super::{\n    B,\n};"), ("m::b", "use super::A;")]), 1);
    for own in ["mod a;\nuse a::A;\npub struct M;", "mod a;\npub use a::A;\npub struct M(A);"] {
        assert_eq!(found(&[("m", own), ("m::a", "use super::M;")]), 1);
    }
    assert_eq!(found(&[("m", "mod a;\npub use a::A;\npub struct M;"), ("m::a", "use super::M;")]), 0);
}
