//! Training: a forward pass that keeps gate and up, and the backward pass.
//!
//! The derivative of the activation is the epilogue of dh = dy·Wdᵀ, where ∂L/∂gate and ∂L/∂up take the place of gate and
//! up and h is computed again. Both lie in one matrix `[M, 2H]`, so that ∂L/∂x is one linear map of 2H inputs. A gradient
//! of weights is a linear map too: columns of one factor are its rows, tokens its inputs, and the other factor its weights,
//! packed for the call. All of them go through the matrix kernel of the forward pass.

use swiglu_core::{
    Accumulate, Element, Error, GateUpWeights, GatedLinearParams, GradientMut, GradientShapes,
    Gradients, GradientsMut, Half, Matrix, MatrixMut, MatrixRef, MlpParams, Orientation, Path,
    Problem, Result, RowScale, RowSteps, SavePolicy, StridedRef, Wanted, WeightLayout,
};

use super::gated::{GatedKernel, GatedLinear, matrix_bytes, matrix_in};
use super::linear::{AddedTo, Linear, Stored, Target};
use super::mlp::Mlp;
use super::pass::{linear_map, linear_map_bytes, out_rows};
use crate::buffer::Buffer;
use crate::columns::sum_columns;
use crate::compiled;
use crate::cpu::{CallOptions, Cpu};
use crate::differentiated::{Differentiated, DifferentiatedRows};
use crate::epilogue::{Kept, Rows};
use crate::order::Order;
use crate::panels::{Panels, Part};
use crate::rows::Source;
use crate::team::Step;
use crate::weights::Weights;
use crate::workspace::{Tokens, cut, total};

/// What a gated linear layer has beside its forward weights to be trained.
#[derive(Debug)]
pub(super) struct Training<T> {
    policy: SavePolicy,
    /// From ∂L/∂gate and ∂L/∂up, 2H inputs, to ∂L/∂x.
    dx: Linear<T>,
    /// Up alone, where it is computed again without gate.
    up: Option<Linear<T>>,
}

/// What a block has beside its gated linear layer's.
#[derive(Debug)]
pub(super) struct MlpTraining<T> {
    /// From ∂L/∂y to ∂L/∂h.
    dh: Linear<T>,
    down_orientation: Orientation,
}

/// What a forward pass leaves for the backward pass that takes it: x, borrowed or copied, and gate and up as the layer's
/// [`SavePolicy`] says. Its memory is the device's, and goes back there.
#[derive(Debug)]
pub struct Saved<'x, T> {
    x: Input<'x, T>,
    kept: Block,
    policy: SavePolicy,
    problem: Problem,
}

#[derive(Debug)]
enum Input<'x, T> {
    Borrowed(MatrixRef<'x, T>),
    Owned(Matrix<T>),
}

impl<T: Copy + Default> Input<'_, T> {
    fn view(&self) -> MatrixRef<'_, T> {
        match self {
            Input::Borrowed(x) => *x,
            Input::Owned(x) => x.view(),
        }
    }
}

/// Memory that goes back to the device.
#[derive(Debug)]
struct Block {
    cpu: Cpu,
    memory: Buffer,
}

impl Drop for Block {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, Buffer::empty());
        if memory.bytes() > 0 {
            self.cpu.kept().give_back(memory);
        }
    }
}

impl<'x, T: Element> Saved<'x, T> {
    fn new(cpu: &Cpu, problem: Problem, policy: SavePolicy, x: MatrixRef<'x, T>) -> Result<Self> {
        let bytes = policy.kept_bytes(x.rows(), problem.intermediate, T::DTYPE);
        let memory = if bytes > 0 { cpu.kept().take(bytes)? } else { Buffer::empty() };
        let kept = Block { cpu: cpu.clone(), memory };
        let problem = problem.with_m(x.rows());
        Ok(Self { x: Input::Borrowed(x), kept, policy, problem })
    }

    /// What is kept of gate and up, as rows of the memory.
    fn rows(&mut self) -> Kept<T> {
        let memory = self.kept.memory.as_mut_ptr().cast::<T>();
        match self.policy {
            SavePolicy::Save => {
                let [gate, up] = halves(memory, self.problem.intermediate);
                Kept { gate: Some(gate), up: Some(up) }
            }
            SavePolicy::SaveGate => {
                let cols = self.problem.intermediate;
                Kept { gate: Some(Rows { first: memory, stride: cols, cols }), up: None }
            }
            _ => Kept::NOTHING,
        }
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.problem.m
    }

