"""The formulas of what a file holds for one layer: LoRA, LoCon, LoHa, LoKr, DoRA, whole differences and biases.

LyCORIS (https://arxiv.org/abs/2309.14859) names the kinds, and DoRA is https://arxiv.org/abs/2402.09353. Each is
brought to the forms of `LoraLayer` without loss: a LoHa of rank r is a LoRA of rank r², a whole difference is a
Kronecker product of 1 with it, and DoRA is a vector along the outputs or the inputs. Sizes are checked before anything
is multiplied.

Shapes: in and out the layer's features or channels, h × w its window (1 × 1 of a linear layer), r a rank; a · b = out,
c · d = in.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from noria.errors import ModelError
from noria.models.diffusion.loras.lora_layer import LoraLayer
from noria.models.diffusion.loras.lora_names import Target, num_outputs
from noria.models.diffusion.weight_streaming import stored_value

MAX_RANK = 512
"""The highest rank of two matrices in a file. Published ones have 4 to 320."""

_FIRST_LAYER_HINT = (
    " BFL's Canny and Depth widen the first layer for a second image: use a ControlNet in their place, or serve the "
    "folder of that model."
)


@dataclass(frozen=True)
class _Tensors:
    """The tensors that a file holds for one of its layers, which may be several of the model's."""

    where: str
    by_matrix: Mapping[str, torch.Tensor]
    outputs: int
    inputs: int
    window: tuple[int, int]
    scale_of: Callable[[int], float]  # by the rank
    hint: str = ""

    def __contains__(self, matrix: str) -> bool:
        return matrix in self.by_matrix

    def shape(self, matrix: str) -> tuple[int, ...]:
        """Return the shape of a matrix. Raises ModelError: there is none."""
        if matrix not in self.by_matrix:
            raise ModelError(f"{self.where} has no {matrix} beside {', '.join(sorted(self.by_matrix))}.")
        return tuple(self.by_matrix[matrix].shape)

    def rank(self, matrix: str, dim: int = 0) -> int:
        """Return the rank that a matrix has in this dimension. Raises ModelError: there is no matrix, or too large."""
        shape = self.shape(matrix)
        rank = shape[dim] if len(shape) > dim else 0
        if not 1 <= rank <= MAX_RANK:
            raise ModelError(f"{self.where} has rank {rank}; allowed are 1 to {MAX_RANK}.")
        return rank

    def take(self, matrix: str, *shape: int) -> torch.Tensor:
        """Return a matrix of this shape in float32; dimensions of 1 behind the second may be missing or too many.

        A vector may have dimensions of 1 anywhere. Raises ModelError: there is none, or it has another shape.
        """
        got = self.shape(matrix)
        is_vector = len(shape) == 1 and math.prod(got) == max((1, *got)) == shape[0]
        if not is_vector and _trimmed(got) != _trimmed(shape) and got != (shape[0], math.prod(shape[1:])):
            raise ModelError(
                f"{self.where} has {matrix} of {list(got)}; the model's layer takes {_trimmed(shape)}: the adapter "
                f"belongs to another family of models.{self.hint}"
            )
        return self.by_matrix[matrix].float().reshape(shape)


def _trimmed(shape: Sequence[int]) -> list[int]:
    """Return a shape of two or more dimensions without those of 1 behind these."""
    trimmed = list(shape)
    while len(trimmed) > 2 and trimmed[-1] == 1:
        trimmed.pop()
    return trimmed


def layers_of(
    where: str,
    by_matrix: Mapping[str, torch.Tensor],
    modules: Mapping[Target, torch.nn.Module],
    scale_of: Callable[[int], float],
) -> dict[str, LoraLayer]:
    """Return the additions to `modules`, whose outputs together are those of one layer of a file, by their names.

    `scale_of` returns the file's scale by the rank of its matrices.

    Raises ModelError: the matrices are not those of one kind, or not of the modules' shapes.
    """
    first = next(iter(modules.values()))
    if not isinstance(first, torch.nn.Linear | torch.nn.Conv2d):
        return {target.module: _norm(where, by_matrix, module) for target, module in modules.items()}
    hint = _FIRST_LAYER_HINT if [target.module for target in modules] == ["x_embedder"] else ""
    if isinstance(first, torch.nn.Linear):
        inputs, window = first.in_features, (1, 1)
    else:
        inputs, window = first.in_channels, (first.kernel_size[0], first.kernel_size[1])
    given = _Tensors(where, by_matrix, sum(map(num_outputs, modules.values())), inputs, window, scale_of, hint)
    whole = _change(given)
    layers = {target: _cut(whole, target) for target in modules}
    if "dora_scale" in given or "magnitude" in given:
        layers = _decompose(given, layers, modules)
    return {target.module: _fitted(layers[target], module) for target, module in modules.items()}


