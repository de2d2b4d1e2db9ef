//! What counts of a measurement, its file under everything that happens to files, and the plans that follow it.

use std::path::Path;

use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::{Activation, DType, Numerics, Op, Problem, bf16};

use super::*;
use crate::common;
use crate::device::arch::Arch;
use crate::device::cuda::Cuda;
use crate::device::error::CudaError;
use crate::layers::GatedLinear;
use crate::plan::tuning::{TuningOptions, seal};
use crate::{CudaOptions, Mlp};

/// About an H100.
const RATES: Rates = Rates {
    clock_khz: 1_980_000,
    memory_bandwidth: 3_352_000_000_000,
    l2_bytes: 50 << 20,
    shared_bytes_optin: 227 << 10,
};

/// What would be found where all is as expected, but for the launch.
fn readings(rates: &Rates, multiprocessors: u32, launches: f64) -> Calibration<Reading> {
    let Calibration { copy, clock, l2, launch, barrier } =
        Calibration::new(rates, multiprocessors, None);
    let value = |rate: Rate| Reading::Value(rate.prior);
    Calibration {
        copy: value(copy),
        clock: value(clock),
        l2: value(l2),
        launch: Reading::Value(launch.prior * launches),
        barrier: value(barrier),
    }
}

#[test]
fn without_a_measurement_that_counts_the_machine_is_what_it_was() {
    let untold = Rates { clock_khz: 0, memory_bandwidth: 0, ..RATES };
    for (arch, rates) in Arch::ALL.into_iter().flat_map(|arch| [(arch, RATES), (arch, untold)]) {
        let machine = Machine::new(&rates, 132, arch);
        let none = Calibration::new(&rates, 132, None);
        assert_eq!(none.refine(&machine), machine);
        assert!(!none.is_measured() && none.to_string().contains("info --probe"), "{none}");
        let missing = |why: &str| Reading::Missing(why.into());
        let impossible = Calibration {
            copy: Reading::Value(4e14),
            clock: Reading::Value(0.0),
            l2: missing("it is not told"),
            launch: Reading::Value(-1e-6),
            barrier: Reading::new(f64::INFINITY),
        };
        let refused = Calibration::new(&rates, 132, Some(&impossible));
        assert_eq!(refused.refine(&machine), machine);
        for (name, rate) in refused.each() {
            assert!(rate.measured.is_none() && rate.refused.is_some(), "{name}: {rate:?}");
        }
        let said = refused.to_string();
        assert!(said.contains("l2 (it is not told)") && said.contains("possible are"), "{said}");
        let as_expected = Calibration::new(&rates, 132, Some(&readings(&rates, 132, 1.0)));
        assert_eq!(as_expected.refine(&machine), machine);
        assert!(as_expected.is_measured());
    }
}

#[test]
fn a_rate_of_the_model_changes_as_the_measurement_stands_to_what_is_expected() {
    let machine = Machine::new(&RATES, 132, Arch::Sm90a);
    let expected = Calibration::new(&RATES, 132, None);
    let measured = Calibration {
        copy: Reading::Value(expected.copy.prior * 0.5),
        clock: Reading::Value(expected.clock.prior * 1.25),
        l2: Reading::Value(expected.l2.prior * 2.0),
        launch: Reading::Value(expected.launch.prior * 4.0),
        barrier: Reading::Missing("no barrier".into()),
    };
    let calibration = Calibration::new(&RATES, 132, Some(&measured));
    let refined = calibration.refine(&machine);
    let times = [
        (refined.memory, machine.memory, 0.5),
        (refined.clock, machine.clock, 1.25),
        // They are bytes per cycle.
        (refined.l2, machine.l2, 2.0 / 1.25),
        (refined.kept, machine.kept, 2.0 / 1.25),
        (refined.launch, machine.launch, 4.0),
        (refined.barrier, machine.barrier, 1.0),
    ];
    for (refined, prior, times) in times {
        assert!((refined / prior / times - 1.0).abs() < 1e-12, "{refined} {prior}");
    }
    // What two probes of one card differ by is no other card.
    let near = |times| Reading::Value(expected.clock.prior * times);
    let refined = |clock| {
        let readings = Calibration { clock, ..readings(&RATES, 132, 1.0) };
        Calibration::new(&RATES, 132, Some(&readings)).refine(&machine)
    };
    assert_eq!([0.95, 1.05].map(|times| refined(near(times))), [machine; 2]);
    assert!([0.9, 1.1].map(|times| refined(near(times))).iter().all(|refined| *refined != machine));
    let said = calibration.to_string();
    assert_eq!(
        said,
        "rates measured: copy, clock, l2, launch; expected from the architecture: barrier (no barrier)"
    );
}

fn here(cuda: &Cuda) -> Card {
    Card::here(cuda.facts(), cuda.arch())
}

