"""Exchanges state dicts between ddpkit and Python, both ways. state_dicts.py STATE_DICTS CASE..."""
import collections
import os
import random
import struct
import subprocess
import sys
import tempfile

import torch
from torch import nn

from cases import run_each

program, *cases = sys.argv[1:]
STEPS, TOLERANCE = 10, 1e-6
torch.set_num_threads(1)
torch.manual_seed(7)


def run(*arguments, fails_with=None):
    done = subprocess.run([program, *arguments], env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=100,
                          capture_output=True, text=True)
    if fails_with is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1 and fails_with in done.stderr and done.stderr.count("\n") == 1, done.stderr


def same(a, b, path="state"):
    """Whether kind and value are equal, bitwise; an OrderedDict may have become a dict, a Parameter a tensor."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.layout == b.layout, path
        assert a.is_meta == b.is_meta and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg(), path
        if a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced() and a.shape == b.shape, path
            same([a._indices(), a._values()], [b._indices(), b._values()], path)
            return
        if a.layout != torch.strided:
            by_rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
            parts = [(t.crow_indices(), t.col_indices()) if by_rows else (t.ccol_indices(), t.row_indices()) for t in (a, b)]
            same([*parts[0], a.values()], [*parts[1], b.values()], path)
            return
        if a.is_meta:
            assert a.shape == b.shape and a.stride() == b.stride() and a.requires_grad == b.requires_grad, path
            return
        # The offset of a tensor without elements has no meaning.
        layouts = [(t.shape, t.stride(), t.storage_offset() * (t.numel() > 0), t.untyped_storage().nbytes(), t.requires_grad)
                   for t in (a, b)]
        assert layouts[0] == layouts[1], (path, a.dtype, *layouts)
        # Clones the tensor: a tensor of one element counts as contiguous with any strides.
        bits = [t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
                .view(torch.uint8).tolist() for t in (a, b)]
        assert bits[0] == bits[1], path
    elif isinstance(a, dict):
        assert isinstance(b, dict) and list(a) == list(b), (path, list(a), list(b))
        assert list(map(type, a)) == list(map(type, b)), (path, list(a), list(b))
        assert isinstance(b, collections.Counter) == isinstance(a, collections.Counter), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert type(b) is (list if isinstance(a, list) else tuple) and len(a) == len(b), path
        for i, (mine, other) in enumerate(zip(a, b)):
            same(mine, other, f"{path}[{i}]")
    elif isinstance(a, float):
        assert type(b) is float and struct.pack("d", a) == struct.pack("d", b), (path, a, b)
    else:
        assert type(a) is type(b) and a == b, (path, a, b)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32,
          torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz,
          torch.float8_e8m0fnu]


def random_tensor(dtype, shape):
    """Random bits: every element differs, and infinities, NaNs and denormals occur."""
    if dtype == torch.bool:
        return torch.randint(2, shape, dtype=torch.uint8).view(torch.bool)
    size = dtype.itemsize
    return torch.randint(256, (*shape, size) if shape else (1, size), dtype=torch.uint8).view(dtype).reshape(shape)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.output = nn.Linear(6, 10, bias=False)
        self.output.weight = self.embedding.weight


def values(folder):
    """All types of values in a state dict."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "model": Tied().state_dict(),
        "module": nn.Linear(3, 2).bfloat16().state_dict(),
        "parameter": nn.Parameter(torch.randn(3)),
        "grad": torch.randn(2, requires_grad=True),
        "base": base, "row": base[1], "transposed": base.t(), "slice": base[1:3, ::2], "expanded": base[0, :1].expand(5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(3.5), "dtypes": [random_tensor(d, (7,)) for d in DTYPES],
        "numbers": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**40, -(2**63), 2**63 - 1],
        "floats": [0.0, -0.0, 1e300, float("inf"), 1 / 3], "bools": (True, False), "none": None,
        "strings": ["", "ä€😀", "x" * 300], "one": (1,), "tuples": ((), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "lists": [[], [1], [[2]]], "ordered": collections.OrderedDict(a=1, b={}), 7: {-3: "int keys", 2**35: 1},
        "size": tuple(torch.Size([2, 3])), "many": {f"key {i}": i for i in range(1000)},
    }
    torch.save(state, f"{folder}/theirs.pt")
    run("copy", f"{folder}/theirs.pt", f"{folder}/ours.pt")
    ours = torch.load(f"{folder}/ours.pt", weights_only=True)
    same(torch.load(f"{folder}/theirs.pt", weights_only=True) | {"parameter": state["parameter"]}, ours)
    assert ours["row"].untyped_storage().data_ptr() == ours["base"].untyped_storage().data_ptr()
    assert ours["model"]["output.weight"].data_ptr() == ours["model"]["embedding.weight"].data_ptr()
    again = Tied()
    again.load_state_dict(ours["model"])
    assert torch.equal(again.output.weight, state["model"]["output.weight"])
    # Files without checksums, and files that are rejected.
    torch.serialization.set_crc32_options(False)
    torch.save(state, f"{folder}/unchecked.pt")
    run("copy", f"{folder}/unchecked.pt", f"{folder}/ours.pt")
    same(ours, torch.load(f"{folder}/ours.pt", weights_only=True))
    for value, reason in (
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (frozenset((1, 2)), "frozenset"), (os.system, "posix.system"),
    ):
        torch.save({"x": value}, f"{folder}/refused.pt")
        run("copy", f"{folder}/refused.pt", f"{folder}/ours.pt", fails_with=reason)
    torch.save({}, f"{folder}/refused.pt", _use_new_zipfile_serialization=False)
    run("copy", f"{folder}/refused.pt", f"{folder}/ours.pt", fails_with="no zip archive")
    torch.save({}, f"{folder}/refused.pt", pickle_protocol=4)
    run("copy", f"{folder}/refused.pt", f"{folder}/ours.pt", fails_with="protocol 4")


