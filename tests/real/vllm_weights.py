"""Runs in vLLM's environment: weights as vLLM's own functions quantize and pack them, read by k16v8.

python -m tests.real.vllm_weights ANSWER.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import torch
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    from k16v8.kernels import torch_weights, weights

    torch.manual_seed(0)
    said = {}
    for inputs, outputs, group in ((256, 64, 32), (256, 64, 64), (384, 136, 128), (256, 64, 256)):
        dense, x, groups = torch.randn(inputs, outputs), torch.randn(5, inputs), inputs // group
        exact, codes, scales, zeros = quant_utils.quantize_weights(dense, scalar_types.uint4, group, zero_points=True)
        words = quant_utils.awq_pack(codes, 4, inputs, outputs)
        zero_words = quant_utils.awq_pack(zeros, 4, groups, outputs)
        ours = {"awq": (weights.awq(words, zero_words, scales, group), exact)}

        # zero points of 8, of which version 1 stores 7
        exact, codes, scales = quant_utils.gptq_quantize_weights(dense, scalar_types.uint4b8, group)
        words = quant_utils.gptq_pack(codes, 4, inputs, outputs)
        zero_words = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
        ours["gptq"] = (weights.gptq(words, zero_words, scales, group), exact)

        # rows whose groups lie scattered, as an activation order leaves them
        order = torch.randperm(inputs)
        words = quant_utils.gptq_pack(codes[order], 4, inputs, outputs)
        ours["g_idx"] = (weights.gptq(words, zero_words, scales, group, (order // group).int()), exact[order])
        for name, (weight, wanted) in ours.items():
            found = torch_weights.matmul(x, weight).double()
            product = x.double() @ wanted.double()
            said[f"{name} {inputs}x{outputs}/{group}"] = {
                "equal": torch.equal(weights.dequantize(weight), wanted),
                "relative_l2": float((found - product).norm() / product.norm()),
            }
    Path(sys.argv[1]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
