//! Tells the library whether it is compiled with optimisation, which is for the program's workspace to say, and which façades
//! have kernels, which are most of what it takes to compile.
//!
//! `SWIGLU_CPU_NATIVE=1` leaves those away that this processor could not run, `SWIGLU_CPU_NATIVE=widest` also those that it
//! would not choose.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(optimised)");
    if std::env::var_os("OPT_LEVEL").is_some_and(|level| level != "0") {
        println!("cargo::rustc-cfg=optimised");
    }
    println!("cargo::rerun-if-env-changed=SWIGLU_CPU_NATIVE");
    let asked = std::env::var("SWIGLU_CPU_NATIVE").unwrap_or_default();
    let of_this_processor = asked == "1" || asked == "widest";
    let [avx512, avx512_bf16] = of_avx512();
    let facades = [
        ("avx2", !(asked == "widest" && avx512)),
        ("avx512", !of_this_processor || avx512),
        ("avx512_bf16", !of_this_processor || avx512_bf16),
    ];
    for (name, compiled) in facades {
        println!("cargo::rustc-check-cfg=cfg({name})");
        if compiled {
            println!("cargo::rustc-cfg={name}");
        }
    }
}

/// Whether this processor has what those façades need, but for what every processor with it has.
fn of_avx512() -> [bool; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f");
        [avx512, avx512 && is_x86_feature_detected!("avx512bf16")]
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        [false; 2]
    }
}