    /// Bytes that are kept between the passes, beside x.
    pub fn kept_bytes(&self) -> usize {
        self.policy.kept_bytes(self.problem.m, self.problem.intermediate, T::DTYPE)
    }

    /// The same with a copy of x, which may then change.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for it.
    pub fn into_owned(self) -> Result<Saved<'static, T>> {
        let x = match self.x {
            Input::Borrowed(x) => x.to_dtype()?,
            Input::Owned(x) => x,
        };
        let (kept, policy, problem) = (self.kept, self.policy, self.problem);
        Ok(Saved { x: Input::Owned(x), kept, policy, problem })
    }
}

/// Gate and up in rows of 2H values.
fn halves<T>(first: *mut T, intermediate: usize) -> [Rows<T>; 2] {
    [0, intermediate].map(|offset| Rows {
        first: first.wrapping_add(offset),
        stride: 2 * intermediate,
        cols: intermediate,
    })
}

/// Refuses a backward pass of a layer that was not made for one.
fn trained<L>(training: Option<&L>) -> Result<&L> {
    training.ok_or_else(|| Error::Unsupported {
        what: "a backward pass of a layer that was packed for forward passes".into(),
        why: "it lacks the weights in the order that gradients take; make it by for_training"
            .into(),
    })
}

/// Gate and up of weights as matrices of their own, where they lie so.
fn apart<'a, T: Element>(weights: &GateUpWeights<'a, T>) -> Result<[MatrixRef<'a, T>; 2]> {
    let h = weights.intermediate();
    let half = |half| {
        let (tensor, first) = weights.locate(half, 0);
        match weights.layout().orientation {
            Orientation::OutIn => tensor.rows_range(first..first + h),
            Orientation::InOut => tensor.cols_range(first..first + h),
        }
    };
    match h {
        0 => Ok([weights.locate(Half::Gate, 0).0; 2]),
        _ => Ok([half(Half::Gate)?, half(Half::Up)?]),
    }
}

impl<T: Element> Training<T> {
    fn new(
        cpu: &Cpu,
        [dx, up]: [Buffer; 2],
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
    ) -> Result<Self> {
        let w = &params.weights;
        let layout = w.layout();
        if matches!(layout.arrangement, swiglu_core::Arrangement::Interleaved { .. }) {
            let arrangement = swiglu_core::Arrangement::Separate;
            let weights = w.convert(WeightLayout { arrangement, ..layout })?;
            return Self::new(cpu, [dx, up], &params.with_weights(weights.view()), policy);
        }
        let (k, h, order) = (w.hidden(), w.intermediate(), params.numerics.into());
        let [gate_half, up_half] = apart(w)?;
        let orientation = flipped(layout.orientation);
        let parts = [
            Part { inputs: h, orientation, locate: &|k| (gate_half, k) },
            Part { inputs: h, orientation, locate: &|k| (up_half, k) },
        ];
        let dx = Linear::of_parts(cpu, dx, (k, order), &parts, None)?;
        let up = match policy {
            SavePolicy::SaveGate => {
                let (inputs, orientation) = (k, layout.orientation);
                let part = Part { inputs, orientation, locate: &|j| w.locate(Half::Up, j) };
                Some(Linear::of_parts(cpu, up, (h, order), &[part], params.up_bias)?)
            }
            _ => None,
        };
        Ok(Self { policy, dx, up })
    }

    /// The memory of the weights, which are gone then.
    fn take_memory(&mut self) -> [Buffer; 2] {
        let up = self.up.as_mut().map_or(Buffer::empty(), Linear::take_memory);
        [self.dx.take_memory(), up]
    }

    fn bytes(&self) -> usize {
        let up = self.up.as_ref().map_or(0, |up| up.weights().bytes_with_biases());
        self.dx.weights().bytes_with_biases() + up
    }
}

const fn flipped(orientation: Orientation) -> Orientation {
    match orientation {
        Orientation::OutIn => Orientation::InOut,
        Orientation::InOut => Orientation::OutIn,
    }
}

