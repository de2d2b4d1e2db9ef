//! Records under everything that happens to files, and the choices that follow from them.

use std::collections::BTreeSet;
use std::process::Command;

use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::{
    Activation, DType, Matrix, MatrixRef, Numerics, Op, Orientation, Rounding, WeightLayout, bf16,
    bounds, random,
};

use super::*;
use crate::common;
use crate::device::context::{Cuda, CudaOptions};
use crate::device::error::CudaError;
use crate::device::memory::{DeviceMatrix, DeviceMatrixRef};
use crate::layers::GatedLinear;
use crate::plan::Choice;

fn subject() -> Subject {
    Subject {
        device: "Device 1".into(),
        arch: Arch::Sm90a,
        sm_count: 132,
        source: "source".into(),
        space: "space".into(),
    }
}

fn problem(m: usize) -> Problem {
    let numerics = Numerics::default().with_rounding(Rounding::PreRound);
    Problem::new(Op::GatedLinear, m, 64, 96, DType::Bf16, Activation::CLAMPED_SWIGLU)
        .with_numerics(numerics)
        .with_layout(WeightLayout::HF)
}

fn measured(median_us: f64) -> Outcome {
    Outcome::Measured { median_us, p10_us: median_us * 0.97, p90_us: median_us / 0.93, samples: 9 }
}

/// An entry whose ways were measured to take so long.
fn entry(m: usize, times: &[(&str, f64)]) -> Entry {
    let trial = |&(way, us): &(&str, f64)| Trial {
        way: way.to_owned(),
        predicted_us: Some(us / 3.0),
        outcome: measured(us),
    };
    let mut trials: Vec<Trial> = times.iter().map(trial).collect();
    let reason = "it has no wgmma".to_owned();
    let outcome = Outcome::Refused { reason };
    trials.push(Trial { way: "another".into(), predicted_us: None, outcome });
    Entry::new(problem(m), false, trials)
}

fn record(entries: Vec<Entry>) -> Record {
    let mut record = Record::new(subject(), (13, 0));
    entries.into_iter().for_each(|entry| record.insert(entry));
    record
}

/// A record that is whole, and that `here` says the same about.
fn from_text(text: &str, here: &Subject) -> Result<Record, Refusal> {
    let record = Record::parse(text)?;
    record.check(here).map(|()| record)
}

#[test]
fn what_was_kept_is_read_and_every_damage_noticed() {
    let record = record(vec![entry(16, &[("a", 1.0 / 3.0), ("b", 2e5 / 7.0)]), entry(1, &[])]);
    let text = record.to_text().unwrap();
    assert_eq!(from_text(&text, &subject()).unwrap(), record);
    // It is JSON for whoever has no use for the digest.
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["record"]["entries"][0]["trials"][2]["outcome"], "refused");
    for len in 0..text.len() {
        from_text(&text[..len], &subject()).unwrap_err();
    }
    for i in 0..text.len() {
        let mut bytes = text.clone().into_bytes();
        bytes[i] ^= 1;
        let changed = String::from_utf8(bytes).unwrap();
        from_text(&changed, &subject()).unwrap_err();
    }
}

#[test]
fn a_record_of_anything_else_is_refused_with_its_reason() {
    let text = record(vec![entry(16, &[("a", 1.0)])]).to_text().unwrap();
    let refusal = |here: Subject| from_text(&text, &here).unwrap_err();
    let other = refusal(Subject { device: "Device 2".into(), ..subject() });
    assert!(matches!(&other, Refusal::Device { .. }));
    let said = other.to_string();
    assert!(said.contains("Device 1 (sm_90a, 132") && said.contains("Device 2"), "{said}");
    let part = refusal(Subject { sm_count: 16, ..subject() });
    assert!(matches!(part, Refusal::Device { .. }), "{part}");
    let arch = refusal(Subject { arch: Arch::Sm80, ..subject() });
    assert!(matches!(arch, Refusal::Device { .. }), "{arch}");
    assert_eq!(refusal(Subject { source: "x".into(), ..subject() }), Refusal::Source);
    let later = Record { schema: SCHEMA + 1, ..record(Vec::new()) }.to_text().unwrap();
    let refusal = from_text(&later, &subject()).unwrap_err();
    assert_eq!(refusal, Refusal::Schema { given: SCHEMA + 1 });
}

