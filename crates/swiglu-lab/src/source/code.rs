//! A source file without what no result depends on: comments, tests, and how it is spaced.

/// What a file is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Language {
    Rust,
    Cuda,
    Python,
    /// Every byte counts.
    Unknown,
}

impl Language {
    pub(super) fn of(path: &str) -> Self {
        match path.rsplit_once('.').map(|(_, end)| end) {
            Some("rs") => Language::Rust,
            Some("cu" | "cuh" | "h" | "hpp" | "cpp") => Language::Cuda,
            Some("py") => Language::Python,
            _ => Language::Unknown,
        }
    }
}

/// Whether a file has tests alone, by its name: `tests.rs`, `gate_tests.rs`.
pub(super) fn is_test(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name == "tests.rs" || name.ends_with("_tests.rs")
}

/// The code of a file. Two texts with the same are the same program, but for the lines that it names
/// when it panics. What looks like a comment in a literal stays.
pub(super) fn code_of(language: Language, text: &[u8]) -> Vec<u8> {
    match language {
        Language::Rust => joined(&without_tests(pieces(language, text))),
        Language::Cuda => joined(&pieces(language, text)),
        Language::Python => python(text),
        Language::Unknown => text.to_vec(),
    }
}

/// A part of a Rust or C++ file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece<'a> {
    /// A name or number, or one other character.
    Code(&'a [u8]),
    /// A string or a character.
    Literal(&'a [u8]),
    /// Comments and white space, within a line or to another.
    Gap { ends_line: bool },
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn pieces(language: Language, text: &[u8]) -> Vec<Piece<'_>> {
    let mut pieces = Vec::with_capacity(text.len() / 3);
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let length = match rest {
            [b'/', b'/', ..] | [b'/', b'*', ..] => {
                let length = comment(language, rest);
                gap(&mut pieces, rest[1] == b'*' && rest[..length].contains(&b'\n'));
                length
            }
            [space, ..] if space.is_ascii_whitespace() => {
                gap(&mut pieces, *space == b'\n');
                1
            }
            _ => match literal(language, rest) {
                Some(length) => {
                    pieces.push(Piece::Literal(&rest[..length]));
                    length
                }
                None => {
                    let length = word(language, rest);
                    pieces.push(Piece::Code(&rest[..length]));
                    length
                }
            },
        };
        at += length;
    }
    pieces
}

fn gap(pieces: &mut Vec<Piece<'_>>, ends: bool) {
    match pieces.last_mut() {
        Some(Piece::Gap { ends_line }) => *ends_line |= ends,
        _ => pieces.push(Piece::Gap { ends_line: ends }),
    }
}

/// The length of the comment that a text begins with.
fn comment(language: Language, text: &[u8]) -> usize {
    if text[1] == b'/' {
        let ends =
            |i: &usize| text[*i] == b'\n' && !(language == Language::Cuda && text[*i - 1] == b'\\');
        return (2..text.len()).find(ends).unwrap_or(text.len());
    }
    let (mut depth, mut at) = (1, 2);
    while depth > 0 && at < text.len() {
        at += match &text[at..] {
            [b'*', b'/', ..] => {
                depth -= 1;
                2
            }
            // Those of Rust nest.
            [b'/', b'*', ..] if language == Language::Rust => {
                depth += 1;
                2
            }
            _ => 1,
        };
    }
    at
}

/// The length of the string or character that a text begins with, with its prefix.
fn literal(language: Language, text: &[u8]) -> Option<usize> {
    match text[0] {
        b'"' => Some(quoted(text, b'"')),
        b'\'' if language == Language::Cuda => Some(quoted(text, b'\'')),
        b'\'' => {
            let first = text.get(1)?;
            if *first == b'\\' {
                return Some(quoted(text, b'\''));
            }
            // Else it is a lifetime.
            let width = if *first < 0x80 { 1 } else { first.leading_ones() as usize };
            (text.get(1 + width) == Some(&b'\'')).then_some(2 + width)
        }
        _ => raw(language, text),
    }
}

