//! Times of training steps for a comparison in turns with another process.
//!
//! A line `M K H DTYPE THREADS` on the standard input makes a block; each line `step`, `forward`, `backward` or `update` after
//! it is answered with the microseconds that one took.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::io::BufRead;
use std::time::Instant;

use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::random::normal_matrix;
use swiglu_core::{DType, Element, Gradients, Matrix, Op, SavePolicy, Wanted, bf16, f16};
use swiglu_cpu::{CallOptions, Cpu, CpuOptions, Mlp};

type Lines<'a> = dyn Iterator<Item = std::io::Result<String>> + 'a;

/// Answers lines until one makes another block, which is returned.
fn serve<T: Element>(
    [m, k, h, threads]: [usize; 4],
    lines: &mut Lines<'_>,
) -> Result<Option<String>, Box<dyn Error>> {
    let cpu = Cpu::new(&CpuOptions::default().with_threads(threads))?;
    let parameters = Parameters::<T>::new(&Case::new(Op::Mlp, [m, k, h], T::DTYPE))?;
    let params = parameters.mlp();
    let mut layer = Mlp::for_training(&cpu, &params, SavePolicy::Save)?;
    let x = normal_matrix::<T>(1, m, k, 1.0)?;
    let dy = normal_matrix::<T>(2, m, k, 1.0)?;
    let mut y = Matrix::<T>::zeros(m, k)?;
    let mut gradients = Gradients::zeros(m, &layer.gradient_shapes()?, Wanted::ALL, false)?;
    let options = CallOptions::default();
    println!("ready");
    for line in lines {
        let line = line?;
        let start = Instant::now();
        let from = match line.as_str() {
            "update" => {
                layer.update(&params)?;
                start
            }
            "step" | "forward" | "backward" => {
                let saved = layer.forward_train(x.view(), y.view_mut(), &options)?;
                let between = Instant::now();
                if line == "forward" {
                    println!("{}", (between - start).as_secs_f64() * 1e6);
                    continue;
                }
                layer.backward_into(saved, &dy, gradients.as_mut(), &options)?;
                if line == "step" { start } else { between }
            }
            _ => return Ok(Some(line)),
        };
        println!("{}", from.elapsed().as_secs_f64() * 1e6);
    }
    Ok(None)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut lines = std::io::stdin().lock().lines();
    let mut next = lines.next().transpose()?;
    while let Some(line) = next {
        let words: Vec<&str> = line.split(' ').collect();
        let [m, k, h, dtype, threads] = words[..] else { return Err(line.into()) };
        let shape = [m.parse()?, k.parse()?, h.parse()?, threads.parse()?];
        next = match dtype.parse()? {
            DType::F16 => serve::<f16>(shape, &mut lines)?,
            DType::Bf16 => serve::<bf16>(shape, &mut lines)?,
            _ => serve::<f32>(shape, &mut lines)?,
        };
    }
    Ok(())
}
