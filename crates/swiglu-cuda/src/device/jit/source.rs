//! The device files that others include, and what a file reaches through them.

use super::variant::KernelFile;

/// A header: its name in `#include "…"`, and its text.
pub(crate) type Header = (&'static str, &'static str);

macro_rules! header {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../device/", $name)))
    };
}

/// Every header of `device/`.
static HEADERS: &[Header] = &[
    header!("decode_formats.cuh"),
    header!("decode_mlp.cuh"),
    header!("decode_tiles.cuh"),
    header!("element.cuh"),
    header!("elementwise.cuh"),
    header!("gate.cuh"),
    header!("gated_gemm.cuh"),
    header!("mma_gemm.cuh"),
    header!("ptx.cuh"),
    header!("sm90_gemm.cuh"),
    header!("tiles.cuh"),
];

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
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/device");
        let files = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
        for name in files.filter_map(|name| name.into_string().ok()) {
            let listed = HEADERS.iter().any(|(n, _)| *n == name);
            assert_eq!(listed, name.ends_with(".cuh"), "{name}");
        }
    }
}
