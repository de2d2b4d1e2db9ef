//! Loaded kernels, and launching them.

mod functions;

use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::device::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID as Id,
    CUlaunchAttributeValue as Value, CUlaunchConfig,
};

use crate::device::driver::{INVALID_VALUE, cu};
use crate::device::error::{CudaError, Result};
use crate::device::remembered::Remembered;
use crate::device::stream::Stream;
pub(crate) use functions::Functions;
use functions::Module;

/// A kernel of a loaded module. Clones are the same kernel.
#[derive(Clone)]
pub(crate) struct Function(Arc<Loaded>);

struct Loaded {
    raw: CUfunction,
    entry: &'static str,
    registers: u32,
    max_threads: u32,
    /// Bytes of its parameter, where the driver tells.
    params: Option<usize>,
    /// The most dynamic shared memory that was asked for so far.
    shared: AtomicU32,
    keeps_all_shared: AtomicBool,
    /// Whether it was asked for since [`Functions::take_used`].
    used: AtomicBool,
    /// How many blocks of a shape an SM holds: layers of some sizes may take turns.
    resident: Remembered<Shape, u32, 4>,
    module: Arc<Module>,
}

// SAFETY: a function handle may be used from any thread; the driver synchronises.
unsafe impl Send for Loaded {}
// SAFETY: as above; the fields that change are atomic or behind a lock.
unsafe impl Sync for Loaded {}

/// Threads of a block and bytes of its dynamic shared memory.
type Shape = (u32, u32);

/// Dynamic shared memory that a kernel may use without asking for more.
const SHARED_WITHOUT_OPT_IN: u32 = 48 * 1024;

