"""Where an attention head looks, and what it moves from there: its QK and its OV circuit.

A head reads and writes the stream by two D × D matrices (Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits"), in the notation of the layers

    logit of key j for query i = z_iᵀ QK u_j ,      update of i = Σ_j p_ij OV u_j

    CEM     QK = A_k/τ              OV = σ_k (Σ_t η_t) P A_k ,   A_k = diag(d_k) + W_Qkᵀ W_Kk
    Llama   QK = W_Qkᵀ W_Kk/√d_h    OV = W_Okᵀ W_Vk          (norm's gain g multiplied into both, QK on both sides)

A gradient step of a scalar energy has OV = const · QK: a head moves what it looks for. ``alignment`` is the cosine
⟨QK, OV⟩/(‖QK‖ ‖OV‖) of the two in the Frobenius inner product: σ_k, 1 or −1, for CEM with P = I, about 0 for unrelated
matrices.

Rotary positions turn queries and keys, and belong to neither matrix; they are left out. So is what momentum adds to Σ_t η_t.
"""

import pandas as pd
import torch
from torch import Tensor

from energylab.layers import CEMAttention
from energylab.layers.llama import LlamaAttention
from energylab.models import InContextRegressor

COLUMNS = ("block", "head", "alignment", "qk_norm", "ov_norm", "qk_x", "qk_y", "ov_x", "ov_y")


@torch.no_grad()
def circuits(model: InContextRegressor) -> pd.DataFrame:
    """A row for each head: `block`, `head`, `alignment`, and the Frobenius norms ``qk_norm`` and ``ov_norm``.

    In block 0, whose input is a linear image of the tokens, also ``qk_x``, ``qk_y``, ``ov_x`` and ``ov_y``: eᵀ QK e and
    eᵀ OV e with e the unit vector along which the read-in writes x or y, the mean over the inputs where d_x > 1. They say
    how much two tokens attend to each other for having the same x (y), and how much of the x (y) of a token that is
    looked at is added to one's own. Missing in later blocks. Empty for a model without attention that is known here.
    """
    inputs = model.config.input_dim
    directions = torch.nn.functional.normalize(model.read_in.weight.T.double(), dim=1)
    rows = []
    for (block, _), layer in zip(model.parts, model.layers, strict=True):
        if not isinstance(layer, CEMAttention | LlamaAttention):
            continue
        for head, (qk, ov) in enumerate(zip(*_matrices(layer), strict=True)):
            sizes = qk.norm(), ov.norm()
            row = {"block": block, "head": head, "alignment": float((qk * ov).sum() / (sizes[0] * sizes[1]))}
            row |= {"qk_norm": float(sizes[0]), "ov_norm": float(sizes[1])}
            for name, matrix in (("qk", qk), ("ov", ov)):
                own = torch.einsum("fd,de,fe->f", directions, matrix, directions)
                row[f"{name}_x"] = float(own[:inputs].mean()) if block == 0 else float("nan")
                row[f"{name}_y"] = float(own[inputs]) if block == 0 else float("nan")
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"block": "int16", "head": "int16"})


def _matrices(layer: CEMAttention | LlamaAttention) -> tuple[Tensor, Tensor]:
    """QK and OV of every head, (H, D, D) each, in float64."""
    query, key = layer.query_weight.double(), layer.key_weight.double()
    if isinstance(layer, CEMAttention):
        interaction = query.mT @ key
        if layer.diagonal is not None:
            interaction = interaction + torch.diag_embed(layer.diagonal.double())
        path = sum(step_size.double() for step_size in layer.step_sizes(layer.recursions))
        identity = torch.eye(layer.width, dtype=torch.float64, device=query.device)
        preconditioner = layer.preconditioner(identity.to(layer.step_size.dtype)).double()
        moved = interaction * layer.sign.double()[:, None, None]
        return interaction / layer.temperature, path * preconditioner @ moved
    value = key if layer.value_weight is None else layer.value_weight.double()
    output = query if layer.output_weight is None else layer.output_weight.double()
    gain = layer.norm.weight.double()
    return (query * gain).mT @ (key * gain) / layer.head_dim**0.5, output.mT @ (value * gain)
