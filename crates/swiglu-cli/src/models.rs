//! The feed-forward sizes of common models.

/// Names as they are given, with K and H.
pub(crate) const MODELS: [(&str, [usize; 2]); 5] = [
    ("qwen2.5-0.5b", [896, 4864]),
    ("llama-3.2-1b", [2048, 8192]),
    ("llama-3-8b", [4096, 14336]),
    ("qwen2.5-32b", [5120, 27648]),
    ("llama-3-70b", [8192, 28672]),
];

/// K and H of a model by its name, in whatever case.
pub(crate) fn named(name: &str) -> Option<[usize; 2]> {
    MODELS.into_iter().find_map(|(known, size)| known.eq_ignore_ascii_case(name).then_some(size))
}
