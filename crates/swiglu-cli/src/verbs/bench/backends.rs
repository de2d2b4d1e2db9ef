//! Other libraries, as profiles of their peers.

use clap::ValueEnum;
use serde_json::json;
use swiglu_lab::{Case, CaseOp, DeviceKind, ProfileDef, Role};

use crate::verbs::lab::adhoc;

/// A backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    /// Every one; those that are not installed say so
    All,
    /// PyTorch, as users write it and compiled
    Torch,
    /// Kernels in Triton (CUDA)
    Triton,
    /// Liger's kernel (CUDA)
    Liger,
    /// quack's GEMM (Hopper, Blackwell)
    Quack,
    /// ggml (CPU)
    Ggml,
    /// A copy of the same bytes: a limit
    Copy,
}

/// The profiles of backends for a case. Those that never run on a device have a row there too, in which
/// they say so.
pub(super) fn profiles(backends: &[Backend], case: &Case) -> Vec<ProfileDef> {
    let trains = case.op == CaseOp::MlpTrain;
    // Gradients of the activation go where there is memory for them.
    let into = |way| match case.op {
        CaseOp::ActivationBackward => format!("{way}_into"),
        _ => String::from(way),
    };
    let way = |id: &str, peer: &str, role, way: Option<&str>| {
        let options = way.map_or(json!({}), |way| json!({ "way": way }));
        // Nobody trains by replaying a graph.
        let options = if trains { options } else { adhoc::graph(case, options) };
        adhoc::way(id, peer, role, options)
    };
    let peer = |id: &str, peer: &str, of: Option<&str>| way(id, peer, Role::Peer, of);
    let (activation, cpu) = (case.op == CaseOp::Activation, case.device == DeviceKind::Cpu);
    let of = |backend: &Backend| match backend {
        Backend::All => Vec::new(),
        // It has other ways of quantised weights.
        Backend::Torch if case.weights.is_some() => {
            let decoded = way("torch-decoded", "weight-only", Role::Peer, Some("decoded"));
            vec![decoded, peer("torch-compile", "weight-only", Some("compile"))]
        }
        Backend::Torch => {
            let eager = way("torch-eager", "torch", Role::Baseline, Some(&into("eager")));
            let mut ways = vec![eager, peer("torch-compile", "torch", Some(&into("compile")))];
            if activation {
                ways.push(peer("torch-composed", "torch", Some("eager_composed")));
            }
            ways.extend(match case.op {
                CaseOp::Activation if cpu => {
                    Some(peer("torch-compile-into", "torch", Some("compile_into")))
                }
                CaseOp::GatedLinear | CaseOp::Mlp if cpu => {
                    Some(peer("torch-onednn", "torch", Some("onednn_postops")))
                }
                _ => None,
            });
            ways
        }
        Backend::Triton => vec![peer("triton", "triton", case.op.has_weights().then_some("dual"))],
        Backend::Liger => {
            let packed = trains.then(|| peer("liger-packed", "liger", Some("packed")));
            [peer("liger", "liger", None)].into_iter().chain(packed).collect()
        }
        Backend::Quack => {
            let more = if trains { &["recompute", "accumulate"][..] } else { &[] };
            let more = more.iter().map(|of| peer(&format!("quack-{of}"), "quack", Some(of)));
            [peer("quack", "quack", None)].into_iter().chain(more).collect()
        }
        Backend::Ggml => {
            let mut ggml = peer("ggml", "ggml", None);
            if case.weights.is_some() {
                // As it computes with such weights; it is judged as that.
                ggml.options.insert("activations".into(), "q8".into());
            }
            vec![ggml]
        }
        Backend::Copy => vec![way("copy", "copy", Role::Ceiling, None)],
    };
    let all = backends.contains(&Backend::All);
    let wanted = |b: &&Backend| all || backends.contains(b);
    Backend::value_variants().iter().filter(wanted).flat_map(of).collect()
}
