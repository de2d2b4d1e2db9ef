//! The shared conformance suite on every façade this machine can run, with one and two threads.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use swiglu_core::conformance::{Backend, Case, run, suite};
use swiglu_core::{
    Activation, DType, Element, GateUpRef, GatedLinearParams, MatrixMut, MatrixRef, MlpParams,
    Numerics, Path, Result, Rounding,
};
use swiglu_cpu::{Cpu, CpuOptions, GatedLinear, Isa, Mlp};

struct OnCpu {
    cpu: Cpu,
    path: Path,
}

impl Backend for OnCpu {
    fn name(&self) -> String {
        format!("{} {} x{}", self.cpu.isa(), self.path, self.cpu.threads())
    }
    fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        self.cpu.activation(act, numerics, inputs, out)
    }
    fn gated_linear<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        GatedLinear::with_path(&self.cpu, params, self.path)?.forward(x, out)
    }
    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        Mlp::with_path(&self.cpu, params, self.path)?.forward(x, out)
    }
}

fn conforms(isa: Isa, threads: usize, path: Path) {
    if !isa.is_available() {
        println!("{isa}: not run, this machine lacks it");
        return;
    }
    let cpu = Cpu::new(&CpuOptions { isa: Some(isa), threads: Some(threads) }).unwrap();
    let backend = OnCpu { cpu, path };
    let failed: Vec<String> = suite(&DType::ALL)
        .iter()
        // The unfused path has no `fused` rounding of the 16-bit types; it follows `pre_round`.
        .filter(|case| {
            path == Path::Fused
                || case.dtype == DType::F32
                || case.numerics.rounding != Rounding::Fused
        })
        .filter_map(|case: &Case| match run(&backend, case) {
            Ok(outcome) if outcome.passed() => None,
            other => Some(format!("{case}: {other:?}")),
        })
        .collect();
    assert!(
        failed.is_empty(),
        "{}: {} failed\n{}",
        backend.name(),
        failed.len(),
        failed.join("\n")
    );
}

macro_rules! facades {
    ($($name:ident: $isa:expr),*) => {
        $(mod $name {
            use super::*;
            #[test]
            fn fused_on_one_thread() {
                conforms($isa, 1, Path::Fused);
            }
            #[test]
            fn fused_on_two_threads() {
                conforms($isa, 2, Path::Fused);
            }
            #[test]
            fn unfused() {
                conforms($isa, 2, Path::Unfused);
            }
        })*
    };
}

facades!(portable: Isa::Portable, avx2: Isa::Avx2, avx512: Isa::Avx512, avx512_bf16: Isa::Avx512Bf16);