def _norm(where: str, by_matrix: Mapping[str, torch.Tensor], module: torch.nn.Module) -> LoraLayer:
    size = num_outputs(module)
    given = _Tensors(where, by_matrix, size, 1, (1, 1), lambda _: 1.0)
    if by_matrix.keys() - {"diff", "diff_b", "alpha"}:
        raise ModelError(f"{where} is a norm, which takes differences of its weight and bias alone.")
    return LoraLayer(
        norm_weight=given.take("diff", size) if "diff" in given else None,
        bias=given.take("diff_b", size) if "diff_b" in given else None,
    )


def _change(given: _Tensors) -> LoraLayer:
    """Return the addition to a layer as the file has it, but for DoRA's vectors."""
    kinds = {build for marker, build in _KINDS.items() if any(name.startswith(marker) for name in given.by_matrix)}
    if len(kinds) > 1:
        raise ModelError(f"{given.where} has more than one kind of adapters: {', '.join(sorted(given.by_matrix))}.")
    layer = kinds.pop()(given) if kinds else LoraLayer()
    if "diff" in given:
        if layer.left is not None:
            raise ModelError(f"{given.where} has more than one kind of adapters: {', '.join(sorted(given.by_matrix))}.")
        whole = given.take("diff", given.outputs, given.inputs, *given.window)
        layer = replace(layer, left=torch.ones(1, 1), right=whole)
    for matrix, scale in (("up_bias", None), ("diff_b", 1.0)):
        if matrix in given:
            added = given.take(matrix, given.outputs)
            added = added * (given.scale_of(layer.rank) if scale is None else scale)
            layer = replace(layer, bias=added if layer.bias is None else layer.bias + added)
    if not layer.tensors:
        raise ModelError(f"{given.where} has {', '.join(sorted(given.by_matrix))} alone, and no matrices.")
    return layer


def _lora(given: _Tensors) -> LoraLayer:
    """LoRA, and LoCon of convolutions, with its Tucker decomposition."""
    if "up.0" in given:
        return _split_lora(given)
    rank = given.rank("up", 1)
    up = given.take("up", given.outputs, rank) * given.scale_of(rank)
    if "mid" not in given:
        return LoraLayer(given.take("down", rank, given.inputs, *given.window), up)
    inner = given.rank("down")
    mid, down = given.take("mid", rank, inner, *given.window), given.take("down", inner, given.inputs)
    return LoraLayer(torch.einsum("ijhw,jn->inhw", mid, down), up)


def _split_lora(given: _Tensors) -> LoraLayer:
    """A LoRA for some of the outputs, and others for the next of them, as one."""
    ups, downs = [], []
    for number in range(sum(name.startswith("up.") for name in given.by_matrix)):
        up = f"up.{number}"
        rank, num_rows = given.rank(up, 1), given.shape(up)[0]
        ups.append(given.take(up, min(num_rows, given.outputs), rank) * given.scale_of(rank))
        downs.append(given.take(f"down.{number}", rank, given.inputs, *given.window))
    if sum(map(len, ups)) != given.outputs:
        raise ModelError(
            f"{given.where} has matrices for {sum(map(len, ups))} outputs; the model's layer has {given.outputs}: the "
            "adapter belongs to another family of models."
        )
    block_diag: Callable[..., torch.Tensor] = torch.block_diag  # which has no types
    return LoraLayer(torch.cat(downs), block_diag(*ups))


