use std::fs;

use super::*;

/// An environment with these variables and no others.
fn env<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
    move |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A Python installation with the packages' directories that a test needs.
fn python(prefix: &Path, version: &str, packages: &str) -> PathBuf {
    let site = prefix.join("lib").join(format!("python3{version}")).join(packages);
    fs::create_dir_all(&site).unwrap();
    fs::create_dir_all(prefix.join("bin")).unwrap();
    fs::write(prefix.join("bin/python3"), "").unwrap();
    site
}

#[test]
fn places_come_in_the_documented_order() {
    let root = tempfile::tempdir().unwrap();
    let venv = root.path().join("venv");
    let site = python(&venv, ".12", "site-packages");
    let set = [
        ("SWIGLU_CUDA_LIBRARY_PATH", "/mine::/other"),
        ("CUDA_HOME", "/cuda/home"),
        ("CUDA_PATH", ""),
        ("VIRTUAL_ENV", text(&venv)),
    ];
    let preferred = Some(PathBuf::from("/sim"));
    let places = search_order(Library::Nvrtc, preferred, &env(&set));
    let order: Vec<Found> = places
        .iter()
        .map(|place| match place {
            Place::Dir(_, how) => *how,
            Place::Loader => Found::Loader,
        })
        .collect();
    use Found::*;
    let expected = [
        Preferred,
        Environment,
        Environment,
        Loader,
        Toolkit,
        Toolkit,
        DefaultToolkit,
        DefaultToolkit,
        PythonWheel,
        PythonWheel,
    ];
    assert_eq!(order, expected, "{places:?}");
    let wheels: Vec<PathBuf> = places
        .into_iter()
        .filter_map(|place| match place {
            Place::Dir(dir, PythonWheel) => Some(dir),
            _ => None,
        })
        .collect();
    let dirs = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|dir| site.join(dir));
    assert_eq!(wheels, dirs);
}

#[test]
fn the_driver_is_never_taken_from_a_toolkit() {
    let set = [("CUDA_HOME", "/cuda"), ("SWIGLU_CUDA_LIBRARY_PATH", "/mine")];
    let places = search_order(Library::Driver, None, &env(&set));
    let mine = Place::Dir("/mine".into(), Found::Environment);
    assert_eq!(places, [mine, Place::Loader]);
}

#[test]
fn nothing_is_taken_from_below_the_current_directory_by_a_relative_path() {
    // Cargo runs tests in the directory of the package.
    let here = std::env::current_dir().unwrap();
    let root = tempfile::tempdir_in(&here).unwrap();
    let site = python(root.path(), ".9", "site-packages");
    fs::create_dir_all(site.join("nvidia/cu13/lib")).unwrap();
    let relative = root.path().strip_prefix(&here).unwrap().join("bin");
    for (path, found) in [(root.path().join("bin"), true), (relative, false)] {
        let path = path.to_str().unwrap();
        let set = [("PATH", path), ("VIRTUAL_ENV", ""), ("HOME", "")];
        assert_eq!(!python_sites(&env(&set)).is_empty(), found, "{path}");
    }
}

#[test]
fn a_python_on_the_path_is_found_without_running_it() {
    let root = tempfile::tempdir().unwrap();
    let (venv, base) = (root.path().join("venv"), root.path().join("usr"));
    let old = python(&base, ".9", "dist-packages");
    let new = python(&base, ".13", "dist-packages");
    let plain = python(&base, "", "dist-packages");
    let inner = python(&venv, ".13", "site-packages");
    fs::create_dir_all(base.join("lib/python3-config")).unwrap();
    #[cfg(unix)]
    {
        // An environment's interpreter is a link to the installation's.
        fs::remove_file(venv.join("bin/python3")).unwrap();
        std::os::unix::fs::symlink(base.join("bin/python3"), venv.join("bin/python3")).unwrap();
        let path = format!("/nowhere:{}", text(&venv.join("bin")));
        let set = [("PATH", path.as_str())];
        assert_eq!(python_sites(&env(&set)), [inner, new, old, plain]);
    }
    assert!(python_sites(&env(&[])).is_empty());
    assert!(python_sites(&env(&[("VIRTUAL_ENV", "/nowhere")])).is_empty());
}

#[test]
fn every_place_is_named_when_a_library_is_missing() {
    let root = tempfile::tempdir().unwrap();
    let (empty, broken) = (root.path().join("empty"), root.path().join("broken"));
    fs::create_dir_all(&empty).unwrap();
    // A directory by the library's name, and a file that is no library.
    fs::create_dir_all(empty.join("libnvrtc.so.13")).unwrap();
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join("libnvrtc.so.12"), "text").unwrap();
    let places = [&empty, &broken].map(|dir| Place::Dir(dir.clone(), Found::Environment));
    let error = find(Library::Nvrtc, &places).unwrap_err();
    let CudaError::LibraryMissing { library, looked_in, hint } = &error else { panic!("{error}") };
    assert_eq!((*library, *hint), (Library::Nvrtc, Library::Nvrtc.hint()));
    assert_eq!(looked_in.len(), 3, "{looked_in:?}");
    assert!(looked_in[0].ends_with("empty") && looked_in[2].ends_with("broken"));
    assert!(looked_in[1].contains("libnvrtc.so.12: "), "{looked_in:?}");
    let text = error.to_string();
    assert!(text.contains("SWIGLU_CUDA_LIBRARY_PATH") && text.contains("pip install"), "{text}");
}

/// The C library stands in for one that is there but lacks what is called.
#[cfg(target_os = "linux")]
#[test]
fn a_library_without_a_function_is_too_old() {
    let root = tempfile::tempdir().unwrap();
    let Some(libc) = fs::read_to_string("/proc/self/maps").ok().and_then(|maps| {
        maps.lines().find_map(|l| {
            l.split_whitespace().nth(5).filter(|p| p.contains("libc.so")).map(str::to_owned)
        })
    }) else {
        swiglu_testing::not_run("this program has no shared C library");
        return;
    };
    std::os::unix::fs::symlink(&libc, root.path().join("libcuda.so.1")).unwrap();
    let place = Place::Dir(root.path().to_owned(), Found::Environment);
    let loaded = find(Library::Driver, &[place]).unwrap();
    assert_eq!(loaded.how, Found::Environment);
    // SAFETY: the type of `getpid`.
    let getpid: unsafe extern "C" fn() -> i32 = unsafe { loaded.symbol("getpid") }.unwrap();
    // SAFETY: takes nothing and cannot fail.
    assert_eq!(u32::try_from(unsafe { getpid() }), Ok(std::process::id()));
    // SAFETY: the symbol does not exist, so the type is never used.
    let error = unsafe { loaded.symbol::<unsafe extern "C" fn()>("cuInit") }.unwrap_err();
    let CudaError::SymbolMissing { symbol, path, .. } = &error else { panic!("{error}") };
    assert_eq!((*symbol, path.contains("libcuda.so.1")), ("cuInit", true));
}
