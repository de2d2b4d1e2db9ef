//! Measurements of cuBLASLt's proposals in files.

use super::*;
use crate::plan::tuning::gemms::{self, File};

fn here() -> GemmSubject {
    GemmSubject::new("Device 1", Arch::Sm90a, 132, (13, 0))
}

fn gemm(m: usize) -> Gemm {
    let (_, gemm) = gemms_of_step(&problem(m))[0];
    gemm
}

fn algorithm(tile: u32) -> GemmAlgorithm {
    GemmAlgorithm {
        id: 66,
        tile,
        stages: 0,
        cluster: 3,
        inner_shape: 0,
        split_k: 1,
        reduction: 0,
        swizzling: 0,
        option: 0,
    }
}

/// An entry whose proposals took so long, in the order in which they are proposed.
fn proposed(m: usize, times: &[f64]) -> GemmEntry {
    let trials = times.iter().zip(0..).map(|(us, tile)| (algorithm(tile), measured(*us)));
    GemmEntry::new(gemm(m), trials)
}

#[test]
fn the_first_is_left_for_what_gains_two_percent() {
    let fastest = |times: &[f64]| proposed(1, times).fastest();
    assert_eq!(fastest(&[10.0, 9.0, 8.0]), Some((2, 0.8)));
    assert_eq!(fastest(&[10.0, 9.9]), Some((0, 1.0)));
    assert_eq!(fastest(&[]), None);
    let mut entry = proposed(1, &[10.0, 9.0, 5.0]);
    entry.trials[2].outcome = Outcome::Wrong { reason: "NaN".into() };
    assert_eq!(entry.fastest(), Some((1, 0.9)));
    entry.trials[0].outcome = Outcome::Failed { reason: "no".into() };
    assert_eq!(entry.fastest(), None);
}

#[test]
fn what_is_kept_is_read_and_added_to() {
    let dir = tempfile::tempdir().unwrap();
    let keep = |version, entries| gemms::keep(dir.path(), here(), version, entries).unwrap();
    let read = |here: &GemmSubject| gemms::read(Some(dir.path()), &[], here);
    assert_eq!(read(&here()), (vec![], vec![]));
    keep((13, 1), vec![proposed(16, &[4.0, 3.0])]);
    let (path, refusal) = keep((13, 1), vec![proposed(64, &[4.0, 4.0]), proposed(16, &[4.0, 2.0])]);
    assert_eq!(refusal, None);
    let (all, notes) = read(&here());
    assert_eq!(notes, [format!("{}: 2 products measured, for cuBLASLt 13.1", path.display())]);
    let of = |m| all[0].get(&gemm(m));
    assert_eq!(of(16), Some((algorithm(1), 0.5)));
    assert_eq!(of(64), Some((algorithm(0), 1.0)));
    assert_eq!([of(8), of(32), of(128)], [None; 3]);
    // Of a part of a device it is not used, and another version takes its place.
    let (other, notes) = read(&GemmSubject::new("Device 1", Arch::Sm90a, 16, (13, 0)));
    assert!(other.is_empty() && notes[0].contains("it was measured on Device 1"), "{notes:?}");
    let (_, refusal) = keep((13, 2), vec![proposed(16, &[4.0])]);
    let refusal = refusal.unwrap().to_string();
    assert_eq!(refusal, "it is of cuBLASLt 13.1, and this is 13.2");
    assert_eq!(read(&here()).0[0].version, (13, 2));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("13,2", "13,3")).unwrap();
    let (none, notes) = read(&here());
    assert!(none.is_empty() && notes[0].contains("damaged"), "{notes:?}");
}

#[test]
fn shipped_ones_are_whole() {
    for (name, text) in SHIPPED_GEMMS {
        let file: File = unseal(text).unwrap_or_else(|why| panic!("{name}: {why}"));
        assert!(file.to_text().unwrap() == *text, "{name} is not as it would be written");
        for entry in &file.entries {
            let (number, share) = entry.fastest().unwrap();
            assert_eq!((number == 0, share <= 1.0), (share == 1.0, true), "{name}: {}", entry.gemm);
        }
    }
}
