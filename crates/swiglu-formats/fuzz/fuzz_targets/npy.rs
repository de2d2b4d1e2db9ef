//! Any bytes as an npy file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swiglu_formats::matrix_from_npy_bytes;

fuzz_target!(|data: &[u8]| {
    if let Ok(m) = matrix_from_npy_bytes(data.to_vec()) {
        let _ = m.to_f64();
        let _ = m.to::<f32>();
    }
});
