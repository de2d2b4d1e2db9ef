//! Tables for people, and the numbers in them.

use std::io::{self, Write};

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table, presets};

use crate::terminal::Terminal;

/// A row of cells of anything that can be shown.
macro_rules! row {
    ($($cell:expr),* $(,)?) => {
        vec![$(comfy_table::Cell::from($cell)),*]
    };
}
pub(crate) use row;

/// Prints rows under the names of their columns. A name with `>` before it is of a column of numbers,
/// which are aligned to the right.
pub(crate) fn print(
    terminal: &mut Terminal,
    columns: &[&str],
    rows: impl IntoIterator<Item = Vec<Cell>>,
) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if terminal.colour() {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    let name = |column: &&str| column.trim_start_matches('>').to_owned();
    table.set_header(columns.iter().map(|c| Cell::new(name(c)).add_attribute(Attribute::Bold)));
    for (cells, column) in table.column_iter_mut().zip(columns) {
        let number = column.starts_with('>');
        cells.set_cell_alignment(if number { CellAlignment::Right } else { CellAlignment::Left });
        cells.set_padding((0, 2));
    }
    table.add_rows(rows);
    table.lines().try_for_each(|line| writeln!(terminal, "{}", line.trim_end()))
}

/// A cell that may be empty: then there is a dash.
pub(crate) fn or_dash(text: Option<impl ToString>) -> Cell {
    text.map_or_else(|| Cell::new("–"), Cell::new)
}

/// `ok`, or what is wrong, in the colour of either.
pub(crate) fn verdict(passed: bool) -> Cell {
    match passed {
        true => Cell::new("ok").fg(Color::Green),
        false => Cell::new("FAILED").fg(Color::Red).add_attribute(Attribute::Bold),
    }
}

/// Four significant digits where the number has a fraction.
pub(crate) fn number(x: f64) -> String {
    let digits = match x.abs() {
        a if a >= 100.0 => 0,
        a if a >= 10.0 => 1,
        a if a >= 1.0 => 2,
        _ => 3,
    };
    format!("{x:.digits$}")
}

/// A time in microseconds with the unit that suits it.
pub(crate) fn time(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{} µs", number(us)),
        us if us < 1e6 => format!("{} ms", number(us / 1e3)),
        us => format!("{} s", number(us / 1e6)),
    }
}

/// Two times around a median, in the unit of that: `7.02–7.20`.
pub(crate) fn range(low: f64, high: f64, median: f64) -> String {
    let unit = match median {
        us if us < 1e3 => 1.0,
        us if us < 1e6 => 1e3,
        _ => 1e6,
    };
    format!("{}–{}", number(low / unit), number(high / unit))
}

/// A relative error: two digits and a power of ten.
pub(crate) fn error(x: f64) -> String {
    if x == 0.0 { "0".into() } else { format!("{x:.1e}") }
}

/// A ratio: `1.52×`.
pub(crate) fn ratio(x: f64) -> String {
    if x.is_finite() { format!("{x:.2}×") } else { "–".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_their_unit() {
        assert_eq!([time(7.128), time(1534.0), time(2.5e6)], ["7.13 µs", "1.53 ms", "2.50 s"]);
        assert_eq!([number(574.4), number(49.83), number(0.1234)], ["574", "49.8", "0.123"]);
        assert_eq!(range(998.0, 2040.0, 1534.0), "0.998–2.04");
        assert_eq!([error(0.0), error(1.64e-3)], ["0", "1.6e-3"]);
        assert_eq!([ratio(1.519), ratio(f64::NAN)], ["1.52×", "–"]);
    }
}
