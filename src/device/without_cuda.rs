//! Stands in for `cuda` in a build without the feature `cuda`: no GPU is found, and asking for one is an error that says why.

use std::ops::Range;
use std::sync::Arc;

use super::{Device, Memory};
use crate::error::{Error, Result};

/// Memory of a GPU. There is none.
pub(super) enum DeviceMemory {}

impl DeviceMemory {
    pub(super) fn address(&self) -> Option<u64> {
        match *self {}
    }

    pub(super) fn owner(&self) -> String {
        match *self {}
    }
}

impl Memory for DeviceMemory {
    fn len(&self) -> u64 {
        match *self {}
    }

    fn download(&self, _range: Range<u64>, _target: &mut [u8]) -> Result<()> {
        match *self {}
    }
}

pub(super) fn open(which: &str) -> Result<Arc<dyn Device>> {
    let message =
        "this build has no support for GPUs: build vramp with the feature `cuda`, which is on by default".to_owned();
    Err(Error::Device { device: format!("cuda:{which}"), op: "open", message })
}

pub(super) fn first() -> Result<Option<Arc<dyn Device>>> {
    Ok(None)
}
