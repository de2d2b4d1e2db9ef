//! Records in files, which several processes write.

use super::*;

const WORKER: &str = "SWIGLU_TUNING_TEST_WORKER";

#[test]
fn worker() {
    let Some(first) = std::env::var_os(WORKER) else {
        return; // Only meant for the processes of the next test.
    };
    let first: usize = first.to_str().unwrap().parse().unwrap();
    let dir = TuningOptions::default().directory().unwrap();
    for m in first..first + 10 {
        keep(&dir, subject(), (13, 0), RATES, vec![entry(m, &[("a", m as f64)])]).unwrap();
    }
}

#[test]
fn processes_that_keep_at_once_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let start = |i: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["plan::tuning::tests::files::worker", "--exact"]);
        command.env("SWIGLU_TUNING_DIR", dir.path()).env(WORKER, (i * 10).to_string());
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let running: Vec<_> = (0..4).map(start).collect();
    for mut process in running {
        assert!(process.wait().unwrap().success());
    }
    let record = read_sealed::<Record>(&dir.path().join(file_of(&subject())), MAX_FILE_BYTES)
        .unwrap()
        .unwrap();
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
    let shipped = SHIPPED.iter().chain(SHIPPED_GEMMS);
    assert_eq!(files, shipped.map(|(name, _)| (*name).to_owned()).collect());
}

#[test]
fn every_shipped_record_is_whole_and_each_problem_has_a_known_way() {
    for (name, text) in SHIPPED {
        let record = unseal::<Record>(text).unwrap_or_else(|why| panic!("{name}: {why}"));
        assert!(record.to_text().unwrap() == *text, "{name} is not as it would be written");
        let table = Table::new(&record, &model());
        for entry in &record.entries {
            let found = table.near(&entry.problem, entry.tf32);
            assert!(
                found.is_some_and(|near| near.exact(&entry.problem).is_some()),
                "{name}: {}",
                entry.problem
            );
        }
    }
}
