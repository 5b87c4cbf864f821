"""NVRTC's programs: what is left of one that does not compile."""

from __future__ import annotations

from typing import Any

import pytest

nvrtc = pytest.importorskip("packed_kv.kernels.cuda.nvrtc")

from packed_kv.kernels.cuda.source import Source  # noqa: E402


@pytest.mark.parametrize(("text", "compiles"), [("__global__ void kernel() {}", True), ("no C++", False)])
def test_programs_are_destroyed(text: str, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with an error."""
    library, made, destroyed = nvrtc.nvrtc, [], []
    create, destroy = library.nvrtcCreateProgram, library.nvrtcDestroyProgram

    def note(*arguments: Any) -> Any:
        found = create(*arguments)
        made.append(int(found[1]))
        return found

    monkeypatch.setattr(library, "nvrtcCreateProgram", note)
    monkeypatch.setattr(library, "nvrtcDestroyProgram", lambda x: destroyed.append(int(x)) or destroy(x))
    source = Source("kernel.cu", (), ("kernel",), "sm_90")
    options = ("--gpu-architecture=sm_90", *nvrtc.OPTIONS)
    if compiles:
        assert nvrtc._compile(source, {"kernel.cu": text}, options)
    else:
        with pytest.raises(nvrtc.CompileError, match="NVRTC_ERROR_COMPILATION"):
            nvrtc._compile(source, {"kernel.cu": text}, options)
    assert len(made) == 1 and destroyed == made