def training(folder, kind):
    """Compares ten steps in ddpkit and ten in Python with twenty in Python, in both orders."""
    data = {"x": torch.randn(2 * STEPS, 16, 20), "y": torch.randint(5, (2 * STEPS, 16))}
    torch.save(data, f"{folder}/data.pt")

    def make():
        # The normalisation follows the activation: before it, the gradient of the bias would be only rounding errors.
        model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 5))})
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.02, "weight_decay": 0.1}, {"params": parameters[2:]}]
        if kind.endswith("sgd"):
            return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        Adam = torch.optim.AdamW if kind.endswith("adamw") else torch.optim.Adam
        return model, Adam(groups, lr=0.01, betas=(0.8, 0.95), amsgrad=True)

    def steps(model, optimizer, start, end):
        for x, y in zip(data["x"][start:end], data["y"][start:end]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model["layers"](x), y).backward()
            optimizer.step()

    def save(model, optimizer, name):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{name}")

    def apart(model, name):
        ours = torch.load(f"{folder}/{name}", weights_only=True)["model"]
        assert ours.keys() == model.state_dict().keys()
        return max((model.state_dict()[key].double() - ours[key].double()).abs().max().item() for key in ours)

    model, optimizer = make()
    save(model, optimizer, "start.pt")
    steps(model, optimizer, 0, STEPS)
    save(model, optimizer, "half.pt")
    half = [parameter.detach().clone() for parameter in model.parameters()]
    steps(model, optimizer, STEPS, 2 * STEPS)
    moved = min((a - b).abs().max().item() for a, b in zip(half, model.parameters()))
    assert moved > 1000 * TOLERANCE, moved

    # First Python, then ddpkit.
    run("train", kind, f"{folder}/half.pt", f"{folder}/ours.pt", folder, str(STEPS), str(2 * STEPS))
    python_first = apart(model, "ours.pt")
    # First ddpkit, then Python's optimizer, which starts with other options.
    run("train", kind, f"{folder}/start.pt", f"{folder}/ours.pt", folder, "0", str(STEPS))
    second, its_optimizer = make()
    for group in its_optimizer.param_groups:
        group["lr"] = 7
    ours = torch.load(f"{folder}/ours.pt", weights_only=True)
    theirs = torch.load(f"{folder}/half.pt", weights_only=True)["optimizer"]
    assert ours["optimizer"]["state"].keys() == theirs["state"].keys()
    for mine, their in zip(ours["optimizer"]["param_groups"], theirs["param_groups"]):
        assert mine == their, (mine, their)
    second.load_state_dict(ours["model"])
    its_optimizer.load_state_dict(ours["optimizer"])
    steps(second, its_optimizer, STEPS, 2 * STEPS)
    save(second, its_optimizer, "second.pt")
    ddpkit_first = apart(model, "second.pt")
    print(f"{kind}: apart {python_first:.2g} with Python first, {ddpkit_first:.2g} with ddpkit first; moved {moved:.2g}")
    assert max(python_first, ddpkit_first) <= TOLERANCE


