"""A CUDA driver without a card: `libcuda.so.1` built from the source below, which loads kernels, writes down how they are
started and runs none of them. It shows what Triton's own launcher, compiled C, hands to the driver.

Like a driver it refuses what a card would refuse: no current context, a kernel of another device's context, a grid or block
out of range, more shared memory than was asked for when the kernel was loaded. How many parameters a kernel has, and of what
size, it reads where a driver reads it: in the kernel's machine code.
"""

import ctypes
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path
from typing import NamedTuple

import torch

LIMITS = (
    166912,
    166912,
    11264,
    1024,
    232448,
)  # shared memory of a block on each device: two of one kind, two small ones, a new one
CAPABILITIES = ((8, 0), (8, 0), (8, 0), (8, 0), (9, 0))
STREAM = 4096  # torch's current stream on device d is STREAM + d
first_device = 0  # which a thread begins on

SOURCE = """
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct Context { int device; } *CUcontext;
typedef struct Module { CUcontext context; const char *image; } *CUmodule;
typedef struct Function {
  CUcontext context;
  char name[256];
  int count, dynamic_shared, size[256];
} *CUfunction;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned attribute_count;
} CUlaunchConfig;

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_SUPPORTED = 801 };
enum { ALWAYS_SHARED = 48 * 1024 };

static const int limits[] = {LIMITS};
enum { DEVICES = sizeof limits / sizeof *limits };
static struct Context contexts[DEVICES];
static _Thread_local CUcontext current;

CUresult cuInit(unsigned flags) { return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  static _Thread_local char message[64];
  snprintf(message, sizeof message, "refused by the stub driver with error %d", error);
  *text = message;
  return SUCCESS;
}
CUresult cuDeviceGetCount(int *count) { *count = DEVICES; return SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < DEVICES ? SUCCESS : INVALID_VALUE;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  switch (attribute) {
  case 10: *value = 32; break;              /* threads of a warp */
  case 12: *value = 65536; break;           /* registers of a block */
  case 13: case 36: *value = 1410000; break; /* clocks, kHz */
  case 16: *value = 108; break;             /* multiprocessors */
  case 37: *value = 5120; break;            /* bits of the memory bus */
  case 75: *value = device < 4 ? 8 : 9; break; /* compute capability */
  case 76: *value = 0; break;
  case 81: *value = limits[device] + 1024; break; /* shared memory of a multiprocessor */
  case 97: *value = limits[device]; break;  /* and of a block that asks for it */
  default: return INVALID_VALUE;
  }
  return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  contexts[device].device = device;
  *context = &contexts[device];
  return SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current ? current->device : -1;
  return current ? SUCCESS : INVALID_CONTEXT;
}
CUresult cuCtxGetLimit(size_t *value, int limit) { *value = 0; return SUCCESS; }
CUresult cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (!current) return INVALID_CONTEXT;
  *module = malloc(sizeof **module);
  (*module)->context = current;
  (*module)->image = image;
  return SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return SUCCESS; }

/* Sizes of a kernel's parameters, from the records of its section .nv.info: each has a format, a kind and two bytes, which are
   the length of what follows in format 4. Kind 23 describes a parameter: its ordinal in bytes 4-5, its size in bits 18-31 of the
   last word. */
static void read_parameters(CUfunction function, const char *image) {
  const Elf64_Ehdr *header = (const void *)image;
  const Elf64_Shdr *section = (const void *)(image + header->e_shoff);
  const char *names = image + section[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++) {
    const char *name = names + section[i].sh_name;
    if (strncmp(name, ".nv.info.", 9) || strcmp(name + 9, function->name)) continue;
    const char *at = image + section[i].sh_offset, *end = at + section[i].sh_size;
    while (at < end) {
      uint16_t length, ordinal;
      uint32_t bits;
      memcpy(&length, at + 2, 2);
      if (at[0] == 4 && at[1] == 23) {
        memcpy(&ordinal, at + 8, 2);
        memcpy(&bits, at + 12, 4);
        function->size[ordinal] = bits >> 18;
        if (ordinal >= function->count) function->count = ordinal + 1;
      }
      at += 4 + (at[0] == 4 ? length : 0);
    }
  }
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = calloc(1, sizeof **function);
  (*function)->context = module->context;
  snprintf((*function)->name, sizeof (*function)->name, "%s", name);
  read_parameters(*function, module->image);
  return (*function)->count ? SUCCESS : INVALID_HANDLE;
}
CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 128 : 0; /* threads of a block; registers; static and local memory */
  return SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  if (attribute != 8 || value > limits[function->context->device]) return INVALID_VALUE;
  function->dynamic_shared = value;
  return SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, int config) { return SUCCESS; }
CUresult cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  if (attribute != 3) return INVALID_VALUE;
  memcpy(value, &pointer, sizeof pointer); /* the host's memory stands in for the device's */
  return SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const unsigned *grid = config->grid, *block = config->block;
  unsigned shared = function->dynamic_shared > ALWAYS_SHARED ? function->dynamic_shared : ALWAYS_SHARED;
  if (!current) return INVALID_CONTEXT;
  if (current != function->context) return INVALID_HANDLE;
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535) return INVALID_VALUE;
  if (block[0] * block[1] * block[2] > 1024 || config->shared > shared) return INVALID_VALUE;
  const char *path = getenv("STUB_CUDA_LOG");
  if (!path) return SUCCESS;
  FILE *log = fopen(path, "a");
  fprintf(log, "%s %d %u %u %u %u %u %u %u %llu", function->name, current->device, grid[0], grid[1], grid[2], block[0],
          block[1], block[2], config->shared, (unsigned long long)(uintptr_t)config->stream);
  for (int i = 0; i < function->count; i++) {
    fputc(' ', log);
    for (int j = 0; j < function->size[i]; j++) fprintf(log, "%02x", ((unsigned char *)parameters[i])[j]);
  }
  fputc('\\n', log);
  return fclose(log) ? INVALID_VALUE : SUCCESS;
}

/* Triton links or looks these up, and these tests never get there. */
CUresult cuStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { return NOT_SUPPORTED; }

/* A descriptor of four dims, written as it was asked for: address, sizes, strides in bytes, box, type, rank. */
CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int promotion, int fill) {
  if (!current) return INVALID_CONTEXT;
  char *at = memset(map, 0, 128);
  if (rank != 4 || (uintptr_t)address % 16) return INVALID_VALUE;
  for (int i = 0; i < 4; i++) {
    if (!sizes[i] || !box[i] || box[i] > 256 || (i < 3 && (strides[i] % 16 || !strides[i]))) return INVALID_VALUE;
  }
  memcpy(at, &address, 8);
  memcpy(at + 8, sizes, 32);
  memcpy(at + 40, strides, 24);
  memcpy(at + 64, box, 16);
  memcpy(at + 80, &type, 4);
  memcpy(at + 84, &rank, 4);
  return SUCCESS;
}
CUresult cuTensorMapEncodeIm2col() { return NOT_SUPPORTED; }
"""


