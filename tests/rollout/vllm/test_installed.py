"""Without a vLLM, or with a broken one, the user reads one line."""

import logging
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


@pytest.mark.parametrize(("level", "told"), [(None, []), ("info", ["of no use"])])
def test_what_vllm_says_while_it_is_imported_is_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, level: str | None, told: list[str]
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "v1" / "engine" / "async_llm.py").touch()
    (tmp_path / "vllm" / "__init__.py").write_text("import logging; logging.getLogger('vllm.part').info('of no use')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    logger = logging.getLogger("vllm")
    before = logger.level
    caplog.set_level(logging.INFO)
    try:
        import_vllm()
    finally:
        logger.setLevel(before)
        for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    assert caplog.messages == told
