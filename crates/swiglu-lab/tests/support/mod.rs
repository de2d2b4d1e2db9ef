//! A peer that behaves as it is told, and a lab around it.
//!
//! The peer is the test program itself, started again by a script that keeps the test harness's
//! own output out of the protocol: the peer writes to what was standard output before.

// Each test program uses its own part of this; a helper of a test ends by panicking.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use serde_json::{Value, json};
use swiglu_core::{DType, Matrix, oracle, random};
use swiglu_lab::peer::protocol::{ACTIVATION_SCALE, STREAM_GATE, STREAM_UP};
use swiglu_lab::peer::{Limits, PeerCommands};
use swiglu_lab::record::{Locks, Machine, Measured, Record, Store};
use swiglu_lab::{Case, Code, DeviceKind, Experiment, LabError, Laboratory, RunOptions};

/// What the peer is told to do, by its environment.
const BEHAVIOUR: &str = "SWIGLU_LAB_FAKE_PEER";

/// How the lines begin in which the peer `logs` says what it was asked.
pub(crate) const REQUEST: &str = "request:";

/// A directory with experiments, peers and records.
pub(crate) struct Lab {
    pub(crate) dir: PathBuf,
    pub(crate) commands: PeerCommands,
    pub(crate) machine: Machine,
    pub(crate) store: Store,
}

/// `(profile, peer, role)`.
pub(crate) type Who<'a> = (&'a str, &'a str, &'a str);

impl Lab {
    pub(crate) fn new(dir: &Path) -> Self {
        let peers = dir.join("peers");
        let logs = dir.join("logs");
        for path in [&peers, &logs, &dir.join("experiments")] {
            fs::create_dir_all(path).unwrap();
        }
        let commands = PeerCommands {
            own: vec!["/nonexistent/swiglu".into()],
            python: "python3".into(),
            dir: peers,
            logs,
        };
        let machine = Machine::detect(DeviceKind::Cpu, Some("here")).unwrap();
        Self { dir: dir.to_path_buf(), commands, machine, store: Store::new(dir.join("records")) }
    }

