//! The run-time compiler.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::log::CompileLog;
use super::source::headers_of;
use super::variant::Variant;
use crate::device::arch::Arch;
use crate::device::error::{CudaError, Result};
use crate::device::library::{Library, functions};

/// A program in the compiler.
type Program = *mut c_void;

functions! {
    /// Functions of `libnvrtc`. All of them are in versions 12.0 and newer.
    struct Nvrtc from Library::Nvrtc;
    required {
        fn nvrtcVersion = "nvrtcVersion"(*mut c_int, *mut c_int) -> c_int;
        fn nvrtcGetErrorString = "nvrtcGetErrorString"(c_int) -> *const c_char;
        fn nvrtcCreateProgram = "nvrtcCreateProgram"(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char,
            *const *const c_char
        ) -> c_int;
        fn nvrtcDestroyProgram = "nvrtcDestroyProgram"(*mut Program) -> c_int;
        fn nvrtcCompileProgram =
            "nvrtcCompileProgram"(Program, c_int, *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize = "nvrtcGetProgramLogSize"(Program, *mut usize) -> c_int;
        fn nvrtcGetProgramLog = "nvrtcGetProgramLog"(Program, *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize = "nvrtcGetCUBINSize"(Program, *mut usize) -> c_int;
        fn nvrtcGetCUBIN = "nvrtcGetCUBIN"(Program, *mut c_char) -> c_int;
    }
    optional {}
}

/// Major and minor version of the compiler.
pub type Version = (u32, u32);

/// A compiled module.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// The code for one architecture, as the driver loads it.
    pub cubin: Vec<u8>,
    /// What the compiler said and how long it took.
    pub report: Report,
}

/// What is known about a compiled module besides its code.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What the compiler said.
    pub log: CompileLog,
    /// Milliseconds it took.
    pub millis: f64,
    /// The compiler's version.
    pub nvrtc: Version,
}

fn nvrtc() -> Result<&'static Nvrtc> {
    static NVRTC: OnceLock<Result<Nvrtc>> = OnceLock::new();
    NVRTC.get_or_init(Nvrtc::load).as_ref().map_err(Clone::clone)
}

/// The compiler's version.
///
/// # Errors
/// [`CudaError::LibraryMissing`], [`CudaError::SymbolMissing`].
pub fn version() -> Result<Version> {
    let nvrtc = nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: valid places for the results.
    nvrtc.check("nvrtcVersion", unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) })?;
    Ok((u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0)))
}

/// The options that `variant` is compiled with for `arch`: they are part of its identity.
pub(crate) fn options(variant: &Variant, arch: Arch) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "--device-as-default-execution-space".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ];
    options.extend(variant.defines().iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// Compiles a variant. Needs the compiler, but neither a device nor a driver.
///
/// # Errors
/// [`CudaError::Compile`] with the compiler's log; [`CudaError::LibraryMissing`].
pub fn compile(variant: &Variant, arch: Arch) -> Result<Compiled> {
    let nvrtc = nvrtc()?;
    let version = version()?;
    let start = Instant::now();
    let program = Open::new(nvrtc, variant)?;
    let failed =
        |log: String| CudaError::Compile { file: variant.to_string(), arch: arch.to_string(), log };
    let options: Vec<CString> =
        options(variant, arch).into_iter().map(c_string).collect::<Result<_>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
    // SAFETY: an open program and `count` terminated strings, alive during the call.
    let code = unsafe { (nvrtc.nvrtcCompileProgram)(program.raw, count, pointers.as_ptr()) };
    let log = program.log();
    if code != 0 {
        let log = log.ok().filter(|log| !log.is_empty());
        return Err(failed(log.unwrap_or_else(|| nvrtc.name(code))));
    }
    let log = log?;
    let cubin = program.cubin()?;
    if cubin.is_empty() {
        // The compiler makes code only for real architectures (sm_…), which all of ours are.
        return Err(failed("the compiler returned no code".into()));
    }
    let millis = start.elapsed().as_secs_f64() * 1e3;
    Ok(Compiled { cubin, report: Report { log: CompileLog::parse(&log), millis, nvrtc: version } })
}

fn c_string(text: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(text).map_err(|e| CudaError::Unsupported {
        what: "a zero byte in device code or an option".into(),
        why: e.to_string(),
    })
}

impl Nvrtc {
    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let name = self.name(code);
        Err(CudaError::Driver { call, code, name, description: "the compiler refused".into() })
    }

    fn name(&self, code: c_int) -> String {
        // SAFETY: takes any code; the result is null or a terminated constant.
        let text = unsafe { (self.nvrtcGetErrorString)(code) };
        if text.is_null() {
            return format!("NVRTC error {code}");
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program until it is destroyed.
struct Open {
    nvrtc: &'static Nvrtc,
    raw: Program,
}

impl Open {
    fn new(nvrtc: &'static Nvrtc, variant: &Variant) -> Result<Self> {
        let headers = headers_of(variant.file());
        let source = c_string(variant.file().text())?;
        let name = c_string(variant.file().name())?;
        let strings = |pick: fn(&(&'static str, &'static str)) -> &'static str| {
            headers.iter().map(|h| c_string(pick(h))).collect::<Result<Vec<CString>>>()
        };
        let (names, texts) = (strings(|h| h.0)?, strings(|h| h.1)?);
        let pointers = |of: &[CString]| of.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
        let count = c_int::try_from(headers.len()).unwrap_or(c_int::MAX);
        let mut raw: Program = std::ptr::null_mut();
        // SAFETY: terminated strings and arrays of `count` of them; the compiler copies them.
        let code = unsafe {
            (nvrtc.nvrtcCreateProgram)(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                count,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        nvrtc.check("nvrtcCreateProgram", code)?;
        Ok(Self { nvrtc, raw })
    }

    fn log(&self) -> Result<String> {
        let mut size = 0;
        // SAFETY: an open program, a valid place for the result.
        let code = unsafe { (self.nvrtc.nvrtcGetProgramLogSize)(self.raw, &mut size) };
        self.nvrtc.check("nvrtcGetProgramLogSize", code)?;
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size that the compiler asked for.
        let code = unsafe { (self.nvrtc.nvrtcGetProgramLog)(self.raw, log.as_mut_ptr().cast()) };
        self.nvrtc.check("nvrtcGetProgramLog", code)?;
        let text = String::from_utf8_lossy(&log);
        Ok(text.trim_end_matches('\0').trim().to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: a compiled program, a valid place for the result.
        let code = unsafe { (self.nvrtc.nvrtcGetCUBINSize)(self.raw, &mut size) };
        self.nvrtc.check("nvrtcGetCUBINSize", code)?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size that the compiler asked for.
        let code = unsafe { (self.nvrtc.nvrtcGetCUBIN)(self.raw, cubin.as_mut_ptr().cast()) };
        self.nvrtc.check("nvrtcGetCUBIN", code)?;
        Ok(cubin)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed once.
        unsafe { (self.nvrtc.nvrtcDestroyProgram)(&mut self.raw) };
    }
}
