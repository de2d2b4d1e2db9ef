use swiglu_lab::profile::Ceiling;
use swiglu_lab::record::Interval;
use swiglu_lab::report::chart::{Bar, Canvas, PALETTE, Series, Width, glyph};

const HOSTILE: &str = "a <b> & \"c\" \u{7} ]]> 日本 #FE0001";

fn bars(ratios: &[[f64; 3]]) -> Vec<Bar> {
    let bar = |(series, &[q1, median, q3]): (usize, &[f64; 3])| Bar {
        label: HOSTILE.into(),
        values: [(); 2].map(|()| format!("{median:.1}×")),
        ratio: Interval { value: median, ci95: [q1, q3] },
        series,
    };
    ratios.iter().enumerate().map(bar).collect()
}

fn svg(plot: Option<Canvas>) -> Option<String> {
    plot.map(|canvas| canvas.finish(HOSTILE, HOSTILE))
}

fn chart(ratios: &[[f64; 3]], from: f64, width: Width) -> Option<String> {
    svg(Bar::chart(&bars(ratios), from, width))
}

fn thumb(ratios: &[[f64; 3]], from: f64) -> Option<String> {
    svg(Bar::thumb(&bars(ratios), from))
}

fn sweep(points: &[(f64, f64)], width: Width) -> Option<String> {
    let series = |series| Series { label: HOSTILE.into(), series, points: points.to_vec() };
    svg(Series::sweep(&(0..9).map(series).collect::<Vec<_>>(), width))
}

/// Of hundreds of sizes each is a point of the line, and few have a marker, so that the line is seen.
#[test]
fn a_sweep_over_hundreds_of_sizes_is_a_line() {
    let points: Vec<_> = (1..=200).map(|m| (f64::from(m), 1.0 + f64::from(m % 7) / 50.0)).collect();
    let series = vec![Series { label: "ours".into(), series: 0, points }];
    let svg = svg(Series::sweep(&series, Width::Wide)).unwrap();
    let line = svg.split("points=\"").filter_map(|s| s.split('"').next());
    assert_eq!(line.map(|points| points.split(' ').count()).max(), Some(200));
    let markers = svg.matches("<circle").count();
    assert!((20..=40).contains(&markers), "{markers}");
}

fn roofline(
    points: &[(f64, f64)],
    memory: Option<f64>,
    compute: &[f64],
    width: Width,
) -> Option<String> {
    let one = |(series, &point)| Series { label: HOSTILE.into(), series, points: vec![point] };
    let ceiling = |per_second: f64| Ceiling { name: HOSTILE.into(), per_second };
    let series: Vec<_> = points.iter().enumerate().map(one).collect();
    let compute: Vec<_> = compute.iter().copied().map(ceiling).collect();
    let compute: Vec<_> = compute.iter().collect();
    svg(Series::roofline(&series, memory.map(ceiling).as_ref(), &compute, width))
}

const LEVELS: [f64; 2] = [8e14, 4e14];

/// Well-formed, named, coloured by the palette alone, and inside its frame.
fn check(svg: &str) {
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
    let size = |name| root.attribute(name).unwrap().parse::<f64>().unwrap();
    let mut drawn = 0;
    let mut inside = |value: &str, limit: f64| {
        let value: f64 = value.parse().unwrap();
        assert!((-1.0..=limit + 1.0).contains(&value), "{value} of {limit} in {svg}");
        drawn += 1;
    };
    for node in root.descendants() {
        for (name, limit) in [("x", "width"), ("cx", "width"), ("y", "height"), ("cy", "height")] {
            node.attribute(name).into_iter().for_each(|value| inside(value, size(limit)));
        }
        for pair in node.attribute("points").unwrap_or_default().split_whitespace() {
            let (x, y) = pair.split_once(',').unwrap();
            inside(x, size("width"));
            inside(y, size("height"));
        }
    }
    assert!(drawn > 3, "nothing drawn: {svg}");
}

const NS: &str = "http://www.w3.org/2000/svg";
const WIDTHS: [Width; 2] = [Width::Narrow, Width::Wide];

