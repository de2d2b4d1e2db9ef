//! Tells the library whether it is compiled with optimisation, which is for the program's workspace to say.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(optimised)");
    if std::env::var_os("OPT_LEVEL").is_some_and(|level| level != "0") {
        println!("cargo::rustc-cfg=optimised");
    }
}
