//! What was typed: the arguments of every command, as clap reads them, and the help that people read.
//!
//! Nothing here acts and nothing here decides: each command's own file turns its arguments into options. The parsers of
//! single values are in `values`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use vramp::Float;
use vramp::checkpoint::{SliceRequest, Tie};
use vramp::report::Staging;
use vramp_bench::estimate::Link;

use super::values;

const EXIT_CODES: &str = "\
Exit status:
  0    done
  1    a check failed (verify, load --spec, convert --check, audit)
  2    wrong usage
  3    input rejected: malformed, unsafe, unsupported, or changed during the load
  4    I/O: not found, no permission, disk full
  5    device: missing or out of memory; also an internal error of vramp
  6    conflict: the target must not be replaced, or another process changed it meanwhile
  130  interrupted (Ctrl-C, SIGTERM)

Units: GB is 10^9 bytes and GiB is 2^30 bytes; the unit is always printed.
Colours follow NO_COLOR, CLICOLOR and CLICOLOR_FORCE.
HF_HUB_CACHE and HF_HOME say where the Hugging Face cache lies; nothing is ever downloaded.";

const INSPECT_EXAMPLES: &str = "\
Examples:
  vramp inspect ./Llama-3.1-8B                     what is in it, by type, and its largest tensors
  vramp inspect ./Llama-3.1-8B --all               all tensors
  vramp inspect ./Llama-3.1-8B --tree              as a tree; layers that are alike are shown once
  vramp inspect model.safetensors --plan           what a load would read, by which route
  vramp inspect ./m --include '*.layers.0.*'       only these tensors
  vramp inspect ./m --json | jq '.dtypes'

JSON: {path, format, shards: [{path, bytes}], metadata, total_bytes, parameters, dtypes, \
tensors: {name: {dtype, shape, shard, offset, bytes}}, ties?: {alias: name}, skipped?, warnings}. `shard` counts from 0 in \
`shards`; `offset` counts bytes from the start of that file.";

const LOAD_EXAMPLES: &str = "\
Examples:
  vramp load ./Llama-3.1-8B                  to the first GPU, else to host memory
  vramp load ./Llama-3.1-8B --device null    keep nothing: measures reading, needs little memory
  vramp load ./m --plan-only                 what it would do, without reading
  vramp load ./m --slice 'lm_head.weight=0:0:1000'
  vramp load ./m --tp 0/4                    the first of four ranks, cut as the architecture is
  vramp load ./m --tp 0/4 --tp-dim '*.q_proj.weight=0' --tp-dim '*.o_proj.weight=1'
  vramp load ./m --spec spec.json --strip-prefix module.
  vramp load ./m --digests --json | jq -r '.tensors[].sha256'
  vramp load ./m --trace load.json           then open load.json in https://ui.perfetto.dev

JSON: {device, tensors: {name: {dtype, shape, bytes, same_as?, sha256?, checksum?}}, \
scales: {weight: scales}, report, warnings, skipped: [{name, why, tensors?}], tensors_left_out}; with \
--plan-only `plan` in place of `report` and what follows the warnings. report.estimate (T = S/B) and \
report.efficiency are there only with limits that `vramp bench` measured before; else report.no_estimate says why.";

const VERIFY_EXAMPLES: &str = "\
SPEC is a JSON file {\"tensors\": {\"name\": {\"dtype\": \"F32\", \"shape\": [2, 3]}}} (the JSON of `vramp \
inspect` is one too), - or a pipe that gives one, or another checkpoint, whose names, types and shapes are then demanded. \
Everything that differs is listed, not only the first.

Examples:
  vramp verify ./m --spec spec.json
  vramp verify ./fine-tuned --spec ./base
  vramp verify ddp.safetensors --spec spec.json --strip-prefix module.
  vramp inspect ./base --json | vramp verify ./m --spec -
  vramp verify ./m --spec spec.json --tied lm_head.weight=model.embed_tokens.weight

JSON: {ok, missing, unexpected, shape_mismatch, dtype_mismatch, ties, suggestion}.
Exit status 0: it matches, 1: it does not.";

