use std::path::Path;

use swiglu_lab::History;
use swiglu_lab::record::Store;
use swiglu_lab::report::Site;

use super::made_up::site;

#[test]
fn the_document_in_the_repository_is_what_its_records_give() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let lab = root.join("lab");
    let store = Store::new(lab.join("records"));
    let site = Site::gather(&lab, &store, &History::around(&lab)).unwrap();
    assert_eq!(site.troubles(), Vec::<String>::new());
    let now = site.measured(&root);
    let kept = std::fs::read_to_string(root.join("MEASURED.md")).unwrap();
    let differs = now.lines().zip(kept.lines()).find(|(now, kept)| now != kept);
    assert!(now == kept, "run `swiglu lab report --measured`: {differs:?}");
    // Of an experiment a table, and not each of its cases twice.
    let most = 15 * site.experiments.len();
    assert!(now.lines().count() <= most, "{} of {most}", now.lines().count());
    for entry in &site.experiments {
        assert!(
            now.contains(&format!("\n## {}\n", entry.experiment.id)),
            "{}",
            entry.experiment.id
        );
    }
    // Every link leads to a file of the repository, or a heading of the document.
    let targets = now.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
    for target in targets {
        match target.strip_prefix('#') {
            Some(heading) => assert!(now.contains(&format!("\n## {heading}\n")), "{target}"),
            None => assert!(root.join(target).exists(), "{target}"),
        }
    }
}

#[test]
fn figures_of_a_made_up_lab_are_those_of_its_records() {
    let dir = tempfile::tempdir().unwrap();
    let site = site(dir.path());
    let text = site.measured(dir.path());
    assert_eq!(text, site.measured(dir.path()));
    let entry = &site.experiments[0];
    let decisive = entry.verdict.decisive().unwrap();
    let ratio = decisive.aggregate.unwrap();
    let [low, high] = ratio.ci95;
    let figures = format!("{:.2}× [{low:.2}, {high:.2}]", ratio.value);
    for start in ["| [cpu-mlp-decode](#cpu-mlp-decode) |", "One token through"] {
        let line = text.lines().find(|line| line.starts_with(start)).unwrap();
        assert!(line.contains(&figures), "{figures}: {line}");
    }
    // With seven sizes each case has a row, and each cell stands in its column.
    let row = text.lines().find(|line| line.starts_with("| 896 → 4864, M = 16 |")).unwrap();
    assert!(row.contains(" µs | cublas-act ") && row.ends_with("× [0.98, 0.98] |"), "{row}");
    for table in text.split("\n\n").filter(|part| part.starts_with("| ")) {
        let columns = |line: &str| line.replace("\\|", "").matches('|').count();
        let first = columns(table.lines().next().unwrap());
        assert!(table.lines().all(|line| columns(line) == first), "{table}");
    }
    let not_run = text.lines().find(|line| line.starts_with("| [hostile]")).unwrap();
    assert!(not_run.contains("| not run |") && not_run.contains("no record"), "{not_run}");
    // Records that lie elsewhere are named without a link.
    assert!(!site.measured(Path::new("/elsewhere")).contains("(imaginary-gpu/"), "{text}");
    assert!(text.contains("](imaginary-gpu/"), "{text}");
}