impl<T: Element> MlpTraining<T> {
    fn new(cpu: &Cpu, memory: Buffer, params: &MlpParams<'_, T>) -> Result<Self> {
        let w = &params.gated.weights;
        let part = Part {
            inputs: w.hidden(),
            orientation: flipped(params.down_orientation),
            locate: &|h| (params.down, h),
        };
        let outputs = (w.intermediate(), params.gated.numerics.into());
        let dh = Linear::of_parts(cpu, memory, outputs, &[part], None)?;
        Ok(Self { dh, down_orientation: params.down_orientation })
    }
}

impl<T: Element> GatedLinear<T> {
    /// Packs the weights for forward and backward passes. The layer has copies of its own, one for each direction: after a
    /// step of an optimiser [`Self::update`] packs the changed ones, which copies 4·K·H values (5·K·H with
    /// [`SavePolicy::SaveGate`]) where a step with M tokens multiplies 6·M·K·H times.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn for_training(
        cpu: &Cpu,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
    ) -> Result<Self> {
        Self::for_training_with_path(cpu, params, policy, Path::Fused)
    }

    /// As [`Self::for_training`], on the given path: the unfused one has gate, up and dh in memory as T between operations.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn for_training_with_path(
        cpu: &Cpu,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> Result<Self> {
        let training = Training::new(cpu, [(); 2].map(|()| Buffer::empty()), params, policy)?;
        Ok(Self { training: Some(training), ..Self::with_path(cpu, params, path)? })
    }

    /// Packs other values of the weights and biases, of the same shapes and layout, in the memory of those before.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer of another problem, or one that was not made by [`Self::for_training`];
    /// [`Error::OutOfMemory`], after which the layer has no weights any more.
    pub fn update(&mut self, params: &GatedLinearParams<'_, T>) -> Result<()> {
        params.validate()?;
        self.expect_same(&params.problem(0))?;
        let training = self.training.as_mut().ok_or_else(not_for_training)?;
        let (policy, memory) = (training.policy, training.take_memory());
        let training = Training::new(&self.cpu, memory, params, policy)?;
        let forward = match &mut self.kernel {
            GatedKernel::Fused(weights) => weights.take_memory(),
            GatedKernel::Unfused(_) => Buffer::empty(),
        };
        let (cpu, path) = (self.cpu.clone(), self.path());
        let layer = Self::packed_in(&cpu, forward, params, path, RowSteps::NONE)?;
        *self = Self { training: Some(training), ..layer };
        Ok(())
    }

    fn expect_same(&self, given: &Problem) -> Result<()> {
        let given = given.with_numerics(self.problem.numerics).with_op(self.problem.op);
        match given.with_bias(false) == self.problem.with_bias(false).with_m(0) {
            true => Ok(()),
            false => Err(Error::Unsupported {
                what: format!("an update of {} by {given}", self.problem),
                why: "only the values of weights and biases may change; make another layer".into(),
            }),
        }
    }

    /// Bytes of the weights that only backward passes read.
    pub fn training_bytes(&self) -> usize {
        self.training.as_ref().map_or(0, Training::bytes)
    }

    /// The shapes of the gradients of weights.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn gradient_shapes(&self) -> Result<GradientShapes> {
        trained(self.training.as_ref())?;
        Ok(GradientShapes::new(&self.problem, Orientation::OutIn))
    }

    /// What the layer keeps between the passes.
    ///
    /// # Errors
    /// As [`Self::gradient_shapes`].
    pub fn policy(&self) -> Result<SavePolicy> {
        Ok(trained(self.training.as_ref())?.policy)
    }

    /// Writes h `[M, H]` for x `[M, K]`, with the bits of [`Self::forward`], and keeps what [`Self::backward`] needs.
    ///
    /// # Errors
    /// As [`Self::forward_opts`]; [`Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn forward_train<'x>(
        &self,
        x: MatrixRef<'x, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<Saved<'x, T>> {
        let policy = trained(self.training.as_ref())?.policy;
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.intermediate()])?;
        let cpu = self.cpu.for_call(options)?;
        let mut saved = Saved::new(&self.cpu, self.problem, policy, x)?;
        let kept = saved.rows();
        let bytes = self.takes_bytes(&cpu, Tokens::Exactly(x.rows()));
        cpu.workspaces().with(bytes, |work| self.forward_in(&cpu, work, x, out, kept))?;
        Ok(saved)
    }

    /// The gradients that are wanted, in matrices of their own, from dh `[M, H]`.
    ///
    /// # Errors
    /// As [`Self::backward_into`].
    pub fn backward<'d>(
        &self,
        saved: Saved<'_, T>,
        dh: impl Into<StridedRef<'d, T>>,
        wanted: Wanted,
    ) -> Result<Gradients<T>> {
        let (m, bias) = (saved.tokens(), self.problem.bias);
        let mut gradients = Gradients::zeros(m, &self.gradient_shapes()?, wanted, bias)?;
        self.backward_into(saved, dh, gradients.as_mut(), &CallOptions::default())?;
        Ok(gradients)
    }

    /// Writes the gradients that have a place, or adds them to what is there, from dh `[M, H]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if a shape disagrees; [`Error::Unsupported`] for a layer that was not made by
    /// [`Self::for_training`], or what another one kept; [`Error::OutOfMemory`].
    pub fn backward_into<'d>(
        &self,
        saved: Saved<'_, T>,
        dh: impl Into<StridedRef<'d, T>>,
        mut into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        let (dh, shapes) = (dh.into(), self.gradient_shapes()?);
        saved.expect_of(&self.problem)?;
        let m = saved.tokens();
        expect_shape("dh", dh, [m, self.intermediate()])?;
        into.validate(m, &shapes)?;
        if m == 0 {
            clear(&mut into);
            return Ok(());
        }
        let cpu = &*self.cpu.for_call(options)?;
        let dh = dh.to_rows()?;
        let dh = dh.view()?;
        if !wants_inner(&into) {
            return Ok(());
        }
        self.with_gate_up(cpu, saved, |x, mut gate_up| {
            let [gate, up] = halves(gate_up.as_mut_slice().as_mut_ptr(), self.intermediate());
            self.differentiate(cpu, self.differentiated([gate, up], None), m, Some(dh));
            self.inner(cpu, x, gate_up.as_ref(), &mut into)
        })
    }

    fn differentiated(&self, [gate, up]: [Rows<T>; 2], h: Option<Rows<T>>) -> Differentiated<T> {
        let (activation, numerics) = (self.problem.activation, self.problem.numerics);
        Differentiated { activation, numerics, gate, up, h }
    }

    /// The derivative over rows in memory; without dh h alone.
    fn differentiate(
        &self,
        cpu: &Cpu,
        of: Differentiated<T>,
        m: usize,
        dh: Option<MatrixRef<'_, T>>,
    ) {
        /// Operations for an element, about.
        const WORK: f64 = 40.0;
        let dh = dh.map(|dh| {
            let first = dh.as_slice().as_ptr().cast_mut();
            Rows { first, stride: dh.row_stride(), cols: dh.cols() }
        });
        let task = Task { of, dh };
        let run = |rows: std::ops::Range<usize>, _: usize| {
            let Task { of, dh } = task.get();
            // SAFETY: the instruction set was checked when the device was made; each row is one worker's.
            unsafe { compiled::differentiated_rows(cpu.isa(), DifferentiatedRows { of, dh, rows }) }
        };
        let work = WORK * m as f64 * self.intermediate() as f64;
        cpu.run_work((work, 0.0), &[Step { units: m, run: &run }]);
    }

    /// Calls `f` with x and gate and up as values of T in rows of 2H, which it may overwrite.
    fn with_gate_up<R>(
        &self,
        cpu: &Cpu,
        mut saved: Saved<'_, T>,
        f: impl FnOnce(MatrixRef<'_, T>, MatrixMut<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let (m, h) = (saved.tokens(), self.intermediate());
        let kept = saved.rows();
        if saved.policy == SavePolicy::Save {
            let gate_up = matrix_in(saved.kept.memory.as_mut_slice(), m, 2 * h)?;
            return f(saved.x.view(), gate_up);
        }
        cpu.workspaces().with(matrix_bytes::<T>(m, 2 * h), |memory| {
            let mut gate_up = matrix_in::<T>(memory, m, 2 * h)?;
            let [gate, up] = halves(gate_up.as_mut_slice().as_mut_ptr(), h);
            let x = saved.x.view();
            match (kept.gate, trained(self.training.as_ref())?.up.as_ref()) {
                (Some(kept), Some(linear)) => {
                    // SAFETY: the layer kept m rows, and nothing else uses either of these here.
                    let (kept, mut gate, up) =
                        unsafe { (kept.matrix(m)?, gate.matrix(m)?, up.matrix(m)?) };
                    (0..m).for_each(|i| gate.row_mut(i).copy_from_slice(kept.as_ref().row(i)));
                    let bytes = linear.workspace_bytes(cpu, Tokens::Exactly(m));
                    cpu.workspaces().with(bytes, |work| {
                        linear.forward(cpu, work, x, up);
                        Ok(())
                    })?;
                }
                _ => self.recompute(cpu, x, [gate, up])?,
            }
            f(x, gate_up)
        })
    }

    /// Computes gate and up again.
    fn recompute(&self, cpu: &Cpu, x: MatrixRef<'_, T>, [gate, up]: [Rows<T>; 2]) -> Result<()> {
        let tokens = Tokens::Exactly(x.rows());
        let order: Order = self.problem.numerics.into();
        match &self.kernel {
            GatedKernel::Fused(weights) => {
                let kept = Kept { gate: Some(gate), up: Some(up) };
                let ordered = (weights, order);
                let bytes = linear_map_bytes(cpu, ordered, tokens);
                cpu.workspaces().with(bytes, |work| {
                    linear_map(cpu, ordered, work, x.into(), |row| {
                        self.epilogue::<T>(weights, None, kept.from(row))
                    });
                    Ok(())
                })
            }
            GatedKernel::Unfused(both) => {
                for (half, rows) in [(&both.gate, gate), (&both.up, up)] {
                    // SAFETY: there are m rows, which nothing else uses here.
                    let out = unsafe { rows.matrix(x.rows())? };
                    let bytes = half.workspace_bytes(cpu, tokens);
                    cpu.workspaces().with(bytes, |work| {
                        half.forward(cpu, work, x, out);
                        Ok(())
                    })?;
                }
                Ok(())
            }
        }
    }

    /// The gradients of the layer's own, from those of gate and up in rows of 2H.
    fn inner(
        &self,
        cpu: &Cpu,
        x: MatrixRef<'_, T>,
        dgate_up: MatrixRef<'_, T>,
        into: &mut GradientsMut<'_, T>,
    ) -> Result<()> {
        let h = self.intermediate();
        if let Some(dx) = &mut into.dx {
            let dx_of = &trained(self.training.as_ref())?.dx;
            let bytes = dx_of.workspace_bytes(cpu, Tokens::Exactly(x.rows()));
            cpu.workspaces().with(bytes, |work| {
                dx_of.forward(cpu, work, dgate_up, dx.reborrow());
                Ok(())
            })?;
        }
        let (dgate, dup) = (dgate_up.cols_range(0..h)?, dgate_up.cols_range(h..2 * h)?);
        let accumulate = into.accumulate;
        if let Some(bias) = &mut into.gate_bias {
            sum_columns(cpu, dgate, bias, accumulate);
        }
        if let Some(bias) = &mut into.up_bias {
            sum_columns(cpu, dup, bias, accumulate);
        }
        let places = [(dgate, &mut into.gate), (dup, &mut into.up)];
        let mut wanted = places.into_iter().filter_map(|(d, place)| Some((d, place.as_mut()?)));
        match self.problem.layout.orientation {
            Orientation::OutIn => {
                let Some(first) = wanted.next() else { return Ok(()) };
                let x = Factor::pack(cpu, x)?;
                std::iter::once(first)
                    .chain(wanted)
                    .try_for_each(|(d, place)| x.times(d, place, accumulate))
            }
            Orientation::InOut => {
                wanted.try_for_each(|(d, place)| Factor::pack(cpu, d)?.times(x, place, accumulate))
            }
        }
    }
}