/// Of two that are shipped for a device the first that has a problem counts.
#[test]
fn shipped_records_complete_each_other() {
    let Some(cuda) = common::device() else { return };
    let (facts, arch) = (cuda.facts(), cuda.arch());
    let here = Subject::here(facts, arch);
    let ways: Vec<String> = Choice::all().take(2).map(|way| way.to_string()).collect();
    let text = |entries: Vec<Entry>| {
        let mut record = Record::new(here.clone(), (13, 0));
        entries.into_iter().for_each(|entry| record.insert(entry));
        record.to_text().unwrap()
    };
    let first = text(vec![entry(16, &[(&ways[0], 1.0)])]);
    let second = text(vec![entry(16, &[(&ways[1], 1.0)]), entry(64, &[(&ways[1], 1.0)])]);
    let name = file_name(&here);
    let part = name.replace(".json", ".part.json");
    let other = format!("not-{name}");
    let shipped = [(&*other, &*second), (&*part, &*first), (&*name, &*second)];
    let tuning = Tuning::read(None, &shipped, facts, arch);
    let found = |m| tuning.find(&problem(m), false).map(|(_, tuned)| tuned.ways[0].0.to_string());
    assert_eq!([16, 64].map(found), [0, 1].map(|i| Some(ways[i].clone())));
    assert_eq!(tuning.notes().len(), 2, "{:?}", tuning.notes());
    assert!(tuning.notes()[0].contains(&part), "{:?}", tuning.notes());
}

#[test]
fn a_record_of_these_kernels_goes_before_an_earlier_one_and_a_users_before_a_shipped_one() {
    let Some(cuda) = common::device() else { return };
    let (facts, arch) = (cuda.facts(), cuda.arch());
    let here = Subject::here(facts, arch);
    let earlier = Subject { source: "x".into(), ..here.clone() };
    // Other ways than there are now, for one more, or one less, is unrelated to those that were tried.
    let other_ways = Subject { space: "x".into(), ..here.clone() };
    let ways: Vec<String> = Choice::all().take(2).map(|way| way.to_string()).collect();
    let text = |subject: &Subject, way: usize| {
        let mut record = Record::new(subject.clone(), (13, 0));
        record.insert(entry(16, &[(&ways[way], 1.0)]));
        record.to_text().unwrap()
    };
    let name = file_name(&here);
    for (users, shipped, taken) in [
        (&here, &here, Some(Origin::Measured)),
        (&other_ways, &here, Some(Origin::Measured)),
        (&here, &earlier, Some(Origin::Measured)),
        (&earlier, &here, Some(Origin::Shipped)),
        (&earlier, &other_ways, Some(Origin::Shipped)),
        (&earlier, &earlier, Some(Origin::Measured)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(&name), text(users, 0)).unwrap();
        let tuning = Tuning::read(Some(dir.path()), &[(&name, &text(shipped, 1))], facts, arch);
        let found = tuning
            .find(&problem(16), false)
            .map(|(origin, tuned)| (origin, tuned.ways[0].0.to_string()));
        let way = if taken == Some(Origin::Measured) { 0 } else { 1 };
        assert_eq!(found, taken.map(|origin| (origin, ways[way].clone())), "{:?}", tuning.notes());
        for (note, subject) in tuning.notes().iter().zip([users, shipped]) {
            assert_eq!(
                note.contains(", of earlier kernels: 1 problems"),
                *subject == earlier,
                "{note}"
            );
        }
    }
}

#[test]
fn measurements_of_other_ways_are_added_to() {
    let dir = tempfile::tempdir().unwrap();
    let earlier = Subject { space: "x".into(), ..subject() };
    keep(dir.path(), earlier, (13, 0), vec![entry(1, &[("a", 1.0)])]).unwrap();
    let (path, refusal) = keep(dir.path(), subject(), (13, 0), vec![entry(2, &[])]).unwrap();
    assert_eq!(refusal, None);
    assert_eq!(read_record(&path).unwrap().unwrap().entries.len(), 2);
}

#[test]
fn a_measurement_stands_for_the_tokens_down_to_half_of_its_own() {
    let way = Choice::all().next().unwrap().to_string();
    let table = Table::new(&record([64, 1, 16, 24].map(|m| entry(m, &[(&way, 1.0)])).into()));
    let stands = |m| table.find(&problem(m), false).map(|tuned| tuned.m);
    let expected = [
        (0, None),
        (1, Some(1)),
        (2, None),
        (8, None),
        (9, Some(16)),
        (16, Some(16)),
        (17, Some(24)),
        (25, None),
        (33, Some(64)),
        (64, Some(64)),
        (65, None),
    ];
    for (m, tuned) in expected {
        assert_eq!(stands(m), tuned, "{m}");
    }
    // Of another problem, and with rounded factors where that changes nothing.
    assert_eq!(table.find(&problem(16).with_hidden(72), false), None);
    assert_eq!(table.find(&problem(16).with_op(Op::Mlp), false), None);
    let layout = WeightLayout { orientation: Orientation::InOut, ..WeightLayout::HF };
    assert_eq!(table.find(&problem(16).with_layout(layout), false), None);
    assert!(table.find(&problem(16), true).is_some());
    assert!(table.find(&problem(16).with_bias(true), false).is_some());
}