#[test]
fn a_file_is_what_was_kept_or_is_refused_with_a_reason() {
    let Some(cuda) = common::device() else { return };
    let (dir, card) = (tempfile::tempdir().unwrap(), here(&cuda));
    assert_eq!(read(dir.path(), &card), None);
    let mut measured = readings(&RATES, 132, 0.7);
    measured.copy = Reading::new(1.0 / 3.0e-13);
    measured.clock = Reading::Missing("none".into());
    let path = keep(dir.path(), &card, &measured).unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(name.ends_with("-sm_90a.machine.json"), "{name}");
    assert_eq!(read(dir.path(), &card), Some((path.clone(), Ok(measured.clone()))));
    let text = std::fs::read_to_string(&path).unwrap();
    let refusal = |text: &str| {
        std::fs::write(&path, text).unwrap();
        read(dir.path(), &card).unwrap().1.unwrap_err()
    };
    for damaged in ["", "no record", &text[..text.len() / 2], &text.replacen("333", "433", 1)] {
        let refusal = refusal(damaged);
        assert!(matches!(refusal, Refusal::Damaged(_)), "{damaged}: {refusal}");
    }
    let edited = |from: &str, to: &str| {
        let body = text.split_once("\"record\": ").unwrap().1.strip_suffix("}\n").unwrap();
        assert!(body.contains(from), "{body}");
        refusal(&seal(&body.replacen(from, to, 1)))
    };
    let driver = format!("\"driver\":[{},", cuda.facts().driver_version.0);
    let others = [
        ("\"sm_count\":", "\"sm_count\":1"),
        ("\"clock_khz\":", "\"clock_khz\":1"),
        (&driver[..], "\"driver\":[9,"),
    ];
    for (from, to) in others {
        let refusal = edited(from, to);
        assert!(matches!(refusal, Refusal::Device { .. }), "{from}: {refusal}");
        assert!(refusal.to_string().contains(" MHz, "), "{refusal}");
    }
    assert_eq!(edited("\"source\":\"", "\"source\":\"0"), Refusal::Source);
    assert_eq!(edited("\"schema\":1", "\"schema\":7"), Refusal::Schema { given: 7 });
    // What is there is replaced whole.
    keep(dir.path(), &card, &measured).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let not_kept = keep(&path, &card, &measured).unwrap_err();
    assert!(not_kept.to_string().contains("cannot be kept"), "{not_kept}");
}

fn in_dir(dir: &Path) -> TuningOptions {
    TuningOptions { dir: Some(dir.to_owned()), disabled: false }
}

/// A device whose plans follow what a directory has.
fn device(dir: &Path) -> Option<Cuda> {
    let options = CudaOptions { tuning: in_dir(dir), ..common::options()? };
    Some(Cuda::with_options(&options).unwrap())
}

/// The plans of blocks and gated linear layers of some sizes.
fn plans(cuda: &Cuda) -> Vec<String> {
    let mut plans = Vec::new();
    for op in [Op::GatedLinear, Op::Mlp] {
        for (m, [k, h]) in [1, 5, 16, 40, 130, 700].into_iter().flat_map(|m| SIZES.map(|s| (m, s)))
        {
            let problem = Problem::new(op, m, k, h, DType::Bf16, Activation::SWIGLU)
                .with_numerics(Numerics::default());
            let plan = cuda.plan(problem, None).unwrap();
            plans.push(format!("{problem}: {} {:?}", plan.kernel, plan.parameters));
        }
    }
    plans
}

const SIZES: [[usize; 2]; 4] = [[64, 96], [256, 512], [896, 4864], [4096, 14336]];

fn last_note(cuda: &Cuda) -> &str {
    cuda.tuning_notes().last().unwrap()
}

#[test]
fn plans_follow_a_file_and_a_damaged_one_is_said_and_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let before = plans(&cuda);
    assert!(last_note(&cuda).starts_with("rates expected"), "{}", last_note(&cuda));
    let rates = Rates::from(cuda.facts());
    let measured = |launches| readings(&rates, cuda.facts().sm_count, launches);
    // What is as it is expected changes nothing.
    let path = keep(dir.path(), &here(&cuda), &measured(1.0)).unwrap();
    let as_expected = device(dir.path()).unwrap();
    assert_eq!(plans(&as_expected), before);
    assert!(as_expected.calibration().is_measured());
    let said = format!("{}: rates measured: copy, clock, l2, launch, barrier", path.display());
    assert_eq!(last_note(&as_expected), said);
    keep(dir.path(), &here(&cuda), &measured(0.125)).unwrap();
    let faster = device(dir.path()).unwrap();
    assert_ne!(plans(&faster), before);
    // Of a device that is open nothing changes.
    assert_eq!(plans(&cuda), before);
    std::fs::write(&path, "no record").unwrap();
    let damaged = device(dir.path()).unwrap();
    assert_eq!(plans(&damaged), before);
    let note = last_note(&damaged);
    assert!(note.contains("not used: it is damaged") && note.contains("rates expected"), "{note}");
    assert!(!damaged.calibration().is_measured());
    // With no measurements to be used it is not looked at.
    let options = common::options()
        .unwrap()
        .with_tuning(TuningOptions { disabled: true, ..in_dir(dir.path()) });
    let note = Cuda::with_options(&options).unwrap();
    assert!(last_note(&note).starts_with("rates expected"), "{}", last_note(&note));
}