/// What a step over rows is told, for all workers.
struct Task<T> {
    of: Differentiated<T>,
    dh: Option<Rows<T>>,
}
// SAFETY: workers have disjoint rows.
unsafe impl<T> Sync for Task<T> {}
impl<T: Element> Task<T> {
    fn get(&self) -> Task<T> {
        Task { of: self.of, dh: self.dh }
    }
}

impl<T: Element> Saved<'_, T> {
    fn expect_of(&self, problem: &Problem) -> Result<()> {
        match self.problem == problem.with_m(self.problem.m) {
            true => Ok(()),
            false => Err(Error::Unsupported {
                what: format!("a backward pass of {problem} with what {} kept", self.problem),
                why: "the layer that ran forward runs backward".into(),
            }),
        }
    }
}

fn not_for_training() -> Error {
    Error::Unsupported {
        what: "an update of a layer that was packed for forward passes".into(),
        why: "make another layer of the changed weights, or this one by for_training".into(),
    }
}

fn expect_shape<T>(what: &str, m: StridedRef<'_, T>, expected: [usize; 2]) -> Result<()> {
    match m.shape() == expected {
        true => Ok(()),
        false => Err(Error::shape(what, expected, m.shape())),
    }
}

/// Whether anything is wanted that follows from the gradients of gate and up.
fn wants_inner<T>(into: &GradientsMut<'_, T>) -> bool {
    into.dx.is_some()
        || into.gate.is_some()
        || into.up.is_some()
        || into.gate_bias.is_some()
        || into.up_bias.is_some()
}