const AUDIT_EXAMPLES: &str = "\
Files are recognised by their content, whatever they are called. Nothing of them is executed. Of a folder \
every file is looked at that could hold weights or code.

Examples:
  vramp audit pytorch_model.bin
  vramp audit ./downloads --fail-on notice
  vramp audit model.pt --format sarif > findings.sarif

JSON: {path, verdict, format, meaning, globals: [{module, name, danger, position, count, member?}], findings: [{rule, \
severity, what, member?, position?, opcode?, global?, arguments?, reached?, place}], tensors: {dtype: \
{tensors, bytes}}, files, others, vanished, unreadable: [{path, why}]}. `others` counts files of a folder that neither hold a \
pickle nor weights, `vanished` those that were gone before they could be looked at. verdict: clean and notice (contains only allow-listed constructs), malformed, \
suspicious, dangerous. `position` counts bytes within the pickle.
Exit status 0: clean or notice, 1: suspicious or dangerous, 3: malformed.";

const ESTIMATE_EXAMPLES: &str = "\
Examples:
  vramp estimate --parameters 70B --dtype f16 --bandwidth 12GB/s
  vramp estimate ./Llama-3.1-8B --bandwidth disk=7GB/s --bandwidth host=20GB/s --bandwidth pcie5x16
  vramp estimate ./Llama-3.1-8B                    against every link that has a name
  vramp estimate --parameters 1.6B=bf16 --experts 8x5.6B=fp8 --scales 128x128=f32
  vramp estimate --parameters 70B --dtype f16 --fleet 64
  vramp estimate ./m --fleet 64 --shared 5GB/s,40GB/s --nvme nvme-gen4,5GB/s --nic 200gbe

A load runs its stages at the same time, so the slowest link decides: T = S/B. Where each named \
bandwidth comes from stands in docs/links.md; what a fleet's figures assume, in docs/scaling.md.

JSON: {bytes, parameters, dtype, parts: [{parameters, dtype, copies}], scale_bytes, links: [{name, \
bytes_per_second, seconds}], chain, bound_by, seconds, seconds_one_by_one, warnings}, and with \
--fleet also fleet: {hosts, .., ways: [{way, seconds, limit, from, storage_bytes, spread}], best, \
flips: [{hosts, way}]}; there are no links then, and seconds is null. No limit is null, too.";

const BENCH_EXAMPLES: &str = "\
Each stage of a load is measured alone (the storage by size and number of reads, the page cache, the \
link to the device, ...), T = S/B is predicted from the slowest, and the checkpoint is loaded cold \
(dropped from the page cache, and the kernel asked whether it is gone) and warm, the stages measured \
again in turn with the loads. The verdict says what the limit is and what to change. The limits are \
kept for later loads (--limits).

Examples:
  vramp bench ./Llama-3.1-8B --quick                 within half a minute
  vramp bench ./Llama-3.1-8B --html report.html      with charts, in one file that fetches nothing
  vramp bench ./m --device cpu --rounds 9 --csv samples.csv
  vramp bench ./m --json | jq -r .advice.cold
  vramp bench ./m --quick --tune=120 --save-profile p.json    then vramp load ./m --profile p.json

JSON: {vramp, unix_seconds, seconds, machine, subject, stages: [{stage, trials, best, skipped}], \
states: [{state, proof, ceilings, prediction, opening_seconds, loads, verdict, timeline}], limits, warnings, fallbacks, \
advice: {cold, warm}, tuning: null or {profile, ratio, trials, ..}}. Rates are bytes per second, times are seconds. CSV: a line a sample.";
const CONVERT_EXAMPLES: &str = "\
OUT is one file if its name ends in .safetensors or .sft; otherwise it is a folder, which is created if its \
parent exists. Files are written under temporary names (.vramp-*.tmp), synced, and \
put in place in one step: readers find the old checkpoint or the new one. IN may be OUT. Ctrl-C removes \
what was written; where that is 10 GB and more, the file system takes a few seconds for it.

