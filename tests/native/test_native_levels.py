"""No instruction runs on a CPU that lacks it: each target's code stays within its level, and all else within SSE2."""

from pathlib import Path

import pytest
from disassembly import (
    AMX,
    AVX2,
    AVX512,
    BASELINE,
    BEYOND,
    BF16,
    LEVEL_OF,
    SSE,
    disassemble,
    functions,
    level,
    owner,
    too_high,
)

from headwise.kernels.cpu.library import NAME

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "native" / "CMakeFiles"
LIBRARY = ROOT / "src" / "headwise" / "kernels" / "cpu" / NAME


@pytest.mark.parametrize(
    ("code", "text", "needed"),
    [
        ("0f 58 c1", "addps  %xmm1,%xmm0", BASELINE),
        ("48 0f af c7", "imul   %rdi,%rax", BASELINE),
        ("f3 0f bc c7", "tzcnt  %edi,%eax", BASELINE),  # older CPUs read it as bsf, and compilers rely on that
        ("f3 0f b8 c7", "popcnt %edi,%eax", SSE),
        ("66 0f 38 00 c1", "pshufb %xmm1,%xmm0", SSE),
        ("66 41 0f 3a 0f c0 08", "palignr $0x8,%xmm8,%xmm0", SSE),
        ("f3 0f 16 c0", "movshdup %xmm0,%xmm0", SSE),
        ("c5 f8 58 c1", "vaddps %xmm1,%xmm0,%xmm0", AVX2),
        ("c4 e2 75 b8 c2", "vfmadd231ps %ymm2,%ymm1,%ymm0", AVX2),
        ("c4 e2 79 13 c0", "vcvtph2ps %xmm0,%xmm0", AVX2),
        ("c4 e2 f0 f2 c7", "andn   %rdi,%rcx,%rax", BEYOND),
        ("c5 f8 92 c8", "kmovw  %eax,%k1", AVX512),
        ("62 f1 7c 48 58 c1", "vaddps %zmm1,%zmm0,%zmm0", AVX512),
        ("62 f2 76 48 52 c2", "vdpbf16ps %zmm2,%zmm1,%zmm0", BF16),
        ("62 f2 7e 48 72 c0", "vcvtneps2bf16 %zmm0,%ymm0", BF16),
        ("c4 e2 6a 5c c1", "tdpbf16ps %tmm2,%tmm1,%tmm0", AMX),
        ("c4 e2 78 49 00", "ldtilecfg (%rax)", AMX),
        ("c4 e2 73 5e c2", "tdpbssd %tmm1,%tmm2,%tmm0", BEYOND),
        ("62 f5 7c 48 58 c1", "vaddph %zmm1,%zmm0,%zmm0", BEYOND),
        ("62 f2 7d 48 50 c1", "vpdpbusd %zmm1,%zmm0,%zmm0", BEYOND),
    ],
)
def test_levels_are_told_apart(code: str, text: str, needed: str) -> None:
    assert level(bytes.fromhex(code), text) == needed
    listing = f"0000000000000000 <f>:\n   0:\t{code} \t{text}\n"
    found = functions(listing)
    assert found == {"f": {needed: text}}
    assert too_high(found, needed) == []
    assert (too_high(found, BASELINE) == []) == (needed == BASELINE)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("_ZN8headwise4avx27forwardEv", "avx2"),
        ("_ZN8headwise6avx512L3sumEDv16_f", "avx512"),
        ("_ZN8headwise10avx512bf16L3sumEDv16_f.constprop.0", "avx512bf16"),
        ("_ZN8headwise3amx8backwardEv", "amx"),
        ("_ZN8headwise8portable12_GLOBAL__N_13runEv", "portable"),
        ("_ZN8headwise5chooseEv", None),
        ("_ZSt3maxIfERKT_S2_S2_", None),
    ],
)
def test_functions_have_owners(name: str, target: str | None) -> None:
    assert owner(name) == target


@pytest.mark.thorough
@pytest.mark.parametrize("target", LEVEL_OF)
def test_objects_stay_within_their_target(target: str) -> None:
    files = sorted((OBJECTS / f"headwise_{target}.dir").rglob("*.o"))
    if not files:
        pytest.skip(f"no object files of {target}: `make native` compiles, if the compiler knows that target")
    found = [functions(disassemble(file)) for file in files]
    assert [line for one in found for line in too_high(one, LEVEL_OF[target])] == []
    # It is also worth its name: the flags reached the compiler, and the code uses what they allow.
    used = {needed for one in found for needs in one.values() for needed in needs}
    assert LEVEL_OF[target] in used


def test_dispatch_runs_on_any_cpu() -> None:
    files = sorted((OBJECTS / "headwise.dir").rglob("*.o"))
    if not files:
        pytest.skip("no object files: `make native` compiles them")
    assert [line for file in files for line in too_high(functions(disassemble(file)), BASELINE)] == []


@pytest.mark.thorough
def test_library_uses_vectors_in_their_namespaces_only() -> None:
    """An inline function that two targets share is linked once, from any of them: so none may be shared."""
    if not LIBRARY.exists():
        pytest.skip(f"there is no {NAME}: `make native` compiles it")
    found = functions(disassemble(LIBRARY))
    if {owner(name) for name in found} == {None}:
        pytest.skip("the library's symbols are stripped")
    wrong = [line for name, needs in found.items()
             for line in too_high({name: needs}, LEVEL_OF.get(owner(name) or "", BASELINE))]  # fmt: skip
    assert wrong == []
