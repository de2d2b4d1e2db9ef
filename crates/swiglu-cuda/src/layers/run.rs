//! How the steps of a call are enqueued.

use swiglu_core::{Element, Op};

use super::layer::{Asked, Layer};
use super::weights::{Products, padded};
use crate::device::error::{CudaError, Result};
use crate::device::lt::{By, LinearWeights, Lt, Product};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::{DeviceScratch, Work};
use crate::kernels::decode_mlp::{Call as DecodeCall, Decode, Design, MOST_TOKENS};
use crate::kernels::down::DownCall;
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::gated_gemm::{Call, Kernel};
use crate::layers::activation::tensor;
use crate::plan::{Algorithm, Planner, ToH, best_kernel};

/// Where a call leaves gate and up.
#[derive(Clone, Copy)]
pub(super) struct Saves {
    pub(super) at: [Tensor; 2],
    /// Whether nothing else is wanted.
    pub(super) alone: bool,
}

impl<K, T: Element> Layer<K, T> {
    pub(super) fn run(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        algorithm: Algorithm,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.expect_call(stream, &x, Some(&out))?;
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        if m == 0 || out.cols() == 0 {
            return Ok(());
        }
        if h == 0 {
            let (out, bias) = (tensor(&out.as_ref()), self.operands.down_bias());
            // SAFETY: `out` spans memory of this device and is borrowed mutably; the bias lives as
            // long as `self`.
            return unsafe { fill_rows(stream, T::DTYPE, out, [m, k], bias) };
        }
        if self.problem.quantized.is_some() {
            return self.run_passes(stream, scratch, algorithm, x, out);
        }
        let decode = algorithm.design().map(|design| self.decode_by(design, m));
        let problem = self.problem.with_m(m);
        let takes = |decode: &Decode| decode.check_x(tensor(&x), &problem).is_ok();
        let (algorithm, decode) = match decode.map(|decode| decode.filter(takes)) {
            None => (algorithm, None),
            Some(Some(decode)) => (algorithm, Some(decode)),
            Some(None) => (self.step_by_step(m), None),
        };
        let (bytes, io) = (self.bytes_by(m, algorithm), [tensor(&x), tensor(&out.as_ref())]);
        self.cuda.with_workspace(stream, scratch, bytes, |work| {
            // SAFETY: the views span memory of this device; `out` is borrowed mutably, the weights live as long as
            // `self`, and the workspace has the bytes that the algorithm uses.
            unsafe {
                match decode {
                    Some(decode) => self.decode(stream, decode, m, io, work),
                    None => self.enqueue(stream, algorithm, x, io[1], None, work),
                }
            }
        })
    }

    /// Quantised weights, a few tokens at a time.
    fn run_passes(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        algorithm: Algorithm,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let m = x.rows();
        // Others than planned are asked for by tuners: each pass by what was asked for.
        let asked = algorithm.design().filter(|_| algorithm != self.choose(m));
        let out = out.as_ref();
        self.cuda.with_workspace(stream, scratch, self.h_bytes(m), |work| {
            let mut first = 0;
            while first < m {
                let from = |t: Tensor, stride: usize| Tensor {
                    data: t.data + (first * stride * size_of::<T>()) as u64,
                    ..t
                };
                let x = from(tensor(&x), x.row_stride());
                let y = from(tensor(&out), out.row_stride());
                let (rows, decode) = self.next_pass(asked, MOST_TOKENS.min(m - first), x)?;
                // SAFETY: the views span memory of this device, `out` is borrowed mutably by the caller, the
                // weights live as long as `self`, and the workspace has room for h behind the call's own word.
                unsafe { self.decode(stream, decode, rows, [x, y], work) }?;
                first += rows;
            }
            Ok(())
        })
    }

    /// How many of the next `rows` tokens are computed together, and how. Rows that cannot be read in
    /// place must fit into shared memory, and fewer do.
    fn next_pass(&self, asked: Option<Design>, rows: usize, x: Tensor) -> Result<(usize, Decode)> {
        let problem = self.problem.with_m(rows);
        let decode = self.expect_decode(asked, rows)?;
        match decode.check_x(x, &problem) {
            Ok(()) => Ok((rows, decode)),
            Err(_) if rows > 1 => self.next_pass(asked, rows.div_ceil(2), x),
            Err(why) => {
                Err(CudaError::Unsupported { what: problem.to_string(), why: why.to_string() })
            }
        }
    }