Examples:
  vramp convert ./Llama-3.1-8B llama.safetensors             many files to one
  vramp convert llama.safetensors ./llama --max-shard-size 2GB
  vramp convert ./DeepSeek-V3 ./v3-bf16 --dtype bf16         FP8 weights times their scales
  vramp convert ddp.safetensors clean.safetensors --strip-prefix module. --check
  vramp convert ./m ./text-only --exclude 'vision_tower.*' --copy-files

JSON: {outputs, tensors, bytes, skipped: [{name, why, tensors?}], tensors_left_out, scales: {weight: scales}, \
ties: {alias: name}, copied, warnings}.";

const DEMO_EXAMPLES: &str = "\
It writes a checkpoint shaped like a llama (BF16, several shards, Hugging Face names), measures \
what the storage and the memory of this machine can do, loads the checkpoint cold (dropped from \
the page cache, and the kernel asked whether it is gone) and warm, and compares both loads with \
T = S/B. The folder is removed afterwards, also after Ctrl-C.

Examples:
  vramp demo
  vramp demo --bytes 4GiB --dir /mnt/nvme";

/// Loads model weights (safetensors, PyTorch) into host or GPU memory as fast as the hardware allows, and reports the limit.
#[derive(Debug, Parser)]
#[command(name = "vramp", version, max_term_width = 100, arg_required_else_help = true, after_long_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) speech: Speech,
}

/// How much is printed.
#[derive(Debug, Args)]
pub(crate) struct Speech {
    /// Print results and errors only: no warnings, notes or progress.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print more: each file, each read of a plan, and the steps on stderr.
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what a checkpoint holds, from its headers alone.
    #[command(after_long_help = INSPECT_EXAMPLES)]
    Inspect(InspectArgs),
    /// Load a checkpoint and report where the time went.
    #[command(after_long_help = LOAD_EXAMPLES)]
    Load(LoadArgs),
    /// Predict how long a load takes: T = S/B.
    #[command(after_long_help = ESTIMATE_EXAMPLES)]
    Estimate(EstimateArgs),
    /// Measure what this machine can do, and how near a load comes to it.
    #[command(after_long_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// Check a checkpoint against the names, types and shapes that a model needs.
    #[command(after_long_help = VERIFY_EXAMPLES)]
    Verify(VerifyArgs),
    /// Convert a checkpoint to safetensors: reshard, cast, rename, or take a part of it.
    #[command(after_long_help = CONVERT_EXAMPLES)]
    Convert(ConversionArgs),
    /// List what unpickling a file would run, without running it.
    #[command(after_long_help = AUDIT_EXAMPLES)]
    Audit(AuditArgs),
    /// Make a checkpoint, load it cold and warm, and compare with what this machine can do.
    #[command(after_long_help = DEMO_EXAMPLES)]
    Demo(DemoArgs),
    /// Print the completion script of a shell.
    #[command(
        after_long_help = "Example:\n  vramp completions bash > ~/.local/share/bash-completion/completions/vramp"
    )]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Print the manual page.
    #[command(after_long_help = "Example:\n  vramp man | man -l -")]
    Man {
        /// Write one page a command into this folder instead.
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        dir: Option<PathBuf>,
    },
}

impl Command {
    /// Whether programs read the output.
    pub(crate) fn wants_json(&self) -> bool {
        match self {
            Command::Inspect(args) => args.json,
            Command::Load(args) => args.json,
            Command::Estimate(args) => args.json,
            Command::Bench(args) => args.json,
            Command::Verify(args) => args.json,
            Command::Convert(args) => args.json,
            Command::Audit(args) => args.json || args.format == Some(AuditFormat::Json),
            Command::Demo(args) => args.json,
            Command::Completions { .. } | Command::Man { .. } => false,
        }
    }

    /// The checkpoint or the folder that it works on.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Command::Inspect(args) => Some(&args.path),
            Command::Load(args) => Some(&args.path),
            Command::Bench(args) => Some(&args.path),
            Command::Verify(args) => Some(&args.path),
            Command::Convert(args) => Some(&args.input),
            Command::Audit(args) => Some(&args.path),
            Command::Estimate(args) => args.path.as_deref(),
            Command::Demo(args) => args.dir.as_deref(),
            Command::Man { dir } => dir.as_deref(),
            Command::Completions { .. } => None,
        }
    }
}

