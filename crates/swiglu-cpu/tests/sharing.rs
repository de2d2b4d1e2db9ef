//! What calls, layers and devices share: threads and working memory.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use swiglu_core::conformance::{Case, Parameters, QuantizedParameters};
use swiglu_core::{
    BlockType, DType, Element, Matrix, MatrixRef, Op, Path, QuantizedTypes, bf16, f16, random,
};
use swiglu_cpu::{CallOptions, Cpu, CpuOptions, GatedLinear, Isa, Mlp};

fn case([m, hidden, intermediate]: [usize; 3]) -> Case {
    Case { bias: true, ..Case::new(Op::Mlp, [m, hidden, intermediate], DType::F32) }
}

fn pool(threads: usize) -> Arc<ThreadPool> {
    Arc::new(ThreadPoolBuilder::new().num_threads(threads).build().unwrap())
}

fn on_pool(pool: &Arc<ThreadPool>) -> Cpu {
    let threads = pool.current_num_threads() + 1;
    Cpu::new(&CpuOptions::default().with_pool(pool.clone()).with_threads(threads)).unwrap()
}

fn threads(threads: usize) -> Cpu {
    Cpu::new(&CpuOptions::default().with_threads(threads)).unwrap()
}

fn mlp(cpu: &Cpu, sizes: [usize; 3]) -> Mlp<f32> {
    Mlp::new(cpu, &Parameters::<f32>::new(&case(sizes)).unwrap().mlp()).unwrap()
}

fn input<T: Element>(m: usize, hidden: usize) -> Matrix<T> {
    random::normal_matrix(7, m, hidden, 1.0).unwrap()
}

fn forward<T: Element>(mlp: &Mlp<T>, x: MatrixRef<'_, T>) -> Matrix<T> {
    let mut y = Matrix::zeros(x.rows(), x.cols()).unwrap();
    mlp.forward(x, y.view_mut()).unwrap();
    y
}

/// The bits, since no number equals itself.
fn bits<T: Element>(y: &Matrix<T>) -> Vec<u32> {
    y.as_slice().iter().map(|v| v.to_f32().to_bits()).collect()
}

/// The pool's only thread is busy until all calls have returned, whatever their size.
#[test]
fn a_call_ends_while_the_pool_is_busy() {
    let pool = pool(1);
    let mlp = mlp(&on_pool(&pool), [1, 300, 600]);
    let ((started, start), (release, released)) = (channel(), channel::<()>());
    pool.spawn(move || {
        started.send(()).unwrap();
        // It ends when the sender goes.
        let _ = released.recv();
    });
    start.recv().unwrap();
    let (done, end) = channel();
    std::thread::scope(|scope| {
        for m in [1, 16, 700] {
            let (mlp, done) = (&mlp, done.clone());
            scope.spawn(move || {
                assert!(mlp.plan(m).threads > 1, "{m} tokens are worth a helper");
                forward(mlp, input(m, 300).view());
                // The test may have given up.
                let _ = done.send(m);
            });
        }
        let ends: Vec<_> = (0..3).map(|_| end.recv_timeout(Duration::from_secs(60))).collect();
        drop(release);
        assert!(ends.iter().all(Result::is_ok), "calls waited for the pool: {ends:?}");
    });
}

/// Two devices on one pool, called from threads outside of it, and from within its jobs, joins, scopes and iterators.
#[test]
fn devices_share_a_pool_that_calls_nest_in() {
    const SIZES: [usize; 3] = [5, 300, 400];
    let (done, end) = channel();
    std::thread::spawn(move || {
        let x = input::<f32>(5, 300);
        let expected = bits(&forward(&mlp(&threads(1), SIZES), x.view()));
        let pool = pool(3);
        let devices = [on_pool(&pool), on_pool(&pool)];
        let layers: Vec<Mlp<f32>> = (0..6).map(|i| mlp(&devices[i % 2], SIZES)).collect();
        let check = |layer: &Mlp<f32>| assert_eq!(bits(&forward(layer, x.view())), expected);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..40).for_each(|i| check(&layers[i % 6])));
            }
            for _ in 0..40 {
                pool.install(|| layers.par_iter().for_each(check));
                pool.install(|| rayon::join(|| check(&layers[0]), || check(&layers[1])));
                pool.scope(|scope| layers.iter().for_each(|l| scope.spawn(move |_| check(l))));
                check(&layers[0]);
            }
        });
        let _ = done.send(());
    });
    match end.recv_timeout(Duration::from_secs(120)) {
        Ok(()) => {}
        Err(error) => panic!("calls that share a pool: {error}"),
    }
}

