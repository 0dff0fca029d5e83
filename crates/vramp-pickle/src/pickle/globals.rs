//! Names that pickles hold, graded: those whose meaning is known and inert, those known to run code, and all others.
//!
//! Only the first kind is ever accepted; the other two differ in what an audit says and in whether a person may pass over them.
//! Names are compared, never resolved.

/// What a global is to a reader that executes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Danger {
    /// Its meaning is known, and it is data.
    Allowed,
    /// A class of a TorchScript archive.
    Script,
    /// Not known: whatever it is, it is not on the list.
    Unknown,
    /// Known to run code, or to lead to what does.
    Dangerous,
}

/// Modules and what of them is data.
#[rustfmt::skip]
const ALLOWED: &[(&str, &[&str])] = &[
    ("collections", &["OrderedDict", "Counter", "defaultdict", "deque"]),
    ("torch._utils", &["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
        "_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor",
        "_rebuild_meta_tensor_no_storage", "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor",
        "_rebuild_nested_tensor", "_rebuild_wrapper_subclass", "_rebuild_xla_tensor"]),
    ("torch.nested._internal.nested_tensor", &["NestedTensor", "_rebuild_njt"]),
    ("torch._tensor", &["_rebuild_from_type_v2", "_rebuild_from_type", "Tensor"]),
    ("torch.tensor", &["_rebuild_from_type_v2", "_rebuild_from_type"]),
    ("torch.serialization", &["_get_layout"]),
    ("torch.storage", &["UntypedStorage", "TypedStorage", "_UntypedStorage", "_TypedStorage"]),
    ("torch.nn.parameter", &["Parameter", "Buffer"]),
    ("torch", &["Size", "Tensor", "device", "nested_tensor"]),
    ("torch.distributed.tensor", &["DTensor"]),
    ("torch.distributed.tensor._api", &["DTensor"]),
    ("torch.distributed._tensor.api", &["DTensor"]),
    ("torch.distributed.tensor._dtensor_spec", &["DTensorSpec", "TensorMeta", "ShardOrderEntry"]),
    ("torch.distributed._tensor.placement_types", &["DTensorSpec", "TensorMeta", "Shard", "Replicate", "_Partial", "Partial"]),
    ("torch.distributed.tensor.placement_types", &["Shard", "Replicate", "Partial", "_StridedShard"]),
    ("torch.distributed.device_mesh", &["DeviceMesh"]),
    ("torch.distributed._mesh_layout", &["_MeshLayout", "_FlatLayout"]),
    ("torch.distributed._shard.sharded_tensor.api", &["ShardedTensor", "ShardedTensor.ProcessGroupState"]),
    ("torch.distributed._shard.sharded_tensor.shard", &["Shard"]),
    ("torch.distributed._shard.metadata", &["ShardMetadata"]),
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", &["ChunkShardingSpec"]),
    ("torch.distributed._shard.sharding_spec.api", &["EnumerableShardingSpec"]),
    ("torch.distributed.remote_device", &["_remote_device"]),
    ("torch.distributed.checkpoint.metadata", &["Metadata", "MetadataIndex", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"]),
    ("torch.distributed._shard.sharded_tensor.metadata", &["TensorProperties", "MEM_FORMAT_ENCODING",
        "ShardedTensorMetadata"]),
    ("torch.distributed._shard.sharded_tensor", &["ShardedTensor"]),
    ("torch.distributed._shard.sharding_spec", &["ChunkShardingSpec", "EnumerableShardingSpec"]),
    ("torch.distributed.checkpoint.filesystem", &["_StorageInfo"]),
    ("torch.distributed.checkpoint._extension", &[]),
    ("_codecs", &["encode"]),
    ("builtins", &["set", "frozenset", "complex", "bytearray", "bytes", "slice", "range", "list", "tuple", "dict", "int",
        "float", "str", "bool", "object", "xrange", "long"]),
    ("copyreg", &["_reconstructor"]),
    ("numpy", &["ndarray", "dtype", "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32",
        "uint16", "uint8", "bool_", "bool", "longlong", "ulonglong", "intc", "uintc"]),
    ("ndarray", &["dtype"]),
    ("numpy.core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy._core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy.core.numeric", &["_frombuffer"]),
    ("numpy._core.numeric", &["_frombuffer"]),
    ("argparse", &["Namespace"]),
    ("datetime", &["datetime", "date", "time", "timedelta", "timezone"]),
    ("pathlib", &["Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"]),
    ("pathlib._local", &["Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"]),
];

/// Element types, types of storages (and of old tensors) without their end, layouts and quantisation schemes: members of `torch`.
#[rustfmt::skip]
const TORCH_NAMES: &[&str] = &[
    "float64", "double", "float32", "float", "float16", "half", "bfloat16", "int64", "long", "int32", "int", "int16",
    "short", "int8", "uint8", "bool", "uint16", "uint32", "uint64", "complex32", "chalf", "complex64", "cfloat",
    "complex128", "cdouble", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4",
    "bits4x2", "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
    "preserve_format", "contiguous_format", "per_tensor_affine", "per_channel_affine", "per_tensor_symmetric",
    "per_channel_symmetric", "per_channel_affine_float_qparams",
];

#[rustfmt::skip]
const STORAGES: &[&str] = &[
    "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat", "ComplexDouble",
    "QInt8", "QInt32", "QUInt8", "QUInt4x2", "QUInt2x4", "Untyped",
];

/// Modules of which nothing is data: they run programs, import, reach into the interpreter, the file system or the net.
#[rustfmt::skip]
const DANGEROUS: &[&str] = &[
    "os", "posix", "nt", "posixpath", "ntpath", "subprocess", "_posixsubprocess", "sys", "importlib", "imp", "runpy",
    "pkgutil", "code", "codeop", "pty", "pdb", "bdb", "timeit", "profile", "cProfile", "trace", "ctypes", "_ctypes",
    "socket", "_socket", "asyncio", "multiprocessing", "concurrent", "threading", "_thread", "signal", "shutil",
    "tempfile", "io", "_io", "webbrowser", "urllib", "http", "ftplib", "smtplib", "telnetlib", "imaplib", "poplib",
    "xmlrpc", "requests", "httpx", "aiohttp", "pip", "setuptools", "distutils", "ensurepip", "venv", "pickle", "_pickle",
    "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "functools", "operator", "_operator", "inspect",
    "commands", "platform", "idlelib", "lib2to3", "doctest", "unittest", "logging", "pydoc", "sqlite3", "zipimport",
    "site", "gc", "atexit", "linecache", "uuid", "ast", "torch.serialization", "torch.hub", "torch.jit", "torch.utils",
    "torch.package", "torch.ops", "torch._ops", "torch._dynamo", "torch._inductor", "torch.multiprocessing",
    "torch.distributed.rpc", "torch.distributed.elastic", "torch.testing", "numpy.testing", "numpy.f2py",
    "numpy.distutils", "fsspec", "paramiko", "fabric", "builtins.object.__reduce__",
];

/// Members of otherwise harmless modules that run code.
#[rustfmt::skip]
const DANGEROUS_NAMES: &[(&str, &[&str])] = &[
    ("builtins", &["eval", "exec", "execfile", "compile", "open", "__import__", "getattr", "setattr", "delattr", "globals",
        "locals", "vars", "input", "raw_input", "breakpoint", "apply", "map", "filter", "reload", "file", "memoryview",
        "help", "type"]),
    ("types", &["FunctionType", "CodeType", "LambdaType", "MethodType"]),
    ("torch", &["load", "save", "compile"]),
    ("torch.storage", &["_load_from_bytes"]),
    ("numpy", &["load", "loads", "fromfile", "memmap"]),
    ("copyreg", &["add_extension", "pickle"]),
];

/// What TorchScript's pickles call to type their lists; each returns its argument, or refuses it.
const SCRIPT_NAMES: &[&str] = &[
    "build_intlist",
    "build_doublelist",
    "build_boollist",
    "build_tensorlist",
    "build_tensor_from_id",
    "restore_type_tag",
];

/// No honest name is longer, in bytes; what such a path of attributes leads to is not looked for.
const LONGEST_NAME: usize = 1 << 16;

/// Grades the name of a global.
pub(crate) fn danger(module: &str, name: &str) -> Danger {
    if module.len() > LONGEST_NAME || name.len() > LONGEST_NAME {
        return Danger::Dangerous;
    }
    let module = modern(module);
    if is_allowed(module, name) {
        return Danger::Allowed;
    }
    if is_script(module, name) {
        return Danger::Script;
    }
    if is_dangerous(module, name) { Danger::Dangerous } else { Danger::Unknown }
}

/// Grades a dotted path below a module: whichever of its parts are modules, none may be known to run code.
pub(crate) fn danger_of_path(module: &str, path: &str) -> Danger {
    let splits = path.match_indices('.').map(|(at, _)| at);
    let reaches = |at: usize| {
        let (inner, rest) = path.split_at(at);
        is_dangerous(&format!("{}.{inner}", modern(module)), rest.trim_start_matches('.'))
    };
    let whole = danger(module, path);
    if whole != Danger::Dangerous && splits.into_iter().any(reaches) { Danger::Dangerous } else { whole }
}

/// Modules of Python 2 by their names in Python 3.
pub(crate) fn modern(module: &str) -> &str {
    match module {
        "__builtin__" => "builtins",
        "copy_reg" => "copyreg",
        other => other,
    }
}

fn is_allowed(module: &str, name: &str) -> bool {
    let listed = ALLOWED.iter().any(|(known, names)| *known == module && names.contains(&name));
    let storage = || name.strip_suffix("Storage").is_some_and(|kind| STORAGES.contains(&kind));
    let tensor = || name.strip_suffix("Tensor").is_some_and(|kind| STORAGES.contains(&kind));
    listed
        || (module == "torch" && (TORCH_NAMES.contains(&name) || storage() || tensor()))
        || (matches!(module, "torch.cuda" | "torch.sparse") && storage())
}

/// A dotted name reaches through the class: it is none of the archive.
fn is_script(module: &str, name: &str) -> bool {
    let class = module == "__torch__" || module.starts_with("__torch__.");
    (class && !name.contains('.')) || (module == "torch.jit._pickle" && SCRIPT_NAMES.contains(&name))
}

fn is_dangerous(module: &str, name: &str) -> bool {
    let begins =
        |whole: &str, part: &str| whole.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let member = |module: &str, name: &str| {
        DANGEROUS.iter().any(|dangerous| begins(module, dangerous))
            || DANGEROUS_NAMES.iter().any(|(known, names)| *known == module && names.contains(&name))
    };
    // A dotted name reaches through its module: `torch.serialization` `os.getenv`, `_rebuild_tensor` `__globals__.get`.
    let first = name.split('.').next().unwrap_or_default();
    let leads = |part: &str| DANGEROUS.contains(&part) || part.starts_with("__");
    let reached = || name.contains('.') && name.split('.').any(leads);
    member(module, name) || member(module, first) || reached()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_dangerous_where_any_part_of_it_leads_there() {
        for (module, path, grade) in [
            ("my.metrics", "Metric.State", Danger::Unknown),
            ("torch", "hub.load", Danger::Dangerous),
            ("my", "deep.os.system", Danger::Dangerous),
            ("torch", "storage._load_from_bytes", Danger::Dangerous),
            ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState", Danger::Allowed),
        ] {
            assert_eq!(danger_of_path(module, path), grade, "{module}.{path}");
        }
    }

    #[test]
    fn names_are_graded_by_their_whole_path() {
        for (module, name, grade) in [
            ("collections", "OrderedDict", Danger::Allowed),
            ("torch", "FloatStorage", Danger::Allowed),
            ("torch", "EvilStorage", Danger::Unknown),
            ("torch", "LongTensor", Danger::Allowed),
            ("torch", "float8_e4m3fn", Danger::Allowed),
            ("__builtin__", "set", Danger::Allowed),
            ("__builtin__", "getattr", Danger::Dangerous),
            ("builtins", "print", Danger::Unknown),
            ("posix", "system", Danger::Dangerous),
            ("os.path", "join", Danger::Dangerous),
            ("osprey", "x", Danger::Unknown),
            ("os\r", "getenv", Danger::Unknown),
            ("torch.serialization", "_get_layout", Danger::Allowed),
            ("torch.serialization", "load", Danger::Dangerous),
            ("collections", "abc.os.getenv", Danger::Dangerous),
            ("my_project.models", "Net", Danger::Unknown),
            ("__torch__.nets", "Net", Danger::Script),
            ("__torch__.nets", "Net.forward", Danger::Unknown),
            ("torch.jit._pickle", "build_intlist", Danger::Script),
            ("torch.jit._pickle", "build_intlist.__builtins__.__getitem__", Danger::Dangerous),
            ("torch.jit._pickle", "sys", Danger::Dangerous),
            ("torch._utils", "_rebuild_tensor.__globals__", Danger::Dangerous),
            ("collections", "OrderedDict.fromkeys", Danger::Unknown),
        ] {
            assert_eq!(danger(module, name), grade, "{module}.{name}");
        }
    }
}