/// How a checkpoint is opened.
#[derive(Debug, Args)]
#[command(next_help_heading = "Opening")]
pub(crate) struct OpenHow {
    /// Take the files of this variant.
    ///
    /// `fp16` takes `model.fp16.safetensors` and its shards. Without it, variants are ignored.
    #[arg(long, value_name = "NAME")]
    pub(crate) variant: Option<String>,
    /// Reject a header larger than this.
    #[arg(long, value_name = "BYTES", default_value = "100MB", value_parser = values::bytes)]
    pub(crate) max_header_bytes: u64,
    /// Only what lies below this key of a PyTorch file's object: state_dict, or ema.model.
    ///
    /// Keys are joined with dots; names go on from there.
    #[arg(long, value_name = "PATH")]
    pub(crate) key: Option<String>,
    /// Pass over unknown objects of a PyTorch file, unread, and list them.
    ///
    /// Without it they are refused by name. Tensors in them are left out and counted; a whole model (torch.save(model)) that is the
    /// object, or what --key names, is read as its state dict. Nothing is executed either way, and what is known to run code is
    /// refused even then.
    #[arg(long)]
    pub(crate) skip_unknown: bool,
}

/// Which tensors, and which parts of them.
#[derive(Debug, Args)]
#[command(next_help_heading = "Selection")]
pub(crate) struct SelectionArgs {
    /// Only tensors whose name matches (repeatable).
    ///
    /// `*` matches any characters, dots too, `?` one, `[ab]` one of these, `{x,y}` either. Quote it for the shell. A pattern
    /// that matches nothing is an error.
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// No tensors whose name matches (repeatable); it wins over --include.
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Part of a tensor: indices START to END-1 along dimension DIM (repeatable).
    #[arg(long, value_name = "NAME=DIM:START:END", value_parser = values::slice)]
    pub(crate) slice: Vec<SliceRequest>,
    /// Load the share of one rank of a tensor-parallel group: 0/4 is the first of four.
    #[arg(long, value_name = "RANK/WORLD", value_parser = values::rank)]
    pub(crate) tp: Option<values::Rank>,
    /// Cut the tensors that match along this dimension (repeatable); the others are loaded whole.
    ///
    /// Without it, the built-in rules of the architecture that config.json names. A dimension that WORLD does not divide is
    /// an error.
    #[arg(long, value_name = "GLOB=DIM", requires = "tp", value_parser = values::cut)]
    pub(crate) tp_dim: Vec<values::Cut>,
    #[command(flatten)]
    pub(crate) names: NameArgs,
}

