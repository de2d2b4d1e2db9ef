//! Records as files have them since schema 3: a row for each case, with the results of its profiles.
//!
//! A sweep has hundreds of cases that differ in one number, so what a row says like the one before it is left out: fields of
//! the case, and fields of the result in the same place. A field that the row before has and this one has not is `null`. The
//! numbers of a result stand first, without their names: `[summary, preparations, error, the rest]`. A result's bytes and
//! operations are left out where they are those of its case.

use serde_json::{Map, Value, json};

use crate::case::Case;

/// The fields of [`super::Summary`], [`super::ErrorMetrics`] and [`super::Clocks`] in their order, by which they are read.
const SUMMARY: [&str; 5] = ["median", "q1", "q3", "min", "n"];
const ERROR: [&str; 3] = ["relative_frobenius", "frobenius_limit", "worst_ratio"];
const CLOCKS: [&str; 3] = ["sm_mhz", "power_w", "cpu_mhz"];
/// These stand first in a result.
const NUMBERS: [&str; 3] = ["summary", "preparations", "error"];

/// A record with rows in place of its cases and results; as it is, where some case has no results or some result no case.
pub(super) fn pack(mut record: Value) -> Value {
    let (cases, results) = (&record["cases"], record["results"].as_array());
    // Only the first result of a case has its key.
    let rows = results.map_or(&[][..], Vec::as_slice).chunk_by(|_, b| b["case_key"].is_null());
    let known =
        |row: &[Value]| row[0]["case_key"].as_str().is_some_and(|key| cases[key].is_object());
    let count = cases.as_object().map_or(0, Map::len);
    if rows.clone().count() != count || !rows.clone().all(known) {
        return record;
    }
    let mut before = [Value::Null, Value::Null];
    let row = |results: &[Value]| {
        let mut facts = cases[results[0]["case_key"].as_str().unwrap_or_default()].clone();
        if let Some(clocks) = facts.get_mut("clocks").and_then(Value::as_array_mut) {
            clocks.iter_mut().for_each(|clocks| *clocks = listed(clocks, &CLOCKS));
        }
        let own = case_of(&facts).map(|(_, amounts)| amounts);
        let (numbers, rest): (Vec<_>, Vec<_>) = results.iter().map(|r| split(r, own)).unzip();
        let rest = Value::Array(rest);
        let said = numbers.into_iter().enumerate().map(|(i, mut said)| {
            said.push(changed(&before[1][i], &rest[i]));
            while said.last().is_some_and(|last| last.is_null() || *last == json!({})) {
                said.pop();
            }
            said
        });
        let said: Vec<_> = said.collect();
        let said = json!({ "facts": changed(&before[0], &facts), "results": said });
        before = [facts, rest];
        said
    };
    let packed: Value = rows.map(row).collect();
    if let Some(map) = record.as_object_mut() {
        map.retain(|name, _| name != "cases" && name != "results");
        map.insert("rows".into(), packed);
    }
    record
}

/// The numbers of a result stand apart from the rest, which leaves out what its case says too.
fn split(result: &Value, own: Option<[(&str, f64); 2]>) -> (Vec<Value>, Value) {
    let mut fields = result.as_object().cloned().unwrap_or_default();
    fields.remove("case_key");
    for (name, value) in own.into_iter().flatten() {
        if fields.get(name).and_then(Value::as_f64) == Some(value) {
            fields.remove(name);
        }
    }
    let [summary, preparations, error] =
        NUMBERS.map(|name| fields.remove(name).unwrap_or_default());
    let numbers = vec![listed(&summary, &SUMMARY), preparations, listed(&error, &ERROR)];
    (numbers, fields.into())
}

/// The record as it was; none where the rows are not what [`pack`] writes.
pub(super) fn unpack(mut record: Value) -> Option<Value> {
    let rows = record.as_object_mut()?.remove("rows")?;
    let (mut cases, mut results) = (Map::new(), Vec::new());
    let mut before = [Value::Null, Value::Null];
    for said in rows.as_array()? {
        let facts = merged(&before[0], &said["facts"]);
        let (key, amounts) = case_of(&facts)?;
        let said = said["results"].as_array()?;
        let rest = said.iter().enumerate().map(|(i, said)| merged(&before[1][i], &said[3]));
        let rest: Value = rest.collect();
        for (i, said) in said.iter().enumerate() {
            let mut fields = rest[i].as_object()?.clone();
            for (at, name) in NUMBERS.into_iter().enumerate().filter(|(at, _)| !said[at].is_null())
            {
                fields.insert(name.into(), said[at].clone());
            }
            for (name, amount) in amounts {
                fields.entry(name).or_insert(amount.into());
            }
            fields.insert("case_key".into(), key.clone().into());
            results.push(Value::Object(fields));
        }
        cases.insert(key, facts.clone());
        before = [facts, rest];
    }
    (record["cases"], record["results"]) = (cases.into(), results.into());
    Some(record)
}

/// Results have this key of their case, and these amounts where they do not say otherwise.
fn case_of(facts: &Value) -> Option<(String, [(&'static str, f64); 2])> {
    let case: Case = serde_json::from_value(facts["case"].clone()).ok()?;
    Some((case.key(), [("bytes", case.compulsory_bytes()), ("flops", case.flops())]))
}

/// The values of these fields.
fn listed(value: &Value, names: &[&str]) -> Value {
    match value.is_object() {
        true => names.iter().map(|name| value.get(*name).cloned().unwrap_or_default()).collect(),
        false => value.clone(),
    }
}

/// What is to be said of a value beside the one before it.
fn changed(before: &Value, now: &Value) -> Value {
    let (Value::Object(before), Value::Object(now)) = (before, now) else { return now.clone() };
    let mut said = Map::new();
    for (name, value) in now {
        let known = before.get(name);
        if known != Some(value) {
            said.insert(name.clone(), changed(known.unwrap_or(&Value::Null), value));
        }
    }
    let gone = before.keys().filter(|name| !now.contains_key(*name));
    said.extend(gone.map(|name| (name.clone(), Value::Null)));
    said.into()
}

/// The value that was said so.
fn merged(before: &Value, said: &Value) -> Value {
    let (Value::Object(before), Value::Object(said)) = (before, said) else {
        return if said.is_null() { before.clone() } else { said.clone() };
    };
    let mut now = before.clone();
    for (name, value) in said {
        let known = now.remove(name).unwrap_or_default();
        if !value.is_null() {
            now.insert(name.clone(), merged(&known, value));
        }
    }
    now.into()
}
