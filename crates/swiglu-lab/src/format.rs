//! Numbers for people: short, with the unit that suits them.

use crate::record::{Interval, Summary};

/// Three or four significant digits.
pub fn number(x: f64) -> String {
    let digits = match x.abs() {
        a if a >= 100.0 => 0,
        a if a >= 10.0 => 1,
        a if a >= 1.0 => 2,
        _ => 3,
    };
    if x.is_finite() { format!("{x:.digits$}") } else { DASH.into() }
}

/// What stands for a number that is not known.
pub const DASH: &str = "–";

/// The unit that suits a time in microseconds.
fn unit(us: f64) -> (f64, &'static str) {
    match us {
        us if us < 1e3 => (1.0, "µs"),
        us if us < 1e6 => (1e3, "ms"),
        _ => (1e6, "s"),
    }
}

/// A time given in microseconds.
pub fn time(us: f64) -> String {
    let (unit, name) = unit(us);
    if us.is_finite() { format!("{} {name}", number(us / unit)) } else { DASH.into() }
}

/// The quartiles of times, in the unit of their median: `7.02–7.20`.
pub fn quartiles(Summary { q1, q3, median, .. }: Summary) -> String {
    let (unit, _) = unit(median);
    format!("{}–{}", number(q1 / unit), number(q3 / unit))
}

/// An amount with a decimal prefix: `1.20 GB`.
pub fn si(x: f64, unit: &str) -> String {
    let (scale, prefix) = match x {
        x if x >= 1e12 => (1e12, "T"),
        x if x >= 1e9 => (1e9, "G"),
        x if x >= 1e6 => (1e6, "M"),
        x if x >= 1e3 => (1e3, "k"),
        _ => (1.0, ""),
    };
    format!("{} {prefix}{unit}", number(x / scale))
}

/// `1.52×`.
pub fn ratio(x: f64) -> String {
    if x.is_finite() { format!("{x:.2}×") } else { DASH.into() }
}

/// `1.20× [1.18, 1.22]`; the ratio alone where nobody knows the interval.
pub fn interval(i: Interval) -> String {
    let Interval { value, ci95: [low, high] } = i;
    match low.is_finite() && high.is_finite() {
        true => format!("{} [{low:.2}, {high:.2}]", ratio(value)),
        false => ratio(value),
    }
}

/// A relative error: two digits and a power of ten.
pub fn error(x: f64) -> String {
    match x {
        0.0 => "0".into(),
        x if x.is_finite() => format!("{x:.1e}"),
        _ => DASH.into(),
    }
}

/// The day of an RFC 3339 time.
pub fn day(time: &str) -> &str {
    time.get(..10).unwrap_or(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_their_unit() {
        assert_eq!([time(7.128), time(1534.0), time(2.5e6)], ["7.13 µs", "1.53 ms", "2.50 s"]);
        assert_eq!([number(574.4), number(49.83), number(0.1234)], ["574", "49.8", "0.123"]);
        let summary = Summary { median: 1534.0, q1: 998.0, q3: 2040.0, min: 998.0, n: 9 };
        assert_eq!(quartiles(summary), "0.998–2.04");
        assert_eq!([si(4.1e12, "B/s"), si(12.0, "B")], ["4.10 TB/s", "12.0 B"]);
        assert_eq!([ratio(1.519), error(0.0), error(1.64e-3)], ["1.52×", "0", "1.6e-3"]);
        for unknown in [f64::NAN, f64::INFINITY] {
            assert_eq!([number(unknown), time(unknown), ratio(unknown), error(unknown)], [DASH; 4]);
        }
        let of = |low| interval(Interval { value: 1.2, ci95: [low, 1.226] });
        assert_eq!([of(1.184), of(f64::NAN)], ["1.20× [1.18, 1.23]", "1.20×"]);
        assert_eq!([day("2026-11-20T10:00:00Z"), day("soon")], ["2026-11-20", "soon"]);
    }
}
