"""Random adapters of all kinds for one layer, and its weight with one merged, written from the formulas in float64."""

import torch
from safetensors.torch import save_file

FIRST = {  # and the forms of layers that have them
    "LoRA": "linear conv",
    "LoCon in Tucker form": "conv",
    "LoHa": "linear conv",
    "LoHa of a large rank": "linear conv",
    "LoHa in Tucker form": "conv",
    "LoKr": "linear conv",
    "LoKr of low ranks": "linear conv",
    "LoKr in Tucker form": "conv",
    "difference": "linear conv",
}
DECOMPOSED = {  # a kind of the first table, and DoRA's axis
    "DoRA": ("LoRA", "out"),
    "DoRA along the inputs": ("LoRA", "in"),
    "DoRA of LoHa": ("LoHa", "out"),
    "DoRA of LoKr": ("LoKr", "out"),
    "DoRA of LoKr along the inputs": ("LoKr", "in"),
    "DoRA of peft": ("LoRA", "peft"),
}
ALPHA, RANK = 3.0, 2


def kinds_of(module):
    """Return all kinds that a layer can have."""
    form = "conv" if isinstance(module, torch.nn.Conv2d) else "linear"
    first = [kind for kind, forms in FIRST.items() if form in forms]
    return [*first, *(kind for kind, (inner, _) in DECOMPOSED.items() if inner in first)]


def divisor(number):
    """Return a factor of a layer's size."""
    return next(each for each in (4, 3, 2, 5, 1) if number % each == 0)


def random_adapter(kind, module, generator):
    """Return the matrices of an adapter by their names in kohya's files, or in peft's for its DoRA."""
    weight = module.weight
    (o, i), k = weight.shape[:2], tuple(weight.shape[2:])

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    r, one = RANK, (1,) * len(k)
    a, c = divisor(o), divisor(i)
    b, d = o // a, i // c
    alpha = {"alpha": torch.tensor(ALPHA)}
    if kind in DECOMPOSED:
        inner, axis = DECOMPOSED[kind]
        tensors = random_adapter(inner, module, generator)
        shape = {"out": (o, 1, *one), "in": (1, i, *one), "peft": (1, o, *one) if k else (o,)}[axis]
        size = i if axis == "in" else o
        norms = weight.detach().transpose(0, 1 if axis == "in" else 0).flatten(1).norm(dim=1)
        magnitude = (norms * (0.7 + 0.6 * torch.rand(size, generator=generator))).view(shape)
        return tensors | {"lora_magnitude_vector" if axis == "peft" else "dora_scale": magnitude}
    if kind == "LoRA":
        return alpha | {"lora_down.weight": draw(r, i, *k), "lora_up.weight": draw(o, r, *one)}
    if kind == "LoCon in Tucker form":
        outer = {"lora_down.weight": draw(r, i, 1, 1), "lora_up.weight": draw(o, r, 1, 1)}
        return alpha | outer | {"lora_mid.weight": draw(r, r, *k)}
    if kind in ("LoHa", "LoHa of a large rank"):
        r = r if kind == "LoHa" else 2 * max(o, i)
        sizes = {"a": (o, r), "b": (r, i * torch.Size(k).numel())}
        return alpha | {f"hada_w{n}_{name}": draw(*size) for n in (1, 2) for name, size in sizes.items()}
    if kind == "LoHa in Tucker form":
        sizes = {"t{}": (r, r, *k), "w{}_a": (r, o), "w{}_b": (r, i)}
        return alpha | {f"hada_{name.format(n)}": draw(*size) for n in (1, 2) for name, size in sizes.items()}
    if kind == "LoKr":  # whole factors, whose alpha does not count
        return {"alpha": torch.tensor(torch.inf), "lokr_w1": draw(a, c), "lokr_w2": draw(b, d, *k)}
    if kind == "LoKr of low ranks":
        left = {"lokr_w1_a": draw(a, r), "lokr_w1_b": draw(r, c)}
        return alpha | left | {"lokr_w2_a": draw(b, r), "lokr_w2_b": draw(r, d * torch.Size(k).numel())}
    if kind == "LoKr in Tucker form":
        right = {"lokr_t2": draw(r, r, *k), "lokr_w2_a": draw(r, b), "lokr_w2_b": draw(r, d)}
        return alpha | right | {"lokr_w1": draw(a, c)}
    assert kind == "difference"
    return {"diff": draw(*weight.shape)}


