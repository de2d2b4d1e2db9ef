use std::fs;

use swiglu_lab::peer::PeerCommands;
use swiglu_lab::record::{Locks, Measured, Store};
use swiglu_lab::{Check, Readiness};

use super::made_up::experiment;

#[test]
fn what_is_missing_is_named_with_what_installs_it() {
    let dir = tempfile::tempdir().unwrap();
    let commands = PeerCommands {
        own: vec!["/nonexistent/swiglu".into()],
        python: "python3".into(),
        dir: dir.path().to_owned(),
        logs: dir.path().to_owned(),
    };
    fs::write(dir.path().join("install.toml"), "torch = \"pip install torch\"\n").unwrap();
    let (store, locks) =
        (Store::new(dir.path().join("records")), Locks::new(dir.path().join("locks")));
    let mut readiness = Readiness::new(&commands, &store, &locks).unwrap();
    let checks = readiness.of(&experiment(), &Check::found("device", "a CPU"));
    let of = |what: &str| checks.iter().find(|c| c.what == what).unwrap();
    assert!(of("device").ok && of("disk").found.is_some());
    assert!(of("nobody measures").ok);
    let torch = of("peer torch on cpu");
    assert!(!torch.ok && torch.advice.as_deref() == Some("pip install torch"), "{torch:?}");
    assert!(torch.found.as_deref().unwrap().contains("torch"), "{torch:?}");
    assert!(of("peer other on cpu").advice.as_deref().unwrap().contains("README"));

    let held = locks.take(Measured::Machine, "somebody").unwrap();
    let mut busy = Readiness::new(&commands, &store, &locks).unwrap();
    let checks = busy.of(&experiment(), &Check::found("device", "a CPU"));
    assert!(checks.iter().any(|c| c.what == "nobody measures" && !c.ok), "{checks:?}");
    drop(held);
    fs::write(dir.path().join("install.toml"), "torch = 1\n").unwrap();
    let broken = Readiness::new(&commands, &store, &locks).unwrap_err().to_string();
    assert!(broken.contains("install.toml:1:9"), "{broken}");
}
