use swiglu_core::{Activation, DType, Numerics, Op, Path, Problem, WeightLayout};
use swiglu_lab::profile::*;
use swiglu_lab::{DeviceKind, Heat};

fn subject(op: Op, m: usize, path: Path) -> Subject {
    let problem = Problem::new(
        op,
        m,
        if op == Op::Activation { 0 } else { 4096 },
        14336,
        DType::Bf16,
        Activation::SWIGLU,
    )
    .with_numerics(Numerics::default())
    .with_layout(WeightLayout::HF);
    Subject { problem, device: DeviceKind::Cuda, path, launches: 1, graph: true, heat: Heat::Cold }
}

fn call_by_call(op: Op, m: usize, path: Path) -> Subject {
    Subject { graph: false, ..subject(op, m, path) }
}

fn ceilings() -> Ceilings {
    let ceiling = |name: &str, per_second| Ceiling { name: name.into(), per_second };
    Ceilings {
        memory: Some(ceiling("copy", 4.0e12)),
        compute: vec![ceiling("f32 GEMM", 4.0e14), ceiling("bf16 GEMM", 8.0e14)],
        ..Ceilings::default()
    }
}

#[test]
fn classes_follow_the_larger_floor_and_latency_is_what_neither_explains() {
    let work = |us| Work { us, bytes: 4e6, flops: 8e8 };
    // One microsecond for either.
    let classes = [
        (work(1.2), Some(8e12), Some(1e15), Class::Compute),
        (work(1.2), Some(4e12), Some(1e16), Class::Memory),
        (work(10.0), Some(4e12), Some(8e14), Class::Latency),
    ];
    for (work, memory, compute, class) in classes {
        assert_eq!(classify(work, memory, compute).class, Some(class), "{work:?}");
    }
    let unknown = classify(work(1.0), None, None);
    assert_eq!((unknown.class, unknown.floor_us()), (None, None));
    assert_eq!(classify(work(1.0), Some(f64::NAN), Some(0.0)).class, None);
    let nothing = classify(work(0.0), Some(4e12), None);
    assert_eq!((nothing.class, nothing.gbps, nothing.gflops), (None, 0.0, 0.0));
    let known = classify(work(2.0), Some(4e12), None);
    assert_eq!((known.gbps, known.gflops, known.floor_us()), (2000.0, 400_000.0, Some(1.0)));
}

#[test]
fn an_unfused_call_is_told_what_fusing_saves() {
    let unfused = Subject { launches: 3, ..subject(Op::GatedLinear, 4096, Path::Unfused) };
    let analysis = analyse(&unfused, 1500.0, &ceilings());
    assert_eq!(analysis.classified.class, Some(Class::Compute), "{analysis:?}");
    let fusing = analysis.steps.iter().find(|s| s.action.contains("fused path")).unwrap();
    // Two matrices of 4096·14336 bf16 values, written and read, at 4 TB/s.
    let expected = 4.0 * 4096.0 * 14336.0 * 2.0 / 4.0e12 * 1e6;
    assert!((fusing.gain_us - expected).abs() < 1e-9, "{fusing:?}");
    assert!((fusing.predicted_us - (1500.0 - expected)).abs() < 1e-9, "{fusing:?}");
    assert!(analysis.text.contains("compute-bound"), "{}", analysis.text);
    assert!(analysis.text.contains("predicted gain"), "{}", analysis.text);
}

#[test]
fn gains_never_promise_less_than_the_floor() {
    for op in [Op::Activation, Op::GatedLinear, Op::Mlp] {
        for m in [1, 16, 4096] {
            for us in [1e-3, 1.0, 30.0, 1e5] {
                let subject = Subject { launches: 6, ..call_by_call(op, m, Path::Unfused) };
                let analysis = analyse(&subject, us, &ceilings());
                let floor = analysis.classified.floor_us().unwrap();
                for step in &analysis.steps {
                    assert!(step.predicted_us >= floor * 0.999, "{step:?} under {floor}");
                    assert!((us - step.gain_us - step.predicted_us).abs() < 1e-9 * us, "{step:?}");
                }
                let named = analysis.steps.iter().filter(|s| !s.action.starts_with("close"));
                let gains: Vec<_> = named.map(|s| s.gain_us).collect();
                let sorted = gains.is_sorted_by(|a, b| a >= b);
                assert!(sorted && !analysis.text.contains("NaN"), "{analysis:?}");
            }
        }
    }
}

