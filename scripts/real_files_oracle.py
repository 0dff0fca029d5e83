"""Read one weight file with torch or safetensors, and print the number of its tensors and their digest as scripts/real-files has it.

    python scripts/real_files_oracle.py FILE

It needs torch, numpy and safetensors, and shares no code with vramp. What `weights_only` refuses is unpickled with stand-ins: a class
that is not torch's, numpy's or a plain container becomes an empty one that does nothing. Only for the files of scripts/real-files.
"""
import hashlib
import pickle
import sys
import types

import torch

KNOWN = {"torch", "collections", "numpy", "_codecs", "argparse"}
BUILTINS = {"set", "frozenset", "list", "tuple", "dict", "int", "float", "str", "bool", "bytes", "bytearray", "complex", "object", "long"}
# Modules of whole models in these files.
MODULES = {"model"}
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}


class StandIn(dict):
    def __init__(self, *_args, **_kwargs):
        super().__init__()

    def __setstate__(self, state):
        self.state = state

    def __call__(self, *_args, **_kwargs):
        return StandIn()

    def __hash__(self):
        return id(self)

    def append(self, _item):
        pass

    def extend(self, _items):
        pass


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        module = {"__builtin__": "builtins"}.get(module, module)
        if module.split(".")[0] in KNOWN or (module == "builtins" and name in BUILTINS):
            return int if name == "long" else super().find_class(module, name)
        return type(name, (torch.nn.Module if module in MODULES else StandIn,), {})


def read(path):
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        reader = types.SimpleNamespace(
            Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load(), __name__="stand_ins"
        )
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)


def tensors(value, path=()):
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        yield ".".join(path) or "tensor", value.detach()
    elif isinstance(value, dict) and not isinstance(value, StandIn):
        for key, inner in value.items():
            yield from tensors(inner, (*path, str(key)))
    elif isinstance(value, (list, tuple, set)):
        for at, inner in enumerate(value):
            yield from tensors(inner, (*path, str(at)))


def main():
    lines = []
    for name, tensor in tensors(read(sys.argv[1])):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        dtype = NAMES[str(tensor.dtype).removeprefix("torch.")]
        lines.append(f"{name}\t{dtype}\t{list(tensor.shape)}\t{hashlib.sha256(raw).hexdigest()}\n")
    print(len(lines), hashlib.sha256("".join(sorted(lines)).encode()).hexdigest())


if __name__ == "__main__":
    main()
