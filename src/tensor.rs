//! A loaded tensor: a name, a type, a shape and a view of the arena that keeps it alive.
//!
//! Typed access checks the element type and never copies; the arena aligned the bytes. Nothing here reads files.

use std::fmt;
use std::sync::Arc;

use bytemuck::AnyBitPattern;

use crate::device::View;
use crate::digest::{Digest, Hasher};
use crate::dtype::{Dtype, element_count};
use crate::error::{Error, Result};

/// Bytes that are read back at a time for hashing.
const READ_BACK_BYTES: usize = 1 << 20;

/// Name, type and shape.
pub(crate) type Described = (Arc<str>, Dtype, Arc<[usize]>);

/// A tensor in memory. Cloning is cheap and shares the memory; `Send` and `Sync`.
#[derive(Clone)]
pub struct Tensor {
    name: Arc<str>,
    dtype: Dtype,
    shape: Arc<[usize]>,
    view: View,
}

impl Tensor {
    pub(crate) fn new(name: Arc<str>, dtype: Dtype, shape: Arc<[usize]>, view: View) -> Tensor {
        Tensor { name, dtype, shape, view }
    }

    /// The name it was asked for by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each dimension, outermost first; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of bytes that the elements take.
    pub fn byte_len(&self) -> u64 {
        self.view.len()
    }

    /// Number of elements: the product of the shape, 1 for a scalar.
    pub fn element_count(&self) -> u64 {
        element_count(&self.shape)
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }

    /// The elements, row-major, little-endian, where the host can address them.
    ///
    /// # Errors
    /// When the tensor lies on a device that the host cannot address, or one that keeps nothing.
    pub fn bytes(&self) -> Result<&[u8]> {
        if let Some(bytes) = self.view.bytes() {
            return Ok(bytes);
        }
        self.view.must_keep()?;
        Err(Error::Device {
            device: self.view.owner().unwrap_or_else(|| "device".to_owned()),
            op: "borrow bytes",
            message: format!("tensor {:?} is not in host memory; `Tensor::download` copies it there", self.name),
        })
    }

    /// The elements as a slice of `T`: `f32`, [`half::bf16`], `u8`, ….
    ///
    /// # Errors
    /// When `T` is not the element type of the tensor, or the tensor is not in host memory.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        cast(&self.name, self.dtype, self.bytes()?)
    }

    /// Copies the elements into host memory, from wherever they are.
    ///
    /// # Errors
    /// When the device refuses, or keeps nothing.
    pub fn download(&self) -> Result<Vec<u8>> {
        let len =
            usize::try_from(self.byte_len()).map_err(|_| Error::Poisoned { what: "a tensor above the word size" })?;
        let mut bytes = vec![0; len];
        self.view.download(0..self.byte_len(), &mut bytes)?;
        Ok(bytes)
    }

    /// SHA-256 of the elements' bytes, read back from the device.
    ///
    /// # Errors
    /// When the device refuses, or keeps nothing.
    pub fn sha256(&self) -> Result<Digest> {
        if let Some(bytes) = self.view.bytes() {
            return Ok(Digest::of(bytes));
        }
        let mut hasher = Hasher::new();
        let mut chunk = vec![0; READ_BACK_BYTES];
        let mut done = 0;
        while done < self.byte_len() {
            let len = usize::try_from(self.byte_len() - done).map_or(READ_BACK_BYTES, |left| left.min(READ_BACK_BYTES));
            self.view.download(done..done + len as u64, &mut chunk[..len])?;
            hasher.update(&chunk[..len]);
            done += len as u64;
        }
        Ok(hasher.finish())
    }

    /// A 64-bit [checksum](crate::digest::checksum) of the elements' bytes, computed where they are: on a GPU by the GPU. Equal
    /// on every device for equal bytes, and changed by any change that no adversary made; against those, use
    /// [`Tensor::sha256`].
    ///
    /// # Errors
    /// When the device refuses, or keeps nothing.
    pub fn checksum(&self) -> Result<u64> {
        self.view.checksum()
    }

    /// The tensor with its two dimensions exchanged, in new memory of the same device; on a GPU the GPU does it.
    ///
    /// # Errors
    /// When the tensor has not two dimensions or elements that are not 1, 2, 4 or 8 bytes, there is no memory, or the device
    /// refuses.
    pub fn transposed(&self) -> Result<Tensor> {
        let bits = self.dtype.bits();
        let (&[rows, columns], true) = (self.shape.as_ref(), matches!(bits, 8 | 16 | 32 | 64)) else {
            let what = format!(
                "tensor {:?} ({}, shape {:?}) is no matrix that can be transposed",
                self.name, self.dtype, self.shape
            );
            return Err(Error::Request { what, hint: None });
        };
        let view = self.view.transposed([rows as u64, columns as u64], bits / 8)?;
        let (name, dtype) = (Arc::clone(&self.name), self.dtype);
        Ok(Tensor { name, dtype, shape: [columns, rows].into(), view })
    }

    /// Hands the tensor over as an address and a guard that keeps its memory.
    ///
    /// # Errors
    /// When the device has no addresses, or keeps nothing (the null device).
    pub fn into_raw(self) -> Result<RawTensor> {
        self.view.must_keep()?;
        let on_host = self.view.bytes().map(|bytes| bytes.as_ptr().addr() as u64);
        let address = if self.is_empty() { Some(0) } else { on_host.or_else(|| self.view.address()) };
        let (Some(address), Some(device)) = (address, self.view.owner()) else {
            let what = format!("tensor {:?} lies on a device without addresses: download it instead", self.name);
            return Err(Error::Request { what, hint: None });
        };
        let (byte_len, shape) = (self.byte_len(), self.shape().to_vec());
        Ok(RawTensor { address, byte_len, device, dtype: self.dtype, shape, guard: MemoryGuard { _view: self.view } })
    }

    /// The device's own address of the first element, where it has addresses (a `CUdeviceptr`).
    pub fn address(&self) -> Option<u64> {
        self.view.address()
    }

    /// What describes it, and where it lies.
    pub(crate) fn into_parts(self) -> (Described, View) {
        ((self.name, self.dtype, self.shape), self.view)
    }

    /// Where the bytes lie in their arena.
    pub fn view(&self) -> &View {
        &self.view
    }
}

