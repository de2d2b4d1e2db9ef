//! What an experiment claims.

use serde::{Deserialize, Serialize};
use toml::{Spanned, Value};

use super::values::Many;
use super::{ProfileDef, Role};
use crate::error::Result;
use crate::place::Place;

/// What is claimed, in a form that records can answer. The statistic is the geometric mean over all cases of
/// median(against) ÷ median(subject): above 1 the subject is faster.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Claim {
    /// The claim in words.
    pub text: String,
    /// The profile it is about.
    pub subject: String,
    /// What the subject is compared with in each case.
    pub against: Against,
    /// What the statistic must reach.
    pub kind: ClaimKind,
    /// A case whose ratio is below this is an exception.
    pub floor: Option<f64>,
    /// A case that takes more than so many times as long as one with more tokens, and all else alike, is an exception too.
    pub monotone: Option<f64>,
    /// So many exceptions leave the claim standing.
    pub exceptions: usize,
}

/// What the statistic of a claim must reach, with a margin that noise allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum ClaimKind {
    /// The whole interval is at least 1, and the estimate at least the goal.
    Faster {
        /// At least 1.
        goal: f64,
    },
    /// The whole interval is at least [`ClaimKind::NOT_SLOWER`].
    #[default]
    NotSlower,
    /// The whole interval is at least this share of what a ceiling gives.
    Reaches {
        /// Above 0 and at most 1.
        share: f64,
    },
}

impl ClaimKind {
    /// What measurement can tell from 1.
    pub const NOT_SLOWER: f64 = 0.98;

    /// What the lower end of the interval must be at least.
    pub const fn limit(self) -> f64 {
        match self {
            ClaimKind::Faster { .. } => 1.0,
            ClaimKind::NotSlower => Self::NOT_SLOWER,
            ClaimKind::Reaches { share } => share,
        }
    }

    /// What the estimate must be at least.
    pub const fn goal(self) -> f64 {
        match self {
            ClaimKind::Faster { goal } => goal,
            ClaimKind::NotSlower | ClaimKind::Reaches { .. } => self.limit(),
        }
    }
}

/// What a subject is compared with.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Against {
    /// In each case the fastest of these; every one of them must be available.
    Profiles(Vec<String>),
    /// In each case the fastest of those with these roles that are available.
    Best(Vec<Role>),
}

impl Default for Against {
    fn default() -> Self {
        Self::Best(vec![Role::Baseline, Role::Peer])
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawClaim {
    pub(super) text: Spanned<String>,
    subject: Spanned<String>,
    against: Spanned<Many<String>>,
    kind: Spanned<String>,
    goal: Option<Spanned<Value>>,
    share: Option<Spanned<Value>>,
    floor: Option<Spanned<Value>>,
    monotone: Option<Spanned<Value>>,
    exceptions: Option<Spanned<u32>>,
}

pub(super) fn claim(raw: RawClaim, profiles: &[ProfileDef], place: &Place<'_>) -> Result<Claim> {
    let all: Vec<&str> = profiles.iter().map(|p| p.id.as_str()).collect();
    let unknown = |id: &str| format!("unknown profile `{id}`: expected one of {}", all.join(", "));
    let subject = raw.subject.get_ref();
    place.expect(all.contains(&subject.as_str()), &raw.subject, unknown(subject))?;
    let against = against(&raw.against, place)?;
    if let Against::Profiles(ids) = &against {
        for id in ids {
            place.expect(all.contains(&id.as_str()), &raw.against, unknown(id))?;
        }
        let message = "claim.against names the subject itself: expected other profiles";
        place.expect(!ids.contains(subject), &raw.against, message)?;
    }
    let number =
        |what: &str, n: &Option<Spanned<Value>>, expected: &str, fits: fn(&f64) -> bool| {
            let Some(n) = n else { return Ok(None) };
            let given = n.get_ref();
            let x = given.as_float().or(given.as_integer().map(|n| n as f64)).filter(fits);
            let message = || format!("claim.{what} = {given}: expected a number {expected}");
            x.map(Some).ok_or_else(|| place.at(n.span(), message()))
        };
    let goal = number("goal", &raw.goal, "from 1 on", |x| *x >= 1.0)?;
    let share = number("share", &raw.share, "above 0 and at most 1", |x| *x > 0.0 && *x <= 1.0)?;
    let floor = number("floor", &raw.floor, "above 0", |x| *x > 0.0)?;
    let of_more = |x: &f64| (1.0..2.0).contains(x);
    let monotone = number("monotone", &raw.monotone, "from 1 on and below 2", of_more)?;
    if let (Some(x), Some(raw)) = (monotone, &raw.monotone) {
        let message = format!("claim.monotone = {x}: expected a floor, of at least its inverse");
        place.expect(floor.is_some_and(|floor| floor * x >= 1.0), raw, message)?;
    }
    let kind = match (raw.kind.get_ref().as_str(), goal, share) {
        ("faster", goal, None) => ClaimKind::Faster { goal: goal.unwrap_or(1.0) },
        ("not-slower", None, None) => ClaimKind::NotSlower,
        ("reaches", None, Some(share)) => ClaimKind::Reaches { share },
        (kind, ..) => {
            let message = format!(
                "claim.kind = `{kind}`: expected faster, with or without a goal; not-slower; or reaches \
                 with a share"
            );
            return Err(place.at(raw.kind.span(), message));
        }
    };
    if let Some(exceptions) = &raw.exceptions {
        let message = "claim.exceptions: expected a floor that they are below";
        place.expect(floor.is_some(), exceptions, message)?;
    }
    Ok(Claim {
        text: place.sentence("claim.text", &raw.text)?,
        subject: raw.subject.into_inner(),
        against,
        kind,
        floor,
        monotone,
        exceptions: raw.exceptions.map_or(0, |n| n.into_inner() as usize),
    })
}

/// `["a", "b"]`, `"a"`, or `"best:peer,baseline"`.
fn against(raw: &Spanned<Many<String>>, place: &Place<'_>) -> Result<Against> {
    let given = &raw.get_ref().0;
    let message = "claim.against is empty: expected profiles to compare with";
    place.expect(!given.is_empty(), raw, message)?;
    let roles = given[0].strip_prefix("best:").filter(|_| given.len() == 1);
    let Some(roles) = roles else { return Ok(Against::Profiles(given.clone())) };
    let role = |name: &str| {
        let known = [Role::Baseline, Role::Peer, Role::Ceiling];
        known.into_iter().find(|role| role.name() == name).ok_or_else(|| {
            let expected = "expected best: with some of baseline, peer, ceiling";
            place.at(raw.span(), format!("claim.against: unknown role `{name}`: {expected}"))
        })
    };
    roles.split(',').map(str::trim).map(role).collect::<Result<_>>().map(Against::Best)
}
