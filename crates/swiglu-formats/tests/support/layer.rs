//! Layers to load, and what they must be.

use std::path::PathBuf;

use swiglu_core::{Orientation, WeightLayout};
use swiglu_formats::{FormatError, LayerWeights, LoadOptions, Result, load_layer};

use super::{T, ramp, safetensors, t};

pub const K: usize = 12;
pub const H: usize = 172;

/// A model file with a config beside it, in a directory that lives as long as this.
pub struct Checkpoint {
    pub dir: tempfile::TempDir,
}

impl Checkpoint {
    pub fn new(tensors: &[T], config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), safetensors(tensors)).unwrap();
        if !config.is_empty() {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
        }
        Self { dir }
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("model.safetensors")
    }

    pub fn load(&self, o: &LoadOptions) -> Result<LayerWeights> {
        load_layer(&self.file(), o)
    }
}

pub fn model_type(name: &str) -> String {
    format!(r#"{{"model_type":"{name}","hidden_act":"silu"}}"#)
}

pub fn at(layer: usize) -> LoadOptions {
    LoadOptions::new(layer)
}

pub fn expert(layer: usize, expert: usize) -> LoadOptions {
    LoadOptions::new(layer).with_expert(expert)
}

/// Gate, up, down `[out, in]` under three names.
pub fn triple(names: [&str; 3], dtype: &'static str, k: usize, h: usize, seed: usize) -> Vec<T> {
    vec![
        t(names[0], dtype, &[h, k], seed),
        t(names[1], dtype, &[h, k], seed + 1),
        t(names[2], dtype, &[k, h], seed + 2),
    ]
}

/// The layer is what `triple` with this seed describes, whatever its layout.
pub fn expect_triple(layer: &LayerWeights, k: usize, h: usize, seed: usize) {
    assert_eq!((layer.hidden(), layer.intermediate()), (k, h));
    let gate_up = layer.gate_up::<f32>().unwrap();
    let w = gate_up.view().convert(WeightLayout::HF).unwrap();
    assert_eq!(w.tensors()[0].as_slice(), ramp(h * k, seed));
    assert_eq!(w.tensors()[1].as_slice(), ramp(h * k, seed + 1));
    let (down, orientation) = layer.down::<f32>().unwrap().unwrap();
    let want = ramp(h * k, seed + 2);
    for r in 0..k {
        for c in 0..h {
            let value = match orientation {
                Orientation::OutIn => down.view().row(r)[c],
                Orientation::InOut => down.view().row(c)[r],
            };
            assert_eq!(value, want[r * h + c]);
        }
    }
    layer.expect_finite().unwrap();
}

pub fn refused(r: Result<LayerWeights>, parts: &[&str]) -> FormatError {
    let e = r.unwrap_err();
    for part in parts {
        assert!(e.to_string().contains(part), "`{part}` in: {e}");
    }
    e
}