#[test]
fn options_are_checked() {
    let options = |threads| CpuOptions::default().with_pool(pool(2)).with_threads(threads);
    assert_eq!(Cpu::new(&options(None)).unwrap().threads(), 2);
    assert_eq!(Cpu::new(&options(Some(3))).unwrap().threads(), 3);
    for given in [0, 4] {
        let error = Cpu::new(&options(Some(given))).unwrap_err().to_string();
        let expected = format!("threads = {given}");
        assert!(error.contains(&expected) && error.contains("2 threads in the pool"), "{error}");
    }
    let layer = mlp(&threads(2), [1, 20, 24]);
    let (x, mut y) = (input::<f32>(1, 20), Matrix::<f32>::zeros(1, 20).unwrap());
    let none = CallOptions::default().with_max_threads(0);
    let error = layer.forward_opts(x.view(), y.view_mut(), &none).unwrap_err().to_string();
    assert!(error.contains("max_threads = 0"), "{error}");
    assert!(y.as_slice().iter().all(|&v| v == 0.0));
}

#[test]
fn a_limit_of_threads_changes_no_bit() {
    let sizes = [9, 300, 800];
    for path in [Path::Fused, Path::Unfused] {
        let parameters = Parameters::<f32>::new(&case(sizes)).unwrap();
        let layer = Mlp::with_path(&threads(4), &parameters.mlp(), path).unwrap();
        let x = input::<f32>(9, 300);
        let expected = bits(&forward(&layer, x.view()));
        for most in 1..6 {
            let mut y = Matrix::<f32>::zeros(9, 300).unwrap();
            let options = CallOptions::default().with_max_threads(most);
            layer.forward_opts(x.view(), y.view_mut(), &options).unwrap();
            assert_eq!(bits(&y), expected, "{path}, {most} threads");
        }
    }
}

/// Layers of a device share its working memory: as many blocks as there were callers, none larger than a layer says.
#[test]
fn working_memory_is_bounded_by_callers_and_not_by_layers() {
    let sizes = [[300, 64, 700], [300, 128, 500], [300, 96, 333]];
    let cpu = threads(1);
    let layers = sizes.map(|sizes| mlp(&cpu, sizes));
    assert_eq!(cpu.workspace_bytes(), 0);
    let call = |layer: &Mlp<f32>, m| {
        forward(layer, input(m, layer.gated().hidden()).view());
    };
    let largest = |m| layers.iter().map(|l| l.workspace_bytes(m)).max().unwrap();
    for m in [1, 7, 300] {
        layers.iter().for_each(|layer| call(layer, m));
        assert!((1..=largest(300)).contains(&cpu.workspace_bytes()), "{m} tokens");
    }
    let all: usize = layers.iter().map(|l| l.workspace_bytes(300)).sum();
    assert!(2 * cpu.workspace_bytes() < all, "three layers have one block");
    std::thread::scope(|scope| {
        for i in 0..4 {
            let (layers, call) = (&layers, &call);
            scope.spawn(move || (0..100).for_each(|n| call(&layers[(i + n) % 3], 1 + n % 40)));
        }
    });
    assert!(cpu.workspace_bytes() <= 4 * largest(300));
    let kept = cpu.workspace_bytes();
    assert_eq!((cpu.trim(), cpu.workspace_bytes()), (kept, 0));
    call(&layers[0], 1);
    assert!(cpu.workspace_bytes() <= largest(1));
}

