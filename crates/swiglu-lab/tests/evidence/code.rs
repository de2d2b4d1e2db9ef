use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

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
    let program = &built(root, &["crates/swiglu-cuda/src/a.rs"]);
    let measured = Code::detect(&root.join("lab"), program);
    assert!(measured.commit.is_some() && !measured.dirty, "{measured:?}");
    let age = |device| History::around(&root.join("lab")).age(&measured, device);
    assert_eq!(age(DeviceKind::Cuda), Some(0));
    // A file is renamed, a function moves, and another backend changes.
    fs::remove_file(root.join("crates/swiglu-cuda/src/a.rs")).unwrap();
    commit(root, "crates/swiglu-cuda/src/b.rs", "fn a() {}\n");
    commit(root, "crates/swiglu-cuda/src/c.rs", "fn b() {}\n");
    commit(root, "crates/swiglu-cpu/src/d.rs", "fn d() {}\n");
    assert_eq!((age(DeviceKind::Cuda), age(DeviceKind::Cpu)), (Some(2), Some(1)));
    let program = &built(root, &["crates/swiglu-cpu/src/d.rs"]);
    assert!(!Code::detect(root, program).dirty);
    fs::write(root.join("crates/swiglu-cpu/src/d.rs"), "").unwrap();
    assert!(Code::detect(root, program).dirty);
    let elsewhere = Code { commit: Some("0".repeat(40)), dirty: false };
    assert_eq!(History::around(root).age(&elsewhere, DeviceKind::Cpu), None);
}

/// A program that cargo would have made of these files, with its list of them.
fn built(root: &Path, files: &[&str]) -> PathBuf {
    let program = root.join("target/a program");
    fs::create_dir_all(root.join("target")).unwrap();
    fs::write(root.join(".git/info/exclude"), "target\n").unwrap();
    let listed = |path: PathBuf| path.display().to_string().replace(' ', "\\ ");
    let files: Vec<_> = files.iter().map(|file| listed(root.join(file))).collect();
    fs::write(
        program.with_extension("d"),
        format!("{}: {}\n", listed(program.clone()), files.join(" ")),
    )
    .unwrap();
    fs::write(&program, "").unwrap();
    program
}

#[test]
fn a_program_of_other_files_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let root = &dir.path().join("a folder");
    fs::create_dir_all(root).unwrap();
    git(root, &["init", "-q"]);
    commit(root, "crates/a b.rs", "fn a() {}\n");
    let program = &built(root, &["crates/a b.rs"]);
    assert!(!Code::detect(root, program).dirty);
    // What is committed after it was built is not in it.
    let later = SystemTime::now() + Duration::from_secs(9);
    commit(root, "crates/a b.rs", "fn b() {}\n");
    File::options()
        .append(true)
        .open(root.join("crates/a b.rs"))
        .unwrap()
        .set_modified(later)
        .unwrap();
    let code = Code::detect(root, program);
    assert!(code.dirty && code.short().ends_with("with changes"), "{code:?}");
    // One of another folder, and one without a list.
    let elsewhere = tempfile::tempdir().unwrap();
    git(elsewhere.path(), &["init", "-q"]);
    commit(elsewhere.path(), "crates/a b.rs", "");
    assert!(Code::detect(elsewhere.path(), program).dirty);
    assert!(Code::detect(root, Path::new("/bin/sh")).dirty);
}

#[test]
fn a_copy_says_what_it_was_made_from() {
    let dir = tempfile::tempdir().unwrap();
    let program = Path::new("/bin/sh");
    assert_eq!(Code::detect(dir.path(), program), Code::default());
    fs::write(dir.path().join(COMMIT_FILE), r#"{"commit": "abc"}"#).unwrap();
    let noted = Code::detect(dir.path(), program);
    assert_eq!((noted.commit.as_deref(), noted.dirty), (Some("abc"), false));
    assert_eq!(History::around(dir.path()).age(&Code::default(), DeviceKind::Cpu), None);
}