/// What was measured of a layer goes before rates.
#[test]
fn the_fastest_that_was_measured_stays_the_fastest() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = common::device() else { return };
    let problem = Problem::new(Op::GatedLinear, 40, 64, 96, DType::Bf16, Activation::SWIGLU)
        .with_numerics(Numerics::default());
    let way = "mma_gated_gemm 128x64";
    let tuned = common::preferring(&cuda, dir.path(), way, &[problem]);
    let plan = tuned.plan(problem, None).unwrap();
    assert_eq!((plan.kernel.as_str(), plan.reason.as_str()), (KERNEL, "the fastest, measured"));
    let rates = Rates::from(cuda.facts());
    keep(dir.path(), &here(&cuda), &readings(&rates, cuda.facts().sm_count, 0.125)).unwrap();
    let measured = device(dir.path()).unwrap();
    assert!(measured.calibration().is_measured());
    assert_eq!(measured.plan(problem, None).unwrap(), plan);
    let notes = measured.tuning_notes();
    assert!(notes[0].contains("1 problems measured"), "{notes:?}");
    assert!(last_note(&measured).contains("rates measured"), "{notes:?}");
}

/// As plans name it.
const KERNEL: &str = "mma_gated_gemm";

/// Whose algorithm follows the time of a launch.
fn of_launches(cuda: &Cuda, faster: &Cuda) -> Problem {
    let all = plans(cuda).into_iter().zip(plans(faster)).enumerate();
    let (at, _) = all.into_iter().find(|(_, (a, b))| a != b).unwrap();
    let (op, at) = (if at < 24 { Op::GatedLinear } else { Op::Mlp }, at % 24);
    let (m, [k, h]) = ([1, 5, 16, 40, 130, 700][at / 4], SIZES[at % 4]);
    Problem::new(op, m, k, h, DType::Bf16, Activation::SWIGLU)
}

/// How a new layer of these parameters plans.
fn planned(cuda: &Cuda, op: Op, parameters: &Parameters<bf16>) -> Box<dyn Fn(usize) -> String> {
    match op {
        Op::Mlp => {
            let layer = Mlp::new(cuda, &parameters.mlp()).unwrap();
            Box::new(move |m| layer.plan(m).to_string())
        }
        _ => {
            let layer = GatedLinear::new(cuda, &parameters.gated()).unwrap();
            Box::new(move |m| layer.plan(m).to_string())
        }
    }
}

#[test]
fn layers_that_there_are_keep_their_planner() {
    let [dir, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let Some(cuda) = device(dir.path()) else { return };
    let rates = Rates::from(cuda.facts());
    let measured = readings(&rates, cuda.facts().sm_count, 0.125);
    keep(other.path(), &here(&cuda), &measured).unwrap();
    let problem = of_launches(&cuda, &device(other.path()).unwrap());
    let [m, k, h] = [problem.m, problem.hidden, problem.intermediate];
    let case = Case::new(problem.op, [m, k, h], DType::Bf16);
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let layer = |cuda: &Cuda| planned(cuda, problem.op, &parameters);
    let (there, before) = (layer(&cuda), layer(&device(dir.path()).unwrap()));
    assert_eq!(there(m), before(m));
    // An error leaves all as it is.
    let failed = cuda.recalibrate(|| Err(CudaError::NoDevice));
    assert_eq!(failed.unwrap_err(), CudaError::NoDevice);
    assert!(!cuda.calibration().is_measured());
    let calibrated = cuda.recalibrate(|| Ok(measured)).unwrap();
    assert_eq!(&calibrated.rates, cuda.calibration());
    // Also numbers of tokens that it had not planned.
    for m in [m, m + 1, m + 7, m + 33] {
        assert_eq!(there(m), before(m), "{m}");
    }
    assert_ne!(layer(&cuda)(m), before(m));
    // A later process has it.
    assert!(calibrated.kept.unwrap().starts_with(dir.path()));
    let later = device(dir.path()).unwrap();
    assert_eq!(later.calibration(), &calibrated.rates);
    assert_eq!(plans(&later), plans(&cuda));
}