def safetensors(folder):
    import safetensors.torch

    dtypes = [d for d in DTYPES if d not in (torch.complex32, torch.complex128)]
    state = {"weight": torch.randn(3, 5), "scalar": torch.tensor(2.0), "empty": torch.empty(0, 4), "ä": torch.ones(1)}
    state |= {str(d): random_tensor(d, (7,)) for d in dtypes}
    state["F4"] = torch.randint(256, (3, 2), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    safetensors.torch.save_file(state, f"{folder}/theirs.safetensors", metadata={"format": "pt", "about": "ddpkit"})
    run("copy", f"{folder}/theirs.safetensors", f"{folder}/theirs.pt")
    run("copy", f"{folder}/theirs.pt", f"{folder}/ours.safetensors")
    for name, tensor in state.items():
        same(tensor, torch.load(f"{folder}/theirs.pt", weights_only=True)[name])
        same(tensor, safetensors.torch.load_file(f"{folder}/ours.safetensors")[name])
    assert safetensors.safe_open(f"{folder}/ours.safetensors", "pt").metadata() == {"format": "pt"}
    # Not contiguous.
    torch.save({"t": state["weight"].t()}, f"{folder}/theirs.pt")
    run("copy", f"{folder}/theirs.pt", f"{folder}/ours.safetensors")
    assert torch.equal(safetensors.torch.load_file(f"{folder}/ours.safetensors")["t"], state["weight"].t())


def random_view(draw, tensor):
    """Another layout of the same storage."""
    for _ in range(draw.randrange(3)):
        kind, dims = draw.choice(("transpose", "slice", "expand", "select", "permute", "as_strided")), tensor.dim()
        if kind == "transpose" and dims >= 2:
            tensor = tensor.transpose(*draw.sample(range(dims), 2))
        elif kind == "slice" and dims >= 1:
            dim = draw.randrange(dims)
            tensor = tensor.narrow(dim, min(1, tensor.size(dim)), max(0, tensor.size(dim) - 1))
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw.randrange(1, 4)),)]
        elif kind == "expand":
            tensor = tensor.unsqueeze(0).expand(draw.randrange(4), *tensor.shape)
        elif kind == "select" and dims >= 1 and tensor.size(0) > 0:
            tensor = tensor.select(0, draw.randrange(tensor.size(0)))
        elif kind == "permute" and dims >= 2:
            tensor = tensor.permute(*draw.sample(range(dims), dims))
        elif kind == "as_strided" and tensor.untyped_storage().nbytes() >= 4 * tensor.element_size():
            tensor = tensor.as_strided((2, 3), (1, 1), 0)  # Elements overlap.
    return tensor