    /// The launches for quantised weights, or why there are none.
    pub(super) fn expect_decode(&self, asked: Option<Design>, m: usize) -> Result<Decode> {
        // What speaks against the design that needs the least.
        let planned = || self.choose(m).design().unwrap_or(Design::TwoLaunches);
        let design = asked.unwrap_or_else(planned);
        if let Some(decode) = self.decode_by(design, m) {
            return Ok(decode);
        }
        let problem = self.problem.with_m(m);
        let limits = Planner::of(&self.cuda).limits();
        let fitted = Decode::check_problem(design, &problem, limits);
        fitted.map_err(|why| CudaError::Unsupported {
            what: problem.to_string(),
            why: why.to_string(),
        })
    }

    /// Refuses what does not fit together, and lets the call wait for other streams' work with its memory.
    pub(super) fn expect_call(
        &self,
        stream: &Stream,
        x: &DeviceMatrixRef<'_, T>,
        out: Option<&DeviceMatrixMut<'_, T>>,
    ) -> Result<()> {
        let shape = [x.rows(), self.out_features()];
        self.cuda.expect_stream(stream)?;
        out.map_or(Ok(()), |out| out.expect_shape("output", shape))?;
        x.admit("x", [x.rows(), self.hidden()], stream)?;
        out.map_or(Ok(()), |out| out.admit("output", shape, stream))?;
        self.operands.admit(stream)
    }

    /// # Safety
    /// y is memory of this device for the output, `work` has [`Self::bytes_by`] of the algorithm, and so are the saved
    /// matrices, which take gate and up; they overlap nothing else that is used before this work is done. Where gate and
    /// up are wanted alone y has room for h if the layer has no down projection, and is not used if it has one.
    pub(super) unsafe fn enqueue(
        &self,
        stream: &Stream,
        algorithm: Algorithm,
        x: DeviceMatrixRef<'_, T>,
        y: Tensor,
        saved: Option<Saves>,
        work: Work,
    ) -> Result<()> {
        let m = x.rows();
        let alone = saved.is_some_and(|saved| saved.alone);
        let saved = saved.map(|saved| saved.at);
        let dense = self.operands.dense()?;
        let block = self.problem.op == Op::Mlp;
        let h = if block { Tensor::new(work.ptr, self.h_stride()) } else { y };
        let behind = work.ptr + self.h_bytes(m) as u64;
        let half = padded::<T>(self.problem.intermediate);
        let (act, numerics) = (self.problem.activation, self.problem.numerics);
        let formula = Formula::new(&act);
        let product = self.product();
        // Where gate and up lie between two steps.
        let between = |stored: Stored| {
            saved.unwrap_or_else(|| {
                let up = behind + (half * stored.size(T::DTYPE)) as u64;
                [behind, up].map(|at| Tensor::new(at, 2 * half))
            })
        };
        let (to_h, down) = match algorithm {
            Algorithm::ByH(to_h, down) => (to_h, down),
            Algorithm::Decode(design) => {
                let why = "it is a whole block, and no step of one".into();
                return Err(CudaError::Unsupported { what: design.to_string(), why });
            }
        };
        match to_h {
            ToH::Gated(kernel) => {
                let (weights, maps) = (dense.gate_up.fused(), &dense.maps);
                let (code, x) = (self.code(), tensor(&x));
                let call = Call { code, formula, m, x, out: h, weights, saved, maps };
                let kernel = self.launchable(kernel, &call)?;
                // SAFETY: as the caller says; the weights live as long as `self`.
                unsafe { kernel.launch(stream, &call) }?;
            }
            ToH::Unfused(stored) => {
                let products = match saved {
                    Some(_) => Products::Each(dense.gate_up.halves()),
                    None => dense.gate_up.products(stored),
                };
                let scratch = match saved {
                    Some(_) => behind,
                    None => behind + self.between_bytes(m, stored) as u64,
                };
                let to = between(stored);
                // SAFETY: as the caller says; the workspace has room for gate and up and for cuBLASLt.
                unsafe {
                    match stored {
                        Stored::Elements => self.multiply::<T>(stream, x, &products, to, scratch),
                        Stored::Sums => self.multiply::<f32>(stream, x, &products, to, scratch),
                    }
                }?;
                if !alone {
                    let code = GateCode::elementwise(&act, numerics, T::DTYPE);
                    let cols = self.problem.intermediate;
                    let extent = Extent { rows: m, cols, code, formula };
                    let [gate, up] = between(stored);
                    let inputs = GateUp { gate, up, group: 0, stored };
                    // SAFETY: as the caller says; the stream orders the steps.
                    unsafe { elementwise::forward(stream, extent, inputs, h) }?;
                }
            }
        }
        if let Some(down) = down.filter(|_| !alone) {
            let weights = dense.down()?;
            let maps = &dense.down_maps;
            let call = DownCall { dtype: T::DTYPE, m, h, weights, y, maps };
            // SAFETY: as the caller says; the stream orders the steps.
            unsafe {
                if !down.launch(stream, &call)? {
                    let stride = self.h_stride();
                    let (at, k) = (work.ptr, self.problem.intermediate);
                    let h = DeviceMatrixRef::<T>::from_raw_trusted(&self.cuda, at, m, k, stride)?;
                    let y = DeviceMatrixMut::<T>::from_raw_trusted(
                        &self.cuda,
                        y.data,
                        m,
                        self.problem.hidden,
                        y.stride.unsigned_abs() as usize,
                    )?;
                    self.lt()?.product(stream, h, &weights, y, product, behind)?;
                }
            }
        }
        Ok(())
    }

