//! What `inspect` shows of a model, and what `run` says of the layer that it took.

mod support;

use support::{Files, Tensor, safetensors, swiglu, tensor};

fn block(names: [&'static str; 3]) -> Vec<Tensor> {
    let [gate, up, down] = names;
    vec![tensor(gate, &[10, 6]), tensor(up, &[10, 6]), tensor(down, &[6, 10])]
}

const EXPERTS: [[&str; 3]; 3] = [
    [
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.0.down_proj.weight",
    ],
    [
        "model.layers.0.mlp.experts.1.gate_proj.weight",
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "model.layers.0.mlp.experts.1.down_proj.weight",
    ],
    [
        "model.layers.0.mlp.experts.2.gate_proj.weight",
        "model.layers.0.mlp.experts.2.up_proj.weight",
        "model.layers.0.mlp.experts.2.down_proj.weight",
    ],
];

#[test]
fn an_expert_unlike_the_others_has_a_line_of_its_own() {
    let files = Files::new();
    let mut tensors: Vec<Tensor> = EXPERTS.into_iter().flat_map(block).collect();
    let whole = files.write("whole.safetensors", safetensors(&tensors));
    let shown = swiglu(&["inspect", &whole]);
    assert!(shown.code == Some(0) && shown.stdout.contains("3 experts"), "{shown:?}");
    tensors.remove(4);
    let odd = files.write("odd.safetensors", safetensors(&tensors));
    let shown = swiglu(&["inspect", &odd]);
    assert_eq!(shown.code, Some(1), "{shown:?}");
    for part in ["experts 0, 2", "expert 1: refused:", "no up weight"] {
        assert!(shown.stdout.contains(part), "`{part}` in {shown:?}");
    }
}

#[test]
fn what_an_index_names_and_is_not_there_is_shown() {
    let files = Files::new();
    files.write("a.safetensors", safetensors(&block(EXPERTS[0])));
    let map: Vec<String> =
        EXPERTS[0].iter().map(|n| format!("\"{n}\":\"a.safetensors\"")).collect();
    let index = format!(
        "{{\"weight_map\":{{{},\"model.norm.weight\":\"b.safetensors\",\"x\":7}}}}",
        map.join(",")
    );
    let index = files.write("model.safetensors.index.json", index.as_bytes());
    let shown = swiglu(&["inspect", &index]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    for part in ["defect ", "b.safetensors is not there", "model.norm.weight", "given 7"] {
        assert!(shown.stdout.contains(part), "`{part}` in {shown:?}");
    }
}

#[test]
fn a_run_says_which_part_of_the_model_it_took() {
    let files = Files::new();
    let mut tensors = block([
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]);
    tensors.extend(block([
        "talker.model.layers.0.mlp.gate_proj.weight",
        "talker.model.layers.0.mlp.up_proj.weight",
        "talker.model.layers.0.mlp.down_proj.weight",
    ]));
    let path = files.write("model.safetensors", safetensors(&tensors));
    let args = ["run", "--seconds", "0.01", "--device", "cpu", "--weights", &path];
    let taken = swiglu(&args);
    assert_eq!(taken.code, Some(0), "{taken:?}");
    assert!(taken.stdout.contains("the part model; talker.model too"), "{taken:?}");
    let other = swiglu(&[&args[..], &["--prefix", "talker.model"]].concat());
    assert!(other.code == Some(0) && !other.stdout.contains("note "), "{other:?}");
}