def random_value(draw, storages, depth=0):
    """A random tree of state dict values. `storages`: tensors whose storage later tensors may share."""
    if depth < 4 and draw.random() < (1.0 if depth == 0 else 0.3):
        count = draw.choice((0, 1, 2, 3, 4, 8))
        items = [random_value(draw, storages, depth + 1) for _ in range(count)]
        keys = draw.sample([*range(-5, 5), 2**40, -(2**63), 2**63 - 1, "", "a", "a.b", "ä😀", "x" * 300], count)
        return draw.choice((list, tuple, lambda i: dict(zip(keys, i)),
                            lambda i: collections.OrderedDict(zip(keys, i))))(items)
    if draw.random() < 0.3:
        return draw.choice((None, True, False, draw.getrandbits(64) - 2**63, draw.randrange(-300, 300), 2**63 - 1, -(2**63),
                            struct.unpack("d", struct.pack("Q", draw.getrandbits(64)))[0], draw.random(),
                            "".join(chr(draw.choice((0, 10, 65, 0xe4, 0x20ac, 0x1f600))) for _ in range(draw.randrange(9)))))
    if storages and draw.random() < 0.3:
        return random_view(draw, draw.choice(storages))
    dtype = draw.choice(DTYPES)
    tensor = random_tensor(dtype, tuple(draw.choice((0, 1, 2, 3, 5)) for _ in range(draw.randrange(5))))
    if tensor.dim() == 4 and draw.random() < 0.5 and dtype.itemsize > 1:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    storages.append(tensor)
    tensor = random_view(draw, tensor)
    # Python cannot load the other types if they require a gradient: "a leaf Variable ... in-place operation".
    differentiable = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    if dtype in differentiable and draw.random() < 0.2:
        tensor = tensor.detach().requires_grad_() if draw.random() < 0.5 else nn.Parameter(tensor.detach())
    return tensor


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided and not value.is_meta else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def sharing(value):
    """For each tensor, the index of the first tensor on its storage. Empty storages have no address."""
    first = {}
    return [first.setdefault(t.untyped_storage().data_ptr() or object(), i) for i, t in enumerate(tensors_in(value))]


# Tensors that PyTorch has conjugated or negated by a flag, without writing their elements.
LAZY = {"conj": lambda x: {"whole": x.conj(), "view": x.conj().t()[1:], "plain": x}, "neg": lambda x: {"whole": x.conj().imag}}


def with_attribute(tensor):
    tensor.about = "x"
    return tensor


