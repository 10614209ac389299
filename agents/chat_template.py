"""ChatTemplate: the model's own chat template, applied to the initial prompt and to what the environment adds; never to history.

Place: model folder -> [chat_template] -> token_builder, dataset (prompt lengths), sft.

Rules:
1. `prompt_ids` is exactly what `apply_chat_template` with generation prompt gives: the initial messages are the operator's own.
2. `environment_ids` renders `[user, assistant MARK, *messages]` with the generation prompt and keeps what follows the end token of
   MARK's turn. Neither the history nor a prefix-stable template is needed, and the separator after the end token (a newline in
   ChatML) belongs to the environment.
3. Text of environment messages never yields a control token (see text_codec).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrl.agents.text_codec import TextCodec, choose_guard
from asyncrl.config import ModelConfig
from asyncrl.errors import ModelError
from asyncrl.ports import Json, Messages
from asyncrl.wording import message_of

_MARK = "\U0010fc00reply\U0010fc01"
"""Content of the assistant turn that stands in for the sampled one; private-use characters keep it out of every real text."""
_PROBE: Messages = [{"role": "user", "content": "x"}]
_RESULT = "probe 7"


class ChatTemplate:
    """Template, tool schemas and template variables of one run. Safe to call from any thread."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        tool_schemas: Sequence[Json] = (),
        kwargs: dict[str, Json] | None = None,
        template: str | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Raises ModelError when the template fails on plain messages, has no end token, or ignores the tools it is given."""
        self.codec = codec
        self._schemas = list(tool_schemas) or None
        self._kwargs = dict(kwargs or {})
        self._template = template
        self.end_token, self.end_token_id = self._find_end_token()
        eos = codec.tokenizer.eos_token_id
        extra = [*([eos] if isinstance(eos, int) else []), *stop_token_ids]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([self.end_token_id, *extra]))
        """Each ends a turn: the template's end token first, then the tokenizer's and the model's own."""
        if self._schemas:
            self._refuse_silent_tools()
        self._environment_schemas = self._schemas if self._shows_tools_after_a_turn() else None

    def prepare(self) -> None:
        """Build what the first encoding would build: blocking."""
        self.codec.prepare()

    def token_id(self, text: str) -> int | None:
        """The control token spelled `text`, None when the model has none."""
        return self.codec.token_id(text)

    # --- text -> ids ------------------------------------------------------------------------------------------------------------

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Ids of the initial messages, tool schemas and generation prompt. Raises ModelError when they cannot be rendered."""
        return self.codec.encode(self.prompt_text(messages))

    def prompt_text(self, messages: Messages) -> str:
        """What `prompt_ids` tokenises, for people."""
        return self._render(messages, self._schemas)

    def environment_ids(self, messages: Messages) -> list[int]:
        """Ids that follow the end token of an assistant turn: `messages` rendered together, then the next generation prompt.

        About 0.1 ms for short messages, 1 ms for 5,000 characters. Raises ModelError when the template refuses them.
        """
        clean = [_without_surrogates(message) for message in messages]
        mark = choose_guard(json.dumps(clean, ensure_ascii=False))
        return self.codec.encode_rendered(self._environment_text(clean, mark), mark)

    def encode_assistant(self, text: str, *, end: bool = True) -> list[int]:
        """Ids of an assistant turn as a policy would sample it, with its end token; for demonstrations. Control tokens count."""
        return self.codec.encode(text) + ([self.end_token_id] if end else [])

    # --- ids -> text ------------------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids. `skip_special` leaves out tokens marked special (`<|im_end|>`), not those like Qwen's `<tool_call>`."""
        return self.codec.decode(ids, skip_special=skip_special)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn without the stop token at its end; everything else that was sampled is shown."""
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        return self.codec.decode(ids[:-1] if ended else ids)

    # --- probes -----------------------------------------------------------------------------------------------------------------

    def check_tool_role(self) -> None:
        """Raises ModelError when the template refuses or drops a message of role `tool`; the tool agent needs it."""
        if _RESULT not in self._environment_text([{"role": "tool", "name": "probe", "content": _RESULT}], _MARK):
            raise ModelError(f"{self._where()} drops messages of role 'tool'; set model.chat_template to a file that shows them")

    def _find_end_token(self) -> tuple[str, int]:
        text = self._render([*_PROBE, {"role": "assistant", "content": _MARK}, *_PROBE], None)
        after = text.partition(_MARK)[2]
        found = next(iter(self.codec.find_control(after, _MARK)), None)
        if found is None:
            raise ModelError(
                f"{self._where()} writes no end token after an assistant message; set model.chat_template to one that does"
            )
        return found[0], self.codec.control[found[0]]

    def _refuse_silent_tools(self) -> None:
        if self._render(_PROBE, self._schemas) == self._render(_PROBE, None):
            raise ModelError(
                f"{self._where()} ignores tools: the model would never see them; set model.chat_template to one that shows them"
            )

    def _shows_tools_after_a_turn(self) -> bool:
        """Do the tool schemas change what follows an assistant turn? Mostly not, and rendering without them takes half the time."""
        self._environment_schemas = self._schemas
        probes: list[Messages] = [[{"role": role, "content": _RESULT}] for role in ("tool", "user", "system")]
        with_tools = [self._probed(probe) for probe in probes]
        self._environment_schemas = None
        return [self._probed(probe) for probe in probes] != with_tools

    def _probed(self, messages: Messages) -> str:
        try:
            return self._environment_text(messages, _MARK)
        except ModelError as error:
            return f"refused: {error}"

    def _environment_text(self, messages: Messages, mark: str) -> str:
        guarded = [self.codec.guard_message(message, mark) for message in messages]
        text = self._render([*_PROBE, {"role": "assistant", "content": _MARK}, *guarded], self._environment_schemas)
        _, marked, after = text.partition(_MARK)
        found = next((found for found in self.codec.find_control(after, mark) if found[0] == self.end_token), None)
        if not marked or found is None:
            raise ModelError(f"{self._where()} drops the assistant's turn when other messages follow it")
        return after[found.end() :]

    def _render(self, messages: Messages, schemas: list[Json] | None) -> str:
        try:
            text = self.codec.tokenizer.apply_chat_template(
                messages, tools=schemas, chat_template=self._template, add_generation_prompt=True, tokenize=False, **self._kwargs
            )
        except Exception as error:  # a template is a program: it may divide by zero
            raise ModelError(
                f"{self._where()} cannot render roles {[m.get('role') for m in messages]}: {message_of(error)}"
            ) from error
        return str(text)

    def _where(self) -> str:
        return f"the chat template of {self.codec.tokenizer.name_or_path!r}"


def load_codec(folder: Path) -> TextCodec:
    """The tokenizer of a local folder. Raises ModelError; never asks a network."""
    if not folder.is_dir():
        raise ModelError(f"tokenizer folder {str(folder)!r} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust side raises bare Exceptions for a damaged file
        raise ModelError(f"tokenizer in {str(folder)!r} cannot be loaded: {message_of(error)}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    spec_file = folder / "tokenizer.json"
    return TextCodec(tokenizer, spec_file if spec_file.is_file() else None)


def load_chat_template(config: ModelConfig, tool_schemas: Sequence[Json] = ()) -> ChatTemplate:
    """Tokenizer and template of the configured model. Takes 1 to 5 s for a large vocabulary: call it before or off the loop.

    Raises ModelError with one line when a file is missing, the template has no end token, or it would silently ignore the tools.
    """
    codec = load_codec(Path(config.tokenizer_path or config.path))
    template = _template_file(config.chat_template) if config.chat_template else None
    if template is None and not codec.tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer in {config.tokenizer_path or config.path!r} has no chat template; set model.chat_template to a file"
        )
    loaded = ChatTemplate(
        codec,
        tool_schemas=tool_schemas,
        kwargs=dict(config.chat_template_kwargs),
        template=template,
        stop_token_ids=_model_stop_ids(Path(config.path)),
    )
    codec.prepare()
    if tool_schemas:
        loaded.check_tool_role()
    return loaded


def _template_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template = {path!r} cannot be read: {message_of(error)}") from error


def _model_stop_ids(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json: a model may end a turn with more tokens than its tokenizer says."""
    try:
        eos = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError):
        return []
    return [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]


def _without_surrogates(value: Json) -> Json:
    """Lone surrogates are no text: a tokenizer would raise on them. They become U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value
