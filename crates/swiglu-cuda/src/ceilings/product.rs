//! A matrix product through cuBLASLt by itself.

use std::sync::{Arc, OnceLock};

use swiglu_core::{Element, Matrix, Orientation, random};

use crate::device::error::{CudaError, Result};
use crate::device::lt::{By, Gemm, GemmAlgorithm, LinearWeights, Lt, Product as Form};
use crate::device::memory::DeviceMatrix;
use crate::device::stream::Stream;

/// Random values that fill a matrix by repetition: enough that no two tiles of a product are alike,
/// so that the device draws the power of real work.
const RANDOM_VALUES: usize = (1 << 16) - 1;
/// Of what is computed so many rows are looked at, from the first to the last, and in each every so manieth column.
const ROWS_CHECKED: usize = 3;
const COLUMNS_APART: usize = 61;
/// Of sums and products in f32.
const UNIT_ROUNDOFF: f64 = 1.0 / (1 << 24) as f64;

/// A product `[m, k]·[k, n]` of dense matrices through cuBLASLt, by what it proposes first, to be timed: x as it is or,
/// `transposed`, with its rows summed over, and weights of an orientation, to `Y`, which is `T` or f32. The products of a layer
/// and of its backward pass are of these forms.
#[derive(Debug)]
pub struct Product<T, Y> {
    lt: Arc<Lt>,
    values: Arc<[T]>,
    x: DeviceMatrix<T>,
    weights: DeviceMatrix<T>,
    y: DeviceMatrix<Y>,
    orientation: Orientation,
    form: Form,
}

fn normals() -> &'static [f32] {
    static NORMALS: OnceLock<Vec<f32>> = OnceLock::new();
    NORMALS.get_or_init(|| (0..RANDOM_VALUES).map(|i| random::normal(0, i as u64)).collect())
}

impl<T: Element, Y: Element> Product<T, Y> {
    /// Of random values.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::LibraryMissing`] without cuBLASLt, or what the driver reports.
    pub fn new(
        stream: &Stream,
        [m, k, n]: [usize; 3],
        transposed: bool,
        orientation: Orientation,
    ) -> Result<Self> {
        let values: Arc<[T]> = normals().iter().map(|&value| T::from_f32(value)).collect();
        let matrix = |[rows, cols]: [usize; 2]| {
            // First the device's: what has no room there is not made here.
            let mut matrix = DeviceMatrix::<T>::new(stream, rows, cols)?;
            let mut there = Matrix::<T>::zeros(rows, cols)?.into_vec();
            let all = there.iter_mut().zip(values.iter().cycle());
            all.for_each(|(there, value)| *there = *value);
            matrix.buffer_mut().upload(&there)?;
            Ok::<_, CudaError>(matrix)
        };
        Ok(Self {
            lt: stream.cuda().lt()?,
            x: matrix(if transposed { [k, m] } else { [m, k] })?,
            weights: matrix(orientation.shape(n, k))?,
            y: DeviceMatrix::new(stream, m, n)?,
            values,
            orientation,
            form: Form { transposed, by: By::Proposal(0), ..Form::default() },
        })
    }