# Types that torch.load(weights_only=True) accepts, as in the list of docs/state-dicts.md.
ADMITTED = {
    "Counter": lambda draw: collections.Counter({draw.randrange(9): 2, "a": -1}), "OrderedDict": lambda draw: nn.BatchNorm1d(3).state_dict(),
    "set": lambda draw: {draw.randrange(9), "a", None}, "empty set": lambda draw: set(), "bytes": lambda draw: draw.randbytes(300),
    "bytearray": lambda draw: bytearray(draw.randbytes(300)), "empty bytearray": lambda draw: bytearray(),
    "63 bits": lambda draw: draw.choice((1, -1)) * draw.getrandbits(63), "64 bits": lambda draw: [2**63, -(2**63) - 1, 2**64 - 1, 2**64],
    "2000 bits": lambda draw: draw.choice((1, -1)) * draw.getrandbits(draw.randrange(1, 2000)),
    "dtype": lambda draw: [getattr(torch, f"{sign}int{n}") for n in range(1, 8) for sign in ("", "u")] + DTYPES,
    "quantized dtype": lambda draw: [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4],
    "device": lambda draw: [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")], "layout": lambda draw: [torch.strided, torch.sparse_coo, torch.sparse_bsc],
    "complex": lambda draw: [complex(1, draw.random()), complex("-inf")], "Size": lambda draw: torch.Size([1, draw.randrange(9)]),
    "float key": lambda draw: {draw.random(): 1, 0.0: 2}, "bool key": lambda draw: {True: 1, False: 2}, "None key": lambda draw: {None: 1},
    "tuple key": lambda draw: {(1, draw.randrange(9)): 1, ("a", (None, 2.5)): 2, (): 3}, "bytes key": lambda draw: {b"\xff": 1},
    "other keys": lambda draw: {2**70: 1, 1j: 2, torch.float16: 3, torch.device("cpu"): 4},
    "sparse": lambda draw: [torch.eye(3).to_sparse(), torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))],
    "compressed": lambda draw: [getattr(torch.rand(4, 6).relu(), f"to_sparse_{kind}")(*size) for kind, size in
                                (("csr", ()), ("csc", ()), ("bsr", ((2, 3),)), ("bsc", ((2, 3),)))],
    "meta": lambda draw: torch.empty_strided((2, 3), (1, 2), device="meta", dtype=torch.bfloat16),
    "float4": lambda draw: torch.randint(256, (2, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "MultiStepLR": lambda draw: torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)], 0.1), [3, 5]).state_dict(),
    "Generator": lambda draw: torch.Generator().get_state(),
}
# Objects without a C++ value, and the names in the error. torch.load(weights_only=True) accepts the first ones.
REFUSED = {
    "quantized": (lambda draw: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "QInt8"),
    "qscheme": (lambda draw: torch.per_tensor_affine, "torch.per_tensor_affine"), "storage": (lambda draw: torch.ones(2).untyped_storage(), "a storage outside of a tensor"),
    "attribute": (lambda draw: with_attribute(torch.ones(2)), "_rebuild_from_type_v2"), "nested": (lambda draw: torch.nested.nested_tensor([torch.ones(2)]), "_rebuild_nested_tensor"),
    "frozenset": (lambda draw: frozenset((1, 2)), "frozenset"), "defaultdict": (lambda draw: collections.defaultdict(list, a=[1]), "defaultdict"),
    "ndarray": (lambda draw: torch.ones(2).numpy(), "multiarray._reconstruct"), "slice": (lambda draw: slice(1, 2), "slice"),
}


def drawn(folder):
    """Random trees: equal after a copy, or rejected with the type that C++ lacks. DDPKIT_TEST_SEED repeats a run."""
    seed = int(os.environ.get("DDPKIT_TEST_SEED") or random.randrange(2**32))
    print(f"seed {seed}", flush=True)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cases = []
    for i in range(60):
        storages = []
        cases.append((f"tree {i}", [random_value(draw, storages) for _ in range(5)], None))
    cases += [(name, make(torch.randn(3, 2, dtype=torch.complex64)), None) for name, make in LAZY.items()]
    cases += [(name, {"x": make(draw), "weight": torch.ones(2)}, None) for name, make in ADMITTED.items()]
    cases += [(name, {"x": make(draw), "weight": torch.ones(2)}, named) for name, (make, named) in REFUSED.items()]
    names = []
    for i, (_, value, _) in enumerate(cases):
        torch.save(value, f"{folder}/{i}.pt")
        names += [f"{folder}/{i}.pt", f"{folder}/{i}-ours.pt"]
    done = subprocess.run([program, "copy-each", *names], timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(cases), done.stdout
    wrong = {}
    for i, ((name, value, type_name), answer) in enumerate(zip(cases, answers)):
        if answer != "copied" or type_name is not None:
            if type_name is None or type_name not in answer:
                wrong[name] = answer
            continue
        try:
            theirs, ours = (torch.load(f"{folder}/{i}{end}.pt", weights_only=True) for end in ("", "-ours"))
            same(theirs, ours)
            assert sharing(theirs) == sharing(ours), "tensors share their storage with others than before"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    for name, reason in wrong.items():
        print(f"WRONG: {name}: {reason}")
    assert not wrong, "see above"


def run_case(case):
    with tempfile.TemporaryDirectory() as folder:
        if case == "values":
            values(folder)
            print("what Python wrote came back the same")
        elif case == "drawn":
            drawn(folder)
        elif case == "safetensors":
            safetensors(folder)
            print("what Python wrote came back the same")
        else:
            training(folder, case)


run_each([(case,) for case in cases], run_case)
