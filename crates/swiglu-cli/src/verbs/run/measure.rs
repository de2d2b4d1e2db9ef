//! One element type: compute, verify, time.

use std::path::Path as FilePath;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use swiglu::{
    ActivationSource, CoreError, DType, Device, Element, Matrix, MatrixRef, MlpWeights, Pass, Path,
    Plan, Problem, SavePolicy,
};
use swiglu_core::bounds::{Judgement, Lost, relative_frobenius};
use swiglu_cuda::CudaError;

use super::backward::{self, out_grad};
use super::report::{ErrorReport, Report, Shape};
use super::{MIN_TURNS, RunArgs, Subject};
use crate::layer::{Packed, Params, out_features};
use crate::step::{OnDevice, Step};
use crate::timing::{self, Enqueue, Passes, Timed, interleave, wall};
use crate::verify::{Check, gather_rows};
use crate::weights::decoded;

/// The quantised weights of the file where the layer holds these; where it holds decoded ones, why.
type Storage<'w, T> = Result<Params<'w, T>, Option<String>>;

pub(super) struct Measurement<'a> {
    pub(super) args: &'a RunArgs,
    pub(super) subject: &'a Subject,
    pub(super) device: &'a Device,
    /// The oracle's result for what is stored, of the rows that are compared with a file; made when needed.
    pub(super) exact: Option<Matrix<f64>>,
}

