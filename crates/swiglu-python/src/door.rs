//! The door past PyTorch's dispatcher: a call goes straight to its kernel where the dispatcher had nothing else to do for it.

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use swiglu::Arrangement;

use crate::activation::{Activation, How};
use crate::alike::Alike;
use crate::dlpack::{self, Memory};
use crate::elementwise::activation_at_once;
use crate::error::Failure;
use crate::lent::layer_at_once;
use crate::tensor::Tensor;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// What a function gives for one argument, or for none, called as Python calls it: what PyO3 has for the stable ABI of
/// Python 3.9 packs a tuple first.
fn called<'py>(
    function: Object<'_, 'py>,
    argument: Option<Object<'_, 'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    let end = std::ptr::null_mut::<ffi::PyObject>();
    let argument = argument.map_or(end, |argument| argument.as_ptr());
    // SAFETY: objects that are alive, the last of them followed by null; the result is ours.
    unsafe {
        let made = ffi::PyObject_CallFunctionObjArgs(function.as_ptr(), argument, end);
        Bound::from_owned_ptr_or_err(function.py(), made)
    }
}

impl How {
    /// None of what is no name, or the name of nothing: the slower way says what there is.
    fn given(
        act: Object<'_, '_>,
        numerics: Object<'_, '_>,
        layout: Object<'_, '_>,
    ) -> Option<Self> {
        let py = act.py();
        // What is left away has always the same object.
        let is = |given: Object<'_, '_>, name: &Bound<'_, PyString>| given.is(name);
        let act = if is(act, intern!(py, "swiglu")) {
            swiglu::Activation::SWIGLU
        } else if let Ok(named) = act.cast::<Activation>() {
            named.get().0
        } else {
            parsed(act)?
        };
        let numerics = if numerics.is_none() { None } else { Some(parsed(numerics)?) };
        let arrangement = if layout.is_none() {
            Arrangement::Separate
        } else if is(layout, intern!(py, "gate-first")) {
            Arrangement::PackedGateFirst
        } else {
            parsed(layout)?
        };
        Some(Self { act, numerics, arrangement })
    }
}

fn parsed<T: std::str::FromStr>(name: Object<'_, '_>) -> Option<T> {
    name.cast::<PyString>().ok()?.to_cow().ok()?.parse().ok()
}

/// What PyTorch would do for a call beside computing it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Nothing,
    /// Gradients are wanted.
    Gradient,
    /// Something else, or the tensors are not PyTorch's own.
    Other,
}

/// PyTorch's own functions by which a call learns what is in force.
#[pyclass(frozen, module = "swiglu._native")]
pub(crate) struct Door {
    /// Functions whose results are true where the dispatcher has something to do: modes, transforms, traces, autocast.
    in_force: Vec<Py<PyAny>>,
    /// The module that knows of derivatives in forward mode.
    forward_ad: Py<PyAny>,
    grad_enabled: Py<PyAny>,
    empty_like: Py<PyAny>,
    /// Takes a tuple of tensors that were written where PyTorch does not see it.
    written: Py<PyAny>,
    /// Has the way that a thread's last call took, as `taken`.
    last: Py<PyAny>,
    /// What is said of a way, by the memory it is for.
    ways: [Py<PyString>; 2],
    one_pass: [Py<PyString>; 2],
    where_they_lie: Py<PyString>,
}

#[pymethods]
impl Door {
    #[new]
    fn new(
        py: Python<'_>,
        in_force: Vec<Py<PyAny>>,
        forward_ad: Py<PyAny>,
        grad_enabled: Py<PyAny>,
        empty_like: Py<PyAny>,
        written: Py<PyAny>,
        last: Py<PyAny>,
        reasons: [Py<PyString>; 3],
    ) -> Self {
        let ways = ["native cpu", "native cuda"].map(|way| PyString::new(py, way).unbind());
        let [here, there, where_they_lie] = reasons;
        let one_pass = [here, there];
        Self {
            in_force,
            forward_ad,
            grad_enabled,
            empty_like,
            written,
            last,
            ways,
            one_pass,
            where_they_lie,
        }
    }

    /// Whether no mode, transform, tracing, autocast or forward-mode derivative is in force.
    fn nothing_in_force(&self, py: Python<'_>) -> PyResult<bool> {
        for function in &self.in_force {
            if called(function.bind(py), None)?.is_truthy()? {
                return Ok(false);
            }
        }
        let level = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?;
        Ok(level.extract::<i64>()? < 0)
    }

