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

/// A record with rows in place of its cases and results; as it is, where some case has no results or some result no case.
pub(super) fn pack(mut record: Value) -> Value {
    let (cases, results) = (&record["cases"], &record["results"]);
    let mut rows: Vec<(String, Vec<&Value>)> = Vec::new();
    for result in results.as_array().into_iter().flatten() {
        match (result["case_key"].as_str(), rows.last_mut()) {
            (None, Some((_, row))) => row.push(result),
            (key, _) => rows.push((key.unwrap_or_default().to_owned(), vec![result])),
        }
    }
    let known = |(key, _): &(String, Vec<&Value>)| cases.get(key).is_some();
    if cases.as_object().is_none_or(|cases| cases.len() != rows.len()) || !rows.iter().all(known) {
        return record;
    }
    let (mut before, mut packed) = (Row::default(), Vec::new());
    for (key, results) in rows {
        let (row, said) = Row::of(&cases[&key], results).beside(&before);
        packed.push(said);
        before = row;
    }
    if let Some(map) = record.as_object_mut() {
        map.retain(|name, _| name != "cases" && name != "results");
        map.insert("rows".into(), packed.into());
    }
    record
}

/// The record as it was; none where the rows are not what [`pack`] writes.
pub(super) fn unpack(mut record: Value) -> Option<Value> {
    let rows = record.as_object_mut()?.remove("rows")?;
    let (mut cases, mut results, mut before) = (Map::new(), Vec::new(), Row::default());
    for said in rows.as_array()? {
        let facts = merged(&before.facts, said.get("facts").unwrap_or(&Value::Null));
        let case: Case = serde_json::from_value(facts["case"].clone()).ok()?;
        let mut row = Row { facts: facts.clone(), results: Vec::new() };
        for (i, result) in said.get("results")?.as_array()?.iter().enumerate() {
            let none = Value::Null;
            let rest =
                merged(before.results.get(i).unwrap_or(&none), result.get(3).unwrap_or(&none));
            row.results.push(rest.clone());
            let mut whole = rest;
            let fields = whole.as_object_mut()?;
            for (at, name) in ["summary", "preparations", "error"].into_iter().enumerate() {
                if let Some(value) = result.get(at).filter(|value| !value.is_null()) {
                    fields.insert(name.into(), value.clone());
                }
            }
            fields.entry("bytes").or_insert(case.compulsory_bytes().into());
            fields.entry("flops").or_insert(case.flops().into());
            fields.insert("case_key".into(), case.key().into());
            results.push(whole);
        }
        cases.insert(case.key(), facts);
        before = row;
    }
    (record["cases"], record["results"]) = (cases.into(), results.into());
    Some(record)
}

/// What a row says like the one before it is told by comparing with that.
#[derive(Debug, Clone, Default)]
struct Row {
    facts: Value,
    /// Without their numbers.
    results: Vec<Value>,
}

/// A row with the numbers of its results.
struct Whole(Row, Vec<Vec<Value>>);

impl Row {
    fn of(facts: &Value, results: Vec<&Value>) -> Whole {
        let mut facts = facts.clone();
        if let Some(clocks) = facts.get_mut("clocks").and_then(Value::as_array_mut) {
            clocks.iter_mut().for_each(|clocks| *clocks = listed(clocks, &CLOCKS));
        }
        let case = serde_json::from_value::<Case>(facts["case"].clone()).ok();
        let own = case.map(|case| [("bytes", case.compulsory_bytes()), ("flops", case.flops())]);
        let (mut rest, mut numbers) = (Vec::new(), Vec::new());
        for result in results {
            let mut fields = result.as_object().cloned().unwrap_or_default();
            fields.remove("case_key");
            for (name, value) in own.into_iter().flatten() {
                if fields.get(name).and_then(Value::as_f64) == Some(value) {
                    fields.remove(name);
                }
            }
            let mut number = |name| fields.remove(name).unwrap_or_default();
            let (summary, preparations, error) =
                (number("summary"), number("preparations"), number("error"));
            numbers.push(vec![listed(&summary, &SUMMARY), preparations, listed(&error, &ERROR)]);
            rest.push(fields.into());
        }
        Whole(Row { facts, results: rest }, numbers)
    }
}

impl Whole {
    /// The row, and what it says beside the one before it.
    fn beside(self, before: &Row) -> (Row, Value) {
        let Whole(row, numbers) = self;
        let none = Value::Null;
        let result = |(i, mut said): (usize, Vec<Value>)| {
            said.push(changed(before.results.get(i).unwrap_or(&none), &row.results[i]));
            while said.last().is_some_and(|last| last.is_null() || *last == json!({})) {
                said.pop();
            }
            said
        };
        let results: Vec<_> = numbers.into_iter().enumerate().map(result).collect();
        let said = json!({ "facts": changed(&before.facts, &row.facts), "results": results });
        (row, said)
    }
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
        match before.get(name) {
            Some(known) if known == value => {}
            Some(known) => drop(said.insert(name.clone(), changed(known, value))),
            None => drop(said.insert(name.clone(), value.clone())),
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
        match value {
            Value::Null => drop(now.remove(name)),
            _ => {
                let known = now.get(name).cloned().unwrap_or_default();
                now.insert(name.clone(), merged(&known, value));
            }
        }
    }
    now.into()
}
