//! Tells the library whether it is compiled with optimisation, which is for the program's workspace to say, and whether with
//! kernels of AVX-512, nearly half of what it takes to compile.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(optimised)");
    if std::env::var_os("OPT_LEVEL").is_some_and(|level| level != "0") {
        println!("cargo::rustc-cfg=optimised");
    }
    println!("cargo::rerun-if-env-changed=SWIGLU_CPU_NATIVE");
    println!("cargo::rustc-check-cfg=cfg(avx512)");
    let for_this_processor = std::env::var_os("SWIGLU_CPU_NATIVE").is_some_and(|set| set == "1");
    if !for_this_processor || has_avx512() {
        println!("cargo::rustc-cfg=avx512");
    }
}

fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512f")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}