/// A tensor as an address, for code that cannot hold a [`Tensor`]: another language, a framework's own type.
///
/// The memory stays allocated and unchanged while the guard lives. It must not be written: other tensors, and clones of this one, may
/// lie in it.
#[derive(Debug)]
#[non_exhaustive]
pub struct RawTensor {
    /// The first byte: a pointer of this process for `cpu`, a `CUdeviceptr` for a GPU. 0 for a tensor without elements.
    pub address: u64,
    /// Number of bytes.
    pub byte_len: u64,
    /// The device, as `cpu` or `cuda:0`.
    pub device: String,
    /// The element type.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first; row-major, without gaps.
    pub shape: Vec<usize>,
    /// Keeps the memory. Dropping it may free it.
    pub guard: MemoryGuard,
}

/// Keeps the memory of a [`RawTensor`] allocated and unchanged.
#[derive(Debug, Clone)]
pub struct MemoryGuard {
    _view: View,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}, {}, {:?})", self.name, self.dtype, self.shape)
    }
}

/// The bytes of the tensor `name` as elements of type `T`.
pub(crate) fn cast<'a, T: Element>(name: &str, dtype: Dtype, bytes: &'a [u8]) -> Result<&'a [T]> {
    let wanted = std::any::type_name::<T>();
    if !T::holds(dtype) {
        return Err(Error::Request { what: format!("tensor {name:?} holds {dtype}, not {wanted}"), hint: None });
    }
    bytemuck::try_cast_slice(bytes).map_err(|why| Error::Request {
        what: format!("tensor {name:?} cannot be viewed as {wanted}: {why}"),
        hint: Some("copy the bytes: the tensor lies misaligned in its file".to_owned()),
    })
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor's elements can be seen as.
pub trait Element: AnyBitPattern + sealed::Sealed {
    /// Whether elements of `dtype` have this representation.
    fn holds(dtype: Dtype) -> bool;
}

macro_rules! elements {
    ($($type:ty: $($dtype:ident)|+;)*) => {
        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                fn holds(dtype: Dtype) -> bool {
                    matches!(dtype, $(Dtype::$dtype)|+)
                }
            }
        )*
    };
}

elements! {
    // Types without a Rust counterpart are seen as their bytes; BOOL too, since a byte that is neither 0 nor 1 is no `bool`.
    u8: U8 | Bool | F4 | F6_E2M3 | F6_E3M2 | F8_E5M2 | F8_E4M3 | F8_E4M3FNUZ | F8_E5M2FNUZ | F8_E8M0;
    i8: I8;
    u16: U16;
    i16: I16;
    half::f16: F16;
    half::bf16: BF16;
    u32: U32;
    i32: I32;
    f32: F32;
    u64: U64;
    i64: I64;
    f64: F64;
    [f32; 2]: C64;
}