def change_of(kind, tensors, shape):
    """Return the difference of the weights, without DoRA."""
    by = {name: tensor.double() for name, tensor in tensors.items()}
    (o, i), k = shape[:2], tuple(shape[2:])
    s = ALPHA / RANK
    if kind == "LoRA":
        return (s * by["lora_up.weight"].flatten(1) @ by["lora_down.weight"].flatten(1)).view(shape)
    if kind == "LoCon in Tucker form":
        up, down = (by[f"lora_{name}.weight"].flatten(1) for name in ("up", "down"))
        return s * torch.einsum("or,rqhw,qi->oihw", up, by["lora_mid.weight"], down)
    if kind in ("LoHa", "LoHa of a large rank"):
        first, second = (by[f"hada_w{n}_a"] @ by[f"hada_w{n}_b"] for n in (1, 2))
        return (ALPHA / len(by["hada_w1_b"]) * first * second).view(shape)
    if kind == "LoHa in Tucker form":
        first, second = (
            torch.einsum("pqhw,po,qi->oihw", by[f"hada_t{n}"], by[f"hada_w{n}_a"], by[f"hada_w{n}_b"]) for n in (1, 2)
        )
        return s * first * second
    if kind == "LoKr":
        left, right, s = by["lokr_w1"], by["lokr_w2"], 1.0
    elif kind == "LoKr of low ranks":
        left = by["lokr_w1_a"] @ by["lokr_w1_b"]
        right = (by["lokr_w2_a"] @ by["lokr_w2_b"]).view(o // len(left), i // left.shape[1], *k)
    elif kind == "LoKr in Tucker form":
        left = by["lokr_w1"]
        right = torch.einsum("pqhw,pb,qd->bdhw", by["lokr_t2"], by["lokr_w2_a"], by["lokr_w2_b"])
    else:
        return by["diff"]
    product = torch.einsum("ac,bd...->abcd...", left, right)
    return s * product.reshape(shape)


def merged_weight(kind, tensors, weight, strength):
    """Return the weight of a layer with an adapter at a strength, as the programs that use such files do."""
    weight = weight.detach().double()
    inner, axis = DECOMPOSED.get(kind, (kind, None))
    change = change_of(inner, tensors, weight.shape)
    if axis is None:
        return weight + strength * change
    if axis == "peft":  # diffusers: the norm is of the weight at this strength
        trained, share = weight + strength * change, 1.0
    else:  # ComfyUI: a part of the way to the trained weight
        trained, share = weight + change, strength
    magnitude = tensors["lora_magnitude_vector" if axis == "peft" else "dora_scale"].double().flatten()
    if axis == "in":
        flat = trained.transpose(0, 1).flatten(1)
        decomposed = (flat / flat.norm(dim=1, keepdim=True) * magnitude[:, None]).view(trained.transpose(0, 1).shape)
        decomposed = decomposed.transpose(0, 1)
    else:
        flat = trained.flatten(1)
        decomposed = (flat / flat.norm(dim=1, keepdim=True) * magnitude[:, None]).view(trained.shape)
    return weight + share * (decomposed - weight)


def save_all_kinds(file, part, prefix, strength=0.3):
    """Write adapters of all kinds, each of other layers of `part`, that change their weights by about `strength`.

    Return the kind and the matrices of each layer.
    """
    generator, saved = torch.Generator().manual_seed(5), {}
    layers = [
        (name, each) for name, each in part.named_modules() if isinstance(each, torch.nn.Linear | torch.nn.Conv2d)
    ]
    counts = {torch.nn.Linear: 0, torch.nn.Conv2d: 0}
    for name, module in layers:
        kinds = kinds_of(module)
        kind = kinds[counts[type(module)] % len(kinds)]
        counts[type(module)] += 1
        tensors = random_adapter(kind, module, generator)
        change = change_of(DECOMPOSED.get(kind, (kind, None))[0], tensors, module.weight.shape)
        factor = next(
            each for each in ("lora_up.weight", "hada_w1_a", "lokr_w2", "lokr_w2_a", "diff") if each in tensors
        )
        tensors[factor] = tensors[factor] * float(strength * module.weight.norm() / change.norm())
        saved[name] = kind, tensors
    named = {
        f"{prefix}{name.replace('.', '_')}.{matrix}": tensor.contiguous()
        for name, (_, tensors) in saved.items()
        for matrix, tensor in tensors.items()
    }
    save_file(named, file)
    return saved