#[test]
fn launches_are_named_with_their_price() {
    let calls = Subject { launches: 4, ..call_by_call(Op::Mlp, 1, Path::Fused) };
    // Two launches of four, of 2 µs: under one percent of a millisecond, so not worth a word.
    let long = analyse(&calls, 1000.0, &ceilings());
    assert!(!long.steps.iter().any(|s| s.action.contains("fewer")), "{long:?}");
    let short = analyse(&calls, 120.0, &ceilings());
    assert!(short.steps.iter().any(|s| s.action.contains("2 kernels fewer") && s.gain_us == 4.0));
    assert!(short.steps.iter().any(|s| s.action.contains("graph") && s.gain_us == 4.0));
}

#[test]
fn what_is_cached_or_unknown_is_said() {
    let hot = Subject { heat: Heat::Hot, ..subject(Op::Mlp, 1, Path::Fused) };
    let analysis = analyse(&hot, 30.0, &ceilings());
    // The caches may be the limit: nobody has measured them.
    assert_eq!(analysis.classified.class, None, "{analysis:?}");
    for part in ["caches deliver was not measured", "arithmetic explains"] {
        assert!(analysis.text.contains(part), "{}", analysis.text);
    }
    let faster = analyse(&subject(Op::Mlp, 1, Path::Fused), 30.0, &ceilings());
    assert!(faster.text.contains("above the ceiling"), "{}", faster.text);
    let unknown = analyse(&subject(Op::Mlp, 1, Path::Fused), 30.0, &Ceilings::default());
    assert!(unknown.text.contains("No ceiling"), "{}", unknown.text);
}

#[test]
fn hot_data_is_held_against_the_caches_and_an_activation_against_its_own_arithmetic() {
    let hot = Subject { heat: Heat::Hot, ..subject(Op::Activation, 16, Path::Fused) };
    let elements = 16.0 * 14336.0;
    let with = |cache: f64, activation: f64| {
        let ceiling = |per_second| Some(Ceiling { name: "measured".into(), per_second });
        Ceilings { cache: ceiling(cache), activation: ceiling(activation), ..ceilings() }
    };
    // Ten microseconds of traffic in the caches, or of arithmetic, or a fifth of either.
    let (bytes, results) = (6.0 * elements / 10e-6, elements / 10e-6);
    for (cache, activation, class, word) in [
        (bytes, 5.0 * results, Class::Cache, "cache-bound: 1.38 MB move"),
        (5.0 * bytes, results, Class::Compute, "compute-bound: 229 k results at"),
        (5.0 * bytes, 5.0 * results, Class::Latency, "bytes explain 18 % and the arithmetic 18 %"),
    ] {
        let analysis = analyse(&hot, 11.0, &with(cache, activation));
        assert_eq!(analysis.classified.class, Some(class), "{analysis:?}");
        assert!(analysis.text.contains(word), "{}", analysis.text);
        assert!((analysis.classified.gbps - 6.0 * elements / 11e3).abs() < 1e-9, "{analysis:?}");
    }
    // Cold, the arithmetic of an activation can be the limit too.
    let cold = Subject { heat: Heat::Cold, ..hot };
    let analysis = analyse(&cold, 11.0, &with(bytes, results));
    assert_eq!(analysis.classified.class, Some(Class::Compute), "{analysis:?}");
}

#[test]
fn a_ceiling_belongs_to_the_element_type_that_its_name_begins_with() {
    let ceilings = ceilings();
    assert_eq!(ceilings.compute_of(DType::Bf16).unwrap().per_second, 8.0e14);
    assert_eq!(ceilings.compute_of(DType::F16), None);
    let any = Ceiling { name: "FMA".into(), per_second: 1.0 };
    let with_any = Ceilings { compute: vec![any], ..ceilings };
    assert_eq!(with_any.compute_of(DType::F16).unwrap().name, "FMA");
}

