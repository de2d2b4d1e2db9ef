//! Files of layers, as tests write them.

use swiglu::BlockType;

/// A GGUF file of `[256, 256]` tensors.
pub(crate) fn gguf(tensors: &[(String, BlockType, Vec<u8>)]) -> Vec<u8> {
    let string = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    let mut file = [b"GGUF".as_slice(), &3u32.to_le_bytes()].concat();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(string("general.architecture"));
    file.extend(8u32.to_le_bytes());
    file.extend(string("llama"));
    let mut data = Vec::new();
    for (name, block, bytes) in tensors {
        file.extend(string(name));
        file.extend(2u32.to_le_bytes());
        file.extend([256u64, 256].map(u64::to_le_bytes).concat());
        file.extend(block.id().to_le_bytes());
        file.extend((data.len() as u64).to_le_bytes());
        data.extend_from_slice(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    [file, data].concat()
}
