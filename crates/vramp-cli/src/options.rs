//! What was meant: arguments that several commands share, as the library's options.
//!
//! The only file that reads where the Hugging Face cache lies.

use std::env;
use std::path::PathBuf;

use vramp::checkpoint::{OpenOptions, Selection, TensorParallel};
use vramp::load::{Convert, Profile, TransferOptions};
use vramp::plan::RouteChoice;

use super::args::{ConvertArgs, NameArgs, OpenHow, RouteArg, SelectionArgs, TransferArgs};
use super::output::Failure;

/// How to open a checkpoint.
pub(crate) fn open(args: &OpenHow) -> OpenOptions {
    let mut options = OpenOptions::default().max_header_bytes(args.max_header_bytes).skip_unknown(args.skip_unknown);
    (options.variant, options.hub_cache, options.key) = (args.variant.clone(), hub_cache(), args.key.clone());
    options
}

/// What to take of it.
pub(crate) fn selection(args: &SelectionArgs) -> Selection {
    let dims = || args.tp_dim.iter().map(|cut| (cut.glob.clone(), cut.dim)).collect();
    names(&args.names)
        .include(args.include.clone())
        .exclude(args.exclude.clone())
        .slices(args.slice.clone())
        .tensor_parallel(args.tp.map(|tp| TensorParallel { rank: tp.rank, world: tp.world, dims: dims() }))
}

/// Everything, under the names that are wanted.
pub(crate) fn names(args: &NameArgs) -> Selection {
    Selection::default().strip_prefix(args.strip_prefix.clone()).ties(args.tied.clone())
}

/// How to move the bytes, and what becomes of them. What was typed wins over the profile.
pub(crate) fn transfer(args: &TransferArgs, convert: &ConvertArgs) -> Result<TransferOptions, Failure> {
    let read = |path: &PathBuf| Profile::read(path).map_err(|error| Failure::LibraryAt { error, path: path.clone() });
    let profile = args.profile.as_ref().map(read).transpose()?;
    let usual = TransferOptions::default();
    let mut options = profile.map_or(usual.clone(), |profile| profile.apply(usual));
    options.route = route(args.route);
    options.staging = args.staging.or(options.staging);
    options.convert = convert.dtype.map(|to| Convert::to(to).allow_overflow(convert.allow_overflow));
    Ok(options)
}

fn route(route: RouteArg) -> RouteChoice {
    match route {
        RouteArg::Auto => RouteChoice::Auto,
        RouteArg::Direct => RouteChoice::Direct,
        RouteArg::Buffered => RouteChoice::Buffered,
        RouteArg::Mapped | RouteArg::View => RouteChoice::Mapped,
        RouteArg::GpuDirect => RouteChoice::GpuDirect,
    }
}

/// What is wrong with these options together: some would do nothing, or cannot be had at once.
pub(crate) fn contradiction(
    device: Option<&str>,
    transfer: &TransferArgs,
    convert: &ConvertArgs,
) -> Option<&'static str> {
    let view = transfer.route == RouteArg::View;
    let gpu_direct = transfer.route == RouteArg::GpuDirect;
    let null = device == Some("null");
    let host = null || device == Some("cpu");
    let not_cpu = device.is_some_and(|device| device != "cpu");
    let (casts, aligns) = (convert.dtype.is_some(), transfer.align.is_some());
    let cases = [
        (null && casts, "--dtype does nothing with --device null: nothing is kept"),
        (
            gpu_direct && host,
            "--route gpu-direct is for GPUs: it reads past the host; use --device cuda, or another route",
        ),
        (gpu_direct && aligns, "--route gpu-direct is for GPUs, and --align is for --device cpu"),
        (aligns && not_cpu, "--align is for --device cpu"),
        (view && not_cpu, "--route view is for --device cpu: a view borrows host memory"),
        (view && casts, "--dtype cannot be had with --route view: a view is what lies in the file"),
        (view && aligns, "--align cannot be had with --route view: a view lies where it lies in the file"),
        (view && transfer.profile.is_some(), "--profile does nothing with --route view: nothing is copied"),
        (view && transfer.staging.is_some(), "--staging does nothing with --route view: nothing is copied"),
    ];
    cases.into_iter().find(|(wrong, _)| *wrong).map(|(_, why)| why)
}

/// Whether everything is selected, as it is stored.
pub(crate) fn selects_all(args: &SelectionArgs) -> bool {
    let SelectionArgs { include, exclude, slice, tp, tp_dim, names: NameArgs { strip_prefix, tied } } = args;
    include.is_empty()
        && exclude.is_empty()
        && slice.is_empty()
        && tp.is_none()
        && tp_dim.is_empty()
        && strip_prefix.is_empty()
        && tied.is_empty()
}

/// The Hugging Face cache, where the hub's own tools look for it.
fn hub_cache() -> Option<PathBuf> {
    let path = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| path("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| path("HOME").map(|home| home.join(".cache/huggingface/hub")))
}
