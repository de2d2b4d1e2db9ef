//! What stands where a model or an array is expected: recognised by content, with what to do about it.

use std::path::Path;

use crate::error::{FormatError, Result, clip};

/// What the file is wanted for: it decides the advice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Model,
    Matrix,
}

/// As much of a file as is looked at.
const LOOK: usize = 4096;
pub(crate) const AGAIN: &str = "download the file again";

/// Formats by their first bytes, and what to do.
const MAGICS: [(&[u8], &str, &str); 14] = [
    (b"\x1f\x8b", "a file compressed by gzip", "unpack it: `gzip -dc FILE > NEW`"),
    (b"\x28\xb5\x2f\xfd", "a file compressed by zstd", "unpack it: `zstd -dc FILE > NEW`"),
    (b"\xfd7zXZ\0", "a file compressed by xz", "unpack it: `xz -dc FILE > NEW`"),
    (b"BZh", "a file compressed by bzip2", "unpack it: `bzip2 -dc FILE > NEW`"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it and give a file in it"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it and give a file in it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it", "save it as safetensors"),
    (b"tjgg", OLD_GGML, CONVERT_GGML),
    (b"fmgg", OLD_GGML, CONVERT_GGML),
    (b"lmgg", OLD_GGML, CONVERT_GGML),
    (b"algg", OLD_GGML, CONVERT_GGML),
    (b"\xff\xfe", "text in UTF-16, as PowerShell's > writes it", AGAIN),
    (b"%PDF-", "a PDF document", AGAIN),
    (b"\x89PNG\r\n", "a picture", AGAIN),
];
const OLD_GGML: &str = "a model of llama.cpp from before GGUF";
const CONVERT_GGML: &str = "convert the original again with a current llama.cpp";

/// Formats without a mark of their own, by extension.
const EXTENSIONS: [(&str, &str); 5] = [
    ("onnx", "an ONNX model by its name"),
    ("tflite", "a TensorFlow Lite model by its name"),
    ("msgpack", "a Flax model by its name"),
    ("mlmodel", "a Core ML model by its name"),
    ("pb", "a TensorFlow graph by its name"),
];

/// Refuses what is recognised as something else; what nobody recognises passes.
pub(crate) fn refuse_others(bytes: &[u8], path: &Path, wanted: Wanted) -> Result<()> {
    let head = &bytes[..bytes.len().min(LOOK)];
    let Some((found, help)) = what(head, bytes.len(), path, wanted) else { return Ok(()) };
    Err(FormatError::recognised(path, found, &help))
}

fn what(head: &[u8], len: usize, path: &Path, wanted: Wanted) -> Option<(String, String)> {
    if head.is_empty() {
        return Some(("the file is empty".into(), format!("{AGAIN}, or write it again")));
    }
    if let Some(pointer) = pointer(head) {
        return Some(pointer);
    }
    if head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06") {
        return Some(zip(head, path, wanted));
    }
    // A protocol, then what a pickle begins with: a frame, a collection, a long, a class or text.
    if matches!(
        head,
        [0x80, 2..=5, b'}' | b']' | b'(' | b')' | b'c' | b'X' | 0x8a | 0x8c | 0x95, ..]
    ) {
        return Some(torch(
            "a Python pickle, as torch.save and pickle.dump write it",
            path,
            wanted,
        ));
    }
    let known = MAGICS.iter().find(|(magic, ..)| head.starts_with(magic));
    if let Some((_, found, help)) = known {
        return Some(((*found).into(), (*help).into()));
    }
    if head.get(257..262) == Some(b"ustar") {
        return Some(("a tar archive".into(), "unpack it and give a file in it".into()));
    }
    if head.iter().all(|&b| b == 0) {
        let found = match len > head.len() {
            true => {
                format!("the first {LOOK} bytes are zeros, as an interrupted download leaves them")
            }
            false => format!("nothing but {len} zeros, as an interrupted download leaves them"),
        };
        return Some((found, AGAIN.into()));
    }
    text(head, len > head.len(), wanted).or_else(|| {
        let extension = path.extension()?.to_str()?;
        let (_, found) = EXTENSIONS.iter().find(|(known, _)| *known == extension)?;
        Some(((*found).into(), "save the model it was made from as safetensors".into()))
    })
}

