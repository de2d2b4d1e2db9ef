use std::fs;
use std::path::Path;
use std::process::Command;

use swiglu_lab::{COMMIT_FILE, Code, DeviceKind, History};

fn git(root: &Path, arguments: &[&str]) {
    let ended = Command::new("git").arg("-C").arg(root).args(arguments).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

fn commit(root: &Path, file: &str, text: &str) {
    fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
    fs::write(root.join(file), text).unwrap();
    for arguments in
        [&["add", "-A"][..], &["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "m"]]
    {
        git(root, arguments);
    }
}

#[test]
fn age_counts_commits_to_the_backend_whatever_its_files_are_called() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    git(root, &["init", "-q"]);
    commit(root, "crates/swiglu-cuda/src/a.rs", "fn a() {}\nfn b() {}\n");
    fs::create_dir_all(root.join("lab")).unwrap();
    let measured = Code::detect(&root.join("lab"));
    assert!(measured.commit.is_some() && !measured.dirty, "{measured:?}");
    let age = |device| History::around(&root.join("lab")).age(&measured, device);
    assert_eq!(age(DeviceKind::Cuda), Some(0));
    // A file is renamed, a function moves, and another backend changes.
    fs::remove_file(root.join("crates/swiglu-cuda/src/a.rs")).unwrap();
    commit(root, "crates/swiglu-cuda/src/b.rs", "fn a() {}\n");
    commit(root, "crates/swiglu-cuda/src/c.rs", "fn b() {}\n");
    commit(root, "crates/swiglu-cpu/src/d.rs", "fn d() {}\n");
    assert_eq!((age(DeviceKind::Cuda), age(DeviceKind::Cpu)), (Some(2), Some(1)));
    fs::write(root.join("crates/swiglu-cpu/src/d.rs"), "").unwrap();
    assert!(Code::detect(root).dirty);
    let elsewhere = Code { commit: Some("0".repeat(40)), dirty: false };
    assert_eq!(History::around(root).age(&elsewhere, DeviceKind::Cpu), None);
}

#[test]
fn a_copy_says_what_it_was_made_from() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Code::detect(dir.path()), Code::default());
    fs::write(dir.path().join(COMMIT_FILE), r#"{"commit": "abc"}"#).unwrap();
    assert_eq!(Code::detect(dir.path()).commit.as_deref(), Some("abc"));
    assert_eq!(History::around(dir.path()).age(&Code::default(), DeviceKind::Cpu), None);
}
