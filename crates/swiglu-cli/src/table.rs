//! Tables for people, and the numbers in them, which are those of the lab.

use anyhow::Result;
use comfy_table::{Attribute, Cell, CellAlignment, Color, presets};
use swiglu_lab::format::DASH;
pub(crate) use swiglu_lab::format::{error, interval, number, quartiles, ratio, time};

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

    pub(crate) fn print(self, terminal: &mut Terminal) -> Result<()> {
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
    text.map_or_else(|| Cell::new(DASH), Cell::new)
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