/// Under which names.
#[derive(Debug, Args)]
#[command(next_help_heading = "Selection")]
pub(crate) struct NameArgs {
    /// Remove this prefix from names that have it (repeatable).
    ///
    /// One prefix is removed once. Several are removed in any order, as often as a name begins with one of them.
    #[arg(long, value_name = "PREFIX")]
    pub(crate) strip_prefix: Vec<String>,
    /// ALIAS is another name of the tensor NAME (repeatable).
    ///
    /// Both names share one memory. If both are stored, their bytes must be equal.
    #[arg(long, value_name = "ALIAS=NAME", value_parser = values::tie)]
    pub(crate) tied: Vec<Tie>,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A safetensors or PyTorch file, a folder of them, an index.json, or the name of a model in the local cache.
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// List all tensors, by name; without it, the 20 largest. JSON has all of them always.
    #[arg(long, conflicts_with_all = ["tree", "plan"])]
    pub(crate) all: bool,
    /// Show the names as a tree; numbered parts that are alike are shown once.
    #[arg(long)]
    pub(crate) tree: bool,
    /// Show what a load to host memory would do: reads, routes, memory.
    #[arg(long)]
    pub(crate) plan: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) how: OpenHow,
}

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// A safetensors or PyTorch file, a folder of them, an index.json, or the name of a model in the local cache.
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// Load to this device: cuda (also cuda:1, cuda:GPU-8c6f…), cpu, or null (reads everything, keeps nothing).
    ///
    /// Without it, the first GPU where there is one, else cpu; the report says which. CUDA_VISIBLE_DEVICES hides and reorders
    /// GPUs.
    #[arg(long, value_name = "DEVICE", value_parser = values::device)]
    pub(crate) device: Option<String>,
    /// Require that the checkpoint matches a specification before reading: a JSON file (- is standard input) or a checkpoint.
    ///
    /// The same strict check as `vramp verify`. With a selection, the check is of the whole checkpoint.
    #[arg(long, value_name = "SPEC", value_hint = ValueHint::AnyPath)]
    pub(crate) spec: Option<PathBuf>,
    /// Print the SHA-256 of each tensor as loaded, read back from the device.
    ///
    /// Its time is reported separately.
    #[arg(long)]
    pub(crate) digests: bool,
    /// Print a 64-bit checksum of each tensor as loaded, computed where it lies: on a GPU by the GPU.
    ///
    /// The same on every device for the same bytes, so that a load to the CPU and one to a GPU can be compared without
    /// reading the GPU's memory back. It does not protect against tampering; --digests does.
    #[arg(long)]
    pub(crate) checksums: bool,
    /// Print the plan and read no tensor.
    #[arg(long, conflicts_with_all = ["digests", "checksums"])]
    pub(crate) plan_only: bool,
    /// Compare with the limits in FILE instead of those that `vramp bench` keeps in the cache folder.
    ///
    /// T = S/B is printed only with a B that was measured before, on this machine, device and file system.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) limits: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// When to show progress on stderr; auto: when it is a terminal.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(crate) progress: ProgressArg,
    /// Write a timeline of the load to FILE, for Perfetto or chrome://tracing.
    ///
    /// One lane for each concurrent reader, for each upload, and for the loop between them. A load that fails leaves what it did
    /// until then.
    #[arg(long, value_name = "FILE", conflicts_with = "plan_only", value_hint = ValueHint::FilePath)]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) convert: ConvertArgs,
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    #[command(flatten)]
    pub(crate) how: OpenHow,
}

/// Conversion of the elements.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversion")]
pub(crate) struct ConvertArgs {
    /// What floating-point tensors become: bf16, f16 or f32; others stay as they are.
    ///
    /// Rounds to the nearest, ties to even. 8-bit weights are multiplied by their scales (NAME_scale_inv, NAME_scale,
    /// scale_weight or others beside them, one a tensor, a row or a block), which are not handed out then; a scale that cannot be
    /// used is an error. NVFP4, MXFP4 and MXFP8 weights are dequantised. Other packed weights (GPTQ, AWQ, bitsandbytes, …) stay
    /// as they are, with all that belongs to them, and a warning counts them. On a GPU the GPU converts, after the upload.
    #[arg(long, value_name = "DTYPE", value_parser = values::target)]
    pub(crate) dtype: Option<Float>,
    /// Let finite numbers that the type does not reach become infinite; otherwise they are an error.
    #[arg(long, requires = "dtype")]
    pub(crate) allow_overflow: bool,
}