/// The gradients of no tokens: zeros, or what is there.
fn clear<T: Element>(into: &mut GradientsMut<'_, T>) {
    fn zero<V: Element>(m: &mut MatrixMut<'_, V>) {
        (0..m.rows()).for_each(|r| m.row_mut(r).fill(V::default()));
    }
    if into.accumulate == Accumulate::Add {
        return;
    }
    for place in [&mut into.gate, &mut into.up, &mut into.down].into_iter().flatten() {
        match place {
            GradientMut::Element(m) => zero(m),
            GradientMut::F32(m) => zero(m),
            other => unreachable!("{other:?} is computed nowhere"),
        }
    }
    let biases = [&mut into.gate_bias, &mut into.up_bias, &mut into.down_bias];
    biases.into_iter().flatten().for_each(|bias| bias.fill(0.0));
}

/// The right factor of a product over tokens, packed as weights; its memory goes back to the device.
struct Factor<'c, T: Element> {
    cpu: &'c Cpu,
    weights: Weights<T>,
}

impl<'c, T: Element> Factor<'c, T> {
    fn pack(cpu: &'c Cpu, right: MatrixRef<'_, T>) -> Result<Self> {
        let (inputs, orientation) = (right.rows(), Orientation::InOut);
        let part = Part { inputs, orientation, locate: &|column| (right, column) };
        let memory = cpu.workspaces().take(Panels::<T>::linear_bytes(cpu, right.cols(), inputs))?;
        let panels = Panels::linear(cpu, memory, right.cols(), &[part], None)?;
        Ok(Self { cpu, weights: Weights::Dense(panels) })
    }

