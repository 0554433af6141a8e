"""GEMM backends that are not the project's: one that is right, and ones with a mistake each."""

import torch

from moe.grouped_gemm import TorchGemm


class Right(TorchGemm):
    """The reference under another name."""

    name = "own"


class LastColumnsDropped(TorchGemm):
    """Forgets the last 16 columns of every product, as a kernel without a tail tile does."""

    name = "dropped"

    def grouped_gemm_nt_contig(self, *args, **named):
        product = super().grouped_gemm_nt_contig(*args, **named)
        product[:, -16:] = 0
        return product


class Rounded(TorchGemm):
    """Promises fp32 sums and rounds every product to 8 bits twice."""

    name = "rounded"

    def grouped_gemm_nt_contig(self, *args, **named):
        product = super().grouped_gemm_nt_contig(*args, **named)
        return (product.to(torch.float32) * 1.01).to(torch.bfloat16)


class NoGemm:
    """Has a name, and nothing else."""

    name = "none"
