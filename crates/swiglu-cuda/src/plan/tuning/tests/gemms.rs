//! Measurements of cuBLASLt's proposals in files.

use std::collections::HashSet;

use swiglu_core::{GateUpWeights, GatedLinearParams, MlpParams, Pass, Path};

use super::*;
use crate::ceilings::Product;
use crate::device::lt::cublaslt_version;
use crate::device::memory::DeviceMatrixMut;
use crate::layers::{DeviceGradientsMut, Mlp};
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
    GemmEntry::new((13, 1), gemm(m), trials)
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
    let keep = |entries| gemms::keep(dir.path(), here(), entries).unwrap();
    let read = |here: &GemmSubject| gemms::read(Some(dir.path()), &[], here);
    assert_eq!(read(&here()), (vec![], vec![]));
    keep(vec![proposed(16, &[4.0, 3.0])]);
    let (path, refusal) = keep(vec![proposed(64, &[4.0, 4.0]), proposed(16, &[4.0, 2.0])]);
    assert_eq!(refusal, None);
    let other = GemmEntry { cublaslt: (12, 8), ..proposed(16, &[4.0]) };
    assert_eq!(keep(vec![other]).1, None);
    let (all, notes) = read(&here());
    let note = |what| format!("{}: {what}, and no other", path.display());
    let said = ["1 product measured for cuBLASLt 12.8", "2 products measured for cuBLASLt 13.1"];
    assert_eq!(notes, said.map(note));
    assert_eq!([all[0].version, all[1].version], [(12, 8), (13, 1)]);
    let of = |m| all[1].exact(&gemm(m));
    assert_eq!(of(16), Some((algorithm(1), 0.5)));
    assert_eq!(of(64), Some((algorithm(0), 1.0)));
    assert_eq!([of(8), of(32), of(128)], [None; 3]);
    // Of a part of a device it is not used.
    let (other, notes) = read(&GemmSubject::new("Device 1", Arch::Sm90a, 16, (13, 0)));
    assert!(other.is_empty() && notes[0].contains("it was measured on Device 1"), "{notes:?}");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("13,1", "13,2")).unwrap();
    let (none, notes) = read(&here());
    assert!(none.is_empty() && notes[0].contains("damaged"), "{notes:?}");
}

#[test]
fn between_two_numbers_of_tokens_what_is_the_fastest_of_both_counts() {
    let of = |entries: &[(usize, u32, f64)]| {
        let fastest = entries.iter().map(|&(m, by, share)| (gemm(m), (algorithm(by), share)));
        Measured::new((13, 1), fastest).between(&gemm(48))
    };
    assert_eq!(of(&[(32, 1, 0.7), (64, 1, 0.9), (96, 2, 0.5)]), Some((algorithm(1), 0.9)));
    assert_eq!(of(&[(32, 1, 0.7), (64, 2, 0.9)]), None);
    assert_eq!(of(&[(32, 0, 1.0), (64, 0, 1.0)]), None, "the first of one is not that of another");
    assert_eq!(of(&[(16, 1, 0.7), (64, 1, 0.9)]), None, "too far apart");
    assert_eq!(of(&[(64, 1, 0.9)]), None);
}

#[test]
fn shipped_ones_are_whole_and_of_products_that_steps_have() {
    for (name, text) in SHIPPED_GEMMS {
        let file: File = unseal(text).unwrap_or_else(|why| panic!("{name}: {why}"));
        assert!(file.to_text().unwrap() == *text, "{name} is not as it would be written");
        assert_eq!(file.file_name(), *name);
        for entry in &file.entries {
            let Gemm { m, k, n, .. } = entry.gemm;
            assert!(entry.fastest().is_some(), "{name}: {}", entry.gemm);
            let once = file.entries.iter().filter(|e| e.gemm == entry.gemm).count();
            assert_eq!(once, 1, "{name}: {}", entry.gemm);
            // Of some extents in some order.
            let is_known = [[m, k, n], [m, n, k], [k, m, n], [k, n, m], [n, m, k], [n, k, m]]
                .into_iter()
                .flat_map(|[m, k, h]| [[m, k, h], [m, k, h / 2]])
                .any(|[m, k, h]| {
                    let of = problem(m).with_op(Op::Mlp).with_hidden(k).with_intermediate(h);
                    gemms_of_step(&of).iter().any(|(_, gemm)| *gemm == entry.gemm)
                });
            assert!(is_known, "{name}: {}", entry.gemm);
        }
    }
}

/// Gate and up in a matrix that has both, one beside the other.
fn halves(kept: &mut DeviceMatrix<bf16>, h: usize) -> [DeviceMatrixMut<'_, bf16>; 2] {
    let half = kept.cols() / 2;
    let (gate, up) = kept.view_mut().split_cols(half).unwrap();
    [gate, up].map(|part| part.cols_range(0..h).unwrap())
}

