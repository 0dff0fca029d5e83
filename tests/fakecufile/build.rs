//! Gives the double the soname of the library.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
