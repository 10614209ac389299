"""Without a vLLM, or with a broken one, the user reads one line."""

import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.vllm.installed import check_installed, import_vllm


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for function in (check_installed, import_vllm):
        with pytest.raises(ConfigError, match=r"not installed: pip install 'asyncrl\[vllm\]' .* make setup-vllm"):
            function()


@pytest.mark.parametrize("error", ["RuntimeError('operator torchvision::nms does not exist')", "ImportError('libcuda.so.1')"])
def test_a_vllm_that_cannot_be_imported_is_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    check_installed()
    with pytest.raises(ConfigError, match=error.partition("'")[2].rstrip("')")):
        import_vllm()
