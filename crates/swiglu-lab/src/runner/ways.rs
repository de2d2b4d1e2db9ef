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
    use crate::definition::Role;
    use crate::record::Summary;

    fn way(profile: &str, plan: &str, us: Result<f64, Status>) -> ResultEntry {
        ResultEntry {
            profile: profile.into(),
            plan: Some(plan.into()),
            status: us.err().unwrap_or(Status::Ok),
            summary: us.ok().and_then(|us| Summary::of(&[us])),
            ..ResultEntry::default()
        }
    }

    #[test]
    fn the_fastest_stands_for_all_unless_one_is_at_fault() {
        let profile = |id: &str, best_of| ProfileDef {
            id: id.into(),
            peer: "p".into(),
            options: Default::default(),
            role: Role::Baseline,
            numerics: None,
            best_of,
        };
        let (plan, best) = (profile("plan", None), profile("best", Some(4)));
        assert_eq!(best.ways().len(), 4);
        assert_eq!(best.ways()[3].options["candidate"], 4);
        let none = || way("best", "d", Err(Status::Unsupported));
        let of = |ways: Vec<ResultEntry>| {
            let all = std::iter::once(way("plan", "a", Ok(3.0))).chain(ways).collect();
            let found = fastest(&[&plan, &best], all);
            assert_eq!((found.len(), found[0].plan.as_deref()), (2, Some("a")));
            found[1].clone()
        };
        let found = of(vec![way("best", "b", Ok(2.0)), way("best", "c", Ok(1.0)), none(), none()]);
        assert_eq!((found.plan.as_deref(), found.status), (Some("c"), Status::Ok));
        assert_eq!(found.notes, ["the fastest of 2"]);
        let wrong = way("best", "c", Err(Status::FailedVerification));
        let found = of(vec![way("best", "b", Ok(2.0)), wrong, none()]);
        assert_eq!((found.plan.as_deref(), found.status), (Some("c"), Status::FailedVerification));
        let found = of(vec![none(), none()]);
        assert_eq!((found.status, found.notes.len()), (Status::Unsupported, 0));
    }
}