impl Measurement<'_> {
    pub(super) fn report<T: Element>(&mut self, output: Option<&FilePath>) -> Result<Report> {
        let Self { args, subject, device, .. } = *self;
        let weights = args.math.layer(subject.weights.clone(), T::DTYPE);
        self.expect_decoding_to_matter::<T>(&weights)?;
        let mut weights = decoded(args.decode_weights, weights, args.op)?;
        if args.backward {
            weights = weights.decoded();
        }
        let host = weights.host::<T>()?;
        let params = Params::elements(&host, args.op)?;
        let x = subject.input.matrix.to::<T>()?;
        if !args.allow_non_finite {
            params.expect_finite().map_err(|e| rounded_away(e, T::DTYPE))?;
            x.view().expect_finite("input").map_err(|e| rounded_away(e, T::DTYPE))?;
        }
        let storage = self.storage::<T>(&weights, x.rows())?;
        let stored = storage.as_ref().unwrap_or(&params);
        let keep = args.backward.then(|| args.keep.unwrap_or_default());
        let layer = stored.pack(device, None, keep)?;
        let unfused = params.pack(device, Some(Path::Unfused), keep)?;
        let (plan, y, check) = self.compute(stored, &layer, x.view())?;
        // Half precision has a wider type beside it, the others have not.
        if T::DTYPE == DType::F16 && !args.allow_non_finite {
            check.expect_representable::<T>()?;
        }
        let mut error = self.judge(&check, &y)?;
        // What speed is compared with computes the same: a fast wrong result makes a meaningless ratio.
        let (_, other, its_check) = self.compute(&params, &unfused, x.view())?;
        if let Some(why) = its_check.exceeded(&its_check.judge(other.view())?) {
            error.fail(format!("the unfused way, which time is compared with: {why}"));
        }
        if let Some(path) = output {
            swiglu_formats::npy::write(path, y.view(), args.force)?;
        }
        let problem = plan.problem;
        let dy = keep.map(|_| out_grad::<T>(args, &problem)).transpose()?;
        let backward = keep.zip(dy.as_ref().map(Matrix::view));
        let timed = |layer| timed(device, &params, layer, x.view(), backward);
        let budget = Duration::from_secs_f64(args.seconds);
        let times = interleave(&mut [timed(&layer)?, timed(&unfused)?], budget, MIN_TURNS)?;
        let (time, unfused_time) = (times[0], times[1]);
        let verified = |(policy, dy)| {
            backward::verify(device, &params, [&layer, &unfused], policy, [x.view(), dy])
        };
        let training = backward.map(verified).transpose()?;
        if training.as_ref().is_some_and(|training| !training.passed()) {
            error.fail("a gradient is wrong".into());
        }
        let Problem { m, hidden, intermediate, .. } = problem;
        // A step is a forward pass, and a backward pass of twice the products.
        let (passes, bytes) = match &training {
            Some(_) => {
                let of = |pass| problem.with_pass(pass).compulsory_bytes();
                (3.0, of(Pass::Saving) + of(Pass::Backward))
            }
            None => (1.0, problem.compulsory_bytes()),
        };
        let mut decoded_because = storage.err().flatten();
        if let (Some(why), true, false) = (&mut decoded_because, args.backward, args.decode_weights)
        {
            *why = "quantised weights have no gradients".into();
        }
        Ok(Report {
            device: device.name(),
            plan: plan.to_string(),
            op: problem.op,
            dtype: T::DTYPE,
            numerics: problem.numerics.to_string(),
            activation: problem.activation,
            activation_source: weights.activation_source().map(ToString::to_string),
            activation_assumed: weights.activation_source() == Some(&ActivationSource::Assumed),
            row_steps: problem.rows,
            shape: Shape { m, hidden, intermediate },
            layer: subject.title.clone(),
            input: subject.input.source.clone(),
            weights: problem.quantized.map_or(T::DTYPE.to_string(), |types| types.to_string()),
            decoded_because,
            time_us: time,
            unfused_time_us: unfused_time,
            speedup: unfused_time.median / time.median,
            gflops: time.giga_per_second(passes * problem.flops()),
            gbytes_per_s: time.giga_per_second(bytes),
            passed: error.passed,
            error,
            extent: check.extent(),
            training,
        })
    }

    /// Refuses `--decode-weights` for an embedded layer and the input that came with it where that changes nothing.
    fn expect_decoding_to_matter<T: Element>(&self, weights: &MlpWeights) -> Result<()> {
        let RunArgs { decode_weights, input, weights: file, .. } = self.args;
        if !decode_weights || input.is_some() || file.weights.is_some() {
            return Ok(());
        }
        let [tokens, _] = self.subject.input.matrix.shape();
        match self.storage::<T>(weights, tokens)? {
            Err(Some(why)) => {
                bail!("--decode-weights: {why}: they are decoded without it; leave it out")
            }
            _ => Ok(()),
        }
    }

    /// The result of a layer, and what it is to be, by the roundings of its plan.
    fn compute<T: Element>(
        &self,
        params: &Params<'_, T>,
        layer: &Packed,
        x: MatrixRef<'_, T>,
    ) -> Result<(Plan, Matrix<T>, Check)> {
        let plan = layer.plan(x.rows());
        let mut y = Matrix::zeros(x.rows(), out_features(&plan.problem))?;
        layer.forward_into(x, y.view_mut())?;
        let check = Check::of(self.device, &params.with_numerics(plan.problem.numerics), x)?;
        Ok((plan, y, check))
    }

    /// How a layer for this many tokens holds the weights.
    fn storage<'w, T: Element>(&self, weights: &'w MlpWeights, m: usize) -> Result<Storage<'w, T>> {
        let blocks = match Params::quantized_in(weights, self.args.op, self.device)? {
            Ok(blocks) => blocks,
            Err(why) if self.args.keep_blocks => match why {
                Some(why) => return Err(anyhow::Error::new(why).context("--keep-blocks")),
                None => bail!("--keep-blocks: the weights are not quantised; leave it out"),
            },
            Err(why) => return Ok(Err(why.map(|why| why.to_string()))),
        };
        let (dtype, types) = (weights.resolved_dtype(), blocks.problem(1).quantized);
        let Some(kind) = types.map(|types| types.gate_up) else { return Ok(Ok(blocks)) };
        let most = self.device.quantized_tokens(dtype, kind);
        // The choice itself must not follow the number of tokens where the bits must not.
        let keep = self.args.keep_blocks || weights.resolved_numerics().batch_invariant;
        if m > most && !keep {
            let why = format!("{m} tokens of {dtype}; as {kind} they are meant for up to {most}");
            return Ok(Err(Some(why + " (--keep-blocks keeps them)")));
        }
        Ok(Ok(blocks))
    }

    /// Each element against the oracle on the values the kernel was given, which are rounded to
    /// `T`; and, where there is a reference file, the whole against that.
    fn judge<T: Element>(&mut self, check: &Check, y: &Matrix<T>) -> Result<ErrorReport> {
        let judgement = check.judge(y.view())?;
        let overflow = match (judgement.overflow, judgement.lost) {
            (Some(overflow), _) => Some(overflow.to_string()),
            (None, Some(lost)) => Some(lost.to_string() + &remedy(&lost)),
            (None, None) => None,
        };
        let mut report = ErrorReport {
            relative_frobenius: judgement.relative_frobenius,
            max_abs: judgement.max_abs,
            reference: "oracle",
            limit: judgement.frobenius_limit,
            worst_element: judgement.worst_ratio,
            rows_checked: check.rows.len(),
            unlike: None,
            exceeded: check.exceeded(&judgement).filter(|_| overflow.is_none()),
            // Nobody can use what is not finite where the exact result is, whatever a bound admits.
            passed: judgement.passed() && overflow.is_none(),
            overflow,
        };
        let Some(reference) = &self.subject.reference else { return Ok(report) };
        let expected = gather_rows(reference.matrix.to_f64()?.view(), &check.rows)?;
        let part = gather_rows(y.view(), &check.rows)?;
        let relative = relative_frobenius(part.view(), expected.view());
        // A reference that is not float64 was itself computed in its element type: about one rounding
        // off, two at most in the modes that are in use.
        let dtype: Option<DType> = reference.matrix.dtype_name().parse().ok();
        let roundoff = dtype.map_or(0.0, |dtype| 2.0 * dtype.unit_roundoff());
        let limit = self.file_limit(check, &judgement)? + roundoff;
        let pairs = part.as_slice().iter().zip(expected.as_slice());
        let errors = pairs.map(|(a, b)| (a.to_f64() - b).abs());
        (report.reference, report.relative_frobenius, report.limit) = ("file", relative, limit);
        report.max_abs = errors.filter(|e| e.is_finite()).fold(0.0, f64::max);
        report.unlike = unlike(&check.rows, &part, &expected);
        report.passed &= report.unlike.is_none();
        if report.unlike.is_none() && (relative.is_nan() || relative > limit) {
            let file = &reference.source;
            report.fail(format!("relative error {relative:.2e} against {file}, limit {limit:.2e}"));
        }
        Ok(report)
    }

    /// What the error against a file may be: the kernel's own, against the oracle on rounded
    /// values, and what that rounding of weights and inputs alone changes. The second is
    /// measured between two oracles, without the file: a wrong file cannot widen its own limit.
    fn file_limit(&mut self, check: &Check, judgement: &Judgement) -> Result<f64> {
        if self.exact.is_none() {
            let weights = self.args.math.layer(self.subject.weights.clone(), DType::F32);
            let host = weights.host::<f32>()?;
            let x = gather_rows(self.subject.input.matrix.to::<f32>()?.view(), &check.rows)?;
            let params = Params::elements(&host, self.args.op)?;
            self.exact = Some(params.reference(x.view(), 0.0)?.value);
        }
        let Some(exact) = &self.exact else { return Ok(judgement.frobenius_limit) };
        Ok(judgement.frobenius_limit + relative_difference(check.reference.value.view(), exact))
    }
}

