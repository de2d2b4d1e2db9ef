//! Tables for people, and the numbers in them.

use std::io::Write;

use comfy_table::{Attribute, Cell, CellAlignment, Color, presets};

use swiglu_lab::record::Summary;

use crate::terminal::Terminal;

/// A table that grows column by column: each says what it shows of a row.
pub(crate) struct Table<'r, R> {
    rows: &'r [R],
    header: Vec<(&'static str, CellAlignment)>,
    lines: Vec<Vec<Cell>>,
}

impl<'r, R> Table<'r, R> {
    pub(crate) fn of(rows: &'r [R]) -> Self {
        Self { rows, header: Vec::new(), lines: rows.iter().map(|_| Vec::new()).collect() }
    }

    fn column<C: Into<Cell>>(
        mut self,
        name: &'static str,
        side: CellAlignment,
        of: impl FnMut(&'r R) -> C,
    ) -> Self {
        self.header.push((name, side));
        let cells = self.rows.iter().map(of);
        self.lines.iter_mut().zip(cells).for_each(|(line, cell)| line.push(cell.into()));
        self
    }

    pub(crate) fn text<C: Into<Cell>>(self, name: &'static str, of: impl Fn(&'r R) -> C) -> Self {
        self.column(name, CellAlignment::Left, of)
    }

    /// Text that is not said again right below itself.
    pub(crate) fn group(self, name: &'static str, of: impl Fn(&'r R) -> &'r str) -> Self {
        let mut last = "";
        self.column(name, CellAlignment::Left, |row| match of(row) {
            again if again == last => "",
            text => {
                last = text;
                text
            }
        })
    }

    /// Numbers are aligned to the right.
    pub(crate) fn number<C: Into<Cell>>(self, name: &'static str, of: impl Fn(&'r R) -> C) -> Self {
        self.column(name, CellAlignment::Right, of)
    }

    pub(crate) fn print(self, terminal: &mut Terminal) -> anyhow::Result<()> {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        match terminal.colour {
            true => table.enforce_styling(),
            false => table.force_no_tty(),
        };
        let bold = |(name, _): &(_, _)| Cell::new(name).add_attribute(Attribute::Bold);
        table.set_header(self.header.iter().map(bold));
        for (column, (_, side)) in table.column_iter_mut().zip(self.header) {
            column.set_cell_alignment(side);
            column.set_padding((0, 2));
        }
        table.add_rows(self.lines);
        for line in table.lines() {
            writeln!(terminal, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A cell that may be empty: then there is a dash.
pub(crate) fn or_dash(text: Option<impl ToString>) -> Cell {
    text.map_or_else(|| Cell::new("–"), Cell::new)
}

/// What is as it should be.
pub(crate) fn good(text: impl ToString) -> Cell {
    Cell::new(text).fg(Color::Green)
}

/// What is wrong.
pub(crate) fn bad(text: impl ToString) -> Cell {
    Cell::new(text).fg(Color::Red).add_attribute(Attribute::Bold)
}

/// What is neither.
pub(crate) fn open(text: impl ToString) -> Cell {
    Cell::new(text).fg(Color::Yellow)
}

/// `ok`, or what is wrong, in the colour of either.
pub(crate) fn verdict(passed: bool) -> Cell {
    if passed { good("ok") } else { bad("FAILED") }
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

/// The unit that suits a time in microseconds.
fn unit(us: f64) -> (f64, &'static str) {
    match us {
        us if us < 1e3 => (1.0, "µs"),
        us if us < 1e6 => (1e3, "ms"),
        _ => (1e6, "s"),
    }
}

/// A time in microseconds with the unit that suits it.
pub(crate) fn time(us: f64) -> String {
    let (unit, name) = unit(us);
    format!("{} {name}", number(us / unit))
}

/// The quartiles of times, in the unit of their median: `7.02–7.20`.
pub(crate) fn quartiles(Summary { q1, q3, median, .. }: Summary) -> String {
    let (unit, _) = unit(median);
    format!("{}–{}", number(q1 / unit), number(q3 / unit))
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
        let (q1, q3, median) = (998.0, 2040.0, 1534.0);
        let summary = Summary { median, q1, q3, min: q1, n: 9 };
        assert_eq!(quartiles(summary), "0.998–2.04");
        assert_eq!([error(0.0), error(1.64e-3)], ["0", "1.6e-3"]);
        assert_eq!([ratio(1.519), ratio(f64::NAN)], ["1.52×", "–"]);
    }
}
