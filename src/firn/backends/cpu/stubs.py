"""Two x86-64 functions between MLX and a library, which pass some calls on to a faster function.

Single rows: a decode step multiplies one row by weight matrices. OpenBLAS's sgemm packs the whole matrix
before it multiplies, three times the memory traffic of sgemv, which reads it once. (On ARM, OpenBLAS
itself calls sgemv for them.)

Powers of two: MLX computes them with powf, which takes twice as long as exp2f for the same bits.

MLX calls sgemm and powf, so the choice is made in front of those, by a few instructions in a page
of their own: running firn should not require a compiler.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct

MAP_FAILED = ctypes.c_void_p(-1).value

# sgemm: edi order, esi transA, edx transB, ecx M, r8d N, r9d K, xmm0 alpha, xmm1 beta,
#        stack A, lda, B, ldb, C, ldc
# sgemv: edi order, esi trans, edx rows, ecx columns, xmm0 alpha, xmm1 beta, r8 matrix, r9d its lda,
#        stack x, incx, y, incy
_ONE_ROW = """
    83 f9 01                    cmp  ecx, 1             one row,
    75 62                       jne  other
    83 ff 65                    cmp  edi, 101           row-major,
    75 5d                       jne  other
    83 fe 6f                    cmp  esi, 111           as it lies: its values are in a row
    75 58                       jne  other
    48 83 ec 28                 sub  rsp, 40            four arguments, and the stack stays aligned
    48 8b 44 24 30              mov  rax, [rsp+48]      x = A
    48 89 04 24                 mov  [rsp], rax
    48 c7 44 24 08 01 00 00 00  mov  qword [rsp+8], 1   incx
    48 8b 44 24 50              mov  rax, [rsp+80]      y = C
    48 89 44 24 10              mov  [rsp+16], rax
    48 c7 44 24 18 01 00 00 00  mov  qword [rsp+24], 1  incy
    be df 00 00 00              mov  esi, 223           trans = 223 - transB: the other of 111, 112
    29 d6                       sub  esi, edx
    83 fa 70                    cmp  edx, 112
    44 89 c2                    mov  edx, r8d           transposed, B is N x K as it lies
    44 89 c9                    mov  ecx, r9d
    74 02                       je   +2
    87 d1                       xchg edx, ecx           else K x N
    4c 8b 44 24 40              mov  r8, [rsp+64]       matrix = B
    44 8b 4c 24 48              mov  r9d, [rsp+72]      ldb
    48 b8 @sgemv                mov  rax, sgemv
    ff d0                       call rax
    48 83 c4 28                 add  rsp, 40
    c3                          ret
    48 b8 @sgemm                mov  rax, sgemm         other:
    ff e0                       jmp  rax
"""
# powf: xmm0 base, xmm1 exponent; exp2f: xmm0 exponent
_POWER_OF_TWO = """
    66 0f 7e c0                 movd eax, xmm0
    3d 00 00 00 40              cmp  eax, 2.0f
    75 0f                       jne  other
    0f 28 c1                    movaps xmm0, xmm1
    48 b8 @exp2f                mov  rax, exp2f
    ff e0                       jmp  rax
    48 b8 @powf                 mov  rax, powf          other:
    ff e0                       jmp  rax
"""
N_CODE_COLUMNS = 32


def can_run() -> bool:
    return platform.machine() == "x86_64"


def sgemm_by_rows(*, sgemm: int, sgemv: int) -> int:
    """The address of a cblas_sgemm that passes single rows to cblas_sgemv. Raises OSError."""
    return _executable(_assemble(_ONE_ROW, {"@sgemm": sgemm, "@sgemv": sgemv}))


def powf_of_two(*, powf: int, exp2f: int) -> int:
    """The address of a powf that passes powers of two to exp2f. Raises OSError."""
    return _executable(_assemble(_POWER_OF_TWO, {"@powf": powf, "@exp2f": exp2f}))


def _assemble(listing: str, addresses: dict[str, int]) -> bytes:
    """The bytes of a listing, with addresses in place of names."""
    code = b""
    for line in listing.splitlines():
        for field in line[:N_CODE_COLUMNS].split():
            code += struct.pack("<Q", addresses[field]) if field[0] == "@" else bytes.fromhex(field)
    return code


def _executable(code: bytes) -> int:
    """The address of memory that holds this code. Never freed: MLX may call it until the process ends.

    Raises OSError where processes may not allocate executable memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(None, mmap.PAGESIZE, rights, flags, -1, 0)
    if page in (None, MAP_FAILED):
        raise OSError(ctypes.get_errno(), "no memory for a function")
    ctypes.memmove(page, code, len(code))
    if libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "no executable memory")
    return int(page)
