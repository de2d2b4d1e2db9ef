use swiglu_lab::{Against, CaseOp, ClaimKind, DeviceKind, Experiment, Heat, Pace, Role};

use super::made_up::{DEFINITION, experiment, parse, with};

#[test]
fn a_definition_becomes_cases_and_a_claim() {
    let e = experiment();
    assert_eq!((e.id.as_str(), e.device, e.cases.len()), ("made-up", DeviceKind::Cpu, 2));
    assert_eq!(e.cases[1].m, 16);
    assert_eq!(e.cases[0].heat, Heat::Cold);
    assert_eq!(e.cases[0].op, CaseOp::Activation);
    // The default roundings are those of the element type.
    assert_eq!(e.cases[0].numerics.to_string(), "fused+precise");
    assert_eq!(e.profile("ours").unwrap().options["path"], "fused");
    assert_eq!(e.claim.against, Against::Best(vec![Role::Baseline, Role::Peer]));
    assert_eq!(e.decisions, ["0001-x"]);
}

#[test]
fn arrays_multiply_and_single_values_are_arrays_of_one() {
    let text = with("m = [8, 16]", "m = [8, 16]\nheat = [\"hot\", \"cold\"]")
        .replacen("dtype = \"f32\"", "dtype = [\"bf16\", \"float16\"]", 1)
        .replacen("op = \"activation\"", "op = \"mlp\"\nbias = true", 1)
        .replacen("{ intermediate = 32 }", "{ model = \"M\", hidden = 8, intermediate = 32 }", 1);
    let e = parse(&text).unwrap();
    assert_eq!(e.cases.len(), 8);
    assert_eq!(
        e.cases[0].key(),
        "mlp m=8 hidden=8 intermediate=32 bf16 swiglu fused+fast separate out-in bias hot"
    );
    assert_eq!(e.cases[0].model.as_deref(), Some("M"));
}

#[test]
fn numbers_of_tokens_are_given_as_ranges_too() {
    let e = parse(&with("m = [8, 16]", "m = [\"1..=3\", \"65..=193 by 64\", 16]")).unwrap();
    let counts: Vec<usize> = e.cases.iter().map(|case| case.m).collect();
    assert_eq!(counts, [1, 2, 3, 65, 129, 193, 16]);
    // The notation is not what is measured.
    let (one, other) = (with("[8, 16]", "\"8..=16 by 8\""), with("[8, 16]", "[8, 16]"));
    assert_eq!(parse(&one).unwrap().definition_hash, parse(&other).unwrap().definition_hash);
}

#[test]
fn gradients_are_an_operation_of_the_activation() {
    let gradients = |more: &str| {
        let text = with("m = [8, 16]", &format!("m = [8, 16]{more}"));
        parse(&text.replacen("op = \"activation\"", "op = \"activation-backward\"", 1))
    };
    let e = gradients("\narrangement = [\"separate\", \"gate-first\"]").unwrap();
    assert_eq!(e.cases.len(), 4);
    assert!(e.cases.iter().all(|c| c.op == CaseOp::ActivationBackward));
    assert!(e.cases[1].key().contains("activation-backward m=8 intermediate=32 f32"));
    let refused = gradients("\nweights = \"Q4_0\"").unwrap_err().to_string();
    assert!(refused.contains("activation-backward has no weights"), "{refused}");
}

