//! The device files that others include, and what a file reaches through them.

use super::variant::KernelFile;

/// A header: its name in `#include "…"`, and its text.
pub(crate) type Header = (&'static str, &'static str);

macro_rules! header {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../device/", $name)))
    };
}

/// Every header of `device/`, by its path there.
static HEADERS: &[Header] = &[
    header!("decode/decode_formats.cuh"),
    header!("decode/decode_mlp.cuh"),
    header!("decode/decode_tiles.cuh"),
    header!("elementwise/elementwise.cuh"),
    header!("lib/element.cuh"),
    header!("lib/gate.cuh"),
    header!("lib/gated_gemm.cuh"),
    header!("lib/ptx.cuh"),
    header!("lib/tiles.cuh"),
    header!("portable/mma_gemm.cuh"),
    header!("sm90/epilogue.cuh"),
    header!("sm90/gemm.cuh"),
    header!("sm90/operands.cuh"),
    header!("sm90/ring.cuh"),
    header!("sm90/scheduler.cuh"),
    header!("sm90/shape.cuh"),
    header!("sm90/swap_ab.cuh"),
];

/// A device file, and the headers that it includes, each by its name.
pub(crate) fn sources_of(file: &KernelFile) -> impl Iterator<Item = Header> + use<> {
    std::iter::once((file.name(), file.text())).chain(headers_of(file))
}

/// The headers that `file` includes, directly or through others, in the order of first mention.
/// Names that no header has are left to the compiler's error.
pub(crate) fn headers_of(file: &KernelFile) -> Vec<Header> {
    reachable(file.text(), HEADERS)
}

fn reachable(text: &str, headers: &[Header]) -> Vec<Header> {
    let mut found: Vec<Header> = Vec::new();
    let mut texts = vec![text];
    while let Some(text) = texts.pop() {
        for name in text.lines().filter_map(included) {
            let known = found.iter().any(|(n, _)| *n == name);
            if !known && let Some(header) = headers.iter().find(|(n, _)| *n == name) {
                found.push(*header);
                texts.push(header.1);
            }
        }
    }
    found
}

/// The name in a line `#include "name"`.
fn included(line: &str) -> Option<&str> {
    let directive = line.trim_start().strip_prefix('#')?.trim_start();
    directive.strip_prefix("include")?.trim_start().strip_prefix('"')?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_through_headers_once() {
        let headers: &[Header] = &[
            ("a.cuh", "#pragma once\n#include \"b.cuh\"\n"),
            ("b.cuh", "  # include \"a.cuh\"\n"),
            ("c.cuh", ""),
        ];
        let names = |text| reachable(text, headers).iter().map(|h| h.0).collect::<Vec<_>>();
        assert_eq!(names("// x\n#include \"a.cuh\"\nint x;"), ["a.cuh", "b.cuh"]);
        assert_eq!(names("#include <cuda.h>\n#include \"none.cuh\""), [""; 0]);
    }

    #[test]
    fn the_list_has_every_header_of_the_directory() {
        let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/device"));
        let (mut folders, mut found) = (vec![root.to_path_buf()], Vec::new());
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
                match path.extension() {
                    None => folders.push(path),
                    Some(kind) if kind == "cuh" => {
                        found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
                    }
                    Some(_) => {}
                }
            }
        }
        found.sort();
        assert_eq!(HEADERS.iter().map(|h| h.0).collect::<Vec<_>>(), found);
    }
}