/// Calls of a layer, or steps back from a gradient, over their own data: on a device from beyond its cache.
fn timed<'a, T: Element>(
    device: &Device,
    params: &Params<'_, T>,
    layer: &'a Packed,
    x: MatrixRef<'a, T>,
    backward: Option<(SavePolicy, MatrixRef<'a, T>)>,
) -> Result<Timed<'a>> {
    let (m, problem, down) = (x.rows(), params.problem(x.rows()), params.down_orientation());
    let out = out_features(&problem);
    let Device::Cuda(cuda) = device else {
        let (mut step, dy) = match backward {
            Some((_, dy)) => (Step::new(&problem, down)?, dy),
            None => (Step::forward(m, out)?, x),
        };
        let mut call = move || Ok(step.run(layer, x, dy).map(drop)?);
        return Ok(Box::new(move |budget_us| wall(&mut call, budget_us)));
    };
    let stream = cuda.stream();
    let bytes = match backward {
        Some(_) => problem.with_pass(Pass::Backward).compulsory_bytes() as usize,
        None => m * (x.cols() + out) * size_of::<T>(),
    };
    let copy = |_| match backward {
        Some((policy, dy)) => OnDevice::step(&stream, &problem, down, policy, &[x, dy]),
        None => OnDevice::new(&stream, &[x], [[m, out]]),
    };
    let copies = (0..timing::copies(cuda, bytes)).map(copy);
    let mut copies = copies.collect::<Result<Vec<_>, CudaError>>()?;
    let count = copies.len();
    let enqueue: Enqueue<'_> = Box::new(move |stream, at| Ok(copies[at].enqueue(stream, layer)?));
    Ok(Passes::new(stream.clone(), count, false, enqueue)?.timed())
}