#[test]
fn wrong_results_are_not_ranked_and_equal_times_keep_their_order() {
    let names: Vec<String> = Choice::all().take(3).map(|way| way.to_string()).collect();
    let mut entry = entry(8, &[(&names[2], 3.0), (&names[1], 2.0), (&names[0], 2.0)]);
    let wrong = Outcome::Wrong { reason: "off".into() };
    entry.trials.push(Trial { way: names[2].clone(), predicted_us: None, outcome: wrong });
    entry.trials.push(Trial {
        way: "of another version".into(),
        predicted_us: None,
        outcome: measured(1.0),
    });
    let table = Table::new(&record(vec![entry]));
    let ways: Vec<String> =
        table.find(&problem(8), false).unwrap().ways.iter().map(|(w, _)| w.to_string()).collect();
    assert_eq!(ways, [&names[1], &names[0], &names[2]].map(String::clone));
}

#[test]
fn entries_are_added_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let add = |entries| keep(dir.path(), subject(), (13, 1), entries).unwrap();
    let (path, refusal) = add(vec![entry(1, &[("a", 1.0)]), entry(2, &[("a", 2.0)])]);
    assert_eq!((path.file_name().unwrap(), refusal), ("device-1-sm_90a.json".as_ref(), None));
    add(vec![entry(2, &[("a", 5.0)]), entry(4, &[])]);
    let record = read_record(&path).unwrap().unwrap();
    let times: Vec<_> =
        record.entries.iter().map(|e| (e.problem.m, e.trials[0].outcome.median_us())).collect();
    assert_eq!(times, [(1, Some(1.0)), (2, Some(5.0)), (4, None)]);
    // What is refused is replaced, and said.
    std::fs::write(&path, "{}").unwrap();
    let (_, refusal) = add(vec![entry(8, &[])]);
    assert!(matches!(refusal, Some(Refusal::Damaged(_))), "{refusal:?}");
    assert_eq!(read_record(&path).unwrap().unwrap().entries.len(), 1);
}

#[test]
fn what_cannot_be_written_is_said() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = keep(file.path(), subject(), (13, 0), Vec::new()).unwrap_err();
    assert!(error.path.starts_with(file.path()) && !error.why.is_empty(), "{error}");
}

const WORKER: &str = "SWIGLU_TUNING_TEST_WORKER";

#[test]
fn worker() {
    let Some(first) = std::env::var_os(WORKER) else {
        return; // Only meant for the processes of the next test.
    };
    let first: usize = first.to_str().unwrap().parse().unwrap();
    let dir = TuningOptions::default().directory().unwrap();
    for m in first..first + 10 {
        keep(&dir, subject(), (13, 0), vec![entry(m, &[("a", m as f64)])]).unwrap();
    }
}

#[test]
fn processes_that_keep_at_once_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let start = |i: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["plan::tuning::tests::worker", "--exact"]);
        command.env("SWIGLU_TUNING_DIR", dir.path()).env(WORKER, (i * 10).to_string());
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let running: Vec<_> = (0..4).map(start).collect();
    for mut process in running {
        assert!(process.wait().unwrap().success());
    }
    let record = read_record(&dir.path().join(file_name(&subject()))).unwrap().unwrap();
    let mut seen: Vec<usize> = record.entries.iter().map(|e| e.problem.m).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<_>>());
}

#[test]
fn the_directory_is_the_given_the_environments_or_the_users() {
    let resolve = |options: TuningOptions, env: &[(&str, &str)]| {
        let find = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into());
        options.resolve(&find).map(|dir| dir.display().to_string())
    };
    let home = ("HOME", "/home/a");
    let default = TuningOptions::default;
    let expect = |dir: &str| Some(dir.to_owned());
    assert_eq!(resolve(default(), &[home]), expect("/home/a/.local/share/swiglu/tuning"));
    let data = ("XDG_DATA_HOME", "/data");
    assert_eq!(resolve(default(), &[home, data]), expect("/data/swiglu/tuning"));
    let own = ("SWIGLU_TUNING_DIR", "t");
    assert_eq!(resolve(default(), &[home, data, own]), expect("t"));
    let given = TuningOptions { dir: Some("/given".into()), ..default() };
    assert_eq!(resolve(given, &[own]), expect("/given"));
    assert_eq!(resolve(default(), &[("XDG_DATA_HOME", "relative"), ("HOME", "")]), None);
}