/// A training step's products are those that are said of it, and go by what was measured of them.
#[test]
fn products_of_a_step_go_by_what_was_measured() {
    if common::has_gpu() {
        return swiglu_testing::not_run("what a device's own cuBLASLt proposes is not known");
    }
    let (m, k) = (24, 72);
    // Of 37 gate and up do not lie as one product takes both.
    for (orientation, h) in Orientation::ALL.into_iter().flat_map(|o| [(o, 40), (o, 37)]) {
        let dir = tempfile::tempdir().unwrap();
        let Some(cuda) = super::planned::device(dir.path()) else { return };
        let given = |shape: [usize; 2], seed| {
            let [rows, cols] = orientation.shape(shape[0], shape[1]);
            random::normal_matrix::<bf16>(seed, rows, cols, 0.1).unwrap()
        };
        let (gate, up, down) = (given([h, k], 1), given([h, k], 2), given([k, h], 3));
        let weights = GateUpWeights::separate(gate.view(), up.view(), orientation).unwrap();
        let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
        let params = MlpParams::new(gated, down.view(), orientation);
        let step = |cuda: &Cuda| {
            let (mlp, stream) =
                (Mlp::with_path(cuda, &params, Path::Fused).unwrap(), cuda.stream());
            let new = |rows, cols| DeviceMatrix::<bf16>::zeros(&stream, rows, cols).unwrap();
            let half = h.next_multiple_of(8);
            let (x, dy, mut y, mut kept) = (new(m, k), new(m, k), new(m, k), new(m, 2 * half));
            mlp.forward_saving(&stream, x.view(), y.view_mut(), halves(&mut kept, h)).unwrap();
            let [rows, cols] = orientation.shape(h, k);
            let (mut of_gate, mut of_both) =
                ([new(rows, cols), new(rows, cols)], new(2 * rows, cols));
            let [down_rows, down_cols] = orientation.shape(k, h);
            let (mut dx, mut of_down) = (new(m, k), new(down_rows, down_cols));
            let into = DeviceGradientsMut::default().with_dx(dx.view_mut());
            let (of_gate, of_up) = match orientation {
                Orientation::OutIn => of_both.view_mut().split_rows(rows).unwrap(),
                Orientation::InOut => {
                    let [gate, up] = &mut of_gate;
                    (gate.view_mut(), up.view_mut())
                }
            };
            let into = into.with_gate(of_gate).with_up(of_up).with_down(of_down.view_mut());
            mlp.backward(&stream, x.view(), dy.view(), halves(&mut kept, h), into, None).unwrap();
            stream.synchronize().unwrap();
            cuda.lt().unwrap().met()
        };
        let problem = params.problem(m);
        let said = gemms_of_step(&problem);
        let before: HashSet<_> = step(&cuda).into_iter().map(|(gemm, _)| gemm).collect();
        assert_eq!(before.len(), 4, "y, dx, and two of weights: {before:?}");
        for gemm in &before {
            assert!(said.iter().any(|(_, of)| of == gemm), "{orientation}: {gemm}");
        }
        // The last of the proposals was the fastest of each.
        let (major, minor, _) = cublaslt_version().unwrap();
        let stream = cuda.stream();
        let entry = |gemm: &Gemm| {
            let proposals = Product::<bf16, bf16>::of(&stream, gemm).unwrap().proposals().unwrap();
            let count = proposals.len();
            let timed = |(i, by)| (by, measured((2 * count - i) as f64));
            GemmEntry::new((major, minor), *gemm, proposals.into_iter().enumerate().map(timed))
        };
        let entries: Vec<_> = before.iter().map(entry).collect();
        let options = TuningOptions { dir: Some(dir.path().to_owned()), disabled: false };
        cuda.keep_gemms(&options, entries.clone()).unwrap();
        let cuda = super::planned::device(dir.path()).unwrap();
        for (gemm, by) in step(&cuda) {
            let entry = entries.iter().find(|entry| entry.gemm == gemm).unwrap();
            assert_eq!(by, Some(entry.trials.last().unwrap().algorithm), "{orientation}: {gemm}");
        }
        let candidates = cuda.candidates(&problem.with_pass(Pass::Backward), None);
        let reasons: Vec<_> = candidates.iter().map(|step| step.reason.as_str()).collect();
        let measured = reasons.iter().filter(|why| why.contains("0.62 of the first's time"));
        let together = h % 8 == 0 || orientation == Orientation::InOut;
        assert_eq!(measured.count(), if together { 3 } else { 2 }, "{reasons:?}");
    }
}