/// How the bytes are moved.
#[derive(Debug, Args)]
#[command(next_help_heading = "Transfer")]
pub(crate) struct TransferArgs {
    /// Which way the bytes go.
    #[arg(long, value_name = "ROUTE", default_value = "auto")]
    pub(crate) route: RouteArg,
    /// Number and size of the staging buffers, as 16x4MiB.
    ///
    /// Without it vramp chooses.
    #[arg(long, value_name = "COUNTxBYTES", value_parser = values::staging)]
    pub(crate) staging: Option<Staging>,
    /// Move the bytes as this file says, which `vramp bench --tune --save-profile` wrote.
    ///
    /// Options that are typed win over what it says.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) profile: Option<PathBuf>,
    /// Put every tensor on a multiple of this many bytes (a power of two; device cpu only).
    ///
    /// Without it tensors are aligned for their type, and to 64 bytes where that costs no copy.
    #[arg(long, value_name = "BYTES", value_parser = values::alignment)]
    pub(crate) align: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RouteArg {
    /// By what is in the page cache, read by read.
    Auto,
    /// Past the page cache (O_DIRECT) wherever the file system allows it.
    Direct,
    /// Through the page cache, by read.
    Buffered,
    /// Through the page cache, out of a mapping.
    Mapped,
    /// From the disk to the GPU, past the host (GPUDirect Storage), wherever cuFile can; the rest as by auto.
    GpuDirect,
    /// No copy: tensors borrow a read-only mapping and are read when touched (device cpu).
    View,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressArg {
    /// When stderr is a terminal.
    Auto,
    /// Not at all.
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AuditFormat {
    /// For people.
    Text,
    /// For programs; the same as --json.
    Json,
    /// SARIF 2.1.0, for services that show findings.
    Sarif,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FailOn {
    /// Anything worth knowing.
    Notice,
    /// What no honest writer of weights makes.
    Suspicious,
    /// What is known to run code.
    Dangerous,
}

#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// A file, or a folder of files.
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// How to print what was found; without it as text, with --json as JSON.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<AuditFormat>,
    /// From which finding on the exit status is 1; a malformed file is 3 whatever is said here.
    #[arg(long, value_name = "SEVERITY", default_value = "suspicious")]
    pub(crate) fail_on: FailOn,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// A safetensors or PyTorch file, a folder of them, an index.json, or the name of a model in the local cache.
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// What is demanded: a JSON file (- is standard input) or another checkpoint.
    #[arg(long, value_name = "SPEC", value_hint = ValueHint::AnyPath)]
    pub(crate) spec: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) names: NameArgs,
    #[command(flatten)]
    pub(crate) how: OpenHow,
}

#[derive(Debug, Args)]
pub(crate) struct ConversionArgs {
    /// A safetensors file, one of PyTorch (.pt, .pth, .bin), a folder of either, an index.json, or the name of a model in the
    /// local cache.
    #[arg(value_name = "IN", value_hint = ValueHint::AnyPath)]
    pub(crate) input: PathBuf,
    /// Where to write: a file if the name ends in .safetensors or .sft, else a folder.
    #[arg(value_name = "OUT", value_hint = ValueHint::AnyPath)]
    pub(crate) output: PathBuf,
    /// The most bytes of tensors in one file of a folder; a larger tensor has a file of its own. Without it, 5GB.
    #[arg(long, value_name = "BYTES", value_parser = values::shard_bytes)]
    pub(crate) max_shard_size: Option<u64>,
    /// How to write tensors that have several names.
    #[arg(long, value_name = "HOW", default_value = "write")]
    pub(crate) ties: TiesArg,
    /// Compare the checksums that a PyTorch checkpoint states first; read the written files back, past the page cache where
    /// possible, and compare them before they are put in place.
    #[arg(long)]
    pub(crate) check: bool,
    /// Replace the model that is in OUT. Without it, only IN itself may be replaced.
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Copy what a loader needs beside the weights, sub-folders too, and list what was left.
    ///
    /// Configuration (*.json, *.yaml), tokenizers and vocabularies (*.txt, *.model, *.tiktoken, …), chat templates (*.jinja) and
    /// the model's own code (*.py). Never weights, pickles, the state of a training run, hidden files, or links that leave the
    /// folder.
    #[arg(long)]
    pub(crate) copy_files: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// When to show progress on stderr; auto: when it is a terminal.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(crate) progress: ProgressArg,
    /// Only tensors whose name matches (repeatable).
    ///
    /// `*` matches any characters, dots too, `?` one, `[ab]` one of these, `{x,y}` either. Quote it for the shell. A pattern
    /// that matches nothing is an error.
    #[arg(long, value_name = "GLOB", help_heading = "Selection")]
    pub(crate) include: Vec<String>,
    /// No tensors whose name matches (repeatable); it wins over --include.
    #[arg(long, value_name = "GLOB", help_heading = "Selection")]
    pub(crate) exclude: Vec<String>,
    /// Remove this prefix from names that have it (repeatable).
    ///
    /// One prefix is removed once. Several are removed in any order, as often as a name begins with one of them.
    #[arg(long, value_name = "PREFIX", help_heading = "Selection")]
    pub(crate) strip_prefix: Vec<String>,
    #[command(flatten)]
    pub(crate) convert: ConvertArgs,
    #[command(flatten)]
    pub(crate) how: OpenHow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TiesArg {
    /// Each name gets its own copy of the bytes; every reader supports that.
    Write,
    /// One name gets the bytes; the others are recorded in the metadata, as safetensors.torch.save_model does.
    Alias,
}

#[derive(Debug, Args)]
pub(crate) struct EstimateArgs {
    /// A checkpoint: S is the size of its tensors.
    #[arg(value_name = "PATH", conflicts_with_all = ["parameters", "experts", "dtype", "scales"], value_hint = ValueHint::AnyPath)]
    pub(crate) path: Option<PathBuf>,
    /// Number of parameters, as 70B, 560M or 123456, with --dtype or as 70B=f16 (repeatable).
    ///
    /// Several make a mixture: --parameters 2B=bf16 --parameters 68B=fp8.
    #[arg(long, value_name = "COUNT[=DTYPE]", action = ArgAction::Append, allow_hyphen_values = true, value_parser = values::part)]
    pub(crate) parameters: Vec<values::Part>,
    /// Experts of a mixture and the parameters of one over all layers: 8x5.6B, 8x5.6B=fp8 (repeatable).
    ///
    /// They are added to --parameters, which then counts what is not in experts. All of them are loaded, however few are
    /// active for a token.
    #[arg(long, value_name = "NxCOUNT[=DTYPE]", action = ArgAction::Append, value_parser = values::experts)]
    pub(crate) experts: Vec<values::Part>,
    /// The element type of those that name none, as f16, bf16, F8_E4M3, int8, int4, nf4, mxfp4.
    ///
    /// int4, uint4, nf4, mxfp4 and nvfp4 are half a byte each; --scales adds what lies beside them.
    #[arg(long, value_name = "DTYPE", value_parser = values::dtype)]
    pub(crate) dtype: Option<vramp::dtype::StoredDtype>,
    /// Scales stored beside weights of 8 bits or fewer: 128x128=f32, 32=F8_E8M0 or 16=fp8.
    ///
    /// One scale a block of so many elements. They are part of S, not of the number of parameters.
    #[arg(long, value_name = "BLOCK=DTYPE", value_parser = values::scales)]
    pub(crate) scales: Option<vramp_bench::estimate::Scales>,
    /// A link that every byte passes: 12GB/s, NAME=12GB/s, or a named one (repeatable).
    ///
    /// In the order in which a byte passes them. Named: pcie3x16, pcie4x16, pcie5x16, pcie6x16 (also x8 and x4), nvlink-c2c,
    /// nvme-gen3, nvme-gen4, nvme-gen5, sata-ssd, usb3-5g, usb3-10g, usb4-40g, ebs-gp3, ebs-gp3-max, ebs-io2, s3-stream,
    /// s3-many, 10gbe, 25gbe, 40gbe, 100gbe, 200gbe, 400gbe: what well-made software reaches on one of them. Without
    /// --bandwidth, each of them is shown.
    #[arg(long, value_name = "LINK", action = ArgAction::Append, allow_hyphen_values = true, value_parser = values::link)]
    pub(crate) bandwidth: Vec<Link>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) fleet: FleetArgs,
    #[command(flatten)]
    pub(crate) how: OpenHow,
}

/// Many hosts at once.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fleet")]
pub(crate) struct FleetArgs {
    /// So many hosts start this model at once: how long by shared storage, object storage, local drives and peers.
    ///
    /// vramp itself reads files today: shared storage and local drives. Object storage and passing weights on between peers are
    /// not built yet; their times say what tools that do it could reach.
    ///
    /// A simulation of the stores, cards, drives and GPU links below. Without --shared, --object and --nvme all three are
    /// there: 5GB/s,20GB/s and s3-many,100GB/s and nvme-gen4,5GB/s, which are examples and no facts.
    #[arg(long, value_name = "HOSTS", conflicts_with = "bandwidth", value_parser = values::hosts)]
    pub(crate) fleet: Option<u64>,
    /// A shared file system: what one host gets of it, and what all get together (without it: no limit).
    #[arg(long, value_name = "PER_HOST[,TOTAL]", requires = "fleet", value_parser = values::pair)]
    pub(crate) shared: Option<values::Pair>,
    /// An object store, likewise.
    #[arg(long, value_name = "PER_HOST[,TOTAL]", requires = "fleet", value_parser = values::pair)]
    pub(crate) object: Option<values::Pair>,
    /// The drives of a host together: reading, and writing (without it: as fast).
    #[arg(long, value_name = "READ[,WRITE]", requires = "fleet", value_parser = values::pair)]
    pub(crate) nvme: Option<values::Pair>,
    /// The network card of a host, in each direction.
    #[arg(long, value_name = "LINK", requires = "fleet", default_value = "100gbe", value_parser = values::link)]
    pub(crate) nic: Link,
    /// The link to each GPU.
    #[arg(long, value_name = "LINK", requires = "fleet", default_value = "pcie5x16", value_parser = values::link)]
    pub(crate) gpu_link: Link,
    /// GPUs of a host; each takes its share of the model.
    #[arg(long, value_name = "COUNT", requires = "fleet", default_value = "8", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) gpus: u64,
    /// Each GPU takes the whole model, which the host still fetches once.
    #[arg(long, requires = "fleet")]
    pub(crate) gpu_copies: bool,
    /// The piece that is passed on from stage to stage and from peer to peer.
    #[arg(long, value_name = "BYTES", requires = "fleet", default_value = "16MiB", value_parser = values::bytes)]
    pub(crate) chunk: u64,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A safetensors or PyTorch file, a folder of them, an index.json, or the name of a model in the local cache.
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// Load to this device: cuda (also cuda:1, cuda:GPU-8c6f…), cpu, or null (reads everything, keeps nothing).
    ///
    /// Without it, the first GPU where there is one, else cpu; the report says which.
    #[arg(long, value_name = "DEVICE", value_parser = values::device)]
    pub(crate) device: Option<String>,
    /// Fewer settings and rounds: done within half a minute.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Loads of each cache state, beside the one that warms up.
    ///
    /// Without it vramp chooses; more rounds make the median steadier. With --quick they end when the time is up.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=999))]
    pub(crate) rounds: Option<u16>,
    /// Then search for options that load this checkpoint faster, for about SECONDS (60 if none are given).
    ///
    /// Each value is compared with the best so far by loads in turn, cold and warm; one that is not better than the noise is not
    /// kept.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "60", value_parser = values::budget)]
    pub(crate) tune: Option<Duration>,
    /// Write the options that the search found to FILE, for `vramp load --profile`.
    #[arg(long, value_name = "FILE", requires = "tune", value_hint = ValueHint::FilePath)]
    pub(crate) save_profile: Option<PathBuf>,
    /// Keep the measured limits in FILE instead of the cache folder, for `vramp load --limits`.
    ///
    /// Without it: vramp/limits-MACHINE.json in $XDG_CACHE_HOME or ~/.cache, where `vramp load` looks. An entry holds for one
    /// machine, device and file system. Runs with --dtype, or with a --route other than auto and direct, keep none.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) limits: Option<PathBuf>,
    /// Write every sample to FILE, a line each.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) csv: Option<PathBuf>,
    /// Write the report with charts to FILE, for any browser.
    ///
    /// One file that fetches nothing and runs no script.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) html: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) convert: ConvertArgs,
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    #[command(flatten)]
    pub(crate) how: OpenHow,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Size of the checkpoint; 1GiB, or less where memory or disk is short, down to 64MiB.
    ///
    /// It takes that much disk, and twice that much memory: the weights as loaded and as they lie in the page cache. What is
    /// asked for is not made smaller, and may be as little as 1MiB.
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    pub(crate) bytes: Option<u64>,
    /// The folder to work in; a folder of its own is made in it.
    ///
    /// Without it, the folder for temporary files, unless that lies in memory.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,
    /// Keep the checkpoint and say where it is.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
