//! Gives the double the soname of the driver, and keeps it loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    // cudarc opens and closes the library to see whether it is there; its threads and its state must survive that.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