/// Small files of version control systems that stand for large ones.
fn pointer(head: &[u8]) -> Option<(String, String)> {
    let text = std::str::from_utf8(head).ok()?;
    if text.starts_with("version https://git-lfs") || text.starts_with("version https://hawser") {
        let size = text.lines().find_map(|l| l.strip_prefix("size ")?.trim().parse::<u64>().ok());
        let of = size.map(|n| format!(" of {n} bytes")).unwrap_or_default();
        return Some((
            format!("a Git LFS pointer, not the file{of} that it stands for"),
            "run `git lfs pull` in its repository, or download the file itself".into(),
        ));
    }
    if text.starts_with("# xet version") {
        let found = "a Xet pointer, not the file that it stands for";
        return Some((found.into(), "download the file itself".into()));
    }
    (text.len() < 1024 && text.trim_start_matches("../").contains("annex/objects/")).then(|| {
        let found = "a git-annex pointer, not the file that it stands for";
        (found.into(), "run `git annex get` on it".into())
    })
}

/// PyTorch and NumPy keep their files in zip archives; the first entry's name tells which.
fn zip(head: &[u8], path: &Path, wanted: Wanted) -> (String, String) {
    let len = head.get(26..28).map_or(0, |b| usize::from(u16::from_le_bytes([b[0], b[1]])));
    let entry = String::from_utf8_lossy(head.get(30..30 + len).unwrap_or_default()).into_owned();
    let named =
        |extension: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension));
    if entry.ends_with(".npy") || named("npz") {
        let array = name(Path::new(entry.trim_end_matches(".npy")));
        let found = "an npz file, NumPy's archive of arrays".to_owned();
        let help = match wanted {
            Wanted::Model => "save its arrays with safetensors.numpy.save_file".into(),
            Wanted::Matrix => {
                let (from, to) = (name(path), path.with_extension("npy"));
                format!("take one out: `np.save('{}', np.load('{from}')['{array}'])`", name(&to))
            }
        };
        return (found, help);
    }
    // torch.save begins with the pickle.
    let scripted =
        |part: &str| entry.split_once('/').is_some_and(|(_, rest)| rest.starts_with(part));
    if wanted == Wanted::Model && (scripted("data/") || scripted("code/")) {
        let help = format!(
            "save its weights, of which the names may differ from a checkpoint's: `python -c \"import torch; \
             from safetensors.torch import save_file; save_file({{k: v.contiguous().clone() for k, v in \
             torch.jit.load('{0}', map_location='cpu').state_dict().items()}}, '{0}.safetensors')\"` in its folder",
            name(path)
        );
        return ("a program of TorchScript, as torch.jit.save writes it".into(), help);
    }
    let torch_like = ["pt", "pth", "bin", "ckpt"].iter().any(|e| named(e));
    let pickled =
        entry.ends_with(".pkl") || entry.ends_with("/version") || entry.ends_with("/byteorder");
    if torch_like || pickled || entry.is_empty() {
        return torch("a zip archive, as torch.save writes it", path, wanted);
    }
    let found = format!("a zip archive; it begins with {:?}", clip(&entry, 60));
    (found, "unpack it and give a file in it".into())
}

/// A file's name for a command, if it can stand there as it is.
fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| c.is_alphanumeric() || "._- ".contains(c);
    if name.chars().all(plain) { name.into_owned() } else { "FILE".into() }
}

fn torch(found: &str, path: &Path, wanted: Wanted) -> (String, String) {
    let help = match wanted {
        Wanted::Model => format!("convert it to safetensors: {}", torch_command(&name(path))),
        Wanted::Matrix => {
            let (from, to) = (name(path), name(&path.with_extension("npy")));
            format!(
                "if it holds one tensor: `np.save('{to}', torch.load('{from}').float().numpy())`"
            )
        }
    };
    (found.into(), help)
}

/// What converts files of PyTorch that match a pattern, run where they are.
pub(crate) fn torch_command(pattern: &str) -> String {
    format!(
        "`python -c \"import glob, torch; from safetensors.torch import save_file; \
         [save_file({{k: v.contiguous().clone() for k, v in torch.load(f, map_location='cpu', \
         weights_only=True).items()}}, f + '.safetensors') for f in glob.glob('{pattern}')]\"` \
         in its folder"
    )
}

