//! Candidates of a plan as profiles, on the simulated device.

use std::path::Path;

use super::support::definition;
use super::{expect_ok, on_device, results, text};

#[test]
fn a_plan_its_unfused_way_and_the_fastest_of_its_candidates_take_turns() {
    let Some(mut program) = on_device() else { return };
    // Enough SMs and memory that times differ, and no user's measurements.
    program.env("SWIGLU_TUNING_DIR", "/nonexistent");
    let way = |which: &str, more: &str| {
        format!("options = {{ graph = true{which} }}\nnumerics = \"pre_round+fast\"{more}")
    };
    let (plan, unfused) =
        (way(", candidate = \"planned\"", ""), way(", candidate = \"unfused\"", ""));
    let (best, wrong) = (way("", "\nbest_of = 2"), way(", candidate = 1, path = \"fused\"", ""));
    let profiles = [
        ("plan", "swiglu", "ours", plan.as_str()),
        ("unfused", "swiglu", "baseline", unfused.as_str()),
        ("best", "swiglu", "baseline", best.as_str()),
        ("wrong", "swiglu", "peer", wrong.as_str()),
    ];
    let cases = "[[cases]]\nop = [OP]\nm = \"2..=34 by 32\"\n\
         shapes = [{ hidden = 64, intermediate = 96 }]\ndtype = \"bf16\"\nheat = \"hot\"\n";
    let cases = ["gated-linear", "mlp"].map(|op| cases.replace("[OP]", &format!("{op:?}")));
    let definition = definition("candidates", "cuda", &profiles, &cases.join("\n"));
    let results = results("candidates", &definition, program, Path::new("no-python"));
    // A row for each case: of all candidates one is recorded.
    assert_eq!(results.len(), 2 * 2 * profiles.len());
    for case in results.chunks(profiles.len()) {
        let [plan, unfused, best, wrong] = case else { unreachable!() };
        expect_ok([plan, unfused, best]);
        assert_eq!(text(unfused, "plan"), "cublaslt + elementwise");
        let (planned, found) = (text(plan, "plan"), text(best, "plan"));
        let name = found.split(", expected as number ").next().unwrap();
        assert!(name.len() < found.len() && name != planned && !name.is_empty(), "{found}");
        assert_ne!(name, "cublaslt + elementwise");
        let notes = best["notes"].to_string();
        assert!(notes.contains("the fastest of "), "{notes}");
        assert!(plan["variants"].as_object().is_some_and(|v| !v.is_empty()), "{plan}");
        assert_eq!(text(wrong, "status"), "failed");
        assert!(text(wrong, "reason").contains("no path, design or decode"), "{wrong}");
    }
}