#[test]
fn the_list_has_every_shipped_record() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tuning");
    let files: BTreeSet<String> = std::fs::read_dir(dir).map_or_else(
        |_| BTreeSet::new(),
        |dir| dir.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect(),
    );
    assert_eq!(files, SHIPPED.iter().map(|(name, _)| (*name).to_owned()).collect());
}

#[test]
fn every_shipped_record_is_whole_and_each_problem_has_a_known_way() {
    for (name, text) in SHIPPED {
        let record = Record::parse(text).unwrap_or_else(|why| panic!("{name}: {why}"));
        let table = Table::new(&record);
        for entry in &record.entries {
            let found = table.find(&entry.problem, entry.tf32);
            assert!(
                found.is_some_and(|tuned| tuned.m == entry.problem.m),
                "{name}: {}",
                entry.problem
            );
        }
    }
}

/// A device whose plans follow the records of a directory.
fn device(dir: &Path) -> Option<Cuda> {
    let tuning = TuningOptions { dir: Some(dir.to_owned()), disabled: false };
    let options = CudaOptions { tuning, ..common::options()? };
    Some(Cuda::with_options(&options).unwrap())
}

#[test]
fn plans_follow_the_fastest_way_that_does_what_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    // What is shipped may have a note too.
    let of_dir = |note: &&String| note.contains(&*dir.path().to_string_lossy());
    assert_eq!(cuda.tuning_notes().iter().find(of_dir), None);
    let before = cuda.plan(problem(16), None);
    let options = TuningOptions { dir: Some(dir.path().to_owned()), disabled: false };
    // One that the model would not take, the unfused path before it, and before that one which
    // does not compute this at all.
    let kernel = "mma_gated_gemm 128x64";
    assert_ne!(before.parameters["tile_m"], 128, "{before}");
    let times = [("simt_gated_gemm 128x64", 1.0), ("cublaslt + elementwise", 2.0), (kernel, 3.0)];
    let kept = cuda.keep_tuning(&options, vec![entry(16, &times)]).unwrap();
    assert_eq!(kept.1, None);
    let cuda = device(dir.path()).unwrap();
    let chosen = |problem: Problem, path| {
        let candidates = cuda.candidates(&problem, path);
        let plan = cuda.plan(problem, path);
        let chosen: Vec<_> = candidates.into_iter().filter(|c| c.chosen).collect();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].reason, plan.reason);
        (chosen[0].name.clone(), plan.reason, chosen[0].measured_us)
    };
    let unfused = chosen(problem(16), None);
    assert_eq!((unfused.0.as_str(), unfused.2), ("cublaslt + elementwise", Some(2.0)));
    assert_eq!(unfused.1, "the fastest, measured with 16 tokens");
    let fused = problem(9).with_numerics(Numerics::default());
    let (name, reason, time) = chosen(fused, None);
    assert_eq!((name.as_str(), time), (kernel, Some(3.0)));
    assert_eq!(reason, "the fastest, measured with 16 tokens");
    assert_eq!(chosen(problem(16), Some(swiglu_core::Path::Fused)).0, kernel);
    // Nothing was measured for so few.
    assert_eq!(cuda.plan(problem(8), None).reason, device_without().plan(problem(8), None).reason);
    assert!(cuda.tuning_notes()[0].contains("1 problems measured"), "{:?}", cuda.tuning_notes());
    // A damaged record is said and not used.
    std::fs::write(kept.0, "no record").unwrap();
    let cuda = device(dir.path()).unwrap();
    assert_eq!(cuda.plan(problem(16), None), before);
    let note = &cuda.tuning_notes()[0];
    assert!(note.contains("not used: it is damaged"), "{note}");
}

/// The device with a record in which this way of the problem was the fastest, before a fused kernel.
fn where_fastest(way: &str, problem: Problem, cuda: &Cuda, dir: &std::path::Path) -> Cuda {
    let options = TuningOptions { dir: Some(dir.to_owned()), disabled: false };
    let measured = entry(problem.m, &[(way, 1.0), ("mma_gated_gemm 128x64", 2.0)]);
    cuda.keep_tuning(&options, vec![Entry { problem, ..measured }]).unwrap();
    device(dir).unwrap()
}