/// What `reserve` made ready suffices: calls of every number of tokens leave it as it is.
fn reserved_memory_suffices<T: Element>(isa: Isa, path: Path) {
    const MOST: usize = 40;
    let case = Case { dtype: T::DTYPE, ..case([MOST, 64, 129]) };
    let parameters = Parameters::<T>::new(&case).unwrap();
    let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(3)).unwrap();
    let layer = Mlp::with_path(&cpu, &parameters.mlp(), path).unwrap();
    let gated = GatedLinear::with_path(&cpu, &parameters.gated(), path).unwrap();
    layer.reserve(MOST, 2).unwrap();
    let reserved = 2 * layer.workspace_bytes(MOST);
    assert_eq!(cpu.workspace_bytes(), reserved);
    assert!(gated.workspace_bytes(MOST) <= layer.workspace_bytes(MOST));
    let x = input::<T>(MOST, 64);
    for m in 0..=MOST {
        let x = x.view().rows_range(0..m).unwrap();
        forward(&layer, x);
        let mut h = Matrix::<T>::zeros(m, 129).unwrap();
        gated.forward(x, h.view_mut()).unwrap();
        assert_eq!(cpu.workspace_bytes(), reserved, "{} {isa} {path}: {m}", T::DTYPE);
    }
}

#[test]
fn reserved_memory_suffices_for_every_number_of_tokens() {
    for isa in Isa::available() {
        for path in [Path::Fused, Path::Unfused] {
            reserved_memory_suffices::<f32>(isa, path);
            reserved_memory_suffices::<f16>(isa, path);
            reserved_memory_suffices::<bf16>(isa, path);
        }
    }
}

/// A layer that fills the memory with NaN runs before others of odd sizes, whose results are those of a new device.
fn other_layers_leave_no_trace<T: Element>(isa: Isa) {
    let new = || Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(1)).unwrap();
    let cpu = new();
    let of = |cpu: &Cpu, sizes, path| {
        let case = Case { dtype: T::DTYPE, ..case(sizes) };
        Mlp::with_path(cpu, &Parameters::<T>::new(&case).unwrap().mlp(), path).unwrap()
    };
    let quantised = |cpu: &Cpu| {
        let types = QuantizedTypes::new(BlockType::Q4_K, Some(BlockType::Q8_0));
        let case = Case { quantized: Some(types), dtype: T::DTYPE, ..case([9, 256, 288]) };
        let parameters = QuantizedParameters::new::<T>(&case, types).unwrap();
        Mlp::<T>::quantized(cpu, &parameters.mlp().unwrap()).unwrap()
    };
    let spoiling = of(&cpu, [9, 301, 901], Path::Unfused);
    let nan = Matrix::from_vec(vec![T::from_f32(f32::NAN); 40 * 301], 40, 301).unwrap();
    let check = |layer: &Mlp<T>, fresh: &Mlp<T>, hidden: usize, what: &str| {
        let x = input::<T>(20, hidden);
        for m in [1, 2, 3, 5, 9, 17, 20] {
            let x = x.view().rows_range(0..m).unwrap();
            let spoilt = forward(&spoiling, nan.view());
            assert!(spoilt.as_slice().iter().all(|v| v.to_f32().is_nan()));
            let (given, expected) = (bits(&forward(layer, x)), bits(&forward(fresh, x)));
            assert_eq!(given, expected, "{} {isa} {what}: {m} tokens", T::DTYPE);
        }
    };
    for sizes in [[9, 33, 61], [9, 64, 129], [9, 7, 1]] {
        for path in [Path::Fused, Path::Unfused] {
            let [layer, fresh] = [&cpu, &new()].map(|cpu| of(cpu, sizes, path));
            check(&layer, &fresh, sizes[1], &format!("{path} {sizes:?}"));
        }
    }
    check(&quantised(&cpu), &quantised(&new()), 256, "quantised");
}

#[test]
fn what_another_layer_left_in_memory_changes_no_result() {
    for isa in Isa::available() {
        other_layers_leave_no_trace::<f32>(isa);
        other_layers_leave_no_trace::<f16>(isa);
        other_layers_leave_no_trace::<bf16>(isa);
    }
}

#[test]
fn weights_are_counted_with_their_biases() {
    for path in [Path::Fused, Path::Unfused] {
        let parameters = Parameters::<f32>::new(&case([1, 256, 512])).unwrap();
        let layer = Mlp::with_path(&threads(1), &parameters.mlp(), path).unwrap();
        // These sizes are whole panels on every instruction set.
        assert_eq!(layer.weight_bytes(), 4 * (3 * 256 * 512 + 2 * 512 + 256), "{path}");
        assert_eq!(layer.gated().weight_bytes(), 4 * (2 * 256 * 512 + 2 * 512), "{path}");
    }
}