    /// How cuBLASLt multiplies.
    pub(super) fn product(&self) -> Product {
        let by = if self.problem.numerics.batch_invariant { By::Fixed } else { By::Planned };
        Product { by, ..Product::default() }
    }

    fn lt(&self) -> Result<&Lt> {
        self.lt.as_deref().ok_or_else(|| CudaError::Unsupported {
            what: self.problem.to_string(),
            why: "without cuBLASLt there is no unfused path".into(),
        })
    }

    /// Enqueues the decode kernel for `m` tokens of x, to y.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn decode(
        &self,
        stream: &Stream,
        decode: Decode,
        m: usize,
        [x, y]: [Tensor; 2],
        work: Work,
    ) -> Result<()> {
        let call = DecodeCall {
            code: self.code(),
            formula: Formula::new(&self.problem.activation),
            m,
            x,
            h: Tensor::new(work.ptr, self.h_stride()),
            y,
            weights: self.operands.block()?,
            barrier: work.barrier,
        };
        // SAFETY: as the caller says; the workspace has room for h, beside a word of the call's own.
        unsafe { decode.launch(stream, &call) }
    }

    /// Enqueues gate and up as values of Y.
    ///
    /// # Safety
    /// `gate` and `up` have room for them, and `scratch` is what cuBLASLt uses.
    unsafe fn multiply<Y: Element>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        products: &Products,
        [gate, up]: [Tensor; 2],
        scratch: u64,
    ) -> Result<()> {
        let lt = self.lt()?;
        // SAFETY: as the caller says.
        let launch = |weights: &LinearWeights, to: Tensor| unsafe {
            let (m, features) = (x.rows(), weights.out_features);
            let to = DeviceMatrixMut::<Y>::from_raw_trusted(
                &self.cuda,
                to.data,
                m,
                features,
                to.stride.unsigned_abs() as usize,
            )?;
            lt.product(stream, x, weights, to, self.product(), scratch)
        };
        match products {
            Products::Both(both) => launch(both, gate),
            Products::Each([gate_weights, up_weights]) => {
                launch(gate_weights, gate)?;
                launch(up_weights, up)
            }
        }
    }

    /// The kernel that was planned, or the best that takes these addresses: plans know no strides.
    pub(super) fn launchable(&self, planned: Kernel, call: &Call<'_>) -> Result<Kernel> {
        let Err(why) = planned.check_call(&self.cuda, call) else { return Ok(planned) };
        let takes = |kernel: &Kernel| kernel.check_call(&self.cuda, call).is_ok();
        let problem = self.stepwise.problem(call.m);
        let other = match self.asked {
            Asked::Algorithm(algorithm) if algorithm.kernel_of_h().is_some() => None,
            _ => best_kernel(&self.stepwise.planner, &problem, takes),
        };
        other.ok_or_else(|| CudaError::Unsupported { what: planned.to_string(), why })
    }
}