/// What brings a lost result back: a wider type, or h smaller by a power of two.
fn remedy(lost: &Lost) -> String {
    let Some((name, largest)) = lost.intermediate.filter(|_| lost.dtype == DType::F16) else {
        return String::new();
    };
    let powers = (largest / lost.dtype.max_finite()).log2().ceil() + 1.0;
    let keeps = format!(", --rescale {powers} keeps {}", lost.dtype);
    format!("; --dtype bf16 or --dtype f32 holds it{}", if name == "h" { &keeps } else { "" })
}

/// What was stored is finite, as opening it has shown: an infinity comes from rounding to a type.
fn rounded_away(error: CoreError, dtype: DType) -> anyhow::Error {
    let max = dtype.max_finite();
    let wider = DType::ALL.into_iter().filter(|other| other.max_finite() > max);
    let wider: Vec<String> = wider.map(|other| format!("--dtype {other}, ")).collect();
    let largest = if max < 1e6 { max.to_string() } else { format!("{max:.3e}") };
    match error {
        CoreError::NonFinite { what, row, col, value } if value.is_infinite() => anyhow!(
            "{what}[{row}, {col}] becomes {value} in {dtype}, whose largest number is {largest}: \
             expected smaller numbers, {}or --allow-non-finite",
            wider.concat()
        ),
        error => error.into(),
    }
}

/// The first element that is not finite where one is expected, or the reverse: an error without a size.
fn unlike<T: Element>(rows: &[usize], part: &Matrix<T>, expected: &Matrix<f64>) -> Option<String> {
    let pairs = part.as_slice().iter().map(|v| v.to_f64()).zip(expected.as_slice().iter().copied());
    let like =
        |a: f64, b: f64| a == b || (a.is_finite() && b.is_finite()) || (a.is_nan() && b.is_nan());
    let (i, (computed, expected)) = pairs.enumerate().find(|&(_, (a, b))| !like(a, b))?;
    let columns = part.cols().max(1);
    let at = (rows[i / columns], i % columns);
    Some(format!("element {at:?} is {computed}, expected {expected}"))
}

/// ‖a − b‖ / ‖b‖ of the elements that are finite in both.
fn relative_difference(a: MatrixRef<'_, f64>, b: &Matrix<f64>) -> f64 {
    let finite = |(a, b): &(&f64, &f64)| a.is_finite() && b.is_finite();
    let pairs = a.as_slice().iter().zip(b.as_slice()).filter(finite);
    let (difference, norm) = pairs.fold((0.0, 0.0), |(difference, norm), (a, b)| {
        (difference + (a - b).powi(2), norm + b * b)
    });
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}
