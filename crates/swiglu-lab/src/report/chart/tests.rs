use super::*;

const HOSTILE: &str = "a <b> & \"c\" \u{7} ]]> 日本 #FE0001";

fn bars(times: &[[f64; 3]]) -> Bars {
    let bar = |(series, &[q1, median, q3]): (usize, &[f64; 3])| Bar {
        label: HOSTILE.into(),
        value: format!("{median:.1} µs"),
        median,
        q1,
        q3,
        series,
    };
    let bars = times.iter().enumerate().map(bar).collect();
    Bars { title: HOSTILE.into(), description: HOSTILE.into(), bars }
}

fn sweep(points: &[(f64, f64)]) -> Sweep {
    let series = |series| SweepSeries { label: HOSTILE.into(), series, points: points.to_vec() };
    Sweep {
        title: HOSTILE.into(),
        description: HOSTILE.into(),
        x_label: HOSTILE.into(),
        series: (0..9).map(series).collect(),
    }
}

fn roofline(points: &[(f64, f64)], roofs: Vec<Roof>) -> Roofline {
    let point = |(i, &(intensity, flops))| RooflinePoint { series: i, intensity, flops };
    Roofline {
        title: HOSTILE.into(),
        description: HOSTILE.into(),
        roofs,
        points: points.iter().enumerate().map(point).collect(),
    }
}

fn roofs() -> Vec<Roof> {
    let compute = |flops| Roof::Compute { label: HOSTILE.into(), flops };
    vec![Roof::Memory { label: HOSTILE.into(), bytes: 4e12 }, compute(8e14), compute(4e14)]
}

fn errors(errors: &[(f64, f64)]) -> ErrorDots {
    let row = |(series, &(error, limit))| ErrorRow { label: HOSTILE.into(), error, limit, series };
    let rows = errors.iter().enumerate().map(row).collect();
    ErrorDots { title: HOSTILE.into(), description: HOSTILE.into(), rows }
}

/// Well-formed, named, coloured by the palette alone, and inside its frame.
fn check(svg: &str, width: Width) {
    let document = roxmltree::Document::parse(svg).unwrap_or_else(|e| panic!("{e}\n{svg}"));
    let root = document.root_element();
    assert_eq!((root.tag_name().name(), root.attribute("role")), ("svg", Some("img")));
    let name = |n| root.children().find(|c| c.has_tag_name((NS, n)));
    assert!(name("title").and_then(|t| t.text()).is_some_and(|t| t.contains("a <b> & \"c\"")));
    assert!(name("desc").is_some());
    for word in ["NaN", "inf", "#FE"] {
        // The title has a colour of ours in it, as text, where it stays.
        let attributes = root.descendants().flat_map(|n| n.attributes());
        let named = attributes.filter(|a| a.name() != "aria-label");
        assert!(named.clone().all(|a| !a.value().contains(word)), "{word} in {svg}");
    }
    let height: f64 = root.attribute("height").unwrap().parse().unwrap();
    let mut drawn = 0;
    for node in root.descendants() {
        for (name, limit) in [
            ("x", f64::from(width.pixels())),
            ("cx", f64::from(width.pixels())),
            ("y", height),
            ("cy", height),
        ] {
            if let Some(value) = node.attribute(name) {
                let value: f64 = value.parse().unwrap();
                assert!((-1.0..=limit + 1.0).contains(&value), "{name}={value} in {svg}");
                drawn += 1;
            }
        }
    }
    assert!(drawn > 3, "nothing drawn: {svg}");
}

const NS: &str = "http://www.w3.org/2000/svg";
const WIDTHS: [Width; 2] = [Width::Narrow, Width::Wide];

