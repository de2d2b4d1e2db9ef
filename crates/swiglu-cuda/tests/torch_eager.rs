//! `eager` with the precise exponential gives PyTorch eager's own bits, forward and backward: on
//! every 16-bit gate, on special values and on random ones. The reference is written on a GPU by
//! `scripts/torch_eager.py`, to the directory that SWIGLU_TORCH_EAGER names.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use crate::common;

use std::path::{Path, PathBuf};

use serde_json::Value;
use swiglu_core::{Activation, DType, Element, Matrix, Numerics, Rounding, bf16, f16};
use swiglu_cuda::{Cuda, DeviceGateUp, DeviceGateUpMut, DeviceMatrix};

struct Case<'a> {
    directory: &'a Path,
    facts: &'a Value,
    rows: usize,
    cols: usize,
}

impl Case<'_> {
    fn read<T: Element>(&self, tensor: &str) -> Matrix<T> {
        let file = self.directory.join(self.facts[tensor].as_str().unwrap());
        let bytes = std::fs::read(&file).unwrap();
        let element = |b: &[u8]| match T::DTYPE {
            DType::F32 => f32::from_le_bytes(b.try_into().unwrap()),
            DType::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
            _ => bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
        };
        let values = bytes.chunks_exact(size_of::<T>()).map(|b| T::from_f32(element(b)));
        Matrix::from_vec(values.collect(), self.rows, self.cols).unwrap()
    }

    /// Elements that differ in their bits; all NaNs are equal.
    fn differences<T: Element>(&self, tensor: &str, ours: &Matrix<T>, gate: &Matrix<T>) -> String {
        let theirs = self.read::<T>(tensor);
        let same = |a: T, b: T| {
            let (a, b) = (a.to_f32(), b.to_f32());
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
        };
        let pairs = ours.as_slice().iter().zip(theirs.as_slice()).zip(gate.as_slice());
        let differing: Vec<_> = pairs.filter(|((a, b), _)| !same(**a, **b)).collect();
        let Some(((a, b), gate)) = differing.first() else { return String::new() };
        format!(
            "{} {} {tensor}: {} of {} differ, first at gate {:e}: ours {:e}, theirs {:e}\n",
            self.facts["activation"],
            T::DTYPE,
            differing.len(),
            ours.as_slice().len(),
            gate.to_f32(),
            a.to_f32(),
            b.to_f32(),
        )
    }

    fn compare<T: Element>(&self, cuda: &Cuda) -> String {
        let act: Activation = self.facts["activation"].as_str().unwrap().parse().unwrap();
        let eager = Numerics::precise(Rounding::Eager);
        let stream = cuda.stream();
        let gate = self.read::<T>("gate");
        let upload = |host: &Matrix<T>| DeviceMatrix::from_host(&stream, host.view()).unwrap();
        let (g, u) = (upload(&gate), upload(&self.read("up")));
        let dh = upload(&self.read("grad"));
        let empty = || DeviceMatrix::<T>::zeros(&stream, self.rows, self.cols).unwrap();
        let (mut h, mut dg, mut du) = (empty(), empty(), empty());
        let inputs = DeviceGateUp::separate(g.view(), u.view()).unwrap();
        cuda.activation(&stream, &act, eager, inputs, h.view_mut()).unwrap();
        let grads = DeviceGateUpMut::separate(dg.view_mut(), du.view_mut()).unwrap();
        cuda.activation_backward(&stream, &act, eager, dh.view(), inputs, grads).unwrap();
        [("h", h), ("gate_grad", dg), ("up_grad", du)]
            .map(|(tensor, ours)| self.differences(tensor, &ours.to_host().unwrap(), &gate))
            .concat()
    }
}

#[test]
fn eager_has_the_bits_of_pytorch() {
    let Some(directory) = std::env::var_os("SWIGLU_TORCH_EAGER").map(PathBuf::from) else {
        swiglu_testing::not_run("SWIGLU_TORCH_EAGER names no directory of scripts/torch_eager.py");
        return;
    };
    if !common::has_gpu() {
        swiglu_testing::not_run("the simulator has the host's exp, tanh and erf, not the GPU's");
        return;
    }
    let cuda = common::device().unwrap();
    let text = std::fs::read_to_string(directory.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let cases = manifest["cases"].as_array().unwrap();
    assert!(!cases.is_empty(), "the manifest lists no cases");
    let mut differences = String::new();
    for facts in cases {
        let extent = |i: usize| usize::try_from(facts["shape"][i].as_u64().unwrap()).unwrap();
        let case = Case { directory: &directory, facts, rows: extent(0), cols: extent(1) };
        differences += &match facts["dtype"].as_str().unwrap() {
            "f32" => case.compare::<f32>(&cuda),
            "f16" => case.compare::<f16>(&cuda),
            _ => case.compare::<bf16>(&cuda),
        };
    }
    println!("{} cases of torch {}", cases.len(), manifest["torch"]);
    assert!(differences.is_empty(), "{differences}");
}