impl Function {
    fn load(module: &Arc<Module>, entry: &'static str) -> Result<Self> {
        let context = &module.context;
        // The module may have been loaded by another thread.
        context.bind()?;
        let name = CString::new(entry).map_err(|e| CudaError::Unsupported {
            what: format!("kernel name {entry:?}"),
            why: e.to_string(),
        })?;
        let mut raw: CUfunction = std::ptr::null_mut();
        // SAFETY: a loaded module, a terminated string, a valid place for the handle.
        unsafe { cu!(context.driver, cuModuleGetFunction(&mut raw, module.raw, name.as_ptr())) }?;
        let attribute = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: a valid function, a valid place for the result.
            unsafe { cu!(context.driver, cuFuncGetAttribute(&mut value, attribute, raw)) }?;
            Ok::<u32, CudaError>(u32::try_from(value).unwrap_or(0))
        };
        let params = context.driver.cuFuncGetParamInfo.and_then(|get| {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: a valid function, valid places for the results.
            (unsafe { get(raw, 0, &mut offset, &mut size) } == 0).then_some(size)
        });
        Ok(Self(Arc::new(Loaded {
            raw,
            entry,
            registers: attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            max_threads: attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            params,
            shared: AtomicU32::new(SHARED_WITHOUT_OPT_IN),
            keeps_all_shared: AtomicBool::new(false),
            used: AtomicBool::new(false),
            resident: Remembered::new(),
            module: module.clone(),
        })))
    }

    /// Asks for `bytes` of dynamic shared memory, which takes effect once for all launches.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        if bytes <= self.0.shared.load(Ordering::Acquire) {
            return Ok(());
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let context = &self.0.module.context;
        // Two threads may both get here: they hold the lock of the module while they do.
        let _serial = self.0.module.opt_in.lock().unwrap_or_else(|e| e.into_inner());
        if bytes <= self.0.shared.load(Ordering::Acquire) {
            return Ok(());
        }
        context.bind()?;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: a valid function.
        let outcome =
            unsafe { cu!(context.driver, cuFuncSetAttribute(self.0.raw, attribute, value)) };
        outcome.map_err(|e| match e {
            CudaError::Driver { code: INVALID_VALUE, .. } => CudaError::Launch {
                kernel: self.0.entry,
                what: "dynamic shared memory",
                expected: "no more than the device gives a block".into(),
                given: format!("{bytes} bytes"),
            },
            other => other,
        })?;
        self.0.shared.store(bytes, Ordering::Release);
        Ok(())
    }

    /// Asks that SMs which run this kernel divide all of their memory as shared memory, not only what its
    /// blocks take: else blocks of another kernel, which need more, wait until these have ended.
    pub(crate) fn keep_all_shared(&self) -> Result<()> {
        let loaded = &*self.0;
        if loaded.keeps_all_shared.load(Ordering::Acquire) {
            return Ok(());
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let context = &loaded.module.context;
        context.bind()?;
        // SAFETY: a valid function.
        unsafe { cu!(context.driver, cuFuncSetAttribute(loaded.raw, attribute, 100)) }?;
        loaded.keeps_all_shared.store(true, Ordering::Release);
        Ok(())
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function")
            .field("entry", &self.0.entry)
            .field("registers", &self.0.registers)
            .finish_non_exhaustive()
    }
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LaunchConfig {
    /// Blocks in each direction.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) block: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(crate) dynamic_shared: u32,
    /// Blocks of a cluster, side by side in x.
    pub(crate) cluster: Option<u32>,
    /// Whether it may start before the kernel before it has ended. It waits for it by itself.
    pub(crate) programmatic: bool,
    /// Whether all blocks must run at the same time.
    pub(crate) cooperative: bool,
}

/// Enqueues a kernel with one parameter, a struct passed by value.
///
/// # Safety
/// `P` is the struct that the kernel takes, field by field; every address in it is memory of the
/// stream's device, has the extent that the kernel accesses, and stays allocated until the kernel
/// has run. The launch matches what the kernel was written for.
pub(crate) unsafe fn launch<P>(
    stream: &Stream,
    function: &Function,
    config: &LaunchConfig,
    params: &P,
) -> Result<()> {
    let loaded = &*function.0;
    loaded.expect(config, size_of::<P>(), stream)?;
    let held = stream.raw_stream().hold()?;
    // Only the first `count` are read.
    let unused = CUlaunchAttribute {
        id: Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        pad: [0; 4],
        value: Value { pad: [0; 8] },
    };
    let mut attributes = [unused; 3];
    let mut count = 0;
    let mut push = |id: Id, set: &dyn Fn(&mut Value)| {
        attributes[count].id = id;
        set(&mut attributes[count].value);
        count += 1;
    };
    if let Some(blocks) = config.cluster {
        push(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &|value| {
            value.clusterDim = [blocks, 1, 1];
        });
    }
    if config.programmatic {
        push(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, &|value| {
            value.programmaticStreamSerializationAllowed = 1;
        });
    }
    if config.cooperative {
        push(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &|value| value.cooperative = 1);
    }
    let launch = CUlaunchConfig {
        gridDimX: config.grid[0],
        gridDimY: config.grid[1],
        gridDimZ: config.grid[2],
        blockDimX: config.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: config.dynamic_shared,
        hStream: held.handle(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: count as u32,
    };
    let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    let driver = stream.cuda().driver();
    // SAFETY: the driver copies one parameter of the size that was checked, and reads `count`
    // attributes; the caller vouches for the rest.
    unsafe {
        let (arguments, extra) = (arguments.as_mut_ptr(), std::ptr::null_mut());
        cu!(driver, cuLaunchKernelEx(&launch, loaded.raw, arguments, extra))
    }
}

impl Loaded {
    /// Blocks of a shape that an SM holds at the same time.
    fn resident_blocks(&self, shape: Shape) -> Result<u32> {
        self.resident.get(shape, || {
            let context = &self.module.context;
            context.bind()?;
            let mut blocks: c_int = 0;
            let threads = c_int::try_from(shape.0).unwrap_or(c_int::MAX);
            let shared = shape.1 as usize;
            // SAFETY: a valid place for the result, a valid function.
            unsafe {
                cu!(
                    context.driver,
                    cuOccupancyMaxActiveBlocksPerMultiprocessor(
                        &mut blocks,
                        self.raw,
                        threads,
                        shared
                    )
                )
            }?;
            Ok(u32::try_from(blocks).unwrap_or(0))
        })
    }

    /// Refuses a launch that the driver would refuse without saying why, or would not notice.
    fn expect(&self, config: &LaunchConfig, params: usize, stream: &Stream) -> Result<()> {
        let kernel = self.entry;
        let refuse = |what, expected: String, given: String| {
            Err(CudaError::Launch { kernel, what, expected, given })
        };
        if let Some(expected) = self.params
            && expected != params
        {
            return refuse("bytes of parameters", expected.to_string(), params.to_string());
        }
        if config.block > self.max_threads {
            let expected = format!("at most {}", self.max_threads);
            return refuse("threads per block", expected, config.block.to_string());
        }
        let shared = self.shared.load(Ordering::Acquire);
        if config.dynamic_shared > shared {
            let expected = format!("at most the {shared} bytes asked for");
            return refuse("dynamic shared memory", expected, config.dynamic_shared.to_string());
        }
        if config.cluster.is_some_and(|blocks| !config.grid[0].is_multiple_of(blocks.max(1))) {
            let expected = format!("a multiple of the cluster, {:?}", config.cluster);
            return refuse("blocks in x", expected, config.grid[0].to_string());
        }
        if config.cooperative {
            // Blocks that wait for others which cannot start would wait for ever.
            let per_multiprocessor = self.resident_blocks((config.block, config.dynamic_shared))?;
            let most = u64::from(per_multiprocessor) * u64::from(stream.cuda().facts().sm_count);
            let blocks = config.grid.into_iter().map(u64::from).product::<u64>();
            if blocks > most {
                let expected = format!("at most the {most} that run at the same time");
                return refuse("blocks of a cooperative launch", expected, blocks.to_string());
            }
        }
        let (own, given) = (self.module.context.ordinal, stream.cuda().ordinal());
        if own != given {
            return Err(CudaError::WrongDevice {
                what: format!("stream of kernel `{kernel}`"),
                expected: format!("device {own}"),
                given: format!("device {given}"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