#[test]
fn a_ceiling_that_was_measured_in_turns_stands_for_one_that_was_measured_beside() {
    use super::made_up::{experiment, record};
    let mut e = experiment();
    let mut record = record(&e, 0.01, |_, profile| Ok(if profile == "limit" { 1.0 } else { 2.0 }));
    record.ceilings = Some(ceilings());
    let case = e.cases[0].clone();
    let measured = record.entry(&case.key(), "limit").unwrap().gbps().unwrap() * 1e9;
    let copied = record.ceilings_of(&e, &case).memory.unwrap();
    assert_eq!((copied.name.as_str(), copied.per_second), ("limit", measured));
    // A ceiling of something else than memory says nothing of memory.
    e.profiles.iter_mut().find(|p| p.id == "limit").unwrap().peer = "torch".into();
    assert_eq!(record.ceilings_of(&e, &case), ceilings());
}

/// Two launches of one kernel and one of another, as the documentation shows the table.
const SAMPLE: &str = r#"==PROF== Connected to process 4242 (/usr/bin/swiglu)
==PROF== Profiling "sm90_gated_gemm" - 0: 0%....50%....100% - 4 passes
a line of the program's own
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","9,999"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","268,435,456"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Mbyte","117.44"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","18.25"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","nsecond","1,446,112"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","launch__registers_per_thread","register/thread","168"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sector_hit_rate.pct","%","81.5"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed","%","88.4"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","sm__throughput.avg.pct_of_peak_sustained_elapsed","%","n/a"
"1","4242","swiglu","127.0.0.1","sm90_gated_gemm(GatedGemm)","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","sm__warps_active.avg.pct_of_peak_sustained_active","%","18.7"
==WARNING== a remark in between
"2","4242","swiglu","127.0.0.1","void act<float, ""x"">(int, float)","1","13","(256, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","usecond","3.5"
==PROF== Disconnected from process 4242
"#;

#[test]
fn the_profilers_table_is_read_whatever_surrounds_it() {
    for text in [SAMPLE.to_owned(), SAMPLE.replace('\n', "\r\n")] {
        let kernels = parse_csv(&text).unwrap();
        let names: Vec<_> = kernels.iter().map(|k| (k.kernel.as_str(), k.launches)).collect();
        let act = "void act<float, \"x\">(int, float)";
        assert_eq!(names, [("sm90_gated_gemm(GatedGemm)", 2), (act, 1)]);
        let c = kernels[0].counters;
        assert_eq!((c.us, c.registers), (Some(1446.112), Some(168.0)));
        assert_eq!(c.dram_read_bytes, Some(268_435_456.0));
        assert_eq!(c.dram_written_bytes, Some(117.44e6));
        assert_eq!((c.dram_percent, c.tensor_percent), (Some(18.25), Some(88.4)));
        assert_eq!(
            (c.l2_hit_percent, c.occupancy_percent, c.sm_percent),
            (Some(81.5), Some(18.7), None)
        );
        assert_eq!(c.class(), Some(Class::Compute));
        assert_eq!(kernels[1].counters, Counters { us: Some(3.5), ..Counters::default() });
        assert_eq!(kernels[1].counters.class(), None);
    }
}

#[test]
fn counters_below_sixty_percent_are_latency() {
    let counters =
        |d, t| Counters { dram_percent: Some(d), tensor_percent: Some(t), ..Counters::default() };
    assert_eq!(counters(59.0, 20.0).class(), Some(Class::Latency));
    assert_eq!(counters(92.0, 20.0).class(), Some(Class::Memory));
    assert_eq!(counters(30.0, 61.0).class(), Some(Class::Compute));
}