def _loha(given: _Tensors) -> LoraLayer:
    """(w1_a · w1_b) ∘ (w2_a · w2_b): the product of their rows and columns, of rank r², unless the whole is less."""
    outer, inner = zip(*(_loha_factors(given, number) for number in "12"), strict=True)
    (a1, a2), (b1, b2) = outer, inner
    scale, rank, size = given.scale_of(len(b1)), len(b1) * len(b2), b1[0].numel()
    if rank * (given.outputs + size) >= given.outputs * size:
        whole = (a1 @ b1.flatten(1)) * (a2 @ b2.flatten(1)) * scale
        return LoraLayer(left=torch.ones(1, 1), right=whole.view(given.outputs, *b1.shape[1:]))
    up = torch.einsum("op,oq->opq", a1, a2).flatten(1)
    return LoraLayer(torch.einsum("pihw,qihw->pqihw", b1, b2).flatten(0, 1), up * scale)


def _loha_factors(given: _Tensors, number: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one of the two products: [out, r] and [r, in, h, w]."""
    a, b, core = f"hada_w{number}_a", f"hada_w{number}_b", f"hada_t{number}"
    rank = given.rank(b)
    if core not in given:
        return given.take(a, given.outputs, rank), given.take(b, rank, given.inputs, *given.window)
    folded = torch.einsum(
        "ijhw,jn->inhw", given.take(core, rank, rank, *given.window), given.take(b, rank, given.inputs)
    )
    return given.take(a, rank, given.outputs).mT, folded


def _lokr(given: _Tensors) -> LoraLayer:
    """The Kronecker product of w1 and w2, each of which may be a product of two."""
    is_whole = "lokr_w1" in given
    shape = given.shape("lokr_w1") if is_whole else given.shape("lokr_w1_a")[:1] + given.shape("lokr_w1_b")[1:2]
    a, c = shape if len(shape) == 2 else (0, 0)
    if not a or not c or given.outputs % a or given.inputs % c:
        raise ModelError(
            f"{given.where} has lokr_w1 of {list(shape)}; the model's layer has {given.outputs} outputs and "
            f"{given.inputs} inputs, which it must divide: the adapter belongs to another family of models."
        )
    b, d, rank = given.outputs // a, given.inputs // c, 0  # alpha counts only where a factor has a rank
    if is_whole:
        left = given.take("lokr_w1", a, c)
    else:
        rank = given.rank("lokr_w1_b")
        left = given.take("lokr_w1_a", a, rank) @ given.take("lokr_w1_b", rank, c)
    if "lokr_w2" in given:
        right = given.take("lokr_w2", b, d, *given.window)
    else:
        rank = given.rank("lokr_w2_b")
        right = _lokr_right(given, rank, b, d)
    return LoraLayer(left=left, right=right * (given.scale_of(rank) if rank else 1.0))


def _lokr_right(given: _Tensors, rank: int, b: int, d: int) -> torch.Tensor:
    if "lokr_t2" not in given:
        inner = given.take("lokr_w2_b", rank, d, *given.window)
        return (given.take("lokr_w2_a", b, rank) @ inner.flatten(1)).view(b, d, *given.window)
    core = given.take("lokr_t2", rank, rank, *given.window)
    outer, inner = given.take("lokr_w2_a", rank, b), given.take("lokr_w2_b", rank, d)
    return torch.einsum("ijhw,ib,jd->bdhw", core, outer, inner)


_KINDS: Mapping[str, Callable[[_Tensors], LoraLayer]] = {"down": _lora, "up": _lora, "hada_": _loha, "lokr_": _lokr}


def _cut(layer: LoraLayer, target: Target) -> LoraLayer:
    """Return the part of a file's layer that is one of the model's."""
    if target.rows is None:
        return layer
    cut = {name: _rows_of(tensor, target) for name, tensor in layer.tensors.items() if name in ("up", "bias")}
    if layer.down is not None and (used := cut["up"].any(0)).any():  # not the ranks of other outputs alone
        cut |= {"down": layer.down[used], "up": cut["up"][:, used]}
    layer = layer.with_tensors(cut)
    if layer.left is None or layer.right is None:
        return layer
    if len(target.rows) > 1:
        whole = _rows_of(_kronecker(layer.left, layer.right), target)
        return replace(layer, left=torch.ones(1, 1), right=whole)
    ((start, stop),), size = target.rows, len(layer.right)
    first = start // size  # row of `left`, of those that cover these
    return replace(layer, left=layer.left[first : -(-stop // size)], first_row=start - first * size)


def _rows_of(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    return tensor if target.rows is None else torch.cat([tensor[start:stop] for start, stop in target.rows])


def _kronecker(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.kron(left.view(*left.shape, *[1] * (right.ndim - 2)), right)


def difference(layer: LoraLayer, num_rows: int) -> torch.Tensor:
    """Return the whole matrix that is added to the `num_rows` rows of a weight, [out, in · h · w], without DoRA."""
    found = torch.zeros(())
    if layer.up is not None and layer.down is not None:
        found = layer.up @ layer.down.flatten(1)
    if layer.left is not None and layer.right is not None:
        rows = _kronecker(layer.left, layer.right)[layer.first_row : layer.first_row + num_rows]
        found = found + rows.flatten(1)
    return found


def _decompose(
    given: _Tensors, layers: Mapping[Target, LoraLayer], modules: Mapping[Target, torch.nn.Module]
) -> dict[Target, LoraLayer]:
    """Return the layers with DoRA's vectors. The position of a 1 in the shape tells which axis they are along."""
    weights = {target: _weight_of(module) for target, module in modules.items()}
    changes = {target: difference(layers[target], num_outputs(module)) for target, module in modules.items()}
    if "magnitude" in given:  # peft's
        vector = given.take("magnitude", given.outputs)
        return {
            target: _with_magnitude(given, layers[target], _rows_of(vector, target), weights[target], changes[target])
            for target in modules
        }
    shape = given.shape("dora_scale")
    if len(shape) > 1 and shape[0] == 1:
        columns = given.take("dora_scale", given.inputs)
        summed = [(weights[each] + changes[each]).square().sum(0).view(given.inputs, -1).sum(1) for each in modules]
        gain = columns / torch.stack(summed).sum(0).sqrt()
        return {
            target: replace(
                layer,
                down=None if layer.down is None else layer.down * gain[:, None, None],
                column_scale=None if layer.left is None else gain,
                input_gain=gain - 1,
            )
            for target, layer in layers.items()
        }
    vector = given.take("dora_scale", given.outputs)
    gains = {each: _rows_of(vector, each) / (weights[each] + changes[each]).norm(dim=1) for each in modules}
    return {
        target: replace(
            layer,
            up=None if layer.up is None else layer.up * gains[target][:, None],
            row_scale=None if layer.left is None else gains[target],
            output_gain=gains[target] - 1,
        )
        for target, layer in layers.items()
    }


def _with_magnitude(
    given: _Tensors, layer: LoraLayer, magnitude: torch.Tensor, weight: torch.Tensor, change: torch.Tensor
) -> LoraLayer:
    if layer.up is None or layer.left is not None:
        raise ModelError(f"{given.where} has more than one kind of adapters: {', '.join(sorted(given.by_matrix))}.")
    terms = [weight.square(), 2 * weight * change, change.square()]
    return replace(layer, magnitude=magnitude, squared_norms=torch.stack([each.sum(1) for each in terms]))


def _weight_of(module: torch.nn.Module) -> torch.Tensor:
    """Return a layer's weight [out, in · h · w] in float32 on the CPU; a quantized one as the layer applies it."""
    weight = module.weight
    if type(weight) is torch.nn.Parameter and weight.is_floating_point():
        return stored_value(weight).detach().to("cpu", torch.float32).flatten(1)
    assert isinstance(module, torch.nn.Linear), "only linear layers are quantized"
    bias, device = module.bias, module.weight.device
    with torch.inference_mode():
        rows = torch.eye(module.in_features, dtype=torch.float32 if bias is None else bias.dtype, device=device)
        outputs = torch.cat([module.forward(each) for each in torch.split(rows, 1024)])
        return (outputs if bias is None else outputs - bias).mT.to("cpu", torch.float32)


def _fitted(layer: LoraLayer, module: torch.nn.Module) -> LoraLayer:
    """Return the matrices of a linear layer without its window of 1 × 1."""
    if isinstance(module, torch.nn.Conv2d):
        return layer
    flat = {name: each.flatten(1) for name, each in layer.tensors.items() if name in ("down", "right")}
    return layer.with_tensors(flat)