    /// leftᵀ·right, to its place. Each sum is one accumulator over the tokens in order.
    fn times(
        &self,
        left: MatrixRef<'_, T>,
        place: &mut GradientMut<'_, T>,
        accumulate: Accumulate,
    ) -> Result<()> {
        let scale = RowScale::None;
        match (place, accumulate) {
            (GradientMut::Element(m), Accumulate::Add) => {
                self.times_to(left, &AddedTo { out: out_rows(m), scale })
            }
            (GradientMut::F32(m), Accumulate::Add) => {
                self.times_to(left, &AddedTo { out: out_rows(m), scale })
            }
            (GradientMut::Element(m), _) => self.times_to(left, &Stored(out_rows(m))),
            (GradientMut::F32(m), _) => self.times_to(left, &Stored(out_rows(m))),
            (other, _) => unreachable!("{other:?} is computed nowhere"),
        }
    }

    fn times_to(&self, left: MatrixRef<'_, T>, target: &impl Target) -> Result<()> {
        let ordered = (&self.weights, Order::Common);
        let bytes = linear_map_bytes(self.cpu, ordered, Tokens::Exactly(left.cols()));
        self.cpu.workspaces().with(bytes, |work| {
            let left = Source::Columns(left);
            linear_map(self.cpu, ordered, work, left, |row| target.epilogue(None, row));
            Ok(())
        })
    }
}

