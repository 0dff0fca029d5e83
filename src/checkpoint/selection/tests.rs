//! Selections against a small checkpoint: names, slices, ranks, prefixes and ties.

use super::*;
use crate::testing::hostile::{entry, file, header};
use tempfile::TempDir;

/// `module.w` F32 [12, 5], `module.b` F4 [4, 3] and [2, 2]-bit packed, with a recorded second name for `module.w`.
fn checkpoint(config: Option<&str>) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let text = header(&[
        r#""__metadata__":{"format":"pt","module.tied":"module.w"}"#.into(),
        entry("module.w", "F32", &[12, 5], 0, 240),
        entry("module.q_proj.weight", "U8", &[8, 2], 240, 256),
        entry("packed", "F4", &[4, 3], 256, 262),
        entry("module.q_proj.scale", "U8", &[2], 262, 264),
        entry("odd", "X9", &[2], 264, 265),
    ]);
    std::fs::write(dir.path().join("model.safetensors"), file(&text, &[0; 265])).unwrap();
    if let Some(config) = config {
        std::fs::write(dir.path().join("config.json"), config).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

/// Name, shape, further names.
type Plain = (String, Vec<usize>, Vec<String>);

fn select(selection: Selection) -> Result<Vec<Plain>> {
    select_with(None, selection)
}

fn select_with(config: Option<&str>, selection: Selection) -> Result<Vec<Plain>> {
    let selected = checkpoint(config).1.select(&selection)?;
    let aliases = |it: &Selected| it.aliases.iter().map(|alias| alias.to_string()).collect();
    Ok(selected.iter().map(|it| (it.name.to_string(), it.shape.to_vec(), aliases(it))).collect())
}

fn said(selection: Selection) -> String {
    select(selection).map_or_else(|error| error.to_string(), |selected| format!("selected {selected:?}"))
}

fn names(selection: Selection) -> Vec<String> {
    select(selection).unwrap().into_iter().map(|(name, ..)| name).collect()
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.into()).collect()
}

fn ranks(rank: usize, world: usize, dims: &[(&str, usize)]) -> Option<TensorParallel> {
    Some(TensorParallel { rank, world, dims: dims.iter().map(|(glob, dim)| ((*glob).into(), *dim)).collect() })
}

#[test]
fn everything_is_selected_by_default_with_recorded_ties() {
    let all = select(Selection::default()).unwrap();
    let names: Vec<_> = all.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["module.q_proj.scale", "module.q_proj.weight", "module.w", "odd", "packed"]);
    assert_eq!(all[2].2, ["module.tied"]);
}

#[test]
fn globs_match_dots_and_exact_names_win() {
    assert_eq!(
        names(Selection { include: texts(&["*w*"]), ..Selection::default() }),
        ["module.q_proj.weight", "module.w"]
    );
    let rest = Selection { include: texts(&["module.*"]), exclude: texts(&["*q_proj*"]), ..Selection::default() };
    assert_eq!(names(rest), ["module.w"]);
}

#[test]
fn a_recorded_name_can_be_asked_for_alone() {
    let tied = select(Selection { include: texts(&["module.tied"]), ..Selection::default() }).unwrap();
    assert_eq!(tied, [("module.tied".into(), vec![12, 5], vec![])]);
}

#[test]
fn what_matches_nothing_is_an_error_with_the_nearest_name() {
    for selection in [
        Selection { include: texts(&["modul.w"]), ..Selection::default() },
        Selection { exclude: texts(&["modul.w"]), ..Selection::default() },
        Selection { tensor_parallel: ranks(0, 2, &[("modul.w", 0)]), ..Selection::default() },
        Selection {
            slices: vec![SliceRequest { name: "modul.w".into(), dim: 0, range: 0..1 }],
            ..Selection::default()
        },
    ] {
        let said = said(selection);
        assert!(said.contains("\"modul.w\"") && said.contains("nearest name is \"module.w\""), "{said}");
    }
    let include = |glob: &str| said(Selection { include: texts(&[glob]), ..Selection::default() });
    assert!(include("*.q_porj.*").contains("nearest name is \"module.q_proj."), "{}", include("*.q_porj.*"));
    assert!(
        include("*vision_tower*").contains("`Checkpoint::tensors` lists the names"),
        "{}",
        include("*vision_tower*")
    );
    assert!(said(Selection { exclude: texts(&["*"]), ..Selection::default() }).contains("nothing is selected"));
    assert!(said(Selection { include: texts(&["[z-a]"]), ..Selection::default() }).contains("not a glob"));
}

#[test]
fn slices_are_checked_against_the_shape() {
    let slice = |name: &str, dim, range: Range<usize>| {
        let slices = vec![SliceRequest { name: name.into(), dim, range }];
        said(Selection { slices, include: texts(&["module.w", "packed"]), ..Selection::default() })
    };
    assert!(slice("module.w", 1, 1..3).contains("[12, 2]"));
    for (said, words) in [
        (slice("module.w", 2, 0..1), ["[12, 5]", "no dimension 2"]),
        (slice("module.w", 0, 3..13), ["3..13", "12 elements"]),
        (slice("module.w", 0, 3..3), ["3..3", "takes nothing"]),
        (slice("packed", 1, 0..2), ["F4", "cuts through a byte"]),
        (slice("odd", 0, 0..1), ["\"odd\"", "not selected"]),
    ] {
        assert!(words.iter().all(|word| said.contains(word)), "{words:?} in {said}");
    }
    assert!(slice("packed", 0, 2..4).contains("[2, 3]"));
}