/// Where f32 sums between two steps were the fastest: what cuBLASLt takes goes through it, and what it does not
/// take, or what has to be written beside h, through a fused kernel.
#[test]
fn sums_between_are_planned_and_have_a_fused_kernel_behind_them() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let (m, k, h) = (13, 67, 45);
    let case = Case { bias: true, ..Case::new(Op::GatedLinear, [m, k, h], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let params = parameters.gated();
    let name = "cublaslt f32 + elementwise";
    let cuda = where_fastest(name, params.problem(16), &cuda, dir.path());
    let layer = GatedLinear::new(&cuda, &params).unwrap();
    let plan = layer.plan(m);
    assert_eq!((plan.kernel.as_str(), plan.path), (name, swiglu_core::Path::Unfused));
    assert_eq!(plan.problem, params.problem(m));
    let fused = GatedLinear::with_path(&cuda, &params, swiglu_core::Path::Fused).unwrap();
    let stream = cuda.stream();
    let x = random::normal_matrix::<bf16>(1, m, k, 1.0).unwrap();
    let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let forward = |layer: &GatedLinear<bf16>, x| {
        let mut out = DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap();
        layer.forward(&stream, x, out.view_mut()).unwrap();
        out.to_host().unwrap()
    };
    let judge = |x: MatrixRef<'_, bf16>, out: &Matrix<bf16>| {
        let judgement = bounds::gated_linear(x, &params).unwrap().judge(out.view()).unwrap();
        assert!(judgement.passed(), "{judgement:?}");
    };
    layer.reserve(&stream, m).unwrap();
    let host = x.to_host().unwrap();
    // Rows one element apart, which overlap.
    let overlapping = DeviceMatrixRef::with_stride(x.buffer(), m, k, 1).unwrap();
    // What was reserved is enough for a capture, also of what goes to the other kernel.
    let mut captured = DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap();
    let graph =
        stream.capture(|| layer.forward(&stream, overlapping, captured.view_mut())).unwrap();
    // SAFETY: what the graph reads and writes lives on.
    unsafe { graph.launch(&stream) }.unwrap();
    judge(host.view(), &forward(&layer, x.view()));
    let values: Vec<bf16> =
        (0..m).flat_map(|i| host.as_slice()[i..i + k].iter().copied()).collect();
    let out = forward(&layer, overlapping);
    judge(Matrix::from_vec(values, m, k).unwrap().view(), &out);
    assert_eq!(out, forward(&fused, overlapping));
    assert_eq!(out, captured.to_host().unwrap());
    // What a backward pass needs is written by the kernel that would be chosen without sums.
    let mut saved = [(); 3].map(|()| DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap());
    let [out, gate, up] = saved.each_mut().map(DeviceMatrix::view_mut);
    layer.forward_saving(&stream, x.view(), out, gate, up).unwrap();
    assert_eq!(saved[0].to_host().unwrap(), forward(&fused, x.view()));
}

/// Where values of T between two steps are as asked for: what cuBLASLt does not take goes through a fused kernel also
/// where pre-activations are saved, but not where the path was asked for.
#[test]
fn what_cublaslt_does_not_take_is_saved_by_a_fused_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let (m, k, h) = (5, 40, 24);
    let numerics = Numerics::default().with_rounding(Rounding::PreRound);
    let case = Case { numerics, ..Case::new(Op::GatedLinear, [m, k, h], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let params = parameters.gated();
    let name = "cublaslt + elementwise";
    let cuda = where_fastest(name, params.problem(8), &cuda, dir.path());
    let stream = cuda.stream();
    let x = random::normal_matrix::<bf16>(1, m, k, 1.0).unwrap();
    let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let overlapping = DeviceMatrixRef::with_stride(x.buffer(), m, k, 1).unwrap();
    let save = |layer: &GatedLinear<bf16>| {
        let mut saved = [(); 3].map(|()| DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap());
        let [out, gate, up] = saved.each_mut().map(DeviceMatrix::view_mut);
        layer.forward_saving(&stream, overlapping, out, gate, up)?;
        Ok::<_, CudaError>(saved.map(|matrix| matrix.to_host().unwrap()))
    };
    let planned = GatedLinear::new(&cuda, &params).unwrap();
    assert_eq!(planned.plan(m).kernel, name);
    let on = |path| GatedLinear::with_path(&cuda, &params, path).unwrap();
    assert_eq!(save(&planned).unwrap(), save(&on(swiglu_core::Path::Fused)).unwrap());
    let refused = save(&on(swiglu_core::Path::Unfused)).unwrap_err();
    assert!(matches!(refused, CudaError::Unsupported { .. }), "{refused}");
}

fn device_without() -> Cuda {
    common::device().unwrap()
}
