#!/usr/bin/env python3
"""One load by a loader written in Python, one line of JSON: what `scripts/peers` reads.

    peers-worker.py --list             which loaders can run here, and the versions of what they are in
    peers-worker.py --pt FILE OUT      write the tensors of a safetensors FILE as torch.save does
    peers-worker.py LOADER FILE...     one load

`load_s` runs from the loader's call until every byte lies in memory that this process owns; imports are done before. With
BENCH_VERIFY=sha256 the line also holds the SHA-256 of each tensor's bytes, and how many of the tensors' bytes lie in a mapping
of the files still (`in_files`), which must be none.
"""
import hashlib
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time


# Each does its imports and returns what is timed: from a list of files to the tensors by name, and what must outlive them.
def load_file(**how):
    from safetensors.torch import load_file

    # Since 0.8 `backend="pread"` reads into memory of its own; the default gives views of a mapping, which get a copy.
    copy = (lambda tensor: tensor) if how else (lambda tensor: tensor.clone())
    return lambda files: ({k: copy(v) for f in files for k, v in load_file(f, **how).items()}, None)


def safe_open():
    from safetensors import safe_open

    def load(files):
        out = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                out.update((key, opened.get_tensor(key).clone()) for key in opened.keys())
        return out, None
    return load


def torch_load():
    import torch
    return lambda files: ({k: v for f in files for k, v in torch.load(f, weights_only=True).items()}, None)


def torch_load_mmap():
    import torch
    return lambda files: (
        {k: v.clone() for f in files for k, v in torch.load(f, weights_only=True, mmap=True).items()}, None)


def runai():
    from runai_model_streamer import SafetensorsStreamer

    def load(files):
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files)
            return dict(streamer.get_tensors()), None
    return load


def fastsafetensors(**how):
    from fastsafetensors import SafeTensorsFileLoader

    def load(files):
        loader = SafeTensorsFileLoader(None, "cpu", nogds=True, **how)
        loader.add_filenames({0: files})
        buffers = loader.copy_files_to_device()
        return {key: buffers.get_tensor(key) for key in loader.get_keys()}, (loader, buffers)
    return load


# name: package, what prepares it, whether it reads the .pt files, environment. Defaults first; where a default reads around the
# page cache, also the setting that suits files in the page cache.
LOADERS = {
    "safetensors load_file + clone": ("safetensors", load_file, False, {}),
    "safetensors load_file, pread": ("safetensors", lambda: load_file(backend="pread"), False, {}),
    "safetensors safe_open + clone": ("safetensors", safe_open, False, {}),
    "torch.load": ("torch", torch_load, True, {}),
    "torch.load, mmap + clone": ("torch", torch_load_mmap, True, {}),
    "Run:ai streamer": ("runai_model_streamer", runai, False, {}),
    "Run:ai streamer, buffered, 2 threads": (
        "runai_model_streamer", runai, False,
        {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered", "RUNAI_STREAMER_CONCURRENCY": "2"}),
    "fastsafetensors": ("fastsafetensors", fastsafetensors, False, {}),
    "fastsafetensors, buffered, 2 threads": (
        "fastsafetensors", lambda: fastsafetensors(max_threads=2), False, {"FASTSAFETENSORS_ODIRECT": "0"}),
}


def listing():
    versions, loaders = {"python": sys.version.split()[0]}, {}
    for package in ["numpy", "torch", "safetensors", "runai-model-streamer", "fastsafetensors"]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    for name, (package, _, pt, env) in LOADERS.items():
        loaders[name] = {"pt": pt, "env": env, "missing": None}
        try:
            importlib.import_module("torch")
            importlib.import_module(package)
        except Exception as error:  # a broken package may raise anything; it is said, not measured
            loaders[name]["missing"] = f"{type(error).__name__}: {error}"
    return {"versions": versions, "loaders": loaders}


def write_pt(file, out):
    import torch
    from safetensors.torch import load_file
    # Copies: views of one mapping would be saved as one storage, which is not how checkpoints are written.
    torch.save({key: tensor.clone() for key, tensor in load_file(file).items()}, out)
    with open(out, "rb") as written:
        os.fsync(written.fileno())  # else the pages stay dirty and cannot be dropped
    return {"written": out}


def mappings(files):
    """Address ranges of this process that are mappings of the files."""
    wanted = {os.path.realpath(file) for file in files}
    with open("/proc/self/maps") as maps:
        lines = [line.rstrip("\n").split(None, 5) for line in maps]
    return [tuple(int(at, 16) for at in parts[0].split("-")) for parts in lines if len(parts) > 5 and parts[5] in wanted]


def spent():
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime, use.ru_inblock * 512


def one_load(name, files):
    import torch
    load = LOADERS[name][1]()
    torch.zeros(1 << 20).clone()  # what torch sets up at its first work is no part of a load
    cpu, disk = spent()
    started = time.perf_counter()
    tensors, _kept = load(files)
    seconds = time.perf_counter() - started
    cpu_after, disk_after = spent()
    answer = {"load_s": seconds, "cpu_s": cpu_after - cpu, "disk_bytes": disk_after - disk}
    if os.environ.get("BENCH_VERIFY") == "sha256":
        bytes_of = {k: v.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for k, v in tensors.items()}
        answer["sha256"] = {key: hashlib.sha256(data).hexdigest() for key, data in bytes_of.items()}
        ranges = mappings(files)
        answer["in_files"] = sum(v.nbytes for v in tensors.values()
                                 if any(start <= v.data_ptr() < end for start, end in ranges))
    return answer


def main():
    if sys.argv[1:] == ["--list"]:
        answer = listing()
    elif sys.argv[1:2] == ["--pt"]:
        answer = write_pt(*sys.argv[2:])
    else:
        answer = one_load(sys.argv[1], sys.argv[2:])
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the kernel frees faster, and freeing is not part of a load


if __name__ == "__main__":
    main()
