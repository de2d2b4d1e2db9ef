//! What a device says about itself.

use std::ffi::{CStr, c_char, c_int};

use serde::{Deserialize, Serialize};

use crate::device::cuda::Cuda;
use crate::device::driver::{Driver, cu, driver};
use crate::device::error::{CudaError, Result};
use crate::device::sys::{CUdevice, CUdevice_attribute as Attribute, CUuuid};

/// What a device says about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// Number among the devices this process sees, from 0.
    pub ordinal: usize,
    /// For example `NVIDIA H200`.
    pub name: String,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// SMs.
    pub sm_count: u32,
    /// Bytes of L2.
    pub l2_bytes: usize,
    /// Bytes of shared memory that one block can have when it asks for it.
    pub shared_bytes_optin: usize,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// The highest clock of the SMs in kHz; 0 where the driver does not tell.
    pub clock_khz: u32,
    /// Bytes per second that the memory's clock and width allow; 0 where the driver does not tell.
    pub memory_bandwidth: u64,
    /// The CUDA version of the driver: major and minor.
    pub driver_version: (u32, u32),
    /// The device's identity, as `nvidia-smi -L` shows it; empty where the driver does not tell.
    pub uuid: String,
}

impl DeviceFacts {
    /// What the device with this number says, without using it: it gets no context.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] and [`CudaError::SymbolMissing`] without a usable driver,
    /// [`CudaError::NoDevice`], [`CudaError::DeviceIndex`], and whatever the driver reports.
    pub fn of(device: usize) -> Result<Self> {
        Ok(facts(expect_device(device)?, device)?.1)
    }
}

/// The driver, if it has a device with this number.
pub(crate) fn expect_device(given: usize) -> Result<&'static Driver> {
    match Cuda::device_count()? {
        0 => Err(CudaError::NoDevice),
        count if given >= count => Err(CudaError::DeviceIndex { given, count }),
        _ => driver(),
    }
}
pub(crate) fn device_attribute(
    driver: &Driver,
    device: CUdevice,
    attribute: Attribute,
) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: `value` is a valid place for the result, `device` came from the driver.
    unsafe { cu!(driver, cuDeviceGetAttribute(&mut value, attribute, device)) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

pub(crate) fn facts(driver: &Driver, ordinal: usize) -> Result<(CUdevice, DeviceFacts)> {
    let mut device: CUdevice = 0;
    let index = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: `device` is a valid place for the handle.
    unsafe { cu!(driver, cuDeviceGet(&mut device, index)) }?;
    let mut name = [0 as c_char; 256];
    // SAFETY: the driver writes at most 256 bytes with their terminator.
    unsafe { cu!(driver, cuDeviceGetName(name.as_mut_ptr(), 256, device)) }?;
    name[255] = 0;
    let mut memory_bytes = 0;
    // SAFETY: a valid place for the result.
    unsafe { cu!(driver, cuDeviceTotalMem(&mut memory_bytes, device)) }?;
    let mut version: c_int = 0;
    // SAFETY: a valid place for the result.
    unsafe { cu!(driver, cuDriverGetVersion(&mut version)) }?;
    let version = u32::try_from(version).unwrap_or(0);
    let attribute = |a| device_attribute(driver, device, a);
    let facts = DeviceFacts {
        ordinal,
        // SAFETY: terminated above at the latest.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        shared_bytes_optin: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )? as usize,
        memory_bytes,
        clock_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).unwrap_or(0),
        memory_bandwidth: {
            let khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
            let bits =
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
            // Two transfers per cycle.
            2 * u64::from(khz) * 1000 * u64::from(bits / 8)
        },
        // 13020 is 13.2.
        driver_version: (version / 1000, version % 1000 / 10),
        uuid: uuid(driver, device),
    };
    Ok((device, facts))
}

fn uuid(driver: &Driver, device: CUdevice) -> String {
    let mut uuid = CUuuid { bytes: [0; 16] };
    let Some(get) = driver.cuDeviceGetUuid else { return String::new() };
    // SAFETY: `uuid` is a valid place for the result, `device` came from the driver.
    if unsafe { get(&mut uuid, device) } != 0 {
        return String::new();
    }
    let hex: Vec<String> =
        uuid.bytes.iter().map(|&b| format!("{:02x}", b.cast_unsigned())).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    let (a, b, c, d, e) = (part(0..4), part(4..6), part(6..8), part(8..10), part(10..16));
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}
