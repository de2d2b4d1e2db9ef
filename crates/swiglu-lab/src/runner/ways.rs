//! Profiles that are the fastest of several ways: every way takes turns, one is recorded.

use crate::definition::ProfileDef;
use crate::record::{ResultEntry, Status};

/// Of each profile its result, from those of all ways in the order of their profiles.
pub(super) fn fastest(profiles: &[&ProfileDef], results: Vec<ResultEntry>) -> Vec<ResultEntry> {
    let has_ways = |id: &str| profiles.iter().any(|p| p.id == id && p.best_of.is_some());
    let of_profile = |ways: &[ResultEntry]| match has_ways(&ways[0].profile) {
        true => one_of(ways.to_vec()),
        false => ways.last().cloned(),
    };
    results.chunk_by(|a, b| a.profile == b.profile).filter_map(of_profile).collect()
}

/// The fastest. A way that is wrong or failed is told instead: nobody knows what it would have come to.
fn one_of(mut ways: Vec<ResultEntry>) -> Option<ResultEntry> {
    let at_fault = |way: &ResultEntry| !matches!(way.status, Status::Ok | Status::Unsupported);
    if let Some(at) = ways.iter().position(at_fault) {
        return Some(ways.swap_remove(at));
    }
    let count = ways.iter().filter(|way| way.status == Status::Ok).count();
    let median = |way: &ResultEntry| way.summary.map_or(f64::INFINITY, |s| s.median);
    let mut best = ways.into_iter().min_by(|a, b| median(a).total_cmp(&median(b)))?;
    if count > 0 {
        best.notes.push(format!("the fastest of {count}"));
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Summary;

    #[test]
    fn one_that_is_at_fault_stands_for_all() {
        let best = ProfileDef { id: "best".into(), best_of: Some(4), ..ProfileDef::default() };
        let way = |plan: &str, us: Result<f64, Status>| ResultEntry {
            profile: "best".into(),
            plan: Some(plan.into()),
            status: us.err().unwrap_or(Status::Ok),
            summary: us.ok().and_then(|us| Summary::of(&[us])),
            ..ResultEntry::default()
        };
        let lacking = || way("d", Err(Status::Unsupported));
        let wrong = way("c", Err(Status::FailedVerification));
        for (ways, plan, status, notes) in [
            (vec![way("b", Ok(2.0)), way("c", Ok(1.0)), lacking()], "c", Status::Ok, 1),
            (vec![way("b", Ok(2.0)), wrong, lacking()], "c", Status::FailedVerification, 0),
            (vec![lacking(), lacking()], "d", Status::Unsupported, 0),
        ] {
            let found = &fastest(&[&best], ways)[0];
            let notes_of = found.notes.len();
            assert_eq!(
                (found.plan.as_deref(), found.status, notes_of),
                (Some(plan), status, notes)
            );
        }
    }
}
