//! Prints the table of families of `docs/families.md`.
#![allow(clippy::print_stdout)]

fn main() {
    print!("{}", swiglu_formats::family::page());
}
