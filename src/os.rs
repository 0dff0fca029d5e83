//! stub
/// CPU seconds
pub fn cpu_seconds() -> f64 {
    0.0
}
/// Peak
pub fn peak_resident_bytes() -> u64 {
    0
}
/// Limit
pub fn open_file_limit() -> u64 {
    256
}
/// Kernel
pub fn kernel_release() -> String {
    String::new()
}