#[test]
fn plots_are_well_formed_named_and_within_their_frame() {
    let over_sizes: Vec<_> =
        (0..15).map(|i| (f64::from(1 << i), 0.3 + f64::from(i) * 0.2)).collect();
    for width in WIDTHS {
        let drawn = [
            bars(&[[9.0, 10.0, 12.0], [1e4, 2e4, 9e9], [0.1, 0.2, 0.3]]).svg(width),
            sweep(&over_sizes).svg(width),
            sweep(&[(1.0, 1.0), (2.0, 1.0)]).svg(width),
            sweep(&[(1.0, 1e-3), (16384.0, 1e3)]).svg(width),
            roofline(&[(0.3, 1e12), (700.0, 6e14), (1e-3, 1e6)], roofs()).svg(width),
            roofline(&[(0.3, 1e12)], roofs()[..1].to_vec()).svg(width),
            errors(&[(1.6e-3, 7e-3), (3e-8, 1e-6)]).svg(width),
            errors(&[(1e-3, 1e-3)]).svg(width),
        ];
        for svg in drawn {
            let svg = svg.unwrap().expect("something to draw");
            check(&svg, width);
            let alone = standalone(&svg, HOSTILE);
            let document = roxmltree::Document::parse(&alone).unwrap();
            assert_eq!(document.descendants().filter(|n| n.has_tag_name((NS, "svg"))).count(), 2);
            assert!(alone.contains(PALETTE) && alone.contains("viewBox=\"0 0 "));
        }
    }
}

#[test]
fn numbers_that_cannot_be_drawn_are_left_out() {
    let nothing = [f64::NAN, f64::INFINITY, 0.0, -1.0];
    for width in WIDTHS {
        for bad in nothing {
            assert_eq!(bars(&[[bad; 3]]).svg(width), Ok(None), "{bad}");
            assert_eq!(sweep(&[(1.0, bad), (bad, 1.0)]).svg(width), Ok(None), "{bad}");
            assert_eq!(roofline(&[(bad, 1.0), (1.0, bad)], roofs()).svg(width), Ok(None), "{bad}");
            let roof = Roof::Memory { label: String::new(), bytes: bad };
            assert_eq!(roofline(&[(1.0, 1.0)], vec![roof]).svg(width), Ok(None), "{bad}");
            assert_eq!(errors(&[(bad, 1.0)]).svg(width), Ok(None), "{bad}");
            let some = [
                bars(&[[1.0, 2.0, 3.0], [bad; 3], [bad, 2.0, bad]]).svg(width),
                sweep(&[(1.0, 1.0), (4.0, bad), (16.0, 2.0)]).svg(width),
                roofline(&[(1.0, 1e12), (bad, bad)], roofs()).svg(width),
                errors(&[(1e-3, bad), (bad, bad)]).svg(width),
            ];
            some.into_iter().for_each(|svg| check(&svg.unwrap().expect("something left"), width));
        }
        assert_eq!(sweep(&[(4.0, 1.0), (4.0, 2.0)]).svg(width), Ok(None), "one size is no sweep");
        assert_eq!(roofline(&[(1.0, 1.0)], Vec::new()).svg(width), Ok(None));
    }
}

#[test]
fn neighbouring_series_differ_in_colour_and_marker_and_pairs_repeat_late() {
    let svg = sweep(&[(1.0, 1.0), (4.0, 1.2)]).svg(Width::Wide).unwrap().unwrap();
    for colour in 0..9 {
        assert!(svg.contains(&format!("var(--c{colour})")), "--c{colour}");
        assert!(PALETTE.matches(&format!("--c{colour}:")).count() == 2, "light and dark");
    }
    let mut pairs: Vec<_> = (0..63).map(|s| (s % 9, marker(s).glyph())).collect();
    pairs.sort_unstable();
    pairs.dedup();
    assert_eq!(pairs.len(), 63);
}

/// Relative luminance by WCAG 2.
fn luminance(hex: &str) -> f64 {
    let part = |i: usize| {
        let c = f64::from(u8::from_str_radix(&hex[i..i + 2], 16).unwrap()) / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
}

#[test]
fn every_colour_stands_out_from_its_background() {
    let (light, dark) = PALETTE.split_once("@media").unwrap();
    for scheme in [light, dark] {
        let of = |name: &str| {
            let (_, rest) = scheme.split_once(&format!("{name}: ")).unwrap();
            luminance(rest.split(';').next().unwrap())
        };
        let contrast = |name: &str| {
            let (a, b) = (of(name), of("--surface"));
            (a.max(b) + 0.05) / (a.min(b) + 0.05)
        };
        for colour in 0..9 {
            let name = format!("--c{colour}");
            assert!(contrast(&name) >= 3.0, "{name}: {}", contrast(&name));
        }
        assert!(contrast("--ink") >= 7.0 && contrast("--muted") >= 4.5);
    }
}