/// Pages, errors of servers and other text.
fn text(head: &[u8], cut: bool, wanted: Wanted) -> Option<(String, String)> {
    let head = crate::bytes::without_mark(head);
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        // Cut inside a character, which is not the file's fault.
        Err(e) if cut && e.error_len().is_none() => {
            std::str::from_utf8(&head[..e.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return None,
    };
    let text = text.trim_start();
    if text.is_empty() || text.chars().any(|c| c.is_control() && !c.is_whitespace()) {
        return None;
    }
    // An index, or the answer of a server: whoever reads it says what is missing.
    if text.starts_with('{') && wanted == Wanted::Model {
        return None;
    }
    let lower = text.get(..text.len().min(64)).unwrap_or_default().to_ascii_lowercase();
    if lower.starts_with("<!doctype html")
        || lower.starts_with("<html")
        || lower.starts_with("<?xml")
    {
        let kind = if lower.starts_with("<?xml") { "XML" } else { "an HTML page" };
        let title = text.split_once("<title>").and_then(|(_, t)| t.split_once('<')).map(|(t, _)| t);
        let title = title.map(|t| format!(" ({:?})", clip(t.trim(), 60))).unwrap_or_default();
        let found = format!("{kind}{title}, such as a server sends instead of a file");
        return Some((
            found,
            format!("{AGAIN}, from its direct address and logged in if it asks for that"),
        ));
    }
    let line = clip(text.lines().next().unwrap_or_default().trim(), 60);
    let number = line.split([',', ' ', '\t', ';']).next().is_some_and(|n| n.parse::<f64>().is_ok());
    let help = match wanted {
        Wanted::Matrix if number => {
            let comma = if line.contains(',') { ", delimiter=','" } else { "" };
            format!("save it as npy: `np.save('x.npy', np.loadtxt(FILE{comma}))`")
        }
        Wanted::Matrix => "expected an array: npy, or a tensor of safetensors or GGUF".into(),
        Wanted::Model => format!("expected safetensors or GGUF: {AGAIN}"),
    };
    Some((format!("text, which begins with {line:?}"), help))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(bytes: &[u8], name: &str, wanted: Wanted) -> String {
        match refuse_others(bytes, Path::new(name), wanted) {
            Ok(()) => String::new(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn what_nobody_recognises_passes() {
        for bytes in
            [&b"\xb9\x86M\xbf\xa5\xadx>"[..], b"GGUF\x03\0\0\0", b"\x18\0\0\0\0\0\0\0{\"a\":"]
        {
            assert_eq!(said(bytes, "m.safetensors", Wanted::Model), "");
        }
        assert_eq!(said(b"{\"weight_map\":{}}", "i.json", Wanted::Model), "");
    }

    #[test]
    fn text_that_is_cut_inside_a_character_is_text() {
        let mut long = vec![b'a'; LOOK - 1];
        long.extend_from_slice("ä and more".as_bytes());
        assert!(said(&long, "m.gguf", Wanted::Model).contains("text, which begins with"));
        let mut marked = b"\xef\xbb\xbf".to_vec();
        marked.extend_from_slice(&long);
        assert!(said(&marked, "m.gguf", Wanted::Model).contains("text, which begins with"));
    }

    #[test]
    fn archives_are_told_apart_by_what_is_in_them() {
        let zip = |entry: &str| {
            let mut out = b"PK\x03\x04".to_vec();
            out.resize(26, 0);
            out.extend_from_slice(&[entry.len() as u8, 0, 0, 0]);
            out.extend_from_slice(entry.as_bytes());
            out
        };
        let e = said(&zip("x.npy"), "a.npz", Wanted::Matrix);
        assert!(e.contains("np.save('a.npy', np.load('a.npz')['x'])"), "{e}");
        let e = said(&zip("archive/data.pkl"), "model.safetensors", Wanted::Model);
        assert!(e.contains("torch.save") && e.contains("glob('model.safetensors')"), "{e}");
        let e = said(&zip("vad/data/0"), "vad.jit", Wanted::Model);
        assert!(e.contains("TorchScript") && e.contains("torch.jit.load('vad.jit'"), "{e}");
        let e = said(&zip("word/document.xml"), "a.gguf", Wanted::Model);
        assert!(e.contains("word/document.xml") && !e.contains("torch"), "{e}");
        assert!(said(&zip("")[..4], "a", Wanted::Model).contains("zip"));
    }
}