/// To the closing quote, or to the end of a text that has none.
fn quoted(text: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != quote {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// `r"…"`, `br#"…"#`; `R"x(…)x"`.
fn raw(language: Language, text: &[u8]) -> Option<usize> {
    let prefixes: &[&[u8]] = match language {
        Language::Cuda => &[b"R", b"u8R", b"uR", b"UR", b"LR"],
        _ => &[b"r", b"br", b"cr"],
    };
    let prefix = prefixes.iter().find(|prefix| {
        text.starts_with(prefix) && text.get(prefix.len()).is_some_and(|&next| !is_word(next))
    })?;
    let opening = &text[prefix.len()..];
    let (end, inside) = if language == Language::Cuda {
        let delimiter = opening.strip_prefix(b"\"")?;
        let length = delimiter.iter().position(|&b| b == b'(')?;
        ([b")", &delimiter[..length], b"\""].concat(), prefix.len() + length + 2)
    } else {
        let hashes = opening.iter().take_while(|&&b| b == b'#').count();
        // `r#name` is a name.
        opening[hashes..].strip_prefix(b"\"")?;
        ([b"\"", &opening[..hashes]].concat(), prefix.len() + hashes + 1)
    };
    let closing = text[inside..].windows(end.len()).position(|window| window == end);
    Some(closing.map_or(text.len(), |at| inside + at + end.len()))
}

/// A name, a number, or one other character.
fn word(language: Language, text: &[u8]) -> usize {
    if !is_word(text[0]) {
        return 1;
    }
    // 1'000 in C++.
    let apart = language == Language::Cuda && text[0].is_ascii_digit();
    let inside = |at: usize| {
        is_word(text[at])
            || apart && text[at] == b'\'' && text.get(at + 1).is_some_and(|&b| is_word(b))
    };
    (1..text.len()).find(|&at| !inside(at)).unwrap_or(text.len())
}

/// Without modules under `#[cfg(test)]`, whether they lie here or in a file of their own.
fn without_tests(pieces: Vec<Piece<'_>>) -> Vec<Piece<'_>> {
    let mut kept = Vec::with_capacity(pieces.len());
    let mut rest = pieces.as_slice();
    while let [first, more @ ..] = rest {
        match test_module(rest) {
            Some(length) => rest = &rest[length..],
            None => {
                kept.push(*first);
                rest = more;
            }
        }
    }
    kept
}

/// How many of the pieces are a module of tests that begins here.
fn test_module(pieces: &[Piece<'_>]) -> Option<usize> {
    let mut reader = Reader { pieces, at: 0 };
    for expected in ["#", "[", "cfg", "(", "test", ")", "]"] {
        reader.take(expected)?;
    }
    while reader.take("#").is_some() {
        reader.group("[", "]")?;
    }
    if reader.take("pub").is_some() {
        reader.group("(", ")");
    }
    reader.take("mod")?;
    reader.next()?;
    reader.take(";").or_else(|| reader.group("{", "}"))?;
    Some(reader.at)
}

struct Reader<'p, 'a> {
    pieces: &'p [Piece<'a>],
    at: usize,
}

impl<'a> Reader<'_, 'a> {
    fn next(&mut self) -> Option<Piece<'a>> {
        let gap = matches!(self.pieces.get(self.at), Some(Piece::Gap { .. }));
        let at = self.at + usize::from(gap);
        let next = *self.pieces.get(at)?;
        self.at = at + 1;
        Some(next)
    }

    fn take(&mut self, expected: &str) -> Option<()> {
        let before = self.at;
        if self.next() == Some(Piece::Code(expected.as_bytes())) {
            return Some(());
        }
        self.at = before;
        None
    }

    /// From an opening bracket to the one that closes it.
    fn group(&mut self, open: &str, close: &str) -> Option<()> {
        self.take(open)?;
        let mut depth = 1;
        while depth > 0 {
            match self.next()? {
                Piece::Code(code) if code == open.as_bytes() => depth += 1,
                Piece::Code(code) if code == close.as_bytes() => depth -= 1,
                _ => {}
            }
        }
        Some(())
    }
}

/// The text again: of white space one character where it parts lines, or two pieces that no bracket parts.
fn joined(pieces: &[Piece<'_>]) -> Vec<u8> {
    let mut code: Vec<u8> = Vec::new();
    let mut pending = None;
    for piece in pieces {
        let text = match *piece {
            Piece::Gap { ends_line } => {
                let earlier = pending.unwrap_or(false);
                pending = Some(ends_line || earlier);
                continue;
            }
            Piece::Code(text) | Piece::Literal(text) => text,
        };
        if let (Some(ends_line), Some(&last)) = (pending.take(), code.last()) {
            // A macro's parameters follow its name at once.
            let parted = b"([]{},;".contains(&last) || b")[]{},;".contains(&text[0]);
            if ends_line {
                code.push(b'\n');
            } else if !parted {
                code.push(b' ');
            }
        }
        code.extend_from_slice(text);
    }
    code
}

/// Without comments, empty lines and what ends a line; indentation is syntax.
fn python(text: &[u8]) -> Vec<u8> {
    let mut code: Vec<u8> = Vec::with_capacity(text.len());
    // White space that counts only if something follows in its line.
    let mut pending = 0..0;
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            b'#' => {
                let length = text[at..].iter().position(|&b| b == b'\n');
                at = length.map_or(text.len(), |length| at + length);
                pending = at..at;
                continue;
            }
            b'\n' => {
                if code.last().is_some_and(|&last| last != b'\n') {
                    code.push(b'\n');
                }
                at += 1;
                pending = at..at;
                continue;
            }
            b' ' | b'\t' | b'\r' => {
                at += 1;
                pending.end = at;
                continue;
            }
            _ => {}
        }
        let length = match text[at] {
            quote @ (b'"' | b'\'') => python_string(&text[at..], quote),
            // What follows a backslash is no quote.
            b'\\' => 2.min(text.len() - at),
            _ => 1,
        };
        code.extend_from_slice(&text[pending]);
        code.extend_from_slice(&text[at..at + length]);
        at += length;
        pending = at..at;
    }
    code.truncate(code.trim_ascii_end().len());
    code
}