#[test]
fn ranks_share_evenly_or_not_at_all() {
    let w = |rank, world, dim| {
        let tensor_parallel = ranks(rank, world, &[("module.w", dim)]);
        said(Selection { tensor_parallel, include: texts(&["module.w", "packed"]), ..Selection::default() })
    };
    assert!(w(3, 4, 0).contains("[3, 5]") && w(3, 4, 0).contains("\"packed\", [4, 3]"));
    let uneven = w(0, 5, 0);
    assert!(["\"module.w\"", "12", "5", "2 left over"].iter().all(|word| uneven.contains(word)), "{uneven}");
    assert!(w(4, 4, 0).contains("rank 4 of 4"));
    assert!(w(0, 0, 0).contains("rank 0 of 0"));
    assert!(w(0, 2, 2).contains("no dimension 2"));
}

#[test]
fn known_architectures_have_rules_and_others_say_which_are_known() {
    let tp = |config: Option<&str>, exclude: &[&str]| {
        let selection =
            Selection { tensor_parallel: ranks(1, 2, &[]), exclude: texts(exclude), ..Selection::default() };
        select_with(config, selection).map_or_else(|error| error.to_string(), |all| format!("{all:?}"))
    };
    let cut = tp(Some(r#"{"model_type":"llama","num_key_value_heads":8}"#), &["*scale"]);
    assert!(cut.contains("\"module.q_proj.weight\", [4, 2]") && cut.contains("\"module.w\", [12, 5]"), "{cut}");
    let scale = tp(Some(r#"{"model_type":"llama"}"#), &["odd"]);
    assert!(scale.contains("\"module.q_proj.scale\"") && scale.contains("say nothing about its scale"), "{scale}");
    let heads = tp(Some(r#"{"model_type":"llama","num_key_value_heads":3}"#), &["odd"]);
    assert!(heads.contains("num_key_value_heads is 3") && heads.contains("2 ranks"), "{heads}");
    assert!(tp(Some(r#"{"model_type":"other"}"#), &["odd"]).contains("known for gemma"));
    assert!(tp(None, &["odd"]).contains("config.json"));
}

#[test]
fn the_longest_globs_compile_and_longer_ones_are_refused() {
    let include = |glob: String| Selection { include: vec![glob], ..Selection::default() };
    for part in ["*", "?", "[!a]", "[acegikmoqsuwy]", "{a}", "é", "{é[!z]}", "a", "\\*"] {
        let longest = part.repeat(crate::checkpoint::glob::MAX_BYTES / part.len());
        let said = said(include(longest));
        assert!(said.contains("no tensor is called") || said.starts_with("selected"), "{part}: {said:.300}");
    }
    let said = said(include("*".repeat(100_000)));
    assert!(said.contains("longer than 4096 bytes") && said.len() < 500, "{said:.600}");
}

#[test]
fn prefixes_come_off_and_collisions_name_both() {
    let strip = |prefixes: &[&str]| Selection { strip_prefix: texts(prefixes), ..Selection::default() };
    let stripped = select(strip(&["module.", "q_proj."])).unwrap();
    let names: Vec<_> = stripped.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["odd", "packed", "scale", "w", "weight"]);
    assert_eq!(stripped[3].2, ["tied"]);
    assert!(said(strip(&["nothing."])).contains("names begin with \"module.\""));
    assert!(said(strip(&["odd"])).contains("leave nothing"));
    let ties = vec![Tie { alias: "packed".into(), target: "w".into() }];
    assert!(
        names_of_collision().contains("\"module.b\" and \"b\"")
            || names_of_collision().contains("\"b\" and \"module.b\"")
    );
    assert!(select(Selection { ties, ..strip(&["module."]) }).is_ok(), "stored under both names is no collision");
}

fn names_of_collision() -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    std::fs::write(&path, crate::testing::hostile::bytes_file(&[("b", &[1]), ("module.b", &[2])])).unwrap();
    let selection = Selection { strip_prefix: texts(&["module."]), ..Selection::default() };
    Checkpoint::open(path).unwrap().select(&selection).unwrap_err().to_string()
}

#[test]
fn ties_give_second_names_to_final_or_stored_names() {
    let tie = |alias: &str, target: &str| Tie { alias: alias.into(), target: target.into() };
    let with = |ties: Vec<Tie>| Selection { strip_prefix: texts(&["module."]), ties, ..Selection::default() };
    for target in ["w", "module.w", "tied"] {
        let all = select(with(vec![tie("head", target)])).unwrap();
        assert_eq!(all.iter().find(|it| it.0 == "w").unwrap().2, ["tied", "head"], "{target}");
    }
    let chain = select(with(vec![tie("a", "b"), tie("b", "w")])).unwrap();
    assert_eq!(chain.iter().find(|it| it.0 == "w").unwrap().2, ["tied", "a", "b"]);
    let said = said(with(vec![tie("head", "ww"), tie("circle", "circle")]));
    assert!(said.contains("\"ww\"") && said.contains("\"circle\""), "{said}");
}

#[test]
fn unknown_types_are_refused_when_they_are_to_be_loaded() {
    let (_dir, checkpoint) = checkpoint(None);
    let all = checkpoint.select(&Selection::default()).unwrap();
    let error = checkpoint.require_known_dtypes(&all).unwrap_err();
    let said = error.to_string();
    assert!(["model.safetensors", "\"odd\"", "X9"].iter().all(|word| said.contains(word)), "{said}");
    let rest = checkpoint.select(&Selection { exclude: texts(&["odd"]), ..Selection::default() }).unwrap();
    assert!(checkpoint.require_known_dtypes(&rest).is_ok());
}