class Start(NamedTuple):
    """One kernel start as the driver saw it; `parameters` are the bytes of each."""

    name: str
    device: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    parameters: list[bytes]


def compiler() -> str | None:
    """The C compiler that Triton would find too, None where it cannot build an extension of Python."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return (shutil.which("gcc") or shutil.which("clang")) if header.exists() else None


def build(folder: Path) -> None:
    """Put libcuda.so.1 into a folder."""
    source = folder / "stub.c"
    source.write_text(SOURCE.replace("{LIMITS}", "{" + ", ".join(map(str, LIMITS)) + "}"))
    target = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([str(compiler()), "-O1", "-w", str(source), *target], check=True)


def environment(folder: Path) -> dict[str, str]:
    """What a process must be started with, for its driver to be the one in this folder."""
    return {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "STUB_CUDA_LOG": str(folder / "starts")}


def starts(log: Path) -> list[Start]:
    """The starts that a log holds."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else []:
        name, *words = line.split()
        n = [int(word) for word in words[:9]]
        parameters = [bytes.fromhex(word) for word in words[9:]]
        found.append(Start(name, n[0], tuple(n[1:4]), tuple(n[4:7]), n[7], n[8], parameters))
    return found


def pretend() -> None:
    """Let torch.cuda answer as it would on this driver's devices: only what torch.cuda.device and Triton ask of it."""
    driver, context, own = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), threading.local()

    def current_device() -> int:
        return getattr(own, "device", first_device)

    def exchange(index: int) -> int:
        before, own.device = current_device(), index
        if index != before:  # as the runtime does: a thread that begins on the device it wants has no context yet
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
            driver.cuCtxSetCurrent(context)
        return before

    def capability(index: int | None = None) -> tuple[int, int]:
        return CAPABILITIES[current_device() if index is None else index]

    # By name: the stand-ins take less than what they stand for.
    for name, answer in (
        ("is_available", lambda: True),
        ("current_device", current_device),
        ("get_device_capability", capability),
        ("_exchange_device", exchange),
        ("_maybe_exchange_device", exchange),
    ):
        setattr(torch.cuda, name, answer)
    setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index)  # noqa: B010
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxSetCurrent(context)