#[test]
fn other_tables_are_refused_with_what_is_wrong() {
    let header = SAMPLE.lines().find(|l| l.starts_with("\"ID\"")).unwrap();
    let cases = [
        (String::new(), "no table"),
        ("==ERROR== The application returned an error code (1).\n".into(), "no table"),
        (header.to_owned(), "saw no kernel"),
        (SAMPLE.replacen("Metric Value", "Value", 1), "missing field `Metric Value`"),
        (format!("{header}\n\"0\",\"1\"\n"), "line 2"),
        (
            format!(
                "{header}\n{}\n",
                SAMPLE.lines().nth(4).unwrap().replace("\"0\",\"4242", "\"x\",\"4242")
            ),
            "expected a number",
        ),
    ];
    for (text, expected) in cases {
        let error = parse_csv(&text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Cut anywhere: an answer or an error, and no more kernels than there are.
    for end in 0..SAMPLE.len() {
        if let Some(text) = SAMPLE.get(..end) {
            assert!(parse_csv(text).map_or(0, |k| k.len()) <= 2);
        }
    }
}

#[test]
fn a_missing_profiler_is_said_and_its_arguments_keep_the_clocks() {
    let empty = tempfile::tempdir().unwrap();
    let error = Ncu::find_in([empty.path().to_owned()]).unwrap_err();
    assert!(error.to_string().contains("not installed"), "{error}");
    let arguments = Ncu::arguments(std::path::Path::new("/x/log"));
    let text: Vec<_> = arguments.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    let joined = text.join(" ");
    assert!(joined.starts_with("--csv") && joined.ends_with("--log-file /x/log"), "{joined}");
    assert!(joined.contains("--clock-control none"), "{joined}");
}

/// A stand-in for the profiler: it writes to the log whose path it is given.
#[cfg(unix)]
fn fake(script: &str) -> (tempfile::TempDir, Ncu) {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ncu");
    let find = "while [ \"$1\" != --log-file ]; do shift; done; log=$2; shift 2\n";
    std::fs::write(&path, format!("#!/bin/sh\n{find}{script}")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ncu = Ncu::find_in([directory.path().to_owned()]).unwrap();
    (directory, ncu)
}

#[cfg(unix)]
#[test]
fn a_profiled_program_gives_counters_or_a_reason() {
    let program = std::path::Path::new("/bin/echo");
    let (_keep, ncu) = fake(&format!("\"$@\" && cat > \"$log\" <<'END'\n{SAMPLE}END\n"));
    let kernels = ncu.profile(program, &["hello"], None).unwrap();
    assert_eq!(kernels.len(), 2);
    let (_keep, ncu) = fake("echo '==ERROR== ERR_NVGPUCTRPERM' > \"$log\"; exit 1");
    let error = ncu.profile::<&str>(program, &[], None).unwrap_err();
    assert!(matches!(error, NcuError::NotPermitted), "{error}");
    let (_keep, ncu) = fake("echo '==ERROR== no such metric' > \"$log\"; exit 9");
    let error = ncu.profile::<&str>(program, &[], None).unwrap_err().to_string();
    assert!(error.contains("no such metric") && error.contains('9'), "{error}");
    let (_keep, ncu) = fake("exit 0");
    let error = ncu.profile::<&str>(program, &[], None).unwrap_err();
    assert!(matches!(&error, NcuError::Table(why) if why.contains("no table")), "{error}");
}

#[cfg(unix)]
#[test]
fn a_peer_is_asked_for_one_call_under_the_profiler() {
    let case = super::made_up::experiment().cases[0].clone();
    let profile = swiglu_lab::ProfileDef {
        id: "ours".into(),
        peer: "swiglu".into(),
        options: Default::default(),
        role: swiglu_lab::Role::Ours,
        numerics: None,
        best_of: None,
    };
    // The stand-in keeps what the peer was told.
    let told = tempfile::NamedTempFile::new().unwrap();
    let table = format!("cat > \"$log\" <<'END'\n{SAMPLE}END\n");
    let (_keep, ncu) = fake(&format!("\"$@\" > {} && {table}", told.path().display()));
    let peer = ["/bin/cat".into()];
    let counted = count(&Ok(ncu), &peer, &case, &profile, 7);
    assert_eq!((counted.kernels.len(), counted.reason), (2, None));
    assert_eq!((counted.case_key, counted.profile.as_str()), (case.key(), "ours"));
    let told = std::fs::read_to_string(told.path()).unwrap();
    let kinds: Vec<_> = told
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["type"].clone())
        .collect();
    assert_eq!(kinds, ["hello", "prepare", "verify", "quit"]);
    let missing = count(&Err(NcuError::Missing), &peer, &case, &profile, 7);
    assert!(missing.kernels.is_empty() && missing.reason.unwrap().contains("not installed"));
}
