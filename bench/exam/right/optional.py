"""Kernels of other packages through NumPy, registered only where the package is installed.

DOMAIN: forward only (an input that requires grad raises NotImplementedError), no dropout, CPU.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from .core import INF, Call, right

LARGE = 1e30


def _arrays(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values with all heads as float32 arrays."""
    if call.q.dtype == torch.float64:
        raise NotImplementedError("no float64")
    q, k, v = call.inputs()
    q_, k_, v_ = (np.ascontiguousarray(t.detach().numpy()) for t in (q, k, v))
    return q_, k_, v_


def _bias(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The finite part of all masks, where rows attend, and which rows are dead; as full arrays."""
    merged = call.merged()
    if merged is None:
        merged = torch.zeros(call.q.shape[0], call.q.shape[1], call.rows, call.keys)
    merged = merged.detach()
    open_ = merged > -INF
    finite = merged.masked_fill(~open_, 0.0)
    if bool((finite.abs() > LARGE).any()):
        raise NotImplementedError("a finite mask beyond 1e30")
    return finite.numpy(), open_.numpy(), ~open_.any(-1, keepdim=True).numpy()


if find_spec("jax") is not None:

    @right(
        gradients=False,
        double_backward=False,
        dropout=False,
        compile=False,
        note="jax.nn.dot_product_attention; DOMAIN: forward only, no float64, finite masks up to 1e30",
    )
    def jax_attention(call: Call) -> Tensor:
        """JAX's dot_product_attention, in float32."""
        import jax
        import jax.numpy as jnp

        q, k, v = _arrays(call)
        d, d_v = q.shape[-1], v.shape[-1]
        width = max(d, d_v)
        q, k = (np.pad(t, ((0, 0),) * 3 + ((0, width - d),)) for t in (q, k))
        v = np.pad(v, ((0, 0),) * 3 + ((0, width - d_v),))
        finite, open_, dead = _bias(call)
        q, k, v = (jnp.asarray(t.swapaxes(1, 2)) for t in (q, k, v))
        with jax.default_matmul_precision("highest"):
            out = jax.nn.dot_product_attention(
                q, k, v, bias=jnp.asarray(finite), mask=jnp.asarray(open_), scale=call.scale, implementation="xla"
            )
        result = np.where(dead, np.float32(0), np.asarray(out).swapaxes(1, 2))[..., :d_v]
        return call.out(torch.from_numpy(np.array(result, dtype=np.float32)))


if find_spec("onnxruntime") is not None and find_spec("onnx") is not None:

    @right(
        gradients=False,
        double_backward=False,
        dropout=False,
        compile=False,
        note="an ONNX graph (MatMul, Mul, Add, Softmax, MatMul) in ONNX Runtime; DOMAIN: forward only, no float64",
    )
    def onnx_attention(call: Call) -> Tensor:
        """The definition as an ONNX graph in ONNX Runtime, in float32."""
        import onnxruntime
        from onnx import TensorProto, helper

        q, k, v = _arrays(call)
        finite, open_, dead = _bias(call)
        bias = np.where(open_ | dead, finite, np.float32(-INF)).astype(np.float32)
        names = {"q": q, "kt": np.ascontiguousarray(k.swapaxes(-1, -2)), "v": v, "bias": bias}
        names["scale"] = np.array(call.scale, dtype=np.float32)
        nodes = [
            helper.make_node("MatMul", ["q", "kt"], ["raw"]),
            helper.make_node("Mul", ["raw", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "bias"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
            helper.make_node("MatMul", ["weights", "v"], ["out"]),
        ]
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(a.shape)) for n, a in names.items()]
        outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [*q.shape[:-1], v.shape[-1]])]
        graph = helper.make_graph(nodes, "attention", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        out = np.where(dead, np.float32(0), session.run(["out"], names)[0])
        return call.out(torch.from_numpy(np.array(out, dtype=np.float32)))
