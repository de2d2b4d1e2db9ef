//! Records under everything that happens to files (`files`), and the choices that follow from them: in a table, and of a device
//! whose plans follow them (`planned`).

use std::collections::BTreeSet;
use std::process::Command;

use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::{
    Activation, BlockType, DType, Matrix, MatrixRef, Numerics, Op, Orientation, QuantizedTypes,
    Rounding, WeightLayout, bf16, bounds, random,
};

use super::table::{Table, Time};
use super::*;
use crate::CudaOptions;
use crate::common;
use crate::device::cuda::Cuda;
use crate::device::error::CudaError;
use crate::device::memory::{DeviceMatrix, DeviceMatrixRef};
use crate::kernels::decode_mlp::Limits;
use crate::kernels::elementwise::Stored;
use crate::layers::GatedLinear;
use crate::plan::Algorithm;

/// About an H200.
const RATES: Rates = Rates {
    clock_khz: 1_980_000,
    memory_bandwidth: 4_814_000_000_000,
    l2_bytes: 50_000_000,
    shared_bytes_optin: 227 << 10,
};

fn model() -> Model {
    let limits = Limits {
        multiprocessors: 132,
        shared: 227 << 10,
        cooperative: true,
        programmatic: true,
        tma: true,
    };
    Model { machine: Machine::new(&RATES, 132, Arch::Sm90a), limits, tf32: false }
}

fn subject() -> Subject {
    Subject {
        device: "Device 1".into(),
        arch: Arch::Sm90a,
        sm_count: 132,
        source: "source".into(),
        space: "space".into(),
    }
}

fn file_of(subject: &Subject) -> String {
    file_name(&subject.device, subject.arch, "json")
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

/// An entry whose algorithms were measured to take so long.
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
    let record = unseal::<Record>(text)?;
    record.check(here).map(|()| record)
}

mod files;
mod gemms;
mod planned;

#[test]
fn what_was_kept_is_read_and_every_damage_noticed() {
    let record = record(vec![entry(16, &[("a", 1.0 / 3.0), ("b", 2e5 / 7.0)]), entry(1, &[])]);
    let text = record.to_text().unwrap();
    assert_eq!(from_text(&text, &subject()).unwrap(), record);
    // It is JSON for whoever has no use for the digest.
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["record"]["entries"][0]["trials"][2]["outcome"], "refused");
    // Nothing in it is blank, and each problem is a line, so that two records can be compared by lines.
    let line = |entry: &Entry| serde_json::to_string(entry).unwrap();
    let lines = format!(
        "\"entries\":[\n{},\n{}\n]}}}}\n",
        line(&record.entries[0]),
        line(&record.entries[1])
    );
    assert!(text.ends_with(&lines) && text.lines().count() == 5, "{text}");
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
    let ways: Vec<String> =
        Algorithm::all(Op::GatedLinear).take(2).map(|way| way.to_string()).collect();
    let text = |entries: Vec<Entry>| {
        let mut record = Record::new(here.clone(), (13, 0));
        entries.into_iter().for_each(|entry| record.insert(entry));
        record.to_text().unwrap()
    };
    let first = text(vec![entry(16, &[(&ways[0], 1.0)])]);
    let second = text(vec![entry(16, &[(&ways[1], 1.0)]), entry(64, &[(&ways[1], 1.0)])]);
    let name = file_of(&here);
    let part = name.replace(".json", ".part.json");
    let other = "device-of-another-architecture.json".to_owned();
    let shipped = [(&*other, &*second), (&*part, &*first), (&*name, &*second)];
    let tuning = Tuning::read(None, &shipped, facts, arch, &model());
    let found = |m| {
        let (_, near) = tuning.near(&problem(m), false)?;
        Some(near.exact(&problem(m))?.times[0].algorithm.to_string())
    };
    assert_eq!([16, 64].map(found), [0, 1].map(|i| Some(ways[i].clone())));
    // Beside them it may be of a kind whose products were measured.
    let of_these = tuning.notes.iter().filter(|note| note.contains("problems measured"));
    assert_eq!(of_these.count(), 2, "{:?}", tuning.notes);
    assert!(tuning.notes[0].contains(&part), "{:?}", tuning.notes);
}

