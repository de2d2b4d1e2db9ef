//! Pages in headless Chromium, where it is installed: nothing is wider than the screen, colours follow
//! the scheme, and no picture is blank. Without it the test says that it did not run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use swiglu_lab::VerdictState;

use super::made_up::site;

const LIMIT: Duration = Duration::from_secs(60);

fn browser() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&paths)
        .flat_map(|dir| names.map(|name| dir.join(name)))
        .find(|path| path.is_file())
}

/// Runs the browser on a page; its standard output.
fn run(browser: &Path, page: &Path, width: u32, dark: bool, extra: &[String]) -> String {
    let profile = tempfile::tempdir().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut child = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--window-size={width},1000"))
        .arg(format!("--blink-settings=preferredColorScheme={}", i32::from(!dark)))
        .args(extra)
        .arg(format!("file://{}", page.display()))
        .stdout(log.reopen().unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{} has no end", browser.display());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    std::fs::read_to_string(log.path()).unwrap()
}

/// Measures every frame and writes a line about each into the document. Pages themselves have no
/// scripts.
const PROBE: &str = r#"<pre id="out">nothing</pre><script>
// How many experiments are shown after each choice of a verdict.
const chosen = d => [...d.querySelectorAll(".filter input")].map(input => {
  input.click();
  return [...d.querySelectorAll(".experiments > li")].filter(li => li.offsetHeight > 0).length;
}).join(",");
onload = () => {
  out.textContent = [...document.querySelectorAll("iframe")].map(f => {
    const d = f.contentDocument, root = d.documentElement;
    const shown = [...d.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().width > 0);
    const small = shown.filter(s => s.querySelector("text") && s.getBoundingClientRect().width < 240).length;
    const sizes = shown.flatMap(s => {
      const scale = s.getBoundingClientRect().width / s.viewBox.baseVal.width;
      return [...s.querySelectorAll("text")].map(t => parseFloat(t.getAttribute("font-size")) * scale);
    });
    return [root.scrollWidth, root.clientWidth, shown.length, small,
      Math.min(99, ...sizes).toFixed(1), chosen(d), f.contentWindow.getComputedStyle(d.body).backgroundColor].join(";");
  }).join("\n");
};
</script>"#;

#[test]
fn pages_fit_phones_and_desks_in_light_and_dark() {
    let Some(browser) = browser() else {
        swiglu_testing::not_run("no Chromium in PATH");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    let site = site(&dir.path().join("records"));
    site.write(&report).unwrap();
    let of = |state| site.experiments.iter().filter(|e| e.verdict.state == state).count();
    let by_verdict = VerdictState::ALL.map(|state| of(state).to_string()).join(",");
    let by_verdict = format!("{},{by_verdict}", site.experiments.len());
    let pages = [
        "index.html",
        "experiments/gated-linear-sweep.html",
        "experiments/cpu-mlp-decode.html",
        "experiments/hostile.html",
        "runs/imaginary-gpu--2026-11-19-gated-linear-sweep-two.html",
        "decisions/0002-doubted.html",
    ];
    let files = ["--allow-file-access-from-files".into(), "--dump-dom".to_owned()];
    let mut backgrounds = std::collections::BTreeSet::new();
    let framed: Vec<(&str, u32)> =
        pages.into_iter().flat_map(|page| [360, 1200].map(|width| (page, width))).collect();
    let frame = |(page, width): &(&str, u32)| {
        format!("<iframe src=\"{page}\" style=\"border:0;width:{width}px;height:900px\"></iframe>")
    };
    let frames: String = framed.iter().map(frame).collect();
    let probe = report.join("probe.html");
    std::fs::write(&probe, format!("<!doctype html><meta charset=\"utf-8\">{frames}{PROBE}"))
        .unwrap();
    for dark in [false, true] {
        let dom = run(&browser, &probe, 1400, dark, &files);
        let answer = dom.split("id=\"out\">").nth(1).and_then(|d| d.split('<').next());
        let answers: Vec<&str> = answer.unwrap_or_else(|| panic!("{dom}")).lines().collect();
        assert_eq!(answers.len(), framed.len(), "{answers:?}");
        for ((page, width), answer) in framed.iter().zip(answers) {
            let parts: Vec<&str> = answer.split(';').collect();
            let number = |i: usize| parts[i].parse::<f64>().unwrap_or_else(|_| panic!("{answer}"));
            let at = format!("{page} at {width}, dark {dark}: {answer}");
            assert!(number(0) <= number(1), "wider than the screen: {at}");
            assert_eq!(number(1), f64::from(*width), "{at}");
            assert!(number(3) == 0.0, "plots that are too small to read: {at}");
            assert!(number(4) >= 9.0, "text in a plot that is too small to read: {at}");
            let is_plotted = page.starts_with("experiments") || *page == "index.html";
            assert_eq!(number(2) > 0.0, is_plotted && !page.contains("hostile"), "{at}");
            // All, refuted, inconclusive, supported, not run.
            let chosen = if *page == "index.html" { by_verdict.as_str() } else { "" };
            assert_eq!(parts[5], chosen, "{at}");
            backgrounds.insert((dark, parts[6].to_owned()));
        }
    }
    assert_eq!(backgrounds.len(), 2, "one background for each scheme: {backgrounds:?}");
    assert_ne!(backgrounds.first().map(|b| &b.1), backgrounds.last().map(|b| &b.1));
    let picture = dir.path().join("index.png");
    let shot = [format!("--screenshot={}", picture.display())];
    run(&browser, &report.join("index.html"), 360, true, &shot);
    assert!(std::fs::metadata(&picture).unwrap().len() > 10_000, "a blank picture");
}
