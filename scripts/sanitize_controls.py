"""Kernels that tell whether racecheck knows the order that barriers make: what `scripts/sanitize.py` runs before its cases.

Of one kind, 64 threads (or one) write a word each and arrive at an mbarrier, and another warp, or one lane of it, waits there and reads
them. Of the other, a warp writes, `__syncthreads` follows, then a wait at an mbarrier that the other block of a cluster fills (as in decode), and another
warp reads. All are free of races by the order that PTX defines. If racecheck calls one of them a race, it does not know that order.
"""

from __future__ import annotations

import ctypes

import torch

from qerl.kernels.cuda import Kernel, Launch, architecture, compile_cuda

CONTROLS = {
    "control_of_one": {"ARRIVALS": 1, "READERS": 1},
    "control_of_64": {"ARRIVALS": 64, "READERS": 1},
    "control_of_a_warp": {"ARRIVALS": 64, "READERS": 32},
    "control_of_sums": {},
}
"""Control -> its macros: threads that arrive, and lanes that wait and read."""
EXPLAINED = {
    "control_of_one": ("decode", "middle"),
    "control_of_64": ("decode", "middle"),
    "control_of_a_warp": ("middle",),
    "control_of_sums": ("decode",),
}
"""Control -> the kernels whose reports say nothing if it is reported, since they are built on the order that it shows."""
CONTROL_SOURCE = r"""
extern "C" __global__ void NAME(const __grid_constant__ unsigned long long out) {
  __shared__ int values[ARRIVALS];
  __shared__ unsigned long long barrier;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "n"(ARRIVALS) : "memory");
  __syncthreads();
  if (threadIdx.x < ARRIVALS) {
    static_cast<volatile int*>(values)[threadIdx.x] = 1;
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  } else if (threadIdx.x >= 64 && threadIdx.x < 64 + READERS) {
    unsigned done = 0;
    while (!done)
      asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done) : "r"(address) : "memory");
    int sum = 0;
    for (int i = 0; i < ARRIVALS; ++i) sum += static_cast<volatile int*>(values)[i];
    if (threadIdx.x == 64) *reinterpret_cast<int*>(out) = sum;
  }
}
"""
SUMS_SOURCE = r"""
extern "C" __global__ void NAME(const __grid_constant__ unsigned long long out) {
  __shared__ int values[32];
  __shared__ __align__(16) int pushed[4];
  __shared__ unsigned long long barrier;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x == 32) {
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(pushed));
    unsigned rank, there, count;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(address) : "memory");
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank ^ 1));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(count) : "r"(address), "r"(rank ^ 1));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1,%1,%1,%1}, [%2];" ::"r"(there), "r"(1), "r"(count)
                 : "memory");
  }
  if (threadIdx.x >= 64) static_cast<volatile int*>(values)[threadIdx.x - 64] = 1;
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(address) : "memory");
  if (threadIdx.x < 32) {
    int sum = static_cast<volatile int*>(values)[threadIdx.x] + static_cast<volatile int*>(pushed)[threadIdx.x & 3];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x == 0) *reinterpret_cast<int*>(out) = sum;
  }
}
"""


def source_of(name: str) -> str:
    """CUDA C++ of a control."""
    return (CONTROL_SOURCE if CONTROLS[name] else SUMS_SOURCE).replace("NAME", name)


class _Out(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


def control(name: str) -> None:
    """Words through shared memory, from one warp or two to another."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    macros = CONTROLS[name]
    code = compile_cuda(source_of(name), name=name, arch=architecture(out.device), defines=macros)
    blocks = 1 if macros else 2
    Kernel(code, name).launch(Launch(grid=blocks, block=96, cluster=blocks), _Out(out.data_ptr()))
    assert out.item() == macros.get("ARRIVALS", 64)