/// The length of the string that a text begins with; a backslash keeps a quote in it, in raw ones too.
fn python_string(text: &[u8], quote: u8) -> usize {
    let long = [quote; 3];
    if !text.starts_with(&long) {
        return quoted(text, quote);
    }
    let mut at = 3;
    while at < text.len() && !text[at..].starts_with(&long) {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    (at + 3).min(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(language: Language, text: &str) -> String {
        String::from_utf8(code_of(language, text.as_bytes())).unwrap()
    }

    #[track_caller]
    fn same(language: Language, a: &str, b: &str) {
        assert_eq!(code(language, a), code(language, b));
    }

    #[track_caller]
    fn other(language: Language, a: &str, b: &str) {
        assert_ne!(code(language, a), code(language, b));
    }

    #[test]
    fn comments_and_spacing_are_no_code() {
        for language in [Language::Rust, Language::Cuda] {
            same(language, "a // one\nb", "// two\na\n\n   b  \n/* three\n four */");
            same(language, "f(/* n */ 3)", "f(3)");
            same(language, "int/* */x", "int x");
            other(language, "int x", "intx");
            other(language, "a - -b", "a --b");
            other(language, "a / b", "a");
            other(language, "#define A (b)", "#define A(b)");
            same(language, "a / *b // c", "a / *b");
        }
        same(Language::Rust, "/// Of x.\n//! Of all.\nfn f() {}", "fn f() {}");
        same(Language::Rust, "a /* one /* two */ three */ b", "a b");
        // In C++ comments do not nest, and go on behind a backslash.
        same(Language::Cuda, "a /* one /* two */ b", "a b");
        same(Language::Cuda, "a // one \\\n two\nb", "a\nb");
        other(Language::Cuda, "#define A \\\n b", "#define A\n b");
    }

    #[test]
    fn what_looks_like_a_comment_in_a_literal_is_code() {
        let rust = [
            r#"f("// x")"#,
            r#"f("\"// x")"#,
            r#"f("\\", "// x")"#,
            r##"f(r"\", "// x")"##,
            r###"f(r#"" // x"#)"###,
            r###"f(br##"/*"# // x"##)"###,
            r##"f('"', "// x")"##,
            r##"f('\'', "// x")"##,
            r##"f(b'"', "// x")"##,
            r##"f('“', "// x", '"')"##,
            r##"f::<'a>("// x", "'")"##,
            r###"for r#"//"# in r#fn "// x""###,
        ];
        for text in rust {
            let changed = text.replace('x', "y");
            other(Language::Rust, text, &changed);
            same(Language::Rust, text, &format!("{text} // x"));
            same(Language::Rust, text, &format!("{text} /* x */"));
        }
        // A lifetime begins no literal.
        same(Language::Rust, "fn f<'a>(x: &'a str) {} // 'x'", "fn f<'a>(x: &'a str) {}");
        other(Language::Rust, "f(\"a  b\")", "f(\"a b\")");
        let cuda = [
            r#"f("// x")"#,
            r#"f('"', "// x")"#,
            r#"f('\'', "// x")"#,
            r#"f(1'000, "// x", 1'0)"#,
            r#"f(R"(" // x)")"#,
            r#"f(u8R"k()" // x)k")"#,
            "f(L'\"', \"// x\")",
        ];
        for text in cuda {
            other(Language::Cuda, text, &text.replace('x', "y"));
            same(Language::Cuda, text, &format!("{text} // x"));
        }
        // What is cut off ends with its file.
        for text in ["\"a", "'\\", "r#\"a", "/* a", "#[cfg(test)] mod tests {", "a // b"] {
            code(Language::Rust, text);
            code(Language::Cuda, &text.replace("r#\"", "R\"(("));
            code(Language::Python, text);
        }
    }

    #[test]
    fn modules_of_tests_are_no_code() {
        let with =
            |tests: &str| code(Language::Rust, &format!("fn f() {{}}\n{tests}\nfn g() {{}}"));
        let without = with("");
        for tests in [
            "#[cfg(test)]\nmod tests;",
            "#[cfg(test)]\n#[path = \"a_tests.rs\"]\npub(crate) mod tests;",
            "#[cfg(test)]\nmod tests { fn a() { \"}\"; '}'; } /* } */ mod b { } }",
            "#[cfg(test)] // why\n#[allow(x[0])]\npub mod tests { }",
        ] {
            assert_eq!(with(tests), without, "{tests}");
        }
        // What is tested, and what only looks like tests.
        for code in [
            "mod tests;",
            "#[cfg(feature = \"x\")] mod tests;",
            "#[cfg(not(test))] mod a { }",
            "#[cfg(test)] fn a() { }",
            "#[cfg(test)] fn a() { } mod b { }",
        ] {
            assert_ne!(with(code), without, "{code}");
        }
        assert!(is_test("a/tests.rs") && is_test("a/gate_tests.rs") && !is_test("a/tests/b.rs"));
        assert!(!is_test("a/contests.rs") && !is_test("latests.rs"));
    }

    #[test]
    fn python_keeps_its_indentation() {
        let python = Language::Python;
        same(python, "a = 1  # one\n\n\n# two\n    # three\nb = 2\n", "# four\na = 1\nb = 2");
        other(python, "if a:\n    b\nc", "if a:\n    b\n    c");
        same(python, "if a:  # one\n    b # two\n", "if a:\n    b\n");
        for text in [
            "f('# x')",
            "f(\"# x\")",
            "f('\\'# x')",
            "f(r'\\\\', '# x')",
            "f('''\n' # x''')",
            "f(\"\"\"\\\"\"\" # x\n\"\"\")",
            "f(b'\"', '# x')",
            "f('', '# x')",
        ] {
            other(python, text, &text.replace('x', "y"));
            same(python, text, &format!("{text} # x"));
        }
        other(python, "f('''a\n\nb''')", "f('''a\nb''')");
    }

    #[test]
    fn of_other_files_every_byte_counts() {
        other(Language::of("a/b.json"), "1 // a", "1");
        assert_eq!(Language::of("a.b/c.cuh"), Language::Cuda);
    }
}