#[test]
fn a_record_of_these_kernels_goes_before_an_earlier_one_and_a_users_before_a_shipped_one() {
    let Some(cuda) = common::device() else { return };
    let (facts, arch) = (cuda.facts(), cuda.arch());
    let here = Subject::here(facts, arch);
    let earlier = Subject { source: "x".into(), ..here.clone() };
    // Other algorithms than there are now, for one more, or one less, is unrelated to those that were tried.
    let other_ways = Subject { space: "x".into(), ..here.clone() };
    let ways: Vec<String> =
        Algorithm::all(Op::GatedLinear).take(2).map(|way| way.to_string()).collect();
    let text = |subject: &Subject, way: usize| {
        let mut record = Record::new(subject.clone(), (13, 0));
        record.insert(entry(16, &[(&ways[way], 1.0)]));
        record.to_text().unwrap()
    };
    let name = file_of(&here);
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
        let tuning =
            Tuning::read(Some(dir.path()), &[(&name, &text(shipped, 1))], facts, arch, &model());
        let found = tuning.near(&problem(16), false).map(|(origin, near)| {
            (origin, near.exact(&problem(16)).unwrap().times[0].algorithm.to_string())
        });
        let way = if taken == Some(Origin::Measured) { 0 } else { 1 };
        assert_eq!(found, taken.map(|origin| (origin, ways[way].clone())), "{:?}", tuning.notes);
        for (note, subject) in tuning.notes.iter().zip([users, shipped]) {
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
    keep(dir.path(), earlier, (13, 0), RATES, vec![entry(1, &[("a", 1.0)])]).unwrap();
    let (path, refusal) = keep(dir.path(), subject(), (13, 0), RATES, vec![entry(2, &[])]).unwrap();
    assert_eq!(refusal, None);
    assert_eq!(read_sealed::<Record>(&path, MAX_FILE_BYTES).unwrap().unwrap().entries.len(), 2);
}

#[test]
fn measurements_frame_the_tokens_between_them_and_stand_for_few_beyond() {
    let way = Algorithm::all(Op::GatedLinear).next().unwrap().to_string();
    let entries = [64, 1, 16, 24, 4096].map(|m| entry(m, &[(&way, 1.0)]));
    let table = Table::new(&record(entries.into()), &model());
    let near = |m| table.near(&problem(m), false).map(|near| near.tokens().collect::<Vec<_>>());
    let expected: [(usize, Option<&[usize]>); 13] = [
        (0, None),
        (1, Some(&[1])),
        (2, Some(&[1, 16])),
        (16, Some(&[16])),
        (17, Some(&[16, 24])),
        (33, Some(&[24, 64])),
        (64, Some(&[64])),
        // Too far apart to frame what is between them.
        (65, Some(&[64])),
        (128, Some(&[64])),
        (129, None),
        (2047, None),
        (2048, Some(&[4096])),
        (1 << 20, Some(&[4096])),
    ];
    for (m, tokens) in expected {
        assert_eq!(near(m).as_deref(), tokens, "{m}");
    }
    // Of a shape near it, but not of one far away, nor of another operation or layout.
    let shape =
        |hidden, intermediate| problem(16).with_hidden(hidden).with_intermediate(intermediate);
    let of = |problem| table.near(&problem, false).map(|near| near.exact(&problem).is_some());
    assert_eq!(of(problem(16)), Some(true));
    assert_eq!(of(shape(72, 96)), Some(false));
    assert_eq!(of(shape(64 * 8, 96)), None);
    assert_eq!(of(problem(16).with_op(Op::Mlp)), None);
    let layout = WeightLayout { orientation: Orientation::InOut, ..WeightLayout::HF };
    assert_eq!(of(problem(16).with_layout(layout)), None);
    assert!(table.near(&problem(16), true).is_some());
    assert!(table.near(&problem(16).with_bias(true), false).is_some());
}

#[test]
fn between_measurements_estimates_are_corrected_as_these_are() {
    let algorithm = Algorithm::all(Op::GatedLinear).next().unwrap();
    let expected = |m| algorithm.seconds(&model(), &problem(m)) * 1e6;
    let times = [(16, 2.0), (64, 8.0)].map(|(m, share)| (m, share * expected(m)));
    let entries = times.map(|(m, us)| entry(m, &[(&algorithm.to_string(), us)]));
    let table = Table::new(&record(entries.into()), &model());
    let share = |m| {
        let near = table.near(&problem(m), false).unwrap();
        near.seconds(algorithm, &problem(m), &model()).unwrap()
            / algorithm.seconds(&model(), &problem(m))
    };
    for (m, expected) in [(16, 2.0), (64, 8.0), (128, 8.0)] {
        // Times are kept to the nanosecond.
        assert!((share(m) / expected - 1.0).abs() < 1e-3, "{m}: {}", share(m));
    }
    // Between them, and within what their own times leave.
    assert!((3.0..5.0).contains(&share(32)), "{}", share(32));
}

/// One token more than whole tiles makes another wave: what was measured behind it says nothing of what is before.
#[test]
fn a_measurement_on_this_side_of_a_step_counts() {
    let way = "sm90_gated_gemm 128x96";
    let algorithm =
        Algorithm::all(Op::GatedLinear).find(|algorithm| algorithm.to_string() == way).unwrap();
    let problem = |m| problem(m).with_hidden(896).with_intermediate(4864);
    let model = Model { machine: Machine::new(&RATES, 132, Arch::Sm90a), ..model() };
    let expected = |m| algorithm.seconds(&model, &problem(m)) * 1e6;
    assert!(expected(257) > 1.5 * expected(256) && expected(256) < 1.01 * expected(224));
    let times = [(224, 0.8), (257, 0.6)].map(|(m, share)| (m, share * expected(m)));
    let entries = times.map(|(m, us)| Entry { problem: problem(m), ..entry(m, &[(way, us)]) });
    let table = Table::new(&record(entries.into()), &model);
    for m in [232, 240, 256] {
        let near = table.near(&problem(m), false).unwrap();
        let share = near.seconds(algorithm, &problem(m), &model).unwrap() * 1e6 / expected(m);
        assert!((0.79..0.87).contains(&share), "{m}: {share}");
    }
}

/// A user's record of another model does not stand before a shipped one of a shape that is nearly the problem's; and a
/// block of more tokens than were measured of it follows its gated linear layer.
#[test]
fn what_is_nearest_counts_whoever_measured_it() {
    let way = Algorithm::all(Op::GatedLinear).next().unwrap().to_string();
    let of = |op, m, hidden| {
        let problem = problem(m).with_op(op).with_hidden(hidden);
        Entry { problem, ..entry(m, &[(&way, 1.0)]) }
    };
    let source = |origin, entries| Source {
        origin,
        earlier: false,
        table: Table::new(&record(entries), &model()),
    };
    let tables = vec![
        source(Origin::Measured, vec![of(Op::GatedLinear, 16, 256), of(Op::Mlp, 64, 64)]),
        source(Origin::Shipped, vec![of(Op::GatedLinear, 16, 64), of(Op::GatedLinear, 96, 64)]),
    ];
    let tuning = Tuning { tables, ..Tuning::default() };
    let origin = |problem: Problem| tuning.near(&problem, false).map(|(origin, _)| origin);
    assert_eq!(origin(problem(16).with_hidden(72)), Some(Origin::Shipped));
    assert_eq!(origin(problem(16).with_hidden(240)), Some(Origin::Measured));
    let block = |m| problem(m).with_op(Op::Mlp);
    assert_eq!([64, 96].map(|m| origin(block(m))), [Origin::Measured, Origin::Shipped].map(Some));
}

/// What a choice costs where a problem was not measured, as a multiple of the fastest that was: of each problem of the
/// shipped records from the others of its K and H, from those of other K and H alone, and from the records of the other
/// device.
#[test]
fn choices_without_measurements_of_their_own_are_near_the_fastest() {
    type Losses = Vec<(f64, String)>;
    let records: Vec<Record> =
        SHIPPED.iter().map(|(_, text)| unseal::<Record>(text).unwrap()).collect();
    let of = |record: &Record| {
        let machine = Machine::new(&record.rates.unwrap(), record.subject.sm_count, Arch::Sm90a);
        Model { machine, ..model() }
    };
    let same = |a: &Problem, b: &Problem| (a.hidden, a.intermediate) == (b.hidden, b.intermediate);
    let (mut between, mut beside, mut like) = (Losses::new(), Losses::new(), Losses::new());
    for record in &records {
        let whole = Table::new(record, &of(record));
        for Entry { problem, .. } in &record.entries {
            let exact = whole.near(problem, false).unwrap().exact(problem).unwrap();
            let loss = |tables: &[Table]| {
                let nears = tables.iter().filter_map(|table| table.near(problem, false));
                let near = nears.min_by_key(|near| near.rank(problem))?;
                // What is compared rounds otherwise: no plan takes it.
                let candidates = exact.times.iter().filter(|time| {
                    time.algorithm.stored() != Some(Stored::Elements)
                        || problem.numerics.rounding != Rounding::Fused
                });
                let estimate = |time: &&Time| near.seconds(time.algorithm, problem, &of(record));
                let estimates: Vec<_> =
                    candidates.filter_map(|t| Some((t.us, estimate(&t)?, t.algorithm))).collect();
                let best = estimates.iter().map(|e| e.0).fold(f64::INFINITY, f64::min);
                let chosen = estimates.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
                let Problem { op, m, hidden, intermediate, .. } = problem;
                let what = format!(
                    "{op} {m} {hidden}/{intermediate} on {}: {}",
                    record.subject.device, chosen.2
                );
                Some((chosen.0 / best, what))
            };
            let without = |keep: &dyn Fn(&Problem) -> bool| {
                let entries = record.entries.iter().filter(|e| keep(&e.problem)).cloned();
                let part = Record { entries: entries.collect(), ..record.clone() };
                [Table::new(&part, &of(record))]
            };
            between.extend(loss(&without(&|p| p != problem)));
            beside.extend(loss(&without(&|p| !same(p, problem))));
            let others =
                records.iter().filter(|other| other.subject.device != record.subject.device);
            let others: Vec<_> = others.map(|other| Table::new(other, &of(other))).collect();
            like.extend(loss(&others));
        }
    }
    for (what, losses, mean, worst) in [
        ("between", between, 1.006, 1.15),
        ("beside", beside, 1.03, 1.25),
        ("of a like device", like, 1.007, 1.2),
    ] {
        let count = losses.len() as f64;
        let average = (losses.iter().map(|(loss, _)| loss.ln()).sum::<f64>() / count).exp();
        let most = losses.iter().map(|(loss, _)| *loss).fold(0.0, f64::max);
        println!("{what}: {count} problems, {average:.4} on average, {most:.3} at worst");
        for (loss, what) in losses.iter().filter(|(loss, _)| *loss > 1.03) {
            println!("  {loss:.3} {what}");
        }
        assert!(average < mean && most < worst, "{what}: {average} {most}");
    }
}

#[test]
fn each_type_of_quantised_weights_has_measurements_of_its_own() {
    let types = |block| Some(QuantizedTypes::of(Op::Mlp, block));
    let of = |block| problem(1).with_op(Op::Mlp).with_quantized(types(block));
    let way = Algorithm::all(Op::Mlp).next().unwrap().to_string();
    let mut measured = entry(1, &[(&way, 5.0)]);
    measured.problem = of(BlockType::Q8_0);
    let table = Table::new(&record(vec![measured]), &model());
    let exact = |problem: &Problem| {
        table.near(problem, false).and_then(|near| near.exact(problem)).is_some()
    };
    assert!(exact(&of(BlockType::Q8_0)));
    assert!(!exact(&of(BlockType::Q4_0)) && !exact(&problem(1).with_op(Op::Mlp)));
}

#[test]
fn wrong_results_are_not_ranked_and_equal_times_keep_their_order() {
    let names: Vec<String> =
        Algorithm::all(Op::GatedLinear).take(3).map(|way| way.to_string()).collect();
    let mut entry = entry(8, &[(&names[2], 3.0), (&names[1], 2.0), (&names[0], 2.0)]);
    let wrong = Outcome::Wrong { reason: "off".into() };
    entry.trials.push(Trial { way: names[2].clone(), predicted_us: None, outcome: wrong });
    entry.trials.push(Trial {
        way: "of another version".into(),
        predicted_us: None,
        outcome: measured(1.0),
    });
    let table = Table::new(&record(vec![entry]), &model());
    let exact = table.near(&problem(8), false).unwrap().exact(&problem(8)).unwrap();
    let ways: Vec<String> = exact.times.iter().map(|time| time.algorithm.to_string()).collect();
    assert_eq!(ways, [&names[1], &names[0], &names[2]].map(String::clone));
}

#[test]
fn entries_are_added_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let add = |entries| keep(dir.path(), subject(), (13, 1), RATES, entries).unwrap();
    let (path, refusal) = add(vec![entry(1, &[("a", 1.0)]), entry(2, &[("a", 2.0)])]);
    assert_eq!((path.file_name().unwrap(), refusal), ("device-1-sm_90a.json".as_ref(), None));
    add(vec![entry(2, &[("a", 5.0)]), entry(4, &[])]);
    let record = read_sealed::<Record>(&path, MAX_FILE_BYTES).unwrap().unwrap();
    let times: Vec<_> =
        record.entries.iter().map(|e| (e.problem.m, e.trials[0].outcome.median_us())).collect();
    assert_eq!(times, [(1, Some(1.0)), (2, Some(5.0)), (4, None)]);
    // What is refused is replaced, and said.
    std::fs::write(&path, "{}").unwrap();
    let (_, refusal) = add(vec![entry(8, &[])]);
    assert!(matches!(refusal, Some(Refusal::Damaged(_))), "{refusal:?}");
    assert_eq!(read_sealed::<Record>(&path, MAX_FILE_BYTES).unwrap().unwrap().entries.len(), 1);
}

#[test]
fn what_cannot_be_written_is_said() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = keep(file.path(), subject(), (13, 0), RATES, Vec::new()).unwrap_err();
    assert!(error.path.starts_with(file.path()) && !error.why.is_empty(), "{error}");
}