#[test]
fn quantised_weights_multiply_with_element_types() {
    let quantised = |weights: &str, shape: &str| {
        let text = with("m = [8, 16]", &format!("m = 8\nweights = {weights}"))
            .replacen("dtype = \"f32\"", "dtype = [\"f32\", \"bf16\"]", 1)
            .replacen("op = \"activation\"", "op = \"mlp\"", 1)
            .replacen("{ intermediate = 32 }", shape, 1);
        parse(&text)
    };
    let shape = "{ hidden = 256, intermediate = 512 }";
    let e = quantised("[\"q4_0\", \"Q6_K\"]", shape).unwrap();
    let keys: Vec<String> = e.cases.iter().map(|c| c.key()).collect();
    assert_eq!(keys.len(), 4);
    assert!(keys[0].contains("f32 weights=Q4_0") && keys[3].contains("bf16 weights=Q6_K"));
    assert_eq!(e.cases[0].problem().unwrap().weight_bytes(), 3.0 * 256.0 * 512.0 * 18.0 / 32.0);
    let refused = |weights: &str, shape: &str, part: &str| {
        let message = quantised(weights, shape).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    refused(
        "\"Q4_K\"",
        "{ hidden = 256, intermediate = 320 }",
        "320 inputs are not whole Q4_K blocks of 256",
    );
    refused("\"Q8_K\"", shape, "unknown type of quantised weights `Q8_K`");
    refused("\"Q4_0\"\norientation = \"in-out\"", shape, "expected no others");
    let e = parse(&with("m = [8, 16]", "m = 8\nweights = \"Q4_0\"")).unwrap_err().to_string();
    assert!(e.contains("activation has no weights"), "{e}");
}

#[test]
fn prose_does_not_make_records_old_but_cases_and_options_do() {
    let hash = |text: &str| parse(text).unwrap().definition_hash;
    let same = hash(DEFINITION);
    assert_eq!(same, hash(&with("Because.", "Because of this.")));
    assert_eq!(same, hash(&with("kind = \"faster\"", "kind = \"faster\"\ngoal = 1.1")));
    assert_ne!(same, hash(&with("m = [8, 16]", "m = [8, 17]")));
    assert_ne!(same, hash(&with("path = \"fused\"", "path = \"unfused\"")));
}

#[test]
fn a_pace_is_part_of_what_is_measured() {
    let paced = |pace: &str| parse(&with("[metrics]", &format!("[pace]\n{pace}\n[metrics]")));
    assert_eq!(parse(DEFINITION).unwrap().pace, Pace::default());
    let burst = paced("rest_ms = 50\nwarm_ms = 2").unwrap();
    assert_eq!(burst.pace, Pace { rest_ms: 50, warm_ms: 2, turn_ms: 0 });
    let short = Pace { turn_ms: 4, ..Pace::default() };
    assert_eq!(paced("turn_ms = 4").unwrap().pace, short);
    assert_ne!(burst.definition_hash, parse(DEFINITION).unwrap().definition_hash);
    for (pace, part) in [
        ("rest_ms = 10_001", "10001 ms: expected at most 10000"),
        ("rest_ms = 0", "above 0, or no [pace]"),
        ("rest = 1", "unknown field `rest`"),
        ("warm_ms = -1", "-1"),
    ] {
        let message = paced(pace).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

/// Of what is measured nothing is said twice.
#[test]
fn an_experiment_may_claim_more_of_the_records_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let goal = |records: &str, more: &str| {
        let whole = with("id = \"made-up\"", &format!("id = \"goal\"\nrecords = {records}{more}"));
        // Without the device, profiles, cases and metrics.
        let begin = whole.rfind("\ndevice =").unwrap() + 1;
        let text = whole[..begin].to_owned() + &whole[whole.find("[claim]").unwrap()..];
        let text = text.replacen("kind = \"faster\"", "kind = \"faster\"\ngoal = 1.5", 1);
        std::fs::write(dir.path().join("made-up.toml"), DEFINITION).unwrap();
        std::fs::write(dir.path().join("goal.toml"), text).unwrap();
        Experiment::find(dir.path(), "goal")
    };
    let (made_up, found) = (parse(DEFINITION).unwrap(), goal("\"made-up\"", "").unwrap());
    assert_eq!((found.id.as_str(), found.measured_as()), ("goal", "made-up"));
    assert_eq!((&made_up.records, made_up.measured_as()), (&None, "made-up"));
    assert_eq!(found.definition_hash, made_up.definition_hash);
    assert_eq!((&found.profiles, &found.cases), (&made_up.profiles, &made_up.cases));
    // Measured is the other, under its own name.
    let refused = found.expect_measured().unwrap_err().to_string();
    assert!(refused.contains("experiment `goal`: expected `made-up`"), "{refused}");
    made_up.expect_measured().unwrap();
    assert_eq!((found.claim.kind, found.device), (ClaimKind::Faster { goal: 1.5 }, made_up.device));
    for (records, more, part) in [
        ("\"none\"", "", "records = `none`: read "),
        ("\"goal\"", "", "this is that experiment"),
        ("\"../made-up\"", "", "lowercase"),
        ("\"made-up\"", "\ndevice = \"cpu\"", "expected no device, profiles"),
    ] {
        let message = goal(records, more).unwrap_err().to_string();
        assert!(message.contains("goal.toml:4:11: records") && message.contains(part), "{message}");
    }
    goal("\"made-up\"", "").unwrap();
    let further = std::fs::read_to_string(dir.path().join("goal.toml")).unwrap();
    let further = further.replacen("\"goal\"", "\"further\"", 1).replacen("made-up", "goal", 1);
    std::fs::write(dir.path().join("further.toml"), further).unwrap();
    let message = Experiment::find(dir.path(), "further").unwrap_err().to_string();
    assert!(message.contains("it has the records of `made-up`"), "{message}");
    let broken = with("m = [8, 16]", "m = []");
    goal("\"made-up\"", "").unwrap();
    std::fs::write(dir.path().join("made-up.toml"), broken).unwrap();
    let message = Experiment::find(dir.path(), "goal").unwrap_err().to_string();
    assert!(message.contains("made-up.toml:31:1: one of these lists is empty"), "{message}");
    let nothing = parse(&with("device = \"cpu\"\n", "")).unwrap_err().to_string();
    assert!(
        nothing.contains("missing device: expected what is measured, or `records`"),
        "{nothing}"
    );
}

/// Every refusal says where and what was expected.
#[test]
fn broken_definitions_are_refused_with_line_and_column() {
    // (replaced, by, line:column, part of the message)
    let cases = [
        ("schema = 2", "schema = 1", "2:10", "this program reads schema 2"),
        ("schema = 2", "schema = \"one\"", "2:10", "expected a whole number from 1"),
        ("\"made-up\"", "\"other\"", "3:6", "the name of the file, `made-up`"),
        ("Is it so?", "It is so.", "5:12", "question mark"),
        ("\"A title\"", "\"\"", "4:9", "title is empty"),
        ("device = \"cpu\"", "device = \"tpu\"", "8:10", "`cpu` or `cuda`"),
        ("device = \"cpu\"", "devize = \"cpu\"", "8:1", "unknown field `devize`"),
        ("title = \"A title\"\n", "", "", "missing field `title`"),
        ("role = \"baseline\"", "role = \"base\"", "19:8", "unknown variant `base`"),
        ("id = \"eager\"", "id = \"ours\"", "16:1", "profile id `ours` is taken"),
        ("id = \"eager\"", "id = \"../x\"", "16:1", "lowercase"),
        ("m = [8, 16]", "m = [8, 8]", "31:1", "is there twice"),
        ("m = [8, 16]", "m = [0]", "33", "a whole number from 1 to 1073741824"),
        ("m = [8, 16]", "m = []", "31:1", "one of these lists is empty"),
        ("m = [8, 16]", "m = [-1]", "33", "`-1`, expected a whole number from 1"),
        ("m = [8, 16]", "m = 1.5", "33", "`1.5`, expected a whole number from 1"),
        ("m = [8, 16]", "m = 1_000_000_000_000", "33", "from 1 to 1073741824"),
        ("m = [8, 16]", "m = \"8..=7\"", "33", "or a range of at most 10000 such as"),
        ("m = [8, 16]", "m = \"0..=7\"", "33", "\"0..=7\", expected a whole number"),
        ("m = [8, 16]", "m = \"1..=8 by 2\"", "33", "which its steps end"),
        ("m = [8, 16]", "m = \"1..=8 by 0\"", "33", "\"1..=8 by 0\", expected"),
        ("m = [8, 16]", "m = \"1..=900000000\"", "33", "at most 10000"),
        ("m = [8, 16]", "m = [\"1..=9\", 9]", "31:1", "m=9 intermediate=32 f32 swiglu"),
        ("role = \"baseline\"", "role = \"baseline\"\nbest_of = 65", "16:1", "from 1 to 64"),
        (
            "options = { path = \"fused\" }",
            "options = { candidate = 1 }\nbest_of = 2",
            "10:1",
            "best_of gives it",
        ),
        ("m = [8, 16]", "m = \"all\"", "33", "\"all\", expected a whole number"),
        ("intermediate = 32", "hidden = 4, intermediate = 32", "34:11", "no hidden size"),
        ("op = \"activation\"", "op = \"gated-linear\"", "34:11", "has no `hidden`"),
        ("intermediate = 32", "intermediate = 0", "34:28", "a whole number from 1"),
        ("intermediate = 32", "intermediate = 2e9", "34:28", "a whole number from 1"),
        ("dtype = \"f32\"", "dtype = \"int8\"", "35", "f32, f16, bf16"),
        ("dtype = \"f32\"", "dtype = \"f32\"\nnumerics = \"loose\"", "36", "fused, pre_round"),
        ("dtype = \"f32\"", "dtype = \"f32\"\narrangement = \"interleaved-5\"", "34:11", "divisor"),
        ("[\"latency\", \"validation\"]", "[\"speed\"]", "38:10", "latency, traffic, validation"),
        ("[\"latency\", \"validation\"]", "[]", "38:10", "metric groups: expected some of"),
        ("subject = \"ours\"", "subject = \"us\"", "42:11", "expected one of ours, eager"),
        ("\"best:baseline,peer\"", "[\"eager\", \"ours\"]", "43:11", "names the subject"),
        ("\"best:baseline,peer\"", "\"best:all\"", "43:11", "unknown role `all`"),
        ("\"best:baseline,peer\"", "[]", "43:11", "is empty"),
        ("kind = \"faster\"", "kind = \"better\"", "44:8", "not-slower; or reaches"),
        ("kind = \"faster\"", "kind = \"reaches\"", "44:8", "reaches with a share"),
        ("kind = \"faster\"", "kind = \"not-slower\"\ngoal = 1.1", "44:8", "not-slower"),
        ("kind = \"faster\"", "kind = \"faster\"\ngoal = 0.9", "45:8", "from 1 on"),
        ("kind = \"faster\"", "kind = \"faster\"\ngoal = nan", "45:8", "from 1 on"),
        ("kind = \"faster\"", "kind = \"reaches\"\nshare = 1.5", "45:9", "at most 1"),
        ("kind = \"faster\"", "kind = \"faster\"\nfloor = \"low\"", "45:9", "expected a number"),
        ("kind = \"faster\"", "kind = \"faster\"\nfloor = -1", "45:9", "above 0"),
        ("kind = \"faster\"", "kind = \"faster\"\nexceptions = 1", "45:14", "expected a floor"),
        ("kind = \"faster\"", "kind = \"faster\"\nmonotone = 1.02", "45:12", "expected a floor"),
        (
            "kind = \"faster\"",
            "kind = \"faster\"\nfloor = 0.9\nmonotone = 1.02",
            "46:12",
            "at least its inverse",
        ),
        (
            "kind = \"faster\"",
            "kind = \"faster\"\nfloor = 0.9\nmonotone = 0.9",
            "46:12",
            "from 1 on and below 2",
        ),
        ("kind = \"faster\"", "kind = \"reaches\"\nshare = 0.9\nfloor = 0.9", "", ""),
        ("[boundary]", "[boundary", "", "boundary"),
    ];
    for (from, to, place, expected) in cases {
        let result = parse(&with(from, to));
        if expected.is_empty() {
            assert!(result.is_ok(), "{to}: {result:?}");
            continue;
        }
        let message = result.expect_err(to).to_string();
        let at = format!("lab/experiments/made-up.toml:{place}");
        assert!(message.starts_with(&at), "{to}: {message} is not at {at}");
        assert!(message.contains(expected) || place.is_empty(), "{to}: {message} lacks {expected}");
    }
}

#[test]
fn a_directory_is_read_whole_and_unknown_ids_list_the_known() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("made-up.toml"), DEFINITION).unwrap();
    std::fs::write(dir.path().join("broken.toml"), "schema = 1\n").unwrap();
    std::fs::write(dir.path().join("no-text.toml"), b"schema = 2\nid = \"\xff\"\n").unwrap();
    std::fs::write(dir.path().join("notes.md"), "").unwrap();
    let all = Experiment::read_dir(dir.path()).unwrap();
    assert_eq!(all.iter().map(|e| e.is_ok()).collect::<Vec<_>>(), [false, true, false]);
    let no_text = all[2].as_ref().unwrap_err().to_string();
    assert!(no_text.contains("no-text.toml:2:7: the byte 0xff"), "{no_text}");
    assert_eq!(Experiment::find(dir.path(), "made-up").unwrap().id, "made-up");
    let unknown = Experiment::find(dir.path(), "none").unwrap_err().to_string();
    assert!(unknown.contains("broken, made-up, no-text"), "{unknown}");
    assert!(Experiment::read_dir(&dir.path().join("none")).is_err());
    // Nobody writes to this pipe: a reader would wait for ever.
    let pipe = dir.path().join("pipe.toml");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let refused = Experiment::read(&pipe).unwrap_err().to_string();
    assert!(refused.contains("pipe.toml: it is no file"), "{refused}");
}