    /// As it is measured: gradients that are added to begin with zeros.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(stream: &Stream, gemm: &Gemm) -> Result<Self> {
        let Gemm { m, k, n, transposed, weights, accumulate, .. } = *gemm;
        let mut product = Self::new(stream, [m, k, n], transposed, weights)?;
        product.form.accumulate = accumulate;
        product.y.buffer_mut().poison(0)?;
        Ok(product)
    }

    /// What cuBLASLt proposes for it, in its order.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if that is nothing, or if it does not say what identifies its algorithms; what it reports.
    pub fn proposals(&mut self) -> Result<Vec<GemmAlgorithm>> {
        let (x, weights) = (self.x.view(), self.linear());
        self.lt.proposed(&x, &weights, &self.y.view_mut(), self.form)
    }

    /// Enqueues it.
    ///
    /// # Errors
    /// What cuBLASLt reports.
    pub fn enqueue(&mut self, stream: &Stream) -> Result<()> {
        self.enqueue_by(stream, 0)
    }

    /// Enqueues it by the algorithm with this number of those that cuBLASLt proposes.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if it proposes fewer; what cuBLASLt reports.
    pub fn enqueue_by(&mut self, stream: &Stream, proposal: u8) -> Result<()> {
        let (cuda, weights) = (stream.cuda(), self.linear());
        let form = Form { by: By::Proposal(proposal), ..self.form };
        self.weights.view().admit("weights", self.weights.shape(), stream)?;
        self.x.view().admit("x", self.x.shape(), stream)?;
        let shape = self.y.shape();
        self.y.view_mut().admit("y", shape, stream)?;
        cuda.with_workspace(stream, None, Lt::scratch_bytes(cuda.arch()), |work| {
            let (x, y) = (self.x.view(), self.y.view_mut());
            // SAFETY: the matrices are freed behind the work that was admitted; the scratch memory is the stream's own.
            unsafe { self.lt.product(stream, x, &weights, y, form, work.ptr) }
        })
    }

    fn linear(&self) -> LinearWeights {
        let (k, n) = match self.orientation {
            Orientation::OutIn => (self.weights.cols(), self.weights.rows()),
            Orientation::InOut => (self.weights.rows(), self.weights.cols()),
        };
        LinearWeights {
            ptr: self.weights.buffer().device_ptr(),
            orientation: self.orientation,
            in_features: k,
            out_features: n,
            row_stride: self.weights.cols(),
            bias: None,
        }
    }

    /// Computes it by one of the proposals into memory that held NaN, or zeros where it is added to, and compares elements of
    /// the first row, one in the middle and the last with float64: what is wrong, if anything is. It waits for the device.
    ///
    /// # Errors
    /// As [`Self::enqueue_by`].
    pub fn check(&mut self, stream: &Stream, proposal: u8) -> Result<Option<String>> {
        self.y.buffer_mut().poison(if self.form.accumulate { 0 } else { 0xFF })?;
        self.enqueue_by(stream, proposal)?;
        let [m, n] = self.y.shape();
        let Some(last) = m.checked_sub(1) else { return Ok(None) };
        for row in (0..ROWS_CHECKED).map(|i| last * i / (ROWS_CHECKED - 1)) {
            let given = self.y.view().rows_range(row..row + 1)?.to_host(stream)?;
            let given = given.as_slice();
            if let Some(column) = given.iter().position(|y| !y.to_f64().is_finite()) {
                return Ok(Some(format!(
                    "element ({row}, {column}) is {}",
                    given[column].to_f64()
                )));
            }
            for column in (0..n).filter(|c| (row + c) % COLUMNS_APART == 0) {
                let (exact, bound) = self.exact([row, column]);
                let y = given[column].to_f64();
                if (y - exact).abs() > bound {
                    let what =
                        format!("element ({row}, {column}) is {y}, expected {exact} ± {bound}");
                    return Ok(Some(what));
                }
            }
        }
        Ok(None)
    }

    /// An element of y in float64, and by how much a sum in f32 of any order that is rounded to `Y` may be off.
    fn exact(&self, [row, column]: [usize; 2]) -> (f64, f64) {
        let value = |cols: usize, [row, col]: [usize; 2]| {
            self.values[(row * cols + col) % self.values.len()].to_f64()
        };
        let term = |l: usize| {
            let x = if self.form.transposed { [l, row] } else { [row, l] };
            let w = match self.orientation {
                Orientation::OutIn => [column, l],
                Orientation::InOut => [l, column],
            };
            value(self.x.cols(), x) * value(self.weights.cols(), w)
        };
        let terms = self.linear().in_features;
        let (exact, magnitude) =
            (0..terms).map(term).fold((0.0, 0.0), |(s, a), t| (s + t, a + f64::abs(t)));
        let sum = (terms + 2) as f64 * UNIT_ROUNDOFF * magnitude;
        (exact, sum + Y::DTYPE.unit_roundoff() * (f64::abs(exact) + sum))
    }
}
