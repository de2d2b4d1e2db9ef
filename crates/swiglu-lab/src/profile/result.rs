//! Results of the lab as subjects of an analysis, and their kernels under the profiler.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path as File;

use swiglu_core::{Op, Path};

use super::analysis::{Analysis, Subject, analyse};
use super::class::Ceilings;
use super::ncu::{Ncu, NcuError};
use crate::case::{Case, DeviceKind};
use crate::definition::{Experiment, ProfileDef, Role};
use crate::peer::protocol::{PROTOCOL, Request};
use crate::record::{Profiled, ResultEntry, Status};

/// The written analysis of a result; none where nothing was measured, or where it is not known how it
/// was computed, which is known of our own ways.
pub fn analyse_result(
    experiment: &Experiment,
    case: &Case,
    result: &ResultEntry,
    ceilings: &Ceilings,
) -> Option<Analysis> {
    let profile = experiment.profile(&result.profile)?;
    let us = result.summary.filter(|_| result.status == Status::Ok)?.median;
    Some(analyse(&subject(profile, case, result)?, us, ceilings))
}

fn subject(profile: &ProfileDef, case: &Case, result: &ResultEntry) -> Option<Subject> {
    let problem = case.problem()?;
    let option = |name: &str| profile.options.get(name);
    if profile.role != Role::Ours {
        return None;
    }
    // Our peer tells the plan.
    let said = || result.plan.iter().chain(&result.notes);
    let noted = |word: &str| said().any(|n| n.split([' ', ',']).any(|w| w == word));
    let asked = option("path").and_then(|v| v.as_str()) == Some("unfused");
    let path = if noted("unfused") || asked { Path::Unfused } else { Path::Fused };
    let launches = match (problem.op, path) {
        (Op::Mlp, Path::Unfused) => 3,
        (Op::GatedLinear, Path::Unfused) | (Op::Mlp, Path::Fused) => 2,
        _ => 1,
    };
    let graph = option("graph").and_then(|v| v.as_bool()) == Some(true);
    Some(Subject {
        problem,
        device: case.device,
        path,
        launches,
        graph: graph && case.device == DeviceKind::Cuda,
        heat: case.heat,
    })
}

/// Runs a peer under the profiler for one call of a case, and says what was counted or why nothing.
pub fn count(
    ncu: &Result<Ncu, NcuError>,
    peer: &[OsString],
    case: &Case,
    profile: &ProfileDef,
    seed: u64,
) -> Profiled {
    let counted = ncu.as_ref().map_err(ToString::to_string).and_then(|ncu| {
        let Some((program, arguments)) = peer.split_first() else { return Ok(Vec::new()) };
        let requests = requests(case, profile, seed).map_err(|e| e.to_string())?;
        let counted = ncu.profile(File::new(program), arguments, Some(requests.path()));
        counted.map_err(|e| e.to_string())
    });
    let (reason, kernels) = (counted.as_ref().err().cloned(), counted.unwrap_or_default());
    Profiled { case_key: case.key(), profile: profile.id.clone(), kernels, reason }
}

/// What a peer is asked, as a file: to compute once. Verification is one call.
fn requests(
    case: &Case,
    profile: &ProfileDef,
    seed: u64,
) -> std::io::Result<tempfile::NamedTempFile> {
    let id = 1;
    let asked = [
        Request::Hello { protocol: PROTOCOL, device: case.device },
        Request::prepare(id, case, profile, seed),
        Request::Verify { id, rows: vec![0] },
        Request::Quit,
    ];
    let mut file = tempfile::NamedTempFile::new()?;
    for request in &asked {
        serde_json::to_writer(&mut file, request)?;
        writeln!(file)?;
    }
    file.flush()?;
    Ok(file)
}