/// An interval is drawn whole, wherever its value lies; what reaches far beyond all values is cut and has no end.
#[test]
fn intervals_are_drawn_whole_or_without_an_end() {
    let lines = |ratio: [f64; 3]| {
        let svg = chart(&[ratio], 1.0, Width::Wide).unwrap();
        svg.matches("points=\"").count()
    };
    // Where bars begin, the interval and its ends.
    assert_eq!(lines([22.44, 34.28, 52.36]), 4);
    assert_eq!(lines([0.9, 1.1, 1.2]), 4);
    assert_eq!(lines([0.9, 1.1, 80.0]), 3);
    assert_eq!(lines([0.01, 0.97, 80.0]), 2);
}

#[test]
fn plots_are_well_formed_named_and_within_their_frame() {
    let over_sizes: Vec<_> =
        (0..15).map(|i| (f64::from(1 << i), 0.3 + f64::from(i) * 0.2)).collect();
    let ratios = [[1.1, 1.2, 1.3], [0.01, 0.97, 80.0], [1.0, 1.0, 1.0]];
    for width in WIDTHS {
        let drawn = [
            chart(&[[9.0, 10.0, 12.0], [1e4, 2e4, 9e9], [0.1, 0.2, 0.3]], 1.0, width),
            chart(&ratios, 1.0, width),
            chart(&ratios, 0.97, width),
            thumb(&ratios, 1.0),
            sweep(&over_sizes, width),
            sweep(&[(1.0, 1.0), (2.0, 1.0)], width),
            sweep(&[(1.0, 1e-3), (16384.0, 1e3)], width),
            roofline(&[(0.3, 1e12), (700.0, 6e14), (1e-3, 1e6)], Some(4e12), &LEVELS, width),
            roofline(&[(0.3, 1e12)], Some(4e12), &[], width),
        ];
        for svg in drawn {
            check(&svg.expect("something to draw"));
        }
    }
}

#[test]
fn a_ratio_below_its_limit_goes_the_other_way_than_one_above() {
    let svg = thumb(&[[1.2, 1.2, 1.2], [0.9, 0.9, 0.9]], 1.0).unwrap();
    let document = roxmltree::Document::parse(&svg).unwrap();
    let of = |name: &'static str| {
        let bars = document.descendants().filter(|n| n.has_tag_name((NS, "rect")));
        bars.map(|n| n.attribute(name).unwrap().parse::<f64>().unwrap()).collect::<Vec<_>>()
    };
    let (top, height) = (of("y"), of("height"));
    assert!((top[0] + height[0] - top[1]).abs() < 0.2, "both begin at the line: {svg}");
    assert!(height[0] > height[1] && height[1] > 5.0, "{svg}");
}

#[test]
fn numbers_that_cannot_be_drawn_are_left_out() {
    for width in WIDTHS {
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert_eq!(chart(&[[bad; 3]], 1.0, width), None, "{bad}");
            assert_eq!(thumb(&[[1.0; 3]], bad), None, "{bad}");
            assert_eq!(sweep(&[(1.0, bad), (bad, 1.0)], width), None, "{bad}");
            assert_eq!(roofline(&[(bad, 1.0), (1.0, bad)], Some(4e12), &LEVELS, width), None);
            assert_eq!(roofline(&[(1.0, 1.0)], Some(bad), &LEVELS, width), None, "{bad}");
            let some = [
                chart(&[[1.0, 2.0, 3.0], [bad; 3], [bad, 2.0, bad]], 1.0, width),
                sweep(&[(1.0, 1.0), (4.0, bad), (16.0, 2.0)], width),
                roofline(&[(1.0, 1e12), (bad, bad)], Some(4e12), &[bad], width),
            ];
            some.into_iter().for_each(|svg| check(&svg.expect("something left")));
        }
        assert_eq!(sweep(&[(4.0, 1.0), (4.0, 2.0)], width), None, "one size is no sweep");
        assert_eq!(roofline(&[(1.0, 1.0)], None, &LEVELS, width), None);
    }
}

#[test]
fn neighbouring_series_differ_in_colour_and_marker_and_pairs_repeat_late() {
    let svg = sweep(&[(1.0, 1.0), (4.0, 1.2)], Width::Wide).unwrap();
    for colour in 0..9 {
        assert!(svg.contains(&format!("var(--c{colour})")), "--c{colour}");
        assert!(PALETTE.matches(&format!("--c{colour}:")).count() == 2, "light and dark");
    }
    let mut pairs: Vec<_> = (0..63).map(|s| (s % 9, glyph(s))).collect();
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