    /// h of tensors that are as kernels take them, in `out` or in a new tensor. None where they are not, and nothing was done.
    /// `asks`: whether anything may be in force, in which case it is None too, or a gradient be wanted, in which case it is
    /// `NotImplemented` of a call without `out` that has everything else.
    fn activation<'py>(
        &self,
        op: Object<'_, 'py>,
        gate: Object<'_, 'py>,
        up: Option<Object<'_, 'py>>,
        layout: Object<'_, 'py>,
        activation: Object<'_, 'py>,
        numerics: Object<'_, 'py>,
        out: Option<Object<'_, 'py>>,
        asks: bool,
    ) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        let given = || [gate].into_iter().chain(up);
        let asked = if asks { self.asked(given().chain(out))? } else { Asked::Nothing };
        if asked == Asked::Other || asked == Asked::Gradient && out.is_some() {
            return Ok(None);
        }
        let Some(how) = How::given(activation, numerics, layout) else { return Ok(None) };
        let Some(inputs) = Alike::of(given()) else { return Ok(None) };
        if asked == Asked::Gradient {
            return Ok(Some(gate.py().NotImplemented().into_bound(gate.py())));
        }
        let first = &inputs.tensors[0];
        let h = match out {
            Some(out) => out.clone(),
            None => {
                let (mut shape, alike) = (first.shape.clone(), up.is_some());
                match shape.last_mut() {
                    Some(last) if !alike => *last /= 2,
                    None if !alike => return Ok(None),
                    _ => {}
                }
                let Some(made) = self.room(gate, first, &shape)? else { return Ok(None) };
                made
            }
        };
        let Some(tensors) = inputs.writing([&h]) else { return Ok(None) };
        let place = usize::from(tensors.memory != Memory::Host);
        if !activation_at_once(gate.py(), how, &tensors)? {
            return Ok(None);
        }
        self.done(op, place, &self.one_pass[place], h, out.is_some())
    }

    /// As `activation`, of a gated linear layer or a block over weights where they lie on a CUDA device: `NotImplemented` of any
    /// activation, numerics and layout, and of tensors whose shapes may disagree.
    fn layer<'py>(
        &self,
        op: Object<'_, 'py>,
        x: Object<'_, 'py>,
        weights: [Option<Bound<'py, PyAny>>; 6],
        layout: Object<'_, 'py>,
        activation: Object<'_, 'py>,
        numerics: Object<'_, 'py>,
        out: Option<Object<'_, 'py>>,
        asks: bool,
    ) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        let given = || [x].into_iter().chain(weights.iter().flatten());
        let Some(inputs) = Alike::of(given()) else { return Ok(None) };
        let [Some(_), up, down, gate_bias, up_bias, _] = &weights else { return Ok(None) };
        let biased = gate_bias.is_some() || up_bias.is_some();
        if inputs.memory == Memory::Host {
            return Ok(None);
        }
        let asked = if asks { self.asked(given().chain(out))? } else { Asked::Nothing };
        match asked {
            Asked::Nothing => {}
            Asked::Gradient if out.is_none() => {
                return Ok(Some(x.py().NotImplemented().into_bound(x.py())));
            }
            Asked::Gradient | Asked::Other => return Ok(None),
        }
        let Some(how) = How::given(activation, numerics, layout) else { return Ok(None) };
        if how.arrangement != Arrangement::PackedGateFirst || up.is_none() && biased {
            return Ok(None);
        }
        let y = match out {
            Some(out) => out.clone(),
            None => {
                let first = &inputs.tensors[0];
                // The down projection lies behind x, gate and up.
                let last = if down.is_some() { 2 + usize::from(up.is_some()) } else { 1 };
                let last = &inputs.tensors[last];
                let (mut shape, Some(&rows)) = (first.shape.clone(), last.shape.first()) else {
                    return Ok(None);
                };
                let Some(features) = shape.last_mut() else { return Ok(None) };
                *features = if down.is_none() && up.is_none() { rows / 2 } else { rows };
                let Some(made) = self.room(x, first, &shape)? else { return Ok(None) };
                made
            }
        };
        let Some(tensors) = inputs.writing([&y]) else { return Ok(None) };
        let there = weights.each_ref().map(Option::is_some);
        if !layer_at_once(how, tensors, there)? {
            return Ok(None);
        }
        self.done(op, 1, &self.where_they_lie, y, out.is_some())
    }
}

impl Door {
    /// What PyTorch would do for a call of these tensors beside computing it.
    fn asked<'a, 'py: 'a>(
        &self,
        tensors: impl Iterator<Item = Object<'a, 'py>> + Clone,
    ) -> PyResult<Asked> {
        let mut all = tensors.clone();
        let Some(py) = all.next().map(Bound::py) else { return Ok(Asked::Other) };
        if !tensors.clone().all(dlpack::is_known) || !self.nothing_in_force(py)? {
            return Ok(Asked::Other);
        }
        if called(self.grad_enabled.bind(py), None)?.is_truthy()? {
            for tensor in tensors {
                if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                    return Ok(Asked::Gradient);
                }
            }
        }
        Ok(Asked::Nothing)
    }

    /// A new tensor beside `like`, none where that is of a sub-class: what one makes of its own kind is nobody's result.
    fn room<'py>(
        &self,
        like: Object<'_, 'py>,
        described: &Tensor,
        shape: &[usize],
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = like.py();
        if !dlpack::is_tensor(like) {
            return Ok(None);
        }
        if *shape == *described.shape && described.is_dense() {
            return called(self.empty_like.bind(py), Some(like)).map(Some);
        }
        let shape = PyTuple::new(py, shape)?;
        like.call_method1(intern!(py, "new_empty"), (shape,)).map(Some)
    }

    /// Says which way a call took, and of a tensor that the caller gave that it was written.
    fn done<'py>(
        &self,
        op: Object<'_, 'py>,
        place: usize,
        reason: &Py<PyString>,
        result: Bound<'py, PyAny>,
        given: bool,
    ) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        let py = op.py();
        self.last.bind(py).setattr(intern!(py, "taken"), (op, &self.ways[place], reason))?;
        if given {
            let written = PyTuple::new(py, [&result])?;
            called(self.written.bind(py), Some(&written))?;
        }
        Ok(Some(result))
    }
}
