//! The libraries name functions in their messages, each of which the command has an option for.

mod support;

use std::collections::BTreeSet;
use std::path::Path;

use support::swiglu;

/// Programs of others whose options messages may give.
const OTHERS: [&str; 1] = ["mlx_lm.convert"];

/// All `.rs` files below a directory.
fn sources(dir: &Path, out: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).expect("the sources are there").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(std::fs::read_to_string(&path).expect("a source is text"));
        }
    }
}

/// The contents of string literals: comments may name what they like.
fn literals(source: &str) -> Vec<&str> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    // Every second part is inside quotes; an escaped quote shifts it and is put right by the next one.
    code.flat_map(|line| line.split('"').skip(1)).collect()
}

fn options(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("--").filter_map(|(at, _)| {
        let end = text[at + 2..].find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let option = &text[at..end.map_or(text.len(), |end| at + 2 + end)];
        let begins = at == 0
            || !text.as_bytes()[at - 1].is_ascii_graphic()
            || b"`('".contains(&text.as_bytes()[at - 1]);
        (begins && option.len() > 2).then_some(option)
    })
}

/// Functions by their type.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    [
        "LoadOptions::with",
        "TensorNames::with",
        "Weights::activation",
        "CpuOptions::with",
        "GatedLinear::load",
        "Mlp::load",
    ]
    .into_iter()
    .flat_map(|of| text.match_indices(of))
    .map(|(at, _)| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        text[at..].split(|c| !is_part(c)).next().unwrap_or_default().trim_end_matches(':')
    })
}

#[test]
fn options_in_messages_exist() {
    let help = swiglu(&["run", "--help"]).stdout;
    let known: BTreeSet<&str> = options(&help).collect();
    assert!(known.contains("--weights") && known.contains("--gate-up-name"), "{known:?}");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for library in ["swiglu", "swiglu-core", "swiglu-cpu", "swiglu-formats"] {
        sources(&here.join("..").join(library).join("src"), &mut files);
    }
    assert!(files.len() > 50);
    let literals: Vec<&str> = files
        .iter()
        .flat_map(|source| literals(source))
        .filter(|text| !OTHERS.iter().any(|o| text.contains(o)))
        .collect();
    let theirs: Vec<&str> = literals.iter().flat_map(|text| options(text)).collect();
    assert!(theirs.is_empty(), "options of the command in messages of a library: {theirs:?}");
    let named: BTreeSet<&str> = literals.iter().flat_map(|text| functions(text)).collect();
    assert!(named.len() > 10, "{named:?}");
    // What each is called by the command: a row of its table, `("FUNCTION", "--option")`.
    let table = std::fs::read_to_string(here.join("src/terminal.rs")).expect("a source is text");
    let option = |function: &str| {
        let (_, row) = table.split_once(&format!("(\"{function}\", \""))?;
        options(row).next()
    };
    let unknown: Vec<_> =
        named.iter().filter(|f| option(f).is_none_or(|o| !known.contains(o))).collect();
    assert!(unknown.is_empty(), "`swiglu run` has no option for {unknown:?}");
    assert_eq!(
        options("give `--layer N` or (--expert E), not a--b or --").collect::<Vec<_>>(),
        ["--layer", "--expert"]
    );
}

/// The help of an option, without its line breaks.
fn help_of(verb: &[&str], option: &str) -> String {
    let help = swiglu(&[verb, &["--help"]].concat()).stdout;
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    words.split_once(&format!("{option} <")).expect("it has this option").1.to_owned()
}

#[test]
fn help_lists_what_is_accepted() {
    for (verb, option) in [
        (&["run"][..], "--activation"),
        (&["run"], "--dtype"),
        (&["run"], "--numerics"),
        (&["run"], "--exp"),
        (&["run"], "--isa"),
        (&["run"], "--device"),
        (&["run"], "--keep"),
        (&["run"], "--orientation"),
        (&["run"], "--arrangement"),
        (&["kernels", "build"], "--activation"),
    ] {
        let refused = swiglu(&[verb, &[option, "?"]].concat()).stderr;
        let choices = refused.split_once("choose one of: ").expect(&refused).1;
        let choices = choices.lines().next().unwrap_or_default().split(", ");
        let help = help_of(verb, option);
        // `interleaved-G (G a positive integer)` is one.
        for choice in choices.filter_map(|choice| choice.split(" (").next()) {
            assert!(help.contains(choice), "{option}: {choice}: {help}");
        }
    }
    // What is accepted is explained with what the machine can do beside it; one thread is told that sooner.
    let explain = ["explain", "--hidden", "256", "--intermediate", "256", "--device", "cpu"];
    let explain = [&explain[..], &["--threads", "1", "--weights-type"]].concat();
    let computed = |kind: &str| swiglu(&[&explain[..], &[kind]].concat()).code == Some(0);
    let kinds = swiglu_core::QuantizedType::all().map(|kind| kind.name().to_lowercase());
    let kinds: Vec<String> = kinds.filter(|kind| computed(kind)).collect();
    for verb in ["explain", "bench"] {
        let help = help_of(&[verb], "--weights-type");
        assert!(
            kinds.len() > 5 && kinds.iter().all(|kind| help.contains(kind)),
            "{kinds:?}: {help}"
        );
    }
}