impl<T: Element> Drop for Factor<'_, T> {
    fn drop(&mut self) {
        self.cpu.workspaces().give_back(self.weights.take_memory());
    }
}

impl<T: Element> Mlp<T> {
    /// Packs the weights for forward and backward passes, as [`GatedLinear::for_training`]: 6·K·H values are copied (7·K·H with
    /// [`SavePolicy::SaveGate`]) where a step with M tokens multiplies 9·M·K·H times.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Unsupported`] for a block with row steps.
    pub fn for_training(cpu: &Cpu, params: &MlpParams<'_, T>, policy: SavePolicy) -> Result<Self> {
        Self::for_training_with_path(cpu, params, policy, Path::Fused)
    }

    /// As [`Self::for_training`], on the given path: the unfused one has gate, up and dh in memory as T between operations.
    ///
    /// # Errors
    /// As [`Self::for_training`].
    pub fn for_training_with_path(
        cpu: &Cpu,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> Result<Self> {
        params.validate()?;
        let instead = "train the gated linear layer, and what follows it by other means";
        params.rows.steps.expect_none("in backward passes", instead)?;
        let mut layer = Self::with_path(cpu, params, path)?;
        let none = [(); 2].map(|()| Buffer::empty());
        layer.gated.training = Some(Training::new(cpu, none, &params.gated, policy)?);
        layer.training = Some(MlpTraining::new(cpu, Buffer::empty(), params)?);
        Ok(layer)
    }

    /// Packs other values of the weights and biases, of the same shapes and layout, in the memory of those before.
    ///
    /// # Errors
    /// As [`GatedLinear::update`].
    pub fn update(&mut self, params: &MlpParams<'_, T>) -> Result<()> {
        params.validate()?;
        params.rows.steps.expect_none("in backward passes", "make another layer")?;
        let MlpTraining { dh, down_orientation } =
            self.training.as_mut().ok_or_else(not_for_training)?;
        if *down_orientation != params.down_orientation {
            return Err(Error::Unsupported {
                what: format!("an update by a down weight that lies {}", params.down_orientation),
                why: format!("the layer's lies {down_orientation}; make another layer"),
            });
        }
        self.gated.update(&params.gated)?;
        let cpu = &self.gated.cpu;
        let training = MlpTraining::new(cpu, dh.take_memory(), params)?;
        let part = Part {
            inputs: params.gated.weights.intermediate(),
            orientation: params.down_orientation,
            locate: &|k| (params.down, k),
        };
        let outputs = (params.gated.weights.hidden(), self.problem.numerics.into());
        let memory = self.down.take_memory();
        self.down = Linear::of_parts(cpu, memory, outputs, &[part], params.down_bias)?;
        self.training = Some(training);
        Ok(())
    }

    /// Bytes of the weights that only backward passes read.
    pub fn training_bytes(&self) -> usize {
        let dh = self.training.as_ref().map_or(0, |t| t.dh.weights().bytes_with_biases());
        self.gated.training_bytes() + dh
    }

    /// The shapes of the gradients of weights.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn gradient_shapes(&self) -> Result<GradientShapes> {
        let down = trained(self.training.as_ref())?.down_orientation;
        Ok(GradientShapes::new(&self.problem, down))
    }

    /// What the layer keeps between the passes.
    ///
    /// # Errors
    /// As [`Self::gradient_shapes`].
    pub fn policy(&self) -> Result<SavePolicy> {
        self.gated.policy()
    }

