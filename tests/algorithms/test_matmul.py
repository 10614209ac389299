"""The fast products' memory does not grow with the number of shapes they have seen."""

import subprocess
import sys
import textwrap

import pytest

from asyncrl.algorithms.matmul import HAS_ONEDNN


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch has no oneDNN here: the plain products keep no kernels")
def test_kernels_of_old_shapes_are_forgotten() -> None:
    program = textwrap.dedent("""
        import resource
        import torch
        from asyncrl.algorithms.matmul import linear

        def megabytes():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

        torch.set_num_threads(1)
        weight = torch.randn(192, 64)
        for rows in range(500, 600):
            linear(torch.randn(rows, 64), weight)
        before = megabytes()
        for rows in range(600, 1000):
            linear(torch.randn(rows, 64), weight)
        print(megabytes() - before)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert float(done.stdout) < 100, "400 shapes more took 400 MB before the caches were bounded"