    /// A peer of this name and behaviour.
    pub(crate) fn peer(&self, name: &str, behaviour: &str) {
        let program = std::env::current_exe().unwrap();
        let script = format!(
            "#!/bin/sh\nexec 3>&1 >/dev/null\n{BEHAVIOUR}='{behaviour}' exec '{}' --exact \
             support::fake_peer --nocapture\n",
            program.display()
        );
        let path = self.commands.dir.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// An experiment of small activations, one case per m.
    pub(crate) fn experiment(&self, m: &[usize], who: &[Who<'_>]) -> Experiment {
        let profiles: String = who
            .iter()
            .map(|(id, peer, role)| {
                format!("[[profiles]]\nid = \"{id}\"\npeer = \"{peer}\"\nrole = \"{role}\"\n")
            })
            .collect();
        let text = format!(
            "schema = 2\nid = \"small\"\ntitle = \"T\"\nquestion = \"Q?\"\nwhy = \"W\"\n\
             device = \"cpu\"\n{profiles}[[cases]]\nop = \"activation\"\nm = {m:?}\n\
             shapes = [{{ intermediate = 16 }}]\ndtype = \"f32\"\n[metrics]\n\
             groups = [\"latency\"]\n[claim]\ntext = \"C\"\nsubject = \"{}\"\n\
             against = \"best:baseline,peer\"\nkind = \"faster\"\n[boundary]\ntext = \"B\"\n",
            who[0].0
        );
        let path = self.dir.join("experiments/small.toml");
        fs::write(&path, text).unwrap();
        Experiment::read(&path).unwrap()
    }
}

/// Runs, or goes on with a run, as the code of commit 1.
pub(crate) fn run(
    lab: &Lab,
    experiment: &Experiment,
    options: &RunOptions,
) -> Result<Record, LabError> {
    let code = Code { commit: Some("1".into()), dirty: false };
    let user = Locks::new(lab.dir.join("locks"));
    let lock = lab.store.lock(&user, Measured::Machine, &lab.machine.name, "a test")?;
    let laboratory = Laboratory {
        store: &lab.store,
        lock: &lock,
        commands: &lab.commands,
        machine: &lab.machine,
        code: &code,
    };
    laboratory.run(experiment, options, &mut |_| {}).map(|finished| finished.record)
}

/// Turns that take no time, and limits that a test can wait for.
pub(crate) fn options(run_id: &str) -> RunOptions {
    let mut options = RunOptions::new(run_id, false);
    options.protocol.turns = 6;
    options.protocol.preparations = 2;
    options.protocol.budget_us = 100;
    options.settle = Duration::ZERO;
    // What peers were asked is counted, and this machine has other work too.
    options.repeat_drifted = false;
    options.limits = Limits { hello: Duration::from_secs(20), sample: Duration::from_millis(700) };
    options
}

/// The peer. As a test of its own it does nothing.
#[test]
fn fake_peer() {
    let Ok(behaviour) = std::env::var(BEHAVIOUR) else { return };
    let out = File::options().write(true).open("/dev/fd/3").unwrap();
    let write = |text: String| (&out).write_all(text.as_bytes()).is_ok();
    let say = |reply: Value| write(format!("{reply}\n"));
    // The host keeps what goes to standard error.
    let log = |words: &[&str]| {
        if behaviour == "logs" {
            eprintln!("{REQUEST} {}", words.join(" "));
        }
    };
    let mut case: Option<Case> = None;
    let (mut samples, mut prepared, mut released, mut first) = (0, 0, 0, None);
    let mut ways = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let id = &request["id"];
        let kind = request["type"].as_str().unwrap();
        let said = match (kind, behaviour.as_str()) {
            ("hello", "unavailable") => {
                say(json!({"type": "unavailable", "reason": "no such framework"}));
                return;
            }
            ("hello", "mute") => hang(),
            ("hello", _) => say(json!({"type": "hello", "name": "fake",
                "versions": {"fake": "1.0"}, "device": "none"})),
            ("prepare", "picky") if request["case"]["m"] == 3 => {
                say(json!({"type": "unsupported", "id": id, "reason": "not 3"}))
            }
            // Two ways, but with three rows none.
            ("prepare", "ways") => {
                let way = request["profile"]["options"]["candidate"].as_u64().unwrap();
                ways.insert(id.as_u64(), way);
                case = serde_json::from_value(request["case"].clone()).ok();
                let known = way <= 2 && request["case"]["m"] != 3;
                say(match known {
                    true => json!({"type": "prepared", "id": id, "plan": format!("way {way}"),
                        "notes": ["plain"]}),
                    false => json!({"type": "unsupported", "id": id, "reason": "no more ways"}),
                })
            }
            ("prepare", "clumsy") => {
                say(json!({"type": "failed", "id": id, "reason": "out of memory"}))
            }
            ("prepare", "fickle") if prepared == 1 => {
                say(json!({"type": "failed", "id": id, "reason": "out of memory by now"}))
            }
            ("prepare", _) => {
                prepared += 1;
                first = first.or(request["case"]["m"].as_u64());
                log(&["prepare", &id.to_string(), request["profile"]["id"].as_str().unwrap()]);
                case = serde_json::from_value(request["case"].clone()).ok();
                samples = 0;
                say(json!({"type": "prepared", "id": id, "bytes": 6144.0, "notes": ["plain"]}))
            }
            ("verify", "unsteady") if prepared == 2 => {
                say(verified(&request, case.as_ref().unwrap(), "wrong"))
            }
            ("verify", _) => say(verified(&request, case.as_ref().unwrap(), &behaviour)),
            ("sample", _) => {
                samples += 1;
                log(&["sample", &id.to_string()]);
                match (behaviour.as_str(), samples) {
                    ("hangs", 3..) => hang(),
                    ("dies", 3..) => {
                        eprintln!("something broke inside");
                        std::process::abort()
                    }
                    ("babbles", 3..) => write("Autotuning 3/7 ...\n".into()),
                    ("floods", 3..) => write("x".repeat(5 << 20)),
                    ("chatters", 3..) => {
                        let reply = json!({"type": "samples", "id": id, "us": [1.0]});
                        (0..100_000).all(|_| say(reply.clone()))
                    }
                    ("confuses", 3..) => say(json!({"type": "samples", "id": 99_999, "us": [1.0]})),
                    ("mistakes", 3..) => say(json!({"type": "released", "id": id})),
                    ("nan", 3..) => say(json!({"type": "samples", "id": id, "us": [null]})),
                    ("negative", 3..) => say(json!({"type": "samples", "id": id, "us": [-1.0]})),
                    ("empty", 3..) => say(json!({"type": "samples", "id": id, "us": []})),
                    // The first preparation differs from all others. One that another peer's fault ended does not count.
                    ("settles", _) => {
                        let us = if released == 0 { 10.0 } else { 12.0 };
                        say(json!({"type": "samples", "id": id, "us": [us, us]}))
                    }
                    ("ways", _) => {
                        let us = if ways[&id.as_u64()] == 1 { 12.0 } else { 11.0 };
                        say(json!({"type": "samples", "id": id, "us": [us, us]}))
                    }
                    // Slow with three rows, in a process that had another case before.
                    ("late", _) => {
                        let three = case.as_ref().is_some_and(|case| case.m == 3);
                        let us = if three && first != Some(3) { 40.0 } else { 10.0 };
                        say(json!({"type": "samples", "id": id, "us": [us, us]}))
                    }
                    // Each preparation finds another place for its data.
                    ("misplaced", _) => {
                        let us = 10.0 * f64::from(released + 1);
                        say(json!({"type": "samples", "id": id, "us": [us, us]}))
                    }
                    ("slow", _) => {
                        std::thread::sleep(Duration::from_millis(5));
                        say(json!({"type": "samples", "id": id, "us": [20.0, 21.0]}))
                    }
                    _ => say(json!({"type": "samples", "id": id, "us": [10.0, 11.0, 10.5]})),
                }
            }
            ("release", _) => {
                released += 1;
                say(json!({"type": "released", "id": id}))
            }
            ("clocks", _) => say(json!({"type": "clocks", "sm_mhz": 1500.0, "power_w": 300.0})),
            _ => return,
        };
        if !said {
            return;
        }
    }
}

fn hang() -> ! {
    loop {
        // Longer than any limit; the parent's kill ends it.
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// The rows that were asked for, spoiled as the behaviour says.
fn verified(request: &Value, case: &Case, behaviour: &str) -> Value {
    let (m, h) = (case.m, case.intermediate);
    assert_eq!(case.dtype, DType::F32);
    let seed = 0x5eed;
    let input =
        |stream| random::normal_matrix::<f32>(seed ^ stream, m, h, ACTIVATION_SCALE).unwrap();
    let (gate, up) = (input(STREAM_GATE), input(STREAM_UP));
    let both = swiglu_core::GateUpRef::separate(gate.view(), up.view()).unwrap();
    let out: Matrix<f64> = oracle::activation(&case.activation, &both).unwrap();
    let rows: Vec<usize> = serde_json::from_value(request["rows"].clone()).unwrap();
    let mut values: Vec<f32> =
        rows.iter().flat_map(|&r| out.view().row(r)).map(|v| *v as f32).collect();
    match behaviour {
        "wrong" => values[1] += 1.0,
        "nan-rows" => values[1] = f32::NAN,
        "short" => drop(values.pop()),
        _ => {}
    }
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    json!({"type": "verified", "id": request["id"], "shape": [m, h], "dtype": "f32",
        "rows": rows, "data": base64::engine::general_purpose::STANDARD.encode(bytes)})
}
