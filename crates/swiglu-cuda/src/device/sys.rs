//! Declarations of `cuda.h` that this crate uses, by their names there: those of CUDA 12 and 13, which agree in them.
//!
//! They are stated here, so that a build does not depend on a toolkit, or on which version of it `nvcc` says there is. Tests
//! are not compiled where one differs from the bindings of cudarc.

#![allow(non_camel_case_types, non_snake_case, reason = "the names of the C declarations")]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Types that only the driver looks behind.
macro_rules! handles {
    ($($Name:ident = $Struct:ident;)*) => {
        $(
            #[repr(C)]
            pub(crate) struct $Struct([u8; 0]);
            pub(crate) type $Name = *mut $Struct;
        )*
    };
}

handles! {
    CUcontext = CUctx_st;
    CUevent = CUevent_st;
    CUfunction = CUfunc_st;
    CUgraph = CUgraph_st;
    CUgraphExec = CUgraphExec_st;
    CUmodule = CUmod_st;
    CUstream = CUstream_st;
}

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;

/// Enumerations as numbers: a newer driver may return one that has no name here.
macro_rules! numbers {
    ($($Name:ident { $($NAME:ident = $value:literal,)* })*) => {
        $(
            #[repr(transparent)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub(crate) struct $Name(c_uint);

            impl $Name {
                $(pub(crate) const $NAME: Self = Self($value);)*
            }
        )*

        #[cfg(test)]
        const _: () = {
            $($(assert!($value == cudarc::driver::sys::$Name::$NAME as u32);)*)*
        };
    };
}

numbers! {
    CUdevice_attribute {
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
        CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
    }
    CUfunction_attribute {
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
        CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
    }
    CUlaunchAttributeID {
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    }
    CUmemorytype {
        CU_MEMORYTYPE_HOST = 1,
        CU_MEMORYTYPE_DEVICE = 2,
    }
    CUpointer_attribute {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    }
    CUstreamCaptureMode {
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
        CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    }
    CUstreamCaptureStatus {
        CU_STREAM_CAPTURE_STATUS_NONE = 0,
    }
    CUtensorMapDataType {
        CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    }
    CUtensorMapFloatOOBfill {
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
    }
    CUtensorMapInterleave {
        CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    }
    CUtensorMapL2promotion {
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3,
    }
    CUtensorMapSwizzle {
        CU_TENSOR_MAP_SWIZZLE_32B = 1,
        CU_TENSOR_MAP_SWIZZLE_64B = 2,
        CU_TENSOR_MAP_SWIZZLE_128B = 3,
    }
}

/// Structs, compared field by field.
macro_rules! structs {
    ($($Name:ident { $($field:ident: $Type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $Name {
                $(pub(crate) $field: $Type,)*
            }
        )*

        #[cfg(test)]
        const _: () = {
            use cudarc::driver::sys;
            use std::mem::offset_of;
            $(
                assert!(size_of::<$Name>() == size_of::<sys::$Name>());
                assert!(align_of::<$Name>() == align_of::<sys::$Name>());
                $(assert!(offset_of!($Name, $field) == offset_of!(sys::$Name, $field));)*
            )*
        };
    };
}

structs! {
    CUuuid {
        bytes: [c_char; 16],
    }
    CUlaunchConfig {
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        attrs: *mut CUlaunchAttribute,
        numAttrs: c_uint,
    }
    CUlaunchAttribute {
        id: CUlaunchAttributeID,
        pad: [c_char; 4],
        value: CUlaunchAttributeValue,
    }
    CUDA_MEMCPY2D {
        srcXInBytes: usize,
        srcY: usize,
        srcMemoryType: CUmemorytype,
        srcHost: *const c_void,
        srcDevice: CUdeviceptr,
        srcArray: *mut c_void,
        srcPitch: usize,
        dstXInBytes: usize,
        dstY: usize,
        dstMemoryType: CUmemorytype,
        dstHost: *mut c_void,
        dstDevice: CUdeviceptr,
        dstArray: *mut c_void,
        dstPitch: usize,
        WidthInBytes: usize,
        Height: usize,
    }
}

/// 64 bytes, of which each attribute has its own at the beginning.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union CUlaunchAttributeValue {
    pub(crate) pad: [u64; 8],
    pub(crate) cooperative: c_int,
    pub(crate) clusterDim: [c_uint; 3],
    pub(crate) programmaticStreamSerializationAllowed: c_int,
}