    /// Writes y `[M, K]` for x `[M, K]`, with the bits of [`Self::forward`], and keeps what [`Self::backward`] needs.
    ///
    /// # Errors
    /// As [`Self::forward_opts`]; [`Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn forward_train<'x>(
        &self,
        x: MatrixRef<'x, T>,
        mut out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<Saved<'x, T>> {
        let policy = trained(self.gated.training.as_ref())?.policy;
        self.check(x, out.shape())?;
        let mut saved = Saved::new(&self.gated.cpu, self.problem, policy, x)?;
        let kept = saved.rows();
        self.forward_to(x, &Stored(out_rows(&mut out)), options, kept)?;
        Ok(saved)
    }

    /// The gradients that are wanted, in matrices of their own, from dy `[M, K]`.
    ///
    /// # Errors
    /// As [`Self::backward_into`].
    pub fn backward<'d>(
        &self,
        saved: Saved<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        wanted: Wanted,
    ) -> Result<Gradients<T>> {
        let (m, bias) = (saved.tokens(), self.problem.bias);
        let mut gradients = Gradients::zeros(m, &self.gradient_shapes()?, wanted, bias)?;
        self.backward_into(saved, dy, gradients.as_mut(), &CallOptions::default())?;
        Ok(gradients)
    }

    /// Writes the gradients that have a place, or adds them to what is there, from dy `[M, K]`.
    ///
    /// # Errors
    /// As [`GatedLinear::backward_into`].
    pub fn backward_into<'d>(
        &self,
        saved: Saved<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        mut into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        let (dy, m) = (dy.into(), saved.tokens());
        let shapes = self.gradient_shapes()?;
        saved.expect_of(&self.problem)?;
        expect_shape("dy", dy, [m, self.problem.hidden])?;
        into.validate(m, &shapes)?;
        if m == 0 {
            clear(&mut into);
            return Ok(());
        }
        let cpu = &*self.gated.cpu.for_call(options)?;
        let dy = dy.to_rows()?;
        let dy = dy.view()?;
        if let Some(bias) = &mut into.down_bias {
            sum_columns(cpu, dy, bias, into.accumulate);
        }
        if !wants_inner(&into) && into.down.is_none() {
            return Ok(());
        }
        let gated = &self.gated;
        gated.with_gate_up(cpu, saved, |x, mut gate_up| {
            let features = self.problem.intermediate;
            let h_bytes = into.down.as_ref().map_or(0, |_| matrix_bytes::<T>(m, features));
            cpu.workspaces().with(total([h_bytes]), |memory| {
                let [h] = cut(memory, [h_bytes]);
                let first = h.as_mut_ptr().cast::<T>();
                let h = Rows { first, stride: features, cols: features };
                let h = into.down.as_ref().map(|_| h);
                let rows = halves(gate_up.as_mut_slice().as_mut_ptr(), features);
                let of = gated.differentiated(rows, h);
                match wants_inner(&into) {
                    true => self.through_down(cpu, dy, of)?,
                    false => gated.differentiate(cpu, of, m, None),
                }
                if let (Some(place), Some(h)) = (&mut into.down, h) {
                    // SAFETY: the part holds m rows, written just now, and nothing else uses them.
                    let h = unsafe { h.matrix(m)? };
                    let (left, right) = match trained(self.training.as_ref())?.down_orientation {
                        Orientation::OutIn => (dy, h.as_ref()),
                        Orientation::InOut => (h.as_ref(), dy),
                    };
                    Factor::pack(cpu, right)?.times(left, place, into.accumulate)?;
                }
                match wants_inner(&into) {
                    true => gated.inner(cpu, x, gate_up.as_ref(), &mut into),
                    false => Ok(()),
                }
            })
        })
    }

    /// dh = dy·Wdᵀ and the derivative behind it: in its epilogue, or on the unfused path over dh in memory.
    fn through_down(&self, cpu: &Cpu, dy: MatrixRef<'_, T>, of: Differentiated<T>) -> Result<()> {
        let dh = &trained(self.training.as_ref())?.dh;
        let (m, h) = (dy.rows(), self.problem.intermediate);
        let bytes = dh.workspace_bytes(cpu, Tokens::Exactly(m));
        if self.gated.path() == Path::Fused {
            let order: Order = self.problem.numerics.into();
            let task = Task { of, dh: None };
            return cpu.workspaces().with(bytes, |work| {
                let ordered = (dh.weights(), order);
                linear_map(cpu, ordered, work, dy.into(), |row| task.get().of.from(row));
                Ok(())
            });
        }
        let dh_bytes = matrix_bytes::<T>(m, h);
        cpu.workspaces().with(total([dh_bytes, bytes]), |memory| {
            let [values, work] = cut(memory, [dh_bytes, bytes]);
            let mut values = matrix_in(values, m, h)?;
            dh.forward(cpu, work, dy, values.reborrow());
            self.gated.differentiate(cpu, of, m, Some(values.as_ref()));
            Ok(())
        })
    }
}
