//! Runs the binary and writes the files it is given.

// Every test binary uses its own part of this; a helper of a test ends by panicking.
#![allow(dead_code, unreachable_pub, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

pub const STORIES: &str = swiglu_fixtures::STORIES15M_FILE;
pub const SMOLLM2: &str = swiglu_fixtures::SMOLLM2_FILE;

/// How a run of the binary ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Bad input, as a JSON document; its message.
    #[track_caller]
    pub fn refused_as_json(&self) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(2), ""), "{self:?}");
        let line = self.stderr.lines().last().unwrap_or_default();
        let document: Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        document["error"]["message"].as_str().unwrap_or_default().to_owned()
    }

    /// Bad input: exit code 2, one clear message with `parts` in it, nothing on standard output.
    #[track_caller]
    pub fn refused(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(2), "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "expected {part:?}: {self:?}");
        }
    }
}

/// Where the runs of a test exclude each other, and none of other tests.
pub fn locks() -> PathBuf {
    let test = std::thread::current().name().unwrap_or("unnamed").replace("::", "-");
    let dir = format!("{}-{test}", env!("CARGO_CRATE_NAME"));
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("locks").join(dir)
}

/// The program on a machine without a GPU, whatever this one has.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_swiglu"));
    command.stdin(Stdio::null()).env_remove("NO_COLOR");
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("SWIGLU_CUDA_LIBRARY_PATH");
    command.env("SWIGLU_LAB_LOCK_DIR", locks());
    command
}

pub fn swiglu(args: &[&str]) -> Ended {
    end(command().args(args))
}

pub fn end(command: &mut Command) -> Ended {
    let output = command.output().expect("the binary starts");
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("standard output is UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("standard error is UTF-8"),
    }
}

/// The JSON document of a run that must succeed.
#[track_caller]
pub fn json_of(args: &[&str]) -> Value {
    let ended = swiglu(&[args, &["--json"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.json()
}

/// A tensor to be written.
pub struct Tensor {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

pub fn tensor(name: &'static str, shape: &[usize]) -> Tensor {
    let values = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * 0.7).sin() * 0.3);
    Tensor { name, shape: shape.to_vec(), values: values.collect() }
}

/// The tensors of a small Llama layer, K = 6 and H = 10.
pub fn layer_tensors() -> Vec<Tensor> {
    vec![
        tensor("model.layers.0.mlp.gate_proj.weight", &[10, 6]),
        tensor("model.layers.0.mlp.up_proj.weight", &[10, 6]),
        tensor("model.layers.0.mlp.down_proj.weight", &[6, 10]),
    ]
}

/// A safetensors file of `f32` tensors.
pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for t in tensors {
        let start = data.len();
        data.extend(t.values.iter().flat_map(|v| v.to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": t.shape, "data_offsets": [start, data.len()]});
        header.insert(t.name.to_owned(), entry);
    }
    raw_safetensors(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with any header.
pub fn raw_safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// An npy file of `f32`.
pub fn npy(rows: usize, cols: usize, values: &[f32]) -> Vec<u8> {
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((dict.len() as u16).to_le_bytes());
    out.extend(dict.as_bytes());
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    out
}

/// The data of an npy file of `f32`.
pub fn npy_values(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("the file is there");
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    bytes[start..].chunks_exact(4).map(word).collect()
}

/// An experiment of these profiles and cases; the first profile is claimed to be as fast as the second
/// in every case.
pub fn definition(id: &str, device: &str, profiles: &[Profile<'_>], cases: &str) -> String {
    let tables = profiles.iter().map(|(id, peer, role, more)| {
        format!("[[profiles]]\nid = \"{id}\"\npeer = \"{peer}\"\nrole = \"{role}\"\n{more}\n")
    });
    format!(
        "schema = 2\nid = \"{id}\"\ntitle = \"A test\"\nquestion = \"Is it so?\"\nwhy = \"To see.\"\n\
         device = \"{device}\"\n{}{cases}\n[metrics]\ngroups = [\"latency\"]\n[claim]\n\
         text = \"It is.\"\nsubject = \"{}\"\nagainst = [\"{}\"]\nkind = \"faster\"\n\
         [boundary]\ntext = \"All else.\"\n",
        tables.collect::<String>(),
        profiles[0].0,
        profiles[1].0,
    )
}

/// Id, peer and role of a profile, and what else it says.
pub type Profile<'a> = (&'a str, &'a str, &'a str, &'a str);

/// A lab in `dir` with one experiment; its path.
pub fn lab(dir: &Path, id: &str, definition: &str) -> String {
    let lab = dir.join("lab");
    for part in ["experiments", "peers"] {
        std::fs::create_dir_all(lab.join(part)).expect("the directory is empty");
    }
    std::fs::write(lab.join(format!("experiments/{id}.toml")), definition)
        .expect("the definition can be written");
    lab.display().to_string()
}

/// A directory for a test's files.
pub struct Files(tempfile::TempDir);

impl Files {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The path of a file that does not exist yet, as text.
    pub fn name(&self, name: &str) -> String {
        self.path(name).to_str().expect("the path is UTF-8").to_owned()
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), bytes).expect("the file can be written");
        self.name(name)
    }

    /// What is in the directory.
    pub fn list(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("the directory is there");
        let name = |e: std::io::Result<std::fs::DirEntry>| {
            e.expect("the entry is there").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}
