//! Tables for people, and the numbers in them.

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table, presets};

use crate::terminal::Terminal;

/// A column and how its cells are aligned.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Column {
    /// To the left.
    Text(&'static str),
    /// To the right.
    Number(&'static str),
}

/// An empty table with these columns.
pub(crate) fn table(terminal: &Terminal, columns: &[Column]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if terminal.colour() {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table.set_header(columns.iter().map(|(Column::Text(name) | Column::Number(name))| {
        Cell::new(name).add_attribute(Attribute::Bold)
    }));
    for (cells, column) in table.column_iter_mut().zip(columns) {
        cells.set_cell_alignment(match column {
            Column::Text(_) => CellAlignment::Left,
            Column::Number(_) => CellAlignment::Right,
        });
        cells.set_padding((0, 2));
    }
    table
}

/// `ok`, or what is wrong, in the colour of either.
pub(crate) fn verdict(passed: bool) -> Cell {
    match passed {
        true => Cell::new("ok").fg(Color::Green),
        false => Cell::new("FAILED").fg(Color::Red).add_attribute(Attribute::Bold),
    }
}

/// The table as lines without trailing blanks.
pub(crate) fn lines(table: &Table) -> String {
    let mut out = String::new();
    for line in table.lines() {
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
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
        assert_eq!([error(0.0), error(1.64e-3)], ["0", "1.6e-3"]);
        assert_eq!([ratio(1.519), ratio(f64::NAN)], ["1.52×", "–"]);
    }
}
