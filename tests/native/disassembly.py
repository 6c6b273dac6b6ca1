"""What level of x86-64 instructions machine code needs, read from objdump's output.

In 64-bit code the encoding tells: after the prefixes, 0x62 begins an EVEX instruction (AVX-512) and 0xC4 or 0xC5 a
VEX one (AVX, AVX2, FMA, F16C); nothing else begins so.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

BASELINE, SSE, AVX2, AVX512, BF16, AMX, BEYOND = LEVELS = (
    "baseline", "above SSE2", "AVX2, FMA, F16C", "AVX-512 F BW DQ VL", "AVX-512 BF16", "AMX", "beyond all targets",
)  # fmt: skip
LEVEL_OF = {"portable": BASELINE, "avx2": AVX2, "avx512": AVX512, "avx512bf16": BF16, "amx": AMX}

PREFIXES = {0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3}
SSE3 = r"(popcnt|lzcnt|movddup|movs[hl]dup|v?h(add|sub)p[sd]|addsubp[sd]|lddqu|fisttp)"
BMI = r"(andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|s(ar|hl|hr)x)[lq]?"
BF = r"(vdpbf16ps|vcvtne2ps2bf16|vcvtneps2bf16)[xy]?"
TILES = r"(ldtilecfg|sttilecfg|tilerelease|tilezero|tileloaddt?1?|tilestored|tdpbf16ps)"
# Half floats, byte permutations, neural-network and bit-counting instructions: each a feature of its own.
OTHER = r"tdp\w+|"
OTHER += r"(?!vcvt(ph2ps|ps2ph))v\w+(ph|sh)|vperm[it]?2?b|vpdp\w+|vpopcnt[bwdq]|vpmadd52\w+|vp(compress|expand)[bw]"
LINE = re.compile(r"^\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*(?:\t(.*))?$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
OWNER = re.compile(r"8headwise(?:8(portable)|4(avx2)|6(avx512)|10(avx512bf16)|3(amx))(?![a-z])")


@cache  # the same instructions come again and again
def level(code: bytes, text: str) -> str:
    """What an instruction needs: its bytes, and objdump's words for it."""
    mnemonic = next(
        (word for word in text.split() if word not in ("rep", "repz", "repnz", "lock", "bnd", "notrack")), ""
    )
    start = 0
    while start < len(code) - 1 and code[start] in PREFIXES:
        start += 1
    first = code[start]
    if re.fullmatch(BF, mnemonic):
        return BF16
    if re.fullmatch(TILES, mnemonic):
        return AMX
    if re.fullmatch(OTHER, mnemonic):
        return BEYOND
    if first == 0x62 or (first in (0xC4, 0xC5) and re.search(r"%k[0-7]", text)):
        return AVX512
    if first in (0xC4, 0xC5):
        return BEYOND if re.fullmatch(BMI, mnemonic) else AVX2
    if 0x40 <= first <= 0x4F:  # REX
        start += 1
    longer_map = code[start : start + 2] in (b"\x0f\x38", b"\x0f\x3a")
    return SSE if longer_map or re.fullmatch(SSE3, mnemonic) else BASELINE


def functions(listing: str) -> dict[str, dict[str, str]]:
    """For each function in objdump's listing, the levels that it needs, each with one such instruction."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    name = "?"
    for line in listing.splitlines():
        if header := FUNCTION.match(line):
            name = header[1]
        elif (instruction := LINE.match(line)) and instruction[2]:  # a line without words goes on with the bytes
            found[name].setdefault(level(bytes.fromhex(instruction[1]), instruction[2]), instruction[2])
    return dict(found)


def too_high(found: dict[str, dict[str, str]], limit: str) -> list[str]:
    """Of `functions`, those that need more than `limit`, as "function: instruction (level)"."""
    allowed = LEVELS[: LEVELS.index(limit) + 1]
    return [
        f"{name}: {text} ({needed})"
        for name, needs in found.items()
        for needed, text in needs.items()
        if needed not in allowed
    ]


def owner(function: str) -> str | None:
    """The target in whose namespace a mangled name lies, or None."""
    found = OWNER.search(function)
    return found[found.lastindex] if found and found.lastindex else None


def disassemble(path: Path) -> str:
    """objdump's listing of all code in a file; skips where there is no objdump for this code."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump (binutils) is not installed")
    done = subprocess.run([objdump, "-d", "--insn-width=16", str(path)], capture_output=True, text=True, check=True)
    if "x86-64" not in done.stdout:
        pytest.skip("the levels of instructions are x86-64's, and this is another processor")
    return done.stdout
